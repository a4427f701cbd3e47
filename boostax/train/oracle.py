# SPDX-License-Identifier: Apache-2.0
"""The gradient function, which returns scaled, local gradients of a loss."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, Generic, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, PartitionSpec

from boostax._core import (
    axes,
    bcoo,
    checks,
    handshake,
    interpret,
    jaxprs,
    mismatch,
    placement,
    trees,
)
from boostax._core.bcoo import DENSE, is_sparse
from boostax._core.gate import Pending, gate_of
from boostax._core.replicas import PerReplica, is_per_replica
from boostax._core.trees import is_aside, path_name
from boostax._core.types import Grads, Params, PyTree, Value
from boostax.accumulate import aux as auxiliary
from boostax.accumulate import carried, microbatch
from boostax.accumulate.aux import Aux, as_aux, as_given, drop_empty, own_of, total
from boostax.accumulate.microbatch import Count, stacked_count
from boostax.accumulate.window import terms_of
from boostax.freeze.stages import Choice, staged
from boostax.precision.loss_scale import scales as scales_of
from boostax.precision.policy import Level, Policy, as_policy

_ROWS = "Let loss_fn take the batch: arrays that it closes over are not split over replicas."
# Hints for a loss that does not take an argument, by argument.
_TAKEN = {
    "scales": "Add scales=None to its arguments, and a boostax.precision.scale_boundary to every "
    "edge between groups.",
    "key": "Add key=None to its arguments, or start the state without a key.",
    "model_state": "Add model_state=None to its arguments, or start the state without one.",
}

_Loss = Callable[Concatenate[Params, ...], Value]
_WHO = "value_and_grad"
_CALL = "boostax.value_and_grad(loss_fn)(params, opt_state, batch)"


class _How(TypedDict, total=False):
    axis_name: axes.AxisName | None
    policy: Policy | Level | None
    microbatches: Count
    accumulator_dtype: Any


class _Local(_How, total=False):
    mesh: None


class _Mapped(_How, total=False):
    mesh: Mesh | None
    has_aux: bool
    layers: optax.GradientTransformation | None


@overload
def value_and_grad(
    loss_fn: _Loss[Params, Any], *, has_aux: Literal[False] = False, **how: Unpack[_Local]
) -> Oracle[jax.Array, Params, Params]: ...
@overload
def value_and_grad(
    loss_fn: _Loss[Params, tuple[Any, Value]], *, has_aux: Literal[True], **how: Unpack[_Local]
) -> Oracle[tuple[jax.Array, Value], Params, Params]: ...
@overload
def value_and_grad(loss_fn: Callable[..., Any], **how: Unpack[_Mapped]) -> Oracle: ...
@checks.arguments
def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    axis_name: axes.AxisName | None = None,
    mesh: Mesh | None = None,
    policy: Policy | Level | None = None,
    microbatches: Count = 1,
    has_aux: bool = False,
    accumulator_dtype: Any = jnp.float32,
    layers: optax.GradientTransformation | None = None,
) -> Oracle:
    r"""Differentiate a loss like ``jax.value_and_grad``, for an optimizer of boostax.

    The loss is multiplied in f32 by the loss scale in ``opt_state``, so the gradients are
    multiplied by the scale; the returned loss is unscaled. With ``axis_name`` the gradients are
    *local* to each replica, and loss and ``Aux.metrics`` are averaged over the replicas. The mean
    of the local gradients is the gradient of the mean of all replicas' losses, even if ``loss_fn``
    itself averages or sums over the replicas (``lax.pmean`` of batch statistics, or of the whole
    loss). If the loss returns ``Aux(weight=...)``, replica :math:`r`'s gradient is multiplied by
    :math:`n\,w_r / \sum w`, so that the mean over replicas is the mean over all tokens. Gradients
    of leaves that ``boostax.carry`` names are returned unscaled and unaveraged, and combined over
    micro-batches by the rules of ``carry``.

    A loss of several terms, each a mean with its own count (of tokens, of rows), returns ``{"ce":
    (sum, count), "z": (0.1 * sum, count)}`` instead of a scalar. The loss is then :math:`\sum_t S_t
    / N_t` with sums and counts of the whole batch, however it is divided into micro-batches and
    replicas; a term with count 0 is 0. Sums and counts may be arrays, which are summed in f32 or
    wider. Counts are not differentiated, and are summed before the single backward pass. For a
    window over several calls, name the terms in ``boostax.accumulate(normalize=)``.

    Inside ``shard_map`` or ``pmap``, ``axis_name`` is an axis of the surrounding function. With
    ``mesh``, call the result in plain ``jit`` on global arrays: the loss is mapped over the replica
    axes only, with ``check_vma=False``, so any loss works. Other axes are left to XLA, or on an
    Explicit mesh to the loss. Gradients are a ``PerReplica`` of stacked arrays, for
    ``boostax.on_mesh``. Only the loss and ``Aux`` are reduced.

    Args:
      loss_fn: ``loss_fn(params, batch)``, with ``key=`` and ``model_state=`` if these are given,
        and with ``scales=`` if the state has a loss scale per group (see ``scale_boundary``). It
        returns a scalar loss or a dict of terms, or ``(loss, aux)`` with ``has_aux``; see ``Aux``.
      axis_name: replica axis (or axes) of the surrounding ``shard_map`` or ``pmap``, or of
        ``mesh``; by default the only axis of ``mesh``.
      mesh: for plain ``jit``, the mesh with the replica axes.
      policy: precision policy for ``loss_fn``; see ``boostax.policy``.
      microbatches: number of micro-batches to scan over; see ``boostax.train.microbatch``.
        ``"stacked"`` is for a batch ``[k, rows, ...]`` as for ``lax.scan``, whose rows are split
        over the replicas.
      has_aux: as in ``jax.value_and_grad``. A ``boostax.Aux`` is combined over micro-batches and
        replicas. Any other aux is returned unchanged: stacked over micro-batches on a leading
        dimension ``[microbatches]``; local to the replica inside ``shard_map`` or ``pmap``; with
        ``mesh`` a ``PerReplica`` of stacked arrays, like the gradients.
      accumulator_dtype: dtype of the gradient sum over micro-batches.
      layers: the optimizer from ``boostax.on_mesh(layers=)``, if the loss uses ``scan_layers``.

    Returns:
      ``fn(params, opt_state, batch, *, active=True, key=None, model_state=None)`` that returns
      ``(loss, grads)``, or ``((loss, aux), grads)`` with ``has_aux``. ``active`` is a tree of bools
      like the params, or a prefix of one: an inactive leaf is not differentiated, and its gradient
      is an ``optax.MaskedNode``. ``active`` may also be ``tx.choice(params, opt_state)`` of a
      ``scheduled_freeze``, which is evaluated in the program. A leaf that is not an array is passed
      to the loss unchanged, and its gradient is ``None``: a function in an Equinox module, a bool,
      or among traced arrays a Python number. Cost: with ``axis_name`` one scalar all-reduce for
      the loss, one all-reduce per leaf of ``Aux`` and three per term; see
      ``boostax.train.microbatch``. The counts of terms cost only their own computation, such as a
      mask, not the model. ``fn.loss_at(batch, *, key=None, model_state=None)`` returns the loss as
      a function of only the params, for line searches.

    Raises:
      ValueError, TypeError: an argument out of range; at trace time, a loss that is not a floating
        scalar, a batch that does not divide, an unbound axis, a window that does not name the
        loss's terms, a weight together with terms, a weight for a loss whose gradient crosses
        replicas, or with ``mesh`` a loss that itself differentiates a sum over the replicas.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> state = boostax.static_loss_scale(optax.sgd(0.1), 128.0).init(jnp.float32(1.0))
      >>> f = boostax.value_and_grad(lambda w, x: w * jnp.mean(x))
      >>> f(jnp.float32(1.0), state, jnp.ones(4))
      (Array(1., dtype=float32), Array(128., dtype=float32))
      >>> def loss(w, x):  # of 0 to 3 only 1, 2 and 3 count in the first term
      ...   return {"ce": (w * x, x > 0), "decay": (0.1 * w**2, 1)}
      >>> f = boostax.value_and_grad(loss, microbatches=2)
      >>> f(jnp.float32(1.0), (), jnp.arange(4.0))
      (Array(2.1, dtype=float32), Array(2.2, dtype=float32))
    """
    count, precision = microbatch.require_count(_WHO, microbatches), as_policy(policy)
    names = axes.of_mesh(_WHO, axis_name, mesh)

    @functools.wraps(loss_fn)
    def of_model(params: PyTree, /, *args: Any, **kwargs: Any) -> Any:
        return loss_fn(trees.restored(params), *args, **kwargs)

    computed = of_model if precision is None else precision.compute(of_model)
    made = Oracle(loss_fn, computed, names, count, has_aux, jnp.dtype(accumulator_dtype), mesh)
    if layers is None:
        return made
    around = getattr(getattr(layers, "update", None), "around", None)
    hint, allowed = "boostax.on_mesh(tx, params, layers=...) returns it.", "the optimizer on a mesh"
    checks.require_type(around is not None, _WHO, "layers", got=layers, allowed=allowed, hint=hint)
    return around(made, precision)  # pyright: ignore[reportOptionalCall]


class Gradients(NamedTuple):
    """The gradients of a step in which some leaves are averaged, or updated, already.

    Attributes:
      local: gradients of each replica; a ``PerReplica`` in plain ``jit``. The leaves of the other
        fields are an ``optax.MaskedNode``.
      averaged: gradients that are averaged over the replicas, a tree like the params; or ``()``.
      applied: new params and optimizer state that the backward pass computed; or ``()``.
    """

    local: PyTree
    averaged: PyTree = ()
    applied: Any = ()

    def as_row(self) -> Gradients:
        """Return one replica's gradients with a leading dimension of size 1."""
        return self._replace(local=PerReplica(_as_row(self.local)))

    def entered(self) -> PyTree:
        """Return one replica's gradients without that dimension; ``applied`` is kept."""
        local = self.local.local if is_per_replica(self.local) else self.local
        if self.averaged:
            either = lambda x, y: y if trees.is_masked(x) else x  # noqa: E731
            local = jax.tree.map(either, local, self.averaged, is_leaf=trees.is_masked)
        return Gradients(local, applied=self.applied) if self.applied else local


@dataclasses.dataclass(frozen=True)
class Oracle(Generic[Value, Params, Grads]):
    """The gradient function that ``value_and_grad`` returns.

    Attributes:
      loss_fn: the user's loss.
      computed: the loss with the policy applied.
      names: the replica axes.
      count: micro-batches of a call.
      has_aux: see ``value_and_grad``.
      accumulator_dtype: dtype of the gradient sum over micro-batches.
      mesh: the mesh over whose replica axes the loss is mapped, on global arrays; ``None`` inside a
        mapped function, or on one device.
      watch: called in each trace with the nonlinear backward rules of the loss; ``None`` without a
        loss scale.
    """

    loss_fn: Callable[..., Any]
    computed: Callable[..., Any]
    names: tuple[str, ...]
    count: Count
    has_aux: bool
    accumulator_dtype: np.dtype[Any]
    mesh: Mesh | None = None
    watch: Callable[[list[str]], None] | None = None

    def inputs(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree, Gradients]:
        """Return what ``local`` differentiates, with the specs of it and of its gradients.

        The first specs are ``None`` for params that each replica gets unsharded, or has itself.
        """
        return params, None, Gradients(PartitionSpec(self.names))

    @property
    def reads(self) -> bool:
        """Return whether the loss's program is read before differentiation."""
        return self.mesh is not None

    def judge(self, program: Any, trained: PyTree) -> None:
        """Refuse a loss by its program, which is a function of the leaves of ``trained``."""
        # Without types JAX sums the cotangents of a sum over the replicas. This is correct for a
        # gradient that is taken outside the mapped function and averaged over the replicas, but
        # wrong for a gradient that is taken inside, for one replica.
        inside = of_transposes(program) & frozenset(self.names)
        if inside:
            raise ValueError(
                "value_and_grad: loss_fn must not differentiate a sum or mean over the replicas "
                "itself (jax.grad of lax.psum or lax.pmean), got one over "
                f"{', '.join(sorted(inside))}. Average the gradient, not what it is taken of: "
                "lax.pmean(jax.grad(local)(x), axis)."
            )

    @property
    def replicas(self) -> int:
        """Return the number of replicas, where their axes are bound."""
        return axes.size(self.names) if self.names else 1

    @property
    def rows(self) -> PartitionSpec:
        """Return the spec of a batch."""
        return PartitionSpec(*[None] * (self.count == "stacked"), self.names)

    @checks.arguments
    def __call__(
        self, params: Params, opt_state: Any, batch: Any, /, *, active: Any = True, **given: Any
    ) -> tuple[Value, Grads]:
        """Return ``(loss, grads)``, or ``((loss, aux), grads)``, of one batch."""
        given_all = {"params": params, "opt_state": opt_state, "batch": batch}
        with mismatch.explaining(mismatch.require_order, _WHO, _CALL, **given_all):
            value, grads = self.with_aux(params, opt_state, batch, active, given)
            return (value if self.has_aux else value[0]), grads

    def with_aux(
        self, params: PyTree, opt_state: PyTree, given_batch: PyTree, active: PyTree, kwargs: Any
    ) -> tuple[Any, PyTree]:
        """Return ``((loss, aux), grads)``, even if ``loss_fn`` has no aux."""
        whole, params = params, trees.aside(params)
        said: PyTree = True
        if active is not True:
            own = is_per_replica(params)
            apart = params.local if own else params
            if isinstance(active, Choice):
                at, options = active
                active = Choice(at, tuple(of_arrays(x, apart) for x in options))
            else:
                said = _active(active, whole.local if own else whole)
                active = of_arrays(said, apart)
        if self.mesh is None:
            axes.require_bound(self.names, _WHO, hint="in plain jit pass the mesh, too: mesh=.")
        else:
            require_trainable(_WHO, _trained(params, active))
            if self.rows[0] is None:
                stacked_count(given_batch, _WHO, least=2)
        scale, scales = scales_of("loss_scale", opt_state)
        rules = carried.declared(opt_state, params, _WHO)
        given = _given(kwargs | {"scales": scales})
        apart = terms_of(opt_state)
        with scaling(opt_state):
            params, specs, of_grads = self.inputs(params, opt_state)
            if self.mesh is None:
                value, grads = self.local(params, given_batch, scale, given, active, rules, apart)
                return value, trees.without_gradient(grads.entered(), said)

            at, options = active if isinstance(active, Choice) else (None, ())
            given_aux: PyTree = Aux()

            def each(
                params: PyTree, batch: PyTree, given: dict[str, Any], scale: jax.Array, at: Any
            ) -> tuple[Any, PyTree, Gradients]:
                nonlocal given_aux
                handshake.hand_on(scales, given.get("scales"))
                chosen = active if at is None else Choice(at, options)
                value, grads = self.local(params, batch, scale, given, chosen, rules, apart)
                loss, given_aux = value
                return (loss, as_aux(given_aux)), _as_row(own_of(given_aux)), grads.as_row()

            run = self._mapped(each, (PartitionSpec(), PartitionSpec(self.names), of_grads), specs)
            (loss, told), own, grads = run(params, given_batch, given, scale, at)
        aux = as_given(told, PerReplica(own), given_aux)
        said = said if said is True else Gradients(PerReplica(said))
        grads = trees.without_gradient(grads, said)
        return (loss, aux), grads if any(grads[1:]) else grads.local

    def loss_at(self, batch: PyTree, /, **kwargs: Any) -> Callable[[PyTree], jax.Array]:
        """Return the loss of a batch as a function of the params."""
        args = batch, _given(kwargs)
        if not self.names:
            return lambda params: self._loss(trees.aside(params), *args)
        both = self._loss, self._slope
        if self.mesh is not None:
            both = (outside(self._mapped(fn, PartitionSpec())) for fn in both)
        loss = differentiable(*both, args)
        return lambda params: loss(trees.aside(params))

    def local(
        self,
        params: PyTree,
        batch: PyTree,
        scale: jax.Array,
        given: dict[str, Any],
        active: PyTree,
        rules: carried.Rules,
        apart: tuple[str, ...] | None = None,
        /,
    ) -> tuple[Any, Gradients]:
        """Return one replica's loss, aux and gradient; with ``apart``, a gradient per term."""
        hint = "boostax.states.enter_replica(params).local is."
        got, fits = type(params).__name__, not is_per_replica(params)
        checks.require(fits, _WHO, "params", got=got, allowed="those of this replica", hint=hint)
        active, names = _active(active, params), self.names
        require_trainable(_WHO, _trained(params, active))

        def evaluate(params: PyTree, rows: PyTree, counts: Any, scale: Any, /, **given: Any) -> Any:
            """Return the loss and the gradient of one micro-batch."""

            def scaled_loss(trained: PyTree) -> tuple[jax.Array, tuple[jax.Array, PyTree]]:
                result = self._loss_and_aux(trained, params, rows, given, scale)
                share = self.replicas / self._slices(batch)
                loss, by_term, aux = auxiliary.of_slice(result, counts, apart, share)
                # In a typed map a loss that is averaged over the replicas is typed as equal, and
                # its gradient would be 1/n of the gradient in an untyped map.
                loss, by_term = axes.to_varying((loss, by_term), names)
                return (by_term if apart else loss) * scale.astype(loss.dtype), (loss, aux)

            with handshake.multiplied(scale):
                grads, (loss, aux) = _grad(scaled_loss, params, active)
                weight = as_aux(aux).weight
                if weight is not None:
                    _require_uncrossed(lambda x: scaled_loss(x)[0], params, active, names)
            if weight is not None:
                # A mean over zero tokens is 0/0, which must not lower the scale as an overflow
                # would.
                new = carried.unless_empty(grads, params, rules, weight)
                loss, grads = drop_empty((loss, carried.without(grads, new)), jnp.asarray(weight))
                grads = carried.put(grads, new)
            return (loss, aux), grads

        how: Any = {"accumulator_dtype": self.accumulator_dtype, "rules": rules}
        # Carried records of cotangents must equal the records of the whole batch for any split.
        parts = self._slices(batch) if rules else 1
        scale = scale / parts if parts > 1 else scale
        ((loss, aux), grads), terms = self._sliced(evaluate, params, batch, given, scale, **how)
        new = carried.values(grads, carried.resolve(rules, grads))
        grads = carried.without(grads, new)
        grads = jax.tree.map(lambda g: g * parts, grads) if parts > 1 else grads
        if names:
            loss, aux, grads = auxiliary.over_replicas(loss, aux, grads, names)
        aux = auxiliary.reported(aux, terms, self.replicas)
        grads = carried.put(grads, new)
        return (loss, aux), Gradients(grads)

    def _sliced(
        self, fn: Any, params: Any, batch: Any, given: Any, *args: Any, more: Any = (), **how: Any
    ) -> Any:
        """Return ``fn(params, rows, counts, *args, **given)`` of all micro-batches, and terms.

        ``counts`` has the mean counts of a loss's terms per slice, or is ``None``. ``more`` has
        keywords that only ``fn`` gets.
        """
        params = axes.to_varying(params, self.names)
        run = microbatch.microbatch(fn, self.count, has_aux=True, **how)
        try:
            return run(params, batch, None, *args, **given, **dict(more)), ()
        except auxiliary.UncountedError:
            pass

        def counted(params: PyTree, rows: PyTree, /, **given: Any) -> Any:
            terms, aux = self._loss_and_aux(params, params, rows, given)
            return (jnp.zeros(()), Aux(None, as_aux(aux).model_state, means=terms)), ()

        # XLA removes operations that the counts do not need, so counting a mask costs no forward
        # pass.
        count = microbatch.microbatch(counted, self.count, has_aux=True)
        (_, aux), _ = count(params, batch, **given)
        counts = {x: total(n, self.names) / self._slices(batch) for x, (_, n) in aux.means.items()}
        return run(params, batch, counts, *args, **given, **dict(more)), tuple(counts)

    def _slices(self, batch: PyTree) -> int:
        """Return the number of micro-batches of all replicas."""
        count = stacked_count(batch, _WHO) if self.count == "stacked" else self.count
        return count * self.replicas

    def _loss_and_aux(
        self, trained: PyTree, params: PyTree, batch: PyTree, kwargs: Any, scale: Any = None
    ) -> Any:
        """Return the result of the loss from the trained params and all params."""

        def of_trained(trained: PyTree) -> tuple[jax.Array, PyTree]:
            require_taken(_WHO, self.loss_fn, kwargs)
            whole = trees.unmasked(trained, params)
            return auxiliary.loss_and_aux(self.computed(whole, batch, **kwargs), self.has_aux)

        watch: Any = None if scale is None else self.watch
        if not self.reads and watch is None:
            return of_trained(trained)
        run, _ = trees.trace_once(of_trained, trained)
        program = run.program
        self.judge(program, trained)
        operations = (eqn.primitive.name for eqn, _ in interpret.equations(program.jaxpr))
        if watch is not None and interpret.CUSTOM[1] in operations:
            from boostax.train import degrees

            # A keyword argument may be the scale itself.
            sure = kwargs.keys() <= {"key"} and all(x is not scale for x in program.consts)
            watch(degrees.nonlinear(program, sure))
        return run(trained)

    def _loss(self, params: PyTree, batch: PyTree, given: dict[str, Any]) -> jax.Array:
        """Return the loss without the aux."""

        def forward(params: PyTree, batch: PyTree, counts: Any, /, **kwargs: Any) -> Any:
            result = self._loss_and_aux(params, params, batch, kwargs)
            loss, _, aux = auxiliary.of_slice(result, counts)
            weight = as_aux(aux).weight
            loss = loss if weight is None else drop_empty(loss, jnp.asarray(weight))
            return (loss, Aux(weight)), ()

        ((loss, aux), _), _ = self._sliced(forward, params, batch, given)
        return auxiliary.over_replicas(loss, aux, (), self.names)[0] if self.names else loss

    def _slope(self, params: PyTree, batch: PyTree, given: dict[str, Any]) -> PyTree:
        """Return the gradient of the loss, averaged over the replicas."""
        _, grads = Oracle.local(self, params, batch, jnp.ones(()), given, True, {})
        return jax.tree.map(lambda g: axes.mean(g, self.names), trees.at_least_float32(grads.local))

    def _mapped(
        self, fn: Callable[..., Any], out_specs: Any, of_params: Any = None
    ) -> Callable[..., Any]:
        """Map ``fn(params, batch, given, ...)`` over the replicas of global arrays."""
        names, whole = self.names, PartitionSpec()

        def run(params: PyTree, batch: PyTree, given: dict[str, Any], *more: Any) -> Any:
            own = is_per_replica(params)

            def each(params: PyTree, batch: PyTree, given: dict[str, Any], *more: Any) -> Any:
                params = jax.tree.map(lambda x: x[0], params.local) if own else params
                if "key" in given:
                    given = given | {"key": jax.random.fold_in(given["key"], axes.index(names))}
                return fn(params, batch, given, *more)

            spec = of_params or (PartitionSpec(names) if own else whole)
            specs = spec, self.rows, whole, *[whole] * len(more)
            # The map is untyped, so that loops may start from constants, and kernels and libraries
            # need not declare varying axes. A line search calls this function in a context in which
            # the axes of an Explicit mesh are Auto.
            around = jax.sharding.get_abstract_mesh()
            mesh: Any = self.mesh if around.empty else around
            how: Any = {"mesh": mesh, "axis_names": set(names), "check_vma": False}
            mapped = jax.shard_map(each, in_specs=specs, out_specs=out_specs, **how)
            # JAX's own error about rows would describe this map.
            sizes: Any = self.mesh and self.mesh.shape
            count, dim = math.prod(sizes[x] for x in names), len(self.rows) - 1
            for path, x in jax.tree_util.tree_leaves_with_path(batch):
                microbatch.require_even(_WHO, path, np.shape(x), count, f"{count} replicas", dim)
            batch = placement.gathered(mesh, names, batch, self.rows)
            params = params if of_params else placement.gathered(mesh, names, params)
            args = params, batch, given, *more
            # Outside jit, JAX maps a subset of a mesh's axes only with checked types.
            traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
            return (mapped if traced else jax.jit(mapped))(*args)

        return run


class PlacedOracle(Oracle, abc.ABC):
    """A gradient function that gathers some params itself, so it needs their placement."""

    @abc.abstractmethod
    def placed(self, types: PyTree, place: placement.Placement | None, wire: str | None) -> Oracle:
        """Return the function for params of these types and placement, gathered in ``wire``."""

    @abc.abstractmethod
    def gathers(self, params: PyTree) -> tuple[str, ...]:
        """Return the names of the params that this function gathers itself."""


# Makes a gradient function from that of the whole loss and its policy.
Around = Callable[[Oracle, Policy | None], PlacedOracle]


class Backward(abc.ABC):
    """What ``layers=`` takes, work in the backward pass: the base of ``boostax.train.Layers``."""

    @abc.abstractmethod
    def planned(
        self, tx: optax.GradientTransformation, shard_optimizer: bool
    ) -> tuple[optax.GradientTransformation, Around]:
        """Return the optimizer of a step with this work, and what makes its gradient function."""


def planned(
    tx: optax.GradientTransformation, layers: Backward | str, shard_optimizer: bool
) -> tuple[optax.GradientTransformation, Around]:
    """Return what ``layers=`` makes of a step; a string is the path of stacked layers."""
    if isinstance(layers, str):
        # This module is loaded before the package has all its names.
        from boostax.train import Layers

        layers = Layers(layers)
    return layers.planned(tx, shard_optimizer)


def _as_row(tree: PyTree) -> PyTree:
    """Return the arrays of one replica with a leading dimension, ``[1, ...]``."""
    return jax.tree.map(lambda x: jnp.expand_dims(x, 0), tree)


def _given(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if value is not None}


def _trained(params: PyTree, active: PyTree) -> PyTree:
    """Return the trained params, for a ``Choice`` at any of its indices."""
    return trees.masked(params, active.widest if isinstance(active, Choice) else active)


def _grad(fn: Callable[[PyTree], Any], params: PyTree, active: PyTree) -> tuple[PyTree, Any]:
    """Return the gradient with respect to the active params, and the auxiliary result of ``fn``.

    If ``fn`` returns terms ``[terms]``, the leaves of the gradient are ``[terms, ...]``.
    """
    chosen = isinstance(active, Choice)
    trained = _trained(params, active)
    value, pullback, more = jax.vjp(fn, trained, has_aux=True)

    def gradient(cotangent: jax.Array) -> PyTree:
        backward = lambda: jax.tree.leaves(pullback(cotangent))  # noqa: E731
        grads = staged(backward, active.levels(), active.at) if chosen else backward()
        return jax.tree.unflatten(jax.tree.structure(trained), grads)

    if not value.ndim:
        return gradient(jnp.ones_like(value)), more
    # In a typed map a cotangent has the type of its value.
    grads = [gradient(jnp.ones_like(value) * row) for row in np.eye(value.size, dtype=value.dtype)]
    return jax.tree.map(lambda *terms: jnp.stack(terms), *grads), more


def _require_uncrossed(
    fn: Callable[[PyTree], jax.Array], params: PyTree, active: Any, names: tuple[str, ...]
) -> None:
    """Refuse weights of replicas for a loss whose gradient crosses replicas.

    A part of such a gradient belongs to another replica's loss, which has another weight.
    """
    if not names:
        return
    programs: list[Any] = []

    def look(trained: PyTree) -> None:
        _, tangent = jax.linearize(fn, trained)
        value, pullback = jax.vjp(fn, trained)
        # A typed sum communicates nothing in the backward pass; a tangent program does not show a
        # custom backward rule.
        programs.extend((jax.make_jaxpr(tangent)(trained), jax.make_jaxpr(pullback)(value)))

    jax.eval_shape(look, _trained(params, active))
    crossed = frozenset().union(*map(of_gradients, programs)) & frozenset(names)
    allowed = "left out of a loss through which gradients go from replica to replica"
    got = f"one and a collective over {', '.join(sorted(crossed))}"
    hint = "Return the mean over all as the loss: lax.psum(sum, axis) / lax.psum(count, axis)."
    checks.require(not crossed, _WHO, "Aux.weight", got=got, allowed=allowed, hint=hint)


def _active(active: PyTree, params: PyTree) -> PyTree:
    """Return a ``Choice`` unchanged, and anything else as a bool for each leaf of the params."""
    return active if isinstance(active, Choice) else active_leaves(_WHO, active, params)


def outside(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return ``fn`` in a form that a line search may call inside the mapped region.

    ``fn`` itself runs outside of that region. Its params must be equal on all replicas.
    """
    called = custom_vmap(fn)

    @called.def_vmap
    def rule(size: int, batched: Any, *args: PyTree) -> Any:
        allowed, hint = "given params that are the same on all replicas", "Reduce the gradients."
        raise ValueError(checks.message(_WHO, "loss_at", allowed, "some that differ", hint))

    return called


def differentiable(value: Any, gradient: Any, args: tuple[Any, ...]) -> Callable[..., jax.Array]:
    """Return a function of params that has the given gradient.

    JAX does not transpose a ``custom_vmap``, and without checking it sums the cotangents of a
    ``psum`` once more.
    """

    @jax.custom_jvp
    def loss(params: PyTree) -> jax.Array:
        return value(params, *args)

    @loss.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        slopes = jax.tree.leaves(gradient(*primals, *args))
        moves = zip(slopes, jax.tree.leaves(tangents), strict=True)
        change = sum(jnp.sum((g * move).real) for g, move in moves)
        out = value(*primals, *args)
        return out, jnp.asarray(change, out.dtype)

    return loss


def of_arrays(tree: PyTree, params: PyTree) -> PyTree:
    """Hide in a tree like the params the leaves that ``aside`` hid in ``params``."""
    return jax.tree.map(lambda p, x: p if is_aside(p) else x, params, tree, is_leaf=is_aside)


def of_gradients(tangent: jaxprs.ClosedJaxpr) -> frozenset[str]:
    """Return the axes over which a tangent program communicates values that depend on its inputs.

    The constants of a tangent program are values of the forward pass, or values recomputed under a
    checkpoint. Gradients are communicated over the returned axes.
    """
    found: set[str] = set()

    def transfer(eqn: jaxprs.JaxprEqn, fed: list[bool]) -> list[bool]:
        if any(fed):
            # An unknown body could do anything to its operands, so the worst is assumed.
            found.update(axes.named(inner for inner, _ in interpret.equations([eqn])))
        return [any(fed)] * len(eqn.outvars)

    interpret.flow(tangent, [True] * len(tangent.jaxpr.invars), transfer, any, nothing=False)
    return frozenset(found)


def of_transposes(program: jaxprs.ClosedJaxpr) -> frozenset[str]:
    """Return the axes over which a program sums in a backward pass inside the program."""

    def enter(eqn: jaxprs.JaxprEqn, backward: bool) -> Iterator[bool]:
        return itertools.repeat(backward or _backward(eqn))

    found = interpret.equations(program.jaxpr, False, enter)
    backward = (eqn for eqn, inside in found if inside or _backward(eqn))
    kinds = "psum", "reduce_scatter"
    return axes.named(x for x in backward if x.primitive.name.removesuffix("_invariant") in kinds)


def _backward(eqn: jaxprs.JaxprEqn) -> bool:
    return "transpose(" in str(eqn.source_info.name_stack)


def scaling(opt_state: PyTree) -> contextlib.AbstractContextManager[None]:
    """Mark the scales in a state, for a loss that is traced in this context and scaled outside."""
    return axes.during(handshake.INSIDE, (*handshake.INSIDE.get(), handshake.scaled(opt_state)))


def applied(
    tx: Any,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    extra_args: dict[str, Any],
    counted: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
    """Apply gradients like ``apply_gradients``, without its explanations of errors.

    ``counted`` is described in ``Pending``.
    """
    like, own = grads.local if isinstance(grads, Gradients) else grads, params
    like = like.local if is_per_replica(like) and not is_per_replica(params) else like
    holes = any(map(trees.is_none, jax.tree.leaves(like, is_leaf=trees.is_none)))
    if holes:
        # Equinox's filters leave None for the gradient of a function in a module.
        ends = lambda node: node is None or isinstance(node, optax.MaskedNode)  # noqa: E731
        own = jax.tree.map(lambda g, p: None if g is None else p, like, params, is_leaf=ends)
    if (gate := gate_of(tx)) is not None:
        pending = Pending(grads, counted=counted)
        new, opt_state = gate.step(pending, opt_state, own, apply=True, **extra_args)
    else:
        tx = optax.with_extra_args_support(tx)
        updates, opt_state = tx.update(grads, opt_state, own, **extra_args)
        new = trees.applied(own, updates)
    new = axes.placed_like(new, own)
    return (trees.put_back(new, params) if holes else new), opt_state


def require_taken(who: str, loss_fn: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Refuse a loss that does not take the arguments that it is called with."""
    try:
        # A wrapper may take arguments that the wrapped function does not.
        takes = inspect.signature(loss_fn, follow_wrapped=False)
    except (TypeError, ValueError):
        # Some callables have no signature that Python can read.
        return
    try:
        takes.bind(None, None, **kwargs)
    except TypeError as error:
        name = next((name for name in kwargs if repr(name) in str(error)), "")
        allowed = f"a function that takes {name}=" if name else "a function of (params, batch)"
        hint = _TAKEN.get(name, f"Leave {name}= out of the call.") if name else _ROWS
        if "missing" in str(error):
            allowed = f"given all that it takes ({error})"
            hint = "step.init takes key= and model_state=; others are keywords: step(s, b, beta=1)."
        raise TypeError(checks.message(who, "loss_fn", allowed, loss_fn, hint)) from error


def active_leaves(who: str, active: PyTree, params: PyTree) -> PyTree:
    """Return a bool for each leaf of the params, from a tree of bools or a prefix of one."""
    given, allowed = jax.tree.leaves(active), "a tree of bools like the params"
    bools = bool(given) and all(isinstance(x, (bool, np.bool_)) for x in given)
    hint = "tx.active(params, depth) of a scheduled_freeze is one."
    checks.require_type(bools, who, "active", got=active, allowed=allowed, hint=hint)

    def of_part(keep: Any, part: PyTree) -> Any:
        # A subtree without arrays needs no entry, so its entry may be None.
        trained = any(map(trees.is_array, jax.tree.leaves(part)))
        return True if keep is None and not trained else keep

    active = jax.tree.map(of_part, active, params, is_leaf=trees.is_none)
    return jax.tree.broadcast(active, params)


def require_trainable(who: str, trained: PyTree) -> None:
    """Refuse trained leaves without a gradient: integers, bools, PRNG keys."""
    if bcoo.MODULE in sys.modules:
        require_dense(trained, who, "params")
    allowed = "floating or complex arrays where they are trained"
    hint = "Separate it (model_state, equinox.partition, nnx.split), or pass active= with False."
    if any(kind.__module__ == "flax.nnx.module" for kind in type(trained).__mro__):
        hint = "boostax.nnx.Optimizer(model, tx, wrt=nnx.Param, axis_name='data') takes a module: "
        hint += "optimizer.value_and_grad(loss)(model, batch)."
    for path, x in jax.tree_util.tree_leaves_with_path(trained):
        dtype = getattr(x, "dtype", None)
        if isinstance(x, (float, complex)) if dtype is None else trees.is_inexact(dtype):
            continue
        got = f"{dtype or type(x).__name__} at {trees.path_name(path) or 'the root'}"
        raise TypeError(checks.message(who, "params", allowed, got, hint))


def require_dense(tree: PyTree, who: str, what: str = "gradients") -> None:
    """Raise if a leaf is sparse."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse)
    got = [(type(x).__name__, path_name(path)) for path, x in leaves if is_sparse(x)]
    checks.require_type(not got, who, what, got=got[:6], allowed="dense arrays", hint=DENSE)
