"""Public, fixed features of pictures, such as histograms of their gradients, computed once and kept.

They use nothing but the picture itself (no mean, no scale taken over a data set), so that they cost no
privacy; and a small linear model on them suffers far less from noise than a network on pixels.

hog         histograms of oriented gradients (Dalal & Triggs 2005): 7x7 overlapping cells, 9 directions of the
            full turn, unit norm: 441 numbers
hog2        the same idea, better for a linear model under noise: slightly smoothed, 8 directions, square
            roots, what all pictures share taken out, unit norm: 392 numbers
hog-sharp   hog2 without its smoothing: 392 numbers
hog-fourier random Fourier features (Rahimi & Recht 2007) of hog-sharp: a linear model on them is one with the kernel
            exp(-3 |x - y|^2 / 2), under which pictures have less in common: 3,136 numbers
scattering  the wavelet scattering transform (Oyallon & Mallat 2015), J=2, L=8, from kymatio, on pixels from 0
            to 255 as PFL's public code has it: (81 per channel, height/4, width/4)

Nothing is fitted, but the form of hog2 was chosen by trial on MNIST, and that of hog-sharp and hog-fourier on
Fashion-MNIST (benchmarks/feature_forms.py): there their accuracy is flattered a bit.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import conv2d, pad

from shoal.errors import DataError, nearest
from shoal.extras import optional

CELLS = 7
WAVES, SHARPNESS = 1568, 3.0  # random directions of hog-fourier and the factor in its kernel
CHUNK = 400_000  # pixels that are worked on at once


def features(name: str, x: torch.Tensor) -> torch.Tensor:
    """The features of pictures.

    Args:
        name: One of `names()`.
        x: Pictures [N, channels, height, width], as bytes or as numbers from 0 to 1.

    Returns:
        Float32 features, one row a picture; `x` itself for `none`.

    Raises:
        DataError: The name is unknown, or these features cannot be made of such pictures.
        ConfigError: The extra that they need is not installed.
    """
    feature = _feature(name)
    if feature is None:
        return x
    _refuse_unfit(name, x, feature.least)
    transform = feature.prepare(x)
    result = x.new_empty((len(x), *transform(_unit_scale(x[:1])).shape[1:]), dtype=torch.float32)
    step = max(1, CHUNK // math.prod(x.shape[1:]))
    for start in range(0, len(x), step):
        chunk = slice(start, start + step)
        result[chunk] = transform(_unit_scale(x[chunk]))
    return result


def cached(name: str, x: torch.Tensor, folder: Path) -> torch.Tensor:
    """As `features`, but computed once: stored in the folder under the SHA-256 of the pictures.

    The file's name holds the digest of its contents too, so that a damaged one is noticed and computed again.

    Args:
        name: One of `names()`.
        x: Pictures, as for `features`.
        folder: Where the files are kept; made where it is missing.

    Returns:
        The features, mapped from the file, in CPU memory.

    Raises:
        DataError: As for `features`, or the file cannot be written.
    """
    feature = _feature(name)
    if feature is None:
        return x
    key = f"{name}-v{feature.version}-{_key(x)}"
    for path in sorted(folder.glob(f"{key}-*.npy")):
        if _digest(path) == path.stem.rpartition("-")[2]:
            return _map(path)
        with suppress(OSError):
            path.unlink()
    return _map(_store(features(name, x), folder, key))


def names() -> list[str]:
    """What `features` knows."""
    return ["none", *FEATURES]


# --- oriented gradients ---------------------------------------------------------------------------------


def _hog(x: torch.Tensor) -> torch.Tensor:
    return _unit(_histograms(*_gradient(x), bins=9))


def _hog2(
    x: torch.Tensor, *, smoothed: bool = True, bins: int = 8, roots: bool = True, centred: bool = True
) -> torch.Tensor:
    """Square roots even out strong and weak edges. The template is roughly the mean of centred pictures.

    Without taking it out, a large part of every unit vector is the same for all pictures, and says nothing.
    """
    h = _histograms(*_gradient(_smooth(x, min(x.shape[-2:]) / 28) if smoothed else x), bins)
    h = h.sqrt() if roots else h
    if centred:
        t = _template(bins).to(h)
        h = h - (h * t).sum((1, 2, 3), keepdim=True) * t
    return _unit(h)


def _hog_sharp(x: torch.Tensor) -> torch.Tensor:
    return _hog2(x, smoothed=False)


def _hog_fourier(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    directions = _directions(8 * CELLS**2, SHARPNESS).to(x.device)
    return lambda pictures: _waves(_hog_sharp(pictures), directions)


def _directions(width: int, sharpness: float, waves: int = WAVES) -> torch.Tensor:
    """[width, waves]: random, always the same ones."""
    random = torch.Generator().manual_seed(0)
    normals = torch.randn(width, waves, generator=random, dtype=torch.float64)
    return (normals * math.sqrt(sharpness)).float()


def _waves(h: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Cosines and sines along the directions; their norm is 1 as it is."""
    phase = h @ directions
    return torch.cat([phase.cos(), phase.sin()], 1) / math.sqrt(phase.shape[1])


def _gradient(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Size and angle [N, 1, H, W] of the gradient by central differences; the steepest channel counts."""
    p = pad(x, (1, 1, 1, 1), mode="replicate")
    dx = (p[..., 1:-1, 2:] - p[..., 1:-1, :-2]) / 2
    dy = (p[..., 2:, 1:-1] - p[..., :-2, 1:-1]) / 2
    steepest = (dx**2 + dy**2).argmax(1, keepdim=True)
    dx, dy = dx.gather(1, steepest), dy.gather(1, steepest)
    return (dx**2 + dy**2).sqrt(), torch.atan2(dy, dx)


def _histograms(size: torch.Tensor, angle: torch.Tensor, bins: int) -> torch.Tensor:
    """[N, bins, 7, 7]: each pixel's gradient shared by the nearest directions and cells."""
    place = angle.remainder(2 * math.pi) * (bins / (2 * math.pi))
    distance = (place - torch.arange(bins).to(place).view(1, bins, 1, 1)).abs()
    oriented = size * (1 - torch.minimum(distance, bins - distance)).clamp(min=0)
    rows, columns = (_windows(n).to(size) for n in size.shape[-2:])
    return rows @ oriented @ columns.T


def _windows(side: int) -> torch.Tensor:
    """[7, side]: how much a pixel counts in a cell; triangles that reach to the next cells' centres."""
    cell = side / CELLS
    centres = (torch.arange(CELLS) + 0.5) * cell - 0.5
    return (1 - (torch.arange(side) - centres[:, None]).abs() / cell).clamp(min=0)


def _template(bins: int) -> torch.Tensor:
    """[1, bins, 7, 7] of unit norm: a hill over the cells, the same for all directions."""
    hill = torch.exp(-(torch.linspace(-1, 1, CELLS) ** 2) / 1.4)
    template = (hill[:, None] * hill).expand(1, bins, CELLS, CELLS)
    norm: torch.Tensor = template.norm()
    return template / norm


def _smooth(x: torch.Tensor, deviation: float) -> torch.Tensor:
    """Gaussian blur of each channel, the border repeated."""
    reach = max(1, round(3 * deviation))
    kernel = torch.exp(-((torch.arange(-reach, reach + 1) / deviation) ** 2) / 2).to(x)
    kernel = kernel / kernel.sum()
    p = pad(x, (reach, reach, reach, reach), mode="replicate").flatten(0, 1)[:, None]
    return conv2d(conv2d(p, kernel.view(1, 1, -1, 1)), kernel.view(1, 1, 1, -1)).view_as(x)


def _unit(h: torch.Tensor) -> torch.Tensor:
    """Flat vectors of norm 1; a picture without any edge stays zero."""
    h = h.flatten(1)
    norm: torch.Tensor = h.norm(dim=1, keepdim=True)
    return h / norm.clamp(min=1e-6)


# --- scattering -----------------------------------------------------------------------------------------


def _scattering(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """kymatio's transform for pictures of this size; its top-level import fails with scipy 1.17 or newer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kymatio = optional("kymatio.scattering2d.frontend.torch_frontend", "data.features=scattering")
        transform = kymatio.ScatteringTorch2D(J=2, shape=tuple(x.shape[-2:]), L=8).to(x.device)

    def scatter(pictures: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return transform((255 * pictures).contiguous()).flatten(1, 2)  # type: ignore[no-any-return]

    return scatter


# --- the registry and its checks ------------------------------------------------------------------------


@dataclass(frozen=True)
class Feature:
    """`prepare(x)` gives the transform for pictures like x; a new version makes old files count no more."""

    version: int
    least: int
    prepare: Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]


FEATURES = {
    "hog": Feature(1, CELLS, lambda x: _hog),
    "hog2": Feature(1, CELLS, lambda x: _hog2),
    "hog-sharp": Feature(1, CELLS, lambda x: _hog_sharp),
    "hog-fourier": Feature(2, CELLS, _hog_fourier),
    "scattering": Feature(1, 8, _scattering),
}


def _feature(name: str) -> Feature | None:
    """The feature of that name; None stands for the pictures as they are."""
    if name not in names():
        raise DataError(f"unknown features '{name}'{nearest(name, names())}")
    return FEATURES.get(name)


def _refuse_unfit(name: str, x: torch.Tensor, least: int) -> None:
    if x.dim() != 4:
        raise DataError(
            f"features '{name}' are made of pictures [N, channels, height, width], got shape "
            f"{tuple(x.shape)}; for a table set data.features=none"
        )
    if min(x.shape[-2:]) < least:
        raise DataError(
            f"features '{name}' need pictures of at least {least}x{least}, got {x.shape[2]}x{x.shape[3]}; "
            "set data.features=none"
        )
    if len(x) == 0:
        raise DataError(f"features '{name}' of no pictures at all: shape {tuple(x.shape)}")
    if x.is_floating_point():
        low, high = float(x.amin()), float(x.amax())
        if not (low >= 0 and high <= 1):
            raise DataError(
                f"features '{name}' need pixels from 0 to 1 (or bytes), got {low:.4g} to {high:.4g}; "
                "compute them before any normalisation"
            )
    elif x.dtype != torch.uint8:
        raise DataError(f"features '{name}' need bytes or floating-point pixels, got {x.dtype}")


def _unit_scale(x: torch.Tensor) -> torch.Tensor:
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()


# --- the files --------------------------------------------------------------------------------------------


def _key(x: torch.Tensor) -> str:
    """The SHA-256 of the pictures, their shape and their type."""
    digest = hashlib.sha256(f"{x.dtype} {tuple(x.shape)} ".encode())
    digest.update(x.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _map(path: Path) -> torch.Tensor:
    """Mapped copy-on-write: what is read is shared, and nothing that is written reaches the file."""
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))


def _store(result: torch.Tensor, folder: Path, key: str) -> Path:
    """A temporary file, then a rename: nobody ever sees half a file."""
    temporary: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
            temporary = Path(file.name)
            np.save(file, result.cpu().numpy(), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        return temporary.rename(folder / f"{key}-{_digest(temporary)}.npy")
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise DataError(
            f"features cannot be stored in {folder}: {error.strerror or error}; free some space there, or "
            "set SHOAL_CACHE to another folder"
        ) from error
