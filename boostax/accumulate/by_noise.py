# SPDX-License-Identifier: Apache-2.0
"""Windows as long as the gradient noise scale: little is gained beyond it, and time lost below."""

import dataclasses

import jax
import jax.numpy as jnp

from boostax._core import checks
from boostax._core.noise_scale import NoiseScaleState


@dataclasses.dataclass(frozen=True)
class WindowByNoise:
    """What ``by_noise`` makes, for the ``every`` of ``accumulate``.

    Attributes:
      low: the shortest window, in micro-steps; also before anything is measured.
      high: the longest one.
      fraction: of the noise scale that all replicas together take in one window.
    """

    low: int
    high: int
    fraction: float

    def length(self, noise: NoiseScaleState, replicas: int) -> jax.Array:
        """Micro-steps of a window. A noise scale changes where a window closes, and it alone."""
        wanted = jnp.round(noise.scale() * (self.fraction / replicas))
        wanted = jnp.where(jnp.isnan(wanted), self.low, wanted)
        return jnp.clip(wanted, self.low, self.high).astype(jnp.int32)


def by_noise(low: int, high: int, *, fraction: float = 1.0) -> WindowByNoise:
    r"""Let the windows of ``accumulate`` be as long as the gradient noise scale, within bounds.

    .. math:: k = \operatorname{clip}(\operatorname{round}(f B_{\text{noise}} / n), low, high)

    micro-steps on each of :math:`n` replicas make a batch of :math:`f` times the noise scale
    :math:`B_{\text{noise}}`. A batch of the noise scale takes twice the steps, and twice the
    examples, of the least possible; beyond it steps become dearer, not fewer. The length is fixed
    while a window is open, and equal on all replicas, as the statistics are.

    Args:
      low: the shortest window, in micro-steps. The first ones have it, so that it should be cheap.
      high: the longest window; also where noise hides the gradient.
      fraction: of the noise scale.

    Returns:
      What ``accumulate(every=..., noise=0.99)`` takes. Cost: arithmetic on scalars; no state.

    Raises:
      ValueError, TypeError: an argument out of range.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> every = boostax.train.by_noise(2, 16)
      >>> tx = boostax.accumulate(optax.sgd(0.0), every, noise=0.9)
      >>> w, state = jnp.float32(0.0), tx.init(jnp.float32(0.0))
      >>> for g in (1.0, 5.0):  # mean 3, variance 8, |G|^2 = 9 - 8/2 = 5
      ...   w, state = boostax.apply_gradients(tx, jnp.float32(g), state, w)
      >>> round(float(boostax.metrics(state)["noise_scale"]), 4)  # and so a window of 2
      1.6

    References:
      McCandlish et al., An Empirical Model of Large-Batch Training,
      https://arxiv.org/abs/1812.06162, 2018.
    """
    who, hint = "by_noise", "It counts micro-steps per window."
    low = checks.positive_int(who, "low", low, hint)
    high = checks.positive_int(who, "high", high, hint)
    if high < low:
        raise ValueError(checks.message(who, "high", f"at least low={low}", high, hint))
    hint = "1.0 makes a window as large a batch as the noise scale."
    checks.number(who, "fraction", fraction, "greater than 0", lambda x: x > 0, hint)
    return WindowByNoise(low, high, float(fraction))
