# SPDX-License-Identifier: Apache-2.0
"""An optimizer that updates stacked layers in the backward loop."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, gate
from boostax._core.describe import Stepped, asked, describe
from boostax._core.types import PyTree
from boostax.layers.stacks import Arrays, Stacked
from boostax.order.parts import REDUCTIONS, read, rows
from boostax.train.oracle import Gradients

_WHO = "Layers"
# The roles of parts that need several calls, or that decide about all gradients together.
_REFUSED = frozenset(
    "window|peer window|adder|scaler|hold|check|freeze|carry|delta|own params|subspace|"
    "outer optimizer".split("|")
)


class LayersState(NamedTuple):
    """State of an optimizer with ``Layers(release=True)``.

    Attributes:
      stacks: the states of the layers of each stack.
      rest: the optimizer state of all other params.
      applied: whether the last step was applied.
      layers_skipped: the number of skipped updates of layers. An update is skipped if the layer's
        gradient or the loss is not finite.
    """

    stacks: dict[str, PyTree]  # each array [layers, ...]
    rest: PyTree
    applied: jax.Array  # [] bool
    layers_skipped: jax.Array  # [] int32

    inner_ran = gradient_used = gate.flag

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        return {"layers_skipped": self.layers_skipped}


class Released(NamedTuple):
    """New params and states of layers, which a backward loop returns in place of gradients.

    Attributes:
      params: the new params of each stack.
      states: the new states of each stack's layers.
      finite: whether the step is applied, which needs a finite loss of at least one item.
      skipped: the number of skipped layers.
    """

    params: dict[str, Arrays]  # each [layers, ...]
    states: dict[str, PyTree]  # each array [layers, ...]
    finite: jax.Array  # [] bool
    skipped: jax.Array  # [] int32


def released(
    tx: optax.GradientTransformation, layers: Stacked
) -> optax.GradientTransformationExtraArgs:
    """Return ``tx`` in a form that accepts the stacks' updates from the backward loop.

    The function refuses parts of ``tx`` that need all gradients, several calls, or the loss.
    """
    inner = optax.with_extra_args_support(tx)
    arguments = sorted(asked(tx).keys() & {"value", "value_fn", "obj_fn", "grad"})
    got = f"one that asks for {arguments}" if arguments else None
    hint = "Layers are updated before the loss is returned. Leave release= out."
    checks.absent(_WHO, "tx", got, "an optimizer that reads no loss if release=True", hint)
    got = " around ".join(row.part.name for row in rows(read(tx)) if row.role in _REFUSED)
    hint = "Only one layer's gradient exists at a time. Leave release= out."
    checks.absent(_WHO, "tx", got or None, "an optimizer without gates if release=True", hint)

    def init_fn(params: PyTree) -> LayersState:
        layers.require_stacked(params)
        # The update of a leaf must not depend on other leaves' gradients.
        with axes.binding(axes.bound().names, averaged=True, partial=True):
            sources = jax.tree.leaves(gate.sources(inner, params)[0])
        got = None if all(x <= {i} for i, x in enumerate(sources)) else "a norm of several params"
        allowed = "an optimizer that reads the gradient of one param at a time"
        hint = "Clip each tensor: use boostax.model.adagc() instead of optax.clip_by_global_norm."
        checks.absent(_WHO, "tx with release=True", got, allowed, hint)
        rest = gate.init_inner(inner, layers.split(params)[0])
        stacks = layers.first_states(tx, params, axes.bound().names)
        return LayersState(stacks, rest, jnp.asarray(True), jnp.zeros((), jnp.int32))

    @describe("layers", "storage", inner={"rest": tx}, what="Update layers in the backward loop")
    def step_fn(
        grads: gate.Pending, state: LayersState, params: PyTree, *, apply: bool, **extra: PyTree
    ) -> Stepped:
        hint = "Use the gradients of boostax.value_and_grad(loss, mesh=mesh, layers=tx)."
        got = None if isinstance(grads.raw, Gradients) else "other gradients"
        checks.absent("layers", "gradients", got, "those of scan_layers", hint)
        new: Released = grads.raw.applied
        head = layers.split(params)[0]
        grads = grads._replace(raw=grads.raw.local)
        stepped = gate.call(inner, grads, state.rest, head, apply=True, extra=extra)
        # The choice is a select and not a branch, because a branch would contain the backward pass,
        # and XLA:GPU would copy the params for the branch.
        old = head, state.rest
        value, rest = jax.tree.map(lambda x, y: jnp.where(new.finite, x, y), stepped, old)
        value = layers.joined(value, new.params)
        value = value if apply else jax.tree.map(jnp.subtract, value, params)
        return value, LayersState(new.states, rest, new.finite, state.layers_skipped + new.skipped)

    # ``flush`` changes nothing, because an optimizer without gates has no open window.
    return gate.gated(init_fn, step_fn, lambda state, params, **extra: (params, state))


def require_mean(tx: optax.GradientTransformation) -> None:
    """Refuse reductions other than a plain mean, because the loop averages gradients."""
    for row in rows(read(tx)):
        options = [x for x in ("clip", "wire", "decay") if row.part.settings.get(x) is not None]
        got = (row.part.name, *options)
        is_mean = row.role not in REDUCTIONS or got == ("all_reduce",)
        allowed = "an optimizer with a plain mean, because the backward loop averages gradients"
        checks.require(is_mean, _WHO, "tx", got, allowed, "Use boostax.all_reduce().")
