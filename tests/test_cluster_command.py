"""The command over several processes: what it trains, how it stops, and how it goes on."""

import json
import os
import pathlib
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml
from processes import Processes, environment

from boostax.run.cli import main
from boostax.run.cluster.launch import launch
from boostax.run.writers import JsonLines

EXAMPLES = pathlib.Path(__file__).parents[1] / "docs" / "examples"
PATIENCE = 180.0

# A scale, and a window that 61 calls do not fill: there is state of each device's own.
OPTIONS = (
    "--steps 61 --width 16 --batch-size 16 --accumulate 3 --devices 4 --evaluate-every 50"
).split()
# A save at every other call takes time, so that signals find the run under way.
OFTEN = "--checkpoint-every 2".split()
# Few enough that who is killed is in a call, and its peer in a collective.
SELDOM = "--checkpoint-every 10 --heartbeat 10".split()
WRITTEN = {"checkpoints", "loss.png", "metrics.jsonl", "summary.json"}


def arguments(output, *more):
    return ["train", "digits", *OPTIONS, "--output", str(output), "--resume", *more]


def processes(output, logs, *more, count=2):
    """The command as processes that a test can signal one by one."""
    logs.mkdir(exist_ok=True)
    return Processes(["-m", "boostax.run.cli", *arguments(output, *more)], count, logs)


def reach(run, output, call):
    """Wait until a call has been reported."""
    deadline = time.monotonic() + PATIENCE
    while len(JsonLines.read(output / "metrics.jsonl")) < call:
        assert all(process.poll() is None for process in run.running), run.printed()
        assert time.monotonic() < deadline, run.printed()
        time.sleep(0.005)


def rows(output):
    return JsonLines.read(output / "metrics.jsonl")


def saved(output):
    """The calls after which a complete checkpoint lies on disk."""
    return sorted(int(p.name) for p in (output / "checkpoints").iterdir() if p.name.isdigit())


def results(output):
    """All that the numbers of a run decide, to the bit."""
    summary = json.loads((output / "summary.json").read_text())
    training = [
        {name: value for name, value in row.items() if not name.startswith("held_out")}
        for row in rows(output)
    ]
    return summary["params_sha256"], summary["held_out_loss"], training


def assert_close(found, wanted, tolerance):
    """The same rows of the same calls, to a tolerance."""
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for row, other in zip(found, wanted, strict=True):
        assert row.keys() == other.keys()
        for name in row:
            np.testing.assert_allclose(
                row[name], other[name], rtol=tolerance, atol=tolerance, err_msg=name
            )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two processes that nothing interrupts, and what it printed."""
    output = tmp_path_factory.mktemp("whole") / "run"
    printed = subprocess.run(
        [sys.executable, "-m", "boostax.run.cli", "launch", "-n", "2", "--", *arguments(output)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert printed.returncode == 0, printed.stderr
    return output, printed


def test_two_processes_train_what_one_does_and_one_of_them_writes(whole, tmp_path, capsys):
    output, printed = whole
    assert main(arguments(tmp_path / "one")) == 0
    assert_close(rows(output), rows(tmp_path / "one"), 1e-5)
    assert {path.name for path in output.iterdir()} == WRITTEN
    # One process says what two do, once; of the other there are Gloo's lines, torn by its threads.
    alone = capsys.readouterr().out
    for line in ("workload", "held-out loss", "plot:"):
        assert printed.stdout.count(line) == alone.count(line) == 1
    gloo = "Gloo Rank is connected to peer ranks Expected number of"
    assert set(re.findall("[A-Za-z]+", printed.stderr)) <= set(gloo.split())


@pytest.mark.long
def test_interrupted_and_killed_it_ends_with_the_same_bits(whole, tmp_path):
    output = tmp_path / "run"
    with processes(output, tmp_path / "logs-1", *OFTEN) as run:
        reach(run, output, 4)
        run.running[1].send_signal(signal.SIGTERM)
        assert run.end(PATIENCE) == [0, 0], run.printed()
        stopped = int(re.search(r"Stopped by SIGTERM after call (\d+)", run.printed())[1])
        assert "Go on with: boostax train digits" in run.printed()
        assert "Stopped by" not in run.printed(1)
    # All stopped after the same call: one state, which both have written.
    assert stopped < 61 and saved(output)[-1] == stopped == len(rows(output))
    written = output / "checkpoints" / str(stopped) / "state"
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= {path.name for path in written.iterdir()}

    with processes(output, tmp_path / "logs-2", *SELDOM) as run:
        reach(run, output, min((stopped // 10 + 1) * 10 + 3, 58))
        assert_the_other_ends(run, output, killed=1)
    with processes(output, tmp_path / "logs-3") as run:
        assert run.end(PATIENCE) == [0, 0], run.printed()
        assert "resuming after call" in run.printed()
        assert "shared out anew" not in run.printed()
    assert results(output) == results(whole[0])


def assert_the_other_ends(run, output, killed):
    """Kill one of two: the other ends soon, by the collective that fails or by JAX's service."""
    other = run.running[1 - killed]
    run.running[killed].kill()
    code = other.wait(timeout=15.0)
    printed = run.printed(1 - killed)
    assert code in (1, -signal.SIGABRT), printed
    if code == 1:
        lost = re.search(
            rf"boostax: fit: call \d+ failed in process {1 - killed} of 2: .* It does when another "
            r"process has ended: see what that one printed\. The last complete checkpoint in .* is "
            r"(\d+): go on from it\.",
            printed,
        )
        assert lost, printed
        assert int(lost[1]) <= saved(output)[-1]
        assert "Traceback" not in printed
    else:
        assert "JAX distributed service" in printed or "coordination service" in printed, printed


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_kill_one_and_go_on(whole, tmp_path, killed):
    output = tmp_path / "run"
    with processes(output, tmp_path / "logs-1", *SELDOM) as run:
        reach(run, output, 13)
        assert_the_other_ends(run, output, killed)
    with processes(output, tmp_path / "logs-2") as run:
        assert run.end(PATIENCE) == [0, 0], run.printed()
    assert results(output) == results(whole[0])


@pytest.mark.long
def test_a_lost_peer_is_said_at_once_with_the_checkpoint_to_go_on_from(tmp_path):
    # With one device each, so that a collective always crosses the broken connection.
    output = tmp_path / "run"
    endless = "--devices 2 --steps 9999 --checkpoint-every 100".split()
    with processes(output, tmp_path / "logs", *endless) as run:
        reach(run, output, 100)
        deadline = time.monotonic() + PATIENCE
        while saved(output) != [100]:
            assert time.monotonic() < deadline, run.printed()
            time.sleep(0.005)
        assert_the_other_ends(run, output, killed=1)
        assert "The last complete checkpoint" in run.printed() and run.running[0].returncode == 1


@pytest.mark.long
def test_a_stopped_peer_is_named(tmp_path):
    output = tmp_path / "run"
    limit = 4.0
    with processes(output, tmp_path / "logs", *OFTEN, "--step-limit", str(limit)) as run:
        reach(run, output, 5)
        run.running[1].send_signal(signal.SIGSTOP)
        assert run.running[0].wait(timeout=PATIENCE) == 75, run.printed()
        printed = run.printed()
    assert re.search(r"Rank 1 was last heard of \d+\.\d s ago", printed), printed
    assert "Rank 0 ends with exit code 75." in printed
    said = r"boostax watchdog: rank 0: no progress for (\S+) s .*; the limit is (\S+) s\."
    quiet, allowed = map(float, re.search(said, printed).groups())
    # A save that was under way may take ten times the limit, if it waits for the other.
    assert allowed in (limit, 10 * limit) and quiet >= allowed


@pytest.mark.long
@pytest.mark.parametrize("devices", [4, 2])
def test_one_process_goes_on_where_two_with_two_devices_stopped(whole, tmp_path, capsys, devices):
    output = tmp_path / "run"
    with processes(output, tmp_path / "logs", *OFTEN) as run:
        reach(run, output, 8)
        run.running[0].send_signal(signal.SIGTERM)
        assert run.end(PATIENCE) == [0, 0], run.printed()
    assert saved(output)[-1] < 61
    assert main([*arguments(output), "--devices", str(devices)]) == 0
    printed = capsys.readouterr().out
    note = "Saved on 4 devices, going on with 2: what each of them keeps for itself"
    assert "resuming after call" in printed and (note in printed) == (devices == 2)
    # A mean is the same however the batch is cut, and an open window keeps its own.
    assert_close(rows(output), rows(whole[0]), 1e-5 if devices == 4 else 1e-4)


@pytest.mark.long
def test_mpirun(tmp_path):
    assert shutil.which("mpirun"), "Install Open MPI (Debian: openmpi-bin) to run this test."
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    output = tmp_path / "run"
    options = "--steps 31 --width 16 --batch-size 16 --devices 2 --evaluate-every 31".split()
    script = subprocess.Popen(
        [str(EXAMPLES / "openmpi.sh"), *options, "--output", str(output)],
        env={**environment(), **root, "PATH": path, "OMPI_MCA_rmaps_base_oversubscribe": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = script.communicate(timeout=PATIENCE)
    finally:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
    assert script.returncode == 0, printed
    assert printed.count("workload") == printed.count("held-out loss") == 1
    assert [row["step"] for row in rows(output)] == list(range(1, 32))
    assert {path.name for path in output.iterdir()} == WRITTEN
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= {
        path.name for path in (output / "checkpoints" / "31" / "state").iterdir()
    }


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_shell(script):
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert os.access(script, os.X_OK)


def test_the_job_of_kubernetes_fits_together():
    parts = {
        part["kind"]: part
        for part in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    }
    service, job = parts["Service"], parts["Job"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    given = {variable["name"]: variable.get("value") for variable in container["env"]}
    # The name of the first pod, by which all find the coordinator.
    host, port = given["JAX_COORDINATOR_ADDRESS"].split(":")
    assert host == f"{parts['Job']['metadata']['name']}-0.{pod['subdomain']}" and int(port)
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["clusterIP"] == "None"
    label = {"job-name": parts["Job"]["metadata"]["name"]}
    assert service["spec"]["selector"] == label
    assert parts["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == label
    assert int(given["JAX_NUM_PROCESSES"]) == job["completions"] == job["parallelism"]
    assert job["completionMode"] == "Indexed" and "JAX_PROCESS_ID" in given
    assert [volume["name"] for volume in pod["volumes"]] == [
        mount["name"] for mount in container["volumeMounts"]
    ]


def losses(printed):
    (loss,) = re.findall(r"call 30: loss (0\.\d{4})$", printed, re.M)
    return float(loss)


@pytest.mark.long
def test_a_script_of_ones_own_in_one_process_and_in_two(tmp_path, monkeypatch, capfd):
    script = str(EXAMPLES / "train_cluster.py")
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path / "one"), "30"])
    runpy.run_path(script, run_name="__main__")
    alone = losses(capfd.readouterr().out)

    command = [sys.executable, script, str(tmp_path / "two"), "30"]
    assert launch(command, 2, environment=environment()) == 0
    np.testing.assert_allclose(losses(capfd.readouterr().out), alone, atol=2e-4)
    # Here it goes on where two processes have stopped, and has nothing left to do.
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path / "two"), "30"])
    runpy.run_path(script, run_name="__main__")
    assert capfd.readouterr().out == ""
