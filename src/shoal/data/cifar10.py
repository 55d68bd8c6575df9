"""CIFAR-10: 60,000 colour pictures of 32x32 in ten classes, in the binary batches of its author."""

from __future__ import annotations

import numpy as np

from shoal.data.dataset import Dataset
from shoal.data.known import Known
from shoal.data.readers import parse_cifar
from shoal.data.sources import File

THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR_BATCH_SIZE = 30_730_000


def _cifar_files(digests: tuple[str, ...]) -> tuple[File, ...]:
    folder = "cifar-10-batches-bin"
    return tuple(
        File(f"{folder}/{batch}.bin", CIFAR_BATCH_SIZE, digest, also=(f"cifar10/{folder}/{batch}.bin",))
        for batch, digest in zip(CIFAR_BATCHES, digests, strict=True)
    )


def _read(known: Known, scale: str, mirror: str | None) -> Dataset:
    contents = zip(known.files, known.contents(mirror), strict=True)
    batches = [parse_cifar(data, file.path) for file, data in contents]
    train_x, train_y = (np.concatenate(part) for part in zip(*batches[:-1], strict=True))
    return known.in_two_parts((train_x, train_y), batches[-1], THINGS, scale)


CIFAR_FILES = _cifar_files(
    (
        "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    )
)

DATASETS = (
    Known(
        "cifar10",
        *((3, 32, 32), 50_000, 10_000, 10),
        source="Krizhevsky 2009, University of Toronto",
        licence="no licence stated, cite the author",
        read=_read,
        files=CIFAR_FILES,
        archive=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    ),
)
