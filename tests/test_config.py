"""Every key and value of a configuration is checked; what is wrong is named, with what was probably meant."""

import sys
from dataclasses import fields, is_dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.accounting.claims import large_delta
from shoal.algorithms import algorithms
from shoal.algorithms.base import BOUNDARIES
from shoal.api import settings_of
from shoal.cli.main import main
from shoal.config import configure, to_dict, to_toml
from shoal.data import load
from shoal.errors import ConfigError


def refused(*overrides, source=None):
    with pytest.raises(ConfigError) as caught:
        configure(source, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("round=5", ["'round'", "'rounds'"]),
        ("sed=5", ["'sed'", "'seed'"]),
        ("algoritm=fedavg", ["'algoritm'", "'algorithm'"]),
        ("data.clinets=5", ["'data.clinets'", "'data.clients'"]),
        ("clients.cohorts=5", ["'clients.cohorts'", "'clients.cohort'"]),
        ("budget.eps=5", ["'budget.eps'", "'budget.epsilon'"]),
        ("engine.thread=5", ["'engine.thread'", "'engine.threads'"]),
        ("local.learning_rate=5", ["'local.learning_rate'"]),
        ("data=5", ["'data'"]),
        ("data.name.x=5", ["'data.name.x'", "'data.name'"]),
        ("=5", ["''", "choose from"]),
        (".=5", ["'.'"]),
        ("Rounds=5", ["'Rounds'", "'rounds'"]),
    ],
)
def test_a_key_that_does_not_exist_is_named_with_the_nearest(word, named):
    said = refused("algorithm=fedavg", word)
    assert all(part in said for part in named), said


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("rounds=0", ["rounds", "0"]),
        ("rounds=-3", ["rounds", "-3"]),
        ("rounds=many", ["rounds", "'many'", "integer"]),
        ("rounds=1.5", ["rounds", "1.5", "integer"]),
        ("rounds=true", ["rounds", "True", "integer"]),
        ("rounds=[3]", ["rounds", "[3]"]),
        ("rounds=", ["rounds", "''"]),
        ("rounds=99999999999999999999", ["rounds", "63 bits"]),
        ("seed=abc", ["seed", "'abc'"]),
        ("model=7", ["model", "7", "string"]),
        ("algorithm=fedavgg", ["'fedavgg'", "'fedavg'"]),
        ("algorithm=3", ["algorithm", "3", "string"]),
        ("data.partition=shard", ["data.partition", "'shard'", "'shards'"]),
        ("data.partition=xyz", ["data.partition", "'xyz'", "dirichlet", "iid", "column"]),
        ("data.scale=units", ["data.scale", "'units'", "'unit'"]),
        ("data.clients=0", ["data.clients", "0"]),
        ("data.shards=0", ["data.shards", "0"]),
        ("data.records=0", ["data.records", "0"]),
        ("data.alpha=0", ["data.alpha", "0"]),
        ("data.alpha=nan", ["data.alpha", "nan", "finite"]),
        ("data.fraction=1.5", ["data.fraction", "1.5"]),
        ("data.test_fraction=1", ["data.test_fraction", "1"]),
        ("engine.memory=-1", ["engine.memory", "-1"]),
        ("engine.memory=nan", ["engine.memory", "nan"]),
        ("engine.threads=0", ["engine.threads", "0"]),
        ("engine.micro_batch=0", ["engine.micro_batch", "0"]),
        ("engine.micro_batch=2.5", ["engine.micro_batch", "2.5"]),
        ("engine.precision=half", ["engine.precision", "'half'", "float32, tf32, bf16"]),
        ("records.augmentations=-1", ["records.augmentations", "-1", "0 to 256"]),
        ("records.augmentations=1000", ["records.augmentations", "1000", "0 to 256"]),
        ("engine.threads=two", ["engine.threads", "'two'"]),
        ("engine.checkpoint_every=0", ["engine.checkpoint_every", "0"]),
        ("engine.checkpoint_every=1000001", ["engine.checkpoint_every", "1000001"]),
        ("engine.way=fast", ["engine.way", "'fast'", "sequential"]),
        ("budget.epsilon=0", ["budget.epsilon", "0"]),
        ("budget.epsilon=inf", ["budget.epsilon", "inf"]),
        ("budget.delta=0", ["budget.delta", "0"]),
        ("budget.delta=1", ["budget.delta", "1"]),
        ("budget.unit=clients", ["budget.unit", "'clients'", "'client'"]),
        ("budget.observer=servr", ["budget.observer", "'servr'", "'server'"]),
        ("budget.calibrate=true", ["budget.calibrate", "budget.epsilon"]),
        ("clients.cohort=0", ["clients.cohort", "0"]),
        ("clients.sampling=poison", ["clients.sampling", "'poison'", "'poisson'"]),
        ("clients.cohort=linaer:1:2", ["linaer", "'linear'"]),
        ("records.batch=0", ["records.batch", "0"]),
        ("local.lr=-1", ["local.lr", "-1"]),
        ("local.lr=fast", ["'fast'", "linear:from:to"]),
        ("local.momentum=1", ["local.momentum", "1"]),
        ("server.lr=nan", ["server.lr", "nan", "finite"]),
        ("aggregate.weights=sizes", ["aggregate.weights", "'sizes'", "'size'"]),
        ("data.name=\udcff.csv", ["data.name", "UTF-8"]),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_key(word, named):
    said = refused("algorithm=fedavg", word)
    assert all(part in said for part in named), said


def test_a_boundary_where_the_algorithm_has_nothing_is_said_to_be_so():
    said = refused("algorithm=fedavg", "per_round.noise_multiplier=1")
    assert "per_round" in said
    assert "fedavg" in said


def test_an_override_without_equals_sign_says_how_to_write_it():
    assert "key=value" in refused("rounds")


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("rounds=7", "rounds", 7),
        ("rounds = 7", "rounds", 7),
        ("rounds=0x10", "rounds", 16),
        ("model=mlp", "model", "mlp"),
        ('model="mlp"', "model", "mlp"),
        ("model='a=b'", "model", "a=b"),
        ("model=package.net:My_Net", "model", "package.net:My_Net"),
        ("model=mlp\nseed=3", "model", "mlp\nseed=3"),
        ("baseline=true", "baseline", True),
    ],
)
def test_an_override_is_toml_or_else_plain_text(word, key, value):
    assert getattr(configure({"algorithm": "fedavg"}, [word]), key) == value


def test_sections_take_numbers_words_and_schedules():
    words = ["local.lr=linear:0.1:0.01", "clients.cohort=3", "data.alpha=2", "engine.memory=0.5"]
    config = configure({"algorithm": "fedavg"}, words)
    assert config.algorithm.local.lr == "linear:0.1:0.01"
    assert config.algorithm.clients.cohort == 3
    assert config.data.alpha == 2.0
    assert config.engine.memory == 0.5


def test_of_two_overrides_the_later_counts_and_both_beat_the_file(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('algorithm = "fedavg"\nrounds = 3\n[data]\nclients = 7\n')
    config = configure(path, ["rounds=4", "rounds=5"])
    assert (config.rounds, config.data.clients) == (5, 7)


def test_the_same_keys_may_be_nested_or_dotted():
    nested = configure({"algorithm": "fedavg", "local": {"lr": 0.5}, "data": {"clients": 3}, "engine": {}})
    assert nested == configure({"algorithm": "fedavg", "local.lr": 0.5, "data.clients": 3})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rounds = ", ["is not TOML", "end of document"]),
        ("rounds = 3\nrounds = 4\n", ["is not TOML", "line 2"]),
        ("[data\nclients = 3", ["is not TOML"]),
        ("rounds = " + "9" * 5000, ["is not TOML"]),
        ("rounds = 0x" + "f" * 5000, ["rounds", "so long a number"]),
        ("rounds = " + "[" * 5000, ["is not TOML"]),
        ("[dta]\n", ["'dta'"]),
        ("[data.name]\nx = 1", ["data.name", "string"]),
        ("[[data]]\nclients = 3", ["'data'"]),
        ("rounds = 1979-05-27", ["rounds", "1979", "integer"]),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(tmp_path, text, named):
    path = tmp_path / "my run.toml"
    path.write_text(text, encoding="utf-8")
    said = refused(source=path)
    assert all(part in said for part in named), said


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert str(tmp_path / "no.toml") in refused(source=tmp_path / "no.toml")
    assert str(tmp_path) in refused(source=tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'model = "\xff"')
    assert "latin.toml" in refused(source=tmp_path / "latin.toml")


def test_a_file_with_the_byte_order_mark_of_windows_is_read(tmp_path):
    (tmp_path / "a.toml").write_text("rounds = 3", encoding="utf-8-sig")
    assert configure(tmp_path / "a.toml").rounds == 3


@pytest.mark.parametrize("arguments", [["-c", "round=5"], ["-c", "rounds=0"], ["nothing.toml"], ["-c", "rounds"]])
def test_on_the_command_line_a_wrong_configuration_ends_with_2_and_writes_nothing(
    tmp_path, monkeypatch, capsys, arguments
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["shoal", "run", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("shoal: ")
    assert "Traceback" not in shown.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_what_is_written_down_reads_back_as_the_same_configuration(tmp_path, name):
    words = ["rounds=17", "data.alpha=0.1", "data.records=3", "engine.memory=1e-3", "budget.epsilon=2", "seed=-5"]
    config = configure({"algorithm": name}, words)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert configure(path) == config


def test_a_rate_reads_back_too_and_beside_a_batch_it_is_refused(tmp_path):
    rate = ["algorithm=dp-sgd", "records.rate=.05", "records.nominal_records=600"]
    config = configure(None, rate)
    assert config.algorithm.records.batch == 30
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert configure(path) == config
    assert "records.rate 0.05 and records.batch 9 contradict" in refused(*rate, "records.batch=9")


def test_the_default_experiment_reads_back_too(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(configure()), encoding="utf-8")
    assert configure(path) == configure()


def test_the_delta_of_the_default_experiment_is_below_one_over_its_clients_and_records():
    """So that the first run of a new user warns of nothing."""
    config = configure()
    assert large_delta("client", config.budget.delta, config.data.clients) is None
    assert large_delta("record", config.budget.delta, len(load(config.data.name).train_y)) is None


def known_keys():
    config = configure({"algorithm": "fedavg"})
    sections = {name: getattr(config.algorithm, name) for name in BOUNDARIES}
    sections |= {name: getattr(config, name) for name in ("data", "budget", "engine")}
    inner = [f"{name}.{each.name}" for name, part in sections.items() if is_dataclass(part) for each in fields(part)]
    return [key for key, value in to_dict(config).items() if not isinstance(value, dict)] + inner


KEYS = st.sampled_from(known_keys()) | st.text(max_size=12)
NAMES = st.sampled_from(["iid", "poisson", "linear:1:2", "decay:1:0.5:0", "fedavg", "geyer", "server"])
NUMBERS = st.integers() | st.floats() | st.integers(0, 100) | st.floats(0, 1)
PLAIN = NUMBERS | st.booleans() | st.none() | st.text(max_size=12) | NAMES
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(st.text(max_size=5), PLAIN, max_size=2)


def accepted_or_refused(source, overrides, path):
    """A configuration is refused with a ConfigError, or it can be written down and read back."""
    try:
        config = configure(source, overrides)
    except ConfigError:
        return
    path.write_text(to_toml(config), encoding="utf-8")
    assert configure(path) == config


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "config.toml"


@pytest.mark.slow
@given(st.dictionaries(KEYS, VALUES, max_size=3))
def test_no_mapping_makes_the_reader_fail_otherwise(scratch, mapping):
    accepted_or_refused(mapping, (), scratch)


@pytest.mark.slow
@given(st.tuples(KEYS, PLAIN.map(str)))
def test_no_override_makes_the_reader_fail_otherwise(scratch, word):
    accepted_or_refused({"algorithm": "fedavg"}, ["=".join(word)], scratch)


@pytest.mark.slow
@given(
    st.binary(max_size=60) | st.tuples(KEYS, st.text(max_size=20)).map(lambda pair: " = ".join(pair).encode("utf-8"))
)
def test_no_file_makes_the_reader_fail_otherwise(scratch, content):
    scratch.write_bytes(content)
    accepted_or_refused(scratch, (), scratch.with_name("written.toml"))


def test_keys_in_python_go_over_those_of_a_file(tmp_path):
    file = tmp_path / "experiment.toml"
    file.write_text('algorithm = "dp-sgd"\nrounds = 9\n[budget]\nunit = "record"\nepsilon = 4.0\n')
    keys = {"rounds": 3, "budget": {"epsilon": 2.0}}
    found = settings_of(file, None, None, ["local.lr=0.5"], keys, resume=None, no_guarantee=False)
    assert (found.rounds, found.budget.epsilon, found.budget.unit, found.algorithm.local.lr) == (
        3,
        2.0,
        "record",
        0.5,
    )
