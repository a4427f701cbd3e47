# SPDX-License-Identifier: Apache-2.0
"""A scan over stacked layers that reduces gradients, or runs the optimizer, in its backward loop.

The loss contains the loop over layers, and its backward loop computes one layer's gradient at a
time. So work per layer happens there: gather the layer's weights, reduce its gradient, add the
gradient to a sum, or run the optimizer.

The scan is a ``jax.custom_vjp``. Its *sink* is a tree with a slice for each layer: sums of
gradients, or params and optimizer state. The backward loop carries the sink and updates one slice
at a time in place, and the cotangent of the sink *is its new value*. So the gradients of all layers
never exist together.
"""

import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import axes, checks, interpret, norms, placement, trees
from boostax._core.types import PyTree

Body = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
# The same body with a layer's weights and other scanned values as two arguments.
Layer = Callable[[PyTree, list[jax.Array], list[Any]], tuple[PyTree, PyTree]]
_WHO = "scan_layers"
# A cotangent must be a float, so integers, bools and keys are passed as the bits of floats of equal
# size.
_FLOATS = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32, 8: jnp.float64}
_RUN: contextvars.ContextVar["Run | None"] = contextvars.ContextVar("run", default=None)


def scan_layers(
    body: Body, init: PyTree, xs: PyTree, *, remat: bool = False
) -> tuple[PyTree, PyTree]:
    """Scan over stacked layers like ``jax.lax.scan``, for a step with ``layers=``.

    Use it in place of ``lax.scan`` in the loss; elsewhere it behaves like ``lax.scan``. In a step
    with ``make_train_step(layers=...)`` it gathers each layer's weights, and in the backward loop
    reduces the layer's gradient or runs the layer's optimizer; see ``boostax.train.Layers``. The
    forward pass then stores only the carry of ``body``, and the backward pass computes each layer
    again.

    Args:
      body: ``body(carry, x) -> (carry, y)``, as in ``lax.scan``. Cast weights inside ``body``.
      init: the first carry.
      xs: the unmodified params of the stacked layers, each leaf ``[layers, ...]``; or a tree of
        these params and other scanned values, such as dropout keys.
      remat: whether to scan ``jax.checkpoint(body)`` outside of such a step.

    Returns:
      ``(carry, ys)`` as ``lax.scan`` does.

    Raises:
      ValueError: in a step with ``layers=``, some params of a stack are missing, the stack is
        scanned twice, or the scan is under ``jax.vmap``.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> layer = lambda x, w: (jnp.tanh(w * x), None)
      >>> x, _ = boostax.train.scan_layers(layer, jnp.float32(1.0), jnp.ones(3))
      >>> round(float(x), 2)
      0.57
    """
    run = _RUN.get()
    stack = run and run.found(xs)
    if stack is None:
        return lax.scan(jax.checkpoint(body) if remat else body, init, xs)
    return stack.scan(body, init, xs)


class Sink(NamedTuple):
    """The sink of layers whose optimizer runs in the backward loop.

    Attributes:
      params: the params of the layers.
      bits: the optimizer state of the layers, converted by ``sent``.
      skipped: f32, how often each layer was skipped in this call.
    """

    params: list[jax.Array]
    bits: PyTree
    skipped: jax.Array


@dataclasses.dataclass(eq=False)
class Stack:
    """A stack of layers in one trace of a loss.

    Attributes:
      name: the path of the stack in the params.
      weights: the stack's params, as stored on the device.
      read: ``read(weights)`` returns a layer's weights as ``body`` gets them.
      sink: see the module; a ``Sink`` contains the params. ``()`` for a forward pass only.
      update: ``update(sink, gradient, finite)`` returns a layer's new sink; ``finite`` is whether
        the cotangent of the layers' results is finite.
      wrap: a transformation of the body, such as a policy's, or ``None``.
      shown: the leaves that the loss gets in place of the stack's params, which it may only pass to
        the scan.
      scanned: whether the loss has scanned the stack.
    """

    name: str
    weights: list[jax.Array]
    read: Callable[[list[jax.Array]], list[jax.Array]]
    sink: PyTree = ()
    update: Callable[[PyTree, list[jax.Array], jax.Array], PyTree] | None = None
    wrap: Callable[[Body], Body] | None = None
    shown: Sequence[Any] = ()
    scanned: bool = False

    def scan(self, body: Body, init: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
        """Run ``scan_layers`` for this stack."""
        leaves, treedef = jax.tree.flatten(xs)
        mine = {id(x): i for i, x in enumerate(self.shown)}
        order = [mine.get(id(x)) for x in leaves]
        given = sorted(i for i in order if i is not None)
        hint, allowed = "Scan all params of the stack in one call.", "all params of the stack"
        fits = given == [*range(len(self.shown))]
        checks.require(fits, _WHO, "xs", got=f"some of {self.name!r}", allowed=allowed, hint=hint)
        hint = "A second scan would update its params twice: leave it out of layers=."
        got = "scanned again" if self.scanned else ""
        checks.absent(_WHO, f"the stack {self.name!r}", got or None, "scanned once in a loss", hint)
        self.scanned, body = True, body if self.wrap is None else self.wrap(body)
        init = jax.tree.map(lambda x: _unmapped(jnp.asarray(x)), init)

        def layer(carry: PyTree, weights: list[jax.Array], others: list[Any]) -> Any:
            rest = iter(others)
            x = [next(rest) if i is None else weights[i] for i in order]
            return body(carry, treedef.unflatten(x))

        others = [_unmapped(x) for x, i in zip(leaves, order, strict=True) if i is None]
        if self.update is None:
            each = lambda c, x: layer(c, self.read(x[0]), x[1])  # noqa: E731
            return lax.scan(each, init, (self.weights, others))
        return _swept(self, layer, init, others)


@dataclasses.dataclass(eq=False)
class Run:
    """The stacks of one trace of a loss."""

    stacks: list[Stack]

    def found(self, xs: PyTree) -> Stack | None:
        """Return the stack that has a leaf in ``xs``."""
        leaves = {id(x) for x in jax.tree.leaves(xs)}
        return next((x for x in self.stacks if any(id(leaf) in leaves for leaf in x.shown)), None)

    def traced(self, fn: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Call a loss in which ``scan_layers`` runs these stacks."""
        with axes.during(_RUN, self):
            return fn(*args, **how)


def require_scanned(program: Any, shown: Sequence[bool]) -> None:
    """Refuse a loss that does not scan a stack, or that also uses the stack's params elsewhere.

    Args:
      program: the loss as a function of the params.
      shown: for each input of the program, whether it represents a param of a stack.
    """
    run = _RUN.get()
    if run is None:
        return
    missing = [x.name for x in run.stacks if not x.scanned]
    hint = "Scan its params themselves: casts, masks and the like belong into the body."
    allowed = "scanned by boostax.train.scan_layers in loss_fn"
    checks.require(not missing, _WHO, "layers", got=missing, allowed=allowed, hint=hint)
    either = lambda eqn, facts: [any(facts)] * len(eqn.outvars)  # noqa: E731
    used = interpret.flow(program, [*shown], either, any, False)
    hint = "No gradient would arrive there: move it into the body, or leave layers= out."
    got = "used outside" if any(used) else None
    checks.absent(_WHO, "params of layers", got, "used in scan_layers alone", hint)


def showing(params: PyTree) -> PyTree:
    """Return params unchanged, and note their leaves if a step runs the layers of the loss."""
    run = _RUN.get()
    for stack in run.stacks if run else ():
        inside = f"{stack.name}/"
        stack.shown = [x for name, x in trees.named(params) if f"{name}/".startswith(inside)]
        stack.scanned = False
    return params


def _refuse(differs: Any) -> None:
    hint = "Map the body instead: scan_layers(jax.vmap(body, in_axes=(0, None)), xs, layers)."
    raise ValueError(checks.message(_WHO, "init", "outside jax.vmap", "a mapped array", hint))


def _unmapped(x: Any) -> Any:
    """Refuse an array that ``jax.vmap`` maps, because the sink's cotangents would be summed."""
    placement.seen(lax.stop_gradient(x), _refuse)
    return x


def _swept(stack: Stack, layer: Layer, init: PyTree, others: list[Any]) -> tuple[PyTree, PyTree]:
    """Scan with a backward loop that updates the sink."""
    # Params in a sink are read from the sink, whose cotangent is the new value.
    change: Any = stack.update
    in_sink = isinstance(stack.sink, Sink)
    mine = lambda weights, sink: sink.params if in_sink else weights  # noqa: E731
    read = lambda *xs: (stack.read(_at(xs[0], 0)), _at(xs[1], 0))  # noqa: E731
    # A ``custom_vjp`` differentiates only arguments, so the values in the closure of ``layer`` are
    # arguments of ``hoisted``.
    replay, _ = trees.trace_once(layer, init, *jax.eval_shape(read, stack.weights, others))
    consts = [*replay.program.consts]

    def hoisted(consts: list[Any], *args: PyTree) -> Any:
        return replay._replace(program=replay.program.replace(consts=consts))(*args)

    def forward(consts: list[Any], init: PyTree, others: Any, weights: Any, sink: Any) -> Any:
        def each(carry: PyTree, x: Any) -> Any:
            new, y = hoisted(consts, carry, stack.read(x[0]), x[1])
            return new, (y, carry)

        out, (ys, carries) = lax.scan(each, init, (mine(weights, sink), others))
        return (out, ys), (consts, carries, others, weights, sink)

    @jax.custom_vjp
    def scanned(*args: Any) -> Any:
        return forward(*args)[0]

    def backward(kept: Any, cotangents: Any) -> Any:
        consts, carries, others, weights, sink = kept
        arrived, of_ys = cotangents
        finite = norms.all_true([jnp.isfinite(x).all() for x in _floats(cotangents)])
        like = jax.eval_shape(lambda: _at(carries, 0))

        def each(state: Any, i: jax.Array) -> Any:
            of_carry, of_consts, sink = state
            w = stack.read(_at(mine(weights, sink), i))
            _, pull = jax.vjp(hoisted, consts, _at(carries, i), w, _at(others, i))
            here = jax.tree.map(
                lambda y: _at(y, i) if trees.is_inexact(y.dtype) else _none(y[0]), of_ys
            )
            more, of_carry, grads, of_others = pull((_filled(like, of_carry), here))
            total = [a + b for a, b in zip(of_consts, _floats(more), strict=True)]
            old = _at(sink, i)
            new = _computed(i, old, change(old, grads, finite))
            put = lambda stacked, x: lax.dynamic_update_index_in_dim(stacked, x, i, 0)  # noqa: E731
            return (_floats(of_carry), total, jax.tree.map(put, sink, new)), _floats(of_others)

        start = _floats(arrived), [jnp.zeros_like(x) for x in _floats(consts)], sink
        numbers = jnp.arange(len(stack.weights[0]), dtype=jnp.int32)
        (arrived, more, sink), of_others = lax.scan(each, start, numbers, reverse=True)
        found = (consts, more), (like, arrived), (others, of_others)
        return *(_filled(*x) for x in found), None, sink

    scanned.defvjp(forward, backward)
    return scanned(consts, init, others, [] if in_sink else stack.weights, stack.sink)


def _computed(i: jax.Array, old: PyTree, new: PyTree) -> PyTree:
    """Compute all new slices of layer ``i`` before one of them is written.

    XLA:CPU would compute each slice where it is written, from copies of the old arrays. XLA:CPU
    removes barriers, so the new slices pass through a branch that is always taken.
    """

    def taken(i: jax.Array, old: PyTree, new: PyTree) -> PyTree:
        return lax.cond(i >= 0, lambda old, new: new, lambda old, new: old, old, new)

    return lax.platform_dependent(i, old, new, cpu=taken, default=lambda i, old, new: new)


def _at(tree: PyTree, i: Any) -> PyTree:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


def _floats(tree: PyTree) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if trees.is_inexact(x.dtype)]


def _filled(like: PyTree, floats: Sequence[Any]) -> PyTree:
    """Return a cotangent of ``like`` from the cotangents of its floating leaves."""
    found = iter(floats)
    return jax.tree.map(lambda x: next(found) if trees.is_inexact(x.dtype) else _none(x), like)


def _none(x: Any) -> Any:
    return np.zeros(x.shape, jax.dtypes.float0)


def sent(tree: PyTree) -> PyTree:
    """Convert integers, bools and keys of a tree to the bits of floats."""

    def bits(x: Any) -> Any:
        if trees.is_inexact(x.dtype):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        return lax.bitcast_convert_type(x, _FLOATS[x.dtype.itemsize])

    return jax.tree.map(bits, tree)


def received(tree: PyTree, like: PyTree) -> PyTree:
    """Invert ``sent``; ``like`` has the dtypes of the result."""

    def read(x: Any, y: Any) -> Any:
        if trees.is_inexact(y.dtype):
            return x
        if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            data = lax.bitcast_convert_type(x, jnp.uint32)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(y))
        bits = jnp.uint8 if y.dtype == jnp.bool_ else y.dtype
        return lax.bitcast_convert_type(x, bits).astype(y.dtype)

    return jax.tree.map(read, tree, like)
