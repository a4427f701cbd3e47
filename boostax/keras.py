"""Keras 3 on JAX: any Optax chain as the optimizer of ``model.compile``.

Keras's trainer differentiates with ``jax.value_and_grad`` over the whole batch. Of a batch that is
split over devices XLA then reduces the gradient in every call, held ones as well, before an
optimizer sees it. So scalers, windows, stored formats, freezing of updates, clips and averages work
in ``fit``; reductions do not.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
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


class Optimizer(keras.optimizers.Optimizer):
    """An Optax chain as a ``keras.optimizers.Optimizer``.

    For ``model.compile(optimizer=...)`` and ``fit``, and for ``stateless_apply`` in a loop of one's
    own. The chain's state is in the optimizer's variables, so it is saved and restored with the
    model; a step that a gate holds leaves them and the model. A loss scaler in the chain multiplies
    the loss by ``scale_loss``, which Keras calls.

    Args:
      tx: any Optax chain, gates outermost.
      name: as in Keras.

    Attributes:
      iterations: calls, held ones as well; ``boostax.metrics(optimizer.opt_state)`` has the applied
        ones.

    Raises:
      ValueError: a chain that reduces over replicas, of whose axes Keras's step binds none; one
        with a PRNG key in its state, which a variable of Keras cannot hold.

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
        # Whatever else Keras would do to a gradient is a part of the chain.
        super().__init__(learning_rate=0.0, name=name)
        self.tx = checks.transformation(_WHO, "tx", tx)

    def build(self, variables: Sequence[Any]) -> None:
        """Make the state of the chain for a model's trainable variables."""
        if self.built:
            return
        super().build(variables)
        state = self.tx.init([v.value for v in variables])
        named = jax.tree_util.tree_leaves_with_path(state)
        self._structure = jax.tree.structure(state)
        self._state = [self._variable(trees.path_name(path), x) for path, x in named]

    def _variable(self, path: str, leaf: jax.Array) -> Any:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            allowed = "one without PRNG keys in its state"
            hint = (
                "Give it an old-style key, jax.random.PRNGKey(seed), or train by make_train_step."
            )
            raise ValueError(checks.message(_WHO, "tx", allowed, path, hint))
        fill = lambda shape, dtype: leaf  # noqa: E731
        name = path.replace("/", "_") or "state"
        return self.add_variable(leaf.shape, fill, str(leaf.dtype), name=name)

    @property
    def opt_state(self) -> PyTree:
        """The state of the chain, for ``boostax.metrics`` and ``boostax.flush``."""
        return jax.tree.unflatten(self._structure, [v.value for v in self._state])

    def scale_loss(self, loss: Any) -> jax.Array:
        """The loss times the scale in the chain."""
        return scale_loss(loss, self.opt_state)

    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None
    ) -> None: ...
