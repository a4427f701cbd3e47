"""JAX's plain step, written by hand with Optax, and boostax on the common work, on one core.

Usage: boostax_worker.py WORK [--replicas]. With ``--replicas`` it is one process of those that
JAX's variables name, with one device each, over gloo.
"""

import os
import sys

import lenet

lenet.pin(int(os.environ.get("JAX_PROCESS_ID", "0")))
os.environ.update(lenet.ONE_THREAD)

import functools  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax_lenet import loss_fn, to_batches, to_params  # noqa: E402

import boostax  # noqa: E402
from boostax._core import costs  # noqa: E402
from boostax.inspect.costs import Place, traced  # noqa: E402

AXIS = "data"


def sgd():
    return optax.sgd(lenet.RATE, lenet.MOMENTUM)


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def cycle(rows, rank=0, replicas=1):
    """The batches of a process, in its device's memory."""
    # Not committed to it: what a committed batch returns would compile a step a second time.
    return [jax.device_put(row) for row in rows[rank::replicas]]


def plain(rows):
    """What one writes with JAX and Optax alone."""
    tx = sgd()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def make():
        params = to_params(lenet.weights())
        carry, place = [params, tx.init(params)], 0

        def run(calls):
            nonlocal place
            for _ in range(calls):
                *carry[:], loss = step(*carry, rows[place % len(rows)])
                place += 1
            jax.block_until_ready(carry)
            return float(loss)

        return lenet.Form(run, lambda: nbytes(carry[1]))

    return make


def boosted(rows, tx, params=None, wire=None, **where):
    """Through ``make_train_step``."""
    step = boostax.make_train_step(loss_fn, tx, **where)
    params = to_params(lenet.weights()) if params is None else params

    def make():
        carry, place = [step.init(params)], 0

        def run(calls):
            nonlocal place
            for _ in range(calls):
                carry[0], told = step(carry[0], rows[place % len(rows)])
                place += 1
            jax.block_until_ready(carry[0])
            return float(told["loss"])

        return lenet.Form(run, lambda: nbytes(carry[0].opt_state), wire or (lambda: None))

    return make


def alone(work):
    """The forms of one process."""
    rows = cycle(to_batches(work))
    groups = {name: index for index, name in enumerate(lenet.LAYERS)}
    frozen = functools.partial(boostax.scheduled_freeze, sgd(), groups)
    trees = [to_params(lenet.unflat(row)) for row in work.basis]
    basis = jax.tree.map(lambda *parts: jnp.stack(parts), *trees)
    residual = optax.sgd(lenet.RESIDUAL_RATE, lenet.RESIDUAL_MOMENTUM)
    finish = to_params(lenet.unflat(work.finish))
    scaler = boostax.dynamic_loss_scale(
        sgd(), init_scale=lenet.INIT_SCALE, growth_interval=lenet.GROWTH_INTERVAL
    )
    mindspore = boostax.dim_reduce(basis, residual=residual, rule="mindspore")
    return {
        "plain": plain(rows),
        "make_train_step alone": boosted(rows, sgd()),
        "loss scale": boosted(rows, scaler),
        "accumulation": boosted(rows, boostax.accumulate(sgd(), lenet.WINDOW)),
        "freezing, 4 of 5": boosted(rows, frozen(4)),
        "freezing, schedule": boosted(rows, frozen(work.depths.tolist(), repeat=True)),
        "DimReduce": boosted(rows, mindspore, finish),
        "DimReduce, own rule": boosted(rows, boostax.dim_reduce(basis, residual=residual), finish),
    }


def together(work):
    """The forms of several processes."""
    rank, replicas = jax.process_index(), jax.process_count()
    rows = to_batches(work)
    mesh = jax.make_mesh((replicas,), (AXIS,), (jax.sharding.AxisType.Auto,))
    own = [
        jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(
                jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS)), np.asarray(x)
            ),
            row,
        )
        for row in rows[rank::replicas]
    ]

    def reduced(tx):
        def wire():
            place = Place((AXIS,), {AXIS: replicas})
            program = traced(tx, to_params(lenet.weights()), place)
            return costs.expected(costs.collectives(program))

        return boosted(own, tx, wire=wire, mesh=mesh, axis_name=AXIS)

    before = lambda reduction: reduced(optax.chain(reduction, sgd()))  # noqa: E731
    return {
        "plain": plain(cycle(rows, rank, replicas)),
        "mean": before(boostax.all_reduce(AXIS, bucket_bytes=lenet.BUCKET)),
        "float16": before(boostax.all_reduce(AXIS, dtype="float16")),
        "PowerSGD": before(boostax.reduce.power_sgd_reduce(AXIS, lenet.RANK)),
        "AdaSum": reduced(boostax.reduce.adasum_delta(sgd(), AXIS)),
    }


if __name__ == "__main__":
    given = lenet.load(sys.argv[1])
    about = f"boostax {boostax.__version__} on JAX {jax.__version__}"
    if "--replicas" in sys.argv:
        names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        address, count, index = map(os.environ.get, names)
        jax.distributed.initialize(address, int(count), int(index))
        lenet.serve(together(given), about)
    else:
        lenet.serve(alone(given), about)
