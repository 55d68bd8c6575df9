"""`-c log=tensorboard`: event files that hold the numbers of metrics.jsonl, or an error that names the mend."""

import json
import sys

import pytest

from shoal.errors import ConfigError
from shoal.report.tensorboard import scalars
from support.tiny import FEDAVG, PRIVATE, go_on, play, play_numbers, stopped_after

LOGGED = PRIVATE | {"log": "tensorboard"}


def test_without_the_package_the_run_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[tensorboard\]'"):
        play(tmp_path, LOGGED)
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_is_not_known_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="none, tensorboard"):
        play(tmp_path, PRIVATE | {"log": "tensorbord"})


def events(run):
    """The scalars in the event files, by name and step; a later file replaces what it purges."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    return {name: {event.step: event.value for event in read.Scalars(name)} for name in read.Tags()["scalars"]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("stop", [None, 3])
def test_event_files_hold_every_round_once_also_after_a_stop(tmp_path, stop):
    pytest.importorskip("tensorboard")
    if stop is None:
        run = play(tmp_path, LOGGED).run
    else:
        run = stopped_after(tmp_path, LOGGED, stop)
        go_on(run)
    found = events(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"accuracy", "loss", "noise", "snr", "epsilon/client/release", "epsilon/record/release"} <= found.keys()
    for line in lines:
        for name, value in scalars(line).items():
            assert found[name][line["round"]] == pytest.approx(value, rel=1e-6), name
    assert sorted(found["accuracy"]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_headline_figure_has_its_own_name(tmp_path):
    pytest.importorskip("tensorboard")
    result = play_numbers(tmp_path, FEDAVG | {"log": "tensorboard"})
    found = events(result.run)
    assert found["rmse"][6] == pytest.approx(result.score, rel=1e-6)
    assert "accuracy" not in found
