"""Registries of named things: Shoal's own, those of installed packages, and `package.module:NAME`.

A package adds to a kind with an entry point of that kind's group (`shoal.algorithms`, `shoal.mechanisms`,
`shoal.datasets`, `shoal.accountants`):

    [project.entry-points."shoal.algorithms"]
    layered = "my_package:LAYERED"

Packages cannot override Shoal's own names. Nothing is imported before it is looked up by name.
"""

from __future__ import annotations

import pkgutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module, invalidate_caches
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from shoal.errors import ConfigError, PluginError, ShoalError, nearest

T = TypeVar("T")
IN_PYTHON = "python:"
"""The prefix of the name of something passed in Python that cannot be imported by a name."""


@dataclass(frozen=True)
class Source:
    """Where something of another package is, known before anything is imported."""

    reference: str
    package: str = ""

    def allowed_by(self, allowed: Collection[str]) -> bool:
        """Is its distribution, its module, or a package that holds the module among those allowed?"""
        module, distribution = self.reference.partition(":")[0], self.package.partition(" ")[0].replace("-", "_")
        names = {each.replace("-", "_") for each in allowed if each}
        return any(each == distribution or f"{module}.".startswith(f"{each}.") for each in names)


class Registry(Mapping[str, T], Generic[T]):
    """All things of one kind, by name.

    Args:
        key: The word for the kind in messages, such as `algorithm`.
        kind: What each of them is an instance of.
        own: Gives those that come with Shoal; called once, when first needed.
        group: The entry points by which packages add to them; none if empty.
        error: What is raised for an unknown name.
    """

    def __init__(
        self,
        key: str,
        kind: type[Any],
        own: Callable[[], Mapping[str, T]],
        group: str = "",
        error: type[ShoalError] = ConfigError,
    ) -> None:
        self.key, self.kind, self.group, self.error = key, kind, group, error
        self._make = own

    @cached_property
    def own(self) -> Mapping[str, T]:
        """Those that come with Shoal."""
        return self._make()

    def find(self, name: str, allowed: Collection[str] | None = None) -> T:
        """The thing of this name, or of a reference `package.module:NAME`.

        Args:
            name: A name, or a reference.
            allowed: The packages and modules from which something may be imported; None: from any.

        Raises:
            ShoalError: There is no such thing, it is of another kind, or it may not be imported.
        """
        if name in self.own:
            return self.own[name]
        if allowed is not None and not any(source.allowed_by(allowed) for source in self._sources(name)):
            raise self.error(
                f"{self.key} '{name}' is not Shoal's, and the owner of this site allows no package that has it: "
                f"--allow-plugin PACKAGE"
            )
        source = self._source(name)
        found: T = imported(source.reference, self.key)
        if not isinstance(found, self.kind):
            raise PluginError(f"{self.key} '{name}' is a {type(found).__name__}, not of type {self.kind.__name__}")
        return found

    def origin(self, name: str) -> str:
        """The package that something comes from, with its version, or its module."""
        return "shoal" if name in self.own else (source := self._source(name)).package or source.reference

    def name_of(self, thing: T, otherwise: str) -> str:
        """The name by which something passed in Python can be found again: Shoal's, or `package.module:NAME`."""
        for name, own in self.own.items():
            if own is thing:
                return name
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and module.__name__ != "__main__":
                for name, value in list(vars(module).items()):
                    if value is thing:
                        return f"{module.__name__}:{name}"
        return IN_PYTHON + otherwise

    def loadable(self) -> dict[str, T]:
        """Everything by name; what cannot be loaded is left out with a warning."""
        found: dict[str, T] = {}
        for name in self:
            try:
                found[name] = self[name]
            except ShoalError as problem:
                warnings.warn(f"left out: {problem}", stacklevel=2)
        return found

    def __getitem__(self, name: str) -> T:
        return self.find(name)

    def __contains__(self, name: object) -> bool:
        """Also true for a reference, which is only resolved when it is looked up."""
        return name in self.own or (isinstance(name, str) and ":" in name) or name in self._claims()

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.own, *sorted(self._claims()))))

    def __len__(self) -> int:
        return len({*self.own, *self._claims()})

    def _claims(self) -> dict[str, list[Source]]:
        """The entry points of installed packages."""
        found: dict[str, list[Source]] = {}
        for point in _installed(tuple(sys.path), self.group) if self.group else ():
            package = f"{point.dist.name} {point.dist.version}" if point.dist else ""
            found.setdefault(point.name, []).append(Source(f"{point.module}:{point.attr}", package))
        return found

    def _sources(self, name: str) -> list[Source]:
        return [Source(name)] if ":" in name else self._claims().get(name, [])

    def _source(self, name: str) -> Source:
        if name.startswith(IN_PYTHON):
            raise self.error(
                f"{self.key} '{name}' was passed in Python: pass it again, as in "
                f"shoal.run(resume=..., {self.key}=RECORD), or put it into a module that can be imported"
            )
        found = self._sources(name)
        if not found:
            module, _, last = name.rpartition(".")
            own = f"; for one of your own write '{module}:{last}'" if module and last[:1].isupper() else ""
            raise self.error(f"there is no {self.key} '{name}'{own or nearest(name, self)}")
        if len(found) > 1:
            both = " and ".join(sorted(f"{source.package} ({source.reference})" for source in found))
            raise PluginError(f"{self.key} '{name}' is claimed by {both}; write package.module:NAME instead")
        return found[0]


@lru_cache(maxsize=32)
def _installed(path: tuple[str, ...], group: str) -> EntryPoints:
    """The entry points of the packages on a path; to read them takes longer than many a lookup."""
    return entry_points(group=group)


def imported(reference: str, key: str, error: type[ShoalError] = PluginError, noun: str = "NAME") -> Any:
    """What `package.module:NAME` names, from the current folder or the environment.

    Args:
        reference: Module and attribute.
        key: What it is for, for the message.
        error: What is raised where it is not there.
        noun: What NAME is, for the message.

    Raises:
        ShoalError: The module cannot be imported, or has no such attribute.
    """
    module_name, _, attribute = reference.partition(":")
    if not all(map(str.isidentifier, module_name.split("."))) or not attribute.isidentifier():
        raise error(f"{key} '{reference}' is not of the form package.module:{noun}")
    try:
        with _current_folder_first():
            module = import_module(module_name)
    except Exception as problem:
        raise error(f"{key} '{reference}': {_reason(problem, module_name)}") from problem
    if not hasattr(module, attribute):
        others = [
            name for name, value in vars(module).items() if not isinstance(value, ModuleType) and name[0] != "_"
        ]
        raise error(f"{key} '{reference}': {module_name} has no '{attribute}'{nearest(attribute, others)}")
    return getattr(module, attribute)


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Put the current folder, where users keep their code, on the path: console scripts do not have it there."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)


def _reason(problem: Exception, name: str) -> str:
    """Why a module could not be imported, and the nearest existing one."""
    if not isinstance(problem, ModuleNotFoundError):
        return f"importing {name} failed: {type(problem).__name__}: {problem}"
    missing = problem.name or name
    if name != missing and not name.startswith(f"{missing}."):
        return f"{name} needs the module '{missing}', which is not installed"
    parent, _, last = missing.rpartition(".")
    if parent and last == "py":
        return f"name the module without .py: '{parent}'"
    search = list(getattr(sys.modules[parent], "__path__", ())) if parent in sys.modules else [str(Path.cwd())]
    siblings = [f"{parent}.{info.name}" if parent else info.name for info in pkgutil.iter_modules(search)]
    return f"no module '{missing}' in {Path.cwd()} or among the installed packages{nearest(missing, siblings)}"
