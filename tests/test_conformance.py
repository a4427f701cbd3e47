"""What ``auto`` trains is what MindSpore 2.10 trained by the same dictionary.

Every run that MindSpore ended, by its dictionaries and by each switch: 20 steps, weights after the
1st, 5th and 20th within 1e-4; or it is listed below with the cause and the size of the difference.
"""

import itertools
import json

import numpy as np
import pytest
from conformance import ours
from lanes import lanes
from mindspore_runs import ABOUT, arrays, place
from recorded import GOLDEN

from boostax.config import dictionary, mindspore
from boostax.config.auto import auto

ATOL = 1e-4


def given(run):
    """What MindSpore was given; and where layers are frozen, in which order MindSpore has them."""
    config = dict(run["config"] or {})
    if run["switches"]["grad_freeze"]:
        names = ABOUT["shapes"][run["network"]]
        config["freeze"] = {"order": list(dict.fromkeys("/".join(place(x)[:-1]) for x in names))}
    return config


def read(run):
    """By default; a level that MindSpore does not know is one where ``strict=False`` says so."""
    strict = None if run["level"] in dictionary.LEVELS else False
    return auto(given(run), level=run["level"], strict=strict)


def difference(run):
    """The largest, over all weights kept and over the losses."""
    # MindSpore makes the optimizer anew for these, by groups of params, which it decays as a whole.
    anew = run["switches"]["less_bn"] or run["switches"]["grad_freeze"]
    inner = ours.optimizer_of(ABOUT["optimizers"][run["optimizer"]], anew)
    told, worst = ours.rerun(run, read(run), inner)
    if run["way"] != "boost":  # Of Model's runs there are no losses.
        return worst
    losses = np.array([metrics["loss"] for _, metrics, _ in told])
    return max(worst, float(np.abs(losses - arrays()[f"{run['program']}_losses"]).max()))


def key(run):
    """As ``mindspore_trajectories.py`` calls it."""
    parts = ("name", "network", "optimizer", "way", "mode")
    return "-".join(run[part] for part in parts if run[part] not in ("boost", "graph"))


# What differs: the cause, as a note of ``auto`` says it, and its size, 1.2 times as measured.
DIFFERENT = {
    "config_13-mlp-momentum-model": ("Model boosts only at O1 and O2", 0.65),
    "config_13-resnet-slow-model": ("Model boosts only at O1 and O2", 0.13),
    "less_bn_fn0_gc0-resnet-slow-pynative": ("in PyNative mode removes no norms", 0.25),
}
# Each technique once, alone and beside others.
NAMES = (
    "adasum-mlp-momentum plain-mlp-adam_decay config_01-resnet-slow accumulate_3-mlp-momentum "
    "accumulate_4_less_bn-mlp-momentum O0_loss_scale_group_True-mlp-momentum "
    "less_bn_fn0_gc0-mlp-momentum less_bn_fn0_gc1-resnet-slow_decay "
    "freeze_g3_t0_p0.5_n20-mlp-momentum freeze_g3_t1_p0.5_n20-mlp-momentum_schedule"
)
QUICK = {*NAMES.split(), *DIFFERENT}


# A run for each program, by one dictionary each; what is done by hand beside it is not. DimReduce
# takes a basis or checkpoints: those are no cases here.
FIRST = {}
for run in ABOUT["runs"]:
    files = run.get("switches", {}).get("dim_reduce")
    if "program" in run and run["way"] in ("boost", "model") and not files:
        about = run["program"], json.dumps(run["config"]), run["level"], run["optimizer"]
        FIRST.setdefault(about, run)
CASES = {key(run): run for run in FIRST.values()}


@pytest.mark.parametrize("name", lanes(CASES, QUICK))
def test_weights_are_those_of_mindspore(name):
    found = difference(CASES[name])
    if name not in DIFFERENT:
        assert found <= ATOL, found
        return
    note, size = DIFFERENT[name]
    assert ATOL < found <= size, found
    assert note in " ".join(read(CASES[name]).notes)


def test_every_dictionary_and_each_switch_that_mindspore_runs_is_a_case():
    assert CASES.keys() >= QUICK
    *rows, _ = json.loads((GOLDEN / "autoboost_configs.json").read_text())
    levels, switches = ("O0", "O1", "O2"), CASES["plain-mlp-momentum"]["switches"]
    names = {f"config_{i:02}" for i in range(len(rows))} | {f"recommended_{x}" for x in levels}
    runs = [run for run in ABOUT["runs"] if run["way"] == "boost"]
    names |= {f"{x}_auto" for x in levels}
    for level, switch in itertools.product(levels, switches):
        (name,) = {x["name"] for x in runs if x["name"].startswith(f"{level}_{switch}_")}
        names.add(name)
    left = names - {run["name"] for run in CASES.values()}
    # There DimReduce has no files, and the others end in an error.
    no_files = {"config_07", "config_11", *(f"{x}_dim_reduce_True" for x in levels)}
    errors = {"config_09", "config_15", "config_16"}
    assert left == no_files | errors | {f"{x}_grad_accumulation_True" for x in ("O1", "O2")}
    assert all("error" in run for run in ABOUT["runs"] if run["name"] in left)


def test_a_group_manager_has_the_scales_of_mindspore_and_its_weights_but_for_a_note():
    (run,) = (run for run in ABOUT["runs"] if run["way"] == "groups" and "program" in run)
    layers = [f"fc{i}" for i in range(1, 7)]
    manager = mindspore.GroupLossScaleManager(ABOUT["init_scale"], [layers[:3], layers[3:]])
    boost = auto(run["config"] | {"loss_scale_manager": manager}, level="O1")

    # What an Ascend would find in each group, in each row of a batch.
    rows = np.repeat(np.array(ABOUT["overflows"], bool)[:, None], len(arrays()["mlp_x"][0]), 1)
    inner = ours.optimizer_of(ABOUT["optimizers"][run["optimizer"]], False)
    told, worst = ours.rerun(run, boost, inner, rows)
    tables, scales = [table for _, _, table in told], arrays()[f"{run['program']}_scales"]
    np.testing.assert_allclose(tables, scales[:, 1:3], rtol=2e-6)
    first = [metrics["group_0_scale"] for _, metrics, _ in told]
    np.testing.assert_array_equal(first, np.exp2(np.floor(np.log2(tables)))[:, 0])
    assert ATOL < worst <= 7e-4, worst  # 1.2 times as measured
    assert "MindSpore divides by the scale after its update" in " ".join(boost.notes)
