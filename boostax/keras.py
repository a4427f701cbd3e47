# SPDX-License-Identifier: Apache-2.0
"""Keras 3 on JAX: any Optax chain as the optimizer of ``model.compile``.

Keras's trainer differentiates with ``jax.value_and_grad`` over the whole batch. Of a batch that is
split over devices XLA then reduces the gradient in every call, held ones as well, before an
optimizer sees it. So scalers, windows, stored formats, freezing of updates, clips and averages work
in ``fit``; reductions do not.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from boostax._core import checks, trees
from boostax.precision.loss_scale import scale_loss
from boostax.train.apply import apply_gradients

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "jax")

with checks.needing("boostax.keras", "Keras", "keras"):
    import keras

PyTree = Any
_WHO = "boostax.keras.Optimizer"
if keras.backend.backend() != "jax":
    raise ImportError(
        f"boostax.keras needs Keras on JAX, got the backend {keras.backend.backend()!r}. Set the "
        "environment's KERAS_BACKEND=jax before Keras is imported."
    )


@keras.saving.register_keras_serializable(package="boostax")
class Optimizer(keras.optimizers.Optimizer):
    """An Optax chain as a ``keras.optimizers.Optimizer``.

    For ``model.compile(optimizer=...)`` and ``fit``, and for ``stateless_apply`` in a loop of one's
    own, where ``tx`` may be a ``boostax.on_mesh`` and gradients the ``local`` of a ``PerReplica``.
    The chain's state is in the optimizer's variables, so it is saved and restored with the model; a
    step that a gate holds leaves them and the model. A loss scaler in the chain multiplies the loss
    by ``scale_loss``, which Keras calls.

    Args:
      tx: any Optax chain, gates outermost. It has the learning rate, decay and clips: callbacks of
        Keras that set a learning rate are refused.
      name: by which ``keras.saving.load_model(path, custom_objects={name: tx})`` finds the chain.

    Attributes:
      iterations: calls, held ones as well; ``boostax.metrics(optimizer.opt_state)`` has the applied
        ones.

    Cost: that of ``tx`` by ``boostax.apply_gradients``.

    Raises:
      ValueError: a PRNG key in the chain's state, which a variable of Keras cannot hold; in ``fit``
        a chain that reduces over replicas, of whose axes Keras's step binds none, and gradients
        that Keras's own ``LossScaleOptimizer`` has scaled (``compile(auto_scale_loss=False)``).

    Example:
      >>> import boostax, numpy as np, optax
      >>> from boostax.keras import Optimizer
      >>> import keras
      >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
      >>> tx = boostax.dynamic_loss_scale(boostax.accumulate(optax.adam(0.1), every=2))
      >>> model.compile(optimizer=Optimizer(tx), loss="mse")
      >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, verbose=0)
      >>> int(boostax.metrics(model.optimizer.opt_state)["optimizer_steps"])
      2
    """

    def __init__(self, tx: optax.GradientTransformation, *, name: str = "boostax"):
        super().__init__(learning_rate=0.0, name=name)
        self.tx = checks.transformation(_WHO, "tx", tx)

    def build(self, variables: Sequence[Any]) -> None:
        """Make the state of the chain for a model's trainable variables."""
        if self.built:
            return
        super().build(variables)
        state = self.tx.init([v.value for v in variables])
        layouts = [getattr(v, "_layout", None) for v in variables]
        like = optax.tree.map_params(
            self.tx,
            lambda _, layout: _Layout(layout),
            state,
            layouts,
            transform_non_params=lambda _: _Layout(None),
        )
        named = jax.tree_util.tree_leaves_with_path(state)
        self._structure = jax.tree.structure(state)
        self._state = [
            self._kept(trees.path_name(path), leaf, at.layout)
            for (path, leaf), at in zip(named, jax.tree.leaves(like), strict=True)
        ]

    def _kept(self, path: str, leaf: jax.Array, layout: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            allowed = "one without PRNG keys in its state"
            hint = "Give it an old-style key, jax.random.PRNGKey(seed), or use make_train_step."
            raise ValueError(checks.message(_WHO, "tx", allowed, path, hint))
        fill: Any = lambda shape, dtype: leaf  # noqa: E731
        name = path.replace("/", "_") or "state"
        return self.add_variable(leaf.shape, fill, str(leaf.dtype), layout=layout, name=name)

    @property
    def opt_state(self) -> PyTree:
        """The state of the chain, for ``boostax.metrics``."""
        return self.state_of([v.value for v in self.variables])

    def state_of(self, optimizer_variables: Sequence[Any]) -> PyTree:
        """The state of the chain in the variables of a loop of one's own.

        For ``boostax.value_and_grad``, which reads the loss scale in it.
        """
        # In front stand those that every optimizer of Keras has.
        kept = optimizer_variables[len(optimizer_variables) - len(self._state) :]
        return jax.tree.unflatten(self._structure, kept)

    @property
    def learning_rate(self) -> Any:
        """Refused: it is in the chain."""
        raise AttributeError(
            f"{_WHO}: learning_rate must be left to the chain, got asked for it. Put a schedule of "
            "Optax in it, as in optax.adamw(optax.cosine_decay_schedule(1e-3, 1000))."
        )

    def scale_loss(self, loss: Any) -> jax.Array:
        """The loss times the scale in the chain."""
        return scale_loss(loss, self.opt_state)

    def _backend_apply_gradients(self, grads: list[Any], trainable_variables: list[Any]) -> None:
        # Pairs come in any order; moments stand in that of `build`.
        places = map(self._get_variable_index, trainable_variables)
        of, variables = dict(zip(places, grads, strict=True)), self._trainable_variables
        if len(of) != len(variables) or len(grads) != len(variables):
            allowed = f"given for all {len(variables)} trainable variables, each once"
            hint = "Set layer.trainable = False for what the loss does not reach."
            raise ValueError(checks.message(_WHO, "grads", allowed, len(grads), hint))
        params, grads = [v.value for v in variables], [of[i] for i in range(len(variables))]
        params, state = apply_gradients(self.tx, grads, self.opt_state, params)
        new = [*params, *jax.tree.leaves(state)]
        for variable, value in zip([*variables, *self._state], new, strict=True):
            variable.assign(value)

    def get_config(self) -> dict[str, Any]:
        """The name; a chain is functions, which Keras does not save."""
        return {"name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "Optimizer":
        """With the chain that ``custom_objects`` has under the name."""
        tx = keras.saving.get_registered_object(config["name"], custom_objects)
        if tx is None:
            allowed = f"among custom_objects by the name {config['name']!r}"
            hint = "keras.saving.load_model(path, custom_objects={name: tx}) takes the same chain."
            raise ValueError(checks.message(_WHO, "tx", allowed, tx, hint))
        return cls(tx, **config)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Of a leaf of the state: that of the variable that it is like."""

    layout: Any
