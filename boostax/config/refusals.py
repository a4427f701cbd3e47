# SPDX-License-Identifier: Apache-2.0
"""Raise errors about configurations and saved states with the texts of ``refusals.toml``."""

from boostax._core import checks

WORDS = checks.table("boostax.config", "refusals")


def require(
    valid: object, what: str, got: object, error: type[Exception] = ValueError, /, **words: object
) -> None:
    """Raise the error ``what`` of ``refusals.toml``, formatted with ``words``, unless ``valid``."""
    if not valid:
        who, argument, allowed, hint = (text.format(**words) for text in WORDS[what])
        checks.require(False, who, argument, got=got, allowed=allowed, hint=hint, error=error)
