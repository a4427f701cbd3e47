"""Files of arrays that peers, runs and processes wrote, and states as files give them back."""

import pathlib

import numpy as np

GOLDEN = pathlib.Path(__file__).parent / "golden"


def load_arrays(path):
    """Return the arrays of a file by name, and close the file."""
    with np.load(path) as file:
        return dict(file)


def plain(tree):
    """Return a state as serialisers write it, and as Orbax restores it without a target."""
    if hasattr(tree, "_asdict"):
        return {name: plain(value) for name, value in tree._asdict().items()}
    return [*map(plain, tree)] if isinstance(tree, tuple) else tree
