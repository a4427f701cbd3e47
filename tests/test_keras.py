"""``boostax.keras.Optimizer`` in Keras's own trainer, in its stateless form, and on disk."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax.keras import Optimizer

import keras  # isort: skip

X = np.random.default_rng(0).normal(size=(32, 4)).astype("f")
Y = X[:, :1]


def a_model():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "tanh", name="up"), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])


def compiled(tx, **how):
    model = a_model()
    model.compile(optimizer=Optimizer(tx), loss="mse", **how)
    return model


def fit(model, x=X, epochs=1, **how):
    history = model.fit(x, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **how)
    return history.history["loss"]


def values(model):
    return [np.asarray(v) for v in model.trainable_variables]


def metrics(model):
    return boostax.metrics(model.optimizer.opt_state)


@pytest.fixture
def half():
    keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    keras.mixed_precision.set_global_policy("float32")


def test_a_chain_trains_as_the_optimizer_of_keras():
    theirs = a_model()
    theirs.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    wanted = fit(theirs, epochs=3)
    for wrap in (lambda tx: tx, boostax.dynamic_loss_scale):
        model = compiled(wrap(optax.sgd(0.1, momentum=0.9)))
        np.testing.assert_allclose(fit(model, epochs=3), wanted, rtol=1e-5)
        for mine, other in zip(values(model), values(theirs), strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-5)


def test_pairs_of_gradients_and_variables_come_in_any_order():
    def ended(optimizer, turn):
        variables = [keras.Variable(jnp.zeros(2), name=name) for name in "ab"]
        optimizer.build(variables)
        pairs = list(zip([jnp.full(2, 1.0), jnp.full(2, 100.0)], variables, strict=True))
        for call in range(4):
            optimizer.apply_gradients(pairs[::-1] if turn and call % 2 else pairs)
        return np.stack([v.value for v in variables])

    wanted = ended(keras.optimizers.SGD(0.1, momentum=0.9), turn=True)
    np.testing.assert_allclose(ended(Optimizer(optax.sgd(0.1, momentum=0.9)), True), wanted, 1e-6)
    np.testing.assert_allclose(ended(Optimizer(optax.sgd(0.1, momentum=0.9)), False), wanted, 1e-6)


def test_a_variable_that_is_given_twice_is_refused():
    variables = [keras.Variable(jnp.zeros(2), name=name) for name in "ab"]
    optimizer = Optimizer(optax.sgd(0.1))
    optimizer.build(variables)
    with pytest.raises(ValueError, match="given for all 2 trainable variables, each once"):
        optimizer.apply_gradients([(jnp.ones(2), variables[0]), (jnp.ones(2), variables[0])])


def test_a_window_is_a_batch():
    whole, cut = compiled(optax.sgd(0.1)), compiled(boostax.accumulate(optax.sgd(0.1), 4))
    for model in (whole, cut):
        model.layers[1].trainable = False  # Statistics of a micro-batch are not those of a batch.
    whole.fit(X, Y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    fit(cut, epochs=2)
    for mine, other in zip(values(cut), values(whole), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)
    assert int(metrics(cut)["optimizer_steps"]) == 2 and int(cut.optimizer.iterations) == 8


def test_a_batch_that_overflows_never_was():
    model = compiled(boostax.dynamic_loss_scale(optax.adam(0.1)))
    fit(model)
    before, bad = values(model), X.copy()
    bad[:, 0] = np.inf
    fit(model, bad)
    for mine, other in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert int(metrics(model)["skipped_steps"]) == 4


def test_half_precision_trains_with_the_scaler_in_the_chain(half):
    model = compiled(boostax.dynamic_loss_scale(optax.adam(0.01)), auto_scale_loss=False)
    losses = fit(model, epochs=3)
    found = metrics(model)
    assert losses[-1] < losses[0] and int(found["skipped_steps"]) < 4
    assert float(found["loss_scale"]) == 2.0 ** (16 - int(found["skipped_steps"]))


def test_the_scaler_of_keras_around_it_is_refused(half):
    model = compiled(boostax.dynamic_loss_scale(optax.adam(0.01)))
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    with pytest.raises(ValueError, match="a loss multiplied by the scale"):
        fit(model)


# Keras asks its variables for arrays in a way that NumPy no longer has.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_saved_model_goes_on_in_an_open_window(tmp_path):
    tx = boostax.dynamic_loss_scale(boostax.accumulate(optax.adam(0.01), 3))
    model = compiled(tx)
    fit(model)
    assert int(metrics(model)["micro_step"]) == 1
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"boostax": tx})
    for mine, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))
    assert fit(loaded, epochs=2) == fit(model, epochs=2)
    with pytest.raises(ValueError, match="among custom_objects by the name 'boostax'"):
        keras.saving.load_model(tmp_path / "model.keras")


def test_a_stateless_loop_reads_the_scale_from_its_variables():
    model = a_model()
    optimizer = Optimizer(boostax.static_loss_scale(optax.sgd(0.1), 1024.0))
    optimizer.build(model.trainable_variables)
    fixed = [v.value for v in model.non_trainable_variables]

    def loss_fn(trainable, batch):
        prediction, _ = model.stateless_call(trainable, fixed, batch)
        return jnp.mean((prediction - 1) ** 2)

    @jax.jit
    def step(trainable, variables, batch):
        state = optimizer.state_of(variables)
        loss, grads = boostax.value_and_grad(loss_fn)(trainable, state, batch)
        return loss, *optimizer.stateless_apply(variables, grads, trainable)

    trainable = [v.value for v in model.trainable_variables]
    variables = [v.value for v in optimizer.variables]
    value, grads = jax.value_and_grad(loss_fn)(trainable, X)
    wanted = [x - 0.1 * g for x, g in zip(trainable, grads, strict=True)]
    found, trainable, variables = step(trainable, variables, X)
    np.testing.assert_allclose(found, value, rtol=1e-6)
    for mine, other in zip(trainable, wanted, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)
    assert float(optimizer.state_of(variables).scale) == 1024


def test_moments_live_where_their_params_do():
    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"])
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*up/kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    )
    try:
        model = a_model()
        optimizer = Optimizer(boostax.accumulate(optax.adam(0.1), 2))
        optimizer.build(model.trainable_variables)
        kernel = model.trainable_variables[0].value
        state = optimizer.opt_state
        found = (
            jax.tree.leaves(state.window)[0],
            state.inner_state[0].mu[0],
            state.inner_state[0].nu[0],
        )
        assert not kernel.sharding.is_fully_replicated
        for leaf in found:
            assert leaf.shape == kernel.shape and leaf.sharding == kernel.sharding
    finally:
        keras.distribution.set_distribution(None)


def test_a_reduction_in_fit_is_refused():
    model = compiled(optax.chain(boostax.all_reduce("data"), optax.sgd(0.1)))
    with pytest.raises(ValueError, match="all_reduce: axis_name"):
        fit(model)


def test_a_learning_rate_of_a_callback_is_refused():
    model = compiled(optax.sgd(0.1))
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)
    with pytest.raises(ValueError, match="learning_rate"):
        fit(model, callbacks=[scheduler])
    with pytest.raises(AttributeError, match="learning_rate must be left to the chain"):
        _ = model.optimizer.learning_rate


def test_a_key_in_the_state_is_refused():
    model, tx = a_model(), optax.add_noise(0.1, 0.5, jax.random.key(0))
    with pytest.raises(ValueError, match=r"boostax\.keras\.Optimizer: tx must be one without PRNG"):
        Optimizer(tx).build(model.trainable_variables)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_gradients_for_some_alone_are_refused():
    optimizer, model = Optimizer(optax.sgd(0.1)), a_model()
    grads = [jnp.ones(v.shape) for v in model.trainable_variables]
    with pytest.raises(ValueError, match="grads must be given for all 6"):
        optimizer.apply([None, *grads[1:]], model.trainable_variables)
