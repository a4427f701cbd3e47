"""Defects that were met in other libraries: each test shows one, and that boostax has it not.

The laws of ``boostax.testing`` hold what they guard for every part. Others trained wrongly without
a word, in public, and are held by tests that show no peer:

- Means over few tokens counted as much as means over many, in micro-batches, on replicas, or were
  divided twice; padding divided by zero.
  ``test_windows_micro_batches_and_replicas_equal_one_big_batch``,
  ``test_a_random_chain_equals_its_reference``.
  https://github.com/ml-explore/mlx-lm/pull/1413
  https://github.com/pytorch/torchtitan/issues/1842
  https://github.com/verl-project/verl-SpeCo/pull/29
  https://github.com/NVIDIA-NeMo/Automodel/issues/3796
- A window cut short was divided by its full length, or dropped.
  ``test_flush_applies_what_a_partial_window_holds``.
  https://github.com/modelscope/ms-swift/pull/10084
  https://github.com/tracel-ai/burn/issues/5695
- A bad micro-batch was left out of the sum and not out of the divisor.
  ``test_a_bad_micro_batch_does_not_poison_later_windows``.
  https://github.com/mflux-community/mflux/pull/447
- A moving average was taken in every micro-batch. ``test_average_params.py``.
  https://github.com/SWivid/F5-TTS/issues/631
- Schedules counted skipped steps. ``skip_inserted_anywhere_never_was``.
  https://github.com/huggingface/accelerate/issues/4242
- bf16 params did not move, and an f16 norm made the factor of a clip zero.
  ``test_training``, ``test_powers_of_two_unscale_bit_for_bit``.
  https://github.com/huggingface/blog/pull/3386
  https://github.com/unslothai/unsloth-zoo/pull/1261
- One key drew the dropout of all micro-batches.
  ``test_keys_differ_by_call_micro_batch_and_replica_and_repeat_by_seed``.
  https://github.com/p-doom/jasmine/pull/239
- The last micro-batch's fp8 history replaced the others'. ``test_carried.py``.
  https://github.com/marin-community/marin/issues/7659
- The norm of a clip counted whole params once for each shard.
  ``test_a_loop_of_ones_own_is_one_device``.
  https://github.com/NVIDIA-NeMo/RL/pull/3788
  https://github.com/mindspore-ai/hyper-parallel/issues/279
"""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training import dynamic_scale
from jax.sharding import PartitionSpec as P
from training import scalars as run

import boostax

inf, nan = float("inf"), float("nan")


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


@pytest.mark.parametrize("use", [lambda _: None, lambda _: P(), lambda x: x.sharding])
def test_states_are_plain_trees(use):
    """jmp computes on the fields of its state whenever it is rebuilt; ours are NamedTuples."""
    with pytest.raises((TypeError, AttributeError)):
        jax.tree.map(use, jmp.DynamicLossScale(jnp.float32(2.0**15)))
    tx = boostax.accumulate(boostax.dynamic_loss_scale(optax.adam(0.1)), 3)
    jax.tree.map(use, tx.init(jnp.ones(3)))


def test_scales_are_f32_whatever_the_params():
    """jmp's adjust raises for an f16 scale, and a scale of 2**16 is infinite in f16."""
    with pytest.raises(TypeError):
        jmp.DynamicLossScale(jnp.float16(2.0**15)).adjust(jnp.asarray(False))
    tx = boostax.dynamic_loss_scale(optax.sgd(0.1), init_scale=jnp.float16(2.0**15))
    _, state = run(tx, [1.0, inf], dtype=jnp.float16)
    assert state.scale.dtype == jnp.float32 and float(state.scale) == 2.0**14


def test_the_growth_interval_is_exact():
    """Flax grows every interval + 1 steps; ``test_loss_scale.py`` holds when ours does."""
    peer = dynamic_scale.DynamicScale(growth_interval=3)
    step = jax.jit(lambda s: s.value_and_grad(lambda w: w)(jnp.float32(1.0))[0])
    peer_scales = []
    for _ in range(8):
        peer = step(peer)
        peer_scales.append(float(peer.scale))
    assert [t + 1 for t in range(1, 8) if peer_scales[t] > peer_scales[t - 1]] == [4, 8]


def test_the_step_is_traced_once():
    """Flax's scale starts as a Python number: its second step compiles again."""
    step = jax.jit(lambda scale: scale.value_and_grad(lambda w: w)(jnp.float32(1.0))[0])
    step(step(dynamic_scale.DynamicScale()))
    assert step._cache_size() == 2


def test_finite_gradients_whose_squares_overflow_are_skipped():
    """apply_if_finite lets 1e25 through, and Adam's second moment is infinite for good."""
    _, state = run(optax.apply_if_finite(optax.adam(0.1), 5), [1e25])
    assert not np.isfinite(state.inner_state[0].nu)
    adam = optax.adam(0.1)
    for tx in (boostax.dynamic_loss_scale(adam), boostax.static_loss_scale(adam, 1.0)):
        history, state = run(tx, [1e30, 0.0])
        assert int(state.skipped) == 1
        assert float(state.inner_state[0].nu) == 0.0 and history == [0.0, 0.0]


def test_it_never_gives_in():
    """After max_consecutive_errors apply_if_finite writes the infinity into the params."""
    assert run(optax.apply_if_finite(optax.sgd(1.0), 3), [inf] * 5)[0][-1] == -inf
    for tx in (
        boostax.dynamic_loss_scale(optax.sgd(1.0)),
        boostax.skip_bad_steps(optax.sgd(1.0)),
        boostax.accumulate(boostax.dynamic_loss_scale(optax.sgd(1.0)), 1),
    ):
        history, state = run(tx, [inf, nan] * 600)
        assert set(history) == {0.0} and boostax.metrics(state)["skipped_in_a_row"] == 1200


def test_one_bad_device_makes_all_skip(mesh):
    """A local decision leaves replicas that differ for good."""
    tx = optax.apply_if_finite(optax.sgd(0.1), 5)
    step = lambda w, g: optax.apply_updates(w, tx.update(g[0], tx.init(w), w)[0])[None]  # noqa: E731
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": False}
    step = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
    assert len(np.unique(step(jnp.ones(3), jnp.ones((8, 3)).at[3].set(nan)))) == 2


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
    assert (drops_one, drops_all) == ([0, 0, -1, -1, -2, -2], [0, 0, 0, -1, -1, -2])


def test_the_scale_recovers_from_one_bad_window():
    """With MultiSteps around a scaler it halves at every window from then on."""
    scaler = boostax.dynamic_loss_scale(optax.sgd(0.0), init_scale=1024.0, growth_interval=3)
    grads = [nan] + [1.0] * 7
    _, peer = run(optax.MultiSteps(scaler, 2).gradient_transformation(), grads)
    assert float(boostax.precision.loss_scale(peer)) == 64.0
    _, state = run(boostax.accumulate(scaler, 2), grads)
    assert float(boostax.precision.loss_scale(state)) == 1024.0
    assert int(state.inner_state.backoffs) == 1


def test_extra_arguments_pass_through_a_chain():
    """chain(MultiSteps(...).gradient_transformation()) loses them without a word."""
    grads = params = jnp.ones(3)
    peer = optax.chain(optax.MultiSteps(optax.polyak_sgd(1.0), 1).gradient_transformation())
    with pytest.raises(TypeError, match="value"):
        peer.update(grads, peer.init(params), params, value=jnp.float32(1.0))


def test_f16_params_and_zero_gradients():
    """Adam's epsilon of 1e-8 is zero in f16, and 0/0 its update."""
    assert np.isnan(run(optax.adam(0.1), [0.0], dtype=jnp.float16)[0][0])
    for window in (boostax.dynamic_loss_scale, *WINDOWS.values()):
        history, state = run(window(optax.adam(0.1)), [0.0] * 4, 1.0, jnp.float16)
        assert history == [1.0] * 4
        # And its moments are f32.
        inexact = {x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)}
        assert inexact == {jnp.dtype("float32")}


def test_frozen_gradients_are_not_in_the_norm():
    """The norm of a clip counted the frozen param, so what was trained was clipped too far.

    https://github.com/AI-Hypercomputer/maxtext/pull/5285
    """
    loss = lambda p, _: 3 * p["a"] + 4 * p["b"]  # noqa: E731
    params, clip = dict.fromkeys("ab", jnp.float32(0.0)), optax.clip_by_global_norm(1.0)
    each = {"frozen": optax.set_to_zero(), "trained": optax.sgd(1.0)}
    peer = optax.chain(clip, optax.partition(each, {"a": "frozen", "b": "trained"}))
    plain, _ = peer.update(jax.grad(loss)(params, ()), peer.init(params))
    tx = boostax.scheduled_freeze(optax.chain(clip, optax.sgd(1.0)), ["a"], 1)
    step = boostax.make_train_step(loss, tx)
    moved = step(step.init(params), jnp.zeros(1))[0].params
    np.testing.assert_allclose([plain["b"], moved["a"], moved["b"]], [-0.8, 0, -1], rtol=1e-6)


KEEPERS = (optax.contrib.dog, optax.contrib.prodigy, lambda _: optax.contrib.cocob())
AROUND = {
    "accumulate": lambda tx: boostax.accumulate(tx, 2),
    "dynamic_loss_scale": boostax.dynamic_loss_scale,
    "average_params": boostax.model.average_params,
    "store": boostax.precision.store,
    "carry": lambda tx: boostax.carry(tx, {"b": "last"}),
    "scheduled_freeze": lambda tx: boostax.scheduled_freeze(tx, ["a"], 0),
    "adasum_delta": lambda tx: boostax.reduce.adasum_delta(tx, axis_name="data"),
    "local_updates": lambda tx: boostax.reduce.local_updates(tx, 2, tx, axis_name="data"),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_first_state_can_be_donated_beside_its_params(keeper, around):
    """Some states of Optax hold the first params themselves, and JAX donates no buffer twice.

    https://github.com/google-deepmind/optax/pull/1059
    https://github.com/google/flax/issues/5461
    """
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    held = jax.tree.leaves((params, AROUND[around](keeper(1.0)).init(params)))
    assert len({x.unsafe_buffer_pointer() for x in held}) == len(held)
