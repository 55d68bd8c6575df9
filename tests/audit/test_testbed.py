"""The federations that an audit plays: a client that is absent does not come, however clients are drawn."""

from dataclasses import replace

import numpy as np
import pytest

from shoal.algorithms import algorithm
from shoal.audit.testbed import Row, federation, without
from shoal.mechanisms.sampling import Clients
from shoal.random.streams import Streams
from shoal.training.cohort_draw import draw_cohort
from shoal.training.round_index import RoundIndex


def drawn(clients, gone):
    """All who take part in the first two rounds of eight runs."""
    record = replace(algorithm("trusted-curator"), clients=clients)
    cohort = federation(record, [[Row(0.5, k)] for k in range(4)], 8, Streams(1), rounds=2).cohort
    cohort, found = replace(cohort, algorithm=without(record, *gone)), set()
    for attempt in range(8):
        state = {}
        for t in range(2):
            found |= set(draw_cohort(cohort, state, RoundIndex(t, 2, attempt)).tolist())
    return found


@pytest.mark.parametrize("sampling", sorted(Clients.schemes))
def test_a_client_that_is_absent_never_comes(sampling):
    takes = Clients.schemes[sampling].needs
    clients = Clients(sampling, 2, **dict.fromkeys(takes, 2))
    assert drawn(clients, ()) == set(np.arange(4))
    assert drawn(clients, (3,)) == {0, 1, 2}
