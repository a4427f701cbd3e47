# SPDX-License-Identifier: Apache-2.0
"""Gradient centralization: every output unit moves without its mean over the inputs."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from boostax._core import axes as mesh_axes
from boostax._core import checks, trees
from boostax._core.describe import describe
from boostax._core.groups import matches
from boostax._core.layouts import Kernels, LayoutName, named

PyTree = Any
Path = tuple[Any, ...]
Rule = int | Sequence[int] | Literal["auto", "stacked"] | None
Axes = (
    Literal["auto"]
    | Mapping[str, Rule]
    | Sequence[tuple[str, Rule]]
    | Callable[[str, jax.Array], Rule]
)

_WHO = "centralize_gradients"
_RULES = "'auto', rules of a path pattern and its axes, or a function of path and leaf"
_RULE = "an int, a tuple of ints, 'auto', 'stacked' or None"


def centralize_gradients(
    *,
    multiple_of: int | None = None,
    layout: LayoutName | None = None,
    axes: Axes = "auto",
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    param_specs: PyTree | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Subtract from the gradient of each kernel its mean over the inputs, for every output unit.

    .. math:: u_{io} = g_{io} - \tfrac1n \sum_{j=1}^{n} g_{jo}

    It projects the gradient onto the kernels whose weights into each unit have a fixed sum: with
    plain or momentum SGD that sum stays what it was at the start, with Adam if it stands after
    ``scale_by_adam``. It is linear, so it may stand before or after a mean over replicas or
    micro-batches. Where it stands as to weight decay is a
    choice: ``chain(add_decayed_weights(w), centralize_gradients(), ...)`` centralizes the decay
    too, as MindSpore does; the other order leaves the decay whole, and so does a decoupled one.

    ``"auto"`` goes by a layout. In Flax's all axes but the last are inputs: ``(in, out)``, ``HWIO``
    and the attention's ``out`` of ``(heads, head_dim, out)``; of kernels of three axes named
    ``query``, ``key`` and ``value`` only the first is. In Haiku's a module named after a
    ``transpose`` has ``(H, W, out, in)``. In Equinox's and PyTorch's kernels are called ``weight``,
    and all axes but the first are inputs: ``(out, in)``, ``OIHW``; PyTorch's transposed
    convolutions have ``(in, out, H, W)``. Modules of ``equinox.nn`` are known by their classes,
    stacked ones too. Vectors, scalars, tables of embeddings, and what is called ``bias`` or
    ``scale`` (or ends so) stay as they are. So does every leaf, under any rule, with a single
    input, which would never move again.

    Args:
      multiple_of: only kernels whose last averaged axis, the input channels, divides by it.
        MindSpore's is 16.
      layout: whose kernels these are, ``"linen"``, ``"nnx"``, ``"equinox"``, ``"haiku"`` or
        ``"torch"``. ``None`` finds Equinox's modules and reads other trees as Flax's; a matrix
        called ``weight`` outside of ``equinox.nn``, which may have its outputs first or last, it
        refuses.
      axes: which axes to average over. ``"auto"``; a dict, or a list of pairs, of a pattern and a
        rule; or a function of a leaf's path name and the leaf that gives a rule. A pattern is an
        ``fnmatch`` on path names (the name of a module stands for all that is in it); the first
        that matches decides, what matches none goes by ``"auto"``, and biases, scales and vectors
        stay under all of them. A rule is an axis or a tuple of them, ``None`` for none, ``"auto"``,
        or ``"stacked"``: the same behind one leading axis of layers (``flax.linen.scan``).
      mask: as in ``optax.masked``: a tree of bools like the params, or a function that makes it;
        what is ``False`` stays as it is.
      param_specs: inside ``jax.shard_map``, for params sharded over mesh axes: a tree of
        ``PartitionSpec`` with one for each param, as the ``in_specs`` have them. Where an
        averaged axis is cut, the means are averaged over the shards. Under plain ``jit`` it is not
        needed.

    Returns:
      A stateless transformation. Means are taken in f32 or wider, and the result has the gradient's
      dtype, saturating there. Cost: no state; the gradients are read once more, and written once
      before Adam by XLA:CPU, not by XLA for TPU v5e and H100. Of a leaf that is cut along its
      inputs one mean, f32 or wider, for each output unit travels; else nothing.

    Raises:
      ValueError, TypeError: an argument out of range. At ``init``, a pattern that matches nothing,
        an axis that a leaf lacks, or a kernel that may be of several layouts. At trace time,
        gradients that are integers or cut otherwise than the params.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> tx = boostax.centralize_gradients()
      >>> grads = {"kernel": jnp.array([[1.0, 4.0], [3.0, 8.0]]), "bias": jnp.ones(2)}
      >>> updates, _ = tx.update(grads, tx.init(grads))
      >>> updates["kernel"].tolist(), updates["bias"].tolist()
      ([[-1.0, -2.0], [1.0, 2.0]], [1.0, 1.0])

    References:
      Yong, Huang, Hua, Zhang, Gradient Centralization: A New Optimization Technique for Deep Neural
      Networks, https://arxiv.org/abs/2004.01461, 2020. The paper has convolutions and dense layers;
      its code, in PyTorch's layout, takes every tensor of two axes or more, embeddings (over the
      features of each row) and depthwise kernels (over H and W) included. MindSpore
      (``OptimizerProcess.add_grad_centralization``) leaves out depthwise kernels and those whose
      input channels do not divide by 16. ``optax.centralize`` averages over all axes but the
      first, in Flax's layouts over the outputs.
    """
    rules = _as_rules(axes)
    named(_WHO, layout)
    if mask is not None:
        _check_mask(mask)
    if multiple_of is not None:
        checks.positive_int(_WHO, "multiple_of", multiple_of, "MindSpore's is 16.")
    specs = None if param_specs is None else _by_path(param_specs)

    @describe(_WHO, "centralize")
    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        del extra_args
        trees.require_gradients(updates, _WHO)
        kernels = Kernels(_WHO, layout, updates)
        shapes = {path: np.shape(p) for path, p in jax.tree_util.tree_leaves_with_path(params)}

        def one(path: Path, g: Any) -> Any:
            dims = _averaged(rules, kernels, path, g)
            if not dims:
                return g
            _require_shape(path, g, shapes.get(path))
            cut = _cut(specs, path, g.ndim)
            sizes = [g.shape[dim] * mesh_axes.size(cut[dim]) for dim in dims]
            if math.prod(sizes) < 2 or (multiple_of is not None and sizes[-1] % multiple_of):
                return g
            return centralized(g, dims, tuple(name for dim in dims for name in cut[dim]))

        return jax.tree_util.tree_map_with_path(one, updates), state

    def init_fn(params: PyTree) -> optax.EmptyState:
        if not callable(rules):
            _require_matches(rules, params)
        kernels = Kernels(_WHO, layout, params)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            _averaged(rules, kernels, path, leaf)
        return optax.EmptyState()

    tx = optax.GradientTransformationExtraArgs(init_fn, update_fn)
    return tx if mask is None else optax.masked(tx, mask)


def centralized(g: Any, dims: tuple[int, ...], names: tuple[str, ...] = ()) -> jax.Array:
    """``g`` without its mean over ``dims``, which are cut into equal parts over the mesh axes."""
    g = jnp.asarray(g)
    wide = g.astype(trees.wide_dtype(g))
    # Shards are of one size, so the mean of their means is the mean.
    mean = mesh_axes.mean(jnp.mean(wide, dims, keepdims=True), names)
    return trees.saturate(wide - mean, g.dtype)


def _averaged(rules: Any, kernels: Kernels, path: Path, leaf: Any) -> tuple[int, ...]:
    """The axes to average over, the input channels last; none for a leaf that stays."""
    name, ndim = trees.path_name(path), np.ndim(leaf)
    if callable(rules):
        rule = rules(name, leaf)
        _check_rule(rule)
    elif kernels.is_vector(path, ndim):
        return ()
    else:
        rule = next((rule for pattern, rule in rules if matches(name, pattern)), "auto")
    if rule is None:
        return ()
    if isinstance(rule, str):
        return kernels.inputs(path, ndim, int(rule == "stacked"))
    given: list[Any] = [*rule] if isinstance(rule, (tuple, list)) else [rule]
    dims = tuple(sorted({dim + ndim if dim < 0 else dim for dim in given}))
    if len(dims) < len(given) or any(not 0 <= dim < ndim for dim in dims):
        allowed = f"different axes of {name or 'the root'!r}, which has {ndim}"
        raise ValueError(checks.message(_WHO, "axes", allowed, rule, "None leaves a leaf alone."))
    return kernels.ordered(dims)


def _require_matches(rules: list[tuple[str, Any]], params: PyTree) -> None:
    """Refuse patterns that match no param, unless some params are masked."""
    found = jax.tree_util.tree_leaves_with_path(params)
    if not found or trees.find(params, lambda node: isinstance(node, optax.MaskedNode)):
        return
    names = [trees.path_name(path) for path, _ in found]
    for pattern, _ in rules:
        if not any(matches(name, pattern) for name in names):
            shown = ", ".join(map(repr, names[:6])) + (", ..." if len(names) > 6 else "")
            hint = f"It matches none; there are {shown}."
            allowed = "patterns that match params"
            raise ValueError(checks.message(_WHO, "axes", allowed, pattern, hint))


def _require_shape(path: Path, g: Any, shape: tuple[int, ...] | None) -> None:
    if shape is not None and shape != g.shape:
        raise ValueError(
            f"{_WHO}: gradients must have the shapes of the params, got {g.shape} for {shape} at "
            f"{trees.path_name(path) or 'the root'!r}. Put it before whatever cuts them."
        )


def _cut(
    specs: dict[Path, PartitionSpec] | None, path: Path, ndim: int
) -> tuple[tuple[str, ...], ...]:
    """The mesh axes, manual where this is traced, over which each axis of a leaf is cut."""
    if specs is None:
        return ((),) * ndim
    name = trees.path_name(path) or "the root"
    spec = specs.get(path)
    if spec is None:
        allowed = "a tree of PartitionSpec with one for each param"
        hint = "Use PartitionSpec() for a replicated leaf, not None."
        raise ValueError(checks.message(_WHO, "param_specs", allowed, f"none at {name}", hint))
    if len(spec) > ndim:
        allowed = f"for the {ndim} axes of {name!r}"
        hint = "Each entry is the mesh axes of one of them."
        raise ValueError(checks.message(_WHO, "param_specs", allowed, spec, hint))
    entries = (*spec, *[None] * (ndim - len(spec)))
    return tuple(tuple(x for x in _names(entry) if _bound(x)) for entry in entries)


def _names(entry: Any) -> tuple[str, ...]:
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def _bound(name: str) -> bool:
    # Under plain jit nothing is: sizes and means are those of the whole leaf already.
    if mesh_axes.bound((name,)):
        return True
    known = mesh_axes.of_the_mesh()
    if known and name not in known:
        allowed = f"among the mesh's axes {known}"
        hint = "They are those of the surrounding jax.shard_map."
        raise ValueError(checks.message(_WHO, "param_specs", allowed, name, hint))
    return False


def _by_path(param_specs: PyTree) -> dict[Path, PartitionSpec]:
    is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    found = jax.tree_util.tree_leaves_with_path(param_specs, is_leaf=is_spec)
    for _, spec in found:
        if not is_spec(spec):
            allowed, hint = "a tree of PartitionSpec", "PartitionSpec() is for a replicated leaf."
            raise TypeError(checks.message(_WHO, "param_specs", allowed, spec, hint))
    # By path: optax.masked and scheduled_freeze leave out leaves that the specs have.
    return dict(found)


def _as_rules(axes: Any) -> Any:
    """Pairs of a pattern and its rule, or the function that was given."""
    if callable(axes):
        return axes
    if isinstance(axes, str) and axes == "auto":
        return []
    hint = "Try {'layers': 'stacked', '*/qkv': 0}."
    if isinstance(axes, str) or not isinstance(axes, (Mapping, Sequence)):
        raise TypeError(checks.message(_WHO, "axes", _RULES, axes, hint))
    pairs: list[Any] = list(axes.items()) if isinstance(axes, Mapping) else list(axes)
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(checks.message(_WHO, "axes", _RULES, pair, hint))
        _check_rule(pair[1])
    return pairs


def _check_rule(rule: Any) -> None:
    hint = "0 averages over the first axis, (0, 1) over the first two."
    if isinstance(rule, str):
        if rule not in ("auto", "stacked"):
            raise ValueError(checks.message(_WHO, "axes", _RULE, rule, hint))
    elif rule is not None:
        for dim in rule if isinstance(rule, (tuple, list)) else (rule,):
            try:
                if isinstance(dim, bool):
                    raise TypeError
                operator.index(dim)
            except TypeError as error:
                raise TypeError(checks.message(_WHO, "axes", _RULE, rule, hint)) from error


def _check_mask(mask: Any) -> None:
    for leaf in [] if callable(mask) else jax.tree.leaves(mask):
        if not isinstance(leaf, (bool, np.bool_)):
            allowed = "a tree of bools, or a function of the params that makes one"
            hint = "jax.tree.map(lambda p: p.ndim == 4, params) is for convolutions alone."
            raise TypeError(checks.message(_WHO, "mask", allowed, leaf, hint))
