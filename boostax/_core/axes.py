# SPDX-License-Identifier: Apache-2.0
"""Named mesh axes: the axes over which values vary, and over which programs communicate.

Inside ``jax.shard_map`` with ``check_vma=True``, the type of a value lists the mesh axes over which
the value *varies*. Autodiff sums the gradient of a parameter over the devices, unless the parameter
has a varying type. A parameter that is cast to varying has a separate gradient on each replica.
boostax casts the params, then differentiates the loss, then reduces the gradients, because only
this order gives the same result with ``check_vma=True``, with ``check_vma=False`` and in ``pmap``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, get_abstract_mesh
from jax.typing import DTypeLike

from boostax._core import checks, jaxprs, trees
from boostax._core.types import Params, PyTree, Value

AxisName = str | tuple[str, ...]
# The primitives of collectives. A primitive with the suffix "_invariant" returns a result whose
# type is unvarying.
COLLECTIVES = "psum", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all", "ppermute"
# The axis name of a ``jax.vmap`` over independent runs; see ``any_seed``.
SEEDS = "seeds"


@dataclasses.dataclass(frozen=True)
class StepAxis:
    """A placeholder for an axis name, which the surrounding train step binds later."""


UNNAMED: Any = StepAxis()


class Bound(NamedTuple):
    """What a train step binds for the parts of its chain.

    Attributes:
      names: the replica axes; empty outside a step of boostax.
      averaged: whether the gradients are averaged over these axes already.
      partial: whether the trace has gradients for only some leaves.
    """

    names: tuple[str, ...] = ()
    averaged: bool = False
    partial: bool = False


# The caches of jax.jit compare this context, so a trace for one bound axis is not reused for
# another axis.
_BOUND = jax.make_user_context(Bound())


@contextmanager
def during(variable: ContextVar[Value], value: Value) -> Generator[None]:
    """Set a context variable during a ``with`` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def binding(
    names: tuple[str, ...], *, averaged: bool = False, partial: bool = False
) -> AbstractContextManager[None]:
    """Bind the replica axes for the parts that are called inside this context; see ``Bound``."""
    return _BOUND(Bound(names, averaged, partial))


def bound() -> Bound:
    """Return what the surrounding train step binds."""
    return _BOUND.value


def canonical(who: str, axis_name: AxisName | None, argument: str = "axis_name") -> tuple[str, ...]:
    """Return axis names as a tuple, which is empty for ``None``."""
    if axis_name is None:
        return ()
    names: tuple[Any, ...] = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    valid = all(isinstance(x, (str, StepAxis)) for x in names) and 0 < len(set(names)) == len(names)
    allowed = "a mesh axis name or a tuple of different names"
    hint = "Use None on a single device. Pass other arguments by keyword."
    checks.require(valid, who, argument, got=axis_name, allowed=allowed, hint=hint)
    return names


def named_or_bound(who: str, axis_name: AxisName | None = None) -> tuple[str, ...]:
    """Return axis names, by default those of the surrounding step; refuse an empty result."""
    names = canonical(who, axis_name) or bound().names
    hint = f"Call {who} inside make_train_step or on_mesh, or write {who}(..., axis_name='data'). "
    hint += "In NNX, write boostax.nnx.Optimizer(model, tx, wrt=nnx.Param, axis_name='data')."
    checks.require(bool(names), who, "axis_name", got=None, allowed="a mesh axis", hint=hint)
    return names


def of_mesh(who: str, axis_name: AxisName | None, mesh: Mesh | None) -> tuple[str, ...]:
    """Return the replica axes of a mesh: the given names, or the only axis of the mesh."""
    if mesh is None:
        return canonical(who, axis_name)
    hint = "Make a mesh with jax.make_mesh((8,), ('data',))."
    checks.require_type(hasattr(mesh, "axis_names"), who, "mesh", mesh, "a jax.sharding.Mesh", hint)
    names = canonical(who, axis_name) or (mesh.axis_names if len(mesh.axis_names) == 1 else ())
    allowed = f"among the mesh's axes {tuple(mesh.shape)}"
    valid = bool(names) and set(names) <= set(mesh.axis_names)
    hint = "Pass the axes that split the batch, or make a mesh with jax.make_mesh((n,), ('data',))."
    checks.require(valid, who, "axis_name", got=axis_name, allowed=allowed, hint=hint)
    return names


# In a plain jit, XLA shards arrays, and no axis is bound. A train step binds the replica axes.
_IN_JIT = (
    "In plain jit, use boostax.make_train_step, or omit this axis_name and wrap the chain: "
    "boostax.on_mesh(tx, params, axis_name=...) or boostax.nnx.Optimizer(..., axis_name=...)."
)


def require_bound(
    names: tuple[str, ...], who: str, argument: str = "axis_name", hint: str = _IN_JIT
) -> None:
    """Raise unless every axis is bound around the traced code."""
    for name in names:
        try:
            lax.axis_size(name)
        except NameError as error:
            allowed = "an axis of the surrounding jax.shard_map, jax.pmap or jax.vmap"
            got = f"{name!r}, which is not bound here"
            hint = f"Run the update inside jax.shard_map. {hint}"
            raise ValueError(checks.message(who, argument, allowed, got, hint)) from error


# The number of replicas along the axes, and the index of this replica. If there are several axes,
# replicas that differ only in the last axis have consecutive indices.
size = lax.axis_size
index = lax.axis_index


def varying(x: object) -> frozenset[str]:
    """Return the axes over which the type of ``x`` varies; empty if JAX does not track axes."""
    # Where only some mesh axes are manual, ``jax.typeof`` refuses a ``jax.ShapeDtypeStruct``.
    kind = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return frozenset(getattr(getattr(kind, "manual_axis_type", None), "varying", ()))


def sent_over(eqns: Iterable[jaxprs.JaxprEqn]) -> list[tuple[str | int, ...]]:
    """Return the axes of each collective among equations, including axes of ``vmap``.

    The equation of ``any_seed`` is no collective, because it compiles to a reduction on the device.
    """
    sent: list[tuple[str | int, ...]] = []
    for eqn in eqns:
        if (name := eqn.primitive.name.removesuffix("_invariant")) in COLLECTIVES:
            names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
            names = names if isinstance(names, tuple) else (names,)
            if (name, names) != ("pmax", (SEEDS,)):
                sent.append(names)
    return sent


def named(eqns: Iterable[jaxprs.JaxprEqn]) -> frozenset[str]:
    """Return the named axes over which equations communicate."""
    return frozenset(x for names in sent_over(eqns) for x in names if isinstance(x, str))


def tracked(names: tuple[str, ...]) -> frozenset[str]:
    """Return the axes over which JAX tracks varying values; none with ``check_vma=False``."""
    return varying(jax.eval_shape(lambda: to_varying(jnp.zeros(()), names)))


def types(tree: PyTree) -> list[frozenset[str]]:
    """Return the varying axes of each leaf."""
    return [varying(leaf) for leaf in jax.tree.leaves(tree)]


def to_varying(tree: PyTree, names: tuple[str, ...] | frozenset[str]) -> PyTree:
    """Cast arrays to vary over ``names``, without the axes that no ``shard_map`` maps.

    Outside ``shard_map``, or with ``check_vma=False``, the values stay unchanged.
    """
    if not (manual := frozenset(names).intersection(get_abstract_mesh().manual_axes)):
        return tree
    leaves, structure = jax.tree.flatten(tree)
    for i, leaf in enumerate(leaves):
        if missing := tuple(sorted(manual - varying(leaf))):
            leaves[i] = lax.pcast(leaf, missing, to="varying")
    return structure.unflatten(leaves)


def unify(tree: PyTree, like: PyTree) -> PyTree:
    """Cast each leaf to the varying axes of its counterpart, because branches need equal types."""
    is_mapped = bool(get_abstract_mesh().manual_axes)
    return jax.tree.map(lambda x, y: to_varying(x, varying(y)), tree, like) if is_mapped else tree


def placed_like(tree: PyTree, like: PyTree) -> PyTree:
    """Reshard each leaf like its counterpart, if types have shardings (Explicit mesh)."""
    leaves, structure = jax.tree.flatten(tree)
    for i, counterpart in enumerate(jax.tree.leaves(like)):
        target = jax.typeof(counterpart).sharding
        if jax.typeof(leaves[i]).sharding.spec != target.spec:
            leaves[i] = jax.sharding.reshard(leaves[i], target)
    return structure.unflatten(leaves)


def zeros(like: jax.Array | jax.ShapeDtypeStruct, dtype: DTypeLike | None = None) -> jax.Array:
    """Make zeros with the shape, varying axes and (on an Explicit mesh) sharding of ``like``."""
    array = jnp.zeros(like.shape, like.dtype if dtype is None else dtype, device=like.sharding)
    return to_varying(array, varying(like))


def agree(ok: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Return whether ``ok`` is true on all replicas and shards, by one collective of 4 bytes."""
    return lax.pmin(ok.astype(jnp.int32), with_shards(ok, names)) > 0 if names else ok


def with_shards(x: jax.Array, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the replica axes and all further axes over which ``x`` varies."""
    return names + tuple(sorted(varying(x) - frozenset(names)))


def gather(x: jax.Array, names: tuple[str, ...], dim: int = 0) -> jax.Array:
    """Stack the values of all replicas on a new dimension; the type of the result is unvarying."""
    if not vmapped(names):
        return lax.all_gather(x, names, axis=dim, to="invarying")
    shape = x.shape
    for name in reversed(names):
        x = lax.all_gather(x, name, axis=dim)
    return x.reshape(*shape[:dim], -1, *shape[dim:])


def sent_apart() -> bool:
    """Return whether each array is sent in its own message, as with gloo between processes."""
    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def shard_total(parts: list[jax.Array], names: tuple[str, ...], who: str) -> jax.Array:
    """Sum one number per leaf, where some leaves are sharded over ``names``.

    The number of an unsharded leaf is added once. Only varying types show whether a leaf is
    sharded. There is one collective for each set of axes over which leaves are sharded.
    """
    require_bound(names, who, "shard_axes")
    allowed = "left out if JAX does not track which leaves are sharded"
    valid = not names or bool(tracked(names))
    checks.require(valid, who, "shard_axes", got=names, allowed=allowed, hint="Leave check_vma on.")
    return summed(parts, lambda x: varying(x) & frozenset(names))


def summed(
    parts: list[jax.Array], over: Callable[[jax.Array], frozenset[str]], names: tuple[str, ...] = ()
) -> jax.Array:
    """Sum each part over ``names`` and ``over(part)``, with one collective per set of axes."""
    sums: dict[frozenset[str], jax.Array] = {}
    for part in parts or [jnp.zeros((), jnp.float32)]:
        sums[over(part)] = sums[over(part)] + part if over(part) in sums else part
    totals = [
        lax.psum(to_varying(x, names), (*names, *sorted(others))) if names or others else x
        for others, x in sums.items()
    ]
    return functools.reduce(jnp.add, totals)


def mean(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Average over the axes; the type of ``x`` need not be varying."""
    return lax.pmean(to_varying(x, names), names) if names else x


def largest(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Return the maximum over the axes."""
    return lax.pmax(to_varying(x, names), names)


def vmapped(names: tuple[str, ...]) -> bool:
    """Return whether ``jax.vmap`` bound the names; then some collectives have no batching rule."""
    return not frozenset(names).issubset(get_abstract_mesh().manual_axes)


def any_seed(number: jax.Array) -> jax.Array | None:
    """Return the maximum of a number over the runs of ``jax.vmap(..., axis_name="seeds")``.

    The maximum is equal in all runs, so ``vmap`` does not turn a branch on the maximum into a
    selection. Outside of such a ``vmap``, the result is ``None``.
    """
    try:
        size(SEEDS)
    except NameError:
        return None
    # With ``check_vma=True``, JAX has no collectives over an axis of ``vmap``.
    manual = tuple(get_abstract_mesh().manual_axes)
    return None if SEEDS in manual or tracked(manual) else lax.pmax(number, SEEDS)


def require_invariant(predicate: jax.Array, who: str) -> None:
    """Refuse a predicate that may differ per replica: collectives in its branch would deadlock.

    JAX itself accepts a varying predicate.
    """
    over = sorted(varying(predicate))
    what = "the decision to run the inner transformation"
    hint = f"Reduce the gradients over the axes {over}, or pass these axes as axis_name."
    checks.require(not over, who, what, got=over, allowed="the same on all replicas", hint=hint)


def require_local(grads: PyTree, names: tuple[str, ...], who: str) -> None:
    """Refuse leaves that are not gradients, and gradients already summed over the replicas.

    Only varying types show that gradients were summed. So summed gradients are accepted with
    ``check_vma=False``, under ``pmap``, and where gradients are summed over FSDP shards.
    """
    trees.require_gradients(grads, who)
    require_bound(names, who)
    mapped = frozenset(names).intersection(get_abstract_mesh().manual_axes)
    if not mapped or mapped.intersection(*map(varying, jax.tree.leaves(grads))) == mapped:
        return
    hint = "With check_vma, differentiate boostax.train.local_params(params, axis_name=axis)."
    expected = tracked(names)
    for path, leaf in jax.tree.leaves_with_path(grads):
        missing = ", ".join(sorted(expected - varying(leaf)))
        # Integers are not checked: they are the indices of sparse gradients, and these indices may
        # be equal on all replicas.
        if missing and jnp.issubdtype(leaf.dtype, jnp.inexact):
            got = f"{trees.path_name(path)!r}, which is already reduced over {missing}"
            raise ValueError(checks.message(who, "gradients", "local to each replica", got, hint))


@checks.arguments
def local_params(params: Params, *, axis_name: AxisName | None = None) -> Params:
    """Make params whose gradient stays local to each replica.

    Differentiating a function of replicated params inside ``jax.shard_map`` sums the gradient over
    the replicas. Every boostax transformation with an ``axis_name`` expects the gradients *before*
    that sum. Gradients with respect to the returned params are local, with ``check_vma`` on or off,
    and under ``pmap``.

    Args:
      params: tree of arrays, equal on all replicas.
      axis_name: mesh axis name or a tuple of names, bound by the surrounding ``shard_map`` or
        ``pmap``. ``None``: the axis of the surrounding step (``make_train_step``, ``on_mesh``).

    Returns:
      The same arrays, with types that vary over the axes. Cost: none; the cast compiles to nothing.

    Raises:
      ValueError: an axis is not bound, or ``None`` outside of a step.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> def local_gradient(w, x):
      ...   w = boostax.train.local_params(w, axis_name="data")
      ...   return jax.grad(lambda w: jnp.mean(x * w))(w)[None]
      >>> specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
      >>> f = jax.shard_map(local_gradient, mesh=mesh, **specs)
      >>> f(jnp.float32(1.0), jnp.ones(4)).shape
      (1,)
    """
    names = named_or_bound("local_params", axis_name)
    require_bound(names, "local_params")
    return to_varying(params, names)
