# SPDX-License-Identifier: Apache-2.0
"""A chain read as parts: what each does, in which order they must stand, what a step lacks."""
