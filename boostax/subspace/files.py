# SPDX-License-Identifier: Apache-2.0
"""Read and write arrays by name: NumPy's ``.npz`` and the checkpoints of orbax.

Nothing is pickled, and nothing is executed.
"""

import os
import pathlib
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import checks, trees
from boostax._core.groups import natural
from boostax._core.types import PyTree

Path = str | pathlib.Path
_WHO = "dim_reduce"


def by_name(who: str, tree: PyTree) -> dict[str, PyTree]:
    """Return the leaves of a tree by the names of their paths, such as ``layer/kernel``."""
    names = trees.names(tree)
    shared = [x for x in names if names.count(x) > 1]
    hint = "A file contains one array for each path."
    checks.require(not shared, who, "params", shared, "leaves with different paths", hint)
    return dict(trees.named(tree))


def write(who: str, path: Path, arrays: PyTree) -> None:
    """Write arrays to a ``.npz`` file, which appears only when it is complete."""
    target = pathlib.Path(path)
    if target.suffix != ".npz":
        hint = "Add the suffix .npz to the path."
        raise ValueError(checks.message(who, "path", "a .npz file", str(path), hint))
    host = {name: np.asarray(x) for name, x in arrays.items()}
    for name, x in host.items():
        # NumPy writes foreign dtypes as raw bytes; ``read`` recognises only those of bfloat16.
        if x.dtype.isbuiltin != 1 and x.dtype != jnp.bfloat16:
            allowed = "of NumPy's dtypes or bfloat16"
            hint = "Compute the basis with another dtype=."
            raise TypeError(checks.message(who, "path", allowed, f"{x.dtype} at {name!r}", hint))
    unfinished = target.with_name(f"{target.name}.tmp")
    with unfinished.open("wb") as file:
        np.savez(file, **host)  # pyright: ignore[reportArgumentType]
    os.replace(unfinished, target)


def read(who: str, path: Path, suffix: str, names: Collection[str] | None = None) -> PyTree:
    """Return the arrays in a file by name, or with ``names`` only the arrays of these names.

    For an ``.npy`` file, return the only array.

    Raises:
      FileNotFoundError, ValueError: no such file, another suffix, or a broken file.
    """
    # NumPy does not close the file after an error.
    with pathlib.Path(path).open("rb") as raw:
        try:
            file = np.load(raw, allow_pickle=False)
            if suffix == ".npy":
                return file
            arrays = {x: file[x] for x in file.files if names is None or x in names}
        # zipfile, zlib and NumPy raise errors of many kinds for a broken file.
        except Exception as error:
            allowed = f"a whole {suffix} file"
            hint = f"{error}."
            raise ValueError(checks.message(who, "path", allowed, str(path), hint)) from error
    # NumPy writes bfloat16 as two raw bytes.
    return {name: x.view("bfloat16") if x.dtype == "V2" else x for name, x in arrays.items()}


def tree_like(who: str, path: Path, like: PyTree, arrays: PyTree) -> PyTree:
    """Return the arrays as a tree with the shapes of ``like``; complex arrays stay complex."""
    specs = by_name(who, like)
    for name, spec in specs.items():
        _require_like(who, path, name, spec, arrays)
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in specs])


def _require_like(who: str, path: Path, name: str, spec: PyTree, arrays: PyTree) -> None:
    defect = "which is not there"
    if name in arrays:
        x = arrays[name]
        shape, dtype = np.shape(spec), spec.dtype
        kinds = (jnp.inexact, jnp.complexfloating)
        same = all(jnp.issubdtype(x.dtype, k) == jnp.issubdtype(dtype, k) for k in kinds)
        if same and tuple(x.shape) == shape:
            return
        defect = f"which is {x.dtype} of {x.shape} in the file, but should be {dtype} of {shape}"
    hint = "Names are paths in the params, such as 'layer/kernel'."
    raise ValueError(checks.message(who, "params", f"those of {path}", f"{name!r}, {defect}", hint))


def snapshots(directory: Path, params: PyTree) -> list[PyTree]:
    """Read the params of every checkpoint in a directory, in the order of the steps.

    Leaves are found by their names, so the order of files in the directory, or of arrays in a
    checkpoint, does not matter.

    Args:
      directory: directory of a ``Checkpointer``, with one subdirectory for each step, named by the
        number of the step. Or a folder with one ``.npz`` file per step, in the order of the numbers
        in the files' names. Each file has an array for each path in the params, such as
        ``layer/kernel``. Other arrays and files are ignored.
      params: a tree of arrays or shapes, for names, shapes and dtypes.

    Returns:
      A list of trees of NumPy arrays. Cost: the params of these steps, on the host; no other part
      of a checkpoint is read.

    Raises:
      ValueError: params that differ from the saved params. FileNotFoundError: the directory has no
        steps. ImportError: orbax is not installed.
    """
    folder = pathlib.Path(directory).absolute()
    # The natural order has step_9 before step_10.
    paths = sorted(folder.glob("*"), key=lambda path: natural(path.name))
    archives = [x for x in paths if x.suffix == ".npz"]
    steps = [x for x in paths if x.name.isdecimal()]
    is_valid = bool(archives) != bool(steps)
    got = f"{'both' if steps else 'none'} in {folder}"
    allowed = "a folder of .npz files, or a folder with a subdirectory for each step"
    hint = "pca_basis also accepts a list of trees, such as results of safetensors.numpy.load_file."
    error = ValueError if steps else FileNotFoundError
    checks.require(is_valid, _WHO, "directory", got=got, allowed=allowed, hint=hint, error=error)
    if steps:
        return [_checkpoint(params, x) for x in steps]
    names = by_name(_WHO, params)
    return [tree_like(_WHO, x, params, read(_WHO, x, ".npz", names)) for x in archives]


def _checkpoint(params: PyTree, step: pathlib.Path) -> PyTree:
    with checks.needing(_WHO, "orbax", "checkpoint"):
        import orbax.checkpoint as ocp
    # Orbax saves no empty arrays.
    like = jax.tree.map(lambda x: np.zeros(np.shape(x), x.dtype) if np.size(x) else None, params)
    item = {"params": like}
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    handler: Any = ocp.PyTreeCheckpointHandler()
    path = step / "state"
    metadata = dict(trees.named(handler.metadata(path).tree))
    # Orbax would restore missing arrays as zeros.
    for name, leaf in trees.named(item):
        _require_like(_WHO, path, name, leaf, metadata)
    args = ocp.args.PyTreeRestore(item, restore_args, partial_restore=True)
    saved = handler.restore(path, args=args)["params"]
    return jax.tree.map(
        lambda p, x: np.zeros(np.shape(p), p.dtype) if x is None else np.asarray(x), params, saved
    )
