# SPDX-License-Identifier: Apache-2.0
"""MindSpore's loss-scale managers and optimizers, with MindSpore's order of arguments.

A manager is a value in a dictionary for ``boostax.auto``. An optimizer is a chain of Optax that
computes the same updates as the optimizer of the same name in ``mindspore.nn``.

If MindSpore gets params without groups, its weight decay excludes the vectors of norms, which are
params whose names contain ``beta`` or ``gamma``. In boostax, weight decay excludes all params of a
layer with a norm's name (``boostax.precision.policy.NORMS``), and params with ``beta`` or ``gamma``
in their path.

References:
  MindSpore 2.10, ``mindspore/nn/optim``, ``mindspore/train/loss_scale_manager.py``.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax._core import checks, trees
from boostax._core.describe import Stepped, describe
from boostax._core.types import PyTree
from boostax.precision.policy import NORMS

Data: TypeAlias = dict[str, Any]
Tx: TypeAlias = optax.GradientTransformation
# A number, a schedule, or a list with the rate of each step.
Rate: TypeAlias = Any
_SPARED = "|".join((*NORMS, "beta", "gamma"))


def DynamicLossScaleManager(
    init_loss_scale: float = 2.0**24, scale_factor: float = 2, scale_window: int = 2000
) -> Data:
    """Return a ``loss_scale_manager`` for a dictionary, with a dynamic scale.

    Args:
      init_loss_scale: the first scale.
      scale_factor: the factor by which the scale grows, and by which an overflow divides the scale,
        down to 1.
      scale_window: the number of steps without overflow before the scale grows.

    Returns:
      The arguments of ``boostax.dynamic_loss_scale`` as data. Cost: none.

    Example:
      >>> import boostax
      >>> from boostax.config.mindspore import DynamicLossScaleManager
      >>> data = {"loss_scale_manager": DynamicLossScaleManager(4, 3000)}
      >>> boostax.auto(data).notes[-1].partition(":")[2][:24]
      ' scale_factor is 3000: t'
    """
    factors = {"growth_factor": scale_factor, "backoff_factor": 1 / scale_factor}
    limits = {"init_scale": init_loss_scale, "growth_interval": scale_window, "max_scale": 3e38}
    return {"kind": "dynamic"} | limits | factors


def FixedLossScaleManager(loss_scale: float = 128.0, drop_overflow_update: bool = True) -> Data:
    """Return a ``loss_scale_manager`` for a dictionary, with a constant scale.

    Args:
      loss_scale: the scale.
      drop_overflow_update: whether an overflow skips the step. If False, only the optimizer's
        argument ``loss_scale`` divides the gradients, as in MindSpore.

    Returns:
      The arguments of ``boostax.static_loss_scale`` as data. Cost: none.
    """
    return {"kind": "static", "scale": loss_scale, "skip_nonfinite": drop_overflow_update}


def GroupLossScaleManager(init_loss_scale: PyTree, loss_scale_groups: Sequence[PyTree]) -> Data:
    """Return a ``loss_scale_manager`` for a dictionary, with a scale for each group of params.

    Args:
      init_loss_scale: the first scale, or a list with the first scale of each group.
      loss_scale_groups: patterns, or a list of names, for each group, in the order of the forward
        pass; ``boostax.freeze.param_groups`` makes such lists from params.

    Returns:
      The arguments of ``boostax.precision.group_loss_scale`` as data. The loss needs a
      ``boostax.precision.scale_boundary`` wherever the output of one group enters the next group.
      Cost: none.
    """
    limits = {"overflow": "each", "min_scale": 2.0**-60, "max_scale": 2.0**60}
    return {"kind": "group", "groups": loss_scale_groups, "init_scale": init_loss_scale} | limits


def momentum(
    learning_rate: Rate, momentum: float, weight_decay: float = 0.0, loss_scale: float = 1.0,
    use_nesterov: bool = False, *, grouped: bool = False,
) -> Tx:  # fmt: skip
    r"""Return ``nn.Momentum``.

    .. math::
      v \leftarrow u v + g / c + \lambda w, \qquad w \leftarrow w - \eta v

    With ``use_nesterov``, the step is :math:`\eta (g / c + \lambda w + u v)`; MindSpore's CPU
    operator ignores ``use_nesterov``.

    Args:
      learning_rate: a number, a function of the step, or a list with the rate of each step; after
        the end of the list, the last rate applies.
      momentum: :math:`u`, at least 0.
      weight_decay: :math:`\lambda`, coupled.
      loss_scale: :math:`c`, which divides the gradients of a loss that is multiplied by :math:`c`.
      use_nesterov: see above.
      grouped: whether weight decay includes the params of norms, as in MindSpore for params in
        groups.

    Returns:
      A transformation. Cost: one copy of the params.

    Raises:
      ValueError, TypeError: ``loss_scale`` is not positive, or the params are passed as the first
        argument.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> from boostax.config import mindspore
      >>> tx = mindspore.momentum(0.1, 0.9, weight_decay=0.5)
      >>> params = {"fc": jnp.float32(2.0), "bn": {"gamma": jnp.float32(2.0)}}
      >>> updates, _ = tx.update({"fc": 1.0, "bn": {"gamma": 1.0}}, tx.init(params), params)
      >>> print(f"{updates['fc']:.2f} {updates['bn']['gamma']:.2f}")
      -0.20 -0.10
    """
    parts = [optax.trace(momentum, use_nesterov), _rate("momentum", learning_rate)]
    return _coupled("momentum", weight_decay, loss_scale, grouped, parts)


def sgd(
    learning_rate: Rate = 0.1, momentum: float = 0.0, dampening: float = 0.0,
    weight_decay: float = 0.0, nesterov: bool = False, loss_scale: float = 1.0, *,
    grouped: bool = False,
) -> Tx:  # fmt: skip
    r"""Return ``nn.SGD``, whose dampening :math:`d` starts at the second step.

    .. math::
      v \leftarrow u v + (1 - d) (g / c + \lambda w), \qquad w \leftarrow w - \eta v

    Args:
      learning_rate: see ``momentum``.
      momentum: :math:`u`, at least 0.
      dampening: :math:`d`, at least 0; without momentum it has no effect.
      weight_decay: :math:`\lambda`, coupled.
      nesterov: see ``momentum``; not together with dampening.
      loss_scale: see ``momentum``.
      grouped: see ``momentum``.

    Returns:
      A transformation. Cost: with momentum, one copy of the params.

    Raises:
      ValueError, TypeError: ``loss_scale`` is not positive; ``nesterov`` without momentum or with
        dampening.
    """
    is_valid = not nesterov or (momentum > 0 and dampening == 0)
    checks.require(is_valid, "sgd", "nesterov", nesterov, "False here", "Pass momentum alone.")
    dampened = optax.scale_by_schedule(lambda count: jnp.where(count == 0, 1.0, 1.0 - dampening))
    parts = [*[dampened] * bool(dampening), optax.trace(momentum, nesterov)] if momentum else []
    return _coupled("sgd", weight_decay, loss_scale, grouped, [*parts, _rate("sgd", learning_rate)])


def adam(
    learning_rate: Rate = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
    use_locking: bool = False, use_nesterov: bool = False, weight_decay: float = 0.0,
    loss_scale: float = 1.0, *, grouped: bool = False,
) -> Tx:  # fmt: skip
    r"""Return ``nn.Adam``, whose ``eps`` is added to the root of the uncorrected second moment.

    .. math::
      w \leftarrow w - \eta \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{m}{\sqrt{v} + \epsilon}

    Args:
      learning_rate: see ``momentum``.
      beta1: in [0, 1), the decay of :math:`m`.
      beta2: in [0, 1), the decay of :math:`v`.
      eps: positive.
      use_locking: accepted, without effect.
      use_nesterov: whether to use :math:`\beta_1 m + (1 - \beta_1) g` in place of :math:`m`.
      weight_decay: coupled, so the decay is part of :math:`g`.
      loss_scale: see ``momentum``.
      grouped: see ``momentum``.

    Returns:
      A transformation with an ``optax.ScaleByAdamState``. Cost: two copies of the params.

    Raises:
      ValueError, TypeError: ``loss_scale`` is not positive.
    """
    parts = [_moments(beta1, beta2, eps, nesterov=use_nesterov), _rate("adam", learning_rate)]
    return _coupled("adam", weight_decay, loss_scale, grouped, parts)


def adam_weight_decay(
    learning_rate: Rate = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-6,
    weight_decay: float = 0.0, *, grouped: bool = False,
) -> Tx:  # fmt: skip
    r"""Return ``nn.AdamWeightDecay``, without bias correction and with decoupled weight decay.

    .. math::
      w \leftarrow w - \eta \left(\frac{m}{\sqrt{v} + \epsilon} + \lambda w\right)

    Args:
      learning_rate: see ``momentum``.
      beta1: see ``adam``.
      beta2: see ``adam``.
      eps: positive.
      weight_decay: :math:`\lambda`.
      grouped: see ``momentum``.

    Returns:
      A transformation with an ``optax.ScaleByAdamState``. Cost: two copies of the params.

    Raises:
      TypeError: the params are passed as the first argument.
    """
    moments = _moments(beta1, beta2, eps, debias=False)
    decay = _decay(weight_decay, grouped)
    return optax.chain(moments, decay, _rate("adam_weight_decay", learning_rate))


def lars(
    weight_decay: float = 0.0, epsilon: float = 1e-5, coefficient: float = 0.001,
    use_clip: bool = False, learning_rate: float = 1.0, loss_scale: float = 1.0, *,
    lars_filter: Callable[[str], bool] = lambda name: re.search("LayerNorm|bias", name) is None,
) -> Tx:  # fmt: skip
    r"""Return ``nn.LARS``, which rescales gradients; chain it before an optimizer.

    .. math::
      g \leftarrow \theta \frac{\|w\|}{\|g\| + \lambda \|w\| + \epsilon} (g + \lambda w)

    MindSpore applies the optimizer's weight decay and loss scale in LARS, so pass both to ``lars``:
    ``nn.LARS(nn.Momentum(params, 0.1, 0.9, weight_decay=1e-4), coefficient=0.02)`` corresponds to
    ``optax.chain(lars(1e-4, coefficient=0.02), momentum(0.1, 0.9))``. MindSpore implements LARS
    only for Ascend, so the formula is from MindSpore's documentation.

    Args:
      weight_decay: :math:`\lambda`; the params of norms have no decay.
      epsilon: :math:`\epsilon`.
      coefficient: :math:`\theta`.
      use_clip: whether the factor is divided by ``learning_rate`` and then limited to 1.
      learning_rate: the rate of the optimizer, for ``use_clip``.
      loss_scale: see ``momentum``.
      lars_filter: a function of a param's path that returns whether the param gets the factor;
        other params keep their gradient, without decay.

    Returns:
      A transformation. Cost: one read of params and gradients.

    Raises:
      ValueError, TypeError: ``loss_scale`` is not positive.

    References:
      You et al., Large Batch Training of Convolutional Networks, https://arxiv.org/abs/1708.03888,
      2017. MindSpore 2.10, ``mindspore/nn/optim/lars.py``.
    """

    def of_leaf(path: jax.tree_util.KeyPath, g: jax.Array, w: jax.Array) -> jax.Array:
        name = trees.path_name(path)
        if not lars_filter(name):
            return g
        decay = 0.0 if re.search(_SPARED, name) else weight_decay
        size, slope = jnp.linalg.norm(w.ravel()), jnp.linalg.norm(g.ravel())
        factor = coefficient * size / (slope + decay * size + epsilon)
        return (jnp.minimum(factor / learning_rate, 1) if use_clip else factor) * (g + decay * w)

    scaled = optax.stateless(lambda g, w: jax.tree_util.tree_map_with_path(of_leaf, g, w))
    return _coupled("lars", 0.0, loss_scale, False, [scaled])


def _moments(b1: float, b2: float, eps: float, debias: bool = True, nesterov: bool = False) -> Tx:
    """Scale by the moments of MindSpore's Adam."""

    @describe("adam", "moments")
    def update_fn(updates: PyTree, state: PyTree, params: PyTree = None) -> Stepped:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment(updates, state.nu, b2, 2)
        ahead = optax.tree.update_moment(updates, mu, b1, 1) if nesterov else mu
        factor = jnp.sqrt(1 - b2**count) / (1 - b1**count) if debias else 1.0
        updates = jax.tree.map(lambda m, v: factor * m / (jnp.sqrt(v) + eps), ahead, nu)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(optax.scale_by_adam(b1, b2).init, update_fn)


def _coupled(who: str, decay: float, loss_scale: float, grouped: bool, parts: list[Tx]) -> Tx:
    """Put weight decay, then the division by the loss scale, in front of a chain."""
    checks.number(who, "loss_scale", loss_scale, "positive", "1.0 has no effect.", above=0)
    return optax.chain(_decay(decay * loss_scale, grouped), optax.scale(1 / loss_scale), *parts)


def _decay(rate: float, grouped: bool) -> Tx:
    """Add weight decay; the params of norms decay only if ``grouped``."""
    mask = functools.partial(
        jax.tree.map_with_path,
        lambda path, _: grouped or not re.search(_SPARED, trees.path_name(path)),
    )
    return optax.add_decayed_weights(rate, mask) if rate else optax.identity()


def _rate(who: str, rate: Rate) -> Tx:
    """Multiply by the negative learning rate; a list has the rate of each step."""
    listed = type(rate) in (list, tuple) and not any(map(np.ndim, jax.tree.leaves(rate)))
    is_rate = any((listed, callable(rate), jax.tree_util.all_leaves((rate,))))
    allowed = "a number, a schedule or a list of rates"
    checks.require_type(is_rate, who, "learning_rate", "a tree of arrays", allowed, "Omit params.")
    table = jnp.asarray(rate, jnp.float32) if np.ndim(rate) else None
    # An index beyond the end of the table reads the last element.
    return optax.scale_by_learning_rate(rate if table is None else table.__getitem__)
