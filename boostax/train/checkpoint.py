# SPDX-License-Identifier: Apache-2.0
"""Where 0.1 had what is in ``boostax.run.checkpoint``."""

from boostax._core.late import renamed

__getattr__ = renamed(__name__)
