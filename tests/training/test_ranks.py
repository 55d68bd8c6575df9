"""How a cohort is divided among ranks, what a rank is told, and what rank 0 refuses."""

import importlib
import os
import socket
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.errors import ConfigError, RunError
from shoal.mechanisms.correlated import PAST
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import Streams
from shoal.training import distributed, ranks
from shoal.training.distributed import DistributedCohort, agree, facts, split
from shoal.training.ranks import Dismissed, Lost, Ranks
from support.deploy_children import run_script, said_by
from support.ports import free_port
from support.small_federation import simulator, small


def test_the_most_work_goes_first_to_the_rank_that_has_the_least():
    work = np.array([1.0, 7.0, 2.0, 5.0, 4.0])
    first, second = split(work, 2)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [3, 4])


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_client_is_on_one_rank_and_no_rank_has_more_than_a_client_over_the_mean(count):
    work = np.random.default_rng(count).exponential(size=500)
    shares = split(work, count)
    assert sorted(np.concatenate(shares).tolist()) == list(range(500))
    assert max(work[share].sum() for share in shares) <= work.sum() / count + work.max()


def test_there_may_be_fewer_clients_than_ranks():
    assert [len(share) for share in split(np.ones(2), 4)] == [1, 1, 0, 0]
    assert [len(share) for share in split(np.zeros(0), 3)] == [0, 0, 0]


def test_a_rank_is_told_what_its_clients_need_and_nothing_of_the_noise_or_of_other_clients():
    keys = ("clip", "server.velocity", PAST, "velocity.3", "velocity.31", "personal.3", "personal.4")
    told = distributed._of(np.array([3, 7]), {key: torch.zeros(1) for key in keys})
    assert set(told) == {"clip", "velocity.3", "personal.3"}


def spread(name="fedavg", count=2):
    sim = simulator(small(name))
    return sim, DistributedCohort.of_ranks(sim.cohort, Ranks(0, count))


def test_work_is_steps_times_batch():
    """Ten records a client, in batches of five: two steps of five records, each counted as one more."""
    _, cohort = spread()
    assert cohort.work(np.arange(3)).tolist() == [12.0] * 3
    assert cohort.work(np.zeros(0, dtype=np.int64)).tolist() == []


# ---------------------------------------------------------------- what rank 0 refuses


class Told(Ranks):
    """Rank 0, to whom rank 1 says this."""

    def __init__(self, **said):
        super().__init__(0, 2)
        object.__setattr__(self, "said", said)

    def receive(self, source):
        return {}, dict(self.said)


def own(**changes):
    sim, _ = spread()
    return facts(sim, {"rounds": 3}) | changes


def test_ranks_of_the_same_facts_agree():
    agree(Told(place="elsewhere", facts=own()), own())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"torch version": "2.0"}, r"rank 1 \(b\) differs from rank 0 in torch version: 2.0, not "),
        ({"configuration key rounds": "4"}, "in configuration key rounds: 4, not 3; give every rank the same"),
        ({"configuration key seed": "1"}, "in configuration key seed: 1, not None"),
        ({distributed.DATA: "0"}, "in training data; give every rank the same"),
        ({distributed.MODEL: "0"}, "in initial model; give"),
        ({distributed.CODE: "0"}, "in code, Shoal's or yours; give"),
        ({distributed.DEVICE: "cuda"}, "in device: cuda, not cpu"),
    ],
)
def test_a_rank_that_differs_is_named_with_what_differs(changed, said):
    with pytest.raises(ConfigError, match=said):
        agree(Told(place="b", facts=own(**changed)), own())


def test_ranks_that_would_draw_or_compute_otherwise_differ(monkeypatch):
    """Without Triton a GPU draws other noise from the same key; another default type makes other constants."""
    trainer, before = spread()[0], own()
    with monkeypatch.context() as patch:
        patch.setattr(distributed.kernels, "triton", None if distributed.kernels.triton else object())
        assert {name for name, value in own().items() if before[name] != value} == {distributed.KERNELS}
    torch.set_default_dtype(torch.float64)
    try:
        changed = facts(trainer, {"rounds": 3})
    finally:
        torch.set_default_dtype(torch.float32)
    assert {name for name in before if before[name] != changed[name]} == {"default type"}


def test_in_secure_mode_ranks_that_round_otherwise_differ(monkeypatch):
    """Who else takes part decides on which rank a client is trained, and must not show in its last digits."""
    trainer, found = spread()[0], {}
    for streams in (Streams(5), SecureStreams(5)):
        trainer.cohort = replace(trainer.cohort, streams=streams, micro_batch=None)
        before = facts(trainer, {})
        with monkeypatch.context() as patch:
            patch.setattr(distributed.kernels, "processor", lambda: "another")
            trainer.cohort = replace(trainer.cohort, micro_batch=3)
            after = facts(trainer, {})
        found[streams.mode] = {name for name in after if before[name] != after[name]}
    assert found == {"research": set(), "secure": {distributed.PROCESSOR, distributed.AT_ONCE}}


def test_two_ranks_on_one_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(distributed, "_place", lambda: "node, GPU 0")
    cuda = own(device="cuda")
    agree(Told(place="node, GPU 1", facts=cuda), cuda)
    with pytest.raises(ConfigError, match=r"ranks 0 and 1 share a GPU \(node, GPU 0\): .* --device cpu"):
        agree(Told(place="node, GPU 0", facts=cuda), cuda)


def test_code_of_ones_own_counts_as_code(tmp_path, monkeypatch):
    def built(text):
        (tmp_path / "mine.py").write_text(text)
        namespace = {"__name__": "mine"}
        exec(compile(text, str(tmp_path / "mine.py"), "exec"), namespace)
        return namespace["Net"]()

    text = "from torch import nn\n\nclass Net(nn.Flatten):\n    pass\n"
    cohort = simulator(small("fedavg")).cohort
    monkeypatch.setattr(distributed.inspect, "getfile", lambda kind: str(tmp_path / "mine.py"))
    assert distributed._code(cohort, built(text)) != distributed._code(cohort, built(text + "\n# changed\n"))


@pytest.mark.parametrize("place", ["a layer", "a base class", "the loss"])
def test_code_inside_a_model_and_the_loss_count_as_code(place, tmp_path, monkeypatch):
    """A layer whose parameters and name are the same, but not what it computes."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"inner_{place.split()[-1]}.py"
    file.write_text("from torch import nn\n\nclass Layer(nn.Flatten):\n    pass\n\ndef loss(outputs, y):\n    pass\n")
    inner = importlib.import_module(file.stem)
    cohort = simulator(small("fedavg")).cohort
    module = torch.nn.Sequential(inner.Layer() if place == "a layer" else torch.nn.Flatten())
    if place == "a base class":
        module = type("Net", (inner.Layer,), {"__module__": "nowhere"})()
    if place == "the loss":
        data = cohort.client_data
        task = replace(data.dataset.task, own_loss=inner.loss)
        cohort = replace(cohort, client_data=replace(data, dataset=replace(data.dataset, known_task=task)))
    before = distributed._code(cohort, module)
    file.write_text(file.read_text() + "# changed")
    assert distributed._code(cohort, module) != before


def test_shoals_own_code_counts(tmp_path, monkeypatch):
    cohort, module = simulator(small("fedavg")).cohort, torch.nn.Flatten()
    before = distributed._code(cohort, module)
    (tmp_path / "one.py").write_text(Path(distributed.__file__).read_text())
    monkeypatch.setattr(distributed.shoal, "__file__", str(tmp_path / "__init__.py"))
    assert distributed._code(cohort, module) != before


# ---------------------------------------------------------------- messages


def test_a_message_is_what_was_sent():
    tensors = {"a": torch.arange(3), "b": torch.tensor(1.5, dtype=torch.float64), "c": torch.zeros(0)}
    size, content = ranks._packed(tensors, {"t": 1, "why": "é"})
    assert int(size) == len(content)
    found, notes = ranks._unpacked(content)
    assert notes == {"t": 1, "why": "é"}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_message_is_sent_without_a_wait_and_kept_until_it_has_come(monkeypatch):
    """Gloo forgets what it is sending where a connection breaks: who waits for it waits for ever."""

    def waits(*_):
        raise AssertionError("it waited")

    sent = []
    monkeypatch.setattr(ranks, "_talks", {})
    monkeypatch.setattr(ranks.dist, "send", waits)
    monkeypatch.setattr(ranks.dist, "isend", lambda part, to: sent.append((part, to)))
    for number in range(3):
        Ranks(0, 2).send(1, {}, number=number)
    assert [to for _, to in sent] == [1] * 6
    assert ranks._unpacked(sent[5][0])[1] == {"number": 2, ranks.TAKEN: 0}
    talk = ranks._talk(1)
    assert len(talk.underway) == 3
    talk.received(2)
    ((size, _), (content, _)) = talk.underway[0]
    assert (size is sent[4][0], content is sent[5][0], len(talk.underway)) == (True, True, 1)
    Ranks(0, 2).send(1, {})
    assert ranks._unpacked(sent[7][0])[1] == {ranks.TAKEN: 1}


def test_a_lost_connection_is_a_line_that_names_the_rank_and_one_rank_that_lost_rank_0_says_so():
    for rank, silent in ((0, False), (1, False), (2, True)):
        with (
            pytest.raises(Lost, match="rank 3 of 4 has gone: its process was killed") as lost,
            Ranks(rank, 4)._talking(3),
        ):
            raise RuntimeError("Connection closed by peer")
        assert lost.value.silent is silent


@pytest.mark.parametrize("said", [{"WORLD_SIZE": "8"}, {"RANK": "3"}, {"RANK": "1", "WORLD_SIZE": "1"}])
def test_one_process_is_alone_whatever_a_cluster_calls_its_world(said, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert ranks.planned() == ranks.join() == Ranks(0, 1)


@pytest.mark.parametrize(
    "cause",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 32 vs 16",
        "The server socket has failed to listen on any local network address. name: EADDRINUSE",
    ],
)
def test_an_error_that_is_no_lost_connection_is_named(cause):
    with pytest.raises(RunError, match="rank 2 of 4 failed beside rank 3: ") as failed, Ranks(2, 4)._talking(3):
        raise RuntimeError(f"{cause}\nException raised from somewhere in C++")
    assert not isinstance(failed.value, Lost)
    assert str(failed.value).endswith(cause.rpartition("] ")[2])


class AtOnce:
    """A timer for which no time passes."""

    def __init__(self, seconds, function, args, kwargs):
        assert seconds == ranks.QUIET
        self.start = lambda: function(*args, **kwargs)

    def cancel(self):
        pass


@pytest.mark.parametrize(("rank", "other"), [(1, "rank 0"), (0, "ranks 1 to 2")])
def test_a_rank_that_finds_nobody_says_what_it_waits_for_and_gives_up_in_one_line(rank, other, monkeypatch, capfd):
    """Rank 0 may have died before this one had loaded torch: who waits for it waits in vain."""
    assert ranks.MEETING.total_seconds() <= 120
    monkeypatch.setattr(ranks, "MEETING", timedelta(seconds=1))
    monkeypatch.setattr(ranks, "Timer", AtOnce)
    port = str(free_port())
    for name, value in {
        "RANK": str(rank),
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Lost, match=f"rank {rank} of 3 has not met {other} at 127.0.0.1:{port} within 1 seconds"):
        ranks.join()
    waits = f"shoal: rank {rank} of 3 waits for {other} at 127.0.0.1:{port}, for 1 seconds at most"
    assert waits in capfd.readouterr().err.splitlines()
    for thread in threading.enumerate():
        if thread.name == "ranks meet":
            thread.join()  # torch gives up too, later; a test process that ended meanwhile would abort


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR must be set for rank 1 of 2: torchrun does so"),
        ({"MASTER_PORT": None}, "MASTER_PORT must be set for rank 1 of 2"),
        ({"MASTER_PORT": "99999"}, "MASTER_ADDR and MASTER_PORT, 127.0.0.1:99999: port must "),
        ({"RANK": "2"}, "RANK must be from 0 to 1, below WORLD_SIZE, got 2"),
    ],
)
def test_an_environment_in_which_ranks_cannot_meet_is_refused_at_once(changed, said, monkeypatch):
    there = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | changed
    for name, value in there.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        ranks.join()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["no store", "died"])
def test_a_rank_gives_up_where_torch_would_wait_for_ever(case, tmp_path):
    """For an answer of another service at the port, or for a rank that died after it was met."""
    script = """
import os, signal, sys
from datetime import timedelta
from shoal.training import ranks

case, port = sys.argv[1:]
ranks.MEETING = timedelta(seconds=3)
os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
os.environ["RANK"] = "1" if case == "no store" or not os.fork() else "0"
if case == "died" and os.environ["RANK"] == "1":
    ranks._begin = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
try:
    ranks.join()
except ranks.Lost as lost:
    print(lost)
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if case == "no store" else free_port()
        said = said_by(run_script, tmp_path, script, case, port)
    rank, who = (1, "rank 0") if case == "no store" else (0, "all other ranks")
    assert said.startswith(f"rank {rank} of 2 has not met {who} at 127.0.0.1:{port} within 3 seconds: start all ")


def test_ranks_on_one_machine_are_out_of_reach_for_others(monkeypatch):
    """What listens to every address listens to 127.0.0.2 too."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    store = ranks._local_store(2)
    socket.create_connection(("127.0.0.1", store.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "speaker"), [(0, "rank 1"), (1, "rank 0"), (2, "rank 0")])
def test_one_rank_says_that_another_was_killed_while_all_add_up(killed, speaker, tmp_path):
    """Every survivor notices at once: all are in the same all-reduce as the one that dies in it."""
    script = """
import os, signal, sys, torch
from shoal.training import ranks

killed, port = sys.argv[1:]
children = []
for rank in range(3):
    if child := os.fork():
        children.append(child)
        continue
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    joined = ranks.join()
    if rank == int(killed):
        ranks.dist.all_reduce = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    try:
        with joined.leading() if rank == 0 else joined.reporting():
            joined.add_up(torch.ones(1000))
    except (ranks.Lost, ranks.Dismissed) as error:
        if not error.silent:
            os.write(1, f"rank {rank}: {error}\\n".encode())
    os._exit(0)
for child in children:
    os.waitpid(child, 0)
"""
    (line,) = said_by(run_script, tmp_path, script, killed, free_port()).splitlines()
    assert line.startswith(f"{speaker}: ")
    assert "of 3 has gone: its process was killed" in line


@pytest.mark.slow
@pytest.mark.parametrize("how", ["its script made the process group", "rank 0 has gone by then"])
def test_a_run_that_ends_well_does_so_on_every_rank(how, tmp_path):
    """A goodbye that nobody takes closes rank 0's connections; one more cannot be waited for where it has gone."""
    script = """
import os, sys, time
from shoal.training import ranks

how, port = sys.argv[1:]
os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
os.environ["RANK"] = "1" if (leader := os.fork()) else "0"
if how.startswith("its"):
    ranks.dist.init_process_group("gloo")
joined = ranks.join()
if joined.rank == 0:
    joined.end({}, "the result")
    os._exit(0)
unpacked = ranks._unpacked
if how.startswith("rank"):
    ranks._unpacked = lambda content: (os.waitpid(leader, 0), time.sleep(0.5), unpacked(content))[-1]
try:
    joined.receive(0)
except ranks.Dismissed as ended:
    print(ended.result)
"""
    assert said_by(run_script, tmp_path, script, how, free_port()) == "the result\n"


def test_who_is_dismissed_says_nothing():
    assert Dismissed.silent
    assert Dismissed.exit_code == 0
