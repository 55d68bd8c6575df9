"""The arithmetic of secure aggregation (Bonawitz et al. 2017): integers modulo 2^32, and masks that cancel.

A clipped update is rounded towards 0 to multiples of a public step. A site adds its self-mask and, for every other
site with which it shares masks, a pairwise mask that one of the two adds and the other subtracts. A mask is the
keystream of a cipher under a seed: without the seed, a masked number looks uniformly random. The cipher is ChaCha20
or, in sparse rounds, whose masks are many, AES-128 in counter mode, the fastest there is where processors have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from shoal.random.discrete_gaussian import Whole
from shoal.random.secure_streams import toward_zero

Words = npt.NDArray[np.uint32]
Stream = Callable[[bytes, int], Words]
MODULUS = 2**32


def quantised(update: Tensor, bound: float, step: float) -> Whole:
    """Return the update in integer steps, each rounded towards 0, with a norm of at most the bound, exactly.

    An update over the bound is clipped; one that contains NaN or Inf becomes zero.
    """
    most = math.floor(Fraction(bound / step) ** 2)  # a step is a power of two: the quotient is exact
    values = update.detach().cpu().double() / step
    norm = float(torch.linalg.vector_norm(values))
    values = values * min(1.0, bound / step / max(norm, 1e-300)) if math.isfinite(norm) else torch.zeros_like(values)
    while True:
        whole = toward_zero(values, 1.0).to(torch.int64)
        if (square := int((whole * whole).sum())) <= most:
            return whole.numpy()
        values = values * (
            math.sqrt(most / square) * (1 - 1e-12)
        )  # clipping in float32 may exceed the bound by one ulp


def stream(seed: bytes, count: int) -> Words:
    """Return `count` pseudorandom 32-bit words from a seed."""
    cipher = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(4 * count)), "<u4")


def fast_stream(seed: bytes, count: int) -> Words:
    """Return `count` pseudorandom 32-bit words from a seed, by AES: its halves are the key and the first counter."""
    cipher = Cipher(algorithms.AES(seed[:16]), modes.CTR(seed[16:])).encryptor()
    return np.frombuffer(cipher.update(_zeros(4 * count)), "<u4")


@lru_cache(1)
def _zeros(count: int) -> bytes:
    return bytes(count)


def masked(values: Whole, number: int, own: bytes, pairs: Mapping[int, bytes], stream: Stream = stream) -> Words:
    """Return what site `number` sends; `own` is the seed of its self-mask, `pairs` those of its pairwise masks."""
    words = values.astype(np.uint32)  # modulo 2^32
    words += stream(own, len(words))
    for other, seed in pairs.items():
        _shift(words, stream(seed, len(words)), number < other)
    return words


def unmasked(
    sent: Iterable[Words],
    count: int,
    own: Iterable[bytes],
    open_pairs: Iterable[tuple[int, int, bytes]],
    stream: Stream = stream,
) -> Whole:
    """Return the sum of the values sent.

    Args:
        sent: The masked values of each sender.
        count: How many values each sent.
        own: The seeds of the senders' self-masks.
        open_pairs: (sender, other, seed) for each other site that shares a mask with a sender but sent nothing.
        stream: The cipher of the masks.
    """
    words = np.zeros(count, np.uint32)
    for each in sent:
        words += each
    for seed in own:
        words -= stream(seed, count)
    for sender, other, seed in open_pairs:
        _shift(words, stream(seed, count), sender > other)
    return words.view(np.int32).astype(np.int64)


def _shift(words: Words, mask: Words, up: bool) -> None:
    if up:
        words += mask
    else:
        words -= mask


def as_vector(words: Words) -> Tensor:
    """Return words as a payload carries them: their bits reinterpreted as float32, never computed with."""
    return torch.from_numpy(words.view(np.float32))


def from_vector(vector: Tensor) -> Words:
    """Return the words that `as_vector` was given."""
    return vector.contiguous().numpy().view(np.uint32)
