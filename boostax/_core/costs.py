# SPDX-License-Identifier: Apache-2.0
"""Count the collectives of a traced program, and the bytes that they send, from its jaxpr.

The compiled text is no measure of bytes: XLA's CPU compiler widens bf16 collectives to f32 and
merges the reductions of several leaves into one.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax

from boostax._core import interpret, jaxprs
from boostax._core.describe import SCOPE

# Bytes that one device sends on a ring, per byte of operand, for n devices.
RING: dict[str, Callable[[int], float]] = {
    **dict.fromkeys(("psum", "pmax", "pmin"), lambda n: 2 * (n - 1) / n),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1,
}

# Operations between a question and the branch that it chooses: the operand that is asked about.
_PASSED_ON = {"convert_element_type": 0, "clamp": 1}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a traced program.

    Attributes:
      primitive: ``psum``, ``pmin``, ``all_gather``, ...
      axes: mesh axes it runs over.
      replicas: number of devices over those axes.
      bytes: operand bytes per device and execution, in the declared dtype.
      count: executions per call of the program (the lengths of the surrounding scans).
      branches: the branches it stands in, outermost first: ``(cond, branch)``, both numbers, so
        that alternatives of one cond can be told from conds that follow each other. Conds that ask
        one after the other whether an index is 0, 1, ... are alternatives as well.
      scopes: the transformations of boostax's that it stands in, outermost first, by their names.
      dtypes: of its operands.
      share: how often it runs, as a mean over the calls that send. One of a cond's branches runs:
        those that have a collective share it evenly. A branch without is a hold, such as that of a
        skipped step, and not a call that sends.
    """

    primitive: str
    axes: tuple[str, ...]
    replicas: int
    bytes: int
    count: int
    branches: tuple[tuple[int, int], ...]
    scopes: tuple[str, ...]
    dtypes: tuple[str, ...]
    share: float = 1.0

    @property
    def conditional(self) -> bool:
        """Whether it stands in a branch of a cond."""
        return bool(self.branches)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per call, by the formula of a ring."""
        return self.bytes * self.count * RING[self.primitive](self.replicas)


def collectives(fn: Callable[..., Any] | jaxprs.ClosedJaxpr, *args: Any) -> list[Collective]:
    """Return all collectives of a function, or of a jaxpr, in program order.

    A ``while`` body counts once: its trips are not known.
    """
    require_readable()
    jaxpr = fn if isinstance(fn, jaxprs.ClosedJaxpr) else jax.make_jaxpr(fn)(*args)
    found = list(_listed(jaxpr.jaxpr))
    inside = [
        [((c.branches[:i], cond), branch) for i, (cond, branch) in enumerate(c.branches)]
        for c in found
    ]
    ways = collections.Counter(cond for cond, _ in set(itertools.chain(*inside)))
    shares = (1 / math.prod(ways[cond] for cond, _ in taken) for taken in inside)
    return [dataclasses.replace(c, share=share) for c, share in zip(found, shares, strict=True)]


def axes_of(program: jaxprs.ClosedJaxpr) -> frozenset[str]:
    """Return the named axes, bound around a program or in it, over which it communicates."""
    require_readable()
    found = interpret.equations(program.jaxpr)
    return frozenset(name for eqn, _ in found for name in _axes(eqn))


def axes_fed(program: jaxprs.ClosedJaxpr) -> frozenset[str]:
    """Return the axes over which it communicates what depends on its arguments.

    A tangent program's constants are what was computed before or, under a checkpoint, is computed
    again: these are the axes over which its gradients go.
    """
    require_readable()
    found: set[str] = set()

    def transfer(eqn: jaxprs.JaxprEqn, fed: list[bool]) -> list[bool]:
        if any(fed):
            # Whatever a body that is not known does, it may do to its operands.
            found.update(name for inner, _ in interpret.within(eqn) for name in _axes(inner))
        return [any(fed)] * len(eqn.outvars)

    interpret.flow(program, [True] * len(program.jaxpr.invars), transfer, any, nothing=False)
    return frozenset(found)


def axes_transposed(program: jaxprs.ClosedJaxpr) -> frozenset[str]:
    """Return the axes over which it sums in a backward pass of its own."""
    require_readable()

    def enter(eqn: jaxprs.JaxprEqn, backward: bool) -> Iterator[bool]:
        return itertools.repeat(backward or _backward(eqn))

    found = interpret.equations(program.jaxpr, False, enter)
    sums = (eqn for eqn, backward in found if backward or _backward(eqn))
    kinds = "psum", "reduce_scatter"
    return frozenset(x for eqn in sums if kind(eqn.primitive.name) in kinds for x in _axes(eqn))


def _backward(eqn: jaxprs.JaxprEqn) -> bool:
    return "transpose(" in str(eqn.source_info.name_stack)


def _axes(eqn: jaxprs.JaxprEqn) -> list[str]:
    """Return the axes over which an equation communicates."""
    return [x for x in _named(eqn) if isinstance(x, str)] if _sends(eqn) else []


def _sends(eqn: jaxprs.JaxprEqn) -> bool:
    return kind(eqn.primitive.name) in RING and bool(_named(eqn))


def _named(eqn: jaxprs.JaxprEqn) -> tuple[Any, ...]:
    """Return the axes of a collective; some may be positions that ``vmap`` has given."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


@functools.cache
def require_readable() -> None:
    """Raise unless each kind of collective is counted in a program that has one of each."""
    interpret.require_readable()
    name = jaxprs.AXIS
    kinds: dict[str, Callable[[jax.Array], jax.Array]] = {
        "psum": lambda x: lax.psum(x, name),
        "pmax": lambda x: lax.pmax(x, name),
        "pmin": lambda x: lax.pmin(x, name),
        "all_gather": lambda x: lax.all_gather(x, name),
        "reduce_scatter": lambda x: lax.psum_scatter(x, name, tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x, name, 0, 0),
        "ppermute": lambda x: lax.ppermute(x, name, [(0, 1), (1, 0)]),
    }

    @jax.named_scope(SCOPE + "proof")
    def sent(x: jax.Array) -> Any:
        each = [send(x) for send in kinds.values()]
        gathered = lax.all_gather(x, name, to="invarying")
        looped = lax.scan(lambda _, y: (None, lax.psum(y, name)), None, lax.broadcast(x, (3,)))
        return each, gathered, looped, lax.cond(x[0] < 1, kinds["ppermute"], lambda x: x, x)

    wanted = {*((kind, 1, False) for kind in kinds), ("psum", 3, False), ("ppermute", 1, True)}
    for check_vma in (True, False):
        with jaxprs.apart() as mesh:
            alone: Any = {"in_specs": jax.P(name), "out_specs": jax.P(name), "mesh": mesh}
            fn = jax.shard_map(lambda x: (sent(x), x)[1], check_vma=check_vma, **alone)
            traced = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((4,), "float32"))
        found = list(_listed(traced.jaxpr))
        got = {(c.primitive, c.count, c.conditional) for c in found}
        common = {(c.axes, c.replicas, c.bytes, c.scopes) for c in found}
        if (got, common, len(found)) != (wanted, {((name,), 2, 8, ("proof",))}, len(kinds) + 3):
            danger = "What a program sends would be counted as nothing."
            raise jaxprs.unreadable("the collectives", str(wanted), found, danger)


def kind(primitive: str) -> str:
    return primitive.removesuffix("_invariant")


@dataclasses.dataclass
class _Place:
    """The context of the equations of a body.

    Attributes:
      sizes: of the mesh axes around them.
      count: how often they run.
      branches: as in ``Collective``.
      stack: the names around them.
      made: the equation that each variable comes from.
      asked: the number of the first cond that asks about a variable.
    """

    sizes: dict[str, int]
    count: int
    branches: tuple[tuple[int, int], ...]
    stack: str
    made: dict[Any, Any] = dataclasses.field(default_factory=dict)
    asked: dict[Any, int] = dataclasses.field(default_factory=dict)


def _listed(jaxpr: jaxprs.Jaxpr) -> Iterator[Collective]:
    """Yield the collectives of a program."""
    conds = itertools.count()

    def enter(eqn: jaxprs.JaxprEqn, place: _Place) -> Iterator[_Place]:
        name, sizes, count = eqn.primitive.name, place.sizes, place.count
        if name == "shard_map":
            sizes = {**sizes, **dict(eqn.params["mesh"].shape)}
        if name == "scan":
            count *= eqn.params["length"]
        stack = _stack(eqn, place)
        if name != "cond":
            while True:
                yield _Place(sizes, count, place.branches, stack)
        cond, question = next(conds), _question(eqn, place.made)
        for branch in itertools.count():
            taken = cond, branch
            if question is not None:
                index, value = question
                # Where it is another number, another question may be answered by yes.
                taken = place.asked.setdefault(index, cond), value if branch else -1
            yield _Place(sizes, count, (*place.branches, taken), stack)

    for eqn, place in interpret.equations(jaxpr, _Place({}, 1, (), ""), enter):
        place.made.update(dict.fromkeys(eqn.outvars, eqn))
        if _sends(eqn):
            yield _collective(eqn, place)


def _collective(eqn: jaxprs.JaxprEqn, place: _Place) -> Collective:
    avals: list[Any] = [v.aval for v in eqn.invars]
    names = tuple(x for x in _named(eqn) if x in place.sizes)
    groups = eqn.params.get("axis_index_groups")
    return Collective(
        kind(eqn.primitive.name),
        names,
        replicas=len(groups[0]) if groups else math.prod(place.sizes[x] for x in names),
        bytes=sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals),
        count=place.count,
        branches=place.branches,
        scopes=tuple(re.findall(re.escape(SCOPE) + r"(\w+)", _stack(eqn, place))),
        dtypes=tuple(sorted({aval.dtype.name for aval in avals})),
    )


def _stack(eqn: jaxprs.JaxprEqn, place: _Place) -> str:
    return f"{place.stack}/{eqn.source_info.name_stack}"


def _question(cond: Any, made: dict[Any, Any]) -> tuple[Any, int] | None:
    """Return the integer variable that a cond compares, and the number that it must be."""
    maker = lambda atom: None if isinstance(atom, jaxprs.Literal) else made.get(atom)  # noqa: E731
    eqn = maker(cond.invars[0])
    while eqn is not None and eqn.primitive.name in _PASSED_ON:
        eqn = maker(eqn.invars[_PASSED_ON[eqn.primitive.name]])
    if eqn is None or eqn.primitive.name != "eq":
        return None
    index, value = eqn.invars
    numbered = isinstance(value, jaxprs.Literal) and not isinstance(index, jaxprs.Literal)
    return (index, int(value.val)) if numbered else None
