# SPDX-License-Identifier: Apache-2.0
"""Where a run's scalars go: JSON lines, TensorBoard, a progress bar."""

import datetime
import json
import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import IO, Any, Protocol

from boostax._core import checks
from boostax._core.plain import plain


class Writer(Protocol):
    """Anything that takes the scalars of a step; ``fit`` calls it once per step, in order."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the scalars of the ``step``-th call, counted from one."""
        ...

    def close(self) -> None:
        """Finish; nothing is written afterwards."""
        ...


class JsonLines:
    """One JSON object per step in a file: ``{"step": 3, "loss": 0.25, ...}``.

    Each line reaches the operating system at once, so a killed process loses none. Numbers that are
    not finite are ``null``, which every JSON reader understands.

    Args:
      path: the file; its directory is created.
      start: the call a run resumes after. Lines of later steps are dropped, as is one cut short, so
        that no step appears twice; with 0 the file starts empty.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
      >>> writer = JsonLines(path)
      >>> writer.write(1, {"loss": 0.5})
      >>> writer.close()
      >>> JsonLines.read(path)
      [{'step': 1, 'loss': 0.5}]
    """

    def __init__(self, path: str | os.PathLike[str], *, start: int = 0):
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= start]
        trimmed = path.with_name(path.name + ".new")
        trimmed.write_text("".join(line + "\n" for line in kept))
        trimmed.replace(path)
        self._file: IO[str] = path.open("a", buffering=1)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one line."""
        self._file.write(json.dumps(plain({"step": step, **scalars})) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @staticmethod
    def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """The rows of a file, ``null`` as NaN; a last line that was cut short is left out."""
        return [
            {name: math.nan if x is None else x for name, x in json.loads(line).items()}
            for line in _lines(pathlib.Path(path))
        ]


def _lines(path: pathlib.Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    # Whatever follows the last newline was cut short by a kill.
    return [line for line in lines[:-1] if line]


class TensorBoard:
    """Scalars as TensorBoard event files; needs the extra ``boostax[tensorboard]``.

    Args:
      directory: where the event files go.
      start: the call a run resumes after; TensorBoard then hides what later steps wrote before.
    """

    def __init__(self, directory: str | os.PathLike[str], *, start: int = 0):
        with checks.needing("TensorBoard", "tensorboardX", "tensorboard"):
            from tensorboardX import SummaryWriter
        self._writer = SummaryWriter(
            os.fspath(directory), purge_step=start + 1 if start else None, write_to_disk=True
        )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add each scalar under its own name."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class Progress:
    """A live bar on a terminal, and a plain line now and then everywhere else.

    Shows the calls done, their rate, the loss, the loss scale, the steps it skipped and the time
    left. Needs ``rich``.

    Args:
      steps: calls of the whole run.
      start: the call a run resumes after.
      console: a ``rich.console.Console``; a new one for stdout by default.
      every: seconds between two plain lines.
    """

    def __init__(self, steps: int, *, start: int = 0, console: Any = None, every: float = 10.0):
        with checks.needing("Progress", "rich", "cli"):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
        checks.positive_int("Progress", "steps", steps, "It is the calls of the whole run.")
        self._steps, self._every, self._printed = steps, every, -math.inf
        self._console = Console() if console is None else console
        # Where it is not shown, it still keeps the time.
        self._bar = Bar(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            speed_estimate_period=math.inf,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=start, status="compiling")
        self._bar.start()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show the step, if it is time to."""
        self._bar.update(self._task, completed=step)
        # The first call compiles: rich counts the rate from its end.
        speed, seconds = self._bar.tasks[0].speed, self._bar.tasks[0].time_remaining
        left = f"  {datetime.timedelta(seconds=round(seconds or 0.0))} left" if speed else ""
        status = _status(scalars, speed)
        self._bar.update(self._task, status=status)
        now = time.monotonic()
        if self._bar.disable and (step == self._steps or now - self._printed >= self._every):
            self._printed = now
            self._console.print(f"step {step}/{self._steps}  {status}{left}", highlight=False)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def _status(scalars: Mapping[str, float], speed: float | None) -> str:
    shown = [f"loss {scalars['loss']:.4f}"] if "loss" in scalars else []
    if "loss_scale" in scalars:
        shown.append(f"scale {scalars['loss_scale']:g}")
    if scalars.get("skipped_steps"):
        shown.append(f"skipped {scalars['skipped_steps']:.0f}")
    if speed:
        shown.append(f"{speed:.1f} steps/s")
    return "  ".join(shown)
