"""Training runs of eight replicas, emulated by ``jax.vmap``, and how a method is tuned for them.

A perceptron on digits by SGD, and a small transformer on text by AdamW.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_replicas import Split, accuracy, data, emulated, init, loss, order
from harness import over_seeds, power, power_in
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from text_runs import Text
from workloads import TextConfig

import boostax

PyTree = Any
AXIS, REPLICAS = "data", 8
SIZES, BATCH, EPOCHS = (64, 128, 128, 10), 8, 34
RATES = tuple(2.0**power for power in range(-10, 2))
TEXT = Text(TextConfig(width=16, depth=1, heads=2, sequence_length=16, batch_size=16), judged=256)
TEXT_STEPS = 16_000
TEXT_RATES = tuple(2.0**power for power in range(-9, -4))


class Method(NamedTuple):
    """A way to train replicas together.

    Attributes:
      name: as in the tables.
      feedback: whether it keeps what it does not send; ``None`` where that has no meaning.
      build: from an optimizer, the transformation that is also told how the replicas meet.
      momentum: of the optimizer: of SGD, or the first of AdamW's two averages.
      rates: the learning rates to try; digits only.
      final: what ``build`` becomes in the end, if it warms up.
      share: of the steps in which a conditional collective runs.
    """

    name: str
    feedback: bool | None
    build: Callable[[Any], Any]
    momentum: float | None = 0.9
    rates: Sequence[float] = RATES
    final: Callable[[Any], Any] | None = None
    share: float = 0.5


class Ending(NamedTuple):
    """What one training run ended with.

    Attributes:
      validation: what the rate is chosen by, the higher the better.
      test: accuracy, or loss in nats per character.
      training: loss over the training split (digits), or over the last tenth of the steps (text).
      unsent: share of the gradients held back, mean over the last fourth of the steps.
    """

    validation: float
    test: float
    training: float
    unsent: float


class Tuned(NamedTuple):
    """A method with the rate that suits it.

    Attributes:
      rate: the learning rate chosen.
      endings: of every seed, at that rate.
      first: the first seed's validation at every rate.
      wire: bytes that a replica sends, in those of a mean in f32.
    """

    rate: float
    endings: list[Ending]
    first: dict[float, float]
    wire: float

    @property
    def test(self) -> np.ndarray[Any, Any]:
        """A figure per seed."""
        return np.array([each.test for each in self.endings])


Run = Callable[[float, int], Ending]


def first(reduction: Any) -> Callable[[Any], Any]:
    """The reduction, then the optimizer."""
    return lambda optimizer: optax.chain(reduction, optimizer)


def train(
    tx: Any, loss_fn: Callable[[PyTree, PyTree], jax.Array], params: PyTree, batches: PyTree
) -> tuple[PyTree, jax.Array, jax.Array]:
    """``(params, losses, unsent)`` of a step for each of ``batches [steps, replicas, ...]``."""
    carry, step, params_of = emulated(tx, loss_fn, params, REPLICAS)

    def measured(carry: PyTree, batch: PyTree) -> tuple[PyTree, tuple[jax.Array, jax.Array]]:
        carry, value = step(carry, batch)
        return carry, (value, jnp.asarray(boostax.metrics(carry[1]).get("unsent", jnp.float32(0))))

    carry, (losses, unsent) = jax.lax.scan(measured, carry, batches)
    return params_of(carry), losses, unsent[-(len(unsent) // 4) :].mean()


def schedule(rate: jax.Array, steps: int) -> optax.Schedule:
    """Linear warm-up for a tenth of the steps, then a cosine to zero."""
    # optax.warmup_cosine_decay_schedule asks for a rate that is no tracer.
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps)
    return lambda step: rate * shape(step)


def digits_run(method: Method) -> Run:
    """Train the perceptron."""
    training, validation, test = data()

    def rows_loss(params: PyTree, rows: jax.Array) -> jax.Array:
        return loss(params, Split(training.images[rows], training.labels[rows]))

    @jax.jit
    def trained(rate: jax.Array, key: jax.Array, rows: jax.Array) -> tuple[jax.Array, ...]:
        tx = method.build(optax.sgd(schedule(rate, len(rows)), method.momentum))
        params, _, unsent = train(tx, rows_loss, init(key, SIZES), rows)
        scores = accuracy(params, validation), accuracy(params, test)
        return *scores, loss(params, training), unsent

    def run(rate: float, seed: int) -> Ending:
        rows = order(seed, REPLICAS, EPOCHS, BATCH)
        return Ending(*map(float, trained(jnp.float32(rate), jax.random.key(seed), rows)))

    return run


def text_run(method: Method, steps: int = TEXT_STEPS) -> Run:
    """Train the transformer; it is judged for the choice of a rate on training windows unseen."""

    @jax.jit
    def trained(rate: jax.Array, params: PyTree, batches: PyTree) -> Any:
        optimizer = optax.adamw(schedule(rate, steps), b1=method.momentum or 0.0)
        return train(method.build(optimizer), TEXT.loss, params, batches)

    judged = jax.jit(TEXT.judge)

    def run(rate: float, seed: int) -> Ending:
        batches, unseen = text_batches(seed, steps)
        params, losses, unsent = trained(jnp.float32(rate), TEXT.init(seed), batches)
        last = losses[-(steps // 10) :].mean()
        held_out = TEXT.workload(seed).evaluate(params)["loss"]
        return Ending(-float(judged(params, unseen)), held_out, float(last), float(unsent))

    return run


def text_batches(seed: int, steps: int) -> tuple[PyTree, PyTree]:
    """Batches ``[steps, replicas, ...]`` to train on, and more ``[batches, ...]`` to judge by."""
    training, unseen = TEXT.batches(seed, steps)
    return jax.tree.map(lambda x: x.reshape(steps, REPLICAS, -1, x.shape[-1]), training), unseen


def wire_bytes(tx: Any, params: PyTree, share: float = 0.5) -> float:
    """Count what a device sends per step, conditional collectives by the share of steps."""
    mesh = jax.make_mesh((REPLICAS,), (AXIS,), axis_types=(AxisType.Auto,))

    def local(grads: PyTree) -> PyTree:
        grads = jax.tree.map(lambda x: x[0], grads)
        return tx.update(grads, tx.init(grads), grads)[0]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((REPLICAS, *x.shape), x.dtype), params)
    found = boostax.audit(jax.jit(mapped), stacked).collectives
    return sum(c.wire_bytes * (share if c.branches else 1) for c in found)


def tune(run: Run, rates: Sequence[float], seeds: int, *, finalists: int, judges: int) -> Any:
    """``(rate, endings, first)``: what one seed makes of all rates, some seeds of the best few."""
    done: dict[tuple[float, int], Ending] = {}

    def ending(rate: float, seed: int) -> Ending:
        if (rate, seed) not in done:
            done[rate, seed] = run(rate, seed)
        return done[rate, seed]

    def score(rate: float, count: int) -> float:
        scores = [ending(rate, seed).validation for seed in range(count)]
        return sum(scores) / count if all(map(math.isfinite, scores)) else -math.inf

    first = {rate: score(rate, 1) for rate in rates}
    few = sorted(rates, key=lambda rate: -first[rate])[:finalists]
    best = max(few, key=lambda rate: score(rate, min(judges, seeds)))
    return best, [ending(best, seed) for seed in range(seeds)], first


def tuned(method: Method, seeds: int, *, on_text: bool, steps: int = TEXT_STEPS) -> Tuned:
    """A method at its best rate; the steps are those of the text."""
    if on_text:
        run = text_run(method, steps)
        params = jax.eval_shape(TEXT.workload(0).init, jax.random.key(0))[0]
    else:
        run = digits_run(method)
        params = jax.eval_shape(lambda: init(jax.random.key(0), SIZES))
    rates = TEXT_RATES if on_text else method.rates
    few = {"finalists": 1, "judges": 1} if on_text else {"finalists": 3, "judges": 5}
    rate, endings, first = tune(run, rates, seeds, **few)
    dense = wire_bytes(boostax.all_reduce(AXIS), params)
    build = method.final or method.build
    wire = wire_bytes(build(optax.sgd(0.0)), params, method.share) / dense
    found = Tuned(rate, endings, first, wire)
    print(method.name, method.feedback, power(rate), found.test.mean(), flush=True)
    return found


def beside(dense: np.ndarray[Any, Any], other: np.ndarray[Any, Any], *, on_text: bool) -> Any:
    """Points of accuracy below dense gradients, or losses over theirs; paired by seed."""
    return other / dense if on_text else 100 * (dense - other)


def compared(each: Tuned, dense: Tuned, *, on_text: bool) -> dict[str, Any]:
    """The columns of a method beside dense gradients."""
    measure, name = ("held-out loss", "loss / dense") if on_text else ("test", "points below dense")
    return {
        "bytes / dense": each.wire,
        "rate": power_in(each.rate, each.first),
        **over_seeds(each.test, measure),
        **over_seeds(beside(dense.test, each.test, on_text=on_text), name, "its s.e."),
        "training loss": float(np.mean([end.training for end in each.endings])),
    }
