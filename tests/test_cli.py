"""The command trains, compares, explains, resumes, and refuses in plain words."""

import json
import math
import re
import shutil
import subprocess
import sys
import typing

import jax
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from boostax.config.part import Place
from boostax.config.reduction import CODECS
from boostax.inspect.break_even import break_even
from boostax.run.cli import main
from boostax.run.cli.build import AXIS, boosted, build, layer_groups
from boostax.run.cli.compare import Variant
from boostax.run.cli.plot import plot_run, smooth
from boostax.run.cli.recipe import Recipe, Reduction
from boostax.run.workloads import DigitsConfig, TextConfig, digits, text
from boostax.run.writers import JsonLines

SMALL_TEXT = (
    "--paths ./corpus.txt --width 16 --depth 1 --heads 2 --sequence-length 8 --batch-size 8 "
    "--eval-batches 2"
).split()
SMALL_DIGITS = "--width 16 --batch-size 16".split()


@pytest.fixture(autouse=True, scope="module")
def compiled_once(tmp_path_factory):
    """The runs of this file share their compiled programs."""
    directory = jax.config.jax_compilation_cache_dir
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    if directory is None:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("cache")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return tmp_path


def train(*arguments, workload="digits"):
    small = SMALL_DIGITS if workload == "digits" else SMALL_TEXT
    return main(["train", workload, *small, *arguments])


def summary(output):
    return json.loads((output / "summary.json").read_text())


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_train_digits_writes_everything_and_says_what_it_did(here, capsys):
    options = "--steps 6 --dtype float16 --accumulate 2 --evaluate-every 2 --tensorboard".split()
    assert train(*options) == 0
    output = here / "runs" / "digits"
    rows = JsonLines.read(output / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "held_out_loss" in row] == [2, 4, 6]
    assert rows[-1]["optimizer_steps"] == 3 and rows[-1]["loss_scale"] == 2**16
    found = summary(output)
    assert found["held_out_loss"] == rows[-1]["held_out_loss"]
    assert found["optimizer_steps"] == 3 and found["configuration"]["accumulate"] == 2
    assert is_png(output / "loss.png") and list((output / "tensorboard").iterdir())
    printed = capsys.readouterr().out
    for words in (
        "6 calls, 3 optimizer steps",
        "16 per call, 32 per optimizer step",
        "computes in    float16",
        "accumulate     2\n",
        "step 6/6",
        "held-out loss",
        "runs/digits/loss.png",
    ):
        assert words in printed


def test_an_average_is_judged_in_the_place_of_the_params_and_changes_none_of_them(here):
    options = "--steps 8 --accumulate 2 --output".split()
    found = {}
    for judged in ("params", "averaged"):
        assert train(*options, judged, "--evaluate", judged) == 0
        found[judged] = summary(here / judged)
    assert found["params"]["params_sha256"] == found["averaged"]["params_sha256"]
    assert found["params"]["held_out_loss"] != found["averaged"]["held_out_loss"]
    rows = JsonLines.read(here / "averaged" / "metrics.jsonl")
    assert rows[-1]["averaged"] == rows[-1]["optimizer_steps"] == 4


def test_a_run_without_a_finite_loss_is_still_plotted(here):
    plot_run([{"step": 1, "loss": math.nan}], here / "loss.png", "digits")
    assert is_png(here / "loss.png")
    assert smooth([1.0] * 90) == pytest.approx([1.0] * 90)


@pytest.mark.long
def test_text_in_parallel_with_micro_batches_and_a_fixed_scale_then_other_data(here, capsys):
    options = "--steps 3 --devices 2 --microbatches 2 --loss-scale 128 --output here".split()
    assert train(*options, workload="text") == 0
    assert summary(here / "here")["configuration"]["loss_scale"] == 128
    printed = capsys.readouterr().out
    assert "2 x cpu" in printed and re.search("loss scale +128.0\n", printed)
    assert JsonLines.read(here / "here" / "metrics.jsonl")[-1]["loss_scale"] == 128

    (here / "corpus.txt").write_text("another text altogether, a longer one\n" * 300)
    assert train(*options, "--resume", workload="text") == 1
    assert "--resume: data must be" in capsys.readouterr().err


@pytest.mark.parametrize("reduce", ["adasum", pytest.param("adasum-delta", marks=pytest.mark.long)])
def test_gradients_of_several_devices_are_combined_by_adasum(reduce, here, capsys):
    options = f"--steps 4 --devices 2 --reduce {reduce} --wire bfloat16 --output here".split()
    assert train(*options) == 0
    printed = capsys.readouterr().out
    assert re.search(f"reduce +{reduce}\n", printed) and re.search("wire +bfloat16\n", printed)
    logged = JsonLines.read(here / "here" / "metrics.jsonl")[-1]
    assert 0 < logged["orthogonality"] <= 2 + 1e-6
    assert summary(here / "here")["configuration"]["reduce"] == reduce


def test_a_run_counts_its_step_beside_those_in_plain_jit(here, capsys):
    options = "--steps 2 --devices 2 --accumulate 2 --audit".split()
    assert train(*options, workload="text") == 0
    table = capsys.readouterr().out.split("as compiled for 2 x cpu, 2 batches of 8:\n")[1]
    reduced = re.findall(r"^ *(\S.*?)  +([\d.]+) N", table, re.M)
    assert reduced == [
        ("jit, lax.scan over the batches", "2.00"),
        ("jit, optax.MultiSteps", "2.00"),
        ("this run", "1.00"),
    ]


@pytest.mark.parametrize(
    "reduce", [pytest.param("top-k --density 0.1", marks=pytest.mark.long), "int8"]
)
def test_compressed_gradients_train_and_go_on_from_a_checkpoint(reduce, here, capsys):
    """What waits to be sent is saved with the rest: the end is the same, bit for bit."""
    options = f"--steps 4 --devices 2 --checkpoint-every 2 --reduce {reduce}".split()
    assert train(*options, "--output", "whole") == 0
    printed = capsys.readouterr().out
    assert re.search(rf"reduce +{reduce.split()[0]}\n", printed)
    assert 0 < JsonLines.read(here / "whole" / "metrics.jsonl")[-1]["unsent"] < 1
    shutil.copytree(here / "whole" / "checkpoints", here / "half" / "checkpoints")
    shutil.rmtree(here / "half" / "checkpoints" / "4")
    assert train(*options, "--output", "half", "--resume") == 0
    assert "resuming after call 2" in capsys.readouterr().out
    first, second = (summary(here / name)["params_sha256"] for name in ("whole", "half"))
    assert first == second
    other = [*options, "--density", "0.2"] if "top-k" in reduce else [*options, "--reduce", "int16"]
    assert train(*other, "--output", "half", "--resume") == 1
    assert "It changes the numbers" in capsys.readouterr().err


def test_every_reduction_of_the_command_can_be_built_and_codecs_send_less():
    workload = digits(DigitsConfig(width=16, batch_size=16))
    params = jax.eval_shape(workload.init, jax.random.key(0))[0]
    for reduce in typing.get_args(Reduction):
        recipe = Recipe(devices=8, reduce=reduce)
        assert build(workload, recipe).step.replicas == 8
        reduction = boosted(recipe).config.reduce.layer(Place(AXIS, None))
        if reduce == "adasum-delta":
            reduction = reduction(optax.identity())
        found = break_even(reduction, params, 8, encode_seconds=0)
        assert (found.wire_bytes < 0.6 * found.dense_bytes) == (reduce in CODECS)


@pytest.mark.long
def test_a_frozen_run_goes_on_in_the_middle_of_a_window(here, capsys):
    """After call 3 half of a frozen step's window is open; the end is the same, bit for bit."""
    options = "--steps 8 --accumulate 2 --checkpoint-every 3 --freeze interval".split()
    options += ["--freeze-fraction", "0.6"]
    assert train(*options, "--output", "whole") == 0
    printed = capsys.readouterr().out
    assert re.search(r"freezing +interval, 3 groups, on 50% of the optimizer steps *\n", printed)
    rows = JsonLines.read(here / "whole" / "metrics.jsonl")
    depths = [int(row["frozen_groups"]) for row in rows]
    assert depths[:3] == [0, 0, 1] and depths[::2] == depths[1::2] and depths.count(0) == 4
    found = summary(here / "whole")
    assert found["configuration"]["freeze"] == "interval" and found["optimizer_steps"] == 4
    counts = {str(depth): depths.count(depth) for depth in sorted(set(depths))}
    assert found["freeze"] == {"depths": counts, "compiled": sorted(set(depths))}
    shutil.copytree(here / "whole" / "checkpoints", here / "half" / "checkpoints")
    for later in ("6", "8"):
        shutil.rmtree(here / "half" / "checkpoints" / later)
    assert train(*options, "--output", "half", "--resume") == 0
    assert "resuming after call 3" in capsys.readouterr().out
    half = summary(here / "half")
    assert half["params_sha256"] == found["params_sha256"]
    # Counted are the calls of this process.
    assert sum(half["freeze"]["depths"].values()) == 5
    assert train(*options, "--freeze-groups", "2", "--output", "half", "--resume") == 1
    assert "--resume: freeze_groups must be None" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("--devices 2 --accumulate 2", marks=pytest.mark.long),
        "",
        pytest.param("--model conv --devices 2", marks=pytest.mark.long),
    ],
)
def test_a_finish_follows_the_run_and_can_be_made_up_for(here, capsys, more):
    finish = "--finish dim_reduce --finish-steps 3 --finish-components 3"
    options = f"--steps 24 {finish} {more}".split()
    assert train(*options, "--output", "whole") == 0
    printed = capsys.readouterr().out
    found = summary(here / "whole")
    report = found["finish"]
    assert report["components"] == 3 and len(report["steps"]) == 3
    assert report["after"]["train_loss"] < report["before"]["train_loss"]
    assert found["held_out_loss"] == report["after"]["held_out_loss"]
    assert "finish: 3 steps in 3 directions" in printed and "losses per step" in printed
    assert sorted(path.name for path in (here / "whole" / "checkpoints").iterdir()) == ["24", "27"]
    assert train(*options, "--output", "whole", "--resume") == 0
    assert "This run is finished" in capsys.readouterr().out
    # As if it had been killed between the run and the finish.
    shutil.copytree(here / "whole", here / "half")
    shutil.rmtree(here / "half" / "checkpoints" / "27")
    assert train(*options, "--output", "half", "--resume") == 0
    assert summary(here / "half")["params_sha256"] == found["params_sha256"]


def test_freezing_on_a_plateau_looks_behind_the_reduction(here, capsys):
    options = "--steps 4 --devices 2 --reduce int8 --freeze plateau --freeze-groups 2".split()
    assert train(*options, "--output", "here") == 0
    assert "plateau, 2 groups, a look every 1 optimizer step\n" in capsys.readouterr().out
    assert summary(here / "here")["freeze"] == {"depths": {"0": 4}, "compiled": [0]}


def test_blocks_freeze_whole_where_there_are_enough_of_them(here):
    config = TextConfig(
        paths=("corpus.txt",), width=16, depth=2, heads=2, sequence_length=8, batch_size=8
    )
    few, many = (
        layer_groups(text(config), Recipe(freeze="interval", freeze_groups=n)) for n in (4, 7)
    )
    assert set(jax.tree.leaves(few["block_1"])) == {2}
    assert few["characters"] == few["positions"] == 0
    assert len(set(jax.tree.leaves(many["block_1"]))) > 1
    assert set(jax.tree.leaves(many)) == set(range(7))


def test_explain_prints_what_each_depth_costs_and_writes_nothing(here, capsys):
    options = "--steps 20 --devices 2 --reduce int8 --freeze ramp --microbatches 2".split()
    assert main(["explain", "digits", *SMALL_DIGITS, *options]) == 0
    printed = capsys.readouterr().out
    assert "20 calls, 20 optimizer steps" in printed and "ramp, 3 groups, on 30%" in printed
    rows = re.findall(r"^ +(\d) +([\d.]+)% +([\d.]+)% +([\d,]+) +([\d.]+) ", printed, re.M)
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert sum(float(row[1]) for row in rows) == pytest.approx(100, abs=0.2)
    ratios = [float(row[4]) for row in rows]
    assert ratios[0] == 1 > ratios[1] > ratios[2]
    assert re.search(r"Bytes sent by kind, first row: psum .*, ppermute [\d,]+, ", printed)
    assert [path.name for path in here.iterdir()] == ["corpus.txt"]
    assert main(["explain", "digits", "--freeze-groups", "2"]) == 1
    assert "left out without --freeze" in capsys.readouterr().err


def test_resume_refuses_other_numbers_and_knows_a_finished_run(here, capsys):
    first = ["--steps", "4", "--checkpoint-every", "2"]
    assert train(*first, "--resume") == 0  # nothing there yet: starts
    digest = summary(here / "runs/digits")["params_sha256"]
    capsys.readouterr()

    assert train(*first) == 1
    assert "holds a run of 4 calls. Add --resume" in capsys.readouterr().err
    for changed, name in (
        (["--learning-rate", "0.1"], "learning_rate must be 0.002"),
        (["--seed", "3"], "seed must be 0"),
        (["--dtype", "float16"], "dtype must be 'float32'"),
        (["--accumulate", "2"], "accumulate must be 1"),
        (["--steps", "8"], "steps must be 4"),
    ):
        assert train(*first, *changed, "--resume") == 1
        assert f"--resume: {name}" in capsys.readouterr().err

    assert train(*first, "--resume", "--evaluate-every", "1") == 0
    assert "This run is finished: 4 calls done" in capsys.readouterr().out
    assert summary(here / "runs/digits")["params_sha256"] == digest


def test_a_damaged_checkpoint_is_refused_and_kept(here, capsys):
    assert train("--steps", "4", "--checkpoint-every", "2") == 0
    checkpoints = here / "runs" / "digits" / "checkpoints"
    for file in (checkpoints / "4" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-9])
    # Only a run that is not finished reads its state.
    (checkpoints / "4").rename(checkpoints / "3")
    assert train("--steps", "4", "--resume") == 1
    error = capsys.readouterr().err
    assert "step 3 in" in error and "is damaged" in error and "go back to step 2" in error
    assert "Traceback" not in error
    assert (checkpoints / "3").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--devices 3", "--batch-size must be divisible by devices x microbatches = 3 x 1, got 16"),
        ("--devices 99", "--devices must be at most 8"),
        ("--devices 0", "--devices must be a positive integer"),
        ("--steps 0", "--steps must be a positive integer"),
        ("--accumulate -1", "--accumulate must be a positive integer"),
        ("--learning-rate 0", "--learning-rate must be greater than 0"),
        ("--weight-decay -1", "--weight-decay must be at least 0"),
        ("--clip nan", "--clip must be at least 0"),
        ("--loss-scale -3", "scale"),
        ("--reduce adasum", "--reduce must be mean on a single device, got adasum"),
        ("--wire bfloat16", "--wire must be float32 on a single device, got bfloat16"),
        ("--reduce int8", "--reduce must be mean on a single device, got int8"),
        (
            "--devices 2 --reduce int8 --wire float16",
            "--wire must be float32 with --reduce int8, got float16. int8 decides itself",
        ),
        (
            "--devices 2 --density 0.1",
            "--density must be left out with --reduce mean, got 0.1. It is for --reduce top-k and",
        ),
        ("--devices 2 --reduce top-k --rank 2", "--rank must be left out with --reduce top-k"),
        ("--devices 2 --reduce top-k --density 2", "--density must be in (0, 1], got 2.0"),
        ("--devices 2 --reduce power-sgd --rank 0", "--rank must be a positive integer, got 0"),
        ("--finish-steps 2", "--finish-steps must be left out without --finish, got 2. --finish"),
        ("--finish dim_reduce --freeze ramp", "--finish must be none with --freeze, got dim_"),
        ("--finish dim_reduce --finish-components 0", "--finish-components must be a positive"),
        (
            "--finish dim_reduce --accumulate 4",
            "--steps must give at least 8 optimizer steps with --finish, got 1",
        ),
        ("--freeze-groups 2", "--freeze-groups must be left out without --freeze, got 2. --freeze"),
        ("--freeze-fraction 0.5", "--freeze-fraction must be left out without --freeze, got 0.5"),
        ("--freeze ramp --freeze-groups 1", "--freeze-groups must be at least 2, got 1"),
        (
            "--freeze ramp --freeze-groups 9",
            "--freeze-groups must be at most the number of layers, 3, got 9. They are 'hidden_0'",
        ),
        ("--freeze ramp --freeze-fraction 1", "--freeze-fraction must be in [0, 1), got 1.0. 0.3"),
        (
            "--freeze continuous --freeze-fraction 0.9",
            "--freeze-fraction must be at most 0.6667 for 'continuous' over 3 groups, got 0.9",
        ),
        (
            "--freeze plateau --freeze-fraction 0.2",
            "--freeze-fraction must be left out with --freeze plateau, got 0.2",
        ),
        (
            "--devices 2 --reduce adasum-delta --freeze plateau",
            "--freeze must not be plateau with --reduce adasum-delta",
        ),
        ("--evaluate averaged --freeze ramp", "--evaluate must be params with --freeze, got aver"),
        ("--evaluate averaged --finish dim_reduce", "--evaluate must be params with --finish, got"),
        (
            "--evaluate averaged --model conv",
            "--evaluate must be params with BatchNorm in the model",
        ),
        ("--checkpoint-every 0", "--checkpoint-every must be a positive integer"),
        ("--holdout 2", "holdout must be"),
    ],
)
def test_arguments_out_of_range_are_refused_in_one_line(options, words, capsys):
    assert train("--steps", "2", *options.split()) == 1
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.startswith("boostax: ")
    assert not captured.err.startswith("boostax: boostax")
    assert "Traceback" not in captured.err


def test_compare_sets_the_variants_side_by_side(here, capsys):
    options = "--steps 10 --seeds 2 --devices 2 --accumulate 2".split()
    assert main(["compare", "digits", *SMALL_DIGITS, *options]) == 0
    output = here / "runs" / "compare-digits"
    found = json.loads((output / "compare.json").read_text())
    names = ["float32", "float16", "+ loss scale", "+ accumulate"]
    assert list(found["variants"]) == names
    for name in names:
        row, runs = found["variants"][name], found["runs"][name]
        assert [run["seed"] for run in runs] == [0, 1]
        parts = 2 if name == "+ accumulate" else 1
        told = [row["step"] for row in runs[0]["rows"] if "held_out_loss" in row]
        assert len(runs[0]["rows"]) == 10 * parts and told == [parts * n for n in range(1, 11)]
        assert row["ms_per_step"] > 0 and row["temporary_bytes"] > 0
    # One reduction per optimizer step, whatever the parts; beside it only scalars.
    sent = [found["variants"][name]["wire_bytes"] for name in names]
    assert max(sent) - min(sent) < 200 < min(sent)
    # The parts of a batch add up to the batch.
    losses = [found["variants"][name]["held_out_loss"] for name in names]
    assert max(losses) - min(losses) < 0.05
    printed = capsys.readouterr().out
    for name in names:
        assert name in printed


@pytest.mark.long
def test_compare_says_at_which_bandwidth_a_codec_pays(here, capsys, monkeypatch):
    last = Variant("+ loss scale", "float16", "dynamic", 1)
    monkeypatch.setattr("boostax.run.cli.compare._variants", lambda *_: [last])
    reduce = "--reduce random-k --density 0.1"
    options = f"--steps 2 --seeds 1 --devices 2 --accumulate 1 {reduce}".split()
    assert main(["compare", "digits", *SMALL_DIGITS, *options]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"random-k (pays|never pays)", printed) and "a dense mean" in printed
    rows = json.loads((here / "runs/compare-digits/compare.json").read_text())["variants"]
    for row in rows.values():
        # A tenth of 2 x 1000 entries, the biases whole, and scalars.
        assert 0 < row["wire_bytes"] - 4 * (200 + 16 + 16 + 10) < 100
        # Infinity, for always, has no word in JSON.
        assert row["pays_below"] is None or row["pays_below"] > 0


def test_compare_refuses_parts_that_do_not_divide_the_batch(capsys):
    assert main(["compare", "digits", *SMALL_DIGITS, "--accumulate", "3"]) == 1
    assert "divisible by accumulate x devices" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train text", "train digits", "compare text", "explain text"])
def test_help_explains_every_option(command, capsys):
    with pytest.raises(SystemExit) as exited:
        main([*command.split(), "--help"])
    assert exited.value.code == 0
    printed = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    # An option without an explanation is followed by its default alone.
    assert not re.findall(r"--[a-z-]+ [A-Z|{}a-z0-9]+ \(default", printed)
    assert "--devices INT Devices to split each batch over" in printed


def test_arguments_that_do_not_parse_exit_with_2(capsys):
    with pytest.raises(SystemExit) as exited:
        main(["train", "digits", "--loss-scale", "often"])
    assert exited.value.code == 2
    capsys.readouterr()


def test_what_is_missing_is_named(monkeypatch, capsys):
    for name in ("commands", "train", "plot"):
        monkeypatch.delitem(sys.modules, f"boostax.run.cli.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["train", "digits"]) == 1
    error = capsys.readouterr().err
    assert (
        "lacks a package" in error
        and "matplotlib" in error
        and "pip install 'boostax[cli]'" in error
    )


def test_importing_boostax_loads_no_optional_package():
    code = (
        "import sys, boostax, boostax.run.cli, boostax.run.loop, boostax.run.writers\n"
        "extras = 'flax orbax tyro rich matplotlib tensorboardX sklearn'.split()\n"
        "print([name for name in extras if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.stdout.strip(), run.stderr) == ("[]", "")
