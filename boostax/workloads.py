"""The public name of ``boostax.run.workloads`` in 0.1."""

from boostax.run.workloads import DigitsConfig as DigitsConfig
from boostax.run.workloads import TextConfig as TextConfig
from boostax.run.workloads import Workload as Workload
from boostax.run.workloads import digits as digits
from boostax.run.workloads import text as text
