# SPDX-License-Identifier: Apache-2.0
"""Read and write arrays by name: ``.npz``, safetensors and the checkpoints of orbax.

A safetensors file is eight bytes (the length of what follows, little-endian), a JSON object of
``{name: {"dtype", "shape", "data_offsets"}}``, and the bytes of the arrays, without gaps:
https://github.com/huggingface/safetensors#format. Nothing is pickled, and nothing is executed.
"""

import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import checks, trees

PyTree = Any
Path = str | pathlib.Path
Array = np.ndarray[Any, Any]
_NAMES = {
    **{f"F{8 * size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"I{8 * size}": f"int{8 * size}" for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": f"uint{8 * size}" for size in (1, 2, 4, 8)},
    **{"BOOL": "bool", "BF16": "bfloat16", "C64": "complex64"},
}
_CODES = {name: code for code, name in _NAMES.items()}


def named(who: str, tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by the names of their paths, ``layer/kernel``."""
    names, found = trees.names(tree), dict(trees.named(tree))
    twice, hint = [name for name in names if names.count(name) > 1], "A file holds one for each."
    checks.require(who, "params", twice, "of different paths", not twice, hint)
    return found


def write(who: str, path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to a ``.npz`` or ``.safetensors`` file, which is there only once it is whole."""
    target = _known(who, path, (".npz", ".safetensors"))
    host = {name: np.ascontiguousarray(x).reshape(np.shape(x)) for name, x in arrays.items()}
    bare = target.suffix == ".npz"
    for name, x in host.items():
        # NumPy writes what is not its own, but for two bytes, without a meaning.
        holds = x.dtype.name in _CODES or (bare and x.dtype.kind != "V")
        got, hint = f"{x.dtype} at {name!r}", "A basis of another dtype= is one."
        allowed = f"of {', '.join(_CODES)}" + (" or another of NumPy's" if bare else "")
        checks.require(who, "path", got, allowed, holds, hint, TypeError)
    unfinished = target.with_name(f"{target.name}.tmp")
    with unfinished.open("wb") as file:
        if bare:
            np.savez(file, **host)  # pyright: ignore[reportArgumentType]
        else:
            header = _header(host)
            file.write(len(header).to_bytes(8, "little") + header)
            file.writelines(x.tobytes() for x in host.values())
    os.replace(unfinished, target)


def read(who: str, path: Path, wanted: Collection[str] | None = None) -> Any:
    """Return the arrays in a file by their names: all, or those of the ``wanted`` that are there.

    Of an ``.npy`` it returns the one array, left on disk until it is looked at.

    Raises:
      FileNotFoundError, ValueError: no such file, or none of these formats.
    """
    source = _known(who, path, tuple(_READERS))
    try:
        return _READERS[source.suffix](source, wanted)
    except FileNotFoundError as error:
        allowed, hint = "that of a file", "A relative one starts from the working directory."
        raise FileNotFoundError(checks.message(who, "path", allowed, str(path), hint)) from error
    # For a broken file zipfile, zlib, json and NumPy raise errors of many kinds.
    except Exception as error:
        allowed = f"a whole {source.suffix} file"
        raise ValueError(checks.message(who, "path", allowed, str(path), f"{error}.")) from error


def required(
    who: str, path: Path, name: str, like: Any, found: Mapping[str, Any], lead: tuple[int, ...] = ()
) -> Any:
    """Return the array of a name, if it has a shape and is real or complex as ``like`` is."""
    shape, dtype, kinds = (*lead, *np.shape(like)), like.dtype, (jnp.inexact, jnp.complexfloating)
    if name not in found:
        there = "which is not there"
    else:
        x, alike = found[name], jnp.issubdtype
        if tuple(x.shape) == shape and all(alike(x.dtype, k) == alike(dtype, k) for k in kinds):
            return x
        there = f"which should be of {shape} like {dtype}, and is {x.dtype} of {x.shape} there"
    raise ValueError(
        f"{who}: params must be those of {path}, got {name!r}, {there}. Names are paths in the "
        "params, such as 'layer/kernel'."
    )


def _known(who: str, path: Path, suffixes: tuple[str, ...]) -> pathlib.Path:
    found, hint = pathlib.Path(path), "The suffix is the format."
    allowed = f"a file of {' or '.join(suffixes)}"
    checks.require(who, "path", str(path), allowed, found.suffix in suffixes, hint)
    return found


def _npz(path: pathlib.Path, wanted: Collection[str] | None) -> dict[str, Array]:
    # NumPy leaves a file open that it has opened and cannot read.
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        found = {x: file[x] for x in file.files if wanted is None or x in wanted}
    # NumPy writes bfloat16 as two bytes without a meaning.
    return {name: x.view("bfloat16") if x.dtype == "V2" else x for name, x in found.items()}


def _header(arrays: Mapping[str, Array]) -> bytes:
    entries: dict[str, Any] = {}
    end = 0
    for name, x in arrays.items():
        where = [end, end := end + x.nbytes]
        code = _CODES[x.dtype.name]
        entries[name] = {"dtype": code, "shape": list(x.shape), "data_offsets": where}
    text = json.dumps(entries).encode()
    # The arrays begin at a multiple of eight.
    return text + b" " * (-len(text) % 8)


def _safetensors(path: pathlib.Path, wanted: Collection[str] | None) -> dict[str, Array]:
    size, found = path.stat().st_size, dict[str, Array]()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            raise ValueError(f"its header should have {length} bytes")
        header = json.loads(file.read(length))
        for name, about in header.items():
            if name == "__metadata__" or (wanted is not None and name not in wanted):
                continue
            dtype, shape = jnp.dtype(_NAMES[about["dtype"]]), tuple(about["shape"])
            start, end = about["data_offsets"]
            fits = end - start == math.prod(shape) * dtype.itemsize
            if not (fits and 0 <= start <= end <= size - 8 - length):
                raise ValueError(f"{name!r} does not lie in it")
            file.seek(8 + length + start)
            found[name] = np.frombuffer(file.read(end - start), dtype).reshape(shape)
    return found


_READERS: dict[str, Callable[..., Any]] = {
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".npy": lambda path, wanted: np.load(path, mmap_mode="r", allow_pickle=False),
}


class Snapshots(Sequence[PyTree]):
    """Reads trees of NumPy arrays from disk when they are asked for, and keeps none.

    Args:
      paths: where each of them lies.
      read: what reads one.
    """

    def __init__(self, paths: Sequence[pathlib.Path], read: Callable[[pathlib.Path], PyTree]):
        self._paths, self._read = paths, read

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: Any) -> Any:
        """Read one, or return a slice of them."""
        chosen = self._paths[index]
        return Snapshots(chosen, self._read) if isinstance(index, slice) else self._read(chosen)


def checkpoint_snapshots(
    directory: Path,
    params: PyTree,
    *,
    last: int | None = None,
    item: str | None = "state",
    inside: str | None = "params",
) -> Snapshots:
    """Read the params of every checkpoint in a directory, in the order of the steps.

    ``pca_basis`` takes the result. Leaves are found by their names, so the order in which files lie
    there, or in which a checkpoint lists its arrays, does not matter.

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
    written = sorted((x for x in there if x.suffix in (".npz", ".safetensors")), key=_numbered)
    steps = sorted((x for x in there if x.name.isdecimal()), key=_numbered)
    if bool(written) == bool(steps):
        allowed = "a folder of .npz or .safetensors files, or of a subdirectory for each step"
        got = f"{'both' if steps else 'none'} in {folder}"
        raise (ValueError if steps else FileNotFoundError)(
            f"{who}: directory must be {allowed}, got {got}. A Checkpointer was given the latter."
        )
    if written:
        one = functools.partial(_file, who, params)
    else:
        one = functools.partial(_checkpoint, who, params, item, inside)
    return Snapshots((written or steps)[-(last or 0) :], one)


def _numbered(path: pathlib.Path) -> list[Any]:
    """Sort ``step_9`` before ``step_10``."""
    return [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", path.name)]


def _file(who: str, params: PyTree, path: pathlib.Path) -> PyTree:
    names = named(who, params)
    found = read(who, path, names)
    leaves = [required(who, path, name, x, found) for name, x in names.items()]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


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
        raise ValueError(
            f"{who}: item must be the part of a checkpoint that holds the params, got {item!r}, "
            f"not there in {step}. None takes the checkpoint itself."
        ) from error
    # Orbax would give zeros for what is not there.
    for name, leaf in trees.named(wanted):
        required(who, path, name, leaf, saved)
    restored = handler.restore(
        path, args=ocp.args.PyTreeRestore(wanted, kinds, partial_restore=True)
    )
    tree = restored if inside is None else restored[inside]
    filled = lambda p, x: np.zeros(np.shape(p), p.dtype) if x is None else np.asarray(x)  # noqa: E731
    return jax.tree.map(filled, params, tree)
