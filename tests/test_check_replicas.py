"""Steps of replicas whose bits differ are skipped, and the replicas are named."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import processes
import pytest
from check_replicas import PARAMS, batch_of, flipped, flipped_somewhere, loss_fn, optimizer
from training import follow, own_step

import boostax
from boostax.precision import check_replicas, raise_if_diverged, replicas

WORKER = processes.ROOT / "tests" / "workers" / "replicas.py"


def bits(tree):
    shards = (shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards)
    return [np.asarray(shard.data).tobytes() for shard in shards]


@pytest.fixture(scope="module")
def checked(mesh):
    step = boostax.make_train_step(loss_fn, optimizer(), mesh=mesh)
    state, _ = step(step.init(PARAMS), batch_of(0))
    return step, jax.tree.map(np.asarray, state), step.shardings(state)


def test_a_flipped_bit_anywhere_holds_the_step_and_names_its_replica(checked):
    """Every leaf counts: params, moments, the loss scale, the counters of the check itself."""
    (step, kept, where), rng = checked, np.random.default_rng(0)
    for _ in range(120):
        state = jax.device_put(kept, where)
        (params, opt_state), device = flipped_somewhere((state.params, state.opt_state), rng)
        before = bits((params, opt_state.inner_state))
        state, metrics = step(state._replace(params=params, opt_state=opt_state), batch_of(1))
        assert not metrics["applied"] and metrics["differing_replica"] == device
        assert bits((state.params, state.opt_state.inner_state)) == before
        with pytest.raises(RuntimeError, match=f"replica {device}: "):
            raise_if_diverged(state)


def test_a_difference_is_named_by_leaf_and_stays_named(checked):
    step, kept, where = checked
    state = jax.device_put(kept, where)
    params = state.params | {"v": flipped(state.params["v"], 5, 3, 30)}
    for held in (1, 2):
        state, metrics = step(state._replace(params=params), batch_of(1))
        params = state.params
        assert metrics["skipped"] == held and metrics["differing_replica"] == 5
    with pytest.raises(RuntimeError, match="at call 3:\n  replica 5: params/v\nRestore"):
        raise_if_diverged(state)
    with pytest.raises(RuntimeError, match="replica 5: params/v"):
        raise_if_diverged(state.opt_state, state.params)


def test_a_clean_run_is_the_run_without_it(mesh):
    inner = boostax.dynamic_loss_scale(optax.chain(boostax.all_reduce(), optax.adam(1e-2)))
    ends = []
    for tx in (inner, check_replicas(inner, every=2)):
        step = boostax.make_train_step(loss_fn, tx, mesh=mesh, microbatches=2)
        state = step.init(PARAMS, key=jax.random.key(0))
        ends.append(follow(step, state, map(batch_of, range(9)))[0])
    chex.assert_trees_all_equal(ends[0].params, ends[1].params)
    chex.assert_trees_all_equal(ends[0].opt_state, ends[1].opt_state.inner_state)
    raise_if_diverged(ends[1])
    assert ends[1].opt_state.compared == 8 and ends[1].opt_state.calls == 9


def test_every_is_the_number_of_calls_between_comparisons(mesh):
    step = boostax.make_train_step(loss_fn, optimizer(every=3), mesh=mesh)
    state, _ = step(step.init(PARAMS), batch_of(0))
    state = state._replace(params=state.params | {"w": flipped(state.params["w"], 2, 9, 12)})
    _, told = follow(step, state, map(batch_of, range(1, 4)))
    assert [bool(metrics["applied"]) for metrics in told] == [True, True, False]
    # A replica that compares at other calls differs from the others at each of these.
    state = step.init(PARAMS)
    own = state.opt_state._replace(calls=flipped(state.opt_state.calls, 4, 0, 0))
    _, metrics = step(state._replace(opt_state=own), batch_of(0))
    assert not metrics["applied"] and metrics["differing_replica"] == 4


PLACES = {
    "HSDP": ((2, 4), ("replica", "fsdp"), jax.P("fsdp")),
    "FSDP": ((8,), ("fsdp",), jax.P("fsdp")),
    "tensor parallel": ((4, 2), ("data", "model"), jax.P(None, "model")),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_shard_is_compared_with_its_copies(place):
    shape, names, spec = PLACES[place]
    mesh = jax.make_mesh(shape, names, (jax.sharding.AxisType.Auto,) * len(names))
    axis = names if "model" not in names else "data"
    how = {"mesh": mesh, "axis_name": axis, "param_specs": {"w": spec, "h": jax.P(), "v": jax.P()}}
    step = boostax.make_train_step(loss_fn, optimizer(), **how)
    state, metrics = step(step.init(PARAMS), batch_of(0))
    assert metrics["applied"]
    for name, device in (("w", 5), ("h", 6)):
        own = jax.tree.map(jnp.copy, state)
        params = own.params | {name: flipped(own.params[name], device, 1, 7)}
        _, metrics = step(own._replace(params=params), batch_of(1))
        # A shard without copies is not compared.
        alone = place == "FSDP" and name == "w"
        assert metrics["applied"] == alone
        replica = {"HSDP": device, "FSDP": device, "tensor parallel": device // 2}[place]
        assert metrics["differing_replica"] == (-1 if alone else replica)


@pytest.mark.parametrize("checks", [True, False])
def test_in_a_mapped_function_of_ones_own(mesh, checks):
    tx = check_replicas(optax.chain(boostax.all_reduce("data"), optax.adam(1e-2)), axis_name="data")
    each = own_step(tx, boostax.value_and_grad(loss_fn, axis_name="data"))
    specs = {"in_specs": (jax.P(), jax.P(), jax.P("data")), "out_specs": jax.P()}
    step = jax.jit(jax.shard_map(each, mesh=mesh, check_vma=checks, **specs))
    put = lambda tree: jax.device_put(tree, jax.NamedSharding(mesh, jax.P()))  # noqa: E731
    params, state, _ = step(put(PARAMS), put(tx.init(PARAMS)), batch_of(0))
    assert state.applied and state.compared == 8
    _, held, _ = step(params | {"w": flipped(params["w"], 7, 2, 3)}, state, batch_of(1))
    assert not held.applied and held.culprits[0] == 7


@pytest.fixture
def texts(monkeypatch):
    """The texts of which checksums are compared."""
    found, checksum = [], replicas._checksum
    monkeypatch.setattr(replicas, "_checksum", lambda text: found.append(text) or checksum(text))
    return found


def test_a_loop_of_ones_own_passes_the_program_of_its_loss(mesh, texts):
    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, jax.P()))
    tx, grad_fn = boostax.on_mesh(optimizer(), params), boostax.value_and_grad(loss_fn, mesh=mesh)

    @jax.jit
    def step(params, state, batch):
        _, grads = grad_fn(params, state, batch)
        loss_program = str(jax.make_jaxpr(grad_fn.loss_at(batch))(params))
        return boostax.apply_gradients(tx, grads, state, params, loss_program=loss_program)

    _, state = step(params, tx.init(params), batch_of(0))
    assert state.applied and any("f32[32,8]" in text and "tanh" in text for text in texts)
    raise_if_diverged(state)


SCHEDULE = boostax.freeze_schedule("continuous", total_steps=8, frozen_fraction=0.6)
AROUND = {
    "accumulate": lambda tx: boostax.accumulate(tx, every=2),
    "scheduled_freeze": lambda tx: boostax.scheduled_freeze(tx, {"w": 0, "h": 1, "v": 2}, SCHEDULE),
    "average_params": boostax.model.average_params,
}


@pytest.mark.parametrize("around", AROUND)
def test_inside_other_parts_it_compares_what_it_is_given(mesh, around, texts):
    step = boostax.make_train_step(loss_fn, AROUND[around](optimizer()), mesh=mesh)
    state, _ = follow(step, step.init(PARAMS), map(batch_of, range(6)))
    assert any("tanh" in text for text in texts)
    raise_if_diverged(state)
    state = state._replace(params=state.params | {"v": flipped(state.params["v"], 3, 5, 7)})
    state, (*_, metrics) = follow(step, state, map(batch_of, range(2)))
    assert metrics["differing_replica"] == 3
    with pytest.raises(RuntimeError, match="replica 3: params/v"):
        raise_if_diverged(state)


def test_params_of_each_replica_are_not_compared(mesh):
    local = boostax.reduce.local_updates(optax.sgd(0.1), every=2)
    step = boostax.make_train_step(loss_fn, check_replicas(local), mesh=mesh)
    _, told = follow(step, step.init(PARAMS), map(batch_of, range(3)))
    assert all(metrics["applied"] and metrics["differing_replica"] == -1 for metrics in told)


def test_a_check_that_compares_nothing_is_refused(mesh):
    """One line forgotten: in plain jit without ``on_mesh`` no replica is seen."""
    tx = check_replicas(optax.sgd(0.1))
    put = lambda tree: jax.device_put(tree, jax.NamedSharding(mesh, jax.P()))  # noqa: E731
    step = jax.jit(lambda grads, state, params: boostax.apply_gradients(tx, grads, state, params))
    _, state = step(put(PARAMS), put(tx.init(PARAMS)), put(PARAMS))
    with pytest.raises(ValueError, match=r"compared only 1 of 8 devices\. Wrap the chain in"):
        raise_if_diverged(state)
    with pytest.raises(ValueError, match="a CheckReplicasState"):
        raise_if_diverged(optax.sgd(0.1).init(PARAMS))


def test_a_checkpoint_of_replicas_that_differ_is_refused(checked, tmp_path):
    _, kept, where = checked
    state = jax.device_put(kept, where)
    with boostax.checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        bad = state._replace(params=state.params | {"w": flipped(state.params["w"], 6, 0, 0)})
        with pytest.raises(ValueError, match=r"got 'params/w' on .*6.* Restore a checkpoint"):
            checkpointer.save(2, bad)
        assert checkpointer.steps() == [1]


KINDS = ["f4", "f2", "i4", "u1", "?", "c8", "bfloat16", "float8_e4m3fn", "i8"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_flip_of_each_dtype_changes_the_sums(kind):
    dtype = jnp.dtype(kind)
    with jax.enable_x64(dtype.itemsize == 8 and kind != "c8"):
        x = np.arange(1, 13).reshape(3, 4).astype(dtype)
        sums = jax.jit(lambda x: boostax._core.copies.sums([x])[0])
        plain = np.asarray(sums(x))
        count = 1 if kind == "?" else 8 * dtype.itemsize
        for word, bit in [(w, b) for w in (0, 7, 11) for b in range(count)]:
            other = x.copy()
            other.reshape(-1).view(np.uint8)[word * dtype.itemsize + bit // 8] ^= 1 << bit % 8
            assert np.asarray(sums(other))[1] != plain[1], (word, bit)


def test_two_processes_that_differ_end_with_a_table(tmp_path):
    differences = "seed,rate,rows,code,version"
    with processes.Processes([WORKER, tmp_path], 2, tmp_path, DIFFERENCES=differences) as run:
        printed = run.end()
    rows = {"seed": "params/w", "rate": "update", "version": "versions"}
    for name, leaf in (rows | dict.fromkeys(("rows", "code"), "batch or loss")).items():
        found = printed.split(f"{name}: after call 1, applied 0: ")[1].split("Restore")[0]
        assert f"replica 1: {leaf}" in found, printed
        assert ("batch or loss" in found) == (name in ("rows", "code")), printed


def test_a_shard_has_copies_in_a_mapped_function_of_ones_own():
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), (jax.sharding.AxisType.Auto,) * 2)
    names, shard = ("replica", "fsdp"), jax.NamedSharding(mesh, jax.P("fsdp"))
    tx = check_replicas(optax.chain(boostax.all_reduce(names), optax.sgd(1.0)), axis_name=names)

    def each(x, state):
        grads = boostax.train.local_params(x, axis_name=names)
        return boostax.apply_gradients(tx, grads, state, x)[1]

    how = {"in_specs": (jax.P("fsdp"), jax.P()), "out_specs": jax.P(), "axis_names": {*names}}
    x = jax.device_put(jnp.ones(8), shard)
    step = jax.jit(jax.shard_map(each, mesh=mesh, **how))
    assert step(x, tx.init(x)).applied
    held = step(flipped(x, 6, 0, 3), tx.init(x))
    assert not held.applied and held.culprits[0] == 6


def test_what_pmap_stacks_is_raised():
    tx = check_replicas(optax.chain(boostax.all_reduce("data"), optax.sgd(1.0)), axis_name="data")
    stacked = jnp.ones(8).at[3].set(2.0)
    step = jax.pmap(lambda x: boostax.apply_gradients(tx, x, tx.init(x), x), axis_name="data")
    with pytest.raises(RuntimeError, match="replica 3: params"):
        raise_if_diverged(step(stacked)[1], stacked)
