# SPDX-License-Identifier: Apache-2.0
"""Print the audit of a compiled program: ``boostax audit module:function``.

The function must return the program and its arguments, such as (step, state, batch). Arguments may
be jax.ShapeDtypeStruct. A function with a parameter receives the devices of the target, or else the
present devices.
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
from collections.abc import Callable, Generator, Iterator, Sequence
from traceback import walk_tb
from typing import Any

import jax

from boostax.auditing import waste
from boostax.auditing.adapter import checks
from boostax.auditing.audit import Audit, audit
from boostax.auditing.targets import target_devices

# The counts that can be limited, and their units.
_LIMITS = {
    "reductions": "elements per optimizer step, as a multiple of the number of params",
    "gathers": "elements per optimizer step, as a multiple of the number of params",
    "temporaries": "bytes, as a multiple of the bytes of the params on a device",
    "findings": "0 allows no waste",
}


def print_audit(argv: Sequence[str]) -> int:
    """Print the audit and return the exit code of ``boostax.__main__.main``."""
    if "--forms" in argv:
        print(f"boostax: {checks.replacement('boostax audit --forms')}", file=sys.stderr)
        return 2
    options = _parser().parse_args(argv)
    try:
        with without_compiler_logs():
            result = _audited(options)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"boostax: {str(error).removeprefix('boostax: ')}", file=sys.stderr)
        return 1
    print(json.dumps(result.to_dict()) if options.json else result)
    exceeded = list(_exceeded(options, result))
    for text in exceeded:
        print(f"boostax: audit: {text}", file=sys.stderr)
    return min(1, len(exceeded))


def _exceeded(options: argparse.Namespace, result: Audit) -> Iterator[str]:
    """Yield a text for each limit that the audit exceeds."""
    if result.window and options.max_reductions is not None:
        text = f"calls is 1, but an accumulation window spans several calls ({result.window})."
        yield f"{text} Pass --calls, the number of calls per optimizer step."
    limits = {x: limit for x in _LIMITS if (limit := getattr(options, f"max_{x}")) is not None}
    count = len(target_devices(options.target)) if options.target else options.cpu_devices
    if limits and result.devices < count:
        devices = f"{result.devices} device{'s' * (result.devices > 1)} of {count}"
        yield f"the program uses {devices}: shard its arguments over all devices"
    elif {"reductions", "gathers"} & {*limits} and result.devices == 1:
        yield "a program on one device reduces nothing: pass --cpu-devices or --target"
    for name, limit in limits.items():
        value = len(result.findings) if name == "findings" else getattr(result, name)
        # An unknown count (NaN, infinite) exceeds every limit.
        if not value <= limit:
            loops = f"trip counts of {', '.join(result.unknown_loops)}: pass --turns"
            why = f"unknown, because of unknown {loops if value == math.inf else 'params'}"
            text = f"{value:.2f}, more than {limit:g}" if math.isfinite(value) else why
            yield f"{name} are {text}"


@contextlib.contextmanager
def without_compiler_logs() -> Generator[None]:
    """Hide what compilers log to file descriptor 2, unless code of another package raises an error.

    Python's writes to ``sys.stderr``, such as warnings, are shown.
    """
    with tempfile.TemporaryFile() as logs, os.fdopen(os.dup(2), "w", buffering=1) as stderr:
        shown = stderr if sys.stderr is sys.__stderr__ else sys.stderr
        os.dup2(logs.fileno(), 2)
        try:
            with contextlib.redirect_stderr(shown):
                yield
        except BaseException as error:
            modules = [frame.f_globals["__name__"] for frame, _ in walk_tb(error.__traceback__)]
            if error.__cause__ or not modules[-1].startswith("boostax."):
                logs.seek(0)
                stderr.write(logs.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(stderr.fileno(), 2)


def _audited(options: argparse.Namespace) -> Audit:
    # If a JAX plugin for absent devices is installed, the plugin fails to start, and JAX cannot
    # compile. So only the CPU platform is used.
    if options.cpu_devices or (options.target and not getattr(jax.config, "jax_platforms", None)):
        jax.config.update("jax_platforms", "cpu")
    if options.cpu_devices:
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    build = _function(options.program)
    devices = target_devices(options.target) if options.target else ()
    params = inspect.signature(build).parameters.values()
    required = [x.name for x in params if x.default is x.empty and not str(x).startswith("*")]
    if hasattr(build, "lower") or len(required) > 1:
        # ``build`` is a step and not a function that builds a step, so the error has example code.
        module, _, step = options.program.replace(".py:", ":").replace("/", ".").rpartition(":")
        made = "\n".join(f"    {x} = jax.ShapeDtypeStruct((64, 64), 'float32')" for x in required)
        names = {"name": options.program, "module": module, "step": step}
        raise TypeError(waste.WORDS["step"].format(**names, made=made, listed=", ".join(required)))
    program = build(devices or tuple(jax.devices())) if params else build()
    if not isinstance(program, tuple):
        text = "audit: the function must return the program with its arguments, got"
        raise TypeError(f"{text} {type(program).__name__}. Return a tuple (step, state, batch).")
    names = ("target", "params", "calls", "turns", "network")
    return audit(*program, **{name: getattr(options, name) for name in names})


def _function(name: str) -> Callable[..., Any]:
    module, colon, attribute = name.rpartition(":")
    path = pathlib.Path(module.removesuffix(".py").replace(".", "/") + ".py").absolute()
    # A file belongs to the packages around it, and imports modules next to the outermost package.
    root = next(x for x in path.parents if not x.joinpath("__init__.py").exists())
    if module.endswith(".py"):
        if not path.exists():
            raise ImportError(f"audit: {path.name} is not in {path.parent}.")
        module = ".".join(path.relative_to(root).with_suffix("").parts)
    sys.path[:0] = [os.getcwd(), str(root)]
    try:
        function = pkgutil.resolve_name(f"{module}:{attribute}") if colon else None
    except (ValueError, ImportError, AttributeError) as error:
        raise ImportError(f"audit: {name} could not be imported: {error}") from error
    if not callable(function) or inspect.isbuiltin(function):
        raise TypeError(f"audit: program must be module:function in Python, got {name!r}.")
    return function


def _parser() -> argparse.ArgumentParser:
    # This formatter keeps the line breaks of the description.
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("boostax audit", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("program", metavar="module:function", help="a function that builds the program")
    add("--target", help="v5e:2x4, v5e:4x4*2 (two slices), h100:1x1x8; default: present devices")
    add("--params", type=int, help="number of the argument that holds the params, by default 0")
    add("--calls", type=int, default=1, help="calls per optimizer step, the length of a window")
    add("--turns", type=int, help="trip count of loops whose trip count the program does not show")
    add("--network", help="rate of each device's link, such as 100Mbit; adds seconds and advice")
    for name, meaning in _LIMITS.items():
        add(f"--max-{name}", type=int if name == "findings" else float, help=meaning)
    add("--cpu-devices", type=int, default=0, help="the number of CPU devices to emulate")
    add("--json", action="store_true", help="plain data on one line")
    return parser
