"""LessBN: which norms go, that nothing of them is left, and the head of cosines."""

import functools
import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lanes import lanes
from mindspore_runs import LEAVES, turned

from boostax._core.trees import names
from boostax.model.less_bn import less_bn
from boostax.model.normalized_dense import NormalizedDense, NormalizedLinear, normalized_dense

f16, f32, f64 = jnp.float16, jnp.float32, jnp.float64
IMAGES = jax.random.normal(jax.random.key(1), (4, 8, 8, 3))
KEY = jax.random.key(0)


# Each kind of block on a stream of 8 channels, and the norms of it that go.
def plain(x, conv, norm):
    x = nn.relu(norm(conv(x, "conv_1"), "norm_1"))
    return nn.relu(norm(conv(x, "conv_2"), "norm_2"))


def basic(x, conv, norm, act=nn.relu):
    return act(norm(conv(act(norm(conv(x, "conv_1"), "norm_1")), "conv_2"), "norm_2") + x)


def basic_shortcut_first(x, conv, norm):
    """MindSpore's patterns miss it."""
    return nn.relu(x + norm(conv(jnp.tanh(norm(conv(x, "conv_1"), "norm_1")), "conv_2"), "norm_2"))


def bottleneck_downsample(x, conv, norm):
    y = nn.relu(norm(conv(x, "conv_1", 4, 1), "norm_1"))
    y = nn.relu(norm(conv(y, "conv_2", 4, stride=2), "norm_2"))
    y = norm(conv(y, "conv_3", 16, 1), "norm_3")
    return nn.relu(y + norm(conv(x, "conv_d", 16, 1, stride=2), "norm_d"))


def preactivation(x, conv, norm):
    """The first norm is before the fork if the shortcut reads it, else in the branch."""
    y = nn.relu(norm(x, "norm_1"))
    short = conv(y, "conv_d", 16, 1)
    y = nn.relu(norm(conv(y, "conv_1"), "norm_2"))
    x = short + conv(y, "conv_2", 16)
    y = conv(nn.relu(norm(x, "norm_3")), "conv_3")
    return nn.relu(norm(x + conv(nn.relu(norm(y, "norm_4")), "conv_4", 16), "norm_5"))


def inverted_residual(x, conv, norm):
    y = nn.relu6(norm(conv(x, "conv_1", 16, 1), "norm_1"))
    y = nn.relu6(norm(conv(y, "conv_2", 16, groups=16), "norm_2"))
    return x + norm(conv(y, "conv_3", 8, 1), "norm_3")


def dense_block(x, conv, norm):
    for i in (0, 2):
        y = conv(nn.relu(norm(x, f"norm_{i + 1}")), f"conv_{i + 1}", 16, 1)
        y = conv(nn.relu(norm(y, f"norm_{i + 2}")), f"conv_{i + 2}", 4)
        x = jnp.concatenate([x, y], -1)
    return nn.relu(norm(x, "transition"))


def shuffle_unit(x, conv, norm):
    left, y = jnp.split(x, 2, -1)
    y = nn.relu(norm(conv(y, "conv_1", 4, 1), "norm_1"))
    y = norm(conv(y, "conv_2", 4, groups=4), "norm_2")
    return jnp.concatenate([left, nn.relu(norm(conv(y, "conv_3", 4, 1), "norm_3"))], -1)


def inception(x, conv, norm):
    """No operand is a shortcut, so no branch is a residual one."""
    y = plain(x, conv, norm)
    return jnp.concatenate([y, nn.relu(norm(conv(x, "conv_3", 8, 1), "norm_3"))], -1)


def two_towers(x, conv, norm):
    """A sum of two equals: neither is the shortcut of the other."""
    return nn.relu(norm(conv(x, "conv_1"), "norm_1") + norm(conv(x, "conv_2"), "norm_2"))


def nested(x, conv, norm):
    """A residual block inside a residual branch, judged by its own sum."""
    y = plain(x, conv, norm)
    y = nn.relu(y + norm(conv(nn.relu(norm(conv(y, "conv_3"), "norm_3")), "conv_4"), "norm_4"))
    return x + y


# Blocks, and the norms of each that go.
BLOCKS = {
    "plain": (plain, ()),
    "basic": (basic, ("norm_1",)),
    "basic_gelu": (functools.partial(basic, act=nn.gelu), ("norm_1",)),
    "basic_shortcut_first": (basic_shortcut_first, ("norm_1",)),
    "bottleneck_downsample": (bottleneck_downsample, ("norm_1", "norm_2", "norm_d")),
    "preactivation": (preactivation, ("norm_3",)),
    "inverted_residual": (inverted_residual, ("norm_1", "norm_2")),
    "dense_block": (dense_block, ("norm_1", "norm_3")),
    "shuffle_unit": (shuffle_unit, ("norm_1", "norm_2")),
    "inception": (inception, ()),
    "two_towers": (two_towers, ()),
    "nested": (nested, ("norm_1", "norm_3")),
}
QUICK = "plain basic bottleneck_downsample preactivation inverted_residual dense_block".split()


class Linen(nn.Module):
    """A stem, a block, a head; ``skip`` names norms that are left out by hand."""

    block: object
    skip: tuple = ()
    cosines: bool = False

    @nn.compact
    def __call__(self, x, train=False):
        def conv(x, name, features=8, size=3, stride=1, groups=1):
            window, strides = (size, size), (stride, stride)
            return nn.Conv(features, window, strides, feature_group_count=groups, name=name)(x)

        def norm(x, name):
            return x if name in self.skip else nn.BatchNorm(not train, name=name)(x)

        x = self.block(nn.relu(norm(conv(x, "stem"), "stem_norm")), conv, norm).mean((1, 2))
        head = NormalizedDense if self.cosines else nn.Dense
        return head(3, name="head")(nn.Dense(8, name="hidden")(x))


class NNX(nnx.Module):
    """The same; the layers are made by a first call."""

    def __init__(self, block, skip=(), cosines=False):
        self.block, self.skip, self.cosines = block, skip, cosines
        self.rngs = nnx.data(nnx.Rngs(0))
        self(IMAGES)
        self.rngs = nnx.data(None)

    def __call__(self, x):
        def layer(name, make):
            if self.rngs is not None:
                setattr(self, name, make())
            return getattr(self, name)

        def conv(x, name, features=8, size=3, stride=1, groups=1):
            options = {"strides": stride, "feature_group_count": groups, "rngs": self.rngs}
            make = functools.partial(nnx.Conv, x.shape[-1], features, (size, size), **options)
            return layer(name, make)(x)

        def norm(x, name):
            make = functools.partial(nnx.BatchNorm, x.shape[-1], rngs=self.rngs)
            return x if name in self.skip else layer(name, make)(x)

        x = self.block(nn.relu(norm(conv(x, "stem"), "stem_norm")), conv, norm).mean((1, 2))
        head = NormalizedLinear if self.cosines else lambda linear: linear
        x = layer("hidden", lambda: nnx.Linear(x.shape[-1], 8, rngs=self.rngs))(x)
        return layer("head", lambda: head(nnx.Linear(8, 3, rngs=self.rngs)))(x)


@pytest.mark.parametrize("kind", lanes(BLOCKS, QUICK))
def test_linen_equals_the_model_written_without_those_layers(kind):
    block, removed = BLOCKS[kind]
    model, report = less_bn(Linen(block), IMAGES)
    assert report.removed == removed and report.head == "head"
    by_hand = Linen(block, removed, cosines=True)
    variables, expected = model.init(KEY, IMAGES), by_hand.init(KEY, IMAGES)
    chex.assert_trees_all_equal(variables, expected)
    whole = set(names(Linen(block).init(KEY, IMAGES)))
    gone = {name for name in whole if any(f"/{x}/" in name for x in removed)}
    assert len(gone) == 4 * len(removed)
    multiplier = {"params/head/multiplier"}
    assert set(names(variables)) == (whole - gone - {"params/head/bias"}) | multiplier
    train = {"train": True, "mutable": ["batch_stats"]}
    found = model.apply(variables, IMAGES, **train)
    chex.assert_trees_all_equal(found, by_hand.apply(expected, IMAGES, **train))
    variables = {"params": variables["params"], **found[1]}
    chex.assert_trees_all_equal(model.apply(variables, IMAGES), by_hand.apply(variables, IMAGES))


# The rule is the same code; what differs is how layers are marked and replaced.
@pytest.mark.parametrize("kind", lanes(BLOCKS, ["basic", "bottleneck_downsample"]))
def test_nnx_equals_the_model_written_without_those_layers(kind):
    block, removed = BLOCKS[kind]
    original = NNX(block)
    before = nnx.state(original)
    model, report = less_bn(original, IMAGES)
    assert report.removed == removed and report.head == "head"
    by_hand = NNX(block, removed, cosines=True)
    state = nnx.state(model)
    assert names(state) == names(nnx.state(by_hand))
    chex.assert_trees_all_equal(state["head"]["kernel"], before["head"]["kernel"])
    nnx.update(by_hand, state)
    chex.assert_trees_all_equal(model(IMAGES), by_hand(IMAGES))
    chex.assert_trees_all_equal(nnx.state(model), nnx.state(by_hand))
    model.eval()
    by_hand.eval()
    chex.assert_trees_all_equal(model(IMAGES), by_hand(IMAGES))
    chex.assert_trees_all_equal(nnx.state(original), before)
    assert type(original.stem_norm) is nnx.BatchNorm and type(original.head) is nnx.Linear


def test_report():
    report = less_bn(Linen(bottleneck_downsample), IMAGES)[1]
    assert str(report) == (
        "less_bn: 3 of 5 BatchNorms removed\n"
        "  kept     stem_norm  in no residual branch\n"
        "  removed  norm_1     norm_3 is the last of its branch\n"
        "  removed  norm_2     norm_3 is the last of its branch\n"
        "  kept     norm_3     last of its branch to a sum\n"
        "  removed  norm_d     on the shortcut; norm_3 stays\n"
        "  head     head is a NormalizedDense"
    )
    assert report.kept == ("stem_norm", "norm_3")
    report = less_bn(Linen(dense_block), IMAGES, normalized_head=False)[1]
    assert "norm_2      last of its branch to a concatenation\n" in str(report)
    assert str(report).endswith("\n  head     as it was")
    report = less_bn(Linen(plain), IMAGES)[1]
    assert str(report).startswith("less_bn: 0 of 3 BatchNorms removed\n")
    assert {norm.reason for norm in report.norms} == {"in no residual branch"}


CHOSEN = [
    (["norm_*"], ("norm_1", "norm_2"), {"no match", "matches 'norm_*'"}),
    (("norm_2", "stem_norm"), ("stem_norm", "norm_2"), None),
    (lambda path, by_rule: not by_rule, ("stem_norm", "norm_2"), None),
    (lambda path, by_rule: path == "norm_1", ("norm_1",), {"remove says so", "remove says no"}),
    ([], (), {"no match"}),
]


@pytest.mark.parametrize(("remove", "removed", "reasons"), CHOSEN)
def test_the_user_may_choose(remove, removed, reasons):
    model, report = less_bn(Linen(basic), IMAGES, remove=remove)
    assert report == less_bn(NNX(basic), IMAGES, remove=remove)[1] and report.removed == removed
    assert reasons is None or {norm.reason for norm in report.norms} == reasons
    by_hand = Linen(basic, removed, cosines=True)
    assert jax.eval_shape(model.init, KEY, IMAGES) == jax.eval_shape(by_hand.init, KEY, IMAGES)


def test_without_a_normalized_head_only_norms_change():
    model, report = less_bn(Linen(basic), IMAGES, normalized_head=False)
    assert report.head is None
    by_hand = Linen(basic, ("norm_1",))
    chex.assert_trees_all_equal(model.init(KEY, IMAGES), by_hand.init(KEY, IMAGES))
    model, _ = less_bn(Linen(basic), IMAGES, multiplier=8.0)
    assert model.init(KEY, IMAGES)["params"]["head"].get("multiplier") == 8
    assert less_bn(NNX(basic), IMAGES, multiplier=8.0)[0].head.multiplier[...] == 8
    with pytest.raises(ValueError, match=r"^less_bn: args must be a sample of the module's input"):
        less_bn(Linen(basic), train=True)


@pytest.mark.parametrize("sample", [IMAGES, jax.ShapeDtypeStruct(IMAGES.shape, f16)])
@pytest.mark.parametrize("train", [True, False])
def test_the_sample_may_be_a_shape_and_either_mode_decides_alike(sample, train):
    model, report = less_bn(Linen(basic), sample, train=train)
    assert (model, report) == less_bn(Linen(basic), IMAGES)
    assert hash(model) == hash(less_bn(Linen(basic), IMAGES)[0])


def test_nothing_of_the_users_and_nothing_global_changes():
    layers = nn.BatchNorm, nn.Dense, nnx.BatchNorm, nnx.Linear
    calls = [layer.__call__ for layer in layers]
    net = Linen(basic)
    variables = net.init(KEY, IMAGES)
    model, _ = less_bn(net, IMAGES)
    model.init(KEY, IMAGES)
    less_bn(NNX(basic), IMAGES)
    chex.assert_trees_all_equal(net.init(KEY, IMAGES), variables)
    assert net == Linen(basic) and model.module == net
    assert calls == [layer.__call__ for layer in layers]


class Lifted(nn.Module):
    """Blocks under jit, remat and scan, and a norm that is called in a branch and outside."""

    @nn.compact
    def __call__(self, x, train=False):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, train):
                def conv(x, name):
                    return nn.Conv(x.shape[-1], (3, 3), name=name)(x)

                return basic(x, conv, lambda x, name: nn.BatchNorm(not train, name=name)(x)), None

        x, _ = nn.jit(Block, static_argnums=2)(name="jitted")(x, train)
        x, _ = nn.remat(Block, static_argnums=(2,))(name="remat")(x, train)
        axes = {"params": 0, "batch_stats": 0}
        stack = nn.scan(Block, axes, split_rngs={"params": True}, in_axes=nn.broadcast, length=3)
        x, _ = stack(name="stack")(x, train)
        shared = nn.BatchNorm(not train, name="shared")
        x = x + nn.BatchNorm(not train, name="own")(nn.Conv(3, (3, 3))(shared(x)))
        return nn.Dense(3, name="head")(shared(x).mean((1, 2)))


def test_lifted_and_shared_modules():
    net = Lifted()
    jax.eval_shape(net.init, KEY, IMAGES)  # fills the cache of nn.jit
    model, report = less_bn(net, IMAGES)
    assert report.removed == ("jitted/norm_1", "remat/norm_1", "stack/norm_1")
    reasons = {norm.path: norm.reason for norm in report.norms}
    assert reasons["jitted/norm_1"] == "norm_2 is the last of its branch"
    assert less_bn(net, IMAGES, remove=["stack"])[1].removed == ("stack/norm_1", "stack/norm_2")
    variables = jax.jit(model.init)(KEY, IMAGES)
    assert set(variables["batch_stats"]["stack"]) == {"norm_2"}
    assert variables["params"]["stack"]["norm_2"]["scale"].shape == (3, 3)
    y, new = model.apply(variables, IMAGES, train=True, mutable=["batch_stats"])
    chex.assert_trees_all_equal_shapes(new["batch_stats"], variables["batch_stats"])
    assert bool(jnp.isfinite(y).all())


def test_a_model_inside_a_model_and_flax_transforms():
    inner, _ = less_bn(Linen(basic), IMAGES)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(inner.copy()(x))

    params = Outer().init(KEY, IMAGES)["params"]
    (name,) = set(params) - {"Dense_0"}
    assert set(params[name]) == set("stem stem_norm conv_1 conv_2 norm_2 hidden head".split())


class Containers(nnx.Module):
    """Norms in a list, and one object in two places."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.convs = nnx.List([nnx.Conv(3, 3, (3, 3), rngs=rngs) for _ in range(2)])
        self.norms = nnx.List([nnx.BatchNorm(3, rngs=rngs) for _ in range(2)])
        self.first, self.idle = self.norms[0], nnx.BatchNorm(3, rngs=rngs)
        self.drop, self.head = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        x = x + self.norms[1](self.convs[1](self.drop(nn.relu(self.first(self.convs[0](x))))))
        return self.head(x.mean((1, 2)))


def test_nnx_containers_references_and_random_numbers():
    net = Containers()
    model, report = less_bn(net, IMAGES)
    assert report.removed == ("first",) and model.first is model.norms[0]
    assert report.norms[-1] == ("idle", False, "not met in the trace")
    assert "first" not in nnx.state(model) and "0" not in nnx.state(model)["norms"]
    assert model(IMAGES).shape == (4, 2) and int(net.drop.rngs.count[...]) == 0


def test_norms_over_a_named_axis_need_no_axis_to_be_judged():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            y = x
            for name in ("norm_1", "norm_2"):
                y = nn.BatchNorm(not train, axis_name="data", name=name)(nn.Conv(3, (3, 3))(y))
            return nn.Dense(2)((x + y).mean((1, 2)))

    assert less_bn(Net(), IMAGES, train=True)[1].kept == ("norm_2",)


def test_the_head_is_the_dense_that_nothing_follows():
    """A gate's Dense is not, though it is called last of all."""

    class Gated(nn.Module):
        last: bool

        @nn.compact
        def __call__(self, x):
            y = nn.Dense(4, name="first")(x.mean((1, 2)))
            if self.last:
                return nn.log_softmax(nn.Dense(3, name="second")(y))
            x = x * nn.Dense(3, name="gate")(nn.relu(y))[:, None, None]
            return nn.Conv(2, (8, 8), padding="VALID")(x).reshape(-1, 2)

    model, report = less_bn(Gated(True), IMAGES)
    assert report.head == "second"
    params = model.init(KEY, IMAGES)["params"]
    assert set(params["first"]) == {"kernel", "bias"}
    assert set(params["second"]) == {"kernel", "multiplier"}
    with pytest.raises(ValueError, match="False for a model that does not end with a Dense"):
        less_bn(Gated(False), IMAGES)


CHANGED = less_bn(Linen(basic), IMAGES)[0]
NO_NORM = r"match BatchNorms, got 'bn\*'\. BatchNorms: stem_norm, norm_1, norm_2\."
WRONG = {
    "module must be a flax.linen.Module or .*, got .*'str'": ("net", {}),
    "module must be .* that less_bn has not changed yet, got .*LessBN": (CHANGED, {}),
    NO_NORM: (Linen(basic), {"remove": ["norm_1", "bn*"]}),
    "match BatchNorms, got 'n'": (Linen(basic), {"remove": "norm_1"}),
    "BatchNorms: stem_norm: in no residual branch; norm_1: in no ": (Linen(plain), {}),
    "removes a BatchNorm, got None. Nothing would change. .*: none.": (nn.Dense(2), {}),
    "model that does not end with a Dense, got T": (nn.Conv(2, (3, 3)), {"normalized_head": True}),
    "multiplier must be positive, got 0": (Linen(basic), {"multiplier": 0}),
}


@pytest.mark.parametrize("said", WRONG)
def test_errors(said):
    module, options = WRONG[said]
    with pytest.raises((TypeError, ValueError), match=f"^less_bn: .*{said}"):
        less_bn(module, IMAGES, **{"normalized_head": False, **options})


# MindSpore.


class Recorded(nn.Module):
    """The network of the recorded arrays."""

    @nn.compact
    def __call__(self, x):
        def layer(x, conv, norm, size=1):
            x = nn.Conv(8, (size, size), use_bias=False, name=conv)(x)
            return nn.BatchNorm(use_running_average=False, name=norm)(x)

        x = nn.relu(layer(x, "c0", "b0", 3))
        for k in ("k1", "k2", "k3"):
            y = nn.relu(layer(x, f"{k}.c1", f"{k}.b1"))
            y = layer(nn.relu(layer(y, f"{k}.c2", f"{k}.b2", 3)), f"{k}.c3", f"{k}.b3")
            x = nn.relu(y + (layer(x, "k1.cd", "k1.bd") if k == "k1" else x))
        x = nn.Dense(8, name="hid")(x.mean((1, 2)))
        return nn.Dense(4, name="fc")(x)


def test_mindspores_network(arrays):
    run = arrays("less_bn_resnet.npz")
    x = run["x"].transpose(0, 2, 3, 1)
    less, report = less_bn(Recorded(), x, normalized_head=False)
    assert {*report.removed} == {"k1.bd", *(f"k{i}.b{j}" for i in (1, 2, 3) for j in (1, 2))}
    # MindSpore's weights, which lead with the outputs, in the places of Flax's.
    params = {name[2:].rpartition(".")[0]: {} for name in run if name.startswith("w_")}
    for module, leaf in itertools.product(params, LEAVES):
        if (name := f"w_{module}.{leaf}") in run:
            params[module][LEAVES[leaf]] = turned(run[name])
    for model, name in ((Recorded(), "y_plain_train"), (less, "y_lessbn_train")):
        y, _ = model.apply({**model.init(KEY, x), "params": params}, x, mutable=["batch_stats"])
        assert np.abs(y - run[name]).max() < 1e-5
    assert np.abs(run["y_plain_train"] - run["y_lessbn_train"]).max() > 0.05


@pytest.mark.parametrize("bias", [True, False])
def test_mindspores_head(arrays, bias):
    run = arrays("less_bn_fn_head.npz")
    params = {"kernel": run["W"].T, "multiplier": f32(run["multiplier"][0])}
    params |= {"bias": run["b"]} if bias else {}
    y = NormalizedDense(4, use_bias=bias).apply({"params": params}, run["x"])
    expected = run[f"y_bias{bias}"]
    # MindSpore and Flax each round every sum of a product.
    atol = len(params["kernel"]) * np.finfo(np.float32).eps * np.abs(expected).max()
    np.testing.assert_allclose(y, expected, rtol=0, atol=atol)


# The head.


def reference(x, kernel, multiplier, bias=0.0):
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    lengths = np.linalg.norm(x, axis=-1, keepdims=True), np.linalg.norm(kernel, axis=0)
    x, kernel = (a / np.where(l == 0, 1, l) for a, l in zip((x, kernel), lengths, strict=True))
    return float(multiplier) * (x @ kernel + np.asarray(bias, np.float64))


def problem(dtype=f32, scale=1.0):
    keys = jax.random.split(KEY, 3)
    x = (jax.random.normal(keys[0], (2, 5, 6)) * scale).astype(dtype).at[0, 1].set(0)
    kernel = (jax.random.normal(keys[1], (6, 4)) * scale).at[:, 2].set(0)
    return x, kernel, jnp.asarray(2.5), jax.random.normal(keys[2], (4,))


@pytest.mark.parametrize("dtype", [f16, jnp.bfloat16, f32, f64])
@pytest.mark.parametrize("scale", lanes([1e-30, 1e-3, 1.0, 1e30], [1e-30, 1e30]))
def test_head_against_numpy(dtype, scale):
    """Lengths over- or underflow in no dtype."""
    scale = {1e-30: 1e-3, 1e30: 1e4}.get(scale, scale) if dtype == f16 else scale
    with jax.enable_x64(dtype == f64):
        x, kernel, multiplier, bias = problem(dtype, scale)
        y = normalized_dense(x, kernel.astype(dtype), multiplier, bias)
        assert y.dtype == dtype
        expected = reference(x, kernel.astype(dtype), multiplier, bias)
        tolerance = {f16: 4e-3, f32: 2e-6, f64: 1e-14}.get(dtype, 3e-2)
        np.testing.assert_allclose(np.float64(y), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("bias", [True, False])
def test_head_computes_low_from_f32_params(bias):
    x = problem(f16, 1e4)[0]
    head = NormalizedDense(4, use_bias=bias, dtype=f16)
    variables = head.init(KEY, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(f32)}
    assert variables["params"]["multiplier"] == 1
    lecun = jnp.std(variables["params"]["kernel"]) * len(variables["params"]["kernel"]) ** 0.5
    assert 0.7 < lecun < 1.3
    jaxpr = jax.make_jaxpr(head.apply)(variables, x)
    dtypes = {e.primitive.name: e.outvars[0].aval.dtype for e in jaxpr.eqns}
    assert dtypes["dot_general"] == f16 and dtypes["rsqrt"] == f32
    y = head.apply(variables, x)
    assert y.dtype == f16
    params = variables["params"]
    expected = reference(x, params["kernel"], params["multiplier"], 0.0)
    np.testing.assert_allclose(np.float64(y), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [f16, pytest.param(f32, marks=pytest.mark.long)])
def test_zero_vectors_have_finite_gradients_and_learn(dtype):
    x, kernel, multiplier, bias = problem(dtype)
    f = lambda *args: jnp.sum(normalized_dense(*args).astype(f32) ** 2)  # noqa: E731
    grads = jax.grad(f, argnums=range(4))(x, kernel, multiplier, bias)
    assert all(bool(jnp.isfinite(g).all()) for g in grads)
    zeros = jnp.zeros((6, 4))
    assert bool((normalized_dense(x, zeros, multiplier) == 0).all())
    f = lambda kernel: jnp.sum(normalized_dense(x[1], kernel, multiplier).astype(f32))  # noqa: E731
    grad = jax.grad(f)(zeros)
    assert bool(jnp.isfinite(grad).all() & (grad != 0).any(0).all())
