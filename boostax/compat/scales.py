# SPDX-License-Identifier: Apache-2.0
"""Loss scales beside the optimizer: Flax's ``DynamicScale``, and those of jmp.

Names, arguments and fields are theirs. A loss is multiplied by ``scale_loss``, gradients are
divided by ``static_loss_scale``, and the next scale is that of ``dynamic_loss_scale``, which is
handed a gradient of its own: 0, or infinity after a step that was not finite.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax._core import axes, checks, trees
from boostax._core.finite import all_finite
from boostax._core.handshake import assume_scaled
from boostax.precision.loss_scale import dynamic_loss_scale, scale_loss, static_loss_scale
from boostax.reduce.mean import all_reduce

PyTree = Any
# A dynamic scale's growth interval, growth factor, backoff factor and minimum.
Settings = tuple[float, float, float, float]
_LEAST, _MOST = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)
# Of NumPy's dtypes: Python's numbers would have a step compiled again when they are arrays.
_NONE, _FIRST = np.int32(0), np.float32(65536.0)


def scaled(tree: PyTree, scale: Any) -> PyTree:
    """Each leaf times the scale, in f32 or wider."""
    state = static_loss_scale(optax.identity(), scale).init(())
    return jax.tree.map(lambda x: scale_loss(x, state), tree)


def unscaled(tree: PyTree, scale: Any, axis_name: axes.AxisName | None = None) -> PyTree:
    """Gradients divided by the scale, in f32 or wider; with an axis their mean over it."""
    inner = optax.identity() if axis_name is None else all_reduce(axis_name)
    tx = static_loss_scale(inner, scale, skip_nonfinite=False)
    state = tx.init(tree)
    return tx.update(assume_scaled(tree, state), state)[0]


@functools.cache
def _adjust(period: int, growth: float, backoff: float, floor: float, ceiling: float) -> Any:
    names = ("growth_interval", "growth_factor", "backoff_factor", "min_scale", "max_scale")
    how: Any = dict(zip(names, (period, growth, backoff, floor, ceiling), strict=True))
    tx = dynamic_loss_scale(optax.identity(), init_scale=floor, **how)

    def step(scale: jax.Array, clean: jax.Array, finite: jax.Array) -> tuple[jax.Array, jax.Array]:
        first: Any = tx.init(jnp.zeros(()))
        state = first._replace(scale=scale, clean_steps=clean)
        told = assume_scaled(jnp.where(finite, 0.0, jnp.inf).astype(jnp.float32), state)
        new: Any = tx.update(told, state)[1]
        return new.scale, new.clean_steps

    return jax.jit(step)


def adjusted(
    scale: Any, clean: Any, finite: Any, settings: Settings, ceiling: float = _MOST
) -> tuple[jax.Array, jax.Array]:
    """The scale and the count of clean steps after one that was finite, or was not."""
    period, growth, backoff, floor = settings
    step = _adjust(int(period), float(growth), float(backoff), max(float(floor), _LEAST), ceiling)
    return step(jnp.asarray(scale, jnp.float32), jnp.asarray(clean, jnp.int32), finite)


class DynamicScaleResult(NamedTuple):
    """What ``DynamicScale.value_and_grad`` returns.

    Attributes:
      dynamic_scale: for the next step.
      finite: bool, whether all gradients are finite.
      aux: the loss, or ``(loss, aux)``; f32 or wider.
      grad: gradients, unscaled, in f32 or wider.
    """

    dynamic_scale: "DynamicScale"
    finite: jax.Array
    aux: Any
    grad: PyTree


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("fin_steps", "scale"),
    meta_fields=("growth_factor", "backoff_factor", "growth_interval", "minimum_scale"),
)
@dataclasses.dataclass(frozen=True)
class DynamicScale:
    """``flax.training.dynamic_scale.DynamicScale`` on boostax's loss scales.

    The loss is multiplied in f32 and returned as it was. With ``axis_name`` gradients are averaged
    by ``boostax.all_reduce``, and the mean is right inside ``jax.shard_map`` with checking too. As
    in Flax the scale grows at the clean step after ``growth_interval`` of them, and params are
    chosen by ``finite``: a scaler around the optimizer skips without that.

    Differs from Flax: a growth that would leave f32 is not taken, ``minimum_scale=None`` is the
    smallest normal f32, and the class is not known to ``flax.serialization``.

    Attributes:
      growth_factor: > 1.
      backoff_factor: in (0, 1).
      growth_interval: clean steps in a row before the one at which the scale grows.
      fin_steps: i32, clean steps in a row.
      scale: f32, by which the next loss is multiplied.
      minimum_scale: below which the scale does not fall.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> scale = boostax.compat.DynamicScale(scale=8.0)
      >>> for x in (1.0, jnp.inf):
      ...   scale, finite, loss, grad = scale.value_and_grad(lambda w: w**2)(x)
      ...   print(bool(finite), float(loss), float(grad), float(scale.scale))
      True 1.0 2.0 8.0
      False inf inf 4.0

    References:
      https://flax-linen.readthedocs.io/en/latest/api_reference/flax.training.html
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    fin_steps: Any = _NONE
    scale: Any = _FIRST
    minimum_scale: float | None = _LEAST

    def replace(self, **changes: Any) -> "DynamicScale":
        """The same with other fields."""
        return dataclasses.replace(self, **changes)

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: axes.AxisName | None = None,
    ) -> Callable[..., DynamicScaleResult]:
        """Like ``jax.value_and_grad``, of the scaled loss.

        Args:
          fun: the loss, a function of positional arguments.
          argnums: with respect to which of them.
          has_aux: whether ``fun`` returns ``(loss, aux)``.
          axis_name: replica axis (or axes) over which gradients are averaged.

        Returns:
          A function that returns a ``DynamicScaleResult``. Cost: one read of the gradients, and
          with ``axis_name`` an all-reduce of them.

        Raises:
          ValueError, TypeError: settings that ``dynamic_loss_scale`` refuses; an unbound axis.
        """

        def scaled_loss(*args: Any) -> tuple[jax.Array, Any]:
            out = fun(*args)
            loss, aux = out if has_aux else (out, None)
            return scaled(loss, self.scale), (trees.at_least_float32(loss), aux)

        @functools.wraps(fun)
        def run(*args: Any) -> DynamicScaleResult:
            if axis_name is not None:
                numbers = [argnums] if isinstance(argnums, int) else argnums
                chosen = {i % len(args) for i in numbers}
                local = functools.partial(axes.local_params, axis_name=axis_name)
                args = tuple(local(x) if i in chosen else x for i, x in enumerate(args))
            grad, (loss, aux) = jax.grad(scaled_loss, argnums, has_aux=True)(*args)
            grad = unscaled(grad, self.scale, axis_name)
            finite = all_finite(grad)
            # Flax grows at the clean step after an interval of them.
            interval, least = self.growth_interval + 1, self.minimum_scale or 0.0
            settings = interval, self.growth_factor, self.backoff_factor, least
            scale, clean = adjusted(self.scale, self.fin_steps, finite, settings)
            new = self.replace(fin_steps=clean, scale=scale)
            return DynamicScaleResult(new, finite, (loss, aux) if has_aux else loss, grad)

        return run


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """``jmp.NoOpLossScale``: no scale, with the methods of one.

    Example:
      >>> import boostax
      >>> boostax.compat.NoOpLossScale().scale(2.0)
      2.0

    References:
      https://github.com/google-deepmind/jmp
    """

    @property
    def loss_scale(self) -> int:
        """1."""
        return 1

    def scale(self, tree: PyTree) -> PyTree:
        """What it is given."""
        return tree

    def unscale(self, tree: PyTree) -> PyTree:
        """What it is given."""
        return tree

    def adjust(self, grads_finite: Any) -> "NoOpLossScale":
        """Itself."""
        del grads_finite
        return self


class _Scaling:
    """What jmp's loss scales have in common.

    Attributes:
      loss_scale: scalar by which a loss is multiplied.
    """

    loss_scale: Any

    def scale(self, tree: PyTree) -> PyTree:
        """A loss, or a tree of them, times the scale; f32 or wider."""
        return scaled(tree, self.loss_scale)

    def unscale(self, tree: PyTree) -> PyTree:
        """Gradients divided by the scale; f32 or wider."""
        return unscaled(tree, self.loss_scale)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Scaling):
    """``jmp.StaticLossScale`` by ``static_loss_scale``: a constant, multiplied in f32.

    Differs from jmp: results are f32 or wider whatever comes; leaves of integers are refused.

    Attributes:
      loss_scale: > 0.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> scale = boostax.compat.StaticLossScale(2.0**15)
      >>> float(scale.scale(jnp.float16(2.5))), float(scale.unscale(jnp.float32(2.0**15)))
      (81920.0, 1.0)

    References:
      https://github.com/google-deepmind/jmp
    """

    loss_scale: Any

    def adjust(self, grads_finite: Any) -> "StaticLossScale":
        """Itself."""
        del grads_finite
        return self


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("loss_scale", "counter"),
    meta_fields=("period", "factor", "min_loss_scale"),
)
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Scaling):
    """``jmp.DynamicLossScale`` by ``dynamic_loss_scale``.

    Differs from jmp: ``min_loss_scale`` is a number, which ``jax.jit`` keeps; the next scale is f32
    whatever the first one is; results are f32 or wider; leaves of integers are refused; a minimum
    of 0 is the smallest normal f32. A scaler around the optimizer skips by itself.

    Attributes:
      loss_scale: floating scalar.
      counter: i32, clean steps since the scale changed.
      period: of clean steps, after which the scale grows.
      factor: > 1, by which it grows, and shrinks after a step that was not finite.
      min_loss_scale: below which it does not fall.

    Raises:
      ValueError, TypeError: from ``adjust``, settings that ``dynamic_loss_scale`` refuses.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> scale = boostax.compat.DynamicLossScale(jnp.float32(8.0), period=1)
      >>> [float(scale.adjust(jnp.bool_(finite)).loss_scale) for finite in (True, False)]
      [16.0, 4.0]

    References:
      https://github.com/google-deepmind/jmp
    """

    loss_scale: Any
    counter: Any = _NONE
    period: int = 2000
    factor: float = 2
    min_loss_scale: Any = 1.0

    def __post_init__(self) -> None:
        for name in ("loss_scale", "min_loss_scale"):
            # JAX puts anything here while it looks at the structure.
            dtype = getattr(getattr(self, name), "dtype", jnp.float32)
            if not jnp.issubdtype(dtype, jnp.floating):
                warnings.warn(f"Expected floating type for {name}, got {dtype}", stacklevel=3)
        object.__setattr__(self, "min_loss_scale", float(self.min_loss_scale))

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """For the next step, from whether this one's gradients are finite."""
        checks.require_scalar("DynamicLossScale", "grads_finite", grads_finite)
        settings = self.period, self.factor, 1 / self.factor, self.min_loss_scale
        scale, counter = adjusted(self.loss_scale, self.counter, grads_finite, settings)
        return dataclasses.replace(self, loss_scale=scale, counter=counter)
