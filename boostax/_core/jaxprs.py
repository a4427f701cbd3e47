# SPDX-License-Identifier: Apache-2.0
"""JAX's classes of jaxprs.

The classes are loaded on first use, because ``jax.extend`` imports Pallas, which would need a third
of the time of ``import boostax``. Write ``jaxprs.Literal``, and ``from __future__ import
annotations`` where a signature names a class.

JAX may change how it writes types and traced programs. Code that looks for an old name would then
find nothing, and a check that finds nothing accepts everything. ``tests/test_proof.py`` reads small
programs whose answer is known, on the oldest, the pinned and the newest JAX.
"""

from typing import TYPE_CHECKING

from boostax._core.late import late

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, gensym, jaxpr_as_fun
    from jax.extend.core import no_effects as no_effects

    Atom = Var | Literal

__all__ = ["ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Var", "gensym", "jaxpr_as_fun"]
late(__name__, dict.fromkeys([*__all__, "no_effects"], "jax.extend.core"))
