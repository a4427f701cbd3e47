# SPDX-License-Identifier: Apache-2.0
"""Take quasi-Newton steps in the principal subspace of a training trajectory.

``learn``, ``search`` and ``conclude`` compute directions and a backtracking line search in a few
coordinates; ``dim_reduce`` makes a transformation from these functions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from boostax._core import axes, checks, gate, handshake, trees, types
from boostax._core.describe import Holds, describe
from boostax._core.types import PyTree
from boostax.order import findings
from boostax.subspace.basis import Basis, Dtype, Names, lift, project, stored, wide_dtype

Loss = Callable[[PyTree], jax.Array]
Residual = optax.GradientTransformation | None
Parts = tuple[PyTree, jax.Array | None, PyTree]
RuleName = Literal["boostax", "mindspore"]
Failure = Literal["reset", "rollback"]
_WHO = "dim_reduce"


@dataclasses.dataclass(frozen=True)
class SubspaceRule:
    r"""The constants of directions and of line searches.

    Attributes:
      tries: number of step lengths that are tried: 1, shrink, shrink**2, and so on.
      shrink: in (0, 1).
      slope: a length is accepted if the loss decreases by this share of the decrease that the slope
        predicts (Armijo's constant).
      slack: the relative increase of the loss that is treated as rounding.
      curvature: the pair of a step ``s`` and the gradient's change ``y`` is used if ``y.s >
        curvature * |y| * |s|`` and ``y.s > least_curvature``.
      least_curvature: see ``curvature``.
      scaled: whether the first inverse Hessian is ``y.s / y.y`` times the identity.
      failure: the new inverse Hessian if no length is accepted: ``"reset"`` for the identity times
        the last tried length, or ``"rollback"`` for the matrix before the step.
      towards_mean: whether the first step leads to the mean of the snapshots, if the mean is known
        and lies downhill.
    """

    tries: int = 10
    shrink: float = 0.5
    slope: float = 1e-4
    slack: float = 1e-6
    curvature: float = 1e-4
    least_curvature: float = 0.0
    scaled: bool = True
    failure: Failure = "reset"
    towards_mean: bool = True


# MindSpore 2.10 tries two step lengths, begins with the identity as the inverse Hessian, and rolls
# back if both lengths fail.
MINDSPORE = SubspaceRule(2, 0.55, 0.4, 0.0, 0.0, 1e-20, False, "rollback", False)
RULES: dict[RuleName, SubspaceRule] = {"boostax": SubspaceRule(), "mindspore": MINDSPORE}


class Memory(NamedTuple):
    """The curvature learnt in k coordinates.

    Attributes:
      inverse: f32 or wider ``(k, k)``, the estimate of the inverse Hessian.
      gradient: ``(k,)``, the last gradient.
      step: ``(k,)``, the last step taken.
      started: bool, whether ``gradient`` is set.
      paired: bool, whether any pair has been used.
    """

    inverse: jax.Array  # (k, k) float32 or wider
    gradient: jax.Array  # [k] float32 or wider
    step: jax.Array  # [k] float32 or wider
    started: jax.Array  # [] bool
    paired: jax.Array  # [] bool


class Search(NamedTuple):
    """The result of a line search.

    Attributes:
      length: scalar of the loss's dtype, 0 if no length is accepted.
      accepted: bool scalar.
      tries: i32 scalar, number of computed losses.
      last: the last tried length.
    """

    length: jax.Array  # [] dtype of the loss
    accepted: jax.Array  # [] bool
    tries: jax.Array  # [] int32
    last: jax.Array  # [] dtype of the loss


def empty(k: int, dtype: Dtype) -> Memory:
    """Return an empty memory, whose inverse Hessian is the identity."""
    inverse = jnp.eye(k, dtype=dtype)
    kinds = [(k, dtype)] * 2 + [((), bool)] * 2
    return Memory(inverse, *(jnp.zeros(*kind) for kind in kinds))


def learn(memory: Memory, gradient: jax.Array, rule: SubspaceRule) -> Memory:
    r"""Update the inverse Hessian by BFGS, if the new pair passes ``rule.curvature``.

    .. math:: H \leftarrow V^\top H V + \rho s s^\top, \quad V = I - \rho y s^\top, \quad
      \rho = 1 / y^\top s
    """
    s, y = memory.step, gradient - memory.gradient
    product = y @ s
    lengths = jnp.sqrt((y @ y) * (s @ s))
    use = memory.started & ((product > rule.curvature * lengths) & (product > rule.least_curvature))
    rho = 1.0 / jnp.where(use, product, 1.0)
    inverse = memory.inverse
    if rule.scaled:
        first = jnp.eye(s.size, dtype=inverse.dtype) * product / jnp.where(use, y @ y, 1.0)
        inverse = jnp.where(memory.paired, inverse, first)
    v = jnp.eye(s.size, dtype=inverse.dtype) - rho * jnp.outer(y, s)
    updated = v.T @ inverse @ v + rho * jnp.outer(s, s)
    inverse = jnp.where(use, updated, memory.inverse)
    return Memory(inverse, gradient, s, started=jnp.ones((), bool), paired=memory.paired | use)


def search(loss: Loss, value: jax.Array, slope: jax.Array, rule: SubspaceRule) -> Search:
    r"""Return the first of the lengths :math:`t` that decreases the loss enough (Armijo).

    .. math:: L(t) < L(0) + \text{rule.slope} \cdot t\,L'(0) + \text{rule.slack} \cdot |L(0)|

    A length whose loss is not finite is never accepted.

    Args:
      loss: :math:`L`, a function of the length along the direction.
      value: :math:`L(0)`.
      slope: :math:`L'(0)`, the gradient times the direction.
      rule: the constants of the search.
    """
    shrink = jnp.asarray(rule.shrink, value.dtype)
    slack = rule.slack * jnp.abs(value)

    def body(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tried, _, _ = carry
        t = shrink ** tried.astype(value.dtype)
        trial = loss(t).astype(value.dtype)
        enough = trial < value + rule.slope * t * slope + slack
        return tried + 1, t, enough & jnp.isfinite(trial)

    start = (jnp.zeros((), jnp.int32), jnp.zeros((), value.dtype), jnp.zeros((), bool))
    tries, last, accepted = jax.lax.while_loop(lambda x: ~x[2] & (x[0] < rule.tries), body, start)
    return Search(jnp.where(accepted, last, 0.0), accepted, tries, last)


def conclude(
    before: Memory, memory: Memory, step: jax.Array, result: Search, rule: SubspaceRule
) -> Memory:
    """Return the memory after a line search; see ``rule.failure`` if no length was accepted."""
    if rule.failure == "rollback":
        moved = memory._replace(step=step)
        back = before._replace(started=memory.started, paired=memory.paired)
        return jax.tree.map(lambda new, old: jnp.where(result.accepted, new, old), moved, back)
    # After a failed search, the next direction is shorter by the last factor that the search tried.
    size = jnp.trace(memory.inverse) / step.size
    shorter = jnp.eye(step.size, dtype=step.dtype) * size * result.last
    inverse = jnp.where(result.accepted, memory.inverse, shorter)
    step = jnp.where(result.accepted, step, 0.0)
    return memory._replace(inverse=inverse, step=step, paired=memory.paired & result.accepted)


class DimReduceState(NamedTuple):
    """State of ``dim_reduce``.

    Attributes:
      basis: tree like the params, with leaves ``(k, *leaf.shape)``, orthonormal over all leaves
        together.
      explained: f32, the share of the snapshots' variance in the span; ``None`` if unknown.
      memory: the curvature learnt in the k coordinates.
      to_mean: ``(k,)``, coordinates of the mean of the snapshots relative to the params at
        ``init``; zeros if the mean is unknown.
      steps: i32, steps taken.
      accepted: i32, steps whose line search accepted a length.
      tries: i32, number of losses computed by line searches.
      skipped: i32, calls that were skipped because the loss or gradient was not finite.
      applied: bool, whether the loss and gradient of the last call were finite.
      energy: f32, ``|P g|**2 / |g|**2``: the share of the last gradient in the span.
      length: f32, the last length; 0 if no length was accepted.
      residual_state: state of the residual optimizer.
    """

    basis: PyTree  # (k, *leaf.shape), dtypes of the basis or ``dtype``
    explained: PyTree  # [] float32 or None
    memory: Memory
    to_mean: jax.Array  # [k] float32 or wider
    steps: jax.Array  # [] int32
    accepted: jax.Array  # [] int32
    tries: jax.Array  # [] int32
    skipped: jax.Array  # [] int32
    applied: jax.Array  # [] bool
    energy: jax.Array  # [] float32
    length: jax.Array  # [] float32
    residual_state: optax.OptState
    holds = Holds(("basis", "explained", "memory", "to_mean"), basis="basis")

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        steps = jnp.maximum(self.steps, 1).astype(jnp.float32)
        known = {} if self.explained is None else {"subspace_explained": self.explained}
        return known | {
            "subspace_energy": self.energy,
            "subspace_steps": self.steps,
            "subspace_acceptance": self.accepted / steps,
            "subspace_tries": self.tries / steps,
            "subspace_length": self.length,
        }

    def with_basis(self, basis: Basis | PyTree) -> "DimReduceState":
        """Return the state with another basis and without the learnt curvature."""
        rows, explained, _ = _parts(basis)
        got, like = (jax.tree.map(jnp.shape, tree) for tree in (rows, self.basis))
        hint = "A compiled step accepts only a basis of the same shapes and dtypes."
        checks.require(got == like, "replace_basis", "basis", got, f"of the shapes {like}", hint)
        rows = jax.tree.map(lambda p, q: jnp.array(p, q.dtype, copy=True), rows, self.basis)
        explained = None if self.explained is None else explained
        memory = empty(self.memory.gradient.size, self.memory.gradient.dtype)
        to_mean = jnp.zeros_like(self.to_mean)
        return self._replace(basis=rows, explained=explained, memory=memory, to_mean=to_mean)

    inner_ran = gradient_used = gate.flag


# The branch of a step does not change these fields.
_UNCHANGED = ("basis", "explained", "to_mean", "skipped", "applied")


def _parts(basis: Basis | PyTree) -> Parts:
    """Return the components, the share of the variance in their span and the mean.

    The share and the mean are ``None`` unless ``basis`` is a ``Basis``.
    """
    if isinstance(basis, Basis):
        return basis.components, jnp.sum(basis.explained), basis.mean
    return basis, None, None


def _parts_for(basis: Basis | PyTree, params: PyTree, dtype: Dtype) -> Parts:
    """Return ``_parts`` of the argument ``basis``, with components in ``dtype``.

    Raises:
      ValueError: the components do not fit the params.
    """
    if not jax.tree.leaves(params):
        # ``optax.tree.map_params`` calls ``init`` without params to get the structure of the state.
        return params, _parts(None if callable(basis) else basis)[1], None
    rows, explained, mean = _parts(basis(params) if callable(basis) else basis)
    if any(map(trees.is_masked, trees.nodes(params))):
        active = jax.tree.map(lambda p: not trees.is_masked(p), params, is_leaf=trees.is_masked)
        rows = trees.masked(rows, active)
        mean = mean and trees.masked(mean, active)
    got, expected = map(jax.tree.structure, (rows, params))
    hint = "Pass boostax.subspace.pca_basis(snapshots, k) of the same params."
    checks.require(got == expected, _WHO, "basis", got, f"a tree like the params, {expected}", hint)
    k = (jnp.shape(jax.tree.leaves(rows)[0]) or (1,))[0]
    like = jax.tree.map(lambda p: jax.ShapeDtypeStruct((k, *jnp.shape(p)), jnp.float32), params)
    trees.require_shapes(_WHO, "basis", rows, like, hint)
    return stored(rows, dtype), explained, mean


def _initial(
    basis: Basis | PyTree, dtype: Dtype, residual: Residual, use_mean: bool, params: PyTree
) -> DimReduceState:
    rows, explained, mean = _parts_for(basis, params, dtype)
    wide = trees.at_least_float32(params)
    inner = () if residual is None else trees.unshared(residual.init(wide), params)
    leaves = jax.tree.leaves(rows)
    dtypes = [jnp.finfo(wide_dtype(x)).dtype for x in leaves]
    # Without params there is one coordinate, which is 0.
    memory = empty(leaves[0].shape[0] if leaves else 1, jnp.result_type(jnp.float32, *dtypes))
    to_mean = jnp.zeros_like(memory.gradient)
    if use_mean and mean is not None:
        to_mean = project(rows, jax.tree.map(jnp.subtract, mean, wide)).astype(to_mean.dtype)
    counts = [jnp.zeros((), jnp.int32) for _ in range(4)]
    last = [jnp.zeros((), dtype) for dtype in (bool, jnp.float32, jnp.float32)]
    return DimReduceState(rows, explained, memory, to_mean, *counts, *last, residual_state=inner)


def _measured(
    state: DimReduceState, raw: PyTree, value: ArrayLike, names: Names, shards: Names
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a gradient's coordinates, its squared norms in the span and in total, and the loss."""
    gradient = trees.at_least_float32(raw)
    inside = project(state.basis, gradient, shards, _WHO)
    parts = [jnp.sum(g.real**2 + g.imag**2).astype(inside.dtype) for g in jax.tree.leaves(gradient)]
    full = axes.shard_total(parts, shards, _WHO)
    squares = jnp.stack([axes.to_varying(inside @ inside, axes.varying(full)), full])
    squares = axes.mean(squares, names)
    inside = axes.mean(inside.astype(state.memory.gradient.dtype), names)
    loss = axes.mean(trees.at_least_float32(jnp.asarray(value)), names)
    return inside, squares, loss.astype(inside.dtype)


def _search_along(
    rule: SubspaceRule,
    names: Names,
    state: DimReduceState,
    inside: jax.Array,
    now: jax.Array,
    params: PyTree,
    loss_at: Loss,
    residual: Residual,
) -> tuple[dict[str, PyTree], PyTree, PyTree]:
    """Return new fields of the state, the step, and the part of the gradient in the span."""
    learnt = learn(state.memory, inside, rule)
    direction = -learnt.inverse @ inside
    if rule.towards_mean:
        # If the snapshots oscillate around a minimum, the minimum is near their mean.
        downhill = (state.to_mean @ inside < 0) & ~state.memory.started
        direction = jnp.where(downhill, state.to_mean, direction)
    # One read of the basis converts ``direction`` and ``inside`` to trees like the params.
    both = lift(state.basis, jnp.stack([direction, inside][: 1 if residual is None else 2], 1))
    along, shadow = (jax.tree.map(lambda x, i=i: x[i], both) for i in (0, -1))
    wide = trees.at_least_float32(params)

    def loss(t: jax.Array) -> jax.Array:
        trial = jax.tree.map(
            lambda w, d, p: (w + t * d.astype(w.dtype)).astype(p.dtype), wide, along, params
        )
        value = axes.mean(trees.at_least_float32(jnp.asarray(loss_at(trial))), names)
        axes.require_invariant(value, _WHO)
        return value

    result = search(loss, now, inside @ direction, rule)
    moved = {
        "memory": conclude(state.memory, learnt, result.length * direction, result, rule),
        "steps": jnp.asarray(optax.safe_increment(state.steps)),
        "accepted": state.accepted + result.accepted,
        "tries": state.tries + result.tries,
        "length": result.length.astype(jnp.float32),
    }
    return moved, jax.tree.map(lambda w, d: result.length * d.astype(w.dtype), wide, along), shadow


def dim_reduce(
    basis: Basis | PyTree,
    *,
    residual: Residual = None,
    rule: SubspaceRule | RuleName = "boostax",
    dtype: Dtype = None,
    axis_name: axes.AxisName | None = None,
    shard_axes: axes.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Take quasi-Newton steps with a line search inside the span of a basis.

    Let the rows of :math:`P` be the orthonormal directions of the basis, :math:`g` the gradient,
    and :math:`H` the inverse Hessian that BFGS has learnt in the coordinates of the directions. A
    step is

    .. math::
      d = -H P g, \qquad w \leftarrow w + t\, P^\top d + \text{residual}(g - P^\top P g).

    The length :math:`t` is the first of 1, 1/2, 1/4 and so on that decreases the loss enough. If
    ten lengths fail, only the residual optimizer changes the params, and the next direction is
    shorter. The first direction leads to the mean of the snapshots, if the mean is known and lies
    downhill. Use ``dim_reduce`` to end a run: about ten steps replace a longer decay of the
    learning rate, and further steps change little. A call whose loss or gradient is not finite is
    skipped, and counted in ``skipped``.

    Args:
      basis: ``trajectory_basis(...)`` or ``pca_basis(...)``; a tree like the params with leaves
        ``(k, *leaf.shape)`` and orthonormal rows; or a function of the params that returns a basis.
        The state has a copy of the basis; ``replace_basis`` exchanges the basis without a
        recompilation.
      residual: any Optax optimizer, for the part of the gradient outside the span.
      rule: ``"boostax"``; ``"mindspore"`` for the exact rule of MindSpore 2.10; or your own
        ``SubspaceRule``.
      dtype: floating dtype in which the basis is stored; ``None`` keeps the basis's dtypes.
      axis_name: replica axis, or axes, over which gradients are local. Coordinates and losses are
        averaged over these axes. A ``residual`` must reduce the remainder of the local gradients,
        :math:`g_r - P^\top P \bar g`, for example ``residual=chain(all_reduce("data"),
        adamw(...))``. Use ``None`` if the gradients are already reduced.
      shard_axes: axes over which leaves are sharded (FSDP) inside ``jax.shard_map``.

    Returns:
      A transformation with a ``DimReduceState``. The ``update`` of the transformation needs
      ``value=`` (the loss) and ``value_fn=`` (the unscaled loss as a function of the params, for
      the same batch and key), which ``make_train_step`` passes. If an earlier transformation has
      changed ``updates``, ``update`` also needs ``grad=``, the gradient of ``value_fn``. One
      warning reports gradients that were clipped, decayed or changed otherwise. Cost: k copies of
      the params in ``dtype``, sharded like the params and read twice per step; two to four
      temporary copies of the params; on average one or two more forward passes; all-reduces of
      ``4k`` bytes, 8 bytes for the energy and 4 bytes for each loss, over replicas and over shards.

    Raises:
      ValueError, TypeError: an argument out of range, a basis that does not fit the params, no
        ``value_fn`` or ``value``, or gradients that are already reduced.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> loss = lambda w: jnp.sum((w - 3.0) ** 2)
      >>> tx = boostax.dim_reduce(jnp.eye(2, 4))
      >>> w = jnp.zeros(4)
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...   value, grad = jax.value_and_grad(loss)(w)
      ...   updates, state = tx.update(grad, state, w, value=value, value_fn=loss)
      ...   w = optax.apply_updates(w, updates)
      >>> [round(float(x), 3) for x in w]
      [3.0, 3.0, 0.0, 0.0]

    References:
      Li et al., Low Dimensional Trajectory Hypothesis is True: DNNs Can Be Trained in Tiny
      Subspaces, https://arxiv.org/abs/2103.11154, 2021. MindSpore 2.10, ``boost.dim_reduce``.
    """
    if not isinstance(rule, SubspaceRule):
        checks.choice(_WHO, "rule", rule, RuleName, "'boostax' is the default.")
    constants = rule if isinstance(rule, SubspaceRule) else RULES[rule]
    checks.choice(_WHO, "rule.failure", constants.failure, Failure, "'reset' is the default.")
    names, shards = (axes.canonical(_WHO, x) for x in (axis_name, shard_axes))
    narrow = None if dtype is None else checks.floating_dtype(_WHO, "dtype", dtype)
    outside = None if residual is None else checks.transformation(_WHO, "residual", residual)

    @describe(_WHO, "subspace", names, inner={} if outside is None else {"residual_state": outside})
    def update_fn(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        value: PyTree = None,
        grad: PyTree = None,
        value_fn: PyTree = None,
        **extra: Any,
    ) -> tuple[PyTree, DimReduceState]:
        raw = updates if grad is None else grad
        required = {"params": params, "value": value, "value_fn": value_fn}
        missing = next((f"no {name}" for name, x in required.items() if x is None), "")
        hint = "make_train_step passes value and value_fn, which computes the loss for any params."
        checks.require(not missing, _WHO, "update", missing, f"given {', '.join(required)}", hint)
        axes.require_local(raw, names, _WHO)
        # In a step, the order of the chain was checked.
        if grad is None and not axes.bound().names and handshake.is_nonlinear(updates, params):
            findings.of_part(_WHO, "changed", state)
        inside, squares, now = _measured(state, raw, value, names, shards)
        fields = {name: getattr(state, name) for name in _UNCHANGED}
        old = state._replace(**dict.fromkeys(_UNCHANGED))

        def step() -> tuple[PyTree, DimReduceState]:
            moved, total, shadow = _search_along(
                constants, names, state, inside, now, params, value_fn, outside
            )
            if outside is not None:
                wide = trees.at_least_float32((updates, params))
                part = jax.tree.map(lambda g, p: g - p.astype(g.dtype), wide[0], shadow)
                part, new = outside.update(part, state.residual_state, wide[1], value=now, **extra)
                total = jax.tree.map(lambda d, r: d.astype(r.dtype) + r, total, part)
                moved |= {"residual_state": new}
            energy = (squares[0] / jnp.where(squares[1] > 0, squares[1], 1.0)).astype(jnp.float32)
            return trees.as_updates(total, params), old._replace(energy=energy, **moved)

        # A gradient whose square overflows counts as not finite.
        ok = jnp.isfinite(now) & jnp.isfinite(inside).all() & jnp.isfinite(squares).all()
        total, moved = gate.run_or_hold(ok, step, params, old, apply=False, who=_WHO)
        return total, moved._replace(**fields | {"skipped": state.skipped + ~ok, "applied": ok})

    init_fn = functools.partial(_initial, basis, narrow, outside, constants.towards_mean)
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def replace_basis(opt_state: types.State, basis: Basis | PyTree) -> types.State:
    """Replace the basis in a state, and forget the curvature learnt in the old basis.

    Args:
      opt_state: any state that contains a ``DimReduceState``.
      basis: ``pca_basis(...)`` or its components, with as many directions as before, stored in the
        old dtypes.

    Returns:
      The new state, with the old shapes and dtypes, so that a compiled step accepts it. Counters
      and the residual optimizer's state stay unchanged. ``replace_basis`` also works inside
      ``jit``. Cost: one copy of the basis.

    Raises:
      ValueError: the state has no ``DimReduceState``, or the new basis does not fit.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> state = boostax.dim_reduce(jnp.eye(2, 4)).init(jnp.zeros(4))
      >>> boostax.subspace.replace_basis(state, jnp.eye(4)[2:]).basis.tolist()
      [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    """
    hint = "Put boostax.dim_reduce into the chain."
    trees.state_of("replace_basis", opt_state, DimReduceState, hint)
    return jax.tree.map(
        lambda node: node.with_basis(basis) if isinstance(node, DimReduceState) else node,
        opt_state,
        is_leaf=lambda node: isinstance(node, DimReduceState),
    )
