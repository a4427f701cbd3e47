"""Laws of Optax and of Python: what both ask of any transformation, whatever it does."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax.testing._case import (
    Case,
    assert_same,
    even_params,
    example_grads,
    example_params,
    laws_in,
)
from boostax.train.apply import apply_gradients

PyTree = Any


def survives_what_python_does_to_objects(case: Case) -> None:
    """Section 1: mapped, copied, rebuilt from its fields, held by an object: the same to the bit."""
    tx, params = case.single(), even_params()
    grads = [example_grads(params, seed) for seed in range(case.calls)]

    def trained(tx: Any, params: PyTree) -> tuple[PyTree, Any]:
        state = tx.init(params)
        for each in grads:
            params, state = apply_gradients(tx, each, state, params)
        return params, state

    program = str(jax.make_jaxpr(lambda p: trained(tx, p))(params))
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
        found = str(jax.make_jaxpr(lambda p, again=again: trained(again, p))(params))
        assert found == program, f"{name}: it computes something else"


def updates_have_the_dtypes_of_the_params(case: Case) -> None:
    """Section 3: so that ``params + updates`` has them too, in every wrapper that selects."""
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        tx, params = case.single(), example_params(dtype)
        finite = optax.apply_if_finite(tx, 3)
        for name, each in {"alone": tx, "apply_if_finite": finite}.items():
            state = each.init(params)
            for seed in range(case.calls):
                grads = example_grads(params, seed)
                updates, state = jax.jit(each.update)(grads, state, params)
                assert [x.dtype for x in jax.tree.leaves(updates)] == [
                    x.dtype for x in jax.tree.leaves(params)
                ], f"{dtype.__name__}, {name}: updates have other dtypes than the params"


def init_takes_shapes(case: Case) -> None:
    """Section 1: of ``jax.ShapeDtypeStruct`` it makes a state like that of arrays."""
    tx, params = case.single(), example_params(jnp.bfloat16)
    shapes = jax.eval_shape(lambda: params)
    kinds = lambda state: [(x.shape, x.dtype) for x in jax.tree.leaves(state)]  # noqa: E731
    made, expected = tx.init(shapes), tx.init(params)
    assert jax.tree.structure(made) == jax.tree.structure(expected), "another structure"
    assert kinds(made) == kinds(expected), "other types"


def tree_map_params_finds_what_is_like_the_params(case: Case) -> None:
    """Section 1: ``optax.tree.map_params`` goes through the state and leaves the rest alone."""
    tx, params = case.single(optax.sgd(0.1, momentum=0.9)), even_params()
    state = tx.init(params)
    same = optax.tree.map_params(tx, lambda x: x, state)
    assert_same(same, state, "mapped by the identity")
    seen: list[Any] = []
    optax.tree.map_params(tx, lambda x: seen.append(np.shape(x)) or x, state)
    assert all(any(x[-len(p.shape) :] == p.shape for p in params.values()) for x in seen), seen


def takes_trees_without_arrays(case: Case) -> None:
    """Section 3: an empty tree, ``None``, and Python's own numbers."""
    tx = case.single()
    for params in ({}, {"a": None, "b": ()}):
        state, updates = tx.init(params), params
        for _ in range(case.calls):
            updates, state = tx.update(params, state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
    plain, arrays = {"a": 1.0, "b": -2.0}, {"a": jnp.float32(1.0), "b": jnp.float32(-2.0)}
    results = []
    for params in (plain, arrays):
        state, updates = tx.init(params), params
        for _ in range(case.calls):
            updates, state = tx.update(params, state, params)
        results.append((updates, state))
    assert_same(*results, "Python's numbers and arrays")


OPTAX_LAWS = laws_in(globals())
