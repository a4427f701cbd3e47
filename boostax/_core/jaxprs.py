# SPDX-License-Identifier: Apache-2.0
"""JAX's classes of jaxprs.

The classes are loaded on first use, because ``jax.extend`` imports Pallas, a third of the time of
``import boostax``. Write ``jaxprs.Literal``, and ``from __future__ import annotations`` where a
signature names a class.

JAX may change how it writes types and traced programs. Code that looks for an old name would then
find nothing, and a check that finds nothing accepts everything. ``tests/test_proof.py`` reads small
programs whose answer is known, on the oldest, the pinned and the newest JAX.
"""

from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr
    from jax.extend.core import Jaxpr as Jaxpr
    from jax.extend.core import JaxprEqn as JaxprEqn
    from jax.extend.core import Literal as Literal
    from jax.extend.core import gensym as gensym
    from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
    from jax.extend.core import no_effects as no_effects


def __getattr__(name: str) -> Any:
    from jax.extend import core

    globals()[name] = value = getattr(core, name)
    return value


def require(subject: str, allowed: str, got: object, holds: bool, danger: str) -> None:
    """Raise unless JAX's types or programs were read in the expected form.

    Args:
      subject: the types or programs that are read.
      allowed: the form that they must have.
      got: what was read.
      holds: whether ``got`` has the form.
      danger: the error that would go unnoticed.
    """
    if not holds:
        raise RuntimeError(
            f"boostax: {subject} of JAX {jax.__version__} must be {allowed}, got {got!r}. {danger} "
            "In a checkout, pip install -c constraints.txt . takes versions tested together."
        )
