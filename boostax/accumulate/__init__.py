# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: over calls, and inside one step."""
