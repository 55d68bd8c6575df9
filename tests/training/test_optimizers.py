"""Local optimisers do for many clients at once what torch.optim does for one; FedProx does what its formula says."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.algorithms import algorithm
from shoal.algorithms.base import Local
from shoal.config import configure
from shoal.data import load, partition
from shoal.errors import ConfigError
from shoal.mechanisms.sampling import Clients, Records
from shoal.random import normals
from shoal.random.secure_streams import SecureStreams, rounded_sum
from shoal.random.streams import Streams
from shoal.training.batch_plan import planned
from shoal.training.engine_settings import Settings
from shoal.training.local_training import train
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import simulate
from support.small_federation import simulator, small

FIRST = RoundIndex(0, 3)


def network(batch_norm=False):
    torch.manual_seed(4)
    hidden = [nn.Linear(64, 32), nn.BatchNorm1d(32) if batch_norm else nn.Identity(), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, 10))


def clients_of(local, module=None, count=5, batch=7, **settings):
    """A federation of clients of different sizes: some have fewer steps than others."""
    data = load("digits")
    parts = partition("dirichlet", data.train_y[:400], clients=count, generator=Streams(1).generator("partition"))
    record = replace(algorithm("fedavg"), local=local, records=Records("shuffled", batch), clients=Clients("all"))
    settings = Settings("cpu", threads=1, **settings)
    return simulate(record, module or network(), data, parts, rounds=3, streams=Streams(5), settings=settings)


def by_torch(sim, client, local, optimizer, module=None):
    """The update of one client by a plain loop: the loss has the proximal term, torch clips its gradient."""
    module = copy.deepcopy(module or network()).train()
    before = copy.deepcopy(module)
    chosen, federation = optimizer(module.parameters()), sim.cohort.client_data
    for batch in planned(sim.cohort, np.array([client]), FIRST).batches[:, 0]:
        rows = torch.from_numpy(batch[batch >= 0])
        chosen.zero_grad()
        loss = F.cross_entropy(module(federation.x[rows]), federation.y[rows])
        pairs = zip(module.parameters(), before.parameters(), strict=True)
        (loss + local.proximal / 2 * sum((w - start.detach()).square().sum() for w, start in pairs)).backward()
        if local.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), local.max_grad_norm)
        chosen.step()
    layout = sim.cohort.network.layout
    return layout.flatten(module) - layout.flatten(before)


CASES = {
    "sgd": (Local(epochs=2, lr=0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (Local(epochs=2, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
    "weight decay": (Local(lr=0.1, weight_decay=0.3), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.3)),
    "both": (
        Local(lr=0.1, momentum=0.9, weight_decay=0.3),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.3),
    ),
    "adamw": (
        Local(epochs=2, lr=0.003, optimizer="adamw"),
        lambda p: torch.optim.AdamW(p, 0.003, weight_decay=0.0),
    ),
    "adamw with decay": (
        Local(lr=0.003, optimizer="adamw", betas=(0.8, 0.95), weight_decay=0.5),
        lambda p: torch.optim.AdamW(p, 0.003, betas=(0.8, 0.95), weight_decay=0.5),
    ),
    "proximal": (Local(epochs=2, lr=0.1, proximal=0.7), lambda p: torch.optim.SGD(p, 0.1)),
    "clipped": (Local(lr=0.1, max_grad_norm=0.5), lambda p: torch.optim.SGD(p, 0.1)),
    "everything": (
        Local(lr=0.003, optimizer="adamw", weight_decay=0.5, proximal=0.7, max_grad_norm=0.5),
        lambda p: torch.optim.AdamW(p, 0.003, weight_decay=0.5),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "way"),
    [(case, "rules") for case in CASES]
    + [(case, way) for case in ("both", "everything") for way in ("vmap", "sequential")],
)  # the optimiser takes gradients as they come: a way matters for their order and their padding alone
def test_it_does_what_torch_does_for_each_client(case, way):
    local, optimizer = CASES[case]
    sim = clients_of(local, way=way)
    clients = np.arange(5)
    steps = planned(sim.cohort, clients, FIRST).steps
    assert steps.min() >= 4
    assert steps.min() < steps.max(), "some wait while others go on"
    found, _ = train(sim.cohort, sim.params, clients, FIRST, {})
    for client in clients:
        expected = by_torch(sim, client, local, optimizer)
        torch.testing.assert_close(found[client], expected, rtol=0, atol=2e-6)
        assert float(expected.norm()) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("case", ["both", "everything"])
def test_running_statistics_are_neither_decayed_nor_pulled(case):
    local, optimizer = CASES[case]
    sim = clients_of(local, network(batch_norm=True))
    found, _ = train(sim.cohort, sim.params, np.array([2]), FIRST, {})
    expected = by_torch(sim, 2, local, optimizer, network(batch_norm=True))
    torch.testing.assert_close(found[0], expected, rtol=0, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["momentum", "adamw"])
def test_a_client_that_keeps_its_state_goes_on_where_it_was(case):
    """Two rounds of one client from its own model equal one optimiser that runs through."""
    local, optimizer = CASES[case]
    sim, client = clients_of(replace(local, keep_momentum=True)), np.array([1])
    params, state = sim.params, {}
    module = network()
    chosen, federation = optimizer(module.parameters()), sim.cohort.client_data
    for t in range(2):
        index = RoundIndex(t, 3)
        update, _ = train(sim.cohort, params, client, index, state)
        params = params + update[0]
        for batch in planned(sim.cohort, client, index).batches[:, 0]:
            rows = torch.from_numpy(batch[batch >= 0])
            chosen.zero_grad()
            F.cross_entropy(module(federation.x[rows]), federation.y[rows]).backward()
            chosen.step()
    torch.testing.assert_close(params, sim.cohort.network.layout.flatten(module), rtol=0, atol=2e-6)
    forgetful, _ = train(sim.cohort, params - update[0], client, RoundIndex(1, 3), {})
    assert not torch.allclose(forgetful, update, atol=1e-4)


@pytest.mark.slow
def test_a_client_that_diverges_keeps_what_it_had():
    sim = clients_of(Local(lr=1e12, momentum=0.9, keep_momentum=True, weight_decay=1.0, epochs=9))
    had = torch.ones(sim.cohort.network.layout.size)
    state = {"velocity.0": had}
    update, _ = train(sim.cohort, sim.params, np.array([0, 1]), FIRST, state)
    assert not update.isfinite().all()
    assert list(state) == ["velocity.0"]
    assert state["velocity.0"] is had


@pytest.mark.slow
def test_a_run_that_is_resumed_ends_as_if_nothing_had_been(tmp_path):
    given = {"algorithm": "fedavg", "model": "linear", "rounds": 4, "data.clients": 5, "clients.cohort": 3}
    given |= {"local.optimizer": "adamw", "local.lr": 0.01, "local.weight_decay": 0.1, "local.keep_momentum": True}
    given |= {"local.proximal": 0.1, "engine.threads": 1, "engine.device": "cpu"}
    whole, held = shoal.run(given, runs=tmp_path), []

    def stop_after_two(line):
        if line["round"] == 2:
            held[0].stop()

    with pytest.raises(shoal.ShoalError, match="stopped after round 2") as stopped:
        shoal.run(given, runs=tmp_path, on_start=lambda config, sim, run: held.append(sim), on_round=stop_after_two)
    rest = shoal.run(resume=stopped.value.run)
    assert all(torch.equal(rest.model[name], tensor) for name, tensor in whole.model.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_that_take_the_place_of_others_begin_where_these_do(case):
    """What a CUDA graph relies on: copied memory, and values taken over in it; the model of the round included."""
    from shoal.training.local_training import _first, _inputs

    local, _ = CASES[case]
    sim, clients = clients_of(local), np.arange(3)
    inputs = _inputs(sim.cohort, planned(sim.cohort, clients, FIRST), sim.params)

    def first(params):
        return _first(sim.cohort, params, clients, FIRST, {})

    recorded = first(sim.params).copied()
    recorded.run(inputs)
    recorded.begin(first(sim.params * 0.5))
    found, wanted = recorded.run(inputs), first(sim.params * 0.5).run(inputs)
    torch.testing.assert_close(found.client_params, wanted.client_params, rtol=1e-5, atol=1e-6)
    assert recorded.constants == wanted.constants


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Local(optimizer="adamw"), Local()),
        (Local(weight_decay=0.1), Local()),
        (Local(proximal=0.1), Local()),
        (Local(max_grad_norm=0.1), Local()),
        (Local(optimizer="adamw"), Local(optimizer="adamw", betas=(0.9, 0.99))),
    ],
)
def test_steps_of_other_settings_are_never_replayed(one, other):
    from shoal.training.local_training import _first

    sims = [clients_of(local) for local in (one, other)]
    found = [_first(sim.cohort, sim.params, np.arange(2), FIRST, {}).constants for sim in sims]
    assert found[0] != found[1]


@pytest.mark.parametrize("local", [Local(), Local(proximal=1.0), Local(weight_decay=1.0), Local(optimizer="adamw")])
def test_only_plain_sgd_defers_its_updates(local, monkeypatch):
    sim, opened = clients_of(local), []
    deferred = type(sim.cohort.network).deferred_updates
    monkeypatch.setattr(
        type(sim.cohort.network), "deferred_updates", lambda *given: (opened.append(given), deferred(*given))[1]
    )
    train(sim.cohort, sim.params, np.arange(2), FIRST, {})
    assert bool(opened) == (local == Local())


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({"weight_decay": 0.3}, {}),
        ({"proximal": 0.3}, {}),
        ({"optimizer": "adamw"}, {"momentum": 0.5}),  # both add the noise to a gradient in memory
    ],
    ids=["weight decay", "proximal", "adamw"],
)
def test_in_a_noisy_step_all_else_follows_the_noise(changes, alike):
    """Given the noisy gradient alone, no record, the step can be computed: it is post-processing."""
    record = small("fed-cdp")
    record = replace(record, local=replace(record.local, steps=1, lr=0.5))

    def update(changes):
        sim = simulator(replace(record, local=replace(record.local, **changes)))
        return sim.params, train(sim.cohort, sim.params, np.arange(3), RoundIndex(0, 4), {})[0]

    start, found = update(changes)
    noisy = -update(alike)[1] / 0.5
    adam = noisy / (noisy.abs() + 1e-8)
    expected = adam if "optimizer" in changes else noisy + changes.get("weight_decay", 0.0) * start
    torch.testing.assert_close(found, -0.5 * expected, rtol=1e-4, atol=1e-5)


KEPT = [
    {"momentum": 0.9, "weight_decay": 0.1, "keep_momentum": True},
    {"optimizer": "adamw", "weight_decay": 0.1, "keep_momentum": True},
    {"proximal": 0.5, "personal": 1},
    {"optimizer": "adamw", "proximal": 0.5, "personal": 1, "keep_momentum": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp-sgd", "quantile-record", "adaclip"])
@pytest.mark.parametrize("changes", KEPT, ids=["momentum", "adamw", "personal", "everything"])
def test_noisy_sums_are_all_that_updates_and_kept_state_know_of_the_records(name, changes, monkeypatch):
    """Other records, given the noisy sums of the first, end with the same numbers after three rounds."""
    record = small(name)
    sim = simulator(replace(record, local=replace(record.local, **changes)))
    cohort = replace(sim.cohort, streams=SecureStreams())
    others = replace(cohort, client_data=replace(cohort.client_data, x=5 - 3 * cohort.client_data.x))
    drawn = []

    def trained(cohort):
        params, found, state = sim.params, {}, {}
        for t in range(3):
            update, metrics = train(cohort, params, np.array([0]), RoundIndex(t, 4), state)
            found |= {f"update {t}": update, f"shares {t}": metrics.shares}
            params = params + update[0]
        return found | state

    monkeypatch.setattr(normals, "rounded_sum", lambda *given: drawn.append(rounded_sum(*given)) or drawn[-1])
    wanted, unlike = trained(cohort), trained(others)
    assert not torch.allclose(unlike["update 0"], wanted["update 0"])
    half = len(drawn) // 2
    replayed = iter([each.clone() for each in drawn[:half]])
    monkeypatch.setattr(normals, "rounded_sum", lambda *given: next(replayed))
    torch.testing.assert_close(trained(others), wanted, rtol=0, atol=0)
    assert next(replayed, None) is None


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("local.optimizer=adam", "it is one of sgd, adamw"),
        ("local.weight_decay=-1", "local.weight_decay must be >= 0"),
        ("local.proximal=1e30", "local.proximal must be >= 0"),
        ("local.max_grad_norm=0.0", "local.max_grad_norm must be > 0"),
        ("local.betas=[0.9, 1.0]", "local.betas must be two numbers in [0, 1), got [0.9, 1.0]"),
        ("local.betas=[0.9, 0.98]", "local.betas [0.9, 0.98] have no effect with SGD: set local.optimizer=adamw"),
    ],
)
def test_settings_without_sense_are_refused_by_name(word, words):
    with pytest.raises(ConfigError) as refused:
        configure({"algorithm": "fedavg"}, [word])
    assert words in str(refused.value)


def test_momentum_beside_adamw_is_refused():
    with pytest.raises(ConfigError, match=r"local.momentum 0.5 has no effect with AdamW: set local.betas"):
        configure({"algorithm": "fedavg", "local.optimizer": "adamw", "local.momentum": 0.5})


def test_clipping_without_privacy_is_refused_beside_the_clip_of_records():
    record = configure({"algorithm": "dp-sgd", "local.max_grad_norm": 1.0}).algorithm
    with pytest.raises(ConfigError, match=r"local.max_grad_norm 1 has no use beside per_record"):
        record.refuse_unfit(0, 10, 1)


def test_a_gradient_in_memory_must_hold_its_noise_whatever_the_learning_rate():
    given = {"algorithm": "dp-sgd", "per_record.clip_norm": 1e-12, "records.batch": 10**7, "local.lr": 1e6}
    configure(given).algorithm.refuse_unfit(0, 10, 1)
    record = configure(given | {"local.optimizer": "adamw"}).algorithm
    with pytest.raises(ConfigError, match=r"^clip / records.batch must be from 1e-18 .* change the clip"):
        record.refuse_unfit(0, 10, 1)
