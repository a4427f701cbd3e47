# SPDX-License-Identifier: Apache-2.0
"""The command line of ``boostax``: ``boostax audit``, and hints for removed commands."""

import sys
from collections.abc import Sequence

from boostax._core.checks import replacement


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the name of the program; by default those of the process,
        ``sys.argv[1:]``.

    Returns:
      The exit code. It is 0 on success, 1 if the program exceeds a limit in the arguments or cannot
      be audited (stderr shows the reason), and 2 if the arguments do not parse or the command was
      removed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-h"], ["--help"]):
        arguments = ["audit", "--help"]
    if arguments[:1] != ["audit"]:
        new = replacement(f"boostax {arguments[0]}") if arguments else None
        print(f"boostax: {new or 'the command is boostax audit module:function.'}", file=sys.stderr)
        return 2
    from boostax.auditing.command import print_audit

    return print_audit(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
