# SPDX-License-Identifier: Apache-2.0
"""Refuse what a configuration or a saved state cannot be, in the words of ``refusals.toml``."""

from typing import Any

from boostax._core import checks

WORDS = checks.table("boostax.config", "refusals")


def require(
    fits: object, what: str, got: object, error: type[Exception] = ValueError, /, **words: Any
) -> None:
    """Raise the refusal ``what``, with these words in it, unless something fits."""
    if not fits:
        who, argument, allowed, hint = (text.format(**words) for text in WORDS[what])
        checks.require(who, argument, got, allowed, False, hint, error)
