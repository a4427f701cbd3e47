# SPDX-License-Identifier: Apache-2.0
"""One loss scale per group of layers, for models in which no single scale suits all layers.

Gradients of early layers can be orders of magnitude smaller than gradients of late layers. With a
scale per group, the gradients of every group are in the range of f16.

Where the backward pass moves from one group to another, the cotangent changes its scale. Let
``s_k`` be the scale of group ``k``, by which every cotangent inside the group is multiplied. The
cotangent of a value that is computed in group ``o`` and used in group ``i`` arrives multiplied by
``s_i``, and must leave multiplied by ``s_o``. So a boundary multiplies the cotangent by ``s_o /
s_i``, a power of two, which is exact. The forward pass is unchanged.

References:
  ``mindspore.boost.GroupLossScaleManager``, MindSpore 2.10, multiplies scales by the same factors,
  and has the same ratio of scales at a boundary. MindSpore unscales by the scale *after* the
  update, and has no smallest or largest scale. Zhao et al., Adaptive Loss Scaling for Mixed
  Precision Training, https://arxiv.org/abs/1910.12385, 2019: scales per layer.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from boostax._core import axes, bound_axis, checks, gate, groups, handshake, norms, trees
from boostax._core.describe import Holds, Stepped, describe
from boostax._core.gate import Pending
from boostax._core.types import PyTree
from boostax.precision.loss_scale import decided, require, scale_array, scales

Group = int | jax.Array
Overflow = Literal["blame", "each"]
Rule = Literal["trial", "measure"]
_WHO = "group_loss_scale"
# The end of f16's range, and half of f16's smallest subnormal, below which gradients round to zero.
_TOP, _VANISHED = 2.0**16, 2.0**-25
# The ratio of two scales, and the reciprocal of each scale, must be normal numbers in f32.
_LOW, _HIGH = 2.0**-60, 2.0**60
# The number of consecutive skips (four halvings by the default factor) after which the scale of the
# next group is also lowered.
_PATIENCE = 8


class GroupLossScaleState(NamedTuple):
    """State of ``group_loss_scale``, for G groups.

    Attributes:
      table: f32 ``[G]``, the entries that ``growth_factor`` and ``backoff_factor`` multiply; a
        group's scale is the largest power of two that does not exceed its entry.
      largest: f32 ``[G]``, largest unscaled magnitude in the group's last finite, nonzero gradient;
        0 until the group has such a gradient.
      overflow_group: i32, the group blamed for the last skipped step; -1 before the first skip.
      applied: bool, whether the last gradients were finite, so that the call ran the inner
        transformation; False before the first call.
      skipped: i32, calls that were skipped since the start.
      skipped_in_a_row: i32, calls that were skipped since the last applied call.
      inner_state: state of the inner transformation.
    """

    table: jax.Array  # [groups] float32
    largest: jax.Array  # [groups] float32
    overflow_group: jax.Array  # [] int32
    applied: jax.Array  # [] bool
    skipped: jax.Array  # [] int32
    skipped_in_a_row: jax.Array  # [] int32
    inner_state: optax.OptState
    holds = Holds(("table", "largest", "overflow_group"), scale="table")

    @property
    def scales(self) -> jax.Array:
        """Return the groups' scales, f32 ``[G]``: the entries, rounded down to powers of two."""
        # The bits of the fraction are cleared, because log2 and exp2 are not exact on every device.
        bits = jax.lax.bitcast_convert_type(self.table, jnp.int32)
        return jax.lax.bitcast_convert_type(bits & ~0x7FFFFF, jnp.float32)

    # The loss is multiplied by the scale of the last group.
    scale = property(lambda x: x.scales[..., -1], doc="The scale of the last group, f32.")
    scale_array = scale_array
    inner_ran = gradient_used = gate.flag

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        scalars = {"loss_scale": self.scale, "skipped_in_a_row": self.skipped_in_a_row}
        scalars["overflow_group"] = self.overflow_group
        for group in range(self.table.shape[-1]):
            scalars[f"group_{group}_scale"] = self.scales[..., group]
            scalars[f"group_{group}_largest"] = self.largest[..., group]
        return scalars


class _Rule(NamedTuple):
    """The arguments that decide how the table is updated; see ``group_loss_scale``."""

    growth: float
    backoff: float
    low: float
    high: float
    lowers_all: bool
    headroom: float | None


def _next(
    state: GroupLossScaleState, rule: _Rule, present: jax.Array, bad: jax.Array, largest: jax.Array
) -> GroupLossScaleState:
    """Update the table after a step.

    Args:
      state: the old state.
      rule: the factors and their limits.
      present: bool ``[G]``, whether the group has gradients in this step (a frozen group has none).
      bad: bool ``[G]``, whether a gradient of the group, or its square, is not finite.
      largest: f32 ``[G]``, the largest unscaled magnitude; 0 where ``bad`` is True.
    """
    numbers = jnp.arange(state.table.shape[-1])
    blamed = jnp.max(jnp.where(bad, numbers, -1))
    last = blamed + state.skipped_in_a_row // _PATIENCE
    lowers = (numbers >= blamed) & (numbers <= last) & (blamed >= 0) | (bad & rule.lowers_all)
    clean = present & ~bad & ~lowers
    grown = jnp.minimum(state.table * rule.growth, rule.high)
    if rule.headroom is not None:
        scaled = jnp.maximum(largest * state.scales, _VANISHED)
        target = jnp.clip(state.scales * (_TOP / rule.headroom / scaled), rule.low, rule.high)
        grown = jnp.where(state.largest > 0, jnp.minimum(grown, target), target)
    lowered = jnp.maximum(state.table * rule.backoff, rule.low)
    return state._replace(
        table=jnp.where(lowers, lowered, jnp.where(clean, grown, state.table)).astype(jnp.float32),
        largest=jnp.where(clean & (largest > 0), largest, state.largest),
        overflow_group=jnp.where(blamed >= 0, blamed, state.overflow_group).astype(jnp.int32),
    )


def _look(
    grads: Pending, numbers: list[int], inverse: jax.Array, names: tuple[str, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return ``present``, ``bad`` and ``largest`` of each group, equal on all replicas."""
    pairs = list(zip(jax.tree.leaves(grads.raw), numbers, strict=True))
    results = list[tuple[jax.Array, jax.Array]]()
    for group in range(inverse.size):
        members = [g for g, number in pairs if number == group]
        scaled = grads._replace(raw=members).times(inverse[group])
        magnitudes = scaled._replace(raw=norms.largest_magnitudes(members)).value()
        top = jnp.stack([jnp.float32(0), *(x.astype(jnp.float32) for x in magnitudes)])
        results.append((~scaled.usable(), jnp.max(top)))
    bad, largest = map(jnp.stack, zip(*results, strict=True))
    both = jnp.stack([bad.astype(jnp.float32), jnp.where(bad, 0, largest)])
    both = axes.largest(both, axes.with_shards(both, names)) if names else both
    return jnp.asarray([group in numbers for group in range(inverse.size)]), both[0] > 0, both[1]


def _first(
    tx: optax.GradientTransformationExtraArgs, labels: PyTree, init_scale: PyTree, params: PyTree
) -> GroupLossScaleState:
    """Return the first state, from the arguments of ``group_loss_scale``."""
    count = group_numbers(_WHO, labels, params)[1]
    table = jnp.asarray(init_scale, jnp.float32)
    allowed = f"one number, or a number for each of {count} groups"
    hint = "The first number is the scale of group 0."
    checks.require(table.shape in ((), (count,)), _WHO, "init_scale", init_scale, allowed, hint)
    first = jnp.full(count, table), jnp.zeros(count, jnp.float32), jnp.asarray(-1, jnp.int32)
    calls = jnp.asarray(False), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return GroupLossScaleState(*first, *calls, gate.init_inner(tx, params))


@bound_axis.gate
def group_loss_scale(
    inner: optax.GradientTransformation,
    labels: PyTree,
    *,
    init_scale: float | tuple[float, ...] | jax.Array = 4096.0,
    growth_factor: float = 2 ** (1 / 1000),
    backoff_factor: float = 2**-0.5,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    overflow: Overflow = "blame",
    rule: Rule = "trial",
    headroom: float = 16.0,
    axis_name: axes.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Unscale each group, run ``inner`` if all gradients are finite, and adapt the scales.

    For group :math:`k` the table contains :math:`t_k`, the scale is :math:`s_k = 2^{\lfloor \log_2
    t_k \rfloor}`, and ``inner`` receives the gradients :math:`g_k / s_k`. Every scale is a power of
    two, so scaling, boundaries and unscaling are exact. After each step the table changes as
    follows, where :math:`b` is the group that is blamed for an overflow:

    .. math::
      t_k \leftarrow \min(t_k \cdot \text{growth}, \text{max}) \text{ if } g_k \text{ is finite},
      \qquad t_b \leftarrow \max(t_b \cdot \text{backoff}, \text{min}).

    An overflow in any group skips the complete step: params and the state of ``inner`` keep their
    bits. The backward pass carries an infinity or a NaN from a group to all earlier groups, so the
    *last* group whose gradients are not finite is blamed. The entries of later groups grow. The
    entries of earlier groups remain unchanged, because the gradients of these groups do not show
    whether their scales are too large. The cotangent of an activation can overflow although all
    gradients of its group are finite. So after every eight skips in a row, the scale of one more
    group, the next towards the loss, is also lowered.

    ``overflow="each"`` is MindSpore's rule: the scale of every group with non-finite gradients is
    lowered, and all other scales grow.

    With ``rule="measure"``, the first gradient of a group sets its scale, so that the largest
    magnitude :math:`m_k` of the scaled gradient is ``2**16 / headroom``. From then on, the rule
    above applies with the additional bound
    :math:`t_k \le s_k\, 2^{16} / (\text{headroom} \cdot m_k)`.

    The loss must be multiplied by the scale of the last group, and must have a ``scale_boundary``
    on every edge between groups; ``check_boundaries`` finds missing boundaries.

    Args:
      inner: the rest of the optimizer, which receives gradients and params in f32 or wider.
      labels: the group of each leaf, where group 0 is the first in the forward pass. As in
        ``boostax.scheduled_freeze``, pass a tree of ints like the params
        (``boostax.freeze.prefix_groups``), a list of patterns, or a function of path and leaf.
      init_scale: initial entries of the table: one number for all groups, or one number per group.
      growth_factor: > 1, per step without overflow.
      backoff_factor: in (0, 1), per overflow.
      min_scale: from 2**-60.
      max_scale: up to 2**60. If gradients vanish towards the first layers, early groups need more
        than the default.
      overflow: ``"blame"`` lowers the scale of the group in which an overflow began; ``"each"``
        lowers the scales of all groups with an overflow.
      rule: ``"trial"``, the rule of MindSpore, or ``"measure"``.
      headroom: for ``"measure"``, from 1 to 2**16: the ratio of 2**16 to the largest scaled
        gradient. This margin allows for noisy batches, and for cotangents of activations that are
        larger than the gradients.
      axis_name: replica axis (or axes) over which replicas agree whether all gradients are finite.
        Gradients must then be *local*; see ``boostax.train.local_params``. With ``None``, a train
        step supplies its axis if ``inner`` has a reduction; outside a train step, no axis is used.

    Returns:
      A transformation with a ``GroupLossScaleState``. Cost: 8 bytes per group; one read of the
      gradients; with ``axis_name``, one collective of 8 bytes per group; otherwise as in
      ``dynamic_loss_scale``.

    Raises:
      ValueError, TypeError: an argument out of range; at trace time, see ``dynamic_loss_scale``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> labels = {"body": 0, "head": 1}
      >>> tx = boostax.precision.group_loss_scale(optax.sgd(1.0), labels, init_scale=8.0)
      >>> params = {"body": jnp.float32(1.0), "head": jnp.float32(1.0)}
      >>> grads = {"body": jnp.float16(2.0), "head": jnp.float16(jnp.inf)}
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> float(updates["body"]), state.scales.tolist()
      (0.0, [8.0, 4.0])

    References:
      ``mindspore.boost.GroupLossScaleManager``, MindSpore 2.10.
    """
    check_labels(_WHO, labels)
    _between("min_scale", min_scale, _LOW, _HIGH, "1 is the default.")
    _between("max_scale", max_scale, _LOW, _HIGH, "2**24 is the default.")
    hint = "Choose a number between min_scale and max_scale, or the default 4096."
    scales: Any = init_scale
    for first in scales if np.ndim(scales) else [scales]:
        _between("init_scale", first, min_scale, max_scale, hint)
    hint = "2**(1/1000) doubles the scale in 1000 steps; 2**-0.5 halves the scale in two overflows."
    checks.number(_WHO, "growth_factor", growth_factor, "greater than 1", hint, above=1)
    checks.number(_WHO, "backoff_factor", backoff_factor, "in (0, 1)", hint, above=0, below=1)
    checks.choice(_WHO, "overflow", overflow, Overflow, "MindSpore's rule is 'each'.")
    checks.choice(_WHO, "rule", rule, Rule, "MindSpore's rule is 'trial'.")
    _between("headroom", headroom, 1.0, _TOP, "With headroom=16, scaled gradients are below 2**12.")
    tx = checks.transformation(_WHO, "inner", inner)
    names = axes.canonical(_WHO, axis_name)
    room = headroom if rule == "measure" else None
    moves = _Rule(growth_factor, backoff_factor, min_scale, max_scale, overflow == "each", room)

    @describe(_WHO, "scaler", names, inner={"inner_state": tx})
    def step_fn(
        grads: Pending, state: GroupLossScaleState, params: PyTree, *, apply: bool, **extra: Any
    ) -> Stepped:
        axes.require_local(grads.raw, names, _WHO)
        numbers, _ = group_numbers(_WHO, labels, grads.raw)
        require(_WHO, state.table, grads.raw, params, len(set(numbers)))
        # Reciprocals and products are exact, because the scales are powers of two.
        inverse = 1.0 / state.scales
        present, bad, largest = _look(grads, numbers, inverse, names)
        ok = ~bad.any()
        inner = state.inner_state

        def heavy() -> Stepped:
            # A line search receives the gradients also as the argument ``grad``.
            raw = {"grad": extra["grad"]} if "grad" in extra else {}
            unscaled = dict[str, PyTree]()
            for key, tree in (*raw.items(), ("grads", grads.raw)):
                leaves, treedef = jax.tree.flatten(grads._replace(raw=tree).value())
                pairs = zip(leaves, numbers, strict=True)
                products = [g * inverse[k].astype(g.real.dtype) for g, k in pairs]
                unscaled[key] = treedef.unflatten(products)
            pending = Pending(unscaled.pop("grads"))
            return gate.call(tx, pending, inner, params, apply=apply, extra=extra | unscaled)

        ok, moved = gate.skip_if_empty(ok, _next(state, moves, present, bad, largest), state, grads)
        value, new = gate.run_or_hold(ok, heavy, params, inner, apply=apply, who=_WHO, names=names)
        return value, decided(moved, ok, new)

    return gate.gated(lambda p: _first(tx, labels, init_scale, p), step_fn, gate.flush_of(tx))


def group_scales(opt_state: PyTree) -> jax.Array | None:
    """Return the scale of each group in the next step, for the ``scale_boundary`` calls of a loss.

    Args:
      opt_state: any optimizer state; the scaler may be nested anywhere in the state.

    Returns:
      f32 ``[groups]``, powers of two; ``None`` if the state has no ``GroupLossScaleState``.

    Raises:
      ValueError: there are several scalers, or some gradients bypass the scaler.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> labels = {"body": 0, "head": 1}
      >>> tx = boostax.precision.group_loss_scale(optax.sgd(0.1), labels, init_scale=3000.0)
      >>> state = tx.init({"body": jnp.ones(3), "head": jnp.ones(2)})
      >>> boostax.precision.group_scales(state).tolist()
      [2048.0, 2048.0]
    """
    return scales("group_scales", opt_state)[1]


def group_numbers(who: str, labels: PyTree, params: PyTree) -> tuple[list[int], int]:
    """Return the group of each leaf of ``params`` that is not masked, and the number of groups.

    A masked leaf also has a label, so the groups do not depend on which leaves are trained.
    """
    leaves, treedef = jax.tree.flatten(params, is_leaf=trees.is_masked)
    stand_in = jax.ShapeDtypeStruct((), jnp.float32)
    unmasked = treedef.unflatten([stand_in if trees.is_masked(x) else x for x in leaves])
    try:
        numbers = groups.as_groups(who, labels, unmasked)
    except (TypeError, ValueError) as err:
        raise type(err)(str(err).replace(f"{who}: groups must", f"{who}: labels must", 1)) from err
    pairs = zip(jax.tree.leaves(numbers.tree), leaves, strict=True)
    return [number for number, x in pairs if not trees.is_masked(x)], numbers.count


def check_labels(who: str, labels: PyTree) -> None:
    """Refuse labels that are neither numbers, patterns nor a function."""
    leaves = jax.tree.leaves(labels)
    allowed = "a tree of integers, a list of patterns, or a function of path and leaf"
    hint = "boostax.freeze.prefix_groups(params, n) returns labels of n groups."
    checks.require(bool(leaves), who, "labels", labels, allowed, hint)
    if not callable(labels) and not any(isinstance(label, str) for label in leaves):
        group_numbers(who, labels, labels)


def _between(name: str, value: float, low: float, high: float, hint: str) -> None:
    checks.number(_WHO, name, value, f"from {low!r} to {high!r}", hint, least=low, most=high)


# ``_edge`` is a custom_jvp and not a custom_vjp, so that JAX itself transposes the product with
# ``ratio``. JAX then preserves the value's varying axes, its batch dimension, and its position in a
# scan or a remat.
_edge = jax.custom_jvp(lambda x, ratio: x)


@_edge.defjvp
def _edge_jvp(primals: PyTree, tangents: PyTree) -> tuple[jax.Array, jax.Array]:
    x, ratio = primals
    # The product is in f32, because the ratio itself can exceed the range of f16.
    wide = trees.at_least_float32(tangents[0])
    return x, (wide * ratio.astype(wide.real.dtype)).astype(tangents[0].dtype)


def scale_boundary(x: PyTree, opt_state_or_scales: PyTree, outer: Group, inner: Group) -> PyTree:
    r"""Return ``x`` unchanged, and change the scale of its cotangent between two groups.

    In the backward pass, the cotangent arrives multiplied by :math:`s_\text{inner}`, and leaves
    multiplied by :math:`s_\text{outer}`:

    .. math:: \bar x_\text{outer} = \bar x_\text{inner} \cdot s_\text{outer} / s_\text{inner}.

    Place a boundary on *every* edge between groups: on an activation that enters the next group, on
    a residual stream to which a later group adds, and on a weight that is used in another group.
    The loss is in the last group. ``check_boundaries`` finds missing boundaries.

    Args:
      x: tree of arrays; integers are unchanged.
      opt_state_or_scales: f32 ``[groups]``, or an optimizer state with a ``GroupLossScaleState``;
        with ``None``, or another state, cotangents are unchanged.
      outer: the group in which ``x`` is computed, counted from 0; may be a traced integer.
      inner: the group in which ``x`` is used.

    Returns:
      ``x``. Cost: one product per element in the backward pass, fused with neighbouring operations;
      no memory, no collective.

    Raises:
      ValueError: a group does not exist.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> scales = jnp.array([64.0, 8.0])
      >>> jax.grad(lambda x: 8.0 * boostax.precision.scale_boundary(x, scales, 0, 1))(1.0)
      Array(64., dtype=float32, weak_type=True)

    References:
      ``mindspore.boost.GroupLossScaleManager``: ``m(x, outer, inner)``, with groups from 1.
    """
    who = "scale_boundary"
    is_scales = isinstance(opt_state_or_scales, (jax.Array, np.ndarray))
    scales = opt_state_or_scales if is_scales else group_scales(opt_state_or_scales)
    if scales is None:
        return x
    count = scales.shape[0]
    allowed = f"a group from 0 to {count - 1}"
    hint = "Group 0 is the first in the forward pass."
    for argument, group in (("outer", outer), ("inner", inner)):
        if not isinstance(group, Tracer):
            number = checks.natural(who, argument, group, hint, allowed)
            checks.require(number < count, who, argument, group, allowed, hint)
    for mark in handshake.marks(scales):
        mark.crossed = True
    wide = jnp.asarray(scales, jnp.float32)
    ratio = wide[outer] / wide[inner]
    return jax.tree.map(lambda y: _edge(y, ratio) if trees.is_inexact(jnp.result_type(y)) else y, x)


def check_boundaries(
    loss_fn: Callable[..., PyTree],
    params: PyTree,
    batch: PyTree,
    labels: PyTree,
    *,
    has_aux: bool = False,
    rtol: float = 1e-5,
    draws: int = 2,
    **kwargs: Any,
) -> float:
    """Test a loss function's boundaries: the unscaled gradients must not depend on the scales.

    For every group a power of two is drawn as its scale. The gradients at these scales are unscaled
    and compared with the gradients at scale 1. An edge with a missing or reversed boundary
    multiplies the gradients of earlier layers by a ratio of scales. The error names the leaves with
    such gradients. A zero gradient cannot show a wrong boundary. Check in f32, because in f16 the
    scales change which gradients underflow.

    Args:
      loss_fn: ``loss_fn(params, batch, *, scales, **kwargs)``.
      params: tree of arrays.
      batch: passed to the loss.
      labels: as in ``group_loss_scale``.
      has_aux: whether the loss returns ``(loss, aux)``.
      rtol: allowed difference, as a share of the largest element of the leaf.
      draws: number of draws of scales, from fixed seeds.
      **kwargs: passed to the loss: ``key=``, ``model_state=``.

    Returns:
      The largest relative difference; 0 means that all bits are equal.

    Raises:
      ValueError: a leaf's gradients depend on the scales.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> def loss_fn(params, x, *, scales):
      ...   hidden = boostax.precision.scale_boundary(jnp.tanh(x * params["body"]), scales, 0, 1)
      ...   return jnp.mean(hidden * params["head"])
      >>> params = {"body": jnp.float32(0.5), "head": jnp.float32(2.0)}
      >>> labels = {"body": 0, "head": 1}
      >>> boostax.precision.check_boundaries(loss_fn, params, jnp.arange(4.0), labels)
      0.0
    """
    who = "check_boundaries"
    checks.positive_int(who, "draws", draws, "2 is the default.")
    checks.number(who, "rtol", rtol, "at least 0", "1e-5 is the default.", least=0)
    numbers, count = group_numbers(who, labels, params)

    @jax.jit
    def gradients(scales: jax.Array) -> list[jax.Array]:
        def scaled(params: PyTree) -> jax.Array:
            result = loss_fn(params, batch, scales=scales, **kwargs)
            loss = trees.at_least_float32(result[0] if has_aux else result)
            return loss * scales[-1].astype(loss.dtype)

        grads = jax.tree.leaves(trees.at_least_float32(jax.grad(scaled)(params)))
        return [g / scales[k].astype(g.real.dtype) for g, k in zip(grads, numbers, strict=True)]

    # Up to 25 groups have distinct powers of two, because equal scales would hide an error.
    orders = [np.random.default_rng(seed).permutation(count) % 25 for seed in range(draws)]
    drawn = [jnp.asarray(np.exp2(x - min(count, 25) // 2), jnp.float32) for x in orders]
    plain, *others = (jax.device_get(gradients(x)) for x in (jnp.ones(count), *drawn))
    worst = dict[str, float]()
    for path, x, *scaled in zip(trees.names(params), plain, *others, strict=True):
        # The largest difference as a share of the largest element; infinity if there is a NaN.
        size, difference = (np.max(np.abs(y), initial=0) for y in (x, x - np.stack(scaled)))
        share = difference / size if np.isfinite(difference) and size > 0 else np.inf
        worst[path] = 0.0 if difference == 0 else float(share)
    wrong = [path for path, share in worst.items() if share > rtol]
    allowed = "a function with a scale_boundary on every edge between groups"
    got = f"gradients of {groups.few(wrong)} that depend on the scales"
    hint = "A boundary is missing or wrong between the last of these params and the loss."
    checks.require(not wrong, who, "loss_fn", got, allowed, hint)
    return max(worst.values(), default=0.0)
