# SPDX-License-Identifier: Apache-2.0
"""Keep only the last BatchNorm of each residual branch; the head becomes cosines.

A BatchNorm reads its input twice forward and twice backward, and keeps it for the backward pass.
One per branch still fixes the variance of what is added to the stream; the others are paid for
without that. It is another architecture, to be trained from scratch: kernels are not rescaled.
"""

from collections.abc import Callable, Sequence
from typing import Any

from boostax._core import checks
from boostax._core.groups import matches
from boostax.model.branches import LessBNReport, Norm

Remove = Sequence[str] | Callable[[str, bool], bool] | None

_WHO = "less_bn"


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
    return changed(module, (args, kwargs), normalized_head, remove, multiplier)


def changed(
    module: Any,
    data: tuple[Any, Any],
    normalized_head: bool = True,
    remove: Remove = None,
    multiplier: float = 1.0,
    strict: bool = True,
) -> tuple[Any, LessBNReport]:
    """Do what ``less_bn`` does; without ``strict`` it may be that nothing is changed."""
    with checks.needing(_WHO, "Flax", "workloads"):
        from boostax.model import less_bn_flax as flax
    hint = "It starts the multiplier of the head, 1 by default."
    checks.number(_WHO, "multiplier", multiplier, "positive", lambda m: m > 0, hint)
    allowed = "a flax.linen.Module or flax.nnx.Module that less_bn has not changed yet"
    hint = "Give the model itself, once, with remove= for what else shall go."
    fits = isinstance(module, flax.MODULES) and not isinstance(module, flax.LessBN)
    checks.require(_WHO, "module", type(module), allowed, fits, hint, TypeError)
    found = flax.structure(module, data)
    norms = found.norms if remove is None else _chosen(found.norms, remove)
    report = LessBNReport(norms, found.head if normalized_head else None)
    allowed = "False for a model that no Dense ends"
    hint = "Only a Dense whose result leaves the model with no other product behind it is one."
    fits = not (strict and normalized_head) or report.head is not None
    checks.require(_WHO, "normalized_head", normalized_head, allowed, fits, hint)
    kept = "; ".join(f"{norm.path}: {norm.reason}" for norm in norms) or "none"
    allowed = "a choice that removes a BatchNorm"
    hint = f"Nothing would change. BatchNorms: {kept}."
    fits = not strict or normalized_head or bool(report.removed)
    checks.require(_WHO, "remove", remove, allowed, fits, hint)
    return flax.without(module, report.removed, report.head, multiplier), report


def _chosen(norms: tuple[Norm, ...], remove: Any) -> tuple[Norm, ...]:
    """Return the norms with the verdict of the user."""
    if callable(remove):
        chosen = [(x.path, bool(remove(x.path, x.removed))) for x in norms]
        return tuple(Norm(x, goes, f"remove says {'so' if goes else 'no'}") for x, goes in chosen)
    allowed = "None, a list of patterns or a function"
    hint = "Such as ['block_*/norm_1'], or lambda path, by_rule: by_rule and path != 'norm'."
    fits = isinstance(remove, Sequence) and not isinstance(remove, str)
    checks.require(_WHO, "remove", remove, allowed, fits, hint, TypeError)
    hint = f"BatchNorms: {', '.join(x.path for x in norms) or 'none'}."
    reasons: dict[str, str] = {}
    for pattern in map(str, remove):
        hits = [x.path for x in norms if matches(x.path, pattern)]
        checks.require(_WHO, "remove", pattern, "patterns that match BatchNorms", bool(hits), hint)
        reasons = dict.fromkeys(hits, f"matches {pattern!r}") | reasons
    return tuple(Norm(x.path, x.path in reasons, reasons.get(x.path, "no match")) for x in norms)
