# SPDX-License-Identifier: Apache-2.0
"""The commands and their arguments."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any

import tyro

from boostax.inspect.explain import explain
from boostax.run.cli.build import build, require_devices
from boostax.run.cli.compare import compare
from boostax.run.cli.recipe import ComparePlan, Recipe, RunOptions, check_options
from boostax.run.cli.refusal import Refusal, complain, refusing
from boostax.run.cli.report import plan_text
from boostax.run.cli.train import train
from boostax.run.cluster.end import ending_at_once, say
from boostax.run.cluster.launch import launch
from boostax.run.workloads import DigitsConfig, TextConfig, make

_TEXT, _DIGITS = Recipe(steps=1000, learning_rate=4e-3), Recipe(steps=300)


@dataclass(frozen=True)
class Explain:
    """Say what a call of the train step costs: FLOPs, memory and bytes sent.

    Nothing is trained, and nothing is written.
    """

    task: Any
    recipe: Recipe

    def __call__(self, argv: list[str]) -> None:
        """Print what the recipe decides, its chain, and what a call costs."""
        del argv
        with refusing():
            require_devices(self.recipe.devices)
            built = build(make(self.task), self.recipe)
            found = explain(built.step, built.init(self.task.seed), built.workload.batch(0))
        print(plan_text(built, self.task.dtype), found, sep="\n\n")


@dataclass(frozen=True)
class Train:
    """Train one workload: with checkpoints, metrics and a plot of the loss.

    text is a small transformer that predicts the next character, without --paths of the sources of
    Python's standard library; digits a perceptron or a small convolutional network on handwritten
    digits. The seed also selects the initial parameters and the dropout.
    """

    task: Any
    recipe: Recipe
    run: RunOptions = field(default_factory=RunOptions)

    def __call__(self, argv: list[str]) -> None:
        """Train; ``argv`` is what the user typed."""
        train(self.task, self.recipe, self.run, argv)


@dataclass(frozen=True)
class Compare:
    """Train one workload in several ways and set them side by side.

    Every variant sees the same batches from the same initial parameters, per seed. --dtype is what
    the low-precision variants compute in.
    """

    task: Any
    plan: ComparePlan

    def __call__(self, argv: list[str]) -> None:
        """Every variant with every seed."""
        del argv
        compare(self.task, self.plan)


@dataclass(frozen=True)
class Launch:
    """Run a command as several processes on this machine: launch -n 4 -- train text.

    What follows -- is the command of each: one of boostax, or any other (python train.py). They
    find each other on 127.0.0.1; process 0 prints and writes, lines of the others have their rank
    in front. When one fails, all end.
    """

    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 2
    """How many."""
    port: int | None = None
    """Of the coordinator; a free one by default."""
    grace: float = 20.0
    """Seconds that the others have to end by themselves when one has failed."""

    def __call__(self, argv: list[str]) -> int:
        """Run what follows ``--``."""
        words = argv[argv.index("--") + 1 :] if "--" in argv else []
        if not words or words[0] == "launch":
            raise Refusal(
                f"launch: a command must follow --, got {words}. boostax launch -n 4 -- train text "
                "--devices 4 trains as four processes."
            )
        own = [sys.executable, "-m", "boostax.run.cli"] if words[0] in _COMMANDS else []
        with refusing():
            return launch([*own, *words], self.processes, port=self.port, grace=self.grace)


def _either(**workloads: Any) -> Callable[..., Any]:
    """A command for each workload, with the defaults of that one."""

    def chosen(workload: Any) -> Any:
        return workload

    chosen.__doc__ = type(workloads["text"]).__doc__
    chosen.__annotations__["workload"] = tyro.extras.subcommand_type_from_defaults(workloads)
    return chosen


_COMMANDS: dict[str, Callable[..., Any]] = {
    "train": _either(text=Train(TextConfig(), _TEXT), digits=Train(DigitsConfig(), _DIGITS)),
    "compare": _either(
        text=Compare(TextConfig(dtype="float16"), ComparePlan(steps=100, learning_rate=4e-3)),
        digits=Compare(DigitsConfig(dtype="float16"), ComparePlan()),
    ),
    "explain": _either(text=Explain(TextConfig(), _TEXT), digits=Explain(DigitsConfig(), _DIGITS)),
    "launch": Launch,
}


def run(argv: list[str]) -> int:
    """Parse the arguments and run what they ask for; the exit code."""
    launches = argv[:1] == ["launch"] and "--" in argv
    command = tyro.extras.subcommand_cli_from_dict(
        _COMMANDS,
        prog="boostax",
        description="Cheaper, steadier training for JAX and Optax, on small real tasks.",
        args=argv[: argv.index("--")] if launches else argv,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    # With peers, nothing that is raised leaves this block.
    with ending_at_once(lambda error: (complain if isinstance(error, Refusal) else say)(error)):
        with refusing():
            for options in filter(is_dataclass, vars(command).values()):
                check_options(options)
        return command(argv) or 0
