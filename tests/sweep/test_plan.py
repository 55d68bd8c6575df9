"""Which cells a sweep has, and that they share clients but never noise."""

import json

import numpy as np
import pytest

from shoal.config import configure
from shoal.errors import ConfigError, RunError
from shoal.random.streams import Streams
from shoal.sweep.plan import Plan, Range, base_settings, grid_of, make_plan, product_of, random_cells
from support.tiny import PRIVATE, play

GRID = grid_of(["local.lr=.05,0.1", "rounds=5,10,20"])


def test_a_grid_is_every_combination_with_values_as_c_takes_them():
    assert GRID == {"local.lr": [0.05, 0.1], "rounds": [5, 10, 20]}
    cells = product_of(GRID)
    assert len(cells) == 6
    assert cells[0] == {"local.lr": 0.05, "rounds": 5}
    assert len({tuple(cell.items()) for cell in cells}) == 6


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("model=linear, mlp", ["linear", "mlp"]),
        ("baseline=true,false", [True, False]),
        ("per_round.noise_multiplier=linear:3:1,2.0", ["linear:3:1", 2.0]),
        ('data.name=["a,b.csv", "c.csv"]', ["a,b.csv", "c.csv"]),
        ("data.name=../patients.csv", ["../patients.csv"]),
        ("rounds=5,5", [5]),
    ],
)
def test_values_are_read_one_by_one(word, values):
    assert next(iter(grid_of([word]).values())) == values


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rounds"], "names no values"),
        (["rounds="], "names no values"),
        (["rounds=5,,6"], "empty value"),
        (["rounds=5", "rounds=6"], "given before"),
        (["rounds=9..3"], "must be increasing"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        grid_of(words)


@pytest.mark.statistical(false_alarm=1e-20)
def test_random_cells_are_drawn_without_repeats_from_values_and_inside_ranges():
    generator = Streams(5).generator("test")
    cells = random_cells(GRID, 4, generator)
    assert len({tuple(cell.items()) for cell in cells}) == 4
    grid = grid_of(["local.lr=0.001..1.0", "rounds=5..50"])
    assert grid == {"local.lr": Range(0.001, 1.0), "rounds": Range(5, 50)}
    drawn = random_cells(grid, 400, generator)
    rates = np.array([cell["local.lr"] for cell in drawn])
    assert rates.min() >= 0.001
    assert rates.max() <= 1
    assert 100 < (rates < 0.032).sum() < 300  # the middle of the log scale; false alarms: below 1e-20
    assert all(isinstance(cell["rounds"], int) and 5 <= cell["rounds"] <= 50 for cell in drawn)
    with pytest.raises(ConfigError, match="--random"):
        product_of(grid)


def test_a_wrong_key_is_found_before_anything_runs():
    with pytest.raises(ConfigError, match=r"did you mean 'local\.lr'"):
        make_plan(base_settings(None, []), grid_of(["local.rl=0.1"]))
    with pytest.raises(ConfigError, match="rounds"):
        make_plan(base_settings(None, []), grid_of(["rounds=5,0"]))


def test_methods_are_compared_each_by_its_own_settings():
    grid = grid_of(["algorithm=geyer-private,dp-ftrl,fedavg,end-to-end"])
    plan = make_plan(base_settings(None, ["rounds=3"], grid), grid)
    assert [plan.config(n).algorithm for n in range(4)] == [
        configure(overrides=[f"algorithm={name}"]).algorithm for name in grid["algorithm"]
    ]


def test_cells_draw_noise_of_their_own_on_the_same_clients():
    plan = make_plan(base_settings(None, []), GRID)
    configs = [plan.config(n) for n in range(6)]
    assert len({config.noise_seed for config in configs}) == 6
    assert {config.seed for config in configs} == {0}
    assert plan == make_plan(base_settings(None, []), GRID)  # and it can be repeated


@pytest.mark.slow
def test_a_noise_seed_changes_what_is_drawn_and_not_the_clients(tmp_path):
    first, again, other = (play(tmp_path, PRIVATE | {"noise_seed": seed}) for seed in (1, 1, 2))
    same, differs = (
        all((first.model[name] == run.model[name]).all() for name in first.model) for run in (again, other)
    )
    assert same
    assert not differs


def test_a_plan_is_read_back_as_it_was_written(tmp_path):
    plan = make_plan(base_settings(None, ["rounds=3"]), GRID, private=True, expected_trials=3.0, charge=True)
    plan.write(tmp_path)
    assert Plan.read(tmp_path) == plan
    (tmp_path / "sweep.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(RunError, match="cannot be read"):
        Plan.read(tmp_path)
    with pytest.raises(RunError, match="not a sweep's folder"):
        Plan.read(tmp_path / "elsewhere")


@pytest.mark.slow
def test_trials_of_a_private_selection_are_drawn_afresh_and_from_the_cells_alone():
    plans = [make_plan(base_settings(None, []), GRID, private=True, expected_trials=20.0) for _ in range(4)]
    assert len({tuple(plan.seeds) for plan in plans}) == 4
    for plan in plans:
        assert plan.selection.trials.mean == pytest.approx(20)
        assert all(cell in plan.selection.cells for cell in plan.cells)
        assert len(set(plan.seeds)) == len(plan.cells)
