"""Every transformation of the library, registered for the contract suite."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from reducing import in_turn

import boostax
from boostax import model, precision, reduce, subspace
from boostax.testing import Case, laws_for

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
    by = lambda path, g: g * scales[half(boostax._core.trees.path_name(path), g)]  # noqa: E731
    return jax.tree_util.tree_map_with_path(by, grads)


def around(part, *args, **options):
    """The optimizer inside of ``part``, which is told the axis."""
    return lambda inner, axis: part(inner, *args, axis_name=axis, **options)


def behind(part, *args, **options):
    """The optimizer behind ``part``, a reduction over the axis."""
    return lambda inner, axis: optax.chain(part(axis, *args, **options), inner)


def alone(part, *args, **options):
    """The optimizer inside of ``part``, which asks for no axis."""
    return lambda inner, axis: part(inner, *args, **options)


def before(part):
    """``part`` before the optimizer."""
    return lambda inner, axis: optax.chain(part, inner)


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


def each_law(cases, late, left_out=lambda case, name: False):
    """Parametrise a test by the laws of some cases, ``long`` where ``late`` says so."""
    mark = lambda *of: [pytest.mark.long] if late(*of) else []  # noqa: E731
    pairs = [(case, name) for case in cases for name in laws_for(case) if not left_out(case, name)]
    return pytest.mark.parametrize(
        ("case", "law"),
        [pytest.param(c, laws_for(c)[n], id=f"{c.name}-{n}", marks=mark(c, n)) for c, n in pairs],
    )


def refused(argument, *calls):
    """Calls, and the argument that each of them is to name."""
    return {"bad_arguments": tuple((call, argument) for call in calls)}


def first_state(tx):
    """A call of ``init``."""
    return lambda: tx.init(jnp.zeros(3))


freezing = functools.partial(boostax.scheduled_freeze, OPT, half)
group_scale, threshold = precision.group_loss_scale, reduce.threshold_reduce
adagc = nested(behind(boostax.all_reduce), before(model.adagc(warmup=2)))
subspace_view = lambda state: state._replace(skipped=(), applied=())  # noqa: E731
averaged_view = lambda state: state._replace(inner_state=below(state))  # noqa: E731
# Each law holds for these in every run.
FIRST = [
    Case("dynamic_loss_scale", scaler, skips=True),
    Case("check_updates", around(precision.check_updates)),
    Case(
        "check_replicas",
        around(precision.check_replicas),
        **refused("every", lambda: precision.check_replicas(OPT, every=0)),
    ),
    Case(
        "store",
        alone(precision.store, moments="log8", least=1),
        bad_arguments=(
            (first_state(precision.store(OPT, params="remainder")), "params"),
            (first_state(precision.store(optax.adam(0.1), moments={"nu": "log8"})), "moments"),
        ),
    ),
    Case("accumulate", window, calls=2),
    Case("all_reduce", behind(boostax.all_reduce), reduces=True),
    Case(
        "adasum",
        behind(boostax.adasum, leaf_metrics=True),
        reduces=True,
        **refused("within", lambda: boostax.adasum("data", within="data")),
    ),
    Case(
        "top_k_reduce",
        behind(top_k, 0.25),
        **compressed,
        **refused("density", lambda: top_k("data", {0: 2.0})),
    ),
    Case(
        "scheduled_freeze",
        frozen,
        **refused("schedule", first_state(freezing(1)), functools.partial(freezing, [])),
    ),
    Case("dim_reduce", in_a_subspace, skips=True, skip_view=subspace_view),
    Case("adagc", adagc, reduces=True),
    Case(
        "group_loss_scale",
        by_group,
        skips=True,
        scaled=scaled_by_group,
        **refused("labels", *(lambda x=x: group_scale(OPT, {"a": x, "b": 2}) for x in (0, 0.5))),
    ),
]
half_wire = {"wire_dtype": "float16", "clip": 100.0}
narrow_window = around(boostax.accumulate, 2, dtype="bfloat16", rounding="stochastic")
unchecked = around(boostax.static_loss_scale, 128.0, skip_nonfinite=False)
in_shards = around(boostax.accumulate, 2, sums="sharded"), around(precision.check_updates)
in_shards = nested(scaler, *in_shards, behind(boostax.all_reduce))
low_adasum = nested(scaler, behind(boostax.adasum, wire_dtype="bfloat16", scope="tree"))
warming = behind(top_k, {0: 0.5, 2: 0.1}, block=16, bucket_bytes=2**8, momentum=0.9)
gated_top_k = nested(scaler, window, behind(top_k, dense=lambda path, leaf: leaf.ndim < 2))
over_threshold = behind(threshold, 0.5, relative=True, wire_dtype="bfloat16")
int8 = nested(scaler, behind(boostax.int8_reduce, rounding="stochastic"))
partial = nested(scaler, around(reduce.partial_average, partitions=2))
local = nested(scaler, window, around(reduce.local_updates, every=2, outer=NESTEROV))
two_bits = top_k("data", 0.4, block=16, bits=2, decay=0.9)
alternating = around(reduce.local_updates, every=2, fragments=2, reduction=two_bits, warmup=1)
sparse_local = nested(scaler, window, alternating)
latest = nested(alone(model.average_params, "lawa", size=2, start=1), scaler, window)
low_subspace = nested(scaler, functools.partial(in_a_subspace, dtype="bfloat16"))
measured = nested(functools.partial(by_group, rule="measure"), window)
recorded = before(subspace.record_trajectory(3, every=2, start=1))
freeze_around = nested(frozen, scaler, window)
of_replicas = nested(around(precision.check_replicas, every=2), scaler, window)
# Other settings of these and their siblings: only the laws of arguments hold in every run.
VARIANTS = [
    Case("skip_bad_steps", around(boostax.skip_bad_steps), skips=True),
    Case("check_replicas_around_the_scaler", of_replicas, skip_view=below, **gates),
    Case("static_loss_scale", around(boostax.static_loss_scale, 128.0), skips=True),
    Case("static_loss_scale_without_check", unchecked),
    Case("accumulate_in_bfloat16", narrow_window, calls=2),
    Case("accumulate_in_shards", in_shards, reduces=True, **gates),
    Case("accumulate_every_one", around(boostax.accumulate, 1)),
    Case("accumulate_by_schedule", around(boostax.accumulate, lambda step: 2 + step * 0), calls=2),
    Case("accumulate_inside_the_scaler", nested(scaler, window), **gates),
    Case("accumulate_around_the_scaler", nested(window, scaler), **scaler_below),
    Case("all_reduce_half", behind(boostax.all_reduce, **half_wire), reduces=True),
    Case("all_reduce_in_buckets", behind(boostax.all_reduce, bucket_bytes=2**20), reduces=True),
    Case("adasum_half_inside_the_scaler", low_adasum, reduces=True, skips=True),
    Case(
        "adasum_delta",
        around(adasum_delta),
        reduces=True,
        **refused("within", lambda: adasum_delta(OPT, within="data", axis_name="data")),
    ),
    Case("by_shape", around(boostax.by_shape), reduces=True),
    Case("top_k_reduce_warming_up_in_blocks_with_momentum", warming, reduces=True, by_shard=True),
    Case("top_k_reduce_inside_gates", gated_top_k, reduces=True, by_shard=True, **gates),
    Case("threshold_reduce", over_threshold, **compressed),
    Case("int8_reduce", int8, **compressed, skips=True),
    Case("codec_with_state_for_each_leaf", behind(in_turn), **compressed),
    Case("partial_average", partial, **own_params),
    Case("local_updates", local, **own_params, calls=2),
    Case("local_updates_sparse_in_turn", sparse_local, **own_params, by_shard=True, calls=2),
    Case("scheduled_freeze_around_scaler_and_window", freeze_around, **gates, skip_view=below),
    Case("record_trajectory", recorded),
    Case("average_params", alone(model.average_params, decay=0.9)),
    Case("average_params_around_scaler_and_window", latest, **gates, skip_view=averaged_view),
    Case("dim_reduce_in_bfloat16_inside_the_scaler", low_subspace, skips=True),
    Case("clip_by_global_norm", before(model.clip_by_global_norm(0.5))),
    Case(
        "centralize_gradients",
        before(boostax.centralize_gradients()),
        **refused("axes", lambda: boostax.centralize_gradients(axes={"kernel": "all"})),
    ),
    Case("group_loss_scale_measured_around_a_window", measured, scaled=scaled_by_group, **gates),
]
CASES = FIRST + VARIANTS
