# SPDX-License-Identifier: Apache-2.0
"""A table of the kernel layouts of layer libraries: which dimensions are inputs."""

import dataclasses
import functools
import re
from typing import Literal, NamedTuple

import jax
from jax.tree_util import KeyPath

from boostax._core import checks, trees
from boostax._core.types import PyTree

LayoutName = Literal["linen", "nnx", "equinox", "haiku", "torch"]


class Layout(NamedTuple):
    """The shapes of a library's kernels, and the names of its params.

    Attributes:
      outputs: the dimension of a kernel's output units, the first or the last.
      transposed: the dimension of the output units in transposed convolutions.
      kernels: a substring of every kernel's name.
      vectors: names of leaves without input dimensions; names that end with ``bias`` or ``scale``
        need no entry.
      tables: substrings of the names of embedding modules.
    """

    outputs: int = -1
    transposed: int = -1
    kernels: str = ""
    vectors: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()


LAYOUTS: dict[LayoutName, Layout] = {
    "linen": Layout(),
    "nnx": Layout(),
    "equinox": Layout(0, 0, "weight", tables=("emb",)),
    "haiku": Layout(-1, -2, vectors=("b", "offset")),
    "torch": Layout(0, 1, "weight", tables=("emb", "wte", "wpe")),
}
# Flax splits the outputs of these kernels into heads: (in, heads, head_dim).
_HEADS = re.compile("(.*/)?(query|key|value)/kernel")
# The modules of Equinox with kernels; kernels of convolutions also have spatial dimensions.
_EQUINOX_KERNELS = {"Linear", "Conv", "ConvTranspose", "GRUCell", "LSTMCell"}
_EITHER = re.compile("(.*_)?weight(_.*)?")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels among the leaves of a tree, and the dimensions of their inputs.

    Attributes:
      name: the name of the layout. ``None`` recognises ``equinox.nn`` modules by their classes, and
        reads all other modules in the layout of Flax and Haiku. In these other modules, a
        ``weight`` is refused, because its outputs may be first or last.
      tree: the params, or a tree with the structure of the params.
    """

    name: LayoutName | None
    tree: PyTree

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of the tree, an element of the table."""
        modules = self.name is None and any(map(_classes, trees.state_nodes(self.tree)))
        return LAYOUTS["equinox" if modules else self.name or "linen"]

    def is_vector(self, path: KeyPath, ndim: int) -> bool:
        """Return whether a leaf has no inputs: a bias, a scale, a leaf of a norm."""
        leaf, classes = _parts(path)[-1], _classes(self._module(path), "nn.")
        named = leaf.endswith(("bias", "scale")) or leaf in self.layout.vectors
        norm = bool(classes) and classes.isdisjoint({*_EQUINOX_KERNELS, "Embedding"})
        return ndim < 2 or named or norm

    def inputs(self, path: KeyPath, ndim: int, lead: int = 0) -> tuple[int, ...]:
        """Return the input dimensions, the channels last; empty if a leaf is not a kernel.

        The first ``lead`` dimensions are stacked layers.
        """
        *modules, leaf = _parts(path)
        layout = self.layout
        module = self._module(path)
        if classes := _classes(module, "nn."):
            # Equinox stacks layers by vmap, which adds leading dimensions.
            lead = ndim - 2 - getattr(module, "num_spatial_dims", 0)
            table = classes.isdisjoint(_EQUINOX_KERNELS)
        else:
            word = modules[-1].lower() if modules else ""
            table = ndim - lead == 2 and any(x in word for x in layout.tables)
            table = table or leaf.endswith(("embedding", "embeddings"))
        if ndim - lead < 2 or layout.kernels not in leaf or table or self.is_vector(path, ndim):
            return ()
        transposed = any("transpose" in module.lower() for module in modules)
        either = _EITHER.fullmatch(leaf) or (transposed and leaf == "w")
        allowed = f"given if a kernel fits several layouts, as {trees.path_name(path)!r} does"
        hint = "Pass 'equinox' or 'torch' if axis 0 has outputs, or a rule for this leaf in axes=."
        ok = bool(self.name or classes or not either)
        checks.require(ok, "centralize_gradients", "layout", got=None, allowed=allowed, hint=hint)
        if layout == Layout() and ndim - lead == 3 and _HEADS.fullmatch("/".join(_parts(path))):
            return (lead,)
        outputs = layout.transposed if transposed else layout.outputs
        outputs += ndim if outputs < 0 else lead
        return self.ordered(tuple(dim for dim in range(lead, ndim) if dim != outputs))

    def ordered(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input dimensions in ascending order, but the channels last."""
        return dims if self.layout.outputs else (*dims[1:], *dims[:1])

    def _module(self, path: KeyPath) -> PyTree:
        """Return the module that contains a leaf, in a tree of Equinox modules; otherwise None."""
        if self.layout is not LAYOUTS["equinox"]:
            return None
        node = self.tree
        for key in path[:-1]:
            inside = jax.tree_util.tree_leaves_with_path(node, lambda x, node=node: x is not node)
            node = dict(inside)[(key,)]
        return node


def _classes(node: object, within: str = "") -> set[str]:
    """Return the names of a module's classes in Equinox, without importing Equinox."""
    prefix = f"equinox.{within}"
    return {kind.__name__ for kind in type(node).__mro__ if kind.__module__.startswith(prefix)}


def _parts(path: KeyPath) -> list[str]:
    """Return the components of a path, without the ``value`` of an NNX variable or a Flax box.

    Names of Haiku's modules are split at slashes, and keys of PyTorch's state dicts at dots.
    """
    return re.split("[/.]", "/".join(trees.plain_path(path)))
