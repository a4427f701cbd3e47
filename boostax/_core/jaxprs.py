# SPDX-License-Identifier: Apache-2.0
"""JAX's classes of jaxprs.

The classes are loaded on first use, because ``jax.extend`` imports Pallas, which would take a third
of the time of ``import boostax``. Refer to a class as ``jaxprs.Literal``, and write ``from
__future__ import annotations`` in a module whose signatures name a class.

JAX may change how it writes types and traced programs. Code that looks for an old name would then
find nothing, and a check that finds nothing accepts everything. So ``tests/test_proof.py`` reads
small programs with known results, on the oldest, the pinned and the newest JAX.
"""

from typing import TYPE_CHECKING

from boostax._core.late import late

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, gensym, jaxpr_as_fun
    from jax.extend.core import no_effects as no_effects

    Atom = Var | Literal

__all__ = ["ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Var", "gensym", "jaxpr_as_fun"]
late(__name__, dict.fromkeys([*__all__, "no_effects"], "jax.extend.core"))
