"""`shoal predict` and `shoal export`: a run's model on new records, and for other programs."""

import csv
import json
import shutil
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import shoal
from shoal.cli.main import main
from support.saved_net import Rating, Small, Tokens
from support.tiny import FEDAVG, network, play

CONFIG = FEDAVG | {"rounds": 1, "clients.sampling": "all"}
SCHEMA = {
    "label": "died",
    "classes": ["no", "yes"],
    "client_column": "hospital",
    "columns": {
        "age": {"kind": "number", "range": [0, 120], "missing": 60},
        "sex": {"kind": "category", "categories": ["F", "M"]},
    },
}


def table(path, rows=24, died=True):
    lines = ["hospital,sex,age,died" if died else "age,sex"]
    for row in range(rows):
        age, sex = (17 * row) % 120, "FM"[row % 2]
        lines.append(f"{row % 3},{sex},{age},{'yes' if age > 60 else 'no'}" if died else f"{age},{sex}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def shell(monkeypatch, capsys, tmp_path):
    """`shoal ...` in this process: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err

    return called


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("patients")
    data = {"name": str(table(folder / "patients.csv"))}
    return shoal.run(CONFIG | {"data": data, "schema": SCHEMA, "model": "linear"}, runs=folder / "runs").run


@pytest.mark.slow
def test_new_rows_are_predicted_and_written_for_their_owner_alone(shell, run, tmp_path):
    new = table(tmp_path / "new.csv", died=False)
    assert shell("predict", run, new, "--out", "predictions.csv") == (0, "24 predictions in predictions.csv\n", "")
    assert shell("predict", run, new, "--out", "predictions.parquet")[0] == 0
    with (tmp_path / "predictions.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    expected = shoal.load_model(run).predict(new).columns
    assert [row["class"] for row in rows] == expected["class"].tolist()
    assert [float(row["probability_yes"]) for row in rows] == expected["probability_yes"].tolist()
    from pyarrow import parquet

    written = parquet.read_table(tmp_path / "predictions.parquet").to_pydict()
    assert written == {name: column.tolist() for name, column in expected.items()}
    for name in ("predictions.csv", "predictions.parquet"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_figures_stand_beside_where_the_label_is_there(shell, run, tmp_path):
    code, out, _ = shell("predict", run, table(tmp_path / "new.csv"))
    assert code == 0
    assert "24 records in all" in out
    assert "constant answer" in out
    code, out, _ = shell("predict", run, table(tmp_path / "new.csv"), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["figures"] == shoal.load_model(run).predict(tmp_path / "new.csv").figures
    assert found["predictions"].keys() == {"class", "probability_no", "probability_yes"}


@pytest.mark.slow
def test_a_data_set_by_its_name(shell, tmp_path):
    result = shoal.run(CONFIG | {"data.name": "digits", "model": "linear"}, runs=tmp_path / "runs")
    code, out, _ = shell("predict", result.run.name[:10], "--data", "digits", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["figures"], found["records"]) == (result.figures, 360)


@pytest.mark.slow
def test_bad_requests_are_refused_in_one_line(shell, run, tmp_path):
    new = table(tmp_path / "new.csv", died=False)
    (tmp_path / "less.csv").write_text("colour\nred\n")
    passed = play(tmp_path / "runs", FEDAVG | {"rounds": 1}).run
    by_path = shutil.copytree(passed, tmp_path / "runs" / "by-path")
    about = json.loads((by_path / "model.json").read_text())
    named = about | {"model": "support.saved_net:Small", "passed_in_python": False}
    (by_path / "model.json").write_text(json.dumps(named))
    for arguments, words in (
        (["predict", run], "give a file of new records, or --data NAME"),
        (["predict", run, new, "--data", "digits"], "one of the two"),
        (["predict", "no-such", new], "there is no run 'no-such'"),
        (["predict", run, "absent.csv"], "there is no file absent.csv"),
        (["predict", run, new, "--out", "here.xlsx"], "must end in .csv or .parquet"),
        (["predict", run, new, "--out", "nowhere/here.csv"], "there is no folder"),
        (["predict", run, "less.csv"], "there are no columns 'age', 'sex'"),
        (["predict", run, "--data", "digits"], "has 10 classes"),
        (["predict", passed, new], "was passed in Python: pass it again, shoal.load_model(RUN, model=...)"),
        (["predict", by_path, new], "support.saved_net:Small'; if you trust whoever sent it: --trust-code"),
        (["export", by_path], "--trust-code"),
        (["export", run, "--format", "pickle"], "--format 'pickle' is not known"),
    ):
        code, out, error = shell(*arguments)
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert words in error


def test_a_run_shows_its_model(shell, run):
    code, out, _ = shell("runs", "show", run, "--json")
    found = json.loads(out)["model"]
    assert code == 0
    assert (found["model"], found["task"], found["input_shape"]) == ("linear", "classification", [4])
    assert [name.rpartition("/")[2] for name in found["files"]] == ["model.safetensors", "model.json"]
    assert "shoal predict" in " ".join(shell("runs", "show", run)[1].split())


# --- export ---------------------------------------------------------------------------------------------


def run_onnx(path):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (shoal[export])")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def found(*x):
        given = {name: part.numpy() for name, part in zip(names, x, strict=True)}
        return torch.from_numpy(session.run(None, given)[0])

    return found, session.get_modelmeta().custom_metadata_map["model.json"]


def run_torchscript(path):
    extra = {"model.json": ""}
    return torch.jit.load(path, _extra_files=extra), extra["model.json"]


RUNTIMES = {"onnx": run_onnx, "torchscript": run_torchscript}


@pytest.fixture(params=RUNTIMES)
def kind(request):
    if request.param == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason=f"{package} is not installed (shoal[export])")
    return request.param


def exported(run, kind, path, model=None):
    """The model, what its own runtime makes of the file, and the description inside the file."""
    from shoal.model_export import export

    loaded = shoal.load_model(run, model=model, trust_code=True)
    assert export(loaded, path, kind) <= 1e-5
    return loaded, *RUNTIMES[kind](path)


def agree(module, found, x):
    with torch.no_grad():
        return torch.allclose(found(x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_an_exported_table_model_gives_the_same_outputs_for_batches_of_any_size(shell, run, kind, tmp_path):
    code, out, error = shell("export", run, "--format", kind, "--out", "exported")
    assert (code, error) == (0, "")
    assert "takes float32 [N, 4]" in out
    found, about = RUNTIMES[kind](tmp_path / "exported")
    model, about = shoal.load_model(run), json.loads(about)
    assert about == json.loads((run / "model.json").read_text())
    here = str(Path(shoal.__file__).parent).encode()
    assert here not in (tmp_path / "exported").read_bytes(), "no path of this machine"
    assert all(agree(model.module, found, torch.randn(n, 4, generator=torch.manual_seed(n))) for n in (1, 3, 64))


@pytest.mark.slow
def test_pictures_tokens_and_frozen_layers_are_exported(kind, tmp_path):
    picture = {"data.name": "digits", "model": "digits-cnn"}
    run = shoal.run(CONFIG | picture, runs=tmp_path).run
    model, found, _ = exported(run, kind, tmp_path / "picture")
    assert agree(model.module, found, torch.rand(7, 1, 8, 8, generator=torch.manual_seed(0)))
    x = np.arange(96 * 7).reshape(96, 7) % 6
    tokens = shoal.from_arrays(x[:, :-1], x[:, 1:], client=np.arange(96) % 4, classes=list("abcdef"))
    run = shoal.run(CONFIG, data=tokens, model=Tokens(), runs=tmp_path).run
    model, found, _ = exported(run, kind, tmp_path / "tokens", model=Tokens())
    assert agree(model.module, found, torch.randint(6, (5, 6), generator=torch.manual_seed(0)))
    frozen = shoal.from_arrays(x.astype(np.float32), x[:, 0] % 2, client=np.arange(96) % 4)
    run = shoal.run(CONFIG, data=frozen, model=Small, runs=tmp_path).run
    model, found, _ = exported(run, kind, tmp_path / "frozen")
    assert agree(model.module, found, torch.randn(5, 7, generator=torch.manual_seed(0)))


@pytest.mark.slow
def test_several_inputs_and_outputs_with_names_are_exported(kind, tmp_path):
    generator = np.random.default_rng(0)
    x = {"user": np.arange(96) % 5, "item": generator.standard_normal((96, 2, 2)).astype(np.float32)}
    data = shoal.from_arrays(x, np.arange(96) % 2, client=np.arange(96) % 4)
    model, found, _ = exported(shoal.run(CONFIG, data=data, model=Rating, runs=tmp_path).run, kind, tmp_path / "file")
    given = {name: part[:7] for name, part in data.test_x.items()}
    with torch.no_grad():
        expected = model.module(**given)["logits"]
        assert torch.allclose(found(*given.values()), expected, rtol=1e-5, atol=1e-5)


class Looking(torch.nn.Linear):
    """Its result depends on values in a way that no trace can hold."""

    def forward(self, x):
        rows = [super(Looking, self).forward(row) * (2 if float(row.sum()) > 0 else 1) for row in x]
        return torch.stack(rows)


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused_in_one_line_and_nothing_is_written(kind, tmp_path):
    from shoal.model_export import export

    run = play(tmp_path, FEDAVG | {"rounds": 1}).run
    model = shoal.load_model(run, model=Looking(4, 2))
    with pytest.raises(shoal.ShoalError, match=f"model Looking cannot be exported as {kind}") as problem:
        export(model, tmp_path / "file", kind)
    assert "\n" not in str(problem.value)
    assert not (tmp_path / "file").exists()
    assert export(shoal.load_model(run, model=network()), tmp_path / "file", kind) <= 1e-5
