# SPDX-License-Identifier: Apache-2.0
"""Find what is in wrong order in a chain, why, and where it belongs."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


# A finding about any two parts; ``{first}`` and ``{then}`` stand for their names.
Rule = functools.partial(Finding, "")

# By the roles (``chain/roles.py``) of the part that comes first, of a nesting the outer one, and of
# the part that comes after it, of a nesting the inner one.
Roles = tuple[str, ...]
Rules = Mapping[tuple[Roles, Roles], Finding]

_SCALER, _WINDOWS, _OWN = ("scaler",), ("window", "peer window"), ("delta", "own params")
_HOLDS, _SENT = (*_SCALER, *_WINDOWS, "hold"), (*REDUCTIONS, *_OWN)
_NOISE, _DECAY, _SUMS = ("noise",), ("decay",), ("adasum", "compressed")
_SCALED = (
    "it sees gradients that are still multiplied by the scale, before anyone has looked for "
    "infinities:"
)
_RUNS_ANYWAY = "it runs at every call, also where {first} skips the step:"
# Mends that several rules share.
_INSIDE = "Put {first} inside {then}: {then}(optax.chain({first}(...), ...))."
_INTO = "Put {then} inside {first}: {first}(optax.chain(..., {then}(...)))."
_INTO_FRONT = "Put {then} first inside {first}: {first}(optax.chain({then}(...), ...))."
_AROUND = "Put {then} around {first}: {then}({first}(...), ...)."
_BEHIND, _ONE = "Put {first} behind {then}.", "Leave one of them out."


def _mended(mend: str, whys: Mapping[tuple[Roles, Roles], str], certain: bool = False) -> Rules:
    """Return rules that one thing mends."""
    return {roles: Rule(why, mend, certain) for roles, why in whys.items()}


# ``first`` precedes ``then`` in a chain and does not wrap it.
SEQUENCES: Rules = {
    **_mended(
        _INSIDE,
        {
            (CLIPS, _SCALER): f"{_SCALED} the bound means something else at every scale.",
            (MEMORIES, _SCALER): f"{_SCALED} its moments jump with the scale, and one NaN stays in "
            "them.",
            (_DECAY, _SCALER): "the decay is divided by the scale with the gradients.",
            (_NOISE, _SCALER): "the noise is divided by the scale.",
        },
        certain=True,
    ),
    **_mended(
        _INSIDE,
        {
            (_SENT, _SCALER): f"{_SCALED} one replica's overflow goes to all, and residuals are "
            "kept in a unit that changes.",
            (CLIPS, _WINDOWS): "every micro-gradient is clipped, not their mean.",
            (MEMORIES, _WINDOWS): "its moments are of micro-gradients, and it takes a step for "
            "each.",
            (REDUCTIONS, _WINDOWS): "every micro-gradient is sent; their sum would be sent once.",
            (_NOISE, _WINDOWS): "the noise adds up in the window.",
        },
    ),
    (("zero NaN",), _SCALER): Rule(
        "it hides what the scaler looks for: the scale never falls, and zeros train.",
        "Leave {first} out: {then} skips such steps.",
    ),
    **_mended(
        _INTO,
        {
            (GATES, _DECAY): f"{_RUNS_ANYWAY} weights decay without a step.",
            (GATES, MEMORIES): f"{_RUNS_ANYWAY} its moments fade, and params coast on them.",
            (GATES, ("schedule", "call schedule")): f"{_RUNS_ANYWAY} the schedule counts calls, "
            "not steps.",
            (GATES, _NOISE): f"{_RUNS_ANYWAY} params move by noise alone.",
        },
    ),
    **_mended(
        _INTO_FRONT,
        {
            (GATES, ("recorder",)): f"{_RUNS_ANYWAY} it records the same params again.",
            (GATES, REDUCTIONS): f"{_RUNS_ANYWAY} it sends zeros, and what came to the optimizer "
            "was not reduced.",
        },
    ),
    # Deep gradient compression clips before it chooses.
    (CLIPS, ("mean", "adasum")): Rule(
        "each replica is clipped by itself, and the mean of what is clipped is not the clipped "
        "mean.",
        _BEHIND,
    ),
    (MEMORIES, REDUCTIONS): Rule(
        "the moments come from one replica's gradients, but are stored as replicated.",
        "Put {then} before {first}, or keep an optimizer on each replica: "
        "boostax.reduce.adasum_delta, boostax.reduce.local_updates.",
        certain=True,
    ),
    (("centralize",), _SUMS): Rule(
        "what comes out of {then} has a mean again.", f"{_BEHIND[:-1]}; it also costs less there."
    ),
    (_NOISE, _SUMS): Rule("the noise is sent in the place of the gradient.", _BEHIND),
    (("mean", "compressed"), ("adasum",)): Rule(
        "the gradients are equal by then, and AdaSum of equal gradients is the gradient.",
        "Leave {first} out.",
    ),
    ((*REDUCTIONS, "delta"), ("mean", "compressed")): Rule(
        "everything is equal by then: it sends what all have.", _ONE
    ),
    (REDUCTIONS, _OWN): Rule(
        "the replicas' gradients are equal by then, and so are their optimizers' updates.",
        "Leave {first} out: {then} takes local gradients.",
    ),
    (("moments",), ("centralize",)): Rule(
        "these are updates, not gradients: each element has been divided by a number of its own.",
        "Put {then} before {first}.",
    ),
    ((*CLIPS, "centralize", *MEMORIES, "noise"), ("subspace",)): Rule(
        "the slope by which it measures its steps is no longer that of the loss.",
        "Leave {first} out, or give it to residual=.",
    ),
    (("subspace",), (*RATES, *CLIPS, *MEMORIES)): Rule(
        "the step's length was chosen by the loss, and is changed after that.",
        "Leave {then} out, or give it to residual=.",
    ),
    (("adder",), ("decay", *MEMORIES, "schedule", "noise", "recorder")): Rule(
        f"{_RUNS_ANYWAY} {{first}} gives it zeros, which it takes for gradients.",
        "Leave {first} out, and put boostax.accumulate or optax.MultiSteps around {then}.",
    ),
}

# ``first`` wraps ``then``.
NESTINGS: Rules = {
    **_mended(
        _AROUND,
        {
            (("average",), _HOLDS): "it counts and averages at every call: params move where "
            "{then} skips the step.",
            (("outer optimizer",), _HOLDS): "it takes the gradient of every call itself: what "
            "{then} skips reaches params, what it divides by a scale is not divided.",
            (("condition",), _SCALER): "in calls that it leaves out, gradients stay multiplied by "
            "the scale.",
        },
        certain=True,
    ),
    (_SCALER, _SCALER): Rule(
        "gradients are divided by both scales, the loss multiplied by one.", _ONE, certain=True
    ),
    (_WINDOWS, _WINDOWS): Rule(
        "the windows multiply: the optimizer runs once in their product.", _ONE
    ),
    (("hold",), ("scaler", "window")): Rule(
        "it judges gradients that are still scaled, and lets bad ones through in the end.",
        "Leave {first} out: {then} skips for as long as it takes.",
    ),
    (_SCALER, ("hold",)): Rule("{first} has skipped what {then} looks for.", "Leave {then} out."),
    (("peer window", "hold"), _SENT): Rule(
        "it keeps local gradients, or decides, on each replica alone, and does not declare it.",
        "Use boostax.accumulate or boostax.dynamic_loss_scale with axis_name=.",
        certain=True,
    ),
    (("call schedule",), _HOLDS): Rule(
        "its schedules count calls, also those that {then} skips.", _AROUND
    ),
    (_OWN, _SENT): Rule(
        "what is inside is equal on all replicas, so that {first} does nothing.",
        "Leave {then} out: {first} takes local gradients.",
    ),
    (_OWN, (*_SCALER, *_WINDOWS)): Rule(
        "each replica would decide for itself.", "Put {then} around {first}: {then}({first}(...))."
    ),
    (("own params",), ("recorder",)): Rule(
        "each replica would record params of its own.",
        "Keep jax.device_get(params) in a list between steps: boostax.subspace.pca_basis takes it.",
    ),
}


def orders(found: Sequence[Row]) -> Iterator[Finding]:
    """Yield what breaks a rule of ``SEQUENCES``, then of ``NESTINGS``."""
    pairs = itertools.combinations(found, 2)
    apart = ((a, b) for a, b in pairs if a.meets(b) and not b.inside(a))
    yield from _broken(SEQUENCES, apart, "after")
    yield from _broken(NESTINGS, ((a, b) for b in found for a in b.holders), "inside")


def _broken(rules: Rules, pairs: Iterable[tuple[Row, Row]], where: str) -> Iterator[Finding]:
    """Apply the first rule for each pair's roles; two reductions count if they share an axis."""
    for a, b in pairs:
        apart = {a.role, b.role} <= {*_SENT} and not set(a.axes) & set(b.axes)
        matches = (rule for (x, y), rule in rules.items() if a.role in x and b.role in y)
        rule = None if apart else next(matches, None)
        if rule is not None:
            names = {"first": a.part.name, "then": b.part.name}
            why, mend = rule.why.format(**names), rule.mend.format(**names)
            yield Finding(f"{b.part.name} {where} {a.part.name}", why, mend, rule.certain)
