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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from boostax._core import interpret, jaxprs

PyTree = Any

_PREFIX = "boostax.model.branches"
_PRODUCTS = ("conv_general_dilated", "dot_general")
_ENDS = {"add": "a sum", "concatenate": "a concatenation"}


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
        head = "as it was" if self.head is None else f"{self.head} is a NormalizedDense"
        return "\n".join([*lines, f"  head     {head}"])


class Node(NamedTuple):
    """An input, a product, a norm or a Dense of the traced program.

    Attributes:
      number: in the order of the program.
      kind: ``"input"``, ``"product"``, ``"norm"`` or ``"dense"``.
      path: of a norm or a Dense in the model.
    """

    number: int
    kind: str
    path: str = ""


Nodes = frozenset[Node]


class Flow(NamedTuple):
    """The nodes that a value is computed from; none where the data have no part in it.

    Attributes:
      nodes: all of them.
      norms: the norms that reach the value without passing another.
      sites: the nearest nodes, inputs aside.
    """

    nodes: Nodes = frozenset()
    norms: Nodes = frozenset()
    sites: Nodes = frozenset()

    def through(self, node: Node) -> Flow:
        """Return the flow of what ``node`` makes of the value."""
        if not self.nodes:
            return self
        one = frozenset([node])
        return Flow(self.nodes | one, one if node.kind == "norm" else self.norms, one)


def mark(kind: str, x: jax.Array, path: str) -> jax.Array:
    """Mark the value of the ``"norm"`` or ``"dense"`` at ``path`` in a model handed to ``examine``.

    A mark stands for the norm; it names the Dense whose result it marks.
    """
    return checkpoint_name(x, f"{_PREFIX}:{kind}:{path}")


def examine(
    run: Callable[..., PyTree], fixed: PyTree, data: tuple[Any, Any], paths: Sequence[str] = ()
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
      data: ``args`` and ``kwargs``. What has no shape is handed on as it is.
      paths: all norms, read after the trace. Those that it does not show stay.

    Returns:
      The norms and the head. Cost: one trace; nothing is compiled.

    Raises:
      ValueError: no array in ``data``.
    """
    allowed = "a sample of what the module takes"
    hint = "Pass a batch of inputs, or its jax.ShapeDtypeStruct."
    require_readable()
    return _judged(*interpret.of_data("less_bn", run, fixed, data, allowed, hint), paths)


@functools.cache
def require_readable() -> None:
    """Raise unless the norms of two small residual blocks are judged as they must be."""
    interpret.require_readable()
    convolved = lambda x, w: lax.conv(x[None, None], w[None, None], (1, 1), "SAME")[0, 0]  # noqa: E731
    stacked = lambda x, y: lax.concatenate([x, y], 0)  # noqa: E731

    def model(w: jax.Array, x: jax.Array) -> jax.Array:
        for product, end in ((lax.dot, lax.add), (convolved, stacked)):
            y = mark("norm", product(x, w), "inner")
            x = end(x, mark("norm", product(y, w), "last"))
        return mark("dense", lax.dot(x, w), "head")

    with jaxprs.apart():
        x = jax.ShapeDtypeStruct((2, 2), "float32")
        found = _judged(jax.make_jaxpr(model)(x, x), 1)
    if (found.removed, found.kept, found.head) != (("inner",), ("last",), "head"):
        allowed = "judged: of two residual blocks the inner norm goes"
        danger = "less_bn would take out norms that must stay, or none."
        raise jaxprs.unreadable("the flow of data in programs", allowed, found, danger)


def _judged(program: jaxprs.ClosedJaxpr, data: int, paths: Sequence[str] = ()) -> LessBNReport:
    """Return the norms and the head of a program whose last inputs are the data."""
    nodes = [Node(number, "input") for number in range(data)]
    verdicts: dict[Node, Norm] = {}

    def results(eqn: jaxprs.JaxprEqn, inputs: list[Flow]) -> list[Flow]:
        name, label = eqn.primitive.name, str(eqn.params.get("name"))
        if name in _ENDS:
            # An inner branch has ended first, and its verdicts hold.
            verdicts.update(_ended(name, [flow for flow in inputs if flow.nodes]) | verdicts)
        found, product = _union(inputs), name in _PRODUCTS
        if product or label.startswith(_PREFIX):
            words = ["product"] if product else label.split(":", 2)[1:]
            nodes.append(Node(len(nodes), *words))
            found = found.through(nodes[-1])
        return [found] * len(eqn.outvars)

    fixed = [Flow()] * (len(program.jaxpr.invars) - data)
    inputs = [*fixed, *(Flow(frozenset([node])) for node in nodes)]
    outputs = interpret.flow(program, inputs, results, _union, nothing=Flow(), once=True)
    norms: dict[str, Norm] = {}
    for node in (node for node in nodes if node.kind == "norm"):
        norm = verdicts.get(node, Norm(node.path, False, "in no residual branch"))
        # A norm that is called twice goes only if both calls may go.
        norms[node.path] = min(norms.get(node.path, norm), norm, key=lambda norm: norm.removed)
    for path in paths:
        norms.setdefault(path, Norm(path, False, "not met in the trace"))
    heads = [node.path for node in sorted(_union(outputs).sites) if node.kind == "dense"]
    return LessBNReport(tuple(norms.values()), heads[-1] if heads else None)


def _ended(name: str, flows: list[Flow]) -> dict[Node, Norm]:
    """Judge the norms of the branch that ends where ``flows`` come together, if one does."""
    common = _union(flows).nodes.intersection(*(flow.nodes for flow in flows))
    beyond = [flow._replace(nodes=flow.nodes - common, norms=flow.norms - common) for flow in flows]
    lengths = [sum(node.kind == "product" for node in flow.nodes) for flow in beyond]
    shortest = min(lengths, default=0)
    if not common or shortest == max(lengths) or shortest > (name == "add"):
        return {}
    branch = _union(x for x, length in zip(beyond, lengths, strict=True) if length > shortest)

    def verdict(node: Node) -> Norm:
        if node in branch.norms:
            return Norm(node.path, False, f"last of its branch to {_ENDS[name]}")
        ends = ", ".join(_beside(node.path, end.path) for end in sorted(branch.norms))
        if node in branch.nodes:
            return Norm(node.path, True, f"{ends} is the last of its branch")
        return Norm(node.path, True, f"on the shortcut; {ends} stays")

    shortcut = name == "add" and branch.norms
    judged = _union(beyond).nodes if shortcut else branch.nodes
    return {node: verdict(node) for node in judged if node.kind == "norm"}


def _beside(path: str, other: str) -> str:
    """Return ``other``, by its own name if both lie in one module."""
    parent, _, name = other.rpartition("/")
    return name if parent == path.rpartition("/")[0] else other


def _union(flows: Iterable[Flow]) -> Flow:
    return Flow(*(frozenset[Node]().union(*nodes) for nodes in zip(*flows, strict=True)))
