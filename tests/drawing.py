"""How property tests draw: alike at every run, or anew in a search that keeps what it finds.

``make test`` draws from a fixed seed, so that a run is red for a reason and red again. ``make
test-long`` (the profile ``search``) draws anew and more. What fails there is printed, and kept in
``tests/examples``: every later run, quick or long, tries it first. Commit it with the fix.
"""

import hashlib
import inspect
import json
import os
import pathlib

from hypothesis import HealthCheck, database, seed, settings
from hypothesis.internal.conjecture import providers

SEARCH_FACTOR = 20  # a search draws so many times as many examples

# How long a draw takes says how busy the machine is.
HASTE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
COMMON = settings(derandomize=False, print_blob=True, **HASTE)
settings.register_profile("quick", COMMON)
settings.register_profile("search", COMMON)
settings.load_profile("quick")


def searching():
    """Whether pytest runs with ``--hypothesis-profile=search``."""
    return settings.get_current_profile_name().startswith("search")


# Hypothesis mixes in constants from the source of the modules imported so far. Which those are
# depends on the tests that ran before on the same worker, and so would the draws.
local_constants, none = providers._get_local_constants, providers.Constants()
providers._get_local_constants = lambda: local_constants() if searching() else none


class Kept(database.ExampleDatabase):
    """Failing draws of one test, a text file each: the choices, in order, as JSON.

    Hypothesis's own database would forget: it finds a test by its source, so any edit of the test
    loses its examples, and it deletes those that pass, which is what a fix makes of them. Here the
    folder has the test's name, its parameters share it, and only what shrinking replaces goes.

    ``derandomize``, ``--hypothesis-seed`` and a plain ``@seed`` switch replaying off, which is why
    ``draws`` sets the seed itself.
    """

    def __init__(self, folder: pathlib.Path):
        super().__init__()
        self.folder = folder
        self.found: set[tuple[bytes, bytes]] = set()

    def fetch(self, key):
        if not _secondary(key):
            for path in sorted(self.folder.glob("*.json")):
                yield database.choices_to_bytes(json.loads(path.read_text()))

    def save(self, key, value):
        if _secondary(key):
            return
        path = self._path(value)
        if not path.exists():
            self.found.add((key, value))
            self.folder.mkdir(parents=True, exist_ok=True)
            # Written whole: other workers read it.
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(database.choices_from_bytes(value)) + "\n")
            part.replace(path)

    def delete(self, key, value):
        """An example that passes now is one that a fix must not break."""

    def move(self, src, dest, value):
        """Shrinking has found a smaller one."""
        if (src, value) in self.found and _secondary(dest):
            self._path(value).unlink(missing_ok=True)

    def _path(self, value):
        return self.folder / f"{hashlib.sha256(value).hexdigest()[:16]}.json"


def _secondary(key):
    """Whether it is one of the further corpora that Hypothesis keeps of a test while it shrinks."""
    return key.endswith((b".secondary", b".pareto"))


def draws(examples):
    """The settings of a property test, above ``@given``: so many examples in a quick run."""

    def decorate(test):
        file = pathlib.Path(inspect.getfile(test))
        kept = Kept(file.parent / "examples" / file.stem / test.__name__)
        if searching():
            return settings(COMMON, max_examples=SEARCH_FACTOR * examples, database=kept)(test)
        kept = database.ReadOnlyDatabase(kept)
        return settings(COMMON, max_examples=examples, database=kept)(seed(0)(test))

    return decorate
