"""From a workload and a recipe to an optimizer, a train step and its first state."""

import contextlib
import dataclasses
import math
from collections.abc import Generator
from typing import Any

import jax
import optax

import boostax
from boostax._core import checks
from boostax.autoboost.reduction import vectors
from boostax.run.cli.finish import check_finish, recorder
from boostax.run.cli.freezing import check_freezing, freeze_by_schedule, layer_groups, signal
from boostax.run.cli.recipe import CODECS, Recipe
from boostax.run.workloads import Workload

AXIS = "data"


class Refusal(Exception):
    """Something in the arguments or on the disk does not allow the run; the message says what."""


@contextlib.contextmanager
def refusing() -> Generator[None]:
    """Turn the errors of argument checks and files into a `Refusal`, which shows no traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        raise Refusal(str(error)) from error


@dataclasses.dataclass(frozen=True)
class Built:
    """A train step and what came in: ``init(seed)`` makes its first state."""

    workload: Workload
    step: boostax.TrainStep
    optimizer_steps: int

    def init(self, seed: int) -> boostax.TrainState:
        """The first state; parameters and the key of the step come from ``seed``."""
        params_key, step_key = jax.random.split(jax.random.key(seed))
        params, model_state = jax.jit(self.workload.init)(params_key)
        return self.step.init(params, key=step_key, model_state=model_state)

    def evaluate(self, state: boostax.TrainState) -> dict[str, float]:
        """Held-out scalars under names of their own."""
        found = self.workload.evaluate(state.params, state.model_state)
        return {f"held_out_{name}": value for name, value in found.items()}


def require_devices(count: int, processes: int = 1) -> int:
    """Make sure that there are ``count`` devices, emulated ones on CPU; before JAX is first used.

    Returns:
      How many to use: of several processes at least one each.

    Raises:
      ValueError: if there are fewer, or the processes cannot have equally many.
    """
    checks.positive_int("boostax", "--devices", count, "1 trains on a single device.")
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
    _check(workload, recipe)
    mesh = None
    axis = None
    if recipe.devices > 1:
        axis = AXIS
        mesh = jax.make_mesh(
            (recipe.devices,),
            (axis,),
            (jax.sharding.AxisType.Auto,),
            devices=_devices(recipe.devices),
        )
    optimizer_steps = math.ceil(recipe.steps / recipe.accumulate)
    groups = None if recipe.freeze == "none" else layer_groups(workload, recipe)
    tx = _optimizer(recipe, optimizer_steps, groups)
    if recipe.accumulate > 1:
        tx = boostax.accumulate(tx, every=recipe.accumulate, axis_name=axis)
    if recipe.loss_scale == "dynamic":
        tx = boostax.dynamic_loss_scale(tx, axis_name=axis)
    elif recipe.loss_scale != "none":
        tx = boostax.static_loss_scale(tx, recipe.loss_scale, axis_name=axis)
    if groups is not None:
        tx = freeze_by_schedule(tx, groups, recipe, optimizer_steps)
    step = boostax.make_train_step(
        workload.loss_fn,
        tx,
        mesh=mesh,
        axis_name=axis,
        microbatches=recipe.microbatches,
        has_aux=True,
    )
    return Built(workload, step, optimizer_steps)


def _optimizer(recipe: Recipe, optimizer_steps: int, groups: Any) -> optax.GradientTransformation:
    warmup = max(1, optimizer_steps // 10)
    # A schedule counts optimizer steps. The first is not at zero: it would be a step for nothing.
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=recipe.learning_rate / (warmup + 1),
        peak_value=recipe.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(optimizer_steps, warmup + 1),
        end_value=recipe.learning_rate / 10,
    )
    parts: list[optax.GradientTransformation] = []
    path = [] if recipe.finish == "none" else [recorder(recipe, optimizer_steps)]
    if recipe.freeze == "plateau":
        parts.append(signal(groups, optimizer_steps))
    if recipe.clip:
        parts.append(optax.clip_by_global_norm(recipe.clip))
    parts.append(optax.adamw(schedule, weight_decay=recipe.weight_decay, mask=_matrices))
    if recipe.devices == 1:
        return optax.chain(*path, *parts)
    if recipe.reduce == "adasum-delta":
        delta = boostax.adasum_delta(optax.chain(*parts), AXIS, wire_dtype=_wire(recipe))
        return optax.chain(*path, delta) if path else delta
    return optax.chain(*path, reduction(recipe), *parts)


def reduction(recipe: Recipe) -> optax.GradientTransformation:
    """What makes one gradient of the devices' own; of adasum-delta, adasum."""
    match recipe.reduce:
        case "top-k":
            return boostax.top_k_reduce(AXIS, density(recipe), dense=vectors)
        case "threshold":
            return boostax.threshold_reduce(AXIS, 2.0, relative=True, dense=vectors)
        case "random-k":
            return boostax.random_k_reduce(AXIS, density(recipe), dense=vectors)
        case "int8":
            return boostax.int8_reduce(AXIS)
        case "int16":
            return boostax.int16_reduce(AXIS)
        case "sign":
            # Everyone's bits to all are exact, but grow with the devices.
            return boostax.sign_reduce(AXIS, two_shot=recipe.devices > 4, dense=vectors)
        case "power-sgd":
            return boostax.power_sgd_reduce(AXIS, rank(recipe))
        case "mean":
            return boostax.all_reduce(AXIS, dtype=_wire(recipe))
        case "adasum" | "adasum-delta":
            return boostax.adasum(AXIS, wire_dtype=_wire(recipe))


def density(recipe: Recipe) -> float:
    """What ``--density`` is where nobody says."""
    return 0.01 if recipe.density is None else recipe.density


def rank(recipe: Recipe) -> int:
    """What ``--rank`` is where nobody says."""
    return 2 if recipe.rank is None else recipe.rank


def _wire(recipe: Recipe) -> str | None:
    return None if recipe.wire == "float32" else recipe.wire


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _check(workload: Workload, recipe: Recipe) -> None:
    for name, hint in (
        ("steps", "It counts calls of the train step."),
        ("accumulate", "1 takes an optimizer step at every call."),
        ("microbatches", "1 passes each batch through the model as a whole."),
    ):
        checks.positive_int("boostax", f"--{name}", getattr(recipe, name), hint)
    rate, hint = recipe.learning_rate, "0.002 is the default."
    checks.number("boostax", "--learning-rate", rate, "greater than 0", lambda x: x > 0, hint)
    for option, value in (("--weight-decay", recipe.weight_decay), ("--clip", recipe.clip)):
        checks.number("boostax", option, value, "at least 0", lambda x: x >= 0, "0 turns it off.")
    for name, alone in (("reduce", "mean"), ("wire", "float32")):
        if recipe.devices == 1 and getattr(recipe, name) != alone:
            raise ValueError(
                f"boostax: --{name} must be {alone} on a single device, got "
                f"{getattr(recipe, name)}. --devices 4 has gradients to reduce."
            )
    _check_reduction(recipe)
    check_freezing(recipe)
    check_finish(recipe, math.ceil(recipe.steps / recipe.accumulate))
    slices = recipe.devices * recipe.microbatches
    if workload.batch_size % slices:
        raise ValueError(
            f"boostax: --batch-size must be divisible by devices x microbatches = "
            f"{recipe.devices} x {recipe.microbatches}, got {workload.batch_size}. "
            f"{slices * max(1, round(workload.batch_size / slices))} is the nearest that is."
        )


def _check_reduction(recipe: Recipe) -> None:
    if recipe.wire != "float32" and recipe.reduce in CODECS:
        raise ValueError(
            f"boostax: --wire must be float32 with --reduce {recipe.reduce}, got {recipe.wire}. "
            f"{recipe.reduce} decides itself what travels."
        )
    for name, users in (("density", ("top-k", "random-k")), ("rank", ("power-sgd",))):
        if recipe.reduce not in users:
            allowed = f"left out with --reduce {recipe.reduce}"
            hint = f"It is for --reduce {' and '.join(users)}."
            checks.absent("boostax", f"--{name}", getattr(recipe, name), allowed, hint)
    share, hint = density(recipe), "0.01 sends one entry in a hundred."
    checks.number("boostax", "--density", share, "in (0, 1]", lambda x: 0 < x <= 1, hint)
    checks.positive_int("boostax", "--rank", rank(recipe), "1, 2 or 4 are usual.")
