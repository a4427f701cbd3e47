"""The command ``boostax``: audit a program; train a workload, compare, explain, launch."""

import sys
from collections.abc import Sequence

_NEEDED = ("flax", "matplotlib", "orbax.checkpoint", "rich", "sklearn", "tyro")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; those of the process by default.

    Returns:
      The exit code: 0 done or stopped by a signal with everything saved, 1 refused with a message
      on stderr. Arguments that do not parse exit with 2.
    """
    from importlib.util import find_spec

    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["audit"]:
        from boostax.run.cli.audit import main as audit

        return audit(given[1:])

    missing = [name for name in _NEEDED if find_spec(name.split(".")[0]) is None]
    if missing:
        print(
            f"boostax: the command line needs {', '.join(missing)}, which is not installed: "
            "pip install 'boostax[cli]'",
            file=sys.stderr,
        )
        return 1
    from boostax.run.cli.commands import run

    return run(given)
