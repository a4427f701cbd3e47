"""Quasi-Newton steps in the principal subspace of a training trajectory."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, trees
from boostax.subspace import quasi_newton
from boostax.subspace.basis import lift, project
from boostax.subspace.quasi_newton import Memory, Rule

PyTree = Any


class DimReduceState(NamedTuple):
    """State of ``dim_reduce``.

    Attributes:
      basis: tree like the params of ``(k, *leaf.shape)``, orthonormal as a whole.
      memory: what is known of the curvature in the k coordinates.
      steps: i32, steps taken.
      accepted: i32, of these the ones whose line search found a length that suffices.
      tries: i32, losses computed by line searches.
      energy: f32 scalar, ``|P g|**2 / |g|**2``: the share of the last gradient in the span.
      length: f32 scalar, the last length; 0 where none sufficed.
      residual_state: state of the residual optimizer, or ``()``.
    """

    basis: PyTree
    memory: Memory
    steps: jax.Array
    accepted: jax.Array
    tries: jax.Array
    energy: jax.Array
    length: jax.Array
    residual_state: Any

    def metrics(self) -> dict[str, jax.Array]:
        """Named scalars for ``boostax.metrics``."""
        return {
            "subspace_steps": self.steps,
            "subspace_accepted": self.accepted,
            "subspace_tries": self.tries,
            "subspace_energy": self.energy,
            "subspace_length": self.length,
        }


def dim_reduce(
    basis: PyTree,
    *,
    residual: optax.GradientTransformation | None = None,
    rule: Rule | Literal["boostax", "mindspore", "p-bfgs"] = "boostax",
    axis_name: axes.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Take quasi-Newton steps with a line search inside the span of a basis.

    With the rows of :math:`P` orthonormal, the gradient :math:`g` and the inverse Hessian
    :math:`H` that BFGS has learnt in the coordinates,

    .. math::
      d = -H P g, \qquad w \leftarrow w + t\, P^\top d + \text{residual}(g - P^\top P g),

    where :math:`t` is the first of 1, 1/2, 1/4, ... that makes the loss small enough; none of ten
    leaves the step to the residual, and shortens the next direction. It is a fast finish: some ten
    steps do what twice as many of a decaying learning rate do, and more steps do nothing.

    Args:
      basis: tree like the params of ``(k, *leaf.shape)``: ``pca_basis(...).components``. It goes
        into the state, where it can be replaced without compiling again.
      residual: any Optax optimizer, for the part of the gradient outside the span.
      rule: ``"mindspore"`` and ``"p-bfgs"`` do as MindSpore 2.10 and the authors' code do, faults
        included; or a ``Rule`` of one's own.
      axis_name: replica axis, or axes, over which ``value_fn`` returns the replicas' own losses:
        they are averaged. Gradients must be reduced already.

    Returns:
      A transformation with a ``DimReduceState``, whose ``update`` wants ``value=`` (the loss),
      ``value_fn=`` (params to the loss: same batch, same key, unscaled) and takes ``grad=``, the
      gradient of ``value_fn``, where ``updates`` is not that any more. Cost: k copies of the
      params, read twice; on average one or two more forward passes; with ``axis_name`` 4 bytes
      for each.

    Raises:
      ValueError, TypeError: an argument out of range, a basis that does not fit the params, no
        ``value_fn`` or ``value``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from boostax.subspace.dim_reduce import dim_reduce
      >>> loss = lambda w: jnp.sum((w - 3.0) ** 2)
      >>> tx = dim_reduce(jnp.eye(2, 4))
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
    who = "dim_reduce"
    rules = {
        "boostax": Rule(),
        "mindspore": quasi_newton.MINDSPORE,
        "p-bfgs": quasi_newton.P_BFGS,
    }
    if not isinstance(rule, Rule):
        checks.choice(who, "rule", rule, tuple(rules), "'boostax' is the default.")
    how = rule if isinstance(rule, Rule) else rules[rule]
    names = axes.canonical(who, axis_name)
    if residual is not None:
        checks.transformation(who, "residual", residual)
    outside = optax.with_extra_args_support(residual or optax.set_to_zero())

    def init_fn(params: PyTree) -> DimReduceState:
        count = _components(who, basis, params)
        zero = lambda dtype: jnp.zeros((), dtype)  # noqa: E731
        return DimReduceState(
            basis=jax.tree.map(lambda x: jnp.array(x, copy=True), basis),
            memory=quasi_newton.empty(count, _dtype(basis)),
            steps=zero(jnp.int32),
            accepted=zero(jnp.int32),
            tries=zero(jnp.int32),
            energy=zero(jnp.float32),
            length=zero(jnp.float32),
            residual_state=outside.init(trees.at_least_float32(params)),
        )

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree = None,
        *,
        value: Any = None,
        grad: PyTree = None,
        value_fn: Callable[[PyTree], jax.Array] | None = None,
        **extra: Any,
    ) -> tuple[PyTree, DimReduceState]:
        if params is None or value is None or value_fn is None:
            missing = "params" if params is None else "value" if value is None else "value_fn"
            raise ValueError(
                f"{who}: update must be given params, value= and value_fn=, got no {missing}. "
                "value_fn takes params to the loss of the same batch."
            )
        wide = trees.at_least_float32(params)
        gradient = trees.at_least_float32(updates if grad is None else grad)
        inside = project(state.basis, gradient).astype(state.memory.gradient.dtype)
        memory = quasi_newton.learn(state.memory, inside, how)
        direction = -memory.inverse @ inside
        along = lift(state.basis, direction)

        def moved(t: jax.Array) -> PyTree:
            return jax.tree.map(lambda w, d: w + t * d.astype(w.dtype), wide, along)

        def loss(t: jax.Array) -> jax.Array:
            trial = jax.tree.map(lambda w, p: w.astype(p.dtype), moved(t), params)
            return _mean(value_fn(trial), names)

        now = _mean(jnp.asarray(value), names).astype(inside.dtype)
        found = quasi_newton.search(loss, now, inside @ direction, how)
        memory = quasi_newton.conclude(state.memory, memory, direction, found, how)
        shadow = lift(state.basis, inside)
        rest = jax.tree.map(
            lambda g, p: g - p.astype(g.dtype), trees.at_least_float32(updates), shadow
        )
        rest, residual_state = outside.update(rest, state.residual_state, wide, **extra)
        total = jax.tree.map(
            lambda d, r: found.length.astype(r.dtype) * d.astype(r.dtype) + r, along, rest
        )
        whole = sum(
            (jnp.sum(jnp.square(g)).astype(inside.dtype) for g in jax.tree.leaves(gradient)),
            jnp.zeros((), inside.dtype),
        )
        return total, DimReduceState(
            basis=state.basis,
            memory=memory,
            steps=jnp.asarray(optax.safe_increment(state.steps)),
            accepted=state.accepted + found.accepted,
            tries=state.tries + found.tries,
            energy=(inside @ inside / jnp.where(whole == 0, 1.0, whole)).astype(jnp.float32),
            length=found.length.astype(jnp.float32),
            residual_state=trees.cast_like(residual_state, state.residual_state),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _mean(value: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The loss in f32 or wider, a true mean over the replicas."""
    value = trees.at_least_float32(value)
    return jax.lax.pmean(axes.to_varying(value, names), names) if names else value


def _dtype(basis: PyTree) -> Any:
    """In which the coordinates are: f32, or f64 with such a basis."""
    return jnp.result_type(jnp.float32, *map(trees.wide_dtype, jax.tree.leaves(basis)))


def _components(who: str, basis: PyTree, params: PyTree) -> int:
    """How many there are, after a look at whether they fit."""
    hint = "boostax.pca_basis(snapshots, k).components of the same params is one."
    if jax.tree.structure(basis) != jax.tree.structure(params):
        raise ValueError(
            f"{who}: basis must be a tree like the params, got {jax.tree.structure(basis)} for "
            f"{jax.tree.structure(params)}. {hint}"
        )
    pairs = zip(jax.tree_util.tree_leaves_with_path(basis), jax.tree.leaves(params), strict=True)
    counts: set[int] = set()
    for (path, rows), leaf in pairs:
        if not rows.ndim or rows.shape[1:] != jnp.shape(leaf):
            raise ValueError(
                f"{who}: basis must have the shape (k, {', '.join(map(str, jnp.shape(leaf)))}) at "
                f"{trees.path_name(path) or 'the root'!r}, got {rows.shape}. {hint}"
            )
        counts.add(rows.shape[0])
    if len(counts) != 1:
        raise ValueError(
            f"{who}: basis must have the same number of rows in each leaf, got {sorted(counts)}. "
            + hint
        )
    return counts.pop()
