# SPDX-License-Identifier: Apache-2.0
"""A wrapper that stores the params and the state of an optimizer in fewer bytes."""

import fnmatch
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, gate, placement, replicas, trees, types
from boostax._core.describe import Holds, Stepped, describe
from boostax._core.types import PyTree
from boostax.precision import formats
from boostax.precision.leafwise import COMMON, SMALL, Order, leaf_by_leaf

Moments = Literal["bfloat16", "int8", "log8"]
Params = Literal["stochastic", "remainder"]
Path = tuple[Any, ...]
Noise = Callable[[Path, tuple[int, ...]], tuple[jax.Array, str]]
Scales = dict[str, replicas.ByBlock]
# The codes and scales of a state.
Coded = tuple[PyTree, Scales]
# The params (or updates) and their low bits, and the codes and scales of the state.
Stored = tuple[tuple[PyTree, PyTree], Coded]
_WHO = "store"
_NAMED = "For reductions with residuals, name the fields: moments={'*mu': 'log8', '*nu': 'log8'}."
_SECOND = "store: int8 rounds small values of {!r} to 0, and optimizers divide by them. Use 'log8'."


class StoreState(NamedTuple):
    """State of ``store``.

    Attributes:
      steps: i32, number of applied steps, from which the seeds of the rounding noise are computed.
      inner_state: state of the inner transformation, in which codes replace the encoded arrays.
      scales: for each field of the state, a ``ByBlock`` of a tree like the params. The tree has the
        f32 scales of the field's arrays, one scale per block.
      low: i16, a tree like the params: the 16 bits of f32 that bf16 params lack; ``()`` unless
        ``params="remainder"``.
    """

    steps: jax.Array  # [] int32
    inner_state: optax.OptState
    scales: Scales
    low: PyTree  # shapes of the params, int16
    holds = Holds(("steps", "low"), params=True)

    def master_params(self, params: PyTree) -> PyTree:
        """Return the params that the optimizer receives: f32, with the bits that bf16 lacks."""
        if not jax.tree.leaves(self.low):
            return trees.at_least_float32(params)
        return jax.tree.map(
            lambda p, x: formats.joined(p, x) if jax.tree.leaves(x) else trees.at_least_float32(p),
            params,
            self.low,
        )


def widened(opt_state: PyTree) -> PyTree:
    """Return a state whose arrays are decoded to f32, without scales."""
    nodes, treedef = jax.tree.flatten(opt_state, is_leaf=lambda x: isinstance(x, StoreState))
    for i, node in enumerate(nodes):
        if isinstance(node, StoreState):
            nodes[i] = node._replace(inner_state=_decoded(node.inner_state, node.scales), scales={})
    return treedef.unflatten(nodes)


def narrowed(like: PyTree, opt_state: PyTree) -> PyTree:
    """Return a state from ``widened``, encoded in the formats of the state ``like``."""
    olds, treedef = jax.tree.flatten(like, is_leaf=lambda x: isinstance(x, StoreState))
    nodes = treedef.flatten_up_to(opt_state)
    for i, (old, node) in enumerate(zip(olds, nodes, strict=True)):
        if isinstance(old, StoreState):
            noise = _noise_of(node.steps, ())
            codes, scales = _encoded(node.inner_state, old.inner_state, old.scales, noise)
            nodes[i] = node._replace(inner_state=codes, scales=scales)
    return treedef.unflatten(nodes)


@checks.arguments
def store(
    inner: optax.GradientTransformation,
    *,
    params: Params | None = None,
    moments: Moments | Mapping[str, Moments] | None = None,
    least: int = 4096,
) -> optax.GradientTransformationExtraArgs:
    r"""Store bf16 params and the state of ``inner`` in fewer bytes, and compute in f32.

    Each step decodes params :math:`p` and state :math:`m`, runs ``inner`` and encodes the results.
    The results are rounded up or down at random, so that the mean is preserved. With the decoder
    :math:`D` and the encoder :math:`E`:

    .. math::
      u, m' = \text{inner}(g, D(m), D(p)), \qquad
      p \leftarrow E(D(p) + u), \quad m \leftarrow E(m'), \qquad \mathbb{E}[D(E(x))] = x.

    With rounding to nearest, an update of less than a 512th of a bf16 param would not change the
    param, and a second moment that should decay by a thousandth per step would never change. The
    noise is a hash of the element's index, the param's path and the number of applied steps. So
    skipped steps do not change the noise, and a resumed run or another placement draws the same
    noise.

    Place ``store`` directly around the optimizer, inside all gates. A window around ``store`` has a
    dtype of its own: ``accumulate(store(adamw(1e-3), params="stochastic"), 16, dtype="bfloat16",
    rounding="stochastic")``.

    With ``params``, a param is stored in one of these formats:

    - ``None``: the dtype of the param, rounded to nearest.
    - ``"stochastic"``: 2 bytes per element, bf16 rounded at random.
    - ``"remainder"``: 4 bytes per element, bf16 and the other 16 bits of an exact f32 param.

    With ``moments``, an array of the state is stored in one of these formats:

    - ``None``: 4 bytes per element, f32.
    - ``"bfloat16"``: 2 bytes per element, with 8 significant bits.
    - ``"int8"``: 1 byte per element, with 127 equal steps from zero to the largest magnitude of a
      block. Use this format only for first moments of dense gradients, because rows of an embedding
      that are rarely seen would get steps of up to 49 learning rates.
    - ``"log8"``: 1 byte per element, with six evenly spaced levels per octave. A block without
      signs, such as of second moments, has 252 levels in 42 octaves. A block with signs has 126
      levels.

    A block has 128 elements of the last dimension. If 128 does not divide the last dimension, a
    block has a few more elements, over several dimensions. Codes are sharded like their array.
    Scales are sharded only along dimensions in which no block is divided between shards.

    Args:
      inner: the optimizer, without gates, which receives f32 gradients, params and state.
      params: the format for bf16 params; other params are unchanged. Cast params to bf16 before
        ``init``.
      moments: the format for f32 arrays of the state that belong to a param and have its shape.
        Pass one format for all arrays, or a format for each pattern of the state's fields,
        ``{"*mu": "bfloat16", "*nu": "log8"}``; the first match applies, and a field without a match
        remains f32.
      least: the smallest number of elements of an encoded array; smaller arrays, such as biases and
        the params of norms, remain f32.

    Returns:
      A gate that never skips a step, with a ``StoreState``. Cost: the bytes above, 4 bytes per
      block for 8-bit formats, and the time to decode and encode each stored element. With
      ``boostax.apply_gradients``, an elementwise optimizer reads the stored arrays twice (on TPUs
      once) and writes the arrays once; other optimizers need one f32 array at a time. The pure
      ``update`` returns updates in the dtype of the params, so after a step of more than 256 units
      in the last place, ``params + updates`` may differ by one unit from the param that was rounded
      at random.

    Raises:
      ValueError, TypeError: ``inner`` is not a transformation, or has a gate; an unknown format; at
        ``init``, ``params`` although no param is bf16, or a pattern without a match; at trace time,
        in your own ``shard_map``, 8-bit arrays that are sharded along dimensions with blocks.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.precision.store(optax.adamw(1e-3), params="stochastic", moments="log8")
      >>> w = jnp.ones((64, 64), jnp.bfloat16)
      >>> state = tx.init(w)
      >>> w, state = boostax.apply_gradients(tx, jnp.ones((64, 64)), state, w)
      >>> sum(x.nbytes for x in jax.tree.leaves((w, state))) / w.size
      4.064453125
      >>> print(f"{w.astype(jnp.float32).mean():.3f}")  # to the nearest it would be 1
      0.999

    References:
      Zamirai et al., Revisiting BFloat16 Training, https://arxiv.org/abs/2010.06192, 2020;
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization,
      https://arxiv.org/abs/2110.02861, 2021.
    """
    tx = checks.transformation(_WHO, "inner", inner)
    kind = params
    if params is not None:
        hint = "'stochastic' stores 2 bytes per param, and 'remainder' stores exact f32 masters."
        checks.choice(_WHO, "params", params, Params, hint)
    by_field = {} if moments is None else moments
    rules: dict[str, Moments] = dict(by_field) if isinstance(by_field, Mapping) else {"*": by_field}
    for name in rules.values():
        checks.choice(_WHO, "moments", name, Moments, "moments=None stores the state in f32.")
    checks.positive_int(_WHO, "least", least, "least=1 encodes arrays of every size.")

    @describe(_WHO, "storage", inner={"inner_state": tx})
    def step_fn(
        grads: gate.Pending, state: StoreState, params: PyTree, *, apply: bool, **extra: Any
    ) -> Stepped:
        trees.require_params(params, _WHO, "Call tx.update(grads, state, params).")
        _require_blocks(state)

        def written(old: Stored, params: PyTree, grads: gate.Pending, steps: jax.Array) -> Stored:
            """Return new params (``apply``) or updates, low bits of params, codes, and scales."""
            (value, low), (codes, scales) = old
            params = value if apply else params
            masters = StoreState(steps, codes, scales, low).master_params(params)
            noise = _noise_of(steps, params)
            updates, new_state = tx.update(grads.value(), _decoded(codes, scales), masters, **extra)

            def write(path: Path, p: jax.Array, wide: jax.Array, update: jax.Array) -> PyTree:
                if kind is None or jnp.result_type(p) != jnp.bfloat16:
                    return (wide.astype(p.dtype) if apply else trees.as_updates(update, p)), ()
                exact = kind == "remainder"
                draw = formats.FORMATS["bfloat16"].encode
                new = formats.nearest(wide) if exact else draw(wide, *noise(path, p.shape))[0]
                moved = (new.astype(jnp.float32) - p.astype(jnp.float32)).astype(p.dtype)
                # Without ``apply``, the low bits belong to ``p + update``, which the caller
                # computes.
                value, stored = (new, new) if apply else (moved, p + moved)
                return value, formats.remainder(wide, stored) if exact else ()

            wide = optax.apply_updates(masters, updates)
            both = jax.tree_util.tree_map_with_path(write, params, wide, updates)
            value, lost = (jax.tree.map(lambda _, x, i=i: x[i], params, both) for i in (0, 1))
            low = lost if jax.tree.leaves(low) else low
            return (value, low), _encoded(new_state, codes, scales, noise)

        value = params if apply else jax.tree.map(jnp.zeros_like, params)
        old = (value, state.low), (state.inner_state, state.scales)
        args = (None if apply else params), grads, state.steps
        order = _order(params, least, (old, args))
        (value, low), (codes, scales) = leaf_by_leaf(written, state.steps >= 0, old, args, order)
        steps = jnp.asarray(optax.safe_increment(state.steps))
        return (placement.settled(value) if apply else value), StoreState(steps, codes, scales, low)

    return gate.gated(
        lambda params: _first(gate.init_optimizer(_WHO, tx, params), params, kind, rules, least),
        step_fn,
        # ``flush`` changes nothing, because an optimizer without gates has no open window.
        lambda state, params, **extra: (params, state),
    )


def masters(params: types.State, opt_state: PyTree) -> types.State:
    """Return the params that the optimizer receives: f32, with the bits that bf16 params lack.

    Use the result for evaluation, for export, and before ``migrate_state`` to a chain without
    ``store``.

    Args:
      params: the trained params.
      opt_state: the optimizer state; ``store`` may be nested anywhere in the state.

    Returns:
      A tree like the params, in f32 or wider.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> w = jnp.ones(4, jnp.bfloat16)
      >>> tx = boostax.precision.store(optax.sgd(1.0), params="remainder")
      >>> w, state = boostax.apply_gradients(tx, jnp.full(4, 2.0**-12), tx.init(w), w)
      >>> float(w[0]), float(boostax.precision.masters(w, state)[0])
      (1.0, 0.999755859375)
    """
    trees.require_order("masters", "masters(params, opt_state)", params=params)
    states = trees.find(opt_state, StoreState)
    return states[0].master_params(params) if states else trees.at_least_float32(params)


def _order(params: PyTree, least: int, tree: PyTree) -> PyTree:
    """Return the order in which arrays are written: each param, then the fields of its state.

    The end of an array's path is the path of its param. All small params together form one leaf.
    Per-replica arrays are written together with the collectives, because a branch after such an
    array would have a condition that differs per replica.
    """
    owners = {path: jnp.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}
    large = [path for path, shape in owners.items() if math.prod(shape) >= least]
    numbers = {path: number + 1 for number, path in enumerate(large)}
    shardings = {path: placement.cut(path, owners[path]) for path in large}
    fields: dict[str, int] = {}

    def position(path: Path, x: PyTree) -> PyTree:
        if replicas.is_per_replica(x):
            return jax.tree.map(lambda _: Order(COMMON), x)
        start = next((i for i in range(len(path) + 1) if path[i:] in owners), None)
        if start is None or not jnp.ndim(x):
            return Order(COMMON)
        # The tree is ((params, low), (codes, scales)), followed by arrays that are only read.
        of_state = [getattr(key, "idx", None) for key in path[:2]] == [0, 1]
        # Scales (``path[2].idx == 1``) are written together with their codes.
        field = trees.path_name(path[3 : 4 if path[2].idx == 1 else start]) if of_state else ""
        place = fields.setdefault(field, len(fields) + 1) if of_state else 0
        return Order(numbers.get(path[start:], SMALL), place, shardings.get(path[start:]))

    return jax.tree_util.tree_map_with_path(position, tree, is_leaf=replicas.is_per_replica)


def _first(
    state: PyTree, params: PyTree, kind: Params | None, rules: dict[str, Moments], least: int
) -> StoreState:
    """Return the first state of ``store``, given the first state of ``inner``."""
    is_low = jax.tree.map(lambda p: jnp.result_type(p) == jnp.bfloat16, params)
    is_valid = kind is None or any(jax.tree.leaves(is_low))
    hint = "Cast the params before init, or pass policy('params=bfloat16,...') to the train step. "
    hint += "Inside a gate, wrap the complete chain: store(chain(all_reduce(...), adamw(...)))."
    checks.require(is_valid, _WHO, "params", kind, "None if no param is bf16", hint)
    low: PyTree = ()
    if kind == "remainder":
        low = jax.tree.map(lambda p, x: jnp.zeros(p.shape, jnp.int16) if x else (), params, is_low)
    owners = {path: jnp.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}
    scales: dict[tuple[str, Path], jax.Array] = {}
    fields: dict[str, str | None] = {}

    # The scales of arrays that differ per replica would differ, too.
    local = {id(x) for y in trees.find(state, replicas.PerReplica) for x in jax.tree.leaves(y)}
    # ``optax.tree_map_params`` replaces params by a stand-in, a node that contains no arrays.
    stand_in = None if params is None or jax.tree.leaves(params) else type(params)

    def stored(path: Path, x: jax.Array) -> jax.Array:
        empty = type(x) is stand_in
        starts = [i for i in range(len(path) + 1) if empty or owners.get(path[i:]) == jnp.shape(x)]
        if not starts or not (empty or jnp.result_type(x) == jnp.float32):
            return x
        field = trees.path_name(path if empty else path[: starts[0]])
        rule = fields.setdefault(field, next((x for x in rules if fnmatch.fnmatch(field, x)), None))
        if empty or rule is None or x.size < least:
            return x
        got = rules[rule] if id(x) in local and rules[rule] != "bfloat16" else None
        checks.absent(_WHO, "moments", got, f"'bfloat16' for per-replica {field}", _NAMED)
        if rules[rule] == "int8" and field.endswith("nu"):
            warnings.warn(_SECOND.format(field), stacklevel=2)
        codes, of_blocks = formats.FORMATS[rules[rule]].encode(x, None)
        if of_blocks is not None:
            scales[field, path[starts[0] :]] = of_blocks
        return codes

    codes = jax.tree_util.tree_map_with_path(stored, state, is_leaf=lambda x: type(x) is stand_in)
    for rule in sorted(set(rules) - set(fields.values())) if fields else ():
        allowed = f"patterns of the state's fields {sorted(fields)}"
        raise ValueError(checks.message(_WHO, "moments", allowed, rule, "'*' matches all fields."))
    scaled = [f for f, rule in fields.items() if rule and formats.FORMATS[rules[rule]].scale]
    by_field = {f: [scales.get((f, path), ()) for path in owners] for f in sorted(scaled)}
    unflatten = jax.tree.structure(params).unflatten
    blocks = {field: replicas.ByBlock(unflatten(x)) for field, x in by_field.items()}
    return StoreState(jnp.zeros((), jnp.int32), codes, blocks, low)


class _Entry(NamedTuple):
    """An array of the stored state.

    Attributes:
      path: the path of the array in the state.
      codes: the codes, or an array that is not encoded.
      kind: the format of the codes; ``None`` for an array that is not encoded.
      key: the array's field and the path of its param, if the array has scales.
      scales: f32, the scales of the array's blocks.
    """

    path: Path
    codes: jax.Array
    kind: formats.Format | None
    key: tuple[str, Path] | None
    scales: jax.Array | None


def _entries(state: PyTree, scales: Scales) -> Iterator[_Entry]:
    """Yield the arrays of a stored state, with their formats and scales."""
    table = {(x[0].key, x[2:]): y for x, y in jax.tree_util.tree_leaves_with_path(scales)}
    for path, codes in jax.tree_util.tree_leaves_with_path(state):
        keys = ((trees.path_name(path[:i]), path[i:]) for i in range(len(path) + 1))
        key = next((key for key in keys if key in table), None)
        kinds = (x for x in formats.FORMATS.values() if key or not x.scale)
        kind = next((x for x in kinds if x.dtype == codes.dtype), None)
        yield _Entry(path, codes, kind, key, table[key] if key else None)


def _decoded(state: PyTree, scales: Scales) -> PyTree:
    """Return the state in f32, for ``inner``."""
    arrays = [
        x.codes if x.kind is None else x.kind.decode(x.codes, x.scales)
        for x in _entries(state, scales)
    ]
    return jax.tree.structure(state).unflatten(arrays)


def _require_blocks(state: StoreState) -> None:
    """Refuse shards whose blocks do not match the scales, if the types show a mismatch.

    If a block were sharded, its shards would share one scale, and with ``check_vma=False`` each
    device would overwrite the scale with another number.
    """
    allowed = "sharded only along dimensions without blocks, in a shard_map of your own"
    hint = "Use on_mesh, make_train_step(param_specs=...), or moments='bfloat16' without blocks."
    for x in _entries(state.inner_state, state.scales):
        if x.scales is not None:
            ok = formats.scales_of(x.codes.shape) == x.scales.shape
            ok &= axes.varying(x.codes) <= axes.varying(x.scales)
            checks.require(ok, _WHO, "arrays of 8 bits", trees.path_name(x.path), allowed, hint)


def _noise_of(steps: jax.Array, params: PyTree) -> Noise:
    """Return a function from an array's path and shape to the array's noise and a salt.

    Arrays of the same param share the noise, because a hash costs as much as the rest of a step.
    """
    owners = {path: jnp.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}
    made: dict[Path, jax.Array] = {}

    def noise(path: Path, shape: tuple[int, ...]) -> tuple[jax.Array, str]:
        start = next((i for i in range(len(path) + 1) if owners.get(path[i:]) == shape), 0)
        owner = path[start:]
        if owner not in made:
            made[owner] = formats.draw(formats.seed_of(steps, owner), shape)
        return made[owner], trees.path_name(path[:start])

    return noise


def _encoded(state: PyTree, like: PyTree, scales: Scales, noise: Noise) -> Coded:
    """Return the codes and scales of a state, in the formats of the codes ``like``."""
    new_scales = dict[Any, jax.Array | None]()
    arrays, treedef = jax.tree.flatten(state)
    for i, (old, x) in enumerate(zip(_entries(like, scales), arrays, strict=True)):
        if old.kind is not None:
            wide = x.astype(jnp.float32)
            arrays[i], new_scales[old.key] = old.kind.encode(wide, *noise(old.path, x.shape))
    codes = treedef.unflatten(arrays)
    return codes, jax.tree_util.tree_map_with_path(lambda x, _: new_scales[x[0].key, x[2:]], scales)
