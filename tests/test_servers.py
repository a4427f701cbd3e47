"""AdaSum over servers: the mean of gradients in each, its optimizer, AdaSum of the updates."""

import collections
import functools
import json

import chex
import costs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import PartitionSpec as P
from reducing import mesh_of
from training import follow, own_step

import boostax
from boostax.config import auto

RATE, STEPS = 0.05, 5
MEAN = optax.chain(boostax.all_reduce("data"), optax.adam(RATE))
SHAPES = {"w": (24, 10), "b": (7,), "scalar": ()}


def start():
    random = np.random.default_rng(0)
    return {name: np.asarray(random.normal(size=shape)) for name, shape in SHAPES.items()}


def gradients(replicas):
    """Of every step, ``(replicas, ...)``: a common part, and one of each replica's own."""
    random = np.random.default_rng(1)
    # Updates of a scalar that cancel leave rounding, which AdaSum would amplify.
    common = {name: random.normal(size=shape) + 5 * (not shape) for name, shape in SHAPES.items()}
    own = lambda shape: random.normal(size=(replicas, *shape))  # noqa: E731
    return [{k: common[k] + own(shape) for k, shape in SHAPES.items()} for _ in range(STEPS)]


def by_the_formula(servers, replicas):
    """Params after Adam of each server on its mean gradient, and AdaSum of what they make of it."""
    params = start()
    for name, x in params.items():
        first, second = np.zeros((2, servers, *x.shape))
        for step, grads in enumerate(gradients(replicas), 1):
            mean = grads[name].reshape(servers, -1, *x.shape).mean(1)
            first = 0.9 * first + 0.1 * mean
            second = 0.999 * second + 0.001 * mean**2
            scale = np.sqrt(second / (1 - 0.999**step)) + 1e-8
            x = x + reference.adasum(-RATE * first / (1 - 0.9**step) / scale)
        params[name] = x
    return params


AXES = {1: ("data",), 2: ("nodes", "cores"), 3: ("pods", "nodes", "cores")}


def a_mesh(*sizes):
    return mesh_of(**dict(zip(AXES[len(sizes)], sizes, strict=True)))


# Small enough that "w" travels in its own shape, the rest in a pack.
def of_servers(axis, within, inner=None, **options):
    inner = optax.adam(RATE) if inner is None else inner
    options |= {"axis_name": axis, "within": within, "bucket_bytes": 256}
    return boostax.reduce.adasum_delta(inner, **options)


def trained(tx):
    """Several steps of one replica, and how parallel the servers' updates were."""

    def step(carry, grads):
        params, state = carry
        return boostax.apply_gradients(tx, grads, state, params), None

    def run(params, grads):
        stacked = jax.tree.map(lambda *steps: jnp.stack(steps), *grads)
        params = jax.tree.map(jnp.asarray, params)
        (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), stacked)
        return params, state.adasum.orthogonality

    return run


def mapped(tx, mesh, *, checked=True):
    """Results are the same on all devices, and typed so."""
    local = lambda grads: jax.tree.map(lambda x: x[0], grads)  # noqa: E731
    specs = {"in_specs": (P(), P(mesh.axis_names)), "out_specs": P(), "check_vma": checked}
    run = lambda params, grads: trained(tx)(params, local(grads))  # noqa: E731
    return jax.jit(jax.shard_map(run, mesh=mesh, **specs))(start(), gradients(mesh.size))


def farthest(params, servers, replicas):
    expected = by_the_formula(servers, replicas)
    return max(abs(np.asarray(params[k]) - expected[k]).max() for k in SHAPES)


FORMS = {
    "two servers": ((2, 4), "nodes", True),
    "four servers": ((4, 2), "nodes", True),
    "a tuple of axes, unchecked": ((2, 2, 2), ("pods", "nodes"), False),
    "servers of one device": ((8, 1), "nodes", True),
}


# In f64, as Optax computes 1 - 0.999**t in the dtype of the params: in f32 that is worth 2e-6.
@pytest.mark.parametrize("form", FORMS)
def test_each_server_has_an_adam_for_its_mean_gradient(form):
    sizes, axis, checked = FORMS[form]
    with jax.enable_x64(True):
        params, _ = mapped(of_servers(axis, "cores"), a_mesh(*sizes), checked=checked)
        assert farthest(params, 8 // sizes[-1], 8) < 1e-12


def assert_near(found, expected, tolerance):
    chex.assert_trees_all_close(found, expected, rtol=0, atol=tolerance)


def loss_fn(params, batch):
    found = jnp.tanh(batch["x"] @ params["w"]) + params["b"].sum() + params["scalar"]
    return jnp.mean((found - batch["y"]) ** 2)


def batches(count):
    random = np.random.default_rng(2)
    for _ in range(count):
        x, y = random.normal(size=(16, 24)), random.normal(size=(16, 10))
        yield {"x": np.float32(x), "y": np.float32(y)}


def narrow():
    return jax.tree.map(np.float32, start())


def by_a_step(tx, mesh, calls=3):
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name=mesh.axis_names)
    return follow(step, step.init(narrow()), batches(calls))[0]


def on_global_arrays(tx, mesh, calls=3):
    params = jax.device_put(narrow(), jax.NamedSharding(mesh, P()))
    tx = boostax.on_mesh(tx, params, axis_name=mesh.axis_names)
    oracle = boostax.value_and_grad(loss_fn, mesh=mesh, axis_name=mesh.axis_names)
    step, state = own_step(tx, oracle), tx.init(params)
    for batch in batches(calls):
        params, state, _ = step(params, state, batch)
    return params


@pytest.mark.parametrize("inner", ["adam", "sgd"])
def test_train_step_and_global_arrays_agree(inner):
    """Also where nothing in the optimizer's state says that servers differ."""
    tx = optax.adam(RATE) if inner == "adam" else optax.sgd(RATE)
    tx, mesh = of_servers("nodes", "cores", tx), a_mesh(2, 4)
    state = by_a_step(tx, mesh)
    if inner == "adam":
        # Devices of a server keep the same moments.
        moments = state.opt_state.inner_state.local[0].mu["w"]
        servers = np.asarray(moments).reshape(2, 4, *SHAPES["w"])
        np.testing.assert_array_equal(servers, np.broadcast_to(servers[:, :1], servers.shape))
        assert abs(servers[0, 0] - servers[1, 0]).max() > 0
    assert_near(on_global_arrays(tx, mesh), state.params, 2e-6)


def test_a_state_may_have_one_copy_for_each_server():
    """In a ``shard_map`` of one's own, replicated inside it and typed so."""
    mesh, tx = a_mesh(2, 4), of_servers("nodes", "cores")
    states = boostax.states
    specs = states.state_specs(tx, start(), axis_name="nodes")
    state = states.stack_replicas(tx.init(narrow()), 2)

    def step(params, state, grads):
        grads = jax.tree.map(lambda x: jnp.float32(x[0]), grads)
        state = states.enter_replica(state)
        params, state = boostax.apply_gradients(tx, grads, state, params)
        return params, states.leave_replica(state)

    in_specs = (P(), specs, P(("nodes", "cores")))
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(P(), specs)))
    params = narrow()
    for grads in gradients(8):
        params, state = run(params, state, grads)
    assert farthest(params, 2, 8) < 1e-5
    assert state.inner_state.local[0].mu["w"].shape == (2, *SHAPES["w"])


def test_half_precision_travels_between_servers():
    for wire, tolerance in (("bfloat16", 2**-7), ("float16", 2**-10)):
        inner = optax.sgd(1.0)
        tx = of_servers("nodes", "cores", inner, wire_dtype=wire)
        plain = of_servers("nodes", "cores", inner)
        found, expected = (mapped(x, a_mesh(2, 4))[0] for x in (tx, plain))
        for k in SHAPES:
            largest = abs(start()[k] - expected[k]).max()
            np.testing.assert_allclose(found[k], expected[k], rtol=0, atol=4 * tolerance * largest)


def test_one_server_has_nothing_to_combine():
    expected = by_a_step(MEAN, a_mesh(8)).params
    assert_near(by_a_step(of_servers("nodes", "cores"), a_mesh(1, 8)).params, expected, 1e-6)


def test_a_leaf_without_elements_divides_by_no_zero():
    """Defect guarded against: its slices of a server, under ``vmap``, were none."""
    tx, none = of_servers("nodes", "cores", optax.sgd(1.0)), jnp.zeros((2, 2, 0, 2))
    grads = {"w": jnp.arange(8.0).reshape(2, 2, 2), "empty": none}
    step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="cores")
    found = jax.jit(jax.vmap(step, axis_name="nodes"))(grads)
    expected = -reference.adasum(grads["w"].mean(1))
    assert_near(found, {"w": np.tile(expected, (2, 2, 1)), "empty": none}, 1e-6)


def test_a_number_of_devices_is_answered_with_a_mesh_of_two_axes():
    words = r": within must be a mesh axis name or a tuple of axis names, got 4\. Write axis_name="
    mesh = r"\"server\", within=\"data\" on the mesh jax.make_mesh\(\(n // 4, 4\), \(\"server\", "
    for tx in (boostax.adasum, functools.partial(boostax.reduce.adasum_delta, optax.sgd(1.0))):
        with pytest.raises(ValueError, match=r"^adasum(_delta)?" + words + mesh):
            tx(axis_name="data", within=4)


def test_what_each_device_sends_is_what_the_docstring_says():
    """Of N bytes: no more than N / w of the updates, there and back, leave a server of w."""
    big = {"w": jnp.zeros((64, 512))}
    size, servers, devices = 64 * 512 * 4, 2, 4

    def sent(tx, mesh):
        run = lambda g: tx.update(g, tx.init(big))[0]  # noqa: E731
        shown = jax.shard_map(run, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P())
        found = collections.Counter()
        for c in costs.collectives(shown, {"w": jnp.zeros((8 * 64, 512))}):
            found[c.primitive, c.axes, c.replicas] += c.wire_bytes
        return {key: x / size for key, x in found.items() if x > size / 100}

    inside, between = (devices - 1) / devices, (servers - 1) / servers / devices
    tx = boostax.reduce.adasum_delta(optax.sgd(1.0), axis_name="nodes", within="cores")
    expected = {(x, ("nodes",), servers): between for x in ("ppermute", "all_gather")}
    expected |= {("psum", ("cores",), devices): 2 * inside}
    expected |= {("all_gather", ("cores",), devices): inside}
    assert sent(tx, a_mesh(2, 4)) == pytest.approx(expected, rel=1e-2)


def test_servers_of_a_state_are_averaged_where_they_become_one():
    """And those that become several take a copy: the devices of each stay the same."""
    state = by_a_step(of_servers("nodes", "cores"), a_mesh(4, 2))
    old = np.asarray(state.opt_state.inner_state.local[0].mu["w"])[::2]
    for replicas, servers in ((4, 2), (16, 8), (2, 1)):
        moved = boostax.reshard_state(jax.device_get(state), replicas, within=2)
        new = np.asarray(moved.opt_state.inner_state.local[0].mu["w"])
        new = new.reshape(servers, 2, *SHAPES["w"])
        np.testing.assert_array_equal(new[:, 0], new[:, 1])
        wanted = old.reshape(servers, -1, *SHAPES["w"]).mean(1) if servers < 4 else old.repeat(2, 0)
        np.testing.assert_allclose(new[:, 0], wanted, rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match=r"^reshard_state: replicas must be a multiple of within"):
        boostax.reshard_state(state, 3, within=2)


DATA = [
    {"boost": {"mode": "manual", "adasum": True}, "common": {"device_number": 4}},
    {"reduce": {"kind": "adasum-delta", "within": 4}},
    {"adasum_delta": {"within": 4}},
]


@pytest.mark.parametrize("data", DATA, ids=["mindspore", "reduce", "adasum_delta"])
def test_a_configuration_names_the_devices_of_a_server(data):
    boost = auto(data)
    assert boost.config.get("reduce") == {"kind": "adasum-delta", "within": 4}
    assert auto(json.loads(json.dumps(boost.config))).config == boost.config
    assert boost.mesh().shape == {"server": 2, "data": 4}
    if "boost" in data:
        step = a_step(boost, boost.mesh())
        expected = by_a_step(of_servers("nodes", "cores"), a_mesh(2, 4)).params
        assert_near(follow(step, step.init(narrow()), batches(3))[0].params, expected, 1e-6)


def a_step(boost, mesh, **options):
    options = {"mesh": mesh, "axis_name": mesh.axis_names} | options
    return boost.make_train_step(loss_fn, optax.adam(RATE), narrow(), **options)


@pytest.mark.parametrize("devices", [8, 16])
def test_no_more_devices_than_a_server_has_take_a_mean(devices):
    boost = auto(DATA[0] | {"common": {"device_number": devices}})
    mesh = boost.mesh()
    assert mesh.shape == {"data": 8}
    step = a_step(boost, mesh)
    found = follow(step, step.init(narrow()), batches(3))[0].params
    chex.assert_trees_all_equal(found, by_a_step(MEAN, a_mesh(8)).params)


REFUSED = [
    (4, (8,), r"one axis of at most 4 devi.* got \[8\]\. .* jax.make_mesh\(\(2, 4\), \('server', "),
    (4, (4, 2), r"got \[4, 2\]\. Use the mesh of boost.mesh\(\), jax.make_mesh\(\(2, 4\), "),
    (16, (4, 2), r"got \[4, 2\]\. .* jax.make_mesh\(\(8,\), \('data',\)\), and axis_name="),
    (3, (8,), "^Boost: the number of devices must be a multiple of the 3 devices of a server, got"),
]


@pytest.mark.parametrize(("devices", "sizes", "match"), REFUSED)
def test_other_meshes_than_those_of_the_dictionary_are_refused(devices, sizes, match):
    step = a_step(auto(DATA[0] | {"common": {"device_number": devices}}), a_mesh(*sizes))
    with pytest.raises(ValueError, match=match):
        follow(step, step.init(narrow()), batches(1))


def test_mindspores_device_number_says_when_nothing_is_combined():
    boost = auto({"boost": {"mode": "manual", "adasum": True}})
    assert boost.config["reduce"]["within"] == 8
    assert boost.notes[-1].startswith("common.device_number = 8: boostax combines any")
    assert not any("device_number" in note for note in auto({"boost": {}}).notes)


def test_it_says_what_it_averages():
    found = boostax.explain(of_servers("nodes", "cores"), narrow())
    assert found.parts[0].what.startswith("Run inner on the mean gradient over cores")
    assert not found.findings
