"""The small Flax networks of the workloads: a transformer, and three for 8x8 images.

Parameters are always float32. ``dtype`` is what matrix products and activations are computed in;
normalisation, softmax and logits stay in float32, because float16 has too few bits for their sums
and XLA on CPU is an order of magnitude slower at a float16 softmax.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp


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
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, stream: jax.Array) -> jax.Array:
        """Map the residual stream, ``[batch, length, width]``, to the next one."""
        length = stream.shape[-2]

        normed = nn.LayerNorm(dtype=jnp.float32, name="attention_norm")(stream)
        three = (3, self.heads, self.width // self.heads)
        projected = nn.DenseGeneral(three, dtype=self.dtype, name="attention_in")(normed)
        query, key, value = jnp.moveaxis(projected, -3, 0)
        # Scaled before the product: float16 scores of long heads would overflow first.
        query = query * (query.shape[-1] ** -0.5)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(self.dtype), value)
        merge = nn.DenseGeneral(self.width, axis=(-2, -1), dtype=self.dtype, name="attention_out")
        stream = stream + merge(mixed)

        normed = nn.LayerNorm(dtype=jnp.float32, name="mlp_norm")(stream)
        hidden = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype, name="mlp_in")(normed))
        return stream + nn.Dense(self.width, dtype=self.dtype, name="mlp_out")(hidden)


class CharacterTransformer(nn.Module):
    """A decoder-only transformer over characters, with learned positions."""

    vocabulary: int
    length: int
    width: int
    depth: int
    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Next-character logits in float32, ``[batch, length, vocabulary]``, of int ``tokens``."""
        # The usual 0.02 learns more slowly: 2.01 against 1.90 nats after 400 steps of the default.
        table = nn.initializers.normal(0.3)
        characters = self.param("characters", table, (self.vocabulary, self.width))
        positions = self.param("positions", table, (self.length, self.width))
        # Looked up first and cast second, so that the gradient's scatter-add runs in float32.
        stream = (characters[tokens] + positions[: tokens.shape[-1]]).astype(self.dtype)
        for layer in range(self.depth):
            sizes = self.width, self.heads, self.dtype
            stream = Block(*sizes, name=f"block_{layer}")(stream)
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
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits in float32, ``[batch, 10]``, of ``images``, ``[batch, 8, 8, 1]``."""
        dense = functools.partial(nn.Dense, dtype=self.dtype, kernel_init=self.kernel_init)
        hidden = images.reshape(images.shape[0], -1)
        for layer in range(self.layers):
            hidden = self.activation(dense(self.width, name=f"hidden_{layer}")(hidden))
        return dense(10, name="head")(hidden).astype(jnp.float32)


# Five sigmoid layers with small weights, whose gradients vanish on the way down.
DigitsSigmoid = functools.partial(
    DigitsMLP, layers=5, activation=nn.sigmoid, kernel_init=nn.initializers.normal(0.02)
)


class ResidualBlock(nn.Module):
    """relu(x + branch(x)), with a projection and its own BatchNorm where the shape changes.

    The branch is two 3x3 convolutions, or 1x1, 3x3 and 1x1 with a fourth of the channels between,
    each with a BatchNorm behind it.
    """

    channels: int
    stride: int
    block: Literal["basic", "bottleneck"]
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, stream: jax.Array, train: bool) -> jax.Array:
        """Map ``[batch, height, width, channels]`` to the same, smaller by the stride."""
        basic, inner = self.block == "basic", self.channels // 4
        plan = [(self.channels, 3), (self.channels, 3)]
        plan = plan if basic else [(inner, 1), (inner, 3), (self.channels, 1)]
        hidden = stream
        for layer, (channels, size) in enumerate(plan, 1):
            hidden = nn.relu(hidden) if layer > 1 else hidden
            strided = self.stride if layer == (1 if basic else 2) else 1
            hidden = convolution(channels, size, strided, self.dtype, f"conv_{layer}")(hidden)
            hidden = norm(train, f"norm_{layer}")(hidden)
        if stream.shape != hidden.shape:
            stream = convolution(self.channels, 1, self.stride, self.dtype, "shortcut")(stream)
            stream = norm(train, "shortcut_norm")(stream)
        return nn.relu(stream + hidden)


class DigitsResNet(nn.Module):
    """A stem, three stages of residual blocks, the mean over the image, a linear head.

    The stages have an eighth, a fourth and a half of ``width`` channels: with the default width of
    128 and one basic block each, 8 layers with 77,754 params. Bottlenecks of width 384 have 72,730.
    """

    width: int
    dtype: jnp.dtype
    block: Literal["basic", "bottleneck"] = "basic"
    blocks: int = 1

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Logits in float32, ``[batch, 10]``, of ``images``, ``[batch, 8, 8, 1]``."""
        hidden = convolution(self.width // 8, 3, 1, self.dtype, "stem")(images)
        hidden = nn.relu(norm(train, "stem_norm")(hidden))
        for stage in range(3):
            channels = self.width // 8 * 2**stage
            for index in range(self.blocks):
                stride = 2 if stage and not index else 1
                form = channels, stride, self.block, self.dtype
                name = f"stage_{stage}_block_{index}"
                hidden = ResidualBlock(*form, name=name)(hidden, train)
        hidden = hidden.mean(axis=(1, 2))
        return nn.Dense(10, dtype=self.dtype, name="head")(hidden).astype(jnp.float32)


def convolution(channels: int, size: int, stride: int, dtype: jnp.dtype, name: str) -> nn.Conv:
    """A square convolution without a bias: the norm behind it has one."""
    return nn.Conv(
        channels, (size, size), strides=(stride, stride), use_bias=False, dtype=dtype, name=name
    )


def norm(train: bool, name: str) -> nn.BatchNorm:
    """By the batch in training, else by running averages, as quick as an epoch of 20 batches asks.

    It computes in f32 and hands its result on so, as in the other models.
    """
    return nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=jnp.float32, name=name)
