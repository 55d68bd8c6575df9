"""A run that is stopped or killed within a block of random allocation goes on as allocated, and is charged for it."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from shoal.accounting.events import Allocated, Gaussian, Sampled
from shoal.accounting.leaves import leaves, without_sampler
from shoal.accounting.privacy_ledger import Ledger
from shoal.mechanisms.sampling.separated_clients import ALLOCATION, RandomAllocation
from shoal.training.run_folder import CHECKPOINT, RunFolder
from support.tiny import CLIENTS, PRIVATE, go_on, play, stopped_after

ALLOCATED = PRIVATE | {"clients.sampling": "random-allocation", "clients.cohort": 3, "rounds": 8}
BLOCK = Allocated(((1.5, 4),))


@pytest.fixture
def taken(monkeypatch):
    """Who took part in each round that was run, in order."""
    seen = []
    take_part = RandomAllocation.take_part

    def watched(self, generator, state, t, *given):
        found = take_part(self, generator, state, t, *given)
        seen.append((t, found.tolist()))
        return found

    monkeypatch.setattr(RandomAllocation, "take_part", watched)
    return seen


def charged(run):
    with Ledger(run / "ledger.jsonl") as ledger:
        return without_sampler(leaves(ledger.charged_event("client", "release")))[0]


def everyone_once(turns):
    return sorted(client for _, clients in turns for client in clients) == list(range(CLIENTS))


@pytest.mark.slow
def test_a_run_is_charged_its_blocks_and_proves_them_for_clients_against_released_models(tmp_path, taken):
    run = play(tmp_path, ALLOCATED)
    assert charged(run.run) == {BLOCK: 2}
    assert everyone_once(taken[:4])
    assert everyone_once(taken[4:])
    proven = {(claim["unit"], claim["observer"]): claim for claim in run.proven}
    assert {pair for pair, claim in proven.items() if claim["epsilon"] is not None} == {("client", "release")}
    assert "in which round of a block" in proven["client", "release"]["because"]
    assert run.metrics[0]["proven"][0]["epsilon"] == run.metrics[3]["proven"][0]["epsilon"], "charged with the first"
    assert [line["expected_clients"] for line in run.metrics] == [3] * 8


@pytest.mark.slow
@pytest.mark.parametrize("random", ["research", "secure"])
def test_a_resumed_run_keeps_its_allocation_and_is_charged_no_more(tmp_path, taken, random):
    run = stopped_after(tmp_path, ALLOCATED | {"random": random}, 2)
    assert ALLOCATION in load_file(run / CHECKPOINT)
    go_on(run)
    assert [t for t, _ in taken] == list(range(8))
    assert everyone_once(taken[:4])
    assert everyone_once(taken[4:])
    assert [(block.length, times) for block, times in charged(run).items()] == [(4, 2)]
    assert ALLOCATION not in load_file(run / CHECKPOINT)


@pytest.mark.slow
def test_research_mode_ends_with_the_same_model_however_often_it_is_stopped(tmp_path):
    whole = play(tmp_path / "whole", ALLOCATED)
    resumed = go_on(stopped_after(tmp_path / "stopped", ALLOCATED, 3))
    assert all((whole.model[key] == resumed.model[key]).all() for key in whole.model)


@pytest.mark.slow
@pytest.mark.parametrize(("killed_in", "more"), [(2, {Sampled: 1}), (4, {Allocated: 1})])
def test_a_round_that_is_killed_is_charged_again_and_its_clients_are_drawn_anew(
    tmp_path, taken, monkeypatch, killed_in, more
):
    """Within a block: one Poisson round more, and the rest as allocated. At its start: another block."""
    run = stopped_after(tmp_path, ALLOCATED, killed_in)
    write, died = RunFolder.write_tensors, RuntimeError("killed")

    def killed(self, name, *given):
        if name == CHECKPOINT:
            raise died
        write(self, name, *given)

    monkeypatch.setattr(RunFolder, "write_tensors", killed)
    with pytest.raises(RuntimeError, match="killed"):
        go_on(run)
    monkeypatch.setattr(RunFolder, "write_tensors", write)
    go_on(run)
    found = charged(run)
    assert found.pop(BLOCK) == 2 + more.get(Allocated, 0)
    assert found == ({Sampled("poisson", 0.25, Gaussian(1.5)): 1} if Sampled in more else {})
    first, again = (clients for t, clients in taken if t == killed_in)
    assert first != again
    played = [turn for place, turn in enumerate(taken) if turn[0] not in [t for t, _ in taken[place + 1 :]]]
    if Sampled in more:  # the allocation of the first attempt holds
        played[killed_in] = (killed_in, first)
    assert everyone_once(played[:4])
    assert everyone_once(played[4:])


@pytest.mark.slow
def test_a_new_round_that_is_charged_together_with_one_that_is_run_again_goes_on_as_allocated(tmp_path, taken):
    """Round 3 was charged and killed. Rounds 3 and 4 are charged as one second attempt, though round 4 had none."""
    run = stopped_after(tmp_path, ALLOCATED | {"engine.checkpoint_every": 2}, 2)
    with Ledger(run / "ledger.jsonl") as ledger:
        ledger.intend(3, ledger.charged[-1].charges)
    go_on(run)
    before = [client for t, clients in taken if t < 2 for client in clients]
    (last,) = (clients for t, clients in taken if t == 3)
    assert set(last).isdisjoint(before)
    assert charged(run)[Sampled("poisson", 0.25, Gaussian(1.5))] == 1
