# SPDX-License-Identifier: Apache-2.0
"""Where 0.1 had what is in ``boostax.run.cli``, also for ``python -m``."""

import sys

from boostax._core.late import renamed

__getattr__ = renamed("boostax.cli")

if __name__ == "__main__":
    sys.exit(__getattr__("main")())
