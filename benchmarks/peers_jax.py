"""Every technique beside what a JAX user would pick instead, in one run: ratios and counts."""

import json
import os
from collections.abc import Iterable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import accumulation
import adasum
import freezing
import harness
import jax
import jax.numpy as jnp
import loss_scale
import optax
import peers_finish
from problems import grads, params

import boostax

PyTree = Any
ADAM = optax.adam(1e-3)
Row = dict[str, Any]
# Ratios of times closer to one than this are called even: repeated runs differ by as much.
EVEN = 0.05
FLOOR = 2**16
# What boostax claims to be faster than.
MUST_WIN = (
    ("`dynamic_loss_scale`", "flax DynamicScale + where"),
    ("`dynamic_loss_scale`", "jmp + select_tree"),
    ("`dynamic_loss_scale`", "mixed_precision_for_JAX"),
    ("`accumulate`", "optax.MultiSteps"),
    ("`scheduled_freeze`", freezing.SELECTED),
    ("`scheduled_freeze`", freezing.ZEROED),
)


def pair(
    technique: str,
    instead: str,
    time: float | None = None,
    temp: float | None = None,
    wire: float | None = None,
    remark: str = "",
) -> Row:
    """Return the row of a technique and what stands in for it.

    Figures are ratios, ours over theirs: below one is for boostax. ``None`` is not measured, or
    zero over zero. The other is ahead wherever one of its figures is better.
    """
    figures = {"time": time, "memory": temp, "wire bytes": wire}
    found = [x for x in figures.values() if x is not None]
    worse, better = max(found) > 1 + EVEN, min(found) < 1 - EVEN
    ahead = (("even", "boostax"), ("the other", "it depends"))[worse][better]
    row = {"technique": technique, "instead of": instead, **figures}
    return row | {"ahead": ahead, "remark": remark}


def over(ours: float | None, theirs: float | None) -> float | None:
    """Their ratio, if both are there and theirs is not nothing."""
    return ours / theirs if ours is not None and theirs else None


def above_floor(temp: int | None) -> int | None:
    """Temporary bytes; scalars and small tables are none, whatever they are a multiple of."""
    return None if temp is None else max(temp, FLOOR)


def pairs_of(
    made: dict[str, harness.Form], rounds: int, ours: str, others: dict[str, str], technique: str
) -> Iterable[Row]:
    """Ours beside each other form; ``others`` has the remark of each."""
    times = harness.paired(made, rounds)
    for name, remark in others.items():
        temp = over(above_floor(made[ours].temp), above_floor(made[name].temp))
        yield pair(technique, name, harness.ratio(times, ours, name), temp, remark=remark)


def scaling(rounds: int) -> Iterable[Row]:
    made = loss_scale.forms(jnp.float32)
    others = {
        "bare Adam": "what the scaler adds",
        "flax DynamicScale + where": "",
        "jmp + select_tree": "",
        "mixed_precision_for_JAX": "",
        "optax.apply_if_finite (scales nothing)": "scales nothing; applies a NaN in the end",
    }
    return pairs_of(made, rounds, "boostax apply_gradients", others, "`dynamic_loss_scale`")


def windows(rounds: int) -> Iterable[Row]:
    p, g = params(), grads()
    ours = boostax.accumulate(ADAM, 8)
    theirs: Any = optax.MultiSteps(ADAM, 8).gradient_transformation()
    made = {
        "ours": harness.compiled_form(harness.by_apply(ours), p, ours.init(p), g, calls=8),
        "optax.MultiSteps": harness.compiled_form(
            harness.by_update(theirs), p, theirs.init(p), g, calls=8
        ),
    }
    others = {"optax.MultiSteps": "a window of 8, the optimizer alone"}
    yield from pairs_of(made, rounds, "ours", others, "`accumulate`")
    for rows in (16, 128):
        made = {
            "ours": accumulation.whole_step(ours, 8, rows),
            "two jits by hand": accumulation.two_jits(8, rows),
        }
        others = {"two jits by hand": f"whole steps, 8 of {rows} rows"}
        yield from pairs_of(made, rounds, "ours", others, "`accumulate`")
    found, _ = accumulation.microbatches(4, 256, rounds)
    theirs_row, ours_row = found[0], found[1]
    yield pair(
        "`microbatch`",
        "optax.microbatch",
        ours_row["time / optax.microbatch"],
        ours_row["temp / params"] / theirs_row["temp / params"],
    )


def shaping(rounds: int) -> Iterable[Row]:
    p, g = params(), grads()
    clip = optax.clip_by_global_norm(1.0)

    def chained(*parts: Any) -> harness.Form:
        tx = optax.chain(*parts, ADAM)
        return harness.compiled_form(harness.by_update(tx), p, tx.init(p), g)

    made = {
        "ours": chained(boostax.model.clip_by_global_norm(1.0)),
        "optax.clip_by_global_norm": chained(clip),
    }
    others = {"optax.clip_by_global_norm": "with Adam; ours is right on shards too"}
    yield from pairs_of(made, rounds, "ours", others, "`clip_by_global_norm`")
    made = {
        "ours": chained(boostax.centralize_gradients()),
        "optax.centralize": chained(optax.centralize()),
    }
    others = {"optax.centralize": "with Adam; optax's takes the means over the other axes"}
    yield from pairs_of(made, rounds, "ours", others, "`centralize_gradients`")


def prefixes(rounds: int) -> Iterable[Row]:
    task = freezing.task(240, 8)
    names = (freezing.HOST, freezing.SELECTED, freezing.ZEROED, freezing.WHERE, freezing.BY_HAND)
    made = {name: freezing.FORMS[name](task, 5).form for name in names}
    others = dict.fromkeys(names[1:], "5 of 10 groups of a transformer frozen")
    return pairs_of(made, rounds, freezing.HOST, others, "`scheduled_freeze`")


def combined(rounds: int) -> Iterable[Row]:
    found, _ = adasum.measure(2**20, 64, rounds)
    ours = next(row for row in found if row["form"] == "boostax.adasum")
    for row in found:
        if row["form"] in ("lax.pmean", *adasum.OTHERS):
            yield pair(
                "`adasum`",
                row["form"],
                ours["time / mean"] / row["time / mean"],
                over(ours["temp / gradient"], row["temp / gradient"]),
                over(ours["bytes / mean's"], row["bytes / mean's"]),
                "" if row["form"] == "lax.pmean" else "the same sum, written by hand",
            )


def states() -> Iterable[Row]:
    """Optimizer state on a device, where others make it smaller by other means."""
    p = params()
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    adam = size(jax.eval_shape(ADAM.init, p))
    galore = size(jax.eval_shape(optax.contrib.galore(1e-3, rank=128).init, p))
    # Every leaf has a dimension that eight divides.
    ours = adam / 8
    name, place = "`shard_optimizer=True`", "8 replicas: state on a device"
    sent = f"{place}; the compiler decides what is sent"
    yield pair(name, "whole Adam", None, ours / adam, None, sent)
    remark = f"{place}; ours is exact"
    yield pair(name, "galore, rank 128", None, ours / galore, None, remark)


PARTS = (scaling, windows, shaping, prefixes, combined)


def main() -> None:
    options = harness.arguments(__doc__, rounds=15, short=(False, "few rounds; publishes nothing"))
    jax.config.update("jax_num_cpu_devices", 8)
    rows: list[Row] = []
    for part in PARTS:
        rows += part(3 if options.short else options.rounds)
        print(json.dumps(rows[-1]), flush=True)
    rows += states()
    finish = peers_finish.finishing(seeds=1 if options.short else 3)
    if options.short:
        print(*harness.of_rows(rows), "", *harness.of_rows(finish), sep="\n")
        return
    bars = [
        harness.Bar(f"{row['technique']} instead of {row['instead of']}: time", row["time"], 1.0)
        for row in rows
        if (row["technique"], row["instead of"]) in MUST_WIN
    ]
    harness.report(
        "peers_jax",
        "Beside what one would use instead",
        [("Pairs", rows), ("A finish", finish)],
        bars,
    )


if __name__ == "__main__":
    main()
