"""Whose privacy a claim is about: clients that exist, clients that were made up, and records of unequal clients."""

import json
import shutil
import sys

import numpy as np
import pytest

import shoal
from shoal.accounting.claims import ARRAYS, DEALT
from shoal.cli.main import main
from shoal.config import configure
from shoal.prepare import prepare
from shoal.report.certificate import certificate
from shoal.report.run_page import write_report
from shoal.report.run_reader import read_run

SIZES = (8, 30, 90, 400)


def rows(count, seed=0):
    x = np.random.default_rng(seed).standard_normal((count, 3)).astype(np.float32)
    return x, (x.sum(1) > 0).astype(np.int64)


def table(path, owner=None):
    """60 rows; with `owner` a column of that name says whose each is."""
    x, y = rows(60)
    head = "a,b,c,label" + (f",{owner}" if owner else "")
    lines = [
        ",".join([*(f"{value:.4f}" for value in row), str(label), *([f"h{k % 6}"] if owner else [])])
        for k, (row, label) in enumerate(zip(x, y, strict=True))
    ]
    path.write_text("\n".join([head, *lines]) + "\n")
    return str(path)


def told(monkeypatch, capsys, *words):
    """What the command line says: (exit code, standard output, standard error)."""
    monkeypatch.setattr(sys, "argv", ["shoal", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return ended.value.code or 0, " ".join(said.out.split()), " ".join(said.err.split())


CLIENT_LEVEL = {"algorithm": "trusted-curator", "rounds": 1, "clients.sampling": "all", "engine.threads": 1}
RECORD_LEVEL = {"algorithm": "dp-sgd", "rounds": 2, "records.batch": 10, "engine.threads": 1, "model": "linear"}


def proven(result, unit):
    return [claim for claim in result.proven if claim["unit"] == unit]


# --- a table that names no owners


def test_a_table_without_owners_is_one_client_and_proves_nothing_of_clients(tmp_path):
    result = shoal.run(RECORD_LEVEL, data=table(tmp_path / "mine.csv"), runs=tmp_path / "runs")
    facts = json.loads((result.run / "result.json").read_text())
    assert facts["clients"] == 1
    assert not facts["simulated_clients"]
    assert all("there is only one client" in claim["because"] for claim in proven(result, "client"))
    assert all(claim["epsilon"] > 0 for claim in proven(result, "record"))
    assert "simulated" not in (result.run / "report.html").read_text()


@pytest.mark.parametrize("name", ["digits", "heart", "clinic:2024"])
def test_no_clients_are_made_up_for_data_that_bear_the_name_of_a_known_set(name):
    given = {"algorithm": "dp-sgd", "model": "linear", "rounds": 1, "data.name": name}
    config, trainer = prepare(configure(given), shoal.from_arrays(*rows(60), name=name), None)
    trainer.close()
    assert config.data.clients == trainer.setting.clients == 1


def test_arrays_without_owners_are_one_client_too(tmp_path):
    data = shoal.from_arrays(*rows(60))
    result = shoal.run(RECORD_LEVEL, data=data, runs=tmp_path)
    assert json.loads((result.run / "result.json").read_text())["clients"] == 1


@pytest.mark.parametrize(
    "words",
    [
        ["-c", "algorithm=fedavg"],
        ["-c", "algorithm=trusted-curator", "-c", "clients.sampling=all", "-c", "budget.epsilon=3"],
        ["-c", "algorithm=dp-sgd", "-c", "data.clients=50"],
    ],
)
def test_who_wants_clients_of_such_a_table_is_told_in_one_line_how(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    code, _, err = told(monkeypatch, capsys, "run", "-c", f"data.name={table(tmp_path / 'mine.csv')}", *words)
    assert code == 2
    assert err.count("shoal:") == 1
    for key in ("data.client_column", "data.partition=iid", "algorithm=dp-sgd"):
        assert key in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fix", [["data.client_column=hospital"], ["data.partition=iid", "data.clients=6"]])
def test_either_way_out_leads_to_a_run(tmp_path, fix):
    name = table(tmp_path / "mine.csv", "hospital")
    words = [
        f"data.name={name}",
        "rounds=1",
        "model=linear",
        "engine.threads=1",
        "baseline=false",
        "per_update.count_noise_multiplier=3.0",
        *fix,
    ]
    result = shoal.run(overrides=words, runs=tmp_path / "runs")
    assert proven(result, "client")[0]["epsilon"] > 0
    assert proven(result, "client")[0]["simulated"] == ("data.partition=iid" in fix)


# --- clients that were made up


def surfaces(run, monkeypatch, capsys):
    """Every place that tells of a run's claims."""
    runs = ["--runs", str(run.parent)]
    ledger = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()][-1]
    listed = json.loads(told(monkeypatch, capsys, "runs", "list", "--json", *runs)[1])
    return {
        "page": (run / "report.html").read_text(),
        "result.json": json.dumps(json.loads((run / "result.json").read_text())["proven"]),
        "metrics.jsonl": (run / "metrics.jsonl").read_text(),
        "ledger": json.dumps(ledger),
        "runs list": told(monkeypatch, capsys, "runs", "list", *runs)[1],
        "runs list --json": json.dumps(listed["runs"][0]["proven"]),
        "runs show": told(monkeypatch, capsys, "runs", "show", run.name, *runs)[1],
        "runs show --json": json.dumps(
            json.loads(told(monkeypatch, capsys, "runs", "show", run.name, "--json", *runs)[1])["proven"]
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "own"])
def test_every_output_says_that_clients_are_simulated(tmp_path, monkeypatch, capsys, name):
    data = "digits" if name == "digits" else table(tmp_path / "mine.csv")
    words = ["data.partition=iid", "data.clients=6", "model=linear"]
    result = shoal.run(CLIENT_LEVEL, data=data, overrides=words, runs=tmp_path / "runs")
    for claim in result.proven:
        assert claim["simulated"] == (claim["unit"] == "client")
    for where, said in surfaces(result.run, monkeypatch, capsys).items():
        assert "simulated" in said, where
    write_report(result.run)
    assert "for a simulated client (zero-out); observer:" in (result.run / "report.html").read_text()


@pytest.mark.slow
def test_the_command_line_says_so_as_well(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [f"{key}={value}" for key, value in CLIENT_LEVEL.items()] + ["data.clients=6", "model=linear"]
    changes = [part for word in words for part in ("-c", word)]
    code, out, _ = told(monkeypatch, capsys, "run", *changes)
    assert code == 0
    assert "6 simulated clients" in out
    assert "a simulated client" in out
    code, out, _ = told(monkeypatch, capsys, "run", *changes, "--json")
    assert json.loads(out)["proven"][0]["simulated"] is True


@pytest.mark.slow
def test_clients_that_exist_are_not_called_simulated(tmp_path, monkeypatch, capsys):
    data = shoal.from_clients([rows(20, seed) for seed in range(6)])
    result = shoal.run(CLIENT_LEVEL, data=data, overrides=["model=linear"], runs=tmp_path / "runs")
    for where, said in surfaces(result.run, monkeypatch, capsys).items():
        assert "a simulated client" not in said, where
        assert '"simulated": true' not in said, where


# --- records of unequal clients


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    data = shoal.from_clients(
        [rows(size, size) for size in SIZES], names=[f"h{size}" for size in SIZES], test=rows(50)
    )
    return shoal.run(RECORD_LEVEL, data=data, runs=tmp_path_factory.mktemp("unequal"))


@pytest.mark.slow
def test_the_page_shows_epsilon_by_client_the_worst_first(unequal):
    facts = json.loads((unequal.run / "result.json").read_text())["by_client"]
    assert facts["release"].startswith("not for release unless clients' sizes are public")
    found = [(row["client"], row["records"]) for row in facts["clients"]]
    assert sorted(found) == sorted((f"h{size}", size) for size in SIZES)
    spent = [row["epsilon"] for row in facts["clients"]]
    assert spent == sorted(spent, reverse=True)
    assert spent[0] == pytest.approx(proven(unequal, "record")[0]["epsilon"], rel=1e-6)
    assert spent[-1] < spent[0] / 2
    assert facts["more"] == 0
    page = (unequal.run / "report.html").read_text()
    shown = page.split('id="by-client"')[1].partition("</section>")[0]
    assert [name for name in (f"h{size}" for size in SIZES) if name not in shown] == []
    assert "Not for release unless clients' sizes are public" in shown.replace("&#39;", "'")


@pytest.mark.slow
def test_epsilon_by_client_is_shown_only_as_the_ledger_has_it(unequal, tmp_path):
    run = shutil.copytree(unequal.run, tmp_path / unequal.run.name)
    result = json.loads((run / "result.json").read_text())
    result["by_client"]["clients"][0]["epsilon"] = 0.0123
    (run / "result.json").write_text(json.dumps(result))
    page = write_report(run).read_text()
    assert "disagree on the clients" in page
    assert 'id="by-client"' not in page
    assert all(claim["epsilon"] is None for claim in read_run(run).proven)


@pytest.mark.slow
def test_of_many_clients_the_worst_twenty_are_shown(tmp_path):
    data = shoal.from_clients([rows(size, size) for size in range(11, 11 + 4 * 23, 4)], test=rows(50))
    result = shoal.run(RECORD_LEVEL | {"rounds": 1}, data=data, runs=tmp_path)
    facts = json.loads((result.run / "result.json").read_text())["by_client"]
    assert (len(facts["clients"]), facts["more"]) == (20, 3)
    assert "And 3 more" in (result.run / "report.html").read_text()


def test_clients_are_shown_where_rdp_does_not_understand_their_sampling(tmp_path):
    data = shoal.from_clients([rows(size, size) for size in (90, 30)], test=rows(50))
    changes = {"rounds": 1, "records.sampling": "with-replacement"}
    result = shoal.run(RECORD_LEVEL | changes, data=data, runs=tmp_path)
    shown = json.loads((result.run / "result.json").read_text())["by_client"]["clients"]
    assert [row["records"] for row in shown] == [30, 90]
    assert shown[0]["epsilon"] == pytest.approx(proven(result, "record")[0]["epsilon"], rel=1e-6)


@pytest.mark.parametrize(
    "changes", [{"records.rate": 0.1, "records.nominal_records": 90}, {"algorithm": "trusted-curator"}]
)
def test_where_every_record_costs_the_same_nothing_is_shown_by_client(tmp_path, changes):
    data = shoal.from_clients([rows(size, size) for size in SIZES], test=rows(50))
    given = {key: value for key, value in RECORD_LEVEL.items() if key != "records.batch"}
    result = shoal.run(given | {"clients.sampling": "all"} | changes, data=data, runs=tmp_path)
    assert "by_client" not in json.loads((result.run / "result.json").read_text())
    assert 'id="by-client"' not in (result.run / "report.html").read_text()


def test_claims_on_arrays_say_that_they_were_not_made_by_what_these_data_taught(tmp_path):
    """A table's flags are lost where its arrays are passed on, and a mean of private columns leaves no trace."""
    loaded = shoal.load(table(tmp_path / "mine.csv"), classes=["0", "1"])
    again = shoal.from_arrays(loaded.train_x, loaded.train_y, classes=["0", "1"])
    for data, said in ((loaded, False), (again, True)):
        result = shoal.run(RECORD_LEVEL, data=data, runs=tmp_path / "runs")
        (claim,) = {each["because"] for each in proven(result, "record")}
        assert (ARRAYS in claim) == said
        assert (ARRAYS in certificate(result.run)["assumptions"]) == said


@pytest.mark.parametrize(("partition", "said"), [("iid", False), ("shards", True), ("dirichlet", True)])
def test_claims_on_records_that_were_dealt_by_label_say_so(partition, said, tmp_path):
    """One changed label moves other records to other clients: nearly every client then holds another one."""
    changes = {"data.partition": partition, "data.clients": 5}
    data = shoal.load(table(tmp_path / "mine.csv"), classes=["0", "1"])
    result = shoal.run(RECORD_LEVEL | changes, data=data, runs=tmp_path / "runs")
    (claim,) = {each["because"] for each in proven(result, "record")}
    assert (DEALT in claim) == said
    assert (DEALT in certificate(result.run)["assumptions"]) == said
