# SPDX-License-Identifier: Apache-2.0
"""Read the parts of a chain by role, and check their order and settings.

A user's own part gets its role from ``boostax.describe`` (``_core/describe.py``), and a user's
codec is a ``boostax.reduce.Codec`` (``reduce/codec.py``). ``docs/extending.md`` shows both, and the
laws that test them.
"""
