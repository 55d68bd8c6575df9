"""`-c log=mlflow`: a real tracking store that holds the numbers of metrics.jsonl, or an error that names the fix."""

import json
import sys

import pytest

from shoal.errors import ConfigError
from shoal.report.tensorboard import scalars
from support.tiny import PRIVATE, go_on, play, stopped_after

LOGGED = PRIVATE | {"log": "mlflow"}


def test_without_the_package_the_run_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"log=mlflow needs mlflow: pip install 'shoal\[mlflow\]'"):
        play(tmp_path, LOGGED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_local_store_holds_settings_every_round_and_the_claims_also_after_a_stop(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'shoal[mlflow]'")
    monkeypatch.chdir(tmp_path)  # where MLflow keeps what is not metrics
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'store.db'}")
    run = stopped_after(tmp_path / "runs", LOGGED, 3)
    client = mlflow.MlflowClient()
    (logged,) = client.search_runs([client.get_experiment_by_name("shoal").experiment_id])
    assert (logged.info.run_name, logged.info.status) == (run.name, "KILLED")
    result = go_on(run)
    (logged,) = client.search_runs([logged.info.experiment_id])
    assert logged.info.status == "FINISHED"
    assert logged.data.params["per_round.noise_multiplier"] == "1.5"
    assert "seed" not in logged.data.params
    assert logged.data.tags["release"].startswith("not for release")
    assert "release: not for release" in (run / "mlflow.txt").read_text(encoding="utf-8")
    claim = next(each for each in result.proven if each["epsilon"] is not None)
    assert logged.data.tags[f"proven.{claim['unit']}.{claim['observer']}"].startswith("epsilon ")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for name in ("accuracy", "loss", "epsilon/client/release"):
        kept = {each.step: each.value for each in client.get_metric_history(logged.info.run_id, name)}
        assert kept == {line["round"]: scalars(line)[name] for line in lines}
