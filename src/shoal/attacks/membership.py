"""Membership inference on the final model: was this record trained on?

    threshold   Yeom et al. (2018): records with a small loss are predicted to be members
    lira        Carlini et al. (2022), online: a likelihood ratio of phi = log(p/(1 - p)), which is about normal, with
                a mean for each record over models that were, and one over models that were not, trained on it
    offline     the same without models that were trained on it: how far phi is above the mean of the others

Every model is trained as the configuration says, on a random half of a pool of records; each is the target once, with
all others as its shadow models (one pooled variance, as the authors advise for few shadows), for as many rounds as
`budget.epsilon` allows. Where an epsilon is proven for a record that is there or not, and one record more moves no
others, the most that it allows any attack stands beside them.

Advantage is max(TPR - FPR) over all thresholds. As a maximum it is above 0 even for uninformed scores: `guessing` is
its mean when membership is shuffled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.accounting import accountants
from shoal.accounting.events import Compose, Event, Unbounded
from shoal.algorithms.base import Algorithm
from shoal.algorithms.charges import event
from shoal.attacks.allowed import Allowed, claimed
from shoal.attacks.attacked_task import of_classes
from shoal.calling import call
from shoal.config import Config
from shoal.data import Dataset
from shoal.errors import ConfigError
from shoal.inputs import Inputs, parts, take
from shoal.mechanisms.setting import Setting
from shoal.prepare import limit_of, load_data, prepare, with_features
from shoal.random.streams import Streams
from shoal.tasks import Task
from shoal.training.budget import affordable, refuse_budget

LEAST_MODELS = 4
FEW_FALSE = {"tpr_at_0_1_percent_fpr": 0.001, "tpr_at_1_percent_fpr": 0.01}
SHUFFLES = 200
MOST_POINTS = 200
LEARNT = 1 / 3  # of the way from guessing to no error: below it a model has little to leak
DIVIDED = Unbounded("records are divided among clients, so one more record moves others to other clients")
TURNED = Unbounded("whole updates are clipped, and one more record may reverse an update")
COUNTED = Unbounded(
    "how often a record is used follows from the number of records: records.rate and local.steps set it"
)


@dataclass(frozen=True)
class Roc:
    """How well scores separate members from non-members."""

    advantage: float
    guessing: float  # the advantage that scores without information would reach
    auc: float
    tpr_at_0_1_percent_fpr: float | None  # None where 0.1% of the non-members is less than one
    tpr_at_1_percent_fpr: float | None
    points: list[tuple[float, float]]

    @classmethod
    def of(cls, scores: np.ndarray, member: np.ndarray, streams: Streams) -> Roc:
        """Compute the curve.

        Args:
            scores: Higher means member; ties are kept together.
            member: The truth.
            streams: The source of shuffles.
        """
        order = np.argsort(-scores, kind="stable")
        last = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # the end of each run of equal scores
        fpr, tpr = _rates(member[order], last)
        generator = streams.generator("guessing")
        shuffled = [_advantage(*_rates(generator.permutation(member), last)) for _ in range(SHUFFLES)]
        return cls(
            advantage=_advantage(fpr, tpr),
            guessing=float(np.mean(shuffled)),
            auc=float(np.trapezoid(tpr, fpr)),
            **{name: _true_at(few, fpr, tpr, (~member).sum()) for name, few in FEW_FALSE.items()},
            points=[(float(fpr[i]), float(tpr[i])) for i in _thin(fpr)],
        )


def _true_at(few: float, fpr: np.ndarray, tpr: np.ndarray, others: int) -> float | None:
    return float(tpr[fpr <= few].max()) if others * few >= 1 else None


def _rates(member: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """FPR and TPR after each run of equal scores; `member` is in the order of falling scores."""
    false, true = (np.append(0, np.cumsum(side)[last]) / max(side.sum(), 1) for side in (~member, member))
    return false, true


def _advantage(fpr: np.ndarray, tpr: np.ndarray) -> float:
    return float((tpr - fpr).max())


def _thin(fpr: np.ndarray) -> np.ndarray:
    """Places of a few points, evenly in log FPR, for what matters is at few false positives; with both ends."""
    least = fpr[fpr > 0].min(initial=1.0)
    wanted = np.append(0.0, np.geomspace(least, 1.0, MOST_POINTS - 3) * (1 + 1e-9))
    return np.unique([0, *np.searchsorted(fpr, wanted, side="right") - 1, len(fpr) - 1])


@dataclass(frozen=True)
class Membership:
    """The result of membership inference on the final model."""

    algorithm: str
    dataset: str
    models: int
    records: int
    rounds: int  # of the model with the most
    train_accuracy: float
    test_accuracy: float
    guessed_accuracy: float  # of always saying the commonest class
    threshold: Roc
    lira: Roc
    offline: Roc
    allowed: Allowed | None
    unbounded: str | None  # why there is no such curve
    seconds: float
    losses: np.ndarray = field(repr=False, compare=False)  # [M, n]
    member: np.ndarray = field(repr=False, compare=False)

    @property
    def rocs(self) -> dict[str, Roc]:
        """The curves by the attacks' names."""
        return {"threshold": self.threshold, "lira": self.lira, "lira offline": self.offline}

    @property
    def warning(self) -> str:
        """A warning where the models learnt too little for the attack to show anything."""
        if self.train_accuracy >= self.guessed_accuracy + LEARNT * (1 - self.guessed_accuracy):
            return ""
        return (
            f"the models are barely better than guessing (accuracy {self.train_accuracy:.3f} on members, the "
            f"majority class has {self.guessed_accuracy:.3f}): they learnt too little to leak; train longer or with "
            f"a larger local.lr"
        )

    def rows(self) -> list[dict[str, Any]]:
        """One row for each attack, and one for the best that the claim allows."""
        names = ("advantage", "guessing", "auc", *FEW_FALSE)
        rows = [{"attack": name} | {key: getattr(roc, key) for key in names} for name, roc in self.rocs.items()]
        if self.allowed is not None:
            rows.append(self.allowed.row())
        return [{"algorithm": self.algorithm} | row for row in rows]

    def facts(self) -> dict[str, Any]:
        """Everything else, as JSON."""
        names = ("algorithm", "dataset", "models", "records", "rounds", "train_accuracy", "test_accuracy",
                 "guessed_accuracy", "seconds")  # fmt: skip
        rocs = {name: roc.points for name, roc in self.rocs.items()}
        claim = None if self.allowed is None else self.allowed.claim.to_json()
        if self.allowed is not None:
            rocs["allowed"] = self.allowed.points
        found = {name: getattr(self, name) for name in names}
        return found | {"warning": self.warning, "claim": claim, "unbounded": self.unbounded, "roc": rocs}


def membership(
    config: Config,
    *,
    models: int = 33,
    records: int | None = None,
    data: Dataset | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Membership:
    """Train models on random halves of a pool of records, and infer which records each was trained on.

    Args:
        config: How to train.
        models: How many.
        records: The size of the pool; all training records by default.
        data: The data set; loaded from the configuration by default.
        progress: Called with the number of models trained, and of all.

    Raises:
        ConfigError: Where there are too few models or records.
    """
    if models < LEAST_MODELS:
        raise ConfigError(f"models must be at least {LEAST_MODELS}: each needs shadows on both sides, got {models}")
    if config.algorithm.local.personal:
        raise ConfigError(
            f"local.personal {config.algorithm.local.personal!r}: the attacker has the shared layers only, which "
            f"predict nothing; leave it out to attack a model that is shared as a whole"
        )
    started = time.perf_counter()
    dataset = of_classes(with_features(data or load_data(config), config.data.features), config)
    config = replace(config, data=replace(config.data, features="none"))  # they are in the data set now
    streams = Streams(config.seed)
    pool = _pool(dataset, records, streams)
    member = _halves(models, len(pool), streams)
    shadows = []
    for place in range(models):
        seed = streams.number("shadow", place) % 2**31
        one = replace(config, seed=seed, noise_seed=None, random="research", baseline=False)
        shadows.append(_trained(one, dataset, pool, member[place]))
        if progress is not None:
            progress(place + 1, models)
    loss = np.stack([each.losses for each in shadows])
    phi = confidence(loss)
    done, delta = _same([each.event for each in shadows]), limit_of(config).delta
    allowed = Allowed.by(done, delta)
    return Membership(
        algorithm=config.algorithm.name,
        dataset=dataset.name,
        models=models,
        records=len(pool),
        rounds=max(each.rounds for each in shadows),
        train_accuracy=float(np.mean([each.train_accuracy for each in shadows])),
        test_accuracy=float(np.mean([each.test_accuracy for each in shadows])),
        guessed_accuracy=float(torch.bincount(dataset.test_y).max() / len(dataset.test_y)),
        threshold=Roc.of(-loss.ravel(), member.ravel(), streams),
        lira=Roc.of(likelihood_ratios(phi, member).ravel(), member.ravel(), streams),
        offline=Roc.of(offline_scores(phi, member).ravel(), member.ravel(), streams),
        allowed=allowed,
        unbounded=claimed(done, delta).because if allowed is None else None,
        seconds=round(time.perf_counter() - started, 2),
        losses=loss,
        member=member,
    )


def confidence(loss: np.ndarray) -> np.ndarray:
    """phi = log(p/(1 - p)) of the true class's probability p = exp(-loss)."""
    loss = np.clip(loss, 1e-7, 50)
    phi: np.ndarray = -loss - np.log(-np.expm1(-loss))
    return phi


def likelihood_ratios(phi: np.ndarray, member: np.ndarray) -> np.ndarray:
    """log N(phi; in) - log N(phi; out) for each model [M, n], with means over all other models."""
    scores = np.zeros_like(phi)
    for target, others in _targets(len(phi)):
        (inside, width), (outside, other_width) = (
            _distance(phi[target], phi[others], member[others] == side) for side in (True, False)
        )
        scores[target] = 0.5 * (outside**2 - inside**2) + np.log(other_width / width)
    return scores


def offline_scores(phi: np.ndarray, member: np.ndarray) -> np.ndarray:
    """How many standard deviations phi [M, n] is above its mean over the other models that were not trained on it."""
    scores = np.zeros_like(phi)
    for target, others in _targets(len(phi)):
        scores[target], _ = _distance(phi[target], phi[others], ~member[others])
    return scores


def _targets(models: int) -> Iterator[tuple[int, np.ndarray]]:
    """Each model, and which are the others."""
    return ((target, np.arange(models) != target) for target in range(models))


def _distance(x: np.ndarray, phi: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [n] in standard deviations from the mean that the chosen of phi [M, n] predict, and these deviations.

    There is one spread for all records, but a mean of k models is itself off by spread/sqrt(k): without that, the
    side with fewer models would always lose.
    """
    means, count = _means(phi, chosen), chosen.sum(0)
    width = _spread(phi, chosen, means) * np.sqrt(1 + 1 / np.maximum(count, 1))
    return (x - means) / width, width


def _means(phi: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The mean over the chosen models for each record; over all records where none was chosen."""
    count = chosen.sum(0)
    overall = phi[chosen].mean() if chosen.any() else 0.0
    return np.where(count > 0, (phi * chosen).sum(0) / np.maximum(count, 1), overall)


def _spread(phi: np.ndarray, chosen: np.ndarray, means: np.ndarray) -> float:
    """One standard deviation for all records, by the degrees of freedom that the means leave."""
    free = max(1, int(np.maximum(chosen.sum(0) - 1, 0).sum()))
    return float(np.sqrt((((phi - means) * chosen) ** 2).sum() / free)) + 1e-6


def _pool(dataset: Dataset, records: int | None, streams: Streams) -> np.ndarray:
    there = len(dataset.train_y)
    wanted = there if records is None else records
    if not 8 <= wanted <= there:
        raise ConfigError(f"records must be 8 to {there} (data '{dataset.name}' has no more), got {wanted}")
    pool: np.ndarray = np.sort(streams.generator("pool").permutation(there)[:wanted])
    return pool


def _halves(models: int, records: int, streams: Streams) -> np.ndarray:
    """Each record in each model with probability 1/2, [M, n]: what one model holds says nothing of the others."""
    halves: np.ndarray = streams.generator("halves").random((models, records)) < 0.5
    return halves


@dataclass(frozen=True, eq=False)
class _Shadow:
    """One model: its losses [n] on the pool, accuracy on its members and on held-out rows, rounds, and their cost."""

    losses: np.ndarray
    train_accuracy: float
    test_accuracy: float
    rounds: int
    event: Event  # for a record that is trained on or not, against who sees released models


def _same(events: list[Event]) -> Event:
    """The event of all models, of which each has another number of records."""
    return events[0] if len(set(events)) == 1 else COUNTED


def _joining(algorithm: Algorithm, setting: Setting, rounds: int) -> Event:
    """What one record more or less in the training set costs; charges are for one in the place of another.

    Where each record is clipped and sampled by itself, the two differ only in how far a sum moves.
    """
    done = Compose(tuple(event(algorithm, setting, t, "record", "release") for t in range(rounds)))
    if accountants.unbounded(done) is not None:
        return done
    return DIVIDED if setting.clients > 1 else done if algorithm.per_update is None else TURNED


def _trained(config: Config, dataset: Dataset, pool: np.ndarray, member: np.ndarray) -> _Shadow:
    rows = torch.from_numpy(pool[member])
    owners = None if dataset.owners is None else dataset.owners[pool[member]]
    part = replace(dataset, train_x=take(dataset.train_x, rows), train_y=dataset.train_y[rows], owners=owners)
    config, simulator = prepare(config, part, None)
    try:
        refuse_budget(config.algorithm, simulator.setting, limit_of(config))
        rounds = affordable(config.algorithm, simulator.setting, limit_of(config))
        while simulator.done < rounds:
            simulator.run_round(0)
        test = simulator.evaluate()["accuracy"] or 0.0
        module = simulator.evaluation.module
        simulator.evaluation.layout.shared.load(module, simulator.model)
        like = parts(simulator.evaluation.x)
        x = take(dataset.train_x, pool)  # on the model's device, and of the type that it takes
        x = {name: part.to(like[name]) for name, part in x.items()} if isinstance(x, dict) else x.to(like[""])
        y = dataset.train_y[torch.from_numpy(pool)].to(simulator.model.device)
        losses, hits = _losses(module, dataset.task, x, y)
        cost = _joining(config.algorithm, simulator.setting, rounds)
    finally:
        simulator.close()
    return _Shadow(losses, float(hits[member].mean()), test, rounds, cost)


@torch.inference_mode()
def _losses(module: torch.nn.Module, task: Task, x: Inputs, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The cross-entropy of each record, whatever the loss that was trained, and whether its class is right."""
    module.eval()
    pieces = [slice(start, start + 500) for start in range(0, len(y), 500)]
    predicted = task.predictions(torch.cat([call(module, take(x, piece)) for piece in pieces]), y)
    losses = -predicted.gather(1, y.unsqueeze(1)).squeeze(1).log()
    losses = torch.nan_to_num(losses, nan=50.0, posinf=50.0)
    return losses.cpu().numpy(), (predicted.argmax(1) == y).cpu().numpy()
