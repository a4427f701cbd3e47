# SPDX-License-Identifier: Apache-2.0
"""Stacked layers, which a step gathers, reduces or updates one by one in the backward loop.

``boostax.train`` exports the public names. Only ``boostax/train/__init__.py`` imports this package.
Without that import and this folder, everything else works.
"""

from boostax.layers.oracle import Layers as Layers
from boostax.layers.scan import scan_layers as scan_layers

__all__ = ["Layers", "scan_layers"]
