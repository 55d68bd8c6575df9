"""The estimators: scikit-learn's own checks, clients as groups, and claims that are never silent."""

import numpy as np
import pytest
import torch
from sklearn.utils.estimator_checks import parametrize_with_checks

import shoal
from shoal.accounting.claims import CLASSES
from shoal.suggest import suggest

QUICK = {"records.batch": 64, "engine.threads": 1}
CHECKED = {"algorithm": "fedavg", "rounds": 1, "random_state": 0, "settings": QUICK | {"clients.sampling": "all"}}


def estimators():
    return [
        shoal.FederatedClassifier(**CHECKED),
        shoal.FederatedRegressor(**CHECKED, target_range=(-1000.0, 1000.0)),
    ]


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # checks take the default folder, `runs`


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@parametrize_with_checks(estimators())
def test_scikit_learns_own_checks(estimator, check):
    """None is excluded; those of scores ask little of estimators with the tag `poor_score`, as these have."""
    check(estimator)


def rows(count=60):
    generator = np.random.Generator(np.random.Philox(key=5))
    x = generator.uniform(-1, 1, (count, 3))
    return x, np.where(x.sum(1) > 0, "ill", "well"), np.repeat(["north", "south", "west"], count // 3)


@pytest.mark.slow
def test_groups_are_the_clients_and_few_of_them_have_their_records_protected():
    x, y, hospital = rows()
    fitted = shoal.FederatedClassifier(rounds=3, epsilon=4.0).fit(x, y, groups=hospital)
    assert set(fitted.predict(x)) <= {"ill", "well"}
    assert fitted.predict_proba(x).shape == (60, 2)
    assert fitted.result_.random == "secure"
    bound = next(claim for claim in fitted.claims_ if (claim["unit"], claim["observer"]) == ("record", "release"))
    assert 0 < bound["epsilon"] <= 4.0
    assert not any(claim["simulated"] for claim in fitted.claims_)


@pytest.mark.slow
def test_without_groups_there_is_one_client_and_none_is_made_up():
    x, y, _ = rows()
    fitted = shoal.FederatedClassifier(rounds=2, random_state=1).fit(x, y)
    assert not any(claim["simulated"] for claim in fitted.claims_)
    assert fitted.result_.algorithm == "dp-sgd"


@pytest.mark.slow
def test_what_is_read_from_the_rows_is_said_and_sizes_of_protected_clients_are_not_read():
    x, y, _ = rows()
    fitted = shoal.FederatedClassifier(rounds=1, random_state=1).fit(x, y)
    assert "the classes were read from y" in (fitted.result_.run / "report.html").read_text(encoding="utf-8")
    assert all(CLASSES in claim["because"] for claim in fitted.claims_ if claim["epsilon"] is not None)
    few, many = (suggest(500, [size] * 120, "classification", 20).keys for size in (2, 15))
    assert few == many


def test_the_learning_rate_suits_the_epsilon_that_is_asked_for():
    low, high = (shoal.FederatedClassifier(epsilon=epsilon)._config(500, [], 20)["local.lr"] for epsilon in (1, 8))
    assert low < high


@pytest.mark.slow
def test_simulated_clients_are_warned_of_and_named_in_every_claim():
    x, y, _ = rows()
    made_up = {"data.partition": "iid", "data.clients": 12, "clients.sampling": "all", "budget.delta": 0.01}
    chosen = shoal.FederatedClassifier(algorithm="geyer-private", rounds=2, random_state=0, settings=QUICK | made_up)
    with pytest.warns(UserWarning, match="clients are simulated"):
        chosen.fit(x, y)
    assert "simulated client" in repr(chosen.claims_)
    assert "simulated client" in chosen.result_._repr_html_()


@pytest.mark.slow
def test_a_private_model_learns_and_a_network_of_ones_own_is_taken():
    x, y, hospital = rows(600)
    chosen = shoal.FederatedClassifier(epsilon=8.0, rounds=20, model=torch.nn.Linear(3, 2), random_state=0)
    assert chosen.fit(x, y, groups=hospital).score(x, y) > 0.8


@pytest.mark.slow
def test_the_regressor_asks_for_a_public_range_and_keeps_it():
    x, _, hospital = rows()
    with pytest.raises(ValueError, match="target_range is not set"):
        shoal.FederatedRegressor().fit(x, x.sum(1))
    fitted = shoal.FederatedRegressor(target_range=(-1.0, 1.0), rounds=2, random_state=0).fit(x, x.sum(1), hospital)
    assert np.abs(fitted.predict(100 * x)).max() <= 1.0


def test_an_error_is_a_value_error_in_one_line():
    x, y, _ = rows()
    with pytest.raises(ValueError, match=r"no algorithm|not known|did you mean") as told:
        shoal.FederatedClassifier(algorithm="dp-sdg").fit(x, y)
    assert "\n" not in str(told.value)


@pytest.mark.slow
def test_names_as_a_data_frame_holds_them_are_clients():
    x, y, hospital = rows()
    plain = shoal.FederatedClassifier(rounds=1, random_state=1).fit(x, y, groups=hospital)
    frame = shoal.FederatedClassifier(rounds=1, random_state=1).fit(x, y, groups=hospital.astype(object))
    assert np.array_equal(plain.predict_proba(x), frame.predict_proba(x))
    with pytest.raises(ValueError, match="client is of type object, expected whole numbers or text"):
        shoal.FederatedClassifier().fit(x, y, groups=np.array([None, *hospital[1:]], object))


@pytest.mark.parametrize("bounds", [(1.0, 0.0), (1.0, 1.0), (0.0, np.nan), (0.0, np.inf)])
def test_a_target_range_that_is_none_is_refused(bounds):
    x, _, _ = rows()
    with pytest.raises(ValueError, match="target_range: the range of a regression must be two numbers, low < high"):
        shoal.FederatedRegressor(target_range=bounds).fit(x, x[:, 0])
