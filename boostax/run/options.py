# SPDX-License-Identifier: Apache-2.0
"""Options as dataclasses, each field with the rule that its values keep."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from boostax._core import checks


class Use(NamedTuple):
    """With which choices of another option an option is used, and what it is for."""

    other: str
    choices: tuple[str, ...]
    hint: str


class Rule(NamedTuple):
    """What an option may be.

    Attributes:
      hint: what it is.
      allowed: in words.
      test: the same for a number; ``None`` where it counts from 1 on.
      left_out: what it stands for where it is left out.
      uses: all of which must hold for it to mean anything.
    """

    hint: str
    allowed: str = ""
    test: Callable[[float], bool] | None = None
    left_out: Any = None
    uses: tuple[Use, ...] = ()


def option(default: Any, *rule: Any, **more: Any) -> Any:
    """A field with its `Rule`."""
    return dataclasses.field(default=default, metadata={"rule": Rule(*rule, **more)})


def value(options: Any, name: str) -> Any:
    """An option, or what it stands for where it is left out."""
    given = getattr(options, name)
    return _rules(options)[name].left_out if given is None else given


def check(who: str, options: Any, spelled: Callable[[str], str] = str) -> None:
    """Refuse options that break their rule.

    Args:
      who: takes them.
      options: a dataclass.
      spelled: what a field is called in messages.

    Raises:
      ValueError, TypeError: the option, what is allowed, and what came.
    """
    for name, rule in _rules(options).items():
        given, option = getattr(options, name), spelled(name)
        for use in rule.uses:
            choice = getattr(options, use.other)
            if choice not in use.choices:
                other, off = spelled(use.other), choice == "none"
                where = f"without {other}" if off else f"with {other} {choice}"
                checks.absent(who, option, given, f"left out {where}", use.hint)
        if given is not None and rule.test is None:
            checks.positive_int(who, option, given, rule.hint)
        elif given is not None and rule.test is not None:
            checks.number(who, option, given, rule.allowed, rule.test, rule.hint)


def _rules(options: Any) -> dict[str, Rule]:
    fields = {field.name: field.metadata.get("rule") for field in dataclasses.fields(options)}
    return {name: rule for name, rule in fields.items() if rule is not None}
