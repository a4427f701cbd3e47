# SPDX-License-Identifier: Apache-2.0
"""Descriptions of the parts of a chain: name, role, axes, parts inside, and extra arguments.

In Optax, a transformation is two functions. The functions do not show which field of a state
belongs to an inner transformation, over which axes a part reduces, or how a part changes a
gradient. ``boostax.order`` reads descriptions for ``explain``, the rules of order,
``make_train_step`` and ``migrate_state``.

Extra arguments of ``update`` are passed inwards. ``value`` is the unscaled loss, averaged over the
replicas. ``value_fn`` and ``obj_fn`` are the loss as a function of the params. A part that trains
only some params, or coordinates, passes inwards a function of those params or coordinates. ``grad``
is the gradient of the loss, averaged over the replicas, with the same scale and projection as the
gradients in the first argument. So a part that multiplies, masks or projects the gradients must do
the same to ``grad``. A window over several calls passes on the window's mean of ``value``, and does
not pass on ``value_fn``, ``obj_fn`` or ``grad``. ``carried`` contains the new values of the leaves
of ``carry``, by path.
"""

import contextlib
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import optax

from boostax._core import bcoo, checks
from boostax._core.types import PyTree

# The result of a transformation: updates or new params, and the new state.
Stepped = tuple[PyTree, PyTree]
Update = TypeVar("Update", bound=Callable[..., PyTree])

# A role is the effect of a part on a gradient, and decides the position of the part in a chain.
Gate = Literal["scaler", "window", "check", "comparison"]
AroundOptimizer = Literal["carry", "freeze", "storage"]
# The first three roles reduce gradients; the last two reduce each replica's updates or params.
Reduction = Literal["mean", "adasum", "compressed", "delta", "own params"]
# Roles of parts that change reduced gradients.
Gradient = Literal["centralize", "norm clip", "clip", "decay", "noise"]
Optimizer = Literal["momentum", "moments", "sign", "rate", "schedule", "subspace"]
PassedThrough = Literal["recorder", "watch", "nothing"]
# The position of an unknown part is not checked.
Role = Literal[Gate, AroundOptimizer, Reduction, Gradient, Optimizer, PassedThrough, "unknown"]


class Holds(NamedTuple):
    """The meaning of a state's fields for ``migrate_state``.

    A state class has this object as its attribute ``holds``. In a class without ``holds``, as in
    Optax's optimizers, arrays of a param's shape are moments, and integers are counts.

    Attributes:
      bound: fields that have a meaning only together, so ``migrate_state`` keeps all or none of
        these fields; ``()`` if each field has a meaning by itself, ``None`` for moments and counts.
      opened: the field that counts the micro-steps in an open window.
      steps: the field with the number of steps that a schedule reads.
      scale: the field of the loss scale, or of the table of loss scales.
      basis: the field of directions, which are an argument of the factory.
      params: whether the arrays belong to params, and do not depend on the scale of gradients.
    """

    bound: tuple[str, ...] | None = None
    opened: str = ""
    steps: str = ""
    scale: str = ""
    basis: str = ""
    params: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
    """The description of a part, which ``describe`` attaches to its ``update``.

    Attributes:
      name: the factory's name.
      what: the first line of the factory's docstring.
      role: see ``Role``.
      axes: mesh axes over which the part reduces or agrees.
      inner: the inner transformations; the key of each is the name of the field with its state.
      lossy: whether values that the part does not send are lost permanently.
    """

    name: str
    what: str
    role: Role
    axes: tuple[str, ...]
    inner: Mapping[str, optax.GradientTransformation]
    lossy: bool


def describe(
    name: str,
    role: Role = "unknown",
    axes: tuple[str, ...] = (),
    *,
    inner: Mapping[str, optax.GradientTransformation] = types.MappingProxyType({}),
    what: str = "",
    lossy: bool = False,
) -> Callable[[Update], Update]:
    """Describe a part by decorating its ``update``, or the ``step`` of a gate.

    ``explain``, the rules of order, ``make_train_step`` and ``migrate_state`` then treat the
    transformation like a part of boostax. The calls of ``update`` have ``boostax.<name>`` in the
    name stack of a trace, so ``audit`` counts the collectives of the part separately.

    Args:
      name: the factory's name.
      role: the effect of the part on a gradient, which decides its position in a chain:
        ``"scaler"``, ``"window"``, ``"check"``, ``"comparison"`` (of replicas), ``"carry"``,
        ``"freeze"``, ``"storage"``, ``"mean"``, ``"adasum"``, ``"compressed"``, ``"delta"``,
        ``"own params"``, ``"centralize"``, ``"norm clip"``, ``"clip"``, ``"decay"``, ``"noise"``,
        ``"momentum"``, ``"moments"``, ``"sign"``, ``"rate"``, ``"schedule"``, ``"subspace"``,
        ``"recorder"``, ``"watch"``, ``"nothing"``; ``"unknown"`` is not checked.
      axes: mesh axes over which the part reduces or agrees.
      inner: the inner transformations; the key of each is the name of the field with its state.
      what: a summary; by default the first line of the factory's docstring.
      lossy: whether values that the part does not send are lost permanently.

    Returns:
      The decorator. Cost: none; the compiled program is the same.

    Raises:
      ValueError: ``role`` is not one of these words.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> def halve():
      ...   @boostax.describe("halve", "rate")
      ...   def update(updates, state, params=None):
      ...     return optax.tree.scale(0.5, updates), state
      ...   return optax.GradientTransformation(lambda params: (), update)
      >>> tx = optax.chain(halve(), boostax.dynamic_loss_scale(optax.adam(1e-3)))
      >>> boostax.explain(tx, jnp.zeros(2)).parts[0].role
      'rate'
    """
    checks.choice("describe", "role", role, Role, "The position of an unknown part is not checked.")

    def decorate(update: Update) -> Update:
        @functools.wraps(update)
        def scoped(*args: PyTree, **kwargs: PyTree) -> PyTree:
            # Arguments may have Python numbers as leaves; these numbers become arrays.
            args = jax.tree.map(
                lambda x: jnp.asarray(x) if type(x) in (float, complex) else x, args
            )
            if bcoo.MODULE in sys.modules and args:
                args = bcoo.dense(args[0], name), *args[1:]
            # The trace adds this name to its operations, so profiles show the name.
            with jax.named_scope(f"boostax.{name}"):
                return update(*args, **kwargs)

        factory = getattr(inspect.unwrap(update), "__globals__", {}).get(name)
        description = Description(name, what or first_line(factory), role, axes, inner, lossy)
        scoped.description = description  # type: ignore[attr-defined]
        return cast(Update, scoped)

    return decorate


def closure(fn: Callable[..., object]) -> dict[str, Any]:
    """Return the variables in the closure of a function, by name."""
    variables: dict[str, Any] = {}
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # A variable may not be assigned yet.
            variables[name] = cell.cell_contents
    return variables


def first_line(thing: object) -> str:
    """Return the first line of a docstring, without its period."""
    lines = (inspect.getdoc(thing) or "").strip().splitlines() if thing is not None else []
    return lines[0].rstrip(".") if lines else ""


def variants_of(tx: optax.GradientTransformation) -> Any:
    """Return the variants of a transformation; ``None`` if its step is compiled only once.

    A step is compiled once for each variant. The variants of ``scheduled_freeze`` are the numbers
    of frozen groups. The ``update`` of ``scheduled_freeze`` gets this number as a Python integer by
    the keyword ``depth``. The method ``next_variant()`` of the state returns the variant of the
    next call, an i32 scalar. A gate of the role ``"watch"``, such as ``average_params``, has the
    variants of the transformation inside.
    """
    description = getattr(tx.update, "description", None)
    if hasattr(tx.update, "step") and description and description.role == "watch":
        return variants_of(description.inner["inner_state"])
    return getattr(tx.update, "variants", None)


def elsewhere(extra: Mapping[str, PyTree], place: Callable[[PyTree], PyTree]) -> dict[str, PyTree]:
    """Return extra arguments whose functions of params first convert the params by ``place``."""
    functions = {x: extra[x] for x in ("value_fn", "obj_fn") if extra.get(x) is not None}
    moved = {x: functools.partial(lambda f, y: f(place(y)), fn) for x, fn in functions.items()}
    return {**extra, **moved}


def asked(tx: optax.GradientTransformation) -> dict[str, bool]:
    """Return the named arguments of ``update`` and of its parts, with True for required arguments.

    The names are read from signatures and closures. Arguments with other names are not passed to
    ``update``. If ``update`` requires such an argument, Optax raises.
    """
    required: dict[str, bool] = {}
    seen: set[int] = set()
    stack: list[PyTree] = [tx.update]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, (list, tuple, dict)):
            stack.extend(node.values() if isinstance(node, dict) else node)
        elif inspect.isfunction(node):
            for name, parameter in inspect.signature(node, follow_wrapped=False).parameters.items():
                required[name] = required.get(name, False) or parameter.default is parameter.empty
            stack.extend(closure(node).values())
        elif isinstance(node, optax.MultiSteps) or (callable(node) and not inspect.isclass(node)):
            # ``node`` is, for example, a gate, a bound method, a partial or a jitted function.
            stack.extend(getattr(node, "__dict__", {}).values())
            stack.extend(getattr(node, name, None) for name in ("__self__", "__func__", "func"))
    return required
