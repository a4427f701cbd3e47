"""The picture of the README: boostax over what one would use instead, drawn from the records.

``python benchmarks/plots.py`` draws it anew. The picture names the records that it shows.
"""

import hashlib
import json
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from harness import RESULTS

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#777777"
STYLE = {
    "figure.facecolor": "white",
    "figure.dpi": 110,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "font.size": 9,
    "figure.constrained_layout.use": True,
}
LOOKS = {"time": (BLUE, "o"), "memory": (ORANGE, "s"), "wire bytes": (GREEN, "D")}
RECORDS = ("accumulation", "adasum", "compression_time", "freezing", "loss_scale")
Row = tuple[str, dict[str, float]]


def table(record: str, title: str) -> dict[str, dict[str, Any]]:
    """The rows of the one section whose title has these words, by their first columns joined."""
    sections = json.loads((RESULTS / f"{record}.json").read_text())["sections"]
    (rows,) = (rows for name, rows in sections.items() if title in name)
    words = [name for name, cell in rows[0].items() if isinstance(cell, str) and cell]
    return {" & ".join(str(row[name]) for name in words): row for row in rows}


def scaling() -> list[Row]:
    """A dynamic scale around Adam; the others' steps with theirs."""
    rows = table("loss_scale", "float32 gradients")
    ours = rows["boostax apply_gradients"]
    return [
        (f"dynamic_loss_scale  /  {name}", {"time": ours[TIME] / row[TIME]})
        for name, row in rows.items()
        if not name.startswith("boostax")
    ]


TIME = "time / bare Adam"


def windows() -> list[Row]:
    """Windows of eight calls, and slices of one."""
    column = "window / MultiSteps"
    eight = table("accumulation", "a window of 8")["accumulate, apply_gradients"]
    whole = table("accumulation", "4 micro-batches of 128")["accumulate"]
    slices = table("accumulation", "Micro-batches inside")
    ours, theirs = slices["boostax.microbatch"], slices["optax.microbatch"]
    memory = ours["temp / params"] / theirs["temp / params"]
    return [
        ("accumulate  /  optax.MultiSteps", {"time": eight[column]}),
        (
            "accumulate, whole step  /  two jits by hand",
            {"time": whole["effective step / two jits"]},
        ),
        (
            "microbatch  /  optax.microbatch",
            {"time": ours["time / optax.microbatch"], "memory": memory},
        ),
    ]


def prefixes() -> list[Row]:
    """Half of the groups of a transformer frozen, 8 x 64 tokens."""
    rows = table("freezing", "8 x 64 tokens")
    ours = rows["5 of 10 & host driver"]
    found = []
    for name in ("optax.selective_transform", "optax.masked(set_to_zero)", "by hand"):
        row = rows[f"5 of 10 & {name}"]
        time = ours["time / by hand"] / row["time / by hand"]
        figures = {"time": time, "memory": ours["temp MB"] / row["temp MB"]}
        found.append((f"scheduled_freeze, half  /  {name}", figures))
    return found


def combined() -> list[Row]:
    """AdaSum of eight devices, a million entries in 64 leaves."""
    rows = table("adasum", "1M f32 entries in 64 leaves")
    ours = rows["boostax.adasum"]
    names = {"lax.pmean": "mean", "recursive halving": "recursive halving, by hand"}
    return [
        (
            f"adasum  /  {label}",
            {
                "time": ours["time / mean"] / rows[name]["time / mean"],
                "memory": ours["temp / gradient"] / rows[name]["temp / gradient"],
                "wire bytes": ours["bytes / mean's"] / rows[name]["bytes / mean's"],
            },
        )
        for name, label in names.items()
    ]


def reduced() -> list[Row]:
    """Reductions of ten million entries: one device's work, and what it sends."""
    rows = table("compression_time", "10M f32 entries")
    dense = rows["dense f32"]["ms"]
    names = ("bf16", "int8", "top-k 1%, blocks of 1000", "sign, two shots", "PowerSGD rank 4")
    return [
        (
            f"{name}  /  f32 mean",
            {"time": rows[name]["ms"] / dense, "wire bytes": rows[name][BYTES]},
        )
        for name in names
    ]


BYTES = "bytes / dense"


def digest() -> str:
    """By which the picture tells what it was drawn from."""
    return hashlib.sha256(
        b"".join((RESULTS / f"{x}.json").read_bytes() for x in RECORDS)
    ).hexdigest()


def draw() -> None:
    """Ratios on a log axis, a row for each pair: left of one is for boostax."""
    rows = [*scaling(), *windows(), *prefixes(), *combined(), *reduced()]
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(8.5, 0.27 * len(rows) + 1.0))
        for name, (color, marker) in LOOKS.items():
            points = [(each[name], at) for at, (_, each) in enumerate(rows) if name in each]
            x, y = zip(*points, strict=True)
            ax.scatter(x, y, s=34, color=color, marker=marker, label=name, zorder=3)
        ax.axvline(1.0, color=GREY, lw=1)
        ax.set_xscale("log")
        ticks = [0.001, 0.01, 0.1, 0.5, 1, 2, 4]
        ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
        ax.minorticks_off()
        ax.set_yticks(range(len(rows)), [name for name, _ in rows])
        ax.invert_yaxis()
        ax.set_xlabel("ours over theirs: left of 1 is for boostax")
        ax.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
        figure.savefig(
            RESULTS / "overview.png", metadata={"Software": None, "Description": digest()}
        )
        plt.close(figure)


if __name__ == "__main__":
    draw()
