"""The federations that an audit plays: a client that contributes nothing, however clients are drawn."""

from dataclasses import replace

import numpy as np
import pytest

from shoal.algorithms import algorithm
from shoal.algorithms.base import Local
from shoal.audit.testbed import Row, federation, rounds_of, zeroed
from shoal.mechanisms.sampling import Clients
from shoal.random.streams import Streams
from shoal.training.cohort_draw import draw_cohort
from shoal.training.round_index import RoundIndex


def drawn(clients, gone):
    """All who take part in the first two rounds of eight runs."""
    record = replace(algorithm("trusted-curator"), clients=clients)
    less, held = zeroed(record, [[Row(0.5, k)] for k in range(4)], *gone)
    cohort, found = replace(federation(record, held, 8, Streams(1), rounds=2).cohort, algorithm=less), set()
    for attempt in range(8):
        state = {}
        for t in range(2):
            found |= set(draw_cohort(cohort, state, RoundIndex(t, 2, attempt)).tolist())
    return found


@pytest.mark.parametrize("sampling", sorted(Clients.schemes))
def test_a_client_that_contributes_nothing_never_comes(sampling):
    takes = Clients.schemes[sampling].needs
    clients = Clients(sampling, 2, **dict.fromkeys(takes, 2))
    assert drawn(clients, ()) == set(np.arange(4))
    assert drawn(clients, (3,)) == {0, 1, 2}


@pytest.mark.statistical(false_alarm=1e-9)
def test_where_each_update_has_its_own_noise_that_of_an_empty_one_stays():
    """400 rounds of 16 numbers, whose variance is known to 2%: with the noise of two clients it would be 2/3."""
    record = replace(algorithm("fed-sdp"), clients=Clients("all"), local=Local(steps=1))
    less, held = zeroed(record, [[Row(0.0, k)] for k in range(3)], 2)
    seen = rounds_of(federation(less, held, 8, Streams(1)), less, 400).vectors
    noise = 6 * 4 * 3**0.5 / 3
    assert seen.var() == pytest.approx(noise**2, rel=0.15)
