"""Readers of foreign file formats: IDX (MNIST), CIFAR-10 binary, .npz; no file is believed unchecked.

What a header claims is compared with the bytes that are there before any memory is taken for it.
"""

from __future__ import annotations

import math
import warnings
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from shoal.errors import DataError

IDX_UNSIGNED_BYTE = 0x08
CIFAR_SHAPE = (3, 32, 32)
CIFAR_ROW = 1 + math.prod(CIFAR_SHAPE)  # one byte of label, then the pixels channel by channel
NPZ_LIMIT = 8 << 30  # bytes of arrays in one .npz
NPY_KINDS = "biufU"


def parse_idx(data: bytes | bytearray, where: str, dimensions: int) -> np.ndarray:
    """The uint8 array in an IDX file: two zero bytes, a type, a number of dimensions, sizes, values."""
    head = 4 + 4 * dimensions
    magic = bytes((0, 0, IDX_UNSIGNED_BYTE, dimensions))
    if bytes(data[:4]) != magic:
        raise DataError(
            f"{where}: not an IDX file of {dimensions} dimensions, begins with {bytes(data[:4]).hex()}, "
            f"expected {magic.hex()}"
        )
    if len(data) < head:
        raise DataError(f"{where}: IDX header broken off after {len(data)} bytes")
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, head, 4))
    if math.prod(shape) != len(data) - head:
        raise DataError(f"{where}: claims the shape {shape}, but holds {len(data) - head:,} values")
    if not len(data) - head:
        raise DataError(f"{where}: holds no values, shape {shape}")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def parse_idx_pair(
    images: bytes | bytearray, labels: bytes | bytearray, where: str, classes: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """Pictures `[N, 1, H, W]` and labels `[N]` of two IDX files that belong together."""
    x = parse_idx(images, f"{where} (pictures)", 3)
    y = parse_idx(labels, f"{where} (labels)", 1)
    if len(x) != len(y):
        raise DataError(f"{where}: {len(x)} pictures but {len(y)} labels")
    check_labels(y, classes, where)
    return x[:, None], y


def parse_cifar(data: bytes | bytearray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures `[N, 3, 32, 32]` and labels `[N]` of one CIFAR-10 batch."""
    if not data or len(data) % CIFAR_ROW:
        raise DataError(f"{where}: {len(data):,} bytes are not a whole number of rows of {CIFAR_ROW}")
    rows = np.frombuffer(data, np.uint8).reshape(-1, CIFAR_ROW)
    check_labels(rows[:, 0], 10, where)
    return rows[:, 1:].reshape(-1, *CIFAR_SHAPE), rows[:, 0]


def check_labels(labels: np.ndarray, classes: int, where: str) -> None:
    """DataError unless all labels are in 0 .. classes - 1."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(f"{where}: labels run from {low} to {high}, expected 0 to {classes - 1}")


def read_npz(source: Path | IO[bytes], where: str, limit: int = NPZ_LIMIT) -> dict[str, np.ndarray]:
    """The arrays of a .npz file of numbers and text; never unpickles anything."""
    try:
        with zipfile.ZipFile(source) as archive:
            members = archive.infolist()
            claimed = sum(member.file_size for member in members)
            if claimed > limit:
                raise DataError(f"claims {claimed:,} bytes of arrays, more than {limit:,}")
            return {member.filename.removesuffix(".npy"): _read_npy(archive, member) for member in members}
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except Exception as error:  # zipfile and numpy raise some twenty kinds for damaged files
        raise DataError(f"{where}: not a .npz file that can be read: {error}") from error


def read_npy(path: Path) -> np.ndarray:
    """The array of numbers or text in a .npy file, mapped into memory; never unpickles anything."""
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # as many kinds as for .npz
        raise DataError(f"{path}: not a .npy file that can be read: {error}") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in NPY_KINDS:
        raise DataError(f"{path}: not an array of numbers")
    return array


def _read_npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    if not member.filename.endswith(".npy"):
        raise DataError(f"holds '{member.filename}', which is no array")
    with archive.open(member) as stream, warnings.catch_warnings():
        warnings.simplefilter("error")
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise DataError(f"array '{member.filename}' has format version {version}, expected 1.0 or 2.0")
        if dtype.kind not in NPY_KINDS or not dtype.itemsize:
            raise DataError(f"array '{member.filename}' is of type {dtype}; only numbers and text are read")
        there = member.file_size - stream.tell()
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != there:
            raise DataError(f"array '{member.filename}' claims the shape {shape} of {dtype} in {there:,} bytes")
        values = np.frombuffer(stream.read(), dtype)
    return values.reshape(shape, order="F" if fortran else "C")
