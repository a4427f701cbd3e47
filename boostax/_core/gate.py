# SPDX-License-Identifier: Apache-2.0
"""The gate: one branch that runs the inner transformation, or returns the old state.

The form of the branch follows from measurements on the compilers for CPU, TPU and GPU
(``docs/compilers.md``):

* ``where`` needs the old and the new moments at once, so XLA cannot reuse a buffer. A branch around
  the update *and* its application lets XLA write donated buffers in place.
* With ``lax.cond``, XLA:CPU copies pass-through operands unless the True branch does the work
  (https://github.com/jax-ml/jax/issues/39449), and XLA:GPU copies them unless the False branch does
  the work. With ``lax.switch`` on an int32, which preserves the order of the branches, no compiler
  copies these operands.
* A pure ``update`` returns updates, so it needs one buffer of the size of the params.

The ``update`` of a gated transformation is therefore an object with a function ``step``, which can
also apply the updates. Nested gates pass ``apply`` inwards, so that only the innermost branch
touches the params. Gradients pass inwards unchanged, together with the factors that multiply them
later (``Pending``), because anything computed from a gradient before a branch is written to memory.

The state of a gate describes the last call by the methods of ``protocols.Gate``. A state in which
gradients wait also has the method of ``protocols.Window``. The field ``applied`` of a gate, a bool,
is the result of ``inner_ran()``: whether the last call ran the inner transformation. The field
``skipped``, an i32, counts the calls since the start that did not run the inner transformation.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, interpret, norms, placement, protocols, trees
from boostax._core.describe import Description, Stepped
from boostax._core.types import PyTree, State

Extended = optax.GradientTransformationExtraArgs
Extra = Mapping[str, PyTree]


class Pending(NamedTuple):
    """Gradients, and the f32 factors that will multiply the gradients.

    The product is computed inside the branch that uses the gradients, because a product before the
    branch is written to memory. A rule for ``boostax.gate`` gets a ``Pending``; the method
    ``value()`` returns the gradients that the optimizer gets.

    Attributes:
      raw: gradients, in their own dtypes.
      factors: f32 scalars, such as the reciprocal of a loss scale.
      counted: bool scalar, equal on all replicas; False if the loss is a mean over zero items.
    """

    raw: PyTree
    factors: tuple[jax.Array, ...] = ()
    counted: jax.Array | None = None

    def times(self, *factors: jax.Array) -> "Pending":
        """Return the same gradients with additional factors."""
        return self._replace(factors=self.factors + factors)

    def value(self) -> PyTree:
        """Return the product in f32 or wider.

        The gradients are multiplied by reciprocals, not divided. XLA:CPU would not repeat a
        division in each fusion that reads the result, but would write a copy of all gradients.
        """
        leaves, structure = jax.tree.flatten(trees.at_least_float32(self.raw))
        for i, g in enumerate(leaves):
            factors = (trees.as_dtype(x, jnp.finfo(g.dtype).dtype) for x in self.factors)
            leaves[i] = math.prod(factors, start=g)
        return structure.unflatten(leaves)

    def usable(self) -> jax.Array:
        """Return whether both the gradients and the sum of their squares are finite.

        Adam squares gradients and clipping sums the squares, so a finite f32 gradient of 1e25 makes
        the second moment of Adam infinite forever. The sum of up to 2**32 squares does not overflow
        if all magnitudes are below ``2**((maxexp - 32) / 2)``, which is 2**48 in f32. Sparse
        gradients are checked by their data, before rows with the same index are added.
        """
        largest = norms.largest_magnitudes(self.raw)
        below = list[jax.Array]()
        for dtype in dict.fromkeys(x.dtype for x in largest):
            same_dtype = jnp.stack([x for x in largest if x.dtype == dtype])
            limit = 2.0 ** ((jnp.finfo(dtype).maxexp - 32) / 2)
            below.append((self._replace(raw=same_dtype).value() < limit).all())
        return norms.all_true(below)


# ``step(grads, state, params, *, apply, **extra)`` is an ``update`` that gets a ``Pending``. With
# ``apply=True``, a step returns new params instead of updates.
Step = Callable[..., Stepped]
# ``flush(state, params, **extra)`` closes open windows without a new gradient, and returns params
# and state.
Flush = Callable[..., Stepped]


@dataclasses.dataclass(frozen=True, eq=False)
class GatedUpdate:
    """The pure ``update`` of a gate, together with the gate's ``step`` and ``flush``.

    For Optax, the object is an ordinary function. Code that rebuilds the pair of ``init`` and
    ``update`` (``copy``, ``jax.tree.map``, Equinox, Keras) preserves the gate. Code that replaces
    ``update`` by another function (``optax.chain``, ``optax.masked``, ...) calls the pure
    ``update``, and loses the gate. ``functools.wraps`` and ``jax.jit`` lose the gate too, because
    both copy only the attributes of the object.

    Attributes:
      step: see ``Step``.
      flush: see ``Flush``.
      init: the ``init`` of the same transformation; to explain an error, a state is compared with
        the result of ``init``.
      description: the description that ``describe`` attached to ``step``; or ``None``.
    """

    step: Step
    flush: Flush
    init: Callable[[PyTree], PyTree] | None = dataclasses.field(default=None, kw_only=True)
    description: Description | None = dataclasses.field(default=None, kw_only=True)

    def __call__(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> Stepped:
        """Return updates in the dtypes of the params, or in f32 or wider without params."""
        who = getattr(self.description, "name", "update")
        call = "tx.update(grads, state, params)"
        like = updates if params is None else params
        with trees.explaining(trees.require_state, who, call, self, state, like):
            return self.step(Pending(updates), state, params, apply=False, **extra_args)


def gated(init: Callable[..., PyTree], step: Step, flush: Flush) -> Extended:
    """Make a transformation from an ``init``, a ``step`` and a ``flush``."""
    description = getattr(step, "description", None)
    return Extended(init, GatedUpdate(step, flush, init=init, description=description))


def gate_of(tx: optax.GradientTransformation) -> GatedUpdate | None:
    """Return the gate of a transformation, or ``None``."""
    return tx.update if isinstance(tx.update, GatedUpdate) else None


def params_for(tx: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Return the params for the ``init`` of a transformation inside a gate.

    A gate gets the params in their storage dtypes. Any other transformation gets f32 or wider
    params, so that the moments are not rounded.
    """
    return params if gate_of(tx) else trees.at_least_float32(params)


def init_inner(tx: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Make the first state of the transformation inside a gate."""
    trees.require_order("init", "tx.init(params)", params=params)
    return trees.unshared(tx.init(params_for(tx, params)), params)


def init_optimizer(who: str, tx: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Make the first state of an optimizer inside ``who``; refuse an optimizer with a gate."""
    state = trees.unshared(tx.init(trees.at_least_float32(params)), params)
    refuse_gates(who, gates_in(state))
    return state


def refuse_gates(who: str, gates: Sequence[object]) -> None:
    """Refuse gates, or the states of gates, inside ``who``."""
    described = [getattr(gate, "description", gate) for gate in gates if gate is not None]
    got = [getattr(x, "name", type(x).__name__) for x in described]
    hint = "Gates, and dim_reduce, skip steps. Put a gate outside: "
    hint += f"dynamic_loss_scale({who}(adamw(...)))."
    checks.require(not got, who, "inner", got=got, allowed="an optimizer without gates", hint=hint)


def call(
    tx: Extended, grads: Pending, state: PyTree, params: PyTree, *, apply: bool, extra: Extra
) -> Stepped:
    """Run the transformation inside a gate by its ``step`` or, if it has none, by its ``update``.

    A transformation without a gate computes in f32 or wider for params of any dtype, so that
    moments and weight decay are not rounded.
    """
    if (gate := gate_of(tx)) is not None:
        return gate.step(grads, state, params, apply=apply, **extra)
    if "grad" in extra:
        extra = {**extra, "grad": grads._replace(raw=extra["grad"]).value()}
    updates, state = tx.update(grads.value(), state, trees.at_least_float32(params), **extra)
    if apply:
        return placement.settled(trees.applied(params, updates)), state
    return trees.as_updates(updates, params), state


def sources(tx: Extended, params: PyTree) -> Stepped:
    """Return the params and gradients on which each array of the new params and state depends.

    The result has a set of numbers for each array. Params and gradients are numbered in the order
    of the leaves.
    """
    # Only shapes and dtypes matter here. So the types have no shardings, which JAX would check on
    # an Explicit mesh.
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state = jax.eval_shape(functools.partial(init_inner, tx), types)
    update = functools.partial(call, tx, apply=True, extra={"value": jnp.zeros(())})
    traced = trees.Replay(*jax.make_jaxpr(update, return_shape=True)(Pending(types), state, types))
    none = frozenset[int]()
    numbers = [frozenset([i]) for i in range(len(jax.tree.leaves(types)))]
    inputs = [*numbers, *[none] * (len(traced.program.in_avals) - 2 * len(numbers)), *numbers]
    results = interpret.flow(traced.program, inputs, None, lambda facts: none.union(*facts), none)
    return jax.tree.unflatten(jax.tree.structure(traced.types), results)


def flush_inner(tx: Extended, state: PyTree, params: PyTree, extra: Extra) -> Stepped:
    """Close the open windows in ``tx``; refuse a window that is hidden by a wrapper.

    A state in which gradients may wait is a ``protocols.Window``.
    """
    if (gate := gate_of(tx)) is not None:
        return gate.flush(state, params, **extra)
    hidden = [type(node).__name__ for node in trees.telling(state, protocols.Window)]
    allowed = "a boostax gate such as accumulate(...) or dynamic_loss_scale(accumulate(...))"
    hint = "A wrapper such as optax.chain hides the gate. Put the gate around the wrapper."
    checks.require(not hidden, "flush", "tx", got=hidden, allowed=allowed, hint=hint)
    return params, state


def flush_of(tx: Extended) -> Flush:
    """Make the ``flush`` of a gate around ``tx`` that accumulates no gradients itself."""

    def flush_fn(state: PyTree, params: PyTree, **extra: PyTree) -> Stepped:
        waiting = held_open(state.inner_state)
        params, inner_state = flush_inner(tx, state.inner_state, params, extra)
        # A flush that closes a window applies the window's sum, even if the last gradient was
        # skipped.
        applied = state.applied | (waiting & passed(inner_state))
        return params, state._replace(applied=applied, inner_state=inner_state)

    return flush_fn


def run_or_hold(
    predicate: jax.Array,
    heavy: Callable[[], Stepped],
    params: PyTree,
    state: PyTree,
    *,
    apply: bool,
    who: str,
    names: tuple[str, ...] | None = None,
) -> Stepped:
    """Return ``heavy()`` if the predicate is true; else old params (or zero updates) and old state.

    Args:
      predicate: bool scalar, equal on all replicas.
      heavy: returns the new params and state; with ``apply=False``, updates and the new state.
      params: the old params.
      state: the old state. The new state is cast to the old dtypes, so that no step changes a
        dtype.
      apply: whether ``heavy`` returns params.
      who: the transformation's name, for errors.
      names: mesh axes over which the replicas agreed on the predicate, or over which the gradients
        are local; ``()`` if the predicate depends on gradients and there is no axis; ``None`` if
        the predicate does not depend on gradients.
    """
    axes.require_invariant(predicate, who)
    # The other branch must return values of the same types as ``heavy()``, which are known only
    # after a trace.
    replay = trees.Replay(*jax.make_jaxpr(heavy, return_shape=True)())
    if names is not None:
        _require_agreed(replay, names, who)
    # These zeros have the dtype, the sharding and the varying axes of the updates.
    old = (params if apply else jax.tree.map(axes.zeros, replay.types[0]), state)
    hint = "Call tx.init with params that have the shapes of the gradients."
    for what, tree, new_types in zip(("params", "state"), old, replay.types, strict=True):
        trees.require_shapes(who, what, tree, new_types, hint)
    old = axes.unify(old, replay.types)

    def work() -> Stepped:
        value, new_state = replay()
        return axes.unify(axes.placed_like((value, trees.cast_like(new_state, state)), old), old)

    return branch(predicate, work, lambda: old)


def skip_if_empty(ok: jax.Array, new: State, old: State, grads: Pending) -> tuple[jax.Array, State]:
    """Return ``ok`` and ``new``, or False and ``old`` if the loss counted no items.

    The zero gradient of such a call does not show whether a scale or a limit is right.

    Args:
      ok: bool scalar, whether the gate runs the inner transformation.
      new: the state of the gate after the call, before ``applied_or_skipped`` completes it.
      old: the state of the gate before the call.
      grads: the gradients that the gate got.
    """
    if (any_items := grads.counted) is None:
        return ok, new
    ok &= any_items
    return ok, jax.tree.map(lambda x, y: x if x is y else jnp.where(any_items, x, y), new, old)


def applied_or_skipped(state: PyTree, applied: jax.Array, inner_state: PyTree) -> PyTree:
    """Return the state of a gate after a call that was applied or skipped."""
    skipped = counted(state.skipped, ~applied)
    return state._replace(applied=applied, skipped=skipped, inner_state=inner_state)


def _require_agreed(heavy: trees.Replay, names: tuple[str, ...], who: str) -> None:
    """Refuse axes that do not match the collectives in a branch, if types cannot show the mismatch.

    With ``check_vma=True``, the types of the predicate and the results are already checked.
    """
    sent = axes.named([eqn for eqn, _ in interpret.equations(heavy.program.jaxpr)])
    seen = axes.tracked((*names, *sent))
    missing = ", ".join(map(repr, sorted(sent - seen.union(names))))
    got = f"{names or None}, but a part inside {who} communicates over {missing}"
    allowed = f"all axes over which the parts inside {who} communicate"
    hint = "Pass all these axes. Replicas that skip different calls would deadlock in a collective."
    checks.require(not missing, who, "axis_name", got, allowed, hint)
    reduced = not names or not sent.isdisjoint(names) or names[0] in seen
    hint = f"Local gradients need a reduction inside {who}: boostax.all_reduce({names[:1]})."
    checks.require(reduced, who, "axis_name", names, "left out if inner has no reduction", hint)


Branch = Callable[..., PyTree]


def branch(predicate: jax.Array, work: Branch, hold: Branch, *operands: PyTree) -> PyTree:
    """Run ``work(*operands)`` if the predicate is true, else ``hold(*operands)``, in place.

    This function makes all branches of boostax that carry state. ``work`` and ``hold`` must return
    the same types. The branch is a ``lax.switch``, because a switch preserves the order of the
    branches.

    Under ``vmap`` the predicates of several runs may differ, so JAX runs both branches in each
    call. In ``jax.vmap(..., axis_name="seeds")``, only calls in which the predicate of any run is
    true run ``work``.
    """
    index = predicate.astype(jnp.int32)
    if (largest := axes.any_seed(index)) is None:
        return jax.lax.switch(index, [hold, work], *operands)

    def select(*operands: PyTree) -> PyTree:
        where = functools.partial(jnp.where, predicate)
        return jax.tree.map(where, work(*operands), hold(*operands))

    return jax.lax.switch(largest, [hold, select], *operands)


def passed(state: PyTree) -> jax.Array:
    """Return whether the last call ran the innermost transformation, from the gates' states.

    The answer ``inner_ran()`` of an inner gate is stale if an outer gate skipped the call. The
    answer of the outer gate is then False, so the conjunction of all answers is still correct.
    """
    flags = [node.inner_ran() for node in gates_in(state)]
    return functools.reduce(jnp.logical_and, flags, jnp.asarray(True))


def outermost_passed(state: PyTree) -> jax.Array:
    """Return whether the outermost gate accumulated or applied the last gradient."""
    return next((gate.gradient_used() for gate in gates_in(state)), jnp.asarray(True))


def held_open(state: PyTree) -> jax.Array:
    """Return whether any window is open."""
    flags = [node.is_open() for node in trees.telling(state, protocols.Window)]
    return functools.reduce(jnp.logical_or, flags, jnp.asarray(False))


def gates_in(state: PyTree) -> list[protocols.Gate]:
    """Return the states of gates, outer before inner."""
    return trees.telling(state, protocols.Gate)


def counted(counter: jax.Array, happened: jax.Array) -> jax.Array:
    """Increment an i32 counter if the flag is true, without overflow."""
    return jnp.where(happened, optax.safe_increment(counter), counter)


def flag(state: PyTree) -> jax.Array:
    """Return ``applied``, which both methods of ``protocols.Gate`` return in many states."""
    return state.applied
