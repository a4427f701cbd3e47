"""Levanter's optimizers with boostax around them, chosen in its config; nothing changes there.

::

    optimizer:
      type: boostax
      inner: {type: adam, learning_rate: 6.0e-4}
      boost: {accumulate: 8, skip_spikes: {rule: sigma}, average_params: {decay: 0.999}}

Import this file before Levanter parses its config, or run it in the place of
``levanter/main/train_lm.py``. ``loss_scale`` and one reduction per step want ``levanter.patch``.
"""

from dataclasses import dataclass, field
from typing import Any

import optax
from levanter.optim import AdamConfig, OptimizerConfig

import boostax


@OptimizerConfig.register_subclass("boostax")
@dataclass(frozen=True)
class BoostaxConfig(OptimizerConfig):
    """An optimizer of Levanter's in the chain that ``boostax.auto`` makes of a dictionary."""

    inner: OptimizerConfig = field(default_factory=AdamConfig)
    boost: dict[str, Any] = field(default_factory=dict)

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        """``inner`` counts the steps that it takes: of a window one."""
        boost = boostax.auto(self.boost)
        window = boost.config.accumulate.every if boost.config.accumulate else 1
        return boost.optimizer(self.inner.build(num_train_steps // window))


if __name__ == "__main__":
    import levanter.config
    from levanter.main import train_lm

    levanter.config.main(train_lm.main)()
