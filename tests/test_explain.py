"""What a call costs: FLOPs, memory and wire bytes of each depth, and the table of them."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import boostax
from boostax.inspect.explain import explain

WIDTHS = (16, 32, 32, 32, 4)
GROUPS = 4


def loss(params, batch):
    x = batch
    for name in sorted(params):
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    return jnp.mean(x**2)


def perceptron():
    sizes = itertools.pairwise(WIDTHS)
    return {
        f"layer_{i}": {"kernel": jnp.full((m, n), 0.1), "bias": jnp.zeros(n)}
        for i, (m, n) in enumerate(sizes)
    }


def explained(tx, *, mesh=None, schedule=None, **options):
    """The step, its state, and what they cost."""
    if schedule is not None:
        tx = boostax.scheduled_freeze(
            tx, boostax.freeze.prefix_groups(perceptron(), GROUPS), schedule
        )
    axis = None if mesh is None else "data"
    step = boostax.make_train_step(loss, tx, mesh=mesh, axis_name=axis)
    state = step.init(perceptron())
    return step, state, explain(step, state, jnp.ones((64, WIDTHS[0])), **options)


def of_each(found, name):
    return [getattr(row, name) for row in found.calls]


@pytest.fixture(scope="module")
def frozen():
    schedule = boostax.freeze_schedule("interval", total_steps=100, frozen_fraction=0.5)
    return explained(optax.adam(1e-3), schedule=schedule)


def calls_of(found):
    """The lines of the printed table of calls."""
    return str(found).split("\n\n")[-2].splitlines()


def falls(values):
    return all(before > after for before, after in itertools.pairwise(values))


def test_deeper_is_cheaper_by_no_less_than_the_products_that_are_left_out(frozen):
    _, _, found = frozen
    assert of_each(found, "depth") == [0, 1, 2, 3]
    flops, ratios = of_each(found, "flops"), of_each(found, "flops_ratio")
    assert falls(flops) and ratios == [x / flops[0] for x in flops]
    memory = of_each(found, "temporary_bytes")
    assert memory == sorted(memory, reverse=True) and memory[-1] < memory[0]
    for depth in range(GROUPS - 1):
        # A frozen layer loses the gradient of its kernel; the one above, that of its inputs.
        kernel = 2 * 64 * WIDTHS[depth] * WIDTHS[depth + 1]
        inputs = 2 * 64 * WIDTHS[depth + 1] * WIDTHS[depth + 2]
        assert flops[depth] - flops[depth + 1] >= kernel + inputs


def test_shares_are_those_of_the_schedule_and_sum_to_one(frozen):
    step, state, found = frozen
    shares = of_each(found, "share")
    assert sum(shares) == pytest.approx(1) and shares[0] == 0.5
    depths = step.tx.freezing.schedule.depths(GROUPS).tolist()
    assert shares == [depths.count(depth) / 100 for depth in range(GROUPS)]
    mean = sum(x * y for x, y in zip(shares, of_each(found, "flops_ratio"), strict=True))
    assert found.mean_flops_ratio == pytest.approx(mean) and mean < 1
    sizes = [sum(x.size for x in jax.tree.leaves(layer)) for layer in state.params.values()]
    entries = [sum(sizes[:depth]) / sum(sizes) for depth in range(GROUPS)]
    assert of_each(found, "frozen_entries") == pytest.approx(entries)


def test_the_step_and_its_state_are_as_before(frozen):
    step, state, _ = frozen
    assert step.depths == ()
    state, _ = step(jax.tree.map(jnp.copy, state), jnp.ones((64, WIDTHS[0])))
    assert step.depths == (0,) and int(state.step) == 1


def test_without_freezing_there_is_one_row():
    _, _, found = explained(optax.adam(1e-3))
    (row,) = found.calls
    assert row._replace(flops=0.0, temporary_bytes=0.0) == (None, 1.0, 0.0, 0.0, 1.0, 0.0, {})
    assert row.flops > 3 * 2 * 64 * 32 * 32 and row.temporary_bytes > 0
    assert calls_of(found)[0].split() == ["FLOPs", "temp", "bytes"]
    assert "schedule" not in str(found)


def test_what_is_frozen_is_not_sent(mesh):
    inner = optax.chain(boostax.all_reduce("data"), optax.adam(1e-3))
    inner = boostax.accumulate(inner, every=2, axis_name="data")
    _, state, found = explained(inner, mesh=mesh, schedule=[0, 1, 3])
    sent = of_each(found, "wire_bytes")
    assert all(set(each) == {"psum"} for each in sent)
    assert falls([each["psum"] for each in sent])
    sizes = [sum(x.size for x in jax.tree.leaves(layer)) for layer in state.params.values()]
    for row in found.calls:
        gradients = 2 * 7 / 8 * 4 * sum(sizes[row.depth :])
        assert 0 <= row.wire_bytes["psum"] - gradients < 50
    heading, first, *_ = calls_of(found)
    assert heading.endswith("sent bytes") and first.endswith(f" {sum(sent[0].values()):,.0f}")
    assert f"first row: psum {sent[0]['psum']:,.0f}." in str(found)


def test_a_step_whose_params_are_each_replicas_own_is_explained_too(mesh):
    _, _, found = explained(
        boostax.reduce.local_updates(optax.sgd(0.1), "data", every=4), mesh=mesh
    )
    (row,) = found.calls
    entries = sum(x.size for x in jax.tree.leaves(perceptron()))
    assert row.wire_bytes["psum"] == pytest.approx(2 * 7 / 8 * 4 * entries, abs=50)


def test_a_ratio_is_one_to_the_least_depth_even_if_that_is_not_asked_for():
    _, _, both = explained(optax.sgd(0.1), schedule=[1, 3, 3])
    _, _, deep = explained(optax.sgd(0.1), schedule=[1, 3, 3], depths=[3])
    assert (
        deep.calls == both.calls[1:] and both.calls[0].flops_ratio == 1 > deep.calls[0].flops_ratio
    )
    assert both.mean_flops_ratio < 1 and deep.mean_flops_ratio is None


def test_one_depth_for_good_is_the_whole_schedule():
    _, _, found = explained(optax.sgd(0.1), schedule=2)
    assert [row[:2] for row in found.calls] == [(2, 1.0)] and found.mean_flops_ratio == 1


def test_the_table_is_aligned(frozen):
    table = calls_of(frozen[2])
    assert table[0].split()[:4] == ["depth", "share", "frozen", "FLOPs"]
    assert len(table) == 1 + GROUPS and len({len(line) for line in table}) == 1
    assert str(frozen[2]).splitlines()[-1].startswith("Over the whole schedule 0.")


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"explain: depths must be some of .*\[0, 3\], got \[1\]"):
        explained(optax.sgd(0.1), schedule=[0, 3], depths=[1])
    with pytest.raises(ValueError, match="explain: depths must be some of"):
        explained(optax.sgd(0.1), schedule=[0, 3], depths=[])
    with pytest.raises(TypeError, match="explain: depths must be some of"):
        explained(optax.sgd(0.1), schedule=[0, 3], depths=3)
    with pytest.raises(ValueError, match="explain: depths must be left out where nothing freezes"):
        explained(optax.sgd(0.1), depths=[0])
    with pytest.raises(TypeError, match="explain: tx must be a transformation or a TrainStep"):
        explain(lambda state, batch: (state, {}), None, None)
