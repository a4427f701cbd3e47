"""What compressed reductions cost to compute: the work of one of eight replicas, without a network.

All eight are emulated on one device by ``jax.vmap``, and their time is divided by eight.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from harness import Bar, Form, arguments, paired, ratio, report
from jax import lax
from replica_runs import wire_bytes

import boostax
from boostax.reduce.codec import Codec, Message, packed, unpacked, unsent
from boostax.reduce.feedback import compress
from boostax.reduce.low_rank import sides

AXIS, REPLICAS = "data", 8
SHAPES = {"1M": (1024, 1024), "10M": (2048, 5120)}
EXACT, BLOCKS = "top-k 1%, lax.top_k of the leaf", "top-k 1%, blocks of 1000"
POWER, BOTH_SIDES = "PowerSGD rank 4", "PowerSGD rank 4, both sides in every step"


@dataclasses.dataclass(frozen=True)
class BothSides(Codec):
    """PowerSGD as PyTorch's hook has it: two all-reduces a step, the second after the first."""

    rank: int

    def init(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """A first basis of the columns."""
        key = jax.random.PRNGKey(0)
        return [jax.random.normal(key, (sides(x.shape)[1], self.rank), x.dtype) for x in leaves]

    def reduce(
        self, leaves: Sequence[jax.Array], state: list[jax.Array], names: tuple[str, ...]
    ) -> Message:
        """Left factors, their basis, right factors."""
        left = [m @ q for m, q in zip(leaves, state, strict=True)]
        left = unpacked(lax.pmean(packed(left), names), left)
        bases = [jnp.linalg.qr(p)[0] for p in left]
        own = [m.T @ p for m, p in zip(leaves, bases, strict=True)]
        right = unpacked(lax.pmean(packed(own), names), own)
        means = [p @ q.T for p, q in zip(bases, right, strict=True)]
        sent = [p @ q.T for p, q in zip(bases, own, strict=True)]
        return Message(means, unsent(leaves, sent), right)


def forms() -> dict[str, optax.GradientTransformationExtraArgs]:
    """The dense mean first."""
    both = compress(BothSides(4), AXIS)
    return {
        "dense f32": boostax.all_reduce(AXIS),
        "bf16": boostax.all_reduce(AXIS, dtype="bfloat16"),
        "int8": boostax.int8_reduce(AXIS),
        "int8, stochastic": boostax.int8_reduce(AXIS, rounding="stochastic"),
        EXACT: boostax.top_k_reduce(AXIS, 0.01),
        BLOCKS: boostax.top_k_reduce(AXIS, 0.01, block=1000),
        "threshold, 1% at most, blocks": boostax.reduce.threshold_reduce(
            AXIS, 3.0, relative=True, capacity=0.01, block=1000
        ),
        POWER: boostax.reduce.power_sgd_reduce(AXIS, 4),
        BOTH_SIDES: both,
    }


def emulated(tx: optax.GradientTransformationExtraArgs, params: Any) -> Form:
    """A step of every replica: gradients given, the state kept."""
    grads = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(1), (REPLICAS, *x.shape)), params
    )
    mapped = lambda f: jax.vmap(f, axis_name=AXIS)  # noqa: E731
    step = jax.jit(mapped(lambda g, state: tx.update(g, state, params)))
    kept = [mapped(lambda g: tx.init(params))(grads)]

    def run() -> None:
        updates, kept[0] = step(grads, kept[0])
        jax.block_until_ready((updates, kept[0]))

    return Form(run)


def measure(size: str, rounds: int) -> tuple[list[dict[str, Any]], list[Bar]]:
    """A table of one size."""
    params = {"w": jnp.zeros(SHAPES[size])}
    rows: list[dict[str, Any]] = []
    timed: dict[str, Form] = {}
    for name, tx in forms().items():
        timed[name] = emulated(tx, params)
        rows.append({"reduction": name, "bytes / dense": wire_bytes(tx, params)})
    dense = rows[0]["bytes / dense"]
    times = paired(timed, rounds)
    for row in rows:
        name = row["reduction"]
        row["bytes / dense"] /= dense
        row["ms"] = 1e3 * min(times[name]) / REPLICAS
        extra = row["ms"] - rows[0].get("ms", row["ms"])
        saved = dense * (1 - row["bytes / dense"])
        row["pays below, GB/s"] = saved / (extra * 1e6) if extra > 0 else ""
    bars = [
        Bar(f"{size}: blocks / whole leaf, top-k", ratio(times, BLOCKS, EXACT), 1.0),
        Bar(f"{size}: one side / both sides, PowerSGD", ratio(times, POWER, BOTH_SIDES), 1.0),
    ]
    return rows, bars


def main() -> None:
    rounds = arguments(__doc__, rounds=9).rounds
    sections: list[tuple[str, list[dict[str, Any]]]] = []
    bars: list[Bar] = []
    for size in SHAPES:
        rows, found = measure(size, rounds)
        sections.append((f"{size} f32 entries, {REPLICAS} replicas: the work of one", rows))
        bars += found
    report("compression_time", "Compressed reductions: the work of a step", sections, bars)


if __name__ == "__main__":
    main()
