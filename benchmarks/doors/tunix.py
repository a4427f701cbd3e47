"""The doors into Tunix: an optimizer for its ``PeftTrainer``, and a patch of it.

A small Qwen3 of its own, whole, sharded (FSDP) or with adapters of LoRA, trains over 8 emulated
devices in windows of 8 calls.
"""

import functools
import pathlib
import sys
from typing import Any

# A script of this name hides the program from what it imports.
sys.path.remove(str(pathlib.Path(__file__).parent))
sys.path.append(str(pathlib.Path(__file__).parent / "parts"))
import door

VERSION = "0.1.7"
PATCH = door.DOORS / "tunix.patch"
SUITES = ("tests/sft/peft_trainer_test.py",)
STEPS, WINDOW, ROWS, LENGTH, VOCAB = 6, 8, 8, 32, 256


def train(layout: str, optimizer: str) -> None:
    """Audit and train: where params live, and in which optimizer a window is."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import qwix
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3
    from tunix.sft import peft_trainer, sharding_utils

    import boostax

    jax.config.update("jax_num_cpu_devices", 8)
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((8, 1), ("fsdp", "tp"), axis_types=auto)
    sizes = {"num_heads": 4, "head_dim": 16, "num_kv_heads": 2, "rope_theta": 10_000}
    config = qwen3.ModelConfig(
        num_layers=2, vocab_size=VOCAB, embed_dim=64, hidden_dim=128, norm_eps=1e-6, **sizes
    )

    def inputs(x: Any) -> dict[str, Any]:
        tokens = x.input_tokens
        rows, length = tokens.shape
        before = jnp.tril(jnp.ones((length, length), bool))
        return {
            "input_tokens": tokens,
            "input_mask": x.input_mask,
            "positions": jnp.broadcast_to(jnp.arange(length), tokens.shape),
            "attention_mask": jnp.broadcast_to(before, (rows, length, length)),
        }

    def placed(state: Any) -> Any:
        whole = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), state)
        specs = nnx.get_partition_spec(state) if layout == "fsdp" else whole
        return jax.lax.with_sharding_constraint(state, specs)

    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, VOCAB, (STEPS * WINDOW, ROWS, LENGTH))
    mask = np.ones((ROWS, LENGTH), np.int32)
    data = [peft_trainer.TrainingInput(input_tokens=x, input_mask=mask) for x in tokens]
    if layout == "lora":
        provider = qwix.LoraProvider(module_path=".*q_proj|.*down_proj", rank=4, alpha=2.0)
        given = inputs(data[0])
        order = ("input_tokens", "positions", "attention_mask")
        first, positions, attention = (given[name] for name in order)
        model = qwix.apply_lora_to_model(
            model, provider, first, positions, None, attention, rngs=nnx.Rngs(1)
        )
    with mesh:
        nnx.update(model, jax.jit(placed)(nnx.state(model)))
    tx = optax.adamw(1e-3)
    if optimizer == "chain":
        tx = boostax.accumulate(boostax.precision.skip_spikes(tx), WINDOW)
    steps = None if optimizer == "chain" else WINDOW
    told = peft_trainer.TrainingConfig(
        eval_every_n_steps=1000, gradient_accumulation_steps=steps, max_inflight_computations=1
    )
    losses: list[float] = []

    class Trainer(peft_trainer.PeftTrainer):
        def _buffer_metrics(self, metrics_buffer: Any, loss: Any, **given: Any) -> Any:
            losses.append(float(loss))
            return super()._buffer_metrics(metrics_buffer, loss=loss, **given)

    trainer = Trainer(model, tx, told).with_gen_model_input_fn(inputs)
    params = nnx.state(model, trainer.optimizer.wrt)
    kept = door.local_bytes(nnx.state(trainer.optimizer))
    with mesh:
        step, _ = trainer.jit_train_and_eval_step()
        x = sharding_utils.shard_input(data[0], ("fsdp",))
        lowered = step.func.lower(model, trainer.optimizer, x)
        audit = boostax.audit(lowered.compile().compiled, params=params, calls=WINDOW)
        trainer.clear_jit_cache()
        trainer.train(data)
    means = np.reshape(losses, (STEPS, WINDOW)).mean(1).tolist()
    print(audit, file=sys.stderr)
    print(door.told(audit, kept, means))


def rows(source: pathlib.Path) -> list[dict[str, Any]]:
    """Of the record."""
    with door.patched(source, PATCH) as copy:
        alone = door.passed(source, SUITES, source)
        counted = door.tests(door.passed(copy, SUITES, copy), alone)
        run = functools.partial(door.measured, __file__)
        made = functools.partial(door.row, "Tunix", VERSION)
        lines = door.lines_of(PATCH)
        old = {name: run(f"{name} steps", source) for name in ("whole", "fsdp", "lora")}
        ways = {"whole": "params whole", "fsdp": "FSDP", "lora": "LoRA"}
        patched = [
            made(f"patch: {said}", lines, counted, old[x], run(f"{x} steps", copy))
            for x, said in ways.items()
        ]
        chain = run("whole chain", source)
        said = "optimizer: accumulate around skip_spikes"
        return [*patched, made(said, 2, "-", old["whole"], chain)]


if __name__ == "__main__":
    door.run(__doc__ or "", train, rows)
