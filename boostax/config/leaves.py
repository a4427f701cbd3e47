# SPDX-License-Identifier: Apache-2.0
"""The arrays of an optimizer state, each with its state and the param that it belongs to.

An optimizer state is a tree of NamedTuples, each the state of a part, and every array belongs to
the innermost one around it.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from boostax._core import checks, trees
from boostax._core.describe import Holds
from boostax._core.replicas import PerReplica
from boostax.accumulate.window import AccumulateState, Window
from boostax.precision.loss_scale import LossScaleState
from boostax.precision.store import StoreState

PyTree: TypeAlias = Any
Path: TypeAlias = tuple[Any, ...]
WHO = "migrate_state"
# The meaning of the fields of Optax's states, and of arrays outside of any state.
HOLDS: Mapping[type, Holds] = {
    optax.MultiStepsState: Holds(("mini_step", "acc_grads"), "mini_step", ("acc_grads",)),
    optax.TraceState: Holds(sums=("trace",)),
    optax.contrib.ScheduleFreeState: Holds(params=True),
    type(None): Holds(params=True),
}


def holds(cls: type) -> Holds:
    """Return the meaning of a state class's fields: its ``holds``, or a known one for Optax's."""
    return getattr(cls, "holds", HOLDS.get(cls, Holds()))


class Leaf(NamedTuple):
    """An array of a state.

    Attributes:
      path: its path in the tree.
      rel: its path in its state.
      value: the array.
      at: the path of its state.
      state: the innermost state around it; ``None`` if it is in no NamedTuple.
      field: the field of the state that contains it.
      holds: the meaning of that state's fields.
      bound: whether it has a meaning only together with other arrays of its state.
      owner: the path of the param that it belongs to, if any.
      like: the shape of that param.
      replicas: ``None`` if the array is the same on all replicas; else the size of its leading
        dimension of replicas, 0 if it has none.
    """

    path: Path
    rel: Path
    value: jax.Array
    at: Path
    state: Any
    field: str
    holds: Holds
    bound: bool
    owner: Path | None
    like: tuple[int, ...] | None
    replicas: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on one replica."""
        return self.value.shape[1 if self.replicas else 0 :]


# The arrays of each state by their paths in it; old arrays by the paths of the new ones that they
# become.
States: TypeAlias = dict[Path, dict[Path, Leaf]]
Sources: TypeAlias = dict[Path, Leaf]


def read(tree: PyTree, params: PyTree) -> list[Leaf]:
    """Return the arrays of all states, the outermost first. Containers of params are not states."""
    containers = set(map(type, trees.find(params, lambda _: True)))
    owners: Any = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
    found: dict[Path, list[Leaf]] = {(): []}

    def visit(x: Any, path: Path, rel: Path, at: Path, state: Any, replicas: int | None) -> None:
        _require_known(x)
        if jax.tree_util.all_leaves([x]):
            value, field = jnp.asarray(x), trees.path_name(rel if state is None else rel[:1])
            owner, known = _owner(rel, value.shape, owners), holds(type(state))
            like = None if owner is None else (*_terms(state), *owners[owner])
            about = (field, known, field in (known.bound or ()), owner, like, replicas)
            found[at].append(Leaf(path, rel, value, at, state, *about))
            return
        if _is_state(x) and type(x) not in containers:
            rel, at, state, found[path] = (), path, x, []
        inside = isinstance(x, PerReplica)
        replicas = 0 if inside else replicas
        for (key,), child in jax.tree_util.tree_flatten_with_path(x, lambda y: y is not x)[0]:
            visit(child, (*path, key), rel if inside else (*rel, key), at, state, replicas)

    visit(tree, (), (), (), None, None)
    return [leaf for leaves in found.values() for leaf in leaves]


def _terms(state: Any) -> tuple[int, ...]:
    """Return the dimension that the sums of a window have for the terms of a loss."""
    window = getattr(state, "window", None)
    weight = getattr(getattr(window, "local", window), "weight", None)
    return (len(weight),) if isinstance(weight, dict) else ()


def _is_state(x: object) -> bool:
    """Return whether ``x`` is a state, and not one of the nodes that make up a state."""
    name, ours = type(x).__name__, type(x).__module__.startswith("boostax.")
    node = not name.endswith("State") if ours else name in ("MaskedNode", "WrappedScheduleState")
    return hasattr(x, "_fields") and not node


def _require_known(x: object) -> None:
    """Refuse the state of a transformation that boostax no longer has."""
    cls, name = type(x), f"{type(x).__module__}.{type(x).__name__}"
    gone = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is not cls
    if isinstance(x, StoreState) and any(y.dtype == jnp.bfloat16 for y in jax.tree.leaves(x.low)):
        gone, name = True, f"{name} of params='kahan'"
    hint = "Take that part out of the chain with the version of boostax that saved it."
    fine = not (gone and name.startswith("boostax."))
    checks.require(WHO, "old_state", name, "of parts that boostax has", fine, hint)


def _owner(path: Path, shape: tuple[int, ...], owners: Mapping[Path, Any]) -> Path | None:
    """Return the path of the param to which an array belongs: the longest one that ends its own.

    If the params are a single array, its path is empty and matches the end of every path; then the
    shape decides.
    """
    found = next((path[i:] for i in range(len(path) + 1) if path[i:] in owners), None)
    return None if found == () and owners[()] not in (shape, shape[1:]) else found


def named(leaf: Leaf) -> str:
    """Return the name of the state of an array."""
    return "no state" if leaf.state is None else type(leaf.state).__name__


def spot(path: Path) -> str:
    """Return a path in a state as people write it."""
    return trees.path_name(path) or "the root"


def _from_multi_steps(x: Any) -> dict[str, Any]:
    """Return the fields of ``accumulate``, whose window is a sum; MultiSteps keeps a mean."""
    sums = jax.tree.map(lambda g: g * x.mini_step, trees.at_least_float32(x.acc_grads))
    closed = (x.gradient_step > 0) & (x.mini_step == 0)
    counts = {"micro_step": x.mini_step, "optimizer_steps": x.gradient_step, "applied": closed}
    return {**counts, "window": Window(sums, None), "inner_state": x.inner_opt_state}


def _to_multi_steps(x: AccumulateState) -> dict[str, Any]:
    """Return the fields of ``MultiSteps``, whose window has no weight."""
    grads = x.window.grads if isinstance(x.window, Window) and x.window.weight is None else None
    means = jax.tree.map(lambda g: g / jnp.maximum(x.micro_step, 1), trees.at_least_float32(grads))
    counts = {"mini_step": x.micro_step, "gradient_step": x.optimizer_steps}
    return {**counts, "acc_grads": means, "inner_opt_state": x.inner_state}


def _from_apply_if_finite(x: optax.ApplyIfFiniteState) -> dict[str, Any]:
    counts = {"skipped_in_a_row": x.notfinite_count, "skipped_steps": x.total_notfinite}
    return {**counts, "last_finite": x.last_finite, "inner_state": x.inner_state}


def _scale(scale: float | jax.Array, clean_steps: int | jax.Array | None = None) -> dict[str, Any]:
    found = {"scale": jnp.asarray(scale, jnp.float32).reshape(())}
    return found | ({} if clean_steps is None else {"clean_steps": jnp.int32(clean_steps)})


# States of other libraries by class: the equivalent class of boostax, and its fields.
# Flax's and jmp's are found by name, so neither is imported.
TRANSLATIONS: dict[str, tuple[type, Callable[[Any], dict[str, Any]]]] = {
    "MultiStepsState": (AccumulateState, _from_multi_steps),
    "AccumulateState": (optax.MultiStepsState, _to_multi_steps),
    "ApplyIfFiniteState": (LossScaleState, _from_apply_if_finite),
    "DynamicScale": (LossScaleState, lambda x: _scale(x.scale, x.fin_steps)),
    "DynamicLossScale": (LossScaleState, lambda x: _scale(x.loss_scale, x.counter)),
    "StaticLossScale": (LossScaleState, lambda x: _scale(x.loss_scale)),
}


def translated(tree: PyTree, wanted: set[type], notes: list[str]) -> PyTree:
    """Replace states of other libraries by the equivalent states in ``wanted``."""

    def foreign(x: object) -> bool:
        return type(x) not in wanted and TRANSLATIONS.get(type(x).__name__, "?")[0] in wanted

    def translate(x: Any) -> Any:
        if not foreign(x):
            return x
        cls, fields = TRANSLATIONS[type(x).__name__]
        if fields is _from_multi_steps:
            notes.append("acc_grads of MultiStepsState is taken as a mean (use_grad_mean=True).")
        return translated(cls(**dict.fromkeys(cls._fields) | fields(x)), wanted, notes)

    return jax.tree.map(translate, tree, is_leaf=foreign)
