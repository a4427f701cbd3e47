# SPDX-License-Identifier: Apache-2.0
"""Run the matrix products and convolutions of any function in a lower precision.

The function is traced. Every ``dot_general`` and ``conv_general_dilated`` in the trace then casts
its f32 operands to the low dtype and its result back to f32. All other values keep their types, so
the bodies of loops, branches and ``shard_map`` are rewritten in place, not traced again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import jaxprs, trees
from boostax._core.interpret import CUSTOM, require_readable, rewrite

_ARRAYS = (jax.Array, np.ndarray, np.generic)
_PRODUCTS = (lax.dot_general_p, lax.conv_general_dilated_p)
# These have their own derivative rules, which would not fit a rewritten body.
_OPAQUE = (*CUSTOM, "pallas_call")


def autocast(fn: Callable[..., Any], dtype: np.dtype[Any]) -> Callable[..., Any]:
    """Return ``fn`` with its f32 matrix products and convolutions computed in ``dtype``.

    The derivative of a rewritten product is rewritten too, so it runs in ``dtype``. Arguments that
    are neither arrays nor numbers reach ``fn`` unchanged.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        arrays = {i: jnp.asarray(x) for i, x in enumerate(leaves) if isinstance(x, _ARRAYS)}

        def on_arrays(arrays: dict[int, jax.Array]) -> Any:
            args, kwargs = treedef.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
            return fn(*args, **kwargs)

        require_readable()
        replay, _ = trees.trace_once(on_arrays, arrays)
        lowered = rewrite(replay.program, functools.partial(_lowered, dtype=dtype))
        return replay._replace(program=lowered)(arrays)

    return wrapped


def _lowered(eqn: Any, dtype: np.dtype[Any]) -> list[jaxprs.JaxprEqn] | None:
    """Return the equations that replace ``eqn``; ``None`` to rewrite only its bodies."""
    if eqn.primitive not in _PRODUCTS:
        return [eqn] if eqn.primitive.name in _OPAQUE else None
    if any(var.aval.dtype != jnp.float32 for var in (*eqn.invars, *eqn.outvars)):
        return [eqn]
    new_var = jaxprs.gensym()
    low = lambda var: new_var(var.aval.update(dtype=dtype, weak_type=False))  # noqa: E731
    operands, result = [low(var) for var in eqn.invars], low(eqn.outvars[0])
    params = {**eqn.params, "preferred_element_type": None}
    return [
        *(_cast(eqn, wide, narrow) for wide, narrow in zip(eqn.invars, operands, strict=True)),
        eqn.replace(invars=operands, outvars=[result], params=params),
        _cast(eqn, result, eqn.outvars[0]),
    ]


def _cast(eqn: jaxprs.JaxprEqn, source: Any, target: Any) -> jaxprs.JaxprEqn:
    """Make a cast with the source position of ``eqn``."""
    return eqn.replace(
        primitive=lax.convert_element_type_p,
        invars=[source],
        outvars=[target],
        params={"new_dtype": target.aval.dtype, "weak_type": False, "sharding": None},
        effects=jaxprs.no_effects,
    )
