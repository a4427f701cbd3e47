"""The documented meaning of a chain, in float64 NumPy."""

import math
from typing import Any

import numpy as np

from fuzzing.cases import AVERAGES, DTYPES, GROUPS, RING, TERMS, Case, counts

Tree = dict[str, np.ndarray]
# Beyond it the squares of gradients do not add up in f32.
USABLE = 2.0**48


class Reference:
    """A run: every call changes ``params`` and what is reported."""

    def __init__(self, case: Case, params: Tree):
        self.case, self.replicas, self.gates = case, case.replicas, case.gates
        self.params = {name: x.astype(np.float64) for name, x in params.items()}
        self.scale, self.clean, self.tolerance = case.scale, 0, case.backoff[0]
        self.last_finite, self.skipped, self.growths, self.backoffs = False, 0, 0, 0
        self.count, self.windows = 0, 0
        self.sums: list[Tree] = []
        # Of each term of the loss.
        self.weights = np.zeros((case.replicas, 1 + case.terms))
        zeros = lambda: {name: np.zeros_like(x) for name, x in self.params.items()}  # noqa: E731
        self.steps, self.first, self.second = 0, zeros(), zeros()
        self.residual = [zeros() for _ in range(case.replicas)]
        # Accepted norms, and how many were refused.
        self.norms: list[float] = []
        self.refused = 0
        # Params after each applied step.
        self.path: list[Tree] = []

    def reported(self) -> dict[str, float]:
        """Of the metrics of the library those that it must agree with."""
        found: dict[str, float] = {}
        scale = "loss_scale_" if len(self.gates) + bool(self.case.median) > 1 else ""
        if "scale" in self.gates:
            found |= {f"{scale}applied": self.last_finite, f"{scale}skipped": self.skipped}
            found |= {"loss_scale": self.scale, "scale_growths": self.growths}
            found |= {"scale_backoffs": self.backoffs}
        if "window" in self.gates:
            found |= {"micro_step": self.count, "optimizer_steps": self.windows}
        if self.case.median:
            found["gate_skipped" if self.gates else "skipped"] = self.refused
        return found

    def received(self, x: Tree, weights: np.ndarray) -> tuple[list[Tree], Any]:
        """The scaled gradients of each replica, and its weights: of a loss, or as handed over."""
        case = self.case
        if not case.loss:
            wide = {n: v[:, 0].astype(np.float64) * self.scale for n, v in x.items()}
            replicas = range(self.replicas)
            grads = [{n: self._rounded(v[r]) for n, v in wide.items()} for r in replicas]
            return grads, weights[:, :1]
        grads = [
            [
                {name: self._slope(name, v[r, i].astype(np.float64)) for name, v in x.items()}
                for i in range(case.microbatches)
            ]
            for r in range(self.replicas)
        ]
        if not (case.weighted or case.terms):
            return [_mean(of_one, np.ones(len(of_one))) for of_one in grads], None
        # Weighted by tokens within a replica, and over replicas so that their mean is that of all.
        found: list[Tree] = [{} for _ in grads]
        terms = counts(case, weights)
        for n in x:
            tokens = terms[self._term(n)]
            for new, of_one, own in zip(found, grads, tokens, strict=True):
                mean = _mean([{n: g[n]} for g in of_one], own)[n]
                share = own.sum() * self.replicas / (tokens.sum() or 1)
                new[n] = mean * share if share else np.zeros_like(mean)
        totals = np.array([tokens.sum() / self.replicas for tokens in terms])
        return found, np.stack([totals] * self.replicas)

    def _term(self, name: str) -> int:
        return TERMS[name] if self.case.terms else 0

    def _slope(self, name: str, x: np.ndarray) -> np.ndarray:
        if self.case.quadratic:
            return (self.params[name] - x) * self.scale * self.number
        return self._rounded(x * self.scale * self.number)

    def _rounded(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(DTYPES[self.case.dtype]).astype(np.float64)

    def call(self, x: Tree, weights: np.ndarray, number: float) -> None:
        """One step."""
        self.number = number
        with np.errstate(all="ignore"):
            self.loss = self._loss(x, weights)
            grads, own = self.received(x, weights)
            active = [n for n in self.params if GROUPS[n] >= self.depth()]
            self._enter(self.gates, [{n: g[n] for n in active} for g in grads], own)

    def _loss(self, x: Tree, weights: np.ndarray) -> float:
        """The mean over all rows, or over all tokens."""
        terms, loss = counts(self.case, weights), 0.0
        for n, v in x.items():
            wide = (self.params[n] - v.astype(np.float64)) ** 2
            of_rows = wide.reshape(*v.shape[:2], -1).sum(-1) / 2
            own = terms[self._term(n)]
            tokens = own if self.case.weighted or self.case.terms else np.ones_like(own)
            loss += float(np.where(tokens > 0, tokens * of_rows, 0).sum() / (tokens.sum() or 1))
        return loss * self.number

    def depth(self) -> int:
        """How many groups are frozen."""
        frozen = self.case.frozen
        return frozen[min(self.steps, len(frozen) - 1)] if frozen else 0

    def _enter(self, gates: tuple[str, ...], grads: list[Tree], weights: Any) -> bool:
        """Through these gates; whether a step was taken."""
        if not gates:
            if self.case.median and not self._usual(grads):
                self.refused += 1
                return False
            self._optimize(grads)
            return True
        if gates[0] == "scale":
            grads = [{n: g / self.scale for n, g in own.items()} for own in grads]
            fine = all(np.all(np.abs(g) < USABLE) for own in grads for g in own.values())
            taken = fine and self._enter(gates[1:], grads, weights)
            self._adjust(fine)
            return taken
        if not self.count:
            self.sums = [{n: np.zeros_like(g) for n, g in own.items()} for own in grads]
            self.weights = np.zeros((self.replicas, 1 + self.case.terms))
        for r, own in enumerate(grads):
            of_terms = weights[r] if self.case.weighted else np.ones(1)
            self.weights[r] += of_terms
            for n, g in own.items():
                weight = of_terms[self._term(n)]
                if weight:
                    self.sums[r][n] = self.sums[r][n] + weight * g
        self.count += 1
        every = self.case.every
        if self.count < every[min(self.windows, len(every) - 1)]:
            return False
        return self._close(gates[1:])

    def _close(self, gates: tuple[str, ...]) -> bool:
        count, self.count = self.count, 0
        factors = [{"mean": 1 / count, "sum": 1.0}.get(self.case.normalize)]
        if self.case.weighted:
            if not self.weights.sum():
                return False
            factors = [self.replicas / x if x else 0.0 for x in self.weights.sum(0)]
        grads = [{n: s * factors[self._term(n)] for n, s in own.items()} for own in self.sums]
        taken = self._enter(gates, grads, None)
        self.windows += taken
        return taken

    def _adjust(self, fine: bool) -> None:
        self.last_finite = fine
        self.skipped += not fine
        if not self.case.dynamic:
            return
        interval, growth = self.case.growth
        hysteresis, backoff, least = self.case.backoff
        if not fine:
            self.clean, self.tolerance = 0, max(self.tolerance - 1, 0)
            if not self.tolerance:
                lower = max(self.scale * backoff, least)
                self.backoffs += lower < self.scale
                self.scale = lower
            return
        self.clean += 1
        if self.clean >= interval:
            self.clean, self.tolerance = 0, hysteresis
            if self.scale * growth <= 2.0**24:
                self.scale *= growth
                self.growths += 1

    def _reduced(self, grads: list[Tree]) -> Tree:
        case = self.case
        if case.reduction == "top_k" and not case.conserving:
            sent = []
            for own, held in zip(grads, self.residual, strict=True):
                sent.append({})
                for n, g in own.items():
                    wanted = g + held[n]
                    largest = np.argsort(-np.abs(wanted.ravel()), kind="stable")
                    chosen = np.zeros(wanted.size, bool)
                    chosen[largest[: math.ceil(0.25 * wanted.size)]] = True
                    sent[-1][n] = np.where(chosen.reshape(wanted.shape), wanted, 0)
                    held[n] = wanted - sent[-1][n]
            grads = sent
        if case.reduction == "bfloat16":
            narrow = DTYPES["bfloat16"]
            grads = [{n: g.astype(narrow).astype(np.float64) for n, g in o.items()} for o in grads]
        mean, summed = _mean(grads, np.ones(self.replicas)), case.reduction == "sum"
        return {n: g * self.replicas for n, g in mean.items()} if summed else mean

    def _usual(self, grads: list[Tree]) -> bool:
        """Whether the norm is one of the usual; recorded if it is."""
        squares = [sum(float((g * g).sum()) for g in own.values()) for own in grads]
        norm, limit = math.sqrt(sum(squares) / len(squares)), math.inf
        if len(self.norms) >= RING // 2:
            ring = np.array(self.norms[-RING:])
            center = np.median(ring)
            limit = center + 6 * max(1.4826 * np.median(abs(ring - center)), 0.01 * center)
        usual = math.isfinite(norm) and norm <= limit
        if usual:
            self.norms.append(norm)
        return usual

    def _optimize(self, grads: list[Tree]) -> None:
        case = self.case
        g = self._reduced(grads)
        if case.clip is not None:
            norm = math.sqrt(sum(float((x * x).sum()) for x in g.values()))
            g = {n: x * min(1.0, case.clip / norm) if norm else x for n, x in g.items()}
        if case.decay == "coupled":
            g = {n: x + 0.1 * self.params[n] for n, x in g.items()}
        rate, step = case.rate(self.steps), self.steps + 1
        for n, x in g.items():
            self.first[n], self.second[n], change = self._direction(n, x, step)
            if case.decay == "decoupled":
                change = change + 0.1 * self.params[n]
            self.params[n] = self.params[n] - rate * change
        self.steps += 1
        self.path.append(dict(self.params))

    @property
    def average(self) -> Tree:
        """The mean of the path with the weights that its kind gives; the params without one."""
        kind = self.case.average[0] if self.case.average else ""
        given = AVERAGES.get(kind, {})
        taken = self.path[given.get("start", 0) :: given.get("every", 1)][-given.get("size", 0) :]
        if not (kind and taken):
            return self.params
        return _mean(taken, given.get("decay", 1.0) ** np.arange(len(taken))[::-1])

    def _direction(self, n: str, g: np.ndarray, step: int) -> tuple[np.ndarray, ...]:
        first, second, kind = self.first[n], self.second[n], self.case.optimizer
        if kind == "sgd":
            return first, second, g
        if kind in ("momentum", "nesterov"):
            first = 0.9 * first + g
            return first, second, first if kind == "momentum" else g + 0.9 * first
        first, second = 0.9 * first + 0.1 * g, 0.99 * second + 0.01 * g * g
        mean, square = first / (1 - 0.9**step), second / (1 - 0.99**step)
        return first, second, mean / (np.sqrt(square) + 1e-2)

    def move(self, kind: str, argument: int) -> None:
        """What happens between two calls."""
        if kind == "reshard":
            share = _cover(self.replicas, argument)
            spread = lambda trees: [  # noqa: E731
                {n: sum(c * t[n] for c, t in zip(row, trees, strict=True) if c) for n in trees[0]}
                for row in share
            ]
            self.residual = spread(self.residual)
            if self.sums and self.count:
                self.sums, self.weights = spread(self.sums), share @ self.weights
                if self.case.weighted or self.case.reduction == "sum":
                    # All tokens, or all gradients of a sum, count alike, on however many replicas
                    # they were summed.
                    more = self.replicas / argument
                    self.sums = [{n: s * more for n, s in own.items()} for own in self.sums]
                    self.weights = self.weights * more
            self.replicas = argument
        elif kind == "nest":
            # Only a closed window moves to another chain.
            self.move("flush", 0)
            self.gates = self.gates[::-1]
        elif kind == "flush" and self.count and "window" in self.gates:
            with np.errstate(all="ignore"):
                taken = self._close(self.gates[self.gates.index("window") + 1 :])
                if self.gates[0] == "scale":
                    self.last_finite |= taken


def _mean(trees: list[Tree], weights: np.ndarray) -> Tree:
    """Weighted; what has no weight counts as nothing, whatever it is."""
    shares = weights / (weights.sum() or 1)
    counted = [(share, tree) for share, tree in zip(shares, trees, strict=True) if share]
    return {n: sum((s * t[n] for s, t in counted), np.zeros_like(x)) for n, x in trees[0].items()}


def _cover(old: int, new: int) -> np.ndarray:
    """``[new, old]``: how much of each new replica's part of the interval the old ones have."""
    low = np.maximum(np.arange(new)[:, None] / new, np.arange(old)[None] / old)
    high = np.minimum(np.arange(1, new + 1)[:, None] / new, np.arange(1, old + 1)[None] / old)
    share = np.maximum(high - low, 0) * new
    return np.where(share > 1e-9, share, 0)
