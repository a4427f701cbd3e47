# SPDX-License-Identifier: Apache-2.0
"""What is in wrong order in a chain, why, and where it belongs."""

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


class Rule(NamedTuple):
    """Why an order is wrong: see ``Finding``. ``{first}`` and ``{then}`` are names of parts."""

    why: str
    mend: str
    certain: bool = False


# By the roles (``chain/roles.py``) of the part that comes first, of a nesting the outer one, and of
# the part that comes after it, of a nesting the inner one.
Roles = tuple[str, ...]
Rules = Mapping[tuple[Roles, Roles], Rule]

_SCALER, _WINDOWS, _OWN = ("scaler",), ("window", "peer window"), ("delta", "own params")
_HOLDS, _SENT = (*_SCALER, *_WINDOWS, "hold"), (*REDUCTIONS, *_OWN)
_SCALED = (
    "it sees gradients that are still multiplied by the scale, before anyone has looked for "
    "infinities:"
)
_INSIDE = "Put {first} inside {then}: {then}(optax.chain({first}(...), ...))."
_INTO = "Put {then} inside {first}: {first}(optax.chain(..., {then}(...)))."
_INTO_FRONT = "Put {then} first inside {first}: {first}(optax.chain({then}(...), ...))."
_AROUND = "Put {then} around {first}: {then}({first}(...), ...)."
_RUNS_ANYWAY = "it runs at every call, also where {first} skips the step:"


def _before(then: Roles, mend: str, whys: Mapping[Roles, str], certain: bool = False) -> Rules:
    """Rules that one thing mends, by what comes first."""
    return {(first, then): Rule(why, mend, certain) for first, why in whys.items()}


def _behind_gates(mend: str, whys: Mapping[Roles, str]) -> Rules:
    """The same, by what runs at every call, also where a gate in front of it skips the step."""
    return {(GATES, then): Rule(f"{_RUNS_ANYWAY} {why}", mend) for then, why in whys.items()}


# ``first`` precedes ``then`` in a chain and does not wrap it.
SEQUENCES: Rules = {
    **_before(
        _SCALER,
        _INSIDE,
        {
            CLIPS: f"{_SCALED} the bound means something else at every scale.",
            MEMORIES: f"{_SCALED} its moments jump with the scale, and one NaN stays in them.",
            ("decay",): "the decay is divided by the scale with the gradients.",
            ("noise",): "the noise is divided by the scale.",
        },
        certain=True,
    ),
    (_SENT, _SCALER): Rule(
        f"{_SCALED} one replica's overflow goes to all, and residuals are kept in a unit that "
        "changes.",
        _INSIDE,
    ),
    (("zero NaN",), _SCALER): Rule(
        "it hides what the scaler looks for: the scale never falls, and zeros train.",
        "Leave {first} out: {then} skips such steps.",
    ),
    **_before(
        _WINDOWS,
        _INSIDE,
        {
            CLIPS: "every micro-gradient is clipped, not their mean.",
            MEMORIES: "its moments are of micro-gradients, and it takes a step for each.",
            REDUCTIONS: "every micro-gradient is sent; their sum would be sent once.",
            ("noise",): "the noise adds up in the window.",
        },
    ),
    **_behind_gates(
        _INTO,
        {
            ("decay",): "weights decay without a step.",
            MEMORIES: "its moments fade, and params coast on them.",
            ("schedule", "call schedule"): "the schedule counts calls, not steps.",
            ("noise",): "params move by noise alone.",
        },
    ),
    **_behind_gates(
        _INTO_FRONT,
        {
            ("recorder",): "it records the same params again.",
            REDUCTIONS: "it sends zeros, and what came to the optimizer was not reduced.",
        },
    ),
    # Deep gradient compression clips before it chooses.
    (CLIPS, ("mean", "adasum")): Rule(
        "each replica is clipped by itself, and the mean of what is clipped is not the clipped "
        "mean.",
        "Put {first} behind {then}.",
    ),
    (MEMORIES, REDUCTIONS): Rule(
        "the moments come from one replica's gradients, but are stored as replicated.",
        "Put {then} before {first}, or keep an optimizer on each replica: "
        "boostax.reduce.adasum_delta, boostax.reduce.local_updates.",
        certain=True,
    ),
    (("centralize",), ("adasum", "compressed")): Rule(
        "what comes out of {then} has a mean again.",
        "Put {first} behind {then}; it also costs less there.",
    ),
    (("noise",), ("adasum", "compressed")): Rule(
        "the noise is sent in the place of the gradient.", "Put {first} behind {then}."
    ),
    (("mean", "compressed"), ("adasum",)): Rule(
        "the gradients are equal by then, and AdaSum of equal gradients is the gradient.",
        "Leave {first} out.",
    ),
    ((*REDUCTIONS, "delta"), ("mean", "compressed")): Rule(
        "everything is equal by then: it sends what all have.", "Leave one of them out."
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
    (_SCALER, _SCALER): Rule(
        "gradients are divided by both scales, the loss multiplied by one.",
        "Leave one of them out.",
        certain=True,
    ),
    (_WINDOWS, _WINDOWS): Rule(
        "the windows multiply: the optimizer runs once in their product.", "Leave one of them out."
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
    (("average",), _HOLDS): Rule(
        "it counts and averages at every call: params move where {then} skips the step.",
        _AROUND,
        certain=True,
    ),
    (("outer optimizer",), _HOLDS): Rule(
        "it takes the gradient of every call itself: what {then} skips reaches params, what it "
        "divides by a scale is not divided.",
        _AROUND,
        certain=True,
    ),
    (("condition",), _SCALER): Rule(
        "in calls that it leaves out, gradients stay multiplied by the scale.",
        _AROUND,
        certain=True,
    ),
    (_OWN, _SENT): Rule(
        "what is inside is equal on all replicas, so that {first} does nothing.",
        "Leave {then} out: {first} takes local gradients.",
    ),
    (_OWN, ("scaler", "window", "peer window")): Rule(
        "each replica would decide for itself.", "Put {then} around {first}: {then}({first}(...))."
    ),
    (("own params",), ("recorder",)): Rule(
        "each replica would record params of its own.",
        "Keep jax.device_get(params) in a list between steps: boostax.subspace.pca_basis takes it.",
    ),
}


def sequences(found: Sequence[Row]) -> Iterator[Finding]:
    """What breaks a rule of ``SEQUENCES``."""
    pairs = itertools.combinations(found, 2)
    apart = ((a, b) for a, b in pairs if a.meets(b) and not b.inside(a))
    return _broken(SEQUENCES, apart, "after")


def nestings(found: Sequence[Row]) -> Iterator[Finding]:
    """What breaks a rule of ``NESTINGS``."""
    return _broken(NESTINGS, ((a, b) for b in found for a in b.holders), "inside")


def _broken(rules: Rules, pairs: Iterable[tuple[Row, Row]], where: str) -> Iterator[Finding]:
    """The first rule for the roles of each pair; two reductions count if they share an axis."""
    for a, b in pairs:
        apart = {a.role, b.role} <= {*_SENT} and not set(a.axes) & set(b.axes)
        matches = (rule for (x, y), rule in rules.items() if a.role in x and b.role in y)
        rule = None if apart else next(matches, None)
        if rule is not None:
            names = {"first": a.part.name, "then": b.part.name}
            why, mend = rule.why.format(**names), rule.mend.format(**names)
            yield Finding(f"{b.part.name} {where} {a.part.name}", why, mend, rule.certain)
