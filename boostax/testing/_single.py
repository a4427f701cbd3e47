# SPDX-License-Identifier: Apache-2.0
"""Laws on one device, on arrays sharded under plain ``jit``, and about Optax and Python."""

import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from boostax._core.types import PyTree
from boostax.testing import _arrays as arrays
from boostax.testing._case import Case, applied, follow, laws_in, optimizer, raises, steps, train
from boostax.train.state import metrics


def is_a_transformation_with_array_state(case: Case) -> None:
    """Promise 1: ``update`` accepts extra arguments, and the state's arrays have strong dtypes."""
    tx = case.make(optimizer(), None)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    state = tx.init(arrays.example_params())
    assert isinstance(state, tuple), "a state is a NamedTuple"
    for leaf in jax.tree.leaves(state):
        assert isinstance(leaf, jax.Array), f"the state contains a {type(leaf).__name__}"
        assert not leaf.weak_type, "state leaves have strong dtypes"


def forwards_unknown_extra_arguments(case: Case) -> None:
    """Promise 1: unknown extra arguments reach the inner transformation."""
    seen: list[PyTree] = []

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree) -> PyTree:
        seen.append(extra.get("marker"))
        return updates, state

    tx = case.single(optax.GradientTransformationExtraArgs(optax.init_empty_state, update))
    params = arrays.example_params()
    state = tx.init(params)
    for grads in arrays.draws(params, case.calls):
        _, state = jax.eval_shape(lambda g, s: tx.update(g, s, params, marker=7), grads, state)
    assert seen and None not in seen, f"inner got {seen or 'no call'}, not marker=7"


def keeps_types_and_traces_once(case: Case) -> None:
    """Promise 3: params and states keep their types (f16, bf16, f32, complex) in a single trace."""
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64):
        tx, params = _example(case, optax.adam(1e-2), dtype)
        start = (params, tx.init(params))
        traces: list[PyTree] = []

        @jax.jit
        def step(*carry: PyTree, tx: Any = tx, traces: list[PyTree] = traces) -> PyTree:
            traces.append(carry)
            return applied(tx)(*carry)

        after = follow(step, start, arrays.draws(params, 2 * case.calls + 1))
        assert arrays.types_of(after) == arrays.types_of(start), f"{dtype}: a type changed"
        assert len(traces) == 1, f"{dtype}: traced {len(traces)} times"


def works_in_float64(case: Case) -> None:
    """Promise 3: if x64 is enabled, computations with f64 gradients are in f64."""
    with jax.enable_x64(True):
        params: PyTree = {"w": jnp.zeros(2, jnp.float64)}
        grads = {"w": jnp.asarray([1.0 / 3.0, 1.0], jnp.float64)}
        moved: jax.Array = train(case.single(optax.sgd(1.0)), params, [grads] * case.calls)[0]["w"]
        assert moved.dtype == jnp.float64
        assert abs(float(moved[0] / moved[1]) - 1.0 / 3.0) < 1e-15, "rounded to f32"


def passes_masked_nodes(case: Case) -> None:
    """Promise 3: ``optax.MaskedNode`` leaves are unchanged."""
    tx = case.single()
    params = {"array": jnp.ones(3), "masked": optax.MaskedNode()}
    updates: PyTree = jax.jit(tx.update)(params, tx.init(params), params)[0]
    assert isinstance(updates["masked"], optax.MaskedNode)


def init_can_be_donated_at_once(case: Case) -> None:
    """Promise 4: the state shares no buffer with the params, nor do two fields share a buffer."""
    tx, params = _example(case)
    state = tx.init(params)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state)) if x.size]
    assert len(pointers) == len(set(pointers)), "two leaves share a buffer"
    step = jax.jit(applied(tx), donate_argnums=(0, 1))
    params, state = follow(step, (params, state), arrays.draws(params, 2))
    abstract = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(abstract) == jax.tree.structure(state), "init under eval_shape"


def works_in_every_optax_wrapper(case: Case) -> None:
    """Promise 2: the transformation works in each wrapper of Optax, such as ``optax.masked``."""
    params = arrays.example_params()
    grads = arrays.draws(params, 2 * case.calls)
    alone, _ = steps(case.single(), params, grads)
    mask = jax.tree.map(lambda p: p.ndim > 1, params)
    labels = jax.tree.map(lambda p: "boosted" if p.ndim > 1 else "plain", params)
    make = case.make
    tx = make(optimizer(), None)
    injected = optax.inject_hyperparams(lambda learning_rate: make(optax.adam(learning_rate), None))
    wrapped: dict[str, optax.GradientTransformation] = {
        "chain": optax.chain(tx),
        "named_chain": optax.named_chain(("boosted", tx)),
        "masked": optax.masked(tx, mask),
        "partition": optax.partition({"boosted": tx, "plain": optax.sgd(0.1)}, labels),
        "inject_hyperparams": injected(learning_rate=1e-2),
        "MultiSteps": optax.MultiSteps(tx, 2).gradient_transformation(),
        "apply_if_finite": optax.apply_if_finite(tx, 3),
    }
    for name, tx in wrapped.items():
        result, after = steps(optax.with_extra_args_support(tx), params, grads)
        assert arrays.types_of(after) == arrays.types_of(tx.init(params)), f"{name}: a type changed"
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(result)), name
        if name in ("chain", "named_chain"):
            arrays.assert_same(result, alone, name)


def scan_eager_and_disabled_jit_agree(case: Case) -> None:
    """Promise 2: ``apply_gradients`` in a scan gives the result of ``update``, also without jit."""
    tx = case.single()
    params = arrays.even_params()
    grads = arrays.draws(params, 2 * case.calls)
    start = (params, tx.init(params))
    scanned, _ = jax.lax.scan(lambda x, g: (applied(tx)(*x, g), None), start, arrays.stack(grads))
    arrays.assert_close(scanned, steps(tx, params, grads), "scan")
    with jax.disable_jit():
        disabled = train(tx, params, grads[: case.calls])
    arrays.assert_close(disabled, train(tx, params, grads[: case.calls]), "disable_jit")


def vmap_over_an_ensemble(case: Case) -> None:
    """Promise 2: members of an ensemble under vmap do not influence one another."""
    tx, params = _example(case)
    members = arrays.stack([params, jax.tree.map(lambda p: 2 * p, params)])
    first, second = (arrays.draws(params, case.calls, seed) for seed in (0, 50))
    pairs = [arrays.stack(pair) for pair in zip(first, second, strict=True)]
    start = (members, jax.vmap(tx.init)(members))
    alone = steps(tx, jax.tree.map(lambda x: x[1], members), second)[0]
    # In an axis with the name "seeds", a branch runs if any member needs the branch.
    for axis in (None, "seeds"):
        trained, _ = follow(jax.jit(jax.vmap(applied(tx), axis_name=axis)), start, pairs)
        arrays.assert_close(jax.tree.map(lambda x: x[1], trained), alone, f"member 1, {axis}")


def meta_gradients_are_finite(case: Case) -> None:
    """Promise 2: a step can be differentiated."""
    tx = case.single(optax.sgd(0.1))
    params = {"w": jnp.arange(3.0)}
    gradient = jax.grad(lambda g: jnp.sum(train(tx, params, [g] * case.calls)[0]["w"] ** 2))
    result = gradient({"w": jnp.ones(3)})["w"]
    assert bool(jnp.isfinite(result).all()) and bool((result != 0).any())


def sharded_arrays_under_plain_jit(case: Case) -> None:
    """Promise 2: on Auto and Explicit meshes params and moments keep their sharding."""
    tx, unsharded = case.single(), arrays.even_params()
    draws = arrays.draws(unsharded, 2 * case.calls)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(kind,))
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        with jax.set_mesh(mesh):
            step = jax.jit(applied(tx))
            params = jax.device_put(unsharded, sharding)
            state = tx.init(params)
            for grads in draws:
                params, state = step(params, state, jax.device_put(grads, sharding))
                for leaf in jax.tree.leaves(params):
                    assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), str(kind)
        arrays.assert_close(params, steps(tx, unsharded, draws)[0], str(kind))


def metrics_are_flat_scalars(case: Case) -> None:
    """Promise 10: metrics are named scalars, also for a transformation in a chain."""
    state = optax.chain(case.make(optimizer(), None)).init(arrays.example_params())
    for name, value in metrics(state).items():
        assert isinstance(name, str) and value.shape == (), f"{name}: {value.shape}"


def bad_arguments_raise_and_explain(case: Case) -> None:
    """Promise 9: an error names the argument, its value, and the allowed values, with a hint."""
    for build, part in case.bad_arguments:
        raises(build, part, "must", "got")


# Laws about operations of Optax and Python on any transformation.


def survives_what_python_does_to_objects(case: Case) -> None:
    """Promise 1: a copy of a transformation, even by ``jax.tree.map``, gives the same program."""
    tx, params = case.single(), arrays.even_params()
    grads = arrays.draws(params, case.calls)
    copies = {
        "itself": tx,
        "jax.tree.map": jax.tree.map(lambda f: f, tx),
        "copy.copy": copy.copy(tx),
        "copy.deepcopy": copy.deepcopy(tx),
        "_replace": tx._replace(init=tx.init),
        "its fields": type(tx)(*tx),
        "an Optax pair": optax.GradientTransformationExtraArgs(tx.init, tx.update),
    }
    fns = {name: jax.jit(partial(train, x, grads=grads)) for name, x in copies.items()}
    programs = {name: fn.lower(params).as_text() for name, fn in fns.items()}
    for name, program in programs.items():
        # The programs are compared and not the results, because a copy without its gate would still
        # compute equal numbers.
        assert program == programs["itself"], f"{name}: it computes something else"


def updates_have_the_dtypes_of_the_params(case: Case) -> None:
    """Promise 3: updates have the dtypes of the params, also in ``optax.apply_if_finite``."""
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        tx, params = _example(case, dtype=dtype)
        grads = arrays.example_grads(params, 0)
        for name, outer in {"alone": tx, "apply_if_finite": optax.apply_if_finite(tx, 3)}.items():
            updates, _ = jax.eval_shape(outer.update, grads, outer.init(params), params)
            dtypes, expected = ([x.dtype for x in jax.tree.leaves(y)] for y in (updates, params))
            assert dtypes == expected, f"{dtype.__name__}, {name}: updates have other dtypes"


def init_takes_shapes(case: Case) -> None:
    """Promise 1: ``init`` makes the same types of state from shapes as from arrays."""
    # ``init`` also works if the axis is not bound.
    tx = case.make(optimizer(), "data" if case.distributed else None)
    params = arrays.example_params(jnp.bfloat16)
    state, expected = (tx.init(x) for x in (jax.eval_shape(lambda: params), params))
    assert jax.tree.structure(state) == jax.tree.structure(expected), "another structure"
    assert arrays.types_of(state) == arrays.types_of(expected), "other types"


def tree_map_params_finds_what_is_like_the_params(case: Case) -> None:
    """Promise 1: ``optax.tree.map_params`` maps only those arrays of a state that match params."""
    tx = case.make(optax.sgd(0.1, momentum=0.9), "data" if case.distributed else None)
    params = arrays.even_params()
    state = tx.init(params)
    seen: list[PyTree] = []
    same = optax.tree.map_params(tx, lambda x: seen.append(x) or x, state)
    arrays.assert_same(same, state, "mapped by the identity")
    assert len(seen) >= len(params), f"{len(seen)} leaves"


def takes_trees_without_arrays(case: Case) -> None:
    """Promise 3: an empty tree, ``None`` and Python numbers are accepted as trees."""
    tx = case.single()
    plain = {"a": 1.0, "b": -2.0}
    results: list[PyTree] = []
    for params in list[PyTree](({}, {"a": None, "b": ()}, plain, jax.tree.map(jnp.float32, plain))):
        # ``params`` is a default argument, so its Python numbers remain: jit would convert a passed
        # argument to arrays.
        update = jax.jit(lambda state, params=params: tx.update(params, state, params))
        grads, state = params, tx.init(params)
        for _ in range(case.calls):
            grads, state = update(state)
        assert jax.tree.structure(grads) == jax.tree.structure(params)
        results.append((grads, state))
    arrays.assert_same(results[2], results[3], "Python's numbers and arrays")


def _example(case: Case, inner: Any = None, dtype: Any = jnp.float32) -> tuple[Any, PyTree]:
    """Return the transformation for one device, and params with all kinds of nodes."""
    return case.single(inner), arrays.example_params(dtype)


SINGLE_LAWS = laws_in(globals())
INIT_LAWS = {init_takes_shapes.__name__, tree_map_params_finds_what_is_like_the_params.__name__}
