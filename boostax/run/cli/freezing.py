"""What ``--freeze`` freezes, and when."""

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import optax

import boostax
from boostax._core import checks
from boostax._core.groups import group_count
from boostax.freeze.scheduled import ScheduledFreeze
from boostax.run.cli.recipe import Recipe
from boostax.run.workloads import Workload

PyTree = Any
_GROUPS = 4


def layer_groups(workload: Workload, recipe: Recipe) -> PyTree:
    """The group of each param; ``--freeze-groups`` of them, or 4, or as many as there are layers.

    Raises:
      ValueError: more groups than layers.
    """
    shapes: Any = jax.eval_shape(workload.init, jax.random.key(0))
    params, model_state = shapes
    order = boostax.forward_order(
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
            return boostax.prefix_groups(params, n, order=order, level=level)
    with _speaking_of("prefix_groups: n", "--freeze-groups"):
        return boostax.prefix_groups(params, last[0], order=order, level=last[1])


def freeze_by_schedule(
    tx: optax.GradientTransformation, groups: PyTree, recipe: Recipe, optimizer_steps: int
) -> ScheduledFreeze:
    """The whole optimizer, gates included, with the layers frozen that the recipe asks for.

    Raises:
      ValueError: a share of frozen steps that the kind cannot give with so many groups.
    """
    if recipe.freeze == "plateau":
        # Both averages start at zero, and the slow one takes 12 horizons, a fifth of the run, to
        # come within 5% of a norm that does not move. A group freezes at three looks in a row, a
        # tenth of the run: that leaves time for 8 groups, one after the other.
        every = max(1, optimizer_steps // 32)
        return boostax.scheduled_freeze(tx, groups, boostax.freeze_on_plateau(every=every))
    assert recipe.freeze != "none"
    # Exactly as long as the run: a step that is skipped or still gathers a window does not count,
    # so no call ever stands beyond the end.
    schedule = boostax.freeze_schedule(
        recipe.freeze, total_steps=optimizer_steps, frozen_fraction=recipe.freeze_fraction
    )
    with _speaking_of("freeze_schedule: frozen_fraction", "--freeze-fraction"):
        schedule.depths(group_count(groups))
    return boostax.scheduled_freeze(tx, groups, schedule)


def signal(groups: PyTree, optimizer_steps: int) -> optax.GradientTransformation:
    """What ``--freeze plateau`` looks at, averaged over a sixty-fourth of the run."""
    return boostax.group_signal(groups, horizon=max(1, optimizer_steps // 64))


def check_freezing(recipe: Recipe) -> None:
    """Refuse options of ``--freeze`` that make no sense."""
    for option, value in (
        ("--freeze-groups", recipe.freeze_groups),
        ("--freeze-fraction", recipe.freeze_fraction),
    ):
        if recipe.freeze == "none":
            hint = "--freeze interval freezes some of the layers on some of the steps."
            checks.absent("boostax", option, value, "left out without --freeze", hint)
    groups, fraction = recipe.freeze_groups, recipe.freeze_fraction
    if groups is not None and groups < 2:
        hint = "The last group always trains."
        raise ValueError(checks.message("boostax", "--freeze-groups", "at least 2", groups, hint))
    option = "--freeze-fraction"
    if recipe.freeze == "plateau":
        hint = "It freezes a group when its gradients have settled."
        checks.absent("boostax", option, fraction, "left out with --freeze plateau", hint)
    if fraction is not None:
        hint = "0.3 freezes something on about 30% of the steps."
        checks.number("boostax", option, fraction, "in [0, 1)", lambda x: 0 <= x < 1, hint)
    if recipe.freeze == "plateau" and recipe.reduce == "adasum-delta":
        raise ValueError(
            "boostax: --freeze must not be plateau with --reduce adasum-delta, got plateau. Its "
            "gradients stay each device's own, and all must freeze alike; --reduce adasum does."
        )


@contextlib.contextmanager
def _speaking_of(argument: str, option: str) -> Generator[None]:
    """Name the option in errors about the argument that it became."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace(argument, f"boostax: {option}")) from error
