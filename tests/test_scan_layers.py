"""Layers that a step runs: gathered weights, reduced gradients, and optimizers in the loop."""

import functools

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import lanes, spread
from reducing import mesh_of
from training import follow, own_step

import boostax
from boostax.train import Layers, scan_layers

COUNT, WIDTH, WORDS, ROWS = 4, 16, 32, 16
RELEASE = Layers(release=True)
FSDP = {"layers/a": P(None, None, "data"), "layers/b": P(None, "data"), "embed": P("data")}
COLUMNS = P(None, "model")
SPLIT = {"layers/a": P(None, None, "model"), "layers/b": COLUMNS, "embed": COLUMNS}
BOTH = {"layers/a": P(None, "data", "model"), "layers/b": P(None, "model", "data")}
# The sizes of the mesh, the batch axis, and how params are sharded.
PLACES = {
    "one device": ({}, None, {}),
    "whole": ({"data": 8}, "data", {}),
    "FSDP": ({"data": 8}, "data", FSDP),
    "HSDP": ({"replica": 2, "data": 4}, ("replica", "data"), FSDP),
    "tensor parallel": ({"data": 4, "model": 2}, "data", SPLIT),
    "tensor parallel, FSDP": ({"data": 4, "model": 2}, "data", BOTH),
}


@functools.cache
def first_params():
    draw = lambda seed, *shape: 0.3 * jax.random.normal(jax.random.key(seed), shape)  # noqa: E731
    square = COUNT, WIDTH, WIDTH
    layers = {"a": draw(0, *square), "b": draw(1, *square), "s": jnp.ones(square[:2])}
    return {"embed": draw(2, WORDS, WIDTH), "layers": layers, "head": draw(3, WIDTH, WORDS)}


def batches(calls=4):
    for seed in range(calls):
        x, y = jax.random.randint(jax.random.key(seed), (2, ROWS, 8), 0, WORDS)
        yield {"x": x, "y": y}


def layer(x, w):
    return x * w["s"] + jnp.tanh(x @ w["a"]) @ w["b"], None


def features(params, batch, body=layer):
    return scan_layers(body, params["embed"][batch["x"]], params["layers"])[0]


def entropy(params, batch, x):
    logits = x @ params["head"].astype(x.dtype)
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"])


def loss_fn(params, batch):
    return entropy(params, batch, features(params, batch)).mean()


def specs_at(place):
    spec = lambda path, _: PLACES[place][2].get("/".join(x.key for x in path), P())  # noqa: E731
    return jax.tree_util.tree_map_with_path(spec, first_params())


def step_of(loss, tx, place="one device", kind=AxisType.Auto, wrap=lambda tx: tx, **options):
    """A step at a place; ``wrap`` is put around the reduction and the optimizer."""
    sizes, axis, _ = PLACES[place]
    if not sizes:
        return boostax.make_train_step(loss, wrap(tx), **options)
    how = {"mesh": mesh_of(kind, **sizes), "axis_name": axis, "param_specs": specs_at(place)}
    how |= options
    return boostax.make_train_step(loss, wrap(optax.chain(boostax.all_reduce(), tx)), **how)


def trained(loss, tx, place="one device", calls=4, start=None, **options):
    """The state after some calls, and what the last one reported."""
    step = step_of(loss, tx, place, **options)
    state, told = follow(step, step.init(first_params(), **(start or {})), batches(calls))
    return jax.device_get(state), told[-1]


def assert_close(actual, expected, atol):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=0, atol=atol)


def assert_same(actual, expected):
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), actual, expected)


ADAMW = optax.adamw(1e-3)
STORED = boostax.precision.store(ADAMW, moments={"*/mu": "int8", "*/nu": "log8"}, least=64)
once = functools.cache(trained)


# Gathered weights and reduced gradients.


@pytest.mark.parametrize("remat", [False, True])
def test_without_a_step_it_is_a_scan(remat):
    def gradients(scan):
        loss = lambda x, xs: scan(x, xs)[0].sum()  # noqa: E731
        return jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(x, first_params()["layers"])

    x = jnp.ones(WIDTH)
    body = jax.checkpoint(layer) if remat else layer
    ours = gradients(lambda x, xs: scan_layers(layer, x, xs, remat=remat))
    assert str(ours) == str(gradients(lambda x, xs: jax.lax.scan(body, x, xs)))


# Loops of one's own, below, have one micro-batch at every place.
@pytest.mark.parametrize("microbatches", lanes([1, 2], [2]))
@pytest.mark.parametrize(("place", "weights"), spread(PLACES, ["by layer", "once"]))
def test_layers_train_like_a_plain_step_on_one_device(place, weights, microbatches):
    how = {"layers": Layers(weights=weights), "microbatches": microbatches}
    state, _ = trained(loss_fn, optax.adamw(1e-3), place, **how)
    assert_close(state.params, once(loss_fn, ADAMW)[0].params, 2e-6)


@pytest.mark.parametrize("place", ["one device", "FSDP", "HSDP"])
def test_weights_are_gathered_in_the_dtype_of_the_loss(place):
    how = {"policy": boostax.policy("O2", dtype=jnp.bfloat16), "microbatches": 2}
    how |= {"gather": "bfloat16"} if PLACES[place][0] else {}
    expected = trained(loss_fn, optax.sgd(1e-2), place, **how)[0].params
    for weights in ("once", "by layer"):
        state, _ = trained(loss_fn, optax.sgd(1e-2), place, layers=Layers(weights=weights), **how)
        assert_close(state.params, expected, 2e-6)


def rich_loss(params, batch, *, key, model_state):
    """Dropout keys beside the params, a carry of two, outputs of layers, and a tied embedding."""

    def body(carry, xs):
        (x, total), (w, key) = carry, xs
        x, _ = layer(x, w)
        x = x * jax.random.bernoulli(key, 0.9, x.shape)
        logits = x @ params["embed"].T
        return (x, total + jnp.mean(logits**2)), {"norm": jnp.mean(x**2), "shape": x.shape[0]}

    carry = params["embed"][batch["x"]], jnp.float32(0)
    xs = params["layers"], jax.random.split(key, COUNT)
    (x, total), ys = scan_layers(body, carry, xs)
    mean = entropy(params, batch, x).mean() + 0.1 * total + (ys["norm"] * jnp.arange(COUNT)).mean()
    state = {"mean": 0.9 * model_state["mean"] + 0.1 * x.mean()}
    return mean, boostax.Aux(model_state=state, metrics={"norms": ys["norm"].sum()})


def weighted_loss(params, batch):
    """A mean over so few items that a replica may have none: 0/0."""
    losses = entropy(params, batch, features(params, batch))
    # XLA makes a selection of a product with a bool, which hides that 0 * inf is NaN.
    chosen = jnp.maximum(batch["y"] - 29.0, 0)
    weight = chosen.sum()
    return (losses * chosen).sum() / weight, boostax.Aux(weight, metrics={"all": losses.mean()})


def loss_of_terms(params, batch):
    x, chosen = features(params, batch), batch["y"] > 20
    losses = entropy(params, batch, x)
    return {"few": ((losses * chosen).sum(), chosen.sum()), "norm": ((x**2).sum(), x.size)}


LINE_SEARCH = optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5))
AUX, START = {"has_aux": True}, {"key": jax.random.key(0), "model_state": {"mean": jnp.zeros(())}}
CASES = {
    "all that a body may do": (rich_loss, AUX | {"start": START}),
    "weights": (weighted_loss, AUX),
    "terms": (loss_of_terms, {}),
    "loss scale": (loss_fn, {"wrap": boostax.dynamic_loss_scale}),
    "window": (loss_fn, {"wrap": lambda tx: boostax.accumulate(tx, 2)}),
    "window in shards": (loss_fn, {"wrap": lambda tx: boostax.accumulate(tx, 2, sums="sharded")}),
    "Explicit": (loss_fn, {"kind": AxisType.Explicit}),
    "line search": (loss_fn, {"tx": LINE_SEARCH}),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_fit_what_else_a_step_does(name):
    loss, how = CASES[name]
    how = {"loss": loss, "place": "FSDP", "microbatches": 2, "tx": optax.sgd(0.1, 0.9)} | how
    expected, told = trained(**how)
    for weights in ("once", "by layer"):
        state, metrics = trained(**how, layers=Layers(weights=weights))
        # The sums of a closed window stay where they were, and differ.
        found, wanted = ((x.params, x.model_state) for x in (state, expected))
        assert_close((found, metrics), (wanted, told), 2e-6)


def in_own_loop(place, layers, named, kind=AxisType.Auto):
    """The params after some calls of a loop whose gradient function is told of ``named``."""
    sizes, axis, _ = PLACES[place]
    mesh = mesh_of(kind, **sizes)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    params = jax.tree.map(put, first_params(), specs_at(place))
    tx = optax.chain(boostax.all_reduce(), optax.adamw(1e-3))
    tx = boostax.on_mesh(tx, params, axis_name=axis, layers=layers)
    how = {"layers": tx} if named else {}
    step = own_step(tx, boostax.value_and_grad(loss_fn, mesh=mesh, axis_name=axis, **how))
    state = tx.init(params)
    for batch in batches():
        params, state, _ = step(params, state, batch)
    return jax.device_get(params)


WAYS = [RELEASE, Layers(weights="once"), Layers()]
MESHES = [*((x, AxisType.Auto) for x in PLACES if PLACES[x][0]), ("FSDP", AxisType.Explicit)]


@pytest.mark.parametrize(("mesh", "layers"), spread(MESHES, WAYS), ids=str)
def test_a_loop_of_ones_own_runs_layers(mesh, layers):
    place, kind = mesh
    assert_close(in_own_loop(place, layers, layers, kind), once(loss_fn, ADAMW)[0].params, 2e-6)


def test_a_loop_of_ones_own_names_layers_in_both_places():
    assert_close(in_own_loop("FSDP", Layers(), None), once(loss_fn, ADAMW)[0].params, 2e-6)
    with pytest.raises(ValueError, match="those of scan_layers"):
        in_own_loop("FSDP", RELEASE, None)
    with pytest.raises(TypeError, match="the optimizer on a mesh"):
        in_own_loop("FSDP", None, Layers())


IN_SHARDS = functools.partial(boostax.accumulate, every=4, sums="sharded")
CHOSEN = {"layers": ({"layers": Layers(), "microbatches": 4}, 1), "sums": ({"wrap": IN_SHARDS}, 4)}


@pytest.mark.parametrize("name", CHOSEN)
def test_an_audit_does_not_advise_against_what_was_chosen(name):
    how, calls = CHOSEN[name]
    step = step_of(loss_fn, optax.adam(1e-3), "FSDP", **how)
    batch = jax.tree.map(lambda x: jnp.repeat(x, 4, 0), next(batches()))
    found = boostax.audit(step, step.init(first_params()), batch, calls=calls)
    assert found.per_step(found.gradients) > 2 * found.params
    assert not [x for x in found.findings if "reduce" in x.what or "gathered" in x.what]


# The optimizer in the backward loop.

ADAM = optax.chain(
    optax.scale_by_adam(),
    optax.add_decayed_weights(0.1, lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    optax.scale_by_learning_rate(optax.linear_schedule(1e-3, 1e-4, 5)),
)
GROUPS = {"stack": optax.adam(1e-3), "rest": optax.sgd(1e-2)}
group = lambda params: {k: "stack" if k == "layers" else "rest" for k in params}  # noqa: E731
OPTIMIZERS = {
    "AdamW, mask and schedule": ADAM,
    "Lion": optax.lion(1e-3),
    "Muon": optax.contrib.muon(1e-3),
    "Adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "LAMB": optax.lamb(1e-3),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(1e-3),
    "partition": optax.partition(GROUPS, group),
    "AdaGC": optax.chain(boostax.model.adagc(warmup=1, max_norm=9.0), optax.adamw(1e-3)),
}


@functools.cache
def over_layers(name, calls=5):
    """Train with the optimizer vmapped over the layers, and another of all other params."""
    tx = OPTIMIZERS[name]
    hidden = lambda tree: jax.tree.map(lambda _: optax.MaskedNode(), tree)  # noqa: E731
    alone = lambda w: hidden(first_params()) | {"layers": w}  # noqa: E731
    rest = lambda params: params | {"layers": hidden(params["layers"])}  # noqa: E731

    def applied(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def step(params, stack, state, batch):
        grads = jax.grad(loss_fn)(params, batch)
        one = lambda g, s, w: applied(alone(g), s, alone(w))  # noqa: E731
        layers, stack = jax.vmap(one)(grads["layers"], stack, params["layers"])
        params, state = applied(rest(grads), state, rest(params))
        return params | {"layers": layers["layers"]}, stack, state

    params = first_params()
    stack, state = jax.vmap(lambda w: tx.init(alone(w)))(params["layers"]), tx.init(rest(params))
    for batch in batches(calls):
        params, stack, state = step(params, stack, state, batch)
    return jax.device_get((params, stack, state))


# One optimizer is on one device too, and each where norms and factors go over shards of both kinds.
RELEASED = [(name, place) for name in OPTIMIZERS for place in PLACES if place != "HSDP"]
QUICK = [x for x in RELEASED if x[1] == "tensor parallel, FSDP" or x == RELEASED[0]]


@pytest.mark.parametrize("released", lanes(RELEASED, QUICK), ids=str)
def test_a_released_optimizer_is_the_optimizer_of_each_layer(released):
    name, place = released
    params, stack, rest = over_layers(name)
    state, told = trained(loss_fn, OPTIMIZERS[name], place, calls=5, layers=RELEASE)
    assert_close(state.params, params, 5e-7)
    here, inner = state.opt_state.stacks["layers"], state.opt_state.rest
    # Behind the reduction.
    here, inner = (here, inner) if place == "one device" else (here[-1], inner[-1])
    assert_close((here, inner), (stack, rest), 2e-6)
    assert told["applied"] and not told["layers_skipped"]


def codes_of(tree):
    codes = [np.ravel(x) for x in jax.tree.leaves(tree) if x.dtype.itemsize == 1]
    return np.concatenate(codes).astype(int)


# The last has shards of both kinds.
@pytest.mark.parametrize("place", lanes([*PLACES][1:], ["tensor parallel, FSDP"]))
def test_a_stored_state_is_encoded_alike_wherever_it_is(place):
    """But for codes at a tie, and the params that they move."""
    expected, _ = once(loss_fn, STORED, layers=RELEASE)
    state, _ = trained(loss_fn, STORED, place, layers=RELEASE)
    assert "int8" in {str(x.dtype) for x in jax.tree.leaves(state.opt_state.stacks)}
    codes, wanted = (codes_of(x.opt_state.stacks) for x in (state, expected))
    # Of four calls, those draws that are nearer to one of 127 codes than the rounding of a sum over
    # the tokens; and three standard deviations more.
    ties = 4 * codes.size * 127 * np.finfo(np.float32).eps * np.sqrt(ROWS * 8)
    most = ties + 3 * np.sqrt(ties)
    assert np.abs(codes - wanted).max() <= 1 and (codes != wanted).sum() <= most
    moved = jax.tree.map(lambda x, y: (abs(x - y) > 2e-6).sum(), state.params, expected.params)
    assert sum(jax.tree.leaves(moved)) <= most


# The mesh of HSDP has both axes that a count is summed over.
@pytest.mark.parametrize("place", lanes(["one device", "whole", "FSDP", "HSDP"], ["HSDP"]))
@pytest.mark.parametrize("loss", [weighted_loss, loss_of_terms])
def test_a_released_gradient_counts_by_its_items(loss, place):
    how = {"has_aux": loss is weighted_loss}
    expected, told = once(loss, ADAMW, **how)
    state, metrics = trained(loss, ADAMW, place, layers=RELEASE, **how)
    assert_close(state.params, expected.params, 2e-6)
    # The losses of the tokens, and the elements of one token, are added in two orders.
    bound = (ROWS * 8 + WIDTH) * np.finfo(np.float32).eps
    np.testing.assert_allclose(metrics["loss"], told["loss"], rtol=bound)


@pytest.mark.parametrize("place", PLACES)
def test_a_loss_that_is_not_finite_changes_no_bit(place):
    loss = lambda params, batch: loss_fn(params, batch) + jnp.log(batch["scale"].mean())  # noqa: E731
    step = step_of(loss, ADAM, place, layers=RELEASE)
    given = [batch | {"scale": jnp.ones(ROWS)} for batch in batches(2)]
    # Of one replica alone.
    given[1]["scale"] = given[1]["scale"].at[:2].set(jnp.nan)
    state, before = step(step.init(first_params()), given[0])
    kept = jax.device_get((state.params, state.opt_state[:2]))
    state, told = step(state, given[1])
    assert before["applied"] and not told["applied"] and told["layers_skipped"] == COUNT
    assert_same(jax.device_get((state.params, state.opt_state[:2])), kept)


@pytest.mark.parametrize("place", lanes(["one device", "FSDP", "HSDP"], ["one device", "HSDP"]))
def test_a_layer_whose_gradient_overflows_is_skipped_alone(place, tmp_path):
    """The first layer's own gradient: no other one has it."""

    @jax.custom_vjp
    def overflowing(w, x):
        return w

    # One element, on the replica of the first rows: the owner of its shard alone sees it.
    bad = lambda x, g: (g.at[0, 0].add(jnp.where(x[0] == 1, jnp.inf, 0)), 0 * x)  # noqa: E731
    overflowing.defvjp(lambda w, x: (w, x), bad)

    def loss(params, batch):
        def body(x, xs):
            w, marked = xs
            return layer(x, w | {"a": overflowing(w["a"], marked * batch["bad"][:1])})

        x = params["embed"][batch["x"]]
        x, _ = scan_layers(body, x, (params["layers"], jnp.arange(COUNT) == 0))
        return entropy(params, batch, x).mean()

    step = step_of(loss, ADAM, place, layers=RELEASE)
    state = step.init(first_params())
    marks = jnp.zeros(ROWS).at[0].set(1)
    good, bad = (next(batches()) | {"bad": mark} for mark in (0 * marks, marks))
    state, _ = step(state, good)
    with boostax.checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        other, _ = checkpointer.restore(step.init(first_params()))
    assert isinstance(other.opt_state, boostax.layers.release.LayersState)
    assert_same(jax.device_get(other), jax.device_get(state))
    expected = jax.device_get(step(other, good)[0])
    before = jax.device_get(state)
    state, told = step(state, bad)
    assert told["applied"] and told["layers_skipped"] == 1
    state = jax.device_get(state)
    parts = lambda state: (state.params["layers"], state.opt_state.stacks)  # noqa: E731
    pick = lambda state, which: jax.tree.map(lambda x: x[which], parts(state))  # noqa: E731
    assert_same(pick(state, 0), pick(before, 0))
    assert_same(pick(state, slice(1, None)), pick(expected, slice(1, None)))
    assert_same(state.params["head"], expected.params["head"])


# Layers of other libraries.


def linen_layers():
    """Params that ``nn.scan`` stacks, and their body."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(WIDTH)(jnp.tanh(x)), None

    stack = nn.scan(Block, length=COUNT, variable_axes={"params": 0}, split_rngs={"params": True})()
    layers = stack.init(jax.random.key(0), jnp.ones((1, WIDTH)), None)["params"]
    return layers, lambda x, w: Block().apply({"params": w}, x, None)


def nnx_layers():
    """Params of a module that ``nnx.vmap`` stacks, and their body."""

    @nnx.split_rngs(splits=COUNT)
    @nnx.vmap
    def stack(rngs):
        return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    graph, layers = nnx.split(stack(nnx.Rngs(0)))
    return nnx.to_pure_dict(layers), lambda x, w: (x + nnx.merge(graph, w)(jnp.tanh(x)), None)


def equinox_layers():
    """Arrays of a module that ``equinox.filter_vmap`` stacks, and their body."""
    linear = lambda key: equinox.nn.Linear(WIDTH, WIDTH, key=key)  # noqa: E731
    stack = equinox.filter_vmap(linear)(jax.random.split(jax.random.key(0), COUNT))
    layers, rest = equinox.partition(stack, equinox.is_array)
    model = lambda w: jax.vmap(jax.vmap(equinox.combine(w, rest)))  # noqa: E731
    return layers, lambda x, w: (x + model(w)(jnp.tanh(x)), None)


@pytest.mark.parametrize("layers", [Layers(), RELEASE], ids=["by layer", "release"])
@pytest.mark.parametrize("library", [linen_layers, nnx_layers, equinox_layers])
def test_layers_of_flax_are_scanned_by_their_body(library, layers):
    stack, body = library()

    def loss(params, batch):
        return entropy(params, batch, features(params, batch, body)).mean()

    def after(**how):
        step = boostax.make_train_step(loss, optax.adamw(1e-3), **how)
        return follow(step, step.init(first_params() | {"layers": stack}), batches())[0].params

    assert_close(after(layers=layers), after(), 2e-6)


# What is refused.


def twice(params, batch):
    return scan_layers(layer, features(params, batch), params["layers"])[0].mean()


def mapped(params, batch):
    return jax.vmap(lambda x: features(params, {"x": x}))(batch["x"]).mean()


def in_bf16(params, batch):
    return loss_fn(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), batch)


def a_part(p, batch):
    return scan_layers(lambda x, w: (x * w, None), p["embed"][0], p["layers"]["s"])[0].sum()


def outside(params, batch):
    return loss_fn(params, batch) + jnp.sum(params["layers"]["a"] ** 2)


LOSSES = {
    "twice": (twice, "the stack 'layers' must be scanned once in a loss, got scanned again"),
    "outside": (outside, "used only in scan_layers, got used outside"),
    "cast before": (in_bf16, "scanned by boostax.train.scan_layers in loss_fn.*inside the body"),
    "not scanned": (lambda params, batch: params["head"].sum(), "scanned by .*scan_layers"),
    "a part": (a_part, "xs must be all params of the stack, got some of 'layers'"),
    "vmap": (mapped, "outside jax.vmap.*Map the body instead"),
}


@pytest.mark.parametrize(("name", "layers"), spread(LOSSES, [RELEASE, Layers()]))
def test_a_loss_that_uses_its_layers_otherwise_is_refused(name, layers):
    loss, words = LOSSES[name]
    step = step_of(loss, optax.adam(1e-3), layers=layers)
    with pytest.raises(ValueError, match=words):
        step(step.init(first_params()), next(batches()))


ADAM_OF = functools.partial(optax.adam, 1e-3)
DEPTHS = boostax.freeze_schedule("progressive", total_steps=10, frozen_fraction=0.3)
LABELS = {"embed": 0, "layers": 1, "head": 2}
WITHOUT_GATES = "an optimizer without gates if release=True"
CLIPS = {"tx": optax.chain(boostax.all_reduce(clip=1.0), ADAM_OF()), "layers": "layers"}
STEPS = {
    "global clip": ({"tx": optax.chain(optax.clip_by_global_norm(1.0), ADAM_OF())}, "adagc"),
    "Prodigy": ({"tx": optax.contrib.prodigy()}, "reads the gradient of one param at a time"),
    "loss scale": ({"wrap": boostax.dynamic_loss_scale}, WITHOUT_GATES),
    "window": ({"wrap": lambda tx: boostax.accumulate(tx, 2)}, WITHOUT_GATES),
    "micro-batches": ({"microbatches": 2}, "microbatches must be 1 with release=True, got 2"),
    "freeze": ({"wrap": lambda tx: boostax.scheduled_freeze(tx, LABELS, DEPTHS)}, WITHOUT_GATES),
    "int8": ({"tx": optax.chain(boostax.int8_reduce(), ADAM), "place": "FSDP"}, "a plain mean"),
    "clip": (CLIPS, r"because the backward loop averages gradients, got \('all_reduce', 'clip'\)"),
    "path": ({"layers": "blocks"}, "path must be the path of stacked params"),
    "line search": ({"tx": LINE_SEARCH}, "an optimizer that reads no loss if release"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_cannot_run_its_layers_is_refused(name):
    how, words = STEPS[name]
    with pytest.raises(ValueError, match=words):
        step = step_of(loss_fn, **{"tx": ADAM_OF(), "layers": RELEASE} | how)
        step(step.init(first_params()), next(batches()))


def test_weights_are_gathered_in_one_of_two_ways():
    with pytest.raises(ValueError, match=r"Layers: weights must be .*, got 'by_layer'\. .+\.$"):
        Layers("blocks", weights="by_layer")


def test_layers_are_not_sharded_over_the_replicas_along_their_number():
    specs = jax.tree.map(lambda _: P(), first_params())
    specs["layers"]["a"] = P("data")
    for layers in (Layers(), RELEASE):
        how = {"mesh": mesh_of(data=4), "param_specs": specs, "layers": layers}
        tx = optax.chain(boostax.all_reduce(), ADAM_OF())
        with pytest.raises(ValueError, match=r"layers/a.*Shard another dimension"):
            step = boostax.make_train_step(loss_fn, tx, **how)
            step(step.init(first_params()), next(batches()))
