"""Backward rules under a loss scale: those that are not linear are found, and can be mended."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawing import draws
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from reducing import mesh_of
from test_losses import BATCH, HEADS, PLAIN

import boostax
from boostax._core import degrees
from boostax.train import backward_rules

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
KEY = jax.random.key(0)
ROWS = jnp.tile(X, (4, 1)), jnp.sin(jnp.tile(X, (4, 1)))
PARAMS = {"w": jnp.eye(3) * 0.5, "r": jnp.eye(3) * 0.3}
SGD = optax.sgd(1.0)


def ruled(rule):
    """An identity with a backward rule ``rule(x, g)``."""
    fn = jax.custom_vjp(lambda x: x)
    fn.defvjp(lambda x: (x, x), lambda x, g: (rule(x, g),))
    return fn


largest = lambda g: jnp.max(jnp.abs(g))  # noqa: E731


def quantised(g, scale):
    return jnp.clip(jnp.round(g / scale), -127, 127).astype(jnp.int8).astype(g.dtype) * scale


def e5m2(g):
    return jnp.clip(g, -57344, 57344).astype(jnp.float8_e5m2).astype(g.dtype)


def solved(x, g):
    """The rule of a fixed point, whose loop ends at a tolerance."""
    more = lambda c: jnp.sum(jnp.abs(c[0] - c[1])) > 1e-3  # noqa: E731
    return lax.while_loop(more, lambda c: (c[1], g + 0.5 * c[1]), (jnp.zeros_like(g), g))[1]


WRONG = {
    "clip": lambda x, g: jnp.clip(g, -1e-3, 1e-3),
    "clip by norm": lambda x, g: g / jnp.maximum(jnp.linalg.norm(g), 1.0),
    "normalised": lambda x, g: g / (jnp.linalg.norm(g) + 1e-6),
    "noise": lambda x, g: g + jax.random.normal(KEY, g.shape),
    "threshold": lambda x, g: jnp.where(jnp.abs(g) > 1e-3, g, 0),
    "injected": lambda x, g: jnp.ones_like(g),
    "decay": lambda x, g: g + 1e-2 * x,
    "fixed point numbers": lambda x, g: (g * 1024).astype(jnp.int32) * largest(g),
    "E5M2 saturates": lambda x, g: e5m2(g),
    "clip in a loop": lambda x, g: lax.map(lambda row: jnp.clip(row, -1, 1), g),
}
RIGHT = {
    "reversal": lambda x, g: -0.3 * g,
    "nothing": lambda x, g: jnp.zeros_like(g),
    "a zero of NumPy's": lambda x, g: np.zeros(g.shape, np.float32),
    "int8": lambda x, g: quantised(g, jnp.maximum(largest(g), 1e-12) / 127),
    "int8 guarded": lambda x, g: quantised(g, jnp.where(largest(g) > 0, largest(g) / 127, 1.0)),
    "E5M2": lambda x, g: e5m2(g * (57344 / largest(g))) * (largest(g) / 57344),
    "NaN to zero": lambda x, g: jnp.nan_to_num(g),
    "fixed point": solved,
    "bits": lambda x, g: lax.bitcast_convert_type(lax.bitcast_convert_type(g, int) & -256, "f4"),
    "relative noise": lambda x, g: g + jnp.sum(g**2) ** 0.5 * jax.random.normal(KEY, g.shape),
    "unreadable": lambda x, g: jax.pure_callback(np.asarray, jax.typeof(g), g) + 1,
}


def found(loss, *args):
    return backward_rules.nonlinear(jax.make_jaxpr(loss)(*args), True)


@pytest.mark.parametrize("name", [*WRONG, *RIGHT])
def test_a_rule_is_found_if_it_is_not_linear_and_only_then(name):
    fn = ruled((WRONG | RIGHT)[name])
    looped = lambda x: lax.scan(lambda c, _: (jax.checkpoint(fn)(c), None), x, None, 2)[0]  # noqa: E731
    assert bool(found(lambda x: jnp.sum(jax.jit(looped)(x)), X)) == (name in WRONG)


def test_no_rule_of_a_library_is_found_and_two_of_one_place_are_two():
    assert [found(loss, HEADS, BATCH) for loss in PLAIN] == [[]] * len(PLAIN)
    assert len(found(lambda x: jnp.sum(ruled(WRONG["clip"])(ruled(RIGHT["int8"])(x))), X)) == 1


ONE = {
    "square": jnp.square, "root": lambda g: jnp.sqrt(jnp.abs(g)), "double": lambda g: 2 * g,
    "norm": jnp.linalg.norm, "cumulated": lambda g: jnp.cumsum(g, -1), "tanh": jnp.tanh,
    "clip": lambda g: jnp.clip(g, -1, 1), "sign": jnp.sign, "positive": jax.nn.relu,
    "inverse": lambda g: 1 / g, "rounded": lambda g: jnp.round(g), "one": jnp.ones_like,
    "sorted": lambda g: jnp.sort(g, -1), "third": jnp.cbrt, "power": lambda g: jnp.abs(g) ** 1.5,
}  # fmt: skip
TWO = {
    "sum": jnp.add, "product": jnp.multiply, "quotient": jnp.divide, "largest": jnp.maximum,
    "chosen": lambda a, b: jnp.where(a > b, a, b), "where": lambda a, b: jnp.where(a > 0, a, b),
}  # fmt: skip
GROWN = lambda x: st.tuples(st.sampled_from([*ONE]), x) | st.tuples(st.sampled_from([*TWO]), x, x)  # noqa: E731


def valued(tree, x, g):
    if not isinstance(tree, tuple):
        return {"g": g, "x": x}[tree] if isinstance(tree, str) else jnp.full_like(g, tree)
    return (ONE | TWO)[tree[0]](*(valued(each, x, g) for each in tree[1:]))


@draws(30)
@given(st.recursive(st.sampled_from(["g", "g", "x", 0.5, 0.0]), GROWN, max_leaves=5))
def test_the_degree_of_an_expression_is_what_numbers_show(tree):
    with jax.enable_x64(True):
        x, g = jnp.asarray(X, jnp.float64), jnp.cos(jnp.asarray(X, jnp.float64))
        (degree,) = degrees.degrees(jax.make_jaxpr(functools.partial(valued, tree))(x, g), [0.0])
        plain = np.asarray(valued(tree, x, g))
        # Each lies on another side of most bounds.
        for s in (2.0**12, 2.0**-12) if isinstance(degree, float) else ():
            got = valued(tree, x, s * g)
            np.testing.assert_allclose(got, plain * s**degree, rtol=1e-9, atol=1e-200)
        assert degree != degrees.ANY or not plain[np.isfinite(plain)].any()


inject = jax.custom_vjp(lambda h, aux: h)
inject.defvjp(lambda h, aux: (h, None), lambda _, g: (g, jnp.ones((), g.dtype)))
mended_inject = jax.custom_vjp(lambda h, aux, s: h)
mended_inject.defvjp(lambda h, aux, s: (h, s), lambda s, g: (g, s, None))


def injected(x, aux):
    return mended_inject(x, aux, boostax.precision.current_scale())


def auxiliary(p, b):
    return 0.1 * jnp.mean(jax.nn.logsumexp(b[0] @ p["r"], -1) ** 2)


def clipped(p, b, scales=None):
    return jnp.mean((ruled(WRONG["clip"])(b[0] @ p["w"]) - b[1]) ** 2)


def routed(p, b, scales=None):
    return jnp.mean((inject(b[0] @ p["w"], auxiliary(p, b)) - b[1]) ** 2)


def both(p, b):
    return jnp.mean((inject(ruled(WRONG["clip"])(b[0] @ p["w"]), auxiliary(p, b)) - b[1]) ** 2)


def mended(p, b, scales=None):
    scale = boostax.precision.current_scale()
    clip = ruled(lambda x, g: jnp.clip(g, -1e-3 * scale, 1e-3 * scale))
    return jnp.mean((injected(clip(b[0] @ p["w"]), auxiliary(p, b)) - b[1]) ** 2)


SCALED = {
    "128": boostax.static_loss_scale(SGD, 128.0),
    "2**16": boostax.dynamic_loss_scale(SGD),
    "groups": boostax.precision.group_loss_scale(SGD, {"w": 0, "r": 0}),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("loss", [clipped, routed])
def test_a_step_warns_of_a_rule_that_a_scale_makes_wrong_and_explain_names_the_leaf(loss, name):
    """Each gave 1/65536 of its step, and nothing said so."""
    step = boostax.make_train_step(loss, SCALED[name], policy={"128": "O2"}.get(name))
    state = step.init(PARAMS)
    first, second = boostax.explain(step, state, ROWS).findings
    assert boostax.explain(step, *jax.eval_shape(lambda x: x, (state, ROWS))).findings == (first,)
    assert first.what.startswith(f"the backward rule of <lambda> at {__file__}:")
    assert second.what == f"the gradient of {'w' if loss is clipped else 'r'!r}"
    with pytest.warns(UserWarning, match=r"not linear .* boostax.precision.current_scale\(\)"):
        step(state, ROWS)


def stepped(loss, tx, **how):
    step = boostax.make_train_step(loss, tx, **how)
    return jax.tree.map(np.asarray, step.common_params(step(step.init(PARAMS), ROWS)[0]))


@pytest.mark.parametrize("cut", ["whole", "groups", "micro-batches", "replicas", "frozen"])
def test_with_the_scale_in_its_rules_a_step_is_that_of_no_scale(cut):
    around, inner, how = lambda tx: tx, SGD, {}
    if cut == "micro-batches":
        how = {"microbatches": 4}
    elif cut == "replicas":
        inner, how = optax.chain(boostax.all_reduce(), SGD), {"mesh": mesh_of(data=2)}
    elif cut == "frozen":
        around, how = lambda tx: boostax.scheduled_freeze(tx, {"w": 0, "r": 1}, 0), {}
    scaled = SCALED["groups"] if cut == "groups" else boostax.dynamic_loss_scale(inner)
    pair = stepped(mended, around(scaled), **how), stepped(both, around(inner), **how)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), *pair)


FORMS = {
    "jit": jax.jit(injected),
    "scan": lambda x, aux: lax.scan(lambda c, _: (injected(c, aux), None), x, None, 2)[0],
    "remat": jax.checkpoint(lambda x, aux: jax.jit(injected)(x, aux)),
    "cond": lambda x, aux: lax.cond(aux > 0, injected, lambda x, aux: x, x, aux),
    "vmap": lambda x, aux: jax.vmap(injected, (0, None))(x, aux),
}


def test_the_scale_is_known_in_each_form_of_a_loss_and_not_kept_from_another():
    """A cache of jax.jit that kept the scale of another call would be wrong, or a leak."""
    loss = lambda p, x: sum(jnp.mean(form(x, p)) for form in FORMS.values())  # noqa: E731
    p, gradient, every = jnp.float32(0.5), boostax.value_and_grad(loss), len(FORMS) + 1
    states = [boostax.static_loss_scale(SGD, scale).init(p) for scale in (8.0, 4.0)]
    assert jax.grad(loss)(p, X) == every and boostax.precision.current_scale() == 1
    for call in (jax.jit(gradient), jax.jit(lambda *args: gradient(*args)), gradient):
        assert [call(p, state, X)[1] for state in states] == [8 * every, 4 * every]
    # A loss without a scale of its own, in one that has one.
    nested = lambda p, x: gradient(p, (), x)[1] * p + loss(p, x)  # noqa: E731
    assert boostax.value_and_grad(nested)(p, states[0], X)[1] == 8 * 2 * every
    # What no scale concerns is traced once for all calls.
    inner = jax.jit(lambda p: traced.append(p) or 2 * p)
    traced, plain = [], boostax.value_and_grad(lambda p, x: inner(p))
    assert [jax.jit(lambda p: plain(p, (), X)[1])(p) for _ in range(2)] == [2, 2]
    assert len(traced) == 1


def test_the_scale_is_known_under_pmap_and_in_nnx():
    gradient = boostax.value_and_grad(lambda p, x: jnp.mean(injected(x, p)), axis_name="data")
    scaler = boostax.static_loss_scale(SGD, 8.0)
    mapped = jax.pmap(gradient, "data", in_axes=(None, None, 0), devices=jax.devices()[:2])
    assert (mapped(jnp.float32(1.0), scaler.init(X), jnp.stack([X, X]))[1] == 8).all()
    model = nnx.Linear(3, 1, use_bias=False, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    optimizer = boostax.nnx.Optimizer(model, scaler, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss = lambda model, x: jnp.mean(injected(x, jnp.sum(model.kernel[...])))  # noqa: E731
        optimizer.update(model, optimizer.value_and_grad(loss)(model, x)[1])

    step(model, optimizer, X)
    assert not model.kernel[...].any()


@pytest.mark.parametrize("scale", [2.0**-24, 1000.0, 2.0**24])
def test_a_right_loss_is_never_found_at_any_scale(scale):
    """In f16 gradients vanish or overflow, which is no fault of a rule."""
    half = lambda p, b: jnp.mean((b[0] @ p["w"]).astype(jnp.float16) ** 2).astype(jnp.float32)  # noqa: E731
    right = lambda p, b: jnp.mean((ruled(RIGHT["int8"])(b[0] @ p["w"]) - b[1]) ** 2)  # noqa: E731
    for loss, policy in ((half, None), (right, "O2"), (mended, None)):
        step = boostax.make_train_step(loss, boostax.static_loss_scale(SGD, scale), policy=policy)
        assert boostax.explain(step, step.init(PARAMS), ROWS).findings == ()


def test_nothing_is_said_of_a_rule_that_no_scale_makes_wrong():
    told = lambda p, b, s: jnp.mean(mended_inject(b[0] @ p["w"], auxiliary(p, b), s))  # noqa: E731
    carried = boostax.carry(SCALED["128"], {"r": "last"})
    for loss, tx in ((both, boostax.skip_bad_steps(SGD)), (both, carried), (told, SCALED["128"])):
        step, more = boostax.make_train_step(loss, tx), {"s": 128.0} if loss is told else {}
        assert boostax.explain(step, step.init(PARAMS), ROWS, **more).findings == ()
        jax.eval_shape(step, step.init(PARAMS), ROWS, **more)
