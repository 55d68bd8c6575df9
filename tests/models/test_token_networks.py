"""Networks that take whole numbers: next tokens and ratings."""

import pytest
import torch
import torch.nn.functional as F

from shoal.gradients import network
from shoal.models import NETWORKS, build, check, count
from shoal.tasks import NextToken, Regression

TOKENS = 68
CHARACTERS = NextToken(vocabulary=TOKENS)
RATING = Regression(low=1, high=5)


def sequences(rows=3, length=20):
    return torch.arange(rows * (length + 1)).mul(37).remainder(TOKENS).view(rows, length + 1)


@pytest.mark.parametrize(("name", "parameters"), [("char-lstm", 93_892), ("char-transformer", 113_988)])
def test_a_character_model_has_so_many_parameters(name, parameters):
    assert count(build(name, (80,), TOKENS)) == parameters


@pytest.mark.parametrize("name", ["char-lstm", "char-transformer"])
def test_a_score_depends_only_on_what_came_before(name):
    model, x = build(name, (20,), TOKENS), sequences()[:, :-1]
    later = x.clone()
    later[:, 12:] = (later[:, 12:] + 1) % TOKENS
    with torch.no_grad():
        before, after = model(x), model(later)
    assert before.shape == (3, 20, TOKENS)
    assert torch.allclose(before[:, :12], after[:, :12], atol=1e-6)
    assert not torch.allclose(before[:, 12:], after[:, 12:], atol=1e-3)


@pytest.mark.parametrize("name", ["char-lstm", "char-transformer"])
@pytest.mark.parametrize("record_level", [False, True])
def test_a_character_model_passes_the_checks_of_privacy(name, record_level):
    targets = sequences(rows=1)[:, 1:]
    model = build(name, (20,), TOKENS)
    check(model, (20,), CHARACTERS, record_level=record_level, noisy_updates=True, targets=targets, tokens=True)


@pytest.mark.parametrize("name", [name for name in NETWORKS if NETWORKS[name].tokens])
def test_many_clients_are_trained_at_once(name):
    """And, since both ways are compared first, with the right gradients."""
    if name.startswith("char"):
        x, y, task = sequences()[:, :-1], sequences()[:, 1:], CHARACTERS
    else:
        x, y, task = sequences(length=4)[:, :-1] % 50, torch.tensor([1.0, 3.0, 5.0]), RATING
    assert network(build(name, tuple(x.shape[1:]), task.outputs), x, y, losses=task.losses).way == "rules"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["char-lstm", "char-transformer"])
def test_a_character_model_learns_a_sequence_by_heart(name):
    model, both = build(name, (20,), TOKENS), sequences(rows=1)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        loss = F.cross_entropy(model(both[:, :-1]).flatten(0, 1), both[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert torch.equal(model(both[:, :-1]).argmax(2), both[:, 1:])


@pytest.mark.parametrize(("name", "tokens"), [("ratings", 16_448), ("ratings-small", 4096)])
def test_a_model_of_ratings_begins_with_the_own_mean(name, tokens):
    model = build(name, (4,), 1)
    assert count(model) == tokens
    assert model(torch.tensor([[250, 1, tokens - 1, 0]])).tolist() == [[0.25]]


def test_the_thing_counts_ten_times_as_much_as_other_facts_and_no_token_counts_nothing():
    model = build("ratings", (5,), 1)
    with torch.no_grad():
        model.biases.weight[:4, 0] = torch.tensor([100.0, 0.2, 0.3, 0.5])
    assert model(torch.tensor([[500, 1, 2, 3, 0]])).item() == pytest.approx(0.5 + 0.2 + 0.03 + 0.05)
    assert model(torch.tensor([[500, 0, 0, 0, 0]])).item() == 0.5
