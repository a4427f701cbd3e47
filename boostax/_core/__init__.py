# SPDX-License-Identifier: Apache-2.0
"""The base of every technique: the gate, named axes, per-replica state, trees and checks."""
