"""Programs for the compilers: gates on one chip, train steps on eight, by shapes alone.

Shared by ``benchmarks/compilers.py``, which writes the page, and ``tests/test_compilers.py``, which
holds the laws.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

import boostax
from boostax.inspect.audit import Audit

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
    "group_loss_scale": lambda: boostax.group_loss_scale(adam(), labels(LEAVES)),
}


def devices_of(target: str | None) -> tuple[Any, ...]:
    """Of a target, or those at hand."""
    return tuple(jax.devices()) if target is None else boostax.target_devices(target)


def on_one_chip(
    tx: optax.GradientTransformation, target: str | None, pure: bool = False, params: Any = None
) -> Audit:
    """The optimizer's part of a step: gradients given, params and state donated."""
    params = LEAVES if params is None else params
    tx = optax.with_extra_args_support(tx)

    def applied(params, state, grads):
        return boostax.apply_gradients(tx, grads, state, params)

    def updated(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    chip = SingleDeviceSharding(devices_of(target)[0])
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chip)  # noqa: E731
    given = jax.tree.map(place, (params, jax.eval_shape(tx.init, params), params))
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


def decoder(layers: int, width: int, vocab: int, heads: int, length: int) -> Model:
    """A decoder whose layers are stacked and scanned, as large models are written; bf16, remat."""
    square, hidden = (width, width), 4 * width
    block = {"norm1": (width,), "norm2": (width,), "q": square, "k": square, "v": square}
    block |= {"o": square, "up": (width, hidden), "down": (hidden, width)}
    typed = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    stack = {name: typed((layers, *shape)) for name, shape in block.items()}
    params = {"embed": typed((vocab, width)), "layers": stack, "norm": typed((width,))}
    params["head"] = typed((width, vocab))

    def normed(x, weight):
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * weight).astype(
            x.dtype
        )

    def layer(x, weights):
        low = {name: w.astype(x.dtype) for name, w in weights.items()}
        y = normed(x, weights["norm1"])
        split = lambda z: z.reshape(*z.shape[:2], heads, width // heads)  # noqa: E731
        q, k, v = (split(y @ low[name]) for name in "qkv")
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.reshape(x.shape) @ low["o"]
        y = normed(x, weights["norm2"])
        return x + jax.nn.gelu(y @ low["up"]) @ low["down"], None

    def loss(params, batch):
        table = params["embed"].astype(jnp.bfloat16)
        x, _ = lax.scan(jax.checkpoint(layer), table[batch[:, :-1]], params["layers"])
        logits = (normed(x, params["norm"]) @ params["head"].astype(x.dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    return Model(params, loss, lambda rows: jax.ShapeDtypeStruct((rows, length + 1), jnp.int32))


def mesh_of(target: str | None, shape=None, names=(AXIS,)) -> Mesh:
    """A mesh over all devices of a target."""
    devices = np.array(devices_of(target))
    shape = (len(devices),) if shape is None else shape
    return Mesh(devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def trained(
    model: Model,
    tx: optax.GradientTransformation,
    target: str | None,
    rows: int = 8,
    depth: int | None = None,
    mesh: Mesh | None = None,
    calls: int = 1,
    **options: Any,
) -> Audit:
    """A train step over all devices of a target."""
    mesh = mesh_of(target) if mesh is None else mesh
    step = boostax.make_train_step(model.loss, tx, mesh=mesh, axis_name=mesh.axis_names, **options)
    batch = model.batch(rows * mesh.size * options.get("microbatches", 1))
    state = step.init(model.params)
    return boostax.audit(step, state, batch, target=target, depth=depth, calls=calls)


def mean(**options):
    return optax.chain(boostax.all_reduce(AXIS, **options), adam())


def leaf_by_leaf():
    """The peer: ``lax.pmean`` of each leaf."""
    reduce = lambda g, _: jax.tree.map(lambda x: lax.pmean(x, AXIS), g)  # noqa: E731
    return optax.chain(optax.stateless(reduce), adam())
