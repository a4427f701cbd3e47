"""Attention logits of a head above the bound are scaled back, by its weights, and no others are."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import spread
from reducing import mesh_of
from training import follow, own_step

import boostax
from boostax.model import Heads, qk_clip, set_gradient
from boostax.testing._mapped import MODES, on_replicas

RULES = {"max_logits": "max"}
RNG = np.random.default_rng(0)
HEADS = Heads("*/query", "*/key", "*/max_logits")


def normal(*shape):
    return jnp.float32(RNG.normal(size=shape))


def carried(tx, **how):
    return boostax.carry(tx, RULES, **how)


def stepped(heads, params, maxima, tau=200.0, lr=0.0):
    """Params after one step with no gradient beside the maxima."""
    tx = carried(qk_clip(optax.sgd(lr), heads, tau=tau))
    grads = jax.tree.map(jnp.zeros_like, params)
    grads = jax.tree_util.tree_map_with_path(
        lambda path, g: maxima if "max_logits" in jax.tree_util.keystr(path) else g, grads
    )
    step = jax.jit(functools.partial(boostax.apply_gradients, tx))
    return step(grads, tx.init(params), params)[0]


def logits(p, x, y, key_heads=4):
    """Of four heads of three elements, and two rotary ones where their key is shared."""

    def projected(a, name, heads=4):
        leaf = p[name] if isinstance(p[name], dict) else {"kernel": p[name], "bias": 0}
        return (a @ leaf["kernel"].reshape(6, -1)).reshape(len(a), heads, -1) + leaf["bias"]

    q, k = projected(x, "query"), jnp.repeat(projected(y, "key", key_heads), 4 // key_heads, 1)
    found = jnp.einsum("bhe,che->hbc", q[..., :3], k[..., :3])
    if "shared" in p:
        rotary = projected(x, "rotary") if "rotary" in p else q[..., 3:]
        found += jnp.einsum("bhe,ce->hbc", rotary, y @ p["shared"])
    return found


KERNEL = (6, 4, 3)
BIASED, SHARED = {"kernel": KERNEL, "bias": (4, 3)}, {"shared": (6, 2)}
# Four elements of values behind the three of a fused key.
LAYOUTS = {
    "MHA with biases": (HEADS, {"query": BIASED, "key": BIASED}),
    "flat": (HEADS._replace(axis=-1), {"query": (6, 12), "key": (6, 12)}),
    "GQA": (HEADS._replace(key_heads=2), {"query": KERNEL, "key": (6, 2, 3)}),
    "MLA": (
        HEADS._replace(rotary="*/rotary"),
        {"query": KERNEL, "rotary": (6, 4, 2), "key": KERNEL} | SHARED,
    ),
    "MLA, fused": (
        HEADS._replace(content=3),
        {"query": (6, 4, 5), "key": (6, 4, 7)} | SHARED,
    ),
    "MLA, fused, flat": (
        HEADS._replace(content=3, axis=-1),
        {"query": (6, 20), "key": (6, 28)} | SHARED,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_of_a_head_are_multiplied_by_its_factor(name):
    """Of every layout; no weight grows, and a head below the bound is unchanged bit for bit."""
    heads, shapes = LAYOUTS[name]
    layer = jax.tree.map(lambda s: normal(*s), shapes, is_leaf=lambda x: isinstance(x, tuple))
    maxima = jnp.float32([50.0, 200.0, 400.0, 900.0])
    new = stepped(heads, {"a": layer | {"max_logits": jnp.zeros(4)}}, maxima)["a"]
    of = functools.partial(logits, x=normal(5, 6), y=normal(7, 6), key_heads=heads.key_heads or 4)
    before, after = of(layer), of(new)
    factor = np.minimum(1, 100 / np.asarray(maxima))
    np.testing.assert_allclose(after, factor[:, None, None] * before, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(new.pop("max_logits"), maxima)
    smaller = jax.tree.map(lambda a, b: bool((jnp.abs(a) <= jnp.abs(b)).all()), new, layer)
    assert all(jax.tree.leaves(smaller))
    if "shared" in layer:
        values = lambda p: (p["shared"], p["key"].reshape(6, 4, -1)[..., 3:])  # noqa: E731
        chex.assert_trees_all_equal(values(new), values(layer))


def test_stacked_layers_are_scaled_layer_by_layer():
    kernels = {n: {"kernel": normal(3, *KERNEL), "bias": normal(3, 4, 3)} for n in ("query", "key")}
    params = {"layers": kernels | {"max_logits": jnp.zeros((3, 4))}}
    maxima = jnp.abs(normal(3, 4)) * 200
    new = stepped(HEADS, params, maxima)["layers"]
    for i in range(3):
        one = {"a": jax.tree.map(lambda x: x[i], params["layers"])}  # noqa: B023
        alone = stepped(HEADS, one, maxima[i])["a"]
        chex.assert_trees_all_equal(jax.tree.map(lambda x: x[i], new), alone)  # noqa: B023


def test_layers_are_paired_by_name_not_by_order():
    """Layer 10 sorts before layer 2; maxima in a list do not."""
    params = {
        f"layer_{i}": {"query": jnp.ones((2, 1, 2)), "key": jnp.ones((2, 1, 2))} for i in range(11)
    }
    params |= {"max_logits": [jnp.zeros(1) for _ in range(11)]}
    heads = Heads("layer_*/query", "layer_*/key", "max_logits/*")
    tx = carried(qk_clip(optax.sgd(0.0), heads))
    grads = jax.tree.map(jnp.zeros_like, params)
    grads["max_logits"] = [jnp.full(1, 50.0 * (i + 1)) for i in range(11)]
    new, _ = boostax.apply_gradients(tx, grads, tx.init(params), params)
    for i in range(11):
        found = float((new[f"layer_{i}"]["query"] * new[f"layer_{i}"]["key"])[0, 0, 0])
        assert found == pytest.approx(1 / (i + 1), rel=1e-5)


# Small integers are exact in f32, in any order. The first call of each window has the largest.
START = {
    f"layer_{i}": {
        "query": jnp.float32([[[1, 2], [3, 1]], [[2, 1], [1, 4]]]) * (i + 1),
        "key": jnp.float32([[[1, 0], [2, 2]], [[0, 1], [1, 2]]]),
        "max_logits": jnp.zeros(2),
    }
    for i in range(2)
}
DATA = np.float32(RNG.integers(-2, 3, size=(4, 32, 2))) * np.float32([2, 1, 2, 1])[:, None, None]


def loss_fn(params, x):
    """Linear in the weights; powers of four stand for the logits, so that factors are exact."""
    total = 0.0
    for layer in params.values():
        q, k = (jnp.einsum("bd,dhe->bhe", x, layer[n]) for n in ("query", "key"))
        _, exponent = jnp.frexp((q * k).sum(-1).max(0))
        q = set_gradient(q, layer["max_logits"], jnp.ldexp(1.0, exponent + exponent % 2))
        total += (q + 2 * k).sum((1, 2)).mean()
    return total


gradient = jax.jit(jax.grad(loss_fn))


def one_batch(tau, windows):
    """What one device does with each window as one batch, by plain JAX."""
    params = START
    tx = carried(qk_clip(optax.sgd(0.25), HEADS, tau=tau))
    for rows in windows:
        grads = gradient(params, rows)
        params, _ = boostax.apply_gradients(tx, grads, tx.init(params), params)
    return jax.device_get(params)


TAU = 32.0


def chain(axis, every=1, scale=False):
    inner = qk_clip(optax.sgd(0.25), HEADS, tau=TAU)
    inner = optax.chain(*([boostax.all_reduce(axis)] if axis else []), inner)
    inner = boostax.accumulate(inner, every, axis_name=axis) if every > 1 else inner
    inner = boostax.dynamic_loss_scale(inner, init_scale=8.0, axis_name=axis) if scale else inner
    return carried(inner, axis_name=axis)


@pytest.mark.parametrize("form", ["step", "own loop"])
@pytest.mark.parametrize(
    ("microbatches", "replicas", "every", "scale"),
    [(1, 1, 1, False), (4, 1, 1, True), (4, 4, 1, False), (2, 4, 2, True), (4, 2, 2, False)],
)
def test_micro_batches_replicas_and_windows_are_one_batch(
    form, microbatches, replicas, every, scale
):
    """Maxima, factors and params, bit for bit."""
    axis = "data" if replicas > 1 else None
    mesh = mesh_of(data=replicas) if axis else None
    tx, how = chain(axis, every, scale), {"microbatches": microbatches}
    if form == "step":
        step = boostax.make_train_step(loss_fn, tx, mesh=mesh, **how)
        state, _ = follow(step, step.init(START), list(DATA[: 2 * every]))
        found = state.params
    else:
        found = START
        if mesh:
            found = jax.device_put(START, NamedSharding(mesh, P()))
            tx = boostax.on_mesh(tx, found)
        step = own_step(tx, boostax.value_and_grad(loss_fn, mesh=mesh, **how))
        state = tx.init(found)
        for rows in DATA[: 2 * every]:
            found, state, _ = step(found, state, rows)
    windows = DATA[: 2 * every].reshape(2, -1, 2)
    wanted = one_batch(TAU, windows)
    chex.assert_trees_all_equal(jax.device_get(found), wanted)
    unclipped = one_batch(1e9, windows)
    assert np.abs(wanted["layer_0"]["query"] - unclipped["layer_0"]["query"]).max() > 0.1


@pytest.mark.parametrize(("mode", "every"), spread(MODES, [2, 1]))
def test_a_mapped_loop_of_ones_own(mode, every):
    tx = chain("data", every)

    def train(params, rows):
        state = tx.init(params)
        grad = jax.grad(loss_fn)
        for x in rows:
            grads = grad(boostax.train.local_params(params, "data"), x)
            params, state = boostax.apply_gradients(tx, grads, state, params)
        return params

    parts = DATA[:every].reshape(every, 8, 4, 2).swapaxes(0, 1)
    found = on_replicas(train, mode, parts, START)
    wanted = one_batch(TAU, [DATA[:every].reshape(-1, 2)])
    for replica in range(8):
        chex.assert_trees_all_equal(jax.tree.map(lambda x: x[replica], found), wanted)  # noqa: B023


def test_a_skipped_step_changes_nothing():
    tx = chain(None, scale=True)
    step = own_step(tx, boostax.value_and_grad(lambda p, x: loss_fn(p, x) * x.max()))
    params, state, _ = step(START, tx.init(START), np.float32([[np.inf, 1.0]]))
    chex.assert_trees_all_equal(params, START)
    assert int(boostax.metrics(state)["skipped_steps"]) == 1


def test_a_flushed_window_is_clipped():
    tx = chain(None, every=4)
    params, state = START, tx.init(START)
    for x in DATA[:2]:
        grads = jax.grad(loss_fn)(params, x)
        params, state = boostax.apply_gradients(tx, grads, state, params)
    chex.assert_trees_all_equal(params, START)
    params, _ = boostax.flush(tx, state, params)
    chex.assert_trees_all_equal(params, one_batch(TAU, [DATA[:2].reshape(-1, 2)]))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_maxima_that_are_not_finite_scale_nothing(bad):
    params = {"a": {"query": normal(*KERNEL), "key": normal(*KERNEL), "max_logits": jnp.zeros(4)}}
    chex.assert_trees_all_equal(stepped(HEADS, params, jnp.full(4, bad)), params)


@pytest.mark.parametrize("depth", [1, 2])
def test_frozen_layers_rest(depth):
    """One of them, or all."""
    params = START | {"head": jnp.ones(2)}
    groups = {name: dict.fromkeys(layer, i) for i, (name, layer) in enumerate(START.items())}
    tx = boostax.scheduled_freeze(chain(None), groups | {"head": 2}, depth)
    loss = lambda p, x: loss_fn({n: p[n] for n in START}, x) + p["head"].sum()  # noqa: E731
    step = boostax.make_train_step(loss, tx)
    state, _ = step(step.init(params), DATA[0])
    wanted = dict(zip(START, [START["layer_0"], one_batch(TAU, DATA[:1])["layer_1"]], strict=True))
    state.params.pop("head")
    chex.assert_trees_all_equal(jax.device_get(state.params), wanted if depth == 1 else START)


def test_low_params_keep_f32_masters_that_are_clipped():
    """The masters of ``store`` around it, not only the params that it rounds them to."""
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), START)
    low = {n: p | {"max_logits": jnp.zeros(2)} for n, p in low.items()}
    stored = boostax.precision.store(qk_clip(optax.sgd(0.25), HEADS, tau=TAU), params="remainder")
    tx = carried(stored)
    step = boostax.make_train_step(loss_fn, tx)
    state, _ = step(step.init(low), DATA[0])
    wanted = one_batch(TAU, DATA[:1])
    masters = boostax.precision.masters(state.params, state.opt_state)
    chex.assert_trees_all_close(masters, wanted, rtol=1e-6)


PLACES = {
    "tensor parallel": dict.fromkeys(("query", "key"), P(None, "model"))
    | {"max_logits": P("model")},
    "FSDP": {"query": P("model"), "key": P("model"), "max_logits": P()},
}


@pytest.mark.parametrize(("place", "shard_optimizer"), spread(PLACES, [True, False]))
def test_sharded_weights_are_those_of_one_device(place, shard_optimizer):
    mesh = mesh_of(data=2, model=2)
    specs = {name: PLACES[place] for name in START}
    how = {"mesh": mesh, "axis_name": "data", "param_specs": specs}
    step = boostax.make_train_step(loss_fn, chain("data"), **how, shard_optimizer=shard_optimizer)
    state, _ = follow(step, step.init(START), list(DATA[:2]))
    chex.assert_trees_all_equal(jax.device_get(state.params), one_batch(TAU, DATA[:2]))


def test_heads_are_sharded_in_a_shard_map_of_ones_own():
    """Each device has the maxima of its heads."""
    tx, oracle = chain("data", scale=True), boostax.value_and_grad(loss_fn, axis_name="data")

    def train(params, x):
        state = tx.init(params)
        _, grads = oracle(params, state, x)
        return boostax.apply_gradients(tx, grads, state, params)[0]

    specs = {name: PLACES["tensor parallel"] for name in START}
    how = {"mesh": mesh_of(data=4, model=2), "in_specs": (specs, P("data")), "out_specs": specs}
    found = jax.jit(jax.shard_map(train, **how))(START, DATA[0])
    chex.assert_trees_all_equal(jax.device_get(found), one_batch(TAU, DATA[:1]))


@pytest.mark.parametrize("place", PLACES)
def test_no_weight_is_gathered(place):
    mesh = mesh_of(model=2)
    put = lambda x, s: jax.device_put(x, NamedSharding(mesh, s))  # noqa: E731
    params = jax.tree.map(put, START, {name: PLACES[place] for name in START})
    tx = chain(None)
    step = jax.jit(functools.partial(boostax.apply_gradients, tx))
    text = step.lower(params, tx.init(params), params).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text


class Attention(nnx.Module):
    """NNX's own attention, whose logits are seen by its ``attention_fn``."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 6, qkv_features=8, decode=False, rngs=rngs)
        self.max_logits = nnx.Param(jnp.zeros(2))

    def __call__(self, x):
        def watched(query, key, value, **how):
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
            query = set_gradient(query, self.max_logits[...], scores.max((0, 2, 3)))
            return nnx.dot_product_attention(query, key, value)

        self.attention.attention_fn = watched
        return self.attention(x)


def test_attention_of_nnx_in_its_own_loop():
    model = Attention(nnx.Rngs(0))
    x = normal(3, 5, 6) * 30
    heads = Heads("attention/query", "attention/key", "max_logits")
    tx = carried(qk_clip(optax.sgd(0.0), heads, tau=2.0))
    graph, params = nnx.split(model, nnx.Param)
    step = own_step(tx, boostax.value_and_grad(lambda p, x: nnx.merge(graph, p)(x).mean()))
    new, state, _ = step(params, tx.init(params), x)
    assert float(new["max_logits"][...].min()) > 1
    after, _, _ = step(new, state, x)
    np.testing.assert_allclose(after["max_logits"][...], 1.0, rtol=1e-5)


LAYER = {"query": normal(*KERNEL), "key": normal(*KERNEL), "max_logits": jnp.zeros(4)}
SGD = optax.sgd(0.1)
REFUSED = [
    ({"heads": "query"}, "heads must be a Heads"),
    ({"heads": {"query": "q", "keys": "k"}}, "heads must be a Heads"),
    ({"key": "key"}, "equally many stars"),
    ({"axis": 1}, "axis must be a negative integer"),
    ({"key_heads": 0}, "key_heads"),
    ({"query": "*/q"}, "query must be a pattern of leaves"),
    ({"key": "*/k"}, "key must be a pattern of leaves"),
    ({"rotary": "*/r"}, "rotary must be a pattern of leaves"),
    ({"maxima": "*/maxima"}, "pattern of carried leaves, with one"),
    ({"key_heads": 3}, "a divisor of the 4 query heads"),
    ({"key_heads": 2, "axis": -1}, "of 4 heads on axis -1"),
    ({"axis": -3}, "of 4 heads on axis -3, and led by .* at 'a/query'"),
    ({"content": 3}, "less than the 3 elements of a head"),
    ({"tau": 0.0}, "tau must be greater than 0"),
    ({"inner": boostax.dynamic_loss_scale(SGD)}, "without gates"),
]


@pytest.mark.parametrize(("how", "words"), REFUSED)
def test_refusals(how, words):
    layout = {x: value for x, value in how.items() if x in Heads._fields}
    how = {"inner": SGD, "heads": HEADS._replace(**layout)} | {
        x: how[x] for x in how.keys() - layout
    }
    with pytest.raises((ValueError, TypeError), match=f"qk_clip: .*{words}"):
        tx = carried(qk_clip(**how))
        boostax.apply_gradients(tx, {"a": LAYER}, tx.init({"a": LAYER}), {"a": LAYER})


def test_without_carry_it_says_what_to_write():
    params, words = {"a": LAYER}, r"maxima .*\[\]\)\. Write carry\(qk_clip\(\.\.\.\), {'max_logits'"
    tx = qk_clip(SGD, HEADS)
    with pytest.raises(ValueError, match=words):
        boostax.apply_gradients(tx, params, tx.init(params), params)


def test_a_value_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"set_gradient: value .*shaped \(4,\).*scores.max"):
        set_gradient(jnp.ones(3), jnp.zeros(4), jnp.ones(3))


def test_a_layer_cut_by_a_partition_is_refused():
    """Biases in another optimizer would keep their size."""
    weights = {"kernel": jnp.ones(KERNEL), "bias": jnp.ones((4, 3))}
    params = {"a": {"query": weights, "key": weights, "max_logits": jnp.zeros(4)}}
    parts = {3: qk_clip(optax.sgd(0.1), HEADS), 2: optax.sgd(0.1)}
    tx = carried(optax.partition(parts, lambda tree: jax.tree.map(jnp.ndim, tree)))
    with pytest.raises(ValueError, match=r"without 'a/query/bias', .* Put it around a partition"):
        tx.init(params)


@pytest.mark.parametrize(
    ("tx", "found"),
    [
        (lambda: optax.chain(qk_clip(optax.sgd(0.2), HEADS), optax.scale(0.5)), "scale after"),
        (lambda: qk_clip(optax.contrib.schedule_free_sgd(0.1), HEADS), "schedule_free inside"),
        (lambda: optax.chain(optax.clip(1.0), qk_clip(optax.adamw(0.1), HEADS)), None),
    ],
)
def test_what_undoes_the_factors_is_found(tx, found):
    findings = [str(x) for x in boostax.explain(carried(tx()), START).findings]
    assert [x for x in findings if "qk_clip" in x] == (
        [x for x in findings if found in x] if found else []
    )
    assert bool(findings) == (found is not None)


def test_factors_of_one_weight_are_refused():
    """LoRA's: their product would be scaled twice."""
    lora = {"kernel": jnp.ones((8, 8)), "lora_a": jnp.ones((8, 4)), "lora_b": jnp.ones((4, 8))}
    params = {"a": {"query": lora, "key": jnp.ones((8, 8)), "max_logits": jnp.zeros(4)}}
    with pytest.raises(ValueError, match="query must be a kernel and its bias in a layer"):
        carried(qk_clip(optax.sgd(0.1), HEADS._replace(axis=-1))).init(params)
