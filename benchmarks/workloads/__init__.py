"""Real tasks shared by benchmarks and tests; they need Flax and scikit-learn."""

from workloads.digits import DigitsConfig, digits
from workloads.text import TextConfig, text
from workloads.workload import Workload

__all__ = ["DigitsConfig", "TextConfig", "Workload", "digits", "text"]
