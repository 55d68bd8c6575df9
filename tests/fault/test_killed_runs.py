"""Killed, cut off or out of space: no model that the ledger does not know, no noise twice, nothing half written."""

import errno
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.accounting.privacy_ledger import Ledger, verify
from shoal.errors import LedgerError, RunError
from shoal.random.streams import Streams
from shoal.report.run_reader import read_run
from shoal.training.run_folder import CHECKPOINT, RunFolder
from support.deploy_children import said_by
from support.kill_run import Seen, look, main, read_ledger
from support.tiny import FEDAVG, PRIVATE, go_on, play, stopped_after

pytestmark = pytest.mark.slow


def kill_run(experiment, folder, *options):
    return json.loads(said_by(main, folder, experiment, folder, *options).splitlines()[-1])


# ---------------------------------------------------------------- kills


def test_a_private_run_killed_at_random_moments_keeps_every_promise(tmp_path):
    said = kill_run("random", tmp_path, "--kills", 10, "--seed", 1)
    assert said["kills"] == 10
    assert said["rounds released"] > 10
    assert said["charged again"] > 0
    for unit, epsilon in said["epsilon charged"].items():
        assert epsilon > said["epsilon of one attempt a round"][unit]


def test_a_private_run_killed_at_each_step_of_writing_keeps_every_promise(tmp_path):
    said = kill_run("steps", tmp_path)
    assert said["steps"] > 25
    left = said["left by kills"]
    assert left["a torn line in the ledger"] > 0
    assert left["a model written, its commit not"] > 0
    assert left["a file half written beside the old one"] > 0


def test_a_run_without_noise_ends_with_the_same_model_however_often_it_is_killed(tmp_path):
    said = kill_run("same", tmp_path, "--kills", 3, "--seed", 2)
    assert said["round at the last kill"] > 0


def test_one_of_several_ranks_killed_at_random_moments_ends_the_run_and_keeps_every_promise(tmp_path):
    """Each life on another number of ranks."""
    said = kill_run("ranks", tmp_path, "--kills", 3, "--seed", 3)
    assert said["rounds released"] > 3
    assert said["lives by lines said"].get("0", 0) == 0, "somebody says which rank has gone"


# ---------------------------------------------------------------- the order of a round


def test_a_round_is_charged_on_the_disk_before_its_noise_and_committed_after_its_model(tmp_path, monkeypatch):
    run = stopped_after(tmp_path, PRIVATE, 2)
    steps = []
    write, fsync, replace, generator = os.write, os.fsync, os.replace, Streams.generator

    def watched_write(file, content):
        steps.append("write " + json.loads(bytes(content))["kind"])
        return write(file, content)

    def watched_fsync(file):
        steps.append("sync " + Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    def watched_replace(source, target):
        steps.append("rename " + Path(target).name)
        replace(source, target)

    def watched_generator(streams, purpose, *numbers):
        if purpose == "noise":
            steps.append("noise")
        return generator(streams, purpose, *numbers)

    monkeypatch.setattr(os, "write", watched_write)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    monkeypatch.setattr(Streams, "generator", watched_generator)
    go_on(run, on_start=lambda *_: steps.clear())
    monkeypatch.undo()
    one_round = [
        "write intent",
        "sync ledger.jsonl",
        "noise",
        "sync state.safetensors.part",
        "rename state.safetensors",
        "sync checkpoint",
        "write commit",
        "sync ledger.jsonl",
    ]
    steps = [step for step in steps if step != "rename report.html"]  # pages release nothing, and come when they come
    assert steps[:32] == one_round * 4
    assert "noise" not in steps[32:]


# ---------------------------------------------------------------- checkpoints and ledgers that do not belong together


def attempts(run):
    """(round, attempt) of every intent."""
    return [(line.body["round"], line.body["attempt"]) for line in read_ledger(run)[0]]


def ledger_text(run):
    return (run / "ledger.jsonl").read_bytes()


def test_rounds_after_an_old_checkpoint_are_charged_again_with_other_noise(tmp_path):
    old = stopped_after(tmp_path, PRIVATE, 2)
    kept = (old / CHECKPOINT).read_bytes()
    first = go_on(old)
    assert attempts(old) == [(t, 1) for t in range(1, 7)]
    (old / CHECKPOINT).write_bytes(kept)
    second = go_on(old)
    assert attempts(old) == [(t, 1) for t in range(1, 7)] + [(t, 2) for t in range(3, 7)]
    assert second.proven[0]["epsilon"] > first.proven[0]["epsilon"]
    assert [line["round"] for line in second.metrics] == [1, 2, 3, 4, 5, 6]
    assert not torch.equal(first.model["weight"], second.model["weight"])


def test_without_its_checkpoint_a_run_begins_again_and_pays_again(tmp_path):
    run = stopped_after(tmp_path, PRIVATE, 3)
    (run / CHECKPOINT).unlink()
    go_on(run)
    assert attempts(run) == [(1, 1), (2, 1), (3, 1)] + [(t, 2) if t < 4 else (t, 1) for t in range(1, 7)]


def test_a_smaller_group_of_rounds_tried_again_draws_other_noise(tmp_path, monkeypatch):
    """With a budget the second attempt may reach less far; it is a second attempt at those rounds all the same."""
    drawn = []
    generator = Streams.generator

    def watched(streams, purpose, *numbers):
        if purpose == "noise":
            drawn.append(numbers)
        return generator(streams, purpose, *numbers)

    def fails(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Streams, "generator", watched)
    config = PRIVATE | {"engine.checkpoint_every": 4, "rounds": 8, "budget.epsilon": 3.2}
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_tensors", fails)
        with pytest.raises(KeyboardInterrupt):
            play(tmp_path, config)
    run = next(tmp_path.iterdir())
    done = go_on(run)
    assert done.stopped == "budget"
    assert 0 < done.rounds < 8
    assert done.proven[0]["epsilon"] <= 3.2
    assert len(drawn) == 4 + done.rounds
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("lines", [0, 1, 3, 5])
def test_a_ledger_that_was_cut_off_is_noticed(tmp_path, lines):
    run = stopped_after(tmp_path, PRIVATE, 3)
    whole = ledger_text(run).splitlines(keepends=True)
    (run / "ledger.jsonl").write_bytes(b"".join(whole[:lines]))
    with pytest.raises(LedgerError, match=r"checkpoint of round 3 .*cut off.*put the whole ledger back"):
        go_on(run)
    (run / "ledger.jsonl").write_bytes(b"".join(whole))
    assert go_on(run).rounds == 6


def test_a_ledger_cut_to_its_first_line_is_noticed_without_a_checkpoint_too(tmp_path):
    run = stopped_after(tmp_path, PRIVATE, 3)
    first = ledger_text(run).splitlines(keepends=True)[0]
    (run / "ledger.jsonl").write_bytes(first)
    (run / CHECKPOINT).unlink()
    with pytest.raises(LedgerError, match=r"round 3 was run.*cut off.*put the whole ledger back"):
        go_on(run)
    assert ledger_text(run) == first


def test_a_ledger_cut_off_in_the_middle_of_a_line_that_a_checkpoint_follows_is_noticed(tmp_path):
    run = stopped_after(tmp_path, PRIVATE, 3)
    intent = ledger_text(run).splitlines(keepends=True)[:-1]
    (run / "ledger.jsonl").write_bytes(b"".join(intent)[:-20])
    with pytest.raises(LedgerError, match="cut off"):
        go_on(run)


def test_a_commit_that_is_missing_is_made_good(tmp_path):
    run = stopped_after(tmp_path, PRIVATE, 3)
    lines = ledger_text(run).splitlines(keepends=True)
    (run / "ledger.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:30])
    assert verify(run / "ledger.jsonl").torn
    assert go_on(run).rounds == 6
    assert attempts(run) == [(t, 1) for t in range(1, 7)]
    assert [line.body["round"] for line in read_ledger(run)[1]] == [1, 2, 3, 4, 5, 6]


def test_a_run_whose_ledger_is_gone_cannot_go_on(tmp_path):
    run = stopped_after(tmp_path, PRIVATE, 2)
    (run / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match=r"ledger.jsonl is missing.*put it back"):
        go_on(run)
    assert not (run / "ledger.jsonl").exists()


def test_a_ledger_or_configuration_that_was_edited_is_refused(tmp_path):
    run = stopped_after(tmp_path, PRIVATE, 2)
    text = ledger_text(run)
    (run / "ledger.jsonl").write_bytes(text.replace(b'"noise":1.5', b'"noise":9.5', 1))
    with pytest.raises(LedgerError, match=r"line 2 was edited"):
        go_on(run)
    (run / "ledger.jsonl").write_bytes(text)
    config = run / "config.toml"
    config.write_text(config.read_text().replace("noise_multiplier = 1.5", "noise_multiplier = 0.5"))
    with pytest.raises(LedgerError, match="config"):
        go_on(run)
    assert ledger_text(run) == text


def test_another_runs_ledger_is_refused(tmp_path):
    one, two = (stopped_after(tmp_path, PRIVATE, rounds) for rounds in (2, 3))
    shutil.copy(two / "ledger.jsonl", one / "ledger.jsonl")
    with pytest.raises(LedgerError, match="belongs to a run"):
        go_on(one)


def test_a_checkpoint_that_the_ledger_does_not_know_is_refused(tmp_path):
    run = stopped_after(tmp_path, PRIVATE, 2)
    path = run / CHECKPOINT
    with RunFolder.open(run) as folder:
        tensors, notes = folder.read_tensors(CHECKPOINT)
    save_file({**tensors, "model": tensors["model"] + 1}, path, metadata=notes)
    with pytest.raises(LedgerError, match=r"checkpoint of round 2 is not the one"):
        go_on(run)


def test_an_old_model_does_not_pass_for_the_attempt_that_was_just_charged(tmp_path):
    """Round 3 is charged a second time and killed; the first attempt's model, edited, is put in its place."""
    run = stopped_after(tmp_path, PRIVATE, 3)
    with RunFolder.open(run) as folder:
        tensors, notes = folder.read_tensors(CHECKPOINT)
    with Ledger(run / "ledger.jsonl") as ledger:
        ledger.intend(3, ledger.charged[-1].charges)
    assert attempts(run)[-1] == (3, 2)
    save_file({**tensors, "model": tensors["model"] + 1}, run / CHECKPOINT, metadata=notes)
    with pytest.raises(LedgerError, match="is not the one"):
        go_on(run)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"not safetensors at all", None])
def test_a_damaged_checkpoint_is_named(tmp_path, content):
    run = stopped_after(tmp_path, PRIVATE, 2)
    path = run / CHECKPOINT
    path.write_bytes(path.read_bytes()[:-4] if content is None else content)
    with pytest.raises(RunError, match=r"state.safetensors is damaged"):
        go_on(run)


def test_a_file_that_is_no_checkpoint_is_named(tmp_path):
    run = stopped_after(tmp_path, PRIVATE, 2)
    save_file({"weight": torch.zeros(3)}, run / CHECKPOINT)
    with pytest.raises(RunError, match=r"is not a checkpoint"):
        go_on(run)


def test_a_torn_line_of_metrics_is_dropped(tmp_path):
    run = stopped_after(tmp_path, FEDAVG, 3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "accu')
    assert [line["round"] for line in go_on(run).metrics] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("line", [b"garbage", b"[1, 2]", b"\xff\xfe", b'{"round": "x"}'])
def test_a_damaged_line_of_metrics_is_named_and_nothing_is_lost(tmp_path, line):
    run = stopped_after(tmp_path, FEDAVG, 3)
    path, ledger = run / "metrics.jsonl", (run / "ledger.jsonl").read_bytes()
    first, _, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(damaged := first + line + b"\n" + third)
    with pytest.raises(RunError, match=r"metrics\.jsonl (is damaged|cannot be read)"):
        go_on(run)
    assert path.read_bytes() == damaged
    assert (run / "ledger.jsonl").read_bytes() == ledger
    assert read_run(run).done == 3


# ---------------------------------------------------------------- disk full, read-only


def released(run):
    path = run / CHECKPOINT
    return path.read_bytes() if path.exists() else None


def no_half_files(run):
    return not [path for path in run.rglob("*.part") if path.is_file()]


@pytest.mark.parametrize("file", ["checkpoint/state.safetensors.part", "metrics.jsonl"])
def test_a_full_disk_is_a_clear_error_before_the_release(tmp_path, file):
    """/dev/full takes nothing: every write to it finds the disk full."""
    run = stopped_after(tmp_path, PRIVATE, 2)
    before, kept = released(run), (run / "metrics.jsonl").read_bytes()
    keep_metrics = RunFolder.keep_metrics

    def then_full(folder, rounds):
        keep_metrics(folder, rounds)
        (run / file).unlink(missing_ok=True)
        (run / file).symlink_to("/dev/full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "keep_metrics", then_full)
        with pytest.raises(RunError, match=r"cannot be written: No space left on device; free some space"):
            go_on(run)
    assert released(run) == before
    assert attempts(run)[-1] == (3, 1)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").write_bytes(kept)
    assert no_half_files(run)
    assert go_on(run).rounds == 6
    assert attempts(run)[3] == (3, 2)


@pytest.mark.parametrize("at", [1, 2])
def test_a_disk_too_full_for_the_ledger_is_a_clear_error_and_leaves_no_half_line(tmp_path, monkeypatch, at):
    run = stopped_after(tmp_path, PRIVATE, 2)
    before, text = released(run), ledger_text(run)
    write = os.write
    calls = []

    def full(file, content):
        calls.append(content)
        if len(calls) < at:
            return write(file, content)
        if len(calls) == at:
            return write(file, bytes(content)[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    told = "Nothing was released" if at == 1 else "model is written"
    with pytest.raises(LedgerError, match=rf"No space left on device.*{told}.*free some space"):
        go_on(run)
    monkeypatch.undo()
    assert not verify(run / "ledger.jsonl").torn
    if at == 1:
        assert ledger_text(run) == text
        assert released(run) == before
    assert go_on(run).rounds == 6
    assert attempts(run) == [(t, 1) for t in range(1, 7)]


def test_wherever_the_disk_fails_the_run_stops_with_a_clear_error_and_can_go_on(tmp_path, monkeypatch):
    fsync, left = os.fsync, 0

    def failing(file):
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(file)

    for at in range(1, 100):
        place = tmp_path / str(at)
        left = at
        monkeypatch.setattr(os, "fsync", failing)
        try:
            play(place / "runs", PRIVATE | {"rounds": 2})
            break
        except (RunError, LedgerError) as error:
            said = str(error)
        finally:
            monkeypatch.setattr(os, "fsync", fsync)
        assert "Input/output error" in said
        look(place, Seen())
        runs = list(place.glob("runs/*/config.toml"))
        if runs:
            assert no_half_files(runs[0].parent)
            assert go_on(runs[0].parent).rounds == 2
            look(place, Seen())
    assert at > 15


@contextmanager
def nobody():
    """As root every folder can be written; so become somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder():
    """A folder that others may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def test_where_no_folder_can_be_made_the_error_says_so_and_nothing_is_written(open_folder):
    place = open_folder / "shut"
    place.mkdir(mode=0o555)
    with nobody(), pytest.raises(RunError, match=r"cannot be made in .*Permission denied"):
        play(place / "runs", PRIVATE)
    assert list(place.iterdir()) == []


def test_a_run_folder_that_cannot_be_written_is_a_clear_error_before_any_charge(open_folder):
    with nobody():
        run = stopped_after(open_folder / "runs", PRIVATE, 2)
        before, text = released(run), ledger_text(run)
        (run / ".lock").chmod(0o444)
        (run / "ledger.jsonl").chmod(0o444)
        run.chmod(0o555)
        with pytest.raises(RunError, match=r"cannot be written: Permission denied; make it writable"):
            go_on(run)
        assert released(run) == before
        assert ledger_text(run) == text
        run.chmod(0o755)
        (run / ".lock").chmod(0o644)
        with pytest.raises(LedgerError, match=r"cannot be opened for writing: Permission denied"):
            go_on(run)
        (run / "ledger.jsonl").chmod(0o644)
        (run / "checkpoint").chmod(0o555)
        with pytest.raises(RunError, match=r"state.safetensors cannot be written: Permission denied"):
            go_on(run)
        assert released(run) == before
        (run / "checkpoint").chmod(0o755)
        assert go_on(run).rounds == 6


# ---------------------------------------------------------------- one process at a time


def test_a_folder_that_is_in_use_is_refused(tmp_path):
    run = stopped_after(tmp_path, FEDAVG, 2)
    with RunFolder.open(run), pytest.raises(RunError, match=r"in use by another process"):
        go_on(run)
    assert go_on(run).rounds == 6


def test_a_finished_run_can_be_resumed_and_stays_as_it_is(tmp_path):
    first = play(tmp_path, PRIVATE)
    text, model = ledger_text(first.run), load_file(first.run / "model.safetensors")
    second = go_on(first.run)
    assert ledger_text(first.run) == text
    assert (second.rounds, second.stopped, second.proven) == (6, "rounds", first.proven)
    assert second.accuracy == first.accuracy
    assert all(torch.equal(model[name], second.model[name]) for name in model)
