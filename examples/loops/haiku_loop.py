"""Train a Haiku network with BatchNorm and dropout, with gradients sent in 8 bits.

The program computes in f16 on eight emulated devices that hold whole params, and four calls make an
optimizer step. Each device adds the rounding error of its sent gradient to its next gradient. Each
call averages the statistics of BatchNorm over the devices. The program evaluates averaged params,
saves inside a window, resumes on four devices, and counts what its step sends.

    JAX_PLATFORMS=cpu python examples/loops/haiku_loop.py
"""

import functools
import tempfile

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
from boostax.checkpoint import Checkpointer

DEVICES, WINDOW, CALLS, SAVED = 8, 4, 60, 42
FEATURES, HIDDEN, CLASSES, ROWS = 32, 64, 8, 64


@hk.transform_with_state
def net(x, train=False):
    """Return the logits of a classifier with BatchNorm and dropout."""
    norm = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)
    x = jax.nn.relu(norm(hk.Linear(HIDDEN)(x), train))
    return hk.Linear(CLASSES)(hk.dropout(hk.next_rng_key(), 0.1, x) if train else x)


def loss_fn(params, batch, statistics, key=None):
    """Return the cross entropy and new statistics; it trains if there is a key."""
    train = key is not None
    logits, statistics = net.apply(params, statistics, key, batch["x"], train=train)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, boostax.Aux(model_state=statistics)


def make_batch(call):
    """Return rows that depend on the call alone; a label is the largest of eight projections."""
    x = np.random.default_rng(call).normal(size=(ROWS, FEATURES)).astype(np.float32)
    teacher = np.random.default_rng(10_000).normal(size=(FEATURES, CLASSES))
    return {"x": x, "label": (x @ teacher).argmax(-1)}


def set_up(devices):
    """Return the chain, a state on these devices, the step, and the sharding of rows."""
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    model = net.init(jax.random.key(0), make_batch(0)["x"], train=True)
    params, statistics = jax.device_put(model, NamedSharding(mesh, P()))

    # From inside out: the optimizer and its average, the reduction, the window, the loss scale.
    tx = boostax.model.average_params(optax.adamw(2e-2), decay=0.8)
    tx = boostax.accumulate(optax.chain(boostax.int8_reduce(), tx), WINDOW)
    tx = boostax.on_mesh(boostax.dynamic_loss_scale(tx, growth_interval=20), params)
    grad_fn = boostax.value_and_grad(loss_fn, has_aux=True, mesh=mesh, policy="O2")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch, call):
        params, statistics, opt_state = state
        key = jax.random.fold_in(jax.random.key(1), call)
        (loss, aux), grads = grad_fn(params, opt_state, batch, statistics=statistics, key=key)
        params, opt_state = boostax.apply_gradients(tx, grads, opt_state, params)
        return (params, aux.model_state, opt_state), loss

    return tx, (params, statistics, tx.init(params)), step, NamedSharding(mesh, P("data"))


def train(state, step, rows, calls):
    """Take the calls, log every sixth, and return the state."""
    for call in calls:
        state, loss = step(state, jax.device_put(make_batch(call), rows), jnp.int32(call))
        if call % 6 == 0:
            told = boostax.metrics(state[2])
            scale, skipped = told["loss_scale"], told["skipped"]
            print(f"call {call}: loss {loss:.3f}, loss scale {scale:.0f}, skipped {skipped}")
    return state


def evaluate(state):
    """Print the loss of the averaged params on rows that are never trained on."""
    params, statistics, opt_state = state
    average = boostax.model.averaged_params(params, opt_state)
    print(f"held out {jax.jit(loss_fn)(average, make_batch(20_000), statistics)[0]:.3f}")


def main():
    """Train, save inside a window, resume on half of the devices, and count the step."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    tx, state, step, rows = set_up(jax.devices())
    state = train(state, step, rows, range(SAVED))
    evaluate(state)
    batch = jax.device_put(make_batch(0), rows)
    found = boostax.audit(step, state, batch, jnp.int32(0), params=state[0], calls=WINDOW)
    print(f"an optimizer step reduces {found.reductions:.2f} N, all of it statistics of BatchNorm,")
    print(f"and gathers {found.gathers:.2f} N, gradients in 8 bits")

    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(SAVED, state, {"calls": SAVED})
        # A fresh state on the other devices says where each array goes.
        tx, target, step, rows = set_up(jax.devices()[: DEVICES // 2])
        state, meta = checkpointer.restore(target, reshard=True)
    print(f"resumed on {DEVICES // 2} devices")
    evaluate(state)
    state = train(state, step, rows, range(meta["calls"], CALLS))
    params, statistics, opt_state = state
    # A run may end inside a window; this applies what it has.
    params, opt_state = boostax.flush(tx, opt_state, params)
    evaluate((params, statistics, opt_state))


if __name__ == "__main__":
    main()
