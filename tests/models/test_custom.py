"""The user's own model, by path or as an object."""

import sys

import pytest
import torch
from torch import nn

from shoal.errors import ModelError
from shoal.models import build, count

NET = """
import torch
from torch import nn

class MyNet(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.layer = nn.Linear(input_shape[0], classes)

    def forward(self, x):
        return self.layer(x)

class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 3))

def by_place(shape, n, width=4):
    return nn.Sequential(nn.Linear(shape[0], width), nn.Linear(width, n))

def only_classes(*, classes, width=4):
    return nn.Linear(5, classes)

def needs_more(input_shape, classes, width):
    return nn.Linear(5, 3)

def needs_one(width):
    return nn.Linear(5, 3)

def fails(input_shape, classes):
    raise RuntimeError("no luck")

def no_model():
    return 3

ready = nn.Linear(5, 3)
number = 3
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in the current folder, forgotten again after the test."""
    folder = tmp_path / "my_own_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "net.py").write_text(NET)
    (folder / "broken.py").write_text("def f(:")
    (folder / "needy.py").write_text("import a_library_that_nobody_has")
    monkeypatch.chdir(tmp_path)
    yield
    for name in [n for n in sys.modules if n.startswith("my_own_package")]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["MyNet", "Plain", "by_place", "only_classes", "ready"])
def test_a_class_a_factory_or_an_object_in_the_current_folder_is_found(name):
    before = list(sys.path)
    model = build(f"my_own_package.net:{name}", (5,), 3)
    assert model(torch.zeros(2, 5)).shape == (2, 3)
    assert sys.path == before


@pytest.mark.usefixtures("package")
def test_the_seed_decides_its_weights_too():
    a, b, c = (build("my_own_package.net:MyNet", (5,), 3, seed=s).layer.weight for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("my_own_package.nett:MyNet", "no module 'my_own_package.nett'.*did you mean 'my_own_package.net'"),
        ("my_own_packag.net:MyNet", "no module 'my_own_packag'.*did you mean 'my_own_package'"),
        ("my_own_package.net:MyNett", "has no 'MyNett'; did you mean 'MyNet'"),
        ("my_own_package.net:", "not of the form package.module:Class"),
        (":MyNet", "not of the form package.module:Class"),
        ("my_own_package.net:number", "is a int; name an nn.Module class"),
        ("my_own_package.net:no_model", "gives a int, it must give a torch.nn.Module"),
        ("my_own_package.net:needs_more", "wants width; its parameters may be input_shape and classes"),
        ("my_own_package.net:needs_one", "wants width"),
        ("my_own_package.net:fails", "could not be built: RuntimeError: no luck"),
        ("my_own_package.broken:f", "importing my_own_package.broken failed: SyntaxError"),
        ("my_own_package.needy:f", "needs the module 'a_library_that_nobody_has', which is not installed"),
    ],
)
def test_what_is_wrong_with_it_is_said_with_the_fix(path, words):
    with pytest.raises(ModelError, match=words):
        build(path, (5,), 3)


def test_an_object_is_taken_as_it_is_and_a_class_is_called():
    class Own(nn.Linear):
        def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
            super().__init__(input_shape[0], classes)

    ready = nn.Linear(5, 3)
    assert build(ready, (5,), 3) is ready
    assert count(build(Own, (5,), 3)) == 18
    with pytest.raises(ModelError, match=r"'Conv2d' wants in_channels, out_channels, kernel_size"):
        build(nn.Conv2d, (5,), 3)


def test_what_several_layers_share_counts_once_and_what_is_frozen_does_not():
    layer = nn.Linear(4, 4)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    assert count(nn.Sequential(layer, frozen, layer)) == 20
