# SPDX-License-Identifier: Apache-2.0
"""What a law needs to know of a transformation, and the trees and gradients that laws use."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax._core.axes import AxisName
from boostax._core.gate import gate_of, gated
from boostax._core.handshake import assume_scaled
from boostax.config.migrate import holds
from boostax.reduce.mean import all_reduce
from boostax.train.apply import apply_gradients

PyTree = Any
Carry = tuple[PyTree, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A transformation to hold to the contract.

    Attributes:
      name: for test names.
      make: ``make(inner, axis_name)`` builds it around (or chains it before) the optimizer
        ``inner``; ``axis_name`` is ``None`` on a single device.
      reduces: it takes local gradients and returns reduced ones itself.
      own_params: it keeps params of its own on every replica.
      skips: it skips steps whose gradients are not finite.
      distributed: it has a meaning inside a mapped function.
      by_shard: it treats each shard of a leaf as a leaf by itself.
      calls: calls per change of the params.
      skip_calls: calls from a bad gradient to the moment when the skip is decided.
      skip_view: the part of the state that a skip must leave bit for bit alone.
      scaled: ``scaled(grads, state)`` multiplies gradients as its loss would, for scales other
        than one for all.
      bad_arguments: functions that must raise, each with a part of its message.
      compresses: at every call it hands ``inner`` what a codec sends of local gradients, and keeps
        the rest in a residual.
    """

    name: str
    make: Callable[[Any, AxisName | None], optax.GradientTransformation]
    reduces: bool = False
    own_params: bool = False
    skips: bool = False
    distributed: bool = True
    by_shard: bool = False
    calls: int = 1
    skip_calls: int = 1
    skip_view: Callable[[Any], PyTree] = lambda state: state.inner_state
    scaled: Callable[[PyTree, Any], PyTree] | None = None
    bad_arguments: tuple[tuple[Callable[[], Any], str], ...] = ()
    compresses: bool = False

    def single(self, inner: Any = None) -> optax.GradientTransformationExtraArgs:
        """The transformation on one device."""
        return drawn(self.make(optimizer() if inner is None else inner, None))

    def mapped(self, axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
        """The transformation inside a mapped function, with a mean over replicas if it has none."""
        inner = optimizer()
        if not self.reduces:
            inner = optax.chain(all_reduce(axis_name), inner)
        return drawn(self.make(inner, axis_name))


def drawn(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """A transformation for gradients that a test draws: a scaler takes them as scaled.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.testing.drawn(boostax.static_loss_scale(optax.sgd(1.0), 8.0))
      >>> w = jnp.float32(1.0)
      >>> float(jax.jit(tx.update)(jnp.float32(2.0), tx.init(w), w)[0])
      -0.25
    """
    gate = gate_of(tx)
    if gate is not None:

        def step(grads: Any, state: Any, *args: Any, **kwargs: Any) -> Carry:
            return gate.step(assume_scaled(grads, state), state, *args, **kwargs)

        return gated(tx.init, step, gate.flush)

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Carry:
        given = assume_scaled(updates, state)
        return optax.with_extra_args_support(tx).update(given, state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


Law = Callable[..., None]


def laws_in(names: dict[str, Any]) -> dict[str, Law]:
    """The laws that a module states: its functions of a case, or of one and a seed, in order."""
    return {
        name: value
        for name, value in names.items()
        if inspect.isfunction(value)
        and value.__module__ == names["__name__"]
        and list(inspect.signature(value).parameters) in (["case"], ["case", "seed"])
    }


def optimizer() -> optax.GradientTransformationExtraArgs:
    """Every kind of thing that a skipped step must leave alone: moments, schedule, decay, clip."""
    return optax.chain(
        optax.clip_by_global_norm(10.0),
        optax.adamw(optax.linear_schedule(1e-1, 1e-3, 20), weight_decay=1e-2),
    )


class Pair(NamedTuple):
    """A NamedTuple node."""

    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    """A dataclass node."""

    scale: Any


def example_params(dtype: Any = jnp.float32) -> PyTree:
    """Dict, list, NamedTuple, dataclass, None, a scalar and an empty leaf."""
    return {
        "dense": {"kernel": _wave((3, 4), 1.0, dtype), "bias": _wave((4,), 2.0, dtype)},
        "list": [jnp.asarray(0.5, dtype), jnp.zeros((0, 2), dtype)],
        "pair": Pair(_wave((5,), 3.0, dtype), None),
        "block": Block(_wave((2, 1), 4.0, dtype)),
    }


def even_params() -> PyTree:
    """Leaves whose first dimension divides by eight devices."""
    return {"w": _wave((16, 4), 1.0, jnp.float32), "b": _wave((8,), 2.0, jnp.float32)}


def example_grads(params: PyTree, seed: int) -> PyTree:
    """Gradients of moderate size, different for every seed, in the params' dtypes."""
    leaves, treedef = jax.tree.flatten(params)
    return jax.tree.unflatten(
        treedef, [_wave(p.shape, 7.0 + seed + 0.3 * i, p.dtype) for i, p in enumerate(leaves)]
    )


def _wave(shape: tuple[int, ...], phase: float, dtype: Any) -> jax.Array:
    size = int(np.prod(shape))
    return jnp.asarray(np.sin(phase + 1.7 * np.arange(size)).reshape(shape), dtype)


def poison(grads: PyTree, value: float) -> PyTree:
    """One element of one leaf replaced."""
    leaves, treedef = jax.tree.flatten(grads)
    leaves[0] = leaves[0].at[(0,) * leaves[0].ndim].set(value)
    return jax.tree.unflatten(treedef, leaves)


def assert_same(left: PyTree, right: PyTree, what: str) -> None:
    """Bit for bit: structure, dtypes, values."""
    assert jax.tree.structure(left) == jax.tree.structure(right), f"{what}: structure differs"
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True
    ):
        where = f"{what} at {jax.tree_util.keystr(path)}"
        assert a.dtype == b.dtype, f"{where}: {a.dtype} and {b.dtype}"
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=where)


def assert_close(left: PyTree, right: PyTree, what: str, tolerance: float = 1e-6) -> None:
    """Within a relative tolerance that compilation in another context explains."""
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance, err_msg=what
        )


def with_scale(state: Any, scale: float) -> Any:
    """A state whose scalers have this scale."""

    def node(x: Any) -> Any:
        name = holds(type(x)).scale
        return x._replace(**{name: jnp.full_like(getattr(x, name), scale)}) if name else x

    return jax.tree.map(node, state, is_leaf=lambda x: bool(holds(type(x)).scale))


def raises(fn: Callable[[], Any], *parts: str) -> None:
    """An error of whose message these are parts."""
    try:
        fn()
    except (TypeError, ValueError) as error:
        for part in parts:
            assert part in str(error), f"{part!r} is not in {str(error)!r}"
    else:
        raise AssertionError(f"nothing raised for {parts[0]!r}")


def types_of(tree: PyTree) -> list[Any]:
    """Shape, dtype and weak type of every leaf."""
    return [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]


def applied(tx: optax.GradientTransformation) -> Callable[..., Carry]:
    """A step of ``apply_gradients``: from params, state and gradients to params and state."""
    return lambda params, state, grads: apply_gradients(tx, grads, state, params)


def follow(step: Callable[..., Carry], carry: Carry, grads: Sequence[PyTree]) -> Carry:
    """A step for each of these gradients."""
    for each in grads:
        carry = step(*carry, each)
    return carry


def steps(
    tx: optax.GradientTransformationExtraArgs, params: PyTree, state: Any, seeds: Any
) -> Carry:
    """Jitted ``update`` and ``apply_updates``, once per seed."""

    @jax.jit
    def step(params: PyTree, state: Any, grads: PyTree) -> Carry:
        updates, state = drawn(tx).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return follow(step, (params, state), [example_grads(params, seed) for seed in seeds])
