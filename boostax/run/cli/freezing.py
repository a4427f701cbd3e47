"""What ``--freeze`` freezes, and when."""

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import optax

import boostax
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
        schedule = boostax.freeze_on_plateau(every=max(1, steps // 32))
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
    return boostax.group_signal(groups, horizon=max(1, optimizer_steps // 64))


@contextlib.contextmanager
def _speaking_of(argument: str, option: str) -> Generator[None]:
    """Name the option in errors about the argument that it became."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace(argument, f"boostax: {option}")) from error
