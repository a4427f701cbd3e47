# SPDX-License-Identifier: Apache-2.0
"""Carried leaves: params whose "gradient" is their new value.

A ``custom_vjp`` can return anything as the cotangent of an argument. Flax's fp8 layers return new
amax histories and scales (collection ``_overwrite_with_gradient``), and routers return new biases.
An optimizer would treat these values as gradients.

References:
  Micikevicius et al., FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433, 2022.
  Flax, ``flax.linen.fp8_ops`` and ``flax.training.train_state.TrainState``.
"""

from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, bound_axis, checks, gate, protocols, trees
from boostax._core.describe import Holds, describe, elsewhere
from boostax._core.types import PyTree

Rule = Literal["max", "sum", "last"]
# The rule of each carried leaf, by components of its path.
Rules = Mapping[str, Rule]
Carried = dict[str, jax.Array]

FLAX: Rules = MappingProxyType({trees.OVERWRITE: "max"})

_WHO = "carry"


class CarryState(NamedTuple):
    """State of ``carry``.

    Attributes:
      open: bool, whether a window is open.
      window: for each rule, a tree like the params with the values of the open window, and
        ``optax.MaskedNode`` for leaves without this rule.
      inner_state: state of the inner transformation, which has no carried leaves.
    """

    open: jax.Array
    window: dict[Rule, PyTree]
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

    A carried leaf's cotangent :math:`v` is its new value. The values of the micro-steps :math:`i`
    of a window and of the replicas :math:`r` are combined by the leaf's rule,

    .. math:: \max_{i,r} v_{i,r}, \qquad \sum_{i,r} v_{i,r}, \qquad v_{\text{last}},

    and the leaf is set when ``inner`` updates the params. If a gate in ``inner`` skips the step,
    the leaf stays unchanged. A carried leaf is neither scaled, clipped, decayed, averaged nor
    compressed, and has no moments. ``boostax.value_and_grad`` reads from the state which leaves are
    carried, and combines micro-batches by the same rules.

    Put ``carry`` outermost; only ``scheduled_freeze`` may be around it. It needs
    ``boostax.apply_gradients``, which can set params; the sum of a param and an update would be
    rounded.

    Args:
      inner: the optimizer, its gates included.
      rules: ``"max"``, ``"sum"`` or ``"last"`` by path. ``"router/bias"`` sets the rule of every
        leaf whose path contains these components in a row. The first matching rule applies. The
        default is ``"max"`` for Flax's fp8 metadata.
      axis_name: replica axis (or axes) over which values are combined; ``"last"`` takes the value
        of the last replica. With ``None``, a train step supplies its own axis if a part inside
        reduces; elsewhere there is no axis.

    Returns:
      A gate with a ``CarryState``. A value that is not finite is never set, and counts as an
      overflow for a loss scaler in ``inner``, which skips the step. Cost: one copy of the carried
      leaves; one collective of a few bytes per carried leaf and call with ``axis_name``.

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
    how = _Carry(tx, _checked(rules), names)
    described = describe(_WHO, "carry", names, inner={"inner_state": tx})
    return gate.gated(how.init, described(how.step), how.flush)


class _Carry(NamedTuple):
    """The arguments of ``carry``, checked."""

    tx: optax.GradientTransformationExtraArgs
    rules: Rules
    names: tuple[str, ...]

    def init(self, params: PyTree) -> CarryState:
        """Return the first state, without an open window."""
        found, every = resolve(self.rules, params), trees.names(params)
        idle = [words for words in self.rules if not resolve({words: "last"}, params)]
        # scheduled_freeze calls init with only some of the params; the others are masked.
        fits = not idle or any(map(trees.is_masked, trees.nodes(params)))
        hint = "Give words of a path, such as 'router/bias'; flax.linen's fp8 is the default."
        checks.require(fits, _WHO, "rules", got=idle, allowed="paths of params", hint=hint)
        zeros = jax.tree.map(jnp.zeros_like, params)
        windows: dict[Rule, PyTree] = {}
        for rule in sorted(set(self.rules.values())):
            windows[rule] = without(zeros, [name for name in every if found.get(name) != rule])
        inner_state = gate.init_inner(self.tx, without(params, found))
        return CarryState(jnp.asarray(False), windows, inner_state)

    def step(
        self, grads: gate.Pending, state: CarryState, params: PyTree, *, apply: bool, **extra: Any
    ) -> tuple[PyTree, CarryState]:
        """Run the inner step on the leaves that are not carried, then set the carried leaves."""
        hint = "Write carry(dynamic_loss_scale(...)), and boostax.apply_gradients for tx.update."
        allowed = "set by boostax.apply_gradients with carry outermost"
        got = "a wrapper that multiplies gradients or adds updates"
        is_valid = apply and not grads.factors
        checks.require(is_valid, _WHO, "carried leaves", got=got, allowed=allowed, hint=hint)
        found = resolve(self.rules, params)
        new = values(grads.raw, found)
        if self.names:
            axes.require_bound(self.names, _WHO)
            new = {name: _over_replicas(found[name], x, self.names) for name, x in new.items()}
        # The caller may have replaced the inner state by one without an open window.
        opened = state.open & gate.held_open(state.inner_state)
        fits = lambda test: jnp.stack([test(x).all() for x in new.values()] or [True]).all()  # noqa: E731
        pending = gate.Pending(without(grads.raw, found))
        inside = state.inner_state
        # ``last_finite`` is a field of Optax's ``apply_if_finite``.
        checks_finite = trees.find(inside, lambda x: hasattr(x, "last_finite"))
        if checks_finite or trees.telling(inside, protocols.Scaler):
            # fp8 clips overflows, so the gradients may be finite when a carried value is not.
            below = fits(lambda x: x < jnp.inf)
            pending = pending.times(jnp.where(below, 1.0, jnp.nan).astype(jnp.float32))
        extra = elsewhere(extra, lambda trial: trees.unmasked(trial, params))
        if "grad" in extra:
            extra["grad"] = without(extra["grad"], found)
        others = without(params, found)

        def merged(name: str, old: jax.Array) -> jax.Array:
            x = new[name].astype(old.dtype)
            return jnp.where(opened, combine(found[name], old, x), x)

        both = {name: merged(name, x) for name, x in _named(state.window).items()}
        trained, inner = gate.run(self.tx, pending, inside, others, apply=True, extra=extra)
        took = gate.outermost_passed(inner) & fits(jnp.isfinite)
        kept = lambda name, old: jnp.where(took, both[name], old)  # noqa: E731
        window: dict[Rule, PyTree] = {rule: _map(kept, x) for rule, x in state.window.items()}
        have = opened | took
        params = _settled(trained, params, window, gate.passed(inner) & have)
        return params, CarryState(have & gate.held_open(inner), window, inner)

    def flush(self, state: CarryState, params: PyTree, **extra: Any) -> tuple[PyTree, CarryState]:
        """Close the open windows inside, and set their carried leaves."""
        others = without(params, resolve(self.rules, params))
        trained, inner_state = gate.flush_inner(self.tx, state.inner_state, others, extra)
        params = _settled(trained, params, state.window, state.open & gate.passed(inner_state))
        still = state.open & gate.held_open(inner_state)
        return params, state._replace(open=still, inner_state=inner_state)


def require_outside(inner_state: PyTree, who: str) -> None:
    """Refuse ``carry`` inside a transformation that sums gradients."""
    inside = trees.find(inner_state, lambda node: isinstance(node, CarryState))
    allowed, hint = "without carry, which must be outermost", f"Write boostax.carry({who}(...))."
    got = "a wrapper that sums new values"
    checks.require(not inside, who, "inner", got=got, allowed=allowed, hint=hint)


def declared(opt_state: PyTree, params: PyTree, who: str) -> Rules:
    """Return the rules of the ``CarryState`` in a state, keyed by whole paths.

    Raises:
      ValueError: the optimizer would treat leaves of Flax's collection as gradients.
    """
    found = trees.find(opt_state, lambda node: isinstance(node, CarryState))
    windows = [window for state in found for window in state.window.items()]
    rules: Rules = {name: rule for rule, tree in windows for name in trees.names(tree)}
    missing = resolve(FLAX, params).keys() - resolve(rules, params).keys()
    got = f"one that takes the new values {sorted(missing)} for gradients"
    allowed, hint = "one of boostax.carry", "Wrap the optimizer: tx = boostax.carry(tx)."
    checks.require(not missing, who, "opt_state", got=got, allowed=allowed, hint=hint)
    return rules


def resolve(rules: Rules, tree: PyTree) -> dict[str, Rule]:
    """Return the rule of each carried leaf."""
    if not rules:
        return {}
    # The first matching rule applies, so the rules are written in reverse order.
    names, last_first = trees.names(tree), reversed([*rules.items()])
    return {x: rule for words, rule in last_first for x in names if f"/{words}/" in f"/{x}/"}


def without(tree: PyTree, found: Container[str]) -> PyTree:
    """Return a tree with ``optax.MaskedNode`` for carried leaves."""
    return _map(lambda name, x: optax.MaskedNode() if name in found else x, tree)


def values(tree: PyTree, found: Mapping[str, Any]) -> Carried:
    """Return the leaves of ``tree`` that ``carry`` overwrites."""
    return {name: x for name, x in trees.named(tree) if name in found}


def put(tree: PyTree, carried: Carried) -> PyTree:
    """Return a tree from ``without`` with the carried leaves put back."""
    masked = trees.is_masked
    return _map(lambda name, x: carried.get(name, x) if masked(x) else x, tree, is_leaf=masked)


def combine(rule: Rule, old: jax.Array, new: jax.Array) -> jax.Array:
    """Combine the values of two micro-batches, the later one second."""
    return jnp.maximum(old, new) if rule == "max" else old + new if rule == "sum" else new


def nothing(rule: Rule, like: jax.Array) -> jax.Array:
    """Return the neutral element of ``combine``."""
    return jnp.full_like(like, -jnp.inf if rule == "max" else 0)


def unless_empty(grads: PyTree, params: PyTree, rules: Rules, weight: Any) -> Carried:
    """Return the new values, or neutral values for a batch of zero weight, whose loss is 0/0."""
    found = resolve(rules, grads)
    new = values(grads, found)
    none = {name: nothing(found[name], x) for name, x in new.items()}
    none |= {name: x for name, x in values(params, found).items() if found[name] == "last"}
    return {name: jnp.where(jnp.asarray(weight) > 0, x, none[name]) for name, x in new.items()}


def _over_replicas(rule: Rule, x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    if rule == "max":
        # The maximum of XLA:CPU's all-reduce loses a NaN.
        return axes.largest(jnp.where(jnp.isnan(x), jnp.inf, x), names)
    if rule == "last":
        x = jnp.where(axes.index(names) == axes.size(names) - 1, x, 0)
    return jax.lax.psum(axes.to_varying(x, names), names)


def _named(window: dict[Rule, PyTree]) -> Carried:
    """Return the values of a window by path."""
    return {name: x for tree in window.values() for name, x in trees.named(tree)}


def _settled(trained: PyTree, params: PyTree, window: PyTree, done: jax.Array) -> PyTree:
    """Return the ``trained`` params with the carried values of a closed window."""
    new = _named(window)
    old = values(params, new)
    chosen = {name: jnp.where(done, x, old[name]) for name, x in new.items()}
    # Per-replica params have a varying type.
    return put(trained, axes.unify(chosen, old))


def _map(fn: Callable[[str, Any], Any], tree: PyTree, is_leaf: Any = None) -> PyTree:
    named = lambda path, x: fn(trees.path_name(path), x)  # noqa: E731
    return jax.tree_util.tree_map_with_path(named, tree, is_leaf=is_leaf)


def _checked(rules: Any) -> Rules:
    hint, allowed = "Try {'router/bias': 'last'}.", "a mapping of paths to rules"
    given: dict[str, Rule] = dict(rules) if isinstance(rules, Mapping) else {}
    fits = bool(given) and all(words.strip("/") for words in given)
    checks.require_type(fits, _WHO, "rules", got=rules, allowed=allowed, hint=hint)
    for rule in given.values():
        checks.choice(_WHO, "rules", rule, Rule, hint)
    return {words.strip("/"): rule for words, rule in given.items()}
