"""A pytest plugin that puts boostax into what a suite of others imports, before it is collected.

``FOREIGN`` says how: ``scaler`` and ``window`` wrap every optimizer that Optax makes in one that is
set to do nothing; ``compat`` puts the forms of ``boostax.compat`` in the places of Optax's; ``nnx``
does so with ``boostax.nnx.Optimizer``.
"""

import functools
import inspect
import os
import sys

import jax
import optax
from packaging.version import Version

import boostax

WRAPPERS = {
    "scaler": lambda tx: boostax.static_loss_scale(tx, 1.0),
    "window": lambda tx: boostax.accumulate(tx, 1),
}


def into_optax(wrap):
    """In every namespace in which its suites, and others', look for optimizers."""
    for space in (optax, optax.contrib, sys.modules["optax._src.alias"]):
        for name, factory in inspect.getmembers(space, inspect.isfunction):
            takes = "learning_rate" in inspect.signature(factory).parameters
            if takes and not name.startswith("scale_by"):
                setattr(space, name, _wrapped(factory, wrap))


def _wrapped(factory, wrap):
    @functools.wraps(factory)
    def made(*args, **kwargs):
        tx = factory(*args, **kwargs)
        return wrap(tx) if isinstance(tx, optax.GradientTransformation) else tx

    return made


def into_compat():
    """The forms of ``boostax.compat`` in the places of Optax's."""
    from optax.transforms import _accumulation, _conditionality

    for name, space in (("MultiSteps", _accumulation), ("apply_if_finite", _conditionality)):
        for each in (optax, space):
            setattr(each, name, getattr(boostax.compat, name))


def into_nnx():
    """``nnx.Optimizer``, and what Flax derives from it."""
    from flax import nnx

    from boostax.nnx import Optimizer

    derived = nnx.ModelAndOptimizer
    derived.__bases__ = tuple(Optimizer if x is nnx.Optimizer else x for x in derived.__bases__)
    nnx.Optimizer = Optimizer


class Comparable(str):
    """A version that is compared as one: as text, 0.10 is before 0.7, and Optax skips its tests."""

    def __lt__(self, other):
        return Version(self) < Version(other)


jax.__version__ = Comparable(jax.__version__)
how = os.environ.get("FOREIGN", "")
if how in WRAPPERS:
    into_optax(WRAPPERS[how])
elif how:
    {"compat": into_compat, "nnx": into_nnx}[how]()
