"""Files of arrays that peers, runs and processes wrote."""

import pathlib

import numpy as np

GOLDEN = pathlib.Path(__file__).parent / "golden"


def load_arrays(path):
    """Return the arrays of a file by name, and close the file."""
    with np.load(path) as file:
        return dict(file)
