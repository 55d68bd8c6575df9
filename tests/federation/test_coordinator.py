"""A federation in one process, packed like a real one: it ends where the simulator does, and sends no more.

The same seed is used on both sides (`federation.seeded`), so that every batch and every noise is the same.
"""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

import shoal
from shoal.accounting import accountants
from shoal.algorithms import algorithm
from shoal.algorithms.charges import whole_run
from shoal.errors import ConfigError
from shoal.federation.terms import ROUND, TERMS
from shoal.mechanisms.setting import Setting
from shoal.mechanisms.update_clipping import NoisyClip, QuantileClip
from shoal.prepare import prepare
from shoal.random.streams import Streams
from shoal.training.round import protected_updates
from shoal.training.round_index import RoundIndex
from support.federations import NAMED, ROUNDS, SITES, farthest, served, settings, simulated
from support.small_federation import NAMES as ALL

NAMES = [name for name in ALL if not algorithm(name).sums_gradients]
"""The others need secure aggregation: tests/federation/secagg/test_noise_shares.py."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """The result and the messages of a method's federation: the same for all who ask."""
    return cache(lambda name: served(tmp_path_factory.mktemp(name), settings(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_federation_ends_where_the_simulator_does(tmp_path, federation, name):
    given = settings(name)
    result, _ = federation(name)
    expected = simulated(tmp_path, given)
    assert farthest(result, expected) <= 1e-5
    personal = algorithm(name).local.personal  # a coordinator cannot evaluate these as clients would
    assert personal or result.accuracy == expected.accuracy
    assert [line["clients"] for line in result.metrics] == [line["clients"] for line in expected.metrics]


@pytest.mark.slow
def test_it_does_so_where_records_are_sampled_by_rate(tmp_path):
    given = settings("dp-sgd", data__partition="dirichlet", examples__rate=0.1, examples__nominal_records=50)
    del given["records.batch"], given["local.steps"]
    result, _ = served(tmp_path, given)
    assert farthest(result, simulated(tmp_path, given)) <= 1e-5
    proven = {(claim["unit"], claim["observer"]): claim["epsilon"] for claim in result.proven}
    record = shoal.config.configure(given).algorithm
    done = whole_run(record, Setting(SITES, ROUNDS, sizes=(300,)), ROUNDS, "record", "release")
    expected = accountants.epsilon(done, 1e-5, adjacency="replace-one").epsilon
    assert proven["record", "release"] == pytest.approx(expected)
    assert proven["record", "server"] is None, "it knows the seed of the noise"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp-sgd", "fedavg"])
@pytest.mark.parametrize(
    "more",
    [{"records__augmentations": 3}, {"engine__micro_batch": 2}, {"engine__precision": "bf16"}],
    ids=["augmentations", "micro_batch", "precision"],
)
def test_and_where_sites_augment_their_pictures_or_take_them_in_pieces_or_in_bf16(tmp_path, name, more):
    given = settings(name, model="digits-mlp", **more)
    result, _ = served(tmp_path, given)
    assert farthest(result, simulated(tmp_path, given)) <= 1e-5
    other = simulated(tmp_path, settings(name, model="digits-mlp"))
    assert (farthest(result, other) > 1e-5) == ("engine__micro_batch" not in more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"local.momentum": 0.5, "local.keep_momentum": True},
        {"local.optimizer": "adamw", "local.lr": 0.01, "local.keep_momentum": True},
        {"local.proximal": 0.5, "local.weight_decay": 0.1, "local.max_grad_norm": 0.5},
        {"server.momentum": 0.9},
        {"data.partition": "dirichlet"},
        {"model": "mlp"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_it_does_so_with_momentum_other_partitions_and_models(tmp_path, changes):
    given = settings("fedavg", rounds=4) | changes
    assert farthest(served(tmp_path, given)[0], simulated(tmp_path, given)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_the_boundary_values_is_on_the_wire(federation, name):
    """Each update that was sent is, number by number, what the method lets leave that client, and nothing else is."""
    _, grid = federation(name)
    _, simulator = prepare(shoal.config.configure(settings(name)), None, None)
    record = simulator.cohort.algorithm
    messages = [(kind, node, payload) for to, node, kind, payload in grid.wire if (to, kind) == ("to", ROUND)]
    answers = [(node, payload) for to, node, kind, payload in grid.wire if (to, kind) == ("from", ROUND)]
    assert messages
    assert len(messages) == len(answers)
    extras = set()
    extras |= {"records"} if record.aggregate.weights == "size" else set()
    extras |= {"below"} if isinstance(record.per_update, QuantileClip) else set()
    extras |= {"share"} if hasattr(record.per_record, "count_noise_multiplier") else set()
    kept = {}
    for (_, _, message), (_, answer) in zip(messages, answers, strict=True):
        assert set(message.values) - {"clip", "answered"} == NAMED
        assert set(message.vectors) == {"model"}
        assert set(answer.values) == NAMED | extras
        assert set(answer.vectors) == {"update"}
        memory = kept | ({"clip": torch.tensor(message.values["clip"])} if "clip" in message.values else {})
        index = RoundIndex(message.values["round"], ROUNDS, message.values["attempt"])
        client = np.array([message.values["number"]])
        part = simulator.cohort.updates(client, message.vectors["model"], memory, index)
        kept |= {key: value for key, value in memory.items() if key.startswith("personal.")}
        sent = part.updates
        per_update = record.per_update
        later = isinstance(per_update, NoisyClip) and per_update.at == "server"
        if per_update is not None and not per_update.needs_cohort_norms and not later:
            bound = per_update.bound(memory, index.t, ROUNDS, None)
            sent = protected_updates(simulator.cohort, part, bound, index)
            if isinstance(per_update, QuantileClip):
                assert answer.values["below"] == int(part.norms[0] <= bound)
        assert torch.allclose(answer.vectors["update"], sent[0], atol=1e-6)
        if "records" in extras:
            assert answer.values["records"] == simulator.cohort.client_data.sizes(client)[0]
        if "share" in extras:
            assert math.isclose(answer.values["share"], float(part.shares[0]), abs_tol=1e-5)
    hellos = [payload for to, _, kind, payload in grid.wire if (to, kind) == ("from", TERMS)]
    assert all(set(payload.values) == {"agreed", "name"} and not payload.vectors for payload in hellos)


@pytest.mark.slow
def test_noise_at_the_client_is_on_what_it_sends(tmp_path):
    """With `per_update.at=client` what is sent differs from the clipped update by noise of that scale."""
    given = settings("fed-sdp", per_update__at="client", model="mlp", rounds=1)
    result, grid = served(tmp_path, given)
    assert farthest(result, simulated(tmp_path, given)) <= 1e-4  # noise of 24 on every number
    _, simulator = prepare(shoal.config.configure(given), None, None)
    message, answer = (
        next(p for to, _, kind, p in grid.wire if (to, kind) == (way, ROUND)) for way in ("to", "from")
    )
    quiet = replace(simulator.cohort, streams=Streams(99))
    client = np.array([message.values["number"]])
    part = quiet.updates(client, message.vectors["model"], {}, RoundIndex(0, 1, 0))
    scale = float(answer.vectors["update"].std())
    assert float(part.norms[0]) < 24  # the update itself is small beside it
    assert 0.98 * 24 < scale < 1.02 * 24  # 52,650 numbers: off by 2% once in 10^10 times


@pytest.mark.slow
def test_the_ledgers_of_both_say_the_same(tmp_path):
    given = settings("trusted-curator", clients__sampling="poisson")
    result, _ = served(tmp_path, given)
    expected = simulated(tmp_path, given).proven
    assert [claim["simulated"] for claim in expected] == [claim["unit"] == "client" for claim in expected]
    assert result.proven == [claim | {"simulated": False} for claim in expected], "sites exist"


@pytest.mark.slow
def test_fresh_noise_is_of_no_seed(tmp_path):
    given = settings("trusted-curator") | {"federation.seeded": False}
    one, grid = served(tmp_path / "1", given)
    other, _ = served(tmp_path / "2", given)
    assert farthest(one, other) > 1e-3
    assert all('"seed": null' in p.values["terms"] for to, _, kind, p in grid.wire if (to, kind) == ("to", TERMS))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"baseline": True}, "which the coordinator does not have"),
        ({"federation.seeded": False, "noise_seed": 3}, "noise_seed needs"),
        ({"federation.deadline": 0.0}, "federation.deadline must be > 0"),
        ({"federation.max_records": 5}, "given together"),
        ({"federation.aggregation": "secure"}, "fedavg does not"),
        ({"federation.deadlin": 5.0}, "did you mean 'federation.deadline'"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        served(tmp_path, settings("fedavg") | changes)
