# SPDX-License-Identifier: Apache-2.0
"""LessBN: of the BatchNorms in a residual branch only the last stays; the head becomes cosines.

A BatchNorm reads its input twice forward and twice backward, and keeps it for the backward pass.
One per branch still fixes the variance of what is added to the stream; the others are paid for
without that. It is another architecture, to be trained from scratch: kernels are not rescaled.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from boostax._core import checks
from boostax._core.groups import matches
from boostax.model.branches import Norm, Structure

Remove = Sequence[str] | Callable[[str, bool], bool] | None


@dataclasses.dataclass(frozen=True)
class LessBNReport:
    """What ``less_bn`` did to a model. Its ``str`` is a table.

    Attributes:
      norms: every BatchNorm in the order of the calls: path, whether it was removed, and why.
      head: path of the Dense that was replaced by a ``NormalizedDense``, or None.
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


def less_bn(
    module: Any,
    /,
    *args: Any,
    normalized_head: bool = True,
    remove: Remove = None,
    multiplier: float = 1.0,
    **kwargs: Any,
) -> tuple[Any, LessBNReport]:
    """A Flax model with fewer BatchNorms and a normalised head, and a report of what was changed.

    By default the flow of the data decides (``boostax.model.branches``): where a residual branch
    ends in a sum or a concatenation, the norm that ends it stays, the others in it go, and so do
    those on the shortcut of a sum. What lies in no such branch stays: stems, plain stacks,
    transitions. This holds for basic and bottleneck blocks with and without downsampling, inverted
    residuals, dense blocks and pre-activation alike. The params and statistics of what is removed
    are not in the tree. What is decided here holds for every later call, in training and
    evaluation.

    With ``normalized_head`` the Dense whose result leaves the model becomes
    ``y = m (x / |x|) (W / |W_column|)`` with a trained scalar m and no bias: a
    ``NormalizedDense``. A trained model is not kept by either change: train from scratch.

    Args:
      module: a linen ``nn.Module`` or an NNX ``nnx.Module``.
      *args: a sample of what ``module`` is called with: arrays or ``jax.ShapeDtypeStruct``.
        Whatever has no shape (``True``, a string) is handed on as it is.
      normalized_head: replace the head.
      remove: None for the rule above; or path patterns such as ``["block_*/norm_1"]``, in which *
        stands for anything and a pattern that ends early takes all below it; or a function of a
        BatchNorm's path and of what the rule says, which returns whether it goes.
      multiplier: what m starts from. MindSpore's is 1: no logit then exceeds 1 until m has grown.
      **kwargs: like ``args``.

    Returns:
      The model and a ``LessBNReport``. For linen the model is a linen module, whose variables keep
      their paths; for NNX it is a changed copy, which keeps the head's kernel. The class of the
      model and the model given are left alone. Cost: one trace of the model, nothing compiled; a
      step is spared what the removed norms took.

    Raises:
      TypeError: no Flax module, or a result of this; ``remove`` is no patterns and no function.
      ValueError: no sample; a pattern that matches no BatchNorm; a normalised head for a model that
        no Dense ends; no normalised head and nothing removed.
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
      MindSpore's ``mindspore.boost.LessBN``. It matches patterns in the compiled
      graph; see ``docs/cards/less_bn.md`` for where the two differ.
    """
    return changed(module, args, kwargs, normalized_head, remove, multiplier)


def changed(
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    normalized_head: bool = True,
    remove: Remove = None,
    multiplier: float = 1.0,
    *,
    strict: bool = True,
) -> tuple[Any, LessBNReport]:
    """``less_bn``; without ``strict`` what there is to change is changed, be it nothing."""
    with checks.needing("less_bn", "Flax", "workloads"):
        import flax.linen as nn
        from flax import nnx
    hint = "It starts the multiplier of the head, 1 by default."
    checks.number("less_bn", "multiplier", multiplier, "positive", lambda m: m > 0, hint)
    if not isinstance(module, (nn.Module, nnx.Module)):
        allowed = "a flax.linen.Module or flax.nnx.Module"
        hint = "Give the model itself, not its apply function or its params."
        raise TypeError(checks.message("less_bn", "module", allowed, module, hint))
    from boostax.model import less_bn_linen, less_bn_nnx

    if isinstance(module, less_bn_linen.LessBN):
        allowed = "a model that less_bn has not changed yet"
        hint = "Call it once, on the whole model, with remove= for what else shall go."
        raise TypeError(checks.message("less_bn", "module", allowed, type(module), hint))
    library: Any = less_bn_linen if isinstance(module, nn.Module) else less_bn_nnx
    report = _decide(library.structure(module, args, kwargs), normalized_head, remove, strict)
    return library.without(module, report.removed, report.head, multiplier), report


def _decide(found: Structure, normalized_head: bool, remove: Remove, strict: bool) -> LessBNReport:
    norms = found.norms if remove is None else _by_user(found.norms, remove)
    if strict and normalized_head and found.head is None:
        allowed = "False for a model that no Dense ends"
        hint = "Only a Dense whose result leaves the model with no other product behind it is one."
        raise ValueError(
            checks.message("less_bn", "normalized_head", allowed, normalized_head, hint)
        )
    if strict and not normalized_head and not any(norm.removed for norm in norms):
        kept = "; ".join(f"{norm.path}: {norm.reason}" for norm in norms)
        hint = f"Nothing would change. BatchNorms: {kept or 'none'}."
        allowed = "a choice that removes a BatchNorm"
        raise ValueError(checks.message("less_bn", "remove", allowed, remove, hint))
    return LessBNReport(norms, found.head if normalized_head else None)


def _by_user(norms: tuple[Norm, ...], remove: Any) -> tuple[Norm, ...]:
    if callable(remove):
        chosen = {norm.path: bool(remove(norm.path, norm.removed)) for norm in norms}
        said = {True: "remove says so", False: "remove says no"}
        return tuple(Norm(x.path, chosen[x.path], said[chosen[x.path]]) for x in norms)
    if isinstance(remove, str) or not isinstance(remove, Sequence):
        hint = "Such as ['block_*/norm_1'], or lambda path, by_rule: by_rule and path != 'norm'."
        allowed = "None, a list of patterns or a function"
        raise TypeError(checks.message("less_bn", "remove", allowed, remove, hint))
    reasons: dict[str, str] = {}
    for pattern in remove:
        hits = [x.path for x in norms if matches(x.path, str(pattern))]
        if not hits:
            hint = f"BatchNorms: {', '.join(x.path for x in norms) or 'none'}."
            allowed = "patterns that match BatchNorms"
            raise ValueError(checks.message("less_bn", "remove", allowed, pattern, hint))
        for path in hits:
            reasons.setdefault(path, f"matches {pattern!r}")
    return tuple(Norm(x.path, x.path in reasons, reasons.get(x.path, "no match")) for x in norms)
