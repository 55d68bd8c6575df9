"""`shoal papers run`: quick versions hold the orderings, a crash stops nothing, what is done is not done again."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shoal
from shoal import attacks
from shoal.attacks import recipe
from shoal.errors import ConfigError, DataError, RunError
from shoal.papers import running, table, tables, wei_tables
from shoal.papers.running import chosen, plan, play, read_lines
from shoal.papers.table import Cell, Job, Table
from shoal.papers.work import Account, Leak, Run
from support.measurements import Killer, Timed
from support.paths import ROOT, TESTS

pytestmark = pytest.mark.slow


def nobody(cell, done, share):
    pass


def accuracies(name, pattern, folder, seeds=1):
    """Mean accuracy of the quick cells that match, by name."""
    found = table(name)
    cells = chosen(found, pattern)
    lines = play(plan(cells, seeds, True, []), found, folder / "found.jsonl", "cpu", True, nobody)
    assert [line["failed"] for line in lines if "failed" in line] == []
    by_key = {}
    for line in lines:
        by_key.setdefault(line["key"], []).append(line["accuracy"])
    return {cell.name: sum(by_key[cell.work.key(True)]) / seeds for cell in cells if not cell.work.instant}


def test_averaging_after_every_epoch_is_not_worse_than_once_at_the_end(tmp_path):
    found = accuracies("pfl-table2", r"^\((1, 20|20, 1)\)/PFL 2.93 CNN.TS", tmp_path)
    assert found["(1, 20)/PFL 2.93 CNN+TS"] > found["(20, 1)/PFL 2.93 CNN+TS"] + 0.2


def test_more_clients_do_not_hurt_at_client_level(tmp_path):
    found = accuracies("geyer-table1", r"^private/\d+$", tmp_path)
    assert found["private/100"] < found["private/1000"] < found["private/10000"]


def test_noise_twice_is_worse_than_noise_in_the_steps_alone(tmp_path):
    found = accuracies("thesis-table4.4", r"^(end to end|naive)/IID$", tmp_path)
    assert found["end to end/IID"] > found["naive/IID"] + 0.1


def test_less_noise_is_better_and_none_equals_not_private(tmp_path):
    found = accuracies("alphacdp-table6", r"^(non-private|Fed-CDP)/Cancer($|/sigma 0.1)", tmp_path)
    assert found["Fed-CDP/Cancer"] + 0.1 < found["Fed-CDP/Cancer/sigma 0.1"]
    work = wei_tables.run(wei_tables.config("Fed-CDP", "Cancer"))
    silent = work.settings(quick=True) | {"per_step.noise_multiplier": 0.0, "per_record.clip_norm": 1e6}
    result = shoal.run(silent, runs=tmp_path, no_guarantee=True)
    assert result.accuracy == pytest.approx(found["non-private/Cancer"], abs=1e-9)


def test_an_attack_is_a_cell_like_any_other(tmp_path, monkeypatch):
    """In five iterations, which tell noise from none as well as 300 do."""
    monkeypatch.setattr(attacks, "recipe", lambda name: replace(recipe(name), iterations=5))
    found = table("alphacdp-table3")
    cells = chosen(found, r"^type 2 (non-private|Fed-alphaCDP\[sigma\])/MNIST")
    lines = play(plan(cells, 3, True, []), found, tmp_path / "found.jsonl", "cpu", True, nobody)
    figures = {line["cell"].split("/")[0]: cell.work.figures(line) for line, cell in zip(lines, cells, strict=True)}
    assert figures["type 2 non-private"]["resilient"] == 0
    assert figures["type 2 Fed-alphaCDP[sigma]"]["resilient"] == 1


SMALL = {
    "algorithm": "trusted-curator",
    "model": "linear",
    "rounds": 4,
    "data.name": "digits",
    "data.clients": 10,
    "clients.cohort": 5,
    "local.steps": 2,
}


def small_table(**changes):
    """A table whose second cell cannot be built and whose third crashes for reasons of its own."""
    crash = Leak("cpl", "fedavg", (), "digits", 7)
    cells = (
        Cell("good", "x", Run(SMALL)),
        Cell("bad model", "x", Run(SMALL | {"model": "nosuch"})),
        Cell("bad attack", "x", crash, ("success",)),
        Cell("last", "x", Run(SMALL | {"local.lr": 0.01})),
    )
    return replace(Table("pfl-table2", (), 0, cells), **changes)


def test_a_cell_that_crashes_is_told_of_and_the_others_go_on(tmp_path, monkeypatch):
    def broken(self, job):
        raise ZeroDivisionError("no reason")

    monkeypatch.setattr(Leak, "measure", broken)
    found, path = small_table(), tmp_path / "papers" / "found.jsonl"
    lines = play(plan(found.cells, 1, False, []), found, path, "cpu", False, nobody)
    assert [line.get("failed", "") for line in lines][::3] == ["", ""]
    assert "nosuch" in lines[1]["failed"]
    assert lines[2]["failed"] == "ZeroDivisionError: no reason"
    assert read_lines(path) == lines
    assert not (tmp_path / "papers" / "unfinished").exists()


def test_what_is_finished_is_not_run_again_and_what_failed_is(tmp_path):
    found, path = small_table(), tmp_path / "found.jsonl"
    lines = play(plan(found.cells[:2], 2, False, []), found, path, "cpu", False, nobody)
    assert [(line["cell"], line["seed"]) for line in lines][0::2] == [("good/x", 0), ("good/x", 1)]
    again = plan(found.cells[:2], 2, False, read_lines(path))
    assert [(cell.name, seed) for cell, seed in again] == [("bad model/x", 0), ("bad model/x", 1)]
    more = plan(found.cells[:1], 3, False, read_lines(path))
    assert [seed for _, seed in more] == [2]
    assert len(plan(found.cells[:1], 2, True, [])) == 2


def test_cells_that_measure_the_same_share_one_run():
    found = table("alphacdp-table11")
    runs = [cell for cell in found.cells if not cell.work.instant]
    assert len(runs) == 24
    assert len(plan(found.cells, 1, False, [])) == 6  # a run for each method, whatever the accountant
    assert all(isinstance(cell.work, Account) for cell in found.cells if cell.work.instant)


def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(tmp_path):
    found, path, shares = small_table(), tmp_path / "found.jsonl", []

    def stop_in_the_middle(cell, done, share):
        if share >= 0.5:
            raise KeyboardInterrupt

    todo = plan(found.cells[:1], 1, False, [])
    with pytest.raises(KeyboardInterrupt):
        play(todo, found, path, "cpu", False, stop_in_the_middle)
    assert read_lines(path) == []
    (line,) = play(todo, found, path, "cpu", False, lambda cell, done, share: shares.append(share))
    assert line["rounds"] == 4
    assert min(share for share in shares if share > 0) > 0.25
    assert not (tmp_path / "unfinished").exists()


def test_a_torn_last_line_is_left_out_and_spoils_no_other(tmp_path):
    found, path = small_table(), tmp_path / "found.jsonl"
    path.write_text('{"key": "a", "seed": 0}\n{"key": "b", "se')
    assert read_lines(path) == [{"key": "a", "seed": 0}]
    play(plan(found.cells[:1], 1, False, []), found, path, "cpu", False, nobody)
    assert read_lines(path)[0]["key"] == "a"
    assert len(read_lines(path)) == 2
    path.write_text('{"key": "a"\n' + json.dumps({"key": "b", "seed": 0}) + "\n")
    with pytest.raises(RunError, match="line 1 of"):
        read_lines(path)


def test_accuracy_at_a_round_and_rounds_to_a_target_come_from_the_curve():
    line = {"accuracy": 0.9, "rounds": 4, "curve": [[1, 0.2, 0, 0], [2, 0.7, 0, 0], [3, 0.6, 0, 0], [4, 0.9, 0, 0]]}
    assert Run(SMALL, at=3).figures(line)["accuracy"] == 0.6
    assert Run(SMALL, target=0.65).figures(line)["rounds"] == 2
    assert Run(SMALL, target=0.95).figures(line)["rounds"] == float("inf")


def test_a_wrong_pattern_names_a_cell():
    with pytest.raises(ConfigError, match=r"an example is 'non-private/100'"):
        chosen(table("geyer-table1"), "nosuch")
    with pytest.raises(ConfigError, match="not a regular expression"):
        chosen(table("geyer-table1"), "(")
    with pytest.raises(ConfigError, match="did you mean 'geyer-table1'"):
        table("geyer-tabel1")


def test_recipes_need_no_run():
    work = table("alphacdp-table7").cells[-1].work
    assert isinstance(work, Account)
    assert work.measure(Job(0, "cpu", False, None)) == {"epsilon": pytest.approx(0.0841, abs=5e-5)}


def test_cells_side_by_side_give_the_lines_that_they_give_one_by_one(tmp_path):
    """One cell is a run, the other takes no time: a process that trains needs seconds to start."""
    found = table("alphacdp-table6")
    cells = [*chosen(found, r"^Fed-CDP/Cancer$"), Cell("quick", "x", Timed("quick"))]
    todo = plan(cells, 1, True, [])
    assert len(todo) == 2
    told = []
    alone = play(todo, found, tmp_path / "alone.jsonl", "cpu", True, nobody)
    beside = play(todo, found, tmp_path / "beside.jsonl", "cpu", True, lambda *args: told.append(args), jobs=2)
    assert read_lines(tmp_path / "beside.jsonl") == beside
    for one in alone:
        other = next(line for line in beside if line["key"] == one["key"])
        assert other["seed"] == one["seed"]
        assert "step_seconds" in one
        assert "step_seconds" not in other
        assert other["accuracy"] == pytest.approx(one["accuracy"], abs=0.02)  # other threads, other last digits
    assert told[-1] == ("", 2, 2)


def test_where_a_process_is_killed_the_lines_say_so(tmp_path):
    cells = tuple(Cell(row, "x", Killer(row)) for row in ("one", "two"))
    killed = Table("pfl-table2", (), 1, cells)
    lines = play(plan(cells, 1, True, []), killed, tmp_path / "found.jsonl", "cpu", True, nobody, jobs=2)
    assert sorted(line["cell"] for line in lines) == ["one/x", "two/x"]
    assert all("killed" in line["failed"] and "--jobs" in line["failed"] for line in lines)
    assert read_lines(tmp_path / "found.jsonl") == lines
    assert list((tmp_path / "unfinished").iterdir())  # they go on from their checkpoints


def test_processes_are_no_forks(tmp_path, monkeypatch):
    """A fork of a process with threads has the locks that these hold, and nobody who opens them."""
    seen = []

    def pool(jobs, context, **more):
        seen.append((jobs, context.get_start_method()))
        raise RunError("no pool")

    monkeypatch.setattr(running, "ProcessPoolExecutor", pool)
    cells = tuple(Cell(row, "x", Killer(row)) for row in ("one", "two"))
    with pytest.raises(RunError, match="no pool"):
        play(plan(cells, 1, True, []), Table("pfl-table2", (), 1, cells), tmp_path / "x", "cpu", True, nobody, jobs=2)
    assert seen == [(2, "spawn")]


def test_a_line_that_lacks_a_measure_of_a_cell_does_not_count_for_it():
    (cell,) = chosen(table("alphacdp-table9"), "^non-private/Cancer")
    line = {"key": cell.work.key(False), "seed": 0, "accuracy": 0.9, "rounds": 3}
    assert plan([cell], 1, False, [line]) == [(cell, 0)]
    assert plan([cell], 1, False, [line | {"step_seconds": 0.1}]) == []
    assert plan([replace(cell, measures=("accuracy",))], 1, False, [line]) == []
    assert plan([Cell("x", "x", Run(SMALL, at=3))], 1, False, [{"key": Run(SMALL).key(False)}])
    timed = [cell for each in tables().values() for cell in each.cells if "step_seconds" in cell.measures]
    assert timed
    assert all(cell.work.settings(quick)["local.steps"] for cell in timed for quick in (True, False))


def test_a_line_without_a_seed_is_of_seed_0():
    cell = Cell("good", "x", Run(SMALL))
    assert plan([cell], 2, False, [{"key": cell.work.key(False), "accuracy": 0.9}]) == [(cell, 1)]


def test_times_are_not_measured_side_by_side(tmp_path):
    found, path = table("alphacdp-table9"), tmp_path / "found.jsonl"
    todo = plan(chosen(found, "Cancer"), 1, True, [])
    with pytest.raises(ConfigError, match=r"--jobs 8: 'non-private/Cancer/step_seconds' measures .* give --jobs 1"):
        play(todo, found, path, "cpu", True, nobody, jobs=8)
    (line,) = play(todo[:1], found, path, "cpu", True, nobody, jobs=8)  # alone it has the machine for itself
    assert line["step_seconds"] > 0


def never(self, job):
    raise AssertionError("nothing may be measured")


def test_a_results_file_that_cannot_be_written_is_found_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "measure", never)
    found = small_table()
    todo = plan(found.cells[:1], 1, False, [])
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "found.jsonl"):
        with pytest.raises(RunError, match=r"results file .* cannot be written: .*; choose another --results"):
            play(todo, found, path, "cpu", False, nobody)
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(running.tempfile, "TemporaryFile", lambda dir: full)
        with pytest.raises(RunError, match="No space left"):
            play(todo, found, tmp_path / "found.jsonl", "cpu", False, nobody)
    assert play([], found, tmp_path, "cpu", False, nobody) == []


def test_what_was_measured_is_not_lost_with_a_line_that_cannot_be_written(tmp_path, monkeypatch):
    found, path, shares = small_table(), tmp_path / "found.jsonl", []
    todo = plan(found.cells[:1], 1, False, [])

    def full(path, line):
        lost.append(line)
        raise RunError("no space left")

    lost = []
    with monkeypatch.context() as patch:
        patch.setattr(running, "_append", full)
        with pytest.raises(RunError):
            play(todo, found, path, "cpu", False, nobody)
    (line,) = play(todo, found, path, "cpu", False, lambda cell, done, share: shares.append(share))
    assert set(shares) == {0, 1}  # not a round was played again
    varies = ("when", "seconds")
    assert {**line, **dict.fromkeys(varies)} == {**lost[0], **dict.fromkeys(varies)}
    assert not (tmp_path / "unfinished").exists()


def test_a_line_that_the_disk_refuses_is_told_in_a_sentence(tmp_path):
    with pytest.raises(RunError, match="cannot be written: Is a directory; choose another --results"):
        running._append(tmp_path, {"key": "a"})


PARENT = """
import sys
from pathlib import Path
from shoal.papers.table import Cell, Table
from shoal.papers.running import play
from support.measurements import Sleeper

if __name__ == "__main__":
    cells = tuple(Cell(row, "x", Sleeper(row)) for row in "ab")
    todo = [(cell, 0) for cell in cells]
    play(todo, Table("pfl-table2", (), 1, cells), Path(sys.argv[1]), "cpu", True, lambda *told: None, jobs=2)
"""


def test_processes_end_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    words = [sys.executable, script, tmp_path / "found.jsonl"]
    path = os.pathsep.join([str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}) as parent:
        assert [parent.stdout.readline() for _ in range(2)] == [b"begun\n"] * 2
        parent.kill()
        assert parent.communicate(timeout=300) == (b"", None)  # the pipe closes when the last of them has ended


def test_a_wrong_device_is_refused_once(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "measure", never)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = small_table()
    for device, words in (("tpu", "no device 'tpu'"), ("cuda", "sees no GPU")):
        with pytest.raises(RunError, match=words):
            play(plan(found.cells, 1, False, []), found, tmp_path / "found.jsonl", device, False, nobody)
    assert not (tmp_path / "found.jsonl").exists()


def test_data_that_are_missing_are_told_of_once(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "measure", never)
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SHOAL_MIRROR", "no address")
    found = table("pfl-table2")
    with pytest.raises(DataError, match=r"mnist/.*not found in"):
        play(plan(found.cells, 1, False, []), found, tmp_path / "found.jsonl", "cpu", False, nobody)
    assert not (tmp_path / "found.jsonl").exists()


def test_rows_may_name_a_data_set_that_no_cell_names():
    found = table("pfl-table2")
    assert chosen(found, "mnist") == chosen(found, "^pfl-table2/MNIST$") == list(found.cells)
    assert len(chosen(table("pfl-table5"), "^cifar10$")) == 22
    names = [cell.name for cell in chosen(table("alphacdp-table6"), "mnist")]
    assert names
    assert all("MNIST" in name for name in names)
    with pytest.raises(ConfigError, match="no cell of pfl-table2 matches 'lfw'"):
        chosen(found, "lfw")


def test_claims_of_an_earlier_version_are_proven_again(tmp_path):
    cells = [
        *chosen(table("thesis-table4.4"), "^trusted curator/IID"),
        *chosen(table("beyond-client"), "^geyer-private 100/epsilon 8$"),
    ]
    found, path = replace(table("geyer-table1"), cells=tuple(cells)), tmp_path / "found.jsonl"
    lines = play(plan(cells, 1, True, []), found, path, "cpu", True, nobody)
    curator, calibrated = lines[0], lines[-1]
    assert calibrated["calibrated"].keys() == {"per_round.noise_multiplier"}
    unknown = {"cell": "gone/x", "key": "0", "seed": 0, "quick": True, "proven": []}
    noise = {key: value / 2 for key, value in calibrated["calibrated"].items()}
    earlier = [
        curator | {"proven": [[unit, who, 0.1, None] for unit, who, *_ in curator["proven"]]},
        calibrated | {"calibrated": noise},
        {key: value for key, value in calibrated.items() if key != "calibrated"} | {"proven": []},
        calibrated | {"calibrated": {}},  # by a version that called the noise otherwise
        calibrated | {"calibrated": {"rounds": 8}},
        curator
        | {"proven": [[unit, who, epsilon and 2 * epsilon, why] for unit, who, epsilon, why in curator["proven"]]},
        unknown,
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in earlier))
    assert running.prove_again(path, nobody) == (2, 3, 1)
    again = read_lines(path)
    assert again[0] == curator
    (before, now) = (line["proven"][0][2] for line in (calibrated, again[1]))
    assert before <= 8 < now
    assert again[2:] == earlier[2:]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rounds": 0}, "its 0 rounds cannot have been charged as"),
        ({"rounds": 10**9}, "its 1000000000 rounds cannot"),
        ({"rounds": "5"}, "not supported"),
        ({"charged": []}, r"its 5 rounds cannot have been charged as \[\]"),
        ({"charged": [[1, 4]]}, "its 5 rounds cannot"),
        ({"charged": [[1, 5], [6, 6]]}, "its 5 rounds cannot"),
        ({"proven": None}, "not iterable"),
        ({"proven": [["client", "release", 0.1]]}, "not enough values"),
        ({"seed": None}, "seed cannot be None"),
    ],
)
def test_no_claim_is_made_of_a_malformed_line(tmp_path, wrong, words):
    path = tmp_path / "found.jsonl"
    (cell,) = chosen(table("alphacdp-table6"), "^Fed-SDP/Adult$")
    line = {"cell": cell.name, "key": cell.work.key(True), "seed": 0, "quick": True, "rounds": 5, "proven": []}
    written = json.dumps(line) + "\n" + json.dumps(line | wrong) + "\n"
    path.write_text(written)
    with pytest.raises(RunError, match=rf"line 2 of .*found.jsonl is malformed: .*{words}.*; correct or remove it"):
        running.prove_again(path, nobody)
    assert path.read_text() == written


def test_rounds_that_were_repeated_are_proven_again(tmp_path):
    (cell,) = chosen(table("alphacdp-table6"), "^Fed-SDP/Adult$")

    def killed(share):
        if share == 0.6:
            raise KeyboardInterrupt

    job = Job(0, "cpu", True, tmp_path / "unfinished", killed)
    with pytest.raises(KeyboardInterrupt):
        cell.work.measure(job)
    line = cell.work.measure(replace(job, progress=lambda share: None)) | {"quick": True}
    assert line["charged"] == [[1, 1], [2, 2], [3, 3], [3, 3], [4, 4], [5, 5]]
    earlier = line | {"proven": [[unit, who, 0.1, None] for unit, who, *_ in line["proven"]]}
    assert cell.work.proven_again(earlier) == line
    once = cell.work.proven_again({key: value for key, value in earlier.items() if key != "charged"})
    assert once["proven"][0][2] < 0.99 * line["proven"][0][2]


def test_rounds_after_an_early_stop_are_proven_again(tmp_path):
    (cell,) = chosen(table("alphacdp-table6"), "^Fed-SDP/MNIST$")
    stopping = {"stop.patience": 1, "stop.min_improvement": 1.0, "stop.public": True}
    work = Run(cell.work.settings(True) | stopping)
    line = work.measure(Job(0, "cpu", False, tmp_path / "unfinished"))
    assert line["rounds"] < 5 == line["charged"][-1][1]
    assert work.proven_again(line | {"proven": []}) == line


def test_lines_that_are_measured_while_others_are_proven_are_kept(tmp_path):
    path = tmp_path / "found.jsonl"
    (cell,) = chosen(table("thesis-table4.4"), "^trusted curator/IID$")
    (line,) = play([(cell, 0)], table("thesis-table4.4"), path, "cpu", True, nobody)
    later = {key: value for key, value in line.items() if key not in ("cell", "seed")}

    def meanwhile(name, done, share):
        if name:
            with path.open("a") as file:
                file.write(json.dumps(later) + "\n")

    assert running.prove_again(path, meanwhile) == (0, 0, 0)
    assert read_lines(path) == [line, later]
    assert running.prove_again(path, nobody) == (0, 0, 0)


@pytest.mark.parametrize("name", ["thesis-table4.4", "thesis-table4.5", "pfl-table2", "alphacdp-table5"])
def test_the_claims_that_the_documentation_shows_are_those_of_this_version(name):
    """Claims need no picture, only how many there are: each method's first line on MNIST."""
    x = torch.zeros(1).expand(60_000, 1, 28, 28)
    data = replace(shoal.load("digits"), train_x=x, train_y=torch.arange(60_000) % 10, test_x=x[:360])
    works = {cell.work.key(False): cell.work for cell in table(name).cells if isinstance(cell.work, Run)}
    checked = {}
    for line in read_lines(ROOT / "docs" / "results" / f"{name}.jsonl"):
        work = works.get(line["key"])
        if work is None or work.needs(False) != "mnist" or work.config.get("data.features", "none") != "none":
            continue
        if work.config["algorithm"] not in checked:
            checked[work.config["algorithm"]] = (line, work.proven_again(line, data))
    assert len(checked) > 1
    for shown, proven in checked.values():
        epsilons = [[epsilon for *_, epsilon, _ in each["proven"]] for each in (shown, proven)]
        assert epsilons[0] == [each if each is None else pytest.approx(each, rel=1e-6) for each in epsilons[1]]
