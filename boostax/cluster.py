"""The public name of ``boostax.run.cluster`` in 0.1."""

from boostax.run.cluster import *  # noqa: F403  # a package of public names alone
