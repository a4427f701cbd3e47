"""The public name of ``boostax.run.loop`` in 0.1."""

from boostax.run.loop import FitResult as FitResult
from boostax.run.loop import fit as fit
