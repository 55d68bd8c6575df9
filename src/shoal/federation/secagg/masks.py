"""The arithmetic of secure aggregation (Bonawitz et al. 2017): whole numbers modulo 2^32, and masks that cancel.

A clipped update becomes multiples of a public step, rounded towards 0. To these a site adds a mask of its own and,
for every other site of the round, the mask of that pair, which the one adds and the other takes away. Masks are
ChaCha20's keystream under a seed: without the seed a masked number is any number, whatever it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from shoal.random.discrete_gaussian import Whole
from shoal.random.secure_streams import toward_zero

Words = npt.NDArray[np.uint32]
MODULUS = 2**32


def quantised(update: Tensor, bound: float, step: float) -> Whole:
    """The update in steps, no number further from 0 than it was; its norm is at most the bound, exactly.

    One that was not clipped is; one that holds NaN or Inf is zero.
    """
    most = math.floor(Fraction(bound / step) ** 2)  # a step is a power of two: the quotient is exact
    values = update.detach().cpu().double() / step
    norm = float(torch.linalg.vector_norm(values))
    values = values * min(1.0, bound / step / max(norm, 1e-300)) if math.isfinite(norm) else torch.zeros_like(values)
    while True:
        whole = toward_zero(values, 1.0).to(torch.int64)
        if (square := int((whole * whole).sum())) <= most:
            return whole.numpy()
        values = values * (math.sqrt(most / square) * (1 - 1e-12))  # float32's clip may be over by its last digit


def stream(seed: bytes, count: int) -> Words:
    """So many words that follow from the seed."""
    cipher = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(4 * count)), "<u4")


def masked(values: Whole, number: int, own: bytes, pairs: Mapping[int, bytes]) -> Words:
    """What site `number` sends: `own` is the seed of its own mask, `pairs` are those it has with the others."""
    words = values.astype(np.uint32)  # modulo 2^32
    words += stream(own, len(words))
    for other, seed in pairs.items():
        _shift(words, stream(seed, len(words)), number < other)
    return words


def unmasked(
    sent: Iterable[Words], count: int, own: Iterable[bytes], open_pairs: Iterable[tuple[int, int, bytes]]
) -> Whole:
    """The sum of what was sent. `own`: the seeds of the senders' own masks. `open_pairs`: (sender, other, seed) for
    the others who had agreed on a mask with a sender and then sent nothing."""
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
    """Words as a payload carries them: bits that nobody computes with, in the place of float32."""
    return torch.from_numpy(words.view(np.float32))


def from_vector(vector: Tensor) -> Words:
    """The words that `as_vector` was given."""
    return vector.contiguous().numpy().view(np.uint32)
