"""Real tasks shared by the command line, the benchmarks, the notebooks and the tests.

They need Flax and scikit-learn: ``pip install 'boostax[workloads]'``.
"""

from boostax.run.workloads._workload import Workload
from boostax.run.workloads.digits import DigitsConfig, digits
from boostax.run.workloads.text import TextConfig, text

__all__ = ["DigitsConfig", "TextConfig", "Workload", "digits", "text"]
