"""A method at client level and one at record level, with so little noise that small models learn in a few rounds."""

import pytest

TRAINING = {
    "rounds": 8,
    "clients": {"sampling": "all"},
    "records": {"batch": 8},
    "local": {"lr": 0.5, "epochs": 2},
}
CLIENT_LEVEL = TRAINING | {
    "algorithm": "geyer-private",
    "per_update": {"initial_clip_norm": 1.0},
    "per_round": {"noise_multiplier": 0.01},
}
RECORD_LEVEL = TRAINING | {
    "algorithm": "dp-sgd",
    "per_step": {"noise_multiplier": 0.01},
    "per_record": {"clip_norm": 1.0},
}
LEVELS = pytest.mark.parametrize("config", [CLIENT_LEVEL, RECORD_LEVEL], ids=["client", "record"])
