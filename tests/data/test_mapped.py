"""Rows that stay on disk: they train as rows in memory do, and their pages are given back."""

import os

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.config import configure
from shoal.data.mapped import MappedFile
from shoal.errors import DataError
from shoal.prepare import prepare

GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((200, 5)).astype(np.float32)
PLACE = GENERATOR.integers(0, 3, 200)
Y = (X[:, 0] > 0).astype(np.int64)
OWNERS = np.repeat(np.arange(8), 20)
CONFIG = {
    "algorithm": "dp-sgd",
    "rounds": 2,
    "clients": {"sampling": "all"},
    "records": {"batch": 8},
    "per_record": {"clip_norm": 1.0},
    "per_step": {"noise_multiplier": 0.5},
    "engine": {"device": "cpu", "threads": 1},
}


def written(folder, **arrays):
    files = {"x": X[:160], "y": Y[:160], "client": OWNERS, "test_x": X[160:], "test_y": Y[160:]} | arrays
    for name, array in files.items():
        if array is not None:
            np.save(folder / f"{name}.npy", array)
    return folder


def in_memory():
    return shoal.from_arrays(X[:160], Y[:160], client=OWNERS, test=(X[160:], Y[160:]))


def trained(data, model):
    trainer = prepare(configure(CONFIG), data, model)[1]
    for _ in range(2):
        trainer.run_round(0)
    trainer.close()
    return trainer


def linear():
    torch.manual_seed(0)
    return nn.Linear(5, 2)


@pytest.mark.slow
def test_rows_on_disk_train_as_rows_in_memory_do(tmp_path):
    data = shoal.load(written(tmp_path))
    assert data.digest() == in_memory().digest()
    assert data.owner_names == in_memory().owner_names
    ours, theirs = trained(data, linear()), trained(in_memory(), linear())
    assert torch.equal(ours.model, theirs.model)
    assert ours.evaluate() == theirs.evaluate()


def test_a_file_that_is_changed_during_a_run_ends_it(tmp_path):
    """Else the ledger would state the digest of other rows than those that were trained on."""
    written(tmp_path)
    os.utime(tmp_path / "x.npy", ns=(0, 0))
    trainer = prepare(configure(CONFIG), shoal.load(tmp_path), linear())[1]
    trainer.run_round(0)
    rows = np.load(tmp_path / "x.npy", mmap_mode="r+")
    rows[:] = 7
    rows.flush()
    os.utime(tmp_path / "x.npy")  # as any write does
    with pytest.raises(DataError, match=r"x\.npy was changed during the run"):
        trainer.run_round(0)
    trainer.close()


def test_no_row_is_copied_into_memory_and_pages_are_given_back(tmp_path, monkeypatch):
    released = []
    monkeypatch.setattr(MappedFile, "release", lambda file: released.append(file.array.filename.name))
    data = shoal.load(written(tmp_path))
    checked = released.count("x.npy")
    assert checked >= 1
    trainer = trained(data, linear())
    assert trainer.cohort.client_data.x.data_ptr() == data.files[0].array.ctypes.data
    assert released.count("x.npy") >= checked + 2  # at least one batch in each round


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.place, self.head = nn.Embedding(3, 2), nn.Linear(7, 2)

    def forward(self, numbers, place):
        return self.head(torch.cat([numbers, self.place(place)], 1))


def test_several_inputs_are_several_files(tmp_path):
    parts = {"x.numbers": X[:160], "x.place": PLACE[:160], "test_x.numbers": X[160:], "test_x.place": PLACE[160:]}
    data = shoal.load(written(tmp_path, x=None, test_x=None, **parts))
    assert data.input_shape == {"numbers": (5,), "place": ()}
    assert trained(data, Two()).done == 2


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"test_x": None, "y": None}, r"lacks y.npy, test_x.npy"),
        ({"x": X[:160].astype(np.float64)}, r"x.npy: must be float32 or int64 in C order .* got float64"),
        ({"x": np.asfortranarray(X[:160])}, "in C order"),
        ({"x": np.where(np.arange(160)[:, None] == 7, np.nan, X[:160]).astype(np.float32)}, "row 7 holds NaN"),
        ({"y": Y[:150]}, "160 rows but 150 labels"),
        ({"client": OWNERS[:3]}, r"client has shape \(3,\)"),
    ],
)
def test_folders_that_cannot_be_used_are_refused_in_one_line(tmp_path, arrays, words):
    with pytest.raises(DataError, match=words) as refused:
        shoal.load(written(tmp_path, **arrays))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_array_is_refused(tmp_path):
    (written(tmp_path) / "x.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=r"x.npy cannot be read as an array"):
        shoal.load(tmp_path)


def test_classes_that_nobody_gave_were_read_from_the_labels(tmp_path):
    """Claims then say so, as for rows in memory."""
    folder = written(tmp_path)
    assert in_memory().read_classes
    assert shoal.load(folder).read_classes
    assert not shoal.load(folder, classes=["0", "1"]).read_classes
