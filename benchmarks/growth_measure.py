"""What is counted and clocked of one program."""

import gc
import math
import resource
import time
from typing import Any

import jax
import jax.numpy as jnp
from growth_cases import Case
from growth_programs import Point, Program, model, shapes_of
from jax.extend.core import Jaxpr
from scaling_techniques import counted, written

from boostax._core import costs
from boostax._core.interpret import bodies

# A program of more leaves is traced and lowered: to compile it takes minutes each.
MOST_COMPILED = 100
TRACED = ("equations", "collectives", "wire bytes")
COMPILED = ("argument bytes", "temp bytes", "flops", "unfused bytes")
COUNTS = (*TRACED, *COMPILED)
CLOCKS = ("trace s", "lower s", "compile s", "update s")
# What an update may take in all, on a machine that others use.
ROOM = 8 * 2**30
ROUNDS, ENOUGH = 3, 1.0
Row = dict[str, Any]


def traced(program: Program) -> Any:
    """Anew each time: JAX remembers what it has traced by the function."""
    fresh = lambda *args: program.run(*args)  # noqa: E731
    return jax.jit(fresh, donate_argnums=range(program.donated)).trace(*program.args)


def equations(jaxpr: Jaxpr) -> int:
    """Of a program and of all that it calls."""
    return len(jaxpr.eqns) + sum(equations(body) for eqn in jaxpr.eqns for body in bodies(eqn))


def counts_of_trace(jaxpr: Any) -> Row:
    """The size of a program, and what it sends in a call that sends."""
    found = costs.collectives(jaxpr)
    return {
        "equations": equations(jaxpr.jaxpr),
        "collectives": costs.expected(found, lambda c: c.count),
        "wire bytes": costs.expected(found),
    }


def counts_of_program(lowered: Any, compiled: Any) -> Row:
    """Memory and operations on one device, as XLA counts them: the body of a loop once.

    What operations read and write is counted before they are fused: of an operand that a fusion
    slices behind a change of shape, XLA counts all of it for each slice.
    """
    if compiled is None:
        return dict.fromkeys(COMPILED)
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    return {
        "argument bytes": memory.argument_size_in_bytes,
        "temp bytes": memory.temp_size_in_bytes,
        "flops": max(0.0, cost.get("flops", 0.0)),
        "unfused bytes": max(0.0, lowered.cost_analysis().get("bytes accessed", 0.0)),
    }


def measured(case: Case, point: Point, timed: bool = False, most: int = MOST_COMPILED) -> Row:
    """All counts and clocks at a point; an update is run only if it is to be ``timed``.

    Clocks are of the processor, all threads together: others use the machine as well. The shapes
    of the state are found within the time to trace, for that is part of every start.
    """
    seconds: dict[str, list[float]] = {"trace s": [], "lower s": []}
    # What was made before is not to be looked through again and again.
    gc.collect()
    gc.freeze()
    begun = time.process_time()
    for _ in range(ROUNDS):
        start = time.process_time()
        program = case.make(point)
        found = traced(program)
        middle = time.process_time()
        lowered = found.lower()
        seconds["trace s"].append(middle - start)
        seconds["lower s"].append(time.process_time() - middle)
        if time.process_time() - begun > ENOUGH:
            break
    compiled, start = None, time.process_time()
    if point.leaves <= most:
        # What runs is to be fast; elsewhere LLVM's optimizations change nothing that is counted.
        options = {} if timed else {"xla_backend_optimization_level": 0}
        compiled = lowered.compile(compiler_options=options)
    compile_seconds = time.process_time() - start
    return {
        **counts_of_trace(found.jaxpr),
        **counts_of_program(lowered, compiled),
        **{name: min(each) for name, each in seconds.items()},
        "compile s": compile_seconds if compiled else None,
        "update s": update_seconds(case, point, program, compiled) if timed else None,
        "as the page says": agrees(case, point, found.jaxpr),
    }


def agrees(case: Case, point: Point, jaxpr: Any) -> bool | None:
    """Whether it sends what the page on scaling says; ``None`` if that says nothing of it."""
    if case.cost is None or point.replicas < 2:
        return None
    return counted(jaxpr) == written(case.cost(shapes_of(point), point))


def update_seconds(case: Case, point: Point, program: Program, compiled: Any) -> float | None:
    """Of a call, the mean over a window of them; ``None`` where it takes too much memory.

    Without what the system takes: from some size on, all temporary memory is new to the process
    in each call, and is handed out page by page.
    """
    memory = compiled.memory_analysis()
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    one = memory.argument_size_in_bytes + memory.temp_size_in_bytes + fresh
    if one * max(1, point.replicas) > ROOM:
        return None
    args = list(map(filled, program.args))
    if program.init is not None:
        # A state as it begins: the scale of a loss must not be any number.
        init = lambda: program.init(filled(model(point)))  # noqa: E731
        args[1] = jax.jit(init, out_shardings=shardings(program.args[1]))()
    best = math.inf
    for _ in range(2):
        start, calls = user_seconds(), 0
        # The kernel tells user from system time by its ticks: a short update may see none.
        while calls == 0 or user_seconds() == start:
            for _ in range(case.cycle(point)):
                results = compiled(*args)
                args[: program.donated] = results[: program.donated]
            jax.block_until_ready(results)
            calls += case.cycle(point)
        best = min(best, (user_seconds() - start) / calls)
    return best


def user_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def filled(tree: Any) -> Any:
    """Arrays of these shapes, on their devices."""

    def one(x: Any) -> jax.Array:
        floats = jnp.issubdtype(x.dtype, jnp.floating)
        numbers = jnp.sin(jnp.arange(math.prod(x.shape), dtype=jnp.float32)).reshape(x.shape)
        return 0.01 * numbers.astype(x.dtype) if floats else jnp.zeros(x.shape, x.dtype)

    make = lambda: jax.tree.map(one, tree)  # noqa: E731
    return jax.jit(make, out_shardings=shardings(tree))()
