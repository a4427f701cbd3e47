"""Train steps of public JAX repositories, told again in few lines, for `boostax.audit` to read.

Each builder keeps the form of one public train step: the order in which it differentiates,
accumulates, reduces, clips, updates and selects, what it donates, and how it shards. The models
are small ones of this file; `Size` makes them as large as a caller wishes. No array is made:
a builder takes a mesh, whose devices need not exist, and returns

    (jitted, args, params)

`jitted.lower(*args).compile()` gives the program. `args` are shapes with shardings. `params`
holds the shapes of the parameters whose gradients the step reduces. A builder arranges the
devices of the mesh anew, under the axis names of its source.

The docstring of each says where it comes from, and what a reader found in the compiled programs
by hand: N is the number of elements of `params`, K the number of micro-batches,
L the number of layers and n the number of devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import dynamic_scale, train_state
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Tree = Any
Built = tuple[Any, tuple[Any, ...], Tree]


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a model and a batch are; `rows` counts sequences of a device and micro-batch."""

    layers: int = 2
    width: int = 128
    hidden: int = 512
    vocab: int = 1024
    heads: int = 4
    length: int = 32
    rows: int = 2
    micro: int = 4


TINY = Size()


# --- what the builders share -----------------------------------------------------------------


def _arranged(mesh, shape, names):
    """Arranges the devices of a mesh under other axis names."""
    devices = mesh.devices.reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def _typed(tree, shardings):
    """Gives each shape of a tree its sharding; one sharding stands for all leaves."""
    if isinstance(shardings, NamedSharding):
        one = shardings
        shardings = jax.tree.map(lambda _: one, tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def _decoder_shapes(size, dtype=jnp.float32):
    """Returns the shapes of a decoder whose layers are stacked along the first dimension."""
    count, wide, tall = size.layers, size.width, size.hidden
    shapes = {
        "embed": (size.vocab, wide),
        "layers": {
            "norm_in": (count, wide),
            "qkv": (count, wide, 3 * wide),
            "out": (count, wide, wide),
            "norm_mlp": (count, wide),
            "up": (count, wide, tall),
            "down": (count, tall, wide),
        },
        "norm": (wide,),
        "head": (wide, size.vocab),
    }
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, dtype), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )


def _norm(x, scale):
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def _block(x, layer, heads, dtype):
    """Applies attention and a two-matrix MLP to `x` of shape (..., length, width)."""
    split = (*x.shape[:-1], heads, x.shape[-1] // heads)
    each = jnp.split(_norm(x, layer["norm_in"]) @ layer["qkv"].astype(dtype), 3, axis=-1)
    query, key, value = (y.reshape(split) for y in each)
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key).astype(jnp.float32)
    seen = jnp.tril(jnp.ones((x.shape[-2], x.shape[-2]), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores / math.sqrt(split[-1]), -1e30)).astype(dtype)
    mixed = jnp.einsum("...hqk,...khd->...qhd", weights, value).reshape(x.shape)
    x = x + mixed @ layer["out"].astype(dtype)
    y = _norm(x, layer["norm_mlp"])
    return x + jax.nn.gelu(y @ layer["up"].astype(dtype)) @ layer["down"].astype(dtype)


def _trunk(layers, x, heads, dtype, constrain=lambda x: x):
    """Scans over the stacked layers and recomputes each in the backward pass."""

    @jax.checkpoint
    def layer_of(x, layer):
        return constrain(_block(x, layer, heads, dtype)), None

    return lax.scan(layer_of, constrain(x), layers)[0]


def _logits(params, tokens, heads, dtype, constrain=lambda x: x):
    x = params["embed"].astype(dtype)[tokens]
    x = _norm(_trunk(params["layers"], x, heads, dtype, constrain), params["norm"])
    return (x @ params["head"].astype(dtype)).astype(jnp.float32)


def _moments_like(tx, params, shardings, rest):
    """Returns shardings of an optimizer state: a moment's is its parameter's, `rest` elsewhere."""
    return optax.tree_utils.tree_map_params(
        tx,
        lambda _, sharding: sharding,
        jax.eval_shape(tx.init, params),
        shardings,
        transform_non_params=lambda _: rest,
    )


# --- MaxText -----------------------------------------------------------------------------------


def maxtext_accumulation(mesh, size=TINY):
    """MaxText: scan over micro-batches in plain jit, FSDP parameters in the carry of the scan.

    The loss of a micro-batch is a sum over tokens, so that one division by the number of
    tokens follows the scan. Clipping, AdamW and three norms for the log come after it. The jit
    names the shardings of the state on both sides and donates the state.

    Found in it: Gradient reduced K times: 3.2 N where 0.8 N suffice; layers inside two loops (K
    x L executions), head inside one (K). CPU all-reduce f32, H100 reduce-scatter bf16, v5e
    all-reduce and slice in one fusion, bf16. Weights gathered in each micro-batch though the
    scan does not change them: 5.0 N on CPU, 5.6 N on H100, 6.2 N on v5e, whose backward pass
    gathers qkv twice. No donation missing: 29 buffers aliased. At a width of 2048 v5e holds no
    reduction of a gradient by name: loops of collective-permute, `windowed_dot_general`, stand for
    it.

    Source: AI-Hypercomputer/maxtext@e591f30cbbf217ed67ef71263ec0538239f9c3b8:
    src/maxtext/utils/gradient_accumulation.py#L27-L194
    src/maxtext/trainers/pre_train/train.py#L422-L725
    src/maxtext/utils/maxtext_utils.py#L95-L108
    """
    mesh = _arranged(mesh, (1, mesh.size), ("data", "fsdp"))
    rows = ("data", "fsdp")
    place = functools.partial(NamedSharding, mesh)
    params = _decoder_shapes(size)
    # Its rules lay "embed", the width of the model, over the axis fsdp, in every matrix.
    shardings = {
        "embed": place(P(None, "fsdp")),
        "layers": {
            "norm_in": place(P()),
            "qkv": place(P(None, "fsdp", None)),
            "out": place(P(None, None, "fsdp")),
            "norm_mlp": place(P()),
            "up": place(P(None, "fsdp", None)),
            "down": place(P(None, None, "fsdp")),
        },
        "norm": place(P()),
        "head": place(P("fsdp", None)),
    }
    tx = optax.adamw(1e-3, b2=0.95)
    clip = optax.clip_by_global_norm(1.0)

    def constrain(x):
        return lax.with_sharding_constraint(x, place(P(rows, None, None)))

    def placed(tree):
        return jax.tree.map(lax.with_sharding_constraint, tree, shardings)

    def loss_fn(params, batch):
        logits = _logits(params, batch["inputs"], size.heads, jnp.bfloat16, constrain)
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        real = batch["segments"] != 0
        total = jnp.sum(entropy * real)
        return total, {"total": total, "tokens": jnp.sum(real)}

    def accumulated(params, batch):
        def in_turn(x):
            parts = x.reshape(x.shape[0] // size.micro, size.micro, *x.shape[1:])
            return jnp.swapaxes(parts, 0, 1)

        def one(carry, batch):
            (_, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(carry["params"], batch)
            carry = {
                "params": carry["params"],
                "grads": jax.tree.map(jnp.add, grads, carry["grads"]),
                "total": carry["total"] + aux["total"],
                "tokens": carry["tokens"] + aux["tokens"],
            }
            return carry, aux

        params = placed(params)
        start = {
            "params": params,
            "grads": placed(jax.tree.map(jnp.zeros_like, params)),
            "total": jnp.zeros(()),
            "tokens": jnp.zeros((), jnp.int32),
        }
        end, _ = lax.scan(one, start, jax.tree.map(in_turn, batch))
        tokens = jnp.maximum(end["tokens"], 1)
        some = end["tokens"] > 0
        grads = jax.tree.map(
            lambda g: jnp.where(some, g / tokens, jnp.zeros_like(g)), placed(end["grads"])
        )
        return jnp.where(some, end["total"] / tokens, 0.0), grads

    def train_step(state, batch):
        loss, raw = accumulated(state["params"], batch)
        grads, _ = clip.update(raw, clip.init(state["params"]))
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "raw_grad_norm": optax.tree.norm(raw),
            "param_norm": optax.tree.norm(params),
        }
        return {"step": state["step"] + 1, "params": params, "opt_state": opt_state}, metrics

    state = {
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "params": params,
        "opt_state": jax.eval_shape(tx.init, params),
    }
    state_shardings = {
        "step": place(P()),
        "params": shardings,
        "opt_state": _moments_like(tx, params, shardings, place(P())),
    }
    tokens = jax.ShapeDtypeStruct((size.micro * size.rows * mesh.size, size.length), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens, "segments": tokens}
    by_rows = place(P(rows))
    jitted = jax.jit(
        train_step,
        in_shardings=(state_shardings, by_rows),
        out_shardings=(state_shardings, None),
        donate_argnums=0,
    )
    return jitted, (_typed(state, state_shardings), _typed(batch, by_rows)), params


# --- midGPT ------------------------------------------------------------------------------------


def midgpt_accumulation(mesh, size=TINY):
    """MidGPT: a bf16 copy of replicated f32 parameters, made once, and a scan that sums in f32.

    The gradient of each micro-batch is constrained to the placement of the parameters inside
    the scan. The jit names no shardings and donates every array, tokens and key too. One
    decoder takes one sequence; `vmap` takes the rows.

    Found in it: Gradient reduced K times on CPU: 4.0 N, f32. H100 and v5e move head and
    embedding out of the scan by themselves (0.4 N, once; bf16 on H100, f32 on v5e) and leave
    the layers in both loops (2.4 N bf16): 2.8 N where 1.0 N suffices. Parameters and optimizer
    state aliased, 3.0 P; inputs and targets donated in vain (buffer_donor, no result of their
    shape); the key is no argument of the program. v5e: every reduction synchronous.

    Source: AllanYangZhou/midGPT@482be37b02f6b2a9116d09c081e427e17a507d91:
    src/train.py#L69-L97
    src/model.py#L140-L178
    src/configs/openwebtext.py
    """
    mesh = _arranged(mesh, (1, mesh.size), ("replica", "data"))
    place = functools.partial(NamedSharding, mesh)
    params = _decoder_shapes(size)

    shardings = jax.tree.map(lambda x: place(P(*(None,) * x.ndim)), params)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.95),
        optax.add_decayed_weights(0.1),
        optax.scale_by_schedule(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 1000)),
        optax.scale(-1.0),
    )

    def loss_fn(params, inputs, targets):
        logits = jax.vmap(lambda row: _logits(params, row, size.heads, jnp.bfloat16))(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(params, opt_state, inputs, targets, key):
        low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

        def one(total, batch):
            inputs, targets, _ = batch  # the key of dropout, whose rate is 0
            loss, grads = jax.value_and_grad(loss_fn)(low, inputs, targets)
            grads = jax.tree.map(lax.with_sharding_constraint, grads, shardings)
            return jax.tree.map(jnp.add, grads, total), loss

        keys = jax.random.split(key, size.micro)
        zeros = jax.tree.map(jnp.zeros_like, params)
        total, losses = lax.scan(one, zeros, (inputs, targets, keys))
        grads = jax.tree.map(lambda g: g / size.micro, total)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses.mean()

    opt_state = _typed(
        jax.eval_shape(tx.init, params), _moments_like(tx, params, shardings, place(P()))
    )
    tokens = jax.ShapeDtypeStruct(
        (size.micro, size.rows * mesh.size, size.length),
        jnp.int32,
        sharding=place(P(None, ("replica", "data"), None)),
    )
    key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=place(P()))
    jitted = jax.jit(step, donate_argnums=(0, 1, 2, 3, 4))
    return jitted, (_typed(params, shardings), opt_state, tokens, tokens, key), params


# --- Flax, the ImageNet example ---------------------------------------------------------------


class _Normed(nn.Module):
    """Residual layers with batch statistics that are means over the mapped axis."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(
            nn.BatchNorm, False, momentum=0.9, dtype=self.dtype, axis_name="batch"
        )
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        x = dense(self.size.width, use_bias=False)(x)
        for _ in range(self.size.layers):
            y = nn.relu(norm()(dense(self.size.hidden, use_bias=False)(x)))
            y = norm()(dense(self.size.width, use_bias=False)(y))
            x = nn.relu(x + y)
        return dense(self.size.vocab)(x)


class _ScaledState(train_state.TrainState):
    batch_stats: Any
    dynamic_scale: dynamic_scale.DynamicScale


def flax_dynamic_scale(mesh, size=TINY):
    """Flax, ImageNet: pmap, `DynamicScale`, momentum SGD, then a select over the whole state.

    `DynamicScale` divides the gradients by the scale in f32, takes their mean over the axis
    and only then asks whether they are finite. The update is computed for each step and the
    old state chosen leaf by leaf where it must not count. The state is replicated by
    `in_axes=None` and nothing is donated. Batch statistics are means over the axis already in
    the layers, and the step takes their mean over the axis once more.

    Found in it: Nothing aliased: parameters, momentum and statistics, 2.0 P, exist twice.
    Gradient reduced once, 1.0 N in f32 for an f16 backward pass, on steps that are skipped too.
    Update computed and old state chosen leaf by leaf: selects over 2 P, no conditional. Means
    of batch statistics that are equal on all devices already (8 leaves of 0.006 N in all)
    travel in the same all-reduce. No loop, no gather.

    Source: google/flax@18f8f311c275d57f46d95e41b15aa97b454754c0:
    examples/imagenet/train.py#L112-L171
    examples/imagenet/train.py#L360-L365
    flax/training/dynamic_scale.py#L117-L163
    """
    devices = list(mesh.devices.flat)
    model = _Normed(size, jnp.float16)
    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)

    def make():
        module = _Normed(size, jnp.float16)
        local = jnp.zeros((1, 1, size.width), jnp.float16)
        made = jax.vmap(
            lambda x: module.init(jax.random.key(0), x), axis_name="batch", out_axes=None
        )(local)
        return _ScaledState.create(
            apply_fn=model.apply,
            params=made["params"],
            tx=tx,
            batch_stats=made["batch_stats"],
            dynamic_scale=dynamic_scale.DynamicScale(),
        )

    def entropy(logits, labels):
        known = jax.nn.one_hot(labels, size.vocab)
        return optax.softmax_cross_entropy(logits, known).mean()

    def train_step(state, batch):
        def loss_fn(params):
            logits, changed = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"],
                mutable=["batch_stats"],
            )
            decay = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
            return entropy(logits, batch["label"]) + 0.5e-4 * decay, (changed, logits)

        scaled = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True, axis_name="batch")
        scale, finite, (_, (changed, logits)), grads = scaled(state.params)
        metrics = lax.pmean(
            {
                "loss": entropy(logits, batch["label"]),
                "accuracy": jnp.mean(jnp.argmax(logits, -1) == batch["label"]),
            },
            "batch",
        )
        new = state.apply_gradients(
            grads=grads, batch_stats=lax.pmean(changed["batch_stats"], "batch")
        )
        choose = functools.partial(jnp.where, finite)
        new = new.replace(
            opt_state=jax.tree.map(choose, new.opt_state, state.opt_state),
            params=jax.tree.map(choose, new.params, state.params),
            dynamic_scale=scale,
        )
        return new, metrics | {"scale": scale.scale}

    state = jax.eval_shape(make)
    images = jax.ShapeDtypeStruct((len(devices), size.rows * size.length, size.width), jnp.float16)
    labels = jax.ShapeDtypeStruct(images.shape[:2], jnp.int32)
    jitted = jax.pmap(
        train_step, axis_name="batch", in_axes=(None, 0), out_axes=(None, 0), devices=devices
    )
    return jitted, (state, {"image": images, "label": labels}), state.params


# --- Tunix -------------------------------------------------------------------------------------


class _Network(nnx.Module):
    """The decoder as an `nnx` module."""

    def __init__(self, size, dtype, rows):
        self.size, self.rows = size, rows
        shapes = _decoder_shapes(size, dtype)
        layers = shapes.pop("layers")
        zeros = functools.partial(jax.tree.map, lambda x: nnx.Param(jnp.zeros(x.shape, x.dtype)))
        self.outer = nnx.data(zeros(shapes))
        self.layers = nnx.data(zeros(layers))

    def __call__(self, tokens):
        layers = {name: x[...] for name, x in self.layers.items()}
        params = {name: x[...] for name, x in self.outer.items()} | {"layers": layers}
        return _logits(params, tokens, self.size.heads, jnp.bfloat16, self._by_rows)

    def _by_rows(self, x):
        return lax.with_sharding_constraint(x, self.rows)


class _Sums(nnx.Module):
    """Sums of gradients in f32 and how many were added."""

    def __init__(self, model):
        state = nnx.state(model, nnx.Param)
        self.total = nnx.data(jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), state))
        self.count = nnx.Variable(jnp.zeros((), jnp.float32))


def _is_variable(x):
    return isinstance(x, nnx.Variable)


def tunix_micro_step(mesh, size=TINY):
    """Tunix: one call a micro-batch; sums of gradients among the arguments; a cond updates.

    Model, optimizer and sums are `nnx` modules and the jit is `nnx.jit`, which returns the
    state of each. It donates optimizer and sums, but not the model. A flag among the arguments
    says whether this call updates. Parameters are bf16 and FSDP. Activations carry the
    sharding of the rows, as in the source: without it the compiler lays them along the axis of the
    parameters and reduces activations.

    Found in it: Model not donated but returned: its 9 bf16 leaves exist twice (0.125 of all
    bf16 parameters on each device) and are copied by calls that do not update. Gradient reduced
    in each call (0.8 N) outside the conditional that alone reads the sums: K x 0.8 N an update.
    H100 holds no conditional: Adam and its selects run in each call. CPU and v5e keep the
    conditional.

    Source: google/tunix@c7d8950f12a9c55a976bf2e1a0d8b447d71c20b3:
    tunix/sft/peft_trainer.py#L201-L318
    tunix/sft/peft_trainer.py#L493-L609
    tunix/sft/peft_trainer.py#L679-L721
    """
    mesh = _arranged(mesh, (mesh.size, 1), ("fsdp", "tp"))
    place = functools.partial(NamedSharding, mesh)
    tx = optax.adamw(1e-5)

    def make():
        model = _Network(size, jnp.bfloat16, place(P("fsdp", None, None)))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param), _Sums(model)

    def mean_loss(model, tokens, targets):
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()

    def train_step(model, optimizer, sums, tokens, targets, update_now):
        loss, grads = nnx.value_and_grad(mean_loss)(model, tokens, targets)
        jax.tree.map(
            lambda total, g: total.set_value(total[...] + g[...]),
            sums.total,
            grads,
            is_leaf=_is_variable,
        )
        sums.count.set_value(sums.count[...] + 1.0)

        def update(model, optimizer, sums):
            part = 1.0 / sums.count[...]
            grads = jax.tree.map(
                lambda total, x: type(total)((total[...] * part).astype(x.dtype)),
                sums.total,
                nnx.state(model, nnx.Param),
                is_leaf=_is_variable,
            )
            norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
            optimizer.update(model, grads)
            jax.tree.map(
                lambda total: total.set_value(jnp.zeros_like(total[...])),
                sums.total,
                is_leaf=_is_variable,
            )
            sums.count.set_value(jnp.zeros_like(sums.count[...]))
            return norm

        def keep(model, optimizer, sums):
            return jnp.zeros((), jnp.float32)

        update_now = lax.with_sharding_constraint(update_now, place(P()))
        norm = nnx.cond(update_now, update, keep, model, optimizer, sums)
        return loss, norm

    def sharding_of(path, x):
        if len(x.shape) < 2 or "norm" in jax.tree_util.keystr(path):
            return place(P())
        wide = [*(i for i, d in enumerate(x.shape) if d == size.width), len(x.shape) - 1]
        return place(P(*("fsdp" if j == wide[0] else None for j in range(len(x.shape)))))

    graph, state = nnx.split(nnx.eval_shape(make))
    state = _typed(state, jax.tree_util.tree_map_with_path(sharding_of, state))
    model, optimizer, sums = nnx.merge(graph, state)
    tokens = jax.ShapeDtypeStruct(
        (size.rows * mesh.size, size.length), jnp.int32, sharding=place(P("fsdp"))
    )
    flag = jax.ShapeDtypeStruct((), jnp.bool_, sharding=place(P()))
    jitted = nnx.jit(train_step, donate_argnames=("optimizer", "sums"))
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        nnx.to_pure_dict(nnx.state(model, nnx.Param)),
    )
    return jitted, (model, optimizer, sums, tokens, tokens, flag), params


# --- the table ---------------------------------------------------------------------------------
#
# Figures are of TINY on 8 devices: executions x elements over N, a reduction by its operand, an
# all-gather by its result, trip counts multiplied out. CPU widens each bf16 reduction to f32
# (`to_apply=..._promoted`), which is no fault of a step. One gradient is 0.8 N where the table
# of tokens is split along the width: the rows' gradients then travel by all-to-all.

STEPS: dict[str, Callable[[Mesh], Built]] = {
    "maxtext": maxtext_accumulation,
    "midgpt": midgpt_accumulation,
    "flax": flax_dynamic_scale,
    "tunix": tunix_micro_step,
}
