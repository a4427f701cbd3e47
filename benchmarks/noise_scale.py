"""Windows that grow with the gradient noise scale, beside fixed ones: tokens and steps to a loss.

A small transformer on text, AdamW at a constant rate after a warm-up, on one device. Every window
has the rate that reaches the last loss in the fewest tokens with the first seed. Loss is judged on
training windows unseen.
"""

import argparse
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import over_seeds, power, power_in, report
from text_runs import Text
from workloads import TextConfig

import boostax

PyTree = Any
TEXT = Text(TextConfig(width=16, depth=1, heads=2, sequence_length=16, batch_size=8), judged=32)
TOKENS = TEXT.config.batch_size * TEXT.config.sequence_length
# Micro-steps between two looks at the loss.
LOOK = 100
RATES = tuple(2.0**power for power in range(-10, -4))
TARGETS = (2.2, 2.1)
FIXED = (1, 2, 4, 8, 16, 32)


class Method(NamedTuple):
    """A window, by name, around any optimizer."""

    name: str
    build: Callable[[Any], Any]


class Run(NamedTuple):
    """What one training run shows at each look.

    Attributes:
      losses: in nats per character.
      steps: of the optimizer.
      scales: the noise scale in micro-batches; NaN where it is not measured.
    """

    losses: np.ndarray[Any, Any]
    steps: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any]

    def look(self, target: float) -> int | None:
        """The first that shows a loss, counted from 1."""
        there = np.flatnonzero(self.losses <= target)
        return int(there[0]) + 1 if there.size else None


def methods() -> list[Method]:
    """Fixed windows, and those that grow."""
    fixed = [
        Method(f"{k} micro-steps", functools.partial(boostax.accumulate, every=k)) for k in FIXED
    ]
    grown = [
        Method(
            f"{fraction:g} of the noise scale, 2 to 64",
            functools.partial(
                boostax.accumulate,
                every=boostax.train.by_noise(2, 64, fraction=fraction),
                noise=0.99,
            ),
        )
        for fraction in (1.0, 0.25)
    ]
    return fixed + grown


def batches_of(seed: int, looks: int) -> tuple[PyTree, PyTree]:
    """Batches ``[looks, micro-steps, ...]`` to train on, and ``[batches, ...]`` to judge by."""
    training, unseen = TEXT.batches(seed, looks * LOOK)
    return jax.tree.map(lambda x: x.reshape(looks, LOOK, *x.shape[1:]), training), unseen


def training(method: Method) -> Callable[[float, int, int], Run]:
    """A run by its rate, its seed and the number of looks."""

    @jax.jit
    def trained(rate: jax.Array, params: PyTree, batches: PyTree, unseen: PyTree) -> Any:
        # In steps of the optimizer, as AdamW's moments warm up.
        warm = lambda step: rate * jnp.minimum((step + 1) / 50, 1)  # noqa: E731
        tx = method.build(optax.adamw(warm))

        def micro_step(carry: PyTree, batch: PyTree) -> tuple[PyTree, None]:
            params, state = carry
            grads = jax.grad(TEXT.loss)(params, batch)
            return boostax.apply_gradients(tx, grads, state, params), None

        def look(carry: PyTree, batches: PyTree) -> tuple[PyTree, Any]:
            carry, _ = jax.lax.scan(micro_step, carry, batches)
            params, state = carry
            loss = TEXT.judge(params, unseen)
            found = boostax.metrics(state)
            return carry, (loss, found["optimizer_steps"], found.get("noise_scale", jnp.nan))

        return jax.lax.scan(look, (params, tx.init(params)), batches)[1]

    def run(rate: float, seed: int, looks: int) -> Run:
        found = trained(jnp.float32(rate), TEXT.init(seed), *batches_of(seed, looks))
        return Run(*map(np.asarray, found))

    return run


def tuned(method: Method, seeds: int, looks: int) -> tuple[float, list[Run]]:
    """The rate that suits a window, and its run of every seed."""
    run = training(method)
    first = {rate: run(rate, 0, looks) for rate in RATES}

    def cost(rate: float) -> tuple[float, float]:
        found, last = first[rate], float(first[rate].losses[-1])
        return found.look(TARGETS[-1]) or math.inf, last if math.isfinite(last) else math.inf

    best = min(RATES, key=cost)
    runs = [first[best], *(run(best, seed, looks) for seed in range(1, seeds))]
    print(method.name, power(best), [x.look(TARGETS[-1]) for x in runs], flush=True)
    return best, runs


def row(method: Method, rate: float, runs: list[Run]) -> dict[str, Any]:
    """Means over the seeds; a loss that some seed does not reach has none."""
    found: dict[str, Any] = {"window": method.name, "rate": power_in(rate, RATES)}
    for target in TARGETS:
        looks = [run.look(target) for run in runs]
        reached = [(run, look) for run, look in zip(runs, looks, strict=True) if look]
        whole = len(reached) == len(runs)
        tokens = [look * LOOK * TOKENS / 1e6 for _, look in reached]
        steps = np.array([run.steps[look - 1] for run, look in reached])
        columns = f"M tokens to {target}", f"s.e. to {target}"
        found |= over_seeds(tokens, *columns) if whole else dict.fromkeys(columns)
        found[f"steps to {target}"] = float(steps.mean()) if whole else None
    calls = len(runs[0].losses) * LOOK
    found["micro-steps per step"] = float(np.mean([calls / run.steps[-1] for run in runs]))
    scales = [float(np.median(run.scales[-10:])) for run in runs]
    found["noise scale at the end"] = float(np.mean(scales)) if np.isfinite(scales).all() else None
    found["loss at the end"] = float(np.mean([run.losses[-1] for run in runs]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--looks", type=int, default=160, help=f"each of {LOOK} micro-steps")
    parser.add_argument("--only", default="", help="windows, by comma; publishes nothing")
    options = parser.parse_args()
    only = options.only.split(",")
    rows = [
        row(method, *tuned(method, options.seeds, options.looks))
        for method in methods()
        if not options.only or method.name in only
    ]
    if options.only:
        print(*rows, sep="\n")
        return
    title = f"Text, AdamW, micro-batches of {TOKENS} tokens, {options.seeds} seeds"
    report(
        "noise_scale",
        "Windows by the gradient noise scale: tokens and steps to a loss",
        [(title, rows)],
        [],
    )


if __name__ == "__main__":
    main()
