# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays: gradients and their precision, states in them, leaves that are no dense arrays.

Constants of a model are activations, names, numbers that ``jit`` left alone. Sparse gradients are
the rows of an embedding, or single elements, as a ``BCOO`` of JAX's: ``describe`` makes them dense
before any transformation of boostax sees them. Rows of the same index are added, those out of range
dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.tree_util import GetAttrKey, register_pytree_node

from boostax._core import axes, checks, jaxprs

PyTree = Any
# Flax's collection of leaves whose cotangent is their new value.
OVERWRITE = "_overwrite_with_gradient"


def at_least_float32(tree: PyTree) -> PyTree:
    """Widen f16 and bf16 leaves to f32; f32, f64, complex and everything else stay as they are.

    Of types (``jax.ShapeDtypeStruct``) the types.
    """

    def widened(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(dtype=wide_dtype(x))
        return as_dtype(x, wide_dtype(x)) if _is_number(x) else x

    return jax.tree.map(widened, tree)


def as_dtype(x: Any, dtype: np.dtype[Any]) -> jax.Array:
    """Return ``x`` in a dtype, a strong one; an array that has it already is returned itself."""
    if isinstance(x, jax.Array) and x.dtype == dtype and not x.weak_type:
        return x
    return jnp.asarray(x).astype(dtype)


def wide_dtype(x: Any) -> np.dtype[Any]:
    """The dtype in which boostax computes with a gradient like ``x``: f32 or wider."""
    # Not x.dtype: without x64 a NumPy array of f64 becomes f32.
    dtype = x.dtype if isinstance(x, jax.Array) else jnp.result_type(x)
    if dtype == jnp.float32:
        return dtype
    return jnp.promote_types(dtype, jnp.float32) if is_inexact(dtype) else dtype


def is_inexact(dtype: Any) -> bool:
    """Whether it is floating or complex: what has a gradient."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def buffer_dtype(x: Any, narrow: np.dtype[Any]) -> np.dtype[Any]:
    """Dtype of a sum of gradients: ``narrow`` for those of f32 or less, else their own kind."""
    wide = wide_dtype(x)
    # What has no gradient may be frozen; a PRNG key's dtype meets no other.
    return (
        narrow if wide == jnp.float32 or not is_inexact(wide) else jnp.promote_types(wide, narrow)
    )


def addends(tree: PyTree, narrow: np.dtype[Any]) -> PyTree:
    """Gradients in the dtype in which they are weighed and added up: f32, or that of a wider sum.

    A sum of less than f32 then rounds once per addition. A gradient that was rounded to it first
    would take that error times its weight, and lose what only the product lifts into its range.
    """
    dtype = lambda g: jnp.promote_types(wide_dtype(g), buffer_dtype(g, narrow))  # noqa: E731
    return jax.tree.map(lambda g: g.astype(dtype(g)), tree)


def clip_finite(x: jax.Array, limit: float | jax.Array) -> jax.Array:
    """Clip to ``-limit..limit``; what is infinite or NaN stays so, to be seen."""
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)


def saturate(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """A cast that does not overflow: what is finite stays finite, what is not stays so."""
    if jnp.iscomplexobj(x) or jnp.finfo(dtype).max >= jnp.finfo(x.dtype).max:
        return x.astype(dtype)
    return clip_finite(x, float(jnp.finfo(dtype).max)).astype(dtype)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Give each leaf the (strong) dtype of its counterpart."""
    return jax.tree.map(lambda x, y: as_dtype(x, jnp.result_type(y)), tree, like)


def as_updates(tree: PyTree, params: PyTree) -> PyTree:
    """What ``update`` hands out: in the dtypes of the params, where they are given."""
    if params is None:
        return tree
    absent = lambda node: node is None or isinstance(node, optax.MaskedNode)  # noqa: E731
    cast = lambda x, p: x if absent(x) or not _is_number(p) else cast_like(x, p)  # noqa: E731
    return jax.tree.map(cast, tree, params, is_leaf=absent)


def _is_number(x: Any) -> bool:
    """Whether a leaf is an array or a scalar; in a module there may be functions besides."""
    return hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))


def masked(tree: PyTree, active: PyTree) -> PyTree:
    """``optax.MaskedNode`` in the place of every leaf that is not active.

    ``active`` is a tree of bools like ``tree``, in which such a node may stand already.
    """
    return jax.tree.map(lambda keep, x: x if keep else optax.MaskedNode(), active, tree)


def unmasked(part: PyTree, whole: PyTree) -> PyTree:
    """``part`` with its ``optax.MaskedNode`` replaced by the leaves of ``whole``."""
    leaves, treedef = jax.tree.flatten(whole)
    pairs = zip(treedef.flatten_up_to(part), leaves, strict=True)
    return treedef.unflatten([x if isinstance(y, optax.MaskedNode) else y for y, x in pairs])


def path_name(path: tuple[Any, ...]) -> str:
    """``layers/0/kernel``: a tree path as people write it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named(tree: PyTree, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """The leaves with their paths as people write them."""
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [(path_name(path), leaf) for path, leaf in pairs]


def names(tree: PyTree) -> list[str]:
    """The paths of the leaves."""
    return [name for name, _ in named(tree)]


def plain_path(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The names on a path: the same for a module of NNX, its state and the arrays alone."""
    path = path[:-1] if path[-1:] == (GetAttrKey("value"),) else path
    return tuple(path_name((key,)) for key in path)


def require_params(params: PyTree, who: str, hint: str) -> None:
    """Refuse an ``update`` without the params."""
    if params is None:
        raise ValueError(f"{who}: params must be given to update, got None. {hint}")


def require_arrays(params: PyTree, who: str) -> None:
    """Refuse what no compiled step can take: functions in a module, say."""
    for name, leaf in named(params):
        if not _is_number(leaf):
            raise TypeError(
                f"{who}: params must be arrays, got {type(leaf).__name__} at {name!r}. "
                "params, static = eqx.partition(model, eqx.is_inexact_array), and eqx.combine in "
                "the loss."
            )


def overwritten(path: tuple[Any, ...]) -> bool:
    """Whether a leaf is in Flax's collection of those."""
    return OVERWRITE in path_name(path).split("/")


def require_gradients(tree: PyTree, who: str, *, carried: bool = False) -> None:
    """Refuse leaves that cannot be scaled or summed: integers, bools, float0, new values."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", jax.dtypes.float0)
        if not jnp.issubdtype(dtype, jnp.inexact) or (not carried and OVERWRITE in str(path)):
            _refuse(who, path, leaf, carried)


def _refuse(who: str, path: tuple[Any, ...], leaf: Any, carried: bool) -> None:
    """Say why a leaf is no gradient, if it is none."""
    if overwritten(path) and not carried:
        raise ValueError(
            f"{who}: gradients must be gradients, got the new value of a leaf at "
            f"{path_name(path)!r}. Put boostax.carry around the whole optimizer: it sets such "
            "leaves and hands on the others."
        )
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not is_inexact(dtype):
        kind = "float0" if dtype == jax.dtypes.float0 else dtype or type(leaf).__name__
        raise TypeError(
            f"{who}: gradients must be floating or complex arrays, got {kind} at "
            f"{path_name(path) or 'the root'!r}. Take such leaves out of the params that are "
            "trained: eqx.partition, wrt= of nnx.Optimizer, or a tree without them."
        )


def require_shapes(who: str, what: str, got: PyTree, wanted: PyTree, hint: str) -> None:
    """Refuse a tree with a leaf of another shape, which may broadcast without a word."""
    if jax.tree.structure(got) != jax.tree.structure(wanted):
        return
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, x), y in pairs:
        if jnp.shape(x) != jnp.shape(y):
            allowed = f"shaped {jnp.shape(y)} at {path_name(path) or 'the root'!r}"
            raise ValueError(checks.message(who, what, allowed, jnp.shape(x), hint))


def find(tree: PyTree, wanted: Callable[[Any], bool]) -> list[Any]:
    """Every node that ``wanted`` accepts, outermost first, those inside such a node included.

    A chain keeps the order of its parts, so the first of two nested states is the outer one. Nodes
    come with arrays: see ``arrays``.
    """
    return list(filter(wanted, nodes(tree)))


def telling(tree: PyTree, *methods: str) -> list[Any]:
    """The states that say something of themselves, by methods of these names; see ``find``."""
    return [node for node in nodes(tree) if all(callable(getattr(node, x, None)) for x in methods)]


def nodes(tree: PyTree) -> list[Any]:
    """Return every node of a tree, each before those inside it; ``None`` is none."""
    found: list[Any] = []
    waiting = [tree]
    flatten = jax.tree_util.default_registry.flatten_one_level
    while waiting:
        node = waiting.pop()
        if hasattr(node, "__jax_array__") and not isinstance(node, jax.Array):  # NNX's variable
            return nodes(arrays(tree))
        if node is not None:
            found.append(node)
            children, _ = flatten(node) or ((), None)
            waiting.extend(reversed([*children]))
    return found


def arrays(tree: PyTree) -> PyTree:
    """Return the tree with the arrays that NNX's variables hold in place of the variables.

    A tree without variables is returned itself.
    """
    if any(map(_is_variable, jax.tree.leaves(tree, is_leaf=_is_variable))):
        return jax.tree.map(_held, tree, is_leaf=_is_variable)
    return tree


def _is_variable(node: Any) -> bool:
    return hasattr(node, "__jax_array__") and not isinstance(node, jax.Array)


def _held(leaf: Any) -> Any:
    if not _is_variable(leaf):
        return leaf
    (held,), _ = jax.tree_util.default_registry.flatten_one_level(leaf)
    return held


class Pruning(NamedTuple):
    """Says how a state for fewer params lies within the state for all of them.

    What ``init`` makes of fewer params says it: a leaf that is missing there belongs to a param
    that is missing. That holds through every wrapper, and whatever shape a state leaf has.

    Attributes:
      whole: structure of the larger state.
      part: structure of the smaller one.
      places: of its leaves, in order, the numbers that they have in the larger one.
    """

    whole: Any
    part: Any
    places: tuple[int, ...]

    def take(self, state: PyTree) -> PyTree:
        """Take the smaller state out of the larger one; nothing is copied."""
        return self.take_of(self.whole.flatten_up_to(state))

    def take_of(self, leaves: Sequence[Any]) -> PyTree:
        """Do the same with the larger one's leaves."""
        return self.part.unflatten([leaves[place] for place in self.places])

    def put(self, state: PyTree, part: PyTree) -> PyTree:
        """Return the larger state with the smaller one's leaves in it."""
        return self.put_among(self.whole.flatten_up_to(state), part)

    def put_among(self, leaves: list[Any], part: PyTree) -> PyTree:
        """Do the same with the larger one's leaves, which change."""
        for place, leaf in zip(self.places, self.part.flatten_up_to(part), strict=True):
            leaves[place] = leaf
        return self.whole.unflatten(leaves)


def pruning(tx: optax.GradientTransformation, params: PyTree, fewer: PyTree, who: str) -> Pruning:
    """Find where the state of ``tx`` for ``fewer`` params, the others masked, lies in that for all.

    Raises:
      ValueError: ``tx`` keeps something whose shape or place depends on which params there are.
    """
    # Shapes alone: an init may refuse params that differ from replica to replica.
    bare = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)  # noqa: E731
    whole, structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(tx.init, bare(params)))
    there = {path: (place, leaf) for place, (path, leaf) in enumerate(whole)}
    state = jax.eval_shape(tx.init, bare(fewer))
    places: list[int] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        place, found = there.get(path, (-1, None))
        if found is None or (found.shape, found.dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(
                f"{who}: inner must keep its state leaf by leaf, got one whose "
                f"{path_name(path) or 'only leaf'!r} depends on which leaves there are. A "
                "flattened optimizer cannot be frozen in part: use it on the leaves."
            )
        places.append(place)
    return Pruning(structure, jax.tree.structure(state), tuple(places))


class Replay(NamedTuple):
    """A function as its traced program; a call runs that, on arguments of the same types."""

    program: jaxprs.ClosedJaxpr
    structure: Any

    def __call__(self, *args: PyTree) -> PyTree:
        leaves = jaxprs.jaxpr_as_fun(self.program)(*jax.tree.leaves(args))
        return jax.tree.unflatten(self.structure, leaves)


def trace_once(fn: Callable[..., PyTree], *args: PyTree) -> tuple[Replay, PyTree]:
    """``fn`` as a replayable trace, and the types of its result.

    ``jax.eval_shape(fn)`` followed by ``fn`` would run the Python code of the inner transformation
    (or of the model) twice, and once more for every level of nesting.

    Args:
      fn: what to trace.
      *args: its arguments.

    Returns:
      A function that acts like ``fn`` on arguments of these types, and the result as
      ``jax.ShapeDtypeStruct`` with sharding and varying axes.
    """
    traced, types = jax.make_jaxpr(fn, return_shape=True)(*args)
    return Replay(traced, jax.tree.structure(types)), types


class _Aside:
    """Holds such a leaf where transformations of JAX see none."""

    def __init__(self, leaf: Any):
        self.leaf = leaf

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Aside) and self.leaf is other.leaf

    def __hash__(self) -> int:
        return id(self.leaf)


register_pytree_node(_Aside, lambda node: ((), node), lambda node, _: node)


def is_array(leaf: Any) -> bool:
    """Whether a leaf has a shape and a dtype of its own; ``jnp.float32`` has neither."""
    return not isinstance(leaf, type) and hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_none(node: Any) -> bool:
    """A leaf test for ``jax.tree`` functions."""
    return node is None


def aside(params: PyTree) -> PyTree:
    """Params in which what is no array is no leaf any more.

    A Python integer or bool is one of them beside arrays, a float beside traced ones alone: as an
    argument it would be traced, and where nothing is traced it is trained, as ``jax.grad`` does.
    """
    leaves = jax.tree.leaves(params)
    arrays, traced = any(map(is_array, leaves)), any(isinstance(x, Tracer) for x in leaves)

    def constant(x: Any) -> bool:
        if isinstance(x, int):
            return arrays
        return not is_array(x) and (traced or not isinstance(x, (float, complex)))

    return jax.tree.map(lambda x: _Aside(x) if constant(x) else x, params)


def restored(params: PyTree) -> PyTree:
    """The params as they were, for the model."""
    return _each(params, lambda node: node.leaf)


def without_gradient(grads: PyTree, active: PyTree) -> PyTree:
    """``None`` in the place of what is aside; ``optax.MaskedNode`` where it is not active.

    Args:
      grads: like the params that ``aside`` made.
      active: a bool, or a tree of them like the params before.
    """
    if isinstance(active, bool):
        return _each(grads, lambda node: None)
    stop = lambda node: isinstance(node, (_Aside, optax.MaskedNode))  # noqa: E731
    gone = lambda keep: None if keep else optax.MaskedNode()  # noqa: E731
    kept = lambda g, keep: gone(keep) if isinstance(g, _Aside) else g  # noqa: E731
    return jax.tree.map(kept, grads, active, is_leaf=stop)


def of_arrays(tree: PyTree, params: PyTree) -> PyTree:
    """A tree like params before ``aside``, like those after it."""
    stop = lambda node: isinstance(node, _Aside)  # noqa: E731
    return jax.tree.map(lambda p, x: p if stop(p) else x, params, tree, is_leaf=stop)


def arrays_alone(params: PyTree) -> PyTree:
    """``None`` in the place of what is no array, as ``equinox.filter`` leaves it."""
    return jax.tree.map(lambda x: x if is_array(x) else None, params)


def put_back(new: PyTree, params: PyTree) -> PyTree:
    """New params, with the old ones where there is ``None``."""
    return jax.tree.map(lambda n, p: p if n is None else n, new, params, is_leaf=is_none)


def _each(tree: PyTree, fn: Callable[[_Aside], Any]) -> PyTree:
    stop = lambda node: isinstance(node, _Aside)  # noqa: E731
    return jax.tree.map(lambda x: fn(x) if stop(x) else x, tree, is_leaf=stop)


# Whoever has a sparse array has imported it.
MODULE = "jax.experimental.sparse"


def _is_sparse(node: Any) -> bool:
    return MODULE in sys.modules and isinstance(node, sys.modules[MODULE].JAXSparse)


def dense(tree: PyTree, who: str) -> PyTree:
    """Return the tree with a dense array in place of each ``BCOO`` of single rows."""

    def on_leaf(path: Any, x: Any) -> Any:
        if not _is_sparse(x):
            return x
        if type(x).__name__ != "BCOO" or x.n_batch or not x.n_sparse:
            _refuse_sparse(who, "gradients", "dense arrays or BCOO with n_batch=0", path, x)
        # Not x.todense(), which does not say over which axes its result varies. In f32 or wider:
        # rows of one index are rounded once, with their sum.
        zeros = jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
        zeros = axes.to_varying(zeros, axes.varying(x.data) | axes.varying(x.indices))
        return zeros.at[tuple(x.indices.T)].add(x.data).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(on_leaf, tree, is_leaf=_is_sparse)


def require_dense(tree: PyTree, who: str, what: str = "gradients") -> None:
    """Refuse sparse leaves."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_sparse):
        if _is_sparse(x):
            _refuse_sparse(who, what, "dense arrays", path, x)


def _refuse_sparse(who: str, what: str, allowed: str, path: Any, x: Any) -> None:
    name = path_name(path) or "the root"
    raise TypeError(
        f"{who}: {what} must be {allowed}, got {type(x).__name__} at {name!r}. Convert with "
        ".todense()."
    )
