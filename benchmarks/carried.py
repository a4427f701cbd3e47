"""fp8 metadata of Flax over micro-batches and replicas, beside those of one big batch.

Every form does one optimizer step from the same variables; its histories and scales are compared
with what ``jax.grad`` hands out for the whole batch. Then a step in which a cotangent overflows.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import fp8_ops
from flax.training.train_state import TrainState
from harness import Bar, report
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import boostax

PyTree = Any
Variables = PyTree
# One optimizer step from variables: those after it.
Form = Callable[[Variables, PyTree, int, int], Variables]

OWG = fp8_ops.OVERWRITE_WITH_GRADIENT
ROWS, FEATURES, HISTORY = 64, 32, 16
CASES = ((1, 1), (8, 1), (1, 4), (4, 4))
ADAM = optax.adamw(1e-2)


class Net(nn.Module):
    """Two products in fp8."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``[rows, features]`` to the same."""
        dot = functools.partial(fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=HISTORY)
        x = nn.relu(nn.Dense(FEATURES, dot_general_cls=dot)(x))
        return nn.Dense(FEATURES, dot_general_cls=dot)(x)


NET = Net()


def loss_fn(variables: Variables, batch: PyTree) -> jax.Array:
    return jnp.mean((NET.apply(variables, batch["x"]) - batch["y"]) ** 2)


def batches(count: int) -> list[PyTree]:
    rng = np.random.default_rng(0)
    sizes = np.geomspace(0.1, 10, ROWS)[:, None]

    def draw() -> np.ndarray[Any, Any]:
        return (rng.normal(size=(ROWS, FEATURES)) * rng.permutation(sizes)).astype(np.float32)

    return [{"x": draw(), "y": draw()} for _ in range(count)]


def whole(variables: Variables, batch: PyTree) -> Variables:
    """The metadata of one big batch."""
    return jax.jit(jax.grad(loss_fn))(variables, batch)[OWG]


def mesh_of(replicas: int) -> jax.sharding.Mesh:
    return jax.make_mesh((replicas,), ("data",), axis_types=(AxisType.Auto,))


def with_boostax(variables: Variables, batch: PyTree, micro: int, replicas: int) -> Variables:
    mesh = mesh_of(replicas)
    chain = optax.chain(boostax.all_reduce("data"), ADAM)
    scaled = boostax.dynamic_loss_scale(chain, init_scale=1.0, axis_name="data")
    tx = boostax.carry(scaled, axis_name="data")
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name="data", microbatches=micro)
    return step(step.init(variables), batch)[0].params


def mapped(update: Callable[..., Variables]) -> Form:
    """A peer's step, in ``shard_map``; ``update`` gets the replica's micro-batches."""

    def run(variables: Variables, batch: PyTree, micro: int, replicas: int) -> Variables:
        def local(variables: Variables, batch: PyTree) -> Variables:
            own = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), variables)
            parts = jax.tree.map(lambda x: x.reshape(micro, -1, *x.shape[1:]), batch)
            grads = lax.map(lambda part: jax.grad(loss_fn)(own, part), parts)
            return update(variables, lax.pmean(grads, "data"))

        specs: Any = {"in_specs": (P(), P("data")), "out_specs": P()}
        return jax.jit(jax.shard_map(local, mesh=mesh_of(replicas), **specs))(variables, batch)

    return run


def mean(grads: PyTree) -> PyTree:
    return jax.tree.map(lambda g: g.mean(0), grads)


def with_optax(variables: Variables, grads: PyTree) -> Variables:
    tx = optax.apply_if_finite(ADAM, 5)
    updates, _ = tx.update(mean(grads), tx.init(variables), variables)
    return optax.apply_updates(variables, updates)


def state_of(variables: Variables, tx: optax.GradientTransformation) -> TrainState:
    return TrainState.create(apply_fn=NET.apply, params=variables, tx=tx)


def with_flax(variables: Variables, grads: PyTree) -> Variables:
    state = state_of(variables, optax.apply_if_finite(ADAM, 5))
    return state.apply_gradients(grads=mean(grads)).params


def with_multi_steps(variables: Variables, grads: PyTree) -> Variables:
    """Flax's state around ``MultiSteps``: every micro-batch is a call."""
    micro = len(jax.tree.leaves(grads)[0])
    tx = optax.MultiSteps(optax.apply_if_finite(ADAM, 5), micro)
    state = state_of(variables, tx.gradient_transformation())
    for i in range(micro):
        state = state.apply_gradients(grads=jax.tree.map(lambda g: g[i], grads))  # noqa: B023
    return state.params


FORMS: dict[str, Form] = {
    "boostax.carry": with_boostax,
    "Flax TrainState": mapped(with_flax),
    "Flax TrainState, MultiSteps": mapped(with_multi_steps),
    "plain Optax": mapped(with_optax),
}


def difference(found: PyTree, wanted: PyTree) -> float:
    """The largest, relative to the largest of each leaf."""
    leaves = zip(*map(jax.tree.leaves, jax.device_get((found, wanted))), strict=True)
    return float(max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) for a, b in leaves))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    jax.config.update("jax_num_cpu_devices", max(n for _, n in CASES))
    *before, batch = batches(4)
    variables = NET.init(jax.random.key(0), batch["x"])
    for past in before:  # histories that are not all zero
        variables = {**variables, OWG: whole(variables, past)}
    wanted = whole(variables, batch)
    ruined = jax.tree.map(np.copy, batch)
    ruined["y"][0, 0] = np.inf

    rows: list[dict[str, Any]] = []
    skips: list[dict[str, Any]] = []
    for name, form in FORMS.items():
        of_cases = {
            f"{micro} x {n}": difference(form(variables, batch, micro, n)[OWG], wanted)
            for micro, n in CASES
        }
        rows.append({"form": name, **of_cases})
        after = jax.device_get(form(variables, ruined, 1, 1))
        skips.append(
            {
                "form": name,
                "params as before": _same(after["params"], variables["params"]),
                "metadata as before": _same(after[OWG], variables[OWG]),
                "metadata finite": all(np.isfinite(x).all() for x in jax.tree.leaves(after[OWG])),
            }
        )
    ours = [x for k, x in rows[0].items() if k != "form"]
    kept = skips[0]["params as before"] and skips[0]["metadata as before"]
    sections = [
        (
            "Largest relative difference from one big batch, micro-batches x replicas "
            "(peers: the mean of gradients over both, as jax.lax.scan and pmean give it)",
            rows,
        ),
        ("After a step that overflows", skips),
    ]
    bars = [
        Bar("boostax: difference from one big batch, the largest", max(ours), 0.0),
        Bar("boostax: an overflow moved something", float(not kept), 0.0),
    ]
    report("carried", "fp8 metadata over micro-batches and replicas", sections, bars)


def _same(left: PyTree, right: PyTree) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


if __name__ == "__main__":
    main()
