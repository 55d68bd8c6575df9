"""The public facts about a federation: all that a mechanism may know when it states the cost of a round."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.accounting.theorems import Unit


@dataclass(frozen=True)
class Setting:
    """The public facts about a federation that accounting needs.

    `rounds`: the planned number. `multiplicity`: the most clients that may hold one record. `layers`: the model's
    layers with parameters. `sizes`: the distinct numbers of records of clients, empty if unknown. `bounds`: `sizes`
    are only the smallest and the largest, and any between may occur. `all_answer`: no client drops out, which no real
    federation can promise. `simulated`: records were assigned to clients that do not exist. `parameters`: the number
    of model parameters, 0 where the noise sampler is taken as perfect. `secure`: noise is that of secure mode.
    `user_columns`: how many users a record may have, 0 where records name none; `clients_per_user`: the most clients
    that hold records of one user; `public_ownership`: it is public which users each record has.
    `graph_failure`: the probability, for each round, that a sparse graph of secure aggregation hides too little.
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
    graph_failure: float = 0.0
    user_columns: int = 0
    clients_per_user: int = 1
    public_ownership: bool = False

    @property
    def seeded(self) -> bool:
        """Whether the noise of a real federation follows from a seed, which its coordinator and all sites know."""
        return not (self.secure or self.all_answer)

    def holders(self, unit: Unit) -> int:
        """The most clients that hold data of one unit."""
        return {"client": 1, "record": self.multiplicity, "user": self.clients_per_user}[unit]
