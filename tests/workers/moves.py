"""A run that moves: FSDP on eight devices, ZeRO-1 on four, replicated on two.

Usage, one leg of it, which goes on from the last checkpoint of FOLDER until it is killed, or for so
many calls: ``moves.py FOLDER REDUCTION LEG [CALLS]``. The whole of it in one process without a
checkpoint, with moves after so many calls, and again with what a move could lose or count twice:
``moves.py FOLDER REDUCTION whole FIRST SECOND LAST``.
"""

import json
import pathlib
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import boostax

AXIS = "data"
ROWS, INPUTS, OUTPUTS = 48, 16, 8
WINDOW = 3


class Leg(NamedTuple):
    """A placement, and how many micro-batches of a window are in each of its checkpoints."""

    devices: int
    specs: dict[str, P]
    shard_optimizer: bool
    open: int


WHOLE = {"w": P(), "b": P()}
LEGS = [
    Leg(8, {"w": P(AXIS), "b": P(AXIS)}, False, 2),
    Leg(4, WHOLE, True, 1),
    Leg(2, WHOLE, False, 0),  # It saves nothing.
]
REDUCTIONS = {
    "mean": lambda: boostax.all_reduce(AXIS),
    "top-k": lambda: boostax.top_k_reduce(AXIS, 0.1),
    "int8": lambda: boostax.int8_reduce(AXIS),
    "signs": lambda: boostax.reduce.sign_reduce(AXIS),
    "rank 2": lambda: boostax.reduce.power_sgd_reduce(AXIS, 2),
}


class Ledger(NamedTuple):
    """The sum of all that came out of the reduction."""

    reduced: dict[str, jax.Array]


def ledger():
    def update(updates, state, params=None):
        return updates, Ledger(jax.tree.map(jnp.add, state.reduced, updates))

    init = lambda params: Ledger(jax.tree.map(jnp.zeros_like, params))  # noqa: E731
    return optax.GradientTransformation(init, update)


def initial():
    random = np.random.default_rng(0)
    return {
        "w": jnp.asarray(random.normal(size=(INPUTS, OUTPUTS)) / 4, jnp.float32),
        "b": jnp.zeros(OUTPUTS, jnp.float32),
    }


def batch(index):
    x = np.random.default_rng(index).normal(size=(ROWS, INPUTS)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, :OUTPUTS] - x[:, OUTPUTS:])}


def loss_fn(params, batch):
    found = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jnp.mean((found - batch["y"]) ** 2)


def made(leg, reduction):
    inner = optax.chain(REDUCTIONS[reduction](), ledger(), optax.adam(2e-2))
    tx = boostax.dynamic_loss_scale(
        boostax.accumulate(inner, WINDOW, axis_name=AXIS), axis_name=AXIS
    )
    mesh = jax.make_mesh(
        (leg.devices,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[: leg.devices]
    )
    return boostax.make_train_step(
        loss_fn,
        tx,
        mesh=mesh,
        axis_name=AXIS,
        param_specs=leg.specs,
        shard_optimizer=leg.shard_optimizer,
    )


def dump(path, state):
    """Every leaf under its path."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    arrays = {jax.tree_util.keystr(where): np.asarray(x) for where, x in leaves}
    np.savez(path, allow_pickle=False, **arrays)


def call(step, state, log, index):
    """One call and a line about it: with which params, and what the loss was."""
    line = {"call": index, **{k: np.asarray(x).tolist() for k, x in state.params.items()}}
    state, metrics = step(state, batch(index))
    log.write(json.dumps(line | {"loss": float(metrics["loss"])}) + "\n")
    log.flush()
    return state


def one_leg(folder, reduction, number, calls=None):
    """From the last checkpoint; every checkpoint is of an open window."""
    from boostax.checkpoint import Checkpointer

    leg = LEGS[number]
    jax.config.update("jax_num_cpu_devices", leg.devices)
    step = made(leg, reduction)
    state = step.init(initial())
    with Checkpointer(folder / "checkpoints", keep=10_000) as checkpointer:
        done = 0
        if number:
            state, _ = checkpointer.restore(state, reshard=True)
            assert jax.tree.map(lambda x: x.sharding, state) == step.shardings(state)
            done = int(state.step)
            dump(folder / f"resumed-{number}.npz", state)
        last = None if calls is None else done + calls
        with (folder / f"log-{number}.jsonl").open("w") as log:
            while done != last:
                state = call(step, state, log, done)
                done += 1
                if calls is None and done % WINDOW == leg.open:
                    dump(folder / f"saved-{done}.npz", state)
                    checkpointer.save(done, state)
    dump(folder / "final.npz", state)


def nodes(state, kind, change):
    """The state with all nodes of a class changed."""
    is_kind = lambda x: isinstance(x, kind)  # noqa: E731
    return jax.tree.map(lambda x: change(x) if is_kind(x) else x, state, is_leaf=is_kind)


def times(factor, field):
    """A field of a node, multiplied."""

    def change(node):
        value = getattr(node, field)
        return node._replace(**{field: jax.tree.map(lambda x: factor * x, value)})

    return change


SPOILT = {
    "nothing": lambda state: state,
    "residuals lost": lambda state: nodes(
        state, boostax.states.CompressedState, times(0.0, "residual")
    ),
    "residuals added up": lambda state: nodes(
        state, boostax.states.CompressedState, times(2.0, "residual")
    ),
    "windows lost": lambda state: nodes(
        state, boostax.states.AccumulateState, times(0.0, "window")
    ),
    "windows twice": lambda state: nodes(
        state, boostax.states.AccumulateState, times(2.0, "window")
    ),
}


def whole(folder, reduction, *moves):
    """All legs, moved by hand."""
    jax.config.update("jax_num_cpu_devices", LEGS[0].devices)
    steps = [made(leg, reduction) for leg in LEGS]
    for name, spoil in SPOILT.items():
        (folder / name).mkdir(parents=True)
        state, done = steps[0].init(initial()), 0
        with (folder / name / "log.jsonl").open("w") as log:
            for leg, step, end in zip(LEGS, steps, moves, strict=True):
                if done:
                    state = boostax.reshard_state(jax.tree.map(np.asarray, state), leg.devices)
                    state = jax.device_put(spoil(state), step.shardings(state))
                for index in range(done, end):
                    state = call(step, state, log, index)
                done = end
        dump(folder / name / "final.npz", state)


if __name__ == "__main__":
    where, reduction, which, *numbers = sys.argv[1:]
    if which == "whole":
        whole(pathlib.Path(where), reduction, *map(int, numbers))
    else:
        one_leg(pathlib.Path(where), reduction, int(which), *map(int, numbers))
