# SPDX-License-Identifier: Apache-2.0
"""One configuration on trial: built, compiled, trained for some calls, timed by turns."""

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax._core import checks, costs, trees
from boostax._core.variants import variants_of
from boostax.config.build import Boost
from boostax.config.config import BoostConfig
from boostax.inspect.targets import compile_program
from boostax.reduce.mean import all_reduce
from boostax.reduce.partial import partitioning
from boostax.train.compiled import TrainStep
from boostax.train.state import TrainState
from boostax.train.step import make_train_step

PyTree = Any
Losses = np.ndarray[Any, np.dtype[np.float64]]

# A loss scale of 2**24 is 1 after so many halvings and some.
_TRIES = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """What all candidates have in common.

    Attributes:
      loss_fn: as in ``measure``.
      inner: as there.
      params: to start from.
      batch: the batch of a call, by its index.
      held_out: batches to judge by.
      steps: calls of the baseline.
      clock: seconds.
      of_step: what ``make_train_step`` is told, whatever the configuration.
      of_init: what ``TrainStep.init`` is told: ``key`` and ``model_state``.
    """

    loss_fn: Callable[..., Any]
    inner: optax.GradientTransformation
    params: PyTree
    batch: Callable[[int], PyTree]
    held_out: Sequence[PyTree]
    steps: int
    clock: Callable[[], float]
    of_step: Mapping[str, Any]
    of_init: Mapping[str, Any]

    @functools.cached_property
    def plain(self) -> TrainStep:
        """The step without any technique, whose loss judges all."""
        axis_name = self.of_step["axis_name"]
        tx = self.inner if axis_name is None else optax.chain(all_reduce(axis_name), self.inner)
        return make_train_step(self.loss_fn, tx, **self.of_step)

    def losses(self, params: PyTree, model_state: PyTree) -> Losses:
        """The held-out losses, in f32."""
        found: list[float] = []
        params, run_key = trees.at_least_float32(params), self.of_init["key"]
        for index, batch in enumerate(self.held_out):
            key = None if run_key is None else jax.random.fold_in(run_key, index)
            found.append(float(self._loss(params, model_state, key, self.plain.place(batch))))
        return np.asarray(found, np.float64)

    @functools.cached_property
    def _loss(self) -> Callable[..., jax.Array]:
        oracle, placing = self.plain.oracle, self.plain.placing
        oracle = oracle if placing is None else oracle.over(placing.mesh)

        def loss(params: PyTree, model_state: PyTree, key: Any, batch: PyTree) -> jax.Array:
            return oracle.loss_at(batch, key=key, model_state=model_state)(params)

        return jax.jit(loss)


class Costs(NamedTuple):
    """What the programs of a step cost per call and device; see ``Trial``."""

    compile_seconds: float
    memory_bytes: float
    flops: float
    wire_bytes: float


class Candidate:
    """A configuration that was built and trained for ``setting.steps`` calls.

    Attributes:
      name: what it is called.
      config: what it is.
      setting: what it shares with the others.
      step: its step.
      depths: those that freezing draws in these calls, the first first, and their shares.
      costs: of its programs.
      losses: held-out, after ``setting.steps`` calls.
      skipped: windows of calls that a loss scaler skipped at the start, and that do not count.
    """

    def __init__(self, name: str, config: BoostConfig, setting: Setting):
        self.name, self.config, self.setting, self.skipped = name, config, setting, 0
        allowed = f"at least a window of {self.window} calls"
        hint = "Some optimizer steps must be made."
        checks.require("auto", "steps", setting.steps, allowed, self.window <= setting.steps, hint)
        make = Boost(self.config).make_train_step
        self.step = make(setting.loss_fn, setting.inner, setting.params, **setting.of_step)
        state = self._init()
        self.depths = self._drawn()
        self.costs = self._costs(state)
        del state
        state = self._trained(self._begun(), self.window, setting.steps)
        self._kept = fetched(state)
        self.losses = self._losses(state)

    @property
    def window(self) -> int:
        """Calls for one step of the optimizer."""
        return 1 if self.config.accumulate is None else self.config.accumulate.every

    @property
    def meeting(self) -> int:
        """Steps of the optimizer from one synchronisation of the replicas' params to the next."""
        return self.config.reduce.every or 1

    @property
    def calls(self) -> int:
        """Calls of a turn: whole rounds of whatever does not do the same each time."""
        if self.depths:
            return self.setting.steps
        reduce, parts = self.config.reduce, 1
        if reduce.kind == "partial":
            members = partitioning("auto", reduce.partitions, reduce.bucket_bytes)
            parts = len(members(self.setting.params))
        period = self.window * self.meeting * parts
        # At least two: a codec may do one thing at even and another at odd steps.
        return period * math.ceil(2 / period)

    @property
    def note(self) -> str:
        """What these calls could not show."""
        idle = self.config.freeze is not None and not any(self.depths)
        return "nothing was frozen in these calls" if idle else ""

    def after(self, calls: int) -> Losses:
        """The held-out losses after so many calls, in whole windows."""
        if calls == self.setting.steps:
            return self.losses
        if calls > self.setting.steps:
            state = self._trained(placed(self._kept), self.setting.steps, calls)
        elif calls:
            state = self._trained(self._begun(), self.window, calls)
        else:
            state = self._init()
        return self._losses(state)

    @property
    def most(self) -> int:
        """Calls that can be made: four times the baseline's, unless a schedule ends before."""
        steps, freeze = self.setting.steps, self.config.freeze
        if freeze is None or freeze.kind not in ("progressive", "ramp"):
            return 4 * steps
        return min(4 * steps, (freeze.total_steps or steps) * self.window)

    def equal_calls(self, ratio: float) -> int:
        """Calls in the time of the baseline's, if one takes ``ratio`` times as long."""
        wanted = min(self.setting.steps / min(max(ratio, 1 / 4), 4), self.most)
        return self.window * max(1, round(wanted / self.window))

    def seconds(self) -> float:
        """Of a call, in a turn that begins where training ended."""
        kept, step, clock = self._kept, self.step, self.setting.clock
        if self.depths:
            kept = _rewound(kept, next(iter(self.depths)))
        batches = [self.setting.batch(i) for i in range(self.calls)]
        state: TrainState = jax.block_until_ready(placed(kept))
        metrics: Any = None
        begun = clock()
        for batch in batches:
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        return (clock() - begun) / len(batches)

    def _init(self) -> TrainState:
        return self.step.init(self.setting.params, **self.setting.of_init)

    def _begun(self) -> TrainState:
        """After the first window; one that a loss scaler skips is made again, and not counted."""
        state = self._init()
        metrics: Mapping[str, Any] = {}
        for tries in range(_TRIES):
            self.skipped = tries
            for index in range(self.window):
                state, metrics = self.step(state, self.setting.batch(index))
            if not int(metrics.get("skipped_in_a_row", 0)):
                break
        return state

    def _trained(self, state: TrainState, start: int, stop: int) -> TrainState:
        for index in range(start, stop):
            state, _ = self.step(state, self.setting.batch(index))
            # A queue of programs would hold the batches of all of them.
            jax.block_until_ready(state)
        return state

    def _losses(self, state: TrainState) -> Losses:
        return self.setting.losses(self.step.common_params(state), state.model_state)

    def _drawn(self) -> dict[int, float]:
        variants = variants_of(self.step.tx)
        if variants is None:
            return {}
        steps = math.ceil(self.setting.steps / self.window)
        return variants.shares(self.setting.params, steps) or {0: 1.0}

    def _costs(self, state: TrainState) -> Costs:
        """Memory is that of the largest program, compiling all of them; the rest is the mean."""
        step, batch, clock = self.step, self.setting.batch(0), self.setting.clock
        shares: Mapping[int | None, float] = {None: 1.0}
        if self.depths and step.freeze_driver == "host":
            shares = {**self.depths}
        compiling, flops, sent = 0.0, 0.0, 0.0
        memory: list[float] = []
        for depth, share in shares.items():
            begun = clock()
            made = compile_program(step, (state, batch), None, depth)
            compiling += clock() - begun
            memory.append(_memory(made.compiled.memory_analysis()))
            flops += share * made.flops
            # What a window or a meeting sends, it sends once for all of its calls.
            held = costs.expected(made.traced, conditional=True) / (self.window * self.meeting)
            sent += share * (costs.expected(made.traced, conditional=False) + held)
        return Costs(compiling, float(np.max(memory)), flops, sent)


def timed(candidates: Sequence[Candidate], rounds: int) -> list[list[float]]:
    """Seconds of a call, for each candidate a list by round.

    In every round each has one turn, in an order of the round's own: whatever else the machine does
    then does it to all. A round before them is not counted.
    """
    times: list[list[float]] = [[] for _ in candidates]
    order = random.Random(0)
    for counts in range(rounds + 1):
        for i in order.sample(range(len(candidates)), len(candidates)):
            seconds = candidates[i].seconds()
            if counts:
                times[i].append(seconds)
    return times


def _memory(analysis: Any) -> float:
    if analysis is None:
        return math.nan
    kept = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return float(analysis.argument_size_in_bytes + kept + analysis.temp_size_in_bytes)


def _rewound(kept: TrainState, depth: int) -> TrainState:
    """The state of a ``scheduled_freeze``, as it was, but at the beginning of its schedule."""
    start = {
        name: getattr(kept.opt_state, name)._replace(data=np.asarray(value, np.int32))
        for name, value in (("steps", 0), ("next_depth", depth))
    }
    return kept._replace(opt_state=kept.opt_state._replace(**start))


class Kept(NamedTuple):
    """An array on the host, and what it takes to make it one of the device's again."""

    data: Any
    sharding: Any
    key: Any


def fetched(tree: PyTree) -> PyTree:
    """A copy on the host, where it takes none of the device's memory from the other candidates."""

    def fetch(x: jax.Array) -> Kept:
        typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(x) if typed else x
        return Kept(np.array(data), x.sharding, jax.random.key_impl(x) if typed else None)

    return jax.tree.map(fetch, tree)


def placed(tree: PyTree) -> PyTree:
    """A new copy on the device, to be donated."""

    def place(x: Kept) -> jax.Array:
        if x.key is not None:
            return jax.device_put(jax.random.wrap_key_data(x.data, impl=x.key), x.sharding)
        return jax.device_put(x.data, x.sharding, may_alias=False)

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, Kept))
