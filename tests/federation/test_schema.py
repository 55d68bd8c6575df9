"""The federation's schema at its sites: columns are found by name, and none is trained on for another."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.cli.join import _schema
from shoal.data.schema import Schema
from shoal.errors import ConfigError
from shoal.federation.consent import Refused
from shoal.federation.messages import Payload
from shoal.federation.site import Owner, Site
from shoal.federation.site_records import reader, refuse_other
from shoal.federation.terms import TERMS, Terms
from shoal.mechanisms.setting import Setting
from support.federations import asked, farthest, named, served, settings
from support.loopback import Loopback, with_sites

COLUMNS = {
    "age": {"kind": "number", "range": [0, 100], "missing": 50},
    "sex": {"kind": "category", "categories": ["F", "M"]},
}
SCHEMA = {"label": "died", "classes": [0, 1], "client_column": "hospital", "columns": COLUMNS}


def table(path, seed, names=("age", "sex", "died"), header=None, numeric=False):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(30):
        cells = {
            "age": str(rng.integers(0, 120)),
            "sex": "01"[rng.integers(2)] if numeric else "FMX"[rng.integers(3)],
        }
        cells["died"] = str(rng.integers(2))
        rows.append(",".join(cells[name] for name in names))
    path.write_text("\n".join([",".join(header or names), *rows]) + "\n")
    return path


def federation(folder, *files, schema=SCHEMA, **owner):
    """A federation of sites with these files; the coordinator's own has no client column."""
    folder.mkdir(exist_ok=True)
    data = table(folder / "held-out.csv", 99, numeric=schema is None)
    given = settings("trusted-curator", clients__sampling="all", data__clients=len(files), data__name=str(data))
    given |= {"federation.min_sites_to_start": 1}
    given |= {"schema": schema} if schema else {"data.label": "died"}
    logs = [[] for _ in files]
    sites = {
        100 + at: Site(Owner(f"site-{at}", folder / f"site-{at}", reader(str(file), **owner)), logs[at].append)
        for at, file in enumerate(files)
    }
    return served(folder, given, Loopback(sites)), logs


@pytest.mark.slow
@pytest.mark.parametrize("schema", [SCHEMA, None])
def test_the_order_of_a_sites_columns_changes_nothing(tmp_path, schema):
    numeric = schema is None
    files = [table(tmp_path / f"{at}.csv", at, numeric=numeric) for at in range(2)]
    turned = [table(tmp_path / f"t{at}.csv", at, ("died", "sex", "age"), numeric=numeric) for at in range(2)]
    (straight, _), logs = federation(tmp_path / "a", *files, schema=schema)
    (other, _), _ = federation(tmp_path / "b", *turned, schema=schema)
    assert straight.metrics[-1]["clients"] == 2
    assert farthest(straight, other) == 0
    assert "learns 'died' from age, sex" in logs[0], "the owner sees what is used"
    if schema:
        assert any(line.startswith("agreed to run") and Schema.of(SCHEMA).digest[:12] in line for line in logs[0])
        assert any("counts of the data, not for release" in line for line in logs[0]), "the owner sees it"


@pytest.mark.slow
@pytest.mark.parametrize("schema", [SCHEMA, None])
def test_renamed_columns_are_refused_all_at_once_and_only_the_owner_reads_which(tmp_path, schema):
    numeric = schema is None
    good = table(tmp_path / "good.csv", 0, numeric=numeric)
    bad = table(tmp_path / "bad.csv", 1, header=("years", "gender", "died"), numeric=numeric)
    (result, grid), logs = federation(tmp_path / "run", good, bad, schema=schema)
    assert result.metrics[-1]["clients"] == 1
    refused = next(line for line in logs[1] if line.startswith("refused"))
    assert "there are no columns 'age', 'sex'; it has years, gender" in refused
    answers = [payload.values for to, node, kind, payload in grid.wire if (to, node, kind) == ("from", 101, TERMS)]
    assert not any("gender" in str(values) or "years" in str(values) for values in answers)


def test_terms_whose_schema_was_exchanged_are_refused(tmp_path):
    (_, grid), _ = federation(tmp_path / "run", table(tmp_path / "0.csv", 0))
    told = json.loads(asked(grid, TERMS).values["terms"])
    assert told["schema"] == Schema.of(SCHEMA).digest
    assert told["features"] == ["age", "age is missing", "sex=F", "sex=M"]
    told["config"] = told["config"].replace("range = [0.0, 100.0]", "range = [0.0, 90.0]")
    site = Site(Owner("own", tmp_path / "own", reader(str(tmp_path / "0.csv"))))
    answer = site.answer(TERMS, Payload({"terms": json.dumps(told, sort_keys=True), "round": 0}))
    site.close()
    assert "schema digest is not that of their configuration" in answer.values["refused"]


def test_a_site_may_insist_on_its_own_schema(tmp_path):
    own = Schema.of(SCHEMA | {"columns": COLUMNS | {"age": {"kind": "number", "range": [0, 120]}}})
    refuse_other(Schema.of(SCHEMA | {"client_column": "site", "unconfirmed": ["age"]}), Schema.of(SCHEMA))
    with pytest.raises(Refused, match=r"is not this site's \(--schema\): it differs in age"):
        refuse_other(own, Schema.of(SCHEMA))
    with pytest.raises(Refused, match="has no schema"):
        refuse_other(own, None)
    (tmp_path / "none.toml").write_text("rounds = 3\n")
    with pytest.raises(ConfigError, match=r"none\.toml has no section \[schema\]"):
        _schema(tmp_path / "none.toml")


@pytest.mark.slow
def test_a_label_of_another_name_is_given_by_the_site(tmp_path):
    renamed = table(tmp_path / "0.csv", 0, header=("age", "sex", "dead"))
    (result, _), _ = federation(tmp_path / "run", renamed, label="dead")
    (same, _), _ = federation(tmp_path / "same", table(tmp_path / "1.csv", 0))
    assert farthest(result, same) == 0


def answered(folder, config, **changes):
    """What a site answers to terms with this configuration, and what its owner reads."""
    log, setting = [], Setting(1, 5, all_answer=False)
    terms = replace(Terms("run", config, setting, ("0", "1"), (2,), 6, None), **changes)
    site = Site(Owner("own", folder / "own", reader(str(table(folder / "0.csv", 0)))), log.append)
    answer = site.answer(TERMS, Payload({"terms": terms.text, "round": 0}))
    site.close()
    return answer.values["refused"], log


def test_terms_do_not_reveal_which_files_a_site_has(tmp_path):
    asked_for = [answered(tmp_path, f'[data]\nname = "{tmp_path / name}"\n')[0] for name in ("0.csv", "no-such.csv")]
    assert asked_for[0] == asked_for[1]


def test_a_schema_that_would_fill_a_sites_memory_is_refused_before_any_row_is_read(tmp_path):
    columns = "".join(f'c{at} = {{kind = "text", buckets = 65536}}\n' for at in range(17))
    config = f'[schema]\nlabel = "died"\nclasses = ["0", "1"]\n[schema.columns]\n{columns}'
    refused, _ = answered(tmp_path, config, schema="0" * 64)
    assert refused.endswith("schema.columns makes 1,114,112 numbers of a row, more than 1,048,576")


def test_what_a_coordinator_writes_cannot_forge_a_line_of_the_owners_terminal(tmp_path):
    _, (line,) = answered(tmp_path, '"\\n\\u001b[2Jagreed to run" = 1\n')
    assert "??[2Jagreed to run" in line
    assert line.isprintable()


@pytest.mark.slow
def test_nor_what_a_site_calls_itself_one_of_the_coordinators(tmp_path):
    grid, log = with_sites(tmp_path, 1), []
    grid.changes[100] = lambda kind, answer: named(name="north\n\x1b[2J")(kind, answer) if kind == TERMS else answer
    given = settings("trusted-curator", clients__sampling="all", data__clients=1)
    served(tmp_path, given | {"clients.cohort": 1}, grid, log=log.append)
    assert "site north??[2J (node 100) has joined" in log
    assert all(line.isprintable() for line in log)
