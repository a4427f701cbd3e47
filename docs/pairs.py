"""Write ``pairs.md``: which two names work in one step, on a plain model and on a scanned stack.

Each pair of names is put into one chain in the right order, and one step is traced on two emulated
devices. A cell is a dot if the step is traced without a word, or the mark of the sentence with
which boostax refuses the pair, or warns of it.

``python docs/pairs.py --write`` writes the page; ``tests/test_pairs.py`` traces drawn pairs again.
"""

import functools
import os
import pathlib
import re
import string
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import boostax
from boostax.order import findings
from boostax.train import Layers, scan_layers

PAGE = pathlib.Path(__file__).parent / "pairs.md"
MODELS = {
    "plain": None,
    "by layer": Layers("stack"),
    "release": Layers("stack", release=True),
}
MESH = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Explicit,))
STACK = {"w": jnp.full((4, 8, 8), 0.1), "v": jnp.full((4, 8, 8), 0.1)}
PLAIN = {"stack": [{name: x[i] for name, x in STACK.items()} for i in range(4)]}
GOAL = {"goal": jnp.zeros((8, 8))}


def block(x: Any, w: Any) -> tuple[Any, None]:
    """Return the activations after a layer."""
    return x + jnp.tanh(x @ w["w"]) @ w["v"], None


def loss(params: Any, x: Any) -> jax.Array:
    """Return the loss of a stack of layers, or of a list of layers."""
    stack = params["stack"]
    if isinstance(stack, dict):
        x, _ = scan_layers(block, x, stack)
    else:
        x = functools.reduce(lambda x, w: block(x, w)[0], stack, x)
    return jnp.mean((x - x @ params["goal"] - 1) ** 2)


def _basis(params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros((2, *x.shape)).at[0].set(0.1), params)


LOW = {"*mu*": "log8", "*nu*": "log8"}
# The wrappers, outermost first, then the optimizers of replicas.
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "average_params": lambda tx: boostax.model.average_params(tx),
    "scheduled_freeze": lambda tx: boostax.scheduled_freeze(
        tx, lambda path, x: int("goal" in str(path)), [0, 1]
    ),
    "check_replicas": boostax.precision.check_replicas,
    "dynamic_loss_scale": boostax.dynamic_loss_scale,
    "skip_bad_steps": boostax.skip_bad_steps,
    "accumulate": lambda tx: boostax.accumulate(tx, 2),
    "check_updates": boostax.precision.check_updates,
    "store": lambda tx: boostax.precision.store(tx, moments=LOW, least=1),
    "local_updates": lambda tx: boostax.reduce.local_updates(tx, 2),
    "adasum_delta": boostax.reduce.adasum_delta,
    "by_shape": boostax.by_shape,
}
REDUCTIONS: dict[str, Callable[[], Any]] = {
    "all_reduce bf16": lambda: boostax.all_reduce(wire_dtype="bfloat16"),
    "adasum": boostax.adasum,
    "int8_reduce": boostax.int8_reduce,
    "top_k_reduce": lambda: boostax.top_k_reduce(density=0.1),
}
LINKS: dict[str, Callable[[], Any]] = {
    "centralize_gradients": boostax.centralize_gradients,
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    "record_trajectory": lambda: boostax.subspace.record_trajectory(2),
    "dim_reduce": lambda: boostax.dim_reduce(_basis),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "microbatches=": {"microbatches": 2},
    "shard_optimizer=": {"shard_optimizer": True},
    "gather=": {},
    "policy=": {"policy": boostax.policy("O2", dtype="bfloat16")},
}
NAMES = [*WRAPPERS, *REDUCTIONS, *LINKS, *OPTIONS]
# Columns before the cells of a row.
WIDTH = 25
OWN = ("local_updates", "adasum_delta", "by_shape")


def built(pair: tuple[str, ...], model: str) -> tuple[Any, Any]:
    """Return a train step with the names of a pair, in the right order, and its params."""
    parts = [make() for name, make in (REDUCTIONS | LINKS).items() if name in pair]
    # Where no name reduces, gradients are averaged.
    if not {*pair} & {*OWN, *REDUCTIONS}:
        parts = [boostax.all_reduce(), *parts]
    optimizer = optax.contrib.muon(0.1) if "by_shape" in pair else optax.adam(0.1)
    tx = optax.chain(*parts, *([] if "dim_reduce" in pair else [optimizer]))
    for name in reversed(WRAPPERS):
        tx = WRAPPERS[name](tx) if name in pair else tx
    options: dict[str, Any] = {"mesh": MESH, "layers": MODELS[model]}
    for name in pair:
        options |= OPTIONS.get(name, {})
    params = (PLAIN if model == "plain" else {"stack": STACK}) | GOAL
    if "gather=" in pair:
        options["gather"] = "int8" if model == "plain" else "bfloat16"
        options["param_specs"] = jax.tree.map(
            lambda x: jax.P(*(None,) * (x.ndim - 1), "data"), params
        )
    return boostax.make_train_step(loss, tx, **options), params


def traced(pair: tuple[str, ...], model: str) -> tuple[bool, str]:
    """Trace a step; return whether the step is refused, and what boostax says."""
    findings._WARNED.clear()  # Equal warnings are given once.
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            step, params = built(pair, model)
            depth = {"depth": 0} if "scheduled_freeze" in pair else {}
            step.jaxpr(step.init(params), jnp.ones((8, 8)), **depth)
        except (ValueError, TypeError) as error:
            return True, str(error)
    return False, " ".join(dict.fromkeys(str(x.message) for x in caught))


@functools.cache
def outcome(pair: tuple[str, ...], model: str) -> tuple[bool, str]:
    """Return what ``traced`` returns, with X and Y in place of the names of the pair.

    A pair with a name that is refused alone is not traced, and X is this name.
    """
    alone = (outcome((name,), model) for name in pair if len(pair) > 1)
    if (refused := next((x for x in alone if x[0]), None)) is not None:
        return refused
    is_refused, text = traced(pair, model)
    for name, letter in zip(pair, "XY", strict=False):
        text = re.sub(rf"\b{name.split()[0].rstrip('=')}\b", letter, text)
    return is_refused, re.sub(r"\s+", " ", text)


class Page:
    """The page, and the sentences in it."""

    def __init__(self) -> None:
        self.sentences: dict[tuple[bool, str], str] = {}

    def cell(self, pair: tuple[str, ...], model: str) -> str:
        """Return a dot, the letter of a refusal or the number of a warning."""
        refused, text = outcome(pair, model)
        if not text:
            return "·"
        marks = string.ascii_letters if refused else string.digits[1:]
        mark = marks[sum(x[0] == refused for x in self.sentences)]
        return self.sentences.setdefault((refused, text), mark)

    def table(self, above: str, below: str | None) -> Iterator[str]:
        """Yield the rows of a matrix, with one model above and one below the diagonal."""
        numbers = [f"{i + 1:2}" for i in range(len(NAMES))]
        yield from ("```text", *(f"{'':{WIDTH}}{''.join(x)}" for x in zip(*numbers, strict=True)))
        for i, name in enumerate(NAMES):
            upper = (self.cell((name, x) if x != name else (name,), above) for x in NAMES[i:])
            lower = (self.cell((x, name), below) if below else " " for x in NAMES[:i])
            yield f"{numbers[i]} {name}".ljust(WIDTH) + "".join([*lower, *upper])
        yield "```"


HEAD = """\
# Which names work together

This page shows for each pair of names whether one train step can have both. `docs/pairs.py` builds
each pair in [the right order](contract.md#the-order), on two devices, and `tests/test_pairs.py`
builds drawn pairs again. A dot means that the step is traced without a word. A letter is a refusal
and a number is a warning, with its sentence below. X is the name with the smaller number, and Y the
other name. On the diagonal, a name is alone.

## A list of layers, and a stack

Above the diagonal and on the diagonal, the layers are a list. Below the diagonal, the layers are
stacked and scanned by [`scan_layers`](cards/layers.md), with `layers=Layers("stack")`. If a name is
refused alone on the stack or with release, all its pairs have this refusal.

"""
RELEASE = """\

## A stack with release

The stack has `layers=Layers("stack", release=True)`.

"""


def page() -> str:
    """Return the text of ``pairs.md``."""
    made = Page()
    text = HEAD + "\n".join(made.table("plain", "by layer")) + "\n"
    text += RELEASE + "\n".join(made.table("release", None)) + "\n"
    for title, refused in (("Refusals", True), ("Warnings", False)):
        listed = [f"- **{y}**: {x[1]}\n" for x, y in made.sentences.items() if x[0] == refused]
        text += f"\n## {title}\n\n{''.join(listed)}"
    return text


def shown(pair: tuple[str, ...], model: str) -> tuple[bool, str]:
    """Return what the page says of a pair, as ``outcome`` does."""
    text = PAGE.read_text()
    rows = [x[WIDTH:] for x in text.splitlines() if re.match(r" ?\d+ [a-z]", x)]
    i, j = sorted(NAMES.index(name) for name in (pair[0], pair[-1]))
    i, j = (j, i) if model == "by layer" else (i, j)
    mark = rows[i + len(NAMES) * (model == "release")][j]
    sentences = dict(re.findall(r"^- \*\*(\w)\*\*: (.*)$", text, re.M))
    return mark.isalpha(), sentences.get(mark, "")


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page())
