# SPDX-License-Identifier: Apache-2.0
"""Joining a run of several processes, whoever started them."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax

from boostax._core import checks

# What names a process to whoever starts it by hand, by `boostax launch` or in an indexed pod.
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


@dataclasses.dataclass(frozen=True)
class Processes:
    """What a process is to its run.

    Attributes:
      index: its number, from 0; process 0 prints and writes.
      count: how many there are.
      found: who started them: ``"variables"``, ``"slurm"``, ``"ompi"``, ``"k8s"``, ``"tpu"``,
        ``"jax"`` if the caller had initialised JAX already, or ``None`` for a process alone.
    """

    index: int
    count: int
    found: str | None

    @property
    def first(self) -> bool:
        """Whether this process prints and writes."""
        return self.index == 0


def detect(environment: Mapping[str, str] | None = None) -> str | None:
    """Who started this process together with others, by the variables they leave.

    A single task under SLURM or Open MPI is a process alone.

    Args:
      environment: variables; those of the process by default.

    Returns:
      A name as in ``Processes.found``, or ``None``.

    Raises:
      ValueError: only some of the variables of a manual start are set, or an MPI has started
        several processes that JAX cannot connect.

    Example:
      >>> detect({"OMPI_MCA_orte_hnp_uri": "1;tcp://10.0.0.1:5", "OMPI_COMM_WORLD_SIZE": "4"})
      'ompi'
    """
    given = os.environ if environment is None else environment
    missing = [name for name in (ADDRESS, COUNT, INDEX) if not given.get(name)]
    # An address alone may be there for somebody else.
    if given.get(COUNT) or given.get(INDEX):
        if missing:
            raise ValueError(
                f"initialize: {ADDRESS}, {COUNT}, {INDEX} must be set together, got no "
                f"{', '.join(missing)}. The address is host:port of process 0, the others are "
                "numbers."
            )
        return "variables"
    if "OMPI_MCA_orte_hnp_uri" in given:
        return "ompi" if _several(given, "OMPI_COMM_WORLD_SIZE") else None
    if "SLURM_STEP_NODELIST" in given:
        return "slurm" if _several(given, "SLURM_NTASKS") else None
    if "KUBERNETES_SERVICE_HOST" in given and "JOB_COMPLETION_INDEX" in given:
        return "k8s"
    hosts = given.get("TPU_PROCESS_ADDRESSES") or given.get("TPU_WORKER_HOSTNAMES") or ""
    if "," in hosts:
        return "tpu"
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if _several(given, name):
            raise ValueError(
                f"initialize: {ADDRESS}, {COUNT} and {INDEX} must be set under this MPI, got none "
                f"of them and {name}={given[name]}. JAX finds the others only under Open MPI 4; "
                "each process would train alone, and write to the same place."
            )
    return None


def initialize(
    *, heartbeat: int = 100, patience: int = 300, environment: Mapping[str, str] | None = None
) -> Processes:
    """Join the other processes of a run through ``jax.distributed``, if there are any.

    Call it before anything asks JAX for its devices. ``boostax launch``, ``mpirun``, ``srun`` and
    indexed Kubernetes jobs are told by what they leave in the environment; everything else by
    ``JAX_COORDINATOR_ADDRESS`` (``host:port`` of process 0), ``JAX_NUM_PROCESSES`` and
    ``JAX_PROCESS_ID``. A process alone stays alone, without a service or a port.

    Args:
      heartbeat: seconds of silence after which JAX's service takes a process for dead and ends the
        run.
      patience: seconds to wait for the others at the start, and at the end.
      environment: variables; those of the process by default.

    Returns:
      ``Processes``.

    Raises:
      ValueError, TypeError: variables that do not go together, or no numbers.

    Example:
      >>> initialize()
      Processes(index=0, count=1, found=None)

    **Cost**: process 0 opens the coordinator's port; a connection of each process to it.
    """
    for name, value in (("heartbeat", heartbeat), ("patience", patience)):
        checks.positive_int("initialize", name, value, "It is a number of seconds.")
    if jax.distributed.is_initialized():
        return Processes(jax.process_index(), jax.process_count(), "jax")
    given = os.environ if environment is None else environment
    found = detect(given)
    limits: dict[str, Any] = {
        "initialization_timeout": patience,
        "heartbeat_timeout_seconds": heartbeat,
        "shutdown_timeout_seconds": patience,
    }
    if found is None:
        return Processes(0, 1, None)
    if found == "variables":
        index, count = _number(given, INDEX), _number(given, COUNT)
        if count == 1:
            return Processes(0, 1, None)
        # JAX would look for a cluster as well, and take a GPU from it.
        limits["cluster_detection_method"] = "deactivate"
        jax.distributed.initialize(given[ADDRESS], count, index, **limits)
        return Processes(index, count, found)
    jax.distributed.initialize(**limits)
    return Processes(jax.process_index(), jax.process_count(), found)


def _several(given: Mapping[str, str], name: str) -> bool:
    return given.get(name, "1") != "1"


def _number(given: Mapping[str, str], name: str) -> int:
    try:
        return int(given[name])
    except ValueError:
        hint = "boostax launch sets it; by hand, count from 0."
        raise ValueError(
            checks.message("initialize", name, "a whole number", given[name], hint)
        ) from None
