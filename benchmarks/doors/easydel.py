"""The door into EasyDeL: its own training step on 8 emulated devices, before and after the patch.

Runs in an environment of ``easydel.txt`` (Python 3.12) with boostax on the path::

    python benchmarks/doors/easydel.py --source DIR

``DIR`` has the source of EasyDeL at commit 090a03b. Copies of it are trained and tested, one of
them patched by ``docs/doors/easydel.patch``. Printed last are rows of the record ``doors``, in
JSON.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from parts import door as door_parts
from parts import programs

PATCH = programs.ROOT / "docs" / "doors" / "easydel.patch"
VERSION = "0.3.0 at 090a03b"
STEPS, MINIBATCHES = 6, 4
# Models of Hugging Face that EasyDeL mends where they can be imported. Without PyTorch their names
# can, and what is in them cannot.
OF_PYTORCH = ("dbrx", "glm4v_moe", "llama4", "phimoe", "qwen3_5_moe", "qwen3_next")
# Those that touch minibatches, the optimizer and the training step, and load no weights.
TESTS = (
    "training_utils_gradient_accumulation",
    "base_trainer_utils",
    "distillation_teacher_microbatching",
    "resolve_total_steps",
    "step_metrics",
    "trainer_forward_kwargs_safety",
    "training_arguments_tx_template",
)
# Its tests of minibatches are without a mesh; the same on two replicas take the patched way.
TWO_REPLICAS = (
    (r"import dataclasses", "import dataclasses\nfrom unittest import mock"),
    (r"(    graphstate: jax.Array)", r"\1\n    model = mock.Mock()"),
    (
        r"    grads, metrics = (minibatch_call\(.*\))",
        r'    with jax.make_mesh((2,), ("dp",)):\n        grads, metrics = \1',
    ),
)


@dataclasses.dataclass(frozen=True)
class Door:
    """A way in, on a mesh.

    Attributes:
      way: how boostax gets in.
      dp, fsdp: sizes of the axes of the mesh.
      tree: which copy of the source.
      stored: whether ``store`` is put around the optimizer.
    """

    way: str
    dp: int
    fsdp: int
    tree: str = "patched"
    stored: bool = False


DOORS = (
    Door("patch", 8, 1),
    Door("patch", 2, 4),
    Door("patch", 1, 8),
    Door("`store` around `tx`, bf16", 1, 8, "plain", stored=True),
)


def main() -> None:
    """Print a row for each door."""
    parser = argparse.ArgumentParser(description="The door into EasyDeL.")
    parser.add_argument("--source", type=pathlib.Path, help=f"a checkout of EasyDeL {VERSION}")
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--test", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        out, dp, fsdp, way = args.train
        train(pathlib.Path(out), int(dp), int(fsdp), stored=way == "stored")
    elif args.test:
        test(args.test)
    elif args.source is None:
        parser.error(f"--source must name a checkout of EasyDeL {VERSION}, got none.")
    else:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measured(args.source, pathlib.Path(folder))))


def measured(source: pathlib.Path, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Rows of the record."""
    names = "easydel", "tests", "pyproject.toml"
    plain = programs.copied(source, folder / "plain", names)
    patched = programs.patched(programs.copied(source, folder / "patched", names), PATCH)
    passed, ran = tests(patched)
    suites = f"{passed} of {ran}, {tests(plain)[0]} without"
    rows: list[dict[str, Any]] = []
    for door in DOORS:
        sizes = {"dp": door.dp, "FSDP": door.fsdp}
        mesh = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        rows.append(
            door_parts.row(
                f"EasyDeL, {mesh}",
                VERSION,
                door.way,
                1 if door.stored else door_parts.lines_of(PATCH),
                "-" if door.stored else suites,
                run(plain, door, stored=False),
                run(folder / door.tree, door, door.stored),
            )
        )
    return rows


def environment(tree: pathlib.Path) -> dict[str, str]:
    """With the tree on the path; EasyDeL adds flags that this XLA does not know, and starts Ray."""
    return programs.environment(tree, EASYDEL_AUTO="0", ENABLE_DISTRIBUTED_INIT="0")


def tests(tree: pathlib.Path) -> tuple[int, int]:
    """How many of its tests passed, of those that ran."""
    files = [tree / "tests" / "trainers" / f"test_{name}.py" for name in TESTS]
    two = files[0].with_name("test_training_utils_gradient_accumulation_two_replicas.py")
    shutil.copy(files[0], two)
    programs.rewritten(two, TWO_REPLICAS)
    command = [sys.executable, __file__, "--test", *map(str, (*files, two))]
    return programs.tests(command, tree, environment(tree))


def run(tree: pathlib.Path, door: Door, stored: bool) -> dict[str, Any]:
    """What EasyDeL's step did in this tree."""
    out = tree / "told.json"
    command = [sys.executable, __file__, "--train", str(out), str(door.dp), str(door.fsdp)]
    command.append("stored" if stored else "plain")
    subprocess.run(command, cwd=tree, env=environment(tree), check=True, stdout=sys.stderr)
    return json.loads(out.read_text())


def hide() -> None:
    """Make room for EasyDeL: this file has its name; and hide what PyTorch would be needed for."""
    sys.path.remove(str(pathlib.Path(__file__).parent))
    sys.modules.update({f"transformers.models.{name}": None for name in OF_PYTORCH})  # type: ignore


def train(out: pathlib.Path, dp: int, fsdp: int, *, stored: bool) -> None:
    """Six of EasyDeL's steps of a small Llama, the compiled step audited, the losses kept."""
    hide()
    import easydel
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from easydel.trainers.trainer._fn import training_step
    from flax import nnx

    import boostax

    config = easydel.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    config.add_basic_configurations(
        sharding_axis_dims=(dp, fsdp, 1, 1, 1), attn_mechanism="vanilla"
    )
    model = easydel.LlamaForCausalLM(
        config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    tx = optax.adamw(1e-3)
    if stored:
        tx = boostax.precision.store(tx, moments="bfloat16")
    state = model.shard_model().to_state().init_tx(tx).shard_state()
    ids = np.random.default_rng(0).integers(0, 512, (32, 32), np.int32)
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
    with model.mesh:
        step = jax.jit(
            functools.partial(training_step, gradient_accumulation_steps=MINIBATCHES),
            in_shardings=(state.shardings, None),
            out_shardings=(state.shardings, None),
            donate_argnums=0,
        )
        audit = boostax.audit(step.lower(state, batch), params=state.graphstate)
        print(audit)
        told = programs.told(audit, state.opt_state)
        for _ in range(STEPS):
            state, metrics = jax.block_until_ready(step(state, batch))
            told["losses"].append(float(metrics.loss))
    out.write_text(json.dumps(told))


def test(arguments: list[str]) -> None:
    """Run pytest."""
    hide()
    import pytest

    sys.exit(pytest.main(arguments))


if __name__ == "__main__":
    main()
