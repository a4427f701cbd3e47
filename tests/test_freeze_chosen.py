"""One program that finds the depth out does what each depth's own does."""

import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import boostax

GROUPS = [0, 1, 2, 3]
DEPTHS = [0, 2, 1, 3, 3, 0, 1, 2]


def start():
    keys = jax.random.split(jax.random.key(0), len(GROUPS))
    return [{"k": jax.random.normal(k, (8, 8)), "b": jnp.zeros(8), "s": jnp.ones(())} for k in keys]


def gradients(step):
    leaves, treedef = jax.tree.flatten(start())
    keys = jax.random.split(jax.random.key(1 + step), len(leaves))
    draw = lambda k, x: jax.random.normal(k, x.shape) * (1 + step)  # noqa: E731
    return treedef.unflatten(map(draw, keys, leaves))


def mixing():
    """Adds to each leaf the sum of the leaves of its shape."""

    def update(updates, state, params=None):
        leaves = jax.tree.leaves(updates)
        alike = lambda x: [y for y in leaves if y.shape == x.shape]  # noqa: E731
        return jax.tree.map(lambda x: x + sum(alike(x)), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def looking(seen):
    """Tells what it is given."""

    def update(updates, state, params=None):
        jax.debug.callback(lambda *x: seen.append(len(x)), *jax.tree.leaves(updates))
        return updates, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def clipped(*more):
    return optax.chain(optax.clip_by_global_norm(0.5), *more)


INNER = {
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "clipped adamw": lambda: clipped(optax.adamw(optax.linear_schedule(3e-2, 1e-3, 20))),
    "lamb": lambda: optax.lamb(1e-2),
    "lion": lambda: clipped(optax.lion(1e-3)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "centralized": lambda: clipped(boostax.centralize_gradients(), optax.adam(1e-2)),
    "decayed in part": lambda: optax.adamw(
        1e-2, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    ),
    "noise": lambda: optax.noisy_sgd(1e-2, key=0),
    "mixing": lambda: clipped(mixing(), optax.sgd(1e-2)),
    "printing": lambda: clipped(looking([]), optax.sgd(1e-2)),
}


def trajectory(inner, told):
    """Params and states of a run through all depths, which the program is told or finds out."""
    tx = boostax.scheduled_freeze(inner, GROUPS, DEPTHS)
    params, seen = start(), []
    state = tx.init(params)
    step = jax.jit(functools.partial(boostax.apply_gradients, tx), static_argnames="depth")
    for i, depth in enumerate(DEPTHS):
        params, state = step(gradients(i), state, params, depth=depth if told else None)
        seen.append((params, state))
    jax.effects_barrier()
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, seen)


# With sums over leaves, factored moments, leaves that are mixed, and effects.
QUICK = ("clipped adamw", "adafactor", "mixing", "printing")


@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.long) for x in INNER]
)
def test_one_program_for_all_depths_does_what_each_of_them_does(name):
    found, expected = (trajectory(INNER[name](), told) for told in (False, True))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_step_outside_any_program():
    """Equal leaves are told apart, and their values are not read."""
    params = [jnp.zeros(()) for _ in GROUPS]
    tx = boostax.scheduled_freeze(INNER["clipped adamw"](), GROUPS, [0, 2])
    ends = []
    for step in (boostax.apply_gradients, jax.jit(boostax.apply_gradients, static_argnums=0)):
        now, state = params, tx.init(params)
        for _ in range(2):
            now, state = step(tx, jax.tree.map(jnp.ones_like, params), state, now)
        ends.append((now, state))
    chex.assert_trees_all_close(*ends, rtol=1e-6, atol=0)
    values = [float(x) for x in ends[0][0]]
    assert values[0] == values[1] > values[2] == values[3]


def test_what_an_inner_transformation_tells_is_told_once_a_step():
    seen = []
    trajectory(clipped(looking(seen), optax.sgd(1e-2)), False)
    assert seen == [3 * (len(GROUPS) - depth) for depth in DEPTHS]
