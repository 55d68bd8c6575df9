"""Whether a file may be released: stated in each file that Shoal writes, under the key `release`.

An (epsilon, delta) covers the model, and nothing else. What was computed from records without noise is not for
release, however harmless it looks: figures of any kind, class counts, norms, shares of clipped updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

KEY = "release"
MODEL = "covered by the claims in the run's ledger"
SEEDED = f"{MODEL}, as long as nobody learns or guesses the seed, from which all noise follows (random=research)"
BEGAN = ", if the weights that training began with (init, or those of your own model) may be released too"
UNPROVEN = "not for release: nothing is proven about this model"
DESCRIPTION = "may be released with the model where clients' sizes are public: epsilon follows from them"
FROM_DATA = "not for release: ranges or categories were read from the data, outside any guarantee"
CONFIG = "may be released where clients' sizes are public: calibrated noise follows from them"
SEED = "not for release: the seed gives away all noise of the run (random=research)"
ENVIRONMENT = "may be released: it describes the machine only"
METRICS = "not for release: computed from records without noise"
RESULT = "not for release: figures, confusion and class counts were computed from records without noise"
CHECKPOINT = "not for release: besides the model it holds the run's state, such as noise and what clients keep"
PERSONAL = "not for release: each client's own layers, learnt from its records and for its use alone"
DATA_KEY = "not for release: with it guesses about training rows can be tested against the digest in the ledger"
LEDGER = "may be released where clients' sizes are public: sampling rates reveal them"
CERTIFICATE = "may be released where clients' sizes are public: sampling rates reveal them"
CERTIFICATE_OF_SITES = "may be released where it is public who takes part, and how large clients are: it names sites"
BY_CLIENT = "not for release unless clients' sizes are public: it reveals them"
PAGE = "not for release: it shows figures that were computed from records without noise"
SWEEP = "not for release: which cells were tried, and their seeds"
LOG = "not for release: it states figures that were computed from records without noise"
SITES = "not for release: who takes part, and how they behaved"
CANARIES = "not for release: with it canary clients can be told apart before they are audited"
SITE = "not for release: it belongs to this site, and reveals how many records are here, or what was learnt from them"
TERMS = "may be released: what the federation asks of every site"
AUDIT = "may be released: synthetic records, no one's data"
ATTACK = "not for release: it shows records, or what could be learnt of them"


def of_model(proven: Iterable[Mapping[str, Any]], random: str, from_data: bool, began: bool = False) -> str:
    """The label of a run's final model.

    Args:
        proven: What is proven of it.
        random: The mode of its random numbers.
        from_data: Whether ranges or categories were read from the data.
        began: Whether training began with given weights, which may still be in it.
    """
    if all(claim.get("epsilon") is None for claim in proven):
        return UNPROVEN
    if from_data:
        return FROM_DATA
    return (MODEL if random == "secure" else SEEDED) + (BEGAN if began else "")


def of_description(proven: Iterable[Mapping[str, Any]], random: str, from_data: bool) -> str:
    """The label of the description beside the model."""
    model = of_model(proven, random, from_data)
    return DESCRIPTION if model in (MODEL, SEEDED) else model


def of_config(random: str, from_data: bool) -> str:
    """The label of a run's configuration."""
    if random != "secure":
        return SEED
    return FROM_DATA if from_data else CONFIG
