# SPDX-License-Identifier: Apache-2.0
"""Reductions over the replicas: means, AdaSum, compression, and local updates.

To add a codec, subclass ``Codec`` and pass an instance to ``compress``.
"""

from boostax._core.late import late as _late
from boostax.reduce.adasum import adasum as adasum
from boostax.reduce.adasum import adasum_delta as adasum_delta
from boostax.reduce.by_shape import by_shape as by_shape
from boostax.reduce.codec import Codec as Codec
from boostax.reduce.codec import Message as Message
from boostax.reduce.codec import PerLeaf as PerLeaf
from boostax.reduce.feedback import compress as compress
from boostax.reduce.local import local_updates as local_updates
from boostax.reduce.local import partial_average as partial_average
from boostax.reduce.mean import all_reduce as all_reduce
from boostax.reduce.quantized import int8_reduce as int8_reduce
from boostax.reduce.sparse import threshold_reduce as threshold_reduce
from boostax.reduce.sparse import top_k_reduce as top_k_reduce

_late(__name__)
