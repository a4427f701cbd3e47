# SPDX-License-Identifier: Apache-2.0
"""Labels that assign each param to a group, and patterns of the names of params."""

import dataclasses
import fnmatch
import re
from collections.abc import Sequence

import jax

from boostax._core import checks, trees
from boostax._core.types import PyTree


def as_groups(who: str, groups: PyTree, params: PyTree) -> "Labels":
    """Return the group of each leaf, the ints 0, 1, ... without a gap, and the number of groups.

    Without params, as in ``optax.tree.map_params``, the number is read from ``groups``. If
    ``groups`` is a function, the number is then one that every schedule accepts.

    Args:
      who: the name of the transformation, for errors.
      groups: one of these forms. A tree of ints like the params, or a prefix of such a tree. A
        dictionary of ints by path names or patterns, which together match every leaf. A function of
        a leaf's path name and the leaf. A list whose entry ``i`` has the pattern, or the patterns,
        of group ``i`` (``fnmatch`` on path names; the name of a module matches all leaves of the
        module); leaves without a match are the last group. The result of
        ``freeze.mindspore_groups``.
      params: the params.
    """
    names = trees.names(params)
    treedef = jax.tree.structure(params)
    if isinstance(groups, Labels):
        tree = treedef.unflatten(spread(who, groups.tree, params)) if names else params
        return Labels(tree, groups.count)
    # An Equinox module is also callable, but it is a tree and not a single leaf.
    leaves = jax.tree.leaves(groups)
    by_function = jax.tree_util.all_leaves([groups]) and callable(leaves[0])
    # [0, 1] is not a list of patterns but a tree of labels, for params in a list.
    by_pattern = issubclass(type(groups), (list, tuple)) and any(isinstance(x, str) for x in leaves)
    if not names:
        last = 63 if by_function else len(groups) if by_pattern else max(leaves, default=0)
        return Labels(params, last + 1)
    if by_pattern:
        labels = _matched(who, groups, names)
    elif by_function:
        labels = [groups(name, leaf) for name, leaf in trees.named(params)]
    else:
        labels = spread(who, groups, params)
    hint = "The leaf is {!r}. A list such as ['embed', 'block_*'] has a pattern for each group."
    pairs = zip(labels, map(hint.format, names), strict=True)
    numbers = [checks.integer(who, "groups", label, "integers", hint) for label, hint in pairs]
    present = sorted(set(numbers))
    missing = next((i for i, number in enumerate(present) if i != number), None)
    allowed = "the integers 0, 1, ... without a gap"
    hint = f"No leaf is in group {missing}. boostax.freeze.prefix_groups(params, n) makes n groups."
    checks.require(missing is None, who, "groups", got=present, allowed=allowed, hint=hint)
    return Labels(treedef.unflatten(numbers), len(present))


@dataclasses.dataclass(frozen=True, eq=False)
class Labels:
    """Labels of groups; some groups may be empty.

    Attributes:
      tree: a tree of ints like the params.
      count: the number of groups.
    """

    tree: PyTree
    count: int


def spread(who: str, groups: PyTree, params: PyTree) -> list[int]:
    """Return the label of each leaf, from a tree like the params or a prefix of such a tree."""
    try:
        # JAX's error prints the tree. Donated params cannot be printed, so zeros replace the
        # params.
        return jax.tree.leaves(jax.tree.broadcast(groups, jax.tree.map(lambda _: 0, params)))
    except ValueError as error:
        # In an NNX optimizer, the params are arrays where ``groups`` may have variables, so only
        # the paths are compared.
        labels = {trees.plain_path(p): x for p, x in jax.tree_util.tree_leaves_with_path(groups)}
        paths = [trees.plain_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        if labels.keys() == set(paths):
            return [labels[path] for path in paths]
        pairs = groups.items() if isinstance(groups, dict) else ()
        if pairs and all(isinstance(k, str) and isinstance(x, int) for k, x in pairs):
            return _by_name(who, groups, trees.names(params))
        allowed = "a tree prefix of integers, a list of patterns, or a function of path and leaf"
        raise ValueError(checks.message(who, "groups", allowed, groups, str(error))) from error


def natural(text: str) -> list[str | int]:
    """Return a sort key by which numbers in a text are compared as numbers."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", text))]


def _by_name(who: str, groups: dict[str, int], names: list[str]) -> list[int]:
    """Return the labels from a dictionary of patterns, which must match every leaf."""
    numbers = sorted(set(groups.values()))
    patterns = [[name for name, k in groups.items() if k == number] for number in numbers]
    indices = _matched(who, patterns, names)
    missed = [name for name, i in zip(names, indices, strict=True) if i == len(numbers)]
    allowed = "a dictionary whose patterns together match every leaf"
    checks.require(not missed, who, "groups", groups, allowed, f"No pattern matches {few(missed)}.")
    return [numbers[i] for i in indices]


def _matched(who: str, groups: Sequence[PyTree], names: list[str]) -> list[int]:
    first_match: dict[str, tuple[int, str]] = {}
    for i, entry in enumerate(groups):
        for pattern in entry if isinstance(entry, (list, tuple)) else (entry,):
            hits = [x for x in names if isinstance(pattern, str) and matches(x, pattern)]
            hint = f"The pattern matches no param. The params are {few(names)}."
            checks.require(bool(hits), who, "groups", pattern, "patterns that match params", hint)
            allowed = "patterns that match each leaf at most once"
            for name in hits:
                number, first = first_match.setdefault(name, (i, pattern))
                hint = f"Both patterns match {name!r}. Change one pattern."
                checks.require(number == i, who, "groups", (first, pattern), allowed, hint)
    return [first_match.get(name, (len(groups),))[0] for name in names]


def matches(name: str, pattern: str) -> bool:
    """Return whether an ``fnmatch`` pattern matches a path, or a module on the path."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}/*")


def few(names: list[str]) -> str:
    """Return a text with the first few names and the number of the remaining names."""
    shown = ", ".join(repr(name) for name in names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
