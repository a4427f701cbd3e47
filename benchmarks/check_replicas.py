"""Flipped bits that ``check_replicas`` finds, and false alarms in clean runs, on emulated devices.

A bit of one copy of params or state is flipped between two steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Bar, arguments, on_cpu, report

import boostax
from boostax.precision import check_replicas

PyTree = Any
DEVICES, ROWS = 8, 32
PARAMS = {
    "w": np.ones((8, 8), "f4") / 3,
    "h": np.ones(8, jnp.bfloat16),
    "v": np.ones((8, 1), "f4") / 2,
}


def loss_fn(params: PyTree, batch: PyTree, key: Any = None) -> jax.Array:
    """A perceptron, with dropout if there is a key."""
    x, y = batch
    hidden = jnp.tanh(x @ params["w"] + params["h"].astype(jnp.float32))
    if key is not None:
        hidden *= jax.random.bernoulli(key, 0.9, hidden.shape)
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def batch_of(seed: int) -> tuple[Any, Any]:
    """Rows of normal numbers, eight inputs and a target."""
    x = np.random.default_rng(seed).normal(size=(ROWS, 9)).astype(np.float32)
    return x[:, :8], x[:, 8:]


def flipped(x: jax.Array, device: int, word: int, bit: int) -> jax.Array:
    """The array, with one bit flipped in the copy of one device."""
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            flat = data.reshape(-1).view(f"uint{8 * data.itemsize}")
            flat[word % flat.size] ^= flat.dtype.type(1 << bit % (8 * data.itemsize))
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def flipped_somewhere(tree: PyTree, rng: np.random.Generator) -> tuple[PyTree, int]:
    """The tree with a bit flipped in the copy of one device, and that device."""
    leaves, structure = jax.tree.flatten(tree)
    place, device = rng.integers(len(leaves)), int(rng.integers(DEVICES))
    bit = int(rng.integers(32)) if leaves[place].dtype != bool else 0
    leaves[place] = flipped(leaves[place], device, int(rng.integers(64)), bit)
    return structure.unflatten(leaves), device


def optimizer(reduction: Any = boostax.all_reduce, **options: Any) -> Any:
    """Adam around a reduction, with a loss scale and the check around them."""
    inner = optax.chain(reduction(), optax.adam(1e-2))
    return check_replicas(boostax.dynamic_loss_scale(inner), **options)


def flips(mesh: Any, count: int) -> list[dict[str, Any]]:
    """Of flips in params and in state, how many were held before the step, by the right name."""
    step = boostax.make_train_step(loss_fn, optimizer(), mesh=mesh)
    kept = jax.tree.map(np.asarray, step(step.init(PARAMS), batch_of(0))[0])
    where, rng, rows = step.shardings(kept), np.random.default_rng(0), []
    for part in ("params", "opt_state"):
        held = named = 0
        for _ in range(count // 2):
            state = jax.device_put(kept, where)
            tree, device = flipped_somewhere(getattr(state, part), rng)
            _, metrics = step(state._replace(**{part: tree}), batch_of(1))
            held += not metrics["applied"]
            named += int(metrics["differing_replica"]) == device
        rows.append({"flips of": part, "flips": count // 2, "found": held, "named": named})
    return rows


FSDP = {"param_specs": jax.tree.map(lambda _: jax.P("data"), PARAMS)}
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mean": (boostax.all_reduce, {}),
    "AdaSum": (boostax.adasum, {}),
    "int8": (boostax.int8_reduce, {}),
    "mean, FSDP": (boostax.all_reduce, FSDP),
}


def clean(mesh: Any, calls: int) -> list[dict[str, Any]]:
    """Of runs with dropout and windows, in which nothing is flipped, the calls that were held."""
    rows = []
    for name, (reduction, how) in RUNS.items():
        inner = boostax.accumulate(optax.chain(reduction(), optax.adam(1e-2)), 2)
        tx = check_replicas(boostax.dynamic_loss_scale(inner))
        step = boostax.make_train_step(loss_fn, tx, mesh=mesh, microbatches=2, **how)
        state = step.init(PARAMS, key=jax.random.key(0))
        for call in range(calls // len(RUNS)):
            # Calls in flight would wait for threads that wait for the collectives of others.
            state = jax.block_until_ready(step(state, batch_of(call))[0])
        own = state.opt_state
        assert int(own.compared) == DEVICES
        print(f"{name}: {int(own.skipped)} of {int(own.calls)} calls held", flush=True)
        rows.append({"run": name, "calls": int(own.calls), "held": int(own.skipped)})
    return rows


def main() -> None:
    """Run all and write the record."""
    options = arguments(__doc__, flips=900, calls=10_000)
    on_cpu(DEVICES)
    mesh = jax.make_mesh((DEVICES,), ("data",), (jax.sharding.AxisType.Auto,))
    found = flips(mesh, options.flips)
    runs = clean(mesh, options.calls)
    share = lambda row: 1 - row["found"] / row["flips"]  # noqa: E731
    bars = [Bar(f"share not found, {row['flips of']}", share(row), 0.001) for row in found]
    bars += [Bar("calls held in clean runs", sum(row["held"] for row in runs), 0)]
    title = "Replicas whose bits differ"
    report("check_replicas", title, [("Flipped bits", found), ("Clean runs", runs)], bars)


if __name__ == "__main__":
    main()
