"""Wei et al. (2023), Securing Distributed SGD against Gradient Leakage Threats (arXiv 2305.06473).

Tables 4 to 11: Fed-SDP, Fed-CDP, Fed-alphaCDP[sigma]. Tables 1 and 3 and Figure 3 are in `alphacdp_attacks`.

1,000 clients, 100 a round, 100 local steps; C = 4, sigma = 6, lr 0.05 (not stated), noise as DP-SGD places it, the
smallest of the paper's three readings. Tables 8 and 11 let epsilon_t rise, as the paper's own rounds demand; the
cyclic decay is as printed. Quick versions are digits and cancer, with fewer clients, rounds and steps.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from shoal.accounting import published as recipes
from shoal.papers import wei_attacks
from shoal.papers.table import Cell, Claim, Table, published
from shoal.papers.work import Account, Leak, Run

DATA = {  # column: data set, model, records of a client, batch, rounds (Table 2)
    "MNIST": ("mnist", "alphacdp-cnn", 500, 5, 100),
    "CIFAR10": ("cifar10", "alphacdp-cnn", 400, 4, 100),
    "LFW": ("lfw", "alphacdp-cnn", 300, 3, 60),
    "Adult": ("adult", "adult-mlp", 300, 3, 10),
    "Cancer": ("cancer", "cancer-mlp", 400, 4, 3),
}
SETS = tuple(entry[0] for entry in DATA.values())
ALGORITHMS = {
    "non-private": "fedavg",
    "Fed-SDP": "fed-sdp",
    "Fed-CDP": "fed-cdp",
    "Fed-alphaCDP": "fed-alpha-cdp",
    "Fed-alphaCDP[sigma]": "fed-alpha-cdp-sigma",
    "quantile": "quantile-record",
    "AdaClip": "adaclip",
}
FOUR = ("non-private", "Fed-SDP", "Fed-CDP", "Fed-alphaCDP")
LOWER_NOISE = {"Fed-SDP": (1.0, 0.1), "Fed-CDP": (1.0, 0.5, 0.1), "Fed-alphaCDP": (1.0, 0.5, 0.1)}
DECAYS = {
    "linear": "epsilon-linear:0.30747:1.30747:1e-5",
    "staircase": "epsilon-staircase:0.35747:1.35747:10:1e-5",
    "exponential": "epsilon-exponential:0.30700:1.62109:1e-5",
    "cyclic": "cyclic:15:1",
}
ACCOUNTANTS = {"base": "basic", "advanced": "advanced", "zCDP": "zcdp", "moments": "moments"}
L2_MAX = "the noise is scaled to the greatest gradient of the batch (l2-max): the scale reveals it, as a test shows"
MORE = "10,000 clients were run at 10%; with 1,000 all four shares give the same, 0.988 or guessing"
SCALES = "C scales step and noise together: no data set learns at 4, and MNIST, which learns at 1, at none above"
QUICK_CLIENTS = {100: 10, 1000: 20, 10_000: 40}


def config(
    method: str, column: str = "MNIST", noise: Any = None, clip: float = 4, clients: int = 1000, share: float = 0.1
) -> dict[str, Any]:
    """The configuration of a method on one of the paper's data sets."""
    data, model, records, batch, rounds = DATA[column]
    algorithm = ALGORITHMS[method]
    given: dict[str, Any] = {
        "algorithm": algorithm,
        "model": model,
        "rounds": rounds,
        "data.name": data,
        "data.partition": "iid",
        "data.clients": clients,
        "data.records": records,
        "clients.cohort": round(share * clients),
        "records.batch": batch,
        "local.steps": 100,
        "local.lr": 0.05,
    }
    if algorithm == "fed-sdp":
        given |= {"per_update.noise_multiplier": noise or 6.0, "per_update.clip_norm": float(clip)}
    elif algorithm in ("fed-cdp", "fed-alpha-cdp", "fed-alpha-cdp-sigma"):
        default = "linear:15:4.85" if algorithm == "fed-alpha-cdp-sigma" else 6.0
        given |= {"per_step.noise_multiplier": noise or default, "per_record.clip_norm": float(clip)}
    return given


def small(given: dict[str, Any]) -> dict[str, Any]:
    """What the quick version changes."""
    clients = QUICK_CLIENTS[given["data.clients"]]
    pictures = given["data.name"] not in ("adult", "cancer")
    return {
        "data.name": "digits" if pictures else "cancer",
        "model": "digits-mlp" if pictures else "cancer-mlp",
        "rounds": 5,
        "data.clients": clients,
        "data.records": 50,
        "clients.cohort": max(1, round(clients * given["clients.cohort"] / given["data.clients"])),
        "local.steps": 20,
        "local.lr": 0.2,
    }


def run(given: dict[str, Any], at: int | None = None, target: float | None = None) -> Run:
    """A run with its quick version."""
    return Run(given, small(given), at, target)


def claim_of(method: str, column: str = "MNIST") -> Claim | None:
    """What Table 6 states for these rounds."""
    if method.startswith("Fed-alphaCDP"):
        return Claim("record", "release", published("alphacdp-table6")["epsilon"]["Fed-alphaCDP"][column], L2_MAX)
    epsilon = published("alphacdp-table6")["epsilon"].get(method)
    return Claim("client" if method == "Fed-SDP" else "record", "release", epsilon[column]) if epsilon else None


def table4() -> Table:
    """Accuracy by the number of clients."""
    cells = []
    for clients in (100, 1000, 10_000):
        for percent in (5, 10, 20, 50):
            measures = ("accuracy", "step_seconds") if (clients, percent) == (1000, 10) else ("accuracy",)
            for method in FOUR:
                work = run(config(method, clients=clients, share=percent / 100))
                claim = claim_of(method) if (clients, percent) == (1000, 10) else None
                why = MORE if clients == 10_000 else ""
                cells.append(Cell(method, f"{clients} {percent}%", work, measures, claim=claim, unneeded=why))
    return Table("alphacdp-table4", ("mnist",), 120, tuple(cells))


def table5() -> Table:
    """Accuracy by the clip norm."""
    cells = []
    for column in DATA:
        cells.append(Cell(f"{column} non-private", "C=4", run(config("non-private", column))))
        for method in FOUR[1:]:
            for clip in (0.1, 0.5, 1, 2, 4, 8, 16, 32):
                work = run(config(method, column, clip=clip))
                row, claim = f"{column} {method}", claim_of(method, column)
                why = SCALES if clip > 1 else ""
                cells.append(Cell(row, f"C={clip:g}", work, claim=claim, unneeded=why))
    return Table("alphacdp-table5", SETS, 60, tuple(cells))


def table6() -> Table:
    """Epsilon and accuracy."""
    cells = []
    for column, (*_, rounds) in DATA.items():
        for method in FOUR:
            claim = claim_of(method, column)
            cells.append(Cell(method, column, run(config(method, column)), claim=claim))
            for noise in LOWER_NOISE.get(method, ()):
                own = run(config(method, column, noise))
                cells.append(Cell(method, column, own, change=f"sigma {noise:g}", claim=claim))
        cells += _spent(column, rounds, ("Fed-SDP", "Fed-CDP", "Fed-alphaCDP"))
    return Table("alphacdp-table6", SETS, 15, tuple(cells))


def _spent(column: str, rounds: int, methods: tuple[str, ...]) -> list[Cell]:
    """Epsilon by the paper's recipe."""
    recipe = {"Fed-SDP": recipes.fed_sdp_epsilon}
    return [
        Cell(method, column, Account("epsilon", recipe.get(method, recipes.fed_cdp_epsilon), (rounds,)), ("epsilon",))
        for method in methods
    ]


def table7() -> Table:
    """Rounds until a target accuracy."""
    figures = published("alphacdp-table7")
    cells = []
    for column in DATA:
        target = figures["accuracy"]["target"][column]
        cells.append(Cell("Fed-alphaCDP", column, run(config("Fed-alphaCDP", column), target=target), ("rounds",)))
        for method in ("Fed-SDP", "Fed-alphaCDP"):
            cells += _spent(column, int(figures["rounds"][method][column]), (method,))
    return Table("alphacdp-table7", SETS, 5, tuple(cells))


@cache
def decay_rounds(policy: str, rounds: int, target: float, accountant: str = "moments") -> float:
    """Rounds until a decaying noise has spent the target, by one of the paper's accountants."""
    iterations = 100 * rounds
    cyclic = policy == "cyclic"
    noises = recipes.printed_noise(policy, iterations) if cyclic else recipes.decayed_noise(policy, iterations)
    with np.errstate(over="ignore"):  # the cosine ends near 0, where a step's epsilon is beyond all numbers
        return recipes.rounds_until(noises, target, accountant)


def table8() -> Table:
    """Accuracy with decaying noise."""
    figures = published("alphacdp-table8")
    cells = []
    for column, (*_, rounds) in DATA.items():
        for method in ("non-private", "Fed-CDP", "Fed-alphaCDP"):
            cells.append(Cell(method, column, run(config(method, column)), claim=claim_of(method, column)))
        cells += _spent(column, rounds, ("Fed-CDP",))
        target = figures["epsilon"]["Fed-CDP"][column]
        for policy, schedule in DECAYS.items():
            row = f"Fed-alphaCDP[sigma] {policy}"
            given, at = config("Fed-alphaCDP[sigma]", column, schedule), int(figures["rounds"][row][column])
            cells.append(Cell(row, column, run(given, at), claim=claim_of("Fed-alphaCDP", column)))
            cells.append(Cell(row, column, Account("rounds", decay_rounds, (policy, rounds, target)), ("rounds",)))
    return Table("alphacdp-table8", SETS, 15, tuple(cells))


def table9() -> Table:
    """Seconds of a local step."""
    cells = [
        Cell(method, column, run(config(method, column)), ("step_seconds",))
        for method in (*FOUR, "Fed-alphaCDP[sigma]")
        for column in DATA
    ]
    return Table("alphacdp-table9", SETS, 8, tuple(cells))


def table10() -> Table:
    """Comparison with adaptive clipping."""
    cells = []
    for method in ("non-private", "quantile", "AdaClip", "Fed-alphaCDP[sigma]"):
        for column in DATA:
            work = run(config(method, column))
            claim = claim_of(method, column)
            cells.append(Cell(method, column, work, ("accuracy", "step_seconds"), claim=claim))
        leak = Leak("cpl", ALGORITHMS[method], (), "lfw", 2)
        seen = wei_attacks.RECORDS if method == "quantile" else method
        cells.append(Cell(method, "LFW", leak, ("resilient",), attacked=f"table3/lfw/{seen}/2"))
    return Table("alphacdp-table10", SETS, 20, tuple(cells))


def table11() -> Table:
    """Four accountants."""
    figures = published("alphacdp-table11")
    step = (0.01, 6.0, 10_000, 1e-5)
    spent = {"base": recipes.basic_epsilon, "advanced": recipes.advanced_epsilon, "zCDP": recipes.zcdp_epsilon}
    cells = [
        Cell("target", column, Account("epsilon", recipe, step), ("epsilon",)) for column, recipe in spent.items()
    ]
    cells.append(Cell("target", "moments", Account("epsilon", recipes.fed_cdp_epsilon, (100,)), ("epsilon",)))
    for column, accountant in ACCOUNTANTS.items():
        for method in ("Fed-CDP", "Fed-alphaCDP"):
            cells.append(Cell(method, column, run(config(method))))
        for policy, schedule in DECAYS.items():
            row = f"Fed-alphaCDP[sigma] {policy}"
            at, target = int(figures["rounds"][row][column]), figures["epsilon"]["target"][column]
            cells.append(Cell(row, column, run(config("Fed-alphaCDP[sigma]", noise=schedule), at)))
            work = Account("rounds", decay_rounds, (policy, 100, target, accountant))
            cells.append(Cell(row, column, work, ("rounds",)))
    return Table("alphacdp-table11", ("mnist",), 3, tuple(cells))


def tables() -> list[Table]:
    """All tables and figures of the paper."""
    attacked = [wei_attacks.table1(), wei_attacks.table3()]
    trained = [table4(), table5(), table6(), table7(), table8(), table9(), table10(), table11()]
    plain = {key: value for key, value in config("non-private", "LFW").items() if key != "algorithm"}
    return [*attacked, *trained, wei_attacks.figure3(plain, small(config("non-private", "LFW")))]
