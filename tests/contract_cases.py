"""Every transformation of the library, registered for the contract suite."""

import jax
import jax.numpy as jnp
import optax

import boostax
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
    return boostax.subspace.random_basis(params, 2)


def half(path, leaf):
    """Two groups of the trees that laws use, or one of those with a single leaf."""
    del leaf
    return 1 if path == "b" or path.startswith(("list", "pair", "block")) else 0


def by_group(inner, axis, **options):
    """A loss scale for each half."""
    return boostax.precision.group_loss_scale(inner, half, axis_name=axis, **options)


def scaled_by_group(grads, state):
    """What a loss with boundaries between the halves gives."""
    scales = boostax.precision.group_scales(state)
    by = lambda path, g: g * scales[half(trees.path_name(path), g)]  # noqa: E731
    return jax.tree_util.tree_map_with_path(by, grads)


CASES = [
    Case(
        "dynamic_loss_scale",
        lambda inner, axis: boostax.dynamic_loss_scale(inner, axis_name=axis),
        skips=True,
    ),
    Case(
        "static_loss_scale",
        lambda inner, axis: boostax.static_loss_scale(inner, 128.0, axis_name=axis),
        skips=True,
    ),
    Case(
        "static_loss_scale_without_check",
        lambda inner, axis: boostax.static_loss_scale(
            inner, 128.0, skip_nonfinite=False, axis_name=axis
        ),
    ),
    Case(
        "check_updates",
        lambda inner, axis: boostax.precision.check_updates(inner, axis_name=axis),
    ),
    Case(
        "count_lost_updates",
        lambda inner, axis: boostax.precision.count_lost_updates(inner),
    ),
    Case(
        "store",
        lambda inner, axis: boostax.precision.store(inner, moments="log8", least=1),
        bad_arguments=(
            (lambda: boostax.precision.store(OPT, params="remainder").init(jnp.zeros(3)), "params"),
            (
                lambda: boostax.precision.store(optax.adam(0.1), moments={"nu": "log8"}).init(
                    jnp.zeros(3)
                ),
                "moments",
            ),
        ),
    ),
    Case(
        "accumulate_in_bfloat16",
        lambda inner, axis: boostax.accumulate(
            inner, 2, accumulator_dtype="bfloat16", rounding="stochastic", axis_name=axis
        ),
        calls=2,
    ),
    Case(
        "skip_spikes",
        lambda inner, axis: boostax.precision.skip_spikes(inner, axis_name=axis),
        skips=True,
    ),
    Case(
        "accumulate",
        lambda inner, axis: boostax.accumulate(inner, 2, axis_name=axis),
        calls=2,
    ),
    Case(
        "all_reduce_with_noise_inside_gates",
        lambda inner, axis: boostax.accumulate(
            boostax.dynamic_loss_scale(
                optax.chain(boostax.all_reduce(axis, noise=0.9), inner), axis_name=axis
            ),
            2,
            axis_name=axis,
        ),
        reduces=True,
        skips=True,
        calls=2,
        skip_calls=2,
        skip_view=lambda state: state.inner_state.inner_state,
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
        bad_arguments=((lambda: boostax.adasum("data", within="data"), "within"),),
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
        "adasum_delta",
        lambda inner, axis: boostax.reduce.adasum_delta(inner, axis),
        reduces=True,
    ),
    Case(
        "adasum_delta_of_servers",
        lambda inner, axis: boostax.reduce.adasum_delta(inner, axis, within=4),
        reduces=True,
        bad_arguments=(
            (lambda: boostax.reduce.adasum_delta(OPT, "data", within="data"), "within"),
        ),
    ),
    Case(
        "top_k_reduce",
        lambda inner, axis: optax.chain(boostax.top_k_reduce(axis, 0.25), inner),
        reduces=True,
        compresses=True,
        by_shard=True,
        bad_arguments=((lambda: boostax.top_k_reduce("data", {0: 2.0}), "density"),),
    ),
    Case(
        "top_k_reduce_warming_up_in_blocks_with_momentum",
        lambda inner, axis: optax.chain(
            boostax.top_k_reduce(axis, {0: 0.5, 2: 0.1}, block=16, bucket_bytes=2**8, momentum=0.9),
            inner,
        ),
        reduces=True,
        by_shard=True,
    ),
    Case(
        "top_k_reduce_inside_gates",
        lambda inner, axis: boostax.dynamic_loss_scale(
            boostax.accumulate(
                optax.chain(
                    boostax.top_k_reduce(axis, dense=lambda path, leaf: leaf.ndim < 2), inner
                ),
                2,
                axis_name=axis,
            ),
            axis_name=axis,
        ),
        reduces=True,
        by_shard=True,
        skips=True,
        calls=2,
    ),
    Case(
        "threshold_reduce",
        lambda inner, axis: optax.chain(
            boostax.reduce.threshold_reduce(axis, 0.5, relative=True, value_dtype="bfloat16"), inner
        ),
        reduces=True,
        compresses=True,
        by_shard=True,
    ),
    Case(
        "int8_reduce",
        lambda inner, axis: boostax.dynamic_loss_scale(
            optax.chain(boostax.int8_reduce(axis, rounding="stochastic"), inner), axis_name=axis
        ),
        reduces=True,
        compresses=True,
        by_shard=True,
        skips=True,
    ),
    Case(
        "power_sgd_reduce",
        lambda inner, axis: optax.chain(boostax.reduce.power_sgd_reduce(axis, {0: 1, 3: 2}), inner),
        reduces=True,
        compresses=True,
        bad_arguments=((lambda: boostax.reduce.power_sgd_reduce("data", {5: 0}), "rank"),),
    ),
    Case(
        "partial_average",
        lambda inner, axis: boostax.dynamic_loss_scale(
            boostax.reduce.partial_average(inner, axis, 2), axis_name=axis
        ),
        reduces=True,
        own_params=True,
        skips=True,
    ),
    Case(
        "local_updates",
        lambda inner, axis: boostax.dynamic_loss_scale(
            boostax.accumulate(
                boostax.reduce.local_updates(
                    inner, axis, 2, optax.sgd(0.7, momentum=0.9, nesterov=True)
                ),
                2,
                axis_name=axis,
            ),
            axis_name=axis,
        ),
        reduces=True,
        own_params=True,
        skips=True,
        calls=2,
    ),
    Case(
        "scheduled_freeze",
        lambda inner, axis: boostax.scheduled_freeze(inner, half, FREEZES, repeat=True),
        bad_arguments=(
            (lambda: boostax.scheduled_freeze(OPT, half, 1).init({"a": 1.0}), "schedule"),
            (lambda: boostax.scheduled_freeze(OPT, half, []).init({"a": 1.0}), "schedule"),
        ),
    ),
    Case(
        "scheduled_freeze_around_scaler_and_window",
        lambda inner, axis: boostax.scheduled_freeze(
            boostax.dynamic_loss_scale(
                boostax.accumulate(inner, 2, axis_name=axis), axis_name=axis
            ),
            half,
            FREEZES,
            repeat=True,
        ),
        skips=True,
        calls=2,
        skip_view=lambda state: state.inner_state.inner_state,
    ),
    Case(
        "record_trajectory",
        lambda inner, axis: optax.chain(
            boostax.subspace.record_trajectory(3, every=2, start=1), inner
        ),
    ),
    Case(
        "average_params",
        lambda inner, axis: boostax.model.average_params(inner, decay=0.9),
    ),
    Case(
        "average_params_around_scaler_and_window",
        lambda inner, axis: boostax.model.average_params(
            boostax.dynamic_loss_scale(
                boostax.accumulate(inner, 2, axis_name=axis), axis_name=axis
            ),
            "lawa",
            size=2,
            start=1,
        ),
        skips=True,
        calls=2,
        skip_view=lambda state: state._replace(inner_state=state.inner_state.inner_state),
    ),
    Case(
        "dim_reduce",
        lambda inner, axis: given_a_loss(boostax.dim_reduce(two, residual=inner, axis_name=axis)),
        skips=True,
        skip_view=lambda state: state._replace(skipped=(), finite=()),
    ),
    Case(
        "dim_reduce_in_bfloat16_inside_the_scaler",
        lambda inner, axis: boostax.dynamic_loss_scale(
            given_a_loss(boostax.dim_reduce(two, residual=inner, dtype="bfloat16", axis_name=axis)),
            axis_name=axis,
        ),
        skips=True,
    ),
    Case(
        "clip_by_global_norm",
        lambda inner, axis: optax.chain(boostax.model.clip_by_global_norm(0.5), inner),
    ),
    Case(
        "adagc",
        lambda inner, axis: optax.chain(
            boostax.all_reduce(axis), boostax.model.adagc(warmup=2), inner
        ),
        reduces=True,
    ),
    Case(
        "centralize_gradients",
        lambda inner, axis: optax.chain(boostax.centralize_gradients(), inner),
        bad_arguments=((lambda: boostax.centralize_gradients(axes={"kernel": "all"}), "axes"),),
    ),
    Case(
        "group_loss_scale",
        by_group,
        skips=True,
        scaled=scaled_by_group,
        bad_arguments=(
            (lambda: boostax.precision.group_loss_scale(OPT, {"a": 0, "b": 2}), "labels"),
            (lambda: boostax.precision.group_loss_scale(OPT, {"a": 0.5}), "labels"),
        ),
    ),
    Case(
        "group_loss_scale_measured_around_a_window",
        lambda inner, axis: by_group(
            boostax.accumulate(inner, 2, axis_name=axis), axis, rule="measure"
        ),
        skips=True,
        scaled=scaled_by_group,
        calls=2,
    ),
]
