"""The networks of ``mindspore_trajectories.py``, written for MindSpore.

Layers are attributes, as LessBN replaces a head by its name.
"""

import mindspore as ms
from mindspore import nn, ops
from mindspore.boost import BoostTrainOneStepWithLossScaleCell
from mindspore.nn.optim import optimizer


def dense(start, name):
    weight, bias = (ms.Tensor(start[f"{name}.{part}"]) for part in ("weight", "bias"))
    return nn.Dense(*weight.shape[::-1], weight_init=weight, bias_init=bias)


def conv(start, name):
    weight = ms.Tensor(start[f"{name}.weight"])
    outputs, inputs, size, _ = weight.shape
    return nn.Conv2d(inputs, outputs, size, pad_mode="same", weight_init=weight)


def norm(start, name):
    gamma, beta = (ms.Tensor(start[f"{name}.{part}"]) for part in ("gamma", "beta"))
    return nn.BatchNorm2d(*gamma.shape, gamma_init=gamma, beta_init=beta)


class Tiny(nn.Cell):
    """Two dense layers."""

    def __init__(self, start):
        super().__init__()
        self.fc1, self.fc2 = dense(start, "fc1"), dense(start, "fc2")
        self.relu = nn.ReLU()

    def construct(self, x):
        """The outputs."""
        return self.fc2(self.relu(self.fc1(x)))


class MLP(nn.Cell):
    """Six dense layers."""

    def __init__(self, start):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (dense(start, f"fc{i}") for i in (1, 2, 3))
        self.fc4, self.fc5, self.fc6 = (dense(start, f"fc{i}") for i in (4, 5, 6))
        self.relu = nn.ReLU()

    def first(self, x):
        """The lower half."""
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        return self.relu(self.fc3(x))

    def second(self, x):
        """The upper half."""
        x = self.relu(self.fc4(x))
        x = self.relu(self.fc5(x))
        return self.fc6(x)

    def construct(self, x):
        """The outputs."""
        return self.second(self.first(x))


class Scaled(MLP):
    """With the boundaries of two loss scales."""

    def __init__(self, start, manager):
        super().__init__(start)
        self.manager = manager

    def construct(self, x):
        """The outputs."""
        x = self.first(self.manager(x, 0, 1))
        x = self.second(self.manager(x, 1, 2))
        return self.manager(x, 2, 3)


class Block(nn.Cell):
    """A basic residual block; the shortcut is the second operand of the sum."""

    def __init__(self, start, name):
        super().__init__()
        # The order of the params, by which freezing groups them.
        self.conv1, self.bn1 = conv(start, f"{name}.conv1"), norm(start, f"{name}.bn1")
        self.conv2, self.bn2 = conv(start, f"{name}.conv2"), norm(start, f"{name}.bn2")
        self.relu = nn.ReLU()

    def construct(self, x):
        """The next activations."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + x)


class ResNet(nn.Cell):
    """A stem, five blocks, the mean over the image, a head."""

    def __init__(self, start):
        super().__init__()
        self.conv, self.bn = conv(start, "conv"), norm(start, "bn")
        self.block0, self.block1 = Block(start, "block0"), Block(start, "block1")
        self.block2, self.block3 = Block(start, "block2"), Block(start, "block3")
        self.block4 = Block(start, "block4")
        self.fc = dense(start, "fc")
        self.relu = nn.ReLU()
        self.mean = ops.ReduceMean()

    def construct(self, x):
        """The outputs."""
        x = self.relu(self.bn(self.conv(x)))
        x = self.block2(self.block1(self.block0(x)))
        x = self.block4(self.block3(x))
        return self.fc(self.mean(x, (2, 3)))


def network_of(name, start, manager=None):
    """A network with its params; the manager of loss scales is for the MLP alone."""
    if manager is not None:
        return Scaled(start, manager)
    return {"tiny": Tiny, "mlp": MLP, "resnet": ResNet}[name](start)


def centralize_by_mean():
    """Puts MindSpore's own mean where its operator for Ascend stands."""
    mean = ops.ReduceMean(keep_dims=True)

    def centralization(gradient, axis):
        return gradient - mean(gradient, axis)

    optimizer.op_gc = centralization


def stay_in_float32():
    """Leaves the activations at a boundary of loss scales in the dtype of the weights."""
    BoostTrainOneStepWithLossScaleCell._do_keep_mix_fp32 = lambda cell, network: None


REPLACE = {"Centralization": centralize_by_mean, "Float16": stay_in_float32}
