# SPDX-License-Identifier: Apache-2.0
"""Drop-in forms of Optax's ``MultiSteps`` and ``apply_if_finite``.

The two wrappers have Optax's names, arguments and fields. They are built on ``accumulate`` and
``gate``.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, bound_axis, checks, trees
from boostax._core.describe import Stepped, describe
from boostax._core.gate import Pending, counted, gated, passed
from boostax._core.norms import all_finite, largest_magnitudes
from boostax._core.replicas import PerReplica
from boostax._core.rule import GateState, gate
from boostax._core.types import PyTree
from boostax.accumulate.window import AccumulateState, accumulate

# A ``ShouldSkip`` accepts updates, the number of optimizer steps and the params. It returns whether
# to skip the updates, and the new ``skip_state``.
ShouldSkip: TypeAlias = Callable[[PyTree, jax.Array, PyTree], tuple[jax.Array, PyTree]]


class MultiStepsState(NamedTuple):
    """State of ``MultiSteps``, with Optax's field names as properties.

    Attributes:
      gate_state: state of ``accumulate``; with ``should_skip_update_fn``, state of the gate around
        ``accumulate``.
    """

    gate_state: AccumulateState | GateState
    _is_mean = True

    window = property(
        lambda x: x.gate_state.inner_state if isinstance(x.gate_state, GateState) else x.gate_state,
        doc="State of ``accumulate``.",
    )
    skip_state = property(
        lambda x: x.gate_state.rule_state if isinstance(x.gate_state, GateState) else (),
        doc="The last state that ``should_skip_update_fn`` returned; ``()`` without that function.",
    )

    @property
    def acc_grads(self) -> PyTree:
        """Mean or sum of an open window's gradients; ``None`` for windows of one micro-step."""
        state = self.window
        window = state.window.local if isinstance(state.window, PerReplica) else state.window
        share = 1.0 / jnp.maximum(state.micro_step, 1) if self._is_mean else 1.0
        is_open = state.micro_step > 0
        sums = None if window is None else window.grads
        # A stale sum may contain NaN, which a product with zero would not remove.
        return jax.tree.map(lambda x: jnp.where(is_open, x * share, 0).astype(x.dtype), sums)

    mini_step = property(lambda x: x.window.micro_step, doc="i32, micro-steps in the open window.")
    gradient_step = property(lambda x: x.window.optimizer_steps, doc="i32, applied windows.")
    inner_opt_state = property(lambda x: x.window.inner_state, doc="State of the optimizer.")


class MultiStepsSumState(MultiStepsState):
    """State of ``MultiSteps`` with ``use_grad_mean=False``; its ``acc_grads`` is a sum.

    Attributes:
      gate_state: see ``MultiStepsState``.
    """

    _is_mean = False


class MultiSteps:
    """Accumulate gradients as ``optax.MultiSteps`` does; a branch runs ``opt`` once per window.

    With ``boostax.all_reduce`` in ``opt`` and local gradients (``axis_name``), the replicas reduce
    once per window. A NaN in one window does not reach the next window. With
    ``boostax.apply_gradients``, only the last micro-step of a window writes params.

    Differences from Optax:

    * ``opt`` computes in f32 or wider, and updates have the dtypes of the params.
    * An ``opt`` with the argument ``value`` receives the loss of the window, not of the last call.
    * After a window that a gate in ``opt`` skipped, ``gradient_step`` does not increase and
      ``has_updated`` returns False.
    * After a call that ``should_skip_update_fn`` skipped, ``has_updated`` returns False.
    * ``acc_grads`` is ``None`` for windows of one micro-step.
    * A line search, and windows of less than one micro-step, are refused.

    Args:
      opt: the optimizer.
      every_k_schedule: micro-steps per window, or a function of the number of applied windows.
      use_grad_mean: whether ``opt`` receives the mean of a window's gradients, and not their sum.
      should_skip_update_fn: ``fn(updates, gradient_step, params) -> (skip, skip_state)``, such as
        ``optax.skip_not_finite``. A skipped micro-step changes only ``skip_state``. With
        ``axis_name``, all replicas skip if one replica skips, and all replicas keep the largest
        value of each number in ``skip_state``.
      accumulator_dtype: dtype of the sum.
      axis_name: replica axis (or axes); gradients are then local, see
        ``boostax.train.local_params``. With ``None``, a train step supplies its own axis if a part
        of ``opt`` reduces; without a train step, there are no replicas.

    Attributes:
      inner_opt: the optimizer.
      init: makes a ``MultiStepsState``.
      update: as in Optax. Pass ``gradient_transformation()`` to ``boostax.apply_gradients``,
        ``make_train_step`` and ``flush``. Cost: as ``accumulate``, and the reads of
        ``should_skip_update_fn``. With ``axis_name``, each call with ``should_skip_update_fn`` also
        sends 4 bytes, and 4 bytes for each number in ``skip_state``.

    Raises:
      ValueError, TypeError: a window of less than one micro-step, or an error of ``accumulate``; at
        trace time, a ``skip`` that is not a bool scalar.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> windows = boostax.compat.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
      >>> tx, w = windows.gradient_transformation(), jnp.float32(0.0)
      >>> state = tx.init(w)
      >>> for g in (1.0, 3.0):
      ...   w, state = boostax.apply_gradients(tx, jnp.float32(g), state, w)
      >>> float(w), int(state.gradient_step), bool(windows.has_updated(state))
      (-2.0, 1, True)

    References:
      https://optax.readthedocs.io/en/latest/api/optimizer_wrappers.html
    """

    def __init__(
        self,
        opt: optax.GradientTransformation,
        every_k_schedule: int | Callable[[jax.Array], jax.Array | int],
        use_grad_mean: bool = True,
        should_skip_update_fn: ShouldSkip | None = None,
        accumulator_dtype: jax.typing.DTypeLike = "float32",
        *,
        axis_name: axes.AxisName | None = None,
    ) -> None:
        who = type(self).__name__
        self.inner_opt = checks.transformation(who, "opt", opt)
        how: Any = {"normalize": "mean" if use_grad_mean else "sum", "axis_name": axis_name}
        tx = accumulate(self.inner_opt, every_k_schedule, dtype=accumulator_dtype, **how)
        kind = MultiStepsState if use_grad_mean else MultiStepsSumState
        if should_skip_update_fn is None:
            self.init, self.update = _renamed(who, tx, kind)
            return
        # The gate keeps (gradient_step, skip_state). The renamed state keeps only skip_state,
        # because the window's state has the count.
        self.init, self.update = _renamed(
            who,
            _skipping(tx, should_skip_update_fn, axis_name),
            lambda state: kind(state._replace(rule_state=state.rule_state[1])),
            lambda x: x.gate_state._replace(rule_state=(x.gradient_step, x.skip_state)),
        )

    def has_updated(self, state: PyTree) -> jax.Array:
        """Return whether the last call closed a window whose result was applied."""
        return passed(state)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Return ``init`` and ``update`` as one transformation that accepts extra arguments."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)


@bound_axis.gate
def _skipping(
    tx: optax.GradientTransformation, skips: ShouldSkip, axis_name: axes.AxisName | None
) -> optax.GradientTransformationExtraArgs:
    """Put a gate around the window; the gate's state has ``(gradient_step, skip_state)``."""
    names = axes.canonical("MultiSteps", axis_name)

    def rule(grads: Pending, state: PyTree, params: PyTree) -> tuple[jax.Array, PyTree]:
        step, _ = state
        skip, skip_state = skips(grads.value(), step, params)
        if names:  # A bool has no maximum over replicas; adding 0 makes an integer of the bool.
            skip_state = jax.tree.map(lambda x: axes.largest(x + 0, names), skip_state)
        # The gate refuses a value that is not a bool scalar.
        return jnp.invert(skip), (step, skip_state)

    def init(params: PyTree) -> PyTree:
        step = jnp.zeros((), jnp.int32)
        zeros = jax.tree.map(jnp.zeros_like, trees.at_least_float32(params))
        return step, skips(zeros, step, params)[1]

    return gate(tx, rule, init=init, axis_name=axis_name, name="should_skip_update_fn")


def _renamed(
    who: str,
    tx: optax.GradientTransformation,
    wrap: Callable[..., PyTree],
    unwrap: Callable[..., PyTree] = operator.attrgetter("gate_state"),
) -> optax.GradientTransformationExtraArgs:
    """Return ``tx`` with a state from ``wrap``, whose ``gate_state`` is the state of ``tx``."""
    update: Any = tx.update

    @describe(who, "nothing", inner={"gate_state": tx})
    def step_fn(
        grads: Pending, state: PyTree, params: PyTree, *, apply: bool, **extra: Any
    ) -> Stepped:
        value, state = update.step(grads, unwrap(state), params, apply=apply, **extra)
        return value, wrap(state)

    def flush_fn(state: PyTree, params: PyTree, **extra: Any) -> Stepped:
        params, state = update.flush(unwrap(state), params, **extra)
        return params, wrap(state)

    return gated(lambda params: wrap(tx.init(params)), step_fn, flush_fn)


class ApplyIfFiniteState(NamedTuple):
    """State of ``apply_if_finite``, with Optax's field names as properties.

    A bad step is a step whose gradients are not finite.

    Attributes:
      gate_state: state of the gate: ``inner_state`` is the state of ``inner``, and ``rule_state``
        has the counts of bad steps.
    """

    gate_state: GateState

    inner_state = property(lambda x: x.gate_state.inner_state, doc="State of ``inner``.")
    notfinite_count = property(lambda x: x.gate_state.rule_state[0], doc="i32, bad steps in a row.")
    last_finite = property(
        lambda x: x.gate_state.rule_state[1], doc="bool, whether the last gradients were finite."
    )
    total_notfinite = property(lambda x: x.gate_state.rule_state[2], doc="i32, all bad steps.")


@bound_axis.gate
def apply_if_finite(
    inner: optax.GradientTransformation,
    max_consecutive_errors: int,
    *,
    axis_name: axes.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose gradients are not finite, up to a number of such steps in a row.

    This is ``optax.apply_if_finite`` as a gate. With ``boostax.apply_gradients``, a skipped step
    writes no params. With ``axis_name``, all replicas skip if one replica has bad gradients. After
    ``max_consecutive_errors`` skipped steps in a row, bad gradients are applied, as Optax
    documents; ``skip_bad_steps(inner)`` never applies bad gradients. Unlike in Optax, ``inner``
    computes in f32 or wider, updates have the dtypes of the params, and gradients of integers are
    refused.

    Args:
      inner: the optimizer.
      max_consecutive_errors: the number of bad steps in a row that are skipped; the next bad step
        is applied.
      axis_name: see ``dynamic_loss_scale``.

    Returns:
      A transformation with an ``ApplyIfFiniteState``. Cost: 14 bytes of state, one read of the
      gradients, and with ``axis_name`` two collectives of 4 bytes.

    Raises:
      TypeError, ValueError: as ``boostax.gate``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.compat.apply_if_finite(optax.sgd(1.0), 1)
      >>> w, state = jnp.float32(1.0), tx.init(jnp.float32(1.0))
      >>> for _ in range(2):
      ...   w, state = boostax.apply_gradients(tx, jnp.float32("nan"), state, w)
      ...   print(float(w), int(state.notfinite_count))
      1.0 1
      nan 2

    References:
      https://optax.readthedocs.io/en/latest/api/transformations.html
    """

    def rule(grads: Pending, state: PyTree, params: PyTree) -> tuple[jax.Array, PyTree]:
        in_a_row, _, total = state
        largest = [grads._replace(raw=x).value() for x in largest_magnitudes(grads.raw)]
        ok = all_finite(largest, axis_name=axis_name)
        in_a_row = jnp.where(ok, 0, optax.safe_increment(in_a_row))
        return ok | (in_a_row > max_consecutive_errors), (in_a_row, ok, counted(total, ~ok))

    who = "apply_if_finite"
    zero = functools.partial(jnp.zeros, (), jnp.int32)
    tx = gate(
        inner, rule, init=lambda _: (zero(), jnp.bool_(True), zero()), axis_name=axis_name, name=who
    )
    return _renamed(who, tx, ApplyIfFiniteState)
