"""progress.json: how far a site is in a run, and what it keeps of the runs before."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.federation.site_progress import PROGRESS, Progress, ReportedRepeats

FIRST, SECOND = (SimpleNamespace(run=name, digest=f"digest of {name}") for name in ("first", "second"))


@pytest.fixture
def progress():
    """In the first run: the coordinator went back from round 5 to round 2, and said so."""
    begun = Progress().of(FIRST, 1)
    return replace(
        begun, next=2, furthest=5, records=30, turn=0, reported_repeats=ReportedRepeats(3, 2, 5), answered=(1, 4, 1)
    )


def test_what_is_written_is_read_back(tmp_path, progress):
    progress.write(tmp_path, "head")
    assert Progress.read(tmp_path) == replace(progress, ledger="head")


def test_a_folder_without_progress_or_with_an_empty_one_has_nothing_left_to_charge(tmp_path):
    assert Progress.read(tmp_path).ended
    (tmp_path / PROGRESS).write_text("{}")
    assert Progress.read(tmp_path) == Progress()


def test_of_other_runs_only_the_answered_rounds_are_kept(tmp_path, progress):
    """Its coordinator may go on with the first run, whose correlated noise it still has."""
    second = progress.of(SECOND, 3)
    assert (second.run, second.next, second.furthest, second.repeats, second.turn) == ("second", 3, 0, 0, None)
    replace(second, answered=(3,)).write(tmp_path, "head")
    again = Progress.read(tmp_path).of(FIRST, 6)
    assert (again.next, again.answered) == (6, (1, 4, 1))
    assert {key: tuple(rounds) for key, rounds in again.answered_before.items()} == {SECOND.digest: (3,)}


def test_rounds_that_may_have_been_run_again_are_those_between_the_one_gone_back_to_and_the_last(progress):
    """Where nothing was said of them, any that has begun."""
    assert progress.rerun() == progress.rerun(3) == range(2, 5)
    assert progress.rerun(7) == range(2, 7)
    said_nothing = replace(progress, reported_repeats=ReportedRepeats())
    assert said_nothing.rerun(7) == range(7)
    assert Progress().rerun() == range(1)
