# SPDX-License-Identifier: Apache-2.0
"""What trains, apart from what transforms: the loop, checkpoints, clusters, workloads, the command.

No transformation and no train step imports from here.
"""
