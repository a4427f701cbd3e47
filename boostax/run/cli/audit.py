"""``boostax audit module:function``: what a program of yours sends, keeps and wastes.

Parsed by the standard library alone, so that it runs where jax, optax and numpy are all there is.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

_USAGE = """\
The function builds the program: it returns it with its arguments, which may be
jax.ShapeDtypeStruct, such as (step, state, batch). With a parameter it is given the devices to
build it for: those of the target, or those at hand.
"""


class _Refused(Exception):
    """A message for people."""


def main(argv: Sequence[str]) -> int:
    """Print the audit; 1 if it is refused or a limit is passed."""
    given = _parser().parse_args(argv)
    try:
        return _run(given)
    except _Refused as error:
        print(f"boostax: {error}", file=sys.stderr)
        return 1


def _run(given: argparse.Namespace) -> int:
    if given.cpu_devices:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.cpu_devices)
    from boostax.inspect.audit import audit
    from boostax.inspect.targets import target_devices

    build = _function(given.program)
    try:
        devices = target_devices(given.target) if given.target else None
        program, *args = _built(build, devices)
        found = audit(program, *args, target=given.target, calls=given.calls)
    except (ValueError, TypeError, RuntimeError) as error:
        raise _Refused(str(error)) from error
    print(json.dumps(found.to_dict()) if given.json else found)
    if given.picture:
        found.save_picture(given.picture)
    values = {"findings": len(found.findings)}
    values |= {name: getattr(found, name) for name in ("reductions", "gathers", "temporaries")}
    limits = {name: getattr(given, f"max_{name}") for name in values}
    passed = [
        f"{name} {value:.2f}, more than {limits[name]:g}"
        for name, value in values.items()
        # What is not known (NaN) passes no limit.
        if limits[name] is not None and not value <= limits[name]
    ]
    for line in passed:
        print(f"boostax: audit: {line}", file=sys.stderr)
    return 1 if passed else 0


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    if not module or not function:
        raise _Refused(f"audit: program must be module:function, got {name!r}. train:program.")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise _Refused(f"audit: {name} could not be imported: {error}") from error


def _built(build: Any, devices: Any) -> tuple[Any, ...]:
    import jax

    wanted = inspect.signature(build).parameters if callable(build) else {}
    made: Any = build(devices or tuple(jax.devices())) if wanted else build()
    if not isinstance(made, tuple):
        raise _Refused(
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
    add("--max-reductions", type=float, help="per optimizer step, in multiples of the params")
    add("--max-gathers", type=float, help="likewise")
    add("--max-temporaries", type=float, help="in multiples of a device's params")
    add("--max-findings", type=int, help="0: nothing may be wasted")
    add("--cpu-devices", type=int, default=0, help="emulate so many devices at hand")
    add("--json", action="store_true", help="plain data on one line")
    add("--picture", help="a file to draw to; needs matplotlib")
    return parser
