"""Gradient centralization: what is averaged in which layout, by which rule, and how it travels."""

import itertools
import math
from typing import NamedTuple

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawing import draws
from flax import nnx
from hypothesis import given, strategies
from hypothesis.extra import numpy as hnp
from reducing import mesh_of

from boostax._core import trees
from boostax.model.centralize import centralize_gradients


def wave(*shape, dtype=np.float32, seed=0):
    size = math.prod(shape)
    return (np.sin(1.0 + seed + 1.7 * np.arange(size)) + 0.3).reshape(shape).astype(dtype)


def update(tx, grads, params=None):
    return tx.update(grads, tx.init(grads if params is None else params), params)[0]


def less_mean(x, axes):
    """The formula in float64."""
    x = np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)
    return x - x.mean(axes, keepdims=True) if axes else x


def averaged(tx, grads):
    """By path name, the fewest axes whose mean is what the update lacks."""
    found, updates = {}, jax.tree.leaves(update(tx, grads))
    for (name, g), u in zip(trees.named(grads), updates, strict=True):
        subsets = (itertools.combinations(range(g.ndim), n) for n in range(g.ndim + 1))
        subsets = itertools.chain.from_iterable(subsets)
        found[name] = next(x for x in subsets if np.allclose(u, less_mean(g, x), atol=1e-6))
    return found


# The formula


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("name", ["dense", "dense_not16", "conv", "conv_in3", "bias", "dense32"])
def test_mindspore_updates(arrays, name, decay):
    """Its order (decay, then centralization) and its rule of 16, in its layout transposed."""
    run = arrays("grad_centralization.npz")
    layout = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}
    found = (run[f"{name}_{key}"] for key in ("w", "g", f"wd{decay}_update"))
    w, g, expected = (x.transpose(layout[x.ndim]) for x in found)
    tx = optax.chain(optax.add_decayed_weights(decay), centralize_gradients(multiple_of=16))
    # MindSpore's update is a difference of weights, which rounds once more.
    assert np.abs(update(tx, jnp.asarray(g), jnp.asarray(w)) - expected).max() < 6e-7
    assert name in ("dense_not16", "conv_in3", "bias") or np.abs(expected - g).max() > 0.1


ATOL = {"float32": 5e-7, "float64": 2e-15, "bfloat16": 8e-3, "float16": 1e-3, "complex64": 5e-7}
# Shapes, and the axes of their inputs.
KERNELS = {(5, 3): (0,), (7, 4, 6): (0, 1), (3, 3, 4, 8): (0, 1, 2), (3, 3, 1, 8): (0, 1, 2)}


@pytest.mark.parametrize(("shape", "axes"), KERNELS.items())
@pytest.mark.parametrize(("dtype", "tolerance"), ATOL.items())
def test_formula_in_float64(shape, axes, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        g = jnp.asarray(wave(*shape), dtype)
        g = g + 1j * g[::-1] if dtype == "complex64" else g
        got = update(centralize_gradients(), g)
        assert got.dtype == g.dtype
        wide = np.complex128 if dtype == "complex64" else np.float64
        expected = less_mean(np.asarray(g, wide), axes)
        np.testing.assert_allclose(np.asarray(got, wide), expected, atol=tolerance)


def test_half_precision_means_are_taken_in_f32():
    """Defect guarded against: a sum in f16 overflows at 65504, and one in bf16 stalls at 256."""
    got = update(centralize_gradients(), jnp.full((4096, 2), 100.0, jnp.float16).at[0].set(200.0))
    assert float(got[0, 0]) == 100.0 and abs(float(got[1, 0])) < 0.03
    assert not update(centralize_gradients(), jnp.ones((4096, 2), jnp.bfloat16)).any()


def test_f16_saturates_and_what_is_not_finite_stays_so():
    big = float(jnp.finfo(jnp.float16).max)
    g = jnp.array([[big, 1.0], [-big, jnp.nan], [-big, 1.0]], jnp.float16)
    got = update(centralize_gradients(), g)
    assert float(got[0, 0]) == big and bool(jnp.isnan(got[:, 1]).all())


shapes = hnp.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=5)


@draws(40)
@given(hnp.arrays(np.float32, shapes, elements=strategies.floats(-1e3, 1e3, width=32)))
def test_any_kernel_loses_its_mean_for_each_output_unit(g):
    """But one with a single input; a second time there is no mean left."""
    tx, inputs = centralize_gradients(), tuple(range(g.ndim - 1))
    expected = g if math.prod(g.shape[:-1]) == 1 else less_mean(g, inputs)
    # What n - 1 additions, a division and a subtraction in f32 may lose.
    bound = (math.prod(g.shape[:-1]) + 2) * 2.0**-24 * np.abs(g).max() + 1e-37
    once = update(tx, jnp.asarray(g))
    for found in (once, update(tx, once)):
        np.testing.assert_allclose(found, expected, rtol=0, atol=3 * bound)


# What is averaged


class Box(NamedTuple):
    kernel: object
    bias: object


RULES = {"layers": "stacked", "*embedding": -1, "qkv": 0, "depthwise_*": None, "head/*": "auto"}
ONE_INPUT = "first/kernel:1x5: pointwise/kernel:1x1x1x5:"
TORCH_16 = "a/weight:4x16x3x3:123 b/weight:16x3x16x16:"
FLAX_16 = "dense:32x4:0 narrow:10x4: conv:3x3x16x4:012 stem:16x16x3x4: depthwise:4x4x1x8:"
OUTPUTS_FIRST = "weight:8x3x2x2:123 dense:4x6:1 bias:4:"
# By case: options, and of each leaf its path, its shape and the axes that are averaged.
CASES = {
    "haiku": (
        {"layout": "haiku"},
        "linear/w:5x4:0 linear/b:4: conv2_d/w:3x2x5x4:012 conv2_d/b:4x1x2: embed/embeddings:7x4: "
        "net/~/conv2_d_transpose/w:3x2x5x4:013 layer_norm/scale:3x4: layer_norm/offset:3x4:",
    ),
    "torch": (
        {"layout": "torch"},
        "embed_tokens.weight:7x4: patch_embed.proj.weight:5x3x2x2:123 pos_embed:1x6x4: fc.bias:3: "
        "mix.in_proj_weight:12x4:1 lstm.weight_ih_l0:8x3:1 up.conv_transpose.weight:4x5x2x2:023 "
        "norm.weight:4: fc.weight:3x4:1",
    ),
    "torch, stacked": ({"layout": "torch", "axes": {"fc": "stacked"}}, "fc/weight:2x3x4:2"),
    "torch, input channels": ({"layout": "torch", "multiple_of": 16}, TORCH_16),
    "input channels": ({"multiple_of": 16}, FLAX_16),
    "rules by path": (
        {"axes": RULES},
        "layers/query/kernel:2x6x3x2:1 layers/query/bias:2x3x2: layers/gain:2: head/kernel:6x4:0 "
        "embed/embedding:7x4:1 qkv/kernel:6x3x2x2:0 qkv/bias:3x2x2: depthwise_0/kernel:3x3x1x4:",
    ),
    "the first that matches decides": (
        {"axes": {"layers/query/kernel": (1, -2), "layers": "stacked"}},
        "layers/query/kernel:2x6x3x2:12 layers/key/kernel:2x6x3x2:1",
    ),
    # As ``optax.centralize`` has it, which in Flax's layout averages over outputs.
    "a function for another layout": ({"axes": lambda _, x: (*range(1, x.ndim),)}, OUTPUTS_FIRST),
    "a function that gives rules": (
        {"axes": lambda path, leaf: {2: 0, 3: "auto", 4: "stacked"}.get(leaf.ndim)},
        "layers/query/kernel:2x6x3x2:1 layers/query/bias:2x3x2: embed/embedding:7x4:0 "
        "qkv/kernel:6x3x2x2:12 layers/gain:2:",
    ),
    # Defect guarded against: the mean over one input is the gradient, which would always be zero.
    "one input": ({}, ONE_INPUT),
    "one input, by a pattern": ({"axes": {"first": 0}}, ONE_INPUT),
    "one input, by a function": ({"axes": lambda _, x: tuple(range(x.ndim - 1))}, ONE_INPUT),
}


@pytest.mark.parametrize("name", CASES)
def test_axes_that_are_averaged(name):
    options, leaves = CASES[name]
    leaves = [leaf.split(":") for leaf in leaves.split()]
    grads = {path: jnp.asarray(wave(*map(int, shape.split("x")))) for path, shape, _ in leaves}
    expected = {path: tuple(map(int, axes)) for path, _, axes in leaves}
    assert averaged(centralize_gradients(**options), grads) == expected


def gradients_of(make):
    """Gradients like the params of a model that is never computed."""
    params, _ = eqx.partition(eqx.filter_eval_shape(make), lambda x: hasattr(x, "dtype"))
    return jax.tree.map(lambda x: jnp.asarray(wave(*x.shape)), params)


def kernels_of(tx, grads):
    return {name: axes for name, axes in averaged(tx, grads).items() if axes}


def test_flax_layouts():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.LayerNorm(name="norm")(nn.Embed(7, 12, name="embed")(tokens))
            x = nn.MultiHeadDotProductAttention(3, qkv_features=6, out_features=12, name="mix")(x)
            x = nn.Dense(8, name="dense")(x).reshape(2, 2, 2, 8)
            x = nn.ConvTranspose(6, (3, 3), name="up")(nn.Conv(6, (3, 3), name="conv")(x))
            return nn.Conv(6, (3, 3), feature_group_count=6, name="depthwise")(x).sum()

    grads = gradients_of(lambda: Model().init(jax.random.key(0), jnp.ones((2, 4), int))["params"])
    assert grads["mix"]["query"]["bias"].shape == (3, 2), "a bias of two axes"
    expected = dict.fromkeys(("conv/kernel", "up/kernel"), (0, 1, 2))
    expected |= dict.fromkeys(("depthwise/kernel", "mix/out/kernel"), (0, 1))
    expected |= {f"mix/{name}/kernel": (0,) for name in ("query", "key", "value")}
    assert kernels_of(centralize_gradients(), grads) == expected | {"dense/kernel": (0,)}


def test_nnx_and_partitioned_params_are_read_by_the_same_names():
    """Defect guarded against: the last component of their paths is ``value``."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.mix = nnx.MultiHeadAttention(3, 12, 6, decode=False, rngs=rngs)
            self.embed = nnx.Embed(7, 12, rngs=rngs)

    grads = jax.tree.map(lambda x: wave(*x.shape), nnx.state(Model(nnx.Rngs(0)), nnx.Param))
    heads = {f"mix/{name}/kernel/value": (0,) for name in ("query", "key", "value")}
    assert kernels_of(centralize_gradients(), grads) == heads | {"mix/out/kernel/value": (0, 1)}
    box = nn.Partitioned(wave(5, 3, 2), names=(None, None, None))
    found = averaged(centralize_gradients(), {"query": {"kernel": box}, "mlp": {"bias": box}})
    assert found == {"query/kernel/value": (0,), "mlp/bias/value": ()}


def test_leaves_without_inputs_stay_and_a_tuple_has_names():
    same = {"none": None, "scalar": jnp.float32(3.0), "vector": jnp.ones(4)}
    same |= {"masked": optax.MaskedNode(), "empty": [jnp.zeros((0, 3)), jnp.zeros((3, 0))]}
    got = update(centralize_gradients(), same | {"box": Box(wave(4, 2), jnp.ones((2, 2)))})
    box = got.pop("box")
    chex.assert_trees_all_equal((got, box.bias), (same, jnp.ones((2, 2))))
    np.testing.assert_allclose(box.kernel, less_mean(wave(4, 2), (0,)), atol=5e-7)


def modules_of_equinox(scan):
    keys = iter(jax.random.split(jax.random.key(0), 20))
    return {
        "embed": eqx.nn.Embedding(7, 6, key=next(keys)),
        "norm": eqx.nn.LayerNorm((3, 4)),
        "mix": eqx.nn.MultiheadAttention(2, 6, key=next(keys)),
        "conv": eqx.nn.Conv2d(3, 5, (2, 3), key=next(keys)),
        "up": eqx.nn.ConvTranspose1d(3, 5, 2, key=next(keys)),
        "cell": eqx.nn.LSTMCell(3, 4, key=next(keys)),
        "normed": eqx.nn.WeightNorm(eqx.nn.Linear(3, 4, key=next(keys))),
        "mlp": eqx.nn.MLP(3, 4, 5, 3, key=next(keys), scan=scan),
    }


def test_equinox_modules_are_known_by_their_classes():
    """Defect guarded against: the mean over the outputs of (out, in) was taken away."""
    grads = gradients_of(lambda: modules_of_equinox(scan=False))
    linear = {f"mix/{name}_proj/weight" for name in ("query", "key", "value", "output")}
    linear |= {f"mlp/layers/{i}/weight" for i in range(4)}
    linear |= {"cell/weight_ih", "cell/weight_hh", "normed/layer/weight"}
    expected = dict.fromkeys(linear, (1,)) | {"conv/weight": (1, 2, 3), "up/weight": (1, 2)}
    assert kernels_of(centralize_gradients(), grads) == expected
    # Masked trees keep the classes.
    tx = optax.masked(centralize_gradients(), lambda p: jax.tree.map(lambda x: x.ndim == 4, p))
    assert set(kernels_of(tx, grads)) == {"conv/weight"}


@pytest.mark.parametrize("rule", ["auto", {"*": "stacked"}])
def test_stacked_modules_of_equinox_are_centralized_layer_by_layer(rule):
    def stacked():
        keys = jax.random.split(jax.random.key(0), 2)
        return eqx.filter_vmap(lambda key: eqx.nn.Conv2d(3, 5, 2, key=key))(keys)

    mlp = gradients_of(lambda: modules_of_equinox(scan=True)["mlp"])
    found = kernels_of(centralize_gradients(axes=rule), (mlp, gradients_of(stacked)))
    assert sorted(found.values()) == [(1,), (1,), (2,), (2, 3, 4)]


class Mine(eqx.Module):
    weight: jax.Array
    tokens: jax.Array


EITHER = [{"0.weight": jnp.ones((4, 3)), "0.bias": jnp.ones(4)}, {"weight": jnp.ones((4, 3))}]
EITHER += [{"net/~/conv2_d_transpose": {"w": jnp.ones((3, 3, 4, 5))}}, Mine(jnp.eye(3), jnp.eye(3))]


@pytest.mark.parametrize("params", EITHER)
def test_what_may_be_of_several_layouts_is_refused(params):
    """Its outputs may be first or last, and the wrong mean is no error of any kind."""
    tx = centralize_gradients()
    for call in (tx.init, lambda params: tx.update(params, optax.EmptyState())):
        with pytest.raises(ValueError, match="layout must be given if a kernel"):
            call(params)


AXES = [({"layout": "equinox"}, (1,)), ({"axes": {"weight": 1}}, (1,)), ({"layout": "linen"}, (0,))]


@pytest.mark.parametrize(("options", "axes"), AXES)
def test_a_word_says_which_layout_it_is(options, axes):
    found = averaged(centralize_gradients(**options), Mine(wave(3, 3), wave(3, 3)))
    assert found["weight"] == axes and (axes == (0,) or found["tokens"] == ())


def test_some_params_alone_are_those_of_optax_masked():
    """A pattern may name what is masked."""
    grads = {"a": jnp.asarray(wave(4, 3)), "b": {"kernel": jnp.asarray(wave(4, 3))}}
    tx = optax.masked(centralize_gradients(axes={"a": 0, "b": 0}), {"a": True, "b": False})
    assert averaged(tx, grads) == {"a": (0,), "b/kernel": ()}


# Sharded leaves


SHARDED = {
    "by_inputs": (wave(16, 8), jax.P("fsdp")),
    "by_outputs": (wave(6, 8), jax.P(None, "fsdp")),
    "by_both": (wave(8, 8), jax.P("data", "fsdp")),
    "by_two_axes": (wave(16, 3), jax.P(("data", "fsdp"), None)),
    "whole": (wave(5, 3), jax.P()),
    "conv": (wave(3, 3, 8, 4), jax.P(None, None, "fsdp", "data")),
    "query": {"kernel": (wave(8, 4, 2), jax.P("data", "fsdp"))},
    "out": {"kernel": (wave(4, 2, 6), jax.P("fsdp"))},
    "bias": (wave(8), jax.P("fsdp")),
}
is_pair = lambda node: isinstance(node, tuple)  # noqa: E731
GRADS = jax.tree.map(lambda pair: jnp.asarray(pair[0]), SHARDED, is_leaf=is_pair)
SPECS = jax.tree.map(lambda pair: pair[1], SHARDED, is_leaf=is_pair)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_sharded_leaves_under_plain_jit(kind):
    mesh = mesh_of(kind, data=2, fsdp=4)
    with jax.set_mesh(mesh):
        shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), SPECS)
        grads = jax.device_put(GRADS, shardings)
        tx = centralize_gradients(multiple_of=2)
        step = jax.jit(lambda g: tx.update(g, tx.init(g), g)[0])
        got = step(grads)
        chex.assert_trees_all_close(got, update(tx, GRADS), atol=5e-7)
        if kind == jax.sharding.AxisType.Explicit:
            same = lambda x, s: x.sharding.is_equivalent_to(s, x.ndim)  # noqa: E731
            assert all(jax.tree.leaves(jax.tree.map(same, got, shardings)))
        text = step.lower(grads).compile().as_text()
        assert "all-gather" not in text and "all-to-all" not in text


MISFITS = [
    ({"dens": 0}, "patterns that match params, got 'dens'.* The params are 'dense/kernel'"),
    ({"dense": 2}, "different axes of 'dense/kernel', which has 2 axes, got 2"),
    ({"dense": -3}, "which has 2 axes, got -3"),
    ({"dense": (0, -2)}, r"which has 2 axes, got \(0, -2\)"),
    ({"dense": 0.5}, "which has 2 axes, got 0.5"),
    (lambda path, leaf: (0, "b"), "which has 2 axes, got 'b'"),
    (lambda path, leaf: "all", "'auto' or 'stacked', got 'all'"),
]


@pytest.mark.parametrize(("axes", "got"), MISFITS)
def test_rules_that_do_not_fit_are_refused_at_init(axes, got):
    tx = centralize_gradients(axes=axes)
    with pytest.raises((TypeError, ValueError), match=f"axes must be .*{got}"):
        tx.init({"dense": {"kernel": jnp.ones((4, 4))}})


def test_gradients_of_other_shapes_than_the_params_are_refused():
    tx, params = centralize_gradients(), {"w": jnp.ones((16, 4))}
    with pytest.raises(ValueError, match=r"shaped \(16, 4\) at 'w', got \(2, 4\)\. Put centralize"):
        tx.update({"w": jnp.ones((2, 4))}, tx.init(params), params)
