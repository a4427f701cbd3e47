# SPDX-License-Identifier: Apache-2.0
"""Find the order in which a function reads its params by tracing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from boostax._core import interpret, trees
from boostax._core.types import PyTree

# The leaves of the params from which a value is computed, or None if the value depends on data.
Origin = frozenset[int] | None


def forward_order(
    fn: Callable[..., PyTree], params: PyTree, /, *args: PyTree, **kwargs: PyTree
) -> list[str]:
    """Return path names of the params in the order in which ``fn`` reads them.

    A leaf counts as read where a product, a sum or a lookup first combines the leaf with data: a
    value that depends on ``args`` or ``kwargs``. Operations on only params (a cast, a reshape, a
    slice) do not count. So a precision policy that first casts all params does not change the
    order. The bodies of loops, branches, ``jit``, ``checkpoint``, ``custom_vjp`` and ``shard_map``
    are searched, too.

    Pass the result to ``prefix_groups`` if the layers' names are not in forward order.

    Args:
      fn: the loss or the forward pass: any function that JAX can trace.
      params: a tree of arrays or of ``jax.ShapeDtypeStruct``.
      *args: the data. Arrays and ``jax.ShapeDtypeStruct`` are traced; an object without a shape (a
        bool, a string, a number) reaches ``fn`` unchanged.
      **kwargs: like ``args``.

    Returns:
      One name per leaf, such as ``block_0/kernel``. Leaves that the same operation reads are
      in the order of the tree. Leaves that are never read are last, in the order of the tree.
      Params that are raveled into one vector count as read together. Cost: one trace; nothing is
      compiled.

    Raises:
      ValueError: ``args`` and ``kwargs`` have no array; arrays in the closure of ``fn`` would be
        constants of the trace.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> params = {"head": jnp.ones((4, 1)), "body": jnp.ones((2, 4)), "stem": jnp.ones((3, 2))}
      >>> f = lambda p, x: jnp.tanh(jnp.tanh(x @ p["stem"]) @ p["body"]) @ p["head"]
      >>> boostax.freeze.forward_order(f, params, jnp.ones((8, 3)))
      ['stem', 'body', 'head']
    """
    names = trees.names(params)
    hint = "Pass the batch to forward_order as an argument, not in the closure of the function."
    program, data = interpret.of_data("forward_order", fn, params, (args, kwargs), "arrays", hint)
    read: dict[int, None] = {}

    def meet(origins: Sequence[Origin]) -> Origin:
        """Return the origin of an operation's result; record params that it combines with data."""
        leaves = frozenset[int]().union(*(x for x in origins if x is not None))
        if None not in origins:
            return leaves
        read.update(dict.fromkeys(sorted(leaves)))
        return None

    # A constant has an empty origin, not ``None``: it does not depend on data. For example, the
    # carry of a loop often starts from zeros.
    origins: list[Origin] = [frozenset([i]) for i in range(len(names))]
    interpret.flow(program, [*origins, *[None] * data], None, meet, nothing=frozenset())
    return [names[i] for i in [*read, *(i for i in range(len(names)) if i not in read)]]
