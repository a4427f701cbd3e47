# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays: precision, finiteness, states in a tree, leaves that are not dense arrays.

The constants of a model are activations, names and numbers that ``jit`` did not trace. A sparse
gradient is a ``BCOO`` of JAX, which holds rows of an embedding or single elements. ``describe``
makes it dense before a transformation of boostax sees it: rows of one index are added, rows out of
range dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.tree_util import GetAttrKey, register_pytree_node
from jax.typing import DTypeLike

from boostax._core import axes, checks, jaxprs

PyTree = Any
LOST = "Restore it into tx.init(params), or by boostax.migrate_state(opt_state, tx, params)."
# Flax's collection of leaves whose cotangent is their new value.
OVERWRITE = "_overwrite_with_gradient"


def at_least_float32(tree: PyTree) -> PyTree:
    """Widen f16 and bf16 leaves to f32, and types of such arrays; all other leaves stay."""

    def widened(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(dtype=wide_dtype(x))
        return as_dtype(x, wide_dtype(x)) if _is_number(x) else x

    return jax.tree.map(widened, tree)


def first_state(tx: optax.GradientTransformation, params: PyTree) -> Any:
    """Return the first state of ``tx``, in which leaves shared with ``params`` are copied.

    Some states of Optax keep the first params (``contrib.dog``, ``prodigy``), and donation refuses
    a buffer that two arguments share.
    """
    taken = {id(x) for x in jax.tree.leaves(params)}

    def own(x: Any) -> Any:
        shared = isinstance(x, jax.Array) and id(x) in taken
        taken.add(id(x))
        return jnp.array(x, copy=True) if shared else x

    return jax.tree.map(own, tx.init(params))


def as_dtype(x: Any, dtype: np.dtype[Any]) -> jax.Array:
    """Return ``x`` in a strong dtype; an array that already has it is returned unchanged."""
    if isinstance(x, jax.Array) and x.dtype == dtype and not getattr(x, "weak_type", False):
        return x
    return jnp.asarray(x).astype(dtype)


def wide_dtype(x: Any) -> np.dtype[Any]:
    """Return the dtype in which boostax computes with a gradient like ``x``: f32 or wider."""
    # Without x64 a NumPy array of f64 becomes f32, so its own dtype is not the right one.
    dtype = x.dtype if isinstance(x, jax.Array) else jnp.result_type(x)
    if dtype == jnp.float32 or not is_inexact(dtype) or jnp.finfo(dtype).bits > 16:
        return dtype
    return np.dtype(np.float32)


def is_inexact(dtype: DTypeLike) -> bool:
    """Return whether a dtype is floating or complex, so that its arrays have gradients."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def buffer_dtype(x: Any, narrow: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a sum of gradients: ``narrow``, or a wider one for f64 and complex."""
    wide = wide_dtype(x)
    # A frozen leaf may have no gradient, and the dtype of a PRNG key cannot be promoted.
    plain = wide == jnp.float32 or not is_inexact(wide)
    return narrow if plain else jnp.promote_types(wide, narrow)


def addends(tree: PyTree, narrow: np.dtype[Any]) -> PyTree:
    """Cast gradients to the dtype of weighting and adding: f32, or the sum's dtype if it is wider.

    A sum in less than f32 then rounds once per addition. If the gradient were rounded first, its
    weight would multiply the rounding error, and small values would vanish that the weight lifts
    into the range of the sum.
    """

    def addend(g: jax.Array) -> jax.Array:
        return g.astype(jnp.promote_types(wide_dtype(g), buffer_dtype(g, narrow)))

    return jax.tree.map(addend, tree)


def clip_finite(x: jax.Array, limit: float | jax.Array) -> jax.Array:
    """Clip finite elements to ``-limit..limit``; infinities and NaN stay visible."""
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)


def saturate(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Cast so that finite elements stay finite; infinities and NaN stay."""
    if jnp.iscomplexobj(x) or jnp.finfo(dtype).max >= jnp.finfo(x.dtype).max:
        return x.astype(dtype)
    return clip_finite(x, float(jnp.finfo(dtype).max)).astype(dtype)


def largest_magnitudes(tree: PyTree) -> list[jax.Array]:
    """Return ``max |x|`` of each inexact leaf: NaN and infinities stay, empty leaves give 0.

    A reduction of the leaf itself fuses with the operation that made it. With an elementwise
    ``isfinite``, or a test of the unscaled gradient, XLA:CPU writes a temporary as large as a leaf.
    A float maximum may lose NaN: an all-reduce of maxima does on XLA:CPU, for a leaf that is
    sharded, and other backends do not define its result. Leaves are widened because XLA:CPU takes
    twice as long over f16 on a processor without vectors of f16.
    """
    inexact = [x for x in jax.tree.leaves(tree) if is_inexact(jnp.result_type(x))]
    wide = [at_least_float32(magnitude(x)) for x in inexact]
    return lax.platform_dependent(wide, cpu=_by_extremes, default=_by_bits) if wide else []


def _by_bits(leaves: list[jax.Array]) -> list[jax.Array]:
    """Return maxima of magnitudes as unsigned integers: the same order, with NaN after infinity."""
    bits = [lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for x in leaves]
    most = [lax.reduce_max(x, tuple(range(x.ndim))) for x in bits]
    return [lax.bitcast_convert_type(x, leaf.dtype) for x, leaf in zip(most, leaves, strict=True)]


def _by_extremes(leaves: list[jax.Array]) -> list[jax.Array]:
    """Return maxima of magnitudes, each reduced together with the minimum.

    A reduction with two results becomes no all-reduce: the results of all shards are gathered and
    compared. XLA:CPU would write out bits, and TPU reads a gradient again for a pair.
    """
    found = []
    for x in leaves:
        zero = np.zeros((), x.dtype)
        most, least = lax.reduce((x, x), (zero, zero), _extremes, tuple(range(x.ndim)))
        found.append(lax.select(lax.ne(least, least), least, most))
    return found


# JAX traces a module's function once for all leaves.
def _extremes(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return lax.max(a[0], b[0]), lax.min(a[1], b[1])


def square_sums(leaves: Sequence[jax.Array], dtype: DTypeLike = "float32") -> list[jax.Array]:
    """Return for each gradient the sum of its squares in two units; ``root`` makes them a norm.

    A square spans twice the octaves of its number, so one sum in f32 loses those of numbers below
    1e-19, and is infinite for numbers above 1e19. The first sum is in a unit that no finite number
    overflows (up to 2**31 elements of the largest), so that it is finite where all elements are.
    The second is in a unit for the numbers that gradients usually have. Both units are powers of
    two, which round nothing. Sums over leaves and replicas are sums of both.

    Returns:
      Arrays ``[2]`` in the widest dtype, ``dtype`` or wider; one of zeros without leaves. NaN and
      infinities show in both sums. Cost: one read of each leaf.
    """
    wides = at_least_float32(list(leaves))
    parts = [(x.real, x.imag) if jnp.iscomplexobj(x) else (x,) for x in wides]
    wide = jnp.result_type(dtype, *(x for pair in parts for x in pair))
    flat = [[x.astype(wide) for x in pair] for pair in parts]
    none = [jnp.zeros(2, wide)]
    return lax.platform_dependent(flat, cpu=_by_pairs, default=_by_sums) if flat else none


def _by_sums(parts: list[list[jax.Array]]) -> list[jax.Array]:
    """Return two sums a leaf, which a TPU fuses with what made it, and XLA:CPU does not."""
    return [jnp.stack([jnp.sum(x) for x in _squares(pair)]) for pair in parts]


def _by_pairs(parts: list[list[jax.Array]]) -> list[jax.Array]:
    """Return two sums a leaf by one reduction, which writes no operand on XLA:CPU.

    It adds term by term: the longest dimension is left to a plain sum, which rounds less.
    """

    def both(pair: list[jax.Array]) -> jax.Array:
        shape, zero = pair[0].shape, np.zeros((), pair[0].dtype)
        inner = tuple(i for i in range(len(shape)) if i != np.argmax(shape))
        found = lax.reduce(tuple(_squares(pair)), (zero, zero), _add_both, inner)
        return jnp.stack([x.sum() for x in found])

    return list(map(both, parts))


# JAX traces a module's function once for all leaves.
def _add_both(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return lax.add(a[0], b[0]), lax.add(a[1], b[1])


def _squares(pair: list[jax.Array]) -> list[Any]:
    # Without the maximum XLA would multiply the units first, and their square is zero.
    units = _units(pair[0].dtype)
    return [sum(jnp.square(jnp.maximum(jnp.abs(x) * unit, 0)) for x in pair) for unit in units]


def _units(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the factors of numbers in ``square_sums``: 2**-80 and 2**30 for f32."""
    octaves = int(jnp.finfo(dtype).maxexp)
    return 2.0 ** (-5 * octaves // 8), 2.0 ** (15 * octaves // 64)


def root(sums: jax.Array) -> jax.Array:
    """Return the norm whose ``square_sums`` are given: right to rounding from 1e-28 on in f32."""
    large, usual = _units(sums.dtype)
    first, second = jnp.sqrt(sums)
    return jnp.where(jnp.isfinite(sums[1]), second / usual, first / large)


def magnitude(x: jax.Array) -> jax.Array:
    """Return the magnitude of each element; for a complex element, of its larger part."""
    if jnp.iscomplexobj(x):
        # The modulus of a finite number can overflow; its parts cannot.
        return jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag))
    return lax.abs(x)


def counts(*marks: jax.Array) -> jax.Array:
    """Return in f32 how many elements of each array are true.

    One reduction counts them all: XLA:CPU writes the operand of a plain sum to memory, which takes
    5 times as long.
    """
    ones, zeros = tuple(mark.astype(jnp.int32) for mark in marks), (jnp.int32(0),) * len(marks)
    add = lambda a, b: tuple(map(jnp.add, a, b))  # noqa: E731
    return jnp.stack(lax.reduce(ones, zeros, add, tuple(range(marks[0].ndim)))).astype(jnp.float32)


def all_true(flags: list[jax.Array]) -> jax.Array:
    """Return the conjunction of bool scalars; True if there are none."""
    return jnp.stack(flags).all() if flags else jnp.asarray(True)


def all_finite(tree: PyTree, axis_name: axes.AxisName | None = None) -> jax.Array:
    """Return whether no leaf holds a NaN or an infinity, on any replica.

    Args:
      tree: arrays of any dtype. Integers, ``None`` and empty leaves count as finite.
      axis_name: mesh axis (or tuple of axes) over which the replicas must agree.

    Returns:
      Bool scalar, equal on all replicas when ``axis_name`` is given. Cost: one read of the tree,
      and one 4-byte collective with ``axis_name``.

    Raises:
      ValueError: the axis is not bound.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> bool(boostax.precision.all_finite({"w": jnp.array([1.0, jnp.inf])}))
      False
    """
    names = axes.canonical("all_finite", axis_name)
    axes.require_bound(names, "all_finite")
    return axes.agree(all_true([jnp.isfinite(m) for m in largest_magnitudes(tree)]), names)


def stays_finite(old: PyTree, new: PyTree) -> jax.Array:
    """Return whether every element that is finite in ``old`` is also finite in ``new``."""

    def news(before: jax.Array, after: jax.Array) -> jax.Array:
        if not is_inexact(jnp.result_type(after)):
            return jnp.zeros(())
        return jnp.where(jnp.isfinite(before), after, jnp.zeros_like(after))

    return all_finite(jax.tree.map(news, old, new))


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Cast each leaf to the strong dtype of its counterpart."""
    return jax.tree.map(lambda x, y: as_dtype(x, jnp.result_type(y)), tree, like)


def applied(params: PyTree, updates: PyTree) -> PyTree:
    """Apply updates as Optax does, to float8 params too, which JAX promotes to no other dtype."""

    def wide(p: Any) -> Any:
        small = is_inexact(jnp.result_type(p)) and jnp.finfo(jnp.result_type(p)).bits == 8
        return as_dtype(p, np.dtype(np.float32)) if small else p

    new = optax.apply_updates(jax.tree.map(wide, params), jax.tree.map(wide, updates))
    return cast_like(new, params)


def as_updates(tree: PyTree, params: PyTree) -> PyTree:
    """Cast updates to the dtypes of the params, if there are params."""
    if params is None:
        return tree
    absent = lambda node: node is None or isinstance(node, optax.MaskedNode)  # noqa: E731
    cast = lambda x, p: x if absent(x) or not _is_number(p) else cast_like(x, p)  # noqa: E731
    return jax.tree.map(cast, tree, params, is_leaf=absent)


def _is_number(x: object) -> bool:
    """Return whether a leaf is an array or a scalar; a module may also hold functions."""
    return hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))


def masked(tree: PyTree, active: PyTree) -> PyTree:
    """Replace every leaf that is not active by ``optax.MaskedNode``.

    ``active`` is a tree of bools like ``tree``; it may hold such nodes already.
    """
    return jax.tree.map(lambda keep, x: x if keep else optax.MaskedNode(), active, tree)


def unmasked(part: PyTree, whole: PyTree) -> PyTree:
    """Replace each ``optax.MaskedNode`` in ``part`` by the leaf at its position in ``whole``."""
    kept = lambda x, y: x if isinstance(y, optax.MaskedNode) else y  # noqa: E731
    return jax.tree.map(kept, whole, part)


def path_name(path: tuple[Any, ...]) -> str:
    """Return a tree path as text, such as ``layers/0/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named(tree: PyTree) -> list[tuple[str, Any]]:
    """Return the leaves with their paths; see ``path_name``."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def names(tree: PyTree) -> list[str]:
    """Return the paths of the leaves; see ``path_name``."""
    return [name for name, _ in named(tree)]


def plain_path(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names on a path, the same for an NNX module, its state and its arrays."""
    path = path[:-1] if path[-1:] == (GetAttrKey("value"),) else path
    return tuple(path_name((key,)) for key in path)


def require_params(params: PyTree, who: str, hint: str) -> None:
    """Refuse an ``update`` without the params."""
    checks.require(who, "params", params, "given to update", params is not None, hint)


def require_arrays(params: PyTree, who: str) -> None:
    """Refuse leaves that no compiled step can take, such as functions in a module."""
    got = [(name, type(leaf).__name__) for name, leaf in named(params) if not _is_number(leaf)]
    hint = "params, static = eqx.partition(model, eqx.is_inexact_array); eqx.combine in the loss."
    checks.require(who, "params", got[:6], "arrays", not got, hint, TypeError)


def overwritten(path: tuple[Any, ...]) -> bool:
    """Return whether a leaf is in Flax's collection of leaves to overwrite."""
    return OVERWRITE in path_name(path).split("/")


def require_gradients(tree: PyTree, who: str, *, carried: bool = False) -> None:
    """Refuse leaves that are not gradients: integers, bools, float0, new values of leaves."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # Most paths need no text of their own, which takes longer.
        if not carried and OVERWRITE in str(path) and overwritten(path):
            got = f"the new value of a leaf at {path_name(path)!r}"
            hint = "Put boostax.carry around the whole optimizer: it sets such leaves."
            raise ValueError(checks.message(who, "gradients", "gradients", got, hint))
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            kind = "float0" if dtype == jax.dtypes.float0 else dtype or type(leaf).__name__
            got, allowed = (
                f"{kind} at {path_name(path) or 'the root'!r}",
                "floating or complex arrays",
            )
            hint = "Take such leaves out of the trained params: eqx.partition, or wrt= of NNX."
            raise TypeError(checks.message(who, "gradients", allowed, got, hint))


def require_shapes(who: str, what: str, got: PyTree, wanted: PyTree, hint: str) -> None:
    """Refuse a tree with a leaf of another shape, which might broadcast unnoticed."""
    if jax.tree.structure(got) != jax.tree.structure(wanted):
        return
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, x), y in pairs:
        if jnp.shape(x) != jnp.shape(y):
            allowed = f"shaped {jnp.shape(y)} at {path_name(path) or 'the root'!r}"
            raise ValueError(checks.message(who, what, allowed, jnp.shape(x), hint))


def find(tree: PyTree, wanted: Callable[[Any], bool]) -> list[Any]:
    """Return every node that ``wanted`` accepts; see ``nodes``. Refuse a state made a dict."""
    found = nodes(tree)
    made, hint = not hasattr(tree, "init"), "Pass what tx.init(params) returned, not tx or a step."
    checks.require("boostax", "a state", type(tree).__name__, "a tree", made, hint, TypeError)
    lost = any(isinstance(node, dict) and "inner_state" in node for node in found)
    checks.require("boostax", "a state", "a dict", "in its classes", not lost, LOST, TypeError)
    return list(filter(wanted, found))


def telling(tree: PyTree, *methods: str) -> list[Any]:
    """Return the states that have all methods of these names; see ``nodes``."""
    return find(tree, lambda node: all(callable(getattr(node, x, None)) for x in methods))


def nodes(tree: PyTree) -> list[Any]:
    """Return every node of a tree but ``None``, an outer node before those inside it.

    A chain keeps the order of its parts, so the first of two nested states is the outer one.
    Variables of NNX are replaced by their arrays; see ``arrays``.
    """
    found: list[Any] = []
    waiting = [tree.opt_state if hasattr(tree, "wrt") else tree]
    flatten = jax.tree_util.default_registry.flatten_one_level
    while waiting:
        node = waiting.pop()
        if hasattr(node, "__jax_array__") and not isinstance(node, jax.Array):
            return nodes(arrays(tree))
        if node is not None:
            found.append(node)
            children, _ = flatten(node) or ((), None)
            waiting.extend(reversed([*children]))
    return found


def arrays(tree: PyTree) -> PyTree:
    """Replace the variables of NNX by their arrays, and an optimizer of NNX by its state.

    A tree without variables is returned unchanged.
    """
    tree = tree.opt_state if hasattr(tree, "wrt") else tree
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_variable)
    if not any(map(_is_variable, leaves)):
        return tree
    flatten: Any = jax.tree_util.default_registry.flatten_one_level
    return structure.unflatten([flatten(x)[0][0] if _is_variable(x) else x for x in leaves])


def _is_variable(node: object) -> bool:
    return hasattr(node, "__jax_array__") and not isinstance(node, jax.Array)


class Pruning(NamedTuple):
    """The position of a state for some params within the state for all params.

    ``init`` is called with some of the params; the state leaves that are then missing belong to the
    missing params. This works through every wrapper, and for state leaves of any shape.

    Attributes:
      whole: structure of the larger state.
      part: structure of the smaller one.
      places: for each leaf of the smaller state, its index among the leaves of the larger one.
    """

    whole: Any
    part: Any
    places: tuple[int, ...]

    def take(self, state: PyTree) -> PyTree:
        """Return the smaller state, taken out of the larger one; nothing is copied."""
        leaves = self.whole.flatten_up_to(state)
        return self.part.unflatten([leaves[place] for place in self.places])

    def put(self, state: PyTree, part: PyTree) -> PyTree:
        """Return the larger state with the leaves of the smaller one in it."""
        leaves = self.whole.flatten_up_to(state)
        for place, leaf in zip(self.places, self.part.flatten_up_to(part), strict=True):
            leaves[place] = leaf
        return self.whole.unflatten(leaves)


def pruning(tx: optax.GradientTransformation, params: PyTree, fewer: PyTree, who: str) -> Pruning:
    """Find the state of ``tx`` for ``fewer`` params, the others masked, in that for all params.

    Raises:
      ValueError: the shape or path of a state leaf depends on which params there are.
    """
    # An init may refuse params that differ per replica, so it gets shapes without varying axes.
    bare = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)  # noqa: E731
    whole, structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(tx.init, bare(params)))
    there = {(path, x.shape, x.dtype): place for place, (path, x) in enumerate(whole)}
    some, part = jax.tree_util.tree_flatten_with_path(jax.eval_shape(tx.init, bare(fewer)))
    places = [there.get((path, x.shape, x.dtype), -1) for path, x in some]
    lost = [path_name(path) for place, (path, _) in zip(places, some, strict=True) if place < 0]
    hint = "These depend on which leaves there are, as optax.flatten's do: use it on the leaves."
    allowed = "an optimizer that keeps its state leaf by leaf"
    checks.require(who, "inner", lost[:6], allowed, not lost, hint)
    return Pruning(structure, part, tuple(places))


class Replay(NamedTuple):
    """The traced program of a function; a call evaluates it on arguments of the same types."""

    program: jaxprs.ClosedJaxpr
    structure: Any

    def __call__(self, *args: PyTree) -> PyTree:
        leaves = jaxprs.jaxpr_as_fun(self.program)(*jax.tree.leaves(args))
        return jax.tree.unflatten(self.structure, leaves)


def trace_once(fn: Callable[..., PyTree], *args: PyTree) -> tuple[Replay, PyTree]:
    """Trace a function; return its program as a function, and the types of its result.

    The types are ``jax.ShapeDtypeStruct`` with sharding and varying axes. ``jax.eval_shape(fn)``
    followed by ``fn`` would run the Python code inside twice, and twice as often for each level of
    nesting.
    """
    traced, types = jax.make_jaxpr(fn, return_shape=True)(*args)
    return Replay(traced, jax.tree.structure(types)), types


class _Aside:
    """A node without leaves that holds a constant, so that JAX does not see it."""

    def __init__(self, leaf: object):
        self.leaf = leaf

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Aside) and self.leaf is other.leaf

    def __hash__(self) -> int:
        return id(self.leaf)


register_pytree_node(_Aside, lambda node: ((), node), lambda node, _: node)
_is_aside: Callable[[Any], bool] = _Aside.__instancecheck__


def is_array(leaf: object) -> bool:
    """Return whether a leaf is an array; a dtype such as ``jnp.float32`` is not."""
    return not isinstance(leaf, type) and hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_none(node: object) -> bool:
    """Return whether a node is ``None``."""
    return node is None


def aside(params: PyTree) -> PyTree:
    """Hide the constants among the params from JAX; ``restored`` brings them back.

    A Python integer or bool is a constant. A Python float is one beside traced arrays
    only: where nothing is traced it is trained, as ``jax.grad`` does.
    """
    leaves = jax.tree.leaves(params)
    arrays, traced = any(map(is_array, leaves)), any(isinstance(x, Tracer) for x in leaves)

    def constant(x: object) -> bool:
        if isinstance(x, int):
            return arrays
        return not is_array(x) and (traced or not isinstance(x, (float, complex)))

    return jax.tree.map(lambda x: _Aside(x) if constant(x) else x, params)


def restored(params: PyTree) -> PyTree:
    """Return the params with the constants that ``aside`` has hidden."""
    return jax.tree.map(lambda x: x.leaf if _is_aside(x) else x, params, is_leaf=_is_aside)


def without_gradient(grads: PyTree, active: PyTree) -> PyTree:
    """Replace hidden constants by ``None``, or by ``optax.MaskedNode`` where they are not active.

    Args:
      grads: a tree like the result of ``aside``.
      active: a bool, or a tree of bools like the argument of ``aside``.
    """
    stop = lambda node: isinstance(node, (_Aside, optax.MaskedNode))  # noqa: E731
    if isinstance(active, bool):
        active = jax.tree.map(lambda _: active, grads, is_leaf=stop)

    def replaced(g: Any, keep: bool) -> Any:
        return g if not _is_aside(g) else None if keep else optax.MaskedNode()

    return jax.tree.map(replaced, grads, active, is_leaf=stop)


def of_arrays(tree: PyTree, params: PyTree) -> PyTree:
    """Hide in a tree like the params what ``aside`` has hidden in ``params``."""
    return jax.tree.map(lambda p, x: p if _is_aside(p) else x, params, tree, is_leaf=_is_aside)


def arrays_alone(params: PyTree) -> PyTree:
    """Replace leaves that are not arrays by ``None``, as ``equinox.filter`` does."""
    return jax.tree.map(lambda x: x if is_array(x) else None, params)


def put_back(new: PyTree, params: PyTree) -> PyTree:
    """Return new params, with the old leaf wherever the new one is ``None``."""
    return jax.tree.map(lambda n, p: p if n is None else n, new, params, is_leaf=is_none)


# A program that holds a sparse array has imported this module, so boostax need not import it.
MODULE = "jax.experimental.sparse"
_DENSE = "Convert with .todense()."


def _is_sparse(node: object) -> bool:
    return MODULE in sys.modules and isinstance(node, sys.modules[MODULE].JAXSparse)


def dense(tree: PyTree, who: str) -> PyTree:
    """Return the tree with a dense array in place of each ``BCOO`` of single rows."""

    def on_leaf(path: Any, x: Any) -> Any:
        if not _is_sparse(x):
            return x
        got = type(x).__name__, path_name(path)
        fits = got[0] == "BCOO" and not x.n_batch and x.n_sparse > 0
        allowed = "dense arrays or BCOO with n_batch=0"
        checks.require(who, "gradients", got, allowed, fits, _DENSE, TypeError)
        # The type of x.todense() lacks the axes over which it varies. The sum is in f32
        # or wider, so that rows of one index are rounded once.
        zeros = jnp.zeros(x.shape, wide_dtype(x))
        zeros = axes.to_varying(zeros, axes.varying(x.data) | axes.varying(x.indices))
        return zeros.at[tuple(x.indices.T)].add(x.data).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(on_leaf, tree, is_leaf=_is_sparse)


def require_dense(tree: PyTree, who: str, what: str = "gradients") -> None:
    """Refuse sparse leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_sparse)
    got = [(type(x).__name__, path_name(path)) for path, x in leaves if _is_sparse(x)]
    checks.require(who, what, got[:6], "dense arrays", not got, _DENSE, TypeError)
