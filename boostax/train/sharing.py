"""A step whose optimizer is shared out over the replicas (ZeRO, stage 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from boostax._core import jaxprs, trees
from boostax._core.entrywise import across_entries, require_entrywise
from boostax._core.gate import branch, has_gate, passed
from boostax._core.replicas import is_per_replica
from boostax._core.share import Share, share_of
from boostax.reduce.shard import gathered

PyTree = Any
Run = Callable[[PyTree, PyTree, Share], tuple[PyTree, PyTree]]

# Those that know of parts: they sum over the replicas, or take whole gradients.
_RIGHT = frozenset(
    "all_reduce adasum top_k_reduce threshold_reduce random_k_reduce int8_reduce int16_reduce "
    "sign_reduce power_sgd_reduce clip_by_global_norm centralize_gradients "
    "record_trajectory".split()
)
_HINT = "boostax.clip_by_global_norm and centralize_gradients know of parts."


def run_shared(
    run: Run, params: PyTree, opt_state: PyTree, specs: PyTree, names: tuple[str, ...], always: bool
) -> tuple[PyTree, PyTree]:
    """New params and state, each replica working on its part of the params.

    Args:
      run: ``(its part of the params, state, share) -> (the part, new state)``.
      params: whole.
      opt_state: as it is inside, cut by ``specs``.
      specs: of the state outside.
      names: the replica axes.
      always: gather also where no gate has let a step pass.

    Returns:
      Whole params and the new state. Cost: an all-gather of the params whenever they change.

    Raises:
      ValueError: something behind the reduction looks across the entries of a leaf.
    """
    share = share_of(params, names)
    mine = share.part(params)
    cut = [dim is not None for dim in share.dims.values()] + _cut(opt_state, specs)
    parts = {x.shape for x, c in zip(jax.tree.leaves(mine), cut, strict=False) if c}

    def check(traced: jaxprs.ClosedJaxpr) -> None:
        found = across_entries(traced, cut, frozenset(parts), _RIGHT)
        require_entrywise("make_train_step: with shard_optimizer=True, tx", found, _HINT)

    try:
        replay, _ = trees.trace_once(lambda p, s: run(p, s, share), mine, opt_state, check=check)
    except (TypeError, ValueError) as error:
        error.add_note(
            "make_train_step: with shard_optimizer=True, params and optimizer state are parts of "
            f"leaves behind the reduction, which must be one of boostax's over {names}."
        )
        raise
    mine, opt_state = replay(mine, opt_state)
    whole = lambda: gathered(mine, params, names)  # noqa: E731
    if always or not has_gate(opt_state):
        return whole(), opt_state
    return branch(passed(opt_state), whole, lambda: params), opt_state


def _cut(opt_state: PyTree, specs: PyTree) -> list[bool]:
    """Of each leaf of a state, whether it is a part."""

    def node(state: PyTree, spec: PyTree) -> PyTree:
        if is_per_replica(state):
            return jax.tree.map(lambda _: False, state)
        return any(entry is not None for entry in spec)

    is_leaf = lambda x: is_per_replica(x) or isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.leaves(jax.tree.map(node, opt_state, specs, is_leaf=is_leaf))
