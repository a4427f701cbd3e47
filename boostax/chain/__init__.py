# SPDX-License-Identifier: Apache-2.0
"""The parts of a chain: what each does, in which order they must stand, what a step lacks."""
