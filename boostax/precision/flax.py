# SPDX-License-Identifier: Apache-2.0
"""Apply a precision policy to a Flax model through the dtype of every layer.

A Flax layer casts its inputs and params to the layer's ``dtype``, and a Flax norm computes in f32
and casts only its result. So level O2 of ``boostax.policy`` sets the low dtype in every layer and
stores params in f32: no param needs a cast outside its layer, and no norm passes f32 to the next
layer. Level O1 does not set the dtype of layers. Instead, boostax rewrites the matrix products of
the traced model, as in any other function.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import numpy as np

from boostax._core import checks
from boostax._core.types import PyTree
from boostax.precision.policy import Level, Policy, as_policy, autocast

with checks.needing("boostax.precision.flax", "Flax", "workloads"):
    import flax.linen as nn
    from flax import nnx


def _set_dtype(layer: Any, rules: Policy) -> None:
    """Set the dtype of a layer's arithmetic or a norm's result, unless the layer has a dtype."""
    # An ``nnx.Embed`` without a dtype copies the dtype of its params.
    is_copy = isinstance(layer, nnx.Embed) and layer.dtype == layer.param_dtype
    if is_copy or (hasattr(layer, "dtype") and layer.dtype is None):
        # A norm computes in f32 for any dtype, and must not pass f32 to the next layer.
        class_name = type(layer).__name__
        keeps_f32 = rules.keeps(class_name) and "Norm" not in class_name
        dtype = np.dtype("float32") if keeps_f32 else rules.compute_dtype
        # Linen refuses to set attributes of a bound module, but reads the dtype at each call.
        object.__setattr__(layer, "dtype", dtype)


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

        def intercept(fn: Any, args: PyTree, kwargs: PyTree, context: Any) -> PyTree:
            if context.method_name == "__call__":
                _set_dtype(context.module, self.rules)
            return fn(*args, **kwargs)

        return nn.intercept_methods(intercept)


def apply_policy(module: Any, policy: Policy | Level) -> Any:
    """Return a Flax model that follows a precision policy.

    A layer without a ``dtype`` computes in the policy's ``compute_dtype``, or in f32 if
    ``keep_f32`` names the layer's class. A layer with a ``dtype`` computes in that dtype. Flax
    computes norms in f32 and casts their results to ``compute_dtype``. Level O3 of ``policy`` also
    stores the params of norms in the low dtype. Level O1 sets no dtypes, but rewrites the matrix
    products and convolutions of all layers.

    Args:
      module: a linen ``nn.Module``, or an NNX ``nnx.Module``.
      policy: a policy, or an argument of ``boostax.policy``.

    Returns:
      For linen, an object with ``init`` and ``apply``; for NNX, a copy of the model. Cost: only the
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
    is_valid = isinstance(module, nnx.Module)
    allowed = "a flax.linen.Module or flax.nnx.Module"
    hint = "For a plain function, use boostax.policy(...).wrap(fn)."
    checks.require_type(is_valid, "apply_policy", "module", module, allowed, hint)
    model = nnx.clone(module)
    for _, layer in () if chosen.only_matmuls else nnx.iter_modules(model):
        _set_dtype(layer, chosen)
    nnx.update(model, chosen.store_params(nnx.state(model, nnx.Param)))
    # Only the call of the root module casts inputs and outputs, so only the class of the root is
    # replaced.
    object.__setattr__(model, "__class__", _casting_class(type(model), chosen))
    return model


@functools.cache
def _casting_class(cls: Any, rules: Policy) -> type[nnx.Module]:
    """Make a subclass whose call casts inputs and outputs, as ``PolicyModule.apply`` does.

    The subclass is cached, because ``nnx.split`` and ``nnx.merge`` compare classes.
    """

    def call(self: nnx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        args = rules.cast_inputs(args)
        if not rules.only_matmuls:
            return rules.cast_output(cls.__call__(self, *args, **kwargs))
        graph, state = nnx.split(self)

        # ``autocast`` traces the call, so the traced function must return the new state of the
        # model as a result.
        def on_state(state: PyTree, args: PyTree, kwargs: PyTree) -> tuple[PyTree, PyTree]:
            model = nnx.merge(graph, state)
            return cls.__call__(model, *args, **kwargs), nnx.state(model)

        result, state = autocast(on_state, rules.compute_dtype)(state, args, kwargs)
        nnx.update(self, state)
        return rules.cast_output(result)

    names = {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), names)
