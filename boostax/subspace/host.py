# SPDX-License-Identifier: Apache-2.0
"""Snapshots that do not live on the device: kept in host memory, or read from checkpoints."""

import functools
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import numpy as np

from boostax._core import checks, trees
from boostax.subspace import files
from boostax.subspace.basis import Basis, pca_basis
from boostax.subspace.trajectory import recorded_dtype

PyTree = Any


class HostTrajectory:
    """The last ``size`` snapshots of the params in host memory, for a loop of one's own.

    What ``record_trajectory`` keeps on the device, where a few dozen copies of the params may not
    fit. It is no transformation: call ``record`` between steps.

    Args:
      size: snapshots kept, at least two.
      every: calls from one to the next.
      start: calls before the first one.
      dtype: in which they are stored; f64 and complex leaves keep their kind.

    Raises:
      ValueError, TypeError: an argument out of range.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> path = boostax.subspace.HostTrajectory(3)
      >>> for call in range(5):
      ...   _ = path.record(call, {"w": jnp.array([3.0 * call, 4.0 * call])})
      >>> path.snapshots()["w"][:, 0].tolist()
      [6.0, 9.0, 12.0]
      >>> path.basis(1).components["w"].round(3).tolist()
      [[0.6000000238418579, 0.800000011920929]]

    **Cost**: at a snapshot one copy of the params from the device; ``basis`` moves the snapshots of
    one leaf at a time there.
    """

    def __init__(self, size: int, *, every: int = 1, start: int = 0, dtype: Any = "float32"):
        self._dtype = recorded_dtype("HostTrajectory", size, every, start, dtype)
        self._size, self._every, self._start = size, every, start
        self._kept: list[PyTree] = []

    def record(self, call: int, params: PyTree) -> bool:
        """Keep the params if a snapshot is due at this call, counted from 0; says whether."""
        since = call - self._start
        if since < 0 or since % self._every:
            return False

        def copy(leaf: Any) -> Any:
            return np.array(leaf, trees.buffer_dtype(leaf, self._dtype))

        self._kept = [*self._kept, jax.tree.map(copy, params)][-self._size :]
        return True

    def snapshots(self) -> PyTree:
        """A tree like the params of NumPy arrays ``(count, *leaf.shape)``, the oldest first."""
        if not self._kept:
            raise ValueError(
                "HostTrajectory: record must have kept a snapshot, got none. Call it after steps, "
                "from start on."
            )
        return jax.tree.map(lambda *each: np.stack(each), *self._kept)

    def basis(self, n_components: int, *, dtype: Any = None) -> Basis:
        """``boostax.subspace.pca_basis`` of the snapshots."""
        return pca_basis(self.snapshots(), n_components, dtype=dtype, stacked=True)


class Snapshots(Sequence[PyTree]):
    """Trees of NumPy arrays that are read from disk when they are asked for, and not kept.

    Args:
      paths: where each of them lies.
      read: what reads one.
    """

    def __init__(self, paths: Sequence[pathlib.Path], read: Callable[[pathlib.Path], PyTree]):
        self._paths, self._one = paths, read

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, index: int) -> PyTree: ...
    @overload
    def __getitem__(self, index: slice) -> "Snapshots": ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Snapshots(self._paths[index], self._one)
        return self._one(self._paths[index])


def checkpoint_snapshots(
    directory: str | pathlib.Path,
    params: PyTree,
    *,
    last: int | None = None,
    item: str | None = "state",
    inside: str | None = "params",
) -> Snapshots:
    """The params of every checkpoint in a directory, in the order of the steps, for ``pca_basis``.

    Leaves are found by their names, so the order in which files lie there, or in which a checkpoint
    lists its arrays, does not matter.

    Args:
      directory: of a ``Checkpointer`` or of any orbax ``CheckpointManager``: one subdirectory for
        each step, named by its number. Or a folder of ``.npz`` or ``.safetensors`` files, one for
        each step, in the order of the numbers in their names, with an array for each path in the
        params, ``layer/kernel``; other arrays and files there are left alone.
      params: a tree of arrays or shapes, for names, shapes and dtypes.
      last: how many of the latest steps; ``None`` for all.
      item: of subdirectories: the orbax item that holds them; ``None`` if a step has no items.
      inside: of subdirectories: the key under which they lie in it; ``None`` if it is nothing else.

    Returns:
      A ``Sequence`` of trees of NumPy arrays, which reads one when it is asked for it and keeps
      none; nothing else of a checkpoint is read. Cost: none before.

    Raises:
      ValueError, TypeError: ``last`` out of range, or params that are not what was saved.
      FileNotFoundError: no steps there.
      ImportError: orbax is not installed.

    Example:
      >>> import boostax, jax.numpy as jnp, tempfile
      >>> from boostax.checkpoint import Checkpointer
      >>> folder = tempfile.mkdtemp()
      >>> with Checkpointer(folder) as checkpointer:
      ...   for step in range(3):
      ...     checkpointer.save(step, {"params": jnp.array([3.0 * step, 4.0 * step])})
      >>> snapshots = boostax.subspace.checkpoint_snapshots(folder, jnp.zeros(2))
      >>> basis = boostax.subspace.pca_basis(snapshots, 1)
      >>> basis.components.round(3).tolist()
      [[0.6000000238418579, 0.800000011920929]]
    """
    who = "checkpoint_snapshots"
    if last is not None:
        checks.positive_int(who, "last", last, "None takes all of them.")
    folder = pathlib.Path(directory).absolute()
    there = list(folder.glob("*"))
    written = sorted((path for path in there if path.suffix in files.SUFFIXES), key=_numbered)
    steps = sorted((path for path in there if path.name.isdecimal()), key=lambda x: int(x.name))
    if bool(written) == bool(steps):
        allowed = "a folder of .npz or .safetensors files, or of a subdirectory for each step"
        got = f"{'both' if steps else 'none'} in {folder}"
        raise (ValueError if steps else FileNotFoundError)(
            f"{who}: directory must be {allowed}, got {got}. A Checkpointer was given the latter."
        )
    if written:
        read = functools.partial(_file, who, params)
    else:
        read = functools.partial(_checkpoint, who, params, item, inside)
    return Snapshots((written or steps)[-(last or 0) :], read)


def _numbered(path: pathlib.Path) -> list[Any]:
    """``step_9`` before ``step_10``."""
    return [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", path.name)]


def _file(who: str, params: PyTree, path: pathlib.Path) -> PyTree:
    names, treedef = files.named(who, params), jax.tree.structure(params)
    found = files.read(who, path, names)
    return jax.tree.unflatten(
        treedef,
        [files.required(who, path, name, np.shape(x), x.dtype, found) for name, x in names.items()],
    )


def _checkpoint(
    who: str, params: PyTree, item: str | None, inside: str | None, step: pathlib.Path
) -> PyTree:
    with checks.needing(who, "orbax", "checkpoint"):
        import orbax.checkpoint as ocp
    like = jax.tree.map(lambda x: np.zeros(np.shape(x), x.dtype) if np.size(x) else None, params)
    kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    nest = lambda tree: tree if inside is None else {inside: tree}  # noqa: E731
    wanted = ocp.args.PyTreeRestore(nest(like), nest(kinds), partial_restore=True)
    handler: Any = ocp.PyTreeCheckpointHandler()
    path = step if item is None else step / item
    try:
        saved = handler.metadata(path).tree
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"{who}: item must be the part of a checkpoint that holds the params, got {item!r}, "
            f"not there in {step}. None takes the checkpoint itself."
        ) from error
    # What is not there orbax would give as zeros.
    _require_saved(who, path, nest(like), saved)
    restored = handler.restore(path, args=wanted)
    tree = restored if inside is None else restored[inside]
    return jax.tree.map(_filled, params, tree)


def _filled(param: Any, saved: Any) -> np.ndarray[Any, Any]:
    return np.zeros(np.shape(param), param.dtype) if saved is None else np.asarray(saved)


def _require_saved(who: str, path: pathlib.Path, wanted: PyTree, saved: PyTree) -> None:
    """Refuse params that are not what lies there, by name and shape."""
    found = dict(trees.named(saved))
    for name, leaf in trees.named(wanted):
        got = found.get(name)
        if got is None or tuple(got.shape) != leaf.shape:
            there = "nothing" if got is None else f"the shape {tuple(got.shape)}"
            raise ValueError(
                f"{who}: params must be a tree of what was saved in {path}, got one of the shape "
                f"{leaf.shape} at {name!r}, where there is {there}. Give item= and inside= if they "
                "lie elsewhere."
            )
