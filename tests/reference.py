"""What the reductions should give, in float64 NumPy."""

import numpy as np

EPS = float(np.finfo(np.float32).eps)
# Of a pair: two products and a sum, and coefficients of three dot products, a ratio and a sum.
ROUNDINGS = 8


def pair(a, b):
    """AdaSum of two gradients; of a zero and another, the other."""
    dot, aa, bb = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    weight = lambda norm: 1.0 if norm == 0 else 1 - dot / (2 * norm)  # noqa: E731
    return weight(aa) * a + weight(bb) * b


def adasum(rows):
    """Of any number of gradients: neighbours first, an odd one out passes up."""
    return carry(pair, list(wide(rows)))


def assert_adasum(result, leaves, tolerance=None):
    """Each leaf within a tolerance relative to the largest input: the roundings of each level."""
    for actual, rows in zip(result, leaves, strict=True):
        levels = max(1, (len(rows) - 1).bit_length())
        bound = (tolerance or min(1e-6, ROUNDINGS * levels * EPS / 2)) * abs(rows).max()
        np.testing.assert_allclose(actual, adasum(rows), rtol=0, atol=bound)


def adasum_tree(leaves):
    """One pair of coefficients for all leaves ``(replicas, ...)`` together."""
    leaves = [wide(x) for x in leaves]
    flat = adasum(np.concatenate([x.reshape(len(x), -1) for x in leaves], 1))
    ends = np.cumsum([x[0].size for x in leaves])[:-1]
    return [part.reshape(x.shape[1:]) for part, x in zip(np.split(flat, ends), leaves, strict=True)]


def adasum_error(rows):
    """How far rounding to f32 at every level may move a result, in the norm of the whole.

    A projection of b on a turns with a: an error of a is amplified by |b| / |a|, which is large
    only where a itself is what cancellation left.
    """

    def merged(first, second):
        (a, error_a), (b, error_b) = first, second
        norm_a, norm_b = np.linalg.norm(a), np.linalg.norm(b)
        with np.errstate(divide="ignore", invalid="ignore"):
            error = error_a * (1.5 + norm_b / norm_a) + error_b * (1.5 + norm_a / norm_b)
        error += ROUNDINGS * EPS * max(norm_a, norm_b)
        return pair(a, b), error if np.isfinite(error) else np.inf

    return carry(merged, [(x, 0.0) for x in wide(rows)])[1]


def mean(rows):
    return wide(rows).mean(0)


def orthogonality(leaves):
    """``|sum of g|^2 / sum of |g|^2`` over all leaves ``(replicas, ...)``."""
    flat = np.concatenate([wide(x).reshape(len(x), -1) for x in leaves], 1)
    return (flat.sum(0) ** 2).sum() / (flat**2).sum()


def carry(merge, rows):
    """Merge neighbours until one is left."""
    while len(rows) > 1:
        merged = [merge(*rows[i : i + 2]) for i in range(0, len(rows) - 1, 2)]
        rows = merged + rows[len(rows) // 2 * 2 :]
    return rows[0]


def wide(rows):
    return np.asarray(rows, np.float64)
