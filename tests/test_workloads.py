"""The tasks of the benchmarks: pure batches, honest splits, f16, and visible learning."""

import functools

import jax
import numpy as np
import optax
import pytest
from workloads import DigitsConfig, TextConfig, corpus, digits, text

SMALL = {"max_chars": 120_000, "sequence_length": 32, "batch_size": 16, "width": 32, "heads": 2}
SMALL_TEXT = functools.partial(TextConfig, **SMALL, depth=1)
SMALL_DIGITS = functools.partial(DigitsConfig, width=64)
# The default generator takes several times longer to compile.
KEY = jax.random.key(0, impl="rbg")


def train(task, steps):
    tx, params = optax.adam(1e-2), task.init(KEY)
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(task.loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for index in range(steps):
        params, state = step(params, state, task.batch(index))
    return params


@pytest.mark.parametrize(("build", "config"), [(text, SMALL_TEXT), (digits, SMALL_DIGITS)])
def test_batches_depend_on_seed_and_index_alone(build, config):
    first, other, again = (build(config(seed=seed)) for seed in (0, 1, 0))
    forwards = [first.batch(index) for index in (0, 7, 40)]
    backwards = [again.batch(index) for index in (40, 7, 0)][::-1]
    jax.tree.map(np.testing.assert_array_equal, forwards, backwards)
    for different in (other.batch(7), first.batch(8)):
        assert not np.array_equal(first.batch(7)["inputs"], different["inputs"])


def test_no_training_window_reaches_into_what_is_held_out():
    # Every block has an alphabet of its own, so that a leak shows in the characters.
    size = 16 * 9
    blocks = "".join(chr(0x100 + block) * size for block in range(40))
    training, held_out = corpus.split(blocks, 8, 0.1)
    assert training.shape == (36, size) and held_out.shape == (4, size)
    assert not set(training.ravel()) & set(held_out.ravel())


def test_the_digits_of_an_epoch_are_all_but_those_held_out():
    task = digits()
    # 1,438 training images are no multiple of 64: the 23rd batch ends one epoch, begins the next.
    stream = np.concatenate([task.batch(index)["inputs"].reshape(64, 64) for index in range(45)])
    first, second = stream[:1438], stream[1438:2876]
    assert len(np.unique(first, axis=0)) == 1438 and not np.array_equal(first, second)
    np.testing.assert_array_equal(np.sort(first, axis=0), np.sort(second, axis=0))
    assert task.summary.startswith("26,122 parameters, 1,438 training and 359 held-out images")


def test_losses_in_f16_reach_every_parameter():
    tasks = [digits(SMALL_DIGITS(model=x, dtype="float16")) for x in ("mlp", "sigmoid")]
    for task in (text(SMALL_TEXT(dtype="float16")), *tasks):
        scaled = lambda params, task=task: task.loss_fn(params, task.batch(0)) * 2.0**15  # noqa: E731
        loss, grads = jax.jit(jax.value_and_grad(scaled))(task.init(KEY))
        # Weights are small at the start: nobody knows anything yet.
        classes = 128 if task.name == "text" else 10
        np.testing.assert_allclose(loss / 2.0**15, np.log(classes), rtol=0.1)
        assert loss.dtype == jax.numpy.float32
        assert all(np.isfinite(leaf).all() and (leaf != 0).any() for leaf in jax.tree.leaves(grads))


def test_digits_learn_and_are_judged_alike_in_batches_of_any_size():
    task = digits(SMALL_DIGITS())
    trained = train(task, 100)
    found = task.evaluate(trained)
    assert found["loss"] < 0.4 and found["accuracy"] > 0.9
    # 359 images are no multiple of either: the filling of the last batch must not count.
    assert digits(SMALL_DIGITS(batch_size=50)).evaluate(trained) == pytest.approx(found, rel=1e-5)
