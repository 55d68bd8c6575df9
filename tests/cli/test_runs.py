"""`shoal runs list|show|delete` and `shoal report`: runs are found, shown, compared, and deleted on purpose only."""

import fcntl
import json
import shutil
import sys

import pytest

from shoal.cli.main import main
from support.tiny import FEDAVG, PRIVATE, play, stopped_after


@pytest.fixture
def shell(monkeypatch, capsys):
    """`shoal ...` in this process: exit code, standard output, standard error."""

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err

    return called


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three runs: private, not private, and one that was stopped."""
    folder = tmp_path_factory.mktemp("made")
    found = [play(folder, PRIVATE | {"rounds": 2}).run, play(folder, FEDAVG | {"rounds": 2}).run]
    found.append(stopped_after(folder, FEDAVG, 3))
    days = ("20260110-100000", "20260220-100000", "20260330-100000")
    for run, day in zip(found, days, strict=True):
        run.rename(run.with_name(f"{day}{run.name[15:]}"))
    return folder


@pytest.fixture
def runs(made, tmp_path, monkeypatch):
    """A copy of them, the oldest first, in the folder where the test goes on."""
    monkeypatch.chdir(tmp_path)
    return sorted(shutil.copytree(made, tmp_path / "runs").iterdir())


def listed(shell, *options):
    code, out, _ = shell("runs", "list", "--json", *options)
    assert code == 0
    return [run["run"].rpartition("/")[2] for run in json.loads(out)["runs"]]


@pytest.mark.slow
def test_runs_are_listed_by_method_data_and_date(shell, runs):
    names = [run.name for run in runs]
    assert listed(shell) == names
    assert listed(shell, "--algorithm", "fedavg") == names[1:]
    assert listed(shell, "--data", "clients") == names
    assert listed(shell, "--data", "digits") == []
    assert listed(shell, "--since", "2026-02-20") == names[1:]
    assert listed(shell, "--until", "2026-02-20") == names[:2]
    assert listed(shell, "--algorithm", "fedavg", "--until", "2026-02-28") == [names[1]]
    code, out, _ = shell("runs", "list")
    assert code == 0
    assert all(name in out for name in names)
    assert "3/6" in out
    assert "stopped" in out


@pytest.mark.slow
def test_a_day_that_is_none_is_refused(shell, runs):
    code, _, err = shell("runs", "list", "--since", "yesterday")
    assert code == 2
    assert "2026-01-31" in err


@pytest.mark.slow
def test_a_folder_of_something_else_is_passed_over(shell, runs):
    (runs[0].parent / "other").mkdir()
    (runs[0].parent / "broken").mkdir()
    (runs[0].parent / "broken" / "config.toml").write_text("not = = toml")
    assert len(listed(shell)) == 3


@pytest.mark.slow
def test_a_run_is_shown_by_the_beginning_of_its_name(shell, runs):
    code, out, _ = shell("runs", "show", "20260110", "--json")
    said = json.loads(out)
    assert code == 0
    assert said["algorithm"] == "trusted-curator"
    assert said["ledger"]["whole"] is True
    assert said["config"]["per_round"]["noise_multiplier"] == 1.5
    code, out, _ = shell("runs", "show", runs[0])
    assert code == 0
    assert "epsilon" in out
    assert "per_round.noise_multiplier = 1.5" in out


@pytest.mark.slow
def test_a_name_that_fits_several_runs_or_none_is_refused(shell, runs):
    code, _, err = shell("runs", "show", "2026")
    assert code == 2
    assert "give more of the name" in err
    code, _, err = shell("runs", "show", "1999")
    assert code == 2
    assert "there is no run '1999'" in err


@pytest.mark.slow
def test_deleting_asks_first_and_removes_just_what_was_named(shell, runs):
    code, _, err = shell("runs", "delete", "20260110")
    assert code == 2
    assert "--yes" in err
    assert all(run.exists() for run in runs)
    assert shell("runs", "delete", "20260110", "--yes")[0] == 0
    assert [run.exists() for run in runs] == [False, True, True]


@pytest.mark.slow
def test_a_run_that_goes_on_is_not_deleted(shell, runs):
    with (runs[1] / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, _, err = shell("runs", "delete", runs[1], "--yes")
    assert code == 2
    assert "in use" in err
    assert runs[1].exists()


@pytest.mark.slow
def test_a_folder_that_is_no_run_is_not_deleted(shell, runs, tmp_path):
    (tmp_path / "precious").mkdir()
    code, _, _ = shell("runs", "delete", tmp_path / "precious", "--yes")
    assert code == 2
    assert (tmp_path / "precious").is_dir()


@pytest.mark.slow
def test_report_makes_the_page_of_one_run_again(shell, runs):
    (runs[0] / "report.html").unlink()
    code, out, _ = shell("report", runs[0])
    assert (code, out.strip()) == (0, str(runs[0] / "report.html"))
    assert (runs[0] / "report.html").is_file()


@pytest.mark.slow
def test_report_without_a_name_takes_the_newest_run(shell, runs):
    code, out, _ = shell("report", "--json")
    assert code == 0
    assert json.loads(out)["runs"] == [str(runs[2].relative_to(runs[2].parents[1]))]


@pytest.mark.slow
def test_report_of_several_runs_compares_them(shell, runs, tmp_path):
    code, out, _ = shell("report", *runs, "--to", tmp_path / "all.html")
    assert (code, out.strip()) == (0, str(tmp_path / "all.html"))
    html = (tmp_path / "all.html").read_text()
    assert "3 runs compared" in html
    assert all(run.name in html for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no run 'nowhere'"),
        (["--runs", "empty"], "there is no run in empty"),
        (["--unit", "clients"], "did you mean 'client'"),
    ],
)
def test_report_says_what_is_wrong(shell, runs, arguments, said):
    code, _, err = shell("report", *arguments)
    assert code == 2
    assert said in err
