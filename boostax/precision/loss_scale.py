# SPDX-License-Identifier: Apache-2.0
"""Loss scaling: multiply the loss so that small f16 gradients survive, then divide the gradients.

The loss is multiplied by a scale ``s`` before differentiation, so every gradient is multiplied by
``s`` and remains above the smallest f16 number. The gradients are divided by ``s`` in f32 before
another part of the optimizer reads the gradients. If gradients overflow because the scale is too
large, the step is skipped and the scale is lowered. After a number of steps without overflow, the
scale is raised.

References:
  Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740, 2018. MindSpore
  2.10, DynamicLossScaleUpdateCell and FixedLossScaleManager, which compute the same scales.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from boostax._core import axes, bound_axis, checks, gate, handshake, protocols, trees
from boostax._core.describe import Holds, describe
from boostax._core.types import PyTree
from boostax.order import findings


def scale_array(state: PyTree) -> jax.Array:
    """Return the array by which a trace identifies a scaler, for ``protocols.Scaler``."""
    return getattr(state, state.holds.scale)


class LossScaleState(NamedTuple):
    """State of ``dynamic_loss_scale`` and ``static_loss_scale``.

    Attributes:
      scale: f32 scalar, by which the next loss must be multiplied.
      clean_steps: i32, steps since the last overflow or growth.
      tolerance: i32, further overflows tolerated before the scale is lowered (``hysteresis``).
      applied: bool, whether the last gradients were finite, so that the call ran the inner
        transformation; False before the first call.
      skipped: i32, calls that were skipped since the start.
      skipped_in_a_row: i32, calls that were skipped since the last applied call.
      growths: i32, how often the scale was raised.
      backoffs: i32, how often the scale was lowered.
      floor_hits: i32, how often an overflow occurred with the scale at ``min_scale``.
      inner_state: state of the inner transformation.
    """

    scale: jax.Array  # [] float32
    clean_steps: jax.Array  # [] int32
    tolerance: jax.Array  # [] int32
    applied: jax.Array  # [] bool
    skipped: jax.Array  # [] int32
    skipped_in_a_row: jax.Array  # [] int32
    growths: jax.Array  # [] int32
    backoffs: jax.Array  # [] int32
    floor_hits: jax.Array  # [] int32
    inner_state: optax.OptState
    holds = Holds(scale="scale")

    scale_array = scale_array
    inner_ran = gradient_used = gate.flag

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        first = {"loss_scale": self.scale, "skipped_in_a_row": self.skipped_in_a_row}
        moves = ("growths", "backoffs", "floor_hits")
        return first | {f"scale_{name}": getattr(self, name) for name in moves}


@bound_axis.gate
def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    hysteresis: int = 1,
    axis_name: axes.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Unscale gradients, run ``inner`` if all gradients are finite, and adapt the scale.

    With scaled gradients :math:`g_s = s\,g`, the step is

    .. math::
      \text{ok} = \max|g_s| / s < 2^{48}, \qquad u = \text{inner}(g_s / s) \text{ if ok, else
      nothing}.

    All replicas agree on :math:`\text{ok}`. After ``growth_interval`` steps without overflow, the
    scale is multiplied by ``growth_factor``, unless the product would exceed ``max_scale``. The
    ``hysteresis``-th overflow since the last interval without overflow, and every later overflow,
    multiplies the scale by ``backoff_factor``, but not below ``min_scale``. A skipped step changes
    no bit of the params or of the state of ``inner``, such as moments and the counts of schedules.
    A step with an overflow is never applied, even after many skips in a row, so watch
    ``skipped_in_a_row``. Only gradients are checked; ``check_updates`` checks the updates that
    ``inner`` computes from finite gradients. A sparse gradient (``BCOO``) is checked by its data,
    and ``inner`` receives a dense array.

    Place everything that must be skipped *inside* the scaler: ``dynamic_loss_scale(chain(clip,
    adamw))``. Pass to ``jax.grad`` a function that returns ``scale_loss(loss, opt_state)``, or use
    ``boostax.value_and_grad``, which scales the loss. During tracing, a scaler refuses gradients of
    a loss that was not scaled.

    Args:
      inner: the rest of the optimizer, which receives gradients and params in f32 or wider.
      init_scale: first scale, > 0. The product of loss and scale is computed in f32, so the scale
        may exceed the range of f16, as 2**16 does.
      growth_factor: > 1. With a power of two, unscaling is exact.
      backoff_factor: in (0, 1).
      growth_interval: steps without overflow before the scale is raised.
      min_scale: > 0; below 1 for models whose unscaled gradients overflow f16.
      max_scale: finite; the scale never exceeds this bound.
      hysteresis: number of overflows after which the scale is lowered; every overflow skips its
        step.
      axis_name: replica axis (or axes) over which replicas agree whether all gradients are finite.
        Gradients must then be *local*; see ``boostax.train.local_params``. With ``None``, a train
        step supplies its axis if ``inner`` has a reduction; outside a train step, no axis is used.

    Returns:
      A transformation with a ``LossScaleState``. Cost: 33 bytes of state; one read of the
      gradients; an all-reduce of 4 bytes with ``axis_name``. ``boostax.apply_gradients`` makes no
      temporary copy of the params on CPU, TPU v5e and H100, but copies f16 gradients on CPU. The
      pure ``update`` makes one copy of the params.

    Raises:
      ValueError, TypeError: an argument out of range; at trace time, gradients of a loss that was
        not scaled (see ``assume_scaled``), already reduced gradients, an unbound axis, integer
        gradients, or a predicate that may differ per replica.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.dynamic_loss_scale(optax.sgd(1.0), init_scale=8.0)
      >>> params = {"w": jnp.float32(1.0)}
      >>> state = tx.init(params)
      >>> params, state = boostax.apply_gradients(tx, {"w": jnp.float16(2.0)}, state, params)
      >>> float(params["w"])
      0.75
      >>> params, state = boostax.apply_gradients(tx, {"w": jnp.float16("inf")}, state, params)
      >>> float(params["w"]), float(boostax.precision.loss_scale(state))
      (0.75, 4.0)

    References:
      Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740, 2018.
      The hysteresis is that of Megatron-LM's DynamicGradScaler: after a complete interval without
      overflow, the count of overflows starts again.
    """
    who = "dynamic_loss_scale"
    _positive(who, "min_scale", min_scale, "1 is the default.")
    _positive(who, "max_scale", max_scale, "2**24 is the default.")
    _positive(who, "init_scale", init_scale, "2**16 is the default.")
    limits = min_scale, init_scale, max_scale
    is_valid = any(isinstance(x, Tracer) for x in limits) or min_scale <= init_scale <= max_scale
    hint = f"Change init_scale, or the limits: min_scale={min_scale!r}, max_scale={max_scale!r}."
    checks.require(is_valid, who, "init_scale", init_scale, "between min_scale and max_scale", hint)
    checks.number(who, "growth_factor", growth_factor, "greater than 1", "Use 2.", above=1)
    hint = "Use 0.5."
    checks.number(who, "backoff_factor", backoff_factor, "in (0, 1)", hint, above=0, below=1)
    hint = "growth_interval is a number of steps without overflow; 2000 is the default."
    growth_interval = checks.positive_int(who, "growth_interval", growth_interval, hint)
    hint = "With hysteresis=1, every overflow lowers the scale."
    hysteresis = checks.positive_int(who, "hysteresis", hysteresis, hint)

    def adjust(state: LossScaleState, ok: jax.Array) -> LossScaleState:
        """Raise the scale after ``growth_interval`` clean steps, and lower it at an overflow."""
        clean = jnp.where(ok, state.clean_steps + 1, 0)
        interval_full = clean >= growth_interval
        grown = state.scale * growth_factor
        # The comparison is False if the product overflows, so the scale never becomes infinite.
        grows = interval_full & (grown <= max_scale)
        tolerance = jnp.where(ok, state.tolerance, jnp.maximum(state.tolerance - 1, 0))
        backs_off = ~ok & (tolerance == 0)
        lowered = jnp.maximum(state.scale * backoff_factor, min_scale)
        scale = jnp.where(grows, grown, jnp.where(backs_off, lowered, state.scale))
        return state._replace(
            scale=scale.astype(jnp.float32),
            clean_steps=jnp.where(interval_full, 0, clean),
            tolerance=jnp.where(interval_full, hysteresis, tolerance),
            growths=gate.counted(state.growths, grows),
            backoffs=gate.counted(state.backoffs, scale < state.scale),
            floor_hits=gate.counted(state.floor_hits, backs_off & (state.scale <= min_scale)),
        )

    return _scaled(inner, init_scale, hysteresis, adjust, axis_name, skip=True, asks=True, who=who)


@bound_axis.gate
def static_loss_scale(
    inner: optax.GradientTransformation,
    scale: float,
    *,
    skip_nonfinite: bool = True,
    axis_name: axes.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Unscale gradients by a constant; by default skip steps whose gradients are not finite.

    This is MindSpore's ``FixedLossScaleManager``, with ``skip_nonfinite`` in place of
    ``drop_overflow_update``. With ``scale=1`` this is ``optax.apply_if_finite``, except that a step
    with gradients that are not finite is never applied.

    Args:
      inner: the rest of the optimizer, which receives gradients and params in f32 or wider.
      scale: > 0, finite and a scalar. With a power of two, unscaling is exact.
      skip_nonfinite: ``False`` runs ``inner`` on all gradients, with no check and no branch.
      axis_name: as in ``dynamic_loss_scale``.

    Returns:
      A transformation with a ``LossScaleState`` whose scale is constant. Cost: as in
      ``dynamic_loss_scale``; with ``skip_nonfinite=False``, no check, no collective, no temporary.

    Raises:
      ValueError, TypeError: see ``dynamic_loss_scale``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.static_loss_scale(optax.sgd(1.0), 128.0)
      >>> params = jnp.float32(1.0)
      >>> updates, state = tx.update(jnp.float32(64.0), tx.init(params), params)
      >>> float(updates)
      -0.5
    """
    who = "static_loss_scale"
    _positive(who, "scale", scale, "128 is MindSpore's default.")
    asks = isinstance(scale, Tracer) or bool(scale != 1)
    return _scaled(inner, scale, 1, _constant, axis_name, skip=skip_nonfinite, asks=asks, who=who)


def _constant(state: LossScaleState, ok: jax.Array) -> LossScaleState:
    return state._replace(clean_steps=jnp.where(ok, gate.counted(state.clean_steps, ok), 0))


@bound_axis.gate
def skip_bad_steps(
    inner: optax.GradientTransformation, *, axis_name: axes.AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    """Skip each step whose gradients are not finite: params and inner state stay unchanged.

    ``skip_bad_steps(inner)`` is ``static_loss_scale(inner, 1.0)``, for training in f32 or bf16.
    After several bad steps in a row, ``optax.apply_if_finite`` applies a bad step, but
    ``skip_bad_steps`` never does.

    Args:
      inner: the rest of the optimizer.
      axis_name: as in ``dynamic_loss_scale``.

    Returns:
      A transformation with a ``LossScaleState``, whose ``skipped`` counts skips. Cost: as in
      ``dynamic_loss_scale``.

    Raises:
      ValueError, TypeError: see ``dynamic_loss_scale``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.skip_bad_steps(optax.sgd(1.0))
      >>> params = jnp.float32(1.0)
      >>> updates, state = tx.update(jnp.float32(jnp.nan), tx.init(params), params)
      >>> float(updates), int(state.skipped)
      (0.0, 1)
    """
    return _scaled(inner, 1.0, 1, _constant, axis_name, skip=True, asks=False, who="skip_bad_steps")


def _scaled(
    inner: optax.GradientTransformation,
    init_scale: float,
    tolerance: int,
    adjust: Callable[[LossScaleState, jax.Array], LossScaleState],
    axis_name: axes.AxisName | None,
    *,
    skip: bool,
    asks: bool,
    who: str,
) -> optax.GradientTransformationExtraArgs:
    tx = checks.transformation(who, "inner", inner)
    names = axes.canonical(who, axis_name)

    def init_fn(params: PyTree) -> LossScaleState:
        # No two fields share an array, because donation refuses a shared buffer.
        clean, *counts = (jnp.zeros((), jnp.int32) for _ in range(6))
        scale = jnp.asarray(init_scale, jnp.float32) + 0
        first = scale, clean, jnp.asarray(tolerance, jnp.int32), jnp.asarray(False)
        return LossScaleState(*first, *counts, inner_state=gate.init_inner(tx, params))

    @describe(who, "scaler", names, inner={"inner_state": tx})
    def step_fn(
        grads: gate.Pending, state: LossScaleState, params: PyTree, *, apply: bool, **extra: Any
    ) -> tuple[PyTree, LossScaleState]:
        axes.require_local(grads.raw, names, who)
        checks.require_scalar(who, "scale", state.scale)
        if asks:
            require(who, state.scale, grads.raw, params)
        # The reciprocal of the scale is split into two factors, because a reciprocal below 2**-126
        # would be flushed to zero.
        coarse = jnp.where(state.scale > 2.0**64, 2.0**-64, 1.0).astype(jnp.float32)
        unscaled = grads.times(coarse, 1.0 / (state.scale * coarse))
        ok = axes.agree(unscaled.usable(), names) if skip else jnp.asarray(True)
        old = state.inner_state
        heavy = functools.partial(gate.call, tx, unscaled, old, params, apply=apply, extra=extra)
        if not skip:
            value, inner_state = heavy()
            return value, decided(adjust(state, ok), ok, inner_state)
        ok, moved = gate.skip_if_empty(ok, adjust(state, ok), state, grads)
        value, new = gate.run_or_hold(ok, heavy, params, old, apply=apply, who=who, names=names)
        return value, decided(moved, ok, new)

    return gate.gated(init_fn, step_fn, gate.flush_of(tx))


def loss_scale(opt_state: PyTree) -> jax.Array:
    """Return the scale by which the next loss must be multiplied.

    Args:
      opt_state: any optimizer state; the scaler may be nested, but all gradients must pass the
        scaler.

    Returns:
      f32 scalar; 1 if the state has no scaler.

    Raises:
      ValueError: there are several scalers, so the loss scale is undefined; or the scaler is inside
        ``optax.masked``, ``optax.partition`` or ``optax.conditionally_transform``, so some
        gradients would remain multiplied by the scale.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = optax.chain(boostax.dynamic_loss_scale(optax.adam(1e-3)))
      >>> float(boostax.precision.loss_scale(tx.init(jnp.zeros(3))))
      65536.0
    """
    return scales("loss_scale", opt_state)[0]


def scales(who: str, opt_state: PyTree) -> tuple[jax.Array, jax.Array | None]:
    """Return the scale of the loss, and the scales of groups if the scaler has groups.

    Several scalers, or a scaler that some gradients bypass, are refused. The scale multiplies the
    complete loss, so a gradient that bypasses the scaler would remain multiplied by the scale.
    """
    scalers = trees.telling(opt_state, protocols.Scaler)
    masks = trees.find(opt_state, optax.MaskedState, optax.ConditionallyTransformState)
    partial = [mask for mask in masks if trees.telling(mask, protocols.Scaler)]
    if len(scalers) > 1 or partial:
        got = f"a scaler in a {type(partial[0]).__name__}" if len(scalers) == 1 else len(scalers)
        raise ValueError(
            f"{who}: opt_state must contain one loss scaler, for all gradients, got {got}. "
            "Place one loss scaler around the complete optimizer, outside optax.partition, "
            "optax.masked and optax.conditionally_transform."
        )
    if not scalers:
        return jnp.ones((), jnp.float32), None
    of_groups = getattr(scalers[0], "scales", None)
    handshake.hand_on(scalers[0].scale_array(), of_groups)
    return scalers[0].scale, of_groups


def decided(new: Any, ok: jax.Array, inner_state: optax.OptState) -> Any:
    """Return a scaler's state after a step, which was applied if ``ok`` and skipped otherwise."""
    new = gate.applied_or_skipped(new, ok, inner_state)
    return new._replace(skipped_in_a_row=jnp.where(ok, 0, gate.counted(new.skipped_in_a_row, ~ok)))


def scale_loss(loss: jax.Array, opt_state: PyTree) -> jax.Array:
    """Return the loss to differentiate: ``loss`` in f32 times the current scale.

    Args:
      loss: floating scalar. Unless the loss is f64, it is cast to f32 *before* the product, because
        the product of 2.3 and 2**15 is infinite in f16.
      opt_state: the optimizer state with the scale.

    Returns:
      Scalar, f32 or f64.

    Raises:
      ValueError: the loss is already scaled, or is inside ``boostax.value_and_grad``, which scales
        the loss; the scale in the state is not a scalar.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> state = boostax.static_loss_scale(optax.sgd(0.1), 2.0**15).init(jnp.zeros(3))
      >>> float(boostax.precision.scale_loss(jnp.float16(2.5), state))
      81920.0
    """
    wide, scale = trees.at_least_float32(jnp.asarray(loss)), loss_scale(opt_state)
    findings.of_state("scale_loss", opt_state)
    checks.require_scalar("scale_loss", "scale", scale)
    product = wide * scale.astype(wide.dtype)
    scales = handshake.scales_in(opt_state)
    within = any(x is y for outer in handshake.INSIDE.get() for x in outer for y in scales)
    twice = within or (bool(scales) and handshake.marks(loss)[0].product)
    got = "a loss that is already multiplied"
    hint = "Return the unscaled loss: boostax.value_and_grad multiplies the loss by the scale."
    checks.require(not twice, "scale_loss", "loss", got, "multiplied by the scale once", hint)
    handshake.keep(product, handshake.Mark(product=True))
    handshake.scaled(opt_state)
    return product


def _positive(who: str, argument: str, value: float, hint: str) -> None:
    limits = jnp.finfo(jnp.float32)
    low, high = float(limits.tiny), float(limits.max)
    checks.number(who, argument, value, "a normal positive f32", hint, least=low, most=high)


def require(who: str, scale: jax.Array, grads: PyTree, params: PyTree, groups: int = 1) -> None:
    """Refuse, in a trace, gradients of a loss that was not multiplied by ``scale``.

    Args:
      who: the name of the scaler.
      scale: the array that identifies the scaler's state; see ``protocols.Scaler``.
      grads: the gradients that the scaler gets.
      params: the params, or ``None``.
      groups: the number of groups of gradients, each with its scale.
    """
    if not isinstance(scale, Tracer):
        return
    marks = [mark for mark in handshake.marks(scale) if mark.loss]
    allowed = "gradients of a loss multiplied by the scale in this opt_state"
    hint = (
        "Compute gradients with boostax.value_and_grad(loss_fn)(params, opt_state, batch), or "
        "differentiate boostax.precision.scale_loss(loss, opt_state). Mark gradients of another "
        "jax.jit as scaled: boostax.precision.assume_scaled(grads, opt_state)."
    )
    got = "gradients of a loss that was not multiplied"
    checks.require(bool(marks), who, "gradients", got, allowed, hint)
    handshake.require_linear(who, grads, params)
    is_valid = groups == 1 or any(m.crossed for m in marks)
    allowed = "a function that uses the scales of the groups"
    hint = "Call boostax.precision.scale_boundary(x, scales, outer, inner) on edges between groups."
    checks.require(is_valid, who, "loss_fn", "a function that ignores scales=", allowed, hint)


def current_scale() -> jax.Array:
    """Return the number by which the loss that is being differentiated is multiplied.

    A backward rule (``jax.custom_vjp``) needs this number if its result is not proportional to the
    cotangent. Under a loss scale the cotangent arrives multiplied by ``s``, and the gradients are
    divided by ``s``. So a bound, a threshold, noise or an injected gradient must be multiplied by
    ``s``.

    Call this function in the loss, and pass the result to the rule as an argument. A call in the
    rule itself fails inside ``jax.jit``. The function works in ``boostax.value_and_grad`` and
    ``make_train_step``, including in a scan, a checkpoint, a micro-batch or a replica. With
    ``scale_loss``, or in your own ``jax.grad``, pass ``loss_scale(opt_state)`` to the loss. With
    ``group_loss_scale``, the cotangents of group ``k`` are multiplied by ``scales[k]``.

    Returns:
      f32 scalar; 1 if no loss is scaled. Cost: none. Functions under ``jit`` are traced again for
      each loss.

    Example:
      Add the gradient 1 of an auxiliary loss, whatever the scale:

      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> @jax.custom_vjp
      ... def inject(x, auxiliary, scale):
      ...   return x
      >>> inject.defvjp(lambda x, auxiliary, scale: (x, scale), lambda s, g: (g, s, None))
      >>> def loss_fn(w, x):
      ...   scale = boostax.precision.current_scale()
      ...   return jnp.mean(inject(x, 0.5 * w, scale))
      >>> step = boostax.make_train_step(loss_fn, boostax.dynamic_loss_scale(optax.sgd(1.0)))
      >>> state, _ = step(step.init(jnp.float32(1.0)), jnp.ones(4))
      >>> float(state.params)
      0.5
    """
    factor = handshake.FACTOR.value
    known = factor() if callable(factor) else factor
    return jnp.asarray(1.0 if known is None else known, jnp.float32)
