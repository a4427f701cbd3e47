# SPDX-License-Identifier: Apache-2.0
"""From a configuration to a chain of transformations, in the order of ``ORDER``."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from boostax._core import axes, checks, trees
from boostax.config.config import ORDER, BoostConfig
from boostax.config.finishing import finishing_step
from boostax.config.own import Own
from boostax.config.part import Place
from boostax.config.reduction import Reduce
from boostax.model.less_bn import LessBNReport, changed
from boostax.precision.policy import Policy
from boostax.reduce.mean import all_reduce
from boostax.subspace.basis import Basis
from boostax.subspace.dim_reduce import dim_reduce
from boostax.subspace.trajectory import trajectory_basis
from boostax.train.compiled import TrainStep
from boostax.train.step import make_train_step

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Boost:
    """What a configuration builds; made by ``auto``.

    Attributes:
      config: the configuration.
      notes: what of a foreign dictionary has no effect or another one, and why.
      own: parts that boostax has not and their places, in the order in which they were given.
      strict: whether what is on must be in what is built; MindSpore's own reading leaves out a
        reduction where there are no replicas, and LessBN where a model has nothing of it.
    """

    config: BoostConfig
    notes: tuple[str, ...] = ()
    own: tuple[Own, ...] = ()
    strict: bool = True

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
        """The whole chain around an optimizer, in the order of ``ORDER``.

        Outermost first: freezing, carried leaves, loss scaling, the window (or the window, then
        scaling), the check for spikes, the average of the params, what is stored in fewer bytes,
        the recorder of snapshots, the reduction, centralization, clipping, the check of updates,
        the count of lost ones, ``inner``. A reduction that stands around the optimizer
        (``"adasum-delta"``, ``"partial"``, ``"local"``) is around centralization and clipping too.

        A ``dim_reduce`` from files is the whole of it, inside the loss scaler; ``inner`` then
        trains what lies outside the span, unless ``residual_rate`` puts an SGD there. One that
        begins after some steps is not in it: see ``make_train_step``.

        Args:
          inner: any optimizer, without collectives.
          params: the params or their shapes, where groups of layers are given by a number, or files
            are read.
          axis_name: replica axis (or axes); without one there is one replica.

        Returns:
          A transformation. Cost: what its parts cost. The policy, micro-batches, the boundaries of
          group scales (``loss``) and LessBN (``model``) are not in it.

        Raises:
          ValueError, TypeError: no params where groups are a number or files are read; fewer
            layers than groups; a reduction other than the mean without an axis; beside a
            ``dim_reduce`` from files, what it leaves nothing to.
        """
        return self._optimizer(inner, Place(axis_name, params))

    def _optimizer(
        self, inner: optax.GradientTransformation, place: Place
    ) -> optax.GradientTransformationExtraArgs:
        who, axis_name = "Boost.optimizer", place.axis_name
        checks.transformation(who, "inner", inner)
        own = [part for where, part in self.own if where == "reduce"]
        what = type(own[0]).__name__ if own else repr(self.config.reduce.kind)
        needs = self.strict and (own or self.config.reduce != Reduce())
        allowed, fits = f"given with the reduction {what}", axis_name is not None or not needs
        hint = "It is an axis of the mesh; on one device take the reduction out."
        checks.require(who, "axis_name", None, allowed, fits, hint)
        finish = self.config.dim_reduce
        if finish is not None and finish.at_once:
            self._require_alone(who)
            residual = inner if finish.residual_rate is None else None
            return self._finishing(finish.basis(place.params), residual, place)
        order, window = list(ORDER), self.config.accumulate
        if window is not None and window.drop == "window":
            # The scaler inside, so that the window drops as a whole.
            order.remove("loss_scale")
            order.insert(order.index("accumulate"), "loss_scale")
        return self._stacked(order, inner, place)

    def loss(self, loss_fn: Callable[..., Any], params: PyTree = None) -> Callable[..., Any]:
        """Return the loss as ``value_and_grad`` is to take it.

        A loss scale per group wants ``boostax.precision.scale_boundary`` in it.

        Args:
          loss_fn: ``loss_fn(params, batch, ...)``.
          params: as in ``optimizer``.

        Returns:
          ``loss_fn``.
        """
        del params
        return loss_fn

    def model(self, module: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, LessBNReport | None]:
        """The model with fewer BatchNorms and a normalised head, if they are on.

        Args:
          module: a Flax module.
          *args: a sample of what it is called with: see ``boostax.less_bn``.
          **kwargs: like ``args``.

        Returns:
          The model, and a report of what was changed; the module itself and ``None`` if nothing is
          on. Cost: one trace.

        Raises:
          ValueError, TypeError, ImportError: as ``boostax.less_bn``; but read as MindSpore reads
            it, what there is nothing of to change is left as it is.
        """
        part = self.config.less_bn
        if part is None:
            return module, None
        return changed(module, args, kwargs, **vars(part), strict=self.strict)

    def make_train_step(
        self,
        loss_fn: Callable[..., Any],
        inner: optax.GradientTransformation,
        params: PyTree = None,
        *,
        mesh: Mesh | None = None,
        axis_name: axes.AxisName | None = None,
        has_aux: bool = False,
        less_bn: LessBNReport | None = None,
        **options: Any,
    ) -> TrainStep:
        """``boostax.make_train_step`` with the chain, the policy, the micro-batches and the loss.

        Where ``dim_reduce.after`` says so, the step is that of a run and of its finish.

        Args:
          loss_fn: as there.
          inner: as in ``optimizer``.
          params: as in ``optimizer``; ``step.init`` wants them again.
          mesh: as there.
          axis_name: as there, and of the chain.
          has_aux: as there.
          less_bn: where LessBN is on, the report that came with the ``model`` of the loss.
          **options: further ones of ``boostax.make_train_step``.

        Returns:
          A ``TrainStep``; of a run and its finish a ``FinishingStep``. Cost: as there.

        Raises:
          ValueError, TypeError: as there and as ``optimizer``; no ``less_bn`` where it is on, or
            params that are not of that model.
        """
        self._require_less_bn(less_bn, params)
        build = functools.partial(
            make_train_step,
            self.loss(loss_fn, params),
            mesh=mesh,
            axis_name=axis_name,
            policy=self.policy,
            microbatches=self.config.microbatches,
            has_aux=has_aux,
            **options,
        )
        place = Place(axis_name, params, less_bn)
        run = build(self._optimizer(inner, place))
        finish = self.config.dim_reduce
        if finish is None or not finish.after:
            return run
        ends = lambda basis: build(self._finishing(basis, None, place))  # noqa: E731
        return finishing_step(run, ends, finish.after, finish.n_components)

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
          source: an optimizer state that recorded snapshots, or a ``boostax.subspace.Basis``.
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
        part: Any = self.config.dim_reduce
        hint = 'auto({"dim_reduce": True}) records every tenth step.'
        checks.require("Boost.finish", "config.dim_reduce", None, "given", part is not None, hint)
        basis: Any = source
        if not isinstance(source, Basis):
            basis = trajectory_basis(source, part.n_components, params=params)
        return self._finishing(basis, residual, Place(axis_name, params))

    def _finishing(
        self, basis: Any, residual: optax.GradientTransformation | None, place: Place
    ) -> optax.GradientTransformationExtraArgs:
        """``dim_reduce`` with a basis, inside the loss scaler."""
        part: Any = self.config.dim_reduce
        told: dict[str, Any] = part.arguments(place)
        outside: Any = told["residual"] if residual is None else residual
        if outside is not None and place.axis_name is not None:
            outside = optax.chain(all_reduce(place.axis_name), outside)
        told |= {"basis": basis, "residual": outside}
        return self._stacked(["loss_scale"], dim_reduce(**told), place)

    def _require_alone(self, who: str) -> None:
        """Refuse what is on and would not be in a step that is a finish."""
        kept = ("dim_reduce", "loss_scale", "policy", "microbatches", "less_bn")
        found = [name for name in self.config.changed() if name not in kept]
        found += [type(part).__name__ for where, part in self.own if where != "loss_scale"]
        if found:
            got = getattr(self.config, found[0], "a part of yours")
            allowed = "left out with dim_reduce from the first step on"
            hint = (
                "It takes whole gradients as they are. dim_reduce.after puts a run before it; of "
                "MindSpore's dictionary strict=False leaves out the rest."
            )
            raise ValueError(checks.message(who, f"config.{found[0]}", allowed, got, hint))

    def _require_less_bn(self, report: LessBNReport | None, params: PyTree) -> None:
        """Refuse a loss of which nothing says that its model was changed."""
        who, hint = "Boost.make_train_step", "model, report = boost.model(model, x) changes it."
        if self.config.less_bn is None:
            checks.absent(who, "less_bn", report, "left out where it is off", hint)
            return
        if not isinstance(report, LessBNReport):
            allowed = "the report of the changed model"
            hint += ' Without a Flax model, {"less_bn": False} switches it off.'
            raise ValueError(checks.message(who, "less_bn", allowed, report, hint))
        paths = [f"/{trees.path_name(x)}/" for x, _ in jax.tree_util.tree_leaves_with_path(params)]
        there = [norm for norm in report.removed if any(f"/{norm}/" in path for path in paths)]
        if paths and report.head and not any(f"/{report.head}/multiplier/" in x for x in paths):
            there.append(report.head)
        if there:
            allowed = "of the changed model, where less_bn is on"
            got = f"params of the model as it was at {there[0]!r}"
            raise ValueError(f"{who}: params must be {allowed}, got {got}. {hint}")

    def _stacked(
        self, order: list[str], inner: optax.GradientTransformation, place: Place
    ) -> optax.GradientTransformationExtraArgs:
        """The one mechanism: each part of the order in front of, or around, what there is."""
        parts = [inner]
        for name in order:
            own = [part for where, part in self.own if where == name]
            # Another reduction stands in the place of the mean.
            here = [] if own and name == "reduce" else [getattr(self.config, name)]
            own = [] if name == "reduce" and place.axis_name is None else own
            for layer in [part.layer(place) for part in (*here, *own) if part is not None]:
                if isinstance(layer, optax.GradientTransformation):
                    parts.insert(0, layer)
                elif layer is not None:
                    parts = [layer(_chained(parts))]
        return optax.with_extra_args_support(_chained(parts))


def _chained(parts: list[optax.GradientTransformation]) -> optax.GradientTransformation:
    return parts[0] if len(parts) == 1 else optax.chain(*parts)
