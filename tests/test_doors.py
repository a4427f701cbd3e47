"""Loops of other frameworks before and after boostax: same losses, one reduction, few lines."""

import difflib
import importlib.util
import inspect
import pathlib
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
from boostax.inspect import hlo

ROOT = pathlib.Path(__file__).parents[1]
DOORS = sorted((ROOT / "docs" / "doors").glob("*.py"))
FREEZING = [path for path in DOORS if path.stem.startswith("freezing_")]
REDUCING = [path for path in DOORS if path not in FREEZING]
FEW = [path for path in DOORS if path.stem not in ("haiku_transform", "keras_stateless")]
DEVICES, STEPS = 8, 6


def module_of(path):
    spec = importlib.util.spec_from_file_location(f"door_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(make, calls, width):
    """The losses of every call, and the audit of the compiled step."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    step, *args = make(mesh, width)
    params = args[0].params if hasattr(args[0], "params") else args[0]
    losses, audit = [], None
    for seed in range(STEPS * calls):
        random = np.random.default_rng(seed)
        batch = {name: random.normal(size=(64 // calls, width)).astype("f") for name in "xy"}
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        audit = audit or boostax.audit(step, *args, batch, params=params, calls=calls)
        *new, loss = result if isinstance(result := step(*args, batch), tuple) else (result,)
        args = new or args
        losses.append(float(jax.block_until_ready(loss)))
    # A loop that trains nothing would agree with any other.
    assert len(set(losses)) == len(losses)
    return losses, audit


def both(path, width):
    module = module_of(path)
    return (run(make, module.CALLS, width) for make in (module.before, module.after))


@pytest.mark.parametrize("path", REDUCING, ids=lambda path: path.stem)
def test_a_loop_reduces_once_and_trains_as_before(path):
    (before, old), (after, new) = both(path, width=32)
    np.testing.assert_allclose(after, before, rtol=1e-5)
    assert [old.reductions, new.reductions] == pytest.approx([8, 1], abs=0.02)
    said = "Each of the 8 calls of an opt" if old.calls > 1 else "Gradients are reduced 8.00 times"
    assert said in str(old) and not any("educe" in waste.what for waste in new.findings)
    assert new.temporary_bytes <= old.temporary_bytes


@pytest.mark.parametrize("path", FREEZING, ids=lambda path: path.stem)
def test_a_swap_of_the_gradient_shortens_the_backward_pass(path):
    """Four layers: their products, those of their weights' gradients, and of three inputs'."""
    (before, old), (after, new) = both(path, width=16)
    np.testing.assert_array_equal(after, before)
    for audit, least in ((old, 11), (new, 5)):
        program = hlo.parse(audit.text)
        dots = [site for site in program.sites if site.instruction.op == "dot"]
        found = program.total((site.branches, 1) for site in dots)
        assert (int(found.least), int(found.most)) == (least, 11)


@pytest.mark.parametrize("path", FEW, ids=lambda path: path.stem)
def test_few_lines_change(path):
    module = module_of(path)
    one, two = (inspect.getsource(f).splitlines()[1:] for f in (module.before, module.after))
    match = difflib.SequenceMatcher(None, one, two, autojunk=False).get_opcodes()
    assert 1 <= sum(max(b - a, d - c) for tag, a, b, c, d in match if tag != "equal") <= 3


@pytest.mark.parametrize("page", ["README.md", "docs/doors.md"])
def test_a_page_shows_lines_that_run(page):
    """Its first diff is that of the door of ``MultiSteps``."""
    shown = re.findall(r"```diff\n(.*?)```", (ROOT / page).read_text(), re.S)[0].splitlines()
    module = module_of(ROOT / "docs/doors/optax_multi_steps.py")
    for make, sign in ((module.before, "-"), (module.after, "+")):
        lines = [line[1:].strip() for line in shown if line[:1] in (sign, " ")]
        assert lines and {*lines} <= {x.strip() for x in inspect.getsource(make).splitlines()}
