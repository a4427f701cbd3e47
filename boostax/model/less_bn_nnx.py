# SPDX-License-Identifier: Apache-2.0
"""Copy an NNX model with other objects in place of some layers."""

import functools
from typing import Any

import jax
from flax import nnx

from boostax.model.branches import LessBNReport, examine, mark, stand_in
from boostax.model.normalized_dense import NormalizedLinear


class Identity(nnx.Module):
    """Stands where a BatchNorm was, takes what it took, and gives back its input."""

    def __call__(self, x: jax.Array, use_running_average: Any = None, *, mask: Any = None) -> Any:
        """Return ``x``."""
        del use_running_average, mask
        return x


def without(module: Any, removed: tuple[str, ...], head: str | None, multiplier: float) -> Any:
    """Return a copy of ``module`` with those norms as ``Identity`` and that Linear normalised."""

    def replace(path: tuple[Any, ...], node: Any) -> Any:
        place = _name(path)
        if isinstance(node, nnx.BatchNorm) and place in removed:
            return Identity()
        if isinstance(node, nnx.Linear) and place == head:
            return NormalizedLinear(node, multiplier=multiplier)
        return node

    return nnx.recursive_map(replace, nnx.clone(module))


def structure(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LessBNReport:
    """Return what ``examine`` says of ``module(*args, **kwargs)``."""
    paths: list[str] = []

    def marking(path: tuple[Any, ...], node: Any) -> Any:
        if isinstance(node, (nnx.BatchNorm, nnx.Linear)):
            layer: Any = node
            layer.boostax_path = _name(path)
            if isinstance(node, nnx.BatchNorm):
                paths.append(layer.boostax_path)
            object.__setattr__(layer, "__class__", _marking_class(type(node)))
        return node

    graph, state = nnx.split(nnx.recursive_map(marking, nnx.clone(module)))

    def run(state: Any, args: Any, kwargs: Any) -> Any:
        marked: Any = nnx.merge(graph, state)
        return marked(*args, **kwargs)

    return examine(run, state, args, kwargs, paths)


@functools.cache
def _marking_class(cls: Any) -> Any:
    """Make a subclass whose call leaves a mark in the trace. Cached, as NNX keeps every class."""

    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, nnx.BatchNorm):
            return stand_in(self, x, self.boostax_path)
        return mark("dense", cls.__call__(self, x, *args, **kwargs), self.boostax_path)

    return type(cls)(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
