# SPDX-License-Identifier: Apache-2.0
"""The forms in which a step can run its layers, compiled and side by side."""

import dataclasses
from typing import Any, NamedTuple

import jax

from boostax._core import checks
from boostax.inspect import tables
from boostax.inspect.audit import Audit, audit
from boostax.train.compiled import TrainStep
from boostax.train.layered import LayeredOracle
from boostax.train.stacks import Layers
from boostax.train.step import make_train_step

PyTree = Any
_WHO = "layer_forms"
_FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "once": {"weights": "once"},
    "by layer": {"weights": "by layer"},
    "release": {"release": True},
    "release, host": {"release": True, "host": True},
}


class LayerForms(NamedTuple):
    """The audits of a step's forms; ``print`` shows them in a table, in multiples of the params.

    Attributes:
      audits: an ``Audit`` for each form that the step can take.
      refused: for each other form the reason.
    """

    audits: dict[str, Audit]
    refused: dict[str, str]

    def __str__(self) -> str:
        cells: tables.Cells = [("per device, in P", "arguments", "temporaries", "host", "wire", "")]
        for name, x in self.audits.items():
            sizes = x.argument_bytes, x.temporary_bytes, x.host_bytes or 0, x.wire_bytes.most
            shares = (tables.number(size / x.params_bytes, 2) for size in sizes)
            cells.append((name, *shares, ""))
        cells += [(name, "", "", "", "", why) for name, why in self.refused.items()]
        return tables.aligned(cells)


def layer_forms(
    step: TrainStep, state: PyTree, batch: PyTree, *, target: str | None = None
) -> LayerForms:
    """Compile each form of ``boostax.train.Layers`` for a step, and return what each holds.

    Args:
      step: a step with ``layers=``, of any form.
      state: its state, or one of types.
      batch: a batch, or types.
      target: see ``boostax.audit``.

    Returns:
      A ``LayerForms``: for each form the bytes of arguments, temporaries, in the host's memory and
      on the wire, of a device and a call. Cost: an audit of each form.

    Raises:
      ValueError: the step has no ``layers=``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> layer = lambda x, w: (jnp.tanh(x * w), None)
      >>> loss = lambda p, x: boostax.train.scan_layers(layer, x, p["layers"])[0].sum()
      >>> step = boostax.make_train_step(loss, optax.adam(0.1), layers="layers")
      >>> state = step.init({"layers": jnp.ones((3, 8))})
      >>> found = boostax.inspect.layer_forms(step, state, jnp.ones((4, 8)))
      >>> list(found.audits)
      ['plain', 'once', 'by layer', 'release']
    """
    oracle, fits = step.oracle, isinstance(step.oracle, LayeredOracle)
    hint = "boostax.make_train_step(loss, tx, layers=...)."
    checks.require(_WHO, "step", "one without", "one with layers=", fits, hint)
    plan: Any = getattr(oracle, "plan", None)
    typed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)  # noqa: E731
    params = jax.tree.map(typed, state.params)
    audits, refused = dict[str, Audit](), dict[str, str]()
    for name, options in _FORMS.items():
        how: dict[str, Any] = {"microbatches": 1 if "release" in options else step.microbatches}
        if options:
            how["layers"] = Layers(plan.layers.path, **options)
        if step.mesh is not None:
            how |= {"mesh": step.mesh, "axis_name": step.names, "gather": step.gather}
            how["param_specs"] = step.param_specs
        how |= {"policy": step.policy, "has_aux": oracle.has_aux}
        how["accumulator_dtype"] = oracle.accumulator_dtype
        try:
            form = make_train_step(oracle.loss_fn, plan.tx, **how)
            fresh = form.init(params)._replace(model_state=state.model_state, key=state.key)
            audits[name] = dataclasses.replace(audit(form, fresh, batch, target=target), text="")
        except ValueError as error:
            refused[name] = str(error).partition(".")[0]
    return LayerForms(audits, refused)
