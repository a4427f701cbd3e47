"""What a traced program sends: its collectives, counted from the jaxpr.

The compiled text is no measure of bytes: XLA's CPU compiler widens bf16 collectives to f32 and
merges the reductions of several leaves into one.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

# Bytes that one device sends on a ring, per byte of operand, for n devices.
_RING: dict[str, Callable[[int], float]] = {
    "psum": lambda n: 2 * (n - 1) / n,
    "pmax": lambda n: 2 * (n - 1) / n,
    "pmin": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a traced program.

    Attributes:
      primitive: ``psum``, ``pmin``, ``all_gather``, ...
      axes: mesh axes it runs over.
      replicas: number of devices over those axes.
      bytes: operand bytes per device and execution, in the declared dtype.
      count: executions per call of the program (the lengths of the surrounding scans).
      conditional: whether it stands in a branch of a cond.
    """

    primitive: str
    axes: tuple[str, ...]
    replicas: int
    bytes: int
    count: int
    conditional: bool

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per call, by the formula of a ring."""
        return self.bytes * self.count * _RING[self.primitive](self.replicas)


def collectives(fn: Callable[..., Any] | ClosedJaxpr, *args: Any) -> list[Collective]:
    """All collectives of a function, or of a jaxpr, in program order.

    A ``while`` body counts once: its trips are not known.
    """
    jaxpr = fn if isinstance(fn, ClosedJaxpr) else jax.make_jaxpr(fn)(*args)
    return list(_walk(jaxpr.jaxpr, {}, 1, conditional=False))


def wire_bytes(found: list[Collective], *, conditional: bool | None = None) -> float:
    """Bytes on the wire per device and call: all of them, or only those in branches (or not)."""
    return sum(c.wire_bytes for c in found if conditional is None or c.conditional == conditional)


def _walk(
    jaxpr: Jaxpr, sizes: dict[str, int], count: int, *, conditional: bool
) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name.removesuffix("_invariant")
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        if name in _RING and axes is not None:
            names = tuple(x for x in (axes if isinstance(axes, tuple) else (axes,)) if x in sizes)
            nbytes = sum(_bytes(v.aval) for v in eqn.invars)
            replicas = math.prod(sizes[x] for x in names)
            yield Collective(name, names, replicas, nbytes, count, conditional)
        inner_sizes = sizes
        if eqn.primitive.name == "shard_map":
            inner_sizes = {**sizes, **dict(eqn.params["mesh"].shape)}
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        in_branch = conditional or eqn.primitive.name == "cond"
        for inner in _bodies(eqn.params.values()):
            yield from _walk(inner, inner_sizes, count * trips, conditional=in_branch)


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def _bodies(values: Any) -> Iterator[Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _bodies(value)
