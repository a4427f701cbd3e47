"""Sections E, F and G: what goes wrong, what is asked wrongly, and what must not matter."""

import pathlib
import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import optax

from boostax.checkpoint import Checkpointer
from boostax.testing._case import assert_same, even_params, example_grads
from cells.programs import alone, mapped, mesh_of, on_devices, usual
from cells.subject import AXIS, Cell, NoMeaning, Subject, require, same_kind

PyTree = Any
LOW, HIGH = 2.0**-3, 2.0**4


def hundred_bad(subject: Subject) -> None:
    """All NaN, a hundred times."""
    params = even_params()
    program = usual(subject, params, guard=True)
    carry = program.run(params, range(subject.calls))
    nan = program.feed([jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)])
    body = lambda _, c: program.step(c, nan)  # noqa: E731
    after = jax.jit(lambda c: jax.lax.fori_loop(0, 100, body, c))(carry)
    assert_same(after[0], carry[0], "params")
    assert_same(subject.guarded(after[1]), subject.guarded(carry[1]), "state")


def one_bad_replica(subject: Subject) -> None:
    """A NaN on one of four replicas: all skip, and keep the same bits."""
    params = even_params()
    program = on_devices(subject, params, 4, guard=True)
    step = program.jitted
    carry = program.run(params, range(subject.calls), step)
    each = [example_grads(params, r) for r in range(4)]
    # In every leaf: one that is frozen at this step is none of the step's business.
    each[2] = jax.tree.map(lambda g: g.at[3].set(jnp.nan), each[2])
    after = carry
    for _ in range(subject.calls):
        after = step(after, program.feed(each))
    assert_same(after[0], carry[0], "params")
    assert_same(subject.guarded(after[1]), subject.guarded(carry[1]), "state")
    for leaf in jax.tree.leaves(after):
        if leaf.is_fully_replicated:
            parts = {jax.device_get(x.data).tobytes() for x in leaf.addressable_shards}
            require(len(parts) == 1, "replicas differ in bits")


def at_a_limit(value: float, limit: str) -> Cell:
    """The scale stops at its limit, and the state stays finite."""

    def cell(subject: Subject) -> None:
        if subject.scale is None:
            raise NoMeaning("no scale of its own")
        make, read = subject.scale
        params = even_params()
        program = alone(optax.with_extra_args_support(make(LOW, HIGH)))
        carry, step = program.start(params), program.jitted
        grads = jax.tree.map(lambda p: jnp.full_like(p, value), params)
        for _ in range(20):
            carry = step(carry, grads)
        reached = jnp.asarray(read(carry[1]))
        wanted = LOW if limit == "floor" else HIGH
        # Of several scales only that of the group to blame is lowered.
        within = bool(((reached >= LOW) & (reached <= HIGH)).all())
        require(within and bool((reached == wanted).any()), f"{reached} and not {wanted}")

    return cell


def truncated(subject: Subject) -> None:
    """A checkpoint of which half a file is missing raises, and says so."""
    if subject.peer:
        raise NoMeaning("checkpoints are not theirs")
    params = even_params()
    carry = usual(subject, params).run(params, range(subject.calls))
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(1, carry)
        checkpointer.wait()
        files = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        message = refusal(lambda: checkpointer.restore(carry), RuntimeError)
    require("Checkpointer" in message and "1" in message, message)


def refusal(call: Any, kinds: Any = (TypeError, ValueError)) -> str:
    """The message with which a call is refused."""
    try:
        call()
    except kinds as error:
        return " ".join(str(error).split())
    raise AssertionError("nothing raised")


FAULTS: dict[str, Cell] = {
    "100 steps of NaN": hundred_bad,
    "NaN on one replica": one_bad_replica,
    "scale at its floor": at_a_limit(float("nan"), "floor"),
    "scale at its ceiling": at_a_limit(1.0, "ceiling"),
    "truncated checkpoint": truncated,
}


def mistake(call: Any, part: str) -> Cell:
    """A bad argument: the message names it, says what is allowed and what came."""

    def cell(subject: Subject) -> None:
        message = refusal(call)
        require(part in message, f"{part!r} is not in {message!r}")
        if not subject.peer:
            require("must" in message and "got" in message, message)

    return cell


def unbound_axis(subject: Subject) -> None:
    params = even_params()
    program = alone(subject.mapped())
    message = refusal(
        lambda: program.step(program.start(params), example_grads(params, 0)),
        (TypeError, ValueError, NameError),
    )
    require(repr(AXIS) in message or f" {AXIS}" in message, message)


def reduced_already(subject: Subject) -> None:
    """Gradients that autodiff has summed: a mean over them multiplies the learning rate."""
    if subject.own_params:
        raise NoMeaning("params are each replica's own, and so are their gradients")
    params = even_params()
    program = mapped(
        summing(subject.mapped(optax.sgd(0.1))),
        params,
        mesh_of(4),
        own=subject.own_params,
        whole=subject.peer,
    )
    message = refusal(lambda: jax.eval_shape(program.step, program.start(params), batch(params)))
    require("local_params" in message, message)


def batch(params: PyTree) -> PyTree:
    return jax.tree.map(lambda p: jnp.ones((4, *p.shape)), params)


def summing(tx: Any) -> Any:
    """Differentiates a loss by replicated params itself, as a user's step would."""

    def update(data: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Any:
        def loss(p: PyTree) -> jax.Array:
            pairs = zip(jax.tree.leaves(p), jax.tree.leaves(data), strict=True)
            return sum(jnp.sum(x * y) for x, y in pairs)

        grads = jax.grad(loss)(jax.tree.map(jnp.zeros_like, params))
        return tx.update(grads, state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def another_tree(subject: Subject) -> None:
    """Gradients that are not like the params."""
    params = even_params()
    program = usual(subject, params)
    carry, step = program.start(params), program.jitted
    grads = program.grads(params, 0)
    message = refusal(lambda: step(carry, {"w": grads["w"]}), (TypeError, ValueError, KeyError))
    require(bool(re.search("tree|structure|gradients|[Kk]ey|None", message)), message)


def without_params(subject: Subject) -> None:
    """To do without is right, and so is to say what is missing."""
    params = even_params()

    def lacking(tx: Any) -> Any:
        def update(grads: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Any:
            del params
            return tx.update(grads, state, None, **extra)

        return optax.GradientTransformationExtraArgs(tx.init, update)

    program = usual(subject, params, wrap=lacking)
    try:
        carry = program.step(program.start(params), program.grads(params, 0))
    except (TypeError, ValueError) as error:
        require("params" in str(error), str(error))
    else:
        same_kind(params, program.common(carry)[0], "params")


MISTAKES: dict[str, Cell] = {
    "an axis that is not bound": unbound_axis,
    "gradients that are summed already": reduced_already,
    "gradients of another tree": another_tree,
    "an update without params": without_params,
}


def twice(subject: Subject) -> None:
    params = even_params()
    ends = []
    for _ in range(2):
        # Wrapped in nothing, it is built and compiled anew.
        program = usual(subject, params, wrap=lambda tx: tx)
        ends.append(program.run(params, range(2 * subject.calls)))
    assert_same(*ends, "two runs")


def insertion(subject: Subject) -> None:
    """The order in which the keys of a dict were set."""
    params = even_params()
    turned = dict(reversed(params.items()))
    require(list(turned) != list(params), "the order is the same")
    ends = []
    for each in (params, turned):
        program = usual(subject, each)
        ends.append(program.common(program.run(each, range(2 * subject.calls)))[0])
    assert_same({**ends[1]}, {**ends[0]}, "insertion order")


def leaf_order(subject: Subject) -> None:
    """The same leaves under names that sort the other way."""
    params = even_params()
    # Groups go by name, and must not change with the order: both stand under one.
    ends = []
    for w, b in (("a", "z"), ("z", "a")):
        tree = {"x": {w: params["w"], b: params["b"]}}
        program = usual(subject, tree)
        carry, step = program.start(tree), program.jitted
        for seed in range(2 * subject.calls):
            made = program.grads(params, seed)
            carry = step(carry, {"x": {w: made["w"], b: made["b"]}})
        end = program.common(carry)[0]["x"]
        ends.append({"w": end[w], "b": end[b]})
    assert_same(ends[1], ends[0], "leaf order")


ORDERS: dict[str, Cell] = {
    "two runs": twice,
    "order of insertion": insertion,
    "order of the leaves": leaf_order,
}
