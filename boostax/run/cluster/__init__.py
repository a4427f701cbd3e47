# SPDX-License-Identifier: Apache-2.0
"""Runs of several processes: how they start, share arrays, are watched, and end together."""

from boostax._core.place import place as place
from boostax.run.cluster.board import service_board as service_board
from boostax.run.cluster.end import PeerLost as PeerLost
from boostax.run.cluster.end import ending_at_once as ending_at_once
from boostax.run.cluster.launch import launch as launch
from boostax.run.cluster.start import Processes as Processes
from boostax.run.cluster.start import initialize as initialize
from boostax.run.cluster.watchdog import Watchdog as Watchdog
