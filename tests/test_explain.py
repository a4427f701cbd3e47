"""What ``explain`` says of a chain: its parts, what they keep and send, and what is wrong in it."""

import functools
import itertools
import json
import re
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import boostax
from boostax.config.auto import auto
from boostax.order.parts import read, role, rows

AXIS = {"axis_name": "data"}
PARAMS = {
    "a": {"kernel": jnp.full((16, 24), 0.1), "bias": jnp.zeros(24)},
    "b": {"kernel": jnp.full((24, 8), 0.1), "bias": jnp.zeros(8)},
}
GROUPS = boostax.freeze.prefix_groups(PARAMS, 2)

adam, sgd, chain = optax.adam(1e-3), optax.sgd(0.1), optax.chain
moments = optax.scale_by_adam()
clip, decay = optax.clip_by_global_norm(1.0), optax.add_decayed_weights(1e-2)
noise = optax.add_noise(0.1, 0.55, key=0)
mean, adasum = boostax.all_reduce("data"), boostax.adasum("data")
delta = boostax.reduce.adasum_delta(adam, axis_name="data")
top_k = boostax.top_k_reduce("data", 0.1)
record = boostax.subspace.record_trajectory(4, every=1)
frozen = boostax.scheduled_freeze(sgd, GROUPS, [0, 1])
half = {"a": "stays", "b": "goes"}
falling = optax.linear_schedule(1.0, 0.1, 9)
basis = boostax.subspace.random_basis(PARAMS, 3)
finish = boostax.dim_reduce(basis)


def loss(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(x**2)


def scaled(*parts, **options):
    return boostax.dynamic_loss_scale(chain(*parts), **options)


def ends(*residual):
    return boostax.dim_reduce(basis, residual=chain(*residual), axis_name="data")


def window(*parts, **options):
    return boostax.accumulate(chain(*parts), 4, **options)


def multi(*parts):
    return optax.MultiSteps(chain(*parts), 4).gradient_transformation()


def if_finite(*parts):
    return optax.apply_if_finite(chain(*parts), 3)


def sides(stays):
    return optax.partition({"stays": stays, "goes": sgd}, {"a": "stays", "b": "goes"})


def odd(tx):
    return optax.conditionally_transform(tx, lambda step: step % 2 == 0)


def masked(tx):
    return optax.masked(tx, {"a": True, "b": False})


compared = boostax.precision.check_replicas
inject, trace = optax.inject_hyperparams, optax.trace(0.9)
injected = inject(optax.sgd)(learning_rate=falling)
step_down, falls = optax.scale_by_learning_rate, scaled(optax.adam(falling))
by_schedule, rates = chain(scaled(moments), step_down(falling)), inject(step_down)(falling)
scalers = inject(lambda rate: scaled(optax.sgd(rate)))(falling)
windows = inject(lambda rate: window(optax.sgd(rate)))(rate=falling)
centralize, static = boostax.centralize_gradients(), boostax.static_loss_scale(adam, 8.0)
free = functools.partial(optax.contrib.schedule_free, learning_rate=0.1)
mechanize, sam = optax.contrib.mechanize, optax.contrib.sam
local = functools.partial(boostax.reduce.local_updates, axis_name="data", every=4)
deltas = functools.partial(boostax.reduce.adasum_delta, axis_name="data")
freeze = functools.partial(boostax.scheduled_freeze, groups=GROUPS, schedule=[0, 1])
lossy = boostax.top_k_reduce("data", 0.1, error_feedback=False)

averaged, freezes = window(mean, adam, **AXIS), freeze(scaled(sgd))
decayed, clipped = chain(adam, decay), chain(adam, clip)
adamw, zero = optax.adamw(0.001), optax.set_to_zero()

# Short names of those that the findings name.
NAMES = {"scaler": "dynamic_loss_scale", "clip": "clip_by_global_norm", "mean": "all_reduce"}
NAMES |= {"decay": "add_decayed_weights", "top_k": "top_k_reduce", "recorder": "record_trajectory"}
NAMES |= {"centralize": "centralize_gradients", "moments": "scale_by_adam", "delta": "adasum_delta"}
# By what the fix says of the two that are named: the name, the wrong chain, the same chain fixed.
WRONG = {
    "Put {1} inside {0}": [
        ("scaler after clip", chain(clip, scaled(adam)), scaled(clip, adam)),
        ("scaler after moments", chain(moments, scaled(sgd)), scaled(adam)),
        ("scaler after decay", chain(decay, scaled(adam)), scaled(decay, adam)),
        ("scaler after add_noise", chain(noise, scaled(adam)), scaled(noise, adam)),
        ("scaler after mean", chain(mean, scaled(adam)), scaled(mean, adam, **AXIS)),
        ("scaler after top_k", chain(top_k, scaled(adam)), scaled(top_k, adam, **AXIS)),
        ("accumulate after clip", chain(clip, window(adam)), window(clip, adam)),
        ("accumulate after trace", chain(trace, window(sgd)), window(trace, sgd)),
        ("accumulate after mean", chain(mean, window(adam)), window(mean, adam, **AXIS)),
        ("MultiSteps after add_noise", chain(noise, multi(adam)), multi(noise, adam)),
    ],
    "Put {0} inside {1}": [
        ("decay after accumulate", chain(window(adam), decay), window(decay, adam)),
        ("moments after scaler", chain(scaled(optax.identity()), adam), scaled(adam)),
        ("scale_by_schedule after scaler", by_schedule, falls),
        ("add_noise after accumulate", chain(window(sgd), noise), window(noise, sgd)),
        ("inject_hyperparams after scaler", chain(scaled(moments), rates), falls),
    ],
    "Put {0} first inside {1}": [
        ("recorder after accumulate", chain(window(adam), record), window(record, adam)),
        ("mean after scaler", chain(scaled(adam), mean), scaled(mean, adam, **AXIS)),
    ],
    "Put {1} behind {0}": [
        ("mean after clip", chain(clip, mean, adam), chain(mean, clip, adam)),
        ("top_k after centralize", chain(centralize, top_k, sgd), chain(top_k, centralize, sgd)),
        ("adasum after add_noise", chain(noise, adasum, sgd), chain(adasum, noise, sgd)),
    ],
    "Put {0} before {1}": [
        ("mean after moments", chain(adam, mean), chain(mean, adam)),
        ("centralize after moments", chain(adam, centralize), chain(centralize, adam)),
    ],
    "Leave {1} out": [
        ("scaler after zero_nans", chain(optax.zero_nans(), scaled(adam)), scaled(adam)),
        ("adasum after mean", chain(mean, adasum, adam), chain(adasum, adam)),
        ("delta after mean", chain(mean, delta), delta),
        ("scaler inside apply_if_finite", if_finite(scaled(adam)), scaled(adam)),
    ],
    "Leave {0} out": [
        ("scale after dim_reduce", chain(finish, optax.scale(0.1)), finish),
        ("apply_if_finite inside scaler", scaled(if_finite(adam)), scaled(adam)),
        ("mean inside delta", deltas(chain(mean, adam)), delta),
        ("mean inside local_updates", local(chain(mean, sgd)), local(sgd)),
    ],
    "Leave one of them out": [
        ("top_k after mean", chain(mean, top_k, adam), chain(top_k, adam)),
        ("static_loss_scale inside scaler", scaled(static), scaled(adam)),
        ("MultiSteps inside accumulate", window(multi(adam)), window(adam)),
    ],
    "Put {0} around {1}": [
        ("scaler inside delta", deltas(scaled(adam)), boostax.dynamic_loss_scale(delta, **AXIS)),
        ("scaler inside inject_hyperparams", scalers, scaled(injected)),
        ("scaler inside dim_reduce", ends(scaled(adam)), scaled(ends(adam), **AXIS)),
        ("accumulate inside inject_hyperparams", windows, window(injected)),
        ("scaler inside schedule_free", free(scaled(sgd)), scaled(free(sgd))),
        ("scaler inside mechanize", mechanize(scaled(sgd)), scaled(mechanize(sgd))),
        ("scaler inside sam", sam(scaled(sgd), sgd), scaled(sam(sgd, sgd))),
        ("accumulate inside sam", sam(sgd, window(sgd)), window(sam(sgd, sgd))),
        ("accumulate inside schedule_free", free(window(sgd)), window(free(sgd))),
        ("accumulate inside mechanize", mechanize(window(sgd)), window(mechanize(sgd))),
        ("scaler in partition", sides(scaled(sgd)), scaled(sides(sgd))),
        ("accumulate in masked", masked(window(sgd)), window(masked(sgd))),
        ("scaler inside conditionally_transform", odd(scaled(sgd)), scaled(odd(sgd))),
        ("check_replicas inside accumulate", window(compared(sgd)), compared(window(sgd))),
        ("check_replicas inside scaler", scaled(compared(sgd)), compared(scaled(sgd))),
    ],
    "Pass axis_name=": [
        ("scaler without the axis 'data'", scaled(mean, adam), scaled(mean, adam, **AXIS)),
        ("accumulate without the axis 'data'", window(adasum, adam), window(adasum, adam, **AXIS)),
    ],
    "Put {0} before the learning rate": [("decay after the learning rate", decayed, adamw)],
    "Put {0} before the optimizer": [("clip after the learning rate", clipped, chain(clip, adam))],
    "or pass {1} as residual=": [
        ("dim_reduce after clip", chain(clip, finish), finish),
        ("dim_reduce after adasum", chain(adasum, finish), ends(adasum, sgd)),
    ],
    "Use boostax.accumulate": [("mean inside MultiSteps", multi(mean, adam), averaged)],
    "Put {0} outermost": [("scheduled_freeze inside the chain", scaled(frozen), freezes)],
    "boostax.scheduled_freeze": [
        ("set_to_zero in partition", sides(zero), freeze(sgd)),
        ("set_to_zero in masked", chain(sgd, masked(zero)), freeze(sgd)),
    ],
    "Leave one learning rate out": [("the whole chain", chain(adam, sgd), adam)],
    "End the chain with optax.scale_by_learning_rate": [("the whole chain", moments, adam)],
    "error_feedback=True": [("top_k without error feedback", chain(lossy, sgd), chain(top_k, sgd))],
}


def case(fix, said, wrong, right):
    what = " ".join(NAMES.get(word, word) for word in said.split(" "))
    names = re.split(" after | inside | in ", what)
    return pytest.param(wrong, right, what, fix.format(*names), id=said)


CASES = [case(fix, *each) for fix, listed in WRONG.items() for each in listed]


def found_in(tx):
    return boostax.order.findings.findings(rows(read(tx)))


@pytest.mark.parametrize(("wrong", "right", "what", "fix"), CASES)
def test_a_wrong_order_is_named_with_its_fix_and_the_fixed_is_not(wrong, right, what, fix):
    (mine,) = (finding for finding in found_in(wrong) if finding.what == what)
    assert fix in mine.fix and mine.why.endswith(".") and found_in(right) == []
    found = found_in(wrong)
    assert list(boostax.explain(wrong, PARAMS).findings) == found
    # A step refuses what is certainly wrong, and warns once of the rest.
    if certain := [finding for finding in found if finding.certain]:
        with pytest.raises(ValueError, match=re.escape(str(certain[0]))):
            boostax.make_train_step(loss, wrong)
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step = boostax.make_train_step(loss, wrong)
    assert [str(each.message) for each in said] == [f"make_train_step: {x}" for x in found]
    assert {each.filename for each in said} == {__file__}
    assert list(boostax.explain(step, PARAMS).findings) == found


LACKING = {
    "all_reduce inside MultiSteps": multi(mean, adam),
    "no reduction over the axis 'data' of the step, but over 'other'": boostax.all_reduce("other"),
}


@pytest.mark.parametrize("lack", LACKING)
def test_a_step_whose_replicas_would_part_or_hang_is_refused(mesh, lack):
    with pytest.raises(ValueError, match="make_train_step: tx must be a chain whose ") as error:
        boostax.make_train_step(loss, LACKING[lack], mesh=mesh, **AXIS)
    assert f", got {lack}: " in str(error.value)


def test_a_step_whose_chain_cannot_be_read_must_reduce_too(mesh):
    """Without JAX's checking the params of eight replicas parted."""
    pmean = optax.stateless(lambda updates, params: jax.lax.pmean(updates, "data"))
    hidden = optax.GradientTransformation(adam.init, lambda *args: adam.update(*args))
    batch = jnp.ones((16, 16))
    step = boostax.make_train_step(loss, hidden, mesh=mesh, **AXIS)
    said = "params and updates must be the same on all replicas, .* Put a reduction"
    with pytest.raises(ValueError, match=said):
        step(step.init(PARAMS), batch)
    step = boostax.make_train_step(loss, chain(pmean, hidden), mesh=mesh, **AXIS)
    state, reported = step(step.init(PARAMS), batch)
    assert bool(reported["applied"]) and int(state.step) == 1


OPTIMIZERS = (
    "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars "
    "lion nadam nadamw noisy_sgd novograd optimistic_adam_v2 optimistic_gradient_descent "
    "polyak_sgd radam rmsprop rprop sgd sign_sgd signum sm3 yogi"
).split()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optaxs_own_optimizers_are_known_and_right(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # noisy_sgd asks for a key
        tx = getattr(optax, name)(1e-2)
    tx = scaled(mean, clip, tx, **AXIS)
    assert "unknown" not in {role(row.part) for row in rows(read(tx))} and found_in(tx) == []


UNUSUAL = [
    chain(optax.conditionally_transform(clip, lambda s: s % 10 == 0), adam),
    optax.conditionally_mask(chain(mean, adam), lambda s: s % 2 == 0),
    chain(clip, sgd, optax.apply_every(4)),
    chain(optax.scale_by_sign(), mean, optax.scale(-0.1)),
    chain(optax.trace(0.9), boostax.centralize_gradients(), optax.scale(-0.1)),
    chain(clip, top_k, sgd),
    optax.contrib.cocob(),
    optax.contrib.madgrad(1e-2),
    chain(adam, optax.scale_by_schedule((lambda m: lambda count: 1 / (count + m))(10.0))),
    optax.lookahead(adam, 5, 0.5),
    optax.multi_transform({"stays": sgd, "goes": chain(clip, adam)}, half),
    boostax.adasum("data", within="cores"),
    scaled(multi(adam)),
    boostax.dim_reduce(basis, residual=chain(mean, adam), axis_name="data"),
    boostax.scheduled_freeze(adam, GROUPS, [0, 1], moments="per_group"),
]


@pytest.mark.parametrize("tx", UNUSUAL, ids=lambda tx: read(tx).name)
def test_what_is_unusual_but_right_is_not_blamed(tx):
    assert found_in(tx) == []


def test_the_sign_is_followed_through_odd_chains():
    flipped = chain(optax.scale(-1.0), optax.adamw(1e-3))
    assert [finding.what for finding in found_in(flipped)] == ["the whole chain"]
    for wrong in (decay, clip):
        (finding,) = found_in(chain(sgd, wrong))
        assert finding.what.endswith("after the learning rate")
    assert found_in(chain(sgd, sgd))[0].fix == "Leave one learning rate out."


def test_jitted_wrapped_and_bound_updates_are_read_or_unknown():
    transformation = optax.GradientTransformation
    jitted = transformation(adam.init, jax.jit(chain(clip, adam).update))
    names = ["clip_by_global_norm", "scale_by_adam", "scale"]
    assert [row.part.name for row in rows(read(jitted))] == names
    masked = optax.masked(adam, True)

    @functools.wraps(masked.update)
    def logged(*args, **kwargs):
        return masked.update(*args, **kwargs)

    (part,) = boostax.explain(transformation(masked.init, logged), PARAMS).parts
    assert part.role == "unknown"

    class Plain(NamedTuple):
        inner: Any = sgd

        def update(self, *args, **kwargs):
            return self.inner.update(*args, **kwargs)

    (part,) = boostax.explain(transformation(sgd.init, Plain().update), PARAMS).parts
    assert (part.name, part.role) == ("Plain", "unknown")


def test_slow_weights_around_a_gate_are_named():
    """Their params are pairs, which ``PARAMS`` is not."""
    for gated in (scaled(sgd), window(sgd), multi(sgd)):
        (finding,) = found_in(optax.lookahead(gated, 5, 0.5))
        assert finding.what.endswith(" inside lookahead") and finding.certain
    assert found_in(scaled(optax.lookahead(sgd, 5, 0.5))) == []


def test_what_auto_builds_is_right():
    parts = {
        "loss_scale": [None, "dynamic"],
        "accumulate": [None, 2, {"every": 2, "drop": "window"}],
        "clip": [None, 1.0],
        "centralize": [None, True],
        "reduce": ["mean", "adasum", "adasum-delta", {"kind": "top-k", "density": 0.1}, "int8"],
    }
    for values in itertools.product(*parts.values()):
        boost = auto(dict(zip(parts, values, strict=True)))
        assert found_in(boost.optimizer(adam, **AXIS)) == [], values


def test_a_part_of_another_package_is_unknown_and_not_judged():
    def mine():
        """Do something of one's own."""
        return optax.GradientTransformation(lambda p: p, lambda g, s, p=None: (g, s))

    found = boostax.explain(chain(mine(), scaled(adam)), PARAMS)
    part = found.parts[0]
    here = "test_a_part_of_another_package_is_unknown_and_not_judged"
    assert (part.name, part.role) == (here, "unknown")
    assert found.findings == () and "(unknown)" in str(found)
    # What it may do to the sign is unknown too.
    assert found_in(chain(mine(), optax.scale_by_adam())) == []
    parts = boostax.explain(inject(optax.adam)(1e-3), PARAMS).parts
    assert [part.name for part in parts] == ["scale_by_adam", "scale"]

    # Its numbers are in its state, and this one does not do with another in their place.
    asks = optax.inject_hyperparams(lambda rates: optax.sgd(rates[0]))
    (part,) = boostax.explain(asks(jnp.array([0.1, 0.2])), PARAMS).parts
    assert (part.name, part.role) == ("(hidden)", "unknown")


CHAINS = {
    "mean": scaled(mean, optax.adamw(1e-3), **AXIS),
    "window": boostax.dynamic_loss_scale(window(adasum, adam, **AXIS), **AXIS),
    "shards": window(scaled(mean, adam, **AXIS), sums="sharded", **AXIS),
    "top-k": chain(top_k, sgd),
    "int8": chain(boostax.int8_reduce("data"), optax.sgd(0.1, momentum=0.9)),
    "delta": boostax.dynamic_loss_scale(delta, **AXIS),
    "local": boostax.reduce.local_updates(adam, every=3, axis_name="data"),
    "masked": chain(mean, optax.masked(adam, {"a": True, "b": False})),
    "partition": chain(mean, optax.partition({"stays": sgd, "goes": adam}, half)),
    "frozen": boostax.scheduled_freeze(chain(mean, adam), GROUPS, [0, 1]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_right_chain_has_parts_and_no_findings(name):
    found = boostax.explain(CHAINS[name], PARAMS)
    assert found.parts and found.findings == ()


def test_each_part_is_one_deeper_than_the_part_around_it():
    tx = boostax.dynamic_loss_scale(window(top_k, optax.adamw(1e-3), **AXIS), **AXIS)
    parts = {part.name: part for part in boostax.explain(tx, PARAMS).parts}
    depths = [parts[name].depth for name in ("dynamic_loss_scale", "accumulate", "scale")]
    assert depths == [0, 1, 2] and parts["scale"].what.startswith("Scale updates")


@pytest.mark.parametrize(("sums", "said"), [("local", "Sum"), ("sharded", "Reduce gradients")])
def test_a_window_says_where_it_reduces(sums, said):
    tx = boostax.accumulate(chain(mean, adam), 8, sums=sums, **AXIS)
    assert boostax.explain(tx, PARAMS).parts[0].what.startswith(said)


REDUCTIONS = {
    **{"all_reduce": mean, "adasum": adasum, "adasum_delta": delta, "top_k_reduce": top_k},
    **{"local_updates": local(sgd), "by_shape": boostax.by_shape(sgd, axis_name="data")},
    "threshold_reduce": boostax.reduce.threshold_reduce("data", 0.1),
    "int8_reduce": boostax.int8_reduce("data"),
    "partial_average": boostax.reduce.partial_average(sgd, 2, axis_name="data"),
    "dim_reduce": boostax.dim_reduce(basis, axis_name="data"),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_reduction_is_a_part(name):
    first, *_ = boostax.explain(REDUCTIONS[name], PARAMS).parts
    assert (first.name, first.role == "unknown") == (name, False)


def test_params_may_be_shapes_or_numbers(mesh):
    shapes = jax.eval_shape(lambda: PARAMS)
    step = boostax.make_train_step(loss, CHAINS["mean"], mesh=mesh, axis_name="data")
    batch = jnp.ones((16, 16))
    assert boostax.explain(step, shapes, batch) == boostax.explain(step, PARAMS, batch)
    assert boostax.explain(chain(clip, adam), {"a": 1.0}).parts


def test_errors_of_init_are_raised():
    with pytest.raises(ValueError):
        boostax.explain(optax.partition({"stays": sgd}, half), PARAMS)


def test_it_goes_to_json_and_to_a_table():
    found = boostax.explain(CHAINS["window"], PARAMS)
    data = json.loads(json.dumps(found.to_dict()))
    assert [part["name"] for part in data["parts"]][:2] == ["dynamic_loss_scale", "accumulate"]
    table = str(found).split("\n\n")[0].splitlines()
    assert table[0].split()[:2] == ["part", "what"] and table[2].startswith("  accumulate ")


def test_a_step_that_is_explained_is_as_before(mesh):
    step = boostax.make_train_step(loss, CHAINS["frozen"], mesh=mesh, axis_name="data")
    state, batch = step.init(PARAMS), jnp.ones((16, 16))
    boostax.explain(step, state, batch)
    assert step.depths == ()
    state, _ = step(state, batch)
    assert step.depths == (0,) and int(state.step) == 1
