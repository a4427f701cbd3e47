"""Losses whose loops start from constants, or that no types can follow, on every code path."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas
from jax.experimental.ode import odeint
from lanes import lanes, spread

import boostax
from boostax.testing._losses import TRIALS, _spec

ROWS, TIME, WIDTH, WORDS = 16, 5, 8, 12
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (ROWS, TIME, WIDTH))
BATCH = {"x": X, "y": jax.random.randint(KEY, (ROWS, TIME), 0, WORDS)}
HEADS = {"e": jax.random.normal(KEY, (WIDTH, WIDTH)), "u": jax.random.normal(KEY, (WIDTH, WORDS))}
REDUCED = optax.chain(boostax.all_reduce(), optax.sgd(0.1))
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def linen_lstm():
    model = nn.RNN(nn.LSTMCell(WIDTH))
    return lambda p, b: jnp.mean(model.apply(p, b["x"]) ** 2), model.init(KEY, X)


def nnx_gru():
    graph, params, rest = nnx.split(gru(), nnx.Param, ...)

    def loss(p, b):
        carry = jnp.zeros((b["x"].shape[0], WIDTH))
        return jnp.mean(nnx.merge(graph, p, rest)(b["x"], initial_carry=carry) ** 2)

    return loss, params


def gru():
    return nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=nnx.Rngs(0)))


def chunked(p, b):
    h = jnp.tanh(b["x"] @ p["e"]).swapaxes(0, 1)

    def body(total, c):
        return (total + cross_entropy(c[0] @ p["u"], c[1]).sum(), None)

    return lax.scan(body, jnp.zeros(()), (h, b["y"].swapaxes(0, 1)))[0] / b["y"].size


def ode(p, b):
    flow = lambda h, t: jnp.tanh(h @ p["e"]) - h  # noqa: E731
    return jnp.mean(odeint(flow, b["x"][:, 0], jnp.linspace(0.0, 0.5, 3))[-1] ** 2)


def fixed_point(p, b):
    """By a while loop, with the gradient of one turn at the end."""

    def turn(h):
        return 0.3 * jnp.tanh(h @ p["e"]) + b["x"][:, 0]

    def going(carry):
        return (carry[1] > 1e-3) & (carry[2] < 50)

    start = jnp.zeros((b["x"].shape[0], WIDTH)), jnp.ones(()), 0

    def step(carry):
        h = turn(carry[0])
        return lax.stop_gradient((h, jnp.abs(h - carry[0]).max(), carry[2] + 1))

    h = lax.stop_gradient(lax.while_loop(going, step, lax.stop_gradient(start))[0])
    return jnp.mean(turn(h) ** 2)


def root(p, b):
    """The root of h = 0.3 tanh(w h + x), by Newton's method and the implicit function."""
    w, x = jnp.mean(p["e"]), b["x"][:, 0, 0]

    def residual(h):
        return h - 0.3 * jnp.tanh(w * h + x)

    def solve(f, start):
        def newton(_, h):
            return h - f(h) / (jax.jvp(f, (h,), (jnp.ones_like(h),))[1])

        return lax.fori_loop(0, 8, newton, start)

    def linear(g, y):
        return y / g(jnp.ones_like(y))

    return jnp.mean(lax.custom_root(residual, jnp.zeros_like(x), solve, linear) ** 2)


def conditional(p, b):
    h = jnp.mean(jnp.tanh(b["x"] @ p["e"]) ** 2)
    return h + lax.cond(p["u"][0, 0] < 1e9, lambda: h * p["u"][0, 0], lambda: 0.0)


def _square(x_ref, out_ref):
    out_ref[...] = x_ref[...] * x_ref[...]


@jax.custom_vjp
def squared(x):
    return pallas.pallas_call(_square, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


squared.defvjp(lambda x: (squared(x), x), lambda x, g: (2 * x * g,))


def kernel(p, b):
    return jnp.mean(squared(b["x"][:, 0] @ p["e"]))


@jax.custom_vjp
def outside(x):
    """A sine of NumPy's, as a foreign function would be called."""
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.sin, result, x, vmap_method="expand_dims")


outside.defvjp(lambda x: (outside(x), x), lambda x, g: (jnp.cos(x) * g,))


def called_back(p, b):
    return jnp.mean(outside(b["x"][:, 0] @ p["e"]) ** 2)


PLAIN = [chunked, ode, fixed_point, root, conditional, kernel, called_back]
LOSSES = {
    "linen's LSTM": linen_lstm,
    "nnx's GRU": nnx_gru,
    **{fn.__name__: lambda fn=fn: (fn, HEADS) for fn in PLAIN},
}


# Trials differ by where params are, which the quick losses go through.
SLOW = ("linen's LSTM", "nnx's GRU", "ode")


@pytest.mark.parametrize(("name", "trial"), spread(SLOW, ["FSDP", "own loop"]))
def test_a_slow_loss_trains_in_two_trials_as_on_one_device(name, trial):
    boostax.testing.check_loss(*LOSSES[name](), BATCH, only=trial)


@pytest.mark.parametrize("name", lanes(LOSSES, LOSSES.keys() - SLOW))
def test_a_loss_trains_in_every_trial_as_on_one_device(name):
    """A loop from a constant was refused, in JAX's words, on every code path to a mesh."""
    loss, params = LOSSES[name]()
    if name != "called_back":
        boostax.testing.check_loss(loss, params, BATCH)
        return
    # JAX calls back only where every axis of the mesh is mapped.
    with pytest.raises(NotImplementedError, match="manually"):
        boostax.testing.check_loss(loss, params, BATCH, only="another axis")
    for trial in TRIALS.keys() - {"another axis"}:
        boostax.testing.check_loss(loss, params, BATCH, only=trial)


def test_a_recurrent_module_of_nnx_draws_its_carry_on_a_mesh(mesh):
    """An RNN whose carry comes from the module's own Rngs, in a step of boostax.nnx."""
    model = jax.device_put(gru(), jax.NamedSharding(mesh, jax.P()))
    optimizer = boostax.nnx.Optimizer(model, REDUCED, wrt=nnx.Param, axis_name="data")

    @nnx.jit
    def step(model, optimizer, x):
        def loss(model, x):
            return jnp.mean(model(x) ** 2)

        value, grads = optimizer.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer, X)) for _ in range(5)]
    assert losses[-1] < losses[0]


summed = jax.grad(lambda x: lax.psum(jnp.sum(x**2), "data"))
INSIDE = {
    "a gradient of a mean": lambda x: jax.grad(lambda x: lax.pmean(jnp.sum(x**2), "data"))(x),
    "in a scan": lambda x: lax.scan(lambda h, _: (h + summed(x), None), 0 * x, None, 2)[0],
    "in a jit": jax.jit(jax.grad(lambda x: lax.pmean(jnp.sum(x**2), "data"))),
}
RIGHT = {
    "the mean of a gradient": lambda x: lax.pmean(jax.grad(lambda x: jnp.sum(x**2))(x), "data"),
    "a tangent": lambda x: jax.jvp(lambda x: lax.pmean(jnp.sum(x**2), "data"), (x,), (x,))[1],
    "under a checkpoint": jax.checkpoint(lambda x: lax.pmean(jnp.sum(x**2), "data")),
}


def penalized(inside):
    return lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2) + jnp.mean(inside(x @ w) ** 2)


@pytest.mark.parametrize("name", INSIDE)
def test_a_loss_that_differentiates_a_mean_over_replicas_is_refused(mesh, name):
    """Without types its gradient is that of one replica, times their number."""
    step = boostax.make_train_step(penalized(INSIDE[name]), REDUCED, mesh=mesh, axis_name="data")
    with pytest.raises(ValueError, match="Average the gradient, not the differentiated"):
        step(step.init(jnp.ones(WIDTH)), X[:, 0])


@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_with_other_collectives_is_not(mesh, name):
    step = boostax.make_train_step(penalized(RIGHT[name]), REDUCED, mesh=mesh, axis_name="data")
    state, reported = step(step.init(jnp.ones(WIDTH)), X[:, 0])
    assert np.isfinite(reported["loss"]) and (np.asarray(state.params) != 1).all()


def test_a_trial_shards_the_first_dimension_that_its_axis_divides():
    shapes = {(3, 8, 4): jax.P(None, "model"), (3,): jax.P(), (): jax.P()}
    assert {x: _spec("model", 2, np.zeros(x)) for x in shapes} == shapes
