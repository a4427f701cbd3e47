# SPDX-License-Identifier: Apache-2.0
"""JAX's classes of traced programs, and the proof at first use that they are read aright

``jax.extend`` loads Pallas with the classes, a third of what ``import boostax`` took: they are
loaded when first asked for. Write ``jaxprs.Literal``, and ``from __future__ import annotations``
where a signature names one.

How JAX writes types and traced programs is no promise of its. Under another name a reader would
see nothing, and a guard that sees nothing passes everything. So before it reads anything of a
user's, each reader traces a small program to which it knows the answer, and raises if it reads
another. Nothing is compiled, and nothing is added to the program that is being traced.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, AxisType

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


# The axis of a proof's mesh; no user's function is mapped over it.
AXIS = "boostax_proof"


@contextmanager
def apart() -> Generator[AbstractMesh]:
    """Yield a mesh of two devices that need not exist, whatever the caller is traced under."""
    mesh = AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Auto,))
    # shard_map refuses a mesh beside the user's own, and disable_jit would write calls out.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), jax.disable_jit(False):
        yield mesh


def unreadable(subject: str, allowed: str, got: object, danger: str) -> RuntimeError:
    """Return the error to raise where JAX is not read as it is meant.

    Args:
      subject: the thing that is read.
      allowed: what it must be.
      got: what was read.
      danger: what would go wrong in silence.
    """
    return RuntimeError(
        f"boostax: {subject} of JAX {jax.__version__} must be {allowed}, got {got!r}. {danger} "
        "In a checkout, pip install -c constraints.txt . takes versions that were tested together."
    )
