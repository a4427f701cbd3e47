"""Every registered transformation keeps the contract, law by law."""

import pytest
from contract_cases import CASES

from boostax.testing import LAWS, laws_for


@pytest.mark.parametrize(
    ("case", "law"),
    [pytest.param(c, LAWS[n], id=f"{c.name}-{n}") for c in CASES for n in laws_for(c)],
)
def test_contract(case, law):
    law(case)
