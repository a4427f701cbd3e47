# SPDX-License-Identifier: Apache-2.0
"""Mark or replace layers of a Flax model: intercept linen calls, copy NNX objects."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from boostax._core.types import PyTree
from boostax.model.less_bn import LessBNReport, examine, mark
from boostax.model.normalized_dense import NormalizedDense, NormalizedLinear

Layer = nn.BatchNorm | nn.Dense | nnx.BatchNorm | nnx.Linear
Model = nn.Module | nnx.Module
Path = tuple[object, ...]
_SAME = ("features", "dtype", "param_dtype", "precision", "kernel_init")


class LessBN(nn.Module):
    """A linen module with some BatchNorms removed, and with a ``NormalizedDense`` as head.

    ``init`` makes no variables for removed norms. All other variables keep their paths in
    ``module``, whose scope ``LessBN`` shares. ``LessBN`` can be nested, transformed and printed
    like any module.

    Attributes:
      module: the model.
      removed: paths of the removed BatchNorms, such as ``block_0/norm_1``.
      head: path of the ``nn.Dense`` that a ``NormalizedDense`` replaces, or None.
      multiplier: initial value of the multiplier of the ``NormalizedDense``.
    """

    module: nn.Module
    removed: tuple[str, ...]
    head: str | None = None
    multiplier: float = 1.0

    def setup(self) -> None:
        """Share the scope of ``module``, so that the paths of its params stay the same."""
        nn.share_scope(self, self.module)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return ``module(*args, **kwargs)`` without the removed norms."""

        def replaced(layer: Any, path: str, x: jax.Array, result: Callable) -> jax.Array:
            if path != self.head:
                return x if path in self.removed else result()
            same = {name: getattr(layer, name) for name in _SAME}
            start = nn.initializers.constant(self.multiplier)
            # With the scope of the ``Dense`` as ``parent``, the path of the kernel does not change.
            return NormalizedDense(multiplier_init=start, parent=layer.scope, **same)(x)

        with _intercepted(replaced, len(self.path)):
            return self.module(*args, **kwargs)


class Identity(nnx.Module):
    """The replacement of an NNX BatchNorm; it accepts the same arguments and returns the input."""

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: PyTree = None
    ) -> jax.Array:
        """Return ``x``."""
        return x


def structure(module: Model, data: PyTree) -> LessBNReport:
    """Return the report of ``examine`` on ``module``, called with the arguments in ``data``."""
    paths: list[str] = []
    if isinstance(module, nn.Module):
        init = module.init_with_output
        with _intercepted(functools.partial(_marked, paths)):
            return examine(lambda *args, **kw: init(*args, **kw)[0], jax.random.key(0), data, paths)

    def marking(path: Path, node: object) -> object:
        if isinstance(node, (nnx.BatchNorm, nnx.Linear)):
            name = "/".join(map(str, path))
            paths.extend([name] * isinstance(node, nnx.BatchNorm))
            setattr(node, "boostax_path", name)  # noqa: B010
            object.__setattr__(node, "__class__", _marking_class(type(node)))
        return node

    graph, state = nnx.split(nnx.recursive_map(marking, nnx.clone(module)))
    merge = functools.partial(nnx.merge, graph)
    return examine(lambda state, *args, **kw: merge(state)(*args, **kw), state, data, paths)


def _marked(paths: list[str], layer: Layer, path: str, x: jax.Array, result: Callable) -> jax.Array:
    """Return the marked input of a BatchNorm, or the marked result of a Dense."""
    if isinstance(layer, (nn.Dense, nnx.Linear)):
        return mark("dense", result(), path)
    paths.append(path)
    # The norm is not computed, because a norm over a named axis would need that axis bound.
    dtype = layer.dtype or jnp.promote_types(jnp.result_type(x), layer.param_dtype)
    return mark("norm", jnp.asarray(x, dtype), path)


@functools.cache
def _marking_class(cls: type) -> type:
    """Make a subclass of a layer's class whose calls insert marks in the trace.

    The result is cached, because NNX keeps all classes alive.
    """

    def call(self: Any, x: jax.Array, *args: PyTree, **kwargs: PyTree) -> jax.Array:
        call_of = functools.partial(cls.__call__, self, x, *args, **kwargs)
        return _marked([], self, self.boostax_path, x, call_of)

    return type(cls)(cls.__name__, (cls,), {"__call__": call})


def without(module: Model, removed: tuple[str, ...], head: str | None, multiplier: float) -> Model:
    """Return the model without the norms ``removed``, and with a normalised ``head``."""
    if isinstance(module, nn.Module):
        return LessBN(module, removed, head, multiplier)

    def replaced(path: Path, node: Any) -> object:
        name = "/".join(map(str, path))
        if name in removed:
            return Identity()
        return NormalizedLinear(node, multiplier=multiplier) if name == head else node

    return nnx.recursive_map(replaced, nnx.clone(module))


def _intercepted(replacement: Callable[..., jax.Array], root: int = 0) -> Any:
    """Call ``replacement(layer, path, x, result)`` in place of linen's BatchNorms and Denses.

    Paths are relative to a module whose own path has ``root`` components. ``result()`` is the
    layer's result.
    """

    def intercept(call: Callable, args: PyTree, kwargs: PyTree, context: Any) -> PyTree:
        layer = context.module
        if context.method_name != "__call__" or not isinstance(layer, (nn.BatchNorm, nn.Dense)):
            return call(*args, **kwargs)
        x = args[0] if args else kwargs["inputs" if isinstance(layer, nn.Dense) else "x"]
        return replacement(layer, "/".join(layer.path[root:]), x, lambda: call(*args, **kwargs))

    return nn.intercept_methods(intercept)
