# SPDX-License-Identifier: Apache-2.0
"""Reading the options of Apache SINGA's ``DistOpt``.

Each mode is a reduction here; ``docs/coming_from/singa.md`` says where they differ.
"""

from collections.abc import Mapping
from typing import Any

from boostax._core import checks
from boostax.config.part import flag, speaking_of, word
from boostax.config.reduction import Reduce

_WHO = "singa"
_SPARSE = ("spars", "corr", "topK")
# Of each mode, the options that it has a use for.
_SINGA = {
    "plain": ("threshold",),
    "half": ("threshold", "clipping", "clip_Value"),
    "partialUpdate": ("threshold", "partitions"),
    "sparseTopK": ("threshold", *_SPARSE),
    "sparseThreshold": ("threshold", *_SPARSE, "capacity"),
}
_KINDS = dict(zip(_SINGA, ("mean", "mean", "partial", "top-k", "threshold"), strict=True))
# Names of SINGA's that no mode has a use for here, and what to write instead.
_INSTEAD = {
    "buffSize": "XLA makes the buffers; 'threshold' says how many elements are fused.",
    "partial": "It is SINGA's counter, which the state has here; 'threshold' or 'partitions' says "
    "what a partition is.",
}


def singa(options: Any) -> Reduce:
    """What ``dist_option`` and its options are in Apache SINGA's ``DistOpt``.

    Args:
      options: ``dist_option`` is ``"plain"``, ``"half"``, ``"partialUpdate"``, ``"sparseTopK"`` or
        ``"sparseThreshold"``; the others are SINGA's own, under its names, with its defaults:
        ``threshold`` (in elements), ``spars``, ``corr``, ``topK``, ``clipping``, ``clip_Value``;
        and of boostax ``partitions``, in the place of ``threshold``, and ``capacity``.

    Returns:
      A ``Reduce``. The sparse modes choose from buckets as SINGA does, and ``"sparseThreshold"``
      loses nothing that reaches ``spars``. Modes that sum everything leave fusion to XLA unless
      ``threshold`` is given.

    Raises:
      ValueError, TypeError: an option that the mode has no use for, or a value out of range.
    """
    fits, hint = isinstance(options, Mapping), "Such as {'dist_option': 'half'}."
    checks.require("auto", _WHO, options, "a dictionary", fits, hint, TypeError)
    given: dict[str, Any] = dict(options)
    mode = given.pop("dist_option", "plain")
    word(mode, tuple(_SINGA), "dist_option", _WHO)
    for name, value in given.items():
        _require_used(mode, name, value)
    for name in ("clipping", "corr", "topK"):
        flag(name, given.get(name, True), _WHO)
    top_k, sparse = mode == "sparseTopK", mode.startswith("sparse")
    top = given.get("topK", top_k)
    hint = "The two say the same; 'dist_option' is enough."
    checks.require(_WHO, "topK", top, f"{top_k} or left out with {mode!r}", top == top_k, hint)
    clips, hint = given.get("clipping", False), "'clipping': True clips; SINGA ignores it."
    if not clips:
        bound = given.get("clip_Value")
        checks.absent(_WHO, "clip_Value", bound, "left out without clipping", hint)
    asked: dict[str, Any] = {}
    if "partitions" in given:
        asked["partitions"] = given["partitions"]
    if "threshold" in given or sparse or (mode == "partialUpdate" and not asked):
        asked["bucket_bytes"] = _bytes(given.get("threshold", 2097152))
    if mode == "half":
        asked |= {"wire": "float16"} | ({"clip": given.get("clip_Value", 100.0)} if clips else {})
    if sparse:
        asked["density" if top_k else "threshold"] = given.get("spars", 0.05)
        asked["capacity"] = given.get("capacity")
        asked["error_feedback"] = None if given.get("corr", True) else False
    with speaking_of(_WHO, {"density": "spars", "threshold": "spars", "clip": "clip_Value"}):
        return Reduce(_KINDS[mode], **asked)


def _require_used(mode: str, name: str, value: Any) -> None:
    """Refuse an option that the mode has no use for, and say who has, or what to write instead."""
    if name in _SINGA[mode]:
        return
    users = " and ".join(repr(other) for other in _SINGA if name in _SINGA[other])
    hint = f"It is for {users}." if users else _INSTEAD.get(name, "")
    if not hint:
        word(name, _SINGA[mode], f"the options of {mode!r}", _WHO)
    allowed = f"left out with {mode!r}" if users else "left out"
    raise ValueError(checks.message(_WHO, name, allowed, value, hint))


def _bytes(threshold: Any) -> int:
    """SINGA's number of elements, of f32; of none every leaf stands alone."""
    hint = "So many elements are fused; SINGA's default is 2097152."
    natural = checks.natural(_WHO, "threshold", threshold, hint)
    checks.require(_WHO, "threshold", threshold, "below 2**29", natural < 2**29, hint)
    return max(4 * natural, 1)
