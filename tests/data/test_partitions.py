"""Partitions: who holds which records, how often a record is repeated, and that bad arguments are refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import Partition, partition, partitions
from shoal.data.partitions import DealtPartition, iid
from shoal.errors import ConfigError, DataError
from shoal.random.streams import Streams

MNIST_LABELS = np.arange(60_000) % 10


def made(kind: str, labels: np.ndarray, seed: int = 0, **options: object) -> Partition:
    return partition(kind, labels, generator=Streams(seed).generator("partition"), **options)


def holds_no_record_twice(split: Partition) -> bool:
    pairs = np.sort(np.repeat(np.arange(len(split)), split.sizes) * (1 << 32) + split.indices)
    return bool((np.diff(pairs) > 0).all())


def is_sound(split: Partition, rows: int, clients: int) -> bool:
    return (
        len(split) == clients
        and split.indices.dtype == np.int32
        and split.offsets.dtype == np.int64
        and split.sizes.min() >= 1
        and split.sizes.sum() == len(split.indices)
        and split.indices.min() >= 0
        and split.indices.max() < rows
        and holds_no_record_twice(split)
    )


labels_of = st.integers(1, 120).flatmap(
    lambda rows: st.lists(st.integers(0, 4), min_size=rows, max_size=rows).map(np.array)
)


@pytest.mark.slow
@given(labels_of, st.data())
@settings(deadline=None)
def test_iid_and_dirichlet_give_every_record_to_one_client(labels: np.ndarray, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    for kind, options in (("iid", {}), ("dirichlet", {"alpha": data.draw(st.floats(1e-4, 1e4))})):
        split = made(kind, labels, clients=clients, **options)
        assert is_sound(split, len(labels), clients)
        assert sorted(split.indices) == list(range(len(labels)))
        assert split.multiplicity == 1
    assert made("iid", labels, clients=clients).sizes.max() <= len(labels) // clients + 1


@pytest.mark.slow
@given(labels_of, st.data())
@settings(deadline=None)
def test_shards_give_every_record_to_one_client(labels: np.ndarray, data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, len(labels)))
    clients = data.draw(st.integers(1, len(labels) // shards))
    split = made("shards", labels, clients=clients, shards=shards)
    assert is_sound(split, len(labels), clients)
    assert sorted(split.indices) == list(range(len(labels)))


@pytest.mark.slow
@given(labels_of, st.integers(1, 50), st.data())
@settings(deadline=None)
def test_records_are_repeated_equally_often_and_never_on_one_client(
    labels: np.ndarray, clients: int, data: st.DataObject
) -> None:
    shards = data.draw(st.integers(1, len(labels)))
    records = shards * data.draw(st.integers(1, len(labels) // shards))
    whole_shards = len(labels) // (records // shards)
    by_shards = made("shards", labels, clients=clients, shards=shards, records=records)
    at_random = made("iid", labels, clients=clients, records=records)
    for split in (by_shards, at_random):
        assert is_sound(split, len(labels), clients)
        assert set(split.sizes) == {records}
    assert by_shards.multiplicity == -(-clients * shards // whole_shards)
    assert at_random.multiplicity <= -(-clients // (len(labels) // records))


@pytest.mark.slow
@given(labels_of, st.integers(1, 20), st.floats(0.01, 1))
@settings(deadline=None)
def test_sample_draws_a_fraction_for_each_client(labels: np.ndarray, clients: int, fraction: float) -> None:
    split = made("sample", labels, clients=clients, fraction=fraction)
    assert is_sound(split, len(labels), clients)
    assert set(split.sizes) == {max(1, round(fraction * len(labels)))}


@pytest.mark.slow
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60))
@settings(deadline=None)
def test_column_gives_each_owner_their_records(raw: list[int]) -> None:
    owners = np.unique(raw, return_inverse=True)[1]
    split = made("column", np.zeros(len(raw), int), clients=None, owners=owners)
    assert is_sound(split, len(raw), owners.max() + 1)
    for owner in range(len(split)):
        assert split.records(owner).tolist() == np.flatnonzero(owners == owner).tolist()


@pytest.mark.parametrize("kind", ["iid", "shards", "dirichlet", "sample"])
def test_the_same_seed_gives_the_same_partition(kind: str) -> None:
    first, again, other = (made(kind, MNIST_LABELS, seed, clients=20) for seed in (1, 1, 2))
    assert np.array_equal(first.indices, again.indices)
    assert np.array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.indices, other.indices)


def test_two_shards_hold_few_classes() -> None:
    split = made("shards", MNIST_LABELS, clients=100, shards=2)
    assert set(split.sizes) == {600}
    classes = [len(set(MNIST_LABELS[split.records(k)])) for k in range(100)]
    assert max(classes) <= 2
    assert min(classes) >= 1


@pytest.mark.parametrize(
    ("clients", "copies"), [(100, 1), (1_000, 10), pytest.param(10_000, 100, marks=pytest.mark.slow)]
)
def test_papers_000_and_001_repeat_records_so_that_each_client_has_600(clients: int, copies: int) -> None:
    """With a few calls of numpy's, however many records: no loop of Python's goes over them."""
    calls: list[str] = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        split = made("shards", MNIST_LABELS, clients=clients, records=600)
    finally:
        sys.setprofile(None)
    assert len(calls) < 40 * clients
    assert set(split.sizes) == {600}
    assert split.multiplicity == copies
    assert np.bincount(split.indices, minlength=60_000).min() == copies
    assert holds_no_record_twice(split)
    assert split.indices.nbytes == clients * 600 * 4


def test_records_of_a_client_are_a_view() -> None:
    split = made("iid", MNIST_LABELS, clients=100)
    assert np.shares_memory(split.records(7), split.indices)
    assert np.array_equal(np.concatenate([split.records(k) for k in range(100)]), split.indices)
    with pytest.raises(IndexError):
        split.records(100)
    with pytest.raises(IndexError):
        split.records(-1)


def test_ten_million_clients_are_not_listed() -> None:
    rows, clients = 60_000, 10_000_000
    split = iid(rows, clients=clients, records=50, generator=np.random.default_rng(3))
    assert len(split) == clients
    assert sum(part.nbytes for part in split.definition) < 1e6
    assert split.sizes.strides == (0,)
    assert split.sizes[clients - 1] == 50
    assert split.multiplicity == -(-clients // (rows // 50))
    assert len(split.held) == rows
    few = np.array([0, 1, 1_199, 1_200, 7_654_321, clients - 1])
    found = split.records_of(few)
    assert [each.tolist() for each in found] == [split.records(client).tolist() for client in few.tolist()]
    assert all(len(set(each.tolist())) == 50 and each.min() >= 0 and each.max() < rows for each in found)
    with pytest.raises(IndexError):
        split.records(clients)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "each"), [(60_000, 50), (59_999, 48), (1_021, 10)])
def test_the_clients_of_one_deal_share_no_record(rows: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "LONGEST_LIST", 1)
    at_once = rows // each
    split = iid(rows, clients=4 * at_once + 3, records=each, generator=np.random.default_rng(5))
    assert isinstance(split, DealtPartition)
    deals = [np.concatenate(split.records_of(np.arange(n * at_once, (n + 1) * at_once))) for n in range(4)]
    assert all(len(np.unique(deal)) == at_once * each for deal in deals)
    assert not np.array_equal(deals[0], deals[1])
    times = np.bincount(np.concatenate([*deals, *split.records_of(np.arange(4 * at_once, len(split)))]))
    assert times.max() <= split.multiplicity == 5
    assert np.array_equal(split.held, np.flatnonzero(times))


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=1e-7)
def test_the_labels_of_dealt_clients_are_like_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chi-square statistics of 20,000 clients, one class against the rest: mean 1, standard deviation 0.01."""
    monkeypatch.setattr(partitions, "LONGEST_LIST", 1)
    split = iid(60_000, clients=20_000, records=50, generator=np.random.default_rng(8))
    ones = np.array([(MNIST_LABELS[records] == 1).sum() for records in split.records_of(np.arange(len(split)))])
    share = (MNIST_LABELS == 1).mean()
    square = (ones - 50 * share) ** 2 / (50 * share * (1 - share))
    assert abs(square.mean() - 1) < 0.08


@pytest.mark.statistical(false_alarm=1.9e-7)
def test_samples_of_002_overlap_as_much_as_chance_says() -> None:
    """100 draws of a tenth: a record sits on Binomial(100, .1) clients, of 60,000 the greatest 22 (less: 7e-9) to 35
    (more: 1.7e-7)."""
    split = made("sample", MNIST_LABELS, clients=100, fraction=0.1)
    assert set(split.sizes) == {6000}
    assert 22 <= split.multiplicity <= 35


def test_a_smaller_alpha_makes_clients_more_uneven() -> None:
    def spread(alpha: float) -> float:
        split = made("dirichlet", MNIST_LABELS, clients=20, alpha=alpha)
        shares = [np.bincount(MNIST_LABELS[split.records(k)], minlength=10) / split.sizes[k] for k in range(20)]
        return float(np.mean([share.max() for share in shares]))

    assert spread(0.05) > 0.5 > spread(1) > spread(100) > 0.1


def test_labels_may_be_a_tensor() -> None:
    split = made("iid", torch.arange(10), clients=5)
    assert split.sizes.tolist() == [2] * 5


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("idd", {"clients": 2}, "'idd'.*did you mean 'iid'"),
        ("iid", {"clients": 0}, "clients must be .*got 0"),
        ("iid", {"clients": 2.5}, "clients must be .*got 2.5"),
        ("iid", {"clients": True}, "clients must be .*got True"),
        ("iid", {"clients": None}, "set clients"),
        ("iid", {"clients": 101}, "clients is 101, but there are only 100"),
        ("iid", {"clients": 2, "records": 101}, "records must be at most 100"),
        ("shards", {"clients": 51}, r"clients \* shards is 102"),
        ("shards", {"clients": 5, "shards": 0}, "shards must be .*got 0"),
        ("shards", {"clients": 5, "shards": 3, "records": 10}, "records=10, shards=3"),
        ("shards", {"clients": 5, "records": 0}, "records must be .*got 0"),
        ("dirichlet", {"clients": 5, "alpha": 0.0}, "alpha must be > 0, got 0"),
        ("dirichlet", {"clients": 5, "alpha": float("nan")}, "alpha must be > 0, got nan"),
        ("dirichlet", {"clients": 5, "records": 10}, "records=10 does not apply"),
        ("sample", {"clients": 5, "fraction": 0.0}, "fraction must be"),
        ("sample", {"clients": 5, "fraction": 1.5}, "fraction must be .*got 1.5"),
        ("column", {"clients": None}, "client column"),
        ("column", {"clients": 3, "owners": np.arange(100) % 4}, "clients is 3, but .* names 4"),
    ],
)
def test_bad_arguments_are_refused_by_name(kind: str, options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        made(kind, np.arange(100) % 10, **options)


def test_owners_must_fit_the_records() -> None:
    with pytest.raises(DataError, match="one owner per record"):
        made("column", np.zeros(5, int), clients=None, owners=np.zeros(4, int))
    with pytest.raises(DataError, match="owner 1 has no record"):
        made("column", np.zeros(2, int), clients=None, owners=np.array([0, 2]))


@pytest.mark.parametrize("labels", [np.zeros(0, int), np.zeros((2, 2), int), np.zeros(3)])
def test_partitions_by_label_need_whole_numbers_in_a_row(labels: np.ndarray) -> None:
    for kind in ("shards", "dirichlet"):
        with pytest.raises(DataError, match=f"partition '{kind}' needs labels that are whole numbers"):
            made(kind, labels, clients=1)


def test_other_partitions_take_any_targets() -> None:
    for targets in (np.zeros((6, 2)), np.full(6, 0.5)):
        assert made("iid", targets, clients=2).sizes.tolist() == [3, 3]
