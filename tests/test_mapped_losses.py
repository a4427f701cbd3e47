"""Losses with collectives: the gradient is that of the mean of what the replicas return."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax
from lanes import spread

import boostax

X = jnp.sin(jnp.arange(32.0)).reshape(16, 2)
W = jnp.array([1.0, 2.0])
MODES = ["checked", "unchecked", "pmap", "global"]


def local(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def normalized(w, x, mean):
    """With statistics of all replicas, as BatchNorm over a mesh axis has them."""
    h = x @ w
    return jnp.mean(jnp.tanh(h - mean(jnp.mean(h))) ** 2)


def penalized(w, x, mean):
    return local(w, x) + mean(jnp.mean(x @ w)) ** 2


def total(w, x):
    return lax.psum(jnp.sum(jnp.tanh(x @ w) ** 2), "data") / lax.psum(jnp.float32(len(x)), "data")


pmean = lambda x: lax.pmean(x, "data")  # noqa: E731
# What is mapped, and what one device computes of the whole batch.
LOSSES = {
    "local": (local, local),
    "pmean": (lambda w, x: pmean(local(w, x)), local),
    "psum": (lambda w, x: lax.psum(local(w, x), "data"), lambda w, x: 8 * local(w, x)),
    "sum over count": (total, local),
    "gathered": (lambda w, x: jnp.mean(lax.all_gather(local(w, x), "data")), local),
    "statistics": (lambda w, x: normalized(w, x, pmean), lambda w, x: normalized(w, x, jnp.mean)),
    "a part": (lambda w, x: penalized(w, x, pmean), lambda w, x: penalized(w, x, jnp.mean)),
}


def mapped(loss, mode, mesh, scale=1024.0):
    """Loss and mean gradient over eight replicas, as each mode has them."""
    state = boostax.static_loss_scale(optax.sgd(1.0), scale).init(W)
    if mode == "global":
        oracle = boostax.value_and_grad(loss, axis_name="data", mesh=mesh)
        value, grads = jax.jit(oracle)(W, state, X)
        return value, jnp.mean(grads.local, 0) / scale

    def run(w, x):
        value, grads = boostax.value_and_grad(loss, axis_name="data")(w, state, x)
        return value, pmean(grads) / scale

    if mode == "pmap":
        mapping = jax.pmap(run, axis_name="data", in_axes=(None, 0))
        return jax.tree.map(lambda x: x[0], mapping(W, X.reshape(8, 2, 2)))
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.jit(jax.shard_map(run, mesh=mesh, check_vma=mode == "checked", **specs))(W, X)


@pytest.mark.parametrize(("name", "mode"), spread(LOSSES, MODES))
def test_the_gradient_is_that_of_the_mean_of_what_replicas_return(name, mode, mesh):
    """A loss averaged inside gave 1/8 of its gradient with checking, and all of it without."""
    loss, whole = LOSSES[name]
    expected = jax.value_and_grad(whole)(W, X)
    value, grads = mapped(loss, mode, mesh)
    np.testing.assert_allclose(value, expected[0], rtol=2e-6)
    np.testing.assert_allclose(grads, expected[1], rtol=2e-5, atol=1e-7)


MASK = jnp.arange(16) % 5 < 3


def masked(w, batch, total):
    """The mean over what the mask leaves, with a mean of all under it."""
    x, mask = batch
    h = x @ w
    h = h - total(jnp.sum(h * mask)) / total(jnp.sum(mask))
    return jnp.sum(mask * jnp.tanh(h) ** 2), jnp.sum(mask)


def of_replica(w, batch):
    part, count = masked(w, batch, lambda x: lax.psum(x, "data"))
    return part / count, boostax.Aux(weight=count, metrics={"mean": pmean(part / count)})


def of_all(w, batch):
    part, count = (lax.psum(x, "data") for x in masked(w, batch, lambda x: lax.psum(x, "data")))
    return part / count, boostax.Aux(metrics={"count": count})


def apart(w, batch):
    """Its metrics know of other replicas, and so does a factor without a gradient."""
    part, count = masked(w, batch, lambda x: x)
    other = pmean(lax.stop_gradient(w[0]))
    return other * part / count, boostax.Aux(weight=count, metrics={"mean": pmean(part)})


@jax.custom_vjp
def summed(x):
    return lax.psum(x, "data")


# A rule of the loss's own, which no tangent shows.
summed.defvjp(lambda x: (summed(x), None), lambda _, ct: (lax.psum(ct, "data"),))


def by_rule(w, batch):
    part, count = masked(w, batch, summed)
    return part / count, boostax.Aux(weight=count)


@pytest.mark.parametrize("loss", [of_replica, by_rule])
def test_weights_of_gradients_that_cross_replicas_are_refused_on_global_arrays(mesh, loss):
    oracle = boostax.value_and_grad(loss, mesh=mesh, has_aux=True)
    with pytest.raises(ValueError, match=r"value_and_grad: Aux.weight must be left out"):
        jax.jit(oracle)(W, (), (X, MASK.astype(jnp.float32)))


def looped(loss):
    """The same with the params out of a scan that has a checkpoint in it."""

    def run(w, batch):
        turn = jax.checkpoint(lambda carry, row: (carry + row * (1 + pmean(row * 0)), None))
        return loss(lax.scan(turn, w, lax.stop_gradient(w)[None] * jnp.zeros((3, 1)))[0], batch)

    return run


@pytest.mark.parametrize("wrapped", [lambda fn: fn, jax.jit, jax.checkpoint, looped])
@pytest.mark.parametrize("check_vma", [True, False])
def test_weights_of_gradients_that_cross_replicas_are_refused(mesh, check_vma, wrapped):
    """Batch statistics over the replicas under token weights gave a third too much."""

    def gradient(loss, microbatches=1):
        options = {"axis_name": "data", "has_aux": True, "microbatches": microbatches}
        oracle = boostax.value_and_grad(wrapped(loss), **options)
        run = lambda w, batch: pmean(oracle(w, (), batch)[1])  # noqa: E731
        specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
        return jax.jit(jax.shard_map(run, mesh=mesh, **specs))(W, (X, MASK.astype(jnp.float32)))

    for microbatches in (1, 2):
        with pytest.raises(ValueError, match=r"value_and_grad: Aux.weight must be left out"):
            gradient(of_replica, microbatches)

    def whole(w):
        part, count = masked(w, (X, MASK), lambda x: x)
        return part / count

    np.testing.assert_allclose(gradient(of_all), jax.grad(whole)(W), rtol=2e-5)
    assert np.isfinite(gradient(apart)).all()
