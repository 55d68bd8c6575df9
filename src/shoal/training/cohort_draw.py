"""Who takes part in a round (boundary `clients`), and that nobody does sooner or more often than is charged."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shoal.errors import PluginError
from shoal.mechanisms.sampling import Clients
from shoal.training.cohort import Cohort, State
from shoal.training.round_index import RoundIndex

LAST, TIMES = "clients.last", "clients.times"
"""The keys of the round, from 1, in which each client last took part, and of how often it has. Both are public."""


def draw_cohort(cohort: Cohort, state: State, index: RoundIndex) -> npt.NDArray[np.int64]:
    """The clients of a round, in ascending order; where their turns are counted, `state` counts this one too."""
    scheme, count = cohort.algorithm.clients, cohort.population.clients
    generator = cohort.streams.generator("clients", index.t, index.attempt)
    if not scheme.separated:
        return _numbers(scheme, scheme.take_part(generator, state, index.t, index.total, count, index.again), count)
    last, times = (state.get(key, torch.zeros(count, dtype=torch.int64)).cpu().numpy() for key in (LAST, TIMES))
    allowed = scheme.participation(index.total, count)
    since = index.t + 1 - last
    apart = since % allowed.separation == 0 if allowed.regular else since >= allowed.separation
    may = ((last == 0) | (apart & (since > 0))) & (times < allowed.times)
    able = (np.intersect1d(np.flatnonzero(may), cohort.present()),) if scheme.chooses else ()
    clients = _numbers(scheme, scheme.draw(generator, index.t, index.total, count, *able), count)
    if not may[clients].all():
        raise PluginError(
            f"clients.sampling {scheme.sampling} drew a client sooner, out of turn, or more often than is charged"
        )
    drawn = np.isin(np.arange(count), clients)
    state[LAST] = torch.from_numpy(np.where(drawn, index.t + 1, last))
    state[TIMES] = torch.from_numpy(times + drawn)
    return clients


def _numbers(scheme: Clients, drawn: npt.ArrayLike, count: int) -> npt.NDArray[np.int64]:
    """The clients that a scheme drew, once each; -1 would be the last one once more, and a mask the first two."""
    clients = np.unique(drawn)
    if len(clients) and not (clients.dtype.kind in "iu" and 0 <= clients[0] <= clients[-1] < count):
        raise PluginError(
            f"clients.sampling {scheme.sampling} drew something else than numbers from 0 to {count - 1}"
        )
    return clients.astype(np.int64)
