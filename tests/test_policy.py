"""Each part of a step works in the dtype that its policy says, and in no other."""

import functools
import typing

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import NamedSharding, P
from training import follow

import boostax
from boostax.precision.flax import apply_policy
from boostax.precision.policy import Level

f16, bf16, f32 = (jnp.dtype(name) for name in ("float16", "bfloat16", "float32"))
LEVELS = typing.get_args(Level)


@pytest.mark.parametrize("low", [f16, bf16])
def test_policies_by_name(low):
    level = functools.partial(boostax.policy, dtype=low.name)
    assert level("O0") == boostax.precision.Policy()
    assert level("O1") == boostax.precision.Policy(f32, low, f32, "all but matmuls")
    assert level("O2") == boostax.precision.Policy(f32, low, f32, boostax.policy("O2").keep_f32)
    assert level("O3") == boostax.precision.Policy(low, low, low)
    by_dtypes = level(f" output={low.name} , params=bfloat16")
    assert by_dtypes == boostax.precision.Policy(bf16, f32, low)


def test_o2_keeps_norms_and_nothing_else():
    norms = ["LayerNorm_0", "encoder/norm1", "bn2", "block/ln", "gn_3", "RMSNorm"]
    others = ["Dense_0", "column", "begin/kernel", "Conv_bnx"]
    assert [name for name in norms + others if boostax.policy("O2").keeps(f"{name}/scale")] == norms


DTYPES = [
    (boostax.policy("O0"), f32, f32, f32, f32),
    (boostax.policy("O1"), f32, f32, f32, f32),
    (boostax.policy("O2"), f16, f32, f16, f32),
    (boostax.policy("O3"), f16, f16, f16, f16),
    (boostax.precision.Policy(compute_dtype=f16, keep_f32=("kernel$",)), f32, f16, f16, f32),
]


@pytest.mark.parametrize(("rules", "kernel", "scale", "inputs", "output"), DTYPES)
def test_dtypes_inside_a_wrapped_function(rules, kernel, scale, inputs, output):
    seen = {}

    def model(params, x, y):
        seen.update(params=params, x=x, y=y)
        return params["norm"]["scale"].sum(), jnp.int32(1)

    params = {"Dense": {"kernel": jnp.ones(2)}, "norm": {"scale": jnp.ones(2)}, "n": jnp.int32(3)}
    x = {"x": jnp.ones(2, bf16), "ids": jnp.arange(2), "wave": jnp.ones(2, jnp.complex64)}
    result = rules.wrap(model)(params, x, y=jnp.ones(2, bf16))
    params = {"Dense": {"kernel": kernel}, "norm": {"scale": scale}, "n": jnp.int32}
    x = {"x": inputs, "ids": jnp.int32, "wave": jnp.complex64}
    assert jax.tree.map(jnp.result_type, seen) == {"params": params, "x": x, "y": bf16}
    assert jax.tree.map(jnp.result_type, result) == (output, jnp.int32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("stored", [f32, bf16])
def test_gradients_arrive_in_the_params_own_dtype(level, stored):
    params = {"w": jnp.ones((2, 2), stored), "norm": jnp.ones(2, stored)}
    loss = lambda p, x: jnp.sum(x @ p["w"] * p["norm"])  # noqa: E731
    grads = jax.grad(boostax.policy(level).wrap(loss))(params, jnp.ones((2, 2)))
    assert jax.tree.map(jnp.result_type, grads) == dict.fromkeys(params, stored)


# O1 on any function: products in the low dtype, all else in f32.

FUNCTIONS = {
    "matmul": lambda w, x: jnp.tanh(x @ w),
    "einsum": lambda w, x: jnp.einsum("ij,kj->ik", jnp.exp(x), w),
    "conv": lambda w, x: jnp.tanh(jax.lax.conv(x[None, None], w[None, None], (1, 1), "SAME")),
    "jit": lambda w, x: jax.jit(lambda x: jnp.tanh(x @ w))(x),
    "scan": lambda w, x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, 3)[0],
    "while": lambda w, x: jax.lax.while_loop(lambda y: y.sum() < 99, lambda y: y + (y @ w) ** 2, x),
    "cond": lambda w, x: jax.lax.cond(x.sum() > 99, lambda: jnp.tanh(x), lambda: jnp.tanh(x @ w)),
    "remat": lambda w, x: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x),
    "custom_jvp": lambda w, x: jax.nn.relu(x @ w),
    "softmax": lambda w, x: jax.nn.softmax(x @ w),
    "vmap": lambda w, x: jax.vmap(lambda row: jnp.tanh(row @ w))(x),
    "grad": lambda w, x: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w) ** 2))(x),
    "gather": lambda w, x: w[jnp.array([1, 0])] @ x,
    "random": lambda w, x: jax.random.normal(jax.random.key(0), x.shape) @ w,
    "nested": lambda w, x: jax.lax.map(jax.checkpoint(lambda row: jax.jit(jnp.dot)(row, w)), x),
}
# What moves f16 numbers to and from a product, and what carries them out of a call, loop or branch.
MOVES = {"convert_element_type", "transpose", "broadcast_in_dim", "empty2", "jit", "scan", "cond"}
ARRAYS = list(jax.random.normal(jax.random.key(0), (2, 8, 8)) / 2)
PRODUCTS = {"dot_general", "conv_general_dilated"}


def low_primitives(fn, *args):
    """Names of what gives an f16 result; and whether there is a product that does not."""
    found = set()
    for eqn, _ in boostax._core.interpret.equations(jax.make_jaxpr(fn)(*args).jaxpr):
        if any(getattr(var.aval, "dtype", None) == f16 for var in eqn.outvars):
            found.add(eqn.primitive.name)
        elif eqn.primitive.name in PRODUCTS:
            found.add("another product")
    return found


def near(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0.02 * abs(b).max())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_o1_lowers_products_and_nothing_else(name):
    fn, wrapped = FUNCTIONS[name], boostax.policy("O1").wrap(FUNCTIONS[name])
    low = low_primitives(wrapped, *ARRAYS)
    assert low & PRODUCTS and low <= PRODUCTS | {"convert_element_type"}
    mean = lambda f: jax.grad(lambda w, x: jnp.mean(f(w, x) ** 2))  # noqa: E731
    if name != "while":
        assert low_primitives(mean(wrapped), *ARRAYS) <= PRODUCTS | MOVES

    def results(f):
        mapped = jax.vmap(f, (None, 0))(ARRAYS[0], ARRAYS[1][None])
        return f(*ARRAYS), (f if name == "while" else mean(f))(*ARRAYS), mapped

    result, expected = (jax.jit(functools.partial(results, f))() for f in (wrapped, fn))
    assert result[0].dtype == f32
    near(result, expected)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["matmul", "jit", "scan", "while", "cond", "remat", "custom_jvp"])
def test_o1_around_and_inside_shard_map(mesh, name, check_vma):
    fn, level = FUNCTIONS[name], boostax.policy("O1")
    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P("data")}
    mapped = functools.partial(jax.shard_map, check_vma=check_vma, **specs)
    expected = jax.jit(mapped(fn))(*ARRAYS)
    for wrapped in (mapped(level.wrap(fn)), level.wrap(mapped(fn))):
        low = low_primitives(wrapped, *ARRAYS)
        assert low & PRODUCTS and low <= PRODUCTS | {"convert_element_type"}
        near(jax.jit(wrapped)(*ARRAYS), expected)


@pytest.mark.parametrize("name", ["matmul", "scan", "remat", "custom_jvp"])
def test_o1_keeps_explicit_sharding(name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w, x = jax.device_put(ARRAYS, [NamedSharding(mesh, spec) for spec in (P(), P("data"))])
        result = jax.jit(boostax.policy("O1").wrap(FUNCTIONS[name]))(w, x)
        assert jax.typeof(result).sharding.spec == P("data", None)


def test_o1_leaves_other_dtypes_and_static_arguments_alone():
    def model(w, x, key, *, train, width, act):
        assert train is True
        y = act(x.astype(bf16) @ w.astype(bf16)).astype(f32).reshape(width, -1)
        return y + jax.random.uniform(key), x.astype(jnp.int32) @ x.astype(jnp.int32)

    wrapped = functools.partial(boostax.policy("O1").wrap(model), train=True, width=2, act=jnp.tanh)
    low = low_primitives(wrapped, jnp.ones((2, 2)), jnp.ones((2, 2)), jax.random.key(0))
    assert low == {"another product"}


@pytest.mark.parametrize("level", LEVELS)
def test_training(level):
    x = jax.random.normal(jax.random.key(1), (16, 4))
    loss = lambda w, x: jnp.mean((jnp.tanh(x @ w) - jnp.tanh(x)) ** 2)  # noqa: E731
    step = boostax.make_train_step(loss, boostax.dynamic_loss_scale(optax.sgd(0.5)), policy=level)
    state, told = follow(step, step.init(jnp.zeros((4, 4))), [x] * 20)
    assert told[-1]["loss"] < told[0]["loss"] / 4
    assert state.params.dtype == boostax.policy(level).param_dtype
    assert ("another product" in low_primitives(step.oracle, *state[1:3], x)) == (level == "O0")


# Flax models.

LAYERS = ("conv", "batch_norm", "layer_norm", "query", "embed", "given", "dense")
IMAGES, IDS = jax.random.normal(jax.random.key(3), (4, 4, 4, 3)), jnp.zeros((4, 1), jnp.int32)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, ids):
        x = nn.Conv(4, (3, 3), name="conv")(x)
        x = nn.BatchNorm(use_running_average=False, name="batch_norm")(x).reshape(4, -1, 4)
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm(name="layer_norm")(x))
        x = nn.Dense(4, dtype=f32, name="given")(x + nn.Embed(5, 4, name="embed")(ids))
        return nn.Dense(2, name="dense")(x)


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.embed = nnx.Conv(3, 4, (3, 3), rngs=rngs), nnx.Embed(5, 4, rngs=rngs)
        self.batch_norm, self.layer_norm = nnx.BatchNorm(4, rngs=rngs), nnx.LayerNorm(4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.given, self.dense = nnx.Linear(4, 4, dtype=f32, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x, ids):
        x = self.batch_norm(self.conv(x)).reshape(4, -1, 4)
        x = x + self.attention(self.layer_norm(x))
        return self.dense(self.given(x + self.embed(ids)))


def linen_model(rules):
    """A pure function of params and statistics, the types of both, and of what layers give out."""
    model = apply_policy(Linen(), rules)
    start = jax.eval_shape(model.init, jax.random.key(0), IMAGES, IDS)

    def fn(params, stats, *, collection="batch_stats", **options):
        options["mutable"] = ["batch_stats", "intermediates"]
        y, new = model.apply({"params": params, "batch_stats": stats}, IMAGES, IDS, **options)
        return y, new[collection]

    capture = functools.partial(fn, collection="intermediates", capture_intermediates=True)
    seen = jax.eval_shape(capture, start["params"], start["batch_stats"])[1]
    given = {path[-3].key: x.dtype for path, x in jax.tree.leaves_with_path(seen) if path[2:]}
    return fn, start["params"], start["batch_stats"], given


def nnx_model(rules):
    original = NNX(nnx.Rngs(0))
    model = apply_policy(original, rules)
    assert original.dense.dtype is None and original.dense.kernel.dtype == f32
    graph, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)

    def fn(params, stats):
        merged = nnx.merge(graph, params, stats, copy=True)
        return merged(IMAGES, IDS), nnx.state(merged, nnx.BatchStat)

    inputs = dict.fromkeys(LAYERS, jnp.ones((2, 4))) | {"conv": IMAGES, "embed": IDS}
    layers = {name: getattr(model, name, model.attention.query) for name in LAYERS}
    return fn, params, stats, {name: layers[name](inputs[name]).dtype for name in LAYERS}


@pytest.fixture(scope="module", params=[linen_model, nnx_model])
def make(request):
    return functools.cache(request.param)


@pytest.mark.parametrize("level", LEVELS)
def test_flax_layers_params_statistics_norms_and_output(make, level):
    """O1 casts to and fro at every product; a layer that was given its dtype keeps it."""
    fn, params, stats, given = make(level)

    def total(*given):
        y, new_stats = fn(*given)
        return y.astype(f32).sum(), (y, new_stats)

    low = f16 if level in ("O2", "O3") else f32
    assert {name: given[name] for name in LAYERS} == dict.fromkeys(LAYERS, low) | {"given": f32}
    oracle = jax.value_and_grad(total, has_aux=True)
    (_, (y, new_stats)), grads = jax.eval_shape(oracle, params, stats)
    assert jax.tree.map(lambda x: x.dtype, grads) == jax.tree.map(lambda x: x.dtype, params)
    assert {x.dtype for x in jax.tree.leaves(params)} == {boostax.policy(level).param_dtype}
    assert {x.dtype for x in jax.tree.leaves((stats, new_stats))} == {f32}
    assert "rsqrt" not in low_primitives(fn, params, stats)
    assert y.dtype == boostax.policy(level).output_dtype


def test_flax_products_are_low_at_o1_and_nothing_else(make):
    fn, params, stats, _ = make("O1")
    assert PRODUCTS <= low_primitives(fn, params, stats) <= PRODUCTS | {"convert_element_type"}


def test_a_class_name_keeps_a_flax_layer_in_f32(make):
    given = make(boostax.precision.Policy(compute_dtype=f16, keep_f32=("^(Dense|Linear)$",)))[-1]
    assert given["dense"] == f32 and given["conv"] == f16
