"""Two names in one step do what the page of pairs says, and a refusal is a sentence of boostax."""

import random
import re

import jax.numpy as jnp
import numpy as np
import pairs
import pytest


def drawn(seed):
    draw = random.Random(seed)
    pair = sorted(draw.sample(pairs.NAMES, 2), key=pairs.NAMES.index)
    return tuple(pair), draw.choice([*pairs.MODELS])


# Each of the first three ended in an error of JAX, or in another reason.
CASES = [(("dim_reduce", "gather="), "plain"), (("policy=",), "by layer")]
CASES += [(("store", "int8_reduce"), "plain"), *map(drawn, range(5))]
LATE = [pytest.param(*drawn(x), marks=pytest.mark.long) for x in range(5, 200)]


@pytest.mark.parametrize(("pair", "model"), CASES + LATE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_pair_is_refused_or_trains_as_the_page_says(pair, model):
    refused, text = pairs.outcome(pair, model)
    assert (refused, text) == pairs.shown(pair, model)
    if not refused:
        step, params = pairs.built(pair, model)
        _, metrics = step(step.init(params), jnp.ones((8, 8)))
        assert np.isfinite(metrics["loss"])


def test_no_refusal_on_the_page_is_an_error_of_jax():
    sentences = re.findall(r"^- \*\*[A-Za-z]\*\*: (.*)$", pairs.PAGE.read_text(), re.M)
    form = r"(\w+): (\S+|params and updates|tx with release=True) must "
    assert sentences and all(re.match(form, x) for x in sentences)
