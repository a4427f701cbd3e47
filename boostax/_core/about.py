"""What a transformation says of itself: its name, its axes, and what it holds inside.

To Optax a transformation is two functions. Their names and closures tell much of it, but not in
which field of the state an inner one keeps its own, nor over which axes it reduces.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import optax

Update = TypeVar("Update", bound=Callable[..., Any])
# Before its name in the name stack of a trace, and so in profiles.
SCOPE = "boostax."


@dataclasses.dataclass(frozen=True, eq=False)
class About:
    """What ``described`` keeps.

    Attributes:
      who: the factory.
      axes: mesh axes over which it reduces or agrees.
      inner: transformations inside, by the field of the state in which theirs lies.
    """

    who: str
    axes: tuple[str, ...]
    inner: Mapping[str, optax.GradientTransformation]


def described(
    who: str, axes: tuple[str, ...] = (), **inner: optax.GradientTransformation
) -> Callable[[Update], Update]:
    """Mark an ``update`` (or a gate's ``step``) with what it is, in the trace as well.

    It is given arrays where its caller has Python's own numbers.
    """

    def decorate(update: Update) -> Update:
        @functools.wraps(update)
        def scoped(*args: Any, **kwargs: Any) -> Any:
            args = jax.tree.map(_as_array, args)
            with jax.named_scope(SCOPE + who):
                return update(*args, **kwargs)

        scoped.about = About(who, axes, inner)  # type: ignore[attr-defined]
        return cast(Update, scoped)

    return decorate


def _as_array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, (float, complex)) else x
