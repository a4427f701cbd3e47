# SPDX-License-Identifier: Apache-2.0
"""What a part of a chain says of itself: its name, its role, its axes, and what it holds inside.

To Optax a transformation is two functions. Their names and closures tell much of it, but not in
which field of the state an inner one keeps its own, nor over which axes it reduces, nor what it
does to a gradient. ``boostax.chain`` reads what is said here, and so ``explain``, the rules of
order, ``make_train_step`` and ``migrate_state`` know a part without a list of names.
"""

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
import optax

from boostax._core import checks, trees

PyTree = Any
# What a transformation returns: updates (or new params), and its state.
Stepped = tuple[Any, Any]
Update = TypeVar("Update", bound=Callable[..., Any])
# Before its name in the name stack of a trace, and so in profiles.
SCOPE = "boostax."

# What a part does to a gradient, as far as its place in a chain depends on it.
Gate = Literal["scaler", "window", "check"]
AroundOptimizer = Literal["carry", "freeze", "storage"]
# Of gradients; of the updates of each replica's own optimizer; of params that differ.
Reduction = Literal["mean", "adasum", "compressed", "delta", "own params"]
# Of gradients that are reduced.
Gradient = Literal["centralize", "norm clip", "clip", "decay", "noise"]
Optimizer = Literal["momentum", "moments", "sign", "rate", "schedule", "subspace"]
PassedThrough = Literal["recorder", "watch", "nothing"]
# The place of the last is not judged.
Role = Literal[Gate, AroundOptimizer, Reduction, Gradient, Optimizer, PassedThrough, "unknown"]
ROLES: tuple[str, ...] = get_args(Role)


class Holds(NamedTuple):
    """What a state holds, as far as a move to another chain depends on it.

    A state class has it as its ``holds``; one without keeps what Optax's optimizers keep: moments,
    each of which belongs to a param, and counts.

    Attributes:
      bound: those that mean something together alone, kept if all of them fit, or none; ``()`` if
        each stands for itself. ``None`` for moments and counts.
      opened: the count of micro-steps in an open window.
      sums: what is proportional to the gradients that the state sees, by the beginning of a path.
      scale: the loss scale, or the table of them.
      powers: of the table, the power of two at or below each is what is applied.
      basis: directions, which were an argument of the factory as scales are.
      params: whether its arrays are of params, not gradients.
    """

    bound: tuple[str, ...] | None = None
    opened: str = ""
    sums: tuple[str, ...] = ()
    scale: str = ""
    powers: bool = False
    basis: str = ""
    params: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
    """What ``describe`` keeps.

    Attributes:
      name: of the factory.
      what: the first line of the factory's docstring.
      role: see ``Role``.
      axes: mesh axes over which it reduces or agrees.
      inner: transformations inside, by the field of the state in which theirs lies.
      lossy: what it does not send is lost for good.
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
    """Mark an ``update`` (or a gate's ``step``) with what it is, in the trace as well.

    A decorator. ``explain``, the rules of order, ``make_train_step`` and ``migrate_state`` treat a
    transformation whose ``update`` is so described like one of boostax's own. Its calls stand under
    ``boostax.<name>`` in the name stack of a trace, so its collectives are counted as its own.

    Args:
      name: of the factory.
      role: what it does to a gradient, as far as its place in a chain depends on it: ``"scaler"``,
        ``"window"``, ``"check"``, ``"carry"``, ``"freeze"``, ``"storage"``, ``"mean"``,
        ``"adasum"``, ``"compressed"``, ``"delta"``, ``"own params"``, ``"centralize"``,
        ``"norm clip"``, ``"clip"``, ``"decay"``, ``"noise"``, ``"momentum"``, ``"moments"``,
        ``"sign"``, ``"rate"``, ``"schedule"``, ``"subspace"``, ``"recorder"``,
        ``"watch"``, ``"nothing"``; ``"unknown"`` is not judged.
      axes: mesh axes over which it reduces or agrees.
      inner: each transformation inside, by the field of the state in which its own state lies.
      what: in a few words; as a rule the first line of the factory's docstring.
      lossy: what it does not send is lost for good.

    Returns:
      The decorator. Cost: none; the compiled program is the same.

    Raises:
      ValueError: a role that there is not.

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
    checks.choice("describe", "role", role, ROLES, "'unknown' is counted and not judged.")

    def decorate(update: Update) -> Update:
        @functools.wraps(update)
        def scoped(*args: Any, **kwargs: Any) -> Any:
            # Whoever calls it may have Python's own numbers among the leaves.
            if {float, complex} & set(map(type, jax.tree.leaves(args))):
                args = jax.tree.map(_as_array, args)
            if trees.MODULE in sys.modules and args:
                args = trees.dense(args[0], name), *args[1:]
            with jax.named_scope(SCOPE + name):
                return update(*args, **kwargs)

        factory = getattr(inspect.unwrap(update), "__globals__", {}).get(name)
        found = Description(name, what or first_line(factory), role, axes, inner, lossy)
        scoped.description = found  # type: ignore[attr-defined]
        return cast(Update, scoped)

    return decorate


def closure(fn: Callable[..., Any]) -> dict[str, Any]:
    """What a function's closure holds, by name."""
    found: dict[str, Any] = {}
    code, cells = getattr(fn, "__code__", None), getattr(fn, "__closure__", None)
    for name, cell in zip(code.co_freevars, cells, strict=True) if code and cells else ():
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    return found


def first_line(thing: Any) -> str:
    """Of a docstring, without its period."""
    lines = (inspect.getdoc(thing) or "").strip().splitlines() if thing is not None else []
    return lines[0].rstrip(".") if lines else ""


def _as_array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, (float, complex)) else x


def variants_of(tx: optax.GradientTransformation) -> Any:
    """Return the variants of a transformation; ``None`` if a step of it is compiled once.

    A step is compiled once for each variant, a static choice of what it does. ``scheduled_freeze``
    has variants: a depth, the number of frozen groups, is a Python integer that ``update`` gets by
    the keyword ``depth``. The state has a method ``coming()``, the variant of the next call, an i32
    scalar. A train step asks the ``variants`` of an ``update``, a
    ``boostax.freeze.scheduled.Freezing``, and knows nothing else of freezing.
    """
    return getattr(tx.update, "variants", None)


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
