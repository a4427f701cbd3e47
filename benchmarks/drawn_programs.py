"""Train programs drawn from seeds in MindSpore and in boostax, and print how they differ.

``python benchmarks/drawn_programs.py [--seeds 0:150] [--mindspore PYTHON] [--write]``: a row for
each program; what differs without a cause ends in the smallest program that does. ``--write`` puts
the table on record, beside programs of SINGA. The interpreter is that of ``make test-mindspore``.
"""

import argparse
import collections
import pathlib
import sys

import harness
from peers import programs as specs

TESTS = pathlib.Path(__file__).parents[1] / "tests"
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from conformance import compare, singa  # noqa: E402

CHUNK = 30


def row(spec, outcome):
    on, (kind, *_) = specs.active(spec), spec["manager"] or ["none"]
    rate, net = spec["optimizer"]["learning_rate"], spec["network"]
    form = rate["class"] if isinstance(rate, dict) else type(rate).__name__
    return {
        "seed": spec["seed"],
        "network": f"{net['kind']} {'-'.join(map(str, net['sizes']))}",
        "on": ", ".join(on) or "nothing",
        "mode": f"{spec['mode']} {spec['level']}",
        "optimizer": f"{spec['optimizer']['class']}, {form}{', in groups' * spec['grouped']}",
        "scale": f"{kind}, {len(spec['bad'])} bad" if spec["bad"] else kind,
        "difference": f"{outcome.gap:.1e}",
        "fate": outcome.fate,
    }


def by_mode(seeds):
    """SINGA's programs: of each mode the number, and the largest difference from its formulas."""
    found = collections.defaultdict(list)
    for program in map(singa.draw, seeds):
        found[program["options"]["dist_option"]].append(singa.difference(program))
    return [
        {"mode": mode, "programs": len(gaps), "difference": f"{max(gaps):.1e}"}
        for mode, gaps in found.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:150")
    parser.add_argument("--mindspore", default=str(compare.PYTHON))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    harness.on_cpu()
    seeds = range(*map(int, options.seeds.split(":")))
    rows, fates, differing = [], collections.Counter(), []
    for i in range(0, len(seeds), CHUNK):
        programs = [specs.draw(seed) for seed in seeds[i : i + CHUNK]]
        found = compare.outcomes(programs, options.mindspore)
        for spec, outcome in zip(programs, found, strict=True):
            rows.append(row(spec, outcome))
            fates[outcome.fate, outcome.why] += 1
            print(*rows[-1].values(), outcome.why, sep=" | ", flush=True)
            differing += [(spec, outcome)] if outcome.fate == "different" else []
    counts = [{"fate": x, "why": y, "programs": n} for (x, y), n in sorted(fates.items())]
    if options.write:
        modes = by_mode(range(100))
        far = sum(float(each["difference"]) > singa.CLOSE for each in modes)
        bars = [
            harness.Bar("programs that differ without a cause", len(differing), 0),
            harness.Bar("modes of SINGA that differ", far, 0),
        ]
        sections = [("Fates", counts), ("SINGA", modes), ("Programs", rows)]
        title = "Programs drawn at random, of MindSpore 2.10 and of SINGA's formulas"
        harness.report("drawn_programs", title, sections, bars)
    for spec, outcome in differing:
        print(*compare.shrunk(spec, outcome, options.mindspore), sep="\n", flush=True)
    print(*counts, sep="\n")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
