"""Every optimizer and schedule of Apache SINGA's ``opt`` is an Optax expression, and its states.

The classes below are ``python/singa/opt.py`` in NumPy and f64; the table is
``docs/coming_from/singa.md``.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import tree_utils

import boostax

STEPS = 20


# SINGA.


def exponential_decay(init_value, decay_steps, decay_rate, staircase=False):
    def at(step):
        s = step // decay_steps if staircase else step / decay_steps
        return init_value * decay_rate**s

    return at


def constant(value):
    return lambda step: value


def warmup(step):
    """A ``DecayScheduler`` of the user's, from zero upwards."""
    return 0.1 * step


class Optimizer:
    def __init_subclass__(cls, **hyper):
        cls.hyper = hyper

    def __init__(self, *args, nesterov=False, **named):
        values = self.hyper | dict(zip(self.hyper, args, strict=False)) | named
        self.nesterov = nesterov
        self.schedules = {k: x if callable(x) else constant(x) for k, x in values.items()}
        self.step_counter = 0.0
        # Of every kind of moment, by the parameters' names.
        self.states = collections.defaultdict(dict)

    def at(self, name):
        return self.schedules[name](self.step_counter)

    def is_off(self, name):
        """Whether the first value is zero, by which SINGA judges a schedule."""
        return self.schedules[name](0) == 0

    def __call__(self, params, grads):
        after = {}
        for name, p in params.items():
            g = grads[name]
            if not self.is_off("weight_decay"):
                g = g + self.at("weight_decay") * p
            after[name] = p - self.at("lr") * self.direction(name, g)
        self.step_counter += 1
        return after

    def moved(self, kind, name, old, new):
        """A moment of a param: ``old`` times what it was, and ``new``."""
        self.states[kind][name] = old * self.states[kind].get(name, 0.0) + new
        return self.states[kind][name]

    def get_states(self):
        moments = {kind: dict(by_name) for kind, by_name in self.states.items()}
        return {"step_counter": self.step_counter, **moments}


class SGD(Optimizer, lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0):
    def direction(self, name, g):
        if self.is_off("momentum"):
            return g
        momentum = self.at("momentum")
        b = self.moved("moments", name, momentum, (1.0 - self.at("dampening")) * g)
        return g + momentum * b if self.nesterov else b


class RMSProp(Optimizer, lr=0.1, rho=0.9, epsilon=1e-8, weight_decay=0.0):
    def direction(self, name, g):
        rho = self.at("rho")
        v = self.moved("running_average", name, rho, (1.0 - rho) * g**2)
        return g / np.sqrt(v + self.at("epsilon"))


class AdaGrad(Optimizer, lr=0.1, epsilon=1e-8, weight_decay=0.0):
    def direction(self, name, g):
        return g / np.sqrt(self.moved("history", name, 1.0, g**2) + self.at("epsilon"))


class Adam(Optimizer, lr=0.1, beta_1=0.9, beta_2=0.999, epsilon=1e-8, weight_decay=0.0):
    def direction(self, name, g):
        s, b1, b2 = self.step_counter + 1, self.at("beta_1"), self.at("beta_2")
        m = self.moved("m", name, b1, (1.0 - b1) * g)
        v = self.moved("v", name, b2, (1.0 - b2) * g**2)
        # The betas of this step, to the power s: not the product of those so far.
        return m / (1.0 - b1**s) / (np.sqrt(v / (1.0 - b2**s)) + self.at("epsilon"))


# Optax.


def both(*args):
    """A schedule as SINGA and as Optax has it."""
    schedule = optax.exponential_decay(*args[:3], staircase=len(args) > 3)
    # Of a count in i32 Optax computes it in f32, even with x64; SINGA's counter is a float.
    return exponential_decay(*args), lambda count: schedule(jnp.asarray(count, float))


LR, LR_OPTAX = both(0.1, 4, 0.5)
STAIRS, STAIRS_OPTAX = both(0.1, 3, 0.7, True)
MOMENTUM, MOMENTUM_OPTAX = both(0.95, 30, 0.8)
DAMPENING, DAMPENING_OPTAX = both(0.5, 7, 0.6)
DECAY, DECAY_OPTAX = both(0.1, 5, 0.5)
BETA_1, BETA_1_OPTAX = both(0.9, 40, 0.7)
BETA_2, BETA_2_OPTAX = both(0.999, 100, 0.9)
EPSILON, EPSILON_OPTAX = both(1e-2, 10, 0.1)

decayed = optax.add_decayed_weights
trace = optax.inject_hyperparams(optax.trace)
rmsprop = optax.inject_hyperparams(optax.rmsprop)
adagrad = optax.inject_hyperparams(optax.adagrad)
adam = optax.inject_hyperparams(optax.adam)


def behind_decay(*parts):
    return optax.chain(decayed(DECAY_OPTAX), *parts)


def undamped(dampening):
    """Each gradient enters the momentum times 1 - d, the first too: so before the momentum."""
    if callable(dampening):
        return optax.scale_by_schedule(lambda step: 1.0 - dampening(step))
    return optax.scale(1.0 - dampening)


of = functools.partial
CASES = {
    "sgd": (SGD, optax.sgd(0.1)),
    "sgd lr": (of(SGD, LR), optax.sgd(LR_OPTAX)),
    "sgd stairs": (of(SGD, STAIRS), optax.sgd(STAIRS_OPTAX)),
    "sgd scheduled decay": (of(SGD, weight_decay=DECAY), behind_decay(optax.sgd(0.1))),
    "sgd momentum": (of(SGD, momentum=0.9), optax.sgd(0.1, 0.9)),
    "sgd nesterov": (of(SGD, momentum=0.9, nesterov=True), optax.sgd(0.1, 0.9, nesterov=True)),
    "sgd dampening": (
        of(SGD, momentum=0.9, dampening=0.3),
        optax.chain(undamped(0.3), optax.sgd(0.1, 0.9)),
    ),
    "sgd scheduled dampening": (
        of(SGD, momentum=0.9, dampening=DAMPENING),
        optax.chain(undamped(DAMPENING_OPTAX), optax.sgd(0.1, 0.9)),
    ),
    "sgd dampening without momentum": (of(SGD, dampening=0.3), optax.sgd(0.1)),
    "sgd scheduled momentum": (
        of(SGD, momentum=MOMENTUM),
        optax.chain(trace(MOMENTUM_OPTAX), optax.scale_by_learning_rate(0.1)),
    ),
    "sgd scheduled nesterov": (
        of(SGD, momentum=MOMENTUM, nesterov=True),
        optax.chain(trace(MOMENTUM_OPTAX, nesterov=True), optax.scale_by_learning_rate(0.1)),
    ),
    "sgd all scheduled": (
        of(SGD, LR, MOMENTUM, DAMPENING, DECAY),
        behind_decay(
            undamped(DAMPENING_OPTAX),
            trace(MOMENTUM_OPTAX),
            optax.scale_by_learning_rate(LR_OPTAX),
        ),
    ),
    "rmsprop": (RMSProp, optax.rmsprop(0.1)),
    "rmsprop rho epsilon": (of(RMSProp, rho=0.5, epsilon=1e-2), optax.rmsprop(0.1, 0.5, 1e-2)),
    "rmsprop all scheduled": (
        of(RMSProp, LR, BETA_1, EPSILON, DECAY),
        behind_decay(rmsprop(LR_OPTAX, BETA_1_OPTAX, EPSILON_OPTAX)),
    ),
    "adagrad": (AdaGrad, optax.adagrad(0.1, 0.0, 1e-8)),
    "adagrad all scheduled": (
        of(AdaGrad, LR, EPSILON, DECAY),
        behind_decay(adagrad(LR_OPTAX, 0.0, EPSILON_OPTAX)),
    ),
    "adam": (Adam, optax.adam(0.1)),
    "adam betas epsilon": (
        of(Adam, beta_1=0.8, beta_2=0.95, epsilon=1e-2),
        optax.adam(0.1, 0.8, 0.95, 1e-2),
    ),
    "adam decay": (
        of(Adam, STAIRS, weight_decay=0.01),
        optax.chain(decayed(0.01), optax.adam(STAIRS_OPTAX)),
    ),
    "adam all scheduled": (
        of(Adam, LR, BETA_1, BETA_2, EPSILON, DECAY),
        behind_decay(adam(LR_OPTAX, BETA_1_OPTAX, BETA_2_OPTAX, EPSILON_OPTAX)),
    ),
}
# Decay is added to a gradient before all else.
CASES |= {
    f"{name} decay": (of(make, weight_decay=0.01), optax.chain(decayed(0.01), tx))
    for name, (make, tx) in CASES.items()
    if name in {"sgd", "sgd momentum", "sgd nesterov", "sgd dampening", "adagrad", "rmsprop"}
}
SCHEDULED = [name for name in CASES if name.endswith("all scheduled")]


def normal(seed, *lead):
    """Params or a run of gradients; one entry never gets a gradient."""
    random = np.random.default_rng(seed)
    kernel, bias = random.normal(size=(*lead, 3, 4)), random.normal(size=(*lead, 4))
    if lead:
        bias[..., 0] = 0.0
    return {"kernel": kernel, "bias": bias}


def singa_run(optimizer, params, grads):
    """The params after each step."""
    history = []
    for step in range(len(grads["bias"])):
        params = optimizer(params, {name: g[step] for name, g in grads.items()})
        history.append(params)
    return {name: np.stack([params[name] for params in history]) for name in params}


@functools.cache
def runner(tx):
    def step(carry, grads):
        updates, state = tx.update(grads, carry[1], carry[0])
        params = optax.apply_updates(carry[0], updates)
        return (params, state), params

    return jax.jit(lambda carry, grads: jax.lax.scan(step, carry, grads))


def optax_run(tx, params, state, grads):
    """The params after each step, and the last params and state; ``scan`` wants constant types."""
    (params, state), history = runner(tx)((params, state), grads)
    return history, params, state


def assert_near(actual, expected, tolerance):
    """Relative to the largest param of the leaf."""
    for name, x in expected.items():
        largest = abs(x).max()
        np.testing.assert_allclose(actual[name] / largest, x / largest, rtol=0, atol=tolerance)


def cast(tree, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


TOLERANCE = {
    "float64": lambda name: 1e-12,
    # Optax computes 1 - 0.999**t in f32, which is good to 1e-5 at t = 1.
    "float32": lambda name: 5e-6 if name in ("adam", "adam decay") else 1e-6,
}


@functools.cache
def optax_histories(dtype):
    """Of all cases, in one program."""
    tx = optax.partition(
        {name: tx for name, (_, tx) in CASES.items()}, {name: name for name in CASES}
    )
    with jax.enable_x64(dtype == "float64"):
        params = cast({name: normal(0) for name in CASES}, dtype)
        grads = cast({name: normal(1, STEPS) for name in CASES}, dtype)
        history, _, _ = optax_run(tx, params, tx.init(params), grads)
        assert all(x.dtype == dtype for x in jax.tree.leaves(history))
        return jax.device_get(history)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_optax_goes_singas_way(name, dtype):
    expected = singa_run(CASES[name][0](), normal(0), normal(1, STEPS))
    assert_near(optax_histories(dtype)[name], expected, TOLERANCE[dtype](name))


def test_singas_own_numbers():
    """What its unit tests expect of one step, held against the classes above."""
    p, g = {"w": np.array([0.1, 1.0])}, {"w": np.array([0.1, 0.1])}
    expected = {
        "sgd": (SGD(0.1), p["w"] - 0.1 * g["w"]),
        "rmsprop": (RMSProp(0.1), p["w"] - 0.1 * g["w"] / np.sqrt(0.1 * g["w"] ** 2 + 1e-8)),
        "adagrad": (AdaGrad(0.1), p["w"] - 0.1 * g["w"] / np.sqrt(g["w"] ** 2 + 1e-8)),
        # Both corrections undo the betas at the first step.
        "adam": (Adam(0.1), p["w"] - 0.1 * g["w"] / (g["w"] + 1e-8)),
    }
    for name, (optimizer, after) in expected.items():
        np.testing.assert_allclose(optimizer(p, g)["w"], after, rtol=0, atol=1e-15, err_msg=name)


@pytest.mark.parametrize("staircase", [False, True])
def test_schedules_are_singas(staircase):
    singa = exponential_decay(0.1, 2, 0.5, staircase)
    schedule = jax.jit(optax.exponential_decay(0.1, 2, 0.5, staircase=staircase))
    for step in range(STEPS):
        np.testing.assert_allclose(schedule(jnp.asarray(step)), singa(step), rtol=1e-6)
        if staircase:
            assert singa(step) == 0.1 * 0.5 ** (step // 2)
        assert optax.constant_schedule(0.1)(step) == constant(0.1)(step)


def test_a_rate_of_zero_is_a_constant_in_optax():
    assert [exponential_decay(0.1, 2, 0.0)(step) for step in range(3)] == [0.1, 0.0, 0.0]
    assert [optax.exponential_decay(0.1, 2, 0.0)(step) for step in range(3)] == [0.1] * 3


def test_dampening_holds_from_the_first_step():
    """PyTorch's starts at the second; then it would be no scaling of the gradients."""
    grads = normal(1, 1)
    after = singa_run(SGD(1.0, 0.9, 0.25), normal(0), grads)
    for name, p in normal(0).items():
        np.testing.assert_allclose(after[name][0], p - 0.75 * grads[name][0], rtol=1e-15)


@pytest.mark.parametrize(
    ("singa", "ignored", "tx"),
    [
        (SGD(weight_decay=warmup), SGD(), optax.chain(decayed(warmup), optax.sgd(0.1))),
        (SGD(momentum=warmup), SGD(), optax.inject_hyperparams(optax.sgd)(0.1, warmup)),
    ],
    ids=["weight decay", "momentum"],
)
def test_a_schedule_may_start_at_zero(singa, ignored, tx):
    """SINGA looks at its first value, and never applies one that starts at zero."""
    params, grads = normal(0), normal(1, STEPS)
    theirs = singa_run(singa, params, grads)
    assert all((theirs[name] == x).all() for name, x in singa_run(ignored, params, grads).items())
    params, grads = cast((params, grads), "float32")
    ours, _, _ = optax_run(tx, params, tx.init(params), grads)
    for name, x in theirs.items():
        np.testing.assert_allclose(ours[name][0], x[0], rtol=1e-6)
        assert abs(ours[name][-1] - x[-1]).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(SCHEDULED, ["float16", "bfloat16"] * 2, strict=True))
)
def test_half_params_and_schedules_go_together_behind_a_gate(name, dtype):
    """A number out of a schedule is f32, and Optax alone widens the moments at the first step."""
    tx = CASES[name][1]
    params, grads = cast((normal(0), normal(1, STEPS)), dtype)
    with pytest.raises(TypeError, match="equal types"):
        optax_run(tx, params, tx.init(params), grads)
    gated = boostax.static_loss_scale(tx, 1.0)
    history, _, _ = optax_run(gated, params, gated.init(params), grads)
    assert all(x.dtype == dtype for x in jax.tree.leaves(history))


# get_states and set_states.

FIELDS = {
    "moments": "trace",
    "running_average": "nu",
    "history": "sum_of_squares",
    "m": "mu",
    "v": "nu",
    "step_counter": "count",
}


def cut(grads):
    """Seven steps, and the rest."""
    return {k: g[:7] for k, g in grads.items()}, {k: g[7:] for k, g in grads.items()}


def set_states(state, states):
    """What SINGA's ``get_states`` returned, in an Optax state of dicts of params."""
    values = {FIELDS[name]: value for name, value in states.items()}

    def replace(path, leaf):
        for depth, key in enumerate(path):
            # A field of a NamedTuple; keys of a dict are params and hyper-parameters.
            if isinstance(key, jax.tree_util.GetAttrKey) and key.name in values:
                value = values[key.name]
                for entry in path[depth + 1 :]:
                    value = value[entry.key]
                return jnp.asarray(value, leaf.dtype)
        return leaf

    return jax.tree_util.tree_map_with_path(replace, state)


@pytest.mark.parametrize("name", SCHEDULED)
def test_a_run_of_singas_goes_on_in_optax(name):
    """Its states are moments by the params' names, and one counter for all schedules."""
    singa, tx = CASES[name]
    optimizer, (early, late) = singa(), cut(normal(1, STEPS))
    middle = {k: x[-1] for k, x in singa_run(optimizer, normal(0), early).items()}
    states = optimizer.get_states()
    expected = singa_run(optimizer, middle, late)
    with jax.enable_x64(True):
        params, late = cast((middle, late), "float64")
        state = set_states(tx.init(params), states)
        counters = [value for _, value in tree_utils.tree_get_all_with_path(state, "count")]
        assert all(int(counter) == 7 for counter in counters)
        history, _, _ = optax_run(tx, params, state, late)
        assert_near(jax.device_get(history), expected, 1e-12)


def test_optax_sets_only_the_outermost_field_of_a_name():
    """Why ``set_states`` above is not ``tree_set``: it leaves nested counters alone, silently."""
    tx, params = CASES["adam all scheduled"][1], cast(normal(0), "float32")
    state = tree_utils.tree_set(tx.init(params), count=jnp.int32(7))
    counters = [int(value) for _, value in tree_utils.tree_get_all_with_path(state, "count")]
    assert 0 in counters and 7 in counters
