"""Laws of compiled programs whose params XLA shards: reductions per step, and their bytes.

``make test-compilers`` runs them for CPU, TPU v5e, a few for H100 and, over two slices of 16 chips,
v5e again.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from reducing import PLACEMENTS, loss_fn
from test_compilers import CPU, V5E, everywhere, on
from training import own_step

import boostax

pytestmark = pytest.mark.compilers

WINDOW, ROWS = 8, 1024
targets = on(CPU, V5E)


def typed(mesh, shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))


def layer_of(mesh, specs, width=512, dtype=jnp.float32):
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
    return {name: typed(mesh, shapes[name], specs[name], dtype) for name in shapes}


def audited(mesh, specs, tx, axis, width=512, depth=4, target=None, dtype=jnp.float32, **options):
    """The audit of a train step, from shapes alone."""
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name=axis, **options)
    state = step.init([layer_of(mesh, specs, width, dtype)] * depth)
    return boostax.audit(step, state, typed(mesh, (ROWS, width), P(axis)), target=target)


def over(found, axis, does, least=False):
    """Elements per call that collectives over an axis take in or give out; of params: 1 is all."""
    chosen = [x for x in found.collectives if x.does in does and axis in x.axes]
    # What fewer devices hold is smaller: a loss, a norm.
    chosen = [x for x in chosen if x.elements > 1000 and not (least and x.branches)]
    return sum(x.elements * x.executions for x in chosen) / found.params


@targets
@pytest.mark.parametrize("share", [False, True], ids=["whole state", "ZeRO-1"])
@pytest.mark.parametrize("form", ["micro-batches", "window"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_are_reduced_once_per_optimizer_step(placement, form, share, target):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    inner = optax.chain(boostax.all_reduce("data"), optax.adam(1e-3))
    window = boostax.accumulate(inner, WINDOW, axis_name="data")
    tx = boostax.dynamic_loss_scale(window if form == "window" else inner, axis_name="data")
    more = {} if form == "window" else {"microbatches": WINDOW}
    more |= {"target": target, "shard_optimizer": share}
    found = audited(mesh, PLACEMENTS[placement], tx, "data", **more)
    reduced = over(found, "data", ("all-reduce", "reduce-scatter"))
    held = over(found, "data", ("all-reduce", "reduce-scatter"), least=True)
    gathered = over(found, "data", ("all-gather",))
    sent = found.wire_bytes.most / 4 / found.params
    print(f"N: {reduced:.3f} reduced (held {held:.3f}), {gathered:.3f} gathered; {sent:.2f} P sent")
    assert held == 0 and reduced <= 1.01
    # Weights that are sharded over the batch axis are gathered once per call; new params where the
    # optimizer's state is sharded, where they change.
    assert gathered <= (1.01 if share or "FSDP" in placement else 0)


@everywhere
def test_a_window_in_shards_holds_its_share_of_the_sum_and_reduces_in_each_call(mesh, target):
    """A local one holds all of it, and reduces in its last call alone."""
    inner = optax.chain(boostax.all_reduce(), optax.adam(1e-3))
    forms = [boostax.accumulate(inner, WINDOW, sums=sums) for sums in ("local", "sharded")]
    forms.append(boostax.dynamic_loss_scale(forms[1]))
    audit = functools.partial(audited, mesh, PLACEMENTS["FSDP"], axis="data", target=target)
    local, shards, scaled = (audit(tx=tx) for tx in forms)
    does = ("all-reduce" if target == CPU else "reduce-scatter",)
    counts = [over(x, "data", does, least=y) for x in (local, shards) for y in (True, False)]
    less = (local.argument_bytes - shards.argument_bytes) / (4 * shards.params)
    print(f"{less:.3f} P less; {counts} N reduced in calls that hold and close, of both forms")
    assert less == pytest.approx(7 / 8, abs=0.001)
    assert counts == pytest.approx([0, 1, 1, 1], abs=0.01)
    # A scale is divided out behind the sum.
    assert max(shards.temporary_bytes, scaled.temporary_bytes) <= 1.001 * local.temporary_bytes


@everywhere
@pytest.mark.parametrize("placement", ["replicated", "FSDP"])
def test_a_stacked_batch_is_reduced_once_in_a_loop_of_ones_own(mesh, placement, target):
    """As ``lax.scan`` takes it; rows are not moved between devices to be scanned."""
    params = [layer_of(mesh, PLACEMENTS[placement])] * 4
    batch = typed(mesh, (WINDOW, ROWS, 512), P(None, "data"))
    tx = optax.chain(boostax.all_reduce("data"), optax.adam(1e-3))
    tx = boostax.on_mesh(tx, params, axis_name="data")
    oracle = boostax.value_and_grad(loss_fn, mesh=mesh, axis_name="data", microbatches="stacked")
    step = own_step(tx, oracle)
    found = boostax.audit(step, params, tx.init(params), batch, params=params, target=target)
    print(f"{placement}: {found.reductions:.3f} N reduced, {found.gathers:.3f} N gathered")
    assert found.reductions == pytest.approx(1.0, abs=0.01)
    assert found.gathers <= (1.01 if placement == "FSDP" else 0)
    assert not any(c.does == "all-to-all" and c.elements > 1000 for c in found.collectives)


@pytest.mark.xdist_group("v5e")
@pytest.mark.parametrize("placement", ["replicated", "FSDP"])
def test_params_are_gathered_in_bf16_where_their_owner_keeps_the_rest(mesh, placement):
    """``store(params="remainder")``: f32 masters on the owner of a shard, bf16 on the wire.

    On v5e; XLA:CPU widens what it gathers to f32.
    """
    optimizer = optax.chain(boostax.all_reduce("data"), optax.adam(1e-3))
    low = boostax.precision.store(optimizer, params="remainder")
    how = {"target": "v5e:2x4", "dtype": jnp.bfloat16, "shard_optimizer": True}
    found = audited(mesh, PLACEMENTS[placement], low, "data", **how)
    gathers = [x for x in found.collectives if x.does == "all-gather" and x.elements > 1000]
    sent = sum(x.elements * x.executions for x in gathers) / found.params
    print(f"{placement}: {sent:.3f} N gathered in { ({x.dtypes for x in gathers}) }")
    assert gathers and all(x.dtypes == ("bf16",) for x in gathers) and sent <= 1.01


@targets
@pytest.mark.parametrize("placement", ["FSDP", "tensor parallel, FSDP"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_f32_params_are_gathered_narrow(dtype, placement, target):
    """``gather=``: bytes that a device receives, of those of its f32 params.

    XLA:CPU widens bf16. For v5e, whose matrix units take bf16, XLA gathers f32 params in it anyway.
    """
    sizes, names = ((8,), ("data",)) if placement == "FSDP" else ((4, 2), ("data", "model"))
    mesh = jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
    tx = optax.chain(boostax.all_reduce("data"), optax.adam(1e-3))
    audit = functools.partial(audited, mesh, PLACEMENTS[placement], tx, "data", target=target)
    found, plain = (audit(gather=x) for x in (dtype, None))
    width = {"f32": 4, "bf16": 2, "s8": 1}

    def gathered(audit):
        gathers = [x for x in audit.collectives if x.does == "all-gather"]
        return sum(x.elements * x.executions * max(width[t] for t in x.dtypes) for x in gathers)

    share, usual = (gathered(x) / (4 * found.params) for x in (found, plain))
    more = (found.temporary_bytes - plain.temporary_bytes) / (4 * found.params)
    sent = found.wire_bytes.most / plain.wire_bytes.most
    print(f"Of f32's: {share:.3f} gathered, not {usual:.3f}; {sent:.3f} sent, {more:.2f} P more")
    wide = dtype == "bfloat16" and target is None
    assert share <= (1.01 if wide else {"bfloat16": 0.501, "int8": 0.26}[dtype])
    assert more <= 0.01


# What crosses the slices, of an f32 mean's bytes; temporaries more than its, in shards.
BETWEEN_SLICES = {
    "bf16": (lambda: boostax.all_reduce("slice", wire_dtype="bfloat16"), 0.501),
    "int8": (lambda: boostax.int8_reduce("slice"), 0.27),
    "top-k 1%": (lambda: boostax.top_k_reduce("slice", 0.01), 0.085),
    "AdaSum": (lambda: boostax.adasum("slice"), 1.01),
}


@functools.cache
def between_slices(name):
    devices = boostax.auditing.target_devices("v5e:4x4*2")
    devices = sorted(devices, key=lambda x: (x.slice_index, x.id))
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 16), ("slice", "fsdp"))
    make = BETWEEN_SLICES[name][0] if name else lambda: boostax.all_reduce("slice")
    tx = boostax.dynamic_loss_scale(optax.chain(make(), optax.adam(1e-3)), axis_name="slice")
    return audited(mesh, {"up": P("fsdp"), "down": P("fsdp")}, tx, "slice", width=2048, depth=2)


@pytest.mark.xdist_group("v5e")
@pytest.mark.parametrize("name", BETWEEN_SLICES)
def test_shards_cross_the_slices_narrow(name):
    """Nothing of a gradient is gathered within a slice."""
    found, plain = between_slices(name), between_slices(None)
    crossing = found.crossing_bytes.most / plain.crossing_bytes.most
    more = (found.temporary_bytes - plain.temporary_bytes) / (4 * plain.params / 16)
    gathered = [x for x in found.collectives if x.does == "all-gather" and x.branches]
    cycles = found.cycles.most / plain.cycles.most
    print(f"{name}: {crossing:.3f} of a mean's bytes, {cycles:.2f} of its cycles, {more:+.2f} P")
    assert crossing <= BETWEEN_SLICES[name][1] and more <= 1.2
    # A scale of each row may be; a gradient is not.
    assert sum(x.elements for x in gathered if "fsdp" in x.axes) <= 0.01 * plain.params
    assert found.crossing_bytes.least <= 0.001 * plain.crossing_bytes.most
