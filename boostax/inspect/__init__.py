# SPDX-License-Identifier: Apache-2.0
"""Explain a chain or a train step, and audit any compiled program."""

from boostax._core.late import late as _late
from boostax.chain.findings import Finding as Finding
from boostax.inspect.audit import Audit as Audit
from boostax.inspect.audit import audit as audit
from boostax.inspect.collectives import CompiledCollective as CompiledCollective
from boostax.inspect.explain import Explanation as Explanation
from boostax.inspect.explain import explain as explain
from boostax.inspect.targets import target_devices as target_devices

_late(__name__)
