"""Seconds and bytes of a step on hosts whose links are limited: Linux network namespaces and `tc`.

A host is a network namespace with one JAX process. All forms run in turns at each rate, on the same
model and batch; bytes are those that the interface sends and receives. Needs root and iproute2.
"""

import contextlib
import functools
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Bar, arguments, report
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from text_runs import Text
from workloads import TextConfig

import boostax
from boostax.reduce import local_updates, partial_average

PyTree = Any
# 30 leaves of one width, and micro-batches of 8 rows a host.
LEAVES, WIDTH, SLICES, ROWS = 30, 192, 8, 8
ADDRESS, PORT, AXIS = "10.99.0", 7777, "data"
# The number of this process: two runs on one machine have networks of their own.
BRIDGE = f"bx{os.getpid()}"
BY_HAND = "one packed message by hand"
# The processes of one machine cannot send as much.
UNLIMITED = "10gbit"
# 254,720 params.
TEXT = Text(TextConfig(batch_size=16), judged=16)


class Technique(NamedTuple):
    """A way to reduce.

    Attributes:
      build: from an optimizer, the transformation that is also told how to reduce.
      every: steps that together send as much as any others.
    """

    build: Callable[[Any], Any]
    every: int = 1


class Workload(NamedTuple):
    """What the hosts train.

    Attributes:
      init: returns the params.
      loss: takes params and a batch.
      batch: returns the rows of a host.
      slices: micro-batches of a step.
    """

    init: Callable[[], PyTree]
    loss: Callable[[PyTree, PyTree], Any]
    batch: Callable[[int], PyTree]
    slices: int


def init() -> PyTree:
    draw = np.random.default_rng(0).standard_normal
    shape = WIDTH, WIDTH
    return {f"w{i}": jnp.asarray(draw(shape) / WIDTH**0.5, jnp.float32) for i in range(LEAVES)}


def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
    x = batch["x"]
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def rows_of(index: int) -> PyTree:
    draw = np.random.default_rng(index).standard_normal
    return {k: draw((SLICES * ROWS, WIDTH)).astype(np.float32) for k in "xy"}


def text() -> Workload:
    """The transformer of ``network_losses.py``, a quarter of its batch on each host."""
    share = TEXT.config.batch_size // 4

    def batch(index: int) -> PyTree:
        one = TEXT.workload(0).batch(0)
        return jax.tree.map(lambda x: x[index * share : (index + 1) * share], one)

    return Workload(lambda: TEXT.init(0), TEXT.loss, batch, 1)


WORKLOADS = {"leaves": lambda: Workload(init, loss_fn, rows_of, SLICES), "text": text}


def plain(mesh: Any, batch: PyTree, *, by_hand: bool) -> tuple[Any, Any]:
    """A scan over micro-batches in plain `jit`, or in a `shard_map` with one packed sum."""
    tx = optax.adamw(1e-3)
    value = jax.value_and_grad(loss_fn)

    def scanned(params: PyTree, batch: PyTree) -> PyTree:
        add = lambda sums, rows: (jax.tree.map(jnp.add, sums, value(params, rows)[1]), None)  # noqa: E731
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.tree.map(lambda x: x / SLICES, jax.lax.scan(add, zeros, batch)[0])

    cut = lambda x: x.reshape(-1, SLICES, x.shape[-1]).swapaxes(0, 1)  # noqa: E731

    def local(params: PyTree, batch: PyTree) -> PyTree:
        flat, unravel = ravel_pytree(scanned(params, jax.tree.map(cut, batch)))
        return unravel(jax.lax.pmean(flat, "data"))

    def spread(params: PyTree, batch: PyTree) -> PyTree:
        rows = NamedSharding(mesh, P(None, "data"))
        where = functools.partial(jax.lax.with_sharding_constraint, shardings=rows)
        return scanned(params, jax.tree.map(lambda x: where(cut(x)), batch))

    how: Any = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    gradient = jax.shard_map(local, mesh=mesh, **how) if by_hand else spread

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, None]:
        params, inner = state
        updates, inner = tx.update(gradient(params, batch), inner, params)
        return (optax.apply_updates(params, updates), inner), None

    params = jax.device_put(init(), NamedSharding(mesh, P()))
    return step, (params, jax.jit(tx.init)(params))


def _first(reduction: Any) -> Technique:
    return Technique(lambda tx: optax.chain(reduction, tx))


def _local(every: int, outer: Any = None, reduction: Any = None) -> Technique:
    outer = optax.sgd(1.0) if outer is None else outer
    how: Any = {"every": every, "outer": outer, "reduction": reduction, "axis_name": AXIS}
    return Technique(lambda tx: local_updates(tx, **how), every)


SPARSE = boostax.top_k_reduce(AXIS, 1 / 8, block=4096, bits=2, decay=0.95)
TECHNIQUES = {
    "all_reduce": _first(boostax.all_reduce(AXIS)),
    "all_reduce, bf16": _first(boostax.all_reduce(AXIS, wire_dtype="bfloat16")),
    "all_reduce, f16": _first(boostax.all_reduce(AXIS, wire_dtype="float16")),
    "int8_reduce": _first(boostax.int8_reduce(AXIS)),
    "top_k_reduce, 1%": _first(boostax.top_k_reduce(AXIS, 0.01)),
    "threshold_reduce, 1%": _first(
        boostax.reduce.threshold_reduce(AXIS, 3.0, relative=True, capacity=0.01)
    ),
    "partial_average, 8": Technique(lambda tx: partial_average(tx, 8, axis_name=AXIS)),
    "local_updates, 8": _local(8),
    "local_updates, 16": _local(16),
    "local_updates, 16, int8": _local(16, reduction=boostax.int8_reduce(AXIS)),
    "SparseLoCo, 16": _local(16, reduction=SPARSE),
    "DiLoCo, 16": _local(16, optax.sgd(0.7, momentum=0.9, nesterov=True)),
    "DiLoCo, 16, tuned": _local(16, optax.sgd(0.9, momentum=0.3, nesterov=True)),
}


def forms(work: Workload, mesh: Any, batch: PyTree) -> dict[str, Callable[[], tuple[Any, PyTree]]]:
    """By name what makes a step and its first state."""

    def ours(name: str = "all_reduce", **how: Any) -> tuple[Any, PyTree]:
        tx = TECHNIQUES[name].build(optax.adamw(1e-3))
        step = boostax.make_train_step(
            work.loss, tx, mesh=mesh, axis_name=AXIS, microbatches=work.slices, **how
        )
        return step, step.init(work.init())

    make = functools.partial
    return {
        BY_HAND: make(plain, mesh, batch, by_hand=True),
        "plain jit and scan": make(plain, mesh, batch, by_hand=False),
        **{name: make(ours, name) for name in TECHNIQUES},
        "all_reduce, ZeRO-1": make(ours, shard_optimizer=True),
        "all_reduce, FSDP": lambda: ours(
            param_specs=jax.tree.map(lambda _: P(AXIS), jax.eval_shape(work.init))
        ),
    }


def interface() -> int:
    """Bytes that this host has received and sent so far."""
    fields = pathlib.Path("/proc/net/dev").read_text().split("eth0:")[1].split()
    return int(fields[0]) + int(fields[8])


def host(index: int, hosts: int, job: dict[str, Any]) -> None:
    """Run the forms on one host; host 0 asks for each rate, and prints a row for each round."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"{ADDRESS}.1:{PORT}", hosts, index)
    mesh = jax.make_mesh((hosts,), (AXIS,), axis_types=(AxisType.Auto,))
    place = functools.partial(jax.make_array_from_process_local_data, NamedSharding(mesh, P(AXIS)))
    work = WORKLOADS[job["work"]]()
    batch = jax.tree.map(place, work.batch(index))
    wait = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))
    turn = place(np.ones(1, np.float32))
    made, counted = {}, {}
    for name, make in forms(work, mesh, batch).items():
        if name in job["forms"]:
            step, state = make()
            every = TECHNIQUES[name].every if name in TECHNIQUES else 1
            how: Any = {"calls": every, "params": work.init(), "network": "1Gbit"}
            found = boostax.audit(step, state, batch, **how)
            sums = found.network_bytes, found.messages
            counted[name] = [found.per_step(x) / every for x in sums if x is not None]
            made[name] = step, step(state, batch)[0], max(2, every)
    for rate in job["rates"]:
        if not index:
            print(json.dumps({"rate": rate}), flush=True)
            sys.stdin.readline()
        for _ in range(job["rounds"]):
            for name, (step, state, turns) in made.items():
                if turns == 2:
                    state, _ = jax.block_until_ready(step(state, batch))
                wait(turn).block_until_ready()
                start, sent = time.perf_counter(), interface()
                for _ in range(turns):
                    state, _ = step(state, batch)
                jax.block_until_ready(state)
                seconds = (time.perf_counter() - start) / turns
                wait(turn).block_until_ready()
                moved = (interface() - sent) / 2 / turns
                made[name] = step, state, turns
                row = {"form": name, "rate": rate, "seconds": seconds, "bytes": moved}
                if not index:
                    print(json.dumps(row | {"audit": counted[name]}), flush=True)


def run(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True, capture_output=True)


def limit(hosts: int, rate: str) -> None:
    """Limit each link in both directions."""
    for i in range(hosts):
        how = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms"]
        run("tc", "qdisc", "replace", "dev", f"{BRIDGE}v{i}", *how)
        run("ip", "netns", "exec", f"{BRIDGE}n{i}", "tc", "qdisc", "replace", "dev", "eth0", *how)


@contextlib.contextmanager
def network(hosts: int) -> Generator[None]:
    """A bridge, and a namespace with an interface for each host."""
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    try:
        run("ip", "link", "set", BRIDGE, "up")
        for i in range(hosts):
            space, link = f"{BRIDGE}n{i}", f"{BRIDGE}v{i}"
            inside = "ip", "netns", "exec", space, "ip"
            peer = "peer", "name", "eth0", "netns"
            run("ip", "netns", "add", space)
            run("ip", "link", "add", link, "type", "veth", *peer, space)
            run("ip", "link", "set", link, "master", BRIDGE, "up")
            run(*inside, "addr", "add", f"{ADDRESS}.{i + 1}/24", "dev", "eth0")
            run(*inside, "link", "set", "eth0", "up")
            run(*inside, "link", "set", "lo", "up")
            # Hosts find each other by their own name, which `ip netns exec` reads here.
            names = pathlib.Path("/etc/netns") / space
            names.mkdir(parents=True, exist_ok=True)
            own = f"{ADDRESS}.{i + 1} {platform.node()}"
            (names / "hosts").write_text(f"127.0.0.1 localhost\n{own}\n")
        yield
    finally:
        gone = [["link", "del", BRIDGE]]
        for i in range(hosts):
            gone += [["netns", "del", f"{BRIDGE}n{i}"], ["link", "del", f"{BRIDGE}v{i}"]]
            shutil.rmtree(pathlib.Path("/etc/netns") / f"{BRIDGE}n{i}", ignore_errors=True)
        for what in gone:
            subprocess.run(["ip", *what], check=False, capture_output=True)


def measured(
    hosts: int, chosen: list[str], rates: list[str], rounds: int, work: str = "leaves"
) -> list[dict[str, Any]]:
    """The rows of host 0; an hour after their start all hosts are ended."""
    job = {"forms": chosen, "rates": rates, "rounds": rounds, "work": work}
    given = [str(hosts), json.dumps(job)]
    rows: list[dict[str, Any]] = []
    with network(hosts), contextlib.ExitStack() as stack:
        started: list[subprocess.Popen[str]] = []
        logs: list[Any] = []
        for i in range(hosts):
            where = ["ip", "netns", "exec", f"{BRIDGE}n{i}"]
            command = [*where, sys.executable, __file__, "--host", f"{i}", *given]
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            process = stack.enter_context(subprocess.Popen(command, text=True, **pipes))
            logs.append(log)
            stack.callback(process.kill)
            started.append(process)
        timer = threading.Timer(3600.0, lambda: [x.kill() for x in started])
        timer.start()
        stack.callback(timer.cancel)
        first: Any = started[0]
        # Gloo prints lines of its own.
        for line in (x for x in first.stdout if x.startswith("{")):
            row = json.loads(line)
            if "form" in row:
                rows.append(row)
                print(row, flush=True)
                continue
            limit(hosts, row["rate"])
            first.stdin.write("go\n")
            first.stdin.flush()
        if len(rows) < len(chosen) * len(rates) * rounds:
            raise RuntimeError(f"host 0 ended after {len(rows)} rows.\n{_printed(logs)}")
    return rows


def _printed(logs: list[Any]) -> str:
    """The end of what each host wrote to its stderr."""
    for log in logs:
        log.seek(0)
    return "\n".join(f"host {i}: {log.read()[-4000:]}" for i, log in enumerate(logs))


def table(rows: list[dict[str, Any]], peer: str = BY_HAND) -> list[dict[str, Any]]:
    """A row for each form: bytes, and seconds at each rate, beside those of a peer."""
    median = lambda name, key, **where: statistics.median(  # noqa: E731
        x[key] for x in rows if x["form"] == name and where.items() <= x.items()
    )
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys(x["form"] for x in rows):
        moved = median(name, "bytes")
        counted, messages = next(x["audit"] for x in rows if x["form"] == name)
        row = {"form": name, "MB on the interface": moved / 1e6, "MB by audit": counted / 1e6}
        row["bytes / by hand"] = moved / median(peer, "bytes")
        for rate in dict.fromkeys(x["rate"] for x in rows):
            seconds, other = (median(x, "seconds", rate=rate) for x in (name, peer))
            audited = boostax.auditing.network.Network.of(rate)
            row |= {f"s at {rate}": seconds, f"s / by hand at {rate}": seconds / other}
            row[f"s by audit at {rate}"] = audited.seconds(counted, messages)
        found.append(row)
    return found


# More forms of "leaves" would take longer than they tell.
LEAVES_FORMS = (
    BY_HAND,
    "plain jit and scan",
    *list(TECHNIQUES)[:7],
    "all_reduce, ZeRO-1",
    "all_reduce, FSDP",
)


def main() -> None:
    if "--host" in sys.argv:
        index, hosts, job = sys.argv[2:]
        host(int(index), int(hosts), json.loads(job))
        return
    rounds = arguments(__doc__, rounds=3).rounds
    require_links()
    rows = table(measured(4, list(LEAVES_FORMS), ["20mbit", "100mbit", "1gbit", UNLIMITED], rounds))
    title = f"4 hosts, {LEAVES} leaves of {WIDTH} x {WIDTH}, {SLICES} micro-batches"
    report("network", "Steps on links of limited rates", [(title, rows)], bars_of(rows))


def bars_of(rows: list[dict[str, Any]]) -> list[Bar]:
    """What is claimed of the leaves."""
    of = {row["form"]: row for row in rows}
    bars = [
        Bar(f"{name}: {key}", of[name][key], most)
        for name, key, most in (
            ("all_reduce", "s / by hand at 1gbit", 1.3),
            ("all_reduce, bf16", "bytes / by hand", 0.52),
            ("int8_reduce", "bytes / by hand", 0.27),
            ("all_reduce, ZeRO-1", "bytes / by hand", 1.02),
            ("all_reduce, FSDP", "bytes / by hand", 1.02),
            ("all_reduce, ZeRO-1", "s / by hand at 1gbit", 1.2),
            ("all_reduce, bf16", "s / by hand at 100mbit", 0.6),
        )
    ]
    pairs = [(x["MB by audit"], x["MB on the interface"]) for x in rows]
    off = [abs(audited / moved - 1) for audited, moved in pairs if moved > 1]
    bars.append(Bar("audit of more than 1 MB: bytes, off by at most", max(off), 0.02))
    bars.append(Bar("audit where the network decides: seconds, off by at most", late(rows), 0.3))
    return bars


def require_links() -> None:
    """End unless hosts with links can be made."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("It needs root and iproute2 (ip, tc) to make hosts with links.")


def late(rows: list[dict[str, Any]]) -> float:
    """How far audited seconds are off, where the network takes 0.7 of a step or more."""
    off = [0.0]
    for row in rows:
        for key in (x for x in row if x.startswith("s at ") and UNLIMITED not in x):
            if row[key] * 0.3 >= row[f"s at {UNLIMITED}"]:
                off.append(abs(row[key.replace("s at", "s by audit at")] / row[key] - 1))
    return max(off)


if __name__ == "__main__":
    main()
