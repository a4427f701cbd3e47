# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation over calls: ``inner`` runs once per window of micro-steps.

The first micro-step of a window overwrites the sum, and later micro-steps add to the sum. So no
branch resets the sum, and the compilers for CPU, TPU v5e and H100 add in place. A NaN does not pass
into the next window. If the sum were reset by a multiplication with zero, a NaN would remain. The
inner transformation is compiled, with its collectives, into a branch that only the last micro-step
runs.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath, tree_map_with_path

from boostax._core import axes, bound_axis, checks, gate, handshake, norms, trees
from boostax._core.describe import Holds, Stepped, asked, describe, elsewhere
from boostax._core.gate import Pending
from boostax._core.protocols import SumsGradients
from boostax._core.replicas import PerReplica, require_like
from boostax._core.types import Params, PyTree
from boostax.accumulate.aux import addends, divide, total, weigh
from boostax.accumulate.carried import CarryState
from boostax.precision import formats
from boostax.reduce.mean import reduced

# A tuple or list contains the names of the terms of a loss.
Kind = Literal["mean", "sum", "weight"]
Normalize = Kind | tuple[str, ...] | list[str]
Rounding = Literal["nearest", "stochastic"]
Sums = Literal["local", "sharded"]
Every = int | Callable[[jax.Array], jax.Array | int]

_WHO = "accumulate"
# A scaler accepts gradients below 2**48. The sum of their products with weights below _MOST is
# finite in f32. The reciprocal of _LEAST is finite, too.
_LEAST, _MOST = 2.0**-64, 2.0**64


class Window(NamedTuple):
    """The sums of a window.

    The sums are stale while ``micro_step`` is 0, and the next call then overwrites them.

    Attributes:
      grads: tree like the params, in the ``dtype`` of ``accumulate``; if ``normalize`` names terms,
        each leaf is ``[terms, ...]``.
      weight: f32 scalar with ``normalize="weight"``; a dict with an f32 scalar for each term if
        ``normalize`` names terms; else ``None``.
      loss: two f32 scalars, the weighted sum of the extra argument ``value`` and the sum of its
        weights, if the ``update`` of ``inner`` names ``value``; else ``None``.
    """

    grads: PyTree  # shapes of the params, or [terms, *shape]; accumulator dtype
    weight: PyTree  # [] float32, for each term
    loss: tuple[jax.Array, jax.Array] | None = None  # [] float32


class AccumulateState(NamedTuple):
    """State of ``accumulate``.

    Attributes:
      micro_step: i32, number of micro-steps in the open window; 0 if no window is open.
      optimizer_steps: i32, number of applied windows; the argument of ``every``, if ``every`` is a
        function.
      skipped: i32, number of calls that closed a window without applying the result: the weights or
        sums were not usable, or ``inner`` skipped the step.
      applied: bool, whether the last call closed a window and applied its result.
      window: a ``Window``, inside a ``PerReplica`` if sums are local to replicas; ``None`` for
        ``every=1``.
      inner_state: state of the inner transformation.
    """

    micro_step: jax.Array  # [] int32
    optimizer_steps: jax.Array  # [] int32
    skipped: jax.Array  # [] int32
    applied: jax.Array  # [] bool
    window: PerReplica | Window | None  # [replicas, ...] in a PerReplica
    inner_state: optax.OptState
    holds = Holds(("micro_step", "window"), "micro_step", "optimizer_steps")

    inner_ran = gate.flag

    def gradient_used(self) -> jax.Array:
        """Return whether the last gradient was added to the open window or passed to ``inner``."""
        return jnp.logical_or(self.micro_step > 0, gate.outermost_passed(self.inner_state))

    def is_open(self) -> jax.Array:
        """Return whether a window is open."""
        return self.micro_step > 0

    def summed_parts(self) -> list[PerReplica]:
        """Return ``[window]`` if ``reshard_state`` must preserve its sum, otherwise ``[]``."""
        if not isinstance(self.window, PerReplica):
            return []
        sums = any(x.sums_gradients() for x in trees.telling(self.inner_state, SumsGradients))
        return [self.window] if sums or self.window.local.weight is not None else []

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        return {"micro_step": self.micro_step, "optimizer_steps": self.optimizer_steps}


@bound_axis.gate
def accumulate(
    inner: optax.GradientTransformation,
    every: Every,
    *,
    normalize: Normalize = "mean",
    dtype: jax.typing.DTypeLike = "float32",
    rounding: Rounding = "nearest",
    sums: Sums = "local",
    axis_name: axes.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sum gradients over ``every`` calls, then run ``inner`` once on the result.

    For micro-gradients :math:`g_1 \dots g_k` ``inner`` receives

    .. math::
      \text{mean: } \tfrac1k \sum_i g_i, \qquad
      \text{sum: } \sum_i g_i, \qquad
      \text{weight: } \sum_i w_i g_i \big/ \sum_i w_i.

    The weight :math:`w_i` is the extra argument ``weight=`` of ``update``, such as the number of
    tokens over which the loss of the micro-batch is a mean. The weights of all replicas are summed,
    so that a *mean* over ``axis_name`` in ``inner`` is the mean over all tokens. In calls that
    close no window, the updates are zero and ``inner`` does not run.

    If ``normalize`` names the terms of a loss (see ``boostax.value_and_grad``), each term's
    gradient is summed separately and divided by the term's count in the whole window. Then
    ``value_and_grad`` returns gradients of shape ``[terms, ...]``, and returns the counts in
    ``Aux.weight``. Sum terms that have the same count into one term, which is cheaper.

    If the ``update`` of ``inner`` names the extra argument ``value``, as that of
    ``optax.polyak_sgd`` does, ``inner`` receives the loss of the window. This loss is the mean of
    the calls' losses, their sum, or their mean with the weights :math:`w_i`, like the gradient. If
    ``normalize`` names terms, the weight of a call's loss is the sum of the call's counts.
    ``flush`` passes on the loss of the partial window if ``update`` requires ``value``.

    A window is dropped, and counted in ``skipped``, if a weight is not in [0, 2**64), if all
    weights sum to less than 2**-64, or if a sum overflowed in a ``dtype`` with the range of f16. If
    ``inner`` has a gate, the gate receives an overflowed sum, and decides whether to skip the step.

    A loss scaler may be outside or inside of ``accumulate`` (see ``docs/cards/accumulate.md``).
    ``dynamic_loss_scale(accumulate(opt, 8))`` drops only the micro-batch that overflowed, and the
    window ends one call later. ``accumulate(dynamic_loss_scale(opt), 8)`` drops the whole window
    and is cheaper.

    Args:
      inner: the optimizer with its collectives; it receives gradients in f32 or wider.
      every: number of micro-steps per window, or a function from ``optimizer_steps`` to this
        number.
      normalize: ``"mean"``, ``"sum"`` or ``"weight"``; or the names of the loss's terms, such as
        ``("ce", "z")``.
      dtype: dtype of the sums; sums of f64 and complex gradients stay f64 and complex.
        Each gradient is added in f32 or wider, and the sum is then rounded once. In f16 the sum of
        :math:`w_i g_i` overflows at 65504, even if the mean does not, and such a window is dropped.
      rounding: rounding of bf16 sums. ``"stochastic"`` rounds up or down at random, so that the
        expected value of the sum is exact for any number of gradients. With ``"nearest"`` a
        gradient of less than a 512th of the sum does not change the sum.
      sums: ``"local"`` stores a sum for each replica (``PerReplica``) and reduces once per window.
        ``"sharded"`` averages the gradients of each call over the replicas before the addition, and
        shards the sum like the params (FSDP, tensor parallel) or like the optimizer's state
        (``shard_optimizer``). Then ``all_reduce()`` in ``inner`` sends nothing, other reductions
        are refused, and norms in ``inner`` are norms of the mean gradient. In your own
        ``shard_map`` or ``pmap`` use ``"local"``, because the sum is not sharded there.
      axis_name: replica axis (or axes). With an axis, gradients must be local; see
        ``boostax.train.local_params``. With ``None``, a train step supplies its axis if ``inner``
        has a reduction; outside a train step, no axis is used.

    Returns:
      A transformation with an ``AccumulateState``. Cost: one copy of the params in ``dtype`` on
      each device, or with ``sums="sharded"`` one copy in total; none for ``every=1``. The
      collectives of ``inner`` run once per window; with ``sums="sharded"`` a mean runs in each call
      instead. ``"weight"`` and f16 sums need a collective of 4 bytes per window, and f16 sums are
      read once more. The loss for ``inner`` needs 8 bytes on each device, and a collective of 8
      bytes per window. ``boostax.apply_gradients`` makes no temporary copy on CPU, TPU v5e and
      H100; the pure ``update`` makes a copy of the params. K terms need K copies and K backward
      passes per call, and on CPU a temporary copy if ``inner`` is a gate.

    Raises:
      ValueError, TypeError: an argument out of range; in ``init``, sharded sums around a reduction
        other than ``all_reduce()``; at trace time, a missing or unused ``weight``, already reduced
        gradients, an unbound axis, integer gradients, or a line search in a window of several
        calls.

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
      ``benchmarks/results/accumulation.md`` compares ``accumulate`` with ``optax.MultiSteps``.
    """
    tx = checks.transformation(_WHO, "inner", inner)
    hint = "every is a number of micro-steps, or a function of the number of optimizer steps."
    every = every if callable(every) else checks.positive_int(_WHO, "every", every, hint)
    hint = "Use 'weight' for losses that are means over a varying number of tokens."
    terms = tuple(sorted({*normalize})) if isinstance(normalize, tuple | list) else ()
    kind: PyTree = "weight" if terms else normalize
    checks.choice(_WHO, "normalize", kind, Kind, hint)
    narrow = checks.floating_dtype(_WHO, "dtype", dtype)
    hint = "rounding='stochastic' is only for dtype='bfloat16'."
    roundings = Rounding if narrow == jnp.bfloat16 else ("nearest",)
    checks.choice(_WHO, "rounding", rounding, roundings, hint)
    hint = "'sharded' stores a shard of the sums per device, and reduces gradients in each call."
    checks.choice(_WHO, "sums", sums, Sums, hint)
    names = axes.canonical(_WHO, axis_name)
    local, averaged = (names, ()) if sums == "local" else ((), names)
    part = _Windows(tx, every, kind, narrow, rounding == "stochastic", local, averaged, terms)
    what = "" if sums == "local" else "Reduce gradients in each call, then run `inner` on their sum"
    described = describe(_WHO, "window", names, inner={"inner_state": tx}, what=what)
    return gate.gated(part.init, described(part.step), part.flush)


class _Call(NamedTuple):
    """The arguments of a call that may run ``inner``."""

    inner_state: PyTree
    params: PyTree
    apply: bool
    extra: dict[str, PyTree]


class _Windows(NamedTuple):
    """The arguments of ``accumulate``, checked."""

    tx: optax.GradientTransformationExtraArgs
    every: Every
    normalize: Normalize
    narrow: jnp.dtype
    stochastic: bool
    names: tuple[str, ...]
    averaged: tuple[str, ...]
    terms: tuple[str, ...]

    def init(self, params: PyTree) -> AccumulateState:
        """Return the first state: no window is open."""
        with averaged(self.averaged):
            inner_state = gate.init_inner(self.tx, params)
        carries = trees.find(inner_state, CarryState)
        allowed = "an optimizer without carry, because carry must be outermost"
        hint = "Write boostax.carry(accumulate(...))."
        checks.require(not carries, _WHO, "inner", "carry in a window", allowed, hint)
        window = None
        # Only ``every=1`` as a Python number needs no buffer. A schedule or a traced value may
        # become larger than 1.
        if self.terms or not (isinstance(self.every, int) and self.every == 1):
            # With ``optax.lookahead`` inside, only the fast params have gradients.
            fast = params.fast if isinstance(params, optax.LookaheadParams) else params
            weight: PyTree = jnp.float32(0) if self.normalize == "weight" else None
            weight = {x: jnp.float32(0) for x in self.terms} or weight
            loss = (jnp.float32(0), jnp.float32(0)) if "value" in asked(self.tx) else None
            window = Window(trees.buffers(fast, self.narrow, len(self.terms) or None), weight, loss)
            window = PerReplica(axes.to_varying(window, self.names)) if self.names else window
        step, steps, skipped = (jnp.zeros((), jnp.int32) for _ in range(3))
        return AccumulateState(step, steps, skipped, jnp.asarray(False), window, inner_state)

    def step(
        self, grads: Pending, state: AccumulateState, params: PyTree, *, apply: bool, **extra: Any
    ) -> Stepped:
        """Add a gradient, and close the window after its last micro-step."""
        axes.require_local(grads.raw, self.names + self.averaged, _WHO)
        if self.averaged and self.normalize != "weight":
            # The replicas send ``grads.raw``. The product with ``grads.factors`` would be written
            # to memory before it is sent.
            raw = trees.at_least_float32(grads.raw)
            mean = jax.tree.map(lambda x: reduced(x, self.averaged, "after"), raw)
            grads = grads._replace(raw=mean)
        new = self._added(addends(grads.value(), self.narrow), extra.pop("weight", None))
        if self.averaged and self.normalize == "weight":
            # A sum of weights stays correct if the number of replicas changes; a mean would not.
            new = jax.tree.map(lambda x: reduced(x, self.averaged, "never"), new)
        count = state.micro_step + 1
        if state.window is None:
            value, closed = self._close(new, count, _Call(state.inner_state, params, apply, extra))
            return value, _next(state, jnp.zeros_like(count), closed, jnp.asarray(True))
        if "grad" in extra:
            _refused(extra["grad"])
        old = state.window.local if isinstance(state.window, PerReplica) else state.window
        if old.loss is not None:
            # ``reshard_state`` preserves the sum of ``summed_parts``, and the mean of other parts.
            unit = 1 / axes.size(self.names) if state.summed_parts() else 1
            loss = extra.get("value")
            # In a call without a loss, the weight is 0.
            share = jnp.float32(sum(jax.tree.leaves(new.weight) or [unit]) * (loss is not None))
            loss = weigh(jnp.float32(0 if loss is None else loss), share), share
            loss = jax.lax.pmean(axes.to_varying(loss, self.averaged), self.averaged)
            new = new._replace(loss=loss)
        require_like(_WHO, "the window", old, new)
        seed = formats.fold(state.optimizer_steps, state.micro_step) if self.stochastic else None
        is_first = state.micro_step == 0

        def summed(path: KeyPath, old: jax.Array, new: jax.Array) -> jax.Array:
            # The first gradient of a window replaces the sum of the previous window.
            total = axes.placed_like(old.astype(new.dtype) + new, old)
            total = jnp.where(is_first, axes.placed_like(new, old), total)
            if seed is not None and old.dtype == jnp.bfloat16:
                return formats.to_bfloat16(total, formats.seed_of(seed, path))
            return total.astype(old.dtype)

        sums = tree_map_with_path(summed, old, new)
        every = self.every(state.optimizer_steps) if callable(self.every) else self.every
        ends = count >= jnp.maximum(every, 1)
        call = _Call(state.inner_state, params, apply, elsewhere(extra, _refused))
        value, closed = self._close_if(ends, sums, count, call)
        state = state._replace(window=PerReplica(sums) if self.names else sums)
        return value, _next(state, jnp.where(ends, 0, count), closed, ends)

    def flush(self, state: AccumulateState, params: PyTree, **extra: PyTree) -> Stepped:
        """Close an open window, and the open windows inside ``inner``."""
        if state.window is None:
            params, inner_state = gate.flush_inner(self.tx, state.inner_state, params, extra)
            return params, state._replace(inner_state=inner_state)
        # Before each gradient was added to ``sums``, a scaler inside this window checked that the
        # gradient came from a scaled loss.
        sums = state.window.local if isinstance(state.window, PerReplica) else state.window
        sums = handshake.assume_scaled(sums, state.inner_state)
        ends = state.is_open()
        extra |= {"value": sums.loss[0]} if sums.loss and asked(self.tx)["value"] else {}
        call = _Call(state.inner_state, params, True, extra)
        params, (inner, applied) = self._close_if(ends, sums, state.micro_step, call)
        with averaged(self.averaged):
            params, inner = gate.flush_inner(self.tx, inner, params, extra)
        return params, _next(state, jnp.zeros_like(state.micro_step), (inner, applied), ends)

    def _added(self, grads: PyTree, weight: PyTree) -> Window:
        """Return the sums of a window that contains only this gradient."""
        if self.normalize != "weight":
            allowed = f"left out with normalize={self.normalize!r}"
            hint = "Use normalize='weight' for a mean weighted by boostax.Aux.weight."
            checks.absent(_WHO, "weight", weight, allowed, hint)
            return Window(grads, None)
        hint = "Call update(..., weight=aux.weight) with the aux of boostax.value_and_grad."
        allowed = f"the counts of {self.terms or 'tokens'} with normalize={self.terms or 'weight'}"
        terms = tuple(sorted(weight)) if isinstance(weight, dict) else ()
        is_valid = weight is not None and terms == self.terms
        checks.require(is_valid, _WHO, "weight", got=terms or weight, allowed=allowed, hint=hint)
        weight = axes.to_varying(jax.tree.map(jnp.float32, weight), self.names + self.averaged)
        # A negative, too large or NaN weight becomes NaN. This NaN makes the sum of the weights
        # NaN, but ``weigh`` replaces the weighted gradients by zeros.
        weight = jax.tree.map(lambda x: jnp.where((x >= 0) & (x < _MOST), x, jnp.nan), weight)
        if not self.terms:
            return Window(weigh(grads, weight), weight)
        counts = jnp.stack([weight[name] for name in self.terms])
        # A term with count 0 may have a nonzero sum. The gradient of such a term was not divided by
        # the count, so the factor is 1.
        return Window(jax.vmap(weigh)(grads, jnp.where(counts == 0, 1, counts)), weight)

    def _close_if(self, ends: jax.Array, sums: Window, count: jax.Array, call: _Call) -> Stepped:
        """Close the window if ``ends``; otherwise return the old inner state, and a false flag."""
        unchanged = call.inner_state, jnp.asarray(False)
        how: dict[str, Any] = {"apply": call.apply, "who": _WHO, "names": self.names}
        return gate.run_or_hold(
            ends, lambda: self._close(sums, count, call), call.params, unchanged, **how
        )

    def _close(self, window: Window, count: jax.Array, call: _Call) -> Stepped:
        """Normalise the sums, and run ``inner`` on them if they are usable.

        The result contains the inner state and a flag, which is True if the result was applied.
        """
        inner, params, apply, extra = call
        # A sum in f16 can overflow, even if a scaler checked each gradient. A gate inside this
        # window must receive such a sum, because a scaler lowers its scale after an overflow.
        is_checked = float(jnp.finfo(self.narrow).max) < _MOST and not gate.gates_in(inner)
        ok = norms.all_finite(window.grads) if is_checked else jnp.asarray(True)
        factors = [1.0 / count.astype(jnp.float32)] if self.normalize == "mean" else []
        if window.weight is not None:
            weight = jnp.stack([*window.weight.values()]) if self.terms else window.weight
            weight = jnp.where(ok, weight, jnp.nan) if is_checked else weight
            # Each replica multiplies its local sum by ``n / summed`` for n replicas, because
            # XLA:CPU would write a copy of the sums for a division. At least one term must have a
            # usable weight. The factor of a term with count 0 is 0.
            summed = total(weight, self.names)
            usable = summed >= _LEAST
            factors = [jnp.where(usable, (axes.size(self.names) if self.names else 1) / summed, 0)]
            ok = usable.any() & (summed >= 0).all()
        elif is_checked:
            ok = axes.agree(ok, self.names)

        if window.loss and extra.get("value") is not None:
            loss = divide(*total(jnp.stack(window.loss), self.names))
            extra = {**extra, "value": loss * count if self.normalize == "sum" else loss}

        def work() -> Stepped:
            grads = Pending(window.grads, tuple(factors))
            if self.terms:
                # The terms are added one by one, because XLA fuses additions with the optimizer,
                # but writes the result of a reduction to memory.
                shares: list[PyTree] = []
                for i, x in enumerate(factors[0]):
                    term = jax.tree.map(lambda g, i=i: g[i], window.grads)
                    shares.append(Pending(term, (x,)).value())
                grads = Pending(jax.tree.map(lambda *terms: sum(terms), *shares))
            with averaged(self.averaged):
                return gate.call(self.tx, grads, inner, params, apply=apply, extra=extra)

        how: dict[str, Any] = {"apply": apply, "who": _WHO, "names": self.names}
        is_sure = window.weight is None and not is_checked
        value, new = work() if is_sure else gate.run_or_hold(ok, work, params, inner, **how)
        # The flag is computed outside the branch, because XLA:GPU copies all operands of a branch
        # that returns a constant flag.
        return value, (new, ok & gate.passed(new))


def _refused(params: PyTree) -> PyTree:
    """Refuse a line search, whose loss would be that of the last micro-batch, not of the window."""
    got = "a window of several calls, whose earlier micro-batches are no longer in memory"
    hint = "In make_train_step(microbatches=...), a line search reads the loss of the whole batch."
    raise ValueError(checks.message(_WHO, "every", "1 around a line search", got, hint))


def terms_of(opt_state: PyTree) -> tuple[str, ...] | None:
    """Return the terms that the windows in a state sum separately; ``None`` without a window.

    A window that some leaves bypass cannot have terms, because the gradients of those leaves would
    have a dimension ``[terms]`` that is never summed.
    """
    masked = trees.find(opt_state, optax.MaskedState, optax.ConditionallyTransformState, CarryState)
    bypassed = {id(node) for state in masked for node in trees.nodes(state)}
    windows = trees.find(opt_state, Window, optax.MultiStepsState)
    weights = [None if id(x) in bypassed else getattr(x, "weight", None) for x in windows]
    terms = {tuple(sorted(x)) if isinstance(x, dict) else () for x in weights}
    return None if not terms else terms.pop() if len(terms) == 1 else ()


def require_weighted(opt_state: PyTree, weight: PyTree) -> None:
    """Refuse a weight for ``optax.MultiSteps``, which weighs all micro-steps alike."""
    if trees.find(opt_state, optax.MultiStepsState):
        hint = "MultiSteps weighs calls equally. Use boostax.accumulate(..., normalize='weight')."
        checks.absent("apply_gradients", "weight", weight, "left out around optax.MultiSteps", hint)


def _next(state: AccumulateState, count: jax.Array, closed: Stepped, ended: jax.Array) -> PyTree:
    inner_state, applied = closed
    steps = gate.counted(state.optimizer_steps, applied)
    skipped = gate.counted(state.skipped, ended & ~applied)
    return AccumulateState(count, steps, skipped, applied, state.window, inner_state)


def has_updated(opt_state: PyTree) -> jax.Array:
    """Return whether the last call closed a window and applied its result to the params.

    Schedules, EMAs and logging outside the transformation should count only these calls.

    Args:
      opt_state: any state that contains a state of ``accumulate``.

    Returns:
      Bool scalar; False before the first call.

    Raises:
      ValueError: the state has no ``AccumulateState``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.accumulate(optax.sgd(1.0), every=2)
      >>> _, state = tx.update(jnp.ones(3), tx.init(jnp.zeros(3)), jnp.zeros(3))
      >>> bool(boostax.train.has_updated(state))
      False
    """
    trees.state_of("has_updated", opt_state, AccumulateState, "Wrap the optimizer in accumulate.")
    return gate.passed(opt_state)


@checks.arguments
def flush(
    tx: optax.GradientTransformation, opt_state: PyTree, params: Params, **extra_args: Any
) -> tuple[Params, PyTree]:
    """Apply the last, partial window, normalised by its number of micro-steps.

    Call ``flush`` where ``apply_gradients`` is called (inside ``shard_map`` for a data-parallel
    step), or use ``TrainStep.flush``. If no window is open, nothing happens.

    Args:
      tx: the transformation that made the state; a window must not be inside an Optax wrapper.
      opt_state: the state of ``tx``, or an ``nnx.Optimizer``.
      params: the params.
      **extra_args: passed to the inner transformation.

    Returns:
      ``(params, opt_state)``, with arrays in place of NNX's variables.

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
    arrays, opt_state = trees.arrays(params), trees.arrays(opt_state)
    trained = trees.without_gradient(trees.aside(arrays), True)
    call = "boostax.flush(tx, opt_state, params)"
    with trees.explaining(trees.require_state, "flush", call, tx, opt_state, trained):
        tx = optax.with_extra_args_support(tx)
        new, opt_state = gate.flush_inner(tx, opt_state, trained, extra_args)
    return trees.put_back(new, arrays), opt_state


@contextlib.contextmanager
def averaged(names: tuple[str, ...]) -> Generator[None]:
    """Declare that gradients are averaged over ``names``; report these axes to outer gates."""
    if (reduced := bound_axis.REDUCED.get()) is not None:
        reduced.update(names)
    with axes.binding(names, averaged=True) if names else contextlib.nullcontext():
        yield
