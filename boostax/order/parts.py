# SPDX-License-Identifier: Apache-2.0
"""Read the parts of a transformation and their roles, in the order in which a gradient passes them.

A described transformation (``boostax.describe``) names its own parts. A combinator of Optax is
recognized by the name of its ``update``, and the parts inside are read from the closure of
``update``. The parts inside any other transformation are unknown.

The role of a part is the part's effect on a gradient. The role decides the part's position in a
chain. The roles are listed in ``_core/describe.py``; Optax's transformations have these further
roles:

==================== ==========================================================================
``peer window``      ``optax.MultiSteps``, the peer of ``accumulate``
``adder``            ``optax.apply_every``: sums updates, and returns zeros in between
``hold``             ``optax.apply_if_finite``: skips like a scaler, but not for ever
``condition``        runs the inner part in some calls, and passes gradients on in other calls
``mask``             runs the inner part in some calls, and returns zeros in other calls
``average``          lookahead and schedule-free: averages params, around an optimizer
``outer optimizer``  uses the gradient of every call, around another optimizer
``call schedule``    ``optax.inject_hyperparams`` with schedules, which count calls
==================== ==========================================================================
"""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from boostax._core import checks
from boostax._core.describe import Description, closure, first_line
from boostax._core.types import PyTree

UNKNOWN = "unknown"
# The role of a part that only combines other parts.
COMBINATOR = "combinator"

# Names for several roles.
REDUCTIONS = ("mean", "adasum", "compressed")
CLIPS = ("norm clip", "clip")
MEMORIES = ("momentum", "moments")

table = functools.partial(checks.table, "boostax.order", "roles")


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A transformation, and the parts in it.

    Attributes:
      name: the name of the factory that made the transformation.
      package: the package of the factory, if the transformation has no description.
      what: the first line of the factory's docstring.
      description: the description of the transformation, if there is one.
      settings: the values in the closure of the transformation's ``update``.
      inner: the parts inside.
      parallel: whether the parts inside work in parallel, not in sequence.
    """

    name: str
    package: str
    what: str
    description: Description | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inner: tuple["Part", ...] = ()
    parallel: bool = False


# ``_HIDDEN`` represents an unknown part of a combinator whose closure Optax has changed.
_HIDDEN = Part("(hidden)", "", "This version of Optax does not show the part")


def read(tx: optax.GradientTransformation) -> Part:
    """Return a transformation as a tree of parts."""
    return _part(tx.update)


def opened(tx: optax.GradientTransformation) -> list[optax.GradientTransformation]:
    """Return the transformations in an ``optax.chain`` and its inner chains; else only ``tx``."""
    inits = closure(tx.init).get("init_fns")
    updates = closure(tx.update).get("update_fns")
    if inits is None or updates is None:
        return [tx]
    pairs = zip(inits, updates, strict=True)
    return [x for pair in pairs for x in opened(optax.GradientTransformationExtraArgs(*pair))]


def _part(update: Callable[..., object]) -> Part:
    if (description := getattr(update, "description", None)) is not None:
        inner = tuple(map(read, description.inner.values()))
        values = closure(inspect.unwrap(getattr(update, "step", update)))
        return Part(description.name, "", description.what, description, values, inner)
    if isinstance(update, functools.partial | jax.stages.Wrapped):  # by jax.jit
        return _part(getattr(update, "func", None) or inspect.unwrap(update))
    owner = getattr(update, "__self__", None)
    values = closure(update) if owner is None else dict(getattr(owner, "__dict__", {}))
    kind = owner if isinstance(owner, type) else type(owner)
    # For example, the name of ``clip.<locals>.update_fn`` is ``clip``.
    maker = update.__code__.co_qualname if hasattr(update, "__code__") else type(update).__name__
    name = maker.partition(".")[0] if owner is None else kind.__name__
    if name == "with_extra_args_support" and "tx" in values:
        return read(values["tx"])
    space = getattr(update, "__globals__", {})
    # The package is read from the globals, because ``functools.wraps`` copies the name and module
    # of the wrapped function, but not its globals.
    package = str(space.get("__name__", getattr(update, "__module__", ""))).partition(".")[0]
    what = first_line(space.get(name) if owner is None else kind)
    inner = _inner(name, values) if package == "optax" else ()
    # Both optimizers of ``sam`` receive gradients, and ``sam`` subtracts the updates of the second
    # optimizer.
    parallel = package == "optax" and name in ("partition", "sam")
    return Part(name, package, what, settings=values, inner=inner, parallel=parallel)


def _inner(name: str, values: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts inside one of Optax's combinators."""
    try:
        if name == "chain":
            return tuple(map(_part, values["update_fns"]))
        if name in ("named_chain", "partition"):
            return tuple(map(read, dict(values["transforms"]).values()))
    except KeyError:  # This version of Optax uses another name for the parts.
        return (_HIDDEN,)
    inside = [_injected(values)] if name == "inject_hyperparams" else values.values()
    parts = tuple(read(tx) for tx in inside if isinstance(tx, optax.GradientTransformation))
    return parts or (_HIDDEN,) * (name in table()["wrappers"].split())


def _injected(values: Mapping[str, Any]) -> object:
    """Make a transformation in the way ``optax.inject_hyperparams`` does at every call.

    Optax reads the numbers from the state. In the transformation made here, each number is the
    argument's default, or 1 without a default.
    """
    arguments = {**values.get("other_hps", {}), **values.get("sched_hps", {})}
    try:
        scheduled = {name: fn(fn.init()) for name, fn in values["sched_hps"].items()}
        parameters = inspect.signature(values["inner_factory"]).parameters.values()
        missing = [x for x in parameters if x.name not in arguments]
        numbers = {x.name: 1 if x.default is x.empty else x.default for x in missing}
        return values["inner_factory"](**values["other_hps"], **numbers, **scheduled)
    except Exception:  # Any factory may fail here; the part is then unknown.
        return None


def _has_states(x: object) -> bool:
    return isinstance(x, dict) and all(hasattr(y, "_fields") for y in x.values())


def of_state(state: PyTree) -> Part:
    """Return the parts of a chain, read from the chain's state; a part without a state is unknown.

    The state of a chain is a tuple of its parts' states. The state of a part is a ``NamedTuple``:
    its class names the factory, and its fields contain the states of the parts inside.
    """
    # In ``optax.PartitionState``, the states are in a dict.
    values = getattr(state, "inner_states", state)
    values = values.values() if isinstance(values, dict) else values
    inner = tuple(of_state(x) for x in values if isinstance(x, tuple) or _has_states(x))
    if not hasattr(state, "_fields"):
        return Part("chain", "optax", "", inner=inner)
    package = type(state).__module__.partition(".")[0]
    # The name of the state is converted to the name of the factory: ``ScaleByAdamState`` to
    # ``scale_by_adam``.
    name = type(state).__name__.removesuffix("State").replace("GC", "gc")
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
    names = table()["states"] if package == "boostax" else {}
    roles = [role for role in names if name in names[role].split()]
    described = Description(name, "", roles[0], (), {}, False) if roles else None
    return Part(name, package, "", described, {}, inner, hasattr(state, "inner_states"))


def role(part: Part) -> str:
    """Return a part's role, from its description or from the table of Optax's factories."""
    if part.description is not None:
        return part.description.role
    if part.package != "optax":
        return UNKNOWN
    if part.name == "inject_hyperparams" and part.inner:
        return "call schedule" if part.settings.get("sched_hps") else COMBINATOR
    roles = (role for role, names in table()["optax"].items() if part.name in names.split())
    return next(roles, "moments" if part.name.startswith("scale_by_") else UNKNOWN)


def sign(part: Part) -> float:
    """Return the sign by which a part multiplies its input; NaN if the sign is unknown."""
    kind = role(part)
    factor: Any = 1
    if kind == UNKNOWN:
        return math.nan
    if kind == "subspace" or part.name in ("scale_by_cocob", "scale_by_madgrad"):
        factor = -1
    elif part.name == "scale":
        factor = part.settings.get("step_size")
    elif kind == "schedule":
        # Optax writes a descending step as ``lambda count: m * schedule(count)``, where ``m`` is
        # -1.
        fn: Any = part.settings.get("step_size_fn")
        by_optax = getattr(fn, "__globals__", {}).get("__name__", "").startswith("optax.")
        factor = closure(fn).get("m") if by_optax else None
    return float(np.sign(number(factor)))


def number(value: Any) -> float:
    """Return a setting as a number; NaN for other settings, such as a schedule."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A part at its position.

    Attributes:
      part: the part.
      role: its effect on a gradient; see the top of this file.
      holders: the rows around the part, outermost first, without parts that only combine other
        parts.
      wrappers: the number of parts around the part, including parts that only combine other parts.
      sides: for each partition around the part, the partition and the label of the part.
      masks: the names of the wrappers that pass only some of the params, outermost first.
    """

    part: Part
    role: str
    holders: tuple["Row", ...]
    wrappers: int
    sides: tuple[tuple[int, int], ...]
    masks: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which the part reduces or agrees."""
        return () if self.part.description is None else self.part.description.axes


def rows(part: Part) -> list[Row]:
    """List all parts, outer parts first, without parts that only combine other parts."""
    listed: list[Row] = []

    def visit(row: Row) -> None:
        part = row.part
        # A combinator whose parts are unknown has its own row.
        shown = [row] * (row.role != COMBINATOR or not part.inner)
        listed.extend(shown)
        holders = (*row.holders, *shown)
        # Optax's combinators that pass only some of the params on.
        masks = (*row.masks, part.name) if part.name in ("masked", "partition") else row.masks
        for i, inner in enumerate(part.inner):
            sides = (*row.sides, (id(part), i)) if part.parallel else row.sides
            visit(Row(inner, role(inner), holders, row.wrappers + 1, sides, masks))

    visit(Row(part, role(part), (), 0, ()))
    return listed
