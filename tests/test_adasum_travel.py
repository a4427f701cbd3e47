"""How AdaSum travels: what it sends, in every form, with sharded leaves; and what it refuses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from reducing import at_once, mapped, mesh_of, sends, updating
from reducing import correlated as gradients
from reference import assert_adasum

import boostax

MILLION = 2**20


def orthogonality_of(tx):
    """The update and what it recorded."""

    def update(grads):
        updates, state = tx.update(grads, tx.init(grads))
        return updates, state.metrics()

    return update


def emulated(tx, grads):
    """The first replica's result under ``vmap``."""
    return jax.tree.map(lambda x: np.asarray(x[0]), at_once(tx)(grads)[0])


# What it sends.


@pytest.mark.parametrize("replicas", [2, 3, 4, 5, 8])
def test_collectives_do_not_grow_with_the_leaves(replicas):
    """An all-to-all, an all-gather, one for the magnitudes and one per level of the tree."""
    mesh, plain = mesh_of(data=replicas), updating(boostax.adasum("data"))
    expected = 3 + math.ceil(math.log2(replicas))
    for leaves in (1, 12):
        assert len(sends(plain, [100] * leaves, mesh)) == expected
    # In f16 the powers of two of the slices on their way back are one more.
    wires = ({"scope": "tree"}, 0), ({"wire_dtype": "bfloat16"}, 0), ({"wire_dtype": "float16"}, 1)
    for options, more in wires:
        update = updating(boostax.adasum("data", **options))
        assert len(sends(update, [100] * 5, mesh)) == expected + more


def test_buckets_bound_what_is_sent_at_once():
    """At most so many bytes of f32 together; the result is the same."""
    tx = boostax.adasum("data", bucket_bytes=4 * 2500)
    found = sends(updating(tx), [1024] * 3, mesh_of(data=4))
    assert [c.bytes for c in found if c.primitive == "all_to_all"] == [4 * 2048, 4 * 1024]
    leaves = gradients([(1024,)] * 3, replicas=4)
    assert_adasum(emulated(tx, leaves), leaves)


def test_averaging_inside_a_node_first_sends_a_part_across():
    """And is the mean inside, AdaSum across."""
    mesh, specs = mesh_of(dcn=4, ici=2), jax.P(("dcn", "ici"))
    nested = boostax.adasum("dcn", within="ici")
    plain = optax.chain(boostax.all_reduce("ici"), boostax.adasum("dcn"))
    across = {}
    for name, tx in (("nested", nested), ("plain", plain)):
        found = sends(updating(tx), [MILLION // 2, MILLION // 2], mesh, specs)
        across[name] = sum(c.wire_bytes for c in found if "dcn" in c.axes)
    assert across["nested"] == pytest.approx(across["plain"] / 2, rel=0.01)
    leaves = gradients([(6, 5), (), (64,)])
    means = [x.reshape(4, 2, *x.shape[1:]).mean(1, dtype=np.float64) for x in leaves]
    for check in (True, False):
        assert_adasum(mapped(updating(nested), mesh, specs, check_vma=check)(leaves), means)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_half_wire_rounds_and_does_not_overflow(dtype):
    """Every replica and every leaf has a power of two of its own."""
    magnitudes = 10.0 ** np.array([[-30], [20], [6], [0], [-6], [3], [-20], [10]])
    alike = np.array([gradients([(50,)])[0] * m for m in (1e-30, 1e6, 1e20)]).swapaxes(0, 1)
    leaves = [*np.float32(alike.swapaxes(0, 1)), np.float32(gradients([(50,)])[0] * magnitudes)]
    result = emulated(boostax.adasum("data", wire_dtype=dtype), leaves)
    # Rounded once on the way there, once on the way back, and amplified by the tree.
    assert_adasum(result, leaves, 8 * float(jnp.finfo(dtype).eps))


# Sharded leaves.


@pytest.mark.parametrize("check", [True, False])
def test_leaves_sharded_over_another_axis_are_combined_whole(check):
    """Next to leaves that are replicated over it."""
    mesh = mesh_of(data=4, f=2)
    leaves = gradients([(6, 8), (5,), (4, 3), ()], replicas=4)
    # Uneven shards: coefficients of their own would be far off.
    leaves[0][:, 3:] *= 10
    leaves[2][1::2, 2:] *= -5
    specs = [jax.P("data", "f"), jax.P("data"), jax.P("data", "f"), jax.P("data")]
    out_specs = [jax.P("f"), jax.P(), jax.P("f"), jax.P()]
    tx = boostax.adasum("data", shard_axes="f", leaf_metrics=True)
    update = mapped(orthogonality_of(tx), mesh, specs, (out_specs, jax.P()), check_vma=check)
    result, told = update(leaves)
    assert_adasum(result, leaves)
    shards = [reference.adasum(leaves[0][:, part]) for part in (slice(3), slice(3, 6))]
    assert abs(np.concatenate(shards) - result[0]).max() > 0.01 * abs(leaves[0]).max()
    for i, rows in enumerate(leaves):
        each = reference.orthogonality([rows])
        assert float(told[f"orthogonality/{i}"]) == pytest.approx(each, rel=1e-6)
    if check:  # Otherwise nobody can tell which leaves are replicated, and count once.
        overall = reference.orthogonality(leaves)
        assert float(told["orthogonality"]) == pytest.approx(overall, rel=1e-6)
    with pytest.raises(ValueError, match="adasum: scope must be 'leaf' with shard_axes"):
        boostax.adasum("data", shard_axes="f", scope="tree")


# Diagnostics.


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_orthogonality_is_the_ratio_of_squared_norms(replicas):
    tx = boostax.adasum("data", leaf_metrics=True)
    start = tx.init({"a": jnp.zeros(3), "b": [jnp.zeros(2)]}).metrics()
    assert set(start) == {"orthogonality", "orthogonality/a", "orthogonality/b/0"}
    assert all(x == -1 for x in start.values())
    # In steps of 1e-25 and 1e18 the squares leave the range of f32.
    cases = {str(m): gradients([(12,), (3, 4)], replicas, magnitude=m) for m in (1, 1e-25, 1e18)}
    cases["apart"] = [cases["1"][0], cases["1e-25"][1]]
    cases["parallel"] = [np.stack([np.float32([1, -2, 3] * 4)] * replicas)] * 2
    cases["orthogonal"] = [np.eye(replicas, 12, dtype=np.float32) * np.float32(1e9)] * 2
    cases["zero"] = [np.zeros((replicas, 12), np.float32)] * 2
    exact = {"parallel": replicas, "orthogonal": 1, "zero": 1}
    shaped = [[x[0], x[1].reshape(replicas, 3, 4)] for x in cases.values()]
    stacked = [np.stack(leaf) for leaf in zip(*shaped, strict=True)]
    for keep in (True, False):
        tx = boostax.adasum("data", leaf_metrics=keep)
        update = jax.vmap(orthogonality_of(tx), axis_name="data")
        told = jax.device_get(jax.jit(jax.vmap(update))(stacked)[1])
        parts = {"orthogonality": slice(None)}
        parts |= {f"orthogonality/{i}": slice(i, i + 1) for i in range(2) if keep}
        assert set(told) == set(parts)
        for i, (case, leaves) in enumerate(cases.items()):
            for name, part in parts.items():
                expected = exact.get(case) or reference.orthogonality(leaves[part])
                np.testing.assert_allclose(told[name][i], expected, rtol=1e-6, err_msg=case)


# Identities and refusals.


def test_a_single_replica_gets_its_gradients_back_bit_for_bit():
    tree = {"a": np.float32([1e-42, 1e38, -0.0, 3.3]), "b": np.float16([[6e-8], [65504]])}
    tree["c"] = jnp.asarray([1e-30, 3.0], jnp.bfloat16)
    stacked = jax.tree.map(lambda x: x[None], tree)
    for scope in ("leaf", "tree"):
        tx = boostax.adasum("data", scope=scope)
        for check in (True, False):
            result = mapped(updating(tx), mesh_of(data=1), check_vma=check)(stacked)
            jax.tree.map(np.testing.assert_array_equal, result, tree)
        jax.tree.map(np.testing.assert_array_equal, emulated(tx, stacked), tree)


def test_complex_leaves_are_pairs_of_reals():
    real, imaginary = gradients([(3, 7), (3, 7)], replicas=5)
    result = emulated(boostax.adasum("data"), real + 1j * imaginary)
    assert result.dtype == np.complex64
    assert_adasum([np.stack([result.real, result.imag], -1)], [np.stack([real, imaginary], -1)])


def test_what_does_not_fit_is_refused_by_name(mesh):
    with pytest.raises(ValueError, match=r"adasum: shard_axes .*'f'.* not bound"):
        mapped(updating(boostax.adasum("data", shard_axes="f")), mesh)(gradients([(4,)]))
    for names in ({"within": "data"}, {"within": "a", "shard_axes": "a"}, {"shard_axes": "data"}):
        match = r"adasum: axis_name, within and shard_axes must be .* different names, got"
        with pytest.raises(ValueError, match=match):
            boostax.adasum(("data", "b"), **names)
