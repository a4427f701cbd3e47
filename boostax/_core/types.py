# SPDX-License-Identifier: Apache-2.0
"""Types of signatures, for type checkers."""

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault

    # Type checkers use the defaults for lambdas and for classes without explicit parameters.
    Params = WithDefault("Params", bound=Any, default=Any)
    Value = WithDefault("Value", default=Any)
    Grads = WithDefault("Grads", default=Any)
else:
    Params, Value, Grads = TypeVar("Params"), TypeVar("Value"), TypeVar("Grads")

State = TypeVar("State")
# A tree of arrays, or of whatever a function documents.
PyTree = Any
# What ``jax.tree.structure`` returns; JAX does not declare its class to type checkers.
Structure = Any
