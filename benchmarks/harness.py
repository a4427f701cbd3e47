"""Paired timings: every form once per round, in turn, so that a drifting machine drifts for all.

A figure is the median over rounds of the ratio, within one round, of a form to its baseline.
"""

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import pathlib
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax

import boostax
from boostax.testing import drawn

RESULTS = pathlib.Path(__file__).parent / "results"
DOCS = pathlib.Path(__file__).parents[1] / "docs"
Row = dict[str, Any]


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


def arguments(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Options of a program, ``name=default`` or ``name=(default, help)``; False makes a flag."""
    parser = argparse.ArgumentParser(description=description)
    for name, given in defaults.items():
        default, told = given if isinstance(given, tuple) else (given, None)
        kind = {"type": type(default), "default": default}
        options = {"action": "store_true"} if default is False else kind
        parser.add_argument(f"--{name.replace('_', '-')}", help=told, **options)
    return parser.parse_args()


def resumable(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Options of a benchmark of many cells that can be interrupted."""
    work = pathlib.Path(), "folder of a run to go on with"
    return arguments(description, workers=2, work=work, **defaults)


def on_cpu(devices: int = 8) -> None:
    """Emulated devices; before JAX is first used."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def record(name: str) -> dict[str, Any]:
    """What `report` wrote: the machine, the sections and the bars, a dictionary for each row."""
    data = json.loads((RESULTS / f"{name}.json").read_text())
    sections = {title: _rows(table) for title, table in data["sections"].items()}
    return {"machine": data["machine"], "sections": sections, "bars": _rows(data["bars"])}


def sections_of(name: str) -> dict[str, list[Row]]:
    """The tables on record, none if there is no record."""
    return record(name)["sections"] if (RESULTS / f"{name}.json").exists() else {}


def _rows(table: dict[str, list[Any]]) -> list[Row]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def _table(rows: list[Row]) -> str:
    """A row a line, without the names of the columns: half the size, and a diff of what changed."""
    columns = list(rows[0]) if rows else []
    lines = ",".join("\n" + json.dumps([row[c] for c in columns]) for row in rows)
    return f'{{"columns": {json.dumps(columns)}, "rows": [{lines}]}}'


def work_of(options: argparse.Namespace, name: str) -> pathlib.Path:
    """The folder of a run, a new one or that of an interrupted one."""
    given = options.work != pathlib.Path()
    work = options.work if given else pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-"))
    work.mkdir(parents=True, exist_ok=True)
    print(f"to go on after an interruption: --work {work}", flush=True)
    return work


def kept(path: pathlib.Path | None, *key: str) -> dict[Any, Row]:
    """The rows of a run that was interrupted, by the columns that tell them apart."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return {tuple(row.get(name) for name in key): row for row in map(json.loads, lines)}


def keep(path: pathlib.Path, rows: Iterable[Row]) -> None:
    """Rows for `kept`, a line each."""
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def unfinished(
    path: pathlib.Path, key: Sequence[str], cells: Mapping[tuple[Any, ...], Iterable[Any]]
) -> dict[Any, tuple[Any, ...]]:
    """Of each cell the runs that are not kept: arguments of a job, the cell's and a list of runs.

    Args:
      key: columns of a row, those of the cell and then those of the run.
      cells: of each its runs, tuples.
    """
    done = set(kept(path, *key))
    left = {
        cell: [run for run in runs if (*cell, *run) not in done] for cell, runs in cells.items()
    }
    return {cell: (*cell, runs) for cell, runs in left.items() if runs}


def of_seeds(
    found: Mapping[Any, Row], cell: Sequence[Any], seeds: int, rate: float, figure: str
) -> np.ndarray[Any, Any]:
    """A figure of kept rows, keyed by cell, seed and rate; infinite where it is NaN."""
    values = [found[*cell, seed, rate][figure] for seed in range(seeds)]
    return np.nan_to_num(np.array(values), nan=np.inf)


def best_rate(
    found: Mapping[Any, Row], cell: Sequence[Any], seeds: int, rates: Sequence[float]
) -> float:
    """The rate with the lowest mean of what is there to choose by."""
    return min(rates, key=lambda x: float(of_seeds(found, cell, seeds, x, "chosen").mean()))


def in_processes(
    job: Callable[..., list[Row]],
    jobs: Mapping[Any, tuple[Any, ...]],
    path: pathlib.Path,
    workers: int,
) -> None:
    """Keep the rows of ``job(*arguments)`` for each of the jobs, as soon as it has ended.

    A process has one device.
    """
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), on_cpu, (1,))
    try:
        running = {pool.submit(job, *given): name for name, given in jobs.items()}
        for number, future in enumerate(as_completed(running), 1):
            keep(path, future.result())
            print(f"{number}/{len(jobs)} {running[future]}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)


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


def beside(
    forms: dict[str, Form], times: dict[str, list[float]], column: str, baseline: str, size: int
) -> list[Row]:
    """A row for each form: the time in units of the baseline's, the memory in units of a size."""
    return [
        {
            "form": name,
            column: ratio(times, name, baseline),
            "temp / params": None if form.temp is None else form.temp / size,
        }
        for name, form in forms.items()
    ]


def over_seeds(values: Any, name: str, error: str = "s.e.") -> Row:
    """Two columns: the mean, and its standard error."""
    values = np.asarray(values)
    return {name: float(values.mean()), error: float(values.std(ddof=1) / len(values) ** 0.5)}


def power(rate: float) -> str:
    """A rate of a grid by factors of two."""
    return f"2^{round(math.log2(rate))}"


def power_in(rate: float, rates: Iterable[float]) -> str:
    """The same, and whether a better one may lie beyond those tried."""
    return power(rate) + (" (edge)" if rate in (min(rates), max(rates)) else "")


def caveats(lines: Iterable[str]) -> list[Row]:
    """The rows of a section to keep in mind."""
    return [{"caveat": line} for line in lines]


def markdown(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], cell: Callable[[Any], str] | None = None
) -> list[str]:
    """The lines of a table."""
    lines = [columns, *(list(map(cell or written, row)) for row in rows)]
    head, *body = ["| " + " | ".join(line) + " |" for line in lines]
    return [head, "|" + "---|" * len(columns), *body]


def of_rows(
    rows: Sequence[Row], columns: Sequence[str] = (), cell: Callable[[Any], str] | None = None
) -> list[str]:
    """The lines of a table of rows, of all columns or of some."""
    columns = columns or list(rows[0])
    return markdown(columns, [[row[c] for c in columns] for row in rows], cell)


def report(
    name: str,
    title: str,
    sections: list[tuple[str, list[Row]]],
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
        lines += [f"## {heading}", ""]
        if heading in pictures:
            lines += [f"![{heading}]({pictures[heading]})", ""]
        lines += [*of_rows(rows), ""]
    met = [(b.claim, f"{b.figure:.3f}", f"{b.limit:g}", "yes" if b.met else "**no**") for b in bars]
    lines += ["## Bars", "", *markdown(("claim", "figure", "limit", "met"), met)]
    text = "\n".join(lines) + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(_written(machine, sections, bars))
    print(text)


def _written(
    machine: dict[str, Any], sections: list[tuple[str, list[Row]]], bars: list[Bar]
) -> str:
    tables = ",\n".join(f"{json.dumps(title)}: {_table(rows)}" for title, rows in sections)
    met = _table([{**dataclasses.asdict(bar), "met": bar.met} for bar in bars])
    text = f'"machine": {json.dumps(machine)},\n"sections": {{\n{tables}\n}},\n"bars": {met}'
    return f"{{\n{text}\n}}\n"


def written(value: Any) -> str:
    """A cell: numbers with three digits, nothing for None."""
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
