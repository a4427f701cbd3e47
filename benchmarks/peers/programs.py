"""Training programs as data: drawn from a seed, made smaller, and what both sides are given.

NumPy and the standard library alone, because the interpreter of MindSpore imports it, too.
"""

import copy
import random

import numpy as np

LEVELS = {"O0": [], "O1": ["less_bn", "grad_freeze"], "O2": ["less_bn", "grad_freeze", "adasum"]}
SWITCHES = (
    "less_bn", "grad_freeze", "adasum", "grad_accumulation", "dim_reduce", "loss_scale_group",
)  # fmt: skip
# The networks of mindspore_trajectories.py. Widths of 16 are centralized, others are not; the third
# has twelve buckets of MindSpore's freezing: the stem, five blocks of two convolutions, the head.
RECORDED = {
    "mlp": {"kind": "mlp", "sizes": [12, 16, 16, 20, 16, 16, 4]},
    "tiny": {"kind": "mlp", "sizes": [6, 10, 4]},
    "resnet": {"kind": "resnet", "sizes": [16, 4, 5, 4]},
}
ROWS = 8
IMAGE = 8


def draw(seed):
    """One program; only what MindSpore itself runs on a CPU."""
    rng = random.Random(seed)
    forms = {"plain": 4, "accumulate": 4, "freeze": 4, "less_bn": 2, "level": 2, "dim_reduce": 3}
    form = rng.choices([*forms, "group"], [*forms.values(), 1])[0]
    spec = {"seed": seed, "steps": 5 if form == "group" else rng.randint(6, 10)}
    spec["network"] = network(rng, form)
    spec |= {"grouped": rng.random() < 0.25, "level": rng.choice([*LEVELS]), "mode": "manual"}
    spec |= switches(rng, form, spec["level"])
    spec["settings"] = settings(rng, active(spec), spec["steps"])
    # A group of the normalised head alone leaves the group that params were given in empty.
    head = {"less_bn", "grad_freeze"} <= {*active(spec)} and spec["settings"]["less_bn"]["fn_flag"]
    spec["grouped"] = spec["grouped"] and not head
    spec["manager"] = manager(rng, active(spec))
    spec["optimizer"] = optimizer(rng, spec["steps"], spec["manager"], active(spec))
    looks = spec["manager"] and spec["manager"][0] != "FixedNoDrop"
    bad = rng.sample(range(spec["steps"]), rng.randint(0, 3)) if looks else []
    return spec | {"bad": {str(step): rng.choice(["inf", "nan"]) for step in sorted(bad)}}


def network(rng, form):
    kinds = {"less_bn": ["resnet", "mlp"], "level": ["resnet", "mlp", "lenet"], "group": ["mlp"]}
    kind = rng.choice(kinds.get(form, ["mlp", "mlp", "layernorm", "lenet", "resnet"]))
    if kind == "resnet":
        sizes = [rng.choice([8, 16]), 4, rng.randint(1, 3), 4]
    elif kind == "lenet":
        sizes = [rng.choice([4, 6]), rng.choice([8, 16]), rng.choice([10, 16]), 4]
    else:
        least, most = (4, 6) if form == "group" else (1, 5)
        hidden = [rng.choice([6, 10, 16]) for _ in range(rng.randint(least, most) - 1)]
        sizes = [rng.choice([6, 12, 16]), *hidden, 4]
    return {"kind": kind, "sizes": sizes, "norms": rng.random() < 0.5}


def switches(rng, form, level):
    """What is on, and the mode that says so."""
    found = {"accumulate": ["grad_accumulation"], "freeze": ["grad_freeze"], "plain": []}
    found |= {x: [x] for x in ("less_bn", "dim_reduce")} | {"group": ["loss_scale_group"]}
    if form == "level":
        return {"on": [], "level": rng.choice(["O1", "O2"]), "mode": "auto", "noise": True}
    on = list(found[form])
    if form == "less_bn" and rng.random() < 0.5:
        on.append("grad_accumulation")
    if form == "dim_reduce":
        on += rng.sample(["less_bn", "grad_freeze"], rng.randint(0, 2))
    if form in ("plain", "accumulate", "less_bn") and rng.random() < 0.3:
        on.append("adasum")
    off = form == "plain" and on == []
    mode = rng.choice(["disable_all", "manual"]) if off else "manual"
    return {"on": on, "mode": mode, "level": level, "noise": rng.random() < 0.3}


def active(spec):
    return LEVELS[spec["level"]] if spec["mode"] == "auto" else spec["on"]


def settings(rng, on, steps):
    share, kind = rng.choice([0.2, 0.5, 0.7]), rng.randint(0, 1)
    freeze = {"param_groups": rng.randint(1, 4), "freeze_type": kind, "freeze_p": share}
    freeze |= {"total_steps": steps * rng.randint(1, 3)}
    basis = {"rho": rng.choice([0.3, 0.55]), "gamma": rng.choice([0.5, 0.9])}
    basis |= {"alpha": rng.choice([0.001, 0.02]), "sigma": rng.choice([0.1, 0.4])}
    # That group has nothing to centralize, which MindSpore refuses, too.
    head = rng.random() < 0.5
    mean = rng.random() < 0.5 and not (head and "grad_freeze" in on)
    return {
        "less_bn": {"fn_flag": head, "gc_flag": mean},
        "grad_freeze": freeze,
        "grad_accumulation": {"grad_accumulation_step": rng.randint(1, 4)},
        "dim_reduce": basis | {"n_components": rng.randint(2, 6), "pca_mat_path": "basis"},
    }


def manager(rng, on):
    fixed = rng.choice([1.0, 16.0, 100.0, 1024.0])
    init, window = 2.0 ** rng.randint(2, 24), rng.randint(1, 4)
    dynamic = ["Dynamic", init, rng.choice([2, 2, 3, 10]), window]
    if "loss_scale_group" in on:
        return ["Group", 2.0 ** rng.randint(2, 12)]
    some = [None, ["FixedNoDrop", fixed]]
    if "dim_reduce" in on:
        return rng.choice([None, None, None, ["FixedNoDrop", 2.0], ["Fixed", fixed]])
    if "grad_freeze" in on:
        return rng.choice([None, None, *some])
    if {"less_bn", "grad_accumulation"} <= {*on}:
        # There MindSpore's compiled step leaves a bias as it is if an optimizer has a loss_scale.
        some = [None]
    return rng.choice([*some, ["Fixed", fixed], dynamic, dynamic])


def rate(rng, most, steps):
    """A number, a list, or a schedule of MindSpore's with its arguments."""
    first, half = most * rng.choice([0.25, 0.5, 1.0]), rng.randint(2, steps)
    forms = [
        first,
        [first * rng.choice([0.5, 1.0, 0.1]) for _ in range(steps)],
        {"class": "ExponentialDecayLR", "learning_rate": first, "decay_rate": 0.8},
        {"class": "NaturalExpDecayLR", "learning_rate": first, "decay_rate": 0.3},
        {"class": "InverseDecayLR", "learning_rate": first, "decay_rate": 0.5},
        {"class": "CosineDecayLR", "min_lr": first / 8, "max_lr": first},
        {"class": "PolynomialDecayLR", "learning_rate": first, "end_learning_rate": first / 8},
        {"class": "WarmUpLR", "learning_rate": first, "warmup_steps": half},
    ]
    found = rng.choice([first, first, *forms])
    if not isinstance(found, dict) or "warmup_steps" in found:
        return found
    found |= {"decay_steps": half, "power": 2.0, "is_stair": rng.random() < 0.5}
    unused = {"CosineDecayLR": ("power", "is_stair"), "PolynomialDecayLR": ("is_stair",)}
    return {k: x for k, x in found.items() if k not in unused.get(found["class"], ("power",))}


def optimizer(rng, steps, scaled, on):
    """A group manager reads what Momentum alone has, and MindSpore makes no Adam anew."""
    decay = {"weight_decay": rng.choice([0.0, 0.01, 0.1])}
    anew = {"less_bn", "grad_freeze"} & {*on} and "dim_reduce" not in on
    if rng.random() < 0.45 and not anew and "loss_scale_group" not in on:
        found = {"class": rng.choice(["Adam", "AdamWeightDecay"]), **decay}
        found |= {"learning_rate": rate(rng, 0.01, steps), "eps": rng.choice([1e-6, 1e-3])}
        # MindSpore computes 1 - beta in f32, of 0.999 to 5e-5; of these it is exact.
        found |= {"beta1": rng.choice([0.75, 0.875]), "beta2": 1 - rng.choice([2**-4, 2**-9])}
        if found["class"] == "Adam":
            found["use_nesterov"] = rng.random() < 0.3
    else:
        kind = "Momentum" if "loss_scale_group" in on else rng.choice(["SGD", "Momentum"])
        found = {"class": kind, **decay}
        found |= {"learning_rate": rate(rng, 0.05, steps), "momentum": rng.choice([0.5, 0.9])}
        form = rng.choice(["", "none", "nesterov", "dampening"]) if found["class"] == "SGD" else ""
        found |= {"none": {"momentum": 0.0}, "": {}}.get(form, {form: True})
        found |= {"dampening": 0.3} if form == "dampening" else {}
        if "grad_freeze" in on and isinstance(found["learning_rate"], dict) and rng.random() < 0.8:
            # Of schedules there is a note, behind which nothing else would be seen.
            found["learning_rate"] = 0.05
    if scaled and scaled[0] == "FixedNoDrop" and found["class"] != "AdamWeightDecay":
        # One without it learns so many times as fast, in both.
        found["loss_scale"] = scaled[1]
    elif scaled and scaled[0] == "FixedNoDrop":
        found["eps"] *= scaled[1]
    return found


def dictionary(spec):
    """The ``boost_config_dict``."""
    if spec["mode"] == "disable_all":
        return {"boost": {"mode": "disable_all", "less_bn": bool(spec["noise"])}}
    on, boost = active(spec), {"mode": spec["mode"]}
    if spec["mode"] == "manual":
        boost |= {name: name in on for name in SWITCHES}
    # What MindSpore does not look at.
    boost |= (
        {"adasum_": True, **({"dim_reduce": True} if spec["mode"] == "auto" else {})}
        if spec["noise"]
        else {}
    )
    given = {name: x for name, x in spec["settings"].items() if name in on or spec["noise"]}
    if "dim_reduce" not in on:
        given.pop("dim_reduce", None)
    return {"boost": boost, **copy.deepcopy(given)}


def cause(spec):
    """What of the notes of ``auto`` says that other weights are trained; nothing where none may."""
    on, rates = active(spec), spec["optimizer"]["learning_rate"]
    if "loss_scale_group" in on:
        return "MindSpore divides by the scale after its update"
    if "dim_reduce" in on:
        twice, outside = (
            "divides by a loss scale twice",
            "in MindSpore the momentum of what is outside",
        )
        return {"none": "", "FixedNoDrop": outside}.get((spec["manager"] or ["none"])[0], twice)
    holds = {
        "its LearningRateSchedules go by the steps of each depth": isinstance(rates, dict),
        "so does SGD's first step without dampening": spec["optimizer"].get("dampening"),
        "those with bn in their names alone": spec["network"]["kind"] == "layernorm",
    }
    return next((x for x in holds if holds[x]), "") if "grad_freeze" in on else ""


# Smaller programs.


def smaller(spec):
    """Programs with one thing less, the largest steps first."""

    def but(**new):
        found = copy.deepcopy(spec) | new
        if (
            found["manager"]
            and found["manager"][0] == "Group"
            and "loss_scale_group" not in found["on"]
        ):
            found["manager"] = None
        found["bad"] = {k: x for k, x in found["bad"].items() if int(k) < found["steps"]}
        return found

    sgd = {"class": "SGD", "learning_rate": 0.05, "momentum": 0.0}
    net, given = spec["network"], spec["optimizer"]
    yield from (but(on=[x for x in spec["on"] if x != name]) for name in spec["on"])
    yield but(mode="manual", on=[])
    yield from (but(mode="manual", on=[x]) for x in active(spec) if spec["mode"] == "auto")
    yield from (but(manager=None, bad={}), but(bad={}), but(grouped=False), but(noise=False))
    yield from (but(optimizer=sgd), but(level="O0") if spec["mode"] != "auto" else spec)
    yield from (but(network={"kind": "mlp", "sizes": [6, 10, 4], "norms": False}),)
    yield from (but(steps=n) for n in (1, 2, spec["steps"] // 2, spec["steps"] - 1) if n > 0)
    plain = {"weight_decay": 0.0, "nesterov": False, "dampening": 0.0, "use_nesterov": False}
    yield from (but(optimizer=given | {k: x}) for k, x in plain.items() if given.get(k))
    if not isinstance(given["learning_rate"], float):
        yield but(optimizer=given | {"learning_rate": 0.01})
    if net["kind"] != "mlp":
        yield but(network=net | {"norms": False})
    if net["kind"] in ("mlp", "layernorm") and len(net["sizes"]) > 2:
        yield but(network=net | {"sizes": [*net["sizes"][:-2], net["sizes"][-1]]})
    if spec["manager"] and spec["manager"][0] == "Dynamic":
        yield but(manager=["Fixed", 16.0])


# What both sides are given.


def shapes(net):
    """Of the params, outputs first, in the order of ``trainable_params``."""
    kind, sizes = net["kind"], net["sizes"]
    found = {}

    def layer(name, shape, bias=True):
        found[f"{name}.weight"] = tuple(shape)
        found.update({f"{name}.bias": tuple(shape[:1])} if bias else {})

    def norm(name, size):
        found[f"{name}.gamma"] = found[f"{name}.beta"] = (size,)

    if kind == "resnet":
        width, middle, blocks, outputs = sizes
        layer("conv", (width, 3, 3, 3), False)
        norm("bn", width)
        for i in range(blocks):
            layer(f"block{i}.conv1", (middle, width, 3, 3), False)
            norm(f"block{i}.bn1", middle)
            layer(f"block{i}.conv2", (width, middle, 1, 1), False)
            norm(f"block{i}.bn2", width)
        layer("fc", (outputs, width))
    elif kind == "lenet":
        first, second, hidden, outputs = sizes
        for i, pair in enumerate([(first, 1), (second, first)], 1):
            layer(f"conv{i}", (*pair, 3, 3), not net["norms"])
            if net["norms"]:
                norm(f"bn{i}", pair[0])
        layer("fc1", (hidden, second * (IMAGE // 4) ** 2))
        layer("fc2", (outputs, hidden))
    else:
        last = len(sizes) - 1
        for i in range(1, last + 1):
            layer(f"fc{i}", (sizes[i], sizes[i - 1]))
            if kind == "layernorm" and i < last:
                norm(f"ln{i}", sizes[i])
    return found


def start(net):
    """The initial params: weights scaled for relu; no bias, gamma or beta at its neutral value."""
    rng, found = np.random.default_rng(1), {}
    for name, shape in shapes(net).items():
        drawn = rng.normal(size=shape)
        if name.endswith("weight"):
            drawn *= np.sqrt(2 / np.prod(shape[1:]))
        else:
            drawn = 0.1 * drawn + name.endswith("gamma")
        found[name] = drawn.astype(np.float32)
    return found


def batches(spec):
    """Inputs and targets, a batch for each step, with what is to overflow."""
    rng, net = np.random.default_rng(spec["seed"]), spec["network"]
    images = {"resnet": (3, 4, 4), "lenet": (1, IMAGE, IMAGE)}
    shape = (spec["steps"], ROWS, *images.get(net["kind"], net["sizes"][:1]))
    x = rng.normal(size=shape).astype(np.float32)
    y = np.tanh(x.reshape(*shape[:2], -1)[..., :4])
    for step, value in spec["bad"].items():
        x[int(step), 0].flat[0] = float(value)
    return x, y


def basis(spec):
    """Orthonormal rows, of the directions of DimReduce."""
    size = sum(int(np.prod(shape)) for shape in shapes(spec["network"]).values())
    rows = spec["settings"]["dim_reduce"]["n_components"]
    drawn = np.random.default_rng(3).normal(size=(size, rows))
    return np.ascontiguousarray(np.linalg.qr(drawn)[0].T.astype(np.float32))
