"""The collectives of a traced program and the bytes that they send, counted without the audit.

The text of a compiled program does not show these bytes, because XLA:CPU widens bf16 collectives to
f32 and merges the reductions of several leaves into one.
"""

import dataclasses
import itertools
import math

import jax

from boostax._core import axes, interpret, jaxprs

# The bytes that each of n devices sends on a ring, per byte of operand.
RING = {
    **dict.fromkeys(("psum", "pmax", "pmin"), lambda n: 2 * (n - 1) / n),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective, with operand bytes per device and execution, in the declared dtype.

    ``branches`` has ``(cond, branch)`` of each cond around it, outermost first; ``count`` is the
    product of the lengths of the scans around it.
    """

    primitive: str
    axes: tuple
    replicas: int
    bytes: int
    count: int
    branches: tuple
    dtypes: tuple

    @property
    def conditional(self):
        return bool(self.branches)

    @property
    def wire_bytes(self):
        return self.bytes * self.count * RING[self.primitive](self.replicas)


def collectives(fn, *args):
    """Return all collectives of a function, or of a jaxpr, in program order.

    The body of a ``while`` counts once, because its number of iterations is unknown.
    """
    program = fn if isinstance(fn, jaxprs.ClosedJaxpr) else jax.make_jaxpr(fn)(*args)
    conds = itertools.count()

    def enter(eqn, place):
        sizes, count, branches = place
        if eqn.primitive.name == "shard_map":
            sizes = {**sizes, **dict(eqn.params["mesh"].shape)}
        if eqn.primitive.name == "scan":
            count *= eqn.params["length"]
        cond = next(conds) if eqn.primitive.name == "cond" else None
        for branch in itertools.count():
            yield sizes, count, (*branches, *(() if cond is None else ((cond, branch),)))

    found = interpret.equations(program.jaxpr, ({}, 1, ()), enter)
    return [_collective(eqn, *place) for eqn, place in found if any(axes.sent_over([eqn]))]


def _collective(eqn, sizes, count, branches):
    avals = [v.aval for v in eqn.invars]
    names = tuple(x for x in axes.sent_over([eqn])[0] if x in sizes)
    groups = eqn.params.get("axis_index_groups")
    return Collective(
        eqn.primitive.name.removesuffix("_invariant"),
        names,
        len(groups[0]) if groups else math.prod(sizes[x] for x in names),
        sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals),
        count,
        branches,
        tuple(sorted({aval.dtype.name for aval in avals})),
    )
