"""``on_mesh``: optimizers, reductions and gates on params that XLA shards, and what they cost."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import lanes
from reducing import PLACEMENTS, loss_fn, mesh_of, the_one
from training import own_step

import boostax
from boostax.testing import drawn

WIDTH, DEPTH, ROWS = 64, 2, 64


def placed(tree, mesh, specs):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def initial():
    random = np.random.default_rng(0)
    normal = lambda *shape: random.normal(size=shape).astype(np.float32) / 8  # noqa: E731
    return [{"up": normal(WIDTH, 128), "down": normal(128, WIDTH)} for _ in range(DEPTH)]


def explicit_loss(params, x):
    """As an Explicit mesh wants it: the sharding of a contraction of what is sharded is said."""
    for layer in params:
        x = x + jnp.matmul(jnp.tanh(x @ layer["up"]), layer["down"], out_sharding=P())
    return jnp.mean(x**2)


def rows(index):
    return np.random.default_rng(index).normal(size=(ROWS, WIDTH)).astype(np.float32)


def trained(tx, specs, *, kind=AxisType.Auto, share=False, steps=5, calls=1):
    """Losses, params and state of a loop of one's own."""
    mesh = mesh_of(kind, data=4, model=2)
    params = placed(initial(), mesh, [specs] * DEPTH)
    tx = boostax.on_mesh(tx, params, axis_name="data", shard_optimizer=share)
    loss = loss_fn if kind == AxisType.Auto else explicit_loss
    oracle = boostax.value_and_grad(loss, mesh=mesh, axis_name="data")
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))  # noqa: E731
    return followed(tx, oracle, params, map(put, map(rows, range(steps * calls))))


def scaled_window(axis, *inner, **how):
    """A scaler around a window of two calls."""
    inner = [boostax.all_reduce(axis), *inner] if axis else inner
    window = boostax.accumulate(optax.chain(*inner), 2, axis_name=axis, **how)
    return boostax.dynamic_loss_scale(window, axis_name=axis)


def followed(tx, oracle, params, batches):
    step, state, losses = own_step(tx, oracle), tx.init(params), []
    for x in batches:
        params, state, value = step(params, state, x)
        losses.append(float(value))
    return losses, params, state


def assert_near(found, wanted, tolerance):
    chex.assert_trees_all_close(found, wanted, rtol=tolerance, atol=tolerance)


NORM = optax.snapshot("grad_norm", optax.tree.norm)
CLIPPED = NORM, optax.clip_by_global_norm(1.0), optax.adamw(1e-3)


@functools.cache
def clipped_alone():
    """The same on one device."""
    tx, params = scaled_window(None, *CLIPPED), jax.tree.map(jnp.asarray, initial())
    return followed(tx, boostax.value_and_grad(loss_fn), params, map(rows, range(10)))


# The contract goes through the placements on an explicit mesh, too.
LOOPS = [(place, kind) for place in PLACEMENTS for kind in (AxisType.Auto, AxisType.Explicit)]
QUICK_LOOPS = [x for x in LOOPS if x[1] == AxisType.Auto or x[0] == "tensor parallel, FSDP"]


@pytest.mark.parametrize("loop", lanes(LOOPS, QUICK_LOOPS), ids=str)
@pytest.mark.parametrize("share", lanes([False, True], [True]), ids=["whole", "ZeRO-1"])
@pytest.mark.parametrize("sums", ["local", "sharded"])
def test_a_loop_of_ones_own_is_one_device(loop, sums, share):
    """Scaler and window included, five steps; sums in shards are ordinary arrays."""
    placement, kind = loop
    tx = scaled_window("data", *CLIPPED, sums=sums)
    losses, params, state = trained(tx, PLACEMENTS[placement], kind=kind, share=share, calls=2)
    wanted, whole, one = clipped_alone()
    np.testing.assert_allclose(losses, wanted, rtol=2e-6)
    assert_near(params, whole, 2e-6)
    assert_near(*(optax.tree.get(x, "grad_norm") for x in (state, one)), 2e-6)
    assert int(boostax.metrics(state)["optimizer_steps"]) == 5
    assert isinstance(state.inner_state.window, boostax.PerReplica) == (sums == "local")
    for x, spec in zip(params, [PLACEMENTS[placement]] * DEPTH, strict=True):
        for name, leaf in x.items():
            assert leaf.sharding.is_equivalent_to(NamedSharding(leaf.sharding.mesh, spec[name]), 2)


def test_a_window_in_shards_takes_reduced_gradients_as_they_are():
    inner, grads = optax.chain(boostax.all_reduce("data"), optax.sgd(1.0)), jnp.arange(1.0, 7.0)
    tx = boostax.accumulate(inner, 1, sums="sharded", axis_name="data")
    update = lambda _: tx.update(grads, tx.init(grads), grads)[0]  # noqa: E731
    assert_near(the_one(jax.vmap(update, axis_name="data")(jnp.arange(6))), -grads, 1e-6)


def by_leaf(fn):
    """An optimizer that steps along ``fn`` of each gradient."""
    direction = optax.stateless(lambda grads, params: jax.tree.map(fn, grads))
    return lambda learning_rate: optax.chain(direction, optax.sgd(learning_rate))


NAMES = (
    "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars "
    "lion nadam nadamw novograd radam rmsprop rprop sgd sign_sgd sm3 yogi"
).split()
CONTRIB = "ademamix dadapt_adamw dog dowg muon prodigy simplified_ademamix".split()
OPTIMIZERS = {
    **{name: getattr(optax, name) for name in NAMES if hasattr(optax, name)},
    **{x: getattr(optax.contrib, x) for x in CONTRIB if hasattr(optax.contrib, x)},
    "roll": by_leaf(lambda x: jnp.roll(x, 1, 0)),
    "reversal": by_leaf(lambda x: x[::-1]),
    "fan-in": by_leaf(lambda x: x / x.shape[0]),
    "by position": by_leaf(lambda x: x * jnp.arange(1.0, 1 + len(x))[:, None] / len(x)),
    "noise": lambda rate: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(rate)),
}
if hasattr(optax.contrib, "galore"):
    OPTIMIZERS["galore"] = lambda rate: optax.contrib.galore(rate, rank=4)


@pytest.mark.parametrize("name", lanes(OPTIMIZERS, ("adafactor", "lamb", "muon", "roll", "noise")))
def test_any_optimizer_with_a_sharded_state(name):
    """As where all of it is whole: it sees global arrays."""
    chain = optax.chain(boostax.all_reduce("data"), OPTIMIZERS[name](1e-3))
    losses, params, state = trained(chain, PLACEMENTS["replicated"], share=True)
    wanted, whole, _ = trained(chain, PLACEMENTS["replicated"])
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_near(params, whole, 1e-5)
    for leaf in jax.tree.leaves(state):
        divides = any(size and size % 4 == 0 for size in leaf.shape)
        if divides and jnp.issubdtype(leaf.dtype, jnp.inexact):
            assert leaf.addressable_data(0).nbytes * 4 == leaf.nbytes, leaf.sharding


def test_there_are_at_least_34_of_them():
    assert len(OPTIMIZERS) >= 34


def test_a_nan_of_one_shard_is_seen_in_plain_jit(mesh):
    """XLA:CPU's all-reduce of maxima drops a NaN."""
    for row in (0, 13, 63):
        x = np.ones((64, 8), np.float32)
        x[row, 3] = np.nan
        for spec in (P("data"), P(None, "data"), P()):
            array = jax.device_put(x, NamedSharding(mesh, spec))
            assert not jax.jit(boostax.precision.all_finite)({"w": array})


def test_a_window_around_on_mesh_is_told_to_go_inside(mesh):
    params = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P()))
    tx = boostax.accumulate(boostax.on_mesh(boostax.all_reduce("data"), params), 4)
    grads = boostax.PerReplica(jnp.ones((8, 8, 8)))
    with pytest.raises(ValueError, match=r"inside on_mesh: on_mesh\(accumulate\(chain\("):
        tx.update(grads, tx.init(params), params)


def test_an_axis_that_the_mesh_lacks_is_refused():
    params = placed(initial(), mesh_of(data=4, model=2), [PLACEMENTS["HSDP"]] * DEPTH)
    with pytest.raises(ValueError, match="on_mesh: axis_name must be among the mesh's axes"):
        boostax.on_mesh(optax.sgd(0.1), params, axis_name="batch")


def test_two_replica_axes():
    """Slices and the devices in them; AdaSum between the slices, a mean within."""
    mesh = mesh_of(slice=2, data=2, model=2)
    names = ("slice", "data")
    random = np.random.default_rng(1)
    params = {"w": random.normal(size=(16, 8)).astype("f"), "b": np.ones(8, "f")}
    sharded, whole = {"w": P(None, "model"), "b": P("model")}, {"w": P(), "b": P()}
    grads = {k: random.normal(size=(4, *x.shape)).astype("f") for k, x in params.items()}
    for reduction, specs in (
        (boostax.all_reduce(names), sharded),
        (optax.chain(boostax.all_reduce("data"), boostax.all_reduce("slice")), sharded),
        (boostax.adasum("slice", within="data"), sharded),
        (boostax.int8_reduce(names), whole),
    ):
        window = boostax.accumulate(optax.chain(reduction, optax.adam(1e-2)), 2, axis_name=names)
        tx = boostax.dynamic_loss_scale(window, axis_name=names)

        def train(params, grads, tx=drawn(tx)):
            step = lambda carry, _: (boostax.apply_gradients(tx, grads, *carry[::-1]), None)  # noqa: E731
            return jax.lax.scan(step, (params, tx.init(params)), length=4)[0][0]

        inner = jax.vmap(train, in_axes=(None, 0), axis_name="data")
        split = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), grads)
        wanted = jax.jit(jax.vmap(inner, in_axes=(None, 0), axis_name="slice"))(params, split)
        there = placed(params, mesh, specs)
        mine = boostax.on_mesh(tx, there, axis_name=names)
        state = mine.init(there)
        step = jax.jit(functools.partial(boostax.apply_gradients, drawn(mine)))
        lead = {k: P(names, *spec) for k, spec in specs.items()}
        for _ in range(4):
            there, state = step(boostax.PerReplica(placed(grads, mesh, lead)), state, there)
        assert_near(there, jax.tree.map(lambda x: x[0, 0], wanted), 3e-6)


def test_an_audit_counts_what_xla_places():
    chain = optax.chain(boostax.all_reduce("data"), optax.adam(1e-3))
    how = {"mesh": mesh_of(data=8), "axis_name": "data", "shard_optimizer": True}
    step = boostax.make_train_step(loss_fn, chain, **how)
    state = step.init(jax.tree.map(jnp.asarray, initial()))
    size = 4 * sum(x.size for x in jax.tree.leaves(initial()))
    assert boostax.audit(step, state, rows(0)).wire_bytes.most >= 2 * 7 / 8 * size


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 4, "model": 2}], ids=str)
@pytest.mark.parametrize("make", [boostax.all_reduce, boostax.int8_reduce], ids=["mean", "int8"])
def test_gradients_that_jax_left_unreduced_are_taken(sizes, make):
    """On an Explicit mesh, from ``jax.grad`` of params that are said to be reduced."""
    mesh = mesh_of(AxisType.Explicit, **sizes)
    spec = P(None, "model") if "model" in sizes else P()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 4)).astype("f")
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(jnp.asarray(rng.normal(size=(4, 6)).astype("f")), spec)}
        batch = jax.device_put(x, P("data"))
        tx = boostax.on_mesh(optax.chain(make("data"), optax.sgd(0.1)), params, axis_name="data")
        traced = []

        def loss(params, batch):
            return jnp.mean((batch @ params["w"]) ** 2)

        @jax.jit
        def unreduced(params, state, batch):
            grads = jax.grad(loss)(jax.reshard(params, P(*spec, reduced={"data"})), batch)
            traced.append(jax.typeof(grads["w"]).sharding.spec.unreduced)
            return boostax.apply_gradients(tx, grads, state, params)

        local = own_step(tx, boostax.value_and_grad(loss, mesh=mesh, axis_name="data"))
        found, _ = unreduced(params, tx.init(params), batch)
        expected, _, _ = local(params, tx.init(params), batch)
    assert traced == [frozenset({"data"})]
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6, atol=1e-7)
    assert found["w"].sharding.is_equivalent_to(params["w"].sharding, 2)


@pytest.mark.filterwarnings("ignore:.*all_reduce after all_reduce")
def test_a_sum_behind_a_reduction_is_refused():
    """It would be as many times too large as there are replicas; a mean is the same again."""
    params = placed(initial(), mesh_of(data=4, model=2), [PLACEMENTS["replicated"]] * DEPTH)
    grads = boostax.PerReplica(jax.tree.map(lambda x: jnp.stack([x] * 4), params))
    mean, total = boostax.all_reduce("data"), boostax.all_reduce("data", op="sum")

    def moved(*parts):
        tx = boostax.on_mesh(optax.chain(*parts, optax.sgd(1.0)), params, axis_name="data")
        return tx.update(grads, tx.init(params), params)[0]

    assert_near(moved(mean, mean), moved(mean), 0)
    assert_near(moved(total), jax.tree.map(lambda x: -4 * x, params), 1e-6)
    for before in (mean, total):
        with pytest.raises(ValueError, match="all_reduce: gradients must be local"):
            moved(before, total)


@pytest.mark.parametrize("placement", ["replicated", "FSDP"])
def test_a_stacked_batch_and_a_scan_of_ones_own_do_what_micro_batches_do(placement):
    """The same losses and params as of a batch that is cut here, and one reduction."""
    mesh = mesh_of(data=4, model=2)
    params = placed(initial(), mesh, [PLACEMENTS[placement]] * DEPTH)
    tx = optax.chain(boostax.all_reduce("data"), optax.adam(1e-2))
    tx = boostax.on_mesh(tx, params, axis_name="data")
    local, cut, stacked = (
        boostax.value_and_grad(loss_fn, mesh=mesh, axis_name="data", microbatches=count)
        for count in (1, 4, "stacked")
    )

    def scanned(params, state, batch):
        add = lambda total, rows: (jax.tree.map(jnp.add, total, local(params, state, rows)), None)  # noqa: E731
        types = jax.eval_shape(local, params, state, batch[0])
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)
        total, _ = jax.lax.scan(add, zeros, batch)
        return jax.tree.map(lambda x: x / len(batch), total)

    whole = np.concatenate([rows(index) for index in range(4)])
    # Micro-batch i has rows i, i + 4, ... of it.
    parts = whole.reshape(ROWS, 4, WIDTH).swapaxes(0, 1)
    whole = jax.device_put(whole, NamedSharding(mesh, P("data")))
    parts = jax.device_put(parts, NamedSharding(mesh, P(None, "data")))
    ends = []
    for gradient, batch in ((cut, whole), (stacked, parts), (scanned, parts)):
        step, state = own_step(tx, gradient), tx.init(params)
        audit = boostax.audit(step, params, state, batch, params=params)
        assert audit.reductions == pytest.approx(1, abs=0.01)
        ends.append(step(params, state, batch))
    assert_near(ends[1], ends[0], 1e-6)
    assert_near(ends[2], ends[0], 1e-6)
    losses = [jax.jit(fn.loss_at(x))(params) for fn, x in ((cut, whole), (stacked, parts))]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_a_python_number_beside_traced_arrays_is_a_constant():
    """As an argument of ``jit`` it would be traced; where nothing is, it is trained, as in JAX."""
    fn = boostax.value_and_grad(lambda p, x: p["w"] * p["rate"] * x.mean())
    assert float(fn({"w": 3.0, "rate": 2.0}, (), jnp.ones(2))[1]["rate"]) == 3
    seen = jax.jit(lambda w: fn({"w": w, "rate": 2.0}, (), jnp.ones(2))[1])(3.0)
    assert float(seen["w"]) == 2 and seen["rate"] is None
    # An integer is never trained.
    assert fn({"w": jnp.ones(()), "rate": 2}, (), jnp.ones(2))[1]["rate"] is None


def test_a_python_number_among_the_arguments_of_jit_is_named(mesh):
    w = jax.device_put(jnp.ones(2), NamedSharding(mesh, P()))
    tx = optax.chain(boostax.all_reduce("data"), optax.sgd(0.1))
    tx = boostax.on_mesh(tx, {"w": w, "rate": 2.0}, axis_name="data")
    fn = boostax.value_and_grad(lambda p, x: jnp.mean(p["rate"] * p["w"] * x), mesh=mesh)
    step = own_step(tx, fn)
    with pytest.raises(ValueError, match=r"got another path, 'rate'.*Python numbers.*jnp\.asarray"):
        step({"w": w, "rate": 2.0}, tx.init({"w": w}), jnp.ones((8, 2)))
