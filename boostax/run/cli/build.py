# SPDX-License-Identifier: Apache-2.0
"""From a workload and a recipe to an optimizer, a train step and its first state."""

import contextlib
import dataclasses
import itertools
from typing import Any

import jax
import optax

import boostax
from boostax._core.groups import group_count
from boostax.config.part import speaking_of
from boostax.config.reduction import Reduce
from boostax.run.cli.recipe import Recipe, check_options
from boostax.run.workloads import Workload

PyTree = Any
AXIS = "data"
# Groups of layers where nobody says how many.
_GROUPS = 4


@dataclasses.dataclass(frozen=True)
class Built:
    """A workload, and a recipe as a train step for it."""

    workload: Workload
    recipe: Recipe
    step: boostax.train.TrainStep

    def init(self, seed: int) -> boostax.train.TrainState:
        """The first state; parameters and the key of the step come from ``seed``."""
        params_key, step_key = jax.random.split(jax.random.key(seed))
        params, model_state = jax.jit(self.workload.init)(params_key)
        return self.step.init(params, key=step_key, model_state=model_state)

    def evaluate(self, state: boostax.train.TrainState) -> dict[str, float]:
        """Held-out scalars under names of their own."""
        params = state.params
        if self.recipe.evaluate == "averaged":
            params = jax.jit(boostax.model.averaged_params)(state.opt_state, params)
        return self.judge(params, state.model_state)

    def judge(self, params: PyTree, model_state: PyTree) -> dict[str, float]:
        """The same of parts of a state."""
        found = self.workload.evaluate(params, model_state)
        return {f"held_out_{name}": value for name, value in found.items()}


def require_devices(count: int, processes: int = 1) -> int:
    """Make sure that there are ``count`` devices, emulated ones on CPU; before JAX is first used.

    Returns:
      How many to use: of several processes at least one each.

    Raises:
      ValueError: if there are fewer, or the processes cannot have equally many.
    """
    if processes > 1 and count == 1:
        return len(jax.devices())
    if count % processes:
        raise ValueError(
            f"boostax: --devices must be a multiple of the {processes} processes, got {count}. "
            f"It counts those of all processes; {processes} gives each of them one."
        )
    settings: Any = jax.config
    each = count // processes
    if settings.jax_num_cpu_devices < each:
        # Refused once a backend exists; what is there decides below.
        with contextlib.suppress(RuntimeError):
            settings.update("jax_num_cpu_devices", each)
    there = jax.local_devices()
    if len(there) < each:
        of = "" if processes == 1 else f"{processes} times "
        raise ValueError(
            f"boostax: --devices must be at most {of}{len(there)}, the {jax.default_backend()} "
            f"devices here, got {count}. JAX_PLATFORMS=cpu emulates as many as you ask for."
        )
    return count


def build(workload: Workload, recipe: Recipe) -> Built:
    """The train step of a recipe; raises ValueError or TypeError where it makes no sense."""
    check_options(recipe)
    _check_devices(workload, recipe)
    _check_average(workload, recipe)
    axis, mesh = None, None
    if recipe.devices > 1:
        # As many of every process.
        count = jax.process_count()
        each = (jax.local_devices(i)[: recipe.devices // count] for i in range(count))
        auto, devices = (jax.sharding.AxisType.Auto,), list(itertools.chain(*each))
        axis, mesh = AXIS, jax.make_mesh((recipe.devices,), (AXIS,), auto, devices=devices)
    groups = None if recipe.freeze == "none" else layer_groups(workload, recipe)
    signal: list[optax.GradientTransformation] = []
    if recipe.freeze == "plateau":
        # Behind the reduction and before clipping, averaged over a sixty-fourth of the run.
        horizon = max(1, recipe.optimizer_steps // 64)
        signal = [boostax.freeze.group_signal(groups, horizon=horizon)]
    tx = boosted(recipe).optimizer(optimizer(recipe, *signal), axis_name=axis)
    if groups is not None:
        tx = boostax.scheduled_freeze(tx, groups, _schedule(recipe, group_count(groups)))
    return Built(workload, recipe, train_step(workload, tx, mesh, recipe.microbatches))


def train_step(
    workload: Workload, tx: optax.GradientTransformation, mesh: Any, microbatches: int
) -> boostax.train.TrainStep:
    """One call of an optimizer on the loss of a workload."""
    axis = None if mesh is None else AXIS
    return boostax.make_train_step(
        workload.loss_fn, tx, mesh=mesh, axis_name=axis, microbatches=microbatches, has_aux=True
    )


def boosted(recipe: Recipe) -> boostax.config.Boost:
    """The techniques of a recipe around its optimizer, but for freezing."""
    scale, steps = recipe.loss_scale, recipe.optimizer_steps
    asked: dict[str, Any] = {"loss_scale": None if scale == "none" else "dynamic"}
    if not isinstance(scale, str):
        asked = {"static_loss_scale": scale}
    if recipe.accumulate > 1:
        asked["accumulate"] = recipe.accumulate
    if recipe.devices > 1:
        asked["reduce"] = _reduce(recipe)
    if recipe.evaluate == "averaged":
        asked["average_params"] = {"decay": 1 - 1 / max(2, steps // 20)}
    if recipe.finish != "none":
        # Over the second half of the run.
        size = min(recipe.value("finish_components") + 1, steps // 2)
        every = steps // 2 // size
        start = steps - every * size
        asked["dim_reduce"] = {"n_components": size - 1, "every": every, "start": start}
    return boostax.auto(asked)


def _reduce(recipe: Recipe) -> Reduce:
    # Norms and biases are few bytes: they travel whole.
    large = {"dense": "vectors"}
    settings: dict[str, dict[str, Any]] = {
        "top-k": large | {"density": recipe.value("density")},
        "threshold": large | {"threshold": 2.0, "relative": True},
        "random-k": large | {"density": recipe.value("density")},
        # Everyone's bits to all are exact, but grow with the devices.
        "sign": large | {"two_shot": recipe.devices > 4},
        "power-sgd": {"rank": recipe.value("rank")},
    }
    wire = None if recipe.wire == "float32" else recipe.wire
    # Of a codec that is not named here, its defaults.
    return Reduce(recipe.reduce, wire=wire, **settings.get(recipe.reduce, {}))


def optimizer(
    recipe: Recipe, *signal: optax.GradientTransformation
) -> optax.GradientTransformation:
    """What the techniques stand around: clipping and AdamW with a schedule."""
    steps = recipe.optimizer_steps
    warmup = max(1, steps // 10)
    # A schedule counts optimizer steps. The first is not at zero: it would be a step for nothing.
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=recipe.learning_rate / (warmup + 1),
        peak_value=recipe.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=recipe.learning_rate / 10,
    )
    clip = [optax.clip_by_global_norm(recipe.clip)] if recipe.clip else []
    matrices = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    adamw = optax.adamw(schedule, weight_decay=recipe.weight_decay, mask=matrices)
    return optax.chain(*signal, *clip, adamw)


def _check_devices(workload: Workload, recipe: Recipe) -> None:
    for name, alone in (("reduce", "mean"), ("wire", "float32")):
        value = getattr(recipe, name)
        if recipe.devices == 1 and value != alone:
            raise ValueError(
                f"boostax: --{name} must be {alone} on a single device, got {value}. --devices 4 "
                "has gradients to reduce."
            )
    slices = recipe.devices * recipe.microbatches
    if workload.batch_size % slices:
        raise ValueError(
            f"boostax: --batch-size must be divisible by devices x microbatches = "
            f"{recipe.devices} x {recipe.microbatches}, got {workload.batch_size}. "
            f"{slices * max(1, round(workload.batch_size / slices))} is the nearest that is."
        )


def _check_average(workload: Workload, recipe: Recipe) -> None:
    if recipe.evaluate == "params":
        return
    _, model_state = jax.eval_shape(workload.init, jax.random.key(0))
    if model_state is not None:
        raise ValueError(
            "boostax: --evaluate must be params with BatchNorm in the model, got averaged. Its "
            "statistics are those of the params, not of their average."
        )


def layer_groups(workload: Workload, recipe: Recipe) -> PyTree:
    """The group of each param; ``--freeze-groups`` of them, or 4, or as many as there are layers.

    Raises:
      ValueError: more groups than layers.
    """
    key = jax.random.key(0)
    params, state = jax.eval_shape(workload.init, key)
    order = boostax.freeze.forward_order(
        workload.loss_fn, params, workload.batch(0), key=key, model_state=state
    )
    # A block that is frozen whole saves its whole backward pass. Only a network of few blocks is
    # cut within them.
    asked = recipe.freeze_groups
    counts = range(_GROUPS, 1, -1) if asked is None else (asked,)
    *others, last = ((n, level) for n in counts for level in (1, None))
    for n, level in others:
        with contextlib.suppress(ValueError):
            return boostax.freeze.prefix_groups(params, n, order=order, level=level)
    with speaking_of("boostax", {"n": "--freeze-groups"}):
        return boostax.freeze.prefix_groups(params, last[0], order=order, level=last[1])


def _schedule(recipe: Recipe, groups: int) -> Any:
    """Of what is frozen; ValueError for a share that the kind cannot give with so many groups."""
    steps = recipe.optimizer_steps
    if recipe.freeze == "plateau":
        # Both averages start at zero, and the slow one takes 12 horizons, a fifth of the run, to
        # come within 5% of a norm that does not move. A group freezes at three looks in a row, a
        # tenth of the run: that leaves time for 8 groups, one after the other.
        return boostax.freeze.freeze_on_plateau(every=max(1, steps // 32))
    assert recipe.freeze != "none"
    # Exactly as long as the run: a step that is skipped or still gathers a window does not count,
    # so no call ever stands beyond the end.
    share = recipe.freeze_fraction
    schedule = boostax.freeze_schedule(recipe.freeze, total_steps=steps, frozen_fraction=share)
    with speaking_of("boostax", {"frozen_fraction": "--freeze-fraction"}):
        schedule.depths(groups)
    return schedule
