"""A saved optimizer state for a chain that has changed since."""

import dataclasses
from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from boostax._core import checks, trees
from boostax._core.replicas import PerReplica, is_per_replica
from boostax._core.variants import variants_of
from boostax.autoboost.carry import WHO, Carried, carry, count_replicas, spot
from boostax.autoboost.nodes import Leaf, Node, Path, fields, read
from boostax.train.state import TrainState

PyTree = Any


@dataclasses.dataclass(frozen=True)
class MigrationReport:
    """What became of an optimizer state. ``print`` gives it in words.

    Attributes:
      kept: what was carried over, by state: fields, and from where to where.
      anew: what is as ``new_tx.init`` made it.
      dropped: what the old state held and the new one has no place for.
      notes: choices that were made, and saved values that stand in the place of new arguments.
    """

    kept: tuple[str, ...]
    anew: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        parts = {"kept": self.kept, "made anew": self.anew, "dropped": self.dropped}
        if self.notes:
            parts["notes"] = self.notes
        return "\n".join(
            line for title, lines in parts.items() for line in (f"{title}:", *_lines(lines))
        )


def migrate_state(
    old_state: PyTree,
    new_tx: optax.GradientTransformation,
    params: PyTree,
    *,
    replicas: int | None = None,
) -> tuple[PyTree, MigrationReport]:
    """Carry an optimizer state over to a chain in which something was added, removed or moved.

    ``new_tx.init(params)`` gives the form. Its states take the arrays of the old ones of the same
    class, wherever those stand: inside a scaler, a window, ``optax.masked``, ``partition`` or
    ``inject_hyperparams``. Of several of a class the best fit comes first and, among equal fits,
    the k-th goes to the k-th, the outermost first. Within a state an array is kept where path,
    shape and dtype agree, so that leaves that are newly masked or trained change nothing for the
    others. The moments of a leaf are kept together or not at all, counts only with moments, and
    a trajectory and a basis only whole.

    What stands around a loss scaler, or before it, sums up gradients times the scale. Where the
    scaler moves, comes or goes, open windows, residuals and momentum are multiplied by the new
    scale over the old one, and a note says so. An open window goes on in any precision; one for
    which ``new_tx`` has no place is refused. One that the old scaler would have skipped (not
    finite, or beyond 2**48) is dropped, with a note.

    Some states of others are understood: ``optax.MultiSteps``, in both directions,
    ``optax.apply_if_finite``, and, anywhere in the tree, Flax's ``DynamicScale`` and jmp's
    ``DynamicLossScale`` and ``StaticLossScale``:
    ``migrate_state((opt_state, dynamic_scale), new_tx, params)``.

    The saved value wins over a new argument wherever the state holds it: loss scales,
    ``inject_hyperparams`` and bases. The report notes where they differ.

    Args:
      old_state: the state as it was saved: in its own classes, with its dimension of replicas if it
        is one of a ``TrainState``. It is only read.
      new_tx: the transformation that goes on.
      params: the params that it trains; ``TrainState.params`` as they are.
      replicas: their number, for a ``new_tx`` with per-replica state where the old state has none.
        They share an open window out among them where they will add it up.

    Returns:
      The new state, no buffer of it shared with ``old_state`` or ``params``, in the dtypes and
      placed as ``new_tx.init(params)`` is; and a ``MigrationReport``. With a ``TrainStep``, place
      it by ``jax.device_put(state, step.shardings(state))``. Cost: an ``init`` and one copy of the
      state; call it on the host.

    Raises:
      ValueError: params of other shapes than those of ``old_state`` (it names the leaf); numbers of
        replicas that differ; an open window that does not fit; moments of scaled gradients, or
        scales by group, that the new place of a scaler makes wrong.
      TypeError: ``new_tx`` is no transformation, or ``old_state`` is a whole ``TrainState``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> params = jnp.zeros(3)
      >>> old_state = optax.chain(optax.clip(1.0), optax.scale_by_adam()).init(params)
      >>> new_tx = boostax.static_loss_scale(optax.scale_by_adam(), 8.0)
      >>> state, report = boostax.migrate_state(old_state, new_tx, params)
      >>> print(report)
      kept:
        ScaleByAdamState count, mu, nu: 1 -> inner_state
      made anew:
        LossScaleState scale, clean_steps, tolerance, last_finite, skipped_steps, \
skipped_in_a_row, growths, backoffs, floor_hits: the root
      dropped:
        nothing
    """
    checks.transformation(WHO, "new_tx", new_tx)
    if isinstance(old_state, TrainState):
        hint = "Pass state.opt_state and state.params, and put the result back with _replace."
        got = type(old_state).__name__
        raise TypeError(checks.message(WHO, "old_state", "an optimizer state", got, hint))
    if replicas is not None:
        checks.positive_int(WHO, "replicas", replicas, "It is the size of the replica axis.")
    local = params
    if any(map(is_per_replica, jax.tree.leaves(params, is_leaf=is_per_replica))):
        leading = {x.shape[0] for x in jax.tree.leaves(params)}
        replicas = leading.pop() if replicas is None else replicas
        local = jax.tree.map(lambda x: x[0], _entered(params))
    fresh = new_tx.init(local)
    olds, news = read(old_state, local), read(fresh, local)
    count = count_replicas(olds, news, local, replicas)
    carried = carry(olds, news, local, count)
    placed = {
        leaf.path: _placed(leaf, carried.taken.get(leaf.path), count, _replica_sharding(olds))
        for node in news
        for leaf in node.leaves.values()
    }
    state = jax.tree_util.tree_map_with_path(lambda path, _: placed[path], fresh)
    notes = [*carried.notes, *_saved_wins(carried, news)]
    state = _scheduled(state, new_tx, local, notes)
    return state, _report(carried, olds, news, notes)


def _entered(params: PyTree) -> PyTree:
    """The params out of their ``PerReplica``."""
    return jax.tree.map(
        lambda x: x.local if isinstance(x, PerReplica) else x, params, is_leaf=is_per_replica
    )


def _placed(leaf: Leaf, source: Leaf | None, replicas: int | None, axis: Any) -> jax.Array:
    """A buffer of its own for an array of the new state."""
    like = leaf.value
    if source is None:
        value = _copy(like, like)
    elif leaf.own and source.own:
        # Only the old one knows how it lies on the replicas.
        return _copy(source.value, source.value)
    else:
        given = source.value
        value = _copy(given[0] if source.own and replicas else given, like)
    if leaf.own and replicas is not None:
        value = jnp.broadcast_to(value[None], (replicas, *value.shape)).copy()
        value = value if axis is None else jax.device_put(value, axis)
    return value


def _copy(x: Any, like: Any) -> jax.Array:
    """``x`` in a new buffer, strongly typed, placed as ``like``."""
    if jnp.issubdtype(like.dtype, jax.dtypes.extended):
        return jax.device_put(x.copy(), like.sharding)
    if like.committed:
        return jax.device_put(jnp.array(x, like.dtype, copy=True), like.sharding)
    if isinstance(x, jax.Array) and not x.is_fully_replicated:
        return x.copy()
    # By way of the host: a copy of a committed array would be committed.
    return jnp.array(np.asarray(x), like.dtype, copy=True)


def _replica_sharding(olds: list[Node]) -> Any:
    """How the old per-replica arrays lie on the mesh, by their first dimension."""
    for node in olds:
        for leaf in node.leaves.values():
            sharding = getattr(leaf.value, "sharding", None)
            if leaf.own and isinstance(sharding, NamedSharding) and len(sharding.spec):
                return NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0]))
    return None


def _scheduled(state: PyTree, tx: Any, params: PyTree, notes: list[str]) -> PyTree:
    """The next depth as the new schedule has it, after the steps that were taken."""
    variants = variants_of(tx)
    new = state if variants is None else variants.resumed(params, state)
    if new is state or int(new.coming()) == int(state.coming()):
        return state
    notes.append(
        f"next_depth is {int(new.coming())}, not {int(state.coming())}: the schedule's own."
    )
    return jax.tree.map(lambda x, old: old if x is old else _copy(x, old), new, state)


def _saved_wins(carried: Carried, news: list[Node]) -> list[str]:
    """Saved numbers that differ from those that the new transformation was given."""
    notes: list[str] = []
    for node in news:
        for rel, leaf in node.leaves.items():
            source = carried.taken.get(leaf.path)
            if source is None or not _given(node, rel):
                continue
            saved, given = np.asarray(source.value), np.asarray(leaf.value)
            if saved.shape == given.shape and not np.array_equal(saved, given):
                words = f"{saved!s}, not {given!s}" if not saved.ndim else "the saved one"
                notes.append(f"{trees.path_name(leaf.path)} is {words}: the saved value stays.")
    return notes


def _given(node: Node, rel: Path) -> bool:
    """Whether an array holds an argument of the factory."""
    name = trees.path_name(rel[:1])
    if name == "hyperparams":
        return rel[1].key not in getattr(node.value, "hyperparams_states", {})
    return name in {node.holds.scale, node.holds.basis}


def _report(
    carried: Carried, olds: list[Node], news: list[Node], notes: list[str]
) -> MigrationReport:
    origins = {path: source.node.path for path, source in carried.taken.items()}
    kept: list[str] = []
    for node in news:
        sources = [carried.taken.get(leaf.path) for leaf in node.leaves.values()]
        # A dict, for its order; nodes are told apart by where they lie.
        places = dict.fromkeys((x.node.path, x.node.source) for x in sources if x is not None)
        for path, source in places:
            words = fields(node, lambda leaf, path=path: origins.get(leaf.path) == path)
            origin = "" if source == node.source else f" from {source}"
            way = spot(path) if path == node.path else f"{spot(path)} -> {spot(node.path)}"
            kept.append(f"{node.source} {words}{origin}: {way}")
    used = {source.path for source in carried.taken.values()}
    anew, dropped = _without(origins, news), _without(used, olds)
    return MigrationReport(tuple(kept), anew, dropped, tuple(notes))


def _without(paths: Container[Path], nodes: list[Node]) -> tuple[str, ...]:
    """What of each state is not among these arrays."""
    found = [(node, fields(node, lambda leaf: leaf.path not in paths)) for node in nodes]
    return tuple(f"{node.source} {words}: {spot(node.path)}" for node, words in found if words)


def _lines(lines: tuple[str, ...]) -> list[str]:
    return [f"  {line}" for line in lines] or ["  nothing"]
