"""Every transformation of the library, registered for the contract suite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import boostax
from boostax import model, precision, reduce, subspace
from boostax._core import trees
from boostax.testing import Case

OPT = optax.sgd(0.1)
FREEZES = boostax.freeze_schedule("continuous", total_steps=9, frozen_fraction=0.4)


def given_a_loss(tx):
    """The same, told of a loss that every step lowers: the laws know of gradients alone."""

    def lower(params):
        return 0.0 * sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(params))

    def update(updates, state, params=None, **extra):
        return tx.update(updates, state, params, value=jnp.ones(()), value_fn=lower, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def two(params):
    """Two directions for the params of any law."""
    return subspace.random_basis(params, 2)


def half(path, leaf):
    """Two groups of the trees that laws use, or one of those with a single leaf."""
    del leaf
    return 1 if path == "b" or path.startswith(("list", "pair", "block")) else 0


def by_group(inner, axis, **options):
    """A loss scale for each half."""
    return precision.group_loss_scale(inner, half, axis_name=axis, **options)


def scaled_by_group(grads, state):
    """What a loss with boundaries between the halves gives."""
    scales = precision.group_scales(state)
    by = lambda path, g: g * scales[half(trees.path_name(path), g)]  # noqa: E731
    return jax.tree_util.tree_map_with_path(by, grads)


def around(part, *args, **options):
    """The optimizer inside of ``part``, which is told the axis."""
    return lambda inner, axis: part(inner, *args, axis_name=axis, **options)


def behind(part, *args, **options):
    """The optimizer behind ``part``, a reduction over the axis."""
    return lambda inner, axis: optax.chain(part(axis, *args, **options), inner)


def nested(*parts):
    """Each inside of the one before it."""
    if len(parts) == 1:
        return parts[0]
    return lambda inner, axis: parts[0](nested(*parts[1:])(inner, axis), axis)


scaler, window = around(boostax.dynamic_loss_scale), around(boostax.accumulate, 2)
adasum_delta, top_k = reduce.adasum_delta, boostax.top_k_reduce
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
compressed = {"reduces": True, "compresses": True, "by_shard": True}


def below(state):
    """What a skip leaves as it was, where the scaler is the second gate."""
    return state.inner_state.inner_state


# What steps of several calls are, what is inside of gates, and params of each replica's own.
gates = {"skips": True, "calls": 2}
scaler_below = {**gates, "skip_calls": 2, "skip_view": below}
own_params = {"reduces": True, "own_params": True, "skips": True}


def frozen(inner, axis):
    return boostax.scheduled_freeze(inner, half, FREEZES, repeat=True)


def in_a_subspace(inner, axis, **options):
    return given_a_loss(boostax.dim_reduce(two, residual=inner, axis_name=axis, **options))


# Each law holds for these in every run.
FIRST = [
    Case("dynamic_loss_scale", scaler, skips=True),
    Case("check_updates", around(precision.check_updates)),
    Case("count_lost_updates", lambda inner, axis: precision.count_lost_updates(inner)),
    Case(
        "store",
        lambda inner, axis: precision.store(inner, moments="log8", least=1),
        bad_arguments=(
            (lambda: precision.store(OPT, params="remainder").init(jnp.zeros(3)), "params"),
            (
                lambda: precision.store(optax.adam(0.1), moments={"nu": "log8"}).init(jnp.zeros(3)),
                "moments",
            ),
        ),
    ),
    # Before half of a window no finite norm is refused.
    Case("skip_spikes", around(precision.skip_spikes), skips=True, bad=(np.nan, np.inf, -np.inf)),
    Case("accumulate", window, calls=2),
    Case("all_reduce", behind(boostax.all_reduce), reduces=True),
    Case(
        "adasum",
        behind(boostax.adasum, leaf_metrics=True),
        reduces=True,
        bad_arguments=((lambda: boostax.adasum("data", within="data"), "within"),),
    ),
    Case(
        "top_k_reduce",
        behind(top_k, 0.25),
        **compressed,
        bad_arguments=((lambda: top_k("data", {0: 2.0}), "density"),),
    ),
    Case(
        "scheduled_freeze",
        frozen,
        bad_arguments=(
            (lambda: boostax.scheduled_freeze(OPT, half, 1).init({"a": 1.0}), "schedule"),
            (lambda: boostax.scheduled_freeze(OPT, half, []).init({"a": 1.0}), "schedule"),
        ),
    ),
    Case(
        "dim_reduce",
        in_a_subspace,
        skips=True,
        skip_view=lambda state: state._replace(skipped=(), finite=()),
    ),
    Case(
        "adagc",
        lambda inner, axis: optax.chain(boostax.all_reduce(axis), model.adagc(warmup=2), inner),
        reduces=True,
    ),
    Case(
        "group_loss_scale",
        by_group,
        skips=True,
        scaled=scaled_by_group,
        bad_arguments=(
            (lambda: precision.group_loss_scale(OPT, {"a": 0, "b": 2}), "labels"),
            (lambda: precision.group_loss_scale(OPT, {"a": 0.5}), "labels"),
        ),
    ),
]
# Other settings of these and their siblings: only the laws of arguments hold in every run.
VARIANTS = [
    Case("skip_bad_steps", around(boostax.skip_bad_steps), skips=True),
    Case("static_loss_scale", around(boostax.static_loss_scale, 128.0), skips=True),
    Case(
        "static_loss_scale_without_check",
        around(boostax.static_loss_scale, 128.0, skip_nonfinite=False),
    ),
    Case(
        "accumulate_in_bfloat16",
        around(boostax.accumulate, 2, accumulator_dtype="bfloat16", rounding="stochastic"),
        calls=2,
    ),
    Case(
        "all_reduce_with_noise_inside_gates",
        nested(window, scaler, behind(boostax.all_reduce, noise=0.9)),
        reduces=True,
        **scaler_below,
    ),
    Case("accumulate_every_one", around(boostax.accumulate, 1)),
    Case("accumulate_by_schedule", around(boostax.accumulate, lambda step: 2 + step * 0), calls=2),
    Case("accumulate_inside_the_scaler", nested(scaler, window), **gates),
    Case("accumulate_around_the_scaler", nested(window, scaler), **scaler_below),
    Case("all_reduce_half", behind(boostax.all_reduce, dtype="float16", clip=100.0), reduces=True),
    Case("all_reduce_in_buckets", behind(boostax.all_reduce, bucket_bytes=2**20), reduces=True),
    Case(
        "adasum_half_inside_the_scaler",
        nested(scaler, behind(boostax.adasum, wire_dtype="bfloat16", scope="tree")),
        reduces=True,
        skips=True,
    ),
    Case("adasum_delta", around(adasum_delta), reduces=True),
    Case(
        "adasum_delta_of_servers",
        around(adasum_delta, within=4),
        reduces=True,
        bad_arguments=((lambda: adasum_delta(OPT, "data", within="data"), "within"),),
    ),
    Case(
        "top_k_reduce_warming_up_in_blocks_with_momentum",
        behind(top_k, {0: 0.5, 2: 0.1}, block=16, bucket_bytes=2**8, momentum=0.9),
        reduces=True,
        by_shard=True,
    ),
    Case(
        "top_k_reduce_inside_gates",
        nested(scaler, window, behind(top_k, dense=lambda path, leaf: leaf.ndim < 2)),
        reduces=True,
        by_shard=True,
        **gates,
    ),
    Case(
        "threshold_reduce",
        behind(reduce.threshold_reduce, 0.5, relative=True, value_dtype="bfloat16"),
        **compressed,
    ),
    Case(
        "int8_reduce",
        nested(scaler, behind(boostax.int8_reduce, rounding="stochastic")),
        **compressed,
        skips=True,
    ),
    Case(
        "power_sgd_reduce",
        behind(reduce.power_sgd_reduce, {0: 1, 3: 2}),
        reduces=True,
        compresses=True,
        bad_arguments=((lambda: reduce.power_sgd_reduce("data", {5: 0}), "rank"),),
    ),
    Case(
        "partial_average",
        nested(scaler, around(reduce.partial_average, partitions=2)),
        **own_params,
    ),
    Case(
        "local_updates",
        nested(scaler, window, around(reduce.local_updates, every=2, outer=NESTEROV)),
        **own_params,
        calls=2,
    ),
    Case(
        "scheduled_freeze_around_scaler_and_window",
        nested(frozen, scaler, window),
        **gates,
        skip_view=below,
    ),
    Case(
        "record_trajectory",
        lambda inner, axis: optax.chain(subspace.record_trajectory(3, every=2, start=1), inner),
    ),
    Case("average_params", lambda inner, axis: model.average_params(inner, decay=0.9)),
    Case(
        "average_params_around_scaler_and_window",
        nested(
            lambda inner, axis: model.average_params(inner, "lawa", size=2, start=1), scaler, window
        ),
        **gates,
        skip_view=lambda state: state._replace(inner_state=below(state)),
    ),
    Case(
        "dim_reduce_in_bfloat16_inside_the_scaler",
        nested(scaler, functools.partial(in_a_subspace, dtype="bfloat16")),
        skips=True,
    ),
    Case(
        "clip_by_global_norm",
        lambda inner, axis: optax.chain(model.clip_by_global_norm(0.5), inner),
    ),
    Case(
        "centralize_gradients",
        lambda inner, axis: optax.chain(boostax.centralize_gradients(), inner),
        bad_arguments=((lambda: boostax.centralize_gradients(axes={"kernel": "all"}), "axes"),),
    ),
    Case(
        "group_loss_scale_measured_around_a_window",
        nested(functools.partial(by_group, rule="measure"), window),
        scaled=scaled_by_group,
        **gates,
    ),
]
CASES = FIRST + VARIANTS
