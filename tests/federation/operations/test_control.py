"""`shoal sites` against a running coordinator: the socket is its owner's alone; drop and invite take effect."""

import json
import os
import socket
import stat
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.accounting.privacy_ledger import Record
from shoal.cli.main import main
from shoal.errors import ConfigError, RunError
from shoal.federation.federated_run import serve
from shoal.federation.flower.node import Endpoint, Link
from shoal.federation.flower.superlink import SuperLink
from shoal.federation.flower.transport import Transport, key_identity
from shoal.federation.key_files import public_pem, read_site_key, read_sites
from shoal.federation.key_making import make_site
from shoal.federation.operations import control
from shoal.federation.operations.control import ControlSocket, ask, running
from shoal.federation.operations.monitor import Monitor
from shoal.federation.operations.site_commands import SiteCommands
from shoal.federation.roster import Member, Roster
from shoal.federation.site import Owner, Site
from shoal.federation.site_records import reader
from shoal.federation.terms import END, FOLDER_LOST
from support.federations import full_cohort, served
from support.loopback import Loopback, Peer
from support.operations import STATUS, monitored

# ---------------------------------------------------------------- the socket


@pytest.fixture
def listening(tmp_path):
    monitor, lines = monitored()
    made = ControlSocket(tmp_path, monitor)
    yield tmp_path, monitor, lines
    made.close()


def test_only_the_owner_can_open_it(listening):
    run, _, _ = listening
    mode = (run / "control.sock").stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    assert running(run.parent) == [run]


def test_another_user_who_reaches_it_is_refused(listening, monkeypatch):
    """By the system's word for who is at the other end."""
    run, monitor, lines = listening
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert control.peer(one) == os.geteuid()
    monkeypatch.setattr(control, "peer", lambda _connection: os.geteuid() + 1)
    with pytest.raises(ConfigError, match="only the user who started the coordinator"):
        ask(run, command="list")
    assert monitor.counts == {"control-refused": 1}
    assert f"user {os.geteuid() + 1}" in lines[0][1]


def test_it_lists_the_sites(listening):
    run, _, _ = listening
    found = ask(run, command="list")
    assert (found["rounds_done"], found["rounds"], found["doing"]) == (4, 40, "round 5")
    assert [(site["name"], site["state"]) for site in found["sites"]] == [(s.name, s.state) for s in STATUS.sites]


@pytest.mark.parametrize("sent", [b"\n", b"[]\n", b"{}\n", b"[" * 60_000 + b"\n", b"\xff\n", bytes(70_000)], ids=len)
def test_a_malformed_request_is_answered_so_and_the_next_one_works(listening, sent):
    run, _, _ = listening
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(60)
        connection.connect(str(run / "control.sock"))
        connection.sendall(sent)
        assert json.loads(connection.makefile().readline()) == {"error": "malformed request"}
    assert ask(run, command="list")["rounds"] == 40


def test_a_long_path_and_a_socket_that_a_killed_coordinator_left(tmp_path):
    run = tmp_path / ("long-" * 30)
    run.mkdir()
    (run / "control.sock").write_text("left")
    monitor, _ = monitored()
    made = ControlSocket(run, monitor)
    try:
        assert ask(run, command="list")["rounds"] == 40
        assert running(tmp_path) == [run]
    finally:
        made.close()
    assert not (run / "control.sock").exists()
    with pytest.raises(ConfigError, match="no coordinator answers"):
        ask(run, command="list")


@pytest.mark.slow
def test_the_command(listening, monkeypatch, capsys):
    run, _, _ = listening

    def shoal(*words):
        monkeypatch.setattr(sys, "argv", ["shoal", "sites", *words, "--runs", str(run.parent)])
        with pytest.raises(SystemExit) as done:
            main()
        return done.value.code, capsys.readouterr()

    code, said = shoal("list")
    assert code == 0
    assert "4 of 40 rounds done; round 5" in said.out
    assert all(site.name in said.out and site.state in said.out for site in STATUS.sites)
    code, said = shoal("list", "--json")
    assert json.loads(said.out)["sites"][0]["name"] == "east"
    code, said = shoal("invite", str(run / "none.pub"))
    assert (code, said.err.count("\n")) == (2, 1)
    (run / "control.sock").unlink()
    code, said = shoal("list")
    assert code == 2
    assert "no coordinator is running in" in said.err


def test_a_site_whose_drop_cannot_be_written_is_not_dropped_and_the_run_goes_on(tmp_path):
    monitor, _ = monitored()
    roster = Roster(tmp_path / "run", 4, 3)
    roster.members["a1"] = Member("east", number=0, node=1, agreed=True)
    act = SiteCommands(roster, {}, None, monitor, lambda: (1, 1))

    def asked():
        answer = Future()
        monitor._commands.put(("drop", {"site": "east"}, answer))
        monitor.carry_out(act)
        return answer

    assert "cannot be written: No such file or directory" in str(asked().exception())
    assert roster.members["a1"] == Member("east", number=0, node=1, agreed=True)
    (tmp_path / "run").mkdir()
    assert asked().result()["message"].startswith("site east was dropped")
    assert Roster(tmp_path / "run", 4, 3).members["a1"].dropped


def test_an_error_of_the_system_is_one_line_for_who_asked(tmp_path):
    monitor, _ = monitored()
    answer = Future()
    monitor._commands.put(("drop", {}, answer))
    monitor.carry_out(lambda *_: Path(tmp_path / "none").read_text())
    with pytest.raises(RunError, match=r"^'drop' failed: \[Errno 2\] No such file or directory"):
        answer.result()


def test_a_running_link_lets_an_invited_key_in(tmp_path):
    """With the same keys and one more, as `invite` passes them on."""
    sites = {name: make_site(tmp_path, name) for name in ("one", "two")}
    keys = {name: public_pem(read_site_key(private).public_key()) for name, (private, _) in sites.items()}
    link = SuperLink("127.0.0.1", 0, None, [keys["one"]])
    transport = Transport(link, 2**20)
    try:
        address = f"127.0.0.1:{link.port}"
        one, two = (Endpoint(address, read_site_key(private), None, registers=False) for private, _ in sites.values())
        with pytest.raises(httpx.HTTPStatusError), Link(two):
            pass
        with Link(one) as first:
            assert transport.allow(list(keys.values()))
            with Link(two) as second:
                expected = {first.node: key_identity(keys["one"]), second.node: key_identity(keys["two"])}
                assert transport.connected() == expected
    finally:
        link.close()


# ---------------------------------------------------------------- what the commands do to a federation


class Keyed(Loopback):
    """Sites known by their keys, of which a grid lets only some join; `away` are not connected."""

    away: frozenset[int] = frozenset()
    allowed: frozenset[bytes] | None = None

    def get_nodes(self):
        peers = [Peer(node, public_pem(site.owner.key.public_key())) for node, site in self.sites.items()]
        may = [peer for peer in peers if self.allowed is None or peer.public_key in self.allowed]
        return [peer for peer in may if peer.node_id not in self.away]

    def allow(self, keys):
        self.allowed = frozenset(keys)


class Federation:
    """Four sites with keys, those in `away` not connected, and a coordinator that operators can ask."""

    def __init__(self, folder: Path, away=(), spare=0):
        (folder / "sites").mkdir()
        sites = {}
        for number in range(4 + spare):
            private, public = make_site(folder, f"site-{number:02}")
            if number < 4:
                public.rename(folder / "sites" / public.name)
            read, key = reader("digits", part=number % 4), read_site_key(private)
            sites[100 + number] = Site(Owner(private.stem, folder / f"own-{number}", read, key=key))
        self.grid = Keyed(sites)
        self.grid.away, keys = frozenset(away), read_sites(folder)
        self.grid.allow(keys.values())
        self.names = {key_identity(key): name for name, key in keys.items()}
        self.folder, self.lines, self.answers = folder, [], []
        self.monitor = Monitor(lambda _level, words, _facts: self._said(words), folder)
        self._when = []

    def when(self, words, command, **values):
        """Ask for something once the coordinator says this."""
        self._when.append((words, command, values))

    def run(self, **changes):
        given = full_cohort() | {"rounds": 3, "federation.deadline": 600.0} | changes
        result, _ = served(self.folder, given, self.grid, names=self.names, monitor=self.monitor)
        return result

    def _said(self, words):
        self.lines.append(words)
        for wanted in [each for each in self._when if each[0] in words]:
            self._when.remove(wanted)
            self.ask(*wanted[1:])

    def ask(self, command, values):
        threading.Thread(target=self._ask, args=(command, values), daemon=True).start()

    def _ask(self, command, values):
        try:
            self.answers.append(self.monitor.ask(command, values)["message"])
        except ConfigError as error:
            self.answers.append(str(error))


def clients(result):
    return [line["clients"] for line in result.metrics]


def audited(result):
    return [json.loads(line)["kind"] for line in (result.run / "audit.jsonl").read_text().splitlines()]


def kept(result):
    facts = json.loads((result.run / "sites.json").read_text())
    return {each["name"]: (each["number"], each["dropped"]) for key, each in facts.items() if key != "release"}


@pytest.mark.slow
def test_a_run_that_waits_for_a_site_that_never_comes_goes_on_once_it_is_dropped(tmp_path):
    federation = Federation(tmp_path, away={103})
    federation.when("waiting for sites: 3 of 4", "drop", site="site-03")
    result = federation.run()
    assert clients(result) == [3, 3, 3]
    assert federation.answers == ["site site-03 was dropped; the run goes on; sites left: 3"]
    assert audited(result) == ["joined"] * 3 + ["dropped"]
    assert kept(result)["site-03"] == (None, True)


@pytest.mark.slow
def test_a_round_that_waits_for_a_site_goes_on_once_it_is_dropped(tmp_path):
    """It has ten minutes to answer, and never does; the site learns that the run is over for it."""
    federation = Federation(tmp_path)

    def keep_back(kind, answer):
        if kind != "train.round":
            return answer
        federation.ask("drop", {"site": "site-01"})
        return None

    federation.grid.changes[101] = keep_back
    result = federation.run()
    assert clients(result) == [3, 3, 3]
    (report,) = result.metrics[0]["reports"]
    assert (report["site"], report["why"]) == ("site-01", "an operator dropped the site during the round")
    assert federation.grid.sites[101].ended == "dropped by the coordinator's operator"
    ends = [each.values for to, node, kind, each in federation.grid.wire if (to, node, kind) == ("to", 101, END)]
    assert ends[0]["round"] == 1, "it is charged for the round in progress, also where it was not drawn"
    assert kept(result)["site-01"] == (None, True)


@pytest.mark.slow
def test_a_site_that_is_dropped_before_a_round_is_run_again_is_not_charged_for_that(tmp_path):
    """The coordinator is killed in round 2. It goes on once the two sites that are dropped are not waited for."""
    federation = Federation(tmp_path)
    grid, monitor = federation.grid, federation.monitor

    def kill(line):
        if line["round"] == 2:
            raise KeyboardInterrupt

    given = full_cohort() | {"rounds": 3, "federation.deadline": 600.0}
    with pytest.raises(KeyboardInterrupt):
        served(tmp_path, given, grid, names=federation.names, monitor=monitor, on_round=kill)
    (run,) = (tmp_path / "served").iterdir()
    grid.away = frozenset({103})
    federation.when("waiting for sites: 3 of 4", "drop", site="site-02")
    federation.when("waiting for sites: 2 of 3", "drop", site="site-03")
    result = serve(grid, None, resume=run, names=federation.names, monitor=monitor, no_guarantee=True)
    assert clients(result) == [4, 2, 2]
    ends = [each.values for to, node, kind, each in grid.wire if (to, node, kind) == ("to", 102, END)]
    assert [(end["round"], end.get("repeats", 0)) for end in ends] == [(2, 0)]
    for site in grid.sites.values():
        site.close()
    charged = [Record.read(site.owner.folder / "ledger.jsonl")[1].charged for site in grid.sites.values()]
    assert [lines[-1].round for lines in charged] == [4, 4, 2, 2]


SECURE = {"federation.aggregation": "secure", "federation.threshold": 4}


@pytest.mark.slow
def test_with_threshold_all_an_invited_site_takes_the_place_of_a_dropped_one(tmp_path):
    """A site leaves between two rounds: none is begun, or charged, until there are four again."""
    federation = Federation(tmp_path, spare=1)
    grid = federation.grid

    def leave(line):
        if line["round"] == 1:
            grid.away = frozenset({102})

    federation.when("waiting for sites: 3 of 4", "drop", site="site-02")
    key = (tmp_path / "site-04.pub").read_text()
    federation.when("too few are left: invite another site", "invite", name="site-04", key=key)
    given = full_cohort() | SECURE | {"rounds": 3, "federation.deadline": 600.0}
    result, _ = served(tmp_path, given, grid, names=federation.names, monitor=federation.monitor, on_round=leave)
    assert clients(result) == [4, 4, 4]
    assert sorted(federation.answers) == [
        "site site-02 was dropped; too few sites are left, 3 of 4: the run waits until another one is invited; "
        "to end it: shoal sites drop site-02 --end",
        "site site-04 was invited; free places: 1 of 4",
    ]
    assert kept(result) == {f"site-{n:02}": (n, False) for n in (0, 1, 3)} | {
        "site-02": (None, True), "site-04": (2, False)
    }  # fmt: skip
    assert (tmp_path / "sites" / "site-04.pub").read_text() == key, "it is kept for a restart"


@pytest.mark.slow
def test_a_site_that_lost_its_folder_is_refused_also_once_it_is_dropped_and_invited_again(tmp_path):
    federation = Federation(tmp_path)
    grid, key = federation.grid, federation.grid.sites[102].owner.key

    def leave(line):
        if line["round"] == 1:
            grid.away = frozenset({102})
            grid.sites[102].close()
            grid.sites[102] = Site(Owner("site-02", tmp_path / "new", reader("digits", part=2), key=key))

    def come_back(keys):
        grid.away, grid.allowed = frozenset(), frozenset(keys)

    grid.allow = come_back
    federation.when("waiting for sites: 3 of 4", "drop", site="site-02")
    public = (tmp_path / "sites" / "site-02.pub").read_text()
    federation.when("too few are left: invite another site", "invite", name="site-02", key=public)
    federation.when(FOLDER_LOST, "drop", site="site-02", end=True)
    given = full_cohort() | SECURE | {"rounds": 3, "federation.deadline": 600.0}
    result, _ = served(tmp_path, given, grid, names=federation.names, monitor=federation.monitor, on_round=leave)
    assert (clients(result), result.stopped) == ([4], "sites")


@pytest.mark.slow
def test_with_threshold_all_the_run_may_end_with_the_model_that_it_has(tmp_path):
    """A site leaves in the second round: that has no sum, stays charged, and the model is the first round's."""
    federation = Federation(tmp_path)
    federation.grid.changes[102] = gone_in_round_2 = _Leaving(federation.grid, 102)
    federation.when("waiting for sites: 3 of 4", "drop", site="site-02")
    federation.when("too few are left: invite another site", "drop", site="site-02", end=True)
    result = federation.run(**SECURE)
    assert gone_in_round_2.left
    assert clients(result) == [4, 0]
    assert (result.stopped, result.rounds) == ("sites", 2)
    assert federation.answers == [
        "site site-02 was dropped; too few sites are left, 3 of 4: the run waits until another one is invited; "
        "to end it: shoal sites drop site-02 --end",
        "site site-02 was dropped; too few sites are left, the run ends after this round",
    ]
    assert (result.run / "model.safetensors").exists()
    assert "too few sites were left" in (result.run / "report.html").read_text()


class _Leaving:
    """A site that answers its first round and leaves for good in the second."""

    def __init__(self, grid, node):
        self.grid, self.node, self.rounds, self.left = grid, node, 0, False

    def __call__(self, kind, answer):
        self.rounds += kind == "train.round"
        if self.rounds < 2:
            return answer
        self.left, self.grid.away = True, frozenset({self.node})
        return None


@pytest.mark.slow
def test_what_cannot_be_dropped_or_invited_is_refused(tmp_path):
    federation = Federation(tmp_path, away={103})
    mine = (tmp_path / "sites" / "site-00.pub").read_text()
    ed25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGbPhiQgg+EUyUgDXyWKG8eXPnbNfxmbOzkSTGqXU1nC x"
    other, gone = _public(), _public()
    (tmp_path / "revoked").mkdir()
    (tmp_path / "revoked" / "gone-12345678.pub").write_text(gone)
    for values in (
        {"command": "drop", "site": "nobody"},
        {"command": "invite", "name": "gone", "key": gone},
        {"command": "drop", "site": "site-03", "end": True},
        {"command": "invite", "name": "twin", "key": mine},
        {"command": "invite", "name": "site-00", "key": other},
        {"command": "invite", "name": "../up", "key": other},
        {"command": "invite", "name": "new", "key": "nonsense"},
        {"command": "invite", "name": "new", "key": ed25519},
        {"command": "eat"},
        {"command": "drop", "site": "site-03"},
    ):
        federation.when("waiting for sites: 3 of 4", **values)
    federation.run()
    assert sorted(federation.answers) == sorted(
        [
            "'nobody' cannot be dropped: no such site takes part or may join; `shoal sites list` lists them",
            "--end needs a model to end with, but no round is done yet: stop the coordinator",
            "this key is already that of site site-00",
            f"{tmp_path / 'sites' / 'site-00.pub'} already exists and is not overwritten; move it away first",
            "'../up' is not a site's name: the file must be called NAME.pub",
            next(each for each in federation.answers if each.startswith("new.pub is not a public key")),
            "new.pub is not a key on a NIST curve; `shoal keys site` makes one",
            f"the key of gone was revoked, it is in {tmp_path / 'revoked'}: invite a new one",
            "unknown command 'eat'",
            "site site-03 was dropped; the run goes on; sites left: 3",
        ]
    )


def _public():
    from cryptography.hazmat.primitives import serialization

    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
