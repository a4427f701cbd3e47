# SPDX-License-Identifier: Apache-2.0
"""A part of a configuration: the arguments of a public factory as data that goes to JSON and back.

The fields of a part are the parameters of its factories, with their types and defaults; the factory
checks the values when the part is made. What no data can say is not among them: the optimizer
inside, the replica axes, the params.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, cast

import optax

from boostax._core import axes, checks
from boostax.model.less_bn import LessBNReport

PyTree = Any
Factory: TypeAlias = Callable[..., Any]
Layer: TypeAlias = (
    optax.GradientTransformation
    | Callable[[optax.GradientTransformation], optax.GradientTransformation]
    | None
)
# Parameters that the place in a chain gives.
_PLACE = ("axis_name", "params", "less_bn", "inner")


class Place(NamedTuple):
    """Where a chain will run.

    Attributes:
      axis_name: replica axis or axes; ``None`` on one device.
      params: the params or their shapes; ``None`` where nobody asks for them.
      less_bn: what LessBN did to the model; ``None`` where it did nothing.
    """

    axis_name: axes.AxisName | None
    params: PyTree
    less_bn: LessBNReport | None = None


# Stands for params while a part is checked that has none yet.
LATER = object()


@dataclasses.dataclass(frozen=True)
class Part:
    """What all parts share: fields from signatures, lists become tuples, errors name the field.

    A class is declared with its ``factory``, or a factory for each word of its field ``kind``.
    Defaults in its body take the place of the signature's; other fields in it come last. Where a
    part has kinds, ``None`` is the default of the factory.

    Attributes:
      kinds: the factories, by kind; one that has no kinds is under ``""``.
      made: arguments that are no data, by functions that make them of fields.
      renamed: the field of an argument that has another name.
    """

    kinds: ClassVar[Mapping[str, Factory]] = {}
    made: ClassVar[Mapping[str, Factory]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **fields: Any): ...

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, factory: Factory | Mapping[str, Factory] | None = None) -> None:
        if factory is not None:
            cls.kinds = factory if isinstance(factory, Mapping) else {"": factory}
        fields: dict[str, Any] = {"kind": str} if len(cls.kinds) > 1 else {}
        defaults: dict[str, Any] = {"kind": next(iter(cls.kinds), "")} if fields else {}
        for one in cls.kinds.values():
            for name, parameter in cls.parameters(one).items():
                field = cls.renamed.get(name, name)
                fields[field] = parameter.annotation
                shared = len(cls.kinds) > 1 or parameter.default.__hash__ is None
                defaults.setdefault(field, None if shared else parameter.default)
        if "kind" in fields:
            fields = {"kind": fields["kind"], **fields}
        for name, default in defaults.items():
            if name not in vars(cls) and default is not inspect.Parameter.empty:
                setattr(cls, name, default)
        cls.__annotations__ = fields | vars(cls).get("__annotations__", {})
        dataclasses.dataclass(frozen=True, repr=False)(cls)

    @classmethod
    def parameters(cls, factory: Factory) -> dict[str, inspect.Parameter]:
        """What data can say to a factory: its parameters, and those of what makes the others."""
        found: dict[str, inspect.Parameter] = {}
        for name, parameter in signature(factory).items():
            told = signature(cls.made[name]) if name in cls.made else {name: parameter}
            found |= {name: parameter for name, parameter in told.items() if is_data(parameter)}
        return found

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            object.__setattr__(self, name, _frozen(value))
        with self._named():
            if len(self.kinds) > 1:
                self._require_kind()
            types = {field.name: field.type for field in dataclasses.fields(self)}
            for name, value in self.stated().items():
                if bool in (types[name], *typing.get_args(types[name])):
                    flag(name, value)
            self.check()

    def __repr__(self) -> str:
        words = (f"{name}={value!r}" for name, value in self.stated().items())
        return f"{type(self).__name__}({', '.join(words)})"

    def stated(self) -> dict[str, Any]:
        """The fields and their values, without those that are left to the factory."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.default is not None or getattr(self, field.name) is not None
        }

    def check(self) -> None:
        """Raise if a value is out of range: where it can be, as the factory does."""
        self.layer(Place("axis", LATER))

    def layer(self, place: Place) -> Layer:
        """What stands in the chain: in front of what there is, or a function that goes around it.

        Args:
          place: where the chain will run.

        Returns:
          A transformation; a function of one, if the factory takes one; or ``None`` for nothing.
        """
        factory, options = self._factory(), self.arguments(place)
        if "inner" not in signature(factory):
            return factory(**options)
        # Raises at once.
        factory(optax.identity(), **options)
        return lambda inner: factory(inner, **options)

    def arguments(self, place: Place) -> dict[str, Any]:
        """What the factory is called with; what was left out is left to it."""
        given = self.stated() | place._asdict()
        names = signature(self._factory())
        with self._named():
            made = {
                name: make(**{field: given[field] for field in signature(make) if field in given})
                for name, make in self.made.items()
                if name in names
            }
        fields = {name: self.renamed.get(name, name) for name in names}
        return {name: given[field] for name, field in fields.items() if field in given} | made

    def _require_kind(self) -> None:
        """All that is given belongs to the kind, and what it cannot do without is given."""
        word(self.kind, tuple(self.kinds), "kind")
        given = self.stated()
        fields = {
            kind: {self.renamed.get(name, name): x for name, x in self.parameters(one).items()}
            for kind, one in self.kinds.items()
        }
        mine = fields[self.kind]
        for name, value in given.items():
            users = " and ".join(repr(kind) for kind in fields if name in fields[kind])
            allowed, hint = f"left out with kind {self.kind!r}", f"It is for {users}."
            checks.require("", name, value, allowed, name in ("kind", *mine), hint)
        for name, parameter in mine.items():
            allowed, hint = f"given with kind {self.kind!r}", "It has no default."
            there = name in given or parameter.default is not inspect.Parameter.empty
            checks.require("", name, None, allowed, there, hint)

    def _factory(self) -> Factory:
        return self.kinds[self.kind if len(self.kinds) > 1 else ""]

    def _named(self) -> contextlib.AbstractContextManager[None]:
        return speaking_of(type(self).__name__, self.renamed)


@functools.cache
def signature(factory: Factory) -> dict[str, inspect.Parameter]:
    """The parameters of a factory, their annotations evaluated."""
    return dict(inspect.signature(factory, eval_str=True).parameters)


def is_data(parameter: inspect.Parameter) -> bool:
    """Whether a value of JSON can be meant for it: no transformation, and not the chain's place."""
    named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    hints = (parameter.annotation, *typing.get_args(parameter.annotation))
    return named and parameter.name not in _PLACE and optax.GradientTransformation not in hints


@contextlib.contextmanager
def speaking_of(who: str, renamed: Mapping[str, str]) -> Generator[None]:
    """Let an error of a factory speak of the part, and of the field that became its argument."""
    try:
        yield
    except (ValueError, TypeError) as error:
        # What a factory raises begins with its name; what a part raises, with its own or none.
        text = str(error).partition(": ")[2] or str(error)
        for argument, field in renamed.items():
            if text.startswith(f"{argument} "):
                text = field + text.removeprefix(argument)
                break
        raise type(error)(f"{who}: {text}") from error


def flag(name: str, value: Any, who: str = "") -> None:
    """Refuse what is no bool."""
    fits, hint = isinstance(value, bool), "JSON: true or false."
    checks.require(who, name, value, "True or False", fits, hint, TypeError)


def path(name: str, value: Any, who: str = "") -> None:
    """Refuse what is no path, nor ``None``."""
    fits = value is None or isinstance(value, str)
    checks.require(who, name, value, "a path or None", fits, "It names files.", TypeError)


def word(value: Any, words: tuple[str, ...], name: str, who: str = "") -> None:
    """Refuse what is none of the words, and name the one that was perhaps meant."""
    checks.choice(who, name, value, words, nearest(value, words))


def known(who: str, data: Any, allowed: tuple[str, ...], what: str, hint: str) -> None:
    """Refuse what is no dictionary, and keys that are not there to be given."""
    fits = isinstance(data, Mapping)
    checks.require(who, what, data, "those of a dictionary", fits, hint, TypeError)
    for key in cast("Mapping[str, Any]", data):
        words = "among " + ", ".join(map(repr, allowed))
        checks.require(who, what, key, words, key in allowed, nearest(key, allowed))


def nearest(word: Any, words: tuple[str, ...]) -> str:
    """A hint: the word that was perhaps meant."""
    found = difflib.get_close_matches(str(word), words, 1, 0.5)
    return f"Did you mean {found[0]!r}?" if found else "Nothing there is close to it."


class _Hashable(dict[str, Any]):
    """A dictionary in frozen data."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _Hashable({key: _frozen(x) for key, x in value.items()})
    return tuple(_frozen(x) for x in value) if isinstance(value, (list, tuple)) else value
