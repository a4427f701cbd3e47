"""Every recipe of ``docs/recipes`` is read as it stands and trains."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import recipes_cases as cases
from flax import linen as nn

import boostax

SHARED = ("two_hosts", "many_micro_batches", "muon_sharded")
# What each is called for, beside the loss and the optimizer.
OPTIONS = {"muon_sharded": {"shard_optimizer": True}}


def network(name):
    """Params, a loss and rows of a batch; with products in fp8 where the recipe is for these."""
    if name == "fp8":
        net = nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp)
        variables = net.init(jax.random.key(0), jnp.ones((1, 8)))
        return variables, lambda variables, x: jnp.mean(net.apply(variables, x) ** 2)
    layer = lambda key: 0.3 * jax.random.normal(jax.random.key(key), (8, 8))  # noqa: E731
    params = {f"block_{i}": {"up": layer(i)} for i in range(4)}
    params |= {"characters": layer(5), "positions": layer(6)}

    def loss(params, x):
        x = x @ params["characters"] + params["positions"][0]
        for i in range(4):
            x = x + jnp.tanh(x @ params[f"block_{i}"]["up"])
        # Small enough for the first scale of f16.
        return jnp.mean(x**2) / 100

    return params, loss


def changed(before, after):
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, jax.device_get(after))
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(moved)}


@pytest.mark.parametrize("name", sorted(path.stem for path in cases.FOLDER.glob("*.json")))
def test_a_recipe_is_read_and_takes_a_step(name, mesh):
    boost = boostax.auto(str(cases.FOLDER / f"{name}.json"))
    params, loss = network(name)
    over = {"mesh": mesh, "axis_name": "data"} if name in SHARED else {}
    inner = optax.contrib.muon(0.02) if name == "muon_sharded" else optax.adamw(1e-2)
    step = boost.make_train_step(loss, inner, params, **over, **OPTIONS.get(name, {}))
    state = step.init(params)
    before = jax.device_get(state.params)
    config = cases.config_of(name)
    for index in range(cases.calls_of(config)):
        batch = jax.random.normal(jax.random.key(index), (8 * config.get("microbatches", 1), 8))
        state, metrics = jax.block_until_ready(step(state, batch))
    assert metrics["applied"] and np.isfinite(metrics["loss"])
    moved = changed(before, step.common_params(state))
    rests = {key for key, yes in moved.items() if not yes}
    early = config["freeze"]["groups"][0] if "freeze" in config else ()
    if name == "fp8":
        histories = state.params["_overwrite_with_gradient"]
        assert max(float(x.max()) for x in jax.tree.leaves(histories)) == float(abs(batch).max())
    else:
        assert rests == {key for key in moved if any(f"'{x}'" in key for x in early)}
    if name == "muon_sharded":
        largest = max(jax.tree.leaves(state.opt_state), key=jnp.size)
        assert largest.sharding.shard_shape(largest.shape)[0] * 8 == largest.shape[0]
