"""The page on scaling: every formula is what the traced program sends, waits for and keeps."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaling
import scaling_formulas as formulas
import scaling_techniques as techniques
from harness import sections_of
from jax.extend.core import Literal
from scaling_sends import Over, ring_rounds, tree_rounds

import boostax
from boostax._core import costs
from boostax._core.interpret import bodies
from boostax._core.replicas import stack_replicas, state_specs
from boostax.testing import drawn

TECHNIQUES, MODELS = techniques.TECHNIQUES, techniques.MODELS
# These send their leaves together, where padding and buckets depend on the number of replicas.
PACKED = [
    "`all_reduce`, bf16",
    "`top_k_reduce`, 1%",
    "`random_k_reduce`, 1%",
    "`int8_reduce`",
    "`int16_reduce`",
    "`sign_reduce`",
    "`sign_reduce`, two shots",
    "`power_sgd_reduce`, rank 2",
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
        inside = list(bodies(eqn))
        name = costs.kind(eqn.primitive.name)
        outputs = [max(inputs, default=0)] * len(eqn.outvars)
        if name in costs.RING:
            outputs = [outputs[0] + weight(eqn, name)] * len(eqn.outvars)
            ends.append(outputs[0])
        elif name == "cond":
            # A branch begins when the predicate is known.
            entered = [max(inputs[0], x) for x in inputs[1:]]
            ways = [depths(body, weight, entered) for body in inside]
            outputs = [
                max(inputs[0], *each) for each in zip(*(out for out, _ in ways), strict=True)
            ]
            ends += itertools.chain.from_iterable(found for _, found in ways)
        elif name == "while":
            start = inputs[eqn.params["cond_nconsts"] :]
            outputs, found = depths(eqn.params["body_jaxpr"].jaxpr, weight, start)
            ends += found
        elif len(inside) == 1 and len(inside[0].invars) == len(inputs) and name != "scan":
            outputs, found = depths(inside[0], weight, inputs)
            ends += found
        known |= zip(eqn.outvars, outputs, strict=True)
    return [0 if isinstance(x, Literal) else known[x] for x in jaxpr.outvars], ends


def rounds_of(rounds, sizes):
    def weight(eqn, name):
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        axes = axes if isinstance(axes, tuple) else (axes,)
        return rounds(Over(axes, math.prod(sizes[x] for x in axes))(name, 0))

    return weight


def arriving(jaxpr):
    """Bytes of the results of all collectives, alternatives added up."""
    total = 0
    for eqn in jaxpr.eqns:
        if costs.kind(eqn.primitive.name) in costs.RING:
            total += sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars)
        total += sum(arriving(body) for body in bodies(eqn))
    return total


def kept(technique, model, n):
    """Bytes of the state on one device."""
    tx, place = technique.make(model), techniques.place(technique, n)
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
    program = techniques.program(technique, model, n)
    assert techniques.counted(program) == techniques.written(cost)
    found = costs.collectives(program)
    always = [send._replace(share=1.0) for send in cost.sends]
    assert math.isclose(costs.wire_bytes(found), sum(send.wire for send in always), rel_tol=1e-12)
    assert arriving(program.jaxpr) == sum(send.arrives for send in always)
    assert longest_chain(program.jaxpr, lambda *_: 1) == len(cost.chain)
    for rounds in (ring_rounds, tree_rounds):
        weight = rounds_of(rounds, techniques.place(technique, n).sizes)
        assert longest_chain(program.jaxpr, weight) == sum(map(rounds, cost.chain))
    assert kept(technique, model, n) == cost.optimizer + cost.own
    return found, cost


@pytest.mark.parametrize(
    "model", [pytest.param(x, marks=[] if x == "odd" else pytest.mark.long) for x in MODELS]
)
@pytest.mark.parametrize("name", TECHNIQUES)
def test_formulas_are_what_programs_send(name, model):
    sizes = [
        n for technique, shapes, n in techniques.cases() if (technique, shapes) == (name, model)
    ]
    assert sizes
    for n in sizes:
        assert_tied(TECHNIQUES[name], MODELS[model], n)


@pytest.mark.long
@pytest.mark.parametrize("name", PACKED)
def test_formulas_are_what_programs_send_at_full_size(name):
    model, technique = scaling.billion(), TECHNIQUES[name]
    assert techniques.counted(techniques.program(technique, model, 4096)) == techniques.written(
        technique.cost(model, 4096)
    )


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (12, 64))])
def test_adasum_of_many_replicas_and_of_odd_numbers(n):
    model = MODELS["odd"]
    assert_tied(TECHNIQUES["`adasum`"], model, n)
    for within in (2, 4):
        if n % within == 0:
            assert_tied(techniques.on_hosts(within), model, n)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_what_takes_turns_stands_in_branches(name):
    """Of branches, and of partitions, one runs; counts have a condition each."""
    technique, model = TECHNIQUES[name], MODELS["network"]
    n = 8 * technique.within
    cost = technique.cost(model, n)
    found = costs.collectives(techniques.program(technique, model, n))
    sent = [send._replace(share=1.0) if "group" in name else send for send in cost.sends]
    assert math.isclose(costs.expected(found), sum(send.wire for send in sent), rel_tol=1e-12)
    if cost.every > 1 or cost.batches > 1 or "partial" in name:
        assert all(c.conditional for c in found)


def test_shares_are_how_often_the_transformations_send():
    def states(tx, calls):
        w = [jnp.ones(3), jnp.ones(3)]

        def run(w):
            state, kept = tx.init(w), []
            for _ in range(calls):
                kept.append(state)
                state = drawn(tx).update(w, state, w)[1]
            return [*kept, state]

        lead = lambda x: x[0]  # noqa: E731
        run = jax.vmap(run, axis_name="data", axis_size=2, in_axes=None)
        return jax.tree.map(lead, jax.jit(run)(w))

    met = states(boostax.reduce.local_updates(techniques.adam(), "data", 4), 9)
    assert [state.syncs for state in met] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    turns = states(boostax.reduce.partial_average(techniques.adam(), "data", 2), 4)
    assert [state.partition for state in turns] == [0, 1, 0, 1, 0]
    windows = states(boostax.accumulate(boostax.all_reduce("data"), 4, axis_name="data"), 8)
    assert [state.optimizer_steps for state in windows] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    tx = boostax.precision.group_loss_scale(boostax.all_reduce("data"), [0, 1], axis_name="data")
    assert [state.until_count for state in states(tx, 3)] == [0, 99, 98, 97]


@pytest.mark.parametrize("n", [2, 5, 8, 13, 64])
def test_rounds_are_those_until_all_is_known_everywhere(n):
    """A ring passes on what came last; doubling sends all that is known twice as far each time."""
    gather, total = (Over(("data",), n)(name, 4) for name in ("all_gather", "psum"))
    known, rounds = np.eye(n, dtype=bool), 0
    last = known
    while not known.all():
        last = np.roll(last, 1, 0)
        known, rounds = known | last, rounds + 1
    assert (rounds, 2 * rounds) == (ring_rounds(gather), ring_rounds(total))
    known, rounds = np.eye(n, dtype=bool), 0
    while not known.all():
        known, rounds = known | np.roll(known, 2**rounds, 0), rounds + 1
    assert (rounds, 2 * rounds) == (tree_rounds(gather), tree_rounds(total))


@pytest.mark.parametrize("name", ["`top_k_reduce`, 1%", "`sign_reduce`"])
def test_gathered_messages_outgrow_a_mean_where_the_page_says(name):
    model = [(2**16, 2**11)]
    of = lambda name, n: TECHNIQUES[name].cost(model, n).wire  # noqa: E731
    mean = "`all_reduce`"
    first = next(n for n in itertools.count(2) if of(name, n) >= of(mean, n))
    assert abs(first - scaling.break_even()[0 if "top" in name else 2][f"as much as {mean}"]) <= 1
    for n, more in ((first - 1, False), (first, True)):
        sent = [techniques.program(TECHNIQUES[x], model, n) for x in (name, mean)]
        one, other = (costs.wire_bytes(costs.collectives(program)) for program in sent)
        assert (one >= other) == more


def test_adasum_has_an_array_for_each_row_of_each_exchange():
    model = MODELS["large"]
    for n in (2, 8):
        jaxpr = techniques.program(TECHNIQUES["`adasum`"], model, n)
        cost = TECHNIQUES["`adasum`"].cost(model, n)
        sends = [s for s in cost.sends if s.primitive in ("all_to_all", "ppermute")]
        # Of two replicas each sends one row.
        exchanges = {s.bytes // 4 // (1 if s.primitive == "ppermute" else n) for s in sends}
        count = len(sends)
        (body,) = (eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map")
        squeezed = [
            eqn.outvars[0].aval.size for eqn in flat(body) if eqn.primitive.name == "squeeze"
        ]
        assert sum(size in exchanges for size in squeezed) >= n * count


def flat(jaxpr):
    """All equations."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from flat(body)


def test_int16_has_as_many_levels_as_the_page_says():
    levels = {row["what"]: row for row in scaling.growing()}
    (found,) = (row["256 replicas"] for what, row in levels.items() if "int16" in what)
    tx = boostax.reduce.int16_reduce("data")
    mean = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data", axis_size=256)
    g = jnp.broadcast_to(jnp.array([found, 3.0, 0.4]), (256, 3))
    np.testing.assert_allclose(mean(g)[0], [found, 3.0, 0.0], rtol=1e-6)


def test_the_model_has_a_billion_params():
    width, hidden, words, layers = 2048, 8192, 32768, 20
    each = 4 * width * width + 2 * width * hidden + 2 * width
    assert formulas.entries(scaling.billion()) == words * width + layers * each + width


def test_the_record_is_that_of_the_formulas():
    """To the bit: nothing in it was measured."""
    sections = sections_of("scaling")
    assert list(sections.items()) == scaling.tables()


def test_the_page_is_that_of_the_record():
    sections = sections_of("scaling")
    assert scaling.PAGE.read_text() == scaling.page(sections)
