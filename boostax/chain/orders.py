"""What is in wrong order in a chain, why, and where it belongs."""

from collections.abc import Iterator, Mapping, Sequence
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
    """An ordering that is wrong: a part of a role in ``first``, and one of a role in ``then``.

    Attributes:
      first: roles (``chain/roles.py``) of the part that comes first; of a nesting, the outer one.
      then: roles of the part that comes after it; of a nesting, the inner one.
      why: see ``Finding``, as are ``mend`` and ``certain``. ``{first}`` and ``{then}`` are names.
    """

    first: tuple[str, ...]
    then: tuple[str, ...]
    why: str
    mend: str
    certain: bool = False


_SCALED = (
    "it sees gradients that are still multiplied by the scale, before anyone has looked for "
    "infinities:"
)
_INSIDE = "Put {first} inside {then}: {then}(optax.chain({first}(...), ...))."
_INTO = "Put {then} inside {first}: {first}(optax.chain(..., {then}(...)))."
_INTO_FRONT = "Put {then} first inside {first}: {first}(optax.chain({then}(...), ...))."
_AROUND = "Put {then} around {first}: {then}({first}(...), ...)."
_RUNS_ANYWAY = "it runs at every call, also where {first} skips the step:"


def _before(
    then: tuple[str, ...],
    mend: str,
    whys: Mapping[tuple[str, ...], str],
    certain: tuple[tuple[str, ...], ...] = (),
) -> Iterator[Rule]:
    """Rules for what must not precede ``then``: by the roles of each ``first``, the reason."""
    return (Rule(first, then, why, mend, first in certain) for first, why in whys.items())


def _after_gates(mend: str, whys: Mapping[tuple[str, ...], str]) -> Iterator[Rule]:
    """Rules for what must stand inside a gate, not after it: by its roles, the reason."""
    return (Rule(GATES, then, f"{_RUNS_ANYWAY} {why}", mend) for then, why in whys.items())


# ``first`` precedes ``then`` in a chain and does not wrap it.
SEQUENCES = (
    *_before(
        ("scaler",),
        _INSIDE,
        {
            CLIPS: f"{_SCALED} the bound means something else at every scale.",
            MEMORIES: f"{_SCALED} its moments jump with the scale, and one NaN stays in them.",
            ("decay",): "the decay is divided by the scale with the gradients.",
            ("noise",): "the noise is divided by the scale.",
            (*REDUCTIONS, "delta", "own params"): f"{_SCALED} one replica's overflow goes to all, "
            "and residuals are kept in a unit that changes.",
        },
        certain=(CLIPS, MEMORIES, ("decay",), ("noise",)),
    ),
    Rule(
        ("zero NaN",),
        ("scaler",),
        "it hides what the scaler looks for: the scale never falls, and zeros train.",
        "Leave {first} out: {then} skips such steps.",
    ),
    *_before(
        ("window", "peer window"),
        _INSIDE,
        {
            CLIPS: "every micro-gradient is clipped, not their mean.",
            MEMORIES: "its moments are of micro-gradients, and it takes a step for each.",
            REDUCTIONS: "every micro-gradient is sent; their sum would be sent once.",
            ("noise",): "the noise adds up in the window.",
        },
    ),
    *_after_gates(
        _INTO,
        {
            ("decay",): "weights decay without a step.",
            MEMORIES: "its moments fade, and params coast on them.",
            ("schedule", "call schedule"): "the schedule counts calls, not steps.",
            ("noise",): "params move by noise alone.",
        },
    ),
    *_after_gates(
        _INTO_FRONT,
        {
            ("recorder",): "it records the same params again.",
            REDUCTIONS: "it sends zeros, and what came to the optimizer was not reduced.",
        },
    ),
    Rule(
        CLIPS,
        # Deep gradient compression clips before it chooses.
        ("mean", "adasum"),
        "each replica is clipped by itself, and the mean of what is clipped is not the clipped "
        "mean.",
        "Put {first} behind {then}.",
    ),
    Rule(
        MEMORIES,
        REDUCTIONS,
        "the moments come from one replica's gradients, but are stored as replicated.",
        "Put {then} before {first}, or keep an optimizer on each replica: "
        "boostax.reduce.adasum_delta, boostax.reduce.local_updates.",
        certain=True,
    ),
    Rule(
        ("centralize",),
        ("adasum", "compressed"),
        "what comes out of {then} has a mean again.",
        "Put {first} behind {then}; it also costs less there.",
    ),
    Rule(
        ("noise",),
        ("adasum", "compressed"),
        "the noise is sent in the place of the gradient.",
        "Put {first} behind {then}.",
    ),
    Rule(
        ("mean", "compressed"),
        ("adasum",),
        "the gradients are equal by then, and AdaSum of equal gradients is the gradient.",
        "Leave {first} out.",
    ),
    Rule(
        (*REDUCTIONS, "delta"),
        ("mean", "compressed"),
        "everything is equal by then: it sends what all have.",
        "Leave one of them out.",
    ),
    Rule(
        REDUCTIONS,
        ("delta", "own params"),
        "the replicas' gradients are equal by then, and so are their optimizers' updates.",
        "Leave {first} out: {then} takes local gradients.",
    ),
    Rule(
        ("moments",),
        ("centralize",),
        "these are updates, not gradients: each element has been divided by a number of its own.",
        "Put {then} before {first}.",
    ),
    Rule(
        (*CLIPS, "centralize", *MEMORIES, "noise"),
        ("subspace",),
        "the slope by which it measures its steps is no longer that of the loss.",
        "Leave {first} out, or give it to residual=.",
    ),
    Rule(
        ("subspace",),
        (*RATES, *CLIPS, *MEMORIES),
        "the step's length was chosen by the loss, and is changed after that.",
        "Leave {then} out, or give it to residual=.",
    ),
    Rule(
        ("coordinates",),
        (*RATES, *CLIPS, "decay", *MEMORIES),
        "params move otherwise than the coordinates that are kept of them.",
        "Put {then} inside {first}: {first}(optax.chain(..., {then}(...)), ...).",
    ),
    Rule(
        ("adder",),
        ("decay", *MEMORIES, "schedule", "noise", "recorder"),
        f"{_RUNS_ANYWAY} {{first}} gives it zeros, which it takes for gradients.",
        "Leave {first} out, and put boostax.accumulate or optax.MultiSteps around {then}.",
    ),
)

# ``first`` wraps ``then``.
NESTINGS = (
    Rule(
        ("scaler",),
        ("scaler",),
        "gradients are divided by both scales, the loss multiplied by one.",
        "Leave one of them out.",
        certain=True,
    ),
    Rule(
        ("window", "peer window"),
        ("window", "peer window"),
        "the windows multiply: the optimizer runs once in their product.",
        "Leave one of them out.",
    ),
    Rule(
        ("hold",),
        ("scaler", "window"),
        "it judges gradients that are still scaled, and lets bad ones through in the end.",
        "Leave {first} out: {then} skips for as long as it takes.",
    ),
    Rule(
        ("scaler",),
        ("hold",),
        "{first} has skipped what {then} looks for.",
        "Leave {then} out.",
    ),
    Rule(
        ("peer window", "hold"),
        (*REDUCTIONS, "delta", "own params"),
        "it keeps local gradients, or decides, on each replica alone, and does not declare it.",
        "Use boostax.accumulate or boostax.dynamic_loss_scale with axis_name=.",
        certain=True,
    ),
    Rule(
        ("call schedule",),
        ("scaler", "window", "peer window", "hold"),
        "its schedules count calls, also those that {then} skips.",
        _AROUND,
    ),
    Rule(
        ("average",),
        ("scaler", "window", "peer window", "hold"),
        "it counts and averages at every call: params move where {then} skips the step.",
        _AROUND,
        certain=True,
    ),
    Rule(
        ("outer optimizer",),
        ("scaler", "window", "peer window", "hold"),
        "it takes the gradient of every call itself: what {then} skips reaches params, what it "
        "divides by a scale is not divided.",
        _AROUND,
        certain=True,
    ),
    Rule(
        ("condition",),
        ("scaler",),
        "in calls that it leaves out, gradients stay multiplied by the scale.",
        _AROUND,
        certain=True,
    ),
    Rule(
        ("delta", "own params"),
        (*REDUCTIONS, "delta", "own params"),
        "what is inside is equal on all replicas, so that {first} does nothing.",
        "Leave {then} out: {first} takes local gradients.",
    ),
    Rule(
        ("delta", "own params"),
        ("scaler", "window", "peer window"),
        "each replica would decide for itself.",
        "Put {then} around {first}: {then}({first}(...)).",
    ),
    Rule(
        ("own params",),
        ("recorder",),
        "each replica would record params of its own.",
        "Record between steps: boostax.subspace.HostTrajectory.",
    ),
)


def sequences(found: Sequence[Row]) -> Iterator[Finding]:
    """What breaks a rule of ``SEQUENCES``."""
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            if b.inside(a) or not a.meets(b):
                continue
            rule = _rule(SEQUENCES, a, b)
            if rule is not None:
                yield _finding(rule, a, b, f"{b.part.name} after {a.part.name}")


def nestings(found: Sequence[Row]) -> Iterator[Finding]:
    """What breaks a rule of ``NESTINGS``."""
    for b in found:
        for a in b.holders:
            rule = _rule(NESTINGS, a, b)
            if rule is not None:
                yield _finding(rule, a, b, f"{b.part.name} inside {a.part.name}")


def _rule(rules: Sequence[Rule], a: Row, b: Row) -> Rule | None:
    """The first rule that matches both roles; two reductions count only if they share an axis."""
    for rule in rules:
        if a.role in rule.first and b.role in rule.then:
            reduces = {*REDUCTIONS, "delta", "own params"}
            if {a.role, b.role} <= reduces and not set(a.axes) & set(b.axes):
                return None
            return rule
    return None


def _finding(rule: Rule, a: Row, b: Row, what: str) -> Finding:
    names = {"first": a.part.name, "then": b.part.name}
    return Finding(what, rule.why.format(**names), rule.mend.format(**names), rule.certain)
