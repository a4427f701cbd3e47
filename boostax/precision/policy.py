# SPDX-License-Identifier: Apache-2.0
"""Precision policies: the dtypes of stored params, of the model's arithmetic, and of its results.

The levels are those of MindSpore's AMP. They differ only in the parts that they keep in f32.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import checks, trees
from boostax.precision.autocast import autocast

PyTree = Any
_FIELDS = {"params": "param_dtype", "compute": "compute_dtype", "output": "output_dtype"}

NORMS = (r"(?i)norm", r"(^|/)(bn|ln|gn)_?\d*(/|$)")
"""Patterns of the usual names of norms: ``LayerNorm_0``, ``encoder/norm1``, ``bn2``."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a training step.

    Attributes:
      param_dtype: floating dtype of the stored params.
      compute_dtype: floating dtype of the model's arithmetic.
      output_dtype: floating dtype of the results of the wrapped function.
      keep_f32: patterns (``re.search``) of the parts that compute in f32 instead, matched against
        the path of a parameter (``encoder/LayerNorm_0/scale``) or the class name of a Flax module;
        or ``"all but matmuls"``: only matrix products and convolutions use ``compute_dtype``.

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
        for name in _FIELDS.values():
            value = checks.floating_dtype("Policy", name, getattr(self, name))
            object.__setattr__(self, name, value)
        if self.keep_f32 == "all but matmuls":
            return
        hint = "Write patterns as ('LayerNorm',)."
        allowed = "a tuple of patterns or 'all but matmuls'"
        fits = isinstance(self.keep_f32, tuple)  # pyright: ignore[reportUnnecessaryIsInstance]
        checks.require("Policy", "keep_f32", self.keep_f32, allowed, fits, hint, TypeError)
        for pattern in self.keep_f32:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                allowed, hint = "regular expressions", f"It does not compile: {error}."
                words = checks.message("Policy", "keep_f32", allowed, pattern, hint)
                raise ValueError(words) from error

    @property
    def only_matmuls(self) -> bool:
        """Return whether only matrix products and convolutions compute in ``compute_dtype``."""
        return self.keep_f32 == "all but matmuls"

    def keeps(self, name: str) -> bool:
        """Return whether a parameter path or a class name is kept in f32."""
        return not self.only_matmuls and any(re.search(p, name) for p in self.keep_f32)

    def cast_params(self, params: PyTree) -> PyTree:
        """Cast params to ``compute_dtype``, or to f32 where ``keep_f32`` matches their path."""
        if self.only_matmuls:
            return _cast(params, jnp.dtype(jnp.float32))

        def cast(path: tuple[Any, ...], leaf: Any) -> Any:
            kept = trees.overwritten(path) or self.keeps(trees.path_name(path))
            return _cast(leaf, jnp.dtype(jnp.float32) if kept else self.compute_dtype)

        return jax.tree_util.tree_map_with_path(cast, params)

    def store_params(self, params: PyTree) -> PyTree:
        """Cast params to ``param_dtype``; leave the fp8 metadata of Flax unchanged."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x if trees.overwritten(path) else _cast(x, self.param_dtype), params
        )

    def cast_inputs(self, tree: PyTree) -> PyTree:
        """Cast floating inputs to the dtype in which the model begins to compute."""
        return _cast(tree, jnp.dtype(jnp.float32) if self.only_matmuls else self.compute_dtype)

    def cast_output(self, tree: PyTree) -> PyTree:
        """Cast floating results to ``output_dtype``."""
        return _cast(tree, self.output_dtype)

    def compute(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn(params, *inputs, **others)`` with params and inputs cast before the call.

        The casts are part of the function, so gradients have the dtypes of the given params.
        Keyword arguments (keys, model state, flags) and the result stay unchanged.
        """
        inner = autocast(fn, self.compute_dtype) if self.only_matmuls else fn

        @functools.wraps(fn)
        def wrapped(params: PyTree, *args: Any, **kwargs: Any) -> Any:
            return inner(self.cast_params(params), *self.cast_inputs(args), **kwargs)

        return wrapped

    def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of params and inputs that follows this policy.

        The result of a norm that is kept in f32 is f32, and JAX's promotion then computes the next
        layer in f32 too. A Flax model has a dtype per layer: for it, use
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

    ===== =========================================== ==============================
    level computes in ``dtype``                       keeps in f32
    ===== =========================================== ==============================
    O0    nothing                                     everything
    O1    matrix products and convolutions            everything else
    O2    everything but normalisation layers         norms; params; the output
    O3    everything                                  nothing; params are stored low
    ===== =========================================== ==============================

    Args:
      spec: ``"O0"`` ... ``"O3"``, or ``"params=float32,compute=float16,output=float32"`` with any
        of the three (the others stay f32).
      dtype: the dtype that the levels call low: ``float16`` or ``bfloat16``.

    Returns:
      A ``Policy``.

    Raises:
      ValueError: an unknown level, part or dtype.

    Example:
      >>> import boostax
      >>> boostax.policy("O2", dtype="bfloat16").compute_dtype
      dtype(bfloat16)
      >>> boostax.policy("compute=float16").output_dtype
      dtype('float32')

    References:
      MindSpore 2.10 amp levels. There is one difference: MindSpore stores O3's params in f32.
    """
    who = "policy"
    hint = "Use 'O0' to 'O3', or 'params=float32,compute=float16,output=float32'."
    low = checks.floating_dtype(who, "dtype", dtype)
    named = isinstance(spec, str)  # pyright: ignore[reportUnnecessaryIsInstance]
    checks.require(who, "spec", spec, "a level or dtypes", named, hint, TypeError)
    f32: np.dtype[Any] = jnp.dtype(jnp.float32)
    levels = {
        "O0": Policy(),
        "O1": Policy(f32, low, f32, "all but matmuls"),
        "O2": Policy(f32, low, f32, NORMS),
        "O3": Policy(low, low, low),
    }
    if spec in levels:
        return levels[spec]
    fields: dict[str, Any] = {}
    for part in spec.split(","):
        name, separator, value = part.strip().partition("=")
        field = _FIELDS.get(name)
        if not separator or field is None or field in fields:
            raise ValueError(checks.message(who, "spec", "a level or dtypes", spec, hint))
        fields[field] = value
    return Policy(**fields)


def as_policy(who: str, value: Policy | str | None) -> Policy | None:
    """Return a user's policy, given as an object or by name; ``None`` for ``None``."""
    if value is None or isinstance(value, Policy):
        return value
    named = isinstance(value, str)  # pyright: ignore[reportUnnecessaryIsInstance]
    hint = "Try boostax.policy('O2')."
    checks.require(who, "policy", value, "a Policy or its name", named, hint, TypeError)
    return policy(value)


def _cast(tree: PyTree, dtype: np.dtype[Any]) -> PyTree:
    """Cast real floating leaves; integers, keys and complex leaves stay unchanged."""

    def cast(x: Any) -> Any:
        number = isinstance(x, (jax.Array, np.ndarray, np.generic, float))
        real = number and jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return jnp.asarray(x, dtype) if real else x

    return jax.tree.map(cast, tree)
