"""A hash of the StableHLO of each program in a list, to compare two checkouts.

    python tests/programs.py > hashes.txt
    python tests/programs.py | diff hashes.txt -

Locations, names of results and of functions are left out: a renaming changes no hash.
"""

import hashlib
import itertools
import re

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
from contract_cases import CASES  # noqa: E402

import boostax  # noqa: E402
from boostax.testing import _arrays as arrays  # noqa: E402
from boostax.testing import _case, _mapped  # noqa: E402

MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
SPLIT = jax.P("data")


def alone(case, _):
    """The update on one device, of a tree with all kinds of nodes."""
    tx, params = case.single(), arrays.example_params()
    step = _case.applied(tx)
    return jax.jit(step).lower(params, tx.init(params), arrays.example_grads(params, 0))


def mapped(case, _):
    """The update of eight replicas in ``shard_map``."""
    tx, grads = case.mapped("data"), _mapped.replica_grads(0, 8)
    specs = boostax.states.state_specs(tx, arrays.even_params(), axis_name="data")
    kept = SPLIT if case.own_params else jax.P()

    def local(params, state, grads):
        entered = boostax.states.enter_replica((params, state))
        step = _case.applied(tx)(*entered, jax.tree.map(lambda g: g[0], grads))
        return boostax.states.leave_replica(step)

    step = _mapped.over_devices(local, (kept, specs, SPLIT), (kept, specs))
    return jax.jit(step).lower(*_case.start(case, tx, 8), grads)


def placed(case, index):
    """The update of sharded arrays in plain ``jit``, in one of seven placements."""
    where = _mapped.placements(4, 2, jax.sharding.AxisType.Auto)[index % 7]
    params = where.place(arrays.even_params())
    options = {"axis_name": "data", "shard_optimizer": where.shard_optimizer}
    tx = boostax.on_mesh(case.mapped("data"), params, **options)
    replicas = where.mesh.shape["data"]
    state, grads = tx.init(params), where.stack(_mapped.replica_grads(0, replicas))
    if case.own_params:
        params = where.stack(arrays.stack([arrays.even_params()] * replicas))
    return jax.jit(_case.applied(tx)).lower(params, state, grads)


def trained(case, index):
    """A train step with whole or sharded params."""

    def loss(params, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["w"]) @ params["b"].reshape(4, 2)))

    where = _mapped.placements(8, 1, jax.sharding.AxisType.Auto)[2 * (index % 2)]
    options = {"mesh": where.mesh, "axis_name": "data"}
    step = boostax.make_train_step(loss, case.mapped("data"), **options)
    return step.lower(step.init(where.place(arrays.even_params())), jnp.ones((16, 16)))


def digest(text):
    """Of the functions numbered in their order, without names of results."""
    text = re.sub(r'jax\.\w+_info = "[^"]*"', "", text)
    names = {name: f"@{i}" for i, name in enumerate(dict.fromkeys(re.findall(r"@[\w.]+", text)))}
    text = re.sub(r"@[\w.]+", lambda name: names[name[0]], text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    forms = alone, mapped, placed, trained
    for number, (case, form) in enumerate(itertools.product(CASES, forms)):
        name = f"{case.name} {form.__name__}:"
        try:
            print(name, digest(form(case, number // 4).as_text()), flush=True)
        except (TypeError, ValueError) as error:
            print(name, "refused,", str(error).partition(":")[0], flush=True)
