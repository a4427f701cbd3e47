# SPDX-License-Identifier: Apache-2.0
"""Find the order in which a function reads its params by tracing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from boostax._core import trees
from boostax._core.interpret import flow, of_data, require_readable

PyTree = Any
# Which leaves of the params a value is computed from, or None once the data have a part in it.
Origin = frozenset[int] | None


def forward_order(
    fn: Callable[..., Any], params: PyTree, /, *args: PyTree, **kwargs: PyTree
) -> list[str]:
    """Return path names of the params in the order in which ``fn`` reads them.

    A leaf is read where it first meets data: a value that depends on ``args`` or ``kwargs``, by a
    product, a sum, a lookup. A cast, a reshape, a slice or any other arithmetic among params alone
    is not yet a reading, so a precision policy that casts them all ahead changes nothing. Loops,
    branches, ``jit``, ``checkpoint``, ``custom_vjp`` and ``shard_map`` are looked into.

    Hand the result to ``prefix_groups`` where names do not tell the order of layers.

    Args:
      fn: the loss, or the forward pass alone: any function that JAX can trace.
      params: a tree of arrays or of ``jax.ShapeDtypeStruct``.
      *args: the data. Arrays and ``jax.ShapeDtypeStruct`` are traced, whatever has no shape (a
        bool, a string, a number) is handed on as it is.
      **kwargs: like ``args``.

    Returns:
      One name per leaf, such as ``block_0/kernel``. Leaves read by the same operation keep the
      order of the tree; leaves never read stand last, in the order of the tree. Params raveled into
      one vector are all read where the first of them is. Cost: one trace; nothing is compiled.

    Raises:
      ValueError: ``args`` and ``kwargs`` hold no array: data that ``fn`` closes over cannot be told
        from params.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> params = {"head": jnp.ones((4, 1)), "body": jnp.ones((2, 4)), "stem": jnp.ones((3, 2))}
      >>> f = lambda p, x: jnp.tanh(jnp.tanh(x @ p["stem"]) @ p["body"]) @ p["head"]
      >>> boostax.freeze.forward_order(f, params, jnp.ones((8, 3)))
      ['stem', 'body', 'head']
    """
    names = [trees.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    call = lambda params, given, named: fn(params, *given, **named)  # noqa: E731
    hint = "Pass the batch to forward_order; do not let the function close over it."
    require_readable()
    program, data = of_data("forward_order", call, params, (args, kwargs), "arrays", hint)
    read: dict[int, None] = {}

    def meet(origins: Sequence[Origin]) -> Origin:
        """Return the origin of what these give; params are read if data are among them."""
        leaves = frozenset[int]().union(*(x for x in origins if x is not None))
        if None not in origins:
            return leaves
        read.update(dict.fromkeys(sorted(leaves)))
        return None

    # Which weights a branch takes is data too, and a carry of zeros soon depends on data.
    origins: list[Origin] = [frozenset([i]) for i in range(len(names))]
    computed = lambda eqn, found: [meet(found)] * len(eqn.outvars)  # noqa: E731
    flow(program, [*origins, *[None] * data], computed, meet, nothing=frozenset())
    return [names[i] for i in [*read, *(i for i in range(len(names)) if i not in read)]]
