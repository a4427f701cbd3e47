# SPDX-License-Identifier: Apache-2.0
r"""Skip steps whose gradient norm is far above recent norms: a rule for ``boostax.gate``.

The norms accepted before determine a limit, and a norm above the limit is a spike. Norms of refused
steps do not enter the statistics. The skip steps of OLMo-core, Levanter and MaxText record all
norms: every spike widens their limit, and one NaN refuses every step until it has left the window.

References:
  Chowdhery et al., PaLM: Scaling Language Modeling with Pathways,
  https://arxiv.org/abs/2204.02311, 2022: steps around spikes are left out by hand.
  Rousseeuw and Croux, Alternatives to the Median Absolute Deviation, JASA 88, 1993.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, bound_axis, checks, gate, norms, trees
from boostax._core.describe import Holds, PyTree, first_line
from boostax._core.rule import by_rule

Rule = Literal["median", "sigma"]
_WHO = "skip_spikes"
# The standard deviation of a normal distribution is this many median absolute deviations.
_NORMAL = 1.4826


class SpikesState(NamedTuple):
    """Statistics of ``skip_spikes``, kept as ``own`` of a ``GateState``.

    Attributes:
      norms: f32 ``[window]``, the last accepted norms; zero where there is none yet.
      accepted: i32, how many were accepted since the start.
      value: f32, the norm of the last call.
      limit: f32, the limit for that norm; infinite until half a window of norms above zero was
        accepted.
      spikes: i32, calls that were refused since the start.
      spikes_in_a_row: i32, calls refused since the last one that ran.
    """

    norms: jax.Array
    accepted: jax.Array
    value: jax.Array
    limit: jax.Array
    spikes: jax.Array
    spikes_in_a_row: jax.Array
    holds = Holds(("norms", "accepted"))

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``.

        ``spike_reason`` is 0 if the last call ran, 2 if its norm exceeded the limit, 3 if its norm
        was not finite.
        """
        why = jnp.where(jnp.isfinite(self.value), jnp.where(self.value > self.limit, 2, 0), 3)
        found = {"spike_value": self.value, "spike_limit": self.limit, "spike_reason": why}
        return found | {"spikes": self.spikes, "spikes_in_a_row": self.spikes_in_a_row}


def _middle(values: jax.Array, known: jax.Array) -> jax.Array:
    """Return the median of the known values."""
    ordered = jnp.sort(jnp.where(known, values, jnp.finfo(jnp.float32).max))
    count = jnp.maximum(jnp.sum(known), 1)
    return 0.5 * ordered[(count - 1) // 2] + 0.5 * ordered[count // 2]


def _median(values: jax.Array, known: jax.Array) -> tuple[jax.Array, jax.Array]:
    centre = _middle(values, known)
    return centre, _NORMAL * _middle(jnp.abs(values - centre), known)


def _sigma(values: jax.Array, known: jax.Array) -> tuple[jax.Array, jax.Array]:
    count = jnp.maximum(jnp.sum(known), 1)
    # In units of the largest norm nothing overflows and no square is lost.
    largest = jnp.max(jnp.where(known, values, jnp.finfo(jnp.float32).tiny))
    shares = jnp.where(known, values / largest, 0)
    centre = jnp.sum(shares) / count
    variance = jnp.sum(jnp.where(known, jnp.square(shares - centre), 0)) / count
    return centre * largest, jnp.sqrt(variance) * largest


def _norm(grads: gate.Pending, names: tuple[str, ...]) -> jax.Array:
    """Return the root mean square of the replicas' norms, without a derivative."""
    leaves = jax.tree.leaves(jax.lax.stop_gradient(grads.value()))
    total = axes.sum_over_shards(norms.square_sums(leaves), names)
    return norms.root(total / (axes.size(names) if names else 1)).astype(jnp.float32)


@bound_axis.gate
def skip_spikes(
    inner: optax.GradientTransformation,
    *,
    rule: Rule = "median",
    k: float = 6.0,
    floor: float = 0.01,
    window: int = 128,
    axis_name: axes.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Run ``inner`` unless the gradient norm is far above the norms accepted before.

    .. math::
      \text{run} = \text{finite}(v) \text{ and } v \le c + k \max(d,\ \text{floor}\,|c|)

    with :math:`v` the global norm, and centre :math:`c` and spread :math:`d` of the last ``window``
    accepted norms: the median and 1.4826 times the median absolute deviation, or the mean and the
    (uncorrected) standard deviation. Even if half of a window are spikes, the median moves little.
    A norm of zero runs and says nothing of the size of others, so it does not count.

    A refused step leaves ``inner``, the params and the statistics unchanged, bit for bit. There is
    no limit to refusals in a row: if the usual norm itself rises above the limit, every step is
    refused. Watch ``spikes_in_a_row`` of ``boostax.metrics``. On record a constant clip of the norm
    does as well: try that first.

    Around a window the rule judges every micro-step; inside a window it judges the sum of each
    window. Put it inside a loss scaler, because the gradients outside are multiplied by the scale:
    ``dynamic_loss_scale(accumulate(skip_spikes(adamw(1e-3)), 8))``. For your own rule, such as one
    on the loss, use ``boostax.gate``.

    Args:
      inner: the optimizer; it sees f32 (or wider) gradients and params.
      rule: ``"median"``, or ``"sigma"``: the rule of OLMo-core, Levanter and MaxText, except that
        these record refused norms too.
      k: how many spreads above the centre, > 0.
      floor: the least spread, as a share of the centre.
      window: number of norms kept; there is no limit until half of them are accepted and not zero.
      axis_name: replica axis (or axes). Gradients must then be *local*: see
        ``boostax.train.local_params``; the norm is the root mean square of the replicas' norms.
        ``None`` is no axis, and in a step the step's axis where something inside reduces.

    Returns:
      A gate whose state has a ``SpikesState``. Cost: 4 bytes for each of ``window``, and 25; one
      read of the gradients; with ``axis_name`` a collective of 8 bytes; on CPU no temporary beyond
      those of a bare step.

    Raises:
      ValueError, TypeError: an argument out of range; at ``init``, a loss scaler inside; at trace
        time, already reduced gradients, an unbound axis, or a decision on which replicas could
        differ.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.precision.skip_spikes(optax.sgd(1.0), window=4)
      >>> w, state = jnp.float32(0.0), tx.init(jnp.float32(0.0))
      >>> for g in (1.0, 1.0, 100.0, jnp.nan, 1.0):
      ...   w, state = boostax.apply_gradients(tx, jnp.float32(g), state, w)
      >>> float(w), int(boostax.metrics(state)["spikes"])
      (-3.0, 2)

    References:
      The skip step of https://github.com/allenai/OLMo-core.
    """
    checks.choice(_WHO, "rule", rule, Rule, "boostax.gate takes a rule of your own.")
    checks.number(_WHO, "k", k, "greater than 0", lambda x: x > 0, "6 is the default.")
    checks.number(_WHO, "floor", floor, "not negative", lambda x: x >= 0, "0.01 is the default.")
    hint = "It counts values, and one value has no spread; 128 is the default."
    window = checks.natural(_WHO, "window", window, hint, "an integer of at least 2", least=2)
    names = axes.canonical(_WHO, axis_name)

    def first(_: PyTree) -> SpikesState:
        scalars = (jnp.zeros((), kind) for kind in ("i4", "f4", "f4", "i4", "i4"))
        return SpikesState(jnp.zeros(window, jnp.float32), *scalars)

    def judge(grads: gate.Pending, own: SpikesState, _: PyTree) -> tuple[jax.Array, SpikesState]:
        value, places = _norm(grads, names), jnp.arange(window)
        measure = _median if rule == "median" else _sigma
        known = (places < own.accepted) & (own.norms > 0)
        centre, spread = measure(own.norms, known)
        limit = centre + k * jnp.maximum(spread, floor * jnp.abs(centre))
        limit = jnp.where(jnp.sum(known) >= max(window // 2, 2), limit, jnp.inf)
        ok = jnp.isfinite(value) & (value <= limit)
        norms = jnp.where(ok & (places == own.accepted % window), value, own.norms)
        accepted, spikes = gate.counted(own.accepted, ok), gate.counted(own.spikes, ~ok)
        in_a_row = jnp.where(ok, 0, gate.counted(own.spikes_in_a_row, ~ok))
        return ok, SpikesState(norms, accepted, value, limit, spikes, in_a_row)

    tx = by_rule(_WHO, inner, judge, first, names, first_line(skip_spikes))

    def init_fn(params: PyTree) -> optax.OptState:
        state = tx.init(params)
        got = [type(node).__name__ for node in trees.telling(state, "known_by")]
        hint = "Its scale is still in the gradients: dynamic_loss_scale(skip_spikes(...))."
        checks.require(_WHO, "inner", got, "without a loss scaler", not got, hint)
        return state

    return tx._replace(init=init_fn)
