# SPDX-License-Identifier: Apache-2.0
"""Find parts of a chain in a wrong order, by the rules of ``orders.toml``."""

import functools
import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from boostax.chain.roles import CLIPS, GATES, MEMORIES, RATES, REDUCTIONS
from boostax.chain.rows import Row


class Finding(NamedTuple):
    """A part in a wrong order or with a wrong setting.

    Attributes:
      what: the part and its position.
      why: what goes wrong there.
      mend: what to write instead.
      certain: whether every run is wrong: replicas diverge or hang, gradients stay multiplied by
        the scale, a skipped step moves params, or nothing is frozen. ``make_train_step`` refuses
        such a chain, and warns of other findings.
    """

    what: str
    why: str
    mend: str
    certain: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.why} {self.mend}"


_OWN, _WINDOWS = ("delta", "own params"), ("window", "peer window")
# The roles behind each name that stands for several roles in ``orders.toml``.
_SEVERAL: Mapping[str, tuple[str, ...]] = {
    "gates": GATES,
    "reductions": REDUCTIONS,
    "clips": CLIPS,
    "rates": RATES,
    "memories": MEMORIES,
    "windows": _WINDOWS,
    "own": _OWN,
    "holds": ("scaler", *_WINDOWS, "hold"),
}


@functools.cache
def words() -> Mapping[str, Any]:
    """Return the contents of ``orders.toml``."""
    return tomllib.loads(files("boostax.chain").joinpath("orders.toml").read_text("utf8"))


@functools.cache
def rules(where: str) -> Mapping[tuple[str, str], Finding]:
    """Return the findings for a part ``"after"`` or ``"inside"`` another, by the roles of both."""
    found: dict[tuple[str, str], Finding] = {}
    for group in words()[where]:
        for first, then, why in group["pairs"]:
            said = group.get("why", "") + why, group["mend"], group.get("certain", False)
            for pair in itertools.product(_roles(first), _roles(then)):
                found.setdefault(pair, Finding(where, *said))
    return found


def _roles(names: str) -> Iterator[str]:
    for name in names.split(" | "):
        yield from _SEVERAL.get(name, (name,))


def orders(found: Sequence[Row]) -> Iterator[Finding]:
    """Yield wrong orders of parts after one another, then of parts inside one another."""
    pairs = itertools.combinations(found, 2)
    yield from _broken("after", ((a, b) for a, b in pairs if a.meets(b) and not b.inside(a)))
    yield from _broken("inside", ((a, b) for b in found for a in b.holders))


def _broken(where: str, pairs: Iterable[tuple[Row, Row]]) -> Iterator[Finding]:
    """Apply the rules to pairs of parts; two reductions are a pair only if they share an axis."""
    for a, b in pairs:
        apart = {a.role, b.role} <= {*REDUCTIONS, *_OWN} and not set(a.axes) & set(b.axes)
        rule = None if apart else rules(where).get((a.role, b.role))
        if rule is not None:
            names = {"first": a.part.name, "then": b.part.name}
            why, mend = rule.why.format(**names), rule.mend.format(**names)
            yield Finding(f"{b.part.name} {where} {a.part.name}", why, mend, rule.certain)
