"""A mechanism does something and states what that costs: one that changes the first must state the second anew."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import fields, is_dataclass
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


def refuse_inherited(kind: type[Stating], own: Container[str] = ()) -> None:
    """Raise a TypeError where a class overrides what is done, and inherits what another states of its cost.

    An algorithm asks again for each of its parts: their classes may have been changed since they were made, and an
    instance may override what is done by attributes of its `own`.
    """
    for _, name, _ in _inherited(kind, "resets"):
        setattr(kind, name, vars(kind.__mro__[_boundary(kind)])[name])
    for method, name, owner in (*_inherited(kind, "states", own), *_inherited(kind, "resets", own)):
        raise TypeError(
            f"{kind.__name__} overrides '{method}', and inherits '{name}' of {owner.__name__}, which need not hold "
            f"for it: define '{name}' in {kind.__name__} too ({name} = {owner.__name__}.{name}, if that still holds)"
        )


def _inherited(kind: type[Stating], rules: str, own: Container[str] = ()) -> Iterator[tuple[str, str, type]]:
    """What the class overrides, the statements that it inherits nevertheless, and the classes that they are of.

    These know nothing of classes that they are not derived from; a mixin's statement is of all that follows it.
    The rules of all classes hold: one that has its own adds them to the others.
    """
    bases, base = kind.__mro__, _boundary(kind)
    decides = [rule for each in bases for rule in vars(each).get(rules, {}).items()]
    for method, name in [(method, name) for method, statements in decides for name in statements]:
        place, owner = next((at, each) for at, each in enumerate(bases) if _defines(each, name))
        if place == base:
            continue
        others = {*bases[: base if Stating in owner.__mro__ else place]} - {*owner.__mro__}
        overridden = method in own and not (is_dataclass(owner) and method in {each.name for each in fields(owner)})
        if overridden or any(_defines(each, method) or _defines(each, name) for each in others):
            yield method, name, owner


def _defines(kind: type, name: str) -> bool:
    """Does a class define a name itself? What was altered for an audit is left out."""
    return name in vars(kind) and name not in vars(kind).get("__altered__", ())


def _boundary(kind: type) -> int:
    """Which of its bases is that of the boundary: the last one that names the boundary."""
    return max((at for at, each in enumerate(kind.__mro__) if "section" in vars(each)), default=0)
