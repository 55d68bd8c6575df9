"""The cells of a sweep: a grid, random draws from it, or the trials of a private selection.

The plan is written to `sweep.json` before anything runs, so that a resumed sweep has the same cells. Each cell draws
its own noise (`noise_seed`): cells that share noise reveal more than their composition.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from shoal import release
from shoal.accounting.selection import Trials
from shoal.config import DEFAULT_EXPERIMENT, Config, configure, override, read_toml
from shoal.errors import ConfigError, RunError
from shoal.files import write_whole
from shoal.random.streams import Streams

FILE = "sweep.json"
MOST_CELLS = 100_000


@dataclass(frozen=True)
class Range:
    """A range of values for random cells: uniform, on a log scale where both ends are above 0."""

    low: float
    high: float

    def draw(self, generator: np.random.Generator) -> Any:
        """A random value."""
        share = float(generator.random())
        if isinstance(self.low, int) and isinstance(self.high, int):
            return self.low + int(share * (self.high - self.low + 1))
        if self.low > 0:
            return float(f"{math.exp(math.log(self.low) + share * math.log(self.high / self.low)):.4g}")
        return float(f"{self.low + share * (self.high - self.low):.4g}")


@dataclass(frozen=True)
class Selection:
    """A private selection: the distribution of the number of trials, and the cells that trials choose from."""

    shape: float
    gamma: float
    cells: list[dict[str, Any]]

    @property
    def trials(self) -> Trials:
        """The distribution of the number of trials."""
        return Trials(self.shape, self.gamma)


@dataclass(frozen=True)
class Plan:
    """A sweep before it runs.

    Attributes:
        base: The settings that all cells share.
        cells: The settings of each cell; in a private selection a cell is a trial.
        seeds: The noise seed of each cell.
        no_guarantee: Whether methods without a proof are allowed.
        charge: Whether to compute what all cells together cost.
        selection: The private selection, if it is one.
        chosen: The trial that it has chosen.
    """

    base: dict[str, Any]
    cells: list[dict[str, Any]]
    seeds: list[int]
    no_guarantee: bool = False
    charge: bool = False
    selection: Selection | None = None
    chosen: int | None = None

    def settings(self, number: int) -> dict[str, Any]:
        """The configuration of a cell, as `configure` takes it."""
        given = self.base | self.cells[number]
        secure = given.get("random") == "secure"  # which draws its own noise
        return given if secure or "noise_seed" in given else given | {"noise_seed": self.seeds[number]}

    def config(self, number: int) -> Config:
        """The configuration of a cell."""
        return configure(self.settings(number))

    def write(self, folder: Path) -> None:
        """Write sweep.json."""
        text = json.dumps({release.KEY: release.SWEEP, "version": 1, **asdict(self)}, indent=1) + "\n"
        write_whole(folder / FILE, text.encode())

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Read sweep.json.

        Raises:
            RunError: Where there is none, or it cannot be read.
        """
        try:
            held = json.loads((folder / FILE).read_text(encoding="utf-8"))
            held.pop("version")
            held.pop(release.KEY, None)
            selection = held.pop("selection")
            return cls(**held, selection=Selection(**selection) if selection else None)
        except FileNotFoundError:
            raise RunError(f"{folder} is not a sweep's folder: it has no {FILE}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{folder / FILE} cannot be read: {error}") from None


def base_settings(config: Path | None, changes: Sequence[str], varied: Iterable[str] = ()) -> dict[str, Any]:
    """The settings that all cells share; no baseline unless asked for.

    Args:
        config: A TOML file; None for the default experiment.
        changes: Settings as `key=value`.
        varied: The grid's keys; one that names the algorithm replaces the default experiment.
    """
    given = read_toml(config) if config is not None else {}
    given |= dict(override(word) for word in changes)
    if config is None and "algorithm" not in {*given, *varied}:
        given = DEFAULT_EXPERIMENT | {"baseline": False} | given
    return given


def grid_of(words: Sequence[str]) -> dict[str, list[Any] | Range]:
    """Parse `key=a,b,c`, or `key=low..high` for random cells; each key once."""
    found: dict[str, list[Any] | Range] = {}
    for word in words:
        key, equals, text = (part.strip() for part in word.partition("="))
        if not equals or not text:
            raise ConfigError(f"'--grid {word}' names no values; an example is --grid local.lr=0.05,0.1")
        if key in found:
            raise ConfigError(f"'--grid {word}': {key} was given before; put all its values into one --grid")
        found[key] = _range(key, text) if ".." in text and "," not in text else _values(key, text)
    return found


def _values(key: str, text: str) -> list[Any]:
    whole = override(f"{key}={text}")[1]
    values = whole if isinstance(whole, list) else [override(f"{key}={item.strip()}")[1] for item in text.split(",")]
    seen: list[Any] = []
    for value in values:
        if value == "":
            raise ConfigError(f"'--grid {key}={text}' has an empty value between its commas")
        if not any(value == other and type(value) is type(other) for other in seen):
            seen.append(value)
    return seen


def _range(key: str, text: str) -> list[Any] | Range:
    low, high = (override(f"{key}={end}")[1] for end in text.split("..", 1))
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high)):
        return _values(key, text)  # a path such as ../patients.csv
    if not low < high:
        raise ConfigError(f"'--grid {key}={text}': the range must be increasing")
    return Range(low, high)


def product_of(grid: Mapping[str, list[Any] | Range]) -> list[dict[str, Any]]:
    """Every combination."""
    ranged = [key for key, values in grid.items() if isinstance(values, Range)]
    if ranged:
        raise ConfigError(f"--grid {ranged[0]} is a range: give values, or --random N to draw from it")
    lists = [values for values in grid.values() if isinstance(values, list)]
    if math.prod(map(len, lists)) > MOST_CELLS:
        raise ConfigError(f"the grid has more than {MOST_CELLS:,} cells; give fewer values, or --random N")
    return [dict(zip(grid, values, strict=True)) for values in product(*lists)]


def random_cells(
    grid: Mapping[str, list[Any] | Range], count: int, generator: np.random.Generator
) -> list[dict[str, Any]]:
    """Draw cells uniformly, from a finite grid without replacement."""
    if not 1 <= count <= MOST_CELLS:
        raise ConfigError(f"--random must be in 1 to {MOST_CELLS:,}, got {count}")
    if not any(isinstance(values, Range) for values in grid.values()):
        every = product_of(grid)
        order = generator.permutation(len(every))[:count]
        return [every[place] for place in sorted(order)]
    return [{key: _drawn(values, generator) for key, values in grid.items()} for _ in range(count)]


def _drawn(values: list[Any] | Range, generator: np.random.Generator) -> Any:
    if isinstance(values, Range):
        return values.draw(generator)
    return values[int(generator.integers(len(values)))]


def make_plan(
    base: dict[str, Any],
    grid: Mapping[str, list[Any] | Range],
    *,
    random: int | None = None,
    no_guarantee: bool = False,
    charge: bool = False,
    expected_trials: float | None = None,
    shape: float = 0.0,
    private: bool = False,
) -> Plan:
    """Plan a sweep and check every cell.

    Args:
        base: The settings that all cells share.
        grid: The values of each key.
        random: How many cells to draw from the grid; None for all.
        no_guarantee: Whether methods without a proof are allowed.
        charge: Whether to compute what all cells together cost.
        expected_trials: Expected trials of a private selection; by default one a cell.
        shape: The shape of their distribution.
        private: Whether it is a private selection.

    Raises:
        ConfigError: Where a cell's configuration is invalid.
    """
    seed = base.get("seed", 0)
    streams = Streams(seed if isinstance(seed, int) else 0)
    cells = product_of(grid) if random is None else random_cells(grid, random, streams.generator("sweep"))
    selection = None
    if private:
        # The number of trials and their noise must be secret: from the system's entropy, not the seed.
        streams = Streams(secrets.randbits(62))
        trials = Trials.expecting(float(len(cells)) if expected_trials is None else expected_trials, shape)
        selection = Selection(trials.shape, trials.gamma, cells)
        generator = streams.generator("trials")
        count = trials.draw(generator)
        cells = [cells[int(place)] for place in generator.integers(len(cells), size=count)]
    seeds = [streams.number("cell", number) for number in range(len(cells))]
    plan = Plan(base, cells, seeds, no_guarantee, charge, selection)
    for number in range(len(cells)):
        plan.config(number)
    for cell in selection.cells if selection else []:
        if (seed := configure(base | cell).noise_seed) is not None:
            raise ConfigError(f"noise_seed {seed}: trials of a private selection draw their own noise; leave it out")
    return plan
