"""The small Flax networks of the workloads.

Parameters are always float32. ``dtype`` is what matrix products and activations are computed in;
normalisation, softmax and logits stay in float32, because float16 has too few bits for their sums
and XLA on CPU is an order of magnitude slower at a float16 softmax.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from boostax._core import checks
from boostax.run.workloads._resnet import convolution, norm

with checks.needing("boostax.run.workloads", "Flax", "workloads"):
    import flax.linen as nn


def initial(model: nn.Module, key: jax.Array, inputs: Any) -> dict[str, Any]:
    """What ``model.init`` returns, but the same whatever ``model.dtype`` is, and compiled."""
    return _initial(model.clone(dtype=jnp.dtype("float32")), key, inputs)


# A function of the module, so that equal models share one compilation.
@functools.partial(jax.jit, static_argnums=0)
def _initial(model: nn.Module, key: jax.Array, inputs: Any) -> dict[str, Any]:
    return dict(model.init(key, inputs))


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a two-layer perceptron."""

    width: int
    heads: int
    dropout: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, stream: jax.Array, train: bool) -> jax.Array:
        """Map the residual stream, ``[batch, length, width]``, to the next one."""
        length = stream.shape[-2]
        drop = nn.Dropout(self.dropout, deterministic=not train)

        normed = nn.LayerNorm(dtype=jnp.float32, name="attention_norm")(stream)
        projected = nn.DenseGeneral(
            (3, self.heads, self.width // self.heads), dtype=self.dtype, name="attention_in"
        )(normed)
        query, key, value = jnp.moveaxis(projected, -3, 0)
        # Scaled before the product: float16 scores of long heads would overflow first.
        query = query * (query.shape[-1] ** -0.5)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
        causal = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(causal, scores, -jnp.inf)
        mixing = jax.nn.softmax(scores).astype(self.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", mixing, value)
        stream = stream + drop(
            nn.DenseGeneral(self.width, axis=(-2, -1), dtype=self.dtype, name="attention_out")(
                mixed
            )
        )

        normed = nn.LayerNorm(dtype=jnp.float32, name="mlp_norm")(stream)
        hidden = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype, name="mlp_in")(normed))
        return stream + drop(nn.Dense(self.width, dtype=self.dtype, name="mlp_out")(hidden))


class CharacterTransformer(nn.Module):
    """A decoder-only transformer over characters, with learned positions."""

    vocabulary: int
    length: int
    width: int
    depth: int
    heads: int
    dropout: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Next-character logits in float32, ``[batch, length, vocabulary]``, of int ``tokens``."""
        # The usual 0.02 learns more slowly: 2.01 against 1.90 nats after 400 steps of the default.
        table = nn.initializers.normal(0.3)
        characters = self.param("characters", table, (self.vocabulary, self.width))
        positions = self.param("positions", table, (self.length, self.width))
        # Looked up first and cast second, so that the gradient's scatter-add runs in float32.
        stream = (characters[tokens] + positions[: tokens.shape[-1]]).astype(self.dtype)
        stream = nn.Dropout(self.dropout, deterministic=not train)(stream)
        for layer in range(self.depth):
            stream = Block(self.width, self.heads, self.dropout, self.dtype, name=f"block_{layer}")(
                stream, train
            )
        stream = nn.LayerNorm(dtype=jnp.float32, name="head_norm")(stream)
        # A small head starts the loss at log(vocabulary), the loss of knowing nothing.
        small = nn.initializers.normal(0.02)
        head = nn.Dense(self.vocabulary, dtype=self.dtype, kernel_init=small, name="head")
        return head(stream).astype(jnp.float32)


class DigitsMLP(nn.Module):
    """A perceptron over flattened images.

    Attributes:
      width: of each hidden layer.
      dtype: of the products.
      layers: hidden ones.
      activation: behind each.
      kernel_init: of all weights.
    """

    width: int
    dtype: jnp.dtype
    layers: int = 2
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Logits in float32, ``[batch, 10]``, of ``images``, ``[batch, 8, 8, 1]``."""
        del train
        dense = functools.partial(nn.Dense, dtype=self.dtype, kernel_init=self.kernel_init)
        hidden = images.reshape(images.shape[0], -1)
        for layer in range(self.layers):
            hidden = self.activation(dense(self.width, name=f"hidden_{layer}")(hidden))
        return dense(10, name="head")(hidden).astype(jnp.float32)


# Five sigmoid layers with small weights, whose gradients vanish on the way down.
DigitsSigmoid = functools.partial(
    DigitsMLP, layers=5, activation=nn.sigmoid, kernel_init=nn.initializers.normal(0.02)
)


class DigitsConv(nn.Module):
    """Two 3x3 convolutions with BatchNorm, averaged over the image, then a linear head."""

    width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Logits in float32, ``[batch, 10]``, of ``images``, ``[batch, 8, 8, 1]``."""
        hidden = images
        for layer, channels in enumerate((self.width // 4, self.width // 2)):
            hidden = convolution(channels, 3, 1 + layer, self.dtype, f"conv_{layer}")(hidden)
            hidden = nn.relu(norm(train, f"norm_{layer}")(hidden))
        hidden = hidden.mean(axis=(1, 2))
        return nn.Dense(10, dtype=self.dtype, name="head")(hidden).astype(jnp.float32)
