"""The diffs of the documents run, and do what is said of them."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 6


def both(page, **known):
    """Run the first diff of a page on these names, without its changes and with them."""
    diff = re.findall(r"```diff\n(.*?)```", (ROOT / page).read_text(), re.S)[0].splitlines()
    assert 1 <= sum(line.startswith("+") for line in diff) <= 3
    known |= {"boostax": boostax, "functools": functools, "jax": jax, "optax": optax}
    for sign in "-+":
        lines = [line[1:] for line in diff if line[:1] in ("", " ", sign)]
        exec("\n".join(lines), names := dict(known))
        yield names["step"], names["state"]


def trained(step, params, state, batches):
    """Return the losses of all calls."""
    losses = []
    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(float(jax.block_until_ready(loss)))
    # A loop that trains nothing would agree with any other.
    assert len(set(losses)) == len(losses)
    return losses


def rows(random, count, width):
    return {name: random.normal(size=(count, width)) for name in "xy"}


def of_readme(mesh):
    """Return the steps and states of the README's first diff, their params and their batches."""

    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    whole, cut = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))
    random = np.random.default_rng(0)
    shapes = {"up": (32, 128), "down": (128, 32)}
    params = {name: random.normal(size=shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    place = functools.partial(jax.device_put, params, whole)
    batches = [jax.device_put(rows(random, 8, 32), cut) for _ in range(8 * STEPS)]
    return both("README.md", params=place(), mesh=mesh, loss_fn=loss_fn), place, batches


def test_the_lines_of_the_readme_train_as_before(mesh):
    steps, place, batches = of_readme(mesh)
    before, after = (trained(step, place(), state, batches) for step, state in steps)
    np.testing.assert_allclose(after, before, rtol=1e-5)


def test_the_lines_of_the_readme_reduce_once(mesh):
    steps, place, batches = of_readme(mesh)
    old, new = (boostax.audit(step, place(), x, batches[0], calls=8) for step, x in steps)
    assert [old.reductions, new.reductions] == pytest.approx([8, 1], abs=0.02)
    assert "Each of the 8 calls of an opt" in str(old)
    assert not any("educe" in waste.what for waste in new.findings)
    assert new.temporary_bytes <= old.temporary_bytes


def test_the_lines_of_freezing_shorten_the_backward_pass():
    """Four layers: their products, those of their weights' gradients, and of three inputs'."""

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer)
        return jnp.mean((x - batch["y"]) ** 2)

    random = np.random.default_rng(0)
    schedule = boostax.freeze_schedule("progressive", total_steps=STEPS, frozen_fraction=0.6)
    tx = boostax.scheduled_freeze(optax.adamw(1e-3), [0, 1, 2, 3], schedule)
    # In f64, because two programs round differently, by a few units of the last place.
    with jax.enable_x64(True):
        params = [jnp.asarray(random.normal(size=(16, 16)) / 4) for _ in range(4)]
        batches = [rows(random, 64, 16) for _ in range(STEPS)]
        steps = [x for x, _ in both("docs/cards/freezing.md", tx=tx, loss_fn=loss_fn, state=None)]
        old, new = (boostax.audit(x, params, tx.init(params), batches[0]) for x in steps)
        before, after = (trained(x, params, tx.init(params), batches) for x in steps)
    np.testing.assert_allclose(after, before, rtol=1e-14)
    for audit, least in ((old, 11), (new, 5)):
        program = boostax.auditing.hlo.parse(audit.text)
        dots = [site for site in program.sites if site.instruction.op == "dot"]
        found = program.total((site.branches, 1) for site in dots)
        assert (int(found.least), int(found.most)) == (least, 11)
