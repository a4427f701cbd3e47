"""Reading the options of Apache SINGA's ``DistOpt``.

Each mode is a reduction here; ``docs/coming_from/singa.md`` says where they differ.
"""

from typing import Any

from boostax._core import checks
from boostax.autoboost.part import word
from boostax.autoboost.reduction import Reduce

_SINGA = {
    "plain": (),
    "half": ("clipping", "clip_Value"),
    "partialUpdate": ("partitions",),
    "sparseTopK": ("spars", "corr"),
    "sparseThreshold": ("spars", "corr", "capacity"),
}


def singa(options: dict[str, Any]) -> Reduce:
    """What ``dist_option`` and its options are in Apache SINGA's ``DistOpt``.

    Args:
      options: ``dist_option`` is ``"plain"``, ``"half"``, ``"partialUpdate"``, ``"sparseTopK"`` or
        ``"sparseThreshold"``; the others are SINGA's own, under its names, with its defaults:
        ``spars``, ``corr``, ``clipping``, ``clip_Value``; and ``partitions`` and ``capacity``,
        which SINGA finds out while it runs. Without ``corr`` the capacity is 1.0 unless it is
        given: nothing that reaches the threshold is lost.

    Returns:
      A ``Reduce``.

    Raises:
      ValueError, TypeError: an option that the mode has no use for, or a value out of range.
    """
    who = "singa"
    given = dict(options)
    mode = given.pop("dist_option", "plain")
    word(mode, tuple(_SINGA), "dist_option", who)
    allowed = _SINGA[mode]
    for name in given:
        word(name, allowed, f"the options of {mode!r}", who)
    for name in {"clipping", "corr"} & given.keys():
        if not isinstance(given[name], bool):
            raise TypeError(checks.message(who, name, "True or False", given[name], "As there."))
    feedback: Any = None if given.get("corr", True) else False
    spars = given.get("spars", 0.05)
    if mode == "half":
        clip = given.get("clip_Value", 100.0) if given.get("clipping", False) else None
        return Reduce("mean", wire="float16", clip=clip)
    if mode == "partialUpdate":
        return Reduce("partial", partitions=given.get("partitions"))
    if mode == "sparseTopK":
        return Reduce("top-k", density=spars, error_feedback=feedback)
    if mode == "sparseThreshold":
        # SINGA sends all that reaches the threshold: without a residual what has no place is lost.
        capacity = given.get("capacity", 1.0 if feedback is False else None)
        return Reduce("threshold", threshold=spars, capacity=capacity, error_feedback=feedback)
    return Reduce("mean")
