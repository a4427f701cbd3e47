"""How a run trains (what changes its numbers), and how it is run (what does not)."""

import dataclasses
import pathlib
from typing import Literal

from boostax.autoboost.reduction import Equal

Reduction = Equal
Freezing = Literal["none", "interval", "continuous", "progressive", "ramp", "plateau"]
# Reductions that decide themselves what travels.
CODECS = ("top-k", "threshold", "random-k", "int8", "int16", "sign", "power-sgd")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train. Everything here changes the numbers."""

    steps: int = 500
    """Calls of the train step; each takes one batch."""
    learning_rate: float = 2e-3
    """Peak; warmed up over a tenth of the optimizer steps, then a cosine down to a tenth."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on matrices only."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 turns clipping off."""
    loss_scale: Literal["dynamic", "none"] | float = "dynamic"
    """dynamic adapts and skips steps that overflow; a number is fixed; none is not for float16."""
    accumulate: int = 1
    """Calls averaged into one optimizer step: an effective batch that many times as large."""
    microbatches: int = 1
    """Slices of a batch passed through the model in turn: less memory for the same result."""
    devices: int = 1
    """Devices to split each batch over, of all processes together; 1 with several processes: all
    they have. On CPU they are emulated."""
    reduce: Reduction = "mean"
    """How the devices' gradients become one; adasum-delta combines the updates of an AdamW each.
    Those from top-k on send less of the matrices at a time and keep the rest for later steps."""
    density: float | None = None
    """Share of the entries that top-k and random-k send; 0.01 by default."""
    rank: int | None = None
    """Rank of what power-sgd sends of each matrix; 2 by default."""
    wire: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype in which gradients travel between the devices, for mean and adasum."""
    freeze: Freezing = "none"
    """When the first layers stand still, which saves their backward pass: now and then, to a random
    depth (interval) or to each in turn (continuous); or for good, one after the other, at even
    distances (progressive), early ones sooner (ramp), or when their gradients settle (plateau)."""
    freeze_groups: int | None = None
    """Groups of layers, in forward order, that freeze together; the last always trains. 4 by
    default, or the number of layers if there are fewer."""
    freeze_fraction: float | None = None
    """Share of the optimizer steps on which something is frozen; 0.3 by default. Plateau measures
    instead."""

    finish: Literal["none", "dim_reduce"] = "none"
    """What follows the run: quasi-Newton steps in the principal directions of its second half, on
    eight batches at a time."""
    finish_steps: int | None = None
    """How many; 10 by default."""
    finish_components: int | None = None
    """Directions; 20 by default. The device holds one snapshot more of the params."""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How to run it. Nothing here changes the numbers."""

    output: pathlib.Path | None = None
    """Directory for everything the run writes; runs/<workload> by default."""
    resume: bool = False
    """Go on from the latest checkpoint in the output directory, if there is one."""
    checkpoint_every: int = 100
    """Calls between two checkpoints; one more is saved at the end and when a signal comes."""
    evaluate_every: int = 50
    """Calls between two evaluations on the held-out split."""
    tensorboard: bool = False
    """Also write TensorBoard events to the output directory."""
    step_limit: float | None = None
    """Seconds that a call may take before the run ends and says who is stuck: 600 by default with
    several processes, no limit with one. The first call, evaluations and saves get ten times it."""
    heartbeat: int = 100
    """With several processes: seconds of silence after which one is taken for dead."""


@dataclasses.dataclass(frozen=True)
class ComparePlan:
    """What is the same for all variants, and how often they are run."""

    steps: int = 200
    """Optimizer steps of each run; each takes one batch, whole or in parts."""
    seeds: int = 2
    """Runs of each variant, from different initial parameters and with different batches."""
    learning_rate: float = 2e-3
    """Peak of the schedule."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on matrices only."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 turns clipping off."""
    accumulate: int = 4
    """Parts into which the last variant cuts each batch, one call for each."""
    devices: int = 1
    """Devices to split each batch over; with more than one the bytes on the wire are counted."""
    reduce: Reduction = "mean"
    """How the devices' gradients become one. Of those from top-k on, which send less, the bandwidth
    below which they pay is measured."""
    density: float | None = None
    """Share of the entries that top-k and random-k send; 0.01 by default."""
    rank: int | None = None
    """Rank of what power-sgd sends of each matrix; 2 by default."""
    output: pathlib.Path | None = None
    """Directory for the results; runs/compare-<workload> by default."""
