# SPDX-License-Identifier: Apache-2.0
"""The changes that ``auto("measure", ...)`` tries unless it is told others."""

import contextlib
from collections.abc import Mapping
from typing import Any

from boostax._core.groups import prefix_groups
from boostax.config.config import BoostConfig
from boostax.config.trial import Setting
from boostax.freeze.order import forward_order

Change = Mapping[str, Any]


def default_candidates(setting: Setting, base: BoostConfig) -> dict[str, Change]:
    """The changes that are tried unless others are given: see ``measure``."""
    half = {"spec": "O1", "dtype": "float16"}
    found: dict[str, Change] = {
        "bfloat16": {"policy": {"spec": "O1", "dtype": "bfloat16"}},
        "float16": {"policy": half, "loss_scale": "dynamic"},
        "micro-batches": {"microbatches": 4 * base.microbatches},
        "centralize": {"centralize": True},
        "freeze": {"freeze": _freeze(setting)},
        "bfloat16 wire": {"reduce": {"kind": "mean", "wire": "bfloat16"}},
        "int8": {"reduce": {"kind": "int8"}},
        "top-k": {"reduce": {"kind": "top-k", "density": 0.01, "dense": "vectors"}},
        "power-sgd": {"reduce": {"kind": "power-sgd"}},
        "adasum": {"reduce": {"kind": "adasum"}},
        "adasum-delta": {"reduce": {"kind": "adasum-delta"}},
        "local": {"reduce": {"kind": "local", "every": 4}},
    }
    if setting.plain.replicas == 1:
        found = {name: change for name, change in found.items() if "reduce" not in change}
    if base.freeze is not None or found["freeze"]["freeze"] is None:
        del found["freeze"]
    return {name: change for name, change in found.items() if not _is_on(change, base)}


def _is_on(change: Change, base: BoostConfig) -> bool:
    try:
        return BoostConfig.from_dict(change, base) == base
    except (ValueError, TypeError):
        return False


def _freeze(setting: Setting) -> Change | None:
    """Four groups in the order of the forward pass, or fewer; ``None`` with a single layer."""
    params, order = setting.params, None
    given = {name: value for name, value in setting.of_init.items() if value is not None}
    # A loss that names an axis cannot be traced here; then the tree's own order has to do.
    with contextlib.suppress(ValueError, TypeError, NameError):
        order = tuple(forward_order(setting.loss_fn, params, setting.batch(0), **given))
    for groups in (4, 3, 2):
        with contextlib.suppress(ValueError):
            ordered = prefix_groups(params, groups, order=order)
            told = {} if ordered == prefix_groups(params, groups) else {"order": order}
            return {"kind": "interval", "groups": groups, **told}
    return None
