"""What f16 does to the result: where it costs nothing, and where it needs its gradients scaled."""

import statistics
from collections.abc import Callable
from typing import Any

import jax
import optax
from harness import Bar, arguments, over_seeds, report
from workloads import DigitsConfig, TextConfig, Workload, digits, text

import boostax

VARIANTS = {
    "f32": ("float32", "none"),
    "f16, dynamic loss scale": ("float16", "dynamic"),
    "f16, no scaling": ("float16", "none"),
    "bf16": ("bfloat16", "none"),
}
SCALED, UNSCALED = "f16, dynamic loss scale", "f16, no scaling"
Runs = dict[str, list[dict[str, float]]]


def run(workload: Workload, scale: Any, seed: int, steps: int) -> dict[str, float]:
    """One training run; what it ends with on the held-out split, and how many steps it skipped."""
    warmup = max(1, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(
        2e-3 / (warmup + 1), 2e-3, warmup, max(steps, warmup + 1), 2e-4
    )
    matrices = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    adamw = optax.adamw(schedule, weight_decay=0.01, mask=matrices)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    tx = boostax.dynamic_loss_scale(tx) if scale == "dynamic" else tx
    step = boostax.make_train_step(workload.loss_fn, tx)
    params_key, _ = jax.random.split(jax.random.key(seed))
    state = step.init(jax.jit(workload.init)(params_key))
    for index in range(steps):
        state, metrics = step(state, workload.batch(index))
    return {**workload.evaluate(state.params), "skipped": float(metrics.get("skipped", 0.0))}


def compare(make: Callable[[str, int], Workload], steps: int, seeds: int) -> Runs:
    """Every variant with every seed."""
    found: Runs = {}
    for name, (dtype, scale) in VARIANTS.items():
        found[name] = [run(make(dtype, seed), scale, seed, steps) for seed in range(seeds)]
        print(name, found[name], flush=True)
    return found


def table(found: Runs) -> list[dict[str, Any]]:
    """A row per variant: the loss of each seed, the means, the skips."""
    return [
        {"variant": name}
        | {f"loss, seed {seed}": each["loss"] for seed, each in enumerate(runs)}
        | over_seeds([each["loss"] for each in runs], "mean loss")
        | {
            "mean accuracy": statistics.fmean(each["accuracy"] for each in runs),
            "skipped": int(sum(each["skipped"] for each in runs)),
        }
        for name, runs in found.items()
    ]


def vanished(scale: float) -> dict[str, float]:
    """Share of gradient entries that are exactly zero, per layer, at the first step in f16."""
    workload = digits(DigitsConfig(model="sigmoid", dtype="float16"))
    params = workload.init(jax.random.key(0))
    tx = boostax.static_loss_scale(optax.identity(), scale)
    _, grads = boostax.value_and_grad(workload.loss_fn)(params, tx.init(params), workload.batch(0))
    return {name: float((grads[name]["kernel"] == 0).mean()) for name in sorted(grads)}


def main() -> None:
    options = arguments(__doc__, steps=300, sigmoid_steps=3000, seeds=3)
    on_text = compare(
        lambda dtype, seed: text(TextConfig(dtype=dtype, seed=seed)), options.steps, options.seeds
    )
    on_sigmoid = compare(
        lambda dtype, seed: digits(DigitsConfig(model="sigmoid", dtype=dtype, seed=seed)),
        options.sigmoid_steps,
        options.seeds,
    )
    zeros = {f"scale {scale:g}": vanished(scale) for scale in (1.0, 2.0**16)}
    bars = []
    for seed in range(options.seeds):
        ratio = on_text[SCALED][seed]["loss"] / on_text["f32"][seed]["loss"]
        bars.append(Bar(f"text, seed {seed}: loss of scaled f16 / f32", ratio, 1.01))
    for seed in range(options.seeds):
        scaled = on_sigmoid[SCALED][seed]["loss"]
        plain = on_sigmoid["f32"][seed]["loss"]
        lost = on_sigmoid[UNSCALED][seed]["loss"]
        claim = f"sigmoid, seed {seed}: share of what f16 loses that scaling does not recover"
        bars.append(Bar(claim, (scaled - plain) / (lost - plain), 0.05))
        claim = f"sigmoid, seed {seed}: loss of f32 / unscaled f16"
        bars.append(Bar(claim, plain / lost, 0.9))
    report(
        "precision",
        "Precision: what f16 does to the result",
        [
            (f"text, {options.steps} steps: held-out loss in nats per character", table(on_text)),
            (
                f"digits, five sigmoid layers, {options.sigmoid_steps} steps: loss in nats "
                "(chance is 2.303)",
                table(on_sigmoid),
            ),
            (
                "The same net in f16: share of kernel gradients that are exactly zero at step 1",
                [{"loss scaled by": name} | shares for name, shares in zeros.items()],
            ),
        ],
        bars,
    )


if __name__ == "__main__":
    main()
