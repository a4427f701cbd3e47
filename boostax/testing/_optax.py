# SPDX-License-Identifier: Apache-2.0
"""Laws of Optax and of Python: what both ask of any transformation, whatever it does."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import optax

from boostax.testing._case import (
    Case,
    applied,
    assert_same,
    even_params,
    example_grads,
    example_params,
    follow,
    laws_in,
    optimizer,
)

PyTree = Any


def survives_what_python_does_to_objects(case: Case) -> None:
    """Promise 1: mapped, copied, pickled, rebuilt from its fields: the same program."""
    tx, params = case.single(), even_params()
    grads = [example_grads(params, seed) for seed in range(case.calls)]

    trained = lambda tx, params: follow(applied(tx), (params, tx.init(params)), grads)  # noqa: E731
    program = jax.jit(lambda p: trained(tx, p)).lower(params).as_text()
    rebuilt = {
        "jax.tree.map": jax.tree.map(lambda f: f, tx),
        "copy.copy": copy.copy(tx),
        "copy.deepcopy": copy.deepcopy(tx),
        "_replace": tx._replace(init=tx.init),
        "its fields": type(tx)(*tx),
        "an Optax pair": optax.GradientTransformationExtraArgs(tx.init, tx.update),
    }
    for name, again in rebuilt.items():
        # Equal programs: a gate that was lost would still give equal numbers.
        found = jax.jit(lambda p, again=again: trained(again, p)).lower(params).as_text()
        assert found == program, f"{name}: it computes something else"


def updates_have_the_dtypes_of_the_params(case: Case) -> None:
    """Promise 3: so that ``params + updates`` has them too, in every wrapper that selects."""
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        tx, params = case.single(), example_params(dtype)
        finite = optax.apply_if_finite(tx, 3)
        for name, each in {"alone": tx, "apply_if_finite": finite}.items():
            state = each.init(params)
            updates, _ = jax.eval_shape(each.update, example_grads(params, 0), state, params)
            found, wanted = ([x.dtype for x in jax.tree.leaves(y)] for y in (updates, params))
            assert found == wanted, f"{dtype.__name__}, {name}: updates have other dtypes"


def init_takes_shapes(case: Case) -> None:
    """Promise 1: of ``jax.ShapeDtypeStruct`` it makes a state like that of arrays."""
    tx, params = _made(case), example_params(jnp.bfloat16)
    shapes = jax.eval_shape(lambda: params)
    kinds = lambda state: [(x.shape, x.dtype) for x in jax.tree.leaves(state)]  # noqa: E731
    made, expected = tx.init(shapes), tx.init(params)
    assert jax.tree.structure(made) == jax.tree.structure(expected), "another structure"
    assert kinds(made) == kinds(expected), "other types"


def tree_map_params_finds_what_is_like_the_params(case: Case) -> None:
    """Promise 1: ``optax.tree.map_params`` goes through the state and leaves the rest alone."""
    tx, params = _made(case, optax.sgd(0.1, momentum=0.9)), even_params()
    state = tx.init(params)
    seen: list[Any] = []
    same = optax.tree.map_params(tx, lambda x: seen.append(x) or x, state)
    assert_same(same, state, "mapped by the identity")
    assert len(seen) >= len(params), f"{len(seen)} leaves"


def takes_trees_without_arrays(case: Case) -> None:
    """Promise 3: an empty tree, ``None``, and Python's own numbers."""
    tx = case.single()

    def updated(params: PyTree) -> Any:
        state, updates = tx.init(params), params
        for _ in range(case.calls):
            updates, state = tx.update(params, state, params)
        return updates, state

    for params in ({}, {"a": None, "b": ()}):
        assert jax.tree.structure(updated(params)[0]) == jax.tree.structure(params)
    plain = {"a": 1.0, "b": -2.0}
    arrays = jax.tree.map(jnp.float32, plain)
    assert_same(updated(plain), updated(arrays), "Python's numbers and arrays")


def _made(case: Case, inner: Any = None) -> optax.GradientTransformation:
    """For laws of ``init``, which needs no mapped function: as it is within one."""
    return case.make(inner or optimizer(), "data" if case.distributed else None)


OPTAX_LAWS = laws_in(globals())
INIT_LAWS = {init_takes_shapes.__name__, tree_map_params_finds_what_is_like_the_params.__name__}
