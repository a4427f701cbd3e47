"""Section D: from the first trace over wrappers and files to other devices."""

import pathlib
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import serialization

import boostax
from boostax._core.replicas import is_per_replica
from boostax.checkpoint import Checkpointer
from boostax.testing._case import assert_close, assert_same, even_params
from cells.programs import Program, on_devices, stacked, usual
from cells.subject import AXIS, Cell, Subject, finite, moved, require, same_kind, strong

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
    plain = usual(subject, params, optax.sgd(0.1, momentum=0.9))
    end = plain.common(plain.run(params, range(count)))[0]
    for rate in (0.1, lambda step: 0.1):

        def wrap(_: Any, rate: Any = rate) -> Any:
            def build(learning_rate: Any) -> Any:
                inner = optax.sgd(learning_rate, momentum=0.9)
                return subject.mapped(inner) if subject.reduces else subject.alone(inner)

            tx = optax.inject_hyperparams(build)(learning_rate=rate)
            return optax.with_extra_args_support(tx)

        program = usual(subject, params, wrap=wrap)
        carry = program.run(params, range(count))
        assert_close(program.common(carry)[0], end, "injected")


Wrap = Callable[[PyTree, Any, Any], Any]


def wrapped(make: Wrap, *, same: bool = False) -> Cell:
    """In a wrapper of Optax's: what is not the transformation's is left to another optimizer."""

    def cell(subject: Subject) -> None:
        params = even_params()
        other = optax.sgd(0.1)
        if subject.reduces:
            other = optax.chain(boostax.all_reduce(AXIS), other)
        wrap = lambda tx: optax.with_extra_args_support(make(params, tx, other))  # noqa: E731
        program = usual(subject, params, wrap=wrap)
        check(program, params, 2 * subject.calls)
        if same:
            end = program.run(params, range(2 * subject.calls))
            plain = usual(subject, params)
            wanted = plain.run(params, range(2 * subject.calls))
            assert_close(program.common(end)[0], plain.common(wanted)[0], "wrapped")

    return cell


def in_window(subject: Subject) -> None:
    """``optax.MultiSteps`` does not say that its sum is each replica's own."""
    params = even_params()
    if subject.reduces:
        program = stacked(optax.with_extra_args_support(multi_steps(subject.mapped())))
    else:
        program = usual(subject, params, wrap=multi_steps)
    check(program, params, 4 * subject.calls)


def around(make: Callable[[PyTree, Any], Any]) -> Cell:
    """A wrapper of Optax's inside the transformation."""

    def cell(subject: Subject) -> None:
        params = even_params()
        program = usual(subject, params, make(params, optax.sgd(0.1, momentum=0.9)))
        check(program, params, 4 * subject.calls)

    return cell


def check(program: Program, params: PyTree, calls: int) -> None:
    carry = program.run(params, range(calls))
    same_kind(program.start(params), carry, "params and state")
    finite(program.common(carry)[0], "params")
    moved(params, program.common(carry)[0])


def mask(params: PyTree, name: str = "w") -> PyTree:
    return {key: key == name for key in params}


def masked(params: PyTree, tx: Any, other: Any) -> Any:
    return optax.chain(optax.masked(tx, mask(params)), optax.masked(other, mask(params, "b")))


def partition(params: PyTree, tx: Any, other: Any) -> Any:
    labels = {name: "it" if name == "w" else "other" for name in params}
    return optax.partition({"it": tx, "other": other}, labels)


def multi_steps(tx: Any) -> Any:
    return optax.MultiSteps(tx, 2).gradient_transformation()


def through(there_and_back: Callable[[Any], Any]) -> Cell:
    """A round trip keeps every bit, and the run goes on as if there had been none."""

    def cell(subject: Subject) -> None:
        params = even_params()
        program = usual(subject, params)
        step, count = program.jitted, 2 * subject.calls
        middle = program.run(params, range(count), step)
        back = there_and_back(middle)
        assert_same(jax.tree.map(jnp.asarray, back), middle, "round trip")
        more = program.grads(params, 9)
        assert_same(step(back, more), step(middle, more), "afterwards")

    return cell


def as_before(tree: PyTree, like: PyTree) -> PyTree:
    def put(x: Any, y: Any) -> Any:
        return jax.device_put(x, y.sharding) if isinstance(y, jax.Array) else x

    return jax.tree.map(put, tree, like)


def by_pickle(carry: Any) -> Any:
    return as_before(pickle.loads(pickle.dumps(jax.device_get(carry))), carry)


def by_flax(carry: Any) -> Any:
    return as_before(serialization.from_bytes(carry, serialization.to_bytes(carry)), carry)


def restored(subject: Subject, carry: Any, target: Any) -> Any:
    """Through orbax: ours by the library's own checkpoints, peers by orbax alone."""
    with tempfile.TemporaryDirectory() as folder:
        if subject.peer:
            with ocp.StandardCheckpointer() as plain:
                plain.save(pathlib.Path(folder) / "state", carry)
                plain.wait_until_finished()
                return plain.restore(pathlib.Path(folder) / "state", target)
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(1, carry)
            return checkpointer.restore(target, reshard=True)[0]


def by_orbax(subject: Subject) -> None:
    through(lambda carry: restored(subject, carry, carry))(subject)


def resumed(subject: Subject) -> None:
    """At every step, bit for bit."""
    params = even_params()
    program = usual(subject, params)
    step = program.jitted
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
    back = restored(subject, carry, two.start(params))
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
    finite(two.common(two.jitted(back, two.grads(params, 9)))[0], "params")


CELLS: dict[str, Cell] = {
    "no recompilation in 10 steps": traced_once,
    "init under eval_shape": abstract_init,
    "inject_hyperparams": injected,
    "in MultiSteps": in_window,
    "around MultiSteps": around(lambda _, tx: multi_steps(tx)),
    "in masked": wrapped(masked),
    "around masked": around(lambda params, tx: optax.masked(tx, mask(params))),
    "in named_chain": wrapped(lambda _, tx, __: optax.named_chain(("it", tx)), same=True),
    "in partition": wrapped(partition),
    "around partition": around(lambda params, tx: partition(params, tx, optax.sgd(0.1))),
    "pickle": through(by_pickle),
    "Flax bytes": through(by_flax),
    "orbax": by_orbax,
    "resumed at every step 0 to 7": resumed,
    "restored on another device count": on_others,
}
