"""One optimizer for all depths, where they differ in scalars alone; otherwise one for each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax.freeze import scheduled
from boostax.freeze.joined import Joined, Unlike

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


ALIKE = {
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
}
UNLIKE = {
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


# Alike with sums over leaves and without, with effects, and with more than scalars of several.
QUICK = ("clipped adamw", "adafactor", "mixing", "printing")
EACH = [x if x in QUICK else pytest.param(x, marks=pytest.mark.long) for x in ALIKE | UNLIKE]


@pytest.mark.parametrize("name", EACH)
def test_one_program_for_all_depths_does_what_each_of_them_does(name):
    found, expected = (trajectory((ALIKE | UNLIKE)[name](), told) for told in (False, True))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found, expected)


@pytest.mark.parametrize("name", EACH)
def test_all_depths_at_once_are_each_in_turn(name, monkeypatch):
    """To the bit, as all else."""
    make = (ALIKE | UNLIKE)[name]
    joined, at_once = [], scheduled.at_once

    def told(*args):
        found = at_once(*args)
        joined.append(True)
        return found

    monkeypatch.setattr(scheduled, "at_once", told)
    found = trajectory(make(), False)
    assert bool(joined) == (name in ALIKE)

    def never(*args):
        raise Unlike

    monkeypatch.setattr(scheduled, "at_once", never)
    jax.tree.map(np.testing.assert_array_equal, found, trajectory(make(), False))


def test_a_step_outside_any_program():
    """Equal leaves are told apart, and their values are not read."""
    params = [jnp.zeros(()) for _ in GROUPS]
    tx = boostax.scheduled_freeze(ALIKE["clipped adamw"](), GROUPS, [0, 2])
    ends = []
    for step in (boostax.apply_gradients, jax.jit(boostax.apply_gradients, static_argnums=0)):
        now, state = params, tx.init(params)
        for _ in range(2):
            now, state = step(tx, jax.tree.map(jnp.ones_like, params), state, now)
        ends.append((now, state))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), *ends)
    values = [float(x) for x in ends[0][0]]
    assert values[0] == values[1] > values[2] == values[3]


def test_what_an_inner_transformation_tells_is_told_once_a_step():
    seen = []
    trajectory(clipped(looking(seen), optax.sgd(1e-2)), False)
    assert seen == [3 * (len(GROUPS) - depth) for depth in DEPTHS]


@pytest.mark.parametrize("name", ["clipped adamw", "lamb"])
def test_ten_depths_are_no_ten_optimizers(name):
    """Operations that are compiled, beside those of the optimizer alone."""
    params = [jnp.ones((8, 8)) for _ in range(40)]
    count = {}
    for tx in (
        ALIKE[name](),
        boostax.scheduled_freeze(ALIKE[name](), [i // 4 for i in range(40)], range(10)),
    ):
        step = functools.partial(boostax.apply_gradients, tx)
        text = jax.jit(step).lower(params, tx.init(params), params).as_text()
        count[tx] = text.count(" = ")
    alone, found = count.values()
    print(f"{name}: {found} operations, the optimizer alone {alone}")
    assert found < 1.5 * alone


def joined(*fns):
    """The common results of functions of one argument, and the program."""
    x = jnp.arange(4.0)
    program = Joined()
    atoms = [program.add(jax.make_jaxpr(fn)(x), [x]) for fn in fns]
    common = [program.common(column) for column in zip(*atoms, strict=True)]
    return lambda index: program.run(common, jnp.int32(index)), x


def test_scalars_are_chosen_and_what_is_large_is_shared():
    run, x = joined(*[lambda x, n=n: [jnp.sin(x) * jnp.sum(x[:n])] for n in range(4)])
    text = str(jax.make_jaxpr(run)(0))
    assert text.count(" sin ") == 1
    for n in range(4):
        np.testing.assert_array_equal(run(n)[0], jnp.sin(x) * jnp.sum(x[:n]))
    # Whatever lies beyond the last is the last.
    np.testing.assert_array_equal(run(9)[0], run(3)[0])


def test_constants_are_the_same_if_their_bits_are():
    for a, b in [(0.0, -0.0), (1.0, 2.0)]:
        run, _ = joined(*[lambda x, c=c: [jnp.copysign(1.0, jnp.float32(c))] for c in (a, b)])
        assert float(run(0)[0]) == 1.0 and float(run(1)[0]) == float(np.copysign(1.0, b))
    ones = [np.ones(4, np.float32) for _ in range(2)]
    run, _ = joined(*[lambda x, c=c: [x + c] for c in ones])
    assert str(jax.make_jaxpr(run)(0)).count(" add ") == 1


@pytest.mark.parametrize(
    "fns",
    [
        (lambda x: [x], lambda x: [x + 1]),
        (lambda x: [jnp.sin(x)], lambda x: [jnp.cos(x)]),
        (lambda x: [x + np.arange(4.0)], lambda x: [x + np.ones(4)]),
        (lambda x: [x[:2]], lambda x: [x[:3]]),
    ],
    ids=["argument", "operation", "constant", "shape"],
)
def test_what_differs_in_more_than_scalars_is_no_one_program(fns):
    with pytest.raises(Unlike):
        joined(*fns)
