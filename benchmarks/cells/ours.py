"""The transformations of boostax, one configuration each."""

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import optax

import boostax
from cells.subject import AXIS, Subject

TESTS = pathlib.Path(__file__).parents[2] / "tests"
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))

from contract_cases import CASES, given_a_loss, two  # noqa: E402
from reference import adasum  # noqa: E402

MISTAKES = {case.name: case.bad_arguments for case in CASES}
FREEZES = boostax.freeze_schedule("continuous", total_steps=9, frozen_fraction=0.4)


def group(path: str, leaf: Any) -> int:
    """Two groups: ``b`` and all below are the second, where there is one."""
    del leaf
    return int(path.split("/")[0] == "b")


def guarded(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """With a scaler around that skips what is not finite."""
    return lambda inner, axis: boostax.static_loss_scale(make(inner, axis), 1.0, axis_name=axis)


def chained(reduction: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda inner, axis: optax.chain(reduction(axis), inner)


def averaged(axis: Any) -> Any:
    """The reduction that a transformation wants before it, where there is an axis."""
    return optax.identity() if axis is None else boostax.all_reduce(AXIS)


NO_NUMBERS = {
    name: "gradients must be floating or complex arrays" for name in ("integer leaf", "float0 leaf")
}
DRAWN = {"order of the leaves": "its directions are drawn by the place of the leaf"}
NO_TREE = "the optimizer inside sees coordinates, not a tree of params"
# A part of a leaf is not what they treat; where types are tracked they say so.
FSDP = "FSDP", "FSDP, one leaf whole"
WHOLE = dict.fromkeys(FSDP, "leaves must be whole on every device")
NEEDS_AXIS = {"Auto sharding under jit": "axis_name must name an axis of the surrounding"}


def with_one_loss(tx: Any) -> Any:
    """Told of a loss that is equal over the axis that params are sharded over."""

    def value(params: Any) -> Any:
        return jax.lax.psum(0.0 * sum(x.sum() for x in jax.tree.leaves(params)), "fsdp")

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return tx.update(grads, state, params, value=value(params), value_fn=value, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def subject(name: str, make: Callable[[Any, Any], Any], **options: Any) -> Subject:
    options.setdefault("guard", guarded(make))
    declared = {} if options.pop("any_leaf", False) else NO_NUMBERS
    declared = declared | (NEEDS_AXIS if options.get("reduces") else {})
    options["unsupported"] = declared | options.get("unsupported", {})
    return Subject(name, make, mistakes=MISTAKES.get(name, ()), **options)


def scaler(name: str, make: Callable[[Any, Any], Any], **options: Any) -> Subject:
    return subject(name, make, guard=None, **options)


def reduction(name: str, make: Callable[[Any], Any], **options: Any) -> Subject:
    return subject(name, chained(make), reduces=True, **options)


def compressed(name: str, make: Callable[[Any], Any], **options: Any) -> Subject:
    return reduction(name, make, linear=False, accounts=True, **options)


def centered(rows: Any) -> Any:
    """The mean over the replicas without its mean over the inputs of each output."""
    mean = rows.mean(0)
    return mean - mean.mean(0) if mean.ndim > 1 else mean


def limits(factory: Callable[..., Any], **more: Any) -> Any:
    options = {"init_scale": 1.0} | more

    def make(low: float, high: float) -> Any:
        return factory(optax.sgd(0.0), min_scale=low, max_scale=high, **options)

    return make


def by_group(inner: Any, *, axis_name: Any = None, **options: Any) -> Any:
    return boostax.precision.group_loss_scale(inner, group, axis_name=axis_name, **options)


SUBJECTS = [
    scaler(
        "dynamic_loss_scale",
        lambda inner, axis: boostax.dynamic_loss_scale(inner, init_scale=1.0, axis_name=axis),
        scale=(limits(boostax.dynamic_loss_scale, growth_interval=1), boostax.precision.loss_scale),
    ),
    scaler(
        "static_loss_scale",
        lambda inner, axis: boostax.static_loss_scale(inner, 1.0, axis_name=axis),
    ),
    scaler(
        "group_loss_scale",
        lambda inner, axis: by_group(inner, axis_name=axis, init_scale=1.0),
        scale=(limits(by_group, growth_factor=2.0, backoff_factor=0.5), lambda state: state.scales),
    ),
    subject(
        "check_updates",
        lambda inner, axis: boostax.precision.check_updates(inner, axis_name=axis),
        any_leaf=True,
    ),
    # A limit from the third step on.
    scaler(
        "skip_spikes",
        lambda inner, axis: boostax.precision.skip_spikes(inner, window=4, axis_name=axis),
        guarded=lambda state: (state.own, state.inner_state),
    ),
    subject(
        "store",
        lambda inner, axis: boostax.precision.store(inner, moments="log8", least=1),
        any_leaf=True,
        unsupported=dict.fromkeys(FSDP, "sharded along dimensions that have no blocks"),
        meaningless={"order of the leaves": "its noise is drawn by the path of the leaf"},
    ),
    subject(
        "accumulate",
        lambda inner, axis: boostax.accumulate(inner, 2, axis_name=axis),
        calls=2,
    ),
    reduction("all_reduce", boostax.all_reduce),
    reduction(
        "adasum",
        boostax.adasum,
        reference=adasum,
        fsdp=lambda inner, _: optax.chain(boostax.adasum("data", shard_axes="fsdp"), inner),
    ),
    subject(
        "adasum_delta",
        lambda inner, axis: boostax.reduce.adasum_delta(inner, axis),
        fsdp=lambda inner, _: boostax.reduce.adasum_delta(inner, "data", shard_axes="fsdp"),
        reduces=True,
        reference=adasum,
    ),
    compressed("top_k_reduce", lambda axis: boostax.top_k_reduce(axis, 0.25)),
    compressed(
        "threshold_reduce", lambda axis: boostax.reduce.threshold_reduce(axis, 0.5, relative=True)
    ),
    compressed("random_k_reduce", lambda axis: boostax.reduce.random_k_reduce(axis, 0.25)),
    compressed("int8_reduce", lambda axis: boostax.int8_reduce(axis, error_feedback=True)),
    compressed("int16_reduce", lambda axis: boostax.reduce.int16_reduce(axis, error_feedback=True)),
    compressed(
        "sign_reduce",
        lambda axis: boostax.reduce.sign_reduce(axis, form="mean"),
        meaningless={"order of the leaves": "small leaves share a row, and its magnitude"},
    ),
    compressed(
        "power_sgd_reduce", lambda axis: boostax.reduce.power_sgd_reduce(axis, 1), unsupported=WHOLE
    ),
    subject(
        "local_updates",
        lambda inner, axis: boostax.reduce.local_updates(inner, axis, 2),
        reduces=True,
        own_params=True,
    ),
    subject(
        "partial_average",
        lambda inner, axis: boostax.reduce.partial_average(inner, axis, 1),
        reduces=True,
        own_params=True,
    ),
    subject(
        "scheduled_freeze",
        lambda inner, axis: boostax.scheduled_freeze(inner, group, FREEZES, repeat=True),
        guard=lambda inner, axis: boostax.scheduled_freeze(
            boostax.static_loss_scale(inner, 1.0, axis_name=axis), group, FREEZES, repeat=True
        ),
        guarded=lambda state: state.inner_state.inner_state,
        unsupported={"around MultiSteps": "inner must not be optax.MultiSteps"},
    ),
    subject(
        "average_params",
        lambda inner, axis: boostax.model.average_params(inner, decay=0.9),
        any_leaf=True,
    ),
    subject(
        "clip_by_global_norm",
        lambda inner, axis: optax.chain(
            averaged(axis), boostax.model.clip_by_global_norm(0.5), inner
        ),
        averages=True,
        linear=False,
        fsdp=lambda inner, _: optax.chain(
            boostax.all_reduce(AXIS),
            boostax.model.clip_by_global_norm(0.5, shard_axes="fsdp"),
            inner,
        ),
    ),
    subject(
        "centralize_gradients",
        lambda inner, axis: optax.chain(boostax.centralize_gradients(), inner),
        reference=centered,
        fsdp=lambda inner, specs: optax.chain(
            boostax.centralize_gradients(param_specs=specs), inner
        ),
    ),
    subject(
        "record_trajectory",
        lambda inner, axis: optax.chain(
            boostax.subspace.record_trajectory(3, every=2, start=1), inner
        ),
        any_leaf=True,
        fsdp=lambda inner, _: optax.chain(
            boostax.subspace.record_trajectory(3, every=2, start=1, shard_axes="fsdp"), inner
        ),
    ),
    scaler(
        "dim_reduce",
        lambda inner, axis: given_a_loss(boostax.dim_reduce(two, residual=inner, axis_name=axis)),
        guarded=lambda state: state._replace(skipped=(), finite=()),
        linear=False,
        meaningless=DRAWN,
        fsdp=lambda inner, _: with_one_loss(
            boostax.dim_reduce(two, residual=inner, axis_name="data", shard_axes="fsdp")
        ),
    ),
]
