"""f16 with loss scaling ends where f32 does; without it a net of vanishing gradients stays put."""

import jax
import optax
import pytest
from training import follow
from workloads import DigitsConfig, TextConfig, digits, text

import boostax


def train(workload, scaler, steps, seed, learning_rate=2e-3):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))
    step = boostax.make_train_step(workload.loss_fn, scaler(optimizer), has_aux=True)
    params, model_state = workload.init(jax.random.key(seed))
    state = step.init(params, model_state=model_state)
    state, _ = follow(step, state, map(workload.batch, range(steps)))
    return workload.evaluate(state.params, state.model_state)["loss"]


def unscaled(optimizer):
    return optimizer


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_scaled_f16_ends_within_one_percent_of_f32_on_text(seed):
    full = train(text(TextConfig(seed=seed)), unscaled, 300, seed)
    half = text(TextConfig(dtype="float16", seed=seed))
    scaled = train(half, boostax.dynamic_loss_scale, 300, seed)
    print(f"seed {seed}: f32 {full:.4f}, f16 with loss scaling {scaled:.4f}")
    assert scaled <= 1.01 * full


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_scaling_recovers_what_f16_loses(seed):
    def ends_at(dtype, scaler):
        workload = digits(DigitsConfig(model="sigmoid", dtype=dtype, seed=seed))
        return train(workload, scaler, 2500, seed)

    full = ends_at("float32", unscaled)
    lost = ends_at("float16", unscaled)
    scaled = ends_at("float16", boostax.dynamic_loss_scale)
    print(f"seed {seed}: f32 {full:.4f}, f16 {lost:.4f}, f16 with loss scaling {scaled:.4f}")
    assert lost > 2.29, "unscaled f16 stays at chance"
    assert full < 0.9 * lost
    assert scaled - full < 0.05 * (lost - full), "scaling recovers it"
