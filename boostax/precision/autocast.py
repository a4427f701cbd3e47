"""Run the matrix products and convolutions of any function in a lower precision.

The function is traced and every ``dot_general`` and ``conv_general_dilated`` gets its f32 operands
in the low dtype and gives its result back in f32. Types of all other values stay, so the bodies of
loops and branches can be replaced where they are.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_PRODUCTS = (lax.dot_general_p, lax.conv_general_dilated_p)
# Their bodies are elementwise (relu, softmax), and their derivative rules must be kept.
_OPAQUE = ("custom_jvp_call", "custom_vjp_call")


def autocast(fn: Callable[..., Any], dtype: np.dtype[Any]) -> Callable[..., Any]:
    """``fn`` with its f32 matrix products and convolutions computed in ``dtype``."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(x, (jax.Array, np.ndarray, np.generic, float, int)) for x in leaves]
        arrays = [jnp.asarray(x) for x, yes in zip(leaves, is_array, strict=True) if yes]

        def on_arrays(*given: Any) -> Any:
            rest = iter(given)
            filled = [next(rest) if yes else x for x, yes in zip(leaves, is_array, strict=True)]
            args, kwargs = jax.tree.unflatten(treedef, filled)
            return fn(*args, **kwargs)

        traced, shapes = jax.make_jaxpr(on_arrays, return_shape=True)(*arrays)
        results = _evaluate(traced.jaxpr, traced.consts, arrays, dtype)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return wrapped


def _evaluate(jaxpr: Jaxpr, consts: Any, args: Any, dtype: np.dtype[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive in _PRODUCTS:
            outputs = [_product(eqn, operands, dtype)]
        elif eqn.primitive.name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"]
            outputs = _evaluate(inner.jaxpr, inner.consts, operands, dtype)
        else:
            params = eqn.params
            if eqn.primitive.name not in _OPAQUE:
                params = {name: _rewrite(value, dtype) for name, value in params.items()}
            functions, params = eqn.primitive.get_bind_params(params)
            result = eqn.primitive.bind(*functions, *operands, **params)
            outputs = result if eqn.primitive.multiple_results else [result]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _product(eqn: Any, operands: list[Any], dtype: np.dtype[Any]) -> Any:
    wide = eqn.outvars[0].aval.dtype
    if wide != jnp.float32 or any(x.dtype != jnp.float32 for x in operands):
        return eqn.primitive.bind(*operands, **eqn.params)
    params = {**eqn.params, "preferred_element_type": None}
    low = [x.astype(dtype) for x in operands]
    return eqn.primitive.bind(*low, **params).astype(wide)


def _rewrite(value: Any, dtype: np.dtype[Any]) -> Any:
    """The same rewriting inside the bodies of scan, while, cond and remat."""
    if isinstance(value, (tuple, list)):
        return type(value)(_rewrite(item, dtype) for item in value)
    if isinstance(value, ClosedJaxpr):
        return jax.make_jaxpr(lambda *args: _evaluate(value.jaxpr, value.consts, args, dtype))(
            *_types(value.jaxpr)
        )
    if isinstance(value, Jaxpr):
        return _rewrite(ClosedJaxpr(value, ()), dtype).jaxpr
    return value


def _types(jaxpr: Jaxpr) -> list[jax.ShapeDtypeStruct]:
    avals: list[Any] = [var.aval for var in jaxpr.invars]
    return [
        jax.ShapeDtypeStruct(
            aval.shape,
            aval.dtype,
            weak_type=getattr(aval, "weak_type", False),
            manual_axis_type=getattr(aval, "manual_axis_type", None),
        )
        for aval in avals
    ]
