"""A mistake is refused where it is made: who, what, what is allowed, what came, and a hint."""

import functools
import inspect
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_cases import half, two
from recorded import plain

import boostax
from boostax import model, precision, reduce, subspace
from boostax.precision.flax import apply_policy
from boostax.precision.store import Moments
from boostax.subspace.dim_reduce import RULES, RuleName
from boostax.train import has_updated, local_params

inf, nan = float("inf"), float("nan")
SGD = optax.sgd(0.1)
of = functools.partial
accumulate = of(boostax.accumulate, SGD)
dynamic = of(boostax.dynamic_loss_scale, SGD)
static = of(boostax.static_loss_scale, SGD)
microbatch = of(boostax.train.microbatch, jax.value_and_grad(jnp.sum))
value_and_grad = of(boostax.value_and_grad, jnp.sum)
make_train_step = of(boostax.make_train_step, jnp.sum, SGD)

COUNTS = (0, -1, 2**31, True, np.bool_(True), 2.5, np.float32(2.0), "4", None, jnp.arange(2))
SCALES = (0, -1.0, inf, -inf, nan, 1e-39, 1e39, "128", None, [2.0])
DTYPES = ("f16x", "int8", int, "complex64", "bool", 3)
AXES = ((), ("data", "data"), ["data"], 3)
SHARES = (1.2, -0.1, nan, inf, "0.7", True, 1.0)
SPECS = ("O4", "o1", "", "compute", "compute=float16,compute=float16", "w=float16", 3)
by_group = of(precision.group_loss_scale, SGD, labels=half)
average = of(reduce.partial_average, SGD, axis_name="data")
local_updates = of(reduce.local_updates, SGD, axis_name="data")
freeze = of(boostax.scheduled_freeze, SGD)
top_k, threshold = of(boostax.top_k_reduce, "data"), of(reduce.threshold_reduce, "data")
record = subspace.record_trajectory
interval = of(boostax.freeze_schedule, "interval", total_steps=9)
WRAPPERS = [precision.store, precision.check_updates, of(precision.group_loss_scale, labels=half)]
WRAPPERS += [model.average_params, of(boostax.scheduled_freeze, groups=half, schedule=1)]
WRAPPERS += [of(boostax.accumulate, every=2), of(boostax.static_loss_scale, scale=1)]
WRAPPERS += [of(reduce.adasum_delta, axis_name="data"), of(boostax.by_shape, axis_name="data")]
WRAPPERS += [boostax.dynamic_loss_scale, of(reduce.partial_average, axis_name="data", partitions=2)]
ONE = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
PARAMS = {"w": jnp.ones(3)}
SHARDED = jax.device_put(jnp.ones(3), jax.NamedSharding(ONE, jax.P("data")))


def asks(name):
    """The function of that name, which is loaded when it is called, not when this file is read."""

    def function(*args, **kwargs):
        return getattr(boostax, name)(*args, **kwargs)

    function.__name__ = name
    return function


# The factories, and what each argument is refused.
REFUSED = [
    (of(accumulate, every=2), {"every": COUNTS, "dtype": DTYPES, "axis_name": AXES}),
    (of(accumulate, 2), {"normalize": ["avg", "max", None], "rounding": ["stochastic", "up"]}),
    (of(accumulate, 2), {"sums": ["whole", None]}),
    (of(accumulate, 2, dtype="bfloat16"), {"rounding": ["up"]}),
    (make_train_step, {"freeze_driver": ["device"]}),
    (of(make_train_step, mesh=ONE), {"gather": ["int4"]}),
    (of(boostax.train.gather_params, SHARDED, axis_name="data"), {"wire_dtype": ["int4"]}),
    (dynamic, {"init_scale": (*SCALES, 0.5, 2.0**25), "min_scale": SCALES, "max_scale": SCALES}),
    (dynamic, {"growth_factor": [1, 1.0, 0.5, -2, inf, nan, "2", None], "axis_name": AXES}),
    (dynamic, {"backoff_factor": [0, 1, 1.5, -0.5, nan, "0.5", None], "hysteresis": COUNTS}),
    (dynamic, {"growth_interval": COUNTS}),
    (static, {"scale": SCALES}),
    (of(microbatch, microbatches=2), {"microbatches": COUNTS, "dtype": DTYPES}),
    (of(microbatch, microbatches=2), {"normalize": ["weight", "average"]}),
    (value_and_grad, {"microbatches": COUNTS, "axis_name": AXES}),
    (of(make_train_step, mesh=ONE), {"axis_name": ["model", ("data", "model"), *AXES]}),
    (make_train_step, {"shard_optimizer": [True], "gather": ["int8"], "param_specs": [jax.P()]}),
    (of(precision.all_finite, {}), {"axis_name": AXES}),
    (precision.Policy, dict.fromkeys(("param_dtype", "compute_dtype", "output_dtype"), DTYPES)),
    (precision.Policy, {"keep_f32": ["LayerNorm", 3]}),
    (of(boostax.policy, "O1"), {"dtype": DTYPES}),
    (boostax.policy, {"spec": SPECS}),
    (of(apply_policy, policy="O1"), {"module": [None, jnp.sum]}),
    (of(precision.check_updates, SGD), {"axis_name": AXES}),
    (of(precision.store, SGD), {"params": ["bf16", "kahan"], "moments": ["fp8"], "least": [0]}),
    (by_group, {"labels": [{}], "init_scale": [0.5], "min_scale": [0.0], "max_scale": [2.0**61]}),
    (by_group, {"growth_factor": [1.0], "backoff_factor": [1.0], "headroom": [0.5]}),
    (by_group, {"rule": ["guess"], "overflow": ["all"], "axis_name": AXES}),
    (of(boostax.all_reduce, axis_name="data"), {"axis_name": AXES, "op": ["max"]}),
    (of(boostax.all_reduce, "data"), {"bucket_bytes": [0]}),
    (of(boostax.all_reduce, "data"), {"wire_dtype": ["int8"], "clip": [0.0], "divide": ["later"]}),
    (of(reduce.adasum, "data"), {"scope": ["layer"], "wire_dtype": ["int8"], "bucket_bytes": [-1]}),
    (of(reduce.adasum_delta, SGD, axis_name="data"), {"scope": ["all"], "within": [0, True, 0.5]}),
    (top_k, {"density": [0.0, 1.5, {10: 0.1}], "count": [0], "block": [0], "bucket_bytes": [0]}),
    (top_k, {"momentum": [1.0], "wire_dtype": ["int8"], "dense": ["norms"], "bits": [1, "2"]}),
    (of(top_k, error_feedback=False), {"momentum": [0.9], "decay": [0.9]}),
    (of(top_k, bits=2), {"wire_dtype": ["bfloat16"]}),
    (top_k, {"decay": [0, 1.1]}),
    (threshold, {"threshold": [-0.1], "capacity": [0, (0.5, 1.0)]}),
    (threshold, {"block": [-1], "bucket_bytes": [0]}),
    (of(boostax.int8_reduce, "data"), {"block": [0], "rounding": ["up"]}),
    (average, {"partitions": [None, 0, "two", {"a": 0, "b": 2}], "bucket_bytes": [0]}),
    (of(average, bucket_bytes=9), {"partitions": [2]}),
    (of(local_updates, every=2), {"every": [0], "reduction": ["mean"]}),
    (of(local_updates, every=2, outer=None), {"reduction": ["sum"]}),
    (of(local_updates, every=2), {"outer": [3.0], "fragments": [0], "warmup": [-1]}),
    (of(freeze, groups=half, schedule=1), {"moments": ["own"], "schedule": ["interval"]}),
    (of(boostax.freeze_schedule, total_steps=9), {"kind": ["Interval", None, 1, [0, 1]]}),
    (interval, {"total_steps": COUNTS, "frozen_fraction": SHARES, "freeze_p": SHARES[:-1]}),
    (interval, {"seed": [-1, 2**32, True, 0.5, "0"]}),
    (of(boostax.freeze.prefix_groups, PARAMS, n=1), {"n": [0, True, 2.0], "level": [0]}),
    (of(record, size=3), {"size": [0, 1], "every": [0], "start": [-1, 0.5], "dtype": ["int8"]}),
    (of(boostax.dim_reduce, two), {"rule": ["armijo"], "dtype": ["int8", "int4"]}),
    (of(boostax.dim_reduce, two), {"residual": [3.0], "axis_name": AXES}),
    (of(subspace.random_basis, 1.0), {"n_components": [2]}),
    (of(model.average_params, SGD), {"kind": ["mean"], "decay": [1.0], "size": [3], "every": [0]}),
    (of(model.average_params, SGD), {"start": [-1], "dtype": ["bfloat16"]}),
    (of(model.average_params, SGD, "window"), {"decay": [0.9]}),
    (of(model.average_params, SGD, "lawa"), {"size": [0], "dtype": ["int8"]}),
    (model.clip_by_global_norm, {"max_norm": [0.0, "1"]}),
    (model.adagc, {"factor": [0.5], "decay": [1.0], "warmup": [0], "max_norm": [0.0]}),
    (boostax.centralize_gradients, {"axes": ["last"], "layout": ["keras"], "multiple_of": [0]}),
    (of(boostax.describe, "mine"), {"role": ["optimizer"]}),
    *((wrapper, {"inner": (None, 0.1, optax.sgd, "sgd")}) for wrapper in WRAPPERS),
    (of(asks("explain"), params=PARAMS), {"tx": [3]}),
    (of(asks("explain"), SGD, PARAMS), {"batch": [3]}),
    (asks("audit"), {"program": [3]}),
    (of(asks("audit"), jnp.sin, 1.0), {"calls": [0], "depth": [2]}),
]
CASES = [
    pytest.param(make, argument, value, id=f"{who} {argument} {getattr(value, '__name__', value)}")
    for make, arguments in REFUSED
    for who in [getattr(make, "func", make).__name__]
    for argument, values in arguments.items()
    for value in values
]


@pytest.mark.parametrize(("factory", "argument", "value"), CASES)
def test_arguments_out_of_range(factory, argument, value):
    with pytest.raises((ValueError, TypeError)) as raised:
        factory(**{argument: value})
    message, who = str(raised.value), getattr(factory, "func", factory).__name__
    named = rf"{who}: {argument} must be .+, got (?P<got>.+?)\. .+[.)]$"
    assert re.match(named, message, re.DOTALL), message
    assert f"got {value!r}. " in message


def words(hint):
    """The words that a type has for a checker."""
    return {x for y in typing.get_args(hint) for x in ({y} if isinstance(y, str) else words(y))}


PUBLIC = [
    (function, argument)
    for package in (boostax, boostax.train, precision, reduce, boostax.freeze, model, subspace)
    for function in vars(package).values()
    if inspect.isfunction(function) and function.__module__.startswith("boostax")
    for argument, hint in typing.get_type_hints(inspect.unwrap(function)).items()
    # A policy may also be of dtypes, microbatches a number; rules and axes are tables of words.
    if words(hint) and argument not in ("policy", "microbatches", "rules", "axes", "return")
]


@pytest.mark.parametrize(("function", "argument"), PUBLIC)
def test_a_misspelt_word_is_refused_with_those_that_a_checker_knows(function, argument):
    known, messages = words(typing.get_type_hints(inspect.unwrap(function))[argument]), []
    for factory, arguments in REFUSED:
        same = getattr(factory, "func", factory) is function
        for value in arguments.get(argument, ()) if same else ():
            with pytest.raises((ValueError, TypeError)) as raised:
                factory(**{argument: value})
            messages.append(str(raised.value).partition(", got ")[0])
    assert any(all(repr(word) in message for word in known) for message in messages)


TABLES = [(Moments, precision.formats.FORMATS), (model.layouts.LayoutName, model.layouts.LAYOUTS)]
TABLES += [(RuleName, RULES), (boostax.config.dictionary.Level, boostax.config.dictionary.LEVELS)]


@pytest.mark.parametrize(("literal", "table"), TABLES)
def test_the_words_of_a_type_are_those_of_the_table_that_is_read(literal, table):
    assert typing.get_args(literal) == tuple(table)


SCALERS = optax.partition({"a": dynamic(), "b": static(2.0)}, {"w": "a", "v": "b"})
TWO = SCALERS.init({"w": jnp.ones(3), "v": jnp.ones(3)})
WINDOW = optax.chain(accumulate(2))
BACK = subspace.SubspaceRule(failure="back")
MEANT = [
    (of(value_and_grad, policy=3), "policy: spec must be"),
    (of(make_train_step, policy=jnp.float16), "policy: spec must be"),
    (of(make_train_step, policy=["O1"]), "policy: spec must be"),
    (of(boostax.dim_reduce, two, rule=BACK), r"dim_reduce: rule\.failure must be 'reset' or"),
    (of(dynamic, min_scale=2.0**17), r"init_scale must be between .* got 65536\.0"),
    (of(dynamic, max_scale=8.0), r"init_scale must be between .* got 65536\.0"),
    (of(precision.loss_scale, TWO), r"loss_scale: opt_state must contain one .* got 2"),
    (of(precision.scale_loss, jnp.float32(1), TWO), r"loss_scale: opt_state must contain .* got 2"),
    (of(has_updated, SGD.init(PARAMS)), "has_updated: opt_state .* without one"),
    (of(has_updated, dynamic().init(PARAMS)), "has_updated: opt_state .* without one"),
    (of(boostax.flush, WINDOW, WINDOW.init(PARAMS), PARAMS), "flush: tx must be .* hides"),
    (of(boostax.make_train_step, jnp.sum, None), r"make_train_step: tx must be .* got None\. "),
    (of(local_params, PARAMS, axis_name="data"), "local_params: axis_name must be an axis"),
    (of(precision.all_finite, PARAMS, axis_name="data"), "all_finite: axis_name must be an axis"),
    (of(value_and_grad(axis_name="data"), PARAMS["w"], (), jnp.ones(3)), "value_and_grad: axis_na"),
]


def test_arguments_in_range_pass():
    """NumPy and JAX numbers are numbers; a range holds its closed ends."""
    for count in (2, np.int64(2), np.uint8(2), jnp.int32(2)):
        accumulate(count), microbatch(count), dynamic(growth_interval=count, hysteresis=count)
    for scale in (2, np.float32(2), jnp.float16(2), 2.0**-126, float(jnp.finfo(jnp.float32).max)):
        static(scale)
    dynamic(init_scale=2.0**-20, min_scale=2.0**-30, max_scale=1, growth_factor=1.001)
    top_k(1, momentum=0), record(2)
    model.adagc(factor=1)
    boostax.freeze_schedule("progressive", total_steps=2, frozen_fraction=0)


def test_numpy_trees_pass_without_a_warning():
    """NumPy makes f64 of everything; JAX, without x64, f32."""
    params = {"w": np.ones(3)}
    for tx in (accumulate(2), dynamic(), static(1.0)):
        new, _ = boostax.apply_gradients(tx, params, tx.init(params), params)
        assert new["w"].dtype == jnp.float32


def test_hyperparameters_can_be_injected():
    """Then they are traced, and what is callable is taken for a schedule."""
    for factory, argument in ((dynamic, "init_scale"), (static, "scale"), (accumulate, "every")):
        tx = optax.inject_hyperparams(factory.func)(SGD, **{argument: 2})
        state = jax.jit(tx.init)(PARAMS)
        for _ in range(2):
            updates, state = jax.jit(boostax.testing.drawn(tx).update)(PARAMS, state, PARAMS)
        assert float(updates["w"][0]) < 0, factory.func


# What only shows when the step is traced.

REDUCING = {
    "dynamic_loss_scale": of(boostax.dynamic_loss_scale, init_scale=1.0),
    "static_loss_scale": of(boostax.static_loss_scale, scale=1.0),
    "accumulate": of(boostax.accumulate, every=2),
    "all_reduce": lambda inner, axis_name: optax.chain(boostax.all_reduce(axis_name), inner),
}


@pytest.mark.parametrize("bad", [False, True])
def test_shards_agree_besides_the_replicas(bad):
    grid = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    inner = optax.chain(boostax.all_reduce("data"), SGD)
    tx = boostax.static_loss_scale(inner, 1.0, axis_name="data")

    def step(w, whole):
        w, whole = local_params((w, whole), axis_name="data")
        # One shard on one replica.
        here = (jax.lax.axis_index("model") == 2) & (jax.lax.axis_index("data") == 1)
        grads = {"w": jnp.where(here & bad, jnp.nan, w), "whole": whole}
        return tx.update(grads, tx.init(grads), grads)[0]

    specs = {"w": jax.P("model"), "whole": jax.P()}
    mapped = jax.shard_map(step, mesh=grid, in_specs=tuple(specs.values()), out_specs=specs)
    for leaf in jax.jit(mapped)(jnp.ones(8), jnp.ones(3)).values():
        assert (np.asarray(leaf) == 0).all() if bad else (np.asarray(leaf) < 0).all()


@pytest.mark.parametrize("who", REDUCING)
@pytest.mark.parametrize("leaf", [jnp.arange(3), np.zeros(3, jax.dtypes.float0), True], ids=type)
def test_gradients_that_are_none_are_refused(who, leaf):
    tx = REDUCING[who](SGD, axis_name="data" if who == "all_reduce" else None)
    params = {"a": {"n": jnp.ones(3)}, "w": jnp.ones(3)}
    grads, state = {"a": {"n": leaf}, "w": jnp.ones(3)}, tx.init(params)
    before = jax.tree.map(np.array, (params, state))
    got = {np.ndarray: "float0", bool: "bool"}.get(type(leaf), "int32")
    message = rf"{who}: gradients must be floating or complex arrays, got {got} at 'a/n'"
    with pytest.raises(TypeError, match=message):
        tx.update(grads, state, params)
    jax.tree.map(np.testing.assert_array_equal, (params, state), before)
    if who != "all_reduce":
        tx.update(params, state, params)


def weighed(w, batch):
    return jnp.sum(w) * jnp.mean(batch["x"])


def refuse(microbatches, batch, match):
    """Assert that no function of micro-batches splits this batch."""
    with pytest.raises(ValueError, match=match):
        boostax.train.microbatch(jax.value_and_grad(weighed), microbatches)(jnp.ones(2), batch)
    with pytest.raises(ValueError, match=match):
        boostax.value_and_grad(weighed, microbatches=microbatches)(jnp.ones(2), (), batch)


@pytest.mark.parametrize("other", [jnp.ones((3, 2)), jnp.float32(1.0), jnp.ones((0, 2))])
def test_a_stacked_batch_leads_with_as_many_micro_batches_everywhere(other):
    batch = {"y": other} if other.size == 0 else {"x": jnp.ones((4, 2)), "y": other}
    refuse("stacked", batch, r"microbatch: .* be \[micro-batches, rows, .*got {")


def test_a_stacked_batch_has_rows_to_split(mesh):
    """Of the whole batch, not of a replica's part of it."""
    fn = boostax.value_and_grad(weighed, mesh=mesh, axis_name="data", microbatches="stacked")
    w = jax.device_put(jnp.ones(2), jax.NamedSharding(mesh, jax.P()))
    for other in ({"y": jnp.ones(4)}, {"a/b": jnp.ones((3, 8))}):
        with pytest.raises(ValueError, match=r"value_and_grad: .*micro-batches, rows.*: \(4, 8\)"):
            jax.jit(fn)(w, (), {"x": jnp.ones((4, 8))} | other)


@pytest.mark.parametrize("batch", [jnp.ones((6, 2)), jnp.float32(1.0)], ids=["6 rows", "0-d"])
def test_a_batch_that_does_not_divide(mesh, batch):
    got = re.escape(f"at 'x', got {batch.shape}")
    refuse(4, {"x": batch}, f"microbatch: .* by microbatches=4 .* {got}")
    tx = REDUCING["all_reduce"](SGD, axis_name="data")
    step = boostax.make_train_step(weighed, tx, mesh=mesh, axis_name="data", microbatches=2)
    state = step.init(jnp.ones(2))
    with pytest.raises(ValueError, match=f"make_train_step: batch .* = 8 x 2 in its .* {got}"):
        step(state, {"x": batch})
    # The state was not donated to a step that did not run.
    assert bool(step(state, {"x": jnp.ones((16, 2))})[1]["applied"])


@pytest.mark.parametrize("result", [jnp.ones(2), jnp.int32(1), None, (jnp.float32(1), {})], ids=str)
@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_that_is_no_floating_scalar(result, has_aux):
    if has_aux:
        result = result[0] if isinstance(result, tuple) else (result, {})
    with pytest.raises(TypeError, match="value_and_grad: the result of loss_fn must be"):
        boostax.value_and_grad(lambda w, x: result, has_aux=has_aux)(jnp.ones(2), (), jnp.ones(2))


# What is handed to a call at run time.

W = {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}
X = jnp.ones((8, 4))
ADAM = optax.adam(0.1)
SCALED, SUMMED = boostax.dynamic_loss_scale(ADAM), boostax.accumulate(ADAM, 2)
OTHER, SCALE = optax.sgd(0.1, 0.9).init(W), SCALED.init(W)
APPLY, UPDATE = boostax.apply_gradients, SUMMED.update
ORACLE = boostax.value_and_grad(lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2))
STEP = boostax.make_train_step(ORACLE.loss_fn, ADAM)
SUMS = boostax.make_train_step(ORACLE.loss_fn, SUMMED)


def given(**changes):
    return STEP.init(W)._replace(**changes)


def misplaced(what, found):
    return f"{what} must be without an optimizer state, got one with {found}"


def donated(tree):
    jax.tree.map(lambda x: x.delete(), tree := jax.tree.map(jnp.copy, tree))
    return tree


WINDOW = "opt_state must be that of AccumulateState, Window, ScaleByAdamState, got that of "
MOVED = rf"{WINDOW}LossScaleState, ScaleByAdamState\. boostax\.migrate_state\(opt_state, tx, para"
CLASSES = r"must be of its classes, got a dict.* boostax\.migrate_state\(opt_state, tx, params\)"
GONE = r"arguments must be not yet donated, got \['{}.* Use the call's results"
NO_STATE = r"TrainStep: state must be a TrainState, got 'dict'\. Use step\.init\(params\)"
HANDED = [
    (of(STEP, given(params=W | {"c": X}), X), "with the leaves of .*'0/mu/c'.*migrate_state"),
    (of(STEP, given(opt_state=OTHER), X), r"ScaleByAdamState, got .* TraceState\. bo"),
    (of(STEP, given(opt_state=(ADAM.init(W), ())), X), "'0/0/count'.*migrate_state"),
    (of(SUMS, given(opt_state=SCALE), X), f"TrainStep: {MOVED}"),
    (of(SUMS.flush, given(opt_state=SCALE)), f"flush: {MOVED}"),
    (of(APPLY, SUMMED, W, SCALE, W), f"apply_gradients: {MOVED}"),
    (of(boostax.flush, SUMMED, SCALE, W), f"flush: {MOVED}"),
    (of(UPDATE, W, SCALE, W), f"accumulate: {MOVED}"),
    (of(UPDATE, W, SCALE), f"accumulate: {MOVED}"),
    (of(STEP, plain(given()), X), NO_STATE),
    (of(SCALED.init, ADAM.init(W)), "init: " + misplaced("params", "optax.*Adam")),
    (of(ORACLE, SCALE, W, X), misplaced("params", "bo.*LossScaleState")),
    (of(boostax.migrate_state, W, SCALED, SCALE), misplaced("params", "boostax.*Loss")),
    (of(UPDATE, W, W, W), "got that of dict. Restore states into tx.init.params"),
    (of(APPLY, ADAM, W, plain(ADAM.init(W)), W), "Adam.*, got that of list"),
    (of(boostax.metrics, plain(SCALE)), CLASSES),
    (of(ORACLE, W, plain(SCALE), X), CLASSES),
    (of(SCALED.update, W, plain(SCALE), W), "got that of dict. Restore states into tx.init"),
    (of(boostax.flush, SCALED, plain(SCALE), W), "flush.* got that of dict. Restore states"),
    (of(boostax.reshard_state, plain(SCALE), 2), CLASSES),
    (of(STEP, given(), donated(X)), f"TrainStep: {GONE.format('batch')}"),
    (of(ORACLE, donated(W), (), X), GONE.format("params/b")),
    (of(APPLY, SGD, W, SGD.init(W), donated(W)), GONE.format("params/b")),
    (of(boostax.migrate_state, donated(SCALE), SUMMED, W), GONE.format("state/scale")),
    (of(boostax.reshard_state, donated(SCALE), 2), GONE.format("state/scale")),
]


@pytest.mark.parametrize(("call", "message"), MEANT + HANDED, ids=[x for _, x in MEANT + HANDED])
def test_a_call_names_what_it_lacks_and_what_is_wrong_in_what_it_is_handed(call, message):
    """Defect guarded against: ``AttributeError`` for a state of another chain, which names none."""
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_a_state_on_other_devices_is_refused():
    tx = optax.chain(boostax.all_reduce(), ADAM)
    step = boostax.make_train_step(ORACLE.loss_fn, tx, mesh=ONE)
    state = jax.device_put(step.init(W), jax.devices()[1])
    with pytest.raises(ValueError, match=r"incompatible devices .* argument state\.step "):
        step(state, X)
    step(jax.device_put(state, step.shardings(state)), X)


def test_a_right_state_of_another_structure_passes_and_an_error_of_others_stays():
    def failing(updates, state, params=None):
        raise KeyError("mine")

    tx = optax.chain(optax.clip(1.0), ADAM, optax.GradientTransformation(lambda p: (), failing))
    for call in (of(APPLY, tx, W), of(boostax.accumulate(tx, 1).update, W)):
        state = tx.init(W) if call.func is APPLY else boostax.accumulate(tx, 1).init(W)
        with pytest.raises(KeyError, match="mine"):
            call(state, W)
    # Orbax restores an empty state as None.
    APPLY(optax.chain(optax.clip(1.0), ADAM), W, (None, ADAM.init(W)), W)
