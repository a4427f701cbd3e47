# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays: what counts as a gradient, in which precision it is handled, finding states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import GetAttrKey

from boostax._core import checks, jaxprs

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
        return jnp.asarray(x, wide_dtype(x)) if _is_number(x) else x

    return jax.tree.map(widened, tree)


def wide_dtype(x: Any) -> np.dtype[Any]:
    """The dtype in which boostax computes with a gradient like ``x``: f32 or wider."""
    # Not x.dtype: without x64 a NumPy array of f64 becomes f32.
    dtype = jnp.result_type(x)
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
    return jax.tree.map(lambda x, y: jnp.asarray(x).astype(jnp.result_type(y)), tree, like)


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
