"""What storing params and moments in fewer bytes costs in time: AdamW alone, without a gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from harness import Form, arguments, by_apply, by_update, compiled_form, paired, ratio, report
from problems import grads, nbytes, params
from stored_accuracy import FORMS

import boostax

PyTree = Any
ADAMW = optax.adamw(1e-3)
BARE = "AdamW in f32"
# Of those whose losses are on record.
STORED = (
    "params stochastic",
    "params remainder",
    "params stochastic, moments bf16",
    "params stochastic, moments int8 and log8",
    "params stochastic, moments log8",
    "params f32, moments log8",
)


def forms() -> tuple[dict[str, Form], dict[str, float]]:
    """The compiled steps, and the bytes that each holds of a param."""
    wide, count = params(), nbytes(params()) / 4
    made = {BARE: compiled_form(by_update(ADAMW), wide, ADAMW.init(wide), grads(jnp.float32))}
    held = {BARE: nbytes((wide, ADAMW.init(wide))) / count}
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    bare = "AdamW, all in bf16 to the nearest"
    made[bare] = compiled_form(by_update(ADAMW), low, ADAMW.init(low), grads(jnp.bfloat16))
    held[bare] = nbytes((low, ADAMW.init(low))) / count
    for name in STORED:
        how: Any = FORMS[name]
        tx, here = boostax.precision.store(ADAMW, **how.options), low if how.low else wide
        given = grads(jnp.bfloat16 if how.low else jnp.float32)
        made[name] = compiled_form(by_apply(tx), here, tx.init(here), given)
        held[name] = nbytes((here, tx.init(here))) / count
    return made, held


def main() -> None:
    rounds = arguments(__doc__, rounds=25).rounds
    made, held = forms()
    times = paired(made, rounds)
    rows = [
        {"form": name, "bytes a param": held[name], "time / AdamW": ratio(times, name, BARE)}
        for name in made
    ]
    title = f"AdamW, {nbytes(params()) // 4 / 1e6:.1f}M params, donated"
    report("stored_time", "Stored in fewer bytes: time of a step", [(title, rows)], [])


if __name__ == "__main__":
    main()
