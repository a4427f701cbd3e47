"""One configuration for everything: what it means, what it refuses, what it builds."""

import dataclasses
import itertools
import json

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import REDUCTIONS

import boostax
from boostax.config.auto import auto
from boostax.config.config import FACTORIES, BoostConfig
from boostax.config.mindspore import SWITCHES, from_mindspore
from boostax.config.part import Place
from boostax.config.parts import (
    Accumulate,
    AverageParams,
    Carry,
    Centralize,
    CheckUpdates,
    Clip,
    CountLostUpdates,
    DimReduce,
    Freeze,
    LessBN,
    LossScale,
    Precision,
    SkipSpikes,
    Store,
)
from boostax.config.reduction import Reduce

LAYERS = ("layer_0", "layer_1", "layer_2")
SIZES = (4, 4, 4, 2)


def mlp():
    rng = np.random.default_rng(0)
    return {
        name: {
            "kernel": jnp.asarray(rng.normal(size=shape, scale=0.5), jnp.float32),
            "bias": jnp.zeros(shape[1]),
        }
        for name, shape in zip(LAYERS, itertools.pairwise(SIZES), strict=True)
    }


def loss_fn(params, batch):
    x, y = batch
    for name in LAYERS:
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    return jnp.mean((x - y.astype(x.dtype)) ** 2)


def batches(count):
    rng = np.random.default_rng(1)
    for _ in range(count):
        x = rng.normal(size=(16, 4)).astype(np.float32)
        yield x, np.tanh(x[:, :2])


def train(config, calls=3, mesh=None, inner=None, **options):
    axis = None if mesh is None else "data"
    inner = optax.adam(1e-2) if inner is None else inner
    boost = auto(config)
    step = boost.make_train_step(loss_fn, inner, mlp(), mesh=mesh, axis_name=axis, **options)
    state = step.init(mlp())
    for batch in batches(calls):
        state, metrics = step(state, batch)
    return step, state, metrics


def assert_trained(step, state, metrics):
    assert np.isfinite(metrics["loss"])
    params = step.common_params(state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != b).any()), params, mlp())
    assert moved["layer_2"]["kernel"]


# What MindSpore resolves. Rows by their place in the file; where ours differs, why.
REFUSED = {
    3: "auto: level must be 'O0' or 'O1' or 'O2', got 'O3'. Did you mean 'O2'?",
    4: "auto: level must be 'O0' or 'O1' or 'O2', got 'bogus'. Nothing there is close to it.",
    5: "mindspore: boost.adasum must be False or left out with mode 'auto' at level 'O1', got "
    "True. MindSpore ignores the switch; mode 'manual' obeys it.",
    8: "mindspore: boost.adasum must be False or left out with mode 'disable_all', got True. "
    "MindSpore ignores the switch; mode 'manual' obeys it.",
    9: "mindspore: boost.mode must be 'auto' or 'manual' or 'enable_all' or 'disable_all', got "
    "'xx'. Nothing there is close to it.",
    10: "mindspore: boost.less_bn must be True or left out with mode 'auto' at level 'O1', got "
    "False. MindSpore ignores the switch; mode 'manual' obeys it.",
    15: "mindspore: common.gradient_split_groups must be a list of integers, got 5. [50, 100] "
    "cuts a list of params in three.",
    16: "mindspore: common.gradient_split_groups must be a list of integers, got 'a'. [50, 100] "
    "cuts a list of params in three.",
    17: "mindspore: keys of boost must be among 'mode', 'less_bn', 'grad_freeze', 'adasum', "
    "'grad_accumulation', 'dim_reduce', 'loss_scale_group', got 'unknown'. Nothing there is "
    "close to it.",
}
SILENT_THERE = {3, 4, 5, 8, 10, 17}  # MindSpore goes on; it raises in the other rows too


def switches(config):
    return {
        "less_bn": config.less_bn is not None,
        "grad_freeze": config.freeze is not None,
        "adasum": config.reduce.kind == "adasum-delta",
        "grad_accumulation": config.accumulate is not None,
        "dim_reduce": config.dim_reduce is not None,
        "loss_scale_group": config.loss_scale is not None and config.loss_scale.kind == "group",
    }


def test_every_row_resolves_as_in_mindspore_or_is_refused(golden):
    *rows, _ = json.loads((golden / "autoboost_configs.json").read_text())
    assert {i for i in REFUSED if "error" not in rows[i]} == SILENT_THERE
    assert {i for i, row in enumerate(rows) if "error" in row} == set(REFUSED) - SILENT_THERE
    for i, row in enumerate(rows):
        data = row["dict"] or {}
        if i in REFUSED:
            with pytest.raises((ValueError, TypeError)) as error:
                from_mindspore(data, row["level"])
            assert str(error.value) == REFUSED[i]
            continue
        config, notes = from_mindspore(data, row["level"])
        left_out = "grad_freeze is left out" in " ".join(notes)
        assert switches(config) == row["config"] | ({"grad_freeze": False} if left_out else {}), i
        assert switches(from_mindspore(data, row["level"], strict=False).config)["grad_freeze"] == (
            row["config"]["grad_freeze"] and not row["config"]["dim_reduce"]
        )
        assert_settings(config, row["attrs"])
        assert auto(data, level=row["level"]).config == config


def assert_settings(config, attrs):
    """The values of MindSpore's object, where the technique is on."""
    if config.less_bn is not None:
        assert config.less_bn.normalized_head == attrs["_fn_flag"]
        assert (config.centralize is not None) == attrs["_gc_flag"]
    if config.freeze is not None:
        found = config.freeze
        assert found.groups == attrs["_param_groups"]
        assert found.total_steps == attrs["_total_steps"]
        assert (found.kind == "interval") == (attrs["_freeze_type"] == 1)
        assert found.freeze_p == attrs["_freeze_p"]
    if config.accumulate is not None:
        assert config.accumulate.every == attrs["grad_accumulation_step"]
    if config.dim_reduce is not None:
        rule = config.dim_reduce.arguments(Place(None, None))["rule"]
        assert (rule.tries, rule.failure) == (2, "rollback")
        assert (rule.shrink, rule.slope) == (attrs["rho"], attrs["sigma"])
        assert config.dim_reduce.residual_rate == attrs["alpha"]
        assert config.dim_reduce.residual_momentum == attrs["gamma"]
        assert config.dim_reduce.n_components == attrs["n_components"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_level_freezes_at_random_only_if_it_is_asked_to(level):
    """What lost more than fewer steps is no part of a level; by name, or as there, it is on."""
    boost = auto(level)
    assert boost.config.freeze is None
    assert any("grad_freeze is left out" in note for note in boost.notes)
    by_name = (
        {"grad_freeze": {"param_groups": 3}},
        {"boost": {"mode": "manual", "grad_freeze": True}},
        {"freeze": {"groups": 3}},
    )
    for data in by_name:
        assert auto(data, level=level).config.freeze.kind == "interval"
    assert auto({}, level=level, strict=False).config.freeze is not None


def test_a_depth_alone_is_a_sequence_of_one():
    config = BoostConfig.from_dict(json.loads('{"freeze": {"kind": 1, "groups": 2}}'))
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = auto(config).optimizer(optax.sgd(0.1), params)
    assert tx.freezing.drawn(params) == (1,)
    assert tx.active(params, 1) == {"a": False, "b": True}
    with pytest.raises(ValueError, match="kind must be"):
        auto({"freeze": {"kind": True}})


def test_manual_mode_leaves_the_levels_alone(golden):
    """MindSpore edits its table in place, and the next object of that level inherits it."""
    *_, after = json.loads((golden / "autoboost_configs.json").read_text())
    assert after["value"] is True  # adasum, of O1
    before = auto("O1").config
    assert auto({"boost": {"mode": "manual", "less_bn": False}}, level="O1").config.less_bn is None
    assert auto("O1").config == before == auto({}, level="O1").config


def test_the_documented_template_is_read_as_it_is_and_says_what_has_no_effect():
    off = dict.fromkeys(SWITCHES, False)
    data = {
        "boost": {"mode": "manual", **off, "dim_reduce": True},
        "common": {"gradient_split_groups": [50, 100], "device_number": 8},
        "less_bn": {"fn_flag": True, "gc_flag": True},
        "grad_freeze": {"param_groups": 10, "freeze_type": 1, "freeze_p": 0.7, "total_steps": 9},
        "grad_accumulation": {"grad_accumulation_step": 1},
        "dim_reduce": {"n_components": 4, "weight_load_dir": "checkpoints", "timeout": 1800},
    }
    boost = auto(data)
    assert boost.notes == (
        "common.gradient_split_groups = [50, 100] has no effect: XLA decides what travels "
        "together; reduce.bucket_bytes may.",
        "dim_reduce: the optimizer has no effect: an SGD of alpha and gamma trains what is outside "
        "the span, as in MindSpore.",
    )
    finish = boost.config.dim_reduce
    assert (finish.n_components, finish.weight_load_dir) == (4, "checkpoints")


KEYS = (
    "'policy', 'loss_scale', 'accumulate', 'microbatches', 'freeze', 'reduce', 'centralize', "
    "'clip', 'less_bn', 'dim_reduce', 'average_params', 'store', 'carry', 'check_updates', "
    "'skip_spikes', 'count_lost_updates', "
    "'clip_by_global_norm', 'centralize_gradients', 'all_reduce', 'adasum', 'adasum_delta', "
    "'top_k_reduce', 'threshold_reduce', 'random_k_reduce', 'int8_reduce', 'int16_reduce', "
    "'sign_reduce', 'power_sgd_reduce', 'partial_average', 'local_updates', 'dynamic_loss_scale', "
    "'static_loss_scale', 'group_loss_scale', 'scheduled_freeze'"
)
MISTAKES = {
    "key": (
        {"acumulate": 4},
        f"BoostConfig: keys must be among {KEYS}, got 'acumulate'. Did you mean 'accumulate'?",
    ),
    "key of a part": (
        {"accumulate": {"evry": 4}},
        "BoostConfig: keys of accumulate must be among 'every', 'normalize', 'accumulator_dtype', "
        "'rounding', 'noise', 'drop', got 'evry'. Did you mean 'every'?",
    ),
    "kind": (
        {"loss_scale": "dynamc"},
        "LossScale: kind must be 'dynamic' or 'static' or 'group', got 'dynamc'. Did you mean "
        "'dynamic'?",
    ),
    "field of another kind": (
        {"reduce": {"kind": "int8", "density": 0.1}},
        "Reduce: density must be left out with kind 'int8', got 0.1. It is for 'top-k' and "
        "'random-k'.",
    ),
    "field that is needed": (
        {"reduce": "partial"},
        "Reduce: partitions must be given, or bucket_bytes, got None. 4 averages a quarter of the "
        "params per step; {'head': 0, 'body': 1} names them.",
    ),
    "value, by its factory": (
        {"reduce": {"kind": "top-k", "density": 3}},
        "Reduce: density must be in (0, 1], got 3. 0.01 sends one element in a hundred.",
    ),
    "value under another name": (
        {"reduce": {"wire": "int3"}},
        "Reduce: wire must be a floating dtype, got 'int3'. Try 'float32', 'bfloat16' or "
        "'float16'.",
    ),
    "factory": (
        {"top_k_reducee": True},
        f"BoostConfig: keys must be among {KEYS}, got 'top_k_reducee'. Did you mean "
        "'top_k_reduce'?",
    ),
    "argument of a factory": (
        {"top_k_reduce": {"densty": 0.1}},
        "BoostConfig: keys of top_k_reduce must be among 'density', 'count', 'block', "
        "'bucket_bytes', 'momentum', 'value_dtype', 'error_feedback', 'dense', got 'densty'. Did "
        "you mean 'density'?",
    ),
    "value of a factory": (
        {"top_k_reduce": {"value_dtype": "int3"}},
        "top_k_reduce: value_dtype must be a floating dtype, got 'int3'. Try 'float32', "
        "'bfloat16' or 'float16'.",
    ),
    "argument that a factory needs": (
        {"partial_average": True},
        "partial_average: partitions must be given, or bucket_bytes, got None. 4 averages a "
        "quarter of the params per step; {'head': 0, 'body': 1} names them.",
    ),
    "two of one part": (
        {"reduce": "mean", "int8_reduce": True},
        "BoostConfig: int8_reduce must be left out beside another reduce, got True. A chain has "
        "one of them.",
    ),
    "flag": (
        {"less_bn": {"normalized_head": 3}},
        "LessBN: normalized_head must be True or False, got 3. JSON: true or false.",
    ),
    "nothing where something is needed": (
        {"accumulate": {"every": 2, "normalize": None}},
        "Accumulate: normalize must be 'mean' or 'sum' or 'weight', got None. Losses that are "
        "means over a varying number of tokens want 'weight'.",
    ),
    "end": (
        {"freeze": "ramp"},
        "Freeze: total_steps must be the optimizer steps of the run for 'ramp', got None. It "
        "freezes for good: without them nobody knows when.",
    ),
    "float16 alone": (
        {"policy": "O2"},
        "BoostConfig: loss_scale must be given where policy computes in float16, got None. Small "
        "gradients vanish without: 'dynamic' scales, and bfloat16 needs none.",
    ),
    "freeze and partial": (
        {"freeze": True, "reduce": {"kind": "partial", "partitions": 2}},
        "BoostConfig: reduce must be no 'partial' or 'local' with freeze, got 'partial'. What is "
        "frozen between two meetings would stay different on every replica.",
    ),
    "freeze and local": (
        {"freeze": True, "reduce": {"kind": "local", "every": 2}},
        "BoostConfig: reduce must be no 'partial' or 'local' with freeze, got 'local'. What is "
        "frozen between two meetings would stay different on every replica.",
    ),
    "freeze and a recorder": (
        {"freeze": True, "dim_reduce": True},
        "BoostConfig: dim_reduce.every must be None with freeze, got 10. A frozen layer is not "
        "recorded. boostax.subspace.HostTrajectory records between steps, and finish takes its "
        "basis: dim_reduce.every = None.",
    ),
    "local and a recorder": (
        {"reduce": {"kind": "local", "every": 4}, "dim_reduce": True},
        "BoostConfig: dim_reduce.every must be None with reduce 'local', got 10. Each replica has "
        "params of its own. boostax.subspace.HostTrajectory records between steps, and finish "
        "takes its basis: dim_reduce.every = None.",
    ),
    "level": (
        "01",
        "auto: spec must be a level, a dictionary, the path of a .json file, or a BoostConfig, "
        "got '01'. Did you mean 'O1'?",
    ),
    "an average of what freezes": (
        {"average_params": True, "freeze": {"groups": 3}},
        "BoostConfig: average_params must be None with freeze, got AverageParams(kind='ema', "
        "every=1, start=0, dtype='float32'). What is frozen would be missing from the average.",
    ),
    "an average of params of each replica's own": (
        {"average_params": "lawa", "reduce": {"kind": "local", "every": 2}},
        "BoostConfig: average_params must be None with reduce 'local', got "
        "AverageParams(kind='lawa', every=1, start=0, dtype='float32'). Each replica has params of "
        "its own.",
    ),
    "type": (
        3,
        "auto: spec must be a level, a dictionary, the path of a .json file, or a BoostConfig, "
        "got 3. 'O1' is what mindspore.boost switches on at O1.",
    ),
    "mode of SINGA's": (
        {"singa": {"dist_option": "sparseTopk"}},
        "singa: dist_option must be 'plain' or 'half' or 'partialUpdate' or 'sparseTopK' or "
        "'sparseThreshold', got 'sparseTopk'. Did you mean 'sparseTopK'?",
    ),
    "option of SINGA's": (
        {"singa": {"dist_option": "sparseTopK", "spar": 0.1}},
        "singa: the options of 'sparseTopK' must be 'threshold' or 'spars' or 'corr' or 'topK', "
        "got 'spar'. Did you mean 'spars'?",
    ),
    "option of another mode of SINGA's": (
        {"singa": {"dist_option": "plain", "topK": True}},
        "singa: topK must be left out with 'plain', got True. It is for 'sparseTopK' and "
        "'sparseThreshold'.",
    ),
    "buffer of SINGA's": (
        {"singa": {"dist_option": "half", "buffSize": 4194304}},
        "singa: buffSize must be left out, got 4194304. XLA makes the buffers; 'threshold' says "
        "how many elements are fused.",
    ),
    "counter of SINGA's": (
        {"singa": {"dist_option": "partialUpdate", "partial": 0}},
        "singa: partial must be left out, got 0. It is SINGA's counter, which the state has here; "
        "'threshold' or 'partitions' says what a partition is.",
    ),
    "topK of SINGA's that contradicts": (
        {"singa": {"dist_option": "sparseThreshold", "topK": True}},
        "singa: topK must be False or left out with 'sparseThreshold', got True. The two say the "
        "same; 'dist_option' is enough.",
    ),
    "clip_Value of SINGA's alone": (
        {"singa": {"dist_option": "half", "clip_Value": 1.0}},
        "singa: clip_Value must be left out without clipping, got 1.0. 'clipping': True clips; "
        "SINGA ignores it.",
    ),
    "spars of SINGA's": (
        {"singa": {"dist_option": "sparseTopK", "spars": 2.0}},
        "singa: spars must be in (0, 1], got 2.0. 0.01 sends one element in a hundred.",
    ),
    "threshold of SINGA's": (
        {"singa": {"dist_option": "plain", "threshold": -1}},
        "singa: threshold must be an integer that is not negative, got -1. So many elements are "
        "fused; SINGA's default is 2097152.",
    ),
    "two partitions of SINGA's": (
        {"singa": {"dist_option": "partialUpdate", "partitions": 2, "threshold": 10}},
        "singa: partitions must be left out beside bucket_bytes, got 2. One of the two says what a "
        "partition is.",
    ),
    "section of SINGA's": (
        {"singa": "half"},
        "auto: singa must be a dictionary, got 'half'. Such as {'dist_option': 'half'}.",
    ),
    "two reductions": (
        {"singa": {"dist_option": "plain"}, "reduce": "mean"},
        "auto: reduce must be left out beside singa, got 'mean'. singa names one already.",
    ),
    "key of MindSpore's": (
        {"boost": {"mode": "manual"}, "grad_freeze": {"freez_p": 0.5}},
        "mindspore: keys of grad_freeze must be among 'param_groups', 'freeze_type', 'freeze_p', "
        "'total_steps', got 'freez_p'. Did you mean 'freeze_p'?",
    ),
    "value of MindSpore's": (
        {"grad_freeze": {"freeze_p": 2}},
        "mindspore: grad_freeze.freeze_p must be in [0, 1], got 2. It is a number in MindSpore's "
        "dictionary.",
    ),
}


@pytest.mark.parametrize(("spec", "text"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused_by_name(spec, text):
    with pytest.raises((ValueError, TypeError)) as error:
        auto(spec)
    assert str(error.value) == text


def test_what_params_alone_can_tell_is_refused_when_the_chain_is_built():
    boost, inner = auto({"freeze": {"groups": 4}}), optax.sgd(0.1)
    with pytest.raises(ValueError, match=r"^Freeze: params must be given where groups is a number"):
        boost.optimizer(inner)
    with pytest.raises(
        ValueError, match=r"^Freeze: groups must be at most the number of layers, 3"
    ):
        boost.optimizer(inner, mlp())
    many = auto({"loss_scale": {"kind": "group", "groups": 4}})
    with pytest.raises(ValueError, match=r"^LossScale: groups must be at most the number of laye"):
        many.loss(loss_fn, mlp())
    within = auto({"reduce": {"kind": "adasum", "within": "cores"}})
    with pytest.raises(ValueError, match=r"^Reduce: within must be one of several axes"):
        within.optimizer(inner, axis_name="data")
    within.optimizer(inner, axis_name=("nodes", "cores")).init(mlp())
    with pytest.raises(TypeError, match=r"^Boost.optimizer: inner must be"):
        boost.optimizer(3)
    with pytest.raises(ValueError, match=r"^Boost.finish: config.dim_reduce must be given"):
        boost.finish((), mlp())


FULL = BoostConfig(
    policy=Precision("O1", "bfloat16"),
    loss_scale=LossScale("group", groups=("layer_0", ("layer_1", "layer_2")), rule="measure"),
    accumulate=Accumulate(2, "sum"),
    microbatches=2,
    freeze=Freeze("progressive", total_steps=8, groups=3, order=LAYERS, level=1),
    reduce=Reduce("top-k", density=0.5, error_feedback=False, dense="vectors"),
    clip=Clip(0.5),
    dim_reduce=DimReduce(every=None, residual_rate=0.1),
)


@pytest.mark.parametrize(
    "config", [BoostConfig(), FULL, auto("O1").config, auto("O2").config], ids=str
)
def test_a_configuration_goes_to_json_and_back(config, tmp_path):
    assert BoostConfig.from_dict(config.to_dict()) == config
    file = tmp_path / "boost.json"
    file.write_text(json.dumps(config.to_dict()))
    assert auto(str(file)).config == auto(file).config == config
    assert hash(auto(file).config) == hash(config)


# A factory under its own name with its own arguments, and what it is as a part.
NAMED = {
    "all_reduce": ({"dtype": "bfloat16", "clip": 1.0}, Reduce("mean", wire="bfloat16", clip=1.0)),
    "adasum": ({"wire_dtype": "float16"}, Reduce("adasum", wire="float16")),
    "adasum_delta": (True, Reduce("adasum-delta")),
    "top_k_reduce": ({"count": 3, "dense": "vectors"}, Reduce("top-k", count=3, dense="vectors")),
    "threshold_reduce": (0.5, Reduce("threshold", threshold=0.5)),
    "random_k_reduce": ({"seed": 3}, Reduce("random-k", seed=3)),
    "int8_reduce": ({"rounding": "stochastic"}, Reduce("int8", rounding="stochastic")),
    "int16_reduce": (False, Reduce()),
    "sign_reduce": ("majority", Reduce("sign", form="majority")),
    "power_sgd_reduce": ({"rank": 1}, Reduce("power-sgd", rank=1)),
    "partial_average": (2, Reduce("partial", partitions=2)),
    "local_updates": ({"every": 2}, Reduce("local", every=2)),
    "dynamic_loss_scale": ({"hysteresis": 2}, LossScale(hysteresis=2)),
    "static_loss_scale": (8.0, LossScale("static", scale=8.0)),
    "group_loss_scale": ({"groups": 3}, LossScale("group", groups=3)),
    "clip_by_global_norm": (0.5, Clip(0.5)),
    "centralize_gradients": ({"multiple_of": 2}, Centralize(2)),
    "scheduled_freeze": (
        {"kind": "ramp", "total_steps": 9, "groups": 3},
        Freeze("ramp", total_steps=9, groups=3),
    ),
    "accumulate": ({"every": 2, "normalize": "sum"}, Accumulate(2, "sum")),
    "average_params": (
        {"kind": "lawa", "size": 3, "every": 10},
        AverageParams("lawa", size=3, every=10),
    ),
    "store": (
        {"params": "remainder", "moments": {"*mu": "int8", "*nu": "log8"}},
        Store({"*mu": "int8", "*nu": "log8"}, params="remainder"),
    ),
    "check_updates": (True, CheckUpdates()),
    "count_lost_updates": (True, CountLostUpdates()),
    "skip_spikes": (
        {"rule": "sigma", "k": 4.0},
        SkipSpikes("sigma", k=4.0),
    ),
    "carry": ({"rules": {"layer_0/bias": "last"}}, Carry({"layer_0/bias": "last"})),
    "less_bn": ({"normalized_head": False}, LessBN(False)),
    "dim_reduce": (
        {"memory": "gauss-newton", "start": 2},
        DimReduce(memory="gauss-newton", start=2),
    ),
    "policy": ("O1", Precision("O1")),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_every_factory_is_a_key_with_its_own_arguments(name):
    value, part = NAMED[name]
    role, _ = FACTORIES[name]
    scaled = {} if role == "loss_scale" else {"loss_scale": "dynamic"}
    config = BoostConfig.from_dict({name: value} | scaled)
    assert getattr(config, role) == part
    again = BoostConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config)


def test_a_file_of_mindspores_is_read_and_a_broken_one_is_named(tmp_path):
    file = tmp_path / "boost.json"
    file.write_text(json.dumps({"boost": {"mode": "manual", "adasum": True}}))
    assert auto(file, level="O1").config == auto("O2").config
    file.write_text("{'boost'")
    with pytest.raises(ValueError, match=r"^auto: spec must be a file of JSON, got .*boost.json"):
        auto(file)


def test_a_dictionary_changes_its_level_field_by_field():
    config = auto({"freeze": {"groups": 3}, "less_bn": False}, level="O1").config
    assert config.freeze == Freeze(groups=3)
    assert config.less_bn is None
    assert config.centralize is not None
    # A part of another kind starts anew.
    base = BoostConfig(loss_scale=LossScale("static", scale=8.0))
    assert BoostConfig.from_dict({"loss_scale": "dynamic"}, base).loss_scale == LossScale()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dist_option": "plain"}, Reduce("mean")),
        ({"dist_option": "half"}, Reduce("mean", wire="float16")),
        ({"dist_option": "half", "clipping": True}, Reduce("mean", wire="float16", clip=100.0)),
        ({"dist_option": "plain", "threshold": 10}, Reduce("mean", bucket_bytes=40)),
        ({"dist_option": "half", "threshold": 0}, Reduce("mean", wire="float16", bucket_bytes=1)),
        ({"dist_option": "partialUpdate", "partitions": 3}, Reduce("partial", partitions=3)),
        ({"dist_option": "partialUpdate"}, Reduce("partial", bucket_bytes=2**23)),
        ({"dist_option": "partialUpdate", "threshold": 10}, Reduce("partial", bucket_bytes=40)),
        ({"dist_option": "sparseTopK"}, Reduce("top-k", density=0.05, bucket_bytes=2**23)),
        (
            {"dist_option": "sparseTopK", "spars": 0.1, "corr": False, "topK": True},
            Reduce("top-k", density=0.1, error_feedback=False, bucket_bytes=2**23),
        ),
        (
            {"dist_option": "sparseThreshold", "spars": 0.1, "capacity": [0.2], "threshold": 8},
            Reduce("threshold", threshold=0.1, capacity=(0.2,), bucket_bytes=32),
        ),
        (
            {"dist_option": "sparseThreshold", "corr": False, "topK": False},
            Reduce("threshold", threshold=0.05, error_feedback=False, bucket_bytes=2**23),
        ),
    ],
)
def test_singas_modes_are_reductions(options, expected):
    assert auto({"singa": options, "clip": 1.0}).config == BoostConfig(
        reduce=expected, clip=Clip(1.0)
    )


def names(state):
    """The states from the outside in; a tuple is a chain."""
    found = []
    while True:
        state = state.local if isinstance(state, boostax.PerReplica) else state
        if type(state) is tuple:
            return [*found, [type(x).__name__ for x in state]]
        found.append(type(state).__name__)
        state = state.inner_state


TAIL = ["EmptyState", "EmptyState", "EmptyState", "TraceState"]
EVERYTHING = {
    "loss_scale": "dynamic",
    "accumulate": 2,
    "centralize": True,
    "clip": 1.0,
    "reduce": {"kind": "mean", "wire": "bfloat16"},
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["LossScaleState", "AccumulateState", TAIL]),
        (
            {"accumulate": {"every": 2, "drop": "window"}},
            ["AccumulateState", "LossScaleState", TAIL],
        ),
        (
            {"freeze": {"groups": 3}},
            ["ScheduledFreezeState", "LossScaleState", "AccumulateState", TAIL],
        ),
        (
            {"reduce": "adasum", "dim_reduce": True},
            [
                "LossScaleState",
                "AccumulateState",
                ["TrajectoryState", "AdasumState", *TAIL[1:]],
            ],
        ),
        (
            {"reduce": "adasum-delta", "loss_scale": {"kind": "group", "groups": 3}},
            ["GroupLossScaleState", "AccumulateState", "AdasumDeltaState", TAIL[1:]],
        ),
        (
            {"reduce": {"kind": "local", "every": 2}},
            ["LossScaleState", "AccumulateState", "LocalUpdatesState", TAIL[1:]],
        ),
        (
            {
                "average_params": "window",
                "dim_reduce": True,
            },
            [
                "LossScaleState",
                "AccumulateState",
                "AverageParamsState",
                ["TrajectoryState", *TAIL],
            ],
        ),
        (
            {
                "carry": {"rules": {"layer_0/bias": "last"}},
                "check_updates": True,
                "count_lost_updates": True,
                "freeze": {"groups": 3},
            },
            [
                "ScheduledFreezeState",
                "CarryState",
                "LossScaleState",
                "AccumulateState",
                [*TAIL[:3], "CheckUpdatesState"],
            ],
        ),
    ],
)
def test_the_chain_has_the_one_order(changes, expected):
    boost = auto(EVERYTHING | changes)
    inner = optax.trace(0.9)
    state = boost.optimizer(inner, mlp(), axis_name="data").init(mlp())
    assert names(state) == expected


TECHNIQUES = {
    "policy": {"policy": {"spec": "O2", "dtype": "bfloat16"}},
    "dynamic": {"loss_scale": "dynamic"},
    "static": {"loss_scale": {"kind": "static", "scale": 128.0}},
    "group": {"loss_scale": {"kind": "group", "groups": list(LAYERS[:2])}},
    "accumulate": {"accumulate": 2},
    "window": {"accumulate": {"every": 2, "drop": "window"}},
    "microbatches": {"microbatches": 2},
    "freeze": {"freeze": {"groups": 3, "total_steps": 8, "frozen_fraction": 0.5}},
    "centralize": {"centralize": True},
    "clip": {"clip": 0.1},
    "finish": {"dim_reduce": {"n_components": 2, "every": 1}},
    "average": {"average_params": {"kind": "lawa", "size": 2}},
}
QUICK = {
    ("freeze", "accumulate"),
    ("group", "accumulate"),
    ("dynamic", "top-k"),
    ("window", "partial"),
}


def quick(pairs):
    return [
        pytest.param(*pair, marks=[] if {pair, pair[::-1]} & QUICK else pytest.mark.long)
        for pair in pairs
    ]


def combined(a, b):
    config = a | b
    records_no_more = "freeze" in config or config.get("reduce", {}).get("kind") in (
        "partial",
        "local",
    )
    if records_no_more and "dim_reduce" in config:
        config["dim_reduce"] = {"n_components": 2, "every": None}
    return config


@pytest.mark.parametrize(
    ("one", "other"),
    quick(
        (a, b)
        for a, b in itertools.combinations(TECHNIQUES, 2)
        if TECHNIQUES[a].keys() != TECHNIQUES[b].keys() and {a, b} != {"freeze", "average"}
    ),
)
def test_every_pair_trains(one, other):
    assert_trained(*train(combined(TECHNIQUES[one], TECHNIQUES[other])))


# Refused by name: see the mistakes above.
NOT_TOGETHER = set(itertools.product(("freeze", "average"), ("partial", "local")))


@pytest.mark.parametrize(
    ("one", "other"),
    quick(pair for pair in itertools.product(TECHNIQUES, REDUCTIONS) if pair not in NOT_TOGETHER),
)
def test_every_pair_with_a_reduction_trains_on_eight_devices(mesh, one, other):
    reduction = {"reduce": {"kind": other, **REDUCTIONS[other]}}
    assert_trained(*train(combined(TECHNIQUES[one], reduction), mesh=mesh))


def test_what_mindspore_cannot_combine_trains_in_one_step(mesh):
    """Freezing with accumulation, a loss scale and AdaSum: there the first excludes the others."""
    config = auto({"boost": {"mode": "enable_all"}, "grad_freeze": {"param_groups": 3}}).config
    # DimReduce has no files here, and would take the place of them all.
    off = {"less_bn": None, "dim_reduce": None}
    config = dataclasses.replace(config, accumulate=Accumulate(2), clip=Clip(1.0), **off)
    step, state, metrics = train(config, calls=6, mesh=mesh)
    assert_trained(step, state, metrics)
    assert int(metrics["optimizer_steps"]) == 3
    assert "frozen_groups" in metrics


def by_hand(axis):
    """What the configuration below is, written out."""
    reduction = [] if axis is None else [boostax.adasum(axis)]
    tx = optax.chain(
        *reduction,
        boostax.centralize_gradients(),
        optax.clip_by_global_norm(0.5),
        optax.adamw(1e-2),
    )
    tx = boostax.accumulate(tx, 2, axis_name=axis)
    tx = boostax.dynamic_loss_scale(tx, init_scale=2.0**10, axis_name=axis)
    schedule = boostax.freeze_schedule("interval", total_steps=8, frozen_fraction=0.5)
    return boostax.scheduled_freeze(
        tx, boostax.freeze.prefix_groups(mlp(), 2), schedule, repeat=True
    )


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 8])
def test_a_run_from_a_configuration_is_that_of_a_chain_by_hand_bit_for_bit(mesh, devices):
    mesh = mesh if devices == 8 else None
    axis = "data" if devices == 8 else None
    config = {
        "policy": {"spec": "O2", "dtype": "bfloat16"},
        "loss_scale": {"init_scale": 2.0**10},
        "accumulate": 2,
        "freeze": {"groups": 2, "total_steps": 8, "frozen_fraction": 0.5},
        "reduce": "mean" if axis is None else "adasum",
        "centralize": True,
        "clip": 0.5,
    }
    _, state, metrics = train(config, calls=4, mesh=mesh, inner=optax.adamw(1e-2))
    policy = boostax.policy("O2", dtype="bfloat16")
    step = boostax.make_train_step(loss_fn, by_hand(axis), mesh=mesh, axis_name=axis, policy=policy)
    expected = step.init(mlp())
    for batch in batches(4):
        expected, reported = step(expected, batch)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    chex.assert_trees_all_equal((state, metrics), (expected, reported))


@pytest.mark.long
def test_a_finish_lowers_the_loss_with_an_optimizer_outside_the_span(mesh):
    boost = auto({"loss_scale": "dynamic", "dim_reduce": {"n_components": 3, "every": 2}})
    axis = {"mesh": mesh, "axis_name": "data"}
    main = boost.make_train_step(loss_fn, optax.sgd(0.1), **axis)
    state = main.init(mlp())
    for batch in batches(9):
        state, _ = main(state, batch)
    params = main.common_params(state)
    tx = boost.finish(state.opt_state, params, residual=optax.adam(1e-3), axis_name="data")
    assert isinstance(tx.init(params).inner_state, boostax.states.DimReduceState)
    step = boostax.make_train_step(boost.loss(loss_fn), tx, policy=boost.policy, **axis)
    begun, losses = step.init(params), []
    batch = next(batches(1))
    for _ in range(4):
        begun, metrics = step(begun, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0]
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
    net = Net()
    assert auto({}).model(net, sample) == (net, None)


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
    boost, x = auto({"less_bn": True}), jnp.ones((2, 4, 4, 2))
    model, report = boost.model(Net(), x)
    before, after = (m.init(jax.random.key(0), x) for m in (Net(), model))
    inner = optax.sgd(0.1)

    def loss(params, batch):
        return jnp.mean(model.apply({**after, "params": params}, batch) ** 2)

    step = boost.make_train_step(loss, inner, after["params"], less_bn=report)
    _, metrics = step(step.init(after["params"]), x)
    assert np.isfinite(metrics["loss"])
    assert boost.make_train_step(loss, inner, less_bn=report) is not None
    with pytest.raises(ValueError, match=r"less_bn must be the report of the changed model, got N"):
        boost.make_train_step(loss, inner, after["params"])
    with pytest.raises(ValueError, match=r"params must be of the changed .* as it was at 'norm_1'"):
        boost.make_train_step(loss, inner, before["params"], less_bn=report)
    with pytest.raises(ValueError, match="less_bn must be left out where it is off"):
        auto({}).make_train_step(loss, inner, less_bn=report)
    kept = dataclasses.replace(report, norms=())
    with pytest.raises(ValueError, match=r"params of the model as it was at 'head'"):
        boost.make_train_step(loss, inner, before["params"], less_bn=kept)


def test_a_reduction_wants_an_axis():
    """A step that does not reduce is not what the configuration says."""
    inner = optax.sgd(0.1)
    assert auto("O0").optimizer(inner) is not None
    for kind in ("adasum-delta", "int8"):
        boost = auto({"reduce": kind})
        text = rf"^Boost.optimizer: axis_name must be given with the reduction '{kind}', got None"
        with pytest.raises(ValueError, match=text):
            boost.optimizer(inner)
        with pytest.raises(ValueError, match=text):
            boost.make_train_step(loss_fn, inner)


def test_mindspores_own_reading_reduces_nothing_on_one_device():
    inner = optax.sgd(0.1)
    data = {"boost": {"mode": "manual", "adasum": True}}
    tx = auto(data, strict=False).optimizer(inner)
    assert jax.tree.structure(tx.init(mlp())) == jax.tree.structure(inner.init(mlp()))


@pytest.mark.parametrize(
    "content",
    [b"", b'{"loss_scale": "dyn', b"\x80\x04\x95", b"[" * 100_000, b"import os", b'{"a": 1}}'],
)
def test_a_hostile_or_truncated_file_is_refused(tmp_path, content):
    path = tmp_path / "boost.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="auto: spec must be a file of JSON, got"):
        auto(path)


# MindSpore's own reading

PAGE = {
    "boost": {"mode": "auto", **dict.fromkeys(SWITCHES, False)},
    "common": {"gradient_split_groups": [50, 100], "device_number": 8},
    "less_bn": {"fn_flag": True, "gc_flag": True},
    "grad_freeze": {"param_groups": 10, "freeze_type": 1, "freeze_p": 0.7, "total_steps": 65536},
    "grad_accumulation": {"grad_accumulation_step": 1},
    "dim_reduce": {
        "rho": 0.55,
        "gamma": 0.9,
        "alpha": 0.001,
        "sigma": 0.4,
        "n_components": 32,
        "pca_mat_path": None,
        "weight_load_dir": None,
        "timeout": 1800,
    },
}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_dictionary_of_the_page_runs_as_it_is(level):
    """Its switches say no, in a mode that takes what the level says."""
    with pytest.raises(ValueError, match=r"boost\.less_bn must be True or left out"):
        auto(PAGE, level=level)
    boost = auto(PAGE, level=level, strict=False)
    config = boost.config
    on = {"less_bn": True, "grad_freeze": True}
    # AdaSum is on at O2 and never reached beside freezing.
    assert switches(config) == dict.fromkeys(SWITCHES, False) | on
    assert config.centralize == Centralize(multiple_of=16, after_decay=True)
    assert (config.freeze.moments, config.freeze.cut) == ("per_group", "mindspore")
    text = "\n".join(boost.notes)
    assert "boost.less_bn = False has no effect: mode 'auto' takes what level" in text
    assert ("boost.adasum = True has no effect: grad_freeze" in text) == (level == "O2")
    assert "common.gradient_split_groups = [50, 100] has no effect" in text


def test_every_row_is_read_as_mindspore_reads_it(golden):
    *rows, _ = json.loads((golden / "autoboost_configs.json").read_text())
    for i, row in enumerate(rows):
        data = row["dict"] or {}
        if "error" in row:
            with pytest.raises((ValueError, TypeError)):
                auto(data, level=row["level"], strict=False)
            continue
        boost = auto(data, level=row["level"], strict=False)
        expected = dict(row["config"], loss_scale_group=False)
        if expected["grad_freeze"]:
            expected |= {"adasum": False, "grad_accumulation": False}
        if expected["dim_reduce"]:
            expected = dict.fromkeys(expected, False) | {"dim_reduce": True}
        assert switches(boost.config) == expected, i
        assert_settings(boost.config, row["attrs"])
        # Each switch that says otherwise than what is built has a note.
        said = "\n".join(boost.notes)
        for name, value in {**data.get("boost", {}), **row["config"]}.items():
            if name in expected and value != expected[name]:
                assert f"boost.{name} = " in said, (i, name)


def test_what_mindspore_ignores_is_noted():
    data = {
        "boost": {"mode": "manual", "les_bn": True, "grad_accumulation": True},
        "grad_acumulation": {},
        "grad_accumulation": {"grad_accumulation_step": 4, "steps": 3},
        "grad_freeze": {"freeze_p": "never looked at"},
    }
    boost = auto(data, level="O3", strict=False)
    assert boost.config == BoostConfig(accumulate=Accumulate(4))
    assert boost.notes == (
        "level = 'O3' has no effect: MindSpore takes it for 'O0'.",
        "keys: grad_acumulation = {} has no effect: Did you mean 'grad_accumulation'?",
        "keys of boost: les_bn = True has no effect: Did you mean 'less_bn'?",
        "level 'O0': the switches are read as AutoBoost and its train cells read them; MindSpore's "
        "Model boosts at O1 and O2 alone.",
        "keys of grad_accumulation: steps = 3 has no effect: Nothing there is close to it.",
    )
    with pytest.raises(ValueError, match=r"boost\.mode must be 'auto' or 'manual'"):
        auto({"boost": {"mode": "all"}}, strict=False)
    with pytest.raises(TypeError, match="keys of boost must be those of a dictionary"):
        auto({"boost": 3}, strict=False)


def test_what_holds_together_here_alone_is_noted():
    data = {"boost": {"mode": "manual", "grad_accumulation": True, "grad_freeze": True}}
    assert auto(data).notes == (
        "grad_freeze and grad_accumulation hold together here; MindSpore leaves out the latter: "
        "strict=False does.",
    )


@pytest.mark.long
def test_a_shallow_net_is_never_frozen_there(golden):
    """LeNet5 at O1: ten groups of five layers, whose moments are those of each depth all the same.

    Strictly they are refused.
    """
    layers = {f"layer_{i}": {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)} for i in range(5)}
    inner = optax.sgd(0.1, momentum=0.9)
    with pytest.raises(ValueError, match="groups must be at most the number of layers, 5, got 10"):
        auto({"grad_freeze": {}}, level="O1").optimizer(inner, layers)
    tx = auto("O1", strict=False).optimizer(inner, layers)
    grads = jax.tree.map(jnp.ones_like, layers)
    state, params, depths = tx.init(layers), layers, set()
    for _ in range(12):
        depths.add(int(state.coming()))
        before = params
        params, state = boostax.apply_gradients(tx, grads, state, params)
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), before, params)))
    assert len(depths) > 1


def test_centralization_stands_behind_the_decay_that_moments_take_in():
    rng = np.random.default_rng(0)
    w, g = (jnp.asarray(rng.normal(size=(16, 4)), jnp.float32) for _ in range(2))
    inner = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5, momentum=0.9))

    def update(config, inner=inner):
        tx = auto(config).optimizer(inner)
        return np.asarray(tx.update(g, tx.init(w), w)[0])

    whole = np.asarray(g + 0.1 * w)
    np.testing.assert_allclose(
        update({"centralize": {"after_decay": True}}), -0.5 * (whole - whole.mean(0)), atol=1e-6
    )
    alone = np.asarray(g) - np.asarray(g).mean(0)
    before = -0.5 * (alone + 0.1 * np.asarray(w))
    np.testing.assert_allclose(update({"centralize": True}), before, atol=1e-6)
    spares = optax.add_decayed_weights(0.1, mask=lambda w: jax.tree.map(lambda _: True, w))
    np.testing.assert_array_equal(
        update({"centralize": {"after_decay": True}}, optax.chain(spares, optax.sgd(0.5, 0.9))),
        update({"centralize": {"after_decay": True}}),
    )
    # A decoupled decay stays whole, as there.
    decoupled = optax.chain(optax.sgd(0.5), optax.add_decayed_weights(0.1))
    expected = -0.5 * alone + 0.1 * np.asarray(w)
    np.testing.assert_allclose(
        update({"centralize": {"after_decay": True}}, decoupled), expected, atol=1e-6
    )


def test_what_mindspores_dictionary_has_no_word_for_stands_beside_it():
    data = {"boost": {"mode": "manual", "grad_freeze": True}}
    freeze = auto(data | {"freeze": {"order": ["b", "a"]}}, strict=False).config.freeze
    assert (freeze.order, freeze.groups, freeze.cut) == (("b", "a"), 10, "mindspore")
    for more in (True, {"groups": 3}, {"order": ["b", "a"], "kind": "ramp"}):
        with pytest.raises(ValueError, match="freeze must be left out beside MindSpore's dict"):
            auto(data | {"freeze": more}, strict=False)


def test_one_file_is_a_job(tmp_path):
    """MindSpore's dictionary beside its loss-scale manager and a precision, and its level."""
    job = {
        "level": "O1",
        "strict": False,
        "boost": {"mode": "manual", "less_bn": False, "grad_freeze": False},
        "grad_accumulation": {"grad_accumulation_step": 2},
        "loss_scale": {"kind": "dynamic", "init_scale": 65536.0},
        "policy": "O2",
        "reduce": {"kind": "mean", "wire": "float16"},
    }
    job["boost"]["grad_accumulation"] = True
    file = tmp_path / "job.json"
    file.write_text(json.dumps(job))
    boost = auto(file)
    assert boost.config == BoostConfig.from_dict(
        {
            "policy": "O2",
            "loss_scale": {"init_scale": 65536.0},
            "accumulate": 2,
            "reduce": job["reduce"],
        }
    )
    assert boost == auto(job) == auto(job, level="O1", strict=False)
    with pytest.raises(ValueError, match="level must be 'O1' or left out, got 'O2'"):
        auto(file, level="O2")
    with pytest.raises(ValueError, match="accumulate must be left out beside MindSpore's dict"):
        auto(job | {"accumulate": 3})
    singas = auto({"singa": {"dist_option": "half"}, "boost": {"mode": "disable_all"}, "clip": 1.0})
    assert singas.config == BoostConfig(reduce=Reduce("mean", wire="float16"), clip=Clip(1.0))
    with pytest.raises(ValueError, match="strict must be left out here, got True"):
        auto(BoostConfig(), strict=True)
    with pytest.raises(TypeError, match="strict must be True or False, got 1"):
        auto({"strict": 1})
