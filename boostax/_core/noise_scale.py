# SPDX-License-Identifier: Apache-2.0
r"""The gradient noise scale, from the norms of small-batch and large-batch gradients of a step.

Let a small batch have the gradient :math:`g`, of mean :math:`G` and covariance :math:`S`, and let
:math:`\bar g` be the mean of :math:`n` of them. Then :math:`E|g|^2 = |G|^2 + \operatorname{tr} S`
and :math:`E|\bar g|^2 = |G|^2 + \operatorname{tr} S / n`, so

.. math::
  \operatorname{tr} S \approx \frac{n}{n-1} \left(|g|^2 - |\bar g|^2\right), \qquad
  |G|^2 \approx \frac{n |\bar g|^2 - |g|^2}{n-1}

are unbiased estimates. Their ratio is biased, so each estimate is averaged over steps before the
division (McCandlish et al., An Empirical Model of Large-Batch Training,
https://arxiv.org/abs/1812.06162, 2018, appendix A).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from boostax._core import axes, trees
from boostax._core.describe import Holds, PyTree


class NoiseScaleState(NamedTuple):
    """The running means whose ratio is the noise scale.

    Attributes:
      gradient: f32, estimates of the squared norm of the true gradient, times ``weight``.
      noise: f32, estimates of the trace of a small batch's gradient covariance, times ``weight``.
      weight: f32, the sum of the weights in both means: ``1 - noise**steps``.
    """

    gradient: jax.Array
    noise: jax.Array
    weight: jax.Array
    holds = Holds(("gradient", "noise", "weight"))

    def scale(self) -> jax.Array:
        """Return the noise scale in small batches.

        The result is NaN before the first estimate, and infinite if the estimate of the squared
        norm is not positive because noise hides the gradient.
        """
        ratio = jnp.maximum(self.noise, 0) / self.gradient
        ratio = jnp.where(self.gradient > 0, ratio, jnp.inf)
        return jnp.where(self.weight > 0, ratio, jnp.nan).astype(jnp.float32)

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        square, noise = self.gradient / self.weight, self.noise / self.weight
        return {"noise_scale": self.scale(), "gradient_square": square, "gradient_noise": noise}


def fresh() -> NoiseScaleState:
    """Make the state before the first estimate."""
    return NoiseScaleState(*(jnp.zeros((), jnp.float32) for _ in range(3)))


def found(state: PyTree) -> list[NoiseScaleState]:
    """Return the noise scales in a state, outermost first."""
    return trees.find(state, lambda node: isinstance(node, NoiseScaleState))


def observe(
    state: NoiseScaleState, small: jax.Array, large: jax.Array, n: jax.Array, decay: float
) -> NoiseScaleState:
    """Add the estimates of one step to the running means.

    Args:
      state: the old means. The means stay unchanged if ``n`` is 1 or a norm is not finite.
      small: squared norm of the gradient of a small batch, averaged over the small batches.
      large: squared norm of the mean of ``n`` such gradients.
      n: f32, the number of small batches.
      decay: the decay of the running means.
    """
    estimates = (n * large - small) / (n - 1), (small - large) * n / (n - 1), jnp.float32(1)
    shown = (n > 1) & jnp.isfinite(small) & jnp.isfinite(large)
    pairs = zip(state, estimates, strict=True)
    means = [jnp.where(shown, decay * old + (1 - decay) * new, old) for old, new in pairs]
    return NoiseScaleState(*(x.astype(jnp.float32) for x in means))


def square_norm(tree: PyTree, names: tuple[str, ...] = ()) -> jax.Array:
    """Return the squared norm of each replica's gradients in f32; replicas lie along ``names``.

    The norms of shards are added up: one all-reduce of 4 bytes for each set of axes over which
    leaves are sharded.
    """

    def square(x: jax.Array) -> jax.Array:
        wide = x.astype(trees.wide_dtype(x))
        return jnp.sum(jnp.real(wide * jnp.conj(wide))).astype(jnp.float32)

    parts = [jnp.zeros((), jnp.float32), *map(square, jax.tree.leaves(tree))]
    return axes.summed(parts, lambda x: axes.varying(x) - frozenset(names))
