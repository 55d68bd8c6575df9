"""Who holds which records: iid, shards (the thesis, Geyer et al. 2017), dirichlet, sample (PFL) and column.

A partition is index views into one data set: 10,000 clients of 600 records are 24 MB of numbers. Millions of clients
are not listed. No client holds a record twice; a record may sit on several clients: `multiplicity` says on how many.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.random import Generator

from shoal.errors import ConfigError, DataError, nearest

KINDS = ("iid", "shards", "dirichlet", "sample", "column")
BY_LABEL = ("shards", "dirichlet")
"""Those that look at labels."""
LONGEST_LIST = 2**24
"""Records of all clients together: where there are more, and clients are alike, they are not listed."""


class Partition(ABC):
    """Which records each client holds; clients are numbered from 0.

    `users` are the users of every record of the data, [N, U], -1 where it has fewer; None where nobody knows.
    """

    simulated: bool  # records were dealt to clients that do not exist
    users: np.ndarray | None
    public_ownership: bool  # it is public which users each record has

    @abstractmethod
    def __len__(self) -> int:
        """How many clients there are."""

    @property
    @abstractmethod
    def sizes(self) -> np.ndarray:
        """How many records each client holds, [K]."""

    @abstractmethod
    def records_of(self, clients: np.ndarray) -> list[np.ndarray]:
        """The record numbers of each of these clients."""

    @property
    @abstractmethod
    def held(self) -> np.ndarray:
        """The distinct records that clients hold, in ascending order."""

    @property
    @abstractmethod
    def multiplicity(self) -> int:
        """The greatest number of clients on which one record sits.

        Per-record guarantees compose that often: 1 means that clients are disjoint.
        """

    @property
    @abstractmethod
    def definition(self) -> tuple[np.ndarray, ...]:
        """The arrays from which all else follows."""

    def records(self, client: int) -> np.ndarray:
        """The record numbers of one client."""
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        return self.records_of(np.array([client]))[0]

    @cached_property
    def clients_per_user(self) -> int:
        """The greatest number of clients that hold records of one user."""
        if self.users is None:
            return 1
        at = np.concatenate([np.unique(self.users[own]) for own in self.records_of(np.arange(len(self)))])
        return int(np.bincount(at[at >= 0]).max())

    def capped(self, most: int) -> ListedPartition:
        """The same with at most this many records of each user at each client (Ganesh et al. 2025).

        A client takes its records in turn, those with the fewest users first, and keeps one if none of its users has
        `most` records yet. Nothing but their users and their order counts.
        """
        assert self.users is not None
        kept = [own[_within(self.users[own], most)] for own in self.records_of(np.arange(len(self)))]
        offsets = np.append(0, np.cumsum([len(records) for records in kept]))
        return ListedPartition(np.concatenate(kept), offsets, self.simulated, self.users, self.public_ownership)


@dataclass(frozen=True, eq=False)
class ListedPartition(Partition):
    """Client k holds the records `indices[offsets[k]:offsets[k + 1]]`, views into one list."""

    indices: np.ndarray  # int32
    offsets: np.ndarray  # int64, [K + 1]
    simulated: bool = False
    users: np.ndarray | None = None
    public_ownership: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> np.ndarray:
        """How many records each client holds, [K]."""
        return np.diff(self.offsets)

    def records_of(self, clients: np.ndarray) -> list[np.ndarray]:
        """The record numbers of each of these clients, as views."""
        return [self.indices[self.offsets[client] : self.offsets[client + 1]] for client in clients]

    @cached_property
    def held(self) -> np.ndarray:
        """The distinct records that clients hold."""
        return np.flatnonzero(self._times)

    @cached_property
    def multiplicity(self) -> int:
        """The greatest number of clients on which one record sits."""
        return int(self._times.max())

    @property
    def definition(self) -> tuple[np.ndarray, ...]:
        """The list, and where each client's part begins."""
        return self.indices, self.offsets

    @cached_property
    def _times(self) -> np.ndarray:
        return np.bincount(self.indices)


@dataclass(frozen=True, eq=False)
class DealtPartition(Partition):
    """Equal clients, too many to list: a client's records follow from its number.

    The records lie in one random `order`. A deal passes over all of them, from a place and with a stride of its own,
    and gives each client the next `each` of them. A client's records are a uniformly random set, and no two clients
    of one deal share any.
    """

    order: np.ndarray  # int32, [N]
    starts: np.ndarray  # int64, a number for each deal
    strides: np.ndarray  # the same, with no divisor in common with N
    clients: int
    each: int
    simulated: bool = True
    users: np.ndarray | None = None
    public_ownership: bool = False

    def __len__(self) -> int:
        return self.clients

    @property
    def sizes(self) -> np.ndarray:
        """How many records each client holds, [K]; takes no memory."""
        return np.broadcast_to(np.int64(self.each), self.clients)

    def records_of(self, clients: np.ndarray) -> list[np.ndarray]:
        """The record numbers of each of these clients."""
        deal, place = (part[:, None] for part in np.divmod(clients, len(self.order) // self.each))
        steps = place * self.each + np.arange(self.each)
        return list(self.order[(self.starts[deal] + self.strides[deal] * steps) % len(self.order)])

    @cached_property
    def held(self) -> np.ndarray:
        """The distinct records that clients hold."""
        held, dealt = np.zeros(len(self.order), bool), len(self.order) // self.each
        for first in range(0, self.clients, dealt):
            held[np.concatenate(self.records_of(np.arange(first, min(first + dealt, self.clients))))] = True
            if held.all():
                break
        return np.flatnonzero(held)

    @property
    def multiplicity(self) -> int:
        """The number of deals: each holds a record at most once."""
        return len(self.starts)

    @property
    def definition(self) -> tuple[np.ndarray, ...]:
        """The order, the deals, and how many clients get how many records."""
        return self.order, self.starts, self.strides, np.array([self.clients, self.each])


def _within(users: np.ndarray, most: int) -> np.ndarray:
    """The places of the records that one client keeps, given the users of each."""
    counts: Counter[int] = Counter()
    keep = np.zeros(len(users), np.bool_)
    for place in np.argsort((users >= 0).sum(axis=1), kind="stable"):
        own = users[place][users[place] >= 0].tolist()
        if all(counts[user] < most for user in own):
            counts.update(own)
            keep[place] = True
    return np.flatnonzero(keep)


def partition(
    kind: str,
    labels: torch.Tensor | np.ndarray | Sequence[int],
    *,
    clients: int | None,
    shards: int = 2,
    alpha: float = 0.5,
    fraction: float = 0.1,
    records: int | None = None,
    owners: np.ndarray | None = None,
    generator: Generator,
) -> ListedPartition | DealtPartition:
    """Split records over clients.

    Args:
        kind: One of `KINDS`.
        labels: The label of each record, [N]; only `shards` and `dirichlet` look at them.
        clients: How many clients; for `column` None, or the number that the data name.
        shards: Shards a client (`shards`).
        alpha: Concentration of the proportions (`dirichlet`).
        fraction: The share of all records that each client draws (`sample`).
        records: Records a client, repeated over clients where there are too few (`iid`, `shards`).
        owners: The owner of each record, numbered from 0 (`column`).
        generator: Where all randomness comes from.

    Returns:
        The partition.

    Raises:
        ConfigError: An argument is out of range or does not apply to this kind.
        DataError: Labels or owners are malformed.
    """
    labels = np.asarray(labels)
    classes = labels.ndim == 1 and labels.dtype.kind in "iu"
    if not labels.ndim or not len(labels) or (kind in BY_LABEL and not classes):
        raise DataError(
            f"partition '{kind}' needs labels that are whole numbers [N], got {labels.dtype} {labels.shape}"
        )
    if kind == "column":
        return column(owners, rows=len(labels), clients=clients)
    if kind not in KINDS:
        raise ConfigError(f"partition '{kind}' is not known{nearest(kind, KINDS)}")
    if clients is None:
        raise ConfigError(f"partition '{kind}' needs the number of clients; set clients")
    if records is not None and kind not in ("iid", "shards"):
        raise ConfigError(
            f"records={records} does not apply to partition '{kind}'; leave it out or use iid or shards"
        )
    if kind == "iid":
        return iid(len(labels), clients=clients, records=records, generator=generator)
    if kind == "shards":
        return shards_by_label(labels, clients=clients, shards=shards, records=records, generator=generator)
    if kind == "dirichlet":
        return dirichlet(labels, clients=clients, alpha=alpha, generator=generator)
    return sample(len(labels), clients=clients, fraction=fraction, generator=generator)


def iid(
    rows: int, *, clients: int, records: int | None = None, generator: Generator
) -> ListedPartition | DealtPartition:
    """Records in random order, dealt out evenly.

    With `records` each client gets this many; where clients * records exceeds what is there, the data are
    dealt out again in a new order, each time to other clients (millions of clients: see `DealtPartition`).
    """
    _whole("clients", clients)
    if records is None:
        _enough(rows, clients, "clients")
        sizes = np.full(clients, rows // clients)
        sizes[: rows % clients] += 1
        return _partition(generator.permutation(rows), sizes)
    _whole("records", records, most=rows, most_is="the records there are")
    at_once = rows // records
    if clients > at_once and clients * records > LONGEST_LIST:
        return _dealt(rows, clients, records, generator)
    deals = [
        generator.permutation(rows)[: min(at_once, clients - done) * records] for done in range(0, clients, at_once)
    ]
    return _partition(np.concatenate(deals), np.full(clients, records))


def shards_by_label(
    labels: np.ndarray, *, clients: int, shards: int = 2, records: int | None = None, generator: Generator
) -> ListedPartition:
    """Records sorted by label and cut into shards of one size; each client gets `shards` of them.

    With `records` a shard is records / shards long, and when clients need more shards than there are, every
    shard is given to several clients, as equally often as possible, never twice to the same.
    """
    _whole("clients", clients)
    _whole("shards", shards)
    rows = len(labels)
    if records is None:
        _enough(rows, clients * shards, "clients * shards")
        used = generator.permutation(rows)
        cuts = np.arange(clients * shards + 1) * rows // (clients * shards)
    else:
        _whole("records", records, most=rows, most_is="the records there are")
        if records % shards:
            raise ConfigError(f"records must be a multiple of shards, got records={records}, shards={shards}")
        length = records // shards
        count = rows // length
        used = generator.permutation(rows)[: count * length]
        cuts = np.arange(count + 1) * length
    by_label = used[np.argsort(labels[used], kind="stable")]
    dealt_KS = _deal(len(cuts) - 1, clients, shards, generator)
    lengths_KS = np.diff(cuts)[dealt_KS]
    positions = _ranges(cuts[dealt_KS].reshape(-1), lengths_KS.reshape(-1))
    return _partition(by_label[positions], lengths_KS.sum(1))


def dirichlet(labels: np.ndarray, *, clients: int, alpha: float = 0.5, generator: Generator) -> ListedPartition:
    """Each class is shared out in proportions drawn from Dirichlet(alpha) over the clients.

    A client that would get nothing takes one record from the client that has most at that moment.
    """
    _whole("clients", clients)
    if not (np.isfinite(alpha) and alpha > 0):
        raise ConfigError(f"alpha must be > 0, got {alpha} (partition dirichlet)")
    _enough(len(labels), clients, "clients")
    holder = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(clients, alpha))
        cuts = np.floor(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        holder[members] = np.searchsorted(cuts, np.arange(len(members)), side="right")
    sizes = np.bincount(holder, minlength=clients)
    for empty in np.flatnonzero(sizes == 0):
        giver = sizes.argmax()
        holder[generator.choice(np.flatnonzero(holder == giver))] = empty
        sizes[giver] -= 1
        sizes[empty] += 1
    return _partition(np.argsort(holder, kind="stable"), sizes)


def sample(rows: int, *, clients: int, fraction: float = 0.1, generator: Generator) -> ListedPartition:
    """Each client draws this fraction of all records, independently, so clients overlap (PFL)."""
    _whole("clients", clients)
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction must be > 0 and at most 1, got {fraction} (partition sample)")
    each = max(1, round(fraction * rows))
    indices = np.empty((clients, each), np.int32)
    for drawn in indices:
        drawn[:] = generator.choice(rows, each, replace=False)
    return _partition(indices.reshape(-1), np.full(clients, each))


def column(owners: np.ndarray | None, *, rows: int, clients: int | None = None) -> ListedPartition:
    """The data say who owns each record (their `client` column)."""
    if owners is None:
        raise ConfigError("partition 'column' needs data with a client column; these have none, use iid or shards")
    if owners.shape != (rows,):
        raise DataError(f"owners must name one owner per record, got {owners.shape} for {rows} records")
    sizes = np.bincount(owners)
    if not sizes.all():
        raise DataError(f"owner {int(sizes.argmin())} has no record; number owners from 0 without gaps")
    if clients is not None and clients != len(sizes):
        raise ConfigError(
            f"clients is {clients}, but the client column names {len(sizes)}; "
            f"leave clients out or set it to {len(sizes)}"
        )
    return _partition(np.argsort(owners, kind="stable"), sizes, simulated=False)


def _dealt(rows: int, clients: int, each: int, generator: Generator) -> DealtPartition:
    order = generator.permutation(rows).astype(np.int32)
    deals = -(-clients // (rows // each))
    strides = np.arange(1, rows + 1)
    strides = strides[np.gcd(strides, rows) == 1]
    starts = generator.integers(rows, size=deals)
    return DealtPartition(order, starts, generator.choice(strides, deals), clients, each)


def _partition(indices: np.ndarray, sizes: np.ndarray, *, simulated: bool = True) -> ListedPartition:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return ListedPartition(indices.astype(np.int32, copy=False), offsets, simulated and len(sizes) > 1)


def _deal(count: int, clients: int, each: int, generator: Generator) -> np.ndarray:
    """Deal `count` shards to clients, `each` a client, equally often (give or take one), none twice to one.

    Whole decks are shuffled and dealt one after the other; only the client at the seam of two decks could get
    a shard twice, so the new deck begins with shards which that client does not hold.
    """
    decks: list[np.ndarray] = []
    while (dealt := len(decks) * count) < clients * each:
        deck = generator.permutation(count)
        if waiting := dealt % each:
            new = deck[~np.isin(deck, decks[-1][-waiting:])][: each - waiting]
            deck = np.concatenate([new, deck[~np.isin(deck, new)]])
        decks.append(deck)
    return np.concatenate(decks)[: clients * each].reshape(clients, each)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers starts[i] .. starts[i] + lengths[i] - 1 for all i, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def _whole(name: str, value: int, most: int | None = None, most_is: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
    if most is not None and value > most:
        raise ConfigError(f"{name} must be at most {most} ({most_is}), got {value}")


def _enough(rows: int, needed: int, what: str) -> None:
    if needed > rows:
        raise ConfigError(
            f"{what} is {needed}, but there are only {rows} records; "
            "use fewer clients, or set data.records so that records are repeated (iid, shards)"
        )
