# SPDX-License-Identifier: Apache-2.0
"""The whole recipe: what is built, measured, checked and carried over for the user."""

from boostax.autoboost.auto import auto as auto
from boostax.autoboost.build import Boost as Boost
from boostax.autoboost.config import BoostConfig as BoostConfig
from boostax.autoboost.finishing import FinishingStep as FinishingStep
from boostax.autoboost.measure import measure as measure
from boostax.autoboost.measurement import Measurement as Measurement
from boostax.autoboost.measurement import Trial as Trial
from boostax.autoboost.migrate import MigrationReport as MigrationReport
from boostax.autoboost.migrate import migrate_state as migrate_state
