"""Sampling of clients in a round and of records in a local step (the boundaries `clients` and `records`).

The sampling scheme decides what an accountant may claim: Poisson sampling amplifies, shuffled batches do not,
fixed-size sampling only under replace-one, random allocation only as a block of rounds. So each scheme is one class,
which draws and states its events.

The word in `sampling` picks the class: `Clients("poisson", cohort=10)` is a `PoissonClients`, and so is
`replace(clients, sampling="poisson")`. A scheme of your own is a frozen dataclass derived from `Clients` or
`Records` whose field `sampling` has a new word for its default; it must implement `draw` (of records: `drawn`). By
default it is charged as if nothing were sampled, which is never too little.
"""

from shoal.mechanisms.sampling.clients import (
    AllClients,
    Clients,
    FixedSizeClients,
    PoissonClients,
    joined_from,
    participation,
)
from shoal.mechanisms.sampling.records import (
    LARGEST_BATCH,
    MOST_STEPS,
    AllocatedRecords,
    PoissonRecords,
    Records,
    RecordsInOrder,
    RecordsWithReplacement,
    ShuffledRecords,
)
from shoal.mechanisms.sampling.separated_clients import (
    CyclicClients,
    CyclicPoissonClients,
    MinSeparationClients,
    RandomAllocation,
)

__all__ = [
    "LARGEST_BATCH",
    "MOST_STEPS",
    "AllClients",
    "AllocatedRecords",
    "Clients",
    "CyclicClients",
    "CyclicPoissonClients",
    "FixedSizeClients",
    "MinSeparationClients",
    "PoissonClients",
    "PoissonRecords",
    "RandomAllocation",
    "Records",
    "RecordsInOrder",
    "RecordsWithReplacement",
    "ShuffledRecords",
    "joined_from",
    "participation",
]
