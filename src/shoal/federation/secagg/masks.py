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

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

from shoal.random.discrete_gaussian import Whole
from shoal.random.secure_streams import toward_zero

Words = npt.NDArray[np.uint32]
Keystream = Callable[[bytes], CipherContext]
MODULUS = 2**32
BLOCK = 2**15  # words


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


def chacha(seed: bytes) -> CipherContext:
    """Return the keystream of ChaCha20."""
    return Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()


def aes(seed: bytes) -> CipherContext:
    """Return the keystream of AES in counter mode: the halves of the seed are the key and the first counter."""
    return Cipher(algorithms.AES(seed[:16]), modes.CTR(seed[16:])).encryptor()


def add_masks(words: Words, up: Iterable[bytes], down: Iterable[bytes], cipher: Keystream = chacha) -> None:
    """Add the masks of the seeds `up` to the words, and subtract those of the seeds `down`.

    By blocks, each for all seeds: it and its mask stay in the cache.
    """
    block, zeros = np.empty(BLOCK, "<u4"), memoryview(bytes(4 * BLOCK))
    streams = [(cipher(seed), np.add) for seed in up] + [(cipher(seed), np.subtract) for seed in down]
    for start in range(0, len(words), BLOCK):
        part = words[start : start + BLOCK]
        mask = block[: len(part)]
        space = mask.data.cast("B")
        for stream, shift in streams:
            stream.update_into(zeros[: len(space)], space)
            shift(part, mask, out=part)


def masked(values: Whole, number: int, own: bytes, pairs: Mapping[int, bytes], cipher: Keystream = chacha) -> Words:
    """Return what site `number` sends; `own` is the seed of its self-mask, `pairs` those of its pairwise masks."""
    words = values.astype(np.uint32)  # modulo 2^32
    up = [seed for other, seed in pairs.items() if number < other]
    down = [seed for other, seed in pairs.items() if number > other]
    add_masks(words, [own, *up], down, cipher)
    return words


def unmask_pairs(words: Words, gone: int, pairs: Mapping[int, bytes], cipher: Keystream = chacha) -> None:
    """Remove from a sum the masks that its senders, by number with the seed, share with a site that sent nothing."""
    up = [seed for sender, seed in pairs.items() if sender > gone]
    down = [seed for sender, seed in pairs.items() if sender < gone]
    add_masks(words, up, down, cipher)


def signed(words: Words) -> Whole:
    """Return a sum without masks as integers of both signs."""
    return words.view(np.int32).astype(np.int64)


def as_vector(words: Words) -> Tensor:
    """Return words as a payload carries them: their bits reinterpreted as float32, never computed with."""
    return torch.from_numpy(words.view(np.float32))


def from_vector(vector: Tensor) -> Words:
    """Return the words that `as_vector` was given."""
    return vector.contiguous().numpy().view(np.uint32)
