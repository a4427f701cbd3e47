# SPDX-License-Identifier: Apache-2.0
"""Read a configuration, and build its chain and train step."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import optax

import boostax
from boostax._core import axes, checks, trees
from boostax._core.types import PyTree
from boostax.config import dictionary, keys
from boostax.config.refusals import require
from boostax.model.less_bn import LessBNReport, changed
from boostax.order.parts import read, role

Fn: TypeAlias = keys.Factory
Tx: TypeAlias = optax.GradientTransformation
Chain: TypeAlias = optax.GradientTransformationExtraArgs
Axes: TypeAlias = axes.AxisName | None
Level: TypeAlias = dictionary.Level | None
Report: TypeAlias = LessBNReport | None
# A user's factories by name, each with the key of the part that it replaces or follows.
Own: TypeAlias = Mapping[str, tuple[keys.Factory, str]]
_WHO = "auto"
_MEAN = {"kind": "mean"}


@dataclasses.dataclass(frozen=True)
class Boost:
    """A configuration, ready to build; made by ``auto``.

    Attributes:
      config: the arguments of each key as plain data, which ``boostax.auto`` reads.
      notes: the settings of a foreign dictionary that have no effect, and differences that may
        change the trained weights. If there are no notes, a MindSpore dictionary trains the same
        weights as in MindSpore.
      factories: the user's factories by name, each with the key of the part that it replaces or
        follows.
      strict: whether the chain and the step must contain every part that the configuration switches
        on. If False, as for a MindSpore dictionary, a reduction is left out with a single replica,
        and LessBN is left out if it would change nothing.
    """

    config: keys.Data
    notes: tuple[str, ...] = ()
    factories: Own = dataclasses.field(default_factory=dict[str, Any])
    strict: bool = True

    def __post_init__(self) -> None:
        """Refuse parts that exclude one another."""
        kind, _, _ = self._parts("reduce")[0]
        reduce = self.config.get("reduce", _MEAN)
        require(reduce == _MEAN or kind == reduce["kind"], "replaced", reduce["kind"], kind=kind)
        half = self.policy is not None and self.policy.compute_dtype == "float16"
        require("loss_scale" in self.config or not half, "half", None)
        finish = self.config.get("dim_reduce", {"every": None})
        every = None if finish.keys() & {*keys.FILES} else finish.get("every", 10)
        require(every is None or kind not in ("partial", "local"), "snapshots", every, kind=kind)

    @property
    def policy(self) -> boostax.precision.Policy | None:
        """Return the precision policy, for ``value_and_grad`` or ``make_train_step``."""
        return boostax.policy(**self.config["policy"]) if "policy" in self.config else None

    def optimizer(
        self, inner: Tx, params: PyTree = None, *, axis_name: Axes = None, less_bn: Report = None
    ) -> Chain:
        """Build the whole chain around an optimizer, with its parts in the recommended order.

        The order is, outermost first: freezing, carried leaves, the check of replicas, loss scaling
        and the window (in the opposite order with ``drop: "window"``), the average of the params,
        storage in fewer bytes, the recorder of snapshots, the reduction, centralization, clipping,
        the check of updates, ``inner``. A reduction around the optimizer (``"adasum-delta"``,
        ``"by-shape"``, ``"partial"``, ``"local"``) also wraps centralization and clipping.

        A ``dim_reduce`` from files replaces the chain inside the loss scaler. Then ``inner``, or
        SGD if ``residual_rate`` is set, gets the part of the gradient that is outside of the span
        of the basis.

        Args:
          inner: any optimizer, without collectives.
          params: the params or their shapes; needed if groups are given as a number or files are
            read.
          axis_name: the replica axis (or axes); ``None`` means a single replica.
          less_bn: if LessBN is on, the report that ``model`` returned.

        Returns:
          A transformation. Cost: the sum over the parts. The policy, micro-batches and LessBN
          (``model``) are not in the chain.

        Raises:
          ValueError, TypeError: ``params`` is missing although groups are a number or files are
            read; fewer layers than groups; a reduction other than the mean without an axis; parts
            that a ``dim_reduce`` from files excludes; at trace time, replica axes other than those
            of ``mesh`` if servers are combined.
        """
        finish = self.config.get("dim_reduce", {})
        checks.transformation("Boost.optimizer", "inner", inner)
        kind, _, spec = self._parts("reduce")[0]
        require(spec == _MEAN or not self.strict or axis_name is not None, "axis", None, kind=kind)
        if finish.keys() & {*keys.FILES}:
            for name, value in self.config.items():
                is_valid = name in keys.DATA["with_files"] or (name, value) == ("reduce", _MEAN)
                require(is_valid, "whole", value, name=name)
            residual = None if "residual_rate" in finish else inner
            return self.finish(keys.FILES, params, residual=residual, axis_name=axis_name)
        order = list(keys.DATA["order"])
        drop = self.config.get("accumulate", {}).get("drop", "micro-batch")
        require(drop in ("micro-batch", "window"), "drop", drop)
        if drop == "window":
            # The scaler moves into the window, so that an overflow drops the whole window.
            order.remove("loss_scale")
            order.insert(order.index("accumulate"), "loss_scale")
        return self._stacked(order, inner, axis_name=axis_name, tree=params, less_bn=less_bn)

    def mesh(self, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
        """Make the mesh of the replicas, with an axis of servers if AdaSum combines servers.

        Args:
          devices: the devices of the replicas; ``None`` means ``jax.devices()``.

        Returns:
          A mesh with the axis ``"data"``. If the configuration has a number ``within`` (MindSpore's
          ``device_number``) below the number of devices, a mesh with the axes ``"server"`` and
          ``"data"``. Pass the mesh to other calls as ``mesh=mesh, axis_name=mesh.axis_names``.
          Cost: none.

        Raises:
          ValueError: a number of devices that is not a multiple of ``within``.
        """
        devices = devices or jax.devices()
        within = self.config.get("reduce", {}).get("within")
        sizes, names = keys.mesh_of_servers(len(devices), within)
        types = (jax.sharding.AxisType.Auto,) * len(names)
        return jax.make_mesh(sizes, names, types, devices=devices)

    def model(self, module: Any, /, *args: PyTree, **kwargs: PyTree) -> tuple[Any, Report]:
        """Remove BatchNorms from the model and normalise its head, if LessBN is on.

        Args:
          module: a Flax module.
          *args: sample arguments of the module: see ``boostax.less_bn``.
          **kwargs: sample keyword arguments of the module.

        Returns:
          The model, and a report of the changes; the unchanged module and ``None`` if LessBN is
          off. Cost: one trace.

        Raises:
          ValueError, TypeError, ImportError: as ``boostax.less_bn``. For a MindSpore dictionary, a
            model without BatchNorms to remove is returned unchanged.
        """
        if "less_bn" not in self.config:
            return module, None
        options = keys.sequences(self.config["less_bn"], tuple)
        return changed(module, (args, kwargs), **options, strict=self.strict)

    def make_train_step(
        self, loss_fn: Fn, inner: Tx, params: Any = None, *, less_bn: Report = None, **options: Any
    ) -> boostax.train.TrainStep:
        """Call ``boostax.make_train_step`` with this chain, policy and number of micro-batches.

        Args:
          loss_fn: see ``boostax.make_train_step``.
          inner: see ``optimizer``.
          params: see ``optimizer``; ``step.init`` needs the params again.
          less_bn: if LessBN is on, the report that ``model`` returned.
          **options: options of ``boostax.make_train_step``, such as ``mesh``. The chain also gets
            the option ``axis_name``.

        Returns:
          A ``TrainStep``. Cost: see ``boostax.make_train_step``.

        Raises:
          ValueError, TypeError: as ``boostax.make_train_step`` and ``optimizer``; ``less_bn`` is
            missing although LessBN is on, or describes another model than ``params``.
        """
        is_on = "less_bn" in self.config
        require(is_on or less_bn is None, "less_bn_off", less_bn)
        require(not is_on or isinstance(less_bn, LessBNReport), "less_bn", less_bn)
        if less_bn is not None:
            paths = " ".join(f"/{name}/" for name in trees.names(params))
            same = [x for x in less_bn.removed if f"/{x}/" in paths]
            if paths and less_bn.head and f"/{less_bn.head}/multiplier/" not in paths:
                same.append(less_bn.head)
            require(not same, "unchanged", f"params of the unchanged model at {', '.join(same)}")
        options.setdefault("microbatches", self.config.get("microbatches", 1))
        names = axes.of_mesh("make_train_step", options.get("axis_name"), options.get("mesh"))
        tx = self.optimizer(inner, params, axis_name=names or None, less_bn=less_bn)
        return boostax.make_train_step(loss_fn, tx, policy=self.policy, **options)

    def finish(
        self, source: PyTree, params: PyTree, *, residual: Tx | None = None, axis_name: Axes = None
    ) -> Chain:
        """Build the transformation for the end of a run: ``dim_reduce``, inside the loss scaler.

        The transformation needs gradients that no window, freezing or clipping has changed. Pass it
        to ``boostax.make_train_step``, with ``policy`` and larger batches.

        Args:
          source: an optimizer state that recorded snapshots, or a ``boostax.subspace.Basis``.
          params: the current params, which become the latest snapshot if ``source`` is a state.
          residual: an optimizer for the part of the gradient outside of the span of the basis; the
            part is averaged over ``axis_name`` first. ``None`` means SGD with the rate
            ``residual_rate``, if the configuration sets this rate.
          axis_name: the replica axis (or axes).

        Returns:
          A transformation. Cost: as ``boostax.dim_reduce``.

        Raises:
          KeyError: no ``dim_reduce`` in the configuration.
          ValueError, TypeError: a state with too few snapshots; errors of ``boostax.dim_reduce``.
        """
        place = {"axis_name": axis_name, "tree": params, "source": source, "residual": residual}
        (tx,) = keys.layer(boostax.dim_reduce, self.config["dim_reduce"], [], **place)
        return self._stacked(["loss_scale"], tx, **place)

    def _stacked(self, order: Sequence[str], inner: Tx, **place: PyTree) -> Chain:
        """Put each part, in the recommended order, in front of the chain or around the chain."""
        replicas = axes.canonical("Boost.optimizer", place["axis_name"])
        parts = [inner]
        for key in order:
            for _, factory, arguments in self._parts(key) if replicas or key != "reduce" else ():
                parts = keys.layer(factory, arguments, parts, **place)
        return optax.with_extra_args_support(keys.chained(parts))

    def _parts(self, key: str) -> list[tuple[str, keys.Factory, keys.Data]]:
        """Return kind, factory and arguments of each part of a key, the user's parts last."""
        users = [(x, f, self.config[x]) for x, (f, after) in self.factories.items() if after == key]
        arguments = self.config.get(key, _MEAN if key == "reduce" else None)
        # A user's reduction replaces boostax's reduction; other user parts follow boostax's part.
        if arguments is None or (users and key == "reduce"):
            return users
        # A key with a single factory has the kind "".
        kind = "" if "" in keys.PARTS[key] else arguments["kind"]
        return [(kind, keys.PARTS[key][kind], arguments), *users]


@checks.arguments
def auto(
    spec: Any, *, level: Level = None, strict: bool | None = None, factories: Sequence[Fn] = ()
) -> Boost:
    """Read a configuration: a level, a dictionary or a JSON file.

    The name of each public factory is a key. Its value is a dictionary of the factory's arguments,
    with the same types and defaults: ``{"top_k_reduce": {"density": 0.01}}``. The keys ``"reduce"``
    and ``"loss_scale"`` choose a factory by ``"kind"``. Further keys are ``"clip"``,
    ``"centralize"``, ``"freeze"``, ``"policy"``, ``"microbatches"`` and ``"less_bn"``. If a value
    is not a dictionary, it is the kind or, for a key without kinds, the first argument. ``True``
    selects the defaults. ``False`` or ``None`` leaves the part out. ``groups`` replaces a tree of
    labels, and the arguments of ``freeze_schedule`` replace a schedule.

    A level, or a dictionary with a key of MindSpore's (``"boost"``, ``"grad_freeze"``,
    ``"loss_scale_manager"`` ...), is read as MindSpore reads it. ``notes`` lists settings that have
    no effect in MindSpore, and differences that may change the trained weights. The levels are

    ===== ====================================================================================
    level switches on
    ===== ====================================================================================
    O0    nothing
    O1    LessBN with a normalised head, gradient centralization, freezing at random
    O2    the same, and AdaSum, which has no effect in MindSpore together with freezing
    ===== ====================================================================================

    The levels are those of ``mindspore.boost``, not the values of MindSpore's ``amp_level``.
    ``{"singa": {"dist_option": "sparseTopK"}}`` names a mode of Apache SINGA. Dictionaries of
    MindSpore and of SINGA may also have the keys ``level`` and ``strict`` and all keys of boostax,
    so that one file describes a whole job. Keys of boostax add settings that MindSpore lacks:
    ``{"grad_freeze": {...}, "freeze": {"order": [...]}}``. The key ``"sens"`` multiplies the
    gradients by a number.

    Args:
      spec: ``"O0"``, ``"O1"`` or ``"O2"``; a dictionary for boostax, such as ``Boost.config``, for
        MindSpore, or with the key ``"singa"``; or the path of a JSON file with such a dictionary.
      level: the level to which a dictionary or a file is applied; ``None`` is ``"O0"``.
      strict: whether settings that MindSpore ignores are errors, and every part that the
        configuration switches on must be in the chain and the step. ``None`` means True for
        dictionaries with only boostax's keys, else False.
      factories: your own functions that make transformations; their names become keys.
        ``boostax.describe`` gives each function a role, which decides the position in the chain.
        Your own reduction replaces the mean.

    Returns:
      A ``Boost``. Cost: none. There is no global state, and nothing in the file is executed.

    Raises:
      ValueError, TypeError: unknown keys, kinds, arguments or levels; missing arguments; parts that
        exclude one another; values out of range in MindSpore's and SINGA's settings. Other values
        are checked by the factories when the chain is built. OSError: the file does not exist.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> boost = boostax.auto({"loss_scale": "dynamic", "accumulate": 4, "clip": 1.0})
      >>> boost.config
      {'loss_scale': {'kind': 'dynamic'}, 'accumulate': {'every': 4}, 'clip': {'max_norm': 1.0}}
      >>> tx = boost.optimizer(optax.adam(1e-3))
      >>> type(tx.init(jnp.zeros(3))).__name__
      'LossScaleState'
      >>> boostax.auto(boost.config) == boost
      True

    References:
      MindSpore 2.10, ``mindspore.boost.AutoBoost``, which is one global object per process.
    """
    is_file = isinstance(spec, pathlib.Path) or (isinstance(spec, str) and spec.endswith(".json"))
    data: Any = json.loads(pathlib.Path(spec).read_text()) if is_file else spec
    if isinstance(data, str) and data in dictionary.LEVELS and level is None:
        data = {"level": data}
    require(isinstance(data, Mapping), "spec", data, near=checks.nearest(data, dictionary.LEVELS))
    data = dict(cast("keys.Data", data))
    # The dictionary and the arguments must not contradict each other.
    settings: dict[str, Any] = {"level": level, "strict": strict}
    for name, value in settings.items():
        other = data.pop(name, None)
        require(value is None or other in (None, value), "twice", value, name=name, there=other)
        settings[name] = other if value is None else value
    flag = settings["strict"]
    require(isinstance(flag, bool | None), "flag", flag, TypeError, who=_WHO, what="strict")
    users: dict[str, tuple[keys.Factory, str]] = {}
    for factory in factories:
        name = getattr(factory, "__name__", repr(factory))
        require(callable(factory) and name not in keys.NAMED, "factory", factory)
        if (value := data.get(name)) is None or value is False:
            data.pop(name, None)
            continue
        arguments = keys.part(name, value, user=factory)
        kind = role(read(keys.layer(factory, arguments, [optax.identity()], axis_name="axis")[0]))
        require(kind in keys.PLACES, "role", kind, name=name)
        users[name] = (factory, keys.PLACES[kind])
    return _read(data, settings["level"] or "O0", flag, users)


def _read(data: keys.Data, level: dictionary.Level, strict: bool | None, users: Own) -> Boost:
    """Read the keys of MindSpore and SINGA in a dictionary; boostax's keys override them."""
    foreign = dictionary.is_mindspore(data)
    is_strict = not foreign if strict is None else strict
    # MindSpore ignores unknown keys. So boostax refuses an unknown key only if the dictionary also
    # has keys of boostax.
    both = data.keys() - {*dictionary.KEYS} & {*keys.KEYS, *users, "singa"}
    off = {x for x in {*keys.KEYS} & {*data} if data[x] is None or data[x] is False}
    names = [x for x in data if x not in off and (x in dictionary.KEYS or not both)]
    theirs = {x: data.pop(x) for x in names if foreign}
    config, notes = dictionary.from_mindspore(theirs, level, strict=is_strict)
    sources = dict.fromkeys(config if theirs else (), "MindSpore's dictionary")
    frozen = "freeze" in config
    if "singa" in data:
        config["reduce"] = dictionary.from_singa(data.pop("singa"))
        sources["reduce"] = "singa"
    keys.known(data, (*keys.KEYS, *users, *(dictionary.KEYS if foreign else ())), "keys")
    for name, value in data.items():
        key, _ = keys.NAMED.get(name, (name, ""))
        whose = sources.get(key, "")
        before = config.get(key, {})
        # A key of boostax may turn off a part that MindSpore's keys turn on, or add settings that
        # MindSpore's keys do not have.
        adds = name == key and isinstance(value, Mapping)
        valid = not whose or (whose[0] == "M" and (adds or name in off))
        require(valid, "another" if whose[:1] == "a" else "beside", value, name=name, whose=whose)
        for x in before if whose and adds else ():
            require(x not in value, "sets", value.get(x), name=f"{name}.{x}", whose=whose)
        sources[key] = f"another {key}"
        if name == "microbatches":
            config[key] = checks.positive_int(_WHO, name, value, "1 does not split the batch.")
        elif name in off:
            config.pop(key, None)
        else:
            config[key] = keys.part(name, value, before, users.get(name, [None])[0])
    # With moments per group, each depth would have a separate scaler and window, which
    # ``scheduled_freeze`` refuses.
    gates = {"loss_scale", "accumulate"} & {*config, *(key for _, key in users.values())}
    if frozen and "freeze" in config and gates:
        config["freeze"] = config["freeze"] | {"moments": "shared"}
        notes += (dictionary.DATA["why"]["freeze"],)
    return Boost(config, notes, users, is_strict and (strict is True or level == "O0"))
