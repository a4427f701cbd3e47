# SPDX-License-Identifier: Apache-2.0
"""The script ``boostax``. It stands beside the package, as importing that imports JAX.

JAX's plugins and compilers log to stderr from their import on, where no device is at hand.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Generator


@contextlib.contextmanager
def held_back() -> Generator[None]:
    """Hold back what compilers write to the descriptor of stderr; print it if something fails.

    Python's own writes to ``sys.stderr``, such as warnings, pass.
    """
    with tempfile.TemporaryFile() as held, os.fdopen(os.dup(2), "w", buffering=1) as shown:
        ours = sys.stderr
        sys.stderr = shown if ours is sys.__stderr__ else ours
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            shown.write(held.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(shown.fileno(), 2)
            sys.stderr = ours


def main() -> int:
    """Run the command line; return its exit code."""
    with held_back():
        from boostax.__main__ import main
    return main()
