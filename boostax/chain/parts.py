# SPDX-License-Identifier: Apache-2.0
"""Read the parts of a transformation, in the order in which a gradient passes them.

A described transformation (``boostax.describe``) names its own parts. Optax's combinators are read
from the closures of their functions, by the name of the factory that made them. The parts inside
any other transformation are unknown.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from boostax._core.describe import Description, closure, first_line
from boostax._core.replicas import PerReplica

PyTree = Any
# The path from the state of a wrapper to that of a part in it: indices, keys and names of fields.
Route = tuple[Any, ...]

# Optax's wrappers of one transformation, with the path to its state in theirs.
_INNER = "masked apply_if_finite conditionally_transform conditionally_mask inject_hyperparams"
_WRAPPERS: dict[str, Route] = {
    **dict.fromkeys(_INNER.split(), ("inner_state",)),
    "MultiSteps": ("inner_opt_state",),
    "lookahead": ("fast_state",),
    **dict.fromkeys(("schedule_free", "mechanize"), ("base_optimizer_state",)),
    "sam": ("opt_state",),
    "flatten": (),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A transformation, and the parts in it.

    Attributes:
      name: the name of the factory that made it.
      package: the package of the factory, if the transformation is not described.
      what: the first line of the factory's docstring.
      description: its own description, if there is one.
      settings: the values in the closure of its ``update``.
      inner: the parts inside, each with the route to its state, or ``None`` if that is unknown.
      apart: whether the parts inside work side by side, and not each on the result of the one
        before.
    """

    name: str
    package: str
    what: str
    description: Description | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inner: tuple[tuple[Route | None, "Part"], ...] = ()
    apart: bool = False


# Optax has changed this combinator's closure: there is a part inside, but it is unknown.
_HIDDEN = Part("(hidden)", "", "This version of Optax does not show it")


def read(tx: optax.GradientTransformation) -> Part:
    """Return a transformation as a tree of parts."""
    return _part(tx.update)


def opened(tx: optax.GradientTransformation) -> list[optax.GradientTransformation]:
    """Return the transformations in an ``optax.chain`` and in chains inside it; or only ``tx``."""
    inits, updates = closure(tx.init).get("init_fns"), closure(tx.update).get("update_fns")
    if inits is None or updates is None:
        return [tx]
    pairs = zip(inits, updates, strict=True)
    return [x for pair in pairs for x in opened(optax.GradientTransformationExtraArgs(*pair))]


def _part(update: Callable[..., Any]) -> Part:
    own: Description | None = getattr(update, "description", None)
    if own is not None:
        inner = tuple(((field,), read(tx)) for field, tx in own.inner.items())
        values = closure(inspect.unwrap(getattr(update, "step", update)))
        return Part(own.name, "", own.what, own, settings=values, inner=inner)
    if isinstance(update, functools.partial):
        return _part(update.func)
    if isinstance(update, jax.stages.Wrapped):  # by jax.jit
        return _part(inspect.unwrap(update))
    owner = getattr(update, "__self__", None)
    values = closure(update) if owner is None else dict(getattr(owner, "__dict__", {}))
    kind = owner if isinstance(owner, type) else type(owner)
    name = _factory(update) if owner is None else kind.__name__
    if name == "with_extra_args_support" and "tx" in values:
        return read(values["tx"])
    space = getattr(update, "__globals__", {})
    # functools.wraps copies the name and module of another function, but the globals stay the
    # function's own.
    module = space.get("__name__", getattr(update, "__module__", ""))
    package = str(module).partition(".")[0]
    made = space.get(name) if owner is None else kind
    held = _held(name, values) if package == "optax" else ()
    # The second optimizer of sam also takes gradients, and its updates are subtracted.
    apart = package == "optax" and name in ("partition", "sam")
    return Part(name, package, first_line(made), settings=values, inner=held, apart=apart)


def _held(name: str, values: Mapping[str, Any]) -> tuple[tuple[Route | None, Part], ...]:
    """Return the parts inside one of Optax's, each with the route to its state."""
    try:
        if name == "chain":
            return tuple(((i,), _part(fn)) for i, fn in enumerate(values["update_fns"]))
        if name == "named_chain":
            return tuple(((label,), read(tx)) for label, tx in values["transforms"])
        if name == "partition":
            found = values["transforms"].items()
            return tuple((("inner_states", key, "inner_state"), read(tx)) for key, tx in found)
    except KeyError:  # This version of Optax uses another name for it.
        return ((None, _HIDDEN),)
    route = _WRAPPERS.get(name)
    if name == "inject_hyperparams":
        values = {"made": _injected(values)}
    held = {x: tx for x, tx in values.items() if isinstance(tx, optax.GradientTransformation)}
    routes = {x: ("adv_state",) if x == "adv_optimizer" else route for x in held}
    inner = tuple((routes[x], read(tx)) for x, tx in held.items())
    return inner if inner or name not in _WRAPPERS else ((None, _HIDDEN),)


def _injected(values: Mapping[str, Any]) -> Any:
    """Make a transformation in the way ``optax.inject_hyperparams`` does at every call.

    Optax takes the numbers from the state; here each is its default, or 1.
    """
    given = {**values.get("other_hps", {}), **values.get("sched_hps", {})}
    try:
        scheduled = {name: fn(fn.init()) for name, fn in values["sched_hps"].items()}
        parameters = inspect.signature(values["inner_factory"]).parameters.values()
        missing = [x for x in parameters if x.name not in given]
        numbers = {x.name: 1 if x.default is x.empty else x.default for x in missing}
        return values["inner_factory"](**values["other_hps"], **numbers, **scheduled)
    except Exception:  # Any factory may fail here; the part is then unknown.
        return None


def follow(state: PyTree, route: Route | None) -> PyTree:
    """Return the state of a part within that of its wrapper; ``None`` if it is not found."""
    if route is None:
        return None
    for step in route:
        if isinstance(state, PerReplica):
            state = state.local
        try:
            state = getattr(state, step) if hasattr(state, "_fields") else state[step]
        except (AttributeError, KeyError, IndexError, TypeError):
            # A plain tuple is the state of a chain, but may also be that of another package.
            return None
    return state


def _factory(update: Callable[..., Any]) -> str:
    """Return ``clip`` for ``clip.<locals>.update_fn``."""
    code = getattr(update, "__code__", None)
    return (type(update).__name__ if code is None else code.co_qualname).partition(".")[0]
