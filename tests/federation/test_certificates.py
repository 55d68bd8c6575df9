"""The certificate of a federation binds the head of every site's own ledger, which sites send when the run ends."""

import json
import sys

import pytest

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal import release
from shoal.accounting import checker
from shoal.accounting.checker import certificate_file
from shoal.accounting.privacy_ledger import Record
from shoal.cli.main import main
from shoal.errors import ConfigError
from shoal.federation.federated_run import serve
from shoal.federation.messages import Payload
from shoal.federation.roster import Roster
from shoal.federation.terms import END
from shoal.report.certificate import certificate, write
from support.federations import BAD, full_cohort, served
from support.loopback import with_sites


def federation(folder, change=None):
    grid = with_sites(folder, 4)
    grid.changes = {} if change is None else {BAD: change}
    result, _ = served(folder, full_cohort(), grid)
    return result.run, {f"site-{n:02}": folder / f"site-{n}" / "ledger.jsonl" for n in range(4)}


def at_end(**values):
    return lambda kind, answer: Payload(values) if kind == END else answer


def checked(run, sites):
    return checker.check(run / "certificate.json", ledger=run / "ledger.jsonl", sites=sites)


def wrong(lines):
    return [(line.what, line.words) for line in lines if line.verdict == "no"]


@pytest.mark.slow
def test_every_sites_head_is_bound_and_checked(tmp_path):
    run, ledgers = federation(tmp_path)
    held = certificate(run)
    assert {site["name"]: site["head"] for site in held["sites"]} == {
        name: Record.read(path)[1].head for name, path in ledgers.items()
    }
    assert not [line for line in held["not_covered"] if "ledgers of" in line]
    assert held["release"] == release.CERTIFICATE_OF_SITES
    write(run, held)
    lines = checked(run, ledgers)
    assert checker.holds(lines)
    assert "and the heads of 4 sites" in next(line.words for line in lines if "closing line" in line.words)
    assert "site-00" not in (run / "ledger.jsonl").read_text(), "who takes part is no part of the ledger"


@pytest.mark.slow
def test_a_changed_head_is_found_by_the_ledger_and_by_the_site(tmp_path):
    run, ledgers = federation(tmp_path)
    write(run, certificate(run))
    path = run / "certificate.json"
    held = json.loads(path.read_bytes())
    held["sites"][0]["head"] = "0" * 64
    held["digest"] = certificate_file.digest_of(held)
    path.write_bytes(certificate_file.written(held))
    found = wrong(checked(run, ledgers))
    assert ("ledger", "its closing line names other heads of sites' ledgers") in found
    assert [what for what, _ in found] == ["ledger", "site site-00"]


@pytest.mark.slow
def test_a_ledger_that_is_not_the_sites_own_is_refused(tmp_path):
    run, ledgers = federation(tmp_path)
    write(run, certificate(run, ledgers))
    swapped = ledgers | {"site-00": ledgers["site-01"]}
    assert [what for what, _ in wrong(checked(run, swapped))] == ["site site-00"]
    with pytest.raises(ConfigError, match="lacks the head that the site sent"):
        certificate(run, swapped)


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [{"name": "site-01"}, {"name": "site-01", "head": "x"}, {"name": "site-01", "head": 3}, {"refused": "no"}],
)
def test_a_site_that_sends_no_head_is_named_as_not_covered(tmp_path, answer):
    run, ledgers = federation(tmp_path, at_end(**answer))
    held = certificate(run)
    (said,) = (line for line in held["not_covered"] if "ledgers of" in line)
    assert said.startswith("the ledgers of 1 of 4 sites")
    assert "site-01" in said
    held = certificate(run, {"site-01": ledgers["site-01"]})
    assert not [line for line in held["not_covered"] if "ledgers of" in line]
    write(run, held)
    assert checker.holds(checked(run, ledgers))


@pytest.mark.slow
def test_a_head_before_the_runs_own_charges_binds_no_complete_ledger(tmp_path):
    first = []

    def early(kind, answer):
        if kind != END:
            return answer
        first.append(json.loads((tmp_path / "site-1" / "ledger.jsonl").read_text().splitlines()[0])["hash"])
        return Payload({"name": "site-01", "head": first[0]})

    run, ledgers = federation(tmp_path, early)
    write(run, certificate(run))
    ((what, words),) = wrong(checked(run, ledgers))
    assert what == "site site-01"
    assert words.endswith("lines after the certified head")


@pytest.mark.slow
def test_heads_that_come_after_the_run_was_closed_are_bound_by_another_closing_line(tmp_path):
    run, ledgers = federation(tmp_path, at_end(name="site-01"))
    grid = with_sites(tmp_path, 4)
    serve(grid, None, resume=run, no_guarantee=True)
    write(run, certificate(run))
    assert len(certificate(run)["sites"]) == 4
    assert checker.holds(checked(run, ledgers))


def test_a_site_without_a_place_is_not_bound_and_a_new_round_forgets_heads(tmp_path):
    roster = Roster(tmp_path, 2, 3)
    roster.admit("a", "first", 1)
    roster.assign_numbers()
    roster.admit("b", "late", 2)
    for identity in ("a", "b"):
        roster.keep_head(identity, "0" * 64)
    assert roster.heads == [("first", "0" * 64)]
    roster.forget_heads()
    assert Roster(tmp_path, 2, 3).heads == []


@pytest.mark.slow
def test_a_head_of_an_earlier_end_is_not_bound(tmp_path, monkeypatch):
    """As after a run that failed and was resumed, where one site does not answer at the second end."""
    assign, planted = Roster.assign_numbers, []

    def with_old_heads(roster):
        assign(roster)
        if not planted:
            planted.extend(roster.members)
            for identity in planted:
                roster.keep_head(identity, "1" * 64)

    monkeypatch.setattr(Roster, "assign_numbers", with_old_heads)
    run, ledgers = federation(tmp_path, at_end(name="site-01"))
    assert len(planted) == 4
    assert {site["name"] for site in certificate(run)["sites"]} == ledgers.keys() - {"site-01"}


@pytest.mark.slow
def test_a_site_that_leaves_once_it_has_answered_is_bound(tmp_path):
    gone = []
    grid = with_sites(tmp_path, 4)

    def leave(kind, answer):
        if kind == END:
            gone.append(grid.sites.pop(BAD))
        return answer

    grid.changes = {BAD: leave}
    run = served(tmp_path, full_cohort(), grid)[0].run
    gone[0].close()
    assert len(certificate(run)["sites"]) == 4


@pytest.mark.slow
def test_the_page_and_the_command_say_so(tmp_path, monkeypatch, capsys):
    run, _ = federation(tmp_path)
    monkeypatch.setattr(sys, "argv", ["shoal", "certify", str(run)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    capsys.readouterr()
    assert (run / "certificate.html").read_text(encoding="utf-8").count("sent by the site at the run") == 4
