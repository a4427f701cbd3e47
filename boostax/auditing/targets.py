# SPDX-License-Identifier: Apache-2.0
"""Compile any program for machines that need not be present.

JAX's compilers run without their devices. ``jax.experimental.topologies`` describes the devices,
and a program that is lowered for shapes on a mesh of these devices compiles as it would on the
machine itself. The compiler for a TPU needs the package ``libtpu``. The compiler for a GPU needs
``jax-cuda12-plugin``, but no driver and no CUDA. In a checkout, ``pip install '.[aot]'`` installs
both packages. A program over a mesh of present devices can be moved to a target. ``jax.export``
lowers the program for the target's platform. The exported call is then compiled over a mesh of the
target's devices with the same shape, the same specs and the same donation.
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

from boostax.auditing.adapter import WHO, PyTree, TrainStep, checks

_STAGES = jax.stages.Lowered, jax.stages.Compiled
_FORM = re.compile(r"(?P<name>\w+):(?P<shape>\d+(?:x\d+)+)(?:\*(?P<slices>\d+))?")
_FORMS = "'v5e:2x4' (a TPU slice), 'v5e:4x4*2' (two slices) or 'h100:1x1x8' (slices, hosts, GPUs)"
_KNOWN = checks.table("boostax.auditing", "machines")


@functools.cache
def target_devices(target: str) -> tuple[Any, ...]:
    """Return the devices of a machine that need not be present, as a target of compilation.

    Args:
      target: for TPUs, ``"v5e:2x4"`` for a slice of eight v5e, ``"v5e:4x4*2"`` for two slices of
        sixteen v5e; ``v4``, ``v5p`` and ``v6e`` likewise, in the shapes that exist. For GPUs,
        ``"h100:1x1x8"`` for slices x hosts x GPUs per host; ``h200`` and ``a100`` likewise.

    Returns:
      The devices, slice by slice. A ``jax.sharding.Mesh`` of these devices can be used in shardings
      of ``jax.ShapeDtypeStruct``, and to lower and compile train steps. Programs cannot run on
      these devices. The present devices remain available.

    Raises:
      ValueError: a target of another form, or an unknown machine.
      RuntimeError: the compiler is not installed, or does not know a slice of that shape.

    Example:
      >>> import boostax
      >>> boostax.auditing.target_devices("v5e")  # doctest: +ELLIPSIS, +NORMALIZE_WHITESPACE
      Traceback (most recent call last):
        ...
      ValueError: target_devices: target must be 'v5e:2x4' (a TPU slice), 'v5e:4x4*2' (two slices)
      or 'h100:1x1x8' (slices, hosts, GPUs), got 'v5e'. ...
    """
    match = _FORM.fullmatch(target)
    machine = match and _KNOWN["machines"].get(match["name"])
    gpu = match and _KNOWN["gpus"].get(match["name"])
    if match is None or not machine or (gpu and not re.fullmatch(r"\w+:\d+x\d+x\d+", target)):
        listed = "".join(f"\n  {x['form']:12} {x['what']}" for x in _KNOWN["machines"].values())
        hint = f"Without a target, audit uses the present devices. The known machines are:{listed}"
        raise ValueError(checks.message("target_devices", "target", _FORMS, target, hint))
    if jax.default_backend() != "tpu":
        for name, value in _KNOWN["environment"].items():
            os.environ.setdefault(name, value)
    slices = int(match["slices"] or 1)
    topology = {"platform": "tpu", "topology_name": target.partition("*")[0], "num_slices": slices}
    if gpu:
        config = _KNOWN["description"] % gpu
        topology = {"platform": "cuda", "topology": match["shape"], "target_config": config}
    try:
        devices = _described(topology)
    except Exception as error:
        hint = f"{str(error).splitlines()[0]}. In a checkout, pip install '.[aot]' installs "
        hint += "compilers for TPU and GPU."
        allowed = "a machine that an installed compiler knows"
        words = checks.message("target_devices", "target", allowed, target, hint)
        raise RuntimeError(words) from error
    return tuple(sorted(devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.id)))


def _described(topology: Mapping[str, Any]) -> Sequence[Any]:
    """Return the devices of a topology.

    The plugin for CUDA registers itself only if it finds a driver. Without a driver, this function
    registers the plugin, unless JAX is restricted to other platforms.
    """
    from jax.experimental import topologies

    skip = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    was_set = skip in os.environ
    try:
        return topologies.get_topology_desc(**topology).devices
    except NotImplementedError:
        os.environ[skip] = "1"
        for plugin in entry_points(group="jax_plugins"):
            if "cuda" in plugin.name:
                plugin.load().initialize()
        return topologies.get_topology_desc(**topology).devices
    finally:
        if not was_set:
            os.environ.pop(skip, None)


class Argument(NamedTuple):
    """Describe an argument of a compiled program.

    Attributes:
      path: the position among the arguments.
      info: the shape and the dtype, and whether the argument is donated.
      sharding: the sharding; ``None`` if XLA drops the argument, because the program does not use
        it.
    """

    path: str
    info: jax.stages.ArgInfo
    sharding: jax.sharding.Sharding | None


class CompiledProgram(NamedTuple):
    """Describe a compiled program, its arguments and its devices.

    Attributes:
      executable: the result of XLA.
      arguments: the program's arguments in order.
      seconds: the time of compilation; NaN if the program was already compiled.
      mesh: the mesh over which the program runs, if any.
      devices: the number and the kind of the program's devices.
    """

    executable: jax.stages.Compiled
    arguments: tuple[Argument, ...]
    seconds: float
    mesh: Mesh | None
    devices: str


def compile_program(
    program: Any, args: tuple[PyTree, ...], target: str | None, depth: int | None, kwargs: PyTree
) -> CompiledProgram:
    """Compile any program for any devices; ``boostax.audit`` documents the arguments."""
    program = _unwrapped(program)
    if isinstance(program, _STAGES):
        got = f"{len(args) + len(kwargs)} more, target={target!r}"
        is_valid = not (args or kwargs) and target is None
        hint = "For another target, pass the jax.jit function with its arguments."
        what = "a lowered or compiled program"
        checks.require(is_valid, WHO, what, got=got, allowed="the only argument", hint=hint)
        return _finished(program)
    if isinstance(program, TrainStep):
        program, args = program.jitted(*args, depth=depth, **kwargs)
    else:
        hint = "Only a TrainStep accepts them. Pass functools.partial(function, name=value)."
        checks.absent(WHO, "keywords", kwargs or None, "left out", hint)
        checks.absent(WHO, "depth", depth, "left out", "Only a TrainStep accepts a depth.")
    allowed = "a function, a TrainStep, or the result of lower() or compile()"
    hint = "Write boostax.audit(jax.jit(step), state, batch)."
    checks.require_type(callable(program), WHO, "program", got=program, allowed=allowed, hint=hint)
    # The result of ``jax.jit`` has the methods ``trace`` and ``lower``. The results of ``jax.pmap``
    # and of wrappers have only ``lower``.
    program = program if hasattr(program, "lower") else jax.jit(program)
    placed = {d for x in jax.tree.leaves(args) if (s := _sharding(x)) for d in s.device_set}
    devices = target_devices(target) if target is not None else tuple(placed)
    traced: Any = program.trace(*args) if hasattr(program, "trace") else None
    if placed <= set(devices) and (placed or target is None):
        # A wrapper without ``trace`` decides in ``lower`` which arguments are arrays.
        return _finished(program.lower(*args) if traced is None else traced.lower(), devices)
    is_valid = isinstance(traced, jax.stages.Traced)
    hint = "Pass the jax.jit function itself, or build the program on the target's devices."
    got = getattr(program, "__name__", type(program).__name__)
    allowed = "a jax.jit function if the target's devices are not the arguments' devices"
    checks.require_type(is_valid, WHO, "program", got=got, allowed=allowed, hint=hint)
    return _moved(program, args, traced.args_info[0], devices)


def _unwrapped(program: Any) -> Any:
    """Return the program inside a wrapper of Flax NNX."""
    inner = getattr(program, "lowered", getattr(program, "compiled", program))
    return inner if isinstance(inner, _STAGES) else program


def _moved(program: Any, args: PyTree, infos: PyTree, devices: Sequence[Any]) -> CompiledProgram:
    """Compile the program for devices other than those of its arguments."""
    platform = "cuda" if devices[0].platform == "gpu" else devices[0].platform
    exported = jax.export.export(program, platforms=[platform])(*args)
    leaves, tree = jax.tree.flatten(args)
    shardings = [_sharding(x) for x in leaves]
    mesh = _mesh_of(shardings)
    allowed = "placed with shardings over the program's mesh if a target is given"
    hint = "Pass jax.ShapeDtypeStruct(shape, dtype, sharding=...) or placed arrays. On one device, "
    hint += "pass sharding=jax.sharding.SingleDeviceSharding(target_devices(target)[0])."
    size = len(devices)
    checks.require(mesh is not None or size == 1, WHO, "args", got=None, allowed=allowed, hint=hint)
    if mesh is not None:
        allowed = f"a machine of {mesh.size} devices, as many as in the program's mesh"
        hint = "Build the mesh: jax.sharding.Mesh(numpy.array(target_devices(target)), names)."
        checks.require(mesh.size == size, WHO, "target", got=size, allowed=allowed, hint=hint)
        grid = np.array(devices).reshape(mesh.devices.shape)
        mesh = Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
    structs: list[jax.ShapeDtypeStruct] = []
    for x, old in zip(leaves, shardings, strict=True):
        spec = getattr(old, "spec", PartitionSpec())
        new = NamedSharding(mesh, spec) if mesh else SingleDeviceSharding(devices[0])
        structs.append(jax.ShapeDtypeStruct(np.shape(x), jax.numpy.result_type(x), sharding=new))
    donated = [i for i, x in enumerate(infos) if any(y.donated for y in jax.tree.leaves(x))]
    moved = jax.jit(lambda *args: exported.call(*args), donate_argnums=donated)
    # A program with explicit axes needs a mesh in the context.
    is_implicit = jax.sharding.get_mesh().empty or mesh is None
    with contextlib.nullcontext() if is_implicit else jax.set_mesh(mesh):
        return _finished(moved.lower(*tree.unflatten(structs)), devices)


def _finished(program: Any, devices: Collection[Any] = ()) -> CompiledProgram:
    """Compile a lowered program for the given devices, unless it is already compiled."""
    compiled: Any = _unwrapped(program)
    seconds = math.nan
    if isinstance(compiled, jax.stages.Lowered):
        start = time.perf_counter()
        # Without a GPU, XLA cannot time kernels, so it chooses kernels by its cost model.
        untimed = any(d.platform == "gpu" for d in devices) and jax.default_backend() != "gpu"
        options: dict[str, Any] = {"xla_gpu_autotune_level": 0} if untimed else {}
        try:
            compiled = compiled.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            allowed = f"a program that compiles for {', '.join({d.device_kind for d in devices})}"
            hint = "Without a TPU, custom_partitioning compiles only for CPU and GPU."
            hint *= "CustomSPMDPartitioning" in str(error)
            words = checks.message(WHO, "program", allowed, str(error).splitlines()[0], hint)
            raise RuntimeError(words) from error
        seconds = time.perf_counter() - start

    infos, tree = jax.tree_util.tree_flatten_with_path(compiled.args_info)
    shardings = tree.flatten_up_to(compiled.input_shardings)
    pairs = zip(infos, shardings, strict=True)
    # The first key of a path only separates positional arguments from keyword arguments.
    arguments = tuple(Argument(keystr(path[1:]), info, x) for (path, info), x in pairs)
    running = list(next((x.device_set for x in shardings if x is not None), ()))
    machine = f"{len(running)} x {running[0].device_kind}" if running else "unknown"
    return CompiledProgram(compiled, arguments, seconds, _mesh_of(shardings), machine)


def _mesh_of(shardings: Iterable[object]) -> Mesh | None:
    """Return the first mesh of devices among shardings."""
    meshes = (x.mesh for x in shardings if isinstance(x, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def _sharding(x: object) -> jax.sharding.Sharding | None:
    """Return the sharding of an array, or ``None`` if JAX may move the array."""
    return getattr(x, "sharding", None) if getattr(x, "committed", True) else None
