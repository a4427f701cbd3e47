# SPDX-License-Identifier: Apache-2.0
"""Set a context variable for a while."""

import contextlib
import contextvars
from collections.abc import Generator

from boostax._core.types import Value


@contextlib.contextmanager
def during(variable: contextvars.ContextVar[Value], value: Value) -> Generator[None]:
    """Set a context variable inside this context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
