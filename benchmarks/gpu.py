"""On a GPU: gates, steps, formats of the wire, stored formats, and a training run, in 25 minutes.

Needs jax, optax and flax alone, and one GPU; without one it says so and records nothing. Each part
is on record as soon as it has ended, and ``--only`` runs some: ``python benchmarks/gpu.py``.
"""

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import problems
from harness import (
    Form,
    Row,
    arguments,
    by_apply,
    by_update,
    caveats,
    compiled_form,
    over_seeds,
    paired,
    ratio,
    report,
    sections_of,
)
from jax.sharding import AxisType
from text_runs import Text, warmed
from workloads import TextConfig

import boostax

PyTree = Any
NAME, TITLE = "gpu", "On one GPU"
ADAM, ADAMW = optax.adam(1e-3), optax.adamw(1e-3)
WINDOW, LEAF = 8, 4096
TEXT = TextConfig(width=512, depth=8, heads=8, sequence_length=256, batch_size=32)
STEPS, SEEDS = 400, 3
EACH = {"*mu": "int8", "*nu": "log8"}


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
    spikes = boostax.precision.skip_spikes(ADAM)
    made = {
        "bare Adam": compiled_form(by_update(ADAM), p, ADAM.init(p), g),
        "dynamic_loss_scale": compiled_form(by_apply(scaled), p, scaled.init(p), g),
        "skip_spikes": compiled_form(by_apply(spikes), p, spikes.init(p), g),
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


def steps(rounds: int) -> list[Row]:
    """A whole step of a perceptron: in slices, in half precision, half of the layers frozen."""
    p, data = problems.params(), problems.batch(1024)
    groups = {name: int(index >= problems.LAYERS // 2) for index, name in enumerate(p)}
    frozen = boostax.scheduled_freeze(ADAM, groups, lambda _: 1)

    def made(tx: Any, **options: Any) -> Form:
        step = boostax.make_train_step(problems.loss, tx, **options)
        state = [step.init(problems.params())]

        def run() -> None:
            state[0], _ = step(state[0], data)
            jax.block_until_ready(state[0])

        return Form(run)

    def by_hand(p: PyTree, state: Any, data: PyTree) -> tuple[PyTree, Any]:
        return by_update(ADAM)(p, state, jax.grad(problems.loss)(p, data))

    forms = {
        "by hand": compiled_form(by_hand, p, ADAM.init(p), data),
        "make_train_step": made(ADAM),
        f"microbatches={WINDOW}": made(ADAM, microbatches=WINDOW),
        "policy bf16": made(ADAM, policy=boostax.policy("O1", dtype="bfloat16")),
        "policy f16, dynamic_loss_scale": made(
            boostax.dynamic_loss_scale(ADAM), policy=boostax.policy("O1", dtype="float16")
        ),
        "half of the layers frozen": made(frozen),
    }
    return _rows(forms, "by hand", rounds, problems.nbytes(p))


def wires(rounds: int) -> list[Row]:
    """One leaf through a reduction over one device: what encoding and decoding it takes."""
    g = {"w": jax.random.normal(jax.random.key(1), (LEAF, LEAF))}
    reductions = {
        "mean in f32": boostax.all_reduce("data"),
        "mean in bf16": boostax.all_reduce("data", dtype="bfloat16"),
        "int8": boostax.int8_reduce("data"),
        "top-k 1%": boostax.top_k_reduce("data", 0.01),
        "PowerSGD rank 4": boostax.reduce.power_sgd_reduce("data", 4),
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
        "params stochastic, moments int8 and log8": {"params": "stochastic", "moments": EACH},
    }
    for name, options in ways.items():
        tx = boostax.precision.store(ADAMW, **options)
        made[name] = compiled_form(by_apply(tx), low, tx.init(low), given)
    return _rows(made, "AdamW in f32", rounds, problems.nbytes(wide))


def training(rounds: int) -> list[Row]:
    """A transformer on text, whole runs: precisions, with loss scaling and without."""
    del rounds
    task = Text(TEXT, judged=32)
    policy = lambda dtype: boostax.policy("O1", dtype=dtype)  # noqa: E731
    ways: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "f32": (None, lambda tx: tx),
        "bf16": (policy("bfloat16"), lambda tx: tx),
        "f16": (policy("float16"), lambda tx: tx),
        "f16, dynamic_loss_scale": (policy("float16"), boostax.dynamic_loss_scale),
        "bf16, params stochastic, moments int8 and log8": (
            boostax.policy("params=bfloat16,compute=bfloat16,output=float32"),
            lambda tx: boostax.precision.store(tx, params="stochastic", moments=EACH),
        ),
    }
    judge = jax.jit(task.judge)
    rows: list[Row] = []
    for name, (policy_, wrap) in ways.items():
        tx = wrap(optax.adamw(warmed(jnp.float32(2.0**-10), STEPS)))
        with warnings.catch_warnings():
            # f16 without a scale is warned of, and is here to be seen.
            warnings.simplefilter("ignore")
            step = boostax.make_train_step(task.loss, tx, policy=policy_)
        losses, seconds = list[float](), list[float]()
        for seed in range(SEEDS):
            batches, unseen = task.batches(seed, STEPS)
            state = step.init(task.init(seed))
            begun = 0.0
            for index in range(STEPS):
                if index == 10:  # compiled, and warm
                    jax.block_until_ready(state)
                    begun = time.perf_counter()
                state, _ = step(state, jax.tree.map(lambda x, i=index: x[i], batches))
            jax.block_until_ready(state)
            seconds.append((time.perf_counter() - begun) / (STEPS - 10))
            masters = boostax.precision.masters(state.params, state.opt_state)
            losses.append(float(judge(masters, unseen)))
        held = problems.nbytes((state.params, state.opt_state)) / 1e6
        told: Row = {"form": name, **over_seeds(losses, "nats"), "ms a step": 1e3 * min(seconds)}
        rows.append(told | {"MB of params and state": held})
        print(rows[-1], flush=True)
    return rows


PARTS: dict[str, tuple[str, Callable[[int], list[Row]]]] = {
    "gates": ("Gates: a step of Adam alone", gates),
    "windows": (f"Windows of {WINDOW} calls, the optimizer alone", windows),
    "steps": ("Whole steps of a perceptron", steps),
    "wires": ("Reductions over one device: encoding and decoding", wires),
    "stored": ("Stored formats: a step of AdamW alone", stored),
    "training": ("A transformer on text", training),
}


def smaller() -> None:
    """Sizes of a test: seconds on a CPU."""
    global LEAF, TEXT, STEPS, SEEDS
    problems.WIDTH, problems.LAYERS, LEAF = 64, 4, 128
    TEXT = TextConfig(width=16, depth=1, heads=2, sequence_length=16, batch_size=8)
    STEPS, SEEDS = 12, 2


def main() -> None:
    options = arguments(
        __doc__, rounds=15, minutes=25.0, only=("", f"parts by comma, of {', '.join(PARTS)}")
    )
    if jax.default_backend() != "gpu":
        sys.exit(f"gpu.py: no GPU here, {jax.devices()[0].device_kind} alone; nothing is recorded")
    begun = time.monotonic()
    problems.WIDTH, problems.LAYERS = 4096, 8
    done = sections_of(NAME)
    for name in options.only.split(",") if options.only else PARTS:
        if time.monotonic() - begun > 60 * options.minutes * 0.8:
            print(f"gpu.py: {name} is left out, the time is over", flush=True)
            continue
        title, part = PARTS[name]
        done[title] = part(options.rounds)
        jax.clear_caches()
        note = (
            f"{problems.LAYERS} x {problems.WIDTH}^2 params; the text: {TEXT}, {STEPS} steps, "
            f"{SEEDS} seeds, one rate for all; ms are the least of {options.rounds} rounds, ratios "
            "the median within a round. Times are those of this device."
        )
        done["To keep in mind"] = caveats([note])
        report(NAME, TITLE, [*((t, done[t]) for t in _titles() if t in done)], [])


def _titles() -> list[str]:
    return [*(title for title, _ in PARTS.values()), "To keep in mind"]


if __name__ == "__main__":
    main()
