"""What a frozen prefix saves: FLOPs, time, memory and compile time of a transformer's step."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from harness import Bar, Form, arguments, caveats, paired, ratio, report
from workloads import TextConfig, text

import boostax
from boostax._core.groups import as_groups

PyTree = Any
CONFIG = TextConfig(depth=8, heads=8, sequence_length=64)
GROUPS = [["characters", "positions"], *(f"block_{i}" for i in range(8)), ["head_norm", "head"]]
DEPTHS = (0, 2, 5, 7, 9)
# Width of the model, and rows in a batch.
SIZES = ((240, 2), (240, 8), (384, 2))
# Of the full step's time, by size and depth.
LIMITS = {(240, 2, 5): 0.6, (240, 2, 9): 0.25, (240, 8, 9): 0.25, (384, 2, 9): 0.25}
# Of one step's, for compiling all depths as one program.
COMPILING = 2.2
BY_HAND, HOST, SWITCH = "by hand", "host driver", "switch driver"
SELECTED, ZEROED = "optax.selective_transform", "optax.masked(set_to_zero)"
WHERE = "jnp.where mask"


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))


class Task(NamedTuple):
    """What is trained: a loss, params and a batch."""

    loss: Callable[[PyTree, PyTree], jax.Array]
    params: PyTree
    batch: PyTree


def task(width: int, rows: int) -> Task:
    """The transformer that wide, with so many rows in a batch."""
    made = text(dataclasses.replace(CONFIG, width=width, batch_size=rows))
    params = made.init(jax.random.key(0))
    return Task(made.loss_fn, params, jax.tree.map(jnp.asarray, made.batch(0)))


def frozen(params: PyTree, depth: int) -> PyTree:
    """A tree of bools: of the first groups."""
    tx = boostax.scheduled_freeze(optimizer(), GROUPS, depth)
    return jax.tree.map(lambda active: not active, tx.active(params, depth))


@dataclasses.dataclass
class Program:
    """A compiled step that threads its own params and state."""

    form: Form
    flops: float
    trace_seconds: float
    compile_seconds: float


def program(step: Callable[..., Any], params: PyTree, state: PyTree, *rest: PyTree) -> Program:
    """``step(params, state, *rest)`` compiled, params and state donated."""
    own = functools.partial(jax.tree.map, lambda x: x.copy())
    carry = [own((params, state))]

    def run() -> None:
        carry[0] = made(*carry[0], *rest)
        jax.block_until_ready(carry[0])

    lower = functools.partial(jax.jit(step, donate_argnums=(0, 1)).lower, *carry[0], *rest)
    made, described = compiled(lower, run)
    return described


def compiled(lower: Callable[[], Any], run: Callable[[], None]) -> tuple[Any, Program]:
    """The executable, and what is to be said of it."""
    begun = time.perf_counter()
    lowered = lower()
    traced = time.perf_counter()
    made = lowered.compile()
    done = time.perf_counter()
    form = Form(run, made.memory_analysis().temp_size_in_bytes)
    return made, Program(form, made.cost_analysis()["flops"], traced - begun, done - traced)


def by_hand(task: Task, depth: int) -> Program:
    """What one writes for this depth alone: gradients and optimizer of the rest of the layers."""
    params = task.params
    still = frozen(params, depth)
    held = jax.tree.map(lambda p, f: p if f else None, params, still)
    trained = jax.tree.map(lambda p, f: None if f else p, params, still)
    tx = optimizer()

    def step(trained: PyTree, state: PyTree, held: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        def whole(trained: PyTree) -> jax.Array:
            none = lambda x: x is None  # noqa: E731
            params = jax.tree.map(lambda t, h: h if t is None else t, trained, held, is_leaf=none)
            return task.loss(params, batch)

        updates, state = tx.update(jax.grad(whole)(trained), state, trained)
        return optax.apply_updates(trained, updates), state

    return program(step, trained, tx.init(trained), held, task.batch)


def with_boostax(task: Task, depth: int, driver: Any) -> Program:
    """Through ``make_train_step``, of a schedule in which all depths occur."""
    schedule = [depth] * 10_000 + list(range(len(GROUPS)))
    tx = boostax.scheduled_freeze(optimizer(), GROUPS, schedule)
    step = boostax.make_train_step(task.loss, tx, freeze_driver=driver)
    state = [step.init(task.params)]

    def run() -> None:
        state[0], reported = step(state[0], task.batch)
        # What a program returns is there at once; to ask each frozen leaf as well takes time.
        jax.block_until_ready(reported)

    return compiled(lambda: step.lower(state[0], task.batch), run)[1]


def with_mask(task: Task, tx: optax.GradientTransformation) -> Program:
    """What Optax has: all gradients, of which some are thrown away."""

    def step(params: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(jax.grad(task.loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    return program(step, task.params, tx.init(task.params), task.batch)


def selected(task: Task, depth: int) -> Program:
    tx: Any = optax.transforms.selective_transform(
        optimizer(), freeze_mask=frozen(task.params, depth)
    )
    # The usual place of clipping: before, over all gradients.
    return with_mask(task, optax.chain(optax.clip_by_global_norm(1.0), tx))


def zeroed(task: Task, depth: int) -> Program:
    zero = optax.masked(optax.set_to_zero(), frozen(task.params, depth))
    return with_mask(task, optax.chain(optimizer(), zero))


def where(task: Task, depth: int) -> Program:
    """The depth as data: the step is the same for all."""
    params, tx = task.params, optimizer()
    groups = as_groups("freezing", GROUPS, params).tree

    def step(
        params: PyTree, state: PyTree, batch: PyTree, depth: jax.Array
    ) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(jax.grad(task.loss)(params, batch), state, params)
        new = optax.apply_updates(params, updates)
        keep = lambda group, p, q: jnp.where(group < depth, p, q)  # noqa: E731
        return jax.tree.map(keep, groups, params, new), state

    return program(step, params, tx.init(params), task.batch, jnp.int32(depth))


FORMS: dict[str, Callable[[Task, int], Program]] = {
    BY_HAND: by_hand,
    HOST: functools.partial(with_boostax, driver="host"),
    SWITCH: functools.partial(with_boostax, driver="switch"),
    SELECTED: selected,
    ZEROED: zeroed,
    WHERE: where,
}


def timed(
    width: int, batch_rows: int, rounds: int, bars: list[Bar]
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """A heading, a row per depth and form, and one of the switch's compilation beside a step's."""
    trained = task(width, batch_rows)
    size = sum(x.size for x in jax.tree.leaves(trained.params))
    tokens = f"{batch_rows} x {CONFIG.sequence_length}"
    rows: list[dict[str, Any]] = []
    seconds: dict[str, list[tuple[float, float]]] = {BY_HAND: [], SWITCH: []}

    def bar(claim: str, figure: Any, limit: float) -> None:
        bars.append(Bar(f"{size / 1e6:.1f}M, {tokens}: {claim}", float(figure), limit))

    for depth in DEPTHS:
        whole = by_hand(trained, 0)
        seconds[BY_HAND].append((whole.trace_seconds, whole.compile_seconds))
        hand = by_hand(trained, depth)
        for name in FORMS:
            each = hand if name == BY_HAND else FORMS[name](trained, depth)
            # No more beside each other than are compared: another's memory traffic costs them all.
            forms = {"full": whole.form, BY_HAND: hand.form, name: each.form}
            # Bars are asked of the host driver: single calls are uneven readings.
            times = paired(forms, 5 * rounds if name == HOST else rounds)
            row: dict[str, Any] = {
                "groups frozen": f"{depth} of {len(GROUPS)}",
                "form": name,
                "GFLOP": each.flops / 1e9,
                "FLOPs / full": each.flops / whole.flops,
                "time / full": ratio(times, name, "full"),
                "time / by hand": ratio(times, name, BY_HAND),
                "temp MB": (each.form.temp or 0) / 1e6,
                "trace s": each.trace_seconds,
                "compile s": each.compile_seconds,
            }
            rows.append(row)
            print(row, flush=True)
            if name == SWITCH:
                seconds[SWITCH].append((each.trace_seconds, each.compile_seconds))
            if name == HOST:
                claim = f"host driver at {10 * depth}%"
                bar(f"{claim}: time / by hand", row["time / by hand"], 1.1)
                bar(f"{claim}: FLOPs / by hand", each.flops / hand.flops, 1.01)
                if (width, batch_rows, depth) in LIMITS:
                    limit = LIMITS[width, batch_rows, depth]
                    bar(f"{claim}: time / full step", row["time / full"], limit)
    (traced, compiled), (switch_traced, switch_compiled) = (
        map(statistics.median, zip(*seconds[name], strict=True)) for name in (BY_HAND, SWITCH)
    )
    bar("switch driver: compile time / one step", switch_compiled / compiled, COMPILING)
    heading = (
        f"AdamW behind clipping, a transformer of {size:,} parameters in {len(GROUPS)} groups, "
        f"{tokens} tokens a step"
    )
    compilation = {
        "parameters": size,
        "tokens a step": tokens,
        "one step: trace s": traced,
        "one step: compile s": compiled,
        "switch driver: trace s": switch_traced,
        "switch driver: compile s": switch_compiled,
        "compile / one step": switch_compiled / compiled,
        "both / one step": (switch_traced + switch_compiled) / (traced + compiled),
    }
    return heading, rows, compilation


def main() -> None:
    rounds = arguments(__doc__, rounds=9).rounds
    # Compile times are figures here.
    jax.config.update("jax_enable_compilation_cache", False)
    sections: list[tuple[str, list[dict[str, Any]]]] = []
    bars: list[Bar] = []
    compilations: list[dict[str, Any]] = []
    for width, batch_rows in SIZES:
        heading, rows, compilation = timed(width, batch_rows, rounds, bars)
        sections.append((heading, rows))
        compilations.append(compilation)
    lines = [
        "A frozen prefix still passes forward, a third of the step's FLOPs: that is what 90% and "
        "more converge to where matrix products decide. With few tokens a step the optimizer's and "
        "the gradients' memory traffic count for more, and freezing saves them whole.",
        "XLA counts the FLOPs of all depths of the switch driver, whatever runs.",
        "The full step is that of the same rounds; trace and compile are single readings, but for "
        f"the medians of {len(DEPTHS)} compilations.",
        "Half of the groups are aimed at 0.6 of the full step's time. Where matrix products count "
        "for more (8 x 64 tokens, the wider model) that is missed, and no bar is published.",
    ]
    sections.append((f"Compiling, medians of {len(DEPTHS)}", compilations))
    sections.append(("To keep in mind", caveats(lines)))
    report("freezing", "Freezing: what a frozen prefix saves", sections, bars)


if __name__ == "__main__":
    main()
