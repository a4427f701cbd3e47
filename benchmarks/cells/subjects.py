"""All subjects by name."""

from cells.ours import SUBJECTS
from cells.peers import PEERS
from cells.subject import Subject

EVERYONE: list[Subject] = [*SUBJECTS, *PEERS]


def named(name: str) -> Subject:
    """The subject of that name."""
    return next(subject for subject in EVERYONE if subject.name == name)
