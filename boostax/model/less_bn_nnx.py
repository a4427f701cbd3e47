# SPDX-License-Identifier: Apache-2.0
"""LessBN on Flax NNX: a copy of the model with other objects in the place of some layers."""

import functools
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from boostax.model.branches import Structure, complete, examine, mark_dense, stand_in
from boostax.model.normalized_dense import NormalizedLinear


class Identity(nnx.Module):
    """Stands where a BatchNorm was, takes what it took, and gives back its input."""

    def __call__(self, x: jax.Array, use_running_average: Any = None, *, mask: Any = None) -> Any:
        """``x``."""
        del use_running_average, mask
        return x


def without(module: Any, removed: tuple[str, ...], head: str | None, multiplier: float) -> Any:
    """A copy of ``module`` with those norms as ``Identity`` and that Linear normalised."""

    def replace(path: tuple[Any, ...], node: Any) -> Any:
        place = _name(path)
        if isinstance(node, nnx.BatchNorm) and place in removed:
            return Identity()
        if isinstance(node, nnx.Linear) and place == head:
            linear = NormalizedLinear(
                node.in_features,
                node.out_features,
                dtype=node.dtype,
                param_dtype=node.param_dtype,
                precision=node.precision,
                kernel_init=nn.initializers.zeros_init(),
                multiplier_init=nn.initializers.constant(multiplier),
                rngs=nnx.Rngs(0),
            )
            linear.kernel = node.kernel
            return linear
        return node

    return nnx.recursive_map(replace, nnx.clone(module))


def structure(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Structure:
    """What ``examine`` says of ``module(*args, **kwargs)``."""
    paths: list[str] = []

    def mark(path: tuple[Any, ...], node: Any) -> Any:
        if isinstance(node, (nnx.BatchNorm, nnx.Linear)):
            layer: Any = node
            layer.boostax_path = _name(path)
            if isinstance(node, nnx.BatchNorm):
                paths.append(layer.boostax_path)
            object.__setattr__(layer, "__class__", _marking_class(type(node)))
        return node

    graph, state = nnx.split(nnx.recursive_map(mark, nnx.clone(module)))

    def run(state: Any, args: Any, kwargs: Any) -> Any:
        marked: Any = nnx.merge(graph, state)
        return marked(*args, **kwargs)

    return complete(examine(run, state, args, kwargs), paths)


@functools.cache
def _marking_class(cls: Any) -> Any:
    """A subclass whose call leaves a mark in the trace. Cached, for NNX keeps every class."""

    def norm(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return stand_in(self, x, self.boostax_path)

    def linear(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mark_dense(cls.__call__(self, *args, **kwargs), self.boostax_path)

    call = norm if issubclass(cls, nnx.BatchNorm) else linear
    meta: Any = type(cls)
    return meta(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
