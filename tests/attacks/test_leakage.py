"""Attacks against methods: who sees what, what leaks, and what is refused."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import shoal
from shoal.algorithms import algorithm, algorithms
from shoal.attacks import Aim, Victims, attack, observe, recipe
from shoal.attacks.gradient_map import gradients
from shoal.attacks.leakage import choose
from shoal.attacks.matrix import METHODS, methods
from shoal.config import configure
from shoal.data import lfw
from shoal.data.known import KNOWN
from shoal.data.sources import locate
from shoal.errors import ConfigError, DataError, ModelError
from shoal.models import build
from shoal.prepare import with_noise
from shoal.random.streams import Streams
from shoal.tasks import TaskSettings
from support.tiny import numbers

STREAMS = Streams(3)
SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def digits():
    return shoal.load("digits")


@pytest.fixture(scope="module")
def module():
    return build("attack-cnn", SHAPE, 10, seed=5)


def victims_of(digits, count, records):
    return choose(digits, Aim(0, count, records), STREAMS, torch.device("cpu"))


def clean(module, victims):
    return gradients(module)(victims.x, F.one_hot(victims.y, 10).float()).detach()


def config(name, *changes):
    return configure({"algorithm": name, "engine.device": "cpu", "engine.threads": 1}, changes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_without_privacy_every_attacker_sees_the_gradient_itself(digits, module, kind):
    victims = victims_of(digits, 4, 1 if kind == 2 else 3)
    seen = observe(algorithm("fedavg"), kind, module, victims, STREAMS)
    assert torch.allclose(seen.gradients, clean(module, victims), atol=1e-4)


@pytest.mark.slow
def test_fed_sdp_hides_updates_where_it_adds_its_noise_and_never_gradients_of_records(digits, module):
    victims = victims_of(digits, 3, 3)
    raw = clean(module, victims)
    at_server, at_client = (config("fed-sdp", f"per_update.at={place}").algorithm for place in ("server", "client"))

    def error(method, kind):
        return float((observe(method, kind, module, victims, STREAMS).gradients - raw).norm())

    assert error(at_server, 1) < 1e-3
    assert error(at_server, 0) > 100
    assert error(at_client, 1) > 100
    single = Victims(victims.x[:, :1], victims.y[:, :1], victims.classes)
    for method in (at_server, at_client):
        seen = observe(method, 2, module, single, STREAMS)
        assert torch.allclose(seen.gradients, clean(module, single), atol=1e-4)


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=1e-18)
def test_the_noise_that_an_attacker_meets_is_sigma_times_the_clip(digits, module):
    """46,552 coordinates: 3% are 9 standard deviations, and a scale that is 5% off is found."""
    single = victims_of(digits, 4, 1)
    for name, changes, scale in (
        ("fed-cdp", ("per_step.noise_multiplier=3.0", "per_record.clip_norm=2.0"), 6.0),
        (
            "fed-cdp",
            ("per_step.noise_multiplier=3.0", "per_record.clip_norm=2.0", "per_step.placement=algorithm1"),
            6.0,
        ),
        ("fed-cdp-private", ("per_step.noise_multiplier=3.0", "per_record.clip_norm=2.0"), 6.0),
    ):
        method = config(name, *changes).algorithm
        still = replace(method, per_step=replace(method.per_step, noise_multiplier=0.0))
        noise = [observe(m, 2, module, single, STREAMS).gradients for m in (method, still)]
        spread = float((noise[0] - noise[1]).std())
        assert spread == pytest.approx(scale, rel=0.03), (name, changes)
    method = config("fed-sdp", "per_update.noise_multiplier=3.0", "per_update.clip_norm=2.0").algorithm
    still = replace(method, per_update=replace(method.per_update, noise_multiplier=0.0))
    noise = [observe(m, 0, module, single, STREAMS).gradients for m in (method, still)]
    assert float((noise[0] - noise[1]).std()) == pytest.approx(6.0, rel=0.03)


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=1e-18)
def test_noise_for_records_is_shared_by_a_batch(digits, module):
    """DP-SGD adds it to the sum, so that the mean of three records carries a third of it."""
    victims = victims_of(digits, 4, 3)
    method = config("fed-cdp", "per_step.noise_multiplier=3.0", "per_record.clip_norm=2.0").algorithm
    still = replace(method, per_step=replace(method.per_step, noise_multiplier=0.0))
    noise = [observe(m, 1, module, victims, STREAMS).gradients for m in (method, still)]
    assert float((noise[0] - noise[1]).std()) == pytest.approx(2.0, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(algorithms()))
def test_every_method_can_be_observed_by_every_type_and_dummies_are_replayed_alike(digits, module, name):
    """With noise x 0 the true records, replayed by the attacker, show exactly what was seen."""
    changes = _without_noise(algorithm(name))
    method = config(name, *changes).algorithm
    if method.local.personal:
        with pytest.raises(ConfigError, match=r"local.personal 1: no attack here knows personal layers"):
            observe(method, 0, module, victims_of(digits, 3, 2), STREAMS)
        return
    for kind in (0, 1, 2):
        victims = victims_of(digits, 3, 1 if kind == 2 else 2)
        seen = observe(method, kind, module, victims, STREAMS, rounds=10)
        y = F.one_hot(victims.y, 10).float()
        shown = seen.replay(seen.shown(victims.x, y), seen.gradients).detach()
        assert torch.isfinite(seen.gradients).all()
        if name != "random-noise":  # which is no multiplier
            assert torch.allclose(shown, seen.gradients, rtol=1e-3, atol=1e-3), (name, kind)


def _without_noise(method):
    found = []
    for boundary in ("per_step", "per_update", "per_round"):
        if hasattr(getattr(method, boundary), "noise_multiplier"):
            found.append(f"{boundary}.noise_multiplier=0.0")
    if method.per_step is not None and method.per_step.test is not None:  # every step passes
        found += ["per_step.test_noise_multiplier=0.0", "per_step.threshold=2.0"]
    return found


@pytest.mark.slow
def test_an_honest_update_is_simulated_step_by_step(digits, module):
    victims = victims_of(digits, 2, 2)
    method = config("fedavg", "local.steps=3", "local.lr=0.5", "local.momentum=0.5").algorithm
    seen = observe(method, 0, module, victims, STREAMS, honest=True)
    shown = seen.shown(victims.x, F.one_hot(victims.y, 10).float())
    assert torch.allclose(shown, seen.gradients, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(seen.gradients, clean(module, victims), atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", ["fed-cdp", "fed-alpha-cdp", "pfl", "dp-sgd", "end-to-end", "quantile-record"])
def test_an_honest_update_of_records_that_fill_no_batch_is_divided_by_the_public_batch(digits, module, name, steps):
    """The attacker knows the batch; one that took the mean of the records would see a method that is none."""
    victims = victims_of(digits, 3, 3)
    method = config(name, "per_step.noise_multiplier=0.0", f"local.steps={steps}").algorithm
    assert method.records.batch > 3
    seen = observe(method, 0, module, victims, STREAMS, honest=True)
    shown = seen.replay(seen.shown(victims.x, F.one_hot(victims.y, 10).float()), seen.gradients).detach()
    assert (shown - seen.gradients).norm() < 1e-2 * seen.gradients.norm()  # 600 times smaller than a step of one


@pytest.mark.slow
def test_a_cap_that_everybody_knows_is_no_privacy(digits):
    method = config("dssgd", "per_update.fraction=1.0")
    assert attack(method, recipe("cpl"), Aim(0, 3, 1), digits).row()["success"] == 1.0


@pytest.mark.slow
def test_the_noise_is_that_which_the_budget_chooses(digits):
    """A run at epsilon .1 has a lot more of it than the method's own setting."""
    budget = ("budget.epsilon=0.1", "budget.unit=example", "budget.calibrate=true")
    left = [
        attack(config("dp-sgd", *changes), replace(recipe("cpl"), iterations=1), Aim(2, 2), digits).found.left.min()
        for changes in ((), budget)
    ]
    plain, calibrated = (config("dp-sgd", *changes) for changes in ((), budget))
    module = build("attack-cnn", SHAPE, 10, seed=5)
    noise = with_noise(calibrated, digits, module).algorithm.per_step.noise_multiplier
    assert with_noise(plain, digits, module) == plain
    assert noise > 10 * plain.algorithm.per_step.noise_multiplier
    assert left[0] != left[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("fedavg", 2, ()),
        ("fed-sdp", 0, ("per_update.noise_multiplier=0.0",)),
        ("fed-cdp", 2, ("per_step.noise_multiplier=0.0",)),
        ("fed-alpha-cdp-sigma", 2, ("per_step.noise_multiplier=0.0",)),
        ("adaclip", 2, ("per_step.noise_multiplier=0.0",)),
    ],
)
def test_a_method_with_noise_times_zero_leaks_as_the_non_private_one(digits, name, kind, changes):
    outcome = attack(config(name, *changes), recipe("cpl"), Aim(kind, 4, 1), digits)
    row = outcome.row()
    assert row["success"] == 1.0
    assert row["rmse"] < 0.02
    assert row["label_hits"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("fed-sdp", 0), ("fed-cdp", 2), ("fed-alpha-cdp-sigma", 1)])
def test_a_method_with_its_noise_withstands(digits, name, kind):
    short = replace(recipe("cpl"), iterations=5)
    row = attack(config(name), short, Aim(kind, 3, 1), digits).row()
    assert row["success"] == 0.0
    assert row["rmse"] > 0.3


@pytest.mark.slow
def test_the_attackers_of_the_papers_fail_at_a_clip_that_a_knowing_one_reckons_with(digits):
    method = config("fed-cdp", "per_step.noise_multiplier=0.0", "per_record.clip_norm=0.05")
    naive = attack(method, replace(recipe("cpl"), iterations=5), Aim(2, 3, knowing=False), digits).row()
    knowing = attack(method, recipe("cpl"), Aim(2, 3), digits).row()
    assert naive["success"] < knowing["success"] == 1.0


@pytest.mark.slow
def test_victims_beyond_one_group_are_searched_for_in_the_next(digits, monkeypatch):
    monkeypatch.setattr("shoal.attacks.leakage.BATCHED", 2)
    outcome = attack(config("fedavg"), recipe("cpl"), Aim(2, 5), digits)
    assert outcome.quality.success.all()
    assert len(outcome.found.iterations) == 5


@pytest.mark.slow
def test_batches_of_three_are_taken_apart(digits):
    row = attack(config("fedavg"), recipe("cpl"), Aim(1, 2), digits).row()
    assert row["records"] == 3
    assert row["success"] == 1.0


@pytest.mark.slow
def test_rows_of_a_table_are_reconstructed(digits):
    cancer = replace_data(config("fedavg"), "cancer")
    row = attack(cancer, recipe("cpl"), Aim(2, 4)).row()
    assert row["success"] == 1.0
    assert row["ssim"] is None


@pytest.mark.parametrize(("name", "iterations"), [("mnist", 8), ("lfw", 40)])
def test_clean_gradients_of_real_pictures_give_the_pictures_away(name, iterations):
    here = lfw.locate() is not None if name == "lfw" else all(map(locate, KNOWN[name].files))
    if not here:
        pytest.skip(f"{name} is not here: set SHOAL_DATA to a folder that holds it")
    short = replace(recipe("cpl"), iterations=iterations)
    row = attack(replace_data(config("fedavg"), name), short, Aim(2, 2)).row()
    assert row["success"] == 1.0
    assert row["label_hits"] == 1.0


def replace_data(settings, name):
    return replace(settings, data=replace(settings.data, name=name))


@pytest.mark.slow
def test_iterations_to_success_are_counted_by_the_truth_but_the_attacker_goes_on_until_its_gradient_is_explained(
    digits,
):
    row = attack(config("fedavg"), recipe("cpl"), Aim(2, 4), digits).row()
    assert 1 <= row["iterations_to_success"] <= row["iterations"] < 20


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": 3}, "no attack of type 3"),
        ({"count": 0}, "at least 1 victim"),
        ({"records": 0, "kind": 0}, "records must be at least 1"),
        ({"records": 2, "kind": 2}, "one record's gradient at a time"),
        ({"honest": True, "kind": 2}, "type 0 or 1"),
    ],
)
def test_aims_that_make_no_sense_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        Aim(**fields)


def test_more_victims_than_records_are_refused_with_the_most_there_are(digits):
    with pytest.raises(ConfigError, match="at most 479 victims"):
        attack(config("fedavg"), recipe("cpl"), Aim(0, 500), digits)


def test_data_outside_the_unit_box_and_models_that_mix_are_refused(digits):
    wide = replace(digits, train_x=digits.train_x * 16)
    with pytest.raises(DataError, match="are 0 to 16"):
        attack(config("fedavg"), recipe("cpl"), Aim(2, 4), wide)

    class Mixing(torch.nn.Sequential):
        def __init__(self, classes):
            super().__init__(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, classes))

    mixing = replace(config("fedavg"), model=Mixing)
    with pytest.raises(ModelError, match="without BatchNorm"):
        attack(mixing, recipe("cpl"), Aim(2, 4), digits)


def test_tasks_losses_and_models_that_a_reconstruction_does_not_replay_are_refused(digits):
    with pytest.raises(ConfigError, match=r"task\.kind is regression, and attacks are for classification alone"):
        attack(config("fedavg"), recipe("cpl"), Aim(2, 4), numbers())
    weighted = replace(config("fedavg"), task=TaskSettings(class_weights=(1.0,) * 10))
    with pytest.raises(ConfigError, match=r"leave task\.class_weights out"):
        attack(weighted, recipe("cpl"), Aim(2, 4), digits)

    class OneLogit(torch.nn.Sequential):
        def __init__(self):
            super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 1))

    two = digits.train_y < 2, digits.test_y < 2
    few = replace(digits, train_x=digits.train_x[two[0]], train_y=digits.train_y[two[0]], classes=("0", "1"),
                  test_x=digits.test_x[two[1]], test_y=digits.test_y[two[1]])  # fmt: skip
    with pytest.raises(ModelError, match="one logit for two classes"):
        attack(replace(config("fedavg"), model=OneLogit), recipe("cpl"), Aim(2, 4), few)


def test_the_same_seed_chooses_the_same_victims_for_every_method(digits):
    first, second = (choose(digits, Aim(2, 5), Streams(9), torch.device("cpu")) for _ in range(2))
    other = choose(digits, Aim(2, 5), Streams(10), torch.device("cpu"))
    assert torch.equal(first.x, second.x)
    assert not torch.equal(first.x, other.x)


def test_the_tables_of_the_paper_name_registered_methods_and_settings():
    assert {method.algorithm for method in METHODS} <= set(algorithms())
    for method in METHODS:
        config(method.algorithm, *method.changes)
    assert len(methods("table3")) == 7


def test_no_device_is_written_into_the_attacks():
    from pathlib import Path

    import shoal.attacks

    for path in Path(shoal.attacks.__file__).parent.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert '"cpu"' not in text, path
        assert '"cuda"' not in text, path


def test_numbers_come_from_named_streams_only():
    from pathlib import Path

    import shoal.attacks

    for path in Path(shoal.attacks.__file__).parent.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "torch.rand" not in text, path
        assert "np.random.default_rng" not in text, path
