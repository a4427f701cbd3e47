"""The same network in JAX, and the file of work that is written for all frameworks.

Usage: jax_lenet.py WORK, to write it.
"""

import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import lenet
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits

import boostax

PyTree = Any


def to_params(weights: lenet.Weights) -> PyTree:
    """In the layouts that XLA prefers: features last, of images, of kernels and of inputs."""
    params: dict[str, Any] = {}
    for layer in lenet.LAYERS:
        kernel = weights[f"{layer}.weight"]
        if layer == "fc1":
            # Its inputs are 16 features at 5 x 5 places, here with the features last.
            kernel = kernel.reshape(-1, 16, 5, 5).transpose(2, 3, 1, 0).reshape(400, -1)
        elif kernel.ndim == 4:
            kernel = kernel.transpose(2, 3, 1, 0)
        else:
            kernel = kernel.T
        params[layer] = {
            "kernel": jnp.asarray(kernel),
            "bias": jnp.asarray(weights[f"{layer}.bias"]),
        }
    return params


def from_params(params: PyTree) -> lenet.Weights:
    """The way back from ``to_params``."""
    found: lenet.Weights = {}
    for layer in lenet.LAYERS:
        kernel = np.asarray(params[layer]["kernel"])
        if layer == "fc1":
            kernel = kernel.reshape(5, 5, 16, -1).transpose(3, 2, 0, 1).reshape(-1, 400)
        elif kernel.ndim == 4:
            kernel = kernel.transpose(3, 2, 0, 1)
        else:
            kernel = kernel.T
        found[f"{layer}.weight"] = kernel
        found[f"{layer}.bias"] = np.asarray(params[layer]["bias"])
    return found


def logits(params: PyTree, images: jax.Array) -> jax.Array:
    """``[batch, 10]`` of images ``[batch, 32, 32, 1]``."""
    for layer in ("conv1", "conv2"):
        kernel, bias = params[layer]["kernel"], params[layer]["bias"]
        names = ("NHWC", "HWIO", "NHWC")
        images = lax.conv_general_dilated(images, kernel, (1, 1), "VALID", dimension_numbers=names)
        images = jax.nn.relu(images + bias)
        window = (1, 2, 2, 1)
        images = lax.reduce_window(images, -jnp.inf, lax.max, window, window, "VALID")
    hidden = images.reshape(len(images), -1)
    for layer in ("fc1", "fc2"):
        hidden = jax.nn.relu(hidden @ params[layer]["kernel"] + params[layer]["bias"])
    return hidden @ params["fc3"]["kernel"] + params["fc3"]["bias"]


def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
    """Mean cross-entropy in nats."""
    found = logits(params, batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(found, batch["labels"]).mean()


def to_batches(work: lenet.Work) -> list[PyTree]:
    """All of them, in NumPy, features last."""
    images = work.images.transpose(0, 1, 3, 4, 2)
    return [{"images": x, "labels": y} for x, y in zip(images, work.labels, strict=True)]


def write(path: pathlib.Path) -> lenet.Work:
    """Make the work and save it: digits, a freeze schedule, a basis from a short run."""
    digits: Any = load_digits()
    images, labels = lenet.batches(digits.images, digits.target)
    schedule = boostax.freeze_schedule(
        "interval", total_steps=lenet.CALLS, frozen_fraction=lenet.FROZEN_FRACTION
    )
    nothing = np.zeros(0, np.float32)
    work = lenet.Work(images, labels, schedule.depths(len(lenet.LAYERS)), nothing, nothing)
    snapshots = _trained(work)
    basis = lenet.principal(snapshots, lenet.DIRECTIONS)
    work = work._replace(basis=basis, finish=snapshots[-1])
    lenet.save(path, work)
    return work


def _trained(work: lenet.Work) -> lenet.Array:
    """Params along a run of plain SGD, ``[SNAPSHOTS, n]``."""
    tx = optax.sgd(lenet.RATE, lenet.MOMENTUM)

    @jax.jit
    def step(params: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params = to_params(lenet.weights())
    state, rows = tx.init(params), to_batches(work)
    found = []
    for index in range(lenet.SNAPSHOTS * lenet.SNAPSHOT_EVERY):
        params, state = step(params, state, rows[index % len(rows)])
        if (index + 1) % lenet.SNAPSHOT_EVERY == 0:
            found.append(lenet.flat(from_params(params)))
    return np.stack(found)


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
