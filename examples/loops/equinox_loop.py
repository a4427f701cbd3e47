"""Train an Equinox module with Muon, with params and state sharded over eight devices (FSDP).

The program computes in f16, and four calls make an optimizer step. The program evaluates an
averaged module, saves inside a window, resumes on four devices, and counts what its step reduces
and gathers. A CPU emulates the devices. Leaves that are not arrays, such as activations, remain
unchanged under ``eqx.filter_jit``, and their gradient is ``None``.

    JAX_PLATFORMS=cpu python examples/loops/equinox_loop.py
"""

import tempfile

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
from boostax.checkpoint import Checkpointer

DEVICES, WINDOW, CALLS, SAVED = 8, 4, 60, 42
FEATURES, HIDDEN, CLASSES, ROWS = 32, 64, 8, 64


def loss_fn(model, batch):
    """Return the cross entropy of a batch."""
    logits = jax.vmap(model)(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def make_batch(call):
    """Return rows that depend on the call alone; a label is the largest of eight projections."""
    x = np.random.default_rng(call).normal(size=(ROWS, FEATURES)).astype(np.float32)
    teacher = np.random.default_rng(10_000).normal(size=(FEATURES, CLASSES))
    return {"x": x, "label": (x @ teacher).argmax(-1)}


def set_up(devices):
    """Return the chain, a module and its state on these devices, the step, the rows' sharding."""
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    shards = NamedSharding(mesh, P("data"))
    model = eqx.nn.MLP(FEATURES, CLASSES, HIDDEN, 2, key=jax.random.key(0))
    model = eqx.filter_shard(model, shards)  # every first dimension divides by the devices

    # From inside out: the optimizer and its average, the reduction, the window, the loss scale.
    tx = boostax.model.average_params(optax.contrib.muon(0.1), decay=0.8)
    tx = boostax.accumulate(optax.chain(boostax.all_reduce(), tx), WINDOW)
    tx = boostax.on_mesh(boostax.dynamic_loss_scale(tx, growth_interval=20), model)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    grad_fn = boostax.value_and_grad(loss_fn, mesh=mesh, policy="O2")

    @eqx.filter_jit(donate="all")
    def make_step(model, opt_state, batch):
        loss, grads = grad_fn(model, opt_state, batch)
        model, opt_state = boostax.apply_gradients(tx, grads, opt_state, model)
        return model, opt_state, loss

    return tx, model, opt_state, make_step, shards


def train(model, opt_state, make_step, shards, calls):
    """Take the calls, log every sixth, and return the module and the optimizer's state."""
    for call in calls:
        batch = jax.device_put(make_batch(call), shards)
        model, opt_state, loss = make_step(model, opt_state, batch)
        if call % 6 == 0:
            told = boostax.metrics(opt_state)
            scale, skipped = told["loss_scale"], told["skipped"]
            print(f"call {call}: loss {loss:.3f}, loss scale {scale:.0f}, skipped {skipped}")
    return model, opt_state


def evaluate(model, opt_state):
    """Print the loss of the averaged module on rows that are never trained on."""
    average = boostax.model.averaged_params(model, opt_state)
    print(f"held out {eqx.filter_jit(loss_fn)(average, make_batch(20_000)):.3f}")


def main():
    """Train, save inside a window, resume on half of the devices, and count the step."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    tx, model, opt_state, make_step, shards = set_up(jax.devices())
    model, opt_state = train(model, opt_state, make_step, shards, range(SAVED))
    evaluate(model, opt_state)
    batch = jax.device_put(make_batch(0), shards)
    found = boostax.audit(make_step, model, opt_state, batch, calls=WINDOW)
    print(f"an optimizer step reduces {found.reductions:.2f} N, gathers {found.gathers:.2f} N")

    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        saved = eqx.filter((model, opt_state), eqx.is_array)
        checkpointer.save(SAVED, saved, {"calls": SAVED})
        # A fresh module on the other devices says where each array goes.
        tx, model, opt_state, make_step, shards = set_up(jax.devices()[: DEVICES // 2])
        arrays, functions = eqx.partition((model, opt_state), eqx.is_array)
        arrays, meta = checkpointer.restore(arrays, reshard=True)
        model, opt_state = eqx.combine(arrays, functions)
    print(f"resumed on {DEVICES // 2} devices")
    evaluate(model, opt_state)
    calls = range(meta["calls"], CALLS)
    model, opt_state = train(model, opt_state, make_step, shards, calls)
    # A run may end inside a window; this applies what it has.
    model, opt_state = boostax.flush(tx, opt_state, model)
    evaluate(model, opt_state)


if __name__ == "__main__":
    main()
