"""Run the matrix products and convolutions of any function in a lower precision.

The function is traced, and every ``dot_general`` and ``conv_general_dilated`` in the trace gets its
f32 operands in the low dtype and gives its result back in f32. The types of all other values stay,
so the bodies of loops, branches and ``shard_map`` are rewritten where they are, not traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import jaxprs
from boostax._core.programs import CUSTOM, require_readable

_PRODUCTS = (lax.dot_general_p, lax.conv_general_dilated_p)
# Their derivative rules are functions of their own, which a rewritten body would not fit.
_OPAQUE = (*CUSTOM, "pallas_call")


def autocast(fn: Callable[..., Any], dtype: np.dtype[Any]) -> Callable[..., Any]:
    """``fn`` with its f32 matrix products and convolutions computed in ``dtype``.

    Derivatives of the result are those of the rewritten products, so they run in ``dtype`` too.
    Arguments that are no arrays or numbers pass as they are.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        traced = [isinstance(x, (jax.Array, np.ndarray, np.generic)) for x in leaves]
        arrays = [jnp.asarray(x) for x, yes in zip(leaves, traced, strict=True) if yes]

        def on_arrays(*given: Any) -> Any:
            rest = iter(given)
            filled = [next(rest) if yes else x for x, yes in zip(leaves, traced, strict=True)]
            args, kwargs = jax.tree.unflatten(treedef, filled)
            return fn(*args, **kwargs)

        require_readable()
        jaxpr, shapes = jax.make_jaxpr(on_arrays, return_shape=True)(*arrays)
        results = jaxprs.jaxpr_as_fun(_rewrite(jaxpr, dtype))(*arrays)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return wrapped


def _rewrite(value: Any, dtype: np.dtype[Any]) -> Any:
    """A parameter of an equation, with every jaxpr in it rewritten."""
    if type(value) in (tuple, list):
        return type(value)(_rewrite(item, dtype) for item in value)
    # Jaxpr first: from jax 0.11 on the two are one class, whose consts this keeps.
    if isinstance(value, jaxprs.Jaxpr):
        return value.replace(eqns=[new for eqn in value.eqns for new in _lowered(eqn, dtype)])
    if isinstance(value, jaxprs.ClosedJaxpr):
        return value.replace(jaxpr=_rewrite(value.jaxpr, dtype))
    return value


def _lowered(eqn: Any, dtype: np.dtype[Any]) -> Iterator[Any]:
    """The equations that stand for one."""
    if eqn.primitive.name in _OPAQUE:
        yield eqn
    elif eqn.primitive not in _PRODUCTS:
        params = {name: _rewrite(value, dtype) for name, value in eqn.params.items()}
        yield eqn.replace(params=params)
    elif any(var.aval.dtype != jnp.float32 for var in (*eqn.invars, *eqn.outvars)):
        yield eqn
    else:
        new_var = jaxprs.gensym()
        low = lambda var: new_var(var.aval.update(dtype=dtype, weak_type=False))  # noqa: E731
        operands = [low(var) for var in eqn.invars]
        result = low(eqn.outvars[0])
        for wide, narrow in zip(eqn.invars, operands, strict=True):
            yield _cast(eqn, wide, narrow)
        params = {**eqn.params, "preferred_element_type": None}
        yield eqn.replace(invars=operands, outvars=[result], params=params)
        yield _cast(eqn, result, eqn.outvars[0])


def _cast(eqn: Any, source: Any, target: Any) -> Any:
    """A cast that stands where ``eqn`` stood in the source."""
    return eqn.replace(
        primitive=lax.convert_element_type_p,
        invars=[source],
        outvars=[target],
        params={"new_dtype": target.aval.dtype, "weak_type": False, "sharding": None},
        effects=jaxprs.no_effects,
    )
