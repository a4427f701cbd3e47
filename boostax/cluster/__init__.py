"""Runs of several processes: how they start, share arrays, and end together."""

from boostax.cluster.end import PeerLost as PeerLost
from boostax.cluster.end import ending_at_once as ending_at_once
from boostax.cluster.place import place as place
from boostax.cluster.start import Processes as Processes
from boostax.cluster.start import initialize as initialize
