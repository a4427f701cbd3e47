"""From a workload and a recipe to an optimizer, a train step and its first state."""

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

import jax
import optax

import boostax
from boostax._core.groups import group_count
from boostax.autoboost.part import Place
from boostax.autoboost.reduction import Reduce
from boostax.freeze.scheduled import ScheduledFreeze
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
        return self.judge(state.params, state.model_state)

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


def _devices(count: int) -> list[Any]:
    """The first ones, as many from every process."""
    each = count // jax.process_count()
    taken: dict[int, list[Any]] = {}
    for device in jax.devices():
        taken.setdefault(device.process_index, []).append(device)
    return [device for index in sorted(taken) for device in taken[index][:each]]


def build(workload: Workload, recipe: Recipe) -> Built:
    """The train step of a recipe; raises ValueError or TypeError where it makes no sense."""
    check_options(recipe)
    _check_devices(workload, recipe)
    axis = AXIS if recipe.devices > 1 else None
    mesh = None
    if axis is not None:
        auto, devices = (jax.sharding.AxisType.Auto,), _devices(recipe.devices)
        mesh = jax.make_mesh((recipe.devices,), (axis,), auto, devices=devices)
    groups = None if recipe.freeze == "none" else layer_groups(workload, recipe)
    tx = _optimizer(recipe, groups)
    if recipe.accumulate > 1:
        tx = boostax.accumulate(tx, every=recipe.accumulate, axis_name=axis)
    tx = scaled(tx, recipe, axis)
    if groups is not None:
        tx = freeze_by_schedule(tx, groups, recipe)
    return Built(workload, recipe, train_step(workload, tx, mesh, recipe.microbatches))


def train_step(
    workload: Workload, tx: optax.GradientTransformation, mesh: Any, microbatches: int
) -> boostax.train.TrainStep:
    """One call of an optimizer on the loss of a workload."""
    axis = None if mesh is None else AXIS
    return boostax.make_train_step(
        workload.loss_fn, tx, mesh=mesh, axis_name=axis, microbatches=microbatches, has_aux=True
    )


def scaled(
    tx: optax.GradientTransformation, recipe: Recipe, axis: Any
) -> optax.GradientTransformation:
    """Inside the loss scaler that the recipe asks for, if any."""
    if recipe.loss_scale == "none":
        return tx
    if recipe.loss_scale == "dynamic":
        return boostax.dynamic_loss_scale(tx, axis_name=axis)
    return boostax.static_loss_scale(tx, recipe.loss_scale, axis_name=axis)


def _optimizer(recipe: Recipe, groups: Any) -> optax.GradientTransformation:
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
    path = [] if recipe.finish == "none" else [recorder(recipe)]
    parts: list[optax.GradientTransformation] = []
    if recipe.freeze == "plateau":
        parts.append(signal(groups, steps))
    if recipe.clip:
        parts.append(optax.clip_by_global_norm(recipe.clip))
    parts.append(optax.adamw(schedule, weight_decay=recipe.weight_decay, mask=_matrices))
    if recipe.devices == 1:
        return optax.chain(*path, *parts)
    if recipe.reduce == "adasum-delta":
        delta = boostax.reduce.adasum_delta(optax.chain(*parts), AXIS, wire_dtype=_wire(recipe))
        return optax.chain(*path, delta) if path else delta
    return optax.chain(*path, reduction(recipe), *parts)


def recorder(recipe: Recipe) -> optax.GradientTransformation:
    """For ``--finish``: one snapshot more than directions, over the second half of the run."""
    steps = recipe.optimizer_steps
    size = min(recipe.value("finish_components") + 1, steps // 2)
    every = steps // 2 // size
    return boostax.subspace.record_trajectory(size, every=every, start=steps - every * size)


def reduction(recipe: Recipe) -> optax.GradientTransformation:
    """What makes one gradient of the devices' own; of adasum-delta, adasum."""
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
    # Of a codec that is not named here, its defaults.
    kind = recipe.reduce.removesuffix("-delta")
    layer: Any = Reduce(kind, wire=_wire(recipe), **settings.get(kind, {})).layer(Place(AXIS, None))
    return layer


def _wire(recipe: Recipe) -> str | None:
    return None if recipe.wire == "float32" else recipe.wire


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


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


def layer_groups(workload: Workload, recipe: Recipe) -> PyTree:
    """The group of each param; ``--freeze-groups`` of them, or 4, or as many as there are layers.

    Raises:
      ValueError: more groups than layers.
    """
    shapes: Any = jax.eval_shape(workload.init, jax.random.key(0))
    params, model_state = shapes
    order = boostax.freeze.forward_order(
        workload.loss_fn,
        params,
        workload.batch(0),
        key=jax.random.key(0),
        model_state=model_state,
    )
    # A block that is frozen whole saves its whole backward pass. Only a network of few blocks is
    # cut within them.
    asked = recipe.freeze_groups
    counts = range(_GROUPS, 1, -1) if asked is None else (asked,)
    *others, last = ((n, level) for n in counts for level in (1, None))
    for n, level in others:
        with contextlib.suppress(ValueError):
            return boostax.freeze.prefix_groups(params, n, order=order, level=level)
    with _speaking_of("prefix_groups: n", "--freeze-groups"):
        return boostax.freeze.prefix_groups(params, last[0], order=order, level=last[1])


def freeze_by_schedule(
    tx: optax.GradientTransformation, groups: PyTree, recipe: Recipe
) -> ScheduledFreeze:
    """The whole optimizer, gates included, with the layers frozen that the recipe asks for.

    Raises:
      ValueError: a share of frozen steps that the kind cannot give with so many groups.
    """
    steps = recipe.optimizer_steps
    if recipe.freeze == "plateau":
        # Both averages start at zero, and the slow one takes 12 horizons, a fifth of the run, to
        # come within 5% of a norm that does not move. A group freezes at three looks in a row, a
        # tenth of the run: that leaves time for 8 groups, one after the other.
        schedule = boostax.freeze.freeze_on_plateau(every=max(1, steps // 32))
        return boostax.scheduled_freeze(tx, groups, schedule)
    assert recipe.freeze != "none"
    # Exactly as long as the run: a step that is skipped or still gathers a window does not count,
    # so no call ever stands beyond the end.
    schedule = boostax.freeze_schedule(
        recipe.freeze, total_steps=steps, frozen_fraction=recipe.freeze_fraction
    )
    with _speaking_of("freeze_schedule: frozen_fraction", "--freeze-fraction"):
        schedule.depths(group_count(groups))
    return boostax.scheduled_freeze(tx, groups, schedule)


def signal(groups: PyTree, optimizer_steps: int) -> optax.GradientTransformation:
    """What ``--freeze plateau`` looks at, averaged over a sixty-fourth of the run."""
    return boostax.freeze.group_signal(groups, horizon=max(1, optimizer_steps // 64))


@contextlib.contextmanager
def _speaking_of(argument: str, option: str) -> Generator[None]:
    """Name the option in errors about the argument that it became."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace(argument, f"boostax: {option}")) from error
