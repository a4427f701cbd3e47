"""The oracle and the train step: one device, data parallel, weights, keys, model state, aux."""

import dataclasses
import functools
import inspect
import itertools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_cases import CASES
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lanes import spread
from reducing import mesh_of
from training import fit, follow

import boostax

PARAMS = {"w": jnp.linspace(-0.3, 0.4, 12).reshape(4, 3), "b": jnp.zeros(3)}


def token_batch(rows, seed=0):
    """Rows with a mask: every row is worth a different number of tokens, some none."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, 4)).astype(np.float32),
        "y": rng.normal(size=(rows, 3)).astype(np.float32),
        "mask": rng.integers(0, 4, size=(rows,)).astype(np.float32),
    }


def squares(params, batch):
    return jnp.sum((jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]) ** 2, axis=-1)


def token_loss(params, batch):
    """A mean over tokens: 0/0 where a slice has none."""
    weight = batch["mask"].sum()
    loss = jnp.sum(squares(params, batch) * batch["mask"]) / weight
    return loss, boostax.Aux(weight=weight, metrics={"tokens": batch["mask"].sum().astype(int)})


def plain_loss(params, batch):
    return squares(params, batch).mean()


def optimizer(axis):
    parts = [boostax.all_reduce(axis)] if axis else []
    return optax.chain(*parts, optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9))


SIZES = {"data": 8}, {"data": 4, "more": 2}
PLACES = [({}, None), *itertools.product(SIZES, (AxisType.Auto, AxisType.Explicit))]


BATCHES = [*itertools.product([plain_loss, token_loss], [1, 2], PLACES[:2])]
BATCHES += itertools.product([token_loss], [2], PLACES[2:])


@pytest.mark.parametrize(("loss_fn", "microbatches", "where"), BATCHES)
def test_windows_micro_batches_and_replicas_equal_one_big_batch(loss_fn, microbatches, where):
    sizes, kind = where
    mesh, names = mesh_of(kind, **sizes) if sizes else None, tuple(sizes) or None
    batches = [token_batch(32, seed) for seed in range(3)]
    normalize = "weight" if loss_fn is token_loss else "mean"
    tx = boostax.accumulate(optimizer(names), 3, normalize=normalize, axis_name=names)
    tx = boostax.dynamic_loss_scale(tx, axis_name=names)
    how = {"mesh": mesh, "axis_name": names, "microbatches": microbatches}
    state, (*_, metrics) = fit(loss_fn, tx, PARAMS, batches, has_aux=loss_fn is token_loss, **how)
    assert bool(metrics["applied"])
    # The reference: one optimizer step on everything at once.
    whole = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    grads = jax.grad(loss_fn, has_aux=loss_fn is token_loss)(PARAMS, whole)
    plain = optimizer(None)
    grads = grads[0] if loss_fn is token_loss else grads
    updates, _ = plain.update(grads, plain.init(PARAMS), PARAMS)
    expected = optax.apply_updates(PARAMS, updates)
    chex.assert_trees_all_close(state.params, expected, rtol=2e-6, atol=1e-7)
    if loss_fn is token_loss:
        assert int(metrics["tokens"]) == int(batches[-1]["mask"].sum()), "counts are summed"
        np.testing.assert_allclose(metrics["loss"], token_loss(PARAMS, batches[-1])[0], rtol=1e-5)


def test_one_program_for_ever_and_it_aliases_the_state(mesh, caplog):
    tx = boostax.dynamic_loss_scale(optimizer("data"), axis_name="data")
    step = boostax.make_train_step(plain_loss, tx, mesh=mesh, axis_name="data")
    state, batch = step.init(PARAMS), token_batch(32)
    with jax.log_compiles():
        analysis = step.lower(state, batch).compile().memory_analysis()
    assert "Compiling" in caplog.text
    # All but the scaler's flag of the last step, which is written and never read.
    assert analysis.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(state)) - 1
    caplog.clear()
    with jax.log_compiles():
        follow(step, state, [batch] * 3)
    assert "Compiling" not in caplog.text
    assert PARAMS["w"].sum() is not None, "the caller's arrays are not donated"


@pytest.mark.parametrize("microbatches", [1, 4])
def test_keys_differ_by_call_micro_batch_and_replica_and_repeat_by_seed(mesh, microbatches):
    seen = []

    def record(params, batch, *, key):
        noise = jax.random.normal(key, (64,))
        return plain_loss(params, batch), boostax.Aux(metrics={"bits": noise})

    how = {"has_aux": True, "microbatches": microbatches, **over(mesh, True)}
    step = boostax.make_train_step(record, optimizer("data"), **how)
    for _ in range(2):
        state = step.init(PARAMS, key=jax.random.key(3))
        seen += [told["bits"] for told in follow(step, state, [token_batch(32)] * 2)[1]]
    first, second, again, _ = seen
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, second)
    # The mean of n independent normals has variance 1/n; of equal ones 1.
    assert np.var(first) < 3.0 / (8 * microbatches)


def over(mesh, parallel):
    return {"mesh": mesh, "axis_name": "data"} if parallel else {}


STATISTICS = {"mean": jnp.zeros(4), "seen": jnp.zeros((), jnp.int32)}


def statistics_loss(params, batch, *, model_state):
    """A running mean of the inputs, as BatchNorm keeps it."""
    mean = 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0)
    state = {"mean": mean, "seen": model_state["seen"] + 1}
    return plain_loss(params, batch), boostax.Aux(model_state=state)


@pytest.mark.parametrize(("microbatches", "parallel"), spread([4, 1], [True, False]))
def test_model_state_is_threaded_and_averaged(mesh, parallel, microbatches):
    names = "data" if parallel else None
    tx = boostax.dynamic_loss_scale(optimizer(names), axis_name=names)
    how = {"has_aux": True, "microbatches": microbatches, **over(mesh, parallel)}
    step = boostax.make_train_step(statistics_loss, tx, **how)
    state, batch = step.init(PARAMS, model_state=STATISTICS), token_batch(32)
    state, _ = step(state, batch)
    expected = []
    for shard in batch["x"].reshape(8, 4, 4) if parallel else batch["x"][None]:
        mean = np.zeros(4)
        for i in range(microbatches):
            mean = 0.9 * mean + 0.1 * shard[i::microbatches].mean(0)
        expected.append(mean)
    np.testing.assert_allclose(state.model_state["mean"], np.mean(expected, 0), rtol=1e-5)
    assert int(state.model_state["seen"]) == microbatches


@pytest.mark.parametrize(("parallel", "bad"), spread([True, False], [np.nan, np.inf]))
def test_a_skipped_step_leaves_the_whole_train_state_but_the_scaler(mesh, parallel, bad):
    names = "data" if parallel else None
    tx = boostax.accumulate(optimizer(names), 2, axis_name=names)
    tx = boostax.dynamic_loss_scale(tx, axis_name=names)
    step = boostax.make_train_step(statistics_loss, tx, has_aux=True, **over(mesh, parallel))
    state, _ = step(step.init(PARAMS, model_state=STATISTICS), token_batch(32, 0))
    before = jax.device_get(state)
    ruined = token_batch(32, 1)
    ruined["y"][5, 0] = bad  # one row, so one replica; the statistics stay finite
    state, metrics = step(state, ruined)
    assert not bool(metrics["applied"]) and int(metrics["skipped"]) == 1
    after = jax.device_get(state)
    assert int(after.step) == int(before.step) + 1
    kept = lambda state: (state.params, state.model_state, state.opt_state.inner_state)  # noqa: E731
    chex.assert_trees_all_equal(kept(after), kept(before))


def test_statistics_that_overflow_in_the_forward_pass_are_not_kept():
    """Even where the scaler decides only at the window's end."""
    tx = boostax.accumulate(boostax.dynamic_loss_scale(optimizer(None)), 2)
    step = boostax.make_train_step(statistics_loss, tx, has_aux=True)
    ruined = token_batch(32, 1)
    ruined["x"][5, 0] = np.nan
    state, _ = step(step.init(PARAMS, model_state=STATISTICS), ruined)
    np.testing.assert_array_equal(state.model_state["mean"], np.zeros(4))


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("wrap", [lambda tx: tx, boostax.skip_bad_steps, optax.flatten])
@pytest.mark.parametrize("name", "adam sgd adafactor lion rmsprop adadelta muon".split())
def test_a_state_keeps_its_dtypes_with_params_in_bf16(name, wrap, microbatches):
    """Defect guarded against: micro-batches' f32 gradients made Adam's moments f32."""
    how = {"momentum": 0.9} if name == "sgd" else {}
    factory = optax.contrib.muon if name == "muon" else getattr(optax, name)
    tx, params = wrap(factory(1e-3, **how)), {"w": jnp.ones((8, 4), jnp.bfloat16)}
    fn = boostax.value_and_grad(lambda p, x: jnp.mean(x @ p["w"]), microbatches=microbatches)

    def step(params, state, x):
        return boostax.apply_gradients(tx, fn(params, state, x)[1], state, params)

    first = params, tx.init(params)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first)
    assert jax.eval_shape(step, *first, jnp.ones((4, 8))) == types


# Optax's novograd, galore and lbfgs refuse gradients that are wider than the params.
NAMES = """adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb
lars lion nadam nadamw optimistic_adam_v2 polyak_sgd radam rmsprop rprop sgd signum
sm3 yogi contrib.ademamix contrib.cocob contrib.dog contrib.dowg contrib.momo contrib.momo_adam
contrib.muon contrib.prodigy contrib.schedule_free_adamw contrib.sophia"""
APART = ("dim_reduce", "group_loss_scale", "clip_by_global_norm")
REDUCED = [x for x in CASES if not x.name.startswith(APART)]


@pytest.mark.parametrize(
    ("of", "policy", "count"), spread([*REDUCED, *NAMES.split()], [None, "O3", "O2", "O1"], [2, 1])
)
def test_a_state_keeps_its_dtypes_in_a_step(mesh, of, policy, count):
    """Defect guarded against: a reduction before Adam, micro-batches and bf16: f32 moments."""
    if isinstance(of, str):
        factory = operator.attrgetter(of)(optax)
        how = (
            {"learning_rate": 1e-3}
            if "learning_rate" in inspect.signature(factory).parameters
            else {}
        )
        tx, how = factory(**how), {}
    else:
        inner = (
            optax.adam(1e-3) if of.reduces else optax.chain(boostax.all_reduce(), optax.adam(1e-3))
        )
        tx, how = of.make(inner, None), {"mesh": mesh}
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    params = jax.tree.map(lambda x: x.astype(jnp.float32 if policy else jnp.bfloat16), params)
    loss = lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2)  # noqa: E731
    step = boostax.make_train_step(loss, tx, policy=policy, microbatches=count, **how)
    state, batch = step.init(params), jnp.ones((16, 8))
    new, _ = jax.eval_shape(step, state, batch)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)


@pytest.mark.parametrize("how", [{"mesh": True}, {"microbatches": 2}])
def test_a_mask_of_the_rows_belongs_in_the_batch(mesh, how):
    """Defect guarded against: every replica and micro-batch got the mask of all rows."""
    tx = optax.chain(boostax.all_reduce(), optax.sgd(0.1)) if "mesh" in how else optax.sgd(0.1)
    loss = lambda p, x, mask: jnp.mean(p["w"]) * x.mean() * mask.mean()  # noqa: E731
    step = boostax.make_train_step(loss, tx, **how | ({"mesh": mesh} if "mesh" in how else {}))
    with pytest.raises(
        ValueError, match=r"mask must be without .* got \(16,\)\. Pass values of rows"
    ):
        step(step.init(PARAMS), np.ones((16, 4)), mask=np.ones(16))
    step(step.init(PARAMS), np.ones((16, 4)), mask=np.ones(8))


def test_value_and_grad_is_jax_value_and_grad_without_a_scaler():
    batch = token_batch(16)
    loss, grads = boostax.value_and_grad(plain_loss)(PARAMS, (), batch)
    expected, expected_grads = jax.value_and_grad(plain_loss)(PARAMS, batch)
    assert loss == expected
    chex.assert_trees_all_equal(grads, expected_grads)


@pytest.mark.long
def test_held_branches_pass_under_debug_nans():
    params = {f"leaf{i}": jnp.full(3, 0.01 * i) for i in reversed(range(200))}
    loss = lambda params, x: sum(jnp.mean((w - x) ** 2) for w in params.values())  # noqa: E731
    tx = boostax.dynamic_loss_scale(boostax.accumulate(optimizer(None), 2))
    step = boostax.make_train_step(loss, tx)
    ends = []
    for checked in (True, False):
        with jax.debug_nans(checked):
            ends.append(follow(step, step.init(params), [jnp.ones(3)] * 4)[0].params)
    chex.assert_trees_all_equal(*ends)


# What a loss returns beside itself: ``Aux`` is combined, anything else passes through.

VECTOR = {"w": jnp.float32([1.0, -2.0])}
ROWS = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)


def with_logits(params, x):
    logits = x @ params["w"]
    return jnp.mean(logits**2), {"logits": logits, "rows": jnp.int32(len(x))}


def with_scalars(params, x):
    return with_logits(params, x)[0], {"seen": {"mean": x.mean(), "rows": jnp.int32(len(x))}}


LOGITS = jax.jit(lambda x: x @ VECTOR["w"])(ROWS)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mapped", [None, "shard_map", "unchecked", "pmap", "mesh"])
def test_logits_are_each_rows_own(mapped, microbatches):
    """Averaged over micro-batches and replicas, those of one row were mixed with another's."""
    mesh = mesh_of(data=2)
    how = {"axis_name": "data"} if mapped else {}
    how |= {"mesh": mesh} if mapped == "mesh" else {}
    oracle = boostax.value_and_grad(with_logits, has_aux=True, microbatches=microbatches, **how)

    def told(x):
        return oracle(VECTOR, (), x)[0][1]

    if mapped in ("shard_map", "unchecked"):
        lead = lambda x: jax.tree.map(lambda leaf: leaf[None], told(x))  # noqa: E731
        how = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data")}
        aux = jax.jit(jax.shard_map(lead, check_vma=mapped == "shard_map", **how))(ROWS)
    elif mapped == "pmap":
        aux = jax.pmap(told, axis_name="data", devices=jax.devices()[:2])(ROWS.reshape(2, 8, 2))
    else:
        aux = jax.jit(told)(ROWS)
        if mapped == "mesh":
            assert isinstance(aux, boostax.PerReplica)
            aux = aux.local
        else:
            aux = jax.tree.map(lambda leaf: leaf[None], aux)
    replicas = 2 if mapped else 1
    rows, logits = np.asarray(aux["rows"]), np.asarray(aux["logits"])
    each = (microbatches,) if microbatches > 1 else ()
    assert rows.shape == (replicas, *each)
    np.testing.assert_array_equal(rows, 16 // replicas // microbatches)
    assert logits.shape == (replicas, *each, 16 // replicas // microbatches)
    if microbatches > 1:
        logits = logits.swapaxes(1, 2)
    np.testing.assert_allclose(logits.reshape(-1), LOGITS, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_step_reports_scalars_and_refuses_arrays(parallel):
    make = on({"data": 2} if parallel else {}, has_aux=True)
    step = make(with_scalars)
    _, metrics = step(step.init(VECTOR), ROWS)
    np.testing.assert_allclose(metrics["seen/mean"], ROWS.mean(), rtol=1e-6, atol=1e-6)
    assert int(metrics["seen/rows"]) == 16
    step = make(with_logits)
    with pytest.raises(TypeError, match=r"make_train_step: aux must be .*'logits'.*value_and_grad"):
        step(step.init(VECTOR), ROWS)


def test_any_tree_passes_one_micro_batch_as_in_jax():
    """Keys, bools, ``None`` and an aux that is no tree of floats at all."""

    def loss(w, x):
        return (w * x).sum(), (jax.random.key(3), x > 0, None, jnp.int8(4))

    x = jnp.float32([1.0, -1.0])
    expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(2.0, x)[0][1]
    found = jax.jit(lambda w, x: boostax.value_and_grad(loss, has_aux=True)(w, (), x))(2.0, x)[0][1]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype and left.shape == right.shape and (left == right).all()


# Keywords of a call


def weighted_loss(params, batch, *, beta, rows=None, scale=1):
    """A loss with a term whose weight belongs to the call, and a table as long as the batch."""
    penalty = 0 if rows is None else jnp.sum(rows["table"] ** 2) / rows["table"].size
    return scale * plain_loss(params, batch) + beta * jnp.sum(params["w"] ** 2) + penalty


def on(sizes, chain=lambda tx: tx, **options):
    """Return a step over a mesh of some sizes, or over one device."""
    mesh = mesh_of(**sizes) if sizes else None
    tx = chain(optax.chain(*([boostax.all_reduce()] if sizes else []), optax.sgd(0.1)))
    how = {"mesh": mesh, "axis_name": tuple(sizes) if sizes else None, "microbatches": 2}
    return functools.partial(boostax.make_train_step, tx=tx, **how, **options)


COMPILES = "Compiling jit(_checked)"
CODE_PATHS = {
    "one device": on({}),
    "replicas": on({"data": 2}),
    "two axes": on({"data": 2, "more": 2}, boostax.dynamic_loss_scale),
    "sharded": on({"data": 2}, param_specs={"w": P("data"), "b": P()}),
    "frozen": on({"data": 2}, lambda tx: boostax.scheduled_freeze(tx, {"w": 1, "b": 0}, 1)),
}


@pytest.mark.parametrize("code_path", CODE_PATHS)
def test_a_keyword_reaches_the_loss_whole_and_its_values_share_a_program(code_path, caplog):
    """Defect guarded against: a number in the batch was cut like rows, and a step took no other."""
    batch, traced = token_batch(8), []

    def loss(*args, **kwargs):
        traced.append(kwargs["beta"])
        assert kwargs["beta"].shape == () and not kwargs["beta"].weak_type
        assert "rows" not in kwargs or kwargs["rows"]["table"].shape == (8,)
        return weighted_loss(*args, **kwargs)

    step = CODE_PATHS[code_path](loss)
    state, more = step.init(PARAMS), {"rows": {"table": np.arange(8.0)}, "scale": 2}
    with jax.log_compiles():
        step(state, batch, beta=0.5, **more)
    assert COMPILES in caplog.text
    caplog.clear()
    count = len(traced)
    for beta in (0.1, jnp.float32(0.2), jnp.asarray(0.3), np.float32(0.4), np.asarray(0.5)):
        wanted, state = weighted_loss(PARAMS, batch, beta=beta, **more), step.init(PARAMS)
        with jax.log_compiles():
            state, reported = step(state, batch, beta=beta, **more)
        np.testing.assert_allclose(reported["loss"], wanted, rtol=1e-5)
    slope = jax.grad(weighted_loss)(PARAMS, batch, beta=0.5, **more)["w"]
    np.testing.assert_allclose((PARAMS["w"] - state.params["w"]) / 0.1, slope, rtol=1e-4, atol=1e-5)
    assert len(traced) == count and COMPILES not in caplog.text


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_keywords_may_be_traced_committed_or_sharded(kind):
    mesh, devices = mesh_of(data=2, kind=kind), jax.devices()
    batch, tx = token_batch(8), optax.chain(boostax.all_reduce(), optax.sgd(0.0))
    step = boostax.make_train_step(weighted_loss, tx, mesh=mesh)
    table = np.arange(8.0, dtype=np.float32)
    wanted = weighted_loss(PARAMS, batch, beta=0.5, rows={"table": table})
    sharded = {"table": jax.device_put(table, jax.NamedSharding(mesh, P("data")))}
    for beta in (jax.device_put(jnp.float32(0.5), devices[1]), 0.5):
        found = step(step.init(PARAMS), batch, beta=beta, rows=sharded)[1]["loss"]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    traced = lambda state, beta: step(state, step.place(batch), beta=beta)  # noqa: E731
    run = jax.jit(lambda state: jax.lax.scan(traced, state, jnp.arange(3.0)))
    _, reported = run(step.init(PARAMS))
    wanted = [weighted_loss(PARAMS, batch, beta=beta) for beta in range(3)]
    np.testing.assert_allclose(reported["loss"], wanted, rtol=1e-6)


@pytest.mark.parametrize("given", ["active", "depth", "key", "model_state", "scales"])
def test_a_keyword_of_the_steps_own_is_refused(given):
    step = boostax.make_train_step(lambda p, x, **more: jnp.sum(p), optax.sgd(0.1))
    with pytest.raises(ValueError, match=f"keyword must be none of .*got '{given}'. Rename"):
        step(step.init(jnp.ones(2)), jnp.ones(2), **{given: 1.0})


def test_a_keyword_that_the_loss_cannot_take_is_refused():
    step = boostax.make_train_step(plain_loss, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"a function that accepts beta=.* Leave beta= out"):
        step(step.init(PARAMS), token_batch(8), beta=0.1)
    with pytest.raises(TypeError, match=r"<class 'str'> .* at path args\[1\]\['mode'\]"):
        step(step.init(PARAMS), token_batch(8), mode="sum")


@pytest.mark.parametrize("code_path", ["one device", "replicas", "two axes"])
def test_a_program_with_keywords_is_read_without_a_call(code_path):
    step, batch = CODE_PATHS[code_path](weighted_loss), token_batch(8)
    types = lambda batch: jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batch))  # noqa: E731
    state, shapes = step.init(PARAMS), types(batch)
    text = str(step.jaxpr(state, batch, beta=0.1))
    assert text == str(step.jaxpr(state, shapes, beta=jax.ShapeDtypeStruct((), jnp.float32)))
    whole = step.lower(state, batch, beta=0.1).as_text()
    assert whole == step.lower(state, shapes, beta=0.1).as_text()
    with pytest.raises(ValueError, match="leading dimension"):
        step.lower(state, types(token_batch(7)), beta=0.1)
    by_step = boostax.audit(step, state, batch, beta=0.1)
    by_stage = boostax.audit(step.lower(state, batch, beta=0.1))
    # What has been lowered does not say which of its arguments are params.
    pairs = zip(by_step.collectives, by_stage.collectives, strict=True)
    assert all(a == dataclasses.replace(b, uses=a.uses) for a, b in pairs)
    assert boostax.explain(step, state, batch, beta=0.1).parts
    with pytest.raises(ValueError, match="keywords must be left out"):
        boostax.audit(jax.jit(jnp.sin), 1.0, beta=0.1)
    with pytest.raises(ValueError, match="beta must be left out without a train step"):
        boostax.explain(optax.sgd(0.1), PARAMS, beta=0.1)
