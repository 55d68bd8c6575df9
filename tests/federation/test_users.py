"""Users at the sites of a federation: each site caps its own, and what is proven follows from where a user may be."""

import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.accounting import accountants
from shoal.accounting.events import Repeat, SampledUser
from shoal.algorithms import algorithm
from shoal.config import configure, to_toml
from shoal.errors import ConfigError
from shoal.federation.consent import Refused, Requirements
from shoal.federation.federated_run import planned_terms
from shoal.federation.messages import Payload
from shoal.federation.site import Owner, Site
from shoal.federation.site_records import reader
from shoal.federation.terms import TERMS
from shoal.mechanisms.setting import Setting
from support.federations import asked, served, settings, site_ledger
from support.loopback import Loopback

SCHEMA = {
    "label": "died",
    "classes": [0, 1],
    "user_column": "patient",
    "columns": {"age": {"kind": "number", "range": [0, 100], "missing": 50}},
}


def table(path, seed):
    rng = np.random.default_rng(seed)
    rows = [f"{rng.integers(100)},{rng.integers(2)},p{rng.integers(6)}" for _ in range(60)]
    path.write_text("\n".join(["age,died,patient", *rows]) + "\n")
    return path


def federation(folder, **changes):
    """Two sites of 60 visits of 6 patients each, at most 4 of each; and held-out rows without patients."""
    held_out = folder / "held-out.csv"
    held_out.write_text("age,died\n" + "".join(f"{age},{age % 2}\n" for age in range(40)))
    given = settings("fed-cdp-private", clients__sampling="all", data__clients=2, data__name=str(held_out))
    del given["clients.cohort"], given["records.batch"]
    given |= {"schema": SCHEMA, "records.rate": 0.1, "records.nominal_records": 20, "records.max_per_user": 4}
    given |= {"budget.unit": "user", "federation.seeded": False}
    given |= {key.replace("__", "."): value for key, value in changes.items()}
    sites = {
        100 + at: Site(Owner(f"site-{at}", folder / f"site-{at}", reader(str(table(folder / f"{at}.csv", at)))))
        for at in range(2)
    }
    return served(folder, given, Loopback(sites))


def epsilon(result):
    return next(each for each in result.proven if (each["unit"], each["observer"]) == ("user", "server"))


def cost(steps):
    return accountants.epsilon(Repeat(SampledUser(4, 0.1, 6.0), steps), 1e-5, adjacency="zero-out").epsilon


@pytest.mark.slow
def test_each_site_caps_its_own_users_and_a_user_may_be_at_both(tmp_path):
    result, grid = federation(tmp_path)
    for site in grid.sites.values():
        dataset = site.owner.records(site._terms)
        users = dataset.users
        assert len(users) == len(dataset.train_y) <= 24
        assert np.bincount(users.ravel()).max() == 4
    assert result.metrics[-1]["clients"] == 2
    found = epsilon(result)
    assert found["epsilon"] == pytest.approx(cost(8), rel=0.01)
    assert "no user has records at more than 2 clients" in found["because"]


@pytest.mark.slow
def test_users_at_one_site_alone_cost_less_by_declaration(tmp_path):
    found = epsilon(federation(tmp_path, federation__max_sites_per_user=1)[0])
    assert found["epsilon"] == pytest.approx(cost(4), rel=0.01)
    assert "no user is at two clients" in found["because"]


def test_a_site_may_require_a_budget_for_its_users(tmp_path):
    record = algorithm("fed-cdp-private")
    capped = replace(record, records=replace(record.records, max_per_user=4))
    setting = Setting(200, 10, sizes=(100,), user_columns=1, clients_per_user=2)
    for most, method, refused in ((50.0, capped, ""), (0.1, capped, "would exceed"), (50.0, record, "max_per_user")):
        wish = Requirements(epsilon=most, unit="user", observer="server")
        ledger = site_ledger(tmp_path, method, setting, wish)
        with pytest.raises(Refused, match=refused) if refused else nullcontext():
            ledger.agree()
        ledger.close()


def test_a_site_that_is_not_asked_pays_for_users_whom_another_may_hold(tmp_path):
    record = algorithm("fed-cdp-private")
    capped = replace(record, records=replace(record.records, max_per_user=4))
    alone = Setting(200, 10, sizes=(100,), user_columns=1)
    for setting, free in ((alone, True), (replace(alone, clients_per_user=2), False)):
        (tmp_path / str(free)).mkdir()
        ledger = site_ledger(tmp_path / str(free), capped, setting, Requirements(unit="user", observer="server"))
        ledger.charge(range(3))
        assert (ledger.epsilon() == 0) is free
        ledger.close()


@pytest.mark.slow
@pytest.mark.parametrize("false", [{"clients_per_user": 1}, {"user_columns": 0}, {"public_ownership": True}])
def test_terms_that_say_something_else_of_users_than_their_configuration_are_refused(tmp_path, false):
    _, grid = federation(tmp_path)
    told = json.loads(asked(grid, TERMS).values["terms"])
    told["setting"] |= false
    site = Site(Owner("own", tmp_path / "own", reader(str(tmp_path / "0.csv"))))
    answer = site.answer(TERMS, Payload({"terms": json.dumps(told, sort_keys=True), "round": 0}))
    site.close()
    assert "what the terms say of users" in answer.values["refused"]


@pytest.mark.slow
def test_the_owner_reads_what_the_claims_for_users_rest_on(tmp_path):
    _, grid = federation(tmp_path, federation__max_sites_per_user=1)
    said = []
    site = Site(Owner("own", tmp_path / "own", reader(str(tmp_path / "0.csv"))), said.append)
    site.answer(TERMS, Payload({"terms": asked(grid, TERMS).values["terms"], "round": 0}))
    site.close()
    assert any("rest on it: no user is at two clients" in line for line in said)


def test_no_site_leaves_out_records_by_users_whom_the_terms_do_not_name(tmp_path):
    """Whose a record is would then decide which others are used, and claims for records would not know."""
    x, y, users = np.zeros((60, 2), np.float32), np.arange(60) % 2, np.arange(60) % 6
    np.savez(tmp_path / "own.npz", x=x, y=y, user=users, classes=["0", "1"])
    given = settings("fed-cdp-private", clients__sampling="all", data__name=str(tmp_path / "own.npz"))
    given = {key: value for key, value in given.items() if key != "clients.cohort"}
    with pytest.raises(ConfigError, match="the federation names no users"):
        planned_terms(given | {"records.max_per_user": 4})
    terms = planned_terms(given)
    capped = to_toml(configure(given | {"records.max_per_user": 4}))
    for config, refused in ((terms.config, False), (capped, True)):
        site = Site(Owner("own", tmp_path / str(refused), reader(str(tmp_path / "own.npz"))))
        answer = site.answer(TERMS, Payload({"terms": replace(terms, config=config).text, "round": 0}))
        site.close()
        assert ("the federation names no users" in str(answer.values.get("refused"))) == refused
