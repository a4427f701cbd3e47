# SPDX-License-Identifier: Apache-2.0
"""Read the parts of a chain by role, and check their order and settings.

``boostax.describe`` sets the role of a user's own part (``_core/describe.py``), and a user's
codec is a ``boostax.reduce.Codec`` (``reduce/codec.py``). ``docs/extending.md`` shows how to write
and test both.
"""
