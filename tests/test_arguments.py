"""One rule for the names and the order of arguments; calls of the old form show the new call."""

import inspect
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import boostax
from boostax import compat, config, freeze, model, precision, reduce, states, subspace, testing
from boostax._core import axes, checks
from boostax.nnx import Optimizer

PACKAGES = boostax.train, subspace, boostax, testing, compat, config, freeze, model, precision
REDUCTIONS = {"all_reduce", "adasum", "int8_reduce", "threshold_reduce", "top_k_reduce"}
# Beside the wire's: dtypes of a policy, which are of neither, and signatures of Flax and Optax.
DTYPES = {"wire_dtype", "Policy", "NormalizedDense", "MultiSteps"}
MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
W = jax.device_put(jnp.ones(128), jax.NamedSharding(MESH, jax.P("data")))
SGD = optax.sgd(0.1)
SCOPE = {name: x for package in (*PACKAGES, reduce, states) for name, x in vars(package).items()}
SCOPE |= {"optax": optax, "tx": SGD, "inner": SGD, "params": W, "grads": W, "loss_fn": jnp.sum}
SCOPE |= {"opt_state": model.average_params(SGD).init(W), "codec": reduce.Codec()}
SCOPE["value_and_grad_fn"] = jax.value_and_grad
OLD = """
all_reduce("data", dtype="float16"); top_k_reduce("data", 0.1, value_dtype="float16")
threshold_reduce("data", value_dtype="float16"); masters(opt_state, params)
gather_params(params, dtype="int8", axis_name="data"); averaged_params(opt_state, params)
accumulate(inner, 4, accumulator_dtype="bfloat16"); all_finite(grads, "data")
microbatch(value_and_grad_fn, 2, accumulator_dtype="bfloat16"); local_params(params, "data")
value_and_grad(loss_fn, accumulator_dtype="bfloat16"); by_shape(inner, ("data",))
make_train_step(loss_fn, tx, accumulator_dtype="bfloat16"); compress(codec, "data", decay=0.5)
state_specs(tx, params, "data", replicas=2); adasum_delta(inner, "data", scope="tree")
local_updates(inner, "data", every=2); local_updates(inner, "data", 2)
partial_average(inner, "data", 2); partial_average(inner, "data", partitions=2)
partial_average(inner, "data", bucket_bytes=30)"""
OLD = re.split(r"; |\n", OLD.strip())


def test_arguments_have_one_order_and_one_name():
    calls = {name: x for name, x in SCOPE.items() if inspect.isfunction(x) or inspect.isclass(x)}
    ours = {name: x for name, x in calls.items() if x.__module__.startswith("boostax.")}
    for who, call in (ours | {"Optimizer": Optimizer.__init__}).items():
        known = inspect.signature(call).parameters
        axis, names = known.get("axis_name"), [*known]
        if axis is not None:
            kind = axis.POSITIONAL_OR_KEYWORD if who in REDUCTIONS else axis.KEYWORD_ONLY
            assert axis.kind is kind and axis.default is None, who
        assert (names[:1] == ["axis_name"]) == (who in REDUCTIONS), who
        assert who in DTYPES or {x for x in names if x.endswith("_dtype")} <= DTYPES, who
        # A function of a chain has the order of Optax's update: gradients, state, params.
        first = [x for x in names if x in ("tx", "params", "opt_state")][:2]
        assert first != ["opt_state", "params"] or known["params"].kind.name == "KEYWORD_ONLY"


@pytest.mark.parametrize("old", OLD)
def test_a_call_of_the_old_form_is_answered_with_one_that_runs(old):
    with pytest.raises((TypeError, ValueError)) as error:
        eval(old, SCOPE)
    new = re.search(r".*(?:: | is )(.*)\.$", str(error.value))[1]
    assert new.partition("(")[0] == old.partition("(")[0]
    jax.vmap(lambda x: [eval(new, SCOPE), x][1], axis_name="data")(jnp.zeros(2))


@pytest.mark.parametrize("key", [x for x in checks.table("boostax", "names") if "_dtype=" in x])
def test_every_old_form_in_the_table_is_tried_and_a_key_of_a_configuration_too(key):
    who, _, name = key.removesuffix("=)").partition("(")
    assert any(re.match(rf"{who}\(.*{name}=", old) for old in OLD)
    if who in config.keys.NAMED:
        with pytest.raises(ValueError, match=re.escape(checks.replacement(key))):
            boostax.auto({who: {name: "bfloat16"}})


def test_without_an_axis_name_the_axis_of_the_step_is_taken():
    specs = states.state_specs(boostax.accumulate(SGD, 2), W, axis_name="data")
    with axes.binding(("data",)):
        assert states.state_specs(boostax.accumulate(SGD, 2), W) == specs
    for call in ("state_specs(tx, params)", "local_params(params)", "all_reduce().init(params)"):
        with pytest.raises(ValueError, match=r"axis_name must be a mesh axis, got None\..*data"):
            jax.vmap(lambda x, call=call: [eval(call, SCOPE), x][1], axis_name="data")(jnp.ones(2))
