"""openpi's optimizers with boostax around them, in its ``TrainConfig``; nothing changes there.

::

    boost = {"accumulate": 8, "skip_spikes": True}
    TrainConfig(name="mine", optimizer=Boostax(AdamW(), boost), ...)

``loss_scale``, and micro-batches with one reduction, want ``openpi.patch``.
"""

import dataclasses
from typing import Any

import optax
from openpi.training.optimizer import AdamW, OptimizerConfig

import boostax


@dataclasses.dataclass(frozen=True)
class Boostax(OptimizerConfig):
    """An optimizer of openpi's in the chain that ``boostax.auto`` makes of a dictionary."""

    inner: OptimizerConfig = dataclasses.field(default_factory=AdamW)
    boost: dict[str, Any] = dataclasses.field(default_factory=dict)

    def create(
        self, lr: optax.ScalarOrSchedule, weight_decay_mask: Any = None
    ) -> optax.GradientTransformation:
        """The schedule counts the steps that ``inner`` takes: of a window one."""
        return boostax.auto(self.boost).optimizer(self.inner.create(lr, weight_decay_mask))
