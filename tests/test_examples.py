"""Every configuration in examples/ is a right one."""

import pytest

from shoal.config import configure
from shoal.models import build
from support.paths import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
SHAPES = {
    "digits": ((1, 8, 8), 10),
    "cancer": ((30,), 2),
    "mnist": ((1, 28, 28), 10),
    "fashion-mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "adult": ((105,), 2),
    "lfw": ((3, 32, 32), 62),
    "heart": ((33,), 2),
    "insteval": ((5,), 1),
    "movielens": ((13,), 1),
    "shakespeare": ((80,), 68),
    "milton": ((80,), 68),
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_right(path):
    config = configure(path)
    shape, classes = SHAPES[config.data.name]
    if config.data.features == "none":
        build(config.model, shape, classes)


def test_there_is_one_for_each_data_set():
    assert {configure(path).data.name for path in EXAMPLES} == set(SHAPES)
