"""The ledger never forgets: it survives crashes, and shows every line that was touched."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.accounting import accountants, hash_chain, privacy_ledger
from shoal.accounting.events import NOTHING, Gaussian, Sampled, Unbounded
from shoal.accounting.leaves import leaves
from shoal.accounting.privacy_ledger import Charge, Ledger, Record, verify
from shoal.errors import LedgerError, ShoalError

STEP = Sampled("poisson", 0.1, Gaussian(2))
CHARGES = (
    Charge("client", "release", STEP),
    Charge("client", "server", Unbounded("the server sees each update")),
)


def written(path: Path, rounds: int = 3) -> list[bytes]:
    """A ledger of a few rounds, and its lines."""
    with Ledger(path) as ledger:
        ledger.begin("runs/1", "geyer-private", "c0ffee", {"epsilon": 8.0, "delta": 1e-5})
        for number in range(1, rounds + 1):
            ledger.intend(number, CHARGES)
            ledger.commit(number, f"{number:064x}")
        ledger.end("rounds")
    return path.read_bytes().splitlines(keepends=True)


def rehashed(raw: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    """The line changed by someone who knows how lines are sealed."""
    content = json.loads(raw)
    del content["hash"]
    change(content)
    number, kind, before = content.pop("n"), content.pop("kind"), content.pop("before")
    return hash_chain.seal(number, kind, before, content)[1]


# What it says


def test_a_ledger_says_again_what_it_was_told(tmp_path: Path) -> None:
    written(tmp_path / "ledger.jsonl")
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert ledger.opened is not None
        assert ledger.opened["algorithm"] == "geyer-private"
        assert ledger.closed is not None
        assert [intent.round for intent in ledger.charged] == [1, 2, 3]
        assert ledger.charged[0].charges == CHARGES
        assert ledger.last_committed is not None
        assert ledger.last_committed.round == 3
        assert leaves(ledger.charged_event("client", "release")) == {STEP: 3}
        assert ledger.head == verify(tmp_path / "ledger.jsonl").head


def test_the_line_of_a_private_selection_bears_the_time_of_the_runs_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own would show how long other trials ran after this one, and so how many there were."""
    path = tmp_path / "ledger.jsonl"
    ended = json.loads(written(path)[-1])["at"]

    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Later:
            return cls(2100, 1, 1, tzinfo=tz)

    monkeypatch.setattr(privacy_ledger, "datetime", Later)
    with Ledger(path) as ledger:
        ledger.select([{"epsilon": 3.0}])
    last = json.loads(path.read_bytes().splitlines()[-1])
    assert (last["kind"], last["at"]) == ("selected", ended)
    assert verify(path).whole


def test_a_round_run_again_is_charged_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.begin("runs/1", "a", "b")
        assert ledger.intend(1, CHARGES).attempt == 1
    with Ledger(path) as ledger:
        assert ledger.last_committed is None
        assert ledger.intend(1, CHARGES).attempt == 2
        assert ledger.commit(1, "m").attempt == 2
        assert leaves(ledger.charged_event("client", "release")) == {STEP: 2}


def test_what_no_line_says_is_not_proven(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert ledger.charged_event("record", "release") == NOTHING
        ledger.intend(1, CHARGES)
        silent = accountants.epsilon(ledger.charged_event("record", "release"), 1e-5)
        assert silent.epsilon is None
        assert silent.because == "the ledger does not say what round 1 did to this record"
        loud = accountants.epsilon(ledger.charged_event("client", "server"), 1e-5)
        assert loud.because == "the server sees each update"


def test_an_old_charge_that_no_theorem_covers_proves_nothing(tmp_path: Path) -> None:
    """An earlier version took it for one: budgets, private selections and live figures read it here."""
    shuffled = Charge("client", "release", Sampled("shuffled", 0.1, Gaussian(2)), "zero-out")
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.begin("runs/1", "of-a-plug-in", "c0ffee")
        ledger.intend(1, [shuffled])
        assert ledger.charged[0].charges == (shuffled,)
        assert "no theorem covers shuffled" in (
            accountants.unbounded(ledger.charged_event("client", "release")) or ""
        )


def test_nothing_is_committed_that_was_not_charged(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        with pytest.raises(LedgerError, match="no open intent"):
            ledger.commit(1, "m")
        ledger.intend(1, CHARGES)
        with pytest.raises(LedgerError, match="round 2 cannot be committed"):
            ledger.commit(2, "m")
        ledger.commit(1, "m")
        with pytest.raises(LedgerError, match="no open intent"):
            ledger.commit(1, "m")


def test_rounds_charged_together_are_charged_again_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        together = ledger.intend(5, CHARGES, first=3)
        assert (together.first, together.round, together.attempt) == (3, 5, 1)
    with Ledger(path) as ledger:
        assert ledger.pending == together
        assert [ledger.intend(number, CHARGES).attempt for number in (3, 4, 5, 6)] == [2, 2, 2, 1]
    assert [intent.rounds for intent in Record.read(path)[1].charged] == [3, 1, 1, 1, 1]


def test_another_run_cannot_use_the_ledger(tmp_path: Path) -> None:
    written(tmp_path / "ledger.jsonl")
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.begin("runs/1", "geyer-private", "c0ffee", {"epsilon": 8.0, "delta": 1e-5})
        with pytest.raises(LedgerError, match="config 'c0ffee', not 'decaf'"):
            ledger.begin("runs/1", "geyer-private", "decaf", {"epsilon": 8.0, "delta": 1e-5})


def test_the_intent_is_on_disk_before_the_call_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    synced: list[bytes] = []
    real = os.fsync
    with Ledger(path) as ledger:

        def watched(file: int) -> None:
            real(file)
            synced.append(path.read_bytes())

        monkeypatch.setattr(os, "fsync", watched)
        ledger.intend(1, CHARGES)
    assert len(synced) == 1
    assert b'"kind":"intent"' in synced[0]


def test_what_a_killed_process_left_is_on_disk_before_anything_is_built_upon_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "ledger.jsonl")
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert synced == [ledger._file]


# Who touched it


def test_an_untouched_ledger_is_whole(tmp_path: Path) -> None:
    lines = written(tmp_path / "ledger.jsonl")
    found = verify(tmp_path / "ledger.jsonl")
    assert (found.whole, found.lines, found.broken, found.torn) == (True, len(lines), None, False)


@pytest.mark.parametrize("number", range(1, 9))
def test_an_edited_line_is_named(tmp_path: Path, number: int) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = written(path)
    lines[number - 1] = lines[number - 1].replace(b'"at":"2', b'"at":"3')
    path.write_bytes(b"".join(lines))
    found = verify(path)
    assert (found.whole, found.broken) == (False, number)
    assert found.because == f"line {number} was edited: its hash does not match what it says"
    with pytest.raises(LedgerError, match=f"line {number} was edited"):
        Ledger(path)


def test_a_single_space_more_is_an_edit(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = written(path)
    lines[4] = lines[4].replace(b":", b": ", 1)
    path.write_bytes(b"".join(lines))
    assert verify(path).broken == 5


def edit(lines: list[bytes], number: int) -> None:
    lines[number - 1] = rehashed(lines[number - 1], lambda content: content.update(at="never"))


def drop(lines: list[bytes], number: int) -> None:
    del lines[number - 1]


def swap(lines: list[bytes], number: int) -> None:
    lines[number - 1], lines[number + 1] = lines[number + 1], lines[number - 1]


@pytest.mark.parametrize(
    ("change", "named", "number"),
    [(edit, "edited", number) for number in range(1, 8)]
    + [(drop, "dropped", number) for number in range(1, 8)]
    + [(swap, "reordered", number) for number in range(1, 7)],
)
def test_the_line_that_was_tampered_with_is_named(
    tmp_path: Path, change: Callable[[list[bytes], int], None], named: str, number: int
) -> None:
    """Where it was edited its hash was computed anew."""
    path = tmp_path / "ledger.jsonl"
    lines = written(path)
    change(lines, number)
    path.write_bytes(b"".join(lines))
    found = verify(path)
    assert (found.whole, found.broken) == (False, number)
    assert found.because is not None
    assert found.because.startswith(f"line {number} was {named}")


def test_a_repeated_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = written(path)
    lines.insert(4, lines[2])
    path.write_bytes(b"".join(lines))
    found = verify(path)
    assert (found.whole, found.broken) == (False, 5)
    assert found.because == "line 5 holds again what was written as line 3"


def test_lines_cut_off_the_end_show_against_a_known_head(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = written(path)
    head, middle = verify(path).head, json.loads(lines[3])["hash"]
    path.write_bytes(b"".join(lines[:6]))
    assert verify(path).whole
    assert verify(path, head=middle).whole
    found = verify(path, head=head)
    assert (found.whole, found.broken) == (False, 7)
    assert found.because is not None
    assert "cut off after line 6" in found.because


@pytest.mark.slow
@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    raw = bytearray(_SAMPLE)
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255).filter(lambda value: value != raw[place]))
    found = _verify_bytes(bytes(raw))
    last = place >= len(_SAMPLE) - len(_SAMPLE.splitlines(keepends=True)[-1])
    assert not found.whole or (last and found.torn)


@pytest.mark.slow
@settings(derandomize=True, database=None, deadline=None, max_examples=120)
@given(
    st.one_of(
        st.binary(max_size=400),
        st.lists(st.binary(max_size=60), max_size=8).map(b"\n".join),
        st.recursive(
            st.none() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.sampled_from(["n", "kind", "before", "hash", "x"]), inner, max_size=5)
            ),
        ).map(lambda value: json.dumps(value).encode() + b"\n"),
    )
)
def test_whatever_a_file_holds_it_is_read_or_refused_in_words(raw: bytes) -> None:
    found = _verify_bytes(raw)
    assert found.whole == (found.because is None)
    assert found.lines == 0


def _sample() -> bytes:
    raw, before = b"", hash_chain.START
    for number in range(5):
        line, one = hash_chain.seal(number, "intent", before, {"round": number, "attempt": 1, "charges": []})
        raw, before = raw + one, line.hash
    return raw


_SAMPLE = _sample()


def _verify_bytes(raw: bytes) -> hash_chain.Verification:
    import io

    return hash_chain.read(io.BytesIO(raw), lambda line: None)[0]


@pytest.mark.parametrize(
    "hostile",
    [
        b"[" * 900_000 + b"\n",
        b'{"n":' + b"9" * 900_000 + b"}\n",
        b"\0" * 5_000_000,
        b"a" * 5_000_000 + b"\n",
        b'{"n":0,"kind":"open","before":"x","hash":NaN}\n',
        b'{"n":0,"n":0,"kind":"open"}\n',
        '{"n":0,"kind":"\N{SNOWMAN}"}\n'.encode(),
    ],
)
def test_hostile_files_are_refused_without_harm(tmp_path: Path, hostile: bytes) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(hostile)
    assert not verify(path).whole
    with pytest.raises(LedgerError, match="line 1 was edited"):
        Ledger(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"charges": [{"unit": "client", "observer": "release", "event": {"event": "os.system('x')"}}]}, "no event"),
        ({"charges": [{"unit": "world", "observer": "release", "event": NOTHING.to_json()}]}, "no unit"),
        ({"charges": [7]}, "not subscriptable"),
        ({"first": -(10**15)}, "not a range of rounds"),
        ({"first": 2}, "not a range of rounds"),
        ({"round": "1"}, "whole numbers"),
        ({"round": {}}, "whole numbers"),
    ],
)
def test_a_sealed_line_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "ledger.jsonl"
    body = {"round": 1, "attempt": 1, "charges": [], **change}
    path.write_bytes(hash_chain.seal(0, "intent", hash_chain.START, body)[1])
    assert verify(path).whole
    with pytest.raises(LedgerError, match=rf"line 1 .* is malformed: .*{said}"):
        Ledger(path)


def test_a_ledger_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="not a regular file"):
        Ledger("/dev/zero")
    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger(tmp_path)
    with pytest.raises(LedgerError, match="cannot be read"):
        verify(tmp_path / "none.jsonl")


# Crashes


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_torn_last_line_is_kept_out_and_remembered(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = written(path)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:kept])
    found = verify(path)
    assert (found.whole, found.torn, found.lines) == (True, True, 5)
    with Ledger(path) as ledger:
        assert [intent.round for intent in ledger.charged] == [1, 2]
        ledger.intend(3, CHARGES)
    assert verify(path).whole
    assert not verify(path).torn
    recovered = json.loads(path.read_bytes().splitlines()[5])
    assert (recovered["kind"], recovered["dropped"]) == ("recovered", len(lines[5][:kept]))


def test_zeros_where_a_crash_lost_the_last_block_are_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = written(path)
    path.write_bytes(b"".join(lines[:5]) + b"\0" * 300 + lines[5][300:])
    assert verify(path).torn
    with Ledger(path) as ledger:
        assert len(ledger.charged) == 2


def test_a_torn_commit_leaves_its_round_charged_and_pending(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = written(path, rounds=1)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:30])
    with Ledger(path) as ledger:
        assert ledger.last_committed is None
        assert len(ledger.charged) == 1
        assert ledger.pending == ledger.charged[0]
        assert ledger.intend(1, CHARGES).attempt == 2


@pytest.mark.slow
def test_a_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.begin("runs/1", "a", "b")
        other = subprocess.run([sys.executable, "-c", _OPEN, str(path)], capture_output=True, text=True)
        assert other.returncode == 1
        assert "is in use by another process" in other.stdout
        with pytest.raises(LedgerError, match="in use"):
            Ledger(path)
    free = subprocess.run([sys.executable, "-c", _OPEN, str(path)], capture_output=True, text=True)
    assert (free.returncode, free.stdout) == (0, "")


_OPEN = textwrap.dedent("""
    import sys
    from shoal.accounting.privacy_ledger import Ledger
    from shoal.errors import LedgerError
    try:
        Ledger(sys.argv[1])
    except LedgerError as error:
        print(error)
        sys.exit(1)
""")


# A disk that takes no more


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_an_intent_that_cannot_be_written_is_an_error_before_any_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.begin("runs/1", "a", "b")
        before = path.read_bytes()
        with monkeypatch.context() as patched:

            def fails(*_: object) -> int:
                raise OSError(number, os.strerror(number))

            patched.setattr(os, call, fails)
            with pytest.raises(LedgerError, match="Nothing was released by this round") as raised:
                ledger.intend(1, CHARGES)
        assert os.strerror(number) in str(raised.value)
        assert not ledger.charged
        with pytest.raises(LedgerError, match="in doubt after a failed write"):
            ledger.intend(1, CHARGES)
    assert path.read_bytes() == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_ledger_recovers_from_a_full_disk_and_from_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Also where half a line was left, which could not be cut off while the disk was full."""
    path = tmp_path / "ledger.jsonl"
    write = os.write
    with Ledger(path) as ledger:
        ledger.begin("runs/1", "a", "b")
        before = path.read_bytes()
        with monkeypatch.context() as patched:

            def half(file: int, raw: bytes) -> int:
                write(file, bytes(raw)[:20])
                raise OSError(number, os.strerror(number))

            def stuck(*_: object) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patched.setattr(os, "write", half)
            patched.setattr(os, "ftruncate", stuck)
            with pytest.raises(LedgerError, match="Nothing was released by this round"):
                ledger.intend(1, CHARGES)
            if number == errno.ENOSPC:
                with pytest.raises(LedgerError, match="cannot be written"):
                    ledger.recover()
        assert path.read_bytes() != before
        ledger.recover()
        if number != errno.ENOSPC:
            with pytest.raises(LedgerError, match="in doubt after a failed write"):
                ledger.intend(1, CHARGES)
            return
        ledger.intend(1, CHARGES)
        ledger.recover()
        ledger.intend(2, CHARGES)
    assert path.read_bytes().startswith(before)
    assert verify(path).whole
    assert [intent.round for intent in Ledger.read(path)[1].charged] == [1, 2]


@pytest.mark.slow
def test_a_full_disk_in_the_middle_of_a_line_leaves_the_ledger_whole(tmp_path: Path) -> None:
    """The kernel really refuses here: the file may not grow past a limit that lies inside the second intent."""
    path = tmp_path / "ledger.jsonl"
    lines = written(tmp_path / "other.jsonl")
    limit = sum(map(len, lines[:3])) + 100
    child = textwrap.dedent(f"""
        import resource
        from shoal.accounting.events import Gaussian, Sampled, Unbounded
        from shoal.accounting.privacy_ledger import Charge, Ledger
        from shoal.errors import LedgerError
        CHARGES = {CHARGES!r}
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        with Ledger({str(path)!r}) as ledger:
            ledger.begin("runs/1", "geyer-private", "c0ffee", {{"epsilon": 8.0, "delta": 1e-5}})
            ledger.intend(1, CHARGES)
            ledger.commit(1, "{1:064x}")
            try:
                ledger.intend(2, CHARGES)
            except LedgerError as error:
                print(error)
    """)
    ran = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    assert "free some space" in ran.stdout, ran.stderr
    found = verify(path)
    assert (found.whole, found.torn, found.lines) == (True, False, 3)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != limit


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuses)
        with pytest.raises(LedgerError, match="Permission denied; make its folder writable"):
            Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(ShoalError, match="cannot be opened for writing"):
        Ledger(tmp_path / "no-such-folder" / "ledger.jsonl")


def test_a_closed_ledger_takes_nothing_more(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.close()
    with pytest.raises(LedgerError, match="it is closed"):
        ledger.intend(1, CHARGES)
