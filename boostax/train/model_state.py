# SPDX-License-Identifier: Apache-2.0
"""BatchNorm statistics for params that were moved without looking at them."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from boostax.accumulate.aux import as_aux

PyTree = Any


def reestimate_model_state(
    loss_fn: Callable[..., Any],
    params: PyTree,
    model_state: PyTree,
    batches: Iterable[PyTree],
    *,
    key: jax.Array | None = None,
) -> PyTree:
    r"""Running averages made anew: the mean over batches of what the params make of each.

    After a line search, an average of weights or a jump in a subspace, running averages belong to
    other params. A layer with momentum :math:`m` returns :math:`m s + (1 - m) b` for its old state
    :math:`s` and the batch's own statistic :math:`b`, so two calls, with zeros and with ones, tell
    :math:`b` whatever the momentum is.

    Args:
      loss_fn: as in ``make_train_step``, returning ``(loss, Aux(model_state=...))``.
      params: what to make statistics for.
      model_state: of the model; floating leaves are running averages.
      batches: some dozens are enough.
      key: handed to ``loss_fn``, another one for each batch.

    Returns:
      A tree like ``model_state``. Integer leaves and keys stay, and so does an average that the
      loss does not update. Cost: two forward passes for each batch.

    Raises:
      ValueError: no batches, or a loss that returns no ``Aux.model_state``.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> def loss(w, x, model_state):
      ...   new = 0.9 * model_state + 0.1 * x.mean()
      ...   return jnp.mean((x - w) ** 2), boostax.Aux(model_state=new)
      >>> batches = [jnp.array([1.0, 3.0]), jnp.array([5.0, 7.0])]
      >>> new = boostax.train.reestimate_model_state(loss, 0.0, jnp.float32(9.0), batches)
      >>> round(float(new), 4)
      4.0
    """
    who = "reestimate_model_state"

    def floating(x: Any) -> bool:
        return jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)

    def filled(number: float) -> PyTree:
        return jax.tree.map(lambda x: jnp.full_like(x, number) if floating(x) else x, model_state)

    def after(batch: PyTree, number: float, key: jax.Array | None) -> PyTree:
        given = {} if key is None else {"key": key}
        result = loss_fn(params, batch, model_state=filled(number), **given)
        new = as_aux(result[1]).model_state if isinstance(result, tuple) else None
        if new is None:
            raise ValueError(
                f"{who}: loss_fn must return (loss, Aux(model_state=...)), got no model state. "
                "There is nothing to make anew."
            )
        return new

    @jax.jit
    def own(batch: PyTree, key: jax.Array | None) -> PyTree:
        """Shares of the batch's own statistics, and those statistics times the shares."""
        zeros, ones = after(batch, 0.0, key), after(batch, 1.0, key)
        shares = jax.tree.map(lambda z, o: 1 - (o - z) if floating(z) else z, zeros, ones)
        return zeros, shares

    total: PyTree = None
    count = 0
    for index, batch in enumerate(batches):
        found = own(batch, None if key is None else jax.random.fold_in(key, index))
        total = found if total is None else jax.tree.map(_add, total, found)
        count += 1
    if not count:
        raise ValueError(f"{who}: batches must not be empty, got none. Some dozens are enough.")
    zeros, shares = total

    def mean(old: Any, z: jax.Array, share: jax.Array) -> jax.Array:
        if not floating(old):
            return jnp.asarray(old)
        known = share > 1e-6 * count
        # Momentum is the same for all batches, so the ratio of the sums is the mean of the ratios.
        return jnp.where(known, z / jnp.where(known, share, 1), old).astype(jnp.asarray(old).dtype)

    return jax.tree.map(mean, model_state, zeros, shares)


def _add(x: Any, y: Any) -> Any:
    return x + y if jnp.issubdtype(x.dtype, jnp.floating) else x
