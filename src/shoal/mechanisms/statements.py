"""A mechanism does something and states what that costs: one that changes the first must state the second anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar


def summary(value: object) -> str:
    """What a mechanism does, in a sentence or two: the first paragraph of its own class's docstring, or its name."""
    first = " ".join((type(value).__doc__ or type(value).__name__).split("\n\n")[0].split())
    return re.sub(r"^Boundary `\w+`: ", "", first)


class Stating:
    """Refuses a class that overrides what is done and inherits what another class says of something else.

    A class that a mixin overrides it for is refused as well.
    What the base class of a boundary says may be inherited: it claims the least.
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
    """The names of what states the cost, by the name of what it is the cost of."""
    resets: ClassVar[dict[str, tuple[str, ...]]] = {}
    """The same of what need not be stated anew: it is then as the base class of the boundary says."""

    def __init_subclass__(cls) -> None:
        refuse_inherited(cls)


def refuse_inherited(kind: type[Stating]) -> None:
    """Raise a TypeError where a class overrides what is done, and inherits what another states of its cost.

    An algorithm asks again for each of its parts: their classes may have been changed since they were made.
    """
    for method, name, owner in _inherited(kind, kind.states):
        raise TypeError(
            f"{kind.__name__} overrides '{method}', and inherits '{name}' of {owner.__name__}, which need not hold "
            f"for it: define '{name}' in {kind.__name__} too ({name} = {owner.__name__}.{name}, if that still holds)"
        )
    for _, name, _ in _inherited(kind, kind.resets):
        setattr(kind, name, vars(kind.__mro__[_boundary(kind)])[name])


def _inherited(kind: type[Stating], decides: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, str, type]]:
    """What the class overrides, the statements that it inherits nevertheless, and the classes that they are of."""
    base = _boundary(kind)
    for method, statements in decides.items():
        for name in statements:
            done, stated = _place(kind, method), _place(kind, name)
            if done < min(stated, base) and stated != base:
                yield method, name, kind.__mro__[stated]


def _place(kind: type, name: str) -> int:
    """Which of its bases, from itself on, defines a name, but for what was altered for an audit."""
    defined = (name in vars(each) and name not in vars(each).get("__altered__", ()) for each in kind.__mro__)
    return next((place for place, found in enumerate(defined) if found), len(kind.__mro__))


def _boundary(kind: type) -> int:
    """Which of them is the base class of its boundary: the last one that names the boundary."""
    return max((place for place, each in enumerate(kind.__mro__) if "section" in vars(each)), default=0)
