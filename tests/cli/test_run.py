"""`shoal run` from a shell and from Python: what it writes, what it prints, how it stops, what it refuses."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shoal
from shoal.accounting.accountants import epsilon
from shoal.accounting.events import Gaussian, Repeat, Sampled
from shoal.algorithms.charges import PAIRS
from shoal.cli.main import main
from shoal.config import configure
from shoal.errors import ConfigError, DataError, LedgerError, ModelError, RunError
from shoal.result import Interrupted
from support.deploy_children import start
from support.tiny import FEDAVG, PRIVATE, dataset, go_on, network, play, stopped_after

SMALL = ["-c", "algorithm=fedavg", "-c", "model=linear", "-c", "data.clients=20", "-c", "clients.cohort=5"]
PATIENCE = 600  # seconds, for what hangs: a busy machine takes its time
FILES = {"config.toml", "metrics.jsonl", "environment.txt", "ledger.jsonl", "checkpoint"}
FILES |= {"model.safetensors", "model.json"}


CTRL_C_IN_ROUND_3 = """
import os, signal
from shoal.cli.run import Watch

def told(self, line, right=Watch.round):
    right(self, line)
    if line["round"] == 3:
        os.kill(os.getpid(), signal.SIGINT)

Watch.round = told
"""


def called(monkeypatch, capsys, *arguments):
    """The same in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["shoal", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def rounds_written(folder):
    """How many rounds of the run in that folder have metrics."""
    return sum(path.read_text().count("\n") for path in folder.glob("runs/*/metrics.jsonl"))


def wait_for(process, fact):
    """What `fact` says, as soon as it says something."""
    until = time.monotonic() + PATIENCE
    while not (found := fact()):
        assert process.process.is_alive(), process.complained
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


# ---------------------------------------------------------------- what a run writes and prints


@pytest.mark.slow
def test_the_default_run_fills_its_folder_and_prints_one_json_object(tmp_path):
    """From a shell; other tests fork a process that has imported what a run needs."""
    command = [sys.executable, "-m", "shoal", "run", "-c", "rounds=4", "--json"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    out, err = process.stdout, process.stderr
    assert process.returncode == 0, err
    said = json.loads(out)
    assert out.count("\n") == 1
    assert "round" in err
    run = tmp_path / said["run"]
    assert run.parent == tmp_path / "runs"
    assert {path.name for path in run.iterdir()} >= FILES
    assert (run / "checkpoint" / "state.safetensors").is_file()

    wanted = {"run", "algorithm", "dataset", "rounds", "accuracy", "seconds", "stopped", "proven", "published"}
    assert said.keys() >= wanted
    assert said["rounds"] == 4
    assert said["stopped"] in ("rounds", "budget")
    assert 0.2 < said["accuracy"] <= 1
    assert {(claim["unit"], claim["observer"]) for claim in said["proven"]} == set(PAIRS)
    for claim in said["proven"]:
        assert claim.keys() == {
            "unit", "observer", "epsilon", "delta", "accountant", "because", "adjacency", "simulated", "sampler_delta"
        }  # fmt: skip
        assert (claim["epsilon"] is None) == (claim["delta"] is None) == (claim["accountant"] is None)
        assert claim["epsilon"] is not None or claim["because"]
    for claim in said["published"]:
        assert claim.keys() == {"unit", "epsilon", "delta", "recipe"}

    config = configure(run / "config.toml")
    assert (config.algorithm.name, config.data.name, config.rounds) == (said["algorithm"], said["dataset"], 4)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in metrics] == [1, 2, 3, 4]
    assert metrics[-1]["accuracy"] == said["accuracy"]
    facts = dict(line.split(": ", 1) for line in (run / "environment.txt").read_text().splitlines())
    assert facts["torch"] == torch.__version__
    assert facts["shoal"] == shoal.__version__
    assert all(torch.isfinite(tensor).all() for tensor in load_file(run / "model.safetensors").values())


@pytest.mark.slow
def test_a_run_without_privacy_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, _ = called(monkeypatch, capsys, "run", *SMALL, "-c", "rounds=2")
    assert code == 0
    assert "not private" in out
    assert "no noise is added" in out
    code, out, _ = called(monkeypatch, capsys, "run", *SMALL, "-c", "rounds=2", "--json")
    assert all(claim["epsilon"] is None and claim["because"] for claim in json.loads(out)["proven"])
    assert json.loads(out)["published"] == []


def test_the_version_is_told(monkeypatch, capsys):
    assert called(monkeypatch, capsys, "--version") == (0, f"shoal {shoal.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-c", "model=linaer"], ["'linaer'", "'linear'"]),
        (["-c", "model=nowhere.net:Net"], ["nowhere"]),
        (["-c", "data.name=digit"], ["'digit'", "'digits'"]),
        (["-c", "data.name=mine.csv"], ["no file mine.csv"]),
        (["--device", "gpu"], ["'gpu'", "cpu or cuda"]),
        (["--device", "meta"], ["'meta'", "cpu or cuda"]),
        (["-c", "clients.cohort=300"], ["clients.cohort is 300", "only 20 clients"]),
        (["-c", "data.clients=100000"], ["clients is 100000", "only"]),
        (["-c", "data.features=hogg"], ["'hogg'", "'hog'"]),
        (["-c", "budget.epsilon=3"], ["budget.epsilon", "fedavg", "no noise is added"]),
        (["-c", "budget.epsilon=3", "-c", "budget.calibrate=true"], ["budget.calibrate", "fedavg"]),
        (["-c", "algorithm=geyer"], ["geyer", "--no-guarantee"]),
        (["--resume", "nowhere"], ["there is no run 'nowhere' in runs"]),
        (["--resume", "runs/nowhere"], ["runs/nowhere is not a run folder"]),
        (["--colour"], ["--colour"]),
    ],
)
def test_what_cannot_be_run_ends_with_2_and_writes_nothing(tmp_path, monkeypatch, capsys, arguments, named):
    monkeypatch.chdir(tmp_path)
    given = arguments if "--resume" in arguments else [*SMALL, *arguments]
    code, out, err = called(monkeypatch, capsys, "run", *given)
    assert code == 2
    assert out == ""
    assert all(part in err for part in named), err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- Ctrl-C


def same_tensors(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_the_run_goes_on_to_the_same_model(tmp_path):
    config = [*SMALL, "-c", "rounds=12", "-c", "local.momentum=0.5", "-c", "local.keep_momentum=true"]
    config += ["-c", "engine.threads=2"]  # two processes, and the last digits of a sum depend on the threads
    process = start(tmp_path, "out", ["run", *config, "--json"], errors="err", first=CTRL_C_IN_ROUND_3)
    assert process.ended(time.monotonic() + PATIENCE) == 130, process.complained
    assert process.said == ""
    (run,) = tmp_path.glob("runs/*")
    assert f"--resume {Path('runs') / run.name}" in process.complained
    assert 3 <= rounds_written(tmp_path) < 12
    resumed = shoal.run(resume=run)
    whole = shoal.run(overrides=[word for word in config if word != "-c"], runs=tmp_path / "whole")
    assert resumed.rounds == whole.rounds == 12
    assert same_tensors(resumed.model, whole.model)
    assert same_tensors(load_file(run / "model.safetensors"), load_file(whole.run / "model.safetensors"))
    assert [line | {"seconds": 0} for line in resumed.metrics] == [line | {"seconds": 0} for line in whole.metrics]


@pytest.mark.slow
def test_nobody_else_may_use_the_folder_and_a_second_ctrl_c_ends_the_run_at_once(tmp_path):
    """The first Ctrl-C waits for the checkpoint, which is minutes away."""
    config = [*SMALL, "-c", "rounds=5000", "-c", "engine.checkpoint_every=5000", "-c", "local.epochs=20"]
    process = start(tmp_path, "out", ["run", *config], errors="err")
    ledger = wait_for(
        process, lambda: [path for path in tmp_path.glob("runs/*/*.jsonl") if "intent" in path.read_text()]
    )
    run = ledger[0].parent
    with pytest.raises(RunError, match=r"in use by another process"):
        shoal.run(resume=run)
    process.signal(signal.SIGINT)
    wait_for(process, lambda: "stopping at the next checkpoint" in process.said)
    process.signal(signal.SIGINT)
    assert process.ended(time.monotonic() + PATIENCE) == 130, process.complained
    assert "Traceback" not in process.complained
    assert not (run / "checkpoint" / "state.safetensors").exists()
    with pytest.raises(Interrupted, match="stopped after round 0"):
        shoal.run(resume=run, on_start=lambda _config, simulator, _run: simulator.stop())


# ---------------------------------------------------------------- one's own model and data


NET = """
from torch import nn

class MyNet(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(input_shape[0], 8), nn.Tanh(), nn.Linear(8, classes))

    def forward(self, x):
        return self.layers(x)
"""


@pytest.fixture
def own_things(tmp_path, monkeypatch):
    """A folder with a package `netsofmine` and a table with a column that says who owns each row."""
    (tmp_path / "netsofmine").mkdir()
    (tmp_path / "netsofmine" / "net.py").write_text(NET)
    generator = np.random.Generator(np.random.Philox(key=3))
    rows = generator.standard_normal((120, 3))
    lines = [f"{a:.4f},{b:.4f},{c:.4f},{'yes' if a > b else 'no'},site{i % 8}" for i, (a, b, c) in enumerate(rows)]
    (tmp_path / "mine.csv").write_text("\n".join(["a,b,c,label,client", *lines]) + "\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("netsofmine.net", "netsofmine"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_ones_own_model_and_table_are_taken_by_name(own_things, monkeypatch, capsys):
    words = ["-c", "algorithm=fedavg", "-c", "model=netsofmine.net:MyNet", "-c", "data.name=mine.csv"]
    words += ["-c", "data.client_column=client", "-c", "clients.cohort=4", "-c", "rounds=5", "-c", "local.lr=0.5"]
    code, out, err = called(monkeypatch, capsys, "run", *words, "--json")
    assert code == 0, err
    said = json.loads(out)
    config = configure(Path(said["run"]) / "config.toml")
    assert (config.data.partition, config.data.clients) == ("column", 8)
    assert config.model == "netsofmine.net:MyNet"
    assert load_file(Path(said["run"]) / "model.safetensors")["layers.0.weight"].shape == (8, 3)
    assert said["accuracy"] > 0.6
    code, _, err = called(monkeypatch, capsys, "run", *words, "-c", "model=netsofmine.net:MyNt")
    assert code == 2
    assert "MyNt" in err
    assert "'MyNet'" in err
    code, _, err = called(monkeypatch, capsys, "run", *words, "-c", "data.clients=10")
    assert code == 2
    assert "data.clients is 10, but the data name 8 clients; leave it out" in err


@pytest.mark.slow
def test_python_takes_arrays_a_client_and_a_module_and_leaves_both_alone(tmp_path):
    data, model = dataset(), network()
    weights, rows = model.weight.clone(), data.train_x.clone()
    results = [shoal.run(FEDAVG, data=data, model=model, runs=tmp_path) for _ in range(2)]
    assert results[0].rounds == 6
    assert results[0].dataset == "clients"
    assert 0 <= results[0].accuracy <= 1
    assert same_tensors(results[0].model, results[1].model)
    assert results[0].run != results[1].run
    assert torch.equal(model.weight, weights)
    assert model.training
    assert torch.equal(data.train_x, rows)
    assert not torch.equal(results[0].model["weight"], weights)


def test_python_takes_keys_by_name(tmp_path):
    result = shoal.run(
        algorithm="fedavg",
        rounds=2,
        clients={"cohort": 3},
        local={"lr": 0.5},
        data=dataset(),
        model=network(),
        runs=tmp_path,
    )
    assert result.rounds == 2
    config = configure(result.run / "config.toml")
    assert (config.algorithm.local.lr, config.algorithm.clients.cohort) == (0.5, 3)


def test_python_raises_what_the_shell_prints(tmp_path):
    for wrong, kind in [
        ({"rounds": 0}, ConfigError),
        ({"roundz": 3}, ConfigError),
        ({"data": "nothing"}, DataError),
        ({"model": "nothing"}, ModelError),
        ({"device": "tpu"}, RunError),
    ]:
        with pytest.raises(kind):
            shoal.run(**({"algorithm": "fedavg", "runs": tmp_path / "runs"} | wrong))
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------- resume


@pytest.mark.slow
def test_a_resumed_run_takes_no_other_keys(tmp_path, monkeypatch, capsys):
    run = stopped_after(tmp_path, FEDAVG, 2)
    code, _, err = called(monkeypatch, capsys, "run", "--resume", run, "-c", "rounds=9")
    assert code == 2
    assert "keeps its own configuration" in err
    named = ("--resume", run.name, "--runs", run.parent)
    assert "keeps its own configuration" in called(monkeypatch, capsys, "run", *named, "-c", "rounds=9")[2]
    for wrong in ({"rounds": 9}, {"overrides": ["rounds=9"]}, {"data": "digits"}, {"model": "linear"}):
        with pytest.raises(ConfigError, match="keeps its own configuration"):
            shoal.run(resume=run, **wrong)
    with pytest.raises(ConfigError, match="keeps its own configuration"):
        shoal.run({"rounds": 9}, resume=run)
    with pytest.raises(ConfigError, match=r"was run on data 'clients'"):
        shoal.run(resume=run, data=shoal.load("digits"), model=network())
    with pytest.raises(ConfigError, match=r"was run with model .*Linear"):
        shoal.run(resume=run, data=dataset(), model=nn.Sequential(nn.Linear(4, 2)))
    with pytest.raises(RunError, match="parameters"):
        shoal.run(resume=run, data=dataset(), model=nn.Linear(4, 2, bias=False))
    assert go_on(run).rounds == 6


@pytest.mark.slow
def test_a_stopped_run_ends_with_the_model_and_metrics_of_a_whole_one(tmp_path):
    config = FEDAVG | {"server.momentum": 0.5, "server.average": 0.5, "engine.checkpoint_every": 2}
    whole = play(tmp_path / "whole", config)
    run = stopped_after(tmp_path / "stopped", config, 3)
    resumed = go_on(run)
    assert same_tensors(whole.model, resumed.model)
    assert [line | {"seconds": 0} for line in whole.metrics] == [line | {"seconds": 0} for line in resumed.metrics]


@pytest.mark.slow
def test_a_run_can_be_resumed_from_inside_its_folder_and_by_a_link(tmp_path, monkeypatch):
    run = stopped_after(tmp_path / "runs", FEDAVG, 2)
    (tmp_path / "last").symlink_to(run)
    monkeypatch.chdir(run)
    assert go_on(Path()).rounds == 6
    assert go_on(tmp_path / "last").rounds == 6


def test_a_folder_that_was_copied_cannot_spend_the_budget_twice(tmp_path):
    run = stopped_after(tmp_path, PRIVATE, 2)
    run.rename(tmp_path / "elsewhere")
    with pytest.raises(LedgerError, match="belongs to a run"):
        go_on(tmp_path / "elsewhere")


def other_rows():
    data = dataset()
    return replace(data, train_x=data.train_x + 1)


def other_labels():
    data = dataset()
    return replace(data, train_y=1 - data.train_y)


def other_owners():
    data = dataset()
    return replace(data, owners=np.roll(data.owners, 1))


def fewer_rows():
    data = dataset()
    kept = np.arange(len(data.train_y)) % 2 == 0
    return replace(data, train_x=data.train_x[kept], train_y=data.train_y[kept], owners=data.owners[kept])


@pytest.mark.slow
@pytest.mark.parametrize("changed", [other_rows, other_labels, other_owners, fewer_rows])
def test_a_run_does_not_go_on_with_other_data_of_the_same_name(tmp_path, changed):
    run = stopped_after(tmp_path, PRIVATE, 2)
    before = (run / "ledger.jsonl").read_bytes()
    with pytest.raises(LedgerError, match=r"a run on other data: .*resume with the data of that run"):
        shoal.run(resume=run, data=changed(), model=network())
    assert (run / "ledger.jsonl").read_bytes() == before
    assert go_on(run).rounds == 6


@pytest.mark.slow
def test_held_out_rows_may_change(tmp_path):
    """They are in nobody's charge."""
    run = stopped_after(tmp_path, PRIVATE, 2)
    data = dataset()
    assert shoal.run(resume=run, data=replace(data, test_x=data.test_x + 1), model=network()).rounds == 6


@pytest.mark.slow
def test_features_may_differ_where_the_rows_do_not(tmp_path, monkeypatch):
    """They are computed in floats, which another machine may round otherwise."""
    config = {"algorithm": "fedavg", "rounds": 2, "model": "linear", "data.features": "hog", "data.clients": 4}
    config |= {"clients.cohort": 2, "engine.threads": 1}
    monkeypatch.setattr("shoal.prepare.cached", lambda _name, x, _folder: x.flatten(1))
    held = []
    with pytest.raises(Interrupted) as stopped:
        shoal.run(
            config,
            runs=tmp_path,
            on_start=lambda _config, simulator, _run: held.append(simulator),
            on_round=lambda _line: held[0].stop(),
        )
    monkeypatch.setattr("shoal.prepare.cached", lambda _name, x, _folder: x.flatten(1) * (1 + 1e-6))
    assert shoal.run(resume=stopped.value.run).rounds == 2


def test_the_digest_of_the_data_in_the_ledger_is_keyed(tmp_path):
    """The ledger may be released: whoever guesses the rows must not be able to check the guess against it."""
    first, second = (play(tmp_path, FEDAVG | {"rounds": 1}).run for _ in range(2))
    digests = [json.loads((run / "ledger.jsonl").read_text().splitlines()[0])["data"] for run in (first, second)]
    assert digests[0] != digests[1]


def test_a_run_without_the_key_of_its_data_does_not_go_on(tmp_path):
    run = stopped_after(tmp_path, PRIVATE, 2)
    (run / "data-key.json").unlink()
    with pytest.raises(RunError, match=r"data-key\.json cannot be read.*put it back"):
        go_on(run)


def test_a_ledger_of_an_earlier_version_says_nothing_of_the_data_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.execution._about_data", lambda *_: {})
    run = stopped_after(tmp_path, PRIVATE, 2)
    monkeypatch.undo()
    assert not (run / "data-key.json").exists()
    assert go_on(run).rounds == 6


# ---------------------------------------------------------------- budgets

ROUND = Sampled("poisson", 4 / 12, Gaussian(1.5))
"""What a round of tiny.PRIVATE does to a client, as the released model shows it."""


def cost(rounds, event=ROUND):
    return epsilon(Repeat(event, rounds), 1e-5, "pld").epsilon


@pytest.mark.slow
def test_a_budget_stops_the_run_before_the_round_that_would_pass_it(tmp_path):
    result = play(tmp_path, PRIVATE | {"rounds": 50, "budget.epsilon": 4.0, "engine.evaluate_every": 100})
    assert result.stopped == "budget"
    assert 0 < result.rounds < 50
    assert cost(result.rounds) <= 4.0 < cost(result.rounds + 1)
    assert result.proven[0]["epsilon"] == pytest.approx(cost(result.rounds), rel=1e-6)
    assert 0 <= result.accuracy <= 1
    resumed = go_on(result.run)
    assert (resumed.rounds, resumed.stopped, resumed.proven) == (result.rounds, "budget", result.proven)


@pytest.mark.slow
def test_rounds_that_are_played_again_are_paid_from_the_same_budget(tmp_path):
    config = PRIVATE | {"rounds": 50, "budget.epsilon": 4.0}
    whole = play(tmp_path / "whole", config)
    run = stopped_after(tmp_path / "again", config, 3)
    (run / "checkpoint" / "state.safetensors").unlink()
    again = go_on(run)
    assert again.rounds == whole.rounds - 3
    assert again.proven[0]["epsilon"] <= 4.0


@pytest.mark.slow
def test_a_calibrated_run_spends_its_budget_and_no_more(tmp_path):
    result = play(tmp_path, PRIVATE | {"budget.epsilon": 2.0, "budget.calibrate": True})
    assert (result.rounds, result.stopped) == (6, "rounds")
    assert 0.99 * 2.0 < result.proven[0]["epsilon"] <= 2.0
    noise = configure(result.run / "config.toml").algorithm.per_round.noise_multiplier
    assert result.proven[0]["epsilon"] == pytest.approx(
        cost(6, Sampled("poisson", 4 / 12, Gaussian(noise))), rel=1e-6
    )


def test_a_budget_that_pays_for_no_round_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"budget.epsilon 0.1 does not pay for the first round"):
        play(tmp_path / "runs", PRIVATE | {"budget.epsilon": 0.1})
    with pytest.raises(ConfigError, match=r"client against the server.*before any noise"):
        play(tmp_path / "runs", PRIVATE | {"budget.epsilon": 9.0, "budget.observer": "server"})
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_many_rounds_between_checkpoints_are_charged_together_and_cost_the_same(tmp_path):
    config = PRIVATE | {"rounds": 12, "engine.evaluate_every": 12}
    one, many = (play(tmp_path, config | {"engine.checkpoint_every": every}) for every in (1, 12))
    assert one.proven == many.proven
    assert same_tensors(one.model, many.model)
    assert (many.run / "ledger.jsonl").read_text().count('"intent"') == 1
    assert len((many.run / "ledger.jsonl").read_text()) < len((one.run / "ledger.jsonl").read_text()) / 2


def test_ctrl_c_before_the_first_round_says_that_it_stopped(monkeypatch, capsys):
    import typer

    from shoal.cli import main

    app = typer.Typer()

    @app.command()
    def waiting() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", app)
    monkeypatch.setattr(sys, "argv", ["shoal"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.endswith("shoal: stopped\n")
