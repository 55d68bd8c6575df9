"""A mechanism does something and states what that costs: one that changes the first must state the second anew."""

from __future__ import annotations

from typing import ClassVar


class Stating:
    """Refuses a class that overrides what is done and inherits what another class says of something else.

    What the base class of a boundary says, which sets `states`, may be inherited: it claims the least.
    """

    states: ClassVar[dict[str, tuple[str, ...]]] = {}
    """The names of what states the cost, by the name of the method that it is the cost of."""

    def __init_subclass__(cls) -> None:
        for method, statements in cls.states.items():
            if method not in vars(cls) or any(name in vars(cls) for name in statements):
                continue
            for name in statements:
                owner = next(kind for kind in cls.__mro__ if name in vars(kind))
                if "states" not in vars(owner):
                    raise TypeError(
                        f"{cls.__name__} overrides '{method}', and inherits '{name}' of {owner.__name__}, which need "
                        f"not hold for it: define '{name}' in {cls.__name__} too"
                    )
