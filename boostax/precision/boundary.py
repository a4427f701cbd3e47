# SPDX-License-Identifier: Apache-2.0
"""Change the scale of a cotangent where the backward pass goes from one group to another.

Let ``s_k`` be the scale of group ``k``, by which every cotangent inside the group is multiplied. A
value computed in group ``o`` and used in group ``i`` receives its cotangent multiplied by ``s_i``,
and must hand it on multiplied by ``s_o``. So the cotangent is multiplied by ``s_o / s_i``, a power
of two, which is exact. The forward pass is unchanged.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from boostax._core import checks, handshake, trees
from boostax._core.groups import few
from boostax.precision.group_scale import group_numbers, group_scales

PyTree = Any
Group = int | jax.Array


# A custom_jvp, not a custom_vjp: JAX transposes the product itself, which keeps the value's varying
# type, its batch dimension, and its position in a scan or a remat.
@jax.custom_jvp
def _cross(x: jax.Array, ratio: jax.Array) -> jax.Array:
    del ratio
    return x


@_cross.defjvp
def _cross_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, Any]
) -> tuple[jax.Array, jax.Array]:
    (x, ratio), tangent = primals, tangents[0]
    # The product is in f32, because the ratio itself can exceed the range of f16.
    wide = trees.at_least_float32(tangent)
    return x, (wide * ratio.astype(wide.real.dtype)).astype(tangent.dtype)


def scale_boundary(x: PyTree, opt_state_or_scales: PyTree, outer: Group, inner: Group) -> PyTree:
    r"""Return ``x`` unchanged, and change the scale of its cotangent between two groups.

    In the backward pass the cotangent, which arrives multiplied by :math:`s_\text{inner}`, leaves
    multiplied by :math:`s_\text{outer}`:

    .. math:: \bar x_\text{outer} = \bar x_\text{inner} \cdot s_\text{outer} / s_\text{inner}.

    Put it on *every* edge between groups: an activation that enters the next group, a residual
    stream to which a later group adds, a weight that is used in another group. The loss is in the
    last group. ``check_boundaries`` finds missing boundaries.

    Args:
      x: tree of arrays; integers stay unchanged.
      opt_state_or_scales: f32 ``[groups]``, or an optimizer state that holds a
        ``GroupLossScaleState``; with ``None``, or a state without one, nothing is scaled.
      outer: the group in which ``x`` is computed, counted from 0; may be a traced integer.
      inner: the group in which ``x`` is used.

    Returns:
      ``x``. Cost: one product per element in the backward pass, which fuses with its neighbours; no
      memory, no collective.

    Raises:
      ValueError: a group does not exist.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> scales = jnp.array([64.0, 8.0])
      >>> jax.grad(lambda x: 8.0 * boostax.precision.scale_boundary(x, scales, 0, 1))(1.0)
      Array(64., dtype=float32, weak_type=True)

    References:
      ``mindspore.boost.GroupLossScaleManager``: ``m(x, outer, inner)``, with groups from 1.
    """
    who = "scale_boundary"
    is_scales = isinstance(opt_state_or_scales, (jax.Array, np.ndarray))
    scales = opt_state_or_scales if is_scales else group_scales(opt_state_or_scales)
    if scales is None:
        return x
    count = scales.shape[0]
    allowed, hint = f"a group from 0 to {count - 1}", "The first of the forward pass is 0."
    for argument, group in (("outer", outer), ("inner", inner)):
        if not isinstance(group, Tracer):
            number = checks.integer(who, argument, group, allowed, hint)
            fits = not isinstance(group, bool) and 0 <= number < count
            checks.require(who, argument, group, allowed, fits, hint)
    handshake.crossed(scales)
    wide = jnp.asarray(scales, jnp.float32)
    ratio = wide[outer] / wide[inner]

    def cross(leaf: jax.Array) -> jax.Array:
        return _cross(leaf, ratio) if trees.is_inexact(jnp.result_type(leaf)) else leaf

    return jax.tree.map(cross, x)


def check_boundaries(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    labels: PyTree,
    *,
    has_aux: bool = False,
    rtol: float = 1e-5,
    draws: int = 2,
    **kwargs: Any,
) -> float:
    """Prove a loss function's boundaries: the unscaled gradients must not depend on the scales.

    A power of two is drawn for every group; the gradients at these scales are unscaled and compared
    with those at scale 1. An edge with a missing or reversed boundary multiplies the gradients
    behind it by a ratio of scales, and the error names the leaves. A zero gradient cannot show an
    error. Check in f32: in f16 the scales decide which gradients underflow.

    Args:
      loss_fn: ``loss_fn(params, batch, *, scales, **kwargs)``.
      params: tree of arrays.
      batch: passed to the loss.
      labels: as in ``group_loss_scale``.
      has_aux: whether the loss returns ``(loss, aux)``.
      rtol: allowed difference, as a share of the largest element of the leaf.
      draws: how often scales are drawn, from fixed seeds.
      **kwargs: passed to the loss: ``key=``, ``model_state=``.

    Returns:
      The largest relative difference; 0 means that all bits are equal.

    Raises:
      ValueError: a leaf's gradients depend on the scales.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> def loss_fn(params, x, *, scales):
      ...   hidden = boostax.precision.scale_boundary(jnp.tanh(x * params["body"]), scales, 0, 1)
      ...   return jnp.mean(hidden * params["head"])
      >>> params = {"body": jnp.float32(0.5), "head": jnp.float32(2.0)}
      >>> labels = {"body": 0, "head": 1}
      >>> boostax.precision.check_boundaries(loss_fn, params, jnp.arange(4.0), labels)
      0.0
    """
    who = "check_boundaries"
    checks.positive_int(who, "draws", draws, "2 is the default.")
    checks.number(who, "rtol", rtol, "not negative", lambda x: x >= 0, "1e-5 is the default.")
    numbers, count = group_numbers(who, labels, params)

    @jax.jit
    def gradients(scales: jax.Array) -> list[jax.Array]:
        def scaled(params: PyTree) -> jax.Array:
            result = loss_fn(params, batch, scales=scales, **kwargs)
            loss = trees.at_least_float32(result[0] if has_aux else result)
            return loss * scales[-1].astype(loss.dtype)

        grads = jax.tree.leaves(trees.at_least_float32(jax.grad(scaled)(params)))
        pairs = zip(grads, numbers, strict=True)
        return [g / scales[number].astype(g.real.dtype) for g, number in pairs]

    drawn = [jnp.ones(count), *(_drawn(seed, count) for seed in range(draws))]
    plain, *others = (jax.device_get(gradients(scales)) for scales in drawn)
    columns = zip(trees.names(params), plain, *others, strict=True)
    worst = {path: max(_difference(x, other) for other in rest) for path, x, *rest in columns}
    wrong = [path for path, off in worst.items() if off > rtol]
    if wrong:
        raise ValueError(
            f"{who}: loss_fn must have a scale_boundary on every edge between groups, got "
            f"gradients that depend on the scales at {few(wrong)}. The fault lies between the last "
            "of these groups and the loss."
        )
    return max(worst.values(), default=0.0)


def _drawn(seed: int, count: int) -> jax.Array:
    """Draw powers of two, distinct for up to 25 groups: equal scales would hide an error."""
    powers = np.random.default_rng(seed).permutation(count) % 25
    return jnp.asarray(np.exp2(powers - min(count, 25) // 2), jnp.float32)


def _difference(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Return the largest difference as a share of the largest element; inf if there is a NaN."""
    size, off = (np.max(np.abs(x), initial=0) for x in (one, one - other))
    share = off / size if np.isfinite(off) and size > 0 else np.inf
    return 0.0 if off == 0 else float(share)
