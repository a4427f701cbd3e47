"""Groups of layers: what is frozen together, and in which order the network reads its params."""

import collections
import functools
import json
import random
import re
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawing import draws
from flax import nnx, struct
from flax.core import FrozenDict
from hypothesis import given
from hypothesis import strategies as st
from jax import P, lax

import boostax
from boostax._core import trees
from boostax._core.groups import as_groups
from boostax.freeze.groups import mindspore_groups, param_groups, prefix_groups
from boostax.freeze.order import forward_order

MATRIX = jax.ShapeDtypeStruct((4, 4), jnp.float32)
VECTOR = jax.ShapeDtypeStruct((4,), jnp.float32)
DENSE = {"kernel": MATRIX, "bias": VECTOR}
NORM = {"scale": VECTOR, "bias": VECTOR}
X = jnp.ones((2, 4))


def tree_of(who, groups, params):
    """The group of each leaf."""
    return as_groups(who, groups, params).tree


def by_module(groups):
    """The one group of each top-level module."""
    found = {key: set(jax.tree.leaves(value)) for key, value in groups.items()}
    return {key: value.pop() if len(value) == 1 else value for key, value in found.items()}


# Layers


def test_groups_are_even_in_layers_and_python_ints():
    params = [DENSE] * 7
    groups = prefix_groups(params, 3)
    assert groups == [{"kernel": i, "bias": i} for i in (0, 0, 0, 1, 1, 2, 2)]
    assert all(type(label) is int for label in jax.tree.leaves(groups))
    assert prefix_groups(params, 1) == [{"kernel": 0, "bias": 0}] * 7
    assert [group["bias"] for group in prefix_groups(params, 7)] == [*range(7)]


TWELVE = [f"block_{i}" for i in range(12)]
TABLES = {"characters": MATRIX, "positions": MATRIX, "block": DENSE}
CUTS = {
    # Defect guarded against: JAX sorts block_10 before block_2.
    "numbers": (dict.fromkeys(sorted(TWELVE), DENSE), None, TWELVE),
    "ints": ({i: DENSE for i in (10, 9, 2)}, None, [2, 9, 10]),
    "ordered": (collections.OrderedDict(stem=DENSE, body=DENSE, head=DENSE), None, None),
    "bare leaves": (TABLES, [*TABLES], None),
}


@pytest.mark.parametrize(("params", "order", "expected"), CUTS.values(), ids=CUTS.keys())
def test_layers_stand_in_the_order_of_the_forward_pass(params, order, expected):
    found = by_module(prefix_groups(params, len(params), order=order))
    assert sorted(found, key=found.__getitem__) == (list(params) if expected is None else expected)


def test_numbers_inside_of_names_and_params_that_are_one_leaf():
    found = by_module(prefix_groups({f"b{i}/c{j}": DENSE for i in (2, 10) for j in (10, 9)}, 4))
    assert found == {"b2/c9": 0, "b2/c10": 1, "b10/c9": 2, "b10/c10": 3}
    assert prefix_groups(MATRIX, 1, order=[""]) == 0


@pytest.mark.parametrize("kind", [dict, FrozenDict, lambda d: collections.defaultdict(dict, d)])
def test_the_order_of_insertion_does_not_matter(kind):
    keys = random.Random(0).sample(TWELVE, 12)
    found = by_module(prefix_groups(kind(dict.fromkeys(keys, DENSE)), 5))
    assert found == by_module(prefix_groups(dict.fromkeys(TWELVE, DENSE), 5))


def test_norms_belong_to_the_layer_before():
    params = {"a": NORM, "b": DENSE, "c": NORM, "d": NORM, "e": DENSE, "f": NORM}
    assert by_module(prefix_groups(params, 2)) == {"a": 0, "b": 0, "c": 0, "d": 0, "e": 1, "f": 1}
    # By an order, where their names stand apart.
    params = {"conv_0": DENSE, "conv_1": DENSE, "head": DENSE, "norm_0": NORM, "norm_1": NORM}
    order = ["conv_0", "norm_0", "conv_1", "norm_1", "head"]
    groups = by_module(prefix_groups(params, 3, order=order))
    assert groups == {"conv_0": 0, "norm_0": 0, "conv_1": 1, "norm_1": 1, "head": 2}
    # Vectors alone are layers where there is nothing else.
    assert prefix_groups([1.0, VECTOR, NORM], 3) == [0, 1, {"scale": 2, "bias": 2}]


def test_level_makes_a_layer_of_a_block():
    block = {"attention": DENSE, "mlp": {"up": DENSE, "down": DENSE}, "gain": VECTOR}
    params = {"block_0": block, "block_1": block, "embed": MATRIX, "head": DENSE}
    order = ["embed", "block_0", "block_1", "head"]
    groups = prefix_groups(params, 4, order=order, level=1)
    assert by_module(groups) == {"embed": 0, "block_0": 1, "block_1": 2, "head": 3}
    groups = prefix_groups(params, 6, order=order, level=2)
    assert by_module(groups) == {"embed": 0, "block_0": {1, 2}, "block_1": {3, 4}, "head": 5}
    # Deeper than the tree is: kernels keep their biases.
    assert prefix_groups(params, 8, order=order, level=9) == prefix_groups(params, 8, order=order)


class Pair(NamedTuple):
    z: object
    a: object


@struct.dataclass
class Layer:
    weight: object = MATRIX
    bias: object = VECTOR
    name: str = struct.field(pytree_node=False, default="layer")


def test_other_containers_by_field_and_by_index():
    first, *others = ({"kernel": i, "bias": i} for i in range(3))
    assert prefix_groups(Pair(DENSE, [DENSE] * 2), 3) == Pair(first, others)
    groups = prefix_groups((Layer(), None, Layer()), 2)
    assert jax.tree.leaves(groups) == [0, 0, 1, 1]
    assert groups[1] is None and groups[2].name == "layer"
    assert prefix_groups(tuple([MATRIX] * 12), 12) == tuple(range(12))


def test_nnx_variables_are_no_modules():
    """Defect guarded against: below a kernel NNX has one more level, its ``value``."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Linear(4, 4, rngs=rngs)
            linears = (nnx.Linear(4, 4, rngs=rngs) for _ in range(11))
            blocks = [nnx.Dict(linear=x, norm=nnx.LayerNorm(4, rngs=rngs)) for x in linears]
            self.blocks = nnx.List(blocks)
            self.gain = nnx.Param(jnp.ones(4))

        def __call__(self, x):
            x = self.stem(x * self.gain[...])
            for block in self.blocks:
                x = x + block.linear(block.norm(x))
            return x.sum()

    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
    order = forward_order(lambda params, x: nnx.merge(graph, params)(x), params, X)
    assert order[:3] == ["gain/value", "stem/kernel/value", "stem/bias/value"]
    assert order[-2:] == ["blocks/10/linear/kernel/value", "blocks/10/linear/bias/value"]
    for prefixes in (order, ["gain", "stem", *(f"blocks/{i}" for i in range(11))]):
        groups = prefix_groups(params, 12, order=prefixes, level=2)
        assert jax.tree.structure(groups) == jax.tree.structure(params)
        found = dict(trees.named(groups))
        assert {found["gain/value"], found["stem/bias/value"]} == {0}
        assert [found[f"blocks/{i}/linear/bias/value"] for i in range(11)] == [*range(1, 12)]
        assert tree_of("who", groups, params) == groups


def test_partitioned_params_are_no_modules():
    box = functools.partial(nn.Partitioned, names=(None, None))
    params = {"b": {"kernel": box(MATRIX), "bias": VECTOR}, "a": {"kernel": box(MATRIX)}}
    groups = prefix_groups(params, 2)
    assert dict(trees.named(groups)) == {"a/kernel/value": 0, "b/kernel/value": 1, "b/bias": 1}


def test_order_by_prefixes_of_any_length():
    params = {"a": {"x": DENSE, "y": DENSE}, "b": DENSE, "c/d": DENSE}
    groups = prefix_groups(params, 4, order=["c", "a/y/bias", "b", "a", "b"])
    assert by_module(groups) == {"a": {1, 3}, "b": 2, "c/d": 0}
    assert groups["a"]["y"] == {"kernel": 1, "bias": 1}


keys = st.text("ab01_", min_size=1, max_size=3)
modules = st.dictionaries(keys, st.sampled_from([DENSE, NORM, {"kernel": MATRIX}]), min_size=1)
networks = st.dictionaries(keys, modules, min_size=1, max_size=5)


@draws(60)
@given(networks, st.integers(1, 8), st.randoms(use_true_random=False), st.booleans())
def test_every_leaf_is_in_one_group_and_groups_follow_the_order(params, n, rng, ordered):
    modules = [(key, name) for key, inner in params.items() for name in inner]
    rng.shuffle(modules)
    order = [f"{key}/{name}" for key, name in modules] if ordered else None
    matrices = sum("kernel" in inner[name] for inner in params.values() for name in inner)
    layers = matrices or len(modules)
    if n > layers:
        with pytest.raises(ValueError, match=f"number of layers, {layers}, got {n}"):
            prefix_groups(params, n, order=order)
        return
    groups = prefix_groups(params, n, order=order)
    assert jax.tree.structure(groups) == jax.tree.structure(params)
    assert set(jax.tree.leaves(groups)) == set(range(n))
    for inner in groups.values():
        assert all(len(set(module.values())) == 1 for module in inner.values())
    if ordered:
        along = [min(groups[key][name].values()) for key, name in modules]
        assert along == sorted(along)
    found = [groups[key][name].get("kernel") for key, name in modules]
    sizes = collections.Counter(label for label in found if label is not None)
    assert not sizes or max(sizes.values()) - min(sizes.values()) <= 1


# The order found from the function


def dense(name, x, p):
    return jnp.tanh(x @ p[name]["kernel"] + p[name]["bias"])


def three(p, x):
    return dense("a", dense("m", dense("z", x, p), p), p).sum()


ZMA = {"a": DENSE, "m": DENSE, "z": DENSE}
ZMA_ORDER = ["z/kernel", "z/bias", "m/kernel", "m/bias", "a/kernel", "a/bias"]


@jax.custom_vjp
def halved(p):
    return jax.tree.map(lambda w: w / 2, p)


halved.defvjp(lambda p: (halved(p), None), lambda _, g: (g,))


AHEAD = {
    "plain": lambda p: p,
    "cast": lambda p: jax.tree.map(lambda w: w.astype(jnp.float16), p),
    "reshape": lambda p: jax.tree.map(lambda w: 2 * w.reshape(-1)[::-1].reshape(w.shape).T + 0, p),
    "copy": lambda p: jax.tree.map(jnp.copy, p),
    "jit": jax.jit(lambda p: jax.tree.map(jnp.negative, p)),
    "remat": jax.checkpoint(lambda p: jax.tree.map(jnp.sin, p)),
    "custom_vjp": halved,
    "loop": lambda p: lax.fori_loop(0, 3, lambda _, p: jax.tree.map(jnp.sin, p), p),
}


@pytest.mark.parametrize("ahead", AHEAD.values(), ids=AHEAD.keys())
def test_what_is_done_to_params_alone_reads_nothing(ahead):
    assert forward_order(lambda p, x: three(ahead(p), x), ZMA, X) == ZMA_ORDER


WRAPS = [jax.jit, jax.checkpoint, jax.value_and_grad, lambda f: jax.vmap(f, (None, 0))]


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_is_wrapped_is_looked_into(wrap):
    assert forward_order(wrap(three), ZMA, X) == ZMA_ORDER


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_and_params_cast_to_varying(check_vma):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    specs = {"in_specs": (P(), P("data")), "out_specs": P()}

    @functools.partial(jax.shard_map, mesh=mesh, **specs, check_vma=check_vma)
    def loss(p, x):
        p = jax.tree.map(lambda w: lax.pcast(w, "data", to="varying"), p) if check_vma else p
        return lax.pmean(three(p, x), "data")

    assert forward_order(loss, ZMA, X) == ZMA_ORDER


def branching(p, x):
    x = lax.cond(x.sum() > 0, lambda: dense("z", x, p), lambda: x)
    x = lax.fori_loop(0, 2, lambda _, x: dense("m", x, p), x)
    return lax.while_loop(lambda x: x.sum() < 1, lambda x: dense("a", x, p), x)


def delayed(p, xs):
    """Defect guarded against: what the first turn gives is constant, and would read nothing."""
    _, before = lax.scan(lambda last, x: (x @ p["b_in"], last), jnp.zeros(4), xs)
    return before @ p["z_head"]


def rnn(p, xs):
    turn = lambda h, x: (jnp.tanh(x @ p["b_in"] + h @ p["a_state"]), None)  # noqa: E731
    return lax.scan(turn, jnp.zeros(4), xs)[0] @ p["_head"]


def scanned(p, x):
    """Stacked weights of layers are read in the loop."""
    layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w["c_in"]) @ w["b_out"], None))
    return lax.scan(layer, x @ p["stem"], p["layers"])[0] @ p["head"]


def experts(p, x):
    """Weights chosen by data are read where they are chosen."""
    w = lax.switch(x.sum().astype(int) % 2, [lambda: p["x"], lambda: p["y"]])
    return x @ p["a"] @ w


def repeated(p, x):
    """How often a loop turns is data."""
    return lax.while_loop(lambda i: i < x.sum(), lambda i: i + 1, 0) * p["z"]


READ = [(delayed, ["b_in", "z_head", "a_unread"]), (rnn, ["b_in", "a_state", "_head"])]
READ += [(experts, ["x", "y", "a"]), (repeated, ["z", "unread"])]
READ += [(lambda p, x: x @ (p["c"] @ p["b"]) @ p["a"], ["b", "c", "a"])]


@pytest.mark.parametrize(("fn", "order"), READ)
def test_reading_is_followed_through_loops_and_branches(fn, order):
    assert forward_order(fn, dict.fromkeys(sorted(order), MATRIX), X) == order


def test_weights_stacked_for_a_scan():
    stack = jax.ShapeDtypeStruct((3, 4, 4), jnp.float32)
    params = {"head": MATRIX, "layers": {"b_out": stack, "c_in": stack}, "stem": MATRIX}
    order = forward_order(scanned, params, X)
    assert order == ["stem", "layers/c_in", "layers/b_out", "head"]
    groups = prefix_groups(params, 3, order=order, level=1)
    assert by_module(groups) == {"stem": 0, "layers": 1, "head": 2}


def test_branches_and_loops_over_data():
    assert forward_order(lambda p, *, batch: branching(p, batch), ZMA, batch=X) == ZMA_ORDER
    assert forward_order(jnp.dot, X, X.T) == [""]


def test_lookups_read_and_what_is_never_read_comes_last():
    def fn(p, tokens, scale=1.0, name="", train=False, *, factor):
        assert name == "batch" and train is True
        x = p["z_table"].astype(jnp.float16)[tokens] + p["positions"][: tokens.shape[0]]
        return {"loss": (x @ p["m"]).sum() * factor * scale, "name": name, "none": None}

    params = dict.fromkeys(["unread_2", "m", "positions", "unread_10", "z_table"], MATRIX)
    tokens = jax.ShapeDtypeStruct((3,), jnp.int32)
    found = forward_order(fn, params, tokens, 2.0, "batch", train=True, factor=np.float32(3))
    assert found == ["z_table", "positions", "m", "unread_10", "unread_2"]


def test_a_batch_that_is_closed_over_is_refused():
    match = r"forward_order: args must be arrays, got .+\. Pass the batch to forward_order"
    with pytest.raises(ValueError, match=match):
        forward_order(lambda p: three(p, X), ZMA)


def test_the_order_costs_one_trace():
    calls = []

    def fn(p, x):
        calls.append(None)
        return three(p, x)

    assert forward_order(fn, ZMA, jax.eval_shape(lambda: X)) == ZMA_ORDER and len(calls) == 1


# What users give


PARAMS = {"a": {"kernel": 1.0, "bias": 2.0}, "b": [1.0, 2.0], "c": None}


PATTERNS = [["a"], ["a/*"], ("a*",), [["a/bias", "a/kernel"], "b"], [("a", "a/bias"), ["b/[0-9]"]]]
FORMS = [
    {"a": {"kernel": 0, "bias": 0}, "b": [1, 1], "c": None},
    {"a": 0, "b": 1, "c": None},
    {"a": {"kernel": np.int8(0), "bias": 0}, "b": [jnp.int32(1), np.array(1)], "c": None},
    lambda name, leaf: 0 if name.startswith("a/") and leaf > 0 else 1,
    *PATTERNS,
]


@pytest.mark.parametrize("groups", FORMS)
def test_groups_in_every_form(groups):
    found = tree_of("who", groups, PARAMS)
    assert found == {"a": {"kernel": 0, "bias": 0}, "b": [1, 1], "c": None}
    assert all(type(label) is int for label in jax.tree.leaves(found))
    assert as_groups("who", groups, PARAMS).count == 2


def test_a_list_of_ints_is_a_tree():
    assert tree_of("who", [1, 0], [MATRIX, MATRIX]) == [1, 0]
    assert tree_of("who", (0, [1, 1]), (MATRIX, [MATRIX] * 2)) == (0, [1, 1])
    assert tree_of("who", ["0"], [MATRIX, MATRIX]) == [0, 1]
    assert (tree_of("who", 0, PARAMS)["b"], tree_of("who", [], [])) == ([0, 0], [])


def test_params_whose_arrays_were_donated_have_groups_all_the_same():
    """Defect guarded against: a newer JAX prints the leaves of a tree that it refuses."""
    params = [jnp.ones(3), jnp.ones(3)]
    jax.tree.map(lambda x: x.delete(), params)
    assert tree_of("who", {"0": 1, "1": 0}, params) == [1, 0]


def test_a_pattern_stands_for_a_module_and_not_for_its_namesakes():
    params = {"block_1": DENSE, "block_10": DENSE}
    assert by_module(tree_of("who", ["block_1"], params)) == {"block_1": 0, "block_10": 1}


def test_a_tree_that_can_be_called_is_a_tree():
    class Callable(Pair):
        def __call__(self):
            raise AssertionError

    assert tree_of("who", Callable(0, 1), Callable(MATRIX, MATRIX)) == (0, 1)


NAMES = {f"layer_{i}": DENSE for i in range(8)}
prefix = functools.partial(prefix_groups, ZMA)
label = functools.partial(tree_of, "prefix_groups")
PAIR = [1.0, 2.0]
ODD, BOTH = ["z", "q", "m", "a", "m/k"], [["m", "z"], "*/bias"]
REFUSED = [
    (lambda: prefix(4), r"n must be at most .+ 3, got 4\. The layers, .+, are 'a', 'm', 'z'"),
    (lambda: prefix_groups(NAMES, 10), r"n must be .+, 8, got 10\. .+ 'layer_5' and 2 more"),
    (lambda: prefix_groups({}, 1), r"n must be at most .+, 0, got 1\. Params are empty"),
    (lambda: prefix(2, order="z"), r"order must be .+, got 'z'\. No entry matches 'a', 'm'"),
    (lambda: prefix(2, order=ODD), r"order must .+, got \['q', 'm/k'\]\. .+match no .+ 'a/bias'"),
    (lambda: prefix(2, order=["z/bias"]), r"order must be .+\. No entry matches 'a', 'm'\. Add"),
    (lambda: label([0, True], PAIR), r"groups must be integers, got True\. The leaf is '1'"),
    (lambda: label([0, np.bool_(True)], PAIR), r"groups must be integers, got np\.True_\. "),
    (lambda: label(lambda *_: 0.5, ZMA), r"groups must be integers, got 0\.5\. .+ 'a/bias'"),
    (lambda: label([jnp.arange(2)], [1.0]), r"groups must be integers, got Array"),
    (lambda: label("z", ZMA), r"groups must be integers, got 'z'\. .+ \['embed', 'block_\*'\]"),
    (lambda: label([0, -1], PAIR), r"groups must be .+ without a gap, got \[-1, 0\]"),
    (lambda: label([0, 2], PAIR), r"groups must be .+, got \[0, 2\]\. No leaf is in group 1\."),
    (lambda: label(4, ZMA), r"groups must be .+, got \[4\]\. .+ boostax\.freeze\.prefix_groups"),
    (lambda: label([[], "a"], ZMA), r"groups must .+, got \[1, 2\]\. No leaf is in group 0\."),
    (lambda: label({"a": {"kernel": 0}}, ZMA), r"groups must be a tree prefix of .+ pytree"),
    (lambda: label({"a": 0}, ZMA), r"groups must .+, got \{'a': 0\}\. No pattern matches 'm/b"),
    (lambda: label([0, 1, 1], PAIR), r"groups must be a tree .+, got \[0, 1, 1\]\. "),
    (lambda: label(None, ZMA), r"groups must be a tree .+, got None\. "),
    (lambda: label(["a", "x_*"], ZMA), r"groups must be .+, got 'x_\*'\. .+ are 'a/bias', "),
    (lambda: label(BOTH, ZMA), r"groups must .+ at most once, got \('m', '\*/bias'\)\. Both .+ 'm"),
    (lambda: label(["a", 1], ZMA), r"groups must be patterns .+, got 1\. The pattern matches"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_refusals_name_what_came_and_what_is_allowed(call, text):
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    assert re.match(rf"prefix_groups: {text}", str(raised.value), re.DOTALL), raised.value


# MindSpore's


def layers_of(names):
    """A tree of MindSpore's params, in their order."""
    layers: dict = collections.OrderedDict()
    for name in names:
        module, leaf = name.rsplit(".", 1)
        vector = "bn" in name or "bias" in name
        layers.setdefault(module, collections.OrderedDict())[leaf] = VECTOR if vector else MATRIX
    return layers


@pytest.mark.parametrize("network", ["lenet", "convbn12"])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 10])
def test_mindspore_groups_are_those_of_mindspore(golden, network, n):
    """Depth i trains what index i of ``GradientFreeze`` does: empty groups, nothing frozen."""
    found = json.loads((golden / "grad_freeze.json").read_text())["groups"]
    params = layers_of(found[f"{network}_params"])
    groups = mindspore_groups(params, n)
    labels = jax.tree.leaves(tree_of("scheduled_freeze", groups, params))
    names = [f"{module}.{leaf}" for module, leaves in params.items() for leaf in leaves]
    trained = [[x for x, k in zip(names, labels, strict=True) if k >= i] for i in range(n)]
    assert trained == found[f"{network}_g{n}"]
    assert as_groups("scheduled_freeze", groups, params).count == n


def test_mindspore_groups_put_the_matrices_of_a_module_first():
    """JAX sorts "bias" before "kernel"; and an order says which layer comes first."""
    params = {name: {"bias": VECTOR, "kernel": MATRIX} for name in "dcba"}
    # c.kernel, c.bias, d.kernel, d.bias and then, in a bucket of their own, a and b.
    groups = mindspore_groups(params, 2, order=["c", "d", "a", "b"])
    assert [groups.tree[x] for x in "cdab"] == [{"kernel": i, "bias": i} for i in (0, 0, 1, 1)]


def test_mindspore_counts_the_norms_that_less_bn_removed():
    """Its params keep them: the convolution behind one opens a bucket."""
    params = {name: {"kernel": MATRIX} for name in ("conv_2", "conv_10")}
    kernels = lambda groups: [groups.tree[x]["kernel"] for x in params]  # noqa: E731
    norms = ["conv_2_norm", "conv_10_norm"]
    assert kernels(mindspore_groups(params, 2)) == [1, 1]
    assert kernels(mindspore_groups(params, 2, removed=norms)) == [0, 1]
    order = ["conv_10", "conv_10_norm", "conv_2", "conv_2_norm"]
    assert kernels(mindspore_groups(params, 2, removed=norms, order=order)) == [1, 0]


def test_mindspore_opens_a_bucket_for_a_scalar():
    """It tells vectors by their names, and the multiplier of the normalised head has none."""
    params = {"fc1": DENSE, "fc2": {"kernel": MATRIX, "multiplier": np.ones(())}}
    labels = mindspore_groups(params, 2).tree
    assert labels == {"fc1": {"kernel": 0, "bias": 0}, "fc2": {"kernel": 0, "multiplier": 1}}


def test_mindspore_freezes_nothing_where_prefix_groups_refuses(golden):
    names = json.loads((golden / "grad_freeze.json").read_text())["groups"]["lenet_params"]
    layers = layers_of(names)
    assert set(jax.tree.leaves(mindspore_groups(layers, 10).tree)) == {9}
    with pytest.raises(ValueError, match="number of layers, 5, got 10"):
        prefix_groups(layers, 10)
    assert mindspore_groups({}, 2).tree == {}


# Dictionaries of names, and lists of params


def test_a_dictionary_of_names_is_groups():
    """By path names where the params are no dictionary of those keys; JSON has no other keys."""
    labels = tree_of("scheduled_freeze", {"0": 0, "1/conv1": 2, "1/fc*": 1}, [listed(), listed()])
    assert jax.tree.leaves(labels[0]) == [0] * 4
    assert labels[1] == {"conv1": {"kernel": 2, "bias": 2}, "fc[0]": {"kernel": 1}, "fc*": 1}


def listed():
    conv = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    return {"conv1": conv, "fc[0]": {"kernel": jnp.ones((2, 2))}, "fc*": jnp.ones(3)}


def test_lists_of_params_are_groups_by_name():
    """The names serve where the arrays are others: for gradients, and after an update."""
    params = listed()
    lists = [[params["fc*"], params["conv1"]["bias"]], params["conv1"]["kernel"], [params["fc[0]"]]]
    groups = param_groups(params, lists)
    assert [len(group) for group in groups] == [2, 1, 1]
    labels = tree_of("scheduled_freeze", groups, jax.tree.map(lambda x: x + 1, params))
    assert labels == {"conv1": {"kernel": 1, "bias": 0}, "fc[0]": {"kernel": 2}, "fc*": 0}


def test_params_that_are_listed_twice_or_not_at_all_are_refused():
    params = listed()
    first, rest = params["conv1"], [params["fc*"], params["fc[0]"]]
    shared = jnp.ones(2)
    for tree, lists, words in (
        (params, [first], r"no group with 'fc\*', 'fc\[0\]/kernel'"),
        (params, [first, rest, first["bias"]], "an array in group 2 that is not a param"),
        (params, [first, rest, jnp.ones(3)], "an array in group 2 that is not a param"),
        (params, ["conv1", rest], "an array in group 0 that is not a param"),
        ({"a": shared, "b": shared}, [[shared]], r"\['a', 'b'\] as one array"),
    ):
        with pytest.raises(ValueError, match=f"^param_groups: groups must be .*, got {words}"):
            param_groups(tree, lists)


def test_fields_of_a_named_tuple_are_told_apart():
    """JAX's registry gives all of them the first one's name."""
    part = {f"l{i}": {"w": jnp.ones((2, 2))} for i in range(3)}
    as_dict = prefix_groups({"0": part, "1": part}, 4)
    assert jax.tree.leaves(prefix_groups(Pair(part, part), 4)) == jax.tree.leaves(as_dict)
    assert prefix_groups(Pair(jnp.ones(1), jnp.ones(1)), 2) == (0, 1)


# Masks


TRAINS = {"a": {"k": False, "b": False}, "h": {"k": True, "b": True}}
WHOLE = {"a": {"k": jnp.ones((4, 4)), "b": jnp.zeros(4)}}
WHOLE["h"] = {"k": jnp.ones(4), "b": jnp.zeros(())}
NOT = jax.tree.map(lambda x: not x, TRAINS)
MASKS = {
    "bools": {"groups": TRAINS},
    "numpy": {"groups": jax.tree.map(np.bool_, TRAINS)},
    "prefix": {"groups": {"a": False, "h": True}},
    "words": {"groups": {"a": "freeze", "h": "train"}},
    "patterns": {"groups": ["h"]},
    "predicate": {"groups": lambda path, leaf: path.startswith("h/")},
    "function": {"groups": lambda params: {name: name == "h" for name in params}},
    "frozen": {"frozen": NOT},
    "frozen words": {"frozen": {"a": "freeze", "h": "train"}},
    "frozen patterns": {"frozen": ["a/k", "a/b"]},
    "frozen predicate": {"frozen": lambda path, leaf: "a" in path},
    "frozen function": {"frozen": lambda params: NOT},
}


def squares(params, x):
    hidden = jnp.tanh(x @ params["a"]["k"] + params["a"]["b"])
    return jnp.mean((hidden @ params["h"]["k"] + params["h"]["b"] - 1) ** 2)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_freezes_as_optax_does_in_the_program_of_a_depth(name):
    adam = optax.adamw(1e-2)
    step = boostax.make_train_step(squares, boostax.scheduled_freeze(adam, **MASKS[name]))
    same = boostax.make_train_step(squares, boostax.scheduled_freeze(adam, {"a": 0, "h": 1}, 1))
    assert boostax.explain(step, WHOLE).parts[0].what == "Train only 'h/b', 'h/k' (2 of 4 leaves)"
    assert repr(step.tx).startswith("scheduled_freeze(groups=Mask(mask=")
    state = step.init(jax.tree.map(jnp.copy, WHOLE))
    assert step.lower(state, X).as_text() == same.lower(state, X).as_text()
    tx = optax.chain(adam, optax.masked(optax.set_to_zero(), NOT))
    params, opt_state = WHOLE, tx.init(WHOLE)
    for _ in range(3):
        state, _ = step(state, X)
        updates, opt_state = tx.update(jax.grad(squares)(params, X), opt_state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), state.params, params)


NO_MASK = [{}, {"groups": 0}, {"groups": {"a": "x", "h": True}}, {"groups": True, "frozen": True}]


@pytest.mark.parametrize("how", NO_MASK)
def test_what_is_no_mask_is_refused(how):
    with pytest.raises(ValueError, match=r"(mask|groups) must be .* got"):
        boostax.scheduled_freeze(optax.sgd(1.0), **how).init(WHOLE)
