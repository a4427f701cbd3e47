# SPDX-License-Identifier: Apache-2.0
"""Argument checks: each error names the argument, the allowed values, the given value and a fix."""

import contextlib
import difflib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeVar, get_args

import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

Choice = TypeVar("Choice", bound=str)
Factory = TypeVar("Factory", bound=Callable[..., object])
_NATURAL = "an integer that is not negative"
_SHOWN = {"inner": "optax.adamw(1e-3)", "tx": "optax.adamw(1e-3)", "every": "every=4"}
_AROUND = " Pass the optimizer as an argument, not as the next part of optax.chain."
_ROWS = " Pass all rows as one tree, such as (x, y). Pass other values by keyword."
# ``_NOTES`` has more hints for errors about an argument. ``_CALLS`` has, for a class, the call that
# a user writes: errors show the call instead of the class.
_NOTES = {"inner": _AROUND, "batch": _ROWS, "active": " Without a loss scaler, opt_state is ()."}
_CALLS = {"TrainStep": "step", "TrainStep.init": "step.init", "Oracle": "value_and_grad(loss_fn)"}


def message(who: str, argument: str, allowed: str, got: object, hint: str) -> str:
    """Return a sentence that names the argument, the allowed values, the given value and a fix.

    ``got`` is shown by ``repr``. A string of several words is a description, and is shown without
    quotes.
    """
    shown = got if isinstance(got, str) and " " in got else repr(got)
    return f"{who}: {argument} must be {allowed}, got {shown}. {hint}"


@contextlib.contextmanager
def needing(who: str, package: str, extra: str) -> Generator[None]:
    """Name, in the error for a missing package, the extra of boostax that installs the package."""
    try:
        yield
    except ImportError as error:
        install = f"pip install '.[{extra}]' in a checkout of boostax"
        raise ImportError(f"{who} needs {package}, which is not installed: {install}") from error


def positive_int(who: str, argument: str, value: object, hint: str) -> Any:
    """Require an integer of Python, NumPy or JAX from 1 to the largest i32; refuse a bool."""
    # Inside ``optax.inject_hyperparams``, the value is traced and cannot be compared.
    if isinstance(value, Tracer):
        return value
    number = natural(who, argument, value, hint, "a positive integer", least=1)
    require(number < 2**31, who, argument, value, "below 2**31", hint)
    return number


def natural(
    who: str, argument: str, value: object, hint: str, allowed: str = _NATURAL, least: int = 0
) -> int:
    """Require an integer of at least ``least``; refuse a bool."""
    number = integer(who, argument, value, allowed, hint)
    require(number >= least, who, argument, value, allowed, hint)
    return number


def integer(who: str, argument: str, value: object, allowed: str, hint: str) -> int:
    """Require an integer of Python, NumPy or JAX; refuse a bool."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(message(who, argument, allowed, value, hint)) from error


def require_scalar(who: str, argument: str, value: object) -> None:
    """Refuse an array with dimensions, because an array of one element would broadcast."""
    shape = getattr(value, "shape", ())
    hint = f"Pass {argument}.reshape(()) for one element, or {argument}.sum() for several elements."
    require(not shape, who, argument, shape, "shaped ()", hint)


def number(
    who: str,
    argument: str,
    value: Any,
    allowed: str,
    hint: str,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> Any:
    """Require a finite real scalar within the limits; for tracers, only the shape is checked.

    The value may equal ``least`` and ``most``, but not ``above`` or ``below``.
    """
    require_scalar(who, argument, value)
    # Inside ``optax.inject_hyperparams``, the value is traced and cannot be compared.
    if isinstance(value, Tracer):
        return value
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        real = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(message(who, argument, allowed, value, hint)) from error
    is_valid = math.isfinite(real) and above < real < below and least <= real <= most
    require(is_valid, who, argument, value, allowed, hint)
    return value


def choice(who: str, argument: str, value: Choice, allowed: Any, hint: str) -> Choice:
    """Require one of the values of a ``Literal``, or of a tuple."""
    allowed = get_args(allowed) or allowed
    words = " or ".join(repr(word) for word in allowed) or "left out"
    require(value in allowed, who, argument, value, words, hint)
    return value


def require(
    valid: bool,
    who: str,
    argument: str,
    got: object,
    allowed: str,
    hint: str | Callable[[], str],
    error: type[Exception] = ValueError,
) -> None:
    """Raise unless ``valid``, for rules that no other check covers; see ``message``.

    If ``got`` or ``hint`` is a lambda of boostax, the lambda is called only for an error, because
    the names of many leaves are slow to build. Any other function is not called, but shown in the
    message.
    """
    if not valid:
        texts: list[Any] = [got, hint]
        for i, x in enumerate(texts):
            is_ours = inspect.isfunction(x) and x.__module__.startswith("boostax.")
            texts[i] = x() if is_ours and x.__name__ == "<lambda>" else x
        raise error(message(who, argument, allowed, *texts))


# Like ``require``, but the error is a ``TypeError``.
require_type = functools.partial(require, error=TypeError)


def nearest(word: object, words: Iterable[str]) -> str:
    """Return a hint with the word of ``words`` that is closest to ``word``."""
    matches = difflib.get_close_matches(str(word), list(words), 1, 0.5)
    return f"Did you mean {matches[0]!r}?" if matches else "No allowed name is similar."


def absent(who: str, argument: str, value: object, allowed: str, hint: str) -> None:
    """Require ``None`` for an argument that would have no effect."""
    require(value is None, who, argument, value, allowed, hint)


def floating_dtype(who: str, argument: str, value: Any) -> np.dtype[np.floating]:
    """Require a real floating dtype, or its name."""
    is_valid = False
    with contextlib.suppress(TypeError):
        is_valid = jnp.issubdtype(jnp.dtype(value), jnp.floating)
    hint = "Use 'float32', 'bfloat16' or 'float16'."
    require(is_valid, who, argument, value, "a floating dtype", hint)
    return jnp.dtype(value)


@functools.cache
def table(package: str, name: str) -> Mapping[str, Any]:
    """Read the table in the file ``name.toml`` of a package."""
    import tomllib
    from importlib.resources import files

    return tomllib.loads(files(package).joinpath(f"{name}.toml").read_text("utf8"))


def replacement(name: str) -> str | None:
    """Return the sentence in ``names.toml`` about a name, or about an argument ``"f(argument=)"``.

    The file lists names that were removed or moved, or that exist in another package. An entry
    ``"f(axis_name)"`` is for a function whose ``axis_name`` was positional.
    """
    return table("boostax", "names").get(name)


def bind(factory: Callable[..., object], args: Any, kwargs: Any) -> inspect.BoundArguments:
    """Bind the arguments of a call; an error shows a correct call."""
    signature = inspect.signature(factory)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        name = factory.__qualname__.removesuffix(".__call__").removesuffix(".__init__")
        who = _CALLS.get(name, name.rpartition(".")[2])
        known = [x for x in signature.parameters.values() if x.name != "self"]
        required = [x.name for x in known if x.default is x.empty and "VAR" not in x.kind.name]
        shown = ", ".join(_SHOWN.get(x, x) for x in required)
        names = [x.name for x in known]
        notes = "".join(note for name, note in _NOTES.items() if name in names)
        old = [f"{who}({name}=)" for name in kwargs if name not in names]
        old += [f"{who}(axis_name)"] * any(isinstance(x, (str, tuple)) for x in args[1:])
        hint = next(filter(None, map(replacement, old)), f"The call is {who}({shown}).{notes}")
        got = f"a wrong call: {error}"
        raise TypeError(message(who, "arguments", ", ".join(names), got, hint)) from None


def arguments(factory: Factory) -> Factory:
    """Make a function show a correct call in the error for wrong arguments."""

    @functools.wraps(factory)
    def checked(*args: object, **kwargs: object) -> object:
        try:
            return factory(*args, **kwargs)
        except TypeError:
            bind(factory, args, kwargs)
            raise

    return checked  # type: ignore[return-value]


def transformation(who: str, argument: str, value: Any) -> Any:
    """Require ``init`` and ``update``, as Optax does; make ``update`` accept extra arguments."""
    if not (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
        hint = "Pass an optimizer such as optax.adamw(1e-3)." + _AROUND * (argument == "inner")
        raise TypeError(message(who, argument, "an optax.GradientTransformation", value, hint))
    return optax.with_extra_args_support(value)
