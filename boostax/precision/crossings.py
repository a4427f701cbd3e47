# SPDX-License-Identifier: Apache-2.0
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

from boostax._core import handshake, jaxprs, trees
from boostax._core.interpret import CALLS, CHECKPOINT, body_of, evaluate, replay, require_readable
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
      >>> scaled = boostax.precision.group_boundaries(loss, {"body": 0, "head": 1})
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
        trees.require_arrays(params, who)
        numbers, count = group_numbers(who, labels, params)
        if scales.shape != (count,):
            raise ValueError(
                f"{who}: scales must be one for each group, {count}, got shape {scales.shape}. "
                "Give group_boundaries and group_loss_scale the same labels."
            )
        handshake.crossed(scales, handshake.by_path(params, numbers))
        on_params = lambda params: loss_fn(params, *args, **kwargs)  # noqa: E731
        replay, _ = trees.trace_once(on_params, params)
        values = [jnp.asarray(x) for x in jax.tree.leaves(params)]
        found = _run(replay.program, _grouped(values, numbers), scales)
        # The loss is in the last group, whatever it depends on.
        results = [x.entering(count - 1, scales) for x in found]
        return jax.tree.unflatten(replay.structure, results)

    return wrapped


class _Grouped:
    """A value of a group, and what it is in other groups."""

    def __init__(self, value: Any, group: Group):
        # Nothing flows back through what is not a real or complex number.
        dtype = getattr(value, "dtype", None)
        inexact = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
        self.group = group if inexact else None
        self._known: dict[Group, Any] = {self.group: value}

    def own(self) -> Any:
        """The value where it was computed."""
        return self._known[self.group]

    def entering(self, group: Group, scales: jax.Array) -> Any:
        """The value in a group: what several operations of it read crosses once for all."""
        if self.group is None or group is None:
            return self.own()
        if group not in self._known:
            self._known[group] = crossed(self.own(), scales[self.group] / scales[group])
        return self._known[group]


def _grouped(values: Sequence[Any], groups: Sequence[Group]) -> list[_Grouped]:
    return [_Grouped(value, group) for value, group in zip(values, groups, strict=True)]


def _run(
    program: jaxprs.ClosedJaxpr, args: Sequence[_Grouped], scales: jax.Array
) -> list[_Grouped]:
    """The results of a program, with boundaries on the edges between groups."""

    def rule(eqn: Any, operands: list[_Grouped]) -> list[_Grouped]:
        name, groups = eqn.primitive.name, [x.group for x in operands]
        present = {group for group in groups if group is not None}
        # No loop and no derivative rule: boundaries go inside.
        if len(present) > 1 and name in (*CALLS, *CHECKPOINT):
            found: list[Group] = []

            def inside(*args: Any) -> list[Any]:
                results = _run(body_of(eqn), _grouped(args, groups), scales)
                found[:] = [x.group for x in results]
                return [x.own() for x in results]

            if name in CHECKPOINT:
                policy, cse = eqn.params["policy"], eqn.params["prevent_cse"]
                inside = jax.checkpoint(inside, policy=policy, prevent_cse=cse)
            return _grouped(inside(*(x.own() for x in operands)), found)
        last = max(present, default=None)
        results = replay(eqn, [x.entering(last, scales) for x in operands])
        return _grouped(results, [last] * len(results))

    return evaluate(program, args, rule, lambda value, aval: _Grouped(value, None))
