# SPDX-License-Identifier: Apache-2.0
"""Intercept the calls of a linen model, so that a removed norm has no variables at all."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from boostax.model.branches import LessBNReport, complete, examine, mark, stand_in
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
        """Keep the paths of the params."""
        nn.share_scope(self, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``module(*args, **kwargs)`` without those norms."""

        def dense(module: nn.Dense, path: str, x: Any, result: Callable[[], Any]) -> Any:
            if path != self.head:
                return result()
            same = {name: getattr(module, name) for name in _SAME}
            start: Any = nn.initializers.constant(self.multiplier)
            scope: Any = module.scope
            # In the Dense's own scope: the path of its kernel does not change.
            return NormalizedDense(multiplier_init=start, parent=scope, **same)(x)

        def norm(module: nn.BatchNorm, path: str, x: Any, result: Callable[[], Any]) -> Any:
            return x if path in self.removed else result()

        with _calls(norm, dense, len(self.path)):
            return self.module(*args, **kwargs)


without = LessBN
_SAME = ("features", "dtype", "param_dtype", "precision", "kernel_init")


def structure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LessBNReport:
    """Return what ``examine`` says of ``module.init(key, *args, **kwargs)``."""
    paths: list[str] = []

    def norm(module: nn.BatchNorm, path: str, x: Any, result: Callable[[], Any]) -> Any:
        paths.append(path)
        return stand_in(module, x, path)

    def dense(module: nn.Dense, path: str, x: Any, result: Callable[[], Any]) -> Any:
        return mark("dense", result(), path)

    def run(key: jax.Array, args: Any, kwargs: Any) -> Any:
        with _calls(norm, dense):
            return module.init_with_output(key, *args, **kwargs)[0]

    return complete(examine(run, jax.random.key(0), args, kwargs), paths)


def _calls(norm: Any, dense: Any, root: int = 0) -> Any:
    """Intercept BatchNorms and Denses, by ``fn(module, path, x, result)``; ``result()`` is theirs.

    Paths are those below a module whose own path has ``root`` components.
    """

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, result = context.module, functools.partial(next_fun, *args, **kwargs)
        for kind, fn, name in ((nn.BatchNorm, norm, "x"), (nn.Dense, dense, "inputs")):
            if context.method_name == "__call__" and isinstance(module, kind):
                x = args[0] if args else kwargs[name]
                return fn(module, "/".join(module.path[root:]), x, result)
        return result()

    return nn.intercept_methods(intercept)
