"""`shoal attack`: tables, pictures, pages, and words for what cannot be done."""

import json
import re

import pytest
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.errors import ConfigError, RunError

FAST = ["--device", "cpu", "-c", "engine.threads=1"]


def shoal_attack(*words):
    return CliRunner().invoke(app, ["attack", *FAST, *map(str, words)], catch_exceptions=False)


@pytest.mark.slow
def test_one_attack_leaves_a_table_a_picture_and_a_page(tmp_path):
    result = shoal_attack("--count", 3, "--algorithm", "fed-sdp", "--runs", tmp_path)
    assert result.exit_code == 0
    assert "100% of 3 records were reconstructed" in result.output
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("attack-")
    told = json.loads((folder / "attack.json").read_text())
    assert told["rows"][0]["success"] == 1.0
    assert told["algorithm"] == "fed-sdp"
    assert (folder / "attack.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "prefers-color-scheme: dark" in page
    assert "http://" not in page
    assert "https://" not in page
    assert "SSIM" in page
    assert "<h1>cpl against fed-sdp on digits, type 2</h1>" in page
    assert "attack-cnn, is untrained and easy to attack; it is not one of your runs." in page
    assert "Types 0 and 1 see one step with learning rate 1 on 3 records" in page
    assert "A failed attack proves nothing" in page
    assert {"model", "honest", "naive"} <= set(re.findall(r"<th scope=.col.>(.*?)</th>", page))


@pytest.mark.slow
def test_a_row_names_the_model_and_the_attacker(tmp_path):
    words = ["--count", 2, "--json", "--runs", tmp_path, "--iterations", 1, "--naive"]
    (row,) = json.loads(shoal_attack(*words, "-c", "model=linear").stdout)["rows"]
    assert (row["model"], row["naive"], row["honest"]) == ("linear", True, False)
    assert "The attacked model, linear, is" in (next(tmp_path.iterdir()) / "report.html").read_text()


@pytest.mark.slow
def test_tables_say_what_a_success_is_for_them(tmp_path):
    result = shoal_attack("--dataset", "cancer", "--count", 3, "--runs", tmp_path)
    assert "below half of the mean record" in " ".join(result.output.split())


@pytest.mark.slow
def test_json_is_one_object_on_standard_output(tmp_path):
    result = shoal_attack("--count", 2, "--json", "--runs", tmp_path, "--iterations", 1)
    told = json.loads(result.stdout)
    assert told["run"].startswith(str(tmp_path))
    assert told["rows"][0]["victims"] == 2
    assert told["rows"][0]["iterations"] == 1


@pytest.mark.slow
def test_settings_of_the_method_count(tmp_path):
    noisy = ["--algorithm", "fed-cdp", "--count", 1, "--iterations", 3, "--json", "--runs", tmp_path]
    held = json.loads(shoal_attack(*noisy).stdout)["rows"][0]
    broken = json.loads(shoal_attack(*noisy, "-c", "per_step.noise_multiplier=0.0").stdout)["rows"][0]
    assert held["success"] == 0.0
    assert broken["success"] == 1.0


@pytest.mark.slow
def test_the_matrix_of_methods_and_types_is_one_page(tmp_path, monkeypatch):
    from shoal.attacks import matrix

    kept = [method for method in matrix.METHODS if method.label in ("non-private", "Fed-SDP")]
    monkeypatch.setattr(matrix, "METHODS", tuple(kept))
    told = json.loads(shoal_attack("--all", "--count", 1, "--iterations", 12, "--json", "--runs", tmp_path).stdout)
    found = {(row["method"], row["type"]): row["resilient"] for row in told["rows"]}
    assert found == {
        ("non-private", 2): False,
        ("non-private", 1): False,
        ("non-private", 0): False,
        ("Fed-SDP", 2): False,
        ("Fed-SDP", 1): False,
        ("Fed-SDP", 0): True,
    }
    (folder,) = tmp_path.iterdir()
    page = (folder / "report.html").read_text()
    assert "<h1>cpl against 2 methods on digits, types 0, 1 and 2</h1>" in page
    assert "resilient if fewer than 50% of the records" in page
    assert "attack-cnn, is untrained" in page
    assert page.count('<tr class="leaks">') == 5
    assert page.count('<tr class="">') == 1  # what withstood is not green


def test_names_with_brackets_are_shown_whole():
    from rich.console import Console

    from shoal.cli.attack import show

    console = Console(width=100)
    with console.capture() as shown:
        show([{"method": "Fed-alphaCDP[sigma]", "type": 2}, {"method": "other", "type": 1}], console)
    assert "Fed-alphaCDP[sigma]" in shown.get()


@pytest.mark.slow
def test_membership_from_the_command_line(tmp_path):
    words = ["--membership", "--models", 4, "--records", 60, "--json", "--runs", tmp_path]
    told = json.loads(shoal_attack(*words, "-c", "rounds=1", "-c", "data.clients=4", "-c", "clients.cohort=2").stdout)
    assert {row["attack"] for row in told["rows"]} == {"threshold", "lira", "lira offline"}
    assert told["models"] == 4
    assert len(told["roc"]["lira"]) > 1
    assert told["rounds"] == 1
    assert "barely better than guessing" in told["warning"]
    assert 0 < told["rows"][0]["guessing"] < 0.3
    page = (next(tmp_path.iterdir()) / "report.html").read_text()
    assert "guessing reaches" in page
    assert "barely better than guessing" in page
    assert "they are not your runs" in page
    assert "No epsilon bounds what an attack may find here" in page
    assert "A failed attack proves nothing" in page


@pytest.mark.slow
def test_a_rate_that_cannot_be_told_is_a_dash(tmp_path):
    words = ["--membership", "--models", 4, "--records", 30, "--runs", tmp_path]
    result = shoal_attack(*words, "-c", "rounds=1", "-c", "data.clients=4", "-c", "clients.cohort=2")
    lines = [line for line in result.output.splitlines() if line.startswith("lira")]
    assert len(lines) == 2  # online and offline
    assert {line.split()[-1] for line in lines} == {"–"}
    assert "warning: the models are barely better than guessing" in result.output


@pytest.mark.slow
def test_a_curve_has_no_points_at_zero(monkeypatch):
    """They would be a line at the left edge, as if there were false positives."""
    from matplotlib.axes import Axes

    from shoal.accounting.events import Gaussian
    from shoal.attacks.allowed import Allowed
    from shoal.attacks.attack_plots import curve

    drawn, plot = [], Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda self, x, *more, **how: drawn.append(list(x)) or plot(self, x, *more, **how)
    )
    allowed = Allowed.by(Gaussian(1.0), 1e-5)
    assert curve({"lira": [(0.0, 0.0), (0.0, 0.3), (0.0001, 0.4), (1.0, 1.0)]}, allowed).startswith(b"\x89PNG")
    assert drawn[0] == [0.0001, 1.0]
    assert min(drawn[1]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--type", 5], "no attack of type 5"),
        (["--attack", "imprint"], "use --type 0"),
        (["--type", 0, "--sites", 3], "use --attack imprint"),
        (["--membership", "--sites", 3], "--sites has no effect with --membership"),
        (["--count", 0], "at least 1 victim"),
        (["--attack", "dgl"], "did you mean 'dlg'"),
        (["--iterations", 0], "at least 1 iteration"),
        (["--algorithm", "fed-spd"], "did you mean 'fed-sdp'"),
        (["--all", "--membership"], "exclude each other"),
        (["--all", "--algorithm", "fed-sdp"], "omit --algorithm fed-sdp"),
        (["--membership", "--attack", "cpl"], "--attack has no effect with --membership"),
        (["--membership", "--count", 20], "--count has no effect with --membership"),
        (["--membership", "--type", 2], "--type has no effect with --membership"),
        (["--membership", "--iterations", 3], "--iterations has no effect with --membership"),
        (["--membership", "--honest"], "--honest has no effect with --membership"),
        (["--membership", "--naive"], "--naive has no effect with --membership"),
        (["--all", "--type", 2], "--type has no effect with --all"),
        (["--models", 16], "--models has no effect with a reconstruction"),
        (["--type", 0, "-c", "federation.aggregation=secure"], "sees only sums"),
        (["--all", "-c", "federation.aggregation=secure"], "sees only sums"),
        (["-c", "data.features=hog"], "data.features=hog: a reconstruction attacks pixels"),
        (["--all", "-c", "data.features=hog"], "data.features=hog: a reconstruction attacks pixels"),
        (["-c", "per_update.clip_norm=1"], "nothing at the boundary 'per_update'; leave this key out"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(words, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        shoal_attack(*words, "--runs", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_made_is_told_of_before_the_attack(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("shoal.attacks.leakage.attack", None)
    with pytest.raises(RunError, match="file/runs cannot be made: Not a directory; choose another --runs"):
        shoal_attack("--runs", tmp_path / "file" / "runs")
