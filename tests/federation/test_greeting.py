"""A site that refused a round is greeted again: a full disk, a lost folder, and one that refuses for good."""

import errno
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.accounting import privacy_ledger
from shoal.accounting.privacy_ledger import Record
from shoal.federation import coordinator
from shoal.federation import site as site_module
from shoal.federation.consent import Requirements
from shoal.federation.flower.transport import key_identity
from shoal.federation.key_files import public_pem
from shoal.federation.messages import Payload
from shoal.federation.site import Owner, Site
from shoal.federation.site_records import reader
from shoal.federation.terms import FOLDER_LOST, FOLDER_OLD, ROUND, TERMS, Terms
from support.federations import BAD, asked, curator, full_cohort, in_rounds, served
from support.loopback import Loopback, Peer, with_sites

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def clients(result):
    return [line["clients"] for line in result.metrics]


def reports(result):
    found = [(line["round"], report) for line in result.metrics for report in line.get("reports", ())]
    return [(number, report["site"], report["what"]) for number, report in found]


@pytest.fixture
def full_once(monkeypatch, tmp_path):
    """The disk of site-01 is full for one write, once it has answered a round."""
    full = []

    def fill(line):
        if line["round"] == 1:
            full.append(True)

    def check(path):
        if full and tmp_path / "site-1" in path.parents:
            full.clear()
            raise NO_SPACE

    write_line, write_file = privacy_ledger._write_all, site_module.write_whole

    def line_written(file, raw):
        check(tmp_path / os.readlink(f"/proc/self/fd/{file}"))
        write_line(file, raw)

    def file_written(path, content):
        check(path)
        write_file(path, content)

    def at(place):
        if place == "ledger":
            monkeypatch.setattr(privacy_ledger, "_write_all", line_written)
        else:
            monkeypatch.setattr(site_module, "write_whole", file_written)
        return fill

    return at


@pytest.mark.slow
@pytest.mark.parametrize("place", ["ledger", "head"])
def test_a_site_whose_disk_was_full_once_takes_part_again(tmp_path, full_once, place):
    """It refuses that round, and no charge is missing, and none is there twice."""
    grid = with_sites(tmp_path, 4)
    result, _ = served(tmp_path, full_cohort() | {"rounds": 4}, grid, on_round=full_once(place))
    assert clients(result) == [4, 3, 4, 4]
    assert reports(result) == [(2, "site-01", "refused")]
    found, own = Record.read(tmp_path / "site-1" / "ledger.jsonl")
    assert found.whole
    assert own.charged[-1].round == 4


class Keyed(Loopback):
    """Sites known by their keys."""

    def get_nodes(self):
        return [Peer(node, public_pem(each.owner.key.public_key())) for node, each in self.sites.items()]


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["plain", "secure"])
@pytest.mark.parametrize("rotated", [False, True])
def test_a_site_that_lost_its_folder_takes_no_further_part(tmp_path, aggregation, rotated):
    """Its earlier rounds were charged on the lost disk; it would charge the later ones alone."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(5)]
    names = {key_identity(public_pem(key.public_key())): f"site-{number:02}" for number, key in enumerate(keys[:4])}
    names[key_identity(public_pem(keys[4].public_key()))] = "site-01"

    def started(number, folder, key):
        return Site(Owner(f"site-{number:02}", folder, reader("digits", part=number), key=keys[key]))

    grid = Keyed({100 + number: started(number, tmp_path / f"site-{number}", number) for number in range(4)})

    def restart(line):
        if line["round"] == 1:
            grid.sites[BAD].close()
            grid.sites[BAD] = started(1, tmp_path / "new", 4 if rotated else 1)

    given = full_cohort() | {"rounds": 3, "federation.aggregation": aggregation}
    result, _ = served(tmp_path, given, grid, on_round=restart, names=names)
    assert clients(result) == [4, 3, 3]
    answers = [payload.values.get("refused") for *about, payload in grid.wire if about == ["from", BAD, TERMS]]
    assert answers == [None, FOLDER_LOST]
    assert not (tmp_path / "new" / "ledger.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("node", [BAD, 104])
@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_a_site_whose_folder_is_from_within_the_run_takes_no_further_part(tmp_path, node, aggregation):
    """Of what it answered since then, its ledger would never charge what the server saw; it may be a new `node`."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(4)]
    names = {key_identity(public_pem(key.public_key())): f"site-{number:02}" for number, key in enumerate(keys)}

    def started(number):
        folder = tmp_path / f"site-{number}"
        return Site(Owner(f"site-{number:02}", folder, reader("digits", part=number), key=keys[number]))

    grid = Keyed({100 + number: started(number) for number in range(4)})
    folder, copy = tmp_path / "site-1", tmp_path / "copy"

    def restore(line):
        if line["round"] == 1:
            shutil.copytree(folder, copy)
        if line["round"] == 2:
            grid.sites.pop(BAD).close()
            shutil.rmtree(folder)
            shutil.copytree(copy, folder)
            grid.sites[node] = started(1)

    given = full_cohort() | {"rounds": 4, "federation.aggregation": aggregation}
    result, _ = served(tmp_path, given, grid, on_round=restore, names=names)
    assert clients(result) == [4, 4, 3, 3]
    answers = [payload.values.get("refused") for way, who, _, payload in grid.wire if (way, who) == ("from", node)]
    assert FOLDER_OLD in answers
    assert (folder / "ledger.jsonl").read_text() == (copy / "ledger.jsonl").read_text()


def test_a_site_whose_folder_knows_of_the_run_goes_on_after_another_one(tmp_path):
    """The rest of the first run was charged when it agreed to the second."""
    grid = with_sites(tmp_path, 4)
    served(tmp_path, curator(4), grid)
    terms = asked(grid, TERMS)
    first, second = (Payload(terms.values | {"round": 1, "member": member}) for member in (1, 0))
    other = replace(Terms.read(terms.text("terms")), run="other").text

    def answers(folder, *messages):
        found = []
        for message in messages:
            site = Site(Owner("site-00", tmp_path / folder, reader("digits", part=0)))
            found.append(site.answer(TERMS, message).values.get("refused"))
            site.close()
        return found

    between = Payload({"terms": other, "round": 0})
    assert answers("site-0", between, first) == [None, None]
    assert answers("lost", first, between, first) == [FOLDER_LOST, None, FOLDER_LOST]
    assert answers("late", second) == [None]


@pytest.mark.slow
def test_a_site_that_left_a_run_for_one_that_it_then_refused_goes_on_with_the_first(tmp_path):
    """The rest of the first run was charged, and too little was left for the second: the coordinator is no older."""
    grid = with_sites(tmp_path, 4)
    served(tmp_path, curator(4), grid)
    terms, message = asked(grid, TERMS), asked(grid, ROUND)
    other = Payload({"terms": replace(Terms.read(terms.text("terms")), run="other").text, "round": 0})
    folder, found = tmp_path / "new", []
    for epsilon, kind, said in (
        (6.0, TERMS, terms),  # which five rounds exceed
        (6.0, TERMS, other),
        (20.0, TERMS, Payload(terms.values | {"round": 1, "member": 1})),
        (20.0, ROUND, Payload(message.values | {"round": 1}, message.vectors)),
        (20.0, TERMS, Payload(terms.values | {"round": 2, "member": 1})),
    ):
        owner = Owner("new", folder, reader("digits", part=0), Requirements(epsilon=epsilon))
        site = Site(owner, joins=kind == TERMS)
        found.append(site.answer(kind, said).values.get("refused"))
        site.close()
    assert found == [None, "the total epsilon would exceed the owner's 6 (delta 1e-05)", None, None, None]
    assert Record.read(folder / "ledger.jsonl")[1].charged[-1].round == 4 + 1


def test_a_site_whose_ledger_has_lost_its_last_hash_answers_no_rounds(tmp_path):
    """The ledger may be an older copy, by which it would charge less. While it runs it knows better."""
    _, grid = served(tmp_path, curator(2))
    lines = []
    site = Site(Owner("site-00", tmp_path / "running", reader("digits", part=0)), lines.append)
    for kind in (TERMS, ROUND):
        assert "refused" not in site.answer(kind, asked(grid, kind)).values
    path = tmp_path / "running" / "head.json"
    path.unlink()
    assert "refused" not in site.answer(ROUND, asked(grid, ROUND)).values
    site.close()
    site = Site(site.owner, lines.append)
    lost = path.rename(tmp_path / "lost")
    again = Payload(asked(grid, TERMS).values | {"round": 1, "member": 1})
    assert "refused" in site.answer(TERMS, again).values
    assert "head.json is missing or an older copy" in lines[-1]
    lost.rename(path)
    assert "refused" not in site.answer(TERMS, again).values
    site.close()


def test_terms_alone_do_not_make_a_site_answer_rounds(tmp_path):
    """Without the ledger they are of a folder that was lost in part."""
    _, grid = served(tmp_path, curator(2))
    for name in ("head.json", "ledger.jsonl"):
        (tmp_path / "site-0" / name).unlink()
    site = Site(Owner("site-00", tmp_path / "site-0", reader("digits", part=0)), joins=False)
    refused = site.answer(ROUND, asked(grid, ROUND)).values["refused"]
    site.close()
    assert "not the terms that this site agreed to" in refused


@pytest.mark.slow
def test_a_site_that_refuses_every_round_is_asked_ever_more_rarely(tmp_path, monkeypatch):
    """A round takes half a second of this test's clock: pauses of 0, 1, 3, 7 seconds are 0, 2, 6, 14 rounds."""
    clock = [0.0]
    time = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(coordinator, "time", time)
    grid = with_sites(tmp_path, 4)
    grid.changes[BAD] = in_rounds(lambda _kind, _answer: Payload({"refused": "not today"}))
    given = full_cohort() | {"rounds": 20}
    result, _ = served(tmp_path, given, grid, on_round=lambda _line: time.sleep(0.5))
    messages = [payload for *about, payload in grid.wire if about == ["to", BAD, ROUND]]
    asked = [message.values["round"] for message in messages]
    assert asked == [0, 1, 3, 9]
    assert [number for number, _, _ in reports(result)] == [1, 2, 4, 10]
