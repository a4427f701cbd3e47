"""A pytest plugin that puts boostax into what a suite of others imports, before it is collected.

``FOREIGN`` says how: ``scaler`` and ``window`` wrap every optimizer that Optax makes in one that is
set to do nothing; ``compat`` puts the forms of ``boostax.compat`` in the places of theirs; ``nnx``
does so with ``boostax.nnx.Optimizer``; ``mpx`` lets boostax's scaler do what its scale does.
"""

import functools
import inspect
import os
import sys

import jax
import jax.numpy as jnp
import optax
from optax import contrib
from packaging.version import Version

import boostax
from boostax import compat
from boostax.compat import scales

WRAPPERS = {
    "scaler": lambda tx: boostax.static_loss_scale(tx, 1.0),
    "window": lambda tx: boostax.accumulate(tx, 1),
}


def into_optax(wrap):
    """In every namespace in which its suites, and others', look for optimizers."""
    for space in (optax, contrib, sys.modules["optax._src.alias"]):
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


def into_everything():
    """The forms of ``boostax.compat`` in the places of what they are forms of."""
    from jmp._src import loss_scale as jmp
    from optax.transforms import _accumulation, _conditionality, _freezing

    places = {
        "MultiSteps": (optax, _accumulation),
        "apply_if_finite": (optax, _conditionality),
        "selective_transform": (optax, _freezing),
        "NoOpLossScale": (jmp,),
        "StaticLossScale": (jmp,),
        "DynamicLossScale": (jmp,),
    }
    for name, spaces in places.items():
        for space in spaces:
            setattr(space, name, getattr(compat, name))
    jmp.all_finite = boostax.precision.all_finite


def into_nnx():
    """``nnx.Optimizer``, and what Flax derives from it."""
    from flax import nnx

    from boostax.nnx import Optimizer

    derived = nnx.ModelAndOptimizer
    derived.__bases__ = tuple(Optimizer if x is nnx.Optimizer else x for x in derived.__bases__)
    nnx.Optimizer = Optimizer


def into_mpx():
    """``DynamicLossScaling`` and ``all_finite``."""
    import equinox as eqx
    import mpx

    def adjust(self, finite):
        settings = self.period, self.factor, 1 / self.factor, self.min_loss_scaling
        top = float(jnp.finfo(jnp.float16).max)
        new = scales.adjusted(self.loss_scaling, self.counter, finite, settings, top)
        return eqx.tree_at(lambda x: (x.loss_scaling, x.counter), self, new)

    mpx.DynamicLossScaling.unscale = lambda self, tree: scales.unscaled(tree, self.loss_scaling)
    mpx.DynamicLossScaling.adjust = adjust
    mpx.all_finite = boostax.precision.all_finite


class Comparable(str):
    """A version that is compared as one: as text, 0.10 is before 0.7, and Optax skips its tests."""

    def __lt__(self, other):
        return Version(self) < Version(other)


jax.__version__ = Comparable(jax.__version__)
how = os.environ.get("FOREIGN", "")
if how in WRAPPERS:
    into_optax(WRAPPERS[how])
elif how:
    {"compat": into_everything, "nnx": into_nnx, "mpx": into_mpx}[how]()
