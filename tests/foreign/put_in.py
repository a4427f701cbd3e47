"""A pytest plugin that puts boostax into what a suite of others imports, before it is collected.

``FOREIGN`` says how: ``scaler`` and ``window`` wrap every optimizer that Optax makes in one that is
set to do nothing; ``jmp`` and ``mpx`` let boostax's scaler do what their scale does.
"""

import dataclasses
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
from boostax.testing import drawn

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


@functools.cache
def _adjust(period, factor, floor, ceiling):
    """The scale and its counter after a step, as a dynamic scaler has them in its state."""
    tx = boostax.dynamic_loss_scale(
        optax.identity(),
        init_scale=max(1.0, floor),
        growth_interval=int(period),
        growth_factor=factor,
        backoff_factor=1 / factor,
        min_scale=max(floor, 2.0**-120),
        max_scale=ceiling,
    )

    def step(scale, clean, finite):
        # By hand: the finiteness is all that there is of gradients.
        state = tx.init(jnp.float32(0.0))._replace(scale=scale, clean_steps=clean)
        _, state = drawn(tx).update(jnp.where(finite, 0.0, jnp.inf), state)
        return state.scale, state.clean_steps

    return jax.jit(step)


def _adjusted(scale, clean, finite, *settings):
    return _adjust(*map(float, settings))(jnp.float32(scale), jnp.int32(clean), finite)


def _unscaled(tree, scale):
    tx = boostax.static_loss_scale(optax.identity(), float(scale), skip_nonfinite=False)
    return drawn(tx).update(tree, tx.init(tree))[0]


def _scaled(tree, scale):
    tx = boostax.static_loss_scale(optax.identity(), float(scale))
    return jax.tree.map(lambda x: boostax.precision.scale_loss(x, tx.init(x)), tree)


def into_jmp():
    """``DynamicLossScale`` and ``all_finite``."""
    from jmp._src import loss_scale as jmp

    def adjust(self, finite):
        args = self.period, self.factor, self.min_loss_scale, 2.0**24
        scale, clean = _adjusted(self.loss_scale, self.counter, finite, *args)
        return dataclasses.replace(self, loss_scale=scale, counter=clean)

    for kind in (jmp.DynamicLossScale, jmp.StaticLossScale):
        kind.scale = lambda self, tree: _scaled(tree, self.loss_scale)
        kind.unscale = lambda self, tree: _unscaled(tree, self.loss_scale)
    jmp.DynamicLossScale.adjust = adjust
    jmp.all_finite = boostax.precision.all_finite


def into_mpx():
    """``DynamicLossScaling`` and ``all_finite``."""
    import equinox as eqx
    import mpx

    def adjust(self, finite):
        top = float(jnp.finfo(jnp.float16).max)
        args = self.period, self.factor, self.min_loss_scaling, top
        new = _adjusted(self.loss_scaling, self.counter, finite, *args)
        return eqx.tree_at(lambda x: (x.loss_scaling, x.counter), self, new)

    mpx.DynamicLossScaling.unscale = lambda self, tree: _unscaled(tree, self.loss_scaling)
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
    {"jmp": into_jmp, "mpx": into_mpx}[how]()
