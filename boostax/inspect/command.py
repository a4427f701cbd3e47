# SPDX-License-Identifier: Apache-2.0
"""Command ``boostax audit module:function``: print what a program sends, keeps and wastes.

The standard library parses the arguments, so that it runs where jax, optax and numpy are all.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

from boostax_command import held_back

_USAGE = """\
The function builds the program: it returns it with its arguments, which may be
jax.ShapeDtypeStruct, such as (step, state, batch). With a parameter it is given the devices to
build it for: those of the target, or those at hand.
"""

# What may be limited, and in which units.
_LIMITS = {
    "reductions": "per optimizer step, in multiples of the params",
    "gathers": "likewise",
    "temporaries": "in multiples of a device's params",
    "findings": "0: nothing may be wasted",
}


class Refusal(Exception):
    """An argument or a file that does not allow the audit; the message says which."""


def run(argv: Sequence[str]) -> int:
    """Print the audit; return 1 if a limit is passed or the program cannot be audited."""
    given = _parser().parse_args(argv)
    try:
        with held_back():
            found = _audited(given)
    except Refusal as refusal:
        complain(f"boostax: {str(refusal).removeprefix('boostax: ')}")
        return 1
    print(json.dumps(found.to_dict()) if given.json else found)
    passed = 0
    if found.window and given.max_reductions is not None:
        said = f"a call is not an optimizer step: {found.window} is a window's. Say --calls"
        complain(f"boostax: audit: {said}, the calls of one.")
        passed = 1
    for name in _LIMITS:
        value, limit = getattr(found, name), getattr(given, f"max_{name}")
        value = len(value) if name == "findings" else value
        # What is not known (NaN) passes no limit.
        if limit is not None and not value <= limit:
            complain(f"boostax: audit: {name} {value:.2f}, more than {limit:g}")
            passed = 1
    return passed


def complain(words: object) -> None:
    """Print one line on standard error."""
    print(words, file=sys.stderr, flush=True)


def _audited(given: argparse.Namespace) -> Any:
    import jax

    # A plugin for devices that are not here fails, and then compiles for none either.
    if given.cpu_devices or (given.target and not getattr(jax.config, "jax_platforms", None)):
        jax.config.update("jax_platforms", "cpu")
    if given.cpu_devices:
        jax.config.update("jax_num_cpu_devices", given.cpu_devices)
    from boostax.inspect.audit import audit
    from boostax.inspect.targets import target_devices

    build = _function(given.program)
    try:
        devices = target_devices(given.target) if given.target else None
        program, *args = _built(build, devices)
        return audit(program, *args, target=given.target, calls=given.calls)
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        raise Refusal(str(error)) from error


def _function(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        found = pkgutil.resolve_name(name)
    except (ValueError, ImportError, AttributeError) as error:
        raise Refusal(f"audit: {name} could not be imported: {error}") from error
    if not callable(found):
        raise Refusal(f"audit: program must be module:function, got {name!r}. train:program.")
    return found


def _built(build: Any, devices: Any) -> tuple[Any, ...]:
    import jax

    wanted = inspect.signature(build).parameters
    made: Any = build(devices or tuple(jax.devices())) if wanted else build()
    if not isinstance(made, tuple):
        raise Refusal(
            "audit: the function must return the program with its arguments, got "
            f"{type(made).__name__}. Return (step, state, batch)."
        )
    return made


def _parser() -> argparse.ArgumentParser:
    # It keeps the line breaks of the text.
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "boostax audit", description=__doc__, epilog=_USAGE, formatter_class=form
    )
    add = parser.add_argument
    add("program", metavar="module:function", help="a function that builds the program")
    add("--target", help="v5e:2x4, v5e:4x4*2 (two slices), h100:1x1x8; by default what is at hand")
    add("--calls", type=int, default=1, help="calls per optimizer step: the window's length")
    for name, meaning in _LIMITS.items():
        add(f"--max-{name}", type=int if name == "findings" else float, help=meaning)
    add("--cpu-devices", type=int, default=0, help="emulate so many devices at hand")
    add("--json", action="store_true", help="plain data on one line")
    return parser
