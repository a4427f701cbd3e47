"""The techniques of the page on scaling: the formula of each beside the transformation.

Small models are traced, as devices that need not exist would run them, to compare what they send
with the formulas. Nothing is compiled or run.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import scaling_formulas as formulas
from jax.sharding import PartitionSpec
from scaling_formulas import Model
from scaling_sends import Cost

import boostax
from boostax._core import costs
from boostax.inspect.costs import Place, traced

PyTree = Any
HOST = 8
# What the formulas are compared on: a network, odd shapes, and leaves of more than a bucket.
MODELS: dict[str, Model] = {
    "network": [(64, 128), (128,), (128, 128), (128,), (128, 10), (10,)],
    "odd": [(3, 5, 7), (1,), (), (331, 257), (256, 256), (1021,), (33, 2)],
    "large": [(3000, 1024), (7,), (1500, 1024), (640, 1024), (4099, 1031)],
}


class Technique(NamedTuple):
    """A row of the tables.

    Attributes:
      cost: the formula, of a model and a number of replicas.
      make: the transformation, of a model.
      within: replicas of a host, which it tells from others.
    """

    cost: Callable[[Model, int], Cost]
    make: Callable[[Model], optax.GradientTransformation]
    within: int = 1


def adam() -> optax.GradientTransformation:
    return optax.adam(1e-3)


def before_adam(reduction: optax.GradientTransformation) -> Callable[[Model], Any]:
    return lambda model: optax.chain(reduction, adam())


def around_mean(wrap: Callable[[Any, Model], Any]) -> Callable[[Model], Any]:
    return lambda model: wrap(optax.chain(boostax.all_reduce("data"), adam()), model)


def groups_of(model: Model, count: int) -> list[int]:
    """Consecutive leaves in equal groups."""
    return [i * count // len(model) for i in range(len(model))]


def on_hosts(within: int) -> Technique:
    """AdaSum between hosts of so many replicas."""
    return Technique(
        functools.partial(formulas.adasum, within=within),
        before_adam(boostax.adasum("data", within="host")),
        within,
    )


def in_a_subspace(dtype: Any) -> Callable[[Model], Any]:
    def basis(params: PyTree) -> PyTree:
        return jax.tree.map(lambda p: jnp.zeros((20, *p.shape)), params)

    return lambda model: boostax.dim_reduce(basis, dtype=dtype, axis_name="data")


F = functools.partial
TECHNIQUES: dict[str, Technique] = {
    "`all_reduce`": Technique(formulas.all_reduce, before_adam(boostax.all_reduce("data"))),
    "`all_reduce`, bf16": Technique(
        formulas.all_reduce_half, before_adam(boostax.all_reduce("data", dtype="bfloat16"))
    ),
    "`adasum`": Technique(formulas.adasum, before_adam(boostax.adasum("data"))),
    f"`adasum`, within hosts of {HOST}": on_hosts(HOST),
    "`adasum_delta`": Technique(
        formulas.adasum, lambda model: boostax.reduce.adasum_delta(adam(), "data")
    ),
    "`top_k_reduce`, 1%": Technique(
        F(formulas.sparse, density=0.01), before_adam(boostax.top_k_reduce("data", 0.01))
    ),
    "`threshold_reduce`, capacity 1%": Technique(
        F(formulas.threshold, capacity=0.01),
        before_adam(boostax.reduce.threshold_reduce("data", capacity=0.01, bucket_bytes=None)),
    ),
    "`random_k_reduce`, 1%": Technique(
        F(formulas.random_k, density=0.01),
        before_adam(boostax.reduce.random_k_reduce("data", 0.01)),
    ),
    "`int8_reduce`": Technique(formulas.int8, before_adam(boostax.int8_reduce("data"))),
    "`int16_reduce`": Technique(formulas.int16, before_adam(boostax.reduce.int16_reduce("data"))),
    "`sign_reduce`": Technique(
        F(formulas.sign, two_shot=False), before_adam(boostax.reduce.sign_reduce("data"))
    ),
    "`sign_reduce`, two shots": Technique(
        F(formulas.sign, two_shot=True),
        before_adam(boostax.reduce.sign_reduce("data", two_shot=True)),
    ),
    "`power_sgd_reduce`, rank 2": Technique(
        F(formulas.power_sgd, rank=2), before_adam(boostax.reduce.power_sgd_reduce("data", 2))
    ),
    "`partial_average`, 4 partitions": Technique(
        F(formulas.partial_average, partitions=4),
        lambda model: boostax.reduce.partial_average(adam(), "data", 4),
    ),
    "`local_updates`, every 8": Technique(
        F(formulas.local_updates, every=8),
        lambda model: boostax.reduce.local_updates(adam(), "data", 8),
    ),
    "`accumulate`, every 8": Technique(
        F(formulas.accumulate, every=8),
        around_mean(lambda tx, model: boostax.accumulate(tx, 8, axis_name="data")),
    ),
    "`dynamic_loss_scale`": Technique(
        formulas.dynamic_loss_scale,
        around_mean(lambda tx, model: boostax.dynamic_loss_scale(tx, axis_name="data")),
    ),
    "`group_loss_scale`, 4 groups": Technique(
        F(formulas.group_loss_scale, groups=4),
        around_mean(
            lambda tx, model: boostax.precision.group_loss_scale(
                tx, groups_of(model, 4), axis_name="data"
            )
        ),
    ),
    "`dim_reduce`, k = 20": Technique(F(formulas.dim_reduce, k=20), in_a_subspace(None)),
    "`dim_reduce`, k = 20, int8": Technique(
        F(formulas.dim_reduce, k=20, narrow=True), in_a_subspace("int8")
    ),
}


def place(technique: Technique, n: int) -> Place:
    """The mesh."""
    if technique.within == 1:
        return Place(("data",), {"data": n})
    sizes = {"data": n // technique.within, "host": technique.within}
    return Place(tuple(sizes), sizes)


def program(technique: Technique, model: Model, n: int) -> Any:
    """The jaxpr of one device's update, among so many."""
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in model]
    return traced(technique.make(model), params, place(technique, n))


def counted(jaxpr: Any) -> collections.Counter[tuple[Any, ...]]:
    """The collectives of a program, by kind, axes and bytes."""
    found: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for c in costs.collectives(jaxpr):
        found[c.primitive, tuple(sorted(c.axes)), c.replicas, c.bytes] += c.count
    return found


def written(cost: Cost) -> collections.Counter[tuple[Any, ...]]:
    """Those of a formula."""
    return collections.Counter(send[:4] for send in cost.sends)


def sharded_moments(model: Model, n: int) -> tuple[int, int]:
    """Of Adam's state sharded over so many replicas by ``make_train_step(shard_optimizer=True)``.

    Read off the shardings of the state; what XLA sends for them stands in no traced program.

    Returns:
      Its bytes on a device, and the params whose moments are whole there.
    """
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in model]
    state = jax.eval_shape(adam().init, params)
    specs = boostax.states.state_specs(adam(), params, "data", replicas=n, shard_optimizer=True)
    flat = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    pairs = list(zip(jax.tree.leaves(state), flat, strict=True))
    held = sum(x.size * x.dtype.itemsize // (n if any(spec) else 1) for x, spec in pairs)
    return held, sum(x.size for x, spec in pairs if x.ndim and not any(spec)) // 2


def fits(technique: Technique, n: int) -> bool:
    """Whether there are several hosts, if hosts are told apart."""
    return technique.within == 1 or (n > technique.within and n % technique.within == 0)


def cases() -> Iterator[tuple[str, str, int]]:
    """Technique, model and replicas of every comparison."""
    for (name, technique), model in itertools.product(TECHNIQUES.items(), MODELS):
        sizes = (2, 4, 8) if technique.within == 1 else (4 * technique.within,)
        yield from ((name, model, n) for n in (sizes[-1:] if model == "large" else sizes))


def different() -> list[tuple[str, str, int]]:
    """The comparisons in which a program sends something else than its formula says."""
    return [
        (name, model, n)
        for name, model, n in cases()
        if counted(program(TECHNIQUES[name], MODELS[model], n))
        != written(TECHNIQUES[name].cost(MODELS[model], n))
    ]
