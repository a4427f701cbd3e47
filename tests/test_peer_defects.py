"""Defects that were met in other libraries: each test shows one, and that boostax has it not."""

import functools

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training import dynamic_scale
from jax.sharding import PartitionSpec as P

import boostax
from boostax.testing import drawn

inf, nan = float("inf"), float("nan")


def run(tx, grads, params=0.0, dtype=jnp.float32):
    """Params after each of a list of scalar gradients, and the last state."""
    params = jnp.asarray(params, dtype)
    state, history = tx.init(params), []
    step = jax.jit(functools.partial(boostax.apply_gradients, drawn(tx)))
    for grad in grads:
        params, state = step(jnp.asarray(grad, dtype), state, params)
        history.append(float(params))
    return history, state


# Loss scaling.


def test_a_growth_step_makes_no_jump():
    """Dividing by the scale after its update halves (doubles) every growth (back-off) step."""
    tx = boostax.dynamic_loss_scale(optax.sgd(1.0), growth_interval=2, init_scale=4.0)
    params, state, moved = jnp.float32(0.0), tx.init(jnp.float32(0.0)), []
    f = boostax.value_and_grad(lambda w, bad: w * jnp.where(bad, jnp.inf, 1.0))
    for bad in (False, False, False, False, True, False):
        _, grads = f(params, state, bad)
        new, state = boostax.apply_gradients(tx, grads, state, params)
        moved.append(float(params - new))
        params = new
    assert moved == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    assert int(state.growths) == 2 and int(state.backoffs) == 1


def test_configuration_survives_jit():
    """jmp drops its smallest scale when the state is flattened."""
    peer = jmp.DynamicLossScale(jnp.float32(2.0), min_loss_scale=jnp.float32(2.0))
    assert float(jax.jit(lambda x: x)(peer).min_loss_scale) == 1.0
    tx = boostax.dynamic_loss_scale(optax.sgd(0.1), init_scale=2.0, min_scale=2.0)
    _, state = run(tx, [inf] * 3)
    assert float(state.scale) == 2.0 and int(state.floor_hits) == 3


@pytest.mark.parametrize(
    "use",
    [
        lambda state: jax.jit(lambda x: x).lower(state),
        lambda state: jax.tree.map(lambda _: None, state),
        lambda state: jax.tree.map(lambda _: P(), state),
        lambda state: jax.tree.map(lambda x: x.sharding, state),
    ],
    ids=["lower", "to None", "to PartitionSpec", "to shardings"],
)
def test_states_are_plain_trees(use):
    """jmp computes on the fields of its state whenever it is rebuilt."""
    with pytest.raises((TypeError, AttributeError)):
        use(jmp.DynamicLossScale(jnp.float32(2.0**15)))
    scaler = boostax.dynamic_loss_scale(optax.adam(0.1))
    for tx in (scaler, boostax.accumulate(scaler, 3, normalize="weight")):
        use(tx.init({"w": jnp.zeros(3)}))


def test_scales_are_f32_whatever_the_params():
    """jmp's adjust raises for an f16 scale, and a scale of 2**16 is infinite in f16."""
    with pytest.raises(TypeError):
        jmp.DynamicLossScale(jnp.float16(2.0**15)).adjust(jnp.asarray(False))
    tx = boostax.dynamic_loss_scale(optax.sgd(0.1), init_scale=jnp.float16(2.0**15))
    _, state = run(tx, [1.0, inf], dtype=jnp.float16)
    assert state.scale.dtype == jnp.float32 and float(state.scale) == 2.0**14


def test_the_growth_interval_is_exact():
    """Flax grows every interval + 1 steps."""
    peer = dynamic_scale.DynamicScale(growth_interval=3)
    step = jax.jit(lambda s: s.value_and_grad(lambda w: w)(jnp.float32(1.0))[0])
    peer_scales = []
    for _ in range(8):
        peer = step(peer)
        peer_scales.append(float(peer.scale))
    grew = [t + 1 for t in range(1, 8) if peer_scales[t] > peer_scales[t - 1]]
    assert grew == [4, 8]
    tx = boostax.dynamic_loss_scale(optax.sgd(0.1), growth_interval=3)
    for steps, growths in ((2, 0), (3, 1), (5, 1), (6, 2), (9, 3)):
        assert int(run(tx, [1.0] * steps)[1].growths) == growths


def test_the_step_is_traced_once():
    """Flax's scale starts as a Python number: its second step compiles again."""

    def traces(state, step):
        count = 0

        @jax.jit
        def counted(state):
            nonlocal count
            count += 1
            return step(state)

        for _ in range(3):
            state = counted(state)
        return count

    peer = dynamic_scale.DynamicScale()
    assert traces(peer, lambda s: s.value_and_grad(lambda w: w)(jnp.float32(1.0))[0]) == 2
    scaler = boostax.dynamic_loss_scale(optax.adam(0.1))
    for tx in (scaler, boostax.accumulate(scaler, 2), boostax.static_loss_scale(scaler, 2.0)):
        params = {"w": jnp.zeros(3), "b": jnp.float16(0.0)}
        step = lambda carry, tx=tx: boostax.apply_gradients(drawn(tx), carry[0], carry[1], carry[0])  # noqa: E731
        assert traces((params, tx.init(params)), step) == 1


def test_the_scale_never_becomes_infinite():
    """Flax's once ran to infinity and stuck there."""
    largest = float(jnp.finfo(jnp.float32).max)
    options = {"growth_interval": 1, "max_scale": largest, "growth_factor": 2.0**30}
    tx = boostax.dynamic_loss_scale(optax.sgd(0.0), **options)
    assert float(run(tx, [0.0] * 20)[1].scale) == 2.0**106


def test_the_scale_stays_a_power_of_two_at_its_limits():
    """A cap at 65504, the largest f16 number, makes every later unscaling inexact."""
    options = {"growth_interval": 1, "max_scale": 65504.0, "init_scale": 1.0}
    tx = boostax.dynamic_loss_scale(optax.sgd(0.0), **options)
    assert float(run(tx, [0.0] * 20)[1].scale) == 2.0**15


def test_finite_gradients_whose_squares_overflow_are_skipped():
    """apply_if_finite lets 1e25 through, and Adam's second moment is infinite for good."""
    _, state = run(optax.apply_if_finite(optax.adam(0.1), 5), [1e25])
    assert not np.isfinite(state.inner_state[0].nu)
    adam = optax.adam(0.1)
    for tx in (boostax.dynamic_loss_scale(adam), boostax.static_loss_scale(adam, 1.0)):
        history, state = run(tx, [1e30, 0.0])
        assert int(state.skipped_steps) == 1
        assert float(state.inner_state[0].nu) == 0.0 and history == [0.0, 0.0]


def test_it_never_gives_in():
    """After max_consecutive_errors apply_if_finite writes the infinity into the params."""
    assert run(optax.apply_if_finite(optax.sgd(1.0), 3), [inf] * 5)[0][-1] == -inf
    for tx in (
        boostax.dynamic_loss_scale(optax.sgd(1.0)),
        boostax.static_loss_scale(optax.sgd(1.0), 1.0),
        boostax.accumulate(boostax.dynamic_loss_scale(optax.sgd(1.0)), 1),
    ):
        assert set(run(tx, [inf, nan] * 600)[0]) == {0.0}


@pytest.fixture
def one_bad_device(mesh):
    """Params and state on each of 8 replicas after a step with a NaN on device 3."""

    def run_step(tx):
        def step(params, grads):
            local = boostax.train.local_params(params, "data")
            result = boostax.apply_gradients(drawn(tx), grads[0], tx.init(local), local)
            return jax.tree.map(lambda x: x[None], result)

        step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
        return jax.device_get(jax.jit(step)(jnp.ones(3), jnp.ones((8, 3)).at[3, 1].set(nan)))

    return run_step


def test_one_bad_device_makes_all_skip(one_bad_device):
    """A local decision leaves replicas that differ for good."""
    params, _ = one_bad_device(optax.apply_if_finite(optax.sgd(0.1), 5))
    assert len(np.unique(params)) == 2
    inner = optax.chain(boostax.all_reduce("data"), optax.adam(0.1))
    scaled = functools.partial(boostax.dynamic_loss_scale, axis_name="data")
    window = functools.partial(boostax.accumulate, every=1, axis_name="data")
    fixed = boostax.static_loss_scale(inner, 1.0, axis_name="data")
    for tx in (scaled(inner), fixed, scaled(window(inner)), window(scaled(inner))):
        params, state = one_bad_device(tx)
        np.testing.assert_array_equal(params, np.ones((8, 3)))
        assert not boostax.metrics(state)["last_finite"].any()
        for replicas in jax.tree.leaves(state):
            np.testing.assert_array_equal(replicas, np.stack([replicas[0]] * 8))


# Accumulation.

WINDOWS = {
    "drops the micro-batch": lambda opt: boostax.static_loss_scale(boostax.accumulate(opt, 2), 1.0),
    "drops the window": lambda opt: boostax.accumulate(boostax.static_loss_scale(opt, 1.0), 2),
}


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_bad_micro_batch_does_not_poison_later_windows(bad):
    """MultiSteps resets by a multiplication: NaN * 0 is NaN for good, in every later update."""
    grads = [1.0, bad, 1.0, 1.0, 1.0, 1.0]
    for inner in (optax.sgd(1.0), optax.apply_if_finite(optax.sgd(1.0), 5)):
        _, peer = run(optax.MultiSteps(inner, 2).gradient_transformation(), grads)
        assert np.isnan(peer.acc_grads)
    drops_one, drops_all = (run(window(optax.sgd(1.0)), grads)[0] for window in WINDOWS.values())
    assert drops_one == [0, 0, -1, -1, -2, -2]
    assert drops_all == [0, 0, 0, -1, -1, -2]


def test_the_scale_recovers_from_one_bad_window():
    """With MultiSteps around a scaler it halves at every window from then on."""
    scaler = boostax.dynamic_loss_scale(optax.sgd(0.0), init_scale=1024.0, growth_interval=3)
    grads = [nan] + [1.0] * 7
    _, peer = run(optax.MultiSteps(scaler, 2).gradient_transformation(), grads)
    assert float(boostax.precision.loss_scale(peer)) == 64.0
    _, state = run(boostax.accumulate(scaler, 2), grads)
    assert (
        float(boostax.precision.loss_scale(state)) == 1024.0
        and int(state.inner_state.backoffs) == 1
    )


def test_extra_arguments_pass_through_a_chain():
    """chain(MultiSteps(...).gradient_transformation()) loses them without a word."""
    polyak = optax.polyak_sgd(1.0)
    grads = params = jnp.ones(3)
    peer = optax.chain(optax.MultiSteps(polyak, 1).gradient_transformation())
    with pytest.raises(TypeError, match="value"):
        peer.update(grads, peer.init(params), params, value=jnp.float32(1.0))
    scaler = boostax.static_loss_scale(polyak, 1.0)
    for inner in (boostax.accumulate(polyak, 1), boostax.accumulate(scaler, 2), scaler):
        tx = optax.chain(inner, optax.identity())
        tx.update(grads, tx.init(params), params, value=jnp.float32(1.0), unknown="passes")


@pytest.mark.parametrize("two", [np.int64(2), jnp.int32(2), np.uint8(2), lambda step: 2])
def test_any_integer_is_a_window_length(two):
    """MultiSteps takes a NumPy or JAX integer for a schedule and calls it."""
    if not callable(two):
        with pytest.raises(TypeError, match="callable"):
            run(optax.MultiSteps(optax.sgd(1.0), two).gradient_transformation(), [1.0])
    assert run(boostax.accumulate(optax.sgd(1.0), two), [1.0, 3.0])[0] == [0.0, -2.0]


def test_a_held_optimizer_does_not_coast():
    """Zero gradients do not hold Adam still: its momentum moves on."""
    moved = run(optax.adam(0.1), [1.0] + [0.0] * 5)[0]
    assert abs(moved[-1] - moved[0]) > 0.2
    held = [1.0] + [nan] * 5
    for tx in (
        boostax.static_loss_scale(optax.adamw(0.1), 1.0),
        boostax.accumulate(optax.adamw(0.1), lambda step: 1 + 9 * step),
    ):
        history, _ = run(tx, held, params=1.0)
        assert set(history[1:]) == {history[0]} and history[0] != 1.0


def test_f16_params_and_zero_gradients():
    """Adam's epsilon of 1e-8 is zero in f16, and 0/0 its update."""
    assert np.isnan(run(optax.adam(0.1), [0.0], dtype=jnp.float16)[0][0])
    for window in (lambda opt: boostax.dynamic_loss_scale(opt), *WINDOWS.values()):
        assert run(window(optax.adam(0.1)), [0.0] * 4, 1.0, jnp.float16)[0] == [1.0] * 4


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_low_params_accumulate_into_adam(window, dtype):
    """The types of the branches once clashed; here params keep theirs and moments are f32."""
    tx = window(optax.adamw(0.1))
    params = {"w": jnp.ones(3, dtype)}
    state, step = tx.init(params), jax.jit(functools.partial(boostax.apply_gradients, tx))
    for _ in range(4):
        types = jax.tree.map(jnp.result_type, (params, state))
        params, state = step({"w": jnp.ones(3, dtype)}, state, params)
        assert jax.tree.map(jnp.result_type, (params, state)) == types
    assert params["w"].dtype == dtype and float(params["w"][0]) < 1.0
    moments = [x for x in jax.tree.leaves(state) if x.shape]
    assert {x.dtype for x in moments} == {jnp.dtype("float32")}


def test_the_sum_and_the_params_reach_the_inner_optimizer_in_f32():
    """MultiSteps casts the f32 mean back to bf16: the small micro-gradients vanish."""

    def decay(updates, state, params=None):
        del state
        decayed = updates + 0.1 * params
        return decayed, {"seen": jnp.asarray(decayed, jnp.float32)}

    inner = optax.GradientTransformation(lambda _: {"seen": jnp.float32(0.0)}, decay)
    grads = [1.0] + [2.0**-9] * 3
    ours = boostax.accumulate(inner, 4, normalize="sum")
    peer = optax.MultiSteps(inner, 4, use_grad_mean=False)
    seen = []
    for tx in (peer.gradient_transformation(), ours):
        params = jnp.bfloat16(3.0)
        state = tx.init(params)
        for grad in grads:
            updates, state = tx.update(jnp.bfloat16(grad), state, params)
        assert updates.dtype == jnp.bfloat16
        seen.append(optax.tree.get(state, "seen"))
    np.testing.assert_allclose(seen[1], 1.3 + 3 * 2.0**-9, rtol=2e-7)
    assert abs(float(seen[0]) - float(seen[1])) > 2.0**-9
