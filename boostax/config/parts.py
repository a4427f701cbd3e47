# SPDX-License-Identifier: Apache-2.0
"""The parts of a configuration: one for each technique, but for the reductions."""

import dataclasses
import functools
import glob
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias

import optax

from boostax._core import checks
from boostax._core.groups import mindspore_groups, prefix_groups
from boostax.accumulate.carried import carry
from boostax.accumulate.window import accumulate
from boostax.chain.parts import opened, read
from boostax.chain.roles import role
from boostax.config.part import LATER, Layer, Part, Place, path, speaking_of, word
from boostax.freeze.scheduled import scheduled_freeze
from boostax.freeze.schedules import CYCLE, FreezeSchedule, freeze_schedule
from boostax.model.average import average_params
from boostax.model.centralize import Axes, centralize_gradients
from boostax.model.clip import clip_by_global_norm
from boostax.model.less_bn import LessBNReport, less_bn
from boostax.precision.group_scale import group_loss_scale
from boostax.precision.loss_scale import dynamic_loss_scale, static_loss_scale
from boostax.precision.lost_updates import count_lost_updates
from boostax.precision.policy import Policy, policy
from boostax.precision.spikes import skip_spikes
from boostax.precision.store import store
from boostax.precision.updates import check_updates
from boostax.subspace.basis import pca_basis, saved_basis
from boostax.subspace.dim_reduce import dim_reduce
from boostax.subspace.files import checkpoint_snapshots
from boostax.subspace.quasi_newton import RULES, SubspaceRule
from boostax.subspace.trajectory import record_trajectory

PyTree = Any
Pattern: TypeAlias = str | tuple[str, ...]
Groups: TypeAlias = int | tuple[Pattern, ...] | Mapping[str, Any]
Freezing = Literal["interval", "continuous", "progressive", "ramp"]


_GROUPS = "a number of groups, a list of patterns of paths, or a dictionary of names and groups"


def labels(
    params: PyTree, groups: Groups, order: tuple[str, ...] | None = None, level: int | None = None
) -> Any:
    """The groups of layers as ``scheduled_freeze`` and ``group_loss_scale`` take them.

    Args:
      params: the params or their shapes.
      groups: so many groups of layers; patterns of paths, one entry for each group; or, by the
        names in the params, the number of the group of each.
      order: of a number of groups: see ``boostax.freeze.prefix_groups``, as is ``level``.
      level: leading components of a path that make a layer.

    Returns:
      A tree of numbers, or the patterns.
    """
    hint = "4 cuts the layers into quarters; ['embed', 'block_*'] names groups by patterns."
    if isinstance(groups, tuple) and groups and all(are_texts(x) for x in groups):
        return groups
    if isinstance(groups, Mapping) and groups:
        # A dictionary that JAX reads as a tree.
        return dict(groups)
    if isinstance(groups, (tuple, str, Mapping)):
        raise TypeError(checks.message("", "groups", _GROUPS, groups, hint))
    checks.positive_int("", "groups", groups, hint)
    if params is LATER:
        return {"any": 0}
    hint = "Pass them to optimizer or make_train_step, or name the groups by patterns."
    allowed = f"given where groups is a number, {groups}"
    checks.require("", "params", params, allowed, params is not None, hint)
    with speaking_of("", {"n": "groups"}):
        return prefix_groups(params, groups, order=order, level=level)


def are_texts(value: Any) -> bool:
    """Whether it is a text, or a tuple of some."""
    return isinstance(value, str) or (
        isinstance(value, tuple) and bool(value) and all(isinstance(x, str) for x in value)
    )


class Precision(Part, factory=policy):
    """In which dtypes the step works: ``boostax.policy(spec, dtype=dtype)``."""

    spec: str = "O2"
    dtype: str = "float16"

    def check(self) -> None:
        """As ``boostax.policy`` does."""
        self.policy()

    def policy(self) -> Policy:
        """The policy."""
        return policy(self.spec, dtype=self.dtype)


class CountLostUpdates(Part, factory=count_lost_updates):
    """``boostax.precision.count_lost_updates``, directly around the optimizer."""


class CheckUpdates(Part, factory=check_updates):
    """``boostax.precision.check_updates``, directly around the optimizer."""


class SkipSpikes(Part, factory=skip_spikes):
    """``boostax.precision.skip_spikes``, around the reduction and inside the window."""


class Clip(Part, factory=clip_by_global_norm):
    """``boostax.model.clip_by_global_norm``, behind the reduction."""

    max_norm: float = 1.0


def _axes(axes: Axes = "auto", less_bn: LessBNReport | None = None) -> Axes:
    """As given, but that a normalised head stays as it is."""
    if less_bn is None or less_bn.head is None or callable(axes):
        return axes
    return {glob.escape(less_bn.head): None} | ({} if isinstance(axes, str) else dict(axes))


class Centralize(Part, factory=centralize_gradients):
    """``boostax.centralize_gradients``, behind the reduction and before clipping.

    The normalised head of LessBN is left alone, as in MindSpore.

    Attributes:
      after_decay: behind the ``optax.add_decayed_weights`` with which the optimizer begins, which
        is then centralized too, as MindSpore does.
    """

    made: ClassVar = {"axes": _axes}
    after_decay: bool = False

    def layer(self, place: Place) -> Layer:
        """In front; or around the optimizer, that is taken apart behind its decay."""
        centralize: Any = super().layer(place)
        return functools.partial(_after_decay, centralize) if self.after_decay else centralize


def _after_decay(
    centralize: optax.GradientTransformation, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
    """``inner`` with centralization behind the decay that its moments take in."""
    parts, place = opened(inner), 0
    for i, part in enumerate(parts):
        found = read(part)
        while found.name == "masked":  # A decay that spares norms.
            ((_, found),) = found.inner
        what = role(found)
        if what == "decay":
            place = i + 1
        elif what not in ("clip", "norm clip"):
            break
    return optax.chain(*parts[:place], centralize, *parts[place:])


class AverageParams(Part, factory=average_params):
    """``boostax.model.average_params``, around the reduction, inside the window and the scaler."""


class Accumulate(Part, factory=accumulate):
    """``boostax.accumulate``: one optimizer step for so many calls.

    Attributes:
      drop: what a call that overflows takes with it: itself (``"micro-batch"``: the loss scaler
        stands around the window) or all of its ``"window"`` (inside; cheaper).
    """

    every: int = 1
    drop: Literal["micro-batch", "window"] = "micro-batch"

    def check(self) -> None:
        """The word as well."""
        word(self.drop, ("micro-batch", "window"), "drop")
        super().check()


class LossScale(
    Part,
    factory={"dynamic": dynamic_loss_scale, "static": static_loss_scale, "group": group_loss_scale},
):
    """The scaler, around the window or inside it; ``groups`` make the labels of ``"group"``."""

    made: ClassVar = {"labels": labels}

    def labels(self, params: PyTree) -> Any:
        """Of ``"group"``: the group of each leaf."""
        return self.arguments(Place(None, params))["labels"]


class Store(Part, factory=store):
    """``boostax.precision.store``, around the optimizer and its reduction, inside all gates."""

    params: Literal["stochastic", "remainder"] | None = None

    def arguments(self, place: Place) -> dict[str, Any]:
        """Of the factory ``params`` says how they are stored."""
        return super().arguments(place._replace(params=self.params))


class Carry(Part, factory=carry):
    """``boostax.carry``, around all but freezing."""


def _schedule(
    kind: Freezing | int | tuple[int, ...] | Callable[[int], int] = "interval",
    frozen_fraction: float | None = None,
    total_steps: int | None = None,
    seed: int | None = None,
    freeze_p: float | None = None,
) -> FreezeSchedule | tuple[int, ...]:
    """``boostax.freeze_schedule``; of 65536 steps where it starts anew at the end."""
    given: dict[str, Any] = {"frozen_fraction": frozen_fraction, "seed": seed, "freeze_p": freeze_p}
    if isinstance(kind, int):
        kind = (checks.natural("", "kind", kind, "It counts the groups that are frozen."),)
    if isinstance(kind, tuple):
        for name, value in (given | {"total_steps": total_steps}).items():
            hint = "It starts anew at its end."
            checks.absent("", name, value, "left out with a sequence of depths", hint)
        return kind
    if not callable(kind):
        word(kind, ("interval", "continuous", "progressive", "ramp"), "kind")
    if total_steps is None and (callable(kind) or _starts_anew(kind)):
        total_steps = CYCLE
    if total_steps is None:
        allowed = f"the optimizer steps of the run for {kind!r}"
        hint = "It freezes for good: without them nobody knows when."
        raise ValueError(checks.message("", "total_steps", allowed, None, hint))
    return freeze_schedule(kind, total_steps=total_steps, **given)


def _starts_anew(kind: Any = "interval") -> bool:
    return isinstance(kind, (int, tuple)) or kind in ("interval", "continuous")


def _groups(
    params: PyTree,
    groups: Groups,
    order: tuple[str, ...] | None = None,
    level: int | None = None,
    cut: Literal["layers", "mindspore"] = "layers",
    less_bn: LessBNReport | None = None,
) -> Any:
    """As of all parts with groups; a number of them may be cut as MindSpore cuts."""
    word(cut, ("layers", "mindspore"), "cut")
    if cut == "layers" or not isinstance(groups, int) or params is LATER or params is None:
        return labels(params, groups, order, level)
    checks.absent("", "level", level, "left out with cut 'mindspore'", "Its buckets are of params.")
    removed = () if less_bn is None else less_bn.removed
    return mindspore_groups(params, groups, order=order, removed=removed)


class Freeze(Part, factory=scheduled_freeze):
    """``boostax.scheduled_freeze`` by a ``boostax.freeze_schedule``, outermost.

    ``kind`` is a word, a depth, a sequence of depths, which starts anew at its end, or a function
    of the step. ``total_steps`` are optimizer steps of the run. ``None`` is 65536, for functions
    and for ``"interval"`` and ``"continuous"``, which start anew at the end; the others freeze for
    good and have to know it. ``freeze_p`` instead of ``frozen_fraction`` makes MindSpore's own
    sequence. ``groups`` are a number of groups of layers, patterns of paths, or a dictionary of
    names; a number is cut in layers (``boostax.freeze.prefix_groups``), or with
    ``cut="mindspore"`` as there (``boostax.freeze.mindspore_groups``).
    """

    made: ClassVar = {"groups": _groups, "schedule": _schedule, "repeat": _starts_anew}
    renamed: ClassVar = {"schedule": "kind"}
    groups: Any = 4


class LessBN(Part, factory=less_bn):
    """``boostax.less_bn``, on the model."""

    def check(self) -> None:
        """What can be known without a model."""
        hint = "It starts the multiplier of the head."
        checks.number("", "multiplier", self.multiplier, "positive", lambda m: m > 0, hint)
        remove, hint = self.remove, "Such as ['block_*/norm_1']."
        fits = remove is None or are_texts(remove)
        checks.require("", "remove", remove, "a list of patterns", fits, hint, TypeError)


def _recorder(
    n_components: int = 20,
    every: int | None = 10,
    start: int = 0,
    after: int | None = None,
    weight_load_dir: str | None = None,
    pca_mat_path: str | None = None,
) -> optax.GradientTransformation | None:
    """What records the snapshots of the basis; ``None`` if that comes from elsewhere."""
    hint = "It counts directions; 20 are usual."
    checks.positive_int("", "n_components", n_components, hint)
    path("weight_load_dir", weight_load_dir)
    path("pca_mat_path", pca_mat_path)
    if after is not None:
        checks.natural("", "after", after, "It counts optimizer steps before the finish.")
    if pca_mat_path is not None:
        hint = "The one or the other makes the basis."
        checks.absent("", "weight_load_dir", weight_load_dir, "left out with pca_mat_path", hint)
    files = weight_load_dir is not None or pca_mat_path is not None
    allowed, hint = "0 or left out with files", "A basis from files is there at once."
    checks.require("", "after", after, allowed, not (files and after), hint)
    if files or after == 0:
        return None
    if every is None:
        hint = "The finish is made of snapshots; every = 10 records one in ten steps."
        checks.absent("", "after", after, "left out where every is None", hint)
        return None
    recorder = record_trajectory(n_components + 1, every=every, start=start)
    least = start + every * (n_components - 1) + 1
    hint = "The finish wants as many snapshots as directions, and begins at one more."
    late = after is None or after >= least
    checks.require("", "after", after, f"at least {least}", late, hint)
    return recorder


def _residual(
    residual_rate: float | None = None, residual_momentum: float = 0.0
) -> optax.GradientTransformation | None:
    """The optimizer of what lies outside the span, or none."""
    value, hint = residual_momentum, "0.9 is usual."
    checks.number("", "residual_momentum", value, "in [0, 1)", lambda x: 0 <= x < 1, hint)
    if residual_rate is None:
        return None
    hint = "Leave it out for the default."
    checks.number("", "residual_rate", residual_rate, "greater than 0", lambda x: x > 0, hint)
    return optax.sgd(residual_rate, residual_momentum or None)


def _rule(
    rule: Literal["boostax", "mindspore", "p-bfgs"] = "boostax",
    shrink: float | None = None,
    slope: float | None = None,
) -> SubspaceRule:
    """A rule, with another line search if one is asked for."""
    word(rule, tuple(RULES), "rule")
    search = {name: x for name, x in (("shrink", shrink), ("slope", slope)) if x is not None}
    hint = "Leave it out for the default."
    for name, value in search.items():
        checks.number("", name, value, "in (0, 1)", lambda x: 0 < x < 1, hint)
    return dataclasses.replace(RULES[rule], **search)


class DimReduce(Part, factory=dim_reduce):
    """``boostax.dim_reduce``, after the run; and the recorder of its snapshots, during it.

    ``n_components`` are directions, ``every`` the optimizer steps from one snapshot to the next
    (``None`` records none, and the basis comes from elsewhere), ``start`` those before the first;
    the last ``n_components + 1`` are kept. The finish begins by itself ``after`` so many optimizer
    steps; ``None`` leaves it to ``Boost.finish``. It begins at once with files:
    ``weight_load_dir`` is a folder of saved params (``boostax.subspace.checkpoint_snapshots``),
    ``pca_mat_path`` a saved ``boostax.subspace.Basis``, or an ``.npy`` of components ``(k, N)``
    with the leaves of the params one behind the other, whose first ``n_components`` are taken.

    ``shrink`` and ``slope`` are of the line search of ``rule``, ``residual_rate`` and
    ``residual_momentum`` of an ``optax.sgd`` for what lies outside the span. MindSpore calls these
    four ``rho``, ``sigma``, ``alpha`` and ``gamma``.
    """

    made: ClassVar = {"basis": _recorder, "residual": _residual, "rule": _rule}

    @property
    def at_once(self) -> bool:
        """Whether there is no run before the finish."""
        files = self.weight_load_dir is not None or self.pca_mat_path is not None
        return files or self.after == 0

    def check(self) -> None:
        """What can be known without a basis."""
        self.arguments(Place("axis", None))

    def layer(self, place: Place) -> Layer:
        """The recorder, in front of the reduction."""
        return self.arguments(place)["basis"]

    def basis(self, params: PyTree) -> Any:
        """The basis that the files hold.

        Raises:
          ValueError, TypeError: no params, no files, or files of other params; FileNotFoundError.
        """
        directory, file, k = self.weight_load_dir, self.pca_mat_path, self.n_components
        hint = "Or boost.finish(basis, params) makes the transformation of any basis."
        what, allowed = "weight_load_dir or pca_mat_path", "given where there is no run before"
        checks.require("DimReduce", what, None, allowed, not (directory is file is None), hint)
        allowed, hint = "given where files are read", "They name what is to be in them."
        checks.require("DimReduce", "params", params, allowed, params is not None, hint)
        with speaking_of("DimReduce", {"directory": "weight_load_dir", "path": "pca_mat_path"}):
            if directory is not None:
                return pca_basis(checkpoint_snapshots(directory, params), k)
            return saved_basis(file, params, k)
