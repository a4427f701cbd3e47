"""Trains programs with MindSpore: ``python mindspore_programs.py PROGRAMS.json FOLDER``.

``FOLDER/<number>.npz`` has the weights after each step and what a loss-scale cell returned,
``FOLDER/<number>.json`` the names of the params or the error. Replaced are what a CPU lacks: the
operator Centralization by MindSpore's own mean, the status of an Ascend by MindSpore's own branch
for IsFinite, the boundaries in float16 by float32. ``AutoBoost``, one for a process, is forgotten.
"""

import copy
import importlib
import json
import os
import pathlib
import sys
import traceback

os.environ |= {"GLOG_v": "3", "OMP_NUM_THREADS": "1"}

import mindspore as ms
import mindspore_networks as networks
import numpy as np
import programs as specs
from mindspore import amp, boost, nn

LEVELS = copy.deepcopy(boost.boost._boost_config_level)


def lines(net, scaled):
    """The statements of ``construct``; MindSpore compiles source, without loops over names."""
    kind, last = net["kind"], len(net["sizes"]) - 1
    if kind == "resnet":
        found = ["self.relu(self.bn(self.conv(x)))"]
        found += [f"self.block{i}(x)" for i in range(net["sizes"][2])]
        return [*found, "self.fc(self.mean(x, (2, 3)))"]
    if kind == "lenet":
        norm = "self.bn{}(self.conv{}(x))" if net["norms"] else "self.conv{1}(x)"
        found = [f"self.pool(self.relu({norm.format(i, i)}))" for i in (1, 2)]
        return [*found, "self.relu(self.fc1(self.flatten(x)))", "self.fc2(x)"]
    norm = (
        "self.relu(self.ln{0}(self.fc{0}(x)))" if kind == "layernorm" else "self.relu(self.fc{}(x))"
    )
    found = [norm.format(i) for i in range(1, last)] + [f"self.fc{last}(x)"]
    if scaled:
        half = last // 2
        found[half:half] = ["self.manager(x, 1, 2)"]
        found = ["self.manager(x, 0, 1)", *found, "self.manager(x, 2, 3)"]
    return found


def network_of(net, start, manager, folder, number):
    """The network, of a module written for it."""
    body = "".join(f"        x = {line}\n" for line in lines(net, manager is not None))
    text = "from mindspore import nn\n\n\nclass Network(nn.Cell):\n    def construct(self, x):\n"
    (folder / f"network{number}.py").write_text(f"{text}{body}        return x\n")
    made = importlib.import_module(f"network{number}").Network()
    for name in dict.fromkeys(name.split(".")[0] for name in start):
        setattr(made, name, layer(name, start))
    made.relu, made.pool, made.flatten = nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten()
    made.mean = networks.ops.ReduceMean()
    if manager is not None:
        made.manager = manager
    return made


def layer(name, start):
    if name.startswith("block"):
        return networks.Block(start, name)
    if name.startswith("fc"):
        return networks.dense(start, name)
    if name.startswith("bn"):
        return networks.norm(start, name)
    if name.startswith("ln"):
        gamma, beta = (ms.Tensor(start[f"{name}.{part}"]) for part in ("gamma", "beta"))
        return nn.LayerNorm(gamma.shape, gamma_init=gamma, beta_init=beta, epsilon=1e-5)
    made = networks.conv(start, name)
    if f"{name}.bias" in start:
        channels = made.in_channels, made.out_channels, 3
        made = nn.Conv2d(*channels, pad_mode="same", has_bias=True)
        made.weight.set_data(ms.Tensor(start[f"{name}.weight"]))
        made.bias.set_data(ms.Tensor(start[f"{name}.bias"]))
    return made


def optimizer_of(spec, params):
    given = dict(spec["optimizer"])
    if isinstance(rate := given["learning_rate"], dict):
        rate = dict(rate)
        given["learning_rate"] = getattr(nn, rate.pop("class"))(**rate)
    params = [{"params": params}] if spec["grouped"] else params
    return getattr(nn, given.pop("class"))(params, **given)


def cell_of(loss, optimizer, kind, scale):
    """As ``amp.build_train_network`` makes it of a manager."""
    if kind in ("", "FixedNoDrop"):
        # Without sens it returns no loss.
        return boost.BoostTrainOneStepCell(loss, optimizer, sens=scale or 1.0)
    cell = boost.BoostTrainOneStepWithLossScaleCell(loss, optimizer, scale)
    cell.ascend_910b_target, cell.enable_allfinite = True, False
    return cell


def train(spec, folder, number):
    """Names of the params; weights after each step, overflows and scales."""
    start, (kind, *given) = specs.start(spec["network"]), spec["manager"] or [""]
    manager = boost.GroupLossScaleManager(*given, []) if kind == "Group" else None
    network = network_of(spec["network"], start, manager, folder, number)
    params = network.trainable_params()
    assert [param.name for param in params] == list(start), [param.name for param in params]
    if manager:
        half = 2 * ((len(spec["network"]["sizes"]) - 1) // 2)
        manager.loss_scale_groups = [params[:half], params[half:]]
    optimizer = optimizer_of(spec, params)
    config = specs.dictionary(spec)
    if "dim_reduce" in specs.active(spec):
        config["dim_reduce"]["pca_mat_path"] = str(folder / f"basis{number}.npy")
        np.save(config["dim_reduce"]["pca_mat_path"], specs.basis(spec))
    np.random.seed(0)
    boost.AutoBoost._instance = None
    boost.boost._boost_config_level.update(copy.deepcopy(LEVELS))
    auto = boost.AutoBoost(spec["level"], config)
    network, optimizer = auto.network_auto_process_train(network, optimizer)
    loss, params = nn.WithLossCell(network, nn.MSELoss()), network.trainable_params()
    scale = given[0] if kind == "FixedNoDrop" else manager
    if kind == "Dynamic":
        scale = amp.DynamicLossScaleManager(*given).get_update_cell()
    if kind == "Fixed":
        scale = amp.FixedLossScaleManager(*given, True).get_update_cell()
    cell = None if manager else cell_of(loss, optimizer, kind, scale)
    found = {"w": [], "flags": [], "scales": []}
    for x, y in zip(*specs.batches(spec), strict=True):
        if manager:
            # A cell for each step: on a CPU its compiler makes constants of what the status is.
            cell = cell_of(loss, optimizer, kind, manager)
            bad = int(not np.isfinite(x).all())
            cell.overflow_status_list[0].set_data(ms.Tensor(np.full(8, bad, np.int32)))
            x = np.where(np.isfinite(x), x, np.float32(0.0))
        cell.set_train()
        told = cell(ms.Tensor(x), ms.Tensor(y))
        if isinstance(told, tuple):
            found["flags"].append(bool(told[1].asnumpy()))
            found["scales"].append([told[2].asnumpy()])
        if manager:
            found["scales"][-1] = [x.asnumpy() for x in manager.dynamic_loss_scale[1:-1]]
            manager._loss_scale = [x.value() for x in manager.dynamic_loss_scale[1:-1]]
        found["w"].append(np.concatenate([p.asnumpy().ravel() for p in params]))
    names = [*start, *(name.replace("weight", "multiplier") for name in start)]
    own = lambda name: next(x for x in names if f".{name}".endswith(f".{x}"))  # noqa: E731
    return [own(param.name) for param in params], {k: np.array(x) for k, x in found.items()}


def main(path, folder):
    folder = pathlib.Path(folder)
    sys.path.insert(0, str(folder))
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    for part in networks.REPLACE.values():
        part()
    for number, spec in enumerate(json.loads(pathlib.Path(path).read_text())):
        try:
            names, arrays = train(spec, folder, number)
            np.savez(folder / f"{number}.npz", **arrays)
            told = {"params": names}
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
        (folder / f"{number}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
