"""A loss of several terms: each sum is divided once, by its own count over the whole batch."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawing import draws
from hypothesis import example, given, strategies
from jax.sharding import PartitionSpec
from lanes import spread
from median_gate import median_gate
from reducing import mesh_of

import boostax
import boostax.testing

RANDOM, NAMES = np.random.default_rng(0), ("ce", "kl", "none", "z")
SHAPES = {"experts": (4, 8, 8), "head": (8, 4), "router": (8, 4)}
PARAMS = {k: np.float32(0.4 * RANDOM.normal(size=shape)) for k, shape in SHAPES.items()}
# The second call of a window has no tokens, nor has the fourth micro-batch.
TOKENS = np.array([1, 6, 2, 0, 0, 0, 0, 0, 1, 1, 6, 0, 2, 4, 6, 0])
BATCH = {"x": np.float32(RANDOM.normal(size=(16, 6, 8))), "y": RANDOM.integers(0, 4, (16, 6))}
BATCH["mask"] = np.float32(np.arange(6) < TOKENS[:, None])


def loss_fn(params, batch):
    """Terms per token, per row and per position, one of nothing; a mean per expert beside them."""
    x, mask, logits = batch["x"], batch["mask"], batch["x"] @ params["router"]
    gates = jax.nn.softmax(logits)
    best = jax.nn.one_hot(gates.argmax(-1), 4)
    hidden = jnp.einsum("btd,kde,btk->bte", x, params["experts"], best * gates)
    ce = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["head"], batch["y"])
    kl, z = jnp.square(hidden.mean(1)).sum(-1), jax.nn.logsumexp(logits, -1) ** 2
    # The sum of kl is over all rows, of which those with tokens are counted.
    terms = {"ce": (ce * mask, mask), "kl": (kl, mask[:, 0]), "none": (z.sum(), 0 * mask)}
    means = {"accuracy": ((ce < 1).sum(), ce.size), "load": (best.sum((0, 1)), mask.size)}
    return terms | {"z": (0.1 * z.sum(), z.size)}, boostax.Aux(means=means)


@functools.cache
def expected():
    """The loss of the whole batch, with what is reported of it, and its gradient."""

    def whole(params):
        terms, aux = loss_fn(params, BATCH)
        means = {k: jnp.sum(x) / jnp.sum(n) for k, (x, n) in terms.items() if k != "none"}
        others = {name: x / n for name, (x, n) in aux.means.items()}
        return sum(means.values()), {"none": 0.0} | means | others

    (loss, report), gradient = jax.jit(jax.value_and_grad(whole, has_aux=True))(PARAMS)
    return report | {"loss": loss}, gradient


def on(replicas, **more):
    return {"mesh": mesh_of(data=replicas), **more}


FREEZE = functools.partial(boostax.scheduled_freeze, groups={"head": 1, "router": 0, "experts": 0})
SCALE = functools.partial(boostax.dynamic_loss_scale, init_scale=2.0**10)
WINDOW = functools.partial(boostax.accumulate, every=4, normalize=NAMES)
SHARDED = on(2, microbatches=2, param_specs=dict.fromkeys(SHAPES, PartitionSpec("data")))
CODE_PATHS = {
    "micro-batches": ({"microbatches": 4}, optax.chain, 1),
    "replicas": (on(4), SCALE, 1),
    "micro-batches of replicas": (on(4, microbatches=4), optax.chain, 1),
    "FSDP": (SHARDED, SCALE, 1),
    "a window": ({}, WINDOW, 4),
    "a window in a scaler": ({"microbatches": 2}, lambda tx: SCALE(WINDOW(tx)), 4),
    "a window around a scaler": (on(2, microbatches=2), lambda tx: WINDOW(SCALE(tx)), 4),
    "a window of FSDP and ZeRO-1": (SHARDED | {"shard_optimizer": True}, WINDOW, 4),
    "a window in shards": (SHARDED, functools.partial(WINDOW, sums="sharded"), 4),
    "frozen": ({"freeze_driver": "switch"}, lambda tx: FREEZE(WINDOW(tx), schedule=[0, 1]), 4),
}


@pytest.mark.parametrize("code_path", CODE_PATHS)
def test_each_term_is_divided_once_by_its_count(code_path):
    """The gradient, the loss and its terms, and means that are no part of the loss."""
    how, wrap, calls = CODE_PATHS[code_path]
    tx = optax.chain(*[boostax.all_reduce()] * ("mesh" in how), optax.trace(0.0), optax.scale(0.0))
    step = boostax.make_train_step(loss_fn, wrap(tx), has_aux=True, **how)
    state = step.init(PARAMS)
    for rows in np.split(np.arange(16), calls):
        state, report = step(state, jax.tree.map(lambda x, rows=rows: x[rows], BATCH))
    got = report if calls == 1 else expected()[0], optax.tree.get(state.opt_state, "trace")
    for name, x in (expected()[0] | expected()[1]).items():
        found = {**got[0], **got[1]}[name]
        np.testing.assert_allclose(found, x, rtol=0, atol=1e-6 * np.abs(x).max(), err_msg=name)


@functools.cache
def program():
    """The gradient of a window of micro-batches of replicas, with types."""

    def loss(w, batch):
        # A count is not differentiated.
        slopes, counts = batch[0], batch[1] * jnp.exp(w[0] - 1)
        return {k: (slopes[:, i] @ w, counts[:, i]) for i, k in enumerate("ab")}, boostax.Aux()

    def gradient(*batch):
        w, how = jnp.ones(2), {"axis_name": "data", "has_aux": True, "microbatches": 2}
        mean, terms = boostax.all_reduce("data"), ("a", "b")
        tx = boostax.accumulate(mean, 3, normalize=terms, axis_name="data")
        state = tx.init(w)
        for rows in zip(*batch, strict=True):
            (_, aux), grads = boostax.value_and_grad(loss, **how)(w, state, rows)
            mean, state = tx.update(grads, state, w, weight=aux.weight)
        return mean

    rows = {"in_specs": PartitionSpec(None, "data"), "out_specs": PartitionSpec()}
    return jax.jit(jax.shard_map(gradient, **on(2, **rows)))


@draws(25)
@example(most=(0, 0), seed=0)
@example(most=(0, 2), seed=1)
@given(most=strategies.tuples(*[strategies.integers(0, 3)] * 2), seed=strategies.integers(0, 99))
def test_sums_and_counts_are_those_of_float64(most, seed):
    """Also where a slice, a call or all of them count nothing of a term."""
    random = np.random.default_rng(seed)
    counts = np.float32(random.integers(0, np.array(most) + 1, (3, 8, 2)))
    slopes = np.float32(random.normal(size=(3, 8, 2, 2)))
    total, sums = (x.sum((0, 1), dtype=float) for x in (counts, slopes))
    wanted = np.where(total > 0, 1 / np.maximum(total, 1), 0) @ sums
    np.testing.assert_allclose(program()(slopes, counts), wanted, rtol=1e-5, atol=1e-5)


def weighted(params, batch):
    (terms, aux), tokens = loss_fn(params, batch), batch["mask"].sum()
    return sum(x.sum() for x, _ in terms.values()) / tokens, aux._replace(weight=tokens)


def test_one_weight_does_not_weigh_means_of_their_own():
    step = boostax.make_train_step(weighted, optax.sgd(1.0), has_aux=True, microbatches=4)
    _, report = step(step.init(PARAMS), BATCH)
    for name in ("accuracy", "load"):
        np.testing.assert_allclose(report[name], expected()[0][name], rtol=1e-6)


def test_counting_costs_no_second_pass():
    how = {"has_aux": True, "microbatches": 4}
    steps = [boostax.make_train_step(loss, optax.sgd(1.0), **how) for loss in (loss_fn, weighted)]
    programs = [step.lower(step.init(PARAMS), BATCH).compile() for step in steps]
    terms, one = (program.cost_analysis()["flops"] for program in programs)
    assert terms < 1.05 * one


def test_the_law_of_a_loss_takes_terms():
    loss = lambda params, batch: loss_fn(params, batch)[0]  # noqa: E731
    boostax.testing.check_loss(loss, PARAMS, BATCH, only="micro-batches")


SGD, OTHER = optax.sgd(1.0), dict.fromkeys(SHAPES, "b") | {"head": "a"}
BESIDE = lambda **aux: lambda *args: (loss_fn(*args)[0], boostax.Aux(**aux))  # noqa: E731
REFUSED = {
    f"normalize={NAMES}": [(loss_fn, tx(SGD, 4)) for tx in (boostax.accumulate, optax.MultiSteps)],
    "a window in carry or a mask": [
        (loss_fn, optax.partition({"a": WINDOW(SGD), "b": SGD}, OTHER)),
        (loss_fn, boostax.carry(WINDOW(SGD), {"head": "last"})),
    ],
    "normalize='mean'": [(weighted, WINDOW(SGD))],
    "without weight=": [(BESIDE(weight=3.0), SGD), (BESIDE(means={"ce": (1.0, 2)}), SGD)],
    "(sum, count)": [(BESIDE(means={"a": 1.0}), SGD), (lambda *_: ({"a": 1.0}, ()), SGD)],
}


@pytest.mark.filterwarnings("ignore:.*accumulate in masked")
@pytest.mark.parametrize("words", REFUSED)
def test_what_would_not_be_exact_is_refused(words):
    for loss, tx in REFUSED[words]:
        gradient = boostax.value_and_grad(loss, has_aux=True)
        with pytest.raises((ValueError, TypeError), match=re.escape(words)):
            jax.eval_shape(gradient, PARAMS, tx.init(PARAMS), BATCH)
    for weight in (None, 3.0, {"ce": 1.0}):
        with pytest.raises(ValueError, match="weight must be the counts of"):
            WINDOW(SGD).update(PARAMS, WINDOW(SGD).init(PARAMS), PARAMS, weight=weight)


def test_a_window_of_terms_moves_into_another_chain():
    """Its dimension of terms was taken for one of replicas."""
    window = boostax.accumulate(optax.adam(0.1), 3, normalize=("p", "q"), axis_name="data")
    params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(())}
    old = boostax.states.stack_replicas(window.init(params), 4)
    new, report = boostax.migrate_state(old, boostax.skip_bad_steps(window), params)
    assert not report.dropped
    chex.assert_trees_all_equal_shapes(new.inner_state, old)


GATES = {
    "skip_bad_steps": boostax.skip_bad_steps,
    "dynamic_loss_scale": functools.partial(SCALE, growth_interval=1),
    "group_loss_scale": functools.partial(boostax.precision.group_loss_scale, labels={"w": 0}),
    "median_gate": functools.partial(median_gate, k=1e9, window=2),
    "average_params": lambda tx: boostax.model.average_params(SCALE(tx), decay=0.5),
}
# What counts the calls that a gate holds, and says that the last one was held.


@pytest.mark.parametrize(("name", "form"), spread(GATES, ["terms", "weight"]))
def test_a_gate_holds_a_call_without_items(name, form):
    """Of three calls the second is as if it had never been; it moved momentum and schedules."""

    def loss(params, batch, scales=None):
        del scales  # One group has no boundaries.
        square, mask = (batch["x"][:, 0] @ params["w"] - 1) ** 2, batch["mask"][:, 0]
        if form == "terms":
            return {"square": (square * mask, mask)}
        return (square * mask).sum() / mask.sum(), boostax.Aux(mask.sum())

    sharded = name == "dynamic_loss_scale"
    how = on(4, param_specs={"w": PartitionSpec("data")}) if sharded else {}
    tx = GATES[name](optax.chain(*[boostax.all_reduce()] * sharded, optax.adamw(0.1)))
    step = boostax.make_train_step(loss, tx, has_aux=form == "weight", **how)
    ends, empty = [], BATCH | {"mask": 0 * BATCH["mask"]}
    for batches in ([BATCH, empty, BATCH], [BATCH, BATCH]):
        state = step.init({"w": jnp.ones(8)})
        for batch in batches:
            state, report = step(state, batch)
            assert report["applied"] == (batch is BATCH)
        rest = boostax._core.trees.named(state._replace(step=0))
        ends.append({key: x for key, x in rest if not re.search("skipped|skipped_in_a_row", key)})
    chex.assert_trees_all_equal(*ends)
