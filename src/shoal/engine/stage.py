"""Where rounds are played: everything that does not change from round to round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.algorithms.base import Algorithm
from shoal.engine.federation import Federation
from shoal.engine.slices import Slicer
from shoal.engine.workers import Workers
from shoal.gradients import Network
from shoal.privacy.random import Streams

if TYPE_CHECKING:
    from shoal.engine.graphs import Graphs


@dataclass(frozen=True, eq=False)
class Stage:
    """An algorithm, a model, clients with their records, and the means to compute."""

    algorithm: Algorithm
    network: Network
    federation: Federation
    slicer: Slicer
    workers: Workers
    streams: Streams
    graphs: Graphs | None = None
    kernels: bool = True
