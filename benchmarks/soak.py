"""A soak: text for twenty minutes with batches that are no numbers, random kills and resumes.

Memory must not grow, no call may be lost, and the end must be that of a run nobody disturbs.
"""

import dataclasses
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness import Bar, arguments, report
from soak_worker import WINDOW, poisoned

WORKER = pathlib.Path(__file__).with_name("soak_worker.py")
# Calls between two saves, one about every five seconds. What memory gains in a life comes with the
# threads that save, which take arenas of glibc's one after another and slower and slower: with
# MALLOC_ARENA_MAX=1 it gains nothing after a minute.
EVERY, ENDLESS = 500, 10**9
# Seconds after a life's first call, so imports and compiling do not count. A life ends by a kill
# within these bounds; by then it is warm, having saved and evaluated many times; and what is looked
# at then and at the end is the median of this many.
LIFE, WARM, LOOK = (60.0, 90.0), 60.0, 15.0
# And before it.
PATIENCE = 600.0
# One life in the middle takes this share of the time: eight and a half minutes of twenty.
LONG, BEGINS = 0.425, 0.25
DISTURBED, UNDISTURBED, CLEAN = "killed and resumed", "undisturbed", "undisturbed, not poisoned"


@dataclasses.dataclass
class Life:
    """A process of the worker, from its start to its kill or its end.

    Attributes:
      first: the calls that were done when it began.
      last: and when it ended, as the metrics say.
      memory: its resident memory in MB, second by second from its first call on.
      within: whether the kill fell into a save; ``None`` if nobody killed it.
    """

    first: int
    last: int = 0
    memory: list[float] = dataclasses.field(default_factory=list)
    within: bool | None = None

    def growth(self, warm: int, look: int) -> float | None:
        """Memory at the end over that after warm-up; ``None`` if the life was too short."""
        if len(self.memory) < warm + look:
            return None
        return statistics.median(self.memory[-look:]) / self.warm(warm, look)

    def warm(self, warm: int, look: int) -> float:
        """Memory after warm-up, or at the end of a life that was shorter."""
        return statistics.median(self.memory[:warm][-look:])


def environment(work: pathlib.Path, fills: bool) -> dict[str, str]:
    """A cache of programs of their own, to which nobody who may be killed writes."""
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(work / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0" if fills else "1e9",
        "PYTHONPATH": str(WORKER.parents[1]),
        "PYTHONWARNINGS": "error",
    }


def start(
    work: pathlib.Path,
    name: str,
    *options: str,
    calls: int,
    every: int = EVERY,
    fills: bool = False,
) -> subprocess.Popen[bytes]:
    """A worker; what it prints is appended to a log."""
    output = work / name
    output.mkdir(exist_ok=True)
    command = [sys.executable, str(WORKER), str(output), f"--calls={calls}", f"--every={every}"]
    with (output / "log").open("ab") as log:
        return subprocess.Popen(
            [*command, *options], env=environment(work, fills), stdout=log, stderr=log
        )


def resident(pid: int) -> float | None:
    """Resident memory in MB; ``None`` of a process that has ended."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    lines = (line.split() for line in status.splitlines())
    return next((int(words[1]) / 1024 for words in lines if words[0] == "VmRSS:"), None)


def rows(output: pathlib.Path) -> list[str]:
    """The complete lines of the metrics."""
    path = output / "metrics.jsonl"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def checkpointed(output: pathlib.Path) -> int:
    """The calls of the last complete checkpoint."""
    steps = [int(path.name) for path in (output / "checkpoints").glob("*") if path.name.isdigit()]
    return max(steps, default=0)


def follow(
    process: subprocess.Popen[bytes], output: pathlib.Path, seconds: float | None = None
) -> Life:
    """Watch a worker; kill it so many seconds after its first call, or let it end."""
    life, begun, mark = Life(checkpointed(output)), None, output / "begun"
    patience = time.monotonic() + PATIENCE
    try:
        while process.poll() is None:
            now = time.monotonic()
            if begun is None:
                if now > patience:
                    break
                begun = now if mark.exists() else None
                time.sleep(0.02)
                continue
            if seconds is not None and now - begun >= seconds:
                process.kill()
                process.wait()
                life.within = any((output / "checkpoints").glob("*.orbax-checkpoint-tmp"))
                break
            memory = resident(process.pid)
            if memory is not None:
                life.memory.append(memory)
            until = begun + min(len(life.memory), seconds or ENDLESS)
            time.sleep(max(0.001, until - time.monotonic()))
    finally:
        process.kill()
        process.wait()
        mark.unlink(missing_ok=True)
    if life.within is None and process.returncode:
        raise RuntimeError(f"soak: the worker failed: {(output / 'log').read_text()[-3000:]}")
    found = rows(output)
    life.last = json.loads(found[-1])["step"] if found else 0
    return life


def spans(minutes: float) -> list[float]:
    """Seconds that each life has before its kill."""
    total, chance = minutes * 60, random.Random(0)
    short = min(1.0, total / 300)
    found, long = [], False
    while sum(found) < total:
        if not long and sum(found) >= BEGINS * total:
            found.append(LONG * total)
            long = True
        else:
            found.append(chance.uniform(*LIFE) * short)
    return found


def disturbed(work: pathlib.Path, minutes: float) -> list[Life]:
    """Lives that end by a kill, and a last one that ends the run soon after."""
    output, lives = work / DISTURBED, []
    for seconds in spans(minutes):
        lives.append(follow(start(work, DISTURBED, calls=ENDLESS), output, seconds))
        life = lives[-1]
        print(f"{seconds:.0f} s, calls {life.first} to {life.last}", flush=True)
    calls = lives[-1].last + 2 * EVERY
    while (calls - poisoned(calls)) % WINDOW == 0:
        # The last window stays open, and the end has to close it.
        calls += 1
    lives.append(follow(start(work, DISTURBED, calls=calls), output))
    return lives


def undisturbed(work: pathlib.Path, calls: int) -> dict[str, Life]:
    """The same calls in one life, with a checkpoint at the end alone; and without a bad batch."""
    processes = {
        UNDISTURBED: start(work, UNDISTURBED, calls=calls, every=ENDLESS),
        CLEAN: start(work, CLEAN, "--clean", calls=calls, every=ENDLESS),
    }
    with ThreadPoolExecutor() as pool:
        lives = pool.map(follow, processes.values(), [work / name for name in processes])
        return dict(zip(processes, lives, strict=True))


def rehearse(work: pathlib.Path) -> None:
    """Compile everything once: what begins a run, and what goes on with one."""
    for calls in (EVERY + 1, EVERY + 3):
        follow(start(work, "rehearsal", calls=calls, fills=True), work / "rehearsal")


def wrong_rows(found: list[str], wanted: list[str]) -> int:
    """Calls whose row is missing, there twice, out of order, or not as wanted, to the digit."""
    steps = [json.loads(line)["step"] for line in found]
    if steps != list(range(1, len(wanted) + 1)):
        return len(set(range(1, len(wanted) + 1)) ^ set(steps)) + len(steps) - len(set(steps)) or 1
    return sum(a != b for a, b in zip(found, wanted, strict=True))


def life_rows(lives: list[Life], warm: int, look: int) -> list[dict[str, Any]]:
    """A row for each life."""
    following = [*(life.first for life in lives[1:]), lives[-1].last]
    return [
        {
            "life": number,
            "from call": life.first,
            "to call": life.last,
            "done again": life.last - after,
            "killed": {True: "in a save", False: "between saves", None: "no"}[life.within],
            "seconds": len(life.memory),
            "memory after warm-up, MB": life.warm(warm, look),
            "at its end over that": life.growth(warm, look),
        }
        for number, (life, after) in enumerate(zip(lives, following, strict=True), 1)
    ]


def by_minute(life: Life) -> list[dict[str, Any]]:
    """The memory of a life, as it goes on."""
    return [
        {"minute": number + 1, "memory, MB": statistics.median(life.memory[60 * number :][:60])}
        for number in range(-(-len(life.memory) // 60))
    ]


def soak(minutes: float, work: pathlib.Path) -> tuple[list[tuple[str, list[Any]]], list[Bar]]:
    """The tables and the bars of a soak of so many minutes.

    Raises:
      RuntimeError: a worker that failed by itself.
    """
    # A short soak has less time to become warm.
    warm, look = (math.ceil(x * min(1.0, minutes / 4)) for x in (WARM, LOOK))
    rehearse(work)
    lives = disturbed(work, minutes)
    others = undisturbed(work, lives[-1].last)
    long = max(lives, key=lambda life: len(life.memory))
    watched = {DISTURBED: long, **others}
    ends = {name: json.loads((work / name / "ending.json").read_text()) for name in watched}
    found, wanted, clean = (ends[name] for name in watched)
    endings = [
        {
            "run": name,
            "calls": ends[name]["calls"],
            "skipped": ends[name]["skipped"],
            "optimizer steps": ends[name]["optimizer_steps"],
            "held-out loss": ends[name]["held_out_loss"],
            "longest life, s": len(life.memory),
            "memory at its end over that after warm-up": life.growth(warm, look),
        }
        for name, life in watched.items()
    ]
    leaves = wanted["leaves"].keys() | found["leaves"].keys()
    differ = sum(found["leaves"].get(name) != wanted["leaves"].get(name) for name in leaves)
    bad = poisoned(found["calls"])
    steps = -(-(found["calls"] - bad) // WINDOW)
    growth = long.growth(warm, look) or math.inf
    warmed = [life.warm(warm, look) for life in lives if len(life.memory) >= warm]
    lost = wrong_rows(rows(work / DISTURBED), rows(work / UNDISTURBED))
    bars = [
        Bar("calls whose row is missing, repeated or not the undisturbed run's", lost, 0),
        Bar(f"leaves of {len(leaves)} whose last bits are not the undisturbed run's", differ, 0),
        Bar("skipped calls more or less than those poisoned", abs(found["skipped"] - bad), 0),
        Bar("optimizer steps lost or made twice", abs(found["optimizer_steps"] - steps), 0),
        Bar("memory at the end of the long life over that after warm-up", growth, 1.05),
        Bar("memory of any life over the first's, after warm-up", max(warmed) / warmed[0], 1.05),
        Bar(
            "held-out loss over that of a run without poisoned batches",
            found["held_out_loss"] / clean["held_out_loss"],
            1.05,
        ),
    ]
    sections = [
        ("Lives", life_rows(lives, warm, look)),
        ("Endings", endings),
        ("The long life", by_minute(long)),
    ]
    return sections, bars


def main() -> None:
    options = arguments(__doc__, minutes=(20.0, "below 20 publishes nothing"))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        sections, bars = soak(options.minutes, pathlib.Path(folder))
    if options.minutes < 20:
        print(json.dumps(dict(sections), indent=1), *bars, sep="\n")
        return
    report("soak", "A soak", sections, bars)


if __name__ == "__main__":
    main()
