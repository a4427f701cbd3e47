"""Runs of several processes: how they start, share arrays, are watched, and end together."""

from boostax._core.place import place as place
from boostax.cluster.board import service_board as service_board
from boostax.cluster.end import PeerLost as PeerLost
from boostax.cluster.end import ending_at_once as ending_at_once
from boostax.cluster.launch import launch as launch
from boostax.cluster.start import Processes as Processes
from boostax.cluster.start import initialize as initialize
from boostax.cluster.watchdog import Watchdog as Watchdog
