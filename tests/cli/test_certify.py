"""`shoal certify`: a certificate holds, and any change to it, or to what it is bound to, is found."""

import hashlib
import json
import random
import shutil
import sys
from contextlib import suppress

import pytest

from shoal.accounting import checker
from shoal.accounting.checker import certificate_file
from shoal.accounting.privacy_ledger import Charge, Ledger
from shoal.cli.main import main
from support.tiny import FEDAVG, PRIVATE, go_on, play

BESIDE = {"ledger": "ledger.jsonl", "config": "config.toml", "model": "model.safetensors"}


@pytest.fixture
def shell(monkeypatch, capsys):
    """`shoal ...` in this process: exit code, standard output, standard error."""

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return ended.value.code or 0, shown.out, shown.err

    return called


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run without sampling, whose epsilons have a closed form."""
    return play(tmp_path_factory.mktemp("runs"), PRIVATE | {"rounds": 2, "clients.sampling": "all"}).run


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / finished.name)


@pytest.fixture
def signed(run, shell, tmp_path):
    assert shell("keys", "operator", "--folder", tmp_path / "keys")[0] == 0
    assert shell("certify", run, "--key", tmp_path / "keys" / "operator.key")[0] == 0
    return run


def checked(run, **changes):
    evidence = {name: run / file for name, file in BESIDE.items()} | changes
    return checker.check(run / "certificate.json", **evidence)


def forged(run, change):
    """Change the certificate as someone would who also computes its digest anew."""
    path = run / "certificate.json"
    held = json.loads(path.read_bytes())
    change(held)
    held |= {"digest": certificate_file.digest_of(held), "signature": None}
    path.write_bytes(certificate_file.written(held))


@pytest.mark.slow
def test_a_signed_certificate_holds(signed, shell, tmp_path):
    code, out, _ = shell("certify", "--check", signed, "--public-key", tmp_path / "keys" / "operator.pub")
    assert code == 0
    assert out.splitlines()[-1] == "yes: every figure holds"
    page = (signed / "certificate.html").read_text(encoding="utf-8")
    assert "Signed (Ed25519)" in page
    assert "K = 12 is public" in page
    assert "Balle, Wang 2018, Theorem 8" in page
    assert "the server draws the noise" in page


def test_without_a_key_it_says_unsigned(run, shell, tmp_path):
    code, out, _ = shell("certify", run)
    assert code == 0
    assert "UNSIGNED" in out
    assert "UNSIGNED" in (run / "certificate.html").read_text(encoding="utf-8")
    assert shell("certify", "--check", run)[0] == 0
    shell("keys", "operator", "--folder", tmp_path / "keys")
    assert shell("certify", "--check", run, "--public-key", tmp_path / "keys" / "operator.pub")[0] == 1


@pytest.mark.slow
def test_a_change_of_one_character_anywhere_is_found(signed):
    path = signed / "certificate.json"
    text = path.read_text(encoding="utf-8")
    drawn = random.Random(1)
    for _ in range(150):
        at = drawn.randrange(len(text))
        other = drawn.choice([each for each in "0123456789abcdefA .-" if each != text[at]])
        path.write_text(text[:at] + other + text[at + 1 :], encoding="utf-8")
        with suppress(checker.BadInput):
            assert not checker.holds(checked(signed)), f"{text[at]!r} -> {other!r} at {at}"


@pytest.mark.parametrize("file", BESIDE.values())
def test_a_change_of_what_it_is_bound_to_is_found(signed, shell, file):
    content = bytearray((signed / file).read_bytes())
    content[len(content) // 2] ^= 1
    (signed / file).write_bytes(bytes(content))
    code, out, _ = shell("certify", "--check", signed)
    assert code == 1
    assert "NO" in out


def test_a_forger_who_computes_the_digest_is_found_by_the_figures(signed):
    forged(signed, lambda held: held["claims"][0].update(epsilon=held["claims"][0]["epsilon"] * 0.99))
    lines = checker.check(signed / "certificate.json")
    assert [line.what for line in lines if line.verdict == "no"] == ["client, release"]


def test_a_forger_who_drops_a_round_is_found_by_the_ledger(signed):
    forged(signed, lambda held: held["claims"][0]["chain"]["events"][0].update(times=1))
    assert any(line.verdict == "no" and "of the ledger" in line.words for line in checked(signed))


def rewritten(run, change):
    """Change the ledger's lines, and compute all hashes anew, also those in the certificate."""
    path, before = run / "ledger.jsonl", "0" * 64
    lines = change([json.loads(line) for line in path.read_text().splitlines()])
    for at, line in enumerate(lines):
        line |= {"n": at, "before": before}
        line["hash"] = before = hashlib.sha256(
            certificate_file.canonical({key: line[key] for key in line if key != "hash"})
        ).hexdigest()
    path.write_bytes(b"".join(certificate_file.canonical(line) + b"\n" for line in lines))
    forged(run, lambda held: held["hashes"].update(ledger={"head": before, "lines": len(lines)}))


def without_first_charge(lines):
    dropped = next(line for line in lines if line["kind"] == "intent")
    return [line for line in lines if line is not dropped and line["kind"] != "close"]


@pytest.mark.parametrize("also", [(), ("commit",)])
def test_a_forger_who_drops_a_charge_from_the_ledger_is_found_by_the_rounds(signed, also):
    def once(held):
        for claim in held["claims"]:
            if claim["chain"] is not None:
                claim["sampler_delta"] /= 2
                claim["chain"]["distance"] /= 2
                claim["chain"]["events"][0]["times"] = 1

    def change(lines):
        kept = without_first_charge(lines)
        return [line for line in kept if line["kind"] not in also or line["round"] > 1]

    forged(signed, once)
    rewritten(signed, change)
    said = [line.words for line in checked(signed) if line.verdict == "no"]
    assert said == ["round 1 was not charged" if also else "round 1 was released without a charge before"]


def with_field(lines):
    for line in lines:
        for charge in line.get("charges", ()):
            charge["times"] = 100
    return lines


def with_half_a_round(lines):
    """Both rounds in one line."""
    *_, last = (line for line in lines if line["kind"] == "intent")
    half = {"event": "repeat", "of": {"event": "compose", "of": [{"event": "gaussian", "noise": 1.0}]}, "count": 1.5}
    both = last | {"first": 1, "charges": [charge | {"event": half} for charge in last["charges"]]}
    return [*(line for line in lines if line["kind"] == "open"), both]


@pytest.mark.parametrize(
    ("change", "unknown"),
    [
        (lambda lines: [*lines[:-1], {"kind": "charged-more"}, lines[-1]], "lines of kind 'charged-more'"),
        (lambda lines: [*lines[:-1], lines[0] | {"run": "another"}, lines[-1]], "a ledger of several runs"),
        (with_field, "field 'times' of a charge"),
        (with_half_a_round, "count 1.5"),
    ],
)
def test_what_it_cannot_read_of_a_ledger_is_never_a_yes(signed, change, unknown):
    rewritten(signed, change)
    said = [line.words for line in checked(signed) if line.verdict == "unknown"]
    assert set(said) == {f"cannot be checked: this checker does not know {unknown}"}


def test_the_rounds_that_it_names_are_those_of_the_ledger(signed):
    forged(signed, lambda held: held.update(rounds=3))
    assert "it charges 2 rounds, not the 3 of the certificate" in [line.words for line in checked(signed)]


def test_an_empty_ledger_is_of_no_run(signed):
    def nothing(held):
        held.update(run=None, claims=[], rounds=0)
        held["hashes"].update(config=None)

    forged(signed, nothing)
    rewritten(signed, lambda lines: [])
    forged(signed, lambda held: held["hashes"]["ledger"].update(head=""))
    assert not checker.holds(checker.check(signed / "certificate.json", signed / "ledger.jsonl"))


def test_the_model_of_another_run_is_not_certified(run, shell):
    (run / "model.safetensors").write_bytes(b"another")
    code, _, err = shell("certify", run)
    assert code != 0
    assert "is not the model that this run wrote" in err


def test_the_ledgers_closing_line_binds_the_model(signed):
    """A forger swaps the model and whatever of the certificate names it."""
    other = signed / "model.safetensors"
    other.write_bytes(other.read_bytes() + b" ")
    digest = hashlib.sha256(other.read_bytes()).hexdigest()
    forged(signed, lambda held: held["hashes"].update(model=digest))
    assert [line.words for line in checked(signed) if line.verdict == "no"] == [
        "its closing line names another model"
    ]


def test_nor_does_a_changed_description_get_another_model_certified(run, shell):
    other, description = run / "model.safetensors", run / "model.json"
    before = hashlib.sha256(other.read_bytes()).hexdigest()
    other.write_bytes(other.read_bytes() + b" ")
    after = hashlib.sha256(other.read_bytes()).hexdigest()
    description.write_text(description.read_text().replace(before, after))
    code, _, err = shell("certify", run)
    assert code != 0
    assert "is not the model that this run wrote" in err


def without_model(lines):
    """The ledger of an earlier version."""
    return [
        {key: value for key, value in line.items() if (line["kind"], key) != ("close", "model")} for line in lines
    ]


def test_a_ledger_of_an_earlier_version_is_certified_with_one_assumption_more(signed, shell):
    rewritten(signed, without_model)
    assert checker.holds(checked(signed))
    (signed / "certificate.json").unlink()
    (signed / "checkpoint" / "state.safetensors").unlink()  # it names a head of the newer ledger
    assert shell("certify", signed)[0] == 0
    assumed = json.loads((signed / "certificate.json").read_bytes())["assumptions"]
    assert len([words for words in assumed if "the model is the one that the run wrote" in words]) == 1


def test_a_finished_run_that_is_resumed_keeps_its_model_and_its_closing_line(run):
    before = {name: (run / name).read_bytes() for name in ("ledger.jsonl", "model.safetensors")}
    go_on(run)
    assert {name: (run / name).read_bytes() for name in before} == before
    (run / "model.safetensors").unlink()  # as if it had been killed before it was written
    go_on(run)
    closing = json.loads((run / "ledger.jsonl").read_text().splitlines()[-1])
    assert closing["model"] == hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


def test_an_unknown_event_is_never_a_yes(signed, shell):
    forged(signed, lambda held: held["claims"][0]["chain"]["events"].append({"event": {"event": "new"}, "times": 1}))
    code, out, _ = shell("certify", "--check", signed / "certificate.json")
    assert code == 1
    assert "cannot be checked: this checker does not know event 'new'" in out


def test_a_site_is_bound_by_its_ledgers_head(run, shell, tmp_path):
    from shoal.accounting.events import Gaussian

    path = tmp_path / "north.jsonl"
    with Ledger(path) as ledger:
        ledger.begin("north", "every run", "")
        ledger.intend(1, [Charge("client", "release", Gaussian(1.5))], run=run.name)
    assert shell("certify", run, "--site", f"north={path}")[0] == 0
    with Ledger(path) as ledger:
        ledger.intend(2, [Charge("client", "release", Gaussian(1.5))], run="another run")
    assert shell("certify", "--check", run, "--site", f"north={path}")[0] == 0
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:1]))
    assert shell("certify", "--check", run, "--site", f"north={path}")[0] == 1


def test_a_second_ledger_under_a_sites_name_is_never_a_yes(signed, tmp_path):
    from shoal.accounting.events import Gaussian

    path = tmp_path / "replaced.jsonl"
    with Ledger(path) as ledger:
        ledger.begin("north", "every run", "")
        ledger.intend(1, [Charge("client", "release", Gaussian(1.5))], run=signed.name)
        entry = {"name": "north", "head": ledger.head, "lines": 2, "rounds": 1}
    forged(signed, lambda held: held["sites"].extend([{**entry, "head": "0" * 64}, entry]))
    assert not checker.holds(checked(signed, sites={"north": path}))


def test_a_run_that_proves_nothing_gets_a_certificate_that_says_so(shell, tmp_path):
    found = play(tmp_path, FEDAVG | {"rounds": 1}).run
    assert shell("certify", found)[0] == 0
    assert "Nothing is proven about this model" in (found / "certificate.html").read_text(encoding="utf-8")
    assert shell("certify", "--check", found)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "has no ledger.jsonl"),
        (["--check", "nowhere.json"], "cannot be read"),
        (["x", "--ledger", "y"], "--ledger is for --check"),
        (["x", "--site", "north"], "--site must be NAME=LEDGER"),
    ],
)
def test_bad_input_is_one_line(shell, arguments, said):
    code, _, err = shell("certify", *arguments)
    assert code == 2
    assert said in err
