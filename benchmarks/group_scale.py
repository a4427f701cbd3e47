"""One loss scale or one per group: a deep narrow net of sigmoids in f16, on handwritten digits.

Its gradients shrink at every layer on their way down, so that no single scale fits them all. Every
way to scale has its rate tuned by the validation split with the first seed; a whole run is one
compiled scan over all seeds. Adam's epsilon is far below its default, which the gradients of the
first layers would not reach even in f32.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_replicas import Split, data
from harness import Bar, arguments, by_apply, compiled_form, over_seeds, paired, ratio, report

import boostax
from boostax.testing import drawn

PyTree = Any
DEPTH, WIDTH, BATCH = 10, 32, 64
# Of the weights at the start.
SPREAD = 0.05
RATES = tuple(2.0**power for power in range(-11, -5))
STATIC = tuple(2.0**power for power in range(4, 25, 4))


class Variant(NamedTuple):
    """A way to scale.

    Attributes:
      name: for the table.
      dtype: what the model computes in.
      wrap: from the optimizer and the labels to the scaled one; ``None`` scales nothing and skips
        what is not finite.
    """

    name: str
    dtype: Any
    wrap: Callable[[Any, PyTree], Any]


def variants() -> list[Variant]:
    half, high = jnp.float16, 2.0**60
    constant = lambda scale: lambda tx, labels: boostax.static_loss_scale(tx, scale)  # noqa: E731
    grouped = lambda **options: (  # noqa: E731
        lambda tx, labels: boostax.precision.group_loss_scale(tx, labels, max_scale=high, **options)
    )
    return [
        Variant("f32", jnp.float32, constant(1.0)),
        Variant("f16, no scale", half, constant(1.0)),
        *(Variant(f"f16, static 2**{int(np.log2(s))}", half, constant(s)) for s in STATIC),
        Variant(
            "f16, dynamic",
            half,
            lambda tx, labels: boostax.dynamic_loss_scale(tx, growth_interval=200),
        ),
        Variant("f16, by group, trial", half, grouped(growth_factor=2**0.01)),
        Variant("f16, by group, measured", half, grouped(rule="measure")),
    ]


def init(key: jax.Array) -> PyTree:
    """Normal weights, no bias: layer 0 sees the pixels."""
    sizes = (64, *[WIDTH] * DEPTH, 10)
    keys = jax.random.split(key, len(sizes) - 1)
    pairs = itertools.pairwise(sizes)
    return [
        {"w": SPREAD * jax.random.normal(k, pair), "b": jnp.zeros(pair[1])}
        for k, pair in zip(keys, pairs, strict=True)
    ]


def loss(params: PyTree, batch: Split, dtype: Any, scales: Any = None) -> jax.Array:
    hidden = batch.images.astype(dtype)
    for i, layer in enumerate(params):
        if i:
            hidden = boostax.precision.scale_boundary(hidden, scales, i - 1, i)
        hidden = hidden @ layer["w"].astype(dtype) + layer["b"].astype(dtype)
        hidden = jax.nn.sigmoid(hidden) if i < len(params) - 1 else hidden
    logits = hidden.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()


def labels_of(params: PyTree) -> PyTree:
    return list(range(len(params)))


def make_step(variant: Variant, tx: Any) -> Callable[..., Any]:
    """``(params, state, batch) -> (params, state)``, the loss scaled as the state says."""
    fn = functools.partial(loss, dtype=variant.dtype)

    def step(params: PyTree, state: Any, batch: Split) -> tuple[PyTree, Any]:
        scales = boostax.precision.group_scales(state)

        def scaled(params: PyTree) -> jax.Array:
            if scales is not None:
                return scales[-1] * fn(params, batch, scales=scales)
            return boostax.precision.scale_loss(fn(params, batch), state)

        return boostax.apply_gradients(drawn(tx), jax.grad(scaled)(params), state, params)

    return step


def trained(variant: Variant, rate: float, seeds: int, steps: int) -> dict[str, np.ndarray]:
    """A run of every seed: losses and accuracies at its end, skips and the final scales."""
    training, validation, test = data()
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20, steps)
    tx = variant.wrap(optax.adam(schedule, eps=1e-20), list(range(DEPTH + 1)))
    step = make_step(variant, tx)

    def one(key: jax.Array) -> dict[str, jax.Array]:
        params = init(key)

        def body(carry: Any, key: jax.Array) -> tuple[Any, None]:
            rows = jax.random.randint(key, (BATCH,), 0, len(training.labels))
            return step(*carry, Split(training.images[rows], training.labels[rows])), None

        keys = jax.random.split(jax.random.fold_in(key, 1), steps)
        (params, state), _ = jax.lax.scan(body, (params, tx.init(params)), keys)
        grouped = isinstance(state, boostax.states.GroupLossScaleState)
        judge = functools.partial(loss, params, dtype=jnp.float32)
        return {
            "validation": judge(validation),
            "loss": judge(test),
            "skipped": state.skipped,
            "scales": jnp.log2(state.scales if grouped else jnp.full(1, state.scale)),
        }

    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(keys))


def vanished() -> list[dict[str, Any]]:
    """Share of weight gradients that are zero at the first step in f16, per layer."""
    params = init(jax.random.key(0))
    batch = Split(*(x[:BATCH] for x in data()[0]))
    rows = []
    for scale in (1.0, 2.0**16):
        grads = jax.grad(lambda p, s=scale: s * loss(p, batch, jnp.float16))(params)
        shares = {f"layer {i}": float((g["w"] == 0).mean()) for i, g in enumerate(grads)}
        rows.append({"one scale": f"{scale:g}", **shares})
    labels = labels_of(params)
    tx = boostax.precision.group_loss_scale(
        optax.identity(), labels, rule="measure", max_scale=2.0**60
    )
    state = tx.init(params)
    for _ in range(40):
        scales = boostax.precision.group_scales(state)
        assert scales is not None
        scaled = lambda p, s=scales: s[-1] * loss(p, batch, jnp.float16, s)  # noqa: E731
        grads = jax.jit(jax.grad(scaled))(params)
        _, state = tx.update(grads, state, params)
    shares = {f"layer {i}": float((g["w"] == 0).mean()) for i, g in enumerate(grads)}
    return [*rows, {"one scale": "by group, measured", **shares}]


def overhead(rounds: int) -> tuple[list[dict[str, Any]], float]:
    """A whole step of an f32 perceptron of six layers, 512 wide, beside one dynamic scale."""
    sizes = [512] * 6
    keys = jax.random.split(jax.random.key(0), len(sizes))
    params = [
        {"w": jax.random.normal(k, (n, n)) / n**0.5, "b": jnp.zeros(n)}
        for k, n in zip(keys, sizes, strict=True)
    ]
    batch = Split(jax.random.normal(keys[0], (256, 512)), jnp.zeros(256, jnp.int32))
    adam, forms = optax.adam(1e-3), {}
    one = Variant("one dynamic scale", jnp.float32, lambda tx, _: boostax.dynamic_loss_scale(tx))
    many = Variant("six, by group", jnp.float32, boostax.precision.group_loss_scale)
    for variant in (one, many):
        tx = variant.wrap(adam, labels_of(params))
        step = make_step(variant, tx)
        forms[variant.name] = compiled_form(step, params, tx.init(params), batch, calls=3)
    grads = jax.tree.map(jnp.ones_like, params)
    for variant in (one, many):
        tx = variant.wrap(adam, labels_of(params))
        name = f"{variant.name}: unscale and apply alone"
        forms[name] = compiled_form(by_apply(tx), params, tx.init(params), grads, calls=3)
    times = paired(forms, rounds)
    rows = []
    for name, form in forms.items():
        base = f"{one.name}: unscale and apply alone" if "alone" in name else one.name
        row = {"form": name, "time / one scale": ratio(times, name, base), "temp bytes": form.temp}
        rows.append(row)
    return rows, ratio(times, many.name, one.name)


def main() -> None:
    options = arguments(__doc__, seeds=5, steps=1500, rounds=25)
    costs, factor = overhead(options.rounds)
    print(costs, flush=True)
    shares = vanished()
    print(*shares, sep="\n", flush=True)
    rows: list[dict[str, Any]] = []
    for variant in variants():
        tuned = {
            rate: float(trained(variant, rate, 1, options.steps)["validation"][0]) for rate in RATES
        }
        rate = min(RATES, key=lambda rate: np.nan_to_num(tuned[rate], nan=np.inf))
        found = trained(variant, rate, options.seeds, options.steps)
        rows.append(
            {
                "scaling": variant.name,
                "rate": f"2**{int(np.log2(rate))}",
                **over_seeds(found["loss"], "held-out loss"),
                **{f"seed {i}": float(x) for i, x in enumerate(found["loss"])},
                "skipped": float(found["skipped"].mean()),
                "last scales, log2": str(found["scales"][0].astype(int).tolist()),
            }
        )
        print(rows[-1], flush=True)
    heading = f"{DEPTH} hidden layers of {WIDTH} sigmoids, {options.steps} steps"
    report(
        "group_scale",
        "Loss scales by group",
        [
            (f"{heading}: held-out loss in nats (chance is 2.303)", rows),
            ("The same net: share of weight gradients that are zero at step 1", shares),
            ("Cost beside one dynamic scale, CPU", costs),
        ],
        [Bar("a whole step: time / one dynamic scale", factor, 1.05)],
    )


if __name__ == "__main__":
    main()
