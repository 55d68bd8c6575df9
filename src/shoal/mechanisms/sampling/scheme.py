"""What samplers of clients and of records share: the word in `sampling` picks the class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError, nearest
from shoal.mechanisms.statements import Stating

Indices = npt.NDArray[np.int64]
Method = TypeVar("Method", bound=Callable[..., Any])


def required(method: Method) -> Method:
    """An abstract method; mypy must not see that, as it would refuse `Clients("poisson")`, which is a subclass."""
    return abstractmethod(method)


class Scheme(Stating, ABC):
    """A dataclass whose class is the one registered for the word in its field `sampling`."""

    sampling: str
    schemes: ClassVar[dict[str, type[Any]]]
    section: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "schemes" in vars(cls) or not (word := vars(cls).get("sampling")):
            return
        taken = cls.schemes.get(word)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{cls.section}.sampling '{word}' is {taken.__name__}: {cls.__name__} needs another word")
        cls.schemes[word] = cls

    def __new__(cls, sampling: str | None = None, *args: Any, **settings: Any) -> Self:
        word = cls.sampling if sampling is None else sampling
        if word == cls.sampling and "schemes" not in cls.__dict__:
            return super().__new__(cls)
        if word not in cls.schemes:
            raise ConfigError(
                f"{cls.section}.sampling cannot be {word!r}: it is one of {', '.join(cls.schemes)}"
                f"{nearest(str(word), cls.schemes)}"
            )
        scheme = cls.schemes[word]
        if issubclass(scheme, cls):  # Python calls its __init__ next
            return super().__new__(scheme)
        made: Self = scheme(word, *args, **settings)
        return made
