# SPDX-License-Identifier: Apache-2.0
r"""Scale the query and key weights of a head back once its attention logits exceed a bound.

A transformer does not bound the products of queries and keys. With Muon their weights grow until
one term dominates the softmax. A factor on a head's weights has the effect of the same factor on
its logits, and unlike a clip of the logits needs no change of the model.

References:
  Kimi Team, Kimi K2: Open Agentic Intelligence (MuonClip), https://arxiv.org/abs/2507.20534, 2025.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, gate, trees
from boostax._core.describe import PyTree, Stepped, describe
from boostax._core.groups import few

_WHO = "qk_clip"


class Heads(NamedTuple):
    """The paths of attention weights and of maxima of logits in a model, and the axis of heads.

    All fields but the last three are patterns of paths, in which ``*`` matches any text. A pattern
    that matches a module selects its kernel and its bias. Leaves belong to one layer if the stars
    of their patterns match the same texts.

    Attributes:
      query: weights of the queries, ``[..., heads, head_dim]``, or ``[..., heads * head_dim]`` with
        ``axis=-1``; for latent attention (MLA), the content part of the queries.
      key: weights of the keys.
      maxima: the carried leaf ``[heads]`` with the largest logit of each head; ``[layers, heads]``
        if the weights of all layers are stacked.
      rotary: for MLA, the weights of the queries for the shared rotary key; none by default.
      axis: the axis of the heads, counted from the end, in kernels and in biases.
      key_heads: the number of key heads, if several query heads share a key head (GQA); by default
        equal to the number of query heads.
      content: for MLA with several parts in one leaf: the first ``content`` elements of a head are
        the content part of keys or queries. The rest of a query leaf is rotary; the rest of a key
        leaf is values, which stay unchanged.
    """

    query: str
    key: str
    maxima: str
    rotary: str = ""
    axis: int = -2
    key_heads: int | None = None
    content: int | None = None


class QKClipState(NamedTuple):
    """State of ``qk_clip``.

    Attributes:
      inner_state: state of the inner transformation.
    """

    inner_state: optax.OptState

    def reads_carried(self) -> None:
        """Mark that this state reads ``carry``'s values, so ``carry`` passes them inwards."""


@jax.custom_vjp
def _with_gradient(x: jax.Array, leaf: jax.Array, value: jax.Array) -> jax.Array:
    return x


_with_gradient.defvjp(lambda x, leaf, v: (x, v), lambda v, g: (g, v, jnp.zeros_like(v)))


def set_gradient(x: jax.Array, leaf: jax.Array, value: jax.Array) -> jax.Array:
    """Return ``x``, and make ``value`` the gradient of ``leaf``, the new value for ``carry``.

    Args:
      x: an array that the loss depends on; the gradient of ``x`` is unchanged.
      leaf: a param that the loss uses nowhere else.
      value: an array of the leaf's shape, which is not differentiated.

    Returns:
      ``x``. Cost: none.

    Raises:
      ValueError: a value of another shape.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> loss = lambda p: boostax.model.set_gradient(2 * p["w"], p["seen"], jnp.float32(7))
      >>> {k: float(g) for k, g in jax.grad(loss)({"w": 1.0, "seen": 0.0}).items()}
      {'seen': 7.0, 'w': 2.0}
    """
    leaf = jnp.asarray(leaf)
    value = jax.lax.stop_gradient(jnp.asarray(value, leaf.dtype))
    hint = "The largest logit of each head is scores.max((0, 2, 3)) of [batch, heads, q, k]."
    trees.require_shapes("set_gradient", "value", {"value": value}, {"value": leaf}, hint)
    # JAX 0.12 takes a backward rule whose result is typed like the leaf.
    return _with_gradient(x, leaf, axes.to_varying(value, axes.varying(leaf)))


@checks.arguments
def qk_clip(
    inner: optax.GradientTransformation,
    heads: Heads | Mapping[str, Any],
    *,
    tau: float = 100.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Run ``inner``, then scale down query and key weights of heads with logits above ``tau / 2``.

    With :math:`S_h` the largest logit of head :math:`h` in the forward passes of the step,

    .. math::
      \gamma_h = \min(1, \tau / 2 S_h), \quad c_j = \sqrt{\textstyle\max_{h \in j} \gamma_h}, \quad
      W_k^j \leftarrow c_j W_k^j, \qquad W_q^h \leftarrow \frac{\gamma_h}{c_j} W_q^h

    where key head :math:`j` serves the query heads :math:`h \in j`. With a key head for each query
    head both factors are :math:`\sqrt{\gamma_h}`. If several query heads share a key head, the key
    takes the root of their largest :math:`\gamma_h`, so every logit is multiplied by its
    :math:`\gamma_h` and no weight grows. In MLA the rotary queries take the full :math:`\gamma_h`,
    because all heads share the rotary key. Biases are scaled, too.

    The maxima are a carried leaf: the loss sets its gradient (``set_gradient``), and
    ``boostax.carry`` around ``qk_clip`` takes the maximum over micro-batches, replicas and windows:
    ``carry(dynamic_loss_scale(qk_clip(muon(1e-2), heads)), {"max_logits": "max"})``. The maxima
    come from the forward pass before the step, and the step raises logits again. So logits are
    scaled down to half of ``tau``; in our record they then stay below ``tau`` after every step on
    its batch, at ten times the best learning rate. Kimi K2 scales logits down to its threshold
    itself, so use twice its threshold as ``tau``.

    Args:
      inner: the optimizer; nothing after it may change its updates.
      heads: a ``Heads``, or a dict of its fields.
      tau: :math:`\tau`, the bound on logits; logits above half of ``tau`` are scaled down to that
        half.

    Returns:
      A transformation with a ``QKClipState``. If a maximum is not finite, its head is not scaled. A
      step that a gate skips changes no weight. Sharded weights are scaled in place. Cost: one
      product, which compilers fuse with the optimizer; no collective besides ``carry``'s.

    Raises:
      ValueError, TypeError: an argument out of range; at ``init``, a pattern that matches nothing,
        queries without keys, or a gate in ``inner``; at trace time, no ``carry`` around it, layers
        without maxima, or weights whose size is not a multiple of the number of heads.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> heads = boostax.model.Heads("query", "key", "max_logits", axis=-1)
      >>> tx = boostax.model.qk_clip(optax.sgd(1.0), heads)
      >>> tx = boostax.carry(tx, {"max_logits": "max"})
      >>> params = {"query": jnp.ones(2), "key": jnp.ones(2), "max_logits": jnp.zeros(2)}
      >>> grads = {"query": jnp.zeros(2), "key": jnp.zeros(2), "max_logits": jnp.array([49., 200.])}
      >>> params, state = boostax.apply_gradients(tx, grads, tx.init(params), params)
      >>> params["query"].tolist(), params["key"].tolist()
      ([1.0, 0.5], [1.0, 0.5])
    """
    tx, layout = checks.transformation(_WHO, "inner", inner), _checked(heads)
    checks.number(_WHO, "tau", tau, "greater than 0", lambda x: x > 0, "100 is the default.")

    def init_fn(params: PyTree) -> QKClipState:
        _require_whole(_layers(layout, params), params)
        return QKClipState(gate.init_optimizer(_WHO, tx, params))

    @describe(_WHO, "watch", inner={"inner_state": tx})
    def update_fn(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Stepped:
        trees.require_params(params, _WHO, "Call tx.update(grads, state, params).")
        grads, inside = gate.Pending(updates), state.inner_state
        updates, inside = gate.run(tx, grads, inside, params, apply=False, extra=extra)
        factors = dict(_factors(layout, params, extra.get("carried", {}), tau))

        def scaled(path: Any, u: Any, p: Any) -> Any:
            factor = factors.get(trees.path_name(path))
            # If the factor is 1, the result equals the update bit for bit.
            return u if factor is None else trees.as_dtype(u + (factor - 1) * (p + u), u.dtype)

        updates = jax.tree_util.tree_map_with_path(scaled, updates, params)
        return updates, QKClipState(inside)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _checked(heads: Any) -> Heads:
    """Return the ``Heads``, also from a dictionary of its fields."""
    hint = "Try Heads(query='*/query', key='*/key', maxima='*/max_logits')."
    needed = {"query", "key", "maxima"}
    named = isinstance(heads, Mapping) and needed <= heads.keys() <= {*Heads._fields}
    found: Any = Heads(**heads) if named else heads
    checks.require(_WHO, "heads", heads, "a Heads", isinstance(found, Heads), hint, TypeError)
    patterns = [x for x in (found.query, found.key, found.maxima, found.rotary or found.query)]
    texts = all(isinstance(x, str) and x for x in patterns)
    fits = texts and len({x.count("*") for x in patterns}) == 1
    checks.require(_WHO, "heads", patterns, "patterns with equally many stars", fits, hint)
    fits, hint = isinstance(found.axis, int) and found.axis < 0, "It counts from the end: -1."
    checks.require(_WHO, "heads.axis", found.axis, "a negative integer", fits, hint)
    for name in ("key_heads", "content"):
        if getattr(found, name) is not None:
            checks.positive_int(_WHO, f"heads.{name}", getattr(found, name), "None is all of them.")
    return found


def _by_stars(pattern: str, names: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    """Return the paths that match, or lie in a matching module, by the texts of the stars."""
    words = "(.*)".join(map(re.escape, pattern.split("*")))
    found: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        match = re.fullmatch(f"{words}(/.*)?", name)
        if match is not None:
            found.setdefault(match.groups()[:-1], []).append(name)
    return found


def _layers(layout: Heads, params: PyTree) -> dict[tuple[str, ...], dict[str, list[str]]]:
    """Return for each layer the paths of each field's leaves, including masked leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=trees.is_masked)
    names = [trees.path_name(path) for path, _ in leaves]
    fields = ("query", "key", *(["rotary"] if layout.rotary else []))
    found = {x: _by_stars(getattr(layout, x), names) for x in fields}
    for field in fields:
        got = (getattr(layout, field), sorted(found["query"]))
        fits = bool(names) <= bool(found[field]) and found[field].keys() == found["query"].keys()
        allowed = "a pattern of leaves, in the layers of the queries"
        checks.require(_WHO, f"heads.{field}", got, allowed, fits, f"There are {few(names)}.")
        # If a weight is a product of leaves, as in LoRA, each leaf would be scaled.
        more = [x for leaves in found[field].values() if len(leaves) > 2 for x in leaves]
        allowed, hint = "a kernel and its bias in a layer", "Name the leaf, as in '*/query/kernel'."
        checks.require(_WHO, f"heads.{field}", few(more), allowed, not more, hint)
    return {stars: {x: found[x][stars] for x in fields} for stars in found["query"]}


def _require_whole(layers: Mapping[Any, Mapping[str, list[str]]], params: PyTree) -> None:
    """Refuse a layer of which a partition passes only some weights: the others would not scale."""
    leaves = {*trees.names(params)}
    for names in (
        [x for of_field in layer.values() for x in of_field] for layer in layers.values()
    ):
        lacks = [x for x in names if x not in leaves]
        hint = "Put it around a partition: qk_clip(optax.partition(...), heads)."
        fits, allowed = len(lacks) in (0, len(names)), "all weights of a layer, or none"
        checks.require(_WHO, "params", f"a layer without {few(lacks)}", allowed, fits, hint)


def _factors(
    layout: Heads, params: PyTree, carried: Mapping[str, jax.Array], tau: Any
) -> Iterator[tuple[str, jax.Array]]:
    """Yield the factor of each weight, shaped to multiply it."""
    maxima, leaves = _by_stars(layout.maxima, carried), dict(trees.named(params))
    for stars, names in _layers(layout, params).items():
        if not any(name in leaves for of_field in names.values() for name in of_field):
            continue  # The layer is frozen.
        got, its = (layout.maxima, [*carried]), maxima.get(stars, [])
        hint = f"Write carry(qk_clip(...), {{{layout.maxima.split('/')[-1]!r}: 'max'}})."
        allowed = f"a pattern of carried leaves, with one [..., heads] for {names['query'][0]!r}"
        fits = len(its) == 1 and jnp.ndim(carried[its[0]]) > 0
        checks.require(_WHO, "heads.maxima", got, allowed, fits, hint)
        largest = carried[its[0]].astype(jnp.float32)
        # An infinity would make the weights zero.
        over = (largest > tau / 2) & (largest < jnp.inf)
        gamma = jnp.where(over, tau / 2 / largest, 1)
        count = layout.key_heads or gamma.shape[-1]
        group, left = divmod(gamma.shape[-1], count)
        allowed = f"a divisor of the {gamma.shape[-1]} query heads"
        hint = "A key head serves as many query heads as any other."
        checks.require(_WHO, "heads.key_heads", count, allowed, not left, hint)
        of_key = jnp.sqrt(gamma.reshape(*gamma.shape[:-1], count, group).max(-1))
        of_query = gamma / jnp.repeat(of_key, group, -1)
        rest = {"query": gamma, "key": jnp.ones_like(of_key), "rotary": None}
        first = {"query": of_query, "key": of_key, "rotary": gamma}
        for field, of_field in names.items():
            for name in (x for x in of_field if x in leaves):
                yield name, _shaped(layout, name, leaves[name], first[field], rest[field])


def _shaped(
    layout: Heads, name: str, leaf: Any, first: jax.Array, rest: jax.Array | None
) -> jax.Array:
    """Return factors ``[..., heads]`` in a shape that multiplies a leaf."""
    shape, lead, count = jnp.shape(leaf), first.shape[:-1], first.shape[-1]
    dim, content = len(shape) + layout.axis, layout.content if rest is not None else None
    fits = dim >= len(lead) and shape[: len(lead)] == lead and shape[dim] % count == 0
    allowed = f"of {count} heads on axis {layout.axis}, and led by {lead}, at {name!r}"
    hint = "heads.axis is the axis of the heads; GQA has heads.key_heads of them in its keys."
    checks.require(_WHO, "weights", shape, allowed, fits, hint)
    # The elements of a head are on the axis after the heads, or on the same axis.
    behind = shape[dim] == count and content is not None and dim + 1 < len(shape)
    size = shape[dim + 1] if behind else shape[dim] // count
    if content is not None and rest is not None:
        allowed = f"less than the {size} elements of a head at {name!r}"
        hint = "Leave it out if all of them are content."
        checks.require(_WHO, "heads.content", content, allowed, content < size, hint)
        first = jnp.where(jnp.arange(size) < content, first[..., None], rest[..., None])
    elif size > 1:
        first = jnp.broadcast_to(first[..., None], (*first.shape, size))
    body = (count, size) if behind else (count * size,)
    after = len(shape) - dim - len(body)
    return first.reshape(*lead, *(1,) * (dim - len(lead)), *body, *(1,) * after)
