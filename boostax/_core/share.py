"""An optimizer's work shared out over the replicas: which part of each leaf is whose.

A train step that shares it out hands a ``Share`` down the chain as an extra argument. Up to the
reduction gradients are whole and local; from there on gradients, params and state are parts. A
reduction that knows of it leaves the parts scattered; what looks across the entries of a leaf sums
over the replicas; what has no meaning on parts refuses.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax import lax

from boostax._core import axes, trees
from boostax._core.replicas import split_dim

PyTree = Any
# The name of the extra argument.
ARGUMENT = "share"


@dataclasses.dataclass(frozen=True)
class Share:
    """How leaves are cut.

    Attributes:
      names: the replica axes.
      dims: of each param, by its path, the dimension that is cut; ``None`` where none divides, and
        every replica keeps the whole.
    """

    names: tuple[str, ...]
    dims: Mapping[tuple[Any, ...], int | None]

    def part(self, tree: PyTree) -> PyTree:
        """This replica's part of a tree of whole leaves shaped like the params."""
        return jax.tree.map(lambda x: own_part(x, self.names), tree)

    def cut(self, path: tuple[Any, ...], who: str) -> int | None:
        """The dimension along which the leaf at a path is cut."""
        if path not in self.dims:
            raise ValueError(
                f"{who}: gradients must have the params' paths where the optimizer's state is "
                f"shared out, got one at {trees.path_name(path)!r}. Put it outside whatever "
                "renames or flattens them."
            )
        return self.dims[path]


def share_of(params: PyTree, names: tuple[str, ...]) -> Share:
    """How these params are cut among the replicas of the axes, which must be bound."""
    count = axes.size(names)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return Share(names, {path: split_dim(x.shape, count) for path, x in leaves})


def own_part(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """This replica's part of a whole leaf."""
    count = axes.size(names)
    dim = split_dim(x.shape, count)
    if dim is None:
        return x
    size = x.shape[dim] // count
    return lax.dynamic_slice_in_dim(x, axes.index(names) * size, size, dim)


def share_in(extra: Mapping[str, Any]) -> Share | None:
    """The one that a step has handed down, if it has."""
    return extra.get(ARGUMENT)


def scattered(who: str, extra: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """Whether a reduction over these axes is to leave its result in parts."""
    share = share_in(extra)
    if share is None:
        return False
    if share.names != names:
        raise ValueError(
            f"{who}: axis_name must be {share.names}, the axes over which the train step shares "
            f"out the optimizer's state, got {names}. One reduction over all of them leaves each "
            "replica its part (adasum has within= for two levels)."
        )
    return True


def refuse(who: str, extra: Mapping[str, Any], hint: str) -> None:
    """Say that a transformation has no meaning on parts."""
    if share_in(extra) is not None:
        raise ValueError(
            f"{who}: shard_optimizer must be False in make_train_step with this transformation, "
            f"got True. {hint}"
        )
