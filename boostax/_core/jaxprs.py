# SPDX-License-Identifier: Apache-2.0
"""JAX's classes of traced programs, loaded when first asked for.

``jax.extend`` loads Pallas with them, a third of what ``import boostax`` took. Write
``jaxprs.Literal``, and ``from __future__ import annotations`` where a signature names one.
"""

from typing import TYPE_CHECKING, Any

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
