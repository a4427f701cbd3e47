"""Attention logits under Muon on text: how large they become, and what bounding them costs.

Every method trains on the same batches from the same weights at every rate. Its best rate has the
lowest mean loss over the seeds on rows to choose by; the loss reported is that of others. At ten
times Muon's best rate the largest logit is measured at every step: in the forward pass of the step,
which `qk_clip` is told of, and with the new weights, on the same batch and on one held out.
"""

import argparse
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Bar, over_seeds, power_in, report
from text_runs import Text, warmed
from workloads import TextConfig

import boostax
from boostax.model import Heads, qk_clip, set_gradient

PyTree = Any
WIDTH, HEADS, LENGTH, LAYERS, STEPS, JUDGED = 64, 4, 64, 2, 200, 16
TEXT = Text(TextConfig(width=WIDTH, sequence_length=LENGTH, batch_size=16), judged=JUDGED)
RATES, MORE, BOUND = tuple(2.0**power for power in range(-6, -2)), 10, 100.0
LAYOUT = Heads("block_*/query", "block_*/key", "block_*/max_logits", axis=-1)


class Method(NamedTuple):
    """What bounds the logits: `qk_clip`, a soft cap of them, or norms of queries and keys."""

    tau: float | None = None
    cap: float | None = None
    norm: bool = False


METHODS = {
    "Muon": Method(),
    **{f"qk_clip, tau {tau:g}": Method(tau) for tau in (100.0, 50.0, 10.0)},
    "soft cap of 50": Method(cap=50.0),
    "QK-norm": Method(norm=True),
}


def init(key: jax.Array) -> PyTree:
    """Params; kernels by their width."""
    keys = iter(jax.random.split(key, 64))
    draw = lambda *shape, by=WIDTH: jax.random.normal(next(keys), shape) * by**-0.5  # noqa: E731
    params = {"tokens": draw(128, WIDTH, by=2500), "places": draw(LENGTH, WIDTH, by=2500)}
    for i in range(LAYERS):
        block = {name: draw(WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
        block |= {"up": draw(WIDTH, 4 * WIDTH), "down": draw(4 * WIDTH, WIDTH, by=4 * WIDTH)}
        block |= {name: jnp.ones(WIDTH) for name in ("before", "between")}
        params[f"block_{i}"] = block | {"max_logits": jnp.zeros(HEADS)}
    return params | {"norm": jnp.ones(WIDTH), "head": draw(WIDTH, 128)}


def rms(x: jax.Array, scale: Any = 1.0) -> jax.Array:
    """RMSNorm."""
    return scale * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def loss_fn(method: Method, params: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array]:
    """Nats a character, and the largest logit."""
    x, largest = params["tokens"][batch["inputs"]] + params["places"], []
    for block in (params[f"block_{i}"] for i in range(LAYERS)):
        y = rms(x, block["before"])
        split = lambda name: (y @ block[name]).reshape(*x.shape[:2], HEADS, -1)  # noqa: B023, E731
        q, k, v = map(split, ("query", "key", "value"))
        q, k = (rms(q), rms(k)) if method.norm else (q, k)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        scores = method.cap * jnp.tanh(scores / method.cap) if method.cap else scores
        scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -jnp.inf)
        largest.append(scores.max((0, 2, 3)))
        scores = set_gradient(scores, block["max_logits"], largest[-1])
        x += (
            jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ block["out"]
        )
        x += jax.nn.gelu(rms(x, block["between"]) @ block["up"]) @ block["down"]
    logits, targets = rms(x, params["norm"]) @ params["head"], batch["targets"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return loss, jnp.stack(largest).max()


def optimizer(method: Method, rate: Any) -> optax.GradientTransformation:
    """Muon for the kernels of blocks, Adam at a fifth of its rate for the rest."""
    kernel = lambda path, x: "block" in str(path[0]) and x.ndim == 2  # noqa: E731
    dims = optax.contrib.MuonDimensionNumbers()
    which = lambda path, x: dims if kernel(path, x) else None  # noqa: E731
    muon: Any = optax.contrib.muon(
        warmed(rate, STEPS),
        adam_learning_rate=warmed(rate / 5, STEPS),
        muon_weight_dimension_numbers=functools.partial(jax.tree_util.tree_map_with_path, which),
    )
    muon = qk_clip(muon, LAYOUT, tau=method.tau) if method.tau else muon
    return boostax.carry(muon, {"max_logits": "max"})


@functools.partial(jax.jit, static_argnums=0)
def train(method: Method, rate: Any, params: PyTree, batches: PyTree, judged: PyTree) -> Any:
    """The losses to choose by and to report, and the largest logits of all steps."""
    tx, loss = optimizer(method, rate), functools.partial(loss_fn, method)
    held_out = jax.tree.map(lambda x: x[0], judged)

    def step(carry: Any, batch: PyTree) -> Any:
        (_, told), grads = jax.value_and_grad(loss, has_aux=True)(carry[0], batch)
        new = boostax.apply_gradients(tx, grads, carry[1], carry[0])
        return new, (told, loss(new[0], batch)[1], loss(new[0], held_out)[1])

    (params, _), largest = jax.lax.scan(step, (params, tx.init(params)), batches)
    nats = jax.lax.map(lambda batch: loss(params, batch)[0], judged)
    return nats[: JUDGED // 2].mean(), nats[JUDGED // 2 :].mean(), *largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    options, begun = parser.parse_args(), time.monotonic()

    def runs(method: Method, rate: float) -> list[Any]:
        seeds = range(options.seeds)
        data = [(init(jax.random.key(seed)), *TEXT.batches(seed, STEPS)) for seed in seeds]
        return [jax.device_get(train(method, rate, *given)) for given in data]

    tuned, fast, rows = {}, [], []
    for name, method in METHODS.items():
        by_rate = {rate: runs(method, rate) for rate in RATES}
        best = min(RATES, key=lambda x: float(np.mean([run[0] for run in by_rate[x]])))
        tuned[name] = best, np.array([run[1] for run in by_rate[best]])
        beside = over_seeds(tuned[name][1] - tuned["Muon"][1], "beside Muon", "its s.e.")
        largest = max(run[2].max() for run in by_rate[best])
        row = {"method": name, "rate": power_in(best, RATES), "largest logit": float(largest)}
        rows.append(row | over_seeds(tuned[name][1], "nats") | beside)
        found = runs(method, MORE * tuned["Muon"][0])
        nats = np.array([run[1] for run in found])
        row = {"method": name, **over_seeds(nats, "nats")}
        row |= over_seeds(nats - tuned["Muon"][1], "beside Muon at its rate", "its s.e.")
        for i, where in enumerate(("in the step", "after it", "held out")):
            row[f"largest logit {where}"] = float(max(run[2 + i].max() for run in found))
        over = [np.maximum(run[3], run[4]) > BOUND for run in found]
        fast.append(row | {f"steps after which one is above {BOUND:g}": float(np.mean(over))})
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    by = {row["method"]: row for row in fast}
    half = by["qk_clip, tau 50"]
    worst = max(half["largest logit after it"], half["largest logit held out"])
    ratio = float(tuned["qk_clip, tau 10"][1].mean() / tuned["Muon"][1].mean())
    bars = [
        Bar(f"tau 50: largest logit after any step, at {MORE} times the rate", worst, BOUND),
        Bar("1,000 / Muon's largest logit there", 1000 / by["Muon"]["largest logit after it"], 1.0),
        Bar("tau 10 / Muon, each at its best rate, nats", ratio, 1.0),
    ]
    size = f"{LAYERS} layers of {WIDTH}, {STEPS} batches, {options.seeds} seeds"
    sections = [(f"At {MORE} times Muon's best rate", fast), ("At the best rate", rows)]
    report("qk_clip", f"Attention logits under Muon: text, {size}", sections, bars)


if __name__ == "__main__":
    main()
