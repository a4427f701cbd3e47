"""The scorecard's harness: sound transformations pass, each broken one fails where it is broken."""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest
from cells import contexts, counts, faults, inputs, lifecycle, page
from cells.sections import cells
from cells.subject import FAIL, NONE, PASS, UNSUPPORTED, Subject, judge
from cells.subjects import EVERYONE, named
from harness import sections_of

ROOT = pathlib.Path(__file__).parents[1]
CELLS = {
    **inputs.CELLS,
    **contexts.CELLS,
    **counts.CELLS,
    **lifecycle.CELLS,
    **faults.FAULTS,
    **faults.MISTAKES,
    **faults.ORDERS,
}


def outcome(subject, name):
    return judge(subject, "any", name, CELLS[name])


def transformation(update, init=lambda params: ()):
    """Around an optimizer: ``update(grads, state)`` before it."""

    def make(inner, axis):
        del axis

        def step(grads, state, params=None, **extra):
            grads, own = update(grads, state[0])
            grads, kept = inner.update(grads, state[1], params, **extra)
            return grads, (own, kept)

        return optax.GradientTransformationExtraArgs(
            lambda params: (init(params), inner.init(params)), step
        )

    return make


def zeroed(grads, state):
    """Zero times NaN is NaN."""
    ok = sum(jnp.sum(~jnp.isfinite(g)) for g in jax.tree.leaves(grads)) == 0
    return jax.tree.map(lambda g: g * ok, grads), state


def whole(state):
    return state


TRACES = itertools.count()
CALLED = {
    "zeroes by a product": (
        Subject("zeroed", transformation(zeroed), guarded=whole),
        {"NaN in one leaf", "+inf", "100 steps of NaN", "NaN on one replica"},
    ),
    "widens": (
        Subject(
            "widened",
            transformation(
                lambda grads, n: (grads, n.astype(jnp.float32)), lambda _: jnp.zeros((), jnp.int32)
            ),
        ),
        {"ordinary f32", "cond"},
    ),
    "counts in Python": (
        Subject("python", transformation(lambda grads, n: (grads, n + 1), lambda _: 0)),
        {"no recompilation in 10 steps"},
    ),
    "depends on how often it was traced": (
        Subject(
            "drifts",
            transformation(
                lambda grads, n: (jax.tree.map(lambda g: g * (1 + next(TRACES)), grads), n)
            ),
        ),
        {"two runs"},
    ),
    "does not reduce": (
        Subject("local", lambda inner, axis: inner, reduces=True),
        {"3 replicas", "shard_map, check_vma on", "an axis that is not bound"},
    ),
    "adds up instead of averaging": (
        Subject(
            "sums",
            lambda inner, axis: optax.chain(
                optax.stateless(lambda g, _: jax.lax.psum(g, axis)), inner
            ),
            reduces=True,
        ),
        {"3 replicas"},
    ),
    "takes leaves by their order": (
        Subject(
            "ordered",
            transformation(
                lambda grads, n: (
                    {"x": {k: g * (i + 1) for i, (k, g) in enumerate(grads["x"].items())}}
                    if "x" in grads
                    else grads,
                    n,
                )
            ),
        ),
        {"order of the leaves"},
    ),
}
SOUND = ("ordinary f32", "jit", "two runs", "order of insertion")


@pytest.mark.parametrize(
    ("broken", "cell"), [(k, c) for k, v in CALLED.items() for c in sorted(v[1])]
)
def test_what_is_broken_fails(broken, cell):
    found = outcome(CALLED[broken][0], cell)
    assert found.outcome == FAIL and found.reason, found


@pytest.mark.parametrize("name", SOUND)
def test_what_does_nothing_passes(name):
    plain = Subject("plain", transformation(lambda grads, state: (grads, state)))
    assert outcome(plain, name).outcome == PASS


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("dynamic_loss_scale", "NaN in one leaf"),
        ("dynamic_loss_scale", "100 steps of NaN"),
        ("dynamic_loss_scale", "scale at its floor"),
        ("all_reduce", "3 replicas"),
        ("all_reduce", "shard_map, check_vma on"),
        ("accumulate", "no recompilation in 10 steps"),
        ("optax.MultiSteps", "jit"),
    ],
)
def test_sound_ones_pass(name, cell):
    found = outcome(named(name), cell)
    assert found.outcome == PASS, found


def refusing(message, error=ValueError):
    def refuse(grads, state):
        raise error(message)

    return transformation(refuse)


def test_unsupported_is_what_was_declared_and_is_refused_in_these_words():
    declared = {"jit": "no jit here"}
    make = refusing("it: there must be no jit here, got one")
    found = outcome(Subject("declared", make, unsupported=declared), "jit")
    assert found.outcome == UNSUPPORTED and "no jit here" in found.reason
    assert outcome(Subject("undeclared", make), "jit").outcome == FAIL
    assert (
        outcome(Subject("other words", refusing("no"), unsupported=declared), "jit").outcome == FAIL
    )
    crash = refusing("no jit here", RuntimeError)
    assert outcome(Subject("a crash", crash, unsupported=declared), "jit").outcome == FAIL


def test_a_declaration_that_does_not_hold_fails():
    plain = Subject("idle", transformation(lambda g, s: (g, s)), unsupported={"jit": "no jit here"})
    found = outcome(plain, "jit")
    assert found.outcome == FAIL and "it works" in found.reason


def test_without_a_meaning_nothing_runs():
    crash = Subject("crash", refusing("never"), meaningless={"jit": "none"})
    assert outcome(crash, "jit") == ("crash", "any", "jit", NONE, "none")


def test_every_public_transformation_is_a_subject():
    names = {subject.name for subject in EVERYONE}
    assert len(names) == len(EVERYONE)
    cases = {
        "dynamic_loss_scale static_loss_scale group_loss_scale accumulate all_reduce adasum "
        "adasum_delta top_k_reduce threshold_reduce random_k_reduce int8_reduce "
        "int16_reduce sign_reduce power_sgd_reduce local_updates partial_average scheduled_freeze "
        "centralize_gradients record_trajectory dim_reduce "
        "check_updates skip_spikes store average_params clip_by_global_norm"
    }
    assert set(" ".join(cases).split()) <= names


def test_there_are_as_many_cells_as_the_contract_asks_for():
    subject = named("dynamic_loss_scale")
    least = {"A": 18, "B": 15, "C": 8, "D": 13, "E": 5, "G": 3}
    for section, count in least.items():
        assert len(cells(subject, section)) >= count
    assert sum(len(each.mistakes) for each in EVERYONE if not each.peer) >= 25


def test_a_subject_that_was_run_again_takes_its_own_place_in_the_record():
    record = sections_of("scorecard")
    assert {k: page.renewed(record, [], [])[k] for k in ("passes", "cells", "laws")} == {
        k: record[k] for k in ("passes", "cells", "laws")
    }
    new = {"section": "A", "cell": "zeros", "reason": "why"}
    found = [new | {"subject": name, "outcome": FAIL} for name in ("accumulate", "adasum")]
    after = page.renewed(record, found, ["accumulate"])
    of = lambda rows, name: [row for row in rows if row["subject"] == name]  # noqa: E731
    assert not of(after["passes"], "accumulate")
    assert of(after["cells"], "accumulate") == [found[0] | {"peer": False}]
    assert of(after["cells"], "adasum") == of(record["cells"], "adasum")


def test_the_page_is_that_of_the_record():
    sections = sections_of("scorecard")
    assert (ROOT / "docs" / "scorecard.md").read_text() == page.page(sections)
