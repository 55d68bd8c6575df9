"""Fuzz: whatever reaches the engine's own edges, there is a result or an error of ours, and nothing else.

The readers of data, configurations and ledgers are fuzzed beside their own tests (test_data_readers, test_config,
test_accounting_ledger), and what crosses the network in test_deploy_gate.
"""

import contextlib
import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from shoal.errors import ShoalError
from shoal.mechanisms.update_clipping import clipped, row_norms
from shoal.random.secure_streams import SecureStreams, discrete_on_grid, grid, toward_zero
from shoal.report.run_reader import read_run
from shoal.training.finite import finite_or_zero
from shoal.training.run_folder import CHECKPOINT
from support.tiny import PRIVATE, go_on, play, stopped_after

pytestmark = pytest.mark.slow

numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)
updates = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=40), elements=numbers)


@given(updates, st.floats(1e-6, 1e6))
@example(np.array([[6.2000395e34]], dtype=np.float32), 1e-6)
@settings(max_examples=300, deadline=None)
def test_no_update_moves_the_sum_by_more_than_the_clip(sent, bound):
    """NaN, Inf, 1e38, denormals: what is left of each update has a norm, of at most the clip."""
    kept, norms, bad = finite_or_zero(torch.from_numpy(sent.copy()))
    assert torch.isfinite(kept).all()
    assert torch.isfinite(norms).all()
    left = clipped(kept, norms, bound)
    assert torch.isfinite(left).all()
    assert (left.double().norm(dim=1) <= bound * (1 + 1e-6)).all()
    honest = np.isfinite(sent).all(1) & (np.linalg.norm(sent.astype(np.float64), axis=1) < 1e18)
    assert not bad.numpy()[honest].any(), "an honest update was thrown away"
    assert bad.numpy()[~np.isfinite(sent).all(1)].all()


@given(updates, st.floats(1e-6, 1e6))
@settings(max_examples=50, deadline=None)
def test_the_grid_of_secure_mode_makes_no_update_longer(sent, bound):
    kept, norms, _ = finite_or_zero(torch.from_numpy(sent.copy()))
    left = clipped(kept, norms, bound)
    short = toward_zero(left.clone(), grid(bound))
    assert (row_norms(short) <= row_norms(left) * (1 + 1e-6)).all()
    noisy = discrete_on_grid(left[0], bound, SecureStreams().generator("x"))
    steps = noisy.double() / grid(bound)
    assert torch.equal(steps, steps.round())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    return stopped_after(tmp_path_factory.mktemp("fuzz"), PRIVATE, rounds=2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return play(tmp_path_factory.mktemp("fuzz"), PRIVATE | {"rounds": 2}).run


edits = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=6)


def edited(content: bytes, changes: list[tuple[int, int]], cut: int) -> bytes:
    held = bytearray(content)
    for place, value in changes:
        if held:
            held[place % len(held)] = value
    return bytes(held[: max(0, len(held) - cut)])


@given(edits, st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_any_checkpoint_goes_on_as_it_was_or_is_refused(stopped, tmp_path_factory, changes, cut):
    """A changed byte is either none at all, or noticed: a checkpoint is known to the ledger by its hash."""
    run = tmp_path_factory.mktemp("run") / "run"
    shutil.copytree(stopped, run)
    before = (run / CHECKPOINT).read_bytes()
    (run / CHECKPOINT).write_bytes(edited(before, changes, cut))
    if (run / CHECKPOINT).read_bytes() == before:
        return
    with pytest.raises(ShoalError):
        go_on(run)
    shutil.rmtree(run)


@given(st.sampled_from(["metrics.jsonl", "result.json", "config.toml", "environment.txt", "ledger.jsonl"]), edits)
@settings(max_examples=80, deadline=None)
def test_any_run_folder_is_shown_or_refused(finished, tmp_path_factory, name, changes):
    run = tmp_path_factory.mktemp("run") / "run"
    shutil.copytree(finished, run)
    path = run / name
    if not path.exists():
        return
    path.write_bytes(edited(path.read_bytes(), changes, 0))
    with contextlib.suppress(ShoalError):
        read_run(run)
    shutil.rmtree(run)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_updates_of_another_shape_never_reach_the_sum(shape, size):
    """The firewall's norms are of rows: anything that is not [k, P] is an error of PyTorch's, before any sum."""
    sent = torch.zeros(*shape, size)
    if sent.dim() == 2:
        assert math.isfinite(float(finite_or_zero(sent)[1].sum()))
    else:
        with pytest.raises((RuntimeError, IndexError)):
            finite_or_zero(sent)
