"""Seeds under ``jax.vmap``: each is a run of its own, and what one run saves, all save together."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import vmap_seeds as program
from reducing import loss_fn

import boostax
from boostax._core import interpret
from boostax.auditing import hlo

PAGE = (pathlib.Path(__file__).parents[1] / "docs/seeds.md").read_text()
ROWS = re.findall(r"^\| `(.*?)`(.*?) \| (\d+, .*) \|$", PAGE, re.M)
START = [{"up": x, "down": x.T} for x in jax.random.normal(jax.random.key(0), (2, 4, 4))]
PARTS = vars(boostax) | {"adam": optax.adam(1e-2), "store": boostax.precision.store}
PARTS |= {"groups": [0, 1], "schedule": [0, 1]}


def reference(key):
    """An agent by Optax in float64: its params, and how many windows it dropped."""
    params, carts, key = program.start(key)
    with jax.enable_x64(True):
        params, adam = jax.tree.map(np.float64, params), optax.apply_if_finite(optax.adam(1e-2), 9)
        state, grad_fn = adam.init(params), jax.jit(jax.grad(program.loss_fn))
        for calls in jax.random.split(key, program.CALLS).reshape(-1, program.WINDOW):
            grads = optax.tree.zeros_like(params)
            for call in calls:
                carts, batch = jax.jit(program.rollout)(params, carts, call)
                grads = optax.tree.add(grads, grad_fn(params, batch))
            mean = optax.tree.scale(1 / program.WINDOW, grads)
            updates, state = jax.jit(adam.update)(mean, state)
            if state.inner_state[0].count > program.ENCODER_STEPS:
                updates["encoder"] = jax.tree.map(jnp.zeros_like, updates["encoder"])
            params = optax.apply_updates(params, updates)
    return jax.device_get(params), state.total_notfinite


def test_each_agent_is_that_of_optax_in_float64(capsys):
    keys = jax.random.split(jax.random.key(0), program.SEEDS)
    trained = jax.device_get(program.train_all(keys)[0].params)
    program.main()
    told = re.findall(r"return (\S+) to (\S+), skipped (\d+)", capsys.readouterr().out)
    for seed, (first, last, skips) in enumerate(told):
        params, skipped = reference(keys[seed])
        difference = jax.tree.map(lambda x, y, seed=seed: x[seed] - y, trained, params)
        assert optax.tree.norm(difference) < 1e-5 * optax.tree.norm(params)
        assert int(skips) == skipped and float(first) < float(last)
    assert len({skips for *_, skips in told}) > 1


def least(fn):
    """Count products and roots outside of branches, in the jaxpr and as XLA compiles it."""
    enter = lambda eqn, inside: [inside or eqn.primitive.name == "cond"] * 9  # noqa: E731
    eqns = interpret.equations(jax.make_jaxpr(fn)().jaxpr, False, enter)
    traced = [eqn.primitive.name for eqn, inside in eqns if not inside]
    sites = hlo.parse(jax.jit(fn).lower().compile().as_text()).sites
    names = [x.instruction.op for x in sites if not x.branches]
    assert names.count("sqrt") == traced.count("sqrt")
    assert names.count("dot") == traced.count("dot_general")
    return f"{names.count('dot')}, {names.count('sqrt')}"


@pytest.mark.parametrize(("chain", "how", "counts"), ROWS, ids=range(len(ROWS)))
def test_what_each_call_runs_is_that_of_the_table(chain, how, counts):
    """A branch of one seed is a branch of all seeds that have a name."""
    tx, cuts = eval(chain, PARTS), 1 + ("micro" in how)
    first = lambda seed: jax.tree.map(lambda x: x * seed, START)  # noqa: E731
    state = jax.vmap(lambda seed: tx.init(first(seed)))(jnp.ones(3)) if "init" in how else None

    def train(seed, state=None):
        def call(carry, batch):
            choice = {"active": tx.choice(*carry)} if hasattr(tx, "choice") else {}
            grad_fn = boostax.value_and_grad(loss_fn, microbatches=cuts)
            _, grads = grad_fn(*carry, batch / seed, **choice)
            return boostax.apply_gradients(tx, grads, *carry[::-1]), None

        start = (params := first(seed)), state or tx.init(params)
        return jax.lax.scan(call, start, jnp.sin(jnp.arange(48.0)).reshape(3, 4, 4))[0]

    plain, named = (jax.vmap(train, axis_name=axis) for axis in (None, "seeds"))
    one = least(lambda: train(jnp.ones(())))
    assert f"{one} | {least(lambda: plain(jnp.ones(3), state))}" == counts
    assert one == least(lambda: named(jnp.ones(3), state))
