"""One rule for the names and the order of arguments; calls of the old form show the new call."""

import inspect
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import boostax
from boostax import compat, config, freeze, model, precision, reduce, states, subspace, testing

PACKAGES = boostax.train, subspace, boostax, testing, compat, config, freeze, model, precision
REDUCTIONS = {"all_reduce", "adasum", "int8_reduce", "threshold_reduce", "top_k_reduce"}
# Beside the wire's: dtypes of a policy, which are of neither, and signatures of Flax and Optax.
DTYPES = {"wire_dtype", "Policy", "NormalizedDense", "MultiSteps"}
MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
W, SGD = jax.device_put(jnp.ones(128), jax.NamedSharding(MESH, jax.P("data"))), optax.sgd(0.1)
SCOPE = {name: x for package in (*PACKAGES, reduce, states) for name, x in vars(package).items()}
SCOPE |= {"optax": optax, "tx": SGD, "inner": SGD, "params": W, "grads": W, "loss_fn": jnp.sum}
SCOPE |= {"opt_state": model.average_params(SGD).init(W), "codec": reduce.Codec()}
SCOPE |= {"value_and_grad_fn": jax.value_and_grad, "Optimizer": boostax.nnx.Optimizer.__init__}
TABLE = boostax._core.checks.table("boostax", "names").items()
RENAMED = {x: y for x, y in TABLE if re.match(r"\w+ (is now|goes by)", y)}
OLD = """averaged_params(opt_state, params); masters(opt_state, params)
local_updates(inner, "data", 2); partial_average(inner, "data", partitions=2)
partial_average(inner, "data", bucket_bytes=30)"""


def test_arguments_have_one_order_and_one_name():
    modules = {name: getattr(x, "__module__", "") for name, x in SCOPE.items() if callable(x)}
    for who in (name for name, x in modules.items() if x.startswith("boostax.")):
        known = inspect.signature(SCOPE[who]).parameters
        axis, names = known.get("axis_name"), [*known]
        kind = "POSITIONAL_OR_KEYWORD" if who in REDUCTIONS else "KEYWORD_ONLY"
        assert axis is None or (axis.kind.name, axis.default) == (kind, None), who
        assert (names[:1] == ["axis_name"]) == (who in REDUCTIONS), who
        assert who in DTYPES or {x for x in names if x.endswith("_dtype")} <= DTYPES, who
        # A function of a chain has the order of Optax's update: gradients, state, params.
        first = [x for x in names if x in ("tx", "params", "opt_state")][:2]
        assert first != ["opt_state", "params"] or known["params"].kind.name == "KEYWORD_ONLY"


@pytest.mark.parametrize("old", [*re.split("; |\n", OLD), *RENAMED])
def test_a_call_of_the_old_form_is_answered_with_one_that_runs(old):
    if old in RENAMED:
        was, now, new = re.match(r"(\w+) \w+ \w+ (\w+): (.*)\.", RENAMED[old]).groups()
        if was != "axis_name" and (who := old.partition("(")[0]) in config.keys.NAMED:
            with pytest.raises(ValueError, match=re.escape(RENAMED[old])):
                boostax.auto({who: {was: "bfloat16"}})
        # Its axis was positional, or its argument had another name.
        old = new.replace("axis_name=", "") if was == "axis_name" else new.replace(now, was)
    with pytest.raises((TypeError, ValueError)) as error:
        eval(old, SCOPE)
    new = re.search(r".*(?:: | is )(.*)\.$", str(error.value))[1]
    assert new.partition("(")[0] == old.partition("(")[0]
    jax.vmap(lambda x: [eval(new, SCOPE), x][1], axis_name="data")(jnp.zeros(2))


def test_without_an_axis_name_the_axis_of_the_step_is_taken():
    specs = lambda **axis: states.state_specs(boostax.accumulate(SGD, 2), W, **axis)  # noqa: E731
    with boostax._core.axes.binding(("data",)):
        assert specs() == specs(axis_name="data")
    for call in ("state_specs(tx, params)", "local_params(params)", "all_reduce().init(params)"):
        with pytest.raises(ValueError, match=r"axis_name must be a mesh axis, got None\..*data"):
            jax.vmap(lambda x, call=call: [eval(call, SCOPE), x][1], axis_name="data")(jnp.ones(2))
