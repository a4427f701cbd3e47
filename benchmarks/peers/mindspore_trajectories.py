"""Trains small networks 20 steps with MindSpore's boost, by every dictionary, and records them.

Usage, with the interpreter of MindSpore's environment (``make test-mindspore`` makes it)::

    .peers/mindspore/bin/python benchmarks/peers/mindspore_trajectories.py FOLDER [--write]

Every case runs in a process of its own, because the first ``AutoBoost`` of a process is its only
one, and leaves an ``.npz`` and a ``.json`` in the folder; one that is there is not run again.
``--write`` gathers them into ``tests/golden/mindspore_trajectories.{npz,json}``, where cases with
the same bits share one program. ``tests/golden/README.md`` says what the arrays are.
"""

import argparse
import hashlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import programs as specs

HERE = pathlib.Path(__file__).resolve()
GOLDEN = HERE.parents[2] / "tests" / "golden"
CONFIGS = GOLDEN / "autoboost_configs.json"
STEPS, KEPT = 20, (1, 5, 20)
OUTPUTS = 4
# Before AutoBoost, which draws the freeze sequence and the start of a randomised SVD from NumPy.
SEED = 0
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum": {"class": "Momentum", "learning_rate": 0.05, "momentum": 0.9},
    "momentum_decay": {
        "class": "Momentum",
        "learning_rate": 0.05,
        "momentum": 0.9,
        "weight_decay": 0.01,
    },
    "sgd": {"class": "SGD", "learning_rate": 0.1},
    "sgd_momentum": {"class": "SGD", "learning_rate": 0.05, "momentum": 0.9},
    "slow": {"class": "Momentum", "learning_rate": 0.005, "momentum": 0.9},
    "slow_decay": {
        "class": "Momentum",
        "learning_rate": 0.005,
        "momentum": 0.9,
        "weight_decay": 0.01,
    },
    "momentum_schedule": {
        "class": "Momentum",
        "learning_rate": [0.1 * 0.9**t for t in range(STEPS)],
        "momentum": 0.9,
    },
    "adam": {"class": "Adam", "learning_rate": 0.002},
    "adam_decay": {"class": "AdamWeightDecay", "learning_rate": 0.002, "weight_decay": 0.01},
}
# At the other's rate float32 and float64 part in the network without its normalisations.
USUAL = {"mlp": "momentum", "resnet": "slow"}
COMPONENTS, SNAPSHOTS = 4, 12
# What an Ascend would find in the two groups of layers; on a CPU nothing writes the status.
OVERFLOWS = np.zeros((STEPS, 2), np.int32)
OVERFLOWS[[4, 8, 8, 13], [0, 0, 1, 1]] = 1
INIT_SCALE = 1024
# Two servers of eight: with fewer AdaSum leaves everything as it is.
RANKS = 16
RECOMMENDED = {
    "boost": {"mode": "auto", **dict.fromkeys(specs.SWITCHES, False)},
    "common": {"gradient_split_groups": [50, 100], "device_number": 8},
    "less_bn": {"fn_flag": True, "gc_flag": True},
    "grad_freeze": {"param_groups": 10, "freeze_type": 1, "freeze_p": 0.7, "total_steps": 65536},
    "dim_reduce": {
        "rho": 0.55,
        "gamma": 0.9,
        "alpha": 0.001,
        "sigma": 0.4,
        "n_components": 32,
        "pca_mat_path": None,
        "weight_load_dir": None,
        "timeout": 1800,
    },
}


class Case(NamedTuple):
    """One training run.

    Attributes:
      name: of its dictionary; with the network, the optimizer and the way unique.
      level: of AutoBoost.
      config: its dictionary; a path in it is the name of an array, written to a file when it runs.
      network: ``"mlp"``, ``"resnet"`` or ``"tiny"``.
      optimizer: a key of ``OPTIMIZERS``.
      way: ``"boost"`` (AutoBoost, then BoostTrainOneStepCell), ``"model"`` (``Model.train``),
        ``"groups"`` (BoostTrainOneStepWithLossScaleCell with a GroupLossScaleManager),
        ``"groups_model"`` (that manager in ``Model``), ``"ranks"`` (as boost, on ``RANKS``).
      mode: ``"graph"`` or ``"pynative"``.
      substituted: what of MindSpore was replaced: ``"Centralization"`` by its mean,
        ``"Float16"``, to which the cell for groups casts at boundaries, by float32.
    """

    name: str
    level: str
    config: Any
    network: str = "mlp"
    optimizer: str = "momentum"
    way: str = "boost"
    mode: str = "graph"
    substituted: str = ""

    @property
    def key(self) -> str:
        """Its file."""
        words = [self.name, self.network, self.optimizer, self.way, self.mode]
        return "-".join([*words, self.substituted] if self.substituted else words)


def manual(level: str = "O0", **groups: Any) -> tuple[str, dict[str, Any]]:
    """Exactly the techniques named, each with its settings."""
    on = {name: name in groups for name in specs.SWITCHES}
    settings = {name: group for name, group in groups.items() if group}
    return level, {"boost": {"mode": "manual", **on}, **settings}


def cases() -> Iterator[Case]:
    """All of them, as MindSpore ships."""
    both = list(itertools.product(USUAL.items(), ("boost", "model")))
    found = [row for row in json.loads(CONFIGS.read_text()) if "level" in row]
    for i, row in enumerate(found):
        for usual, way in both:
            yield Case(f"config_{i:02}", row["level"], row["dict"], *usual, way)
    for level in ("O0", "O1", "O2"):
        for usual, way in both:
            yield Case(f"recommended_{level}", level, RECOMMENDED, *usual, way)
    yield from optimizers()
    yield from switched()
    yield from less_bn()
    yield from freezing()
    yield from accumulation()
    yield from dim_reduce()
    yield from group_scales()


def optimizers() -> Iterator[Case]:
    """Nothing on, for each of them; and op by op."""
    for optimizer in OPTIMIZERS:
        yield Case("plain", *manual(), optimizer=optimizer)
    yield Case("plain", *manual(), "resnet", "slow_decay")
    yield Case("plain", *manual(), mode="pynative")
    yield Case("plain", *manual(), "tiny")
    yield Case("adasum", *manual(adasum={}))
    yield Case("adasum", *manual(adasum={}), way="ranks")


def switched() -> Iterator[Case]:
    """The levels with one switch turned, in a form that a CPU runs."""
    settings = {
        "less_bn": {"gc_flag": False},
        "grad_freeze": {"param_groups": 3, "freeze_p": 0.5, "total_steps": STEPS},
        "grad_accumulation": {"grad_accumulation_step": 2},
    }
    for level, on in specs.LEVELS.items():
        for usual in USUAL.items():
            yield Case(f"{level}_auto", level, {"boost": {"mode": "auto"}, **settings}, *usual)
        for name in specs.SWITCHES:
            boost = {"mode": "manual", name: name not in on}
            yield Case(f"{level}_{name}_{name not in on}", level, {"boost": boost, **settings})


def less_bn() -> Iterator[Case]:
    """LessBN, its head and centralization; with decay, which its new optimizer gives to all."""
    for fn_flag in (False, True):
        for gc_flag in (False, True):
            flags = {"fn_flag": fn_flag, "gc_flag": gc_flag}
            name = f"less_bn_fn{fn_flag:d}_gc{gc_flag:d}"
            for usual in (*USUAL.items(), ("resnet", "slow_decay")):
                yield Case(name, *manual(less_bn=flags), *usual)
    flags = {"fn_flag": False, "gc_flag": False}
    yield Case("less_bn_fn0_gc0", *manual(less_bn=flags), optimizer="momentum_schedule")
    yield Case("less_bn_fn0_gc0", *manual(less_bn=flags), "resnet", "slow", mode="pynative")
    flags = {"fn_flag": False, "gc_flag": True}
    for optimizer in ("momentum_decay", "adam", "sgd_momentum"):
        yield Case("less_bn_fn0_gc1", *manual(less_bn=flags), optimizer=optimizer)


def freezing() -> Iterator[Case]:
    """Types, shares and numbers of groups; optimizers, which it has one of for each group."""

    def freeze(groups: int, kind: int, share: float, steps: int, *more: str) -> Case:
        name = f"freeze_g{groups}_t{kind}_p{share:g}_n{steps}"
        settings = {
            "param_groups": groups,
            "freeze_type": kind,
            "freeze_p": share,
            "total_steps": steps,
        }
        return Case(name, *manual(grad_freeze=settings), *more)

    for kind in (0, 1):
        for share in (0.0, 0.2, 0.5, 0.7, 1.0):
            yield freeze(3, kind, share, STEPS)
    for groups in (1, 2, 10):
        yield freeze(groups, 1, 0.5, STEPS)
    # Shorter than the run: it starts again.
    yield freeze(3, 1, 0.5, 8)
    for usual in USUAL.items():
        yield freeze(10, 1, 0.7, 65536, *usual)
    yield freeze(10, 0, 0.5, STEPS, "resnet", "slow")
    yield freeze(5, 1, 0.2, STEPS, "resnet", "slow_decay")
    for optimizer in ("sgd", "sgd_momentum", "momentum_schedule", "adam", "adam_decay"):
        yield freeze(3, 1, 0.5, STEPS, "mlp", optimizer)
    yield freeze(3, 1, 0.5, STEPS)._replace(mode="pynative")
    yield freeze(3, 2, 0.5, STEPS)
    # The deepest group has the normalised head alone, and so nothing to centralise.
    alone = {"param_groups": 12, "total_steps": STEPS}
    yield Case("freeze_head_alone", *manual(less_bn={}, grad_freeze=alone), "resnet", "slow")


def accumulation() -> Iterator[Case]:
    """Windows; 3 leaves two micro-steps over. Beside freezing and beside LessBN."""
    for every in (1, 2, 3, 4):
        setting = {"grad_accumulation_step": every}
        yield Case(f"accumulate_{every}", *manual(grad_accumulation=setting))
    four = {"grad_accumulation_step": 4}
    for optimizer in ("adam", "momentum_schedule"):
        yield Case("accumulate_4", *manual(grad_accumulation=four), optimizer=optimizer)
    yield Case("accumulate_4", *manual(grad_accumulation=four), mode="pynative")
    both = manual(grad_accumulation=four, grad_freeze={"param_groups": 3, "total_steps": STEPS})
    yield Case("accumulate_4_freeze", *both)
    both = manual(grad_accumulation=four, less_bn={"fn_flag": True, "gc_flag": False})
    yield Case("accumulate_4_less_bn", *both)


def dim_reduce() -> Iterator[Case]:
    """From a basis on disk and from checkpoints; where it accepts a length and where it stalls."""
    basis = {"n_components": COMPONENTS, "pca_mat_path": "basis"}
    moving = {**basis, "alpha": 0.05}
    forms: dict[str, dict[str, Any]] = {
        "dim_reduce_basis": basis,
        "dim_reduce_moving": moving,
        "dim_reduce_rho": {**moving, "rho": 0.3},
        "dim_reduce_gamma": {**moving, "gamma": 0.5},
        "dim_reduce_sigma": {**moving, "sigma": 0.1},
        "dim_reduce_checkpoints": {**moving, "pca_mat_path": None, "weight_load_dir": "snapshots"},
        "dim_reduce_32": {"pca_mat_path": "basis_32", "alpha": 0.05},
        "dim_reduce_32_checkpoints": {"weight_load_dir": "snapshots"},
        "dim_reduce_no_files": {},
    }
    for name, settings in forms.items():
        yield Case(name, *manual(dim_reduce=settings), "tiny")
    # Those of the configurations that name no files, with one.
    found = json.loads(CONFIGS.read_text())
    for row, name in ((7, "basis_32"), (11, "basis")):
        config = found[row]["dict"]
        settings = {**config.get("dim_reduce", {}), "pca_mat_path": name}
        level = found[row]["level"]
        yield Case(f"config_{row:02}_files", level, {**config, "dim_reduce": settings}, "tiny")
    more = {"grad_accumulation": {"grad_accumulation_step": 2}}
    yield Case("dim_reduce_accumulate_2", *manual(dim_reduce=moving, **more), "tiny")
    more = {"less_bn": {}, "grad_freeze": {}, "adasum": {}}
    yield Case("dim_reduce_less_bn_freeze_adasum", *manual(dim_reduce=moving, **more), "tiny")
    yield Case("dim_reduce_moving", *manual(dim_reduce=moving), "tiny", mode="pynative")


def group_scales() -> Iterator[Case]:
    """Without a manager, with one in the cell, with one in ``Model``."""
    yield Case("loss_scale_group", *manual(loss_scale_group={}))
    yield Case("loss_scale_group", *manual(loss_scale_group={}), way="groups")
    yield Case("loss_scale_group", *manual("O1", loss_scale_group={}), way="groups_model")


# What all frameworks are given, in NumPy alone.


def shapes(network: str) -> dict[str, tuple[int, ...]]:
    """Of the params, outputs first, in the order of ``trainable_params``."""
    return specs.shapes(specs.RECORDED[network])


def start(network: str) -> dict[str, np.ndarray]:
    """The initial params."""
    return specs.start(specs.RECORDED[network])


def batches(network: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, a batch for each step."""
    rng = np.random.default_rng(2)
    one = (3, 4, 4) if network == "resnet" else specs.RECORDED[network]["sizes"][:1]
    x = rng.normal(size=(STEPS, specs.ROWS, *one))
    y = np.tanh(x.reshape(STEPS, specs.ROWS, -1)[..., :OUTPUTS])
    return x.astype(np.float32), y.astype(np.float32)


def directions() -> dict[str, np.ndarray]:
    """Orthonormal rows, and weights as of a training run, for DimReduce."""
    rng = np.random.default_rng(3)
    first = np.concatenate([x.ravel() for x in start("tiny").values()])
    basis = np.linalg.qr(rng.normal(size=(first.size, 32)))[0].T
    steps = rng.normal(size=(SNAPSHOTS, 8)) @ basis[:8] * np.linspace(0.1, 0.01, SNAPSHOTS)[:, None]
    return {
        "basis": basis[:COMPONENTS].astype(np.float32),
        "basis_32": basis.astype(np.float32),
        "snapshots": (first + np.cumsum(steps, 0)).astype(np.float32),
    }


# One case, in MindSpore.


def train(case: Case, folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The outcome, and the arrays where it ran."""
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE if case.mode == "graph" else ms.PYNATIVE_MODE)
    ms.set_device("CPU")
    if case.way == "ranks":
        ms.communication.init()
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    told: dict[str, Any] = {"stage": "AutoBoost"}
    arrays: dict[str, np.ndarray] = {}
    try:
        attempt(case, folder, told, arrays)
        del told["stage"]
    except Exception as error:
        # Below the message stand lines of MindSpore's own files.
        lines = str(error).split("\n\n---")[0].splitlines()
        message = "\n".join(line for line in lines if line.strip("- "))
        told["error"] = f"{type(error).__name__}: {message}"
        arrays = {}
    return told, arrays


def attempt(case: Case, folder: pathlib.Path, told: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Trains, and says on the way how far it came."""
    import mindspore as ms
    from mindspore import boost, nn
    from mindspore_networks import REPLACE, network_of

    if case.substituted:
        REPLACE[case.substituted]()
    config = with_files(case.config, folder)
    manager = boost.GroupLossScaleManager(INIT_SCALE, []) if case.way.startswith("groups") else None
    network = network_of(case.network, start(case.network), manager)
    params = network.trainable_params()
    assert [param.name for param in params] == list(shapes(case.network))
    if manager:
        manager.loss_scale_groups = [params[:6], params[6:]]
    settings = dict(OPTIMIZERS[case.optimizer])
    optimizer = getattr(nn, settings.pop("class"))(network.trainable_params(), **settings)
    np.random.seed(SEED)
    found = boost.AutoBoost(case.level, config)
    told["switches"] = dict(found.boost_config)
    told["stage"] = "build"
    if case.way.endswith("model"):
        how = {"loss_scale_manager": manager} if manager else {}
        model = ms.Model(
            network,
            nn.MSELoss(),
            optimizer,
            # Without a metric Model leaves the boost out.
            metrics={"loss"},
            boost_level=case.level,
            boost_config_dict=config,
            **how,
        )
        network, optimizer, cell = model._network, model._optimizer, model._train_network
    else:
        # As Model does it: the network without its loss.
        network, optimizer = found.network_auto_process_train(network, optimizer)
        loss = nn.WithLossCell(network, nn.MSELoss())
        # Without sens it returns no loss.
        cell = None if manager else boost.BoostTrainOneStepCell(loss, optimizer, sens=1.0)
    params = network.trainable_params()
    told["params"] = [own(param.name, case.network) for param in params]
    if hasattr(optimizer, "opts"):
        # Each trains its first param and all behind it, in some order.
        groups = [
            {own(param.name, case.network) for param in each.parameters} for each in optimizer.opts
        ]
        told["groups"] = [len(params) - len(group) for group in groups]
        assert all(
            set(told["params"][at:]) == x for at, x in zip(told["groups"], groups, strict=True)
        )
        arrays["strategy"] = optimizer.train_strategy.asnumpy()[:STEPS].astype(np.int8)
        told["strategy_length"] = len(optimizer.train_strategy)
    told["stage"] = "train"
    if case.way == "ranks":
        told["adasum_enabled"] = cell.enable_adasum
    losses, kept, scales = [], [], []
    for t, (x, y) in enumerate(zip(*batches(case.network), strict=True), 1):
        if manager:
            # A cell for each step: on a CPU its compiler makes constants of what the status is.
            cell = boost.BoostTrainOneStepWithLossScaleCell(loss, optimizer, manager)
            for status, overflow in zip(cell.overflow_status_list, OVERFLOWS[t - 1], strict=True):
                status.set_data(ms.Tensor(np.full(8, overflow, np.int32)))
        cell.set_train()
        answer = cell(ms.Tensor(x), ms.Tensor(y))
        answer = answer[0] if isinstance(answer, tuple) else answer
        losses.append(np.nan if answer is None else float(answer.asnumpy()))
        if manager:
            scales.append([float(x.asnumpy()) for x in manager.dynamic_loss_scale])
            manager._loss_scale = [x.value() for x in manager.dynamic_loss_scale[1:-1]]
        if t in KEPT:
            kept.append(np.concatenate([p.asnumpy().ravel() for p in params]))
    arrays["losses"] = np.array(losses, np.float32)
    arrays["w"] = np.stack(kept)
    if manager:
        arrays["scales"] = np.array(scales, np.float32)
    if path := getattr(found, "local_pca_mat_path", None):
        arrays["basis"] = np.load(path).astype(np.float32)


def own(name: str, network: str) -> str:
    """A param's name without what MindSpore put before it: the cells around, one by one."""
    names = [*shapes(network), "fc6.multiplier", "fc2.multiplier", "fc.multiplier"]
    return next(x for x in names if f".{name}".endswith(f".{x}"))


def with_files(config: Any, folder: pathlib.Path) -> Any:
    """The dictionary anew, with the files that it names."""
    import mindspore as ms

    config = json.loads(json.dumps(config))
    settings = config.get("dim_reduce", {}) if config else {}
    if name := settings.get("pca_mat_path"):
        settings["pca_mat_path"] = str(folder / f"{name}.npy")
        np.save(settings["pca_mat_path"], directions()[name])
    if name := settings.get("weight_load_dir"):
        settings["weight_load_dir"] = str(folder)
        for i, row in enumerate(directions()[name]):
            params, at = [], 0
            for param, shape in shapes("tiny").items():
                size = int(np.prod(shape))
                data = ms.Tensor(row[at : at + size].reshape(shape))
                params.append({"name": param, "data": data})
                at += size
            ms.save_checkpoint(params, str(folder / f"{i:02}.ckpt"))
    return config


# All cases.


def one(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """What a case's process says, now or earlier."""
    told = folder / f"{case.key}.json"
    if not told.exists():
        command = [str(HERE), str(folder), "--case", json.dumps(case)]
        if case.way == "ranks":
            count = f"--worker_num={RANKS}", f"--local_worker_num={RANKS}"
            launcher = pathlib.Path(sys.executable).with_name("msrun")
            command = [str(launcher), *count, "--join=True", "--log_dir=logs", *command]
        else:
            command = [sys.executable, *command]
        threads = {"OMP_NUM_THREADS": "1", "GLOG_v": "3"}
        path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {**os.environ, **threads, "PATH": path}
        done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{case.key}:\n{done.stderr[-3000:]}")
    return json.loads(told.read_text())


def both(case: Case, folder: pathlib.Path) -> Iterator[tuple[Case, dict[str, Any]]]:
    """A case as MindSpore ships, and where a CPU cannot run it the same with a part replaced."""
    told = one(case, folder)
    yield case, told
    for part in ("Centralization", "Float16"):
        if part in told.get("error", ""):
            case = case._replace(substituted=part)
            yield case, one(case, folder)


def record(runs: list[tuple[Case, dict[str, Any]]], folder: pathlib.Path) -> None:
    """Writes the golden files."""
    arrays: dict[str, np.ndarray] = dict(directions())
    for network in ("mlp", "resnet", "tiny"):
        arrays[f"{network}_start"] = np.concatenate([x.ravel() for x in start(network).values()])
        arrays[f"{network}_x"], arrays[f"{network}_y"] = batches(network)
    programs: dict[str, dict[str, Any]] = {}
    named: dict[str, str] = {}
    listed = []
    for case, told in runs:
        row = {**case._asdict(), **told}
        if "error" not in told:
            with np.load(folder / f"{case.key}.npz") as found:
                kept = {name: found[name] for name in found.files}
            # Losses are missing where Model does not pass them on.
            bits = hashlib.sha256(kept["w"].tobytes() + json.dumps(told["params"]).encode())
            digest = bits.hexdigest()
            facts = {k: row.pop(k) for k in ("params", "groups", "strategy_length") if k in row}
            if digest not in named:
                named[digest] = f"p{len(programs):03}"
                programs[named[digest]] = {"network": case.network, **facts}
                for name, value in kept.items():
                    arrays[f"{named[digest]}_{name}"] = value
            row["program"] = named[digest]
        listed.append(row)
    facts = {
        "shapes": {network: shapes(network) for network in ("mlp", "resnet", "tiny")},
        "optimizers": OPTIMIZERS,
        "kept_after": KEPT,
        "overflows": OVERFLOWS.tolist(),
        "init_scale": INIT_SCALE,
    }
    # A line for each program and each run.
    lines = {
        "programs": [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in programs.items()],
        "runs": [json.dumps(row) for row in listed],
    }
    text = json.dumps(facts)[:-1]
    text += ',\n"programs": {\n' + ",\n".join(lines["programs"])
    text += '\n},\n"runs": [\n' + ",\n".join(lines["runs"]) + "\n]}\n"
    json.loads(text)
    np.savez_compressed(GOLDEN / "mindspore_trajectories.npz", **arrays)
    (GOLDEN / "mindspore_trajectories.json").write_text(text)


def main(folder: pathlib.Path, only: str, write: bool) -> None:
    """Runs what has not run, and writes."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for case in cases():
        if only in case.key:
            for ran, told in both(case, folder):
                runs.append((ran, told))
                print(ran.key, told.get("error", "ran")[:160].replace("\n", " "), flush=True)
    if write:
        record(runs, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", default="", help="part of a case's key")
    parser.add_argument("--write", action="store_true", help="the golden files")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        asked = Case(*json.loads(given.case))
        with tempfile.TemporaryDirectory() as files:
            told, arrays = train(asked, pathlib.Path(files))
        if os.environ.get("RANK_ID", "0") != "0":
            sys.exit()
        if arrays:
            np.savez(given.folder / f"{asked.key}.npz", **arrays)
        (given.folder / f"{asked.key}.json").write_text(json.dumps(told))
    else:
        main(given.folder, given.only, given.write)
