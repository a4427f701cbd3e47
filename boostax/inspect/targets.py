"""Machines to compile for without having them: the devices of a TPU slice or of GPU hosts.

JAX's compilers run without their devices: ``jax.experimental.topologies`` describes them, and a
program lowered for shapes on a mesh of such devices compiles as it would there. A TPU needs the
package ``libtpu``, a GPU ``jax-cuda12-plugin`` (no driver, no CUDA): ``pip install boostax[aot]``.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

WHO = "target_devices"
_FORM = re.compile(r"(?P<chip>[a-z0-9]+):(?P<shape>\d+(?:x\d+)*)(?:\*(?P<slices>\d+))?")
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

    slices = int(found["slices"] or 1)
    try:
        if gpu:
            described = topologies.get_topology_desc(
                platform="cuda", target_config=_H100, topology=found["shape"]
            )
        else:
            more = {"num_slices": slices} if slices > 1 else {}
            name = f"{found['chip']}:{found['shape']}"
            described = topologies.get_topology_desc(platform="tpu", topology_name=name, **more)
    except Exception as error:
        raise RuntimeError(
            f"{WHO}: target must be one that the installed compilers know, got {target!r}: "
            f"{str(error).splitlines()[0]}. Install them with pip install 'boostax[aot]'."
        ) from error
    return tuple(sorted(described.devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.id)))


def retargeted(mesh: Mesh, devices: Sequence[Any], who: str) -> Mesh:
    """The same mesh over other devices."""
    if mesh.size != len(devices):
        raise ValueError(
            f"{who}: target must have as many devices as the program's mesh, {mesh.size}, got "
            f"{len(devices)}. Build the program over a mesh of the target: "
            "jax.sharding.Mesh(numpy.array(boostax.inspect.target_devices(target)).reshape(...), "
            "names)."
        )
    return Mesh(
        np.array(devices).reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types
    )


def compiler_options(devices: Collection[Any]) -> dict[str, Any]:
    """What to tell a compiler that has no devices."""
    if any(d.platform == "gpu" for d in devices) and jax.default_backend() != "gpu":
        # Kernels cannot be timed, and XLA chooses them by its cost model.
        return {"xla_gpu_autotune_level": 0}
    return {}
