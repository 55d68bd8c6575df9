"""The ratio of the densities of a block's releases, where the unit entered one of its rounds.

It is the mean of independent ratios, one a round; its law is kept on nodes.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
from scipy.special import ndtr

NODES, TAILS = 2000, 8.0  # of the law of a mean of ratios; the standard deviations of a ratio that it covers
Law: TypeAlias = tuple[Any, Any, int]
"""Nodes, of which the first is 0, the mass of the second distribution at each, and of how many rounds it is."""


def mean_ratio(rounds: Any, least: float, reach: float) -> tuple[Any, Any]:
    """The nodes and their masses for a block of (noise, rounds), of which `least` is the smallest noise."""
    laws = [_many(_ratio(noise, least, reach), count, least, reach) for noise, count in rounds]
    nodes, mass, _ = reduce(lambda one, other: _averaged(one, other, least, reach), laws)
    return nodes, mass


def _nodes(rounds: int, noise: float, reach: float) -> Any:
    """Nodes for the mean of so many ratios, finest near 1."""
    width = min(1 / noise, math.sqrt(math.expm1(min(1 / noise**2, 700.0)) / rounds))
    far = math.asinh(reach / width)
    return np.append(0.0, np.exp(width * np.sinh(np.linspace(-far, far, NODES))))


def _ratio(noise: float, least: float, reach: float) -> Law:
    """The ratio of N(1) to N(0): under N(0) its logarithm is N(-1/2 noise^2, 1/noise^2)."""
    nodes = _nodes(1, least, reach)
    with np.errstate(divide="ignore"):
        places = noise * np.log(nodes)
    q, p = _cells(places + 0.5 / noise), _cells(places - 0.5 / noise)
    up = (p[:-1] - nodes[:-1] * q[:-1]) / np.diff(nodes)  # which keeps the mean of each cell
    mass = np.append(q[:-1] - up, 0.0) + np.append(0.0, up)
    mass[0] += q[-1]  # beyond the last node: what N(1) has there is taken as revealed
    return nodes, np.maximum(mass, 0.0), 1


def _cells(places: Any) -> Any:
    """The mass of a normal distribution between places, and beyond the last; accurate in both tails."""
    below, above = np.append(ndtr(places), 1.0), np.append(ndtr(-places), 0.0)
    return np.where(np.append(places, np.inf)[:-1] > 0, -np.diff(above), np.diff(below))


def _many(one: Law, count: int, noise: float, reach: float) -> Law:
    """The mean of so many ratios, by doubling."""
    law = one
    for bit in bin(count)[3:]:
        law = _averaged(law, law, noise, reach)
        law = _averaged(law, one, noise, reach) if bit == "1" else law
    return law


def _averaged(one: Law, other: Law, noise: float, reach: float) -> Law:
    """The mean of two, weighed by their rounds, on its own nodes."""
    rounds = one[2] + other[2]
    nodes, mass = _nodes(rounds, noise, reach), np.zeros(NODES + 1)
    own, kept = one[1] > 0, other[1] > 0
    theirs, weights = other[0][kept] * (other[2] / rounds), other[1][kept]
    for value, weight in zip(one[0][own] * (one[2] / rounds), one[1][own], strict=True):
        at = np.minimum(value + theirs, nodes[-1])
        low = np.clip(np.searchsorted(nodes, at, side="right") - 1, 0, NODES - 1)
        up = np.clip((at - nodes[low]) / (nodes[low + 1] - nodes[low]), 0.0, 1.0) * weights * weight
        mass += np.bincount(low, weights * weight - up, NODES + 1) + np.bincount(low + 1, up, NODES + 1)
    return nodes, mass, rounds
