# SPDX-License-Identifier: Apache-2.0
"""Precision policies: the dtypes of stored params, of the model's arithmetic, and of its results.

The levels O0 to O3 are those of MindSpore's AMP, and differ in the parts that remain in f32.

Level O1 runs the matrix products and convolutions of any function in a lower precision. In the
trace of the function, every ``dot_general`` and ``conv_general_dilated`` casts its f32 operands to
the low dtype and its result back to f32. All other values have the same types as before, so the
bodies of loops, branches and ``shard_map`` are rewritten in place, not traced again.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import checks, interpret, jaxprs, trees
from boostax._core.types import PyTree

Level = Literal["O0", "O1", "O2", "O3"]
_FIELDS = {"params": "param_dtype", "compute": "compute_dtype", "output": "output_dtype"}
_F32 = np.dtype(np.float32)
_ARRAYS = (jax.Array, np.ndarray, np.generic)

NORMS = (r"(?i)norm", r"(^|/)(bn|ln|gn)_?\d*(/|$)")
"""Patterns of the usual names of norms: ``LayerNorm_0``, ``encoder/norm1``, ``bn2``."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a training step.

    Attributes:
      param_dtype: floating dtype of the stored params.
      compute_dtype: floating dtype of the model's arithmetic.
      output_dtype: floating dtype of the results of the wrapped function.
      keep_f32: patterns (``re.search``) of the parts that compute in f32, matched against the path
        of a param (``encoder/LayerNorm_0/scale``) or the class name of a Flax module; or ``"all but
        matmuls"``, with which only matrix products and convolutions use ``compute_dtype``.

    Raises:
      ValueError, TypeError: a dtype is not floating, or a pattern does not compile.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> half = boostax.precision.Policy(compute_dtype="float16")
      >>> half.wrap(lambda w, x: w * x)(jnp.float32(2.0), jnp.float32(3.0)).dtype
      dtype('float32')
    """

    param_dtype: Any = jnp.float32
    compute_dtype: Any = jnp.float32
    output_dtype: Any = jnp.float32
    keep_f32: tuple[str, ...] | Literal["all but matmuls"] = ()

    def __post_init__(self) -> None:
        for key in _FIELDS.values():
            object.__setattr__(self, key, checks.floating_dtype("Policy", key, getattr(self, key)))
        got = self.keep_f32
        is_valid = self.only_matmuls or isinstance(got, tuple)
        allowed = "a tuple of patterns or 'all but matmuls'"
        hint = "Write the patterns as a tuple, such as ('LayerNorm',)."
        checks.require_type(is_valid, "Policy", "keep_f32", got, allowed, hint)
        for pattern in () if self.only_matmuls else got:
            re.compile(pattern)

    @property
    def only_matmuls(self) -> bool:
        """Return whether only matrix products and convolutions compute in ``compute_dtype``."""
        return self.keep_f32 == "all but matmuls"

    def keeps(self, name: str) -> bool:
        """Return whether a part computes in f32; its ``name`` is a param's path or a class name."""
        return not self.only_matmuls and any(re.search(p, name) for p in self.keep_f32)

    def cast_params(self, params: PyTree) -> PyTree:
        """Cast params to ``compute_dtype``, or to f32 where ``keep_f32`` matches the path."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
        cast = list[PyTree]()
        for path, leaf in leaves:
            keeps_f32 = trees.overwritten(path) or self.keeps(trees.path_name(path))
            dtype = _F32 if keeps_f32 or self.only_matmuls else self.compute_dtype
            cast.append(_cast(leaf, dtype))
        return treedef.unflatten(cast)

    def store_params(self, params: PyTree) -> PyTree:
        """Cast params to ``param_dtype``, but not the fp8 metadata of Flax."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x if trees.overwritten(path) else _cast(x, self.param_dtype), params
        )

    def cast_inputs(self, tree: PyTree) -> PyTree:
        """Cast floating inputs to the dtype in which the model begins to compute."""
        return _cast(tree, _F32 if self.only_matmuls else self.compute_dtype)

    def cast_output(self, tree: PyTree) -> PyTree:
        """Cast floating results to ``output_dtype``."""
        return _cast(tree, self.output_dtype)

    def compute(self, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Return ``fn(params, *inputs, **others)`` with params and inputs cast before the call.

        The casts are part of the function, so gradients have the dtypes of the original params.
        Keyword arguments (keys, model state, flags) and the result are unchanged.
        """
        inner = autocast(fn, self.compute_dtype) if self.only_matmuls else fn
        return functools.wraps(fn)(
            lambda p, /, *xs, **others: inner(self.cast_params(p), *self.cast_inputs(xs), **others)
        )

    def wrap(self, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Return a function of params and inputs that follows this policy.

        A norm that computes in f32 returns f32. By JAX's promotion, the next layer then also
        computes in f32. For a Flax model, whose layers have dtypes, use
        ``boostax.precision.flax.apply_policy``.

        Args:
          fn: ``fn(params, *inputs, **others)``; see ``compute``.

        Returns:
          A function of the same signature, with floating results in ``output_dtype``.
        """
        inner = self.compute(fn)
        return functools.wraps(fn)(lambda *args, **kwargs: self.cast_output(inner(*args, **kwargs)))


def policy(spec: str, *, dtype: jax.typing.DTypeLike = jnp.float16) -> Policy:
    """Make a policy from a level or from dtypes.

    - ``O0``: everything computes in f32.
    - ``O1``: matrix products and convolutions compute in ``dtype``, and everything else in f32.
    - ``O2``: everything computes in ``dtype``, except normalisation layers. The stored params and
      the output are f32.
    - ``O3``: everything computes in ``dtype``, and the params are stored in ``dtype``.

    Args:
      spec: ``"O0"`` ... ``"O3"``, or ``"params=float32,compute=float16,output=float32"`` with any
        of the three parts; a part that is left out is f32.
      dtype: the low dtype of the levels, ``float16`` or ``bfloat16``.

    Returns:
      A ``Policy``.

    Raises:
      ValueError: an unknown level, dtype or part of ``spec``.

    Example:
      >>> import boostax
      >>> boostax.policy("O2", dtype="bfloat16").compute_dtype
      dtype(bfloat16)
      >>> boostax.policy("compute=float16").output_dtype
      dtype('float32')

    References:
      MindSpore 2.10, levels of ``amp``, except that MindSpore stores the params of O3 in f32.
    """
    hint = "Use 'O0' to 'O3', or 'params=float32,compute=float16,output=float32'."
    low = checks.floating_dtype("policy", "dtype", dtype)
    levels: dict[str, Policy] = {
        "O0": Policy(),
        "O1": Policy(_F32, low, _F32, "all but matmuls"),
        "O2": Policy(_F32, low, _F32, NORMS),
        "O3": Policy(low, low, low),
    }
    if str(spec) in levels:
        return levels[str(spec)]
    fields: dict[str, Any] = {}
    for part in str(spec).split(","):
        name, separator, value = part.strip().partition("=")
        field = _FIELDS.get(name)
        if not separator or field is None or field in fields:
            raise ValueError(checks.message("policy", "spec", "a level or dtypes", spec, hint))
        fields[field] = value
    return Policy(**fields)


def as_policy(value: Policy | Level | None) -> Policy | None:
    """Return the policy that a user passed as an object or by name; ``None`` for ``None``."""
    return value if value is None or isinstance(value, Policy) else policy(value)


def _cast(tree: PyTree, dtype: jnp.dtype) -> PyTree:
    """Cast real floating leaves, but not integers, keys or complex leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    for i, x in enumerate(leaves):
        if isinstance(x, (*_ARRAYS, float)) and jnp.issubdtype(jnp.result_type(x), jnp.floating):
            leaves[i] = jnp.asarray(x, dtype)
    return treedef.unflatten(leaves)


def autocast(fn: Callable[..., PyTree], dtype: jnp.dtype) -> Callable[..., PyTree]:
    """Return ``fn`` with its f32 matrix products and convolutions computed in ``dtype``.

    The derivative of a rewritten product is also computed in ``dtype``. Arguments that are neither
    arrays nor numbers are passed to ``fn`` unchanged.
    """

    def wrapped(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        arrays = {i: jnp.asarray(x) for i, x in enumerate(leaves) if isinstance(x, _ARRAYS)}

        def on_arrays(arrays: dict[int, jax.Array]) -> PyTree:
            args, kwargs = treedef.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
            return fn(*args, **kwargs)

        replay = trees.Replay(*jax.make_jaxpr(on_arrays, return_shape=True)(arrays))
        lowered = interpret.rewrite(replay.program, functools.partial(_lowered, dtype=dtype))
        return replay._replace(program=lowered)(arrays)

    return wrapped


def _lowered(eqn: Any, dtype: jnp.dtype) -> list[jaxprs.JaxprEqn] | None:
    """Return the equations that replace ``eqn``, or ``None`` if only its bodies are rewritten."""
    if eqn.primitive not in (lax.dot_general_p, lax.conv_general_dilated_p):
        # A call with a custom derivative rule is not rewritten, because its body would no longer
        # match the rule.
        return [eqn] if eqn.primitive.name in (*interpret.CUSTOM, "pallas_call") else None
    atoms = (*eqn.invars, *eqn.outvars)
    if any(x.aval.dtype != jnp.float32 for x in atoms):
        return [eqn]
    new_var = jaxprs.gensym()
    low: list[Any] = [new_var(x.aval.update(dtype=dtype, weak_type=False)) for x in atoms]
    params = {**eqn.params, "preferred_element_type": None}
    # The casts are made from ``eqn``, so that errors and profiles show the source line of the
    # product.
    cast = eqn.replace(primitive=lax.convert_element_type_p, effects=jaxprs.no_effects)
    options = {"weak_type": False, "sharding": None}
    *casts, widening = [
        cast.replace(invars=[x], outvars=[y], params={"new_dtype": y.aval.dtype, **options})
        for x, y in [*zip(eqn.invars, low, strict=False), (low[-1], eqn.outvars[0])]
    ]
    return [*casts, eqn.replace(invars=low[:-1], outvars=low[-1:], params=params), widening]
