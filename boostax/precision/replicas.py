# SPDX-License-Identifier: Apache-2.0
"""Check that replicas have the same params and state.

Data parallelism trains many copies of one model, and training programs do not compare the copies.
After a flipped bit, or with another seed, learning rate or version in one process, a replica trains
a different model. Nevertheless each replica reports the same averaged loss, and a checkpoint
contains the params of only one device.

References:
  Dixit et al., Silent Data Corruptions at Scale, https://arxiv.org/abs/2102.11245, 2021. Dubey et
  al., The Llama 3 Herd of Models, https://arxiv.org/abs/2407.21783, 2024: in 54 days, six of 419
  interruptions were silent corruptions that somebody noticed.
"""

import functools
import importlib.metadata
import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from boostax._core import axes, bound_axis, checks, gate, placement, replicas, trees
from boostax._core.copies import Copies, classes, compared, on_mesh
from boostax._core.describe import Holds, Stepped, describe
from boostax._core.types import PyTree
from boostax.order import findings

_WHO = "check_replicas"
# The maximum number of different leaves that are recorded.
_ROWS = 16


class CheckReplicasState(NamedTuple):
    """State of ``check_replicas``.

    Attributes:
      calls: i32, calls since the start.
      applied: bool, whether the last call ran the inner transformation.
      skipped: i32, calls that were skipped since the start.
      compared: i32, the number of compared replicas; 0 before the first call.
      leaves: u32 ``[16]``: for each leaf that differed, the CRC-32 of its path, such as
        ``params/w``, from the last comparison that found a difference; 0 in unused elements.
      culprits: i32 ``[16]``, the replica whose copy of the leaf differed; -1 in unused elements.
      inner_state: state of the inner transformation.
    """

    calls: jax.Array  # [] int32
    applied: jax.Array  # [] bool
    skipped: jax.Array  # [] int32
    compared: jax.Array  # [] int32
    leaves: jax.Array  # [16] uint32
    culprits: jax.Array  # [16] int32
    inner_state: optax.OptState
    holds = Holds(())

    inner_ran = gradient_used = gate.flag

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``.

        Until a difference is detected, ``differing_replica`` is -1 and ``differing_leaf`` is 0.
        """
        return {"differing_replica": self.culprits[0], "differing_leaf": self.leaves[0]}


@bound_axis.gate
def check_replicas(
    inner: optax.GradientTransformation, *, every: int = 1, axis_name: axes.AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Run ``inner`` only while all replicas have the same bits.

    At each ``every``-th call, before the step, each device reads its copies of params and state as
    words :math:`b_i` of 32 bits and computes two sums. The devices then compare the sums:

    .. math:: \textstyle \sum_i b_i \text{ and } \sum_i (2i + 1)\, b_i \mod 2^{32}

    A single flipped bit always changes the second sum. The devices also compare checksums of the
    package versions, of the batch's types, and of the programs of the loss and of the update. So
    different code on two processes is detected at the first call. A shard is compared with the
    copies of the same shard; a leaf without copies (FSDP over all devices) is not compared. One
    warning reports that no param has copies. Arrays in a ``PerReplica`` may differ.

    A step with a difference is skipped: params, state and schedules are unchanged, bit for bit.
    Replicas that differ remain different, so all further calls with a comparison are skipped.
    ``boostax.precision.raise_if_diverged(state)`` raises an error with the names of leaves and
    replicas. Place the check outside all other gates: ``check_replicas(dynamic_loss_scale(...))``.

    Args:
      inner: the optimizer, with a reduction inside.
      every: the number of calls from one comparison of params and state to the next.
      axis_name: replica axis (or axes), in ``shard_map`` or ``pmap``. With ``None``, a train step
        supplies its axis if ``inner`` has a reduction; outside a train step, no axis is used.

    Returns:
      A gate with a ``CheckReplicasState``. Cost: 141 bytes of state; one read of params and state
      at each ``every``-th call; each call gathers 8 bytes from each device for each distinct
      sharding among the leaves, and the sums of all leaves if the 8 bytes differ.
      ``make_train_step`` passes the loss's program to ``update``. In your own loop, to compare the
      program of the loss and the types of the batch, pass
      ``loss_program=str(jax.make_jaxpr(grad_fn.loss_at(batch))(params))``.

    Raises:
      ValueError, TypeError: an argument out of range.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> inner = optax.chain(boostax.all_reduce("data"), optax.sgd(1.0))
      >>> tx = boostax.precision.check_replicas(inner, axis_name="data")
      >>> update = lambda w, grads: boostax.apply_gradients(tx, grads, tx.init(w), w)
      >>> copies = jnp.array([1.0, 2.0, 1.0])
      >>> w, state = jax.vmap(update, axis_name="data")(copies, jnp.ones(3))
      >>> w.tolist(), jax.vmap(boostax.metrics)(state)["differing_replica"].tolist()
      ([1.0, 2.0, 1.0], [1, 1, 1])
    """
    tx = checks.transformation(_WHO, "inner", inner)
    names = axes.canonical(_WHO, axis_name)
    every = checks.positive_int(_WHO, "every", every, "1 compares at the start of each step.")

    def init_fn(params: PyTree) -> CheckReplicasState:
        calls, skipped, compared = (jnp.zeros((), jnp.int32) for _ in range(3))
        rows = jnp.zeros(_ROWS, jnp.uint32), jnp.full(_ROWS, -1, jnp.int32)
        inner_state = gate.init_inner(tx, params)
        return CheckReplicasState(calls, jnp.asarray(False), skipped, compared, *rows, inner_state)

    @describe(_WHO, "comparison", names, inner={"inner_state": tx})
    def step_fn(
        grads: gate.Pending,
        state: CheckReplicasState,
        params: PyTree,
        *,
        apply: bool,
        loss_program: str = "",
        **extra: Any,
    ) -> Stepped:
        axes.require_bound(names, _WHO)
        inner = state.inner_state
        call = functools.partial(gate.call, tx, grads, inner, params, apply=apply, extra=extra)
        heavy = trees.Replay(*jax.make_jaxpr(call, return_shape=True)())
        versions = str([importlib.metadata.version(x) for x in ("jax", "jaxlib", "optax", "numpy")])
        numbers = tuple(map(_checksum, (versions, loss_program, str(heavy.program))))
        compared = () if replicas.owns_params(inner) else params
        arrays = compared, state, extra.get("value")
        ok, culprits = compare(arrays, numbers, state.calls % every == 0, names)
        placed = placement.placed_here()
        count = placed.replicas if placed is not None else axes.size(names) if names else 1
        if compared is params and not placement.Placement.has_copies(params, names):
            findings.of_part(_WHO, "no_copies", state)
        state = state._replace(compared=jnp.asarray(count, jnp.int32))
        rows = [*_CHECKSUMS, *(name for name, _ in leaves_of(*arrays))]
        crcs = jnp.asarray(np.array([_checksum(name) for name in rows], np.uint32))

        def different() -> list[jax.Array]:
            """Return checksums and culprits of the leaves that differ, and fill unused elements."""
            (at,) = jnp.nonzero(culprits >= 0, size=_ROWS, fill_value=len(rows))
            return [x.at[at].get(mode="fill", fill_value=y) for x, y in ((crcs, 0), (culprits, -1))]

        leaves, of_leaves = gate.branch(ok, lambda: [state.leaves, state.culprits], different)
        calls = gate.counted(state.calls, jnp.asarray(True))
        moved = state._replace(calls=calls, leaves=leaves, culprits=of_leaves)
        ok, moved = gate.skip_if_empty(ok, moved, state, grads)
        value, new = gate.run_or_hold(ok, heavy, params, inner, apply=apply, who=_WHO, names=names)
        return value, gate.applied_or_skipped(moved, ok, new)

    return gate.gated(init_fn, step_fn, gate.flush_of(tx))


def raise_if_diverged(state: PyTree, params: PyTree = None) -> None:
    """Raise an error with leaves and replicas if ``check_replicas`` detected a difference.

    Call this function only once in many steps. The call reads the state, so it waits for the end of
    the step.

    Args:
      state: a train state, or an optimizer state.
      params: the params, if ``state`` is an optimizer state; the error names leaves of the params.

    Raises:
      RuntimeError: replicas differed.
      ValueError: the state has no ``check_replicas``, or no replicas were compared although there
        are several devices.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.precision.check_replicas(optax.sgd(1.0))
      >>> boostax.precision.raise_if_diverged(tx.init(jnp.float32(1.0)))
    """
    who = "raise_if_diverged"
    hint = "Wrap the optimizer: tx = boostax.precision.check_replicas(tx)."
    check = trees.state_of(who, state, CheckReplicasState, hint)
    params = getattr(state, "params", None) if params is None else params
    names = [*_CHECKSUMS, "value", *(name for name, _ in leaves_of(params, check))]
    used = len(check.calls.sharding.device_set)
    # pmap stacks the copies of all replicas.
    if check.calls.ndim:
        check = jax.tree.map(lambda x: x[0], check._replace(inner_state=()))
    compared = int(check.compared)
    ok = used == 1 or compared > 1 or not int(check.calls)
    got = f"a check that compared only {compared} of {used} devices"
    hint = "Wrap the chain in boostax.on_mesh, or pass axis_name= in a shard_map of your own."
    checks.require(ok, who, "check_replicas", got, "a check that compared the replicas", hint)
    if int(check.culprits[0]) < 0:
        return
    known = {_checksum(name): name for name in names}
    pairs = zip(np.asarray(check.culprits), np.asarray(check.leaves), strict=True)
    rows = "\n".join(f"  replica {i}: {known.get(int(x), 'a param')}" for i, x in pairs if i >= 0)
    raise RuntimeError(
        "check_replicas: replicas must be equal, got different replicas at call "
        f"{int(check.calls)}:\n{rows}\nRestore the last checkpoint that was saved before the "
        "difference. If there are two replicas, the second is named, but the first may be wrong."
    )


# The checksums that processes compare. The checksum of the loss also covers the types of the batch,
# because the program of the loss contains these types.
_CHECKSUMS = "versions", "batch or loss", "update"


def _checksum(text: str) -> int:
    """Return the CRC-32 of the sorted words of a text, without the addresses of functions.

    The words are sorted because JAX prints sets in a varying order.
    """
    words = re.split(r"[\s,(){}\[\]]+", re.sub(r" at 0x[0-9a-f]+", "", text))
    return zlib.crc32(" ".join(sorted(words)).encode())


def leaves_of(params: PyTree, state: PyTree, value: PyTree = None) -> list[tuple[str, PyTree]]:
    """Return the leaves that ``compare`` compares, with their names."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=replicas.is_per_replica)
    common = [(trees.path_name(path), x) for path, x in leaves if not replicas.is_per_replica(x)]
    common += [] if value is None else [("value", value)]
    return [*((f"params/{name}", x) for name, x in trees.named(params)), *common]


def compare(
    arrays: PyTree, numbers: Sequence[int], due: jax.Array, names: tuple[str, ...]
) -> Copies:
    """Compare the replicas' copies of params and state, and the ``numbers`` of the processes.

    Arrays in a ``PerReplica`` may differ, and so may params, if each replica has its own params. A
    shard of a leaf is compared with the copies of the same shard.

    Args:
      arrays: the params, a state whose arrays outside a ``PerReplica`` are equal on all replicas,
        and the loss or ``None``. With a loss, the comparison runs after the loss's all-reduce, so
        that processes with different programs still issue their collectives in the same order.
      numbers: numbers of this process, such as checksums of its program. In the result, the
        culprits of the numbers precede the culprits of the leaves.
      due: bool scalar, whether to compare params and state in this call.
      names: the replica axes of a mapped function; on global arrays, the placement has the axes.
    """
    placed = placement.placed_here()
    params, state, value = arrays
    leaves = [x for _, x in leaves_of(*arrays)]
    nothing = Copies(jnp.asarray(True), jnp.full(len(numbers) + len(leaves), -1, jnp.int32))
    if placed is None and not names:
        return nothing
    if placed is None:
        varying = [frozenset(axes.varying(x)) & {*names} for x in leaves]
        copied = [*map(lambda x, by: jnp.zeros(()) if {*names} <= by else x, leaves, varying)]
        groups, kinds = classes(names, [axes.size((name,)) for name in names], varying)
        copies = compared(copied, due, numbers, names, groups, kinds)
        others = tuple(sorted(axes.varying(copies.culprits)))
        culprits = axes.largest(copies.culprits, others) if others else copies.culprits
        return Copies(axes.agree(copies.equal, others), culprits)
    shapes = {path: jnp.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}
    specs = [placed.spec(path) or PartitionSpec() for path in shapes]
    owners = dict(zip(shapes, zip(shapes.values(), specs, strict=True), strict=True))
    # A param that each replica owns has no copies.
    if placed.owns_params:
        specs = [PartitionSpec(placed.names)] * len(specs)
        leaves[: len(specs)] = [jnp.zeros(placed.replicas)] * len(specs)
    count = placed.replicas if placed.shared_out else 0
    of_state = replicas.specs_like(owners, state, placed.names, count, sizes=placed.mesh.shape)
    specs += [x for _, x in leaves_of((), of_state, None if value is None else PartitionSpec())]
    order = (*placed.names, *(x for x in placed.mesh.axis_names if x not in placed.names))
    local = on_mesh(placed.auto_mesh, order, tuple(specs), numbers)
    copies = placement.on_shared(placed, (leaves, due), local, lambda *_: nothing, "copies")
    return copies._replace(culprits=copies.culprits // (placed.mesh.size // placed.replicas))
