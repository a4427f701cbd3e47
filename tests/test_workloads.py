"""The real tasks: pure batches, honest splits, every precision, and visible learning."""

import dataclasses
import functools
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from workloads import DigitsConfig, TextConfig, Workload, _corpus, _models, digits, text

SMALL_TEXT = TextConfig(
    max_chars=120_000, sequence_length=32, batch_size=16, width=32, depth=1, heads=2
)
# The default generator takes several times longer to compile.
KEY = jax.random.key(0, impl="rbg")
# Compiling takes longer than running here.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(scope="module")
def task() -> Workload:
    return text(SMALL_TEXT)


def builds(**changes: object) -> list[Workload]:
    """Every kind of workload, with these fields changed."""
    return [
        text(dataclasses.replace(SMALL_TEXT, **changes)),
        *(
            digits(DigitsConfig(model=model, width=64, **changes))
            for model in ("mlp", "conv", "sigmoid")
        ),
    ]


def flat(tree: object) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def train(task: Workload, optimizer: optax.GradientTransformation, steps: int):
    params, model_state = task.init(KEY)
    opt_state = optimizer.init(params)

    @quick_jit
    def step(params, opt_state, model_state, batch):
        gradient = jax.value_and_grad(task.loss_fn, has_aux=True)
        (loss, aux), grads = gradient(params, batch, model_state=model_state)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, aux.model_state, loss

    for index in range(steps):
        params, opt_state, model_state, _ = step(params, opt_state, model_state, task.batch(index))
    return params, model_state


# Batches


@pytest.mark.parametrize(("build", "config"), [(text, SMALL_TEXT), (digits, DigitsConfig())])
def test_batches_depend_on_seed_and_index_alone(build, config):
    first, other, again = (build(dataclasses.replace(config, seed=seed)) for seed in (0, 1, 0))
    forwards = [first.batch(index) for index in (0, 7, 40)]
    backwards = [again.batch(index) for index in (40, 7, 0)][::-1]
    jax.tree.map(np.testing.assert_array_equal, forwards, backwards)
    assert not np.array_equal(first.batch(7)["inputs"], other.batch(7)["inputs"])
    assert not np.array_equal(first.batch(7)["inputs"], first.batch(8)["inputs"])


def test_batches_have_the_shapes_promised():
    task = text(dataclasses.replace(SMALL_TEXT, batch_size=8))
    images = digits(DigitsConfig(batch_size=8))
    shapes = jax.tree.map(lambda array: (array.shape, str(array.dtype)), task.batch(3))
    assert shapes == {"inputs": ((8, 32), "int32"), "targets": ((8, 32), "int32")}
    np.testing.assert_array_equal(task.batch(3)["inputs"][:, 1:], task.batch(3)["targets"][:, :-1])
    shapes = jax.tree.map(lambda array: (array.shape, str(array.dtype)), images.batch(3))
    assert shapes == {"inputs": ((8, 8, 8, 1), "float32"), "targets": ((8,), "int32")}
    assert images.batch_size == task.batch_size == 8


@pytest.mark.parametrize("build", [lambda: text(SMALL_TEXT), digits])
def test_negative_batch_is_refused(build):
    with pytest.raises(ValueError, match="batch: index must be at least 0, got -"):
        build().batch(-1)


def test_digits_epoch_takes_every_image_once():
    # 1,438 training images are no multiple of 64: the 23rd batch ends one epoch, begins the next.
    task = digits()
    stream = np.concatenate([task.batch(index)["inputs"].reshape(64, 64) for index in range(45)])
    first, second = stream[:1438], stream[1438:2876]
    assert len(np.unique(first, axis=0)) == 1438
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(np.sort(first, axis=0), np.sort(second, axis=0))
    assert first.min() == 0 and first.max() == 1


def test_digits_batch_larger_than_an_epoch():
    targets = digits(DigitsConfig(batch_size=3 * 1438)).batch(0)["targets"]
    assert set(np.bincount(targets) % 3) == {0}


# Splits


def test_text_training_never_reads_a_held_out_character(tmp_path):
    # Every block has an alphabet of its own, so that a leak shows in the characters.
    size = 16 * 9
    file = tmp_path / "blocks.txt"
    file.write_text("".join(chr(0x100 + block) * size for block in range(40)), encoding="utf-8")
    characters = _corpus.read((str(file),), 10**6)
    training, held_out = _corpus.split(characters, 8, 0.1)
    assert training.shape == (36, size) and held_out.shape == (4, size)
    assert not set(training.ravel()) & set(held_out.ravel())

    task = text(TextConfig(paths=(str(file),), sequence_length=8, holdout=0.1, width=8))
    for index in range(50):
        batch = task.batch(index)
        # Token 0 stands for what training has never seen, so for all of the held-out text.
        assert (batch["inputs"] > 0).all() and (batch["targets"] > 0).all()
        assert (batch["inputs"] == batch["targets"]).all()


def test_text_vocabulary_ranks_by_frequency_and_lumps_the_rest():
    training = np.array([list(map(ord, "aaabbcd"))])
    held_out = np.array([[ord("d"), ord("z"), ord("a")]])
    tokens, unseen = _corpus.encode(training, held_out, 4)
    assert tokens.tolist() == [[1, 1, 1, 2, 2, 3, 0]]
    assert unseen.tolist() == [[0, 0, 1]]


def test_digits_split_is_disjoint_stratified_and_the_same_for_every_seed():
    images, labels = _load_digits()
    seen = [np.unique(_epoch(digits(DigitsConfig(seed=seed))), axis=0) for seed in (0, 5)]
    np.testing.assert_array_equal(*seen)
    rows = {image.tobytes() for image in seen[0]}
    held_out = np.array([image.tobytes() not in rows for image in images])
    assert held_out.sum() == 359
    share = np.bincount(labels[held_out]) / np.bincount(labels)
    np.testing.assert_allclose(share, 0.2, atol=0.004)


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.data / 16).astype(np.float32), data.target


def _epoch(task: Workload) -> np.ndarray:
    return np.concatenate([task.batch(i)["inputs"].reshape(64, 64) for i in range(23)])[:1438]


# Models


@pytest.mark.parametrize(
    "dtype",
    [
        "float16",
        pytest.param("float32", marks=pytest.mark.long),
        pytest.param("bfloat16", marks=pytest.mark.long),
    ],
)
def test_loss_is_finite_float32_and_reaches_every_parameter(dtype):
    for task in builds(dtype=dtype):
        params, model_state = task.init(KEY)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}

        def scaled(params, task=task, model_state=model_state):
            loss, aux = task.loss_fn(params, task.batch(0), model_state=model_state)
            return loss * 2.0**15, (loss, aux)

        grads, (loss, aux) = quick_jit(jax.grad(scaled, has_aux=True))(params)
        assert loss.dtype == jnp.float32 and loss.shape == () and aux.weight is None
        assert aux.metrics["accuracy"].dtype == jnp.float32
        # Weights are small at the start: nobody knows anything yet.
        classes = 128 if task.name == "text" else 10
        np.testing.assert_allclose(loss, np.log(classes), rtol=0.1)
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
            assert np.isfinite(leaf).all() and (leaf != 0).any(), jax.tree_util.keystr(path)


def test_compute_dtype_is_what_the_products_run_in():
    for task in builds(dtype="float16"):
        params, model_state = task.init(KEY)
        program = str(
            jax.make_jaxpr(
                lambda p, task=task, s=model_state: task.loss_fn(p, task.batch(0), model_state=s)
            )(params)
        )
        products = [
            line for line in program.splitlines() if "dot_general" in line or "conv_general" in line
        ]
        assert products and all(":f16[" in line for line in products)


def test_init_depends_on_the_key():
    for task in builds():
        params, again, other = (task.init(jax.random.fold_in(KEY, seed))[0] for seed in (3, 3, 4))
        np.testing.assert_array_equal(flat(params), flat(again))
        assert not np.array_equal(flat(params), flat(other))


def test_init_is_the_same_for_every_compute_dtype():
    for wide, narrow in zip(builds(), builds(dtype="float16"), strict=True):
        np.testing.assert_array_equal(flat(wide.init(KEY)), flat(narrow.init(KEY)))


def test_text_predictions_do_not_see_the_future(task):
    model = _models.CharacterTransformer(128, 32, 32, 1, 2, 0.0, jnp.dtype("float32"))
    tokens = task.batch(0)["inputs"]
    params = {"params": task.init(KEY)[0]}
    changed = tokens.copy()
    changed[:, 20:] = 5
    apply = quick_jit(model.apply)
    before, after = apply(params, tokens), apply(params, changed)
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert not np.array_equal(before[:, 20:], after[:, 20:])


def test_dropout_needs_a_key_and_depends_on_it():
    task = text(dataclasses.replace(SMALL_TEXT, dropout=0.3))
    params, _ = task.init(KEY)
    loss = quick_jit(lambda key: task.loss_fn(params, task.batch(0), key=key)[0])
    losses = [loss(jax.random.fold_in(KEY, seed)) for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    with pytest.raises(ValueError, match=r"text: key must be a key for dropout, got None\."):
        task.loss_fn(params, task.batch(0))
    assert task.evaluate(params, None) == task.evaluate(params, None)


def test_batch_norm_learns_in_training_and_rests_in_evaluation():
    task = digits(DigitsConfig(model="conv", width=64))
    params, state = task.init(KEY)
    before = jax.tree.map(np.array, state)
    batch = task.batch(0)
    _, aux = task.loss_fn(params, batch, model_state=state)
    assert jax.tree.structure(aux.model_state) == jax.tree.structure(state)
    assert not np.array_equal(flat(aux.model_state), flat(state))
    assert {leaf.dtype for leaf in jax.tree.leaves(aux.model_state)} == {jnp.dtype("float32")}

    assert task.evaluate(params, state) == task.evaluate(params, state)
    assert task.evaluate(params, state) != task.evaluate(params, aux.model_state)
    jax.tree.map(np.testing.assert_array_equal, state, before)
    for use in (lambda: task.loss_fn(params, batch), lambda: task.evaluate(params, None)):
        with pytest.raises(ValueError, match="digits: model_state must be the BatchNorm statist"):
            use()


def test_models_without_state_return_none(task):
    for stateless in (task, digits(DigitsConfig(width=64))):
        params, state = stateless.init(KEY)
        assert state is None
        assert stateless.loss_fn(params, stateless.batch(0))[1].model_state is None


# Evaluation


def test_evaluation_is_the_mean_over_the_held_out_split():
    images, labels = _load_digits()
    # 359 images are no multiple of 64: the filling of the last batch must not count.
    task = digits(DigitsConfig(width=64))
    rows = {image.tobytes() for image in _epoch(task)}
    held_out = np.array([image.tobytes() not in rows for image in images])
    params, _ = train(task, optax.adam(3e-3), 5)
    found = task.evaluate(params, None)
    batch = {"inputs": images[held_out].reshape(-1, 8, 8, 1), "targets": labels[held_out]}
    loss, aux = task.loss_fn(params, batch)
    assert list(found) == ["loss", "accuracy"] and all(type(v) is float for v in found.values())
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(found["accuracy"], aux.metrics["accuracy"], rtol=1e-5)


def test_evaluation_does_not_depend_on_the_batch_size():
    # 176 windows and 359 images: each size leaves another last batch to fill up.
    for small, large in (
        [
            text(dataclasses.replace(SMALL_TEXT, batch_size=size, eval_batches=99))
            for size in (8, 50)
        ],
        [digits(DigitsConfig(width=64, batch_size=size)) for size in (8, 50)],
    ):
        params, state = small.init(KEY)
        one, other = small.evaluate(params, state), large.evaluate(params, state)
        assert one == pytest.approx(other, rel=1e-5)


def test_eval_batches_limits_what_is_judged():
    assert "(512 judged)" in text(dataclasses.replace(SMALL_TEXT, eval_batches=1)).summary
    assert "(5,632 judged)" in text(dataclasses.replace(SMALL_TEXT, eval_batches=99)).summary


def test_evaluation_takes_replicated_parameters():
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    task = digits(DigitsConfig(model="conv", width=64))
    variables = task.init(KEY)
    assert task.evaluate(*jax.device_put(variables, everywhere)) == task.evaluate(*variables)


# Learning


def test_text_learns():
    task = text(dataclasses.replace(SMALL_TEXT, max_chars=1_000_000))
    before = task.evaluate(task.init(KEY)[0], None)
    after = task.evaluate(*train(task, optax.adam(1e-2), 100))
    assert before["loss"] == pytest.approx(np.log(128), abs=0.3)
    assert after["loss"] < 2.7 and after["accuracy"] > 0.3


@pytest.mark.parametrize("model", ["mlp", "conv"])
def test_digits_learn(model):
    task = digits(DigitsConfig(model=model, width=64))
    found = task.evaluate(*train(task, optax.adam(1e-2), 100))
    assert found["loss"] < 0.4 and found["accuracy"] > 0.9


def test_sigmoid_gradients_vanish_in_float16_unless_scaled():
    def zeros(dtype: str, *scales: float) -> list[list[float]]:
        task = digits(DigitsConfig(model="sigmoid", width=64, batch_size=256, dtype=dtype))
        batch = task.batch(0)
        gradient = jax.jit(jax.grad(lambda params, scale: task.loss_fn(params, batch)[0] * scale))
        grads = [gradient(task.init(KEY)[0], scale) for scale in scales]
        return [[float((g[f"hidden_{i}"]["kernel"] == 0).mean()) for i in (0, 1)] for g in grads]

    [reference] = zeros("float32", 1.0)
    unscaled, scaled = zeros("float16", 1.0, 2.0**15)
    assert unscaled[0] == 1 and unscaled[1] > 0.9
    # What is zero in float32 belongs to pixels that are blank in the whole batch.
    assert scaled == pytest.approx(reference, abs=0.05)


# Files


def test_paths_are_read_in_order_and_decoded(tmp_path):
    (tmp_path / "b.txt").write_bytes("é".encode("latin-1") + b" latin")
    (tmp_path / "a.txt").write_bytes("\ufeffnaïve".encode())
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "image.bin").write_bytes(b"\x89\0\0")
    assert _corpus.read((str(tmp_path),), 100) == "naïve\né latin"
    assert _corpus.read((str(tmp_path / "b.txt"), str(tmp_path / "a.txt")), 100) == "é latin\nnaïve"
    assert _corpus.read((str(tmp_path),), 3) == "naï"


def test_default_text_is_the_standard_library_without_tests():
    files = [str(file) for file in _corpus._files(())]
    assert any(file.endswith("dataclasses.py") for file in files)
    assert files == sorted(files)
    assert not [file for file in files if "/test/" in file or "site-packages" in file]


def text_errors(folder: Path) -> list[tuple[dict[str, object], str]]:
    """What is refused, and the words of the refusal."""
    hint = "Leave it empty to train on Python's standard library."
    who = "text: paths must name readable text files or folders, got"
    binary, short, empty = folder / "binary", folder / "short.txt", folder / "empty"
    binary.write_bytes(b"ELF\0\0")
    short.write_text("too short")
    empty.mkdir()
    return [
        ({"paths": ("/nope",)}, f"{who} '/nope' (no such file). {hint}"),
        ({"paths": (str(binary),)}, f"{who} '{binary}' (it has NUL bytes, so it is binary or"),
        ({"paths": (str(empty),)}, f"{who} '{empty}' (a folder without a text file). {hint}"),
        ({"paths": ("/dev/null",)}, f"{who} '/dev/null' (not a regular file). {hint}"),
        ({"paths": "corpus.txt"}, "text: paths must be a tuple of strings, got 'corpus.txt'."),
        (
            {"paths": (str(short),)},
            "text: paths must hold at least 2080 characters, two blocks of 16 windows, got 9. "
            "Give more text, raise max_chars or lower sequence_length.",
        ),
        ({"max_chars": 50}, "two blocks of 16 windows, got 50."),
        (
            {"dtype": "int8"},
            "text: dtype must be 'float32' or 'float16' or 'bfloat16', got 'int8'.",
        ),
        ({"width": 130}, "text: width must be a multiple of heads, 4, got 130."),
        ({"depth": 0}, "text: depth must be a positive integer, got 0."),
        ({"heads": -1}, "text: heads must be a positive integer, got -1."),
        ({"batch_size": 0}, "text: batch_size must be a positive integer, got 0."),
        ({"sequence_length": 0}, "text: sequence_length must be a positive integer, got 0."),
        ({"eval_batches": 0}, "text: eval_batches must be a positive integer, got 0."),
        ({"dropout": 1.0}, "text: dropout must be in [0, 1), got 1.0. 0 turns it off."),
        ({"holdout": 0.0}, "text: holdout must be in (0, 1), got 0.0."),
        ({"seed": -1}, "text: seed must be an integer in [0, 2**64), got -1."),
    ]


def test_text_refusals(tmp_path):
    for changes, words in text_errors(tmp_path):
        with pytest.raises(ValueError) as caught:
            text(TextConfig(**changes))
        assert words in str(caught.value)


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    file = tmp_path / "locked.txt"
    file.write_text("locked")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"got '.*locked.txt' \(Permission denied\)\. Leave"):
        text(TextConfig(paths=(str(file),)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model": "vit"},
            "digits: model must be 'mlp' or 'conv' or 'sigmoid' or 'resnet', got 'vit'.",
        ),
        (
            {"dtype": "f16"},
            "digits: dtype must be 'float32' or 'float16' or 'bfloat16', got 'f16'.",
        ),
        ({"batch_size": 0}, "digits: batch_size must be a positive integer, got 0."),
        ({"width": 0}, "digits: width must be a positive integer, got 0."),
        ({"model": "conv", "width": 6}, "digits: width must be a multiple of 4 for the conv model"),
        ({"seed": 2**64}, "digits: seed must be an integer in [0, 2**64), got 1844674407370955"),
        ({"holdout": 1.5}, "digits: holdout must be in (0, 1), got 1.5."),
    ],
)
def test_digits_refusals(changes, words):
    with pytest.raises(ValueError) as caught:
        digits(DigitsConfig(**changes))
    assert words in str(caught.value)


def test_missing_extras_name_the_install(monkeypatch):
    for module, use in (
        ("flax.linen", lambda: runpy.run_path(_models.__file__)),
        ("sklearn.datasets", digits),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(ImportError, match=r"pip install 'boostax\[workloads\]'"):
                use()


def test_summaries():
    mlp = digits().summary
    assert mlp == "26,122 parameters, 1,438 training and 359 held-out images, 10 classes"
    task = text(SMALL_TEXT)
    count = sum(leaf.size for leaf in jax.tree.leaves(task.init(KEY)[0]))
    assert task.summary.startswith(f"{count:,} parameters, ")
    assert task.summary.endswith("vocabulary 128") and "\n" not in task.summary
