"""A transformer of five million params on text, eight replicas: forms of the wire and of storage.

Every form trains on the same batches from the same weights. Its rate is the one with the lowest
loss of the first seed on batches to choose by; the other seeds train at that one. Hours: each run
is kept as soon as it has ended, and ``--work`` goes on.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from harness import (
    Bar,
    best_rate,
    caveats,
    in_processes,
    kept,
    of_rows,
    of_seeds,
    on_cpu,
    over_seeds,
    power_in,
    report,
    resumable,
    unfinished,
    work_of,
)
from replica_runs import AXIS, REPLICAS, first, train, wire_bytes
from text_runs import Text, warmed
from workloads import TextConfig

import boostax

PyTree = Any
CONFIG = TextConfig(width=256, depth=7, heads=4, sequence_length=64, batch_size=REPLICAS)
LARGE = Text(CONFIG, judged=64)
STEPS, RATES = 240, tuple(2.0**power for power in (-11, -10, -9, -8))
MOMENTS = {"*mu": "int8", "*nu": "log8"}


class Form(NamedTuple):
    """A way to train.

    Attributes:
      build: the transformation, from an optimizer.
      low: whether params are bf16.
      share: of the steps in which a conditional collective runs.
      steps: of the run, as a share of those of the others.
    """

    build: Callable[[Any], Any]
    low: bool = False
    share: float = 1.0
    steps: float = 1.0


def _local(outer: optax.GradientTransformation) -> Form:
    return Form(lambda tx: boostax.reduce.local_updates(tx, AXIS, 16, outer), share=1 / 16)


def _stored(tx: Any) -> Any:
    return MEAN(boostax.precision.store(tx, params="stochastic", moments=MOMENTS))


MEAN = first(boostax.all_reduce(AXIS))
DENSE = "mean in f32"
FORMS = {
    DENSE: Form(MEAN),
    "mean in f32, three quarters of the steps": Form(MEAN, steps=0.75),
    "mean in bf16": Form(first(boostax.all_reduce(AXIS, dtype="bfloat16"))),
    "int8": Form(first(boostax.int8_reduce(AXIS))),
    "PowerSGD rank 4": Form(first(boostax.reduce.power_sgd_reduce(AXIS, 4))),
    "local SGD, every 16": _local(optax.sgd(1.0)),
    "DiLoCo, every 16": _local(optax.sgd(0.7, momentum=0.9, nesterov=True)),
    "params stochastic, moments int8 and log8": Form(_stored, low=True),
    "params and moments bf16, to the nearest": Form(MEAN, low=True),
}


def low(params: PyTree) -> PyTree:
    """Matrices in bf16."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, params)


def _wide(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def trained(form: Form) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """A compiled run: of a rate, params and batches what to choose by and what to report."""
    steps = round(STEPS * form.steps)

    @jax.jit
    def run(rate: jax.Array, params: PyTree, batches: PyTree, unseen: PyTree) -> Any:
        training = jax.tree.map(
            lambda x: x[:steps].reshape(steps, REPLICAS, -1, x.shape[-1]), batches
        )
        tx = form.build(optax.adamw(warmed(rate, steps)))
        loss = lambda params, batch: LARGE.loss(_wide(params), batch)  # noqa: E731
        start = low(params) if form.low else params
        params = _wide(train(tx, loss, start, training)[0])
        return tuple(LARGE.judge(params, part) for part in LARGE.halves(unseen))

    return run


def runs(name: str, pairs: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """A row for each of some seeds and rates of a form."""
    run = trained(FORMS[name])
    rows: list[dict[str, Any]] = []
    for seed, rate in pairs:
        chosen, reported = run(jnp.float32(rate), LARGE.init(seed), *LARGE.batches(seed, STEPS))
        row = {"form": name, "seed": seed, "rate": rate}
        rows.append(row | {"chosen": float(chosen), "reported": float(reported)})
    return rows


def bytes_of(form: Form) -> dict[str, float]:
    """What a replica sends in a step, and what the state and the params take."""
    params = jax.eval_shape(LARGE.workload(0).init, jax.random.key(0))[0]
    params = jax.eval_shape(low, params) if form.low else params
    tx = form.build(optax.adamw(1e-3))
    held = jax.tree.leaves((params, jax.eval_shape(tx.init, params)))
    sent = wire_bytes(tx, params, form.share) * form.steps
    return {
        "MB sent a step": sent / 1e6,
        "MB of params and state": sum(x.size * x.dtype.itemsize for x in held) / 1e6,
    }


def table(found: Mapping[Any, dict[str, Any]], seeds: int) -> list[dict[str, Any]]:
    """A row for each form beside the mean in f32, each at its own rate."""
    ends = {
        name: of_seeds(found, (name,), seeds, best_rate(found, (name,), 1, RATES), "reported")
        for name in FORMS
    }
    rows: list[dict[str, Any]] = []
    for name, form in FORMS.items():
        rate = power_in(best_rate(found, (name,), 1, RATES), RATES)
        row = {"form": name, "rate": rate, **over_seeds(ends[name], "nats")}
        row |= over_seeds(ends[name] - ends[DENSE], "more than the mean", "its s.e.")
        rows.append(row | bytes_of(form))
    return rows


def main() -> None:
    options = resumable(__doc__, "forms, by semicolon", seeds=3)
    path = work_of(options, "text_large") / "rows.jsonl"
    key = ("form", "seed", "rate")
    names = options.only.split(";") if options.only else list(FORMS)

    def run_all(cells: dict[tuple[str, ...], list[tuple[int, float]]]) -> None:
        # A run each, so that a stop loses no more.
        left = unfinished(path, key, cells).values()
        jobs = {(name, *pair): (name, [pair]) for name, pairs in left for pair in pairs}
        in_processes(runs, jobs, path, options.workers, functools.partial(on_cpu, 1))

    run_all({(name,): [(0, rate) for rate in RATES] for name in names})
    best = {name: best_rate(kept(path, *key), (name,), 1, RATES) for name in names}
    run_all({(name,): [(s, best[name]) for s in range(1, options.seeds)] for name in names})
    if options.only:
        print(*of_rows(list(kept(path, *key).values())), sep="\n")
        return
    rows = table(kept(path, *key), options.seeds)
    by_form = {row["form"]: row for row in rows}
    size = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: LARGE.init(0))))
    note = (
        f"{LARGE.workload(0).summary}; a window of {CONFIG.sequence_length} "
        f"characters a replica and step, {STEPS} steps; linear warm-up and decay; rates by factors "
        f"of two, chosen with the first of {options.seeds} seeds."
    )
    stored = by_form["params stochastic, moments int8 and log8"]
    bars = [
        Bar("state and params, stored / f32", _of(stored, by_form[DENSE]), 0.4),
        Bar("bytes sent, int8 / f32", _sent(by_form["int8"], by_form[DENSE]), 0.27),
    ]
    title = f"A transformer of {size / 1e6:.1f}M params on text"
    sections = [("Forms, each at its own rate", rows), ("To keep in mind", caveats([note]))]
    report("text_large", title, sections, bars)


def _of(row: dict[str, Any], other: dict[str, Any]) -> float:
    return row["MB of params and state"] / other["MB of params and state"]


def _sent(row: dict[str, Any], other: dict[str, Any]) -> float:
    return row["MB sent a step"] / other["MB sent a step"]


if __name__ == "__main__":
    main()
