"""A round computes what the papers' pseudo-code says, however it is cut into slices."""

import copy
from dataclasses import replace
from math import comb

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare
from torch import nn

import shoal
from shoal.algorithms import algorithm
from shoal.algorithms.base import Aggregate, Local
from shoal.data import load, partition
from shoal.data.partitions import ListedPartition
from shoal.mechanisms.sampling import Clients, Records
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import Streams
from shoal.training import round as engine_round
from shoal.training.batch_plan import planned
from shoal.training.engine_settings import Settings
from shoal.training.local_training import train
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import simulate

CPU = torch.device("cpu")


def small_cnn():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(8, 6, 2), nn.Flatten(), nn.Linear(24, 10)
    )


def small_mlp():
    torch.manual_seed(4)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def fedavg(**changes):
    base = algorithm("fedavg")
    wanted = {
        "clients": Clients("fixed-size", 4),
        "records": Records("shuffled", 7),
        "local": Local(lr=0.2),
    }
    return replace(base, **(wanted | changes))


def few_digits(rows=400):
    """Five to ten batches for each client."""
    whole = load("digits")
    return replace(whole, train_x=whole.train_x[:rows], train_y=whole.train_y[:rows])


def simulator(
    record, module, kind="dirichlet", clients=9, settings=None, rounds=3, seed=5, dataset=None, streams=None
):
    dataset = dataset or few_digits()
    parts = partition(kind, dataset.train_y, clients=clients, generator=Streams(seed).generator("partition"))
    settings = settings or Settings()
    return simulate(
        record, module, dataset, parts, rounds=rounds, streams=streams or Streams(seed), settings=settings
    )


def plain_round(sim, module, t):
    """The same round in plain PyTorch: one client after the other, its own optimiser, the same batches."""
    cohort, record = sim.cohort, sim.cohort.algorithm
    federation, index = cohort.client_data, RoundIndex(t, sim.rounds)
    drawn = record.clients.draw(cohort.streams.generator("clients", t, 0), t, sim.rounds, len(federation))
    start = copy.deepcopy(module.state_dict())
    sums = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    weight = 0.0
    for client in drawn:
        module.load_state_dict(start)
        optimiser = torch.optim.SGD(module.parameters(), lr=float(record.local.lr), momentum=record.local.momentum)
        for batch in planned(cohort, np.array([client]), index).batches[:, 0]:
            rows = torch.from_numpy(batch[batch >= 0])
            optimiser.zero_grad()
            F.cross_entropy(module(federation.x[rows]), federation.y[rows]).backward()
            optimiser.step()
        share = float(federation.partition.sizes[client]) if record.aggregate.weights == "size" else 1.0
        weight += share
        for name, tensor in module.state_dict().items():
            sums[name] += share * (tensor - start[name])
    module.load_state_dict({name: start[name] + sums[name] / weight for name in start})


@pytest.mark.slow
@pytest.mark.parametrize("make", [small_cnn, small_mlp])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"aggregate": Aggregate("equal")},
        {"local": Local(epochs=2, lr=0.1, momentum=0.5)},
        {"local": Local(steps=5, lr=0.1), "records": Records("with-replacement", 6)},
    ],
    ids=["by-size", "equal", "momentum", "steps"],
)
def test_three_rounds_equal_a_plain_pytorch_loop(make, changes):
    sim = simulator(fedavg(**changes), make())
    reference = make()
    for t in range(3):
        sim.params, sim.state, _ = run_round(sim.cohort, sim.params, sim.state, RoundIndex(t, 3))
        plain_round(sim, reference, t)
    expected = sim.cohort.network.layout.flatten(reference)
    assert float((sim.params - expected).abs().max()) < 1e-4


def final_model(settings, record=None, make=small_cnn):
    sim = simulator(record or fedavg(), make(), settings=settings)
    for t in range(2):
        sim.params, sim.state, _ = run_round(sim.cohort, sim.params, sim.state, RoundIndex(t, 3))
    return sim.params


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        Settings(threads=1),
        Settings(threads=3),
        Settings(memory=1e-4, threads=1),
        Settings(kernels=False),
        Settings(way="sequential"),
    ],
    ids=["one-thread", "three-threads", "small-slices", "plain-products", "one-by-one"],
)
def test_every_speed_up_can_be_turned_off_and_gives_the_same_model(settings):
    torch.testing.assert_close(final_model(settings), final_model(Settings()), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_without_kernels_no_noise_is_drawn_by_the_loop_in_c(monkeypatch):
    """Of a method that adds noise to its steps and to its counts."""
    record = replace(algorithm("quantile-record"), clients=Clients("fixed-size", 4), records=Records("poisson", 7))
    record = replace(record, local=replace(record.local, steps=5))
    plain, fast = (final_model(Settings(kernels=kernels), record) for kernels in (False, True))
    torch.testing.assert_close(plain, fast, rtol=1e-3, atol=1e-4)
    monkeypatch.setattr("shoal.random.normals.loop_in_c", lambda: pytest.fail("asked for"))
    assert torch.equal(final_model(Settings(kernels=False), record), plain)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_model_to_the_last_bit():
    assert torch.equal(final_model(Settings(threads=2)), final_model(Settings(threads=2)))


@pytest.mark.slow
def test_kept_momentum_goes_on_where_the_client_left_off():
    kept = fedavg(clients=Clients("all"), local=Local(momentum=0.9, keep_momentum=True))
    reset = fedavg(clients=Clients("all"), local=Local(momentum=0.9))
    assert not torch.allclose(final_model(Settings(), kept), final_model(Settings(), reset), atol=1e-3)


@pytest.mark.slow
def test_v_c_and_u_s_are_those_of_geyer_et_al():
    sim = simulator(fedavg(clients=Clients("all"), aggregate=Aggregate("equal")), small_mlp(), clients=5)
    updates = train(sim.cohort, sim.params, np.arange(5), RoundIndex(0, 3), {})[0].double()
    _, _, told = run_round(sim.cohort, sim.params, {}, RoundIndex(0, 3))
    assert told["v_c"] == pytest.approx(float(updates.var(0, unbiased=False).mean()), rel=1e-4)
    assert told["u_s"] == pytest.approx(float(updates.mean(0).square().mean()), rel=1e-4)
    assert told["bytes_sent"] == 5 * 4 * updates.shape[1]


@pytest.mark.slow
def test_an_update_that_is_not_finite_counts_as_zero_and_the_round_goes_on():
    dataset = load("digits")
    x = dataset.train_x.clone()
    parts = partition("iid", dataset.train_y, clients=4, generator=Streams(5).generator("partition"))
    x[parts.records(2)[0]] = 1e35
    sim = simulator(fedavg(clients=Clients("all")), small_mlp(), "iid", 4, dataset=replace(dataset, train_x=x))
    params, _, told = run_round(sim.cohort, sim.params, {}, RoundIndex(0, 3))
    assert told["bad_updates"] == 1
    assert torch.isfinite(params).all()
    assert not torch.equal(params, sim.params)


def test_a_record_never_reaches_the_updates_of_other_clients_by_filling_up_their_batches():
    """Record 0 is client 0's, and greater than float32 can square; the others' last batches are short."""
    random = np.random.default_rng(0)
    clients = [(random.random((size, 4), dtype="float32"), np.arange(size) % 2) for size in (6, 7, 9, 5)]
    clients[0][0][:] = [3e38, -3e38, 3e38, -3e38]
    dataset = shoal.from_clients(clients, test=(np.ones((4, 4), "float32"), np.arange(4) % 2))
    parts = partition("column", dataset.train_y, clients=None, owners=dataset.owners, generator=random)
    record = replace(algorithm("trusted-curator"), clients=Clients("all"), records=Records("shuffled", 4))
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    nn.init.uniform_(model.weight, -5, 5)
    sim = simulate(record, model, dataset, parts, rounds=3, streams=Streams(5), settings=Settings())
    _, _, told = run_round(sim.cohort, sim.params, {}, RoundIndex(0, 3))
    assert told["bad_updates"] == 1


def test_an_empty_poisson_cohort_leaves_the_model_as_it_is():
    sim = simulator(fedavg(clients=Clients("poisson", 1e-9)), small_mlp())
    params, _, told = run_round(sim.cohort, sim.params, {}, RoundIndex(0, 3))
    assert told["clients"] == 0
    assert torch.equal(params, sim.params)


@pytest.mark.slow
def test_ten_thousand_clients_are_index_views():
    dataset = load("digits")
    parts = partition(
        "shards", dataset.train_y, clients=10_000, records=600, generator=Streams(0).generator("partition")
    )
    assert parts.sizes.tolist() == [600] * 10_000
    assert parts.indices.nbytes == 4 * 600 * 10_000


@pytest.mark.slow
def test_dropout_follows_the_seed_and_leaves_other_random_numbers_alone():
    def model():
        torch.manual_seed(5)
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))
        torch.manual_seed(6)
        return final_model(Settings(), make=lambda: module)

    first = model()
    drawn = torch.rand(1)
    assert torch.equal(first, model())
    torch.manual_seed(6)
    assert torch.equal(drawn, torch.rand(1))


class Viewer(nn.Module):
    """A network as many write it: `view` wants its numbers in the usual order."""

    def __init__(self, channels):
        super().__init__()
        self.convolution, self.last = nn.Conv2d(channels, 4, 3), nn.Linear(4 * 6 * 6, 2)

    def forward(self, x):
        return self.last(torch.relu(self.convolution(x)).view(-1, 4 * 6 * 6))


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_a_model_that_views_its_pictures_is_trained_and_evaluated(channels, tmp_path):
    generator = np.random.default_rng(0)
    clients = [(generator.random((20, channels, 8, 8), dtype=np.float32), np.arange(20) % 2) for _ in range(3)]
    data = shoal.from_clients(clients, test_fraction=0.25)
    sampling = {"sampling": "all"}
    result = shoal.run(
        algorithm="fedavg", rounds=2, data=data, model=Viewer(channels), clients=sampling, runs=tmp_path
    )
    assert 0 <= result.accuracy <= 1


# --- secure mode: nobody's gradient depends on who else is there, not even in its last digits


@pytest.mark.slow
def test_in_secure_mode_the_shape_of_a_poisson_batch_says_nothing_of_who_was_drawn():
    """Of 32 rows and of 33 a product may be rounded in two ways, and a ReLU go two ways by that."""
    record = replace(algorithm("dp-sgd"), records=Records("poisson", 8), local=Local(steps=2))
    cohort = simulator(record, small_mlp(), streams=SecureStreams()).cohort
    clients = np.arange(cohort.population.clients)
    widths = [
        {planned(cohort, clients[k : k + 1], RoundIndex(t, 30)).batches.shape[2] for t in range(30)} for k in clients
    ]
    assert [len(found) for found in widths] == [1] * len(clients)


@pytest.mark.statistical(false_alarm=4e-7)
@pytest.mark.parametrize("record", [0, -1])
def test_nor_does_the_place_of_a_record_in_its_batch(record):
    """A convolution's gradients differ in their last digits at odd and even places: one record more moved all."""
    drawn = replace(algorithm("dp-sgd"), records=Records("poisson", 8), local=Local(steps=2000))
    all_digits = load("digits")
    cohort = simulator(drawn, small_mlp(), "iid", 100, dataset=all_digits, streams=SecureStreams()).cohort
    batches = planned(cohort, np.array([0]), RoundIndex(0, 1)).batches[:, 0]
    own = cohort.client_data.records_of(np.array([0]))[0]
    places = (batches == own[record]).sum(0)
    assert abs(places.sum() / 2000 - 8 / len(own)) < 0.06, "each record is drawn as often as before, once at most"
    assert chisquare(places).pvalue > 1e-7


def test_in_secure_mode_a_client_without_records_takes_no_step():
    sim = simulator(algorithm("dp-sgd"), small_mlp(), streams=SecureStreams())
    parts = ListedPartition(np.arange(9, dtype=np.int32), np.array([0, 0, 9]))
    cohort = replace(sim.cohort, client_data=replace(sim.cohort.client_data, partition=parts))
    updates, _ = train(cohort, sim.params, np.array([0]), RoundIndex(0, 3), {})
    assert not updates.any()


@pytest.mark.parametrize(("records", "batch"), [(1, 1), (20, 20), (20, 7), (1000, 10), (5000, 600)])
def test_no_poisson_batch_is_wider_than_the_widest_but_for_a_chance_of_1e_30(records, batch):
    widest = Records("poisson", batch).widest(records)
    above, k = 0, widest + 1  # the chance of k and more, times records^records: whole numbers, exact
    term = comb(records, k) * batch**k * (records - batch) ** max(records - k, 0)
    while k <= records:
        above += term
        term = term * (records - k) * batch // ((k + 1) * max(records - batch, 1))
        k += 1
    assert above * 10**33 <= 1001 * records**records


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_in_secure_mode_clients_are_trained_one_by_one_in_one_thread_each(size, monkeypatch):
    seen = []

    def watched(context, params, clients, index, state):
        seen.append((len(clients), torch.get_num_threads()))
        return train(context, params, clients, index, state)

    monkeypatch.setattr(engine_round, "train", watched)
    record = replace(
        algorithm("trusted-curator"), clients=Clients("fixed-size", size), records=Records("shuffled", 7)
    )
    sim = simulator(record, small_mlp(), settings=Settings(threads=2), streams=SecureStreams())
    run_round(sim.cohort, sim.params, {}, RoundIndex(0, 3))
    sim.close()
    assert seen == [(1, 1)] * size
