"""What a cell needs to know of a transformation, and what becomes of a cell."""

import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import boostax

PyTree = Any
AXIS = "data"
PASS, UNSUPPORTED, FAIL, NONE = "pass", "unsupported", "fail", "n/a"


PLACES = re.compile(r"(?:/[^\s/]+)+/(?:site-packages|benchmarks)/|0x[0-9a-f]{6,}")


class NoMeaning(Exception):
    """The cell has no meaning for this subject."""


class Result(NamedTuple):
    """What became of a cell.

    Attributes:
      subject: name of the transformation.
      section: letter of the section.
      cell: name of the cell.
      outcome: ``pass``, ``unsupported``, ``fail`` or ``n/a``.
      reason: the error's message, or why there is no meaning.
    """

    subject: str
    section: str
    cell: str
    outcome: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A transformation under trial.

    Attributes:
      name: as it is called in the library.
      make: ``make(inner, axis_name)``; ``axis_name`` is ``None`` on a single device.
      guard: the same with whatever the library has against gradients that are not finite.
      guarded: the part of the guarded state that a bad step must leave alone.
      reduces: it takes local gradients and returns reduced ones; alone it has no meaning.
      averages: it stands behind the reduction, which is in it where there is an axis.
      own_params: it keeps params of its own on every replica.
      calls: calls per change of the params.
      linear: a finite step moves the params by what ``reference`` says, to rounding.
      reference: ``reference(leaf by replica, f64)``, the gradient that the step should take;
        ``None`` where there is none to compare with.
      accounts: the state says what each replica held back, so that what moved and what waits
        together are the mean.
      fsdp: ``fsdp(inner, param_specs)``, the same for params sharded over an axis of that name.
      scale: limits of a loss scale, ``(make with limits, read the scale)``.
      mistakes: calls that must raise, each with a part of the message.
      unsupported: by cell, a part of the message of the error that it must raise.
      meaningless: by cell or section, why it has no meaning here.
      peer: whether it is another library's.
    """

    name: str
    make: Callable[[Any, Any], optax.GradientTransformation]
    guard: Callable[[Any, Any], optax.GradientTransformation] | None = None
    guarded: Callable[[Any], PyTree] = lambda state: state.inner_state
    reduces: bool = False
    averages: bool = False
    own_params: bool = False
    calls: int = 1
    linear: bool = True
    reference: Callable[[Any], Any] | None = None
    accounts: bool = False
    fsdp: Callable[[Any, PyTree], Any] | None = None
    scale: tuple[Callable[[float, float], Any], Callable[[Any], Any]] | None = None
    mistakes: tuple[tuple[Callable[[], Any], str], ...] = ()
    unsupported: dict[str, str] = dataclasses.field(default_factory=dict)
    meaningless: dict[str, str] = dataclasses.field(default_factory=dict)
    peer: bool = False

    def alone(self, inner: Any = None, *, guard: bool = False) -> Any:
        """On one device."""
        make = self.guard if guard and self.guard else self.make
        return optax.with_extra_args_support(make(default(inner), None))

    def mapped(self, inner: Any = None, *, guard: bool = False, axis: Any = AXIS) -> Any:
        """Inside a mapped function, with a mean over the replicas if it has none itself."""
        make, inner = (self.guard if guard and self.guard else self.make), default(inner)
        if self.peer:
            return optax.with_extra_args_support(make(inner, axis))
        if not (self.reduces or self.averages):
            inner = optax.chain(boostax.all_reduce(AXIS), inner)
        return optax.with_extra_args_support(make(inner, axis))


Cell = Callable[[Subject], None]


def default(inner: Any) -> Any:
    """Moments, and no decay: a zero gradient leaves fresh params where they are."""
    return optax.sgd(0.1, momentum=0.9) if inner is None else inner


def require(kept: Any, promise: str) -> None:
    """Raise unless the promise was kept."""
    if not kept:
        raise AssertionError(promise)


def judge(subject: Subject, section: str, name: str, cell: Cell) -> Result:
    """Run a cell.

    What is declared unsupported must raise a ``TypeError`` or ``ValueError`` with the declared
    words; to pass is then a fail of the declaration.
    """
    named = subject.name, section, name
    why = subject.meaningless.get(name) or subject.meaningless.get(section)
    if why:
        return Result(*named, NONE, why)
    declared = subject.unsupported.get(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cell(subject)
    except NoMeaning as error:
        return Result(*named, NONE, str(error))
    except Exception as error:
        # Where libraries lie is this machine's business.
        message = PLACES.sub("", " ".join(str(error).split()))
        if declared and isinstance(error, (TypeError, ValueError)) and declared in message:
            return Result(*named, UNSUPPORTED, message)
        return Result(*named, FAIL, f"{type(error).__name__}: {message[:400]}")
    if declared:
        return Result(*named, FAIL, f"declared unsupported ({declared!r}), but it works")
    return Result(*named, PASS)


def strong(x: Any) -> Any:
    """Shape and dtype of anything that can be a leaf."""
    return jnp.shape(x), jnp.result_type(x)


def same_kind(before: PyTree, after: PyTree, what: str) -> None:
    """Structure, shapes and dtypes stay."""
    require(jax.tree.structure(before) == jax.tree.structure(after), f"{what}: structure changes")
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        where = jax.tree_util.keystr(path)
        require(strong(a) == strong(b), f"{what} at {where}: {strong(a)} becomes {strong(b)}")


def finite(tree: PyTree, what: str) -> None:
    """No NaN and no infinity."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            where = f"{what} at {jax.tree_util.keystr(path)}"
            require(bool(jnp.isfinite(leaf).all()), f"{where} is not finite")


def moved(before: PyTree, after: PyTree) -> None:
    """Something changed."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    require(any(bool((a != b).any()) for a, b in pairs), "the params do not move")
