# SPDX-License-Identifier: Apache-2.0
"""Command ``boostax audit module:function``: print the audit of a compiled program.

The function returns the program and its arguments, such as (step, state, batch); arguments may be
jax.ShapeDtypeStruct. If the function has a parameter, it is called with the devices to build for:
the target's devices, or the present devices.
"""

import argparse
import contextlib
import inspect
import json
import math
import os
import pathlib
import pkgutil
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from traceback import walk_tb
from typing import Any

import jax

from boostax.auditing import waste
from boostax.auditing.adapter import checks
from boostax.auditing.audit import Audit, audit
from boostax.auditing.targets import target_devices

# The counts that can be limited, and their units.
_LIMITS = {
    "reductions": "per optimizer step, in multiples of the params",
    "gathers": "likewise",
    "temporaries": "in multiples of a device's params",
    "findings": "0: nothing may be wasted",
}


def run(argv: Sequence[str]) -> int:
    """Print the audit and return the exit code of ``boostax.__main__.main``."""
    if "--forms" in argv:
        print(f"boostax: {checks.replacement('boostax audit --forms')}", file=sys.stderr)
        return 2
    given = _parser().parse_args(argv)
    try:
        with held_back():
            found = _audited(given)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"boostax: {str(error).removeprefix('boostax: ')}", file=sys.stderr)
        return 1
    print(json.dumps(found.to_dict()) if given.json else found)
    passed = list(_passed(given, found))
    for words in passed:
        print(f"boostax: audit: {words}", file=sys.stderr)
    return min(1, len(passed))


def _passed(given: argparse.Namespace, found: Audit) -> Iterator[str]:
    """Yield the limits that are exceeded."""
    if found.window and given.max_reductions is not None:
        step = f"a call is not an optimizer step: {found.window} is a window's."
        yield f"{step} Say --calls, the calls of one."
    limits = [name for name in _LIMITS if getattr(given, f"max_{name}") is not None]
    wanted = len(target_devices(given.target)) if given.target else given.cpu_devices
    if limits and found.devices < wanted:
        said = f"{found.devices} device{'s' * (found.devices > 1)}, of {wanted}"
        yield f"{said}: the arguments have no shardings over more"
    elif {"reductions", "gathers"} & {*limits} and found.devices == 1:
        yield "one device reduces nothing: say --cpu-devices or --target"
    for name in limits:
        value, limit = getattr(found, name), getattr(given, f"max_{name}")
        value = len(value) if name == "findings" else value
        # An unknown count (NaN, infinite) exceeds every limit.
        if not value <= limit:
            loops = f"the turns of {', '.join(found.unknown_loops)} are not: say --turns"
            why = f"not known, as {loops if value == math.inf else 'the params are not'}"
            yield f"{name} {f'{value:.2f}, more than {limit:g}' if math.isfinite(value) else why}"


@contextlib.contextmanager
def held_back() -> Generator[None]:
    """Hold back what compilers write to the stderr descriptor; print it on a failure of others.

    Python's writes to ``sys.stderr``, such as warnings, are not held back.
    """
    with tempfile.TemporaryFile() as held, os.fdopen(os.dup(2), "w", buffering=1) as shown:
        ours = shown if sys.stderr is sys.__stderr__ else sys.stderr
        os.dup2(held.fileno(), 2)
        try:
            with contextlib.redirect_stderr(ours):
                yield
        except BaseException as error:
            raised = [frame.f_globals["__name__"] for frame, _ in walk_tb(error.__traceback__)]
            if error.__cause__ or not raised[-1].startswith("boostax."):
                held.seek(0)
                shown.write(held.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(shown.fileno(), 2)


def _audited(given: argparse.Namespace) -> Audit:
    # A plugin without its devices fails to start, and then cannot compile.
    if given.cpu_devices or (given.target and not getattr(jax.config, "jax_platforms", None)):
        jax.config.update("jax_platforms", "cpu")
    if given.cpu_devices:
        jax.config.update("jax_num_cpu_devices", given.cpu_devices)
    build = _function(given.program)
    devices = target_devices(given.target) if given.target else ()
    wanted = inspect.signature(build).parameters.values()
    needed = [x.name for x in wanted if x.default is x.empty and not str(x).startswith("*")]
    if hasattr(build, "lower") or len(needed) > 1:
        raise TypeError(_step(given.program, needed))
    made = build(devices or tuple(jax.devices())) if wanted else build()
    if not isinstance(made, tuple):
        said = "audit: the function must return the program with its arguments, got"
        raise TypeError(f"{said} {type(made).__name__}. Return (step, state, batch).")
    names = "target", "params", "calls", "turns", "network"
    return audit(*made, **{name: getattr(given, name) for name in names})


def _step(name: str, arguments: Sequence[str]) -> str:
    """Return the error for a step given instead of a function that builds it, with example code."""
    module, _, step = name.replace(".py:", ":").replace("/", ".").rpartition(":")
    made = "\n".join(f"    {x} = jax.ShapeDtypeStruct((64, 64), 'float32')" for x in arguments)
    listed = ", ".join(arguments)
    return waste.WORDS["step"].format(name=name, module=module, step=step, made=made, listed=listed)


def _function(name: str) -> Any:
    module, colon, attribute = name.rpartition(":")
    path = pathlib.Path(module.removesuffix(".py").replace(".", "/") + ".py").absolute()
    # A file belongs to the packages around it, and may import modules beside the outermost package.
    root = next(x for x in path.parents if not x.joinpath("__init__.py").exists())
    if module.endswith(".py"):
        if not path.exists():
            raise ImportError(f"audit: {path.name} is not in {path.parent}.")
        module = ".".join(path.relative_to(root).with_suffix("").parts)
    sys.path[:0] = [os.getcwd(), str(root)]
    try:
        found = pkgutil.resolve_name(f"{module}:{attribute}") if colon else None
    except (ValueError, ImportError, AttributeError) as error:
        raise ImportError(f"audit: {name} could not be imported: {error}") from error
    if not callable(found) or inspect.isbuiltin(found):
        raise TypeError(f"audit: program must be module:function in Python, got {name!r}.")
    return found


def _parser() -> argparse.ArgumentParser:
    # This formatter keeps the line breaks of the text.
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("boostax audit", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("program", metavar="module:function", help="a function that builds the program")
    add("--target", help="v5e:2x4, v5e:4x4*2 (two slices), h100:1x1x8; by default what is at hand")
    add("--params", type=int, help="number of the argument that holds the params, by default 0")
    add("--calls", type=int, default=1, help="calls per optimizer step: the window's length")
    add("--turns", type=int, help="turns of loops whose number the program does not say")
    add("--network", help="each device's link, 100Mbit or 1Gbit, 0.5 ms: adds seconds and advice")
    for name, meaning in _LIMITS.items():
        add(f"--max-{name}", type=int if name == "findings" else float, help=meaning)
    add("--cpu-devices", type=int, default=0, help="emulate so many devices at hand")
    add("--json", action="store_true", help="plain data on one line")
    return parser
