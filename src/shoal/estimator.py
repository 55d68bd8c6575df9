"""`FederatedClassifier` and `FederatedRegressor`: estimators in the manner of scikit-learn.

    classifier = shoal.FederatedClassifier(epsilon=4).fit(X, y, groups=hospital)
    classifier.predict(X_new)
    classifier.claims_

`groups` names the client that owns each row. Without it there is one client, whose records are protected one by one:
clients are never made up, unless `settings` asks for that (`{"data.partition": "iid", "data.clients": 100}`), and
then `fit` warns and every claim says `simulated client`. The claims cover the model alone. Whatever was fitted to the
same rows before, such as a StandardScaler or the choice among several fits by a grid search, they do not cover: scale
features by public ranges.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from shoal.api import run
from shoal.data import from_arrays
from shoal.errors import ShoalError
from shoal.saved_model import Model, load_model
from shoal.suggest import suggest
from shoal.tasks import Classification, Regression, Task
from shoal.toml_text import flat
from shoal.training.evaluation import outputs_of

if TYPE_CHECKING:
    from torch import nn

Rows = np.ndarray
CLASSES_READ = "the classes were read from y, outside any guarantee: they are in the model's description"


class _Federated(BaseEstimator):  # type: ignore[misc]
    """What both estimators share: see `FederatedClassifier`."""

    _kind: Literal["classification", "regression"]

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        algorithm: str | None = None,
        model: nn.Module | type[nn.Module] | str | None = None,
        rounds: int | None = None,
        settings: Mapping[str, Any] | None = None,
        test_fraction: float = 0.2,
        runs: str | Path = "runs",
        random_state: Any = None,
        no_guarantee: bool = False,
    ) -> None:
        self.epsilon, self.delta, self.algorithm, self.model, self.rounds = epsilon, delta, algorithm, model, rounds
        self.settings, self.test_fraction, self.runs = settings, test_fraction, runs
        self.random_state, self.no_guarantee = random_state, no_guarantee

    def _fit(self, x: Rows, targets: Rows, task: Task, groups: Any) -> None:
        """Train; sets result_, claims_ and model_."""
        try:
            owners = None if groups is None else column_or_1d(groups)
            data = from_arrays(
                x, targets, client=owners, test_fraction=self.test_fraction, name=type(self).__name__, task=task,
                classes=task.classes if isinstance(task, Classification) else None,
                notes=(CLASSES_READ,) if isinstance(task, Classification) else (),
            )  # fmt: skip
            data = replace(data, read_classes=isinstance(task, Classification))  # not given, but found in y
            sizes = [] if data.owners is None else np.bincount(data.owners).tolist()
            self.result_ = run(
                self._config(len(x), sizes, (x.shape[1] + 1) * task.outputs), data=data, model=self.model,
                runs=self.runs, no_guarantee=self.no_guarantee,
            )  # fmt: skip
            network = None if isinstance(self.model, str) else self.model
            self.model_: Model = load_model(self.result_.run, model=network, trust_code=True)
        except ShoalError as error:
            raise ValueError(str(error)) from error
        self.claims_ = self.result_.proven
        if any(claim.get("simulated") for claim in self.claims_):
            warnings.warn("the clients are simulated: no claim for a client protects anybody", stacklevel=3)

    def _config(self, rows: int, sizes: list[int], parameters: int) -> dict[str, Any]:
        """The plan for a table of this size or, where a method is chosen, its defaults; the user's keys on top."""
        if self.algorithm is None:
            plan = suggest(
                rows, sizes, self._kind, parameters, epsilon=self.epsilon, test_fraction=self.test_fraction
            ).keys
            found = {**plan[""], **flat({name: keys for name, keys in plan.items() if name})}
        else:
            found = {"algorithm": self.algorithm} | ({"budget.calibrate": True} if self.epsilon is not None else {})
        own: dict[str, Any] = {"budget.epsilon": self.epsilon, "budget.delta": self.delta, "rounds": self.rounds}
        seed = self.random_state
        own["random"] = "secure" if seed is None else "research"
        if seed is not None:
            own["seed"] = int(seed if isinstance(seed, int) else check_random_state(seed).randint(2**31))
        chosen = {key: value for key, value in own.items() if value is not None}
        return found | chosen | flat(self.settings or {})

    def _predictions(self, X: Any) -> Rows:
        check_is_fitted(self)
        x = validate_data(self, X, dtype=np.float32, reset=False)
        with torch.inference_mode():
            outputs = outputs_of(self.model_.module, torch.from_numpy(np.ascontiguousarray(x)))
            targets = outputs.new_empty(len(x))
            return self.model_.task.predictions(outputs, targets).numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.random_state is None
        return tags


class FederatedClassifier(ClassifierMixin, _Federated):  # type: ignore[misc]
    """A classifier, trained with differential privacy over clients.

    Args:
        epsilon: The privacy budget; by default what suits the number of clients or records (`shoal init`).
        delta: Its delta; by default below one over that number.
        algorithm: The method; by default one that protects clients where there are at least a hundred, else records.
        model: A name or an `nn.Module`; by default a linear model.
        rounds: How many rounds.
        settings: Further keys of the configuration, such as `{"local.lr": 0.5}`; they come last.
        test_fraction: The share of rows that is held out for the figures of `result_`, of each client.
        runs: The folder in which each fit leaves a run, with its ledger and its report.
        random_state: None for secure mode, whose noise nobody can repeat. A number makes a fit reproducible, and its
            claims then assume that the number is secret. Fits with the same number, such as those of a
            cross-validation, draw the same noise: who sees two of them can subtract it, and no claim covers both.
        no_guarantee: Allow a method that claims privacy but proves none.

    Attributes:
        claims_: What is proven, for each unit and observer.
        result_: The result of the run.
        model_: The model, as `shoal.load_model` gives it.
        classes_: The classes. They are read from `y`, which no claim covers.
        n_features_in_: How many features there are.
    """

    _kind = "classification"

    def fit(self, X: Any, y: Any, groups: Any = None) -> FederatedClassifier:
        """Train.

        Args:
            X: Features `[N, F]`.
            y: Classes `[N]`.
            groups: The client that owns each row, whole numbers or text; without it there is one client.

        Returns:
            The estimator itself.

        Raises:
            ValueError: Something cannot be used; the message names it and the fix.
        """
        x, y = validate_data(self, X, y, dtype=np.float32, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class only, {self.classes_[0]!r}: give at least two classes")
        names = tuple(map(str, self.classes_))
        self._fit(x, codes.astype(np.int64), Classification(classes=names), groups)
        return self

    def predict_proba(self, X: Any) -> Rows:
        """The probability of each class, `[N, classes]`."""
        return self._predictions(X)

    def predict(self, X: Any) -> Rows:
        """The likeliest class of each row."""
        likeliest = self._predictions(X).argmax(1)
        return np.asarray(self.classes_[likeliest])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # noise costs accuracy on the few rows of scikit-learn's checks
        return tags


class FederatedRegressor(RegressorMixin, _Federated):  # type: ignore[misc]
    """A regression, trained with differential privacy over clients. Arguments and attributes: `FederatedClassifier`.

    Args:
        target_range: The lowest and the highest target: public constants, never read from the data. Predictions and
            the targets of training are kept within them.
    """

    _kind = "regression"

    def __init__(
        self,
        *,
        target_range: tuple[float, float] | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        algorithm: str | None = None,
        model: nn.Module | type[nn.Module] | str | None = None,
        rounds: int | None = None,
        settings: Mapping[str, Any] | None = None,
        test_fraction: float = 0.2,
        runs: str | Path = "runs",
        random_state: Any = None,
        no_guarantee: bool = False,
    ) -> None:
        self.target_range = target_range
        super().__init__(
            epsilon=epsilon, delta=delta, algorithm=algorithm, model=model, rounds=rounds, settings=settings,
            test_fraction=test_fraction, runs=runs, random_state=random_state, no_guarantee=no_guarantee,
        )  # fmt: skip

    def fit(self, X: Any, y: Any, groups: Any = None) -> FederatedRegressor:
        """Train; as `FederatedClassifier.fit`, with numbers as targets."""
        x, y = validate_data(self, X, y, dtype=np.float32, y_numeric=True, ensure_min_samples=2)
        if self.target_range is None:
            raise ValueError("target_range is not set: give the lowest and the highest target, as public constants")
        low, high = self.target_range
        try:
            task = Regression(low=low, high=high)
        except ShoalError as error:
            raise ValueError(f"target_range: {error}") from error
        self._fit(x, y.astype(np.float32), task, groups)
        return self

    def predict(self, X: Any) -> Rows:
        """The number predicted for each row."""
        return self._predictions(X)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags
