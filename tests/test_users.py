"""Patients with several visits: from a table with a user column to a capped run and its claim for users."""

import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

import shoal
from shoal.accounting import accountants
from shoal.accounting.events import Repeat, SampledUser
from shoal.accounting.privacy_ledger import Record
from shoal.config import configure, to_dict
from shoal.data import from_arrays
from shoal.data.partitions import ListedPartition
from shoal.data.schema_encoding import owners_in
from shoal.errors import ConfigError, DataError
from shoal.mechanisms.setting import Setting
from shoal.prepare import dataset_of, prepare
from shoal.report.certificate import _assumptions, certificate
from shoal.report.proof import proof_of
from shoal.training.budget import users_said

SCHEMA = {
    "label": "died",
    "classes": [0, 1],
    "client_column": "hospital",
    "user_column": "patient",
    "columns": {"age": {"kind": "number", "range": [0, 100], "missing": 50}},
}


def visits(path, sites=2, rows=240):
    """Patients of three hospitals with one to many visits each; every patient is at one hospital."""
    rng = np.random.default_rng(7)
    lines = ["age,died,hospital,patient"]
    for _ in range(rows):
        hospital = int(rng.integers(sites))
        patient = f"{hospital}-{min(int(rng.geometric(0.05)), 30)}"
        lines.append(f"{rng.integers(100)},{rng.integers(2)},h{hospital},{patient}")
    path.write_text("\n".join(lines) + "\n")
    return path


def given(path, **changes):
    found = {
        "algorithm": "fed-cdp-private",
        "model": "linear",
        "rounds": 2,
        "data.name": str(path),
        "schema": SCHEMA,
        "clients.cohort": 2,
        "records.rate": 0.1,
        "records.nominal_records": 100,
        "records.max_per_user": 3,
        "local.steps": 4,
        "budget.unit": "user",
        "engine.threads": 1,
        "engine.device": "cpu",
    }
    return found | {key.replace("__", "."): value for key, value in changes.items()}


def users_by_client(parts):
    return [np.bincount(parts.users[parts.records(client)].ravel()) for client in range(len(parts))]


@pytest.mark.slow
def test_a_run_uses_so_many_records_of_a_patient_and_claims_it(tmp_path):
    settings = given(visits(tmp_path / "visits.csv"))
    _, trainer = prepare(configure(settings), None, None)
    _, free = prepare(configure({key: each for key, each in settings.items() if "per_user" not in key}), None, None)
    assert max(map(max, users_by_client(trainer.cohort.partition))) == 3
    assert max(map(max, users_by_client(free.cohort.partition))) > 3
    result = shoal.run(settings, runs=tmp_path / "runs")
    claims = {(each["unit"], each["observer"]): each for each in result.proven}
    found = claims["user", "server"]
    alone = accountants.epsilon(Repeat(SampledUser(3, 0.1, 6.0), 8), 1e-5, adjacency="zero-out")
    assert found["epsilon"] == pytest.approx(alone.epsilon, rel=1e-3)
    assert found["adjacency"] == "zero-out"
    assert "at most 3 records of a user are used; " in found["because"]
    assert "no user is at two clients" in found["because"]
    assert len(claims) == 9
    words = (result.run / "report.html").read_text()
    assert "a user (zero-out)" in words


@pytest.mark.slow
def test_a_killed_run_claims_under_the_same_assumptions_as_one_that_ended(tmp_path):
    """Only the ledger is left: its first line says what claims for users rest on, and no certificate hides it."""
    settings = given(visits(tmp_path / "visits.csv"), data__public_ownership=True)
    result = shoal.run(settings, runs=tmp_path / "runs")
    ledger = result.run / "ledger.jsonl"
    ended = proof_of(result.run, None).proven
    lines = ledger.read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-1])["kind"] == "close"
    held = certificate(result.run)
    ledger.write_bytes(b"".join(lines[:-1]))  # as a kill before the last line leaves it
    assert by_pair(proof_of(result.run, None).proven) == by_pair(ended)
    said = [claim["because"] for claim in ended if claim["unit"] == "user"]
    assert all("no user is at two clients" in words for words in said)
    assert "no user is at two clients" in held["assumptions"]
    several = users_said(Setting(clients=2, rounds=1, user_columns=2, public_ownership=True))
    claims = [{**claim, "because": several} for claim in held["claims"]]
    assert "it is public whose each record is" in _assumptions(Record(ledger), claims, [])


def by_pair(claims):
    return {(each["unit"], each["observer"]): each for each in claims}


def test_without_a_cap_there_is_none_because(tmp_path):
    settings = given(visits(tmp_path / "visits.csv"))
    del settings["records.max_per_user"]
    result = shoal.run(settings, runs=tmp_path / "runs", no_guarantee=True)
    found = [each for each in result.proven if each["unit"] == "user"]
    assert {each["epsilon"] for each in found} == {None}
    assert all("set records.max_per_user" in each["because"] for each in found)


@pytest.mark.slow
def test_a_budget_for_users_sets_the_noise(tmp_path):
    settings = given(visits(tmp_path / "visits.csv"), budget__epsilon=2.0, budget__calibrate=True)
    config, trainer = prepare(configure(settings), None, None)
    noise = config.algorithm.per_step.multiplier(0, 2, 10)
    spent = accountants.epsilon(Repeat(SampledUser(3, 0.1, noise), 8), 1e-5, adjacency="zero-out").epsilon
    assert 1.95 < spent <= 2.0
    assert trainer.setting.user_columns == 1


def test_a_cap_needs_users(tmp_path):
    schema = {key: value for key, value in SCHEMA.items() if key != "user_column"}
    with pytest.raises(ConfigError, match=r"records\.max_per_user is 3, but records of data 'visits' name no users"):
        prepare(configure(given(visits(tmp_path / "visits.csv"), schema=schema)), None, None)


def test_a_user_column_is_no_input_and_survives_the_configuration(tmp_path):
    config = configure(given(visits(tmp_path / "visits.csv"), data__public_ownership=True))
    assert configure(to_dict(config)).schema == config.schema
    assert list(config.schema.inputs) == ["age"]
    columns = SCHEMA["columns"] | {"patient": {"kind": "category", "categories": ["a"]}}
    with pytest.raises(ConfigError, match=r"column 'patient' is schema.user_column, so it is no input"):
        configure(given(tmp_path, schema=SCHEMA | {"columns": columns}))


def test_rows_without_a_user_are_refused(tmp_path):
    path = tmp_path / "visits.csv"
    path.write_text("age,died,hospital,patient\n1,0,h,p\n2,1,h,\n3,0,h,q\n")
    with pytest.raises(DataError, match="user column 'patient': 1 of 3 values are missing, first in data row 2"):
        prepare(configure(given(path)), None, None)


def test_a_user_is_the_same_in_a_column_of_whole_numbers_and_in_one_of_floats(tmp_path):
    number = 12_345_678_901  # from 1e10 on Arrow writes a float with an exponent
    columns = {"age": [1.0] * 10, "died": [0, 1] * 5, "hospital": ["h"] * 10}
    columns |= {"sender": [number, 2] * 5, "receiver": pa.array([None, float(number)] * 5)}
    pq.write_table(pa.table(columns), tmp_path / "calls.parquet")
    settings = given(tmp_path / "calls.parquet", schema=SCHEMA | {"user_column": ["sender", "receiver"]})
    users = dataset_of(configure(settings), None).users
    assert len(np.unique(users[users >= 0])) == 2


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_users_whose_numbers_a_float_cannot_hold_are_refused(tmp_path, suffix):
    """pandas turns a column of whole numbers with gaps into floats, which join the neighbours of 2**60."""
    columns = {"age": [1.0] * 10, "died": [0, 1] * 5, "hospital": ["h"] * 10}
    columns |= {"sender": [2**60, 2] * 5, "receiver": pa.array([None, 2**60 + 1] * 5)}
    path = tmp_path / f"calls.{suffix}"
    settings = given(path, schema=SCHEMA | {"user_column": ["sender", "receiver"]})

    def users(table):
        pq.write_table(table, path) if suffix == "parquet" else arrow_csv.write_csv(table, path)
        return dataset_of(configure(settings), None).users

    table = pa.table(columns)
    assert len(np.unique(users(table)[users(table) >= 0])) == 3
    with pytest.raises(DataError, match=r"user column 'receiver': 1.152921504606847e\+18 was stored as a float"):
        users(table.set_column(4, "receiver", table["receiver"].cast("float64", safe=False)))


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        (pa.array([123_456_789.0, 2.0], "float32"), "123456792.0 was stored as a float"),
        (pa.array([2049.0, 2.0], "float16"), "2048.0 was stored as a float"),
        (pa.array(["1.15292E+18", "2"]), r"1.15292E\+18 was stored as a float"),
        (pa.array([Decimal("12345678901234567890.00"), Decimal(2)]), ["12345678901234567890", "2"]),
        (pa.array([Decimal(0), Decimal(2)], pa.decimal128(38, 10)), ["0", "2"]),
        (pa.array([2.0**53 - 1, 2.0]), ["9007199254740991", "2"]),
        (pa.array([2.0**24 - 1, 2.0], "float32"), ["16777215", "2"]),
    ],
    ids=["float32", "float16", "spreadsheet", "decimal", "long decimal", "exact float64", "exact float32"],
)
def test_an_owners_number_is_refused_only_where_it_lacks_digits(numbers, found):
    schema, table = configure(given("t.csv")).schema, pa.table({"hospital": numbers})
    if isinstance(found, str):
        with pytest.raises(DataError, match=f"client column 'hospital': {found}"):
            owners_in(schema, table, "t")
    else:
        assert owners_in(schema, table, "t").tolist() == found


def of_users(*users, most):
    """The places that one client keeps of records with these users."""
    width = max(map(len, users))
    table = np.array([[*own, *[-1] * (width - len(own))] for own in users])
    parts = ListedPartition(np.arange(len(users), dtype=np.int32), np.array([0, len(users)]), users=table)
    return parts.capped(most).indices.tolist()


def test_records_with_the_fewest_users_are_kept_first():
    assert of_users([0], [0], [0], [1], most=2) == [0, 1, 3]
    assert of_users([0, 1], [0], [1], most=1) == [1, 2]
    assert of_users([0, 1], [0, 2], [2], most=1) == [0, 2]
    assert of_users([0, 1, 2], [2, 3], [3], [0], most=2) == [0, 1, 2, 3]


def test_no_user_keeps_more_than_the_cap_at_any_client():
    rng = np.random.default_rng(3)
    users = rng.integers(12, size=(300, 3))
    dataset = from_arrays(rng.normal(size=(300, 2)), rng.integers(2, size=300), client=rng.integers(4, size=300),
                          user=np.where(rng.random((300, 3)) < [0, 0.5, 0.5], -1, users))  # fmt: skip
    settings = {"algorithm": "fed-cdp-private", "model": "linear", "clients.cohort": 4, "records.max_per_user": 5}
    _, trainer = prepare(configure(settings | {"data.public_ownership": True}), dataset, None)
    parts = trainer.cohort.partition
    for client in range(len(parts)):
        owners = parts.users[parts.records(client)]
        assert np.bincount(owners[owners >= 0]).max() == 5
        assert all(len(set(own[own >= 0])) == (own >= 0).sum() for own in owners)  # nobody is counted twice
    assert trainer.setting.clients_per_user == 4
    assert trainer.setting.user_columns == 3


@pytest.mark.slow
def test_a_user_at_several_clients_is_said_and_charged(tmp_path):
    path = visits(tmp_path / "visits.csv")
    path.write_text(path.read_text().replace(",1-", ",0-"))  # the same patients at both hospitals
    result = shoal.run(given(path), runs=tmp_path / "runs")
    found = next(each for each in result.proven if (each["unit"], each["observer"]) == ("user", "server"))
    twice = accountants.epsilon(Repeat(SampledUser(3, 0.1, 6.0), 16), 1e-5, adjacency="zero-out")
    assert found["epsilon"] == pytest.approx(twice.epsilon, rel=1e-3)
    assert "no user has records at more than 2 clients" in found["because"]
