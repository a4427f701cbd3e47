"""On a GPU: gates, wires, stored formats, released layers and training runs, in 8 minutes.

Needs jax, optax and flax alone, and one GPU; without one it says so and records nothing. Each part
is on record as soon as it has ended, and ``--only`` runs some: ``python benchmarks/gpu.py``.
"""

import functools
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # boostax need not be installed

import harness
import problems
from compilers_cases import Model, decoder
from harness import Form, Row, by_apply, by_update, compiled_form, over_seeds, paired, ratio
from jax.sharding import AxisType
from text_runs import Text, warmed
from workloads import TextConfig

import boostax

PyTree = Any
NAME, TITLE = "gpu", "On one GPU"
ADAM, ADAMW = optax.adam(1e-3), optax.adamw(1e-3)
WINDOW, LEAF = 8, 4096
# Layers, width, vocabulary, heads and length of a decoder, and rows of its batch.
STACK, ROWS = (24, 768, 16384, 12, 256), 4
TEXT = TextConfig(width=256, depth=6, heads=4, sequence_length=256, batch_size=32)
STEPS, SEEDS, RATES = 300, 5, (2.0**-11, 2.0**-10, 2.0**-9)


def _rows(made: dict[str, Form], base: str, rounds: int, size: int) -> list[Row]:
    times = paired(made, rounds)
    of_base = f"time / {base}"
    return [
        {
            "form": name,
            "ms": 1e3 * min(times[name]),
            of_base: ratio(times, name, base),
            "temp / params": None if form.temp is None else form.temp / size,
        }
        for name, form in made.items()
    ]


def gates(rounds: int) -> list[Row]:
    """A step of Adam alone, with scalers and without."""
    p, g = problems.params(), problems.grads()
    scaled = boostax.dynamic_loss_scale(ADAM)
    finite = optax.apply_if_finite(ADAM, 5)
    made = {
        "bare Adam": compiled_form(by_update(ADAM), p, ADAM.init(p), g),
        "dynamic_loss_scale": compiled_form(by_apply(scaled), p, scaled.init(p), g),
        "optax.apply_if_finite": compiled_form(by_update(finite), p, finite.init(p), g),
    }
    return _rows(made, "bare Adam", rounds, problems.nbytes(p))


def windows(rounds: int) -> list[Row]:
    """A window of calls, the optimizer alone."""
    p, g = problems.params(), problems.grads()
    peer = optax.MultiSteps(ADAM, WINDOW).gradient_transformation()
    ours = boostax.accumulate(ADAM, WINDOW)
    made = {
        "optax.MultiSteps": compiled_form(by_update(peer), p, peer.init(p), g, calls=WINDOW),
        "accumulate": compiled_form(by_apply(ours), p, ours.init(p), g, calls=WINDOW),
    }
    return _rows(made, "optax.MultiSteps", rounds, problems.nbytes(p))


def wires(rounds: int) -> list[Row]:
    """One leaf through a reduction over one device: what encoding and decoding it takes."""
    g = {"w": jax.random.normal(jax.random.key(1), (LEAF, LEAF))}
    reductions = {
        "mean in f32": boostax.all_reduce("data"),
        "mean in bf16": boostax.all_reduce("data", wire_dtype="bfloat16"),
        "int8": boostax.int8_reduce("data"),
        "top-k 1%": boostax.top_k_reduce("data", 0.01),
    }
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec()

    def made(tx: Any) -> Form:
        def step(p: PyTree, state: Any, g: PyTree) -> tuple[PyTree, Any]:
            updates, state = tx.update(g, state, p)
            return optax.apply_updates(p, updates), state

        mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        p = jax.tree.map(jnp.zeros_like, g)
        return compiled_form(mapped, p, tx.init(p), g)

    forms = {name: made(tx) for name, tx in reductions.items()}
    return _rows(forms, "mean in f32", rounds, problems.nbytes(g))


def stored(rounds: int) -> list[Row]:
    """A step of AdamW alone, by how params and moments are stored."""
    wide = problems.params()
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    given = problems.grads(jnp.bfloat16)
    made = {
        "AdamW in f32": compiled_form(by_update(ADAMW), wide, ADAMW.init(wide), problems.grads())
    }
    ways: dict[str, dict[str, Any]] = {
        "params stochastic": {"params": "stochastic"},
        "params remainder": {"params": "remainder"},
        "params stochastic, moments log8": {"params": "stochastic", "moments": "log8"},
    }
    for name, options in ways.items():
        tx = boostax.precision.store(ADAMW, **options)
        made[name] = compiled_form(by_apply(tx), low, tx.init(low), given)
    return _rows(made, "AdamW in f32", rounds, problems.nbytes(wide))


def release(rounds: int) -> list[Row]:
    """A step of a decoder: AdamW behind the backward pass, or in its loop over layers."""
    model = decoder(*STACK)
    wide = _drawn(model, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (ROWS, STACK[-1] + 1), 0, STACK[2])
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    stored_ = boostax.precision.store(ADAMW, params="stochastic", moments="log8")
    released = boostax.train.Layers(release=True)
    ways: dict[str, tuple[Any, Any, PyTree]] = {
        "lax.scan with remat": (ADAMW, None, wide),
        "released": (ADAMW, released, wide),
        "released, params stochastic, moments log8": (stored_, released, low),
    }
    made, held = dict[str, Form](), dict[str, float]()
    for name, (tx, layers, params) in ways.items():
        step = boostax.make_train_step(model.loss, tx, layers=layers)
        state = step.init(params)
        held[name] = problems.nbytes(state) / 1e6
        made[name] = _whole(step, state, tokens)
    rows = _rows(made, "lax.scan with remat", rounds, problems.nbytes(wide))
    return [row | {"MB of params and state": held[row["form"]]} for row in rows]


def _drawn(model: Model, key: jax.Array) -> PyTree:
    """Params of a decoder: norms of one, an embedding that learns fast, products of unit gain."""

    def scaled(path: Any, x: jax.Array) -> jax.Array:
        if path[-1].key.startswith("norm"):
            return jnp.ones_like(x)
        return x * (0.3 if path[-1].key == "embed" else x.shape[-2] ** -0.5)

    noise = optax.tree.random_like(key, model.params)
    return jax.tree_util.tree_map_with_path(scaled, noise)


def _whole(step: Any, state: Any, batch: PyTree) -> Form:
    """A whole step, which is compiled once: for its memory and to run."""
    jitted, (state, *rest) = step.jitted(state, batch)
    program, carry = jitted.lower(state, *rest).compile(), [state]

    def run() -> None:
        carry[0], _ = program(carry[0], *rest)
        jax.block_until_ready(carry[0])

    return Form(run, program.memory_analysis().temp_size_in_bytes)


def training(rounds: int) -> list[Row]:
    """A decoder on text, whole runs: clipped by the global norm, or released and by the leaf's."""
    del rounds
    task = Text(TEXT, judged=64)
    model = decoder(TEXT.depth, TEXT.width, 128, TEXT.heads, TEXT.sequence_length)
    ways: dict[str, tuple[Any, Any]] = {
        "AdamW, clip_by_global_norm": (optax.clip_by_global_norm(1.0), None),
        "released AdamW, adagc": (boostax.model.adagc(), boostax.train.Layers(release=True)),
    }
    runs = {name: jax.jit(functools.partial(_run, model, *way)) for name, way in ways.items()}
    found: dict[tuple[str, int, float], Row] = {}
    rates = dict[str, float]()
    for seed in range(SEEDS):
        training, unseen = map(_tokens, task.batches(seed, STEPS))
        given = jax.random.key(seed), *jax.device_put((training, *task.halves(unseen)))
        for name, run in runs.items():
            # The first seed chooses the rate.
            for rate in [rates[name]] if seed else RATES:
                begun = time.perf_counter()
                chosen, reported = map(float, run(jnp.float32(rate), *given))
                seconds = time.perf_counter() - begun
                found[name, seed, rate] = {"chosen": chosen, "reported": reported, "s": seconds}
                print(name, seed, rate, found[name, seed, rate], flush=True)
            rates.setdefault(name, harness.best_rate(found, (name,), 1, RATES))
    nats = {name: harness.of_seeds(found, (name,), SEEDS, rates[name], "reported") for name in ways}
    base = next(iter(ways))
    rows: list[Row] = []
    for name, rate in rates.items():
        row = {"form": name, "rate": harness.power_in(rate, RATES)}
        row |= over_seeds(nats[name], "nats")
        row |= over_seeds(nats[name] - nats[base], f"more than {base}", "its s.e.")
        # The first run is compiled in its time, and never the least.
        least = min(row["s"] for (form, *_), row in found.items() if form == name)
        rows.append(row | {"ms a step": 1e3 * least / STEPS})
    return rows


def _run(
    model: Model, clip: Any, layers: Any, rate: jax.Array, key: jax.Array, *batches: Any
) -> tuple[jax.Array, jax.Array]:
    """A run in one program: what to choose its rate by, and what to report."""
    training, chosen, reported = batches
    tx = optax.chain(clip, optax.adamw(warmed(rate, STEPS)))
    step = boostax.make_train_step(model.loss, tx, layers=layers)
    once = lambda state, batch: (step(state, batch)[0], None)  # noqa: E731
    state, _ = jax.lax.scan(once, step.init(_drawn(model, key)), training)
    judge = lambda part: jax.lax.map(lambda x: model.loss(state.params, x), part).mean()  # noqa: E731
    return judge(chosen), judge(reported)


def _tokens(batches: PyTree) -> np.ndarray[Any, Any]:
    """Batches as the decoder has them: a window, of which each token is predicted but the first."""
    return np.concatenate([batches["inputs"], batches["targets"][..., -1:]], -1)


PARTS: dict[str, tuple[str, Callable[[int], list[Row]]]] = {
    "gates": ("Gates: a step of Adam alone", gates),
    "windows": (f"Windows of {WINDOW} calls, the optimizer alone", windows),
    "wires": ("Reductions over one device: encoding and decoding", wires),
    "stored": ("Stored formats: a step of AdamW alone", stored),
    "release": ("Released layers: a whole step of a decoder", release),
    "training": ("A decoder on text", training),
}


def smaller() -> None:
    """Sizes of a test: seconds on a CPU."""
    global LEAF, STACK, TEXT, STEPS, SEEDS
    problems.WIDTH, problems.LAYERS, LEAF = 64, 4, 128
    STACK = (2, 32, 128, 2, 8)
    TEXT = TextConfig(width=16, depth=2, heads=2, sequence_length=16, batch_size=8)
    STEPS, SEEDS = 12, 2


def main() -> None:
    options = harness.arguments(
        __doc__, rounds=15, minutes=8.0, only=("", f"parts by comma, of {', '.join(PARTS)}")
    )
    device = jax.devices()[0].device_kind
    if jax.default_backend() != "gpu":
        sys.exit(f"gpu.py: no GPU here, {device} alone; nothing is recorded")
    begun = time.monotonic()
    problems.WIDTH, problems.LAYERS = 4096, 8
    # Figures of another card do not stand beside those of this one.
    done = harness.sections_of(NAME)
    done = done if done and harness.record(NAME)["machine"]["device"] == device else {}
    failed: list[str] = []
    for name in options.only.split(",") if options.only else PARTS:
        start = time.monotonic()
        if start - begun > 60 * options.minutes * 0.8:
            print(f"gpu.py: {name} is left out, the time is over", flush=True)
            continue
        title, part = PARTS[name]
        try:
            done[title] = part(options.rounds)
        except Exception:  # the parts behind it still run
            traceback.print_exc()
            failed.append(name)
        jax.clear_caches()
        note = (
            f"{problems.LAYERS} x {problems.WIDTH}^2 params; the decoder, in bf16: layers, width, "
            f"vocabulary, heads and length {STACK}, {ROWS} rows; temp / params: of params in f32; "
            f"the text: {TEXT}, {STEPS} steps, {SEEDS} seeds, each form at the best of "
            f"{len(RATES)} rates, chosen by the first seed on other text; ms are the least of "
            f"{options.rounds} rounds, ratios the median within a round. Times are those of this "
            "device."
        )
        done["To keep in mind"] = harness.caveats([note])
        harness.report(NAME, TITLE, [*((t, done[t]) for t in _titles() if t in done)], [])
        print(f"gpu.py: {name} took {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(f"gpu.py: {', '.join(failed)} failed" if failed else 0)


def _titles() -> list[str]:
    return [*(title for title, _ in PARTS.values()), "To keep in mind"]


if __name__ == "__main__":
    main()
