# SPDX-License-Identifier: Apache-2.0
"""Freeze by schedule: what is frozen leaves the optimizer, the wire and the backward pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from boostax._core import checks, gate, trees
from boostax._core.describe import Holds, describe, elsewhere
from boostax._core.groups import as_groups, group_count
from boostax._core.handshake import hand_on_state
from boostax._core.replicas import owns_params
from boostax._core.trees import Pruning, pruning
from boostax.freeze.plan import HostDepth, Plan, as_schedule
from boostax.freeze.schedules import FreezeSchedule
from boostax.freeze.stages import Choice

PyTree = Any
Moments = Literal["shared", "per_group"]
# Params or updates, and the state; and what changes them at a depth.
Whole: TypeAlias = tuple[PyTree, "ScheduledFreezeState"]
Change: TypeAlias = Callable[[int, PyTree, "ScheduledFreezeState"], Whole]
_WHO = "scheduled_freeze"
_CHANGES = "for a schedule that changes, got"


class ScheduledFreezeState(NamedTuple):
    """State of ``scheduled_freeze``.

    Attributes:
      steps: i32, applied steps: what the schedule counts.
      depth: i32, groups frozen in the last call.
      next_depth: i32, groups frozen in the next one.
      trained_steps: i32 ``[groups]``, applied steps in which each group was trained.
      inner_state: state of the inner transformation, for all leaves that are ever trained; with
        ``moments="per_group"`` a tuple of them, one for each depth that the schedule draws.
    """

    steps: jax.Array
    depth: jax.Array
    next_depth: jax.Array
    trained_steps: jax.Array
    inner_state: Any
    holds = Holds(("depth", "next_depth"))

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        return {"frozen_groups": self.depth, "freeze_steps": self.steps}

    def coming(self) -> jax.Array:
        """Return the variant of the next call: its depth."""
        return self.next_depth


@dataclasses.dataclass(frozen=True, eq=False)
class Freezing:
    """Say what is frozen when; as the variants of a step, see ``describe.variants_of``.

    Attributes:
      tx: the inner transformation.
      groups: see ``scheduled_freeze``, as are ``schedule``, ``moments`` and ``repeat``.
    """

    tx: optax.GradientTransformationExtraArgs
    groups: Any
    schedule: FreezeSchedule
    moments: Moments
    repeat: bool

    def plan(self, params: PyTree) -> Plan:
        """Return the schedule for the groups of these params."""
        labels = as_groups(_WHO, self.groups, params)
        return Plan(labels, group_count(labels, self.groups), self.schedule, self.repeat)

    def active(self, params: PyTree, depth: int) -> PyTree:
        """Return which leaves are trained while so many groups are frozen."""
        return self.plan(params).active(depth)

    def cut(self, params: PyTree, depth: int) -> Pruning:
        """Return where the inner state of a depth lies in the whole one."""
        plan = self.plan(params)
        wide = jax.eval_shape(functools.partial(gate.params_for, self.tx), params)
        fewer = trees.masked(wide, plan.active(depth))
        if self.moments == "shared":
            return pruning(self.tx, trees.masked(wide, plan.active(plan.drawn[0])), fewer, _WHO)
        # Among states of all depths the others are a leaf each.
        states: list[Any] = [0] * len(plan.drawn)
        place = plan.drawn.index(depth)
        states[place] = jax.eval_shape(self.tx.init, fewer)
        whole, part = jax.tree.structure(tuple(states)), jax.tree.structure(states[place])
        return Pruning(whole, part, tuple(range(place, place + part.num_leaves)))

    def choice(self, params: PyTree, state: ScheduledFreezeState) -> Choice:
        """Return what is active as the schedule says, found out in the program."""
        plan = self.plan(params)
        return Choice(plan.index(state.next_depth), tuple(map(plan.active, plan.drawn)))

    def resumed(self, params: PyTree, state: Any) -> Any:
        """Return the state with the next depth as this schedule has it."""
        if not isinstance(state, ScheduledFreezeState):
            return state
        return state._replace(next_depth=self.plan(params).at(state.steps))

    def part(self, params: PyTree, state: ScheduledFreezeState, depth: int) -> ScheduledFreezeState:
        """Return the state without the moments of what is frozen."""
        return state._replace(inner_state=self.cut(params, depth).take(state.inner_state))

    def on_host(self, params: PyTree) -> HostDepth:
        """Return the schedule, followed from call to call."""
        return HostDepth(self.plan(params))


@dataclasses.dataclass(frozen=True, eq=False)
class FreezingUpdate(gate.GatedUpdate):
    """The ``update`` of ``scheduled_freeze``.

    Attributes:
      variants: the depths.
    """

    variants: Freezing


class ScheduledFreeze(optax.GradientTransformationExtraArgs):
    """Freezes by schedule; ``scheduled_freeze`` returns it."""

    @property
    def freezing(self) -> Freezing:
        """Return what is frozen when."""
        if isinstance(self.update, FreezingUpdate):
            return self.update.variants
        allowed, hint = "the one that it was made with", "Wrap what is inside scheduled_freeze."
        raise TypeError(checks.message(_WHO, "update", allowed, self.update, hint))

    def active(self, params: PyTree, depth: int) -> PyTree:
        """Return which leaves are trained while so many groups are frozen, as a tree of bools."""
        return self.freezing.active(params, depth)

    def choice(self, params: PyTree, opt_state: ScheduledFreezeState) -> Choice:
        """Return the same for what the schedule says, found out in the program."""
        return self.freezing.choice(params, opt_state)


def _init(freezing: Freezing, params: PyTree) -> ScheduledFreezeState:
    plan, shared = freezing.plan(params), freezing.moments == "shared"
    wide = gate.params_for(freezing.tx, params)
    kept = plan.drawn[:1] if shared else plan.drawn
    states = tuple(freezing.tx.init(trees.masked(wide, plan.active(depth))) for depth in kept)
    _check_inner(states, plan.drawn, freezing.moments)
    for depth in plan.drawn if shared else ():
        freezing.cut(params, depth)
    first, trained = plan.known(0), jnp.zeros(plan.groups, jnp.int32)
    # One array per field: donation refuses a buffer that two fields share.
    steps, depth, coming = (jnp.full((), number, jnp.int32) for number in (0, first, first))
    return ScheduledFreezeState(steps, depth, coming, trained, states[0] if shared else states)


def _following(
    plan: Plan, state: ScheduledFreezeState, depth: int, ok: jax.Array, inner_state: PyTree
) -> ScheduledFreezeState:
    """Return the state after a step; one that was held back is taken again as it was."""
    steps, now = gate.counted(state.steps, ok), jnp.full_like(state.depth, depth)
    coming = jnp.where(ok, plan.at(steps), now)
    trained = state.trained_steps + (jnp.arange(state.trained_steps.size) >= depth)
    trained = jnp.where(ok, trained, state.trained_steps)
    return ScheduledFreezeState(steps, now, coming, trained, inner_state)


def _changed(
    freezing: Freezing, params: PyTree, depth: int | None, change: Change, *whole: Any
) -> Whole:
    """Return the whole after a change at this depth or, without one, at that of the schedule.

    What is active there goes in and comes out through a condition for each depth, written in place:
    XLA:CPU and XLA:GPU copy what a switch returns.
    """
    plan = freezing.plan(params)
    index = plan.index(whole[1].next_depth)
    depths = plan.drawn if depth is None else (_require_drawn(depth, plan.drawn),)

    def timed(at: int, value: PyTree, state: ScheduledFreezeState) -> Whole:
        # In steps of other depths the schedules in this one's state stood still.
        if freezing.moments == "per_group":
            state = state._replace(inner_state=_at_step(state.inner_state, state.steps))
        return change(at, value, state)

    for place, at in enumerate(depths):
        (value, state), cut = whole, freezing.cut(params, at)
        # A train step has taken the inner state out before, and puts it back itself.
        apart = jax.tree.structure(state.inner_state) == cut.part
        inner = state.inner_state if apart else cut.take(state.inner_state)
        old = trees.masked(value, plan.active(at)), state._replace(inner_state=inner)
        run = functools.partial(timed, at, *old)
        if len(depths) == 1:
            found, new = run()
        else:
            found, new = gate.run_or_hold(index == place, run, *old, apply=True, who=_WHO)
        if not apart:
            new = new._replace(inner_state=cut.put(state.inner_state, new.inner_state))
        whole = trees.unmasked(found, value), new
    return whole


def _at_step(state: PyTree, step: jax.Array) -> PyTree:
    """Return the state of one depth, with its schedules at a step of the run."""
    # Of optax.scale_by_schedule, optax.add_decayed_weights and optax.inject_hyperparams.
    counts = ("ScaleByScheduleState", "WeightDecaySchedule", "WrappedScheduleState")
    schedule = lambda node: type(node).__name__ in counts  # noqa: E731
    move = lambda node: node._replace(count=step) if schedule(node) else node  # noqa: E731
    return jax.tree.map(move, state, is_leaf=schedule)


def _check_inner(states: tuple[Any, ...], drawn: tuple[int, ...], moments: str) -> None:
    """Refuse inner states that would not keep their bits while frozen."""
    changes = len(drawn) > 1
    windows = trees.find(states, lambda node: isinstance(node, optax.MultiStepsState))
    refusals = {
        "be an optimizer without a loss scaler or a window for moments='per_group', got one: they "
        "would be kept once for each depth. "
        "Use moments='shared'.": moments == "per_group" and gate.has_gate(states),
        f"keep params equal on all replicas {_CHANGES} local_updates or partial_average: what is "
        "frozen would stay different everywhere. "
        "A single depth freezes with them.": changes and owns_params(states),
        f"not keep whole params {_CHANGES} record_trajectory or average_params: what is frozen "
        "would be missing from them. boostax.subspace.pca_basis takes a list of snapshots, "
        "jax.device_get(params) between steps; average_params may stand around "
        f"{_WHO}.": changes and trees.telling(states, "whole_params"),
        f"not be optax.MultiSteps {_CHANGES} one: the depth would change within its window. "
        "Use boostax.accumulate.": changes and windows,
    }
    for must, refused in refusals.items():
        if refused:
            raise ValueError(f"{_WHO}: inner must {must}")


def _require_drawn(depth: Any, drawn: tuple[int, ...]) -> int:
    """Return the depth as an integer; refuse one that the schedule never draws."""
    allowed = f"a depth that the schedule draws, one of {list(drawn)}, as a Python integer"
    hint = "Make it a static argument of your jitted step."
    number = checks.integer(_WHO, "depth", depth, allowed, hint)
    checks.require(_WHO, "depth", depth, allowed, number in drawn, hint)
    return number


def _require_present(grads: PyTree, active: PyTree, depth: int) -> None:
    """Refuse gradients that were masked for another depth than this one."""
    hole = lambda keep, x: keep and isinstance(x, optax.MaskedNode)  # noqa: E731
    try:
        holes = jax.tree.map(hole, active, grads)
    except ValueError as error:
        allowed, hint = "a tree like the params", "A frozen leaf may be an optax.MaskedNode."
        got = jax.tree.structure(grads)
        raise ValueError(checks.message(_WHO, "gradients", allowed, got, hint)) from error
    if any(jax.tree.leaves(holes)):
        raise ValueError(
            f"{_WHO}: gradients must hold every leaf that depth {depth} trains, got masked ones. "
            "Pass the same depth to apply_gradients as to tx.active(params, depth)."
        )


def scheduled_freeze(
    inner: optax.GradientTransformation,
    groups: Any,
    schedule: Any,
    *,
    moments: Moments = "shared",
    repeat: bool = False,
) -> ScheduledFreeze:
    r"""Train only the groups from the scheduled depth on; leave all else of the others alone.

    At a step of depth :math:`d` the leaves of groups :math:`0 \dots d-1` are frozen: params,
    moments, weight decay, accumulated gradients and residuals keep their bits, and ``inner`` sees
    ``optax.MaskedNode`` in their place, so clipping, finiteness and reductions know nothing of
    them. Thawed, they go on from where they were.

    Stands outermost, around scalers and windows. ``make_train_step`` then compiles one step for
    each depth that is drawn, which differentiates the active leaves alone: the backward pass ends
    at the first of them. In a loop of your own, pass the depth to both, as a Python integer::

      active = tx.active(params, depth)
      loss, grads = boostax.value_and_grad(loss_fn)(params, opt_state, batch, active=active)
      params, opt_state = boostax.apply_gradients(tx, grads, opt_state, params, depth=depth)

    Without ``depth`` the program itself does what the schedule says, with gradients that hold every
    leaf: all, or those of ``active=tx.choice(params, opt_state)``, for which the program ends the
    backward pass as well. That is the form for ``jax.lax.scan`` over steps.

    The schedule counts applied steps, so it waits for an accumulation window to close, and a step
    that a loss scaler skips is taken again at the same depth.

    Args:
      inner: the optimizer, gates and reductions included; its state must be kept leaf by leaf.
      groups: from ``prefix_groups``, ``param_groups`` or ``mindspore_groups``; any tree of integers
        0, 1, ... like the params, or a prefix of one; a function ``(path, leaf) -> group``; or a
        list of patterns of paths, one entry (or list of them) for each group, all other leaves
        forming the last.
      schedule: from ``freeze_schedule``; a function from the step, a Python int, to the depth,
        asked for 65536 steps (for more, ``freeze_schedule(f, total_steps=)``); a sequence of
        depths; or one depth, which freezes those groups for good and keeps no moments for them.
      moments: ``"per_group"`` keeps an optimizer state for each depth, as MindSpore does: its
        counters and moments move only in steps of that depth, but schedules of the optimizer count
        the steps of the run, as MindSpore's lists of rates do. Not for optimizers that keep a copy
        of the params (schedule-free ones): it would be that of long ago.
      repeat: start the schedule anew at its end.

    Returns:
      A transformation with a ``ScheduledFreezeState``. Cost: ``4 * (3 + groups)`` bytes, none per
      step; the state of ``inner`` for what is ever trained (``"per_group"``: for each depth, what
      is trained there). Without ``depth`` the program holds the optimizer once for each depth, of
      which a step runs one: 1.5, 2.5 and 5.5 times its operations at 2, 4 and 10 depths.

    Raises:
      ValueError, TypeError: an argument out of range; from ``init``, groups that do not fit the
        params, and, for a schedule that changes, an ``inner`` that melts leaves into one, has
        windows of its own (``optax.MultiSteps``) or params of each replica's own; at trace time, a
        ``depth`` that is never drawn. ``make_train_step`` raises at the end of a schedule shorter
        than the run; inside a program its last depth stays.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.scheduled_freeze(optax.sgd(1.0), {"a": 0, "b": 1}, [0, 1])
      >>> w = {"a": jnp.zeros(()), "b": jnp.zeros(())}
      >>> grads = {"a": jnp.ones(()), "b": jnp.ones(())}
      >>> state = tx.init(w)
      >>> for _ in range(2):
      ...   w, state = boostax.apply_gradients(tx, grads, state, w)
      >>> float(w["a"]), float(w["b"])
      (-1.0, -2.0)

    References:
      Brock et al., FreezeOut, https://arxiv.org/abs/1706.04983, 2017. MindSpore 2.10,
      ``GradientFreeze`` and ``FreezeOpt``.
    """
    checks.transformation(_WHO, "inner", inner)
    hint = "'shared' keeps one state, in which frozen leaves rest."
    checks.choice(_WHO, "moments", moments, ("shared", "per_group"), hint)
    tx = optax.with_extra_args_support(inner)
    known, repeat = as_schedule(schedule, repeat)
    freezing = Freezing(tx, groups, known, moments, repeat)
    # One inner state for each depth is not where its own would lie.
    inside = {"inner_state" if moments == "shared" else "inner_states": tx}

    @describe(_WHO, "freeze", inner=inside)
    def step_fn(
        grads: gate.Pending,
        state: ScheduledFreezeState,
        params: PyTree,
        *,
        apply: bool,
        depth: int | None = None,
        **extra: Any,
    ) -> Whole:
        trees.require_params(params, _WHO, "They say which leaves there are.")
        outside = state

        def step(depth: int, value: PyTree, state: ScheduledFreezeState) -> Whole:
            hand_on_state(outside, state)
            active = freezing.active(params, depth)
            _require_present(grads.raw, active, depth)
            pending = gate.Pending(trees.masked(grads.raw, active), grads.factors)
            trees.require_gradients(pending.raw, _WHO, carried=True)
            more = elsewhere(extra, lambda trial: trees.unmasked(trial, params))
            if "grad" in extra:
                more["grad"] = trees.masked(extra["grad"], active)
            old = value if apply else trees.masked(params, active)
            found, new = gate.run(tx, pending, state.inner_state, old, apply=apply, extra=more)
            return found, _following(freezing.plan(params), state, depth, gate.passed(new), new)

        value = params if apply else jax.tree.map(jnp.zeros_like, params)
        return _changed(freezing, params, depth, step, value, state)

    def flush_fn(
        state: ScheduledFreezeState, params: PyTree, *, depth: int | None = None, **extra: Any
    ) -> Whole:
        def close(depth: int, value: PyTree, state: ScheduledFreezeState) -> Whole:
            before = gate.held_open(state.inner_state)
            found, new = gate.flush_inner(tx, state.inner_state, value, extra)
            # What was open and is closed now was applied, unless an inner scaler skipped it.
            ok = before & gate.passed(new)
            return found, _following(freezing.plan(params), state, depth, ok, new)

        return _changed(freezing, params, depth, close, params, state)

    update = FreezingUpdate(step_fn, flush_fn, freezing)
    return ScheduledFreeze(functools.partial(_init, freezing), update)


def active_groups(opt_state: PyTree) -> jax.Array:
    """Return which groups the next call will train.

    Args:
      opt_state: any state that holds one of ``scheduled_freeze``.

    Returns:
      Bools ``[groups]``.

    Raises:
      ValueError: nothing in the state freezes.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.scheduled_freeze(optax.sgd(1.0), {"a": 0, "b": 1}, 1)
      >>> boostax.freeze.active_groups(tx.init({"a": jnp.zeros(3), "b": jnp.zeros(3)})).tolist()
      [False, True]
    """
    found = trees.find(opt_state, lambda x: isinstance(x, ScheduledFreezeState))
    if not found:
        raise ValueError(
            "active_groups: opt_state must hold a ScheduledFreezeState, got none. Wrap the "
            "optimizer in boostax.scheduled_freeze."
        )
    return jnp.arange(found[0].trained_steps.size) >= found[0].next_depth
