"""Names and arguments that were removed are answered with what to write instead."""

import jax.numpy as jnp
import optax
import pytest

import boostax
from boostax._core import checks

# By the key in names.toml: a call with an argument that was removed.
CALLS = {
    "Layers(host=)": lambda: boostax.train.Layers("layers", release=True, host=True),
    "check_replicas(replay=)": lambda: boostax.precision.check_replicas(optax.sgd(0.1), replay=4),
    "all_reduce(noise=)": lambda: boostax.all_reduce("data", noise=0.9),
    "explain(axis_sizes=)": lambda: boostax.explain(
        optax.sgd(0.1), jnp.zeros(2), axis_sizes={"data": 8}
    ),
}


@pytest.mark.parametrize("key", CALLS)
def test_a_removed_argument_is_answered_with_the_call_to_write_instead(key):
    with pytest.raises(TypeError) as error:
        CALLS[key]()
    assert str(error.value).endswith(checks.replacement(key))


def test_every_removed_argument_in_the_table_has_a_call():
    table = checks.table("boostax", "names")
    assert {key for key in table if key.endswith("=)")} == set(CALLS)
