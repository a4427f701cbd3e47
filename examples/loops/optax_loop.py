"""Train with plain Optax in your own jitted loop, from the first placement to a resumed run.

The program computes in f16, with params and moments sharded over eight devices (FSDP), and four
calls make an optimizer step. The program evaluates averaged params, saves inside a window, resumes
on four devices, and counts what its step reduces and gathers. A CPU emulates the devices.

    JAX_PLATFORMS=cpu python examples/loops/optax_loop.py
"""

import functools
import tempfile

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


def init_params():
    """Return a small network, all f32; its first dimensions divide by the devices."""
    keys = jax.random.split(jax.random.key(0))
    up = jax.random.normal(keys[0], (FEATURES, HIDDEN)) / FEATURES**0.5
    down = jax.random.normal(keys[1], (HIDDEN, CLASSES)) / HIDDEN**0.5
    return {"up": up, "bias": jnp.zeros(HIDDEN), "down": down}


def loss_fn(params, batch):
    """Return the cross entropy, in f32."""
    hidden = jax.nn.relu(batch["x"] @ params["up"] + params["bias"])
    logits = (hidden @ params["down"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def make_batch(call):
    """Return rows that depend on the call alone; a label is the largest of eight projections."""
    x = np.random.default_rng(call).normal(size=(ROWS, FEATURES)).astype(np.float32)
    teacher = np.random.default_rng(10_000).normal(size=(FEATURES, CLASSES))
    return {"x": x, "label": (x @ teacher).argmax(-1)}


def set_up(devices):
    """Return a chain, params with its state on these devices, the step, and the rows' sharding."""
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    shards = NamedSharding(mesh, P("data"))
    params = jax.device_put(init_params(), shards)

    # From inside out: optimizer and debiased average, the reduction, the window, the loss scale.
    tx = boostax.model.average_params(optax.adamw(2e-2), decay=0.8)
    tx = boostax.accumulate(optax.chain(boostax.all_reduce(), tx), WINDOW)
    tx = boostax.on_mesh(boostax.dynamic_loss_scale(tx, growth_interval=20), params)
    grad_fn = boostax.value_and_grad(loss_fn, mesh=mesh, policy="O2")

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        loss, grads = grad_fn(params, opt_state, batch)
        return boostax.apply_gradients(tx, grads, opt_state, params), loss

    return tx, (params, tx.init(params)), step, shards


def train(state, step, shards, calls):
    """Take the calls, log every sixth, and return the state."""
    for call in calls:
        state, loss = step(*state, jax.device_put(make_batch(call), shards))
        if call % 6 == 0:
            told = boostax.metrics(state[1])
            scale, skipped = told["loss_scale"], told["skipped"]
            print(f"call {call}: loss {loss:.3f}, loss scale {scale:.0f}, skipped {skipped}")
    return state


def evaluate(state):
    """Print the loss of the averaged params on rows that are never trained on."""
    params, opt_state = state
    average = boostax.model.averaged_params(params, opt_state)
    print(f"held out {jax.jit(loss_fn)(average, make_batch(20_000)):.3f}")


def main():
    """Train, save inside a window, resume on half of the devices, and count the step."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    tx, state, step, shards = set_up(jax.devices())
    state = train(state, step, shards, range(SAVED))
    evaluate(state)
    batch = jax.device_put(make_batch(0), shards)
    found = boostax.audit(step, *state, batch, calls=WINDOW)
    print(f"an optimizer step reduces {found.reductions:.2f} N, gathers {found.gathers:.2f} N")

    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(SAVED, state, {"calls": SAVED})
        # A fresh state on the other devices says where each array goes.
        tx, target, step, shards = set_up(jax.devices()[: DEVICES // 2])
        state, meta = checkpointer.restore(target, reshard=True)
    print(f"resumed on {DEVICES // 2} devices")
    evaluate(state)
    state = train(state, step, shards, range(meta["calls"], CALLS))
    params, opt_state = state
    # A run may end inside a window; this applies what it has.
    params, opt_state = boostax.flush(tx, opt_state, params)
    evaluate((params, opt_state))


if __name__ == "__main__":
    main()
