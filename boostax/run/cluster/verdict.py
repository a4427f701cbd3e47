"""What the standings of all ranks say: a table, and whom the others wait for."""

from collections.abc import Sequence
from typing import NamedTuple

from boostax.run.cluster.board import Standing

# A run of a thousand would print a million lines.
_ROWS = 32
_NAMES = 8


class View(NamedTuple):
    """A rank as this process sees it.

    Attributes:
      rank: whose.
      standing: the last one heard of, ``None`` if there was none.
      silence: seconds since it was heard of, ``None`` if never.
    """

    rank: int
    standing: Standing | None
    silence: float | None


def report(
    views: Sequence[View],
    rank: int,
    limit: float,
    allowed: float,
    unanswered: float = 0.0,
    trouble: str = "",
) -> str:
    """What the message of a watchdog says: what took too long, the table, the conclusion.

    Args:
      views: of all ranks, this one included.
      rank: of this process.
      limit: seconds without progress in an ordinary call.
      allowed: seconds that hold now.
      unanswered: seconds for which the coordination service has not answered.
      trouble: the error that it answered with.

    Returns:
      Lines without the last line break.
    """
    own = next(view.standing for view in views if view.rank == rank)
    assert own is not None
    over = [v.rank for v in views if v.rank != rank and v.standing and v.standing.over]
    first = f"rank {rank}: no progress for {own.quiet:.1f} s {_where(own)}; the limit is "
    first += f"{allowed:g} s."
    if over:
        first += f" {_ranks(over)} gave up."
    return "\n".join([first, *_table(views, rank), conclude(views, limit, unanswered, trouble)])


def conclude(
    views: Sequence[View], limit: float, unanswered: float = 0.0, trouble: str = ""
) -> str:
    """Which ranks the others wait for, and where those are.

    Args:
      views: of all ranks.
      limit: seconds; half of it in silence counts as silence.
      unanswered: seconds for which the coordination service has not answered.
      trouble: the error that it answered with.

    Returns:
      A sentence or two.

    Example:
      >>> stuck = View(1, Standing(begun=12, finished=11), 0.2)
      >>> waits = View(0, Standing(begun=13, finished=11, calling=True), 0.0)
      >>> conclude([waits, stuck], limit=5.0)
      'Rank 1 has not begun call 13: stuck between calls, in its data or on its host.'
    """
    if unanswered > limit / 2:
        said = f" ({trouble})" if trouble else ""
        return (
            f"Rank 0, which keeps the coordination service, has not answered for {unanswered:.1f} "
            f"s{said}: stopped, frozen machine or cut network. What is said of the other ranks is "
            "as old."
        )
    known = {v.rank: v.standing for v in views if v.standing is not None}
    left = [rank for rank, s in known.items() if s.left]
    silent = [
        v for v in views if v.silence is None or (v.silence > limit / 2 and v.rank not in left)
    ]
    sentences = [_silence(view) for view in silent]
    sentences += [
        f"Rank {rank} has left the loop by {s.place}, {_where(s)}."
        for rank, s in known.items()
        if s.left and s.place
    ]
    if sentences:
        return " ".join(sentences)
    return _waiting(known)


def _waiting(known: dict[int, Standing]) -> str:
    """Of ranks that all speak: who is not in a call while others are."""
    calling = {rank: s for rank, s in known.items() if s.calling and not (s.left or s.place)}
    if not calling:
        return _nobody(known)
    furthest = max(s.begun or 0 for s in calling.values())
    # Who has seen a call finish was past all its collectives, and so was everybody in them.
    call = 1 + max(s.finished for s in known.values() if s.finished is not None)
    sentences: list[str] = []
    between = [rank for rank, s in known.items() if not (s.calling or s.left or s.place)]
    for name in sorted({_next(known[rank]) for rank in between}):
        ranks = [rank for rank in between if _next(known[rank]) == name]
        verb, its = ("has", "its") if len(ranks) == 1 else ("have", "their")
        sentences.append(
            f"{_ranks(ranks)} {verb} not begun {name}: stuck between calls, in {its} data or on "
            f"{its} host."
        )
    for rank, standing in known.items():
        begun = standing.begun
        if standing.left and (begun is None or begun < furthest):
            sentences.append(f"Rank {rank} has left the loop and does not make call {furthest}.")
        elif standing.place and (begun is None or begun < furthest):
            sentences.append(
                f"Rank {rank} has not begun {_next(standing)}: it is in {standing.place}."
            )
        elif rank in calling and begun is not None and begun < call:
            sentences.append(f"Rank {rank} is still in call {begun}, which others have finished.")
    if sentences:
        return " ".join(sentences)
    if len(known) == 1:
        return (
            f"Call {call} has begun and not finished: the device hangs, or the call takes longer "
            "than the limit."
        )
    return (
        f"All have begun call {call} and none has seen it finish: a collective hangs on the "
        "network or a device."
    )


def _nobody(known: dict[int, Standing]) -> str:
    """Of ranks none of which is in a call: who is in what else."""
    here = {rank: s for rank, s in known.items() if not s.left}
    places = sorted({s.place for s in here.values() if s.place})
    between = [rank for rank, s in here.items() if not s.place]
    if not places:
        who = "No rank is in a call" if len(known) > 1 else _ranks(between) + " is in no call"
        its = "their" if len(known) > 1 else "its"
        return f"{who}: stuck between calls, in {its} data or on {its} host."
    sentences: list[str] = []
    for place in places:
        inside = [rank for rank, s in here.items() if s.place == place]
        sentences.append(f"{_ranks(inside)} {_be(inside)} in {place}.")
    if between:
        stuck = "stuck between calls, in the data or on the host"
        sentences.append(f"{_ranks(between)} {_be(between)} not: {stuck}.")
    return " ".join(sentences)


def _next(standing: Standing) -> str:
    return "a first call" if standing.begun is None else f"call {standing.begun + 1}"


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _silence(view: View) -> str:
    if view.standing is None or view.silence is None:
        return f"Rank {view.rank} was never heard of: it has not come to the loop."
    return (
        f"Rank {view.rank} was last heard of {view.silence:.1f} s ago, {_where(view.standing)}: "
        "stopped, frozen machine or cut network."
    )


def _where(standing: Standing) -> str:
    if standing.place and not standing.left:
        return f"in {standing.place}"
    if standing.begun is None:
        return "before its first call"
    return f"{'in' if standing.calling else 'after'} call {standing.begun}"


def _ranks(ranks: Sequence[int]) -> str:
    names = [str(rank) for rank in ranks[:_NAMES]]
    if len(ranks) > _NAMES:
        names.append(f"{len(ranks) - _NAMES} more")
    if len(names) == 1:
        return f"Rank {names[0]}"
    return f"Ranks {', '.join(names[:-1])} and {names[-1]}"


def _table(views: Sequence[View], rank: int) -> list[str]:
    rows = sorted(views, key=lambda view: view.rank)
    if len(rows) > _ROWS:
        # Those that are furthest behind come first: they are what one looks for.
        rows = sorted(rows, key=_progress)
    titles = ("rank", "begun", "finished", "no progress for", "heard of", "")
    cells = [titles, *(_row(view, rank) for view in rows[:_ROWS])]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    hidden = len(rows) - _ROWS
    return [f"  {line}" for line in lines] + ([f"  and {hidden} more"] if hidden > 0 else [])


def _progress(view: View) -> tuple[int, int]:
    standing = view.standing
    if standing is None or standing.begun is None:
        return (-1, -1)
    return (standing.begun, -1 if standing.finished is None else standing.finished)


def _row(view: View, rank: int) -> tuple[str, ...]:
    standing = view.standing
    if standing is None or view.silence is None:
        return (str(view.rank), "-", "-", "-", "never", "")
    return (
        str(view.rank),
        "-" if standing.begun is None else str(standing.begun),
        "-" if standing.finished is None else str(standing.finished),
        f"{standing.quiet + view.silence:.1f} s",
        "itself" if view.rank == rank else f"{view.silence:.1f} s ago",
        " ".join(["left"] * standing.left + [standing.place] * bool(standing.place)),
    )
