# SPDX-License-Identifier: Apache-2.0
"""Find parts of a chain in a wrong order or with a wrong setting, as ``orders.toml`` lists them."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from boostax._core import checks
from boostax._core.axes import UNNAMED
from boostax.order.parts import CLIPS, MEMORIES, UNKNOWN, Row, number, read, rows, sign, table


class Finding(NamedTuple):
    """A part in a wrong order or with a wrong setting.

    Attributes:
      what: the part and its position.
      why: what is wrong.
      fix: what to write instead.
      certain: whether every run is wrong: replicas diverge or hang, gradients remain multiplied by
        the scale, a skipped step moves params, or nothing is frozen. ``make_train_step`` refuses
        such a chain, and warns of other findings.
    """

    what: str
    why: str
    fix: str
    certain: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.why} {self.fix}"


def findings(parts: Sequence[Row], step: Any = None, bound: bool = False) -> list[Finding]:
    """Return all findings of a chain, and of a step around the chain.

    ``bound`` is whether the caller binds an axis for gates without an ``axis_name``.
    """
    listed = [*orders(parts, bound or (step is not None and bool(step.names)))]
    listed += directions(parts)
    return listed if step is None else [*listed, *of_step(parts, step)]


def orders(parts: Sequence[Row], bound: bool) -> Iterator[Finding]:
    """Yield parts in a wrong sequence, in a wrong nesting, or with a wrong setting."""
    pairs = ((a, b) for a, b in itertools.combinations(parts, 2) if a not in b.holders)
    # Parts on different sides of a partition receive different params.
    met = ((a, b) for a, b in pairs if all(dict(b.sides).get(x, i) == i for x, i in a.sides))
    yield from _broken("after", met)
    yield from _broken("inside", ((a, b) for b in parts for a in b.holders))
    yield from settings(parts, bound)


@functools.cache
def rules(where: str) -> Mapping[tuple[str, str], tuple[str, str, bool]]:
    """Return the texts for a part ``"after"`` or ``"inside"`` another part, by the two roles."""
    texts: dict[tuple[str, str], tuple[str, str, bool]] = {}
    several = table()["several"]
    for group in checks.table("boostax.order", "orders")[where]:
        for *names, why in group["pairs"]:
            text = group.get("why", "") + why, group["fix"], group.get("certain", False)
            roles = [[r for x in y.split(" | ") for r in several.get(x, (x,))] for y in names]
            for pair in itertools.product(*roles):
                texts.setdefault(pair, text)
    return texts


def _broken(where: str, pairs: Iterable[tuple[Row, Row]]) -> Iterator[Finding]:
    """Apply the rules to pairs of parts; two reductions are a pair only if they share an axis."""
    for a, b in pairs:
        if {a.role, b.role} <= {*table()["several"]["reducing"]} and not set(a.axes) & set(b.axes):
            continue
        if (a.role, b.role) in rules(where):
            why, fix, certain = rules(where)[a.role, b.role]
            names = {"first": a.part.name, "then": b.part.name}
            what = f"{b.part.name} {where} {a.part.name}"
            yield Finding(what, why.format(**names), fix.format(**names), certain)


def finding(setting: str, **names: str) -> Finding:
    """Return the finding for a setting, with the text of ``orders.toml``."""
    entry = checks.table("boostax.order", "orders")["settings"][setting]
    texts = {field: entry[field].format(**names) for field in ("what", "why", "fix")}
    return Finding(**texts, certain=entry.get("certain", False))


def settings(parts: Sequence[Row], bound: bool) -> Iterator[Finding]:
    """Yield wrong settings of single parts.

    ``bound`` is whether a step binds an axis for gates without an ``axis_name``.
    """
    for row in parts:
        name = row.part.name
        # Freezing saves no work if it is inside another part.
        if row.role == "freeze" and row.wrappers > sum(x.role == "watch" for x in row.holders):
            yield finding("freeze_inside", name=name)
        if row.role == "zero" and row.sides:
            yield finding("zero_in_partition", name=name)
        # Without the axes of a reduction inside the gate, each replica would decide separately. The
        # axes of a clip are not needed: they are axes of shards, which a gate reads from the types
        # of the gradients.
        inside = (other for other in parts if row in other.holders and other.role not in CLIPS)
        missing = {axis for other in inside for axis in other.axes} - {*row.axes, UNNAMED}
        if missing and (row.axes or not bound) and row.role in ("scaler", "window", "carry"):
            yield finding("without_axis", name=name, axes=", ".join(map(repr, sorted(missing))))
        # The gate receives only some of the params.
        if row.masks and row.role in table()["several"]["holds"]:
            setting = "scaler_in_mask" if row.role == "scaler" else "gate_in_mask"
            yield finding(setting, name=name, mask=row.masks[-1])
        # The compressed reduction discards values that it does not send.
        if row.part.description is not None and row.part.description.lossy:
            yield finding("lossy", name=name)


def directions(parts: Sequence[Row]) -> Iterator[Finding]:
    """Yield parts on the wrong side of the learning rate, and chains with the wrong sign."""
    if any(row.sides for row in parts):
        return
    # Parts inside ``dim_reduce`` are not checked, because its residual optimizer itself flips the
    # sign.
    line = [row for row in parts if all(holder.role != "subspace" for holder in row.holders)]
    signs = [sign(row.part) for row in line]
    for i, row in enumerate(line):
        if math.prod(signs[:i]) != -1 or math.prod(signs[i:]) != 1:
            continue
        if row.role == "decay" and number(row.part.settings.get("weight_decay")) > 0:
            yield finding("decay_after_rate", name=row.part.name)
        if row.role in CLIPS:
            yield finding("clip_after_rate", name=row.part.name)
    if math.prod(signs) == 1 and -1 in signs:
        yield finding("two_signs")
    elif math.prod(signs) == 1 and any(row.role in MEMORIES for row in line):
        yield finding("no_sign")


def scales(tx: optax.GradientTransformation) -> bool:
    """Return whether a chain has a loss scale other than a constant 1.

    With a ``carry`` in the chain the result is False, because carried leaves may depend on scaled
    cotangents.
    """
    parts = rows(read(tx))
    scaler = any(x.role == "scaler" and x.part.settings.get("asks", True) for x in parts)
    return scaler and all(x.role != "carry" for x in parts)


def of_step(parts: Sequence[Row], step: Any) -> Iterator[Finding]:
    """Yield findings for parts that a step needs and that the step's chain lacks."""
    scales = any(row.role == "scaler" for row in parts)
    if step.policy is not None and step.policy.compute_dtype == jnp.float16 and not scales:
        yield finding("half_without_scaler")
    if all(row.role != UNKNOWN for row in parts):
        reducing = (*table()["several"]["reducing"], "subspace")
        reduced = {axis for row in parts if row.role in reducing for axis in row.axes}
        reduced |= set(step.names) if UNNAMED in reduced else set()
        for axis in (axis for axis in step.names if axis not in reduced):
            setting = "reduced_over_others" if reduced else "not_reduced"
            yield finding(setting, axis=repr(axis), others=", ".join(map(repr, sorted(reduced))))
