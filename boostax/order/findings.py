# SPDX-License-Identifier: Apache-2.0
"""Refuse a wrong order of parts, or warn of it, wherever boostax gets a chain or its state.

Optax is not patched, so each function of boostax checks what it gets. A chain is read part by part.
The state of a chain has the states of the parts, in the order of the parts. A chain is refused if a
finding makes every run wrong. Any other finding is reported by one warning. ``orders.toml`` lists
the wrong orders and wrong settings.
"""

import contextlib
import functools
import itertools
import math
import re
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import checks, protocols, trees
from boostax._core.axes import UNNAMED
from boostax._core.types import PyTree
from boostax.order import parts as chain
from boostax.order.parts import CLIPS, MEMORIES, UNKNOWN, Row, number, rows, sign, table


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


# The findings in chains, by ``update``, and whether the chains scale the loss.
_OF_CHAINS = weakref.WeakKeyDictionary[PyTree, dict[PyTree, tuple[list[Finding], bool]]]()
# For each structure of a state, the findings in states with this structure.
_OF_STATES: dict[PyTree, list[Finding]] = {}
# Findings of which the user was warned, each with the structure of the state or ``None``.
_WARNED: set[tuple[str, PyTree]] = set()
# The findings of traced parts, as keys, inside ``explain``; ``None`` outside of ``explain``.
IDLE: ContextVar[dict[Finding, None] | None] = ContextVar("idle", default=None)


def of_chain(
    who: str, tx: optax.GradientTransformation, names: tuple[str, ...], opt_state: PyTree = None
) -> None:
    """Refuse a chain that is wrong in every run, and warn of its other findings.

    Args:
      who: the function that got the chain.
      tx: the chain.
      names: the replica axes that ``who`` binds.
      opt_state: the state in a loop, for which each warning is given once; or ``None``.
    """
    structure = None if opt_state is None else jax.tree.structure(opt_state)
    report(who, "tx", [*read(tx, names)[0], *decays(tx, opt_state)], structure)


def of_state(who: str, opt_state: PyTree, active: PyTree = None) -> None:
    """Check the order of the states in a loop whose chain is not known.

    ``active`` is True if the loop computes the gradients of all params.
    """
    structure = jax.tree.structure(opt_state)
    if structure not in _OF_STATES:
        _OF_STATES[structure] = [*orders(rows(chain.of_state(opt_state)), bound=True)]
    report(who, "opt_state", _OF_STATES[structure], structure)
    for state in trees.telling(opt_state, protocols.ChoosesVariant) if active is True else ():
        of_part("scheduled_freeze", "not_active", state)


def read(
    tx: optax.GradientTransformation, names: tuple[str, ...], step: Any = None
) -> tuple[list[Finding], bool]:
    """Return the findings in a chain, and whether the chain scales the loss; read a chain once.

    If the chain scales the loss, a nonlinear backward rule is wrong. ``step`` is the train step
    around the chain, if there is one.
    """
    known: dict[PyTree, tuple[list[Finding], bool]] = {}
    with contextlib.suppress(TypeError):  # Some callables have no weak references, or no hash.
        known = _OF_CHAINS.setdefault(tx.update, known)
    key = names, step and (step.policy,)
    if key not in known:
        known[key] = findings(rows(chain.read(tx)), step, bool(names)), scales(tx)
    return known[key]


def of_rules(who: str, known: set[str], rules: list[str]) -> None:
    """Warn of each nonlinear backward rule once, although a loss may be traced several times."""
    for rule in sorted(set(rules) - known):
        warnings.warn(f"{who}: {finding('not_linear', rule=rule)}", stacklevel=2)
    known.update(rules)


def report(
    who: str, argument: str, listed: Iterable[Finding], structure: PyTree = None, level: int = 5
) -> None:
    """Raise the first certain finding; warn of other findings, in a loop once per ``structure``."""
    for item in sorted(listed, key=lambda x: not x.certain):
        if item.certain:
            allowed = "a chain whose parts fit each other" + " and the step" * (structure is None)
            allowed = f"the state of {allowed}" if argument == "opt_state" else allowed
            raise ValueError(f"{who}: {argument} must be {allowed}, got {item}")
        # The state of a scaler does not show which factory made the scaler. So in comparisons of
        # warnings, all factories of scalers have the same name.
        text = re.sub(r"\w+_loss_scale|skip_bad_steps", "loss_scale", str(item))
        if structure is None or not {(text, None), (text, structure)} & _WARNED:
            warnings.warn(f"{who}: {item}", stacklevel=level)
        _WARNED.add((text, structure))


def of_part(who: str, setting: str, state: PyTree) -> None:
    """Report a finding of a traced part: warn once per structure of ``state``, or tell ``explain``.

    A part calls this function if its arguments, shapes, mesh or schedule show that the part does
    not do here what it is for. The texts of the settings are in ``orders.toml``.
    """
    if (idle := IDLE.get()) is None:
        report(who, "", [finding(setting)], jax.tree.structure(state))
    else:
        idle[finding(setting)] = None


def findings(parts: Sequence[Row], step: Any = None, bound: bool = False) -> list[Finding]:
    """Return all findings of a chain, and of a step around the chain.

    ``bound`` is whether the caller binds an axis for gates without an ``axis_name``.
    """
    listed = [*orders(parts, bound or (step is not None and bool(step.names))), *directions(parts)]
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
        reduce = {a.role, b.role} <= {*table()["several"]["reducing"]}
        if (a.role, b.role) in rules(where) and not (reduce and set(a.axes).isdisjoint(b.axes)):
            *texts, certain = rules(where)[a.role, b.role]
            why, fix = (str(x).format(first=a.part.name, then=b.part.name) for x in texts)
            yield Finding(f"{b.part.name} {where} {a.part.name}", why, fix, certain)


def finding(setting: str, **names: str) -> Finding:
    """Return the finding for a setting, with the text of ``orders.toml``."""
    entry = checks.table("boostax.order", "orders")["settings"][setting]
    what, why, fix = (entry[field].format(**names) for field in ("what", "why", "fix"))
    return Finding(what, why, fix, entry.get("certain", False))


def settings(parts: Sequence[Row], bound: bool) -> Iterator[Finding]:
    """Yield wrong settings of single parts.

    ``bound`` is whether a step binds an axis for gates without an ``axis_name``.
    """
    for row in parts:
        name = row.part.name
        # ``scheduled_freeze`` saves no work if it is inside another part.
        if row.role == "freeze" and row.wrappers > sum(x.role == "watch" for x in row.holders):
            yield finding("freeze_inside", name=name)
        if row.role == "zero" and row.masks:
            yield finding("zero", name=name, mask=row.masks[0])
        # A gate without the axes of a reduction inside it would decide separately on each replica.
        # The axes of a clip are not needed: they are axes of shards, which a gate reads from the
        # types of the gradients.
        inside = (other for other in parts if row in other.holders and other.role not in CLIPS)
        missing = {axis for other in inside for axis in other.axes} - {*row.axes, UNNAMED}
        if missing and (row.axes or not bound) and row.role in ("scaler", "window", "carry"):
            yield finding("without_axis", name=name, axes=", ".join(map(repr, sorted(missing))))
        # The gate receives only some of the params.
        if row.masks and row.role in table()["several"]["holds"]:
            setting = "scaler_in_mask" if row.role == "scaler" else "gate_in_mask"
            yield finding(setting, name=name, mask=row.masks[0])
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
        is_after = math.prod(signs[:i]) == -1 and math.prod(signs[i:]) == 1
        is_decay = row.role == "decay" and number(row.part.settings.get("weight_decay")) > 0
        if is_after and is_decay:
            yield finding("decay_after_rate", name=row.part.name)
        if is_after and row.role in CLIPS:
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
    parts = rows(chain.read(tx))
    scaler = any(x.role == "scaler" and x.part.settings.get("asks", True) for x in parts)
    return scaler and all(x.role != "carry" for x in parts)


def decays(tx: optax.GradientTransformation, tree: PyTree) -> Iterator[Finding]:
    """Yield decays of Flax's running statistics, if the params, or moments of them, have any."""
    if "'batch_stats'" in str(jax.tree.structure(tree)):
        for row in rows(chain.read(tx)):
            if row.role == "decay" and not row.masks and row.part.settings.get("weight_decay") != 0:
                yield finding("decays_statistics", name=row.part.name)


def of_step(parts: Sequence[Row], step: Any) -> Iterator[Finding]:
    """Yield findings for parts that a step needs and that the step's chain lacks."""
    scales = any(row.role == "scaler" for row in parts)
    if step.policy is not None and step.policy.compute_dtype == jnp.float16 and not scales:
        yield finding("half_without_scaler")
    if all(row.role != UNKNOWN for row in parts):
        reducing = (*table()["several"]["reducing"], "subspace")
        reduced = {axis for row in parts if row.role in reducing for axis in row.axes}
        for axis in (x for x in step.names if not reduced & {x, UNNAMED}):
            setting = "reduced_over_others" if reduced else "not_reduced"
            yield finding(setting, axis=repr(axis), others=", ".join(map(repr, sorted(reduced))))
