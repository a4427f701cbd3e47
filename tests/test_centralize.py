"""Gradient centralization: what is averaged in which layout, by which rule, and how it travels."""

import functools
import itertools
import math
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawing import draws
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from workloads import DigitsConfig, TextConfig, digits, text

import boostax
from boostax._core import costs, trees
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
    updates = jax.tree.leaves(update(tx, grads))
    found = {}
    for (path, g), u in zip(jax.tree_util.tree_leaves_with_path(grads), updates, strict=True):
        fits = (axes for axes in subsets(g.ndim) if np.allclose(u, less_mean(g, axes), atol=1e-6))
        found[trees.path_name(path)] = next(fits)
    return found


def subsets(ndim):
    return (axes for n in range(ndim + 1) for axes in itertools.combinations(range(ndim), n))


# The formula


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("name", ["dense", "dense_not16", "conv", "conv_in3", "bias", "dense32"])
def test_mindspore_updates(golden, name, decay):
    """Its order (decay, then centralization) and its rule of 16, in its layout transposed."""
    arrays = np.load(golden / "grad_centralization.npz")
    layout = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}
    w, g, expected = (
        arrays[f"{name}_{key}"].transpose(layout[arrays[f"{name}_{key}"].ndim])
        for key in ("w", "g", f"wd{decay}_update")
    )
    tx = optax.chain(optax.add_decayed_weights(decay), centralize_gradients(multiple_of=16))
    got = update(tx, jnp.asarray(g), jnp.asarray(w))
    error = np.abs(np.asarray(got) - expected).max()
    print(f"{name}, decay {decay}: {error:.1e}")
    # MindSpore's update is a difference of weights, which rounds once more.
    assert error < 6e-7
    assert name in ("dense_not16", "conv_in3", "bias") or np.abs(expected - g).max() > 0.1


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((5, 3), (0,)), ((7, 4, 6), (0, 1)), ((3, 3, 4, 8), (0, 1, 2)), ((3, 3, 1, 8), (0, 1, 2))],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 5e-7), ("float64", 2e-15), ("bfloat16", 8e-3), ("float16", 1e-3)],
)
def test_formula_in_float64(shape, axes, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        g = jnp.asarray(wave(*shape), dtype)
        got = update(centralize_gradients(), g)
        assert got.dtype == g.dtype
        expected = less_mean(np.asarray(g, np.float64), axes)
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=tolerance)


def test_complex_gradients():
    g = jnp.asarray(wave(6, 4) + 1j * wave(6, 4, seed=3), jnp.complex64)
    got = update(centralize_gradients(), g)
    assert got.dtype == jnp.complex64
    np.testing.assert_allclose(got, less_mean(g, (0,)), atol=5e-7)


def test_half_precision_means_are_taken_in_f32():
    """Defect guarded against: a sum in f16 overflows at 65504, and one in bf16 stalls at 256."""
    g = jnp.full((4096, 2), 100.0, jnp.float16).at[0].set(200.0)
    got = update(centralize_gradients(), g)
    assert float(got[0, 0]) == 100.0 and abs(float(got[1, 0])) < 0.03
    ones = jnp.ones((4096, 2), jnp.bfloat16)
    assert not update(centralize_gradients(), ones).any()


def test_f16_saturates_and_what_is_not_finite_stays_so():
    big = float(jnp.finfo(jnp.float16).max)
    g = jnp.array([[big, 1.0], [-big, jnp.nan], [-big, 1.0]], jnp.float16)
    got = update(centralize_gradients(), g)
    assert float(got[0, 0]) == big and bool(jnp.isnan(got[:, 1]).all())


finite = st.floats(-1e3, 1e3, width=32)
kernels = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=5), elements=finite
)


@draws(40)
@given(kernels, finite)
def test_projection_properties(g, factor):
    """Mean zero for each output unit, idempotent, linear, and blind to a constant per unit."""
    tx = centralize_gradients()
    once = np.asarray(update(tx, jnp.asarray(g)))
    if math.prod(g.shape[:-1]) == 1:
        np.testing.assert_array_equal(once, g)
        return
    inputs = tuple(range(g.ndim - 1))
    # What n - 1 additions, a division and a subtraction in f32 may lose.
    bound = (math.prod(g.shape[:-1]) + 2) * 2.0**-24 * np.abs(g).max() + 1e-37
    assert np.abs(once.mean(inputs, dtype=np.float64)).max() <= bound
    np.testing.assert_allclose(update(tx, jnp.asarray(once)), once, rtol=0, atol=3 * bound)
    scaled = update(tx, jnp.asarray(g * np.float32(factor)))
    atol = 3 * bound * max(1, abs(factor))
    np.testing.assert_allclose(scaled, once * np.float32(factor), rtol=0, atol=atol)
    mirrored = np.asarray(update(tx, jnp.asarray(g[::-1])))
    both = update(tx, jnp.asarray(g + g[::-1]))
    np.testing.assert_allclose(both, once + mirrored, rtol=0, atol=5 * bound)
    constant = np.broadcast_to(g[(0,) * (g.ndim - 1)], g.shape)
    assert np.abs(update(tx, jnp.asarray(constant))).max() <= bound


# What is averaged


class Box(NamedTuple):
    kernel: object
    bias: object


def test_flax_layouts():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(7, 12, name="embed")(tokens)
            x = nn.LayerNorm(name="norm")(x)
            x = nn.MultiHeadDotProductAttention(3, qkv_features=6, out_features=12, name="mix")(x)
            x = nn.Dense(8, name="dense")(x).reshape(2, 2, 2, 8)
            x = nn.Conv(6, (3, 3), name="conv")(x)
            x = nn.ConvTranspose(6, (3, 3), name="up")(x)
            return nn.Conv(6, (3, 3), feature_group_count=6, name="depthwise")(x).sum()

    shapes = jax.eval_shape(Model().init, jax.random.key(0), jnp.ones((2, 4), int))["params"]
    grads = jax.tree.map(lambda x: jnp.asarray(wave(*x.shape)), shapes)
    found = averaged(centralize_gradients(), grads)
    kept = [name for name, axes in found.items() if not axes]
    assert all(name.endswith(("bias", "scale", "embed/embedding")) for name in kept)
    assert grads["mix"]["query"]["bias"].shape == (3, 2), "a bias of two axes"
    assert {name: axes for name, axes in found.items() if axes} == {
        "conv/kernel": (0, 1, 2),
        "up/kernel": (0, 1, 2),
        "dense/kernel": (0,),
        "depthwise/kernel": (0, 1),
        "mix/query/kernel": (0,),
        "mix/key/kernel": (0,),
        "mix/value/kernel": (0,),
        "mix/out/kernel": (0, 1),
    }


def test_nnx_and_partitioned_params_are_read_by_the_same_names():
    """Defect guarded against: the last component of their paths is ``value``."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.mix = nnx.MultiHeadAttention(3, 12, 6, decode=False, rngs=rngs)
            self.embed = nnx.Embed(7, 12, rngs=rngs)

    params = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
    found = averaged(centralize_gradients(), jax.tree.map(lambda x: wave(*x.shape), params))
    assert found["mix/value/kernel/value"] == (0,) and found["mix/out/kernel/value"] == (0, 1)
    assert found["embed/embedding/value"] == found["mix/query/bias/value"] == ()
    box = nn.Partitioned(wave(5, 3, 2), names=(None, None, None))
    found = averaged(centralize_gradients(), {"query": {"kernel": box}, "mlp": {"bias": box}})
    assert found == {"query/kernel/value": (0,), "mlp/bias/value": ()}


def test_a_single_input_is_left_alone():
    """Defect guarded against: its mean is the gradient, which would always be zero."""
    grads = {"first": {"kernel": wave(1, 5)}, "pointwise": {"kernel": wave(1, 1, 1, 5)}}
    for axes in ("auto", {"first": 0}, lambda path, leaf: tuple(range(leaf.ndim - 1))):
        got = update(centralize_gradients(axes=axes), grads)
        jax.tree.map(np.testing.assert_array_equal, got, grads)
    assert not optax.centralize().update(jnp.ones((5, 1)), optax.EmptyState())[0].any()


def test_trees_with_holes_scalars_and_empty_leaves():
    grads = {
        "none": None,
        "masked": optax.MaskedNode(),
        "scalar": jnp.float32(3.0),
        "empty": [jnp.zeros((0, 3)), jnp.zeros((3, 0))],
        "vector": jnp.ones(4),
        "box": Box(jnp.asarray(wave(4, 2)), jnp.ones((2, 2))),
        "numpy": wave(4, 2),
    }
    got = update(centralize_gradients(), grads)
    assert jax.tree.structure(got) == jax.tree.structure(grads)
    same = {**grads, "box": got["box"]._replace(bias=grads["box"].bias), "numpy": got["numpy"]}
    jax.tree.map(np.testing.assert_array_equal, got, same)
    np.testing.assert_allclose(got["box"].kernel, less_mean(wave(4, 2), (0,)), atol=5e-7)
    np.testing.assert_array_equal(got["numpy"], got["box"].kernel)
    np.testing.assert_array_equal(
        update(centralize_gradients(), 2.0 * jnp.eye(2)), [[1, -1], [-1, 1]]
    )


def test_rules_by_path():
    grads = {
        "layers": {"query": {"kernel": wave(2, 6, 3, 2), "bias": wave(2, 3, 2)}, "gain": wave(2)},
        "embed": {"embedding": wave(7, 4)},
        "qkv": {"kernel": wave(6, 3, 2, 2), "bias": wave(3, 2, 2)},
        "head": {"kernel": wave(6, 4)},
        "depthwise_0": {"kernel": wave(3, 3, 1, 4)},
    }
    rules = {
        "layers": "stacked",
        "*embedding": -1,
        "qkv": 0,
        "depthwise_*": None,
        "head/*": "auto",
    }
    expected = {
        "layers/query/kernel": (1,),
        "layers/query/bias": (),
        "layers/gain": (),
        "embed/embedding": (1,),
        "qkv/kernel": (0,),
        "qkv/bias": (),
        "head/kernel": (0,),
        "depthwise_0/kernel": (),
    }
    assert averaged(centralize_gradients(axes=rules), grads) == expected
    assert averaged(centralize_gradients(axes=list(rules.items())), grads) == expected
    # The first that matches decides.
    first = [("layers/query/kernel", (1, -2)), *rules.items()]
    found = averaged(centralize_gradients(axes=first), grads)
    assert found["layers/query/kernel"] == (1, 2)

    seen = []

    def function(path, leaf):
        seen.append(path)
        return {2: 0, 3: "auto", 4: "stacked"}.get(leaf.ndim)

    found = averaged(centralize_gradients(axes=function), grads)
    assert set(seen) == set(expected)
    assert found["embed/embedding"] == (0,) and found["layers/query/kernel"] == (1,)
    assert found["layers/query/bias"] == () and found["qkv/kernel"] == (1, 2)


def test_a_scanned_stack_is_centralized_layer_by_layer():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            mixed = nn.MultiHeadDotProductAttention(2, name="mix")(x)
            return x + nn.Dense(4, name="mlp")(mixed), None

    stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    shapes = jax.eval_shape(stack().init, jax.random.key(0), jnp.ones((2, 5, 4)), None)["params"]
    grads = jax.tree.map(lambda x: jnp.asarray(wave(*x.shape)), {"layers": shapes})
    whole = update(centralize_gradients(axes={"layers": "stacked"}), grads)
    for i in range(3):
        layer = jax.tree.map(lambda x, i=i: x[i], grads)
        alone = update(centralize_gradients(), layer)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, atol=1e-6), whole, alone)


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
    params = eqx.filter(modules_of_equinox(scan=False), eqx.is_inexact_array)
    grads = jax.tree.map(lambda x: jnp.asarray(wave(*x.shape)), params)
    found = {name: axes for name, axes in averaged(centralize_gradients(), grads).items() if axes}
    linear = {f"mix/{name}_proj/weight" for name in ("query", "key", "value", "output")}
    linear |= {f"mlp/layers/{i}/weight" for i in range(4)}
    linear |= {"cell/weight_ih", "cell/weight_hh", "normed/layer/weight"}
    assert found == dict.fromkeys(linear, (1,)) | {"conv/weight": (1, 2, 3), "up/weight": (1, 2)}
    # Masked and partitioned trees keep the classes; so do those of a wrapper.
    tx = centralize_gradients(mask=lambda p: jax.tree.map(lambda x: x.ndim == 4, p))
    assert {name for name, axes in averaged(tx, grads).items() if axes} == {"conv/weight"}


def test_stacked_modules_of_equinox_are_centralized_layer_by_layer():
    params = eqx.filter(modules_of_equinox(scan=True)["mlp"], eqx.is_inexact_array)
    grads = jax.tree.map(lambda x: jnp.asarray(wave(*x.shape)), params)
    made = eqx.filter_vmap(lambda key: eqx.nn.Conv2d(3, 5, 2, key=key))(
        jax.random.split(jax.random.key(0), 2)
    )
    for rule in ("auto", {"*": "stacked"}):
        found = averaged(centralize_gradients(axes=rule), (grads, made))
        stacked = [axes for name, axes in found.items() if name.endswith("weight")]
        assert sorted(stacked) == [(1,), (1,), (2,), (2, 3, 4)]


def test_what_may_be_of_several_layouts_is_refused():
    """Its outputs may be first or last, and the wrong mean is no error of any kind."""

    class Mine(eqx.Module):
        weight: jax.Array
        tokens: jax.Array

    state_dict = {"0.weight": jnp.ones((4, 3)), "0.bias": jnp.ones(4)}
    up = {"net/~/conv2_d_transpose": {"w": jnp.ones((3, 3, 4, 5))}}
    for params in (state_dict, up, {"weight": jnp.ones((4, 3))}, Mine(jnp.eye(3), jnp.eye(3))):
        with pytest.raises(ValueError, match="layout must be given where a kernel"):
            centralize_gradients().init(params)
        with pytest.raises(ValueError, match="layout must be given where a kernel"):
            centralize_gradients().update(params, optax.EmptyState())
    mine = Mine(jnp.asarray(wave(3, 3)), jnp.asarray(wave(3, 3)))
    for options in ({"layout": "equinox"}, {"axes": {"weight": 1}}):
        found = averaged(centralize_gradients(**options), mine)
        assert found == {"weight": (1,), "tokens": ()}
    assert averaged(centralize_gradients(layout="linen"), mine)["weight"] == (0,)
    with pytest.raises(ValueError, match=r"layout must be 'linen' or .* got 'keras'"):
        centralize_gradients(layout="keras")


def test_layouts_of_haiku_and_torch():
    haiku = {
        "net/~/linear": {"w": wave(5, 4), "b": wave(4)},
        "net/~/conv2_d": {"w": wave(3, 2, 5, 4), "b": wave(4, 1, 2)},
        "net/~/conv2_d_transpose": {"w": wave(3, 2, 5, 4)},
        "net/~/embed": {"embeddings": wave(7, 4)},
        "net/~/layer_norm": {"scale": wave(3, 4), "offset": wave(3, 4)},
    }
    assert averaged(centralize_gradients(layout="haiku"), haiku) == {
        "net/~/linear/w": (0,),
        "net/~/linear/b": (),
        "net/~/conv2_d/w": (0, 1, 2),
        "net/~/conv2_d/b": (),
        "net/~/conv2_d_transpose/w": (0, 1, 3),
        "net/~/embed/embeddings": (),
        "net/~/layer_norm/scale": (),
        "net/~/layer_norm/offset": (),
    }
    torch = {
        "embed_tokens.weight": wave(7, 4),
        "patch_embed.proj.weight": wave(5, 3, 2, 2),
        "pos_embed": wave(1, 6, 4),
        "mix.in_proj_weight": wave(12, 4),
        "lstm.weight_ih_l0": wave(8, 3),
        "up.conv_transpose.weight": wave(4, 5, 2, 2),
        "norm.weight": wave(4),
        "fc.weight": wave(3, 4),
        "fc.bias": wave(3),
    }
    expected = {"patch_embed.proj.weight": (1, 2, 3), "up.conv_transpose.weight": (0, 2, 3)}
    for name in ("mix.in_proj_weight", "lstm.weight_ih_l0", "fc.weight"):
        expected[name] = (1,)
    found = averaged(centralize_gradients(layout="torch"), torch)
    assert {name: axes for name, axes in found.items() if axes} == expected
    stacked = averaged(
        centralize_gradients(layout="torch", axes={"fc": "stacked"}),
        {"fc": {"weight": wave(2, 3, 4)}},
    )
    assert stacked == {"fc/weight": (2,)}


def test_input_channels_are_those_of_the_layout():
    grads = {"a": {"weight": wave(4, 16, 3, 3)}, "b": {"weight": wave(16, 3, 16, 16)}}
    found = averaged(centralize_gradients(layout="torch", multiple_of=16), grads)
    assert found == {"a/weight": (1, 2, 3), "b/weight": ()}


def test_rules_for_another_layout():
    """PyTorch's and Equinox's (out, in, ...): the paper's own code, as optax.centralize has it."""
    grads = {"weight": wave(8, 3, 2, 2), "dense": wave(4, 6), "bias": wave(4)}
    tx = centralize_gradients(axes=lambda path, leaf: tuple(range(1, leaf.ndim)))
    expected = optax.centralize().update(jax.tree.map(jnp.asarray, grads), optax.EmptyState())[0]
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=5e-7), update(tx, grads), expected
    )


def test_optax_averages_over_the_outputs_of_flax_kernels():
    """Why there is another: in (in, out) it takes away what all units have in common."""
    g = jnp.asarray(wave(6, 4))
    theirs = optax.centralize().update(g, optax.EmptyState())[0]
    np.testing.assert_allclose(theirs, less_mean(g, (1,)), atol=5e-7)
    assert np.abs(theirs.mean(0)).max() > 0.1
    assert np.abs(update(centralize_gradients(), g).mean(0)).max() < 1e-7


def test_multiple_of_counts_input_channels():
    grads = {
        "dense": wave(32, 4),
        "narrow": wave(10, 4),
        "conv": wave(3, 3, 16, 4),
        "stem": wave(16, 16, 3, 4),
        "depthwise": wave(4, 4, 1, 8),
    }
    found = averaged(centralize_gradients(multiple_of=16), grads)
    assert {name for name, axes in found.items() if axes} == {"dense", "conv"}


@pytest.mark.parametrize("mask", [{"a": True, "b": False}, lambda p: {"a": True, "b": False}])
def test_mask_is_that_of_optax(mask):
    grads = {"a": jnp.asarray(wave(4, 3)), "b": {"kernel": jnp.asarray(wave(4, 3))}}
    specs = {"a": P(), "b": {"kernel": P()}}
    # A pattern may name what is masked.
    tx = centralize_gradients(mask=mask, axes={"a": 0, "b": 0}, param_specs=specs)
    assert averaged(tx, grads) == {"a": (0,), "b/kernel": ()}


# Training


def test_decay_before_is_centralized_and_decay_after_is_not():
    params, grads = jnp.asarray(wave(6, 4, seed=2)), jnp.asarray(wave(6, 4))
    decay, center = optax.add_decayed_weights(0.1), centralize_gradients()
    before = update(optax.chain(decay, center), grads, params)
    after = update(optax.chain(center, decay), grads, params)
    np.testing.assert_allclose(before, less_mean(grads + 0.1 * params, (0,)), atol=5e-7)
    np.testing.assert_allclose(after, less_mean(grads, (0,)) + 0.1 * params, atol=5e-7)


def test_the_sum_of_the_weights_into_each_unit_stays_where_nothing_follows_that_moves_it():
    """With SGD, and after Adam; not before it."""
    start, x, y = jnp.asarray(wave(8, 4)), wave(16, 8, seed=2), wave(16, 4, seed=3)
    gradient = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))
    center = centralize_gradients()
    for tx, fixed in (
        (optax.chain(center, optax.sgd(0.1, momentum=0.9)), True),
        (optax.chain(center, optax.adam(1e-2)), False),
        (optax.chain(optax.scale_by_adam(), center, optax.scale(-1e-2)), True),
    ):
        params, state = start, tx.init(start)
        for _ in range(5):
            updates, state = tx.update(gradient(params), state, params)
            params = optax.apply_updates(params, updates)
        moved = np.asarray(params, np.float64) - np.asarray(start, np.float64)
        print(f"weights moved by {abs(moved).max():.3f}, sums by {abs(moved.sum(0)).max():.1e}")
        assert abs(moved).max() > 0.01
        assert (abs(moved.sum(0)).max() < 2e-6) == fixed


# Sharded leaves


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(kind,) * 2)


SHARDED = {
    "by_inputs": (wave(16, 8), P("fsdp")),
    "by_outputs": (wave(6, 8), P(None, "fsdp")),
    "by_both": (wave(8, 8), P("data", "fsdp")),
    "by_two_axes": (wave(16, 3), P(("data", "fsdp"), None)),
    "whole": (wave(5, 3), P()),
    "conv": (wave(3, 3, 8, 4), P(None, None, "fsdp", "data")),
    "query": {"kernel": (wave(8, 4, 2), P("data", "fsdp"))},
    "out": {"kernel": (wave(4, 2, 6), P("fsdp"))},
    "bias": (wave(8), P("fsdp")),
}
is_pair = lambda node: isinstance(node, tuple)  # noqa: E731
GRADS = jax.tree.map(lambda pair: jnp.asarray(pair[0]), SHARDED, is_leaf=is_pair)
SPECS = jax.tree.map(lambda pair: pair[1], SHARDED, is_leaf=is_pair)


def in_shards(tx, **options):
    """The update of leaves cut by ``SPECS``."""
    specs = {"in_specs": (SPECS,), "out_specs": SPECS}
    return jax.shard_map(
        lambda g: tx.update(g, tx.init(g), g)[0], mesh=mesh_of(), **specs, **options
    )


def assert_close(got, expected, tolerance=5e-7):
    check = functools.partial(np.testing.assert_allclose, atol=tolerance)
    jax.tree.map(check, got, expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_leaves_under_plain_jit(kind):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        place = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
        shardings = jax.tree.map(place, SPECS)
        grads = jax.device_put(GRADS, shardings)
        for specs in (None, SPECS):
            tx = centralize_gradients(param_specs=specs)
            step = jax.jit(lambda g, tx=tx: tx.update(g, tx.init(g), g)[0])
            got = step(grads)
            assert_close(got, update(centralize_gradients(), GRADS))
            if kind == AxisType.Explicit:
                same = lambda x, s: x.sharding.is_equivalent_to(s, x.ndim)  # noqa: E731
                assert all(jax.tree.leaves(jax.tree.map(same, got, shardings)))
            text = step.lower(grads).compile().as_text()
            assert "all-gather" not in text and "all-to-all" not in text


@pytest.mark.parametrize("check_vma", [True, False])
def test_sharded_leaves_inside_shard_map(check_vma):
    got = jax.jit(in_shards(centralize_gradients(param_specs=SPECS), check_vma=check_vma))(GRADS)
    assert_close(got, update(centralize_gradients(), GRADS))


def test_without_specs_a_shard_takes_its_own_mean():
    """What param_specs is for: JAX knows that a leaf varies, but not along which of its axes."""
    got = jax.jit(in_shards(centralize_gradients()))(GRADS)
    expected = update(centralize_gradients(), GRADS)
    np.testing.assert_allclose(got["by_outputs"], expected["by_outputs"], atol=5e-7)
    assert np.abs(got["by_inputs"] - expected["by_inputs"]).max() > 0.1


def test_only_the_means_travel():
    found = costs.collectives(in_shards(centralize_gradients(param_specs=SPECS)), GRADS)
    # Output units that a device has of each leaf that is cut along its inputs, in f32.
    means = {"by_inputs": 8, "by_both": 2, "by_two_axes": 3, "conv": 2, "query": 2, "out": 6}
    # (8, 4, 2) by ("data", "fsdp"): one of four heads of two.
    assert sorted(c.bytes for c in found) == sorted(4 * n for n in means.values())
    assert {c.primitive for c in found} == {"psum"}
    sent = sum(c.bytes for c in found)
    whole = sum(x.nbytes for x in jax.tree.leaves(GRADS))
    print(f"{sent} of {whole} bytes")

    wide = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    for spec, expected in ((P("fsdp"), 4 * 1024), (P(None, "fsdp"), 0)):
        tx = centralize_gradients(param_specs=spec)
        one = jax.shard_map(
            lambda g, tx=tx: tx.update(g, tx.init(g))[0],
            mesh=mesh_of(),
            in_specs=spec,
            out_specs=spec,
        )
        assert sum(c.bytes for c in costs.collectives(one, wide)) == expected


def test_multiple_of_counts_the_channels_of_all_shards():
    tx = centralize_gradients(param_specs=SPECS, multiple_of=16)
    got = jax.jit(in_shards(tx))(GRADS)
    assert_close(got, update(centralize_gradients(multiple_of=16), GRADS))
    assert np.abs(got["by_inputs"] - GRADS["by_inputs"]).max() > 0.1


def test_a_mean_over_what_shards_share_out_by_one():
    """A shard that has one input of each unit has still others elsewhere."""
    g, spec = jnp.asarray(wave(8, 3)), P(("data", "fsdp"))
    tx = centralize_gradients(param_specs=spec)
    specs = {"in_specs": spec, "out_specs": spec}
    mapped = jax.shard_map(lambda g: tx.update(g, tx.init(g))[0], mesh=mesh_of(), **specs)
    np.testing.assert_allclose(mapped(g), less_mean(g, (0,)), atol=5e-7)


def test_axis_names_of_vmap():
    g = jnp.asarray(wave(4, 4, 3))
    tx = centralize_gradients(param_specs=P("shards"))
    got = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="shards")(g)
    np.testing.assert_allclose(got.reshape(16, 3), less_mean(g.reshape(16, 3), (0,)), atol=5e-7)


def test_training_on_shards_equals_training_on_one_device():
    """FSDP and data parallelism in make_train_step; local gradients, before the reduction."""
    specs = {"in": P("fsdp"), "out": P(None, "fsdp")}
    params = {"in": jnp.asarray(wave(8, 8)), "out": jnp.asarray(wave(8, 4, seed=5))}
    batch = {"x": jnp.asarray(wave(16, 8, seed=2)), "y": jnp.asarray(wave(16, 4, seed=3))}

    def loss_fn(params, batch):
        out = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
        return jnp.mean((out - batch["y"]) ** 2)

    mean = boostax.all_reduce("data")
    results = []
    for order, told in ((0, None), (1, specs)):
        parts = [centralize_gradients(param_specs=told), mean]
        tx = optax.chain(*(parts[::-1] if order else parts), optax.adam(1e-2))
        step = boostax.make_train_step(
            loss_fn, tx, mesh=mesh_of(), axis_name="data", param_specs=specs
        )
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, batch)
        results.append(state.params)
    single = boostax.make_train_step(loss_fn, optax.chain(centralize_gradients(), optax.adam(1e-2)))
    state = single.init(params)
    for _ in range(3):
        state, _ = single(state, batch)
    assert_close(results[0], state.params, 1e-5)
    assert_close(results[1], state.params, 1e-5)


def test_gradients_of_other_shapes_than_the_params_are_refused():
    tx = centralize_gradients()
    params = {"w": jnp.ones((16, 4))}
    with pytest.raises(ValueError) as error:
        tx.update({"w": jnp.ones((2, 4))}, tx.init(params), params)
    assert str(error.value) == (
        "centralize_gradients: gradients must have the shapes of the params, got (2, 4) for "
        "(16, 4) at 'w'. Put it before whatever cuts them."
    )


# Errors

AXES_HINT = "Try {'layers': 'stacked', '*/qkv': 0}."
RULE_HINT = "0 averages over the first axis, (0, 1) over the first two."
RULES = "'auto', rules of a path pattern and its axes, or a function of path and leaf"
RULE = "an int, a tuple of ints, 'auto', 'stacked' or None"
MATRIX = {"dense": {"kernel": jnp.ones((4, 4))}}


def refused(*parts):
    argument, allowed, got, hint = parts
    return f"centralize_gradients: {argument} must be {allowed}, got {got!r}. {hint}"


@pytest.mark.parametrize(
    ("kind", "arguments", "parts"),
    [
        (TypeError, {"axes": "last"}, ("axes", RULES, "last", AXES_HINT)),
        (TypeError, {"axes": 0}, ("axes", RULES, 0, AXES_HINT)),
        (TypeError, {"axes": ["a", "b"]}, ("axes", RULES, "a", AXES_HINT)),
        (TypeError, {"axes": {"a": 0.5}}, ("axes", RULE, 0.5, RULE_HINT)),
        (TypeError, {"axes": {"a": True}}, ("axes", RULE, True, RULE_HINT)),
        (TypeError, {"axes": [("a", (0, "b"))]}, ("axes", RULE, (0, "b"), RULE_HINT)),
        (ValueError, {"axes": {"a": "all"}}, ("axes", RULE, "all", RULE_HINT)),
        (
            TypeError,
            {"mask": {"a": 1}},
            (
                "mask",
                "a tree of bools, or a function of the params that makes one",
                1,
                "jax.tree.map(lambda p: p.ndim == 4, params) is for convolutions alone.",
            ),
        ),
        (
            ValueError,
            {"multiple_of": 0},
            ("multiple_of", "a positive integer", 0, "MindSpore's is 16."),
        ),
        (
            TypeError,
            {"param_specs": {"a": "x"}},
            (
                "param_specs",
                "a tree of PartitionSpec",
                "x",
                "PartitionSpec() is for a replicated leaf.",
            ),
        ),
    ],
)
def test_bad_arguments(kind, arguments, parts):
    with pytest.raises(kind) as error:
        centralize_gradients(**arguments)
    assert str(error.value) == refused(*parts)


@pytest.mark.parametrize(
    ("axes", "parts"),
    [
        (
            {"dens": 0},
            ("patterns that match params", "dens", "It matches none; there are 'dense/kernel'."),
        ),
        *(
            (
                {"dense": rule},
                (
                    "different axes of 'dense/kernel', which has 2",
                    rule,
                    "None leaves a leaf alone.",
                ),
            )
            for rule in (2, -3, (0, -2))
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused_at_init(axes, parts):
    tx = centralize_gradients(axes=axes)
    with pytest.raises(ValueError) as error:
        tx.init(MATRIX)
    assert str(error.value) == refused("axes", *parts)


def test_a_function_is_held_to_the_same_rules():
    with pytest.raises(TypeError) as error:
        centralize_gradients(axes=lambda path, leaf: 0.5).init(MATRIX)
    assert str(error.value) == refused("axes", RULE, 0.5, RULE_HINT)


@pytest.mark.parametrize(
    ("specs", "parts"),
    [
        (
            {"dense": {}},
            (
                "a tree of PartitionSpec with one for each param",
                "none at dense/kernel",
                "Use PartitionSpec() for a replicated leaf, not None.",
            ),
        ),
        (
            {"dense": {"kernel": P(None, None, "fsdp")}},
            (
                "for the 2 axes of 'dense/kernel'",
                P(None, None, "fsdp"),
                "Each entry is the mesh axes of one of them.",
            ),
        ),
        (
            {"dense": {"kernel": P("fdsp")}},
            (
                "among the mesh's axes ('data', 'fsdp')",
                "fdsp",
                "They are those of the surrounding jax.shard_map.",
            ),
        ),
    ],
)
def test_specs_that_do_not_fit(specs, parts):
    tx = centralize_gradients(param_specs=specs)
    mapped = jax.shard_map(
        lambda g: tx.update(g, tx.init(g))[0], mesh=mesh_of(), in_specs=P(), out_specs=P()
    )
    with pytest.raises(ValueError) as error:
        mapped(MATRIX)
    assert str(error.value) == refused("param_specs", *parts)


def test_integer_gradients_are_refused():
    with pytest.raises(TypeError, match="centralize_gradients: gradients must be floating"):
        update(centralize_gradients(), {"table": jnp.ones((3, 2), jnp.int32)})


def test_params_can_be_mapped_in_its_state():
    tx = optax.chain(centralize_gradients(axes={"dense": 0}), optax.adam(1e-3))
    state = tx.init(MATRIX)
    doubled = optax.tree.map_params(tx, lambda x: x + 1, state)
    assert jax.tree.structure(doubled) == jax.tree.structure(state)


# Accuracy


def held_out(build, optimizer, rates, seeds, axes):
    """Mean loss, its spread and the mean accuracy at the best rate, without and with it."""
    best = {}
    for name, center in (("without", optax.identity()), ("with", centralize_gradients(axes=axes))):
        means = {}
        for rate in rates:
            ends = []
            for seed in range(seeds):
                workload = build(seed)
                tx = optax.chain(center, optimizer(rate))
                step = boostax.make_train_step(workload.loss_fn, tx, has_aux=True)
                params, model_state = workload.init(jax.random.key(seed))
                state = step.init(params, model_state=model_state)
                for index in range(300):
                    state, _ = step(state, workload.batch(index))
                result = workload.evaluate(state.params, state.model_state)
                ends.append((result["loss"], result["accuracy"]))
            means[rate] = (np.mean(ends, 0)[0], np.std(ends, 0)[0], np.mean(ends, 0)[1])
            loss, spread, accuracy = means[rate]
            print(f"{name} at {rate}: loss {loss:.4f} +- {spread:.4f}, accuracy {accuracy:.4f}")
        best[name] = min(means.values())
    return best


@pytest.mark.long
@pytest.mark.parametrize("model", ["mlp", "conv"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_held_out_loss_on_digits(model, optimizer):
    """What the card tells: five seeds, the best of three learning rates each."""
    sgd = (functools.partial(optax.sgd, momentum=0.9), (0.03, 0.1, 0.3))
    chosen, rates = sgd if optimizer == "sgd" else (optax.adamw, (1e-3, 3e-3, 1e-2))
    build = lambda seed: digits(DigitsConfig(model=model, seed=seed))  # noqa: E731
    best = held_out(build, chosen, rates, 5, "auto")
    assert best["with"][0] < 1.1 * best["without"][0]


@pytest.mark.long
def test_held_out_loss_on_text():
    """The same of a small language model; it has tables, and one projection for three."""
    axes = {"characters": None, "positions": None, "*/attention_in": 0}
    build = lambda seed: text(TextConfig(seed=seed))  # noqa: E731
    best = held_out(build, optax.adamw, (1e-3, 3e-3), 2, axes)
    assert best["with"][0] < 1.05 * best["without"][0]
