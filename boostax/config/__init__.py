# SPDX-License-Identifier: Apache-2.0
"""Build chains from configurations as data, and migrate optimizer states to another chain."""

from boostax._core.late import late as _late
from boostax.config.auto import Boost as Boost
from boostax.config.auto import auto as auto
from boostax.config.migrate import MigrationReport as MigrationReport
from boostax.config.migrate import migrate_state as migrate_state

_late(__name__)
