"""`shoal papers run`: quick versions hold the orderings, a crash stops nothing, what is done is not done again."""

import json
import os
import signal
from dataclasses import dataclass, replace

import pytest

import shoal
from shoal.errors import ConfigError, RunError
from shoal.papers import alphacdp, table
from shoal.papers.base import Cell, Job, Table
from shoal.papers.running import chosen, plan, play, read_lines
from shoal.papers.work import Account, Leak, Run


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
    found = accuracies("pfl-table2", r"^\((1, 20|20, 1)\)/PFL 2.93 CNN.RL", tmp_path)
    assert found["(1, 20)/PFL 2.93 CNN+RL"] > found["(20, 1)/PFL 2.93 CNN+RL"] + 0.2


def test_more_clients_do_not_hurt_at_client_level(tmp_path):
    found = accuracies("geyer-table1", r"^private/\d+$", tmp_path)
    assert found["private/100"] < found["private/1000"] < found["private/10000"]


def test_noise_twice_is_worse_than_noise_in_the_steps_alone(tmp_path):
    found = accuracies("thesis-table4.4", r"^(end to end|naive)/IID$", tmp_path)
    assert found["end to end/IID"] > found["naive/IID"] + 0.1


def test_less_noise_is_better_and_none_equals_not_private(tmp_path):
    found = accuracies("alphacdp-table6", r"^(non-private|Fed-CDP)/Cancer($|/sigma 0.1)", tmp_path)
    assert found["Fed-CDP/Cancer"] + 0.1 < found["Fed-CDP/Cancer/sigma 0.1"]
    work = alphacdp.run(alphacdp.config("Fed-CDP", "Cancer"))
    silent = work.settings(quick=True) | {"per_step.noise": 0.0, "per_example.clip": 1e6}
    result = shoal.run(silent, runs=tmp_path, no_guarantee=True)
    assert result.accuracy == pytest.approx(found["non-private/Cancer"], abs=1e-9)


def test_an_attack_is_a_cell_like_any_other(tmp_path):
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
    with pytest.raises(ConfigError, match=r"for example 'non-private/100'"):
        chosen(table("geyer-table1"), "nosuch")
    with pytest.raises(ConfigError, match="no regular expression"):
        chosen(table("geyer-table1"), "(")
    with pytest.raises(ConfigError, match="did you mean 'geyer-table1'"):
        table("geyer-tabel1")


def test_recipes_need_no_run():
    work = table("alphacdp-table7").cells[-1].work
    assert isinstance(work, Account)
    assert work.measure(Job(0, "cpu", False, None)) == {"epsilon": pytest.approx(0.0841, abs=5e-5)}


def test_cells_side_by_side_give_the_lines_that_they_give_one_by_one(tmp_path):
    found = table("alphacdp-table6")
    todo = plan(chosen(found, r"^(non-private|Fed-SDP|Fed-CDP)/Cancer$"), 1, True, [])
    assert len(todo) == 3
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
    assert told[-1] == ("", 3, 3)


@dataclass(frozen=True)
class Killer:
    """A measurement whose process is killed."""

    name: str
    seeded, instant = False, False

    def key(self, quick):
        return self.name

    def measure(self, job):
        os.kill(os.getpid(), signal.SIGKILL)

    def figures(self, line):
        return {}


def test_where_a_process_is_killed_the_lines_say_so(tmp_path):
    cells = tuple(Cell(row, "x", Killer(row)) for row in ("one", "two"))
    killed = Table("pfl-table2", (), 1, cells)
    lines = play(plan(cells, 1, True, []), killed, tmp_path / "found.jsonl", "cpu", True, nobody, jobs=2)
    assert sorted(line["cell"] for line in lines) == ["one/x", "two/x"]
    assert all("killed" in line["failed"] and "--jobs" in line["failed"] for line in lines)
    assert read_lines(tmp_path / "found.jsonl") == lines
