# SPDX-License-Identifier: Apache-2.0
"""The role of each part: its effect on a gradient, which decides its position in a chain.

Roles are those of ``_core/describe.py``, and these of transformations in Optax:

==================== ==========================================================================
``peer window``      ``optax.MultiSteps``, the peer of ``accumulate``
``adder``            ``optax.apply_every``: adds up updates, and returns zeros in between
``hold``             ``optax.apply_if_finite``: skips like a scaler, but not for ever
``condition``        runs its inside in some calls, and passes gradients unchanged in the others
``mask``             runs its inside in some calls, and returns zeros in the others
``average``          lookahead and schedule-free: averages params, around an optimizer
``outer optimizer``  takes the gradient of every call, around another optimizer
``call schedule``    ``optax.inject_hyperparams`` with schedules: they count calls
==================== ==========================================================================
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from boostax._core.describe import closure
from boostax.chain.parts import Part

UNKNOWN = "unknown"
# A part that only combines others and does nothing itself.
COMBINATOR = "combinator"

# Optax's factories, which have no descriptions, by role.
_OPTAX: Mapping[str, str] = {
    COMBINATOR: "chain named_chain partition masked flatten",
    "peer window": "MultiSteps",
    "adder": "apply_every",
    "hold": "apply_if_finite",
    # Both depend on the step number; in the other steps the first passes gradients on, the second
    # returns zeros.
    "condition": "conditionally_transform",
    "mask": "conditionally_mask",
    # Wrappers of an optimizer that work in every call.
    "average": "schedule_free lookahead",
    "outer optimizer": "mechanize sam",
    "centralize": "centralize",
    "norm clip": "clip_by_global_norm adaptive_grad_clip",
    "clip": "clip clip_by_block_rms",
    "decay": "add_decayed_weights",
    "noise": "add_noise",
    "momentum": "trace ema",
    "moments": "normalize_by_update_norm",
    "sign": "scale_by_sign",
    "rate": "scale scale_by_learning_rate scale_by_polyak scale_by_backtracking_linesearch "
    "scale_by_zoom_linesearch scale_by_trust_ratio scale_by_param_block_norm "
    "scale_by_param_block_rms",
    "schedule": "scale_by_schedule",
    "zero NaN": "zero_nans",
    "zero": "set_to_zero",
    "watch": "snapshot monitor measure_with_ema",
    "nothing": "identity keep_params_nonnegative",
}
_ROLES = {name: role for role, names in _OPTAX.items() for name in names.split()}

# Names for several roles at once.
GATES = ("scaler", "window", "peer window", "hold", "check", "mask")
REDUCTIONS = ("mean", "adasum", "compressed")
CLIPS = ("norm clip", "clip")
RATES = ("rate", "schedule")
MEMORIES = ("momentum", "moments")


def role(part: Part) -> str:
    """Return the role in the description of a part, or the known role of one of Optax."""
    if part.description is not None:
        return part.description.role
    if part.package != "optax":
        return UNKNOWN
    if part.name == "inject_hyperparams" and part.inner:
        return "call schedule" if part.settings.get("sched_hps") else COMBINATOR
    return _ROLES.get(part.name, "moments" if part.name.startswith("scale_by_") else UNKNOWN)


def sign(part: Part) -> float:
    """Return the sign by which a part multiplies its input; NaN if it is unknown."""
    kind, factor = role(part), 1
    if kind == UNKNOWN:
        return math.nan
    if kind == "subspace" or part.name in ("scale_by_cocob", "scale_by_madgrad"):
        factor = -1
    elif part.name == "scale":
        factor = part.settings.get("step_size")
    elif kind == "schedule":
        # Optax writes a descending step as ``lambda count: m * schedule(count)``, with ``m`` -1.
        fn: Any = part.settings.get("step_size_fn")
        ours = getattr(fn, "__globals__", {}).get("__name__", "").startswith("optax.")
        factor = closure(fn).get("m") if ours else None
    return float(np.sign(number(factor)))


def number(value: Any) -> float:
    """Return a setting as a number; NaN if it is not one, such as a schedule."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
