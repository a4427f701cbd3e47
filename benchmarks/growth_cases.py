"""The techniques whose growth is measured, each as a program at any point.

The transformations and the formulas of what they send are those of the page on scaling where it has
them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import scaling_formulas as formulas
from growth_programs import AXIS, Point, Program, model, shapes_of, step_of, training
from scaling_formulas import Model
from scaling_sends import Cost
from scaling_techniques import TECHNIQUES, adam, groups_of

import boostax

PyTree = Any
COMPONENTS = 8


class Case(NamedTuple):
    """A technique.

    Attributes:
      family: those that are drawn together.
      make: its program, at a point.
      axes: along which it is measured, beside params and leaves.
      reduces: whether it is never without replicas.
      cost: what it sends by the page on scaling, if that says.
      cycle: calls from one like it to the next, at a point.
      least: the smallest window.
    """

    family: str
    make: Callable[[Point], Program]
    axes: tuple[str, ...] = ()
    reduces: bool = False
    cost: Callable[[Model, Point], Cost] | None = None
    cycle: Callable[[Point], int] = lambda point: 1
    least: int = 1


def listed(name: str) -> Case:
    """A reduction as the page on scaling has it."""
    technique = TECHNIQUES[name]
    return Case(
        COMPRESSED if name.startswith(CODECS) else REDUCTIONS,
        lambda point: step_of(technique.make(shapes_of(point)), point),
        ("replicas",),
        reduces=True,
        cost=lambda m, point: technique.cost(m, point.replicas),
    )


def around(family: str, wrap: Any, cost: Any, *axes: str, **options: Any) -> Case:
    """A wrapper of an optimizer; over replicas, of a mean and the optimizer."""

    def make(point: Point) -> Program:
        mean = [boostax.all_reduce(AXIS)] if point.replicas else []
        inner = optax.chain(*mean, adam())
        return step_of(wrap(inner, point, axis_name=AXIS if point.replicas else None), point)

    return Case(family, make, ("replicas", *axes), cost=cost, **options)


def reducing(wrap: Any, cost: Any, axis: str) -> Case:
    """A wrapper of an optimizer that reduces by itself, with something to choose."""
    return Case(
        REDUCTIONS,
        lambda point: step_of(wrap(adam(), AXIS, getattr(point, axis)), point),
        ("replicas", axis),
        reduces=True,
        cost=lambda m, point: cost(m, point.replicas, getattr(point, axis)),
        cycle=lambda point: getattr(point, axis),
    )


def before(make: Callable[[Point], Any], *axes: str, least: int = 1) -> Case:
    """A transformation of what the optimizer is given, on one device."""
    return Case(
        SUBSPACE, lambda point: step_of(optax.chain(make(point), adam()), point), axes, least=least
    )


def labels(point: Point) -> list[int]:
    return groups_of(shapes_of(point), point.groups)


def frozen(point: Point, **options: Any) -> Any:
    """Every depth occurs, in turn."""
    depths = list(range(point.groups))
    return boostax.scheduled_freeze(adam(), labels(point), depths, repeat=True, **options)


def freezing(make: Callable[[Point], Program]) -> Case:
    return Case(WINDOWS, make, ("groups",), cycle=lambda point: point.groups)


def by_group(tx: Any, point: Point, axis_name: Any = None) -> Any:
    return boostax.precision.group_loss_scale(tx, labels(point), axis_name=axis_name)


def principal(find: Callable[..., Any]) -> Case:
    """The leading directions of a window of snapshots, found on one device."""

    def make(point: Point) -> Program:
        count = min(COMPONENTS, point.window - 1)
        state = jax.eval_shape(boostax.subspace.record_trajectory(point.window).init, model(point))
        return Program(lambda state: find(state, count), (state,))

    return Case(SUBSPACE, make, ("window",), least=2 * COMPONENTS)


def finish(point: Point) -> Program:
    """A step in a subspace of as many directions as the window says."""

    def of(params: PyTree) -> jax.Array:
        mine = boostax.train.local_params(params, AXIS) if point.replicas else params
        return jnp.sum(jnp.stack([jnp.vdot(x, x) for x in mine]))

    def basis(params: PyTree) -> PyTree:
        return jax.tree.map(lambda p: jnp.zeros((point.window, *p.shape)), params)

    tx = boostax.dim_reduce(basis, axis_name=AXIS if point.replicas else None)

    def update(grads: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        return tx.update(grads, state, params, value=of(params), value_fn=of)

    return step_of(optax.GradientTransformation(tx.init, update), point)


PRECISION, WINDOWS, REDUCTIONS = "precision", "windows and freezing", "reductions"
COMPRESSED, SUBSPACE = "compressed reductions", "subspace and model"
CODECS = ("`top_k", "`threshold", "`random_k", "`int8", "`int16", "`sign", "`power_sgd")
CASES: dict[str, Case] = {
    "`adam` alone": Case(PRECISION, lambda point: step_of(adam(), point)),
    "`static_loss_scale`": around(
        PRECISION,
        lambda tx, point, **over: boostax.static_loss_scale(tx, 128.0, **over),
        lambda m, point: formulas.dynamic_loss_scale(m, point.replicas),
    ),
    "`dynamic_loss_scale`": around(
        PRECISION,
        lambda tx, point, **over: boostax.dynamic_loss_scale(tx, **over),
        lambda m, point: formulas.dynamic_loss_scale(m, point.replicas),
    ),
    "`group_loss_scale`": around(
        PRECISION,
        by_group,
        lambda m, point: formulas.group_loss_scale(m, point.replicas, point.groups),
        "groups",
    ),
    "`group_boundaries`, in training": Case(
        PRECISION,
        lambda point: training(by_group(adam(), point), point, boundaries=labels(point)),
        ("groups",),
    ),
    "`accumulate`": around(
        WINDOWS,
        lambda tx, point, **over: boostax.accumulate(tx, point.window, **over),
        lambda m, point: formulas.accumulate(m, point.replicas, point.window),
        "window",
        cycle=lambda point: point.window,
    ),
    "`microbatch`, in training": Case(
        WINDOWS,
        lambda point: training(adam(), point, slices=point.window),
        ("window",),
    ),
    "`scheduled_freeze`, a program per depth": freezing(
        lambda point: step_of(frozen(point), point, depth=point.groups // 2)
    ),
    "`scheduled_freeze`, a switch": freezing(lambda point: step_of(frozen(point), point)),
    "`scheduled_freeze`, a switch, in training": freezing(
        lambda point: training(frozen(point), point, switch=True)
    ),
    "`scheduled_freeze(moments='per_group')`": freezing(
        lambda point: step_of(frozen(point, moments="per_group"), point)
    ),
    **{
        name: listed(name)
        for name in TECHNIQUES
        if name.startswith(("`all_reduce", "`adasum", *CODECS)) and "hosts" not in name
    },
    "`local_updates`": reducing(boostax.reduce.local_updates, formulas.local_updates, "window"),
    "`partial_average`": reducing(
        boostax.reduce.partial_average, formulas.partial_average, "groups"
    ),
    "`record_trajectory`": before(
        lambda point: boostax.subspace.record_trajectory(point.window), "window", least=2
    ),
    "`trajectory_basis`": principal(boostax.subspace.trajectory_basis),
    "`pca_basis`": principal(
        lambda state, k: boostax.subspace.pca_basis(state.snapshots, k, stacked=True)
    ),
    "`pca_basis(method='randomized')`": principal(
        lambda state, k: boostax.subspace.pca_basis(
            state.snapshots, k, method="randomized", stacked=True
        )
    ),
    "`dim_reduce`": Case(
        SUBSPACE,
        finish,
        ("replicas", "window"),
        cost=lambda m, point: formulas.dim_reduce(m, point.replicas, point.window),
    ),
    "`centralize_gradients`": before(lambda point: boostax.centralize_gradients()),
    "`clip_by_global_norm`": before(lambda point: boostax.model.clip_by_global_norm(1.0)),
}
