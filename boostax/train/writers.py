"""The public name of ``boostax.run.writers`` in 0.1."""

from boostax.run.writers import JsonLines as JsonLines
from boostax.run.writers import Progress as Progress
from boostax.run.writers import TensorBoard as TensorBoard
from boostax.run.writers import Writer as Writer
