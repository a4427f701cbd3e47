"""Doors into frameworks: the loops of ``docs/doors``, before and after, over 8 emulated devices.

A door is a file with two functions, ``before(mesh, width)`` and ``after(mesh, width)``. Each gives
a step and its arguments; the step returns them anew, and the loss. Printed last are the sections of
the record, as JSON; ``benchmarks/doors.py`` runs it. Files that are named run alone.
"""

import argparse
import dataclasses
import difflib
import importlib.metadata
import importlib.util
import inspect
import json
import pathlib
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
from boostax.inspect import hlo

ROOT = pathlib.Path(__file__).parents[2]
DEVICES, STEPS, WIDTH = 8, 6, 256
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Door:
    """A file of ``docs/doors``.

    Attributes:
      program: the framework, as the table names it.
      package: whose version is named.
      file: its name.
      suites: of the record ``foreign``, and the way in which boostax was put in.
    """

    program: str
    package: str
    file: str
    suites: tuple[str, str] | None = None

    def load(self) -> ModuleType:
        """The file as a module."""
        path = ROOT / "docs" / "doors" / f"{self.file}.py"
        spec = importlib.util.spec_from_file_location(f"door_{self.file}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


FREEZING = (
    Door("Optax", "optax", "freezing_optax"),
    Door("Flax `TrainState`", "flax", "freezing_train_state"),
    Door("Flax `nnx.Optimizer`", "flax", "freezing_nnx"),
)
DOORS = (
    Door("Optax, `MultiSteps`", "optax", "optax_multi_steps", ("optax", "window")),
    Door("Optax, `lax.scan`", "optax", "optax_scan", ("optax", "window")),
    Door("Flax `TrainState`", "flax", "flax_train_state"),
    Door("Flax `nnx.Optimizer`", "flax", "flax_nnx", ("flax nnx optimizer", "nnx")),
    Door("Equinox", "equinox", "equinox_module"),
    Door("Haiku", "dm-haiku", "haiku_transform"),
    Door("Keras 3, a stateless loop", "keras", "keras_stateless"),
    Door("Keras 3, `fit`", "keras", "keras_fit"),
)


def mesh() -> Mesh:
    """One axis, over which the batch is split."""
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


def batches(on: Mesh, width: int, calls: int) -> Iterable[PyTree]:
    """Rows for each call: those of a micro-batch, or of 8 where the step splits them."""
    rows = DEVICES * 8 // calls
    for seed in range(STEPS * calls):
        random = np.random.default_rng(seed)
        batch = {name: random.normal(size=(rows, width)).astype("f") for name in "xy"}
        yield jax.device_put(batch, NamedSharding(on, P("data")))


def changed(before: Callable[..., Any], after: Callable[..., Any]) -> int:
    """Lines that differ: those of the longer side of each change, without comments and blanks."""
    one, other = map(code, (before, after))
    match = difflib.SequenceMatcher(None, one, other, autojunk=False)
    return sum(max(b - a, d - c) for tag, a, b, c, d in match.get_opcodes() if tag != "equal")


def code(fn: Callable[..., Any]) -> list[str]:
    """The lines of a function's body that are code."""
    lines = (line.strip() for line in inspect.getsource(fn).splitlines()[1:])
    return [line for line in lines if line and not line.startswith("#")]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a form did.

    Attributes:
      losses: of every call.
      audit: of the compiled step.
      state_bytes: of all that the step keeps beside the params, on one device.
    """

    losses: list[float]
    audit: boostax.inspect.Audit
    state_bytes: int


def run(make: Callable[..., Any], calls: int, width: int) -> Run:
    """Build a form, audit its step, and train."""
    on = mesh()
    step, *args = make(on, width)
    params = args[0].params if hasattr(args[0], "params") else args[0]
    given = list(batches(on, width, calls))
    audit = boostax.audit(step, *args, given[0], params=params, calls=calls)
    kept = local_bytes(args) - local_bytes(params)
    losses: list[float] = []
    for batch in given:
        result = step(*args, batch)
        *new, loss = result if isinstance(result, tuple) else (result,)
        args = new or args
        losses.append(float(jax.block_until_ready(loss)))
    return Run(losses, audit, kept)


def local_bytes(tree: PyTree) -> int:
    """Of the arrays in a tree, on one device."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return sum(x.addressable_shards[0].data.nbytes for x in arrays)


def both(door: Door, width: int) -> tuple[int, Run, Run]:
    """The lines changed, and what the forms did."""
    module = door.load()
    old, new = (run(make, module.CALLS, width) for make in (module.before, module.after))
    return changed(module.before, module.after), old, new


def differ(old: Run, new: Run) -> float:
    """The largest relative difference of a loss."""
    pairs = zip(old.losses, new.losses, strict=True)
    return max(abs(a - b) / abs(a) for a, b in pairs)


def row(door: Door, lines: int, old: Run, new: Run) -> dict[str, Any]:
    """Of the record."""
    return {
        "program": door.program,
        "version": importlib.metadata.version(door.package),
        "way": "lines",
        "lines": lines,
        "its tests": "-" if door.suites is None else tests(*door.suites),
        "reductions before": old.audit.reductions,
        "reductions after": new.audit.reductions,
        "temp MB before": old.audit.temporary_bytes / 1e6,
        "temp MB after": new.audit.temporary_bytes / 1e6,
        "state MB before": old.state_bytes / 1e6,
        "state MB after": new.state_bytes / 1e6,
        "losses differ": differ(old, new),
    }


def frozen(door: Door, lines: int, old: Run, new: Run) -> dict[str, Any]:
    """Of the record: matrix products of a call with everything trained, and at the last depth."""
    return {
        "program": door.program,
        "version": importlib.metadata.version(door.package),
        "lines": lines,
        "products before": int(products(old).least),
        "products after, all trained": int(products(new).most),
        "products after, three of four frozen": int(products(new).least),
        "losses differ": differ(old, new),
    }


def products(found: Run) -> hlo.Ways:
    """By the cheapest way through the compiled program, and by the dearest."""
    program = hlo.parse(found.audit.text)
    dots = (site for site in program.sites if site.instruction.op == "dot")
    return program.total((site.branches, 1) for site in dots)


def tests(suite: str, way: str) -> str:
    """Of the suites on record, with boostax put in and without."""
    data = json.loads((ROOT / "benchmarks" / "results" / "foreign.json").read_text())
    table = data["sections"]["Counts"]
    rows = [dict(zip(table["columns"], x, strict=True)) for x in table["rows"]]
    rows = [x for x in rows if x["suite"].startswith(suite) and x["boostax"] == way]
    ran = sum(x["tests"] - x["skipped by itself"] for x in rows)
    alone = ran - sum(x["fails without boostax"] for x in rows)
    return f"{sum(x['passed'] for x in rows)} of {ran}, {alone} without"


def main() -> None:
    """Print a row for each door."""
    parser = argparse.ArgumentParser(description=__doc__)
    files = [door.file for door in (*DOORS, *FREEZING)]
    parser.add_argument("files", nargs="*", choices=files, help="all by default")
    chosen = parser.parse_args().files or files
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    sections: dict[str, list[Any]] = {"Doors": [], "Freezing": []}
    for name, doors, made in (("Doors", DOORS, row), ("Freezing", FREEZING, frozen)):
        for door in (door for door in doors if door.file in chosen):
            sections[name].append(made(door, *both(door, WIDTH)))
            print(sections[name][-1], file=sys.stderr, flush=True)
    print(json.dumps(sections))


if __name__ == "__main__":
    main()
