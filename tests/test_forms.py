"""Every form of an optimizer step is the same step, and is counted, or refused in a sentence."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lanes import lanes
from restrictions import drawn, stepped

import boostax
from boostax.__main__ import main
from boostax.inspect.forms import programs

PARAMS, BATCH = {"layers": drawn((3, 64, 64), 0)}, drawn((32, 64), 1)
TX = optax.sgd(0.5, 0.9)
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


def step_of(place="FSDP", key=None):
    """A step of four micro-batches, its state and its batch."""
    sizes, axis, spec = PLACES[place]
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tx = optax.chain(boostax.all_reduce(), TX)
    how = {"mesh": mesh, "axis_name": axis, "param_specs": {"layers": spec}}
    step = boostax.make_train_step(loss_fn, tx, microbatches=4, layers="layers", **how)
    return step, step.init(PARAMS, key=key), BATCH


@pytest.mark.parametrize("place", lanes(PLACES, ["FSDP", "tensor parallel"]))
def test_each_form_is_the_step_of_one_device(place):
    """An Explicit mesh types no loop whose carry is sharded like its weights."""
    alone = boostax.make_train_step(loss_fn, TX)
    wanted = np.asarray(alone(alone.init(PARAMS), BATCH)[0].params["layers"])
    for name, build in programs(*step_of(place)).items():
        if (name, place) != ("reduced=", "tensor parallel"):
            off = np.abs(stepped(build(), PARAMS, BATCH)["layers"] - wanted).max()
            assert off < 2e-6 * np.abs(wanted).max(), name


def layered():
    return step_of()


def jitted():
    return jax.jit(loss_fn), *jax.tree.map(jnp.asarray, (PARAMS, BATCH))


def test_the_command_counts_the_forms_and_limits_the_step_itself(capsys):
    given = ["audit", "test_forms:layered", "--forms", "--json", "--max-reductions"]
    assert main([*given, "1.01"]) == 1
    told = json.loads(capsys.readouterr().out)
    counts = {name: round(x["reductions"], 2) for name, x in told["audits"].items()}
    often = {"boostax", "jit and lax.scan", "optax.MultiSteps", "optax.microbatch"}
    often |= {"layers, by layer"}
    assert counts == {name: 4 if name in often else 1 for name in counts}
    with_turns, plain = [*given, "4.01", "--turns", "2"], ["audit", "test_forms:jitted", "--forms"]
    for wrong, said in (with_turns, "'--turns'"), (plain, "got a jax.jit with 2"):
        assert main(wrong) == 1 and said in capsys.readouterr().err
    assert main([*given, "4.01"]) == 0 and not told["refused"]


def test_a_loss_of_more_than_rows_is_refused_for_the_forms_of_others():
    refused = boostax.inspect.forms(*step_of(key=jax.random.key(0))).refused
    assert sum("got an aux, a key" in reason for reason in refused.values()) == 5
    with pytest.raises(ValueError, match="microbatches"):  # The step itself must compile.
        boostax.inspect.forms(*step_of()[:2], BATCH[:3])
