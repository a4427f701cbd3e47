# SPDX-License-Identifier: Apache-2.0
"""State of a loss scale per group of layers, and the labels that make the groups."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from boostax._core import checks
from boostax._core.describe import Holds
from boostax._core.gate import told_by
from boostax._core.groups import leaf_groups
from boostax.precision.loss_scale import scales

PyTree = Any


class GroupLossScaleState(NamedTuple):
    """State of ``group_loss_scale``, for G groups.

    Attributes:
      table: f32 ``[G]``, what the factors move; the next scales are the powers of two below.
      largest: f32 ``[G]``, largest magnitude, unscaled, in the group's last gradient that was
        finite and not zero; 0 before the first.
      overflow_group: i32, the group to blame for the last skipped step; -1 before the first.
      last_finite: bool, whether the last gradients were finite; False before the first.
      skipped_steps: i32, steps skipped since the start.
      skipped_in_a_row: i32, steps skipped since the last one that ran.
      inner_state: state of the inner transformation.
    """

    table: jax.Array
    largest: jax.Array
    overflow_group: jax.Array
    last_finite: jax.Array
    skipped_steps: jax.Array
    skipped_in_a_row: jax.Array
    inner_state: Any
    holds = Holds(("table", "largest", "overflow_group"), scale="table", powers=True)

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
        """Return the array by which a trace tells this scaler from others."""
        return self.table

    passed = taken = told_by("last_finite")

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        fields = ("last_finite", "skipped_steps", "skipped_in_a_row", "overflow_group")
        found = {"loss_scale": self.scale} | {name: getattr(self, name) for name in fields}
        for group in range(self.table.shape[-1]):
            found[f"group_{group}_scale"] = self.scales[..., group]
            found[f"group_{group}_largest"] = self.largest[..., group]
        return found


def group_scales(opt_state: PyTree) -> jax.Array | None:
    """Return the scale of each group in the next step, for a loss that crosses their boundaries.

    Args:
      opt_state: any optimizer state; the scaler may be nested anywhere in it.

    Returns:
      f32 ``[groups]``, powers of two; ``None`` when the state has no scaler by groups.

    Raises:
      ValueError: there are several scalers, or one that not all gradients pass.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> labels = {"body": 0, "head": 1}
      >>> tx = boostax.precision.group_loss_scale(optax.sgd(0.1), labels, init_scale=3000.0)
      >>> state = tx.init({"body": jnp.ones(3), "head": jnp.ones(2)})
      >>> boostax.precision.group_scales(state).tolist()
      [2048.0, 2048.0]
    """
    return scales("group_scales", opt_state)[1]


def group_numbers(who: str, labels: Any, params: PyTree) -> tuple[list[int], int]:
    """Return the group of each leaf of ``params`` that is not masked, and the number of groups."""
    try:
        return leaf_groups(who, labels, params)
    except (TypeError, ValueError) as error:
        words = str(error).replace(f"{who}: groups must", f"{who}: labels must", 1)
        raise type(error)(words) from error


def check_labels(who: str, labels: Any) -> None:
    """Refuse what is wrong with labels whatever the params are."""
    found = jax.tree.leaves(labels)
    allowed = "a tree of integers, a list of patterns, or a function of path and leaf"
    hint = "boostax.freeze.prefix_groups(params, n) makes n groups."
    checks.require(who, "labels", labels, allowed, bool(found), hint)
    if not callable(labels) and not any(isinstance(label, str) for label in found):
        group_numbers(who, labels, labels)
