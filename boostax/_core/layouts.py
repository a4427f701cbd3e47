# SPDX-License-Identifier: Apache-2.0
"""How libraries of layers lay out their kernels: which dimensions are inputs, by one table."""

import dataclasses
import functools
import re
from typing import Any, Literal, NamedTuple

from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from boostax._core import checks, trees

PyTree = Any
Path = tuple[Any, ...]
LayoutName = Literal["linen", "nnx", "equinox", "haiku", "torch"]


class Layout(NamedTuple):
    """The shapes of a library's kernels, and what the names of its params say.

    Attributes:
      outputs: the dimension of a kernel's output units, the first or the last.
      transposed: the same in modules named after transposed convolutions.
      kernels: what the name of a kernel contains.
      vectors: names of leaves without inputs, beside what ends with ``bias`` or ``scale``.
      tables: endings of the names of tables, whose rows are looked up.
      table_modules: what the name of a module contains whose matrix is a table.
    """

    outputs: int
    transposed: int
    kernels: str = ""
    vectors: tuple[str, ...] = ()
    tables: tuple[str, ...] = ("embedding", "embeddings")
    table_modules: tuple[str, ...] = ()


_FLAX = Layout(outputs=-1, transposed=-1)
LAYOUTS: dict[LayoutName, Layout] = {
    "linen": _FLAX,
    "nnx": _FLAX,
    "equinox": Layout(0, 0, "weight", table_modules=("emb",)),
    "haiku": Layout(-1, -2, vectors=("b", "offset")),
    "torch": Layout(0, 1, "weight", table_modules=("emb", "wte", "wpe")),
}
_VECTORS = ("bias", "scale")
# Flax splits the outputs of these into heads: (in, heads, head_dim).
_PROJECTIONS = ("query", "key", "value")
# Equinox's modules with kernels; those of convolutions have dimensions of space besides.
_EQUINOX_KERNELS = {"Linear", "Conv", "ConvTranspose", "GRUCell", "LSTMCell"}
_EITHER = re.compile("(.*_)?weight(_.*)?")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Which leaves of a tree are kernels, and which of their dimensions are inputs.

    Attributes:
      who: on whose behalf to raise.
      name: of the layout. ``None`` reads the modules of ``equinox.nn`` by their classes and all
        else as Flax's and Haiku's, and refuses a ``weight``, which may have its outputs first.
      tree: the params, or what has their structure.
    """

    who: str
    name: LayoutName | None
    tree: PyTree

    @functools.cached_property
    def layout(self) -> Layout:
        """The row of the table."""
        modules = self.name is None and trees.find(self.tree, lambda x: bool(_classes(x, "")))
        return LAYOUTS["equinox" if modules else self.name or "linen"]

    def is_vector(self, path: Path, ndim: int) -> bool:
        """Whether a leaf has no inputs: a bias, a scale, what a norm multiplies with."""
        leaf = _parts(path)[-1]
        named = leaf.endswith(_VECTORS) or leaf in self.layout.vectors
        classes = _classes(self._module(path), "nn.")
        return ndim < 2 or named or bool(classes - {"Embedding"} and not classes & _EQUINOX_KERNELS)

    def inputs(self, path: Path, ndim: int, lead: int = 0) -> tuple[int, ...]:
        """Return the dimensions of inputs behind ``lead`` of layers; none for other leaves.

        The input channels stand last.
        """
        parts, row = _parts(path), self.layout
        module = self._module(path)
        if classes := _classes(module, "nn."):
            # Equinox stacks layers by mapping over their making: what is before its own is theirs.
            lead = ndim - 2 - getattr(module, "num_spatial_dims", 0)
            kernel = "weight" in parts[-1] and bool(classes & _EQUINOX_KERNELS)
            return self.ordered(tuple(range(lead + 1, ndim))) if kernel else ()
        if ndim - lead < 2 or self.is_vector(path, ndim) or not self._is_kernel(parts, ndim - lead):
            return ()
        transposed = any("transpose" in part.lower() for part in parts[:-1])
        either = _EITHER.fullmatch(parts[-1]) or (transposed and parts[-1] == "w")
        if self.name is None and either:
            allowed = f"given where a kernel may be of several, as {trees.path_name(path)!r}"
            hint = "'equinox' and 'torch' have its outputs first; axes= may name this leaf instead."
            raise ValueError(checks.message(self.who, "layout", allowed, None, hint))
        if row is _FLAX and ndim - lead == 3 and _is_projection(parts):
            return (lead,)
        outputs = row.transposed if transposed else row.outputs
        outputs = outputs + ndim if outputs < 0 else outputs + lead
        return self.ordered(tuple(dim for dim in range(lead, ndim) if dim != outputs))

    def ordered(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Ascending dimensions of inputs, the channels moved last."""
        return dims if self.layout.outputs else (*dims[1:], *dims[:1])

    def _is_kernel(self, parts: list[str], ndim: int) -> bool:
        row, module = self.layout, parts[-2].lower() if len(parts) > 1 else ""
        table = ndim == 2 and any(word in module for word in row.table_modules)
        return row.kernels in parts[-1] and not table and not parts[-1].endswith(row.tables)

    def _module(self, path: Path) -> Any:
        """Return the module that holds a leaf, in a tree of Equinox's modules."""
        node = self.tree if self.layout is LAYOUTS["equinox"] else None
        for key in path[:-1]:
            if isinstance(key, GetAttrKey):
                node = getattr(node, key.name, None)
            elif isinstance(key, (DictKey, SequenceKey)) and isinstance(node, (dict, list, tuple)):
                node = node[key.key if isinstance(key, DictKey) else key.idx]
            else:
                return None
        return node


def named(who: str, name: LayoutName | None) -> Layout:
    """Return the row of that name; without one Flax's."""
    if name is not None:
        checks.choice(who, "layout", name, tuple(LAYOUTS), "None reads kernels as Flax's.")
    return LAYOUTS[name or "linen"]


def _classes(node: Any, within: str) -> set[str]:
    """Return the names of a module's classes in Equinox, which need not be installed."""
    prefix = f"equinox.{within}"
    return {kind.__name__ for kind in type(node).__mro__ if kind.__module__.startswith(prefix)}


def _is_projection(parts: list[str]) -> bool:
    return parts[-1] == "kernel" and bool(parts[-2:-1]) and parts[-2] in _PROJECTIONS


def _parts(path: Path) -> list[str]:
    """Return the components of a path, without ``value`` of NNX variables and partitioned params.

    Haiku's modules have slashes in their names, and a state dict of PyTorch's has dots.
    """
    keys = path[:-1] if path[-1:] == (GetAttrKey("value"),) else path
    return re.split("[/.]", trees.path_name(keys))
