"""Does a program treat each entry of some arrays by itself, or does it look across them?

An optimizer that is given parts of leaves is right if every entry goes its own way, as in SGD and
Adam. A norm, a mean over an axis, a matrix product would be that of the part; nothing would fail.
The jaxpr tells.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import costs, jaxprs, proof
from boostax._core.costs import kind, scopes_of
from boostax._core.programs import bodies

_ACROSS = (
    "argmax argmin cholesky conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum "
    "dot_general eig eigh fft gather lu qr ragged_dot_general reduce_and reduce_max reduce_min "
    "reduce_or reduce_prod reduce_sum reduce_window reduce_window_max reduce_window_min "
    "reduce_window_sum reduce_xor scatter scatter_add scatter_max scatter_min scatter_mul sort svd "
    "top_k triangular_solve"
).split()
# What they give is equal on all again, and no part of anything.
_WHOLE = ("psum", "pmax", "pmin", "all_gather")
# Numbers drawn for a part are the same on every replica, and others than for the whole.
_DRAWN = ("random_bits", "threefry2x32", "random_gamma")

# Of these, and of numbers drawn, those in which an optimizer looks across entries.
_KNOWN: dict[str, Callable[[jax.Array], Any]] = {
    "argmax": lambda x: lax.argmax(x, 0, "int32"),
    "cholesky": lax.linalg.cholesky,
    "conv_general_dilated": lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
    "cummax": lax.cummax,
    "cumprod": lax.cumprod,
    "cumsum": lax.cumsum,
    "dot_general": lambda x: lax.dot(x, x),
    "eigh": lax.linalg.eigh,
    "fft": lambda x: lax.fft(lax.convert_element_type(x, "complex64"), "fft", (2,)),
    "gather": lambda x: jnp.take(x, np.array([0]), axis=0),
    "lu": lax.linalg.lu,
    "qr": lax.linalg.qr,
    "reduce_and": lambda x: jnp.all(x > 0),
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_or": lambda x: jnp.any(x > 0),
    "reduce_prod": jnp.prod,
    "reduce_sum": jnp.sum,
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
    "scatter_add": lambda x: x.at[np.array([0, 0])].add(x),
    "sort": lax.sort,
    "svd": lax.linalg.svd,
    "top_k": lambda x: lax.top_k(x, 1),
    "triangular_solve": lambda x: lax.linalg.triangular_solve(x, x),
    "random_bits": lambda x: x + jax.random.uniform(jax.random.key(0), x.shape, x.dtype),
}


def across_entries(
    jaxpr: jaxprs.ClosedJaxpr,
    parts: Sequence[bool],
    shapes: frozenset[tuple[int, ...]],
    right: frozenset[str],
) -> list[tuple[str, tuple[str, ...]]]:
    """Operations that look across the entries of parts of leaves, each with its scopes.

    Args:
      jaxpr: a traced program.
      parts: of each of its arguments, whether it is a part.
      shapes: of the parts of params, by which those that a reduction hands on are known.
      right: boostax's transformations that know of parts; inside them anything goes.

    Returns:
      Pairs of a primitive's name and the boostax transformations it stands in, outermost first.
    """
    require_readable()
    return _across_entries(jaxpr, parts, shapes, right)


def _across_entries(
    jaxpr: jaxprs.ClosedJaxpr,
    parts: Sequence[bool],
    shapes: frozenset[tuple[int, ...]],
    right: frozenset[str],
) -> list[tuple[str, tuple[str, ...]]]:
    walk = _Walk(shapes, right)
    walk.run(jaxpr.jaxpr, list(parts), [False] * len(jaxpr.jaxpr.constvars), "")
    return list(dict.fromkeys(walk.found))


@functools.cache
def require_readable() -> None:
    """Raise unless operations that are known to look across entries are found to do so."""
    # It counts collectives, whose results are equal on all again, and knows loops and branches.
    costs.require_readable()
    with proof.apart():
        every = lambda x: [fn(x) for fn in _KNOWN.values()]  # noqa: E731
        traced = jax.make_jaxpr(every)(jax.ShapeDtypeStruct((2, 2), "float32"))
    found = [name for name, _ in _across_entries(traced, [True], frozenset(), frozenset())]
    missed = sorted(_KNOWN.keys() - set(found))
    if missed:
        danger = "An optimizer that looks across the entries of a leaf would pass, and go wrong."
        allowed = "written under the names " + ", ".join(_KNOWN)
        raise proof.unreadable("operations across entries", allowed, found, danger)


def require_entrywise(
    subject: str, found: Sequence[tuple[str, tuple[str, ...]]], hint: str
) -> None:
    """Refuse a program in which ``across_entries`` has found something."""
    if found:
        primitive, scopes = found[0]
        where = f" inside {scopes[-1]}" if scopes else ""
        raise ValueError(
            f"{subject} must work entry by entry, got {primitive}{where} across the entries of a "
            "leaf. Each replica has only its part of every leaf, whose norm, mean or noise would "
            f"be another. {hint}"
        )


class _Walk:
    def __init__(self, shapes: frozenset[tuple[int, ...]], right: frozenset[str]):
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self._shapes, self._right = shapes, right

    def run(
        self, jaxpr: jaxprs.Jaxpr, given: list[bool], consts: list[bool], stack: str
    ) -> list[bool]:
        """Which results of a jaxpr are parts."""
        known: dict[Any, bool] = dict(zip(jaxpr.invars, given, strict=True))
        known |= dict(zip(jaxpr.constvars, consts, strict=True))
        for eqn in jaxpr.eqns:
            inside = f"{stack}/{eqn.source_info.name_stack}"
            read = [not isinstance(x, jaxprs.Literal) and known.get(x, False) for x in eqn.invars]
            written = self._equation(eqn, read, inside)
            known |= dict(zip(eqn.outvars, written, strict=True))
        return [not isinstance(x, jaxprs.Literal) and known.get(x, False) for x in jaxpr.outvars]

    def _equation(self, eqn: Any, read: list[bool], stack: str) -> list[bool]:
        scopes = scopes_of(stack)
        if scopes and scopes[-1] in self._right:
            return [x.aval.shape in self._shapes for x in eqn.outvars]
        # JAX writes scatter-add, and all else with underscores.
        name = eqn.primitive.name.replace("-", "_")
        drawn = name in _DRAWN and any(x.aval.ndim for x in eqn.outvars)
        if drawn or (name in _ACROSS and any(read)):
            self.found.append((name, scopes))
        elif inner := list(bodies(eqn)):
            # A scatter has a program too: how two entries become one.
            return self._inside(eqn, inner, read, stack)
        if kind(name) in _WHOLE:
            return [False] * len(eqn.outvars)
        return [any(read)] * len(eqn.outvars)

    def _inside(
        self, eqn: Any, inner: list[jaxprs.Jaxpr], read: list[bool], stack: str
    ) -> list[bool]:
        # Branches take all operands but the index. What a loop carries may be a part from its
        # second round on: if anything is, all is taken for one.
        loop = eqn.primitive.name in ("scan", "while")
        written = [False] * len(eqn.outvars)
        for body in inner:
            skipped = len(read) - len(body.invars)
            exact = not loop and skipped >= 0
            given = read[skipped:] if exact else [any(read)] * len(body.invars)
            consts = [False] * len(body.constvars)
            out = self.run(body, given, consts, stack)
            if loop and any(out) and not any(read):
                out = self.run(body, [True] * len(body.invars), consts, stack)
            if len(out) == len(written) and exact:
                written = [a or b for a, b in zip(written, out, strict=True)]
            else:
                written = [any(read) or any(out)] * len(written)
        return written
