"""What a random run consists of, as data: drawn from a seed, shrunk field by field, printed."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

SHAPES = {"a": (8, 3), "b": (8,), "c": ()}
# A leaf without elements, which some cases have.
GROUPS = {"a": 0, "b": 1, "c": 2, "e": 2}
# The term of a loss in which a leaf is, if the loss has two.
TERMS = {"a": 0, "b": 0, "c": 1, "e": 0}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": jnp.bfloat16}
MAPPED = ("checked", "unchecked", "pmap")
MESHES = ("mesh", "zero", "fsdp", "hsdp")
# Codecs of which it is checked that nothing is lost: what has moved and what waits are the sum.
CONSERVING = ("int8", "threshold", "top_k_blocks")
# What is given to an average, by its kind.
AVERAGES = {"ema": {"decay": 0.8}, "window": {"start": 1}, "lawa": {"size": 2, "every": 2}}
# A gradient whose square overflows, and one that is only unusual.
LARGE, SPIKE = 1e36, 300.0
# The number of norms that the gate records.
RING = 4
Move = tuple[int, Literal["save", "reshard", "nest", "flush"], int]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run. The defaults are the plainest one.

    Attributes:
      seed: of gradients, weights and first params.
      calls: of the step.
      placement: ``"single"``, one of ``MAPPED`` or of ``MESHES``.
      replicas: at first.
      gates: from the outside in, of ``"scale"`` and ``"window"``.
      dynamic: whether the scale moves.
      scale: the first one.
      growth: ``(growth_interval, growth_factor)``.
      backoff: ``(hysteresis, backoff_factor, min_scale)``.
      every: lengths of the windows, the last for good.
      schedule: whether they are given as a function of the applied steps.
      normalize: see ``boostax.accumulate``.
      dtype: of gradients, or of what the loss computes in.
      loss: whether gradients come from a loss, or are handed over.
      microbatches: of the loss.
      face: ``"step"`` for ``apply_gradients``, ``"update"``, ``"chain"`` that hides the gate,
        ``"train"`` for ``make_train_step``, or ``"nnx"`` for ``boostax.nnx.Optimizer``.
      reduction: of the replicas' gradients.
      clip: the largest norm, or ``None``.
      decay: ``"none"``, ``"coupled"`` or ``"decoupled"``.
      optimizer: ``"sgd"``, ``"momentum"``, ``"nesterov"`` or ``"adam"``.
      rates: learning rates at the first and at the tenth applied step, linear between.
      frozen: depth of every applied step, the last for good; ``()`` without freezing.
      magnitude: of the gradients.
      bad: ``(call, replica, value)``; values that make a gradient unusable.
      moves: ``(call, kind, argument)``: what happens before that call.
      average: ``(kind, gates around it)`` of an average of the params, or ``()``.
      median: whether ``median_gate`` of the examples skips unusual norms.
      stored: whether the optimizer is in ``store``, which keeps f32 params and state as they are.
      told: whether each part names the axis, or the step around them alone.
      empty: whether there is a leaf without elements.
      numbers: whether the loss is multiplied by a number of each call.
      terms: whether the loss is two terms with counts of their own.
      shards: whether a window reduces in each call, before a mean.
    """

    seed: int = 0
    calls: int = 4
    placement: str = "single"
    replicas: int = 1
    gates: tuple[str, ...] = ()
    dynamic: bool = True
    scale: float = 1.0
    growth: tuple[int, float] = (2000, 2.0)
    backoff: tuple[int, float, float] = (1, 0.5, 1.0)
    every: tuple[int, ...] = (2,)
    schedule: bool = False
    normalize: str = "mean"
    dtype: str = "float32"
    loss: bool = False
    microbatches: int = 1
    face: str = "step"
    reduction: str = "mean"
    clip: float | None = None
    decay: str = "none"
    optimizer: str = "sgd"
    rates: tuple[float, float] = (0.1, 0.1)
    frozen: tuple[int, ...] = ()
    magnitude: float = 1.0
    bad: tuple[tuple[int, int, float], ...] = ()
    moves: tuple[Move, ...] = ()
    average: tuple[Any, ...] = ()
    median: bool = False
    stored: bool = False
    told: bool = True
    empty: bool = False
    numbers: bool = False
    terms: bool = False
    shards: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the params."""
        return SHAPES | ({"e": (0, 3)} if self.empty else {})

    @property
    def weighted(self) -> bool:
        """Whether calls have weights."""
        return "window" in self.gates and self.normalize == "weight"

    @property
    def quadratic(self) -> bool:
        """Whether gradients depend on the params."""
        return self.loss and self.dtype == "float32" and self.reduction == "mean"

    @property
    def conserving(self) -> bool:
        """Whether what waits in the residuals is counted as moved."""
        by_shard = self.reduction == "top_k" and self.placement == "hsdp"
        return self.reduction in CONSERVING or by_shard

    def rate(self, step: int) -> float:
        """Of the optimizer's step of this number, from 0."""
        first, last = self.rates
        return first + (last - first) * min(step, 10) / 10

    def script(self, found: str) -> str:
        """A program that runs it."""
        plain = vars(Case())
        given = [f"    {name}={x!r}," for name, x in vars(self).items() if x != plain[name]]
        head = ["# PYTHONPATH=.:tests python this.py", *(f"# {x}" for x in found.splitlines())]
        head += ["from math import inf, nan\n", "import jax\n"]
        head += ['jax.config.update("jax_num_cpu_devices", 8)\n', "from fuzzing.cases import Case"]
        head += ["from fuzzing.compare import check\n", "case = Case("]
        return "\n".join([*head, *given, ")", "check(case)", 'print("no difference")', ""])


def draw(seed: int) -> Case:
    """The run of a seed."""
    rng = np.random.default_rng(seed)

    def one_of(*options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    calls = int(rng.integers(5, 10))
    placement = one_of("single", *MAPPED, *MESHES, *MESHES)
    inside, around = ("scale", "window"), ("window", "scale")
    gates = one_of(inside, around, inside, around, inside, around, ("scale",), ("window",), ())
    moves: list[Move] = []
    for kind, share in (("save", 0.3), ("reshard", 0.35), ("nest", 0.3)):
        if chance(share):
            moves.append((int(rng.integers(1, calls)), kind, one_of(1, 2, 3, 4, 6, 8)))
    if chance(0.3):
        moves.append((calls, "flush", 0))
    values = (np.nan, np.inf, -np.inf, LARGE, SPIKE, SPIKE)
    count = range(one_of(0, 1, 1, 2, 4))
    bad = [(int(rng.integers(calls)), int(rng.integers(8)), one_of(*values)) for _ in count]
    return tidy(
        Case(
            seed=seed,
            calls=calls,
            placement=placement,
            replicas=one_of(2, 3, 4, 5, 6, 7, 8),
            gates=gates,
            dynamic=chance(0.8),
            scale=2.0 ** int(rng.integers(0, 15)),
            growth=(one_of(2, 3, 2000), one_of(2.0, 4.0)),
            backoff=(one_of(1, 2), one_of(0.5, 0.25), one_of(0.125, 1.0)),
            every=tuple(int(x) for x in rng.integers(1, 4, one_of(1, 1, 3))),
            schedule=chance(0.3),
            normalize=one_of("mean", "mean", "sum", "weight", "weight"),
            dtype=one_of("float32", "float32", "float16", "bfloat16"),
            loss=chance(0.5),
            microbatches=one_of(1, 2),
            face=one_of("step", "train", "train", "update", "chain", "nnx"),
            reduction=one_of("mean", "mean", "mean", "sum", "bfloat16", "top_k", *CONSERVING),
            clip=one_of(None, 0.5, 5.0),
            decay=one_of("none", "coupled", "decoupled"),
            optimizer=one_of("sgd", "momentum", "nesterov", "adam", "adam"),
            rates=one_of((0.1, 0.1), (0.1, 0.01), (0.3, 0.3)),
            frozen=tuple(int(x) for x in rng.integers(0, 3, 10)) if chance(0.2) else (),
            magnitude=one_of(0.1, 1.0, 10.0),
            bad=tuple(bad),
            moves=tuple(sorted(moves)),
            average=(one_of(*AVERAGES), int(rng.integers(3))) if chance(0.3) else (),
            median=one_of(False, False, True, True),
            stored=chance(0.25),
            told=chance(0.5),
            empty=chance(0.3),
            numbers=chance(0.3),
            terms=chance(0.2),
            shards=chance(0.4),
        )
    )


def tidy(case: Case) -> Case:
    """The same without what has no meaning in it."""
    new: dict[str, Any] = {}
    single, placement = case.placement == "single", case.placement
    places = {"train": ("single", "checked", "unchecked", *MESHES), "nnx": ("single", *MESHES)}
    if case.face in places and not (case.loss and placement in places[case.face]):
        new["face"] = "step"
    if case.face == "chain" and case.frozen:
        # Freezing inside a chain is refused (``tests/test_order_in_loops.py``).
        new["face"] = "step"
    if case.face == "nnx":
        # It is told the axis; the state of a module cannot be resharded in place; and a variable
        # says that its array is sharded, which XLA leaves whole if it has no elements.
        new |= {"told": True, "empty": case.empty and single}
    if not case.loss:
        new |= {"numbers": False, "terms": False}
    elif case.terms:
        # In less than f32 the counts would round the gradient.
        new |= {"dtype": "float32", "normalize": "weight"}
    scaled, windows = "scale" in case.gates, "window" in case.gates
    counts = {"single": (1,), "fsdp": (2, 4, 8), "hsdp": (2, 4)}.get(placement, tuple(range(1, 9)))
    nearest = lambda n: min(counts, key=lambda x: abs(x - n))  # noqa: E731
    new["replicas"] = nearest(case.replicas)
    bound = placement in MESHES or new.get("face", case.face) == "train"
    new["told"] = new.get("told", case.told) or single or not bound
    if not scaled:
        # The gate skips values that are not finite, too.
        left = [x for x in case.bad if x[2] != LARGE] if case.median else []
        new |= {"scale": 1.0, "bad": tuple(left)}
    elif case.loss and case.dtype == "float16":
        # Near the end of f16 a program overflows or does not, as its compiler fuses.
        new["scale"] = min(case.scale, 256.0)
    if single:
        new["reduction"] = "mean"
    if case.reduction != "mean" or case.median:
        # The gate needs the norms of local gradients.
        new["shards"] = False
    if (not case.gates and not case.loss) or case.reduction == "top_k":
        # Without a gate an optimizer computes in the dtype of what it is given; and half of the
        # entries of a tie would be sent.
        new["dtype"] = "float32"
    if len(case.every) > 1:
        new["schedule"] = True
    if placement not in ("single", "checked", "unchecked"):
        new["frozen"] = ()
    case = dataclasses.replace(case, **new)
    whole = case.face in ("step", "train", "nnx") and not case.frozen
    if case.conserving:
        plain = {"clip": None, "decay": "none", "optimizer": "sgd", "rates": (0.1, 0.1)}
        case = dataclasses.replace(case, **plain, frozen=())
    if case.conserving or case.frozen:
        # What waits in residuals is no param yet; what is frozen would be missing.
        case = dataclasses.replace(case, average=())
    if case.average:
        kind, around = case.average
        case = dataclasses.replace(case, average=(kind, min(around, len(case.gates))))
    allowed = {
        "save": True,
        "reshard": not single and not case.frozen and case.face != "nnx",
        "nest": scaled and windows and whole,
        "flush": windows and whole,
    }
    moves = [
        (min(at, case.calls), kind, nearest(argument) if kind == "reshard" else 0)
        for at, kind, argument in case.moves
        if allowed[kind]
    ]
    bad = {x for x in case.bad if x[0] < case.calls}
    return dataclasses.replace(case, moves=tuple(moves), bad=tuple(sorted(bad, key=str)))


def inputs(case: Case, call: int, replicas: int) -> tuple[dict[str, np.ndarray], np.ndarray, float]:
    """``(x, weights, number)`` of a call: leaves ``[replicas, microbatches, *shape]``."""
    rng = np.random.default_rng([case.seed, 1, call])
    count = case.microbatches if case.loss else 1
    draw = lambda shape: case.magnitude * rng.standard_normal((replicas, count, *shape))  # noqa: E731
    with np.errstate(over="ignore"):
        x = {n: np.asarray(draw(shape), DTYPES[case.dtype]) for n, shape in case.shapes.items()}
        for at, replica, value in case.bad:
            if at == call:
                name = list(SHAPES)[at % len(SHAPES)]
                x[name].reshape(replicas, -1)[replica % replicas, 0] = value
    # Some have no weight at all.
    weights = rng.integers(0, 5, (replicas, count)).astype(np.float32)
    if case.placement in MESHES and not case.loss:
        # Handed to global arrays, a weight is that of all replicas.
        weights[:] = weights[:1]
    return x, weights, 2.0 ** int(rng.integers(-1, 2)) if case.numbers else 1.0


def counts(case: Case, weights: Any) -> list[Any]:
    """Of each term of the loss, or the weights of all."""
    return [weights, (3 * weights + 1) % 4] if case.terms else [weights]


def first_params(case: Case) -> dict[str, np.ndarray]:
    """In f32."""
    rng = np.random.default_rng([case.seed, 0])
    draw = lambda shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {name: draw(shape) for name, shape in case.shapes.items()}
