# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays: dtypes, paths, states in a tree, leaves without gradients, and wrong trees.

In this module, the constants of a model are its activation functions, names and untraced numbers.

A state is compared with the result of ``init`` only after a call has failed. So the check costs
nothing in other calls. A state of another structure is accepted if the call works, for example
``None`` in place of an empty state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.tree_util import KeyPath

from boostax._core import checks, jaxprs, protocols, types
from boostax._core.types import PyTree, Structure

# The NamedTuples that occur in states, but are not the state of a part.
_NO_PARTS = {"TrainState", "PerReplica", "EmptyState", "MaskedNode"}
_OURS = re.compile(r"[\w.()]+: .+ must ", re.DOTALL)
_MOVES = "boostax.migrate_state(opt_state, tx, params) converts the state of another chain."
LOST = "Restore states into tx.init(params), or use boostax.migrate_state(opt_state, tx, params)."
# Flax's collection of leaves whose cotangent is the new value of the leaf.
OVERWRITE = "_overwrite_with_gradient"


def at_least_float32(tree: PyTree) -> PyTree:
    """Widen f16 and bf16 arrays, or their types, to f32; do not change other leaves."""
    return jax.tree.map(lambda x: as_dtype(x, wide_dtype(x)) if is_number(x) else x, tree)


def unshared(state: PyTree, params: PyTree) -> PyTree:
    """Return a first state; copy leaves that are also in ``params`` or occur twice.

    Some states of Optax have the first params as leaves (``contrib.dog``, ``prodigy``), and
    donation refuses a buffer that two arguments share.
    """
    buffers = {id(x) for x in jax.tree.leaves(params)}
    leaves, structure = jax.tree.flatten(state)
    for i, x in enumerate(leaves):
        if isinstance(x, jax.Array) and id(x) in buffers:
            leaves[i] = jnp.array(x, copy=True)
        buffers.add(id(x))
    return structure.unflatten(leaves)


def as_dtype(x: PyTree, dtype: np.dtype) -> Any:
    """Return an array, or its type, in a strong dtype; copy only arrays of another dtype."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=dtype)
    if isinstance(x, jax.Array) and x.dtype == dtype and not getattr(x, "weak_type", False):
        return x
    return jnp.asarray(x).astype(dtype)


def wide_dtype(x: PyTree) -> np.dtype:
    """Return the dtype in which boostax computes with a gradient like ``x``: f32 or wider."""
    # Without x64, JAX converts a NumPy array of f64 to f32, so the dtype is that of
    # ``jnp.result_type``.
    dtype = x.dtype if isinstance(x, jax.Array) else jnp.result_type(x)
    if dtype == jnp.float32 or not is_inexact(dtype) or jnp.finfo(dtype).bits > 16:
        return dtype
    return np.dtype(np.float32)


def is_inexact(dtype: jax.typing.DTypeLike) -> bool:
    """Return whether a dtype is floating or complex, so that its arrays have gradients."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def buffer_dtype(x: PyTree, narrow: np.dtype) -> np.dtype:
    """Return the dtype of a sum of gradients: ``narrow``, or a wider dtype for f64 and complex."""
    wide = wide_dtype(x)
    # A frozen leaf may be an integer or a PRNG key, whose dtype cannot be promoted.
    is_plain = wide == jnp.float32 or not is_inexact(wide)
    return narrow if is_plain else jnp.promote_types(wide, narrow)


def buffers(params: PyTree, narrow: np.dtype, size: int | None = None) -> PyTree:
    """Return zeros like the params in ``buffer_dtype``, or stacks of ``size`` such zeros."""
    leaves, structure = jax.tree.flatten(params)
    for i, p in enumerate(leaves):
        leaves[i] = jnp.zeros_like(p, dtype=buffer_dtype(p, narrow))
        if size is not None:
            leaves[i] = jnp.broadcast_to(leaves[i], (size, *leaves[i].shape))
    return structure.unflatten(leaves)


def clip_finite(x: jax.Array, limit: float | jax.Array) -> jax.Array:
    """Clip finite elements to ``-limit..limit``; do not change infinities and NaN."""
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)


def saturate(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Cast to a dtype so that finite elements stay finite; do not change infinities and NaN."""
    if jnp.iscomplexobj(x) or jnp.finfo(dtype).max >= jnp.finfo(x.dtype).max:
        return x.astype(dtype)
    return clip_finite(x, float(jnp.finfo(dtype).max)).astype(dtype)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Cast each leaf to the strong dtype of its counterpart."""
    return jax.tree.map(lambda x, y: as_dtype(x, jnp.result_type(y)), tree, like)


def applied(params: PyTree, updates: PyTree) -> PyTree:
    """Apply updates as Optax does, also to float8 params, for which JAX has no promotion."""
    leaves, structure = jax.tree.flatten((params, updates))
    for i, x in enumerate(leaves):
        dtype = jnp.result_type(x)
        if is_inexact(dtype) and jnp.finfo(dtype).bits == 8:
            leaves[i] = as_dtype(x, np.dtype(np.float32))
    return cast_like(optax.apply_updates(*structure.unflatten(leaves)), params)


def as_updates(tree: PyTree, params: PyTree) -> PyTree:
    """Cast updates to the dtypes of the params, if there are params."""
    if params is None:
        return tree
    return jax.tree.map(
        lambda x, p: x if x is None or is_masked(x) or not is_number(p) else cast_like(x, p),
        tree,
        params,
        is_leaf=lambda x: x is None or is_masked(x),
    )


def is_number(x: object) -> bool:
    """Return whether a leaf is an array or a scalar; a module's leaf may also be a function."""
    return hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))


def masked(tree: PyTree, active: PyTree) -> PyTree:
    """Replace every leaf that is not active by ``optax.MaskedNode``.

    ``active`` has the structure of ``tree``, with a bool for each leaf. Both may contain
    ``MaskedNode``, in the same places.
    """
    return jax.tree.map(lambda keep, x: x if keep else optax.MaskedNode(), active, tree)


def unmasked(part: PyTree, full: PyTree) -> PyTree:
    """Replace each ``optax.MaskedNode`` in ``part`` by the leaf at its position in ``full``."""
    return jax.tree.map(lambda x, y: x if is_masked(y) else y, full, part)


def path_name(path: KeyPath) -> str:
    """Return a tree path as text, such as ``layers/0/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named(tree: PyTree) -> list[tuple[str, PyTree]]:
    """Return the leaves with their paths; see ``path_name``."""
    return [(path_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def names(tree: PyTree) -> list[str]:
    """Return the paths of the leaves; see ``path_name``."""
    return [name for name, _ in named(tree)]


def plain_path(path: KeyPath) -> tuple[str, ...]:
    """Return a path's names, which are the same for an NNX module, its state and its arrays."""
    path = path[:-1] if path[-1:] == (jax.tree_util.GetAttrKey("value"),) else path
    return tuple(path_name((key,)) for key in path)


def require_params(params: PyTree, who: str, hint: str) -> None:
    """Refuse an ``update`` without params."""
    checks.require(params is not None, who, "params", params, "given to update", hint)


def overwritten(path: KeyPath) -> bool:
    """Return whether a leaf is in Flax's collection ``_overwrite_with_gradient``."""
    return OVERWRITE in path_name(path).split("/")


def require_gradients(tree: PyTree, who: str, *, carried: bool = False) -> None:
    """Refuse leaves that are not gradients: integers, bools, float0, new values for ``carry``."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        # ``str(path)`` is searched first, because ``path_name`` is slow.
        if not carried and OVERWRITE in str(path) and overwritten(path):
            got = f"the new value of a leaf at {path_name(path)!r}"
            hint = "Put boostax.carry, which assigns such values, around the whole optimizer."
            raise ValueError(checks.message(who, "gradients", "gradients", got, hint))
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            kind = "float0" if dtype == jax.dtypes.float0 else dtype or type(leaf).__name__
            got = f"{kind} at {path_name(path) or 'the root'!r}"
            hint = "Do not train such leaves: use eqx.partition, or wrt= of an optimizer in NNX."
            allowed = "floating or complex arrays"
            raise TypeError(checks.message(who, "gradients", allowed, got, hint))


def require_shapes(who: str, what: str, got: PyTree, like: PyTree, hint: str) -> None:
    """Refuse a tree with a leaf of another shape, because the leaf could silently broadcast."""
    if jax.tree.structure(got) != jax.tree.structure(like):
        return
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(like), strict=True):
        if jnp.shape(x) != jnp.shape(y):
            allowed = f"shaped {jnp.shape(y)} at {path_name(path) or 'the root'!r}"
            raise ValueError(checks.message(who, what, allowed, jnp.shape(x), hint))


def require_unsplit(
    who: str, kwargs: PyTree, batch: PyTree, count: object, on_mesh: bool = False
) -> None:
    """Refuse keywords that are arrays of values of a batch's rows, if the rows are split."""
    leaves = jax.tree.leaves(batch) if on_mesh or count != 1 else []
    rows = {jnp.shape(x)[count == "stacked" :][:1] for x in leaves} - {()}
    hint = "Pass values of rows with the batch, (batch, mask), and other values in a dict."
    allowed = "without the first dimension of the batch's rows, which are split"
    for name in kwargs.keys() - {"key", "model_state", "scales", "threaded"}:
        shape = getattr(kwargs[name], "shape", ())
        checks.require(shape[:1] not in rows, who, name, shape, allowed, hint)


def state_nodes(tree: PyTree) -> list[PyTree]:
    """Return the nodes of a state; refuse states that became dicts; see ``nodes``."""
    every_node = nodes(tree)
    if hasattr(tree, "init"):
        hint = "Pass the result of tx.init(params), not tx or a step."
        raise TypeError(checks.message("boostax", "a state", "a tree", type(tree).__name__, hint))
    if any(isinstance(node, dict) and "inner_state" in node for node in every_node):
        raise TypeError(checks.message("boostax", "a state", "of its classes", "a dict", LOST))
    return every_node


def find(tree: PyTree, *kinds: type[types.State]) -> list[types.State]:
    """Return the states of one of the classes, outer states before inner states."""
    return [node for node in state_nodes(tree) if isinstance(node, kinds)]


def state_of(who: str, opt_state: PyTree, kind: type[types.State], hint: str) -> types.State:
    """Return the outermost state of a class; refuse an optimizer state without such a state."""
    states = find(opt_state, kind)
    allowed = f"a tree with a {kind.__name__}"
    checks.require(bool(states), who, "opt_state", "a tree without one", allowed, hint)
    return states[0]


def telling(tree: PyTree, question: type[types.State]) -> list[types.State]:
    """Return the states that answer a question of ``protocols``, outer states before inner states.

    Raises:
      TypeError: the tree contains a state with a method whose name is nearly that of a question's
        method.
    """
    return [node for node in state_nodes(tree) if protocols.answers(type(node), question)]


def nodes(tree: PyTree) -> list[PyTree]:
    """Return every node of a tree except ``None``, outer nodes before inner nodes.

    The first of two nested states is the outer state, because a chain does not reorder its parts.
    NNX variables are replaced by their arrays; see ``arrays``.
    """
    visited: list[PyTree] = []
    waiting = [tree.opt_state if hasattr(tree, "wrt") else tree]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "__jax_array__") and not isinstance(node, jax.Array):
            return nodes(arrays(tree))
        if node is not None:
            visited.append(node)
            children, _ = jax.tree_util.default_registry.flatten_one_level(node) or ((), None)
            waiting.extend(reversed([*children]))
    return visited


def arrays(tree: PyTree) -> PyTree:
    """Replace NNX variables by their arrays, and an NNX optimizer by its state.

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


class Replay(NamedTuple):
    """A function that is traced once, ``Replay(*jax.make_jaxpr(fn, return_shape=True)(*args))``.

    A call evaluates the program on arguments of the traced types. ``jax.eval_shape(fn)`` followed
    by ``fn`` would run the Python code of ``fn`` twice, and 2**k times at nesting depth k.

    Attributes:
      program: the program of the function.
      types: the types of the result, ``jax.ShapeDtypeStruct`` with sharding and varying axes.
    """

    program: jaxprs.ClosedJaxpr
    types: PyTree

    def __call__(self, *args: PyTree) -> PyTree:
        results = jaxprs.jaxpr_as_fun(self.program)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.types), results)


@dataclasses.dataclass(frozen=True)
class _Aside:
    """A node without leaves that hides a constant from JAX.

    Attributes:
      number: the ``id`` of the constant; nodes that hide the same object are equal.
      leaf: the constant.
    """

    number: int
    leaf: object = dataclasses.field(compare=False)


jax.tree_util.register_pytree_node(_Aside, lambda node: ((), node), lambda node, _: node)
is_aside: Callable[[object], bool] = _Aside.__instancecheck__


def is_array(leaf: object) -> bool:
    """Return whether a leaf is an array; a dtype such as ``jnp.float32`` is not."""
    return not isinstance(leaf, type) and hasattr(leaf, "shape") and hasattr(leaf, "dtype")


# ``jax.tree`` functions call these functions for every node, so they are C functions, which are
# faster than Python functions.
is_masked: Callable[[object], bool] = optax.MaskedNode.__instancecheck__
is_none: Callable[[object], bool] = type(None).__instancecheck__


def aside(params: PyTree) -> PyTree:
    """Hide the constants among the params from JAX; ``restored`` returns the constants.

    A Python integer or bool is a constant. A Python float is a constant only among traced arrays.
    Without traced arrays, a float is trained, as in ``jax.grad``.
    """
    leaves, structure = jax.tree.flatten(params)
    # The classes of Python numbers that are trained and not constants.
    numbers: tuple[type, ...] = () if any(map(is_array, leaves)) else (int,)
    if not any(isinstance(x, Tracer) for x in leaves):
        numbers += (float, complex)
    new = [x if is_array(x) or isinstance(x, numbers) else _Aside(id(x), x) for x in leaves]
    return structure.unflatten(new)


def restored(params: PyTree) -> PyTree:
    """Return the params, including the constants that ``aside`` hid."""
    return jax.tree.map(lambda x: x.leaf if is_aside(x) else x, params, is_leaf=is_aside)


def without_gradient(grads: PyTree, active: PyTree) -> PyTree:
    """Replace hidden constants by ``None``, or by ``optax.MaskedNode`` where ``active`` is False.

    Args:
      grads: a tree like the result of ``aside``.
      active: a bool, or a tree of bools like the argument of ``aside``.
    """
    leaves, structure = jax.tree.flatten(grads, is_leaf=lambda x: is_aside(x) or is_masked(x))
    mask = [active] * len(leaves) if isinstance(active, bool) else structure.flatten_up_to(active)
    pairs = zip(leaves, mask, strict=True)
    new = [(None if keep else optax.MaskedNode()) if is_aside(x) else x for x, keep in pairs]
    return structure.unflatten(new)


def put_back(new: PyTree, params: PyTree) -> PyTree:
    """Return the new params, with the old leaf wherever the new leaf is ``None``."""
    return jax.tree.map(lambda n, p: p if n is None else n, new, params, is_leaf=is_none)


class Pruning(NamedTuple):
    """The positions that the leaves of a state for some params have in the state for all params.

    ``init`` is called with all params, and with some params. Leaves that are only in the state for
    all params belong to the other params. This method works for every wrapper, and for state leaves
    of any shape.

    Attributes:
      full: structure of the larger state, for all params.
      part: structure of the smaller state, for some params.
      places: for each leaf of the smaller state, its index among the leaves of the larger state.
    """

    full: Structure
    part: Structure
    places: tuple[int, ...]

    def take(self, state: PyTree) -> PyTree:
        """Return the smaller state from the larger state, without a copy."""
        leaves = self.full.flatten_up_to(state)
        return self.part.unflatten([leaves[place] for place in self.places])

    def set(self, state: PyTree, part: PyTree) -> PyTree:
        """Return the larger state with the leaves of the smaller state at their positions."""
        new = dict(zip(self.places, self.part.flatten_up_to(part), strict=True))
        leaves = enumerate(self.full.flatten_up_to(state))
        return self.full.unflatten([new.get(place, leaf) for place, leaf in leaves])


@contextlib.contextmanager
def explaining(look: Callable[..., None], *args: PyTree, **kwargs: PyTree) -> Generator[None]:
    """Replace an error raised in this context by the error that ``look(*args, **kwargs)`` raises.

    If the raised error is from boostax, it already names an argument. So only a ``TypeError`` of
    ``look`` replaces it.
    """
    try:
        yield
    except Exception as old:
        try:
            look(*args, **kwargs)
        except Exception as new:
            if _OURS.match(str(new)) and (isinstance(new, TypeError) or not _OURS.match(str(old))):
                raise new from old
        raise


def parts(state: PyTree) -> list[str]:
    """Return the names of the state classes of a chain, outer before inner."""
    names = (type(x).__name__ for x in nodes(state) if hasattr(x, "_fields"))
    return [name for name in names if name not in _NO_PARTS]


def require_order(who: str, call: str, **arguments: PyTree) -> None:
    """Refuse donated arrays, and an optimizer state in another argument's position."""
    leaves = jax.tree_util.tree_leaves_with_path(arguments)
    untraced = [(path, x) for path, x in leaves if not isinstance(x, Tracer)]
    gone = [path_name(path) for path, x in untraced if getattr(x, "is_deleted", bool)()]
    hint = "A call deletes the arrays that it donates. Use the call's results, or copy the arrays."
    checks.require(not gone, who, "arguments", f"{gone[:4]} donated", "not yet donated", hint)
    allowed = "without an optimizer state"
    hint = f"The call is {call}."
    for what, tree in arguments.items():
        names = (f"{type(x).__module__}.{type(x).__name__}" for x in nodes(tree))
        state = next((x for x in names if re.match(r"(optax|boostax)\..*State$", x)), "")
        got = f"one with {state}"
        checks.require_type("state" in what or not state, who, what, got, allowed, hint)


def require_state(who: str, call: str, tx: Any, opt_state: Any, params: Any, *grads: Any) -> None:
    """Refuse swapped arguments, and a state that differs from the result of ``tx.init``."""
    allowed = "an optax.GradientTransformation"
    hint = f"The call is {call}."
    checks.require_type(hasattr(tx, "init"), who, "tx", type(tx).__name__, allowed, hint)
    require_order(who, call, grads=grads, opt_state=opt_state, params=params)
    expected = jax.eval_shape(tx.init, without_gradient(aside(params), True))
    require_as_made(who, "opt_state", opt_state, expected)
    # Gradients on a mesh are per-replica, or contain per-replica gradients.
    while any(hasattr(x, "local") for x in grads):
        grads = tuple(getattr(x, "local", x) for x in grads)
    odd = {*names([*grads])} - {*names([params])}
    hint = "boostax.value_and_grad(loss_fn)(params, opt_state, batch) returns (loss, grads)."
    checks.require(not odd, who, "grads", sorted(odd)[:4], "at the paths of the params", hint)


def require_as_made(who: str, what: str, state: PyTree, expected: PyTree) -> PyTree:
    """Return a state in the containers of ``expected``; refuse other parts, leaves or shapes."""
    mine, theirs = (", ".join(parts(x)[:8]) for x in (state, expected))
    got = f"that of {mine or type(state).__name__}"
    hint, error = (_MOVES, ValueError) if mine else (LOST, TypeError)
    checks.require(mine == theirs, who, what, got, f"that of {theirs}", hint, error)
    odd = sorted({*names(state)} ^ {*names(expected)})
    allowed = "a state with the leaves of tx.init(params)"
    hint = f"Pass the params from which tx.init made the state. {_MOVES}"
    checks.require(not odd, who, what, f"other leaves, {odd[:4]}", allowed, hint)
    state = jax.tree.unflatten(jax.tree.structure(expected), jax.tree.leaves(state))
    hint = "Use tx.init(params), or convert the state with boostax.reshard_state(state, n)."
    require_shapes(who, what, state, expected, hint)
    return state
