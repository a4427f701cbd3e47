# SPDX-License-Identifier: Apache-2.0
"""Argument checks: who refuses what, what is allowed, and what to do instead."""

import contextlib
import math
import operator
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

Choice = TypeVar("Choice", bound=str)


def message(who: str, argument: str, allowed: str, got: object, hint: str) -> str:
    """One sentence that names the argument, what is allowed, what came, and the mend."""
    return f"{who}: {argument} must be {allowed}, got {got!r}. {hint}"


@contextlib.contextmanager
def needing(who: str, package: str, extra: str) -> Generator[None]:
    """Let the import of a package that is not installed say which extra of boostax has it."""
    try:
        yield
    except ImportError as error:
        install = f"pip install '.[{extra}]' in a checkout of boostax"
        raise ImportError(f"{who} needs {package}, which is not installed: {install}") from error


def positive_int(who: str, argument: str, value: Any, hint: str) -> Any:
    """Python, NumPy and concrete JAX integers from 1 to the largest i32; a bool is a mistake.

    A traced value (``inject_hyperparams``) passes unseen.
    """
    if isinstance(value, Tracer):
        return value
    number = _at_least(1, who, argument, value, "a positive integer", hint)
    if number >= 2**31:
        raise ValueError(message(who, argument, "below 2**31", value, hint))
    return number


def natural(who: str, argument: str, value: Any, hint: str) -> int:
    """An integer that is not negative; a bool is a mistake."""
    return _at_least(0, who, argument, value, "an integer that is not negative", hint)


def _at_least(least: int, who: str, argument: str, value: Any, allowed: str, hint: str) -> int:
    flag = isinstance(value, (bool, np.bool_))
    number = least - 1 if flag else integer(who, argument, value, allowed, hint)
    if number < least:
        raise ValueError(message(who, argument, allowed, value, hint))
    return number


def integer(who: str, argument: str, value: Any, allowed: str, hint: str) -> int:
    """Any integer of Python's, NumPy's or a concrete one of JAX's."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(message(who, argument, allowed, value, hint)) from error


def require_scalar(who: str, argument: str, value: Any) -> None:
    """Refuse an array with dimensions: one element would broadcast, and change shapes after it."""
    if shape := getattr(value, "shape", ()):
        hint = f"{argument}.reshape(()) makes a scalar of one element."
        raise ValueError(message(who, argument, "shaped ()", shape, hint))


def number(
    who: str, argument: str, value: Any, allowed: str, test: Callable[[float], bool], hint: str
) -> Any:
    """A finite real scalar that passes ``test``; of a traced one only the shape is seen."""
    require_scalar(who, argument, value)
    if isinstance(value, Tracer):  # inject_hyperparams
        return value
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        real = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(message(who, argument, allowed, value, hint)) from error
    if not (math.isfinite(real) and test(real)):
        raise ValueError(message(who, argument, allowed, value, hint))
    return value


def choice(
    who: str, argument: str, value: Choice, allowed: tuple[Choice, ...], hint: str
) -> Choice:
    """One of a few words."""
    if value not in allowed:
        words = " or ".join(repr(word) for word in allowed) or "left out"
        raise ValueError(message(who, argument, words, value, hint))
    return value


def require(
    who: str,
    argument: str,
    value: object,
    allowed: str,
    holds: bool,
    hint: str,
    error: type[Exception] = ValueError,
) -> None:
    """Whatever holds for the value: for rules that no other check has."""
    if not holds:
        raise error(message(who, argument, allowed, value, hint))


def absent(who: str, argument: str, value: object, allowed: str, hint: str) -> None:
    """Nothing, where nothing could be meant by it."""
    if value is not None:
        raise ValueError(message(who, argument, allowed, value, hint))


def floating_dtype(who: str, argument: str, value: Any) -> np.dtype[Any]:
    """A real floating dtype by name or object."""
    hint = "Try 'float32', 'bfloat16' or 'float16'."
    try:
        dtype = jnp.dtype(value)
    except TypeError as error:
        raise ValueError(message(who, argument, "a floating dtype", value, hint)) from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(message(who, argument, "a floating dtype", value, hint))
    return dtype


def transformation(who: str, argument: str, value: Any) -> Any:
    """What has ``init`` and ``update``, Optax's own test, as one that takes extra arguments."""
    if not (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
        hint = "Pass an optimizer such as optax.adamw(1e-3)."
        raise TypeError(message(who, argument, "an optax.GradientTransformation", value, hint))
    return optax.with_extra_args_support(value)
