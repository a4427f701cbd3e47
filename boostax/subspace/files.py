# SPDX-License-Identifier: Apache-2.0
"""Read and write arrays by name: NumPy's ``.npz`` and the checkpoints of orbax.

Nothing is pickled, and nothing is executed.
"""

import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import checks, trees
from boostax._core.groups import natural

PyTree = Any
Path = str | pathlib.Path


def named(who: str, tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by the names of their paths, ``layer/kernel``."""
    names, found = trees.names(tree), dict(trees.named(tree))
    twice, hint = [x for x in names if names.count(x) > 1], "A file holds one array for each."
    checks.require(who, "params", twice, "of different paths", not twice, hint)
    return found


def write(who: str, path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to a ``.npz`` file, which appears only when it is complete."""
    target = _known(who, path, ".npz")
    host = {name: np.asarray(x) for name, x in arrays.items()}
    for name, x in host.items():
        # NumPy writes foreign dtypes as raw bytes; ``read`` recognises bfloat16.
        holds, got = x.dtype.isbuiltin == 1 or x.dtype == jnp.bfloat16, f"{x.dtype} at {name!r}"
        allowed, hint = "of NumPy's dtypes or bfloat16", "Give the basis another dtype=."
        checks.require(who, "path", got, allowed, holds, hint, TypeError)
    unfinished = target.with_name(f"{target.name}.tmp")
    with unfinished.open("wb") as file:
        np.savez(file, **host)  # pyright: ignore[reportArgumentType]
    os.replace(unfinished, target)


def read(who: str, path: Path, suffix: str, wanted: Collection[str] | None = None) -> Any:
    """Return the arrays in a file by name, or only the ``wanted`` arrays.

    For an ``.npy`` file return its only array.

    Raises:
      FileNotFoundError, ValueError: no such file, another suffix, or a broken file.
    """
    # NumPy does not close a file that it cannot read.
    with _known(who, path, suffix).open("rb") as raw:
        try:
            file = np.load(raw, allow_pickle=False)
            if suffix == ".npy":
                return file
            found = {x: file[x] for x in file.files if wanted is None or x in wanted}
        # zipfile, zlib and NumPy raise errors of many kinds for a broken file.
        except Exception as error:
            allowed, hint = f"a whole {suffix} file", f"{error}."
            raise ValueError(checks.message(who, "path", allowed, str(path), hint)) from error
    # NumPy writes bfloat16 as two raw bytes.
    return {name: x.view("bfloat16") if x.dtype == "V2" else x for name, x in found.items()}


def _known(who: str, path: Path, suffix: str) -> pathlib.Path:
    found = pathlib.Path(path)
    allowed, hint = f"a {suffix} file", "It has that suffix."
    checks.require(who, "path", str(path), allowed, found.suffix == suffix, hint)
    return found


def chosen(who: str, path: Path, like: PyTree, found: Mapping[str, Any]) -> PyTree:
    """Return the arrays in a tree of the shapes of ``like``; complex arrays stay complex."""
    names = named(who, like)
    for name, x in names.items():
        _require(who, path, name, x, found)
    return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in names])


def _require(who: str, path: Path, name: str, like: Any, found: Mapping[str, Any]) -> None:
    shape, dtype, kinds = np.shape(like), like.dtype, (jnp.inexact, jnp.complexfloating)
    there = "which is not there"
    if name in found:
        x, alike = found[name], jnp.issubdtype
        if tuple(x.shape) == shape and all(alike(x.dtype, k) == alike(dtype, k) for k in kinds):
            return
        there = f"which should be of {shape} like {dtype}, and is {x.dtype} of {x.shape} there"
    got, hint = f"{name!r}, {there}", "Names are paths in the params, such as 'layer/kernel'."
    raise ValueError(checks.message(who, "params", f"those of {path}", got, hint))


def checkpoint_snapshots(
    directory: Path,
    params: PyTree,
    *,
    last: int | None = None,
    item: str | None = "state",
    inside: str | None = "params",
) -> list[PyTree]:
    """Read the params of every checkpoint in a directory, in the order of the steps.

    ``pca_basis`` takes the result. Leaves are found by their names, so the order of files in the
    directory, or of arrays in a checkpoint, does not matter.

    Args:
      directory: directory of a ``Checkpointer`` or of any orbax ``CheckpointManager``, with one
        subdirectory for each step, named by its number. Or a folder of ``.npz`` files, one file per
        step, in the order of the numbers in the files' names, with an array for each path in the
        params, ``layer/kernel``; other arrays and files are ignored.
      params: a tree of arrays or shapes, for names, shapes and dtypes.
      last: number of the latest steps to read; ``None`` for all steps.
      item: orbax item with the params, in subdirectories; ``None`` if a step has no items.
      inside: key of the params in that item; ``None`` if the item has only the params.

    Returns:
      A list of trees of NumPy arrays. Cost: the params of these steps, on the host; no other part
      of a checkpoint is read.

    Raises:
      ValueError, TypeError: ``last`` out of range, or params that differ from the saved params.
      FileNotFoundError: the directory has no steps.
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
        checks.positive_int(who, "last", last, "None reads all of them.")
    folder = pathlib.Path(directory).absolute()
    # This sorts step_9 before step_10.
    there = sorted(folder.glob("*"), key=lambda path: natural(path.name))
    written = [x for x in there if x.suffix == ".npz"]
    steps = [x for x in there if x.name.isdecimal()]
    got, fits = f"{'both' if steps else 'none'} in {folder}", bool(written) != bool(steps)
    allowed = "a folder of .npz files, or of a subdirectory for each step"
    hint = "pca_basis takes a list of trees of arrays, as safetensors.numpy.load_file gives them."
    error = ValueError if steps else FileNotFoundError
    checks.require(who, "directory", got, allowed, fits, hint, error)
    if steps:
        return [_checkpoint(who, params, item, inside, x) for x in steps[-(last or 0) :]]
    names = named(who, params)
    files = written[-(last or 0) :]
    return [chosen(who, x, params, read(who, x, ".npz", names)) for x in files]


def _checkpoint(
    who: str, params: PyTree, item: str | None, inside: str | None, step: pathlib.Path
) -> PyTree:
    with checks.needing(who, "orbax", "checkpoint"):
        import orbax.checkpoint as ocp
    # Orbax saves no empty arrays.
    like = jax.tree.map(lambda x: np.zeros(np.shape(x), x.dtype) if np.size(x) else None, params)
    wanted = like if inside is None else {inside: like}
    kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
    handler: Any = ocp.PyTreeCheckpointHandler()
    path = step if item is None else step / item
    try:
        saved = dict(trees.named(handler.metadata(path).tree))
    except (ValueError, FileNotFoundError) as error:
        allowed = "the part of a checkpoint that holds the params"
        hint = f"{step} does not have it; None takes the checkpoint itself."
        raise ValueError(checks.message(who, "item", allowed, item, hint)) from error
    # Orbax would restore missing arrays as zeros.
    for name, leaf in trees.named(wanted):
        _require(who, path, name, leaf, saved)
    args = ocp.args.PyTreeRestore(wanted, kinds, partial_restore=True)
    restored = handler.restore(path, args=args)
    tree = restored if inside is None else restored[inside]
    filled = lambda p, x: np.zeros(np.shape(p), p.dtype) if x is None else np.asarray(x)  # noqa: E731
    return jax.tree.map(filled, params, tree)
