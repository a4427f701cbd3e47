# SPDX-License-Identifier: Apache-2.0
"""Carried leaves: params whose "gradient" is their new value.

A ``custom_vjp`` can return anything as the cotangent of an argument. Flax's fp8 layers return new
amax histories and scales (collection ``_overwrite_with_gradient``), and routers return new biases.
Without ``carry``, an optimizer would treat these values as gradients.

References:
  Micikevicius et al., FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433, 2022.
  Flax, ``flax.linen.fp8_ops`` and ``flax.training.train_state.TrainState``.
"""

from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_map_with_path
from jax.typing import ArrayLike

from boostax._core import axes, bound_axis, checks, gate, norms, protocols, trees
from boostax._core.describe import Holds, Stepped, describe, elsewhere
from boostax._core.gate import Pending
from boostax._core.types import PyTree

Rule = Literal["max", "sum", "last"]
# The rules of carried leaves; a key is a part of a leaf's path, such as ``router/bias``.
Rules = Mapping[str, Rule]
Carried = dict[str, jax.Array]

FLAX: Rules = MappingProxyType({trees.OVERWRITE: "max"})

_WHO = "carry"


class CarryState(NamedTuple):
    """State of ``carry``.

    Attributes:
      open: bool, whether a window is open.
      window: for each rule, a tree like the params: the values of the open window for the leaves
        with this rule, and ``optax.MaskedNode`` for all other leaves.
      inner_state: state of the inner transformation, which has no carried leaves.
    """

    open: jax.Array  # [] bool
    window: dict[Rule, PyTree]  # shapes and dtypes of the carried leaves
    inner_state: optax.OptState
    holds = Holds(params=True)


@bound_axis.gate
def carry(
    inner: optax.GradientTransformation,
    rules: Rules = FLAX,
    *,
    axis_name: axes.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Set carried leaves to their "gradients", and pass all other leaves to ``inner``.

    The cotangent :math:`v` of a carried leaf is the new value of the leaf. The values of the
    micro-steps :math:`i` of a window and of the replicas :math:`r` are combined by the leaf's rule,
    which is the maximum, the sum or the last value:

    .. math:: \max_{i,r} v_{i,r}, \qquad \sum_{i,r} v_{i,r}, \qquad v_{\text{last}}.

    The leaf is set when ``inner`` updates the params. If a gate in ``inner`` skips the step, the
    leaf stays unchanged. A carried leaf is neither scaled, clipped, decayed, averaged nor
    compressed, and has no moments. ``boostax.value_and_grad`` reads from the state which leaves are
    carried, and combines their values over micro-batches by the same rules.

    Put ``carry`` outermost; only ``scheduled_freeze`` may be around ``carry``. Apply the gradients
    with ``boostax.apply_gradients``, which can set params. The pure ``update`` could only add an
    update to a param, and the sum would be rounded.

    Args:
      inner: the optimizer, its gates included.
      rules: a dict from paths to ``"max"``, ``"sum"`` or ``"last"``. The path ``"router/bias"``
        matches every leaf whose path contains these two components in a row. The first matching
        rule applies. The default is ``"max"`` for Flax's fp8 metadata.
      axis_name: replica axis (or axes) over which values are combined; ``"last"`` selects the value
        of the last replica. With ``None``, a train step supplies its axis if ``inner`` has a
        reduction; outside a train step, no axis is used.

    Returns:
      A gate with a ``CarryState``. A value that is not finite is never set. A loss scaler in
      ``inner`` treats such a value as an overflow, and skips the step. Cost: one copy of the
      carried leaves; with ``axis_name``, one collective of a few bytes per carried leaf and call.

    Raises:
      ValueError, TypeError: an argument out of range, or an axis that is not bound; at ``init``, a
        rule that matches no leaf; at trace time, a gate around ``carry`` that multiplies the
        values, or a call of the pure ``update``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.carry(boostax.dynamic_loss_scale(optax.sgd(1.0)), {"amax": "max"})
      >>> params = {"w": jnp.float32(1.0), "amax": jnp.float32(0.5)}
      >>> grads = {"w": jnp.float32(65536.0), "amax": jnp.float32(9.886)}
      >>> params, state = boostax.apply_gradients(tx, grads, tx.init(params), params)
      >>> float(params["w"]), round(float(params["amax"]), 3)
      (0.0, 9.886)
    """
    tx = checks.transformation(_WHO, "inner", inner)
    names = axes.canonical(_WHO, axis_name)
    hint = "Write rules={'router/bias': 'last'}, for example."
    by_words: dict[str, Rule] = dict(rules) if isinstance(cast(object, rules), Mapping) else {}
    is_valid = bool(by_words) and all(words.strip("/") for words in by_words)
    checks.require_type(is_valid, _WHO, "rules", rules, "a mapping from paths to rules", hint)
    for rule in by_words.values():
        checks.choice(_WHO, "rules", rule, Rule, hint)
    part = _Carry(tx, {words.strip("/"): rule for words, rule in by_words.items()}, names)
    described = describe(_WHO, "carry", names, inner={"inner_state": tx})
    return gate.gated(part.init, described(part.step), part.flush)


class _Carry(NamedTuple):
    """The arguments of ``carry``, checked."""

    tx: optax.GradientTransformationExtraArgs
    rules: Rules
    names: tuple[str, ...]

    def init(self, params: PyTree) -> CarryState:
        """Return the first state, without an open window."""
        unused = [words for words in self.rules if not resolve({words: "last"}, params)]
        # ``scheduled_freeze`` masks some of the params in calls of ``init``, so a rule may match no
        # param.
        is_valid = not unused or any(map(trees.is_masked, trees.nodes(params)))
        hint = "Pass parts of a path, such as 'router/bias'. The default rules are for Flax's fp8."
        checks.require(is_valid, _WHO, "rules", got=unused, allowed="paths of params", hint=hint)
        rules = resolve(self.rules, params)
        zeros = jax.tree.map(jnp.zeros_like, params)
        window: dict[Rule, PyTree] = {}
        for rule in sorted(set(self.rules.values())):
            window[rule] = without(zeros, [x for x in trees.names(params) if rules.get(x) != rule])
        inner_state = gate.init_inner(self.tx, without(params, rules))
        return CarryState(jnp.asarray(False), window, inner_state)

    def step(
        self, grads: Pending, state: CarryState, params: PyTree, *, apply: bool, **extra: PyTree
    ) -> Stepped:
        """Run the inner step on the leaves that are not carried, then set the carried leaves."""
        hint = "Write carry(dynamic_loss_scale(...)), and call boostax.apply_gradients."
        allowed = "set by boostax.apply_gradients with carry outermost"
        got = "a wrapper that multiplies gradients or adds updates"
        checks.require(apply and not grads.factors, _WHO, "carried leaves", got, allowed, hint)
        rules = resolve(self.rules, params)
        new = values(grads.raw, rules)
        new = _over_replicas(rules, new, self.names) if self.names else new
        old_inner = state.inner_state
        # The caller may have replaced the inner state by a state without an open window.
        was_open = state.open & gate.held_open(old_inner)
        pending = Pending(without(grads.raw, rules))
        # ``last_finite`` is a field of the state of ``optax.apply_if_finite``.
        checks_finite = any(hasattr(x, "last_finite") for x in trees.state_nodes(old_inner))
        if checks_finite or trees.telling(old_inner, protocols.Scaler):
            # fp8 clips overflows, so the gradients may be finite when a carried value is not.
            is_below = norms.all_true([(x < jnp.inf).all() for x in new.values()])
            pending = pending.times(jnp.where(is_below, 1.0, jnp.nan).astype(jnp.float32))
        extra = elsewhere(extra, lambda trial: trees.unmasked(trial, params))
        if "grad" in extra:
            extra["grad"] = without(extra["grad"], rules)
        others = without(params, rules)
        combined: Carried = {}
        for name, old in [x for tree in state.window.values() for x in trees.named(tree)]:
            x = new[name].astype(old.dtype)
            combined[name] = jnp.where(was_open, combine(rules[name], old, x), x)
        trained, inner = gate.call(self.tx, pending, old_inner, others, apply=True, extra=extra)
        is_finite = norms.all_true([jnp.isfinite(x).all() for x in new.values()])
        is_used = gate.outermost_passed(inner) & is_finite
        window: dict[Rule, PyTree] = {}
        for rule, tree in state.window.items():
            window[rule] = _map(lambda name, old: jnp.where(is_used, combined[name], old), tree)
        state = CarryState(was_open | is_used, window, inner)
        return _closed(trained, params, state, gate.passed(inner) & state.open)

    def flush(self, state: CarryState, params: PyTree, **extra: PyTree) -> Stepped:
        """Close the open windows inside ``inner``, and set the carried leaves."""
        others = without(params, resolve(self.rules, params))
        trained, inner = gate.flush_inner(self.tx, state.inner_state, others, extra)
        state = state._replace(inner_state=inner)
        return _closed(trained, params, state, state.open & gate.passed(inner))


def declared(opt_state: PyTree, params: PyTree, who: str) -> Rules:
    """Return the rules of the ``CarryState`` in a state, with the complete paths as the keys.

    Raises:
      ValueError: the optimizer would treat leaves of Flax's collection as gradients.
    """
    states = trees.find(opt_state, CarryState)
    windows = [window for state in states for window in state.window.items()]
    rules: Rules = {name: rule for rule, tree in windows for name in trees.names(tree)}
    missing = resolve(FLAX, params).keys() - resolve(rules, params).keys()
    got = f"a state that treats the new values {sorted(missing)} as gradients"
    allowed, hint = "a state of boostax.carry", "Wrap the optimizer: tx = boostax.carry(tx)."
    checks.require(not missing, who, "opt_state", got=got, allowed=allowed, hint=hint)
    return rules


def resolve(rules: Rules, tree: PyTree) -> dict[str, Rule]:
    """Return the rule of each carried leaf."""
    # The first matching rule applies. The rules are read in reverse order, so that an earlier rule
    # overwrites a later rule.
    names = trees.names(tree) if rules else []
    last_first = reversed([*rules.items()])
    return {x: rule for words, rule in last_first for x in names if f"/{words}/" in f"/{x}/"}


def without(tree: PyTree, names: Container[str]) -> PyTree:
    """Return a tree with ``optax.MaskedNode`` for carried leaves."""
    return _map(lambda name, x: optax.MaskedNode() if name in names else x, tree)


def values(tree: PyTree, names: Container[str]) -> Carried:
    """Return the leaves of ``tree`` that ``carry`` overwrites."""
    return {name: x for name, x in trees.named(tree) if name in names}


def restored(tree: PyTree, carried: Carried) -> PyTree:
    """Insert the carried leaves into a tree that ``without`` returned."""
    return _map(lambda name, x: carried.get(name, x), tree, is_leaf=trees.is_masked)


def combine(rule: Rule, old: jax.Array, new: jax.Array) -> jax.Array:
    """Combine the values of an earlier and a later micro-batch by a rule."""
    return jnp.maximum(old, new) if rule == "max" else old + new if rule == "sum" else new


def nothing(rule: Rule, like: jax.Array) -> jax.Array:
    """Return the neutral element of ``combine`` with this rule."""
    return jnp.full_like(like, -jnp.inf if rule == "max" else 0)


def unless_empty(grads: PyTree, params: PyTree, rules: Rules, weight: ArrayLike) -> Carried:
    """Return the new values, or neutral values for a batch of zero weight, whose loss is 0/0."""
    by_name = resolve(rules, grads)
    new = values(grads, by_name)
    empty = {name: nothing(by_name[name], x) for name, x in new.items()}
    empty |= {name: x for name, x in values(params, by_name).items() if by_name[name] == "last"}
    return {name: jnp.where(jnp.asarray(weight) > 0, x, empty[name]) for name, x in new.items()}


def _over_replicas(rules: Rules, new: Carried, names: tuple[str, ...]) -> Carried:
    """Combine the replicas' values by the rules of the leaves."""
    axes.require_bound(names, _WHO)
    combined: Carried = {}
    for name, x in new.items():
        if rules[name] == "max":
            # On XLA:CPU, an all-reduce by the maximum ignores NaN, so infinity replaces NaN.
            combined[name] = axes.largest(jnp.where(jnp.isnan(x), jnp.inf, x), names)
            continue
        if rules[name] == "last":
            x = jnp.where(axes.index(names) == axes.size(names) - 1, x, 0)
        combined[name] = jax.lax.psum(axes.to_varying(x, names), names)
    return combined


def _closed(trained: PyTree, params: PyTree, state: CarryState, is_applied: jax.Array) -> Stepped:
    """Set the carried leaves if ``is_applied``; keep the window open if an inner window is open."""
    new = {name: x for tree in state.window.values() for name, x in trees.named(tree)}
    old = values(params, new)
    chosen = {name: jnp.where(is_applied, x, old[name]) for name, x in new.items()}
    # Per-replica params have a varying type.
    params = restored(trained, axes.unify(chosen, old))
    return params, state._replace(open=state.open & gate.held_open(state.inner_state))


def _map(fn: Callable[..., PyTree], tree: PyTree, is_leaf: Callable | None = None) -> PyTree:
    return tree_map_with_path(lambda path, x: fn(trees.path_name(path), x), tree, is_leaf=is_leaf)
