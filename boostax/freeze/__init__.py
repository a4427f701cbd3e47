# SPDX-License-Identifier: Apache-2.0
"""Freezing by schedule: the transformation, groups and schedules."""

from boostax._core.late import late as _late
from boostax.freeze.groups import mindspore_groups as mindspore_groups
from boostax.freeze.groups import param_groups as param_groups
from boostax.freeze.groups import prefix_groups as prefix_groups
from boostax.freeze.order import forward_order as forward_order
from boostax.freeze.scheduled import ScheduledFreeze as ScheduledFreeze
from boostax.freeze.scheduled import active_groups as active_groups
from boostax.freeze.scheduled import scheduled_freeze as scheduled_freeze
from boostax.freeze.schedules import FreezeSchedule as FreezeSchedule
from boostax.freeze.schedules import freeze_schedule as freeze_schedule

_late(__name__)
