"""A museum of silent bugs: programs of others that train wrongly without a word, and boostax's.

Each mistake was met in public: no error, no warning, a loss that goes down. An exhibit computes
one number three ways: as it must be, with the mistake made in plain JAX, Optax or Flax, and with
boostax.
"""

import dataclasses
import pickle
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import dynamic_scale
from jax.sharding import PartitionSpec as P

import boostax

REPLICAS = 2
Number = float | str


@dataclasses.dataclass
class Exhibit:
    """One silent bug.

    Attributes:
      thread: where it was met, a path on GitHub.
      show: returns what the number must be, what the other program and what boostax make of it:
        a number, or the message of a refusal.
    """

    thread: str
    show: Callable[[], tuple[float, float, Number]]


EXHIBITS: list[Exhibit] = []


def exhibit(thread: str) -> Callable[..., Callable]:
    """Put a program on show."""

    def put(show: Callable) -> Callable:
        EXHIBITS.append(Exhibit(thread, show))
        return show

    return put


ZERO, ONE = jnp.float32(0.0), jnp.float32(1.0)


def train(tx, w, slopes, state=None):
    """Params and state after a step on the loss ``slope * w`` for each slope."""
    oracle = boostax.value_and_grad(lambda w, slope: slope * w)
    state = tx.init(w) if state is None else state

    @jax.jit
    def step(w, state, slope):
        _, grad = oracle(w, state, slope)
        return boostax.apply_gradients(tx, grad, state, w)

    for slope in slopes:
        w, state = step(w, state, jnp.float32(slope))
    return w, state


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


@exhibit("ml-explore/mlx-lm/pull/1413")
def tokens_of_a_window():
    """A step over micro-batches of 1 and 3 tokens. Each micro-batch's gradient was divided by its
    own number of tokens and their sum by the number of micro-batches, so short examples counted
    more.
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


@exhibit("pytorch/torchtitan/issues/1842")
def tokens_of_the_replicas():
    """A step over replicas of 1 and 3 tokens. Each rank took the mean over its own tokens and
    gradients were averaged over ranks, so that a token weighed more on a rank that had few.
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


@exhibit("verl-project/verl-SpeCo/pull/29")
def divided_twice():
    """A step over the tokens of all replicas. The loss was divided by the tokens of all ranks and
    its gradient then averaged over the ranks: the learning rate was divided by their number.
    """

    def plain(x, mask):
        count = jax.lax.psum(mask.sum(), "data")
        loss = lambda w: jnp.sum(mask * (w - x) ** 2) / 2 / count  # noqa: E731
        return -jax.lax.pmean(jax.grad(loss)(jnp.float32(0.0)), "data")

    wanted, _, ours = tokens_of_the_replicas()
    return wanted, on_replicas(plain, TOKENS, MASK, checked=False), ours


@exhibit("jax-ml/jax/issues/36886")
def summed_by_shard_map():
    """A gradient of replicated params, averaged over 2 replicas. Inside `shard_map` `jax.grad` of
    what is replicated is summed over the devices already, unlike under `vmap`; a mean after it
    leaves a sum.
    """

    def gradient(x):
        return jax.grad(lambda w: jnp.mean((w - x) ** 2) / 2)(jnp.float32(0.0))

    plain = lambda x: jax.lax.pmean(-gradient(x), "data")  # noqa: E731
    tx = optax.chain(boostax.all_reduce("data"), optax.sgd(1.0))
    ours = lambda x: boostax.apply_gradients(tx, gradient(x), tx.init(ZERO), ZERO)[0]  # noqa: E731
    x = jnp.array([[1.0], [3.0]])
    return 2.0, on_replicas(plain, x), refusal(lambda: on_replicas(ours, x))


@exhibit("mflux-community/mflux/pull/447")
def the_last_window():
    """Params after 5 gradients of -1, in windows of 2. A run that ended inside a window threw away
    the micro-batches that it had summed up.
    """
    wanted, grads = 3.0, [-1.0] * 5
    peer = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    w, _ = train(peer, ZERO, grads)
    tx = boostax.accumulate(optax.sgd(1.0), 2)
    ours, state = train(tx, ZERO, grads)
    return wanted, float(w), float(boostax.flush(tx, state, ours)[0])


@exhibit("Nerogar/OneTrainer/pull/1465")
def resumed_in_a_window():
    """A step whose window is cut by a restart. What a window had summed up was no part of the
    checkpoint: the first step after a restart was made of the last micro-batches alone.
    """
    grads, opt = [-1.0, -3.0, -5.0, -7.0], optax.sgd(1.0)
    w, state, total = ZERO, opt.init(ZERO), 0.0
    for index, grad in enumerate(grads):
        if index == 2:
            (w, state), total = pickle.loads(pickle.dumps((w, state))), 0.0
        total = total + grad / len(grads)
    w = optax.apply_updates(w, opt.update(jnp.float32(total), state)[0])

    tx = boostax.accumulate(optax.sgd(1.0), 4)
    ours, state = pickle.loads(pickle.dumps(train(tx, ZERO, grads[:2])))
    return 4.0, float(w), float(train(tx, ours, grads[2:], state)[0])


@exhibit("facebookresearch/lingua/pull/59")
def clipped_in_every_micro_batch():
    """A step clipped to 1, over micro-batches of 100 and -98. The gradient was clipped in every
    micro-batch, not once before the optimizer's step.
    """
    clip, grads = optax.clip_by_global_norm(1.0), [-100.0, 98.0]
    peer = optax.chain(clip, optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())
    tx = boostax.accumulate(optax.chain(clip, optax.sgd(1.0)), 2)
    return 1.0, *(float(train(x, ZERO, grads)[0]) for x in (peer, tx))


@exhibit("NCAR/miles-credit/pull/141")
def clipped_before_it_was_unscaled():
    """A step on a gradient of -0.5, clipped to 1, at a scale of 1024. Gradients were clipped while
    still multiplied by the loss scale, so almost nothing was left.
    """
    scale, w = 1024.0, jnp.float32(0.0)
    opt = optax.chain(optax.clip_by_global_norm(1.0), optax.scale(1 / scale), optax.sgd(1.0))
    plain = opt.update(jax.grad(lambda w: -0.5 * w * scale)(w), opt.init(w))[0]
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = boostax.dynamic_loss_scale(inner, init_scale=scale)
    _, grad = boostax.value_and_grad(lambda w, batch: -0.5 * w)(w, tx.init(w), ())
    return 0.5, float(plain), float(tx.update(grad, tx.init(w), w)[0])


@exhibit("ecmwf/WeatherGenerator/pull/2718")
def decided_by_the_first_replica():
    """Params of 1 after a NaN on the second of 2 replicas. Rank 0 alone decided whether to skip: a
    NaN of any other rank went through the all-reduce into the gradients of all.
    """
    grads = jnp.array([1.0, jnp.nan])

    def plain(grad):
        fine = jax.lax.all_gather(jnp.isfinite(grad[0]), "data")[0]
        return jnp.where(fine, 1.0 - jax.lax.pmean(grad[0], "data"), 1.0)

    inner = optax.chain(boostax.all_reduce("data"), optax.sgd(1.0))
    tx = boostax.static_loss_scale(inner, 1.0, axis_name="data")
    oracle = boostax.value_and_grad(lambda w, slope: slope[0] * w, axis_name="data")

    def ours(slope):
        _, grad = oracle(ONE, tx.init(ONE), slope)
        return boostax.apply_gradients(tx, grad, tx.init(ONE), ONE)[0]

    return 1.0, on_replicas(plain, grads, checked=False), on_replicas(ours, grads)


@exhibit("Lightning-AI/pytorch-lightning/issues/21339")
def a_schedule_that_counts_skipped_steps():
    """The step after 5 skipped ones, of a warm-up over 10. The learning rate's schedule went on
    while the scaler skipped the optimizer's steps.
    """
    warm_up = optax.linear_schedule(0.0, 1.0, 10)
    slopes = [jnp.inf] * 5 + [-1.0] * 2
    peer, w = dynamic_scale.DynamicScale(), jnp.float32(0.0)
    for step, slope in enumerate(slopes):
        peer, finite, _, grad = peer.value_and_grad(lambda w, slope=slope: slope * w)(w)
        w = jnp.where(finite, w - warm_up(step) * grad, w)
    ours, _ = train(boostax.dynamic_loss_scale(optax.sgd(warm_up)), ZERO, slopes)
    return float(warm_up(0) + warm_up(1)), float(w), float(ours)


@exhibit("mlnomadpy/flaxchat/issues/6")
def zeros_for_a_bad_gradient():
    """Params of 1 after 10 bad gradients. A gradient that was not finite was replaced by zeros, and
    the optimizer ran: momentum, schedule and decay moved the params.
    """
    opt = optax.adamw(0.1, weight_decay=0.1)
    w, _ = train(opt, ONE, np.nan_to_num([np.nan] * 10))
    return 1.0, float(w), float(train(boostax.static_loss_scale(opt, 1.0), ONE, [jnp.nan] * 10)[0])


@exhibit("linkedin/Liger-Kernel/pull/830")
def summed_in_bf16():
    """The sum of a gradient of 1 and 512 of 2⁻⁹, of bf16 params. Gradients were summed up in bf16,
    where what is small beside the sum is rounded away.
    """
    grads = [-1.0] + [-(2.0**-9)] * 512
    zero, total = jnp.bfloat16(0.0), jnp.bfloat16(0.0)
    for grad in grads:
        total = total + jnp.bfloat16(grad)
    tx = boostax.accumulate(optax.sgd(1.0), len(grads), normalize="sum")
    return 2.0, -float(total), float(train(tx, zero, grads)[0])


@exhibit("SWivid/F5-TTS/issues/631")
def averaged_in_every_micro_batch():
    """A moving average (decay ½) of params that one window moves from 0 to 1. The average was taken
    in every micro-batch, so it moved with the window's length.
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


@exhibit("huggingface/blog/pull/3386")
def updates_that_bf16_cannot_hold():
    """A weight of 0.02 after 1,000 steps of Adam at 3e-6. An update below half the distance between
    two bf16 numbers leaves the weight as it is, every time.
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


@exhibit("OPTML-Group/Unlearn-Saliency/issues/32")
def frozen_weights_that_decay():
    """A frozen weight of 1 after 10 steps of AdamW. Frozen weights were given gradients of zero;
    weight decay and momentum moved them.
    """
    opt = optax.adamw(0.1, weight_decay=0.1)
    params = {"frozen": jnp.float32(1.0), "trained": jnp.float32(1.0)}
    whole = lambda p, batch=(): p["frozen"] * p["trained"]  # noqa: E731
    peer, state = params, opt.init(params)
    for _ in range(10):
        grads = jax.grad(whole)(peer) | {"frozen": jnp.float32(0.0)}
        updates, state = opt.update(grads, state, peer)
        peer = optax.apply_updates(peer, updates)

    tx = boostax.scheduled_freeze(opt, {"frozen": 0, "trained": 1}, 1)
    ours, state, oracle = params, tx.init(params), boostax.value_and_grad(whole)
    for _ in range(10):
        _, grads = oracle(ours, state, ())
        ours, state = boostax.apply_gradients(tx, grads, state, ours)
    return 1.0, float(peer["frozen"]), float(ours["frozen"])


@exhibit("NVIDIA-NeMo/Automodel/issues/3796")
def a_batch_of_padding():
    """A step over a micro-batch of one token and one that is all padding. A batch without a single
    token to learn from divided by zero, and its NaN went into every param.
    """
    masks = jnp.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    return 8.0, *windows([(TOKENS[0], mask) for mask in masks])


@exhibit("unslothai/unsloth-zoo/pull/1261")
def clipped_in_f16():
    """An f16 gradient of norm 600, clipped to 1. The factor of the clip was computed in f16, where
    it becomes zero: large gradients vanished.
    """
    grads, w = jnp.full(4, 300.0, jnp.float16), jnp.zeros(4, jnp.float16)
    peer = optax.clip_by_global_norm(1.0)
    plain, _ = peer.update(grads, peer.init(w))
    tx = boostax.static_loss_scale(peer, 1.0)
    ours, _ = tx.update(grads, tx.init(w), w)
    return 0.5, float(plain[0]), float(ours[0])


@exhibit("p-doom/jasmine/pull/239")
def one_key_for_all():
    """Share of 16 micro-batches in which dropout keeps a unit. The same random key was used every
    time, so that every mask was the same.
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


@exhibit("marin-community/marin/issues/7659")
def an_amax_of_the_last_micro_batch():
    """An amax over micro-batches with values up to 10 and up to 1. Of the fp8 histories that travel
    as gradients the last micro-batch's replaced the others', so the next step's scale was too large
    and activations were clipped.
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


def refusal(run: Callable[[], object]) -> Number:
    """The message with which it is refused, or the number that comes out."""
    try:
        return run()
    except (ValueError, TypeError) as error:
        return str(error)
