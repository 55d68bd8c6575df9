"""What is proven for users with several records, and where nothing is."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from shoal.accounting import accountants
from shoal.accounting.events import BySize, OnClients, Repeat, SampledUser, TwoLevel, Unbounded
from shoal.algorithms import algorithm
from shoal.algorithms.charges import charges, event, whole_run
from shoal.data.partitions import ListedPartition
from shoal.mechanisms.sampling import Records
from shoal.mechanisms.sampling.records import PoissonRecords
from shoal.mechanisms.setting import Setting

DP_SGD = algorithm("dp-sgd")
USERS = Setting(1, 10, sizes=(6000,), user_columns=1)
PUBLIC = replace(USERS, public_ownership=True)


def capped(most, name="dp-sgd", **changes):
    record = algorithm(name)
    return replace(record, records=replace(record.records, max_per_user=most, **changes))


@pytest.mark.parametrize("observer", ["release", "server", "client-process"])
def test_a_user_is_charged_the_mixture_of_its_capped_records(observer):
    assert event(capped(3), USERS, 0, "user", observer) == TwoLevel(1.0, 0.1, 10, 4.0, records=3)
    found = accountants.epsilon(whole_run(capped(3), USERS, 5, "user", observer), 1e-5, adjacency="zero-out")
    wanted = accountants.epsilon(Repeat(SampledUser(3, 0.1, 4.0), 50), 1e-5, adjacency="zero-out")
    assert found == wanted
    assert found.because == "at most 3 records of a user are used"


def test_one_record_a_user_costs_what_a_record_costs_under_zero_out():
    user, record = (accountants.epsilon(event(capped(1), PUBLIC, 0, unit, "server"), 1e-5, adjacency="zero-out")
                    for unit in ("user", "record"))  # fmt: skip
    assert user == record


@pytest.mark.parametrize(
    ("record", "setting", "because"),
    [
        (DP_SGD, USERS, "a user may have any number of records: set records.max_per_user"),
        (capped(3), replace(USERS, user_columns=0), "records name no users"),
        (capped(3), replace(USERS, user_columns=2), "only if the users of each record are public"),
        (capped(3, sampling="with-replacement"), USERS, "nothing is proven for users with records.sampling=with-rep"),
        (capped(3, "trusted-curator"), replace(USERS, clients=100), "users are accounted for only if noise is added"),
    ],
)
def test_nothing_is_proven_for_users(record, setting, because):
    found = event(record, setting, 0, "user", "server")
    assert isinstance(found, Unbounded)
    assert because in found.because


def test_records_of_several_users_are_accounted_where_ownership_is_public():
    setting = replace(USERS, user_columns=2, public_ownership=True)
    assert event(capped(3), setting, 0, "user", "server") == event(capped(3), USERS, 0, "user", "server")


def test_a_user_at_several_clients_is_charged_at_each():
    setting = replace(USERS, clients=10, clients_per_user=2)
    found = event(capped(3), setting, 0, "user", "release")
    assert found == OnClients(2, TwoLevel(1.0, 0.1, 10, 4.0, records=3))
    setting = replace(USERS, clients=10, sizes=(600, 6000))
    assert isinstance(event(capped(3, rate=None), setting, 0, "user", "release"), BySize)


def test_at_worst_all_records_of_a_user_are_in_one_shuffled_batch():
    shuffled = capped(4, sampling="shuffled")
    found = event(shuffled, USERS, 0, "user", "server")
    assert found == event(replace(shuffled, per_step=shuffled.per_step.with_noise(shuffled.per_step.noise_schedule()
                          .scaled(0.25))), PUBLIC, 0, "record", "server")  # fmt: skip


def test_a_record_that_decides_which_others_are_used_has_no_claim():
    """Replaced by one of another user it changes how many are kept; with several users each, most of them."""

    def kept(*users):
        held = ListedPartition(np.arange(len(users)), np.array([0, len(users)]), users=np.array(users))
        return held.capped(1).indices.tolist()

    assert (kept([0], [0], [1]), kept([2], [0], [1])) == ([0, 2], [0, 1, 2])
    chain = [[n, n + 1] for n in range(1, 6)]
    assert (kept([0, 1], *chain), kept([8, 9], *chain)) == ([0, 2, 4], [0, 1, 3, 5])
    for observer in ("release", "server"):
        assert "the user of one record decides" in event(capped(3), USERS, 0, "record", observer).because
        assert not isinstance(event(capped(3), PUBLIC, 0, "record", observer), Unbounded)
        assert not isinstance(event(DP_SGD, USERS, 0, "record", observer), Unbounded), "no cap, no choice"


def test_users_are_charged_only_where_records_name_them():
    assert {each.unit for each in charges(capped(3), USERS, 0)} == {"client", "record", "user"}
    assert {each.adjacency for each in charges(capped(3), USERS, 0) if each.unit == "user"} == {"zero-out"}
    assert {each.unit for each in charges(capped(3), replace(USERS, user_columns=0), 0)} == {"client", "record"}


def test_a_sampler_of_ones_own_proves_nothing_for_users_unless_it_says_so():
    @dataclass(frozen=True)
    class Households(PoissonRecords):
        """Draws whole households: a record's own probability is the same, but records are not independent."""

        sampling: str = "households"

        def drawn(self, generator, records, steps):
            return np.zeros((steps, 1), np.int64)

        def event(self, rate, noise, uses):
            return super().event(rate, noise, uses)

    try:
        assert not isinstance(event(capped(2, sampling="households"), PUBLIC, 0, "record", "server"), Unbounded)
        assert isinstance(event(capped(2, sampling="households"), USERS, 0, "user", "server"), Unbounded)
        mixed = type(
            "Mixed", (type("Mixin", (), {"drawn": Households.drawn, "event": Households.event}), PoissonRecords), {}
        )
        assert mixed.user_event is Records.user_event
    finally:
        del Records.schemes["households"]
