"""The recipes of ``docs/recipes``: measured beside their rivals, and their compiled steps counted.

``python benchmarks/recipes.py`` trains them, the one for two hosts as two processes;
``--audit``, where the compilers are installed, counts what the compiled steps send and hold.
Makes ``docs/recipes.md``, beside the results.
"""

import argparse
import collections
import functools
import json
import pathlib
import pydoc_data
import re
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import compilers_cases as cases
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tables
from flax.training.train_state import TrainState
from harness import (
    DOCS,
    Bar,
    joined,
    launched,
    of_rows,
    on_cpu,
    over_seeds,
    report,
    sections_of,
)
from recipes_cases import (
    BF16,
    BF16_WIRE,
    FOLDER,
    PLAIN,
    RECIPES,
    Config,
    audited,
    config_of,
    hidden,
    in_fp8,
    without,
)
from workloads import TextConfig, Workload, text
from workloads.models import CharacterTransformer

import boostax

PyTree = Any
Row = dict[str, Any]
# A form: of so many optimizer steps, how they ended with each seed.
Run = Callable[[int], list[Row]]
PAGE = DOCS / "recipes.md"
STEPS, SEEDS, RATE, ROWS = 200, (0, 1, 2), 4e-3, 8
TRAINED, AUDITED = "Trained", "Compiled"


def rate(steps: int, peak: float = RATE) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps, peak / 10)


def adamw(steps: int) -> optax.GradientTransformation:
    return optax.adamw(rate(steps))


@functools.cache
def text_of(seed: int, rows: int = 32) -> Workload:
    """The text in the order of a seed; loss and held-out split are the same for all."""
    return text(TextConfig(batch_size=rows, seed=seed))


def init(seed: int) -> PyTree:
    return text_of(0).init(jax.random.key(seed))[0]


def loss_fn(params: PyTree, batch: PyTree, **given: Any) -> Any:
    return text_of(0).loss_fn(params, batch, **given)


def mesh_of(devices: int) -> Any:
    """None on one device."""
    auto = (jax.sharding.AxisType.Auto,)
    there = jax.devices()[:devices]
    return None if devices == 1 else jax.make_mesh((devices,), ("data",), auto, devices=there)


def calls_of(config: Config) -> int:
    """Calls of an optimizer step."""
    window = boostax.auto(config).config.accumulate
    return 1 if window is None else window.every


def made(
    config: Config,
    inner: optax.GradientTransformation,
    devices: int = 1,
    loss: Any = loss_fn,
    **options: Any,
) -> Any:
    """The train step of a configuration."""
    if (mesh := mesh_of(devices)) is not None:
        options |= {"mesh": mesh, "axis_name": "data"}
    return boostax.auto(config).make_train_step(loss, inner, has_aux=True, **options)


def called(step: Any, state: Any, batches: Iterable[PyTree]) -> tuple[Any, Row]:
    """The state after some calls, and the metrics of the last."""
    metrics: Row = {}
    for batch in batches:
        state, metrics = step(state, batch)
        # On emulated devices, several calls on their way would wait for each other's threads.
        jax.block_until_ready(metrics)
    return state, metrics


def ended(params: PyTree, metrics: Row) -> Row:
    """How a run ended."""
    skipped = [float(metrics[x]) for x in ("skipped_total", "spikes") if x in metrics]
    return {**text_of(0).evaluate(params, None), "skipped": float(sum(skipped))}


def trained(
    config: Config,
    steps: int,
    *,
    rows: int = ROWS,
    devices: int = 1,
    optimizer: Callable[[int], optax.GradientTransformation] = adamw,
    **options: Any,
) -> list[Row]:
    """Runs on text by a configuration, and what a step costs."""
    step = made(config, optimizer(steps), devices, **options)
    costs = boostax.explain(step, step.init(init(0)), text_of(0, rows).batch(0))
    counted = {
        "working MB": costs.calls[0].temporary_bytes / 1e6,
        "state MB": costs.state_bytes / 1e6,
        # Where state is sharded, collectives do not stand in the trace.
        "KB sent a step": None if step.shard_optimizer else costs.wire_bytes / 1e3,
    }
    found: list[Row] = []
    for seed in SEEDS:
        batch = functools.partial(text_of(seed, rows).batch, rows=step.rows(rows))
        state = step.init(init(seed), key=jax.random.key(seed))
        state, metrics = called(step, state, map(batch, range(calls_of(config) * steps)))
        found.append(ended(jax.device_get(step.common_params(state)), metrics) | counted)
    return found


def run_of(config: Config, **options: Any) -> Run:
    return functools.partial(trained, config, **options)


def beside_f32(name: str) -> dict[str, Run]:
    """A recipe, and plain f32 with the same batches, windows and clip; where codes travel, bf16."""
    asked, where = config_of(name), {"rows": 32, "devices": RECIPES[name].devices}
    plain = {key: asked[key] for key in ("accumulate", "clip") if key in asked}
    if isinstance(asked.get("accumulate"), dict):
        sums = ("accumulator_dtype", "rounding")
        plain["accumulate"] = {k: x for k, x in asked["accumulate"].items() if k not in sums}
    forms = {f"{name}.json": asked, PLAIN: plain}
    if "block" in asked.get("reduce", {}):
        forms["int8, a scale for up to 4,096 elements"] = plain | {"reduce": {"kind": "int8"}}
        forms["a mean in bf16"] = plain | BF16_WIRE
    return {form: run_of(config, **where) for form, config in forms.items()}


def scanned(config: Config, rows: int, devices: int, steps: int) -> list[Row]:
    """The same in plain ``jit``: a scan over micro-batches of global arrays, in f32."""
    mesh, many = mesh_of(devices), config["microbatches"]
    place = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))  # noqa: E731
    clip = optax.clip_by_global_norm(config["clip"])
    tx = optax.chain(optax.scale(1 / many), clip, adamw(steps))
    step = cases.by_hand(
        "scan", jax.grad(lambda params, batch: loss_fn(params, batch)[0]), tx, mesh, many
    )
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=place())
    found: list[Row] = []
    for seed in SEEDS:
        params = jax.device_put(init(seed), place())
        state = jax.device_put(tx.init(params), place())
        for i in range(steps):
            split = lambda x: x.reshape(many, -1, *x.shape[1:])  # noqa: E731
            batch = jax.tree.map(split, text_of(seed, rows).batch(i))
            params, state = step(params, state, jax.device_put(batch, place(None, "data")))
            jax.block_until_ready(params)
        found.append(ended(params, {}))
    return found


def many_micro_batches(name: str) -> dict[str, Run]:
    asked, where = config_of(name), {"rows": 64, "devices": RECIPES[name].devices}
    return {
        f"{name}.json": run_of(asked, **where),
        "jit and `lax.scan`, f32": functools.partial(scanned, asked, *where.values()),
    }


# The prose that every Python has beside its sources.
PROSE = pathlib.Path(pydoc_data.__file__).parent / "topics.py"


@functools.cache
def corpora() -> tuple[Any, Any, Any]:
    """Tokens of code, and of prose to train on and to judge by, with the code's characters."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    code = "".join(file.read_text() for file in sorted(library.glob("*.py")))
    common = collections.Counter(code).most_common(127)
    table = {character: i + 1 for i, (character, _) in enumerate(common)}
    prose = PROSE.read_text().replace("\\n", "\n")
    tokens, said = (np.array([table.get(x, 0) for x in part], np.int32) for part in (code, prose))
    cut = len(said) * 9 // 10
    return tokens, said[:cut], said[cut:]


def windows(tokens: Any, seed: int, index: int, rows: int = ROWS) -> PyTree:
    """A batch of windows that the seed and the index decide."""
    random = np.random.default_rng((seed, index))
    starts = random.integers(len(tokens) - 65, size=(rows, 1))
    chosen = tokens[starts + np.arange(65)]
    return {"inputs": chosen[:, :-1], "targets": chosen[:, 1:]}


@functools.cache
def on_code(steps: int) -> list[PyTree]:
    """Params that code has trained, of each seed."""
    step = made({"clip": 1.0}, adamw(steps))
    batches = lambda seed: (windows(corpora()[0], seed, i) for i in range(steps))  # noqa: E731
    last = [called(step, step.init(init(seed)), batches(seed))[0] for seed in SEEDS]
    return [jax.device_get(state.params) for state in last]


def tuned(config: Config, share: float, steps: int) -> list[Row]:
    """Half as many steps on prose, or a share of these, at a quarter of the rate."""
    code, prose, judged = corpora()
    del code
    start = on_code(steps)
    steps = round(steps // 2 * share)
    step = made(config, optax.adamw(rate(steps, RATE / 4)))
    judge = jax.jit(lambda params, batch: loss_fn(params, batch)[0])
    found: list[Row] = []
    for seed in SEEDS:
        batches = (windows(prose, seed, i) for i in range(steps))
        state, _ = called(step, step.init(start[seed]), batches)
        losses = [float(judge(state.params, windows(judged, 0, i, 128))) for i in range(8)]
        found.append({"loss": statistics.mean(losses)})
    return found


def frozen_prefix(name: str) -> dict[str, Run]:
    asked = config_of(name)
    whole = without(asked, "freeze")
    return {
        f"{name}.json": functools.partial(tuned, asked, 1.0),
        "all is trained": functools.partial(tuned, whole, 1.0),
        "all is trained, two thirds of the steps": functools.partial(tuned, whole, 2 / 3),
    }


def in_low(config: Config | None, steps: int) -> list[Row]:
    """The text's model with products in fp8; without a configuration by Flax's own state."""
    model = CharacterTransformer(128, 64, 96, 2, 4, jnp.dtype("float32"))
    first = text_of(0).batch(0)["inputs"][:1]
    with nn.intercept_methods(in_fp8):

        def loss(variables: PyTree, batch: PyTree) -> Any:
            logits = model.apply(variables, batch["inputs"])
            each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return each.mean(), {}

        step = _Flax(loss, steps) if config is None else made(config, adamw(steps), 1, loss)
        found: list[Row] = []
        for seed in SEEDS:
            state = step.init(model.init(jax.random.key(seed), first))
            state, _ = called(step, state, map(text_of(seed, ROWS).batch, range(steps)))
            # Judged in f32: what is wrong in fp8 alone is not seen.
            found.append(state.params["params"])
    return [ended(params, {}) for params in found]


class _Flax:
    """A step like those of ``made``: Flax's own state, gradients averaged over micro-batches."""

    def __init__(self, loss: Any, steps: int):
        self._tx = optax.chain(optax.clip_by_global_norm(1.0), adamw(steps))
        gradient = jax.grad(loss, has_aux=True)

        @jax.jit
        def call(state: Any, batch: PyTree) -> tuple[Any, Row]:
            parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
            grads = jax.lax.map(lambda part: gradient(state.params, part)[0], parts)
            state = state.apply_gradients(grads=jax.tree.map(lambda g: g.mean(0), grads))
            return state, {"step": state.step}

        self._call = call

    def __call__(self, state: Any, batch: PyTree) -> tuple[Any, Row]:
        """As a train step."""
        return self._call(state, batch)

    def init(self, variables: PyTree) -> Any:
        """From the variables."""
        return TrainState.create(apply_fn=None, params=variables, tx=self._tx)


def fp8(name: str) -> dict[str, Run]:
    asked = config_of(name)
    plain = without(asked, "carry")
    return {
        f"{name}.json": functools.partial(in_low, asked),
        "f32": run_of(plain),
        "bf16": run_of(plain | BF16),
        "fp8, Flax's `TrainState`, gradients averaged": functools.partial(in_low, None),
    }


def muon(steps: int) -> optax.GradientTransformation:
    """Hidden matrices by Muon, all else by the Adam that the others have."""
    return optax.contrib.muon(
        rate(steps, 0.02),
        adam_learning_rate=rate(steps),
        muon_weight_dimension_numbers=hidden,
    )


def muon_sharded(name: str) -> dict[str, Run]:
    asked, where = config_of(name), {"devices": RECIPES[name].devices}
    return {
        f"{name}.json": run_of(asked, optimizer=muon, shard_optimizer=True, **where),
        "Muon, whole state": run_of(asked, optimizer=muon, **where),
        "AdamW, whole state": run_of(asked, **where),
    }


def poisoned(config: Config, steps: int) -> list[Row]:
    """One batch in fifty of random characters, with a gradient a hundred times the usual."""

    def loss(params: PyTree, batch: PyTree) -> Any:
        mean, aux = loss_fn(params, batch)
        return mean + 99 * batch["spoilt"].mean() * (mean - jax.lax.stop_gradient(mean)), aux

    step = made(config, adamw(steps), 1, loss)
    found: list[Row] = []
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        bad = random.choice(np.arange(steps // 4, steps), max(1, steps // 50), replace=False)
        noise = random.integers(128, size=(steps, ROWS, 64), dtype=np.int32)

        def batch(index: int, seed: int = seed, bad: Any = bad, noise: Any = noise) -> PyTree:
            spoilt = index in bad
            drawn = {"inputs": noise[index], "targets": noise[index - 1]}
            given = drawn if spoilt else text_of(seed, ROWS).batch(index)
            return given | {"spoilt": np.full(ROWS, spoilt, np.float32)}

        state, metrics = called(step, step.init(init(seed)), map(batch, range(steps)))
        found.append(ended(state.params, metrics))
    return found


def spikes(name: str) -> dict[str, Run]:
    run = lambda config: functools.partial(poisoned, config)  # noqa: E731
    return {
        f"{name}.json": run(config_of(name)),
        "neither": run({}),
        "`optax.clip_by_global_norm(1)`": run({"clip": 1.0}),
    }


@functools.cache
def until_two_fail(name: str, steps: int) -> tuple[int, Any, list[Any]]:
    """The calls, the step and the states of four devices, up to the middle of a window."""
    config = config_of(name)
    calls = calls_of(config)
    cut, step = calls * steps // 2 + calls // 2, made(config, adamw(steps), 4)
    last = [
        called(step, step.init(init(seed)), map(text_of(seed, ROWS).batch, range(cut)))[0]
        for seed in SEEDS
    ]
    return cut, step, jax.device_get(last)


def moved(name: str, how: str, steps: int) -> list[Row]:
    """Four devices, of which two are left in the middle of a window in the middle of the run."""
    cut, before, states = until_two_fail(name, steps)
    end, after = calls_of(config_of(name)) * steps, made(config_of(name), adamw(steps), 2)
    found: list[Row] = []
    for seed, saved in zip(SEEDS, states, strict=True):
        step, batch = before, text_of(seed, ROWS).batch
        if how != "stay":
            step = after
            saved = boostax.reshard_state(saved, 2)
            if how == "alone":
                fresh, kept = step.init(saved.params).opt_state, saved.opt_state
                # The residual is the first of the chain in the window.
                inner = (fresh.inner_state[0], *kept.inner_state[1:])
                saved = saved._replace(opt_state=fresh._replace(inner_state=inner))
        state = jax.device_put(saved, step.shardings(saved))
        state, metrics = called(step, state, map(batch, range(cut, end)))
        found.append(ended(jax.device_get(step.common_params(state)), metrics))
    return found


def fewer_chips(name: str) -> dict[str, Run]:
    run = lambda how: functools.partial(moved, name, how)  # noqa: E731
    return {
        f"{name}.json, from 4 devices to 2": run("move"),
        "the same, 4 devices to the end": run("stay"),
        "from 4 to 2, params and moments alone": run("alone"),
    }


MEASURED: dict[str, Callable[[str], dict[str, Run]]] = {
    "many_micro_batches": many_micro_batches,
    "two_hosts": beside_f32,
    "frozen_prefix": frozen_prefix,
    "small_gpu_bf16": beside_f32,
    "fp8": fp8,
    "muon_sharded": muon_sharded,
    "spikes": spikes,
    "fewer_chips": fewer_chips,
    "one_gpu": beside_f32,
    "one_host": beside_f32,
}


def work(name: str, steps: int, out: pathlib.Path) -> None:
    """A recipe and its rivals, as one process of those that it has."""
    recipe = RECIPES[name]
    on_cpu(recipe.devices // recipe.processes)
    first = joined()
    found: dict[str, list[Row]] = {}
    for form, run in MEASURED[name](name).items():
        found[form] = run(steps)
        if first:
            print(name, form, [each["loss"] for each in found[form]], flush=True)
    if first:
        out.write_text(json.dumps(found))


FIGURES = ("accuracy", "working MB", "state MB", "KB sent a step", "skipped")


def rows_of(name: str, found: dict[str, list[Row]]) -> list[Row]:
    """A row for each form; the second is the plain one."""
    losses = {form: np.array([each["loss"] for each in runs]) for form, runs in found.items()}
    plain = [*losses.values()][1]

    def row(form: str, runs: list[Row]) -> Row:
        given = [key for key in FIGURES if runs[0].get(key) is not None]
        means = {key: statistics.mean(x[key] for x in runs) for key in given}
        return {
            "recipe": name,
            "form": form,
            **over_seeds(losses[form], "held-out loss"),
            **over_seeds(losses[form] - plain, "above plain", "its s.e."),
            **(dict.fromkeys(FIGURES) | means),
        }

    return [row(form, runs) for form, runs in found.items()]


def on_record() -> dict[str, list[Row]]:
    """The sections that were measured before."""
    return sections_of("recipes")


def merged(section: str, new: dict[str, list[Row]]) -> list[Row]:
    """The rows of a section, in the order of the recipes, with new ones in place of the old."""
    known = on_record().get(section, [])
    kept: dict[str, list[Row]] = {
        name: [row for row in known if row["recipe"] == name] for name in RECIPES
    }
    return [row for name in RECIPES for row in (kept | new)[name]]


def trained_table(rows: list[Row]) -> str:
    """How the runs ended."""
    said = {
        "form": "form",
        "held-out loss": "held-out loss ± s.e.",
        "above plain": "above the plain form ± s.e.",
        "accuracy": "accuracy",
        "skipped": "steps skipped",
    }
    errors = {"held-out loss": "s.e.", "above plain": "its s.e."}

    def cell(row: Row, column: str) -> str:
        value, error = row[column], row.get(errors.get(column, ""))
        if not isinstance(value, float):
            return value or ""
        if column == "above plain" and value == error == 0:
            return ""
        text = f"{value:.1f}" if column == "skipped" else f"{value:.3f}"
        # What rounds to zero from below reads as it does from above.
        text = text.replace("-", tables.MINUS if re.search("[1-9]", text) else "")
        return f"{text} ± {error:.3f}" if error is not None else text

    return _table(rows, said, cell)


def compiled_table(rows: list[Row], shows: tuple[str, ...]) -> str:
    """What the compiled steps do."""
    said = {
        "form": "form",
        "reduced": "reduced, of the params",
        "gathered": "gathered",
        "sent": "GB sent",
        "temporaries": "GB of temporaries",
        "params and state": "GB of params and state",
    }
    more = {
        "traffic": "GB of memory traffic",
        "fp8": "products in fp8",
    }
    said |= {column: more[column] for column in shows}

    def cell(row: Row, column: str) -> str:
        value = row[column]
        if value is None or isinstance(value, str):
            return value or ""
        unit = 1e9 if said[column].startswith("GB") else 1
        return str(value) if isinstance(value, int) and unit == 1 else f"{value / unit:.2f}"

    return _table(rows, said, cell)


def _table(rows: list[Row], said: dict[str, str], cell: Callable[[Row, str], str]) -> str:
    """The columns of which something is to be said."""
    shown = [x for x in said if any(row[x] not in (None, 0, 0.0) for row in rows)]
    return "\n".join(of_rows([{said[x]: cell(row, x) for x in shown} for row in rows], ()))


def page(sections: dict[str, list[Row]]) -> str:
    """The document: the prose of ``docs/recipes``, the configurations and the tables."""
    parts = [(FOLDER / "head.txt").read_text().rstrip()]
    for name, recipe in RECIPES.items():
        compiled, ended = (
            [row for row in sections.get(section, []) if row["recipe"] == name]
            for section in (AUDITED, TRAINED)
        )
        config = (FOLDER / f"{name}.json").read_text().rstrip()
        told = (FOLDER / f"{name}.txt").read_text().rstrip()
        told = told.replace(
            "{file}", f"[{name}.json](recipes/{name}.json):\n\n```json\n{config}\n```"
        )
        told = told.replace(
            "{compiled}", compiled_table(compiled, recipe.shows) if compiled else ""
        )
        told = told.replace("{trained}", trained_table(ended) if ended else "")
        parts += [f"## {recipe.pain}", told]
    return tables.rewritten("\n\n".join(parts) + "\n", PAGE)


# What a recipe claims of its loss, beside the plain form; the others claim nothing of it.
AS_GOOD = (
    "many_micro_batches", "two_hosts", "small_gpu_bf16", "fp8", "fewer_chips", "one_gpu", "one_host"
)  # fmt: skip
ONCE = ("many_micro_batches", "muon_sharded")


def bars(sections: dict[str, list[Row]]) -> list[Bar]:
    """The claims of the page."""
    found: list[Bar] = []
    for name in AS_GOOD:
        if losses := [
            row["held-out loss"] for row in sections.get(TRAINED, []) if row["recipe"] == name
        ]:
            found.append(Bar(f"{name}: held-out loss over plain", losses[0] / losses[1], 1.02))
    for row in sections.get(AUDITED, []):
        if row["form"] in {f"{name}.json" for name in ONCE}:
            claim = f"{row['recipe']}: reduced per step on {row['target']}, of the params"
            found.append(Bar(claim, row["reduced"], 1.01))
    return found


def write(section: str, new: dict[str, list[Row]]) -> None:
    """The record and the page, with new rows."""
    known = on_record() | {section: merged(section, new)}
    sections = {title: known[title] for title in (TRAINED, AUDITED) if title in known}
    report("recipes", "Recipes by pain", list(sections.items()), bars(sections))
    PAGE.write_text(page(sections_of("recipes")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="other than 200: prints only")
    parser.add_argument(
        "--only", nargs="*", choices=list(RECIPES), default=list(RECIPES), metavar="RECIPE",
        help=f"of {', '.join(RECIPES)}; the others' rows stay; none writes the page anew",
    )  # fmt: skip
    parser.add_argument("--audit", action="store_true", help="count the compiled steps instead")
    parser.add_argument("--work", help="a recipe to run as one process; for this script itself")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.steps, options.out)
        return
    if options.audit:
        on_cpu()
        for name in options.only:
            write(AUDITED, {name: audited(name)})
        return
    if not options.only:
        write(TRAINED, {})
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / f"{name}.json"
            asked = [sys.executable, __file__, f"--work={name}", f"--out={out}"]
            command = [*asked, f"--steps={options.steps}"]
            launched(command, RECIPES[name].processes)
            rows = rows_of(name, json.loads(out.read_text()))
        print(*of_rows(rows), sep="\n", flush=True)
        if options.steps == STEPS:
            write(TRAINED, {name: rows})


if __name__ == "__main__":
    main()
