"""The door into MaxText: its own train loop on 8 emulated devices, before and after the patch.

Runs in an environment of ``maxtext.txt`` (Python 3.12) with boostax on the path::

    python benchmarks/doors/maxtext.py --source DIR

``DIR`` has the source of MaxText 0.2.4. Copies of it are trained and tested, one of them patched by
``docs/doors/maxtext.patch``. Printed last are rows of the record ``doors``, as JSON.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
PATCH = ROOT / "docs" / "doors" / "maxtext.patch"
VERSION = "0.2.4"
DEVICES, STEPS, MICROBATCHES = 8, 6, 4
# A small decoder in f32: MaxText's bf16 would hide what differs.
CONFIG = (
    "run_name=door hardware=cpu skip_jax_distributed_system=true enable_checkpointing=false "
    "enable_goodput_recording=false dataset_type=synthetic attention=dot_product dtype=float32 "
    "base_emb_dim=64 base_mlp_dim=128 base_num_query_heads=4 base_num_kv_heads=4 head_dim=16 "
    "base_num_decoder_layers=2 vocab_size=512 max_target_length=32 per_device_batch_size=1 "
    f"gradient_accumulation_steps={MICROBATCHES} steps={STEPS}"
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
# The tests of micro-batches are on one device; the same on two replicas take the patched way.
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
      program: MaxText on which mesh.
      way: how boostax gets in.
      data, fsdp: sizes of the axes of the mesh.
      axes: those over which gradients are reduced once; ``None`` for the source without a patch.
      stored: the dtype of moments, where ``store`` is put around what ``get_optimizer`` returns.
    """

    program: str
    way: str
    data: int
    fsdp: int
    axes: tuple[str, ...] | None = ("data",)
    stored: str | None = None


DOORS = (
    Door("MaxText, data 8", "patch", 8, 1),
    Door("MaxText, data 2, FSDP 4", "patch", 2, 4),
    Door("MaxText, data 2, FSDP 4", "patch, both axes", 2, 4, ("data", "fsdp")),
    Door("MaxText, data 8", "`store` around `get_optimizer`, 8 bits", 8, 1, None, "int8"),
    Door("MaxText, data 2, FSDP 4", "`store` around `get_optimizer`", 2, 4, None, "bfloat16"),
)


def main() -> None:
    """Print a row for each door."""
    parser = argparse.ArgumentParser(description="The door into MaxText.")
    parser.add_argument("--source", type=pathlib.Path, help="a checkout of MaxText 0.2.4")
    parser.add_argument("--train", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(*args.train)
        return
    if args.source is None:
        parser.error("--source must name a checkout of MaxText 0.2.4, got none.")
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measured(args.source, pathlib.Path(folder)))
    print(json.dumps(rows))


def measured(source: pathlib.Path, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Rows of the record."""
    plain = copied(source, folder / "plain")
    patched = copied(source, folder / "patched")
    command = ["git", "apply", "--unidiff-zero", str(PATCH)]
    subprocess.run(command, cwd=patched, check=True)
    passed, ran = tests(patched)
    passed_without, _ = tests(plain)
    rows = []
    for door in DOORS:
        name = {None: "plain", ("data",): "patched"}.get(door.axes, "-".join(door.axes or ()))
        tree = folder / name
        if not tree.exists():
            shutil.copytree(patched, tree)
            replace(tree / "src/maxtext/utils/gradient_accumulation.py", r'\("data",\)', door.axes)
        old = run(plain, door)
        new = run(tree, door, stored=door.stored)
        pairs = zip(old["losses"], new["losses"], strict=True)
        suites = f"{passed} of {ran}, {passed_without} without"
        rows.append(
            {
                "program": door.program,
                "version": VERSION,
                "way": door.way,
                "lines": added() if door.axes else 1,
                "its tests": suites if door.axes else "-",
                "reductions before": old["reductions"],
                "reductions after": new["reductions"],
                "temp MB before": old["temporary"] / 1e6,
                "temp MB after": new["temporary"] / 1e6,
                "state MB before": old["state"] / 1e6,
                "state MB after": new["state"] / 1e6,
                "losses differ": max(abs(a - b) / abs(a) for a, b in pairs),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def copied(source: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    """What trains and is tested."""
    for name in ("src", "tests"):
        shutil.copytree(source / name, to / name)
    shutil.copy(source / "pytest.ini", to)
    one = to / "tests/unit/gradient_accumulation_nnx_test.py"
    two = one.with_name("gradient_accumulation_nnx_two_replicas_test.py")
    shutil.copy(one, two)
    for pattern, new in TWO_REPLICAS:
        replace(two, pattern, new)
    return to


def replace(path: pathlib.Path, pattern: str, new: Any) -> None:
    """Write ``new`` where the file has the pattern."""
    by = new if isinstance(new, str) else str(new)
    text, count = re.subn(pattern, by, path.read_text())
    if not count:
        raise RuntimeError(f"{path.name} must have {pattern}, got none. Is it {VERSION}?")
    path.write_text(text)


def added() -> int:
    """Lines of the patch."""
    lines = PATCH.read_text().splitlines()
    return sum(line.startswith("+") and not line.startswith("+++") for line in lines)


def environment(tree: pathlib.Path) -> dict[str, str]:
    """With the tree and boostax on the path, 8 devices, and no cloud."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    path = os.pathsep.join(map(str, (tree / "src", tree, ROOT)))
    mine = {"XLA_FLAGS": flags, "PYTHONPATH": path, "DECOUPLE_GCLOUD": "TRUE"}
    return os.environ | mine | {"JAX_PLATFORMS": "cpu"}


def tests(tree: pathlib.Path) -> tuple[int, int]:
    """How many of its tests passed, of those that ran."""
    files = [f"tests/{name}_test.py" for name in TESTS]
    files.append("tests/unit/gradient_accumulation_nnx_two_replicas_test.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--junitxml=junit.xml", *files]
    subprocess.run(command, cwd=tree, env=environment(tree), check=False, stdout=sys.stderr)
    cases = ElementTree.parse(tree / "junit.xml").getroot().findall(".//testcase")
    cases = [x for x in cases if x.find("skipped") is None]
    failed = [x for x in cases if x.find("failure") is not None or x.find("error") is not None]
    for case in failed:
        print("failed:", case.get("name"), file=sys.stderr)
    return len(cases) - len(failed), len(cases)


def run(tree: pathlib.Path, door: Door, stored: str | None = None) -> dict[str, Any]:
    """What MaxText's loop did in this tree."""
    out = tree / "told.json"
    mesh = [f"ici_data_parallelism={door.data}", f"ici_fsdp_parallelism={door.fsdp}"]
    arguments = ["src/maxtext/configs/base.yml", *CONFIG, *mesh, f"base_output_directory={tree}"]
    # Without -P this file would be the module of MaxText's name.
    command = [sys.executable, "-P", __file__, "--train", str(out), str(stored)]
    command += arguments
    subprocess.run(command, cwd=tree, env=environment(tree), check=True, stdout=sys.stderr)
    return json.loads(out.read_text())


def train(out: str, stored: str, *arguments: str) -> None:
    """MaxText's ``main``, its compiled step audited, its losses kept."""
    import jax
    from flax import nnx
    from maxtext.optimizers import optimizers
    from maxtext.trainers.pre_train import train as program
    from maxtext.utils import train_utils

    import boostax

    told: dict[str, Any] = {"losses": []}
    get_optimizer, jit = optimizers.get_optimizer, train_utils.jit_train_and_eval_step

    class Step:
        def __init__(self, step: Any) -> None:
            self.step = step

        def lower(self, *args: Any) -> Any:
            lowered = self.step.lower(*args)
            params = nnx.filter_state(args[0]["model"], nnx.Param)
            audit = boostax.audit(lowered, params=params)
            print(audit)
            leaves = jax.tree.leaves(args[0]["optimizer"])
            told["reductions"], told["temporary"] = audit.reductions, audit.temporary_bytes
            told["state"] = sum(x.addressable_shards[0].data.nbytes for x in leaves)
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
