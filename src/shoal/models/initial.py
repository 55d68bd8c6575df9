"""Begin from saved weights: those of a model that was trained on public data before."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from shoal.errors import ModelError, listed

FILE = "model.safetensors"


def load_initial(model: nn.Module, path: str | Path) -> list[str]:
    """Give a model the saved weights of the same names and shapes.

    What a run begins from is charged nothing, so it must not come from the data that the run protects.

    Args:
        model: The model, which is changed.
        path: A .safetensors file, or the folder of the run that wrote it.

    Returns:
        The names of the model's weights that the file does not have, or has in another shape.

    Raises:
        ModelError: The file cannot be read, or no weight fits.
    """
    file = Path(path).expanduser()
    file = file / FILE if file.is_dir() else file
    try:
        saved = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"init '{path}' cannot be read: {error}; give a .safetensors file or a run's folder"
        ) from None
    own = model.state_dict()
    fits = {name: saved[name] for name, held in own.items() if name in saved and saved[name].shape == held.shape}
    if not fits:
        raise ModelError(f"init '{path}' has no weight that fits the model; it holds {listed(sorted(saved), 5)}")
    if wrong := next((name for name, held in fits.items() if not torch.isfinite(held).all()), None):
        raise ModelError(f"init '{path}': '{wrong}' holds NaN or Inf")
    model.load_state_dict(fits, strict=False)
    return [name for name in own if name not in fits]
