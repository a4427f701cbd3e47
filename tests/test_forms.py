"""Every form of an optimizer step is the same step, and is counted, or refused in a sentence."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from reducing import PLACEMENTS, loss_fn
from restrictions import drawn, stepped

import boostax
from boostax.__main__ import main
from boostax.inspect.forms import programs
from boostax.train import Layers

COUNT = 4
SHAPES = [{"up": (64, 128), "down": (128, 64)}, {"up": (64, 256), "down": (256, 64)}]
PARAMS, BATCH = drawn(SHAPES, 0), drawn((8 * COUNT, 64), 1)
ONCE = ("boostax", "reduced=", "shard_map by hand")


def optimizer():
    return optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(0.5, 0.9))


def step_of(place, loss=loss_fn, **options):
    """A step of four micro-batches on 8 x 1 or 4 x 2 devices."""
    sizes = (8, 1) if place in ("replicated", "FSDP") else (4, 2)
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    how = {"mesh": mesh, "axis_name": ("data", "model") if place == "HSDP" else "data"}
    tx = optax.chain(boostax.all_reduce(), optimizer())
    how["param_specs"] = [PLACEMENTS[place]] * len(SHAPES)
    return boostax.make_train_step(loss, tx, microbatches=COUNT, **how, **options)


@pytest.mark.parametrize("place", PLACEMENTS)
def test_each_form_is_the_step_of_one_device(place):
    alone = boostax.make_train_step(loss_fn, optimizer())
    wanted = jax.device_get(alone(alone.init(PARAMS), BATCH)[0].params)
    step = step_of(place)
    for name, build in programs(step, step.init(PARAMS), BATCH).items():
        if name == "reduced=" and "tensor" in place:
            with pytest.raises(Exception, match="ambiguous how the output should be sharded"):
                stepped(build(), PARAMS, BATCH)
            continue
        found = stepped(build(), PARAMS, BATCH)
        off = jax.tree.map(lambda x, y: np.abs(x - y).max() / np.abs(y).max(), found, wanted)
        assert max(jax.tree.leaves(off)) < 2e-6, name


def layered():
    """A stack of layers whose weights are gathered once, under FSDP."""
    layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
    loss = lambda p, x: boostax.train.scan_layers(layer, x, p["layers"])[0].mean()  # noqa: E731
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    how = {"param_specs": {"layers": P(None, None, "data")}, "layers": Layers(weights="once")}
    tx = optax.chain(boostax.all_reduce(), optax.adam(0.1))
    step = boostax.make_train_step(loss, tx, mesh=mesh, microbatches=COUNT, **how)
    return step, step.init({"layers": jnp.ones((3, 64, 64))}), BATCH


def keyed():
    step = step_of("replicated", lambda p, x, key: loss_fn(p, x))
    return step, step.init(PARAMS, key=jax.random.key(0)), BATCH


def test_the_command_counts_the_forms_and_limits_the_step_itself(capsys):
    """Forms of layers follow if the step has any; losses of more than rows are boostax's alone."""
    given = ["audit", "test_forms:layered", "--forms", "--max-reductions"]
    assert main([*given, "1.01"]) == 0 and main([*given, "0.5"]) == 1
    found = dict(re.findall(r"(?m)^(\S.*?)  +([\d.]+) .*MB", capsys.readouterr().out))
    once = {*ONCE, "boostax without layers", "layers, once", "layers, release"}
    wanted = dict.fromkeys(["jit and lax.scan", "optax.MultiSteps", "optax.microbatch"], "4.00")
    assert found == dict.fromkeys(once, "1.00") | wanted | {"layers, by layer": "4.00"}
    assert main(["audit", "test_forms:keyed", "--forms", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["audits"]) == ["boostax"] and len(told["refused"]) == 5
    assert all(
        "its loss of params and rows, got an aux, a key" in x for x in told["refused"].values()
    )
