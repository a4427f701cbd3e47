# SPDX-License-Identifier: Apache-2.0
"""Record snapshots of the params in a ring buffer, next to any optimizer.

A snapshot is written to one index of the buffer. The write is in a branch, and the compilers for
CPU, TPU v5e and H100 write in place.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from boostax._core import checks, gate, protocols, trees
from boostax._core.describe import Holds, Stepped, describe
from boostax._core.types import PyTree
from boostax.subspace.basis import Basis, Dtype, principal

_WHO = "record_trajectory"
_HINT = "Put boostax.subspace.record_trajectory into the chain."


class TrajectoryState(NamedTuple):
    """State of ``record_trajectory``.

    Attributes:
      steps: i32, calls so far.
      recorded: i32, snapshots so far; the next snapshot is written to the index ``recorded %
        size``.
      snapshots: tree like the params, with leaves ``(size, *leaf.shape)`` in the storage dtype.
    """

    steps: jax.Array  # [] int32
    recorded: jax.Array  # [] int32
    snapshots: PyTree  # (size, *leaf.shape), storage dtype
    holds = Holds(("recorded", "snapshots"), steps="steps", params=True)

    # Snapshots have all params, so outer transformations must not mask params.
    needs_all_params = protocols.yes

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        return {"trajectory_snapshots": self.recorded}


def record_trajectory(
    size: int, *, every: int = 1, start: int = 0, dtype: Dtype = "float32"
) -> optax.GradientTransformationExtraArgs:
    r"""Store the last ``size`` snapshots of the params; pass the updates through.

    At the calls :math:`t = \text{start} + i \cdot \text{every}`, counted from 0, ``update`` stores
    the params that it receives: the params *before* this update. A full buffer overwrites its
    oldest snapshot. Inside a loss scaler or a window only applied steps count as calls.

    A basis from the last snapshots of a run is better than a basis from all snapshots, because the
    first snapshots differ by far the most from all other snapshots.

    Args:
      size: number of stored snapshots, at least two.
      every: number of calls from one snapshot to the next.
      start: number of calls before the first snapshot.
      dtype: dtype of the snapshots; f64 and complex leaves stay f64 and complex. In bf16,
        differences of less than 0.4% of a weight are lost.

    Returns:
      A transformation with a ``TrajectoryState``. Cost: ``size`` copies of the params in ``dtype``,
      sharded like the params; a call with a snapshot reads the params and writes one snapshot, and
      other calls cost nothing. There is no copy of the buffer or of donated params on CPU, TPU v5e
      and H100.

    Raises:
      ValueError, TypeError: an argument out of range; at trace time, ``update`` without params.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = optax.chain(boostax.subspace.record_trajectory(2), optax.sgd(1.0))
      >>> w = jnp.float32(0.0)
      >>> state = tx.init(w)
      >>> for _ in range(4):
      ...   updates, state = tx.update(jnp.float32(-1.0), state, w)
      ...   w = optax.apply_updates(w, updates)
      >>> boostax.subspace.trajectory(state)[0].tolist()
      [2.0, 3.0]

    References:
      Li et al., Low Dimensional Trajectory Hypothesis is True, https://arxiv.org/abs/2103.11154,
      2021.
    """
    hint = "size is the number of snapshots in memory; 40 is usual."
    checks.natural(_WHO, "size", size, hint, "an integer of at least 2", least=2)
    checks.positive_int(_WHO, "every", every, "every is the number of calls between snapshots.")
    checks.natural(_WHO, "start", start, "start is the number of calls before the first snapshot.")
    narrow = checks.floating_dtype(_WHO, "dtype", dtype)

    def init_fn(params: PyTree) -> TrajectoryState:
        counts = [jnp.zeros((), jnp.int32) for _ in range(2)]
        return TrajectoryState(*counts, snapshots=trees.buffers(params, narrow, size))

    @describe(_WHO, "recorder")
    def update_fn(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Stepped:
        trees.require_params(params, _WHO, "The params are recorded.")
        # The count of steps is updated outside the branch.
        old = state._replace(steps=None)
        since = state.steps - start
        due = jnp.logical_and(since >= 0, since % every == 0)
        _, new = gate.run_or_hold(
            due, lambda: ((), _record(old, params)), (), old, apply=True, who=_WHO
        )
        # The updates depend on the branch, so that XLA overwrites donated params only after the
        # branch has read them. Otherwise, XLA would copy the params. ``new.recorded`` is never
        # negative, but compilers do not know this.
        unknown = new.recorded < 0
        updates = jax.tree.map(lambda x: jnp.where(unknown, jnp.zeros_like(x), x), updates)
        return updates, new._replace(steps=optax.safe_increment(state.steps))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _record(state: TrajectoryState, params: PyTree) -> TrajectoryState:
    """Return the state with one more snapshot."""

    def write(x: jax.Array, p: jax.Array) -> jax.Array:
        slot = state.recorded % x.shape[0]
        return jax.lax.dynamic_update_index_in_dim(x, p.astype(x.dtype), slot, 0)

    snapshots = jax.tree.map(write, state.snapshots, params)
    return state._replace(recorded=state.recorded + 1, snapshots=snapshots)


def trajectory(opt_state: PyTree) -> tuple[PyTree, int]:
    """Return the recorded snapshots, the oldest first, outside of ``jit``.

    Args:
      opt_state: any state that contains a ``TrajectoryState``.

    Returns:
      A tree like the params with leaves ``(count, *leaf.shape)``, and ``count``. Cost: a copy of
      the buffer.

    Raises:
      ValueError: the state has no ``TrajectoryState``.
    """
    state = trees.state_of("trajectory", opt_state, TrajectoryState, _HINT)
    size = len(jax.tree.leaves(state.snapshots)[0])
    recorded = int(state.recorded)
    order = np.arange(max(recorded - size, 0), recorded) % size
    return jax.tree.map(lambda x: x[order], state.snapshots), len(order)


def trajectory_basis(
    opt_state: PyTree,
    n_components: int,
    *,
    params: PyTree = None,
    dtype: Dtype = None,
    complete: bool = True,
) -> Basis:
    """Return the leading directions of the recorded snapshots.

    The current ``params`` can be one more snapshot. If ``dim_reduce`` begins at these params, pass
    ``params``, and choose an ``n_components`` that is one less than the number of snapshots, so
    that the span contains the difference between the params and the mean.

    Args:
      opt_state: any state that contains a ``TrajectoryState``.
      n_components: number of directions, less than the number of snapshots.
      params: the latest snapshot, which replaces the oldest snapshot in a full buffer.
      dtype: dtype of the components; ``None`` for f32 or wider.
      complete: whether to raise an error if the snapshots differ in fewer directions; with
        ``False`` the missing components are zero, as inside ``jit``.

    Returns:
      The ``Basis`` that ``pca_basis`` of the same snapshots returns. Cost: as ``pca_basis``;
      ``params`` causes a copy of a full buffer. Inside ``jit`` the buffer must be full.

    Raises:
      ValueError: the state has no ``TrajectoryState``; errors of ``pca_basis``.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> tx = boostax.subspace.record_trajectory(3)
      >>> state = tx.init(jnp.zeros(2))
      >>> for t in range(3):
      ...   _, state = tx.update(jnp.zeros(2), state, jnp.array([3.0 * t, 4.0 * t]))
      >>> boostax.subspace.trajectory_basis(state, 1).components.round(3).tolist()
      [[0.6000000238418579, 0.800000011920929]]
    """
    state = trees.state_of("trajectory_basis", opt_state, TrajectoryState, _HINT)
    size = len(jax.tree.leaves(state.snapshots)[0])
    if params is not None:
        state = _record(state, params)
    count = size if isinstance(state.recorded, Tracer) else int(state.recorded)
    snapshots = jax.tree.map(lambda x: x[:count] if count < size else x, state.snapshots)
    return principal(snapshots, n_components, dtype, complete, "trajectory_basis")
