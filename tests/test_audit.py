"""What a compiled program does, read from its text: on the devices at hand, and of other compilers
from lines that they wrote."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import costs
import equinox
import jax
import jax.numpy as jnp
import network_losses
import numpy as np
import optax
import pytest
from flax import nnx
from harness import sections_of
from jax import NamedSharding, P, lax

import boostax
from boostax.__main__ import main
from boostax.auditing import collectives, hlo, targets, traffic
from boostax.auditing.collectives import compiled_collectives
from boostax.auditing.command import without_compiler_logs

WIDTH, LAYERS = 64, 4
PARAMS = {f"layer{i}": jnp.full((WIDTH, WIDTH), 0.01) for i in range(LAYERS)}
COUNT = LAYERS * WIDTH**2


def loss_fn(params, batch):
    for weight in params.values():
        batch = jnp.tanh(batch @ weight)
    return jnp.mean(batch**2)


def placed(mesh, tree, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def scanned(mesh, turns, **options):
    """Plain jit over micro-batches: XLA reduces the gradient at each turn."""

    def step(params, batches):
        add = lambda g, x: (jax.tree.map(jnp.add, g, jax.grad(loss_fn)(params, x)), None)  # noqa: E731
        grads, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    given = placed(mesh, PARAMS), placed(mesh, jnp.ones((turns, 16, WIDTH)), None, "data")
    return jax.jit(step, **options), given


# The whole.


def test_a_reduction_in_a_loop_counts_at_each_turn(mesh):
    step, given = scanned(mesh, 6, donate_argnums=0)
    found = boostax.audit(step, *given)
    assert (found.devices, found.params, found.reductions) == (8, COUNT, 6.0)
    (waste,) = found.findings
    assert "reduced 6.00 times per call, inside a loop that runs 6 times, over 'data'" in waste.what
    assert waste.where.startswith(__file__) and "boostax.value_and_grad" in waste.fix
    (reduction,) = found.collectives
    assert (reduction.kind, reduction.dtypes, reduction.executions) == ("all-reduce", ("f32",), 6)
    assert reduction.axes == ("data",) and reduction.loops and not reduction.branches
    assert found.wire_bytes.most == 6 * 2 * 7 / 8 * 4 * COUNT
    assert found.wire_dtypes == {"f32": found.wire_bytes}
    said = str(found)
    assert f"8 devices; {COUNT:,} params" in said and "6.00 N reduced per call" in said
    assert re.search(r"all-reduce +f32 +6 +data +each", said) and "! Gradients are reduced" in said


scaled = functools.partial(boostax.dynamic_loss_scale, axis_name="data")
window = functools.partial(boostax.accumulate, every=8, axis_name="data")
# And what else is added up: the mean of the loss in each call, and what a scaler agrees on.
WINDOWS = {"window": (window, 1, 1), "scaler outside": (lambda tx: scaled(window(tx)), 2, 2)}
WINDOWS["scaler inside"] = (lambda tx: window(scaled(tx)), 1, 2)


reduce = boostax.all_reduce("data")
# A scaler skips a call; the cheapest of its branches is no call that waits for a window.
EACH_CALL = {"reduced outside": lambda tx: optax.chain(reduce, boostax.accumulate(tx, 8))}
EACH_CALL["sharded sums"] = functools.partial(window, sums="sharded")


@pytest.mark.filterwarnings("ignore:make_train_step. accumulate after all_reduce")
@pytest.mark.parametrize("form", EACH_CALL)
@pytest.mark.parametrize("around", [scaled, lambda tx: tx], ids=["scaled", "bare"])
def test_a_reduction_outside_a_window_counts_in_each_call(mesh, form, around):
    tx = around(EACH_CALL[form](optax.chain(*[reduce] * (form == "sharded sums"), optax.sgd(0.1))))
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name="data")
    found = boostax.audit(step, step.init(PARAMS), jnp.ones((16, WIDTH)), calls=8)
    assert found.reductions == pytest.approx(8, abs=0.1)
    assert found.reduced.held > COUNT and (around is scaled) == (found.reduced.least < 8)
    said = [waste.what for waste in found.findings if "Each of the 8 calls" in waste.what]
    assert len(said) == (form == "reduced outside")
    assert ("The window's sum is sharded" in str(found)) == (form == "sharded sums")


@pytest.mark.parametrize("form", WINDOWS)
def test_a_window_reduces_once_in_eight_calls(mesh, form):
    wrap, held, closing = WINDOWS[form]
    tx = wrap(optax.chain(boostax.all_reduce("data"), optax.adam(1e-3)))
    begun = time.perf_counter()
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name="data")
    found = boostax.audit(step, step.init(PARAMS), jnp.ones((16, WIDTH)), calls=8)
    assert 0 < found.compile_seconds <= time.perf_counter() - begun
    assert found.reduced == (held, COUNT + closing, held)
    assert found.per_step(found.reduced) == COUNT + closing + 7 * held
    assert all(c.branches for c in found.collectives if c.elements > 1)
    assert not found.findings and "is sharded" not in str(found)
    assert "  tests/test_audit.py:" in str(found) and "accumulate/" not in str(found)
    shapes = step.init(jax.eval_shape(lambda: PARAMS))
    again = boostax.audit(step, shapes, jax.ShapeDtypeStruct((16, WIDTH), jnp.float32), calls=8)
    assert again.to_dict() | {"compile_seconds": 0} == found.to_dict() | {"compile_seconds": 0}


def test_shapes_arrays_lowered_and_compiled_say_the_same(mesh):
    step, given = scanned(mesh, 2)
    arrays = jax.tree.map(lambda x: jax.device_put(jnp.ones(x.shape, x.dtype), x.sharding), given)
    lowered = step.lower(*given)
    forms = (step, *given), (step, *arrays), (lowered,), (lowered.compile(),)
    assert len({boostax.audit(*form, params=PARAMS).text for form in forms}) == 1


def test_small_temporaries_alone_are_in_vector_memory():
    small = dataclasses.replace(boostax.audit(jnp.sin, jnp.ones(3)), cycles=hlo.Ways(1, 1, 1))
    large = dataclasses.replace(small, temporary_bytes=2**30)
    assert "a TPU's vector memory" in str(small) and "a TPU's vector memory" not in str(large)


def test_donation_is_told(mesh):
    def step(state, batch):
        return {"w": state["w"] + batch.sum()}, state["b"].astype(jnp.float16)

    state = {"w": jnp.ones((512, 512)), "b": jnp.ones((256, 256)), "unused": jnp.ones((64, 64))}
    batch = jnp.ones(8)
    found = boostax.audit(jax.jit(step, donate_argnums=0), state, batch)
    assert {x.path for x in found.donated_in_vain} == {"[0]['b']", "[0]['unused']"}
    assert "are donated without effect" in found.findings[0].what
    found = boostax.audit(jax.jit(step), state, batch)
    assert [x.path for x in found.not_donated] == ["[0]['w']"]
    assert found.aliased_bytes == 0 and "are not donated" in found.findings[0].what
    kept = lambda state, batch: {"w": state["w"] + batch.sum()}  # noqa: E731
    found = boostax.audit(jax.jit(kept, donate_argnums=0), {"w": state["w"]}, batch)
    assert found.aliased_bytes == state["w"].nbytes and not found.findings


def test_wire_bytes_are_those_of_the_jaxpr_and_a_widened_dtype_is_named(mesh):
    def local(x):
        low = lax.psum(x.astype(jnp.bfloat16), "data").sum()
        codes = lax.all_to_all(x.astype(jnp.int8), "data", 0, 0, tiled=True)
        whole = lax.all_gather(lax.psum_scatter(x, "data", tiled=True), "data", tiled=True)
        return low.astype(jnp.float32) + codes.sum() + whole.sum()[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    x = placed(mesh, jnp.ones((8 * 256, 128)), "data")
    found = boostax.audit(jax.jit(mapped), x, params=x)
    declared = {c.primitive: c.wire_bytes for c in costs.collectives(mapped, x)}
    compiled = {c.kind: c for c in found.collectives}
    for kind in ("all-to-all", "reduce-scatter", "all-gather"):
        assert compiled[kind].wire_bytes == declared[kind.replace("-", "_")]
    # XLA:CPU adds bf16 up in f32.
    assert compiled["all-reduce"].wire_bytes == 2 * declared["psum"]
    assert [kind for kind, c in compiled.items() if c.widened] == ["all-reduce"]
    assert "widens collectives of a narrower dtype to f32" in str(found)


def test_axes_are_named_from_the_groups():
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    sums = (("a",), ("b",), ("c",), ("a", "c"), ("b", "c"), ("a", "b", "c"))

    def local(x):
        return sum(lax.pmax(x * n, names) for n, names in enumerate(sums, 1))

    specs = {"in_specs": P(mesh.axis_names), "out_specs": P(mesh.axis_names)}
    mapped = jax.shard_map(local, mesh=mesh, **specs, check_vma=False)
    found = boostax.audit(jax.jit(mapped), placed(mesh, jnp.ones((8, 32)), mesh.axis_names))
    assert sorted(c.axes for c in found.collectives) == sorted(sums)
    assert sorted(c.devices for c in found.collectives) == [2, 2, 2, 4, 4, 8]


def test_adam_moves_seven_times_the_params_where_all_is_fused():
    """CPU recomputes a moment for the update: ten; the law of seven is of TPU and GPU."""
    tx = optax.adam(1e-3)
    params = jax.ShapeDtypeStruct((2048, 512), jnp.float32)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    found = boostax.audit(jax.jit(step, donate_argnums=(0, 1)), params, state, params)
    assert 7.0 <= found.traffic.most / found.params_bytes <= 10.01
    assert found.traffic.least == found.traffic.most


def test_a_scan_reads_its_stack_once():
    """Not once per layer, though the whole stack is the loop's operand."""

    def run(stack, x):
        return lax.scan(lambda x, w: (jnp.tanh(w * x), None), x, stack)[0]

    stack = jax.ShapeDtypeStruct((64, 4096), jnp.float32)
    found = boostax.audit(jax.jit(run), stack, jax.ShapeDtypeStruct((4096,), jnp.float32))
    assert 1.0 <= found.traffic.most / (64 * 4096 * 4) <= 4.0


# What cannot be counted, and what is no gradient.


def mapped(local):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(step, donate_argnums=0), *placed(mesh, (jnp.ones((WIDTH, WIDTH)), jnp.int32(7)))


def turned(carry):
    return carry[0] + 1, lax.psum(carry[1], "data") / 8


UNKNOWN = {
    "body": (7, lambda c, n: c[0] < n, turned),
    "condition": (8, lambda c, n: lax.psum(c[1], "data").sum() < n, lambda c: (c[0], c[1] + 1)),
    "inner": (21, lambda c, n: c[0] < n, lambda c: lax.fori_loop(0, 3, lambda _, c: turned(c), c)),
}


def endless(_=None, where="body"):
    _, runs, body = UNKNOWN[where]
    return mapped(lambda w, n: lax.while_loop(lambda c: runs(c, n), body, (0, w))[1])


@pytest.mark.parametrize("where", UNKNOWN)
def test_unknown_turns_have_no_bound_unless_they_are_said(where):
    """Defect guarded against: they counted once, and what is in a condition not at all."""
    found = boostax.audit(*endless(where=where))
    assert found.reductions == np.inf and found.reduced.least == 0 and found.unknown_loops
    assert "an unknown trip count, over 'data'" in found.findings[0].what
    assert "unknown N reduced" in str(found) and "nan" not in str(found)
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["reductions"] is None and plain["reduced"] == [0, None, None]
    said = boostax.audit(*endless(where=where), turns=7)
    assert said.reductions == UNKNOWN[where][0] and "not known" not in str(said)


def test_a_loop_that_sends_nothing_leaves_what_is_sent_known():
    run = lambda x, n: lax.while_loop(lambda x: x[0] < n, lambda x: x + 1, x)  # noqa: E731
    found = boostax.audit(run, jnp.ones(3), 9.0)
    assert found.unknown_loops and found.reductions == 0 and found.traffic.most == np.inf


SENDS = {
    "psum": lambda x: lax.psum(x, "data"),
    "all_gather": lambda x: lax.all_gather(x, "data", tiled=True)[:WIDTH],
    "ppermute": lambda x: lax.ppermute(x, "data", [(i, i ^ 1) for i in range(8)]),
}


@pytest.mark.parametrize("name", SENDS)
def test_the_narrow_branches_are_widened_and_one_is_paid(name):
    """Defect guarded against: an f32 beside a bf16 of another branch passed for widened."""
    narrow = lambda x: SENDS[name](x.astype(jnp.bfloat16)).astype(jnp.float32)  # noqa: E731
    branches = [narrow, SENDS[name], lambda x: 2 * narrow(x)]
    found = boostax.audit(*mapped(lambda x, n: lax.switch(n, branches, x)))
    assert [c.widened for c in found.collectives] == [True, False, True]
    assert f"to f32: {found.wire_bytes.most:,.0f} bytes" in found.findings[0].what


@pytest.mark.parametrize("form", ["plain", "remat", "replicated"])
def test_activations_of_a_sharded_model_are_no_gradients(form):
    """They are reduced over an axis that no batch is sharded over."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layer = lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None)  # noqa: E731
    loss = lambda w, x: jnp.mean(lax.scan(layer, x, w)[0])  # noqa: E731
    params = [placed(mesh, jnp.ones((2, 16, 64)), None, None, "model")]
    params += [placed(mesh, jnp.ones((2, 64, 16)), None, "model")]
    batch = placed(mesh, jnp.ones((8, 16)), *["data"] * (form != "replicated"))
    loss = jax.checkpoint(loss) if form == "remat" else loss
    found = boostax.audit(jax.grad(loss), params, batch)
    # A device holds a quarter of the params.
    assert found.reductions == 0.25 * (form != "replicated") < found.reduced.most / found.params
    uses = {c.axes[0]: [*c.uses] for c in found.collectives}
    assert uses.pop("model") == ["activations"] and uses.get("data", ["gradients"]) == ["gradients"]


def test_products_of_an_optimizer_are_no_gradients(mesh):
    """Defect guarded against: sharded Muon read as more than one reduction of the gradient."""
    tx = optax.chain(boostax.all_reduce(), optax.contrib.muon(1e-3, ns_steps=1))
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh, shard_optimizer=True)
    params = {"a": jnp.ones((WIDTH, 32)), "b": jnp.ones((32, WIDTH))}
    found = boostax.audit(step, step.init(params), jnp.ones((16, WIDTH)))
    assert found.reduced.most > 1.2 * found.params and 1.0 <= found.reductions < 1.01
    assert any("optimizer" in c.uses for c in found.collectives)
    assert not any("_muon" in c.source for c in found.collectives if "gradients" in c.uses)


@pytest.mark.parametrize("loss", [None, lambda w, x: ((x.T @ x) * w**2).sum()])
def test_what_may_be_a_gradient_counts(mesh, loss):
    """A product outside of autodiff; a sum of the forward pass that has the size of the params."""
    step = jax.grad(loss) if loss else lambda w, x: w - x.T @ (x @ w)
    given = placed(mesh, jnp.ones((64, 64))), placed(mesh, jnp.ones((16, 64)), "data")
    assert 1.0 <= boostax.audit(step, *given).reductions < 1.01


PADDED = {
    "int8_reduce": (boostax.int8_reduce(), boostax.int8_reduce(dense=lambda _, x: x.size < 4096)),
    "adasum": (boostax.adasum(), optax.partition({"small": boostax.all_reduce()}, "small")),
    "all_reduce": (boostax.all_reduce(wire_dtype="float16"),) * 2,
}


@pytest.mark.parametrize("name", PADDED)
def test_small_leaves_that_are_padded_are_found(mesh, name):
    for tx, count in zip(PADDED[name], (1, 0), strict=True):
        size = 128 if (name, count) == ("all_reduce", 0) else 12
        step = boostax.make_train_step(lambda w, x: jnp.mean(x @ w), tx, mesh=mesh)
        found = boostax.audit(step, step.init(jnp.ones((size, size))), jnp.ones((8, size)))
        starts = [x.what.startswith(f"{name} pads small leaves and sends") for x in found.findings]
        assert starts == [True] * count


# Programs of others.


def square(outputs):
    return (outputs**2).mean()


def by_pmap(mesh, x):
    step = lambda w, x: w - lax.pmean(jax.grad(lambda w: square(x @ w))(w), "data")  # noqa: E731
    stacked = jnp.ones((8, WIDTH, WIDTH)), jnp.ones((8, 2, WIDTH))
    return jax.pmap(step, axis_name="data"), stacked, stacked[0][0]


def by_nnx(mesh, x):
    model = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: square(model(x)))(model))

    return step, (model, optimizer, x), nnx.state(model, nnx.Param)


def by_equinox(mesh, x):
    model = equinox.nn.Linear(WIDTH, WIDTH, use_bias=False, key=jax.random.key(0))

    @equinox.filter_jit
    def step(model, x):
        grads = equinox.filter_grad(lambda model: square(jax.vmap(model)(x)))(model)
        return equinox.apply_updates(model, grads)

    return step, (model, x), None


def on_explicit_axes(mesh, x):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(np.ones((16, WIDTH), np.float32), NamedSharding(mesh, P("data")))
    w = jax.device_put(np.ones((WIDTH, WIDTH), np.float32), NamedSharding(mesh, P()))
    return jax.jit(lambda w, x: w - jax.grad(lambda w: square(x @ w))(w)), (w, x), None


@pytest.mark.parametrize("leaves", [1, 3])
def test_a_network_takes_the_bytes_and_messages_of_a_step(mesh, leaves):
    """By XLA:CPU each leaf is a message: between processes gloo sends leaf by leaf."""
    specs = {"in_specs": P("data"), "out_specs": P()}
    mean = jax.shard_map(lambda x: lax.pmean(x, "data"), mesh=mesh, **specs)
    grads = [jax.ShapeDtypeStruct((8, 1024), jnp.float32)] * leaves
    found = boostax.audit(jax.jit(mean), grads, network="100 Mbit, 2 ms")
    assert found.messages.most == 2 * 7 * leaves
    assert found.wire_bytes.most == leaves * 4096 * 2 * 7 / 8 < found.network_bytes.most
    seconds = found.network_bytes.most * 8 / 1e8 + found.messages.most * 2e-3
    assert found.network_seconds.most == pytest.approx(seconds)
    assert "seconds on the network" in str(found) and "the last loss of all_reduce" in str(found)
    silent = boostax.audit(jax.jit(mean), grads)
    assert silent.network_seconds is None and "network" not in str(silent)


def test_advice_is_what_reached_the_loss_first_on_record():
    sections = sections_of("network_losses")
    assert network_losses.ADVICE.read_text() == network_losses.advice(sections)
    rows = next(rows for title, rows in sections.items() if "the mean's last" in title)
    name = network_losses.fastest(rows, "100mbit")
    said = boostax.auditing.network.Network.of("90Mbit").advice
    assert "at 100 Mbit/s" in said and f": {network_losses.CALLS[name]} was the first" in said


STRANGERS = (by_pmap, by_nnx, by_equinox, on_explicit_axes)


@pytest.mark.parametrize("make", STRANGERS, ids=lambda make: make.__name__)
def test_programs_of_others_are_audited_as_they_are(mesh, make):
    x = jax.device_put(np.ones((16, WIDTH), np.float32), NamedSharding(mesh, P("data")))
    program, args, params = make(mesh, x)
    found = boostax.audit(program, *args, params=params)
    assert (found.devices, found.params, found.reductions) == (8, WIDTH**2, 1.0)
    assert [(len(c.axes), c.devices) for c in found.collectives] == [(1, 8)]
    call = {by_nnx: "nnx.jit(", by_equinox: "equinox.filter_jit("}.get(make, "jax.jit(")
    assert f"Donate the arguments: {call}step, donate" in found.findings[-1].fix
    if make is by_nnx:  # Also what NNX lowered or compiled.
        for stage in (lowered := program.lower(*args), lowered.compile()):
            again = boostax.audit(stage, params=params)
            assert (again.devices, again.params, again.reductions) == (8, WIDTH**2, 1.0)


def test_a_variable_that_the_program_does_not_use_is_no_parameter():
    """Its stand-in has the attributes of what it holds, and passed for an argument itself."""
    state = nnx.state(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))
    kernel_alone = jax.jit(lambda state, x: x @ state["kernel"][...])
    found = boostax.audit(kernel_alone, state, jnp.ones((2, WIDTH)))
    assert found.argument_bytes == 4 * (WIDTH * WIDTH + 2 * WIDTH)


def test_keys_static_arguments_and_arrays_of_numpy_are_arguments():
    drawn = jax.jit(lambda key, x, n: n * x + jax.random.normal(key, x.shape), static_argnums=2)
    assert boostax.audit(drawn, jax.random.key(0), jnp.ones(3), 4, params=1).devices == 1
    assert boostax.audit(lambda x: x + 1, np.ones((4, 4), np.float32)).params == 16


# Texts of other compilers, from lines that they wrote.

HEADER = "HloModule jit_f, is_scheduled=true, num_partitions=8"


def program(*body):
    lines = "\n".join(f"  {line}" for line in body)
    return hlo.parse(f"{HEADER}\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{lines}\n}}\n")


def written(name, **changes):
    text = (pathlib.Path(__file__).parent / f"hlo/{name}.hlo").read_text()
    for old, new in changes.items():
        text = text.replace(old, new)
    return hlo.parse(text)


def reduction(groups, count=1024):
    return program(
        f"%p = f32[{count}]{{0}} parameter(0)",
        f"ROOT %r = f32[{count}]{{0}} all-reduce(%p), channel_id=1, {groups}, to_apply=%add",
    )


GROUPS = {
    "replica_groups={{0,1,2,3},{4,5,6,7}}": 4,
    "replica_groups={}": 8,
    "replica_groups=[2,4]<=[8]": 4,
    "replica_groups=[4,2]<=[2,4]T(1,0)": 2,
    "replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}": 4,
    "replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}": 8,
    "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_2'}": 2,
    "replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0':(2)2}": 2,
    "replica_groups=mesh['axis_0'=8] {'axis_0':(1)4}": 4,
}


@pytest.mark.parametrize(("groups", "n"), GROUPS.items())
def test_groups_are_read_in_every_way_of_writing(groups, n):
    (found,) = compiled_collectives(reduction(groups))
    assert (found.devices, found.bytes) == (n, 4096)
    assert found.wire_bytes == 4096 * 2 * (n - 1) / n


PARTS = [
    ("", "'axis_0':(2)2", [(0, 2), (1, 3), (4, 6), (5, 7)]),
    ("", "'axis_0':(1)2", [(0, 4), (1, 5), (2, 6), (3, 7)]),
    (", device_ids=([2,2,2]T(2,1,0))", "'axis_0':(2)2", [(0, 2), (4, 6), (1, 3), (5, 7)]),
    ("", "'axis_0':(1)2,'axis_0':(2)2", None),
]


@pytest.mark.parametrize(("ids", "axes", "groups"), PARTS)
def test_groups_along_a_part_of_an_axis_are_the_devices_of_that_part(ids, axes, groups):
    """Shardy cuts an axis where a dimension is sharded over less than all of it."""
    parsed = reduction(f"replica_groups=mesh['axis_0'=4,'axis_1'=2]{ids} {{{axes}}}", 8)
    refused = pytest.raises(RuntimeError, match="of a known form")
    with refused if groups is None else contextlib.nullcontext():
        assert collectives._groups(parsed.sites[-1].instruction, 8) == groups


def test_a_tpu_loop_without_a_trip_count_is_counted_by_its_counter():
    """The condition compares a counter with a constant, which the loop may also carry."""
    for step, turns in ((1, 10), (3, 4)):
        (found,) = compiled_collectives(written("counter", STEP=str(step)))
        assert found.executions == turns
    for step, relation in ((1, "NE"), (0, "LT")):
        unknown = written("counter", STEP=str(step), **{"direction=LT": f"direction={relation}"})
        (site,) = (s for s in unknown.sites if s.instruction.op == "while")
        assert unknown.trips(site) is None


def test_the_limit_of_an_inner_loop_may_be_carried_by_the_outer_one():
    parsed = written("nested_loops")
    loops = (s for s in parsed.sites if s.instruction.op == "while")
    assert {s.instruction.name: parsed.trips(s) for s in loops} == {"out": 4, "in": 7}
    assert {s.executions for s in parsed.sites if s.computation == "turn"} == {28}


@pytest.mark.parametrize("none", [0, 1])
def test_a_stack_is_read_however_a_frame_without_a_caller_is_written(none):
    files = {"1": '"/own.py"', "2": '"/optax.py"'}
    places = {n: f"file_name_id={n} line={n}0" for n in files}
    frames = {n: f"file_location_id={n} parent_frame_id={int(n) - 1 + none}" for n in files}
    tables = {"FileNames": files, "FileLocations": places, "StackFrames": frames}
    framed = hlo.Program({}, "", 1, frozenset(), tables)
    (line,) = program("%p = f32[] parameter(0), metadata={stack_frame_id=2}").sites
    assert [*framed.sources(line.instruction)] == ["/optax.py:20", "/own.py:10"]


def test_starts_ends_and_what_is_computed_between():
    """Of a GPU: a pair with work in it, and one without."""
    reduced, gathered = compiled_collectives(written("starts"))
    assert (reduced.overlapped, gathered.overlapped) == (True, False)
    assert (gathered.elements, gathered.bytes) == (512, 256)


def test_a_packed_sum_counts_its_own_elements():
    """A TPU adds int16 up two at a time in u32: the bytes are those of int16."""
    (found,) = compiled_collectives(written("packed"))
    counts = found.dtypes, found.elements, found.bytes
    assert counts == (("s16",), 1024, 2048) and not found.widened


def test_a_transfer_carried_by_several_fusions_is_one():
    """Not so another one of the same channel: chains have numbers of their own."""
    found = compiled_collectives(written("carried"))
    assert [(c.overlapped, c.elements) for c in found] == [(True, 64)] * 2


def test_vector_memory_is_no_traffic():
    """Of a TPU: what a copy brings there is read once."""
    assert traffic.counts(written("vector_memory"))["traffic"].most == 2 * 4096


def test_branches_are_the_cheapest_and_the_dearest_way():
    assert traffic.counts(written("branches"))["traffic"] == (0.0, 2 * 256.0, 0.0)


def test_sums_follow_branches_in_branches_and_the_turns_of_loops_around_them():
    """A branch without any amount costs nothing; alternatives do not add up."""
    parsed = written("nested_branches")
    amounts = {("outer:0",): 3.0, ("outer:0", "inner:1"): 10.0, ("outer:1",): 4.0, (): 100.0}
    assert parsed.total(amounts.items()) == (103.0, 113.0, 103.0)
    (small, again) = (s for s in parsed.sites if s.instruction.op == "negate")
    assert small.executions == 5 and small.loops == ("w",)
    assert small.branches == ("outer:0", "inner:1") and again.branches == ("outer:1", "inner:1")
    assert small.caller.instruction.name == "inner" and small.caller.caller.computation == "body"
    assert traffic.counts(parsed)["traffic"] == (0.0, 5 * 2 * 256.0, 0.0)


# Errors.


RING, LOWERED = reduction("replica_groups=ring(8)"), jax.jit(jnp.sin).lower(1.0)
REFUSED = {
    "a lowered or compiled program must be the only argument": lambda: boostax.audit(LOWERED, 1.0),
    "audit: program must be compiled to HLO": lambda: hlo.parse("module @f {}"),
    "a line of a compiled program of JAX": lambda: program("%p <- f32[8] parameter(0)"),
    "the groups of a collective of JAX": lambda: compiled_collectives(RING),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_audited_or_read_is_refused(said):
    with pytest.raises(RuntimeError if said.endswith("of JAX") else ValueError, match=said):
        REFUSED[said]()


TARGETS = ["", *"v5e v5e:8 h100:8 h100:1x1x8*2 v5e:2x4x 2x4 mi300:1x1x8 v7x:2x2x1".split()]


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_that_is_none_gets_the_machines_that_are_known(target):
    said = rf"target must be 'v5e:2x4'.*got {re.escape(repr(target))}"
    with pytest.raises(ValueError, match=said) as error:
        boostax.auditing.target_devices(target)
    for name in ("v4", "v5e", "v5p", "v6e", "h100", "h200", "a100"):
        assert f"\n  {name}:" in str(error.value)


# Words, the command.


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax
gradient = jax.grad(lambda w, x: ((x @ w) ** 2).mean())
def program(devices):
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    typed = lambda shape, *spec: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(*spec)))
    step = lambda w, x: w - 0.1 * gradient(w, x)
    return jax.jit(step, donate_argnums=0), typed((128, 128)), typed((64, 128), "data")
def window():
    tx, w = optax.MultiSteps(optax.sgd(0.1), 8), jnp.zeros((8, 8))
    def step(w, state, x):
        updates, state = tx.update(gradient(w, x), state, w)
        return optax.apply_updates(w, updates), state
    return jax.jit(step), w, tx.init(w), jnp.ones((4, 8))
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """The command in a folder with programs, held to its exit code and to words that it prints."""
    (tmp_path / "audited_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(line, code=0, said=""):
        assert main(["audit", *line.split()]) == code
        told = capsys.readouterr()
        assert said in told[code], told
        return told

    return run


def test_the_command_prints_and_judges(command):
    command("test_audit:without_params")
    name = "audited_program:program"
    command(f"{name} --max-reductions 1.01", said="1.00 N reduced per call")
    command(f"{name} --max-reductions 0.5", code=1, said="reductions are 1.00, more than 0.5")
    told = json.loads(command(f"{name} --json --max-findings 0").out)
    assert told["reductions"] == 1.0 and told["findings"] == []
    command(f"{name} --network 1Gbit", said="In the record of")
    assert "'fast'" in command(f"{name} --network fast", code=1, said="network must be a rate").err


def test_the_unit_is_told_and_a_state_is_no_params(command):
    """Defect guarded against: counts of a step (state, params) were multiples of the moments."""
    command("test_audit:unplaced", said=f"{COUNT:,} params (argument 0)")
    said = "params must be the params, got argument 0, which contains an opt"
    command("test_audit:stateful", code=1, said=said)
    command("test_audit:stateful --params 1", said=f"{COUNT:,} params (argument 1)")
    command("test_audit:stateful --params 2", code=1, said="got argument 2, which")


def stateful():
    step = jax.jit(lambda state, params, tokens: (state, loss_fn(params, 1.0 * tokens)))
    return step, optax.adam(0.1).init(PARAMS), PARAMS, jnp.ones((16, WIDTH), int)


def without_params():
    return (jax.jit(lambda: jnp.ones(3)),)


def unplaced():
    return jax.jit(jax.grad(loss_fn)), PARAMS, jnp.ones((16, WIDTH))


def test_no_limit_passes_what_is_not_known(command):
    for limit, code in {"--max-reductions": 1, "--max-gathers": 0, "--max-findings": 1}.items():
        command(f"test_audit:endless {limit} 0", code=code)
    said = "reductions are unknown, because of unknown trip counts of while"
    told = command("test_audit:endless --max-reductions 99", code=1, said=said)
    assert "pass --turns" in told.err
    command("test_audit:endless --max-reductions 7 --turns 7")
    told = command("test_audit:without_params --max-reductions 7 --json", 1, "of unknown params")
    assert json.loads(told.out, parse_constant=pytest.fail)["flops"] is None


a_step = lambda params, batch: params - batch.sum()  # noqa: E731
jitted = jax.jit(a_step)


@pytest.mark.parametrize("step", ["a_step", "jitted"])
def test_a_step_gets_the_lines_that_build_its_program(command, step):
    name = f"test_audit:{step}"
    told = command(name, 1, f"{name} takes params, batch, as a step does")
    lines = told.err.partition("In audited.py:")[2].rpartition("\nboostax audit")[0]
    pathlib.Path(f"builds_{step}.py").write_text(lines)
    command(f"builds_{step}:program")


@pytest.mark.parametrize("name", ["job_a/at.py", "job_b.bt", "pack_c/i/ct.py", "pack_d.dt"])
def test_programs_are_found_by_file_and_by_module(command, name):
    """A script imports what stands beside it, a module of a package what is in the package."""
    path = pathlib.Path(name.removesuffix(".py").replace(".", "/") + ".py")
    path.parent.mkdir(parents=True)
    for folder in [*path.parents][:-1] if "pack" in name else ():
        (folder / "__init__.py").touch()
    beside = f"{path.stem}_width"
    (path.parent / f"{beside}.py").write_text("width = 8")
    text = f"from {'.' * ('pack' in name)}{beside} import width\nimport jax.numpy as jnp\n"
    path.write_text(text + "run = lambda: (jnp.sin, jnp.ones(width))")
    command(f"{name}:run", said="8 params")


def test_the_command_needs_nothing_but_the_runtime(command):
    script = """import sys
sys.modules.update(dict.fromkeys("flax matplotlib orbax rich sklearn tyro".split()))
from boostax.__main__ import main
sys.exit(main())"""
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    given = [sys.executable, "-c", script, "audit", "audited_program:program", "--cpu-devices", "4"]
    assert "4 devices; 16,384 params" in subprocess.check_output(given, text=True, env=env)


def test_the_command_refuses_in_words(command):
    for argument, said in {
        "audited_program": "must be module:function",
        "audited_program.py": "must be module:function in Python, got 'audited_program.py'",
        "audited_program:missing": "could not be imported",
        "platform:system": "must return the program with its arguments",
        "os:system": "must be module:function in Python, got 'os:system'",
        "no_such_file.py:program": f"no_such_file.py is not in {pathlib.Path.cwd()}",
    }.items():
        command(argument, code=1, said=said)


def test_logs_of_compilers_are_held_back_unless_they_fail(capfd):
    """Those that C++ writes to the descriptor."""
    for error in (None, ValueError):
        with pytest.raises(error) if error else contextlib.nullcontext(), without_compiler_logs():
            os.write(2, b"of a compiler")
            if error:
                raise error
        assert ("of a compiler" in capfd.readouterr().err) == bool(error)
    with pytest.raises(ValueError, match="every must be"), without_compiler_logs():
        os.write(2, b"of a compiler")
        boostax.accumulate(optax.sgd(0.1), 0)
    assert not capfd.readouterr().err


def test_a_call_of_a_window_does_not_pass_for_a_step(command):
    """Defect guarded against: a loop that reduces at each of 8 calls passed as one reduction."""
    name, said = "audited_program:window", "MultiStepsState). Pass --calls"
    assert "pass calls=" in command(f"{name} --max-reductions 1.01", code=1, said=said).out
    assert "pass calls=" not in command(f"{name} --max-findings 9 --calls 8").out


def test_no_limit_passes_on_fewer_devices_than_were_asked_for(command, monkeypatch):
    """Defect guarded against: shapes without shardings reduced nothing on one of 8 devices."""
    refused = {"": "one device reduces nothing", "--cpu-devices 8": "1 device of 8"}
    for devices, said in refused.items():
        line = f"test_audit:unplaced --max-reductions 1.01 {devices}"
        assert "0.00 N reduced" in command(line, code=1, said=said).out
    command("test_audit:unplaced --max-temporaries 9")
    monkeypatch.setattr(targets, "target_devices", lambda target: tuple(jax.devices()))
    with pytest.raises(ValueError, match="args must be placed with shardings"):
        boostax.audit(*unplaced(), target="v5e:2x4")


def test_ours_is_a_window_if_it_has_more_than_one_call():
    for every, there in ((4, "AccumulateState"), (1, "")):
        tx = boostax.accumulate(optax.sgd(0.1), every)
        step = boostax.make_train_step(lambda w, x: jnp.mean(x @ w), tx)
        found = boostax.audit(step, step.init(jnp.zeros((4, 4))), jnp.ones((8, 4)))
        assert found.window.endswith(there) and bool(found.window) == bool(there)
