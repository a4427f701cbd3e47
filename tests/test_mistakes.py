"""Natural mistakes of new users: boostax names each of them, and the line that mends it."""

import functools
import pathlib
import re
import traceback
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import boostax
from boostax import Aux, accumulate, all_reduce, apply_gradients, model, on_mesh, precision
from boostax.nnx import Optimizer

chain, freeze, scaler = optax.chain, boostax.scheduled_freeze, boostax.dynamic_loss_scale
migrate_state, value_and_grad = boostax.migrate_state, boostax.value_and_grad
CONTRACT = pathlib.Path(__file__).parents[1] / "docs" / "contract.md"
MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
GRID = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
W = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
X = {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 2))}
ON_ALL = jax.device_put(W, jax.NamedSharding(MESH, P()))
ADAM, ROWS = optax.adam(1e-3), {name: x[:6] for name, x in X.items()}
SCALED, WINDOW, MEAN = scaler(ADAM), accumulate(ADAM, 2), chain(all_reduce(), ADAM)
OF, TERMS = ADAM.init(W), accumulate(ADAM, 2, normalize=("ce", "z"))
CLIP, INT8 = optax.clip_by_global_norm(1.0), chain(boostax.int8_reduce(), ADAM)
FROZEN, PLACED = freeze(ADAM, {"w": 0, "b": 1}, 1), on_mesh(MEAN, ON_ALL)
ODD, LARGE, SKIP = W | {"w": jnp.ones((3, 3))}, jnp.ones((128, 128)), boostax.skip_bad_steps
STORE, VOUCH = functools.partial(precision.store, ADAM), precision.assume_scaled
MODULE = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
OPTIMIZER = functools.partial(Optimizer, MODULE, wrt=nnx.Param)
SCHEDULE = functools.partial(boostax.freeze_schedule, "interval", total_steps=9)


def loss(p, x):
    return jnp.mean((x["x"] @ p["w"] + p["b"] - x["y"]) ** 2)


def step(tx=ADAM, loss_fn=loss, **how):
    return boostax.make_train_step(loss_fn, tx, **how)


def run(tx=ADAM, loss_fn=loss, x=X, w=W, by_name=None, **how):
    made = step(tx, loss_fn, **how)
    return made(made.init(w), x, **by_name or {})


def with_aux(aux, tx=ADAM, value=loss):
    return run(tx, lambda p, x: (value(p, x), aux), has_aux=True)


def terms(p, x):
    return {"ce": (loss(p, x), 3), "z": (jnp.sum(p["b"]), 4)}


def state(tx=ADAM):
    return step(tx).init(W)


def sharded(w, b):
    return step(MEAN, mesh=MESH, param_specs={"w": w, "b": b}).init(W)


def loop(tx, w=W):
    return apply_gradients(tx, jax.grad(loss)(w, X), tx.init(w), w)


def compiled(tx, w=W):
    return jax.jit(lambda w: loop(tx, w))(w)


def on_replicas(tx, count=8):
    grads = jax.tree.map(lambda x: jnp.ones((count, *x.shape)), W)
    return tx.update(grads, tx.init(ON_ALL), ON_ALL)


def mapped():
    body = lambda p, s, x: apply_gradients(MAPPED, jax.grad(loss)(p, x), s, p)  # noqa: E731
    how = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    return jax.jit(jax.shard_map(body, mesh=MESH, **how))(W, MAPPED.init(W), X)


def saved(use, tmp_path):
    with boostax.checkpoint.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state())
        return use(checkpoints)


def reused():
    made, first = step(), state()
    made(first, X)
    return made(first, X)


def updated(optimizer):
    loss_fn = lambda m: m(jnp.ones((1, 2))).sum()  # noqa: E731
    return nnx.jit(lambda m, o: o.update(m, nnx.grad(loss_fn)(m)))(MODULE, optimizer)


class Noisy(nnx.Module):
    def __init__(self):
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


FINITE = optax.apply_if_finite(accumulate(MEAN, 2), 5)
MAPPED, DATE = (chain(all_reduce(name), ADAM) for name in ("data", "date"))
ORACLE, OTHER = value_and_grad(loss), state()._replace(params={"w": W["w"]})
# A call, and the line in its message that mends it.
MISTAKES = {
    # Axis, mesh, placement
    "no reduction": (lambda: run(mesh=MESH), r"Put boostax\.all_reduce\(\) first"),
    "no mesh": (lambda: step(MEAN, axis_name="data"), "Pass mesh="),
    "neither": (lambda: run(MEAN), r"inside make_train_step or on_mesh"),
    "an axis misspelt": (lambda: run(DATE, mesh=MESH), "Leave axis_name out of the parts"),
    "a mesh without the axis": (lambda: step(MEAN, mesh=MESH, axis_name="dp"), "make a mesh with"),
    "two axes, none named": (lambda: step(MEAN, mesh=GRID), r"jax\.make_mesh"),
    "a list of devices": (lambda: step(MEAN, mesh=jax.devices()), r"jax\.make_mesh\("),
    "a mesh as a dict": (lambda: value_and_grad(loss, mesh={"data": 8}), r"jax\.make_mesh\("),
    "all_reduce(mesh)": (lambda: all_reduce(MESH), "None on a single device"),
    "all_reduce(adam)": (lambda: all_reduce(ADAM), "None on a single device"),
    "op of Horovod": (lambda: all_reduce("data", op="Average"), "needs no other learning rate"),
    "compression=": (lambda: all_reduce(compression="fp16"), r"The call is all_reduce\("),
    "fp16": (lambda: all_reduce("data", wire_dtype="fp16"), "'bfloat16' or 'float16'"),
    "density in percent": (lambda: boostax.top_k_reduce("data", 10), "0.01 sends 1%"),
    "k=": (lambda: boostax.top_k_reduce("data", k=100), r"top_k_reduce\("),
    "no axis in plain jit": (lambda: compiled(MAPPED, w=ON_ALL), r"boostax\.on_mesh\(tx, params"),
    "an axis, no mesh": (lambda: value_and_grad(loss, axis_name="data")(W, (), X), "mesh=."),
    "on_mesh, one device": (lambda: on_mesh(MEAN, W), r"device_put\(params, NamedSharding"),
    "on_mesh(mesh=)": (lambda: on_mesh(MEAN, ON_ALL, mesh=MESH), r"on_mesh\(optax.*, params\)"),
    "on_mesh(tx, mesh)": (lambda: on_mesh(MEAN, MESH), r"device_put\(params, NamedSharding"),
    "on_mesh, jax.grad": (lambda: compiled(PLACED, w=ON_ALL), r"mesh=mesh\).*optimizer\.value"),
    "on_mesh, no params": (lambda: PLACED.update(W, OF), r"Call tx\.update\(grads, state, params"),
    "on_mesh, 4 replicas": (lambda: on_replicas(PLACED, 4), r"has 8 replicas: .*mesh=mesh"),
    "apply_if_finite": (lambda: on_mesh(FINITE, ON_ALL), r"Use boostax\.accumulate or"),
    "specs of another tree": (lambda: sharded(P("data"), None), r"Use PartitionSpec\(\)"),
    "specs that do not divide": (lambda: sharded(P("data"), P()), "to replicate"),
    "specs of another mesh": (lambda: sharded(P("model"), P()), "to replicate"),
    "specs of other ranks": (lambda: sharded(P(), P(None, "data")), "to replicate"),
    "ZeRO on one device": (lambda: step(shard_optimizer=True), "omit the argument on one device"),
    "jax.grad in shard_map": (mapped, r"boostax\.train\.local_params\(params, axis_name=axis\)"),
    # Order
    "clip before the mean": (lambda: step(chain(CLIP, MEAN), mesh=MESH), "Put clip_by_global_n"),
    "adam before the mean": (lambda: step(chain(ADAM, MEAN), mesh=MESH), "Put all_reduce before"),
    "clip outside the scaler": (lambda: step(chain(CLIP, SCALED)), "Put clip_by_global_norm in"),
    "two scalers": (lambda: step(scaler(SCALED)), "Leave one of them out"),
    "two means": (lambda: step(chain(all_reduce(), MEAN), mesh=MESH), "Leave one of them out"),
    "int8 of the mean": (lambda: run(chain(all_reduce(), INT8), mesh=MESH), "Remove the reduction"),
    "freezing inside": (lambda: step(scaler(FROZEN)), r"freeze outermost: scheduled_freeze\("),
    "f16 without a scale": (lambda: step(policy="O2"), r"boostax\.dynamic_loss_scale\(tx\)"),
    # Windows and scales
    "every=4.0": (lambda: accumulate(ADAM, 4.0), "is a number of micro-steps"),
    "every='4'": (lambda: accumulate(ADAM, "4"), "is a number of micro-steps"),
    "every=0": (lambda: accumulate(ADAM, 0), "is a number of micro-steps"),
    "every first": (lambda: accumulate(4, ADAM), "an argument, not as the next part"),
    "every_k_schedule=": (lambda: accumulate(ADAM, every_k_schedule=4), r"\(1e-3\), every=4\)"),
    "a window as a link": (lambda: chain(accumulate(4), ADAM), "as an argument, not as the next"),
    "a scaler as a link": (lambda: chain(scaler(), ADAM), r"scale\(optax\.adamw"),
    "optax.adam": (lambda: accumulate(optax.adam, 4), r"optax\.adamw\(1e-3\)"),
    "apply_if_finite's limit": (lambda: SKIP(ADAM, max_consecutive_errors=5), r"bad_steps\(op"),
    "a scale of 2**40": (lambda: scaler(ADAM, init_scale=2.0**40), "Change init_scale, or"),
    "jax.grad under a scaler": (lambda: compiled(SCALED), r"gradients with boostax\.value_and"),
    "the scale of a tx": (lambda: precision.loss_scale(SCALED), r"result of tx\.init\(params\)"),
    "metrics of a step": (lambda: boostax.metrics(step(SCALED)), r"result of tx\.init\(params\)"),
    "assume_scaled(state, grads)": (lambda: VOUCH(SCALED.init(W), W), r"\(grads, opt_state\)"),
    # Losses, terms, weights
    "an aux, no has_aux": (lambda: run(loss_fn=lambda p, x: (loss(p, x), {})), "if has_aux=True"),
    "has_aux, no aux": (lambda: run(has_aux=True), "an aux if and only if has_aux"),
    "vector": (lambda: run(loss_fn=lambda p, x: x["x"] @ p["w"]), "Return the mean over the batch"),
    "gradient for a loss": (lambda: run(loss_fn=jax.value_and_grad(loss)), "Return the mean over"),
    "no batch": (lambda: run(loss_fn=lambda p: jnp.sum(p["w"])), "Let loss_fn accept the batch"),
    "a key, not given": (lambda: run(loss_fn=lambda p, x, key: loss(p, x)), r"key=.*step\.init"),
    "a weight per row": (lambda: with_aux(Aux(weight=jnp.ones(8))), r"\.sum\(\) for sev"),
    "a weight, a mean": (lambda: with_aux(Aux(weight=3.0), WINDOW), "normalize='weight'"),
    "no weight": (lambda: run(accumulate(ADAM, 2, normalize="weight")), "weight=aux.weight"),
    "a term, no count": (lambda: run(loss_fn=lambda p, x: {"ce": loss(p, x)}), "'ce': .* tokens"),
    "terms in a mean": (lambda: run(WINDOW, terms), r"accumulate\(\.\.\., normalize=\('ce', 'z'\)"),
    "a mean in terms": (lambda: run(TERMS), r"accumulate\(\.\.\., normalize='mean'\)"),
    "terms and a weight": (lambda: with_aux(Aux(weight=3.0), value=terms), "Each term has its cou"),
    # Batches and keywords of a call
    "6 rows on 8": (lambda: run(MEAN, x=ROWS, mesh=MESH), r"count only real rows in boostax\.Aux"),
    "8 rows, 16 slices": (lambda: run(microbatches=16), "change microbatches"),
    "2.0 slices": (lambda: step(microbatches=2.0), r"x\.reshape\(-1"),
    "a stacked batch": (lambda: step(microbatches="stacked"), r"x\.reshape\(-1"),
    "a number among rows": (lambda: run(MEAN, x=X | {"s": 1.0}, mesh=MESH), r"step\(state, batch,"),
    "x and y apart": (lambda: step()(state(), X["x"], X["y"]), r"one tree, such as \(x, y\)"),
    "beta, not taken": (lambda: run(by_name={"beta": 0.1}), "Leave beta= out of the call"),
    "key= of a call": (lambda: run(by_name={"key": jax.random.key(0)}), r"key=.*to step\.init"),
    "init(rng=)": (lambda: step().init(W, rng=0), r"step\.init\(params\)"),
    # States, and arguments in another order
    "params for the state": (lambda: step()(W, X), r"Use step\.init\(params\)"),
    "params of other leaves": (lambda: step()(OTHER, X), "Pass the params from which tx.i"),
    "state of another chain": (lambda: step(WINDOW)(state(SCALED), X), r"boostax\.migrate_state\("),
    "batch first": (lambda: step()(X, state()), r"The call is step\(state, batch\)"),
    "init(opt_state)": (lambda: step().init(OF), r"The call is step\.init\(params\)"),
    "a donated state": (reused, "Use the call's results"),
    "no opt_state": (lambda: ORACLE(W, X), r"Without a loss scaler, opt_state is \(\)"),
    "batch before state": (lambda: ORACLE(W, X, OF), r"\(loss_fn\)\(params, opt_state, batch\)"),
    "grads first": (lambda: apply_gradients(W, OF, W, ADAM), r"gradients\(tx, grads, opt_state"),
    "state first": (lambda: apply_gradients(ADAM, OF, W, W), r"adients\(tx, grads, opt_state"),
    "params before state": (lambda: apply_gradients(ADAM, W, W, OF), r"The call is boostax\.apply"),
    "no params": (lambda: apply_gradients(ADAM, W, OF), r"apply_gradients\(.*opt_state, params\)"),
    "loss and grads": (lambda: apply_gradients(ADAM, ORACLE(W, (), X), OF, W), r"returns \(loss"),
    "flush(state, tx)": (lambda: boostax.flush(OF, WINDOW, W), r"flush\(tx, opt_state, params\)"),
    "migrate a TrainState": (lambda: migrate_state(state(), WINDOW, W), r"Pass state\.opt_state"),
    "migrate, no params": (lambda: migrate_state(OF, WINDOW), r"old_state, new_tx, params\)"),
    "migrate to other shapes": (lambda: migrate_state(OF, WINDOW, ODD), r"new_tx\.init\(params\)"),
    "reshard to nothing": (lambda: boostax.reshard_state(OF), r"reshard_state\(state, replicas\)"),
    "an int among params": (lambda: run(w=W | {"n": jnp.int32(3)}), "or freeze it with active="),
    "restore another chain": (lambda tmp: saved(lambda c: c.restore(state(WINDOW)), tmp), "migra"),
    "save(state, step)": (lambda tmp: saved(lambda c: c.save(OF, 2), tmp), r"save\(step, state"),
    # Freezing, averages, storage, policies, auto
    "a pattern misspelt": (lambda: freeze(ADAM, ["wx"], 1).init(W), "The params are 'b', 'w'"),
    "a depth too deep": (lambda: freeze(ADAM, ["w"], 3).init(W), "Depth d freezes group"),
    "a kind misspelt": (lambda: boostax.freeze_schedule("progresive", total_steps=9), "Or pass"),
    "a fraction in percent": (lambda: SCHEDULE(frozen_fraction=30), "0.3 freezes a prefix"),
    "a mask for groups": (lambda: freeze(ADAM, {"w": True, "b": False}, 1).init(W), "a pattern f"),
    "a decay in percent": (lambda: model.average_params(ADAM, decay=99.9), "0.999 is the default"),
    "an average of none": (lambda: model.averaged_params(W, OF), r"Put boostax\.model\.average_pa"),
    "an average, swapped": (lambda: model.averaged_params(OF, W), r"s\(params, opt_state\)"),
    "moments of int4": (lambda: STORE(moments="int4"), "moments=None stores the state"),
    "fields misspelt": (lambda: STORE(moments={"*m": "int8"}).init(LARGE), r"'\*' matches all f"),
    "mixed_float16": (lambda: boostax.policy("mixed_float16"), "Use 'O0' to 'O3'"),
    "a key misspelt": (lambda: boostax.auto({"loss_scal": "dynamic"}), "Did you mean 'loss_scale'"),
    "a level, a config": (lambda: boostax.auto("O1", {"accumulate": 4}), r"is auto\(spec\)"),
    # Modules, explain, audit, names
    "nnx: nnx.grad": (lambda: updated(OPTIMIZER(SCALED)), r"gradients with boostax\.value_an"),
    "nnx: one device": (lambda: OPTIMIZER(MEAN, axis_name="data"), r"NNX, use nnx\.update\(m"),
    "nnx: no axis": (lambda: OPTIMIZER(MEAN), r"nnx\.Optimizer\(model, tx, .*axis_name='data'\)"),
    "nnx: on_mesh": (lambda: OPTIMIZER(PLACED), "Pass the chain, and axis_name='data'"),
    "nnx: value_and_grad": (lambda: ORACLE(Noisy(), (), X), r"zer\(model, .*value_and_grad\(loss"),
    "nnx: wrt misspelt": (lambda: Optimizer(MODULE, ADAM, wrt=()), "The model has bias, kernel"),
    "nnx: tx first": (lambda: Optimizer(ADAM, MODULE, wrt=nnx.Param), r"optax\.adamw\(1e-3\)"),
    "explain(params, tx)": (lambda: boostax.explain(W, ADAM), r"Pass an optimizer such as"),
    "audit params": (lambda: boostax.audit(step(), W, X), r"Use step\.init\(params\)"),
    "audit a loss": (lambda: boostax.audit(loss(W, X)), r"audit\(jax\.jit\(step\), state, batch\)"),
    "boostax.skip_spikes": (lambda: boostax.skip_spikes, r"was removed\..*\.clip_by_global_norm"),
    "boostax.Checkpointer": (lambda: boostax.Checkpointer, r"boostax\.checkpoint\.Checkpointer"),
    "boostax.MultiSteps": (lambda: boostax.MultiSteps, r"boostax\.compat\.MultiSteps"),
    "boostax.accumulte": (lambda: boostax.accumulte, "Did you mean 'accumulate'"),
    "hvd.init": (lambda: boostax.init, r"jax\.distributed\.initialize\(\)"),
    "precision.GradScaler": (lambda: precision.GradScaler, r"boostax\.dynamic_loss_scale around"),
}
# Refused in words of others: the user's loss, JAX or Optax meets them first.
LESS = {
    "loss(batch, params)": lambda: run(loss_fn=lambda x, p: loss(p, x)),
    "text in a batch": lambda: run(x=X | {"id": "a"}),
    "a leaf without a gradient": lambda: apply_gradients(ADAM, {"w": W["w"]}, OF, W),
}
# Taken, as a document says.
SILENT = {
    "Outside of tracing, a scaler checks nothing.": lambda: loop(SCALED),
    "If no window is open, nothing happens.": lambda: step().flush(state()),
    "1 if no loss is scaled.": lambda: precision.current_scale(),
}
CALLS = {name: call for name, (call, _) in MISTAKES.items()} | LESS | SILENT
# An argument, what is allowed, what came, and the fix; a name that is not there; a warning.
FULL = re.compile(
    r"[\w.()]+: .+ must \w+ .+(?:, got .+?\.|, but .+\.) (?P<fix>.+[.?)])$"
    r"|module '.+' has no attribute '\w+'\. (?P<place>.+[.?])$"
    r"|make_train_step: [\w ,]+: [^.]+\. (?P<warned>.+)\.$",
    re.DOTALL,
)


def heard(call, tmp_path):
    """Return what boostax says to a call, in an error or a warning, and what others say."""
    with warnings.catch_warnings(record=True, action="always") as warned:
        try:
            call(tmp_path) if call.__code__.co_argcount else call()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            own = pathlib.Path(boostax.__file__).parent in pathlib.Path(last).parents
            own = own and isinstance(error, ValueError | TypeError | AttributeError)
            return (str(error), "") if own else ("", repr(error))
    return "".join(str(x.message) for x in warned if x.category is UserWarning), ""


@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_is_met_by_the_line_that_mends_it(name, tmp_path):
    own, others = heard(CALLS[name], tmp_path)
    full = FULL.match(own)
    if name in MISTAKES:
        assert full, own or others or "nothing is said"
        assert re.search(MISTAKES[name][1], next(filter(None, full.groups())), re.DOTALL), own
    elif name in LESS:
        assert (own or others) and not full, "now it is full: move it to MISTAKES"
    else:
        documents = boostax.flush.__doc__ + precision.current_scale.__doc__ + CONTRACT.read_text()
        assert name in " ".join(documents.split()) and not own + others


def test_nearly_all_mistakes_are_met_in_full():
    assert len(CALLS) == 130 and len(MISTAKES) >= 0.95 * len(CALLS)
