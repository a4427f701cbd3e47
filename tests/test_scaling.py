"""The page on scaling: every formula is what the traced program sends, waits for and keeps."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaling
import scaling_formulas as formulas
from jax.extend.core import Literal
from scaling_sends import Over, ring_rounds, tree_rounds

import boostax
from boostax._core import costs
from boostax._core.replicas import stack_replicas, state_specs

TECHNIQUES, MODELS = scaling.TECHNIQUES, scaling.MODELS
RECORD = scaling.RESULTS / "scaling.json"
# Every other one is a mean of each leaf, or takes long to trace at this size.
PACKED = [
    name
    for name, technique in TECHNIQUES.items()
    if "psum" not in {send.primitive for send in technique.cost(scaling.billion(), 8).sends[:1]}
    and "adasum" not in name
]


def longest_chain(jaxpr, weight):
    """The most that collectives which wait for each other come to, by weights."""
    return max(depths(jaxpr, weight, [0] * len(jaxpr.invars))[1], default=0)


def depths(jaxpr, weight, given):
    """Of the results, and of all collectives, the weights of the longest chain up to there."""
    known = dict(zip(jaxpr.invars, given, strict=True)) | dict.fromkeys(jaxpr.constvars, 0)
    ends = []
    for eqn in jaxpr.eqns:
        inputs = [0 if isinstance(x, Literal) else known[x] for x in eqn.invars]
        bodies = list(costs._bodies(eqn.params.values()))
        name = costs.kind(eqn.primitive.name)
        outputs = [max(inputs, default=0)] * len(eqn.outvars)
        if name in costs.RING:
            outputs = [outputs[0] + weight(eqn, name)] * len(eqn.outvars)
            ends.append(outputs[0])
        elif name == "cond":
            # A branch begins when the predicate is known.
            entered = [max(inputs[0], x) for x in inputs[1:]]
            ways = [depths(body, weight, entered) for body in bodies]
            outputs = [max(inputs[0], *each) for each in zip(*(out for out, _ in ways))]
            ends += itertools.chain.from_iterable(found for _, found in ways)
        elif name == "while":
            start = inputs[eqn.params["cond_nconsts"] :]
            outputs, found = depths(eqn.params["body_jaxpr"].jaxpr, weight, start)
            ends += found
        elif len(bodies) == 1 and len(bodies[0].invars) == len(inputs) and name != "scan":
            outputs, found = depths(bodies[0], weight, inputs)
            ends += found
        known |= zip(eqn.outvars, outputs, strict=True)
    return [0 if isinstance(x, Literal) else known[x] for x in jaxpr.outvars], ends


def rounds_of(rounds, sizes):
    def weight(eqn, name):
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        axes = axes if isinstance(axes, tuple) else (axes,)
        return rounds(Over(axes, math.prod(sizes[x] for x in axes))(name, 0))

    return weight


def arriving(jaxpr, times=1):
    """Bytes of the results of all collectives, alternatives added up."""
    total = 0
    for eqn in jaxpr.eqns:
        if costs.kind(eqn.primitive.name) in costs.RING:
            total += sum(costs._bytes(v.aval) for v in eqn.outvars)
        total += sum(arriving(body) for body in costs._bodies(eqn.params.values()))
    return total


def kept(technique, model, n):
    """Bytes of the state on one device."""
    tx, place = technique.make(model), scaling.place(technique, n)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in model]
    state = jax.eval_shape(lambda p: stack_replicas(tx.init(p), n), params)
    specs = state_specs(tx, params, place.names, replicas=n)

    def on_a_device(x, spec):
        parts = math.prod(place.sizes[name] for name in jax.tree.leaves(tuple(spec)) if name)
        assert x.size % parts == 0
        return x.size // parts * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(on_a_device, state, specs)))


def assert_tied(technique, model, n):
    """Collectives, bytes, chains, results and state are those of the program."""
    cost = technique.cost(model, n)
    program = scaling.program(technique, model, n)
    assert scaling.counted(program) == scaling.written(cost)
    found = costs.collectives(program)
    always = [send._replace(share=1.0) for send in cost.sends]
    assert math.isclose(costs.wire_bytes(found), sum(send.wire for send in always), rel_tol=1e-12)
    assert arriving(program.jaxpr) == sum(send.arrives for send in always)
    assert longest_chain(program.jaxpr, lambda *_: 1) == len(cost.chain)
    for rounds in (ring_rounds, tree_rounds):
        weight = rounds_of(rounds, scaling.place(technique, n).sizes)
        assert longest_chain(program.jaxpr, weight) == sum(map(rounds, cost.chain))
    assert kept(technique, model, n) == cost.optimizer + cost.own
    return found, cost


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", TECHNIQUES)
def test_formulas_are_what_programs_send(name, model):
    sizes = [n for technique, shapes, n in scaling.cases() if (technique, shapes) == (name, model)]
    assert sizes
    for n in sizes:
        assert_tied(TECHNIQUES[name], MODELS[model], n)


@pytest.mark.parametrize("name", PACKED)
def test_formulas_are_what_programs_send_at_full_size(name):
    model, technique = scaling.billion(), TECHNIQUES[name]
    assert scaling.counted(scaling.program(technique, model, 4096)) == scaling.written(
        technique.cost(model, 4096)
    )


@pytest.mark.parametrize("n", [3, 12, 64])
def test_adasum_of_many_replicas_and_of_odd_numbers(n):
    model = MODELS["odd"]
    assert_tied(TECHNIQUES["`adasum`"], model, n)
    for within in (2, 4):
        if n % within == 0:
            assert_tied(scaling.on_hosts(within), model, n)
