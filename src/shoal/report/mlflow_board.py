"""A run in an MLflow tracking store: its configuration as parameters, each round's numbers, its claims as tags.

The store is the one that MLflow itself would use: MLFLOW_TRACKING_URI, or else `mlflow.db` in the current folder. The
experiment is MLFLOW_EXPERIMENT_NAME, or else `shoal`. Seeds are not sent, since all noise follows from them
(random=research). A round that is run again is logged again; `mlflow.txt` in the run's folder names the MLflow run.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from shoal import release
from shoal.accounting.claims import Proven
from shoal.errors import ConfigError
from shoal.extras import optional
from shoal.report.run_reader import read_config, read_result
from shoal.report.tensorboard import scalars
from shoal.toml_text import flat

FILE = "mlflow.txt"
SECRET = ("seed", "noise_seed")
MOST = 100
"""The most parameters that a store takes at once."""


def require() -> Any:
    """The package mlflow.

    Raises:
        ConfigError: Where it is not installed.
    """
    return optional("mlflow", "log=mlflow")


class Board:
    """Logs the metrics of each round to one MLflow run."""

    def __init__(self, run: Path, done: int) -> None:
        """Begin the MLflow run of a run folder, or continue the one it names after `done` rounds.

        Raises:
            ConfigError: The tracking store cannot be used.
        """
        mlflow, self._run = require(), run
        self._client = mlflow.MlflowClient()
        try:
            self._id = self._found() if done and (run / FILE).is_file() else self._begun()
        except mlflow.MlflowException as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"log=mlflow: {mlflow.get_tracking_uri()} cannot be used: {reason}") from None

    def add(self, line: dict[str, Any]) -> None:
        """Log a round's numbers."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        held = [Metric(name, value, now, line["round"]) for name, value in scalars(line).items()]
        self._client.log_batch(self._id, metrics=held)

    def close(self) -> None:
        """Add what is proven, where the run has finished, and end the MLflow run."""
        result = read_result(self._run)
        for claim in (result or {}).get("proven", []):
            words = Proven(**claim).words()
            self._client.set_tag(self._id, f"proven.{claim['unit']}.{claim['observer']}", words)
        self._client.set_terminated(self._id, "KILLED" if result is None else "FINISHED")

    def _found(self) -> str:
        id = (self._run / FILE).read_text(encoding="utf-8").splitlines()[0]
        self._client.update_run(id, status="RUNNING")
        return id

    def _begun(self) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "shoal")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        tags = {"shoal.run": str(self._run.resolve()), release.KEY: release.METRICS}
        id = str(self._client.create_run(experiment, run_name=self._run.name, tags=tags).info.run_id)
        (self._run / FILE).write_text(f"{id}\n{release.KEY}: {release.METRICS}\n", encoding="utf-8")
        settings = flat(read_config(self._run))
        params = [Param(key, str(value)) for key, value in settings.items() if key not in SECRET]
        for first in range(0, len(params), MOST):
            self._client.log_batch(id, params=params[first : first + MOST])
        return id
