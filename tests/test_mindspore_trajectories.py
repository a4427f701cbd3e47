"""What MindSpore's boost recorded is what its formulas say.

That the record is complete is ``test_conformance.py``'s.
"""

import numpy as np
from mindspore_runs import ABOUT, arrays, split

# float32 against float64 over 20 steps: the largest difference is 1e-6.
CLOSE = {"rtol": 0, "atol": 2e-6}


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


def train(run):
    """SGD with momentum by accumulated gradients, with moments of each group's own."""
    program, shapes = ABOUT["programs"][run["program"]], ABOUT["shapes"][run["network"]]
    settings = ABOUT["optimizers"][run["optimizer"]]
    wide = lambda name: arrays()[f"{run['network']}_{name}"].astype(np.float64)  # noqa: E731
    params, batches = split(wide("start"), shapes), [wide("x"), wide("y")]
    every = 1
    if run["switches"]["grad_accumulation"]:
        every = run["config"].get("grad_accumulation", {}).get("grad_accumulation_step", 1)
    groups, freezes = program.get("groups", [0]), "groups" in program
    drawn = arrays()[f"{run['program']}_strategy"] if freezes else np.zeros(20, int)
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
        if t + 1 in ABOUT["kept_after"]:
            kept.append(np.concatenate([x.ravel() for x in params.values()]))
    return np.array(losses), np.stack(kept)


def test_plain_accumulated_and_frozen_runs_are_what_the_formulas_give():
    checked = set()
    for run in ABOUT["runs"]:
        if "error" in run or run["network"] != "mlp" or run["way"] != "boost":
            continue
        if run["switches"]["less_bn"] or run["optimizer"].startswith("adam"):
            continue
        losses, kept = train(run)
        for name, found in (("w", kept), ("losses", losses)):
            recorded = arrays()[f"{run['program']}_{name}"]
            np.testing.assert_allclose(recorded, found, **CLOSE, err_msg=run["name"])
        checked.add(run["program"])
    assert len(checked) >= 20
