# SPDX-License-Identifier: Apache-2.0
"""Signals that ask a process to end, handed to whoever knows when it can."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator


@contextlib.contextmanager
def handled(note: Callable[[int], None]) -> Generator[None]:
    """Hand SIGINT and SIGTERM to ``note`` meanwhile, where Python allows: in the main thread."""
    here = threading.current_thread() is threading.main_thread()
    wanted = (signal.SIGINT, signal.SIGTERM) if here else ()
    before = {number: signal.signal(number, lambda found, _: note(found)) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
