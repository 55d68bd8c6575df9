"""Personal layers (FedPer) stay with their clients: in no message and no released file; each client uses its own."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import shoal
from shoal import release
from shoal.accounting.events import Sampled, Unbounded
from shoal.algorithms import algorithm
from shoal.algorithms.base import Local
from shoal.algorithms.charges import event
from shoal.config import configure
from shoal.data import Dataset, ListedPartition, load, partition
from shoal.errors import ConfigError
from shoal.gradients import Layout
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.setting import Setting
from shoal.mechanisms.update_clipping import Clip
from shoal.prepare import prepare
from shoal.random.streams import Streams
from shoal.tasks import Regression
from shoal.training.engine_settings import Settings
from shoal.training.local_training import train
from shoal.training.personal import users_of
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import simulate
from support.small_federation import digits, parted

GIVEN = {
    "algorithm": "fedper",
    "model": "digits-mlp",
    "rounds": 3,
    "data.clients": 6,
    "data.partition": "shards",
    "clients.cohort": 4,
    "engine.threads": 1,
    "engine.device": "cpu",
}
FIRST = RoundIndex(0, 3)


class Headed(nn.Module):
    """Two named parts, of which one has a layer inside."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10))
        self.body = nn.Linear(64, 8)

    def forward(self, x):
        return self.head(torch.relu(self.body(x.flatten(1))))


def federation(record, module=None, settings=None):
    torch.manual_seed(2)
    settings = settings or Settings("cpu", threads=1)
    return simulate(record, module or Headed(), digits(), parted(4), rounds=3, streams=Streams(5), settings=settings)


def headed(personal="head", **changes):
    record = replace(algorithm("fedavg"), clients=Clients("all"), records=Records("shuffled", 5), **changes)
    return replace(record, local=replace(record.local, personal=personal, lr=0.2))


# --- where they lie


def test_they_lie_behind_the_shared_layers_whatever_the_models_order():
    layout = Layout.of(Headed(), "head")
    assert [entry.name for entry in layout.entries][:2] == ["body.weight", "body.bias"]
    assert layout.shared.size == 64 * 8 + 8
    assert layout.personal_layers == ["head.0", "head.2"]
    assert [entry.start for entry in layout.entries] == [0, 512, 520, 584, 592, 672]
    module = Headed()
    assert torch.equal(layout.shared.flatten(module), layout.flatten(module)[: layout.shared.size])


@pytest.mark.parametrize(
    ("personal", "layers"),
    [
        (1, ["body"]),
        (("head.2",), ["head.2"]),
        (("head.0", "head.2"), ["head.0", "head.2"]),
        (0, []),
        ((), []),
    ],
)
def test_they_are_named_or_counted_from_the_end(personal, layers):
    assert Layout.of(Headed(), personal).personal_layers == layers


@pytest.mark.parametrize(
    ("personal", "words"),
    [
        ("hed", r"the model trains no layer 'hed'.*its layers are head.0, head.2, body"),
        ("head.0.weight", r"the model trains no layer 'head.0.weight'"),
        (3, r"local.personal 3 leaves no layer to share: the model trains 3"),
        (("head", "body"), r"leaves no layer to share"),
    ],
)
def test_layers_that_cannot_be_personal_are_refused_by_name(personal, words):
    with pytest.raises(ConfigError, match=words):
        Layout.of(Headed(), personal)


@pytest.mark.parametrize("personal", [-1, "", ("head", "")])
def test_what_names_no_layer_is_refused(personal):
    """A parameter of the model itself lies in the layer '': it would be kept, and the charge would not know."""
    with pytest.raises(ConfigError, match=r"local.personal must be >= 0, or names of layers, got"):
        configure({"algorithm": "fedper", "local.personal": personal})


def test_a_model_of_one_layer_is_refused_and_the_message_says_why():
    with pytest.raises(ConfigError, match=r"local.personal 1 leaves no layer to share: the model trains 1"):
        prepare(configure(GIVEN | {"model": "linear"}), None, None)


# --- what they learn


@pytest.mark.parametrize("way", ["rules", "vmap", "sequential"])
@pytest.mark.parametrize("changes", [{}, {"momentum": 0.5}, {"optimizer": "adamw", "lr": 0.01}, {"proximal": 0.5}])
def test_a_client_trains_its_whole_model_and_sends_the_shared_part(changes, way):
    """As a plain client that begins with the same layers would; the proximal term leaves personal layers alone."""
    record = headed()
    record = replace(record, local=replace(record.local, **changes))
    sim = federation(record, settings=Settings("cpu", threads=1, way=way))
    state, params = {}, sim.params
    whole = sim.cohort.network.layout
    sent, _ = train(sim.cohort, params, np.arange(4), FIRST, state)
    assert sent.shape == (4, whole.shared.size)
    plain = federation(replace(record, local=replace(record.local, personal=0, proximal=0.0)))
    if not changes.get("proximal"):
        everything, _ = train(plain.cohort, plain.params, np.arange(4), FIRST, {})
        body = Layout.of(Headed()).entries[-2:]
        torch.testing.assert_close(sent, torch.cat([entry.of(everything).flatten(1) for entry in body], 1))
        head = torch.stack([state[f"personal.{k}"] for k in range(4)]) - sim.cohort.personal
        torch.testing.assert_close(head, everything[:, : body[0].start])
    else:
        pulled = {k: state[f"personal.{k}"] for k in range(4)}
        assert all(not torch.equal(row, sim.cohort.personal) for row in pulled.values())
    assert set(state) == {f"personal.{k}" for k in range(4)}


def test_each_round_begins_with_the_clients_own_layers():
    sim = federation(headed())
    state = {}
    train(sim.cohort, sim.params, np.arange(4), FIRST, state)
    one = {key: value.clone() for key, value in state.items()}
    again = RoundIndex(1, 3)
    together, _ = train(sim.cohort, sim.params, np.arange(4), again, state)
    alone, _ = train(sim.cohort, sim.params, np.array([2]), again, {"personal.2": one["personal.2"]})
    torch.testing.assert_close(together[2], alone[0])
    fresh, _ = train(sim.cohort, sim.params, np.array([2]), again, {})
    assert not torch.allclose(fresh, alone, atol=1e-3)


def test_without_a_client_its_layers_do_not_change():
    sim = federation(replace(headed(), clients=Clients("fixed-size", 2)))
    params, state, _ = run_round(sim.cohort, sim.params, {}, FIRST)
    came = {key for key in state if key.startswith("personal.")}
    assert len(came) == 2
    after = run_round(sim.cohort, params, state, RoundIndex(1, 3))[1]
    drawn = sim.cohort.algorithm.clients.draw(sim.cohort.streams.generator("clients", 1, 0), 1, 3, 4)
    for key in came - {f"personal.{client}" for client in drawn}:
        assert torch.equal(after[key], state[key])


# --- clips, noise and charges


def test_at_client_level_they_are_neither_clipped_nor_noised():
    """The update is clipped by the norm of what is sent, and a client's own layers are those of no clip at all."""
    free, held = headed(), headed(per_update=Clip(1e-3))
    states = []
    for record in (free, held):
        sim = federation(record)
        params, state, metrics = run_round(sim.cohort, sim.params, {}, FIRST)
        states.append(state)
    assert metrics["clipped"] == 1.0
    assert float((params - sim.params).norm()) <= 1e-3
    for key, row in states[0].items():
        assert torch.equal(states[1][key], row)


def test_at_record_level_they_get_the_noise_of_the_steps():
    """The shared layers' gradients go through them: noise-free, they would carry a record past the clip."""
    record = replace(algorithm("dp-sgd"), records=Records("poisson", 5))
    record = replace(record, local=Local(steps=1, lr=1.0, personal="head"))
    loud = replace(record, per_step=replace(record.per_step, noise_multiplier=1000.0))
    state = {}
    sim = federation(loud)
    train(sim.cohort, sim.params, np.arange(4), FIRST, state)
    spread = torch.stack([state[f"personal.{k}"] for k in range(4)]).std()
    assert float(spread) == pytest.approx(1000.0 * 4.0 / 5, rel=0.2)  # 648 numbers: off by 20% once in 10^11 times


def test_the_charge_counts_every_parameter_and_layer_that_gets_noise():
    record = headed()
    sim = federation(record)
    assert (sim.setting.parameters, sim.setting.layers) == (Layout.of(Headed()).size, 3)
    assert sim.params.numel() == sim.cohort.layout.size == Layout.of(Headed(), "head").shared.size


SOME = Setting(100, 10, sizes=(50,), parameters=1000)


@pytest.mark.parametrize("personal", [0, 1])
def test_a_fixed_number_of_clients_that_keep_layers_proves_nothing_poisson_does(personal):
    record = algorithm("trusted-curator")
    record = replace(record, local=replace(record.local, personal=personal))
    fixed = event(replace(record, clients=Clients("fixed-size", 10)), SOME, 0, "client", "release")
    poisson = event(replace(record, clients=Clients("poisson", 10)), SOME, 0, "client", "release")
    assert isinstance(fixed, Unbounded) == bool(personal)
    assert not personal or "personal layers" in fixed.because
    assert any(isinstance(part, Sampled) for part in poisson.events)


@pytest.mark.parametrize("name", ["dp-sgd", "fed-cdp"])
@pytest.mark.parametrize("observer", ["release", "server", "client-process"])
def test_a_record_is_charged_as_without_them_since_all_steps_have_noise(name, observer):
    record = algorithm(name)
    own = replace(record, local=replace(record.local, personal=1))
    assert event(own, SOME, 0, "record", observer) == event(record, SOME, 0, "record", observer)


# --- what is released


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return shoal.run(GIVEN, runs=tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_no_clients_layer_is_in_the_released_model(ran):
    """At most the initial values are, which follow from the seed."""
    assert list(ran.model) == ["1.weight", "1.bias"]
    _, sim = prepare(configure(GIVEN), None, None)
    initial = sim.evaluation.module.state_dict()
    sim.close()
    with safe_open(ran.run / "model.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert not torch.equal(found.pop("1.weight"), initial["1.weight"])
    assert not torch.equal(found.pop("1.bias"), initial["1.bias"])
    assert all(torch.equal(tensor, initial[name]) for name, tensor in found.items())


@pytest.mark.slow
def test_the_clients_own_layers_are_in_a_file_of_their_own_that_is_not_for_release(ran):
    with safe_open(ran.run / "personal.safetensors", framework="pt") as file:
        assert file.metadata()["release"] == release.PERSONAL
        assert release.PERSONAL.startswith("not for release")
        names = set(file.keys())
        rows = {name: file.get_tensor(name) for name in names}
    assert {name.partition("/")[2] for name in names} == {"3.weight", "3.bias"}
    own = shoal.load_model(ran.run, client=min(names).partition("/")[0]).bundle
    assert own.release == release.PERSONAL, "also in a file that is exported with them"
    clients = sorted({name.partition("/")[0] for name in names})
    assert 4 <= len(clients) <= 6
    assert rows[f"{clients[0]}/3.weight"].shape == (10, 64)
    assert not torch.equal(rows[f"{clients[0]}/3.weight"], rows[f"{clients[1]}/3.weight"])


@pytest.mark.slow
def test_the_result_says_how_it_was_evaluated_and_that_nothing_is_claimed(ran):
    (note,) = json.loads((ran.run / "result.json").read_text())["notes"]
    assert note.startswith("personal layers (3) never leave their clients, and nothing is claimed for them")
    assert "with the initial ones if that client never took part" in note


def test_after_an_evaluation_the_module_holds_no_clients_layers():
    """Whatever else is saved from the module, nobody's layers are in it."""
    _, sim = prepare(configure(GIVEN), None, None)
    own = sim.evaluation.layout.own
    before = own.flatten(sim.evaluation.module)
    sim.run_round(0)
    sim.evaluate()
    assert torch.equal(own.flatten(sim.evaluation.module), before)
    sim.close()


# --- used as each client would


@pytest.mark.slow
def test_each_held_out_record_is_predicted_with_its_clients_own_layers():
    """Three clients that mean different things by the same picture: no shared model can please two of them."""
    x = torch.eye(6).repeat(20, 1)
    turns = torch.arange(3).repeat_interleave(40)
    y = (torch.arange(6).repeat(20) + 2 * turns) % 6
    owners = turns.numpy().astype(np.int64)
    last = np.arange(120) % 40 >= 28
    kept, test = torch.from_numpy(~last), torch.from_numpy(last)
    data = Dataset(
        "turned", x[kept], y[kept], x[test], y[test], tuple("abcdef"), owners=owners[~last],
        owner_names=("north", "south", "west"), test_owners=owners[last],
    )  # fmt: skip
    given = {"rounds": 30, "clients.cohort": 2, "engine.threads": 1, "local.lr": 1.0, "local.epochs": 5}
    scores = {}
    for name in ("fedper", "fedavg"):
        module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))
        torch.manual_seed(0)
        _, sim = prepare(configure(given | {"algorithm": name, "data.name": "turned"}), data, module)
        while sim.done < 30:
            sim.run_round(0)
        scores[name] = sim.evaluate()["accuracy"]
        personal = sim.personal
        if personal:
            figures = sim.evaluation.figures(sim.model, personal)
            assert [each["client"] for each in figures["figures_by_client"]] == ["north", "south", "west"]
            assert min(each["figures"]["accuracy"] for each in figures["figures_by_client"]) == 1.0
            swapped = {0: personal[1], 1: personal[2], 2: personal[0]}
            assert sim.evaluation.metrics(sim.model, swapped)["accuracy"] < 0.5
            assert sim.client_names == ["north", "south", "west"]
        sim.close()
    assert scores["fedper"] == 1.0
    assert scores["fedavg"] < 0.5


@pytest.mark.slow
def test_a_client_that_never_took_part_uses_the_initial_layers():
    _, sim = prepare(configure(GIVEN), None, None)
    evaluation, users = sim.evaluation, sim.evaluation.users
    sim.run_round(0)
    away = sorted(set(range(6)) - set(sim.personal))
    assert away
    figures = evaluation.metrics(sim.model, sim.personal)
    initial = dict.fromkeys(away, evaluation.initial)
    assert evaluation.metrics(sim.model, sim.personal | initial) == figures
    wrong = dict.fromkeys(away, evaluation.initial * 0)
    assert np.isin(users, away).any()
    assert evaluation.metrics(sim.model, sim.personal | wrong) != figures
    sim.close()


@pytest.mark.parametrize("kind", ["shards", "iid", "dirichlet"])
def test_clients_of_no_name_share_the_held_out_records_as_they_hold_the_classes(kind):
    data = load("digits")
    parts = partition(kind, data.train_y, clients=10, generator=Streams(0).generator("partition"))
    users = users_of(data, parts)
    for client in range(10):
        own, asked = data.train_y[parts.records(client)], data.test_y[users == client]
        held, tested = (torch.bincount(y, minlength=10).double() for y in (own, asked))
        share = held / torch.bincount(data.train_y, minlength=10) * torch.bincount(data.test_y, minlength=10)
        assert float((tested - share).abs().max()) <= 1.0, "to the nearest record"


def test_numbers_have_no_classes_and_are_shared_by_size():
    y = torch.linspace(0, 1, 40)
    data = Dataset("n", y[:, None], y, y[:, None], y, (), known_task=Regression(low=0.0, high=1.0))
    parts = ListedPartition(np.arange(40, dtype=np.int32), np.array([0, 10, 40]), simulated=True)
    assert np.bincount(users_of(data, parts)).tolist() == [10, 30]


# --- going on


@pytest.mark.slow
def test_layers_survive_a_stop_also_where_the_noise_is_the_systems(tmp_path):
    held = []

    def stop(line):
        held[0].stop()

    given = GIVEN | {"random": "secure", "local.keep_momentum": True, "local.momentum": 0.5}
    with pytest.raises(shoal.ShoalError, match="stopped after round 1") as stopped:
        shoal.run(given, runs=tmp_path, on_start=lambda config, sim, folder: held.append(sim), on_round=stop)
    with safe_open(stopped.value.run / "checkpoint" / "state.safetensors", framework="pt") as file:
        kept = {name.partition(".")[0] for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["release"].startswith("not for release")
    assert kept == {"model", "personal"}
    assert shoal.run(resume=stopped.value.run).rounds == 3


@pytest.mark.slow
def test_the_baseline_begins_with_the_same_layers(tmp_path):
    """Without noise and clip, the baseline of a method that has neither is the method itself."""
    result = shoal.run(GIVEN | {"baseline": True}, runs=tmp_path)
    assert result.baseline == result.accuracy
