"""From a configuration to a chain of transformations in the one right order."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import optax
from jax.sharding import Mesh

from boostax._core import axes, checks
from boostax.autoboost.config import BoostConfig
from boostax.autoboost.mindspore import LEVELS, from_mindspore, is_mindspore
from boostax.autoboost.part import Place, nearest
from boostax.autoboost.singa import singa
from boostax.model.less_bn import LessBNReport, less_bn
from boostax.precision.crossings import group_boundaries
from boostax.precision.policy import Policy
from boostax.reduce.mean import all_reduce
from boostax.subspace.basis import Basis
from boostax.subspace.dim_reduce import dim_reduce
from boostax.subspace.trajectory import trajectory_basis
from boostax.train.compiled import TrainStep
from boostax.train.step import make_train_step

PyTree = Any

# From the optimizer outwards: the one order. A part stands in front of all before it, or around.
ORDER = ("clip", "centralize", "reduce", "dim_reduce", "accumulate", "loss_scale", "freeze")
# With the scaler inside the window, which then drops as a whole.
_DROPS_WINDOWS = (*ORDER[:4], "loss_scale", "accumulate", "freeze")


@dataclasses.dataclass(frozen=True)
class Boost:
    """What a configuration builds; made by ``auto``.

    Attributes:
      config: the configuration.
      notes: what of a foreign dictionary has no effect, and why.
    """

    config: BoostConfig
    notes: tuple[str, ...] = ()

    @property
    def policy(self) -> Policy | None:
        """The precision policy, for ``value_and_grad`` or ``make_train_step``."""
        return None if self.config.policy is None else self.config.policy.policy()

    def optimizer(
        self,
        inner: optax.GradientTransformation,
        params: PyTree = None,
        *,
        axis_name: axes.AxisName | None = None,
    ) -> optax.GradientTransformationExtraArgs:
        """The whole chain around an optimizer, in the one right order.

        Outermost first: freezing, loss scaling, the window (or the window, then scaling), the
        recorder of snapshots, the reduction, centralization, clipping, ``inner``. A reduction that
        stands around the optimizer (``"adasum-delta"``, ``"partial"``, ``"local"``) is around
        centralization and clipping too.

        Args:
          inner: any optimizer, without collectives.
          params: the params or their shapes, where groups of layers are given by a number.
          axis_name: replica axis (or axes); without one nothing is reduced.

        Returns:
          A transformation. Cost: what its parts cost.

        Raises:
          ValueError, TypeError: no params where groups are a number; fewer layers than groups.
        """
        checks.transformation("Boost.optimizer", "inner", inner)
        window = self.config.accumulate
        order = ORDER if window is None or window.drop == "micro-batch" else _DROPS_WINDOWS
        return self._stacked(order, inner, Place(axis_name, params))

    def loss(self, loss_fn: Callable[..., Any], params: PyTree = None) -> Callable[..., Any]:
        """The loss as ``value_and_grad`` is to take it: with boundaries between scaled groups.

        Args:
          loss_fn: ``loss_fn(params, batch, ...)``.
          params: as in ``optimizer``.

        Returns:
          ``loss_fn`` itself without a loss scale per group. Cost: as ``group_boundaries``.
        """
        scale = self.config.loss_scale
        if scale is None or scale.kind != "group":
            return loss_fn
        return group_boundaries(loss_fn, scale.labels(params))

    def model(self, module: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, LessBNReport | None]:
        """The model with fewer BatchNorms and a normalised head, if they are on.

        Args:
          module: a Flax module.
          *args: a sample of what it is called with: see ``boostax.less_bn``.
          **kwargs: like ``args``.

        Returns:
          The model, and a report of what was changed; the module itself and ``None`` if nothing is.
          Cost: one trace.

        Raises:
          ValueError, TypeError, ImportError: as ``boostax.less_bn``.
        """
        part = self.config.less_bn
        if part is None:
            return module, None
        return less_bn(
            module,
            *args,
            normalized_head=part.normalized_head,
            remove=part.remove,
            multiplier=part.multiplier,
            **kwargs,
        )

    def make_train_step(
        self,
        loss_fn: Callable[..., Any],
        inner: optax.GradientTransformation,
        params: PyTree = None,
        *,
        mesh: Mesh | None = None,
        axis_name: axes.AxisName | None = None,
        has_aux: bool = False,
        **options: Any,
    ) -> TrainStep:
        """``boostax.make_train_step`` with the chain, the policy, the micro-batches and the loss.

        Args:
          loss_fn: as there.
          inner: as in ``optimizer``.
          params: as in ``optimizer``; ``step.init`` wants them again.
          mesh: as there.
          axis_name: as there, and of the chain.
          has_aux: as there.
          **options: further ones of ``boostax.make_train_step``.

        Returns:
          A ``TrainStep``. Cost: as there.

        Raises:
          ValueError, TypeError: as there and as ``optimizer``.
        """
        return make_train_step(
            self.loss(loss_fn, params),
            self.optimizer(inner, params, axis_name=axis_name),
            mesh=mesh,
            axis_name=axis_name,
            policy=self.policy,
            microbatches=self.config.microbatches,
            has_aux=has_aux,
            **options,
        )

    def finish(
        self,
        source: PyTree,
        params: PyTree,
        *,
        residual: optax.GradientTransformation | None = None,
        axis_name: axes.AxisName | None = None,
    ) -> optax.GradientTransformationExtraArgs:
        """The transformation that ends a run: ``dim_reduce``, inside the loss scaler.

        It takes whole steps on gradients of the loss as it is: no window, no freezing, no clipping.
        Give it to ``boostax.make_train_step``, with ``loss``, ``policy`` and larger batches.

        Args:
          source: an optimizer state that recorded snapshots, or a ``boostax.Basis``.
          params: the params now; with a state, taken in as the latest snapshot.
          residual: an optimizer for what lies outside the span; ``None`` for the one of the
            configuration, if any. Behind a mean over ``axis_name``.
          axis_name: replica axis (or axes).

        Returns:
          A transformation. Cost: as ``boostax.dim_reduce``.

        Raises:
          ValueError, TypeError: no ``dim_reduce`` in the configuration; a state that recorded
            nothing, or too little; as ``boostax.dim_reduce``.
        """
        part = self.config.dim_reduce
        if part is None:
            raise ValueError(
                "Boost.finish: config.dim_reduce must be given, got None. "
                'auto({"dim_reduce": True}) records every tenth step.'
            )
        basis: Any = source
        if not isinstance(source, Basis):
            basis = trajectory_basis(source, part.n_components, params=params)
        outside = part.residual() if residual is None else residual
        if outside is not None and axis_name is not None:
            outside = optax.chain(all_reduce(axis_name), outside)
        tx = dim_reduce(basis, residual=outside, rule=part.subspace_rule(), axis_name=axis_name)
        return self._stacked(("loss_scale",), tx, Place(axis_name, params))

    def _stacked(
        self, order: tuple[str, ...], inner: optax.GradientTransformation, place: Place
    ) -> optax.GradientTransformationExtraArgs:
        """The one mechanism: each part of the order in front of, or around, what there is."""
        parts = [inner]
        for name in order:
            part = getattr(self.config, name)
            layer = None if part is None else part.layer(place)
            if isinstance(layer, optax.GradientTransformation):
                parts.insert(0, layer)
            elif layer is not None:
                parts = [layer(_chained(parts))]
        return optax.with_extra_args_support(_chained(parts))


def auto(spec: Any, *, level: str | None = None) -> Boost:
    """What a level, a dictionary, a JSON file or a ``BoostConfig`` asks for, ready to build.

    ===== ====================================================================================
    level switches on
    ===== ====================================================================================
    O0    nothing
    O1    LessBN with a normalised head, gradient centralization, freezing by intervals
    O2    the same, and AdaSum of the optimizers' updates
    ===== ====================================================================================

    The levels are those of ``mindspore.boost``, not of precision. Its own dictionary is read as it
    is; what it would ignore is an error. So is ``{"singa": {"dist_option": "sparseTopK"}}``, which
    names a mode of Apache SINGA's, beside fields of a ``BoostConfig``.

    Args:
      spec: a ``BoostConfig``; ``"O0"``, ``"O1"`` or ``"O2"``; a dictionary like
        ``BoostConfig.to_dict()`` gives, MindSpore's, or one with ``"singa"``; or the path of a JSON
        file of one.
      level: of a dictionary or a file: where they start from; ``None`` is ``"O0"``.

    Returns:
      A ``Boost``. Cost: none; nothing is global, and nothing in the file is executed.

    Raises:
      ValueError, TypeError: unknown keys, words and levels, values out of range, and parts that do
        not go together. OSError: no such file.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> boost = boostax.auto({"loss_scale": "dynamic", "accumulate": 4, "clip": 1.0})
      >>> tx = boost.optimizer(optax.adam(1e-3))
      >>> type(tx.init(jnp.zeros(3))).__name__, boost.config.clip
      ('LossScaleState', Clip(max_norm=1.0))

    References:
      MindSpore 2.10, ``mindspore.boost.AutoBoost``, which is one object for the whole process.
    """
    who = "auto"
    given = _loaded(spec) if _is_file(spec) else spec
    if isinstance(given, Mapping):
        return _from_dictionary(dict(given), "O0" if level is None else level)
    if level is not None:
        hint = "It is where a dictionary or a file starts from."
        raise ValueError(checks.message(who, "level", "left out here", level, hint))
    if isinstance(given, BoostConfig):
        return Boost(given)
    allowed = "a level, a dictionary, the path of a .json file, or a BoostConfig"
    if not isinstance(given, str):
        hint = "'O1' is what mindspore.boost switches on at O1."
        raise TypeError(checks.message(who, "spec", allowed, given, hint))
    if given not in LEVELS:
        hint = nearest(given, tuple(LEVELS))
        raise ValueError(checks.message(who, "spec", allowed, given, hint))
    return Boost(from_mindspore({}, given).config)


def _from_dictionary(data: dict[str, Any], level: str) -> Boost:
    if is_mindspore(data):
        return Boost(*from_mindspore(data, level))
    base = from_mindspore({}, level).config
    if "singa" in data:
        if "reduce" in data:
            got, hint = data["reduce"], "singa names a reduction."
            raise ValueError(checks.message("auto", "reduce", "left out beside singa", got, hint))
        data["reduce"] = singa(data.pop("singa"))
    return Boost(BoostConfig.from_dict(data, base))


def _is_file(spec: Any) -> bool:
    return isinstance(spec, pathlib.Path) or (isinstance(spec, str) and spec.endswith(".json"))


def _loaded(path: str | pathlib.Path) -> Any:
    try:
        return json.loads(pathlib.Path(path).read_text())
    except json.JSONDecodeError as error:
        hint = f"{error}."
        raise ValueError(
            checks.message("auto", "spec", "a file of JSON", str(path), hint)
        ) from error


def _chained(parts: list[optax.GradientTransformation]) -> optax.GradientTransformation:
    return parts[0] if len(parts) == 1 else optax.chain(*parts)
