# SPDX-License-Identifier: Apache-2.0
"""Find the variants of a step that is compiled once for each static choice of what it does.

``scheduled_freeze`` has them: a variant is the depth, the number of frozen groups, a Python integer
that is given to ``update`` by the keyword ``depth``. Its state has a method ``coming()``: the
variant of the next call, an i32 scalar. A train step asks the ``variants`` of its transformation's
``update``, a ``boostax.freeze.scheduled.Freezing``, and knows nothing else of freezing.
"""

from typing import Any

import optax


def variants_of(tx: optax.GradientTransformation) -> Any:
    """Return its variants; ``None`` if a step of it is compiled once."""
    return getattr(tx.update, "variants", None)
