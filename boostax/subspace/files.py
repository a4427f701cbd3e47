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
from boostax._core.types import PyTree

Path = str | pathlib.Path
_WHO = "dim_reduce"


def named(who: str, tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by the names of their paths, ``layer/kernel``."""
    names, found = trees.names(tree), dict(trees.named(tree))
    twice, hint = [x for x in names if names.count(x) > 1], "A file holds one array for each."
    checks.require(not twice, who, "params", got=twice, allowed="of different paths", hint=hint)
    return found


def write(who: str, path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to a ``.npz`` file, which appears only when it is complete."""
    target = pathlib.Path(path)
    fits, hint = target.suffix == ".npz", "It has that suffix."
    checks.require(fits, who, "path", got=str(path), allowed="a .npz file", hint=hint)
    host = {name: np.asarray(x) for name, x in arrays.items()}
    for name, x in host.items():
        # NumPy writes foreign dtypes as raw bytes; ``read`` recognises bfloat16.
        holds, got = x.dtype.isbuiltin == 1 or x.dtype == jnp.bfloat16, f"{x.dtype} at {name!r}"
        allowed, hint = "of NumPy's dtypes or bfloat16", "Give the basis another dtype=."
        checks.require_type(holds, who, "path", got=got, allowed=allowed, hint=hint)
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
    with pathlib.Path(path).open("rb") as raw:
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


def snapshots(directory: Path, params: PyTree) -> list[PyTree]:
    """Read the params of every checkpoint in a directory, in the order of the steps.

    Leaves are found by their names, so the order of files in the directory, or of arrays in a
    checkpoint, does not matter.

    Args:
      directory: directory of a ``Checkpointer``, with one subdirectory for each step, named by its
        number. Or a folder of ``.npz`` files, one file per step, in the order of the numbers in the
        files' names, with an array for each path in the params, ``layer/kernel``; other arrays and
        files are ignored.
      params: a tree of arrays or shapes, for names, shapes and dtypes.

    Returns:
      A list of trees of NumPy arrays. Cost: the params of these steps, on the host; no other part
      of a checkpoint is read.

    Raises:
      ValueError: params that differ from the saved params. FileNotFoundError: the directory has no
        steps. ImportError: orbax is not installed.
    """
    folder = pathlib.Path(directory).absolute()
    # This sorts step_9 before step_10.
    there = sorted(folder.glob("*"), key=lambda path: natural(path.name))
    written = [x for x in there if x.suffix == ".npz"]
    steps = [x for x in there if x.name.isdecimal()]
    got, fits = f"{'both' if steps else 'none'} in {folder}", bool(written) != bool(steps)
    allowed = "a folder of .npz files, or of a subdirectory for each step"
    hint = "pca_basis takes a list of trees of arrays, as safetensors.numpy.load_file gives them."
    error = ValueError if steps else FileNotFoundError
    checks.require(fits, _WHO, "directory", got=got, allowed=allowed, hint=hint, error=error)
    if steps:
        return [_checkpoint(params, x) for x in steps]
    names = named(_WHO, params)
    return [chosen(_WHO, x, params, read(_WHO, x, ".npz", names)) for x in written]


def _checkpoint(params: PyTree, step: pathlib.Path) -> PyTree:
    with checks.needing(_WHO, "orbax", "checkpoint"):
        import orbax.checkpoint as ocp
    # Orbax saves no empty arrays.
    like = jax.tree.map(lambda x: np.zeros(np.shape(x), x.dtype) if np.size(x) else None, params)
    wanted = {"params": like}
    kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
    handler: Any = ocp.PyTreeCheckpointHandler()
    path = step / "state"
    saved = dict(trees.named(handler.metadata(path).tree))
    # Orbax would restore missing arrays as zeros.
    for name, leaf in trees.named(wanted):
        _require(_WHO, path, name, leaf, saved)
    args = ocp.args.PyTreeRestore(wanted, kinds, partial_restore=True)
    restored = handler.restore(path, args=args)["params"]
    filled = lambda p, x: np.zeros(np.shape(p), p.dtype) if x is None else np.asarray(x)  # noqa: E731
    return jax.tree.map(filled, params, restored)
