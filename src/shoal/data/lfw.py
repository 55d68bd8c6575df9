"""Labeled Faces in the Wild as Wei et al. (2023) use it: 62 people with 20 pictures or more, 3,023 of 32x32x3.

There is no public file of this form. It is made from scikit-learn's copy of LFW, which checks what it
downloads; who is on each picture is the same everywhere and is checked here, while the last bits of the
resized pixels depend on the version of Pillow.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from shoal.data.dataset import Dataset
from shoal.data.known import DAMAGED, MISSING, VERIFIED, FileState, Known
from shoal.data.readers import read_npz
from shoal.data.scaling import pictures
from shoal.data.sources import find, folders, writable_folder
from shoal.errors import DataError
from shoal.extras import optional
from shoal.files import atomic

PATH = "lfw/lfw62.npz"
PEOPLE = 62
SHAPE = (3023, 32, 32, 3)
LIMIT = 16 << 20
WHO_SHA256 = "bc6e53a811d346887d0cc71d88b2a78344873512494afee2e790f2c9cd954c4d"
PIXELS_SHA256 = "8096a59f3d5a068b9b3c56e20df1cf0105cc75874fc92149d00fa467d4a6e091"
FIX = (
    "make it where there is a network: python -c 'from shoal.data.lfw import make; make(\"lfw62.npz\")' "
    "(scikit-learn's fetch_lfw_people(min_faces_per_person=20, color=True), each picture resized to 32x32; "
    f"arrays images uint8 {list(SHAPE)}, labels int64, names), then put it at {PATH} below the data folder"
)


def locate() -> Path | None:
    """Where the file is, or None."""
    return find((PATH,))


def obtain() -> Path:
    """Where the file is; made first where it is missing, which needs a network."""
    if (found := locate()) is not None:
        return found
    target = writable_folder() / PATH
    try:
        if os.environ.get("SHOAL_MIRROR"):
            raise OSError("SHOAL_MIRROR replaces public mirrors, and LFW comes only from those")
        make(target)
    except OSError as error:
        raise DataError(
            f"{PATH}: not found in {' or '.join(map(str, folders()))}, and not made here ({error})\n  fix: {FIX}"
        ) from error
    return target


def read(path: Path) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Pictures `[N, 3, 32, 32]` in uint8, labels `[N]` and the 62 names; checked."""
    arrays = read_npz(path, str(path), LIMIT)
    if missing := {"images", "labels", "names"} - set(arrays):
        raise DataError(f"{path}: lacks {', '.join(sorted(missing))}; {FIX}")
    images, labels, names = arrays["images"], arrays["labels"], tuple(map(str, arrays["names"].reshape(-1)))
    if images.dtype != np.uint8 or images.shape != SHAPE:
        raise DataError(f"{path}: images are {images.dtype} {images.shape}, expected uint8 {SHAPE}; {FIX}")
    digest = _digest(labels, names)
    if digest != WHO_SHA256:
        raise DataError(f"{path}: labels and names have SHA-256 {digest}, expected {WHO_SHA256}; {FIX}")
    return images.transpose(0, 3, 1, 2), labels.astype(np.int64), names


def has_reference_pixels(images: np.ndarray) -> bool:
    """Whether the pictures `[N, 3, 32, 32]` are bit by bit those with which Shoal was measured."""
    return hashlib.sha256(images.transpose(0, 2, 3, 1).tobytes()).hexdigest() == PIXELS_SHA256


def make(path: str | Path) -> None:
    """Make lfw62.npz from scikit-learn's LFW (a download of 230 MB, kept only while this runs)."""
    from sklearn.datasets import fetch_lfw_people

    Image = optional("PIL.Image", f"making {PATH}")
    path = Path(path)
    print(f"making {path} from scikit-learn's LFW (downloads 230 MB)", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="shoal-lfw-") as home:
        people = fetch_lfw_people(data_home=home, min_faces_per_person=20, color=True, n_retries=0)
    pixels = np.rint(people.images * 255).astype(np.uint8)
    small = [np.asarray(Image.fromarray(p).resize(SHAPE[1:3], Image.Resampling.BILINEAR)) for p in pixels]
    arrays = {"images": np.stack(small), "labels": people.target.astype(np.int64), "names": people.target_names}
    with atomic(path) as stream:
        np.savez_compressed(stream, **arrays)


def _digest(labels: np.ndarray, names: tuple[str, ...]) -> str:
    """SHA-256 of who is on each picture: the labels as 64-bit little-endian numbers, then the names."""
    known = labels.dtype.kind in "iu" and labels.shape == SHAPE[:1] and len(names) == PEOPLE
    numbers = labels.astype("<i8").tobytes() if known else b""
    return hashlib.sha256(numbers + "\n".join(names).encode("utf-8", "replace")).hexdigest()


def _read(known: Known, scale: str, mirror: str | None) -> Dataset:
    images, labels, names = read(obtain())
    return known.in_one_part(pictures(images, scale, name="lfw"), labels, names)


def _state(known: Known) -> tuple[tuple[FileState, ...], tuple[str, ...]]:
    path = locate()
    if path is None:
        return (FileState(PATH, MISSING),), ()
    try:
        images, _, _ = read(path)
    except DataError as error:
        return (FileState(PATH, DAMAGED, str(path), str(error)),), ()
    same = has_reference_pixels(images)
    notes = () if same else ("labels and names verified; pixels were resized elsewhere and differ in detail",)
    return (FileState(PATH, VERIFIED, str(path)),), notes


DATASETS = (
    Known(
        "lfw",
        *((3, 32, 32), 2267, 756, PEOPLE),
        source="Labeled Faces in the Wild, people with 20 pictures or more",
        licence="no licence stated, for research",
        read=_read,
        state=_state,
    ),
)
