"""What averaging one partition of the params per step does to the result: digits and text.

The same problems, optimizers, seeds and tuning as in ``compression_accuracy.py``, on fewer steps of
text. Beside ``partial_average`` stands local SGD that sends as many bytes: all params, at every
fourth step.
"""

import concurrent.futures
import functools
import multiprocessing
from typing import Any

from harness import arguments, report
from replica_runs import AXIS, Method, Tuned, compared, first, tuned

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
    return tuned(methods()[index], seeds, on_text=on_text, steps=STEPS)


def table(found: dict[tuple[bool, str], Tuned], on_text: bool) -> list[dict[str, Any]]:
    """A row per method, paired with dense by seed."""
    dense = found[on_text, DENSE]
    return [
        {"method": name} | compared(each, dense, on_text=on_text)
        for (which, name), each in found.items()
        if which is on_text
    ]


def main() -> None:
    seeds = arguments(__doc__, seeds=5).seeds
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as pool:
        futures = {
            (on_text, method.name): pool.submit(tune, index, seeds, on_text)
            for on_text in (True, False)
            for index, method in enumerate(methods())
        }
        found = {key: future.result() for key, future in futures.items()}
    report(
        "partial_accuracy",
        "Averaging one partition of the params per step: what it does to the result",
        [
            (
                f"Digits, SGD with momentum 0.9, 8 replicas: accuracy, {seeds} seeds",
                table(found, on_text=False),
            ),
            (
                f"Text, AdamW, 8 replicas, {STEPS:,} steps: nats, {seeds} seeds",
                table(found, on_text=True),
            ),
        ],
        [],
    )


if __name__ == "__main__":
    main()
