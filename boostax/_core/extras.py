# SPDX-License-Identifier: Apache-2.0
"""Extra arguments of ``update``: how they travel inwards, and which of them an optimizer asks for.

``value`` is the loss: unscaled, the mean over replicas. ``value_fn`` and ``obj_fn`` are the same
loss as a function of the params, and become one of what stands for the params inside: of those that
train, of coordinates. ``grad`` is its gradient, the mean over replicas, in the units of the
gradients beside it: what multiplies, masks or projects those does so with it. A window that spans
several calls has none of the last three.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optax

from boostax._core.describe import closure

PyTree = Any
OF_PARAMS = ("value_fn", "obj_fn")


def elsewhere(
    extra: Mapping[str, Any],
    place: Callable[[PyTree], PyTree],
    result: Callable[[Any], Any] = lambda value: value,
) -> dict[str, Any]:
    """The same for other params, of which ``place`` makes those that the functions know."""

    def moved(fn: Callable[[PyTree], Any]) -> Callable[[PyTree], Any]:
        return lambda trial: result(fn(place(trial)))

    there = {name: moved(extra[name]) for name in OF_PARAMS if extra.get(name) is not None}
    return {**extra, **there}


def asked(tx: optax.GradientTransformation) -> dict[str, bool]:
    """The arguments that ``update`` has by name, its parts' included, and which it must be given.

    Read from signatures and closures. What these do not show is missing, and Optax says so when it
    is called without.
    """
    found: dict[str, bool] = {}
    seen: set[int] = set()
    stack: list[Any] = [tx.update]
    while stack:
        thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, (list, tuple)):
            stack.extend(thing)
        elif isinstance(thing, dict):
            stack.extend(thing.values())
        elif isinstance(thing, functools.partial):
            stack.append(thing.func)
        elif inspect.isfunction(thing):
            signature = inspect.signature(thing, follow_wrapped=False)
            for name, parameter in signature.parameters.items():
                required = parameter.default is inspect.Parameter.empty
                found[name] = found.get(name, False) or required
            stack.extend(closure(thing).values())
        elif not inspect.isclass(thing) and (
            callable(thing) or isinstance(thing, optax.MultiSteps)
        ):
            # A gate, a bound method, a jitted function.
            stack.extend(getattr(thing, "__dict__", {}).values())
            stack.extend(getattr(thing, name, None) for name in ("__self__", "__func__"))
    return found
