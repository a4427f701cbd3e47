"""The gradient noise scale of replicas is that of the closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import spread
from reducing import mesh_of

import boostax
from boostax._core import noise_scale
from boostax.testing import drawn

SHAPE, SIGMA = (32, 16), 2.0
GRADIENT = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
NOISE = SIGMA**2 * GRADIENT.size
SQUARE = float((GRADIENT.astype(np.float64) ** 2).sum())
# Of a quadratic at a fixed point the gradient is that of the mean loss, plus noise.
STILL = optax.sgd(0.0)
WINDOW, REPLICAS = 4, 4
SHARES = {"whole": P(), "sharded": P("model")}


def gradients(key, factor=1.0):
    noise = jax.random.normal(key, (REPLICAS, *SHAPE))
    return factor * (GRADIENT + SIGMA * noise)


def run(tx, keys):
    """The metrics after all gradients, at one point."""
    params = jnp.zeros(SHAPE)

    def through(index):
        def step(state, key):
            grad = gradients(key)[index]
            return boostax.apply_gradients(drawn(tx), grad, state, params)[1], None

        return jax.lax.scan(step, tx.init(params), keys)[0]

    state = jax.jit(jax.vmap(through, axis_name="data"))(jnp.arange(REPLICAS))
    return jax.tree.map(lambda x: x[0], boostax.metrics(state))


def estimates(metrics):
    return [float(metrics[name]) for name in ("noise_scale", "gradient_square", "gradient_noise")]


def reduced(noise=0.99, **options):
    return optax.chain(boostax.all_reduce("data", noise=noise, **options), STILL)


PARALLEL = {
    "replicas": reduced,
    "half-precision replicas": lambda: reduced(dtype="float16"),
    "scaled gradients": lambda: boostax.static_loss_scale(reduced(), 2.0**16, axis_name="data"),
    "windows of replicas": lambda: boostax.accumulate(reduced(), WINDOW, axis_name="data"),
}


@pytest.mark.parametrize(("name", "share"), spread(PARALLEL, SHARES))
def test_replicas_measure_it_however_params_are_sharded(name, share):
    # The micro-steps of its small batch.
    calls = WINDOW if "windows" in name else 1
    mesh = mesh_of(data=REPLICAS, model=2)
    params = jax.device_put(jnp.zeros(SHAPE), NamedSharding(mesh, SHARES[share]))
    tx = boostax.on_mesh(PARALLEL[name](), params, axis_name="data")
    factor = 2.0**16 if "scaled" in name else 1.0

    @jax.jit
    def through(state, keys):
        def step(state, key):
            grads = boostax.PerReplica(gradients(key, factor))
            return boostax.apply_gradients(drawn(tx), grads, state, params)[1], None

        return jax.lax.scan(step, state, keys)[0]

    state = through(tx.init(params), jax.random.split(jax.random.key(3), 150 * calls))
    wanted = [NOISE / SQUARE / calls, SQUARE, NOISE / calls]
    np.testing.assert_allclose(estimates(boostax.metrics(state)), wanted, rtol=0.05)


def test_running_means_are_corrected_and_divided_last():
    keys = jax.random.split(jax.random.key(4), 3)
    metrics = run(reduced(0.5), keys)
    pieces, n = [], REPLICAS
    for key in keys:
        rows = np.asarray(gradients(key), np.float64).reshape(n, -1)
        small, large = (rows**2).sum(1).mean(), (rows.mean(0) ** 2).sum()
        pieces.append([(n * large - small) / (n - 1), (small - large) * n / (n - 1)])
    square, noise = np.average(pieces, 0, weights=[1, 2, 4])
    np.testing.assert_allclose(estimates(metrics), [noise / square, square, noise], rtol=1e-5)


def test_noise_that_hides_the_gradient_is_an_infinite_scale():
    assert np.isnan(noise_scale.fresh().scale())
    one = jnp.float32(1)
    assert noise_scale.NoiseScaleState(-one, one, one).scale() == np.inf


def test_it_sends_four_bytes_more(mesh):
    def sent(noise):
        loss = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
        step = boostax.make_train_step(loss, reduced(noise), mesh=mesh)
        return boostax.audit(step, step.init(jnp.ones(16)), jnp.ones((8, 16))).wire_bytes

    without, found = sent(None), sent(0.99)
    assert found.least - without.least == found.most - without.most == 2 * 7 / 8 * 4


def test_norms_of_shards_gather_nothing():
    mesh = mesh_of(data=REPLICAS, model=2)
    params = jax.device_put(jnp.zeros(SHAPE), NamedSharding(mesh, P("model")))
    grads = boostax.PerReplica(
        jax.device_put(jnp.zeros((REPLICAS, *SHAPE)), NamedSharding(mesh, P("data", "model")))
    )
    tx = boostax.on_mesh(reduced(), params, axis_name="data")
    step = jax.jit(lambda g, s, p: boostax.apply_gradients(drawn(tx), g, s, p))
    text = step.lower(grads, tx.init(params), params).compile().as_text()
    assert "all-reduce" in text
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))


def test_shards_of_a_mapped_function_are_added_up():
    """Leaves that are whole on all devices count once."""
    mesh = mesh_of(data=REPLICAS, model=2)
    tx = reduced(0.0)
    whole = {name: jnp.ones((REPLICAS, 6)) for name in "ab"}
    random = np.random.default_rng(0).normal(size=(2, REPLICAS, 6)).astype(np.float32)
    grads = {name: x + random[i] for i, (name, x) in enumerate(whole.items())}
    specs = {"a": P("data", "model"), "b": P("data")}

    def estimated(grads):
        each = jax.tree.map(lambda x: x[0], grads)
        return noise_scale.found(tx.update(each, tx.init(each))[1])[0]

    found = jax.jit(jax.shard_map(estimated, mesh=mesh, in_specs=(specs,), out_specs=P()))(grads)
    every = np.concatenate([np.asarray(x).reshape(-1, 6) for x in grads.values()], 1)
    n = len(every)
    small, large = (every**2).sum(1).mean(), (every.mean(0) ** 2).sum()
    wanted = (n * large - small) / (n - 1), (small - large) * n / (n - 1)
    np.testing.assert_allclose((found.gradient, found.noise), wanted, rtol=1e-5)


def test_weights_around_it_are_refused():
    inner = boostax.all_reduce("data", noise=0.9)
    with pytest.raises(ValueError, match="normalize must be 'mean' or 'sum' around all_reduce"):
        boostax.accumulate(inner, 2, normalize="weight", axis_name="data").init(jnp.zeros(3))
