"""A wrapper that is set to do nothing equals the bare optimizer, for every one that Optax has."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lanes import lanes

import boostax

# Beside ``learning_rate=1e-2``, or in its place.
SETTINGS = {
    "adafactor": {"min_dim_size_to_factor": 2},
    "galore": {"rank": 2},
    "lbfgs": {"linesearch": None},
    "noisy_sgd": {"key": 0},
    "schedule_free_adamw": {"warmup_steps": 2},
    "schedule_free_sgd": {"warmup_steps": 2},
    "sophia": {"update_interval": 1},
}
# Gradients of each example for itself, with a dimension more than the params; and old names.
LEFT_OUT = {"dpsgd", "_deprecated_dpsgd", "optimistic_adam"}
SHAPES = {"kernel": (4, 3), "bias": (3,), "scale": (1,)}
GROUPS, ALL = {"kernel": 0, "bias": 1, "scale": 1}, dict.fromkeys(SHAPES, 0)


# Every factory of Optax's and of contrib's that takes a learning rate.
OPTIMIZERS = {
    name: factory
    for module in (optax.contrib, optax)
    for name, factory in inspect.getmembers(module, inspect.isfunction)
    if "learning_rate" in inspect.signature(factory).parameters and name not in LEFT_OUT
    if name in SETTINGS or not name.startswith(("scale_by", "schedule_free"))
}


def made(name):
    return OPTIMIZERS[name](**{"learning_rate": 1e-2} | SETTINGS.get(name, {}))


WRAPPERS = {
    "dynamic_loss_scale": lambda tx: boostax.dynamic_loss_scale(tx, init_scale=1.0),
    "static_loss_scale": lambda tx: boostax.static_loss_scale(tx, 1.0, skip_nonfinite=False),
    "group_loss_scale": lambda tx: boostax.precision.group_loss_scale(tx, ALL, init_scale=1.0),
    "accumulate": lambda tx: boostax.accumulate(tx, 1),
    "scheduled_freeze": lambda tx: boostax.scheduled_freeze(tx, GROUPS, [0]),
}


def all_of_them(tx):
    for wrap in WRAPPERS.values():
        # Two scales of 1 are no scale.
        tx = wrap(tx)
    return tx


def arrays(seed, dtype):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def objective(params):
    return sum(jnp.sum(x**2) + jnp.sum(x) for x in jax.tree.leaves(params))


def trained(tx, dtype, wide, steps=3):
    """Params after some steps; ``wide`` keeps the optimizer in f32 by hand."""
    names = boostax._core.describe.asked(tx)
    given = {"value": jnp.float32(2.0)} if "value" in names else {}
    given |= {"obj_fn": objective} if "obj_fn" in names else {}
    up = boostax._core.trees.at_least_float32 if wide else lambda tree: tree

    @jax.jit
    def step(params, state, grads):
        inner = optax.with_extra_args_support(tx)
        updates, state = boostax.testing.drawn(inner).update(up(grads), state, up(params), **given)
        updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)
        return optax.apply_updates(params, updates), state, updates

    params = arrays(0, dtype)
    state = jax.jit(lambda p: tx.init(up(p)))(params)
    for seed in range(1, steps + 1):
        params, state, updates = step(params, state, arrays(seed, dtype))
    return params, updates


HELD = {"all, float32": (all_of_them, jnp.float32)} | {
    f"{wrapper}, {dtype.__name__}": (WRAPPERS[wrapper], dtype)
    for wrapper in WRAPPERS
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
}
# The wrapper widens low gradients before any optimizer; these have states of their own dtypes.
LOW = ("adafactor", "adamw", "lbfgs", "lion", "muon", "prodigy", "sgd", "sophia")
EACH = [(name, held) for name in OPTIMIZERS for held in HELD]
QUICK = [(name, x) for name in LOW for x in ("all, float32", "dynamic_loss_scale, bfloat16")]


@pytest.mark.parametrize("case", lanes(EACH, QUICK), ids=", ".join)
def test_a_wrapper_that_does_nothing_changes_nothing(case):
    """Also all of them at once; low params get the optimizer of f32."""
    name, (wrap, dtype) = case[0], HELD[case[1]]
    bare = trained(made(name), dtype, wide=True)
    wrapped = trained(wrap(made(name)), dtype, wide=False)
    # What fuses otherwise rounds otherwise, and some updates are differences of params around 1.
    rtol, atol = (2e-6, 3e-7) if dtype == jnp.float32 else (2.0**-7, 1e-4)
    for x, y in zip(jax.tree.leaves(wrapped), jax.tree.leaves(bare), strict=True):
        assert x.dtype == y.dtype == dtype
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=rtol, atol=atol)


def test_all_that_optax_has_are_held():
    assert {"adamw", "lbfgs", "muon", "prodigy", "momo", "sophia", "lion"} < OPTIMIZERS.keys()
    assert len(OPTIMIZERS) >= 44
