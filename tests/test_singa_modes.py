"""Apache SINGA's ``DistOpt`` of two to eight workers is a reduction of boostax.

Programs drawn at random, of its modes and optimizers, against its formulas in float64.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance.singa import CLOSE, buckets, difference, draw
from jax.sharding import PartitionSpec as P
from memory import reduction_bytes
from reducing import at_once, mesh_of, sends, updating

import boostax
from boostax.reduce import exchange

REPLICAS = 4
MESH = mesh_of(data=REPLICAS)
# Five modes take turns.
SEEDS = [pytest.param(n, marks=[] if 5 <= n < 10 else [pytest.mark.long]) for n in range(100)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mode_is_its_formula(seed):
    assert difference(draw(seed)) <= CLOSE


TOP_K, BUCKET = {"dist_option": "sparseTopK", "spars": 0.1}, {"bucket_bytes": 180}
OVER, WHOLE = {"kind": "threshold", "threshold": 0.9}, {"bucket_bytes": 2**23}
HALF, SENT = {"dist_option": "half"}, {"kind": "mean", "wire_dtype": "float16"}
READ = (
    ({"dist_option": "plain"}, {"kind": "mean"}),
    (HALF | {"threshold": 45}, SENT | BUCKET),
    (HALF | {"clipping": True, "clip_Value": 0.75}, SENT | {"clip": 0.75}),
    ({"dist_option": "partialUpdate", "threshold": 45}, {"kind": "partial"} | BUCKET),
    ({"dist_option": "partialUpdate"}, {"kind": "partial"} | WHOLE),
    (TOP_K | {"topK": True}, {"kind": "top-k", "density": 0.1} | WHOLE),
    (TOP_K | {"corr": False}, {"kind": "top-k", "density": 0.1, "error_feedback": False} | WHOLE),
    ({"dist_option": "sparseThreshold", "spars": 0.9}, OVER | WHOLE),
)


@pytest.mark.parametrize(("options", "reduction"), READ)
def test_a_mode_is_read_as_a_reduction(options, reduction):
    assert boostax.auto({"singa": options}).config == {"reduce": reduction}


def test_buckets_are_singas():
    sizes = [40, 35, 3, 120, 11]
    for threshold in (0, 2, 3, 10, 45, 74, 120, 200, 10**6):
        assert exchange.fused(dict(enumerate(sizes)), threshold) == buckets(sizes, threshold)
    assert buckets(sizes, 45) == [[3], [4, 2, 1], [0]]


# Nothing that reaches the threshold is lost.


@pytest.mark.parametrize("size", [2000, 2**15])
@pytest.mark.parametrize("corr", [True, False])
def test_a_thousand_equal_elements_over_the_threshold_all_arrive(size, corr):
    """Defect guarded against: 5% had a place, and of what was equal the first were sent."""
    rows = np.full((REPLICAS, size), 0.3, np.float32)
    places = np.random.default_rng(0).permutation(size)[:1000]
    rows[1, places] = 0.75
    boost = boostax.auto({"singa": {"dist_option": "sparseThreshold", "spars": 0.5, "corr": corr}})
    linear = lambda params, batch: jnp.sum(params * batch[0])  # noqa: E731
    with warned(boost.config["reduce"]):
        step = boost.make_train_step(linear, optax.sgd(1.0), mesh=MESH, axis_name="data")
    state, metrics = step(step.init(jnp.zeros(size)), rows)
    expected = np.zeros(size)
    expected[places] = -0.75 / REPLICAS
    np.testing.assert_array_equal(state.params, expected)
    fits = size >= 20 * 1000
    assert metrics["capacity"] == np.float32(0.05 if fits else 1.0)
    # What was below it is kept and reaches it, on all replicas; or it is dropped, as SINGA does.
    state, metrics = step(state, rows)
    rest = np.float64(np.float32(0.3))
    kept = 2 * rest * np.where(np.isin(np.arange(size), places), 3, 4) / REPLICAS
    np.testing.assert_allclose(state.params, 2 * expected - kept * corr, atol=1e-6)
    assert metrics["capacity"] == np.float32(1.0 if corr or not fits else 0.05)


def test_the_replica_with_most_over_the_threshold_decides_for_all():
    size = 2**15
    update = at_once(boostax.reduce.threshold_reduce("data", 0.5, capacity=0.01))
    for count, capacity in ((328, 0.01), (329, 1.0)):
        rows = np.zeros((REPLICAS, size), np.float32)
        rows[0, :30], rows[2, :count] = 1.0, np.linspace(1.0, 2.0, count)
        mean, state = update(rows)
        assert state.metrics()["capacity"].tolist() == [np.float32(capacity)] * REPLICAS
        assert not np.any(state.residual.local)
        np.testing.assert_allclose(mean[0], rows.sum(0) / REPLICAS, rtol=1e-6)


def test_zeros_need_no_place():
    rows = jnp.zeros((2, 8)).at[:, 3].set(1.0)
    mean, state = at_once(boostax.reduce.threshold_reduce("data", 0.0, capacity=0.25))(rows)
    assert mean[0].tolist() == rows[0].tolist()
    assert state.metrics()["capacity"].tolist() == [0.25, 0.25]


def test_short_leaves_share_their_places():
    """Two of nine reach it: a leaf's own places would be one of nine."""
    rows = [np.zeros((2, size), np.float32) for size in (9, 300)]
    rows[0][0, :2] = 1.0
    for bucket_bytes, capacity in ((2**16, 0.01), (None, 1.0)):
        tx = boostax.reduce.threshold_reduce("data", 0.5, capacity=0.01, bucket_bytes=bucket_bytes)
        mean, state = at_once(tx)(rows)
        assert mean[0][0].tolist() == [0.5, 0.5, *[0.0] * 7]
        assert state.metrics()["capacity"].tolist() == [np.float32(capacity)] * 2


def test_a_threshold_sends_what_its_capacity_says():
    """Counted from the jaxpr: 8 bytes a place, gathered; those of a mean in a dense step."""
    size = 2**20
    found = sends(updating(boostax.reduce.threshold_reduce("data", capacity=0.01)), [size], MESH)
    rungs = {}
    for one in found:
        if one.conditional:
            rungs.setdefault(one.branches[-1][-1], []).append(one)
    sent = [sum(c.wire_bytes for c in rungs[branch]) for branch in sorted(rungs)]
    sparse, dense = (REPLICAS - 1) * 8 * 0.01 * size, 2 * (REPLICAS - 1) / REPLICAS * 4 * size
    np.testing.assert_allclose(sent, [sparse, dense], rtol=0.02)
    # A count, and two norms, each of two sums.
    assert [one.bytes for one in found if not one.conditional] == [8, 4, 8]


def test_a_threshold_takes_no_more_memory_than_its_sparse_share():
    """Branches share what they compute in, and residuals are written in place."""
    grads = jax.ShapeDtypeStruct((REPLICAS, 1024, 1024), jnp.float32)

    def temporary(tx):
        specs = boostax.states.state_specs(tx, jnp.zeros(grads.shape[1:]), axis_name="data")
        mapped = functools.partial(jax.shard_map, mesh=MESH)

        def begin(g):
            return boostax.states.leave_replica(tx.init(g[0]))

        def step(g, state):
            mean, state = tx.update(g[0], boostax.states.enter_replica(state))
            return mean, boostax.states.leave_replica(state)

        state = jax.eval_shape(mapped(begin, in_specs=P("data"), out_specs=specs), grads)
        both = mapped(step, in_specs=(P("data"), specs), out_specs=(P(), specs))
        compiled = jax.jit(both, donate_argnums=1).lower(grads, state).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # What is above a threshold is counted, which is a reduction of a replica's leaf.
    alone = reduction_bytes(jax.ShapeDtypeStruct(grads.shape[1:], grads.dtype))
    one = temporary(boostax.top_k_reduce("data", 0.05)) + alone
    assert temporary(boostax.reduce.threshold_reduce("data")) <= 1.001 * one


def warned(reduce):
    """A warning where nothing is kept, which is meant here."""
    if reduce.get("error_feedback") is False:
        return pytest.warns(UserWarning, match="without error feedback")
    return contextlib.nullcontext()
