"""A run saves its model; loaded again, it predicts what the trainer's evaluation said."""

import contextlib
import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from pyarrow import csv, parquet
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import shoal
from shoal import saved_model
from shoal.accounting.claims import COLUMNS
from shoal.data import large_tables, table_files
from shoal.data.schema import Schema
from shoal.errors import DataError, ModelError, RunError, ShoalError
from shoal.report.certificate import certificate
from shoal.saved_model import load_model
from support.saved_net import Rating, Small, Tokens
from support.tiny import FEDAVG, PRIVATE, network, play

GENERATOR = np.random.default_rng(11)
X = GENERATOR.standard_normal((600, 4)).astype(np.float32)
OWNERS = np.repeat(np.arange(12), 50)
CONFIG = FEDAVG | {"rounds": 2}
HOSPITALS = ["north", "south", "west"]
SCHEMA = {
    "label": "died",
    "classes": ["no", "yes"],
    "client_column": "hospital",
    "columns": {
        "age": {"kind": "number", "range": [0, 120], "missing": 60},
        "sex": {"kind": "category", "categories": ["F", "M"]},
        "note": {"kind": "text", "buckets": 8},
    },
}


def trained(tmp_path, data, model=None, **keys):
    """A run, and what its trainer said of each held-out record."""
    seen = []
    keep = lambda _config, trainer, _run: seen.append(trainer)  # noqa: E731
    result = shoal.run(CONFIG | keys, data=data, model=model, runs=tmp_path / "runs", on_start=keep)
    trainer = seen[0]
    return result, trainer.evaluation._predicted(trainer.model, trainer.personal)[0]


def classes(columns, names):
    return np.stack([columns[f"probability_{name}"] for name in names], 1)


def patients(path, rows=60, without=(), **changes):
    """A table of patients."""
    generator = np.random.default_rng(3)
    columns = {
        "hospital": [HOSPITALS[row % 3] for row in range(rows)],
        "age": generator.integers(0, 120, rows).tolist(),
        "sex": generator.choice(["F", "M"], rows).tolist(),
        "note": generator.choice(["fever and cough", "none", "broken leg"], rows).tolist(),
    }
    columns["died"] = ["yes" if age > 60 else "no" for age in columns["age"]]
    columns = {name: values for name, values in (columns | changes).items() if name not in without}
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def of_patients(tmp_path_factory):
    folder = tmp_path_factory.mktemp("patients")
    table = {"name": str(patients(folder / "patients.csv"))}
    config = CONFIG | {"data": table, "schema": SCHEMA, "clients.sampling": "all"}
    return folder, shoal.run(config, runs=folder / "runs")


@pytest.fixture
def finished(tmp_path):
    """A run of a module that was passed in Python."""
    return play(tmp_path, PRIVATE | {"rounds": 2}).run


# --- round trips ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_classification_is_predicted_as_it_was_evaluated(tmp_path):
    """More rows than are evaluated at once, and a network by its name."""
    data = shoal.from_arrays(X, (X.sum(1) > 0).astype(np.int64), client=OWNERS, test_fraction=0.5)
    result, expected = trained(tmp_path, data, "auto")
    model = shoal.load_model(result.run)
    found = model.predict(data)
    assert len(found) == len(data.test_y) > 250
    assert np.array_equal(classes(found.columns, model.classes), expected)
    assert found.columns["class"].tolist() == [model.classes[k] for k in expected.argmax(1)]
    assert (found.figures, found.trivial) == (result.figures, result.trivial)
    assert np.array_equal(classes(model.predict(data.test_x.numpy()).columns, model.classes), expected)
    assert model.task == data.task
    assert list(model.claims) == result.proven


def test_regression_is_predicted_in_its_own_units(tmp_path):
    y = (20 + 5 * X[:, 0]).clip(0, 50)
    data = shoal.from_arrays(X, y, client=OWNERS)
    result, expected = trained(tmp_path, data, "linear", **{"task.range": (0.0, 50.0)})
    found = shoal.load_model(result.run).predict(data)
    assert np.array_equal(found.columns["prediction"], expected)
    assert found.figures == result.figures


@pytest.mark.slow
def test_labels_are_predicted_each(tmp_path):
    y = (X[:, :3] > 0).astype(np.float32)
    data = shoal.from_arrays(X, y, client=OWNERS, classes=["a", "b", "c"])
    result, expected = trained(tmp_path, data, "linear")
    found = shoal.load_model(result.run).predict(data)
    assert np.array_equal(classes(found.columns, "abc"), expected)
    assert np.array_equal(found.columns["b"], (expected[:, 1] > 0.5).astype(int))
    assert found.figures == result.figures


@pytest.mark.slow
def test_the_next_token_comes_from_a_module_passed_again(tmp_path):
    sequence = (GENERATOR.integers(0, 6, (600, 1)) + np.arange(7)) % 6
    data = shoal.from_arrays(sequence[:, :-1], sequence[:, 1:], client=OWNERS, classes=list("abcdef"))
    result, _ = trained(tmp_path, data, Tokens())
    with pytest.raises(ModelError, match=r"of class support\.saved_net:Tokens, was passed in Python: pass it again"):
        shoal.load_model(result.run)
    model = shoal.load_model(result.run, model=Tokens())
    found = model.predict(data)
    assert found.figures == result.figures
    with torch.no_grad():
        scores = model.module(data.test_x)[:, -1].softmax(1)
    assert found.columns["token"].tolist() == [model.classes[k] for k in scores.argmax(1)]
    assert np.allclose(found.columns["probability"], scores.max(1).values)
    assert model.module.scores.weight is model.module.embedding.weight
    with pytest.raises(DataError, match="the model takes tokens"):
        model.predict(X[:, :1].repeat(6, 1))


def test_a_network_by_its_path_keeps_frozen_layers_and_buffers(tmp_path):
    data = shoal.from_arrays(X, (X[:, 0] > 0).astype(np.int64), client=OWNERS)
    result, expected = trained(tmp_path, data, "support.saved_net:Small")
    saved = load_file(result.run / "model.safetensors")
    assert {"fixed.weight", "norm.running_mean", "scores.weight"} <= saved.keys()
    model = shoal.load_model(result.run, trust_code=True)
    assert isinstance(model.module, Small)
    assert not model.module.training
    assert np.array_equal(classes(model.predict(data).columns, model.classes), expected)


def test_a_class_that_can_be_imported_need_not_be_passed_again(tmp_path):
    data = shoal.from_arrays(X, (X[:, 0] > 0).astype(np.int64), client=OWNERS)
    result, expected = trained(tmp_path, data, Small)
    found = shoal.load_model(result.run, trust_code=True).predict(data)
    assert np.array_equal(classes(found.columns, data.classes), expected)


@pytest.mark.slow
def test_public_features_are_computed_before_predictions(tmp_path):
    result = shoal.run(CONFIG | {"data": {"name": "digits", "features": "hog"}}, runs=tmp_path)
    found = shoal.load_model(result.run).predict(shoal.load("digits"))
    assert found.figures == result.figures


def test_own_figures_are_computed_where_targets_are_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_metric.py").write_text("def first(predictions, targets): return float(predictions[0, 0])\n")
    data = shoal.from_arrays(X, (X[:, 0] > 0).astype(np.int64), client=OWNERS)
    result, expected = trained(tmp_path, data, "linear", **{"task.metrics": ("own_metric:first",)})
    model = shoal.load_model(result.run, trust_code=True)
    assert model.predict(data).figures["first"] == expected[0, 0]
    assert model.predict(data.test_x).figures == {}
    found = shoal.load_model(result.run).predict(data)
    assert (found.figures, len(found)) == ({}, len(data.test_y))
    assert found.notes[-1].startswith("no figures: 'own_metric:first' would be imported; --trust-code")


def ratings():
    x = {"user": GENERATOR.integers(0, 5, 600), "item": GENERATOR.standard_normal((600, 2, 2)).astype(np.float32)}
    return shoal.from_arrays(x, (x["item"].sum((1, 2)) > 0).astype(np.int64), client=OWNERS)


@pytest.mark.slow
def test_several_inputs_by_name(tmp_path):
    data = ratings()
    result, expected = trained(tmp_path, data, Rating)
    model = shoal.load_model(result.run, trust_code=True)
    assert model.bundle.input_shape == {"user": (), "item": (2, 2)}
    assert np.array_equal(classes(model.predict(data).columns, model.classes), expected)
    arrays = {name: part.numpy() for name, part in data.test_x.items()}
    assert np.array_equal(classes(model.predict(arrays).columns, model.classes), expected)
    np.savez(tmp_path / "x.npz", y=data.test_y.numpy(), **{f"x.{name}": part for name, part in arrays.items()})
    assert model.predict(tmp_path / "x.npz").figures == result.figures
    with pytest.raises(DataError, match="the arrays: lacks user; the model takes user, item"):
        model.predict({"item": arrays["item"]})
    with pytest.raises(DataError, match="different numbers of rows"):
        model.predict(arrays | {"user": arrays["user"][:3]})
    for changes in ({"input_type": {"user": "int64"}}, {"input_shape": {}, "input_type": {}}):
        edit(result.run, **changes)
        assert "must name the same inputs" in refused(result.run)


def test_a_series_is_no_picture(tmp_path):
    x = GENERATOR.standard_normal((600, 5, 3)).astype(np.float32)
    data = shoal.from_arrays(x, (x[:, 0, 0] > 0).astype(np.int64), client=OWNERS, pictures=False)
    result, expected = trained(tmp_path, data, "linear")
    model = shoal.load_model(result.run)
    assert np.array_equal(classes(model.predict(data.test_x.numpy()).columns, model.classes), expected)


def test_pixels_are_scaled_as_in_training(tmp_path):
    x = GENERATOR.integers(0, 256, (600, 8, 8)).astype(np.uint8)
    data = shoal.from_arrays(x, (x[:, 0, 0] > 100).astype(np.int64), client=OWNERS)
    result, expected = trained(tmp_path, data, "linear")
    kept = (255 * data.test_x[:, 0]).round().to(torch.uint8).numpy()
    found = shoal.load_model(result.run).predict(kept)
    assert np.array_equal(classes(found.columns, data.classes), expected)


@pytest.mark.slow
def test_personal_layers_are_those_that_nobody_has_trained(tmp_path):
    data = shoal.from_arrays(X, (X[:, 0] > 0).astype(np.int64), client=OWNERS)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    result, _ = trained(tmp_path, data, net, algorithm="fedper", **{"local.personal": ("1",)})
    model = shoal.load_model(result.run, model=net)
    assert torch.equal(model.module[1].weight, net[1].weight)
    assert not torch.equal(model.module[0].weight, net[0].weight)
    assert "personal layers (1) hold their initial values" in model.predict(data).notes[0]


@pytest.mark.slow
def test_a_client_predicts_with_its_own_personal_layers(tmp_path):
    """As the run itself did, where the record's owner is the client."""
    data = shoal.from_arrays(X, (X[:, 0] > 0).astype(np.int64), client=OWNERS)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    keys = {"algorithm": "fedper", "local.personal": ("1",), "clients.sampling": "all"}
    result, expected = trained(tmp_path, data, net, **keys)
    own = data.test_owners == 10
    model = shoal.load_model(result.run, model=net, client="10")
    found = model.predict(data.test_x[own].numpy())
    assert np.allclose(classes(found.columns, data.classes), expected[own], atol=1e-6)
    assert "those of client '10'" in found.notes[0]
    with pytest.raises(RunError, match="has no layers of client '99', who may never have trained; "):
        shoal.load_model(result.run, model=net, client="99")
    save_file({"10/1.weight": torch.zeros(3, 4)}, result.run / "personal.safetensors")
    with pytest.raises(RunError, match=r"of another model: '1\.weight' does not fit"):
        shoal.load_model(result.run, model=net, client="10")
    plain, _ = trained(tmp_path, data, "linear")
    with pytest.raises(RunError, match=r"client '10': .* has no personal\.safetensors; only a simulation"):
        shoal.load_model(plain.run, client="10")


# --- tables ---------------------------------------------------------------------------------------------


def test_a_table_is_encoded_by_its_schema_whatever_its_order(of_patients, tmp_path):
    folder, result = of_patients
    model = shoal.load_model(result.run)
    assert model.schema == Schema.of(SCHEMA)
    whole = model.predict(folder / "patients.csv")
    assert whole.figures.keys() == result.figures.keys()
    columns = [line.split(",") for line in (folder / "patients.csv").read_text().splitlines()]
    (tmp_path / "turned.csv").write_text("\n".join(",".join(row[:-1][::-1]) for row in columns))
    turned = model.predict(tmp_path / "turned.csv")
    assert turned.figures == {}
    assert all(np.array_equal(turned.columns[name], column) for name, column in whole.columns.items())
    in_memory = {name: values for name, *values in zip(*columns, strict=True) if name != "hospital"}
    assert model.predict(in_memory).figures == whole.figures


@pytest.mark.slow
def test_what_a_table_lacks_is_named_at_once_and_what_is_odd_is_counted(of_patients, tmp_path):
    model = shoal.load_model(of_patients[1].run)
    with pytest.raises(DataError, match="there are no columns 'age', 'sex'") as problem:
        model.predict(patients(tmp_path / "new.csv", without=("age", "sex", "died")))
    assert "\n" not in str(problem.value)
    odd = patients(tmp_path / "odd.csv", rows=4, age=[-5, 130, "", 4], sex=["F", "X", "X", "M"])
    notes = " / ".join(model.predict(odd).notes)
    assert "clipped to their public ranges: age 2" in notes
    assert "in no public category, taken as none of them: sex 2" in notes
    assert "missing values filled by public constants: age 1" in notes


def test_labels_that_cannot_be_read_cost_the_figures_alone(of_patients, tmp_path):
    model = shoal.load_model(of_patients[1].run)
    found = model.predict(patients(tmp_path / "new.csv", rows=3, died=["yes", "maybe", "no"]))
    assert len(found) == 3
    assert found.figures == {}
    assert "no figures" in found.notes[-1]
    assert "'maybe', which is not a class" in found.notes[-1]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_larger_than_memory_is_predicted_piece_by_piece(of_patients, tmp_path, monkeypatch, suffix):
    """In pieces of four rows (of a .csv: 512 bytes) predictions, figures and notes are those of the whole."""
    model = shoal.load_model(of_patients[1].run)
    tables = {
        "good": patients(tmp_path / "good.csv", rows=30, age=[*range(-2, 27), ""]),
        "bad": patients(tmp_path / "bad.csv", rows=6, died=["yes", "no", "no", "no", "no", "maybe"]),
        "unlabelled": patients(tmp_path / "unlabelled.csv", without=("died",)),
    }
    if suffix == ".parquet":
        for name, path in tables.items():
            tables[name] = path.with_suffix(suffix)
            parquet.write_table(csv.read_csv(path), tables[name])
    whole = {name: model.predict(path) for name, path in tables.items()}
    monkeypatch.setattr(large_tables, "IN_MEMORY", 0)
    monkeypatch.setattr(large_tables, "PIECE", 4 * large_tables._row_bytes(model.schema))
    monkeypatch.setattr(table_files, "BLOCK", 32)
    monkeypatch.setattr(saved_model, "encode_by_schema", None)
    for name, path in tables.items():
        found = model.predict(path)
        assert found.notes == whole[name].notes
        assert found.figures == pytest.approx(whole[name].figures, abs=1e-6)
        for column, values in whole[name].columns.items():
            np.testing.assert_allclose(found.columns[column], values, atol=1e-6) if values.dtype.kind == "f" else (
                np.testing.assert_array_equal(found.columns[column], values)
            )
    assert "clipped to their public ranges: age 2" in " / ".join(whole["good"].notes)
    assert whole["bad"].figures == {}


def test_a_table_without_a_schema_is_encoded_as_it_was(tmp_path):
    path = patients(tmp_path / "patients.csv", note=["a=b", "c", "c"] * 20)
    keys = {"data": {"name": str(path), "label": "died", "client_column": "hospital"}, "clients.sampling": "all"}
    result = shoal.run(CONFIG | keys, runs=tmp_path / "runs")
    model = shoal.load_model(result.run)
    data = shoal.load(path, label="died", client="hospital")
    new = patients(tmp_path / "new.csv", note=["a=b", "c", "c"] * 20)
    whole, held_out = model.predict(new), model.predict(data)
    assert held_out.figures == result.figures
    truth = [line.split(",")[-1] for line in new.read_text().splitlines()[1:]]
    assert whole.figures["accuracy"] == float((whole.columns["class"] == np.array(truth)).mean())
    encoded = {tuple(row): k for k, row in enumerate(model.prepared(new).x.tolist())}
    places = [encoded[tuple(row)] for row in data.test_x.tolist()]
    assert np.allclose(whole.columns["probability_yes"][places], held_out.columns["probability_yes"])
    unknown = model.predict(patients(tmp_path / "odd.csv", rows=3, sex=["F", "X", "X"], without=("died",)))
    assert "sex 2" in " ".join(unknown.notes)
    with pytest.raises(DataError, match="no columns 'age', 'note'"):
        model.predict(patients(tmp_path / "less.csv", without=("age", "note")))
    assert json.loads((result.run / "model.json").read_text())["release"].startswith("not for release")


def test_arrays_want_arrays(tmp_path, finished):
    model = shoal.load_model(finished, model=network())
    with pytest.raises(DataError, match=r"trained on arrays of shape \(4,\), not on a table"):
        model.predict(patients(tmp_path / "new.csv"))
    with pytest.raises(DataError, match=r"records have shape \(3,\), the model takes \(4,\)"):
        model.predict(X[:, :3])
    with pytest.raises(DataError, match="there is no file"):
        model.predict(tmp_path / "absent.npz")
    with pytest.raises(DataError, match=r"records are read from \.csv"):
        model.predict("digits")
    np.save(tmp_path / "x.npy", X)
    np.savez(tmp_path / "x.npz", x=X, y=(X.sum(1) > 0).astype(int))
    plain, known = model.predict(tmp_path / "x.npy"), model.predict(tmp_path / "x.npz")
    assert np.array_equal(plain.columns["probability_1"], known.columns["probability_1"])
    truth = np.where(X.sum(1) > 0, "1", "0")
    assert known.figures["accuracy"] == float((known.columns["class"] == truth).mean())


def test_labels_are_taken_by_name_before_they_are_taken_by_place(tmp_path):
    data = shoal.from_arrays(X, (X[:, 0] > 0) + 1, client=OWNERS)
    result, _ = trained(tmp_path, data, "linear")
    model = shoal.load_model(result.run)
    assert model.classes == ("1", "2")
    np.savez(tmp_path / "x.npz", x=data.test_x.numpy(), y=data.test_y.numpy() + 1)
    assert model.predict(tmp_path / "x.npz").figures == result.figures


def test_other_classes_are_refused(tmp_path, finished):
    model = shoal.load_model(finished, model=network())
    data = shoal.from_arrays(X, np.where(X[:, 0] > 0, "ill", "well"), client=OWNERS)
    with pytest.raises(DataError, match=r"has 2 classes \(ill, well\), the model 2 \(0, 1\)"):
        model.predict(data)


def test_a_model_that_has_diverged_says_so(finished):
    diverged = network()
    model = shoal.load_model(finished, model=diverged)
    with torch.no_grad():
        model.module.weight.fill_(torch.nan)
    assert "12 outputs are not finite" in model.predict(X[:12]).notes[-1]


# --- what a run writes ----------------------------------------------------------------------------------


def test_the_description_says_all_that_is_needed_and_nothing_without_noise(finished):
    found = json.loads((finished / "model.json").read_text())
    assert found["model"] == "torch.nn.modules.linear:Linear"
    assert found["passed_in_python"]
    assert found["task"] == {"kind": "classification", "classes": ["0", "1"], "class_weights": []}
    assert {"adjacency", "observer", "delta", "unit", "epsilon"} <= found["claims"][0].keys()
    assert found["versions"].keys() == {"shoal", "torch", "python"}
    assert found["versions"]["torch"] == torch.__version__
    assert not {"accuracy", "loss", "figures", "notes", "seed"} & found.keys()


def test_a_run_that_was_stopped_has_no_model_yet(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(RunError, match=r"has no model\.json: the run has not ended"):
        shoal.load_model(run)


def test_the_two_files_alone_are_enough(tmp_path, finished):
    for name in ("model.json", "model.safetensors"):
        shutil.copy(finished / name, tmp_path / name)
    expected = shoal.load_model(finished, model=network()).predict(X)
    found = shoal.load_model(tmp_path, model=network()).predict(X)
    assert np.array_equal(found.columns["probability_0"], expected.columns["probability_0"])


@pytest.mark.parametrize("unconfirmed", [(), ("age",)])
def test_a_range_read_from_the_data_stays_one_where_the_table_was_loaded_in_python(tmp_path, unconfirmed):
    path, schema = patients(tmp_path / "patients.csv"), Schema.of(SCHEMA | {"unconfirmed": unconfirmed})
    given = PRIVATE | {"rounds": 1, "clients.sampling": "all"}
    result = shoal.run(given, data=shoal.load(path, schema=schema), runs=tmp_path / "runs")
    assert Schema.of(shoal.load_model(result.run).bundle.schema).digest == schema.digest, "new rows are encoded alike"
    said = {COLUMNS in (claim["because"] or "") for claim in result.proven if claim["epsilon"] is not None}
    label = json.loads((result.run / "model.json").read_text())["release"]
    assert (said, label.startswith("not for release: ranges")) == ({bool(unconfirmed)}, bool(unconfirmed))


def test_new_rows_are_scaled_by_the_ranges_that_the_table_was_loaded_with(tmp_path):
    path = patients(tmp_path / "patients.csv", without=("sex", "note", "hospital"))
    data = shoal.load(path, label="died", ranges={"age": (0, 120)})
    given = FEDAVG | {"rounds": 1, "clients.sampling": "all", "data.label": "died"}
    model = shoal.load_model(shoal.run(given, data=data, runs=tmp_path / "runs").run)
    assert torch.equal(model.prepared(path).x.max(), torch.cat([data.train_x, data.test_x]).max())


@pytest.mark.slow
@pytest.mark.parametrize(("unconfirmed", "kept"), [((), 0), (("age",), 3)])
def test_nothing_is_for_release_that_was_made_with_a_range_read_from_the_data(tmp_path, unconfirmed, kept):
    table = {"name": str(patients(tmp_path / "patients.csv"))}
    given = PRIVATE | {"rounds": 1, "random": "secure", "clients.sampling": "all", "data": table}
    result = shoal.run(given | {"schema": SCHEMA | {"unconfirmed": unconfirmed}}, runs=tmp_path / "runs")
    run = result.run
    with safe_open(run / "model.safetensors", "pt") as file:
        labels = [file.metadata()["release"]]
    labels.append(json.loads((run / "model.json").read_text())["release"])
    labels.append((run / "config.toml").read_text().partition("\n")[0].removeprefix("# release: "))
    assert [label.startswith("not for release: ranges") for label in labels].count(True) == kept
    proven = [claim["because"] or "" for claim in result.proven if claim["epsilon"] is not None]
    assert proven
    assert {COLUMNS in because for because in proven} == {bool(unconfirmed)}
    assert (COLUMNS in certificate(run)["assumptions"]) == bool(unconfirmed)


# --- hostile files --------------------------------------------------------------------------------------


def refused(run, model=None):
    """The one line that says why a model cannot be loaded."""
    with pytest.raises(ShoalError) as problem:
        load_model(run, model=model)
    assert "\n" not in str(problem.value)
    return str(problem.value)


def edit(run, **changes):
    path = run / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def sealed(run, tensors):
    """Other weights, whose digest the description states."""
    save_file(tensors, run / "model.safetensors")
    edit(run, weights=hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest())


def test_weights_that_were_cut_off_changed_or_lost_are_refused(finished):
    path = finished / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    assert "was changed or cut off" in refused(finished, network())
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "is not the file that model.json describes" in refused(finished, network())
    path.unlink()
    assert "has no model.safetensors" in refused(finished, network())


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"\xff" * 64, b"\x08" + b"\0" * 7 + b'{"a":1}}'])
def test_what_is_no_safetensors_file_is_refused_even_if_its_digest_is_right(finished, content):
    (finished / "model.safetensors").write_bytes(content)
    edit(finished, weights=hashlib.sha256(content).hexdigest())
    assert "is damaged" in refused(finished, network())


def test_weights_of_other_names_or_shapes_are_refused(finished):
    sealed(finished, {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)})
    assert "'bias' is of shape (3,) in model.safetensors, of shape (2,) in Linear" in refused(finished, network())
    sealed(finished, {"weight": torch.zeros(2, 4)})
    assert "'bias' is missing in model.safetensors" in refused(finished, network())
    sealed(finished, {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)})
    found = refused(finished, nn.Linear(4, 2, bias=False))
    assert "'bias' is of shape (2,) in model.safetensors, missing in Linear" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "format is 2, this version reads 1"),
        ({"input_shape": []}, "input_shape cannot be []"),
        ({"input_shape": [-4]}, "input_shape cannot be [-4]"),
        ({"input_shape": [10**6, 10**6]}, "input_shape cannot be"),
        ({"input_shape": "four"}, "input_shape cannot be 'four'"),
        ({"input_type": "float64"}, "input_type cannot be 'float64'"),
        ({"model": 3}, "model cannot be 3"),
        ({"model": "no-such", "passed_in_python": False}, "there is no model 'no-such'"),
        ({"model": "os:abort", "passed_in_python": False}, "names code that would run here, 'os:abort'"),
        ({"model": "linear", "passed_in_python": False, "input_shape": [1 << 30]}, "another model"),
        ({"task": {}}, "task.kind"),
        ({"task": {"kind": "no-such"}}, "no-such"),
        ({"task": {"kind": "classification"}}, "task lacks classes"),
        ({"task": {"kind": "classification", "classes": ["a"], "colour": 1}}, "no key 'task.colour'"),
        ({"task": {"kind": "classification", "classes": 5}}, "task.classes cannot be 5"),
        ({"task": {"kind": "regression", "low": "x", "high": 1}}, "task.low cannot be 'x'"),
        ({"schema": {"columns": {}}}, "schema.columns has no column"),
        ({"schema": [1]}, "schema cannot be"),
        ({"claims": "none"}, "claims cannot be 'none'"),
        ({"weights": None}, "weights cannot be None"),
    ],
)  # fmt: skip
def test_an_edited_description_is_refused_in_one_line(finished, changes, words):
    edit(finished, **changes)
    assert words in refused(finished, None if "passed_in_python" in changes else network())


STRANGE = """
raise SystemExit("a stranger's code runs")
"""


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "stranger:Net", "passed_in_python": False},
        {"task": {"kind": "stranger:Task", "classes": ["0", "1"]}},
        {"task": {"kind": "classification", "classes": ["0", "1"], "own_loss": "stranger:loss"}},
        {"task": {"kind": "classification", "classes": ["0", "1"], "own_metrics": {"own": "stranger:figure"}}},
    ],
)  # fmt: skip
def test_code_that_a_description_names_runs_only_for_those_who_trust_it(finished, changes, monkeypatch):
    monkeypatch.chdir(finished)
    (finished / "stranger.py").write_text(STRANGE)
    edit(finished, **changes)
    model, data = None if "model" in changes else network(), shoal.from_arrays(X, (X[:, 0] > 0).astype(np.int64))
    with contextlib.suppress(RunError):
        assert load_model(finished, model=model).predict(data).figures == {}
    with pytest.raises(SystemExit, match="a stranger's code runs"):
        load_model(finished, model=model, trust_code=True).predict(data)


@pytest.mark.parametrize(
    ("model", "words"),
    [("no_such:Class", "no module 'no_such'"), ("os:getcwd", "gives a str, it must give a torch.nn.Module")],
)
def test_code_that_is_trusted_but_gives_no_network_is_refused(finished, model, words):
    edit(finished, model=model, passed_in_python=False)
    with pytest.raises(ShoalError, match=words):
        load_model(finished, trust_code=True)


ODD = (None, -1, 0, True, 1e300, "x", "../x", "os:abort()", [], ["x"], [[1]], [1, 2], {}, {"a": {}}, {"kind": "own"})


@pytest.mark.slow
def test_whatever_stands_in_a_description_the_worst_is_one_line(finished):
    whole, said = json.loads((finished / "model.json").read_text()), []
    for key in whole:
        for value in ODD:
            edit(finished, **(whole | {key: value}))
            try:
                load_model(finished, model=network()).predict(X[:3])
            except ShoalError as error:
                said.append(str(error))
    assert len(said) > len(whole)
    assert [words for words in said if "\n" in words] == []


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"format": 1}', "[" * 100_000, "\udcff", '{"format": NaN}'])
def test_what_is_no_description_is_refused(finished, text):
    (finished / "model.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "model.json is damaged" in refused(finished, network())


def test_a_module_that_is_passed_again_is_copied(tmp_path):
    run, given = play(tmp_path, FEDAVG | {"rounds": 1}).run, network()
    before = given.weight.clone()
    model = shoal.load_model(run, model=given)
    assert torch.equal(given.weight, before)
    assert not torch.equal(model.module.weight, before)
