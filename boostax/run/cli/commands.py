"""The commands and their arguments."""

import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from boostax.run.cli.compare import compare
from boostax.run.cli.explain import explain
from boostax.run.cli.recipe import ComparePlan, Recipe, RunOptions, check_options
from boostax.run.cli.refusal import Refusal, complain, refusing
from boostax.run.cli.train import train
from boostax.run.cluster.end import ending_at_once, say
from boostax.run.cluster.launch import launch
from boostax.run.workloads import DigitsConfig, TextConfig


@dataclass(frozen=True)
class ExplainText:
    """Say what a call of the train step costs on the character transformer.

    Nothing is trained, and nothing is written.
    """

    task: TextConfig = field(default_factory=TextConfig)
    recipe: Recipe = field(default_factory=lambda: Recipe(steps=1000, learning_rate=4e-3))


@dataclass(frozen=True)
class ExplainDigits:
    """Say what a call of the train step costs on handwritten digits.

    Nothing is trained, and nothing is written.
    """

    task: DigitsConfig = field(default_factory=DigitsConfig)
    recipe: Recipe = field(default_factory=lambda: Recipe(steps=300))


@dataclass(frozen=True)
class TrainText(ExplainText):
    """Train a small transformer to predict the next character of a text.

    Without --paths it learns the sources of Python's standard library. The seed also selects the
    initial parameters and the dropout.
    """

    run: RunOptions = field(default_factory=RunOptions)


@dataclass(frozen=True)
class TrainDigits(ExplainDigits):
    """Train a perceptron or a small convolutional network on handwritten digits.

    The seed also selects the initial parameters.
    """

    run: RunOptions = field(default_factory=RunOptions)


@dataclass(frozen=True)
class CompareText:
    """Compare ways to train the character transformer.

    Every variant sees the same batches from the same initial parameters, per seed. --dtype is what
    the low-precision variants compute in.
    """

    task: TextConfig = field(default_factory=lambda: TextConfig(dtype="float16"))
    plan: ComparePlan = field(default_factory=lambda: ComparePlan(steps=100, learning_rate=4e-3))


@dataclass(frozen=True)
class CompareDigits:
    """Compare ways to train on handwritten digits.

    Every variant sees the same batches from the same initial parameters, per seed. --dtype is what
    the low-precision variants compute in.
    """

    task: DigitsConfig = field(default_factory=lambda: DigitsConfig(dtype="float16"))
    plan: ComparePlan = field(default_factory=ComparePlan)


@dataclass(frozen=True)
class Train:
    """Train one workload: with checkpoints, metrics and a plot of the loss."""

    workload: (
        Annotated[TrainText, tyro.conf.subcommand("text")]
        | Annotated[TrainDigits, tyro.conf.subcommand("digits")]
    )


@dataclass(frozen=True)
class Compare:
    """Train one workload in several ways and set them side by side."""

    workload: (
        Annotated[CompareText, tyro.conf.subcommand("text")]
        | Annotated[CompareDigits, tyro.conf.subcommand("digits")]
    )


@dataclass(frozen=True)
class Explain:
    """Say what a call of the train step costs: FLOPs, memory and bytes sent."""

    workload: (
        Annotated[ExplainText, tyro.conf.subcommand("text")]
        | Annotated[ExplainDigits, tyro.conf.subcommand("digits")]
    )


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


_Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Explain, tyro.conf.subcommand("explain")]
    | Annotated[Launch, tyro.conf.subcommand("launch")]
)


def run(argv: list[str]) -> int:
    """Parse the arguments and run what they ask for; the exit code."""
    launched: list[str] = []
    given = argv
    if argv[:1] == ["launch"] and "--" in argv:
        given, launched = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    command: Train | Compare | Explain | Launch = tyro.cli(
        _Command,  # pyright: ignore[reportArgumentType]
        prog="boostax",
        description="Cheaper, steadier training for JAX and Optax, on small real tasks.",
        args=given,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    if isinstance(command, Launch):
        return _launch(command, launched)
    # With peers, nothing that is raised leaves this block.
    with ending_at_once(_say):
        _dispatch(command.workload, argv)
    return 0


def _launch(command: Launch, words: list[str]) -> int:
    if not words or words[0] == "launch":
        raise Refusal(
            f"launch: a command must follow --, got {words}. boostax launch -n 4 -- train text "
            "--devices 4 trains as four processes."
        )
    own = words[0] in ("train", "compare", "explain")
    with refusing():
        return launch(
            [sys.executable, "-m", "boostax.run.cli", *words] if own else words,
            command.processes,
            port=command.port,
            grace=command.grace,
        )


def _dispatch(asked: Any, argv: list[str]) -> None:
    with refusing():
        for options in vars(asked).values():
            check_options(options)
    if isinstance(asked, (TrainText, TrainDigits)):
        train(asked.task, asked.recipe, asked.run, argv)
    elif isinstance(asked, (CompareText, CompareDigits)):
        compare(asked.task, asked.plan)
    else:
        explain(asked.task, asked.recipe)


def _say(error: Exception) -> None:
    if isinstance(error, Refusal):
        complain(error)
    else:
        say(error)
