"""Every form of an optimizer step is the same step, and is counted, or refused in a sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from reducing import PLACEMENTS, loss_fn
from restrictions import stepped

import boostax
from boostax.inspect.forms import programs

COUNT = 4
PARAMS = [{"up": (64, 128), "down": (128, 64)}, {"up": (64, 256), "down": (256, 64)}]


def drawn(shapes, seed=0):
    draw = np.random.default_rng(seed).normal
    fill = lambda x: np.float32(draw(size=x)) / 8  # noqa: E731
    return jax.tree.map(fill, shapes, is_leaf=lambda x: isinstance(x, tuple))


def step_of(place, loss=loss_fn, wrap=lambda tx: tx, **options):
    """A step of four micro-batches, with a momentum, on 8 x 1 or 4 x 2 devices."""
    sizes = (8, 1) if place in ("replicated", "FSDP") else (4, 2)
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    axis = ("data", "model") if place == "HSDP" else "data"
    tx = wrap(
        optax.chain(boostax.all_reduce(), optax.clip_by_global_norm(0.5), optax.sgd(0.1, 0.9))
    )
    how = {"mesh": mesh, "axis_name": axis, "param_specs": [PLACEMENTS[place]] * len(PARAMS)}
    return boostax.make_train_step(loss, tx, microbatches=COUNT, **how, **options)


@pytest.mark.parametrize("place", PLACEMENTS)
def test_each_form_is_the_step_of_one_device_and_is_counted(place):
    """Whole params, shards over the batch's axes and over others; Explicit axes take no sums."""
    params, batch = drawn(PARAMS), drawn((8 * COUNT, 64), 1)
    alone = boostax.make_train_step(
        loss_fn, optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, 0.9))
    )
    wanted = jax.device_get(alone(alone.init(params), batch)[0].params)
    step, failed = step_of(place), {"reduced="} if "tensor" in place else set()
    given = step.init(params), batch
    for name, build in programs(step, *given).items():
        if name not in failed:
            found = stepped(build(), params, batch)
            off = jax.tree.map(lambda x, y: np.abs(x - y).max() / np.abs(y).max(), found, wanted)
            assert max(jax.tree.leaves(off)) < 2e-6, name
    found = boostax.inspect.forms(step, *given)
    assert set(found.refused) == failed
    for name, audit in found.audits.items():
        most = 1.01 if name in ("boostax", "reduced=", "shard_map by hand") else COUNT + 0.01
        assert most - 0.02 <= audit.reductions <= most
