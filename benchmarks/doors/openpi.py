"""The doors into openpi: an optimizer for its ``TrainConfig``, and a patch of its train step.

Its ``init_train_state`` and ``train_step`` train a small model of its ``BaseModel`` over 8 emulated
devices: the smallest of its own has a vision tower of 400 million params. Its mesh is Auto, as
``jax.make_mesh`` made it in the JAX that it pins. ``scripts/train.py`` imports lerobot, which is to
be on ``PYTHONPATH`` at 0cf8648, as openpi pins it.
"""

import dataclasses
import functools
import importlib
import pathlib
import sys
from typing import Any

# A script of this name hides the program from what it imports.
sys.path.remove(str(pathlib.Path(__file__).parent))
sys.path.append(str(pathlib.Path(__file__).parent / "parts"))
import door

VERSION = "15a9616"
PATCH, PLUGIN = door.DOORS / "openpi.patch", door.DOORS / "openpi_config.py"
SUITES = (
    *("scripts/train_test.py", "src/openpi/models/lora_test.py", "src/openpi/models/pi0_test.py"),
    *("src/openpi/shared/image_tools_test.py", "src/openpi/shared/normalize_test.py"),
    "src/openpi/transforms_test.py",
)
FSDP = {"whole": 1, "fsdp": 8}
BOOST: dict[str, dict[str, Any]] = {
    "window": {"accumulate": 8},
    "gates": {"accumulate": 8, "skip_spikes": True, "average_params": {"decay": 0.999}},
}
STEPS, PARTS, ROWS, WIDTH = 6, 8, 64, 1024


def train(layout: str, way: str) -> None:
    """Audit and train: where params live, and how a step of 8 parts is made."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import openpi.models.model as models
    import openpi.training.config as configs
    import optax
    from flax import nnx
    from openpi.shared import array_typing
    from openpi.training import optimizer, sharding
    from scripts.train import init_train_state, train_step

    import boostax

    jax.config.update("jax_num_cpu_devices", 8)

    class Small(models.BaseModel):
        def __init__(self, rngs: nnx.Rngs) -> None:
            super().__init__(action_dim=32, action_horizon=4, max_token_len=8)
            self.up = nnx.Linear(32, WIDTH, rngs=rngs)
            self.middle = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.down = nnx.Linear(WIDTH, 4 * 32, rngs=rngs)

        def compute_loss(self, rng: Any, observation: Any, actions: Any, *, train: bool = False):
            x = sharding.activation_sharding_constraint(jnp.tanh(self.up(observation.state)))
            told = self.down(jnp.tanh(self.middle(x))).reshape(actions.shape)
            return jnp.mean((told - actions) ** 2, axis=-1)

        def sample_actions(self, rng: Any, observation: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    @dataclasses.dataclass(frozen=True)
    class SmallConfig(models.BaseModelConfig):
        model_type = models.ModelType.PI0

        def create(self, rng: Any) -> Small:
            return Small(nnx.Rngs(rng))

        def inputs_spec(self, *, batch_size: int = 1) -> Any:
            raise NotImplementedError

    @dataclasses.dataclass(frozen=True)
    class Windows(optimizer.AdamW):
        def create(self, lr: Any, weight_decay_mask: Any = None) -> Any:
            inner = super().create(lr, weight_decay_mask)
            return optax.MultiSteps(inner, PARTS).gradient_transformation()

    chosen: Any = Windows()
    calls, more = PARTS, {}
    if way in BOOST:
        chosen = importlib.import_module(PLUGIN.stem).Boostax(optimizer.AdamW(), BOOST[way])
    if way == "inside":
        chosen, calls, more = optimizer.AdamW(), 1, {"microbatches": PARTS}
    config = configs.TrainConfig(
        name="door",
        exp_name="door",
        model=SmallConfig(action_dim=32, action_horizon=4, max_token_len=8),
        optimizer=chosen,
        lr_schedule=optimizer.CosineDecaySchedule(warmup_steps=0, peak_lr=1e-3),
        ema_decay=None,
        batch_size=ROWS // calls,
        fsdp_devices=FSDP[layout],
        **more,
    )
    shape = (8 // config.fsdp_devices, config.fsdp_devices)
    axes = (sharding.BATCH_AXIS, sharding.FSDP_AXIS)
    mesh = jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(sharding.DATA_AXIS))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state, where = init_train_state(config, jax.random.key(0), mesh, resume=False)
    kept = door.local_bytes(state) - door.local_bytes(state.params)
    step = jax.jit(
        functools.partial(train_step, config),
        in_shardings=(whole, where, rows),
        out_shardings=(where, whole),
        donate_argnums=(1,),
    )
    random = np.random.default_rng(0)
    given = random.normal(size=(STEPS, calls, ROWS // calls, 32)).astype("f")
    wanted = random.normal(size=(STEPS, calls, ROWS // calls, 4, 32)).astype("f")
    audit, losses = None, []
    for xs, ys in zip(given, wanted, strict=True):
        told = []
        for x, y in zip(xs, ys, strict=True):
            seen = models.Observation(images={}, image_masks={}, state=jax.device_put(x, rows))
            batch = (seen, jax.device_put(y, rows))
            with sharding.set_mesh(mesh):
                if audit is None:
                    # JAX puts what it knows of arguments in their places, which are typed.
                    with array_typing.disable_typechecking():
                        compiled = step.lower(jax.random.key(1), state, batch).compile()
                    audit = boostax.audit(compiled, params=state.params, calls=calls)
                state, info = step(jax.random.key(1), state, batch)
            told.append(float(info["loss"]))
        losses.append(sum(told) / calls)
    print(audit, boostax.metrics(state.opt_state), file=sys.stderr)
    print(door.told(audit, kept, losses))


def rows(source: pathlib.Path) -> list[dict[str, Any]]:
    """Of the record."""
    folders = ("src", "packages/openpi-client/src", ".")
    with door.patched(source, PATCH) as copy:
        at = [*(source / name for name in folders), PLUGIN.parent]
        there = [*(copy / name for name in folders), PLUGIN.parent]
        alone = door.passed(source, SUITES, *at)
        loaded = door.passed(source, SUITES, *at, more=("-p", PLUGIN.stem))
        changed = door.tests(door.passed(copy, SUITES, *there), alone)
        run = functools.partial(door.measured, __file__)
        made = functools.partial(door.row, "openpi", VERSION)
        old = {name: run(f"{name} steps", *at) for name in FSDP}
        lines, own = door.lines_of(PATCH), door.code_of(PLUGIN, ("import dataclasses", ""))
        said = {"whole": "params whole", "fsdp": "FSDP"}
        found = [
            made(f"patch: {way}", lines, changed, old[x], run(f"{x} inside", *there))
            for x, way in said.items()
        ]
        counted = door.tests(loaded, alone)
        ways = {"window": "accumulate", "gates": "accumulate, skip_spikes, average_params"}
        for x, way in ways.items():
            new = run(f"fsdp {x}", *at)
            found.append(made(f"config: {way}", own, counted, old["fsdp"], new))
        return found


if __name__ == "__main__":
    door.run(__doc__ or "", train, rows)
