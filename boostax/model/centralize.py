# SPDX-License-Identifier: Apache-2.0
"""Remove from each kernel's gradient its mean over the inputs, for every output unit."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath, tree_map_with_path

from boostax._core import checks, trees
from boostax._core.describe import Stepped, describe
from boostax._core.groups import few, matches
from boostax._core.types import PyTree
from boostax.model import layouts

Known = Literal["auto", "stacked"]
Rule = int | Sequence[int] | Known | None
Axes = Literal["auto"] | Mapping[str, Rule] | Callable[[str, jax.Array], Rule]

_WHO = "centralize_gradients"
_HINT = "Pass 0 or (0, 1) for means over the first one or two axes, or None to subtract nothing."


def centralized(g: jax.Array, dims: tuple[int, ...], multiple_of: int = 1) -> jax.Array:
    """Subtract the mean over ``dims``.

    The gradient stays unchanged if each mean is over one element, or if ``multiple_of`` does not
    divide the size of the last of these dimensions.
    """
    sizes = [g.shape[dim] for dim in dims]
    if math.prod(sizes) < 2 or sizes[-1] % multiple_of:
        return g
    wide = jnp.asarray(g, trees.wide_dtype(g))
    return trees.saturate(wide - jnp.mean(wide, dims, keepdims=True), jnp.result_type(g))


def _dims(rules: Any, kernels: layouts.Kernels, path: KeyPath, leaf: PyTree) -> tuple[int, ...]:
    """Return the axes to average over, the input channels last; empty for an unchanged leaf."""
    name = trees.path_name(path)
    ndim = np.ndim(leaf)
    rule = rules(name, leaf) if callable(rules) else None
    if not callable(rules) and not kernels.is_vector(path, ndim):
        rule = next((rule for pattern, rule in rules.items() if matches(name, pattern)), "auto")
    if rule is None:
        return ()
    if isinstance(rule, str):
        known = checks.choice(_WHO, "axes", rule, Known, _HINT)
        return kernels.inputs(path, ndim, int(known == "stacked"))
    allowed = f"different axes of {name or 'the root'!r}, which has {ndim} axes"
    several = rule if isinstance(rule, (tuple, list)) else (rule,)
    numbers = [checks.integer(_WHO, "axes", dim, allowed, _HINT) for dim in several]
    dims = sorted({dim + ndim if dim < 0 else dim for dim in numbers})
    valid = len(dims) == len(numbers) and all(0 <= dim < ndim for dim in dims)
    checks.require(valid, _WHO, "axes", got=rule, allowed=allowed, hint=_HINT)
    return kernels.ordered(tuple(dims))


def centralize_gradients(
    *, multiple_of: int | None = None, layout: layouts.LayoutName | None = None, axes: Axes = "auto"
) -> optax.GradientTransformationExtraArgs:
    r"""Subtract from the gradient of each kernel its mean over the inputs, for every output unit.

    .. math:: u_{io} = g_{io} - \tfrac1n \sum_{j=1}^{n} g_{jo}

    Centralization projects the gradient so that the sum of the weights into each unit stays
    constant. With SGD, with or without momentum, the sum stays constant wherever
    ``centralize_gradients`` is in the chain; with Adam, only if ``centralize_gradients`` comes
    after ``scale_by_adam``. The projection is linear, so it may precede or follow a mean over
    replicas or micro-batches. Weight decay may come before or after ``centralize_gradients``.
    ``chain(add_decayed_weights(w), centralize_gradients(), ...)`` also centralizes the decay, as
    MindSpore does; in the other order, or with decoupled decay, the decay is unchanged.

    With ``"auto"``, the layout of the kernels decides which axes are inputs. In Flax's layout these
    are all axes but the last: ``(in, out)``, ``HWIO``, and ``(heads, head_dim, out)`` of
    attention's ``out``. If a kernel of ``query``, ``key`` or ``value`` has three axes, only the
    first axis is an input. In Haiku's layout, the kernel of a module whose name contains
    ``transpose`` is ``(H, W, out, in)``. In the layouts of Equinox and PyTorch, kernels are called
    ``weight``, and all axes but the first are inputs: ``(out, in)``, ``OIHW``; kernels of PyTorch's
    transposed convolutions are ``(in, out, H, W)``. Modules of ``equinox.nn`` are recognised by
    their class, even if they are stacked. Vectors, scalars, embedding tables, and leaves whose
    names end with ``bias`` or ``scale`` stay unchanged. Every leaf with a single input stays
    unchanged with any rule, because its centralized gradient would be zero.

    Args:
      multiple_of: centralize only kernels in which the size of the last averaged axis, the input
        channels, is a multiple of this number, which is 16 in MindSpore.
      layout: the library of the kernels, ``"linen"``, ``"nnx"``, ``"equinox"``, ``"haiku"`` or
        ``"torch"``. ``None`` recognises Equinox's modules, and reads other trees in Flax's layout.
        Outside of ``equinox.nn``, ``None`` refuses a matrix called ``weight``, whose outputs may be
        first or last.
      axes: the axes to average over: ``"auto"``; a dict of patterns and rules; or a function that
        returns a rule, called with a leaf's path name and the leaf. A pattern is an ``fnmatch`` on
        path names (the name of a module matches all leaves in it). The first matching pattern
        decides, and leaves without a match follow ``"auto"``. Biases, scales and vectors stay
        unchanged even if a pattern matches them. A rule is an axis, a tuple of axes, ``None`` for
        no axes, ``"auto"``, or ``"stacked"``, which is ``"auto"`` after one leading axis of layers
        (``flax.linen.scan``).

    Returns:
      A stateless transformation; ``optax.masked`` applies it to some of the params. Means are
      computed in f32 or wider, and the result is cast to the gradient's dtype with saturation. In
      plain ``jit`` the means are over global arrays, for any sharding; inside your own
      ``jax.shard_map``, the means are over shards. Cost: no state; one more read of the gradients,
      and on XLA:CPU (not on TPU v5e and H100) one write of the gradients before Adam. A leaf that
      is sharded along its inputs sends one mean, f32 or wider, for each output unit; other leaves
      send nothing.

    Raises:
      ValueError, TypeError: an argument out of range. At ``init``, a pattern that matches nothing,
        an axis that a leaf lacks, or a kernel of an ambiguous layout. At trace time, integer
        gradients, or gradients of other shapes than the params.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> tx = boostax.centralize_gradients()
      >>> grads = {"kernel": jnp.array([[1.0, 4.0], [3.0, 8.0]]), "bias": jnp.ones(2)}
      >>> updates, _ = tx.update(grads, tx.init(grads))
      >>> updates["kernel"].tolist(), updates["bias"].tolist()
      ([[-1.0, -2.0], [1.0, 2.0]], [1.0, 1.0])

    References:
      Yong, Huang, Hua, Zhang, Gradient Centralization: A New Optimization Technique for Deep Neural
      Networks, https://arxiv.org/abs/2004.01461, 2020. The paper treats convolutions and dense
      layers. The authors' code, for PyTorch's layout, centralizes every tensor of two or more axes,
      including embeddings (over the features of each row) and depthwise kernels (over H and W).
      MindSpore (``OptimizerProcess.add_grad_centralization``) leaves out depthwise kernels, and
      kernels whose number of input channels is not a multiple of 16. ``optax.centralize`` averages
      over all axes but the first, which in Flax's layouts include the outputs.
    """
    rules: Any = {} if isinstance(axes, str) and axes == "auto" else axes
    valid = callable(rules) or isinstance(rules, Mapping)
    allowed, hint = "'auto', a dict of rules by pattern, or a function", "Write {'*/qkv': 0}."
    checks.require_type(valid, _WHO, "axes", got=axes, allowed=allowed, hint=hint)
    patterns = {} if callable(rules) else rules
    for rule in (x for x in patterns.values() if isinstance(x, str)):
        checks.choice(_WHO, "axes", rule, Known, _HINT)
    if layout is not None:
        checks.choice(_WHO, "layout", layout, layouts.LayoutName, "None reads Flax's layout.")
    least = 1 if multiple_of is None else multiple_of
    checks.positive_int(_WHO, "multiple_of", least, "MindSpore uses 16.")

    @describe(_WHO, "centralize")
    def update_fn(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Stepped:
        trees.require_gradients(updates, _WHO)
        hint = "Put centralize_gradients before parts that change the shapes of gradients."
        trees.require_shapes(_WHO, "gradients", updates, params, hint)
        dims_of = functools.partial(_dims, rules, layouts.Kernels(layout, updates))
        dims = tree_map_with_path(dims_of, updates)
        return jax.tree.map(lambda g, x: centralized(g, x, least), updates, dims), state

    def init_fn(params: PyTree) -> optax.EmptyState:
        names = trees.names(params)
        # If params are masked, a pattern may match only masked params, so patterns are not checked.
        masked = any(map(trees.is_masked, trees.nodes(params)))
        for pattern in patterns if names and not masked else ():
            valid = any(matches(name, pattern) for name in names)
            hint = f"The pattern matches no param. The params are {few(names)}."
            checks.require(valid, _WHO, "axes", pattern, "patterns that match params", hint)
        tree_map_with_path(functools.partial(_dims, rules, layouts.Kernels(layout, params)), params)
        return optax.EmptyState()

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
