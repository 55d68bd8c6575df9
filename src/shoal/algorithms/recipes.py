"""The papers' own recipes for what a setting costs, as the column `published` shows it. None of them is a proof."""

from __future__ import annotations

from shoal.accounting.claims import Published
from shoal.accounting.published import moments_epsilon
from shoal.algorithms.base import Algorithm, Recipe


def moments(paper: str, orders: str) -> Recipe:
    """The moments accountant: the first round's m and sigma, one composition a round, taken for Poisson sampling."""

    def recipe(algorithm: Algorithm, clients: int, rounds: int, delta: float) -> tuple[Published, ...]:
        assert algorithm.per_round is not None
        rate = algorithm.clients.expected(0, max(rounds, 1), clients) / clients
        noise = algorithm.per_round.multiplier(0, max(rounds, 1))
        words = f"{paper}: moments accountant, orders {orders.replace('-', '..')}, taken for Poisson sampling"
        return (Published("client", moments_epsilon(rate, noise, rounds, delta, orders), delta, words),)

    return recipe
