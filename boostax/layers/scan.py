# SPDX-License-Identifier: Apache-2.0
"""A scan over stacked layers that reduces gradients, or runs the optimizer, in its backward loop.

The loss contains the loop over layers, and the backward loop computes one layer's gradient at a
time. So the backward loop can do the work of a layer: gather its weights, reduce its gradient, add
the gradient to a sum, or run the optimizer.

The scan is a ``jax.custom_vjp``. Its *accumulator* is a tree with a slice for each layer: sums of
gradients, or params and optimizer state. The backward loop carries the accumulator and updates one
slice at a time in place. The backward pass returns *the new accumulator as the cotangent* of the
old accumulator. So the gradients of all layers never exist at the same time.
"""

import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.dtypes import float0

from boostax._core import checks, norms, placement, trees
from boostax._core.types import PyTree

Arrays = list[jax.Array]
Body = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
# A ``Body`` whose ``x`` is split into two arguments: a layer's weights, and other scanned values.
Layer = Callable[[PyTree, Arrays, Arrays], tuple[PyTree, PyTree]]
_WHO = "scan_layers"
# Cotangents must be floats, so integers, bools and keys are passed as the bits of floats of equal
# size.
_FLOATS = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32, 8: jnp.float64}
# The stacks of the loss during its trace; empty outside of a step with ``layers=``.
STACKS: contextvars.ContextVar[Sequence["Stack"]] = contextvars.ContextVar("stacks", default=())


def scan_layers(
    body: Body, init: PyTree, xs: PyTree, *, remat: bool = False
) -> tuple[PyTree, PyTree]:
    """Scan over stacked layers like ``jax.lax.scan``, for a step with ``layers=``.

    Call ``scan_layers`` in place of ``lax.scan`` in the loss. In a step with
    ``make_train_step(layers=...)``, the scan gathers each layer's weights, and its backward loop
    reduces the layer's gradient or runs the layer's optimizer; see ``boostax.train.Layers``. The
    forward pass then stores only the carry before each layer, and the backward pass computes each
    layer again, so a ``jax.debug.callback`` in ``body`` is called twice per layer and replica.
    Outside of such a step, the function behaves like ``lax.scan``.

    Args:
      body: ``body(carry, x) -> (carry, y)``, as in ``lax.scan``. Cast weights inside ``body``.
      init: the first carry.
      xs: the unmodified params of the stacked layers, each leaf ``[layers, ...]``; or a tree of
        these params and other scanned values, such as dropout keys.
      remat: whether to scan ``jax.checkpoint(body)`` outside of a step with ``layers=``.

    Returns:
      ``(carry, ys)``, as from ``lax.scan``.

    Raises:
      ValueError: in a step with ``layers=``, ``xs`` lacks params of a stack, a stack is scanned
        twice, or the scan is under ``jax.vmap``.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> layer = lambda x, w: (jnp.tanh(w * x), None)
      >>> x, _ = boostax.train.scan_layers(layer, jnp.float32(1.0), jnp.ones(3))
      >>> round(float(x), 2)
      0.57
    """
    leaves = {id(x) for x in jax.tree.leaves(xs)}
    for stack in STACKS.get():
        if leaves & {id(x) for x in stack.shown}:
            return stack.scan(body, init, xs)
    return lax.scan(jax.checkpoint(body) if remat else body, init, xs)


class UpdatedLayers(NamedTuple):
    """The accumulator of layers whose optimizer runs in the backward loop.

    Attributes:
      params: the params of the layers.
      bits: the optimizer state of the layers, converted by ``as_floats``.
      skipped: how often each layer was skipped in this call.
    """

    params: Arrays  # each [layers, ...]
    bits: PyTree  # each [layers, ...], floats
    skipped: jax.Array  # [layers] float32


@dataclasses.dataclass(eq=False)
class Stack:
    """A stack of layers in one trace of a loss.

    Attributes:
      name: the path of the stack in the params.
      weights: the stack's params, as stored on the device.
      read: ``read(weights)`` returns a layer's weights as ``body`` gets them.
      update: ``update(accumulator, gradient, finite)`` returns a layer's new accumulator;
        ``finite`` tells whether the cotangents of the scan's results are finite.
      accumulator: sums of gradients, or an ``UpdatedLayers``; ``None`` if only a forward pass is
        traced.
      wrap: a function that transforms ``body``, such as a policy's cast, or ``None``.
      shown: the leaves that the loss gets in place of the stack's params. The loss may pass these
        leaves only to ``scan_layers``.
      scanned: whether the loss has scanned the stack.
    """

    name: str
    weights: Arrays
    read: Callable[[Arrays], Arrays]
    update: Callable[[PyTree, Arrays, jax.Array], PyTree]
    accumulator: PyTree = None
    wrap: Callable[[Body], Body] | None = None
    shown: Sequence[jax.Array] = ()
    scanned: bool = False

    def scan(self, body: Body, init: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
        """Run ``scan_layers`` for this stack."""
        leaves, treedef = jax.tree.flatten(xs)
        numbers = {id(x): i for i, x in enumerate(self.shown)}
        order = [numbers.get(id(x)) for x in leaves]
        scanned = sorted(i for i in order if i is not None)
        got = None if scanned == [*range(len(self.shown))] else f"some of {self.name!r}"
        hint = "Scan all params of the stack in one call."
        checks.absent(_WHO, "xs", got, "all params of the stack", hint)
        got = "scanned again" if self.scanned else None
        hint = "A second scan would update the params again. Leave this stack out of layers=."
        checks.absent(_WHO, f"the stack {self.name!r}", got, "scanned once in a loss", hint)
        self.scanned = True
        body = body if self.wrap is None else self.wrap(body)
        init = jax.tree.map(jnp.asarray, init)
        others = [x for x, i in zip(leaves, order, strict=True) if i is None]
        # If ``jax.vmap`` mapped one of these arrays, JAX would sum the cotangents of the
        # accumulator over the mapped axis.
        hint = "Map the body instead: scan_layers(jax.vmap(body, in_axes=(0, None)), xs, layers)."
        error = _WHO, "init", "a mapped array", "outside jax.vmap", hint
        for x in (*jax.tree.leaves(init), *others):
            placement.seen(lax.stop_gradient(x), lambda _: checks.absent(*error))

        def layer(carry: PyTree, weights: Arrays, others: Arrays) -> tuple[PyTree, PyTree]:
            values = iter(others)
            x = [next(values) if i is None else weights[i] for i in order]
            return body(carry, treedef.unflatten(x))

        if self.accumulator is not None:
            return _scan_with_updates(self, layer, init, others)
        xs = self.weights, others
        return lax.scan(lambda carry, x: layer(carry, self.read(x[0]), x[1]), init, xs)


def _scan_with_updates(
    stack: Stack, layer: Layer, init: PyTree, others: Arrays
) -> tuple[PyTree, PyTree]:
    """Scan with a backward loop that updates the accumulator."""
    # If the accumulator contains the params, the loop reads the params from the accumulator. The
    # cotangent of the accumulator is the accumulator's new value.
    has_params = isinstance(stack.accumulator, UpdatedLayers)
    # A ``custom_vjp`` differentiates only arguments, so the values in the closure of ``layer`` are
    # arguments of ``hoisted``.
    weights, xs = jax.eval_shape(lambda x: _at(x, 0), (stack.weights, others))
    args = init, jax.eval_shape(stack.read, weights), xs
    replay = trees.Replay(*jax.make_jaxpr(layer, return_shape=True)(*args))
    consts = [*replay.program.consts]

    def hoisted(consts: Arrays, *args: PyTree) -> PyTree:
        return replay._replace(program=replay.program.replace(consts=consts))(*args)

    def forward(*args: PyTree) -> PyTree:
        consts, init, others, weights, accumulator = args

        def step(carry: PyTree, x: PyTree) -> PyTree:
            new, y = hoisted(consts, carry, stack.read(x[0]), x[1])
            return new, (y, carry)

        stored = accumulator.params if has_params else weights
        out, (ys, carries) = lax.scan(step, init, (stored, others))
        return (out, ys), (consts, carries, others, weights, accumulator)

    def backward(residuals: PyTree, cotangents: PyTree) -> PyTree:
        consts, carries, others, weights, accumulator = residuals
        of_result, of_ys = cotangents
        finite = norms.all_true([jnp.isfinite(x).all() for x in _floats(cotangents)])
        like = jax.eval_shape(lambda: _at(carries, 0))

        def step(state: PyTree, i: jax.Array) -> PyTree:
            of_carry, of_consts, accumulator = state
            w = stack.read(_at(accumulator.params if has_params else weights, i))
            _, pull = jax.vjp(hoisted, consts, _at(carries, i), w, _at(others, i))
            more, of_carry, grads, of_others = pull((_cotangent(like, of_carry), _at(of_ys, i)))
            total = [a + b for a, b in zip(of_consts, _floats(more), strict=True)]
            old = _at(accumulator, i)
            args = i, old, stack.update(old, grads, finite)
            # XLA:CPU would fuse the computation of each new slice with the write of the slice, and
            # would then copy the old arrays. XLA:CPU also removes optimization barriers, so the
            # slices pass through a branch that is always taken.
            new = lax.platform_dependent(
                *args,
                cpu=lambda i, *x: lax.cond(i >= 0, lambda old, new: new, lambda old, new: old, *x),
                default=lambda i, old, new: new,
            )
            accumulator = jax.tree.map(
                lambda xs, x: lax.dynamic_update_index_in_dim(xs, x, i, 0), accumulator, new
            )
            return (_floats(of_carry), total, accumulator), _floats(of_others)

        start = _floats(of_result), [jnp.zeros_like(x) for x in _floats(consts)], accumulator
        numbers = jnp.arange(len(stack.weights[0]), dtype=jnp.int32)
        (of_init, of_consts, accumulator), of_others = lax.scan(step, start, numbers, reverse=True)
        pairs = (consts, of_consts), (like, of_init), (others, of_others)
        return *(_cotangent(*pair) for pair in pairs), None, accumulator

    scanned = jax.custom_vjp(lambda *args: forward(*args)[0])
    scanned.defvjp(forward, backward)
    return scanned(consts, init, others, [] if has_params else stack.weights, stack.accumulator)


def _at(tree: PyTree, i: int | jax.Array) -> PyTree:
    """Return layer ``i`` of stacked values, which may include ``float0`` cotangents of integers."""
    return jax.tree.map(
        lambda x: x[0, ...] if x.dtype == float0 else lax.dynamic_index_in_dim(x, i, 0, False), tree
    )


def _floats(tree: PyTree) -> Arrays:
    return [x for x in jax.tree.leaves(tree) if trees.is_inexact(x.dtype)]


def _cotangent(like: PyTree, floats: Arrays) -> PyTree:
    """Return a cotangent of ``like`` from the cotangents of its floating leaves."""
    leaves = iter(floats)
    return jax.tree.map(
        lambda x: next(leaves) if trees.is_inexact(x.dtype) else np.zeros(x.shape, float0), like
    )


def as_floats(x: jax.Array) -> jax.Array:
    """Return floats with the bits of integers, bools or keys; floats are unchanged."""
    if trees.is_inexact(x.dtype):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    return lax.bitcast_convert_type(x, _FLOATS[x.dtype.itemsize])


def from_floats(x: jax.Array, like: jax.Array) -> jax.Array:
    """Invert ``as_floats``; ``like`` has the dtype of the result."""
    if trees.is_inexact(like.dtype):
        return x
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        data = lax.bitcast_convert_type(x, jnp.uint32)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    bits = jnp.uint8 if like.dtype == jnp.bool_ else like.dtype
    return lax.bitcast_convert_type(x, bits).astype(like.dtype)
