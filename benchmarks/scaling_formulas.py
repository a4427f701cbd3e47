"""What every technique sends and keeps on one device, as formulas of the replicas and the leaves.

A formula lists the collectives of a step, each with the bytes of its operand, the longest chain of
those that wait for each other, and the bytes of the state. ``tests/test_scaling.py`` traces the
transformations and finds the same. Params and gradients are f32, the optimizer is Adam.
"""

import math
from collections.abc import Sequence

from scaling_sends import Cost, Over, Send

Shape = tuple[int, ...]
Model = Sequence[Shape]
FLOAT, BLOCK = 4, 256
# Leaves of less than 64 KiB are packed, up to 8 MiB together; or 4 and 64 KiB in each slice.
SMALL, TOGETHER = 2**14, 2**21


def entries(model: Model) -> int:
    """How many params there are."""
    return sum(map(math.prod, model))


def adam(model: Model) -> int:
    """Two moments and a count."""
    return 2 * FLOAT * entries(model) + 4


def flat(n: int) -> Over:
    """All replicas on one axis."""
    return Over(("data",), n)


def exchanged(over: Over, nbytes: int) -> Send:
    """A slice to everyone; of two replicas each sends the other its half alone."""
    return over("ppermute", nbytes // 2) if over.replicas == 2 else over("all_to_all", nbytes)


def all_reduce(model: Model, n: int) -> Cost:
    """A sum for each leaf."""
    sends = [flat(n)("psum", FLOAT * math.prod(shape)) for shape in model]
    return Cost(sends, sends[:1], adam(model), 0)


def all_reduce_half(model: Model, n: int) -> Cost:
    """In 2 bytes: the slices of each parcel exchanged, and those of the sum gathered."""
    sends: list[Send] = []
    for columns in map(math.prod, slices(model, n)):
        chain = [exchanged(flat(n), 2 * n * columns), flat(n)("all_gather", 2 * columns)]
        sends += chain
    return Cost(sends, chain, adam(model), 0)


def adasum(model: Model, n: int, within: int = 1) -> Cost:
    """Slices exchanged, a sum of scalars for each level of the tree, slices gathered."""
    leaves, across = len(model), n // within
    host, total = Over(("host",), within), flat(n)
    far = Over(("data",), across)
    if within > 1:
        total = Over(("data", "host"), n)
    columns = [math.prod(shape) for shape in slices(model, n)]
    agreed = [host("pmax", 4 * leaves)] if within > 1 else []
    agreed.append(far("all_gather", 4 * leaves))
    sums: list[Send] = []
    nodes = across
    while nodes > 1:
        first, last = nodes == across, nodes == 2
        sums.append(total("psum", FLOAT * leaves * (4 * (nodes // 2) + first + last)))
        nodes = math.ceil(nodes / 2)
    sends = [*agreed, *sums]
    near: list[Send] = []
    for size in columns:
        near = [host("reduce_scatter", FLOAT * n * size)] if within > 1 else []
        deliver = [far("all_gather", FLOAT * size)]
        if within > 1:
            deliver.append(host("all_gather", FLOAT * across * size))
        sends += [*near, exchanged(far, FLOAT * across * size), *deliver]
    return Cost(sends, [*near, *agreed, *sums, *deliver], adam(model), 4)


def sparse(model: Model, n: int, density: float) -> Cost:
    """Values and places gathered from all; places in 2 bytes where a leaf has up to 65536."""
    chosen = [_share(density, math.prod(shape)) for shape in model]
    narrow = [math.prod(shape) <= 2**16 for shape in model]
    few = sum(k for k, small in zip(chosen, narrow, strict=True) if small)
    messages = ((FLOAT, sum(chosen)), (2, few), (4, sum(chosen) - few))
    sends = [flat(n)("all_gather", size * _tiles(count)) for size, count in messages if count]
    return _coded(model, n, sends)


def threshold(model: Model, n: int, capacity: float) -> Cost:
    """The same, and how many had no place: beside the share held back, and kept."""
    cost = sparse(model, n, capacity)
    told = flat(n)("psum", 2 * FLOAT)
    return cost._replace(
        sends=[*cost.sends[:-1], told], chain=[cost.chain[0], told], own=cost.own + 4
    )


def _tiles(count: int) -> int:
    """A long message ends with a tile of a TPU."""
    return _up(count, 2048) if count >= 2**16 else count


def random_k(model: Model, n: int, density: float) -> Cost:
    """One sum of the values, whose places are known: rows of large leaves, entries of the others.

    The state has a key.
    """
    values = rest = 0
    for shape in model:
        size, wanted = math.prod(shape), density * math.prod(shape[:-1])
        if size > SMALL and abs(max(1, round(wanted)) - wanted) <= 0.1 * wanted:
            values += round(wanted) * shape[-1]
        else:
            rest += size
    if rest:
        width = min(max(1000, round(1 / density)), rest)
        values += math.ceil(rest / width) * _share(density, width)
    return _coded(model, n, [flat(n)("psum", FLOAT * values)], kept=8)


def int8(model: Model, n: int, block: int = 4096) -> Cost:
    """Codes of each parcel, and all scales, one a row: to the replica that sums, and back."""
    found = [rows(shape, block) for shape in slices(model, n, by_leaf=False)]
    messages = [height * width for height, width in found]
    return _coded(model, n, _two_shots(n, messages, FLOAT * sum(height for height, _ in found)))


def int16(model: Model, n: int) -> Cost:
    """A scale per leaf agreed, integers exchanged and their sums gathered."""
    agreed = flat(n)("pmax", 4 * len(model))
    sends = [agreed]
    for shape in slices(model, n, by_leaf=False):
        size = 2 * math.prod(shape)
        pair = [exchanged(flat(n), n * size), flat(n)("all_gather", size)]
        sends += pair
    return _coded(model, n, sends)._replace(chain=[agreed, *pair])


def sign(model: Model, n: int, two_shot: bool, block: int = 4096) -> Cost:
    """Bits and a magnitude per row: all to all replicas, or to the one that sums and back."""
    cuts = slices(model, n if two_shot else 1, by_leaf=False)
    found = [rows(shape, block, multiple=8) for shape in cuts]
    messages = [height * width // 8 for height, width in found]
    sizes = FLOAT * sum(height for height, _ in found)
    if two_shot:
        return _coded(model, n, _two_shots(n, messages, sizes))
    return _coded(model, n, [flat(n)("all_gather", x) for x in [*messages, sizes]])


def _two_shots(n: int, messages: Sequence[int], sizes: int) -> list[Send]:
    """Of the slices of each parcel, and of all scales together."""
    each = [*messages, sizes]
    there = [exchanged(flat(n), n * nbytes) for nbytes in each]
    return there + [flat(n)("all_gather", nbytes) for nbytes in each]


def power_sgd(model: Model, n: int, rank: int) -> Cost:
    """One factor of every matrix, in turn; the rest as a mean."""
    sides = [(math.prod(shape[:-1]), math.prod(shape[-1:])) for shape in model]
    coded = [
        len(shape) > 1 and 2 * rank * sum(side) <= math.prod(side)
        for shape, side in zip(model, sides, strict=True)
    ]
    chosen = [side for side, use in zip(sides, coded, strict=True) if use]
    factors = [FLOAT * rank * sum(side[i] for side in chosen) for i in (0, 1)]
    sends = [flat(n)("psum", nbytes, 0.5) for nbytes in factors]
    dense = [math.prod(shape) for shape, use in zip(model, coded, strict=True) if not use]
    sends += [flat(n)("psum", FLOAT * size) for size in dense]
    kept = sum(factors) + 8 * len(chosen)
    return _coded(model, n, sends, kept=kept, residual=entries(model) - sum(dense))


def partial_average(model: Model, n: int, partitions: int) -> Cost:
    """The leaves of one partition in each step."""
    sends = [send._replace(share=1 / partitions) for send in all_reduce(model, n).sends]
    return Cost(sends, sends[:1], adam(model), 4)


def local_updates(model: Model, n: int, every: int) -> Cost:
    """A mean of the way from the anchor, now and then."""
    mean = all_reduce(model, n)
    return mean._replace(own=FLOAT * entries(model) + 8, every=every)


def dim_reduce(model: Model, n: int, k: int, narrow: bool = False) -> Cost:
    """Coordinates, energy and loss, and the loss of one try; the basis is the memory."""
    coordinates, loss = flat(n)("psum", FLOAT * k), flat(n)("psum", FLOAT)
    sends = [coordinates, flat(n)("psum", 2 * FLOAT), loss, loss]
    basis = FLOAT * k * entries(model)
    if narrow:
        scales = sum(
            math.prod(shape[:-1]) * math.ceil(math.prod(shape[-1:]) / 64) for shape in model
        )
        basis = k * entries(model) + FLOAT * k * scales
    return Cost(sends, [coordinates, loss], 0, basis + FLOAT * (k * k + 3 * k) + 27)


def dynamic_loss_scale(model: Model, n: int) -> Cost:
    """One number agreed before the mean."""
    return _before(all_reduce(model, n), [flat(n)("pmin", 4)], 33)


def group_loss_scale(model: Model, n: int, groups: int, count_every: int = 100) -> Cost:
    """Two numbers per group agreed before the mean, three more where entries are counted."""
    seen, counts = flat(n)("pmax", 8 * groups), flat(n)("pmax", 12 * groups, 1 / count_every)
    cost = _before(all_reduce(model, n), [seen], 29 * groups + 17)
    return cost._replace(sends=[*cost.sends, counts])


def accumulate(model: Model, n: int, every: int) -> Cost:
    """The mean of a window; the sums are each replica's own."""
    return all_reduce(model, n)._replace(own=FLOAT * entries(model) + 13, batches=every)


def _before(cost: Cost, first: list[Send], own: int) -> Cost:
    return cost._replace(sends=first + cost.sends, chain=first + cost.chain, own=own)


def _coded(
    model: Model,
    n: int,
    sends: list[Send],
    kept: int = 0,
    residual: int | None = None,
) -> Cost:
    """With two sums of a number, a residual and the share held back."""
    agreed = flat(n)("psum", FLOAT)
    residual = entries(model) if residual is None else residual
    own = FLOAT * residual + kept + 4
    return Cost([*sends, agreed, agreed], [agreed, agreed], adam(model), own)


def _share(density: float, of: int) -> int:
    return max(1, min(of, math.ceil(density * of - 1e-6)))


def _up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def slices(model: Model, n: int, by_leaf: bool = True) -> list[Shape]:
    """The slice of each parcel: of a leaf in its own shape, or the columns of small ones packed."""
    found: list[Shape] = []
    packs: list[list[int]] = []
    room = 0
    small, together = max(SMALL, 2**10 * n), max(TOGETHER, 2**14 * n)
    for shape in model:
        size = math.prod(shape)
        fits = [i for i, length in enumerate(shape) if _up(length, n) <= 1.01 * length]
        if len(shape) > 1 and size >= small and fits:
            dim = fits[0]
            found.append((*shape[:dim], math.ceil(shape[dim] / n), *shape[dim + 1 :]))
            continue
        if size > room:
            packs.append([])
            room = together
        packs[-1].append(math.ceil(size / n))
        room -= size
    return found + [(1, _blocked(widths) if by_leaf else sum(widths)) for widths in packs]


def _blocked(widths: Sequence[int]) -> int:
    """In whole blocks for each leaf, the longest that add 0.4% or 64 columns."""
    spare, block = max(sum(widths) // 256, 64), BLOCK
    while sum(_up(width, block) - width for width in widths) > spare and block > 1:
        block //= 2
    return sum(_up(width, block) for width in widths)


def rows(shape: Shape, block: int, multiple: int = 1) -> tuple[int, int]:
    """Height and width of a slice as rows: a leaf's own, or made of what there is."""
    size, last = math.prod(shape), shape[-1]
    parts = math.ceil(last / block)
    height = size // last * parts
    if last >= 128 and 16 * (-height % multiple) <= height:
        return _up(height, multiple), math.ceil(last / parts)
    width = 256
    while 2 * width <= min(block, 1024) and size >= 64 * multiple * width:
        width *= 2
    return _up(math.ceil(size / width), multiple), width
