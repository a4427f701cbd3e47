# SPDX-License-Identifier: Apache-2.0
"""Intercept the calls of a linen model, so that a removed norm has no variables at all."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from boostax.model.branches import LessBNReport, examine, mark, stand_in
from boostax.model.normalized_dense import NormalizedDense

# Called with a layer, its path, its input, and a function that gives its result.
Replacement = Callable[[Any, str, Any, Callable[[], Any]], Any]


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

        def replaced(layer: Any, path: str, x: Any, result: Callable[[], Any]) -> Any:
            if path != self.head:
                return x if path in self.removed else result()
            same = {name: getattr(layer, name) for name in _SAME}
            start = nn.initializers.constant(self.multiplier)
            # In the Dense's own scope: the path of its kernel does not change.
            return NormalizedDense(multiplier_init=start, parent=layer.scope, **same)(x)

        with _intercepted(replaced, len(self.path)):
            return self.module(*args, **kwargs)


without = LessBN
_SAME = ("features", "dtype", "param_dtype", "precision", "kernel_init")


def structure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LessBNReport:
    """Return what ``examine`` says of ``module.init(key, *args, **kwargs)``."""
    paths: list[str] = []

    def marked(layer: Any, path: str, x: Any, result: Callable[[], Any]) -> Any:
        if isinstance(layer, nn.Dense):
            return mark("dense", result(), path)
        paths.append(path)
        return stand_in(layer, x, path)

    def run(key: jax.Array, args: Any, kwargs: Any) -> Any:
        with _intercepted(marked):
            return module.init_with_output(key, *args, **kwargs)[0]

    return examine(run, jax.random.key(0), args, kwargs, paths)


def _intercepted(replacement: Replacement, root: int = 0) -> Any:
    """Put ``replacement`` in place of the calls of BatchNorms and Denses.

    Paths are those below a module whose own path has ``root`` components.
    """

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer, result = context.module, lambda: next_fun(*args, **kwargs)
        if context.method_name != "__call__" or not isinstance(layer, (nn.BatchNorm, nn.Dense)):
            return result()
        x = args[0] if args else kwargs["inputs" if isinstance(layer, nn.Dense) else "x"]
        return replacement(layer, "/".join(layer.path[root:]), x, result)

    return nn.intercept_methods(intercept)
