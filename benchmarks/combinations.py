"""Every two techniques together, the levels and everything at once: do they train as promised?

Each configuration trains small models on digits and text over emulated devices, and is checked on
the way. Makes ``docs/combinations.md``, beside the results.
"""

import functools
import itertools
import json
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from workloads import DigitsConfig, TextConfig, digits, text
from workloads.models import ResidualBlock, convolution
from workloads.workload import cross_entropy

import boostax
from boostax._core import trees
from boostax.config.build import Boost

PyTree = Any
Spec = dict[str, Any]
AXIS, DEVICES, BATCH, WIDTH, CALLS, RATE = "data", 4, 16, 8, 12, 1e-2
PAGE = harness.DOCS / "combinations.md"
FREEZE = {"groups": 2, "total_steps": 8, "frozen_fraction": 0.5}
# What the first key of each is about; two about the same are no pair.
TECHNIQUES: dict[str, Spec] = {
    "bfloat16": {"policy": {"spec": "O2", "dtype": "bfloat16"}},
    "float16": {"policy": {"spec": "O2", "dtype": "float16"}, "loss_scale": "dynamic"},
    "dynamic": {"loss_scale": "dynamic"},
    "static": {"loss_scale": {"kind": "static", "scale": 128.0}},
    "group": {"loss_scale": {"kind": "group", "groups": 2}},
    "accumulate": {"accumulate": 2},
    "window": {"accumulate": {"every": 2, "drop": "window"}},
    "microbatches": {"microbatches": 2},
    "freeze": {"freeze": FREEZE},
    "centralize": {"centralize": True},
    "clip": {"clip": 0.1},
    "less_bn": {"less_bn": True},
    "dim_reduce": {"dim_reduce": {"n_components": 2, "every": 1}},
    "host basis": {"dim_reduce": {"n_components": 2, "every": None}},
}
REDUCTIONS: dict[str, Spec] = {
    "mean": {"wire": "bfloat16"},
    "adasum": {},
    "adasum-delta": {},
    "top-k": {"density": 0.5, "dense": "vectors"},
    "threshold": {"threshold": 0.5, "capacity": 0.5, "relative": True},
    "random-k": {"density": 0.5},
    "int8": {"rounding": "stochastic"},
    "int16": {},
    "sign": {"form": "mean"},
    "power-sgd": {"rank": 1},
    "partial": {"partitions": 2},
    "local": {"every": 2},
}
EVERYTHING: Spec = {
    "policy": {"spec": "O2", "dtype": "float16"},
    "loss_scale": {"kind": "group", "groups": 2},
    "accumulate": 2,
    "microbatches": 2,
    "freeze": FREEZE,
    "reduce": "adasum-delta",
    "centralize": True,
    "clip": 0.1,
    "less_bn": True,
    "dim_reduce": {"n_components": 2, "every": None},
}
ALONE, PAIRS, REDUCED, WHOLE = (
    "Alone",
    "Two techniques",
    "A technique and a reduction",
    "Levels, and everything at once",
)
YES, NO, FAILS, NO_NORM = "yes", "refused", "fails", "no BatchNorm"

JOBS = itertools.count(1)


class Asked(NamedTuple):
    """A configuration.

    Attributes:
      section: of the results.
      names: what is combined.
      spec: for ``boostax.auto``.
      level: where it starts from.
    """

    section: str
    names: tuple[str, ...]
    spec: Spec
    level: str | None = None

    @property
    def title(self) -> str:
        """The names."""
        return " + ".join(self.names)


class Task(NamedTuple):
    """A small model and a batch: ``loss_fn`` multiplies its loss by the mean of ``batch["one"]``.

    A NaN in there is one in every gradient of that replica, whatever the inputs are.
    """

    params: PyTree
    model_state: PyTree
    loss_fn: Callable[..., Any]
    batch: PyTree


class Broken(Exception):
    """A promise that was not kept."""


def require(kept: Any, promise: str) -> None:
    if not kept:
        raise Broken(promise)


def reduction(name: str) -> Spec:
    return {"reduce": {"kind": name, **REDUCTIONS[name]}}


def everything_asked() -> Iterator[Asked]:
    """All configurations, in the order of the tables."""
    for name, spec in TECHNIQUES.items():
        yield Asked(ALONE, (name,), spec)
    for name in REDUCTIONS:
        yield Asked(ALONE, (name,), reduction(name))
    for one, other in itertools.combinations(TECHNIQUES, 2):
        if next(iter(TECHNIQUES[one])) != next(iter(TECHNIQUES[other])):
            yield Asked(PAIRS, (one, other), TECHNIQUES[one] | TECHNIQUES[other])
    for one, other in itertools.product(TECHNIQUES, REDUCTIONS):
        yield Asked(REDUCED, (one, other), TECHNIQUES[one] | reduction(other))
    for level in ("O1", "O2"):
        # Its ten groups are more than the layers here.
        yield Asked(WHOLE, (level,), {"freeze": FREEZE}, level)
    yield Asked(WHOLE, ("everything",), EVERYTHING)
    yield Asked(WHOLE, ("float16 without a loss scale",), {"policy": "O2"})


class TinyResNet(nn.Module):
    """A stem, one residual block with two BatchNorms, the mean over the image, a linear head."""

    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Logits in f32, ``[batch, 10]``."""
        hidden = convolution(WIDTH // 2, 3, 2, self.dtype, "stem")(images)
        hidden = ResidualBlock(WIDTH // 2, 1, "basic", self.dtype, name="block")(hidden, train)
        logits = nn.Dense(10, dtype=self.dtype, name="head")(hidden.mean((1, 2)))
        return logits.astype(jnp.float32)


def less_bn_loss(model: nn.Module) -> Callable[..., Any]:
    def loss_fn(params: PyTree, batch: PyTree, *, model_state: PyTree) -> Any:
        variables = {"params": params, **model_state}
        logits, new = model.apply(variables, batch["inputs"], True, mutable=["batch_stats"])
        loss = cross_entropy(logits, batch["targets"])[0].mean()
        return loss, boostax.Aux(model_state=new)

    return loss_fn


@functools.cache
def workload(name: str, dtype: str) -> Any:
    """As small as it gets: compiling takes most of the time."""
    if name == "digits":
        return digits(DigitsConfig(batch_size=BATCH, width=WIDTH, dtype=dtype))
    return text(
        TextConfig(
            max_chars=50_000,
            sequence_length=8,
            batch_size=BATCH,
            width=WIDTH,
            depth=1,
            heads=1,
            dtype=dtype,
        )
    )


@functools.cache
def first_variables(source: Any) -> Any:
    """What a model or a workload begins with, on the host; the same in every dtype."""
    key = jax.random.key(0)
    if isinstance(source, nn.Module):
        return jax.device_get(jax.jit(source.init)(key, jnp.zeros((1, 8, 8, 1))))
    return jax.device_get(jax.jit(workload(source, "float32").init)(key))


def task(name: str, boost: Boost) -> Task:
    """The workload in the policy's dtype; the network with BatchNorm where LessBN is on."""
    policy = boost.policy
    dtype = "float32" if policy is None else policy.compute_dtype.name
    source = workload(name, dtype)
    batch = source.batch(0) | {"one": np.ones(BATCH, np.float32)}
    if name == "digits" and boost.config.less_bn is not None:
        model, found = boost.model(TinyResNet(jnp.dtype(dtype)), batch["inputs"])
        require(found is not None and found.removed, "less_bn removes no BatchNorm")
        wide, _ = boost.model(TinyResNet(jnp.dtype("float32")), batch["inputs"])
        model_state = dict(first_variables(wide))
        params, loss_fn = model_state.pop("params"), less_bn_loss(model)
    else:
        (params, model_state), loss_fn = first_variables(name), source.loss_fn

    def weighed(params: PyTree, batch: PyTree, **kwargs: Any) -> Any:
        loss, aux = loss_fn(params, batch, **kwargs)
        return loss * batch["one"].mean(), aux

    return Task(params, model_state, weighed, batch)


def types(state: PyTree) -> Any:
    """What no step may change."""
    found = [(x.shape, x.dtype, x.weak_type, x.sharding) for x in jax.tree.leaves(state)]
    return jax.tree.structure(state), found


def advance(step: Any, state: PyTree, batch: PyTree, calls: int = 1) -> tuple[PyTree, Any]:
    """So many calls, each of which must keep the types of the state and take its buffers."""
    told: list[Any] = []
    for _ in range(calls):
        before, old = types(state), jax.tree.leaves(state)
        state, each = step(state, batch)
        require(types(state) == before, "the state changes its structure or types")
        kept = {id(x) for x in jax.tree.leaves(state)}
        # A scalar that is only written is no argument of the program, and not taken.
        gone = all(x.is_deleted() or id(x) in kept or not x.ndim for x in old)
        require(gone, "the old state is not donated")
        told.append(jax.device_get(each))
    return state, told


def check_values(step: Any, state: PyTree) -> None:
    """Finite; and what is not declared to be a replica's own has the same bits on all."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        where = jax.tree_util.keystr(path)
        parts = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            finite = all(np.isfinite(part.astype(np.float32)).all() for part in parts)
            require(finite, f"not finite: {where}")
        if leaf.is_fully_replicated:
            equal = all(part.tobytes() == parts[0].tobytes() for part in parts)
            require(equal, f"replicas differ: {where}")
    common = jax.tree.leaves(step.common_params(state))
    require(all(np.isfinite(np.asarray(x, np.float32)).all() for x in common), "params not finite")


def check_programs(step: Any, freezes: bool) -> None:
    """Compiled once; with freezing once for each depth."""
    require(len(step.depths) == (FREEZE["groups"] if freezes else 0), "not every depth was drawn")
    programs = [x for each in step._programs.values() for x in each.compiled.values()]
    require(len(programs) == max(len(step.depths), 1), "more programs than depths")
    require(all(program._cache_size() == 1 for program in programs), "compiled more than once")


def scaler(state: PyTree) -> Any:
    kinds = (boostax.states.LossScaleState, boostax.states.GroupLossScaleState)
    found = trees.find(state.opt_state, lambda node: isinstance(node, kinds))
    return found[0] if found else None


def check_skip(step: Any, state: PyTree, batch: PyTree, boost: Boost) -> PyTree:
    """A NaN on one replica is as if it had not come: for params, statistics, moments, window."""
    if boost.config.loss_scale is None:
        return state
    window = boost.config.accumulate
    drops_window = window is not None and window.drop == "window"
    if window is not None and not drops_window:
        state, _ = advance(step, state, batch)  # into the middle of a window

    def bits() -> list[bytes]:
        statistics = None if drops_window else state.model_state
        kept = (state.params, statistics, scaler(state).inner_state)
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(kept)]

    before, skipped = bits(), int(scaler(state).skipped_steps)
    bad = batch | {"one": np.where(np.arange(BATCH) == 0, np.float32(np.nan), batch["one"])}
    state, told = advance(step, state, bad)
    if drops_window:
        state, told = advance(step, state, batch)
    require(bits() == before, "a NaN leaves traces")
    require(int(scaler(state).skipped_steps) == skipped + 1, "a NaN is not counted")
    require(not told[0]["applied"], "a NaN is reported as applied")
    state, told = advance(step, state, batch, 2)
    require(all(np.isfinite(each["loss"]) for each in told), "the run does not go on after a NaN")
    return state


def check_losses(told: list[Any], falls: bool = True) -> list[float]:
    losses = [float(each["loss"]) for each in told]
    require(np.isfinite(losses).all(), "the loss is not finite")
    less = losses[-1] < losses[0] if falls else losses[-1] <= losses[0]
    require(less, f"the loss goes from {losses[0]:.4f} to {losses[-1]:.4f}")
    return losses


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def finish(boost: Boost, small: Task, source: Any, params: PyTree, model_state: PyTree) -> None:
    """The run goes on in the subspace: the loss does not rise."""
    tx = boost.finish(source, params, axis_name=AXIS)
    step = boostax.make_train_step(
        boost.loss(small.loss_fn, params),
        tx,
        mesh=mesh(),
        axis_name=AXIS,
        policy=boost.policy,
        microbatches=boost.config.microbatches,
        has_aux=True,
    )
    state = step.init(params, model_state=model_state)
    state, told = advance(step, state, small.batch, 4)
    check_losses(told, falls=False)
    check_values(step, state)
    check_programs(step, False)


def trained(boost: Boost, small: Task) -> list[float]:
    """Losses of the calls; raises ``Broken``."""
    step = boost.make_train_step(
        small.loss_fn,
        optax.adam(RATE),
        small.params,
        mesh=mesh(),
        axis_name=AXIS,
        has_aux=True,
    )
    state = step.init(small.params, model_state=small.model_state)
    part, told = boost.config.dim_reduce, []
    path = boostax.subspace.HostTrajectory(part.n_components + 1) if part else None
    for call in range(CALLS):
        state, each = advance(step, state, small.batch)
        told += each
        if path is not None and part.every is None and each[0]["applied"]:
            path.record(call, step.common_params(state))
    losses = check_losses(told)
    check_values(step, state)
    state = check_skip(step, state, small.batch, boost)
    check_values(step, state)
    check_programs(step, boost.config.freeze is not None)
    if path is not None:
        source = path.basis(part.n_components) if part.every is None else state.opt_state
        finish(boost, small, source, step.common_params(state), state.model_state)
    return losses


def outcome(asked: Asked, name: str) -> dict[str, Any]:
    """What becomes of a configuration on a workload."""
    try:
        boost = boostax.auto(asked.spec, level=asked.level)
    except (ValueError, TypeError) as error:
        return {"outcome": NO, "reason": str(error).split(". ")[0].rstrip(".") + "."}
    if name == "text" and "less_bn" in asked.names:
        return {"outcome": NO_NORM}
    try:
        losses = trained(boost, task(name, boost))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        return {"outcome": FAILS, "reason": f"{name}: {type(error).__name__}: {reason}"}
    lacking = name == "text" and boost.config.less_bn is not None
    found = f"{YES}, but for LessBN" if lacking else YES
    return {"outcome": found, "loss": f"{losses[0]:.3f} to {losses[-1]:.3f}"}


def job(asked: Asked, name: str) -> list[dict[str, Any]]:
    """The same, with what it was and how long it took."""
    begun = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = outcome(asked, name)
    if not next(JOBS) % 20:
        jax.clear_caches()
    seconds = round(time.monotonic() - begun, 2)
    return [{"title": asked.title, "task": name, **found, "seconds": seconds}]


def prepare() -> None:
    """In each process, before JAX is first used."""
    harness.on_cpu(DEVICES)
    harness.quick()


def run_all(wanted: list[Asked], path: pathlib.Path, workers: int) -> dict[Any, dict[str, Any]]:
    """All outcomes by title and workload; what is kept is not run again."""
    done = harness.kept(path, "title", "task")
    jobs = {
        (asked.title, name): (asked, name)
        for asked, name in itertools.product(wanted, ("digits", "text"))
        if (asked.title, name) not in done
    }
    harness.in_processes(job, jobs, path, workers, prepare)
    return harness.kept(path, "title", "task")


def tables(wanted: list[Asked], done: dict[Any, dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """A row for each configuration."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for asked in wanted:
        found = {name: done[asked.title, name] for name in ("digits", "text")}
        row: dict[str, Any] = {"configuration": asked.title}
        for name, each in found.items():
            row |= {name: each["outcome"], f"loss on {name}": each.get("loss")}
        row["why"] = next((each["reason"] for each in found.values() if "reason" in each), None)
        rows.setdefault(asked.section, []).append(row)
    return list(rows.items())


class Notes:
    """Numbers for reasons, in the order of their first use."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def cell(self, row: dict[str, Any] | None) -> str:
        """What a matrix says of a configuration."""
        if row is None:
            return "-"
        if row["why"] is None:
            return "digits" if NO_NORM in row["text"] else YES
        if row["why"] not in self.reasons:
            self.reasons.append(row["why"])
        word = "no" if row["digits"] == row["text"] == NO else "**fails**"
        return f"{word} ({self.reasons.index(row['why']) + 1})"


def matrix(names: list[str], header: list[str], cell: Callable[[str, str], str]) -> list[str]:
    rows = [[f"**{one}**", *(cell(one, other) for other in header)] for one in names]
    return harness.markdown(["", *header], rows)


def page(sections: dict[str, list[dict[str, Any]]]) -> str:
    """The document, from the sections on record."""
    rows = {row["configuration"]: row for found in sections.values() for row in found}
    notes = Notes()
    order = list(TECHNIQUES)

    def pair(one: str, other: str) -> str:
        if order.index(other) > order.index(one):
            return ""
        return notes.cell(rows.get(one if one == other else f"{other} + {one}"))

    def reduced(one: str, other: str) -> str:
        return notes.cell(rows[other if one == "alone" else f"{one} + {other}"])

    techniques = matrix(order, order, pair)
    reductions = matrix(["alone", *order], list(REDUCTIONS), reduced)
    whole = [
        (
            row["configuration"],
            notes.cell(row) if row["why"] else f"digits: {row['digits']}; text: {row['text']}",
        )
        for row in sections[WHOLE]
    ]
    refused = sum(NO in (row["digits"], row["text"]) for row in rows.values())
    failed = sum(FAILS in (row["digits"], row["text"]) for row in rows.values())
    counts = (
        f"{len(rows)} configurations: {len(rows) - refused - failed} train, {refused} are refused, "
        f"{failed} fail."
    )
    configurations = [
        (name, f"`{json.dumps(spec)}`")
        for name, spec in (
            *TECHNIQUES.items(),
            *((name, reduction(name)) for name in REDUCTIONS),
            ("O1, O2", {"freeze": FREEZE}),
            ("everything", EVERYTHING),
        )
    ]
    lines = [
        "# What goes together",
        "",
        INTRODUCTION,
        "",
        counts,
        "",
        "## Two techniques",
        "",
        "The diagonal is each alone; a dash stands for two of one kind. With `less_bn` there is "
        "no run on text, whose model has no BatchNorm.",
        "",
        *techniques,
        "",
        "## A technique and a reduction",
        "",
        *reductions,
        "",
        f"## {WHOLE}",
        "",
        "On text without LessBN.",
        "",
        *harness.markdown(("configuration", ""), whole),
        "",
        "## Refused",
        "",
        *(f"{number}. {reason}" for number, reason in enumerate(notes.reasons, 1)),
        "",
        "## The configurations",
        "",
        "What `boostax.auto` was given; a pair has the keys of both. O1 and O2 start from the "
        "level, whose ten groups are more than the layers here. `dim_reduce` and `host basis` "
        "also make a finish: of snapshots in the state, and of snapshots that a "
        "`boostax.subspace.HostTrajectory` recorded.",
        "",
        *harness.markdown(("name", "configuration"), configurations),
    ]
    return "\n".join(lines) + "\n"


INTRODUCTION = f"""\
This page is generated: `python benchmarks/combinations.py` runs every configuration and writes it,
and the losses to [a table](../benchmarks/results/combinations.md). Each trains {CALLS} calls of
`boostax.auto(...).make_train_step` with Adam on {DEVICES} emulated devices, on small models of the
digits and the text workload (with `less_bn`, a small residual network on digits). "yes" says of
both: nothing raises or warns; the loss is finite and falls; everything is finite, and what is
common to the replicas has the same bits on all; the state keeps its structure, shapes, dtypes, weak
types and shardings from call to call; the step is compiled once, with freezing once for each depth;
the old state is donated; with a loss scale, a NaN on one replica is skipped bit for bit; a finish
does not raise the loss. "no" is refused by name when the configuration is made."""


def main() -> None:
    options = harness.resumable(__doc__, "part of the names to try")
    if options.page:
        PAGE.write_text(page(harness.sections_of("combinations")))
        return
    work = harness.work_of(options, "combinations")
    wanted = [asked for asked in everything_asked() if options.only in asked.title]
    done = run_all(wanted, work / "outcomes.jsonl", options.workers)
    if options.only:
        return
    prepare()
    sections = tables(wanted, done)
    failed = sum(FAILS in (row["digits"], row["text"]) for _, rows in sections for row in rows)
    bars = [harness.Bar("pairs that fail", failed, 0)]
    harness.report("combinations", "What goes together", sections, bars)
    PAGE.write_text(page(dict(sections)))


if __name__ == "__main__":
    main()
