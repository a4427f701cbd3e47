"""Train the head of a Flax NNX model on a frozen backbone, with BatchNorm and Dropout, in f16.

Eight emulated devices hold whole params, and compare their copies. The program evaluates an
averaged head, saves inside a window of four calls, resumes on four devices, and counts what a step
reduces. Model and optimizer change in place. Params change only in steps. Each call averages the
statistics of BatchNorm over the devices, unless a statistic is not finite. A device normalizes by
statistics of its rows (of all rows with ``axis_name="data"`` in the layer) and draws its dropout.

    JAX_PLATFORMS=cpu python examples/loops/nnx_loop.py
"""

import tempfile

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import boostax
from boostax.checkpoint import Checkpointer

DEVICES, WINDOW, CALLS, SAVED = 8, 4, 60, 42
FEATURES, HIDDEN, CLASSES, ROWS = 32, 64, 8, 64
HEAD = nnx.All(nnx.Param, nnx.PathContains("head"))  # what is trained


class Model(nnx.Module):
    """A backbone, whose weights would come from a file, and a head."""

    def __init__(self, rngs):
        sizes = (FEATURES, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, CLASSES)
        first, up, down = (nnx.Linear(*size, rngs=rngs) for size in sizes)
        norms = [nnx.BatchNorm(HIDDEN, momentum=0.9, rngs=rngs) for _ in range(2)]
        self.backbone = nnx.Sequential(first, norms[0], nnx.relu)
        self.head = nnx.Sequential(up, norms[1], nnx.relu, nnx.Dropout(0.1, rngs=rngs), down)


def loss_fn(model, batch):
    """Return the cross entropy of a batch."""
    logits = model.head(model.backbone(batch["x"]))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def make_batch(call):
    """Return rows that depend on the call alone; a label is the largest of eight projections."""
    x = np.random.default_rng(call).normal(size=(ROWS, FEATURES)).astype(np.float32)
    teacher = np.random.default_rng(10_000).normal(size=(FEATURES, CLASSES))
    return {"x": x, "label": (x @ teacher).argmax(-1)}


def set_up(devices):
    """Return model and optimizer on these devices, the step, and the sharding of rows."""
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    model = Model(nnx.Rngs(0))
    model.backbone.eval()  # or its statistics move, although its params are frozen
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, PartitionSpec())))
    # From inside out: optimizer and average, reduction, window, loss scale, check of the replicas.
    tx = boostax.model.average_params(optax.adamw(2e-2), decay=0.8)
    tx = boostax.accumulate(optax.chain(boostax.all_reduce(), tx), WINDOW)
    tx = boostax.precision.check_replicas(boostax.dynamic_loss_scale(tx, growth_interval=20))
    optimizer = boostax.nnx.Optimizer(model, tx, wrt=HEAD, axis_name="data")

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, batch):
        loss, grads = optimizer.value_and_grad(loss_fn, policy="O2")(model, batch)
        optimizer.update(model, grads)
        return loss

    return model, optimizer, step, NamedSharding(mesh, PartitionSpec("data"))


def train(model, optimizer, step, rows, calls):
    """Take the calls, and log every sixth."""
    for call in calls:
        loss = step(model, optimizer, jax.device_put(make_batch(call), rows))
        if call % 6 == 0:
            boostax.precision.raise_if_diverged(optimizer.opt_state)
            scale, skipped = map(boostax.metrics(optimizer).get, ("loss_scale", "skipped"))
            print(f"call {call}: loss {loss:.3f}, loss scale {scale:.0f}, skipped {skipped}")


def evaluate(model, optimizer):
    """Print the loss of the averaged head on rows that are never trained on."""
    average = nnx.clone(model)
    nnx.update(average, boostax.model.averaged_params(nnx.state(model, HEAD), optimizer.opt_state))
    forward = nnx.jit(loss_fn)
    for call in range(20):  # statistics of BatchNorm belong to the params they are measured with
        forward(average, make_batch(call))
    average.eval()
    print(f"held out {forward(average, make_batch(20_000)):.3f}")


def main():
    """Train, save inside a window, resume on half of the devices, and count the step."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    model, optimizer, step, rows = set_up(jax.devices())
    train(model, optimizer, step, rows, range(SAVED))
    evaluate(model, optimizer)
    batch, head = jax.device_put(make_batch(0), rows), nnx.state(model, HEAD)
    found = boostax.audit(step, model, optimizer, batch, params=head, calls=WINDOW)
    print(f"an optimizer step reduces {found.reductions:.2f} N, statistics of BatchNorm included")
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        saved = nnx.as_pure((nnx.state(model), optimizer.opt_state))
        checkpointer.save(SAVED, saved, {"calls": SAVED})
        # A fresh run on the other devices says where each array goes.
        model, optimizer, step, rows = set_up(jax.devices()[: DEVICES // 2])
        target = nnx.as_pure((nnx.state(model), optimizer.opt_state))
        restored, meta = checkpointer.restore(target, reshard=True)
    nnx.update(model, restored[0])
    optimizer.set_state(restored[1])
    print(f"resumed on {DEVICES // 2} devices")
    evaluate(model, optimizer)
    train(model, optimizer, step, rows, range(meta["calls"], CALLS))
    optimizer.flush(model)  # applies a window that is still open
    evaluate(model, optimizer)


if __name__ == "__main__":
    main()
