"""Models without rules: every way gives the sequential one's round; the choice is told, kept, and sees no data."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import shoal
from shoal import api
from shoal.config import configure, read_toml
from shoal.errors import ModelError, RunError
from shoal.gradients import network
from shoal.gradients.network import SLOWER
from shoal.prepare import prepare
from shoal.result import Interrupted
from shoal.training import cuda_graphs, trial_step
from shoal.training.batch_plan import planned
from shoal.training.chunking import Chunker
from shoal.training.context import pick_device
from shoal.training.cuda_graphs import Graphs
from shoal.training.local_training import train
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from support.levels import CLIENT_LEVEL, LEVELS, RECORD_LEVEL

GENERATOR = np.random.default_rng(3)
X = GENERATOR.standard_normal((96, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
OWNERS = np.repeat(np.arange(8), 12)


LAYER = "pairs (ParametrizedLinear), pairs.parametrizations.weight (ParametrizationList)"


def data():
    return shoal.from_arrays(X, Y, client=OWNERS)


class Squares(nn.Module):
    """A layer whose weights are computed from others, and a matrix that is used twice: rules know neither."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(4)
        self.pairs, self.last, self.dropout = weight_norm(nn.Linear(36, 4)), nn.Linear(4, 2), nn.Dropout(dropout)
        self.matrix = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x):
        pairs = (x.unsqueeze(2) * x.unsqueeze(1)).flatten(1)
        hidden = torch.tanh(self.pairs(pairs)) @ self.matrix
        return self.last(self.dropout(torch.tanh(hidden) @ self.matrix.T))


class Gated(nn.Module):
    """A recurrent layer of one's own: its matrices are used once a number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.inputs, self.hidden = nn.Parameter(torch.randn(1, 16) / 2), nn.Parameter(torch.randn(4, 16) / 2)
        self.start, self.last = nn.Parameter(torch.randn(2, 4) / 2), nn.Linear(4, 2)

    def forward(self, x):
        hidden, cell = (part.expand(len(x), -1) for part in self.start)
        for number in x.T:
            kept, taken, shown, new = (number.unsqueeze(1) @ self.inputs + hidden @ self.hidden).chunk(4, 1)
            cell = kept.sigmoid() * cell + taken.sigmoid() * new.tanh()
            hidden = shown.sigmoid() * cell.tanh()
        return self.last(hidden)


class Mixes(Squares):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def trainer_of(config, model, way, dataset=None, **engine):
    settings = {**config, "engine": {"device": "cpu", "threads": 1, "way": way} | engine}
    return prepare(configure(settings), dataset or data(), model)[1]


def played(trainer, rounds=1):
    for _ in range(rounds):
        trainer.run_round(0)
    trainer.close()
    return trainer.params


@pytest.mark.slow
@LEVELS
@pytest.mark.parametrize("model", [Squares, Gated])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_round_by_vmap_is_that_of_one_client_after_the_other(config, model, threads):
    many, one = trainer_of(config, model(), "vmap", threads=threads), trainer_of(config, model(), "sequential")
    assert many.cohort.network.batched
    assert many.cohort.chunker.largest > 1
    start = one.params.clone()
    found = played(one)
    assert float((found - start).norm()) > 0.01
    torch.testing.assert_close(played(many), found, rtol=0, atol=1e-5)


NO_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
COMPILED = pytest.param("compiled", marks=[pytest.mark.slow, NO_COMPILER])
FALLING = {"local": {"lr": "linear:0.5:0.1", "epochs": 2}, "rounds": 3}
SCHEDULES = [
    CLIENT_LEVEL | FALLING,
    RECORD_LEVEL
    | FALLING
    | {"per_record": {"clip_norm": "linear:4:0.1"}, "per_step": {"noise_multiplier": "linear:0.2:0.01"}},
]


@cache
def heeded(place):
    """The model after three rounds of a schedule, one client after the other; without the schedule it is another."""
    config = SCHEDULES[place]
    wanted = played(trainer_of(config, Squares(), "sequential"), 3)
    constant = config | {"local": {"lr": 0.5, "epochs": 2}}
    assert float((played(trainer_of(constant, Squares(), "vmap"), 3) - wanted).abs().max()) > 1e-3
    return wanted


@pytest.mark.slow
@pytest.mark.parametrize("way", ["vmap", COMPILED])
@pytest.mark.parametrize("place", range(len(SCHEDULES)), ids=["client", "record"])
def test_schedules_of_clip_noise_and_learning_rate_are_heeded(place, way):
    found = played(trainer_of(SCHEDULES[place], Squares(), way), 3)
    torch.testing.assert_close(found, heeded(place), rtol=0, atol=2e-5)


@pytest.mark.slow
@LEVELS
def test_gradients_of_records_that_would_take_too_much_memory_are_computed_in_pieces(config):
    whole, pieces = (trainer_of(config, Squares(), "vmap", memory=memory) for memory in (None, 4e-6))
    assert (pieces.cohort.micro_batch or 99) < 8 if config is RECORD_LEVEL else pieces.cohort.micro_batch is None
    torch.testing.assert_close(played(pieces), played(whole), rtol=0, atol=1e-5)


def test_a_model_that_draws_random_numbers_goes_one_client_after_the_other_where_updates_are_summed():
    """Beside other clients it would draw other numbers, and one more of them would change everybody's update."""
    trainer = trainer_of(CLIENT_LEVEL, SometimesDeep(0.5, each_record=True), "auto")
    net = trainer.cohort.network
    assert (net.way, net.batched, net.draws) == ("sequential", False, True)
    assert "rules would draw other random numbers" in net.because
    trainer.close()
    with pytest.raises(ModelError, match=r"engine\.way is vmap, but vmap would draw other random numbers"):
        trainer_of(CLIENT_LEVEL, SometimesDeep(0.5, each_record=True), "vmap")


@pytest.mark.slow
@pytest.mark.parametrize("probability", [1e-6, 0.5])
def test_at_record_level_it_goes_client_by_client_and_follows_the_seed(probability):
    found = []
    for seed in range(2):
        model = SometimesDeep(probability, each_record=True)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        trainer = trainer_of(RECORD_LEVEL, model, "vmap")
        assert (trainer.cohort.network.draws, trainer.cohort.chunker.largest) == (True, 1)
        found.append(played(trainer))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*found)


class SometimesDeep(nn.Module):
    """It leaves a layer out at random: of single records, or of the whole batch."""

    def __init__(self, probability, each_record):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second, self.last = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.probability, self.each_record = probability, each_record

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        if self.training and self.each_record:
            return self.last(hidden + (torch.rand(len(x), 1) >= self.probability) * self.second(hidden))
        if self.training and torch.rand(()) < self.probability:
            return self.last(hidden)
        return self.last(hidden + self.second(hidden))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "each_record", "probability", "micro_batch"),
    [
        (CLIENT_LEVEL, True, 1e-6, None),
        (RECORD_LEVEL, False, 1e-6, None),
        (CLIENT_LEVEL, False, 0.5, None),
        (RECORD_LEVEL, True, 0.5, None),
        (CLIENT_LEVEL, True, 0.5, 4),
        (RECORD_LEVEL, False, 0.5, 4),
    ],
)
def test_random_numbers_of_the_models_own_code_follow_the_seed_too(config, each_record, probability, micro_batch):
    """However seldom they show in a trial of a few records; every two of the settings meet."""
    found = []
    for seed in range(2):
        model = SometimesDeep(probability, each_record)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        trainer = trainer_of(config, model, "auto", **({"micro_batch": micro_batch} if micro_batch else {}))
        net = trainer.cohort.network
        assert (net.way != "rules", net.draws) == (True, True)
        found.append(played(trainer))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*found)


@pytest.mark.slow
def test_a_model_that_mixes_records_is_never_vmapped():
    assert trainer_of(CLIENT_LEVEL | {"algorithm": "fedavg"} | NO_PRIVACY, Mixes(), "auto").cohort.network.way == (
        "sequential"
    )
    with pytest.raises(ModelError, match="mixes the records of a batch"):
        trainer_of(RECORD_LEVEL, Mixes(), "auto")


class MixesMany(nn.Module):
    """It subtracts the mean of a batch that is large enough: more records than a trial has."""

    def __init__(self, most, share=1.0, start=1.0):
        super().__init__()
        torch.manual_seed(4)
        self.most, self.share, self.last, self.drop = most, share, nn.Linear(6, 2), nn.Dropout(0.1)
        with torch.no_grad():
            self.last.weight *= start

    def forward(self, x):
        return self.last(self.drop(x - self.share * x.mean(0) if len(x) > self.most else x))


@pytest.mark.slow
@LEVELS
@pytest.mark.parametrize(("most", "way"), [(7, False), (40, False), (1000, True)])
def test_rules_are_tried_with_as_many_records_as_a_step_has(config, most, way):
    """8 of a client, 64 of all."""
    trainer = trainer_of(config, MixesMany(most), "auto")
    net = trainer.cohort.network
    assert (net.way == "rules") is way
    assert way or "treats many records in another way than few" in net.because
    trainer.close()
    if not way:
        with pytest.raises(ModelError, match="treats many records in another way than few"):
            trainer_of(config, MixesMany(most), "rules")


@pytest.mark.parametrize(("share", "start"), [(0.001, 1.0), (1.0, 0.0)])
def test_a_little_of_others_is_too_much_and_no_layer_hides_it(share, start):
    """A record of 1e5 would move the clipped gradients of all others."""
    net = network(MixesMany(7, share, start), torch.rand(3, 6), per_record=True, sizes=lambda net: (2, 8))
    assert "treats many records in another way than few" in net.because


class Scaled(nn.Module):
    """It takes pictures of bytes and of fractions: the largest number of a batch decides for all of it."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(x / 255 if x.max() > 1 else x)


def test_rules_are_tried_beside_larger_numbers():
    """Of other clients, too."""
    with pytest.raises(ModelError, match="treats many records in another way than few"):
        trainer_of(CLIENT_LEVEL, Scaled(), "rules")


@pytest.mark.parametrize("mode", ["secure", "research"])
@pytest.mark.parametrize(("most", "way"), [(7, False), (100, True)])
def test_rules_are_tried_with_the_widest_batch_that_is_drawn(mode, most, way):
    """Poisson batches of 1, as expected; of all records of a small client, and 28 where sizes are secret."""
    config = RECORD_LEVEL | {"random": mode, "records": {"sampling": "poisson", "batch": 1}}
    trainer = trainer_of(config, MixesMany(most), "auto", shoal.from_arrays(X[:12], Y[:12], client=OWNERS[:12]))
    assert (trainer.cohort.network.way == "rules") is way
    trainer.close()


NO_PRIVACY = {"per_update": {}, "per_round": {}}


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("rules", r"engine\.way is rules, but no rule for layer pairs \(Par"),
        ("fast", "engine.way"),
    ],
)
def test_a_way_that_is_not_possible_is_refused_in_one_line(way, said):
    with pytest.raises(shoal.ShoalError, match=said) as refused:
        trainer_of(CLIENT_LEVEL, Squares(), way)
    assert "\n" not in str(refused.value)


# --- the choice


@pytest.mark.parametrize("per_record", [False, True])
@pytest.mark.parametrize(("slower", "way"), [(0.99 * SLOWER, "vmap"), (1.01 * SLOWER, "sequential")])
def test_the_faster_way_is_taken_and_says_why(per_record, slower, way):
    net = network(
        Squares(), torch.rand(3, 6), per_record=per_record, seconds=lambda net: slower if net.way == "vmap" else 1.0
    )
    assert net.way == way
    assert net.because.startswith(f"no rule for layer {LAYER}")
    assert ("vmap would be slower here" in net.because) is (way == "sequential")


@pytest.mark.parametrize(("slower", "way"), [(0.99 * SLOWER, "rules"), (1.01 * SLOWER, "sequential")])
def test_recurrent_layers_are_measured_too_and_no_others(slower, way):
    module = nn.Sequential(nn.LSTM(3, 4, batch_first=True), Last(), nn.Linear(4, 2))
    times = {"rules": slower, "sequential": 1.0}
    assert network(module, torch.rand(3, 5, 3), seconds=lambda net: times[net.way]).way == way
    plain = nn.Sequential(nn.Flatten(), nn.Linear(15, 2))
    assert network(plain, torch.rand(3, 5, 3), seconds=lambda net: pytest.fail("measured")).way == "rules"


class Last(nn.Module):
    def forward(self, found):
        return found[0][:, -1]


def test_the_choice_sees_no_record(monkeypatch):
    seen = []

    def seconds(self, net, *given):
        seen.append((net.way, self.sample, self.targets, self.batch, *given))
        return 1.0

    monkeypatch.setattr(trial_step.TrialStep, "seconds", seconds)
    for x in (X, 1e30 * X[::-1].copy()):
        trainer_of(CLIENT_LEVEL, Squares(), "auto", shoal.from_arrays(x, Y, client=OWNERS)).close()
    first, second = seen[:2], seen[2:]
    assert [way for way, *_ in first] == ["vmap", "sequential"]
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one[1], other[1])
        assert torch.equal(one[2], other[2])
        assert one[3:] == other[3:]


@pytest.mark.slow
@LEVELS
def test_in_secure_mode_the_choice_follows_from_public_numbers(config, monkeypatch):
    """Else one record more would choose the way, and with it the last digits of all."""
    seen = []

    def seconds(self, net, *given):
        seen.append((self.batch, *given))
        return 1.0

    monkeypatch.setattr(trial_step.TrialStep, "seconds", seconds)
    for mode in ("secure", "research"):
        for kept in (slice(None), slice(None, None, 4)):  # clients of 12 and of 3 records
            dataset = shoal.from_arrays(X[kept], Y[kept], client=OWNERS[kept])
            trainer = trainer_of(config | {"random": mode}, Squares(), "auto", dataset)
            assert mode == "research" or (trainer.cohort.network.way, seen) == ("vmap", []), "no clock is asked"
            trainer.close()
    assert seen[:2] != seen[2:]


@pytest.mark.slow
def test_a_process_measures_each_model_once(monkeypatch):
    monkeypatch.setattr(trial_step, "_measured", {})
    timed = []
    monkeypatch.setattr(trial_step.TrialStep, "_timed", lambda self, workers, steps: timed.append(1) or 1.0)
    for _ in range(2):
        trainer_of(CLIENT_LEVEL, Squares(), "auto").close()
        assert len(timed) == 2 * (1 + trial_step.TIMES)
    trainer_of(RECORD_LEVEL, Squares(), "auto").close()
    assert len(timed) == 4 * (1 + trial_step.TIMES)


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_way_it_began(tmp_path, monkeypatch):
    """Another would change its last digits."""
    fast = {"vmap": 1.0, "sequential": 2.0}
    monkeypatch.setattr(trial_step.TrialStep, "seconds", lambda self, net, *given: fast[net.way])

    def stop(config, trainer, run):
        trainer.stop()

    with pytest.raises(Interrupted) as stopped:
        shoal.run(CLIENT_LEVEL, data=data(), model=Squares(), runs=tmp_path, on_start=stop)
    run = stopped.value.run
    assert read_toml(run / "config.toml")["engine.way"] == "vmap"
    fast["vmap"] = 3.0
    ways = []
    shoal.run(resume=run, data=data(), model=Squares(), on_start=lambda config, trainer, run: ways.append(
        trainer.cohort.gradients))  # fmt: skip
    assert ways[0]["way"] == "vmap"
    assert LAYER in ways[0]["because"]


# --- chunks that are too large for the memory


class Limited:
    """A network that runs out of memory with more clients than so many."""

    def __init__(self, net, most):
        self._net, self._most, self.failed = net, most, 0

    def __getattr__(self, name):
        return getattr(self._net, name)

    def backward(self, params, x, y, weights, seeds=None):
        if len(params) > self._most:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._net.backward(params, x, y, weights, seeds)


def one_round(trainer, most=None):
    net, state = trainer.cohort.network, {}
    limited = Limited(net, most or 99)
    cohort = replace(trainer.cohort, network=limited)
    params, state, metrics = run_round(cohort, trainer.params, state, RoundIndex(0, 8))
    trainer.close()
    return params, state, metrics, limited


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        CLIENT_LEVEL | {"local": {"lr": 0.5, "momentum": 0.5, "keep_momentum": True}},
        RECORD_LEVEL | {"per_step": {"noise_multiplier": 1.0}},
        RECORD_LEVEL | {"algorithm": "quantile-record", "per_record": {}},
    ],
    ids=["client", "record", "quantile"],
)
def test_a_chunk_that_is_too_large_is_trained_again_in_halves_with_the_same_noise(config):
    whole, halves = (trainer_of(config, nn.Linear(6, 2), "rules") for _ in range(2))
    torch.manual_seed(0)
    halves.params = whole.params
    assert whole.cohort.chunker.largest >= 8
    params, state, metrics, _ = one_round(whole)
    found, kept, told, limited = one_round(halves, most=3)
    torch.testing.assert_close(found, params, rtol=0, atol=1e-6)
    assert kept.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(kept[name], tensor, rtol=0, atol=1e-6)
    assert told == pytest.approx(metrics, rel=1e-4)
    assert limited.failed == 3  # all eight, and both halves
    assert halves.cohort.chunker.largest == 2


def test_a_client_that_does_not_fit_is_refused_with_the_fix():
    trainer = trainer_of(CLIENT_LEVEL, nn.Linear(6, 2), "rules")
    trainer.cohort = replace(trainer.cohort, network=Limited(trainer.cohort.network, 0))
    with pytest.raises(RunError, match=r"a single client does not fit .* lower records\.batch"):
        trainer.run_round(0)
    trainer.close()


@pytest.mark.parametrize("hidden", [0, 5000])
def test_the_largest_chunk_on_cuda_follows_from_what_one_more_client_takes(hidden, monkeypatch):
    """Simulated memory: 1,000 bytes for all, 100 for each client; a library's workspace hides those of the first."""
    trainer = trainer_of(CLIENT_LEVEL, nn.Linear(6, 2), "rules")
    cohort, used = trainer.cohort, lambda self, net, clients: max(hidden * (clients < 4), 1000 + 100 * clients)
    monkeypatch.setattr(trial_step.TrialStep, "peak_bytes", used)
    monkeypatch.setattr(trial_step.TrialStep, "device", torch.device("cuda"))
    step = trial_step.TrialStep(nn.Linear(6, 2), torch.rand(3, 6), torch.zeros(3), 8, False)
    found = Chunker(cohort.algorithm, cohort.network, step, 1, 10_000 / 2**30)
    assert found.client_bytes == 100
    assert found.largest == 90
    trainer.close()


@pytest.mark.parametrize(
    ("precision", "faster", "views", "micro", "alone"),
    [
        ("bf16", True, 0, None, 2),
        ("bf16", True, 2, None, 3),
        ("bf16", True, 2, 1023, 0),
        ("bf16", False, 0, None, 0),
        ("auto", True, 0, None, 0),
    ],
)
def test_clients_who_fill_a_gpu_by_themselves_are_trained_one_by_one(
    precision, faster, views, micro, alone, monkeypatch
):
    """In bfloat16, where the model's kernels for one client are faster than those for many; others are in chunks."""
    trainer = trainer_of(CLIENT_LEVEL, nn.Linear(6, 2), "rules")
    algorithm, network = trainer.cohort.algorithm, trainer.cohort.network
    algorithm = replace(algorithm, records=replace(algorithm.records, batch=5000, augmentations=views))
    monkeypatch.setattr(type(network), "faster_for_one", faster)
    monkeypatch.setattr(trial_step.TrialStep, "peak_bytes", lambda self, net, clients: 1000 + 100 * clients)
    monkeypatch.setattr(trial_step.TrialStep, "device", torch.device("cuda"))
    step = trial_step.TrialStep(nn.Linear(6, 2), torch.rand(3, 6), torch.zeros(3), 4000, False, precision)
    chunker = Chunker(algorithm, network, step, 1, 100_000 / 2**30, micro)
    chunks = list(chunker.chunks(np.arange(40), np.array([4000, 10, 2047, 2048, *[10] * 36])))
    first, *rest = sorted(chunks, key=len, reverse=True)
    assert sorted(int(client) for (client,) in rest) == {0: [], 2: [0, 3], 3: [0, 2, 3]}[alone]
    assert len(first) == 40 - alone
    assert chunker.fills(4000) == bool(alone)
    trainer.close()


def test_many_chunks_are_of_one_size_whatever_the_size_of_the_cohort():
    """But for the last, so that a recorded step fits them in every round; no client is lost."""
    trainer = trainer_of(CLIENT_LEVEL, nn.Linear(6, 2), "rules")
    chunker, sizes = trainer.cohort.chunker, set()
    chunker._workers, chunker.largest = 1, 1050
    for count in (9_800, 9_950, 10_000, 10_060):
        found = list(chunker.chunks(np.arange(count), np.full(count, 50)))
        sizes |= {len(each) for each in found[:-1]}
        assert np.array_equal(np.sort(np.concatenate(found)), np.arange(count))
        assert max(map(len, found)) <= 1050
    assert len(sizes) == 1
    trainer.close()


@pytest.mark.parametrize("most", [0, 1])
def test_where_no_two_clients_fit_each_is_a_chunk(most, monkeypatch):
    """And where not even one does, the round says so."""
    trainer = trainer_of(CLIENT_LEVEL, nn.Linear(6, 2), "rules")
    cohort = trainer.cohort
    for name, found in {"memory_allocated": 0, "reset_peak_memory_stats": None, "max_memory_allocated": 100}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    monkeypatch.setattr(trial_step.TrialStep, "device", torch.device("cuda"))
    monkeypatch.setattr(trial_step.TrialStep, "step", lambda self, net, clients: too_large if clients > most else int)
    step = trial_step.TrialStep(nn.Linear(6, 2), torch.rand(3, 6), torch.zeros(3), 8, False)
    assert Chunker(cohort.algorithm, cohort.network, step, 1, 1.0).largest == 1
    trainer.close()


def too_large():
    raise torch.OutOfMemoryError("CUDA out of memory")


# --- recordings


def test_a_step_that_cannot_be_recorded_runs_as_it_is(monkeypatch):
    def fails(*given):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(cuda_graphs, "Recording", fails)
    steps, inputs = Steps(), (torch.zeros(9, 2),)
    graphs = Graphs()
    with pytest.warns(UserWarning, match="cannot be recorded .* not permitted when stream is capturing"):
        assert graphs.run(steps, inputs) is steps
    assert graphs.run(steps, inputs) is steps  # and is not tried again
    assert steps.runs == 2


@pytest.mark.parametrize("draws", [True, False])
def test_a_choice_by_random_numbers_of_the_cpu_is_not_recorded(draws, monkeypatch):
    """As of layers to leave out (LayerDrop): every replay would leave out the same."""
    monkeypatch.setattr(cuda_graphs, "recorded", lambda step: step())
    monkeypatch.setattr(torch.random, "fork_rng", nullcontext)
    steps, inputs = Steps(), (torch.zeros(9, 2),)
    steps.copied, steps.step = lambda: steps, lambda row: torch.rand(()) if draws else row
    with pytest.raises(RuntimeError, match="on the CPU") if draws else nullcontext():
        cuda_graphs.Recording(steps, inputs, (16,))


class Steps:
    constants, runs = (), 0

    def run(self, inputs):
        self.runs += 1
        return self


def test_clients_with_more_or_less_steps_share_a_recording(monkeypatch):
    made = []

    class Recording:
        def __init__(self, steps, inputs, values):
            made.append(len(inputs[0]))
            self.values = values

        def run(self, steps, inputs):
            return steps

    monkeypatch.setattr(cuda_graphs, "Recording", Recording)
    graphs = Graphs()
    for count in (9, 12, 16, 9):
        graphs.run(Steps(), (torch.zeros(count, 2),))
    assert made == [9]


# --- dropout


class Dropped(nn.Module):
    """As users write it: dropout in PyTorch's own transformer, and in the code."""

    def __init__(self, probability=0.3):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last, self.probability = nn.Linear(2, 4), nn.Linear(4, 2), probability
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, probability)

    def forward(self, x):
        words = self.encoder(self.first(x.view(-1, 3, 2)).transpose(0, 1))
        return self.last(nn.functional.dropout(words.mean(0), self.probability, self.training))


ENGINES = [{"way": "rules"}, {"way": "rules", "threads": 3}, {"way": "rules", "micro_batch": 3}, {"way": "vmap"}]


@pytest.mark.slow
@LEVELS
def test_dropout_is_the_same_in_every_way_chunk_and_piece(config):
    wanted = played(trainer_of(config, Dropped(), "sequential"))
    for engine in ENGINES:
        trainer = trainer_of(config, Dropped(), **engine)
        assert (trainer.cohort.network.drops, trainer.cohort.network.draws) == (True, False)
        torch.testing.assert_close(played(trainer), wanted, rtol=0, atol=1e-5)
    assert float((played(trainer_of(config, Dropped(0.0), "rules")) - wanted).abs().max()) > 1e-3


@pytest.mark.slow
@LEVELS
def test_dropout_is_the_same_in_every_way_in_secure_mode(config):
    """With one key for all of them."""
    trainers = [trainer_of(config | {"random": "secure"}, Dropped(), way) for way in ("sequential", "rules", "vmap")]
    found = []
    for trainer in trainers:
        cohort, index = replace(trainer.cohort, streams=trainers[0].cohort.streams), RoundIndex(0, 8)
        found.append(torch.cat([train(cohort, trainers[0].params, np.array([k]), index, {})[0] for k in range(3)]))
        trainer.close()
    assert float(found[0].norm()) > 0.01
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_seed_is_of_a_record_in_a_step_whatever_else_is_in_the_batch():
    trainer = trainer_of(RECORD_LEVEL, Dropped(), "rules")
    cohort = trainer.cohort
    trainer.close()
    seen = {}
    for attempt, t, clients in ((0, 0, [0, 1, 2]), (0, 0, [2]), (0, 1, [2]), (1, 0, [2])):
        plan = planned(cohort, np.array(clients), RoundIndex(t, 8, attempt))
        for step, client, place in np.argwhere(plan.batches >= 0).tolist():
            name = attempt, t, step, clients[client], int(plan.batches[step, client, place])
            assert seen.setdefault(name, plan.seeds[step, client, place]) == plan.seeds[step, client, place]
    assert len({int(seed) for seed in seen.values()}) == len(seen) > 60
    fewer = replace(cohort.algorithm.records, batch=2)  # other batches of the same records
    plan = planned(
        replace(cohort, algorithm=replace(cohort.algorithm, records=fewer)), np.arange(3), RoundIndex(0, 8)
    )
    common = [
        (seen[name], plan.seeds[step, client, place])
        for step, client, place in np.argwhere(plan.batches >= 0).tolist()
        if (name := (0, 0, step, client, int(plan.batches[step, client, place]))) in seen
    ]
    assert len(common) > 5
    assert all(one == other for one, other in common)


def test_no_record_changes_what_is_dropped_of_another():
    """Else a record would move a clipped sum by more than its own clip."""
    torch.manual_seed(0)
    module, x = Dropped(), torch.rand(1, 8, 6)
    net = network(module, x[0, :3], per_record=True)
    params, y = net.layout.flatten(module).unsqueeze(0), torch.zeros(1, 8, dtype=torch.int64)
    seeds = torch.arange(8).unsqueeze(0)
    before = net.backward(params, x, y, torch.ones(1, 8), seeds).squares()
    x[0, 3] = 1e30
    after = net.backward(params, x, y, torch.ones(1, 8), seeds).squares()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(after[..., others], before[..., others])


def test_after_a_run_the_current_gpu_is_the_one_of_before(monkeypatch, tmp_path):
    current = [torch.device("cuda:0")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_device", current.append)

    def prepared(settings, *_):
        assert pick_device(settings.engine.device) == current[-1] == torch.device("cuda:1")
        raise RunError("far enough")

    monkeypatch.setattr(api, "prepare", prepared)
    with pytest.raises(RunError, match="far enough"):
        shoal.run({"rounds": 1}, device="cuda:1", runs=tmp_path)
    assert [device.index for device in current] == [0, 1, 0]


def test_the_gpu_that_is_named_becomes_the_current_one(monkeypatch):
    """Triton's kernels and recorded steps run on the current one, wherever their numbers lie."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert pick_device("cuda") == torch.device("cuda")
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]
    with pytest.raises(RunError, match="there is no device 'cuda:2': PyTorch sees 2, from cuda:0 on"):
        pick_device("cuda:2")
