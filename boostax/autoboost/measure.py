"""Which techniques pay on this model, these batches and these devices: tried, not guessed."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from boostax._core import axes, checks
from boostax.autoboost import verdict
from boostax.autoboost.candidates import Change, default_candidates
from boostax.autoboost.config import BoostConfig
from boostax.autoboost.measurement import Measurement, Trial
from boostax.autoboost.trial import Candidate, Setting

PyTree = Any

_WHO = "auto"
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
      >>> from boostax.autoboost.measure import measure
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
    setting = Setting(
        loss_fn=loss_fn,
        inner=inner,
        params=params,
        batch=batch,
        held_out=held_out,
        steps=calls,
        clock=clock,
        of_step={"mesh": mesh, "axis_name": axis_name, "has_aux": has_aux, **options},
        of_init={"key": key, "model_state": model_state},
    )
    if candidates is None:
        candidates = default_candidates(setting, base)
    baseline = Candidate(_BASELINE, base, setting)
    near = calls - window, min(calls + window, baseline.most)
    noise = verdict.noise_of(baseline.losses, *map(baseline.after, near))
    built, refused = _built(setting, base, {name: {name: x} for name, x in candidates.items()})
    rows = verdict.compared([baseline, *built], noise, repeats)
    best = [x.name for x in verdict.ranked(rows, noise) if x.verdict == "recommended"]
    joined = verdict.together(best, candidates, base)
    if len(joined) > 1:
        built, more = _built(setting, base, {" + ".join(joined): joined})
        refused += more
        rows += verdict.compared([baseline, *built], noise, repeats)[1:] if built else []
    return Measurement(tuple(verdict.ranked([*rows, *refused], noise)), noise, calls)


def _built(
    setting: Setting, base: BoostConfig, asked: Mapping[str, Mapping[str, Change]]
) -> tuple[list[Candidate], list[Trial]]:
    """Those that can be, and rows that say why the others cannot."""
    built: list[Candidate] = []
    refused: list[Trial] = []
    for name, changes in asked.items():
        config = None
        try:
            config = verdict.merged(changes, base)
            if config.less_bn != base.less_bn:
                hint = "It changes the model: boost.model makes one to measure by itself."
                got = config.less_bn
                raise ValueError(checks.message(_WHO, "less_bn", "left alone", got, hint))
            built.append(Candidate(name, config, setting))
        except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            reason, *_ = str(error).splitlines() or [type(error).__name__]
            refused.append(Trial(name, config, "refused", reason.rstrip(".")))
    return built, refused


def _split(
    batches: Any, held_out: Any, calls: int
) -> tuple[Callable[[int], PyTree], Sequence[PyTree]]:
    """Batches to train on, by index, and those to judge by."""
    given = held_out is not None
    hint = "A standard error takes two; None keeps some of batches for it."
    if given and not _listed(held_out):
        raise TypeError(checks.message(_WHO, "held_out", "a list of batches", held_out, hint))
    if given and len(held_out) < 2:
        got = len(held_out)
        raise ValueError(checks.message(_WHO, "held_out", "at least 2 batches", got, hint))
    if callable(batches):
        judged = held_out if given else [batches(4 * calls + i) for i in range(_HELD_OUT)]
        return batches, judged
    if not _listed(batches):
        allowed = "a list of batches, or a function"
        raise TypeError(checks.message(_WHO, "batches", allowed, batches, _HINT))
    kept = 0 if given else max(2, len(batches) // 4)
    if len(batches) <= kept:
        allowed, got = f"more than {kept} batches", len(batches)
        hint = "Without held_out the last quarter is kept for it, two at least." if kept else _HINT
        raise ValueError(checks.message(_WHO, "batches", allowed, got, hint))
    trained = batches[: len(batches) - kept]
    return lambda index: trained[index % len(trained)], held_out if given else batches[-kept:]


def _listed(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _check(base: Any, candidates: Any, steps: Any, repeats: Any, clock: Any) -> None:
    if not isinstance(base, BoostConfig):
        hint = "auto(...).config is one."
        raise TypeError(checks.message(_WHO, "base", "a BoostConfig", base, hint))
    if base.accumulate is not None:
        hint = "Candidates are compared after windows of a known length."
        checks.positive_int(_WHO, "base.accumulate.every", base.accumulate.every, hint)
    checks.positive_int(_WHO, "steps", steps, "It counts calls; 20 is the default.")
    hint = "It counts rounds of timing, and a standard error takes two; 10 is the default."
    if checks.positive_int(_WHO, "repeats", repeats, hint) < 2:
        raise ValueError(checks.message(_WHO, "repeats", "at least 2", repeats, hint))
    if not callable(clock):
        hint = "time.perf_counter is the default."
        raise TypeError(checks.message(_WHO, "clock", "a function", clock, hint))
    if jax.process_count() > 1:
        hint = "Their clocks would disagree on the steps to make; measure on one host."
        got = jax.process_count()
        raise ValueError(checks.message(_WHO, "jax.process_count()", "1", got, hint))
    if candidates is None:
        return
    allowed = "a mapping of names to changes"
    hint = "Such as {'narrow': {'policy': 'O1'}}; None tries the usual ones."
    if not isinstance(candidates, Mapping) or not all(
        isinstance(name, str) and isinstance(change, Mapping) for name, change in candidates.items()
    ):
        raise TypeError(checks.message(_WHO, "candidates", allowed, candidates, hint))
    if _BASELINE in candidates:
        allowed = f"named other than {_BASELINE!r}"
        raise ValueError(checks.message(_WHO, "candidates", allowed, sorted(candidates), hint))
