# SPDX-License-Identifier: Apache-2.0
"""Groups of consecutive layers, in the order of the forward pass."""

import collections
import glob
import itertools
from collections.abc import Iterator, Sequence

import jax
from jax.tree_util import DictKey, GetAttrKey, KeyPath

from boostax._core import checks, trees
from boostax._core.groups import Labels, few, natural
from boostax._core.types import PyTree

# Paths of layers in the order of the forward pass; ``None`` for the order of the tree.
Order = Sequence[str] | None


def prefix_groups(
    params: PyTree, n: int, *, order: Order = None, level: int | None = None
) -> PyTree:
    r"""Cut the params into ``n`` groups of consecutive layers, in the order of the forward pass.

    Layer :math:`l` of :math:`L` is in group :math:`\lfloor l n / L \rfloor`, so the sizes of groups
    differ by one layer at most. Groups have equal numbers of layers, not of elements, because a
    frozen prefix saves the backward pass of its layers. Convolutions need most of the time and have
    few elements, while an embedding needs no time and has many elements.

    Leaves that share a parent module, such as a kernel and its bias, form a layer. A module with
    only vectors and scalars (a norm) joins the previous layer; if there is no previous layer, the
    module joins the next layer. Each leaf directly in the top container is a layer.

    Args:
      params: any tree of arrays or of ``jax.ShapeDtypeStruct``.
      n: number of groups, at most the number of layers.
      order: path names, or prefixes of path names (``"block_0"``), in the order of the forward
        pass; ``forward_order`` returns such names. The first entry that matches one of a layer's
        leaves determines the position of the layer. ``None`` means the order of the tree: lists by
        index, dicts by key with numbers in numerical order (``block_2`` before ``block_10``). The
        order of the tree is the forward order only if the names are numbered in forward order.
      level: number of leading path components that make a layer. With 1, ``block_0`` is one layer;
        with ``None``, each module inside ``block_0`` is a layer.

    Returns:
      A tree like ``params`` of Python ints from 0 to ``n - 1``, the group of each leaf. Cost: none;
      no array is read.

    Raises:
      ValueError, TypeError: an argument out of range; fewer layers than groups; an ``order`` that
        misses a layer, or has an entry that matches nothing.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> dense = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
      >>> params = {"layer_10": dense, "layer_2": dense, "layer_2_norm": {"scale": jnp.ones(2)}}
      >>> groups = boostax.freeze.prefix_groups(params, 2)
      >>> groups["layer_2"], groups["layer_2_norm"], groups["layer_10"]
      ({'bias': 0, 'kernel': 0}, {'scale': 0}, {'bias': 1, 'kernel': 1})

    References:
      ``mindspore.boost.GradientFreeze`` groups by the order and the names of the params. If there
      are fewer layers than groups, MindSpore freezes nothing, and does not warn.
    """
    who = "prefix_groups"
    checks.positive_int(who, "n", n, "4 divides the layers into four groups.")
    if level is not None:
        checks.positive_int(who, "level", level, "level=1 makes a layer of every top-level module.")
    leaves, treedef = jax.tree.flatten(params)
    layers = _layers(who, params, order, level)
    joined: dict[KeyPath, list[int]] = {}
    last: list[int] = []
    for path, members in layers.items():
        # A layer that has only vectors joins the previous layer. If it is the first layer, it joins
        # the next layer.
        if all(getattr(leaves[i], "ndim", 0) < 2 for i in members):
            last.extend(members)
        else:
            last = joined[path] = [*members, *([] if joined else last)]
    layers = joined or layers
    words = few([trees.path_name(path) for path in layers])
    hint = f"The layers, each with its norms, are {words}." if layers else "Params are empty."
    allowed = f"at most the number of layers, {len(layers)}"
    checks.require(n <= len(layers), who, "n", n, allowed, hint)
    labels = {x: i * n // len(layers) for i, members in enumerate(layers.values()) for x in members}
    return treedef.unflatten(labels[i] for i in range(len(leaves)))


def mindspore_groups(
    params: PyTree, n: int, *, order: Order = None, removed: Sequence[str] = ()
) -> Labels:
    """Return groups for which depth ``i`` trains the params that MindSpore trains at index ``i``.

    Params fill buckets layer by layer, in forward order; the vectors of a layer come last. A vector
    is added to the last bucket. Any other param, including a scalar, opens a new bucket if the last
    bucket has three params or more. Depth ``i`` trains the buckets from ``i * (buckets // n)`` on.
    With fewer buckets than ``n``, all leaves are in the last group, so every depth trains all
    leaves, as in MindSpore. In contrast, ``prefix_groups`` raises if there are fewer layers than
    groups.

    Args:
      params: any tree of arrays or of ``jax.ShapeDtypeStruct``.
      n: MindSpore's ``param_groups``.
      order: see ``prefix_groups``.
      removed: paths of norms that ``less_bn`` removed (``LessBNReport.removed``), whose scale and
        bias MindSpore keeps among the params. ``order`` may name them.

    Returns:
      The ``groups`` for ``scheduled_freeze``; depths are 0 to ``n - 1``. With
      ``moments="per_group"`` each depth has its own optimizer state, even if all depths train all
      params. Cost: none; no array is read.

    Raises:
      ValueError, TypeError: ``n`` is not a positive integer; an ``order`` that misses a layer.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> params = [{"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)} for _ in range(4)]
      >>> groups = boostax.freeze.mindspore_groups(params, 2)
      >>> [layer["kernel"] for layer in groups.tree], groups.count
      ([0, 0, 1, 1], 2)

    References:
      MindSpore 2.10, ``mindspore/boost/grad_freeze.py``, ``split_parameters_groups``. MindSpore
      recognises vectors by ``bn`` and ``bias`` in their names.
    """
    who = "mindspore_groups"
    checks.positive_int(who, "n", n, "10 is MindSpore's default.")
    leaves, treedef = jax.tree.flatten(params)
    layers = _layers(who, params, order, removed=removed)
    vector = [getattr(leaf, "ndim", 0) == 1 for leaf in leaves] + [True] * (2 * len(removed))
    buckets: list[list[int]] = [[]]
    for leaf in (x for members in layers.values() for x in sorted(members, key=vector.__getitem__)):
        if len(buckets[-1]) >= 3 and not vector[leaf]:
            buckets.append([])
        buckets[-1].append(leaf)
    stride = len(buckets) // n
    # Buckets that are left over after the division are in the last group. If there are fewer than n
    # buckets, all buckets are in the last group.
    numbers = [min(place // stride, n - 1) if stride else n - 1 for place in range(len(buckets))]
    labels = {x: i for i, bucket in zip(numbers, buckets, strict=True) for x in bucket}
    return Labels(treedef.unflatten(labels[i] for i in range(len(leaves))), n)


def param_groups(params: PyTree, groups: Sequence[PyTree]) -> list[list[str]]:
    """Convert groups of arrays, one list per group, to groups of param names.

    Args:
      params: the params.
      groups: for each group the arrays of ``params`` themselves, as a list or any tree. Each param
        must be in exactly one group.

    Returns:
      A list of path names per group, for ``group_loss_scale``, ``scheduled_freeze`` or a
      configuration.
      Cost: none; no array is read.

    Raises:
      ValueError: an array is not a param, or is in two groups; a param is in no group.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> params = {"conv1": jnp.ones((2, 2)), "conv2": jnp.ones((2, 2)), "fc": jnp.ones(2)}
      >>> convs = [p for name, p in params.items() if "conv" in name]
      >>> boostax.freeze.param_groups(params, [convs, [params["fc"]]])
      [['conv1', 'conv2'], ['fc']]

    References:
      ``mindspore.boost.GroupLossScaleManager``, whose ``loss_scale_groups`` are lists of arrays,
      like ``groups``.
    """
    who = "param_groups"
    allowed = "lists that together contain every param once"
    names: dict[int, list[str]] = {}
    for name, leaf in trees.named(params):
        names.setdefault(id(leaf), []).append(name)
    labels: list[list[str]] = [[] for _ in groups]
    for i, group in enumerate(groups):
        for leaf in jax.tree.leaves(group):
            known = names.pop(id(leaf), [])
            got = f"{known} as one array" if known else f"an array in group {i} that is not a param"
            hint = "Pass the array of each param once, or pass patterns of param names."
            checks.require(len(known) == 1, who, "groups", got, allowed, hint)
            # A path may contain characters that are wildcards in a pattern.
            labels[i].append(glob.escape(known[0]))
    got = f"no group with {few([name for known in names.values() for name in known])}"
    checks.require(not names, who, "groups", got, allowed, "Add these params to a group.")
    return labels


def _layers(
    who: str, params: PyTree, order: Order, level: int | None = None, removed: Sequence[str] = ()
) -> dict[KeyPath, list[int]]:
    """Return the indices of the leaves of each layer, in the order of the forward pass.

    The two leaves of each norm in ``removed`` have indices after those of the params.
    """
    treedef = jax.tree.structure(params)
    layers: dict[KeyPath, list[int]] = {}
    for path, leaf in _in_order(treedef.unflatten(range(treedef.num_leaves))):
        layers.setdefault(path[:-1][:level] or path, []).append(leaf)
    names = trees.names(params)
    for norm in removed:
        layers[tuple(DictKey(key) for key in norm.split("/"))] = [len(names), len(names) + 1]
        names += [f"{norm}/bias", f"{norm}/scale"]
    if order is None:
        keys = {path: [*map(natural, trees.path_name(path).split("/"))] for path in layers}
        paths = sorted(layers, key=keys.__getitem__) if removed else layers
        return {path: layers[path] for path in paths}
    allowed = "path names, or prefixes of path names, in the order of the forward pass"
    # The first entry that matches one of a layer's leaves determines the layer's position. If an
    # entry occurs twice, the first occurrence counts.
    places = {entry: i for i, entry in reversed([*enumerate(order)])}
    prefixes = [[*itertools.accumulate(name.split("/"), "{}/{}".format)] for name in names]
    idle = sorted(places.keys() - {*itertools.chain(*prefixes)}, key=places.__getitem__)
    hint = f"These entries match no param. The params are {few(names)}."
    checks.require(not idle, who, "order", idle, allowed, hint)
    positions = {
        path: [places[x] for leaf in members for x in prefixes[leaf] if x in places]
        for path, members in layers.items()
    }
    missed = [trees.path_name(path) for path, entries in positions.items() if not entries]
    hint = f"No entry matches {few(missed)}. Add these layers to the order."
    checks.require(not missed, who, "order", order, "entries that together match every layer", hint)
    return {path: layers[path] for path in sorted(layers, key=lambda path: min(positions[path]))}


def _in_order(node: PyTree, path: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
    """Yield the leaves with their paths, in the order of the containers."""
    if jax.tree_util.all_leaves([node]):
        yield path, node
        return
    # ``flatten_one_level`` of JAX's registry names all fields of a NamedTuple like the first field.
    children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    if [key for key, _ in children] == [(GetAttrKey("value"),)]:
        # A box (an NNX variable, or a Flax param with its partitioning) is not a module.
        yield from _in_order(children[0][1], path)
        return
    # JAX sorts the keys of a dict as text; an OrderedDict keeps its insertion order.
    if not isinstance(node, collections.OrderedDict):
        children.sort(key=lambda child: natural(str(getattr(child[0][0], "key", ""))))
    for key, child in children:
        yield from _in_order(child, (*path, *key))
