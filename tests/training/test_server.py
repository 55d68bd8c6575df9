"""What the server makes of the mean update, against the papers' formulas written out."""

from dataclasses import replace

import pytest
import torch

from shoal.algorithms import algorithm
from shoal.algorithms.base import Aggregate, Local, Server
from shoal.errors import ConfigError
from shoal.mechanisms.sampling import Clients, Records
from shoal.training.round_index import RoundIndex
from shoal.training.server import given_out, step
from support.small_federation import play, restricted, simulator, small

UPDATES = [torch.tensor([1.0, -2.0, 0.0]), torch.tensor([0.5, 0.5, 4.0]), torch.tensor([-3.0, 1.0, 1e-3])] * 4


def models(server, rounds):
    """The models after each round, and the memory at the end."""
    model, memory, seen = torch.tensor([10.0, 0.0, -1.0]), {}, []
    for t in range(rounds):
        model = step(server, model, UPDATES[t], memory, RoundIndex(t, rounds))
        seen.append(model)
    return seen, memory


@pytest.mark.slow
def test_a_plain_server_adds_the_update():
    seen, memory = models(Server(lr=0.5), 2)
    torch.testing.assert_close(seen[1], torch.tensor([10.75, -0.75, 1.0]))
    assert memory == {}


def test_fedavgm_is_heavy_ball_momentum():
    """Hsu et al. 2019: v <- beta v + update; w <- w + lr v."""
    seen, _ = models(Server(lr=0.5, momentum=0.9), 5)
    model, velocity = torch.tensor([10.0, 0.0, -1.0]), torch.zeros(3)
    for t in range(5):
        velocity = 0.9 * velocity + UPDATES[t]
        model = model + 0.5 * velocity
        torch.testing.assert_close(seen[t], model)


def test_fedadam_is_algorithm_2_of_reddi_et_al():
    """m <- .9 m + .1 d; v <- .99 v + .01 d^2, from tau^2; w <- w + lr m / (sqrt v + tau)."""
    tau = 1e-2
    seen, _ = models(Server(lr=0.1, adaptivity=tau), 5)
    model, mean, square = torch.tensor([10.0, 0.0, -1.0]), torch.zeros(3), torch.full((3,), tau**2)
    for t in range(5):
        mean = 0.9 * mean + 0.1 * UPDATES[t]
        square = 0.99 * square + 0.01 * UPDATES[t] ** 2
        model = model + 0.1 * mean / (square.sqrt() + tau)
        torch.testing.assert_close(seen[t], model)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_the_model_given_out_is_the_mean_over_the_last_share_of_the_rounds(share):
    seen, memory = models(Server(momentum=0.5, average=share), 10)
    last = int(round(share * 10, 6))
    expected = torch.stack(seen[-last:]).mean(0) if last else seen[-1]
    torch.testing.assert_close(given_out(Server(average=share), seen[-1], memory), expected)


def test_without_averaging_the_last_model_is_given_out():
    seen, memory = models(Server(momentum=0.5), 3)
    assert given_out(Server(), seen[-1], memory) is seen[-1]


def test_before_the_last_share_begins_the_model_itself_is_given_out():
    """A budget may end a run early."""
    model, memory = torch.ones(3), {}
    model = step(Server(average=0.5), model, UPDATES[0], memory, RoundIndex(0, 10))
    assert given_out(Server(average=0.5), model, memory) is model


def test_training_goes_on_from_the_last_model_not_from_the_mean():
    with_mean, _ = models(Server(average=0.9), 6)
    without, _ = models(Server(), 6)
    assert all(torch.equal(a, b) for a, b in zip(with_mean, without, strict=True))


def test_weights_by_size_survive_a_round_in_which_nobody_comes():
    """The noise is then divided by the public cohort, not by nothing."""
    record = restricted(small("trusted-curator", aggregate=Aggregate("size")), ())
    state, told = play(simulator(record))
    assert told["clients"] == 0
    assert 0 < float(state.model.abs().max()) < 10


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Server(lr=0.0), r"server\.lr must be > 0 .*, got 0"),
        (lambda: Server(momentum=1.0), r"server\.momentum must be in \[0, 1\), got 1"),
        (lambda: Server(momentum=-0.1), r"server\.momentum must be in \[0, 1\)"),
        (lambda: Server(average=1.0), r"server\.average must be in \[0, 1\)"),
        (lambda: Server(adaptivity=-1.0), r"server\.adaptivity must be >= 0"),
        (lambda: Local(lr=-1.0), r"local\.lr must be >= 0 .*, got -1"),
        (lambda: Local(epochs=0), r"local\.epochs must be from 1 to 1000000, got 0"),
        (lambda: Local(epochs=10**12), r"local\.epochs must be from 1 to 1000000, got 10{12}"),
        (lambda: Local(steps=0), r"local\.steps must be from 1 to 1000000, got 0"),
        (lambda: Local(lr=1e308), r"'1e\+308': 1e\+308 is out of range; use 0, or a number from 1e-30"),
        (lambda: Server(lr=1e300), r"server\.lr must be > 0 \(from 1e-12 to 1e\+12\), got 1e\+300"),
        (lambda: Server(adaptivity=1e300), r"server\.adaptivity must be >= 0"),
        (lambda: Local(momentum=1.0), r"local\.momentum must be in \[0, 1\)"),
        (lambda: Records(batch=0), r"records\.batch must be >= 1, got 0"),
        (lambda: Clients(cohort=0), r"clients\.cohort must be > 0, got 0"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize("sampling", ["fixed-size", "poisson"])
def test_more_clients_than_there_are_is_refused_before_the_first_round(sampling):
    record = replace(algorithm("fedavg"), clients=Clients(sampling, "linear:5:20"))
    with pytest.raises(ConfigError, match=r"clients\.cohort is 12\.5 in round 3, but there are only 10 clients"):
        simulator(record)
