"""Public features of pictures, and the files that keep them."""

import math
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from shoal.data import features as module
from shoal.data import load
from shoal.data.features import cached, features, names
from shoal.errors import DataError
from shoal.prepare import with_features


def pictures(n, *shape):
    """Smooth, irregular pictures with values from 0 to 1."""
    waves = torch.arange(n * math.prod(shape), dtype=torch.float64).mul(0.37).sin() * 0.5 + 0.5
    return waves.view(n, *shape).float()


def digits():
    return torch.tensor(load_digits().images[:60], dtype=torch.float32)[:, None] / 16


def slow_histograms(picture, bins):
    """One picture [C][H][W], pixel by pixel, as the words of the docstring have it."""
    channels, height, width = picture.shape
    result = np.zeros((bins, 7, 7))
    for i in range(height):
        for j in range(width):
            best = (0.0, 0.0)
            for c in range(channels):
                right, left = picture[c, i, min(j + 1, width - 1)], picture[c, i, max(j - 1, 0)]
                below, above = picture[c, min(i + 1, height - 1), j], picture[c, max(i - 1, 0), j]
                gradient = ((right - left) / 2, (below - above) / 2)
                best = max(best, gradient, key=lambda g: math.hypot(*g))
            place = (math.atan2(best[1], best[0]) % (2 * math.pi)) / (2 * math.pi) * bins
            for b, share in ((math.floor(place), 1 - place % 1), (math.floor(place) + 1, place % 1)):
                for p in range(7):
                    for q in range(7):
                        down = abs(i - ((p + 0.5) * height / 7 - 0.5)) / (height / 7)
                        across = abs(j - ((q + 0.5) * width / 7 - 0.5)) / (width / 7)
                        weight = max(0.0, 1 - down) * max(0.0, 1 - across)
                        result[b % bins, p, q] += weight * share * math.hypot(*best)
    return result


def slow_hog(picture):
    h = slow_histograms(picture, 9).ravel()
    return h / np.linalg.norm(h)


def slow_hog2(picture):
    return slow_rooted(slow_smooth(picture))


def slow_smooth(picture):
    deviation = min(picture.shape[1:]) / 28
    reach = max(1, round(3 * deviation))
    kernel = np.exp(-((np.arange(-reach, reach + 1) / deviation) ** 2) / 2)
    kernel /= kernel.sum()
    smooth = np.pad(picture, ((0, 0), (reach, reach), (reach, reach)), mode="edge")
    for axis in (1, 2):
        smooth = np.apply_along_axis(np.convolve, axis, smooth, kernel, mode="valid")
    return smooth


def slow_rooted(picture):
    h = np.sqrt(slow_histograms(picture, 8))
    hill = np.exp(-(np.linspace(-1, 1, 7) ** 2) / 1.4)
    template = np.broadcast_to(np.outer(hill, hill), h.shape)
    template = template / np.linalg.norm(template)
    h = (h - (h * template).sum() * template).ravel()
    return h / np.linalg.norm(h)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 12, 17)])
@pytest.mark.parametrize(
    ("name", "slow", "numbers"), [("hog", slow_hog, 441), ("hog2", slow_hog2, 392), ("hog-sharp", slow_rooted, 392)]
)
def test_gradient_histograms_are_those_of_a_slow_direct_computation(name, slow, numbers, shape):
    x = pictures(2, *shape)
    expected = np.stack([slow(picture) for picture in x.double().numpy()])
    found = features(name, x)
    assert found.shape == (2, numbers)
    assert np.allclose(found.numpy(), expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 17)])
def test_inner_products_of_fourier_features_are_near_the_kernel(shape):
    """1,568 random waves: a deviation of at most 0.018, so that 0.09 is five of them."""
    x = pictures(6, *shape)
    h = np.stack([slow_rooted(picture) for picture in x.double().numpy()])
    kernel = np.exp(-1.5 * ((h[:, None] - h) ** 2).sum(2))
    found = features("hog-fourier", x).numpy()
    assert found.shape == (6, 3136)
    assert ((kernel > 0.3) & (kernel < 0.8)).any()
    assert np.allclose(found @ found.T, kernel, atol=0.09)
    assert np.allclose(np.diag(found @ found.T), 1, atol=1e-5)


@pytest.mark.parametrize("name", ["hog", "hog2"])
def test_gradient_histograms_have_unit_norm_and_a_flat_picture_gives_zero(name):
    assert torch.allclose(features(name, digits()).norm(dim=1), torch.ones(60))
    assert not features(name, torch.full((2, 3, 9, 9), 0.5)).any()


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "expected"), [((1, 28, 28), (81, 7, 7)), ((3, 32, 32), (243, 8, 8))])
def test_scattering_is_kymatios_on_pixels_from_0_to_255(shape, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D

        x = pictures(3, *shape)
        kymatio = ScatteringTorch2D(J=2, shape=shape[1:], L=8)((x * 255).contiguous())
    found = features("scattering", x)
    assert found.shape == (3, *expected)
    assert torch.allclose(found, kymatio.reshape(3, *expected), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hog", "hog2", "hog-sharp", "hog-fourier", "scattering"])
def test_a_picture_has_the_same_features_alone_and_in_chunks(name, monkeypatch):
    x = digits()
    together = features(name, x[:7])
    monkeypatch.setattr(module, "CHUNK", 3 * 64)
    assert torch.allclose(features(name, x[:7]), together, atol=1e-5)
    assert torch.allclose(features(name, x[4:5]), together[4:5], atol=1e-5)


@pytest.mark.parametrize("name", ["hog", "hog2", "hog-sharp", "hog-fourier", "scattering"])
def test_bytes_and_numbers_from_0_to_1_mean_the_same(name):
    pixels = (digits()[:5] * 255).byte()
    assert torch.allclose(features(name, pixels), features(name, pixels / 255), atol=1e-5)


def test_none_leaves_everything_as_it_is(tmp_path):
    table = torch.zeros(4, 30)
    assert features("none", table) is table
    assert cached("none", table, tmp_path) is table
    assert names() == ["none", "hog", "hog2", "hog-sharp", "hog-fourier", "scattering"]


@pytest.mark.parametrize(
    ("name", "x", "words"),
    [
        ("hogg", pictures(2, 1, 8, 8), "unknown features 'hogg'; did you mean 'hog'"),
        (
            "hog",
            torch.zeros(4, 30),
            r"pictures \[N, channels, height, width\], got shape \(4, 30\); for a table",
        ),
        ("scattering", torch.zeros(4, 30), "for a table set data.features=none"),
        ("hog", pictures(2, 1, 6, 8), "at least 7x7, got 6x8"),
        ("scattering", pictures(2, 1, 8, 7), "at least 8x8, got 8x7"),
        ("hog", pictures(2, 1, 8, 8) * 255, "pixels from 0 to 1 .*before any normalisation"),
        ("hog", pictures(2, 1, 8, 8) - 0.5, "pixels from 0 to 1"),
        ("hog", pictures(2, 1, 8, 8) * math.nan, "pixels from 0 to 1"),
        (
            "hog",
            torch.zeros(2, 1, 8, 8, dtype=torch.int64),
            "bytes or floating-point pixels, got torch.int64",
        ),
        ("hog", torch.zeros(0, 1, 8, 8), "no pictures at all"),
    ],
)
def test_what_has_no_features_is_refused_with_the_fix(name, x, words):
    with pytest.raises(DataError, match=words):
        features(name, x)


@pytest.fixture
def calls(monkeypatch):
    """How often features were really computed."""
    seen = []

    def counting(name, x):
        seen.append(name)
        return features(name, x)

    monkeypatch.setattr(module, "features", counting)
    return seen


def test_features_are_computed_once_and_then_mapped_from_the_file(tmp_path, calls):
    x = digits()
    first = cached("hog", x, tmp_path / "new" / "folder")
    second = cached("hog", x, tmp_path / "new" / "folder")
    assert calls == ["hog"]
    assert torch.equal(first, features("hog", x))
    assert torch.equal(second, first)
    assert [p.suffix for p in (tmp_path / "new" / "folder").iterdir()] == [".npy"]


def test_what_is_written_into_mapped_features_does_not_reach_the_file(tmp_path, calls):
    x = digits()
    cached("hog", x, tmp_path).zero_()
    assert torch.equal(cached("hog", x, tmp_path), features("hog", x))
    assert calls == ["hog"]


def test_other_pictures_features_and_versions_have_files_of_their_own(tmp_path, calls, monkeypatch):
    x = digits()
    cached("hog", x, tmp_path)
    cached("hog2", x, tmp_path)
    cached("hog", x.flip(0), tmp_path)
    cached("hog", x.view(30, 2, 8, 8), tmp_path)
    monkeypatch.setitem(module.FEATURES, "hog", module.Feature(99, 7, lambda x: module._hog))
    cached("hog", x, tmp_path)
    assert calls == ["hog", "hog2", "hog", "hog", "hog"]
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "pickle"])
def test_a_damaged_file_is_computed_again_and_replaced(tmp_path, calls, damage):
    x = digits()
    expected = cached("hog", x, tmp_path).clone()
    (path,) = tmp_path.iterdir()
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[len(raw) // 2] ^= 1
    elif damage == "truncate":
        del raw[len(raw) // 2 :]
    elif damage == "empty":
        raw.clear()
    if damage == "pickle":
        np.save(path, np.array([{"not": "numbers"}], dtype=object), allow_pickle=True)
    else:
        path.write_bytes(raw)
    assert torch.equal(cached("hog", x, tmp_path), expected)
    assert torch.equal(cached("hog", x, tmp_path), expected)
    assert calls == ["hog", "hog"]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_full_disk_is_said_and_leaves_no_half_file(tmp_path, monkeypatch):
    def full(file, *_, **__):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DataError, match=r"cannot be stored in .*No space left on device; free some space"):
        cached("hog", digits(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_said(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match="set SHOAL_CACHE to another folder"):
        cached("hog", digits(), tmp_path / "taken")


def test_features_go_to_the_cache_and_shoal_data_may_be_read_only(tmp_path, monkeypatch):
    """root may write anywhere, so what is asked is that nothing is written."""
    data = tmp_path / "data"
    data.mkdir(mode=0o555)
    monkeypatch.setenv("SHOAL_DATA", str(data))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    dataset = with_features(load("digits"), "hog")
    assert dataset.train_x.shape[1:] == (441,)
    assert list(data.iterdir()) == []
    assert len(list((tmp_path / "cache" / "features").glob("hog-*.npy"))) == 2


def test_features_of_mnist_let_a_linear_model_learn():
    folder = os.environ.get("SHOAL_DATA")
    if folder is None or not (Path(folder) / "mnist").is_dir():
        pytest.skip("SHOAL_DATA does not hold mnist")
    data = load("mnist", scale="unit")
    x, y = features("hog2", data.train_x[:6000]), data.train_y[:6000]
    test_x, test_y = features("hog2", data.test_x[:2000]), data.test_y[:2000]
    weights = torch.zeros(392, 10)
    for _ in range(60):
        error = (x @ weights).softmax(1) - torch.nn.functional.one_hot(y, 10)
        weights -= 20 * x.T @ error / len(x)
    assert ((test_x @ weights).argmax(1) == test_y).float().mean() > 0.94
