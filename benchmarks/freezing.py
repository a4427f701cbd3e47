"""What a frozen prefix saves: FLOPs, time, memory and compile time of a transformer's step."""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from harness import Bar, Form, paired, ratio, report

import boostax
from boostax.workloads import TextConfig, text

PyTree = Any
CONFIG = TextConfig(width=240, depth=8, heads=8, batch_size=8, sequence_length=64)
GROUPS = [["characters", "positions"], *(f"block_{i}" for i in range(8)), ["head_norm", "head"]]
DEPTHS = (0, 2, 5, 7, 9)
BY_HAND, HOST, SWITCH = "by hand", "host driver", "switch driver"
SELECTED, ZEROED, WHERE = (
    "optax.selective_transform",
    "optax.masked(set_to_zero)",
    "jnp.where mask",
)
FORMS = (BY_HAND, HOST, SWITCH, SELECTED, ZEROED, WHERE)


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))


@functools.cache
def workload() -> Any:
    return text(CONFIG)


def loss(params: PyTree, batch: PyTree) -> jax.Array:
    return workload().loss_fn(params, batch)[0]


@functools.cache
def start() -> tuple[PyTree, PyTree]:
    """Params and a batch."""
    params, _ = workload().init(jax.random.key(0))
    return params, jax.tree.map(jnp.asarray, workload().batch(0))


def frozen(depth: int) -> PyTree:
    """A tree of bools: of the first groups."""
    params, _ = start()
    tx = boostax.scheduled_freeze(optimizer(), GROUPS, depth)
    return jax.tree.map(lambda active: not active, tx.active(params, depth))


@dataclasses.dataclass
class Program:
    """A compiled step that threads its own params and state."""

    form: Form
    flops: float
    compile_seconds: float


def program(step: Callable[..., Any], params: PyTree, state: PyTree, *rest: PyTree) -> Program:
    """``step(params, state, *rest)`` compiled, params and state donated."""
    own = functools.partial(jax.tree.map, lambda x: x.copy())
    carry = [own((params, state))]
    begun = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*carry[0], *rest).compile()
    seconds = time.perf_counter() - begun

    def run() -> None:
        carry[0] = compiled(*carry[0], *rest)
        jax.block_until_ready(carry[0])

    memory: Any = compiled.memory_analysis()
    flops = dict(compiled.cost_analysis() or {})["flops"]
    return Program(Form(run, memory.temp_size_in_bytes), flops, seconds)


def by_hand(depth: int) -> Program:
    """What one writes for this depth alone: gradients and optimizer of the rest of the layers."""
    params, batch = start()
    still = frozen(depth)
    held = jax.tree.map(lambda p, f: p if f else None, params, still)
    trained = jax.tree.map(lambda p, f: None if f else p, params, still)
    tx = optimizer()

    def step(trained: PyTree, state: PyTree, held: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        def whole(trained: PyTree) -> jax.Array:
            none = lambda x: x is None  # noqa: E731
            params = jax.tree.map(lambda t, h: h if t is None else t, trained, held, is_leaf=none)
            return loss(params, batch)

        grads = jax.grad(whole)(trained)
        updates, state = tx.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state

    return program(step, trained, tx.init(trained), held, batch)


def with_boostax(depth: int, driver: Any) -> Program:
    """Through ``make_train_step``, of a schedule in which all depths occur."""
    params, batch = start()
    schedule = [depth] * 10_000 + list(range(len(GROUPS)))
    tx = boostax.scheduled_freeze(optimizer(), GROUPS, schedule)
    step = boostax.make_train_step(loss, tx, freeze_driver=driver)
    state = [step.init(params)]
    begun = time.perf_counter()
    compiled = step.lower(state[0], batch).compile()
    seconds = time.perf_counter() - begun

    def run() -> None:
        state[0], _ = step(state[0], batch)
        jax.block_until_ready(state[0])

    memory: Any = compiled.memory_analysis()
    flops = dict(compiled.cost_analysis() or {})["flops"]
    return Program(Form(run, memory.temp_size_in_bytes), flops, seconds)


def with_mask(depth: int, tx: optax.GradientTransformation) -> Program:
    """What Optax has: all gradients, of which some are thrown away."""
    params, batch = start()

    def step(params: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    return program(step, params, tx.init(params), batch)


def selected(depth: int) -> Program:
    tx: Any = optax.transforms.selective_transform(optimizer(), freeze_mask=frozen(depth))
    # The usual place of clipping: before, over all gradients.
    return with_mask(depth, optax.chain(optax.clip_by_global_norm(1.0), tx))


def zeroed(depth: int) -> Program:
    zero = optax.masked(optax.set_to_zero(), frozen(depth))
    return with_mask(depth, optax.chain(optimizer(), zero))


def where(depth: int) -> Program:
    """The depth as data: the step is the same for all."""
    params, batch = start()
    tx = optimizer()
    groups = boostax.scheduled_freeze(tx, GROUPS, 0).freezing.labels(params)

    def step(
        params: PyTree, state: PyTree, batch: PyTree, depth: jax.Array
    ) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        new = optax.apply_updates(params, updates)
        keep = lambda group, p, q: jnp.where(group < depth, p, q)  # noqa: E731
        return jax.tree.map(keep, groups, params, new), state

    return program(step, params, tx.init(params), batch, jnp.int32(depth))


def make(name: str, depth: int) -> Program:
    match name:
        case "by hand":
            return by_hand(depth)
        case "host driver":
            return with_boostax(depth, "host")
        case "switch driver":
            return with_boostax(depth, "switch")
        case "optax.selective_transform":
            return selected(depth)
        case "optax.masked(set_to_zero)":
            return zeroed(depth)
        case _:
            return where(depth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    # Compile times are figures here.
    jax.config.update("jax_enable_compilation_cache", False)
    full = f"{BY_HAND}, 0"
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    whole: Program | None = None

    def bar(claim: str, figure: Any, limit: float) -> None:
        bars.append(Bar(claim, float(figure), limit))

    for depth in DEPTHS:
        # The full step by hand is timed beside each of them, for a baseline of the same minute.
        programs = {f"{name}, {depth}": make(name, depth) for name in FORMS}
        whole = whole or programs[full]
        programs.setdefault(full, whole)
        times = paired({name: each.form for name, each in programs.items()}, options.rounds)
        for name in FORMS:
            each = programs[f"{name}, {depth}"]
            row = {
                "groups frozen": f"{depth} of {len(GROUPS)}",
                "form": name,
                "GFLOP": each.flops / 1e9,
                "FLOPs / full": each.flops / whole.flops,
                "time / full": ratio(times, f"{name}, {depth}", full),
                "time / by hand": ratio(times, f"{name}, {depth}", f"{BY_HAND}, {depth}"),
                "temp MB": (each.form.temp or 0) / 1e6,
                "compile / full": each.compile_seconds / whole.compile_seconds,
            }
            rows.append(row)
            print(row, flush=True)
            if name == HOST:
                claim = f"host driver at {10 * depth}%"
                bar(f"{claim}: time / by hand", row["time / by hand"], 1.1)
                bar(
                    f"{claim}: FLOPs / by hand",
                    each.flops / programs[f"{BY_HAND}, {depth}"].flops,
                    1.01,
                )
                if depth in (5, 9):
                    bar(f"{claim}: time / full step", row["time / full"], {5: 0.6, 9: 0.25}[depth])
            if name == SWITCH and depth == 0:
                claim = f"switch driver of {len(GROUPS)} depths: compile time / one step"
                bar(claim, row["compile / full"], 2.2)
    report(
        "freezing",
        "Freezing: what a frozen prefix saves",
        [
            (
                f"AdamW after clipping, {workload().summary.split(',', 1)[0]} as "
                f"{workload().summary.split(' p')[0]} in {len(GROUPS)} groups, batch "
                f"{CONFIG.batch_size} x {CONFIG.sequence_length}",
                rows,
            )
        ],
        bars,
    )


if __name__ == "__main__":
    main()
