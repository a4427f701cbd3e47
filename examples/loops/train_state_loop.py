"""Train with Flax's ``TrainState``, dropout, micro-batches and a sharded optimizer state.

The program computes in f16. Each of eight emulated devices holds whole params and an eighth of the
moments (ZeRO-1). The devices compare their params. A call splits its batch into four micro-batches
and makes a step. The program evaluates averaged params, saves, resumes on four devices, and counts
what its step reduces.

    JAX_PLATFORMS=cpu python examples/loops/train_state_loop.py
"""

import functools
import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
from boostax.checkpoint import Checkpointer

DEVICES, MICROBATCHES, CALLS, SAVED = 8, 4, 40, 24
FEATURES, HIDDEN, CLASSES, ROWS = 32, 64, 8, 128


class Net(nn.Module):
    """A classifier with dropout."""

    @nn.compact
    def __call__(self, x, train=False):
        """Return the logits."""
        x = nn.relu(nn.Dense(HIDDEN)(x))
        return nn.Dense(CLASSES)(nn.Dropout(0.1, deterministic=not train)(x))


def loss_fn(params, batch, key=None):
    """Return the cross entropy of a batch, with dropout if there is a key."""
    rngs = None if key is None else {"dropout": key}
    logits = Net().apply({"params": params}, batch["x"], train=key is not None, rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def make_batch(call):
    """Return rows that depend on the call alone; a label is the largest of eight projections."""
    x = np.random.default_rng(call).normal(size=(ROWS, FEATURES)).astype(np.float32)
    teacher = np.random.default_rng(10_000).normal(size=(FEATURES, CLASSES))
    return {"x": x, "label": (x @ teacher).argmax(-1)}


def set_up(devices):
    """Return the state on these devices, the step, and the sharding of rows."""
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    params = Net().init(jax.random.key(0), make_batch(0)["x"])["params"]
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params = jax.device_put(params, whole)

    # From inside out: optimizer and average, reduction, loss scale, check of the replicas.
    tx = boostax.model.average_params(optax.adamw(2e-2), decay=0.8)
    tx = optax.chain(boostax.all_reduce(), tx)
    tx = boostax.dynamic_loss_scale(tx, growth_interval=20)
    tx = boostax.precision.check_replicas(tx, every=10)
    tx = boostax.on_mesh(tx, params, shard_optimizer=True)
    state = TrainState.create(apply_fn=Net().apply, params=params, tx=tx)
    # Flax begins with a Python number, which is on no device and cannot be saved.
    state = state.replace(step=jax.device_put(jnp.int32(0), whole))
    grad_fn = boostax.value_and_grad(loss_fn, mesh=mesh, policy="O2", microbatches=MICROBATCHES)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch):
        key = jax.random.fold_in(jax.random.key(1), state.step)
        loss, grads = grad_fn(state.params, state.opt_state, batch, key=key)
        return state.apply_gradients(grads=grads), loss

    return state, train_step, rows


def train(state, train_step, rows, calls):
    """Take the calls, log every fourth, and return the state."""
    for call in calls:
        state, loss = train_step(state, jax.device_put(make_batch(call), rows))
        if call % 4 == 0:
            boostax.precision.raise_if_diverged(state)
            told = boostax.metrics(state.opt_state)
            scale, skipped = told["loss_scale"], told["skipped"]
            print(f"call {call}: loss {loss:.3f}, loss scale {scale:.0f}, skipped {skipped}")
    return state


def evaluate(state):
    """Print the loss of the averaged params on rows that are never trained on."""
    average = boostax.model.averaged_params(state.params, state.opt_state)
    print(f"held out {jax.jit(loss_fn)(average, make_batch(20_000)):.3f}")


def main():
    """Train, save, resume on half of the devices, and count the step."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    state, train_step, rows = set_up(jax.devices())
    state = train(state, train_step, rows, range(SAVED))
    evaluate(state)
    found = boostax.audit(train_step, state, jax.device_put(make_batch(0), rows))
    print(f"an optimizer step reduces {found.reductions:.2f} N, gathers {found.gathers:.2f} N")

    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(SAVED, state)
        # A fresh state on the other devices says where each array goes.
        target, train_step, rows = set_up(jax.devices()[: DEVICES // 2])
        state, _ = checkpointer.restore(target, reshard=True)
    print(f"resumed on {DEVICES // 2} devices")
    evaluate(state)
    state = train(state, train_step, rows, range(int(state.step), CALLS))
    evaluate(state)


if __name__ == "__main__":
    main()
