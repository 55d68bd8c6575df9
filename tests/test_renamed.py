"""Old configuration keys work, with a warning that names the new one; a run of version 0.1 can be resumed."""

import json
import shutil
import warnings

import pytest
from typer.testing import CliRunner

import shoal
from shoal.cli.ledger import app as ledger_app
from shoal.cli.runs import app as runs_app
from shoal.config import configure, to_toml
from shoal.errors import ConfigError
from shoal.papers.work import Run
from shoal.renamed import current
from shoal.report.run_page import run_page
from shoal.report.run_reader import read_run
from support.paths import TESTS

OLD_RUN = TESTS / "support" / "run_of_0.1"
OLD_AND_NEW = [
    ("dp-sgd", "examples.batch", "records.batch", 7),
    ("dp-sgd", "per_example.clip", "per_record.clip_norm", 0.7),
    ("dp-sgd", "per_step.noise", "per_step.noise_multiplier", 1.7),
    ("trusted-curator", "per_update.clip", "per_update.clip_norm", 0.7),
    ("trusted-curator", "per_round.noise", "per_round.noise_multiplier", 1.7),
    ("quantile", "per_update.initial", "per_update.initial_clip_norm", 0.7),
    ("quantile", "per_update.rate", "per_update.clip_norm_lr", 0.3),
    ("quantile", "per_update.count_noise", "per_update.count_noise_multiplier", 0.3),
    ("fedavg", "data.client", "data.client_column", "hospital"),
    ("fedavg", "federation.first", "federation.min_sites_to_start", 3),
    ("fedavg", "federation.least", "federation.min_sites", 2),
    ("fedavg", "federation.largest", "federation.max_update_norm", 5.0),
]


@pytest.mark.parametrize(("method", "old", "new", "value"), OLD_AND_NEW, ids=lambda given: str(given))
def test_an_old_key_means_the_new_one_and_says_so(method, old, new, value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = configure({"algorithm": method, new: value})
    with pytest.warns(FutureWarning, match=f"{old} is now called {new}"):
        found = configure({"algorithm": method, old: value})
    assert found == wanted
    assert to_toml(found) == to_toml(wanted)


@pytest.mark.parametrize("old", ["engine.together", "engine.batched"])
@pytest.mark.parametrize(("value", "way"), [(True, "auto"), (False, "sequential")])
def test_whether_clients_are_batched_is_now_a_way(old, value, way):
    with pytest.warns(FutureWarning, match=f"{old} is now called engine.way"):
        assert configure({"algorithm": "fedavg", old: value}).engine.way == way


@pytest.mark.parametrize(
    ("old", "new"), [("[per_example]\nclip", "[per_record]\nclip_norm"), ("[examples]\nbatch", "[records]\nbatch")]
)
def test_a_file_that_gives_a_key_under_both_names_is_refused(tmp_path, old, new):
    path = tmp_path / "both.toml"
    for first, last in ((old, new), (new, old)):
        path.write_text(f'algorithm = "dp-sgd"\n{first} = 1\n{last} = 2\n')
        with pytest.raises(ConfigError, match="are the same key, by its old and new name: leave one of them out"):
            configure(path)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_last_word_of_the_command_line_counts_whatever_name_it_uses(tmp_path):
    path = tmp_path / "old.toml"
    path.write_text('algorithm = "trusted-curator"\n[per_update]\nclip = 4.0\n')
    for words, wanted in ((["clip_norm=1.0"], 1.0), (["clip_norm=1.0", "clip=2.0"], 2.0)):
        assert configure(path, [f"per_update.{word}" for word in words]).algorithm.per_update.clip_norm == wanted
    new = {"algorithm": "trusted-curator", "per_update.clip_norm": 4.0}
    words = ["per_update.clip=1.0", "per_update.clip_norm=2.0"]
    assert configure(new, words).algorithm.per_update.clip_norm == 2.0


def test_a_foreign_file_that_is_nested_deeply_is_read_as_it_is():
    deep = json.loads("[" * 900 + "]" * 900)
    assert json.dumps(current({"unit": "example", "more": deep})) == json.dumps({"unit": "record", "more": deep})


@pytest.mark.parametrize(
    ("key", "old", "new"), [("unit", "example", "record"), ("observer", "inside", "client-process")]
)
def test_old_words_for_units_and_observers_are_understood(key, old, new):
    assert configure({f"budget.{key}": old}) == configure({f"budget.{key}": new})


def test_the_old_placement_of_noise_is_understood():
    old, new = ({"algorithm": "fed-cdp", "per_step.placement": f"per-{unit}"} for unit in ("example", "record"))
    assert configure(old) == configure(new)


def test_an_old_name_of_an_algorithm_means_the_new_one_and_says_so():
    with pytest.warns(FutureWarning, match="quantile-example is now called quantile-record"):
        found = configure({"algorithm": "quantile-example"})
    assert found == configure({"algorithm": "quantile-record"})


def test_digests_of_settings_are_those_of_old_names_so_that_stored_results_are_found():
    old = {"per_example.clip": 1.0, "examples.batch": 5, "budget.unit": "example", "algorithm": "quantile-example"}
    new = {"per_record.clip_norm": 1.0, "records.batch": 5, "budget.unit": "record", "algorithm": "quantile-record"}
    assert Run(new).key(False) == Run(old).key(False)


def test_words_that_are_no_units_stay_as_they_are():
    read = {"classes": ["example", "inside"], "proven": [{"unit": "example"}, ["example", "inside", 1.0, None]]}
    assert current(read) == {
        "classes": ["example", "inside"],
        "proven": [{"unit": "record"}, ["record", "client-process", 1.0, None]],
    }


@pytest.fixture
def old_run(tmp_path):
    name = json.loads((OLD_RUN / "ledger.jsonl").read_text().splitlines()[0])["run"]
    return shutil.copytree(OLD_RUN, tmp_path / "runs" / name)


def test_the_ledger_of_an_old_run_is_whole(old_run):
    found = CliRunner().invoke(ledger_app, ["verify", str(old_run)])
    assert found.exit_code == 0, found.output


def test_an_old_run_is_shown_under_the_new_names(old_run):
    run = read_run(old_run)
    written = json.loads((OLD_RUN / "result.json").read_text())["proven"]
    record = next(claim for claim in run.proven if (claim["unit"], claim["observer"]) == ("record", "client-process"))
    before = next(claim for claim in written if (claim["unit"], claim["observer"]) == ("example", "inside"))
    assert record["epsilon"] == before["epsilon"]
    assert "record_clip" in run.metrics[0]
    assert "client process" in run_page(run)
    shown = CliRunner().invoke(runs_app, ["show", str(old_run)])
    assert shown.exit_code == 0, shown.output


def test_an_old_run_that_ended_can_be_resumed_to_the_same_end(old_run):
    result = shoal.run(resume=old_run)
    assert result.rounds == 2
    assert {(claim["unit"], claim["observer"]) for claim in result.proven} >= {
        ("record", "release"),
        ("client", "server"),
    }
