"""States answer questions by methods of exact names, and a name that is nearly right is refused."""

import collections
import dataclasses
import pathlib
import pickle
import re
import sys

import jax.numpy as jnp
import optax
import pytest

import boostax
from boostax._core import axes, protocols, trees

NEAR = {"metric": "metrics", "inner_run": "inner_ran", "is_opened": "is_open"}


def state_of(kind, methods=(), fields=()):
    """A state with these methods, which return ``True``, and fields of 0."""
    body = dict.fromkeys(methods, lambda self: jnp.asarray(True))
    if kind == "dataclass":
        return dataclasses.make_dataclass("Mine", fields, namespace=body)(*[0] * len(fields))
    return type("Mine", (collections.namedtuple("Mine", fields),), body)(*[0] * len(fields))


def classes_of(package):
    """The NamedTuples of a package's loaded modules, by name."""
    modules = [x for name, x in sys.modules.items() if name.split(".")[0] == package]
    found = (x for module in modules for x in vars(module).values() if isinstance(x, type))
    return {x.__name__: x for x in found if hasattr(x, "_fields") or dataclasses.is_dataclass(x)}


def test_every_question_has_an_example_that_answers_it():
    states = classes_of("boostax")
    page = (pathlib.Path(__file__).parents[1] / "docs/extending.md").read_text()
    assert len(protocols.METHODS) >= 12
    for question, methods in protocols.METHODS.items():
        text = question.__doc__
        assert all(f"`{name}(" in page for name in methods)
        assert text.split("\n")[0].endswith("?") and all(f"``{name}(" in text for name in methods)
        for name in re.findall(r"``(\w+)``", text.partition("Example")[2]):
            assert protocols.answers(states[name], question)


def test_no_module_asks_a_question_by_a_string():
    """Defect guarded against: a string does not follow when a method gets another name."""
    names = frozenset[str]().union(protocols.RENAMED, *protocols.METHODS.values())
    asks = re.compile(rf"""(?:attr|attrgetter|methodcaller)\([^()]*["']({"|".join(names)})["']""")
    for path in pathlib.Path(boostax.__file__).parent.rglob("*.py"):
        assert not asks.search(path.read_text()), path


@pytest.mark.parametrize("kind", ["dataclass", "NamedTuple"])
@pytest.mark.parametrize(
    ("methods", "fields", "got", "right"),
    [
        *(([x], [], f"a method {x}()", f"{y}()") for x, y in (protocols.RENAMED | NEAR).items()),
        (["inner_ran"], [], "inner_ran() alone", "gradient_used() too"),
        (["gradient_used"], ["count"], "gradient_used() alone", "inner_ran() too"),
        ([], ["is_open", "mu"], "a field is_open", "a method is_open()"),
    ],
)
def test_a_nearly_right_state_is_refused_by_name(kind, methods, fields, got, right):
    state = optax.chain(optax.sgd(1.0), optax.adam(1.0)).init(0.0), state_of(kind, methods, fields)
    words = f"Mine: methods must be named exactly, got {got}. Write {right}, which"
    for ask in (boostax.metrics, boostax.precision.loss_scale):
        with pytest.raises(TypeError, match=re.escape(words)):
            ask(state)


@pytest.mark.parametrize("kind", ["dataclass", "NamedTuple"])
def test_a_state_with_other_names_or_with_old_and_new_ones_is_not_refused(kind):
    assert not boostax.metrics(state_of(kind, ["average", "_metric"], ["metrics", "held", "taken"]))
    assert not boostax.metrics(state_of(kind, ["__call__", "metric", "sums"]))
    both = state_of(kind, ["inner_ran", "passed", "gradient_used", "taken"])
    assert trees.telling((both, both), protocols.Gate) == [both, both]


@pytest.mark.parametrize("package", ["boostax", "optax"])
def test_no_state_of_the_package_is_refused(package):
    found = [x for name, x in classes_of(package).items() if name.endswith("State")]
    assert len(found) >= {"boostax": 20, "optax": 55}[package]
    asked = [protocols.answers(x, protocols.HasMetrics) for x in found]
    assert any(asked) == (package == "boostax")


def test_a_marker_of_an_axis_is_neither_a_string_nor_a_tuple():
    assert not isinstance(axes.UNNAMED, (str, tuple))
    assert {axes.UNNAMED} == {pickle.loads(pickle.dumps(axes.UNNAMED))}
    assert axes.canonical("all_reduce", axes.UNNAMED) == (axes.UNNAMED,)
    step_axis = "the axis of the step"
    assert axes.UNNAMED != step_axis and axes.canonical("all_reduce", step_axis) == (step_axis,)
