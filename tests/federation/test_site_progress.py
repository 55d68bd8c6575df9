"""How far a site is in a run, by the lines of its ledger, and what it keeps of the runs before."""

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.errors import LedgerError
from shoal.federation.site_progress import EARLIER, Progress

FIRST, SECOND = (SimpleNamespace(run=name, digest=f"digest of {name}") for name in ("first", "second"))


@pytest.fixture
def progress():
    """In the first run: the coordinator went back from round 5 to round 2."""
    joined = Progress().of(FIRST, 1, 1, 1, 0)
    return replace(joined, next=2, begun=5, charged=5, records=30, turn=0, answered=(1, 4, 1))


def test_what_each_line_changed_leads_to_what_was_written(progress):
    later = replace(progress, next=3, answered=(1, 4, 1, 2))
    lines = [progress.changed(Progress()), later.changed(progress)]
    assert lines[1] == {"next": 3, "answered": (2,)}
    assert Progress.read(json.loads(json.dumps(lines))) == later
    assert later.changed(later) == {}
    assert Progress.read([*lines, {"of a later version": 1}]) == later


def test_a_ledger_that_says_nothing_has_nothing_left_to_charge():
    assert Progress.read([]).ended


def test_of_other_runs_only_the_answered_rounds_are_kept(progress):
    """Its coordinator may go on with the first run, whose correlated noise it still has."""
    second = replace(progress.of(SECOND, 3, 3, 3, 0), answered=(1, 4, 1))
    assert (second.run, second.next, second.charged, second.repeats, second.turn) == ("second", 3, 3, 0, None)
    again = second.of(FIRST, 6, 6, 6, 2)
    steps = [Progress(), progress, second, again]
    read = Progress.read([after.changed(before) for before, after in pairwise(steps)])
    assert read == again
    assert (again.next, again.answered, again.answered_before) == (6, (1, 4, 1), {SECOND.digest: (1, 4, 1)})


def test_a_line_says_only_which_of_the_other_runs_changed(progress):
    """Else a line would grow with the number of runs, up to the most that a ledger takes."""
    many = replace(progress, answered_before={f"run {number}": (0, 1) for number in range(1000)})
    second = many.of(SECOND, 0, 0, 0, 0)
    assert second.changed(many)["answered_before"] == {FIRST.digest: (1, 4, 1)}
    back = second.of(FIRST, 6, 6, 6, 0)
    assert back.changed(second)["answered_before"] == {FIRST.digest: ()}
    steps = [Progress(), many, second, back]
    written = json.loads(json.dumps([after.changed(before) for before, after in pairwise(steps)]))
    assert Progress.read(written) == back


def test_rounds_run_again_are_those_after_the_one_gone_back_to_one_after_the_other(progress):
    assert progress.run_again(0) == range(2, 2)
    assert progress.run_again(2) == range(2, 4)
    assert progress.run_again(9) == range(2, 5), "which the others were is not known"


def test_what_an_earlier_version_wrote_is_read_and_its_planned_repeats_are_charged(tmp_path):
    """It had charged 5 rounds and 1 repeat, and was told that 3 more were to be run again; after it, one was."""
    assert Progress.of_earlier_version(tmp_path) == Progress()
    kept = {"run": "first", "terms": "t", "next": 4, "ended": False, "furthest": 5, "records": 30, "repeats": 1}
    kept |= {"reported_repeats": [4, 2, 5], "answered": [1], "requirements": "changed", "ledger": "head"}
    (tmp_path / EARLIER).write_text(json.dumps(kept))
    found = Progress.of_earlier_version(tmp_path)
    assert (found.run, found.charged, found.begun, found.repeats, found.reported) == ("first", 5, 5, 1, 4 + 1)
    assert (found.ended, found.answered, found.requirements) == (False, (1,), "")
    (tmp_path / EARLIER).write_text(json.dumps(kept | {"requirements": "the owner's"}))
    assert Progress.of_earlier_version(tmp_path).requirements == "the owner's", "else refused rounds are charged"


@pytest.mark.parametrize("found", ["", "[]", "{", '{"reported_repeats": 3}'])
def test_a_damaged_file_of_an_earlier_version_is_named(tmp_path, found):
    (tmp_path / EARLIER).write_text(found)
    with pytest.raises(LedgerError, match=r"progress\.json is damaged; restore it"):
        Progress.of_earlier_version(tmp_path)
