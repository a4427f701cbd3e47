# SPDX-License-Identifier: Apache-2.0
"""What the standings of all ranks say: a table, and whom the others wait for."""

import math
from collections.abc import Callable, Sequence

from boostax.run.cluster.board import Standing, View

# A run of a thousand would print a million lines.
_ROWS = 32
_NAMES = 8
_STUCK = "stuck between calls, in {0} data or on {0} host."


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
    over = [view.rank for view in views if view.rank != rank and view.standing.over]
    gone = f" {_ranks(over)} gave up." if over else ""
    moved = f"no progress for {own.quiet:.1f} s {_where(own)}"
    first = f"rank {rank}: {moved}; the limit is {allowed:g} s.{gone}"
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
    sentences = [
        _silence(view) for view in views if view.silence > limit / 2 and not view.standing.left
    ]
    sentences += [
        f"Rank {rank} has left the loop by {standing.place}, {_where(standing)}."
        for rank, standing, _ in views
        if standing.left and standing.place
    ]
    return " ".join(sentences or _waiting({view.rank: view.standing for view in views}))


def _waiting(known: dict[int, Standing]) -> list[str]:
    """Of ranks that all speak: who is not in a call while others are, or who is in what else."""
    here = {rank: s for rank, s in known.items() if not s.left}
    calling = {rank: s for rank, s in here.items() if s.calling and not s.place}
    between = _by({rank: s for rank, s in here.items() if not (s.calling or s.place)}, _next)
    places = _by({rank: s for rank, s in here.items() if s.place}, lambda s: s.place)
    if not calling and not places:
        if len(known) > 1:
            return [f"No rank is in a call: {_STUCK.format('their')}"]
        return [f"{_ranks(list(here), ' is')} in no call: {_STUCK.format('its')}"]
    if not calling:
        sentences = [f"{_ranks(ranks, ' is', ' are')} in {place}." for place, ranks in places]
        others = [rank for _, ranks in between for rank in ranks]
        if others:
            sentences.append(f"{_ranks(others, ' is', ' are')} not: {_STUCK.format('the')}")
        return sentences
    sentences = [
        f"{_ranks(ranks, ' has', ' have')} not begun {call}: "
        + _STUCK.format("its" if len(ranks) == 1 else "their")
        for call, ranks in between
    ]
    furthest = max(s.begun or 0 for s in calling.values())
    # Who has seen a call finish was past all its collectives, and so was everybody in them.
    call = 1 + max(s.finished for s in known.values() if s.finished is not None)
    for rank, s in known.items():
        behind = s.begun is None or s.begun < furthest
        if s.left and behind:
            sentences.append(f"Rank {rank} has left the loop and does not make call {furthest}.")
        elif s.place and behind:
            sentences.append(f"Rank {rank} has not begun {_next(s)}: it is in {s.place}.")
        elif rank in calling and s.begun is not None and s.begun < call:
            sentences.append(f"Rank {rank} is still in call {s.begun}, which others have finished.")
    if sentences:
        return sentences
    if len(known) == 1:
        hangs = "the device hangs, or the call takes longer than the limit."
        return [f"Call {call} has begun and not finished: {hangs}"]
    hangs = "a collective hangs on the network or a device."
    return [f"All have begun call {call} and none has seen it finish: {hangs}"]


def _by(
    standings: dict[int, Standing], key: Callable[[Standing], str]
) -> list[tuple[str, list[int]]]:
    """The ranks of each key, in the order of the keys."""
    keys = {rank: key(standing) for rank, standing in standings.items()}
    return [(name, [r for r in keys if keys[r] == name]) for name in sorted(set(keys.values()))]


def _next(standing: Standing) -> str:
    return "a first call" if standing.begun is None else f"call {standing.begun + 1}"


def _silence(view: View) -> str:
    if view.silence == math.inf:
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


def _ranks(ranks: Sequence[int], one: str = "", many: str = "") -> str:
    """The ranks in words, with the verb that goes with one of them or with several."""
    *names, last = map(str, ranks[:_NAMES])
    if len(ranks) > _NAMES:
        names, last = [*names, last], f"{len(ranks) - _NAMES} more"
    return f"Ranks {', '.join(names)} and {last}{many}" if names else f"Rank {last}{one}"


def _table(views: Sequence[View], rank: int) -> list[str]:
    rows = sorted(views, key=lambda view: view.rank)
    if len(rows) > _ROWS:
        # Those that are furthest behind come first: they are what one looks for.
        rows = sorted(rows, key=_progress)
    cells = [("rank", "begun", "finished", "no progress for", "heard of", "")]
    cells += [_row(view, rank) for view in rows[:_ROWS]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in cells]
    hidden = len(rows) - _ROWS
    return [f"  {line}" for line in lines] + ([f"  and {hidden} more"] if hidden > 0 else [])


def _progress(view: View) -> tuple[int, int]:
    begun, finished = view.standing.begun, view.standing.finished
    return (-1 if begun is None else begun, -1 if finished is None else finished)


def _row(view: View, rank: int) -> tuple[str, ...]:
    standing = view.standing
    if view.silence == math.inf:
        return (str(view.rank), "-", "-", "-", "never", "")
    calls = ("-" if call is None else str(call) for call in (standing.begun, standing.finished))
    quiet = f"{standing.quiet + view.silence:.1f} s"
    heard = "itself" if view.rank == rank else f"{view.silence:.1f} s ago"
    left = " ".join(["left"] * standing.left + [standing.place] * bool(standing.place))
    return (str(view.rank), *calls, quiet, heard, left)
