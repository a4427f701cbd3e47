"""Gates without the axis of a collective inside them, also where no type tells replicas apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax.testing._mapped import MODES, on_replicas

W = jnp.ones(3)
SGD = optax.sgd(0.1)
GATES = {
    "dynamic": boostax.dynamic_loss_scale,
    "static": lambda tx, **axis: boostax.static_loss_scale(tx, 8.0, **axis),
    "group": lambda tx, **axis: boostax.precision.group_loss_scale(tx, 0, **axis),
    "window": lambda tx, **axis: boostax.accumulate(tx, 2, **axis),
    "weighted": lambda tx, **axis: boostax.accumulate(tx, 2, normalize="weight", **axis),
    "scaler in a window": lambda tx, **axis: boostax.accumulate(
        boostax.dynamic_loss_scale(tx, **axis), 2, axis_name="data"
    ),
}
pmean = optax.stateless(lambda updates, params: jax.lax.pmean(updates, "data"))
INSIDE = {"all_reduce": boostax.all_reduce("data"), "a mean by hand": pmean}


def weighted(name):
    return {"weight": jnp.float32(1)} if name == "weighted" else {}


def mapped(mode, fn):
    return on_replicas(lambda _, g: fn(g), mode, jnp.ones((8, 3)), W)


def update(tx, name):
    state = tx.init(W)
    return lambda g: boostax.testing.drawn(tx).update(g, state, W, **weighted(name))[0]


def trained(mode, mesh, tx, name):
    """One call on each replica, with a state that is equal on all; JAX checks that it stays so."""
    if mode != "checked" or name not in ("window", "weighted"):
        return mapped(mode, update(tx, name))
    specs = {"in_specs": (jax.P("data"), jax.P()), "out_specs": jax.P()}
    run = lambda g, state: tx.update(g[0], state, W, **weighted(name))[1]  # noqa: E731
    return jax.jit(jax.shard_map(run, mesh=mesh, **specs))(jnp.ones((8, 3)), tx.init(W))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("name", GATES)
def test_a_gate_without_the_axis_of_what_it_holds_is_refused(mesh, name, inside, mode):
    """A scaler hung at the first overflow on one replica; a window was each replica's own."""
    said = ": axis_name must be all axes over which the parts inside communicate, got None"
    if mode == "checked":
        said = "replicat" if name in ("window", "weighted") else "the decision .* got \\['data'\\]"
    with pytest.raises(ValueError, match=said):
        trained(mode, mesh, GATES[name](optax.chain(INSIDE[inside], SGD)), name)
    right = GATES[name](optax.chain(INSIDE[inside], SGD), axis_name="data")
    assert np.isfinite(mapped(mode, update(right, name))).all()


def test_a_gate_needs_no_axis_where_nothing_is_sent():
    """Gradients that a loop of one's own has averaged before, as in Flax's examples under pmap."""
    for name, make in GATES.items():
        if name == "scaler in a window":
            continue
        tx = make(SGD)
        for mode in ("pmap", "vmap"):
            run = lambda g: update(tx, name)(jax.lax.pmean(g, "data"))  # noqa: B023, E731
            assert np.isfinite(mapped(mode, run)).all()


@pytest.mark.parametrize("mode", ["unchecked", "pmap", "vmap"])
@pytest.mark.parametrize("name", GATES)
def test_a_gate_of_local_gradients_that_nobody_reduces_is_refused(name, mode):
    """Its axis says that gradients are local; each replica trained by its own."""
    with pytest.raises(ValueError, match="must be left out if no part inside reduces"):
        mapped(mode, update(GATES[name](SGD, axis_name="data"), name))
