# SPDX-License-Identifier: Apache-2.0
"""The whole recipe: what is built, measured, checked and carried over for the user."""

from typing import TYPE_CHECKING

from boostax._core.late import late as _late
from boostax.config.auto import auto as auto
from boostax.config.build import Boost as Boost
from boostax.config.config import BoostConfig as BoostConfig
from boostax.config.finishing import FinishingStep as FinishingStep
from boostax.config.migrate import MigrationReport as MigrationReport
from boostax.config.migrate import migrate_state as migrate_state

if not TYPE_CHECKING:
    __getattr__, __dir__ = _late(__name__)
