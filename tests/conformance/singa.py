"""Apache SINGA's ``opt`` and ``DistOpt`` in NumPy and float64, and random programs of both.

The classes are ``python/singa/opt.py``; what boostax has for each is in ``ours``.
"""

import collections
import functools
import itertools
import random
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from reducing import mesh_of

import boostax

# Optimizers.


def exponential_decay(init_value, decay_steps, decay_rate, staircase=False):
    def at(step):
        return init_value * decay_rate ** (step // decay_steps if staircase else step / decay_steps)

    return at


def constant(value):
    return lambda step: value


class Optimizer:
    def __init_subclass__(cls, **hyper):
        cls.hyper = hyper

    def __init__(self, *args, nesterov=False, **named):
        values = self.hyper | dict(zip(self.hyper, args, strict=False)) | named
        self.nesterov = nesterov
        self.schedules = {k: x if callable(x) else constant(x) for k, x in values.items()}
        self.step_counter = 0.0
        # Of every kind of moment, by the parameters' names.
        self.states = collections.defaultdict(dict)

    def at(self, name):
        return self.schedules[name](self.step_counter)

    def is_off(self, name):
        """Whether the first value is zero, by which SINGA judges a schedule."""
        return self.schedules[name](0) == 0

    def __call__(self, params, grads):
        after = {}
        for name, p in params.items():
            g = grads[name]
            if not self.is_off("weight_decay"):
                g = g + self.at("weight_decay") * p
            after[name] = p - self.at("lr") * self.direction(name, g)
        self.step_counter += 1
        return after

    def moved(self, kind, name, old, new):
        """A moment of a param: ``old`` times what it was, and ``new``."""
        self.states[kind][name] = old * self.states[kind].get(name, 0.0) + new
        return self.states[kind][name]

    def get_states(self):
        moments = {kind: dict(by_name) for kind, by_name in self.states.items()}
        return {"step_counter": self.step_counter, **moments}


class SGD(Optimizer, lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0):
    def direction(self, name, g):
        if self.is_off("momentum"):
            return g
        momentum = self.at("momentum")
        b = self.moved("moments", name, momentum, (1.0 - self.at("dampening")) * g)
        return g + momentum * b if self.nesterov else b


class RMSProp(Optimizer, lr=0.1, rho=0.9, epsilon=1e-8, weight_decay=0.0):
    def direction(self, name, g):
        rho = self.at("rho")
        v = self.moved("running_average", name, rho, (1.0 - rho) * g**2)
        return g / np.sqrt(v + self.at("epsilon"))


class AdaGrad(Optimizer, lr=0.1, epsilon=1e-8, weight_decay=0.0):
    def direction(self, name, g):
        return g / np.sqrt(self.moved("history", name, 1.0, g**2) + self.at("epsilon"))


class Adam(Optimizer, lr=0.1, beta_1=0.9, beta_2=0.999, epsilon=1e-8, weight_decay=0.0):
    def direction(self, name, g):
        s, b1, b2 = self.step_counter + 1, self.at("beta_1"), self.at("beta_2")
        m = self.moved("m", name, b1, (1.0 - b1) * g)
        v = self.moved("v", name, b2, (1.0 - b2) * g**2)
        # The betas of this step, to the power s: not the product of those so far.
        return m / (1.0 - b1**s) / (np.sqrt(v / (1.0 - b2**s)) + self.at("epsilon"))


OPTIMIZERS = {cls.__name__: cls for cls in (SGD, RMSProp, AdaGrad, Adam)}


def optimizer_of(optimizer):
    """SINGA's, of the arguments that ``draw_optimizer`` returns."""
    given = {k: exponential_decay(*x) if isinstance(x, list) else x for k, x in optimizer.items()}
    return OPTIMIZERS[given.pop("class")](**given)


# Modes of DistOpt. Gradients are by leaf, [workers, ...].


def buckets(sizes, threshold):
    """``backward_and_update`` and its kin: small tensors are fused until they are more."""
    found, small, filled = [], [], 0
    for i in reversed(range(len(sizes))):
        if sizes[i] > threshold:
            found.append([i])
            continue
        small.append(i)
        filled += sizes[i]
        if filled > threshold:
            found.append(small)
            small, filled = [], 0
    return [*found, small] if small else found


def half(row):
    return row.astype(np.float16).astype(np.float64)


def plain(rows):
    return [x.sum(0) for x in rows]


def synch_half(rows, clip=np.inf):
    """The sum is f16 again; SINGA also rounds after each addition, in the order of its ring."""
    return [half(half(np.clip(x, -clip, clip)).sum(0)) for x in rows]


class Sparse:
    """``fusedSparsification``: of each bucket add what was left, choose, keep the rest, add up."""

    def __init__(self, choose, corr, fused):
        self.choose, self.corr, self.buckets = choose, corr, fused
        self.left = [0.0] * len(fused)

    def __call__(self, rows):
        result = list(rows)
        for k, bucket in enumerate(self.buckets):
            wanted = np.concatenate([rows[i].reshape(len(rows[i]), -1) for i in bucket], 1)
            wanted = wanted + self.left[k] if self.corr else wanted
            sent = np.stack([self.choose(row) for row in wanted])
            self.left[k] = wanted - sent
            ends = np.cumsum([rows[i][0].size for i in bucket])
            for i, part in zip(bucket, np.split(sent.sum(0), ends[:-1]), strict=True):
                result[i] = part.reshape(rows[i].shape[1:])
        return result


def top_k(share, row):
    """The largest magnitudes, as SINGA means it; its comparison truncates them to integers."""
    largest = np.argsort(-abs(row), kind="stable")[: int(np.ceil(share * row.size))]
    return np.where(np.isin(np.arange(row.size), largest), row, 0)


def reduction(options, fused):
    """What sums the gradients of all workers in a mode."""
    mode = options["dist_option"]
    if mode.startswith("sparse"):
        reaching = lambda limit, row: np.where(abs(row) >= limit, row, 0)  # noqa: E731
        choose = top_k if mode == "sparseTopK" else reaching
        choose = functools.partial(choose, options.get("spars", 0.05))
        return Sparse(choose, options.get("corr", True), fused)
    if mode == "half":
        clip = options.get("clip_Value", 100.0) if options.get("clipping") else np.inf
        return functools.partial(synch_half, clip=clip)
    return plain


# Programs.

MODES = ("plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold")
SHAPES = [(40,), (5, 7), (3,), (30, 4), (11,), (1,)]
# In elements.
FUSED = 2097152
CLOSE = 1e-12


def draw_optimizer(rng):
    """An optimizer by its arguments; a list is a schedule that decays."""

    def value(x):
        decays = rng.random() < 0.3
        return [x, rng.randint(2, 9), rng.choice([0.6, 0.9]), rng.random() < 0.5] if decays else x

    found = {"class": rng.choice([*OPTIMIZERS]), "lr": value(rng.choice([0.01, 0.05]))}
    found |= {"weight_decay": value(0.05)} if rng.random() < 0.4 else {}
    if found["class"] == "SGD" and rng.random() < 0.7:
        found["momentum"] = value(rng.choice([0.5, 0.9]))
        found |= rng.choice([{}, {"nesterov": True}, {"dampening": value(0.3)}])
    more = {"RMSProp": ["rho"], "Adam": ["beta_1", "beta_2"]}.get(found["class"], [])
    found |= {name: value(rng.choice([0.8, 0.95])) for name in more}
    return found | ({} if found["class"] == "SGD" else {"epsilon": value(rng.choice([1e-8, 0.01]))})


def draw(seed):
    """Workers, shapes, the options of a mode, an optimizer.

    ``half`` has a power of two of workers: SINGA rounds the sum to f16 and boostax the mean, which
    of other numbers are up to two roundings apart.
    """
    rng = random.Random(seed)
    mode = MODES[seed % len(MODES)]
    options = {"dist_option": mode}
    if mode != "plain" and (mode != "half" or rng.random() < 0.5):
        options["threshold"] = rng.choice([0, 9, 45, 10**6])
    if mode == "half" and rng.random() < 0.5:
        options |= {"clipping": True, "clip_Value": rng.choice([0.25, 0.75])}
    if mode.startswith("sparse"):
        share = rng.choice([0.05, 0.1, 0.4] if mode == "sparseTopK" else [0.1, 0.5, 0.9])
        options |= {"spars": share, "corr": rng.random() < 0.7}
    shapes = [rng.choice(SHAPES) for _ in range(rng.randint(1, 5))]
    workers = rng.choice([2, 4, 8]) if mode == "half" else rng.randint(2, 8)
    about = {"seed": seed, "workers": workers, "steps": 6, "shapes": shapes, "options": options}
    return about | {"optimizer": draw_optimizer(rng)}


def data(spec):
    """The first params, and the centres by step and worker."""
    rng, lead = np.random.default_rng(spec["seed"]), (spec["steps"], spec["workers"])
    start = [rng.normal(size=shape) for shape in spec["shapes"]]
    return start, [rng.normal(size=(*lead, *shape)) for shape in spec["shapes"]]


def theirs(spec):
    """The params of each worker after each step; the loss is half the square from its centres."""
    start, centres = data(spec)
    options, workers = spec["options"], spec["workers"]
    fused = buckets([x.size for x in start], options.get("threshold", FUSED))
    partial = options["dist_option"] == "partialUpdate"
    # In a partial update every worker has an optimizer of its own.
    opts = [optimizer_of(spec["optimizer"]) for _ in range(workers if partial else 1)]
    own, reduce, history = [np.stack([p] * workers) for p in start], reduction(options, fused), []
    for step in range(spec["steps"]):
        rows = [p - c[step] for p, c in zip(own, centres, strict=True)]
        if not partial:
            rows = [x[None] / workers for x in reduce(rows)]
        named = lambda leaves, r: dict(enumerate(leaf[r] for leaf in leaves))  # noqa: E731
        each = [opt(named(own, r), named(rows, r)) for r, opt in enumerate(opts)]
        each = each if partial else each * workers
        own = [np.stack([params[i] for params in each]) for i in range(len(own))]
        for i in fused[step % len(fused)] if partial else ():
            own[i][:] = own[i].sum(0) / workers
        history.append(own)
    return history


# boostax.


def scheduled(values):
    """A schedule as Optax has it, of a float count: of an i32 it computes in f32."""
    if not isinstance(values, list):
        return values
    schedule = optax.exponential_decay(*values[:3], staircase=values[3])
    return lambda count: schedule(jnp.asarray(count, float))


def undamped(dampening):
    """Each gradient enters the momentum times 1 - d, the first too: so before the momentum."""
    if callable(dampening):
        return optax.scale_by_schedule(lambda step: 1.0 - dampening(step))
    return optax.scale(1.0 - dampening)


def optax_of(optimizer):
    """The expression of ``docs/coming_from/singa.md``."""
    given = {k: scheduled(x) for k, x in optimizer.items() if k != "class"}
    lr, eps = given.pop("lr"), given.pop("epsilon", 1e-8)
    # Decay is added to a gradient before all else.
    decay = [optax.add_decayed_weights(given.pop(x)) for x in given.keys() & {"weight_decay"}]
    varies = any(map(callable, [*given.values(), eps]))
    make = optax.inject_hyperparams if varies else lambda factory: factory
    match optimizer["class"]:
        case "RMSProp":
            parts = [make(optax.rmsprop)(lr, given["rho"], eps)]
        case "AdaGrad":
            parts = [make(optax.adagrad)(lr, 0.0, eps)]
        case "Adam":
            parts = [make(optax.adam)(lr, given["beta_1"], given["beta_2"], eps)]
        case _ if "momentum" not in given:
            parts = [optax.sgd(lr)]
        case _:
            parts = [undamped(given["dampening"])] if "dampening" in given else []
            parts += [make(optax.trace)(given["momentum"], nesterov=given.get("nesterov", False))]
            parts += [optax.scale_by_learning_rate(lr)]
    return optax.chain(*decay, *parts)


def loss_fn(params, batch):
    """Half the squared distance from the worker's centres, of which it has one."""
    return sum(jnp.sum((p - c[0]) ** 2) / 2 for p, c in zip(params, batch, strict=True))


def ours(spec):
    """The same of boostax, in float64."""
    start, centres = data(spec)
    history = []
    with jax.enable_x64(True), warnings.catch_warnings():
        # Where nothing is kept, which is meant here.
        warnings.filterwarnings("ignore", "[^$]*without error feedback", UserWarning)
        boost, like = boostax.auto({"singa": spec["options"]}), [jnp.asarray(p) for p in start]
        given = {"mesh": mesh_of(data=spec["workers"]), "axis_name": "data"}
        step = boost.make_train_step(loss_fn, optax_of(spec["optimizer"]), like, **given)
        state = step.init(like)
        for i in range(spec["steps"]):
            state, _ = step(state, [jnp.asarray(c[i]) for c in centres])
            own = state.params
            one = not isinstance(own, boostax.PerReplica)
            rows = [np.stack([p] * spec["workers"]) for p in own] if one else own.local
            history.append([np.asarray(p) for p in rows])
    return history


def difference(spec):
    """The largest of a param of a worker after any step."""
    pairs = zip(itertools.chain(*theirs(spec)), itertools.chain(*ours(spec)), strict=True)
    return max(float(abs(x - y).max()) for x, y in pairs)
