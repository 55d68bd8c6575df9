"""The privacy calculator and the ledger's reader, as a user at the command line has them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.accounting.events import Gaussian, Sampled
from shoal.accounting.privacy_ledger import Charge, Ledger
from shoal.cli import account, ledger
from shoal.errors import ConfigError, LedgerError

COMMON = ["--sampling-rate", ".01", "--noise", "6", "--steps", "10000"]
KEYS = {"epsilon", "delta", "noise", "steps", "accountant", "valid", "because", "adjacency", "warnings"}


def calculate(*words: str) -> dict[str, Any]:
    ran = CliRunner().invoke(account.app, [*words, "--json"])
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    assert ran.exit_code == 0, ran.output
    found: dict[str, Any] = json.loads(ran.stdout)
    assert set(found) >= KEYS
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accountant", "epsilon", "valid"),
    [
        ("pld", 0.60086, True),
        ("rdp", 0.65915, True),
        ("rdp-classic", 0.82273, True),
        ("zcdp", 1.15880, False),
        ("advanced", 7.45773, False),
        ("basic", 123.457, False),
    ],
)
def test_epsilon_by_every_accountant(accountant: str, epsilon: float, valid: bool) -> None:
    found = calculate("epsilon", *COMMON, "--delta", "1e-5", "--accountant", accountant)
    assert found["epsilon"] == pytest.approx(epsilon, rel=1e-4)
    assert (found["noise"], found["steps"], found["accountant"]) == (6.0, 10_000, accountant)
    assert found["valid"] is valid
    assert (found["because"] is None) is valid


def test_delta_is_the_way_back() -> None:
    found = calculate("delta", *COMMON, "--epsilon", "0.60086")
    assert found["delta"] == pytest.approx(1e-5, rel=1e-3)


def test_random_allocation_counts_blocks_and_follows_a_schedule_of_noise() -> None:
    common = ["epsilon", "--sampling", "random-allocation", "--sampling-rate", "0.1"]
    common += ["--steps", "10", "--delta", "1e-5"]
    found = calculate(*common, "--noise", "1")
    assert found["epsilon"] == pytest.approx(2.1892, rel=1e-3)
    assert "hidden in which round" in found["because"]
    assert calculate(*common, "--noise", "linear:2:1", "--accountant", "rdp")["epsilon"] < 2.1892
    with pytest.raises(ConfigError, match="under replace-one is not accounted"):
        calculate(*common, "--noise", "1", "--adjacency", "replace-one")


def test_orders_of_the_papers() -> None:
    few = calculate("delta", *COMMON, "--epsilon", "1.31", "--accountant", "rdp-classic", "--orders", "2-32")
    many = calculate("delta", *COMMON, "--epsilon", "1.31", "--accountant", "rdp-classic")
    assert few["delta"] > many["delta"]


@pytest.mark.slow
def test_noise_for_a_budget_keeps_it() -> None:
    found = calculate("noise", "--sampling-rate", ".01", "--steps", "1000", "--epsilon", "1", "--delta", "1e-5")
    assert found["epsilon"] <= 1
    assert found["epsilon"] == pytest.approx(1, rel=1e-3)
    again = calculate(
        "epsilon", "--sampling-rate", ".01", "--steps", "1000", "--noise", str(found["noise"]), "--delta", "1e-5"
    )
    assert again["epsilon"] == pytest.approx(found["epsilon"])


@pytest.mark.slow
def test_rounds_for_a_budget_keep_it() -> None:
    found = calculate("rounds", "--sampling-rate", ".01", "--noise", "6", "--epsilon", ".6", "--delta", "1e-5")
    assert found["rounds"] == found["steps"]
    assert found["rounds"] == pytest.approx(9975, abs=15)
    assert found["epsilon"] <= 0.6


def test_fixed_size_sampling_has_a_bracket() -> None:
    words = ["--sampling-rate", ".5", "--noise", "1.2", "--steps", "11", "--sampling", "fixed-size"]
    found = calculate("epsilon", *words, "--adjacency", "replace-one", "--delta", "1e-3")
    assert (found["at_least"], found["epsilon"]) == pytest.approx((18.09, 18.67), abs=0.01)


def test_shuffled_batches_and_no_sampling() -> None:
    words = [*COMMON, "--delta", "1e-5", "--sampling", "shuffled"]
    shuffled = calculate("epsilon", *words, "--adjacency", "zero-out")
    none = calculate("epsilon", "--noise", "6", "--steps", "100", "--delta", "1e-5", "--sampling", "none")
    assert shuffled["epsilon"] == pytest.approx(none["epsilon"]) == pytest.approx(8.0037, abs=1e-3)
    with pytest.raises(ConfigError, match=r"under add-or-remove is not accounted.*take replace-one or zero-out"):
        calculate("epsilon", *words)


def test_the_adjacency_is_named_and_a_large_delta_is_warned_of() -> None:
    words = ["epsilon", "--noise", "6", "--sampling-rate", ".1", "--delta", "1e-3"]
    found = calculate(*words, "--adjacency", "replace-one", "--units", "1000")
    assert (found["adjacency"], found["warnings"]) == ("replace-one", [])
    assert "1/5,000" in calculate(*words, "--units", "5000")["warnings"][0]
    assert "Warning: delta 0.001" in CliRunner().invoke(account.app, [*words, "--units", "5000"]).stdout


def test_two_levels_say_what_they_rest_on() -> None:
    words = ["--client-rate", ".1", "--sampling-rate", ".1", "--local-steps", "100", "--noise", "6"]
    found = calculate("epsilon", *words, "--steps", "100", "--delta", "1e-5", "--participation", "hidden")
    assert found["epsilon"] == pytest.approx(0.6224, abs=5e-4)
    assert "took part" in found["because"]
    seen = calculate("epsilon", *words, "--steps", "100", "--delta", "1e-5")
    assert seen["because"] is None
    assert found["epsilon_if_participation_shows"] == seen["epsilon"] == pytest.approx(2.450, abs=1e-3)


@pytest.mark.slow
def test_a_schedule_of_noise() -> None:
    words = ["--sampling-rate", ".1", "--noise", "linear:6:3", "--delta", "1e-5"]
    found = calculate("epsilon", *words, "--steps", "200")
    low, high = (
        calculate("epsilon", "--sampling-rate", ".1", "--noise", noise, "--steps", "200", "--delta", "1e-5")
        for noise in ("6", "3")
    )
    assert low["epsilon"] < found["epsilon"] < high["epsilon"]
    assert found["noise"] == "linear:6:3"
    rounds = calculate("rounds", *words, "--epsilon", str(found["epsilon"] / 2), "--planned", "200")
    assert 10 < rounds["rounds"] < 190


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["epsilon", "--noise", "0", "--delta", "1e-5"], "noise must be > 0"),
        (["epsilon", "--noise", "six", "--delta", "1e-5"], "six"),
        (["epsilon", "--noise", "1", "--delta", "2"], r"delta must be in \(0, 1\)"),
        (["epsilon", "--noise", "1", "--delta", "1e-5", "--local-steps", "3"], "--client-rate"),
        (["rounds", "--noise", "linear:2:1", "--epsilon", "1", "--delta", "1e-5"], "--planned"),
        (["noise", "--epsilon", "0", "--delta", "1e-5"], "epsilon must be > 0"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        calculate(*words)


@pytest.mark.parametrize("words", [["--sampling", "poison"], ["--steps", "0"]])
def test_a_wrong_choice_exits_with_2(words: list[str]) -> None:
    ran = CliRunner().invoke(account.app, ["epsilon", "--noise", "1", "--delta", "1e-5", *words])
    assert ran.exit_code == 2


def test_for_people_there_is_a_table() -> None:
    words = ["epsilon", "--noise", "6", "--sampling-rate", ".1", "--delta", "1e-5", "--accountant", "zcdp"]
    ran = CliRunner().invoke(account.app, words)
    assert "epsilon" in ran.stdout
    assert re.search(r"sampling +poisson\s+sampling rate +0.1", ran.stdout), "it can be read without the command"
    assert "Not a bound: zCDP" in ran.stdout


# The ledger


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with Ledger(tmp_path / "ledger.jsonl") as book:
        book.begin("runs/1", "quantile", "c0ffee")
        book.intend(1, [Charge("client", "release", Sampled("poisson", 0.1, Gaussian(2)))])
        book.commit(1, "ab" * 32)
    return tmp_path


def test_a_whole_ledger_verifies(run: Path) -> None:
    for target in (run, run / "ledger.jsonl"):
        ran = CliRunner().invoke(ledger.app, ["verify", str(target)])
        assert (ran.exit_code, "is intact: 3 lines" in ran.stdout) == (0, True)


def test_a_broken_ledger_is_named_with_exit_code_3(run: Path) -> None:
    path = run / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"rate":0.1', b'"rate":0.01'))
    ran = CliRunner().invoke(ledger.app, ["verify", str(run)])
    assert ran.exit_code == 3
    assert "is broken: line 2 was edited" in ran.stdout
    ran = CliRunner().invoke(ledger.app, ["verify", str(run), "--json"])
    assert ran.exit_code == 3
    found = json.loads(ran.stdout)
    assert (found["whole"], found["broken"]) == (False, 2)
    assert CliRunner().invoke(ledger.app, ["show", str(run)]).exit_code == 3


def test_a_ledger_that_was_cut_off_shows_against_its_head(run: Path) -> None:
    path = run / "ledger.jsonl"
    head = json.loads(path.read_bytes().splitlines()[-1])["hash"]
    assert CliRunner().invoke(ledger.app, ["verify", str(run), "--head", head]).exit_code == 0
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert CliRunner().invoke(ledger.app, ["verify", str(run)]).exit_code == 0
    assert CliRunner().invoke(ledger.app, ["verify", str(run), "--head", head]).exit_code == 3


def test_a_ledger_can_be_shown(run: Path) -> None:
    ran = CliRunner().invoke(ledger.app, ["show", str(run)])
    assert [kind in ran.stdout for kind in ("open", "intent", "commit", "[gaussian, noise 2]")] == [True] * 4
    found = json.loads(CliRunner().invoke(ledger.app, ["show", str(run), "--json"]).stdout)
    assert [entry["kind"] for entry in found["entries"]] == ["open", "intent", "commit"]


def test_no_ledger_is_an_error(tmp_path: Path) -> None:
    ran = CliRunner().invoke(ledger.app, ["verify", str(tmp_path)])
    assert isinstance(ran.exception, LedgerError)
    assert "there is no ledger" in str(ran.exception)


def test_a_user_with_several_records_costs_more() -> None:
    known = ["epsilon", "--noise", "1", "--delta", "1e-6", "--steps", "1000", "--sampling-rate", "0.01"]
    found = calculate(*known, "--records-per-user", "4")
    assert found["epsilon"] == pytest.approx(10.0153, abs=1e-3)
    assert found["because"] == "at most 4 records of a user are used"
    with pytest.raises(ConfigError, match="--records-per-user 4 needs --sampling poisson"):
        calculate(*known, "--records-per-user", "4", "--sampling", "shuffled")


def test_a_rate_may_be_a_fraction_and_steps_may_be_called_rounds() -> None:
    words = ["epsilon", "--noise", "1.1", "--delta", "1e-5", "--accountant", "rdp"]
    assert calculate(*words, "--sampling-rate", "50/1000", "--rounds", "9") == calculate(
        *words, "--sampling-rate", "0.05", "--steps", "9"
    )


@pytest.mark.parametrize("option", ["--sampling-rate", "--client-rate"])
@pytest.mark.parametrize("rate", ["5/3", "-0.1", "1/0", "nan", "inf", "half"])
def test_a_rate_that_is_no_share_is_refused(option: str, rate: str) -> None:
    ran = CliRunner().invoke(account.app, ["epsilon", "--noise", "1", "--delta", "1e-5", f"{option}={rate}"])
    assert ran.exit_code == 2
    assert option in ran.output
