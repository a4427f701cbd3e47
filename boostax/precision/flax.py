# SPDX-License-Identifier: Apache-2.0
"""Apply a precision policy to a Flax model through the dtype of every layer.

Flax layers cast their inputs and params to their ``dtype``, and Flax norms compute in f32 and cast
only their result. So O2 means "every layer in the low dtype, params in f32": no param needs a cast
outside its layer, and no norm passes f32 to the next layer. O1 does not set the dtype of layers.
Instead, the matrix products of the traced model are rewritten, as in any other function.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from boostax._core import checks
from boostax._core.types import PyTree
from boostax.precision.policy import Level, Policy, as_policy, autocast

with checks.needing("boostax.precision.flax", "Flax", "workloads"):
    import flax.linen as nn
    from flax import nnx


def layer_dtype(rules: Policy, class_name: str) -> jnp.dtype:
    """Return the dtype in which a layer of this class computes, or a norm returns its result."""
    # A norm computes in f32 for any dtype, and must not pass f32 to the next layer.
    keeps_f32 = rules.keeps(class_name) and "Norm" not in class_name
    return jnp.dtype(jnp.float32) if keeps_f32 else rules.compute_dtype


@dataclasses.dataclass(frozen=True)
class PolicyModule:
    """A linen module whose ``init`` and ``apply`` follow a policy; see ``apply_policy``."""

    module: nn.Module
    rules: Policy

    def init(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Run ``module.init``, and cast the params to the policy's ``param_dtype``."""
        with self._layers():
            variables = self.module.init(*args, **kwargs)
        return {**variables, "params": self.rules.store_params(variables.get("params", {}))}

    def apply(self, variables: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Run ``module.apply``, and cast floating results to the policy's ``output_dtype``."""
        apply = self.module.apply
        if self.rules.only_matmuls:
            apply = autocast(apply, self.rules.compute_dtype)
        with self._layers():
            result = apply(variables, *self.rules.cast_inputs(args), **kwargs)
        if kwargs.get("mutable", False) is False:
            return self.rules.cast_output(result)
        return self.rules.cast_output(result[0]), result[1]

    def _layers(self) -> contextlib.AbstractContextManager[None]:
        if self.rules.only_matmuls:
            return contextlib.nullcontext()

        def set_dtype(fn: Any, args: PyTree, kwargs: PyTree, context: Any) -> PyTree:
            module = context.module
            if context.method_name == "__call__" and _follows(module):
                # Linen freezes a bound module, but reads its dtype at each call.
                object.__setattr__(module, "dtype", layer_dtype(self.rules, type(module).__name__))
            return fn(*args, **kwargs)

        return nn.intercept_methods(set_dtype)


def apply_policy(module: Any, policy: Policy | Level) -> Any:
    """Return a Flax model that follows a precision policy.

    A layer without a ``dtype`` computes in the policy's ``compute_dtype``, or in f32 if
    ``keep_f32`` names the layer's class; a layer with a ``dtype`` keeps it. Norms, which Flax
    computes in f32, cast their result to ``compute_dtype``; with O3 their params are also stored in
    the low dtype. O1 instead rewrites the matrix products and convolutions of all layers.

    Args:
      module: a linen ``nn.Module``, or an NNX ``nnx.Module``.
      policy: a policy, or an argument of ``boostax.policy``.

    Returns:
      For linen an object with ``init`` and ``apply``; for NNX a copy of the model. Cost: only the
      casts in the compiled program.

    Raises:
      TypeError: ``module`` is not a Flax module.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from boostax.precision.flax import apply_policy
      >>> model = apply_policy(nn.Dense(3), "compute=float16,output=float16")
      >>> variables = model.init(jax.random.key(0), jnp.ones((2, 4)))
      >>> variables["params"]["kernel"].dtype, model.apply(variables, jnp.ones((2, 4))).dtype
      (dtype('float32'), dtype('float16'))
    """
    chosen = as_policy(policy) or Policy()
    if isinstance(module, nn.Module):
        return PolicyModule(module, chosen)
    if not isinstance(module, nnx.Module):
        allowed = "a flax.linen.Module or flax.nnx.Module"
        hint = "For a plain function use boostax.policy(...).wrap(fn)."
        raise TypeError(checks.message("apply_policy", "module", allowed, module, hint))
    model = nnx.clone(module)
    for _, layer in nnx.iter_modules(model):
        if _follows(layer) and not chosen.only_matmuls:
            setattr(layer, "dtype", layer_dtype(chosen, type(layer).__name__))  # noqa: B010
    nnx.update(model, chosen.store_params(nnx.state(model, nnx.Param)))
    # Only the call of the root module casts inputs and outputs, so only the root gets the new
    # class.
    object.__setattr__(model, "__class__", _casting_class(type(model), chosen))
    return model


@functools.cache
def _casting_class(cls: Any, rules: Policy) -> type[nnx.Module]:
    """Make a subclass whose call casts inputs and outputs, as ``PolicyModule.apply`` does.

    It is cached, because NNX compares classes when it splits and merges.
    """

    def call(self: nnx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        args = rules.cast_inputs(args)
        if not rules.only_matmuls:
            return rules.cast_output(cls.__call__(self, *args, **kwargs))
        graph, state = nnx.split(self)

        # Rewriting traces the call, so the traced function must return the model's changes as
        # results.
        def on_state(state: PyTree, args: PyTree, kwargs: PyTree) -> tuple[PyTree, PyTree]:
            model = nnx.merge(graph, state)
            return cls.__call__(model, *args, **kwargs), nnx.state(model)

        result, state = autocast(on_state, rules.compute_dtype)(state, args, kwargs)
        nnx.update(self, state)
        return rules.cast_output(result)

    names = {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), names)


def _follows(module: Any) -> bool:
    """Return whether a layer's ``dtype`` was left unset (``nnx.Embed`` copies its params')."""
    if isinstance(module, nnx.Embed):
        return module.dtype in (None, module.param_dtype)
    return hasattr(module, "dtype") and module.dtype is None
