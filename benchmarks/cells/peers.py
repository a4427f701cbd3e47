"""What others have for the same, behind the interface of a transformation.

The adapters do what the peers' own documentation tells their users to: gradients are averaged over
the replicas before anything else, bad steps are held back by ``optax.apply_if_finite`` or by a
choice between old and new, and all state is kept the same on all replicas.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training import dynamic_scale

from cells.subject import Subject

PyTree = Any
PATIENCE = 10
"""Bad steps in a row that ``apply_if_finite`` must be told to bear."""


class ScaledState(NamedTuple):
    """A scale and the state of the optimizer, as a user keeps them side by side."""

    scale: Any
    inner_state: Any


def mean(axis: Any) -> optax.GradientTransformation:
    """What one does before the optimizer; nothing on a single device."""

    def over(grads: PyTree) -> PyTree:
        return jax.lax.pmean(grads, axis)

    return optax.identity() if axis is None else optax.stateless(lambda g, _: over(g))


def averaged(make: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda inner, axis: optax.chain(mean(axis), make(inner))


def held(make: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """With Optax's own guard around."""
    return averaged(lambda inner: optax.apply_if_finite(make(inner), PATIENCE))


def chosen(ok: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def with_flax(inner: Any, axis: Any, scale: Callable[[], Any] | None = None) -> Any:
    """Flax scales and averages what it differentiates: here a loss with the gradients given."""
    scale = scale or (lambda: dynamic_scale.DynamicScale(scale=1.0))
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> ScaledState:
        return ScaledState(scale(), inner.init(params))

    def update(grads: PyTree, state: ScaledState, params: PyTree, **extra: Any) -> Any:
        def loss(at: PyTree) -> jax.Array:
            pairs = zip(jax.tree.leaves(at), jax.tree.leaves(grads), strict=True)
            # A loss is real, and in f32 at least, as Flax asks for.
            return sum((jnp.sum(wide(jnp.real(x * y))) for x, y in pairs), jnp.zeros(()))

        at = jax.tree.map(jnp.zeros_like, grads)
        new_scale, ok, _, given = state.scale.value_and_grad(loss, axis_name=axis)(at)
        updates, inner_state = inner.update(given, state.inner_state, params, **extra)
        updates = chosen(ok, updates, jax.tree.map(jnp.zeros_like, updates))
        return updates, ScaledState(new_scale, chosen(ok, inner_state, state.inner_state))

    return optax.GradientTransformationExtraArgs(init, update)


def with_jmp(inner: Any, axis: Any, scale: Callable[[], Any] | None = None) -> Any:
    """Unscale, test, adjust, choose: as in jmp's README."""
    inner = optax.with_extra_args_support(inner)
    scale = scale or (lambda: jmp.DynamicLossScale(jnp.float32(1.0)))

    def init(params: PyTree) -> ScaledState:
        return ScaledState(scale(), inner.init(params))

    def update(grads: PyTree, state: ScaledState, params: PyTree, **extra: Any) -> Any:
        grads = grads if axis is None else jax.lax.pmean(grads, axis)
        grads = state.scale.unscale(grads)
        ok = jmp.all_finite(grads)
        updates, inner_state = inner.update(grads, state.inner_state, params, **extra)
        updates = jmp.select_tree(ok, updates, jax.tree.map(jnp.zeros_like, updates))
        inner_state = jmp.select_tree(ok, inner_state, state.inner_state)
        return updates, ScaledState(state.scale.adjust(ok), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def flax_limits(low: float, high: float) -> Any:
    del high

    def scale() -> Any:
        return dynamic_scale.DynamicScale(
            growth_interval=1, minimum_scale=low, scale=jnp.float32(1.0)
        )

    return with_flax(optax.sgd(0.0), None, scale)


def jmp_limits(low: float, high: float) -> Any:
    del high

    def scale() -> Any:
        one = jnp.asarray(1.0)
        return jmp.DynamicLossScale(one, period=1, min_loss_scale=jnp.asarray(low))

    return with_jmp(optax.sgd(0.0), None, scale)


def window(inner: Any) -> Any:
    return optax.MultiSteps(inner, 2).gradient_transformation()


def frozen(inner: Any) -> Any:
    """The second group stays: last in the chain, so that nothing moves it."""

    def mask(params: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "b" in jax.tree_util.keystr(path[:1]), params
        )

    return optax.chain(inner, optax.transforms.freeze(mask))


SHARDED = "made for sharded arrays under jit"
NO_REDUCTION = "no reduction of its own"
NONE_OF_THEIRS = {
    "C": NO_REDUCTION,
    "FSDP": SHARDED,
    "FSDP, one leaf whole": SHARDED,
    "an axis that is not bound": NO_REDUCTION,
    "gradients that are summed already": NO_REDUCTION,
}
NO_CEILING = {"scale at its ceiling": "no ceiling to set"}
OPT = optax.sgd(0.1)


def peer(name: str, make: Callable[[Any, Any], Any], **options: Any) -> Subject:
    options.setdefault("meaningless", NONE_OF_THEIRS)
    return Subject(name, make, peer=True, **options)


def run_once(tx: Any) -> None:
    """Some mistakes could only be found when the step is traced."""
    params = {"w": jnp.ones(3)}
    tx.update(params, tx.init(params), params)


PEERS = [
    peer(
        "optax.MultiSteps",
        averaged(window),
        guard=held(window),
        guarded=lambda state: state[1].inner_state,
        calls=2,
        mistakes=(
            (lambda: run_once(optax.MultiSteps(OPT, 0).gradient_transformation()), "every_k"),
            (lambda: run_once(optax.MultiSteps(OPT, -1).gradient_transformation()), "every_k"),
            (lambda: run_once(optax.MultiSteps(OPT, "4").gradient_transformation()), "every_k"),
            (lambda: run_once(optax.MultiSteps(OPT, 2.5).gradient_transformation()), "every_k"),
            (lambda: run_once(optax.MultiSteps(3.0, 2).gradient_transformation()), "opt"),
        ),
    ),
    peer(
        "optax.apply_if_finite",
        held(lambda inner: inner),
        guarded=lambda state: state[1].inner_state,
        mistakes=(
            (lambda: run_once(optax.apply_if_finite(OPT, -1)), "max_consecutive_errors"),
            (lambda: run_once(optax.apply_if_finite(OPT, "4")), "max_consecutive_errors"),
            (lambda: run_once(optax.apply_if_finite(3.0, 2)), "inner"),
        ),
    ),
    peer(
        "optax.freeze",
        averaged(frozen),
        guard=held(frozen),
        guarded=lambda state: state[1].inner_state,
        linear=False,
        mistakes=(
            (lambda: run_once(optax.transforms.freeze("all")), "mask"),
            (lambda: run_once(optax.transforms.freeze({"v": True})), "mask"),
            (lambda: run_once(optax.transforms.freeze({"w": 3.0})), "mask"),
        ),
    ),
    peer(
        "optax.centralize",
        averaged(lambda inner: optax.chain(optax.centralize(), inner)),
        guard=held(lambda inner: optax.chain(optax.centralize(), inner)),
        guarded=lambda state: state[1].inner_state,
        linear=False,
    ),
    peer(
        "flax DynamicScale",
        with_flax,
        guarded=lambda state: state.inner_state,
        scale=(flax_limits, lambda state: state.scale.scale),
        meaningless={name: why for name, why in NONE_OF_THEIRS.items() if why == SHARDED}
        | NO_CEILING,
        mistakes=(
            (lambda: dynamic_scale.DynamicScale(growth_factor=0.5), "growth_factor"),
            (lambda: dynamic_scale.DynamicScale(backoff_factor=1.5), "backoff_factor"),
            (lambda: dynamic_scale.DynamicScale(growth_interval=0), "growth_interval"),
            (lambda: dynamic_scale.DynamicScale(minimum_scale=-1.0), "minimum_scale"),
            (lambda: dynamic_scale.DynamicScale(scale=float("inf")), "scale"),
        ),
    ),
    peer(
        "jmp.DynamicLossScale",
        with_jmp,
        guarded=lambda state: state.inner_state,
        scale=(jmp_limits, lambda state: state.scale.loss_scale),
        meaningless=NONE_OF_THEIRS | NO_CEILING,
        mistakes=(
            (lambda: jmp.DynamicLossScale(jnp.asarray(1.0), period=0), "period"),
            (lambda: jmp.DynamicLossScale(jnp.asarray(1.0), factor=1), "factor"),
            (lambda: jmp.DynamicLossScale(jnp.asarray(-1.0)), "loss_scale"),
            (lambda: jmp.DynamicLossScale(jnp.asarray(jnp.inf)), "loss_scale"),
        ),
    ),
]
