# SPDX-License-Identifier: Apache-2.0
"""Parts of a user's own in a configuration: factories by name, in the place of their role."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax

from boostax._core import checks
from boostax.chain.parts import read
from boostax.chain.roles import REDUCTIONS, UNKNOWN, role
from boostax.config.config import FACTORIES
from boostax.config.part import Part, Place, known

# Of each role the part of the configuration in whose place it stands; those of gates, around the
# reduction and inside the window.
_PLACES: Mapping[str, str] = {
    **dict.fromkeys((*REDUCTIONS, "delta", "own params"), "reduce"),
    **dict.fromkeys(("decay", "noise", "watch", "nothing", "norm clip", "clip"), "clip"),
    "centralize": "centralize",
    "check": "dim_reduce",
    "recorder": "dim_reduce",
    "window": "accumulate",
    "scaler": "loss_scale",
    "carry": "carry",
    "freeze": "freeze",
    "storage": "store",
}


# The part of the configuration behind which one is put, or in whose place it stands; the part.
Own = tuple[str, Part]


def owned(
    data: dict[str, Any], factories: Sequence[Callable[..., Any]]
) -> tuple[dict[str, Any], tuple[Own, ...]]:
    """What a dictionary says of these factories, and the rest of it."""
    found: list[Own] = []
    for factory in factories:
        name = getattr(factory, "__name__", repr(factory))
        hint, mine = "Keys name boostax's own without it.", name not in FACTORIES
        allowed, fits = "functions of your own", callable(factory) and mine
        checks.require("auto", "factories", factory, allowed, fits, hint)
        given = data.pop(name, None)
        if given is None or given is False:
            continue
        part: Any = type(name, (Part,), {}, factory=factory)
        options = {} if given is True else given
        known("auto", options, tuple(part.parameters(factory)), f"keys of {name}", "true for none.")
        made = part(**options)
        found.append((_place(name, made), made))
    return data, tuple(found)


def _place(name: str, part: Part) -> str:
    layer = part.layer(Place("axis", None))
    made: Any = layer(optax.identity()) if callable(layer) else layer
    what = role(read(made))
    hint = "What is of the optimizer belongs into it."
    if what == UNKNOWN:
        hint = f'@boostax.describe({name!r}, "clip") on its update says what it is.'
    allowed = "described with a role that has a place in a chain"
    checks.require("auto", name, what, allowed, what in _PLACES, hint)
    return _PLACES[what]
