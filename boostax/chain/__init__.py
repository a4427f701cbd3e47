# SPDX-License-Identifier: Apache-2.0
"""The parts of a chain: their roles, the order that they need, and parts that a step lacks.

A user's part is known by its description: ``boostax.describe`` (``_core/describe.py``) gives it a
role, and a codec is a ``boostax.reduce.Codec`` (``reduce/codec.py``). ``docs/extending.md`` shows
both with the laws that they must keep.
"""
