"""Whether AdaSum trains better than a mean when many replicas make few steps: digits, SGD."""

from typing import Any

import numpy as np
from digits_replicas import EPOCHS, METHODS, RATES, Sweep, best, data, order, sweep
from harness import Bar, arguments, caveats, over_seeds, power, report

REPLICAS = (16, 32)
LEAF, TREE, DELTA = "AdaSum, leaf", "AdaSum, tree", "AdaSum, delta"
SEQUENTIAL = "one replica"
Found = dict[tuple[int, str], Sweep]


def run(momentum: float | None, seeds: int) -> Found:
    """Every method with either number of replicas, and one replica alone."""
    found = {(1, SEQUENTIAL): sweep("mean", 1, momentum=momentum, seeds=seeds)}
    for replicas in REPLICAS:
        for method in METHODS:
            found[replicas, method] = sweep(method, replicas, momentum=momentum, seeds=seeds)
            print(momentum, replicas, method, flush=True)
    return found


def finer_mean(found: Found, replicas: int, momentum: float | None, seeds: int) -> np.ndarray:
    """Test accuracies of a mean tuned once more, by fourths of an octave around its best."""
    around = RATES[best(found[replicas, "mean"])]
    rates = [around * 2 ** (k / 4) for k in range(-4, 5)]
    again = sweep("mean", replicas, momentum=momentum, rates=rates, seeds=seeds)
    return again.test[best(again)]


def table(found: Found) -> list[dict[str, Any]]:
    """A row per method: accuracy at its own best learning rate and at that of one replica."""
    sequential = best(found[1, SEQUENTIAL])
    plain = power(RATES[sequential])
    rows: list[dict[str, Any]] = []
    for (replicas, method), each in found.items():
        chosen = best(each)
        quarter = each.orthogonality.shape[-1] // 4
        curve = each.orthogonality[chosen].mean(0)
        known = not np.isnan(curve).any()
        rows.append(
            {
                "replicas": replicas,
                "method": method,
                "steps": len(order(0, replicas)),
                "best rate": power(RATES[chosen]),
                "validation": float(each.validation[chosen].mean()),
                **over_seeds(each.test[chosen], "test"),
                **over_seeds(each.test[sequential], f"test at {plain}", "its s.e."),
                "orthogonality, first fourth": float(curve[:quarter].mean()) if known else None,
                "last fourth": float(curve[-quarter:].mean()) if known else None,
            }
        )
    return rows


def curves(found: Found) -> list[dict[str, Any]]:
    """A row per method: validation accuracy at every learning rate."""
    return [
        {"replicas": replicas, "method": method}
        | {power(rate): float(at) for rate, at in zip(RATES, each.validation.mean(1), strict=True)}
        for (replicas, method), each in found.items()
    ]


def differences(
    found: Found, momentum: float | None, finer: dict[int, np.ndarray]
) -> list[dict[str, Any]]:
    """Points of test accuracy over the tuned mean, paired by seed."""
    sequential = best(found[1, SEQUENTIAL])
    rows: list[dict[str, Any]] = []
    for replicas in REPLICAS:
        tuned = {m: found[replicas, m].test[best(found[replicas, m])] for m in METHODS}
        untuned = found[replicas, LEAF].test[sequential]
        once, twice = ("mean", tuned["mean"]), ("mean on a finer grid", finer[replicas])
        pairs = [(f"{LEAF}, rate of one replica", untuned, *other) for other in (once, twice)]
        pairs += [(f"{LEAF}, tuned", tuned[LEAF], *other) for other in (once, twice)]
        pairs += [(f"{method}, tuned", tuned[method], *once) for method in (TREE, DELTA)]
        for better, one, than, other in pairs:
            row = {"momentum": str(momentum or "none"), "replicas": replicas, "method": better}
            row |= {"over the tuned": than} | over_seeds(100 * (one - other), "points")
            rows.append(row)
    return rows


def longer(found: Found, seeds: int) -> list[dict[str, Any]]:
    """Whether the difference lasts: without momentum, for four times as many epochs."""
    rows: list[dict[str, Any]] = []
    for epochs in (EPOCHS, 4 * EPOCHS):
        for replicas in REPLICAS:
            tuned: dict[str, np.ndarray] = {}
            for method in ("mean", LEAF):
                each = found[replicas, method]
                if epochs > EPOCHS:
                    each = sweep(method, replicas, seeds=seeds, epochs=epochs)
                tuned[method] = each.test[best(each)]
            points = 100 * (tuned[LEAF] - tuned["mean"])
            rows.append(
                {"epochs": epochs, "replicas": replicas, "steps": len(order(0, replicas, epochs))}
                | {f"test, {method}": float(test.mean()) for method, test in tuned.items()}
                | over_seeds(points, "points")
            )
    return rows


def kept_in_mind(seeds: int) -> list[str]:
    training, validation, test = (f"{len(part.labels):,}" for part in data())
    return [
        f"A tiny task: a 64-64-32-10 perceptron, {training} rows to train on, {validation} to "
        f"choose the rate by, {test} to test. The {seeds} seeds vary the weights and the order of "
        "rows, not the split.",
        f"A fixed budget of {EPOCHS} epochs: many replicas make few steps, which favours AdaSum. "
        "No method reaches what one replica reaches in its many, and with more epochs the "
        "difference shrinks.",
        "Rates by factors of two, the same grid for every method, chosen by mean validation "
        "accuracy; the finer grid is by fourths of an octave, for the mean alone.",
        "AdaSum diverges an octave below where the mean does: keep the rate of one replica, do not "
        "scale it.",
        "With momentum AdaSum wants a rate above that of one replica. At the rate of one replica "
        "it is not clearly better than a well-tuned mean, and delta is the weakest form.",
        "By leaf or by tree is a wash here. With plain SGD delta is by leaf up to rounding, "
        "because AdaSum is homogeneous.",
    ]


def main() -> None:
    seeds = arguments(__doc__, seeds=20).seeds
    sections: list[tuple[str, list[dict[str, Any]]]] = []
    compared: list[dict[str, Any]] = []
    lasting: list[dict[str, Any]] = []
    for momentum in (None, 0.9):
        found = run(momentum, seeds)
        lasting = lasting or longer(found, seeds)
        finer = {n: finer_mean(found, n, momentum, seeds) for n in REPLICAS}
        compared += differences(found, momentum, finer)
        name = f"momentum {momentum}" if momentum else "no momentum"
        sections += [
            (f"SGD, {name}: test accuracy, mean of {seeds} seeds", table(found)),
            (f"SGD, {name}: validation accuracy by learning rate", curves(found)),
        ]
    bars = [
        Bar(
            f"no momentum, {row['replicas']} replicas: tuned mean minus AdaSum at the rate of one "
            "replica, plus one standard error, in points",
            row["s.e."] - row["points"],
            0,
        )
        for row in compared
        if row["momentum"] == "none" and "rate of one" in row["method"]
        if row["over the tuned"] == "mean"
    ]
    report(
        "adasum_convergence",
        "AdaSum: accuracy of many replicas in few steps",
        [
            *sections[::2],
            ("Points of test accuracy over the tuned mean, paired by seed", compared),
            ("No momentum, both tuned: AdaSum by leaf minus mean for more epochs", lasting),
            *sections[1::2],
            ("Caveats", caveats(kept_in_mind(seeds))),
        ],
        bars,
    )


if __name__ == "__main__":
    main()
