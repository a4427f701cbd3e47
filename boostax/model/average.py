# SPDX-License-Identifier: Apache-2.0
r"""Averages of the params for any optimizer: exponential, uniform, or of the latest snapshots.

If the params move randomly around a minimum, the mean of the params of several steps has a lower
loss than the params of each step. A decaying learning rate also removes this random movement. An
average changes only in *applied* steps. Around a gate (a scaler or a window), ``average_params``
reads from the gate's state whether the step was applied. Inside a gate, the average is computed in
the branch that the gate runs in applied steps.

Exponential and uniform averages share one formula for the average :math:`a_n`, with weights
:math:`w_n` and the :math:`n`-th sampled params :math:`p_n`:

.. math:: a_n = a_{n-1} + w_n\,(p_n - a_{n-1}), \qquad w_1 = 1

References:
  Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging,
  https://doi.org/10.1137/0330046, 1992.
  Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization,
  https://arxiv.org/abs/1803.05407, 2018.
  Kaddour, Stop Wasting My Time! Saving Days of ImageNet and BERT Training with Latest Weight
  Averaging, https://arxiv.org/abs/2209.14981, 2022.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import KeyPath, tree_map_with_path
from jax.typing import DTypeLike

from boostax._core import checks, gate, protocols, replicas, trees, types
from boostax._core.describe import Holds, Stepped, describe
from boostax._core.types import PyTree

Kind = Literal["ema", "window", "lawa"]
_WHO = "average_params"


class AverageParamsState(NamedTuple):
    """State of ``average_params``.

    Attributes:
      steps: i32, applied steps so far.
      averaged: i32, the number of samples so far; the next snapshot is written at index
        ``averaged % size``.
      averages: the average, a tree like the params, in f32 or wider; or with ``"lawa"`` the
        snapshots, a tree of ``(size, *leaf.shape)`` in ``dtype``.
      inner_state: state of the inner transformation.
    """

    steps: jax.Array  # [] int32
    averaged: jax.Array  # [] int32
    averages: PyTree  # shapes of the params, float32; or [size, *shape], the storage dtype
    inner_state: optax.OptState
    holds = Holds(("steps", "averaged", "averages"), params=True)

    # All params are averaged, so outer transformations must not mask params.
    needs_all_params = protocols.yes

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        return {"averaged": self.averaged}


def _sampled(
    state: AverageParamsState, inner: PyTree, due: jax.Array, new: Callable, weight: Callable | None
) -> PyTree:
    """Return ``state.averages``, with the new params as one more sample if ``due``."""

    def add(average: jax.Array, p: jax.Array) -> jax.Array:
        p = p.astype(average.dtype)
        if weight is None:
            return lax.dynamic_update_index_in_dim(average, p, state.averaged % len(average), 0)
        n = (state.averaged + 1).astype(average.real.dtype)
        # The first sampled params overwrite the average, so a NaN in the old average has no effect.
        return jnp.where(state.averaged == 0, p, average + weight(n) * (p - average))

    def write() -> Stepped:
        params = new()
        for stored in trees.telling(inner, protocols.KeepsMasters)[:1]:
            params = stored.master_params(params)
        return (), jax.tree.map(add, state.averages, params)

    return gate.run_or_hold(due, write, (), state.averages, apply=True, who=_WHO)[1]


@checks.arguments
def average_params(
    inner: optax.GradientTransformation,
    kind: Kind = "ema",
    *,
    decay: float | None = None,
    size: int | None = None,
    every: int = 1,
    start: int = 0,
    dtype: DTypeLike = "float32",
) -> optax.GradientTransformationExtraArgs:
    r"""Average the params in the state; ``averaged_params`` reads the average.

    The params are sampled after applied step :math:`\text{start} + 1`, and then after each further
    ``every`` applied steps. The n-th sample gives

    .. math::
      \text{ema: } a_n = a_{n-1} + \tfrac{1-d}{1-d^n}\,(p_n - a_{n-1}), \quad
      \text{window: } a_n = a_{n-1} + \tfrac1n\,(p_n - a_{n-1}), \quad
      \text{lawa: } a_n = \tfrac1k \sum_{i<k} p_{n-i}

    with the decay :math:`d` and the size :math:`k`. ``"ema"`` is ``optax.ema`` of the params, with
    bias correction. ``"window"`` is the mean of all samples, and stores only one copy. Use
    ``"window"`` for the last steps of a run with a known length. ``"lawa"`` is the mean of the
    latest ``size`` snapshots, or of all snapshots if there are fewer. Before the first sample,
    ``averaged_params`` returns the params.

    Put ``average_params`` around any optimizer or gate, or inside gates. Around
    ``boostax.precision.store``, ``average_params`` averages the f32 masters. A step that an inner
    or outer gate skips leaves the average unchanged bit for bit. The average is cheapest directly
    around the optimizer, because one loop over the elements then computes update and average, as in
    ``dynamic_loss_scale(average_params(adamw(1e-3)))``.

    Args:
      inner: the optimizer, with gates or without. The params must be equal on all replicas.
      kind: ``"ema"``, ``"window"`` or ``"lawa"``.
      decay: decay of ``"ema"``, in (0, 1); 0.999 by default. The average covers about the last
        ``every / (1 - decay)`` steps.
      size: number of snapshots of ``"lawa"``; 5 by default.
      every: number of applied steps between samples.
      start: number of applied steps before the first sample.
      dtype: dtype of the snapshots of ``"lawa"``. The other kinds need f32, because their averages
        change by small amounts. f64 and complex leaves stay f64 and complex.

    Returns:
      A gate that never skips a step, with an ``AverageParamsState``. Cost: 8 bytes and a copy of
      the params in f32, or ``size`` copies in ``dtype``, sharded like the params. A sampled step
      reads the params and the copy, and writes the copy; with ``"lawa"``, it reads the params and
      writes one snapshot. Other steps cost nothing. The write is in place on CPU, TPU v5e and H100,
      except on CPU between a scaler and a window, where the write needs a copy of the params.
      Around a gate, ``update`` (in place of ``boostax.apply_gradients``) needs one more copy of the
      params than without ``average_params``.

    Raises:
      ValueError, TypeError: an argument out of range, or an argument of another ``kind``; at
        ``init``, params that differ per replica; at trace time, ``update`` without params.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.model.average_params(optax.sgd(1.0), "window", start=1)
      >>> w = jnp.float32(0.0)
      >>> state = tx.init(w)
      >>> for _ in range(4):
      ...   w, state = boostax.apply_gradients(tx, jnp.float32(-1.0), state, w)
      >>> float(w), float(boostax.model.averaged_params(w, state))
      (4.0, 3.0)
    """
    tx = checks.transformation(_WHO, "inner", inner)
    checks.choice(_WHO, "kind", kind, Kind, "'ema' is usual.")
    allowed = f"left out with kind {kind!r}"
    for name, value, only in (("decay", decay, "ema"), ("size", size, "lawa")):
        unused = None if kind == only else value
        checks.absent(_WHO, name, unused, allowed, f"Only kind={only!r} uses {name}.")
    decay = 0.999 if decay is None else decay
    slots = 5 if size is None else size
    checks.number(_WHO, "decay", decay, "in (0, 1)", "0.999 is the default.", above=0, below=1)
    checks.positive_int(_WHO, "size", slots, "size is the number of snapshots; 5 is usual.")
    checks.positive_int(_WHO, "every", every, "every is a number of applied steps between samples.")
    checks.natural(_WHO, "start", start, "start is a number of applied steps before sampling.")
    narrow = checks.floating_dtype(_WHO, "dtype", dtype)
    valid = kind == "lawa" or jnp.finfo(narrow).bits >= 32
    allowed, hint = f"'float32' with kind {kind!r}", "Rounding would remove small changes."
    checks.require(valid, _WHO, "dtype", got=dtype, allowed=allowed, hint=hint)
    # The logarithm is computed on the host, because rounding a decay near 1 to f32 would lose most
    # of the digits of ``1 - decay``.
    log = jnp.log(decay) if isinstance(decay, jax.Array) else math.log(decay)
    # The weights of ``optax.ema``, divided by ``1 - decay ** n``, which corrects the bias.
    weights = {"ema": lambda n: (1 - decay) / -jnp.expm1(n * log), "window": lambda n: 1 / n}
    weight = weights.get(kind)

    def init_fn(params: PyTree) -> AverageParamsState:
        inner_state = gate.init_inner(tx, params)
        allowed = "an optimizer that keeps params equal on all replicas"
        got = "local_updates or partial_average"
        hint = "The last synchronization of these parts already averages over the replicas."
        checks.require(not replicas.owns_params(inner_state), _WHO, "inner", got, allowed, hint)
        averages = trees.buffers(params, narrow, None if weight else slots)
        return AverageParamsState(jnp.int32(0), jnp.int32(0), averages, inner_state)

    def after(state: AverageParamsState, inner: PyTree, moved: jax.Array, new: Callable) -> PyTree:
        # If every step is sampled, the condition is ``moved`` itself: XLA then fuses this branch
        # with the optimizer's branch.
        due = moved & (state.steps >= start) if start else moved
        due = due & ((state.steps - start) % every == 0) if every > 1 else due
        averages = _sampled(state, inner, due, new, weight)
        steps = gate.counted(state.steps, moved)
        return AverageParamsState(steps, gate.counted(state.averaged, due), averages, inner)

    @describe(_WHO, "watch", inner={"inner_state": tx})
    def step_fn(
        grads: gate.Pending, state: AverageParamsState, params: PyTree, *, apply: bool, **extra: Any
    ) -> Stepped:
        trees.require_params(params, _WHO, "Call tx.update(grads, state, params).")
        value, inner = gate.call(tx, grads, state.inner_state, params, apply=apply, extra=extra)
        moved = gate.passed(inner)
        return value, after(
            state, inner, moved, lambda: value if apply else trees.applied(params, value)
        )

    def flush_fn(state: AverageParamsState, params: PyTree, **extra: PyTree) -> Stepped:
        was_open = gate.held_open(state.inner_state)
        params, inner = gate.flush_inner(tx, state.inner_state, params, extra)
        return params, after(state, inner, was_open & gate.passed(inner), lambda: params)

    return gate.gated(init_fn, step_fn, flush_fn)


def averaged_params(params: types.Params, opt_state: PyTree) -> types.Params:
    """Return the average that ``average_params`` keeps, as params to evaluate or to save.

    BatchNorm statistics belong to the params that they were measured with, so measure the
    statistics again: run the model with the averaged params over some dozens of batches.

    Args:
      params: the current params, or the whole Equinox module. The result has the dtypes of these
        params; with ``boostax.precision.store`` inside, pass ``masters(params, opt_state)`` for an
        average in f32. Before the first sample, and for leaves that are not averaged
        (``boostax.carry``), the result is ``params``.
      opt_state: any state that contains an ``AverageParamsState``.

    Returns:
      A tree like ``params``. Cost: a copy of the params, and a read of the average or snapshots.

    Raises:
      ValueError: the state has no ``AverageParamsState``; params of other shapes.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.model.average_params(optax.sgd(0.1), "lawa", size=3, every=10)
      >>> boostax.model.averaged_params(jnp.ones(2), tx.init(jnp.ones(2))).tolist()
      [1.0, 1.0]
    """
    who = "averaged_params"
    trees.require_order(who, "averaged_params(params, opt_state)", params=params)
    hint = "Put boostax.model.average_params around the optimizer."
    state = trees.state_of(who, opt_state, AverageParamsState, hint)
    params = trees.arrays(params)
    # ``params`` may be a module, which also has leaves that are not params.
    averages = dict(trees.named(state.averages))
    odd = sorted(averages.keys() - trees.names(params))
    hint = "Pass the params of the optimizer, or the module of these params."
    checks.require(not odd, who, "params", f"none at {odd[:4]}", "those of the optimizer", hint)

    def average_of(path: KeyPath, p: jax.Array) -> jax.Array:
        average = averages.get(name := trees.path_name(path))
        if average is None:
            return p
        if jnp.ndim(average) > jnp.ndim(p):
            # Elements of the window that are not yet written are zero.
            total = average.astype(trees.wide_dtype(average)).sum(0)
            average = total / jnp.clip(state.averaged, 1, len(average)).astype(total.real.dtype)
        trees.require_shapes(who, "params", {name: p}, {name: average}, hint)
        return jnp.where(state.averaged > 0, average.astype(p.dtype), p)

    return tree_map_with_path(average_of, params)
