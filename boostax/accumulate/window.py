# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation over calls: ``inner`` runs once per window of micro-steps.

The sum is never reset. The first micro-step of a window overwrites it and the others add to it, so
no branch resets the buffer, the compilers for CPU, TPU v5e and H100 add in place, and a NaN cannot
survive its window the way it survives a multiplication by zero. The inner transformation, its
collectives included, is compiled into a branch that only the last micro-step takes.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, bcoo, checks, constants, formats, noise_scale, trees
from boostax._core.describe import Holds, Stepped, describe
from boostax._core.extras import elsewhere
from boostax._core.finite import all_finite
from boostax._core.gate import (
    Pending,
    counted,
    flush_inner,
    gated,
    has_gate,
    init_inner,
    outermost_passed,
    passed,
    run,
    run_or_hold,
)
from boostax._core.handshake import assume_scaled
from boostax._core.noise_scale import MicroNorms, NoiseScaleState
from boostax._core.replicas import PerReplica, require_like
from boostax.accumulate.aux import weigh
from boostax.accumulate.by_noise import WindowByNoise
from boostax.accumulate.carried import require_outside
from boostax.precision.group_state import GroupLossScaleState
from boostax.precision.loss_scale import LossScaleState

PyTree = Any
Normalize = Literal["mean", "sum", "weight"]
Rounding = Literal["nearest", "stochastic"]

# Gradients that a scaler lets pass are below 2**48: their products with weights below _MOST add up
# in f32, and the reciprocal of _LEAST is finite.
_LEAST, _MOST = 2.0**-64, 2.0**64


class Window(NamedTuple):
    """What a window has summed up: stale, and overwritten next, when ``micro_step`` is 0.

    Attributes:
      grads: tree like the params in the accumulator dtype.
      weight: f32 scalar, or ``None`` unless normalised by weight.
      norm: f32 scalar, the root of the sum of the squared norms of the micro-gradients; ``None``
        unless noise is measured.
    """

    grads: PyTree
    weight: jax.Array | None
    norm: jax.Array | None = None


class AccumulateState(NamedTuple):
    """State of ``accumulate``.

    Attributes:
      micro_step: i32, micro-steps in the open window; 0 when it is closed.
      optimizer_steps: i32, windows whose result was applied: the argument of an ``every`` schedule.
      dropped_windows: i32, windows that closed and were not applied: their weights or sums could
        not be used, or ``inner`` held them back.
      applied: bool, whether the last call closed a window and its result was applied.
      window: the sums; a ``PerReplica`` of them with ``axis_name``, ``None`` for ``every=1``.
      inner_state: state of the inner transformation.
      noise: what the noise scale is made of; ``None`` unless this window measures it.
    """

    micro_step: jax.Array
    optimizer_steps: jax.Array
    dropped_windows: jax.Array
    applied: jax.Array
    window: PerReplica | Window | None
    inner_state: Any
    noise: NoiseScaleState | None = None
    holds = Holds(("micro_step", "window"), "micro_step", ("window/grads", "window/norm"))

    def passed(self) -> jax.Array:
        """Whether the last call ran the inner transformation to its end."""
        return self.applied

    def taken(self) -> jax.Array:
        """Whether the last gradient was taken in: into the open window, or by the inner gate."""
        return jnp.logical_or(self.micro_step > 0, outermost_passed(self.inner_state))

    def held(self) -> jax.Array:
        """Whether a window is open: gradients are summed up and not applied."""
        return self.micro_step > 0

    def shares(self) -> list[PerReplica]:
        """What replicas add up and do not average: weighed sums, and those before a sum."""
        window = self.window
        if not isinstance(window, PerReplica):
            return []
        before_sum = trees.telling(self.inner_state, "sums")
        return [window] if window.local.weight is not None or before_sum else []

    def metrics(self) -> dict[str, jax.Array]:
        """Named scalars for ``boostax.metrics``."""
        return {
            "micro_step": self.micro_step,
            "optimizer_steps": self.optimizer_steps,
            "dropped_windows": self.dropped_windows,
        }


def accumulate(
    inner: optax.GradientTransformation,
    every: int | Callable[[jax.Array], jax.Array | int] | WindowByNoise,
    *,
    normalize: Normalize = "mean",
    accumulator_dtype: Any = "float32",
    rounding: Rounding = "nearest",
    noise: float | None = None,
    axis_name: axes.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sum gradients over ``every`` calls, then run ``inner`` once on the result.

    For micro-gradients :math:`g_1 \dots g_k` ``inner`` gets

    .. math::
      \text{mean: } \tfrac1k \sum_i g_i, \qquad
      \text{sum: } \sum_i g_i, \qquad
      \text{weight: } \sum_i w_i g_i \big/ \sum_i w_i,

    where ``weight`` is the extra argument ``weight=`` of ``update``: the number of tokens, say,
    that the mean loss of the micro-batch was taken over. The weights of all replicas count, so
    that a following *mean* over ``axis_name`` is the mean over all tokens. Between windows the
    updates are zero, and nothing of ``inner`` runs. A sparse gradient (``BCOO``) is added to a
    dense sum.

    Dropped as a whole, and counted in ``dropped_windows``, is a window with a weight that is not in
    [0, 2**64), with weights of less than 2**-64 in all, or with a sum that overflowed in an
    ``accumulator_dtype`` of f16's range (a gate inside judges such a sum itself).

    Around or inside a loss scaler, both right (see ``docs/cards/accumulate.md``):
    ``dynamic_loss_scale(accumulate(opt, 8))`` drops a bad micro-batch alone and the window takes
    one more; ``accumulate(dynamic_loss_scale(opt), 8)`` drops the window and is cheaper.

    Args:
      inner: the optimizer, collectives included; it sees f32 (or wider) gradients.
      every: micro-steps per window, or a schedule of them by applied optimizer steps, or by the
        noise scale: ``boostax.train.by_noise(2, 64)``.
      normalize: ``"mean"``, ``"sum"`` or ``"weight"``.
      accumulator_dtype: of the sums; f64 and complex gradients keep their kind. What is added is
        computed in f32 or wider and rounded once, with the sum. The sum of :math:`w_i g_i` must
        fit: in f16 it overflows at 65504, though the mean may not, and the window is dropped.
      rounding: of bf16 sums; ``"stochastic"`` up or down at random, so that their mean is exact
        however many gradients are added. To the nearest, a sum of bf16 does not move for what is
        less than a 512th of it.
      noise: decay of the running means from which ``noise_scale`` in ``boostax.metrics`` is made,
        the gradient noise scale in micro-batches of one replica; ``None`` does not measure it. The
        large batch is a window; with ``all_reduce(noise=...)`` inside it is the windows of all
        replicas, and that one's decay holds. Windows of which the result is applied count.
      axis_name: replica axis (or axes). The sums are then local to each replica (``PerReplica``)
        and gradients must be local: see ``boostax.train.local_params``.

    Returns:
      A transformation with an ``AccumulateState``. Cost: one copy of the params in
      ``accumulator_dtype`` (none for ``every=1``); no collective in a micro-step but ``inner``'s
      own, once per window, and 4 bytes then for ``"weight"`` and for f16 sums, which are also read
      once more then; with ``noise`` a read of the gradients in each micro-step and of the sums once
      per window, and then 8 bytes over ``axis_name``, of params that are sharded within a replica 4
      bytes over the shards in each micro-step; through ``boostax.apply_gradients`` no temporary
      copy on CPU, TPU v5e and H100 (with ``noise`` counted on CPU alone), through the pure
      ``update`` one of the params. Rows of a sparse gradient are scattered into the sum (in place
      on CPU), with a narrower dtype into an f32 copy of it; ``noise`` makes them dense first.

    Raises:
      ValueError, TypeError: an argument out of range; in ``init``, noise that cannot be measured;
        at trace time, a missing or unused ``weight``, already reduced gradients, an unbound axis,
        integer gradients, a line search inside a window of several calls.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.accumulate(optax.sgd(1.0), every=2)
      >>> w = jnp.float32(0.0)
      >>> state = tx.init(w)
      >>> for g in (1.0, 3.0):
      ...   w, state = boostax.apply_gradients(tx, jnp.float32(g), state, w)
      >>> float(w), bool(boostax.train.has_updated(state))
      (-2.0, True)

    References:
      Measured against optax.MultiSteps in ``benchmarks/results/accumulation.md``. Of the noise
      scale: McCandlish et al., An Empirical Model of Large-Batch Training,
      https://arxiv.org/abs/1812.06162, 2018, appendix A.
    """
    who = "accumulate"
    tx = checks.transformation(who, "inner", inner)
    if not (callable(every) or isinstance(every, WindowByNoise)):
        every = checks.positive_int(
            who, "every", every, "It counts micro-steps per update; a schedule may be a function."
        )
    checks.choice(
        who,
        "normalize",
        normalize,
        ("mean", "sum", "weight"),
        "Losses that are means over a varying number of tokens want 'weight'.",
    )
    narrow = checks.floating_dtype(who, "accumulator_dtype", accumulator_dtype)
    hint = "Other sums are rounded to the nearest."
    checks.choice(who, "rounding", rounding, ("nearest", "stochastic"), hint)
    if rounding == "stochastic" and narrow != jnp.bfloat16:
        allowed = "'nearest' but for accumulator_dtype='bfloat16'"
        raise ValueError(checks.message(who, "rounding", allowed, rounding, hint))
    names = axes.canonical(who, axis_name)
    weighted = normalize == "weight"
    # The range of f16: what a scaler lets pass does not add up in it.
    overflows = float(jnp.finfo(narrow).max) < _MOST
    # Only a plain 1 does without a buffer: a schedule or a traced value may change its mind.
    buffered = not (isinstance(every, int) and every == 1)
    if noise is not None:
        noise_scale.check(who, noise)
        hint = "The noise scale compares micro-gradients of equal share with their mean."
        checks.choice(who, "normalize", normalize, ("mean",), hint)
        if not buffered:
            hint = "A window of one shows no noise; all_reduce(noise=...) compares replicas."
            raise ValueError(checks.message(who, "every", "more than 1 with noise", every, hint))
    elif isinstance(every, WindowByNoise):
        hint = "Such as 0.99: the window's length follows what that measures."
        raise ValueError(checks.message(who, "noise", "given with by_noise", noise, hint))

    def init_fn(params: PyTree) -> AccumulateState:
        inner_state = init_inner(tx, params)
        require_outside(inner_state, who)
        inside = bool(noise_scale.found(inner_state))
        measures = noise is not None and not inside
        if inside and weighted:
            hint = "Its local gradients would bear their weights, and their norms as well."
            allowed = "'mean' or 'sum' around all_reduce(noise=...)"
            raise ValueError(checks.message(who, "normalize", allowed, normalize, hint))
        if noise is not None:
            _require_measurable(every, inner_state, inside)
        window = None
        if buffered:
            sums = jax.tree.map(
                lambda p: jnp.zeros_like(p, dtype=trees.buffer_dtype(p, narrow)), params
            )
            window = Window(
                sums,
                jnp.zeros((), jnp.float32) if weighted else None,
                None if noise is None else jnp.zeros((), jnp.float32),
            )
            window = PerReplica(axes.to_varying(window, names)) if names else window
        return AccumulateState(
            micro_step=jnp.zeros((), jnp.int32),
            optimizer_steps=jnp.zeros((), jnp.int32),
            dropped_windows=jnp.zeros((), jnp.int32),
            applied=jnp.asarray(False),
            window=window,
            inner_state=inner_state,
            noise=noise_scale.fresh() if measures else None,
        )

    def length(state: AccumulateState) -> Any:
        """Of the open window, in micro-steps."""
        if isinstance(every, WindowByNoise):
            measured = noise_scale.found((state.noise, state.inner_state))[0]
            return every.length(measured, axes.size(names) if names else 1)
        return jnp.maximum(every(state.optimizer_steps) if callable(every) else every, 1)

    def close(
        window: Window,
        count: jax.Array,
        state: AccumulateState,
        params: PyTree,
        apply: bool,
        extra: Any,
    ) -> tuple[PyTree, _Closed]:
        """Normalise the sums and, if they can be used, run ``inner`` on them."""
        # A gate inside judges them itself: a scaler has to see what overflows, to lower the scale.
        judged = overflows and not has_gate(state.inner_state)
        ok = all_finite(window.grads) if judged else jnp.asarray(True)
        factors = (1.0 / count.astype(jnp.float32),) if normalize == "mean" else ()
        if weighted:
            assert window.weight is not None
            weight = jnp.where(ok, window.weight, jnp.nan) if judged else window.weight
            total = jax.lax.psum(weight, names) if names else weight
            ok, factors = total >= _LEAST, ((axes.size(names) if names else 1) / total,)
        elif judged:
            ok = axes.agree(ok, names)
        measured = state.noise
        if window.norm is not None:
            micro, mean = _square_norms(window, count, state.inner_state, names)
            number = count.astype(jnp.float32)
            if measured is None:
                extra = {**extra, "micro_norms": MicroNorms(micro / mean, number)}
            else:
                micro, mean = axes.mean(jnp.stack([micro, mean]), names)
                measured = noise_scale.observe(measured, micro, mean, number, noise)

        def run_on() -> tuple[PyTree, Any]:
            grads = Pending(window.grads, factors)
            return run(tx, grads, state.inner_state, params, apply=apply, extra=extra)

        if not (weighted or judged):
            value, new_state = run_on()
        else:
            how: Any = {"apply": apply, "who": who, "names": names}
            value, new_state = run_or_hold(ok, run_on, params, state.inner_state, **how)
        # Not in the branch: XLA:GPU copies what passes through one that returns a constant flag.
        applied = ok & passed(new_state)
        kept = jax.tree.map(functools.partial(jnp.where, applied), measured, state.noise)
        return value, _Closed(new_state, applied, kept)

    @describe(who, "window", names, inner={"inner_state": tx})
    def step_fn(
        grads: Pending,
        state: AccumulateState,
        params: PyTree,
        *,
        apply: bool,
        weight: Any = None,
        **extra: Any,
    ) -> Stepped:
        trees.require_gradients(grads.raw, who, sparse=True, params=params)
        axes.require_local(grads.raw, names, who)
        if weight is not None and not weighted:
            raise ValueError(
                f"accumulate: weight must be left out with normalize={normalize!r}, got one. Use "
                "normalize='weight' to average by it: boostax.Aux(weight=...) asks for that."
            )
        added = trees.addends(grads.value(sparse=noise is None), narrow)
        new = _weighted(added, weight, names) if weighted else Window(added, None)
        if noise is not None:
            new = new._replace(norm=jnp.sqrt(noise_scale.square_norm(added, names)))
        count = state.micro_step + 1
        if state.window is None:
            value, closed = close(new, count, state, params, apply, extra)
            return value, _next(state, jnp.zeros_like(count), closed, jnp.asarray(True))
        if "grad" in extra:
            _refused(extra["grad"])
        extra = elsewhere(extra, _refused)
        first = state.micro_step == 0
        require_like(who, "the window", _local(state.window), bcoo.types(new))
        drawn = rounding == "stochastic"
        seed = formats.fold(state.optimizer_steps, state.micro_step) if drawn else None
        sums = _extended(first, seed, _local(state.window), new)
        ends = count >= length(state)
        work = functools.partial(close, sums, count, state, params, apply, extra)
        held = _Closed(state.inner_state, jnp.asarray(False), state.noise)
        value, closed = run_or_hold(ends, work, params, held, apply=apply, who=who, names=names)
        state = state._replace(window=PerReplica(sums) if names else sums)
        return value, _next(state, jnp.where(ends, 0, count), closed, ends)

    def flush_fn(state: AccumulateState, params: PyTree, **extra: Any) -> Stepped:
        if state.window is None:
            params, inner_state = flush_inner(tx, state.inner_state, params, extra)
            return params, state._replace(inner_state=inner_state)
        # A scaler inside asked for their scale when they came.
        sums = assume_scaled(_local(state.window), state.inner_state)
        ends, count = state.held(), state.micro_step
        work = functools.partial(close, sums, count, state, params, True, extra)
        held = _Closed(state.inner_state, jnp.asarray(False), state.noise)
        params, closed = run_or_hold(ends, work, params, held, apply=True, who=who, names=names)
        # What the inner transformation holds open in its turn.
        params, inner_state = flush_inner(tx, closed.inner_state, params, extra)
        closed = closed._replace(inner_state=inner_state)
        return params, _next(state, jnp.zeros_like(count), closed, ends)

    return gated(init_fn, step_fn, flush_fn)


class _Closed(NamedTuple):
    """What closing a window leaves: the inner state, whether the result was applied, the noise."""

    inner_state: Any
    applied: jax.Array
    noise: NoiseScaleState | None


def _refused(given: PyTree) -> PyTree:
    """What is asked of the last micro-batch's loss, whose gradient is not the window's."""
    del given
    raise ValueError(
        "accumulate: every must be 1 around a line search, got a window of several calls, whose "
        "other micro-batches are gone. make_train_step(microbatches=...) keeps them: there the "
        "loss is that of all."
    )


def _require_measurable(every: Any, inner_state: Any, inside: bool) -> None:
    """Refuse windows that show no noise, and sums of which the true norm is not known."""
    if isinstance(every, WindowByNoise) and every.low == 1 and not inside:
        hint = "A window of one shows no noise; all_reduce(noise=...) inside compares replicas."
        raise ValueError(checks.message("accumulate", "every.low", "more than 1", 1, hint))
    if trees.find(inner_state, lambda x: isinstance(x, GroupLossScaleState)):
        raise ValueError(
            "accumulate: noise must be None around group_loss_scale, got a decay. Put the scaler "
            "around accumulate, whose gradients are then unscaled."
        )


def _square_norms(
    window: Window, count: jax.Array, inner_state: Any, names: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """The mean squared norm of the micro-gradients, and that of their mean, both unscaled."""
    assert window.norm is not None
    scalers = trees.find(inner_state, lambda x: isinstance(x, LossScaleState))
    unit = functools.reduce(lambda product, x: product / x.scale, scalers, jnp.float32(1))
    number = count.astype(jnp.float32)
    mean = jnp.sqrt(noise_scale.square_norm(window.grads, names)) / number
    return jnp.square(unit * window.norm) / number, jnp.square(unit * mean)


def _local(window: PerReplica | Window) -> Window:
    return window.local if isinstance(window, PerReplica) else window


def _next(
    state: AccumulateState, count: jax.Array, closed: _Closed, ended: jax.Array
) -> AccumulateState:
    return state._replace(
        micro_step=count,
        optimizer_steps=counted(state.optimizer_steps, closed.applied),
        dropped_windows=counted(state.dropped_windows, ended & ~closed.applied),
        applied=closed.applied,
        inner_state=closed.inner_state,
        noise=closed.noise,
    )


def _extended(first: jax.Array, seed: jax.Array | None, old: Window, new: Window) -> Window:
    """A window with one micro-step more; with the first one alone."""
    add = functools.partial(_summed, first, seed)
    sums = jax.tree_util.tree_map_with_path(add, old, new)
    if old.norm is None or new.norm is None:
        return sums
    return sums._replace(norm=jnp.where(first, new.norm, jnp.hypot(old.norm, new.norm)))


def _summed(
    first: jax.Array, seed: jax.Array | None, path: Any, old: jax.Array, new: Any
) -> jax.Array:
    """A window's sum with one gradient more; of the first one alone."""
    wide = old.astype(new.dtype)
    if bcoo.is_sparse(new):
        total = bcoo.added(jnp.where(first, jnp.zeros_like(wide), wide), new.data, new.indices)
    else:
        total = jnp.where(first, new, wide + new)
    if seed is not None and old.dtype == jnp.bfloat16:
        return formats.to_bfloat16(total, formats.seed_of(seed, path))
    return total.astype(old.dtype)


def _weighted(grads: PyTree, weight: Any, names: tuple[str, ...]) -> Window:
    if weight is None:
        raise ValueError(
            "accumulate: normalize='weight' needs the extra argument weight (tokens in this "
            "micro-batch), got none. Call update(..., weight=n), or return boostax.Aux(weight=n) "
            "from the loss."
        )
    weight = axes.to_varying(jnp.asarray(weight, jnp.float32), names)
    # NaN stays in the sum of the weights, and out of that of the gradients.
    weight = jnp.where((weight >= 0) & (weight < _MOST), weight, jnp.nan)
    return Window(weigh(grads, weight), weight)


def has_updated(opt_state: PyTree) -> jax.Array:
    """Whether the last call changed the params: a window closed, and no scaler skipped it.

    Schedules, EMAs and logging outside the transformation should follow this, not the calls.

    Args:
      opt_state: any state that holds one of ``accumulate``.

    Returns:
      Bool scalar; False before the first call.

    Raises:
      ValueError: nothing in the state accumulates.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.accumulate(optax.sgd(1.0), every=2)
      >>> _, state = tx.update(jnp.ones(3), tx.init(jnp.zeros(3)), jnp.zeros(3))
      >>> bool(boostax.train.has_updated(state))
      False
    """
    if not trees.find(opt_state, lambda x: isinstance(x, AccumulateState)):
        raise ValueError(
            "has_updated: opt_state must hold an AccumulateState, got none. Wrap the optimizer in "
            "boostax.accumulate."
        )
    return passed(opt_state)


def flush(
    tx: optax.GradientTransformation, opt_state: PyTree, params: PyTree, **extra_args: Any
) -> tuple[PyTree, PyTree]:
    """Apply the last, partial window, normalised by what it really holds.

    Call it where ``apply_gradients`` is called (inside ``shard_map`` for a data-parallel step), or
    use ``TrainStep.flush``. With no window open, or none at all, nothing happens.

    Args:
      tx: the transformation that made the state; a window must not be inside an Optax wrapper.
      opt_state: its state, that of an ``nnx.Optimizer`` too.
      params: the params.
      **extra_args: handed to the inner transformation.

    Returns:
      ``(params, opt_state)``, arrays for NNX's variables.

    Raises:
      ValueError: ``tx`` hides a window behind an Optax wrapper.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.accumulate(optax.sgd(1.0), every=8)
      >>> w = jnp.float32(0.0)
      >>> w, state = boostax.apply_gradients(tx, jnp.float32(2.0), tx.init(w), w)
      >>> w, state = boostax.flush(tx, state, w)
      >>> float(w)
      -2.0
    """
    tx = optax.with_extra_args_support(tx)
    params = trees.arrays(params)
    own = constants.without_gradient(constants.aside(params), True)
    new, opt_state = flush_inner(tx, trees.arrays(opt_state), own, extra_args)
    return constants.put_back(new, params), opt_state
