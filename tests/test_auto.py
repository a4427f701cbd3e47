"""One configuration for everything: what it means, what it refuses, what it builds."""

import ast
import dataclasses
import itertools
import json
import pathlib
import string

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training import fit, follow, losses_of

import boostax
from boostax.config import dictionary, keys, mindspore
from boostax.config.auto import auto

LAYERS = ("layer_0", "layer_1", "layer_2")


def mlp():
    rng, shapes = np.random.default_rng(0), itertools.pairwise((4, 4, 4, 2))
    kernels = [jnp.asarray(rng.normal(size=x, scale=0.5), jnp.float32) for x in shapes]
    layers = [{"kernel": kernel, "bias": jnp.zeros(kernel.shape[1])} for kernel in kernels]
    return dict(zip(LAYERS, layers, strict=True))


def loss_fn(params, batch):
    x, y = batch
    for name in LAYERS:
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    return jnp.mean((x - y.astype(x.dtype)) ** 2)


def batches(count):
    for x in np.random.default_rng(1).normal(size=(count, 16, 4)).astype(np.float32):
        yield x, np.tanh(x[:, :2])


# What MindSpore resolves. Rows by their place in the file: what it raises at, or ignores.
REFUSED = {
    3: "level must be left out, got 'O3'. MindSpore ignores it: an unknown level means 'O0'",
    4: "level must be left out, got 'bogus'",
    5: "boost.adasum must be left out, got True. .* mode 'auto' at level 'O1' decides",
    8: "boost.adasum must be left out, got True. .* mode 'disable_all' decides",
    9: "boost.mode must be 'auto' or 'manual' or 'enable_all' or 'disable_all', got 'xx'",
    10: "boost.less_bn must be left out, got False",
    15: "common.gradient_split_groups must be a list of integers, got 5. .* the params into three",
    16: "common.gradient_split_groups must be a list of integers, got 'a'",
    17: "boost.unknown must be left out, got True",
}
SILENT_THERE = {3, 4, 5, 8, 10, 17}  # MindSpore goes on; it raises in the other rows too


def switches(config):
    return {
        "less_bn": "less_bn" in config,
        "grad_freeze": "freeze" in config,
        "adasum": config.get("reduce", {}).get("kind") == "adasum-delta",
        "grad_accumulation": "accumulate" in config,
        "dim_reduce": "dim_reduce" in config,
        "loss_scale_group": config.get("loss_scale", {}).get("kind") == "group",
    }


ROWS = json.loads((pathlib.Path(__file__).parent / "golden/autoboost_configs.json").read_text())


@pytest.mark.parametrize("i", range(len(ROWS) - 1))
def test_every_row_resolves_as_in_mindspore_or_is_refused(i):
    row, data = ROWS[i], ROWS[i]["dict"] or {}
    assert ("error" in row) == (i in REFUSED.keys() - SILENT_THERE)
    if i in REFUSED:
        with pytest.raises((ValueError, TypeError), match=REFUSED[i]):
            auto(data, level=row["level"], strict=i in SILENT_THERE)
    if "error" in row:
        return
    boost = auto(data, level=row["level"], strict=False)
    assert not dictionary.is_mindspore(data) or boost == auto(data, level=row["level"])
    expected = dict(row["config"], loss_scale_group=False)
    if expected["grad_freeze"]:
        expected |= {"adasum": False, "grad_accumulation": False}
    if expected["dim_reduce"]:
        expected = dict.fromkeys(expected, False) | {"dim_reduce": True}
    assert switches(boost.config) == expected
    assert_settings(boost.config, row["attrs"])
    # Each switch that says otherwise than what is built has a note.
    for name, value in {**data.get("boost", {}), **row["config"]}.items():
        if name in expected and value != expected[name]:
            assert f"boost.{name} = " in "\n".join(boost.notes), name


SETTINGS = {
    "less_bn": {"normalized_head": "_fn_flag"},
    "freeze": {"groups": "_param_groups", "total_steps": "_total_steps", "freeze_p": "_freeze_p"},
    "accumulate": {"every": "grad_accumulation_step"},
    "dim_reduce": {
        **{"shrink": "rho", "slope": "sigma", "residual_rate": "alpha"},
        **{"residual_momentum": "gamma", "n_components": "n_components"},
    },
}


def assert_settings(config, attrs):
    """The values of MindSpore's object, where the technique is on."""
    for part, names in SETTINGS.items():
        if part in config:
            assert {x: config[part][x] for x in names} == {x: attrs[y] for x, y in names.items()}
    assert "less_bn" not in config or ("centralize" in config) == attrs["_gc_flag"]
    if "freeze" in config:
        assert (config["freeze"]["kind"] == "interval") == (attrs["_freeze_type"] == 1)
    assert "dim_reduce" not in config or config["dim_reduce"]["rule"] == "mindspore"


def test_manual_mode_leaves_the_levels_alone():
    """MindSpore edits its table in place, and the next object of that level inherits it."""
    assert ROWS[-1]["value"] is True  # adasum, of O1
    before = auto("O1").config
    assert "less_bn" not in auto({"boost": {"mode": "manual", "less_bn": False}}, level="O1").config
    assert auto("O1").config == before == auto({}, level="O1").config


# The dictionary of MindSpore's page, with its defaults.
OFF = dict.fromkeys(boostax.config.dictionary.SWITCHES, False)
PAGE = {"boost": {"mode": "auto", **OFF}} | {
    group: {key: about.get("default") for key, about in settings.items()}
    for group, settings in boostax.config.dictionary.GROUPS.items()
}
PAGE["common"]["gradient_split_groups"] = [50, 100]


def test_the_documented_template_is_read_as_it_is_and_says_what_has_no_effect():
    files = {"dim_reduce": {"n_components": 4, "weight_load_dir": "checkpoints", "timeout": 1800}}
    boost = auto(PAGE | {"boost": {"mode": "manual", **OFF, "dim_reduce": True}} | files)
    first, level, last = boost.notes
    assert first == (
        "common.gradient_split_groups = [50, 100] has no effect: XLA decides which "
        "gradients are sent together, or reduce.bucket_bytes does."
    )
    assert level.startswith("level 'O0'") and "the optimizer has no effect" in last
    finish = boost.config["dim_reduce"]
    assert (finish["n_components"], finish["weight_load_dir"]) == (4, "checkpoints")


FREEZES = {"mode": "manual", "grad_freeze": True}
RAMP, NO_KIND = {"groups": 3, "kind": "ramp"}, {"groups": 3, "kind": True}
DEPTHS = {"groups": 3, "kind": [1], "seed": 3}
HALF, TOP_K = {"dist_option": "half"}, {"dist_option": "sparseTopK"}
FREEZE_P = {"boost": FREEZES, "grad_freeze": {"freeze_p": 2}}
FREEZE_TYPE = {"boost": FREEZES, "grad_freeze": {"freeze_type": 2}}
TWO = "must be left out together with"
Theirs = type("DynamicLossScaleManager", (), {})  # MindSpore's own.
MISTAKES = (
    ({"acumulate": 4}, "auto: keys must be among 'check_up.*'acumulate'. Did you mean 'accumu"),
    ({"accumulate": {"evry": 4}}, "auto: arguments of accumulate must be .* Did you mean 'every'"),
    ({"loss_scale": "dynamc"}, "auto: loss_scale.kind must be 'dynamic' .* Did you mean 'dynamic'"),
    ({"reduce": {"kind": "int8", "density": 0.1}}, "auto: arguments of int8_reduce .* 'density'"),
    ({"reduce": "sum"}, 'auto: reduce.kind .* got .sum.. {"all_reduce": {"op": "sum"}} sums'),
    ({"reduce": {"op": "adasum-delta"}}, "all_reduce: op .* AdaSum, use .* reduce.kind of"),
    ({"loss_scale_manager": Theirs()}, "auto: loss_scale.kind .* boostax.config.mindspore.Dynamic"),
    ({"static_loss_scale": True}, "static_loss_scale: scale must be given, got None. The argument"),
    ({"reduce": "partial"}, "partial_average: partitions must be a positive integer or a tree"),
    ({"top_k_reduce": 3}, r"top_k_reduce: density must be in \(0, 1\], got 3. 0.01 sends 1%"),
    ({"reduce": "mean", "int8_reduce": True}, f"auto: int8_reduce {TWO} another"),
    ({"less_bn": {"normalized_head": 3}}, "less_bn: normalized_head must be True or False, got 3"),
    ({"check_updates": 3}, "auto: check_updates must be a dictionary, got 3. The part"),
    ({"freeze": RAMP}, "scheduled_freeze: total_steps must be a positive integer, got None"),
    ({"freeze": NO_KIND}, "scheduled_freeze: kind must be 'interval' or .*, got True"),
    ({"freeze": DEPTHS}, "scheduled_freeze: seed must be left out with depths"),
    ({"dim_reduce": {"shrink": 2}}, r"dim_reduce: shrink must be in \(0, 1\), got 2"),
    ({"dim_reduce": {"residual_rate": -1}}, "dim_reduce: residual_rate must be positive, got -1"),
    ({"policy": "O2"}, "auto: loss_scale must be given if policy computes in float16, got None"),
    ({"freeze": {"groups": 3}, "local_updates": 2}, "scheduled_freeze: inner must keep params equ"),
    ({"dim_reduce": True, "local_updates": 2}, "auto: dim_reduce.every must be None with reduce"),
    ({"freeze": {"groups": 3}, "average_params": True}, "scheduled_freeze: inner must not store"),
    ("01", "auto: spec must be a level, a dictionary, or the path .*, got '01'. Did you mean 'O1'"),
    (3, "auto: spec must be a level, a dictionary, or the path of a .json file, got 3"),
    ({"singa": {"dist_option": "sparse"}}, "singa: dist_option must be 'plain' or .*'sparse'"),
    ({"singa": {"spar": 1}}, "singa: spar must be left out with 'plain', which has 'threshold'"),
    ({"singa": {"buffSize": 4}}, "singa: buffSize must be .*, got 4. XLA makes the buffers"),
    ({"singa": HALF | {"clip_Value": 1.0}}, "singa: clip_Value must be left out without clipping"),
    ({"singa": (TOP_K | {"spars": 2.0})}, r"singa: spars must be in \(0, 1\], got 2.0. 0.01 sends"),
    ({"singa": TOP_K | {"topK": False}}, "singa: topK must be True or left out with 'sparseTopK'"),
    ({"singa": {"threshold": -1}}, "singa: threshold must be an integer that is not negative, got"),
    ({"singa": {}, "reduce": "mean"}, f"auto: reduce {TWO} singa, got 'mean'"),
    ({"boost": 3}, "mindspore: keys of boost must be those of a dictionary"),
    ({"boost": {"mode": "all"}}, "mindspore: boost.mode must be 'auto' or 'manual'"),
    ({"boost": {}, "polcy": "O1", "clip": 1.0}, "auto: keys must be .* Did you mean 'policy'"),
    (FREEZE_P, r"mindspore: grad_freeze.freeze_p must be in \[0, 1\], got"),
    (FREEZE_TYPE, "mindspore: grad_freeze.freeze_type must be 0 or 1, got"),
    ({"strict": 1}, "auto: strict must be True or False, got 1"),
)


@pytest.mark.parametrize(("spec", "text"), MISTAKES, ids=lambda x: str(x)[:40])
def test_a_mistake_is_refused_by_name(spec, text):
    """Names when they are read, values by their factories when the chain is built."""
    with pytest.raises((ValueError, TypeError), match=f"^{text}"):
        auto(spec).optimizer(optax.sgd(0.1), mlp(), axis_name="data").init(mlp())


def test_every_refusal_gets_its_words_and_is_made_somewhere():
    """Defect guarded against: a KeyError in the place of the sentence, at a rare mistake."""
    words, made = boostax._core.checks.table("boostax.config", "refusals"), set()
    for path in pathlib.Path(keys.__file__).parent.glob("*.py"):
        calls = (x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Call))
        for call in (x for x in calls if getattr(x.func, "id", "") == "require"):
            given = {keyword.arg for keyword in call.keywords}
            texts = [x.value for x in ast.walk(call.args[1]) if isinstance(x, ast.Constant)]
            for name in words.keys() & texts:
                parsed = string.Formatter().parse(" ".join(words[name]))
                # None stands for a dictionary of words.
                assert None in given or {field for _, field, *_ in parsed if field} == given, name
                made.add(name)
    assert made == words.keys()


WITHIN = {"reduce": {"kind": "adasum", "within": "cores"}}
MANY = {"loss_scale": {"kind": "group", "groups": 4}}
FREEZE = {"freeze": {"groups": 4}}
INNER, MISSING = optax.sgd(0.1), "axis_name must be given with the reduction 'adasum-delta'"
ADASUM = {"boost": {"mode": "manual", "adasum": True}}
LATER = (
    (FREEZE, (INNER, None), "scheduled_freeze: params must be given if groups is a number"),
    (FREEZE, (INNER, mlp()), "scheduled_freeze: groups must be at most the number of layers"),
    (MANY, (INNER, mlp()), "group_loss_scale: groups must be at most the number of layers, 3"),
    (WITHIN, (INNER, None), "adasum: within must be one of several axes"),
    ({}, (3,), "Boost.optimizer: inner must be"),
)


@pytest.mark.parametrize(("config", "given", "text"), LATER)
def test_what_params_and_axes_alone_can_tell_is_refused_as_the_chain_is_built(config, given, text):
    with pytest.raises((ValueError, TypeError), match=f"^{text}"):
        auto(config).optimizer(*given, axis_name="cores")


def test_a_reduction_wants_an_axis():
    """A step that does not reduce is not what the configuration says; MindSpore's reading is."""
    auto(WITHIN).optimizer(INNER, axis_name=("nodes", "cores")).init(mlp())
    assert auto("O0").optimizer(INNER) is not None
    with pytest.raises(ValueError, match=f"^Boost.optimizer: {MISSING}, got None"):
        auto(ADASUM, strict=True).optimizer(INNER)
    state = auto(ADASUM).optimizer(INNER).init(mlp())
    assert jax.tree.structure(state) == jax.tree.structure(INNER.init(mlp()))


# What a factory cannot do without.
NEEDED = {
    "clip_by_global_norm": {"max_norm": 0.5},
    "group_loss_scale": {"groups": ["layer_0", ["layer_1", "layer_2"]]},
    **{"local_updates": {"every": 2}, "partial_average": {"partitions": 2}},
    **{"policy": {"spec": "O1", "dtype": "bfloat16"}, "static_loss_scale": {"scale": 8.0}},
    **{"store": {"moments": {"*mu": "int8"}}, "scale": {"step_size": 4.0}},
}


@pytest.mark.parametrize("name", keys.NAMED)
def test_every_factory_is_a_key_with_its_own_arguments_and_goes_to_json_and_back(name, tmp_path):
    key, kind = keys.NAMED[name]
    takes = keys.takes(keys.PARTS[key][kind])
    plain = {x: default for x, default in takes.items() if isinstance(default, (int, float, str))}
    value = plain | NEEDED.get(name, {})
    boost = auto({name: value})
    assert boost.config == {key: ({"kind": kind} if kind else {}) | value}
    file = tmp_path / "boost.json"
    file.write_text(json.dumps(boost.config))
    assert auto(str(file)) == auto(file) == auto({key: boost.config[key]}) == boost
    assert auto({name: False}).config == auto({key: None}).config == {}
    assert not set(takes) & {"inner", "axis_name", "tree", "less_bn", "module"}


@pytest.mark.parametrize("strict", [True, False])
def test_a_level_is_a_configuration(strict):
    assert auto("O0").strict and not auto("O1").strict
    for config in (auto(level, strict=strict).config for level in ("O0", "O1", "O2")):
        assert auto(json.loads(json.dumps(config))).config == config


def test_a_file_of_mindspores_is_read(tmp_path):
    file = tmp_path / "boost.json"
    file.write_text(json.dumps({"boost": {"mode": "manual", "adasum": True}}))
    assert auto(file, level="O1").config == auto("O2").config
    assert auto(file).config["reduce"] == {"kind": "adasum-delta", "within": 8}


def test_a_dictionary_changes_its_level_field_by_field():
    config = auto({"freeze": {"groups": 3}, "less_bn": False}, level="O1").config
    assert config["freeze"]["groups"] == 3 and config["freeze"]["cut"] == "mindspore"
    assert config.keys() == {"freeze", "centralize"}
    # A part of another kind starts anew.
    fixed = {"freeze": {"kind": [1], "groups": 2}, "centralize": {"multiple_of": None}}
    assert auto(fixed, level="O2").config["centralize"]["after_decay"]


# The others: tests/test_singa_modes.py.
SINGAS = (
    ("half", {"clipping": True}, {"kind": "mean", "wire_dtype": "float16", "clip": 100.0}),
    ("plain", {"threshold": 0}, {"kind": "mean", "bucket_bytes": 1}),
    ("partialUpdate", {"partitions": 3}, {"kind": "partial", "partitions": 3}),
)


@pytest.mark.parametrize(("mode", "options", "expected"), SINGAS)
def test_singas_modes_are_reductions(mode, options, expected):
    found = auto({"singa": {"dist_option": mode, **options}, "clip": 1.0}).config
    assert found == {"reduce": expected, "clip": {"max_norm": 1.0}}


def names(state):
    """The states from the outside in; a chain comes last."""
    state = state.local if isinstance(state, boostax.PerReplica) else state
    if type(state) is tuple:
        return [type(x).__name__.removesuffix("State") for x in state]
    return [type(state).__name__.removesuffix("State"), *names(state.inner_state)]


EVERYTHING = {"loss_scale": "dynamic", "accumulate": 2, "centralize": True, "clip": 1.0}
EVERYTHING["reduce"] = {"kind": "mean", "wire_dtype": "bfloat16"}
WINDOW = {"accumulate": {"every": 2, "drop": "window"}}
GROUPED = {"reduce": "adasum-delta", "loss_scale": {"kind": "group", "groups": 3}}
RULES = {"rules": {"layer_0/bias": "last"}}
FROZEN = {"carry": RULES, "check_updates": True, "freeze": {"groups": 3}}
STORED = {"average_params": "window", "dim_reduce": True, "store": {"moments": "bfloat16"}}
AROUND = "LossScale Accumulate"
ORDERS = (
    ({}, f"{AROUND} Empty Empty Empty Trace"),
    (WINDOW, "Accumulate LossScale Empty Empty Empty Trace"),
    ({"reduce": "adasum", "dim_reduce": True}, f"{AROUND} Trajectory Adasum Empty Empty Trace"),
    (GROUPED, "GroupLossScale Accumulate AdasumDelta Empty Empty Trace"),
    ({"reduce": {"kind": "local", "every": 2}}, f"{AROUND} LocalUpdates Empty Empty Trace"),
    (STORED, f"{AROUND} AverageParams Store Trajectory Empty Empty Empty Trace"),
    (FROZEN, f"ScheduledFreeze Carry {AROUND} Empty Empty Empty CheckUpdates"),
)


@pytest.mark.parametrize(("changes", "expected"), ORDERS)
def test_the_chain_has_the_one_order(changes, expected):
    tx = auto(EVERYTHING | changes).optimizer(optax.trace(0.9), mlp(), axis_name="data")
    assert names(tx.init(mlp())) == expected.split()


def by_hand(axis):
    """What the configuration below is, written out."""
    parts = [] if axis is None else [boostax.adasum(axis)]
    parts += [boostax.centralize_gradients(), optax.clip_by_global_norm(0.5), optax.adamw(1e-2)]
    tx = boostax.accumulate(optax.chain(*parts), 2, axis_name=axis)
    tx = boostax.dynamic_loss_scale(tx, init_scale=2.0**10, axis_name=axis)
    schedule = boostax.freeze_schedule("interval", total_steps=8, frozen_fraction=0.5)
    groups = boostax.freeze.prefix_groups(mlp(), 2)
    return boostax.scheduled_freeze(tx, groups, schedule, repeat=True)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_run_from_a_configuration_is_that_of_a_chain_by_hand_bit_for_bit(mesh, devices):
    mesh, axis = (mesh, "data") if devices == 8 else (None, None)
    place, policy = {"mesh": mesh, "axis_name": axis}, {"spec": "O2", "dtype": "bfloat16"}
    config = {"loss_scale": {"init_scale": 2.0**10}, "accumulate": 2, "centralize": True}
    config |= {"policy": policy, "clip": 0.5, "reduce": "mean" if axis is None else "adasum"}
    config["freeze"] = {"groups": 2, "total_steps": 8, "frozen_fraction": 0.5}
    step = auto(config).make_train_step(loss_fn, optax.adamw(1e-2), mlp(), **place)
    own = boostax.make_train_step(loss_fn, by_hand(axis), policy=boostax.policy(**policy), **place)
    results = [follow(each, each.init(mlp()), batches(4)) for each in (step, own)]
    metrics = results[0][1][-1]
    assert "frozen_groups" in metrics and int(metrics["optimizer_steps"]) == 2
    chex.assert_trees_all_equal(*results)


@pytest.mark.long
def test_a_finish_lowers_the_loss_with_an_optimizer_outside_the_span(mesh):
    boost = auto({"loss_scale": "dynamic", "dim_reduce": {"n_components": 3, "every": 2}})
    axis = {"mesh": mesh, "axis_name": "data"}
    main = boost.make_train_step(loss_fn, optax.sgd(0.1), **axis)
    state, _ = follow(main, main.init(mlp()), batches(9))
    params = main.common_params(state)
    tx = boost.finish(state.opt_state, params, residual=optax.adam(1e-3), axis_name="data")
    assert isinstance(tx.init(params).inner_state, boostax.states.DimReduceState)
    seen = losses_of(fit(loss_fn, tx, params, list(batches(1)) * 4, policy=boost.policy, **axis)[1])
    assert seen[-1] < 0.9 * seen[0]
    # A basis from elsewhere does as well, and MindSpore's own residual is a momentum SGD.
    basis = boostax.subspace.trajectory_basis(state.opt_state, 2)
    mindspore = auto({"boost": {"mode": "manual", "dim_reduce": True}})
    state = mindspore.finish(basis, params).init(params)
    assert isinstance(state.residual_state[0], optax.TraceState)


def test_the_model_is_changed_if_less_bn_is_on():
    sample = jnp.ones((1, 4, 4, 2))
    _, report = auto("O1").model(Net(), sample)
    assert (report.removed, report.head) == (("norm_1",), "head")
    fixed = auto({"less_bn": {"normalized_head": False, "remove": ["norm_2"]}})
    assert fixed.model(Net(), sample)[1].removed == ("norm_2",)
    assert auto({}).model(Net(), sample) == (Net(), None)


class Net(nn.Module):
    """A residual branch of two norms, and a head."""

    @nn.compact
    def __call__(self, x):
        y = x
        for name in ("norm_1", "norm_2"):
            y = nn.Conv(2, (3, 3), use_bias=False)(nn.relu(y))
            y = nn.BatchNorm(use_running_average=True, name=name)(y)
        return nn.Dense(3, name="head")(nn.relu(x + y).mean((1, 2)))


def test_a_step_wants_the_model_that_less_bn_changed():
    """One line forgotten, and MindSpore's O1 would train without it."""
    boost, x, inner = auto({"less_bn": True}), jnp.ones((2, 4, 4, 2)), optax.sgd(0.1)
    model, report = boost.model(Net(), x)
    before, after = (jax.eval_shape(m.init, jax.random.key(0), x)["params"] for m in (Net(), model))
    boost.make_train_step(loss_fn, inner, after, less_bn=report)
    boost.make_train_step(loss_fn, inner, less_bn=report)
    for params, given, text in (
        (after, None, "less_bn must be the report of the changed model, got N"),
        (before, report, "params must be of the changed .* unchanged model at norm_1"),
        (before, dataclasses.replace(report, norms=()), "params of the unchanged model at head"),
    ):
        with pytest.raises(ValueError, match=text):
            boost.make_train_step(loss_fn, inner, params, less_bn=given)
    with pytest.raises(ValueError, match="less_bn must be left out if the configuration"):
        auto({}).make_train_step(loss_fn, inner, less_bn=report)


# MindSpore's dictionaries


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_dictionary_of_the_page_runs_as_it_is(level):
    """Its switches say no, in a mode that takes what the level says."""
    with pytest.raises(ValueError, match=r"boost\.less_bn must be left out"):
        auto(PAGE, level=level, strict=True)
    boost = auto(PAGE, level=level)
    assert switches(boost.config) == OFF | {"less_bn": True, "grad_freeze": True}
    assert boost.config["centralize"] == {"multiple_of": 16, "after_decay": True}
    assert boost.config["freeze"].items() >= {"moments": "per_group", "cut": "mindspore"}.items()
    notes = "\n".join(boost.notes)
    assert ("boost.adasum = True has no effect: grad_freeze" in notes) == (level == "O2")
    assert "includes gamma and beta" in notes and "same depths after numpy.random.seed(0)" in notes
    # LeNet's kind: no norms, and fewer buckets than groups. It trains whole, as there.
    step = boost.make_train_step(loss_fn, mindspore.momentum(0.1, 0.9), mlp(), less_bn=NOTHING)
    seen = losses_of(follow(step, step.init(mlp()), list(batches(1)) * 3)[1])
    assert seen[-1] < seen[0]


NOTHING = boostax.model.LessBNReport((), None)


def test_what_mindspore_ignores_is_noted():
    data = {"boost": {"mode": "manual", "les_bn": True, "grad_accumulation": True}}
    data |= {"grad_acumulation": {}, "grad_freeze": {"freeze_p": "never looked at"}}
    data["grad_accumulation"] = {"grad_accumulation_step": 4, "steps": 3}
    boost = auto(data, level="O3")
    assert boost.config == {"accumulate": {"every": 4}}
    assert boost.notes == (
        "level = 'O3' has no effect: an unknown level means 'O0'. Did you mean 'O2'?",
        "boost_config_dict.grad_acumulation = {} has no effect: Did you mean 'grad_accumulation'?",
        "boost.les_bn = True has no effect: Did you mean 'less_bn'?",
        "grad_accumulation.steps = 3 has no effect: No allowed name is similar.",
        "level 'O0': boostax reads the switches as AutoBoost and its train cells do; MindSpore's "
        "Model boosts only at O1 and O2.",
    )
    with pytest.raises(ValueError, match="mindspore: level must be left out"):
        auto({"clip": 1.0}, level="O3")


PLAIN = {"mode": "manual", "less_bn": False, "grad_freeze": False}
WINDOWED = {"boost": PLAIN | {"grad_accumulation": True}}
# The dictionary of GroupLossScaleManager's own example, at O1.
GROUP = {"boost": {"mode": "manual"} | OFF | {"loss_scale_group": True}}
TWO_GROUPS = mindspore.GroupLossScaleManager(4096, [["layer_0"], ["layer_1", "layer_2"]])
DYNAMIC, FIXED = mindspore.DynamicLossScaleManager(4, 3000), mindspore.FixedLossScaleManager
MANAGED = (
    # What is on, and the start of each note.
    (WINDOWED, None, []),
    (WINDOWED, mindspore.DynamicLossScaleManager(), ["loss_scale_manager: an unscaled"]),
    (WINDOWED, DYNAMIC, ["loss_scale_manager: an", "loss_scale_manager: scale_factor is 3000"]),
    (WINDOWED, FIXED(1024.0, False), ["loss_scale_manager: with drop_overflow_update=False"]),
    (GROUP, TWO_GROUPS, ["loss_scale_manager: an", "loss_scale_group: gradients are div"]),
    (GROUP, None, ["boost.loss_scale_group = True has no effect: only a loss-scale cell"]),
)


@pytest.mark.parametrize(("data", "manager", "notes"), MANAGED)
def test_a_manager_stands_in_the_dictionary(data, manager, notes):
    boost = auto(data | {"loss_scale_manager": manager}, level="O1")
    assert len(boost.notes) == len(notes) and all(map(str.startswith, boost.notes, notes))
    assert boost.config.get("loss_scale") == manager
    assert auto(json.loads(json.dumps(boost.config))).config == boost.config
    boost.optimizer(INNER, mlp()).init(mlp())


def test_managers_have_mindspores_order_and_the_switch_its_own():
    assert DYNAMIC.items() >= {"init_scale": 4, "growth_factor": 3000}.items()
    assert DYNAMIC["backoff_factor"] == 1 / 3000 and DYNAMIC["growth_interval"] == 2000
    text = "loss_scale_manager must be of another kind with boost.loss_scale_group"
    for data, manager in ((GROUP, DYNAMIC), (GROUP, FIXED()), (WINDOWED, TWO_GROUPS)):
        with pytest.raises(TypeError, match=text):
            auto(data | {"loss_scale_manager": manager}, level="O1")
    # The last calls the optimizer itself; freezing holds beside a manager here alone.
    both = {"boost": GROUP["boost"] | {"adasum": True}, "loss_scale_manager": TWO_GROUPS}
    assert "reduce" not in auto(both, level="O1").config
    # In MindSpore's DimReduce a scale that nobody divides by multiplies what is outside the span.
    finish = auto({"boost": {"mode": "enable_all"}, "loss_scale_manager": FIXED(16, False)})
    assert finish.config["dim_reduce"]["residual_rate"] == 0.016
    assert "16 - 1 times the gradient's part in the span" in finish.notes[-1]


GATES = [{"loss_scale_manager": x} for x in (mindspore.DynamicLossScaleManager(), FIXED())]
GATES += [{"boost": GROUP["boost"] | {"grad_freeze": True}, "loss_scale_manager": TWO_GROUPS}]
GATES += [{"accumulate": 2}, {"loss_scale": {"kind": "static", "scale": 8.0}}]


@pytest.mark.parametrize("gates", GATES)
def test_mindspores_freezing_holds_beside_a_scaler_and_a_window(gates):
    """Its depths would each keep one, which ``scheduled_freeze`` refuses."""
    switches = {"boost": PLAIN | {"grad_freeze": True}, "grad_freeze": {"param_groups": 2}}
    boost = auto(switches | gates, level="O1")
    assert boost.config["freeze"]["moments"] == "shared"
    assert "with one state of moments for all depths" in boost.notes[-1]

    def scaled(params, batch, scales=None):
        first = boostax.precision.scale_boundary(params["layer_0"], scales, 0, 1)
        return loss_fn(params | {"layer_0": first}, batch)

    step = boost.make_train_step(scaled, mindspore.momentum(0.1, 0.9), mlp())
    follow(step, step.init(mlp()), batches(2))


@pytest.mark.parametrize("frozen", [False, True])
def test_without_drop_nobody_but_the_optimizer_divides(frozen):
    """Also beside freezing, where each depth would keep the scaler."""
    boost = {"boost": PLAIN | {"grad_freeze": frozen}}
    managed = boost | {"loss_scale_manager": FIXED(1024.0, False)}
    scaled = auto(managed, level="O1").optimizer(optax.sgd(1e-4), mlp())
    by_hand = auto(boost, level="O1").optimizer(optax.sgd(1e-4 * 1024), mlp())
    ends = [fit(loss_fn, tx, mlp(), batches(3))[0].params for tx in (scaled, by_hand)]
    chex.assert_trees_all_close(*ends, rtol=0, atol=1e-7)


def test_centralization_stands_behind_the_decay_that_moments_take_in():
    rng = np.random.default_rng(0)
    w, g = (jnp.asarray(rng.normal(size=(16, 4)), jnp.float32) for _ in range(2))
    decay = optax.add_decayed_weights(0.1)

    def update(after, *inner):
        tx = auto({"centralize": {"after_decay": after}}).optimizer(optax.chain(*inner))
        return np.asarray(tx.update(g, tx.init(w), w)[0])

    momentum, own = optax.sgd(0.5, momentum=0.9), 0.1 * np.asarray(w)
    whole, alone = np.asarray(g + 0.1 * w), np.asarray(g) - np.asarray(g).mean(0)
    behind = update(True, decay, momentum)
    np.testing.assert_allclose(behind, -0.5 * (whole - whole.mean(0)), atol=1e-6)
    np.testing.assert_allclose(update(False, decay, momentum), -0.5 * (alone + own), atol=1e-6)
    spares = optax.add_decayed_weights(0.1, mask=lambda w: jax.tree.map(lambda _: True, w))
    np.testing.assert_array_equal(update(True, spares, momentum), behind)
    # A decoupled decay stays whole, as there.
    np.testing.assert_allclose(update(True, optax.sgd(0.5), decay), -0.5 * alone + own, atol=1e-6)


def test_what_mindspores_dictionary_has_no_word_for_stands_beside_it():
    data = {"boost": {"mode": "manual", "grad_freeze": True}}
    freeze = auto(data | {"freeze": {"order": ["b", "a"]}}).config["freeze"]
    assert (freeze["order"], freeze["groups"], freeze["cut"]) == (["b", "a"], 10, "mindspore")
    sets = {"moments": "shared", "groups": 3, "kind": "ramp"}
    clashes = ((f"freeze.{x}", {"order": ["b", "a"], x: value}) for x, value in sets.items())
    for name, more in (("freeze", True), *clashes):
        with pytest.raises(ValueError, match=f"{name} {TWO} MindSpore's dict"):
            auto(data | {"freeze": more})
    # As errors say, and the page of MindSpore's levels.
    off = {"less_bn": False, "freeze": None, "loss_scale_manager": DYNAMIC}
    assert auto(off, level="O1").config.keys() == {"centralize", "loss_scale"}


def test_one_file_is_a_job():
    """MindSpore's dictionary beside its loss-scale manager and a precision, and its level."""
    half = {"kind": "mean", "wire_dtype": "float16"}
    scale = {"kind": "dynamic", "init_scale": 65536.0}
    job = {"level": "O1", "strict": False, "policy": "O2", "reduce": half, "loss_scale": scale}
    job |= WINDOWED | {"grad_accumulation": {"grad_accumulation_step": 2}}
    kept = {"accumulate": {"every": 2}, "policy": {"spec": "O2"}, "reduce": half}
    assert auto(job).config == kept | {"loss_scale": scale}
    assert auto(job) == auto(job, level="O1", strict=False)
    with pytest.raises(ValueError, match="level must be 'O1' or left out, got 'O2'"):
        auto(job, level="O2")
    with pytest.raises(ValueError, match=f"accumulate {TWO} MindSpore's dict"):
        auto(job | {"accumulate": 3})
    singas = auto({"singa": HALF, "boost": {"mode": "disable_all"}, "clip": 1.0})
    assert singas.config == {"reduce": half, "clip": {"max_norm": 1.0}}
