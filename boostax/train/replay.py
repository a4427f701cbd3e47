# SPDX-License-Identifier: Apache-2.0
"""The gradient of one micro-batch, computed on two replicas and compared.

Each gradient is an iteration of one loop, so both replicas run the same compiled code on the same
numbers. The gradient of the step itself is fused with other code, so its bits could differ by
rounding.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from boostax._core import axes, checks, interpret, placement, trees
from boostax._core.copies import sums
from boostax.accumulate.microbatch import split

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """The gradient function and its batch, for ``boostax.precision.check_replicas``.

    Attributes:
      oracle: the gradient function.
      batch: the batch of the call.
      given: the keywords of the call.
      seen: a function from the stored params to the params that the loss gets.
    """

    oracle: Any
    batch: PyTree
    given: dict[str, Any]
    seen: Callable[[PyTree], PyTree] = lambda params: params

    def at(self, place: Callable[[PyTree], PyTree]) -> "Replay":
        """Return the replay for other params, which ``place`` converts."""
        return dataclasses.replace(self, seen=lambda params: self.seen(place(params)))

    def said(self, params: PyTree) -> tuple[str, str]:
        """Return the types of the batch and the program of the loss, as text."""
        types = [(name, jax.typeof(x).str_short()) for name, x in trees.named(self.batch)]
        program = jax.make_jaxpr(self._mapped())(self.seen(params))
        return str(types), str(program)

    def __call__(self, params: PyTree) -> tuple[list[str], Callable[[], jax.Array]]:
        """Return the names of the gradient's leaves, and a function that compares them.

        The function returns i32 ``[leaves]``, the replica whose gradient differs, or -1.
        """
        params, run = self.seen(params), self._mapped()
        run = run if self.oracle.mesh is None else placement.outside(run)
        return trees.names(_trained(params)), lambda: run(params)

    def _mapped(self) -> Callable[[PyTree], jax.Array]:
        if self.oracle.mesh is None:
            return lambda params: self._compared(params, self.batch, self.given)
        run = self.oracle._mapped(self._compared, PartitionSpec())
        return lambda params: run(params, self.batch, self.given)

    def _compared(self, params: PyTree, batch: PyTree, given: dict[str, Any]) -> jax.Array:
        """Compare the gradients of one replica with its neighbours'."""
        names, params = self.oracle.names, axes.to_varying(trees.aside(params), self.oracle.names)
        if not names or axes.size(names) == 1:
            return jnp.full(len(jax.tree.leaves(_trained(params))), -1, jnp.int32)
        key, rest = given.get("key"), {k: x for k, x in given.items() if k != "key"}
        slices, _, axis = split(batch, self.oracle.count, "check_replicas")
        first = jax.tree.map(lambda x: lax.index_in_dim(x, 0, axis, keepdims=False), slices)
        mine = first, None if key is None else jax.random.key_data(key)
        count = axes.size(names)
        onward = [(i, (i + 1) % count) for i in range(count)]
        sent = lambda tree: jax.tree.map(lambda x: lax.ppermute(x, names, onward), tree)  # noqa: E731

        def turn(carry: Any, one: Any) -> tuple[Any, jax.Array]:
            rows, data = one
            keyed = {} if key is None else {"key": _key(data, key)}
            grads = jax.grad(lambda p: self._loss(p, params, rows, rest | keyed))(_trained(params))
            return carry, sums(jax.tree.leaves(grads))

        mine = axes.to_varying(mine, names)
        both = jax.tree.map(lambda *x: jnp.stack(x), mine, sent(mine))
        _, found = lax.scan(turn, (), both)
        unlike = jnp.any(found[1] != sent(found[0]), -1)
        # Row r compares replicas r - 1 and r, so a faulty replica is in two rows.
        pairs = axes.gather(unlike, names)
        both_sides = pairs & jnp.roll(pairs, -1, 0)
        at = jnp.argmax(jnp.where(both_sides.any(0), both_sides, pairs), 0)
        return jnp.where(pairs.any(0), at, -1).astype(jnp.int32)

    def _loss(self, trained: PyTree, params: PyTree, rows: PyTree, given: Any) -> jax.Array:
        """Return a scalar that depends on the trained params as the loss does."""
        result = lambda trained: self.oracle._loss_and_aux(trained, params, rows, given)  # noqa: E731
        program = jax.make_jaxpr(result)(trained)
        sent = axes.of_program(program) & {*self.oracle.names}
        alone = not sent and not interpret.has(program, "axis_index")
        allowed = "one that computes on its rows alone with replay="
        hint = "Leave replay= out: its result depends on which replica computes it."
        got = "one that communicates or reads its index"
        checks.require("check_replicas", "loss_fn", got, allowed, alone, hint)
        loss, _ = result(trained)
        # Terms are summed without division by their counts.
        return jnp.stack([x for x, _ in loss.values()]).sum() if isinstance(loss, dict) else loss


def _trained(params: PyTree) -> PyTree:
    return trees.masked(params, jax.tree.map(lambda x: trees.is_inexact(x.dtype), params))


def _key(data: jax.Array, like: jax.Array) -> jax.Array:
    if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return data
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
