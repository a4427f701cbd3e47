"""Every transformation of the library, registered for the contract suite."""

import optax

import boostax
from boostax.testing import Case

OPT = optax.sgd(0.1)

CASES = [
    Case(
        "dynamic_loss_scale",
        lambda inner, axis: boostax.dynamic_loss_scale(inner, axis_name=axis),
        skips=True,
        bad_arguments=(
            (lambda: boostax.dynamic_loss_scale(OPT, growth_factor=1.0), "growth_factor"),
            (lambda: boostax.dynamic_loss_scale(OPT, backoff_factor=1.0), "backoff_factor"),
            (lambda: boostax.dynamic_loss_scale(OPT, growth_interval=0), "growth_interval"),
            (lambda: boostax.dynamic_loss_scale(OPT, init_scale=2.0**30), "init_scale"),
            (lambda: boostax.dynamic_loss_scale(OPT, max_scale=float("inf")), "max_scale"),
            (lambda: boostax.dynamic_loss_scale(OPT, min_scale=0.0), "min_scale"),
            (lambda: boostax.dynamic_loss_scale(OPT, hysteresis=0), "hysteresis"),
            (lambda: boostax.dynamic_loss_scale(OPT, axis_name=()), "axis_name"),
            (lambda: boostax.dynamic_loss_scale(3.0), "inner"),
        ),
    ),
    Case(
        "static_loss_scale",
        lambda inner, axis: boostax.static_loss_scale(inner, 128.0, axis_name=axis),
        skips=True,
        bad_arguments=((lambda: boostax.static_loss_scale(OPT, -1.0), "scale"),),
    ),
    Case(
        "static_loss_scale_without_check",
        lambda inner, axis: boostax.static_loss_scale(
            inner, 128.0, skip_nonfinite=False, axis_name=axis
        ),
    ),
    Case(
        "accumulate",
        lambda inner, axis: boostax.accumulate(inner, 2, axis_name=axis),
        calls=2,
        bad_arguments=(
            (lambda: boostax.accumulate(OPT, 0), "every"),
            (lambda: boostax.accumulate(OPT, "4"), "every"),
            (lambda: boostax.accumulate(OPT, 2, normalize="max"), "normalize"),
            (lambda: boostax.accumulate(OPT, 2, accumulator_dtype="int8"), "accumulator_dtype"),
        ),
    ),
    Case("accumulate_every_one", lambda inner, axis: boostax.accumulate(inner, 1, axis_name=axis)),
    Case(
        "accumulate_by_schedule",
        lambda inner, axis: boostax.accumulate(inner, lambda step: 2 + step * 0, axis_name=axis),
        calls=2,
    ),
    Case(
        "accumulate_inside_the_scaler",
        lambda inner, axis: boostax.dynamic_loss_scale(
            boostax.accumulate(inner, 2, axis_name=axis), axis_name=axis
        ),
        skips=True,
        calls=2,
    ),
    Case(
        "accumulate_around_the_scaler",
        lambda inner, axis: boostax.accumulate(
            boostax.dynamic_loss_scale(inner, axis_name=axis), 2, axis_name=axis
        ),
        skips=True,
        calls=2,
        skip_calls=2,
        skip_view=lambda state: state.inner_state.inner_state,
    ),
    Case(
        "all_reduce",
        lambda inner, axis: optax.chain(boostax.all_reduce(axis), inner),
        reduces=True,
        bad_arguments=(
            (lambda: boostax.all_reduce(None), "axis_name"),
            (lambda: boostax.all_reduce("data", op="max"), "op"),
            (lambda: boostax.all_reduce("data", dtype="int8"), "dtype"),
            (lambda: boostax.all_reduce("data", clip=0.0), "clip"),
            (lambda: boostax.all_reduce("data", divide="later"), "divide"),
            (lambda: boostax.all_reduce("data", bucket_bytes=0), "bucket_bytes"),
        ),
    ),
    Case(
        "all_reduce_half",
        lambda inner, axis: optax.chain(
            boostax.all_reduce(axis, dtype="float16", clip=100.0), inner
        ),
        reduces=True,
    ),
    Case(
        "all_reduce_in_buckets",
        lambda inner, axis: optax.chain(boostax.all_reduce(axis, bucket_bytes=2**20), inner),
        reduces=True,
    ),
    Case(
        "adasum",
        lambda inner, axis: optax.chain(boostax.adasum(axis, leaf_metrics=True), inner),
        reduces=True,
        bad_arguments=(
            (lambda: boostax.adasum(None), "axis_name"),
            (lambda: boostax.adasum("data", within="data"), "within"),
            (lambda: boostax.adasum("data", scope="layer"), "scope"),
            (lambda: boostax.adasum("data", wire_dtype="int8"), "wire_dtype"),
            (lambda: boostax.adasum("data", bucket_bytes=-1), "bucket_bytes"),
            (lambda: boostax.adasum("data", stacked=True), "mesh"),
            (lambda: boostax.adasum(None, stacked=True, wire_dtype="float16"), "wire_dtype"),
        ),
    ),
    Case(
        "adasum_half_inside_the_scaler",
        lambda inner, axis: boostax.dynamic_loss_scale(
            optax.chain(boostax.adasum(axis, wire_dtype="bfloat16", scope="tree"), inner),
            axis_name=axis,
        ),
        reduces=True,
        skips=True,
    ),
    Case(
        "adasum_scattered_to_a_sharded_optimizer",
        lambda inner, axis: optax.chain(
            boostax.adasum(axis, scatter=True),
            boostax.shard_optimizer(optax.adamw(1e-2), axis),
        ),
        reduces=True,
        bad_arguments=(
            (lambda: boostax.shard_optimizer(3.0, "data"), "inner"),
            (lambda: boostax.shard_optimizer(OPT, None), "axis_name"),
        ),
    ),
    Case(
        "mean_scattered_to_a_sharded_optimizer_inside_gates",
        lambda inner, axis: boostax.dynamic_loss_scale(
            boostax.accumulate(
                optax.chain(
                    boostax.all_reduce(axis, scatter=True),
                    boostax.shard_optimizer(optax.adamw(1e-2), axis),
                ),
                2,
                axis_name=axis,
            ),
            axis_name=axis,
        ),
        reduces=True,
        skips=True,
        calls=2,
    ),
    Case(
        "adasum_delta",
        lambda inner, axis: boostax.adasum_delta(inner, axis),
        reduces=True,
        bad_arguments=(
            (lambda: boostax.adasum_delta(3.0, "data"), "inner"),
            (lambda: boostax.adasum_delta(OPT, "data", scope="all"), "scope"),
        ),
    ),
]
