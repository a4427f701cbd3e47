"""Apache SINGA's ``DistOpt`` over four replicas and twenty steps, against its formulas in float64.

A replica's gradient is exact in f32 (a quadratic with centres on a grid), so both round to f16
alike. SINGA's modes: plain, half, half clipped, partial update, sparse top-k, sparse threshold.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from memory import reduction_bytes
from reducing import at_once, mesh_of, sends, updating
from training import follow

import boostax
from boostax.reduce import exchange

REPLICAS, STEPS, RATE, MOMENTUM = 4, 20, 0.125, 0.5
MESH = mesh_of(data=REPLICAS)
# In forward order, as SINGA's tape has them; it goes through them from the last to the first.
SHAPES = [(40,), (5, 7), (3,), (30, 4), (11,)]
# In elements: the fourth alone, the last and the third with the second, the first by itself.
THRESHOLD = 45


def grid(seed, *lead):
    rng = np.random.default_rng(seed)
    return [rng.integers(-96, 97, (*lead, *shape)) / 64 for shape in SHAPES]


START, CENTRES = grid(0), grid(1, STEPS, REPLICAS)


def loss_fn(params, batch):
    """Half the squared distance from the replica's centres, of which it has one."""
    return sum(jnp.sum((p - c[0]) ** 2) / 2 for p, c in zip(params, batch, strict=True))


# SINGA.


def buckets(threshold):
    """``backward_and_update`` and its kin: small tensors are fused until they are more."""
    found, small, filled = [], [], 0
    for i in reversed(range(len(SHAPES))):
        size = int(np.prod(SHAPES[i]))
        if size > threshold:
            found.append([i])
            continue
        small.append(i)
        filled += size
        if filled > threshold:
            found.append(small)
            small, filled = [], 0
    return [*found, small] if small else found


def half(row):
    return row.astype(np.float16).astype(np.float64)


def synch(rows):
    return [x.sum(0) for x in rows]


def synch_half(rows, clip=np.inf):
    """The sum is f16 again; SINGA also rounds after each addition, in the order of its ring."""
    return [half(half(np.clip(x, -clip, clip)).sum(0)) for x in rows]


class Sparse:
    """``fusedSparsification``: of each bucket add what was left, choose, keep the rest, add up."""

    def __init__(self, choose, corr, threshold=THRESHOLD):
        self.choose, self.corr, self.buckets = choose, corr, buckets(threshold)
        self.left = [0.0] * len(self.buckets)

    def __call__(self, rows):
        result = list(rows)
        for k, bucket in enumerate(self.buckets):
            wanted = np.concatenate([rows[i].reshape(REPLICAS, -1) for i in bucket], 1)
            wanted = wanted + self.left[k] if self.corr else wanted
            sent = np.stack([self.choose(row) for row in wanted])
            self.left[k] = wanted - sent
            ends = np.cumsum([np.prod(SHAPES[i], dtype=int) for i in bucket])
            for i, part in zip(bucket, np.split(sent.sum(0), ends[:-1]), strict=True):
                result[i] = part.reshape(SHAPES[i])
        return result


def top_k(share, row):
    """The largest magnitudes, as SINGA means it; its comparison truncates them to integers."""
    largest = np.argsort(-abs(row), kind="stable")[: int(np.ceil(share * row.size))]
    return np.where(np.isin(np.arange(row.size), largest), row, 0)


def reaching(limit, row):
    return np.where(abs(row) >= limit, row, 0)


class SGD:
    """``opt.SGD(lr, momentum)``, whose moments begin as zeros."""

    def __init__(self):
        self.moments = {}

    def apply(self, name, param, grad):
        self.moments[name] = MOMENTUM * self.moments.get(name, 0.0) + grad
        return param - RATE * self.moments[name]


def synchronous(reduce):
    """``update``: divide what was added up by the replicas, then the optimizer."""
    opt, params = SGD(), [np.array(p) for p in START]
    for step in range(STEPS):
        grads = [p - c[step] for p, c in zip(params, CENTRES, strict=True)]
        mean = [x / REPLICAS for x in reduce(grads)]
        params = [opt.apply(i, p, g) for i, (p, g) in enumerate(zip(params, mean, strict=True))]
    return [np.stack([p] * REPLICAS) for p in params]


def partial_update(partitions):
    """Every replica its own step; then one partition of the params is averaged."""
    opts = [SGD() for _ in range(REPLICAS)]
    own = [np.stack([p] * REPLICAS) for p in START]
    for step in range(STEPS):
        for i, r in itertools.product(range(len(own)), range(REPLICAS)):
            own[i][r] = opts[r].apply(i, own[i][r], own[i][r] - CENTRES[i][step, r])
        for i in partitions[step % len(partitions)]:
            own[i][:] = own[i].sum(0) / REPLICAS
    return own


# boostax.


@functools.cache
def batches():
    return [[jnp.asarray(c[step], jnp.float32) for c in CENTRES] for step in range(STEPS)]


def trained(step):
    """Params of every replica after all steps."""
    state, _ = follow(step, step.init([jnp.asarray(p, jnp.float32) for p in START]), batches())
    own = state.params
    if isinstance(own, boostax.PerReplica):
        return [np.asarray(p) for p in own.local]
    return [np.stack([p] * REPLICAS) for p in own]


SMALL = {"threshold": THRESHOLD}
PLAIN, HALF, PARTIAL = ({"dist_option": x} for x in ("plain", "half", "partialUpdate"))
TOP_K = {"dist_option": "sparseTopK", "spars": 0.1}
REACHING = {"dist_option": "sparseThreshold", "spars": 0.9}
BUCKET, WHOLE = {"bucket_bytes": 4 * THRESHOLD}, {"bucket_bytes": 2**23}
F16 = {"kind": "mean", "dtype": "float16"}
LIMIT, DENSITY = {"kind": "threshold", "threshold": 0.9}, {"kind": "top-k", "density": 0.1}
OFF = {"error_feedback": False}


def sparse(choose, *args, corr=True, **options):
    return lambda: synchronous(Sparse(functools.partial(choose, *args), corr, **options))


# Options, the reduction that they are, and what they compute.
MODES = {
    "plain": (PLAIN, {"kind": "mean"}, lambda: synchronous(synch)),
    "plain, fused": (PLAIN | SMALL, {"kind": "mean"} | BUCKET, lambda: synchronous(synch)),
    "half": (HALF | SMALL, F16 | BUCKET, lambda: synchronous(synch_half)),
    "half, clipped": (
        HALF | {"clipping": True, "clip_Value": 0.75},
        F16 | {"clip": 0.75},
        lambda: synchronous(functools.partial(synch_half, clip=0.75)),
    ),
    "partial update": (
        PARTIAL | SMALL,
        {"kind": "partial"} | BUCKET,
        lambda: partial_update(buckets(THRESHOLD)),
    ),
    "partial update, whole": (
        PARTIAL,
        {"kind": "partial"} | WHOLE,
        lambda: partial_update([range(len(SHAPES))]),
    ),
    "sparse top-k": (TOP_K | SMALL | {"topK": True}, DENSITY | BUCKET, sparse(top_k, 0.1)),
    "sparse top-k, one bucket": (
        {"dist_option": "sparseTopK"},
        {"kind": "top-k", "density": 0.05} | WHOLE,
        sparse(top_k, 0.05, threshold=2097152),
    ),
    "sparse top-k, corr off": (
        TOP_K | SMALL | {"corr": False},
        DENSITY | BUCKET | OFF,
        sparse(top_k, 0.1, corr=False),
    ),
    "sparse threshold": (REACHING, LIMIT | WHOLE, sparse(reaching, 0.9)),
    "sparse threshold, corr off": (
        REACHING | SMALL | {"corr": False},
        LIMIT | BUCKET | OFF,
        sparse(reaching, 0.9, corr=False),
    ),
}


# Of a linear optimizer it is the same when params are averaged.
SAME = {"plain", "plain, fused", "partial update, whole"}


@functools.cache
def formula(name):
    return MODES[name][2]()


@pytest.mark.parametrize("name", MODES)
def test_a_mode_is_its_formula(name):
    options, reduction, _ = MODES[name]
    boost = boostax.auto({"singa": options})
    assert boost.config == {"reduce": reduction}
    optimizer = optax.sgd(RATE, MOMENTUM)
    like = [jnp.asarray(p, jnp.float32) for p in START]
    with warned(reduction):
        step = boost.make_train_step(loss_fn, optimizer, like, mesh=MESH, axis_name="data")
    found = trained(step)
    for x, expected in zip(found, formula(name), strict=True):
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-6)


def test_the_formulas_differ():
    """A test of one would not pass with another."""
    for one, other in itertools.combinations(MODES, 2):
        if not {one, other} <= SAME:
            pairs = zip(formula(one), formula(other), strict=True)
            assert max(abs(a - b).max() for a, b in pairs) > 3e-5, (one, other)


def test_buckets_are_singas():
    for threshold in (0, 2, 3, 10, 45, 74, 120, 200, 10**6):
        sizes = [int(np.prod(shape)) for shape in SHAPES]
        assert exchange.fused(dict(enumerate(sizes)), threshold) == buckets(threshold)
    assert buckets(THRESHOLD) == [[3], [4, 2, 1], [0]]


# Nothing that reaches the threshold is lost.


@pytest.mark.parametrize("size", [2000, 2**15])
@pytest.mark.parametrize("corr", [True, False])
def test_a_thousand_equal_elements_over_the_threshold_all_arrive(size, corr):
    """Defect guarded against: 5% had a place, and of what was equal the first were sent."""
    rows = np.full((REPLICAS, size), 0.3, np.float32)
    places = np.random.default_rng(0).permutation(size)[:1000]
    rows[1, places] = 0.75
    options = {"dist_option": "sparseThreshold", "spars": 0.5, "corr": corr}
    boost = boostax.auto({"singa": options})
    linear = lambda params, batch: jnp.sum(params * batch[0])  # noqa: E731
    with warned(boost.config["reduce"]):
        step = boost.make_train_step(linear, optax.sgd(1.0), mesh=MESH, axis_name="data")
    state = step.init(jnp.zeros(size))
    state, metrics = step(state, rows)
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
    tx = boostax.reduce.threshold_reduce("data", 0.5, capacity=0.01)
    update = at_once(tx)
    for count, capacity in ((328, 0.01), (329, 1.0)):
        rows = np.zeros((REPLICAS, size), np.float32)
        rows[0, :30], rows[2, :count] = 1.0, np.linspace(1.0, 2.0, count)
        mean, state = update(rows)
        assert state.metrics()["capacity"].tolist() == [np.float32(capacity)] * REPLICAS
        assert not np.any(state.residual.local)
        np.testing.assert_allclose(mean[0], rows.sum(0) / REPLICAS, rtol=1e-6)


def test_zeros_need_no_place():
    tx = boostax.reduce.threshold_reduce("data", 0.0, capacity=0.25)
    rows = jnp.zeros((2, 8)).at[:, 3].set(1.0)
    mean, state = at_once(tx)(rows)
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
    tx = boostax.reduce.threshold_reduce("data", capacity=0.01)
    found = sends(updating(tx), [size], MESH)
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
        specs = boostax.states.state_specs(tx, jnp.zeros(grads.shape[1:]), "data")
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
