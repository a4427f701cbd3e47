"""Importing boostax is cheap and pulls in nothing that the runtime does not need."""

import importlib
import subprocess
import sys

import pytest

import boostax

SCRIPT = """
import sys
import jax
import optax
traced = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: traced.append(event))
before = set(sys.modules)
import boostax
print(*sorted(set(sys.modules) - before))
print(*traced)
# Raises where a device has been asked for.
jax.config.update("jax_num_cpu_devices", 3)
"""
# What is loaded when it is first asked for.
LATE = {"autoboost", "cli", "cluster", "inspect", "run", "testing", "workloads"}


def test_import_adds_to_optax_nothing_but_its_own_modules():
    """No other package, no trace and no device: the rest is the time to read our own files."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    added, traced = result.stdout.splitlines()
    packages = {tuple(name.split(".")[:2]) for name in added.split()}
    assert {package for package, *_ in packages} == {"boostax"}
    assert not {name for _, *rest in packages for name in rest} & LATE
    assert traced == ""


def test_public_names_are_the_documented_ones():
    expected = {
        "accumulate", "active_groups", "adasum", "adasum_delta", "all_finite", "all_reduce",
        "apply_gradients", "assume_scaled", "audit", "auto", "break_even", "carry",
        "centralize_gradients", "check_boundaries", "check_updates", "checkpoint_snapshots",
        "clip_by_global_norm", "count_lost_updates",
        "describe", "dim_reduce",
        "dynamic_loss_scale",
        "enter_replica", "explain", "flush", "forward_order", "freeze_on_plateau",
        "freeze_schedule", "gate",
        "group_boundaries", "group_loss_scale", "group_scales", "group_signal",
        "has_updated", "int8_reduce", "int16_reduce",
        "leave_replica", "less_bn",
        "local_params", "local_updates", "loss_scale",
        "make_train_step", "measure", "metrics", "microbatch", "migrate_state", "partial_average",
        "on_mesh", "pca_basis", "policy", "power_sgd_reduce", "prefix_groups",
        "random_basis", "random_k_reduce", "record_trajectory", "reestimate_model_state",
        "replace_basis", "reshard_state", "scale_boundary", "scale_loss", "scheduled_freeze",
        "sign_reduce", "stack_replicas",
        "state_specs", "static_loss_scale", "subspace_params", "target_devices", "threshold_reduce",
        "top_k_reduce", "trajectory", "trajectory_basis", "value_and_grad",
        "AccumulateState", "AdasumDeltaState", "AdasumState", "Audit", "Aux", "Basis",
        "Boost", "BoostConfig", "BreakEven", "CallCost", "CarryState", "CheckUpdatesState",
        "LostUpdatesState",
        "CompiledCollective", "CompressedState", "DimReduceState", "Explanation", "Finding",
        "FreezeSchedule", "GateState",
        "GroupLossScaleState", "PartCost",
        "GroupSignalState", "LessBNReport", "Measurement", "MigrationReport", "NormalizedDense",
        "HostTrajectory", "Int8Components",
        "LocalUpdatesState", "LossScaleState", "PartialAverageState",
        "Pending", "PerReplica", "Policy", "ScheduledFreeze", "ScheduledFreezeState",
        "SubspaceParamsState", "SubspaceRule", "TrainState", "TrainStep",
        "TrajectoryState", "Trial",
    }  # fmt: skip
    public = {
        name
        for name in dir(boostax)
        if not name.startswith("_")
        and (getattr(getattr(boostax, name), "__module__", None) or "").startswith("boostax.")
    }
    assert public == expected
    assert all(getattr(boostax, name).__doc__ for name in public)


def test_names_of_0_1_are_those_of_run():
    """Modules that moved to ``boostax.run`` still answer where 0.1 had them, with a warning."""
    had = {
        "cluster": "initialize",
        "workloads": "make",
        "cli": "main",
        "train.loop": "fit",
        "train.checkpoint": "Checkpointer",
        "train.writers": "JsonLines",
    }
    for module, name in had.items():
        now = f"boostax.run.{module.removeprefix('train.')}"
        old = importlib.import_module(f"boostax.{module}")
        with pytest.warns(DeprecationWarning, match=f"boostax.{module} is {now} now"):
            found = getattr(old, name)
        assert found is getattr(importlib.import_module(now), name)
