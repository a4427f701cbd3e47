"""What loss scaling costs on top of Adam, against what a JAX user would do without boostax."""

from typing import Any

import harness
import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training import dynamic_scale
from harness import Bar, Form, beside, by_apply, by_update, compiled_form, paired, ratio
from problems import grads, nbytes, params

import boostax

PyTree = Any
ADAM = optax.adam(1e-3)


def jmp_step(p: PyTree, state: Any, g: PyTree) -> tuple[PyTree, Any]:
    """The loop body of jmp's README: unscale, step, select."""
    opt_state, scaler = state
    g = scaler.unscale(g)
    finite = jmp.all_finite(g)
    updates, new_state = ADAM.update(g, opt_state, p)
    selected = jmp.select_tree(finite, (optax.apply_updates(p, updates), new_state), (p, opt_state))
    return selected[0], (selected[1], scaler.adjust(finite))


def flax_step(p: PyTree, state: Any, g: PyTree) -> tuple[PyTree, Any]:
    """Flax DynamicScale's bookkeeping and its example's selection, on given gradients."""
    opt_state, scaler = state
    g = jax.tree.map(lambda x: x.astype(jnp.float32) / scaler.scale, g)
    finite = jnp.array(True)
    for leaf in jax.tree.leaves(g):
        finite &= jnp.all(jax.lax.is_finite(leaf))
    grow = scaler.fin_steps == scaler.growth_interval
    grown = jnp.where(grow & finite, scaler.scale * scaler.growth_factor, scaler.scale)
    lowered = jnp.maximum(scaler.scale * scaler.backoff_factor, scaler.minimum_scale)
    scaler = scaler.replace(
        scale=jnp.where(finite, grown, lowered),
        fin_steps=jnp.where(grow | ~finite, 0, scaler.fin_steps + 1),
    )
    updates, new_state = ADAM.update(g, opt_state, p)
    new_p = optax.apply_updates(p, updates)
    pick = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
    return jax.tree.map(pick, new_p, p), (jax.tree.map(pick, new_state, opt_state), scaler)


def forms(dtype: Any) -> dict[str, Form]:
    p, g = params(), grads(dtype)
    scaled = boostax.dynamic_loss_scale(ADAM)
    jmp_scaler = jmp.DynamicLossScale(jnp.float32(2.0**16))
    flax_scaler = jax.tree.map(jnp.asarray, dynamic_scale.DynamicScale())
    if_finite = optax.apply_if_finite(ADAM, 5)
    made = {
        "bare Adam": compiled_form(by_update(ADAM), p, ADAM.init(p), g),
        "boostax apply_gradients": compiled_form(by_apply(scaled), p, scaled.init(p), g),
        "boostax update": compiled_form(by_update(scaled), p, scaled.init(p), g),
        "flax DynamicScale + where": compiled_form(flax_step, p, (ADAM.init(p), flax_scaler), g),
        "jmp + select_tree": jmp_form(p, g, jmp_scaler),
        "mixed_precision_for_JAX": mpx_form(p, g),
    }
    if dtype == jnp.float32:  # its branches disagree in dtype for f16 gradients of f32 params
        made["optax.apply_if_finite (scales nothing)"] = compiled_form(
            by_update(if_finite), p, if_finite.init(p), g
        )
    return made


def mpx_form(p: PyTree, g: PyTree) -> Form:
    """The step of mixed_precision_for_JAX's README, on given gradients."""
    # It starts JAX's backend, before which the number of devices must be known.
    import mpx

    def step(p: PyTree, state: Any, g: PyTree) -> tuple[PyTree, Any]:
        opt_state, scaler = state
        g = scaler.unscale(g)
        finite = mpx.all_finite(g)
        p, opt_state = mpx.optimizer_update(p, ADAM, opt_state, g, finite)
        return p, (opt_state, scaler.adjust(finite))

    scaler = mpx.DynamicLossScaling(jnp.float32(2.0**15), jnp.float32(1.0))
    return compiled_form(step, p, (ADAM.init(p), jax.tree.map(jnp.asarray, scaler)), g)


def jmp_form(p: PyTree, g: PyTree, scaler: Any) -> Form:
    """jmp's scaler cannot be lowered ahead of time on this jax, so this one is jitted as it is."""
    program = jax.jit(jmp_step, donate_argnums=(0, 1))
    carry = [jax.tree.map(lambda x: x.copy(), (p, ADAM.init(p)))]
    state = [(carry[0][0], (carry[0][1], scaler))]

    def run() -> None:
        state[0] = program(*state[0], g)
        jax.block_until_ready(state[0][0])

    return Form(run)


def main() -> None:
    rounds = harness.arguments(__doc__, rounds=25).rounds
    size = nbytes(params())
    sections, bars = [], []
    for dtype in (jnp.float32, jnp.float16):
        made = forms(dtype)
        times = paired(made, rounds)
        name = jnp.dtype(dtype).name
        heading = f"{name} gradients, Adam, {size // 4 / 1e6:.1f}M f32 params, donated"
        sections.append((heading, beside(made, times, "time / bare Adam", "bare Adam", size)))
        if dtype == jnp.float16:
            continue
        apply, pure = "boostax apply_gradients", "boostax update"
        bars += [
            Bar("apply_gradients: temp / params", made[apply].temp / size, 0.05),
            Bar("apply_gradients: time / bare Adam", ratio(times, apply, "bare Adam"), 1.2),
            Bar("update: temp / params", made[pure].temp / size, 1.1),
            Bar("update: time / bare Adam", ratio(times, pure, "bare Adam"), 2.5),
        ]
        for ours in (apply, pure):
            for peer in made:
                if peer not in ("bare Adam", apply, pure):
                    bars.append(Bar(f"{ours}: time / {peer}", ratio(times, ours, peer), 1.0))
    harness.report("loss_scale", "Loss scaling: cost of a step", sections, bars)


if __name__ == "__main__":
    main()
