# SPDX-License-Identifier: Apache-2.0
"""Find the normalisations in residual branches of a model, and the last one of each branch.

The model is traced with a mark in place of every BatchNorm. In the traced program a value has its
*nodes*: the inputs, products (convolution, matrix product) and norms that it is computed from.
Where values are added or concatenated, the nodes that all have in common lie before the fork, and
what an operand has beyond them is its branch. Nothing is matched by name, class or operand order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from boostax._core import interpret, jaxprs, proof

PyTree = Any

_PREFIX = "boostax.model.branches"
_PRODUCTS = ("conv_general_dilated", "dot_general")


class Norm(NamedTuple):
    """A norm's path, whether it goes, and why."""

    path: str
    removed: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class LessBNReport:
    """The BatchNorms of a model, and changes that ``less_bn`` makes. Its ``str`` is a table.

    Attributes:
      norms: every BatchNorm in the order of the calls: path, whether it was removed, and why.
      head: path of the Dense that gives the output and becomes a ``NormalizedDense``, or None.
    """

    norms: tuple[Norm, ...]
    head: str | None

    @property
    def removed(self) -> tuple[str, ...]:
        """Paths of the BatchNorms that are gone."""
        return tuple(norm.path for norm in self.norms if norm.removed)

    @property
    def kept(self) -> tuple[str, ...]:
        """Paths of those that are there."""
        return tuple(norm.path for norm in self.norms if not norm.removed)

    def __str__(self) -> str:
        width = max((len(norm.path) for norm in self.norms), default=0)
        lines = [f"less_bn: {len(self.removed)} of {len(self.norms)} BatchNorms removed"]
        for path, removed, reason in self.norms:
            lines.append(f"  {'removed' if removed else 'kept   '}  {path:<{width}}  {reason}")
        head = f"{self.head} is a NormalizedDense" if self.head is not None else "as it was"
        return "\n".join([*lines, f"  head     {head}"])


class Flow(NamedTuple):
    """The nodes that a value is computed from, by number.

    Attributes:
      nodes: all of them.
      norms: the norms that reach the value without passing another.
      sites: the nearest nodes. Two values of equal sites differ by elementwise work alone, so their
        sum is part of an activation, not the end of a branch.
    """

    nodes: frozenset[int]
    norms: frozenset[int]
    sites: frozenset[int]


def mark(kind: str, x: jax.Array, path: str) -> jax.Array:
    """Mark the value of the ``"norm"`` or ``"dense"`` at ``path`` in a model handed to ``examine``.

    A mark stands for the norm; it names the Dense whose result it marks.
    """
    return checkpoint_name(x, f"{_PREFIX}:{kind}:{path}")


def stand_in(norm: Any, x: Any, path: str) -> jax.Array:
    """Return the input of a BatchNorm of Flax, marked, in the dtype of its result.

    Nothing is computed: a norm over a named axis would ask for that axis.
    """
    x = jnp.asarray(x)
    dtype = norm.dtype or jnp.promote_types(x.dtype, norm.param_dtype)
    return mark("norm", x.astype(dtype), path)


def examine(
    run: Callable[[PyTree, Any, Any], PyTree],
    fixed: PyTree,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> LessBNReport:
    """Judge every norm of a marked model by the flow of the data in its traced program.

    An addition ends a residual branch if one operand is a shortcut: at most one product beyond the
    fork, and fewer than the other. A concatenation does if one operand has none beyond it. Then

    - of the norms in the branch, those stay that reach the end without passing another;
    - where a sum ends it, a norm on the shortcut goes, if the branch has one: a concatenation
      keeps it, for its channels are its own.

    A norm that lies in several branches is judged at the end of the innermost. One that lies in
    none stays. Loops, branches, ``jit`` and ``remat`` are looked into; a loop body once.

    Args:
      run: ``run(fixed, args, kwargs)``, the marked model.
      fixed: what the data have no part in: params, statistics, keys.
      args: the data. What has no shape is handed on as it is.
      kwargs: like ``args``.

    Returns:
      The norms and the head. Cost: one trace; nothing is compiled.

    Raises:
      ValueError: no array in ``args`` and ``kwargs``.
    """
    allowed = "a sample of what the module takes"
    hint = "Pass a batch of inputs, or its jax.ShapeDtypeStruct."
    require_readable()
    return _judged(*interpret.of_data("less_bn", run, fixed, (args, kwargs), allowed, hint))


@functools.cache
def require_readable() -> None:
    """Raise unless the norms of two small residual blocks are judged as they must be."""
    interpret.require_readable()

    def block(product: Callable[..., jax.Array], x: jax.Array, w: jax.Array, at: str) -> jax.Array:
        return mark("norm", product(mark("norm", product(x, w), f"{at}/inner"), w), f"{at}/last")

    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv(x[None, None], w[None, None], (1, 1), "SAME")[0, 0]

    def model(w: jax.Array, x: jax.Array) -> jax.Array:
        x = x + block(lax.dot, x, w, "sum")
        x = lax.concatenate([x, block(convolved, x, w, "concatenation")], 0)
        return mark("dense", lax.dot(x, w), "head")

    with proof.apart():
        x = jax.ShapeDtypeStruct((2, 2), "float32")
        found = _judged(jax.make_jaxpr(model)(x, x), 1)
    got = {norm.path for norm in found.norms if norm.removed}, len(found.norms), found.head
    if got != ({"sum/inner", "concatenation/inner"}, 4, "head"):
        allowed = "judged: of two residual blocks the inner norm goes"
        danger = "less_bn would take out norms that must stay, or none."
        raise proof.unreadable("the flow of data in programs", allowed, found, danger)


def _judged(program: jaxprs.ClosedJaxpr, data: int) -> LessBNReport:
    """Return the norms and the head of a program whose last inputs are the data."""
    graph = _Graph()
    fixed: list[Flow | None] = [None] * (len(program.jaxpr.invars) - data)
    inputs = [*fixed, *(graph.source() for _ in range(data))]
    outputs = interpret.flow(program, inputs, graph.results, _union, nothing=None, once=True)
    near = _joined(flow.sites for flow in outputs if flow)
    heads = sorted(near & graph.heads.keys())
    return LessBNReport(graph.norms(), graph.heads[heads[-1]] if heads else None)


def complete(found: LessBNReport, paths: Iterable[str]) -> LessBNReport:
    """Add those of the norms at ``paths`` that the trace does not show; they stay."""
    met = {norm.path for norm in found.norms}
    rest = (Norm(path, False, "not met in the trace") for path in paths if path not in met)
    return LessBNReport((*found.norms, *rest), found.head)


class _Graph:
    """The nodes met so far and what is known of them."""

    def __init__(self) -> None:
        self.count = 0
        self.products: set[int] = set()
        self.heads: dict[int, str] = {}
        self.paths: dict[int, str] = {}
        self.verdicts: dict[int, tuple[bool, str]] = {}

    def norms(self) -> tuple[Norm, ...]:
        """Return one verdict per path: a norm that is called twice goes if both calls may go."""
        calls: dict[str, list[Norm]] = {}
        for node, path in self.paths.items():
            removed, reason = self.verdicts.get(node, (False, "in no residual branch"))
            calls.setdefault(path, []).append(Norm(path, removed, reason))
        # False sorts first, so any call that needs the norm decides.
        return tuple(min(each, key=lambda norm: norm.removed) for each in calls.values())

    def source(self) -> Flow:
        """Return the flow of an input of the model."""
        node = frozenset([self._new()])
        return Flow(node, frozenset(), node)

    def results(self, eqn: jaxprs.JaxprEqn, inputs: list[Flow | None]) -> list[Flow | None]:
        """Return the flows of an equation's results; ``None`` where data have no part."""
        name, options = eqn.primitive.name, eqn.params
        if name in ("add", "concatenate"):
            self._meet(name, [flow for flow in inputs if flow])
        result = _union(inputs)
        if result and name in _PRODUCTS:
            node = self._new()
            self.products.add(node)
            result = Flow(result.nodes | {node}, result.norms, frozenset([node]))
        elif name == "name" and str(options["name"]).startswith(_PREFIX):
            result = self._marked(options["name"], result)
        return [result] * len(eqn.outvars)

    def _marked(self, name: str, flow: Flow | None) -> Flow | None:
        kind, path = name.removeprefix(f"{_PREFIX}:").split(":", 1)
        node = self._new()
        (self.paths if kind == "norm" else self.heads)[node] = path
        if flow is None:
            return None
        norms = frozenset([node]) if kind == "norm" else flow.norms
        return Flow(flow.nodes | {node}, norms, frozenset([node]))

    def _meet(self, name: str, flows: list[Flow]) -> None:
        """Judge the norms of the branch that ends here, if one does."""
        if len({flow.sites for flow in flows}) < 2:
            return
        common = frozenset.intersection(*(flow.nodes for flow in flows))
        beyond = [flow.nodes - common for flow in flows]
        products = [len(nodes & self.products) for nodes in beyond]
        shortest = min(products)
        if not common or shortest == max(products) or shortest > (name == "add"):
            return
        both = list(zip(flows, beyond, products, strict=True))
        branch = _joined(nodes for _, nodes, length in both if length > shortest)
        last = _joined(flow.norms & nodes for flow, nodes, length in both if length > shortest)
        shortcut = _joined(nodes for _, nodes, n in both if name == "add" and n == shortest)
        for node in sorted((branch | shortcut) & self.paths.keys()):
            # An inner branch has come first, and its verdict holds.
            names = ", ".join(_beside(self.paths[node], self.paths[end]) for end in sorted(last))
            if node in last:
                self.verdicts.setdefault(node, (False, f"last of its branch to {_THE[name]}"))
            elif node in branch:
                self.verdicts.setdefault(node, (True, f"{names} is the last of its branch"))
            elif last:
                self.verdicts.setdefault(node, (True, f"on the shortcut; {names} stays"))

    def _new(self) -> int:
        self.count += 1
        return self.count


_THE = {"add": "a sum", "concatenate": "a concatenation"}


def _beside(path: str, other: str) -> str:
    """Return ``other``, by its own name if both lie in one module."""
    parent = path.rpartition("/")[0]
    inside = other.rpartition("/")[0] == parent
    return other.rpartition("/")[2] if inside else other


def _joined(parts: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset[int]().union(*parts)


def _union(flows: Iterable[Flow | None]) -> Flow | None:
    met = [flow for flow in flows if flow]
    return Flow(*map(_joined, zip(*met, strict=True))) if met else None
