# SPDX-License-Identifier: Apache-2.0
"""What every technique stands on: the gate, named axes, per-replica state, trees and checks."""
