"""Each part of a step works in the dtype that its policy says, and in no other."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
from boostax.precision.flax import apply_policy

f16, bf16, f32 = (jnp.dtype(name) for name in ("float16", "bfloat16", "float32"))


@pytest.mark.parametrize("low", [f16, bf16])
def test_levels(low):
    level = functools.partial(boostax.policy, dtype=low.name)
    assert level("O0") == boostax.Policy()
    assert level("O1") == boostax.Policy(f32, low, f32, "all but matmuls")
    assert level("O3") == boostax.Policy(low, low, low)
    second = level("O2")
    assert (second.param_dtype, second.compute_dtype, second.output_dtype) == (f32, low, f32)


def test_o2_keeps_norms_and_nothing_else():
    keeps = boostax.policy("O2").keeps
    for name in ("LayerNorm_0", "encoder/norm1", "bn2", "block/ln", "gn_3", "RMSNorm"):
        assert keeps(f"{name}/scale"), name
    for name in ("Dense_0", "column", "begin/kernel", "Conv_bnx"):
        assert not keeps(f"{name}/kernel"), name


@pytest.mark.parametrize(
    ("spec", "dtypes"),
    [
        ("params=float32,compute=float16,output=float32", (f32, f16, f32)),
        ("compute=bfloat16", (f32, bf16, f32)),
        (" output=float16 , params=bfloat16", (bf16, f32, f16)),
    ],
)
def test_policies_by_dtypes(spec, dtypes):
    rules = boostax.policy(spec)
    assert (rules.param_dtype, rules.compute_dtype, rules.output_dtype) == dtypes


def seen_by(rules, params, *inputs, **kwargs):
    """Dtypes of what a wrapped function sees, and of what comes out of it."""
    seen = {}

    def model(params, *inputs, **kwargs):
        seen.update(params=params, inputs=(inputs, kwargs))
        return jax.tree.leaves(params)[0].sum(), jnp.int32(1)

    result = rules.wrap(model)(params, *inputs, **kwargs)
    return jax.tree.map(jnp.result_type, (seen["params"], seen["inputs"], result))


PARAMS = {
    "Dense_0": {"kernel": jnp.ones((2, 2))},
    "norm": {"scale": jnp.ones(2)},
    "n": jnp.int32(3),
}


@pytest.mark.parametrize(
    ("level", "kernel", "scale", "inputs", "output"),
    [
        ("O0", f32, f32, f32, f32),
        ("O1", f32, f32, f32, f32),
        ("O2", f16, f32, f16, f32),
        ("O3", f16, f16, f16, f16),
    ],
)
def test_dtypes_inside_a_wrapped_function(level, kernel, scale, inputs, output):
    x = {"x": jnp.ones(2, bf16), "ids": jnp.arange(2), "wave": jnp.ones(2, jnp.complex64)}
    params, (args, kwargs), result = seen_by(boostax.policy(level), PARAMS, x, y=np.ones(2))
    assert params == {"Dense_0": {"kernel": kernel}, "norm": {"scale": scale}, "n": jnp.int32}
    assert args[0] == {"x": inputs, "ids": jnp.int32, "wave": jnp.complex64}
    assert kwargs == {"y": inputs}
    assert result == (output, jnp.int32)


def test_patterns_keep_params_in_f32():
    rules = boostax.Policy(compute_dtype=f16, keep_f32=(r"kernel$",))
    params, *_ = seen_by(rules, PARAMS)
    assert params["Dense_0"]["kernel"] == f32 and params["norm"]["scale"] == f16


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("stored", [f32, bf16])
def test_gradients_arrive_in_the_params_own_dtype(level, stored):
    params = jax.tree.map(lambda x: x.astype(stored), {"w": jnp.ones((2, 2)), "norm": jnp.ones(2)})
    loss = lambda p, x: jnp.sum(x @ p["w"] * p["norm"])  # noqa: E731
    grads = jax.grad(boostax.policy(level).wrap(loss))(params, jnp.ones((2, 2)))
    assert jax.tree.map(jnp.result_type, grads) == dict.fromkeys(params, stored)


# O1 on any function: products in the low dtype, all else in f32.


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defjvp(lambda p, t: (clipped(*p), jnp.where(abs(p[0]) < 1, t[0], 0.0)))

FUNCTIONS = {
    "matmul": lambda w, x: jnp.tanh(x @ w),
    "einsum": lambda w, x: jnp.einsum("ij,kj->ik", jnp.exp(x), w),
    "conv": lambda w, x: jnp.tanh(lax.conv(x[None, None], w[None, None], (1, 1), "SAME")),
    "jit": lambda w, x: jax.jit(lambda x: jnp.tanh(x @ w))(x),
    "scan": lambda w, x: lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, 3)[0],
    "while": lambda w, x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ w), (0, x)
    )[1],
    "cond": lambda w, x: lax.cond(x.sum() > 99, lambda: jnp.tanh(x), lambda: jnp.tanh(x @ w)),
    "remat": lambda w, x: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x),
    "custom_jvp": lambda w, x: clipped(x @ w),
    "relu, softmax": lambda w, x: jax.nn.softmax(jax.nn.relu(x @ w)),
    "vmap": lambda w, x: jax.vmap(lambda row: jnp.tanh(row @ w))(x),
    "grad": lambda w, x: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w) ** 2))(x),
    "gather": lambda w, x: w[jnp.array([1, 0])] @ x,
    "random": lambda w, x: jax.random.normal(jax.random.key(0), x.shape) @ w,
    "nested": lambda w, x: lax.scan(
        lambda c, _: (jax.checkpoint(lambda c: jax.jit(jnp.matmul)(c, w))(c), None), x, None, 2
    )[0],
}
# What moves f16 numbers to and from a product, and what carries them out of a loop or a branch.
MOVES = {"convert_element_type", "transpose", "broadcast_in_dim", "rev", "empty2", "scan", "cond"}
PRODUCTS = {"dot_general", "conv_general_dilated"}


def low_primitives(fn, *args):
    found = set()

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if any(getattr(var.aval, "dtype", None) == f16 for var in eqn.outvars):
                found.add(eqn.primitive.name)
            if eqn.primitive.name in PRODUCTS and eqn.outvars[0].aval.dtype != f16:
                found.add("a product in f32")
            is_body = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")  # noqa: E731
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_body):
                if is_body(value):
                    walk(getattr(value, "jaxpr", value))

    walk(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


def near(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=0.02 * abs(b).max()), actual, expected
    )


@pytest.fixture(scope="module")
def arrays():
    keys = jax.random.split(jax.random.key(0))
    return [jax.random.normal(key, (8, 8)) / 2 for key in keys]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_o1_lowers_products_and_nothing_else(arrays, name):
    fn = FUNCTIONS[name]
    wrapped = boostax.policy("O1").wrap(fn)
    low = low_primitives(wrapped, *arrays)
    assert low & PRODUCTS and low <= PRODUCTS | {"convert_element_type"}
    mean = lambda f: jax.grad(lambda w, x: jnp.mean(f(w, x) ** 2))  # noqa: E731
    if name != "while":
        assert low_primitives(mean(wrapped), *arrays) <= PRODUCTS | MOVES

    def results(f):
        gradient = mean(f) if name != "while" else f
        mapped = jax.vmap(f, (None, 0))(arrays[0], arrays[1][None])
        return f(*arrays), gradient(*arrays), mapped

    result, expected = (jax.jit(functools.partial(results, f))() for f in (wrapped, fn))
    assert result[0].dtype == f32
    near(result, expected)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["matmul", "jit", "scan", "while", "cond", "remat", "custom_jvp"])
def test_o1_around_and_inside_shard_map(arrays, mesh, name, check_vma):
    fn, level = FUNCTIONS[name], boostax.policy("O1")
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": check_vma}
    mapped = functools.partial(jax.shard_map, mesh=mesh, **specs)
    expected = jax.jit(mapped(fn))(*arrays)
    for wrapped in (mapped(level.wrap(fn)), level.wrap(mapped(fn))):
        low = low_primitives(wrapped, *arrays)
        assert low & PRODUCTS and low <= PRODUCTS | {"convert_element_type"}
        near(jax.jit(wrapped)(*arrays), expected)


@pytest.mark.parametrize("name", ["matmul", "scan", "remat", "custom_jvp"])
def test_o1_keeps_explicit_sharding(arrays, name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w, x = (
            jax.device_put(a, NamedSharding(mesh, s))
            for a, s in zip(arrays, (P(), P("data")), strict=True)
        )
        result = jax.jit(boostax.policy("O1").wrap(FUNCTIONS[name]))(w, x)
        assert jax.typeof(result).sharding.spec == P("data", None)


def test_o1_leaves_other_dtypes_and_static_arguments_alone():
    def model(w, x, key, *, train, width, act):
        assert train is True
        y = act(x.astype(bf16) @ w.astype(bf16)).astype(f32).reshape(width, -1)
        return y + jax.random.uniform(key), x.astype(jnp.int32) @ x.astype(jnp.int32)

    wrapped = functools.partial(boostax.policy("O1").wrap(model), train=True, width=2, act=jnp.tanh)
    low = low_primitives(wrapped, jnp.ones((2, 2)), jnp.ones((2, 2)), jax.random.key(0))
    assert low == {"a product in f32"}  # or wider: here bf16 and i32


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_training(level):
    x = jax.random.normal(jax.random.key(1), (16, 4))
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - x.sum(1)) ** 2)  # noqa: E731
    params = {"w": 0.3 * jax.random.normal(jax.random.key(2), (4, 8)), "v": jnp.full(8, 0.1)}
    step = boostax.make_train_step(loss, boostax.dynamic_loss_scale(optax.sgd(0.1)), policy=level)
    state, losses = step.init(params), []
    for _ in range(40):
        state, told = step(state, x)
        losses.append(float(told["loss"]))
    assert losses[-1] < losses[0] / 5
    assert state.params["w"].dtype == boostax.policy(level).param_dtype


# Flax: what each layer gives out at O0 ... O3.

LEVELS = ("O0", "O1", "O2", "O3")
LAYERS = {
    "conv": (f32, f16, f16, f16),
    "batch_norm": (f32, f32, f16, f16),
    "layer_norm": (f32, f32, f16, f16),
    "query": (f32, f16, f16, f16),  # a projection inside attention
    "embed": (f32, f32, f16, f16),
    "given": (f32, f32, f32, f32),  # was given its dtype
    "dense": (f32, f16, f16, f16),
}
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
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.batch_norm, self.layer_norm = nnx.BatchNorm(4, rngs=rngs), nnx.LayerNorm(4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.given, self.dense = (
            nnx.Linear(4, 4, dtype=f32, rngs=rngs),
            nnx.Linear(4, 2, rngs=rngs),
        )

    def __call__(self, x, ids):
        x = self.batch_norm(self.conv(x)).reshape(4, -1, 4)
        x = x + self.attention(self.layer_norm(x))
        return self.dense(self.given(x + self.embed(ids)))


def linen_model(rules):
    """A pure function of params and statistics, both, and the dtypes that layers give out."""
    model = apply_policy(Linen(), rules)
    variables = model.init(jax.random.key(0), IMAGES, IDS)

    def fn(params, stats):
        variables = {"params": params, "batch_stats": stats}
        y, new = model.apply(variables, IMAGES, IDS, mutable=["batch_stats"])
        return y, new["batch_stats"]

    options = {"mutable": ["batch_stats", "intermediates"], "capture_intermediates": True}
    seen = model.apply(variables, IMAGES, IDS, **options)[1]["intermediates"]
    paths = jax.tree_util.tree_leaves_with_path(seen)
    given = {path[-3].key: leaf.dtype for path, leaf in paths if len(path) > 2}
    return fn, variables["params"], variables["batch_stats"], given


def nnx_model(rules):
    original = NNX(nnx.Rngs(0))
    model = apply_policy(original, rules)
    assert original.dense.dtype is None and original.dense.kernel.dtype == f32
    graph, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)

    def fn(params, stats):
        merged = nnx.merge(graph, params, stats)
        return merged(IMAGES, IDS), nnx.state(merged, nnx.BatchStat)

    layers = {name: getattr(model, name, model.attention.query) for name in LAYERS}
    inputs = {"conv": IMAGES, "embed": IDS}
    given = {
        name: layer(inputs.get(name, jnp.ones((2, 4)))).dtype for name, layer in layers.items()
    }
    return fn, params, stats, given


def dtypes(tree):
    return {leaf.dtype for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [linen_model, nnx_model])
class TestFlax:
    def test_layers_give_out(self, make, level):
        given = make(level)[-1]
        expected = {name: row[LEVELS.index(level)] for name, row in LAYERS.items()}
        assert {name: given[name] for name in LAYERS} == expected

    def test_params_statistics_and_output(self, make, level):
        fn, params, stats, _ = make(level)
        assert dtypes(params) == {boostax.policy(level).param_dtype}
        y, new = jax.eval_shape(fn, params, stats)
        assert y.dtype == boostax.policy(level).output_dtype
        assert dtypes(stats) == dtypes(new) == {f32}

    def test_norms_compute_in_f32(self, make, level):
        assert "rsqrt" not in low_primitives(*make(level)[:3])

    def test_training(self, make, level):
        fn, params, stats, _ = make(level)

        def loss(params, batch, model_state):
            y, model_state = fn(params, model_state)
            return jnp.mean((y - batch) ** 2), boostax.Aux(model_state=model_state)

        tx = boostax.dynamic_loss_scale(optax.adam(0.01))
        step = boostax.make_train_step(loss, tx, has_aux=True)
        state, losses = step.init(params, model_state=stats), []
        for _ in range(8):
            before = jax.tree.map(jnp.result_type, state)
            state, told = step(state, jnp.ones((4, 1, 2)))
            assert jax.tree.map(jnp.result_type, state) == before
            losses.append(float(told["loss"]))
        assert losses[-1] < losses[0] / 1.2


@pytest.mark.parametrize("make", [linen_model, nnx_model])
def test_a_class_name_keeps_a_flax_layer_in_f32(make):
    given = make(boostax.Policy(compute_dtype=f16, keep_f32=("^(Dense|Linear)$",)))[-1]
    assert given["dense"] == f32 and given["conv"] == f16
