# SPDX-License-Identifier: Apache-2.0
"""The command ``boostax``: audit a program; train a workload, compare, explain, launch."""

import sys
from collections.abc import Sequence

from boostax.run.cli.refusal import Refusal, complain


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; those of the process by default.

    Returns:
      The exit code: 0 done or stopped by a signal with everything saved, 1 refused with a message
      on stderr. Arguments that do not parse exit with 2.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(given)
    except Refusal as refusal:
        complain(refusal)
        return 1


def _run(given: list[str]) -> int:
    if given[:1] == ["audit"]:
        from boostax.run.cli.audit import run as audit

        return audit(given[1:])
    try:
        from boostax.run.cli.commands import run
    except ImportError as error:
        said = f"the command line lacks a package: {error}. pip install 'boostax[cli]' brings it."
        raise Refusal(said) from error
    return run(given)
