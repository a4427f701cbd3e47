"""Train several agents in one program: ``jax.vmap`` over seeds around ``lax.scan`` over updates.

    JAX_PLATFORMS=cpu python docs/examples/vmap_seeds.py

Each agent pushes carts towards the origin, and has its own params, optimizer state and loss scale.
If the simulator of one agent returns NaN, this agent skips a window, and the other agents do not.
The encoder trains in the first optimizer steps, and is frozen later. Because the axis of
``jax.vmap`` has the name "seeds", Adam runs once per window, and the backward pass of the frozen
encoder does not run.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import boostax

SEEDS, CALLS, WINDOW, ENCODER_STEPS = 4, 48, 4, 6
CARTS, TIMES, HIDDEN, CRASHES = 32, 8, 16, 0.04


class TrainState(NamedTuple):
    """The params, the optimizer state and the carts of one agent."""

    params: Any
    opt_state: Any
    carts: jax.Array  # [CARTS, 2] float32


# From outside in: freezing, the window, the loss scale and the optimizer.
tx = boostax.dynamic_loss_scale(optax.adam(1e-2), growth_interval=4)
tx = boostax.accumulate(tx, WINDOW)
freeze = boostax.scheduled_freeze(tx, [["encoder"]], lambda step: int(step >= ENCODER_STEPS))


def init_params(key):
    """Return a small network: an encoder with one head for the policy and one for the value."""
    keys = jax.random.split(key, 3)
    sizes = {"encoder": (2, HIDDEN), "policy": (HIDDEN, 2), "value": (HIDDEN, 1)}
    return {
        name: {"kernel": jax.random.normal(k, size) / size[0] ** 0.5, "bias": jnp.zeros(size[1])}
        for k, (name, size) in zip(keys, sizes.items(), strict=True)
    }


def network(params, carts):
    """Return the logits of a push in each direction, and the value."""
    hidden = jnp.tanh(carts @ params["encoder"]["kernel"] + params["encoder"]["bias"])
    heads = [hidden @ params[x]["kernel"] + params[x]["bias"] for x in ("policy", "value")]
    return heads[0], heads[1][..., 0]


def rollout(params, carts, key):
    """Return the carts after some pushes, and the batch of what happened."""
    push_key, crash_key = jax.random.split(key)

    def push(carts, key):
        logits, _ = network(params, carts)
        forward = jax.random.uniform(key, carts.shape, jnp.float32) < jax.nn.sigmoid(logits)
        moved = jnp.clip(carts + jnp.where(forward, 0.2, -0.2), -2, 2)
        return moved, (carts, forward, -(moved**2).sum(-1))

    last, (seen, forward, rewards) = jax.lax.scan(push, carts, jax.random.split(push_key, TIMES))
    crashed = jax.random.uniform(crash_key, (), jnp.float32) < CRASHES
    returns = jnp.cumsum(rewards[::-1], 0)[::-1] * jnp.where(crashed, jnp.nan, 1)
    return last, {"carts": seen, "forward": forward, "returns": returns}


def loss_fn(params, batch):
    """Return the loss of the policy gradient, plus the error of the value function."""
    logits, value = network(params, batch["carts"])
    advantage = batch["returns"] - value
    chosen = jnp.where(batch["forward"], logits, -logits)
    policy = jax.nn.log_sigmoid(chosen).sum(-1) * jax.lax.stop_gradient(advantage)
    return jnp.mean(advantage**2 - policy) / TIMES


def start(key):
    """Return the first params and carts of an agent, and the key of its run."""
    init_key, cart_key, key = jax.random.split(key, 3)
    return init_params(init_key), jax.random.uniform(cart_key, (CARTS, 2), minval=-1), key


def train(key):
    """Train one agent, and return its state with the return of each call."""
    params, carts, key = start(key)

    def update(state, key):
        params, opt_state, carts = state
        carts, batch = rollout(params, carts, key)
        active = freeze.choice(params, opt_state)
        grad_fn = boostax.value_and_grad(loss_fn)
        _, grads = grad_fn(params, opt_state, batch, active=active)
        params, opt_state = boostax.apply_gradients(freeze, grads, opt_state, params)
        return TrainState(params, opt_state, carts), batch["returns"][0].mean()

    state = TrainState(params, freeze.init(params), carts)
    return jax.lax.scan(update, state, jax.random.split(key, CALLS))


train_all = jax.jit(jax.vmap(train, axis_name="seeds"))


def main():
    """Train all agents, and print a line for each."""
    state, returns = train_all(jax.random.split(jax.random.key(0), SEEDS))
    told = jax.vmap(boostax.metrics)(state.opt_state)
    for seed in range(SEEDS):
        first, last = (jnp.nanmean(x) for x in jnp.split(returns[seed], [CALLS // 2]))
        skipped, scale = told["skipped"][seed], told["loss_scale"][seed]
        print(f"seed {seed}: return {first:.1f} to {last:.1f}, skipped {skipped}, scale {scale:g}")


if __name__ == "__main__":
    main()
