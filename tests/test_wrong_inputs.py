"""What a step or a gate is given that it cannot take: refused by name, before anything is run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax

X = jnp.ones((8, 4))
PARAMS = {"w": jnp.ones((4, 2))}
GATES = {
    "plain": lambda tx: tx,
    "scaler": boostax.dynamic_loss_scale,
    "window": lambda tx: boostax.accumulate(tx, every=2),
    "both": lambda tx: boostax.dynamic_loss_scale(boostax.accumulate(tx, every=2)),
}
each_gate = pytest.mark.parametrize("gate", GATES)


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def like(*shape):
    return {"w": jnp.ones(shape)}


# Leaves without a gradient


NO_GRADIENT = {"int32": jnp.arange(3), "bool": jnp.ones(3, bool)}
NO_GRADIENT |= {"key<fry>": jax.random.key(0), "uint32": jax.random.PRNGKey(0)}


@each_gate
@pytest.mark.parametrize("kind", NO_GRADIENT)
def test_params_without_a_gradient_are_refused_by_name(gate, kind):
    """Defect guarded against: JAX's words, which name no leaf, and for keys already at init."""
    step = boostax.make_train_step(loss, GATES[gate](optax.adam(0.1)))
    state = step.init(PARAMS | {"n": NO_GRADIENT[kind]})
    with pytest.raises(TypeError, match=f"params must be floating .* got {kind} at n"):
        step(state, X)


@pytest.mark.parametrize("kind", NO_GRADIENT)
def test_params_without_a_gradient_may_be_inactive(kind):
    params = PARAMS | {"n": NO_GRADIENT[kind]}
    value, grads = boostax.value_and_grad(loss)(params, (), X, active={"w": True, "n": False})
    expected = jax.value_and_grad(loss)(PARAMS, X)
    np.testing.assert_array_equal(value, expected[0])
    np.testing.assert_array_equal(grads["w"], expected[1]["w"])
    assert isinstance(grads["n"], optax.MaskedNode)


def test_python_floats_train_as_arrays_do():
    fitted = lambda p, x: jnp.mean((x * p["w"] - 1) ** 2)  # noqa: E731
    step = boostax.make_train_step(fitted, boostax.dynamic_loss_scale(optax.sgd(0.1)))
    moved = [step(step.init({"w": w}), X)[0].params["w"] for w in (0.5, jnp.float32(0.5))]
    np.testing.assert_array_equal(*moved)


# States of other params


@each_gate
def test_a_step_refuses_a_state_of_other_shapes(gate):
    """Defect guarded against: of (4, 1) for (4, 2) moments broadcast, and training goes on."""
    step = boostax.make_train_step(loss, GATES[gate](optax.adam(0.1)))
    state, other = step.init(PARAMS), step.init(like(4, 1))
    with pytest.raises(ValueError, match=r"opt_state must be shaped \(4, 2\) at '.*w', got \(4, 1"):
        step(state._replace(opt_state=other.opt_state), X)
    # Also where a program of that structure was built before.
    state, _ = step(step.init(PARAMS), X)
    with pytest.raises(ValueError, match=r"opt_state must be shaped \(4, 2\) at '.*w', got \(4, 1"):
        step(state._replace(opt_state=step.init(like(4, 1)).opt_state), X)
    assert step(step.init(like(4, 3)), X)[1]["loss"] == loss(like(4, 3), X)


def test_a_step_that_freezes_refuses_a_state_of_other_shapes():
    tx = boostax.scheduled_freeze(optax.adam(0.1), {"w": 0}, [0, 0])
    step = boostax.make_train_step(loss, tx)
    mixed = step.init(PARAMS)._replace(opt_state=step.init(like(4, 1)).opt_state)
    with pytest.raises(ValueError, match=r"opt_state must be shaped \(4, 2\) at 'inner_state/0/mu"):
        step(mixed, X)


@pytest.mark.parametrize("other", [(4, 1), (3, 2)])
def test_a_window_refuses_gradients_of_other_shapes(other):
    """Defect guarded against: without moments inside, sums of (4, 1) broadcast and nothing said."""
    tx = boostax.accumulate(optax.sgd(0.1), every=2)
    with pytest.raises(ValueError, match=r"window must be shaped \(4, 2\) at 'grads/w', got"):
        tx.update(PARAMS, tx.init(like(*other)), PARAMS)


def test_a_gate_names_the_leaf_that_does_not_fit():
    tx = boostax.dynamic_loss_scale(optax.adam(0.1))
    with pytest.raises(ValueError, match=r"scale: state must be shaped \(4, 2\) at '0/mu/w', got"):
        tx.update(PARAMS, tx.init(like(4, 1)), PARAMS)
    tx = boostax.dynamic_loss_scale(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"params must be shaped \(4, 2\) at 'w', got \(4, 1\)"):
        boostax.apply_gradients(tx, PARAMS, tx.init(like(4, 1)), like(4, 1))


# Losses


def test_a_loss_without_scales_is_refused_by_name():
    """Defect guarded against: Python's own TypeError, which says nothing of boundaries."""
    params = {"w": jnp.ones((4, 2)), "v": jnp.ones(2)}
    plain = lambda p, x: jnp.mean((x @ p["w"] @ p["v"]) ** 2)  # noqa: E731
    tx = boostax.precision.group_loss_scale(optax.sgd(0.1), {"w": 0, "v": 1})
    step = boostax.make_train_step(plain, tx)
    told = r"loss_fn must be a function that accepts scales=, .*scale_b"
    with pytest.raises(TypeError, match=told):
        step(step.init(params), X)

    def crossing(p, x, *, scales):
        return plain(p | {"w": boostax.precision.scale_boundary(p["w"], scales, 0, 1)}, x)

    whole = boostax.make_train_step(crossing, tx)
    assert whole(whole.init(params), X)[1]["loss"] == plain(params, X)


@pytest.mark.parametrize("given", ["key", "model_state"])
def test_a_loss_refuses_what_it_does_not_take(given):
    step = boostax.make_train_step(loss, optax.sgd(0.1), policy="compute=bfloat16")
    state = step.init(PARAMS, **{given: jax.random.key(0) if given == "key" else jnp.ones(2)})
    with pytest.raises(TypeError, match=f"loss_fn must be a function that accepts {given}="):
        step(state, X)
    step = boostax.make_train_step((lambda p, x, **given: loss(p, x)), optax.sgd(0.1))
    step(step.init(PARAMS, **{given: jax.random.key(0) if given == "key" else jnp.ones(2)}), X)


@pytest.mark.parametrize("name", ["loss", "applied", "skipped"])
def test_a_metric_by_a_name_of_the_report_is_refused(name):
    """Defect guarded against: the step's own overwrote the user's."""

    def told(params, x):
        value = loss(params, x)
        return value, boostax.Aux(metrics={name: value + 1, "mine": value + 2})

    step = boostax.make_train_step(told, boostax.dynamic_loss_scale(optax.sgd(0.1)), has_aux=True)
    with pytest.raises(ValueError, match=f"metrics must be named .* got '{name}'"):
        step(step.init(PARAMS), X)
    if name == "skipped":
        step = boostax.make_train_step(told, optax.sgd(0.1), has_aux=True)
        reported = step(step.init(PARAMS), X)[1]
        assert float(reported[name]) == float(reported["loss"]) + 1


# A scale with a dimension


ONE = jnp.full((1,), 8.0)


@pytest.mark.parametrize("scale", [ONE, np.asarray(ONE)], ids=["jax", "numpy"])
def test_a_scale_is_a_scalar(scale):
    """Defect guarded against: a scale of shape (1,), which MindSpore takes, came back from a step
    in another shape than it went in, and NumPy's was taken with a warning."""
    sgd = optax.sgd(0.1)
    for build, argument in (
        (lambda: boostax.static_loss_scale(sgd, scale), "scale"),
        (lambda: boostax.dynamic_loss_scale(sgd, init_scale=scale), "init_scale"),
    ):
        told = rf"{argument} must be shaped \(\), got \(1,\)\. .*resh"
        with pytest.raises(ValueError, match=told):
            build()
    traced = optax.inject_hyperparams(boostax.static_loss_scale)(sgd, scale=scale)
    with pytest.raises(ValueError, match=r"scale must be shaped \(\), got \(1,\)"):
        jax.jit(traced.init)(PARAMS)
    assert boostax.static_loss_scale(sgd, scale.reshape(())).init(PARAMS).scale == 8


def test_a_scale_put_into_a_state_is_a_scalar():
    """What MindSpore's ``set_sense_scale`` does."""
    tx = boostax.static_loss_scale(optax.sgd(0.1), 8.0)
    state = tx.init(PARAMS)._replace(scale=ONE)
    told = r"scale must be shaped \(\), got \(1,\)"
    with pytest.raises(ValueError, match=f"static_loss_scale: {told}"):
        tx.update(boostax.precision.assume_scaled(PARAMS, state), state, PARAMS)
    with pytest.raises(ValueError, match=f"scale_loss: {told}"):
        boostax.precision.scale_loss(jnp.float32(1), state)
    new = state._replace(scale=jnp.float32(4.0))
    updates, _ = tx.update(boostax.precision.assume_scaled(PARAMS, new), new, PARAMS)
    assert (updates["w"] == np.float32(-0.1) / 4).all()
    step = boostax.make_train_step(loss, tx)
    with pytest.raises(ValueError, match=r"opt_state must be shaped \(\) at 'scale', got \(1,\)"):
        step(step.init(PARAMS)._replace(opt_state=state), X)
