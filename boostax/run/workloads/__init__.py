# SPDX-License-Identifier: Apache-2.0
"""Real tasks shared by the command line, the benchmarks, the notebooks and the tests.

They need Flax and scikit-learn: ``pip install 'boostax[workloads]'``.
"""

from typing import Any

from boostax.run.workloads._workload import Workload
from boostax.run.workloads.digits import DigitsConfig, digits
from boostax.run.workloads.text import TextConfig, text

__all__ = ["DigitsConfig", "TextConfig", "Workload", "digits", "make", "text"]

_MAKERS: dict[type[Any], Any] = {DigitsConfig: digits, TextConfig: text}


def make(config: DigitsConfig | TextConfig) -> Workload:
    """The workload of a configuration, whichever it is."""
    return _MAKERS[type(config)](config)
