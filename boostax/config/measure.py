# SPDX-License-Identifier: Apache-2.0
"""Which techniques pay on this model, these batches and these devices: tried, not guessed."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from boostax._core import axes, checks
from boostax.config import verdict
from boostax.config.candidates import Change, default_candidates
from boostax.config.config import BoostConfig
from boostax.config.measurement import Measurement, Trial
from boostax.config.trial import Candidate, Setting

PyTree = Any

_WHO = "auto"
_require = functools.partial(checks.require, _WHO)
_BASELINE = "baseline"
_HELD_OUT = 8
_HINT = "They are batches such as the step takes, in a list, or a function of the call's index."


def measure(
    loss_fn: Callable[..., Any],
    inner: optax.GradientTransformation,
    params: PyTree,
    batches: Sequence[PyTree] | Callable[[int], PyTree],
    *,
    mesh: Mesh | None = None,
    axis_name: axes.AxisName | None = None,
    has_aux: bool = False,
    base: BoostConfig | None = None,
    candidates: Mapping[str, Change] | None = None,
    held_out: Sequence[PyTree] | None = None,
    steps: int = 20,
    repeats: int = 10,
    key: jax.Array | None = None,
    model_state: PyTree = None,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> Measurement:
    r"""Try techniques on a model for a few steps each, and say which pay: ``auto("measure", ...)``.

    Each candidate is ``base`` with one change. All start from the same params and see the same
    batches in the same order, from the first. Steps are timed by turns, a few calls of each in
    every round: with :math:`t` the seconds of a call and :math:`T` those of the baseline in the
    same round, the ratio is :math:`\rho = \operatorname{median}(t / T)`. The baseline makes
    ``steps`` calls and the candidate as many as fit in that time, :math:`n = \text{steps} / \rho`,
    but no less than a quarter and no more than four times of ``steps``. Then ``loss_fn`` itself, in
    f32 and without any technique, judges the params on held-out batches, the difference taken batch
    by batch.

    Two losses differ if they do by more than two standard errors (of the batches, and of the time),
    and by more than one step of the optimizer changes in the baseline's. Recommended is what ends
    lower in equal time, or as low while it saves 10% of time, memory or bytes sent and is not 10%
    slower. Of all that is recommended, the best of each part go together in one configuration,
    which is tried like the others. The learning rate is yours: a technique that wants another is
    tried with this one.

    A few steps only say so much. What pays late (freezing for good, residuals) is judged too
    harshly, what harms late too mildly; and the best of many is partly the luckiest. Compiling does
    not count as time. Steps that a loss scaler skips before its first do not count either: a run
    makes them once. Bytes cost what they cost on these links; for others see
    ``boostax.inspect.break_even``.

    Args:
      loss_fn: as in ``make_train_step``.
      inner: the optimizer, without collectives.
      params: to start from. They are not donated.
      batches: global batches, taken round and round; or a function of the call's index.
      mesh: as in ``make_train_step``. The devices of one process.
      axis_name: as there.
      has_aux: as there.
      base: what the candidates change; ``None`` for ``BoostConfig()``.
      candidates: name -> change, as ``BoostConfig.from_dict`` reads it; ``None`` for bfloat16,
        float16 with a dynamic scale, four times the micro-batches, centralization, freezing by
        intervals where there are two layers at least; and with several replicas a mean in bfloat16,
        ``"int8"``, ``"top-k"`` at 1%, ``"power-sgd"``, ``"adasum"``, ``"adasum-delta"`` and
        ``"local"`` every 4. Not among them is what changes the batch (``accumulate``), the tuning
        (``clip``), the model (``less_bn``, refused in any case), or freezes for good, late in a run
        whose length is not known here. What cannot be built or run is a row that says why.
      held_out: two batches or more to judge by; ``None`` for the last quarter of ``batches``, two
        at least, which are then not trained on; of a function, the eight from index ``4 * steps``.
      steps: calls of the baseline; rounded up to whole windows of ``base``.
      repeats: rounds of timing, two at least; each begins where the ``steps`` calls ended.
      key: PRNG key, as in ``TrainStep.init``; the same for all.
      model_state: as there. Judged with what training made of it.
      clock: seconds; another one for tests.
      **options: further ones of ``make_train_step``.

    Returns:
      A ``Measurement``. Cost: for each candidate, its compilation, ``steps`` to ``4 * steps`` calls
      and a few per round (with freezing ``steps``). The host holds a copy of each state; on the
      device there is one at a time.

    Raises:
      ValueError, TypeError: an argument out of range, several processes; and whatever the
        baseline raises.

    Example:
      >>> import itertools, jax.numpy as jnp, optax
      >>> from boostax.config.measure import measure
      >>> loss = lambda w, x: jnp.mean((x @ w["in"] @ w["out"] - 1) ** 2)
      >>> w = {"in": jnp.full((4, 4), 0.1), "out": jnp.full((4, 1), 0.1)}
      >>> batches = [jnp.full((8, 4), 1.0 + i / 8) for i in range(8)]
      >>> tried = {"clipped to nothing": {"clip": 1e-6}, "no policy": {"policy": "O9"}}
      >>> seconds = itertools.count()  # of a clock for which all are alike
      >>> found = measure(loss, optax.sgd(0.1), w, batches, candidates=tried, steps=4, repeats=2,
      ...                 clock=lambda: float(next(seconds)))
      >>> for row in found.rows:
      ...     print(row.name, "->", row.verdict)
      baseline -> baseline
      clipped to nothing -> not recommended
      no policy -> refused

    References:
      Dehghani et al., The Efficiency Misnomer, https://arxiv.org/abs/2110.12894, 2022: cost
      indicators contradict each other, so all are given.
    """
    base = BoostConfig() if base is None else base
    _check(base, candidates, steps, repeats, clock)
    checks.transformation(_WHO, "inner", inner)
    window = 1 if base.accumulate is None else base.accumulate.every
    calls = -(-steps // window) * window
    batch, held_out = _split(batches, held_out, calls)
    of_step = {"mesh": mesh, "axis_name": axis_name, "has_aux": has_aux, **options}
    of_init = {"key": key, "model_state": model_state}
    setting = Setting(loss_fn, inner, params, batch, held_out, calls, clock, of_step, of_init)
    if candidates is None:
        candidates = default_candidates(setting, base)
    baseline = Candidate(_BASELINE, base, setting)
    near = calls - window, min(calls + window, baseline.most)
    noise = verdict.noise_of(baseline.losses, *map(baseline.after, near))
    refused: list[Trial] = []

    def built(name: str, changes: Mapping[str, Change]) -> list[Candidate]:
        """The candidate; or none, and a row that says why it cannot be."""
        config = None
        try:
            config = verdict.merged(changes, base)
            hint = "It changes the model: boost.model makes one to measure by itself."
            norms = config.less_bn
            _require("less_bn", norms, "left alone", norms == base.less_bn, hint)
            return [Candidate(name, config, setting)]
        except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            reason, *_ = str(error).splitlines() or [type(error).__name__]
            refused.append(Trial(name, config, "refused", reason.rstrip(".")))
            return []

    tried = [each for name, x in candidates.items() for each in built(name, {name: x})]
    rows = verdict.compared([baseline, *tried], noise, repeats)
    best = [x.name for x in verdict.ranked(rows, noise) if x.verdict == "recommended"]
    joined = verdict.together(best, candidates, base)
    if len(joined) > 1:
        tried = built(" + ".join(joined), joined)
        rows += verdict.compared([baseline, *tried], noise, repeats)[1:] if tried else []
    return Measurement(tuple(verdict.ranked([*rows, *refused], noise)), noise, calls)


def _split(
    batches: Any, held_out: Any, calls: int
) -> tuple[Callable[[int], PyTree], Sequence[PyTree]]:
    """Batches to train on, by index, and those to judge by."""
    given = held_out is not None
    if given:
        hint = "A standard error takes two; None keeps some of batches for it."
        _require("held_out", held_out, "a list of batches", _listed(held_out), hint, TypeError)
        count = len(held_out)
        _require("held_out", count, "at least 2 batches", count >= 2, hint)
    if callable(batches):
        judged = held_out if given else [batches(4 * calls + i) for i in range(_HELD_OUT)]
        return batches, judged
    allowed = "a list of batches, or a function"
    _require("batches", batches, allowed, _listed(batches), _HINT, TypeError)
    count = len(batches)
    kept = 0 if given else max(2, count // 4)
    hint = "Without held_out the last quarter is kept for it, two at least." if kept else _HINT
    _require("batches", count, f"more than {kept} batches", count > kept, hint)
    trained = batches[: count - kept]
    return lambda index: trained[index % len(trained)], held_out if given else batches[-kept:]


def _listed(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _check(base: Any, candidates: Any, steps: Any, repeats: Any, clock: Any) -> None:
    fits = isinstance(base, BoostConfig)
    _require("base", base, "a BoostConfig", fits, "auto(...).config is one.", TypeError)
    if base.accumulate is not None:
        hint = "Candidates are compared after windows of a known length."
        checks.positive_int(_WHO, "base.accumulate.every", base.accumulate.every, hint)
    checks.positive_int(_WHO, "steps", steps, "It counts calls; 20 is the default.")
    hint = "It counts rounds of timing, and a standard error takes two; 10 is the default."
    checks.positive_int(_WHO, "repeats", repeats, hint)
    _require("repeats", repeats, "at least 2", repeats >= 2, hint)
    hint = "time.perf_counter is the default."
    _require("clock", clock, "a function", callable(clock), hint, TypeError)
    count = jax.process_count()
    hint = "Their clocks would disagree on the steps to make; measure on one host."
    _require("jax.process_count()", count, "1", count == 1, hint)
    hint = "Such as {'narrow': {'policy': 'O1'}}; None tries the usual ones."
    named: Any = {} if candidates is None else candidates
    fits = isinstance(named, Mapping) and all(
        isinstance(name, str) and isinstance(change, Mapping) for name, change in named.items()
    )
    _require("candidates", named, "a mapping of names to changes", fits, hint, TypeError)
    allowed, names = f"named other than {_BASELINE!r}", sorted(named)
    _require("candidates", names, allowed, _BASELINE not in named, hint)
