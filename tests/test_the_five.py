"""The five in one jitted step, in three programs, beside a float64 reference of their formulas."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from reducing import mesh_of
from reference import adasum

import boostax
from boostax.states import enter_replica, leave_replica, stack_replicas, state_specs

REPLICAS, WINDOW, DIRECTIONS, RATE = 8, 2, 3, 1e-2
SHAPES, HIDDEN, WHERE = {"a": (4, 8), "b": (8, 1)}, 32, {"a": P(None, "fsdp"), "b": P("fsdp")}
# The groups frozen in each window. The fourth call is in the middle of one, and overflows.
DEPTHS, BAD, CALLS = (0, 1, 1), 3, 7
SCALE, GROWTH = 2.0**120, 3


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch[0] @ params["a"]) @ params["b"] - batch[1]) ** 2)


def problem():
    """Return params, snapshots of them, and a batch for each call."""
    random = np.random.default_rng(15)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)  # noqa: E731
    points = [{name: draw(*shape) for name, shape in SHAPES.items()} for _ in range(6)]
    x = draw(32, 4) + np.float32(0.1) * draw(CALLS, 32, 4)
    y = np.sin(x.sum(-1, keepdims=True))
    # The gradient of one replica is too large for f32, but only when the scale multiplies it.
    y[BAD, :4] += 3000
    return points[0], points, list(zip(x, y, strict=True))


def flat(leaves):
    return np.concatenate([np.ravel(x) for x in leaves]).astype(np.float64)


def evaluate(w, x, y):
    """Return the loss and its gradient, by hand."""
    a, b = w[:HIDDEN].reshape(4, 8), w[HIDDEN:, None]
    hidden = np.tanh(x @ a)
    error = hidden @ b - y
    slope = 2 * error / len(x)
    return np.mean(error**2), flat((x.T @ (slope @ b.T * (1 - hidden**2)), hidden.T @ slope))


def bfgs(inverse, s, y, paired):
    """Return the inverse Hessian with a pair that can be trusted, and whether there was one."""
    if y @ s <= 1e-4 * np.sqrt((y @ y) * (s @ s)):
        return inverse, paired
    inverse = inverse if paired else np.eye(len(s)) * (y @ s) / (y @ y)
    v = np.eye(len(s)) - np.outer(y, s) / (y @ s)
    return v.T @ inverse @ v + np.outer(s, s) / (y @ s), True


def searched(w, along, slope, loss, batch):
    """Return the first of 1, 1/2, 1/4, ... whose loss is low enough."""
    low = lambda t: evaluate(w + t * along, *batch)[0] < loss + 1e-4 * t * slope + 1e-6 * loss  # noqa: E731
    return next(filter(low, 0.5 ** np.arange(10)))


def formulas(params, snapshots, batches):
    """Yield the params after each call, with the scale, depth and length of its step."""
    w, *points = (flat(tree.values()) for tree in [params, *snapshots])
    centre = np.mean(points, 0)
    _, s, v = np.linalg.svd(points - centre, full_matrices=False)
    # Two variances are near each other, so an f32 basis leaves the exact span by eps over the gap.
    rows = boostax.subspace.pca_basis(snapshots, DIRECTIONS).components.values()
    p = np.hstack([np.reshape(x, (DIRECTIONS, -1)) for x in rows]).astype(float)
    bound = np.finfo(np.float32).eps * s[0] / (s[DIRECTIONS - 1] - s[DIRECTIONS])
    assert np.linalg.norm(p.T @ p - v[:DIRECTIONS].T @ v[:DIRECTIONS], 2) < bound
    inverse, old, s, paired = np.eye(DIRECTIONS), None, None, False
    scale, clean, window, steps, m, v = SCALE, 0, [], 0, 0 * w, 0 * w
    for batch in batches:
        depth, t = DEPTHS[steps], 0.0
        trained = np.arange(w.size) >= depth * HIDDEN
        rows = zip(*(np.split(part.astype(float), REPLICAS) for part in batch), strict=True)
        losses, grads = zip(*(evaluate(w, *each) for each in rows), strict=True)
        loss, local = np.mean(losses), trained * np.stack(grads)
        finite = scale * abs(local).max() < np.finfo(np.float32).max
        clean = finite * (clean + 1) % GROWTH
        scale *= (2 if clean == 0 else 1) if finite else 0.5
        if finite:
            inside = p @ local.mean(0)
            to_mean = p @ (centre - w)
            if old is not None:
                inverse, paired = bfgs(inverse, s, inside - old, paired)
            direction = to_mean if old is None and to_mean @ inside < 0 else -inverse @ inside
            along = trained * (direction @ p)
            t = searched(w, along, inside @ direction, loss, batch)
            w, old, s = w + t * along, inside, t * direction
            window.append(local - trained * (inside @ p))
        if len(window) == WINDOW:
            mean, window, steps = np.mean(window, 0), [], steps + 1
            g = flat([adasum(rows) for rows in np.split(mean, [HIDDEN], 1)])
            m, v = m + 0.1 * trained * (g - m), v + 0.001 * trained * (g**2 - v)
            w = w - RATE * trained * m / (1 - 0.9**steps) / (np.sqrt(v / (1 - 0.999**steps)) + 1e-8)
        yield w, scale, depth, t


def the_five(snapshots, axis):
    basis = boostax.subspace.pca_basis(snapshots, DIRECTIONS)
    inner = optax.chain(boostax.adasum(axis), optax.adam(RATE))
    inner = boostax.accumulate(inner, WINDOW, axis_name=axis)
    tx = boostax.dim_reduce(basis, residual=inner, axis_name=axis)
    limits = {"init_scale": SCALE, "growth_interval": GROWTH, "max_scale": 2 * SCALE}
    tx = boostax.dynamic_loss_scale(tx, **limits, axis_name=axis)
    return boostax.scheduled_freeze(tx, {"a": 0, "b": 1}, DEPTHS)


def own_step(tx, params, state, batch, depth=None):
    """Take a step in a mapped function; without a depth the program computes it."""
    oracle = boostax.value_and_grad(loss_fn, axis_name="data")
    active = tx.choice(params, state) if depth is None else tx.active(params, depth)
    loss, grads = oracle(params, state, batch, active=active)
    told = {"depth": depth, "value": loss, "value_fn": oracle.loss_at(batch)}
    return boostax.apply_gradients(tx, grads, state, params, **told)


def sharded(params, snapshots, batches):
    """Plain jit, params sharded over one of the batch's axes; a program for each depth."""
    how = {"axis_name": ("data", "fsdp"), "mesh": mesh_of(data=4, fsdp=2), "param_specs": WHERE}
    step = boostax.make_train_step(loss_fn, the_five(snapshots, how["axis_name"]), **how)
    state = step.init(params)
    for batch in batches:
        state, _ = step(state, batch)
        yield state.params, state.opt_state


def in_shard_map(params, snapshots, batches):
    """One program, which computes the depth."""
    tx = the_five(snapshots, "data")

    def each(params, state, batch):
        params, state = own_step(tx, params, enter_replica(state), batch)
        return params, leave_replica(state)

    kept = P(), state_specs(tx, params, axis_name="data")
    how = {"mesh": mesh_of(data=REPLICAS), "in_specs": (*kept, P("data")), "out_specs": kept}
    state, step = stack_replicas(tx.init(params), REPLICAS), jax.jit(jax.shard_map(each, **how))
    for batch in batches:
        params, state = step(params, state, batch)
        yield params, state


def in_pmap(params, snapshots, batches):
    """A program for each depth, which is a static argument."""
    tx = the_five(snapshots, "data")
    step = jax.pmap(lambda *args: own_step(tx, *args), "data", static_broadcasted_argnums=3)
    params, state = jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), (params, tx.init(params)))
    for batch in batches:
        rows = [x.reshape(REPLICAS, -1, x.shape[-1]) for x in batch]
        params, state = step(params, state, rows, int(state.next_depth[0]))
        yield jax.tree.map(lambda x: x[0], (params, state))


@pytest.mark.parametrize("program", [sharded, in_shard_map, in_pmap])
def test_the_five_in_one_step_are_their_formulas(program):
    task = problem()
    for (params, state), (w, *told) in zip(program(*task), formulas(*task), strict=True):
        scaler = state.inner_state
        assert [scaler.scale, state.depth, scaler.applied * scaler.inner_state.length] == told
        np.testing.assert_allclose(flat(params.values()), w, rtol=0, atol=1e-5)


def test_gradients_travel_once_a_window_and_a_skipped_call_sends_eight_bytes():
    """Each gate holds its own: coordinates and energy, a line search's losses, then gradients."""
    params, snapshots, batches = problem()
    tx = the_five(snapshots, "data")
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh_of(data=REPLICAS))
    found, sent = boostax.audit(step, step.init(params), batches[0], turns=1), collections.Counter()
    for each in found.collectives:
        sent[len(each.branches)] += each.bytes
    assert [sent[gates] for gates in range(3)] == [8, 4 * (DIRECTIONS + 2), 4]
    assert sent[3] > 4 * found.params
