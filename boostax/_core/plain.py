# SPDX-License-Identifier: Apache-2.0
"""Values as JSON has words for them."""

import math
from collections.abc import Sequence
from typing import Any, cast


def plain(value: Any) -> Any:
    """The same with null for what is not finite, which JSON has no word for."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in cast("Sequence[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
