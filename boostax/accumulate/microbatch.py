# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation inside one step: a scan over micro-batches.

The result equals the result for the whole batch, but only the activations of one micro-batch are in
memory. Each replica sums its gradients in f32, so a reduction over replicas runs once, after the
scan.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import KeyPath, tree_leaves_with_path

from boostax._core import axes, bcoo, checks, trees
from boostax._core.types import PyTree
from boostax.accumulate import carried
from boostax.accumulate.aux import Aux, addends, as_aux, as_given, divide, own_of, weigh

_WHO = "microbatch"
# "stacked": the batch already has a leading dimension of micro-batches.
Count = int | Literal["stacked"]
Normalize = Literal["mean", "sum"]
Shape = tuple[int, ...]
PAD = "Pad the batch, and count only real rows in boostax.Aux.weight."
SAME = "Pass values without a dimension of rows by keyword: step(state, batch, beta=0.1)."


class _Sums(NamedTuple):
    """Weighted sums over micro-batches, without carried leaves."""

    loss: jax.Array
    metrics: PyTree
    grads: PyTree
    weight: jax.Array
    means: PyTree


# The sums over micro-batches, the carried values, the threaded values, and the other aux.
_Terms = tuple[_Sums, carried.Carried, dict[str, PyTree], PyTree]


@checks.arguments
def microbatch(
    value_and_grad_fn: Callable[..., tuple[PyTree, PyTree]],
    microbatches: Count,
    *,
    has_aux: bool = False,
    normalize: Normalize = "mean",
    dtype: jax.typing.DTypeLike = jnp.float32,
    rules: carried.Rules = carried.FLAX,
) -> Callable[..., tuple[PyTree, PyTree]]:
    r"""Evaluate a ``value_and_grad`` function on micro-batches, and combine the results.

    .. math:: g = \sum_i w_i g_i \big/ \sum_i w_i.

    The weight :math:`w_i` is the ``Aux.weight`` of micro-batch :math:`i`, or 1 without a weight. So
    a mean over tokens stays exact if micro-batches have different numbers of tokens. Unless the
    batch is stacked, micro-batch ``i`` of ``k`` has the rows ``i, i + k, ...``. With this choice of
    rows, no data moves between devices if the batch is sharded along its first dimension.

    Args:
      value_and_grad_fn: called as ``(params, batch, *args, **kwargs)``; returns
        ``(loss, grads)``, or ``((loss, aux), grads)`` with ``has_aux``.
      microbatches: number of micro-batches, which must divide the leading dimension of every leaf
        in the batch. With 1, ``value_and_grad_fn`` is returned unchanged. Use ``"stacked"`` for a
        batch that is already split, as for ``lax.scan``: ``[k, rows, ...]``.
      has_aux: as in ``jax.value_and_grad``. The docstring of ``boostax.Aux`` states how the fields
        of an ``Aux`` are combined.
        An aux of another class is stacked, so its leaves have a leading dimension
        ``[microbatches]``. If a leaf has one element per row,
        ``aux.swapaxes(0, 1).reshape(-1, *aux.shape[2:])`` restores the order of the batch.
      normalize: ``"mean"``, or ``"sum"`` if the loss is a sum over the rows.
      dtype: dtype of the gradient sum; sums of f64 and complex gradients stay f64 and
        complex. The sum is rounded once per micro-batch, as in ``accumulate``, and once after the
        division.
      rules: rules of ``boostax.carry`` for leaves whose gradient is their new value; these leaves
        are combined by their rules instead of averaged.

    Returns:
      A function with the same signature and results; gradients are in ``dtype``, and loss and
      floating metrics are in f32 or wider. The index of each micro-batch is folded into a keyword
      argument ``key``. Each micro-batch receives ``Aux.model_state`` of the micro-batch before as
      the keyword argument ``model_state``. If ``value_and_grad_fn`` has a third result, the next
      micro-batch receives this result as the keyword argument ``threaded``. Cost: one copy of the
      gradients; activations of one micro-batch; no collective.

    Raises:
      ValueError: the batch is not divisible, or an argument is out of range.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> loss = lambda w, x: jnp.mean(w * x)
      >>> f = boostax.train.microbatch(jax.value_and_grad(loss), 2)
      >>> f(jnp.float32(1.0), jnp.arange(4.0))
      (Array(1.5, dtype=float32), Array(1.5, dtype=float32))
    """
    count = require_count(_WHO, microbatches)
    checks.choice(_WHO, "normalize", normalize, Normalize, "Losses that are sums need 'sum'.")
    narrow = checks.floating_dtype(_WHO, "dtype", dtype)
    if count == 1:
        return value_and_grad_fn

    def wrapped(params: PyTree, batch: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        trees.require_unsplit(_WHO, kwargs, batch, count)
        slices, number, axis = _split(batch, count)
        key = kwargs.pop("key", None)
        # Each micro-batch gets these keyword arguments from the previous micro-batch.
        init = {k: x for k in ("model_state", "threaded") if (x := kwargs.pop(k, None)) is not None}
        last_aux: PyTree = Aux()

        def evaluate(index: jax.Array, state: dict[str, PyTree]) -> _Terms:
            nonlocal last_aux
            keyed = kwargs | ({} if key is None else {"key": jax.random.fold_in(key, index)})
            rows = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, axis, False), slices)
            value, grads, *threaded = value_and_grad_fn(params, rows, *args, **keyed, **state)
            loss, last_aux = value if has_aux else (value, Aux())
            aux = as_aux(last_aux)
            grads = bcoo.dense(grads, _WHO)
            new = carried.values(grads, carried.resolve(rules, grads))
            grads = addends(carried.without(grads, new), narrow)
            weight = jnp.asarray(1.0 if aux.weight is None else aux.weight, jnp.float32)
            loss, metrics, means = trees.at_least_float32((loss, aux.metrics, aux.means))
            sums = _Sums(loss, metrics, grads, weight, means)
            if normalize == "mean":
                sums = weigh(sums, weight)._replace(weight=weight, means=means)
            state = state | dict(zip(("threaded",), threaded, strict=False))
            state = state | ({} if aux.model_state is None else {"model_state": aux.model_state})
            return sums, new, state, own_of(last_aux)

        total, new, last, stacked = _scan(evaluate, number, init, rules, narrow)
        mean = divide(total, total.weight) if normalize == "mean" else total
        weight = None if as_aux(last_aux).weight is None else total.weight
        aux = Aux(weight, last.get("model_state"), mean.metrics, total.means)
        value = (mean.loss, as_given(aux, stacked, last_aux)) if has_aux else mean.loss
        return value, carried.restored(mean.grads, new), *[last[k] for k in last if k == "threaded"]

    return wrapped


def _scan(
    fn: Callable[..., _Terms], number: int, first: PyTree, rules: carried.Rules, narrow: jnp.dtype
) -> _Terms:
    """Sum the results of ``fn`` over the micro-batches."""
    replay = trees.Replay(*jax.make_jaxpr(fn, return_shape=True)(jnp.int32(0), first))
    state = axes.unify(first, replay.types[2])
    if axes.types(state) != axes.types(first):
        # The new model state varies over replicas, so the initial state needs a varying type, too.
        replay = trees.Replay(*jax.make_jaxpr(fn, return_shape=True)(jnp.int32(0), state))
    like, new, *_ = replay.types
    buffers = jax.tree.map(lambda g: axes.zeros(g, trees.buffer_dtype(g, narrow)), like.grads)
    zeros = jax.tree.map(axes.zeros, like._replace(grads=()))._replace(grads=buffers)
    by_name = carried.resolve(rules, new)
    empty = {k: carried.nothing(by_name[k], axes.zeros(x)) for k, x in new.items()}

    def body(carry: tuple[PyTree, ...], index: jax.Array) -> tuple[PyTree, PyTree]:
        sums, old, state = carry
        added, new, state, aux = replay(index, state)
        sums = jax.tree.map(lambda a, g: (a.astype(g.dtype) + g).astype(a.dtype), sums, added)
        new = {k: carried.combine(by_name[k], old[k], x) for k, x in new.items()}
        return (sums, new, state), aux

    total, stacked = lax.scan(body, (zeros, empty, state), jnp.arange(number, dtype=jnp.int32))
    return *total, stacked


def require_count(who: str, microbatches: Count) -> Count:
    """Return a checked number of micro-batches."""
    if microbatches == "stacked":
        return microbatches
    hint = "1 does not split the batch; pass 'stacked' for a batch with a micro-batch dimension."
    return checks.positive_int(who, "microbatches", microbatches, hint)


def _split(batch: PyTree, count: Count) -> tuple[PyTree, int, int]:
    """Return the split leaves, the number of micro-batches, and the dimension of micro-batches.

    Leaves of shape ``(b, ...)`` become ``(b // count, count, ...)``, which preserves a sharding of
    the rows.
    """
    arrays = jax.tree.map(jnp.asarray, batch)
    if count == "stacked":
        return arrays, stacked_count(batch, _WHO), 0
    hint = f"{PAD} Or change microbatches. 'stacked' is for a batch [micro-batches, rows, ...]."
    for path, x in tree_leaves_with_path(arrays):
        require_even(_WHO, path, x.shape, count, f"microbatches={count}", hint=hint)
    return jax.tree.map(lambda x: x.reshape(len(x) // count, count, *x.shape[1:]), arrays), count, 1


def require_even(
    who: str, path: KeyPath, shape: Shape, count: int, by: str, dim: int = 0, hint: str = PAD
) -> None:
    """Refuse a leaf of a batch if ``count`` does not divide the size of the dimension ``dim``."""
    if len(shape) > dim and shape[dim] > 0 and not shape[dim] % count:
        return
    place = f"dimension {dim}" if dim else "leading dimension"
    allowed = f"divisible by {by} in its {place} at {trees.path_name(path) or 'the root'!r}"
    raise ValueError(checks.message(who, "batch", allowed, shape, hint if shape else SAME))


def stacked_count(batch: PyTree, who: str, least: int = 1) -> int:
    """Return the number of micro-batches; refuse leaves with fewer than ``least`` dimensions."""
    shapes = {name: jnp.shape(x) for name, x in trees.named(batch)}
    numbers = {shape[:1] for shape in shapes.values()}
    valid = len(numbers) == 1 and (0,) not in numbers and min(map(len, shapes.values())) >= least
    allowed = "[micro-batches, rows, ...] in every leaf, with the same number of micro-batches"
    checks.require(valid, who, "a stacked batch", got=shapes, allowed=allowed, hint=SAME)
    return numbers.pop()[0]
