"""Published gradient-leakage attacks, each a short recipe over one optimiser (004 Table 1 and what it cites).

    dlg       Zhu, Liu, Han 2019: picture and label are searched together, by squared distance and L-BFGS
    idlg      Zhao, Mopuri, Bilen 2020: the label is read off the signs of the last layer first
    cpl       Wei et al. 2020: the label is read off its row sums; the start is a tile, repeated
    gradinv   Geiping et al. 2020: cosine and total variation, by Adam on the gradient's sign, inside the box
    gradinv-lbfgs   the same loss by L-BFGS: where the network is smooth it gets to the end, and Adam's steps do not

DLG and iDLG take full steps, as PyTorch's L-BFGS does without a line search: some lead to where the model is
saturated and the slope is 0. CPL shortens steps that bring too little. With each of them a search that ends at a loss
which explains nothing starts again elsewhere, as long as there are iterations left (judged by the gradient alone; an
attacker has no truth).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shoal.attacks.lbfgs import Search
from shoal.errors import ConfigError, nearest

Start = Literal["uniform", "tile", "half-tone"]
Labels = Literal["joint", "signs", "rows"]


@dataclass(frozen=True)
class Recipe:
    """What is matched and how it is searched for.

    `iterations` are at most so many in all, restarts included, counted as the papers count: an iteration of L-BFGS
    is `inner` evaluations of every victim, one of Adam a single one. `prior` weighs the total variation of the
    picture. `box` keeps the search inside [0, 1]. A search that gains nothing in `patience` iterations is over.
    """

    name: str
    paper: str
    match: Literal["squared", "cosine"]
    start: Start
    labels: Labels
    optimiser: Literal["l-bfgs", "signed-adam"]
    iterations: int
    inner: int = 20
    search: Search = "armijo"
    history: int = 50
    prior: float = 0.0
    lr: float = 0.1
    box: bool = False
    patience: int = 10
    restarts: int = 0

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ConfigError(f"an attack needs at least 1 iteration, got {self.iterations}")

    @property
    def counted(self) -> int:
        """How many iterations, as published, `inner` evaluations are."""
        return self.inner if self.optimiser == "signed-adam" else 1


DLG = Recipe(
    name="dlg", paper="Zhu et al. 2019", match="squared", start="uniform", labels="joint", optimiser="l-bfgs",
    search="fixed", history=100, iterations=300, patience=10, restarts=10,
)  # fmt: skip
IDLG = Recipe(
    name="idlg", paper="Zhao et al. 2020", match="squared", start="uniform", labels="signs", optimiser="l-bfgs",
    search="fixed", history=100, iterations=300, patience=10, restarts=10,
)  # fmt: skip
CPL = Recipe(
    name="cpl", paper="Wei et al. 2020", match="squared", start="tile", labels="rows", optimiser="l-bfgs",
    search="armijo", history=50, iterations=300, patience=5, restarts=2,
)  # fmt: skip
GRADINV = Recipe(
    name="gradinv", paper="Geiping et al. 2020", match="cosine", start="uniform", labels="signs",
    optimiser="signed-adam", prior=1e-4, lr=0.1, box=True, iterations=4800, patience=4800,
)  # fmt: skip
GRADINV_LBFGS = replace(
    GRADINV, name="gradinv-lbfgs", optimiser="l-bfgs", box=False, iterations=300, patience=50, restarts=2
)

RECIPES = {recipe.name: recipe for recipe in (DLG, IDLG, CPL, GRADINV, GRADINV_LBFGS)}


def recipe(name: str) -> Recipe:
    """The attack of this name."""
    if name not in RECIPES:
        raise ConfigError(f"there is no attack '{name}'{nearest(name, RECIPES)}")
    return RECIPES[name]
