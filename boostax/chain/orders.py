# SPDX-License-Identifier: Apache-2.0
"""Find what is in wrong order in a chain, by the rules of ``orders.toml``."""

import functools
import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

from boostax.chain.roles import CLIPS, GATES, MEMORIES, RATES, REDUCTIONS
from boostax.chain.rows import Row


class Finding(NamedTuple):
    """Something in wrong order or with a wrong setting.

    Attributes:
      what: which part, and where it stands.
      why: what goes wrong there.
      mend: what to write instead.
      certain: wrong in every run: replicas diverge or hang, gradients stay multiplied by the
        scale, a skipped step moves params, nothing is frozen. ``make_train_step`` refuses it, and
        warns of the others.
    """

    what: str
    why: str
    mend: str
    certain: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.why} {self.mend}"


_OWN, _WINDOWS = ("delta", "own params"), ("window", "peer window")
# What a role in ``orders.toml`` stands for, where it is a name for several.
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
def rules(where: str) -> Mapping[tuple[str, str], Finding]:
    """Return what is wrong with a part ``"after"`` or ``"inside"`` another, by both roles."""
    listed = tomllib.loads(files("boostax.chain").joinpath("orders.toml").read_text("utf8"))
    found: dict[tuple[str, str], Finding] = {}
    for group in listed[where]:
        for first, then, why in group["pairs"]:
            said = group.get("why", "") + why, group["mend"], group.get("certain", False)
            for pair in itertools.product(_roles(first), _roles(then)):
                found.setdefault(pair, Finding(where, *said))
    return found


def _roles(names: str) -> Iterator[str]:
    for name in names.split(" | "):
        yield from _SEVERAL.get(name, (name,))


def orders(found: Sequence[Row]) -> Iterator[Finding]:
    """Yield what is in wrong order in a chain, then in what wraps another."""
    pairs = itertools.combinations(found, 2)
    yield from _broken("after", ((a, b) for a, b in pairs if a.meets(b) and not b.inside(a)))
    yield from _broken("inside", ((a, b) for b in found for a in b.holders))


def _broken(where: str, pairs: Iterable[tuple[Row, Row]]) -> Iterator[Finding]:
    """Apply the rules to pairs; two reductions count if they share an axis."""
    for a, b in pairs:
        apart = {a.role, b.role} <= {*REDUCTIONS, *_OWN} and not set(a.axes) & set(b.axes)
        rule = None if apart else rules(where).get((a.role, b.role))
        if rule is not None:
            names = {"first": a.part.name, "then": b.part.name}
            why, mend = rule.why.format(**names), rule.mend.format(**names)
            yield Finding(f"{b.part.name} {where} {a.part.name}", why, mend, rule.certain)
