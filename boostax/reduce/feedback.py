"""Error feedback, once for all codecs: what is not sent now is sent later."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from boostax._core import axes, checks, trees
from boostax._core.about import described
from boostax._core.replicas import PerReplica
from boostax._core.share import own_part, scattered
from boostax.reduce.codecs.base import Codec, Message, map_per_leaf
from boostax.reduce.layout import real_dtype

PyTree = Any
Rule = Callable[[str, Any], bool]
Dense = Rule | PyTree | None


class CompressedState(NamedTuple):
    """State of every compressed reduction.

    Attributes:
      residual: a ``PerReplica`` of what each replica has not sent yet: a tree like the params, in
        f32 or wider and in the units of the gradients as they come in (unscaled, inside a scaler),
        complex ones as pairs; ``None`` where a leaf travels dense, or without error feedback.
      velocity: a ``PerReplica`` like it, of the momentum that is corrected for; or ``None``.
      codec: what the codec keeps, the same on all replicas.
      unsent: f32 scalar, ``sqrt(sum_r |residual_r|**2 / sum_r |g_r + old residual_r|**2)``: the
        share that was held back last time, 0 for an exact reduction. -1 before the first.
    """

    residual: PerReplica
    velocity: PerReplica
    codec: PyTree
    unsent: jax.Array

    # Also where the optimizer's state is shared out over the replicas.
    keeps_whole = True

    def metrics(self) -> dict[str, jax.Array]:
        """Named scalars for ``boostax.metrics``."""
        return {"unsent": self.unsent}


def compressed(
    who: str,
    axis_name: axes.AxisName,
    codec: Codec,
    *,
    error_feedback: bool,
    dense: Dense,
    momentum: float | None = None,
    also_dense: Rule | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Replace local gradients by the mean of what a codec sends of them.

    .. math::
      a_r = g_r + e_r, \qquad u = \tfrac1n \sum_r C(a_r), \qquad e_r \leftarrow a_r - C(a_r)

    Args:
      who: the public transformation, for errors.
      axis_name: mesh axis or axes.
      codec: what it sends.
      error_feedback: whether there is an ``e``.
      dense: leaves that take a plain mean instead: see ``_rules``.
      momentum: of the momentum correction, ``v = momentum v + g`` standing for ``g`` and set to
        zero where it has been sent; or ``None``.
      also_dense: leaves besides, which the codec cannot serve.
    """
    names = axes.required(who, axis_name)
    if dense is not None and not callable(dense):
        jax.tree.map(lambda x: _check_rule(who, x), dense)

    def coded(tree: PyTree) -> list[int]:
        """Which leaves the codec sends."""
        paths = jax.tree_util.tree_leaves_with_path(tree)
        rules = _rules(who, dense, tree)
        return [
            i
            for i, ((path, x), rule) in enumerate(zip(paths, rules, strict=True))
            if x.size and not rule and not (also_dense and also_dense(trees.path_name(path), x))
        ]

    def init_fn(params: PyTree) -> CompressedState:
        trees.require_gradients(params, who)
        leaves, treedef = jax.tree.flatten(params)
        chosen = coded(params)
        shapes = [_real_shape(leaves[i]) for i in chosen]

        spread = functools.partial(_spread, treedef, chosen)

        def zeros(wanted: bool) -> PerReplica:
            made = [jnp.zeros(x.shape, x.dtype) if wanted else None for x in shapes]
            return PerReplica(axes.to_varying(spread(made), names))

        return CompressedState(
            residual=zeros(error_feedback),
            velocity=zeros(momentum is not None),
            codec=map_per_leaf(spread, codec.init(shapes)),
            unsent=jnp.full((), -1.0, jnp.float32),
        )

    @described(who, names)
    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, CompressedState]:
        del params
        trees.require_gradients(updates, who)
        axes.require_local(updates, names, who)
        axes.require_whole(updates, names, who, "all_reduce and adasum take shards.")
        in_parts = scattered(who, extra_args, names)
        leaves, treedef = jax.tree.flatten(updates)
        chosen = coded(updates)
        held = _kept(state.residual.local, treedef)
        moving = _kept(state.velocity.local, treedef)
        flow = [_real(leaves[i]) for i in chosen]
        if momentum is not None:
            flow = [momentum * moving[i] + g for i, g in zip(chosen, flow, strict=True)]
        wanted = flow
        if error_feedback:
            wanted = [held[i] + v for i, v in zip(chosen, flow, strict=True)]
        spread = functools.partial(_spread, treedef, chosen)
        gathered = lambda tree: [_kept(tree, treedef)[i] for i in chosen]  # noqa: E731
        codec_state = map_per_leaf(gathered, state.codec)
        message = Message([], [], codec_state)
        if chosen:
            message = codec.reduce(wanted, codec_state, names)
        means, sent, new_codec_state = message
        residual = [a - s for a, s in zip(wanted, sent, strict=True)]
        rest = [i for i in range(len(leaves)) if i not in chosen]
        finite, unsent = _agreed(wanted, residual, [_real(leaves[i]) for i in rest], names)
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        result: list[Any] = list(leaves)
        for i, mean in zip(chosen, means, strict=True):
            # A bad step must be seen by all; a codec could hide it.
            result[i] = _like(jnp.where(finite, mean, jnp.nan), leaves[i])
        for i in rest:
            wide = leaves[i].astype(trees.wide_dtype(leaves[i]))
            result[i] = trees.saturate(lax.pmean(wide, names), leaves[i].dtype)
        for i, new, v, s in zip(chosen, residual, flow, sent, strict=True):
            if error_feedback:
                held[i] = keep(new, held[i])
            if momentum is not None:
                moving[i] = keep(jnp.where(s == 0, v, 0), moving[i])
        if in_parts:
            result = [own_part(x, names) for x in result]
        return jax.tree.unflatten(treedef, result), CompressedState(
            residual=PerReplica(jax.tree.unflatten(treedef, held)),
            velocity=PerReplica(jax.tree.unflatten(treedef, moving)),
            codec=map_per_leaf(spread, jax.tree.map(keep, new_codec_state, codec_state)),
            unsent=keep(unsent, state.unsent),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _agreed(
    wanted: list[jax.Array],
    residual: list[jax.Array],
    rest: list[jax.Array],
    names: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """Whether all is finite on all replicas, and the share held back: one sum of two numbers.

    A NaN, an infinity or squares out of range anywhere make a sum non-finite everywhere. What is
    sent dense counts as sent.
    """
    dtype = jnp.result_type(jnp.float32, *wanted, *rest)
    norm = lambda xs: sum((jnp.sum(x * x).astype(dtype) for x in xs), jnp.zeros((), dtype))  # noqa: E731
    norms = jnp.stack([norm(wanted + rest), norm(residual)])
    whole, held = axes.total(axes.to_varying(norms, names), names)
    unsent = jnp.sqrt(held / jnp.where(whole == 0, 1, whole))
    return jnp.isfinite(whole + held), unsent.astype(jnp.float32)


def _spread(treedef: Any, chosen: list[int], values: list[Any]) -> PyTree:
    """A tree of the chosen leaves, ``None`` in the place of the others."""
    kept: list[Any] = [None] * treedef.num_leaves
    for i, value in zip(chosen, values, strict=True):
        kept[i] = value
    return treedef.unflatten(kept)


def _kept(tree: PyTree, treedef: Any) -> list[Any]:
    """The leaves of a tree that has ``None`` where nothing is kept."""
    return treedef.flatten_up_to(tree)


def _rules(who: str, dense: Dense, tree: PyTree) -> list[bool]:
    """For each leaf, whether it travels dense.

    ``dense`` is a function of the leaf's path (``"layers/0/bias"``) and the leaf, or a tree of
    bools, which may stand for whole branches.
    """
    if dense is None:
        return [False] * len(jax.tree.leaves(tree))
    if callable(dense):
        paths = jax.tree_util.tree_leaves_with_path(tree)
        return [bool(dense(trees.path_name(path), leaf)) for path, leaf in paths]
    try:
        spread = jax.tree.map(lambda rule, part: [rule] * len(jax.tree.leaves(part)), dense, tree)
    except ValueError as error:
        raise ValueError(
            f"{who}: dense must be a tree of bools that fits the gradients, got one that does not: "
            f"{error}. A function such as lambda path, leaf: leaf.ndim < 2 fits every tree."
        ) from error
    return jax.tree.leaves(spread)


def _check_rule(who: str, rule: Any) -> None:
    if not isinstance(rule, bool):
        hint = "Try lambda path, leaf: leaf.ndim < 2 for norms and biases."
        allowed = "a function of path and leaf, or a tree of bools"
        raise TypeError(checks.message(who, "dense", allowed, rule, hint))


def _real_shape(x: Any) -> jax.ShapeDtypeStruct:
    pair = (2,) if jnp.iscomplexobj(x) else ()
    return jax.ShapeDtypeStruct((*x.shape, *pair), real_dtype(x.dtype))


def _real(x: jax.Array) -> jax.Array:
    """In f32 or wider; complex numbers as pairs."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], -1)
    return x.astype(real_dtype(x.dtype))


def _like(x: jax.Array, leaf: jax.Array) -> jax.Array:
    return trees.saturate(
        lax.complex(x[..., 0], x[..., 1]) if jnp.iscomplexobj(leaf) else x, leaf.dtype
    )
