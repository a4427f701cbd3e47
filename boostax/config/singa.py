# SPDX-License-Identifier: Apache-2.0
"""Read the options of Apache SINGA's ``DistOpt``.

Each mode is a reduction here; ``docs/coming_from/singa.md`` says how they differ.
"""

from typing import Any

from boostax._core import checks
from boostax.config.keys import flag, known, part, speaking_of, table

_WHO = "singa"
# The reduction of each mode, and the options that it uses.
_MODES = table("singa")["modes"]
# SINGA's names of arguments.
_NAMES = {"density": "spars", "threshold": "spars", "clip": "clip_Value"}


def singa(options: Any) -> dict[str, Any]:
    """Read ``dist_option`` and the other options of Apache SINGA's ``DistOpt`` as a reduction.

    Args:
      options: ``dist_option`` is ``"plain"``, ``"half"``, ``"partialUpdate"``, ``"sparseTopK"`` or
        ``"sparseThreshold"``; the others have SINGA's names and defaults: ``threshold`` (in
        elements), ``spars``, ``corr``, ``topK``, ``clipping``, ``clip_Value``. boostax adds
        ``partitions``, which replaces ``threshold``, and ``capacity``.

    Returns:
      The ``"reduce"`` of a configuration. The sparse modes choose elements from buckets, as SINGA
      does, and ``"sparseThreshold"`` sends everything that reaches ``spars``. Modes that sum all
      elements leave fusion to XLA unless ``threshold`` is given.

    Raises:
      ValueError, TypeError: an option that the mode does not use, or a value out of range.
    """
    known(options, options, "options", _WHO)
    given: dict[str, Any] = dict(options)
    mode = given.pop("dist_option", "plain")
    checks.choice(_WHO, "dist_option", mode, tuple(_MODES), checks.nearest(mode, _MODES))
    kind, *used = _MODES[mode]
    for name, value in given.items():
        allowed = f"left out with {mode!r}, which has {', '.join(map(repr, used))}"
        hint = "XLA makes the buffers." if name == "buffSize" else checks.nearest(name, used)
        checks.require(_WHO, name, value, allowed, name in used, hint)
        if name in ("clipping", "corr", "topK"):
            flag(_WHO, name, value)
    top_k, sparse, clips = mode == "sparseTopK", mode.startswith("sparse"), given.get("clipping")
    allowed, fits = f"{top_k} or left out with {mode!r}", given.get("topK", top_k) == top_k
    checks.require(_WHO, "topK", not top_k, allowed, fits, "The two say the same.")
    clip, fits = given.get("clip_Value", 100.0), clips or "clip_Value" not in given
    hint = "'clipping': True clips; SINGA ignores it."
    checks.require(_WHO, "clip_Value", clip, "left out without clipping", bool(fits), hint)
    asked = {name: given[name] for name in ("partitions", "capacity") if name in given}
    if "threshold" in given or sparse or (mode == "partialUpdate" and not asked):
        hint = "So many elements are fused; SINGA's default is 2097152."
        elements = checks.natural(_WHO, "threshold", given.get("threshold", 2097152), hint)
        checks.require(_WHO, "threshold", elements, "below 2**29", elements < 2**29, hint)
        # In bytes of f32; with buckets of one byte every leaf is alone.
        asked["bucket_bytes"] = max(4 * elements, 1)
    if mode == "half":
        asked |= {"dtype": "float16"} | ({"clip": clip} if clips else {})
    if sparse:
        asked["density" if top_k else "threshold"] = given.get("spars", 0.05)
        asked |= {} if given.get("corr", True) else {"error_feedback": False}
    with speaking_of(_WHO, _NAMES):
        return part("reduce", {"kind": kind, **asked}, build=True)
