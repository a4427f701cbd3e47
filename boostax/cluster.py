"""The public name of ``boostax.run.cluster`` in 0.1."""

from boostax.run.cluster import PeerLost as PeerLost
from boostax.run.cluster import Processes as Processes
from boostax.run.cluster import Watchdog as Watchdog
from boostax.run.cluster import ending_at_once as ending_at_once
from boostax.run.cluster import initialize as initialize
from boostax.run.cluster import launch as launch
from boostax.run.cluster import place as place
from boostax.run.cluster import service_board as service_board
