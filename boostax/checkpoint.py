# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a train state through orbax, each leaf checked when it comes back."""

import asyncio
import copy
import itertools
import json
import pathlib
import shutil
import zlib
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import checks, trees
from boostax._core.place import place
from boostax._core.replicas import require_stacked
from boostax.run.cluster.end import PeerLost
from boostax.train.resharding import as_saved, resharded, typed

with checks.needing("Checkpointer", "orbax", "checkpoint"):
    import orbax.checkpoint as ocp

PyTree = Any
Leaves = dict[str, dict[str, Any]]
# What a word of a leaf is read as, by its bytes.
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


class Checkpointer:
    """Saves train states in the background and gives them back bit for bit.

    A state is any tree of JAX arrays: NamedTuples, PRNG keys, sharded and empty arrays included.
    Beside it goes a small JSON ``meta``, and for each leaf its shape, its dtype and a checksum,
    which orbax does not keep: it casts silently and reads flipped bits as numbers. A step's
    directory appears under its number only when it is complete, so a killed save costs nothing but
    that save; what it left is removed at the next opening. Nothing is pickled.

    One process (or one multi-process run) may write to a directory at a time.

    Args:
      directory: where the steps lie; created if missing.
      keep: how many of the latest steps stay on disk.

    Raises:
      ValueError, TypeError: if ``keep`` is no positive integer.

    Example:
      >>> import jax.numpy as jnp, tempfile
      >>> state = {"params": jnp.arange(3.0)}
      >>> with Checkpointer(tempfile.mkdtemp()) as checkpointer:
      ...     checkpointer.save(10, state, {"learning_rate": 0.1})
      ...     restored, meta = checkpointer.restore(state)
      >>> restored["params"], meta
      (Array([0., 1., 2.], dtype=float32), {'learning_rate': 0.1})

    **Cost**: ``save`` blocks for one read of the state (the checksums) and its copy to the host;
    the disk is written in the background.
    """

    def __init__(self, directory: str | pathlib.Path, keep: int = 3):
        checks.positive_int("Checkpointer", "keep", keep, "It is how many steps stay on disk.")
        self._directory = pathlib.Path(directory).absolute()
        if jax.process_index() == 0:
            # orbax can do this as well, but in the background, which may come too late.
            for leftover in self._directory.glob("*.orbax-checkpoint-tmp"):
                # A link is taken away, and what it points to left alone.
                leftover.unlink() if leftover.is_symlink() else shutil.rmtree(leftover)
        self._manager = _Manager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(keep)
            ),
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(type_handler_registry=_arrays()),
                "record": ocp.JsonCheckpointHandler(),
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        # A save that runs would wait for the part of the peer that is gone.
        if not isinstance(error, PeerLost):
            self.close()

    def save(self, step: int, state: PyTree, meta: dict[str, Any] | None = None) -> None:
        """Copy ``state`` to the host and write it, with ``meta``, in the background.

        ``state`` may be donated as soon as this returns. A step that is already on disk is
        replaced. The step is safe on disk after `wait`, `close` or the next ``save``.

        Args:
          step: a name for the checkpoint, usually the calls done; the highest is the latest.
          state: a tree of JAX arrays.
          meta: anything JSON can hold.

        Raises:
          TypeError: if a leaf is no JAX array, or ``meta`` is not JSON.
          ValueError: if devices hold values of their own in what is said to be the same on all.
          RuntimeError: if the save before this one failed in the background.
        """
        leaves = _named(state)
        for name, leaf in leaves.items():
            if not isinstance(leaf, jax.Array):
                raise TypeError(
                    f"Checkpointer: state must be a tree of JAX arrays, got "
                    f"{type(leaf).__name__} at {name!r}. Make it one with jnp.asarray."
                )
        require_stacked("Checkpointer", state)
        record: dict[str, Any] = {"leaves": _described(leaves), "meta": meta or {}}
        # What JSON changes (tuples, integer keys) must change before it is summed.
        record = json.loads(json.dumps(record))
        record["checksum"] = _text_checksum(record)
        if step in self.steps():
            self._manager.delete(step)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(_without_empty(state)),
                record=ocp.args.JsonSave(record),
            ),
            force=True,
        )

    def wait(self) -> None:
        """Return when the last save is complete on disk.

        Raises:
          RuntimeError: if it failed, with orbax's own error as the cause.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise RuntimeError(
                f"Checkpointer: the last save to {self._directory} failed "
                f"({_first_line(error)}). Steps saved before it are untouched."
            ) from error

    def steps(self) -> list[int]:
        """The complete steps on disk, ascending, the last save among them."""
        self.wait()
        self._manager.reload()
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """The highest complete step on disk, or None."""
        return max(self.steps(), default=None)

    def remaining(self) -> str:
        """What a run that ends badly can say: the last complete step, without waiting for any."""
        found = [int(path.name) for path in self._directory.iterdir() if path.name.isdigit()]
        if not found:
            return f"There is no complete checkpoint in {self._directory} yet."
        return f"The last complete checkpoint in {self._directory} is {max(found)}: go on from it."

    def meta(self, step: int | None = None) -> dict[str, Any]:
        """The ``meta`` that was saved with ``step`` (default: the latest).

        Raises:
          FileNotFoundError: if there is no such step.
          RuntimeError: if what is on disk is damaged.
        """
        return self._record(self._existing(step))["meta"]

    def restore(
        self, target: PyTree, step: int | None = None, *, reshard: bool = False
    ) -> tuple[PyTree, dict[str, Any]]:
        """The state and ``meta`` of ``step`` (default: the latest), placed as ``target`` is.

        It may have been saved by another number of processes, on other devices.

        Args:
          target: a state of the same structure, shapes and dtypes: arrays, or
            `jax.ShapeDtypeStruct` with a sharding (without one: the first device).
          step: which step.
          reshard: whether what differs per replica may have been saved by another number of
            replicas; it is then shared out anew by `boostax.reshard_state`, which keeps its mean.

        Raises:
          FileNotFoundError: if there is no such step.
          ValueError: if ``target`` does not fit what was saved; it names the leaf.
          RuntimeError: if what is on disk is damaged: files missing, cut short or altered. Nothing
            is deleted, and the message names the older steps that remain.
        """
        step = self._existing(step)
        record = self._record(step)
        saved = as_saved(target, record["leaves"]) if reshard else jax.tree.map(typed, target)
        self._require_fit(step, record["leaves"], _named(saved))
        wanted = _without_empty(saved)
        how = ocp.checkpoint_utils.construct_restore_args(wanted)
        state = self._read(step, state=ocp.args.PyTreeRestore(wanted, restore_args=how))["state"]
        state = jax.tree.map(_or_empty, saved, state, is_leaf=lambda x: x is None)
        found = _described(_named(state))
        altered = [name for name in found if found[name] != record["leaves"][name]]
        if altered:
            raise self._damaged(step, f"the checksum of {_listed(altered)} does not match")
        return (resharded(state, target) if reshard else state), record["meta"]

    def close(self) -> None:
        """Wait for the last save and let go of the directory."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if step is None and steps:
            return steps[-1]
        if step is None or step not in steps:
            raise FileNotFoundError(
                f"Checkpointer: step must be one of {steps} in {self._directory}, got {step}. "
                "Save one first, or open the directory of another run."
            )
        return step

    def _record(self, step: int) -> dict[str, Any]:
        record = self._read(step, record=ocp.args.JsonRestore())["record"]
        if record.pop("checksum", None) != _text_checksum(record):
            raise self._damaged(step, "the checksum of its record does not match")
        return record

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise self._damaged(step, _first_line(error)) from error

    def _require_fit(self, step: int, saved: Leaves, wanted: dict[str, Any]) -> None:
        where = f"Checkpointer: target must fit step {step} in {self._directory}"
        hint = "Restore with the optimizer chain and the model that saved it, or with reshard=True "
        hint += "if only the number of replicas differs."
        was = {name: f"{leaf['dtype']}{leaf['shape']}" for name, leaf in saved.items()}
        now = {name: f"{leaf.dtype}{list(np.shape(leaf))}" for name, leaf in wanted.items()}
        missing, extra = [x for x in was if x not in now], [x for x in now if x not in was]
        parts = [f"saved but not in target: {_listed(missing)}"] if missing else []
        parts += [f"in target but not saved: {_listed(extra)}"] if extra else []
        both = (x for x in was if was[x] != now.get(x, was[x]))
        parts += [f"{x!r} was {was[x]}, target has {now[x]}" for x in itertools.islice(both, 4)]
        if parts:
            raise ValueError(f"{where}. {'; '.join(parts)}. {hint}")

    def _damaged(self, step: int, what: str) -> RuntimeError:
        older = [other for other in self.steps() if other < step]
        hint = (
            f"To go back to step {older[-1]}, pass step={older[-1]} or move {step} out of it."
            if older
            else "No older step is left: start again, or bring it back from a copy."
        )
        return RuntimeError(
            f"Checkpointer: step {step} in {self._directory} is damaged: {what}. "
            f"Nothing was deleted. {hint}"
        )


class _Manager(ocp.CheckpointManager):
    """One that leaves JAX's counter of calls alone.

    It would ask JAX at every save, and again when one ends in the background, whether a SIGTERM has
    come. Each question sets the counter by which all processes find the call after which to stop:
    set back to an old one, they would stop after different calls. The loop asks, once per call.
    """

    def reached_preemption(self, step: int) -> bool:
        """Not here."""
        del step
        return False


def _arrays() -> Any:
    """orbax's own handler of arrays, which here ends all reads before it raises.

    After the first failed one orbax closes its event loop under the others, which then warn of
    coroutines never awaited and raise in TensorStore's threads.
    """
    handler: Any = copy.copy(ocp.type_handlers.get_type_handler(jax.Array))
    read = handler.deserialize

    async def deserialize(*args: Any) -> Any:
        others = asyncio.all_tasks()
        try:
            return await read(*args)
        except Exception:
            await asyncio.gather(*asyncio.all_tasks() - others, return_exceptions=True)
            raise

    handler.deserialize = deserialize
    return ocp.type_handlers.create_type_handler_registry((jax.Array, handler))


def _named(state: PyTree) -> dict[str, Any]:
    leaves = {
        trees.path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    # orbax writes a leaf under its path joined by dots, so these names have to differ too.
    if len({name.replace("/", ".") for name in leaves}) != len(jax.tree.leaves(state)):
        raise ValueError(
            "Checkpointer: state must have leaf paths that differ when joined by dots, got "
            f"{_listed(sorted(leaves))}. Rename the keys with dots or slashes in them."
        )
    return leaves


def _without_empty(state: PyTree) -> PyTree:
    # orbax refuses arrays of size 0; None keeps their place in the tree.
    return jax.tree.map(lambda leaf: leaf if leaf.size else None, state)


def _or_empty(wanted: Any, restored: Any) -> Any:
    if wanted is None or restored is not None:
        return restored
    return place(jnp.zeros(wanted.shape, wanted.dtype), wanted.sharding)


def _first_line(error: BaseException) -> str:
    text = str(error).split("[tensorstore_spec=")[0].split(". See full TensorStore")[0]
    line = " ".join(text.split())
    return f"{type(error).__name__}: {line[:300]}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(repr(name) for name in names[:4]) + more


def _described(leaves: dict[str, Any]) -> Leaves:
    """Shape, dtype and checksum of each leaf, the sums computed where the leaf is."""
    sums = jax.device_get(_checksums(leaves))
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "checksum": int(sums[name])}
        for name, leaf in leaves.items()
    }


@jax.jit
def _checksums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _checksum(leaf) for name, leaf in leaves.items()}


def _checksum(leaf: jax.Array) -> jax.Array:
    """Sum of all words, each times an odd number of its own, mod 2**32.

    An odd factor is invertible, so one altered word always shows; integer sums do not depend on
    how the leaf is sharded.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _checksum(jax.random.key_data(leaf))
    if jnp.iscomplexobj(leaf):
        return _checksum(leaf.real) + 3 * _checksum(leaf.imag)
    if jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize == 8:
        leaf = jax.lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize])
    words = leaf.astype(jnp.uint32)
    factor, stride = jnp.uint32(1), 2
    for axis in reversed(range(words.ndim)):
        count = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        factor = factor + count * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    return jnp.sum(words * factor, dtype=jnp.uint32)


def _text_checksum(record: dict[str, Any]) -> int:
    """Checksum of a JSON record."""
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
