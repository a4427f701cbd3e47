# SPDX-License-Identifier: Apache-2.0
"""The contract of a boostax transformation as runnable laws, also for your own transformations.

Each law names the promise of ``docs/contract.md`` that it tests, and each promise lists its laws.
``_single.py`` has the laws on one device, and the laws about operations of Optax and Python.
``_mapped.py`` has the laws of replicas and of sharded params. ``_pairs.py`` compares pairs of
programs that are drawn at random from a seed.

Example:
  >>> import boostax.testing, optax
  >>> make = lambda inner, axis_name: optax.chain(optax.ema(0.9), inner)
  >>> case = boostax.testing.Case("ema", make)
  >>> boostax.testing.laws_for(case)["metrics_are_flat_scalars"](case)

In pytest::

  @pytest.mark.parametrize("law", boostax.testing.laws_for(case).values())
  def test_contract(law):
    law(case)
"""

from boostax._core.late import late as _late
from boostax.testing import _single
from boostax.testing._case import Case as Case
from boostax.testing._case import Law as Law
from boostax.testing._case import drawn as drawn
from boostax.testing._losses import check_loss as check_loss
from boostax.testing._mapped import MAPPED_LAWS as MAPPED_LAWS
from boostax.testing._mapped import PLACED_LAWS as PLACED_LAWS
from boostax.testing._pairs import MAPPED_PAIRS
from boostax.testing._pairs import PAIR_LAWS as PAIR_LAWS
from boostax.testing._single import SINGLE_LAWS as SINGLE_LAWS

LAWS: dict[str, Law] = {**SINGLE_LAWS, **MAPPED_LAWS, **PLACED_LAWS, **PAIR_LAWS}
"""Every law by name: a function of a ``Case`` that raises ``AssertionError``.

The laws in ``PAIR_LAWS`` also accept a seed, which draws the programs that the law compares.
"""


def laws_for(case: Case) -> dict[str, Law]:
    """Return the laws that apply to a case, by name.

    A reduction has no laws on a single device. Laws about skipping apply only to transformations
    that skip, and the law of residuals applies only to transformations with residuals.
    """
    single = SINGLE_LAWS.keys() - _single.INIT_LAWS
    anywhere = {name for name, law in PAIR_LAWS.items() if law not in MAPPED_PAIRS}
    return {
        name: law
        for name, law in LAWS.items()
        if (case.skips or "skip" not in name)
        and (case.compresses or name != "what_is_not_sent_waits")
        and not (case.reduces and name in single)
        and (case.distributed or name in single | _single.INIT_LAWS | anywhere)
    }


_late(__name__)
