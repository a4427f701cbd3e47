"""What accumulation costs: windows of the optimizer alone, whole steps, and micro-batches."""

from typing import Any

import harness
import jax
import jax.numpy as jnp
import optax
from harness import Bar, Form, beside, by_apply, by_update, compiled_form, paired, ratio
from problems import batch, grads, loss, nbytes, params

import boostax

PyTree = Any
ADAM = optax.adam(1e-3)


def chains(window: int) -> dict[str, Any]:
    scaled, accumulated = boostax.dynamic_loss_scale(ADAM), boostax.accumulate(ADAM, window)
    return {
        "accumulate": accumulated,
        "accumulate(dynamic_loss_scale)": boostax.accumulate(scaled, window),
        "dynamic_loss_scale(accumulate)": boostax.dynamic_loss_scale(accumulated),
    }


def optimizer_only(window: int, rounds: int) -> tuple[list[dict[str, Any]], list[Bar]]:
    p, g = params(), grads()
    peer = optax.MultiSteps(ADAM, window).gradient_transformation()
    made = {"optax.MultiSteps": compiled_form(by_update(peer), p, peer.init(p), g, calls=window)}
    for name, tx in chains(window).items():
        given = p, tx.init(p), g
        made[f"{name}, apply_gradients"] = compiled_form(by_apply(tx), *given, calls=window)
        made[f"{name}, update"] = compiled_form(by_update(tx), *given, calls=window)
    rows = beside(made, paired(made, rounds), "window / MultiSteps", "optax.MultiSteps", nbytes(p))
    bars = []
    for row in rows[1:]:
        applied = row["form"].endswith("apply_gradients")
        limit = 0.2 if applied else 0.45
        claim = f"K={window}, {row['form']}"
        bars.append(Bar(f"{claim}: window / MultiSteps", row["window / MultiSteps"], limit))
        if applied:
            bars.append(Bar(f"{claim}: temp / params", row["temp / params"], 0.05))
    return rows, bars


def two_jits(window: int, rows: int) -> Form:
    """What one writes by hand: a jitted accumulation and a jitted update."""
    p, data = params(), batch(rows)

    def add(acc: PyTree, p: PyTree, data: PyTree) -> tuple[PyTree, jax.Array]:
        value, g = jax.value_and_grad(loss)(p, data)
        return jax.tree.map(jnp.add, acc, g), value

    def apply(p: PyTree, state: Any, acc: PyTree) -> tuple[PyTree, Any, PyTree]:
        updates, state = ADAM.update(jax.tree.map(lambda a: a * (1.0 / window), acc), state, p)
        return optax.apply_updates(p, updates), state, jax.tree.map(jnp.zeros_like, acc)

    add_jit = jax.jit(add, donate_argnums=0)
    apply_jit = jax.jit(apply, donate_argnums=(0, 1, 2))
    carry = [(p, ADAM.init(p), jax.tree.map(jnp.zeros_like, p))]

    def run() -> None:
        p, state, acc = carry[0]
        for _ in range(window):
            acc, _ = add_jit(acc, p, data)
        carry[0] = apply_jit(p, state, acc)
        jax.block_until_ready(carry[0])

    return Form(run)


def whole_step(tx: Any, window: int, rows: int) -> Form:
    data = batch(rows)
    step = boostax.make_train_step(loss, tx)
    state = [step.init(params())]

    def run() -> None:
        for _ in range(window):
            state[0], _ = step(state[0], data)
        jax.block_until_ready(state[0])

    return Form(run)


def whole(window: int, micro_rows: int, rounds: int) -> tuple[list[dict[str, Any]], list[Bar]]:
    """Each form alone against the baseline: a third one's allocations would cost both of them."""
    multi = optax.MultiSteps(ADAM, window).gradient_transformation()
    limits = {
        "accumulate": 1.05,
        "accumulate(dynamic_loss_scale)": 1.15,
        "dynamic_loss_scale(accumulate)": 1.6,
        "optax.MultiSteps": None,
    }
    rows, bars = [], []
    for name, tx in {**chains(window), "optax.MultiSteps": multi}.items():
        base = "two hand-written jits"
        pair = {base: two_jits(window, micro_rows), name: whole_step(tx, window, micro_rows)}
        figure = ratio(paired(pair, rounds), name, base)
        rows.append({"form": name, "effective step / two jits": figure})
        if limits[name] is not None:
            claim = f"K={window}, {micro_rows} rows, {name}: effective step / two jits"
            bars.append(Bar(claim, figure, limits[name]))
    return rows, bars


def microbatches(count: int, total: int, rounds: int) -> tuple[list[dict[str, Any]], list[Bar]]:
    p, data = params(), batch(total)
    token_weights = jnp.arange(1.0, total + 1.0)

    def masked(p: PyTree, data: PyTree) -> tuple[jax.Array, boostax.Aux]:
        weight = data["weight"].sum()
        return loss(p, {"x": data["x"], "y": data["y"]}), boostax.Aux(weight=weight)

    oracle, mean = jax.value_and_grad(loss), optax.microbatching.AccumulationType.MEAN
    forms: dict[str, Any] = {
        "optax.microbatch": optax.microbatching.microbatch(oracle, 1, total // count, mean),
        "boostax.train.microbatch": boostax.train.microbatch(oracle, count),
        "boostax.train.microbatch, weighted": boostax.train.microbatch(
            jax.value_and_grad(masked, has_aux=True), count, has_aux=True
        ),
    }
    made = {}
    for name, fn in forms.items():
        given = {**data, "weight": token_weights} if "weighted" in name else data
        program = jax.jit(fn).lower(p, given).compile()
        made[name] = Form(
            lambda program=program, given=given: jax.block_until_ready(program(p, given)),
            program.memory_analysis().temp_size_in_bytes,
        )
    times = paired(made, rounds)
    base = "optax.microbatch"
    column = f"time / {base}"
    rows = beside(made, times, column, base, nbytes(p))
    claim = f"{count} micro-batches of {total} rows"
    return rows, [Bar(f"{claim}, {row['form']}: {column}", row[column], 1.05) for row in rows[1:]]


def main() -> None:
    rounds = harness.arguments(__doc__, rounds=11).rounds
    sections, bars = [], []
    for window in (4, 8):
        rows, more = optimizer_only(window, rounds)
        sections.append((f"Optimizer only, Adam, 10.5M f32 params, a window of {window}", rows))
        bars += more
    for micro_rows in (16, 128):
        rows, more = whole(4, micro_rows, rounds)
        sections.append((f"Effective step of a 10.5M MLP, 4 micro-batches of {micro_rows}", rows))
        bars += more
    rows, more = microbatches(4, 256, rounds)
    sections.append(("Micro-batches inside one step, 4 of 64 rows", rows))
    bars += more
    harness.report("accumulation", "Accumulation: cost of a window", sections, bars)


if __name__ == "__main__":
    main()
