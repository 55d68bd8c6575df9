"""The federations that an audit plays: a client that contributes nothing, however clients are drawn."""

from dataclasses import replace

import numpy as np
import pytest

from shoal.algorithms import algorithm
from shoal.algorithms.base import Local
from shoal.audit.testbed import Row, federation, rounds_of, zeroed
from shoal.mechanisms.gaussian import Gaussian, StepNoise
from shoal.mechanisms.record_clipping import RecordClip
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.update_clipping import Clip, NoisyClip
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


@pytest.mark.parametrize(
    "sampling", sorted(name for name, each in Clients.schemes.items() if each.__module__.startswith("shoal."))
)
def test_a_client_that_contributes_nothing_never_comes(sampling):
    takes = Clients.schemes[sampling].needs
    clients = Clients(sampling, 2, **dict.fromkeys(takes, 2))
    assert drawn(clients, ()) == set(np.arange(4))
    assert drawn(clients, (3,)) == {0, 1, 2}


def moved(record):
    """How far one round moves, with the same noise, where the last of three clients contributes nothing."""
    record = replace(record, clients=Clients("all"), local=Local(steps=2, lr=1.0))
    clients = [[Row(0.0, 1)], [Row(0.0, 2)], [Row(2.0)]]
    less, held = zeroed(record, clients, 2)
    without, whole = (
        rounds_of(federation(*pair, 8, Streams(1)), pair[0], 3) for pair in ((less, held), (record, clients))
    )
    return np.linalg.norm(whole.vectors - without.vectors, axis=1), whole.extras - without.extras, without.vectors


@pytest.mark.parametrize(
    "record",
    [
        replace(algorithm("fed-sdp"), per_update=NoisyClip(1.0, 6.0)),
        replace(algorithm("fed-cdp-private"), per_record=RecordClip(0.5), records=Records("fixed-order", 1)),
    ],
)
def test_noise_of_its_own_stays_with_a_client_that_contributes_nothing(record):
    """A clip in one update, or half of it in each of two steps, over three clients. Noise of one would be over 1."""
    far, _, noisy = moved(record)
    assert ((far > 0.1) & (far <= 1.001 / 3)).all()
    assert np.linalg.norm(noisy, axis=1).min() > 1


def test_a_client_that_contributes_nothing_adds_nothing_to_a_count():
    """A record over the clip counts -1/2; a gradient of 0 would count 1/2, and move the clip twice as far."""
    record = replace(algorithm("quantile-record"), records=Records("fixed-order", 1))
    record = replace(
        record, per_record=replace(record.per_record, initial_clip_norm=1e-3, count_noise_multiplier=10.0)
    )
    _, clip, _ = moved(record)
    assert clip == pytest.approx(record.per_record.clip_norm_lr * 0.5 / 3, rel=0.01)


def test_noise_in_the_steps_goes_with_an_update_whose_sum_gets_the_noise_that_counts():
    """Clipped noise in its place is a whole clip away from 0, and up to two from what the client holds."""
    noisy = replace(algorithm("fed-cdp-private"), per_record=RecordClip(1.0), per_step=StepNoise(0.1))
    far, _, _ = moved(replace(noisy, per_update=Clip(0.01), per_round=Gaussian(1.0)))
    assert far == pytest.approx(0.01 / 3, rel=0.01)
