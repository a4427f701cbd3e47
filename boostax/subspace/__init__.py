# SPDX-License-Identifier: Apache-2.0
"""Training in subspaces: bases, recorded trajectories, DimReduce."""

from boostax._core.late import late as _late
from boostax.subspace.basis import Basis as Basis
from boostax.subspace.basis import pca_basis as pca_basis
from boostax.subspace.basis import random_basis as random_basis
from boostax.subspace.dim_reduce import SubspaceRule as SubspaceRule
from boostax.subspace.dim_reduce import dim_reduce as dim_reduce
from boostax.subspace.dim_reduce import replace_basis as replace_basis
from boostax.subspace.trajectory import record_trajectory as record_trajectory
from boostax.subspace.trajectory import trajectory as trajectory
from boostax.subspace.trajectory import trajectory_basis as trajectory_basis

_late(__name__)
