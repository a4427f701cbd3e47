"""``python -m boostax.cli``."""

import sys

from boostax.cli import main

if __name__ == "__main__":
    sys.exit(main())
