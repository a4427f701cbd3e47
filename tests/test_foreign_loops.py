"""Techniques in the loops of other frameworks, and the lines that users forget there."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
import train_loops
from contract_cases import CASES
from flax import nnx
from lanes import lanes, spread
from train_loops import LOOPS, NAME, REDUCTION, SCALE, apart, put_into

import boostax

TECHNIQUES = {case.name: case for case in CASES}
TOLERANCE = 2e-6


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", lanes(TECHNIQUES, ["accumulate_inside_the_scaler"]))
def test_every_technique_trains_in_every_loop(loop, name):
    put = put_into(loop, TECHNIQUES[name])
    if TECHNIQUES[name].own_params and loop == "Flax NNX":
        with pytest.raises(ValueError, match="on_mesh: params"):
            LOOPS[loop](put)
        return
    assert apart(put, LOOPS[loop](put)) <= TOLERANCE


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loss_that_nobody_scaled_is_refused(loop):
    for name in ("dynamic_loss_scale", "group_loss_scale"):
        with pytest.raises(ValueError, match=r"boostax\.value_and_grad"):
            LOOPS[loop](put_into(loop, TECHNIQUES[name], forgotten=SCALE))


@pytest.mark.parametrize(("name", "loop"), spread(["dynamic_loss_scale", "accumulate"], LOOPS))
def test_gradients_that_nobody_reduced_are_refused(loop, name):
    with pytest.raises(ValueError, match=r"boostax\.all_reduce"):
        LOOPS[loop](put_into(loop, TECHNIQUES[name], forgotten=REDUCTION, replicated=True))


@pytest.mark.parametrize("loop", lanes(LOOPS, ["Flax linen, pmap", "Equinox"]))
def test_a_scaler_without_its_axis_has_that_of_on_mesh(loop):
    put = put_into(loop, TECHNIQUES["dynamic_loss_scale"], forgotten=NAME, replicated=True)
    if loop == "Flax linen, pmap":
        with pytest.raises(ValueError, match="dynamic_loss_scale: axis_name must be all axes"):
            LOOPS[loop](put)
    else:
        assert apart(put, LOOPS[loop](put)) <= TOLERANCE


@pytest.mark.parametrize("loop", LOOPS)
def test_a_window_left_open_says_so(loop):
    put = put_into(loop, TECHNIQUES["accumulate"], calls=3)
    assert int(LOOPS[loop](put).metrics["micro_step"]) == 1


def test_metrics_of_nnx_are_arrays():
    put = put_into("Flax NNX", TECHNIQUES["dynamic_loss_scale"])
    found = train_loops.nnx_optimizer(dataclasses.replace(put, calls=1)).metrics
    assert all(isinstance(x, jax.Array) and not isinstance(x, nnx.Variable) for x in found.values())


def test_a_window_in_an_nnx_optimizer_is_flushed():
    tx, model = boostax.accumulate(optax.sgd(1.0), 2), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    before = model.bias[...]
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jax.numpy.ones_like, nnx.state(model)))
    params, state = boostax.flush(tx, optimizer.opt_state, nnx.state(model))
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(state))
    np.testing.assert_array_equal(model.bias[...], before - 1)
    assert bool(boostax.train.has_updated(optimizer.opt_state))
