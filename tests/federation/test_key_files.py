"""Keys and certificates after their first day: renewed, rotated, revoked, listed, with passwords, no restart."""

import json
import shutil
import socket
import ssl
import subprocess
import sys
from base64 import b64encode
from datetime import timedelta

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.cli import join
from shoal.cli.main import main
from shoal.cli.serve import open_link
from shoal.errors import ConfigError
from shoal.federation import key_files, key_watch
from shoal.federation.flower.node import Endpoint, JoinError, Link, _refuse_permanent
from shoal.federation.flower.superlink import identity
from shoal.federation.key_files import (
    authorities,
    fingerprint,
    has_password,
    read_certificates,
    read_public_key,
    read_site_key,
    read_sites,
    warn_of_end,
)
from shoal.federation.key_making import make_authority, make_site, renew, revoke, rotate_site
from shoal.federation.key_watch import KeyWatch
from shoal.federation.roster import Roster

PASSWORD = b"correct horse"


@pytest.fixture
def days(monkeypatch):
    """Lets time pass for certificates."""
    start = key_files.now()

    def later(days):
        monkeypatch.setattr(key_files, "now", lambda: start + timedelta(days=days))

    later(0)
    return later


@pytest.fixture
def folder(tmp_path):
    """The coordinator's keys, for two sites whose private keys lie beside them."""
    make_authority(tmp_path / "keys", ["127.0.0.1"], 90)
    for name in ("north", "south"):
        _, public = make_site(tmp_path, name)
        shutil.copy(public, tmp_path / "keys" / "sites")
    return tmp_path / "keys"


def shoal(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["shoal", *map(str, words)])
    with pytest.raises(SystemExit) as done:
        main()
    said = capsys.readouterr()
    return done.value.code, said.out + said.err


# ---------------------------------------------------------------- certificates end


def test_a_certificate_is_warned_of_30_days_before_its_end_and_refused_after(folder, days):
    said = []
    warn_of_end(folder / "server.pem", said.append)
    assert said == []
    days(61)
    warn_of_end(folder / "server.pem", said.append)
    assert said[0].startswith(f"the certificate {folder / 'server.pem'} expires in 28 days, on ")
    assert said[0].endswith("; run: shoal keys renew")
    days(91)
    with pytest.raises(ConfigError, match=r"server\.pem expired on .*; run: shoal keys renew"):
        warn_of_end(folder / "server.pem", said.append)
    with pytest.raises(ConfigError, match=r"server\.pem expired on"):
        open_link("127.0.0.1", 0, folder, False, said.append)
    days(-1)
    with pytest.raises(ConfigError, match=r"server\.pem is valid from .* check the clock here"):
        warn_of_end(folder / "server.pem", said.append)


def test_serve_and_join_warn_when_they_start(folder, days, monkeypatch):
    said = []
    days(70)
    open_link("127.0.0.1", 0, folder, False, said.append)[0].close()
    assert "server.pem expires in 19 days" in said[0]
    monkeypatch.setattr(join, "report", said.append)
    days(3640)
    assert join._certificate(folder / "ca.pem") == (folder / "ca.pem").read_bytes()
    assert "ca.pem expires in 9 days" in said[-1]
    assert said[-1].endswith("ask the coordinator for its new ca.pem")
    days(3651)
    with pytest.raises(ConfigError, match=r"ca\.pem expired on .*; ask the coordinator for its new ca\.pem"):
        join._certificate(folder / "ca.pem")


def test_renewal_keeps_keys_and_addresses_and_needs_nothing_of_the_sites(folder, days):
    (before,), known = read_certificates(folder / "server.pem"), authorities(folder / "ca.pem")
    days(80)
    assert renew(folder, 365) == [folder / "server.pem"]
    (after,) = read_certificates(folder / "server.pem")
    assert after.not_valid_after_utc - before.not_valid_after_utc > timedelta(days=350)
    assert after.public_key() == before.public_key()
    kind = x509.SubjectAlternativeName
    assert after.extensions.get_extension_for_class(kind) == before.extensions.get_extension_for_class(kind)
    assert authorities(folder / "ca.pem") == known
    days(3400)
    assert renew(folder, 365) == [folder / "server.pem", folder / "ca.pem"]
    assert authorities(folder / "ca.pem") == known, "policies that name the coordinator still do"
    with pytest.raises(ConfigError, match="--days must be in 1 to 3650, got 0"):
        renew(folder, 0)


def test_the_coordinator_can_get_a_new_key(folder):
    (before,) = read_certificates(folder / "server.pem")
    assert renew(folder, 365, new_key=True) == [folder / "server.key", folder / "server.pem"]
    (after,) = read_certificates(folder / "server.pem")
    assert after.public_key() != before.public_key()
    assert (folder / "server.key").stat().st_mode & 0o777 == 0o600
    assert read_site_key(folder / "server.key").public_key() == after.public_key()


def test_a_certificate_that_ends_while_the_coordinator_runs_is_named_to_a_new_site(folder):
    """A site that was connected before goes on trying: the coordinator may renew it any moment."""
    error = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired")
    endpoint = Endpoint("fed.example.org:8000", read_site_key(folder.parent / "north.key"), b"", registers=False)
    with pytest.raises(JoinError, match=r"certificate of fed\.example\.org:8000 has expired: .* `shoal keys renew`"):
        _refuse_permanent(error, endpoint, connected=False)
    _refuse_permanent(error, endpoint, connected=True)


# ---------------------------------------------------------------- passwords


def test_a_key_with_a_password_opens_with_it_alone(tmp_path):
    private, _ = make_site(tmp_path, "north", PASSWORD)
    assert has_password(private)
    assert PASSWORD not in private.read_bytes()
    assert read_site_key(private, PASSWORD).public_key() == read_public_key(tmp_path / "north.pub")
    with pytest.raises(ConfigError, match="has a password: give --password-file, set SHOAL_KEY_PASSWORD"):
        read_site_key(private)
    with pytest.raises(ConfigError, match="or the password is wrong"):
        read_site_key(private, b"another")
    plain, _ = make_site(tmp_path, "south")
    assert not has_password(plain)
    read_site_key(plain, PASSWORD)  # one variable may serve several keys


def test_all_private_keys_of_the_coordinator_may_have_one(tmp_path):
    make_authority(tmp_path, ["127.0.0.1"], 90, PASSWORD)
    assert has_password(tmp_path / "ca.key")
    assert has_password(tmp_path / "server.key")
    with pytest.raises(ConfigError, match=r"ca\.key has a password"):
        renew(tmp_path, 90)
    renew(tmp_path, 90, PASSWORD, new_key=True)
    assert has_password(tmp_path / "server.key"), "a new key has the same"


@pytest.mark.slow
def test_a_password_comes_from_a_file_or_the_environment_never_from_the_command_line(tmp_path, monkeypatch, capsys):
    secret, file = tmp_path / "keys", tmp_path / "password"
    file.write_bytes(PASSWORD + b"\n")
    made = ["keys", "site", "north", "--folder", secret]
    assert shoal(monkeypatch, capsys, *made, "--password-file", file)[0] == 0
    read_site_key(secret / "north.key", PASSWORD)
    monkeypatch.setenv("SHOAL_KEY_PASSWORD", PASSWORD.decode())
    assert shoal(monkeypatch, capsys, "keys", "rotate", "north", "--folder", secret)[0] == 0
    read_site_key(secret / "north.key", PASSWORD)
    monkeypatch.delenv("SHOAL_KEY_PASSWORD")
    code, said = shoal(monkeypatch, capsys, "keys", "site", "south", "--folder", secret, "--password")
    assert (code, "--password needs a terminal" in said) == (2, True)
    assert not (secret / "south.key").exists()
    file.write_text("\n")
    code, said = shoal(monkeypatch, capsys, *made, "--password-file", file)
    assert (code, "is empty" in said) == (2, True)
    code, said = shoal(monkeypatch, capsys, *made, "--password-file", tmp_path / "none")
    assert (code, "cannot be read" in said) == (2, True)


@pytest.mark.slow
def test_a_terminal_asks_twice_for_a_new_password_and_once_for_an_old_one(tmp_path, monkeypatch, capsys):
    typed = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("getpass.getpass", lambda _words: typed.pop(0))
    typed += ["one", "other"]
    made = ["keys", "coordinator", "127.0.0.1", "--folder", tmp_path, "--password"]
    code, said = shoal(monkeypatch, capsys, *made)
    assert (code, "the passwords differ" in said) == (2, True)
    typed += ["one", "one", "one"]
    assert shoal(monkeypatch, capsys, *made)[0] == 0
    assert shoal(monkeypatch, capsys, "keys", "renew", "--folder", tmp_path)[0] == 0
    assert typed == []


# ---------------------------------------------------------------- a running coordinator


@pytest.fixture
def running(folder):
    """A link over TLS that follows its folder, what it said, and the sites that may connect."""
    said = []
    link, names = open_link("127.0.0.1", 0, folder, False, said.append)
    watch = KeyWatch(folder, link, names, identity, said.append)
    ca = (folder / "ca.pem").read_bytes()

    def endpoint(name):
        return Endpoint(f"127.0.0.1:{link.port}", read_site_key(folder.parent / f"{name}.key"), ca, registers=False)

    yield link, names, watch, said, endpoint
    link.close()


def connected(link, names):
    return sorted(names[identity(node.public_key)] for node in link.get_nodes())


def test_a_revoked_site_is_out_at_once_and_stays_out(running, folder):
    link, names, watch, said, endpoint = running
    with Link(endpoint("north")) as north, Link(endpoint("south")):
        watch.look()
        assert connected(link, names) == ["north", "south"]
        kept = revoke(folder, "north")
        watch.look()
        assert connected(link, names) == ["south"]
        assert any(line.startswith("site north: its key ") and "may not join any more" in line for line in said)
        with pytest.raises(httpx.HTTPError):  # refused, or its connection is closed while it asks
            north.pull()
        assert connected(link, names) == ["south"]
    with pytest.raises(httpx.HTTPStatusError), Link(endpoint("north")):
        pass
    shutil.copy(kept, folder / "sites" / "other.pub")  # under another name it is the same key
    watch.look()
    assert read_sites(folder).keys() == {"south"}
    with pytest.raises(httpx.HTTPStatusError), Link(endpoint("north")):
        pass
    with pytest.raises(ConfigError, match=r"there is no site north in .*; sites: other, south"):
        revoke(folder, "north")


def test_a_key_may_be_revoked_under_two_names(folder):
    shutil.copy(folder / "sites" / "north.pub", folder / "sites" / "twin.pub")
    with pytest.raises(ConfigError, match=r"twin\.pub holds the same key as another site's file"):
        read_sites(folder)
    for name in ("north", "twin"):
        revoke(folder, name)
    (folder / "revoked" / "again.pub").write_bytes(next((folder / "revoked").glob("north*")).read_bytes())
    assert read_sites(folder).keys() == {"south"}


def test_a_key_revoked_before_the_first_look_is_out_too(folder):
    said = []
    link, names = open_link("127.0.0.1", 0, folder, False, said.append)
    try:
        revoke(folder, "north")  # after the keys were read, before anybody looks after them
        KeyWatch(folder, link, names, identity, said.append).look()
        assert sorted(names.values()) == ["south"]
        assert len(link._verifier.keys) == 1
    finally:
        link.close()


def test_a_change_that_cannot_be_applied_is_logged_once_and_tried_again(running, folder, monkeypatch):
    """Else the first failure would end the watch, and whoever is revoked later could still join."""
    _, names, watch, said, _ = running
    watch.look_again()
    revoke(folder, "north")

    def broken(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(key_watch, "read_sites", broken)
        watch.look_again()
        watch.look_again()
    assert [line for line in said if "could not be applied" in line] == [
        f"changes in {folder} could not be applied, and will be tried again: OSError: [Errno 24] Too many open files"
    ]
    assert sorted(names.values()) == ["north", "south"]
    watch.look_again()
    assert sorted(names.values()) == ["south"]


def test_a_renamed_key_keeps_a_name_of_the_coordinators_choice(running, folder):
    """Without one, its site would choose its own."""
    _, names, watch, said, _ = running
    (folder / "sites" / "north.pub").rename(folder / "sites" / "east.pub")
    watch.look()
    assert sorted(names.values()) == ["east", "south"]
    assert not any("may not join" in line for line in said)


def test_a_held_request_of_a_revoked_site_ends(running, folder):
    """It waits for messages, and must not count as present because of that."""
    link, names, watch, _, endpoint = running
    with Link(endpoint("north")) as north:
        state = link._state
        revoke(folder, "north")
        watch.look()
        state.last_seen[north.node] = state.clock  # as by a request that was authenticated just before
        assert connected(link, names) == []


def test_a_new_site_and_a_new_key_need_no_restart(running, folder):
    link, names, watch, _, endpoint = running
    _, public = make_site(folder.parent, "east")
    old = endpoint("south")
    _, rotated = rotate_site(folder.parent, "south")
    for path in (public, rotated):
        shutil.copy(path, folder / "sites")
    watch.look()
    with Link(endpoint("east")), Link(endpoint("south")):
        assert connected(link, names) == ["east", "south"]
    with pytest.raises(httpx.HTTPStatusError), Link(old):
        pass


def test_a_file_that_is_no_key_keeps_its_site_out_and_no_other(running, folder):
    link, names, watch, said, endpoint = running
    (folder / "sites" / "north.pub").write_text("ecdsa-sha2-nistp256 AAAA")
    watch.look()
    assert "key left out" in said[-2]
    with Link(endpoint("south")):
        assert connected(link, names) == ["south"]
    with pytest.raises(ConfigError, match=r"north\.pub is not a public key"):
        read_sites(folder)


def compressed(key):
    """A public key as `ssh-keygen` would write it if it compressed points, which OpenSSH forbids."""
    point = key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
    parts = (b"ecdsa-sha2-nistp256", b"nistp256", point)
    return b"ecdsa-sha2-nistp256 " + b64encode(b"".join(len(part).to_bytes(4, "big") + part for part in parts))


def test_a_key_with_a_compressed_point_does_not_end_the_watch(running, folder):
    """The parser calls that not implemented."""
    link, names, watch, said, endpoint = running
    (folder / "sites" / "west.pub").write_bytes(compressed(read_public_key(folder / "sites" / "north.pub")))
    watch.look()
    assert "west.pub is not a public key" in said[-1]
    with Link(endpoint("south")):
        assert connected(link, names) == ["south"]


def served_certificate(link, folder):
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    wire = socket.create_connection(("127.0.0.1", link.port), timeout=60)
    with context.wrap_socket(wire, server_hostname="127.0.0.1") as tls:
        return x509.load_der_x509_certificate(tls.getpeercert(binary_form=True))


def test_a_renewed_certificate_is_served_without_a_restart(running, folder):
    link, _, watch, said, endpoint = running
    renew(folder, 365, new_key=True)
    watch.look()
    assert served_certificate(link, folder) == read_certificates(folder / "server.pem")[0]
    with Link(endpoint("north")):
        pass
    good = read_certificates(folder / "server.pem")[0]
    (folder / "server.pem").write_text("half of a certificate")
    watch.look()
    assert said[-1].startswith("the certificate stays as it was")
    assert served_certificate(link, folder) == good


def test_only_what_changed_is_read_again(running, monkeypatch):
    _, _, watch, said, _ = running
    watch.look()
    monkeypatch.setattr("shoal.federation.key_watch.read_sites", None)
    before = list(said)
    watch.look()
    assert said == before


def test_a_site_with_a_new_key_keeps_its_place_and_strikes(tmp_path):
    roster = Roster(tmp_path, places=1, strikes=3)
    member = roster.admit("old key", "north", 1)
    roster.assign_numbers()
    roster.strike(member)
    assert roster.admit("stranger", "north", 2) is None, "a name that a site gives itself proves nothing"
    assert roster.admit("new key", "north", 3, rotated=True) is member
    assert roster.members == {"new key": member}
    assert (member.number, member.strikes, member.node) == (0, 1, 3)
    assert Roster(tmp_path, 1, 3).members.keys() == {"new key"}


def test_a_new_key_under_the_name_of_a_dropped_site_is_a_new_site(tmp_path):
    roster = Roster(tmp_path, places=1, strikes=3)
    roster.admit("old key", "north", 1)
    roster.drop("old key", "north")
    member = roster.admit("new key", "north", 2, rotated=True)
    assert (member.dropped, member.agreed) == (False, True)
    assert roster.members["old key"].dropped


def test_a_dropped_site_may_have_been_asked_also_once_it_is_invited_again(tmp_path):
    roster = Roster(tmp_path, places=1, strikes=3)
    roster.admit("key", "north", 1)
    roster.drop("key", "north")
    assert not roster.may_have_been_asked("key", "north"), "it was dropped before it had a number"
    roster.readmit("key")
    roster.admit("key", "north", 1)
    roster.assign_numbers()
    roster.drop("key", "north")
    roster.readmit("key")
    again = Roster(tmp_path, places=1, strikes=3)
    assert again.may_have_been_asked("key", "north")
    assert again.may_have_been_asked("new key", "north")
    assert not again.may_have_been_asked("another", "south")
    assert not again.may_have_been_asked("another", None)
    assert again.admit("another", "south", 2) is not None, "until it agrees, its place is free"
    again.assign_numbers()
    assert again.admit("key", "north", 1) is None


# ---------------------------------------------------------------- the command line


def test_rotation_keeps_the_old_pair_and_wants_one_to_rotate(tmp_path):
    private, public = make_site(tmp_path, "north")
    old = private.read_bytes(), public.read_bytes()
    assert rotate_site(tmp_path, "north") == (private, public)
    assert ((tmp_path / "north.key.old").read_bytes(), (tmp_path / "north.pub.old").read_bytes()) == old
    assert private.read_bytes() != old[0]
    with pytest.raises(ConfigError, match=r"there is no .*south\.key to replace"):
        rotate_site(tmp_path, "south")


@pytest.mark.slow
def test_the_list_shows_what_ends_and_what_is_revoked(folder, days, monkeypatch, capsys):
    revoke(folder, "north")
    days(75)
    code, said = shoal(monkeypatch, capsys, "keys", "list", "--folder", folder, "--json")
    found = {entry["what"] + " " + entry["state"]: entry for entry in json.loads(said)["keys"]}
    assert code == 0
    assert set(found) == {"authority valid", "coordinator expires in 14 days", "site valid", "site revoked"}
    assert found["site valid"]["fingerprint"] == fingerprint(read_public_key(folder / "sites" / "south.pub"))
    assert found["authority valid"]["fingerprint"] == authorities(folder / "ca.pem")[0]
    days(91)
    code, said = shoal(monkeypatch, capsys, "keys", "list", "--folder", folder)
    assert "expired" in said
    code, said = shoal(monkeypatch, capsys, "keys", "list", "--folder", folder.parent / "none")
    assert (code, "there are no keys in" in said) == (2, True)


@pytest.mark.slow
def test_revoke_and_renew_say_what_they_did(folder, monkeypatch, capsys):
    code, said = shoal(monkeypatch, capsys, "keys", "revoke", "north", "--folder", folder)
    assert (code, said.startswith("the key of north is revoked, and kept as ")) == (0, True)
    code, said = shoal(monkeypatch, capsys, "keys", "rotate", "--folder", folder)
    assert (code, said) == (0, f"written: {folder / 'server.key'}, {folder / 'server.pem'}\n")
    code, said = shoal(monkeypatch, capsys, "keys", "renew", "--folder", folder.parent)
    assert (code, said.count("\n")) == (2, 1)


def test_a_fingerprint_is_that_of_ssh_keygen(folder):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("there is no ssh-keygen here")
    path = folder / "sites" / "north.pub"
    shown = subprocess.run(["ssh-keygen", "-lf", path], capture_output=True, text=True, check=True).stdout
    assert fingerprint(read_public_key(path)) in shown
