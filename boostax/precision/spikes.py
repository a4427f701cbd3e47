# SPDX-License-Identifier: Apache-2.0
r"""Skip steps whose gradient norm is far above recent norms: a rule for ``boostax.gate``.

Previously accepted norms determine a limit, and a norm above the limit is a spike. Norms of refused
steps are not recorded. The similar rules of OLMo-core, Levanter and MaxText record all norms, so
every spike raises the limit, and after one NaN every step is refused until the NaN has left the
window.

References:
  Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, https://arxiv.org/abs/2204.02311,
  2022: the authors skip steps around spikes by hand. Rousseeuw and Croux, Alternatives to the
  Median Absolute Deviation, JASA 88, 1993.
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
      norms: f32 ``[window]``, the last accepted norms; zero in unused slots.
      accepted: i32, number of accepted norms since the start.
      value: f32, the norm of the last call.
      limit: f32, the limit of the last call; infinite until ``window / 2`` nonzero norms are
        accepted.
      spikes: i32, calls that were refused since the start.
      spikes_in_a_row: i32, calls refused since the last accepted call.
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
    # In units of the largest norm no square overflows or underflows.
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
    r"""Run ``inner`` unless the gradient norm is far above previously accepted norms.

    .. math::
      \text{run} = \text{finite}(v) \text{ and } v \le c + k \max(d,\ \text{floor}\,|c|)

    with the global norm :math:`v`, and the centre :math:`c` and spread :math:`d` of the last
    ``window`` accepted norms. Centre and spread are the median and 1.4826 times the median absolute
    deviation, or the mean and the (uncorrected) standard deviation. Even if nearly half of a window
    are spikes, the median moves little. A step with norm zero runs, but its norm is not counted.

    A refused step leaves ``inner``, the params and the statistics unchanged, bit for bit. If the
    usual norm rises above the limit, every step is refused, without end. Watch ``spikes_in_a_row``
    of ``boostax.metrics``. In our record a constant clip of the norm does as well, so try a clip
    first.

    Around a window the rule judges every micro-step; inside a window it judges the sum of each
    window. Put ``skip_spikes`` inside a loss scaler, because gradients outside are multiplied by
    the scale: ``dynamic_loss_scale(accumulate(skip_spikes(adamw(1e-3)), 8))``. For your own rule
    use ``boostax.gate``.

    Args:
      inner: the optimizer, which gets gradients and params in f32 or wider.
      rule: ``"median"``, or ``"sigma"``: the rule of OLMo-core, Levanter and MaxText, except that
        theirs also record refused norms.
      k: the limit's distance from the centre in spreads, > 0.
      floor: the least spread, as a share of the centre.
      window: number of kept norms; there is no limit until half of this number are accepted and not
        zero.
      axis_name: replica axis (or axes). Gradients must then be *local* (see
        ``boostax.train.local_params``), and the norm is the root mean square of the replicas'
        norms. With ``None``, a train step supplies its own axis if a part inside reduces; elsewhere
        there is no axis.

    Returns:
      A gate whose state has a ``SpikesState``. Cost: ``4 * window + 25`` bytes; one read of the
      gradients; with ``axis_name`` a collective of 8 bytes; on CPU no further temporary.

    Raises:
      ValueError, TypeError: an argument out of range; at ``init``, a loss scaler inside; at trace
        time, already reduced gradients, an unbound axis, or a predicate that may differ per
        replica.

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
