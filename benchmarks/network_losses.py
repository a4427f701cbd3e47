"""Seconds to a loss on hosts whose links are limited: a transformer on text, each technique tuned.

Steps are counted on four replicas emulated by ``jax.vmap``, for each learning rate and length of
the run; the seconds of a step are measured on hosts, as in ``network.py``. Runs are kept as they
end, and ``--work`` goes on.
"""

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import harness
import jax
import jax.numpy as jnp
import matplotlib as mpl
import network
import optax
from digits_replicas import emulated
from matplotlib import pyplot as plt
from network import TECHNIQUES, TEXT, Technique
from text_runs import warmed

import boostax
from boostax.auditing.network import Network

PyTree = Any
HOSTS, EVERY = 4, 10
MEAN = "all_reduce"
SHORT, STEPS, RATES = 300, (450, 600), tuple(2.0**power for power in (-9, -8, -7))
LINKS = ("20mbit", "100mbit", "1gbit")
FORMS = [name for name in TECHNIQUES if name not in ("all_reduce, f16", "threshold_reduce, 1%")]
DRAWN = (
    *("all_reduce", "all_reduce, bf16", "int8_reduce"),
    *("local_updates, 16", "local_updates, 16, int8", "SparseLoCo, 16"),
)
# How techniques are written, where it is not their name.
CALLS = {
    "all_reduce, bf16": 'all_reduce(wire_dtype="bfloat16")',
    "local_updates, 16": "local_updates(every=16)",
    "local_updates, 16, int8": "local_updates(every=16, reduction=int8_reduce())",
}
# Nats above what a short run of the mean ends with.
TARGETS = {"the mean's last loss": 0.0, "0.15 nats more": 0.15}
PICTURE = harness.DOCS / "pictures/network.svg"
ADVICE = pathlib.Path(boostax.__file__).parent / "auditing/network.toml"
Row = dict[str, Any]


def trained(form: Technique, steps: int) -> Callable[..., jax.Array]:
    """A compiled run: of a rate, params, batches and those to judge by, the losses on the way."""

    @jax.jit
    def run(rate: jax.Array, params: PyTree, batches: PyTree, unseen: PyTree) -> jax.Array:
        tx = form.build(optax.adamw(warmed(rate, steps)))
        carry, step, params_of = emulated(tx, TEXT.loss, params, HOSTS)

        def judged(carry: PyTree, batches: PyTree) -> tuple[PyTree, jax.Array]:
            carry, _ = jax.lax.scan(step, carry, batches)
            return carry, TEXT.judge(params_of(carry), unseen)

        split = lambda x: x.reshape(steps // EVERY, EVERY, HOSTS, -1, x.shape[-1])  # noqa: E731
        return jax.lax.scan(judged, carry, jax.tree.map(split, batches))[1]

    return run


def runs(name: str, steps: int, pairs: Sequence[tuple[int, float]]) -> list[Row]:
    """A row for each of some seeds and rates of a technique."""
    run = trained(TECHNIQUES[name], steps)
    rows: list[Row] = []
    for seed, rate in pairs:
        losses = run(jnp.float32(rate), TEXT.init(seed), *TEXT.batches(seed, steps))
        row = {"form": name, "steps": steps, "seed": seed, "rate": rate}
        rows.append(row | {"losses": [round(float(x), 5) for x in losses]})
    return rows


def reached(losses: Sequence[float], target: float) -> float:
    """The steps after which losses reach a target for the first time."""
    at = next((i for i, x in enumerate(losses) if x <= target), None)
    return math.inf if at is None else EVERY * (at + 1)


def rate_of(found: PyTree, name: str) -> float:
    """The rate with the lowest last loss of the first seed."""
    return min(RATES, key=lambda rate: found[name, STEPS[0], 0, rate]["losses"][-1])


def target_of(found: PyTree, seed: int, above: float) -> float:
    """The loss of a seed to reach."""
    return found[MEAN, SHORT, seed, rate_of(found, MEAN)]["losses"][-1] + above


def table(found: PyTree, timed: list[Row], seeds: int, above: float) -> list[Row]:
    """Of one target a row for each technique: steps in the better run, seconds on each link."""
    measured = {row["form"]: row for row in timed}
    rows: list[Row] = []
    for name in FORMS:
        rate = rate_of(found, name)
        each = {n: [found[name, n, seed, rate]["losses"] for seed in range(seeds)] for n in STEPS}
        took = {
            n: [reached(x, target_of(found, seed, above)) for seed, x in enumerate(losses)]
            for n, losses in each.items()
        }
        steps = min(STEPS, key=lambda n: (sum(took[n]), -n))
        fits = math.isfinite(sum(took[steps]))
        row: Row = {"form": name, "run": steps, "rate": harness.power_in(rate, RATES)}
        row |= harness.over_seeds([losses[-1] for losses in each[STEPS[-1]]], "last loss")
        counts = harness.over_seeds(took[steps] if fits else [0.0, 0.0], "steps", "their s.e.")
        row |= counts if fits else dict.fromkeys(counts)
        for link in LINKS:
            seconds = measured[name][f"s at {link}"]
            row[f"s at {link}"] = counts["steps"] * seconds if fits else None
            row[f"s.e. at {link}"] = counts["their s.e."] * seconds if fits else None
        rows.append(row)
    return rows


def fastest(rows: list[Row], link: str) -> str:
    """The technique that needs the fewest seconds."""
    ended = [row for row in rows if row[f"s at {link}"] is not None]
    return min(ended, key=lambda row: row[f"s at {link}"])["form"]


def as_fast(rows: list[Row], name: str, link: str) -> bool:
    """Whether a mean takes as long as a technique, within two standard errors."""
    one, other = (next(row for row in rows if row["form"] == x) for x in (name, MEAN))
    error = math.hypot(one[f"s.e. at {link}"], other[f"s.e. at {link}"])
    return other[f"s at {link}"] - one[f"s at {link}"] <= 2 * error


def advice(sections: Mapping[str, list[Row]]) -> str:
    """What ``boostax.audit(network=)`` recommends: the fastest to what the mean ends with."""
    rows = next(
        rows for title, rows in sections.items() if title.startswith("To the mean's last loss")
    )
    said = "# The reduction that reached a loss first, by the rate of each link in bits per second."
    said += "\n# From benchmarks/results/network_losses.md.\n"
    said += f'workload = "a transformer of 254,720 params, {HOSTS} hosts"\nfirst = [\n'
    for link in LINKS:
        rate = Network.of(link).rate
        name = fastest(rows, link)
        tie = str(as_fast(rows, name, link)).lower()
        said += f"  {{ rate = {rate:.0f}, form = '{CALLS.get(name, name)}', tie = {tie} }},\n"
    return f"{said}]\n"


def draw(seconds: list[Row], losses: list[Row]) -> None:
    """Two pictures side by side: seconds a step, and seconds to the mean's loss, by rate."""
    plt.style.use(pathlib.Path(boostax.__file__).parent / "auditing/boostax.mplstyle")
    mpl.rcParams |= {"svg.hashsalt": "boostax", "svg.fonttype": "none"}
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharex=True, layout="constrained")
    pictures = zip(axes, (seconds, losses), ("a step", "to the loss"), strict=True)
    for axis, rows, words in pictures:
        by_form = {row["form"]: row for row in rows}
        for name, color in zip(DRAWN, mpl.color_sequences["tab10"], strict=False):
            values = [by_form[name][f"s at {link}"] for link in LINKS]
            axis.plot(LINKS, values, "o-", label=name, color=color)
        axis.set(yscale="log", xlabel="each host's link, bit/s", ylabel=f"seconds {words}")
        axis.set_xticks(LINKS, [link.replace("bit", "").upper() for link in LINKS])
        axis.minorticks_off()
        low, high = axis.get_ylim()
        axis.set_yticks([x for x in (0.03, 0.1, 0.3, 10, 30, 100) if low < x < high])
        axis.yaxis.set_major_formatter("{x:g}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    options = harness.resumable(__doc__, seeds=3, rounds=2)
    network.require_links()
    work = harness.work_of(options, "network_losses")
    path, key = work / "rows.jsonl", ("form", "steps", "seed", "rate")

    def run_all(cells: dict[tuple[Any, ...], list[tuple[int, float]]]) -> None:
        harness.in_processes(runs, harness.unfinished(path, key, cells), path, options.workers)

    run_all({(name, STEPS[0]): [(0, rate) for rate in RATES] for name in FORMS})
    best = {name: rate_of(harness.kept(path, *key), name) for name in FORMS}
    seeds = range(options.seeds)
    runs_of = lambda name: [(seed, best[name]) for seed in seeds]  # noqa: E731
    run_all({(MEAN, SHORT): runs_of(MEAN)})
    run_all({(name, n): runs_of(name) for name in FORMS for n in STEPS})
    found = harness.kept(path, *key)
    rows = network.measured(HOSTS, FORMS, [*LINKS, network.UNLIMITED], options.rounds, work="text")
    publish(found, network.table(rows, MEAN), options.seeds)


def publish(found: PyTree, seconds: list[Row], seeds: int) -> None:
    """The report, the pictures, and what audits recommend."""
    tables = {words: table(found, seconds, seeds, above) for words, above in TARGETS.items()}
    draw(seconds, tables["the mean's last loss"])
    notes = [
        f"{TEXT.workload(0).summary}; {HOSTS} hosts, 4 windows of 64 characters each and step; "
        f"linear warm-up and decay; {seeds} seeds.",
        f"The loss to reach is, seed by seed, the last one of a mean's run of {SHORT} steps, on "
        f"batches of training windows unseen. All others run {STEPS[0]} and {STEPS[1]} steps, each "
        "at the rate with the lowest last loss of the first seed in the former. The last losses "
        "are those of the latter.",
        "SparseLoCo sends an eighth of a chunk of 4096; with a 32nd it ended 0.12 nats higher.",
    ]
    sections = [
        ("Seconds and bytes of a step", seconds),
        *((f"To {words}", rows) for words, rows in tables.items()),
        ("To keep in mind", harness.caveats(notes)),
    ]
    off = network.late(seconds)
    bars = [harness.Bar("audit where the network decides: seconds, off by at most", off, 0.3)]
    ADVICE.write_text(advice(dict(sections)))
    harness.report("network_losses", "Seconds to a loss on links of limited rates", sections, bars)


if __name__ == "__main__":
    main()
