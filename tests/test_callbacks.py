"""`on_start`, `on_round`, `on_end`: what each is called with, when, and how often."""

import json

import pytest

from support.tiny import PRIVATE, go_on, play, stopped_after


def noted(called):
    return {
        "on_start": lambda config, trainer, run: called.append(("start", config.rounds, trainer.done, run)),
        "on_round": lambda line: called.append(("round", line["round"])),
        "on_end": lambda result: called.append(("end", (result.run / "result.json").is_file(), result)),
    }


def test_each_is_called_in_its_turn_and_the_end_after_all_files_are_there(tmp_path):
    called = []
    result = play(tmp_path, PRIVATE, **noted(called))
    assert called == [("start", 6, 0, result.run), *(("round", t) for t in range(1, 7)), ("end", True, result)]


@pytest.mark.slow
def test_a_run_that_was_stopped_has_no_end_until_it_is_resumed(tmp_path):
    called = []
    run = stopped_after(tmp_path, PRIVATE, 2)
    go_on(run, **noted(called))
    assert [each[:2] for each in called] == [("start", 6), *(("round", t) for t in range(3, 7)), ("end", True)]


def test_on_round_is_given_the_lines_of_metrics_jsonl(tmp_path):
    lines = []
    run = play(tmp_path, PRIVATE, on_round=lines.append).run
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line | {"release": written[0]["release"]} for line in lines] == written


@pytest.mark.slow
def test_an_error_in_on_end_reaches_the_caller_and_the_run_is_whole(tmp_path):
    def fail(result):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        play(tmp_path, PRIVATE, on_end=fail)
    (run,) = tmp_path.iterdir()
    assert go_on(run).rounds == 6
