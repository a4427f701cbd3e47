# SPDX-License-Identifier: Apache-2.0
"""The parts of a chain: what each does, in which order they must stand, what a step lacks.

A part of a user's own is known by its description: ``boostax.describe`` (``_core/describe.py``)
gives it a role, a codec is a ``boostax.reduce.Codec`` (``reduce/codec.py``), and
``docs/extending.md`` shows both with the laws that they must keep.
"""
