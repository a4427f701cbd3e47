# SPDX-License-Identifier: Apache-2.0
"""How a run trains (what changes its numbers), how it is run (what does not), what is refused."""

import dataclasses
import math
import pathlib
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from boostax.config.reduction import CODECS, DENSE
from boostax.run.options import Use, check, option, value

if TYPE_CHECKING:
    Reduction: TypeAlias = str
else:
    # Those that keep the replicas equal; a codec decides itself what travels.
    Reduction = Literal[(*DENSE, *CODECS)]
_SCHEDULED = ("interval", "continuous", "progressive", "ramp")


_FREEZES = Use(
    "freeze",
    (*_SCHEDULED, "plateau"),
    "--freeze interval freezes some of the layers on some of the steps.",
)
_SETTLES = Use("freeze", _SCHEDULED, "It freezes a group when its gradients have settled.")
_FINISHES = Use(
    "finish", ("dim_reduce",), "--finish dim_reduce takes quasi-Newton steps after the run."
)
_SPARSE = Use("reduce", ("top-k", "random-k"), "It is for --reduce top-k and random-k.")
_LOW_RANK = Use("reduce", ("power-sgd",), "It is for --reduce power-sgd.")
_FEW = "10 steps in 20 directions are the default."


@dataclasses.dataclass(frozen=True)
class Optimization:
    """What a run and a comparison have in common."""

    learning_rate: float = option(2e-3, "0.002 is the default.", "greater than 0", lambda x: x > 0)
    """Peak; warmed up over a tenth of the optimizer steps, then a cosine down to a tenth."""
    weight_decay: float = option(0.01, "0 turns it off.", "at least 0", lambda x: x >= 0)
    """Decoupled weight decay, on matrices only."""
    clip: float = option(1.0, "0 turns it off.", "at least 0", lambda x: x >= 0)
    """Largest global norm of the gradient; 0 turns clipping off."""
    devices: int = option(1, "1 trains on a single device.")
    """Devices to split each batch over, of all processes together; 1 with several processes: all
    they have. On CPU they are emulated."""
    reduce: Reduction = "mean"
    """How the devices' gradients become one; adasum-delta combines the updates of an AdamW each.
    Those from top-k on send less of the matrices at a time and keep the rest for later steps."""
    density: float | None = option(
        None,
        "0.01 sends one element in a hundred.",
        "in (0, 1]",
        lambda x: 0 < x <= 1,
        left_out=0.01,
        uses=(_SPARSE,),
    )
    """Share of the elements that top-k and random-k send; 0.01 by default."""
    rank: int | None = option(None, "1, 2 or 4 are usual.", left_out=2, uses=(_LOW_RANK,))
    """Rank of what power-sgd sends of each matrix; 2 by default."""

    def value(self, name: str) -> Any:
        """An option, or what it stands for where it is left out."""
        return value(self, name)


@dataclasses.dataclass(frozen=True)
class Recipe(Optimization):
    """How to train. Everything here changes the numbers."""

    steps: int = option(500, "It counts calls of the train step.")
    """Calls of the train step; each takes one batch."""
    loss_scale: Literal["dynamic", "none"] | float = "dynamic"
    """dynamic adapts and skips steps that overflow; a number is fixed; none is not for float16."""
    accumulate: int = option(1, "1 takes an optimizer step at every call.")
    """Calls averaged into one optimizer step: an effective batch that many times as large."""
    microbatches: int = option(1, "1 passes each batch through the model as a whole.")
    """Slices of a batch passed through the model in turn: less memory for the same result."""
    wire: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype in which gradients travel between the devices, for mean and adasum."""
    freeze: Literal["none", "interval", "continuous", "progressive", "ramp", "plateau"] = "none"
    """When the first layers stand still, which saves their backward pass: now and then, to a random
    depth (interval) or to each in turn (continuous); or for good, one after the other, at even
    distances (progressive), early ones sooner (ramp), or when their gradients settle (plateau)."""
    freeze_groups: int | None = option(
        None, "The last group always trains.", "at least 2", lambda x: x >= 2, uses=(_FREEZES,)
    )
    """Groups of layers, in forward order, that freeze together; the last always trains. 4 by
    default, or the number of layers if there are fewer."""
    freeze_fraction: float | None = option(
        None,
        "0.3 freezes something on about 30% of the steps.",
        "in [0, 1)",
        lambda x: 0 <= x < 1,
        uses=(_FREEZES, _SETTLES),
    )
    """Share of the optimizer steps on which something is frozen; 0.3 by default. Plateau measures
    instead."""

    evaluate: Literal["params", "averaged"] = "params"
    """What the held-out split judges: the params, or an exponential average of them, which looks
    back over a twentieth of the optimizer steps."""

    finish: Literal["none", "dim_reduce"] = "none"
    """What follows the run: quasi-Newton steps in the principal directions of its second half, on
    eight batches at a time."""
    finish_steps: int | None = option(None, _FEW, left_out=10, uses=(_FINISHES,))
    """How many; 10 by default."""
    finish_components: int | None = option(None, _FEW, left_out=20, uses=(_FINISHES,))
    """Directions; 20 by default. The device holds one snapshot more of the params."""

    @property
    def optimizer_steps(self) -> int:
        """Steps of the optimizer: the last window may be cut short."""
        return math.ceil(self.steps / self.accumulate)

    @property
    def calls(self) -> int:
        """Calls of the run and of what follows it."""
        return self.steps + (self.value("finish_steps") if self.finish != "none" else 0)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How to run it. Nothing here changes the numbers."""

    output: pathlib.Path | None = None
    """Directory for everything the run writes; runs/<workload> by default."""
    resume: bool = False
    """Go on from the latest checkpoint in the output directory, if there is one."""
    checkpoint_every: int = option(100, "It counts calls.")
    """Calls between two checkpoints; one more is saved at the end and when a signal comes."""
    evaluate_every: int = option(50, "It counts calls.")
    """Calls between two evaluations on the held-out split."""
    audit: bool = False
    """At the end, count what an optimizer step reduces and sends, beside the same in plain jit."""
    tensorboard: bool = False
    """Also write TensorBoard events to the output directory."""
    step_limit: float | None = option(
        None, "It is several times what a call takes, in seconds.", "> 0", lambda x: x > 0
    )
    """Seconds that a call may take before the run ends and says who is stuck: 600 by default with
    several processes, no limit with one. The first call, evaluations and saves get ten times it."""
    heartbeat: int = 100
    """With several processes: seconds of silence after which one is taken for dead."""


@dataclasses.dataclass(frozen=True)
class ComparePlan(Optimization):
    """What is the same for all variants, and how often they are run.

    With several devices the bytes on the wire are counted; of a reduction that sends less, the
    bandwidth below which it pays is measured.
    """

    steps: int = option(200, "It counts optimizer steps.")
    """Optimizer steps of each run; each takes one batch, whole or in parts."""
    seeds: int = option(2, "2 shows how much runs differ.")
    """Runs of each variant, from different initial parameters and with different batches."""
    accumulate: int = option(4, "1 leaves the last variant out.")
    """Parts into which the last variant cuts each batch, one call for each."""
    output: pathlib.Path | None = None
    """Directory for the results; runs/compare-<workload> by default."""


def check_options(options: Any) -> None:
    """Refuse options that are out of range or do not go together, in the command's words."""
    check("boostax", options, lambda name: "--" + name.replace("_", "-"))
    if isinstance(options, Recipe):
        _check_together(options)


def _check_together(recipe: Recipe) -> None:
    if recipe.wire != "float32" and recipe.reduce in CODECS:
        raise ValueError(
            f"boostax: --wire must be float32 with --reduce {recipe.reduce}, got {recipe.wire}. "
            f"{recipe.reduce} decides itself what travels."
        )
    if recipe.freeze == "plateau" and recipe.reduce == "adasum-delta":
        raise ValueError(
            "boostax: --freeze must not be plateau with --reduce adasum-delta, got plateau. Its "
            "gradients stay each device's own, and all must freeze alike; --reduce adasum does."
        )
    if recipe.evaluate == "averaged" and (recipe.freeze != "none" or recipe.finish != "none"):
        other = "--freeze" if recipe.freeze != "none" else "--finish"
        raise ValueError(
            f"boostax: --evaluate must be params with {other}, got averaged. What is frozen would "
            "be missing from the average, and a finish is judged by itself."
        )
    if recipe.finish == "none":
        return
    if recipe.freeze != "none":
        raise ValueError(
            "boostax: --finish must be none with --freeze, got dim_reduce. While layers stand "
            "still the path of the params is not recorded."
        )
    if recipe.optimizer_steps < 8:
        raise ValueError(
            f"boostax: --steps must give at least 8 optimizer steps with --finish, got "
            f"{recipe.optimizer_steps}. The second half of them is what the directions come from."
        )
