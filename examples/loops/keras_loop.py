"""Train a Keras 3 model with BatchNorm in f16, in your own loop with ``stateless_call``.

Eight emulated devices hold whole params, and four calls make an optimizer step. The program
evaluates averaged params, saves inside a window, resumes on four devices, and counts what a step
reduces. Keras's ``fit`` reduces in each call, because it differentiates the whole batch's loss.

    JAX_PLATFORMS=cpu python examples/loops/keras_loop.py
"""

import functools
import os
import tempfile

os.environ["KERAS_BACKEND"] = "jax"  # which Keras reads when it is imported

import jax
import keras
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from keras import layers

import boostax
from boostax.checkpoint import Checkpointer

DEVICES, WINDOW, CALLS, SAVED = 8, 4, 60, 42
FEATURES, HIDDEN, CLASSES, ROWS = 32, 64, 8, 64
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model():
    """Return a classifier whose variables are f32 and whose layers compute in f16."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    hidden = layers.Dense(HIDDEN), layers.BatchNormalization(momentum=0.9), layers.ReLU()
    last = layers.Dense(CLASSES, dtype="float32")
    return keras.Sequential([keras.Input((FEATURES,)), *hidden, last])


def make_batch(call):
    """Return rows that depend on the call alone; a label is the largest of eight projections."""
    x = np.random.default_rng(call).normal(size=(ROWS, FEATURES)).astype(np.float32)
    teacher = np.random.default_rng(10_000).normal(size=(FEATURES, CLASSES))
    return {"x": x, "label": (x @ teacher).argmax(-1)}


def set_up(devices):
    """Return the model, the chain, a state on these devices, the step, and the rows' sharding."""
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    model = make_model()
    params = [v.value for v in model.trainable_variables]
    statistics = [v.value for v in model.non_trainable_variables]  # of BatchNorm
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    params, statistics = jax.device_put((params, statistics), whole)

    def loss_fn(params, batch, statistics):
        logits, statistics = model.stateless_call(params, statistics, batch["x"], training=True)
        return cross_entropy(batch["label"], logits), boostax.Aux(model_state=statistics)

    grad_fn = boostax.value_and_grad(loss_fn, has_aux=True, mesh=mesh)
    # From inside out: the optimizer and its average, the reduction, the window, the loss scale.
    tx = boostax.model.average_params(optax.adamw(2e-2), decay=0.8)
    tx = boostax.accumulate(optax.chain(boostax.all_reduce(), tx), WINDOW)
    tx = boostax.on_mesh(boostax.dynamic_loss_scale(tx, growth_interval=20), params)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        params, statistics, opt_state = state
        (loss, aux), grads = grad_fn(params, opt_state, batch, statistics=statistics)
        params, opt_state = boostax.apply_gradients(tx, grads, opt_state, params)
        return (params, aux.model_state, opt_state), loss

    return model, tx, (params, statistics, tx.init(params)), step, rows


def train(state, step, rows, calls):
    """Take the calls, log every sixth, and return the state."""
    for call in calls:
        state, loss = step(state, jax.device_put(make_batch(call), rows))
        if call % 6 == 0:
            scale, skipped = map(boostax.metrics(state[2]).get, ("loss_scale", "skipped"))
            print(f"call {call}: loss {loss:.3f}, loss scale {scale:.0f}, skipped {skipped}")
    return state


def evaluate(model, state):
    """Print the loss of the model with averaged params, on rows that are never trained on."""
    params, statistics, opt_state = state
    average = boostax.model.averaged_params(params, opt_state)
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    for variable, value in zip(variables, [*average, *statistics], strict=True):
        variable.assign(value)
    batch = make_batch(20_000)
    print(f"held out {cross_entropy(batch['label'], model(batch['x'])):.3f}")


def main():
    """Train, save inside a window, resume on half of the devices, and count the step."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    model, tx, state, step, rows = set_up(jax.devices())
    state = train(state, step, rows, range(SAVED))
    evaluate(model, state)
    batch = jax.device_put(make_batch(0), rows)
    found = boostax.audit(step, state, batch, params=state[0], calls=WINDOW)
    print(f"an optimizer step reduces {found.reductions:.2f} N, statistics of BatchNorm included")

    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(SAVED, state, {"calls": SAVED})
        # A fresh run on the other devices says where each array goes.
        model, tx, target, step, rows = set_up(jax.devices()[: DEVICES // 2])
        state, meta = checkpointer.restore(target, reshard=True)
    print(f"resumed on {DEVICES // 2} devices")
    evaluate(model, state)
    params, statistics, opt_state = train(state, step, rows, range(meta["calls"], CALLS))
    params, opt_state = boostax.flush(tx, opt_state, params)  # applies an open window
    evaluate(model, (params, statistics, opt_state))


if __name__ == "__main__":
    main()
