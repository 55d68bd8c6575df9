"""Streams that are set one after another draw what a generator of numpy's own draws for each."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.random.many_streams import FEW, generators, sfc64_states
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import Streams


@pytest.mark.slow
@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=5))
def test_the_states_are_those_of_numpy(keys):
    found = sfc64_states(np.frombuffer(b"".join(keys), "<u4").reshape(len(keys), -1))
    for key, state in zip(keys, found, strict=True):
        own = np.random.SFC64(np.random.SeedSequence(np.frombuffer(key, "<u4"))).state
        assert np.array_equal(own["state"]["state"], state)
        assert (own["has_uint32"], own["uinteger"]) == (0, 0)


@pytest.mark.parametrize("more", [0, FEW])
def test_each_stream_begins_anew_whatever_was_drawn_before(more):
    """Whether few streams are made by numpy or many are set one after another."""
    streams, numbers = Streams(3), [7, 0, 10**6, 7, *range(more)]
    for number, found in zip(numbers, streams.generators("examples", 2, 0, last=numbers), strict=True):
        own = streams.generator("examples", 2, 0, number)
        assert found.integers(2**16, dtype=np.uint32) == own.integers(2**16, dtype=np.uint32)  # keeps half a word
        assert np.array_equal(found.permutation(50), own.permutation(50))
        assert np.array_equal(found.random(3), own.random(3))


def test_no_stream_is_asked_for():
    assert list(generators([])) == []


def test_streams_of_a_cipher_are_the_same_one_by_one():
    streams = SecureStreams()
    found = [each.permutation(20).tolist() for each in streams.generators("examples", 1, last=[4, 5])]
    assert found == [streams.generator("examples", 1, number).permutation(20).tolist() for number in (4, 5)]


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_streams_differ_by_seed_and_by_number(seed):
    first = [each.integers(2**63) for each in Streams(seed).generators("examples", last=range(20))]
    other = [each.integers(2**63) for each in Streams(seed + 1).generators("examples", last=range(20))]
    assert len({*first, *other}) == 40
