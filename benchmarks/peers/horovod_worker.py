"""Horovod's reductions on the common work: one process of those that ``mpirun`` has started.

Usage: horovod_worker.py WORK. Each process has a core of its own. Only the first can be spoken to;
it hands on what it is told.
"""

import os
import sys

import lenet

lenet.pin(int(os.environ["OMPI_COMM_WORLD_RANK"]))
os.environ.update(lenet.ONE_THREAD)

import horovod  # noqa: E402
import horovod.torch as hvd  # noqa: E402
import torch  # noqa: E402
from pytorch_worker import Run, plain  # noqa: E402

# Bytes of a command.
LONGEST = 1024


def reduced(work, op):
    """Through ``DistributedOptimizer``; with AdaSum it combines what local optimizers did."""
    run = Run(work, hvd.rank(), hvd.size())
    named = run.net.named_parameters()
    run.optimizer = hvd.DistributedOptimizer(run.optimizer, named_parameters=named, op=op)
    return run.form(run.plain_step)


def share(line):
    """The command of the first process; ``broadcast_object`` waits for ever on this PyTorch."""
    sent = torch.zeros(LONGEST, dtype=torch.uint8)
    data = (line or "").encode()
    sent[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    found = hvd.broadcast(sent, root_rank=0, name="command")
    return bytes(found.tolist()).rstrip(b"\0").decode()


def average(loss):
    """Of all processes, when the clock has stopped."""
    return float(hvd.allreduce(torch.tensor(loss), name="loss"))


if __name__ == "__main__":
    hvd.init()
    given = lenet.load(sys.argv[1])
    forms = {
        "plain": lambda: plain(given, rank=hvd.rank(), replicas=hvd.size()),
        "mean": lambda: reduced(given, hvd.Average),
        "AdaSum": lambda: reduced(given, hvd.Adasum),
    }
    about = f"Horovod {horovod.__version__} on PyTorch {torch.__version__}"
    lenet.serve(forms, about, share, average, hvd.rank() == 0)
