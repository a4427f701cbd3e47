# SPDX-License-Identifier: Apache-2.0
"""LessBN on Flax linen: calls intercepted, so that a removed norm has no variables at all."""

import contextlib
from collections.abc import Generator
from typing import Any

import flax.linen as nn
import jax

from boostax.model.branches import Structure, complete, examine, mark_dense, stand_in
from boostax.model.normalized_dense import NormalizedDense


class LessBN(nn.Module):
    """A linen module in which some BatchNorms are the identity, and a Dense one of cosines.

    ``init`` makes no variables for the removed ones; all others have the paths they have in
    ``module``, whose scope this one shares. It nests, transforms and prints like any module.

    Attributes:
      module: the model.
      removed: paths of the BatchNorms, such as ``block_0/norm_1``.
      head: path of the ``nn.Dense`` in whose place a ``NormalizedDense`` stands, or None.
      multiplier: what that one's multiplier starts from.
    """

    module: nn.Module
    removed: tuple[str, ...]
    head: str | None = None
    multiplier: float = 1.0

    def setup(self) -> None:
        """Params keep their paths."""
        nn.share_scope(self, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``module(*args, **kwargs)`` without those norms."""
        with nn.intercept_methods(self._intercept):
            return self.module(*args, **kwargs)

    @nn.nowrap
    def _intercept(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if context.method_name == "__call__":
            if isinstance(module, nn.BatchNorm) and self._place(module) in self.removed:
                return _first(args, kwargs, "x")
            if isinstance(module, nn.Dense) and self._place(module) == self.head:
                # In the Dense's own scope: the path of its kernel does not change.
                scope: Any = module.scope
                head = NormalizedDense(
                    module.features,
                    dtype=module.dtype,
                    param_dtype=module.param_dtype,
                    precision=module.precision,
                    kernel_init=module.kernel_init,
                    multiplier_init=nn.initializers.constant(self.multiplier),
                    parent=scope,
                )
                return head(_first(args, kwargs, "inputs"))
        return next_fun(*args, **kwargs)

    @nn.nowrap
    def _place(self, module: nn.Module) -> str:
        return "/".join(module.path[len(self.path) :])


without = LessBN


def structure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Structure:
    """What ``examine`` says of ``module.init(key, *args, **kwargs)``."""

    paths: list[str] = []

    def run(key: jax.Array, args: Any, kwargs: Any) -> Any:
        with _marks(paths):
            return module.init_with_output(key, *args, **kwargs)[0]

    return complete(examine(run, jax.random.key(0), args, kwargs), paths)


@contextlib.contextmanager
def _marks(paths: list[str]) -> Generator[None]:
    def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if context.method_name == "__call__":
            if isinstance(module, nn.BatchNorm):
                paths.append("/".join(module.path))
                return stand_in(module, _first(args, kwargs, "x"), paths[-1])
            if isinstance(module, nn.Dense):
                return mark_dense(next_fun(*args, **kwargs), "/".join(module.path))
        return next_fun(*args, **kwargs)

    with nn.intercept_methods(intercept):
        yield


def _first(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    return args[0] if args else kwargs[name]
