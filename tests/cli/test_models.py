"""`shoal models check` and `shoal run` say how gradients are computed, and which layer forces it."""

import json
import sys

import pytest
from typer.testing import CliRunner

import shoal
from shoal.cli.main import app, main
from shoal.training import trial_step

NETS = """
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

class Scaled(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.scaled, self.last = weight_norm(nn.Linear(64, 2)), nn.Linear(2, classes)
        self.first = nn.Linear(64, 64).requires_grad_(False)

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.last(self.scaled(x))

class Mixes(Scaled):
    def forward(self, x):
        return super().forward(x - x.mean(0))

class Statistics(nn.Sequential):
    def __init__(self, input_shape, classes):
        super().__init__(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))
"""
LAYER = "scaled (ParametrizedLinear), scaled.parametrizations.weight (ParametrizationList)"
FEW = ["-c", "data.clients=10", "-c", "engine.threads=1", "-c", "engine.device=cpu"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "nets_to_check.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial_step.TrialStep, "seconds", lambda self, net, *given: float(net.way == "sequential"))
    yield
    sys.modules.pop("nets_to_check", None)


def checked(name):
    ran = CliRunner().invoke(app, ["models", "check", name, "--json", *FEW])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


@pytest.mark.slow
def test_of_each_level_it_tells_the_way_and_the_layer_that_forces_it():
    found = checked("nets_to_check:Scaled")
    assert found["parameters"] == 64 * 2 + 2 + 2 + 2 * 10 + 10
    assert found["frozen"] == 64 * 64 + 64
    assert found["without_rules"] == LAYER.split(", ")
    for level in ("client", "record"):
        assert found[level] == {"way": "vmap", "because": f"no rule for layer {LAYER}"}
    shown = CliRunner().invoke(app, ["models", "check", "nets_to_check:Scaled", *FEW], env={"COLUMNS": "200"}).stdout
    assert f"client level   vmap: no rule for layer {LAYER}" in shown
    assert checked("linear")["record"] == {"way": "rules", "because": ""}


@pytest.mark.slow
def test_where_records_cannot_have_privacy_it_says_why():
    found = checked("nets_to_check:Mixes")
    assert found["client"]["way"] == "sequential"
    assert "mixes the records of a batch" in found["record"]["refused"]


def test_it_takes_data_schema_and_task_of_a_configuration(tmp_path):
    (tmp_path / "own.csv").write_text("age,died\n" + "".join(f"{20 + n},{n % 2}\n" for n in range(40)))
    columns = (
        '[schema]\nlabel = "died"\nclasses = ["0", "1"]\n[schema.columns]\nage = {kind = "number", range = [0, 99]}\n'
    )
    own = f'algorithm = "dp-sgd"\n[data]\nname = "own.csv"\n[per_record]\nclip_norm = 1.0\n{columns}'
    (tmp_path / "own.toml").write_text(own)
    ran = CliRunner().invoke(app, ["models", "check", "linear", "own.toml", "--json", "-c", "data.clients=2"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["parameters"] == 2 * (1 + 1)


@pytest.mark.parametrize(
    ("name", "said"), [("nets_to_check:Statistics", "is BatchNorm1d"), ("nets_to_check:No", "nets_to_check")]
)
def test_a_model_that_cannot_be_trained_with_privacy_is_an_error(name, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["shoal", "models", "check", name, *FEW])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


@pytest.mark.slow
def test_a_run_says_it_in_one_line_and_so_do_its_result_and_its_page(tmp_path):
    words = ["-c", "algorithm=fedavg", "-c", "model=nets_to_check:Scaled", "-c", "rounds=1", *FEW]
    ran = CliRunner().invoke(app, ["run", *words], env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    assert f"gradients by vmap: no rule for layer {LAYER}" in ran.output.splitlines()
    (run,) = (tmp_path / "runs").iterdir()
    told = json.loads((run / "result.json").read_text())["gradients"]
    assert told == {"way": "vmap", "because": f"no rule for layer {LAYER}"}
    assert f"by vmap: no rule for layer {LAYER}" in (run / "report.html").read_text()
    assert shoal.run(resume=run).rounds == 1
