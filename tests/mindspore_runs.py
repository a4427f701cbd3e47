"""The runs that MindSpore's boost recorded, and its params as Flax lays them out."""

import functools
import json

import numpy as np
from recorded import GOLDEN, load_arrays

ABOUT = json.loads((GOLDEN / "mindspore_trajectories.json").read_text())
LEAVES = {"weight": "kernel", "bias": "bias", "gamma": "scale", "beta": "bias"}


@functools.cache
def arrays():
    return load_arrays(GOLDEN / "mindspore_trajectories.npz")


def split(flat, shapes):
    """Named arrays of a concatenation."""
    parts = np.split(flat, np.cumsum([np.prod(shape, dtype=int) for shape in shapes.values()])[:-1])
    return {name: x.reshape(s) for (name, s), x in zip(shapes.items(), parts, strict=True)}


def place(name):
    """Where a param of MindSpore's lies in Flax's tree."""
    *modules, leaf = name.split(".")
    return (*modules, "multiplier" if leaf == "multiplier" else LEAVES[leaf])


def turned(x):
    """Outputs last."""
    return np.moveaxis(x, (0, 1), (-1, -2)) if x.ndim > 1 else x


def at(tree, path):
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def farthest(params, flat, shapes):
    """The largest difference of a weight, infinite for NaN.

    In MindSpore the norms that LessBN takes out, which are not here, move by nothing but decay.
    """
    pairs = [(at(params, place(x)), turned(y), x) for x, y in split(flat, shapes).items()]
    gaps = [abs(x - y).max() for x, y, name in pairs if x is not None or ".bn1." not in name]
    return np.inf if np.isnan(gaps).any() else float(max(gaps))


def as_flax(named):
    tree = {}
    for name, x in named.items():
        *modules, leaf = place(name)
        below = functools.reduce(lambda node, key: node.setdefault(key, {}), modules, tree)
        below[leaf] = turned(x)
    return tree
