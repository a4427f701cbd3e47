"""Which cases of a test stand in the quick run; the others are marked ``long``."""

import pytest


def lanes(cases, quick):
    """Return the cases as params of pytest, those that are not among the quick ones marked."""
    return [x if x in quick else pytest.param(x, marks=pytest.mark.long) for x in cases]
