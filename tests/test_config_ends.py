"""What a configuration hands on: each value as MindSpore, SINGA or a factory reads it."""

import chex
import jax.numpy as jnp
import optax
import pytest

from boostax.config import mindspore
from boostax.config.auto import auto
from boostax.subspace import record_trajectory


def switched(**switches):
    return {"boost": {"mode": "manual", **switches}}


def finished(**settings):
    return switched(dim_reduce=True) | {"dim_reduce": settings}


SENS = {"step_size": 16.0}
SCALED = {"kind": "static", "scale": 16.0, "skip_nonfinite": False}
FREEZE = {"param_groups": 5, "freeze_type": 0, "freeze_p": 0.25, "total_steps": 99}
OURS = {"cut": "mindspore", "moments": "per_group"}
SEARCH = {"rho": 0.3, "gamma": 0.8, "alpha": 0.05, "sigma": 0.9}
# The names of boostax; and MindSpore's defaults, whose rate outside the span is times the scale.
READ = {"shrink": 0.3, "residual_momentum": 0.8, "residual_rate": 0.05, "slope": 0.9}
DEFAULTS = {"shrink": 0.55, "residual_momentum": 0.9, "residual_rate": 0.016, "slope": 0.4}
FILES = {"pca_mat_path": None, "weight_load_dir": None, "rule": "mindspore"}
CENTRAL = {"centralize": {"multiple_of": 16, "after_decay": True}}
SPARSE = {"dist_option": "sparseThreshold"}
LESS_BN = switched(less_bn=True)
MANAGED = {"loss_scale_manager": mindspore.FixedLossScaleManager(16.0, False)}
LISTED = READ | FILES | {"n_components": 5, "weight_load_dir": "w"}
LOADED = DEFAULTS | FILES | {"n_components": 32, "pca_mat_path": "p.npy"}
CONTINUOUS = {"groups": 5, "kind": "continuous", "freeze_p": 0.25, "total_steps": 99}
INTERVAL = {"groups": 10, "kind": "interval", "freeze_p": 0.7, "total_steps": 65536}
WINDOW = {"loss_scale": SCALED, "sens": SENS, "accumulate": {"every": 1}}
SENT = {"kind": "mean", "wire_dtype": "float16", "bucket_bytes": 20, "clip": 100.0}
OVER = {"kind": "threshold", "threshold": 0.05, "bucket_bytes": 36}

# A dictionary, and the whole configuration that it is.
CONFIGS = (
    (finished(**SEARCH, n_components=5, weight_load_dir="w"), {"dim_reduce": LISTED}),
    (finished(pca_mat_path="p.npy") | MANAGED, {"loss_scale": SCALED, "dim_reduce": LOADED}),
    (switched(grad_freeze=True) | {"grad_freeze": FREEZE}, {"freeze": OURS | CONTINUOUS}),
    (switched(grad_freeze=True) | MANAGED, {"sens": SENS, "freeze": OURS | INTERVAL}),
    (switched(grad_accumulation=True) | MANAGED, WINDOW),
    (LESS_BN | {"less_bn": {"fn_flag": False}}, CENTRAL | {"less_bn": {"normalized_head": False}}),
    (LESS_BN | {"less_bn": {"gc_flag": False}}, {"less_bn": {"normalized_head": True}}),
    ({"singa": {"dist_option": "half", "clipping": True} | {"threshold": 5}}, {"reduce": SENT}),
    (
        {"singa": SPARSE | {"capacity": 0.5, "corr": False, "threshold": 9}},
        {"reduce": OVER | {"capacity": 0.5, "error_feedback": False}},
    ),
)


@pytest.mark.parametrize(("given", "config"), CONFIGS)
def test_a_dictionary_is_its_whole_configuration(given, config):
    assert auto(given).config == config


def test_a_recorder_has_one_snapshot_more_than_directions():
    """The params at which the finish begins are the last one."""
    settings = {"n_components": 3, "every": 2, "start": 1}
    params = jnp.arange(3.0)
    pair = auto({"dim_reduce": settings}).optimizer(optax.sgd(1.0), params)
    expected = optax.chain(record_trajectory(4, every=2, start=1), optax.sgd(1.0))
    state, other = pair.init(params), expected.init(params)
    for _ in range(4):
        _, state = pair.update(params, state, params)
        _, other = expected.update(params, other, params)
    chex.assert_trees_all_equal(state, other, strict=True)


EDGES = (
    *({"dim_reduce": {name: value}} for name in ("shrink", "slope") for value in (0.0, 1.0)),
    {"dim_reduce": {"residual_momentum": 1.0, "residual_rate": 0.1}},
    {"dim_reduce": {"residual_rate": 0.0}},
    {"singa": {"threshold": 2**29}},
)


@pytest.mark.parametrize("given", EDGES)
def test_a_value_on_an_open_bound_is_refused(given):
    with pytest.raises(ValueError, match=r"must be (in \(0, 1\)|positive|below)"):
        auto(given).optimizer(optax.sgd(1.0), jnp.ones(3))
