"""Boundaries between groups in any loss function, found in its trace.

Every value has a group: a param its label, the result of an operation the last group among its
operands, and what depends on no param none. An operand of an earlier group crosses a boundary. So
every edge between groups has one, whatever the model is written in: activations, residual streams,
weights that are used a second time under another group, penalties on all params.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from boostax._core import handshake, jaxprs
from boostax._core.programs import CALLS, CHECKPOINT, body_of, require_readable
from boostax.precision.boundary import crossed
from boostax.precision.group_state import check_labels, group_numbers

PyTree = Any
Group = int | None


def group_boundaries(loss_fn: Callable[..., Any], labels: Any) -> Callable[..., Any]:
    """``loss_fn`` with a ``scale_boundary`` on every edge between groups of layers.

    The loss is traced, and each value belongs to the last group of the params that it depends on.
    The model is left as it is: linen, NNX, or plain functions. A weight that is used under another
    group than its own (a tied embedding) crosses a boundary there, so that its gradients of both
    places are of one scale, its label's, before they are added.

    An operation with a body (a scan, a loop, a branch) is *one* operation of the last group that
    enters it: of layers that a scan goes through, all are in one group. ``jax.jit`` and
    ``jax.checkpoint`` are looked into. For a scale per iteration, write ``scale_boundary`` in the
    body.

    Labels should follow the forward pass: a late group before an early one makes everything after
    it late. The gradients are right all the same.

    Args:
      loss_fn: ``loss_fn(params, *args, **kwargs)``, what ``boostax.value_and_grad`` takes.
      labels: as in ``group_loss_scale``.

    Returns:
      A function of the same signature, and ``scales=``: f32 ``[groups]``, which ``value_and_grad``
      hands over; without them it is ``loss_fn``. Only gradients in the params come out scaled as
      their labels say. Cost: a second trace; in the program see ``scale_boundary``.

    Raises:
      ValueError, TypeError: labels that do not fit the params, scales of another number.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> loss = lambda p, x: jnp.mean(jnp.tanh(x * p["body"]) * p["head"])
      >>> params, x = {"body": jnp.float32(0.0), "head": jnp.float32(1.0)}, jnp.ones(4)
      >>> scaled = boostax.group_boundaries(loss, {"body": 0, "head": 1})
      >>> scales = jnp.array([64.0, 8.0])
      >>> grads = jax.grad(lambda p: scales[-1] * scaled(p, x, scales=scales))(params)
      >>> float(jax.grad(loss)(params, x)["body"]), float(grads["body"])
      (1.0, 64.0)
    """
    who = "group_boundaries"
    check_labels(who, labels)

    @functools.wraps(loss_fn)
    def wrapped(params: PyTree, *args: Any, scales: Any = None, **kwargs: Any) -> Any:
        if scales is None:
            return loss_fn(params, *args, **kwargs)
        require_readable()
        numbers, count = group_numbers(who, labels, params)
        if scales.shape != (count,):
            raise ValueError(
                f"{who}: scales must be one for each group, {count}, got shape {scales.shape}. "
                "Give group_boundaries and group_loss_scale the same labels."
            )
        handshake.crossed(scales, handshake.by_path(params, numbers))
        on_params = lambda params: loss_fn(params, *args, **kwargs)  # noqa: E731
        traced, shapes = jax.make_jaxpr(on_params, return_shape=True)(params)
        boundaries = _Boundaries(scales)
        values = [jnp.asarray(x) for x in jax.tree.leaves(params)]
        results, found = boundaries.run(traced, values, numbers)
        # The loss is in the last group, whatever it depends on.
        last = [None if group is None else count - 1 for group in found]
        results = boundaries.bring(results, found, last)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return wrapped


class _Boundaries:
    """Evaluates jaxprs whose values have groups."""

    def __init__(self, scales: jax.Array):
        self._scales = scales

    def bring(
        self, values: Sequence[Any], groups: Sequence[Group], targets: Sequence[Group]
    ) -> list[Any]:
        """Each value from its group to another."""
        return [
            x if here is None or there is None or here == there else self._cross(x, here, there)
            for x, here, there in zip(values, groups, targets, strict=True)
        ]

    def _cross(self, x: Any, outer: int, inner: int) -> Any:
        return crossed(x, self._scales[outer] / self._scales[inner])

    def run(
        self, jaxpr: jaxprs.ClosedJaxpr, args: Sequence[Any], groups: Sequence[Group]
    ) -> tuple[list[Any], list[Group]]:
        """The results of a jaxpr, and their groups."""
        inner = jaxpr.jaxpr
        # By variable and group: what several operations of a group read crosses once for all.
        values: dict[tuple[Any, Group], Any] = {}
        group_of: dict[Any, Group] = {}

        def write(variables: Sequence[Any], results: Sequence[Any], found: Sequence[Group]) -> None:
            for var, value, group in zip(variables, results, found, strict=True):
                # Nothing flows back through what is not a real or complex number.
                group_of[var] = group if _differentiable(var) else None
                values[var, group_of[var]] = value

        def read(var: Any, target: Group = None) -> Any:
            if isinstance(var, jaxprs.Literal):
                return var.val
            here = group_of[var]
            wanted = here if here is None or target is None else target
            if (var, wanted) not in values:
                (values[var, wanted],) = self.bring([values[var, here]], [here], [wanted])
            return values[var, wanted]

        group = lambda var: None if isinstance(var, jaxprs.Literal) else group_of[var]  # noqa: E731
        write(inner.constvars, jaxpr.consts, [None] * len(jaxpr.consts))
        write(inner.invars, args, groups)
        for eqn in inner.eqns:
            entering = [group(var) for var in eqn.invars]
            present = {each for each in entering if each is not None}
            last = max(present, default=None)
            # No loop and no derivative rule: boundaries go inside.
            if len(present) > 1 and eqn.primitive.name in (*CALLS, *CHECKPOINT):
                results, found = self._inside(eqn, list(map(read, eqn.invars)), entering)
            else:
                variables = [var for var in eqn.invars if not isinstance(var, jaxprs.Literal)]
                results = _evaluated(inner, eqn, {var: read(var, last) for var in variables})
                found = [last] * len(results)
            write(eqn.outvars, results, found)
        return [read(var) for var in inner.outvars], [group(var) for var in inner.outvars]

    def _inside(
        self, eqn: Any, args: Sequence[Any], groups: Sequence[Group]
    ) -> tuple[list[Any], list[Group]]:
        """An operation that is a function of several groups."""
        closed = body_of(eqn)
        if eqn.primitive.name in CALLS:
            return self.run(closed, args, groups)
        found: list[Group] = []

        def rematerialised(*args: Any) -> list[Any]:
            results, found[:] = self.run(closed, args, groups)
            return results

        policy, cse = eqn.params["policy"], eqn.params["prevent_cse"]
        results = jax.checkpoint(rematerialised, policy=policy, prevent_cse=cse)(*args)
        return results, found


def _evaluated(jaxpr: jaxprs.Jaxpr, eqn: Any, operands: dict[Any, Any]) -> Any:
    """The results of one equation, by JAX's own evaluation: names, contexts and all."""
    alone = jaxpr.replace(
        constvars=[], invars=list(operands), outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects
    )
    return jaxprs.jaxpr_as_fun(jaxprs.ClosedJaxpr(alone, ()))(*operands.values())


def _differentiable(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
