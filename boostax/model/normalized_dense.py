# SPDX-License-Identifier: Apache-2.0
"""A head that computes cosines: inputs and weight columns of length one, and a trained factor.

y = m * (x / |x|) (W / |W_column|), and m * (... + b) with a bias. In a network with few norms, the
scale of the last activations is not fixed, but the logits of a ``NormalizedDense`` without a bias
are in -m..m for any scale.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from boostax._core import checks, trees

with checks.needing("boostax.model.normalized_dense", "Flax", "workloads"):
    import flax.linen as nn
    from flax import nnx

Initializer = nn.initializers.Initializer


def unit(x: jax.Array, axis: int) -> jax.Array:
    """Return ``x / |x|`` along ``axis``, in f32 or wider; a vector of zeros stays zero.

    The vector is first divided by its largest magnitude, so no square over- or underflows. At a
    zero vector the quotient has no derivative, so the cotangent passes unchanged. Then a kernel
    that starts at zero is trained, and no gradient is NaN.
    """
    x = x.astype(trees.wide_dtype(x))
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis, keepdims=True))
    x = x / jnp.where(largest == 0, 1, largest)
    square = jnp.sum(x * x, axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.where(square == 0, 1, square))


def normalized_dense(
    x: jax.Array,
    kernel: jax.Array,
    multiplier: jax.Array,
    bias: jax.Array | None = None,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Return ``multiplier * (x / |x| @ kernel / |kernel_column| + bias)``.

    Args:
      x: ``[..., inputs]``.
      kernel: ``[inputs, outputs]``.
      multiplier: a scalar.
      bias: ``[outputs]``, added before the multiplier.
      dtype: dtype of the product and the result; by default the promoted dtype of ``x`` and
        ``kernel``.
      precision: precision of the product, as in ``jax.lax.dot_general``.

    Returns:
      ``[..., outputs]``. With any ``dtype``, lengths, bias and multiplier are in f32 or wider.
    """
    dtype = jnp.result_type(x, kernel) if dtype is None else jnp.dtype(dtype)
    y = jnp.dot(unit(x, -1).astype(dtype), unit(kernel, 0).astype(dtype), precision=precision)
    y = y.astype(trees.wide_dtype(y))
    return ((y if bias is None else y + bias) * multiplier).astype(dtype)


class NormalizedDense(nn.Module):
    """An ``nn.Dense`` of cosines: ``y = m (x / |x|) (W / |W_column|)``, with m a trained scalar.

    With ``use_bias`` the output is m (... + b), as in MindSpore. Params: ``kernel``, ``multiplier``
    of shape () and, with ``use_bias``, ``bias``. With any ``dtype``, lengths are computed in f32.

    Attributes:
      features: number of outputs.
      use_bias: add a bias before the multiplier.
      dtype: dtype of the product and the result; by default the promoted dtype of input and params.
      param_dtype: dtype of the params.
      precision: precision of the product.
      kernel_init: initializer of the kernel; its scale does not matter.
      bias_init: initializer of the bias.
      multiplier_init: initializer of the multiplier, 1 as in MindSpore. Logits differ by at most
        twice the multiplier, so a short training may need a larger value.

    Cost: two more reads of the inputs and the kernel, for their lengths.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> x = jnp.array([[3.0, 4.0], [0.0, 0.0]])
      >>> params = {"kernel": jnp.eye(2), "multiplier": jnp.array(2.0)}
      >>> boostax.model.NormalizedDense(2).apply({"params": params}, x).round(1).tolist()
      [[1.2000000476837158, 1.600000023841858], [0.0, 0.0]]

    References:
      MindSpore's ``LessBN(fn_flag=True)``. Wang et al., NormFace, 2017,
      https://arxiv.org/abs/1704.06369.
    """

    features: int
    use_bias: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: jax.lax.PrecisionLike = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    multiplier_init: Initializer = nn.initializers.ones_init()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Return ``[..., features]`` from ``[..., inputs]``."""
        shape = (jnp.shape(inputs)[-1], self.features)
        dtype = self.param_dtype
        kernel: Any = self.param("kernel", self.kernel_init, shape, dtype)
        multiplier: Any = self.param("multiplier", self.multiplier_init, (), dtype)
        bias: Any = self.param("bias", self.bias_init, shape[1:], dtype) if self.use_bias else None
        return normalized_dense(inputs, kernel, multiplier, bias, self.dtype, self.precision)


class NormalizedLinear(nnx.Module):
    """A ``NormalizedDense`` for NNX, made from an ``nnx.Linear`` and called like it.

    Args:
      linear: the layer whose kernel, dtypes and precision are used.
      use_bias: whether to keep the bias, which is added before the multiplier.
      multiplier: initial value of the trained scalar.

    Example:
      >>> from flax import nnx
      >>> from boostax.model.normalized_dense import NormalizedLinear
      >>> head = NormalizedLinear(nnx.Linear(8, 3, rngs=nnx.Rngs(0)))
      >>> head(jnp.ones((4, 8))).shape, head.multiplier.shape, head.bias
      ((4, 3), (), None)
    """

    def __init__(self, linear: nnx.Linear, use_bias: bool = False, multiplier: float = 1.0) -> None:
        self.multiplier = nnx.Param(jnp.full((), multiplier, linear.param_dtype))
        self.kernel = linear.kernel
        self.bias: Any = linear.bias if use_bias else nnx.data(None)
        self.dtype, self.precision = linear.dtype, linear.precision

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Return ``[..., out_features]`` from ``[..., in_features]``."""
        bias = None if self.bias is None else self.bias[...]
        params = self.kernel[...], self.multiplier[...], bias
        return normalized_dense(inputs, *params, self.dtype, self.precision)
