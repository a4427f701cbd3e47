# SPDX-License-Identifier: Apache-2.0
"""Keep only the last BatchNorm of each residual branch, and normalise the head.

A BatchNorm reads its input twice in the forward pass and twice in the backward pass, and stores the
input between the passes. One norm per branch is enough to fix the variance of the sum of branch and
shortcut. Each other norm of the branch costs as much without this benefit. Kernels are not
rescaled, so the result is another architecture and must be trained from scratch.

The model is traced with a mark in place of every BatchNorm. In the traced program each value has
*nodes*: the inputs, products (convolution, matrix product) and norms from which it is computed. If
values are added or concatenated, nodes that all operands share lie before the fork, and the
remaining nodes of an operand form the branch of this operand. The choice of norms does not depend
on names, on classes or on the order of operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from boostax._core import checks, groups, interpret, jaxprs
from boostax._core.types import PyTree

Remove = Sequence[str] | Callable[[str, bool], bool] | None

_WHO = "less_bn"
_PREFIX = "boostax.model.less_bn"
_PRODUCTS = ("conv_general_dilated", "dot_general")
_ENDS = {"add": "a sum", "concatenate": "a concatenation"}


class Norm(NamedTuple):
    """A norm's path, whether it is removed, and the reason."""

    path: str
    removed: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class LessBNReport:
    """The BatchNorms of a model and the changes of ``less_bn``; ``str`` gives a table.

    Attributes:
      norms: every BatchNorm in the order of the calls: path, whether it was removed, and why.
      head: path of the last Dense, if it becomes a ``NormalizedDense``, else None.
    """

    norms: tuple[Norm, ...]
    head: str | None

    @property
    def removed(self) -> tuple[str, ...]:
        """Return the paths of the removed BatchNorms."""
        return tuple(norm.path for norm in self.norms if norm.removed)

    @property
    def kept(self) -> tuple[str, ...]:
        """Return the paths of the remaining BatchNorms."""
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
      number: position in the program.
      kind: ``"input"``, ``"product"``, ``"norm"`` or ``"dense"``.
      path: path of a norm or a Dense in the model.
    """

    number: int
    kind: str
    path: str = ""


Nodes = frozenset[Node]


class Flow(NamedTuple):
    """The nodes from which a value is computed; empty if the value does not depend on the data.

    Attributes:
      nodes: all nodes from which the value is computed.
      norms: the norms from which the value is computed without another norm in between.
      sites: the last nodes before the value, except inputs.
    """

    nodes: Nodes = frozenset()
    norms: Nodes = frozenset()
    sites: Nodes = frozenset()


def mark(kind: str, x: jax.Array, path: str) -> jax.Array:
    """Mark a value in a model for ``examine``.

    A mark of kind ``"norm"`` replaces the norm at ``path``; a mark of kind ``"dense"`` names the
    Dense that computed the value.
    """
    return checkpoint_name(x, f"{_PREFIX}:{kind}:{path}")


def examine(
    apply: Callable[..., PyTree], fixed: PyTree, data: PyTree, paths: Sequence[str] = ()
) -> LessBNReport:
    """Decide by the data flow of a marked model's program which norms are removed.

    An addition ends a residual branch if one operand is a shortcut: it has at most one product
    after the fork, and fewer products than the other operand. A concatenation ends a branch if one
    operand has no product after the fork. At such an end,

    - a norm in the branch is kept if no other norm follows before the end;
    - a norm on the shortcut is removed if a sum ends the branch and the branch has a norm. At a
      concatenation, a norm on the shortcut is kept, because no other norm normalises the shortcut's
      channels.

    If a norm is in several branches, the end of the innermost branch decides. A norm outside all
    branches is kept. Bodies of loops, branches, ``jit`` and ``remat`` are read, too; a loop's body
    is read once.

    Args:
      apply: ``apply(fixed, *args, **kwargs)``, the marked model.
      fixed: values that do not depend on the data: params, statistics, keys.
      data: ``args`` and ``kwargs``. Values without a shape are passed on unchanged.
      paths: all norms, read after the trace. Norms that are not in the trace are kept.

    Returns:
      The norms and the head. Cost: one trace; nothing is compiled.

    Raises:
      ValueError: no array in ``data``.
    """
    allowed = "a sample of the module's inputs"
    hint = "Pass a batch of inputs, or its jax.ShapeDtypeStruct."
    program, count = interpret.of_data("less_bn", apply, fixed, data, allowed, hint)
    # The last inputs of the program are the data.
    nodes = [Node(number, "input") for number in range(count)]
    verdicts: dict[Node, Norm] = {}

    def results(eqn: jaxprs.JaxprEqn, inputs: list[Flow]) -> list[Flow]:
        name = eqn.primitive.name
        if name in _ENDS:
            # An inner branch ends before its outer branch, so the outer branch does not overwrite
            # existing verdicts.
            verdicts.update(_ended(name, [flow for flow in inputs if flow.nodes]) | verdicts)
        result = _union(inputs)
        label = str(eqn.params.get("name"))
        if name in _PRODUCTS or label.startswith(_PREFIX):
            words = ["product"] if name in _PRODUCTS else label.split(":", 2)[1:]
            nodes.append(Node(len(nodes), *words))
            if result.nodes:
                site = frozenset(nodes[-1:])
                nearest = site if words[0] == "norm" else result.norms
                result = Flow(result.nodes | site, nearest, site)
        return [result] * len(eqn.outvars)

    inputs = [Flow()] * (len(program.jaxpr.invars) - count) + [Flow(frozenset([x])) for x in nodes]
    outputs = interpret.flow(program, inputs, results, _union, nothing=Flow(), once=True)
    norms: dict[str, Norm] = {}
    for node in (node for node in nodes if node.kind == "norm"):
        norm = verdicts.get(node, Norm(node.path, False, "in no residual branch"))
        # A norm that is called twice is removed only if both calls may be removed.
        norms[node.path] = min(norms.get(node.path, norm), norm, key=lambda norm: norm.removed)
    norms |= {x: Norm(x, False, "not met in the trace") for x in paths if x not in norms}
    heads = [node.path for node in sorted(_union(outputs).sites) if node.kind == "dense"]
    return LessBNReport(tuple(norms.values()), heads[-1] if heads else None)


def _ended(name: str, flows: list[Flow]) -> dict[Node, Norm]:
    """Decide which norms are removed, if a branch ends where ``flows`` join."""
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
        # A norm in the same module is named without the module's path.
        module = node.path.rpartition("/")[0]
        splits = (end.path.rpartition("/") for end in sorted(branch.norms))
        ends = ", ".join(name if x == module else f"{x}{by}{name}" for x, by, name in splits)
        if node in branch.nodes:
            return Norm(node.path, True, f"{ends} is the last of its branch")
        return Norm(node.path, True, f"on the shortcut; {ends} stays")

    decided = _union(beyond).nodes if name == "add" and branch.norms else branch.nodes
    return {node: verdict(node) for node in decided if node.kind == "norm"}


def _union(flows: Iterable[Flow]) -> Flow:
    return Flow(*(frozenset[Node]().union(*nodes) for nodes in zip(*flows, strict=True)))


def less_bn(
    module: Any,
    /,
    *args: Any,
    normalized_head: bool = True,
    remove: Remove = None,
    multiplier: float = 1.0,
    **kwargs: Any,
) -> tuple[Any, LessBNReport]:
    """Return a Flax model with fewer BatchNorms and a normalised head, and a report.

    By default, the data flow of the traced model decides which norms are removed. If a residual
    branch ends in a sum or a concatenation, the last norm of the branch stays. The other norms of
    the branch are removed, and so are norms on the shortcut of a sum. Norms outside such branches
    stay, as in stems, plain stacks and transitions. The rule covers basic and bottleneck blocks
    with and without downsampling, inverted residuals, dense blocks and pre-activation. The tree of
    variables has no params and statistics of removed norms. The norms are chosen once, for all
    later calls in training and evaluation.

    With ``normalized_head`` the Dense that computes the model's output becomes ``y = m (x / |x|) (W
    / |W_column|)`` with a trained scalar m and no bias: a ``NormalizedDense``. Removed norms and a
    new head invalidate trained params, so train from scratch.

    Args:
      module: a linen ``nn.Module`` or an NNX ``nnx.Module``.
      *args: sample arguments of ``module``: arrays or ``jax.ShapeDtypeStruct``. Values without a
        shape (``True``, a string) are passed on unchanged.
      normalized_head: replace the head.
      remove: None for the rule above; or path patterns such as ``["block_*/norm_1"]``, in which *
        matches any text, and a module's name matches all norms in the module; or a function that
        returns whether to remove a BatchNorm, from its path and the decision of the rule.
      multiplier: initial value of m, which is 1 in MindSpore. With 1, no logit exceeds 1 until m
        has grown.
      **kwargs: like ``args``.

    Returns:
      The model and a ``LessBNReport``. For linen, the model is a linen module, and the paths of
      variables stay the same; for NNX, the model is a changed copy, in which the kernel of the head
      is kept. The given model and its class stay unchanged. Cost: one trace of the model; nothing
      is compiled. A step saves the cost of the removed norms.

    Raises:
      TypeError: ``module`` is not a Flax module, or is a result of ``less_bn``; ``remove`` has
        another type.
      ValueError: no sample arguments; a pattern that matches no BatchNorm; a normalised head for a
        model that does not end with a Dense; no norm to remove and no normalised head.
      ImportError: Flax is not installed.

    Example:
      >>> import boostax, flax.linen as nn, jax.numpy as jnp
      >>> class Net(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x, train=False):
      ...         y = x
      ...         for name in ("norm_1", "norm_2"):
      ...             y = nn.Conv(4, (3, 3), use_bias=False)(nn.relu(y))
      ...             y = nn.BatchNorm(not train, name=name)(y)
      ...         return nn.Dense(3, name="head")(nn.relu(x + y).mean((1, 2)))
      >>> model, report = boostax.less_bn(Net(), jnp.ones((1, 8, 8, 4)))
      >>> print(report)
      less_bn: 1 of 2 BatchNorms removed
        removed  norm_1  norm_2 is the last of its branch
        kept     norm_2  last of its branch to a sum
        head     head is a NormalizedDense

    References:
      MindSpore's ``mindspore.boost.LessBN``, which matches patterns in the compiled graph. The page
      ``docs/cards/less_bn.md`` lists the differences.
    """
    return changed(module, (args, kwargs), normalized_head, remove, multiplier)


def changed(
    module: Any,
    data: PyTree,
    normalized_head: bool = True,
    remove: Remove = None,
    multiplier: float = 1.0,
    strict: bool = True,
) -> tuple[Any, LessBNReport]:
    """Return the result of ``less_bn``; if not ``strict``, the result may be an unchanged model."""
    with checks.needing(_WHO, "Flax", "workloads"):
        from boostax.model import less_bn_flax as flax
    checks.number(_WHO, "multiplier", multiplier, "positive", "1 is the default.", above=0)
    allowed = "a flax.linen.Module or flax.nnx.Module that less_bn has not changed yet"
    hint = "Pass the original model. To remove other norms, pass remove=."
    valid = isinstance(module, flax.Model) and not isinstance(module, flax.LessBN)
    checks.require_type(valid, _WHO, "module", got=type(module), allowed=allowed, hint=hint)
    report = flax.structure(module, data)
    norms = report.norms if remove is None else _chosen(report.norms, remove)
    report = LessBNReport(norms, report.head if normalized_head else None)
    allowed = "False for a model that does not end with a Dense"
    hint = "The head must be a Dense whose result reaches the output without another product."
    valid = not (strict and normalized_head) or report.head is not None
    checks.require(valid, _WHO, "normalized_head", got=normalized_head, allowed=allowed, hint=hint)
    reasons = "; ".join(f"{norm.path}: {norm.reason}" for norm in norms) or "none"
    hint = f"Nothing would change. BatchNorms: {reasons}."
    valid = not strict or normalized_head or bool(report.removed)
    checks.require(valid, _WHO, "remove", remove, "a choice that removes a BatchNorm", hint)
    return flax.without(module, report.removed, report.head, multiplier), report


def _chosen(norms: tuple[Norm, ...], remove: Remove) -> tuple[Norm, ...]:
    """Return the norms, removed or kept as the argument ``remove`` decides."""
    if callable(remove):
        chosen = [(x.path, bool(remove(x.path, x.removed))) for x in norms]
        return tuple(Norm(x, goes, f"remove says {'so' if goes else 'no'}") for x, goes in chosen)
    hint = f"BatchNorms: {', '.join(x.path for x in norms) or 'none'}."
    reasons: dict[str, str] = {}
    for pattern in map(str, remove or ()):
        hits = [x.path for x in norms if groups.matches(x.path, pattern)]
        checks.require(bool(hits), _WHO, "remove", pattern, "patterns that match BatchNorms", hint)
        reasons = dict.fromkeys(hits, f"matches {pattern!r}") | reasons
    return tuple(Norm(x.path, x.path in reasons, reasons.get(x.path, "no match")) for x in norms)
