# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a train state through orbax, with a checksum for each leaf."""

import asyncio
import contextlib
import copy
import functools
import json
import pathlib
import shutil
import sys
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

import boostax
from boostax._core import checks, copies, replicas, transfer, trees, types
from boostax._core.types import PyTree
from boostax.train import resharding

with checks.needing("Checkpointer", "orbax", "checkpoint"):
    import orbax.checkpoint as ocp

Json: TypeAlias = dict[str, Any]
_WHO = "Checkpointer"
# Boostax 0.2 recorded no parts, so a removed part is recognized by the name of a leaf.
_FIELDS = dict(fast="GroupSignalState", coordinates="SubspaceParamsState", codes="Int8Components")


class Checkpointer(contextlib.AbstractContextManager["Checkpointer"]):
    """Save train states in the background and restore them bit for bit.

    A state is any tree of JAX arrays, including NamedTuples, PRNG keys, sharded and empty arrays.
    Each checkpoint also contains a small JSON ``meta``, the versions of boostax, JAX and Optax, the
    state classes of the chain, and for each leaf its shape, its dtype and a checksum. Without this
    record, orbax would cast leaves silently and would not notice flipped bits. The directory of a
    step gets its final name only after its last file is written, so a killed process loses only the
    save in progress. The next ``Checkpointer`` removes the incomplete directory. Nothing is
    pickled.

    Only one process (or one multi-process run) may write to a directory at a time.

    Args:
      directory: the directory of the steps; created if missing.
      keep: the number of latest steps that remain on disk.

    Raises:
      ValueError, TypeError: ``keep`` is not a positive integer.

    Example:
      >>> import jax.numpy as jnp, tempfile
      >>> state = {"params": jnp.arange(3.0)}
      >>> with Checkpointer(tempfile.mkdtemp()) as checkpointer:
      ...     checkpointer.save(10, state, {"learning_rate": 0.1})
      ...     restored, meta = checkpointer.restore(state)
      >>> restored["params"], meta
      (Array([0., 1., 2.], dtype=float32), {'learning_rate': 0.1})

    **Cost**: ``save`` blocks while it computes the checksums (one read of the state) and copies the
    state to the host; the files are written in the background. ``restore`` needs memory for the
    state and a second copy of one leaf.
    """

    def __init__(self, directory: str | pathlib.Path, keep: int = 3):
        checks.positive_int(_WHO, "keep", keep, "keep is the number of saved steps on disk.")
        self._path = pathlib.Path(directory).absolute()
        if jax.process_index() == 0:
            # orbax would remove leftovers in the background, perhaps only after the next save has
            # started.
            for leftover in self._path.glob("*.orbax-checkpoint-tmp"):
                # The target of a link does not belong to boostax, so only the link is removed.
                leftover.unlink() if leftover.is_symlink() else shutil.rmtree(leftover)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        state = ocp.PyTreeCheckpointHandler(type_handler_registry=_arrays())
        handlers = {"state": state, "record": ocp.JsonCheckpointHandler()}
        self._manager = _Manager(self._path, options=options, item_handlers=handlers)

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        # After an error, another process may have ended. ``close`` would then wait for the shards
        # of that process.
        if error is None or jax.process_count() == 1:
            self.close()

    def save(self, step: int, state: PyTree, meta: Json | None = None) -> None:
        """Copy ``state`` to the host, and write the copy and ``meta`` in the background.

        ``state`` may be donated as soon as ``save`` returns. A step that is already on disk is
        replaced. The new step is complete on disk after ``wait``, ``close`` or the next ``save``.

        Args:
          step: a number for the checkpoint, usually the number of calls. The checkpoint with the
            highest number is the latest.
          state: a tree of JAX arrays.
          meta: a value that JSON can represent.

        Raises:
          TypeError: a leaf is not a JAX array, an object of NNX is in the tree, or ``meta`` is not
            JSON.
          ValueError: the copies of a replicated array differ between its devices.
          RuntimeError: the previous save failed in the background.
        """
        checks.natural(_WHO, "step", step, "The call is save(step, state, meta).")
        leaves = _require_arrays("state", state, lambda leaf: isinstance(leaf, jax.Array))
        trees.require_order(_WHO, "save(step, state, meta)", state=state)
        replicas.require_stacked(_WHO, state)
        _require_equal(_WHO, state)
        versions = {x.__name__: x.__version__ for x in (boostax, jax, optax)}
        record = {"leaves": _described(leaves), "meta": meta or {}}
        record |= {"parts": trees.parts(state), "versions": versions}
        # JSON converts tuples and integer keys, so the checksum is computed after the conversion.
        record = json.loads(json.dumps(record))
        record["checksum"] = _text_checksum(record)
        if step in self.steps():
            self._manager.delete(step)
        # orbax refuses arrays of size 0, so None represents these arrays in the tree.
        state = jax.tree.map(lambda leaf: leaf if leaf.size else None, state)
        args = {"state": ocp.args.PyTreeSave(state)}
        args |= {"record": ocp.args.JsonSave(record)}
        self._manager.save(step, args=ocp.args.Composite(**args), force=True)

    def wait(self) -> None:
        """Wait until the last save is complete on disk.

        Raises:
          RuntimeError: the save failed; orbax's error is the cause.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            text = f"{_WHO}: the last save to {self._path} failed ({_first_line(error)}). "
            raise RuntimeError(text + "Earlier steps are unchanged.") from error

    def steps(self) -> list[int]:
        """Wait for the last save, then return the complete steps on disk, ascending."""
        self.wait()
        self._manager.reload()
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """Return the highest complete step on disk, or None."""
        return max(self.steps(), default=None)

    def meta(self, step: int | None = None) -> Json:
        """Return the ``meta`` that was saved with ``step``, by default the latest step.

        Raises:
          FileNotFoundError: the step does not exist.
          RuntimeError: the record on disk is damaged.
        """
        return self._record(step)[1]["meta"]

    def versions(self, step: int | None = None) -> dict[str, str]:
        """Return the versions of boostax, JAX and Optax that saved ``step``.

        The result is empty for a checkpoint of boostax 0.2, which recorded no versions. Raises: as
        `meta`.
        """
        return self._record(step)[1].get("versions", {})

    def restore(
        self, target: types.State, step: int | None = None, *, reshard: bool = False
    ) -> tuple[types.State, Json]:
        """Return the state and ``meta`` of ``step`` (default: the latest), placed like ``target``.

        The state may have been saved with another number of processes and on other devices. The
        restored arrays own their memory, so a step may donate the arrays.

        Args:
          target: a state with the same structure, shapes and dtypes. The leaves are arrays or
            ``jax.ShapeDtypeStruct`` with shardings; a leaf without a sharding is placed on the
            first device.
          step: the step to restore.
          reshard: whether per-replica state may have been saved with another number of replicas. If
            so, `boostax.reshard_state` redistributes this state over the replicas and preserves its
            mean.

        Raises:
          FileNotFoundError: the step does not exist.
          TypeError: a leaf of ``target`` is not an array, such as the int ``step`` of a new Flax
            ``TrainState``.
          ValueError: ``target`` differs from the saved state; the error names the parts or leaves
            that differ.
          RuntimeError: files on disk are missing, truncated or altered. No file is deleted, and the
            message names an older step that can be restored.
        """
        _require_arrays("target", target, lambda leaf: hasattr(leaf, "dtype"))
        step, record = self._record(step)
        saved = resharding.as_saved(target, record["leaves"] if reshard else {})
        if unlike := _unlike(record, trees.parts(target), _named(saved)):
            raise ValueError(
                f"Checkpointer: target must match step {step} in {self._path}, {unlike}"
            )
        item = jax.tree.map(lambda leaf: leaf if leaf.size else None, saved)
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        # The restore is partial, because another version of boostax may have more or fewer fields
        # that are None.
        args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=True)
        state = self._read(step, state=args)["state"]
        state = jax.tree.map(
            lambda x, y: y if x.size else transfer.place(jnp.zeros(x.shape, x.dtype), x.sharding),
            saved,
            state,
        )
        restored = _described(_named(state))
        if altered := [x for x in restored if restored[x] != record["leaves"][x]]:
            raise self._damaged(step, f"the checksum of {', '.join(altered[:4])} does not match")
        state = resharding.resharded(state, target) if reshard else state
        # On CPU, restored arrays share the host's memory, and XLA cannot reuse such memory for a
        # donated array.
        state = jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), state)
        return state, record["meta"]

    def close(self) -> None:
        """Wait for the last save and release the directory."""
        with contextlib.closing(self._manager):
            self.wait()

    def _record(self, step: int | None) -> tuple[int, Json]:
        """Return the number and the record of a step on disk, by default of the latest step."""
        steps = self.steps()
        last = max(steps, default=None) if step is None else step
        if last not in steps:
            allowed = f"one of {steps} in {self._path}"
            hint = "Save the step first, or open another directory."
            raise FileNotFoundError(checks.message(_WHO, "step", allowed, step, hint))
        record = self._read(last, record=ocp.args.JsonRestore())["record"]
        if record.pop("checksum", None) != _text_checksum(record):
            raise self._damaged(last, "the checksum of the step's record does not match")
        return last, record

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            # orbax also raises these errors for classes of nodes that it cannot compare, even if no
            # file is damaged.
            unlike = isinstance(error, (TypeError, IndexError))
            raise self._damaged(step, _first_line(error), unlike) from error

    def _damaged(self, step: int, what: str, unlike: bool = False) -> RuntimeError:
        older = max((x for x in self.steps() if x < step), default=None)
        hint = f"To restore step {older}, pass step={older} or move the folder {step} elsewhere."
        if older is None:
            hint = "No older step exists: restart the run, or restore the directory from a copy."
        if unlike:
            hint = f"Pass a target of the saved classes. If they match, files are damaged. {hint}"
        failure = f"step {step} in {self._path} {'cannot be read' if unlike else 'is damaged'}"
        return RuntimeError(f"Checkpointer: {failure}: {what}. Nothing was deleted. {hint}")


class _Manager(ocp.CheckpointManager):
    """An orbax manager that does not query JAX's preemption sync point.

    orbax's manager asks JAX at the start and end of every save whether a SIGTERM has arrived. Each
    query sets a step counter. By this counter, the processes agree on the step at which to stop. A
    query from a save in the background would set the counter back, and the processes would stop
    after different steps. The training loop itself makes one query per step.
    """

    def reached_preemption(self, step: int) -> bool:
        """Return False without a query."""
        return False


def _arrays() -> Any:
    """Return a handler of arrays that waits for all reads before it raises an error.

    orbax closes its event loop after the first failed read. The remaining reads would then warn of
    coroutines that were never awaited, and would raise errors in TensorStore's threads.
    """
    handler: Any = copy.copy(ocp.type_handlers.get_type_handler(jax.Array))
    read = handler.deserialize

    async def deserialize(*args: Any) -> PyTree:
        others = asyncio.all_tasks()
        try:
            return await read(*args)
        except Exception:
            await asyncio.gather(*asyncio.all_tasks() - others, return_exceptions=True)
            raise

    handler.deserialize = deserialize
    return ocp.type_handlers.create_type_handler_registry((jax.Array, handler))


def _named(state: PyTree) -> dict[str, jax.Array]:
    leaves = dict(trees.named(state))
    # orbax writes a leaf under the leaf's path, joined by dots.
    is_valid = len({name.replace("/", ".") for name in leaves}) == len(jax.tree.leaves(state))
    allowed = "a tree whose paths differ when joined by dots"
    hint = "Rename the keys that contain dots or slashes."
    checks.require(is_valid, _WHO, "state", sorted(leaves)[:4], allowed, hint)
    return leaves


def _require_arrays(what: str, tree: PyTree, is_array: Callable[..., bool]) -> dict[str, jax.Array]:
    """Return the leaves by name, and refuse a tree that orbax cannot restore.

    Objects of NNX are refused, because orbax can write their nodes but cannot read them. Leaves
    that are not arrays, such as the int ``step`` of Flax's ``TrainState``, are also refused.
    """
    nnx_object: Any = getattr(sys.modules.get("flax.nnx"), "Pytree", ())
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx_object))
    objects = (x for x in nodes if isinstance(x, nnx_object))
    got = next((f"an NNX object, {type(x).__name__}" for x in objects), "")
    hint = "Save nnx.as_pure((nnx.state(model), optimizer.opt_state))."
    checks.require_type(not got, _WHO, what, got, "a tree of arrays", hint)
    leaves = _named(tree)
    hint = "Convert a number with jnp.asarray. On a mesh, place the array with jax.device_put. "
    hint += "For a module with functions, save eqx.filter(state, eqx.is_array)."
    for name, leaf in leaves.items():
        got = f"{type(leaf).__name__} at {name}"
        checks.require_type(is_array(leaf), _WHO, what, got, "a tree of JAX arrays", hint)
    return leaves


def _unlike(record: Json, parts: list[str], leaves: dict[str, jax.Array]) -> str:
    """Describe how parts and leaves of a target differ from a record; "" if nothing differs."""
    was = {name: f"{x['dtype']}{x['shape']}" for name, x in record["leaves"].items()}
    now = {name: f"{x.dtype}{list(x.shape)}" for name, x in leaves.items()}
    named = {field for name in was.keys() - now.keys() for field in name.split("/")}
    saved = record.get("parts", [part for field, part in _FIELDS.items() if field in named])
    by = ", ".join(map(" ".join, record.get("versions", {"boostax": "0.2 or before"}).items()))
    if saved != parts and (saved or "parts" in record):
        texts = {x: checks.replacement(f"boostax.{x}") or "" for x in saved if x not in parts}
        gone = " ".join(f"{name}: {text}" for name, text in texts.items() if "was removed" in text)
        hint = gone or "Restore into a state of the saved chain, then call boostax.migrate_state."
        both = [", ".join(x) or "no part" for x in (saved, parts)]
        return f"saved by {by} with {both[0]}, got {both[1]}. {hint}"
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    lines = [f"{x!r} was {was.get(x, 'not saved')}, got {now.get(x, 'none')}" for x in names[:4]]
    hint = "Use the saved chain and model; for another number of replicas, pass reshard=True."
    data = checks.table("boostax.config", "migrate")
    hint = data["saved"] if named & data["renamed"].keys() else hint
    plain = [{name.replace("/local/", "/") for name in tree} for tree in (was, now)]
    if plain[0] == plain[1] and was.keys() != now.keys():
        hint = (
            "The saved state or the target is on a mesh, but not both. Restore into a state like "
        )
        hint += "the saved state, or with reshard=True on a mesh of one device. Then call "
        hint += "boostax.migrate_state(state.opt_state, tx, params)."
    return f"{'; '.join(lines)}. The step was saved by {by}. {hint}" if names else ""


def _first_line(error: BaseException) -> str:
    text = str(error).split("[tensorstore_spec=")[0].split(". See full TensorStore")[0]
    return f"{type(error).__name__}: {' '.join(text.split())[:300]}"


def _described(leaves: dict[str, jax.Array]) -> dict[str, Json]:
    """Return shape, dtype and checksum of each leaf; the leaf's devices compute the checksum."""
    sums = jax.device_get(_checksums(leaves))
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "checksum": int(sums[name])}
        for name, leaf in leaves.items()
    }


@jax.jit
def _checksums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return for each leaf a weighted sum of its 32-bit words, mod 2**32.

    If one word is altered, the sum changes.
    """
    sums: dict[str, jax.Array] = {}
    for name, leaf in leaves.items():
        parts = (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
        words = [jnp.sum(copies.weighted(copies.words(x)), dtype=jnp.uint32) for x in parts]
        sums[name] = words[0] + 3 * words[1] if len(words) == 2 else words[0]
    return sums


def _text_checksum(record: Json) -> int:
    """Return the checksum of a JSON record."""
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _require_equal(who: str, state: PyTree) -> None:
    """Refuse arrays whose copies differ between the devices of a mesh.

    Cost: one read of the state on its devices. Each device sends 8 bytes.
    """
    meshes: dict[Any, dict[str, jax.Array]] = {}
    for name, x in trees.named(state):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
            # Arrays in host memory are not compared.
            default = next(iter(sharding.device_set)).default_memory().kind
            if sharding.memory_kind in (None, default):
                meshes.setdefault(sharding.mesh, {})[name] = x
    hint = "These copies differ from copies on other devices. Restore a checkpoint. If replicas "
    hint += "differ on purpose, store arrays in a boostax.PerReplica with states.state_specs."
    for mesh, arrays in meshes.items():
        specs = tuple(cast(NamedSharding, x.sharding).spec for x in arrays.values())
        compared = _jitted(mesh, specs)([*arrays.values()], jnp.asarray(True))
        culprits = zip(arrays, np.asarray(compared.culprits), strict=True)
        devices = [f"{name!r} on {mesh.devices.flat[i]}" for name, i in culprits if i >= 0]
        allowed = "the same on all devices that have a copy"
        checks.require(not devices, who, "state", ", ".join(devices[:6]), allowed, hint)


_jitted = functools.cache(
    lambda mesh, specs: jax.jit(copies.on_mesh(mesh, tuple(mesh.axis_names), specs))
)
