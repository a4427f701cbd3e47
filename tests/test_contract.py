"""Every registered transformation keeps the contract, law by law."""

import inspect
import subprocess
import sys
import textwrap

from contract_cases import CASES, VARIANTS, each_law

import boostax.testing
from boostax.testing._single import INIT_LAWS

ALWAYS = {"bad_arguments_raise_and_explain", "what_is_not_sent_waits"} | INIT_LAWS

# Of those that share the gate with the scalers: what is not the gate's.
GATED = "check_replicas check_updates dim_reduce group_loss_scale scheduled_freeze store".split()
THEIRS = set(
    "is_a_transformation_with_array_state forwards_unknown_extra_arguments "
    "keeps_types_and_traces_once passes_masked_nodes skip_inserted_anywhere_never_was "
    "metrics_are_flat_scalars reduced_gradients_are_refused results_are_typed_equal "
    "survives_what_python_does_to_objects updates_have_the_dtypes_of_the_params "
    "takes_trees_without_arrays".split()
)
THEIRS |= ALWAYS


def late(case, law):
    return (case in VARIANTS and law not in ALWAYS) or (case.name in GATED and law not in THEIRS)


@each_law(CASES, late)
def test_contract(case, law):
    law(case)


def test_the_usage_in_the_docstring_runs(tmp_path):
    """Defect guarded against: it called the names of laws."""
    text = inspect.getdoc(boostax.testing)
    example = [line.strip() for line in text.splitlines() if line.strip().startswith(">>> ")][:-1]
    usage = textwrap.dedent(text.partition("In pytest::\n")[2])
    lines = ["import pytest", *(line.removeprefix(">>> ") for line in example), usage]
    file = tmp_path / "test_usage.py"
    file.write_text("\n".join(lines))
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    told = subprocess.run([*run, "-k", "flat_scalars", file], capture_output=True, text=True)
    assert told.returncode == 0 and "1 passed" in told.stdout, told.stdout + told.stderr
