"""The door into MaxText: its own train loop on 8 emulated devices, before and after the patch.

Runs in an environment of ``maxtext.txt`` (Python 3.12) with boostax on the path::

    python benchmarks/doors/maxtext.py --source DIR

``DIR`` has the source of MaxText 0.2.4. Copies of it are trained and tested, one of them patched by
``docs/doors/maxtext.patch``. Printed last are rows of the record ``doors``, as JSON.
"""

import argparse
import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from parts import door as door_parts
from parts import programs

PATCH = programs.ROOT / "docs" / "doors" / "maxtext.patch"
VERSION = "0.2.4"
# A small decoder in f32: MaxText's bf16 would hide what differs.
CONFIG = (
    "run_name=door hardware=cpu skip_jax_distributed_system=true enable_checkpointing=false "
    "enable_goodput_recording=false dataset_type=synthetic attention=dot_product dtype=float32 "
    "base_emb_dim=64 base_mlp_dim=128 base_num_query_heads=4 base_num_kv_heads=4 head_dim=16 "
    "base_num_decoder_layers=2 vocab_size=512 max_target_length=32 per_device_batch_size=1 "
    "gradient_accumulation_steps=4 steps=6"
).split()
# Those that touch the optimizer, micro-batches and the train step, and run without a TPU.
TESTS = (
    "unit/optimizers",
    "unit/gradient_accumulation_nnx",
    "unit/pre_train_loss_mask",
    "unit/train_state_nnx",
    "unit/train_state_nnx_checkpoint",
    "unit/train_nnx",
    "unit/train_utils",
    "unit/train_utils_nnx",
    "unit/state_dtypes",
    "unit/sharding_nnx",
    "integration/diloco",
    "integration/setup_train_loop_nnx",
)
# Its tests of micro-batches are on one device; the same on two replicas take the patched way.
TWO_REPLICAS = (
    (r"local_devices\(\)\[:1\]", "local_devices()[:2]"),
    (r"reshape\(\s*1,\s*\)", "reshape(2)"),
    (r'\("x",\)', '("data",)'),
    (r"(debug_sharding: bool = False)", r"\1\n  logical_axis_rules: tuple = ()"),
)


@dataclasses.dataclass(frozen=True)
class Door:
    """A way in, on a mesh.

    Attributes:
      way: how boostax gets in.
      data, fsdp: sizes of the axes of the mesh.
      tree: which copy of the source.
      stored: the dtype of moments, where ``store`` is put around what ``get_optimizer`` returns.
    """

    way: str
    data: int
    fsdp: int
    tree: str = "patched"
    stored: str | None = None


DOORS = (
    Door("patch", 8, 1),
    Door("patch", 2, 4),
    Door('patch, `axes = ("data", "fsdp")`', 2, 4, "both axes"),
    Door("`store` around `get_optimizer`, 8 bits", 8, 1, "plain", "int8"),
    Door("`store` around `get_optimizer`, bf16", 2, 4, "plain", "bfloat16"),
)


def main() -> None:
    """Print a row for each door."""
    parser = argparse.ArgumentParser(description="The door into MaxText.")
    parser.add_argument("--source", type=pathlib.Path, help=f"a checkout of MaxText {VERSION}")
    parser.add_argument("--train", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(*args.train)
        return
    if args.source is None:
        parser.error(f"--source must name a checkout of MaxText {VERSION}, got none.")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(args.source, pathlib.Path(folder))))


def measured(source: pathlib.Path, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Rows of the record."""
    names = "src", "tests", "pytest.ini"
    plain = programs.copied(source, folder / "plain", names)
    patched = programs.patched(programs.copied(source, folder / "patched", names), PATCH)
    both = shutil.copytree(patched, folder / "both axes")
    edited = both / "src/maxtext/utils/gradient_accumulation.py"
    programs.rewritten(edited, [(r'axes = \("data",\)', 'axes = ("data", "fsdp")')])
    passed, ran = tests(patched)
    suites = f"{passed} of {ran}, {tests(plain)[0]} without"
    rows: list[dict[str, Any]] = []
    for door in DOORS:
        by_patch = door.stored is None
        rows.append(
            door_parts.row(
                f"MaxText, data {door.data}" + (f", FSDP {door.fsdp}" if door.fsdp > 1 else ""),
                VERSION,
                door.way,
                door_parts.lines_of(PATCH) if by_patch else 1,
                suites if by_patch else "-",
                run(plain, door, None),
                run(folder / door.tree, door, door.stored),
            )
        )
    return rows


def tests(tree: pathlib.Path) -> tuple[int, int]:
    """How many of its tests passed, of those that ran."""
    files = [tree / "tests" / f"{name}_test.py" for name in TESTS]
    two = tree / "tests" / "unit" / "gradient_accumulation_nnx_two_replicas_test.py"
    shutil.copy(files[1], two)
    programs.rewritten(two, TWO_REPLICAS)
    pytest = [sys.executable, "-m", "pytest", *map(str, (*files, two))]
    return programs.tests(pytest, tree, environment(tree))


def environment(tree: pathlib.Path) -> dict[str, str]:
    """With the tree on the path, and without Google's cloud."""
    return programs.environment(tree / "src", tree, DECOUPLE_GCLOUD="TRUE")


def run(tree: pathlib.Path, door: Door, stored: str | None) -> dict[str, Any]:
    """What MaxText's loop did in this tree."""
    out = tree / "told.json"
    mesh = [f"ici_data_parallelism={door.data}", f"ici_fsdp_parallelism={door.fsdp}"]
    arguments = ["src/maxtext/configs/base.yml", *CONFIG, *mesh, f"base_output_directory={tree}"]
    command = [sys.executable, __file__, "--train", str(out), str(stored), *arguments]
    subprocess.run(command, cwd=tree, env=environment(tree), check=True, stdout=sys.stderr)
    return json.loads(out.read_text())


def train(out: str, stored: str, *arguments: str) -> None:
    """MaxText's ``main``, its compiled step audited, its losses kept."""
    # Here this file is the module of MaxText's name.
    sys.path.remove(str(pathlib.Path(__file__).parent))
    import jax
    from flax import nnx
    from maxtext.optimizers import optimizers
    from maxtext.trainers.pre_train import train as program
    from maxtext.utils import train_utils

    import boostax

    told: dict[str, Any] = {}
    get_optimizer, jit = optimizers.get_optimizer, train_utils.jit_train_and_eval_step

    class Step:
        def __init__(self, step: Any) -> None:
            self.step = step

        def lower(self, state: Any, *args: Any) -> Any:
            lowered = self.step.lower(state, *args)
            params = nnx.filter_state(state["model"], nnx.Param)
            audit = boostax.audit(lowered, params=params)
            print(audit)
            told.update(programs.told(audit, state["optimizer"]))
            return lowered

        def __call__(self, *args: Any) -> Any:
            state, metrics = jax.block_until_ready(self.step(*args))
            told["losses"].append(float(metrics["scalar"]["learning/loss"]))
            return state, metrics

    def watched(*args: Any, **kwargs: Any) -> Any:
        step, evaluate = jit(*args, **kwargs)
        return Step(step), evaluate

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        moments = {"*mu*": "int8", "*nu*": "log8"} if stored == "int8" else stored
        return boostax.precision.store(get_optimizer(*args, **kwargs), moments=moments)

    train_utils.jit_train_and_eval_step = watched
    if stored != "None":
        optimizers.get_optimizer = wrapped
    program.main(["train", *arguments])
    pathlib.Path(out).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
