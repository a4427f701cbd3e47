# SPDX-License-Identifier: Apache-2.0
"""The gradient function of a step whose loss scans layers: what happens in its backward loop.

A stack's gradients are summed in the loop, whole or in the shards of its params, or its optimizer
runs there. See ``boostax.train.layers`` for the loop.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from boostax._core import axes, checks, gate, handshake, interpret, norms, replicas, trees
from boostax._core.describe import Stepped, describe
from boostax._core.placement import Placement
from boostax._core.replicas import PerReplica, Swept
from boostax.accumulate import aux as auxiliary
from boostax.accumulate.aux import Aux, Beside, as_aux, as_given, drop_empty, own_of
from boostax.chain.parts import REDUCTIONS, read, rows
from boostax.precision.entries import BY_ELEMENT
from boostax.precision.loss_scale import scales as scales_of
from boostax.precision.policy import Policy, autocast
from boostax.train.layers import Run, Sink, Stack, inside, moved, received, require_scanned, sent
from boostax.train.oracle import Oracle, gathered

PyTree = Any
Weights = Literal["once", "by layer"]
Path = tuple[Any, ...]
# The dimensions of a layer's param that are sharded over replica axes, and these axes.
Cut = tuple[tuple[int, tuple[str, ...]], ...]
_WHO = "make_train_step"


@dataclasses.dataclass(frozen=True)
class Layers:
    """How a step runs the stacked layers that its loss scans with ``scan_layers``.

    Attributes:
      path: the path of the stacked params, ``"layers"`` or ``"decoder/blocks"``; or several.
      weights: for params that are sharded over the replicas (FSDP): gathered ``"once"`` per call in
        the dtype in which the loss computes, gradients added up whole on each device and reduced
        once; or gathered ``"by layer"`` in both passes, each layer's gradient reduced into the
        shards as soon as it exists.
      release: run the optimizer of the stack in the backward loop, layer by layer.
      host: keep the optimizer's state of the layers in the host's memory, moved to the device a
        layer at a time; with ``release``.
    """

    path: str | tuple[str, ...] = "layers"
    weights: Weights = "by layer"
    release: bool = False
    host: bool = False

    def __post_init__(self) -> None:
        hint = "'by layer' holds one layer's weights, 'once' sends them once."
        checks.choice("Layers", "weights", self.weights, ("once", "by layer"), hint)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the stacks."""
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)

    def stack_of(self, path: Path) -> str | None:
        """Return the path of the stack to which a param belongs, or ``None``."""
        name = trees.path_name(path)
        return next((x for x in self.paths if inside(name, x)), None)

    def split(self, params: PyTree) -> tuple[PyTree, dict[str, list[Any]]]:
        """Return the params without the stacks, and the leaves of each stack."""
        stacks: dict[str, list[Any]] = {name: [] for name in self.paths}

        def head(path: Path, x: Any) -> Any:
            name = self.stack_of(path)
            if name is None:
                return x
            stacks[name].append(x)
            return optax.MaskedNode()

        rest = jax.tree_util.tree_map_with_path(head, params)
        return rest, stacks

    def require_stacked(self, params: PyTree) -> None:
        """Refuse params in which a path names no stack."""
        for name, leaves in self.split(params)[1].items():
            counts = {x.shape[:1] for x in leaves}
            allowed = "one of stacked params, all [layers, ...] of one number of layers"
            hint = f"The params are {', '.join(trees.names(params)[:6])}, ..."
            fits = len(counts) == 1 and () not in counts
            checks.require("Layers", "path", name, allowed, fits, hint)

    def joined(self, head: PyTree, stacks: Mapping[str, list[Any]]) -> PyTree:
        """Put the leaves of the stacks back; ``split`` takes them out."""
        left = {name: iter(leaves) for name, leaves in stacks.items()}

        def whole(path: Path, x: Any) -> Any:
            name = self.stack_of(path)
            return x if name is None else next(left[name], x)

        return jax.tree_util.tree_map_with_path(whole, head, is_leaf=trees.is_masked)


def away(states: PyTree) -> list[bool]:
    """Return for each array of a stack's state whether it can be kept in the host's memory.

    Integers travel as other numbers, which a device computes, and counts are scalars of a layer.
    """
    return [_leaves(x) for x in jax.tree.leaves(states)]


def _leaves(x: Any, rank: int = 0) -> bool:
    return trees.is_inexact(x.dtype) and x.ndim > rank


def _put(x: Any, where: Any) -> Any:
    typed = isinstance(x, jax.ShapeDtypeStruct)
    return x.update(sharding=where) if typed else jax.device_put(x, where)


class LayersState(NamedTuple):
    """State of a step that releases gradients: see ``boostax.train.Layers``.

    Attributes:
      stacks: for each stack the states of its layers, each array ``[layers, ...]``.
      rest: the state of the optimizer of all other params.
      applied: bool, whether the last step was applied.
      skipped_layers: i32, number of updates of a layer that were skipped, because its gradient or
        the loss was not finite.
    """

    stacks: dict[str, PyTree]
    rest: PyTree
    applied: jax.Array
    skipped_layers: jax.Array

    passed = gate.told_by("applied")
    taken = gate.told_by("applied")

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        return {"skipped_layers": self.skipped_layers}


class Released(NamedTuple):
    """What a backward loop returns in the place of gradients.

    Attributes:
      params: the new params of each stack.
      states: the new states of its layers.
      finite: whether the loss was finite, so that the step is taken.
      skipped: i32, number of layers that were skipped.
    """

    params: dict[str, list[Any]]
    states: dict[str, PyTree]
    finite: jax.Array
    skipped: jax.Array


def released(
    tx: optax.GradientTransformation, layers: Layers
) -> optax.GradientTransformationExtraArgs:
    """Return ``tx`` for params whose stacks it updates in the backward loop."""
    inner = optax.with_extra_args_support(tx)
    _require_by_layer(tx)

    def init_fn(params: PyTree) -> LayersState:
        layers.require_stacked(params)
        _require_apart(tx, params)
        states, none = _first_states(tx, layers, params), jnp.zeros((), jnp.int32)
        rest = gate.init_inner(inner, layers.split(params)[0])
        return LayersState(states, rest, jnp.asarray(True), none)

    @describe("layers", "storage", inner={"rest": tx})
    def step_fn(
        grads: gate.Pending, state: LayersState, params: PyTree, *, apply: bool, **extra: Any
    ) -> Stepped:
        hint = "boostax.make_train_step(loss, tx, layers=...) makes them."
        fits = isinstance(grads.raw, Swept)
        checks.require("layers", "gradients", "others", "those of scan_layers", fits, hint)
        new: Released = grads.raw.done
        head, _ = layers.split(params)
        pending = grads._replace(raw=grads.raw.local)
        value, rest = gate.run(inner, pending, state.rest, head, apply=True, extra=extra)
        keep = lambda x, old: jnp.where(new.finite, x, old)  # noqa: E731
        value, rest = jax.tree.map(keep, (value, rest), (head, state.rest))
        value = layers.joined(value, new.params)
        if not apply:
            value = jax.tree.map(jnp.subtract, value, params)
        skipped = state.skipped_layers + new.skipped
        return value, LayersState(new.states, rest, new.finite, skipped)

    return gate.gated(init_fn, step_fn, gate.nothing_held)


def _first_states(tx: Any, layers: Layers, params: PyTree) -> dict[str, PyTree]:
    """Return for each stack the first states of its layers."""
    head, stacks = layers.split(params)

    def first(name: str, leaves: list[jax.Array]) -> PyTree:
        return gate.init_inner(tx, _alone(layers, head, name, leaves))

    with axes.binding(axes.ONE_LAYER + axes.bound()):
        return {k: jax.vmap(functools.partial(first, k))(x) for k, x in stacks.items()}


def _masked(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda _: optax.MaskedNode(), tree)


def _alone(layers: Layers, head: PyTree, name: str, leaves: list[Any]) -> PyTree:
    """Return a tree like the params with the leaves of one layer alone, at their paths."""
    return layers.joined(_masked(head), {x: leaves if x == name else [] for x in layers.paths})


def _require_by_layer(tx: optax.GradientTransformation) -> None:
    """Refuse parts that need all gradients, or several calls."""
    for row in rows(read(tx)):
        described = row.part.description
        got, hint = row.part.name, "A layer's gradient is gone when the next one exists."
        fits = row.role not in ("window", "peer window", "scaler", "hold", "check", "freeze", "carry")
        fits = fits and row.role not in ("delta", "own params", "subspace", "adder", "outer optimizer")
        checks.require(_WHO, "tx", got, "an optimizer without gates with release=True", fits, hint)
        if row.role in REDUCTIONS:
            plain = row.part.name == "all_reduce" and described is not None
            hint = "In the loop a layer's gradient is averaged: boostax.all_reduce()."
            checks.require(_WHO, "tx", got, "one with the plain mean with release=True", plain, hint)


def _require_apart(tx: optax.GradientTransformation, params: PyTree) -> None:
    """Refuse an optimizer that computes the update of a leaf from the gradients of others."""
    # Types without shardings, by which an Explicit mesh would judge the program.
    typed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    leaves, treedef = jax.tree.flatten(jax.tree.map(typed, params))

    def update(grads: list[Any], state: PyTree, params: list[Any]) -> list[Any]:
        given = gate.Pending(treedef.unflatten(grads)), state, treedef.unflatten(params)
        new, _ = gate.run(optax.with_extra_args_support(tx), *given, apply=True, extra={})
        return jax.tree.leaves(new)

    with axes.binding(axes.ONE_LAYER + axes.bound()):
        state = jax.eval_shape(lambda: gate.init_inner(tx, treedef.unflatten(map(_zeros, leaves))))
        program = jax.make_jaxpr(update)(leaves, state, leaves)
    none = frozenset[int]()
    unite = lambda facts: none.union(*facts)  # noqa: E731
    known = [frozenset([i]) for i in range(len(leaves))]
    known += [none] * (len(program.in_avals) - len(known))
    each = lambda eqn, facts: [unite(facts)] * len(eqn.outvars)  # noqa: E731
    found = interpret.flow(program, known, each, unite, none)
    fits = all(facts <= {i} for i, facts in enumerate(found))
    hint = "Clip each tensor by its own norm: boostax.model.adagc() for optax.clip_by_global_norm."
    got, allowed = "a norm of several", "one that reads the gradient of one param at a time"
    checks.require(_WHO, "tx with release=True", got, allowed, fits, hint)


def _by_entry(tx: optax.GradientTransformation, layer: PyTree) -> bool:
    """Return whether an optimizer computes each entry of a layer's params from that entry alone."""
    update = lambda g, s, w: gate.applied(tx, g, s, w, {})  # noqa: E731
    with axes.binding(axes.ONE_LAYER + axes.bound()):
        state = jax.eval_shape(lambda: gate.init_inner(tx, jax.tree.map(_zeros, layer)))
        program = jax.make_jaxpr(update)(layer, state, layer)
    # 0 for what is equal for all entries, 1 for an array of entries, 2 for anything else.
    rank = lambda x: int(bool(x.shape))  # noqa: E731

    def each(eqn: Any, facts: list[int]) -> list[int]:
        shapes = {x.aval.shape for x in (*eqn.invars, *eqn.outvars)} - {()}
        fits = eqn.primitive.name in BY_ELEMENT and len(shapes) <= 1
        fits |= eqn.primitive.name == "broadcast_in_dim" and facts == [0]
        return [max(facts) if fits or not any(facts) else 2] * len(eqn.outvars)

    join = lambda facts: max(facts, default=0)  # noqa: E731
    found = interpret.flow(program, list(map(rank, program.in_avals)), each, join, 0)
    return join(found) < 2


def _zeros(x: Any) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The layers of a step on its mesh.

    Attributes:
      layers: see ``Layers``.
      tx: the optimizer, for ``release``.
      policy: the precision policy.
      place: where the params are; ``None`` without a mesh.
      wire: the dtype in which weights are gathered, if not that of the computation.
      types: the types of the params.
    """

    layers: Layers
    tx: optax.GradientTransformation
    policy: Policy | None = None
    place: Placement | None = None
    wire: str | None = None
    types: PyTree = None

    @property
    def names(self) -> tuple[str, ...]:
        """The replica axes."""
        return () if self.place is None else self.place.names

    @functools.cached_property
    def cuts(self) -> dict[str, list[Cut]]:
        """For each stack how its params' layers are sharded over the replicas."""
        found: dict[str, list[Cut]] = {name: [] for name in self.layers.paths}
        for path, _ in jax.tree_util.tree_leaves_with_path(self.types):
            name = self.layers.stack_of(path)
            if name is None:
                continue
            spec = self.place.spec(path) if self.place else None
            cut = _cut(spec or PartitionSpec(), self.names)
            allowed = f"whole along the layers over {', '.join(self.names)}"
            got, hint = f"{spec} at {trees.path_name(path)}", "Shard another dimension."
            checks.require(_WHO, "params", got, allowed, all(dim >= 0 for dim, _ in cut), hint)
            found[name].append(cut)
        return found

    def by_entry(self, name: str) -> bool:
        """Return whether the optimizer of a stack may see the shards of a layer."""
        if not any(self.cuts[name]):
            return True
        head, stacks = self.layers.split(self.types)
        layer = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in stacks[name]]
        return _by_entry(self.tx, _alone(self.layers, head, name, layer))

    @functools.cached_property
    def state_cuts(self) -> dict[str, list[Cut]]:
        """For each stack how the arrays of a layer's state are sharded over the replicas."""
        zeros = lambda: jax.tree.map(_zeros, self.types)  # noqa: E731
        states = jax.eval_shape(lambda: _first_states(self.tx, self.layers, zeros()))
        specs = self.specs(states)
        return {k: [_cut(x, self.names) for x in jax.tree.leaves(s)] for k, s in specs.items()}

    @functools.cached_property
    def dtypes(self) -> dict[str, list[Any]]:
        """The dtypes in which the loss gets the params of each stack."""
        cast = self.types if self.policy is None else jax.eval_shape(self.policy.cast_params, self.types)
        return {k: [x.dtype for x in xs] for k, xs in self.layers.split(cast)[1].items()}

    def specs(self, tree: PyTree) -> PyTree:
        """Return the specs, over the replica axes alone, of a state, or of params."""
        assert self.place is not None
        leaves = jax.tree_util.tree_leaves_with_path(self.types)
        owners = {path: (x.shape, self.place.spec(path) or PartitionSpec()) for path, x in leaves}
        specs = replicas.specs_like(owners, tree, self.names)
        others = [x for x in self.place.mesh.axis_names if x not in self.names]
        return jax.tree.map(lambda spec: replicas.without(spec, others), specs)

    def shown(self) -> PyTree:
        """Return what the loss gets in the place of stacked params: zeros that it may not use."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.layers.split(self.types)[1])

    def gathered(self, name: str, leaves: list[jax.Array], stacked: bool = False) -> list[jax.Array]:
        """Return the weights of a layer, or of all, whole and in the dtype in which they are sent."""

        def one(x: jax.Array, cut: Cut, dtype: Any) -> jax.Array:
            x = x.astype(self.wire or dtype) if cut else x
            for dim, over in cut:
                x = _gathered(x, over, dim + stacked)
            return x

        return list(map(one, leaves, self.cuts[name], self.dtypes[name]))

    def cast(self, name: str, leaves: list[jax.Array]) -> list[jax.Array]:
        """Return weights in the dtypes in which the loss gets them."""
        return [x.astype(dtype) for x, dtype in zip(leaves, self.dtypes[name], strict=True)]

    def updated(
        self, name: str, grads: list[jax.Array], state: PyTree, params: list[jax.Array]
    ) -> tuple[list[jax.Array], PyTree]:
        """Return new params and state of a layer.

        An optimizer that looks at more than an entry gets the layer whole, on each replica.
        """
        head = self.layers.split(self.types)[0]
        tree = functools.partial(_alone, self.layers, head, name)
        of_params, of_state = self.cuts[name], [()] * len(jax.tree.leaves(state))
        shards = not self.by_entry(name)
        if shards:
            grads, params = (_whole(x, of_params) for x in (grads, params))
            of_state = self.state_cuts[name]
            state = _whole(state, of_state)
        with axes.binding(axes.ONE_LAYER + self.names):
            new, state = gate.applied(self.tx, tree(grads), state, tree(params), {})
        leaves = jax.tree.leaves(new)
        if not shards:
            return leaves, state
        return _owned(leaves, of_params), _owned(state, of_state)

    def reduced(self, name: str, grads: list[jax.Array]) -> list[jax.Array]:
        """Return the mean over the replicas of a layer's gradients, in f32, in the shards."""

        def one(g: jax.Array, cut: Cut) -> jax.Array:
            g, left = g.astype(trees.wide_dtype(g)), list(self.names)
            for dim, over in cut:
                g = _scattered(g, over, dim)
                left = [x for x in left if x not in over]
            g = lax.psum(g, tuple(left)) if left else g
            return g / axes.size(self.names) if self.names else g

        return list(map(one, grads, self.cuts[name]))


def _gathered(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """Gather shards along a dimension.

    They arrive along a leading dimension, whatever the dimension that they are shards of: XLA would
    give the whole stack another layout, to have that dimension first.
    """
    parts = jnp.moveaxis(lax.all_gather(x, names), 0, dim)
    return parts.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def _scattered(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """Sum over the replicas, each of which keeps its shard along a dimension."""
    parts = x.reshape(*x.shape[:dim], axes.size(names), -1, *x.shape[dim + 1 :])
    return lax.psum_scatter(jnp.moveaxis(parts, dim, 0), names)


def _divided(leaves: list[jax.Array], total: Any) -> list[jax.Array]:
    return auxiliary.divide(leaves, jnp.asarray(total, jnp.float32))


def _weighed(g: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Return a gradient times its weight; 0 without items, of which a mean is 0/0."""
    if factor is None:
        return g
    wide = g.astype(trees.wide_dtype(g))
    return jnp.where(factor == 0, 0, wide * factor)


def _cut(spec: PartitionSpec, names: tuple[str, ...]) -> Cut:
    """Return how a layer is sharded over the replicas, from the spec of a stack of layers."""
    found: list[tuple[int, tuple[str, ...]]] = []
    for dim, entry in enumerate(spec):
        entries = entry if isinstance(entry, tuple) else (entry,)
        if over := tuple(x for x in entries if x in names):
            found.append((dim - 1, over))
    return tuple(found)


def _whole(tree: PyTree, cuts: list[Cut]) -> PyTree:
    """Gather the arrays of a layer."""
    leaves, treedef = jax.tree.flatten(tree)
    for i, cut in enumerate(cuts):
        for dim, over in cut:
            leaves[i] = _gathered(leaves[i], over, dim)
    return treedef.unflatten(leaves)


def _owned(tree: PyTree, cuts: list[Cut]) -> PyTree:
    """Return this replica's shards of the arrays of a layer."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(list(map(_own, leaves, cuts)))


def _own(x: jax.Array, cut: Cut) -> jax.Array:
    """Return this replica's shard of a whole array."""
    for dim, over in cut:
        size = x.shape[dim] // axes.size(over)
        x = lax.dynamic_slice_in_dim(x, axes.index(over) * size, size, dim)
    return x


# What a scan over micro-batches carries besides the model's state: the sinks of the stacks, and
# whether the loss was finite.
class _Carried(NamedTuple):
    model_state: PyTree
    sinks: dict[str, PyTree]
    finite: jax.Array


@dataclasses.dataclass(frozen=True)
class LayeredOracle(Oracle):
    """The gradient function of a step with ``layers=``.

    Attributes:
      plan: the layers.
    """

    plan: Any = None

    def placed(self, types: PyTree, place: Placement | None, wire: str | None) -> "LayeredOracle":
        """Return it for params of these types at their place."""
        self.plan.layers.require_stacked(types)
        plan = dataclasses.replace(self.plan, types=types, place=place, wire=wire)
        return dataclasses.replace(self, plan=plan)

    def with_aux(
        self, params: PyTree, opt_state: PyTree, given_batch: PyTree, active: PyTree, kwargs: Any
    ) -> tuple[tuple[jax.Array, PyTree], PyTree]:
        """Return ``((loss, aux), grads)``; see ``Oracle.with_aux``."""
        plan: Plan = self.plan
        hint = "A frozen layer's gradient is computed in the loop anyway."
        checks.require(_WHO, "layers", "a frozen stack", "None with freezing", active is True, hint)
        scale, scales = scales_of("loss_scale", opt_state)
        given = {k: x for k, x in (kwargs | {"scales": scales}).items() if x is not None}
        head, stacks = plan.layers.split(params)
        states = self._states(opt_state)
        with handshake.scaling(opt_state):
            if self.mesh is None:
                value, grads = self._swept(head, stacks, states, given_batch, given, scale)
                return value, grads.entered()
            given_aux: PyTree = Aux()

            def each(params: PyTree, batch: PyTree, given: Any, scale: jax.Array) -> Any:
                nonlocal given_aux
                handshake.hand_on(scales, given.get("scales"))
                head, stacks, states = params
                (loss, aux), grads = self._swept(head, stacks, states, batch, given, scale)
                given_aux = aux
                own = own_of(aux), grads.local
                stacked = jax.tree.map(functools.partial(jnp.expand_dims, axis=0), own)
                return (loss, as_aux(aux)), stacked, grads[1:]

            whole, of_params = PartitionSpec(), plan.specs(plan.types)
            of_states = {k: plan.specs(x) for k, x in states.items()}
            of_stacks = plan.layers.split(of_params)[1]
            done = Released(of_stacks, of_states, whole, whole)
            masked = plan.layers.joined(_masked(head), of_stacks)
            handed = masked if self._by_layer else (), done if plan.layers.release else ()
            specs = whole, of_stacks, of_states
            run = self._mapped(each, (whole, PartitionSpec(self.names), handed), specs)
            head = gathered(self.mesh, self.names, head)
            (loss, told), (own, local), rest = run((head, stacks, states), given_batch, given, scale)
        aux = as_given(told, PerReplica(own), given_aux)
        return (loss, aux), Swept(PerReplica(local), *rest)

    @property
    def _by_layer(self) -> bool:
        return self.plan.layers.weights == "by layer" and not self.plan.layers.release

    def _states(self, opt_state: PyTree) -> dict[str, PyTree]:
        if not self.plan.layers.release:
            return {}
        hint = "step.init(params) makes one."
        return trees.state_of(_WHO, opt_state, LayersState, hint).stacks

    def _swept(
        self,
        head: PyTree,
        stacks: dict[str, list[jax.Array]],
        states: dict[str, PyTree],
        batch: PyTree,
        given: dict[str, Any],
        scale: jax.Array,
    ) -> tuple[tuple[jax.Array, PyTree], PyTree]:
        """Return loss, aux and gradients of one replica."""
        plan, names = self.plan, self.names
        layers: Layers = plan.layers
        once = layers.weights == "once" and not layers.release
        types = {k: jax.eval_shape(lambda x: jax.tree.map(lambda y: y[0], x), s) for k, s in states.items()}
        if once:
            stacks = {k: plan.gathered(k, x, stacked=True) for k, x in stacks.items()}
        sinks: dict[str, PyTree] = {}
        for name, leaves in stacks.items():
            if layers.release:
                none = jnp.zeros(len(leaves[0]), jnp.float32)
                bits = sent(states[name])
                # A step's argument is typed as the device's, wherever it is.
                if layers.host:
                    bits = moved(bits, jax.memory.Space.Host, away(types[name]))
                sinks[name] = Sink(leaves, bits, none)
            else:
                sinks[name] = trees.buffers(leaves, self.accumulator_dtype)
        carried_ = _Carried(given.get("model_state"), sinks, jnp.asarray(True))
        given_ = given | {"model_state": carried_}
        kind: list[Any] = []

        def evaluate(head: PyTree, rows: PyTree, counts: Any, scale: Any, /, **given: Any) -> Any:
            before: _Carried = given.pop("model_state")
            given |= {} if before.model_state is None else {"model_state": before.model_state}
            factor = self._factor(head, stacks, rows, given, once)

            def scaled_loss(head: PyTree, sinks: PyTree) -> Any:
                run = self._run(stacks, sinks, types, factor, once)
                result = run.traced(self._loss_and_aux, head, head, rows, given, scale)
                least = axes.size(names) / self._slices(batch) if names else 1 / self._slices(batch)
                loss, _, aux = auxiliary.of_slice(result, counts, None, least)
                return loss * scale.astype(loss.dtype), (loss, aux)

            with handshake.multiplied(scale):
                value, pull, (loss, aux) = jax.vjp(scaled_loss, head, before.sinks, has_aux=True)
            told, finite = as_aux(aux), before.finite
            seed = jnp.ones_like(value)
            if layers.release:
                judged = value if factor is None else jnp.where(factor > 0, value, 0)
                finite = axes.agree(jnp.isfinite(judged), names)
                if factor is not None:
                    finite &= axes.total(factor, names) > 0 if names else factor > 0
                seed = jnp.where(finite, seed, jnp.nan)
            grads, sinks = pull(seed)
            if told.weight is not None:
                loss, grads = drop_empty((loss, grads), jnp.asarray(told.weight))
            after = told.model_state if told.model_state is not None else before.model_state
            kind[:] = [aux]
            told = told._replace(model_state=_Carried(after, sinks, finite))
            return (loss, Beside(told, own_of(aux))), grads

        how: Any = {"accumulator_dtype": self.accumulator_dtype}
        forward = self._run(stacks, None, {}, None, once)
        sliced = forward.traced(self._sliced, evaluate, head, batch, given_, scale, **how)
        ((loss, both), grads), terms = sliced
        told, like = as_aux(both), kind[0]
        end: _Carried = told.model_state
        state = end.model_state if as_aux(like).model_state is not None else None
        aux = as_given(told._replace(model_state=state), own_of(both), like)
        total = self._count(batch) if told.weight is None else jnp.asarray(told.weight, jnp.float32)
        if once:
            sums = {k: _divided(x, total) for k, x in end.sinks.items()}
            grads = layers.joined(grads, sums)
        if names:
            loss, aux, grads = auxiliary.over_replicas(loss, aux, grads, names)
        count = axes.size(names) if names else 1
        mean = self._count(batch) if told.weight is None else (as_aux(aux).weight if names else total)
        aux = auxiliary.reported(aux, terms, count)
        if once:
            return (loss, aux), Swept(grads)
        if not layers.release:
            sums = {k: _divided(x, mean) for k, x in end.sinks.items()}
            return (loss, aux), Swept(grads, layers.joined(_masked(head), sums))
        params = {k: x.params for k, x in end.sinks.items()}
        new = {k: received(x.bits, types[k]) for k, x in end.sinks.items()}
        skipped = sum(x.skipped.sum() for x in end.sinks.values())
        done = Released(params, new, end.finite, jnp.asarray(skipped, jnp.int32))
        return (loss, aux), Swept(grads, done=done)

    def _loss_and_aux(
        self, trained: PyTree, params: PyTree, batch: PyTree, kwargs: Any, scale: Any = None
    ) -> Any:
        """Return the result of the loss, which gets zeros in the place of the layers."""
        shown = self.plan.layers.joined(trained, self.plan.shown())
        carried_ = kwargs.get("model_state")
        if not isinstance(carried_, _Carried):
            return super()._loss_and_aux(shown, shown, batch, kwargs, scale)
        kwargs = kwargs | {"model_state": carried_.model_state}
        kwargs = {name: x for name, x in kwargs.items() if x is not None}
        loss, aux = super()._loss_and_aux(shown, shown, batch, kwargs, scale)
        told = as_aux(aux)
        if told.model_state is not None:
            carried_ = carried_._replace(model_state=told.model_state)
        return loss, as_given(told._replace(model_state=carried_), own_of(aux), aux)

    def shardings(self, state: PyTree, where: PyTree) -> PyTree:
        """Return the shardings of a state, with those of the layers' in the host's memory."""
        if not self.plan.layers.host:
            return where

        def hosted(node: Any, at: Any) -> Any:
            if not isinstance(node, LayersState):
                return at
            move = lambda x, at: at.with_memory_kind("pinned_host") if _leaves(x, 1) else at  # noqa: E731
            return at._replace(stacks=jax.tree.map(move, node.stacks, at.stacks))

        return jax.tree.map(hosted, state, where, is_leaf=lambda x: isinstance(x, LayersState))

    def settled(self, state: PyTree) -> PyTree:
        """Return a step's first state where it belongs."""
        if not self.plan.layers.host:
            return state
        devices = jax.tree.leaves(state)[0].sharding.device_set
        kinds = {x.kind for d in devices for x in d.addressable_memories()}
        fits = "pinned_host" in kinds and all(d.platform != "cpu" for d in devices)
        hint, allowed = "Leave host= out.", "False where a backend ignores memory kinds"
        checks.require("Layers", "host", True, allowed, fits, hint)
        where = self.shardings(state, jax.tree.map(lambda x: x.sharding, state))
        return jax.tree.map(_put, state, where)

    def gathers(self, params: PyTree) -> tuple[str, ...]:
        """Return the names of the params that it gathers itself."""
        paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(params))
        return tuple(trees.path_name(path) for path in paths if self.plan.layers.stack_of(path))

    @property
    def reads(self) -> bool:
        """Return whether the loss is read before it is differentiated."""
        return True

    def judge(self, program: Any, trained: PyTree) -> None:
        """Refuse a loss that uses the layers in another way."""
        if self.mesh is not None:
            super().judge(program, trained)
        named = jax.tree_util.tree_leaves_with_path(trained)
        require_scanned(program, [self.plan.layers.stack_of(path) is not None for path, _ in named])

    def loss_at(self, batch: PyTree, /, **kwargs: Any) -> Callable[[PyTree], jax.Array]:
        """Refuse a line search, which would evaluate the loss at other params."""
        del batch, kwargs

        def refused(params: PyTree) -> jax.Array:
            del params
            hint = "Leave layers= out."
            words = checks.message(_WHO, "tx", "one without a line search with layers=", "one", hint)
            raise ValueError(words)

        return refused

    def _count(self, batch: PyTree) -> int:
        """Return the number of micro-batches of a replica."""
        return self._slices(batch) // (axes.size(self.names) if self.names else 1)

    def _factor(
        self, head: PyTree, stacks: Any, rows: PyTree, given: dict[str, Any], once: bool
    ) -> jax.Array | None:
        """Return the weight of a slice, by which its gradients count; ``None`` if all are alike.

        It is known before the pass that needs it: XLA removes from this one what only the loss
        needs.
        """

        def weight(head: PyTree, rows: PyTree) -> Any:
            run = self._run(stacks, None, {}, None, once)
            _, aux = run.traced(self._loss_and_aux, head, head, rows, given)
            return as_aux(aux).weight

        if jax.eval_shape(weight, head, rows) is None:
            return None
        local = jnp.asarray(weight(head, rows), jnp.float32)
        if not self.plan.layers.release:
            return local
        total = axes.total(local, self.names) if self.names else local
        replicas = axes.size(self.names) if self.names else 1
        return local * replicas / jnp.where(total > 0, total, 1)

    def _run(self, stacks: Any, sinks: Any, types: Any, factor: Any, once: bool) -> Run:
        """Return the stacks of a trace of the loss; without sinks those of a forward pass alone."""
        plan: Plan = self.plan
        names, release = self.names, plan.layers.release
        wrap = lambda body: body  # noqa: E731
        if plan.policy is not None and plan.policy.only_matmuls:
            wrap = functools.partial(autocast, dtype=plan.policy.compute_dtype)

        def stack(name: str, leaves: list[jax.Array]) -> Stack:
            whole = lambda x: plan.cast(name, x if once else plan.gathered(name, x))  # noqa: E731

            def added(sums: list[jax.Array], grads: list[jax.Array], _: jax.Array) -> list[jax.Array]:
                grads = [_weighed(g, factor) for g in grads]
                grads = grads if once else plan.reduced(name, grads)
                return [(a.astype(g.dtype) + g).astype(a.dtype) for a, g in zip(sums, grads, strict=True)]

            def stepped(sink: Any, grads: list[jax.Array], finite: jax.Array) -> Any:
                old, bits, skipped = sink
                grads = plan.reduced(name, [_weighed(g, factor) for g in grads])
                finite = finite if factor is None else finite | (factor == 0)
                ok = axes.agree(finite & norms.all_finite(grads), names)
                state = received(bits, types[name])
                new, after = plan.updated(name, grads, state, old)
                keep = lambda a, b: jnp.where(ok, a, b)  # noqa: E731
                new, after = jax.tree.map(keep, (new, after), (old, state))
                return Sink(new, sent(after), skipped + ~ok)

            away_ = away(types[name]) if plan.layers.host and sinks is not None else ()
            if sinks is None:
                return Stack(name, leaves, (), whole, None, wrap)
            return Stack(name, leaves, sinks[name], whole, stepped if release else added, wrap, away_)

        return Run([stack(name, leaves) for name, leaves in stacks.items()])


def layered(
    tx: optax.GradientTransformation, oracle: Oracle, layers: Layers | str, policy: Policy | None
) -> tuple[optax.GradientTransformation, LayeredOracle]:
    """Return the optimizer and the gradient function of a step with ``layers=``."""
    layers = Layers(layers) if isinstance(layers, str) else layers
    plan = Plan(layers, tx, policy)
    fields = {x.name: getattr(oracle, x.name) for x in dataclasses.fields(oracle)}
    return released(tx, layers) if layers.release else tx, LayeredOracle(**fields, plan=plan)


