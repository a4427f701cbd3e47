"""What averaging one partition of the params per step does to the result: digits and text.

The same problems, optimizers, seeds and tuning as in ``compression_accuracy.py``, on fewer steps of
text. Beside ``partial_average`` stands local SGD that sends as many bytes: all params, at every
fourth step.
"""

import argparse
import concurrent.futures
import functools
import multiprocessing
from typing import Any

import jax
import numpy as np
from digits_replicas import init, standard_error
from harness import report
from replica_runs import (
    AXIS,
    RATES,
    SIZES,
    TEXT_RATES,
    Method,
    Tuned,
    digits_run,
    first,
    power,
    text_run,
    text_workload,
    tuned,
)

import boostax

DENSE = "dense f32"
# Of text: a fourth of those of compression_accuracy.py.
STEPS = 4_000


def methods() -> list[Method]:
    """Dense, a half and a fourth per step, and a fourth of the bytes by meeting at every fourth."""
    partial = boostax.reduce.partial_average
    return [
        Method(DENSE, None, first(boostax.all_reduce(AXIS))),
        *(
            Method(f"{n} partitions", None, functools.partial(_around, partial, n), share=1 / n)
            for n in (2, 4)
        ),
        Method(
            "local SGD, every 4",
            None,
            functools.partial(_around, boostax.reduce.local_updates, 4),
            share=1 / 4,
        ),
    ]


def _around(make: Any, count: int, optimizer: Any) -> Any:
    return make(optimizer, AXIS, count)


def tune(index: int, seeds: int, on_text: bool) -> Tuned:
    """A method by its number, in a process of its own."""
    method = methods()[index]
    if on_text:
        params = jax.eval_shape(text_workload(0).init, jax.random.key(0))[0]
        return tuned(method, text_run(method, STEPS), params, seeds, on_text=True)
    params = jax.eval_shape(lambda: init(jax.random.key(0), SIZES))
    return tuned(method, digits_run(method), params, seeds, on_text=False)


def table(
    found: dict[str, Tuned], measure: str, beside: str, on_text: bool
) -> list[dict[str, Any]]:
    """A row per method, paired with dense by seed."""
    rates = TEXT_RATES if on_text else RATES
    rows: list[dict[str, Any]] = []
    for name, each in found.items():
        dense = found[DENSE].test
        compared = each.test / dense if on_text else 100 * (dense - each.test)
        edge = " (edge)" if each.rate in (min(rates), max(rates)) else ""
        rows.append(
            {
                "method": name,
                "bytes / dense": each.wire,
                "rate": power(each.rate) + edge,
                measure: float(each.test.mean()),
                "s.e.": standard_error(each.test),
                beside: float(compared.mean()),
                "its s.e.": standard_error(compared),
                "training loss": float(np.mean([end.training for end in each.endings])),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as pool:
        futures = {
            (on_text, method.name): pool.submit(tune, index, seeds, on_text)
            for on_text in (True, False)
            for index, method in enumerate(methods())
        }
        found = {key: future.result() for key, future in futures.items()}
    of_text, of_digits = (
        {name: each for (on_text, name), each in found.items() if on_text is which}
        for which in (True, False)
    )
    report(
        "partial_accuracy",
        "Averaging one partition of the params per step: what it does to the result",
        [
            (
                f"Digits, SGD with momentum 0.9, 8 replicas: accuracy, {seeds} seeds",
                table(of_digits, "test", "points below dense", False),
            ),
            (
                f"Text, AdamW, 8 replicas, {STEPS:,} steps: nats, {seeds} seeds",
                table(of_text, "held-out loss", "loss / dense", True),
            ),
        ],
        [],
    )


if __name__ == "__main__":
    main()
