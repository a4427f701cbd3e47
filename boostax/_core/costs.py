# SPDX-License-Identifier: Apache-2.0
"""Read from a jaxpr the collectives of a program and the bytes that they send.

The text of a compiled program does not show these bytes, because XLA:CPU widens bf16 collectives to
f32 and merges the reductions of several leaves into one.
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

from boostax._core import axes, interpret, jaxprs
from boostax._core.describe import SCOPE

# The bytes that each of n devices sends on a ring, per byte of operand.
RING: dict[str, Callable[[int], float]] = {
    **dict.fromkeys(("psum", "pmax", "pmin"), lambda n: 2 * (n - 1) / n),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1,
}

# Operations that may stand between a comparison and its cond, with the operand to trace back.
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
      branches: pairs of numbers ``(cond, branch)``, outermost first. Collectives of one cond's
        branches are alternatives; collectives of different conds add up. Successive conds that
        compare one index with 0, 1, 2 are alternatives, too.
      scopes: names of the transformations of boostax around it, outermost first.
      dtypes: the dtypes of its operands.
      share: how often the collective runs, averaged over the calls that communicate. Branches of a
        cond with a collective are assumed to be equally frequent; calls that take a branch without
        one, such as skipped steps, are left out of the average.
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
        """Whether the collective is in a branch of a cond."""
        return bool(self.branches)

    @property
    def wire_bytes(self) -> float:
        """The bytes that each device sends per call, by the formula of a ring."""
        return self.bytes * self.count * RING[self.primitive](self.replicas)


def collectives(fn: Callable[..., Any] | jaxprs.ClosedJaxpr, *args: Any) -> list[Collective]:
    """Return all collectives of a function, or of a jaxpr, in program order.

    The body of a ``while`` counts once, because its number of iterations is unknown.
    """
    require_readable()
    jaxpr = fn if isinstance(fn, jaxprs.ClosedJaxpr) else jax.make_jaxpr(fn)(*args)
    found = list(_listed(jaxpr.jaxpr))

    def taken(c: Collective) -> list[tuple[Any, int]]:
        """Return the branches around a collective, each with the branches that lead to its cond."""
        return [((c.branches[:i], cond), branch) for i, (cond, branch) in enumerate(c.branches)]

    ways = collections.Counter(cond for cond, _ in {x for c in found for x in taken(c)})
    share = lambda c: 1 / math.prod(ways[cond] for cond, _ in taken(c))  # noqa: E731
    return [dataclasses.replace(c, share=share(c)) for c in found]


@functools.cache
def require_readable() -> None:
    """Raise unless the collectives of a program with a loop and a branch are counted."""
    axes.require_readable()
    name = jaxprs.AXIS

    @jax.named_scope(SCOPE + "proof")
    def sent(x: jax.Array) -> jax.Array:
        lax.scan(lambda _, y: (None, lax.psum(y, name)), None, lax.broadcast(x, (3,)))
        swap = lambda x: axes.COLLECTIVES["ppermute"](x, name)  # noqa: E731
        return lax.cond(x[0] < 1, swap, lambda x: x, x)

    common = {"axes": (name,), "replicas": 2, "bytes": 8, "scopes": ("proof",)}
    wanted = [("psum", 3, False, *common.values()), ("ppermute", 1, True, *common.values())]
    for check_vma in (True, False):
        with jaxprs.apart() as mesh:
            alone: Any = {"in_specs": jax.P(name), "out_specs": jax.P(name), "mesh": mesh}
            fn = jax.shard_map(sent, check_vma=check_vma, **alone)
            traced = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((4,), "float32"))
        fields = "primitive", "count", "conditional", *common
        found = [tuple(getattr(c, x) for x in fields) for c in _listed(traced.jaxpr)]
        danger = "Bytes that a program sends would not be counted."
        jaxprs.require("the collectives", str(wanted), found, found == wanted, danger)


@dataclasses.dataclass
class _Place:
    """The context of the equations of a body.

    Attributes:
      sizes: the sizes of the mesh axes around them.
      count: how often they run.
      branches: as in ``Collective``.
      stack: the name stack around them.
      made: the equation that computes each variable.
      asked: for each variable, the number of the first cond whose predicate it is.
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
            yield from itertools.repeat(_Place(sizes, count, place.branches, stack))
        cond, question = next(conds), _question(eqn, place.made)
        for branch in itertools.count():
            taken = cond, branch
            if question is not None:
                index, value = question
                # If this comparison is false, the comparison of a later cond may be true.
                taken = place.asked.setdefault(index, cond), value if branch else -1
            yield _Place(sizes, count, (*place.branches, taken), stack)

    for eqn, place in interpret.equations(jaxpr, _Place({}, 1, (), ""), enter):
        place.made.update(dict.fromkeys(eqn.outvars, eqn))
        if axes.sent_over(eqn):
            yield _collective(eqn, place)


def _collective(eqn: jaxprs.JaxprEqn, place: _Place) -> Collective:
    avals: list[Any] = [v.aval for v in eqn.invars]
    names = tuple(x for x in axes.sent_over(eqn) if x in place.sizes)
    groups = eqn.params.get("axis_index_groups")
    return Collective(
        eqn.primitive.name.removesuffix("_invariant"),
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


def _question(cond: jaxprs.JaxprEqn, made: dict[Any, Any]) -> tuple[Any, int] | None:
    """Return the integer variable in a cond's predicate, and the number it is compared with."""
    maker = lambda atom: None if isinstance(atom, jaxprs.Literal) else made.get(atom)  # noqa: E731
    eqn = maker(cond.invars[0])
    while eqn is not None and eqn.primitive.name in _PASSED_ON:
        eqn = maker(eqn.invars[_PASSED_ON[eqn.primitive.name]])
    if eqn is None or eqn.primitive.name != "eq":
        return None
    index, value = eqn.invars
    numbered = isinstance(value, jaxprs.Literal) and not isinstance(index, jaxprs.Literal)
    return (index, int(value.val)) if numbered else None
