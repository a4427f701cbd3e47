# SPDX-License-Identifier: Apache-2.0
"""The gradient function, which returns scaled, local gradients of a loss."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Concatenate, Generic, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, PartitionSpec

from boostax._core import axes, checks, handshake, interpret, jaxprs, placement, trees
from boostax._core.replicas import PerReplica, is_per_replica
from boostax._core.trees import is_aside, is_masked
from boostax._core.types import Grads, Params, PyTree, Value
from boostax.accumulate import aux as auxiliary
from boostax.accumulate import carried, microbatch
from boostax.accumulate.aux import Aux, as_aux, drop_empty, total
from boostax.accumulate.microbatch import Count, stacked_count
from boostax.accumulate.window import terms_of
from boostax.freeze.stages import Choice, staged
from boostax.order import findings
from boostax.precision.loss_scale import scales as scales_of
from boostax.precision.policy import Level, Policy, as_policy
from boostax.train import refusals

Kwargs = dict[str, PyTree]
# Loss and aux.
Result = tuple[jax.Array, PyTree]
_Loss = Callable[Concatenate[Params, ...], Value]
_WHO = "value_and_grad"
_CALL = "boostax.value_and_grad(loss_fn)(params, opt_state, batch)"


class _Options(TypedDict, total=False):
    axis_name: axes.AxisName | None
    policy: Policy | Level | None
    microbatches: Count
    dtype: jax.typing.DTypeLike


class _Local(_Options, total=False):
    mesh: None


class _Mapped(_Options, total=False):
    mesh: Mesh | None
    has_aux: bool
    layers: optax.GradientTransformation | None


@overload
def value_and_grad(
    loss_fn: _Loss[Params, PyTree], *, has_aux: Literal[False] = False, **how: Unpack[_Local]
) -> Oracle[jax.Array, Params, Params]: ...
@overload
def value_and_grad(
    loss_fn: _Loss[Params, tuple[PyTree, Value]], *, has_aux: Literal[True], **how: Unpack[_Local]
) -> Oracle[tuple[jax.Array, Value], Params, Params]: ...
@overload
def value_and_grad(loss_fn: Callable[..., PyTree], **how: Unpack[_Mapped]) -> Oracle: ...
@checks.arguments
def value_and_grad(
    loss_fn: Callable[..., PyTree],
    *,
    axis_name: axes.AxisName | None = None,
    mesh: Mesh | None = None,
    policy: Policy | Level | None = None,
    microbatches: Count = 1,
    has_aux: bool = False,
    dtype: jax.typing.DTypeLike = jnp.float32,
    layers: optax.GradientTransformation | None = None,
) -> Oracle:
    r"""Differentiate a loss like ``jax.value_and_grad``, for an optimizer of boostax.

    The loss is multiplied in f32 by the loss scale in ``opt_state``, so the gradients are
    multiplied by the scale; the returned loss is unscaled. With ``axis_name`` the gradients are
    *local* to each replica, and loss and ``Aux.metrics`` are averaged over the replicas. The mean
    of the local gradients is the gradient of the mean loss of all replicas, even if ``loss_fn``
    averages or sums over the replicas (``lax.pmean`` of batch statistics, or of the whole loss). If
    the loss returns ``Aux(weight=...)``, replica :math:`r`'s gradient is multiplied by
    :math:`n\,w_r / \sum w`, so that the mean over replicas is the mean over all tokens. Gradients
    of the leaves that ``boostax.carry`` overwrites are not scaled or averaged; they are combined
    over micro-batches by the rules of ``carry``.

    If a loss has several terms, each a mean over its own number of tokens or rows, return
    ``{"ce": (sum, count), "z": (0.1 * sum, count)}`` instead of a scalar. The loss is then
    :math:`\sum_t S_t / N_t` with sums and counts of the whole batch, however the batch is divided
    into micro-batches and replicas. A term with count 0 is 0. Sums and counts may be arrays, which
    are summed in f32 or wider. Counts are not differentiated, and are summed before the single
    backward pass. For a window over several calls, name the terms in
    ``boostax.accumulate(normalize=)``.

    Inside ``shard_map`` or ``pmap``, ``axis_name`` is an axis of the surrounding function. With
    ``mesh``, call the result in plain ``jit`` on global arrays. The loss is then mapped over only
    the replica axes, with ``check_vma=False``, so any loss works. Over all other axes, XLA
    partitions the loss; on an Explicit mesh, the partition follows the shardings of the arrays in
    the loss. Gradients are a ``PerReplica`` of stacked arrays, for ``boostax.on_mesh``. Of the
    results, only the loss and ``Aux`` are reduced over the replicas.

    Args:
      loss_fn: ``loss_fn(params, batch)``, with ``key=`` and ``model_state=`` if these are given,
        and with ``scales=`` if the state has a loss scale per group (see ``scale_boundary``).
        ``loss_fn`` returns a scalar loss or a dict of terms, or ``(loss, aux)`` with ``has_aux``;
        see ``Aux``.
      axis_name: replica axis (or axes) of the surrounding ``shard_map`` or ``pmap``, or of
        ``mesh``; by default the only axis of ``mesh``.
      mesh: for plain ``jit``, the mesh with the replica axes.
      policy: precision policy for ``loss_fn``; see ``boostax.policy``.
      microbatches: number of micro-batches to scan over; see ``boostax.train.microbatch``.
        Use ``"stacked"`` for a batch ``[k, rows, ...]``, as for ``lax.scan``; the dimension of rows
        is split over the replicas.
      has_aux: as in ``jax.value_and_grad``. A ``boostax.Aux`` is combined over micro-batches and
        replicas. An aux of another class is not combined. With micro-batches, it has a leading
        dimension ``[microbatches]``. Inside ``shard_map`` or ``pmap``, it is local to the replica.
        With ``mesh``, it is a ``PerReplica`` of stacked arrays, like the gradients.
      dtype: dtype of the gradient sum over micro-batches.
      layers: the optimizer from ``boostax.on_mesh(layers=)``, if the loss uses ``scan_layers``.

    Returns:
      ``fn(params, opt_state, batch, *, active=True, key=None, model_state=None)`` that returns
      ``(loss, grads)``, or ``((loss, aux), grads)`` with ``has_aux``. ``active`` is a tree of bools
      like the params, or a prefix of such a tree. A leaf with False is not differentiated, and its
      gradient is an ``optax.MaskedNode``. ``active`` may also be ``tx.choice(params, opt_state)``
      of a ``scheduled_freeze``, for which the program reads the depth from the state. If a leaf is
      not an array, such as a function in an Equinox module, a bool, or a Python number next to
      traced arrays, the loss receives the leaf unchanged, and the gradient is ``None``. Cost: with
      ``axis_name``, one scalar all-reduce for the loss, one all-reduce for each leaf of ``Aux``,
      and three for each term; with micro-batches, see ``boostax.train.microbatch``. The counts of
      terms need an additional pass over the batch, which computes only what the counts need, such
      as a mask, and not the model. ``fn.loss_at(batch, *, key=None, model_state=None)`` returns the
      loss as a function of only the params, for line searches.

    Raises:
      ValueError, TypeError: an argument out of range; at trace time, a loss that is not a floating
        scalar, a batch that does not divide, an unbound axis, a window that does not name the
        loss's terms, a weight together with terms, a weight for a loss whose gradient crosses
        replicas, or with ``mesh`` a loss that calls ``jax.grad`` of a sum over the replicas.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> state = boostax.static_loss_scale(optax.sgd(0.1), 128.0).init(jnp.float32(1.0))
      >>> f = boostax.value_and_grad(lambda w, x: w * jnp.mean(x))
      >>> f(jnp.float32(1.0), state, jnp.ones(4))
      (Array(1., dtype=float32), Array(128., dtype=float32))
      >>> def loss(w, x):  # the first term counts only rows above 0
      ...   return {"ce": (w * x, x > 0), "decay": (0.1 * w**2, 1)}
      >>> f = boostax.value_and_grad(loss, microbatches=2)
      >>> f(jnp.float32(1.0), (), jnp.arange(4.0))
      (Array(2.1, dtype=float32), Array(2.2, dtype=float32))
    """
    count = microbatch.require_count(_WHO, microbatches)
    precision = None if policy is None else as_policy(policy)
    names = axes.of_mesh(_WHO, axis_name, mesh)

    of_model = functools.wraps(loss_fn)(
        lambda params, /, *args, **kwargs: loss_fn(trees.restored(params), *args, **kwargs)
    )
    computed = of_model if precision is None else precision.compute(of_model)
    oracle = Oracle(loss_fn, computed, names, count, has_aux, jnp.dtype(dtype), mesh)
    if layers is None:
        return oracle
    around = getattr(getattr(layers, "update", None), "around", None)
    if around is None:
        hint = "Pass the result of boostax.on_mesh(tx, params, layers=...)."
        raise TypeError(checks.message(_WHO, "layers", "the optimizer on a mesh", layers, hint))
    return around(oracle, precision)


class Gradients(NamedTuple):
    """The gradients of a step; some may already be averaged, and some already applied.

    Attributes:
      local: gradients of each replica; a ``PerReplica`` in plain ``jit``. Leaves in ``averaged`` or
        ``applied`` are ``optax.MaskedNode`` here.
      averaged: gradients that are averaged over the replicas, a tree like the params; or ``()``.
      applied: new params and optimizer state that the backward pass computed; or ``()``.
    """

    local: PyTree
    averaged: PyTree = ()
    applied: PyTree = ()

    def unwrapped(self) -> PyTree:
        """Return one replica's gradients without their ``PerReplica``; keep ``applied``."""
        local = self.local.local if is_per_replica(self.local) else self.local
        if self.averaged:
            local = jax.tree.map(
                lambda x, y: y if is_masked(x) else x, local, self.averaged, is_leaf=is_masked
            )
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
      dtype: dtype of the gradient sum over micro-batches.
      mesh: for global arrays, the mesh over whose replica axes the loss is mapped; ``None`` inside
        a mapped function, or on one device.
      watch: a function that each trace calls with the nonlinear backward rules of the loss;
        ``None`` without a loss scale.
    """

    loss_fn: Callable[..., PyTree]
    computed: Callable[..., PyTree]
    names: tuple[str, ...]
    count: Count
    has_aux: bool
    dtype: np.dtype
    mesh: Mesh | None = None
    watch: Callable[[list[str]], None] | None = None

    def inputs(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree, Gradients]:
        """Return the tree that ``local`` differentiates, and the specs of tree and gradients.

        The specs of the tree are ``None`` for params that are unsharded, or differ per replica.
        """
        return params, None, Gradients(PartitionSpec(self.names))

    @property
    def reads(self) -> bool:
        """Return whether the loss's program is read before differentiation."""
        return self.mesh is not None

    def placed(self, types: PyTree, place: placement.Placement | None, wire: str | None) -> Oracle:
        """Return the gradient function for params of these types and this placement."""
        return self

    def gathers(self, params: PyTree) -> tuple[str, ...]:
        """Return the names of the params that the gradient function gathers."""
        return ()

    def check(self, program: jaxprs.ClosedJaxpr, trained: PyTree) -> None:
        """Refuse a loss if its program, a function of the leaves of ``trained``, shows an error."""
        refusals.require_no_inner_sums(program, self.names)

    @property
    def replicas(self) -> int:
        """Return the number of replicas; the replica axes must be bound."""
        return axes.size(self.names) if self.names else 1

    @checks.arguments
    def __call__(
        self, params: Params, opt_state: Any, batch: Any, /, *, active: Any = True, **kwargs: Any
    ) -> tuple[Value, Grads]:
        """Return ``(loss, grads)``, or ``((loss, aux), grads)``, of one batch."""
        inputs = {"params": params, "opt_state": opt_state, "batch": batch}
        with trees.explaining(trees.require_order, _WHO, _CALL, **inputs):
            value, grads = self.with_aux(params, opt_state, batch, active, kwargs)
            findings.of_state(_WHO, opt_state, active)
            return (value if self.has_aux else value[0]), grads

    def with_aux(
        self, params: PyTree, opt_state: PyTree, batch: PyTree, active: PyTree, kwargs: Kwargs
    ) -> tuple[PyTree, PyTree]:
        """Return ``((loss, aux), grads)``, even if ``loss_fn`` has no aux."""
        is_active: PyTree = True
        if active is not True:
            local = params.local if is_per_replica(params) else params
            # ``aside`` hides the constants among the params. The same leaves of ``active`` are
            # hidden, too.
            arrays = trees.aside(local)
            hidden = functools.partial(
                jax.tree.map, lambda p, x: p if is_aside(p) else x, arrays, is_leaf=is_aside
            )
            if isinstance(active, Choice):
                active = Choice(active.at, tuple(map(hidden, active.options)))
            else:
                is_active = refusals.active_leaves(active, local)
                active = hidden(is_active)
        params = trees.aside(params)
        if self.mesh is None:
            axes.require_bound(self.names, _WHO, hint="In plain jit, pass mesh=.")
        else:
            refusals.require_trainable(_trained(params, active))
            if self.count == "stacked":
                stacked_count(batch, _WHO, least=2)
        scale, scales = scales_of("loss_scale", opt_state)
        rules = carried.declared(opt_state, params, _WHO)
        trees.require_unsplit(_WHO, kwargs, batch, self.count, self.mesh is not None)
        kwargs = {k: x for k, x in (kwargs | {"scales": scales}).items() if x is not None}
        terms = terms_of(opt_state)
        # The loss is traced in this context. A scaler divides the gradients later, outside of the
        # context.
        with axes.during(handshake.INSIDE, (*handshake.INSIDE.get(), handshake.scaled(opt_state))):
            params, params_specs, grads_specs = self.inputs(params, opt_state)
            if self.mesh is None:
                value, grads = self.local(params, batch, scale, kwargs, active, rules, terms)
                return value, trees.without_gradient(grads.unwrapped(), is_active)

            loss_aux: PyTree = Aux()

            def per_replica(params: Any, batch: Any, kwargs: Any, scale: Any, at: Any) -> PyTree:
                nonlocal loss_aux
                handshake.hand_on(scales, kwargs.get("scales"))
                chosen = active._replace(at=at) if isinstance(active, Choice) else active
                value, grads = self.local(params, batch, scale, kwargs, chosen, rules, terms)
                loss, loss_aux = value
                stacked = auxiliary.own_of(loss_aux), grads.local
                own_aux, local = jax.tree.map(lambda x: jnp.expand_dims(x, 0), stacked)
                return (loss, as_aux(loss_aux)), own_aux, grads._replace(local=PerReplica(local))

            specs = PartitionSpec(), PartitionSpec(self.names), grads_specs
            at = active.at if isinstance(active, Choice) else None
            fn = self._mapped(per_replica, specs, params_specs)
            (loss, aux), own_aux, grads = fn(params, batch, kwargs, scale, at)
        aux = auxiliary.as_given(aux, PerReplica(own_aux), loss_aux)
        is_active = is_active if is_active is True else Gradients(PerReplica(is_active))
        grads = trees.without_gradient(grads, is_active)
        return (loss, aux), grads if any(grads[1:]) else grads.local

    def loss_at(self, batch: PyTree, /, **kwargs: PyTree) -> Callable[[PyTree], jax.Array]:
        """Return the loss of a batch as a function of the params."""
        args = batch, {k: x for k, x in kwargs.items() if x is not None}
        if not self.names:
            return lambda params: self._loss(trees.aside(params), *args)
        fns: list[Callable[..., PyTree]] = [self._loss, self._slope]
        if self.mesh is not None:
            fns = [_outside(self._mapped(fn, PartitionSpec())) for fn in fns]

        # JAX does not transpose a ``custom_vmap``. With ``check_vma=False``, JAX also sums the
        # cotangents of a ``psum`` again. So the function has a rule for its gradient.
        loss = jax.custom_jvp(lambda params: fns[0](params, *args))

        @loss.defjvp
        def rule(primals: PyTree, tangents: PyTree) -> tuple[jax.Array, jax.Array]:
            slopes = jax.tree.leaves(fns[1](*primals, *args))
            pairs = zip(slopes, jax.tree.leaves(tangents), strict=True)
            change = sum(jnp.sum((slope * tangent).real) for slope, tangent in pairs)
            out = fns[0](*primals, *args)
            return out, jnp.asarray(change, out.dtype)

        return lambda params: loss(trees.aside(params))

    def local(self, params: PyTree, *args: PyTree) -> tuple[Result, Gradients]:
        """Return one replica's loss, aux and gradient; with ``terms``, a gradient per term.

        Args:
          params: the params of this replica.
          *args: the batch, the loss scale, the loss's keyword arguments, the active leaves, the
            rules of ``carry``, and the terms of a window or ``None``.
        """
        batch, scale, kwargs, active, rules, terms = args
        hint = "Pass boostax.states.enter_replica(params).local."
        got = type(params).__name__ if is_per_replica(params) else None
        checks.absent(_WHO, "params", got, "the params of this replica", hint)
        if not isinstance(active, Choice):
            active = refusals.active_leaves(active, params)
        names = self.names
        refusals.require_trainable(_trained(params, active))

        def evaluate(params: Any, rows: Any, counts: Any, scale: Any, /, **kwargs: Any) -> Any:
            """Return the loss and the gradient of one micro-batch."""

            def scaled_loss(trained: PyTree) -> tuple[jax.Array, Result]:
                result = self._loss_and_aux(trained, params, rows, kwargs, scale)
                share = self.replicas / self._slices(batch)
                loss, by_term, aux = auxiliary.of_slice(result, counts, terms, share)
                # With ``check_vma=True``, a loss that is averaged over n replicas has an unvarying
                # type. Its gradient would be 1/n of the gradient with ``check_vma=False``.
                loss, by_term = axes.to_varying((loss, by_term), names)
                return (by_term if terms else loss) * scale.astype(loss.dtype), (loss, aux)

            with handshake.multiplied(scale):
                grads, (loss, aux) = _grad(scaled_loss, params, active)
                weight = as_aux(aux).weight
                if weight is not None and names:
                    trained = _trained(params, active)
                    refusals.require_uncrossed(lambda x: scaled_loss(x)[0], trained, names)
            if weight is not None:
                # A mean over zero tokens is 0/0. The mean is dropped, so that a scaler does not
                # lower the scale as after an overflow.
                new = carried.unless_empty(grads, params, rules, weight)
                loss, grads = drop_empty((loss, carried.without(grads, new)), jnp.asarray(weight))
                grads = carried.restored(grads, new)
            return (loss, aux), grads

        # Carried leaves may record the size of cotangents. These records must not depend on the
        # number of micro-batches.
        parts = self._slices(batch) if rules else 1
        scale = scale / parts if parts > 1 else scale
        how: PyTree = {"dtype": self.dtype, "rules": rules}
        ((loss, aux), grads), counted = self._sliced(evaluate, params, batch, kwargs, scale, **how)
        new = carried.values(grads, carried.resolve(rules, grads))
        grads = carried.without(grads, new)
        grads = jax.tree.map(lambda g: g * parts, grads) if parts > 1 else grads
        if names:
            loss, aux, grads = auxiliary.over_replicas(loss, aux, grads, names)
        aux = auxiliary.reported(aux, counted, self.replicas)
        return (loss, aux), Gradients(carried.restored(grads, new))

    def _sliced(
        self, fn: Any, params: Any, batch: Any, kwargs: Any, *args: Any, more: Any = (), **how: Any
    ) -> tuple[PyTree, tuple[str, ...]]:
        """Return the combined results of ``fn`` for all micro-batches, and the names of the terms.

        ``fn(params, rows, counts, *args, **kwargs)`` is called for each micro-batch. ``counts`` are
        the mean counts of the loss's terms per micro-batch, or ``None``. ``more`` are keywords that
        only ``fn`` receives, and ``how`` are options of ``microbatch``.
        """
        params = axes.to_varying(params, self.names)
        # One micro-batch needs no scan and no sums.
        evaluate = fn
        if self.count != 1:
            evaluate = microbatch.microbatch(fn, self.count, has_aux=True, **how)
        try:
            return evaluate(params, batch, None, *args, **kwargs, **dict(more)), ()
        except auxiliary.UncountedError:
            pass

        def counted(params: PyTree, rows: PyTree, /, **kwargs: PyTree) -> PyTree:
            terms, aux = self._loss_and_aux(params, params, rows, kwargs)
            return (jnp.zeros(()), Aux(None, as_aux(aux).model_state, means=terms)), ()

        # XLA removes operations that the counts do not need, so counting a mask costs no forward
        # pass.
        count = microbatch.microbatch(counted, self.count, has_aux=True)
        (_, aux), _ = count(params, batch, **kwargs)
        counts = {x: total(n, self.names) / self._slices(batch) for x, (_, n) in aux.means.items()}
        return evaluate(params, batch, counts, *args, **kwargs, **dict(more)), tuple(counts)

    def _slices(self, batch: PyTree) -> int:
        """Return the number of micro-batches of all replicas."""
        count = stacked_count(batch, _WHO) if self.count == "stacked" else self.count
        return count * self.replicas

    def _loss_and_aux(
        self, trained: PyTree, params: PyTree, batch: PyTree, kwargs: Kwargs, scale: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        """Return loss and aux; ``trained`` has the trained params, and ``params`` all params."""

        def of_trained(trained: PyTree) -> tuple[PyTree, PyTree]:
            refusals.require_signature(self.loss_fn, kwargs)
            result = self.computed(trees.unmasked(trained, params), batch, **kwargs)
            return auxiliary.loss_and_aux(result, self.has_aux)

        watch = None if scale is None else self.watch
        if not self.reads and watch is None:
            return of_trained(trained)
        replay = trees.Replay(*jax.make_jaxpr(of_trained, return_shape=True)(trained))
        program = replay.program
        self.check(program, trained)
        operations = (eqn.primitive.name for eqn, _ in interpret.equations(program.jaxpr))
        if watch is not None and interpret.CUSTOM[1] in operations:
            from boostax.train import backward_rules

            # ``sure`` is False if a keyword argument or a constant may be the scale itself.
            sure = kwargs.keys() <= {"key"} and all(x is not scale for x in program.consts)
            watch(backward_rules.nonlinear(program, sure))
        return replay(trained)

    def _loss(self, params: PyTree, batch: PyTree, kwargs: Kwargs) -> jax.Array:
        """Return the loss without the aux."""

        def forward(params: PyTree, batch: PyTree, counts: PyTree, /, **kwargs: PyTree) -> PyTree:
            result = self._loss_and_aux(params, params, batch, kwargs)
            loss, _, aux = auxiliary.of_slice(result, counts)
            weight = as_aux(aux).weight
            loss = loss if weight is None else drop_empty(loss, jnp.asarray(weight))
            return (loss, Aux(weight)), ()

        ((loss, aux), _), _ = self._sliced(forward, params, batch, kwargs)
        return auxiliary.over_replicas(loss, aux, (), self.names)[0] if self.names else loss

    def _slope(self, params: PyTree, batch: PyTree, kwargs: Kwargs) -> PyTree:
        """Return the gradient of the loss, averaged over the replicas."""
        _, grads = Oracle.local(self, params, batch, jnp.ones(()), kwargs, True, {}, None)
        return jax.tree.map(lambda g: axes.mean(g, self.names), trees.at_least_float32(grads.local))

    def _mapped(self, fn: Any, out_specs: Any, params_specs: Any = None) -> Callable[..., PyTree]:
        """Map ``fn(params, batch, kwargs, ...)`` over the replicas of global arrays."""
        names = self.names
        rows = PartitionSpec(*[None] * (self.count == "stacked"), names)

        def mapped(params: PyTree, batch: PyTree, kwargs: Kwargs, *more: PyTree) -> PyTree:
            is_local = is_per_replica(params)

            def per_replica(params: PyTree, batch: PyTree, kwargs: Kwargs, *more: PyTree) -> PyTree:
                params = jax.tree.map(lambda x: x[0], params.local) if is_local else params
                if "key" in kwargs:
                    kwargs = kwargs | {"key": jax.random.fold_in(kwargs["key"], axes.index(names))}
                return fn(params, batch, kwargs, *more)

            spec = params_specs or PartitionSpec(*[names] * is_local)
            specs = spec, rows, *[PartitionSpec()] * (1 + len(more))
            # With ``check_vma=False``, loops may start from constants, and kernels and libraries
            # need not declare varying axes. A line search calls this function in a context in which
            # the axes of an Explicit mesh are Auto.
            around = jax.sharding.get_abstract_mesh()
            mesh: PyTree = self.mesh if around.empty else around
            options: PyTree = {"mesh": mesh, "axis_names": set(names), "check_vma": False}
            shard_map = jax.shard_map(per_replica, in_specs=specs, out_specs=out_specs, **options)
            # Rows are checked here, because JAX's error would describe this ``shard_map``, which
            # the user does not see.
            count = math.prod(self.mesh.shape[x] for x in names) if self.mesh else 1
            for path, x in jax.tree_util.tree_leaves_with_path(batch):
                dim = len(rows) - 1
                microbatch.require_even(_WHO, path, np.shape(x), count, f"{count} replicas", dim)
            batch = placement.gathered(mesh, names, batch, rows)
            params = params if params_specs else placement.gathered(mesh, names, params)
            args = params, batch, kwargs, *more
            # Outside of ``jit``, ``shard_map`` over only some axes of a mesh requires
            # ``check_vma=True``.
            is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
            return (shard_map if is_traced else jax.jit(shard_map))(*args)

        return mapped


# A function from the gradient function and the policy of a loss to the gradient function of a step.
Around = Callable[[Oracle, Policy | None], Oracle]


class Backward(abc.ABC):
    """The base class of ``Layers``, which moves the optimizer's work to the backward pass."""

    @abc.abstractmethod
    def planned(
        self, tx: optax.GradientTransformation, shard_optimizer: bool
    ) -> tuple[optax.GradientTransformation, Around]:
        """Return the optimizer of a step, and the function that makes its gradient function."""


def planned(
    tx: optax.GradientTransformation, layers: Backward | str, shard_optimizer: bool
) -> tuple[optax.GradientTransformation, Around]:
    """Return ``layers.planned(...)``; a string means ``Layers`` with this path."""
    if isinstance(layers, str):
        # This module is loaded before the package has all its names.
        from boostax.train import Layers

        layers = Layers(layers)
    return layers.planned(tx, shard_optimizer)


def _trained(params: PyTree, active: PyTree) -> PyTree:
    """Return the trained params; with a ``Choice``, the params of its first option."""
    return trees.masked(params, active.options[0] if isinstance(active, Choice) else active)


def _grad(fn: Callable[..., PyTree], params: PyTree, active: PyTree) -> tuple[PyTree, PyTree]:
    """Return the gradient with respect to the active params, and the auxiliary result of ``fn``.

    If ``fn`` returns an array ``[terms]``, the leaves of the gradient are ``[terms, ...]``.
    """
    trained = _trained(params, active)
    value, pullback, more = jax.vjp(fn, trained, has_aux=True)

    def gradient(cotangent: jax.Array) -> PyTree:
        if not isinstance(active, Choice):
            return pullback(cotangent)[0]
        leaves = staged(lambda: jax.tree.leaves(pullback(cotangent)), active.levels(), active.at)
        return jax.tree.unflatten(jax.tree.structure(trained), leaves)

    if not value.ndim:
        return gradient(jnp.ones_like(value)), more
    # With ``check_vma=True``, a cotangent must have the varying axes of its value. ``ones_like``
    # gives the cotangent these axes.
    grads = [gradient(jnp.ones_like(value) * row) for row in np.eye(value.size, dtype=value.dtype)]
    return jax.tree.map(lambda *terms: jnp.stack(terms), *grads), more


def _outside(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return ``fn`` in a form that a line search may call inside the mapped region.

    Even then, ``fn`` itself runs outside of the mapped region. The params must be equal on all
    replicas.
    """
    called = custom_vmap(fn)

    @called.def_vmap
    def rule(size: int, batched: PyTree, *args: PyTree) -> PyTree:
        allowed, hint = "given params that are the same on all replicas", "Reduce the gradients."
        raise ValueError(checks.message(_WHO, "loss_at", allowed, "params that differ", hint))

    return called
