"""What AdaSum costs on the wire and in time, beside a mean and the other ways to compute it."""

import functools
import operator
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from harness import Bar, Form, arguments, paired, ratio, report
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
from boostax._core import axes
from boostax.reduce.exchange import BLOCK
from boostax.reduce.pairwise import Bucket, Rows, combine_replicas

DEVICES = 8
AXIS = "data"
Leaves = list[jax.Array]


def adasum(leaves: Leaves, **options: Any) -> Any:
    tx = boostax.adasum(AXIS, **options)
    return tx.update(leaves, tx.init(leaves))[0]


def pmean(leaves: Leaves) -> Leaves:
    return [lax.pmean(x, AXIS) for x in leaves]


def exchange_alone(leaves: Leaves) -> Leaves:
    """What AdaSum sends, all at once, with the rows no more than added up: a sum."""
    rows = jnp.concatenate([x.reshape(DEVICES, -1) for x in leaves], 1)
    rows = lax.all_to_all(rows, AXIS, 0, 0)
    whole = lax.all_gather(functools.reduce(operator.add, rows), AXIS)
    return [x.reshape(-1) for x in _split(whole, [x.size // DEVICES for x in leaves])]


def gather_and_reduce(leaves: Leaves) -> Leaves:
    """Every device receives everything and does all the work."""
    result: Leaves = []
    for x in leaves:
        rows = axes.gather(x, (AXIS,))
        units = jnp.clip(jnp.frexp(jnp.abs(rows).max(1))[1], -100, 126)[:, None]
        whole = Bucket(list(rows), np.zeros(x.size // BLOCK, int))
        result += combine_replicas(Rows([whole], units), lambda dots: dots)[0]
    return result


def recursive_doubling(leaves: Leaves) -> Leaves:
    """Partners at distance 1, 2, 4 exchange all they have, in one message."""
    widths = [x.size for x in leaves]
    flat = jnp.concatenate(leaves)
    for distance in _distances():
        other = lax.ppermute(flat, AXIS, [(i, i ^ distance) for i in range(DEVICES)])
        first = (lax.axis_index(AXIS) & distance) == 0
        left, right = jnp.where(first, flat, other), jnp.where(first, other, flat)
        flat = _pair(left, right, widths, lambda dots: dots)
    return _split(flat, widths)


def recursive_halving(leaves: Leaves) -> Leaves:
    """Partners exchange half of what they have left; Horovod's way."""
    widths = [x.size // DEVICES for x in leaves]
    held = jnp.concatenate([x.reshape(DEVICES, -1) for x in leaves], 1)
    for level, distance in enumerate(_distances()):
        first = (lax.axis_index(AXIS) & distance) == 0
        low, high = held[: len(held) // 2], held[len(held) // 2 :]
        permutation = [(i, i ^ distance) for i in range(DEVICES)]
        other = lax.ppermute(jnp.where(first, high, low), AXIS, permutation)
        own = jnp.where(first, low, high)
        left, right = jnp.where(first, own, other), jnp.where(first, other, own)

        def total(dots: jax.Array, level: int = level) -> jax.Array:
            for distance in _distances()[: level + 1]:
                swapped = [(i, i ^ distance) for i in range(DEVICES)]
                dots = dots + lax.ppermute(dots, AXIS, swapped)
            return dots

        held = _pair(left, right, widths, total)
    for distance in reversed(_distances()):
        first = (lax.axis_index(AXIS) & distance) == 0
        other = lax.ppermute(held, AXIS, [(i, i ^ distance) for i in range(DEVICES)])
        held = jnp.concatenate([jnp.where(first, held, other), jnp.where(first, other, held)])
    return [x.reshape(-1) for x in _split(held, widths)]


def _distances() -> list[int]:
    return [2**level for level in range(DEVICES.bit_length() - 1)]


def _split(x: jax.Array, widths: list[int]) -> Leaves:
    return jnp.split(x, np.cumsum(widths)[:-1].tolist(), axis=-1)


def _pair(
    left: jax.Array, right: jax.Array, widths: list[int], total: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    pairs = list(zip(_split(left, widths), _split(right, widths), strict=True))
    dots = total(
        jnp.stack([jnp.stack([jnp.vdot(a, a), jnp.vdot(a, b), jnp.vdot(b, b)]) for a, b in pairs])
    )
    parts = [
        (1 - ab / (2 * aa)) * a + (1 - ab / (2 * bb)) * b
        for (a, b), (aa, ab, bb) in zip(pairs, dots, strict=True)
    ]
    return jnp.concatenate(parts, -1)


FORMS: dict[str, Callable[[Leaves], Leaves]] = {
    "lax.pmean": pmean,
    "boostax.adasum": adasum,
    "boostax.adasum, bf16 on the wire": lambda leaves: adasum(leaves, wire_dtype="bfloat16"),
    "all-to-all, sum, all-gather": exchange_alone,
    "recursive halving": recursive_halving,
    "recursive doubling": recursive_doubling,
    "all-gather and reduce": gather_and_reduce,
}
OTHERS = ("recursive halving", "recursive doubling", "all-gather and reduce")


def program(form: Callable[[Leaves], Leaves], mesh: Mesh) -> Callable[[Leaves], Leaves]:
    """Untracked: the peers' results are equal everywhere, but cannot be typed so."""
    local = lambda leaves: form([x[0] for x in leaves])  # noqa: E731
    return jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(), check_vma=False)


def problem(mesh: Mesh, entries: int, leaves: int) -> Leaves:
    """Gradients that have a good part in common."""
    rng = np.random.default_rng(0)
    size = entries // leaves
    common = rng.normal(size=(leaves, 1, size))
    values = (common + rng.normal(size=(leaves, DEVICES, size))).astype(np.float32)
    return [jax.device_put(x, NamedSharding(mesh, P(AXIS))) for x in values]


def measure(entries: int, leaves: int, rounds: int) -> tuple[list[dict[str, Any]], list[Bar]]:
    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(AxisType.Auto,))
    grads = problem(mesh, entries, leaves)
    forms: dict[str, Form] = {}
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    for name, form in FORMS.items():
        mapped = program(form, mesh)
        found = boostax.audit(jax.jit(mapped), grads)
        compiled = jax.jit(mapped).lower(grads).compile()
        results[name] = compiled(grads)[0]
        forms[name] = Form(lambda compiled=compiled: jax.block_until_ready(compiled(grads)))
        rows.append(
            {
                "form": name,
                "bytes / mean's": found.wire_bytes.most,
                "collectives": len(found.collectives),
                "temp / gradient": found.temporary_bytes / (4 * entries),
            }
        )
    for name in OTHERS:
        np.testing.assert_allclose(results[name], results["boostax.adasum"], atol=1e-4)
    mean = results["all-to-all, sum, all-gather"] / DEVICES
    np.testing.assert_allclose(mean, results["lax.pmean"], atol=1e-5)
    times = paired(forms, rounds)
    mean_bytes = rows[0]["bytes / mean's"]
    for row in rows:
        row["bytes / mean's"] /= mean_bytes
        row["time / mean"] = ratio(times, row["form"], "lax.pmean")
    where = f"{entries // 2**20}M entries in {_leaves(leaves)}"
    bars = [Bar(f"{where}: bytes / those of a mean", rows[1]["bytes / mean's"], 1.01)]
    bars += [
        Bar(f"{where}: time / {name}", ratio(times, "boostax.adasum", name), 1.0) for name in OTHERS
    ]
    return rows, bars


def _leaves(count: int) -> str:
    return "1 leaf" if count == 1 else f"{count} leaves"


def main() -> None:
    rounds = arguments(__doc__, rounds=9).rounds
    jax.config.update("jax_num_cpu_devices", DEVICES)
    sections: list[tuple[str, list[dict[str, Any]]]] = []
    bars: list[Bar] = []
    for entries in (2**20, 2**23):
        for leaves in (1, 64):
            # Short runs are the noisier ones.
            rows, found = measure(entries, leaves, rounds * (12 if entries < 2**23 else 1))
            sections.append(
                (f"{entries // 2**20}M f32 entries in {_leaves(leaves)}, 8 devices", rows)
            )
            bars += found
    report("adasum", "AdaSum: bytes, collectives, memory and time", sections, bars)


if __name__ == "__main__":
    main()
