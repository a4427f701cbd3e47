"""The museum of silent bugs: the other program is wrong, boostax is right."""

import museum
import numpy as np
import pytest

EXHIBITS = [pytest.param(each, id=each.show.__name__) for each in museum.EXHIBITS]


@pytest.mark.parametrize("exhibit", EXHIBITS)
def test_wrong_elsewhere_and_right_here(exhibit):
    wanted, elsewhere, ours = exhibit.show()
    assert not np.isclose(elsewhere, wanted, rtol=0.05), "nothing is wrong elsewhere"
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)
