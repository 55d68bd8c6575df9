"""`shoal sweep` from a shell: cells in processes of their own, a crash that stops no other, stopping and resuming."""

import json
import sys
import time

import pytest

import shoal
from shoal.cli.main import main
from shoal.sweep.cells import sensible_jobs
from shoal.training.engine_settings import cores, gpus, of_one_job
from support.deploy_children import start

pytestmark = pytest.mark.slow

KEYS = ["algorithm=trusted-curator", "model=linear", "data.clients=20", "clients.sampling=poisson"]
KEYS += ["clients.cohort=10", "local.steps=2", "budget.delta=1e-3"]
SMALL = [word for key in KEYS for word in ("-c", key)]


STOPS_THE_SWEEP = """
import os, signal, time
from shoal.cli.run import Watch

def told(self, line, right=Watch.round):
    right(self, line)
    if line["round"] == 3:
        os.kill(os.getppid(), signal.SIGINT)
        while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # until the sweep passes it on
            time.sleep(0.01)

Watch.round = told
"""


def sweep(folder, name, *arguments, code=0, first=""):
    """What a sweep prints on both streams; it is forked, and so are its cells."""
    process = start(folder, f"{name}.out", ["sweep", *arguments], errors=f"{name}.err", first=first)
    assert process.ended(time.monotonic() + 600) == code, process.complained
    return process.said, process.complained


def test_a_grid_is_played_compared_and_charged_and_a_cell_that_crashes_stops_no_other(tmp_path):
    (tmp_path / "crash.py").write_text(
        "import os, torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(64, 10)\n"
        "    def forward(self, x): os.kill(os.getpid(), 9)\n"
    )
    grid = ["--grid", "model=linear,nosuch,crash:Net", "--grid", "per_round.noise_multiplier=2.0"]
    words = [*SMALL, "-c", "rounds=2", *grid, "--charge", "--json", "--jobs", "1"]
    out, err = sweep(tmp_path, "grid", *words, code=4)
    assert out.count("\n") == 1
    told = json.loads(out)
    assert [cell["state"] for cell in told["cells"]] == ["finished", "failed", "failed"]
    assert "nosuch" in told["cells"][1]["failed"]
    assert "killed" in told["cells"][2]["failed"]
    assert told["best"] == "0001"
    assert told["charged"][0]["epsilon"] > 0
    assert "costs more" in told["warning"]
    assert "2 failed" in err
    page = (tmp_path / told["page"]).read_text()
    assert "1 of 3 cells finished, 2 failed" in page
    assert "nosuch" in page


def test_a_sweep_that_was_stopped_goes_on_where_it_was(tmp_path):
    """By Ctrl-C when the first cell has played three rounds of ten."""
    grid = ["-c", "rounds=10", "--grid", "per_round.noise_multiplier=2.0,3.0"]
    _, err = sweep(tmp_path, "stopped", *SMALL, *grid, "--jobs", "1", code=130, first=STOPS_THE_SWEEP)
    (folder,) = tmp_path.glob("runs/*-sweep")
    assert f"--resume runs/{folder.name}" in err
    (half,) = folder.glob("cells/0001/*/metrics.jsonl")
    before = half.read_text().splitlines()
    assert 3 <= len(before) < 10
    out, _ = sweep(tmp_path, "resumed", "--resume", f"runs/{folder.name}", "--json")
    told = json.loads(out)
    assert [cell["state"] for cell in told["cells"]] == ["finished", "finished"]
    assert half.read_text().splitlines()[: len(before)] == before
    assert len(list(folder.glob("cells/0001/*/config.toml"))) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "at least one --grid"),
        (["--grid", "local.rl=1"], "did you mean 'local.lr'"),
        (["--grid", "rounds=1", "--trials", "3"], "--private-selection"),
        (["--grid", "rounds=1", "--jobs", "0"], "--jobs must be >= 1"),
        (["--grid", "rounds=1", "--private-selection", "--trials", "0.5"], "expected number of trials"),
        (["--grid", "rounds=1", "--private-selection", "-c", "noise_seed=7"], "draw their own noise"),
        (["--resume", "nowhere"], "not a sweep's folder"),
        (["--resume", "nowhere", "--grid", "rounds=1"], "keeps its own cells"),
        (["--grid", "rounds=1..9"], "--random N"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(monkeypatch, capsys, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["shoal", "sweep", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_cells_share_cores_and_memory_and_never_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert 1 <= sensible_jobs(100, "cpu") <= cores()
    assert sensible_jobs(1, "cpu") == 1
    assert sensible_jobs(100, "cuda") == 1
    assert of_one_job(1) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5,7")
    assert (sensible_jobs(100, "cuda"), sensible_jobs(2, "auto")) == (3, 2)
    assert [of_one_job(job)["CUDA_VISIBLE_DEVICES"] for job in range(4)] == ["2", "5", "7", "2"]


def test_gpus_are_those_that_nvidia_smi_lists(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-a)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-b)'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus() == ["0", "1"]


def test_a_cell_that_a_trial_could_never_play_is_found_first(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    grid = ["--grid", "model=linear,nosuch", "--private-selection", "--trials", "1"]
    monkeypatch.setattr(sys, "argv", ["shoal", "sweep", *SMALL, "-c", "rounds=2", *grid])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "nosuch" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_trials_that_would_begin_with_what_was_learnt_from_their_data_are_found_first(monkeypatch, capsys, tmp_path):
    """Else each would fail, and a private selection shows no trial but the chosen one."""
    before = shoal.run(
        dict(key.split("=") for key in KEYS[:2]) | {"rounds": 1, "data.clients": 20}, runs=tmp_path
    ).run
    words = [
        *SMALL,
        "-c",
        f"init={before}",
        "--grid",
        "rounds=1",
        "--private-selection",
        "--runs",
        tmp_path / "sweeps",
    ]
    monkeypatch.setattr(sys, "argv", ["shoal", "sweep", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "learnt from the same data" in capsys.readouterr().err
    assert not (tmp_path / "sweeps").exists()
