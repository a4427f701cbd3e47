# SPDX-License-Identifier: Apache-2.0
"""Laws about pairs of different programs with equal results, drawn at random from a seed."""

import functools
import importlib.util
import pickle
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax._core import norms, trees
from boostax._core.handshake import assume_scaled
from boostax._core.replicas import is_per_replica, reshard_state
from boostax._core.types import PyTree
from boostax.accumulate.window import accumulate
from boostax.config.migrate import holds, migrate_state
from boostax.precision.loss_scale import dynamic_loss_scale, static_loss_scale
from boostax.testing import _arrays as arrays
from boostax.testing import _case
from boostax.testing._case import Carry, Case, follow, laws_in
from boostax.testing._mapped import AXIS


class Setting(NamedTuple):
    """A case with the number of replicas and the random numbers of a law.

    Attributes:
      case: the transformation.
      rng: the generator of all random choices.
      replicas: ``None`` on one device, else the number of replicas under ``jax.vmap`` with a named
        axis.
      axis: the axis of the replicas.
      tx: the case's transformation around an optimizer that, unlike Adam, depends on the scale of
        gradients.
    """

    case: Case
    rng: np.random.Generator
    replicas: int | None
    axis: str | None
    tx: optax.GradientTransformationExtraArgs

    @classmethod
    def draw(cls, case: Case, seed: int, replicas: int | None = None) -> "Setting":
        """Choose one device or several replicas at random; a case that reduces gets replicas."""
        rng = np.random.default_rng(seed)
        count = int(rng.integers(2, 5)) if case.distributed else None
        count = count if case.reduces or rng.random() < 0.3 else None
        replicas = replicas or count
        rate = optax.linear_schedule(1e-1, 1e-3, 20)
        steep = optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(rate, momentum=0.9))
        tx = case.mapped(AXIS, steep) if replicas else case.single(steep)
        return cls(case, rng, replicas, AXIS if replicas else None, tx)

    def grads(self, count: int) -> list[PyTree]:
        """Draw gradients for ``count`` calls: multiples of 1/8, whose sums and halves are exact."""
        lead = () if self.replicas is None else (self.replicas,)
        draw = self.rng.standard_normal
        params = arrays.even_params()
        return [
            jax.tree.map(lambda p: jnp.float32(np.round(8 * draw((*lead, *p.shape))) / 8), params)
            for _ in range(count)
        ]

    def program(self, tx: optax.GradientTransformation) -> tuple[Callable[..., Carry], Carry]:
        """Compile ``step(params, state, grads)``, and make the first params and state."""

        def step(params: PyTree, state: PyTree, grads: PyTree) -> Carry:
            if self.case.scaled is not None:
                grads = self.case.scaled(grads, state)
            else:
                # A scaled loss would multiply the gradients by the scales, so this law multiplies
                # the gradients, too.
                product = functools.reduce(jnp.multiply, [x.scale for x in _scalers(state)], 1.0)
                grads = jax.tree.map(lambda g: g * product, grads)
            return _case.applied(tx)(params, state, assume_scaled(grads, state))

        start = _case.start(self.case, tx, self.replicas)
        if self.replicas is None:
            return jax.jit(step), start
        ax = jax.tree.map(lambda x: 0 if is_per_replica(x) else None, start, is_leaf=is_per_replica)
        return jax.jit(jax.vmap(step, in_axes=(*ax, 0), out_axes=ax, axis_name=AXIS)), start


def _scalers(state: PyTree) -> list[PyTree]:
    return [x for x in trees.state_nodes(state) if holds(type(x)).scale]


def skip_inserted_anywhere_never_was(case: Case, seed: int = 0) -> None:
    """Promise 5: bad calls between good calls do not change the result of a run."""
    setting = Setting.draw(case, seed)
    rng = setting.rng
    good = setting.grads(3 * case.calls)
    step, start = setting.program(setting.tx)
    expected = follow(step, start, good)
    # Positions are multiples of ``case.skip_calls``, because one bad call drops all calls of a
    # window that is around a scaler.
    chosen = {int(rng.choice(range(0, len(good) + 1, case.skip_calls))) for _ in range(2)}
    calls: list[PyTree] = []
    for index in range(len(good) + 1):
        if index in chosen:
            block = setting.grads(case.skip_calls)
            bad = int(rng.integers(len(block)))
            at = tuple(int(rng.integers(size)) for size in jax.tree.leaves(block[bad])[0].shape)
            block[bad] = arrays.poison(block[bad], case.bad[int(rng.integers(len(case.bad)))], at)
            calls += block
        calls += good[index : index + 1]
    params, state = follow(step, start, calls)
    arrays.assert_same(params, expected[0], "params")
    arrays.assert_same(case.skip_view(state), case.skip_view(expected[1]), "state")


def scale_changes_nothing(case: Case, seed: int = 0) -> None:
    """Promise 12: every power of two as loss scale gives the same params."""
    setting = Setting.draw(case, seed)
    grads = setting.grads(2 * case.calls)
    scale = 2.0 ** int(setting.rng.integers(1, 16))
    step, (params, state) = setting.program(setting.tx)
    expected = follow(step, (params, state), grads)
    if _scalers(expected[1]):
        program = step, (params, arrays.with_scale(state, scale))
    else:
        program = setting.program(static_loss_scale(setting.tx, scale, axis_name=setting.axis))
    arrays.assert_close(follow(*program, grads)[0], expected[0], "params")


def window_is_one_big_batch(case: Case, seed: int = 0) -> None:
    """Promise 14: a window of micro-batches gives the result of one call with the mean gradient.

    The window must average, because the loss of each micro-batch is a mean.
    """
    setting = Setting.draw(case, seed)
    every = int(setting.rng.choice([2, 4]))
    grads = setting.grads(2 * case.calls * every)
    windows = [grads[i : i + every] for i in range(0, len(grads), every)]
    means = [jax.tree.map(lambda *g: sum(g) / every, *window) for window in windows]
    expected = follow(*setting.program(setting.tx), means)
    tx = accumulate(setting.tx, every, axis_name=setting.axis)
    arrays.assert_close(follow(*setting.program(tx), grads)[0], expected[0], "params")


def nestings_of_scaler_and_window_agree(case: Case, seed: int = 0) -> None:
    """Promise 12: a window in a scaler equals a scaler in a window, if nothing overflows."""
    setting = Setting.draw(case, seed)
    every = int(setting.rng.integers(2, 4))
    first = 2.0 ** int(setting.rng.integers(16))
    scale = functools.partial(dynamic_loss_scale, init_scale=first, axis_name=setting.axis)
    window = functools.partial(accumulate, every=every, axis_name=setting.axis)
    grads = setting.grads(2 * case.calls * every)
    inside = follow(*setting.program(scale(window(setting.tx))), grads)
    around = follow(*setting.program(window(scale(setting.tx))), grads)
    arrays.assert_close(inside[0], around[0], "params")


def cut_anywhere_is_whole(case: Case, seed: int = 0) -> None:
    """Promise 8: saving and loading at any call, also in a window, changes no result.

    The law saves the state by pickle, and by Flax's serialization if Flax is installed.
    """
    setting = Setting.draw(case, seed)
    grads = setting.grads(3 * case.calls)
    step, start = setting.program(setting.tx)
    expected = follow(step, start, grads)
    at = int(setting.rng.integers(1, len(grads)))
    half = jax.device_get(follow(step, start, grads[:at]))
    loaded = [pickle.loads(pickle.dumps(half))]
    if importlib.util.find_spec("flax"):
        from flax import serialization

        loaded.append(serialization.from_bytes(half, serialization.to_bytes(half)))
    for carry in loaded:
        result = follow(step, jax.tree.map(jnp.asarray, carry), grads[at:])
        arrays.assert_same(result, expected, f"cut at call {at}")


def migrated_there_and_back_never_moved(case: Case, seed: int = 0) -> None:
    """Promise 8: a migration to a chain with one more wrapper and back returns a bit-equal state.

    Training in the other chain is tested in tests/test_migrate.py.
    """
    setting = Setting.draw(case, seed)
    tx = setting.tx
    others = [optax.chain(tx), optax.named_chain(("it", tx)), accumulate(tx, 1)]
    step, start = setting.program(tx)
    if not _scalers(start[1]):
        others.append(static_loss_scale(tx, 8.0, axis_name=setting.axis))
    params, state = follow(step, start, setting.grads(case.calls * int(setting.rng.integers(1, 4))))
    other = others[int(setting.rng.integers(len(others)))]
    migrated, report = migrate_state(state, other, params, replicas=setting.replicas)
    assert not report.dropped, str(report)
    back, _ = migrate_state(migrated, tx, params, replicas=setting.replicas)
    arrays.assert_same(back, state, "state")


def replicas_there_and_back_never_moved(case: Case, seed: int = 0) -> None:
    """Promise 8: resharding to 2 or 4 times as many replicas and back returns a bit-equal state.

    The replicas are in one process and one placement; ``jax.device_put`` between placements is
    tested in tests/test_kill_placements.py.
    """
    setting = Setting.draw(case, seed, replicas=2)
    calls = int(setting.rng.integers(1, 3 * case.calls))
    carry = follow(*setting.program(setting.tx), setting.grads(calls))
    more = setting._replace(replicas=int(setting.rng.choice([4, 8])))
    resharded = reshard_state(carry, more.replicas or 0)
    arrays.assert_same(reshard_state(resharded, 2), carry, "there and back")
    # Training must continue with more replicas. In the state, only NaN is an error, because a limit
    # that is not set is infinite.
    params, state = follow(more.program(more.tx)[0], resharded, more.grads(case.calls))
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    assert norms.all_finite(params) and not any(jnp.isnan(x).any() for x in floats), "there"


PAIR_LAWS = laws_in(globals())
MAPPED_PAIRS = (replicas_there_and_back_never_moved,)
