"""Apache SINGA's ``DistOpt``, mode by mode, against its formulas in float64."""

import jax
import numpy as np
import pytest

import boostax

RATE, STEPS = 0.1, 6
SHAPES = {"a": (40,), "b": (5, 7), "c": (3,)}


def gradients(replicas, seed=0):
    """``(steps, replicas, *shape)``: each tensor a bucket of its own."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(STEPS, replicas, *shape)) for name, shape in SHAPES.items()}


def ours(tx, grads):
    """The mean gradient of every step."""
    grads = jax.tree.map(np.float32, grads)
    state = jax.vmap(tx.init, axis_name="data")({k: v[0] for k, v in grads.items()})
    update = jax.jit(jax.vmap(tx.update, axis_name="data"))
    found = []
    for step in range(STEPS):
        means, state = update({k: v[step] for k, v in grads.items()}, state)
        found.append({k: np.asarray(v[0]) for k, v in means.items()})
    return {k: np.stack([row[k] for row in found]) for k in grads}


def plain(rows):
    return rows.sum(0) / len(rows)


def half(rows, clip):
    """As SINGA means it; it adds in f16, where the sum of eight is rounded too."""
    return np.float16(np.clip(rows, -clip, clip)).astype(np.float64).sum(0) / len(rows)


class Sparse:
    """``fusedSparsification`` of one bucket: accumulate, choose, keep the rest, add up, divide."""

    def __init__(self, choose, corr):
        self.choose, self.corr, self.rest = choose, corr, 0.0

    def __call__(self, rows):
        wanted = rows + self.rest if self.corr else rows
        sent = np.stack([self.choose(row) for row in wanted])
        self.rest = wanted - sent
        return sent.sum(0) / len(rows)


def threshold(limit):
    return lambda row: np.where(abs(row) >= limit, row, 0)


def top_k(share, magnitude=abs):
    def choose(row):
        flat = row.ravel()
        k = int(np.ceil(share * flat.size))
        chosen = np.zeros_like(flat)
        largest = np.argsort(-magnitude(flat), kind="stable")[:k]
        chosen[largest] = flat[largest]
        return chosen.reshape(row.shape)

    return choose


def singas_own_top_k(share):
    """Its comparison truncates magnitudes to integers, so below one the first k are taken."""
    return top_k(share, lambda flat: abs(flat).astype(np.int64))


def run(mode, grads):
    """The oracle's mean of every step, tensor by tensor."""
    result = {}
    for name, rows in grads.items():
        reduce = mode()
        result[name] = np.stack([reduce(np.float64(np.float32(step))) for step in rows])
    return result


def assert_equal(found, expected, tolerance):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("buckets", [None, 4 * 64])
def test_plain(replicas, buckets):
    grads = gradients(replicas)
    tx = boostax.all_reduce("data", bucket_bytes=buckets)
    assert_equal(ours(tx, grads), run(lambda: plain, grads), 1e-6)


@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_half(replicas, clip):
    """Within the rounding of one f16 addition."""
    grads = gradients(replicas)
    tx = boostax.all_reduce("data", dtype="float16", clip=clip)
    assert_equal(ours(tx, grads), run(lambda: lambda rows: half(rows, clip), grads), 4e-3)


@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("corr", [True, False])
def test_threshold(replicas, corr):
    grads = gradients(replicas)
    tx = boostax.reduce.threshold_reduce("data", 0.9, capacity=1.0, error_feedback=corr)
    assert_equal(ours(tx, grads), run(lambda: Sparse(threshold(0.9), corr), grads), 1e-6)


@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("corr", [True, False])
def test_top_k(replicas, corr):
    grads = gradients(replicas)
    tx = boostax.top_k_reduce("data", 0.1, error_feedback=corr)
    assert_equal(ours(tx, grads), run(lambda: Sparse(top_k(0.1), corr), grads), 1e-6)


def test_the_largest_are_chosen_where_singa_takes_the_first():
    grads = {name: rows / 10 for name, rows in gradients(2).items()}
    found = ours(boostax.top_k_reduce("data", 0.1, error_feedback=False), grads)
    right = run(lambda: Sparse(top_k(0.1), corr=False), grads)
    singas = run(lambda: Sparse(singas_own_top_k(0.1), corr=False), grads)
    assert_equal(found, right, 1e-6)
    # Of forty entries below one, SINGA sends the first four at every step.
    assert np.all(np.flatnonzero(np.any(singas["a"], axis=0)) == np.arange(4))
    energy = lambda rows: float(np.sum(rows["a"] ** 2))  # noqa: E731
    assert energy(right) > 2 * energy(singas)


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_momentum_correction(replicas):
    """Deep gradient compression: velocity and residual stop where an entry has been sent."""
    grads = gradients(replicas)
    found = ours(boostax.top_k_reduce("data", 0.1, momentum=0.9), grads)

    class Corrected:
        def __init__(self):
            self.velocity = self.rest = 0.0

        def __call__(self, rows):
            self.velocity = 0.9 * self.velocity + rows
            self.rest = self.rest + self.velocity
            sent = np.stack([top_k(0.1)(row) for row in self.rest])
            self.velocity = np.where(sent == 0, self.velocity, 0)
            self.rest = np.where(sent == 0, self.rest, 0)
            return sent.sum(0) / len(rows)

    assert_equal(found, run(Corrected, grads), 2e-6)
