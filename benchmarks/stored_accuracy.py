"""What params and moments stored in fewer bytes do to the loss, on text and on digits.

Every form trains on the same batches from the same weights with every rate and seed. Its rate is
the one with the lowest mean loss over the seeds on rows to choose by, and the loss reported is that
of others. Every array is stored low but vectors: these models are small, and the harm is theirs.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_replicas import Split, data, init, loss, order, schedule
from text_runs import SMALL, warmed

import boostax
from boostax.train.gather import Gather, rounded

PyTree = Any
# Arrays of fewer elements stay f32: the vectors.
LEAST = 65
EACH = {"*mu": "int8", "*nu": "log8"}


class Form(NamedTuple):
    """How a run holds its arrays.

    Attributes:
      low: whether params are bf16.
      options: of ``boostax.precision.store``; None is without it.
      window: options of ``boostax.accumulate``, or none.
      recommended: by the card.
      gather: how the loss gets the params, as from 8 devices that hold them; or whole.
    """

    low: bool
    options: Mapping[str, Any] | None
    window: Mapping[str, Any] | None = None
    recommended: bool = False
    gather: Gather | None = None


LOW = {"params": "stochastic"}
SUM = {"dtype": "bfloat16", "rounding": "stochastic"}
FORMS = {
    "f32": Form(False, None),
    "params stochastic": Form(True, LOW, recommended=True),
    "params stochastic, moments bf16": Form(True, LOW | {"moments": "bfloat16"}, recommended=True),
    "params stochastic, moments int8 and log8": Form(True, LOW | {"moments": EACH}),
    "params stochastic, moments log8": Form(True, LOW | {"moments": "log8"}, recommended=True),
    "params stochastic, moments int8": Form(True, LOW | {"moments": "int8"}),
    "params remainder": Form(True, {"params": "remainder"}, recommended=True),
    "params f32, moments bf16": Form(False, {"moments": "bfloat16"}),
    "params f32, moments int8 and log8": Form(False, {"moments": EACH}),
    "params f32, moments log8": Form(False, {"moments": "log8"}),
    "params bf16, moments f32": Form(True, {}),
    "params and moments bf16, to the nearest": Form(True, None),
    "f32, gathered in bf16": Form(False, None, gather="bfloat16", recommended=True),
    "f32, gathered in int8": Form(False, None, gather="int8", recommended=True),
    "f32, window": Form(False, None, {}),
    "params stochastic, moments int8 and log8, window stochastic": Form(
        True, LOW | {"moments": EACH}, SUM
    ),
    "params stochastic, moments log8, window stochastic": Form(
        True, LOW | {"moments": "log8"}, SUM, recommended=True
    ),
    "f32, window bf16 to the nearest": Form(False, None, {"dtype": "bfloat16"}),
}
EVERY = 4


class Task(NamedTuple):
    """A problem.

    Attributes:
      seeds: how many.
      rates: to choose from.
      steps: of a run, micro-steps of a window.
      init: params of a seed.
      batches: of a seed: those to train on, and what to choose and to report by.
      loss: of params and a batch.
      judge: of f32 params and rows.
      schedule: of a rate and the optimizer's steps.
    """

    seeds: int
    rates: tuple[float, ...]
    steps: int
    init: Callable[[int], PyTree]
    batches: Callable[[int], tuple[PyTree, PyTree, PyTree]]
    loss: Callable[[PyTree, PyTree], jax.Array]
    judge: Callable[[PyTree, PyTree], jax.Array]
    schedule: Callable[[jax.Array, int], Any]


def _powers(least: int, end: int) -> tuple[float, ...]:
    return tuple(2.0**power for power in range(least, end))


def _text() -> Task:
    steps = 1200

    def batches(seed: int) -> tuple[PyTree, PyTree, PyTree]:
        training, rest = SMALL.batches(seed, steps)
        return training, *SMALL.halves(rest)

    return Task(5, _powers(-9, -4), steps, SMALL.init, batches, SMALL.loss, SMALL.judge, warmed)


def _digits() -> Task:
    training, validation, test = data()
    rows_of = functools.partial(order, replicas=1, epochs=8)

    def start(seed: int) -> PyTree:
        return init(jax.random.key(seed))

    def batches(seed: int) -> tuple[PyTree, PyTree, PyTree]:
        rows = rows_of(seed)[:, 0]
        return Split(training.images[rows], training.labels[rows]), validation, test

    return Task(20, _powers(-9, -2), len(rows_of(0)), start, batches, loss, loss, schedule)


TASKS = {"text": _text, "digits": _digits}


def trained(task: Task, form: Form) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """A compiled run: of a rate, params and batches what to choose by and what to report."""
    steps = task.steps // EVERY if form.window is not None else task.steps

    @jax.jit
    def run(rate: jax.Array, params: PyTree, batches: Any) -> tuple[jax.Array, jax.Array]:
        training, chosen, reported = batches
        tx: Any = optax.adamw(task.schedule(rate, steps))
        if form.options is not None:
            tx = boostax.precision.store(tx, **form.options, least=LEAST)
        if form.window is not None:
            tx = boostax.accumulate(tx, EVERY, **form.window)
        if form.low:
            params = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, params)

        def step(carry: PyTree, batch: PyTree) -> tuple[PyTree, None]:
            params, state = carry
            # As mixed precision has it: gradients come in the dtype of the params.
            sent = params if form.gather is None else _sent(params, form.gather)
            grads = jax.grad(lambda p: task.loss(_wide(p), batch))(sent)
            if form.options is None:
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), None
            return boostax.apply_gradients(tx, grads, state, params), None

        (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), training)
        last = boostax.precision.masters(params, state)
        return task.judge(last, chosen), task.judge(last, reported)

    return run


def _sent(params: PyTree, kind: Gather) -> PyTree:
    """What ``boostax.train.gather_params`` makes of matrices whose rows 8 devices hold."""

    def each(x: jax.Array) -> jax.Array:
        if x.ndim < 2:
            return x
        devices = next(n for n in (8, 4, 2, 1) if x.shape[0] % n == 0)
        return rounded(x, (devices, *(1 for _ in x.shape[1:])), kind)

    return jax.tree.map(each, params)


def _wide(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def runs(name: str, form: str, pairs: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """A row for each of some seeds and rates of a form."""
    task = TASKS[name]()
    run = trained(task, FORMS[form])
    rows: list[dict[str, Any]] = []
    for seed, rate in pairs:
        chosen, reported = run(jnp.float32(rate), task.init(seed), task.batches(seed))
        row = {"task": name, "form": form, "rate": rate, "seed": seed}
        rows.append(row | {"chosen": float(chosen), "reported": float(reported)})
    return rows


def table(name: str, found: Mapping[Any, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each form, beside f32 with the same window; none has figures that diverges."""
    task = TASKS[name]()
    ends = lambda form, rate: harness.of_seeds(found, (name, form), task.seeds, rate, "reported")  # noqa: E731
    best = lambda form: harness.best_rate(found, (name, form), task.seeds, task.rates)  # noqa: E731
    rows: list[dict[str, Any]] = []
    for form, how in FORMS.items():
        rate = best(form)
        beside = "f32" if how.window is None else "f32, window"
        theirs, here = ends(beside, best(beside)), ends(form, rate)
        row: dict[str, Any] = {"form": form, "recommended": "yes" if how.recommended else ""}
        row |= {"rate": harness.power_in(rate, task.rates)}
        if np.isfinite(here).all():
            row |= harness.over_seeds(here, "nats")
            row |= harness.over_seeds(here - theirs, "more than f32", "its s.e.")
            row["in s.e. of f32"] = row["more than f32"] / harness.over_seeds(theirs, "")["s.e."]
            same = ends(form, best(beside)) - theirs
            row |= harness.over_seeds(same, "more at its rate", "s.e. at its rate")
        rows.append(dict.fromkeys(rows[0] if rows else row) | row)
    return rows


def main() -> None:
    options = harness.resumable(__doc__)
    path = harness.work_of(options, "stored_accuracy") / "rows.jsonl"
    key = ("task", "form", "seed", "rate")
    made = {name: make() for name, make in TASKS.items()}
    cells = {
        (name, form): itertools.product(range(task.seeds), task.rates)
        for name, task in made.items()
        for form in FORMS
    }
    harness.in_processes(runs, harness.unfinished(path, key, cells), path, options.workers)
    found = harness.kept(path, *key)
    sections = [
        (f"{name}, AdamW, {task.steps} batches, {task.seeds} seeds", table(name, found))
        for name, task in made.items()
    ]
    bars = [
        harness.Bar(f"{name}: {row['form']}: more than f32, in s.e.", row["in s.e. of f32"], 1)
        for name, (_, rows) in zip(TASKS, sections, strict=True)
        for row in rows
        if row["recommended"]
    ]
    harness.report("stored_accuracy", "Stored in fewer bytes: the loss", sections, bars)


if __name__ == "__main__":
    main()
