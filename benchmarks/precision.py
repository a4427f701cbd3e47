"""What f16 does to the result: held-out losses of the text workload in f32 and in f16."""

import argparse
import statistics
from typing import Any

from harness import Bar, report

from boostax.cli.build import build
from boostax.cli.recipe import Recipe
from boostax.train.loop import fit
from boostax.workloads import TextConfig, text

VARIANTS = {
    "f32": ("float32", "none"),
    "f16, dynamic loss scale": ("float16", "dynamic"),
    "f16, no scaling": ("float16", "none"),
    "bf16": ("bfloat16", "none"),
}


def run(dtype: str, scale: Any, seed: int, steps: int) -> dict[str, float]:
    """One training run; its last held-out loss and how many steps it skipped."""
    workload = text(TextConfig(dtype=dtype, seed=seed))
    built = build(workload, Recipe(steps=steps, loss_scale=scale))
    result = fit(built.step, built.init(seed), workload.batch, steps=steps, evaluate=built.evaluate)
    last = result.history[-1]
    return {"loss": last["held_out_loss"], "skipped": last.get("skipped_steps", 0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    seeds = range(options.seeds)
    rows, found = [], {}
    for name, (dtype, scale) in VARIANTS.items():
        runs = [run(dtype, scale, seed, options.steps) for seed in seeds]
        found[name] = [r["loss"] for r in runs]
        rows.append(
            {"variant": name}
            | {f"seed {seed}": r["loss"] for seed, r in zip(seeds, runs, strict=True)}
            | {"mean": statistics.fmean(found[name]), "skipped": sum(r["skipped"] for r in runs)}
        )
        print(rows[-1], flush=True)
    scaled = "f16, dynamic loss scale"
    bars = [
        Bar(
            f"seed {seed}: f16 with loss scaling, held-out loss / f32's",
            found[scaled][seed] / found["f32"][seed],
            1.01,
        )
        for seed in seeds
    ]
    title = f"text, {options.steps} steps, held-out loss in nats per character"
    report("precision", "Precision: what f16 does to the result", [(title, rows)], bars)


if __name__ == "__main__":
    main()
