"""MindSpore's plain step and the train cells of its boost on the common work, on one core.

Usage: mindspore_worker.py WORK. In graph mode, where alone the boost's cells run on CPU. Two things
are set by hand because the cells cannot be told: the process-wide configuration, which each cell
reads once when it is made, and the test for overflow, which asks an Ascend operator by default.
"""

import os
import pathlib
import sys
import tempfile

import lenet

lenet.pin()
# MindSpore prints a warning for everything that it has on other devices only.
os.environ.update({**lenet.ONE_THREAD, "GLOG_v": "3"})

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import boost, nn  # noqa: E402
from mindspore.boost.grad_freeze import FreezeOpt  # noqa: E402

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_device("CPU")
ms.set_context(runtime_num_threads=1, inter_op_parallel_num=1)


class LeNet(nn.Cell):
    """The network and its loss."""

    def __init__(self, start):
        super().__init__()

        def conv(name):
            weight, bias = ms.Tensor(start[f"{name}.weight"]), ms.Tensor(start[f"{name}.bias"])
            outputs, inputs, size, _ = weight.shape
            how = {"pad_mode": "valid", "has_bias": True}
            return nn.Conv2d(inputs, outputs, size, weight_init=weight, bias_init=bias, **how)

        def dense(name):
            weight, bias = ms.Tensor(start[f"{name}.weight"]), ms.Tensor(start[f"{name}.bias"])
            return nn.Dense(*weight.shape[::-1], weight_init=weight, bias_init=bias)

        self.conv1, self.conv2 = conv("conv1"), conv("conv2")
        self.fc1, self.fc2, self.fc3 = dense("fc1"), dense("fc2"), dense("fc3")
        self.relu, self.flatten = nn.ReLU(), nn.Flatten()
        self.pool = nn.MaxPool2d(2, 2)
        self.cost = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

    def construct(self, images, labels):
        """The loss."""
        images = self.pool(self.relu(self.conv1(images)))
        images = self.pool(self.relu(self.conv2(images)))
        hidden = self.relu(self.fc1(self.flatten(images)))
        hidden = self.relu(self.fc2(hidden))
        return self.cost(self.fc3(hidden), labels)


class Boosts:
    """Makes the forms; data lies in MindSpore's tensors before any of them runs."""

    def __init__(self, work):
        self.work = work
        self.images = [ms.Tensor(x) for x in work.images]
        self.labels = [ms.Tensor(y) for y in work.labels]

    def form(self, net, cell, constants=()):
        """``cell(images, labels)`` is one call."""
        cell.set_train()
        place = 0
        last = net.fc3.weight

        def run(calls):
            nonlocal place
            for _ in range(calls):
                index = place % len(self.images)
                told = cell(self.images[index], self.labels[index])
                place += 1
            told = told[0] if isinstance(told, tuple) else told
            last.asnumpy()
            return float(told.asnumpy())

        def state():
            own = {id(p) for p in net.get_parameters()}
            kept = {id(p): p for p in cell.get_parameters() if id(p) not in own}
            kept |= {id(x): x for x in constants}
            return sum(x.nbytes for x in kept.values())

        return lenet.Form(run, state)

    def start(self, **configuration):
        """A network, its optimizer, and the process-wide configuration for the cell to come."""
        found = boost.AutoBoost()
        asked = {"grad_accumulation": False, **configuration}
        found.boost_config["grad_accumulation"] = asked.pop("grad_accumulation")
        for name, value in asked.items():
            setattr(found, name, value)
        net = LeNet(lenet.weights())
        return net, nn.Momentum(net.trainable_params(), lenet.RATE, lenet.MOMENTUM)

    def plain(self):
        """The framework's own cell."""
        net, optimizer = self.start()
        return self.form(net, nn.TrainOneStepCell(net, optimizer))

    def boost_cell(self):
        """The boost's cell with nothing on; without ``sens`` it would return no loss."""
        net, optimizer = self.start()
        return self.form(net, boost.BoostTrainOneStepCell(net, optimizer, sens=1.0))

    def loss_scale(self):
        """Dynamic."""
        net, optimizer = self.start()
        scale = nn.DynamicLossScaleUpdateCell(lenet.INIT_SCALE, 2, lenet.GROWTH_INTERVAL)
        cell = boost.BoostTrainOneStepWithLossScaleCell(net, optimizer, scale)
        # The library's own test by IsFinite, leaf by leaf, as on the newer Ascend.
        cell.gpu_target, cell.ascend_910b_target, cell.enable_allfinite = False, True, False
        return self.form(net, cell)

    def accumulation(self):
        """A window of calls."""
        net, optimizer = self.start(grad_accumulation=True, grad_accumulation_step=lenet.WINDOW)
        return self.form(net, boost.BoostTrainOneStepCell(net, optimizer, sens=1.0))

    def freezing(self, depths):
        """Groups by layer: MindSpore's own grouping would put all of LeNet into each."""
        net, optimizer = self.start()
        params = list(net.trainable_params())
        drawn = sorted({int(depth) for depth in depths})
        groups = [params[2 * depth :] for depth in drawn]
        strategy = [drawn.index(int(depth)) for depth in depths]
        frozen = FreezeOpt(optimizer, groups, strategy)
        # Its optimizers, one for each depth, are in a list, where a cell does not look for params.
        own = {id(p) for p in params}
        moments = [p for each in frozen.opts for p in each.get_parameters() if id(p) not in own]
        return self.form(net, boost.BoostTrainOneStepCell(net, frozen, sens=1.0), moments)

    def dim_reduce(self):
        """In the span of the basis."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "pca_mat.npy"
            np.save(path, self.work.basis)
            # The cell waits for the file of a saver that says that it is done.
            path.with_name("save_pca_end.txt").touch()
            net, _ = self.start(
                local_pca_mat_path=str(path),
                n_components=lenet.DIRECTIONS,
                alpha=lenet.RESIDUAL_RATE,
                gamma=lenet.RESIDUAL_MOMENTUM,
            )
            for name, value in lenet.unflat(self.work.finish).items():
                getattr(getattr(net, name.split(".")[0]), name.split(".")[1]).set_data(
                    ms.Tensor(value)
                )
            optimizer = nn.SGD(net.trainable_params(), learning_rate=1)
            optimizer.dim_reduce = True
            cell = boost.BoostTrainOneStepCell(net, optimizer, sens=1.0)
        return self.form(net, cell, cell.dim_reduce.pca_list_local)


if __name__ == "__main__":
    boosts = Boosts(lenet.load(sys.argv[1]))
    forms = {
        "plain": boosts.plain,
        "boost cell alone": boosts.boost_cell,
        "loss scale": boosts.loss_scale,
        "accumulation": boosts.accumulation,
        "freezing, 4 of 5": lambda: boosts.freezing([4]),
        "freezing, schedule": lambda: boosts.freezing(boosts.work.depths),
        "DimReduce": boosts.dim_reduce,
    }
    lenet.serve(forms, f"MindSpore {ms.__version__}")
