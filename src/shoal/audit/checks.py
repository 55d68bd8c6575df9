"""Checks that need no adversary: the same random numbers on neighbouring data, with the noise and without.

What a round releases less what it would release without noise is the noise. It must not change with the data, must be
as much as the claim needs for what one unit was seen to move, and must never come twice. And no unit may move the
sum by more than is declared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from shoal.accounting.events import Allocated, Event, Gaussian, Sampled
from shoal.accounting.leaves import leaves
from shoal.audit.bounds import ALPHA
from shoal.audit.broken import Broken
from shoal.audit.cases import BATCH
from shoal.audit.game import FAR, of_unit, step_radius, update_radius
from shoal.audit.testbed import Holder, Row, Seen, federation, rounds_of, silent, simulation, steps_of
from shoal.data import ListedPartition
from shoal.mechanisms.sampling import Clients
from shoal.mechanisms.update_clipping import FARTHEST
from shoal.random.streams import Streams
from shoal.training.local_training import train
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex

SLACK = 1e-4  # how exact float32 is, in a sum of a few records
LAYERS = 4


@dataclass(frozen=True)
class Check:
    """What was measured, the limit it must keep, and whether it does."""

    name: str
    measured: float
    limit: float
    flagged: bool
    words: str


def noise_checks(broken: Broken, trials: int) -> list[Check]:
    """The noise on neighbours: does it follow the data, is there enough of it, does it come twice?"""
    case = broken.case
    noisy, bare = _sides(broken, trials)
    noises = [a.vectors - b.vectors for a, b in zip(noisy, bare, strict=True)]
    spread = max(float(noises[0].std()), 1e-12)
    follows = max(float(np.abs(noise - noises[0]).max()) for noise in noises[1:]) / spread
    checks = [
        Check(
            "noise beside data",
            follows,
            0.05,
            follows > 0.05,
            "the same noise on all neighbours" if follows <= 0.05 else "the noise changes with the data",
        )
    ]
    if case.claim is not None and (needed := charged_noise(case.claim.event)) is not None:
        checks.append(_enough(noisy, bare, noises[0], needed))
    checks.append(_once(noises[0]))
    return checks


def _enough(noisy: Sequence[Seen], bare: Sequence[Seen], noise: np.ndarray, needed: float) -> Check:
    """Chi-square: the noise in units of what one unit moves, against what is charged."""
    from scipy.stats import chi2

    moved = float(np.linalg.norm(bare[1].vectors[0] - bare[0].vectors[0])) / 2
    extras = noisy[0].extras - bare[0].extras
    counted = float(np.abs(bare[1].extras[0] - bare[0].extras[0]).max()) / 2

    def most(numbers: np.ndarray) -> float:
        return float(np.sqrt(np.square(numbers).sum() / chi2.ppf(ALPHA, numbers.size)))

    losses = [(moved / max(most(noise), 1e-12)) ** 2]
    read = not np.isclose(np.abs(noisy[0].extras), FARTHEST, rtol=0, atol=1e-6).any()  # else clips end at their limit
    if extras.std() > 0 and read:
        losses.append((counted / most(extras)) ** 2)
    there = 1 / math.sqrt(sum(losses)) if sum(losses) > 0 else math.inf
    ratio = there / needed
    words = f"{ratio:.3f} of what is charged, at most, from {noise.size:,} numbers"
    return Check("noise scale", ratio, 0.999, ratio < 0.999, words)


def _once(noise: np.ndarray) -> Check:
    """Correlations between the noise of trials: none may be more than chance allows."""
    from scipy.stats import norm

    rows = noise[: min(len(noise), 24)]
    between = np.abs(np.corrcoef(rows) - np.eye(len(rows))) if noise.std() > 0 else np.zeros((2, 2))
    pairs = len(rows) * (len(rows) - 1) / 2
    limit = float(norm.isf(ALPHA / 2 / max(pairs, 1))) / math.sqrt(rows.shape[1])
    found = float(np.nan_to_num(between).max())
    words = "no noise comes twice" if found <= limit else "noise of one trial is in another's"
    return Check("noise reused", found, limit, found > limit, words)


def _sides(broken: Broken, trials: int) -> tuple[list[Seen], list[Seen]]:
    """With noise and without, the same random numbers: a unit, its opposite, and one that moves nothing."""
    case, played, streams = broken.case, broken.played, broken.streams
    quiet = silent(played)
    if case.where == "steps":
        width = 250
        clip = step_radius(case.record, streams, width)
        others = [Row(0.0, place) for place in range(1, BATCH)]
        units = (Row(0.999 * clip), Row(FAR * clip, sign=-1), Row(0.0))
        sides = [[*of_unit(case, row), *others] for row in units]
        sims = [federation(played, [side] * trials, width, streams) for side in sides]
        return [steps_of(sim, played) for sim in sims], [steps_of(sim, quiet) for sim in sims]
    cohort = round(case.record.clients.expected(0, case.setting.rounds, case.setting.clients))
    everybody, quiet = (replace(record, clients=Clients("all")) for record in (played, quiet))
    clip = update_radius(case.record, streams)
    still: list[Holder] = [[Row(0.5 * clip, 1 + k)] for k in range(cohort - 1)]
    holders = [[*still, [row]] for row in (Row(0.999 * clip), Row(FAR * clip, sign=-1), Row(0.0))]
    sims = [federation(everybody, holder, 2000, streams) for holder in holders]
    noisy = [rounds_of(sim, everybody, trials, colluding=case.colluding) for sim in sims]
    return noisy, [rounds_of(sim, quiet, trials) for sim in sims]


def charged_noise(event: Event) -> float | None:
    """The least noise that a step is charged, where all is Gaussian: tests of steps are charged beside them."""
    found: set[Event] = set()
    for leaf in leaves(event):
        match leaf:
            case Sampled(event=inner):
                found.add(inner)
            case Allocated(rounds):
                found |= {Gaussian(noise) for noise, _ in rounds}
            case _:
                found.add(leaf)
    noises = [each.noise for each in found if isinstance(each, Gaussian)]
    return min(noises) if noises and len(noises) == len(found) else None


def sensitivity_check(broken: Broken, pairs: int) -> Check:
    """Replay: random neighbours, one unit gone or another; how far the sum moves, over what is declared."""
    random = Streams(broken.streams.seed).generator("neighbours")
    moved = _step_moves if broken.case.where == "steps" else _update_moves
    gone, swapped = moved(broken, pairs, random)
    worst = max(gone, swapped / 2)
    words = f"{worst:.4f} of what is declared, over {pairs} pairs of neighbours"
    return Check("replay sensitivity", worst, 1 + SLACK, worst > 1 + SLACK, words)


def _step_moves(broken: Broken, pairs: int, random: np.random.Generator) -> tuple[float, float]:
    """Records of all sizes in a network of several layers; the greatest move, in units of the declared one."""
    charged, width = broken.case.record, 12
    quiet = replace(silent(broken.played), local=replace(broken.played.local, lr=1000.0))
    streams = Streams(int(random.integers(2**40)))
    layers: list[nn.Module] = []
    for _ in range(LAYERS - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(random.normal(size=parameter.shape)).float() / 2)
    scales = 10 ** random.uniform(-2, 3, size=(pairs * (BATCH + 1), 1))
    x = torch.from_numpy(random.normal(size=(pairs * (BATCH + 1), width)) * scales).float()
    y = torch.from_numpy(random.integers(2, size=len(x)))
    rows = np.arange(len(x)).reshape(pairs, BATCH + 1)
    held = [rows[:, :BATCH], rows[:, 1:BATCH], rows[:, 1:]]  # whole, the first one gone, another in its place
    indices = np.concatenate([part.ravel() for part in held]).astype(np.int32)
    sizes = np.repeat([part.shape[1] for part in held], pairs)
    parts = ListedPartition(indices, np.concatenate([[0], np.cumsum(sizes)]))
    sim = simulation(quiet, model, x, y, parts, streams)
    updates, _ = train(sim.cohort, sim.params, np.arange(3 * pairs), RoundIndex(0, 1), {})
    whole, gone, swapped = updates.double().view(3, pairs, -1) * (BATCH / 1000.0)
    assert charged.per_record is not None
    unit = charged.per_record.sensitivity_at_start(len(sim.params), LAYERS)
    left, changed = (float((whole - other).norm(dim=1).max()) / unit for other in (gone, swapped))
    if charged.records.repeats:  # a record may be all of a batch, and each side draws its own
        return 0.0, max(left, changed) / BATCH
    return left, changed


def _update_moves(broken: Broken, pairs: int, random: np.random.Generator) -> tuple[float, float]:
    """One client of three has gone, or holds something else; the greatest move of several layers, in clips."""
    charged = replace(silent(broken.case.record), clients=Clients("all"))
    quiet = replace(silent(broken.played), clients=Clients("all"))
    worst = [0.0, 0.0]
    for _ in range(pairs):
        sizes = 10 ** random.uniform(-2, 2, size=4)
        held = [[Row(float(size), int(random.integers(5)), int(random.choice([-1, 1])))] for size in sizes]
        found = []
        for clients in (held[:3], [*held[:2], [Row(0.0)]], [*held[:2], held[3]]):
            sim = federation(quiet, clients, 5, broken.streams, layers=LAYERS)
            params, _, metrics = run_round(sim.cohort, torch.zeros_like(sim.params), {}, RoundIndex(0, 1))
            found.append(params.double() * metrics["expected_clients"])
        _, _, metrics = run_round(replace(sim.cohort, algorithm=charged), sim.params, {}, RoundIndex(0, 1))
        unit = metrics.get("clip", 1.0)
        worst = [max(worst[0], float((found[0] - found[1]).norm()) / unit),
                 max(worst[1], float((found[0] - found[2]).norm()) / unit)]  # fmt: skip
    return worst[0], worst[1]
