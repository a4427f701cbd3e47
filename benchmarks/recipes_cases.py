"""The recipes of ``docs/recipes``: of each the pain, and its step and its rivals by shapes alone.

Shared by ``benchmarks/recipes.py``, which measures them and writes the page, and the tests.
"""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import compilers_cases as cases
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from compilers_cases import Model, accumulated, decoder, mesh_of
from harness import DOCS

import boostax
from boostax.inspect.audit import Audit
from workloads._models import CharacterTransformer

Config = dict[str, Any]
FOLDER = DOCS / "recipes"
V5E, HALF, H100, HOST, HOSTS = "v5e:2x4", "v5e:2x2", "h100:1x1x1", "h100:1x1x8", "h100:1x2x8"
PLAIN = "f32 and a plain mean"
BF16: Config = {"policy": {"spec": "O1", "dtype": "bfloat16"}}
BF16_WIRE: Config = {"reduce": {"kind": "mean", "wire": "bfloat16"}}


def config_of(name: str) -> dict[str, Any]:
    """What the file of a recipe says."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def without(config: Config, *keys: str) -> Config:
    """What else a configuration says."""
    return {key: x for key, x in config.items() if key not in keys}


# 67 M params; scanned as large models are written, or layer by layer.
SIZES = 4, 1024, 8192, 8, 256
scanned_decoder = functools.partial(decoder, *SIZES)
plain_decoder = functools.partial(decoder, *SIZES, stacked=False)


def in_fp8(apply: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """For ``flax.linen.intercept_methods``: every dense layer of a model in fp8."""
    if type(context.module) is nn.Dense:
        object.__setattr__(context.module, "dot_general_cls", nn.Fp8DirectDotGeneralOp)
    return apply(*args, **kwargs)


def transformer(dtype: str = "bfloat16", fp8: bool = False) -> Model:
    """The model of the text workload, which the recipes are measured on, with 57 M params."""
    net = CharacterTransformer(128, 256, 1536, 2, 12, 0.0, jnp.dtype(dtype))
    tokens = lambda rows: jax.ShapeDtypeStruct((rows, 256), jnp.int32)  # noqa: E731

    def with_fp8() -> Any:
        return nn.intercept_methods(in_fp8) if fp8 else contextlib.nullcontext()

    def loss(params: Any, batch: Any) -> jax.Array:
        with with_fp8():
            logits = net.apply(params if fp8 else {"params": params}, batch["inputs"])
        targets = batch["targets"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    with with_fp8():
        variables = jax.eval_shape(net.init, jax.random.key(0), tokens(1))
    params = variables if fp8 else variables["params"]
    return Model(params, loss, lambda rows: {"inputs": tokens(rows), "targets": tokens(rows)})


def stepped(
    config: Config,
    target: str,
    model: Model,
    optimizer: optax.GradientTransformation | None = None,
    rows: int = 8,
    **options: Any,
) -> Audit:
    """The audit of a configuration's step, of so many rows a device and micro-batch."""
    boost = boostax.auto(config)
    mesh = mesh_of(target)
    if mesh.size > 1:
        options |= {"mesh": mesh, "axis_name": cases.AXIS}
    inner = optax.adamw(1e-3) if optimizer is None else optimizer
    step = boost.make_train_step(model.loss, inner, model.params, **options)
    batch = model.batch(rows * mesh.size * boost.config.microbatches)
    window, freeze = boost.config.accumulate, boost.config.freeze
    calls = 1 if window is None else window.every
    # Of shapes alone no step knows how far its schedule is.
    depth = None if freeze is None else freeze.kind[0]
    state = step.init(model.params)
    return boostax.audit(step, state, batch, target=target, calls=calls, depth=depth)


Forms = dict[str, Callable[[], Audit]]


def _many_micro_batches(config: Config) -> Forms:
    many = config["microbatches"]
    scan = functools.partial(accumulated, target=V5E, window=many, rows=1)
    return {
        "recipe": lambda: stepped(config, V5E, scanned_decoder(), rows=1),
        "jit and `lax.scan`": lambda: scan("scan", model=scanned_decoder()),
        "the same, layers not scanned": lambda: scan("scan", model=plain_decoder()),
        "`optax.MultiSteps`": lambda: scan("MultiSteps", model=scanned_decoder()),
        "one micro-batch": lambda: stepped(
            without(config, "microbatches"), V5E, scanned_decoder(), rows=many
        ),
    }


def _two_hosts(config: Config) -> Forms:
    step = functools.partial(stepped, target=HOSTS, model=scanned_decoder())
    plain = without(config, "reduce")
    return {
        "recipe": lambda: step(config),
        "a plain mean": lambda: step(plain),
        "a mean in bf16": lambda: step(plain | BF16_WIRE),
    }


def _frozen_prefix(config: Config) -> Forms:
    step = functools.partial(stepped, target=H100, model=transformer())
    whole = without(config, "freeze")

    def masked() -> Audit:
        early = config["freeze"]["groups"][0]
        rests = lambda path, _: path[0].key in early  # noqa: E731
        mask = lambda tree: jax.tree_util.tree_map_with_path(rests, tree)  # noqa: E731
        last = optax.masked(optax.set_to_zero(), mask)
        return step(whole, optimizer=optax.chain(optax.adamw(1e-3), last))

    return {
        "recipe": lambda: step(config),
        "all is trained": lambda: step(whole),
        "`optax.masked(set_to_zero)`": masked,
    }


def _small_gpu_bf16(config: Config) -> Forms:
    step = functools.partial(stepped, target=H100, model=scanned_decoder())
    f32 = {key: config[key] for key in ("microbatches", "clip")} | {"accumulate": 4}
    low = f32 | {"policy": config["policy"]}
    return {
        "recipe": lambda: step(config),
        "f32": lambda: step(f32),
        "bf16 params, rounded to the nearest": lambda: step(low),
    }


def _fp8(config: Config) -> Forms:
    step = functools.partial(stepped, target=H100, rows=2)
    plain = without(config, "carry")
    return {
        "recipe": lambda: step(config, model=transformer(fp8=True)),
        "f32": lambda: step(plain, model=transformer("float32")),
        "bf16": lambda: step(plain | BF16, model=transformer()),
    }


def hidden(params: Any) -> Any:
    """What Muon is for, the matrices of the layers, scanned or not; all else is Adam's."""
    alone, stack = (optax.contrib.MuonDimensionNumbers(*dims) for dims in ((0, 1), (1, 2)))

    def of(path: Any, x: Any) -> Any:
        if path[0].key == "layers" and x.ndim == 3:
            return stack
        return alone if path[0].key != "layers" and "block" in path[0].key and x.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(of, params)


def muon() -> optax.GradientTransformation:
    return optax.contrib.muon(0.02, muon_weight_dimension_numbers=hidden)


def _muon_sharded(config: Config, model: Model | None = None) -> Forms:
    # As many layers as chips: each chip has the whole matrices of one.
    deep = decoder(8, *SIZES[1:]) if model is None else model
    step = functools.partial(stepped, config, V5E, rows=2)
    return {
        "recipe": lambda: step(deep, muon(), shard_optimizer=True),
        "Muon, whole state": lambda: step(deep, muon()),
        "AdamW, sharded state": lambda: step(deep, shard_optimizer=True),
        "Muon, sharded state, layers not scanned": lambda: step(
            transformer(), muon(), shard_optimizer=True
        ),
    }


def _spikes(config: Config) -> Forms:
    step = functools.partial(stepped, target=V5E, model=scanned_decoder())
    return {
        "recipe": lambda: step(config),
        "neither": lambda: step({}),
        "`optax.clip_by_global_norm(1)`": lambda: step({"clip": 1.0}),
    }


def _fewer_chips(config: Config) -> Forms:
    step = functools.partial(stepped, config, model=scanned_decoder())
    return {
        "recipe": lambda: step(HALF),
        "8 chips": lambda: step(V5E),
        "4 chips, a plain mean": lambda: stepped(
            without(config, "reduce"), HALF, scanned_decoder()
        ),
    }


def _one_gpu(config: Config) -> Forms:
    step = functools.partial(stepped, target=H100, model=scanned_decoder())
    return {"recipe": lambda: step(config), "f32, the batch whole": lambda: step({}, rows=64)}


def _one_host(config: Config) -> Forms:
    step = functools.partial(stepped, target=HOST, model=scanned_decoder())
    return {
        "recipe": lambda: step(config),
        "a plain mean": lambda: step(without(config, "reduce")),
    }


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A file of ``docs/recipes``.

    Attributes:
      pain: the title.
      forms: the step and its rivals, from what the file says; the recipe is the first.
      devices: where it is measured, of all processes.
      processes: as many as hosts.
      shows: what else of the audit is of interest.
    """

    pain: str
    forms: Callable[[Config], Forms]
    devices: int = 1
    processes: int = 1
    shows: tuple[str, ...] = ()


RECIPES = {
    "many_micro_batches": Recipe(
        "The network waits 32 times a step", _many_micro_batches, devices=2
    ),
    "two_hosts": Recipe(
        "Two hosts share a slow network",
        _two_hosts,
        devices=8,
        processes=2,
    ),
    "frozen_prefix": Recipe(
        "Fine-tuning pays for layers that stay as they are", _frozen_prefix, shows=("traffic",)
    ),
    "small_gpu_bf16": Recipe("Params and state do not fit a small GPU", _small_gpu_bf16),
    "fp8": Recipe("fp8 loses its scales among micro-batches", _fp8, shows=("fp8",)),
    "muon_sharded": Recipe("Muon keeps all of its state on every chip", _muon_sharded, devices=2),
    "spikes": Recipe("A bad batch ruins hours of training", _spikes),
    "fewer_chips": Recipe("Half of the chips fail", _fewer_chips, devices=4),
    "one_gpu": Recipe("Activations do not fit a GPU that is fast in f16 alone", _one_gpu),
    "one_host": Recipe("Gradients take half of the links within a host", _one_host, devices=8),
}


def audited(name: str) -> list[dict[str, Any]]:
    """A row for the step of a recipe and for each of its rivals."""
    rows: list[dict[str, Any]] = []
    for form, make in RECIPES[name].forms(config_of(name)).items():
        found = make()
        rows.append(
            {
                "recipe": name,
                "form": f"{name}.json" if form == "recipe" else form,
                "target": found.target,
                "reduced": found.reductions,
                "gathered": found.gathers,
                "sent": found.per_step(found.wire_bytes),
                "temporaries": found.temporary_bytes,
                "params and state": found.argument_bytes,
                "traffic": found.per_step(found.traffic),
                # Kernels of products that read fp8.
                "fp8": len(re.findall(r"^%\S*dot\S* \(.*f8e", found.text, re.M)),
            }
        )
        print(rows[-1], flush=True)
    return rows
