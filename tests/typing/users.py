# pyright: reportUnnecessaryTypeIgnoreComment=true
"""What a user writes, as a strict type checker sees it; `make lint` checks it against the package.

Nothing here is run.
"""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax

import boostax

Params = dict[str, jax.Array]


def loss_fn(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


# Every factory gives an Optax transformation and takes one.
scaled = boostax.dynamic_loss_scale(optax.adamw(1e-3), growth_interval=500)
assert_type(scaled, optax.GradientTransformationExtraArgs)
window = boostax.accumulate(scaled, every=4, normalize="mean")
assert_type(window, optax.GradientTransformationExtraArgs)
reduced = optax.chain(boostax.all_reduce("data", wire_dtype="bfloat16"), optax.sgd(0.1))
compressed = boostax.int8_reduce(("host", "device"), rounding="stochastic")
assert_type(compressed, optax.GradientTransformationExtraArgs)
frozen = boostax.scheduled_freeze(optax.sgd(0.1), [["a"], ["b"]], 1)


# A schedule may be a function of the applied steps.
def every(steps: jax.Array) -> jax.Array:
    return jnp.where(steps < 100, 2, 8)


assert_type(boostax.accumulate(optax.sgd(0.1), every), optax.GradientTransformationExtraArgs)


def own_loop(params: Params, batch: dict[str, jax.Array]) -> Params:
    opt_state = window.init(params)
    _, grads = boostax.value_and_grad(loss_fn)(params, opt_state, batch)
    assert_type(boostax.precision.loss_scale(opt_state), jax.Array)
    assert_type(boostax.train.has_updated(opt_state), jax.Array)
    assert_type(boostax.metrics(opt_state), dict[str, jax.Array])
    assert_type(boostax.precision.all_finite(grads), jax.Array)
    params, opt_state = boostax.apply_gradients(window, grads, opt_state, params)
    # A loss without types takes any params.
    boostax.value_and_grad(lambda params, x: params["w"] * x)(params, opt_state, batch["x"])
    return params


def configured(path: str) -> boostax.config.Boost:
    boost = boostax.auto(path)
    assert_type(boost, boostax.config.Boost)
    assert_type(boost.config, dict[str, Any])
    assert_type(boost.policy, boostax.precision.Policy | None)
    return boost


def explained(params: Params) -> list[str]:
    found = boostax.explain(reduced, params)
    assert_type(found, boostax.explaining.Explanation)
    return [finding.fix for finding in found.findings]


def refused(params: Any) -> None:
    """What a type checker has to find."""
    boostax.accumulate(optax.sgd(0.1), every="4")  # pyright: ignore[reportArgumentType]
    boostax.accumulate(
        optax.sgd(0.1),
        every=4,
        normalize="average",  # pyright: ignore[reportArgumentType]
    )
    boostax.dynamic_loss_scale(params.missing, window=3)  # pyright: ignore[reportCallIssue]
    boostax.dynamic_loss_scal(optax.sgd(0.1))  # pyright: ignore[reportAttributeAccessIssue]
