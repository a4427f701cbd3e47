# SPDX-License-Identifier: Apache-2.0
"""How a process with peers ends when something goes wrong: at once, and saying why."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager

import jax

_SERVICE_STAYS = 1.0


class PeerLost(RuntimeError):
    """A collective failed, as it does when another process of the run has ended."""


def say(error: Exception) -> None:
    """Write an error to stderr: of a lost peer the message, of others the traceback."""
    if isinstance(error, PeerLost):
        print(f"boostax: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)


@contextmanager
def ending_at_once(say: Callable[[Exception], None] = say) -> Generator[None]:
    """End this process at the first error, if it has peers.

    An exception that leaves one of several processes in the usual way waits for the others at JAX's
    shutdown barrier, while they wait for it in a collective: minutes of silence. Here it is said
    and the process ends with code 1; its peers see the connection break at their next collective.

    Args:
      say: what to do with the error before.

    Example:
      >>> with ending_at_once():
      ...     pass
    """
    try:
        yield
    except Exception as error:
        if not jax.distributed.is_initialized() or jax.process_count() == 1:
            raise
        say(error)
        sys.stdout.flush()
        if jax.process_index() == 0:
            # It keeps JAX's service: others who end for the same reason get to say so.
            time.sleep(_SERVICE_STAYS)
        os._exit(1)
