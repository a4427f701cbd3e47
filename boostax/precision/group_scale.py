# SPDX-License-Identifier: Apache-2.0
"""One loss scale per group of layers: where a single one overflows here and underflows there.

Gradients of early layers can be orders of magnitude smaller than those of late ones. With a scale
for every group each works where f16 has its numbers; where the backward pass goes from one group to
the next, the cotangent changes its scale (``boundary.py``, ``crossings.py``).

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

from boostax._core import axes, checks, handshake, trees
from boostax._core.describe import describe
from boostax._core.finite import counts, largest_magnitudes, magnitude, usable
from boostax._core.gate import (
    Pending,
    branch,
    counted,
    flush_of,
    gated,
    init_inner,
    run,
    run_or_hold,
)
from boostax.precision.group_state import GroupLossScaleState, check_labels, decided, group_numbers

PyTree = Any

_F16 = jnp.finfo(jnp.float16)
_TINY, _TOP = float(_F16.tiny), 2.0**_F16.maxexp
# Half the smallest subnormal: what a gradient that came out zero may have been at most.
_VANISHED = 2.0**-25
# The ratio of two scales, and the reciprocal of each, must be normal f32.
_LOW, _HIGH = 2.0**-60, 2.0**60
# Skips in a row, four bits of the default factor, before the next group is suspected too.
_PATIENCE = 8


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
    count_every: int = 100,
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
    gradients are not finite. Those before it stay as they are, as nothing is known of them; those
    after it grow. An activation's cotangent can overflow without any trace in the gradients of its
    own group: so after every eight skips in a row one group more, towards the loss, is lowered too.

    ``overflow="each"`` is MindSpore's rule instead: every group whose own gradients are not finite
    is lowered, :math:`t_k \leftarrow \max(t_k \cdot \text{backoff}, \text{min})`, however many they
    are; the others grow.

    ``rule="measure"`` does not feel its way: the first gradient of a group sets its scale, so that
    the largest magnitude :math:`m_k` of the scaled gradient comes to ``2**16 / headroom``; from
    then on :math:`t_k \le s_k\, 2^{16} / (\text{headroom} \cdot m_k)` holds beside the rule above.

    The loss must be multiplied by the scale of the last group, and know the boundaries between the
    groups: see ``group_boundaries`` and ``scale_boundary``.

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
      headroom: >= 1, for ``"measure"``: how far below 2**16 the largest gradient is to stay, for
        the noise of batches, and for activations whose cotangents are larger than the gradients.
      count_every: steps from one count of the elements that underflow to the next; they are also
        counted at every overflow.
      axis_name: replica axis (or axes) over which finiteness is agreed. Gradients must then be
        *local*: see ``boostax.train.local_params``. Counts are then of the replica that has most.

    Returns:
      A transformation with a ``GroupLossScaleState``. Cost: 29 bytes per group; one read of the
      gradients, and another at each count; one collective of 8 bytes per group, and one of 12
      per group at each count, with ``axis_name``; otherwise as ``dynamic_loss_scale``.

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
    who = "group_loss_scale"
    check_labels(who, labels)
    _between(who, "min_scale", min_scale, _LOW, _HIGH, "1 is the default.")
    _between(who, "max_scale", max_scale, _LOW, _HIGH, "2**24 is the default.")
    hint = "It lies between min_scale and max_scale; 4096 is the default."
    scales: Any = init_scale
    for first in scales if np.ndim(scales) else [scales]:
        _between(who, "init_scale", first, min_scale, max_scale, hint)
    hint = "2**(1/1000) doubles the scale in 1000 steps."
    checks.number(who, "growth_factor", growth_factor, "greater than 1", lambda x: x > 1, hint)
    hint = "2**-0.5 halves the scale at every other overflow."
    checks.number(who, "backoff_factor", backoff_factor, "in (0, 1)", lambda x: 0 < x < 1, hint)
    hint = "'each' is MindSpore's."
    checks.choice(who, "overflow", overflow, ("blame", "each"), hint)
    checks.choice(who, "rule", rule, ("trial", "measure"), "'trial' is MindSpore's.")
    hint = "16 keeps the largest gradient below 2**12."
    allowed = "from 1 to 2**16"
    checks.number(who, "headroom", headroom, allowed, lambda x: 1 <= x <= _TOP, hint)
    hint = "100 counts at every hundredth step."
    count_every = checks.positive_int(who, "count_every", count_every, hint)
    tx = checks.transformation(who, "inner", inner)
    names = axes.canonical(who, axis_name)

    def init_fn(params: PyTree) -> GroupLossScaleState:
        _, count = group_numbers(who, labels, params)
        table = jnp.asarray(init_scale, jnp.float32)
        if table.shape not in ((), (count,)):
            allowed, hint = f"a number or one for each group, {count}", "The first is group 0's."
            raise ValueError(checks.message(who, "init_scale", allowed, init_scale, hint))
        zeros = [jnp.zeros(count, jnp.float32) for _ in range(4)]
        counters = [jnp.zeros((), jnp.int32) for _ in range(3)]
        return GroupLossScaleState(
            jnp.full(count, table),
            jnp.zeros(count, bool),
            *zeros,
            until_count=counters[0],
            overflow_group=jnp.asarray(-1, jnp.int32),
            backoffs=jnp.zeros(count, jnp.int32),
            floor_hits=jnp.zeros(count, jnp.int32),
            last_finite=jnp.asarray(False),
            skipped_steps=counters[1],
            skipped_in_a_row=counters[2],
            inner_state=init_inner(tx, params),
        )

    def adjust(state: GroupLossScaleState, seen: _Seen) -> GroupLossScaleState:
        groups = jnp.arange(state.table.shape[-1])
        blamed = jnp.max(jnp.where(seen.bad, groups, -1))
        last = blamed + state.skipped_in_a_row // _PATIENCE
        lowers = (groups >= blamed) & (groups <= last) & (blamed >= 0)
        lowers |= seen.bad if overflow == "each" else False
        clean = seen.present & ~seen.bad & ~lowers
        grown = jnp.minimum(state.table * growth_factor, max_scale)
        if rule == "measure":
            scaled = jnp.maximum(seen.largest * state.scales, _VANISHED)
            wanted = jnp.clip(state.scales * (_TOP / headroom / scaled), min_scale, max_scale)
            grown = jnp.where(state.measured, jnp.minimum(grown, wanted), wanted)
        lowered = jnp.maximum(state.table * backoff_factor, min_scale)
        table = jnp.where(lowers, lowered, jnp.where(clean, grown, state.table))
        at_floor = lowers & (state.table <= min_scale)
        return state._replace(
            table=table.astype(jnp.float32),
            measured=state.measured | (clean & (seen.largest > 0)),
            largest=jnp.where(seen.present & ~seen.bad, seen.largest, state.largest),
            overflow_group=jnp.where(blamed >= 0, blamed, state.overflow_group).astype(jnp.int32),
            backoffs=counted(state.backoffs, lowers & ~at_floor),
            floor_hits=counted(state.floor_hits, at_floor),
        )

    @describe(who, "scaler", names, inner={"inner_state": tx})
    def step_fn(
        grads: Pending, state: GroupLossScaleState, params: PyTree, *, apply: bool, **extra: Any
    ) -> tuple[PyTree, GroupLossScaleState]:
        trees.require_gradients(grads.raw, who)
        axes.require_local(grads.raw, names, who)
        numbers, _ = group_numbers(who, labels, grads.raw)
        handshake.require(who, state.table, handshake.by_path(grads.raw, numbers))
        leaves, treedef = jax.tree.flatten(grads.raw)
        parts = [
            grads._replace(raw=[x for x, k in zip(leaves, numbers, strict=True) if k == group])
            for group in range(state.table.shape[-1])
        ]
        # Exact, and so are the products, because the scales are powers of two.
        inverse = 1.0 / state.scales
        seen = _look(parts, inverse, names)
        ok = ~seen.bad.any()

        def unscaled(pending: Pending) -> PyTree:
            wide = zip(jax.tree.leaves(pending.value()), numbers, strict=True)
            return treedef.unflatten([g * inverse[k].astype(g.real.dtype) for g, k in wide])

        def heavy() -> tuple[PyTree, Any]:
            more = extra
            if "grad" in extra:
                more = extra | {"grad": unscaled(grads._replace(raw=extra["grad"]))}
            pending = Pending(unscaled(grads))
            return run(tx, pending, state.inner_state, params, apply=apply, extra=more)

        held = params, state.inner_state
        value, inner_state = run_or_hold(ok, heavy, *held, apply=apply, who=who, names=names)
        due = ~ok | (state.until_count <= 0)
        old = jnp.stack([state.nonfinite, state.underflow, state.entries])
        nonfinite, underflow, entries = branch(due, lambda: _counts(parts, names), lambda: old)
        state = adjust(state, seen)._replace(
            nonfinite=nonfinite,
            underflow=underflow,
            entries=entries,
            until_count=jnp.where(due, count_every, state.until_count).astype(jnp.int32) - 1,
        )
        return value, decided(state, ok, inner_state)

    return gated(init_fn, step_fn, flush_of(tx, "last_finite"))


class _Seen(NamedTuple):
    """What a step's gradients say of each group, ``[G]``, agreed on all replicas.

    Attributes:
      present: bool, whether the group has gradients in this step (a frozen one has none).
      bad: bool, whether one of them is not finite, or its square would not be.
      largest: f32, the largest magnitude, unscaled; 0 where bad.
    """

    present: jax.Array
    bad: jax.Array
    largest: jax.Array


def _look(parts: list[Pending], inverse: jax.Array, names: tuple[str, ...]) -> _Seen:
    bad: list[jax.Array] = []
    largest: list[jax.Array] = []
    for group, part in enumerate(parts):
        unscaled = part.times(inverse[group])
        bad.append(~usable(unscaled))
        found = unscaled._replace(raw=largest_magnitudes(part.raw)).value()
        largest.append(
            jnp.max(jnp.stack([x.astype(jnp.float32) for x in found])) if found else jnp.float32(0)
        )
    flags = jnp.stack(bad)
    both = jnp.stack([flags.astype(jnp.float32), jnp.where(flags, 0, jnp.stack(largest))])
    both = axes.largest(both, axes.with_shards(both, names)) if names else both
    present = jnp.asarray([bool(jax.tree.leaves(part.raw)) for part in parts])
    return _Seen(present, both[0] > 0, both[1])


def _counts(parts: list[Pending], names: tuple[str, ...]) -> jax.Array:
    """Entries of each group that are not finite, that f16 has no normal number for, and all."""
    columns: list[jax.Array] = []
    for part in parts:
        # Tested as they came: an average over a window has its factor still to come.
        tiny = jnp.float32(_TINY)
        for factor in part.factors:
            tiny = tiny / factor
        sizes = sum(leaf.size for leaf in part.raw)
        found = [jnp.zeros(2, jnp.float32)]
        for size in map(magnitude, part.raw):
            found.append(counts(~jnp.isfinite(size), size < tiny.astype(size.dtype)))
        columns.append(jnp.append(jnp.sum(jnp.stack(found), 0), jnp.float32(sizes)))
    result = jnp.stack(columns, axis=1)
    return axes.largest(result, axes.with_shards(result, names)) if names else result


def _between(who: str, argument: str, value: Any, low: Any, high: Any, hint: str) -> None:
    allowed = f"from {low!r} to {high!r}"
    checks.number(who, argument, value, allowed, lambda x: low <= x <= high, hint)
