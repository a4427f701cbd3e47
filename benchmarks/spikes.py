"""Text with one batch in a hundred poisoned: skip it, clip it, or let it pass.

A poisoned batch has characters drawn at random for text; or these, and a gradient a hundred times
the usual besides. Every method trains on the same batches from the same weights at every rate, and
has the rate with the lowest mean loss over the seeds on rows to choose by; the loss reported is
that of others. No method is told which batches are poisoned.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import (
    Bar,
    Form,
    best_rate,
    compiled_form,
    in_processes,
    kept,
    of_rows,
    of_seeds,
    on_cpu,
    over_seeds,
    paired,
    power,
    power_in,
    ratio,
    report,
    resumable,
    unfinished,
    work_of,
)
from text_runs import SMALL, warmed
from workloads import TextConfig, text

import boostax
from boostax.precision import skip_spikes

PyTree = Any
RATES = tuple(2.0**power for power in range(-10, -4))
STEPS, SEEDS, SHARE = 800, 5, 0.01
# Of the model whose steps are timed.
WIDE = TextConfig(width=128, depth=4, heads=4, sequence_length=64, batch_size=16)
# What the gradient of a poisoned batch is multiplied by, by kind.
POISONS = {"clean": None, "random characters": 1.0, "random characters, gradient x 100": 100.0}
METHODS: dict[str, Callable[[Any], Any]] = {
    "none": lambda tx: tx,
    "clip_by_global_norm(1)": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "skip, gradient, median": skip_spikes,
    "skip, gradient, sigma": functools.partial(skip_spikes, rule="sigma"),
    "clip, AdaGC": lambda tx: optax.chain(boostax.model.adagc(), tx),
}


def poisoned(batches: PyTree, seed: int) -> tuple[PyTree, jax.Array]:
    """Batches ``[STEPS, ...]``, one in a hundred of random characters, and which these are."""
    rng = np.random.default_rng(seed)
    # The first come when a ring is half full.
    bad = np.zeros(STEPS, bool)
    bad[rng.choice(np.arange(STEPS // 8, STEPS), round(STEPS * SHARE), replace=False)] = True
    most = max(int(x.max()) for x in jax.tree.leaves(batches)) + 1

    def spoil(x: np.ndarray) -> np.ndarray:
        x = np.array(x)
        x[bad] = rng.integers(0, most, x[bad].shape)
        return x

    return jax.tree.map(spoil, batches), jnp.asarray(bad)


def trained(name: str, poison: float | None) -> Callable[..., dict[str, jax.Array]]:
    """A compiled run: of a rate, params and batches, what it ends with."""

    @jax.jit
    def run(rate: jax.Array, params: PyTree, batches: PyTree, judged: Any, bad: Any) -> Any:
        tx = METHODS[name](optax.adamw(warmed(rate, STEPS)))
        tx = optax.with_extra_args_support(tx)
        worse = 1.0 if poison is None else poison

        def step(carry: PyTree, given: Any) -> tuple[PyTree, jax.Array]:
            (params, state), (batch, spoilt) = carry, given
            grads = jax.grad(SMALL.loss)(params, batch)
            factor = jnp.where(spoilt, worse, 1.0)
            grads = jax.tree.map(lambda g: g * factor, grads)
            carry = boostax.apply_gradients(tx, grads, state, params)
            return carry, boostax.metrics(carry[1]).get("spikes", jnp.int32(0))

        carry, spikes = jax.lax.scan(step, (params, tx.init(params)), (batches, bad))
        touched = jnp.diff(spikes, prepend=0) > 0
        chosen, reported = (SMALL.judge(carry[0], part) for part in SMALL.halves(judged))
        return {
            "chosen": chosen,
            "reported": reported,
            "found": jnp.sum(touched & bad) / jnp.maximum(jnp.sum(bad), 1),
            "others": jnp.sum(touched & ~bad) / jnp.sum(~bad),
        }

    return run


def runs(kind: str, name: str, pairs: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """A row for each of some seeds and rates of a method."""
    run = trained(name, POISONS[kind])
    rows: list[dict[str, Any]] = []
    for seed, rate in pairs:
        batches, judged = SMALL.batches(seed, STEPS)
        bad = jnp.zeros(STEPS, bool)
        if POISONS[kind] is not None:
            batches, bad = poisoned(batches, seed)
        found = run(jnp.float32(rate), SMALL.init(seed), batches, judged, bad)
        row = {"kind": kind, "method": name, "rate": rate, "seed": seed}
        rows.append(row | {key: float(x) for key, x in found.items()})
    return rows


def table(kind: str, found: Mapping[Any, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method, beside the clean run without any."""

    ends = lambda of, name, rate, figure: of_seeds(found, (of, name), SEEDS, rate, figure)  # noqa: E731
    best = lambda of, name: best_rate(found, (of, name), SEEDS, RATES)  # noqa: E731
    clean = ends("clean", "none", best("clean", "none"), "reported")
    rows: list[dict[str, Any]] = []
    for name in METHODS:
        rate = best(kind, name)
        here = ends(kind, name, rate, "reported")
        row: dict[str, Any] = {"method": name, "rate": power_in(rate, RATES)}
        row |= {**over_seeds(here, "nats"), **over_seeds(here - clean, "above clean", "its s.e.")}
        highest = ends(kind, name, RATES[-1], "reported") - clean
        row |= {f"above clean at {power(RATES[-1])}": float(highest.mean())}
        for figure, title in (("found", "poisoned: touched"), ("others", "others: touched")):
            row[title] = float(ends(kind, name, rate, figure).mean())
        rows.append(row)
    return rows


def cost(rounds: int) -> list[dict[str, Any]]:
    """Of one training step, beside the step without."""
    workload = text(WIDE)
    params = workload.init(jax.random.key(0))[0]
    batch = jax.tree.map(jnp.asarray, workload.batch(0))
    forms: dict[str, Form] = {}
    for name, build in METHODS.items():
        tx = optax.with_extra_args_support(build(optax.adamw(1e-3)))

        def step(params: PyTree, state: PyTree, batch: PyTree, tx: Any = tx) -> Any:
            grads = jax.grad(lambda p: workload.loss_fn(p, batch)[0])(params)
            return boostax.apply_gradients(tx, grads, state, params)

        forms[name] = compiled_form(step, params, tx.init(params), batch)
    times = paired(forms, rounds)
    return [{"method": name, "time / none": ratio(times, name, "none")} for name in METHODS]


def main() -> None:
    options = resumable(__doc__, "kinds of poison, by semicolon", rounds=60)
    path = work_of(options, "spikes") / "rows.jsonl"
    key = ("kind", "method", "seed", "rate")
    kinds = options.only.split(";") if options.only else list(POISONS)
    cells = {
        cell: itertools.product(range(SEEDS), RATES) for cell in itertools.product(kinds, METHODS)
    }
    jobs = unfinished(path, key, cells)
    in_processes(runs, jobs, path, options.workers, functools.partial(on_cpu, 1))
    found = kept(path, *key)
    title = f"{{}}, AdamW, {STEPS} batches, {SEEDS} seeds"
    sections = [(title.format(kind), table(kind, found)) for kind in kinds]
    if options.only:
        print(*(line for _, rows in sections for line in of_rows(rows)), sep="\n")
        return
    times = cost(options.rounds)
    sections.append(("A step on CPU, beside one without", times))
    bars = [
        Bar(f"{row['method']}: time of a step", row["time / none"], 1.02)
        for row in times
        if "skip" in row["method"]
    ]
    report("spikes", "Spikes: one poisoned batch in a hundred", sections, bars)


if __name__ == "__main__":
    main()
