# SPDX-License-Identifier: Apache-2.0
"""``python -m boostax.run.cli``."""

import sys

from boostax.run.cli import main

if __name__ == "__main__":
    sys.exit(main())
