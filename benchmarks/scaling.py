"""Weak scaling on paper: bytes, rounds and memory of every technique at 8 to 4096 replicas.

Applies the formulas of ``scaling_formulas.py`` to a model of a billion params and makes
``docs/scaling.md``, beside the results. Nothing is run and no clock is read.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import scaling_formulas as formulas
from harness import DOCS, PAGE_ALONE, Bar, arguments, markdown, report, sections_of
from scaling_formulas import Model
from scaling_sends import Send, ring_rounds, tree_rounds
from scaling_techniques import HOST, TECHNIQUES, different, fits, sharded_moments

PAGE = DOCS / "scaling.md"
REPLICAS = (8, 256, 4096)
NEAR, FAR, ROUND = 50e9, 12.5e9, 10e-6
LAYERS, WIDTH, HIDDEN, VOCABULARY = 20, 2048, 8192, 32768


def billion() -> Model:
    """A decoder: the embedding, of each layer four attention matrices, two of an MLP, two norms."""
    square, norm = (WIDTH, WIDTH), (WIDTH,)
    layer = [norm, *[square] * 4, norm, (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    return [(VOCABULARY, WIDTH), *itertools.chain.from_iterable([layer] * LAYERS), norm]


def speed(send: Send, n: int) -> float:
    """Bytes per second of a device."""
    return NEAR if n <= HOST or send.axes == ("host",) else FAR


def row(name: str, n: int) -> dict[str, Any]:
    """What the formula of a technique says of the model of a billion params."""
    model = billion()
    cost = TECHNIQUES[name].cost(model, n)
    mean = formulas.all_reduce(model, n)
    wires = math.fsum(send.wire / speed(send, n) for send in cost.sends) / cost.every
    ring = math.fsum(send.share * ring_rounds(send) for send in cost.sends) / cost.every
    chain = [sum(map(rounds, cost.chain)) for rounds in (ring_rounds, tree_rounds)]
    params = formulas.FLOAT * formulas.entries(model)
    return {
        "technique": name,
        "wire bytes": cost.wire,
        "of a mean": cost.wire / mean.wire,
        "collectives": cost.collectives,
        "in a chain": len(cost.chain),
        "ring rounds": chain[0],
        "tree rounds": chain[1],
        "seconds at best": wires + ROUND * chain[1] / cost.every,
        "seconds at worst": wires + ROUND * ring,
        "optimizer bytes": cost.optimizer,
        "own bytes": cost.own,
        "kept bytes": 2 * params + cost.optimizer + cost.own,
        "arriving bytes": cost.arrives,
    }


def break_even() -> list[dict[str, Any]]:
    """From how many replicas a technique sends no less than another."""
    model = billion()
    others = ("`all_reduce`", "`all_reduce`, bf16", "`int8_reduce`")

    def first(name: str, other: str) -> int:
        of = lambda key, n: TECHNIQUES[key].cost(model, n).wire  # noqa: E731
        return next(n for n in itertools.count(2) if of(name, n) >= of(other, n))

    gathered = ("`top_k_reduce`, 1%", "`threshold_reduce`, capacity 1%", "`sign_reduce`")
    return [
        {"technique": name} | {f"as much as {other}": first(name, other) for other in others}
        for name in gathered
    ]


def growing() -> list[dict[str, Any]]:
    """What grows with the replicas beside bytes and rounds, or shrinks."""
    model = billion()

    def rows_read(within: int, n: int) -> int:
        found = formulas.adasum(model, n, within).sends
        exchanges = [send for send in found if send.primitive in ("all_to_all", "ppermute")]
        return n // within * len(exchanges)

    def largest_sum(n: int) -> int:
        found = formulas.adasum(model, n).sends
        return max(send.bytes for send in found if send.primitive == "psum")

    figures: dict[str, Callable[[int], int | None]] = {
        "`adasum`: sums one after the other": lambda n: math.ceil(math.log2(n)),
        "`adasum`: bytes of the largest of them": largest_sum,
        "`adasum`: rows times exchanges, each an array of the program": lambda n: rows_read(1, n),
        f"the same within hosts of {HOST}": lambda n: rows_read(HOST, n) if n > HOST else None,
        "`int16_reduce`: levels of a replica, up and down": lambda n: 32767 // n,
        "`shard_optimizer=True`: bytes of Adam": lambda n: sharded_moments(model, n)[0],
        "`shard_optimizer=True`: params whose moments are whole on each device": (
            lambda n: sharded_moments(model, n)[1]
        ),
    }
    return [
        {"what": what} | {f"{n} replicas": of(n) for n in REPLICAS} for what, of in figures.items()
    ]


def tables() -> list[tuple[str, list[dict[str, Any]]]]:
    """All sections of the record."""
    found = [
        (f"{n} replicas", [row(name, n) for name, each in TECHNIQUES.items() if fits(each, n)])
        for n in REPLICAS
    ]
    return [*found, ("Break-even", break_even()), ("Growing", growing())]


def sized(value: float) -> str:
    """Bytes in a unit, to three digits."""
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= of:
            digits = max(0, 2 - int(math.log10(value / of)))
            return f"{value / of:,.{digits}f} {unit}"
    return f"{value:.0f} B"


def seconds(value: float) -> str:
    """To two digits."""
    unit, of = ("s", 1) if value >= 0.1 else ("ms", 1e-3)
    return f"{value / of:.2g} {unit}"


def share(value: float) -> str:
    """Of the bytes of a mean, to three digits."""
    return f"{value:.3g}" if value < 0.1 else f"{value:.3f}"


HEADER = (
    "technique,sends,of a mean,collectives,in a chain,rounds: ring; tree,model of the time,"
    "Adam,its own,kept in all,arrives"
).split(",")


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the page."""
    return [
        row["technique"],
        sized(row["wire bytes"]),
        share(row["of a mean"]),
        f"{row['collectives']:g}",
        str(row["in a chain"]),
        f"{row['ring rounds']}; {row['tree rounds']}",
        f"{seconds(row['seconds at best'])} to {seconds(row['seconds at worst'])}",
        sized(row["optimizer bytes"]),
        sized(row["own bytes"]),
        sized(row["kept bytes"]),
        sized(row["arriving bytes"]),
    ]


def page(sections: dict[str, list[dict[str, Any]]]) -> str:
    """The document, from the sections on record."""
    lines = ["# Weak scaling, on paper", "", INTRODUCTION, ""]
    for n in REPLICAS:
        lines += [f"## {n} replicas", "", *markdown(HEADER, list(map(cells, at(sections, n)))), ""]
    lines += ["## Where it stops making sense", "", *verdicts(sections), ""]
    even = sections["Break-even"]
    lines += [*markdown(list(even[0]), [list(map(str, row.values())) for row in even]), ""]
    grows = sections["Growing"]
    rows = [[f"{x:,}" if isinstance(x, int) else x or "-" for x in row.values()] for row in grows]
    return "\n".join([*lines, *markdown(["", *list(grows[0])[1:]], rows)]) + "\n"


def at(sections: dict[str, list[dict[str, Any]]], n: int) -> list[dict[str, Any]]:
    """The rows for so many replicas."""
    return sections[f"{n} replicas"]


def verdicts(sections: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What the tables say of thousands of replicas."""
    most = REPLICAS[-1]
    last = {row["technique"]: row for row in at(sections, most)}
    even = {row["technique"]: list(row.values())[1:] for row in sections["Break-even"]}
    grows = {row["what"]: row[f"{most} replicas"] for row in sections["Growing"]}
    top, signs = "`top_k_reduce`, 1%", "`sign_reduce`"
    sums, _, flat, hosts, levels, sharded, whole = grows.values()
    entries = formulas.entries(billion())
    mean, subspace = last["`all_reduce`"], last["`dim_reduce`, k = 20"]
    return [
        f"- **Gathered messages grow with the replicas.** `top_k_reduce` and `threshold_reduce` "
        f"of 1% send as much as a mean in f32 from {even[top][0]} replicas on, `sign_reduce` from "
        f"{even[signs][0]}. At {most} what arrives, {sized(last[top]['arriving bytes'])} and "
        f"{sized(last[signs]['arriving bytes'])}, fits on no device. `random_k_reduce`, "
        "`int8_reduce`, `sign_reduce` in two shots and `power_sgd_reduce` keep their share.",
        f"- **AdaSum waits {sums} times for a sum** at {most} replicas, where a mean does not, and "
        f"its program has an array for each row of each exchange: {flat:,}, more than can be "
        f"traced in useful time; within hosts of {HOST}, {hosts:,}. A larger "
        "`bucket_bytes` means fewer, and more memory for a moment.",
        f"- **`int16_reduce` has {levels} levels left** at {most} replicas, and from "
        f"{finer_in_int8()} on fewer than `int8_reduce` at half the bytes. Error feedback keeps "
        "what rounding loses.",
        f"- **`shard_optimizer=True` shards along one dimension.** {most} replicas divide no "
        f"dimension of the attention matrices: {whole / entries:.0%} of the params have their "
        f"moments on every device, {sized(sharded)} in all, where an even share were "
        f"{sized(mean['optimizer bytes'] / most)}.",
        "- **What is each replica's own does not shrink.** A residual, a window, an anchor are a "
        "copy of the params on every device, and `adasum_delta`, `partial_average` and "
        "`local_updates` have an Adam of their own on each, which cannot be sharded.",
        f"- **`dim_reduce` sends next to nothing and keeps k params**: "
        f"{sized(subspace['own bytes'])} on each device. At this size the basis is to be int8, "
        "bf16 or sharded.",
        f"- **A sum for each leaf is many rounds.** One after the other on a ring, the "
        f"{mean['collectives']:g} sums of a mean take {seconds(mean['seconds at worst'])} at "
        f"{most} replicas, merged and on a tree {seconds(mean['seconds at best'])}: leave it "
        "to XLA, or set `bucket_bytes`.",
    ]


def finer_in_int8() -> int:
    """From how many replicas int16 has fewer levels than the 127 of int8."""
    return next(n for n in itertools.count(1) if 32767 // n < 127)


INTRODUCTION = f"""\
This page is generated: `python benchmarks/scaling.py` writes it, and the figures to [a
table](../benchmarks/results/scaling.md). It is computed, not measured: no such machine was used.

**The model.** A decoder of {LAYERS} layers, width {WIDTH}, MLP width {HIDDEN} and a vocabulary of
{VOCABULARY}, the output tied to it: {formulas.entries(billion()):,} params in {len(billion())}
leaves. One embedding, in each layer four matrices of {WIDTH} x {WIDTH}, two of {WIDTH} x {HIDDEN},
two norms of {WIDTH}, and a last norm. Params and gradients are f32, the optimizer is Adam,
every replica has its own batch.

**The formulas** are in `benchmarks/scaling_formulas.py`, one for each technique, of the number of
replicas and the shapes of the leaves. `tests/test_scaling.py` traces the transformations on several
models, also with odd shapes and with leaves larger than a bucket, for 2, 4, 8 and more replicas,
and finds the same collectives with the same bytes, the same longest chain, the same bytes arriving
and the same bytes of state; where leaves travel together it does so with this model at 4096.

**The columns**, all for one device and one step of its params, the mean over many steps:

- *sends*: bytes on the wire, by the formulas of a ring; *of a mean*: over those of `all_reduce`.
- *collectives*: in the program, before XLA merges any. *In a chain*: the most of them that wait for
  each other. *Rounds*: of that chain, in a step that sends: on a ring 2 (n - 1) for a sum and n - 1
  for any other, on a tree 2 log2 n and log2 n.
- *Model of the time*: bytes at {NEAR / 1e9:g} GB/s within a host of {HOST} and {FAR / 1e9:g} GB/s
  across hosts, and {ROUND * 1e6:g} microseconds a round. A ring over several hosts has the speed of
  its slowest link. From the chain alone on trees, to all collectives one after the other on rings.
  Nothing overlaps with computing, and what codecs and sorting compute takes no time here. It is a
  model, for comparing rows.
- *Adam*: its moments. *Its own*: residuals, windows, anchors, a basis. *Kept in all*: with params
  and gradients; activations come on top.
- *Arrives*: the results of the collectives of a step that sends, all together: what they take for a
  moment at most, beside what XLA takes for itself. For a plain mean it is the gradient itself.

A step of `accumulate` is that of 8 batches; `local_updates` and `partial_average` send an eighth
and a quarter in the mean; `dim_reduce` is a finish without Adam, with one try of its line search.
`threshold_reduce` sends its capacity, used or not. A train step adds a mean of its loss to all.
Within one host there is nothing for AdaSum between hosts to do. `shard_optimizer=True` of a train
step is in the last table alone: its state is a sharding, and the compiler decides what is sent for
it ([`boostax.audit`](cards/audit.md) counts that)."""


def main() -> None:
    options = arguments(__doc__, page=PAGE_ALONE)
    if not options.page:
        sections = tables()
        last = {row["technique"]: row["of a mean"] for row in sections[len(REPLICAS) - 1][1]}
        limits = {
            "`int8_reduce`": 0.26,
            "`sign_reduce`, two shots": 0.04,
            "`random_k_reduce`, 1%": 0.011,
            "`power_sgd_reduce`, rank 2": 0.001,
        }
        bars = [Bar("programs that send something else than their formula", len(different()), 0)]
        bars += [
            Bar(f"{name}, of a mean's bytes at {REPLICAS[-1]} replicas", last[name], limit)
            for name, limit in limits.items()
        ]
        report("scaling", "Weak scaling, on paper", sections, bars)
    PAGE.write_text(page(sections_of("scaling")))


if __name__ == "__main__":
    main()
