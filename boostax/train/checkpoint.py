"""The public name of ``boostax.run.checkpoint`` in 0.1."""

from boostax.run.checkpoint import Checkpointer as Checkpointer
