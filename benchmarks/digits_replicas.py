"""Many replicas of a small digits classifier, emulated on one device by ``jax.vmap``.

A whole training run is one compiled scan, over all seeds and learning rates at once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import boostax
from boostax._core.replicas import is_per_replica, owns_params

PyTree = Any
SIZES = (64, 64, 32, 10)
BATCH, EPOCHS, WARM_UP = 8, 4, 0.17
RATES = tuple(2.0**power for power in range(-8, 4))
METHODS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda sgd: optax.chain(boostax.all_reduce("data"), sgd),
    "sum": lambda sgd: optax.chain(boostax.all_reduce("data", op="sum"), sgd),
    "AdaSum, leaf": lambda sgd: optax.chain(boostax.adasum("data"), sgd),
    "AdaSum, tree": lambda sgd: optax.chain(boostax.adasum("data", scope="tree"), sgd),
    "AdaSum, delta": lambda sgd: boostax.reduce.adasum_delta(sgd, axis_name="data"),
}


class Split(NamedTuple):
    """Images ``[rows, 64]`` in [0, 1] and their labels."""

    images: jax.Array
    labels: jax.Array


class Sweep(NamedTuple):
    """What every learning rate and seed ended with: arrays ``[rates, seeds]``.

    ``orthogonality`` is ``[rates, seeds, steps]``, NaN for a method that does not record it.
    """

    validation: np.ndarray
    test: np.ndarray
    orthogonality: np.ndarray


@functools.cache
def data() -> tuple[Split, Split, Split]:
    """1,150 rows to train on, 290 to choose the learning rate by, 357 to test on."""
    from sklearn.datasets import load_digits  # takes a second to import

    found: Any = load_digits()
    rows = np.random.default_rng(0).permutation(len(found.target))
    images, labels = found.data.astype(np.float32) / 16, found.target.astype(np.int32)
    parts = np.split(rows, (1150, 1440))
    training, validation, test = (
        Split(jnp.asarray(images[part]), jnp.asarray(labels[part])) for part in parts
    )
    return training, validation, test


def order(
    seed: int, replicas: int, epochs: int = EPOCHS, batch: int = BATCH
) -> np.ndarray[Any, Any]:
    """Rows of the training split, ``[steps, replicas, batch]``: every epoch in a new order."""
    training = data()[0].labels
    random = np.random.default_rng(seed)
    rows = np.concatenate([random.permutation(len(training)) for _ in range(epochs)])
    steps = len(rows) // (replicas * batch)
    return rows[: steps * replicas * batch].reshape(steps, replicas, batch)


def init(key: jax.Array, sizes: Sequence[int] = SIZES) -> PyTree:
    """Weights of variance 2 / inputs, for relu."""
    return [
        {"kernel": jax.random.normal(k, (i, o)) * (2 / i) ** 0.5, "bias": jnp.zeros(o)}
        for k, i, o in zip(jax.random.split(key, len(sizes) - 1), sizes, sizes[1:], strict=False)
    ]


def logits(params: PyTree, images: jax.Array) -> jax.Array:
    """A perceptron with two hidden layers."""
    *hidden, head = params
    for layer in hidden:
        images = jax.nn.relu(images @ layer["kernel"] + layer["bias"])
    return images @ head["kernel"] + head["bias"]


def loss(params: PyTree, batch: Split) -> jax.Array:
    """Mean cross-entropy in nats."""
    found = logits(params, batch.images)
    return optax.softmax_cross_entropy_with_integer_labels(found, batch.labels).mean()


def accuracy(params: PyTree, rows: Split) -> jax.Array:
    """Share of right answers; 0 once the params are not finite."""
    found = logits(params, rows.images)
    return jnp.mean((found.argmax(-1) == rows.labels) & jnp.isfinite(found).all(-1))


def schedule(rate: jax.Array, steps: int) -> Callable[[Any], jax.Array]:
    """Linear warm-up to ``rate``, then linear decay to almost nothing."""
    warm = max(1, round(WARM_UP * steps))
    return lambda step: rate * jnp.minimum((step + 1) / warm, (steps - step) / (steps - warm))


def emulated(
    tx: Any, loss_fn: Callable[[PyTree, PyTree], jax.Array], params: PyTree, count: int
) -> tuple[PyTree, Callable[[PyTree, PyTree], Any], Callable[[PyTree], PyTree]]:
    """Emulate replicas by ``jax.vmap``.

    Returns:
      The params and state of ``count`` replicas, a step from these and batches ``[count, ...]`` to
      these and the mean loss, and a function of these that returns the params. Where each replica
      has its own params, theirs is the mean.
    """
    state = tx.init(params)
    owned = owns_params(state)
    carry = boostax.PerReplica(params) if owned else params, state
    own = jax.tree.map(lambda x: 0 if is_per_replica(x) else None, carry, is_leaf=is_per_replica)

    # What is the same on all replicas is held once: vmap refuses what it cannot prove to be.
    @functools.partial(jax.vmap, in_axes=(own, 0), out_axes=(own, None), axis_name="data")
    def step(carry: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        params = carry[0].local if owned else carry[0]
        value, grads = jax.value_and_grad(loss_fn)(params, batch)
        params, state = boostax.apply_gradients(tx, grads, carry[1], params)
        kept = boostax.PerReplica(params) if owned else params
        return (kept, state), jax.lax.pmean(value, "data")

    def of(carry: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.mean(0), carry[0].local) if owned else carry[0]

    return boostax.states.stack_replicas(carry, count), step, of


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sweep(
    method: str,
    momentum: float | None,
    splits: tuple[Split, Split, Split],
    rates: jax.Array,
    params: PyTree,
    rows: jax.Array,
) -> Sweep:
    training, validation, test = splits

    def run(rate: jax.Array, params: PyTree, rows: jax.Array) -> Any:
        tx = METHODS[method](optax.sgd(schedule(rate, len(rows)), momentum))
        carry, step, params_of = emulated(tx, loss, params, rows.shape[1])

        def trained(carry: PyTree, rows: jax.Array) -> tuple[PyTree, jax.Array]:
            carry, _ = step(carry, Split(training.images[rows], training.labels[rows]))
            return carry, boostax.metrics(carry[1]).get("orthogonality", jnp.float32(jnp.nan))

        carry, orthogonality = jax.lax.scan(trained, carry, rows)
        params = params_of(carry)
        return accuracy(params, validation), accuracy(params, test), orthogonality

    return Sweep(*jax.vmap(jax.vmap(run, (None, 0, 0)), (0, None, None))(rates, params, rows))


def sweep(
    method: str,
    replicas: int,
    *,
    momentum: float | None = None,
    rates: Sequence[float] = RATES,
    seeds: int = 5,
    epochs: int = EPOCHS,
) -> Sweep:
    """Train with every learning rate and seed; a seed sets the weights and the order of rows."""
    rows = jnp.stack([order(seed, replicas, epochs) for seed in range(seeds)])
    params = jax.vmap(init)(jax.vmap(jax.random.key)(jnp.arange(seeds)))
    return jax.device_get(_sweep(method, momentum, data(), jnp.asarray(rates), params, rows))


def best(found: Sweep) -> int:
    """Index of the learning rate with the highest validation accuracy over the seeds."""
    return int(found.validation.mean(1).argmax())
