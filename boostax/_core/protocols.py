# SPDX-License-Identifier: Apache-2.0
"""The questions that boostax asks the states of optimizers, each a ``typing.Protocol``.

A state answers a question by the methods of its protocol, and needs no base class. A state can be
inside any Optax wrapper. ``trees.telling`` finds the states in a tree that answer a question. A
class of states with a method of a nearly equal name is refused, because boostax would never call
the method.
"""

import difflib
import functools
from typing import TYPE_CHECKING, Protocol

import jax

from boostax._core import checks, types

if TYPE_CHECKING:
    from boostax._core.replicas import PerReplica


class HasMetrics(Protocol):
    """Which scalars should a log contain?

    ``metrics()`` returns a dictionary from names to arrays, usually scalars. ``boostax.metrics``
    asks this question, and numbers the names that several states report. Example: ``AdasumState``.
    """

    def metrics(self) -> dict[str, jax.Array]: ...


class Gate(Protocol):
    """What happened to the gradients of the last call?

    ``inner_ran()`` returns a bool scalar: whether the inner transformation ran. For a window, this
    means that the window closed and the result was applied. ``gradient_used()`` returns a bool
    scalar: whether the gradient was used by the inner transformation or added to a window. Outer
    gates, the train step and ``has_updated`` ask this question. Example: ``GateState``.
    """

    def inner_ran(self) -> jax.Array: ...
    def gradient_used(self) -> jax.Array: ...


class Window(Protocol):
    """Do gradients wait in an open window?

    ``is_open()`` returns a bool scalar. ``flush`` asks this question, to close the window or to
    refuse a window that ``flush`` cannot reach. Example: ``AccumulateState``.
    """

    def is_open(self) -> jax.Array: ...


class Scaler(Protocol):
    """By which number is the loss multiplied?

    ``scale`` is an f32 scalar. ``scale_array()`` returns an f32 array of the state, of any shape. A
    trace recognizes the scaler by the identity of this array. ``loss_scale``, ``value_and_grad``
    and the check for scaled losses ask this question. Example: ``LossScaleState``.
    """

    @property
    def scale(self) -> jax.Array: ...
    def scale_array(self) -> jax.Array: ...


class KeepsMasters(Protocol):
    """Which params does the optimizer compute with?

    ``master_params(params)`` returns a tree like ``params`` in f32, with the bits that the params
    in low precision lack. ``average_params`` asks this question. Example: ``StoreState``.
    """

    def master_params(self, params: types.PyTree) -> types.PyTree: ...


class OwnsParams(Protocol):
    """Does each replica have params of its own?

    ``owns_params()`` returns a Python bool. ``make_train_step``, ``on_mesh`` and
    ``scheduled_freeze`` ask this question. Example: ``LocalUpdatesState``.
    """

    def owns_params(self) -> bool: ...


class NeedsAllParams(Protocol):
    """Must every call of ``update`` get all params, frozen params too?

    ``needs_all_params()`` returns a Python bool. ``scheduled_freeze`` asks this question, and
    refuses such a state inside. Examples: ``AverageParamsState``, ``TrajectoryState``.
    """

    def needs_all_params(self) -> bool: ...


class SumsGradients(Protocol):
    """Does a reduction sum the gradients of the replicas, instead of averaging the gradients?

    ``sums_gradients()`` returns a Python bool. ``accumulate`` asks this question, because the
    window's gradient is then a part of a sum. Example: ``SumState`` of ``all_reduce(op="sum")``.
    """

    def sums_gradients(self) -> bool: ...


class HasSummedParts(Protocol):
    """For which parts must resharding preserve the sum over the replicas, not the mean?

    ``summed_parts()`` returns a list of the state's own ``PerReplica``. ``reshard_state`` and the
    checkpointer ask this question. Example: ``AccumulateState``.
    """

    def summed_parts(self) -> list["PerReplica"]: ...


class HasDistributedItems(Protocol):
    """Which parts distribute a number of items over the replicas?

    ``distributed_items()`` returns pairs of a ``PerReplica`` of the state and a number of items, an
    int. The part's arrays are ``[replicas, slots, ...]``, and item ``i`` is in slot ``i % slots``
    of replica ``i // slots``. ``reshard_state`` and the checkpointer ask this question. Example:
    ``ByShapeState``.
    """

    def distributed_items(self) -> list[tuple["PerReplica", int]]: ...


class HasServerParts(Protocol):
    """Which parts are equal on all devices of a server?

    ``server_parts()`` returns a list of the state's own ``PerReplica``. ``reshard_state(within=)``
    asks this question. Example: ``AdasumDeltaState``.
    """

    def server_parts(self) -> list["PerReplica"]: ...


class ChoosesVariant(Protocol):
    """Which compiled variant of a step does the next call run?

    ``next_variant()`` returns an i32 scalar, the number of frozen groups. ``make_train_step`` and
    ``migrate_state`` ask this question. Example: ``ScheduledFreezeState``.
    """

    def next_variant(self) -> jax.Array: ...


def _methods(kind: type) -> frozenset[str]:
    return frozenset(x for x in dir(kind) if x[0] != "_" and callable(getattr(kind, x, None)))


_OF_STEPS = (HasMetrics, Gate, Window, Scaler, SumsGradients, ChoosesVariant, OwnsParams)
_OF_ARRAYS = (KeepsMasters, NeedsAllParams, HasSummedParts, HasDistributedItems, HasServerParts)
METHODS = {kind: _methods(kind) for kind in (*_OF_STEPS, *_OF_ARRAYS)}
_NAMES = frozenset[str]().union(*METHODS.values())
# The names of methods before 0.4. Without this table, boostax would silently ignore methods with
# these names.
_BEFORE = """passed=inner_ran taken=gradient_used held=is_open known_by=scale_array
whole=master_params own_params=owns_params whole_params=needs_all_params sums=sums_gradients
shares=summed_parts dealt=distributed_items servers=server_parts coming=next_variant"""
RENAMED = {x.partition("=")[0]: x.partition("=")[2] for x in _BEFORE.split()}


def yes(state: object) -> bool:
    """Answer yes: the method of a state whose answer to a question is always True."""
    return True


@functools.cache
def answers(kind: type, question: type) -> bool:
    """Return whether a class of nodes answers a question; refuse methods of a nearly equal name."""
    is_answer = METHODS[question] <= _methods(kind)
    # A class with ``__call__`` is a module of the model, and its methods may have any names.
    if not {"_fields", "__dataclass_fields__"} & {*dir(kind)} or "__call__" in dir(kind):
        return is_answer
    fields = {*getattr(kind, "_fields", ()), *getattr(kind, "__dataclass_fields__", ())}
    methods = _methods(kind) - fields
    # A field ``metrics`` is accepted, because training states of other libraries have it.
    wrong = {f"a field {x}": f"a method {x}()" for x in fields & _NAMES - {"metrics"}}
    for x in methods - _NAMES:
        near = [RENAMED[x]] if x in RENAMED else difflib.get_close_matches(x, _NAMES, 1, 0.85)
        wrong |= {f"a method {x}()": f"{y}()" for y in near if y not in methods}
    for names in METHODS.values():
        wrong |= {f"{x}() alone": f"{y}() too" for x in names & methods for y in names - methods}
    for got, right in sorted(wrong.items()):
        hint = f"Write {right}, which boostax calls. For another purpose, use another name."
        raise TypeError(checks.message(kind.__name__, "methods", "named exactly", got, hint))
    return is_answer
