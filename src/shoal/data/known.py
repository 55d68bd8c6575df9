"""The seven data sets that Shoal knows by name: their files, checksums, mirrors, shapes and licences."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.data.sources import File

DIGITS = tuple("0123456789")
GARMENTS = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
LFW_PEOPLE = 62

IDX_PARTS = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
IDX_SIZES = (47_040_016, 60_008, 7_840_016, 10_008)
CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR_BATCH_SIZE = 30_730_000


@dataclass(frozen=True)
class Known:
    """What is known of a data set before it is read."""

    name: str
    shape: tuple[int, ...]
    train_rows: int
    test_rows: int
    class_count: int
    source: str
    licence: str
    files: tuple[File, ...] = ()  # none: it comes with scikit-learn
    archive: tuple[str, ...] = ()  # addresses of one .tar.gz that holds all the files


def _idx_files(folder: str, mirrors: tuple[str, ...], digests: tuple[str, ...]) -> tuple[File, ...]:
    return tuple(
        File(f"{folder}/{part}.gz", size, digest, tuple(f"{mirror}{part}.gz" for mirror in mirrors))
        for part, size, digest in zip(IDX_PARTS, IDX_SIZES, digests, strict=True)
    )


def _cifar_files(digests: tuple[str, ...]) -> tuple[File, ...]:
    folder = "cifar-10-batches-bin"
    return tuple(
        File(f"{folder}/{batch}.bin", CIFAR_BATCH_SIZE, digest, also=(f"cifar10/{folder}/{batch}.bin",))
        for batch, digest in zip(CIFAR_BATCHES, digests, strict=True)
    )


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
UCI_ADULT = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
ADULT_FILES = (
    File(
        "adult/adult.data",
        3_974_305,
        "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
        (UCI_ADULT + "adult.data",),
    ),
    File(
        "adult/adult.test",
        2_003_153,
        "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        (UCI_ADULT + "adult.test",),
    ),
)

KNOWN: dict[str, Known] = {
    known.name: known
    for known in (
        Known(
            "digits",
            *((1, 8, 8), 1437, 360, 10),
            source="UCI Optical Recognition of Handwritten Digits, with scikit-learn",
            licence="CC BY 4.0",
        ),
        Known(
            "cancer",
            *((30,), 426, 143, 2),
            source="UCI Breast Cancer Wisconsin (Diagnostic), with scikit-learn",
            licence="CC BY 4.0",
        ),
        Known(
            "mnist",
            *((1, 28, 28), 60_000, 10_000, 10),
            source="LeCun, Cortes, Burges",
            licence="CC BY-SA 3.0",
            files=MNIST_FILES,
        ),
        Known(
            "fashion-mnist",
            *((1, 28, 28), 60_000, 10_000, 10),
            source="Zalando Research",
            licence="MIT",
            files=FASHION_FILES,
        ),
        Known(
            "cifar10",
            *((3, 32, 32), 50_000, 10_000, 10),
            source="Krizhevsky 2009, University of Toronto",
            licence="no licence stated, cite the author",
            files=CIFAR_FILES,
            archive=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        ),
        Known(
            "adult",
            *((105,), 36_631, 12_211, 2),
            source="UCI Adult (US census 1994)",
            licence="CC BY 4.0",
            files=ADULT_FILES,
        ),
        Known(
            "lfw",
            *((3, 32, 32), 2267, 756, LFW_PEOPLE),
            source="Labeled Faces in the Wild, people with 20 pictures or more",
            licence="no licence stated, for research",
        ),
    )
}
