# SPDX-License-Identifier: Apache-2.0
"""Arrays by name in a file: NumPy's ``.npz``, and safetensors, which is written and read here.

A safetensors file is eight bytes (the length of what follows, little-endian), a JSON object of
``{name: {"dtype", "shape", "data_offsets"}}``, and the bytes of the arrays, without gaps:
https://github.com/huggingface/safetensors#format. Nothing is pickled, and nothing is executed.
"""

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Generator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from boostax._core import checks, trees

PyTree = Any
Array = np.ndarray[Any, Any]
SUFFIXES = (".npz", ".safetensors")
_NAMES = {
    **{f"F{8 * size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"I{8 * size}": f"int{8 * size}" for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": f"uint{8 * size}" for size in (1, 2, 4, 8)},
    **{"BOOL": "bool", "BF16": "bfloat16", "C64": "complex64"},
}
_DTYPES = {name: jnp.dtype(dtype) for name, dtype in _NAMES.items()}
# In an .npz: the dtypes of arrays that NumPy by itself would read as bytes without a meaning.
_EXTENDED = "__dtypes__"


def named(who: str, tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by the names of their paths, ``layer/kernel``."""
    names, found = trees.names(tree), dict(trees.named(tree))
    if len(found) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        hint = "A file holds one array for each."
        raise ValueError(checks.message(who, "params", "of different paths", twice, hint))
    return found


def write(who: str, path: str | pathlib.Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to a ``.npz`` or ``.safetensors`` file, which is there only once it is whole."""
    target = _known(who, path)
    host = {name: np.ascontiguousarray(x).reshape(np.shape(x)) for name, x in arrays.items()}
    unfinished = target.with_name(f"{target.name}.tmp")
    with unfinished.open("wb") as file:
        if target.suffix == ".npz":
            extended = {name: x.dtype.name for name, x in host.items() if x.dtype.kind == "V"}
            about = {_EXTENDED: np.array(json.dumps(extended))} if extended else {}
            entries: dict[str, Any] = host | about
            np.savez(file, **entries)
        else:
            header = _header(who, host)
            file.write(len(header).to_bytes(8, "little") + header)
            for x in host.values():
                file.write(x.tobytes())
    os.replace(unfinished, target)


def read(who: str, path: str | pathlib.Path, wanted: Mapping[str, Any] | None = None) -> Any:
    """The arrays in a file by their names: all, or those of the ``wanted`` that are there.

    Raises:
      FileNotFoundError, ValueError: no such file, or none of these formats.
    """
    source = _known(who, path)
    with _whole(who, path):
        return (_npz if source.suffix == ".npz" else _safetensors)(source, wanted)


def matrix(who: str, path: str | pathlib.Path) -> Array:
    """What an ``.npy`` file holds, left on disk until it is looked at."""
    with _whole(who, path):
        return np.load(path, mmap_mode="r", allow_pickle=False)


@contextlib.contextmanager
def _whole(who: str, path: str | pathlib.Path) -> Generator[None]:
    """Let what goes wrong while a file is read speak of it."""
    try:
        yield
    except FileNotFoundError as error:
        hint = "A relative one starts from the working directory."
        raise FileNotFoundError(
            checks.message(who, "path", "that of a file", str(path), hint)
        ) from error
    # Of a broken file zipfile, zlib, json and NumPy raise errors of many kinds.
    except Exception as error:
        allowed, hint = f"a whole {pathlib.Path(path).suffix} file", f"{error}."
        raise ValueError(checks.message(who, "path", allowed, str(path), hint)) from error


def _known(who: str, path: str | pathlib.Path) -> pathlib.Path:
    found = pathlib.Path(path)
    if found.suffix not in SUFFIXES:
        allowed, hint = "a file of .npz or .safetensors", "The suffix is the format."
        raise ValueError(checks.message(who, "path", allowed, str(path), hint))
    return found


def _npz(path: pathlib.Path, wanted: Mapping[str, Any] | None) -> dict[str, Array]:
    # NumPy leaves a file open that it has opened and cannot read.
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        extended = json.loads(str(file[_EXTENDED])) if _EXTENDED in file.files else {}
        names = [x for x in file.files if x != _EXTENDED and (wanted is None or x in wanted)]
        return {
            name: file[name].view(jnp.dtype(extended[name])) if name in extended else file[name]
            for name in names
        }


def _header(who: str, arrays: Mapping[str, Array]) -> bytes:
    codes = {dtype: name for name, dtype in _DTYPES.items()}
    entries: dict[str, Any] = {}
    end = 0
    for name, x in arrays.items():
        if x.dtype not in codes:
            allowed, hint = f"of {', '.join(_NAMES.values())}", "An .npz holds it."
            got = f"{x.dtype} at {name!r}"
            raise TypeError(checks.message(who, "path", allowed, got, hint))
        start, end = end, end + x.nbytes
        entries[name] = {
            "dtype": codes[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    # The arrays begin at a multiple of eight.
    return text + b" " * (-len(text) % 8)


def _safetensors(path: pathlib.Path, wanted: Mapping[str, Any] | None) -> dict[str, Array]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            raise ValueError(f"its header should have {length} bytes")
        header = json.loads(file.read(length))
        found: dict[str, Array] = {}
        for name, about in header.items():
            if name == "__metadata__" or (wanted is not None and name not in wanted):
                continue
            dtype, shape = _DTYPES[about["dtype"]], tuple(about["shape"])
            start, end = about["data_offsets"]
            if not 0 <= start <= end <= size - 8 - length or (
                end - start != math.prod(shape) * dtype.itemsize
            ):
                raise ValueError(f"{name!r} does not lie in it")
            file.seek(8 + length + start)
            found[name] = np.frombuffer(file.read(end - start), dtype).reshape(shape)
    return found


def required(
    who: str, path: str | pathlib.Path, name: str, shape: tuple[int, ...], like: Any, found: Any
) -> Array:
    """The array of a name, if it has the shape, and is real or complex as ``like`` is."""
    hint = "Names are paths in the params, such as 'layer/kernel'."
    if name not in found:
        raise ValueError(
            f"{who}: params must be those of {path}, got {name!r}, which is not there. {hint}"
        )
    x, dtype = found[name], jnp.dtype(like)
    if x.dtype == np.dtype(f"V{dtype.itemsize}"):
        # NumPy writes bfloat16 as two bytes without a meaning.
        x = x.view(dtype)
    kinds = (jnp.floating, jnp.complexfloating, jnp.integer, jnp.bool_)
    same = any(jnp.issubdtype(x.dtype, kind) and jnp.issubdtype(dtype, kind) for kind in kinds)
    if x.shape != shape or not same:
        raise ValueError(
            f"{who}: params must be those of {path}, got {name!r}, which should be of {shape} like "
            f"{dtype}, and is {x.dtype} of {x.shape} there. {hint}"
        )
    return x
