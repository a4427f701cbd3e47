# SPDX-License-Identifier: Apache-2.0
"""What the command says where it cannot do what is asked: one line, without a traceback."""

import contextlib
import sys
from collections.abc import Generator


class Refusal(Exception):
    """Something in the arguments or on the disk does not allow the run; the message says what."""

    def __str__(self) -> str:
        return f"boostax: {super().__str__().removeprefix('boostax: ')}"


@contextlib.contextmanager
def refusing() -> Generator[None]:
    """Turn the errors of argument checks and files into a `Refusal`."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        raise Refusal(str(error)) from error


def complain(words: object) -> None:
    """One line on standard error."""
    print(words, file=sys.stderr, flush=True)
