"""Train steps of public JAX repositories, told again in few lines, for `boostax.audit` to read.

Each builder keeps the form of one public train step: the order in which it differentiates,
accumulates, reduces, clips, updates and selects, what it donates, and how it shards. The models
are small ones of this file. No array is made:
a builder takes a mesh, whose devices need not exist, and returns

    (jitted, args, params)

`jitted.lower(*args).compile()` gives the program. `args` are shapes with shardings. `params`
holds the shapes of the parameters whose gradients the step reduces. A builder arranges the
devices of the mesh anew, under the axis names of its source.

The docstring of each says where it comes from, and what a reader found in the compiled programs
by hand: N is the number of elements of `params`, K the number of micro-batches,
L the number of layers and n the number of devices.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import dynamic_scale, train_state
from jax import NamedSharding, P, lax
from jax.sharding import AxisType, Mesh

LAYERS, WIDTH, HIDDEN, VOCAB, HEADS, LENGTH, MICRO = 2, 128, 512, 1024, 4, 32, 4
ROWS = 2  # sequences of a device and micro-batch


# --- what the builders share -----------------------------------------------------------------


def _arranged(mesh, shape, names):
    """Arranges the devices of a mesh under other axis names."""
    return Mesh(mesh.devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def _typed(tree, shardings):
    """Gives each shape of a tree its sharding; one sharding stands for all leaves."""
    typed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda x: typed(x, shardings), tree)
    return jax.tree.map(typed, tree, shardings)


def _decoder_shapes(dtype=jnp.float32):
    """Returns the shapes of a decoder whose layers are stacked along the first dimension."""
    typed = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    layers = {name: typed(LAYERS, WIDTH) for name in ("norm_in", "norm_mlp")}
    layers |= {"qkv": typed(LAYERS, WIDTH, 3 * WIDTH), "out": typed(LAYERS, WIDTH, WIDTH)}
    layers |= {"up": typed(LAYERS, WIDTH, HIDDEN), "down": typed(LAYERS, HIDDEN, WIDTH)}
    ends = {"embed": typed(VOCAB, WIDTH), "norm": typed(WIDTH), "head": typed(WIDTH, VOCAB)}
    return {"layers": layers, **ends}


def _fsdp(mesh, params, which):
    """Lays matrices over the axis fsdp along one of the dimensions that are as wide as the model.

    `which` counts those of a matrix that has several.
    """

    def sharding_of(path, x):
        if x.ndim < 2 or "norm" in jax.tree_util.keystr(path):
            return NamedSharding(mesh, P())
        dim = [i for i, size in enumerate(x.shape) if size == WIDTH][which]
        return NamedSharding(mesh, P(*("fsdp" if i == dim else None for i in range(x.ndim))))

    return jax.tree_util.tree_map_with_path(sharding_of, params)


def _norm(x, scale):
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def _block(x, layer):
    """Applies attention and a two-matrix MLP to `x` of shape (..., length, width)."""
    split, dtype = (*x.shape[:-1], HEADS, WIDTH // HEADS), x.dtype
    each = jnp.split(_norm(x, layer["norm_in"]) @ layer["qkv"].astype(dtype), 3, axis=-1)
    query, key, value = (y.reshape(split) for y in each)
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key).astype(jnp.float32)
    seen = jnp.tril(jnp.ones((x.shape[-2], x.shape[-2]), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores / math.sqrt(split[-1]), -1e30)).astype(dtype)
    mixed = jnp.einsum("...hqk,...khd->...qhd", weights, value).reshape(x.shape)
    x = x + mixed @ layer["out"].astype(dtype)
    y = _norm(x, layer["norm_mlp"])
    return x + jax.nn.gelu(y @ layer["up"].astype(dtype)) @ layer["down"].astype(dtype)


def _entropy(params, tokens, targets, constrain=lambda x: x):
    """Computes in bf16, scans over the stacked layers and recomputes each in the backward pass."""
    layer_of = jax.checkpoint(lambda x, layer: (constrain(_block(x, layer)), None))
    x = constrain(params["embed"].astype(jnp.bfloat16)[tokens])
    x = _norm(lax.scan(layer_of, x, params["layers"])[0], params["norm"])
    logits = (x @ params["head"].astype(x.dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def _moments_like(tx, params, shardings, rest):
    """Returns shardings of an optimizer state: a moment's is its parameter's, `rest` elsewhere."""
    state, like = jax.eval_shape(tx.init, params), lambda _, sharding: sharding
    alone = {"transform_non_params": lambda _: rest}
    return optax.tree_utils.tree_map_params(tx, like, state, shardings, **alone)


# --- MaxText -----------------------------------------------------------------------------------


def maxtext_accumulation(mesh):
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
    place, rows = functools.partial(NamedSharding, mesh), ("data", "fsdp")
    params = _decoder_shapes()
    # Its rules lay "embed", the width of the model, over the axis fsdp, in every matrix.
    shardings = _fsdp(mesh, params, -1)
    tx, clip = optax.adamw(1e-3, b2=0.95), optax.clip_by_global_norm(1.0)

    def constrain(x):
        return lax.with_sharding_constraint(x, place(P(rows, None, None)))

    def placed(tree):
        return jax.tree.map(lax.with_sharding_constraint, tree, shardings)

    def loss_fn(params, batch):
        real = batch["segments"] != 0
        total = jnp.sum(_entropy(params, batch["inputs"], batch["targets"], constrain) * real)
        return total, (total, jnp.sum(real))

    def accumulated(params, batch):
        def in_turn(x):
            return jnp.swapaxes(x.reshape(x.shape[0] // MICRO, MICRO, *x.shape[1:]), 0, 1)

        def one(carry, batch):
            params, *sums = carry
            (_, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
            return (params, *jax.tree.map(jnp.add, (grads, *aux), tuple(sums))), aux

        params = placed(params)
        zeros = placed(jax.tree.map(jnp.zeros_like, params))
        start = (params, zeros, jnp.zeros(()), jnp.zeros((), jnp.int32))
        (_, sums, total, count), _ = lax.scan(one, start, jax.tree.map(in_turn, batch))
        tokens, some = jnp.maximum(count, 1), count > 0
        mean = lambda g: jnp.where(some, g / tokens, jnp.zeros_like(g))  # noqa: E731
        return jnp.where(some, total / tokens, 0.0), jax.tree.map(mean, placed(sums))

    def train_step(state, batch):
        params, opt_state, count = state
        loss, raw = accumulated(params, batch)
        grads, _ = clip.update(raw, clip.init(params))
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, count + 1), (loss, *map(optax.tree.norm, (grads, raw, params)))

    state = (params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((), jnp.int32))
    placement = (shardings, _moments_like(tx, params, shardings, place(P())), place(P()))
    tokens = jax.ShapeDtypeStruct((MICRO * ROWS * mesh.size, LENGTH), jnp.int32)
    batch = dict.fromkeys(("inputs", "targets", "segments"), tokens)
    by_rows = place(P(rows))
    how = {"in_shardings": (placement, by_rows), "out_shardings": (placement, None)}
    jitted = jax.jit(train_step, **how, donate_argnums=0)
    return jitted, (_typed(state, placement), _typed(batch, by_rows)), params


# --- midGPT ------------------------------------------------------------------------------------


def midgpt_accumulation(mesh):
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
    params = _decoder_shapes()
    shardings = jax.tree.map(lambda x: place(P(*(None,) * x.ndim)), params)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.95),
        optax.add_decayed_weights(0.1),
        optax.scale_by_schedule(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 1000)),
        optax.scale(-1.0),
    )

    def loss_fn(params, inputs, targets):
        return jax.vmap(functools.partial(_entropy, params))(inputs, targets).mean()

    def step(params, opt_state, inputs, targets, key):
        low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

        def one(total, batch):
            inputs, targets, _ = batch  # the key of dropout, whose rate is 0
            loss, grads = jax.value_and_grad(loss_fn)(low, inputs, targets)
            grads = jax.tree.map(lax.with_sharding_constraint, grads, shardings)
            return jax.tree.map(jnp.add, grads, total), loss

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, losses = lax.scan(one, zeros, (inputs, targets, jax.random.split(key, MICRO)))
        grads = jax.tree.map(lambda g: g / MICRO, total)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses.mean()

    moments = _moments_like(tx, params, shardings, place(P()))
    opt_state = _typed(jax.eval_shape(tx.init, params), moments)
    tokens = jax.ShapeDtypeStruct((MICRO, ROWS * mesh.size, LENGTH), jnp.int32)
    tokens = _typed(tokens, place(P(None, ("replica", "data"), None)))
    key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=place(P()))
    jitted = jax.jit(step, donate_argnums=(0, 1, 2, 3, 4))
    return jitted, (_typed(params, shardings), opt_state, tokens, tokens, key), params


# --- Flax, the ImageNet example ---------------------------------------------------------------


class _Normed(nn.Module):
    """Residual layers with batch statistics that are means over the mapped axis."""

    @nn.compact
    def __call__(self, x):
        low = {"dtype": jnp.float16}
        norm = functools.partial(nn.BatchNorm, False, momentum=0.9, axis_name="batch", **low)
        dense = functools.partial(nn.Dense, **low)
        x = dense(WIDTH, use_bias=False)(x)
        for _ in range(LAYERS):
            y = nn.relu(norm()(dense(HIDDEN, use_bias=False)(x)))
            y = norm()(dense(WIDTH, use_bias=False)(y))
            x = nn.relu(x + y)
        return dense(VOCAB)(x)


class _ScaledState(train_state.TrainState):
    batch_stats: Any
    dynamic_scale: dynamic_scale.DynamicScale


def flax_dynamic_scale(mesh):
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
    devices, model = list(mesh.devices.flat), _Normed()
    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)

    def make():
        init = jax.vmap(model.init, in_axes=(None, 0), out_axes=None, axis_name="batch")
        made = init(jax.random.key(0), jnp.zeros((1, 1, WIDTH), jnp.float16))
        scale = dynamic_scale.DynamicScale()
        return _ScaledState.create(apply_fn=model.apply, tx=tx, dynamic_scale=scale, **made)

    def entropy(logits, labels):
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, VOCAB)).mean()

    def train_step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
            decay = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
            return entropy(logits, batch["label"]) + 0.5e-4 * decay, (changed, logits)

        scaled = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True, axis_name="batch")
        scale, finite, (_, (changed, logits)), grads = scaled(state.params)
        right = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        metrics = lax.pmean({"loss": entropy(logits, batch["label"]), "right": right}, "batch")
        new = state.apply_gradients(grads=grads, **lax.pmean(changed, "batch"))
        choose = functools.partial(jax.tree.map, functools.partial(jnp.where, finite))
        params, opt_state = choose((new.params, new.opt_state), (state.params, state.opt_state))
        new = new.replace(params=params, opt_state=opt_state, dynamic_scale=scale)
        return new, metrics | {"scale": scale.scale}

    state = jax.eval_shape(make)
    images = jax.ShapeDtypeStruct((len(devices), ROWS * LENGTH, WIDTH), jnp.float16)
    labels = jax.ShapeDtypeStruct(images.shape[:2], jnp.int32)
    axes = {"in_axes": (None, 0), "out_axes": (None, 0)}
    jitted = jax.pmap(train_step, axis_name="batch", devices=devices, **axes)
    return jitted, (state, {"image": images, "label": labels}), state.params


# --- Tunix -------------------------------------------------------------------------------------


_on_variables = functools.partial(jax.tree.map, is_leaf=lambda x: isinstance(x, nnx.Variable))


class _Network(nnx.Module):
    """The decoder as an `nnx` module."""

    def __init__(self, rows):
        self.rows = rows
        zeros = lambda x: nnx.Param(jnp.zeros(x.shape, x.dtype))  # noqa: E731
        self.params = nnx.data(jax.tree.map(zeros, _decoder_shapes(jnp.bfloat16)))

    def __call__(self, tokens, targets):
        by_rows = lambda x: lax.with_sharding_constraint(x, self.rows)  # noqa: E731
        return _entropy(_on_variables(lambda x: x[...], self.params), tokens, targets, by_rows)


class _Sums(nnx.Module):
    """Sums of gradients in f32 and how many were added."""

    def __init__(self, model):
        state = nnx.state(model, nnx.Param)
        self.total = nnx.data(jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), state))
        self.count = nnx.Variable(jnp.zeros((), jnp.float32))


def tunix_micro_step(mesh):
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

    def make():
        model = _Network(place(P("fsdp", None, None)))
        return model, nnx.Optimizer(model, optax.adamw(1e-5), wrt=nnx.Param), _Sums(model)

    def train_step(model, optimizer, sums, tokens, targets, update_now):
        loss, grads = nnx.value_and_grad(lambda model: model(tokens, targets).mean())(model)
        _on_variables(lambda total, g: total.set_value(total[...] + g[...]), sums.total, grads)
        sums.count.set_value(sums.count[...] + 1.0)

        def update(model, optimizer, sums):
            part = 1.0 / sums.count[...]
            mean = lambda total, x: type(total)((total[...] * part).astype(x.dtype))  # noqa: E731
            grads = _on_variables(mean, sums.total, nnx.state(model, nnx.Param))
            norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
            optimizer.update(model, grads)
            _on_variables(lambda total: total.set_value(jnp.zeros_like(total[...])), sums.total)
            sums.count.set_value(jnp.zeros_like(sums.count[...]))
            return norm

        def keep(model, optimizer, sums):
            return jnp.zeros((), jnp.float32)

        update_now = lax.with_sharding_constraint(update_now, place(P()))
        norm = nnx.cond(update_now, update, keep, model, optimizer, sums)
        return loss, norm

    graph, state = nnx.split(nnx.eval_shape(make))
    model, optimizer, sums = nnx.merge(graph, _typed(state, _fsdp(mesh, state, 0)))
    tokens = jax.ShapeDtypeStruct((ROWS * mesh.size, LENGTH), jnp.int32, sharding=place(P("fsdp")))
    flag = jax.ShapeDtypeStruct((), jnp.bool_, sharding=place(P()))
    jitted = nnx.jit(train_step, donate_argnames=("optimizer", "sums"))
    return jitted, (model, optimizer, sums, tokens, tokens, flag), _decoder_shapes(jnp.bfloat16)


# --- the table ---------------------------------------------------------------------------------
#
# Figures are of 8 devices: executions x elements over N, a reduction by its operand, an
# all-gather by its result, trip counts multiplied out. CPU widens each bf16 reduction to f32
# (`to_apply=..._promoted`), which is no fault of a step. One gradient is 0.8 N where the table
# of tokens is split along the width: the rows' gradients then travel by all-to-all.

STEPS = {"maxtext": maxtext_accumulation, "midgpt": midgpt_accumulation}
STEPS |= {"flax": flax_dynamic_scale, "tunix": tunix_micro_step}
