"""Paired timings: every form once per round, in turn, so that a drifting machine drifts for all.

A figure is the median over rounds of the ratio, within one round, of a form to its baseline.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import optax

import boostax
from boostax.testing import drawn

RESULTS = pathlib.Path(__file__).parent / "results"


@dataclasses.dataclass
class Form:
    """One thing to time.

    ``run`` does a unit of work and blocks; ``temp`` is its compiled temporary memory in bytes.
    """

    run: Callable[[], None]
    temp: int | None = None


@dataclasses.dataclass(frozen=True)
class Bar:
    """What a figure must not exceed, and the figure."""

    claim: str
    figure: float
    limit: float

    @property
    def met(self) -> bool:
        """Whether it stays within."""
        return self.figure <= self.limit


def resumable(description: str | None, only: str) -> argparse.ArgumentParser:
    """Arguments of a benchmark of many cells that can be interrupted."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", type=pathlib.Path, help="folder of a run to go on with")
    parser.add_argument("--only", default="", help=f"{only}; publishes nothing")
    parser.add_argument("--page", action="store_true", help="write the page anew from the results")
    return parser


def record(name: str) -> dict[str, Any]:
    """What `report` wrote: the machine, the sections and the bars, a dictionary for each row."""
    data = json.loads((RESULTS / f"{name}.json").read_text())
    sections = {title: _rows(table) for title, table in data["sections"].items()}
    return {"machine": data["machine"], "sections": sections, "bars": _rows(data["bars"])}


def sections_of(name: str) -> dict[str, list[dict[str, Any]]]:
    """The tables on record, none if there is no record."""
    return record(name)["sections"] if (RESULTS / f"{name}.json").exists() else {}


def _rows(table: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def _table(rows: list[dict[str, Any]]) -> str:
    """A row a line, without the names of the columns: half the size, and a diff of what changed."""
    columns = list(rows[0]) if rows else []
    lines = ",".join("\n" + json.dumps([row[c] for c in columns]) for row in rows)
    return f'{{"columns": {json.dumps(columns)}, "rows": [{lines}]}}'


def work_of(options: argparse.Namespace, name: str) -> pathlib.Path:
    """The folder of a run, a new one or that of an interrupted one."""
    work = options.work or pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-"))
    work.mkdir(parents=True, exist_ok=True)
    print(f"to go on after an interruption: --work {work}", flush=True)
    return work


def by_update(tx: Any) -> Callable[..., tuple[Any, Any]]:
    """A step that uses only the Optax interface."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = drawn(tx).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def by_apply(tx: Any) -> Callable[..., tuple[Any, Any]]:
    """A step through ``boostax.apply_gradients``."""
    return lambda params, state, grads: boostax.apply_gradients(drawn(tx), grads, state, params)


def compiled_form(
    step: Callable[..., tuple[Any, Any]], params: Any, state: Any, *rest: Any, calls: int = 1
) -> Form:
    """A donated ``step(params, state, *rest)`` that threads its own params and state."""
    program = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, *rest).compile()
    carry = [jax.tree.map(lambda x: x.copy(), (params, state))]

    def run() -> None:
        for _ in range(calls):
            carry[0] = program(*carry[0], *rest)
        jax.block_until_ready(carry[0])

    return Form(run, program.memory_analysis().temp_size_in_bytes)


def paired(forms: dict[str, Form], rounds: int) -> dict[str, list[float]]:
    """Seconds per unit of work, a list per form, index-aligned by round; one round warms up.

    Every round has an order of its own: what a form leaves in caches and in the allocator's hands
    serves or harms the next, and none should always follow the same.
    """
    times: dict[str, list[float]] = {name: [] for name in forms}
    order = random.Random(0)
    for index in range(rounds + 1):
        for name in order.sample(list(forms), len(forms)):
            start = time.perf_counter()
            forms[name].run()
            if index:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(times: dict[str, list[float]], name: str, baseline: str) -> float:
    """Median of the paired ratios."""
    return statistics.median(a / b for a, b in zip(times[name], times[baseline], strict=True))


def report(
    name: str,
    title: str,
    sections: list[tuple[str, list[dict[str, Any]]]],
    bars: list[Bar],
    pictures: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Print the tables and the bars, and keep them as JSON and Markdown.

    Args:
      pictures: of a section its picture, a file beside the results.
    """
    machine = {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "optax": optax.__version__,
    }
    lines = [f"# {title}", "", ", ".join(f"{k} {v}" for k, v in machine.items()), ""]
    sections = [(heading, rows) for heading, rows in sections if rows]
    for heading, rows in sections:
        columns = list(rows[0])
        lines += [f"## {heading}", ""]
        if heading in pictures:
            lines += [f"![{heading}]({pictures[heading]})", ""]
        lines += ["| " + " | ".join(columns) + " |"]
        lines += ["|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(_cell(row[c]) for c in columns) + " |" for row in rows]
        lines += [""]
    lines += ["## Bars", "", "| claim | figure | limit | met |", "|---|---|---|---|"]
    lines += [f"| {b.claim} | {b.figure:.3f} | {b.limit:g} | {_yes(b.met)} |" for b in bars]
    text = "\n".join(lines) + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(_written(machine, sections, bars))
    print(text)


def _written(
    machine: dict[str, Any], sections: list[tuple[str, list[dict[str, Any]]]], bars: list[Bar]
) -> str:
    tables = ",\n".join(f"{json.dumps(title)}: {_table(rows)}" for title, rows in sections)
    met = _table([{**dataclasses.asdict(bar), "met": bar.met} for bar in bars])
    text = f'"machine": {json.dumps(machine)},\n"sections": {{\n{tables}\n}},\n"bars": {met}'
    return f"{{\n{text}\n}}\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _yes(met: bool) -> str:
    return "yes" if met else "**no**"
