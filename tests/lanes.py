"""Which cases of a test stand in the quick run; the others are marked ``long``."""

import itertools

import pytest


def lanes(cases, quick):
    """Return the cases as params of pytest, those that are not among the quick ones marked."""
    return [x if x in quick else pytest.param(x, marks=pytest.mark.long) for x in cases]


def spread(*values):
    """Return all combinations, ``long`` where more than one value is not the first of its list."""
    cases = [*itertools.product(*values)]
    late = [x for x in cases if sum(a is not b for a, b in zip(x, cases[0], strict=True)) > 1]
    return [pytest.param(*x, marks=[pytest.mark.long] * (x in late)) for x in cases]
