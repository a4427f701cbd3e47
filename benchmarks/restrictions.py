"""Which forms of a step take which models as they are, on which meshes.

Twelve models, written without a thought of a mesh, take a step of four micro-batches on eight
emulated devices in each form of ``benchmarks/forms.py``. A form takes a model if it compiles and
its gradient is that of one big batch on one device.
"""

from collections.abc import Callable
from typing import Any

import forms
import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from boostax.train.step import TrainStep

COUNT, ROWS, LENGTH, WIDTH = 4, 64, 8, 32
# The sizes of a mesh, the axes that split the batch, and the axis that shards params.
MESHES: dict[str, tuple[dict[str, int], tuple[str, ...], str | None]] = {
    "data 8": ({"data": 8}, ("data",), None),
    "data 4 x model 2": ({"data": 4, "model": 2}, ("data",), "model"),
    "data 2 x fsdp 4": ({"data": 2, "fsdp": 4}, ("data", "fsdp"), "fsdp"),
}
CHOSEN = "jit and lax.scan", "reduced=", "shard_map by hand", "boostax"
SQUARE = (WIDTH, WIDTH)


def perceptron(p: Any, x: Any) -> jax.Array:
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]


def attention(p: Any, x: Any) -> jax.Array:
    q, k, v = ((x @ p[name]).reshape(*x.shape[:2], 4, -1) for name in "qkv")
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["o"]


def recurrent(p: Any, x: Any) -> jax.Array:
    step = lambda h, x: (jnp.tanh(x @ p["w"] + h @ p["v"]), None)  # noqa: E731
    return lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[0]


def experts(p: Any, x: Any) -> jax.Array:
    """Send each row to the expert of its largest logit, sorted by expert."""
    rows = x.reshape(-1, WIDTH)
    chosen = jnp.argmax(rows @ p["router"], -1)
    order = jnp.argsort(chosen)
    found = lax.ragged_dot(rows[order], p["experts"], jnp.bincount(chosen, length=4))
    return found[jnp.argsort(order)].reshape(x.shape)


def normalized(p: Any, x: Any) -> jax.Array:
    """Normalize by the statistics of the batch."""
    x = x @ p["w"]
    return (x - x.mean((0, 1))) * lax.rsqrt(x.var((0, 1)) + 1e-5) @ p["v"]


def convolved(p: Any, x: Any) -> jax.Array:
    layout = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, p["w"], (1,), "SAME", dimension_numbers=layout)


def dropped(p: Any, x: Any) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, (WIDTH,))
    return jnp.where(keep, jnp.tanh(x @ p["w"]), 0) @ p["v"]


def low(p: Any, x: Any) -> jax.Array:
    w, v, x = (y.astype(jnp.bfloat16) for y in (p["w"], p["v"], x))
    return (jnp.tanh(x @ w) @ v).astype(jnp.float32)


def of_nnx(model: nnx.Module) -> tuple[Any, Callable[[Any, Any], jax.Array]]:
    """Return the params of an NNX model, and the model as a function."""
    graph, params = nnx.split(model)
    return params, lambda p, x: nnx.merge(graph, p)(x)


def drawn(shapes: Any, seed: int) -> Any:
    draw = np.random.default_rng(seed).normal
    fill = lambda x: np.float32(draw(size=x)) / len(x) ** 2  # noqa: E731
    return jax.tree.map(fill, shapes, is_leaf=lambda x: isinstance(x, tuple))


def models() -> dict[str, tuple[Any, Callable[[Any, Any], jax.Array], str]]:
    """Return params, model and kind of rows: ``vectors``, ``tokens`` or ``alike`` vectors."""
    two, rngs = {"w": SQUARE, "v": SQUARE}, nnx.Rngs(0)
    routed = {"router": (WIDTH, 4), "experts": (4, *SQUARE)}
    plain: dict[str, tuple[Any, Callable[[Any, Any], jax.Array], str]] = {
        "perceptron, biases": (two | {"b": (WIDTH,)}, perceptron, "vectors"),
        "attention": (dict.fromkeys("qkvo", SQUARE), attention, "vectors"),
        "tied head": ({"w": SQUARE}, lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T, "vectors"),
        "recurrent scan": (two, recurrent, "vectors"),
        "dropout": (two, dropped, "vectors"),
        "bf16": (two, low, "vectors"),
        "embedding": (two, lambda p, x: p["w"][x] @ p["v"], "tokens"),
        "convolution": ({"w": (3, *SQUARE)}, convolved, "vectors"),
        "experts, ragged_dot": (routed, experts, "vectors"),
        "batch statistics": (two, normalized, "alike"),
    }
    found = {name: (drawn(shapes, 0), *rest) for name, (shapes, *rest) in plain.items()}
    heads = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
    found["nnx.Embed"] = (*of_nnx(nnx.Embed(WIDTH, WIDTH, rngs=rngs)), "tokens")
    found["nnx.MultiHeadAttention"] = (*of_nnx(heads), "vectors")
    return found


def batch_of(kind: str) -> Any:
    if kind == "tokens":
        return np.random.default_rng(1).integers(0, WIDTH, (ROWS, LENGTH))
    rows = drawn((ROWS, LENGTH, WIDTH), 1) * 9
    # Micro-batches of equal rows have the statistics of the whole batch.
    return np.tile(rows[:1], (ROWS, 1, 1)) if kind == "alike" else rows


def stepped(program: forms.Program, params: Any, batch: Any) -> Any:
    """Return the params behind an optimizer step of a form; its optimizer begins with zeros."""
    run, types, calls = program
    if isinstance(run, TrainStep):
        return run(run.init(params), batch)[0].params
    rows = types[2]
    state = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype, device=t.sharding), types[1])
    stacked = batch.reshape(-1, calls if calls > 1 else len(rows), *batch.shape[1:]).swapaxes(0, 1)
    cut = stacked if rows.ndim > batch.ndim else batch
    params = jax.device_put(params, jax.tree.map(lambda t: t.sharding, types[0]))
    for x in stacked if calls > 1 else [cut]:
        params, state = run(params, state, jax.device_put(x, rows.sharding))
    return params


def cells(name: str, mesh: str) -> harness.Row:
    """Return what became of each form of a model on a mesh."""
    params, model, kind = models()[name]
    params = jax.device_get(params)
    batch, (sizes, axis, over) = batch_of(kind), MESHES[mesh]
    loss = lambda p, x: jnp.mean((model(p, x) - 1) ** 2)  # noqa: E731
    devices = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    cut = lambda x: over is not None and x.shape[-1] % sizes[over] == 0  # noqa: E731
    specs = jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), over) if cut(x) else P(), params)
    case = forms.Case(loss, optax.sgd(1.0), devices, axis, params, specs, batch, COUNT)
    wanted = jax.device_get(jax.grad(loss)(params, batch))
    most = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
    row: harness.Row = {"model": name, "mesh": mesh}
    for form in CHOSEN:
        try:
            new = jax.device_get(stepped(forms.FORMS[form](case), params, batch))
        except Exception as error:
            row[form] = forms.reason(error)
            continue
        off = jax.tree.map(lambda p, q, g: np.abs(p - q - g).max() / most, params, new, wanted)
        same = max(jax.tree.leaves(off)) < (3e-2 if name == "bf16" else 1e-5)
        row[form] = "yes" if same else "another gradient"
    print(row, flush=True)
    return row


def main() -> None:
    harness.on_cpu()
    rows = [cells(name, mesh) for mesh in MESHES for name in models()]
    of = lambda mesh, form: [row[form] == "yes" for row in rows if row["mesh"] == mesh]  # noqa: E731
    said = lambda found: f"{sum(found)} of {len(found)}"  # noqa: E731
    counts = [{"mesh": mesh, **{form: said(of(mesh, form)) for form in CHOSEN}} for mesh in MESHES]
    bars = [
        harness.Bar(
            f"models that boostax does not take, {mesh}", of(mesh, "boostax").count(False), 0
        )
        for mesh in MESHES
    ]
    title = "Which forms of a step take which models"
    harness.report("restrictions", title, [("Models taken", counts), ("Models", rows)], bars)


if __name__ == "__main__":
    main()
