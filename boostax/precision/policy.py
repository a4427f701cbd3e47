# SPDX-License-Identifier: Apache-2.0
"""Precision policies: in which dtype params are stored, the model computes, and results leave.

The levels are those of MindSpore's AMP; what each keeps in f32 is all that sets them apart.
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
"""Matches normalisation layers by the usual names: ``LayerNorm_0``, ``encoder/norm1``, ``bn2``."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtype in which each part of a training step works.

    Attributes:
      param_dtype: of the stored params, floating.
      compute_dtype: of the model's arithmetic.
      output_dtype: of what the wrapped function returns.
      keep_f32: patterns (``re.search``) of what computes in f32 all the same, matched against
        the path of a parameter (``encoder/LayerNorm_0/scale``) or the class name of a Flax module;
        or ``"all but matmuls"``: only matrix products and convolutions use ``compute_dtype``.

    Raises:
      ValueError, TypeError: a dtype that is not floating, a pattern that does not compile.

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
        if not isinstance(self.keep_f32, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
            allowed = "a tuple of patterns or 'all but matmuls'"
            raise TypeError(checks.message("Policy", "keep_f32", allowed, self.keep_f32, hint))
        for pattern in self.keep_f32:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                allowed, hint = "regular expressions", f"It does not compile: {error}."
                words = checks.message("Policy", "keep_f32", allowed, pattern, hint)
                raise ValueError(words) from error

    @property
    def only_matmuls(self) -> bool:
        """Whether everything but matrix products and convolutions stays in f32."""
        return self.keep_f32 == "all but matmuls"

    def keeps(self, name: str) -> bool:
        """Whether a parameter path or a class name is kept in f32."""
        return not self.only_matmuls and any(re.search(p, name) for p in self.keep_f32)

    def cast_params(self, params: PyTree) -> PyTree:
        """Cast params as the model computes with them: compute dtype, f32 for what is kept."""
        if self.only_matmuls:
            return _cast(params, jnp.dtype(jnp.float32))

        def cast(path: tuple[Any, ...], leaf: Any) -> Any:
            kept = trees.overwritten(path) or self.keeps(trees.path_name(path))
            return _cast(leaf, jnp.dtype(jnp.float32) if kept else self.compute_dtype)

        return jax.tree_util.tree_map_with_path(cast, params)

    def store_params(self, params: PyTree) -> PyTree:
        """Cast params as they are stored: ``param_dtype``; fp8 metadata of Flax stays unchanged."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x if trees.overwritten(path) else _cast(x, self.param_dtype), params
        )

    def cast_inputs(self, tree: PyTree) -> PyTree:
        """Cast floating inputs to the dtype that the model starts from."""
        return _cast(tree, jnp.dtype(jnp.float32) if self.only_matmuls else self.compute_dtype)

    def cast_output(self, tree: PyTree) -> PyTree:
        """Cast floating results to ``output_dtype``."""
        return _cast(tree, self.output_dtype)

    def compute(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn(params, *inputs, **others)`` with params and inputs cast, its result left as it is.

        The casts are inside, so gradients with respect to the params arrive in the params' own
        dtype. Keyword arguments (keys, model state, flags) pass untouched.
        """
        inner = autocast(fn, self.compute_dtype) if self.only_matmuls else fn

        @functools.wraps(fn)
        def wrapped(params: PyTree, *args: Any, **kwargs: Any) -> Any:
            return inner(self.cast_params(params), *self.cast_inputs(args), **kwargs)

        return wrapped

    def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of params and inputs that follows this policy.

        Under a kept norm JAX's promotion carries f32 on into the next layer; a Flax model says its
        dtype layer by layer: use ``boostax.precision.flax.apply_policy`` for it.

        Args:
          fn: ``fn(params, *inputs, **others)``; see ``compute``.

        Returns:
          A function of the same signature; floating results in ``output_dtype``.
        """
        inner = self.compute(fn)
        return functools.wraps(fn)(lambda *args, **kwargs: self.cast_output(inner(*args, **kwargs)))


def policy(spec: str, *, dtype: Any = jnp.float16) -> Policy:
    """Make a policy by level or by dtypes.

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
      dtype: the low dtype of the levels: ``float16`` or ``bfloat16``.

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
    if not isinstance(spec, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(checks.message(who, "spec", "a level or dtypes", spec, hint))
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
    """Return a policy by itself or by name; ``None`` for none."""
    if value is None or isinstance(value, Policy):
        return value
    if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = "Try boostax.policy('O2')."
        raise TypeError(checks.message(who, "policy", "a Policy or its name", value, hint))
    return policy(value)


def _cast(tree: PyTree, dtype: np.dtype[Any]) -> PyTree:
    """Cast real floating leaves; integers, keys and complex leaves stay unchanged."""

    def cast(x: Any) -> Any:
        is_real = jnp.issubdtype(jnp.result_type(x), jnp.floating) if _is_number(x) else False
        return jnp.asarray(x, dtype) if is_real else x

    return jax.tree.map(cast, tree)


def _is_number(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, float))
