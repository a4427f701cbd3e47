"""The public name of ``boostax.run.workloads`` in 0.1."""

from boostax.run.workloads import *  # noqa: F403  # a package of public names alone
