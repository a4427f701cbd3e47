"""A precision policy on a Flax model: every layer is told its dtype.

Flax layers cast their own inputs and params to their ``dtype``, and Flax norms compute in f32 and
cast only their result. So O2 is "every layer low, params in f32": no param needs a cast outside,
and no norm carries f32 on into the next layer.
"""

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

import jax.numpy as jnp

from boostax._core import checks
from boostax.precision.policy import Policy, as_policy

try:
    import flax.linen as nn
    from flax import nnx
except ImportError as error:
    raise ImportError(
        "boostax.precision.flax needs Flax. Install it with: pip install 'boostax[workloads]'"
    ) from error

# MindSpore's O1 list in Flax's terms: what contracts. Cells and attention are made of these.
_CONTRACTIONS = (
    "Dense", "DenseGeneral", "Einsum", "Conv", "ConvLocal", "ConvTranspose",
    "Linear", "LinearGeneral", "LoRA", "LoRALinear", "LoRAParam",
)  # fmt: skip


def layer_dtype(rules: Policy, class_name: str) -> Any:
    """The dtype in which a layer of this class computes (a norm: of its result)."""
    if rules.only_matmuls:
        return rules.compute_dtype if class_name in _CONTRACTIONS else jnp.dtype(jnp.float32)
    return rules.compute_dtype


@dataclasses.dataclass(frozen=True)
class PolicyModule:
    """A linen module whose ``init`` and ``apply`` follow a policy; see ``apply_policy``."""

    module: Any
    rules: Policy

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """``module.init``; params in the policy's ``param_dtype``."""
        with self._layers():
            return self.rules.store_params(self.module.init(*args, **kwargs))

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """``module.apply``; floating results in the policy's ``output_dtype``."""
        args, kwargs_cast = self.rules.cast_inputs((args, kwargs))
        with self._layers():
            result = self.module.apply(variables, *args, **kwargs_cast)
        if kwargs.get("mutable", False) is not False:
            output, state = result
            return self.rules.cast_output(output), state
        return self.rules.cast_output(result)

    @contextlib.contextmanager
    def _layers(self) -> Generator[None]:
        def tell_dtype(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            module = context.module
            if context.method_name == "__call__" and _follows(module):
                # Linen freezes a bound module, but reads its dtype at each call.
                object.__setattr__(module, "dtype", layer_dtype(self.rules, type(module).__name__))
            return next_fun(*args, **kwargs)

        with nn.intercept_methods(tell_dtype):
            yield


def apply_policy(module: Any, policy: Policy | str) -> Any:
    """A Flax model that follows a precision policy.

    Every layer that has a ``dtype`` and was not given one computes in the policy's; a layer that
    was given one keeps it. Norms (Flax computes them in f32) hand their result on in the compute
    dtype; with O3 their params are stored low as well.

    Args:
      module: a linen ``nn.Module``, or an NNX ``nnx.Module``.
      policy: a policy, or what ``boostax.policy`` takes.

    Returns:
      For linen an object with ``init`` and ``apply``; for NNX a copy of the model, called as
      before. Cost: none in the compiled program beside the casts.

    Raises:
      TypeError: no Flax module.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from boostax.precision.flax import apply_policy
      >>> model = apply_policy(nn.Dense(3), "compute=float16,output=float16")
      >>> variables = model.init(jax.random.key(0), jnp.ones((2, 4)))
      >>> variables["params"]["kernel"].dtype, model.apply(variables, jnp.ones((2, 4))).dtype
      (dtype('float32'), dtype('float16'))
    """
    chosen = as_policy(policy)
    assert chosen is not None
    if isinstance(module, nn.Module):
        return PolicyModule(module, chosen)
    if not isinstance(module, nnx.Module):
        raise TypeError(
            checks.message(
                "apply_policy",
                "module",
                "a flax.linen.Module or flax.nnx.Module",
                module,
                "For a plain function use boostax.policy(...).wrap(fn).",
            )
        )
    model = nnx.clone(module)
    for _, layer in nnx.iter_modules(model):
        if _follows(layer):
            setattr(layer, "dtype", layer_dtype(chosen, type(layer).__name__))  # noqa: B010
    nnx.update(model, chosen.store_params(nnx.state(model, nnx.Param)))
    return model


def _follows(module: Any) -> bool:
    return hasattr(module, "dtype") and module.dtype is None
