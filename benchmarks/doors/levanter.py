"""The doors into Levanter: a choice of its config, and a patch of its ``Trainer``.

A small Llama of its own trains over 8 emulated devices. Its LM loss hands JAX's ``mean`` a float
``where``, which JAX 0.10 refuses; with ``reduction=None``, an argument of it, the ``Trainer`` takes
the mean instead.
"""

import functools
import importlib
import pathlib
import sys
from typing import Any

# A script of this name hides the program from what it imports.
sys.path.remove(str(pathlib.Path(__file__).parent))
sys.path.append(str(pathlib.Path(__file__).parent / "parts"))
import door

VERSION = "1.2 at 9263f81"
PATCH, PLUGIN = door.DOORS / "levanter.patch", door.DOORS / "levanter_config.py"
SUITES = (
    *("checkpoint", "config", "grad_accum", "model_averaging", "optimizer_config"),
    *("skip_step", "sophia", "weight_decay_mask"),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {"fsdp_axis": None},
    "fsdp": {},
    "tensor": {"model_axis_size": 2, "tensor_parallel_axes": ["mlp", "heads"]},
}
BOOST: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"accumulate": 8},
    "gates": {"skip_spikes": {"by": "loss"}, "average_params": {"decay": 0.999}},
    "store": {"store": {"moments": "bfloat16"}},
    "scale": {"loss_scale": {"kind": "dynamic", "init_scale": 1024.0}},
}
STEPS, ROWS, LENGTH, VOCAB = 6, 64, 32, 256


def train(layout: str, dtype: str, boost: str) -> None:
    """Audit and train: where params live, what is computed in, what the config says of boostax."""
    import draccus
    import haliax as hax
    import jax
    import jmp
    import numpy as np
    from levanter.distributed import RayConfig
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample, compute_next_token_loss
    from levanter.optim import AdamConfig, OptimizerConfig
    from levanter.tracker import NoopConfig
    from levanter.trainer import Trainer, TrainerConfig

    import boostax

    jax.config.update("jax_num_cpu_devices", 8)
    calls = BOOST[boost].get("accumulate", 1)
    config = TrainerConfig(
        id="door",
        num_train_steps=STEPS * calls,
        train_batch_size=ROWS // calls,
        per_device_parallelism=1,
        mp=jmp.get_policy(f"p=f32,c={dtype}"),
        tracker=NoopConfig(),
        require_accelerator=False,
        ray=RayConfig(auto_start_cluster=False),
        log_jaxprs=False,
        log_xla_hlo=False,
        **LAYOUTS[layout],
    )
    config.initialize()
    optimizer: OptimizerConfig = AdamConfig(learning_rate=1e-3, warmup=0)
    if boost != "none":
        importlib.import_module(PLUGIN.stem)
        told = {"type": "boostax", "inner": draccus.encode(optimizer), "boost": BOOST[boost]}
        optimizer = draccus.decode(OptimizerConfig, told)
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "hidden_dim": 64}
    model = LlamaConfig(seq_len=LENGTH, intermediate_dim=128, **sizes)
    made = optimizer.build(config.num_train_steps)
    loss_fn = functools.partial(compute_next_token_loss, reduction=None)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (STEPS, calls, ROWS // calls, LENGTH))
    audit, losses = None, []
    with Trainer(config, made, loss_fn, add_default_hooks=False) as trainer:
        build = functools.partial(model.build, hax.Axis("vocab", VOCAB), key=jax.random.key(1))
        state = trainer.initial_state(jax.random.key(0), model_init=build)
        kept = door.local_bytes(state) - door.local_bytes(state.model)
        for step in tokens:
            told = []
            for rows in step:
                named = hax.named(jax.numpy.asarray(rows), ("batch", "position"))
                example = hax.vmap(LmExample.causal, "batch")(named)
                example = hax.shard(example, trainer.compute_axis_mapping)
                if audit is None:
                    lowered = trainer._jit_train_step_fn_no_hook.lower(state, (example,), {})
                    audit = boostax.audit(lowered.compile(), params=state.model, calls=calls)
                info = trainer.train_step(state, example)
                state = info.state
                told.append(info.loss)
            losses.append(sum(told) / calls)
    print(boostax.metrics(state.opt_state), file=sys.stderr)
    # Tensor parallelism reduces activations over the model's axis, too.
    print(door.told(audit, kept, losses, ("replica", "data") if layout == "tensor" else ()))


def rows(source: pathlib.Path) -> list[dict[str, Any]]:
    """Of the record."""
    files = [f"tests/test_{name}.py" for name in SUITES]
    plugin = [PLUGIN.parent]
    own = door.code_of(PLUGIN, ("from dataclasses", "if __name__"))
    with door.patched(source, PATCH) as copy:
        at, there = [source / "src", *plugin], [copy / "src", *plugin]
        alone = door.passed(source, files, source / "src")
        asked = ("-p", PLUGIN.stem)
        counted = door.tests(door.passed(source, files, *at, more=asked), alone)
        changed = door.tests(door.passed(copy, files, *there, more=asked), alone)
        run = functools.partial(door.measured, __file__)
        old = {name: run(f"{name} f32 none", *at) for name in LAYOUTS}
        half = run("whole f16 none", *at)
        made = functools.partial(door.row, "Levanter", VERSION)
        lines = door.lines_of(PATCH)
        patched = {
            "patch: params whole": (old["whole"], "whole f32 none"),
            "patch: FSDP": (old["fsdp"], "fsdp f32 none"),
            "patch: FSDP and tensor parallel": (old["tensor"], "tensor f32 none"),
            "patch and config: f16, dynamic loss scale": (half, "whole f16 scale"),
        }
        chosen = {
            "config: skip_spikes by the loss, average_params": "fsdp f32 gates",
            "config: store, moments in bf16": "fsdp f32 store",
            "config: accumulate over calls": "fsdp f32 window",
        }
        return [
            *(made(w, lines, changed, was, run(x, *there)) for w, (was, x) in patched.items()),
            *(made(w, own, counted, old["fsdp"], run(x, *at)) for w, x in chosen.items()),
        ]


if __name__ == "__main__":
    door.run(__doc__ or "", train, rows)
