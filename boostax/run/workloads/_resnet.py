"""A residual network for 8x8 digits: three stages of basic or bottleneck blocks."""

from typing import Literal

import jax
import jax.numpy as jnp

from boostax._core import checks

with checks.needing("boostax.run.workloads", "Flax", "workloads"):
    import flax.linen as nn


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
                hidden = ResidualBlock(
                    channels, stride, self.block, self.dtype, name=f"stage_{stage}_block_{index}"
                )(hidden, train)
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
