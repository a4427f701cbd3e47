# SPDX-License-Identifier: Apache-2.0
"""Machines to compile for without having them, and any program compiled for them.

JAX's compilers run without their devices: ``jax.experimental.topologies`` describes them, and a
program lowered for shapes on a mesh of such devices compiles as it would there. A TPU needs the
package ``libtpu``, a GPU ``jax-cuda12-plugin`` (no driver, no CUDA): ``pip install boostax[aot]``.
A program over a mesh at hand moves: ``jax.export`` lowers it for the platform of the target, and
its call is compiled over the same mesh of the target's devices, with the same specs and donation.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.tree_util import keystr

from boostax._core import checks, costs
from boostax.train.compiled import TrainStep

WHO = "target_devices"
# Who compiles for them.
_AUDIT = "audit"
_STAGES = jax.stages.Lowered, jax.stages.Compiled
_FORM = re.compile(r"[a-z0-9]+:(?P<shape>\d+(?:x\d+)*)(?:\*(?P<slices>\d+))?")
_ALLOWED = (
    "'v5e:2x4' (a TPU slice), 'v5e:4x4*2' (two of them) or 'h100:1x1x8' (slices, hosts, GPUs)"
)
# Otherwise the compiler for TPU looks for a host of TPUs, and locks it.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Bytes per second between memory and chip, as the makers state them.
BANDWIDTH = {"v5e": 819e9, "v5p": 2765e9, "v6e": 1640e9, "v4": 1228e9, "h100": 3352e9}
# What XLA's compiler for GPU asks of a device: an H100 SXM5, 80 GB.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@functools.cache
def target_devices(target: str) -> tuple[Any, ...]:
    """Devices that need not exist, to compile for.

    Args:
      target: ``"v5e:2x4"`` for a slice of eight TPU v5e, ``"v5e:16x16"`` for 256, also ``v4``,
        ``v5p``, ``v6e`` in the shapes that there are; ``"v5e:4x4*2"`` for two slices;
        ``"h100:1x1x8"`` for slices x hosts x GPUs of a host.

    Returns:
      The devices, those of a slice side by side. They make a ``jax.sharding.Mesh``, and with it
      shardings of ``jax.ShapeDtypeStruct`` and train steps to lower and compile; nothing runs on
      them.

    Raises:
      ValueError: a target of another form.
      RuntimeError: the compiler is not installed, or knows no such machine.

    Example:
      >>> import boostax
      >>> boostax.inspect.target_devices("v5e")  # doctest: +NORMALIZE_WHITESPACE
      Traceback (most recent call last):
        ...
      ValueError: target_devices: target must be 'v5e:2x4' (a TPU slice), 'v5e:4x4*2' (two of them)
      or 'h100:1x1x8' (slices, hosts, GPUs), got 'v5e'. None audits for the devices at hand.
    """
    found = _FORM.fullmatch(target)
    gpu = target.startswith("h100")
    if found is None or (gpu and (found["slices"] or target.count("x") != 2)):
        hint = "None audits for the devices at hand."
        raise ValueError(f"{WHO}: target must be {_ALLOWED}, got {target!r}. {hint}")
    if jax.default_backend() != "tpu":
        for name, value in _NO_TPU.items():
            os.environ.setdefault(name, value)
    from jax.experimental import topologies

    name, _, slices = target.partition("*")
    given: dict[str, Any] = {"platform": "tpu", "topology_name": name}
    given |= {"num_slices": int(slices)} if int(slices or 1) > 1 else {}
    if gpu:
        given = {"platform": "cuda", "topology": found["shape"], "target_config": _H100}
    try:
        described = topologies.get_topology_desc(**given)
    except Exception as error:
        raise RuntimeError(
            f"{WHO}: target must be one that the installed compilers know, got {target!r}: "
            f"{str(error).splitlines()[0]}. Install them with pip install 'boostax[aot]'."
        ) from error
    return tuple(sorted(described.devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.id)))


class Argument(NamedTuple):
    """An argument of a compiled program.

    Attributes:
      path: where it stands.
      donated: whether its buffer may be taken over.
      types: its shape and dtype.
      sharding: ``None`` if the program does not use it, and XLA never sees it.
    """

    path: str
    donated: bool
    types: Any
    sharding: Any


class CompiledProgram(NamedTuple):
    """A compiled program.

    Attributes:
      compiled: what XLA made.
      arguments: in order.
      seconds: that compiling took; NaN of a program that was compiled before.
      traced: the collectives that JAX asked for, as far as they are known.
    """

    compiled: Any
    arguments: tuple[Argument, ...]
    seconds: float
    traced: Sequence[costs.Collective] = ()

    @property
    def mesh(self) -> Mesh | None:
        """Over which it runs, if over one."""
        return next(_meshes(x.sharding for x in self.arguments), None)

    @property
    def flops(self) -> float:
        """That XLA counts, the body of a loop once; NaN if it does not."""
        return float((self.compiled.cost_analysis() or {}).get("flops", math.nan))

    @property
    def described(self) -> str:
        """The devices in words."""
        used = [x.sharding for x in self.arguments if x.sharding is not None]
        devices = list(used[0].device_set) if used else []
        return f"{len(devices)} x {devices[0].device_kind}" if devices else "unknown"


def compile_program(
    program: Any, args: tuple[Any, ...], target: str | None, depth: int | None
) -> CompiledProgram:
    """Compile any program for any devices: see ``boostax.audit``, whose arguments these are."""
    program = _unwrapped(program)
    if isinstance(program, _STAGES):
        if args or target is not None:
            raise ValueError(
                f"{_AUDIT}: a lowered or compiled program must be given alone, got "
                f"{len(args)} arguments and target={target!r}. Pass the jax.jit function itself, "
                "with its arguments, to compile it for another target."
            )
        return _finished(program)
    if isinstance(program, TrainStep):
        program, args = program.jitted(*args, depth=depth)
    else:
        checks.absent(_AUDIT, "depth", depth, "left out", "Only a TrainStep has any.")
    allowed = "a function, a TrainStep, or what lower() or compile() returned"
    hint = "audit(jax.jit(step), state, batch)."
    checks.require(_AUDIT, "program", program, allowed, callable(program), hint, TypeError)
    # Only jax.jit traces apart from lowering; jax.pmap lowers, and so do wrappers of both.
    program = program if hasattr(program, "lower") else jax.jit(program)
    shapes = jax.tree.map(_shape, args)
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(shapes)]
    meant = {device for x in shardings for device in getattr(x, "device_set", ())}
    devices = target_devices(target) if target is not None else tuple(meant)
    stage = program.trace(*shapes) if hasattr(program, "trace") else None
    if meant <= set(devices) and (meant or target is None):
        # What a wrapper takes for an array is its own affair.
        made = _finished(program.lower(*args) if stage is None else stage.lower(), devices)
    elif isinstance(stage, jax.stages.Traced):
        made = _moved(program, shapes, stage.args_info, devices)
    else:
        hint = "Pass the jax.jit function inside, or build the program on the target's devices."
        got = getattr(program, "__name__", type(program).__name__)
        allowed = "a jax.jit function where it is to move to a target"
        raise TypeError(checks.message(_AUDIT, "program", allowed, got, hint))
    known = isinstance(stage, jax.stages.Traced)
    return made._replace(traced=costs.collectives(stage.jaxpr) if known else ())


def _unwrapped(program: Any) -> Any:
    """Of what Flax's NNX makes of a lowered or compiled program the program."""
    inner = getattr(program, "lowered", getattr(program, "compiled", program))
    return inner if isinstance(inner, _STAGES) else program


def _moved(
    program: Any, args: tuple[Any, ...], args_info: Any, devices: Sequence[Any]
) -> CompiledProgram:
    """The program for other devices than those that its arguments are on."""
    platform = "cuda" if devices[0].platform == "gpu" else devices[0].platform
    exported = jax.export.export(program, platforms=[platform])(*args)
    args = jax.tree.map(_number, args)
    mesh = next(_meshes(x.sharding for x in jax.tree.leaves(args)), None)
    if exported.nr_devices > 1 and mesh is None:
        raise ValueError(
            f"{_AUDIT}: args must have shardings over the program's mesh where a target is given, "
            "got none. Pass jax.ShapeDtypeStruct(shape, dtype, sharding=...) or placed arrays."
        )
    there: Mesh | None = None
    if mesh is not None:
        if mesh.size != len(devices):
            raise ValueError(
                f"{_AUDIT}: target must have as many devices as the program's mesh, {mesh.size}, "
                f"got {len(devices)}. Build the program over a mesh of the target: "
                "jax.sharding.Mesh(numpy.array(boostax.inspect.target_devices(target)).reshape("
                "...), names)."
            )
        grid = np.array(devices).reshape(mesh.devices.shape)
        there = Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)

    def place(x: Any) -> Any:
        spec = getattr(x.sharding, "spec", PartitionSpec())
        sharding = NamedSharding(there, spec) if there else SingleDeviceSharding(devices[0])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    donated = (jax.tree.leaves(info, is_leaf=_is_info) for info in args_info[0])
    donate = tuple(i for i, infos in enumerate(donated) if any(x.donated for x in infos))
    again = jax.jit(lambda *args: exported.call(*args), donate_argnums=donate)
    # The mesh that a program with explicit axes runs under.
    plain = jax.sharding.get_mesh().empty or there is None
    with contextlib.nullcontext() if plain else jax.set_mesh(there):
        return _finished(again.lower(*jax.tree.map(place, args)), devices)


def _finished(
    program: jax.stages.Lowered | jax.stages.Compiled, devices: Collection[Any] = ()
) -> CompiledProgram:
    """Compile what is not compiled yet, for these devices."""
    begun = time.perf_counter()
    program = _unwrapped(program)
    compiled: Any = program
    if isinstance(program, jax.stages.Lowered):
        # Where no GPU is at hand kernels cannot be timed, and XLA chooses them by its cost model.
        untimed = any(d.platform == "gpu" for d in devices) and jax.default_backend() != "gpu"
        options: Any = {"xla_gpu_autotune_level": 0} if untimed else {}
        compiled = program.compile(compiler_options=options)
    seconds = time.perf_counter() - begun if compiled is not program else math.nan
    arguments: list[Argument] = []

    def note(path: Any, info: Any, sharding: Any) -> None:
        # The first key tells positional arguments from named ones.
        arguments.append(Argument(keystr(path[1:]), info.donated, info, sharding))

    given = compiled.args_info, compiled.input_shardings
    jax.tree_util.tree_map_with_path(note, *given, is_leaf=_is_info)
    return CompiledProgram(compiled, tuple(arguments), seconds)


def _meshes(shardings: Iterable[Any]) -> Iterator[Mesh]:
    """The meshes of devices among some shardings."""
    meshes = (x.mesh for x in shardings if isinstance(x, NamedSharding))
    return (mesh for mesh in meshes if isinstance(mesh, Mesh))


def _shape(x: Any) -> Any:
    """An array without its values; any other leaf stays: it may be static."""
    if isinstance(x, np.ndarray):
        return jax.ShapeDtypeStruct(x.shape, jax.numpy.result_type(x))
    if not isinstance(x, jax.Array):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None)


def _number(x: Any) -> Any:
    """Types as they are, or those of a Python number, to be placed elsewhere."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    fits, allowed = isinstance(x, (bool, int, float, complex)), "arrays where a target is given"
    hint = "Bind what is static with functools.partial before jax.jit."
    checks.require(_AUDIT, "args", x, allowed, fits, hint, TypeError)
    return jax.ShapeDtypeStruct((), jax.numpy.result_type(x))


def _is_info(x: Any) -> bool:
    # Flax's variables have the attributes of what they hold.
    return isinstance(x, jax.stages.ArgInfo)
