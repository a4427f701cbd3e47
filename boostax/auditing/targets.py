# SPDX-License-Identifier: Apache-2.0
"""Compile any program for machines that need not be present.

JAX's compilers run without their devices: ``jax.experimental.topologies`` describes the devices,
and a program lowered for shapes on a mesh of them compiles as on the machine itself. A TPU needs
the package ``libtpu``, a GPU ``jax-cuda12-plugin`` (no driver, no CUDA); in a checkout ``pip
install '.[aot]'`` installs both. A program over a present mesh can move: ``jax.export`` lowers it
for the platform of the target, and its call is compiled over an equal mesh of the target's devices,
with the same specs and donation.
"""

import contextlib
import functools
import math
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.tree_util import keystr

from boostax.auditing.adapter import WHO, checks, is_step

_STAGES = jax.stages.Lowered, jax.stages.Compiled
_FORM = re.compile(r"(?P<name>\w+):(?P<shape>\d+(?:x\d+)+)(?:\*(?P<slices>\d+))?")
_FORMS = "'v5e:2x4' (a TPU slice), 'v5e:4x4*2' (two of them) or 'h100:1x1x8' (slices, hosts, GPUs)"
_KNOWN = checks.table("boostax.auditing", "machines")


@functools.cache
def target_devices(target: str) -> tuple[Any, ...]:
    """Return the devices of a machine that need not be present, as a target of compilation.

    Args:
      target: ``"v5e:2x4"`` for a slice of eight TPU v5e, ``"v5e:16x16"`` for 256, also ``v4``,
        ``v5p`` and ``v6e`` in their existing shapes; ``"v5e:4x4*2"`` for two slices;
        ``"h100:1x1x8"`` for slices x hosts x GPUs per host, also ``h200`` and ``a100``.

    Returns:
      The devices, slice by slice. A ``jax.sharding.Mesh`` of these devices serves for shardings of
      ``jax.ShapeDtypeStruct`` and for train steps to lower and compile, but programs cannot run on
      it. The present devices stay available.

    Raises:
      ValueError: a target of another form, or an unknown machine.
      RuntimeError: the compiler is not installed, or knows no slice of that shape.

    Example:
      >>> import boostax
      >>> boostax.auditing.target_devices("v5e")  # doctest: +ELLIPSIS, +NORMALIZE_WHITESPACE
      Traceback (most recent call last):
        ...
      ValueError: target_devices: target must be 'v5e:2x4' (a TPU slice), 'v5e:4x4*2' (two of them)
      or 'h100:1x1x8' (slices, hosts, GPUs), got 'v5e'. ...
    """
    found = _FORM.fullmatch(target)
    machine = found and _KNOWN["machines"].get(found["name"])
    gpu = found and _KNOWN["gpus"].get(found["name"])
    if found is None or not machine or (gpu and not re.fullmatch(r"\w+:\d+x\d+x\d+", target)):
        listed = "".join(f"\n  {x['form']:12} {x['what']}" for x in _KNOWN["machines"].values())
        hint = f"None audits for the devices at hand. Machines that are known:{listed}"
        raise ValueError(checks.message("target_devices", "target", _FORMS, target, hint))
    if jax.default_backend() != "tpu":
        for name, value in _KNOWN["environment"].items():
            os.environ.setdefault(name, value)
    given: dict[str, Any] = {"platform": "tpu", "topology_name": target.partition("*")[0]}
    given["num_slices"] = int(found["slices"] or 1)
    if gpu:
        config = _KNOWN["description"] % gpu
        given = {"platform": "cuda", "topology": found["shape"], "target_config": config}
    try:
        devices = _described(given)
    except Exception as error:
        allowed, why = "one that a compiler at hand knows", str(error).splitlines()[0]
        hint = f"{why}. In a checkout, pip install '.[aot]' installs compilers for TPU and GPU."
        words = checks.message("target_devices", "target", allowed, target, hint)
        raise RuntimeError(words) from error
    return tuple(sorted(devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.id)))


def _described(given: Mapping[str, Any]) -> Sequence[Any]:
    """Return the devices of a topology.

    The plugin for CUDA registers itself only if it finds a driver. If it did not, this function
    registers it without that check, unless JAX is restricted to other platforms.
    """
    from jax.experimental import topologies

    skip, before = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK", dict(os.environ)
    try:
        return topologies.get_topology_desc(**given).devices
    except NotImplementedError:
        os.environ[skip] = "1"
        for plugin in entry_points(group="jax_plugins"):
            if "cuda" in plugin.name:
                plugin.load().initialize()
        return topologies.get_topology_desc(**given).devices
    finally:
        if skip not in before:
            os.environ.pop(skip, None)


class Argument(NamedTuple):
    """An argument of a compiled program.

    Attributes:
      path: its position among the arguments.
      info: its shape and dtype, and whether the argument is donated.
      sharding: its sharding; ``None`` if the program does not use the argument, so XLA drops it.
    """

    path: str
    info: jax.stages.ArgInfo
    sharding: jax.sharding.Sharding | None


class CompiledProgram(NamedTuple):
    """A compiled program.

    Attributes:
      compiled: the result of XLA.
      arguments: its arguments in order.
      seconds: the time of compilation; NaN if the program was already compiled.
    """

    compiled: Any
    arguments: tuple[Argument, ...]
    seconds: float

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the program runs over, if any."""
        return _mesh_of(x.sharding for x in self.arguments)

    @property
    def described(self) -> str:
        """The number and kind of the program's devices."""
        used = [x.sharding for x in self.arguments if x.sharding is not None]
        devices = list(used[0].device_set) if used else []
        return f"{len(devices)} x {devices[0].device_kind}" if devices else "unknown"


def compile_program(
    program: Any, args: tuple[Any, ...], target: str | None, depth: int | None, given: Any
) -> CompiledProgram:
    """Compile any program for any devices; ``boostax.audit`` documents the arguments."""
    program = _unwrapped(program)
    if isinstance(program, _STAGES):
        got = f"{len(args) + len(given)} arguments, target={target!r}"
        alone = not (args or given) and target is None
        hint = "Pass the jax.jit function with its arguments to compile it for another target."
        what, allowed = "a lowered or compiled program", "given alone"
        checks.require(alone, WHO, what, got=got, allowed=allowed, hint=hint)
        return _finished(program)
    if is_step(program):
        program, args = program.jitted(*args, depth=depth, **given)
    else:
        hint = "A TrainStep passes them to its loss; else bind: functools.partial(function, ...)."
        checks.absent(WHO, "keywords", given or None, "left out", hint)
        checks.absent(WHO, "depth", depth, "left out", "Only a TrainStep has depths.")
    allowed = "a function, a TrainStep, or what lower() or compile() returned"
    hint = "audit(jax.jit(step), state, batch)."
    checks.require_type(callable(program), WHO, "program", got=program, allowed=allowed, hint=hint)
    # Only jax.jit has a trace method; jax.pmap and wrappers have only lower.
    program = program if hasattr(program, "lower") else jax.jit(program)
    shardings = filter(None, map(_sharding, jax.tree.leaves(args)))
    meant = {device for x in shardings for device in x.device_set}
    devices = target_devices(target) if target is not None else tuple(meant)
    stage: Any = program.trace(*args) if hasattr(program, "trace") else None
    traced = isinstance(stage, jax.stages.Traced)
    if meant <= set(devices) and (meant or target is None):
        # The wrapper itself decides which arguments are arrays.
        return _finished(program.lower(*args) if stage is None else stage.lower(), devices)
    hint = "Pass the jax.jit function inside, or build the program on the target's devices."
    got = getattr(program, "__name__", type(program).__name__)
    allowed = "a jax.jit function where it is to move to a target"
    checks.require_type(traced, WHO, "program", got=got, allowed=allowed, hint=hint)
    return _moved(program, args, stage.args_info, devices)


def _unwrapped(program: Any) -> Any:
    """Return the program inside a wrapper of Flax NNX."""
    inner = getattr(program, "lowered", getattr(program, "compiled", program))
    return inner if isinstance(inner, _STAGES) else program


def _moved(program: Any, args: Any, args_info: Any, devices: Sequence[Any]) -> CompiledProgram:
    """Compile the program for devices other than those of its arguments."""
    platform = "cuda" if devices[0].platform == "gpu" else devices[0].platform
    exported = jax.export.export(program, platforms=[platform])(*args)
    mesh = _mesh_of(map(_sharding, jax.tree.leaves(args)))
    allowed = "placed by shardings over the program's mesh where a target is given"
    hint = "Pass jax.ShapeDtypeStruct(shape, dtype, sharding=...) or placed arrays; on one device "
    hint += "sharding=jax.sharding.SingleDeviceSharding(target_devices(target)[0])."
    fits = mesh is not None or len(devices) == 1
    checks.require(fits, WHO, "args", got=None, allowed=allowed, hint=hint)
    count, fits = len(devices), mesh is None or mesh.size == len(devices)
    allowed = f"one of as many devices as the program's mesh, {mesh and mesh.size}"
    hint = "Build it over jax.sharding.Mesh(numpy.array(target_devices(target)), names)."
    checks.require(fits, WHO, "target", got=count, allowed=allowed, hint=hint)
    grid: Any = None if mesh is None else np.array(devices).reshape(mesh.devices.shape)
    there = None if mesh is None else Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)

    def place(x: Any) -> jax.ShapeDtypeStruct:
        spec = getattr(_sharding(x), "spec", PartitionSpec())
        sharding = NamedSharding(there, spec) if there else SingleDeviceSharding(devices[0])
        return jax.ShapeDtypeStruct(np.shape(x), jax.numpy.result_type(x), sharding=sharding)

    donated = [any(x.donated for x in jax.tree.leaves(info)) for info in args_info[0]]
    donate = tuple(i for i, given in enumerate(donated) if given)
    again = jax.jit(lambda *args: exported.call(*args), donate_argnums=donate)
    # A program with explicit axes needs a mesh in its context.
    plain = jax.sharding.get_mesh().empty or there is None
    with contextlib.nullcontext() if plain else jax.set_mesh(there):
        return _finished(again.lower(*jax.tree.map(place, args)), devices)


def _finished(program: Any, devices: Collection[Any] = ()) -> CompiledProgram:
    """Compile a lowered program for these devices, unless it is already compiled."""
    compiled: Any = _unwrapped(program)
    seconds = math.nan
    if isinstance(compiled, jax.stages.Lowered):
        begun = time.perf_counter()
        # Without a GPU XLA cannot time kernels, so it chooses kernels by its cost model.
        untimed = any(d.platform == "gpu" for d in devices) and jax.default_backend() != "gpu"
        options: dict[str, Any] = {"xla_gpu_autotune_level": 0} if untimed else {}
        try:
            compiled = compiled.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            allowed = f"one that compiles for {', '.join({d.device_kind for d in devices})}"
            alone = "Without a TPU custom_partitioning compiles for CPU and GPU alone."
            hint = alone if "CustomSPMDPartitioning" in str(error) else ""
            words = checks.message(WHO, "program", allowed, str(error).splitlines()[0], hint)
            raise RuntimeError(words) from error
        seconds = time.perf_counter() - begun

    infos, tree = jax.tree_util.tree_flatten_with_path(compiled.args_info)
    pairs = zip(infos, tree.flatten_up_to(compiled.input_shardings), strict=True)
    # The first key only separates positional arguments from keyword arguments.
    arguments = tuple(Argument(keystr(path[1:]), info, where) for (path, info), where in pairs)
    return CompiledProgram(compiled, arguments, seconds)


def _mesh_of(shardings: Iterable[Any]) -> Mesh | None:
    """Return the first mesh of devices among shardings."""
    meshes = (x.mesh for x in shardings if isinstance(x, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def _sharding(x: object) -> Any:
    """Return the sharding of an array; ``None`` if the array may be placed anywhere."""
    return getattr(x, "sharding", None) if getattr(x, "committed", True) else None
