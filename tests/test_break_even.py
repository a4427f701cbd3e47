"""Where compression pays: bytes by their formulas, the verdict, and the work of one device."""

import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax._core import costs
from boostax._core.alone import run_alone
from boostax.inspect.break_even import BreakEven, break_even
from boostax.inspect.costs import Place, traced

# The second leaf fills no row.
PARAMS = {
    "w": jax.ShapeDtypeStruct((512, 256), jnp.float32),
    "b": jax.ShapeDtypeStruct((100,), jnp.float32),
}
MATRIX = 512 * 256
ENTRIES = MATRIX + 100


def ring(n):
    """Bytes sent per byte of operand: an all-reduce, an all-to-all, an all-gather."""
    return 2 * (n - 1) / n, (n - 1) / n, n - 1


def two_shots(n, message):
    _, exchange, gather = ring(n)
    return exchange * message + gather * message / n


def int8(n):
    """Codes, and a scale per row: 512 of the matrix, in each slice one of 256 for the vector."""
    return two_shots(n, MATRIX + 256 * n + 4 * (512 + n))


def int16(n):
    return ring(n)[0] * 4 * 2 + two_shots(n, 2 * (MATRIX + math.ceil(100 / n) * n))


def sign(n):
    """Of each leaf at once: eight rows of 256 for the vector, to fill the bytes."""
    return ring(n)[2] * (MATRIX / 8 + 256 + 4 * (512 + 8))


def sign_in_two_shots(n):
    return two_shots(n, MATRIX / 8 + 256 * n + 4 * (512 + 8 * n))


def sparse(n, of_matrix, of_vector):
    """Values of 4 bytes; places of 4 in the matrix, which has more than 2**16, of 2 in the rest."""
    return ring(n)[2] * (8 * of_matrix + 6 * of_vector)


def ladder(n):
    """Any of three capacities, the last as a mean; and two counts of whether all has a place."""
    rungs = (sparse(n, 1311, 1), sparse(n, 6554, 5), ring(n)[0] * 4 * ENTRIES)
    return sum(rungs) / 3 + ring(n)[0] * (4 + 8)


def random_k(n):
    """Five of the matrix's 512 rows, and an entry of the vector."""
    return ring(n)[0] * 4 * (5 * 256 + 1)


def power_sgd(n):
    """One side of the matrix in turn, rank 2; the vector dense."""
    return ring(n)[0] * (4 * 2 * (512 + 256) / 2 + 4 * 100)


CODECS = {
    "int8": (boostax.int8_reduce("data"), int8, 8),
    "int16": (boostax.reduce.int16_reduce("data"), int16, 7),
    "sign": (boostax.reduce.sign_reduce("data"), sign, 5),
    "sign, two shots": (boostax.reduce.sign_reduce("data", two_shot=True), sign_in_two_shots, 8),
    "top-k": (boostax.top_k_reduce("data"), lambda n: sparse(n, 1311, 1), 5),
    # In the second of the two sums goes the count of what has no place.
    "threshold": (
        boostax.reduce.threshold_reduce("data", capacity=0.05),
        lambda n: sparse(n, 6554, 5) + ring(n)[0] * 4,
        5,
    ),
    "threshold, any number": (boostax.reduce.threshold_reduce("data"), ladder, 6),
    "random-k": (boostax.reduce.random_k_reduce("data"), random_k, 1),
    "power-sgd": (boostax.reduce.power_sgd_reduce("data"), power_sgd, 3),
}
OF_TWO_SUMS = 8


@pytest.mark.parametrize("replicas", [2, 8, 64])
@pytest.mark.parametrize("name", CODECS)
def test_bytes_are_those_of_the_formulas_without_the_devices(name, replicas):
    tx, formula, collectives = CODECS[name]
    found = break_even(tx, PARAMS, replicas, encode_seconds=1e-3)
    reduce = ring(replicas)[0]
    assert found.wire_bytes == pytest.approx(formula(replicas) + reduce * OF_TWO_SUMS)
    assert found.dense_bytes == pytest.approx(reduce * 4 * ENTRIES)
    assert (found.collectives, found.dense_collectives) == (collectives, 1)


def test_a_gate_and_an_optimizer_send_nothing_more_than_what_is_in_them():
    tx = boostax.reduce.power_sgd_reduce("data")
    alone = break_even(tx, PARAMS, 8, encode_seconds=0)
    chain = optax.chain(tx, optax.adam(1e-3))
    gated = boostax.dynamic_loss_scale(chain, axis_name="data")
    windowed = boostax.accumulate(gated, every=4, axis_name="data")
    for outer in (gated, windowed):
        found = break_even(outer, PARAMS, 8, encode_seconds=0)
        assert 0 <= found.wire_bytes - alone.wire_bytes < 100


# The verdict.


def example(**changed):
    """100 bytes instead of 1000 for a tenth of a second."""
    fields = {
        "replicas": 8,
        "wire_bytes": 100.0,
        "dense_bytes": 1000.0,
        "collectives": 3,
        "dense_collectives": 1,
        "encode_seconds": 0.1,
        "latency": 0.0,
        "at": None,
    }
    return BreakEven(**(fields | changed))


@pytest.mark.parametrize("latency", [0.0, 0.01])
def test_at_the_break_even_bandwidth_both_take_the_same_time(latency):
    found = example(latency=latency)
    assert found.bandwidth == pytest.approx(900 / (0.1 + 2 * latency))
    assert found.seconds(found.bandwidth) == pytest.approx(found.dense_seconds(found.bandwidth))
    below, above = 0.9 * found.bandwidth, 1.1 * found.bandwidth
    assert found.pays(below) and found.speedup(below) > 1
    assert not found.pays(above) and found.speedup(above) < 1


def test_what_sends_no_less_never_pays_however_fast_it_is():
    for seconds in (-1.0, 0.0, 1.0):
        found = example(wire_bytes=1000.0, encode_seconds=seconds, at=1.0)
        assert found.bandwidth == 0 and not found.pays()
        assert str(found).startswith("never pays\n")


def test_what_sends_less_and_works_no_more_always_pays():
    for seconds in (-0.01, 0.0):
        found = example(encode_seconds=seconds, at=1e12)
        assert found.bandwidth == math.inf and found.pays() and found.speedup() > 1
        assert str(found).startswith("pays at every bandwidth\n")
    # More collectives cost too.
    assert example(encode_seconds=0.0, latency=0.01).bandwidth == pytest.approx(900 / 0.02)


def test_top_k_of_three_tenths_never_pays_at_64_replicas():
    tx = boostax.top_k_reduce("data", density=0.3)
    assert break_even(tx, PARAMS, 64, encode_seconds=0).bandwidth == 0
    assert break_even(tx, PARAMS, 2, encode_seconds=1e-3).bandwidth > 0


def test_a_single_replica_has_nothing_to_send():
    found = break_even(boostax.int8_reduce("data"), PARAMS, 1, encode_seconds=0)
    assert found.wire_bytes == found.dense_bytes == found.bandwidth == 0


def test_the_verdict_reads_as_a_sentence():
    found = example(wire_bytes=1.9e6, dense_bytes=7.3e6, encode_seconds=1.75e-3, at=12.5e9)
    assert str(found) == (
        "pays below 3.09 GB/s; at 12.5 GB/s it does not (0.31x)\n"
        "sends 1.9 MB, a dense mean 7.3 MB, per device and step over 8 replicas\n"
        "1.75 ms more work per step; collectives: 3, of a dense mean 1"
    )
    assert "; at 1 GB/s it does (2x)\n" in str(dataclasses.replace(found, at=1e9))
    assert "200 µs less work" in str(example(encode_seconds=-2e-4))
    # Not "1e+03 kB".
    assert "sends 1 MB" in str(example(wire_bytes=999_900.0))


# The work.


def update_of(tx, params, replicas):
    """The traced update of one of so many devices."""
    return traced(tx, params, Place(("data",), {"data": replicas}), returns_state=True)


@pytest.mark.parametrize("name", ["int8", "top-k", "random-k", "power-sgd"])
def test_one_device_alone_computes_what_one_of_one_computes(name):
    """With a single replica, local copies are what a network would bring."""
    tx = CODECS[name][0]
    rng = np.random.default_rng(0)
    grads = {"w": jnp.float32(rng.normal(size=(40, 30))), "b": jnp.float32(rng.normal(size=7))}
    update = update_of(tx, grads, 1)
    params = jax.tree.map(jnp.zeros_like, grads)
    leaves, treedef = jax.tree.flatten(grads)

    @jax.jit
    def alone(grads, state, real):
        state, structure = jax.tree.flatten(state)
        args = [*jax.tree.leaves(grads), *state, *jax.tree.leaves(params)]
        outs = run_alone(update, args, real)
        shaped = [x.reshape(y.shape) for x, y in zip(outs, leaves + state, strict=True)]
        return treedef.unflatten(shaped[: len(leaves)]), structure.unflatten(shaped[len(leaves) :])

    @jax.jit
    def mapped(grads, state):
        one = lambda tree: jax.tree.map(lambda x: x[None], tree)  # noqa: E731
        drop = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
        return drop(jax.vmap(tx.update, axis_name="data")(one(grads), one(state)))

    mine = theirs = tx.init(params)
    for _ in range(2):
        updates, mine = alone(grads, mine, jnp.array(True))
        expected, theirs = mapped(grads, theirs)
        close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)  # noqa: E731
        jax.tree.map(close, (updates, mine), (expected, theirs))


def compiled(tx, replicas):
    """What one device is timed with, and how often it sends."""
    update = update_of(tx, PARAMS, replicas)
    shapes = [jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in update.in_avals]
    state = jax.tree.leaves(jax.eval_shape(tx.init, PARAMS))
    shapes[2:] = [*state, *jax.tree.leaves(PARAMS)]
    program = jax.jit(lambda args, real: run_alone(update, args, real))
    lowered = program.lower(shapes, jax.ShapeDtypeStruct((), bool))
    return lowered.compile(), len(costs.collectives(update))


@pytest.mark.parametrize("name", ["int8", "power-sgd"])
def test_the_compiler_keeps_what_is_sent_and_received(name):
    program, sends = compiled(CODECS[name][0], 8)
    assert program.as_text().count(" conditional(") >= sends


class Clock:
    """In the place of ``time``: each stretch that is measured takes what the next number says."""

    def __init__(self, *stretches):
        self.now, self.stretches, self.begun = 0.0, iter(stretches), False

    def perf_counter(self):
        if self.begun:
            self.now += next(self.stretches)
        self.begun = not self.begun
        return self.now


def test_the_work_is_measured_for_more_replicas_than_there_are_devices(monkeypatch):
    # Two steps of each at a time, by turns; the first compile, and of the others the least counts.
    clock = Clock(100.0, 100.0, 8.0, 2.0, 6.0, 4.0)
    monkeypatch.setattr(sys.modules["boostax.inspect.break_even"], "time", clock)
    found = break_even(boostax.top_k_reduce("data"), PARAMS, 64, 12.5e9, repeats=2)
    assert list(clock.stretches) == []
    assert found.encode_seconds == (6.0 - 2.0) / 2 and 0 < found.bandwidth < math.inf
    assert found.seconds() == pytest.approx(found.wire_bytes / 12.5e9 + found.encode_seconds)


def test_what_is_measured_is_what_a_codec_does():
    """Sorting 131,072 numbers and adding up what came from 64 is more than a division."""
    flops = lambda tx: compiled(tx, 64)[0].cost_analysis()["flops"]  # noqa: E731
    assert flops(boostax.top_k_reduce("data")) > 2 * flops(boostax.all_reduce("data"))


def test_what_does_the_same_work_pays_nowhere(monkeypatch):
    monkeypatch.setattr(
        sys.modules["boostax.inspect.break_even"], "time", Clock(9.0, 9.0, 3.0, 3.0)
    )
    same = break_even(boostax.all_reduce("data"), PARAMS, 64, repeats=1)
    assert same.bandwidth == same.encode_seconds == 0


def test_state_of_each_replica_and_gates_are_run_too():
    adam = optax.adam(1e-3)
    own = optax.chain(boostax.int8_reduce("data"), adam)
    plain = optax.chain(boostax.all_reduce("data"), adam)
    gated = boostax.dynamic_loss_scale(plain, axis_name="data")
    for tx in (own, gated):
        found = break_even(tx, PARAMS, 8, baseline=plain, repeats=1)
        assert math.isfinite(found.encode_seconds)


def test_another_axis_and_half_params():
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), PARAMS)
    found = break_even(boostax.int8_reduce("replica"), params, 4, axis_name="replica", repeats=1)
    assert found.wire_bytes < found.dense_bytes == pytest.approx(1.5 * 4 * ENTRIES)


# What it refuses.


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"tx": lambda g: g}, TypeError, "tx must be an optax.GradientTransformation"),
        ({"baseline": 1}, TypeError, "baseline must be an optax.GradientTransformation"),
        ({"tx": optax.sgd(0.1)}, ValueError, "tx must send something over the axis 'data'"),
        ({"tx": boostax.int8_reduce("model")}, ValueError, "'model', which is not bound"),
        ({"params": {"n": jnp.arange(3)}}, TypeError, "break_even: .* int32 at 'n'"),
        ({"replicas": 0}, ValueError, "replicas must be a positive integer, got 0"),
        ({"replicas": 2.5}, TypeError, "replicas must be a positive integer, got 2.5"),
        ({"bandwidth": 0}, ValueError, "bandwidth must be greater than 0, got 0"),
        ({"bandwidth": math.inf}, ValueError, "bandwidth must be greater than 0, got inf"),
        ({"latency": -1e-5}, ValueError, "latency must be 0 or more"),
        ({"encode_seconds": math.nan}, ValueError, "encode_seconds must be a number, got nan"),
        ({"axis_name": None}, ValueError, "axis_name must be a mesh axis name"),
        ({"repeats": 0}, ValueError, "repeats must be a positive integer"),
    ],
)
def test_arguments_out_of_range_are_refused(changed, error, words):
    right = {"tx": boostax.int8_reduce("data"), "params": PARAMS, "replicas": 8}
    with pytest.raises(error, match=words):
        break_even(**(right | {"encode_seconds": 0.0} | changed))


def test_a_verdict_asks_for_a_bandwidth_where_it_needs_one():
    with pytest.raises(TypeError, match="BreakEven: bandwidth must be greater than 0, got None"):
        example().speedup()
