# SPDX-License-Identifier: Apache-2.0
"""Masks of the params that train."""

import dataclasses
import inspect
from collections.abc import Callable

import jax
import numpy as np

from boostax._core import checks, groups, trees
from boostax._core.types import PyTree

_WORDS = {"train": True, "trained": True, "freeze": False, "frozen": False}


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """A mask for a complete run.

    Attributes:
      mask: see ``scheduled_freeze``.
      trains: whether True marks the params that train; otherwise True marks the frozen params.
    """

    mask: PyTree
    trains: bool

    def labels(self, who: str, params: PyTree) -> groups.Labels:
        """Return group 0 for each frozen leaf, and group 1 for each leaf that trains."""
        mask: PyTree = self.mask
        treedef = jax.tree.structure(params)
        # An Equinox module is also callable, but it is a tree and not a single leaf.
        if callable(self.mask) and jax.tree_util.all_leaves([self.mask]):
            fn: Callable[..., PyTree] = self.mask
            by_leaf = len(inspect.signature(fn).parameters) > 1
            labels = [fn(name, x) for name, x in trees.named(params)] if by_leaf else ()
            mask = treedef.unflatten(labels) if by_leaf else fn(params)
        is_listed = isinstance(mask, list | tuple) and all(isinstance(x, str) for x in mask)
        if is_listed and not {*mask} <= _WORDS.keys():
            matched = jax.tree.leaves(groups.as_groups(who, [[*mask]], params).tree)
            values: list[PyTree] = [number == 0 for number in matched]
        else:
            values = groups.spread(who, mask, params)
        hint = "True trains a leaf. For groups of integers, pass a schedule: 1 freezes group 0."
        for value in values:
            is_valid = isinstance(value, bool | np.bool_) or value in _WORDS
            allowed = "bools, or the words 'train' and 'freeze'"
            checks.require(is_valid, who, "mask", value, allowed, hint)
        # A word means the same in both arguments.
        numbers = [1 if _WORDS.get(x, x == self.trains) else 0 for x in values]
        return groups.Labels(treedef.unflatten(numbers), 2)


def for_a_run(who: str, mask: PyTree, frozen: PyTree, schedule: object) -> Mask:
    """Return the mask of a complete run, from one of the two arguments."""
    is_valid = (mask is None) != (frozen is None) and schedule is None
    hint = "Pass a mask, or frozen=, or groups and a schedule."
    allowed = "given without frozen= and a schedule, or left out"
    checks.require(is_valid, who, "groups", mask, allowed, hint)
    return Mask(mask if frozen is None else frozen, trains=frozen is None)
