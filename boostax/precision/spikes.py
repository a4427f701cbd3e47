# SPDX-License-Identifier: Apache-2.0
r"""Spikes: leave out, or clip, a step of which the loss or a norm is far above what is usual.

Every call has a *value* :math:`v` (the loss, the norm of the gradient, the norm of the update), and
a rule makes a *limit* :math:`l` of the values before. A value above the limit is a spike: its step
is skipped, or its gradient multiplied by :math:`l / v`. Only what was accepted enters the
statistics, of a clipped step the clipped value. Skip steps that record all values (OLMo-core,
Levanter, MaxText) widen their limit with every spike, and one NaN refuses every step until it has
left the window.

References:
  Chowdhery et al., PaLM: Scaling Language Modeling with Pathways,
  https://arxiv.org/abs/2204.02311, 2022: steps around spikes are left out by hand.
  Rousseeuw and Croux, Alternatives to the Median Absolute Deviation, JASA 88, 1993.
  Kumar et al., ZClip: Adaptive Spike Mitigation for LLM Pre-Training,
  https://arxiv.org/abs/2504.02507, 2025.
  Wang et al., AdaGC: Enhancing LLM Pretraining Stability via Adaptive Gradient Clipping,
  https://arxiv.org/abs/2502.11034, 2025.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, trees
from boostax._core.describe import Holds, Stepped, describe
from boostax._core.gate import (
    Pending,
    counted,
    flush_of,
    gated,
    init_inner,
    passed,
    run,
    run_or_hold,
    told_by,
)

PyTree = Any
By: TypeAlias = Literal["loss", "gradient", "update"]
Action: TypeAlias = Literal["skip", "clip"]
RuleName: TypeAlias = Literal["median", "sigma", "zclip", "adagc"]

_WHO = "skip_spikes"
_TINY = float(jnp.finfo(jnp.float32).tiny)
# Of the normal distribution: the standard deviation in median absolute deviations.
_NORMAL = 1.4826
# What ``SpikesState.reason`` says of the last call.
_TAKEN, _CLIPPED, _OVER, _NOT_FINITE = range(4)


class SpikesState(NamedTuple):
    """State of ``skip_spikes``.

    Attributes:
      own: what the rule keeps of accepted values: a ring of f32, or running moments.
      value: f32, the value of the last call; of a rule by leaves that of the leaf furthest over.
      limit: f32, the limit that it was held to; infinite while the rule gathers its first values.
      reason: i32, what became of the last call: 0 taken, 1 clipped, 2 refused as it was over the
        limit, 3 refused as it was not finite.
      ran: bool, whether the last call ran what is inside; False before the first.
      clipped: i32, calls that were clipped since the start.
      spikes: i32, calls that were refused since the start.
      spikes_in_a_row: i32, calls refused since the last one that ran.
      inner_state: state of the inner transformation.
    """

    own: PyTree
    value: jax.Array
    limit: jax.Array
    reason: jax.Array
    ran: jax.Array
    clipped: jax.Array
    spikes: jax.Array
    spikes_in_a_row: jax.Array
    inner_state: Any
    holds = Holds(("own",))

    passed = taken = told_by("ran")

    def metrics(self) -> dict[str, jax.Array]:
        """Named scalars for ``boostax.metrics``."""
        return {
            "spike_value": self.value,
            "spike_limit": self.limit,
            "spike_reason": self.reason,
            "spikes_clipped": self.clipped,
            "spikes": self.spikes,
            "spikes_in_a_row": self.spikes_in_a_row,
        }


class SpikeRule:
    """How a limit is made of accepted values; the base of a rule of your own.

    Values are f32 vectors: of one number, or with ``by_leaf`` of the norms of all leaves.

    Attributes:
      by_leaf: it limits the norm of each leaf, not one number.
      clips: it was made to clip, and is refused with ``action="skip"``.
    """

    by_leaf: ClassVar[bool] = False
    clips: ClassVar[bool] = False

    def init(self, window: int, params: PyTree) -> PyTree:
        """What is kept at first, of the last ``window`` values."""
        raise NotImplementedError

    def limit(self, own: PyTree, values: jax.Array) -> jax.Array:
        """The limit of these values, from what is kept of those before; ``inf`` lets all pass."""
        raise NotImplementedError

    def record(self, own: PyTree, values: jax.Array) -> PyTree:
        """What is kept with accepted (or clipped) values besides."""
        raise NotImplementedError


class Ring(NamedTuple):
    """The last accepted values.

    Attributes:
      values: f32 ``[window]``, zero where there is none yet.
      accepted: i32, how many since the start.
    """

    values: jax.Array
    accepted: jax.Array


@dataclasses.dataclass(frozen=True)
class _OfRing(SpikeRule):
    """Limits from a ring that is half full, as ``centre + k * max(spread, floor * |centre|)``."""

    k: float = 6.0
    floor: float = 0.01

    def __post_init__(self) -> None:
        who = type(self).__name__
        checks.number(who, "k", self.k, "greater than 0", lambda x: x > 0, "6 is the default.")
        hint = "0.01 lets values pass that are k percent above the others."
        checks.number(who, "floor", self.floor, "not negative", lambda x: x >= 0, hint)

    def init(self, window: int, params: PyTree) -> Ring:
        """See ``SpikeRule``."""
        del params
        return Ring(jnp.zeros(window, jnp.float32), jnp.zeros((), jnp.int32))

    def limit(self, own: Ring, values: jax.Array) -> jax.Array:
        """See ``SpikeRule``."""
        del values
        window = own.values.shape[0]
        known = jnp.arange(window) < own.accepted
        centre, spread = self.measure(own.values, known)
        limit = centre + self.k * jnp.maximum(spread, self.floor * jnp.abs(centre))
        return jnp.where(own.accepted >= max(window // 2, 2), limit, jnp.inf)

    def record(self, own: Ring, values: jax.Array) -> Ring:
        """See ``SpikeRule``."""
        place = jnp.arange(own.values.shape[0]) == own.accepted % own.values.shape[0]
        return Ring(jnp.where(place, values, own.values), _one_more(own))

    def measure(self, values: jax.Array, known: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Centre and spread of the values that are known, at least two."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class MedianLimit(_OfRing):
    r"""``"median"``: robust; half of the window may be spikes without moving the limit much.

    .. math:: l = m + k \max(1.4826\,\text{median}_i|v_i - m|,\ \text{floor}\,|m|), \qquad
              m = \text{median}_i v_i

    over the last ``window`` accepted values; no limit before half a window of them.

    Attributes:
      k: how many standard deviations above the median, for a normal distribution.
      floor: the least spread, as a share of the median.
    """

    def measure(self, values: jax.Array, known: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See ``_OfRing``."""
        centre = _median(values, known)
        return centre, _NORMAL * _median(jnp.abs(values - centre), known)


@dataclasses.dataclass(frozen=True)
class SigmaLimit(_OfRing):
    r"""``"sigma"``: the skip step of OLMo-core, Levanter and MaxText.

    .. math:: l = \mu + k \max(\sigma,\ \text{floor}\,|\mu|)

    with mean and (uncorrected) standard deviation of the last ``window`` accepted values; no limit
    before half a window of them. There refused values are recorded as well.

    Attributes:
      k: how many standard deviations above the mean.
      floor: the least deviation, as a share of the mean.
    """

    def measure(self, values: jax.Array, known: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See ``_OfRing``."""
        count = jnp.maximum(jnp.sum(known), 1)
        centre = jnp.sum(jnp.where(known, values, 0)) / count
        variance = jnp.sum(jnp.where(known, jnp.square(values - centre), 0)) / count
        return centre, jnp.sqrt(variance)


class Moments(NamedTuple):
    """Running mean and variance of accepted values, f32 ``[1]``, and how many these are, i32."""

    mean: jax.Array
    variance: jax.Array
    accepted: jax.Array


@dataclasses.dataclass(frozen=True)
class ZClip(SpikeRule):
    r"""``"zclip"``: norms above ``z`` standard deviations are clipped, the harder the further.

    .. math::
      l = \mu + \frac{z^2}{(v - \mu) / \sigma}\,\sigma \text{ if } v > \mu + z \sigma
      \text{ else } \mu + z \sigma, \qquad
      \mu' = \alpha \mu + (1 - \alpha) v, \quad
      \sigma'^2 = \alpha \sigma^2 + (1 - \alpha) (v - \mu')^2

    of the clipped :math:`v`. The first ``warmup`` values have no limit; :math:`\mu` and
    :math:`\sigma` begin as theirs. Its authors also clip to 1: put ``optax.clip_by_global_norm``
    inside.

    Attributes:
      z: standard deviations that are usual.
      decay: :math:`\alpha`.
      warmup: values before the first limit.
    """

    clips: ClassVar[bool] = True
    z: float = 2.5
    decay: float = 0.97
    warmup: int = 25

    def __post_init__(self) -> None:
        checks.number("ZClip", "z", self.z, "greater than 0", lambda x: x > 0, "2.5 is usual.")
        _fraction("ZClip", "decay", self.decay, "0.97 is usual.")
        checks.positive_int("ZClip", "warmup", self.warmup, "It counts values; 25 is usual.")

    def init(self, window: int, params: PyTree) -> Moments:
        """See ``SpikeRule``."""
        del window, params
        zeros = [jnp.zeros(1, jnp.float32) for _ in range(2)]
        return Moments(*zeros, accepted=jnp.zeros((), jnp.int32))

    def limit(self, own: Moments, values: jax.Array) -> jax.Array:
        """See ``SpikeRule``."""
        usual, excess = self.z * jnp.sqrt(own.variance), values - own.mean
        above = jnp.minimum(usual, usual * usual / jnp.maximum(excess, _TINY))
        return jnp.where(own.accepted >= self.warmup, own.mean + above, jnp.inf)

    def record(self, own: Moments, values: jax.Array) -> Moments:
        """See ``SpikeRule``."""
        accepted = _one_more(own)
        warm = accepted <= self.warmup
        share = jnp.where(warm, 1.0 / accepted, 1 - self.decay).astype(jnp.float32)
        mean = own.mean + share * (values - own.mean)
        # Welford's of all values so far, then the paper's.
        square = (values - jnp.where(warm, own.mean, mean)) * (values - mean)
        return Moments(mean, own.variance + share * (square - own.variance), accepted)


class LeafNorms(NamedTuple):
    """A tree like the params of running norms, f32 scalars, and of how many steps they are, i32."""

    norms: PyTree
    accepted: jax.Array


@dataclasses.dataclass(frozen=True)
class AdaGC(SpikeRule):
    r"""``"adagc"``: each leaf is clipped to ``factor`` times the running norm of its own.

    .. math::
      l_i = \lambda \gamma_i, \qquad
      \gamma_i' = \beta \gamma_i + (1 - \beta) \min(v_i, l_i)

    In the first ``warmup`` steps the gradient is clipped as a whole to the norm ``max_norm``, and
    :math:`\gamma_i` is the least clipped norm of the leaf so far. A leaf whose norm was zero there
    (behind a layer of zeros, unused) has no limit until it has had a gradient; in the paper it
    would stay zero for good.

    Attributes:
      factor: :math:`\lambda`, at least 1.
      decay: :math:`\beta`.
      warmup: steps of global clipping.
      max_norm: the bound of these.
    """

    by_leaf: ClassVar[bool] = True
    clips: ClassVar[bool] = True
    factor: float = 1.05
    decay: float = 0.98
    warmup: int = 100
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        who = "AdaGC"
        checks.number(who, "factor", self.factor, "at least 1", lambda x: x >= 1, "1.05 is usual.")
        _fraction(who, "decay", self.decay, "0.98 is usual.")
        checks.positive_int(who, "warmup", self.warmup, "It counts steps; 100 is usual.")
        hint = "1.0 is usual."
        checks.number(who, "max_norm", self.max_norm, "greater than 0", lambda x: x > 0, hint)

    def init(self, window: int, params: PyTree) -> LeafNorms:
        """See ``SpikeRule``."""
        del window
        unknown = jax.tree.map(lambda _: jnp.full((), jnp.inf, jnp.float32), params)
        return LeafNorms(unknown, jnp.zeros((), jnp.int32))

    def limit(self, own: LeafNorms, values: jax.Array) -> jax.Array:
        """See ``SpikeRule``."""
        norms, total = _stacked(own.norms), jnp.sqrt(jnp.sum(values * values))
        early = jnp.where(total > self.max_norm, values * (self.max_norm / total), jnp.inf)
        late = jnp.where(norms > 0, self.factor * norms, jnp.inf)
        return jnp.where(own.accepted < self.warmup, early, late)

    def record(self, own: LeafNorms, values: jax.Array) -> LeafNorms:
        """See ``SpikeRule``."""
        norms, warm = _stacked(own.norms), own.accepted < self.warmup
        late = self.decay * norms + (1 - self.decay) * values
        new = jnp.where(warm, jnp.minimum(norms, values), late)
        shape = jax.tree.structure(own.norms)
        return LeafNorms(shape.unflatten(list(new)[: shape.num_leaves]), _one_more(own))


RULES: dict[str, type[SpikeRule]] = {
    "median": MedianLimit,
    "sigma": SigmaLimit,
    "zclip": ZClip,
    "adagc": AdaGC,
}


def skip_spikes(
    inner: optax.GradientTransformation,
    *,
    by: By = "gradient",
    rule: RuleName | SpikeRule = "median",
    action: Action = "skip",
    window: int = 128,
    axis_name: axes.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Run ``inner`` unless the loss or a norm is far above what is usual; or clip the gradient.

    .. math::
      \text{spike} = v > l(\text{accepted values before}), \qquad
      \text{"clip": } g \leftarrow g \min(1,\ l / v)

    A value that is not finite is always refused. A refused step leaves ``inner``, the params and
    the statistics bit for bit as they were; of a clipped step the clipped value is recorded. It
    never gives in: where the usual value itself has moved above the limit, every step is refused,
    and ``spikes_in_a_row`` tells.

    Around a window it judges every micro-step, inside one every window. It stands inside a loss
    scaler, whose scale would else be in the gradients:
    ``dynamic_loss_scale(accumulate(skip_spikes(adamw(1e-3)), 8))``.

    Args:
      inner: the optimizer; it sees f32 (or wider) gradients and params.
      by: the value. ``"gradient"``: the global norm, of replicas the square root of the mean of
        their squared norms. ``"loss"``: the extra argument ``value``, which ``make_train_step``
        passes, as ``apply_gradients(..., value=loss)`` does; or ``loss``, as trainers of others
        name it. ``"update"``: the norm of what would be added to the params, for which ``inner``
        runs before anybody knows whether it may.
      rule: ``"median"``, ``"sigma"``, ``"zclip"``, ``"adagc"``, or one of these with other
        settings: ``MedianLimit``, ``SigmaLimit``, ``ZClip``, ``AdaGC``; or a ``SpikeRule`` of
        yours.
      action: ``"skip"``, or ``"clip"`` for the gradient's norm. ``"zclip"`` and ``"adagc"`` clip.
      window: accepted values in the ring of ``"median"`` and ``"sigma"``, which have no limit
        before half of them.
      axis_name: replica axis (or axes). Gradients must then be *local*: see
        ``boostax.train.local_params``.

    Returns:
      A transformation with a ``SpikesState``. Cost: 4 bytes for each of ``window``, and 29; one
      read of the gradients (none by ``"loss"``); with ``axis_name`` a collective of 4 bytes, by
      leaves of 4 for each; on CPU no temporary beyond those of a bare step. By ``"update"``
      temporary copies of the params and of the inner state instead, as ``check_updates``.

    Raises:
      ValueError, TypeError: an argument out of range, or a rule and an action that do not go
        together; at ``init``, a loss scaler inside with ``by="gradient"``; at trace time, neither
        ``value`` nor ``loss`` with ``by="loss"``, already reduced gradients, an unbound axis, or a
        decision that replicas could take differently.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.precision.skip_spikes(optax.sgd(1.0), window=4)
      >>> w, state = jnp.float32(0.0), tx.init(jnp.float32(0.0))
      >>> for g in (1.0, 1.0, 100.0, jnp.nan, 1.0):
      ...   w, state = boostax.apply_gradients(tx, jnp.float32(g), state, w)
      >>> float(w), int(boostax.metrics(state)["spikes"])
      (-3.0, 2)

    References:
      ZClip, https://arxiv.org/abs/2504.02507, 2025; AdaGC, https://arxiv.org/abs/2502.11034, 2025;
      the skip step of https://github.com/allenai/OLMo-core.
    """
    tx = checks.transformation(_WHO, "inner", inner)
    hint = "'gradient' needs nothing from the caller."
    checks.choice(_WHO, "by", by, ("loss", "gradient", "update"), hint)
    checks.choice(_WHO, "action", action, ("skip", "clip"), "'clip' is for the gradient's norm.")
    if not isinstance(rule, SpikeRule):
        hint = "MedianLimit(k=8.0) and the like are rules with other settings."
        rule = RULES[checks.choice(_WHO, "rule", rule, tuple(RULES), hint)]()
    if rule.clips and action == "skip":
        hint = "It is over its limit in ordinary steps too."
        raise ValueError(checks.message(_WHO, "action", f"'clip' with {rule}", action, hint))
    if action == "clip" and by != "gradient":
        hint = "A loss or an update is not in proportion to the gradient."
        raise ValueError(checks.message(_WHO, "by", "'gradient' with action='clip'", by, hint))
    if rule.by_leaf and by != "gradient":
        hint = "Only gradients have leaves to look at."
        raise ValueError(checks.message(_WHO, "by", f"'gradient' with {rule}", by, hint))
    window = checks.positive_int(_WHO, "window", window, "It counts values; 128 is the default.")
    checks.require(_WHO, "window", window, "at least 2", window >= 2, "One value has no spread.")
    names = axes.canonical(_WHO, axis_name)

    def init_fn(params: PyTree) -> SpikesState:
        inner_state = init_inner(tx, params)
        if by == "gradient" and trees.find(inner_state, _scales):
            raise ValueError(
                f"{_WHO}: inner must be without a loss scaler with by='gradient', got one, whose "
                "scale is still in the gradients. Put it around: "
                "dynamic_loss_scale(skip_spikes(...))."
            )
        floats = [jnp.zeros((), jnp.float32) for _ in range(2)]
        counters = [jnp.zeros((), jnp.int32) for _ in range(4)]
        return SpikesState(
            rule.init(window, params),
            *floats,
            reason=counters[0],
            ran=jnp.asarray(False),
            clipped=counters[1],
            spikes=counters[2],
            spikes_in_a_row=counters[3],
            inner_state=inner_state,
        )

    @describe(_WHO, "check", names, inner={"inner_state": tx})
    def step_fn(
        grads: Pending, state: SpikesState, params: PyTree, *, apply: bool, **extra: Any
    ) -> Stepped:
        trees.require_gradients(grads.raw, _WHO)
        axes.require_local(grads.raw, names, _WHO)
        ready: Any = None

        def taken(factors: jax.Array | None = None) -> Stepped:
            """``inner`` on the gradients, each leaf times its factor, or all times the one."""
            given, more = grads, extra
            if factors is not None and not rule.by_leaf:
                given = grads.times(factors[0])
            elif factors is not None:
                given = Pending(_scaled(grads, factors))
                if "grad" in extra:
                    more = extra | {"grad": _scaled(grads._replace(raw=extra["grad"]), factors)}
            return run(tx, given, state.inner_state, params, apply=apply, extra=more)

        if by == "update":
            value, new = taken()
            ready = value, trees.cast_like(new, state.inner_state)
            values = _norms(_moved(value, params) if apply else value, names, each=False)
        elif by == "gradient":
            values = _norms(grads.value(), names, each=rule.by_leaf)
        else:
            values = axes.mean(_loss(extra), names)[None]
        # What differentiates a run takes limits as given: those of no spread have no derivative.
        limits = jax.lax.stop_gradient(rule.limit(state.own, values))
        limits = jnp.broadcast_to(limits, values.shape)
        finite, over = jnp.isfinite(values).all(), values > limits
        factors = jnp.where(over, limits, 1.0) / jnp.where(over, values, 1.0)
        ok = finite if action == "clip" else finite & ~over.any()

        def work() -> Stepped:
            return ready if by == "update" else taken(factors if action == "clip" else None)

        # Of an update nothing is left to send in the branch.
        within = None if by == "update" else names
        held = params, state.inner_state
        value, inner_state = run_or_hold(ok, work, *held, apply=apply, who=_WHO, names=within)
        return value, decided(state, values, limits, ok, inner_state)

    def decided(
        state: SpikesState, values: jax.Array, limits: jax.Array, ok: jax.Array, inner_state: Any
    ) -> SpikesState:
        """The state after a call: the counters, and the statistics if it was accepted."""
        # An update that a gate inside held back is none.
        counts = ok & passed(inner_state) if by == "update" else ok
        recorded = rule.record(state.own, jnp.minimum(values, limits))
        trees.require_shapes(_WHO, "own", state.own, recorded, "Return it as it was given.")
        own = jax.tree.map(lambda new, old: jnp.where(counts, new, old), recorded, state.own)
        worst = jnp.argmax(values / jnp.maximum(limits, _TINY))
        over = (values > limits).any()
        refused = jnp.where(jnp.isfinite(values).all(), _OVER, _NOT_FINITE)
        return SpikesState(
            trees.cast_like(own, state.own),
            value=values[worst],
            limit=limits[worst],
            reason=jnp.where(ok, jnp.where(over, _CLIPPED, _TAKEN), refused).astype(jnp.int32),
            ran=ok,
            clipped=counted(state.clipped, ok & over),
            spikes=counted(state.spikes, ~ok),
            spikes_in_a_row=jnp.where(ok, 0, counted(state.spikes_in_a_row, ~ok)),
            inner_state=inner_state,
        )

    return gated(init_fn, step_fn, flush_of(tx, "ran"))


def _norms(tree: PyTree, names: tuple[str, ...], *, each: bool) -> jax.Array:
    """f32 ``[1]``, the root of the replicas' mean squared norm; or that of each leaf ``[leaves]``.

    A vector for each leaf that is zero but for its place, so that one collective sends all.
    """
    squares = [jnp.sum((g * g.conj()).real).astype(jnp.float32) for g in jax.tree.leaves(tree)]
    places = jnp.arange(len(squares) if each and squares else 1)
    parts = [jnp.where(places == (i if each else 0), x, 0) for i, x in enumerate(squares)]
    total = axes.sum_over_shards(parts or [jnp.zeros(1)], names, jnp.float32)
    square = total / (axes.size(names) if names else 1)
    # The root has no derivative at zero.
    return jnp.where(square == 0, 0.0, jnp.sqrt(jnp.where(square == 0, 1.0, square)))


def _moved(new: PyTree, params: PyTree) -> PyTree:
    """What was added to the params, in f32 or wider."""
    return jax.tree.map(jnp.subtract, *map(trees.at_least_float32, (new, params)))


def _scaled(grads: Pending, factors: jax.Array) -> PyTree:
    """The gradients, each leaf times a factor of its own; to be called inside the branch."""
    leaves, treedef = jax.tree.flatten(grads.value())
    pairs = zip(leaves, factors[: len(leaves)], strict=True)
    return treedef.unflatten([g * factor.astype(g.real.dtype) for g, factor in pairs])


def _one_more(own: Ring | Moments | LeafNorms) -> jax.Array:
    return counted(own.accepted, jnp.asarray(True))


def _loss(extra: Mapping[str, Any]) -> jax.Array:
    given = [name for name in ("value", "loss") if extra.get(name) is not None]
    if not given:
        hint = "Call apply_gradients(..., value=loss); loss=loss does as well."
        raise ValueError(checks.message(_WHO, "value", "given with by='loss'", None, hint))
    checks.require_scalar(_WHO, given[0], extra[given[0]])
    return jnp.asarray(extra[given[0]], jnp.float32)


def _scales(node: Any) -> bool:
    return bool(getattr(getattr(type(node), "holds", None), "scale", ""))


def _stacked(norms: PyTree) -> jax.Array:
    """As ``_norms`` gives them: of no leaves one number."""
    return jnp.stack(jax.tree.leaves(norms) or [jnp.zeros(())])


def _median(values: jax.Array, known: jax.Array) -> jax.Array:
    """The median of those that are known."""
    most = jnp.finfo(jnp.float32).max
    ordered, count = jnp.sort(jnp.where(known, values, most)), jnp.maximum(jnp.sum(known), 1)
    return 0.5 * ordered[(count - 1) // 2] + 0.5 * ordered[count // 2]


def _fraction(who: str, argument: str, value: Any, hint: str) -> None:
    checks.number(who, argument, value, "in (0, 1)", lambda x: 0 < x < 1, hint)
