"""The public facts about a federation: all that a mechanism may know when it says what a round costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """The public facts about a federation that accounting needs.

    `rounds` are those that were planned. `multiplicity`: on how many clients one record may lie. `layers`: those of
    the model that have parameters. `sizes`: the different numbers of records that clients have, empty if unknown.
    `bounds`: they are only the least and the greatest, and any between may be there. `all_answer`: whoever is asked
    answers, which no real federation can promise. `simulated`: records were dealt to clients that do not exist.
    `parameters`: of the model, 0 where noise is taken for perfect. `secure`: it is that of secure mode.
    """

    clients: int
    rounds: int
    multiplicity: int = 1
    layers: int = 1
    sizes: tuple[int, ...] = ()
    all_answer: bool = True
    bounds: bool = False
    simulated: bool = False
    parameters: int = 0
    secure: bool = False
