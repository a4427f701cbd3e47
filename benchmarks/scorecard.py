"""The reliability scorecard: every transformation in every cell of the contract.

Makes ``docs/scorecard.md``, beside the results.
"""

import argparse
import time

from cells import contexts, counts, faults, inputs, lifecycle
from cells.subject import judge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--subject", default="")
    options = parser.parse_args()
    from cells.ours import SUBJECTS

    sections = {
        "A": inputs.CELLS,
        "B": contexts.CELLS,
        "C": counts.CELLS,
        "D": lifecycle.CELLS,
        "E": faults.FAULTS,
        "F": faults.MISTAKES,
        "G": faults.ORDERS,
    }
    for s in SUBJECTS:
        if options.subject and s.name not in options.subject.split(","):
            continue
        for letter, cells in sections.items():
            if options.only and letter not in options.only:
                continue
            for name, cell in cells.items():
                begun = time.perf_counter()
                r = judge(s, letter, name, cell)
                took = time.perf_counter() - begun
                if r.outcome != "pass" or took > 3:
                    print(s.name, letter, name, r.outcome, f"{took:.1f}s", r.reason[:300], flush=True)


if __name__ == "__main__":
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    main()
