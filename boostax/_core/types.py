# SPDX-License-Identifier: Apache-2.0
"""Type variables of public signatures, for type checkers."""

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault

    # A class that is named without its parameters has any.
    Params = WithDefault("Params", default=Any)
    Value = WithDefault("Value", default=Any)
    Grads = WithDefault("Grads", default=Any)
else:
    Params, Value, Grads = TypeVar("Params"), TypeVar("Value"), TypeVar("Grads")

State = TypeVar("State")
