"""What the compilers make of it: compiled programs of CPU, TPU v5e and H100, none of them run.

``make bench-compilers`` runs it in the environment that has the compilers. Sections can be measured
again one by one: ``python benchmarks/compilers.py "Gates"``; the others stay as recorded.
"""

from __future__ import annotations

import functools
import itertools
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import compilers_cases as cases
import harness
import jax
import optax
from compilers_cases import AXIS, BYTES, WINDOW, decoder, mean, perceptron, trained
from flax.training import dynamic_scale

import boostax
from boostax import train

CPU, V5E, H100 = None, "v5e:2x4", "h100:1x1x8"
TARGETS = {"CPU": CPU, "v5e": V5E, "H100": H100}
PAGE = harness.DOCS / "compilers.md"
Rows = list[dict[str, Any]]


def gates() -> Rows:
    """Temporaries, traffic and cycles of each gate and of what one would use instead."""
    bare = {name: cases.on_one_chip(cases.adam(), target) for name, target in TARGETS.items()}
    forms: dict[str, tuple[Any, bool]] = {"Adam": (cases.adam, False)}
    forms |= {name: (make, False) for name, make in cases.GATES.items()}
    forms |= {f"{name}, pure": (make, True) for name, make in cases.GATES.items()}
    forms |= {
        "optax.MultiSteps": (
            lambda: optax.MultiSteps(cases.adam(), WINDOW).gradient_transformation(),
            True,
        ),
        "optax.apply_if_finite": (lambda: optax.apply_if_finite(cases.adam(), 5), True),
        "Flax DynamicScale and select": (flax_scaler, True),
    }
    rows: Rows = []
    for form, (make, pure) in forms.items():
        row: dict[str, Any] = {"gate": form}
        for name, target in TARGETS.items():
            found = cases.on_one_chip(make(), target, pure)
            row[f"{name} temporaries"] = found.temporary_bytes / BYTES
            row[f"{name} skipped"] = found.traffic.least / BYTES
            row[f"{name} applied"] = found.traffic.most / BYTES
            if found.cycles is not None:
                unit = bare[name].cycles.most
                row["v5e cycles skipped"] = found.cycles.least / unit
                row["v5e cycles applied"] = found.cycles.most / unit
        rows.append(row)
        print(row, flush=True)
    return rows


def flax_scaler() -> optax.GradientTransformation:
    """Flax's own form: unscale, test, update, and choose old or new leaf by leaf."""
    tx = cases.adam()

    def init(params):
        return tx.init(params), dynamic_scale.DynamicScale()

    def update(grads, state, params=None):
        inner, scaler = state
        grads = jax.tree.map(lambda g: g / scaler.scale, grads)
        finite = jax.numpy.array(True)
        for g in jax.tree.leaves(grads):
            finite &= jax.numpy.isfinite(g).all()
        updates, new = tx.update(grads, inner, params)
        keep = functools.partial(jax.numpy.where, finite)
        updates = jax.tree.map(lambda u: keep(u, 0), updates)
        scale = keep(scaler.scale, scaler.scale * 0.5)
        return updates, (jax.tree.map(keep, new, inner), scaler.replace(scale=scale))

    return optax.GradientTransformation(init, update)


def recording() -> Rows:
    rows: Rows = []
    tx = optax.chain(boostax.subspace.record_trajectory(4, every=5), cases.adam())
    for name, target in TARGETS.items():
        found, bare = cases.on_one_chip(tx, target), cases.on_one_chip(cases.adam(), target)
        rows.append(
            {
                "compiler": name,
                "temporaries": found.temporary_bytes / BYTES,
                "skipped": found.traffic.least / BYTES,
                "applied": found.traffic.most / BYTES,
                "bare Adam": bare.traffic.most / BYTES,
            }
        )
    return rows


def steps(model: cases.Model) -> dict[str, Callable[[Any], boostax.auditing.Audit]]:
    """Train steps over all devices of a target."""
    schedule = boostax.freeze_schedule("progressive", total_steps=100, frozen_fraction=0.3)
    frozen = lambda: boostax.scheduled_freeze(mean(), cases.labels(model.params), schedule)  # noqa: E731
    scaled = lambda: boostax.dynamic_loss_scale(mean(), axis_name=AXIS)  # noqa: E731
    window = lambda: boostax.accumulate(mean(), WINDOW, axis_name=AXIS)  # noqa: E731
    go = functools.partial(trained, model)
    return {
        "`lax.pmean` leaf by leaf": lambda t: go(cases.leaf_by_leaf(), t),
        "`all_reduce`": lambda t: go(mean(), t),
        "`shard_optimizer=True`": lambda t: go(mean(), t, shard_optimizer=True),
        "`dynamic_loss_scale`": lambda t: go(scaled(), t),
        "`accumulate`": lambda t: go(window(), t),
        "`accumulate(dynamic_loss_scale)`": lambda t: go(
            boostax.accumulate(scaled(), WINDOW, axis_name=AXIS), t
        ),
        "`dynamic_loss_scale(accumulate)`": lambda t: go(
            boostax.dynamic_loss_scale(window(), axis_name=AXIS), t
        ),
        "freezing, depth 0": lambda t: go(frozen(), t, depth=0),
        "freezing, depth 2 of 4": lambda t: go(frozen(), t, depth=2),
        "freezing, one program": lambda t: go(frozen(), t, freeze_driver="switch"),
    }


def train_steps() -> Rows:
    rows: Rows = []
    peers: dict[str, boostax.auditing.Audit] = {}
    for form, make in steps(perceptron(16, 2048)).items():
        row: dict[str, Any] = {"step": form}
        for name, target in TARGETS.items():
            found = make(target)
            peer = peers.setdefault(name, found)
            row[f"{name} temporaries"] = found.temporaries
            row[f"{name} wire"] = found.wire_bytes.most / peer.wire_bytes.most
            row[f"{name} skipped"] = found.traffic.least / found.params_bytes
            row[f"{name} applied"] = found.traffic.most / found.params_bytes
            if found.cycles is not None:
                row["v5e cycles"] = found.cycles.most / peer.cycles.most
        rows.append(row)
        print(row, flush=True)
    return rows


# The forms of ``benchmarks/forms.py``, in the words of the documents.
SAID = {
    "jit and lax.scan": "jit and `lax.scan` over micro-batches",
    "optax.MultiSteps": "`optax.MultiSteps`",
    "optax.microbatch": "`optax.microbatch`",
    "reduced=": "JAX's `reduced=`, the model changed in 2 lines",
    "shard_map by hand": "a scan inside `shard_map`, by hand",
    "boostax": "boostax",
}


def reductions() -> Rows:
    found: dict[tuple[str, str], dict[str, boostax.auditing.Audit]] = {}
    for (name, target), fsdp in itertools.product(TARGETS.items(), (False, True)):
        audits = cases.in_forms(target, cases.deep(), fsdp)
        for form, said in SAID.items():
            key = said, "FSDP" if fsdp else "whole"
            found.setdefault(key, {})[name] = audits[form]
    split = functools.partial(cases.placed, "FSDP", microbatches=WINDOW)
    narrow = functools.partial(split, gather="bfloat16")
    forms: dict[tuple[str, str], Callable[..., boostax.auditing.Audit]] = {}
    forms['boostax, `gather="bfloat16"`', "FSDP"] = narrow
    for weights in ("once", "by layer"):
        said = f'boostax, `gather="bfloat16"`, layers "{weights}"'
        forms[said, "FSDP"] = functools.partial(narrow, layers=train.Layers(weights=weights))
    return counted(found | compiled(forms))


def released() -> Rows:
    forms: dict[tuple[str, str], Callable[..., boostax.auditing.Audit]] = {}
    for placement in cases.PLACED:
        for said, layers in {"boostax": None, "released": train.Layers(release=True)}.items():
            forms[said, placement] = functools.partial(cases.placed, placement, layers=layers)
    return counted(compiled(forms))


def compiled(
    forms: Mapping[tuple[str, str], Callable[..., boostax.auditing.Audit]],
) -> dict[tuple[str, str], dict[str, boostax.auditing.Audit]]:
    return {
        key: {name: make(target=target) for name, target in TARGETS.items()}
        for key, make in forms.items()
    }


def counted(forms: Mapping[tuple[str, str], Mapping[str, boostax.auditing.Audit]]) -> Rows:
    """Reductions, temporaries and bytes sent of steps, by form and placement of the params."""
    rows: Rows = []
    for (form, params), audits in forms.items():
        row: dict[str, Any] = {"form": form, "params": params}
        for name, found in audits.items():
            unit, sent = 4 * found.params, found.wire_dtypes
            row[name] = found.reductions
            row[f"{name} temporaries"] = found.temporary_bytes / unit
            row[f"{name} wire"] = found.per_step(found.wire_bytes) / unit
            row[f"{name} in bf16"] = found.per_step(sent["bf16"]) / unit if "bf16" in sent else 0.0
        rows.append(row)
        print(row, flush=True)
    return rows


def wires() -> Rows:
    rows: Rows = []
    for form, (make, _) in cases.WIRES.items():
        row: dict[str, Any] = {"wire": form}
        for name, target in TARGETS.items():
            found = boostax.audit(
                *cases.reduction(make(), target), target=target, params=cases.SQUARES
            )
            row[name] = found.wire_bytes.most / (2 * 7 / 8 * found.params_bytes)
        rows.append(row)
    return rows


def narrow() -> Rows:
    rows: Rows = []
    plain = lambda: boostax.all_reduce(AXIS)  # noqa: E731
    step = lambda make, target: trained(  # noqa: E731
        perceptron(4, 4096), optax.chain(make(), cases.adam()), target
    )
    whole = {name: step(plain, target) for name, target in TARGETS.items()}
    forms = {name: make for name, (make, _) in cases.NARROW.items()}
    for form, make in ({"`all_reduce`": plain} | forms).items():
        row: dict[str, Any] = {"reduction": form}
        for name, target in TARGETS.items():
            found, peer = step(make, target), whole[name]
            row[f"{name} temporaries"] = found.temporaries
            if found.cycles is not None:
                row["v5e cycles"] = found.cycles.most / peer.cycles.most
                row["v5e instructions"] = instructions(found) / instructions(peer)
            if target is not None:
                # In pairs, as the machine's pace changes.
                pairs = [(step(make, target), step(plain, target)) for _ in range(3)]
                ratios = [one.compile_seconds / other.compile_seconds for one, other in pairs]
                row[f"{name} compile"] = statistics.median(ratios)
        rows.append(row)
        print(row, flush=True)
    return rows


def by_shape() -> Rows:
    rows: Rows = []
    for width, placed in [(1024, name) for name in cases.MUON_PLACED] + [(4096, "whole")]:
        for form in cases.MUON:
            row: dict[str, Any] = {"form": form, "matrices": width, "params": placed}
            for name, target in (("v5e", V5E), ("H100", H100)):
                found = cases.muon(form, target, {width: 24}, placed)
                plain = muon_alone(target, width)
                unit = 4 * found.params
                row[f"{name} collectives"] = len(found.collectives)
                row[f"{name} wire"] = found.wire_bytes.most / (2 * 7 / 8 * unit)
                row[f"{name} temporaries"] = found.temporary_bytes / unit
                row[f"{name} arguments"] = found.argument_bytes / unit
                row[f"{name} products"] = cases.products(found) / cases.products(plain)
                if found.cycles is not None:
                    row["v5e FLOPs"] = found.flops / plain.flops
                    row["v5e cycles"] = found.cycles.most / plain.cycles.most
            rows.append(row)
            print(row, flush=True)
    return rows


@functools.cache
def muon_alone(target: str | None, width: int) -> boostax.auditing.Audit:
    """The mean and Muon on every replica."""
    return cases.muon(next(iter(cases.MUON)), target, {width: 24})


def instructions(found: boostax.auditing.Audit) -> int:
    """Of the whole program."""
    return sum(" = " in line for line in found.text.splitlines())


BILLION = functools.partial(decoder, 19, 2048, 27_904, 16, 512)
LARGE = {"256 v5e": "v5e:16x16", "256 H100": "h100:1x32x8", "2 x 16 v5e": "v5e:4x4*2"}


def size() -> Rows:
    stacked = BILLION()
    deep = BILLION(stacked=False)
    layer = {f"{i:02d}": 1 + i * 3 // 19 for i in range(19)}
    groups = {"embed": 0, "norm": 3, "head": 3}
    groups["layers"] = {
        name: jax.tree.map(lambda _, g=group: g, deep.params["layers"][name])
        for name, group in layer.items()
    }
    schedule = boostax.freeze_schedule("progressive", total_steps=100, frozen_fraction=0.3)
    momentum = optax.sgd(1e-3, momentum=0.9, accumulator_dtype="bfloat16")
    reduced = optax.chain(boostax.all_reduce(AXIS), momentum)
    scaled = boostax.dynamic_loss_scale(reduced, axis_name=AXIS)
    forms: dict[str, Callable[[str], boostax.auditing.Audit]] = {
        "`all_reduce`": lambda t: trained(stacked, reduced, t, rows=1),
        "`accumulate(dynamic_loss_scale)`": lambda t: trained(
            stacked, boostax.accumulate(scaled, WINDOW, axis_name=AXIS), t, rows=1
        ),
        "`shard_optimizer=True`": lambda t: trained(
            stacked, reduced, t, rows=1, shard_optimizer=True
        ),
        "freezing, depth 2 of 4": lambda t: trained(
            deep, boostax.scheduled_freeze(reduced, groups, schedule), t, rows=1, depth=2
        ),
    }
    rows: Rows = []
    for form, make in forms.items():
        for machine, target in LARGE.items():
            row: dict[str, Any] = {"step": form, "machine": machine}
            try:
                found = make(target)
            except jax.errors.JaxRuntimeError as error:
                row["lacks"] = lacking(str(error))
            else:
                n = found.devices if "*" not in target else 32
                whole = 2 * (n - 1) / n * 4 * found.params
                row |= {
                    "compile seconds": found.compile_seconds,
                    "arguments GB": found.argument_bytes / 1e9,
                    "temporaries P": found.temporaries,
                    "wire": found.wire_bytes.most / whole,
                    "to another slice or host MB": found.crossing_bytes.most / 1e6,
                    "collectives": sum(c.executions for c in found.collectives),
                    "reduced N": found.reduced.most / found.params,
                    "in the branch": 1 - found.reduced.least / found.reduced.most,
                    "lacks": "",
                }
            rows.append(row)
            print(row, flush=True)
    return [dict.fromkeys(max(rows, key=len)) | row for row in rows]


def lacking(error: str) -> str:
    """What a compiler says of memory that is not there."""
    found = re.search(r"temporaries \(([\d.]+\w)\) exceeds available HBM \(([\d.]+\w)\)", error)
    return f"needs {found.group(1)} of {found.group(2)}" if found else error.splitlines()[0][:120]


REDUCTIONS = {
    "`all_reduce`": lambda: boostax.all_reduce(AXIS),
    "`int8_reduce`": lambda: boostax.int8_reduce(AXIS),
    "`top_k_reduce`, 1%": lambda: boostax.top_k_reduce(AXIS, 0.01),
    "`adasum`": lambda: boostax.adasum(AXIS),
}


def sharded_size() -> Rows:
    rows: Rows = []
    for machine, target in {"2 x 16 v5e": "v5e:4x4*2", "256 v5e": "v5e:16x16"}.items():
        plain: boostax.auditing.Audit | None = None
        for form, make in REDUCTIONS.items():
            found = cases.sharded(BILLION(), optax.chain(make(), cases.adam()), target)
            plain = plain or found
            crossing = plain.crossing_bytes.most
            row = {
                "reduction": form,
                "machine": machine,
                "compile seconds": found.compile_seconds,
                "arguments GB": found.argument_bytes / 1e9,
                "temporaries GB": found.temporary_bytes / 1e9,
                "temporaries above the mean's, P": (found.temporary_bytes - plain.temporary_bytes)
                / (4 * found.params / 16),
                "between replicas": _between(found) / _between(plain),
                "crossing": found.crossing_bytes.most / crossing if "*" in target else None,
            }
            rows.append(row)
            print(row, flush=True)
    return rows


def _between(found: boostax.auditing.Audit) -> float:
    """Bytes that a device sends over the replica axis."""
    return sum(c.wire_bytes for c in found.collectives if AXIS in c.axes)


SECTIONS: dict[str, Callable[[], Rows]] = {
    "Gates": gates,
    "Recording": recording,
    "Train steps": train_steps,
    "Reductions per optimizer step": reductions,
    "Released layers": released,
    "Wire formats": wires,
    "Matrices by shape": by_shape,
    "Reductions other than the mean": narrow,
    "Size": size,
    "Size, sharded": sharded_size,
}


def bars(sections: dict[str, Rows]) -> list[harness.Bar]:
    """The claims of the documents."""
    found: list[harness.Bar] = []
    own = [row for row in sections["Gates"] if row["gate"] in cases.GATES]
    for name in TARGETS:
        worst = max(row[f"{name} temporaries"] for row in own)
        found.append(harness.Bar(f"gates, temporaries on {name}, P", worst, 0.07))
        for kind, limit in (("scalers", 1.1), ("windows", 3.1)):
            worst = max(
                row[f"{name} skipped"]
                for row in own
                if row["gate"].startswith("accumulate") == (kind == "windows")
            )
            found.append(harness.Bar(f"{kind}, skipped call on {name}, P of traffic", worst, limit))
    worst = max(row["v5e cycles skipped"] for row in own)
    found.append(harness.Bar("gates, skipped call on v5e, of Adam's cycles", worst, 0.42))
    steps = {row["step"]: row for row in sections["Train steps"]}
    for name in TARGETS:
        plain = steps["`all_reduce`"]
        for form in ("`dynamic_loss_scale`", "`accumulate`"):
            added = steps[form][f"{name} temporaries"] - plain[f"{name} temporaries"]
            claim = f"{form}, temporaries above the mean's on {name}, P"
            found.append(harness.Bar(claim, added, 1.1))
        if sharded := steps.get("`shard_optimizer=True`"):
            # XLA:CPU makes no reduce-scatter: gradients are all-reduced, new params gathered.
            limit = 1.52 if name == "CPU" else 1.02
            claim = f"`shard_optimizer=True`, of a mean's bytes on {name}"
            found.append(harness.Bar(claim, sharded[f"{name} wire"], limit))
    cycles = steps["`all_reduce`"]["v5e cycles"]
    found.append(harness.Bar("`all_reduce`, of `lax.pmean`'s cycles on v5e", cycles, 1.05))
    for row in sections["Reductions per optimizer step"]:
        if row["form"] == "boostax":
            for name in TARGETS:
                claim = f"boostax, {row['params']}, reductions of 8 micro-batches on {name}, N"
                found.append(harness.Bar(claim, row[name], 1.01))
    for row in sections["Released layers"]:
        if row["form"] == "released":
            for name in TARGETS:
                claim = f"released layers, {row['params']}, temporaries on {name}, P"
                found.append(harness.Bar(claim, row[f"{name} temporaries"], 0.5))
    for row in sections["Matrices by shape"]:
        if row["form"] != next(iter(cases.MUON)) and row["params"] == "whole":
            for name, limit in (("wire", 1.0), ("products", 1.1 / 8)):
                claim = f"{row['form']}, {row['matrices']}, {name} on v5e, of a mean and Muon"
                found.append(harness.Bar(claim, row[f"v5e {name}"], limit))
    cycles = {x["reduction"]: x["v5e cycles"] for x in sections["Reductions other than the mean"]}
    for form, (_, limit) in cases.NARROW.items():
        claim = f"{form}, of the f32 mean's cycles on v5e"
        found.append(harness.Bar(claim, cycles[form], limit))
    for row in sections["Size, sharded"]:
        claim = f"{row['reduction']} on {row['machine']}, temporaries above the mean's, P"
        found.append(harness.Bar(claim, row["temporaries above the mean's, P"], 1.2))
    for row in sections["Recording"]:
        claim = f"`record_trajectory`, temporaries on {row['compiler']}, P"
        found.append(harness.Bar(claim, row["temporaries"], 0.13))
    return found


def page(sections: dict[str, Rows]) -> str:
    """The document, with the tables of the record."""
    text = PAGE.read_text()
    for heading, rows in sections.items():
        columns = [c for c in rows[0] if any(row[c] not in ("", None) for row in rows)]
        table = "\n".join(harness.of_rows(rows, columns, _cell)) + "\n"
        place = rf"(?<=\n## {heading}\n)([^|]*)(\|.*\n)+"
        text = re.sub(place, lambda found, table=table: found[1] + table, text)
    return text


def _cell(value: Any) -> str:
    short = isinstance(value, float) and (f"{value:.0f}" if value >= 100 else f"{value:.2f}")
    return short or harness.written(value)


def main() -> None:
    harness.on_cpu()
    for name in sys.argv[1:] or SECTIONS:
        measured = SECTIONS[name]()
        # What was recorded meanwhile stays.
        known = harness.sections_of("compilers") | {name: measured}
        sections = {name: known[name] for name in SECTIONS if name in known}
        found = bars(sections) if len(sections) == len(SECTIONS) else []
        title = "What the compilers make of it"
        harness.report("compilers", title, list(sections.items()), found)
        PAGE.write_text(page(sections))


if __name__ == "__main__":
    main()
