# SPDX-License-Identifier: Apache-2.0
"""Freeze by schedule: frozen leaves take no part in optimizer, reductions and backward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from boostax._core import checks, gate, handshake, interpret, protocols, replicas, trees
from boostax._core.describe import Holds, Stepped, describe, elsewhere
from boostax._core.groups import as_groups
from boostax._core.trees import Pruning, path_name
from boostax._core.types import PyTree
from boostax.freeze.masks import Mask, for_a_run
from boostax.freeze.schedules import FreezeSchedule, HostDepth, Plan, as_schedule
from boostax.freeze.stages import Choice
from boostax.order import findings

Moments = Literal["shared", "per_group"]
# A function that changes the params (or updates) and the state at a depth.
Change: TypeAlias = Callable[[int, PyTree, "ScheduledFreezeState"], Stepped]
_WHO = "scheduled_freeze"


class ScheduledFreezeState(NamedTuple):
    """State of ``scheduled_freeze``.

    Attributes:
      steps: i32, number of applied steps, the argument of the schedule.
      depth: i32, number of groups frozen in the last call.
      next_depth: i32, number of groups frozen in the next call.
      trained_steps: i32 ``[groups]``, number of applied steps that trained each group.
      inner_state: state of the inner transformation, for all leaves that are ever trained; with
        ``moments="per_group"`` a tuple of states, one for each depth that the schedule draws.
    """

    steps: jax.Array  # [] int32
    depth: jax.Array  # [] int32
    next_depth: jax.Array  # [] int32
    trained_steps: jax.Array  # [groups] int32
    inner_state: optax.OptState
    holds = Holds(("depth", "next_depth"), steps="steps")

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        return {"frozen_groups": self.depth, "freeze_steps": self.steps}

    def next_variant(self) -> jax.Array:
        """Return the variant of the next call, which is the depth of the call."""
        return self.next_depth


@dataclasses.dataclass(frozen=True, eq=False)
class Freezing:
    """The arguments of ``scheduled_freeze``, which define the variants of a step.

    ``describe.variants_of`` finds these variants.

    Attributes:
      tx: the inner transformation.
      groups: see ``scheduled_freeze``, also for ``schedule``, ``moments`` and ``repeat``.
      chosen: ``{True}`` after a call of ``choice``, whose gradients are complete although the
        backward pass ends early; otherwise empty.
    """

    tx: optax.GradientTransformationExtraArgs
    groups: PyTree
    schedule: FreezeSchedule
    moments: Moments
    repeat: bool
    chosen: set[bool] = dataclasses.field(default_factory=set[bool], init=False)

    def plan(self, params: PyTree) -> Plan:
        """Return the schedule for the groups of these params."""
        is_mask = isinstance(self.groups, Mask)
        known = self.groups.labels if is_mask else functools.partial(as_groups, groups=self.groups)
        labels = known(_WHO, params=params)
        return Plan(labels.tree, labels.count, self.schedule, self.repeat)

    def pruning(self, params: PyTree, depth: int) -> Pruning:
        """Return where the leaves of one depth's inner state are in the inner state for all depths.

        Raises:
          ValueError: the shape or path of a state leaf depends on which params are masked.
        """
        plan = self.plan(params)
        wide = jax.eval_shape(functools.partial(gate.params_for, self.tx), params)
        # An ``init`` may refuse params that differ per replica, so the shapes have no varying axes.
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wide)
        state = jax.eval_shape(self.tx.init, trees.masked(wide, plan.active(depth)))
        part = jax.tree.structure(state)
        if self.moments == "per_group":
            # In the tuple of states, the state of every depth except this one counts as one leaf.
            full = jax.tree.structure(tuple(state if d == depth else 0 for d in plan.drawn))
            first = plan.drawn.index(depth)
            return Pruning(full, part, tuple(range(first, first + part.num_leaves)))
        shared = jax.eval_shape(self.tx.init, trees.masked(wide, plan.active(plan.drawn[0])))
        leaves, full = jax.tree_util.tree_flatten_with_path(shared)
        places = {(path, x.shape, x.dtype): i for i, (path, x) in enumerate(leaves)}
        some = jax.tree_util.tree_leaves_with_path(state)
        lost = [path_name(path) for path, x in some if (path, x.shape, x.dtype) not in places]
        hint = "These leaves depend on which params freeze. Use no optax.flatten and no by_shape."
        allowed = "an optimizer that keeps its state leaf by leaf"
        checks.require(not lost, _WHO, "inner", got=lost[:6], allowed=allowed, hint=hint)
        return Pruning(full, part, tuple(places[path, x.shape, x.dtype] for path, x in some))

    def find(self, state: PyTree) -> ScheduledFreezeState:
        """Return the state of ``scheduled_freeze``, which ``average_params`` may wrap."""
        return state if isinstance(state, ScheduledFreezeState) else self.find(state.inner_state)

    def report_idle(self, active: PyTree, grads: PyTree, state: PyTree) -> None:
        """Report gradients of frozen leaves from a backward pass that ``choice`` does not end."""
        frozen = jax.tree.map(lambda x, g: None if x else g, active, grads)
        if not self.chosen and handshake.between(handshake.recorded(frozen)[-1:], set())[1]:
            findings.of_part(_WHO, "not_active", state)

    def choice(self, params: PyTree, state: PyTree) -> Choice:
        """Return the active leaves for each depth, and the index of the state's next depth."""
        plan = self.plan(params)
        self.chosen.add(True)
        return Choice(plan.index(self.find(state).next_depth), tuple(map(plan.active, plan.drawn)))

    def part(self, params: PyTree, state: PyTree, depth: int) -> PyTree:
        """Return the state without the moments of frozen leaves."""
        if state is not self.find(state):
            return state._replace(inner_state=self.part(params, state.inner_state, depth))
        return state._replace(inner_state=self.pruning(params, depth).take(state.inner_state))

    def changed(self, params: PyTree, depth: int | None, change: Change, old: Stepped) -> Stepped:
        """Return params and state after ``change`` at ``depth``, or at the scheduled depth.

        Each depth has its own branch, which receives the active leaves and writes them in place. A
        single switch over all depths would be slower, because XLA:CPU and XLA:GPU copy the results
        of such a switch.
        """
        value, state = old
        plan = self.plan(params)
        index = plan.index(state.next_depth)
        depths = plan.drawn
        if depth is not None:
            allowed = f"a depth of the schedule, one of {list(depths)}, as a Python integer"
            hint = "Make the depth a static argument of your jitted step."
            depths = (checks.integer(_WHO, "depth", depth, allowed, hint),)
            checks.require(depths[0] in plan.drawn, _WHO, "depth", depth, allowed, hint)
        for place, at in enumerate(depths):
            pruning = self.pruning(params, at)
            # A train step may pass only this depth's part of the inner state. Then the train step
            # itself writes the part back.
            is_part = jax.tree.structure(state.inner_state) == pruning.part
            inner = state.inner_state if is_part else pruning.take(state.inner_state)
            active = trees.masked(value, plan.active(at))
            # The counts in this depth's state did not advance in steps of other depths.
            now = inner if self.moments == "shared" else _at_step(inner, state.steps)
            known = functools.partial(change, at, active)
            branch = functools.partial(_resting, known, state._replace(inner_state=now))
            if len(depths) == 1:
                changed, new = branch()
            else:
                old = active, state._replace(inner_state=inner)
                changed, new = gate.run_or_hold(index == place, branch, *old, apply=True, who=_WHO)
            inner = new.inner_state if is_part else pruning.set(state.inner_state, new.inner_state)
            state = new._replace(inner_state=inner)
            value = trees.unmasked(changed, value)
        return value, state

    def on_host(self, params: PyTree) -> HostDepth:
        """Return an object that follows the schedule on the host, from call to call."""
        return HostDepth(self.plan(params))


@dataclasses.dataclass(frozen=True, eq=False)
class FreezingUpdate(gate.GatedUpdate):
    """The ``update`` of ``scheduled_freeze``.

    Attributes:
      variants: the arguments of ``scheduled_freeze``.
    """

    variants: Freezing


class ScheduledFreeze(optax.GradientTransformationExtraArgs):
    """The transformation that ``scheduled_freeze`` returns."""

    def __repr__(self) -> str:
        return f"scheduled_freeze(groups={self.freezing.groups!r})"

    @property
    def freezing(self) -> Freezing:
        """Return the arguments of ``scheduled_freeze``."""
        if isinstance(self.update, FreezingUpdate):
            return self.update.variants
        allowed = "the function that scheduled_freeze returned"
        hint = "Wrap the transformation that you pass to scheduled_freeze, not the result."
        raise TypeError(checks.message(_WHO, "update", allowed, self.update, hint))

    def active(self, params: PyTree, depth: int) -> PyTree:
        """Return a tree of bools that are True for the leaves trained at this depth."""
        return self.freezing.plan(params).active(depth)

    def choice(self, params: PyTree, opt_state: PyTree) -> Choice:
        """Return the active leaves at the schedule's depth, for ``active=``."""
        return self.freezing.choice(params, opt_state)


def _init(freezing: Freezing, params: PyTree) -> ScheduledFreezeState:
    plan = freezing.plan(params)
    is_shared = freezing.moments == "shared"
    wide = gate.params_for(freezing.tx, params)
    masked = [trees.masked(wide, plan.active(x)) for x in plan.drawn[: 1 if is_shared else None]]
    states = tuple(trees.unshared(freezing.tx.init(x), x) for x in masked)
    # Some inner states would become wrong while leaves are frozen.
    changes = len(plan.drawn) > 1
    wrong = {
        "gates": not is_shared and gate.gates_in(states),
        "own params": changes and replicas.owns_params(states),
        "whole params": changes
        and any(x.needs_all_params() for x in trees.telling(states, protocols.NeedsAllParams)),
        "windows": changes and trees.find(states, optax.MultiStepsState),
    }
    for name in (name for name, refused in wrong.items() if refused):
        raise ValueError(f"{_WHO}: inner must {checks.table('boostax.freeze', 'refusals')[name]}")
    for depth in plan.drawn if is_shared else ():
        freezing.pruning(params, depth)
    first = plan.known(0)
    trained = jnp.zeros(plan.groups, jnp.int32)
    # Each field has its own array, because donation refuses a buffer that two fields share.
    steps, depth, coming = (jnp.full((), number, jnp.int32) for number in (0, first, first))
    state = ScheduledFreezeState(steps, depth, coming, trained, states[0] if is_shared else states)
    plan.report_idle(0, state)
    return state


def _following(
    plan: Plan, state: ScheduledFreezeState, depth: int, ok: jax.Array, inner_state: PyTree
) -> ScheduledFreezeState:
    """Return the state after a step; a skipped step is repeated at the same depth."""
    steps = gate.counted(state.steps, ok)
    now = jnp.full_like(state.depth, depth)
    coming = jnp.where(ok, plan.at(steps), now)
    trained = state.trained_steps + (jnp.arange(state.trained_steps.size) >= depth)
    trained = jnp.where(ok, trained, state.trained_steps)
    return ScheduledFreezeState(steps, now, coming, trained, inner_state)


def _resting(change: Callable[..., Stepped], state: ScheduledFreezeState) -> Stepped:
    """Return the results of ``change``, with old states of parts of a partition without leaves.

    A part of ``optax.partition`` has no active leaf if the part has no moments, and no result
    depends on the part's counts.
    """
    leaves, tree = jax.tree.flatten(state.inner_state)
    numbered = trees.find(tree.unflatten(range(len(leaves))), optax.PartitionState)
    if not numbered:
        return change(state)

    def step(leaves: list[jax.Array]) -> Stepped:
        return change(state._replace(inner_state=tree.unflatten(leaves)))

    traced = trees.Replay(*jax.make_jaxpr(step, return_shape=True)(leaves))
    none, numbers = frozenset[int](), [frozenset([i]) for i in range(len(leaves))]
    facts = interpret.flow(traced.program, numbers, None, lambda x: none.union(*x), none)
    value, new = traced(leaves)
    read = none.union(*facts[: len(jax.tree.leaves(value))])
    unread = {i for i, x in enumerate(leaves) if not (x.ndim and trees.is_inexact(x.dtype))} - read
    parts = [{*jax.tree.leaves(x)} for y in numbered for x in y.inner_states.values()]
    resting = {i for part in parts if part <= unread for i in part}
    changed = enumerate(jax.tree.leaves(new.inner_state))
    inner = tree.unflatten([leaves[i] if i in resting else x for i, x in changed])
    return value, new._replace(inner_state=inner)


def _at_step(state: PyTree, step: jax.Array) -> PyTree:
    """Set the counts of Optax's schedules, in the state of one depth, to the steps of the run."""
    # The states of ``optax.scale_by_schedule``, ``optax.add_decayed_weights`` and
    # ``optax.inject_hyperparams``.
    classes = ("ScaleByScheduleState", "WeightDecaySchedule", "WrappedScheduleState")
    return jax.tree.map(
        lambda x: x._replace(count=step) if type(x).__name__ in classes else x,
        state,
        is_leaf=lambda x: type(x).__name__ in classes,
    )


@checks.arguments
def scheduled_freeze(
    inner: optax.GradientTransformation,
    groups: PyTree = None,
    schedule: Any = None,
    *,
    frozen: PyTree = None,
    moments: Moments = "shared",
    repeat: bool = False,
) -> ScheduledFreeze:
    r"""Train only the groups from the scheduled depth on; freeze all earlier groups.

    At a step of depth :math:`d` the leaves of groups :math:`0 \dots d-1` are frozen. Their params,
    moments, accumulated gradients and residuals stay unchanged bit for bit. ``inner`` receives an
    ``optax.MaskedNode`` for each frozen leaf, so frozen leaves take no part in clipping, weight
    decay, checks of finiteness and reductions. A later step of smaller depth trains these leaves
    again, from the values before the freeze. The state of a part of ``optax.partition`` stays
    unchanged, counts included, in steps that train none of the part's leaves.

    Put ``scheduled_freeze`` around scalers and windows, and put ``average_params`` and ``on_mesh``
    around ``scheduled_freeze``. ``make_train_step`` compiles one step for each depth that the
    schedule draws. Each step differentiates only the active leaves, so the backward pass ends at
    the first active layer. In your own loop, pass the depth as a Python integer to ``active`` and
    ``apply_gradients``. Here ``freeze`` is the result of ``scheduled_freeze``, and ``tx`` is
    ``freeze`` or a transformation around ``freeze``::

      active = freeze.active(params, depth)
      loss, grads = boostax.value_and_grad(loss_fn)(params, opt_state, batch, active=active)
      params, opt_state = boostax.apply_gradients(tx, grads, opt_state, params, depth=depth)

    Without ``depth``, the compiled program reads the depth from the state, and gradients must have
    every leaf. With ``active=freeze.choice(params, opt_state)``, such a program also ends the
    backward pass at the first active layer. Use this form for ``jax.lax.scan`` over steps. One
    warning reports a backward pass in this program that computes the gradients of all params, or a
    schedule that freezes nothing from the first step of the run on.

    The schedule counts applied steps, so the depth changes only when an accumulation window closes.
    If a loss scaler skips a step, the next step has the same depth.

    Without a schedule, ``scheduled_freeze(inner, mask)`` trains only the leaves that the mask
    marks, in the complete run. The params are those of ``optax.chain(inner,
    optax.masked(optax.set_to_zero(), not_mask))``, but frozen leaves have no gradients, no state
    and no reductions.

    Args:
      inner: the optimizer with its gates and reductions; its state must have a separate array per
        leaf.
      groups: the result of ``prefix_groups``, ``param_groups`` or ``mindspore_groups``; any tree of
        integers 0, 1, ... like the params, or a prefix of such a tree; a function ``(path, leaf) ->
        group``; or a list with a pattern of paths, or a list of patterns, for each group. Leaves
        without a match form one more group. Without a schedule, ``groups`` is the mask of the
        leaves that train: bools or the words ``"train"`` and ``"freeze"``, in a tree like the
        params or a prefix of such a tree; a function ``(path, leaf) -> bool``; a function of the
        params that returns a mask; or a list of patterns of the paths that train.
      schedule: the result of ``freeze_schedule``; a function from the step, a Python int, to the
        depth, evaluated for 65536 steps (``freeze_schedule(f, total_steps=)`` allows more); a
        sequence of depths; or one depth, at which all earlier groups are frozen permanently, and
        have no moments.
      frozen: a mask in the same forms, in which True, or a pattern, marks the frozen leaves, as in
        ``optax.freeze(mask)`` and ``optax.masked(optax.set_to_zero(), mask)``.
      moments: ``"per_group"`` stores an optimizer state for each depth, as MindSpore does. The
        counters and moments of a depth change only in steps of that depth, but the optimizer's
        schedules count all steps of the run, as MindSpore's lists of rates do. Do not use
        ``"per_group"`` with optimizers that keep a copy of the params (schedule-free), because the
        copy would be stale.
      repeat: whether the schedule starts again at its end.

    Returns:
      A transformation with a ``ScheduledFreezeState``. Cost: ``4 * (3 + groups)`` bytes and no
      time; the state of ``inner`` for the leaves that are ever trained (with ``"per_group"``, for
      each depth the leaves trained at that depth). Without ``depth``, the program has a copy of the
      optimizer's code for each depth, and a step runs one copy. With 2, 4 and 10 depths, 1.5, 2.5
      and 5.5 times as many operations are compiled.

    Raises:
      ValueError, TypeError: an argument out of range; from ``init``, groups that do not match the
        params; from ``init``, if the depth changes, an ``inner`` that flattens leaves into one
        array, is an ``optax.MultiSteps`` or keeps per-replica params; at trace time, a ``depth``
        that the schedule never draws. If a schedule is shorter than the run, ``make_train_step``
        raises at the schedule's end; a program without ``depth`` keeps the last depth.

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
      >>> # A thaw: "a" trains from step 100 on.
      >>> thaw = boostax.scheduled_freeze(optax.adam(0.1), {"a": 0, "b": 1}, lambda i: int(i < 100))
      >>> # Training by turns: each optimizer counts only its own steps.
      >>> mask = {"a": True, "b": False}
      >>> turns = [boostax.scheduled_freeze(optax.adam(0.1), mask)]
      >>> turns.append(boostax.scheduled_freeze(optax.adam(0.1), frozen=mask))
      >>> states = [tx.init(w) for tx in turns]
      >>> for i in (0, 1, 0, 1, 0):
      ...   w, states[i] = boostax.apply_gradients(turns[i], grads, states[i], w)
      >>> [int(state.inner_state[0].count) for state in states]
      [3, 2]

    References:
      Brock et al., FreezeOut, https://arxiv.org/abs/1706.04983, 2017. MindSpore 2.10,
      ``GradientFreeze`` and ``FreezeOpt``.
    """
    tx = checks.transformation(_WHO, "inner", inner)
    checks.choice(_WHO, "moments", moments, Moments, "'shared' stores one state for all depths.")
    if schedule is None or frozen is not None:
        groups, schedule = for_a_run(_WHO, groups, frozen, schedule), 1
    known, repeat = as_schedule(schedule, repeat)
    freezing = Freezing(tx, groups, known, moments, repeat)

    # With ``moments='per_group'``, the field has a tuple of states and not a state, so the field
    # has another name.
    @describe(_WHO, "freeze", inner={"inner_state" if moments == "shared" else "inner_states": tx})
    def step_fn(
        grads: gate.Pending,
        state: ScheduledFreezeState,
        params: PyTree,
        *,
        apply: bool,
        depth: int | None = None,
        **extra: Any,
    ) -> Stepped:
        trees.require_params(params, _WHO, "The groups are computed from the params.")
        outside = state

        def step(depth: int, value: PyTree, state: ScheduledFreezeState) -> Stepped:
            handshake.hand_on(outside, state)
            plan = freezing.plan(params)
            active = plan.active(depth)
            # The caller may have masked the gradients for another depth.
            holes = jax.tree.map(lambda x, g: x and trees.is_masked(g), active, grads.raw)
            is_valid = not any(jax.tree.leaves(holes))
            allowed = f"those that depth {depth} trains"
            hint = "Pass the same depth to apply_gradients as to tx.active(params, depth)."
            checks.require(is_valid, _WHO, "gradients", "masked leaves", allowed, hint)
            freezing.report_idle(active, grads.raw, outside)
            pending = gate.Pending(trees.masked(grads.raw, active), grads.factors)
            trees.require_gradients(pending.raw, _WHO, carried=True)
            more = elsewhere(extra, lambda trial: trees.unmasked(trial, params))
            if "grad" in extra:
                more["grad"] = trees.masked(extra["grad"], active)
            old = value if apply else trees.masked(params, active)
            value, new = gate.call(tx, pending, state.inner_state, old, apply=apply, extra=more)
            return value, _following(plan, state, depth, gate.passed(new), new)

        value = params if apply else jax.tree.map(jnp.zeros_like, params)
        return freezing.changed(params, depth, step, (value, state))

    def flush_fn(
        state: ScheduledFreezeState, params: PyTree, *, depth: int | None = None, **extra: Any
    ) -> Stepped:
        def close(depth: int, value: PyTree, state: ScheduledFreezeState) -> Stepped:
            before = gate.held_open(state.inner_state)
            value, new = gate.flush_inner(tx, state.inner_state, value, extra)
            # A window that was open and is now closed was applied, unless a scaler inside skipped
            # the step.
            ok = before & gate.passed(new)
            return value, _following(freezing.plan(params), state, depth, ok, new)

        return freezing.changed(params, depth, close, (params, state))

    made = gate.gated(functools.partial(_init, freezing), step_fn, flush_fn)
    return ScheduledFreeze(made.init, FreezingUpdate(**vars(made.update), variants=freezing))


def active_groups(opt_state: PyTree) -> jax.Array:
    """Return bools that are True for the groups that the next call trains.

    Args:
      opt_state: any state that contains a ``ScheduledFreezeState``.

    Returns:
      Bools ``[groups]``.

    Raises:
      ValueError: the state has no ``ScheduledFreezeState``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.scheduled_freeze(optax.sgd(1.0), {"a": 0, "b": 1}, 1)
      >>> boostax.freeze.active_groups(tx.init({"a": jnp.zeros(3), "b": jnp.zeros(3)})).tolist()
      [False, True]
    """
    hint = "Wrap the optimizer in scheduled_freeze."
    state = trees.state_of("active_groups", opt_state, ScheduledFreezeState, hint)
    return jnp.arange(state.trained_steps.size) >= state.next_depth
