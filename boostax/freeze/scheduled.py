# SPDX-License-Identifier: Apache-2.0
"""Freezing by schedule: what is frozen leaves the optimizer, the wire and the backward pass."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, trees
from boostax._core.describe import Holds, describe
from boostax._core.extras import elsewhere
from boostax._core.gate import (
    GatedUpdate,
    Pending,
    branch,
    flush_inner,
    has_gate,
    held_open,
    params_for,
    passed,
    run,
)
from boostax._core.groups import as_groups, group_count
from boostax._core.handshake import hand_on_state
from boostax._core.prune import Pruning, pruning
from boostax.freeze.joined import Unlike, at_once
from boostax.freeze.plan import HostDepth, Plan, as_plan, as_schedule
from boostax.freeze.refusals import check_inner, drawn, require_params, require_present
from boostax.freeze.stages import Choice

PyTree = Any
Moments = Literal["shared", "per_group"]
# Params or updates, and the state; and what changes them at a depth.
Whole = tuple[PyTree, "ScheduledFreezeState"]
Change = Callable[[int, PyTree, "ScheduledFreezeState"], Whole]
_WHO = "scheduled_freeze"


class ScheduledFreezeState(NamedTuple):
    """State of ``scheduled_freeze``.

    Attributes:
      steps: i32, applied steps: what the schedule counts.
      depth: i32, groups frozen in the last call.
      next_depth: i32, groups frozen in the next one.
      trained_steps: i32 ``[groups]``, applied steps in which each group was trained.
      schedule_state: what the schedule keeps; ``()`` for a fixed one.
      inner_state: state of the inner transformation, for all leaves that are ever trained; with
        ``moments="per_group"`` a tuple of them, one for each depth that the schedule draws.
    """

    steps: jax.Array
    depth: jax.Array
    next_depth: jax.Array
    trained_steps: jax.Array
    schedule_state: Any
    inner_state: Any
    holds = Holds(("depth", "next_depth", "schedule_state"))

    def metrics(self) -> dict[str, jax.Array]:
        """Named scalars for ``boostax.metrics``."""
        return {"frozen_groups": self.depth, "freeze_steps": self.steps}

    def coming(self) -> jax.Array:
        """The variant of the next call: its depth."""
        return self.next_depth


class _Slot(NamedTuple):
    """Where the state of a depth stands among those of all depths: a ``Pruning`` of a tuple."""

    part: Any
    place: int

    def take(self, states: PyTree) -> PyTree:
        return states[self.place]

    def put(self, states: PyTree, part: PyTree) -> PyTree:
        return (*states[: self.place], part, *states[self.place + 1 :])


@dataclasses.dataclass(frozen=True, eq=False)
class Freezing:
    """What is frozen when; as the variants of a step, see ``boostax._core.variants``.

    Attributes:
      tx: the inner transformation.
      groups: see ``scheduled_freeze``, as are ``schedule``, ``moments`` and ``repeat``.
    """

    tx: optax.GradientTransformationExtraArgs
    groups: Any
    schedule: Any
    moments: Moments
    repeat: bool

    def labels(self, params: PyTree) -> PyTree:
        """The group of each leaf."""
        return as_groups(_WHO, self.groups, params)

    def active(self, params: PyTree, depth: int) -> PyTree:
        """Which leaves are trained while so many groups are frozen."""
        return jax.tree.map(lambda group: group >= depth, self.labels(params))

    def fewer(self, params: PyTree, depth: int) -> PyTree:
        """What is trained at a depth, all else masked."""
        return trees.masked(params, self.active(params, depth))

    def count(self, params: PyTree) -> int:
        """The number of groups."""
        return group_count(self.labels(params), self.groups)

    def plan(self, params: PyTree) -> Plan:
        """The schedule, for the groups of these params."""
        return as_plan(_WHO, self.schedule, self.count(params), self.repeat)

    def cut(self, params: PyTree, depth: int) -> Pruning | _Slot:
        """Where the inner state of a depth lies in the whole one."""
        drawn = self.plan(params).drawn
        wide = jax.eval_shape(functools.partial(params_for, self.tx), params)
        fewer = self.fewer(wide, depth)
        if self.moments == "shared":
            return pruning(self.tx, self.fewer(wide, drawn[0]), fewer, _WHO)
        part = jax.tree.structure(jax.eval_shape(self.tx.init, fewer))
        return _Slot(part, drawn.index(depth))

    def summary(self) -> str:
        """The schedule in a few words."""
        groups = group_count({}, self.groups)
        given = hasattr(self.schedule, "summary")
        return self.schedule.summary(groups) if given else f"{groups} groups"

    def drawn(self, params: PyTree) -> tuple[int, ...]:
        """The depths that the schedule draws."""
        return self.plan(params).drawn

    def choice(self, params: PyTree, state: ScheduledFreezeState) -> Choice:
        """What is active as the schedule says, found out in the program."""
        plan = self.plan(params)
        options = tuple(self.active(params, depth) for depth in plan.drawn)
        return Choice(plan.index(state.next_depth), options)

    def shares(self, params: PyTree, steps: int | None = None) -> dict[int, float] | None:
        """How often each depth occurs; ``None`` for a schedule that the run decides."""
        plan = self.plan(params)
        table = plan.table()
        if table is None:
            return None
        known = map(int, table) if steps is None else (plan.known(i) or 0 for i in range(steps))
        depths = list(known)
        return {depth: count / len(depths) for depth, count in collections.Counter(depths).items()}

    def resumed(self, params: PyTree, state: Any) -> Any:
        """With the next depth as this schedule has it, after the steps that were taken."""
        # What the run decides is in the state.
        if not isinstance(state, ScheduledFreezeState) or jax.tree.leaves(state.schedule_state):
            return state
        depth, _ = self.plan(params).follow((), state.steps, state.depth, state.inner_state)
        return state._replace(next_depth=depth)

    def part(self, params: PyTree, state: ScheduledFreezeState, depth: int) -> ScheduledFreezeState:
        """Without the moments of what is frozen."""
        return state._replace(inner_state=self.cut(params, depth).take(state.inner_state))

    def on_host(self, params: PyTree) -> HostDepth:
        """The schedule, followed from call to call."""
        return HostDepth(self.plan(params))


@dataclasses.dataclass(frozen=True, eq=False)
class FreezingUpdate(GatedUpdate):
    """The ``update`` of ``scheduled_freeze``.

    Attributes:
      variants: the depths.
    """

    variants: Freezing


class ScheduledFreeze(optax.GradientTransformationExtraArgs):
    """What ``scheduled_freeze`` returns."""

    @property
    def freezing(self) -> Freezing:
        """What is frozen when."""
        if isinstance(self.update, FreezingUpdate):
            return self.update.variants
        allowed, hint = "the one that it was made with", "Wrap what is inside scheduled_freeze."
        raise TypeError(checks.message(_WHO, "update", allowed, self.update, hint))

    def active(self, params: PyTree, depth: int) -> PyTree:
        """Which leaves are trained while so many groups are frozen: a tree of bools."""
        return self.freezing.active(params, depth)

    def choice(self, params: PyTree, opt_state: ScheduledFreezeState) -> Choice:
        """The same for what the schedule says, found out in the program."""
        return self.freezing.choice(params, opt_state)


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
      schedule: from ``freeze_schedule`` or ``freeze_on_plateau``; a function from the step, a
        Python int, to the depth, which is asked for 65536 steps (for more, ``freeze_schedule(f,
        total_steps=)``); a sequence of depths; or one depth, which freezes those groups for good
        and keeps no moments for them.
      moments: ``"per_group"`` keeps an optimizer state for each depth, as MindSpore does: its
        counters and moments move only in steps of that depth, but schedules of the optimizer count
        the steps of the run, as MindSpore's lists of rates do. Not for optimizers that keep a copy
        of the params (schedule-free ones): it would be that of long ago.
      repeat: start the schedule anew at its end.

    Returns:
      A transformation with a ``ScheduledFreezeState``. Cost: ``4 * (3 + groups)`` bytes, with
      ``freeze_on_plateau`` 4 more, none per step; the state of ``inner`` for what is ever trained
      (``"per_group"``: for each depth, what is trained there).

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
    freezing = Freezing(tx, groups, as_schedule(_WHO, schedule), moments, repeat)

    def init_fn(params: PyTree) -> ScheduledFreezeState:
        plan = freezing.plan(params)
        wide = params_for(tx, params)
        kept = plan.drawn if moments == "per_group" else plan.drawn[:1]
        states = tuple(tx.init(freezing.fewer(wide, depth)) for depth in kept)
        check_inner(states, plan, moments)
        for depth in plan.drawn if moments == "shared" else ():
            freezing.cut(params, depth)
        return ScheduledFreezeState(
            steps=jnp.zeros((), jnp.int32),
            depth=jnp.zeros((), jnp.int32) + plan.first(),
            next_depth=jnp.zeros((), jnp.int32) + plan.first(),
            trained_steps=jnp.zeros(freezing.count(params), jnp.int32),
            schedule_state=plan.init(),
            inner_state=states if moments == "per_group" else states[0],
        )

    def following(
        state: ScheduledFreezeState, params: PyTree, depth: int, ok: jax.Array, inner_state: PyTree
    ) -> ScheduledFreezeState:
        steps = jnp.where(ok, optax.safe_increment(state.steps), state.steps)
        now = jnp.full_like(state.depth, depth)
        plan = freezing.plan(params)
        then, kept = plan.follow(state.schedule_state, steps, now, inner_state)
        # A step that was held back is taken again as it was.
        hold = lambda new, old: jnp.where(ok, new, old)  # noqa: E731
        trained = state.trained_steps + (jnp.arange(state.trained_steps.size) >= depth)
        return ScheduledFreezeState(
            steps=steps,
            depth=now,
            next_depth=hold(then, now),
            trained_steps=hold(trained, state.trained_steps),
            schedule_state=jax.tree.map(hold, kept, state.schedule_state),
            inner_state=inner_state,
        )

    def changed(
        depth: int | None,
        change: Change,
        value: PyTree,
        state: ScheduledFreezeState,
        params: PyTree,
    ) -> Whole:
        """A change at this depth or, if there is none, at the one that the schedule says.

        What is active there goes in and comes out, written in place, where XLA:CPU and XLA:GPU copy
        what a switch returns: one program for all depths if they are alike, else a condition for
        each.
        """
        plan = freezing.plan(params)
        depths = plan.drawn if depth is None else (drawn(depth, plan),)
        index = plan.index(state.next_depth)
        if len(depths) > 1:
            axes.require_invariant(index, _WHO)

        def timed(at: int, value: PyTree, state: ScheduledFreezeState) -> Whole:
            """With schedules at the step of the run: those of one depth's state stood still."""
            inner_state = _at_step(state.inner_state, state.steps)
            return change(at, value, state._replace(inner_state=inner_state))

        # A train step has taken the inner state out before, and puts it back itself.
        apart = lambda inner, cut: jax.tree.structure(inner) == cut.part  # noqa: E731

        def take(at: int, value: PyTree, state: ScheduledFreezeState) -> Whole:
            cut, inner = freezing.cut(params, at), state.inner_state
            own = state if apart(inner, cut) else state._replace(inner_state=cut.take(inner))
            return trees.masked(value, freezing.active(params, at)), own

        def put(at: int, old: Whole, new: Whole) -> Whole:
            (value, state), (found, own), cut = old, new, freezing.cut(params, at)
            if not apart(state.inner_state, cut):
                own = own._replace(inner_state=cut.put(state.inner_state, own.inner_state))
            return trees.unmasked(found, value), own

        run_it = timed if moments == "per_group" else change
        whole = value, state
        if len(depths) == 1:
            return put(depths[0], whole, run_it(depths[0], *take(depths[0], *whole)))
        # States of their own, gates and what is sent differ from depth to depth.
        if moments == "shared" and not has_gate(state.inner_state) and not axes.of_the_mesh():
            try:
                given = functools.partial
                return at_once(
                    index, [(given(take, at), given(change, at)) for at in depths], whole
                )
            except Unlike:
                pass
        for place, at in enumerate(depths):
            found = _when(index == place, functools.partial(run_it, at), take(at, *whole))
            whole = put(at, whole, found)
        return whole

    # One inner state for each depth is not where its own would lie.
    inside = {"inner_state" if moments == "shared" else "inner_states": tx}

    @describe(_WHO, "freeze", inner=inside)
    def step_fn(
        grads: Pending,
        state: ScheduledFreezeState,
        params: PyTree,
        *,
        apply: bool,
        depth: int | None = None,
        **extra: Any,
    ) -> Whole:
        require_params(params)
        outside = state

        def step(depth: int, value: PyTree, state: ScheduledFreezeState) -> Whole:
            hand_on_state(outside, state)
            active = freezing.active(params, depth)
            require_present(grads.raw, active, depth)
            pending = Pending(trees.masked(grads.raw, active), grads.factors)
            trees.require_gradients(pending.raw, _WHO, carried=True)
            more = elsewhere(extra, lambda trial: trees.unmasked(trial, params))
            if "grad" in extra:
                more["grad"] = trees.masked(extra["grad"], active)
            old = value if apply else trees.masked(params, active)
            found, new = run(tx, pending, state.inner_state, old, apply=apply, extra=more)
            return found, following(state, params, depth, passed(new), new)

        value = params if apply else jax.tree.map(jnp.zeros_like, params)
        return changed(depth, step, value, state, params)

    def flush_fn(
        state: ScheduledFreezeState, params: PyTree, *, depth: int | None = None, **extra: Any
    ) -> Whole:
        def close(depth: int, value: PyTree, state: ScheduledFreezeState) -> Whole:
            before = held_open(state.inner_state)
            found, new = flush_inner(tx, state.inner_state, value, extra)
            # What was open and is closed now was applied, unless an inner scaler skipped it.
            ok = before & passed(new)
            return found, following(state, params, depth, ok, new)

        return changed(depth, close, params, state, params)

    return ScheduledFreeze(init_fn, FreezingUpdate(step_fn, flush_fn, freezing))


def _at_step(state: PyTree, step: jax.Array) -> PyTree:
    """The state of one depth, with its schedules at a step of the run."""
    # Of optax.scale_by_schedule, optax.add_decayed_weights and optax.inject_hyperparams.
    counts = ("ScaleByScheduleState", "WeightDecaySchedule", "WrappedScheduleState")
    schedule = lambda node: type(node).__name__ in counts  # noqa: E731
    move = lambda node: node._replace(count=step) if schedule(node) else node  # noqa: E731
    return jax.tree.map(move, state, is_leaf=schedule)


def _when(predicate: jax.Array, change: Callable[..., Whole], old: Whole) -> Whole:
    """``change(*old)`` where the predicate holds, else ``old``."""
    replay, types = trees.trace_once(change, *old)
    # Either may vary over axes over which the other does not.
    return branch(
        predicate,
        lambda *given: axes.unify(replay(*given), given),
        lambda *given: axes.unify(given, types),
        *old,
    )


def active_groups(opt_state: PyTree) -> jax.Array:
    """Which groups the next call will train.

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
