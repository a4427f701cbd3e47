"""PyTorch's plain step and its own boosts on the common work, on one core.

Usage: pytorch_worker.py WORK [--replicas]. With ``--replicas`` it is one process of those that
``RANK`` and ``WORLD_SIZE`` name, and trains through ``DistributedDataParallel`` over gloo.
"""

import os
import sys

import lenet

lenet.pin(int(os.environ.get("RANK", "0")))
os.environ.update(lenet.ONE_THREAD)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

torch.set_num_threads(1)
torch.set_num_interop_threads(1)


class LeNet(nn.Module):
    """The network."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)
        self.load_state_dict({k: torch.from_numpy(v) for k, v in lenet.weights().items()})

    def forward(self, images):
        """Logits."""
        for layer in (self.conv1, self.conv2):
            images = nn.functional.max_pool2d(torch.relu(layer(images)), 2)
        hidden = images.flatten(1)
        for layer in (self.fc1, self.fc2):
            hidden = torch.relu(layer(hidden))
        return self.fc3(hidden)


class Run:
    """A network, its optimizer and its place among the batches."""

    def __init__(self, work, rank=0, replicas=1):
        self.net = LeNet()
        self.model = self.net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lenet.RATE, lenet.MOMENTUM)
        self.images, self.labels = torch.from_numpy(work.images), torch.from_numpy(work.labels)
        self.labels = self.labels.long()
        self.place, self.stride = rank, replicas

    def loss(self):
        """Of the next batch."""
        index = self.place % len(self.images)
        self.place += self.stride
        return nn.functional.cross_entropy(self.model(self.images[index]), self.labels[index])

    def state(self):
        """What the optimizer keeps, and gradients that wait."""
        held = [x for each in self.optimizer.state.values() for x in each.values()]
        held += [p.grad for p in self.net.parameters()]
        return sum(x.numel() * x.element_size() for x in held if torch.is_tensor(x))

    def form(self, step, wire=lambda: None):
        """``step()`` is one call and returns the loss."""

        def run(calls):
            for _ in range(calls):
                loss = step()
            return loss.item()

        return lenet.Form(run, self.state, wire)

    def plain_step(self):
        """Gradients, the optimizer, and gradients away."""
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def plain(work, **where):
    run = Run(work, **where)
    return run.form(run.plain_step)


def loss_scale(work):
    run = Run(work)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=lenet.INIT_SCALE, growth_interval=lenet.GROWTH_INTERVAL
    )

    def step():
        loss = run.loss()
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        return loss.detach()

    return run.form(step)


def accumulation(work):
    run = Run(work)
    calls = 0

    def step():
        nonlocal calls
        loss = run.loss()
        (loss / lenet.WINDOW).backward()
        calls += 1
        if calls % lenet.WINDOW == 0:
            run.optimizer.step()
            run.optimizer.zero_grad()
        return loss.detach()

    return run.form(step)


def freezing(work, depths):
    """The usual way: no gradients are asked for what is frozen."""
    run = Run(work)
    layers = [getattr(run.net, name) for name in lenet.LAYERS]
    calls, last = 0, None

    def step():
        nonlocal calls, last
        depth = int(depths[calls % len(depths)])
        calls += 1
        if depth != last:
            for index, layer in enumerate(layers):
                layer.requires_grad_(index >= depth)
            last = depth
        return run.plain_step()

    return run.form(step)


def alone(work):
    """The forms of one process."""
    return {
        "plain": lambda: plain(work),
        "loss scale": lambda: loss_scale(work),
        "accumulation": lambda: accumulation(work),
        "freezing, 4 of 5": lambda: freezing(work, [4]),
        "freezing, schedule": lambda: freezing(work, work.depths),
    }


def replicated(work, hook=None, state=lambda: None):
    """Through ``DistributedDataParallel``; ``hook`` is what reduces its buckets."""
    where = {"rank": dist.get_rank(), "replicas": dist.get_world_size()}

    def made(hook):
        run = Run(work, **where)
        run.model = DistributedDataParallel(run.net)
        if hook is not None:
            run.model.register_comm_hook(state(), hook)
        return run

    def wire():
        """Bytes handed to all-reduces in a call, the mean over ten, on a ring of two."""
        run, sent = made(hook or default_hooks.allreduce_hook), []
        reduce = dist.all_reduce

        def counting(tensor, *args, **kwargs):
            sent.append(tensor.numel() * tensor.element_size())
            return reduce(tensor, *args, **kwargs)

        dist.all_reduce = counting
        try:
            for index in range(15):
                # The first calls arrange the buckets, and PowerSGD's are dense.
                if index == 5:
                    sent.clear()
                run.plain_step()
        finally:
            dist.all_reduce = reduce
        return sum(sent) / 10

    run = made(hook)
    return run.form(run.plain_step, wire)


def power_sgd_state():
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=lenet.RANK, start_powerSGD_iter=2, random_seed=0
    )


def together(work):
    """The forms of several processes."""
    where = {"rank": dist.get_rank(), "replicas": dist.get_world_size()}
    return {
        "plain": lambda: plain(work, **where),
        "mean": lambda: replicated(work),
        "float16": lambda: replicated(work, default_hooks.fp16_compress_hook),
        "PowerSGD": lambda: replicated(work, powerSGD_hook.powerSGD_hook, power_sgd_state),
    }


if __name__ == "__main__":
    given = lenet.load(sys.argv[1])
    about = f"PyTorch {torch.__version__}"
    if "--replicas" in sys.argv:
        dist.init_process_group("gloo")
        lenet.serve(together(given), about)
        dist.destroy_process_group()
    else:
        lenet.serve(alone(given), about)
