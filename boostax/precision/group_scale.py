# SPDX-License-Identifier: Apache-2.0
"""One loss scale per group of layers: where a single one overflows here and underflows there.

Gradients of early layers can be orders of magnitude smaller than those of late ones. With a scale
for every group each works where f16 has its numbers; where the backward pass goes from one group to
the next, the cotangent changes its scale (``boundary.py``).

References:
  MindSpore 2.10, ``mindspore.boost.GroupLossScaleManager``: the factors, and the ratio of scales
  at a boundary. It unscales by the scale *after* the update, and has no floors or ceilings.
  Zhao et al., Adaptive Loss Scaling for Mixed Precision Training,
  https://arxiv.org/abs/1910.12385, 2019: scales per layer.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax._core import axes, checks, handshake, said, trees
from boostax._core.describe import Stepped, describe
from boostax._core.finite import largest_magnitudes, usable
from boostax._core.gate import Pending, flush_of, gated, init_inner, run, run_or_hold
from boostax.precision.group_state import GroupLossScaleState, check_labels, group_numbers
from boostax.precision.loss_scale import decided

PyTree = Any
_WHO = "group_loss_scale"
# Where f16 ends, and half its smallest subnormal: a gradient that came out zero was below it.
_TOP, _VANISHED = 2.0**16, 2.0**-25
# The ratio of two scales, and the reciprocal of each, must be normal f32.
_LOW, _HIGH = 2.0**-60, 2.0**60
# Skips in a row, four bits of the default factor, before the next group is suspected too.
_PATIENCE = 8


class _Rule(NamedTuple):
    """The arguments that move the table; see ``group_loss_scale``."""

    growth: float
    backoff: float
    low: float
    high: float
    each: bool
    headroom: float | None


def _adjusted(
    state: GroupLossScaleState, rule: _Rule, present: jax.Array, bad: jax.Array, largest: jax.Array
) -> GroupLossScaleState:
    """Move the table by what a step's gradients say of each group.

    Args:
      state: the old one.
      rule: the factors and their limits.
      present: bool ``[G]``, whether the group has gradients in this step (a frozen one has none).
      bad: bool ``[G]``, whether one of them is not finite, or its square would not be.
      largest: f32 ``[G]``, the largest magnitude, unscaled; 0 where bad.
    """
    groups = jnp.arange(state.table.shape[-1])
    blamed = jnp.max(jnp.where(bad, groups, -1))
    last = blamed + state.skipped_in_a_row // _PATIENCE
    lowers = (groups >= blamed) & (groups <= last) & (blamed >= 0) | (bad & rule.each)
    clean = present & ~bad & ~lowers
    grown = jnp.minimum(state.table * rule.growth, rule.high)
    if rule.headroom is not None:
        scaled = jnp.maximum(largest * state.scales, _VANISHED)
        wanted = jnp.clip(state.scales * (_TOP / rule.headroom / scaled), rule.low, rule.high)
        grown = jnp.where(state.largest > 0, jnp.minimum(grown, wanted), wanted)
    lowered = jnp.maximum(state.table * rule.backoff, rule.low)
    table = jnp.where(lowers, lowered, jnp.where(clean, grown, state.table))
    return state._replace(
        table=table.astype(jnp.float32),
        largest=jnp.where(clean & (largest > 0), largest, state.largest),
        overflow_group=jnp.where(blamed >= 0, blamed, state.overflow_group).astype(jnp.int32),
    )


def _look(
    grads: Pending, numbers: list[int], inverse: jax.Array, names: tuple[str, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return ``present``, ``bad`` and ``largest`` of each group, agreed on all replicas."""
    pairs = list(zip(jax.tree.leaves(grads.raw), numbers, strict=True))
    bad: list[jax.Array] = []
    largest: list[jax.Array] = []
    for group in range(inverse.size):
        own = grads._replace(raw=[g for g, number in pairs if number == group])
        own = own.times(inverse[group])
        found = own._replace(raw=largest_magnitudes(own.raw)).value()
        bad.append(~usable(own))
        largest.append(jnp.max(jnp.stack([jnp.float32(0), *(x.astype("f4") for x in found)])))
    flags = jnp.stack(bad)
    both = jnp.stack([flags.astype(jnp.float32), jnp.where(flags, 0, jnp.stack(largest))])
    both = axes.largest(both, axes.with_shards(both, names)) if names else both
    present = jnp.asarray([group in numbers for group in range(inverse.size)])
    return present, both[0] > 0, both[1]


def _unscaled(grads: Pending, numbers: list[int], inverse: jax.Array) -> PyTree:
    leaves, treedef = jax.tree.flatten(grads.value())
    pairs = zip(leaves, numbers, strict=True)
    return treedef.unflatten([g * inverse[k].astype(g.real.dtype) for g, k in pairs])


def _first(count: int, init_scale: Any, inner_state: Any) -> GroupLossScaleState:
    table = jnp.asarray(init_scale, jnp.float32)
    allowed, hint = f"a number or one for each group, {count}", "The first is group 0's."
    checks.require(_WHO, "init_scale", init_scale, allowed, table.shape in ((), (count,)), hint)
    return GroupLossScaleState(
        jnp.full(count, table),
        jnp.zeros(count, jnp.float32),
        jnp.asarray(-1, jnp.int32),
        jnp.asarray(False),
        *(jnp.zeros((), jnp.int32) for _ in range(2)),
        inner_state=inner_state,
    )


@said.gate
def group_loss_scale(
    inner: optax.GradientTransformation,
    labels: Any,
    *,
    init_scale: float | tuple[float, ...] | jax.Array = 4096.0,
    growth_factor: float = 2 ** (1 / 1000),
    backoff_factor: float = 2**-0.5,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    overflow: Literal["blame", "each"] = "blame",
    rule: Literal["trial", "measure"] = "trial",
    headroom: float = 16.0,
    axis_name: axes.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Unscale each group of layers by its own scale, run ``inner`` if all are finite, adapt.

    For group :math:`k` the table holds :math:`t_k`, the scale is :math:`s_k = 2^{\lfloor \log_2 t_k
    \rfloor}`, and ``inner`` sees the gradients :math:`g_k / s_k`. Powers of two alone are applied,
    so scaling, boundaries and unscaling are exact. After each step, with :math:`b` the group to
    blame for an overflow:

    .. math::
      t_k \leftarrow \min(t_k \cdot \text{growth}, \text{max}) \text{ if } g_k \text{ is finite},
      \qquad t_b \leftarrow \max(t_b \cdot \text{backoff}, \text{min}).

    Any overflow skips the whole step, bit for bit. In the backward pass what is not finite goes
    from the later groups to the earlier ones and ruins them all: to blame is the *last* group whose
    gradients are not finite. Those before it stay unchanged, as nothing is known of them; those
    after it grow. An activation's cotangent can overflow without any trace in the gradients of its
    own group: so after every eight skips in a row one group more, towards the loss, is lowered too.

    ``overflow="each"`` is MindSpore's rule instead: every group whose own gradients are not finite
    is lowered, however many they are; the others grow.

    ``rule="measure"`` does not feel its way: the first gradient of a group sets its scale, so that
    the largest magnitude :math:`m_k` of the scaled gradient comes to ``2**16 / headroom``; from
    then on :math:`t_k \le s_k\, 2^{16} / (\text{headroom} \cdot m_k)` holds beside the rule above.

    The loss must be multiplied by the scale of the last group, and have a ``scale_boundary`` on
    every edge between groups, which ``check_boundaries`` proves.

    Args:
      inner: the rest of the optimizer; it sees f32 (or wider) gradients and params.
      labels: the group of each leaf, 0 for the first in the forward pass: a tree of ints like the
        params (``boostax.freeze.prefix_groups``), a list of patterns, or a function of path and
        leaf; as the groups of ``boostax.scheduled_freeze``.
      init_scale: first entry of the table, for all groups or one for each.
      growth_factor: > 1, per clean step.
      backoff_factor: in (0, 1), per overflow.
      min_scale: from 2**-60.
      max_scale: up to 2**60. Where gradients vanish on the way down, early groups want more than
        the default.
      overflow: ``"blame"`` lowers the group where an overflow began, ``"each"`` all that show one.
      rule: ``"trial"``, MindSpore's, or ``"measure"``.
      headroom: from 1 to 2**16, for ``"measure"``: how far below 2**16 the largest gradient is to
        stay, for the noise of batches, and for activations whose cotangents are larger than the
        gradients.
      axis_name: replica axis (or axes) over which finiteness is agreed. Gradients must then be
        *local*: see ``boostax.train.local_params``.

    Returns:
      A transformation with a ``GroupLossScaleState``. Cost: 8 bytes per group; one read of the
      gradients; one collective of 8 bytes per group with ``axis_name``; otherwise as
      ``dynamic_loss_scale``.

    Raises:
      ValueError, TypeError: an argument out of range; at trace time, as ``dynamic_loss_scale``.

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
    hint = "It lies between min_scale and max_scale; 4096 is the default."
    scales: Any = init_scale
    for first in scales if np.ndim(scales) else [scales]:
        _between("init_scale", first, min_scale, max_scale, hint)
    hint = "2**(1/1000) doubles the scale in 1000 steps."
    checks.number(_WHO, "growth_factor", growth_factor, "greater than 1", lambda x: x > 1, hint)
    hint = "2**-0.5 halves the scale at every other overflow."
    checks.number(_WHO, "backoff_factor", backoff_factor, "in (0, 1)", lambda x: 0 < x < 1, hint)
    checks.choice(_WHO, "overflow", overflow, ("blame", "each"), "'each' is MindSpore's.")
    checks.choice(_WHO, "rule", rule, ("trial", "measure"), "'trial' is MindSpore's.")
    _between("headroom", headroom, 1.0, _TOP, "16 keeps the largest gradient below 2**12.")
    tx, names = checks.transformation(_WHO, "inner", inner), axes.canonical(_WHO, axis_name)
    each, room = overflow == "each", headroom if rule == "measure" else None
    moves = _Rule(growth_factor, backoff_factor, min_scale, max_scale, each, room)

    def init_fn(params: PyTree) -> GroupLossScaleState:
        count = group_numbers(_WHO, labels, params)[1]
        return _first(count, init_scale, init_inner(tx, params))

    @describe(_WHO, "scaler", names, inner={"inner_state": tx})
    def step_fn(
        grads: Pending, state: GroupLossScaleState, params: PyTree, *, apply: bool, **extra: Any
    ) -> Stepped:
        trees.require_gradients(grads.raw, _WHO)
        axes.require_local(grads.raw, names, _WHO)
        numbers, _ = group_numbers(_WHO, labels, grads.raw)
        handshake.require(_WHO, state.table, len(set(numbers)))
        # Exact, and so are the products, because the scales are powers of two.
        inverse = 1.0 / state.scales
        present, bad, largest = _look(grads, numbers, inverse, names)
        ok = ~bad.any()

        def heavy() -> Stepped:
            more = extra
            if "grad" in extra:
                raw = grads._replace(raw=extra["grad"])
                more = extra | {"grad": _unscaled(raw, numbers, inverse)}
            pending = Pending(_unscaled(grads, numbers, inverse))
            return run(tx, pending, state.inner_state, params, apply=apply, extra=more)

        held = params, state.inner_state
        value, inner_state = run_or_hold(ok, heavy, *held, apply=apply, who=_WHO, names=names)
        state = _adjusted(state, moves, present, bad, largest)
        return value, decided(state, ok, inner_state)

    return gated(init_fn, step_fn, flush_of(tx, "last_finite"))


def _between(argument: str, value: Any, low: Any, high: Any, hint: str) -> None:
    allowed = f"from {low!r} to {high!r}"
    checks.number(_WHO, argument, value, allowed, lambda x: low <= x <= high, hint)
