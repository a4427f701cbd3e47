"""Section D: from the first trace over wrappers and files to other devices."""

import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cells.programs import on_devices, usual
from cells.subject import Cell, Subject, finite, require, same_kind, strong
from flax import serialization

import boostax
from boostax._core.replicas import is_per_replica
from boostax.testing._case import assert_close, assert_same, even_params
from boostax.train.checkpoint import Checkpointer

PyTree = Any
STEPS, RESUMED = 10, 8


def traced_once(subject: Subject) -> None:
    params = even_params()
    program, traces = usual(subject, params), 0

    @jax.jit
    def step(carry: Any, grads: PyTree) -> Any:
        nonlocal traces
        traces += 1
        return program.step(carry, grads)

    program.run(params, range(STEPS), step)
    require(traces == 1, f"traced {traces} times")
    require(step._cache_size() == 1, f"compiled {step._cache_size()} times")


def abstract_init(subject: Subject) -> None:
    program, params = usual(subject, even_params()), even_params()
    state, shapes = program.start(params)[1], jax.eval_shape(program.start, params)[1]
    require(jax.tree.structure(state) == jax.tree.structure(shapes), "structure differs")
    kinds = zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True)
    require(all(strong(x) == (y.shape, y.dtype) for x, y in kinds), "types differ")


def injected(subject: Subject) -> None:
    """A hyperparameter that is part of the state, and a schedule, do what a constant does."""
    params, count = even_params(), 2 * subject.calls
    plain = usual(subject, params, optax.adam(1e-2))
    end = plain.common(plain.run(params, range(count)))[0]
    for rate in (1e-2, lambda step: 1e-2):

        def wrap(_: Any, rate: Any = rate) -> Any:
            def build(learning_rate: Any) -> Any:
                inner = optax.adam(learning_rate)
                return subject.mapped(inner) if subject.reduces else subject.alone(inner)

            tx = optax.inject_hyperparams(build)(learning_rate=rate)
            return optax.with_extra_args_support(tx)

        program = usual(subject, params, wrap=wrap)
        carry = program.run(params, range(count))
        assert_close(program.common(carry)[0], end, "injected")


def wrapped(make: Callable[[PyTree, Any], Any], *, same: bool = False, factor: int = 1) -> Cell:
    """The transformation inside a wrapper of Optax's."""

    def cell(subject: Subject) -> None:
        params = even_params()
        wrap = lambda tx: optax.with_extra_args_support(make(params, tx))  # noqa: E731
        program = usual(subject, params, wrap=wrap)
        check(subject, program, params, 2 * factor * subject.calls, same)

    return cell


def around(make: Callable[[PyTree, Any], Any], *, same: bool = False, factor: int = 1) -> Cell:
    """A wrapper of Optax's inside the transformation."""

    def cell(subject: Subject) -> None:
        params = even_params()
        program = usual(subject, params, make(params, optax.adam(1e-2)))
        check(subject, program, params, 2 * factor * subject.calls, same)

    return cell


def check(subject: Subject, program: Any, params: PyTree, calls: int, same: bool) -> None:
    carry = program.run(params, range(calls))
    same_kind(program.start(params), carry, "params and state")
    finite(program.common(carry)[0], "params")
    if same:
        plain = usual(subject, params)
        end = plain.run(params, range(calls))
        assert_same(program.common(carry)[0], plain.common(end)[0], "wrapped")


def mask(params: PyTree) -> PyTree:
    return {name: name == "w" for name in params}


def labels(params: PyTree) -> PyTree:
    return {name: "one" if name == "w" else "other" for name in params}


def multi_steps(_: PyTree, tx: Any) -> Any:
    return optax.MultiSteps(tx, 2).gradient_transformation()


def partition(params: PyTree, tx: Any) -> Any:
    return optax.partition({"one": tx, "other": optax.set_to_zero()}, labels(params))


def through(there_and_back: Callable[[Any], Any]) -> Cell:
    """A round trip keeps every bit, and the run goes on as if there had been none."""

    def cell(subject: Subject) -> None:
        params = even_params()
        program = usual(subject, params)
        step, count = jax.jit(program.step), 2 * subject.calls
        middle = program.run(params, range(count), step)
        back = there_and_back(middle)
        assert_same(jax.tree.map(jnp.asarray, back), middle, "round trip")
        more = program.grads(params, 9)
        assert_same(step(back, more), step(middle, more), "afterwards")

    return cell


def as_before(tree: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), tree, like)


def by_pickle(carry: Any) -> Any:
    return as_before(pickle.loads(pickle.dumps(jax.device_get(carry))), carry)


def by_flax(carry: Any) -> Any:
    return as_before(serialization.from_bytes(carry, serialization.to_bytes(carry)), carry)


def by_orbax(carry: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(1, carry)
        return checkpointer.restore(carry)[0]


def resumed(subject: Subject) -> None:
    """At every step, bit for bit."""
    params = even_params()
    program = usual(subject, params)
    step = jax.jit(program.step)
    kept = [program.start(params)]
    for seed in range(RESUMED):
        kept.append(step(kept[-1], program.grads(params, seed)))
    for stop in range(RESUMED):
        carry = by_pickle(kept[stop])
        for seed in range(stop, RESUMED):
            carry = step(carry, program.grads(params, seed))
        assert_same(carry, kept[-1], f"resumed at {stop}")


def on_others(subject: Subject) -> None:
    """Saved by four replicas, restored by two: values are kept, and means over the replicas."""
    params = even_params()
    four, two = (on_devices(subject, params, n) for n in (4, 2))
    carry = four.run(params, range(2 * subject.calls))
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(1, carry)
        back, _ = checkpointer.restore(two.start(params), reshard=True)
    nodes = zip(
        jax.tree.leaves(carry, is_leaf=is_per_replica),
        jax.tree.leaves(back, is_leaf=is_per_replica),
        strict=True,
    )
    for old, new in nodes:
        if not is_per_replica(old):
            require(np.asarray(old).tobytes() == np.asarray(new).tobytes(), "a value changed")
            continue
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
            if jnp.issubdtype(a.dtype, jnp.inexact):
                assert_close(np.asarray(a).mean(0), np.asarray(b).mean(0), "mean over replicas")
    finite(two.common(jax.jit(two.step)(back, two.grads(params, 9)))[0], "params")


CELLS: dict[str, Cell] = {
    "no recompilation in 10 steps": traced_once,
    "init under eval_shape": abstract_init,
    "inject_hyperparams": injected,
    "in MultiSteps": wrapped(multi_steps, factor=2),
    "around MultiSteps": around(multi_steps, factor=2),
    "in masked": wrapped(lambda params, tx: optax.masked(tx, mask(params))),
    "around masked": around(lambda params, tx: optax.masked(tx, mask(params))),
    "in named_chain": wrapped(lambda _, tx: optax.named_chain(("it", tx)), same=True),
    "in partition": wrapped(partition),
    "around partition": around(partition),
    "pickle": through(by_pickle),
    "Flax bytes": through(by_flax),
    "orbax": through(by_orbax),
    "resumed at every step 0 to 7": resumed,
    "restored on another device count": on_others,
}
