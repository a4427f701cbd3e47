"""Every technique in every placement of the params: does a step mean the same?

Runs the laws of ``boostax.testing`` cell by cell over ``tests/contract_cases.py``. Makes
``docs/placement_matrix.md``, beside the results.
"""

import dataclasses
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec

import boostax
from boostax._core.replicas import stack_replicas
from boostax.testing import Case, _placed
from boostax.testing._case import assert_close, even_params, optimizer
from boostax.testing._mapped import AXIS, replica_grads

TESTS = pathlib.Path(__file__).parents[1] / "tests"
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from contract_cases import CASES  # noqa: E402

PyTree = Any
Row = dict[str, Any]
PAGE = harness.DOCS / "placement_matrix.md"
KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}
TOLERANCE = 2e-6  # As in the laws, relative and absolute.
OTHER, MODEL = "other", "model"
HARDEST = "tensor parallel, FSDP"
HYBRID = "tensor parallel, HSDP"
PLACES = (
    "replicated",
    "ZeRO-1",
    "FSDP",
    "HSDP",
    "tensor parallel",
    "tensor parallel, ZeRO-1",
    HARDEST,
    HYBRID,
)
BAD = "a NaN in one shard of one replica"
REDUCED, NEVER, TWICE = "gradients of `jax.grad`", "no reduction", "a mean before"
MISTAKES = (REDUCED, NEVER)
MISTAKEN = "What must be skipped or refused"
PASSES, REFUSED, FAILS, NONE = "passes", "refused", "FAIL", "-"
# Who refuses and what: the first words of every message of the library.
SAID = re.compile(r"(?P<who>\w+): [^,.]+")


@dataclasses.dataclass(frozen=True)
class Hybrid(_placed.Placed):
    """Three axes: replicas, shards within a replica, and a model axis; ``w`` is cut both ways."""

    @property
    def others(self) -> int:
        """Shards of a replica's gradient."""
        return self.mesh.shape[OTHER] * self.mesh.shape[MODEL]

    def cut(self, name: str) -> int:
        """Where the pieces are put one after another: `joined` puts them in their places."""
        return 0

    def shard(self, tree: PyTree, index: int, before: int = 0) -> PyTree:
        """One of the shards of a replica."""
        row, column = divmod(index, self.mesh.shape[MODEL])
        parts = lambda x, n, dim: jnp.split(x, n, before + dim)  # noqa: E731
        rows = parts(tree["w"], self.mesh.shape[OTHER], 0)[row]
        w = parts(rows, self.mesh.shape[MODEL], 1)[column]
        return {"w": w, "b": parts(tree["b"], self.others, 0)[index]}

    def joined(self, tree: PyTree) -> PyTree:
        """Of every replica, the pieces of ``w`` that stand one after another, as they were cut."""
        replicas, rows, columns = tree["w"].shape
        across, down = self.mesh.shape[MODEL], self.mesh.shape[OTHER]
        pieces = tree["w"].reshape(replicas, down, across, rows // self.others, columns)
        w = pieces.swapaxes(2, 3).reshape(replicas, rows // across, columns * across)
        return tree | {"w": w}


def hybrid(kind: AxisType) -> Hybrid:
    """HSDP with tensor parallelism."""
    mesh = jax.make_mesh((2, 2, 2), (AXIS, OTHER, MODEL), axis_types=(kind,) * 3)
    specs = {"w": PartitionSpec(OTHER, MODEL), "b": PartitionSpec((OTHER, MODEL))}
    return Hybrid(HYBRID, specs, mesh, False)


def placements(kind: AxisType) -> dict[str, _placed.Placed]:
    """Those of the laws, and the one that needs a third axis."""
    found = [*_placed.placements(jax.device_count() // 2, 2, kind), hybrid(kind)]
    return {each.name: each for each in found}


def refusal(error: Exception) -> str | None:
    """What the library says in the first words of an error, if it is one of its own."""
    said = SAID.match(str(error)) if isinstance(error, ValueError | TypeError) else None
    public = (boostax, boostax.precision, boostax.reduce, boostax.subspace)
    return said[0] if said and any(hasattr(x, said["who"]) for x in public) else None


def judged(run: Callable[[], float | None]) -> Row:
    """What becomes of a cell."""
    try:
        return {"outcome": PASSES, "difference": run()}
    except Exception as error:
        if said := refusal(error):
            return {"outcome": REFUSED, "said": said}
        first = next(iter(str(error).strip().splitlines()), "")
        return {"outcome": FAILS, "said": f"{type(error).__name__}: {first[:120]}"}


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def as_if_local(grads: PyTree, params: PyTree) -> PyTree:
    """Under ``vmap`` JAX sends by all-to-all only what it holds apart for each replica."""
    del params
    nothing = 0 * jax.lax.axis_index(AXIS)
    return jax.tree.map(lambda g: g + nothing.astype(g.dtype), grads)


def in_place(
    case: Case, placed: _placed.Placed, kept: dict[Any, PyTree], whole: Case | None = None
) -> float:
    """The law of one placement.

    Args:
      kept: references by what they depend on.
      whole: what the reference trains, if not the case itself.
    """
    windows = [replica_grads(seed, placed.replicas) for seed in range(2 * case.calls)]
    params, _ = _placed.run(case, placed, windows)
    # Where leaves are whole all placements of as many replicas have one reference.
    key = placed.replicas, placed.name if case.by_shard else ""
    if key not in kept:
        wanted = _placed.reference(whole or case, placed, windows)
        cut = isinstance(placed, Hybrid) and case.by_shard
        kept[key] = placed.joined(wanted) if cut else wanted
    own = case.own_params
    params = params.local if own else params
    wanted = kept[key] if own else jax.tree.map(lambda x: x[0], kept[key])
    assert_close(params, wanted, placed.name, TOLERANCE)
    return difference(params, wanted)


def cells(case: Case, kept: dict[Any, PyTree]) -> list[tuple[str, str, Callable[[], float | None]]]:
    """All of a technique: ``(table, column, what to run)``."""
    found: list[tuple[str, str, Callable[[], float | None]]] = []

    def after_a_mean() -> float:
        def behind(*others: Any) -> Case:
            def make(inner: Any, axis: Any) -> optax.GradientTransformation:
                return optax.chain(boostax.all_reduce(axis), *others, case.make(inner, axis))

            return dataclasses.replace(case, make=make)

        placed = placements(AxisType.Auto)[HARDEST]
        return in_place(behind(), placed, {}, behind(optax.stateless(as_if_local)))

    def with_a_nan() -> None:
        _placed.skip_is_agreed_in_any_placement(case)

    for title, kind in KINDS.items():
        for name, placed in placements(kind).items():
            found.append((title, name, lambda placed=placed: in_place(case, placed, kept)))
    if case.skips:
        found.append((MISTAKEN, BAD, with_a_nan))
    found.append((MISTAKEN, TWICE, after_a_mean))
    for name in MISTAKES:
        if name == REDUCED or not case.reduces:
            found.append((MISTAKEN, name, lambda name=name: mistaken(case, name)))
    return found


def difference(params: PyTree, wanted: PyTree) -> float:
    """The largest of an element, absolute; params are about 1."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs)


def mistaken(case: Case, name: str) -> None:
    """A step that must not be traced to its end."""
    placed = placements(AxisType.Auto)[HARDEST]
    params = placed.place(even_params())
    chain = case.mapped(AXIS)
    if name == NEVER:
        chain = optax.with_extra_args_support(case.make(optimizer(), AXIS))
    tx = boostax.on_mesh(chain, params, axis_name=AXIS)
    state = tx.init(params)
    if case.own_params:
        stacked = boostax.PerReplica(even_params())
        params = boostax.PerReplica(placed.stack(stack_replicas(stacked, placed.replicas)))
    grads = boostax.PerReplica(placed.stack(boostax.PerReplica(replica_grads(0, placed.replicas))))
    grads = placed.place(even_params()) if name == REDUCED else grads
    jax.eval_shape(lambda p, s, g: boostax.apply_gradients(tx, g, s, p), params, state, grads)


def job(name: str, wanted: list[tuple[str, str]]) -> list[Row]:
    """Those cells of a technique."""
    kept: dict[Any, PyTree] = {}
    found = []
    for title, column, run in cells(case_of(name), kept):
        if (title, column) in wanted:
            found.append({"technique": name, "table": title, "column": column, **judged(run)})
    jax.clear_caches()
    return found


def run_all(names: list[str], path: pathlib.Path, workers: int) -> list[Row]:
    """All cells; what is kept is not run again."""
    key = ("technique", "table", "column")
    done = harness.kept(path, *key)
    jobs = {}
    for name in names:
        there = [(title, column) for title, column, _ in cells(case_of(name), {})]
        if left := [each for each in there if (name, *each) not in done]:
            jobs[name] = name, left
    harness.in_processes(job, jobs, path, workers)
    return [row for row in harness.kept(path, *key).values() if row["technique"] in names]


def tables(names: list[str], found: list[Row]) -> dict[str, list[Row]]:
    """A row for each technique, a cell as it is written."""
    cell = {(row["technique"], row["table"], row["column"]): row for row in found}
    columns = {title: PLACES for title in KINDS} | {MISTAKEN: (BAD, *MISTAKES, TWICE)}
    return {
        title: [
            {"technique": name} | {each: written(cell.get((name, title, each))) for each in there}
            for name in names
        ]
        for title, there in columns.items()
    }


def written(row: Row | None) -> str:
    """A cell: an outcome, and the largest difference or who said what."""
    if row is None:
        return NONE
    if row["outcome"] != PASSES:
        return f"{row['outcome']}: {row['said']}"
    return PASSES if row["difference"] is None else f"{PASSES}, {row['difference']:.0e}"


def wrong(title: str, column: str, cell: str) -> bool:
    """A mistake that was not refused is as bad as a placement that differs."""
    if title != MISTAKEN:
        return not cell.startswith(PASSES)
    allowed = {BAD: (PASSES,), TWICE: (PASSES, REFUSED)}.get(column, (REFUSED,))
    return not cell.startswith((*allowed, NONE))


def counted(sections: dict[str, list[Row]]) -> dict[str, int]:
    """Cells by outcome, and those that are not as they must be."""
    every = [
        (title, column, cell)
        for title, rows in sections.items()
        for row in rows
        for column, cell in row.items()
        if column != "technique" and cell != NONE
    ]
    return {
        "all": len(every),
        PASSES: sum(cell.startswith(PASSES) for _, _, cell in every),
        REFUSED: sum(cell.startswith(REFUSED) for _, _, cell in every),
        FAILS: sum(cell.startswith(FAILS) for _, _, cell in every),
        "wrong": sum(wrong(*each) for each in every),
    }


def page(sections: dict[str, list[Row]]) -> str:
    """The document, from the sections on record."""
    lines = ["# Every technique in every placement", "", INTRODUCTION, ""]
    count = counted(sections)
    lines += [
        f"{count['all']} cells: {count[PASSES]} pass, {count[REFUSED]} are refused by name, "
        f"{count[FAILS]} fail.",
        "",
    ]
    for title, rows in sections.items():
        heading = f"On {title} meshes" if title in KINDS else title
        lines += [f"## {heading}", "", *([ABOUT_MISTAKES, ""] if title == MISTAKEN else [])]
        columns = [each for each in rows[0] if each != "technique"]
        named = [[f"**{row['technique']}**", *(row[c] for c in columns)] for row in rows]
        lines += harness.markdown(["", *columns], named)
        lines += [""]
    return "\n".join(lines)


INTRODUCTION = f"""\
This page is generated: `python benchmarks/placements.py` runs every cell and writes it, and
[the record](../benchmarks/results/placements.md). A row is an entry of `tests/contract_cases.py`, a
column a [placement](placements.md) of the params on eight emulated devices. A cell trains in plain
`jit` by `boostax.on_mesh`, behind AdamW, a schedule and a clip by the global norm, on gradients
that differ per replica, and compares the params with those of the same training where they are
whole on every replica, under `jax.vmap` with a name; of a compressed reduction, where each shard is
a leaf. It shows the largest difference of an element. It passes within {TOLERANCE:g}, relative and
absolute, if every leaf of params and state also stayed in its place. Otherwise it says who refused
in the first words of the message, or FAIL with the error."""
ABOUT_MISTAKES = (
    "Tensor parallel with FSDP. The first column passes if one NaN skips the step everywhere and "
    "leaves the state bit for bit alone; a dash stands for what has no gate. The next two must be "
    "refused while they are traced; a dash stands for what reduces itself. A mean before the chain "
    "must be refused, or mean what it means where params are whole."
)


def main() -> None:
    options = harness.resumable(__doc__, "names, by comma")
    if options.page:
        PAGE.write_text(page(harness.sections_of("placements")))
        return
    harness.on_cpu()
    harness.quick()
    work = harness.work_of(options, "placements")
    names = options.only.split(",") if options.only else [case.name for case in CASES]
    found = run_all(names, work / "cells.jsonl", options.workers)
    sections = tables(names, found)
    if options.only:
        print(page(sections))
        return
    bars = [harness.Bar("cells that are not as they must be", counted(sections)["wrong"], 0)]
    harness.report("placements", "Techniques in placements", list(sections.items()), bars)
    PAGE.write_text(page(sections))


if __name__ == "__main__":
    main()
