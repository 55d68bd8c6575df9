"""Random allocation over a network: a site is charged for whole blocks, has one turn in each, and no second one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.accounting.events import Allocated, Gaussian, Sampled
from shoal.accounting.leaves import leaves, without_sampler
from shoal.accounting.privacy_ledger import Ledger
from shoal.config import configure
from shoal.federation.consent import Refused, Requirements
from shoal.federation.messages import Payload
from shoal.federation.site import Owner, Site
from shoal.federation.terms import END, ROUND, TERMS, Terms
from shoal.mechanisms.setting import Setting
from support.federations import asked, end_of, farthest, served, settings, simulated, site_ledger

ALLOCATED = settings("trusted-curator", clients__sampling="random-allocation", clients__cohort=1) | {"rounds": 8}


def charged(folder):
    with Ledger(folder / "ledger.jsonl") as ledger:
        return without_sampler(leaves(ledger.charged_event("client", "release")))[0]


@pytest.mark.slow
def test_simulation_and_network_agree_and_everybody_comes_once_a_block(tmp_path):
    over_the_network, grid = served(tmp_path, ALLOCATED)
    assert farthest(over_the_network, simulated(tmp_path, ALLOCATED)) < 1e-5
    turns = [(payload.values["number"], payload.values["round"] // 4) for to, _, kind, payload in grid.wire
             if (to, kind) == ("to", ROUND)]  # fmt: skip
    assert sorted(turns) == [(number, block) for number in range(4) for block in range(2)]
    assert "server.allocation" not in str([payload.values for _, _, _, payload in grid.wire])


@pytest.fixture
def replies(tmp_path):
    """A site that is new, the terms, and the message of a round."""
    given = ALLOCATED | {"federation.seeded": False, "per_round.noise_multiplier": 1.633}
    _, grid = served(tmp_path / "before", given)
    owner = next(iter(grid.sites.values())).owner
    site = Site(Owner(**vars(owner) | {"folder": tmp_path / "new"}))
    yield site, asked(grid, TERMS), asked(grid, ROUND)
    site.close()


def ask(site, message, t, **changes):
    return site.answer(ROUND, Payload(message.values | {"round": t, "attempt": 0} | changes, message.vectors)).values


@pytest.mark.slow
def test_a_site_is_charged_a_block_once_and_refuses_a_second_turn(replies, tmp_path):
    site, terms, message = replies
    site.answer(TERMS, Payload(terms.values | {"round": 0}))
    assert "refused" not in ask(site, message, 1)
    assert "its turn in rounds 1 to 4" in ask(site, message, 2)["refused"]
    site.close()
    site = Site(site.owner)  # a restart forgets nothing
    assert "its turn in rounds 1 to 4" in ask(site, message, 3)["refused"]
    assert "refused" not in ask(site, message, 5)
    site.close()
    ((block, times),) = charged(tmp_path / "new").items()
    assert (times, block.length) == (2, 4)


@pytest.mark.slow
def test_a_site_that_joins_within_a_block_is_charged_all_of_it(replies, tmp_path):
    site, terms, message = replies
    site.answer(TERMS, Payload(terms.values | {"round": 2}))
    assert "refused" not in ask(site, message, 3)
    site.close()
    assert [(leaf.length, times) for leaf, times in charged(tmp_path / "new").items()] == [(4, 1)]


@pytest.mark.slow
def test_a_round_that_is_asked_for_again_is_a_poisson_round_more(replies, tmp_path):
    site, terms, message = replies
    site.answer(TERMS, Payload(terms.values | {"round": 0}))
    for attempt in (0, 1):
        assert "refused" not in ask(site, message, 1, attempt=attempt)
    site.close()
    block, again = sorted(charged(tmp_path / "new").items(), key=lambda item: isinstance(item[0], Sampled))
    assert (block[0].length, block[1]) == (4, 1)
    assert (again[0].kind, again[0].rate, again[1]) == ("poisson", 0.25, 1)
    assert isinstance(again[0].event, Gaussian)


@pytest.mark.slow
def test_a_block_begun_again_has_one_turn_too(replies, tmp_path):
    """That turn is drawn anew with its first round: the block is charged twice."""
    site, terms, message = replies
    site.answer(TERMS, Payload(terms.values | {"round": 0}))
    assert "refused" not in ask(site, message, 0, attempt=1, repeats=1)
    assert "its turn in rounds 1 to 4" in ask(site, message, 1, repeats=1)["refused"]
    site.close()
    assert [(leaf.length, times) for leaf, times in charged(tmp_path / "new").items()] == [(4, 2)]


def finish(site, message, done, **said):
    return site.answer(END, Payload(end_of(message, why="sites", round=done, **said))).values


@pytest.mark.slow
def test_the_end_of_a_run_gives_no_site_a_second_turn(replies):
    site, terms, message = replies
    site.answer(TERMS, Payload(terms.values | {"round": 0}))
    assert "refused" not in ask(site, message, 0)
    assert "refused" not in finish(site, message, 1)
    assert "its turn in rounds 1 to 4" in ask(site, message, 1)["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("asked", [True, False], ids=["asked", "ended"])
def test_after_a_coordinator_went_back_missed_rounds_are_poisson_rounds_more(replies, tmp_path, asked):
    """Of rounds 2 to 8, run again, 5 is a block begun again; in the others it might have been drawn anew."""
    site, terms, message = replies
    site.answer(TERMS, Payload(terms.values | {"round": 0}))
    for t, attempt in [(1, 0), (7, 0), (1, 1)]:
        assert "refused" not in ask(site, message, t, attempt=attempt, repeats=attempt)
    found = ask(site, message, 7, attempt=1, repeats=7) if asked else finish(site, message, 8, repeats=7)
    assert "refused" not in found
    site.close()
    spent = charged(tmp_path / "new")
    assert {type(leaf): times for leaf, times in spent.items()} == {Allocated: 3, Sampled: 6}


@pytest.mark.slow
def test_all_that_was_planned_again_is_charged_where_the_coordinator_is_not_heard_of_again(replies, tmp_path):
    """All 8 rounds ran, 5 with this site; then 2 and 3, both with it, and maybe all others up to 8.

    Two blocks, and one begun again; the other rounds run again are Poisson rounds.
    """
    site, terms, message = replies
    site.answer(TERMS, Payload(terms.values | {"round": 0}))
    assert "refused" not in ask(site, message, 4)
    site.answer(TERMS, Payload(terms.values | {"round": 1, "charged": 8}))
    for t in (1, 2):
        assert "refused" not in ask(site, message, t, attempt=1, repeats=t)
    site.close()
    site = Site(site.owner)
    other = replace(Terms.read(terms.text("terms"), ()), run="another")
    assert "refused" not in site.answer(TERMS, Payload({"terms": other.text, "round": 0})).values
    site.close()
    spent = charged(tmp_path / "new")
    assert {type(leaf): times for leaf, times in spent.items()} == {Allocated: 3, Sampled: 6}


@pytest.mark.slow
def test_no_round_before_the_furthest_is_free(replies, tmp_path):
    """A coordinator that goes back, and says that it does not, gets no turn in an earlier block for nothing."""
    site, terms, message = replies
    site.answer(TERMS, Payload(terms.values | {"round": 0}))
    for t in (1, 5, 2, 3):
        assert "refused" not in ask(site, message, t)
    site.close()
    spent = charged(tmp_path / "new")
    assert {type(leaf): times for leaf, times in spent.items()} == {Allocated: 2, Sampled: 2}


@pytest.mark.slow
def test_a_long_run_takes_few_lines_and_its_cap_is_that_of_its_blocks(tmp_path):
    method = configure({"algorithm": "trusted-curator", "clients.sampling": "random-allocation",
                        "clients.cohort": 10, "per_round.noise_multiplier": 2.0}).algorithm  # fmt: skip
    setting = Setting(1000, 1000, all_answer=False)
    own = site_ledger(tmp_path, method, setting, Requirements(epsilon_per_run=0.6))
    own.agree()
    own.charge(range(500))
    with pytest.raises(Refused, match=r"the run's epsilon would exceed the owner's 0\.6"):
        own.charge(range(500, 1000))
    own.close()
    assert charged(tmp_path) == {Allocated(((2.0, 100),)): 5}
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 11
