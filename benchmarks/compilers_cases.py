"""Programs for the compilers: gates on one chip, train steps on eight, by shapes alone.

Shared by ``benchmarks/compilers.py``, which writes the page, and ``tests/test_compilers.py``, which
holds the laws.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import forms
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding, reshard
from jax.sharding import PartitionSpec as P

import boostax
from boostax.testing import drawn

AXIS = "data"
WINDOW = 8
# 1.07 GB: a TPU keeps the temporaries of smaller models in its vector memory, where none are seen.
LEAVES = {f"layer{i:02d}": jax.ShapeDtypeStruct((4096, 4096), jnp.float32) for i in range(16)}
BYTES = 16 * 4096 * 4096 * 4


def adam():
    return optax.adam(1e-3)


def labels(params):
    """Four groups of neighbouring leaves."""
    names = sorted(params)
    return {name: i * 4 // len(names) for i, name in enumerate(names)}


GATES: dict[str, Callable[[], optax.GradientTransformation]] = {
    "dynamic_loss_scale": lambda: boostax.dynamic_loss_scale(adam()),
    "static_loss_scale": lambda: boostax.static_loss_scale(adam(), 128.0),
    "accumulate": lambda: boostax.accumulate(adam(), WINDOW),
    "accumulate(dynamic_loss_scale)": lambda: boostax.accumulate(
        boostax.dynamic_loss_scale(adam()), WINDOW
    ),
    "dynamic_loss_scale(accumulate)": lambda: boostax.dynamic_loss_scale(
        boostax.accumulate(adam(), WINDOW)
    ),
    "group_loss_scale": lambda: boostax.precision.group_loss_scale(adam(), labels(LEAVES)),
}


def devices_of(target: str | None) -> tuple[Any, ...]:
    """Of a target, or those at hand."""
    return tuple(jax.devices()) if target is None else boostax.auditing.target_devices(target)


def on_one_chip(
    tx: optax.GradientTransformation,
    target: str | None,
    pure: bool = False,
    params: Any = None,
    **extra: jax.ShapeDtypeStruct,
) -> boostax.auditing.Audit:
    """The optimizer's part of a step: gradients given, params and state donated."""
    params = LEAVES if params is None else params
    tx = drawn(tx)

    def applied(params, state, grads, extra):
        return boostax.apply_gradients(tx, grads, state, params, **extra)

    def updated(params, state, grads, extra):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    chip = SingleDeviceSharding(devices_of(target)[0])
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chip)  # noqa: E731
    given = jax.tree.map(place, (params, jax.eval_shape(tx.init, params), params, extra))
    step = jax.jit(updated if pure else applied, donate_argnums=(0, 1))
    return boostax.audit(step, *given, target=target)


class Model(NamedTuple):
    """A network by shapes.

    Attributes:
      params: a tree of shapes.
      loss: ``(params, batch) -> scalar``.
      batch: from the number of rows.
    """

    params: Any
    loss: Callable[[Any, Any], jax.Array]
    batch: Callable[[int], Any]


def perceptron(layers: int, width: int) -> Model:
    """Square layers, computed in bf16."""
    params = {
        f"layer{i:02d}": jax.ShapeDtypeStruct((width, width), jnp.float32) for i in range(layers)
    }

    def loss(params, batch):
        hidden = batch.astype(jnp.bfloat16)
        for name in sorted(params):
            hidden = jnp.tanh(hidden @ params[name].astype(jnp.bfloat16))
        return jnp.mean(hidden.astype(jnp.float32) ** 2)

    return Model(params, loss, lambda rows: jax.ShapeDtypeStruct((rows, width), jnp.float32))


def decoder(
    layers: int, width: int, vocab: int, heads: int, length: int, stacked: bool = True
) -> Model:
    """A decoder in bf16 with remat; its layers stacked and scanned, as large models are written."""
    square, hidden = (width, width), 4 * width
    block = {"norm1": (width,), "norm2": (width,), "q": square, "k": square, "v": square}
    block |= {"o": square, "up": (width, hidden), "down": (hidden, width)}
    typed = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    if stacked:
        stack = {name: typed((layers, *shape)) for name, shape in block.items()}
    else:
        stack = {f"{i:02d}": {k: typed(s) for k, s in block.items()} for i in range(layers)}
    params = {"embed": typed((vocab, width)), "layers": stack, "norm": typed((width,))}
    params["head"] = typed((width, vocab))

    # JAX multiplies and indexes by params that are marked as reduced only where the code says so.
    explicit = lambda x: AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types  # noqa: E731

    def normed(x, weight):
        if explicit(x):
            weight = reshard(jnp.broadcast_to(weight, (len(x), 1, width)), jax.typeof(x).sharding)
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * weight).astype(
            x.dtype
        )

    def layer(x, weights):
        low = {name: w.astype(x.dtype) for name, w in weights.items()}
        y = normed(x, weights["norm1"])
        split = lambda z: z.reshape(*z.shape[:2], heads, width // heads)  # noqa: E731
        q, k, v = (split(y @ low[name]) for name in "qkv")
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ low["o"]
        y = normed(x, weights["norm2"])
        return x + jax.nn.gelu(y @ low["up"]) @ low["down"], None

    def loss(params, batch):
        table, tokens = params["embed"].astype(jnp.bfloat16), batch[:, :-1]
        where = jax.typeof(tokens).sharding
        x = table.at[tokens].get(out_sharding=where) if explicit(tokens) else table[tokens]
        if stacked:
            x, _ = boostax.train.scan_layers(layer, x, params["layers"], remat=True)
        else:
            for name in sorted(params["layers"]):
                x, _ = jax.checkpoint(layer)(x, params["layers"][name])
        logits = (normed(x, params["norm"]) @ params["head"].astype(x.dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    return Model(params, loss, lambda rows: jax.ShapeDtypeStruct((rows, length + 1), jnp.int32))


def mesh_of(target: str | None, shape=None, names=(AXIS,)) -> Mesh:
    """A mesh over all devices of a target."""
    devices = np.array(devices_of(target))
    return Mesh(devices.reshape(shape or -1), names, axis_types=(AxisType.Auto,) * len(names))


def trained(
    model: Model,
    tx: optax.GradientTransformation,
    target: str | None,
    rows: int = 8,
    depth: int | None = None,
    mesh: Mesh | None = None,
    calls: int = 1,
    **options: Any,
) -> boostax.auditing.Audit:
    """A train step over all devices of a target."""
    mesh = mesh_of(target) if mesh is None else mesh
    step = boostax.make_train_step(model.loss, tx, mesh=mesh, axis_name=mesh.axis_names, **options)
    batch = model.batch(rows * mesh.size * options.get("microbatches", 1))
    state = step.init(model.params)
    return boostax.audit(step, state, batch, target=target, depth=depth, calls=calls)


def sharded(
    model: Model, tx: optax.GradientTransformation, target: str, chips: int = 16
) -> boostax.auditing.Audit:
    """A train step whose params are sharded over so many chips, the others being replicas (HSDP).

    The reductions of ``tx`` go over ``AXIS``: between slices, where there are several.
    """
    devices = sorted(devices_of(target), key=lambda x: (getattr(x, "slice_index", 0), x.id))
    mesh = Mesh(np.array(devices).reshape(-1, chips), (AXIS, "fsdp"))

    def typed(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    def split(x):
        dim = next((i for i, size in enumerate(x.shape) if size % chips == 0), None)
        return typed(x, P() if dim is None else P(*[None] * dim, "fsdp"))

    step = boostax.make_train_step(model.loss, tx, mesh=mesh, axis_name=AXIS)
    batch = jax.tree.map(lambda x: typed(x, P((AXIS, "fsdp"))), model.batch(mesh.size))
    return boostax.audit(step, step.init(jax.tree.map(split, model.params)), batch, target=target)


def mean(**options):
    return optax.chain(boostax.all_reduce(AXIS, **options), adam())


def leaf_by_leaf():
    """The peer: ``lax.pmean`` of each leaf."""
    reduce = lambda g, _: jax.tree.map(lambda x: lax.pmean(x, AXIS), g)  # noqa: E731
    return optax.chain(optax.stateless(reduce), adam())


WIRES = {
    "f32": (lambda: boostax.all_reduce(AXIS), 1.0),
    "bf16": (lambda: boostax.all_reduce(AXIS, wire_dtype="bfloat16"), 0.5),
    "int8": (lambda: boostax.int8_reduce(AXIS), 0.254),
}
# In the place of a mean in a train step, and the most of its cycles that each may take on v5e.
NARROW = {
    '`all_reduce(wire_dtype="bfloat16")`': (WIRES["bf16"][0], 1.5),
    '`all_reduce(wire_dtype="float16")`': (lambda: boostax.all_reduce(AXIS, wire_dtype="f2"), 2.0),
    "`int8_reduce`": (lambda: boostax.int8_reduce(AXIS), 2.0),
    "`adasum`": (lambda: boostax.adasum(AXIS), 3.0),
    "`top_k_reduce(density=0.01)`": (lambda: boostax.top_k_reduce(AXIS, 0.01), 9.5),
}
SQUARES = {f"layer{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(4)}


def reduction(
    tx: optax.GradientTransformation, target: str | None, params: Any = SQUARES
) -> tuple[Any, Any]:
    """A chain alone over eight devices, and the types of its local gradients."""
    mesh = mesh_of(target)

    def update(grads):
        local = jax.tree.map(lambda x: x[0], grads)
        state = tx.init(local)
        return tx.update(boostax.precision.assume_scaled(local, state), state, local)[0]

    mapped = jax.shard_map(update, mesh=mesh, in_specs=P(AXIS), out_specs=P(), check_vma=False)
    sharding = NamedSharding(mesh, P(AXIS))
    grads = {
        name: jax.ShapeDtypeStruct((8, *x.shape), x.dtype, sharding=sharding)
        for name, x in params.items()
    }
    return jax.jit(mapped), grads


def over_replicas(tree, mesh, axis=AXIS):
    """Each leaf sharded over an axis, the batch's for FSDP, along its last dimension."""

    def where(x):
        cut = x.ndim and x.shape[-1] % mesh.shape[axis] == 0
        return NamedSharding(mesh, P(*[None] * (x.ndim - 1), axis) if cut else P())

    return jax.tree.map(lambda x: x.update(sharding=where(x)), tree)


# Shape of the mesh, and the axis over which params are sharded.
PLACED: dict[str, tuple[tuple[int, ...], str | None]] = {
    "whole": ((8,), None),
    "FSDP": ((8,), AXIS),
    "HSDP, 2 x 4": ((2, 4), "fsdp"),
    "tensor parallel, 4 x 2": ((4, 2), "model"),
}


def deep():
    """195 M params in 24 layers: a TPU keeps temporaries of small models out of sight."""
    return decoder(24, 768, 16_384, 12, 256)


def placed(placement, target, microbatches=1, rows=2, **options):
    """A step of the deep decoder whose params lie as ``placement`` says."""
    shape, axis = PLACED[placement]
    mesh, model = mesh_of(target, shape, (AXIS, axis)[: len(shape)]), deep()
    typed = lambda x, spec: x.update(sharding=NamedSharding(mesh, spec))  # noqa: E731
    whole = jax.tree.map(lambda x: typed(x, P()), model.params)
    params = whole if axis is None else over_replicas(whole, mesh, axis)
    split = (AXIS, axis) if axis == "fsdp" else (AXIS,)
    devices = 8 if axis == "fsdp" else mesh.shape[AXIS]
    batch = typed(model.batch(rows * devices * microbatches), P(split))
    how = {"mesh": mesh, "axis_name": AXIS, "microbatches": microbatches}
    tx = optax.chain(boostax.all_reduce(), adam())
    step = boostax.make_train_step(model.loss, tx, **how, **options)
    return boostax.audit(step, step.init(params), batch, target=target)


def in_forms(
    target: str | None, model: Model | None = None, fsdp: bool = False
) -> dict[str, boostax.auditing.Audit]:
    """A decoder with a scanned stack, of a window of micro-batches, in all forms of a step."""
    model, mesh = decoder(4, 256, 1024, 4, 64) if model is None else model, mesh_of(target)
    params = over_replicas(model.params, mesh)
    specs = jax.tree.map(lambda x: x.sharding.spec if fsdp else P(), params)
    batch = model.batch(2 * mesh.size * WINDOW)
    case = forms.Case(model.loss, adam(), mesh, (AXIS,), model.params, specs, batch, WINDOW)

    def audited(build: Callable[[forms.Case], forms.Program]) -> boostax.auditing.Audit:
        run, args, calls = build(case)
        return boostax.audit(run, *args, target=target, calls=calls)

    return {name: audited(build) for name, build in forms.FORMS.items()}


MUON = {
    "`all_reduce`, Muon": lambda: optax.chain(boostax.all_reduce(), _muon()),
    "`by_shape` of Muon": lambda: boostax.by_shape(_muon()),
}
# A mesh of data and model, and the spec of matrices.
MUON_PLACED = {
    "whole": ((8, 1), P()),
    "FSDP": ((8, 1), P(AXIS)),
    "tensor parallel, 4 x 2": ((4, 2), P(None, "model")),
}


def _muon() -> optax.GradientTransformation:
    return optax.contrib.muon(0.02, weight_decay=0.1)


def muon(
    form: str, target: str | None, counts: Mapping[int, int], placed: str = "whole"
) -> boostax.auditing.Audit:
    """The optimizer's part of a step on square matrices: local gradients given, all donated.

    Args:
      form: a key of ``MUON``.
      target: where it is compiled for.
      counts: the number of matrices by their width.
      placed: a key of ``MUON_PLACED``.
    """
    shape, spec = MUON_PLACED[placed]
    mesh = mesh_of(target, shape, (AXIS, "model"))
    whole, at = (NamedSharding(mesh, x) for x in (P(), spec))
    square = lambda width: jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=at)  # noqa: E731
    params: dict[str, Any] = {str(w): [square(w)] * count for w, count in counts.items()}
    params["bias"] = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=whole)
    tx = boostax.on_mesh(MUON[form](), params, axis_name=AXIS)

    def local(x):
        rest = [name if name != AXIS else None for name in x.sharding.spec]
        where = NamedSharding(mesh, P(AXIS, *rest))
        return jax.ShapeDtypeStruct((shape[0], *x.shape), x.dtype, sharding=where)

    def step(params, state, grads):
        return boostax.apply_gradients(tx, grads, state, params)

    grads = boostax.PerReplica(jax.tree.map(local, params))
    step = jax.jit(step, donate_argnums=(0, 1, 2))
    return boostax.audit(step, params, tx.init(params), grads, target=target)


def products(found: boostax.auditing.Audit) -> int:
    """The matrix products that a device runs."""
    return len(re.findall(r'custom_call_target="__cublas|= \S+ (?:dot|convolution)\(', found.text))
