"""Names and arguments that were removed are answered with what to write instead."""

import jax.numpy as jnp
import optax
import pytest

import boostax
from boostax._core import checks

SGD = optax.sgd(0.1)
# By the key in names.toml: a call with an argument that was removed.
CALLS = {
    "Layers(host=)": lambda: boostax.train.Layers("layers", release=True, host=True),
    "check_replicas(replay=)": lambda: boostax.precision.check_replicas(SGD, replay=4),
    "all_reduce(noise=)": lambda: boostax.all_reduce("data", noise=0.9),
    "explain(axis_sizes=)": lambda: boostax.explain(SGD, jnp.zeros(2), axis_sizes={"data": 8}),
}


@pytest.mark.parametrize("key", CALLS)
def test_a_removed_argument_is_answered_with_the_call_to_write_instead(key):
    with pytest.raises(TypeError) as error:
        CALLS[key]()
    assert str(error.value).endswith(checks.replacement(key))


def test_every_removed_argument_in_the_table_has_a_call():
    gone = {x for x, y in checks.table("boostax", "names").items() if "= was removed. " in y}
    assert gone == set(CALLS)
