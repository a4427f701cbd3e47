# SPDX-License-Identifier: Apache-2.0
"""Training the coordinates in a subspace with any Optax optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, trees
from boostax._core.describe import Holds, Stepped, describe
from boostax._core.extras import elsewhere
from boostax.subspace import components
from boostax.subspace.components import Components

PyTree = Any
_WHO = "subspace_params"


class SubspaceParamsState(NamedTuple):
    """State of ``subspace_params``.

    Attributes:
      basis: tree like the params of ``(k, *leaf.shape)``, or ``Int8Components``.
      coordinates: ``(k,)``, f32 or wider: how far the params have moved along each.
      inner_state: state of the optimizer, whose params are the coordinates.
    """

    basis: Components
    coordinates: jax.Array
    inner_state: Any
    holds = Holds(("basis", "coordinates"), basis="basis")

    def with_basis(self, basis: Any) -> "SubspaceParamsState":
        """The state with another basis, and moments of the old coordinates set to zero."""
        rows, _ = components.exchanged("replace_basis", self.basis, basis)
        fresh = lambda x: jnp.zeros_like(x) if jnp.shape(x)[-1:] == (k,) else x  # noqa: E731
        k = self.coordinates.size
        return SubspaceParamsState(
            rows, jnp.zeros_like(self.coordinates), jax.tree.map(fresh, self.inner_state)
        )


def subspace_params(
    inner: optax.GradientTransformation,
    basis: Any,
    *,
    dtype: Any = None,
    axis_name: axes.AxisName | None = None,
    shard_axes: axes.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Train ``k`` coordinates in the span of a basis instead of the params.

    .. math:: w = w_0 + P^\top a, \qquad a \leftarrow a + \text{inner}(P g; a)

    ``inner`` sees a vector of k numbers as its params: its moments are k numbers, a weight decay
    pulls towards where the params stood, and ``optax.lbfgs()`` works as it is. With SGD this is
    P-SGD. Begun at ``basis.mean``, with a small weight decay, it is trainable weight averaging.

    Args:
      inner: any Optax optimizer.
      basis: as in ``dim_reduce``.
      dtype: in which the basis is kept, as in ``dim_reduce``.
      axis_name: replica axis, or axes, over which gradients are local: only k numbers are averaged,
        instead of all gradients. ``None`` after a reduction.
      shard_axes: axes over which leaves are sharded (FSDP) inside ``jax.shard_map``.

    Returns:
      A transformation with a ``SubspaceParamsState``. ``inner`` is given ``value``, ``grad`` and
      ``value_fn`` of the coordinates where ``update`` is given ``value`` and ``value_fn``. Cost: k
      copies of the params in ``dtype``, read twice, and one of the params for a moment; over
      replicas ``4k`` bytes.

    Raises:
      ValueError, TypeError: an argument out of range, a basis that does not fit the params,
        gradients that are reduced already.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.subspace.subspace_params(optax.sgd(0.5), jnp.eye(2, 4))
      >>> w = jnp.zeros(4)
      >>> updates, state = tx.update(-jnp.ones(4), tx.init(w), w)
      >>> updates.tolist(), state.coordinates.tolist()
      ([0.5, 0.5, 0.0, 0.0], [0.5, 0.5])

    References:
      Li et al., https://arxiv.org/abs/2103.11154 (P-SGD); Li et al., Trainable Weight Averaging,
      https://arxiv.org/abs/2205.13104.
    """
    tx = checks.transformation(_WHO, "inner", inner)
    names = axes.canonical(_WHO, axis_name)
    shards = axes.canonical(_WHO, shard_axes)
    kept_in = components.check_dtype(_WHO, dtype, shards)

    def init_fn(params: PyTree) -> SubspaceParamsState:
        rows = components.given(_WHO, basis, params, kept_in).rows
        zeros = lambda: jnp.zeros(  # noqa: E731
            components.count(rows), components.coordinate_dtype(rows)
        )
        return SubspaceParamsState(rows, zeros(), tx.init(zeros()))

    @describe(_WHO, "coordinates", names, inner={"inner_state": tx})
    def update_fn(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Stepped:
        trees.require_gradients(updates, _WHO)
        axes.require_local(updates, names, _WHO)
        here = state.coordinates
        gradient = components.project(state.basis, trees.at_least_float32(updates), shards, _WHO)
        gradient = axes.mean(gradient.astype(here.dtype), names)

        def lifted(a: jax.Array) -> PyTree:
            # Varying from here on: a gradient in the coordinates is summed as one of k numbers.
            step = components.lift(state.basis, axes.to_varying(a - here, names))
            return jax.tree.map(
                lambda p, d: (trees.at_least_float32(p) + d).astype(p.dtype), params, step
            )

        def mean(value: Any) -> jax.Array:
            return axes.mean(trees.at_least_float32(jnp.asarray(value)), names)

        if extra.get("value") is not None:
            extra["value"] = mean(extra["value"])
        if "grad" in extra or extra.get("value_fn") is not None:
            extra["grad"] = gradient
        if params is not None:
            extra = elsewhere(extra, lifted, mean)
        move, inner_state = tx.update(gradient, state.inner_state, here, **extra)
        after: Any = optax.apply_updates(here, move)
        # What the coordinates really moved by, so that no rounding parts them from the params.
        total = components.lift(state.basis, after - here)
        return trees.as_updates(total, params), SubspaceParamsState(
            state.basis, after, trees.cast_like(inner_state, state.inner_state)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
