# SPDX-License-Identifier: Apache-2.0
"""Audit any compiled program: what it sends, reads, writes and wastes."""

from boostax.auditing.adapter import late as _late
from boostax.auditing.audit import Audit as Audit
from boostax.auditing.audit import audit as audit
from boostax.auditing.collectives import CompiledCollective as CompiledCollective
from boostax.auditing.targets import target_devices as target_devices

_late(__name__)
