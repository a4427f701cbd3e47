"""What MindSpore's boost recorded is what its formulas say.

That the record is complete is ``test_conformance.py``'s.
"""

import json

import numpy as np
import pytest

# float32 against float64 over 20 steps: the largest difference is 1e-6.
CLOSE = {"rtol": 0, "atol": 2e-6}


@pytest.fixture(scope="module")
def record(golden):
    arrays = np.load(golden / "mindspore_trajectories.npz")
    return json.loads((golden / "mindspore_trajectories.json").read_text()), arrays


def unflatten(flat, shapes):
    ends = np.cumsum([np.prod(shape) for shape in shapes.values()])
    parts = np.split(flat.astype(np.float64), ends[:-1])
    return {n: x.reshape(s) for (n, s), x in zip(shapes.items(), parts, strict=True)}


def gradients(params, x, y):
    """Of mean((o - y)^2), o the output of dense layers with relu between them."""
    weights = [name for name in params if name.endswith("weight")]
    hidden = [x]
    for name in weights:
        out = hidden[-1] @ params[name].T + params[name.replace("weight", "bias")]
        hidden.append(np.maximum(out, 0) if name != weights[-1] else out)
    delta = 2 * (out - y) / y.size
    found = {}
    for name, below in zip(weights[::-1], hidden[-2::-1], strict=True):
        found[name], found[name.replace("weight", "bias")] = delta.T @ below, delta.sum(0)
        delta = delta @ params[name] * (below > 0)
    return np.mean((out - y) ** 2), found


def train(record, run):
    """SGD with momentum by accumulated gradients, with moments of each group's own."""
    about, arrays = record
    program, shapes = about["programs"][run["program"]], about["shapes"][run["network"]]
    settings = about["optimizers"][run["optimizer"]]
    params = unflatten(arrays[f"{run['network']}_start"], shapes)
    batches = [arrays[f"{run['network']}_{axis}"].astype(np.float64) for axis in "xy"]
    every = 1
    if run["switches"]["grad_accumulation"]:
        every = run["config"].get("grad_accumulation", {}).get("grad_accumulation_step", 1)
    groups, freezes = program.get("groups", [0]), "groups" in program
    drawn = arrays[f"{run['program']}_strategy"] if freezes else np.zeros(20, int)
    moments = [dict.fromkeys(params, 0.0) for _ in groups]
    mean = dict.fromkeys(params, 0.0)
    losses, kept = [], []
    for t, (x, y) in enumerate(zip(*batches, strict=True)):
        loss, grads = gradients(params, x, y)
        losses.append(loss)
        mean = {name: mean[name] + grads[name] / every for name in params}
        if (t + 1) % every == 0:
            rate = settings["learning_rate"]
            rate = rate[t // every] if isinstance(rate, list) else rate
            moment = moments[drawn[t]]
            for name in list(params)[groups[drawn[t]] :]:
                decayed = mean[name] + settings.get("weight_decay", 0) * params[name]
                moment[name] = settings.get("momentum", 0) * moment[name] + decayed
                params[name] = params[name] - rate * moment[name]
            mean = dict.fromkeys(params, 0.0)
        if t + 1 in about["kept_after"]:
            kept.append(np.concatenate([x.ravel() for x in params.values()]))
    return np.array(losses), np.stack(kept)


def test_plain_accumulated_and_frozen_runs_are_what_the_formulas_give(record):
    about, arrays = record
    checked = set()
    for run in about["runs"]:
        if "error" in run or run["network"] != "mlp" or run["way"] != "boost":
            continue
        if run["switches"]["less_bn"] or run["optimizer"].startswith("adam"):
            continue
        losses, kept = train(record, run)
        np.testing.assert_allclose(
            arrays[f"{run['program']}_w"], kept, **CLOSE, err_msg=run["name"]
        )
        np.testing.assert_allclose(arrays[f"{run['program']}_losses"], losses, **CLOSE)
        checked.add(run["program"])
    assert len(checked) >= 20
