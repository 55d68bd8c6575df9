"""MNIST and Fashion-MNIST: 70,000 grey pictures of 28x28 in ten classes, in the four files of the idx format."""

from __future__ import annotations

from shoal.data.dataset import Dataset
from shoal.data.known import Known
from shoal.data.readers import parse_idx_pair
from shoal.data.sources import File

DIGITS = tuple("0123456789")
GARMENTS = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
IDX_PARTS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_SIZES = (47_040_016, 60_008, 7_840_016, 10_008)


def _idx_files(folder: str, mirrors: tuple[str, ...], digests: tuple[str, ...]) -> tuple[File, ...]:
    return tuple(
        File(f"{folder}/{part}.gz", size, digest, tuple(f"{mirror}{part}.gz" for mirror in mirrors))
        for part, size, digest in zip(IDX_PARTS, IDX_SIZES, digests, strict=True)
    )


def _read(known: Known, scale: str, mirror: str | None) -> Dataset:
    files = known.contents(mirror)
    train = parse_idx_pair(files[0], files[1], f"{known.name}, train")
    test = parse_idx_pair(files[2], files[3], f"{known.name}, test")
    return known.in_two_parts(train, test, GARMENTS if known.name == "fashion-mnist" else DIGITS, scale)


MNIST_FILES = _idx_files(
    "mnist",
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
FASHION_FILES = _idx_files(
    "fashion-mnist",
    ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)

DATASETS = (
    Known(
        "mnist",
        *((1, 28, 28), 60_000, 10_000, 10),
        source="LeCun, Cortes, Burges",
        licence="CC BY-SA 3.0",
        read=_read,
        files=MNIST_FILES,
    ),
    Known(
        "fashion-mnist",
        *((1, 28, 28), 60_000, 10_000, 10),
        source="Zalando Research",
        licence="MIT",
        read=_read,
        files=FASHION_FILES,
    ),
)
