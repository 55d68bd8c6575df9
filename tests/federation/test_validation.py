"""The firewall at the coordinator: a bad answer counts as zero, is told of with its site, and three are enough."""

import json

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from shoal.config import configure
from shoal.federation.messages import InvalidMessage, Payload, pack, unpack
from shoal.federation.validation import Request, Validator
from shoal.training.round_index import RoundIndex
from support.federations import BAD, farthest, full_cohort, in_rounds, named, served, settings, with_update
from support.loopback import with_sites


def filled(number):
    return lambda kind, answer: with_update(answer, torch.full_like(answer.vectors["update"], number))


TAMPERED = {
    "NaN": (filled(float("nan")), "NaN or Inf"),
    "one NaN": (
        lambda kind, answer: with_update(
            answer, answer.vectors["update"].clone().index_fill_(0, torch.tensor(7), torch.nan)
        ),
        "NaN or Inf",
    ),
    "Inf": (filled(float("inf")), "NaN or Inf"),
    "too great for a float": (filled(3e38), "NaN or Inf"),
    "1e30": (filled(1e30), "too large"),
    "1e15": (filled(1e15), "norm"),
    "twice the clip": (
        lambda kind, answer: with_update(answer, torch.nn.functional.normalize(torch.ones(650), dim=0) * 0.8),
        "norm 0.8",
    ),
    "too short": (lambda kind, answer: with_update(answer, torch.zeros(3)), "shape"),
    "another run": (named(run="another"), "its run"),
    "another round": (named(round=99), "its round"),
    "another attempt": (named(attempt=9), "its attempt"),
    "another client": (named(number=0), "its number"),
    "another nonce": (named(nonce=bytes(16)), "its nonce"),
    "other terms": (named(terms="0" * 64), "its terms"),
    "a round that is text": (named(round="0"), "its round"),
    "one value more": (named(weight=10**9), "unexpected"),
    "one vector more": (
        lambda kind, answer: Payload(answer.values, {**answer.vectors, "more": torch.zeros(1)}),
        "bytes",
    ),
    "no update": (lambda kind, answer: Payload(answer.values), "missing"),
    "nothing": (lambda kind, answer: Payload({}), "missing"),
}


def with_answers(folder, rounds, change):
    """The run in which that site answers so."""
    grid = with_sites(folder, 4)
    grid.changes[BAD] = in_rounds(change)
    return served(folder, full_cohort(federation__strikes=100) | {"rounds": rounds}, grid)[0]


def refuse(kind, answer):
    return Payload({"refused": "not today"})


@pytest.fixture(scope="module")
def silent(tmp_path_factory):
    """The run in which that site answers nothing."""
    return with_answers(tmp_path_factory.mktemp("silent"), 2, refuse)


@pytest.mark.slow
def test_a_bad_answer_counts_as_zero(tmp_path):
    """Each in a round of its own; one that counted would be in the model of every later round."""
    wrong = [*TAMPERED.values()]
    silent = with_answers(tmp_path / "silent", len(wrong), refuse)
    result = with_answers(tmp_path, len(wrong), lambda kind, answer: wrong[answer.values["round"]][0](kind, answer))
    assert farthest(result, silent) == 0
    for line, what in zip(result.metrics, TAMPERED, strict=True):
        assert line["clients"] == 3, what
        assert line["bad_updates"] == 1, what
        (report,) = line["reports"]
        assert report["site"] == "site-01"
        assert report["node"] == str(BAD)
        assert TAMPERED[what][1] in report["why"], what


@pytest.mark.slow
def test_a_replayed_answer_counts_as_zero(tmp_path, silent):
    """An old answer, good in its round, is sent again in the next one."""
    kept = []

    def replay(kind, answer):
        kept.append(answer)
        return kept[0]

    grid = with_sites(tmp_path, 4)
    grid.changes[BAD] = in_rounds(replay)
    result, _ = served(tmp_path, full_cohort(), grid)
    assert [line["bad_updates"] for line in result.metrics] == [0, 1]


@pytest.mark.slow
def test_a_site_that_keeps_sending_bad_ones_is_left_out(tmp_path):
    grid = with_sites(tmp_path, 4)
    grid.changes[BAD] = in_rounds(filled(float("nan")))
    told = []
    result, _ = served(tmp_path, full_cohort() | {"rounds": 5, "federation.strikes": 3}, grid, log=told.append)
    assert [line["asked"] for line in result.metrics] == [4, 4, 4, 3, 3]
    assert [line["bad_updates"] for line in result.metrics] == [1, 1, 1, 0, 0]
    assert any("site-01 (node 101)" in words and "excluded" in words for words in told)
    kept = json.loads((result.run / "sites.json").read_text())
    assert {facts["name"]: facts["strikes"] for key, facts in kept.items() if key != "release"}["site-01"] == 3


@pytest.mark.slow
def test_a_huge_claimed_weight_is_bad(tmp_path):
    given = settings("fedavg", clients__sampling="all", federation__fewest_records=100, federation__most_records=500)
    grid = with_sites(tmp_path, 4)
    grid.changes[BAD] = in_rounds(named(records=501))
    result, _ = served(tmp_path, given, grid)
    assert [line["bad_updates"] for line in result.metrics] == [1, 1]


@pytest.mark.slow
def test_a_bit_that_is_none_is_bad(tmp_path):
    grid = with_sites(tmp_path, 4)
    grid.changes[BAD] = in_rounds(named(below=100))
    result, _ = served(tmp_path, settings("geyer-private", clients__sampling="all"), grid)
    assert [line["bad_updates"] for line in result.metrics] == [1, 1]


@pytest.mark.slow
def test_fedavg_takes_no_update_beyond_all_reason(tmp_path):
    """No clip bounds it: `federation.max_update_norm` does."""
    grid = with_sites(tmp_path, 4)
    grid.changes[BAD] = in_rounds(filled(1e30))
    result, _ = served(tmp_path, settings("fedavg", clients__sampling="all"), grid)
    assert [line["bad_updates"] for line in result.metrics] == [1, 1]
    assert all(torch.isfinite(tensor).all() for tensor in result.model.values())


@pytest.mark.slow
def test_a_round_goes_on_without_those_who_do_not_answer(tmp_path, silent):
    grid = with_sites(tmp_path, 4)
    grid.changes[BAD] = in_rounds(lambda kind, answer: None)
    result, _ = served(tmp_path, full_cohort() | {"federation.deadline": 0.3}, grid)
    assert farthest(result, silent) == 0, "divided by the expected cohort, with the same noise"
    assert [line["reports"][0]["what"] for line in result.metrics] == ["late", "late"]


@pytest.mark.slow
def test_an_empty_cohort_is_noise_alone(tmp_path):
    grid = with_sites(tmp_path, 4)
    for node in grid.sites:
        grid.changes[node] = in_rounds(lambda kind, answer: None)
    result, _ = served(tmp_path, full_cohort() | {"federation.deadline": 0.1, "rounds": 1}, grid)
    assert result.metrics[0]["clients"] == 0
    assert result.metrics[0]["noise"] > 0


# ---------------------------------------------------------------- what a payload may be


def record(**changes):
    good = {"dtype": "float32", "shape": (2,), "stype": "raw-little-endian", "data": bytes(8)}
    return RecordDict({"values": ConfigRecord({}), "vectors": ArrayRecord({"update": Array(**(good | changes))})})


def test_a_parcel_comes_back_as_it_was():
    payload = Payload({"a": 1, "b": "x", "c": b"\x00", "d": 0.5}, {"v": torch.tensor([1.0, -2.5e-38, 3e38])})
    back = unpack(pack(payload), 100)
    assert back.values == payload.values
    assert torch.equal(back.vectors["v"], payload.vectors["v"])


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float64"},
        {"dtype": "object"},
        {"stype": "numpy.ndarray"},
        {"stype": "pickle"},
        {"shape": (3,)},
        {"shape": (2, 1)},
        {"shape": ()},
        {"shape": (-2,)},
        {"data": bytes(9)},
        {"shape": (2**40,)},
    ],
    ids=str,
)
def test_other_arrays_are_refused_unread(changes):
    with pytest.raises(InvalidMessage, match="vector 'update'"):
        unpack(record(**changes), 100)


@pytest.mark.parametrize(
    "records",
    [
        RecordDict({"values": ConfigRecord({}), "more": ConfigRecord({})}),
        RecordDict({"vectors": ConfigRecord({}), "values": ConfigRecord({})}),
        RecordDict({}),
        RecordDict({"values": ConfigRecord({"a": [1, 2]})}),
        RecordDict({"values": ConfigRecord({"a": True})}),
        RecordDict({"values": ConfigRecord({"a": "x" * (2**20 + 1)})}),
    ],
)
def test_other_records_are_refused(records):
    with pytest.raises(InvalidMessage):
        unpack(records, 100)


def test_a_parcel_over_the_limit_is_refused():
    with pytest.raises(InvalidMessage, match="at most 4"):
        unpack(record(), 4)


def test_the_share_of_a_batch_that_came_out_large_is_no_strike_against_its_site():
    """12 records were drawn where 4 are expected, and all were within the clip."""
    given = {"algorithm": "quantile-example", "records.sampling": "poisson", "records.batch": 4}
    validator = Validator(configure(given).algorithm, 3, 1e4, 1000)

    def share(number):
        request = Request("run", "terms", 0, RoundIndex(0, 1))
        answer = Payload(request.names | {"share": number}, {"update": torch.zeros(3)})
        return validator.check(request, answer, 1.0).share

    assert share(0.5 * 12 / 4) == 1.5
    with pytest.raises(InvalidMessage, match="field 'share'"):
        share(100.0)
