"""Published gradient-leakage attacks, each a short recipe over one optimiser (Wei et al. (2023), Table 1).

    dlg       Zhu et al. (2019): optimises image and label jointly; squared distance, L-BFGS
    idlg      Zhao et al. (2020): infers the label from the signs of the last layer first
    cpl       Wei et al. (2020): infers the label from its row sums; starts from a repeated tile
    cpl-tv    the same with a total-variation prior: of all pictures that explain a batch it takes a smooth one
    cpl-group   the same four times, with a pull to what they agree on, as GradInversion of Yin et al. (2021) has it
    gradinv   Geiping et al. (2020): cosine distance and total variation, Adam on the gradient's sign, inside the box
    gradinv-lbfgs   the same loss by L-BFGS: on a smooth network it converges where Adam does not
    imprint   Fowl et al. (2022): a malicious server plants weights and reads records off; no search
    trap-weights   Boenisch et al. (2023): the same with weights that few records activate, in the first layer alone

DLG and iDLG take full steps, as PyTorch's L-BFGS does without a line search; some end where the model is saturated
and the slope is 0. CPL shortens steps that gain too little. A search that ends at a large loss restarts elsewhere
while iterations are left; only the gradient decides, since an attacker does not know the truth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shoal.attacks.lbfgs import Search
from shoal.errors import ConfigError, nearest

SOLVED = 1e-8
Start = Literal["uniform", "tile", "half-tone"]
Labels = Literal["joint", "signs", "rows"]


@dataclass(frozen=True)
class Recipe:
    """A gradient-leakage attack.

    Attributes:
        name: As `--attack` takes it.
        paper: The short citation.
        match: The distance between observed and simulated gradient.
        start: Where the search starts.
        labels: How labels are found.
        optimiser: What minimises the distance; with `none` the records are read off (imprint, trap).
        iterations: The most in all, restarts included, counted as the papers do: an iteration of L-BFGS is `inner`
            evaluations, one of Adam is one.
        inner: See `iterations`.
        search: The line search of L-BFGS.
        history: Its number of pairs.
        solved: A search ends where no more than this is unexplained, of what was seen.
        prior: The weight of the image's total variation.
        lr: Adam's step.
        box: Whether the search stays inside [0, 1].
        patience: Iterations without gain after which a search ends.
        restarts: The most restarts.
        copies: Searches for each victim; more than one pull each other to what they agree on (attacks.consensus).
        consensus: The weight of that pull.
    """

    name: str
    paper: str
    match: Literal["squared", "cosine"]
    start: Start
    labels: Labels
    optimiser: Literal["l-bfgs", "signed-adam", "none"]
    iterations: int
    inner: int = 20
    search: Search = "armijo"
    history: int = 50
    solved: float = SOLVED
    prior: float = 0.0
    lr: float = 0.1
    box: bool = False
    patience: int = 10
    restarts: int = 0
    copies: int = 1
    consensus: float = 0.0

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ConfigError(f"an attack needs at least 1 iteration, got {self.iterations}")

    @property
    def plants(self) -> bool:
        """Whether the server sends weights of its own making."""
        return self.optimiser == "none"

    @property
    def counted(self) -> int:
        """How many published iterations `inner` evaluations are."""
        return self.inner if self.optimiser == "signed-adam" else 1


DLG = Recipe(
    name="dlg", paper="Zhu et al. (2019)", match="squared", start="uniform", labels="joint", optimiser="l-bfgs",
    search="fixed", history=100, iterations=300, patience=10, restarts=10,
)  # fmt: skip
IDLG = Recipe(
    name="idlg", paper="Zhao et al. (2020)", match="squared", start="uniform", labels="signs", optimiser="l-bfgs",
    search="fixed", history=100, iterations=300, patience=10, restarts=10,
)  # fmt: skip
CPL = Recipe(
    name="cpl", paper="Wei et al. (2020)", match="squared", start="tile", labels="rows", optimiser="l-bfgs",
    search="armijo", history=50, iterations=300, patience=5, restarts=2,
)  # fmt: skip
CPL_TV = replace(CPL, name="cpl-tv", prior=1e-4, solved=0.0)  # an explanation is not yet the smooth one
CPL_GROUP = replace(CPL_TV, name="cpl-group", paper="Yin et al. (2021)", copies=4, consensus=1e-2)
GRADINV = Recipe(
    name="gradinv", paper="Geiping et al. (2020)", match="cosine", start="uniform", labels="signs",
    optimiser="signed-adam", prior=1e-4, lr=0.1, box=True, iterations=4800, patience=4800,
)  # fmt: skip
GRADINV_LBFGS = replace(
    GRADINV, name="gradinv-lbfgs", optimiser="l-bfgs", box=False, iterations=300, patience=50, restarts=2
)
IMPRINT = Recipe(
    name="imprint", paper="Fowl et al. (2022)", match="squared", start="uniform", labels="joint", optimiser="none",
    iterations=1,
)  # fmt: skip
TRAP = replace(IMPRINT, name="trap-weights", paper="Boenisch et al. (2023)")

RECIPES = {
    recipe.name: recipe for recipe in (DLG, IDLG, CPL, CPL_TV, CPL_GROUP, GRADINV, GRADINV_LBFGS, IMPRINT, TRAP)
}


def recipe(name: str) -> Recipe:
    """The attack of this name."""
    if name not in RECIPES:
        raise ConfigError(f"there is no attack '{name}'{nearest(name, RECIPES)}")
    return RECIPES[name]
