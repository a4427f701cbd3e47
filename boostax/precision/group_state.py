# SPDX-License-Identifier: Apache-2.0
"""What a loss scale per group keeps from step to step, and how it is found."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from boostax._core import checks, handshake, trees
from boostax._core.describe import Holds
from boostax._core.gate import counted, told_by
from boostax._core.groups import leaf_groups

PyTree = Any


class GroupLossScaleState(NamedTuple):
    """State of ``group_loss_scale``, for G groups.

    Attributes:
      table: f32 ``[G]``, what the factors move; the next scales are the powers of two below.
      measured: bool ``[G]``, whether a gradient that is not zero was seen (rule ``"measure"``).
      largest: f32 ``[G]``, largest magnitude in the group's last finite gradient, unscaled.
      nonfinite: f32 ``[G]``, elements that were not finite when last counted.
      underflow: f32 ``[G]``, elements that were zero or subnormal in f16 when last counted.
      entries: f32 ``[G]``, entries that were counted.
      until_count: i32, steps before the next count.
      overflow_group: i32, the group to blame for the last skipped step; -1 before the first.
      backoffs: i32 ``[G]``, how often the entry of the table was lowered for an overflow.
      floor_hits: i32 ``[G]``, how often it should have been and was at ``min_scale`` already.
      last_finite: bool, whether the last gradients were finite; False before the first.
      skipped_steps: i32, steps skipped since the start.
      skipped_in_a_row: i32, steps skipped since the last one that ran.
      inner_state: state of the inner transformation.
    """

    table: jax.Array
    measured: jax.Array
    largest: jax.Array
    nonfinite: jax.Array
    underflow: jax.Array
    entries: jax.Array
    until_count: jax.Array
    overflow_group: jax.Array
    backoffs: jax.Array
    floor_hits: jax.Array
    last_finite: jax.Array
    skipped_steps: jax.Array
    skipped_in_a_row: jax.Array
    inner_state: Any
    holds = Holds(
        (
            *("table", "measured", "largest", "nonfinite", "underflow", "entries"),
            *("until_count", "overflow_group", "backoffs", "floor_hits"),
        ),
        scale="table",
        powers=True,
    )

    @property
    def scales(self) -> jax.Array:
        """f32 ``[G]``, the scale of each group: the power of two below its entry of the table."""
        # The bits without those of the fraction; log2 and exp2 are not exact on every device.
        bits = lax.bitcast_convert_type(self.table, jnp.int32)
        return lax.bitcast_convert_type(bits & ~0x7FFFFF, jnp.float32)

    @property
    def scale(self) -> jax.Array:
        """f32, the scale of the last group, by which the loss is multiplied."""
        return self.scales[..., -1]

    def known_by(self) -> jax.Array:
        """The array by which a trace tells this scaler from others."""
        return self.table

    passed = taken = told_by("last_finite")

    def metrics(self) -> dict[str, jax.Array]:
        """Named scalars for ``boostax.metrics``; the underflow as a share of the elements."""
        found = {
            "loss_scale": self.scale,
            "last_finite": self.last_finite,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "overflow_group": self.overflow_group,
        }
        columns = {
            "scale": self.scales,
            "largest": self.largest,
            "nonfinite": self.nonfinite,
            "underflow": self.underflow / jnp.maximum(self.entries, 1),
            "backoffs": self.backoffs,
            "floor_hits": self.floor_hits,
        }
        for group in range(self.table.shape[-1]):
            found |= {f"group_{group}_{name}": x[..., group] for name, x in columns.items()}
        return found


def group_scales(opt_state: PyTree) -> jax.Array | None:
    """The scale of each group in the next step, for a loss function that crosses their boundaries.

    Args:
      opt_state: any optimizer state; the scaler may be nested anywhere in it.

    Returns:
      f32 ``[groups]``, powers of two; ``None`` when the state has no scaler by groups.

    Raises:
      ValueError: there are several of them, or one that not all gradients pass.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> labels = {"body": 0, "head": 1}
      >>> tx = boostax.precision.group_loss_scale(optax.sgd(0.1), labels, init_scale=3000.0)
      >>> state = tx.init({"body": jnp.ones(3), "head": jnp.ones(2)})
      >>> boostax.precision.group_scales(state).tolist()
      [2048.0, 2048.0]
    """
    found = scalers("group_scales", opt_state, GroupLossScaleState)
    if not found:
        return None
    scales = found[0].scales
    handshake.hand_on(found[0].table, scales)
    return scales


def scalers(who: str, opt_state: PyTree, *kinds: type) -> list[Any]:
    """The state of the one scaler of these kinds, or none; refuse several, and one for a part.

    The loss is multiplied as a whole: what goes past a scaler stays multiplied.
    """
    scaler = lambda x: isinstance(x, kinds)  # noqa: E731
    found = trees.find(opt_state, scaler)
    apart = optax.MaskedState, optax.ConditionallyTransformState
    partial = trees.find(opt_state, lambda x: isinstance(x, apart) and bool(trees.find(x, scaler)))
    if len(found) > 1 or partial:
        got = f"one in a {type(partial[0]).__name__}" if len(found) == 1 else len(found)
        raise ValueError(
            f"{who}: opt_state must hold one loss scaler that all gradients pass, got {got}. Put "
            "one around the whole optimizer, outside optax.partition, optax.masked and "
            "optax.conditionally_transform."
        )
    return found


def group_numbers(who: str, labels: Any, params: PyTree) -> tuple[list[int], int]:
    """The group of each leaf of ``params`` that is not masked, and the number of groups."""
    try:
        return leaf_groups(who, labels, params)
    except (TypeError, ValueError) as error:
        words = str(error).replace(f"{who}: groups must", f"{who}: labels must", 1)
        raise type(error)(words) from error


def check_labels(who: str, labels: Any) -> None:
    """Refuse what is wrong with labels whatever the params are."""
    found = jax.tree.leaves(labels)
    if not found:
        hint = "boostax.freeze.prefix_groups(params, n) makes n groups."
        allowed = "a tree of integers, a list of patterns, or a function of path and leaf"
        raise ValueError(checks.message(who, "labels", allowed, labels, hint))
    if not callable(labels) and not any(isinstance(label, str) for label in found):
        group_numbers(who, labels, labels)


def decided(state: Any, ok: jax.Array, inner_state: Any) -> Any:
    """A scaler's state after a step that ran (``ok``) or was skipped."""
    return state._replace(
        last_finite=ok,
        skipped_steps=counted(state.skipped_steps, ~ok),
        skipped_in_a_row=jnp.where(ok, 0, counted(state.skipped_in_a_row, ~ok)),
        inner_state=inner_state,
    )
