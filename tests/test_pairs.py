"""Two names in one step do what the page of pairs says, and a refusal is a sentence of boostax."""

import random
import re

import jax.numpy as jnp
import numpy as np
import pairs
import pytest

LATE = [pytest.param(x, marks=pytest.mark.long) for x in range(6, 200)]


@pytest.mark.parametrize("seed", [*range(6), *LATE])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_drawn_pair_is_refused_or_trains_as_the_page_says(seed):
    draw = random.Random(seed)
    pair = tuple(sorted(draw.sample(pairs.NAMES, 2), key=pairs.NAMES.index))
    model = draw.choice([*pairs.MODELS])
    refused, text = pairs.outcome(pair, model)
    assert (refused, re.sub(r"\s+", " ", text)) == pairs.shown(pair, model)
    if not refused:
        step, params = pairs.built(pair, model)
        _, metrics = step(step.init(params), jnp.ones((8, 8)))
        assert np.isfinite(metrics["loss"])


def test_no_refusal_on_the_page_is_an_error_of_jax():
    sentences = re.findall(r"^- \*\*\d+\*\*: (.*)$", pairs.PAGE.read_text(), re.M)
    form = r"(\w+): (\S+|params and updates|tx with release=True) must "
    assert sentences and all(re.match(form, x) for x in sentences)
