"""A stored leaf computed by the Pallas kernel, interpreted on the CPU, and as its program says.

A script of its own, because XLA:CPU contracts a product and a sum differently in two programs, but
for vectors of ``--xla_cpu_max_isa=AVX``.
"""

import os

os.environ.setdefault("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] += " --xla_cpu_max_isa=AVX --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import boostax
from boostax.precision import entries, kernel, masters, store

EACH = {"*mu": "int8", "*nu": "log8"}
OPTIMIZERS = {
    "adamw": (optax.adamw(1e-2), {"params": "stochastic", "moments": EACH}),
    "remainder": (optax.adamw(1e-2), {"params": "remainder", "moments": "log8"}),
    "lion": (optax.lion(1e-3), {"params": "stochastic", "moments": "log8"}),
    "bfloat16": (optax.sgd(1e-2, 0.9), {"moments": "bfloat16"}),
}
CASES = [
    *((name, None, (64, 256)) for name in OPTIMIZERS),
    # The state of whole params is sharded over the replicas.
    ("adamw", jax.P(), (64, 256)),
    ("adamw", jax.P(None, "model"), (64, 256)),
    ("adamw", jax.P(None, "data", "model"), (3, 64, 256)),
    # Two steps of the grid along a row.
    ("adamw", None, (32, 768)),
]


def ends(name, spec, shape):
    """Params and state after three steps, compiled as JAX compiles for a CPU at present."""
    inner, options = OPTIMIZERS[name]
    normal = lambda i: np.random.default_rng(i).normal(size=shape)  # noqa: E731
    draw = lambda i: jnp.asarray(normal(i), jnp.float32)  # noqa: E731
    params = {"w": draw(0), "b": jnp.ones(3)}
    params = jax.tree.map(lambda p: p if name == "bfloat16" else p.astype(jnp.bfloat16), params)
    grads = [{"w": draw(i + 1).at[..., :2, :].set(0), "b": jnp.ones(3)} for i in range(3)]
    if spec is None:
        tx = store(inner, **options)
    else:
        mesh = jax.make_mesh((2, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
        places = {"w": spec, "b": jax.P()}
        params = jax.device_put(params, {k: jax.NamedSharding(mesh, x) for k, x in places.items()})
        tx = store(optax.chain(boostax.all_reduce(), inner), **options)
        tx = boostax.on_mesh(tx, params, axis_name="data", shard_optimizer=spec == jax.P())
        grads = [jax.tree.map(lambda x: jnp.stack([x, x]), g) for g in grads]
    state = tx.init(params)
    step = jax.jit(lambda g, s, p: boostax.apply_gradients(tx, g, s, p))
    for g in grads:
        params, state = step(g, state, params)
    # Bits of f32 that are never rounded tell the order of operations of a compiler.
    exact = masters(params, state)["w"] if name == "remainder" else ()
    return exact, jax.device_get((params, state))


def stored(ends):
    """Return params and codes, without remainders."""
    params, state = ends
    return params, state._replace(low=())


def main():
    # As much as four blocks of 128 take in two steps, 12 bytes an element: six are cut in threes.
    kernel._MEMORY = 4 * 128 * 2 * 32 * 12
    plain = [ends(*case) for case in CASES]
    # From here on a leaf is compiled for a CPU as for a TPU.
    run, calls = kernel.apply, []

    def interpreted(*args):
        calls.append(args[1])
        return run(*args, interpret=True)

    kernel.apply = interpreted
    jax.interpreters.mlir.register_lowering(entries.primitive(), entries._on_tpu, platform="cpu")
    jax.clear_caches()
    for case, wanted in zip(CASES, plain, strict=True):
        calls.clear()
        found = ends(*case)
        assert calls and (calls[0] == case[2]) == (case[1] is None), case
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6, atol=1e-8)
        jax.tree.map(np.testing.assert_array_equal, stored(found[1]), stored(wanted[1]))
        print(case, "shards of", calls[0])


if __name__ == "__main__":
    main()
