# SPDX-License-Identifier: Apache-2.0
"""The gate: the one place where "run the inner transformation, or hold everything" is compiled.

What the compilers for CPU, TPU and GPU make of it gives it its form (``docs/compilers.md``):

* With ``where``, both the old and the new value of every moment must be kept until the select, so
  XLA cannot reuse the buffer. A branch around the update *and* its application lets XLA write
  donated buffers in place.
* With ``lax.cond``, XLA:CPU copies pass-through operands unless the working branch is the True one
  (https://github.com/jax-ml/jax/issues/39449), XLA:GPU unless it is the False one. ``lax.switch``
  on an int32 keeps the branch order, and no compiler copies.
* A pure ``update`` has to hand out updates, so it needs one buffer of the size of the params.

The ``update`` of a gated transformation is therefore an object, which has a ``step`` that can also
apply the result. Nested ones pass the wish to apply down, so that only the innermost branch
touches the params; and they pass gradients down raw, with the factors still to be multiplied in
(``Pending``), because whatever is computed from a gradient before a branch is written to memory.

What a gate says of its last call, by its state's methods and fields:

============ ===================================================================================
``passed()`` whether the call ran what is inside (of a window: whether it closed and ran)
``taken()``  whether the gradient was used: run on, or added to a window; ``False``: skipped
``held()``   whether a window is open, so that gradients wait in it
``ran``      the field of ``GateState`` behind ``passed()`` and ``taken()``
============ ===================================================================================
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

from boostax._core import axes, checks, trees
from boostax._core.describe import Stepped, describe
from boostax._core.placement import settled

PyTree = Any


class Pending(NamedTuple):
    """Gradients as they came, and the f32 scalars by which they are still to be multiplied.

    Pending is that product. It is taken inside the branch, where the gradients are used: what is
    computed from them before a branch is written to memory. One meets it in a rule for
    ``boostax.gate``, where ``value()`` are the gradients as the optimizer sees them.

    Attributes:
      raw: gradients, in the dtypes in which they came.
      factors: f32 scalars, such as the reciprocal of a loss scale.
    """

    raw: PyTree
    factors: tuple[jax.Array, ...] = ()

    def times(self, *factors: jax.Array) -> "Pending":
        """The same with more factors to come."""
        return Pending(self.raw, self.factors + factors)

    def value(self) -> PyTree:
        """The product, in f32 or wider.

        Factors, not divisors: XLA:CPU does not duplicate a division into the several fusions that
        read the result, and writes a copy of all gradients instead.
        """

        def product(g: jax.Array) -> jax.Array:
            for factor in self.factors:
                g = g * trees.as_dtype(factor, jnp.finfo(g.dtype).dtype)
            return g

        return jax.tree.map(product, trees.at_least_float32(self.raw))


class Step(Protocol):
    """Like ``update``; with ``apply=True`` the first result is the new params, not the updates."""

    def __call__(
        self, grads: Pending, state: Any, params: PyTree, *, apply: bool, **extra: Any
    ) -> Stepped: ...


class Flush(Protocol):
    """Close what is held open, without a new gradient; returns the new params and state."""

    def __call__(self, state: Any, params: PyTree, **extra: Any) -> Stepped: ...


@dataclasses.dataclass(frozen=True, eq=False)
class GatedUpdate:
    """The pure ``update`` of a gate, with the ``step`` and ``flush`` of the same gate.

    To Optax an ordinary function. Whoever rebuilds the pair of ``init`` and ``update`` (``copy``,
    ``jax.tree.map``, Equinox, Keras) keeps the gate with it. Whoever puts another function in its
    place (``optax.chain``, ``optax.masked``, ...) has the pure ``update`` alone. A function wrapped
    with ``functools.wraps`` or ``jax.jit`` copies the attributes but is not a ``GatedUpdate``, so
    it also loses the gate.

    Attributes:
      step: see ``Step``.
      flush: see ``Flush``.
    """

    step: Step
    flush: Flush

    @property
    def description(self) -> Any:
        """What the gate says of itself."""
        return getattr(self.step, "description", None)

    def __call__(
        self, updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> Stepped:
        """Updates in the dtypes of the params, if they are given, else in f32 or wider."""
        return self.step(Pending(updates), state, params, apply=False, **extra_args)


def gated(init: Any, step: Step, flush: Flush) -> optax.GradientTransformationExtraArgs:
    """A transformation from its ``init``, and the ``step`` and ``flush`` of its gate."""
    return optax.GradientTransformationExtraArgs(init, GatedUpdate(step, flush))


def gate_of(tx: optax.GradientTransformation) -> GatedUpdate | None:
    """The gate of a transformation, however the pair was rebuilt; ``None`` if it has none."""
    return tx.update if isinstance(tx.update, GatedUpdate) else None


def params_for(tx: optax.GradientTransformation, params: PyTree) -> PyTree:
    """What the ``init`` of a transformation inside a gate is given, or the types of it.

    A gate has params as they are stored; anything else those of f32 or wider in which it will
    compute: moments would otherwise be rounded with them.
    """
    return params if gate_of(tx) else trees.at_least_float32(params)


def init_inner(tx: optax.GradientTransformation, params: PyTree) -> Any:
    """The first state of what is inside a gate."""
    return tx.init(params_for(tx, params))


def init_optimizer(who: str, tx: optax.GradientTransformation, params: PyTree) -> Any:
    """The first state of an optimizer that ``who`` wraps, which must be one without gates."""
    state = tx.init(trees.at_least_float32(params))
    if has_gate(state):
        raise ValueError(
            f"{who}: inner must be an optimizer without gates, got one that may hold a step back. "
            f"Put it inside them: dynamic_loss_scale({who}(adamw(...)))."
        )
    return state


def nothing_held(state: Any, params: PyTree, **extra: Any) -> Stepped:
    """The ``flush`` of what wraps such an optimizer."""
    del extra
    return params, state


def run(
    tx: optax.GradientTransformationExtraArgs,
    grads: Pending,
    state: Any,
    params: PyTree,
    *,
    apply: bool,
    extra: dict[str, Any],
) -> Stepped:
    """Run the transformation inside a gate: its own gate if it has one, else update (and apply).

    It was initialised with params of f32 or wider and computes in them, whatever the params are
    stored in: moments and weight decay would otherwise round with them.
    """
    own = gate_of(tx)
    if own is not None:
        return own.step(grads, state, params, apply=apply, **extra)
    if "grad" in extra:
        extra = extra | {"grad": grads._replace(raw=extra["grad"]).value()}
    updates, state = tx.update(grads.value(), state, trees.at_least_float32(params), **extra)
    if apply:
        return settled(optax.apply_updates(params, updates)), state
    return trees.as_updates(updates, params), state


def flush_inner(
    tx: optax.GradientTransformationExtraArgs, state: Any, params: PyTree, extra: dict[str, Any]
) -> Stepped:
    """Close open windows in ``tx``; a transformation without a gate has none.

    A state in which gradients wait says so by a method ``held()``.
    """
    own = gate_of(tx)
    if own is not None:
        return own.flush(state, params, **extra)
    if trees.telling(state, "held"):
        raise ValueError(
            "flush: tx must be a boostax gate such as accumulate(...) or "
            f"dynamic_loss_scale(accumulate(...)), got {type(tx).__name__} that hides one. Put the "
            "gate outside optax.chain and the like."
        )
    return params, state


def flush_of(tx: optax.GradientTransformationExtraArgs, flag: str) -> Flush:
    """The ``flush`` of a gate around ``tx`` that itself keeps nothing open.

    Args:
      tx: what is inside, whose state is ``inner_state``.
      flag: the field that says whether the last call ran it.
    """

    def flush_fn(state: Any, params: PyTree, **extra: Any) -> Stepped:
        waiting = held_open(state.inner_state)
        params, inner_state = flush_inner(tx, state.inner_state, params, extra)
        # A flush that closed a window counts as a run, even if the last gradient was skipped.
        ran = getattr(state, flag) | (waiting & passed(inner_state))
        return params, state._replace(**{flag: ran}, inner_state=inner_state)

    return flush_fn


def run_or_hold(
    predicate: jax.Array,
    heavy: Callable[[], Stepped],
    params: PyTree,
    state: Any,
    *,
    apply: bool,
    who: str,
    names: tuple[str, ...] | None = None,
) -> Stepped:
    """``heavy()`` where the predicate holds; else params (or zero updates) and state untouched.

    Args:
      predicate: bool scalar, equal on all replicas.
      heavy: returns the new params (``apply``) or the updates, and the new state.
      params: what is returned, with ``apply``, when nothing runs.
      state: the old state; ``heavy``'s is cast to its dtypes, so that a step never changes them.
      apply: see ``heavy``.
      who: the transformation's name, for errors.
      names: mesh axes over which the predicate was agreed, or over which the gradients are local;
        ``()`` if it was computed from gradients without any; ``None`` if it does not depend on
        gradients.
    """
    axes.require_invariant(predicate, who)
    # Both branches need the result's types before either can be built.
    replay, types = trees.trace_once(heavy)
    if names is not None:
        _require_agreed(replay, names, who)
    # Zeros like the result itself: its dtype, its sharding and the axes over which it varies.
    held = (params if apply else jax.tree.map(axes.zeros, types[0]), state)
    hint = "tx.init(params) makes a state for these gradients."
    for what, mine, theirs in zip(("params", "state"), held, types, strict=True):
        trees.require_shapes(who, what, mine, theirs, hint)
    held = axes.unify(held, types)

    def work() -> Stepped:
        value, new_state = replay()
        return axes.unify((value, trees.cast_like(new_state, state)), held)

    return branch(predicate, work, lambda: held)


def _require_agreed(heavy: trees.Replay, names: tuple[str, ...], who: str) -> None:
    """Refuse, where no type tells, axes that do not fit the collectives in a branch.

    With checking on, the types of the predicate and the results have already been checked.
    """
    sent = axes.of_program(heavy.program)
    unseen = lambda name: not axes.varying(axes.to_varying(jnp.zeros(()), (name,)))  # noqa: E731
    missing = ", ".join(repr(x) for x in sorted(sent - frozenset(names)) if unseen(x))
    if missing:
        raise ValueError(
            f"{who}: axis_name must name all axes over which what is inside communicates, got "
            f"{names or None}, and inside something is sent over {missing}. Replicas that decide "
            "separately deadlock in that collective, or average values from different steps. Pass "
            "them in axis_name."
        )
    if names and sent.isdisjoint(names) and unseen(names[0]):
        raise ValueError(
            f"{who}: axis_name must be left out where nothing inside reduces, got {names}. Local "
            f"gradients want a reduction inside, such as boostax.all_reduce({names[0]!r}): "
            "otherwise the replicas' params diverge; gradients that are reduced before want no "
            "axis_name."
        )


def branch(
    predicate: jax.Array, work: Callable[..., PyTree], hold: Callable[..., PyTree], *operands: Any
) -> PyTree:
    """``work(*operands)`` where the predicate holds, else ``hold(*operands)``, written in place.

    For every branch that carries state. Both are to return the same types.
    """
    return alternatives(predicate.astype(jnp.int32), [hold, work], *operands)


def alternatives(
    index: jax.Array, branches: Sequence[Callable[..., PyTree]], *operands: Any
) -> PyTree:
    """What the branch at an index returns of the operands; all are to return the same types.

    A switch, as an index keeps its branches in their order.
    """
    return lax.switch(index.astype(jnp.int32), branches, *operands)


def passed(state: PyTree) -> jax.Array:
    """Whether the last call reached the innermost transformation, read from the gates' states.

    A state takes part by a method ``passed()``. An inner flag is stale if an outer gate skipped it;
    the outer flag is then False, so the AND is right.
    """
    flags = [node.passed() for node in _gates(state)]
    return functools.reduce(jnp.logical_and, flags, jnp.asarray(True))


def outermost_passed(state: PyTree) -> jax.Array:
    """Whether the outermost gate took the last gradient in: accumulated it, or ran on it."""
    gates = _gates(state)
    return gates[0].taken() if gates else jnp.asarray(True)


def held_open(state: PyTree) -> jax.Array:
    """Whether a window is open anywhere."""
    flags = [node.held() for node in trees.telling(state, "held")]
    return functools.reduce(jnp.logical_or, flags, jnp.asarray(False))


def has_gate(state: PyTree) -> bool:
    """Whether a transformation with this state may skip its inner one."""
    return bool(_gates(state))


def _gates(state: PyTree) -> list[Any]:
    return trees.telling(state, "passed", "taken")


def counted(counter: jax.Array, happened: jax.Array) -> jax.Array:
    """One more where it happened, and never past the largest i32."""
    return jnp.where(happened, optax.safe_increment(counter), counter)


def told_by(field: str) -> Callable[[Any], jax.Array]:
    """A state's ``passed`` and ``taken``, where one bool in it is both."""
    return lambda state: getattr(state, field)


class GateState(NamedTuple):
    """State of ``gate``.

    Attributes:
      own: what the rule keeps.
      ran: bool, whether the last call ran what is inside.
      held_calls: i32, calls that were skipped.
      inner_state: state of the inner transformation.
    """

    own: PyTree
    ran: jax.Array
    held_calls: jax.Array
    inner_state: Any

    def metrics(self) -> dict[str, jax.Array]:
        """Named scalars for ``boostax.metrics``."""
        return {"held_calls": self.held_calls}

    passed = taken = told_by("ran")


Rule = Callable[[Pending, PyTree, PyTree], tuple[jax.Array, PyTree]]


def gate(
    inner: optax.GradientTransformation,
    rule: Rule,
    *,
    init: Callable[[PyTree], PyTree] = lambda params: (),
    axis_name: axes.AxisName | None = None,
    name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Run ``inner`` in the calls that a rule of yours lets pass; skip the others as a whole.

    In a skipped call params, moments, schedules and weight decay keep their bits. It is
    compiled as boostax's own gates are: one branch around the update and its application, which
    writes donated buffers in place.

    Args:
      inner: the optimizer.
      rule: ``rule(grads, own, params) -> (run, own)``. ``grads`` is a ``Pending``, of which
        ``grads.value()`` are the gradients, in f32 or wider; ``run`` a bool scalar, and ``own``
        what the rule keeps, in the types that it came in. With ``axis_name`` the gradients are
        local, and the step runs only if ``run`` is True on every replica; what is kept must be
        equal on all.
      init: what the rule keeps at first, from the params.
      axis_name: mesh axis or axes over which something inside reduces; needed with local gradients.
      name: of the transformation, in errors, traces and ``explain``; that of the rule by default.

    Returns:
      A transformation with a ``GateState``. Cost: what the rule computes and keeps, plus 5 bytes of
      state; with ``axis_name`` an all-reduce of 4 bytes. A pure ``update`` needs one more copy of
      the params than ``boostax.apply_gradients``.

    Raises:
      TypeError: ``inner`` is no transformation, or ``run`` no bool scalar.
      ValueError: at trace time, gradients that are summed already over ``axis_name``; something
        inside that reduces over other axes; what is kept changes its shapes.

    Example:
      Leave out steps of which the norm is more than four times its running mean:

      >>> import boostax, jax.numpy as jnp, optax
      >>> def no_spikes(grads, mean, params):
      ...   norm = optax.tree.norm(grads.value())
      ...   run = norm < 4 * mean
      ...   return run, jnp.where(run, 0.9 * mean + 0.1 * norm, mean)
      >>> tx = boostax.gate(optax.sgd(1.0), no_spikes, init=lambda params: jnp.float32(1.0))
      >>> w, state = jnp.float32(0.0), tx.init(jnp.float32(0.0))
      >>> for g in (1.0, 100.0, 1.0):
      ...   w, state = boostax.apply_gradients(tx, jnp.float32(g), state, w)
      >>> float(w), int(boostax.metrics(state)["held_calls"])
      (-2.0, 1)
    """
    who = name or getattr(rule, "__name__", "gate")
    names = axes.canonical(who, axis_name)

    def agreed(grads: Pending, own: PyTree, params: PyTree) -> tuple[jax.Array, PyTree]:
        ok, own = rule(grads, own, params)
        if jnp.shape(ok) or not jnp.issubdtype(jnp.result_type(ok), jnp.bool_):
            allowed, hint = "a bool scalar", "Such as optax.tree.norm(grads.value()) < 10."
            raise TypeError(checks.message(who, "run", allowed, ok, hint))
        return axes.agree(ok, names), own

    return by_rule(who, inner, agreed, init, names)


def by_rule(
    who: str,
    inner: optax.GradientTransformation,
    rule: Rule,
    init: Callable[[PyTree], PyTree],
    names: tuple[str, ...],
    what: str = "",
) -> optax.GradientTransformationExtraArgs:
    """Make the gate of a rule whose ``run`` is equal on all replicas; see ``gate``."""
    tx = checks.transformation(who, "inner", inner)

    def init_fn(params: PyTree) -> GateState:
        # Arrays of its own: donation refuses a buffer that two fields share.
        own = jax.tree.map(jnp.array, init(params))
        inner_state = init_inner(tx, params)
        return GateState(own, jnp.asarray(False), jnp.zeros((), jnp.int32), inner_state)

    @describe(who, "check", names, inner={"inner_state": tx}, what=what)
    def step_fn(
        grads: Pending, state: GateState, params: PyTree, *, apply: bool, **extra: Any
    ) -> tuple[PyTree, GateState]:
        trees.require_gradients(grads.raw, who)
        axes.require_local(grads.raw, names, who)
        ok, own = rule(grads, state.own, params)
        trees.require_shapes(who, "own", state.own, own, "Return it as it was given.")

        def heavy() -> Stepped:
            return run(tx, grads, state.inner_state, params, apply=apply, extra=extra)

        held = params, state.inner_state
        value, inner_state = run_or_hold(ok, heavy, *held, apply=apply, who=who, names=names)
        own = trees.cast_like(own, state.own)
        return value, GateState(own, ok, counted(state.held_calls, ~ok), inner_state)

    return gated(init_fn, step_fn, flush_of(tx, "ran"))
