# SPDX-License-Identifier: Apache-2.0
"""At which bandwidth a compressed reduction pays, from counted bytes and measured work.

A codec saves bytes and costs time to encode and decode, on every device and at every step. On a
fast network it loses: of more than 200 set-ups of a typical data centre, compression beat a good
all-reduce in 6 (Agarwal et al., On the Utility of Gradient Compression in Distributed Training
Systems, https://arxiv.org/abs/2103.00543, MLSys 2022).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from boostax._core import axes, checks, costs, jaxprs, trees
from boostax._core.alone import fit, run_alone
from boostax.inspect.audit import Audit, audit
from boostax.inspect.costs import Place, mapped_update, traced
from boostax.inspect.tables import units
from boostax.inspect.targets import BANDWIDTH, target_devices
from boostax.reduce.mean import all_reduce

PyTree = Any


@dataclasses.dataclass(frozen=True)
class BreakEven:
    """Whether a reduction pays, and where. ``print`` says it in words.

    Attributes:
      replicas: devices that take part.
      wire_bytes: bytes that each device sends per step.
      dense_bytes: those of the baseline.
      collectives: collectives per step, neighbouring sums counted as one, as XLA merges them.
      dense_collectives: those of the baseline.
      encode_seconds: work per step on the device beyond the baseline's; negative if it is less.
      latency: seconds that a collective takes whatever it sends.
      at: the bandwidth asked about, in bytes per second, or ``None``.
    """

    replicas: int
    wire_bytes: float
    dense_bytes: float
    collectives: int
    dense_collectives: int
    encode_seconds: float
    latency: float
    at: float | None

    @property
    def bandwidth(self) -> float:
        """Bytes per second below which it pays: 0 is never, infinity always."""
        if self.wire_bytes >= self.dense_bytes:
            return 0.0
        extra = self.encode_seconds + self.latency * (self.collectives - self.dense_collectives)
        return math.inf if extra <= 0 else (self.dense_bytes - self.wire_bytes) / extra

    def seconds(self, bandwidth: float | None = None) -> float:
        """Predicted seconds per step: sending, waiting and the work beyond the baseline's."""
        sending = self.wire_bytes / self._at(bandwidth)
        return sending + self.latency * self.collectives + self.encode_seconds

    def dense_seconds(self, bandwidth: float | None = None) -> float:
        """Those of the baseline."""
        return self.dense_bytes / self._at(bandwidth) + self.latency * self.dense_collectives

    def pays(self, bandwidth: float | None = None) -> bool:
        """Whether the bandwidth, by default ``at``, is below the one where it breaks even."""
        return self._at(bandwidth) < self.bandwidth

    def speedup(self, bandwidth: float | None = None) -> float:
        """How many times faster the reduction is; the whole step gains less."""
        mine, dense = self.seconds(bandwidth), self.dense_seconds(bandwidth)
        return dense / mine if mine > 0 else math.inf

    def __str__(self) -> str:
        limit = self.bandwidth
        found = {0.0: "never pays", math.inf: "pays at every bandwidth"}
        said = found.get(limit, f"pays below {units(limit, 'B/s')}")
        if self.at is not None and 0 < limit < math.inf:
            verdict = "it does" if self.pays() else "it does not"
            said += f"; at {units(self.at, 'B/s')} {verdict} ({self.speedup():.2g}x)"
        kind = "less" if self.encode_seconds < 0 else "more"
        return (
            f"{said}\n"
            f"sends {units(self.wire_bytes, 'B')}, a dense mean {units(self.dense_bytes, 'B')}, "
            f"per device and step over {self.replicas} replicas\n"
            f"{units(abs(self.encode_seconds), 's')} {kind} work per step; collectives: "
            f"{self.collectives}, of a dense mean {self.dense_collectives}"
        )

    def _at(self, bandwidth: float | None) -> float:
        return _bandwidth("BreakEven", self.at if bandwidth is None else bandwidth)


def break_even(
    tx: optax.GradientTransformation,
    params: PyTree,
    replicas: int,
    bandwidth: float | None = None,
    *,
    target: str | None = None,
    baseline: optax.GradientTransformation | None = None,
    axis_name: str = "data",
    latency: float = 0.0,
    encode_seconds: float | None = None,
    repeats: int = 10,
) -> BreakEven:
    r"""Say at which bandwidth a compressed reduction pays, and say no where it does not.

    .. math:: \text{it pays below} \quad
      \frac{\text{dense bytes} - \text{bytes}}{\text{encode seconds} + \text{latency} \cdot
      (\text{collectives} - \text{dense collectives})} \ \text{bytes/s}

    Bytes are counted from the traced program of one of ``replicas`` devices, which need not exist,
    by the formulas of a ring; with a target, from what its compiler makes of it, which may widen
    what the program narrows. The work is measured here: that program runs on one device with a
    local copy in the place of whatever a collective would bring, of the right shape. So encoding,
    decoding and adding up what has come from all replicas are timed, and no network is. It is the
    time of *this* device alone: a CPU says nothing about a GPU, and work that overlaps with the
    backward pass costs less than it says. Timings vary; near the limit, measure real steps.

    Args:
      tx: the reduction, such as ``int8_reduce("data")``. In an optimizer's chain, pass the same
        chain with ``all_reduce`` as ``baseline``. Without gates: a loss scaler or window around it
        sends once per applied step, ``local_updates`` once per ``every``. A warm-up counts as the
        mean of its stages: give the last one alone.
      params: arrays or ``jax.ShapeDtypeStruct``; they are the shapes of the gradients.
      replicas: size of the axis.
      bandwidth: bytes per second that a device can send, to be judged; or ``None``.
      target: compile for another machine, of ``replicas`` devices: see
        ``boostax.inspect.target_devices``. Nothing is run then: the work is the memory traffic
        beyond the baseline's at the chip's bandwidth, less than what it will be.
      baseline: what it is compared with; ``None`` for ``all_reduce(axis_name)``, in f32.
      axis_name: the axis that ``tx`` names.
      latency: seconds that a collective takes whatever it sends, some 1e-5 in a data centre.
      encode_seconds: the work of ``tx`` per step beyond the baseline's, if you have measured it on
        the devices in question; nothing is run then.
      repeats: timings of which the least is taken: what else the machine does only adds to them.

    Returns:
      A ``BreakEven``. Cost: two traces; to measure, two compilations, ``4 * repeats`` steps and the
      memory of one device's gradients, state and received messages.

    Raises:
      ValueError, TypeError: an argument out of range, params that are not floating, a ``tx`` that
        sends nothing over the axis or an axis other than ``axis_name``.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> params = jax.ShapeDtypeStruct((2**20,), jnp.float32)
      >>> tx = boostax.int8_reduce("data")
      >>> print(boostax.inspect.break_even(tx, params, 64, 12.5e9, encode_seconds=1e-3))
      pays below 6.19 GB/s; at 12.5 GB/s it does not (0.57x)
      sends 2.07 MB, a dense mean 8.26 MB, per device and step over 64 replicas
      1 ms more work per step; collectives: 6, of a dense mean 1

    References:
      Agarwal et al., On the Utility of Gradient Compression in Distributed Training Systems,
      https://arxiv.org/abs/2103.00543, 2022.
    """
    who = "break_even"
    (name,) = axes.canonical(who, (axis_name,))
    baseline = all_reduce(name) if baseline is None else baseline
    for argument, part in {"tx": tx, "baseline": baseline}.items():
        checks.transformation(who, argument, part)
    trees.require_gradients(params, who)
    replicas = checks.positive_int(who, "replicas", replicas, "It is the size of the axis.")
    repeats = checks.positive_int(who, "repeats", repeats, "10 is the default.")
    if bandwidth is not None:
        _bandwidth(who, bandwidth)
    hint = "In seconds per collective: 1e-5 is usual in a data centre."
    checks.number(who, "latency", latency, "0 or more", lambda x: x >= 0, hint)
    if encode_seconds is not None:
        hint = "In seconds per step beyond the baseline's; None measures."
        checks.number(who, "encode_seconds", encode_seconds, "a number", lambda _: True, hint)
    parts = (tx, baseline)
    if target is not None:
        chip = target.partition(":")[0]
        hint = "The memory bandwidth of this chip is not known here."
        known, allowed = encode_seconds is not None or chip in BANDWIDTH, "given for this target"
        checks.require(who, "encode_seconds", None, allowed, known, hint)
        audits = [_audited(target, part, params, replicas, name) for part in parts]
        sent, dense_sent = (found.wire_bytes.most for found in audits)
        counts = (sum(c.executions for c in found.collectives) for found in audits)
        rounds, dense_rounds = map(math.ceil, counts)
        if encode_seconds is None:
            mine, dense = (found.traffic.most for found in audits)
            encode_seconds = (mine - dense) / BANDWIDTH[chip]
    else:
        place = Place((name,), {name: replicas})
        programs = [traced(part, params, place, returns_state=True) for part in parts]
        found = [costs.collectives(program) for program in programs]
        if not found[0] and jax.tree.leaves(params):
            raise ValueError(
                f"{who}: tx must send something over the axis {name!r}, got a transformation "
                "without collectives. Pass a reduction such as boostax.int8_reduce('data')."
            )
        sent, dense_sent = map(costs.expected, found)
        rounds, dense_rounds = map(_rounds, found)
        if encode_seconds is None:
            runs = [alone(part, x, params) for part, x in zip(parts, programs, strict=True)]
            # The first compiles. Whatever else the machine does can only add to a time.
            _, *times = [[run() for run in runs] for _ in range(1 + repeats)]
            mine, dense = map(min, zip(*times, strict=True))
            encode_seconds = float(mine - dense)
    return BreakEven(
        replicas, sent, dense_sent, rounds, dense_rounds, encode_seconds, latency, bandwidth
    )


def _audited(
    target: str, tx: optax.GradientTransformation, params: PyTree, replicas: int, name: str
) -> Audit:
    """The update on a target, whose devices are the replicas."""
    devices, hint = target_devices(target), "A target's devices are the replicas."
    count = len(devices)
    checks.require("break_even", "replicas", replicas, f"{count}", count == replicas, hint)
    mesh = Mesh(np.array(devices), (name,), axis_types=(AxisType.Auto,))
    update, given, specs = mapped_update(tx, params, mesh, (name,), returns_state=True)
    place = lambda spec, tree: jax.tree.map(  # noqa: E731
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree
    )
    placed = jax.tree.map(place, specs, given, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return audit(jax.jit(update, donate_argnums=1), *placed, target=target)


def _rounds(found: Sequence[costs.Collective]) -> int:
    """Collectives one after the other, neighbouring sums as one."""
    kind = lambda c: (c.primitive, c.axes, c.branches)  # noqa: E731
    merged = [
        c
        for before, c in zip([None, *found], found, strict=False)
        if before is None or c.primitive != "psum" or kind(before) != kind(c)
    ]
    return math.ceil(costs.expected(merged, lambda c: c.count))


def alone(
    tx: optax.GradientTransformation, program: jaxprs.ClosedJaxpr, params: PyTree
) -> Callable[[], float]:
    """A function that runs two steps of one device by itself and returns the seconds of one.

    Two, because a codec may do one thing at even and another at odd steps.
    """
    leaves, treedef = jax.tree.flatten(params)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in leaves]
    keys = jax.random.split(jax.random.key(0), max(1, len(leaves)))
    grads = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=False)]
    state = jax.tree.leaves(tx.init(jax.tree.unflatten(treedef, zeros)))

    def step(grads: Any, state: Any, params: Any, real: jax.Array) -> tuple[Any, Any]:
        outs = run_alone(program, [*grads, *state, *params], real)
        return outs[: len(grads)], outs[len(grads) :]

    real = jnp.array(True)
    inside = jax.eval_shape(step, grads, state, zeros, real)[1]
    carried: list[Any] = [fit(x, y.shape) for x, y in zip(state, inside, strict=True)]
    compiled = jax.jit(step)

    def run() -> float:
        begun = time.perf_counter()
        for _ in range(2):
            updates, carried[:] = compiled(grads, carried, zeros, real)
            jax.block_until_ready((updates, carried))
        return (time.perf_counter() - begun) / 2

    return run


def _bandwidth(who: str, value: float | None) -> float:
    hint = "In bytes per second: 12.5e9 is 100 Gbit/s."
    return checks.number(who, "bandwidth", value, "greater than 0", lambda x: x > 0, hint)
