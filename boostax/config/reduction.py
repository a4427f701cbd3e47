# SPDX-License-Identifier: Apache-2.0
"""The part that says how gradients of several replicas become one."""

from typing import Any

from boostax._core import axes, checks
from boostax.config.part import Layer, Part, Place
from boostax.reduce.adasum import adasum
from boostax.reduce.delta import adasum_delta
from boostax.reduce.local import local_updates
from boostax.reduce.low_rank import power_sgd_reduce
from boostax.reduce.mean import all_reduce
from boostax.reduce.partial import partial_average
from boostax.reduce.quantized import int8_reduce
from boostax.reduce.sparse import threshold_reduce, top_k_reduce

# All reductions that a configuration and the command know, each entered once, by what is sent.
# Gradients, or an optimizer's updates, element by element:
DENSE = {"mean": all_reduce, "adasum": adasum, "adasum-delta": adasum_delta}
# what a codec makes of gradients:
CODECS = {
    "top-k": top_k_reduce,
    "threshold": threshold_reduce,
    "int8": int8_reduce,
    "power-sgd": power_sgd_reduce,
}
# params, which differ between the replicas:
OWN_PARAMS = {"partial": partial_average, "local": local_updates}


class Reduce(Part, factory=DENSE | CODECS | OWN_PARAMS):
    """How replicas agree. Without an ``axis_name`` there are none, and it stands nowhere.

    ``wire`` is the dtype in which gradients, or values of a sparse one, travel. ``dense`` is
    ``"vectors"`` to send norms and biases whole. ``within`` is one of the axes of ``axis_name``,
    over which is averaged before AdaSum; of ``"adasum-delta"`` also the number of devices of a
    server.
    """

    renamed = dict.fromkeys(("dtype", "value_dtype", "wire_dtype"), "wire")

    @property
    def keeps_own_params(self) -> bool:
        """Whether params differ between replicas."""
        return self.kind in OWN_PARAMS

    def check(self) -> None:
        """As the factory does."""
        fits, hint = self.dense in (None, "vectors"), "Leave it out to treat all leaves alike."
        checks.require("", "dense", self.dense, "'vectors'", fits, hint)
        others = (self.within,) if isinstance(self.within, str) else ()
        self.layer(Place(("axis", *others), None))

    def layer(self, place: Place) -> Layer:
        """First behind the gates; or around the optimizer."""
        return super().layer(place) if axes.canonical("Reduce", place.axis_name) else None

    def arguments(self, place: Place) -> dict[str, Any]:
        """With one axis taken out for the mean before AdaSum."""
        found = super().arguments(place)
        if self.dense is not None:
            found["dense"] = vectors
        if self.within is not None and not isinstance(self.within, int):
            names = axes.canonical("Reduce", place.axis_name)
            others = tuple(name for name in names if name != self.within)
            allowed, fits = f"one of several axes, {names}", 0 < len(others) < len(names)
            hint = "It is the axis of the fast links."
            checks.require("Reduce", "within", self.within, allowed, fits, hint)
            found["axis_name"] = others
        return found


def vectors(path: str, leaf: Any) -> bool:
    """Norms and biases: few bytes, and thinned out they cost more than they save."""
    del path
    return leaf.ndim < 2
