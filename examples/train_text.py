"""Train a small transformer to predict the next character of Python's standard library.

In f16 with a dynamic loss scale, on four devices (emulated on a CPU), four batches to an optimizer
step. At the end it counts what its step and the plain one send, and draws the loss.

    python examples/train_text.py [--calls 800] [--output runs/text]
"""

import argparse
import pathlib
import sysconfig
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import boostax

DEVICES, WINDOW = 4, 4
BATCH, LENGTH = 32, 64  # windows of text a call; characters in each
VOCABULARY, WIDTH, HEADS, DEPTH = 128, 96, 4, 2
CHARACTERS, HELD_OUT = 4_000_000, 200_000

# --- the data: a stream of characters as tokens


def read_text():
    """Return tokens to train on and tokens held out, the most common characters of the library."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
    text = ""
    for file in sorted(library.rglob("*.py")):
        if skip.isdisjoint(file.relative_to(library).parts):
            text += file.read_text("utf8", errors="replace")
        if len(text) > CHARACTERS:
            break
    codes = np.frombuffer(text[:CHARACTERS].encode("utf-32-le"), np.uint32)
    characters, counts = np.unique(codes, return_counts=True)
    common = np.sort(characters[np.argsort(-counts)][: VOCABULARY - 1])
    # Token 0 represents every rarer character.
    places = np.searchsorted(common, codes).clip(max=len(common) - 1)
    tokens = np.where(common[places] == codes, places + 1, 0).astype(np.int32)
    return tokens[:-HELD_OUT], tokens[-HELD_OUT:]


def make_batch(tokens, call):
    """Return random windows of the text, which depend on the call alone."""
    starts = np.random.default_rng(call).integers(len(tokens) - LENGTH, size=(BATCH, 1))
    windows = tokens[starts + np.arange(LENGTH + 1)]
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


# --- the model: a decoder in plain JAX, its layers stacked for one lax.scan


def init_params(key):
    """Return the params, all f32."""
    keys = iter(jax.random.split(key, 8))
    normal = lambda scale, *shape: scale * jax.random.normal(next(keys), shape)  # noqa: E731
    layer = {
        "qkv": normal(WIDTH**-0.5, DEPTH, WIDTH, 3 * WIDTH),
        "out": normal(WIDTH**-0.5, DEPTH, WIDTH, WIDTH),
        "up": normal(WIDTH**-0.5, DEPTH, WIDTH, 4 * WIDTH),
        "down": normal((4 * WIDTH) ** -0.5, DEPTH, 4 * WIDTH, WIDTH),
        "attention_norm": jnp.ones((DEPTH, WIDTH)),
        "mlp_norm": jnp.ones((DEPTH, WIDTH)),
    }
    return {
        "characters": normal(0.3, VOCABULARY, WIDTH),
        "positions": normal(0.3, LENGTH, WIDTH),
        "layers": layer,
        "norm": jnp.ones(WIDTH),
        # A small head starts the loss at log(128), that of knowing nothing.
        "head": normal(0.02, WIDTH, VOCABULARY),
    }


def normalize(x, scale):
    """Divide by the root mean square over the width."""
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def block(stream, layer):
    """Add causal self-attention and a perceptron to the stream."""
    batch, length, _ = stream.shape
    qkv = normalize(stream, layer["attention_norm"]) @ layer["qkv"]
    query, key, value = jnp.moveaxis(qkv.reshape(batch, length, 3, HEADS, -1), 2, 0)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    stream = stream + mixed.reshape(stream.shape) @ layer["out"]
    hidden = jax.nn.gelu(normalize(stream, layer["mlp_norm"]) @ layer["up"])
    return stream + hidden @ layer["down"], None


def loss_fn(params, batch):
    """Return the mean cross-entropy in nats per character."""
    tokens = batch["inputs"]
    stream = params["characters"][tokens] + params["positions"][: tokens.shape[1]]
    stream, _ = jax.lax.scan(block, stream, params["layers"])
    logits = normalize(stream, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


# --- the step, by boostax and by hand


def make_optimizer(calls):
    """Return what one would use without boostax: clipping, then AdamW with warmup and a cosine."""
    steps = calls // WINDOW
    rate = optax.warmup_cosine_decay_schedule(4e-4, 4e-3, max(1, steps // 10), steps + 1, 4e-4)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))


def make_step(calls, mesh):
    """Return the train step: a scaler around a window around the reduction and the optimizer."""
    tx = optax.chain(boostax.all_reduce("data"), make_optimizer(calls))
    tx = boostax.accumulate(tx, WINDOW, axis_name="data")
    # The scale tries to grow more often than the default: the run is short.
    tx = boostax.dynamic_loss_scale(tx, growth_interval=20, axis_name="data")
    # O1: matrix products in f16, everything else in f32.
    return boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name="data", policy="O1")


def plain_step(calls, loss):
    """Return the same optimizer step as one writes it in jit: a scan over the window's batches."""
    tx = make_optimizer(calls)

    def step(params, opt_state, batches):
        def add(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, batch)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
        grads = jax.tree.map(lambda g: g / WINDOW, total)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(step, donate_argnums=(0, 1)), tx


def print_audits(step, state, calls, batch, mesh):
    """Print what an optimizer step and the plain one send and hold, as XLA compiled them."""

    def typed(tree, *spec, lead=()):
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        make = lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype, sharding=where)  # noqa: E731
        return jax.tree.map(make, tree)

    plain, tx = plain_step(calls, boostax.policy("O1").wrap(loss_fn))
    whole = typed(state.params), typed(jax.eval_shape(tx.init, state.params))
    found = {
        "jit, lax.scan over the batches": boostax.audit(
            plain, *whole, typed(batch, None, "data", lead=(WINDOW,))
        ),
        "boostax, this run": boostax.audit(step, state, batch, calls=WINDOW),
    }
    print(f"\n{'an optimizer step, as compiled':<32}{'reduced':>9}{'sent':>11}{'temporaries':>13}")
    for name, audit in found.items():
        sent, held = audit.per_step(audit.wire_bytes) / 1e6, audit.temporary_bytes / 1e6
        print(f"{name:<32}{audit.reductions:>7.2f} N{sent:>8.2f} MB{held:>10.1f} MB")
    print(
        f"N: the {found['boostax, this run'].params:,} params; bytes of one of {mesh.size} devices"
    )


# --- the run


def draw(rows, judged, path):
    """Draw the loss of every call, the held-out loss and the loss scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    losses = np.array([row["loss"] for row in rows])
    ends = np.arange(1, len(losses) + 1)
    width = max(1, len(losses) // 30)
    smooth = np.convolve(losses, np.full(width, 1 / width), "valid")
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 5.2), sharex=True, height_ratios=[3, 1], constrained_layout=True
    )
    above.plot(ends, losses, color="C0", alpha=0.25, linewidth=0.8)
    above.plot(
        ends[width // 2 :][: len(smooth)],
        smooth,
        color="C0",
        label=f"training, mean of {width} calls",
    )
    above.plot(*zip(*judged, strict=True), "o-", color="C1", label="held out")
    above.set(ylabel="nats per character", title="The next character, f16 on four devices")
    above.legend(frameon=False)
    below.step(ends, [row["loss_scale"] for row in rows], where="post", color="C2")
    below.set_yscale("log", base=2)
    below.set(xlabel="call", ylabel="loss scale")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main():
    """Train, print the progress and the audits, save the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=800, help="of the step, a batch each")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/text"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_num_cpu_devices", DEVICES)

    training, held_out = read_text()
    judge_on = [make_batch(held_out, call) for call in range(16)]
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((DEVICES,), ("data",), auto, devices=jax.devices()[:DEVICES])
    step = make_step(options.calls, mesh)
    state = step.init(init_params(jax.random.key(0)))
    judge = jax.jit(loss_fn)
    print(f"{len(training):,} characters, {DEVICES} x {jax.devices()[0].device_kind}", flush=True)

    rows, judged, begun = [], [], time.monotonic()
    for call in range(1, options.calls + 1):
        state, metrics = step(state, make_batch(training, call))
        # Read at once: emulated devices that get many calls ahead may wait for each other forever.
        rows.append(metrics := {name: float(x) for name, x in metrics.items()})
        if call == 1 or call % 100 == 0 or call == options.calls:
            loss = float(np.mean([judge(state.params, batch) for batch in judge_on]))
            judged.append((call, loss))
            print(
                f"call {call:>5}  loss {metrics['loss']:.3f}  held out {loss:.3f}  "
                f"scale {metrics['loss_scale']:g}  skipped "
                f"{metrics['skipped']:g}  {call / (time.monotonic() - begun):.0f} calls/s",
                flush=True,
            )
    draw(rows, judged, options.output / "loss.png")
    print_audits(step, state, options.calls, make_batch(training, 0), mesh)
    print(f"the loss: {options.output / 'loss.png'}")


if __name__ == "__main__":
    main()
