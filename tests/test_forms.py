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
from restrictions import drawn, stepped

import boostax
from boostax.__main__ import main
from boostax.inspect.forms import programs
from boostax.train import Layers

COUNT = 4
PARAMS, BATCH = {"layers": drawn((3, 64, 64), 0)}, drawn((8 * COUNT, 64), 1)
MANY = dict.fromkeys(["jit and lax.scan", "optax.MultiSteps", "optax.microbatch"], "4.00")
# The sizes of the mesh, the axes of the batch, and the spec of the stack.
PLACES = {
    "whole": ((8, 1), "data", P()),
    "FSDP": ((8, 1), "data", P(None, None, "data")),
    "HSDP": ((2, 4), ("data", "model"), P(None, "model")),
    "tensor parallel": ((4, 2), "data", P(None, None, "model")),
}


def loss_fn(params, x, key=None):
    layer = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
    return jnp.mean(boostax.train.scan_layers(layer, x, params["layers"])[0] ** 2)


def step_of(place="FSDP"):
    sizes, axis, spec = PLACES[place]
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    how = {"mesh": mesh, "axis_name": axis, "param_specs": {"layers": spec}}
    tx, how["layers"] = (
        optax.chain(boostax.all_reduce(), optax.sgd(0.5, 0.9)),
        Layers(weights="once"),
    )
    return boostax.make_train_step(loss_fn, tx, microbatches=COUNT, **how)


@pytest.mark.parametrize("place", PLACES)
def test_each_form_is_the_step_of_one_device(place):
    alone, failed = boostax.make_train_step(loss_fn, optax.sgd(0.5, 0.9)), set()
    wanted = np.asarray(alone(alone.init(PARAMS), BATCH)[0].params["layers"])
    for name, build in programs(step := step_of(place), step.init(PARAMS), BATCH).items():
        try:
            found = stepped(build(), PARAMS, BATCH)["layers"]
        except Exception:
            failed.add(name)
            continue
        assert np.abs(found - wanted).max() < 2e-6 * np.abs(wanted).max(), name
    assert failed == {"layers, release, host"} | (
        {"reduced="} if place == "tensor parallel" else set()
    )


def layered():
    return (step := step_of()), step.init(PARAMS), BATCH


def keyed():
    return (step := step_of()), step.init(PARAMS, key=jax.random.key(0)), BATCH


def test_the_command_counts_the_forms_and_limits_the_step_itself(capsys):
    """A loss of more than params and rows is boostax's alone."""
    given = ["audit", "test_forms:layered", "--forms", "--max-reductions"]
    assert main([*given, "1.01"]) == 0 and main([*given, "0.5"]) == 1
    found = dict(re.findall(r"(?m)^(\S.*?)  +([\d.]+) .*MB", capsys.readouterr().out))
    once = ("boostax", "reduced=", "shard_map by hand", "boostax without layers", "layers, once")
    many = MANY | {"layers, by layer": "4.00"}
    assert found == dict.fromkeys((*once, "layers, release"), "1.00") | many
    assert main(["audit", "test_forms:keyed", "--forms", "--json"]) == 0
    reasons = json.loads(capsys.readouterr().out)["refused"].values()
    assert sum("got an aux, a key" in reason for reason in reasons) == 5
