# SPDX-License-Identifier: Apache-2.0
"""Stacked layers, whose gradients a step gathers, reduces or applies in the backward loop.

``boostax.train`` has the public names. It knows this package by one import, in its ``__init__.py``:
without that line and this folder everything else works.
"""

from boostax.layers.oracle import Layers as Layers
from boostax.layers.scan import scan_layers as scan_layers

__all__ = ["Layers", "scan_layers"]
