"""Importing boostax is cheap and pulls in nothing that the runtime does not need."""

import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
import types
from importlib.resources import files

import pytest

import boostax

SCRIPT = """
import sys
import jax
import optax
traced = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: traced.append(event))
before = set(sys.modules)
import boostax
print(*sorted(set(sys.modules) - before))
print(*traced)
# Raises where a device has been asked for.
jax.config.update("jax_num_cpu_devices", 3)
"""
# What is loaded when it is first asked for.
LATE = {"auditing", "compat", "config", "explaining", "testing"}


def test_import_adds_to_optax_nothing_but_its_own_modules():
    """No other package, no trace and no device: the rest is the time to read our own files."""
    added, traced = subprocess.check_output([sys.executable, "-c", SCRIPT], text=True).splitlines()
    packages = {tuple(name.split(".")[:2]) for name in added.split()}
    assert {package for package, *_ in packages} == {"boostax"} and traced == ""
    assert not {name for _, *rest in packages for name in rest} & LATE


COMMON = {
    "Aux", "Pending", "PerReplica", "accumulate", "adasum", "all_reduce", "apply_gradients",
    "audit", "auto", "by_shape", "carry", "centralize_gradients", "describe", "dim_reduce",
    "dynamic_loss_scale", "explain", "flush", "freeze_schedule", "gate", "int8_reduce",
    "less_bn", "make_train_step", "metrics", "migrate_state", "on_mesh", "policy",
    "reshard_state", "scheduled_freeze", "skip_bad_steps", "static_loss_scale", "top_k_reduce",
    "value_and_grad",
}  # fmt: skip
PACKAGES = "auditing compat config explaining freeze model precision reduce states subspace train"
NAMESPACES = set(PACKAGES.split())


def test_public_names_are_thirty_two_and_eleven_modules():
    origin = lambda name: getattr(getattr(boostax, name), "__module__", None) or ""  # noqa: E731
    named = {x for x in dir(boostax) if x[0] != "_" and origin(x).startswith("boostax.")}
    packages = {name for name in NAMESPACES if isinstance(getattr(boostax, name), types.ModuleType)}
    assert named == COMMON and packages == NAMESPACES and NAMESPACES | COMMON <= set(dir(boostax))


ORDERS = """
import importlib, sys
for i, name in enumerate(names := sys.argv[1:]):
    [sys.modules.pop(x) for x in [*sys.modules] if x.partition(".")[0] == "boostax"]
    [importlib.import_module(x) for x in names[i:] + names[:i]]
    import boostax
    assert callable(boostax.audit) and callable(boostax.explain), name
"""


def test_no_module_hides_a_function_in_any_order_of_imports():
    """A module that is imported after what loads late would take the place of its name."""
    late = {name for name, module in boostax._LATE.items() if module}
    assert late.isdisjoint(x.name for x in pkgutil.iter_modules(boostax.__path__))
    own = [x.name for x in pkgutil.iter_modules(boostax.auditing.__path__, "boostax.auditing.")]
    command = [sys.executable, "-c", ORDERS, "boostax.explaining", "boostax.auditing", *own]
    subprocess.run(command, check=True)


WITHOUT = {
    "auditing": ("boostax/__init__.py", r".*auditing.*", "test_audit"),
    "layers": ("boostax/train/__init__.py", r"from boostax\.layers .*", "test_scan_layers"),
}


@pytest.mark.long
@pytest.mark.parametrize("package", WITHOUT)
def test_all_else_works_without_a_package(package, tmp_path):
    """Without its folder and the lines that import it: README's program, and the other tests."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", package)
    copy = shutil.copytree(pathlib.Path(__file__).parents[1], tmp_path / "copy", ignore=ignored)
    door, line, tests = WITHOUT[package]
    (copy / door).write_text(re.sub(rf"(?m)^{line}\n", "", (copy / door).read_text()))
    run = ["env", f"PYTHONPATH={copy}", sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    readme = "tests/test_diffs.py::test_the_lines_of_the_readme_train_as_before"
    for options in ([readme], ["--collect-only", "-m", "", f"--ignore=tests/{tests}.py"]):
        subprocess.run([*run, *options], cwd=copy, check=True)


def test_the_optimizer_of_a_framework_is_loaded_when_asked_for():
    """Defect guarded against: ``boostax.nnx`` had to be imported, and the error did not say so."""
    code = "import boostax; assert 'nnx' not in dir(boostax); boostax.nnx.Optimizer"
    subprocess.run([sys.executable, "-c", code], check=True)


ROWS = tomllib.loads(files("boostax").joinpath("names.toml").read_text("utf8"))


@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith("boostax.")])
def test_a_name_that_is_gone_or_moved_says_what_stands_in_its_place(name):
    """What the sentence calls boostax's is there; the old name itself is not."""
    package, _, last = name.rpartition(".")
    with pytest.raises(AttributeError, match=re.escape(ROWS[name])):
        getattr(pkgutil.resolve_name(package), last)
    for named in re.findall(r"boostax(?:\.\w+)+", ROWS[name]):
        assert pkgutil.resolve_name(named) is not None
