"""Attention logits under Muon on text: how large they become, and what bounding them costs.

Every method trains on the same batches from the same weights at every rate. Its best rate has the
lowest mean loss over the seeds on rows to choose by; the loss reported is that of others. At ten
times Muon's best rate the largest logit is measured at every step: in the forward pass of the step,
which `qk_clip` is told of, and with the new weights, on the same batch and on one held out.
"""

import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from harness import Bar, arguments, over_seeds, power_in, report
from text_runs import Text, warmed
from workloads import TextConfig

import boostax
from boostax.model import Heads, qk_clip, set_gradient

WIDTH, HEADS, LENGTH, LAYERS, STEPS, JUDGED = 64, 4, 32, 2, 150, 32
TEXT = Text(TextConfig(width=WIDTH, sequence_length=LENGTH, batch_size=16), judged=JUDGED)
WHERE = "largest logit in a step", "after it", "after it, held out"
RATES, MORE, BOUND = tuple(2.0**power for power in range(-6, -2)), 10, 100.0
LAYOUT = Heads("block_*/query", "block_*/key", "block_*/max_logits", axis=-1)


class Method(NamedTuple):
    """What bounds the logits: `qk_clip`, a soft cap of them, or norms of queries and keys."""

    tau: float | None = None
    cap: float | None = None
    norm: bool = False


METHODS = {
    "Muon": Method(),
    # Kimi K2's rule with a threshold of 100.
    **{f"qk_clip, tau {tau:g}": Method(tau) for tau in (200.0, 100.0, 20.0)},
    "soft cap of 50": Method(cap=50.0),
    "QK-norm": Method(norm=True),
}


def init(key: jax.Array) -> Any:
    """Params; kernels by their width."""
    keys = iter(jax.random.split(key, 64))
    draw = lambda *shape, by=WIDTH: jax.random.normal(next(keys), shape) * by**-0.5  # noqa: E731
    params = {"tokens": draw(128, WIDTH, by=2500), "places": draw(LENGTH, WIDTH, by=2500)}
    for i in range(LAYERS):
        block = {name: draw(WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
        block |= {"up": draw(WIDTH, 4 * WIDTH), "down": draw(4 * WIDTH, WIDTH, by=4 * WIDTH)}
        block |= {name: jnp.ones(WIDTH) for name in ("before", "between")}
        params[f"block_{i}"] = block | {"max_logits": jnp.zeros(HEADS), "gain": jnp.ones(())}
    return params | {"norm": jnp.ones(WIDTH), "head": draw(WIDTH, 128)}


def rms(x: jax.Array, scale: Any = 1.0) -> jax.Array:
    """RMSNorm."""
    return scale * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def loss_fn(method: Method, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Nats a character, and the largest logit."""
    x, largest = params["tokens"][batch["inputs"]] + params["places"], []
    for block in (params[f"block_{i}"] for i in range(LAYERS)):
        y = rms(x, block["before"])
        split = lambda name: (y @ block[name]).reshape(*x.shape[:2], HEADS, -1)  # noqa: B023, E731
        q, k, v = map(split, ("query", "key", "value"))
        q, k = (rms(q, block["gain"]), rms(k)) if method.norm else (q, k)
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
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean(), jnp.stack(largest).max()


def optimizer(method: Method, rate: Any) -> optax.GradientTransformation:
    """Muon for the kernels of blocks, Adam at a fifth of its rate for the rest."""
    dims = optax.contrib.MuonDimensionNumbers()
    which = lambda path, x: dims if "block" in str(path[0]) and x.ndim == 2 else None  # noqa: E731
    kernels = functools.partial(jax.tree_util.tree_map_with_path, which)
    how: Any = {"muon_weight_dimension_numbers": kernels}
    rates = warmed(rate, STEPS), warmed(rate / 5, STEPS)
    muon: Any = optax.contrib.muon(rates[0], adam_learning_rate=rates[1], **how)
    muon = qk_clip(muon, LAYOUT, tau=method.tau) if method.tau else muon
    return boostax.carry(muon, {"max_logits": "max"})


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(method: Method, watched: bool, rate: Any, params: Any, batches: Any, judged: Any) -> Any:
    """The loss to choose by, the one to report, and the largest logits of each step, `[steps, 3]`.

    They are those in the step and, where it is `watched`, after it on its batch and on another.
    """
    tx, loss = optimizer(method, rate), functools.partial(loss_fn, method)
    other = jax.tree.map(lambda x: x[0], judged)

    def step(carry: Any, batch: Any) -> Any:
        (_, told), grads = jax.value_and_grad(loss, has_aux=True)(carry[0], batch)
        new = boostax.apply_gradients(tx, grads, carry[1], carry[0])
        return new, jnp.stack([told, *(loss(new[0], x)[1] for x in (batch, other) if watched)])

    (params, _), largest = jax.lax.scan(step, (params, tx.init(params)), batches)
    nats = jax.lax.map(lambda batch: loss(params, batch)[0], judged)
    return nats[: JUDGED // 2].mean(), nats[JUDGED // 2 :].mean(), largest


def runs(method: Method, rate: float, seeds: int, watched: bool = False) -> list[jax.Array]:
    """What `train` returns, stacked over the seeds."""
    data = [(init(jax.random.key(seed)), *TEXT.batches(seed, STEPS)) for seed in range(seeds)]
    found = [train(method, watched, rate, *given) for given in data]
    return [jnp.stack(each) for each in zip(*found, strict=True)]


def main() -> None:
    seeds, begun = arguments(__doc__, seeds=5).seeds, time.monotonic()
    tuned: dict[str, jax.Array] = {}
    fast, best, start = [], [], 0.0
    for name, method in METHODS.items():
        found = {rate: runs(method, rate, seeds) for rate in RATES}
        rate = min(RATES, key=lambda x: float(found[x][0].mean()))
        start, tuned[name] = start or rate, found[rate][1]
        row = {"method": name, "rate": power_in(rate, RATES), **over_seeds(tuned[name], "nats")}
        row |= over_seeds(tuned[name] - tuned["Muon"], "beside Muon", "its s.e.")
        best.append(row | {"largest logit": float(found[rate][2].max())})
        _, nats, largest = runs(method, MORE * start, seeds, watched=True)
        row = {"method": name, **over_seeds(nats, "nats")}
        row |= over_seeds(nats - tuned["Muon"], "beside Muon at its rate", "its s.e.")
        row |= {x: float(largest[..., i].max()) for i, x in enumerate(WHERE)}
        over = (largest[..., 1:].max(-1) > BOUND).mean()
        fast.append(row | {f"steps that end above {BOUND:g}": float(over)})
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    plain, usual, low = fast[0], fast[2], best[3]
    bars = [
        Bar(
            f"tau 100 at {MORE} times the rate: largest logit", max(usual[x] for x in WHERE), BOUND
        ),
        Bar("1,000 / that of Muon", 1000 / plain[WHERE[1]], 1.0),
        Bar("tau 20: nats beside Muon, each at its best rate", low["beside Muon"], 0.0),
    ]
    sections = [(f"At {MORE} times Muon's best rate", fast), ("At the best rate", best)]
    title = f"Attention logits under Muon: text, {LAYERS} layers of {WIDTH}, {STEPS} batches"
    report("qk_clip", f"{title}, {seeds} seeds", sections, bars)


if __name__ == "__main__":
    main()
