"""How cost grows: counted curves are linear, and the benchmark finds those that are not."""

import json
import struct

import growth
import growth_measure as measure
import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from growth_cases import CASES, Case
from growth_programs import AXIS, Point, model, step_of
from jax import lax

# Nothing of this size is made. Of fewer params the padding for each replica would be a good part.
SMALL = Point(params=1_000_000, leaves=8, replicas=2, window=16, groups=2)
SECTIONS = harness.sections_of("growth")
STEPS = {
    # Of fewer, a few percent are what fills up the rows of a leaf, more or less by chance.
    "params": (4_000_000, 16_000_000),
    "leaves": (8, 16),
    "replicas": (4, 8),
    "window": (16, 32),
    "groups": (2, 4),
}


def rows_of(name, case, axis, find, base=SMALL, values=None):
    return [
        {"technique": name, axis: value, **find(case, growth.point_of(axis, value, case, base))}
        for value in values or STEPS[axis]
    ]


def of_the_trace(case, point):
    jaxpr = measure.traced(case.make(point)).jaxpr
    assert measure.agrees(case, point, jaxpr) is not False
    rest = dict.fromkeys((*measure.COMPILED, *measure.CLOCKS))
    return measure.counts_of_trace(jaxpr) | rest


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_traced_programs_grow_linearly(name):
    case = CASES[name]
    for axis in ("params", "leaves", *case.axes):
        slopes = growth.slopes_of(axis, rows_of(name, case, axis, of_the_trace))
        assert all(slopes[count] <= growth.LIMIT for count in measure.TRACED), (axis, slopes)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_compiled_programs_grow_linearly(name):
    case = CASES[name]
    for axis in ("params", "leaves", *case.axes):
        slopes = growth.slopes_of(axis, rows_of(name, case, axis, measure.measured))
        assert all(slopes[count] <= growth.LIMIT for count in measure.COUNTS), (axis, slopes)


def pairs_of_leaves(grads, state, params):
    """As many products as there are pairs of leaves."""
    total = sum(jnp.vdot(a.ravel()[:4], b.ravel()[:4]) for a in grads for b in grads)
    return jax.tree.map(lambda g: g * total, grads), state


def pairs_of_entries(grads, state, params):
    """A matrix of all params squared."""
    flat = jnp.concatenate([g.ravel() for g in grads])
    # Sorted, it must be somewhere; a plain sum would never be written.
    square = jnp.sort(jnp.outer(flat, flat), axis=0)
    return jax.tree.map(lambda g: g * square[0].max(), grads), state


def a_copy_for_each_to_all(grads, state, params):
    """Each sends to all what would do for one of them, as often as there are replicas."""
    copies = lambda g: jnp.tile(g.ravel(), lax.axis_size(AXIS))  # noqa: E731
    rows = [lax.all_gather(copies(g), AXIS)[:, : g.size] for g in grads]
    means = [lax.pmean(x.mean(0), AXIS) for x in rows]
    return [x.reshape(g.shape) for x, g in zip(means, grads, strict=True)], state


def toy(update, **options):
    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    return Case("toys", lambda point: step_of(tx, point), **options)


def linear(grads, state, params):
    return jax.tree.map(lambda g: g * 2.0, grads), state


def assert_found(case, axis, count, values, find, base=SMALL, power=2.0, near=0.25):
    """Beside one that grows as it should, the bar names it, and says how fast it grows."""
    plain = CASES["`all_reduce`"] if case.reduces else toy(linear)
    rows = rows_of("quadratic", case, axis, find, base, values)
    rows += rows_of("linear", plain, axis, find, base, values)
    (bar,) = [bar for bar in growth.steepest(axis, rows) if f": {count}, " in bar.claim]
    assert not bar.met and bar.claim.endswith(": quadratic")
    np.testing.assert_allclose(bar.figure, power, atol=near)


def test_a_program_that_is_quadratic_in_the_leaves_is_found():
    assert_found(toy(pairs_of_leaves), "leaves", "equations", (16, 32), of_the_trace)


def test_memory_that_is_quadratic_in_the_params_is_found():
    case, base = toy(pairs_of_entries), SMALL._replace(leaves=2)
    values = (1024, 4096)
    assert_found(case, "params", "temp bytes", values, measure.measured, base)


def test_wires_that_are_quadratic_in_the_replicas_are_found():
    case = toy(a_copy_for_each_to_all, reduces=True)
    # A gather of n copies, and a mean; against the others, of whom there are n - 1.
    sent = [(n - 1) * (n + 2 / n) for n in (4, 8)]
    power = np.log(sent[1] / sent[0]) / np.log(7 / 3)
    exact = {"power": power, "near": 1e-6}
    assert_found(case, "replicas", "wire bytes", (4, 8), of_the_trace, **exact)


@pytest.mark.parametrize(("power", "expected"), [(0, 0.0), (1, 1.0), (2, 2.0), (-1, 0.0)])
def test_a_slope_is_the_power(power, expected):
    x = [10, 40, 160]
    np.testing.assert_allclose(growth.slope(x, [3.0 * v**power for v in x]), expected)


def test_nothing_and_next_to_nothing_are_flat():
    assert growth.slope([1, 2], [0, 0]) == 0.0
    assert growth.slope([1, 2], [8, 4000], floor=4096) == 0.0
    assert growth.slope([1, 2], [8, 8192], floor=4096) == 1.0


def test_wires_are_measured_against_the_others():
    """What each sends to all others is linear in their number, not in that of all."""
    others = growth.work("replicas", "wire bytes", [2, 8, 16])
    assert growth.slope(others, [100 * (n - 1) for n in (2, 8, 16)]) == 1.0
    assert growth.work("replicas", "flops", [2, 8, 16]) == [2, 8, 16]


def test_an_update_is_timed_where_it_fits(monkeypatch):
    case = CASES["`accumulate`"]
    point = growth.point_of("params", 16_384, case, SMALL)
    assert measure.measured(case, point, timed=True)["update s"] > 0
    monkeypatch.setattr(measure, "ROOM", 1000)
    assert measure.measured(case, point, timed=True)["update s"] is None


def test_params_and_leaves_are_about_as_many_as_asked_for():
    for axis in ("params", "leaves"):
        for value in growth.AXES[axis]:
            point = growth.BASE._replace(**{axis: value})
            shapes = model(point)
            assert len(shapes) == point.leaves
            found = sum(x.size for x in shapes)
            np.testing.assert_allclose(found, point.params, rtol=0.1)


@pytest.mark.parametrize("axis", growth.AXES)
def test_every_technique_is_on_record_at_every_point(axis):
    found = [(row["technique"], row[axis]) for row in SECTIONS[f"Along {axis}"]]
    assert found == [
        (name, value)
        for name, case in growth.cases_along(axis).items()
        for value in growth.values_of(axis, case)
    ]


def test_bars_and_slopes_are_those_of_the_curves_on_record():
    found = growth.on_record(list(growth.AXES))
    assert json.loads(json.dumps(growth.sections_of(found))) == [
        [name, rows] for name, rows in SECTIONS.items()
    ]
    bars = [(bar.claim, bar.figure, bar.limit) for bar in growth.bars_of(found)]
    record = harness.record("growth")["bars"]
    assert bars == [(bar["claim"], bar["figure"], bar["limit"]) for bar in record]


@pytest.mark.parametrize("axis", growth.AXES)
def test_pictures_are_there_and_small(axis):
    data = (growth.RESULTS / f"growth_{axis}.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data[:4] == b"\x89PNG" and len(data) < 200_000
    assert width > 600 and height > 600
