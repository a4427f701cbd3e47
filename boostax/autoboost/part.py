"""What all parts of a configuration share: checks at construction, and errors that name the field.

A part is a frozen dataclass of plain values that go to JSON and back. It is checked when it is made
by the factory that it will be handed to. ``layer`` gives what stands in the chain: a transformation
to put in front of what there is, or a function that puts one around it.
"""

import contextlib
import dataclasses
import difflib
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import optax

from boostax._core import axes, checks
from boostax._core.groups import prefix_groups

PyTree = Any
Kinds: TypeAlias = Mapping[str, tuple[str, ...]]
Wrap: TypeAlias = Callable[[optax.GradientTransformation], optax.GradientTransformation]
Layer: TypeAlias = optax.GradientTransformation | Wrap | None
Pattern: TypeAlias = str | tuple[str, ...]
Groups: TypeAlias = int | tuple[Pattern, ...]

_GROUPS = "a number of groups, or a list of patterns of paths"


class Place(NamedTuple):
    """Where a chain will run.

    Attributes:
      axis_name: replica axis or axes; ``None`` on one device.
      params: the params or their shapes; ``None`` where nobody asks for them.
    """

    axis_name: axes.AxisName | None
    params: PyTree


class Part:
    """What all parts share: lists become tuples, and errors name the part and its field."""

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            object.__setattr__(self, name, _frozen(value))
        with speaking_of(type(self).__name__, self.renamed):
            self.check()

    @property
    def renamed(self) -> dict[str, str]:
        """Arguments of the factory that are fields of another name."""
        return {}

    def check(self) -> None:
        """Raise if a value is out of range."""
        self.layer(Place("axis", None))

    def layer(self, place: Place) -> Layer:
        """What stands in the chain; ``None`` for nothing."""
        del place
        return None


@contextlib.contextmanager
def speaking_of(who: str, renamed: Mapping[str, str] | None = None) -> Generator[None]:
    """Let an error of a factory speak of the part, and of the field that became its argument."""
    try:
        yield
    except (ValueError, TypeError) as error:
        # What a factory raises begins with its name; what ``check`` raises, with none.
        text = str(error).partition(": ")[2]
        for argument, field in (renamed or {}).items():
            if text.startswith(f"{argument} "):
                text = field + text.removeprefix(argument)
                break
        raise type(error)(f"{who}: {text}") from error


def flag(name: str, value: Any, who: str = "") -> None:
    """Refuse what is no bool."""
    if not isinstance(value, bool):
        raise TypeError(checks.message(who, name, "True or False", value, "JSON: true or false."))


def chosen(part: Any, kinds: Kinds, needed: Mapping[str, str]) -> dict[str, Any]:
    """Of a part with kinds: the fields that were given, all of which belong to its kind.

    Args:
      part: with a field ``kind``.
      kinds: the fields of each kind.
      needed: the field that a kind cannot do without.
    """
    word(part.kind, tuple(kinds), "kind")
    given = {
        field.name: getattr(part, field.name)
        for field in dataclasses.fields(part)
        if field.name != "kind" and getattr(part, field.name) is not None
    }
    for name, value in given.items():
        if name not in kinds[part.kind]:
            users = " and ".join(repr(kind) for kind in kinds if name in kinds[kind])
            allowed = f"left out with kind {part.kind!r}"
            raise ValueError(checks.message("", name, allowed, value, f"It is for {users}."))
    name = needed.get(part.kind)
    if name is not None and name not in given:
        allowed = f"given with kind {part.kind!r}"
        raise ValueError(checks.message("", name, allowed, None, "It has no default."))
    return given


def word(value: Any, words: tuple[str, ...], name: str, who: str = "") -> None:
    """Refuse what is none of the words, and name the one that was perhaps meant."""
    checks.choice(who, name, value, words, nearest(value, words))


def known(who: str, data: Any, allowed: tuple[str, ...], what: str, hint: str) -> None:
    """Refuse what is no dictionary, and keys that are not there to be given."""
    if not isinstance(data, Mapping):
        raise TypeError(checks.message(who, what, "those of a dictionary", data, hint))
    for key in cast("Mapping[str, Any]", data):
        if key not in allowed:
            words = "among " + ", ".join(repr(x) for x in allowed)
            raise ValueError(checks.message(who, what, words, key, nearest(key, allowed)))


def nearest(word: Any, words: tuple[str, ...]) -> str:
    """A hint: the word that was perhaps meant."""
    found = difflib.get_close_matches(str(word), words, 1, 0.5)
    return f"Did you mean {found[0]!r}?" if found else "Nothing there is close to it."


def check_groups(groups: Any) -> None:
    """A number, or patterns."""
    hint = "4 cuts the layers into quarters; ['embed', 'block_*'] names groups by patterns."
    if isinstance(groups, tuple) and groups and all(are_texts(x) for x in groups):
        return
    if isinstance(groups, (tuple, str)):
        raise TypeError(checks.message("", "groups", _GROUPS, groups, hint))
    checks.positive_int("", "groups", groups, hint)


def labels(who: str, groups: Any, params: PyTree, **options: Any) -> Any:
    """What ``scheduled_freeze`` and ``group_loss_scale`` take: a tree, or patterns."""
    if isinstance(groups, tuple):
        return groups
    if params is None:
        hint = "Pass them to optimizer or make_train_step, or name the groups by patterns."
        allowed = f"given where groups is a number, {groups}"
        raise ValueError(checks.message(who, "params", allowed, None, hint))
    with speaking_of(who, {"n": "groups"}):
        return prefix_groups(params, groups, **options)


def around(factory: Callable[..., Any], **options: Any) -> Wrap:
    """A function that puts a transformation around another; checks the options at once."""
    factory(optax.identity(), **options)
    return lambda inner: factory(inner, **options)


def are_texts(value: Any) -> bool:
    """Whether it is a text, or a tuple of some."""
    return isinstance(value, str) or (
        isinstance(value, tuple) and bool(value) and all(isinstance(x, str) for x in value)
    )


def _frozen(value: Any) -> Any:
    return tuple(_frozen(x) for x in value) if isinstance(value, (list, tuple)) else value
