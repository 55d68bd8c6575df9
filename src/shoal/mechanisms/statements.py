"""A mechanism does something and states what that costs: one that changes the first must state the second anew."""

from __future__ import annotations

import re
from inspect import getdoc
from typing import ClassVar


def summary(value: object) -> str:
    """What a mechanism does, in a sentence or two: the first paragraph of its class's docstring."""
    first = " ".join((getdoc(type(value)) or "").split("\n\n")[0].split())
    return re.sub(r"^Boundary `\w+`: ", "", first)


class Stating:
    """Refuses a class that overrides what is done and inherits what another class says of something else.

    A class that a mixin overrides it for is refused as well.
    What the base class of a boundary says, which sets `states`, may be inherited: it claims the least.
    `does`, `limits` and `assumes` are its words in certificates.
    """

    def does(self) -> str:
        """What happens here."""
        return summary(self)

    def limits(self, rounds: int) -> str:
        """By how much one unit can move what leaves, or the noise on it; empty where there is nothing to say."""
        return ""

    def assumes(self) -> tuple[str, ...]:
        """What its privacy events take for granted."""
        return ()

    states: ClassVar[dict[str, tuple[str, ...]]] = {}
    """The names of what states the cost, by the name of the method that it is the cost of."""

    def __init_subclass__(cls) -> None:
        for method, statements in cls.states.items():
            cls.refuse_inherited(method, statements)

    @classmethod
    def refuse_inherited(cls, method: str, statements: tuple[str, ...]) -> None:
        """Raise a TypeError where the class overrides a method, none of its statements, and inherits another's."""
        first = next(kind for kind in cls.__mro__ if {method, *statements} & vars(kind).keys())
        if method not in vars(first) or any(name in vars(first) for name in statements):
            return
        for name in statements:
            owner = next(kind for kind in cls.__mro__ if name in vars(kind))
            if "states" not in vars(owner):
                raise TypeError(
                    f"{cls.__name__} overrides '{method}', and inherits '{name}' of {owner.__name__}, which need "
                    f"not hold for it: define '{name}' in {cls.__name__} too"
                )
