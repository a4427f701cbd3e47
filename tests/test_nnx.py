"""``boostax.nnx.Optimizer`` does what ``nnx.Optimizer`` does, and writes less."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import train_loops
from contract_cases import CASES
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import lanes
from reducing import mesh_of
from train_loops import AXIS, PLAIN, REPLICAS, NnxNet, Put, mse

import boostax
from boostax.nnx import Optimizer

TECHNIQUES = {case.name: case for case in (PLAIN, *CASES) if not case.own_params}
REDUCED = optax.chain(boostax.all_reduce("data"), optax.sgd(0.1))


class Net(nnx.Module):
    """Statistics, dropout, and enough params to count."""

    def __init__(self, width=64, rate=0.5):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.norm = nnx.BatchNorm(4 * width, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(jnp.tanh(self.norm(self.up(x)))))


class Layers(nnx.Module):
    """Params alone."""

    def __init__(self, width=64):
        self.up = nnx.Linear(width, 4 * width, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(4 * width, width, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def loss_fn(model, x):
    prediction = model(x)
    return jnp.mean((prediction - 1) ** 2), prediction


def rows(seed, width=64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(16, width)), jnp.float32)


def a_mesh(replicas=4, kind=AxisType.Auto):
    return mesh_of(kind, data=replicas, model=8 // replicas)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit])
def mesh(request):
    return a_mesh(4, request.param)


def placed(model, mesh, spec=lambda x: P()):
    where = lambda x: jax.device_put(x, NamedSharding(mesh, spec(x)))  # noqa: E731
    nnx.update(model, jax.tree.map(where, nnx.state(model)))
    return model


def with_optimizer(model, tx, mesh=None, wrt=nnx.Param):
    """The model, on all devices of a mesh if there is one, and its optimizer."""
    model = placed(model, mesh) if mesh else model
    return model, Optimizer(model, tx, wrt=wrt, axis_name="data" if mesh else None)


@nnx.jit
def train_step(model, optimizer, x):
    (loss, _), grads = optimizer.value_and_grad(loss_fn, has_aux=True)(model, x)
    optimizer.update(model, grads)
    return loss


def in_nobodys_loop(put):
    """The largest difference from the technique in nobody's loop."""
    model, axis = NnxNet(nnx.Rngs(0)), AXIS if put.replicas > 1 else None
    graph, start = nnx.split(NnxNet(nnx.Rngs(0)))
    loss = lambda model, batch, scales=None: mse(model(batch["x"], scales), batch)  # noqa: E731
    if axis:
        placed(model, mesh_of(**{AXIS: REPLICAS}))
    optimizer = Optimizer(model, put.chain(), wrt=nnx.Param, axis_name=axis)

    @nnx.jit
    def step(model, optimizer, batch):
        optimizer.update(model, optimizer.value_and_grad(loss)(model, batch)[1])

    for batch in put.batches:
        step(model, optimizer, batch)
    pure = lambda params, *given, **more: loss(nnx.merge(graph, params), *given, **more)  # noqa: E731
    trained = nnx.as_pure(nnx.state(model))
    return train_loops.apart(put, train_loops.Run(nnx.as_pure(start), pure, trained, {}))


QUICK = ["plain Optax", "accumulate_inside_the_scaler", "all_reduce", "scheduled_freeze"]


@pytest.mark.parametrize("name", lanes(TECHNIQUES, QUICK))
def test_a_technique_trains_as_in_nobodys_loop(name):
    assert in_nobodys_loop(Put(TECHNIQUES[name])) <= 2e-6


OWN = "tx must be a chain that keeps params equal on all replicas"


REFUSED = [
    (boostax.reduce.local_updates(optax.sgd(0.1), 2), {"axis_name": "data"}, OWN),
    (boostax.reduce.partial_average(optax.sgd(0.1), 2), {"axis_name": "data"}, OWN),
    (optax.sgd(0.1), {"shard_optimizer": True}, "must be False without an axis_name"),
]


@pytest.mark.parametrize(("tx", "how", "match"), REFUSED)
def test_chains_are_refused_that_it_has_no_place_for(tx, how, match):
    model = placed(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), a_mesh())
    with pytest.raises(ValueError, match=match):
        Optimizer(model, tx, wrt=nnx.Param, **how)


def test_it_trains_as_flax_does_to_the_bit():
    """Also statistics and draws: dropout of one device is that of ``nnx.value_and_grad``."""
    one, other = Net(), Net()
    mine = Optimizer(one, optax.adamw(1e-2), wrt=nnx.Param)
    theirs = nnx.Optimizer(other, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        oracle = getattr(optimizer, "value_and_grad", nnx.value_and_grad)
        (loss, aux), grads = oracle(loss_fn, has_aux=True)(model, x)
        return loss, aux, optimizer.update(model, grads)

    for seed in range(3):
        results = step(one, mine, rows(seed)), step(other, theirs, rows(seed))
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), *results)
    states = (jax.tree.leaves(nnx.as_pure(nnx.state(x))) for x in ((one, mine), (other, theirs)))
    for x, y in zip(*states, strict=True):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, atol=1e-6)


def test_a_held_call_writes_no_params():
    """Defect guarded against: ``nnx.Optimizer`` adds zeros to all of them."""
    traffic = {}
    for kind in (Optimizer, nnx.Optimizer):
        tx, model = boostax.accumulate(optax.adam(1e-3), 4), nnx.Linear(128, 512, rngs=nnx.Rngs(0))
        optimizer = kind(model, tx, wrt=nnx.Param)

        @functools.partial(nnx.jit, donate_argnums=(0, 1))
        def step(model, optimizer, x):
            optimizer.update(model, nnx.grad(lambda model: model(x).mean())(model))

        found = boostax.audit(step, model, optimizer, jnp.ones((2, 128)), params=nnx.state(model))
        traffic[kind] = found.traffic.least / found.params_bytes
    # The gradient is read, the window read and written; params are read by the loss.
    assert traffic[Optimizer] <= 4.1
    assert traffic[nnx.Optimizer] >= traffic[Optimizer] + 2


def test_a_skipped_step_never_was():
    model, optimizer = with_optimizer(Net(rate=0.0), boostax.dynamic_loss_scale(optax.adamw(1e-2)))
    train_step(model, optimizer, rows(0))
    kept = lambda: nnx.as_pure(nnx.state(model, (nnx.Param, nnx.BatchStat)))  # noqa: E731
    before = jax.tree.map(jnp.copy, (kept(), nnx.as_pure(optimizer.opt_state).inner_state))
    train_step(model, optimizer, rows(0).at[0, 0].set(jnp.inf))
    after = kept(), nnx.as_pure(optimizer.opt_state).inner_state
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert int(boostax.metrics(optimizer.opt_state)["skipped"]) == 1 and optimizer.step[...] == 2


@pytest.mark.parametrize("microbatches", [1, 2])
def test_sharded_params_are_reduced_once_and_stay(mesh, microbatches):
    whole, inner = Layers(), optax.adamw(1e-2, eps=1e-4)
    sharded = placed(Layers(), mesh, lambda x: P("data") if jnp.ndim(x) == 2 else P())
    plain = Optimizer(whole, inner, wrt=nnx.Param)
    chain = boostax.accumulate(optax.chain(boostax.all_reduce("data"), inner), 2, axis_name="data")
    scaled = boostax.dynamic_loss_scale(chain, axis_name="data")
    optimizer = Optimizer(sharded, scaled, wrt=nnx.Param, axis_name="data")
    loss_fn = lambda model, x: jnp.mean((model(x) - 1) ** 2)  # noqa: E731

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(model, optimizer, x):
        loss, grads = optimizer.value_and_grad(loss_fn, microbatches=microbatches)(model, x)
        optimizer.update(model, grads)
        return loss

    batch = jax.device_put(rows(0), NamedSharding(mesh, P("data")))
    params = nnx.state(sharded, nnx.Param)
    assert boostax.audit(step, sharded, optimizer, batch, params=params, calls=2).reductions <= 1.01
    for seed in range(2):
        for x in np.split(np.asarray(rows(seed)), 2):
            x = jax.device_put(np.repeat(x, 2, 0), NamedSharding(mesh, P("data")))
            jax.block_until_ready(step(sharded, optimizer, x))
        plain.update(whole, plain.value_and_grad(loss_fn)(whole, rows(seed))[1])
    for name in ("up", "down"):
        mine, theirs = (getattr(x, name).kernel[...] for x in (sharded, whole))
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), atol=2e-5)
        assert mine.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)


def test_replicas_draw_apart_and_agree_on_statistics(mesh):
    model, optimizer = with_optimizer(Net(), REDUCED, mesh)
    same = jax.device_put(jnp.tile(rows(0)[:4], (4, 1)), NamedSharding(mesh, P("data")))

    @nnx.jit
    def predict(model, optimizer, x):
        return optimizer.value_and_grad(loss_fn, has_aux=True)(model, x)[0][1].local

    seen = np.asarray(predict(model, optimizer, same))
    assert seen.shape == (4, 4, 64) and not np.allclose(seen[0], seen[1])
    mean = np.asarray(model.norm.mean[...])
    np.testing.assert_allclose(mean, 0.01 * np.asarray(model.up(rows(0)[:4]).mean(0)), atol=1e-6)
    assert int(model.dropout.rngs.count[...]) == 1


@pytest.mark.parametrize("microbatches", [1, 2])
def test_statistics_that_a_loss_leaves_unchanged_keep_their_bits(microbatches):
    """Defect guarded against: a frozen backbone's drifted, as means over 3 replicas round."""
    mesh, model = mesh_of(data=3), Net()
    model.norm.mean.set_value(rows(1, 256)[0])
    optimizer = Optimizer(placed(model, mesh), REDUCED, wrt=nnx.Param, axis_name="data")
    model.norm.eval()
    x = jax.device_put(jnp.ones((12, 64)), NamedSharding(mesh, P("data")))
    grad_fn = optimizer.value_and_grad(loss_fn, has_aux=True, microbatches=microbatches)
    nnx.jit(lambda model, x: grad_fn(model, x)[1])(model, x)
    np.testing.assert_array_equal(np.asarray(model.norm.mean[...]), rows(1, 256)[0])


def test_metrics_and_weights_of_a_loss_are_combined():
    model, optimizer = with_optimizer(nnx.Linear(64, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1))

    def weighed(model, x, mask):
        total = mask.sum()
        told = boostax.Aux(weight=total, metrics={"rows": jnp.int32(len(x))})
        return (model(x)[:, 0] * mask).sum() / jnp.maximum(total, 1), told

    mask = (jnp.arange(16) < 5).astype(jnp.float32)
    oracle = optimizer.value_and_grad(weighed, has_aux=True, microbatches=4)
    (loss, told), grads = oracle(model, rows(0), mask)
    np.testing.assert_allclose(loss, weighed(model, rows(0), mask)[0], rtol=1e-6)
    assert int(told.metrics["rows"]) == 16 and told.model_state is None
    by_hand = nnx.grad(lambda model: weighed(model, rows(0), mask)[0])(model)
    np.testing.assert_allclose(grads["kernel"], by_hand["kernel"][...], atol=1e-6)


def test_what_is_given_by_name_is_not_split():
    model, optimizer = with_optimizer(nnx.Linear(64, 1, rngs=nnx.Rngs(0)), REDUCED, a_mesh(4))
    loss = lambda model, x, *, scale, kind: scale.sum() * model(x).mean() * len(kind)  # noqa: E731
    value, _ = optimizer.value_and_grad(loss)(model, rows(0), scale=jnp.ones(3), kind="ab")
    np.testing.assert_allclose(value, 6 * model(rows(0)).mean(), rtol=1e-5)


def test_a_loss_that_closes_over_its_batch_is_refused_over_replicas():
    """Defect guarded against: each of them computed the loss of all rows."""
    model, optimizer = with_optimizer(nnx.Linear(64, 1, rngs=nnx.Rngs(0)), REDUCED, a_mesh(4))
    with pytest.raises(TypeError, match=r"batch must be given .*Pass the batch to"):
        optimizer.value_and_grad(lambda model: model(rows(0)).mean())(model)
    # Replicas that draw apart have no need of rows.
    drawing, drawn = with_optimizer(Net(64), REDUCED, a_mesh(4))
    drawn.value_and_grad(lambda model: model(jnp.ones((2, 64))).mean())(drawing)
    alone = boostax.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    alone.value_and_grad(lambda model: model(rows(0)).mean())(model)


def test_a_checkpoint_of_an_open_window_goes_on(tmp_path):
    """Saved and restored as Flax's guide does with ``nnx.Optimizer``."""

    def make():
        return with_optimizer(Net(rate=0.0), windowed("data"), a_mesh(4))

    def pure(model, optimizer):
        return nnx.to_pure_dict(nnx.state((model, optimizer), nnx.Not(nnx.RngState)))

    (model, optimizer), other = make(), make()
    for seed in range(3):
        jax.block_until_ready(train_step(model, optimizer, rows(seed)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", pure(model, optimizer))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", pure(*other))
    state = nnx.state(other, nnx.Not(nnx.RngState))
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(other, state)
    for seed in range(3, 6):
        losses = [train_step(*each, rows(seed)) for each in ((model, optimizer), other)]
        assert float(losses[0]) == float(losses[1])


def test_what_is_frozen_leaves_the_backward_pass():
    def dots(depth):
        tx = boostax.scheduled_freeze(optax.adam(1e-3), [["up", "norm"], "down"], depth)
        model, optimizer = with_optimizer(Net(rate=0.0), tx)
        text = train_step.lower(model, optimizer, rows(0)).lowered.as_text()
        train_step(model, optimizer, rows(0))
        return text.count("dot_general"), model

    (every, _), (fewer, model) = dots(0), dots(1)
    # The weight gradients of the first layer and the gradient of the second's input.
    assert (every, fewer) == (5, 3)
    np.testing.assert_array_equal(model.up.kernel[...], Net().up.kernel[...])
    assert not np.array_equal(model.down.kernel[...], Net().down.kernel[...])


def test_a_policy_lowers_the_products():
    model, optimizer = with_optimizer(Layers(), optax.sgd(0.1))

    def grads_of(policy):
        def loss(model, x):
            dtypes.append(model.up.kernel.dtype)
            return jnp.mean(model(x).astype(jnp.float32))

        return optimizer.value_and_grad(loss, policy=policy)(model, rows(0))[1]

    dtypes = []
    low, whole = grads_of("compute=bfloat16"), grads_of(None)
    assert [*dtypes, low["up"]["kernel"].dtype] == [jnp.bfloat16, jnp.float32, jnp.float32]
    np.testing.assert_allclose(low["up"]["kernel"], whole["up"]["kernel"], atol=1e-3)


def lora():
    return nnx.LoRA(64, 4, 64, base_module=nnx.Linear(64, 64, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))


def test_params_that_are_not_trained_stay_where_they_are(mesh):
    """Defect guarded against: base weights of LoRA, averaged over the replicas in every call."""
    model = placed(lora(), mesh, lambda x: P("data") if x.shape == (64, 64) else P())
    optimizer = Optimizer(model, REDUCED, wrt=nnx.LoRAParam, axis_name="data")
    before = np.asarray(model.base_module.kernel[...])
    batch = jax.device_put(rows(0), NamedSharding(mesh, P("data")))
    trained = nnx.state(model, nnx.LoRAParam)
    assert boostax.audit(train_step, model, optimizer, batch, params=trained).reductions <= 1.01
    losses = [float(train_step(model, optimizer, batch)) for _ in range(3)]
    assert losses[2] < losses[0]
    kernel = model.base_module.kernel[...]
    np.testing.assert_array_equal(np.asarray(kernel), before)
    assert kernel.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)


def test_a_loss_that_sets_params_or_leaves_a_variable_behind_is_refused():
    model, optimizer = with_optimizer(lora(), optax.sgd(0.1), wrt=nnx.LoRAParam)

    def setting(model, x):
        model.base_module.bias[...] += 1
        return model(x).mean()

    def leaving(model, x):
        model.seen = nnx.Intermediate(x)
        return model(x).mean()

    sets = r"that sets no nnx\.Param, got 'base_module/bias'"
    leaves = "a function that does not change which variables"
    apart = r"a floating scalar, got \(ShapedArray\(float32\[]\), ShapedArray\(float32\[16,64]\)\)"
    for loss, match in ((setting, sets), (leaving, leaves), (loss_fn, apart)):
        with pytest.raises((ValueError, TypeError), match=match):
            optimizer.value_and_grad(loss)(model, rows(0))


def test_metadata_of_the_state_say_where_it_is(mesh):
    """A checkpoint is restored by them; a window of each replica's own leads with the replicas."""
    with jax.set_mesh(mesh):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
        model = nnx.Linear(64, 8, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))
        tx = boostax.accumulate(optax.chain(boostax.all_reduce("data"), optax.adam(0.1)), 2)
        state = nnx.state(Optimizer(model, tx, wrt=nnx.Param, axis_name="data"))
    named, arrays = map(jax.tree.leaves, nnx.as_pure((nnx.get_partition_spec(state), state)))
    assert len(named) == len(arrays) and any(x.ndim == 3 for x in arrays)
    for spec, x in zip(named, arrays, strict=True):
        assert NamedSharding(x.sharding.mesh, spec).is_equivalent_to(x.sharding, x.ndim)


def same(one, other):
    pairs = zip(*map(jax.tree.leaves, nnx.as_pure((one, other))), strict=True)
    assert all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


def windowed(axis):
    adam = optax.adam(optax.warmup_constant_schedule(0.0, 0.1, 10))
    return boostax.accumulate(optax.chain(boostax.int8_reduce(), adam) if axis else adam, 4)


def warmed(axis, kind=AxisType.Auto):
    """A model after five calls of a window of four, and its optimizer."""
    mesh, batch = a_mesh(4, kind), rows(0)
    model = placed(nnx.Linear(64, 4, rngs=nnx.Rngs(0)), mesh)
    optimizer = Optimizer(model, windowed(axis), wrt=nnx.Param, axis_name=axis)
    for _ in range(5):
        train_step(model, optimizer, jax.device_put(batch, NamedSharding(mesh, P(axis))))
    return model, optimizer


@pytest.mark.parametrize("axis", [None, "data"])
def test_a_changed_chain_goes_on_in_place_as_the_functional_form_does(axis):
    """Defect guarded against: counts and a scale began anew, and none came back."""
    model, optimizer = warmed(axis)
    optimizer.flush(model)
    variables, tx = nnx.state(model, nnx.Param), boostax.dynamic_loss_scale(windowed(axis))
    params = nnx.as_pure(variables)
    pure = boostax.on_mesh(tx, params, axis_name=axis) if axis else tx
    expected = boostax.migrate_state(nnx.as_pure(optimizer.opt_state), pure, params)
    same(boostax.migrate_state(optimizer, pure, variables)[0], expected[0])
    assert optimizer.migrate(model, tx) == expected[1] and not expected[1].dropped
    same(optimizer.opt_state, expected[0])
    counts = boostax.metrics(optimizer)
    assert (counts["optimizer_steps"], counts["micro_step"]) == (2, 0)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_state_is_put_back_for_another_number_of_replicas(kind):
    old, layer = warmed("data", kind)[1], nnx.Linear(64, 4, rngs=nnx.Rngs(0))
    model, new = with_optimizer(layer, windowed("data"), a_mesh(2, kind))
    where = jax.tree.map(lambda x: x.sharding, nnx.as_pure(new.opt_state))
    for other, message in (
        (old, r"shaped \(2, 4\) at .*boostax\.reshard_state\(state, n\)"),
        (optax.trace(0.9).init(nnx.state(model)), r"that of TraceState\. boostax\.migrate_state"),
    ):
        with pytest.raises(ValueError, match=message):
            new.set_state(other)
    half = boostax.reshard_state(old, 2)
    same(half, boostax.reshard_state(jax.device_get(nnx.as_pure(old.opt_state)), 2))
    new.opt_state = half
    same(new.opt_state, half)
    assert where == jax.tree.map(lambda x: x.sharding, nnx.as_pure(new.opt_state))
