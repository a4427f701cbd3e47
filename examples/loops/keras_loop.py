"""Train a Keras 3 model on JAX with a boostax chain, in a loop of one's own.

``model.stateless_call`` makes the model a function of its variables, so the chain is used as in any
JAX loop: the loss is multiplied by the loss scale, the gradients of four calls are summed up, and
they are reduced over the mesh once for the four. Statistics of BatchNorm are averaged over the
devices. ``python examples/loops/keras_loop.py`` prints the loss and the accuracy.
"""

import argparse
import functools
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import boostax

FEATURES, CLASSES, ROWS = 32, 8, 64


def make_model():
    """Return a small classifier with batch statistics."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(64),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("relu"),
            keras.layers.Dense(CLASSES),
        ]
    )


def batch_of(index):
    """Return rows whose label is the largest of eight fixed projections."""
    x = np.random.default_rng(index).normal(size=(ROWS, FEATURES)).astype(np.float32)
    teacher = np.random.default_rng(10_000).normal(size=(FEATURES, CLASSES))
    return {"x": x, "label": (x @ teacher).argmax(-1)}


def chain(every):
    """Return the optimizer, its reduction inside the window, the window inside the scaler."""
    tx = optax.chain(boostax.all_reduce("data"), optax.adamw(1e-2))
    tx = boostax.accumulate(tx, every, axis_name="data")
    return boostax.dynamic_loss_scale(tx, axis_name="data")


def train(calls, every=4):
    """Train on all devices; return the model, the loss of each call and the metrics."""
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), (jax.sharding.AxisType.Auto,))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    model = make_model()

    def loss_fn(trainable, batch, model_state):
        logits, model_state = model.stateless_call(
            trainable, model_state, batch["x"], training=True
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return loss.mean(), boostax.Aux(model_state=model_state)

    trainable, model_state = jax.device_put(
        (
            [v.value for v in model.trainable_variables],
            [v.value for v in model.non_trainable_variables],
        ),
        whole,
    )
    tx = boostax.on_mesh(chain(every), trainable, axis_name="data")
    opt_state = tx.init(trainable)
    grad_fn = boostax.value_and_grad(loss_fn, has_aux=True, mesh=mesh, axis_name="data")

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def train_step(trainable, model_state, opt_state, batch):
        (loss, aux), grads = grad_fn(trainable, opt_state, batch, model_state=model_state)
        trainable, opt_state = boostax.apply_gradients(tx, grads, opt_state, trainable)
        return trainable, aux.model_state, opt_state, loss

    losses = []
    for index in range(calls):
        batch = jax.device_put(batch_of(index), rows)
        trainable, model_state, opt_state, loss = train_step(
            trainable, model_state, opt_state, batch
        )
        losses.append(float(loss))
    # An open window is applied before the variables go back into the model.
    trainable, opt_state = boostax.flush(tx, opt_state, trainable)
    for variable, value in zip(model.trainable_variables, trainable, strict=True):
        variable.assign(value)
    for variable, value in zip(model.non_trainable_variables, model_state, strict=True):
        variable.assign(value)
    return model, losses, boostax.metrics(opt_state)


def main():
    """Print the loss at the start and at the end, and the accuracy on rows that were not seen."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--calls", type=int, default=200, help="micro-batches")
    model, losses, metrics = train(parser.parse_args().calls)
    test = batch_of(20_000)
    logits = model.predict(test["x"], verbose=0)
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-8:]):.3f}")
    print(f"optimizer steps {int(metrics['optimizer_steps'])}, scale {metrics['loss_scale']:.0f}")
    print(f"accuracy {jnp.mean(logits.argmax(-1) == test['label']):.2f}")


if __name__ == "__main__":
    main()
