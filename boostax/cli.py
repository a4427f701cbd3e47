"""The public name of ``boostax.run.cli`` in 0.1, also for ``python -m``."""

import sys

from boostax.run.cli import main as main

if __name__ == "__main__":
    sys.exit(main())
