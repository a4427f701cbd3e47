"""A museum of silent bugs: programs of others that train wrongly without a word, and boostax's.

Each mistake was met in public: no error, no warning, a loss that goes down. An exhibit computes
one number three ways: as it must be, with the mistake made in plain JAX or Optax, and with boostax.
Mistakes that a law of ``boostax.testing`` rules out for every part are not shown.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import boostax

REPLICAS = 2


ZERO = jnp.float32(0.0)


def on_replicas(step, *batch, checked=True):
    """``step`` of each replica's part, the first replica's result."""
    mesh = jax.make_mesh((REPLICAS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    local = lambda *parts: step(*parts)[None]  # noqa: E731
    specs = P("data")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=checked)
    return np.asarray(jax.jit(mapped)(*batch))[0].item()


def mean_over_tokens(w, batch):
    """Loss over the tokens that the mask leaves; its gradient is ``w - mean(x)``."""
    x, mask = batch
    count = mask.sum()
    return jnp.sum(mask * (w - x) ** 2) / 2 / count, boostax.Aux(weight=count)


# One token of 8 and three of 0, in two parts: the mean over the tokens is 2, of the means 4.
TOKENS = np.float32([[8, 0, 0], [0, 0, 0]])
MASK = np.float32([[1, 0, 0], [1, 1, 1]])


def tokens_of_a_window():
    """A step over micro-batches of 1 and 3 tokens. Each micro-batch's gradient was divided by its
    own number of tokens and their sum by the number of micro-batches, so short examples counted
    more.

    https://github.com/ml-explore/mlx-lm/pull/1413
    """
    return 2.0, *windows(list(zip(TOKENS, MASK, strict=True)))


def windows(parts):
    """A step over these micro-batches, by ``optax.MultiSteps`` and by ``boostax.accumulate``."""
    peer = optax.MultiSteps(optax.sgd(1.0), len(parts))
    w, state = ZERO, peer.init(ZERO)
    for part in parts:
        grad = jax.grad(lambda w, part: mean_over_tokens(w, part)[0])(w, part)
        updates, state = peer.update(grad, state, w)
        w = optax.apply_updates(w, updates)

    tx = boostax.accumulate(optax.sgd(1.0), len(parts), normalize="weight")
    oracle = boostax.value_and_grad(mean_over_tokens, has_aux=True)
    ours, state = ZERO, tx.init(ZERO)
    for part in parts:
        (_, aux), grad = oracle(ours, state, part)
        ours, state = boostax.apply_gradients(tx, grad, state, ours, weight=aux.weight)
    return float(w), float(ours)


def tokens_of_the_replicas():
    """A step over replicas of 1 and 3 tokens. Each rank took the mean over its own tokens and
    gradients were averaged over ranks, so that a token weighed more on a rank that had few.

    https://github.com/pytorch/torchtitan/issues/1842
    """

    def plain(x, mask):
        loss = lambda w: mean_over_tokens(w, (x, mask))[0]  # noqa: E731
        return -jax.lax.pmean(jax.grad(loss)(jnp.float32(0.0)), "data")

    oracle = boostax.value_and_grad(mean_over_tokens, has_aux=True, axis_name="data")
    tx = optax.chain(boostax.all_reduce("data"), optax.sgd(1.0))

    def ours(x, mask):
        _, grad = oracle(ZERO, tx.init(ZERO), (x, mask))
        return boostax.apply_gradients(tx, grad, tx.init(ZERO), ZERO)[0]

    return 2.0, on_replicas(plain, TOKENS, MASK, checked=False), on_replicas(ours, TOKENS, MASK)


def divided_twice():
    """A step over the tokens of all replicas. The loss was divided by the tokens of all ranks and
    its gradient then averaged over the ranks: the learning rate was divided by their number.

    https://github.com/verl-project/verl-SpeCo/pull/29
    """

    def plain(x, mask):
        count = jax.lax.psum(mask.sum(), "data")
        loss = lambda w: jnp.sum(mask * (w - x) ** 2) / 2 / count  # noqa: E731
        return -jax.lax.pmean(jax.grad(loss)(jnp.float32(0.0)), "data")

    wanted, _, ours = tokens_of_the_replicas()
    return wanted, on_replicas(plain, TOKENS, MASK, checked=False), ours


def averaged_in_every_micro_batch():
    """A moving average (decay ½) of params that one window moves from 0 to 1. The average was taken
    in every micro-batch, so it moved with the window's length.

    https://github.com/SWivid/F5-TTS/issues/631
    """
    peer = optax.MultiSteps(optax.sgd(1.0), 4).gradient_transformation()
    tx = boostax.accumulate(optax.sgd(1.0), 4)
    averages = []
    for opt in (peer, tx):
        w = average = jnp.float32(0.0)
        state = opt.init(w)
        for grad in [-1.0] * 4 + [0.0] * 3:
            w, state = boostax.apply_gradients(opt, jnp.float32(grad), state, w)
            due = True if opt is peer else boostax.train.has_updated(state)
            average = jnp.where(due, optax.incremental_update(w, average, 0.5), average)
        averages.append(float(average))
    return 0.5, *averages


def updates_that_bf16_cannot_hold():
    """A weight of 0.02 after 1,000 steps of Adam at 3e-6. An update below half the distance between
    two bf16 numbers leaves the weight as it is, every time.

    https://github.com/huggingface/blog/pull/3386
    """
    opt = optax.adam(3e-6)

    def run(loss, dtype):
        def body(_, carry):
            w, state = carry
            updates, state = opt.update(jax.grad(loss)(w), state, w)
            return optax.apply_updates(w, updates), state

        w = jnp.asarray(0.02, dtype)
        return float(jax.jit(lambda: jax.lax.fori_loop(0, 1000, body, (w, opt.init(w)))[0])())

    loss = lambda w: jnp.asarray(w * 1.0, jnp.float32)  # noqa: E731
    rules = boostax.policy("params=float32,compute=bfloat16")
    return run(loss, jnp.float32), run(loss, jnp.bfloat16), run(rules.wrap(loss), jnp.float32)


def a_batch_of_padding():
    """A step over a micro-batch of one token and one that is all padding. A batch without a single
    token to learn from divided by zero, and its NaN went into every param.

    https://github.com/NVIDIA-NeMo/Automodel/issues/3796
    """
    masks = jnp.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    return 8.0, *windows([(TOKENS[0], mask) for mask in masks])


def clipped_in_f16():
    """An f16 gradient of norm 600, clipped to 1. The factor of the clip was computed in f16, where
    it becomes zero: large gradients vanished.

    https://github.com/unslothai/unsloth-zoo/pull/1261
    """
    grads, w = jnp.full(4, 300.0, jnp.float16), jnp.zeros(4, jnp.float16)
    peer = optax.clip_by_global_norm(1.0)
    plain, _ = peer.update(grads, peer.init(w))
    tx = boostax.static_loss_scale(peer, 1.0)
    ours, _ = tx.update(grads, tx.init(w), w)
    return 0.5, float(plain[0]), float(ours[0])


def one_key_for_all():
    """Share of 16 micro-batches in which dropout keeps a unit. The same random key was used every
    time, so that every mask was the same.

    https://github.com/p-doom/jasmine/pull/239
    """

    def loss(w, batch, key):
        return w * jax.random.bernoulli(key) * jnp.mean(batch)

    key, w, batch, count = jax.random.key(0), jnp.float32(1.0), jnp.ones(16), 16
    grads = [jax.grad(loss)(w, batch[:1], key) for _ in range(count)]
    keys = [jax.random.fold_in(key, index) for index in range(count)]
    wanted = [jax.grad(loss)(w, batch[:1], each) for each in keys]
    oracle = boostax.value_and_grad(loss, microbatches=count)
    _, ours = oracle(w, (), batch, key=key)
    return float(sum(wanted)) / count, float(sum(grads)) / count, float(ours)


def an_amax_of_the_last_micro_batch():
    """An amax over micro-batches with values up to 10 and up to 1. Of the fp8 histories that travel
    as gradients the last micro-batch's replaced the others', so the next step's scale was too large
    and activations were clipped.

    https://github.com/marin-community/marin/issues/7659
    """

    @jax.custom_vjp
    def product(w, amax, x):
        return w * x

    forward = lambda w, amax, x: (w * x, (w, x))  # noqa: E731
    backward = lambda kept, g: (g * kept[1], jnp.abs(kept[1]), g * kept[0])  # noqa: E731
    product.defvjp(forward, backward)
    loss = lambda p, x: product(p["w"], p["amax"], x)  # noqa: E731
    params, batches = {"w": jnp.float32(1.0), "amax": jnp.float32(0.0)}, jnp.float32([10.0, 1.0])
    summed = jax.tree.map(jnp.zeros_like, params)
    for x in batches:
        grads = jax.grad(loss)(params, x)
        summed = {"w": summed["w"] + grads["w"], "amax": grads["amax"]}

    tx = boostax.carry(boostax.accumulate(optax.sgd(1.0), 2), {"amax": "max"})
    ours, state, oracle = params, tx.init(params), boostax.value_and_grad(loss)
    for x in batches:
        _, grads = oracle(ours, state, x)
        ours, state = boostax.apply_gradients(tx, grads, state, ours)
    return 10.0, float(summed["amax"]), float(ours["amax"])


def a_schedule_that_counts_skipped_steps():
    """A weight after an overflow and a gradient of -1, with rates 1, ½, ... The optimizer skipped
    the first step and did not report it, so the schedule went on.

    https://github.com/huggingface/accelerate/issues/4242
    """
    opt, grads = optax.sgd(lambda step: 0.5**step), jnp.float32([np.inf, -1.0])
    w, state = ZERO, opt.init(ZERO)
    for grad in grads:
        updates, state = opt.update(grad, state, w)
        w = jnp.where(jnp.isfinite(grad), optax.apply_updates(w, updates), w)
    return 1.0, float(w), closed(boostax.skip_bad_steps(opt), grads)


def closed(tx, grads):
    """A weight that begins at 0 and takes these gradients; then an open window is closed."""
    w, state = ZERO, tx.init(ZERO)
    for grad in grads:
        w, state = boostax.apply_gradients(tx, grad, state, w)
    return float(boostax.flush(tx, state, w)[0])


def a_window_cut_short():
    """A step over the last two micro-batches of an epoch, in windows of four. Their sum was divided
    by four; elsewhere it was dropped.

    https://github.com/modelscope/ms-swift/pull/10084
    https://github.com/tracel-ai/burn/issues/5695
    """
    grads = jnp.float32([-1.0, -3.0])
    return 2.0, -float(grads.sum() / 4), closed(boostax.accumulate(optax.sgd(1.0), 4), grads)


def a_bad_micro_batch_in_the_divisor():
    """A step over four micro-batches, one of which is not finite. It was left out of the sum, which
    was divided by four.

    https://github.com/mflux-community/mflux/pull/447
    """
    grads = jnp.float32([-1.0, np.nan, -1.0, -1.0])
    tx = boostax.skip_bad_steps(boostax.accumulate(optax.sgd(1.0), 4))
    return 1.0, -float(jnp.nansum(grads) / 4), closed(tx, grads)


def frozen_gradients_in_the_norm():
    """A gradient of 4 clipped to 1, beside a frozen param whose gradient is 3. The norm counted the
    frozen param, so what was trained was clipped too far.

    https://github.com/AI-Hypercomputer/maxtext/pull/5285
    """
    loss = lambda p, _: 3 * p["a"] + 4 * p["b"]  # noqa: E731
    params, clip = {"a": ZERO, "b": ZERO}, optax.clip_by_global_norm(1.0)
    each = {"frozen": optax.set_to_zero(), "trained": optax.sgd(1.0)}
    peer = optax.chain(clip, optax.partition(each, {"a": "frozen", "b": "trained"}))
    plain, _ = peer.update(jax.grad(loss)(params, ()), peer.init(params))
    tx = boostax.scheduled_freeze(optax.chain(clip, optax.sgd(1.0)), ["a"], 1)
    state, active = tx.init(params), tx.active(params, 1)
    _, grads = boostax.value_and_grad(loss)(params, state, ZERO, active=active)
    ours, _ = boostax.apply_gradients(tx, grads, state, params, depth=1)
    return 1.0, -float(plain["b"]), -float(ours["b"])


def replicated_leaves_in_the_norm():
    """A gradient of 4 of a whole param, clipped to 1, beside a sharded one whose norm is 3. The
    squares of the whole param were added once for each shard.

    https://github.com/NVIDIA-NeMo/RL/pull/3788
    https://github.com/mindspore-ai/hyper-parallel/issues/279
    """

    def plain(shard):
        squares = jnp.sum(shard**2) + 16.0
        return 4.0 / jnp.sqrt(jax.lax.psum(squares, "data"))

    loss = lambda p, rows: 3 * p["shards"][0] + 4 * p["whole"] + 0 * rows.sum()  # noqa: E731
    mesh = jax.make_mesh((REPLICAS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = optax.chain(boostax.all_reduce(), optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    specs = {"shards": P("data"), "whole": P()}
    step = boostax.make_train_step(loss, tx, mesh=mesh, param_specs=specs)
    state = step.init({"shards": jnp.zeros(REPLICAS), "whole": ZERO})
    state, _ = step(state, jnp.zeros(REPLICAS))
    return 0.8, on_replicas(plain, jnp.float32([3.0, 0.0])), -float(state.params["whole"])


EXHIBITS = (
    tokens_of_a_window,
    tokens_of_the_replicas,
    divided_twice,
    averaged_in_every_micro_batch,
    updates_that_bf16_cannot_hold,
    a_batch_of_padding,
    clipped_in_f16,
    one_key_for_all,
    an_amax_of_the_last_micro_batch,
    a_schedule_that_counts_skipped_steps,
    a_window_cut_short,
    a_bad_micro_batch_in_the_divisor,
    frozen_gradients_in_the_norm,
    replicated_leaves_in_the_norm,
)


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.__name__)
def test_wrong_elsewhere_and_right_here(exhibit):
    wanted, elsewhere, ours = exhibit()
    assert not np.isclose(elsewhere, wanted, rtol=0.05), "nothing is wrong elsewhere"
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)
