"""Reading the options of Apache SINGA's ``DistOpt``.

Each mode is a reduction here; ``docs/coming_from/singa.md`` says where they differ.
"""

from collections.abc import Mapping
from typing import Any

from boostax._core import checks
from boostax.autoboost.part import flag, speaking_of, word
from boostax.autoboost.reduction import Reduce

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
    who = "singa"
    if not isinstance(options, Mapping):
        hint = "Such as {'dist_option': 'half'}."
        raise TypeError(checks.message("auto", who, "a dictionary", options, hint))
    given: dict[str, Any] = dict(options)
    mode = given.pop("dist_option", "plain")
    word(mode, tuple(_SINGA), "dist_option", who)
    for name, value in given.items():
        _require_used(who, mode, name, value)
    for name in ("clipping", "corr", "topK"):
        flag(name, given.get(name, True), who)
    if given.get("topK", mode == "sparseTopK") != (mode == "sparseTopK"):
        hint = "The two say the same; 'dist_option' is enough."
        allowed = f"{mode == 'sparseTopK'} or left out with {mode!r}"
        raise ValueError(checks.message(who, "topK", allowed, given["topK"], hint))
    asked: dict[str, Any] = {}
    if "threshold" in given or mode.startswith("sparse") or mode == "partialUpdate":
        asked["bucket_bytes"] = _bytes(who, given.get("threshold", 2097152))
    if mode == "half":
        asked["wire"] = "float16"
        if given.get("clipping", False):
            asked["clip"] = given.get("clip_Value", 100.0)
        elif "clip_Value" in given:
            allowed, hint = "left out without clipping", "'clipping': True clips; SINGA ignores it."
            raise ValueError(checks.message(who, "clip_Value", allowed, given["clip_Value"], hint))
    if "partitions" in given:
        asked["partitions"] = given["partitions"]
        if "threshold" not in given:
            del asked["bucket_bytes"]
    if mode.startswith("sparse"):
        asked["density" if mode == "sparseTopK" else "threshold"] = given.get("spars", 0.05)
        asked["capacity"] = given.get("capacity")
        asked["error_feedback"] = None if given.get("corr", True) else False
    with speaking_of(who, {"density": "spars", "threshold": "spars", "clip": "clip_Value"}):
        return Reduce(_KINDS[mode], **asked)


def _require_used(who: str, mode: str, name: str, value: Any) -> None:
    """Refuse an option that the mode has no use for, and say who has, or what to write instead."""
    if name in _SINGA[mode]:
        return
    users = " and ".join(repr(other) for other in _SINGA if name in _SINGA[other])
    if users:
        hint = f"It is for {users}."
        raise ValueError(checks.message(who, name, f"left out with {mode!r}", value, hint))
    if name in _INSTEAD:
        raise ValueError(checks.message(who, name, "left out", value, _INSTEAD[name]))
    word(name, _SINGA[mode], f"the options of {mode!r}", who)


def _bytes(who: str, threshold: Any) -> int:
    """SINGA's number of elements, of f32; of none every leaf stands alone."""
    hint = "So many elements are fused; SINGA's default is 2097152."
    natural = checks.natural(who, "threshold", threshold, hint)
    if natural >= 2**29:
        raise ValueError(checks.message(who, "threshold", "below 2**29", threshold, hint))
    return max(4 * natural, 1)
