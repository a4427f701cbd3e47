"""Both runs of a case, call by call; and what becomes of a case that differs."""

import dataclasses
from typing import Any

import numpy as np

from fuzzing.cases import Case, draw, first_params, inputs, tidy
from fuzzing.library import Library
from fuzzing.reference import Reference

# What a loss in f32 can be.
LARGEST = float(np.finfo(np.float32).max)


class Difference(AssertionError):
    """What the library does and the reference does not."""


def check(case: Case) -> str:
    """Run a case in both.

    Returns:
      ``"equal"``, or ``"refused"`` if the library refuses a move that it cannot make.

    Raises:
      Difference: they differ, with the call and the values.
    """
    params = first_params(case)
    ours, theirs = Library(case, params), Reference(case, params)
    for call in range(case.calls + 1):
        for _, kind, argument in (x for x in case.moves if x[0] == call):
            if not _moved(ours, kind, argument):
                return "refused"
            theirs.move(kind, argument)
            _compare(case, f"{kind} before call {call}", ours, theirs)
        if call < case.calls:
            given = inputs(case, call, theirs.replicas)
            ours.call(*given)
            theirs.call(*given)
            if case.quadratic and ours.loss is not None and theirs.loss < LARGEST:
                if not np.isclose(loss := float(ours.loss), theirs.loss, rtol=1e-4):
                    raise Difference(f"call {call}: loss is {loss}, the reference's {theirs.loss}")
            _compare(case, f"call {call}", ours, theirs)
    return "equal"


def _moved(ours: Library, kind: str, argument: int) -> bool:
    try:
        ours.move(kind, argument)
    except ValueError as error:
        if kind in ("reshard", "nest") and str(error).startswith(("reshard_state:", "migrate_")):
            return False
        raise
    return True


def _compare(case: Case, when: str, ours: Library, theirs: Reference) -> None:
    told = ours.reported()
    for name, value in theirs.reported().items():
        if told[name] != value:
            raise Difference(f"{when}: {name} is {told[name]}, and {float(value)} in the reference")
    # One rounding in f32 of each call; where gradients travel in eight bits, one of those.
    step = 1e-2 if case.reduction == "bfloat16" else 2e-6
    limit = step * case.calls * (1 + case.magnitude * len(case.every) * max(case.rates))
    pairs = {"": (ours.params, theirs.params)}
    if case.average:
        pairs["the average of "] = ours.average, theirs.average
    for what, (mine, wanted) in pairs.items():
        for name, value in wanted.items():
            with np.errstate(invalid="ignore"):
                off = np.abs(mine[name] - value) / (1 + np.abs(value))
            if not np.all(off <= limit):
                raise Difference(
                    f"{when}: {what}{name} is off by {np.max(off):.3g}, of {limit:.3g}: "
                    f"{mine[name].ravel()[:4]}, and {value.ravel()[:4]} in the reference"
                )


def failure(case: Case) -> str | None:
    """What goes wrong, in a line; ``None`` if nothing does."""
    try:
        check(case)
    except Exception as error:
        return _line(error)
    return None


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def shrunk(case: Case, found: str) -> tuple[Case, str]:
    """The plainest case that still goes wrong in the same way, found greedily field by field."""
    kind, again = found.split(":")[0], True
    while again:
        again = False
        for simpler in map(tidy, _simpler(case)):
            new = failure(simpler) if simpler != case else None
            if new is not None and new.split(":")[0] == kind:
                case, found, again = simpler, new, True
                break
    return case, found


def _simpler(case: Case) -> Any:
    plain = Case()
    if case.calls > 1:
        yield dataclasses.replace(case, calls=case.calls // 2)
        yield dataclasses.replace(case, calls=case.calls - 1)
    for name in ("moves", "bad", "gates", "frozen", "every"):
        values = getattr(case, name)
        for i in range(len(values) if name != "every" else 0):
            yield dataclasses.replace(case, **{name: values[:i] + values[i + 1 :]})
    if case.placement != "single":
        yield dataclasses.replace(case, placement="single", replicas=1, reduction="mean")
        if case.replicas > 2:
            yield dataclasses.replace(case, replicas=2)
        if case.placement != "checked":
            yield dataclasses.replace(case, placement="checked")
    for field in dataclasses.fields(Case):
        if field.name not in ("seed", "calls", "placement", "replicas", "moves", "bad", "gates"):
            value = getattr(plain, field.name)
            if getattr(case, field.name) != value:
                yield dataclasses.replace(case, **{field.name: value})


def fuzz(seed: int) -> str:
    """The outcome of a seed.

    Raises:
      Difference: with the script of the plainest case that goes wrong.
    """
    case = draw(seed)
    try:
        return check(case)
    except Exception as error:
        case, found = shrunk(case, _line(error))
        raise Difference(f"seed {seed}: {found}\n\n{case.script(found)}") from error
