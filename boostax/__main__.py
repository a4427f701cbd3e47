# SPDX-License-Identifier: Apache-2.0
"""The command ``boostax``: it audits a program, and answers for commands that are gone."""

import sys
from collections.abc import Sequence

from boostax._core.late import told
from boostax.inspect.command import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; those of the process by default.

    Returns:
      The exit code: 0 done; 1 a limit is passed, or refused with a message on stderr; 2 for
      arguments that do not parse and for a command that is gone.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] in (["-h"], ["--help"]):
        given = ["audit", "--help"]
    if given[:1] != ["audit"]:
        gone = told(f"boostax {given[0]}") if given else None
        said = gone or "the command is boostax audit module:function."
        print(f"boostax: {said}", file=sys.stderr)
        return 2
    return run(given[1:])


if __name__ == "__main__":
    sys.exit(main())
