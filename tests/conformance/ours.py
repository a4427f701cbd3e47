"""Trains programs with boostax, by the dictionary that MindSpore was given."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from mindspore_runs import ABOUT, arrays, as_flax, at, farthest, place, split
from peers import programs as specs

from boostax.config import mindspore
from boostax.config.auto import auto
from boostax.precision import scale_boundary

FACTORIES = {"SGD": "sgd", "Momentum": "momentum", "Adam": "adam"}
NORM = {"epsilon": 1e-5, "use_fast_variance": False}


def batch_norm(x, name):
    return nn.BatchNorm(use_running_average=False, name=name, **NORM)(x)


class Block(nn.Module):
    """A basic residual block."""

    @nn.compact
    def __call__(self, x, middle):
        out = nn.relu(batch_norm(nn.Conv(middle, (3, 3), use_bias=False, name="conv1")(x), "bn1"))
        out = nn.Conv(x.shape[-1], (1, 1), use_bias=False, name="conv2")(out)
        return nn.relu(batch_norm(out, "bn2") + x)


class ResNet(nn.Module):
    """A stem, blocks, a head; images channels last."""

    sizes: tuple

    @nn.compact
    def __call__(self, x):
        width, middle, blocks, outputs = self.sizes
        x = nn.Conv(width, (3, 3), use_bias=False, name="conv")(jnp.moveaxis(x, 1, -1))
        x = nn.relu(batch_norm(x, "bn"))
        for i in range(blocks):
            x = Block(name=f"block{i}")(x, middle)
        return nn.Dense(outputs, name="fc")(x.mean((1, 2)))


class LeNet(nn.Module):
    """Two convolutions with or without norms, two dense layers."""

    sizes: tuple
    norms: bool

    @nn.compact
    def __call__(self, x):
        x = jnp.moveaxis(x, 1, -1)
        for i, width in enumerate(self.sizes[:2], 1):
            x = nn.Conv(width, (3, 3), use_bias=not self.norms, name=f"conv{i}")(x)
            x = nn.relu(batch_norm(x, f"bn{i}") if self.norms else x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.Dense(self.sizes[2], name="fc1")(jnp.moveaxis(x, -1, 1).reshape(len(x), -1))
        return nn.Dense(self.sizes[3], name="fc2")(nn.relu(x))


class MLP(nn.Module):
    """Dense layers with relu between them, with norms or boundaries of loss scales."""

    widths: tuple
    norms: bool = False

    @nn.compact
    def __call__(self, x, scales=None):
        last = len(self.widths)
        for i, width in enumerate(self.widths, 1):
            x = scale_boundary(x, scales, 0, 1) if scales is not None and i == last // 2 + 1 else x
            x = nn.Dense(width, name=f"fc{i}")(x)
            x = nn.LayerNorm(name=f"ln{i}", **NORM)(x) if self.norms and i < last else x
            x = nn.relu(x) if i < last else x
        return x


def module_of(net):
    kind, sizes = net["kind"], tuple(net["sizes"])
    if kind == "lenet":
        return LeNet(sizes, net["norms"])
    return ResNet(sizes) if kind == "resnet" else MLP(sizes[1:], kind == "layernorm")


def rate_of(rate):
    """A schedule of MindSpore's by its formula; numbers and lists as they are."""
    if not isinstance(rate, dict):
        return rate
    given = {"decay_steps": 1, "is_stair": False} | rate
    first, low = given.get("learning_rate"), given.get("end_learning_rate")

    def at_step(count):
        share = count / given["decay_steps"]
        share = jnp.floor(share) if given["is_stair"] else share
        within = jnp.minimum(share, 1.0)
        match given["class"]:
            case "ExponentialDecayLR":
                return first * given["decay_rate"] ** share
            case "NaturalExpDecayLR":
                return first * jnp.exp(-given["decay_rate"] * (share * given["decay_steps"]))
            case "InverseDecayLR":
                return first / (1 + given["decay_rate"] * share)
            case "CosineDecayLR":
                half = 0.5 * (given["max_lr"] - given["min_lr"])
                return given["min_lr"] + half * (1 + jnp.cos(jnp.pi * within))
            case "PolynomialDecayLR":
                return (first - low) * (1 - within) ** given["power"] + low
        return first * jnp.minimum(count / given["warmup_steps"], 1.0)

    return at_step


def optimizer_of(given, grouped):
    given = given | {"learning_rate": rate_of(given["learning_rate"])}
    factory = getattr(mindspore, FACTORIES.get(given.pop("class"), "adam_weight_decay"))
    return factory(**given, grouped=grouped)


def manager_of(spec):
    """In the words of boostax.config.mindspore."""
    kind, *given = spec["manager"]
    if kind == "Group":
        layers = list(dict.fromkeys(x.split(".")[0] for x in specs.shapes(spec["network"])))
        half = len(layers) // 2
        return mindspore.GroupLossScaleManager(*given, [layers[:half], layers[half:]])
    if kind == "Dynamic":
        return mindspore.DynamicLossScaleManager(*given)
    return mindspore.FixedLossScaleManager(*given, kind == "Fixed")


def boost_of(spec, folder=None):
    """Read the dictionary; where layers are frozen, in the order in which MindSpore has them."""
    shapes, config = specs.shapes(spec["network"]), specs.dictionary(spec)
    on = specs.active(spec)
    if spec["manager"]:
        config["loss_scale_manager"] = manager_of(spec)
    if "grad_freeze" in on and "dim_reduce" not in on:
        config["freeze"] = {"order": list(dict.fromkeys("/".join(place(x)[:-1]) for x in shapes))}
    if "dim_reduce" in on:
        rows = [jax.tree.leaves(as_flax(split(row, shapes))) for row in specs.basis(spec)]
        path = config["dim_reduce"]["pca_mat_path"] = str(folder / "basis.npy")
        np.save(path, [np.concatenate([*map(np.ravel, row)]) for row in rows])
    return auto(config, level=spec["level"])


def changed(boost, module, start, x):
    """The module, its params and the report, of LessBN where it is on."""
    module, report = boost.model(module, x)
    params = as_flax(start)
    if report is not None:
        for path in report.removed:
            *modules, last = path.split("/")
            del at(params, modules)[last]
        if report.head:
            *modules, last = report.head.split("/")
            del at(params, (*modules, last))["bias"]
            at(params, (*modules, last))["multiplier"] = np.ones((), np.float32)
    return module, params, report


def loss_of(module):
    """The mean square; an overflow of the first group, or of each of two, is set by hand."""

    def loss_fn(params, batch, scales=None):
        given = {} if scales is None else {"scales": scales}
        x, y, *bad = batch
        found = module.apply({"params": params}, x, mutable=["batch_stats"], **given)[0]
        flags = jnp.atleast_1d(bad[0][0]) if bad else ()
        sums = (params[x]["bias"].sum() for x, _ in zip(("fc1", "fc4"), flags, strict=False))
        extra = (jnp.where(flag, jnp.inf, 0.0) * x for flag, x in zip(flags, sums, strict=True))
        return jnp.mean((found - y) ** 2) + sum(extra)

    return loss_fn


def train(boost, module, start, batches, inner, dtype=jnp.float32):
    """After each step the params, and the metrics."""
    module, params, report = changed(boost, module, start, batches[0][0])
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    step = boost.make_train_step(loss_of(module), inner, params, less_bn=report)
    state, told = step.init(params), []
    for batch in zip(*batches, strict=True):
        batch = [x if x.dtype == bool else jnp.asarray(x, dtype) for x in batch]
        state, metrics = step(state, batch)
        told.append(jax.device_get((state.params, metrics, getattr(state.opt_state, "table", 0))))
    return told


def rerun(run, boost, inner, *more):
    """What ``train`` returns for a run on record, and the largest difference of a weight kept."""
    net, shapes = run["network"], ABOUT["shapes"][run["network"]]
    batches = [arrays()[f"{net}_x"], arrays()[f"{net}_y"], *more]
    start = split(arrays()[f"{net}_start"], shapes)
    told = train(boost, module_of(specs.RECORDED[net]), start, batches, inner)
    shapes = {name: shapes.get(name, ()) for name in ABOUT["programs"][run["program"]]["params"]}
    kept = zip(ABOUT["kept_after"], arrays()[f"{run['program']}_w"], strict=True)
    return told, max(farthest(told[i - 1][0], flat, shapes) for i, flat in kept)


def run(spec, folder, dtype=jnp.float32):
    """What ``train`` returns, and the notes."""
    boost, on = boost_of(spec, folder), specs.active(spec)
    grouped = spec["grouped"] or bool({"less_bn", "grad_freeze"} & {*on} and "dim_reduce" not in on)
    x, y = specs.batches(spec)
    batches = [x, y]
    if "loss_scale_group" in on:
        bad = ~np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
        batches = [np.nan_to_num(x, nan=0, posinf=0), y, np.repeat(bad[:, None], len(x[0]), 1)]
    inner = optimizer_of(spec["optimizer"], grouped)
    start = specs.start(spec["network"])
    return train(boost, module_of(spec["network"]), start, batches, inner, dtype), boost.notes
