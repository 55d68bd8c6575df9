"""The example-level results in docs/results/example-level.md, cell by cell.

    SHOAL_DATA=... python benchmarks/example_level.py --out cells.jsonl [--only REGEX] [--seeds 0,1,2] [--device cuda]

Each cell is a normal run; a line is appended to the file as soon as it ends, and cells that are in it already are not
run again. `--list` prints the cells and their settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cells import Cell, main

PFL_MODELS = {
    "CNN+RL": ("pfl-cnn", "none"),
    "CNN+TS": ("pfl-cnn-ts", "none"),
    "SN+Lin": ("scatter-linear", "scattering"),
    "SN+CNN": ("scatter-cnn", "scattering"),
}
ALPHACDP = {  # data set: model, records of a client, batch, rounds (004 Table 2)
    "mnist": ("alphacdp-cnn", 500, 5, 100),
    "adult": ("adult-mlp", 300, 3, 10),
    "cancer": ("cancer-mlp", 400, 4, 3),
}
LOWER_NOISE = {"fed-sdp": (1.0, 0.1), "fed-cdp": (1.0, 0.5, 0.1), "fed-alpha-cdp": (1.0, 0.5, 0.1)}


def central(noise: float, epochs: int) -> dict[str, Any]:
    """000 Table 4.2: DP-SGD on all data in one place, an epoch of 100 steps a round."""
    return {
        "algorithm": "dp-sgd",
        "model": "thesis-mlp",
        "rounds": epochs,
        "data": {"name": "mnist", "clients": 1},
        "per_step": {"noise": noise},
    }


def thesis(name: str, clients: int, cohort: int, noise: float, rounds: int, kind: str, **keys: Any) -> dict[str, Any]:
    """000 Tables 4.3 to 4.6, end to end and naive."""
    return {
        "algorithm": name,
        "model": "thesis-mlp",
        "rounds": rounds,
        "data": {"name": "mnist", "partition": kind, "clients": clients, "records": 600},
        "clients": {"cohort": cohort},
        "per_step": {"noise": noise},
    } | keys


def pfl(model: str, epochs: int, rounds: int) -> dict[str, Any]:
    """002 Table 2, epsilon 2.93: each client draws a tenth of MNIST; the noise is what Opacus gives for it."""
    network, features = PFL_MODELS[model]
    scatter = features == "scattering"
    return {
        "algorithm": "pfl",
        "model": network,
        "rounds": rounds,
        "data": {
            "name": "mnist",
            "partition": "sample",
            "clients": 10,
            "fraction": 0.1,
            "features": features,
            "scale": "unit" if scatter else "standard",
        },
        "local": {"epochs": epochs},
        "per_step": {"noise": 0.959},
    }


def alphacdp(name: str, data: str, noise: float | None, **keys: Any) -> dict[str, Any]:
    """004 Table 6: 1,000 clients, 100 of them a round, 100 local steps."""
    model, records, batch, rounds = ALPHACDP[data]
    section = "per_update" if name == "fed-sdp" else "per_step"
    config: dict[str, Any] = {
        "algorithm": name,
        "model": model,
        "rounds": rounds,
        "data": {"name": data, "partition": "iid", "clients": 1000, "records": records},
        "clients": {"cohort": 100},
        "examples": {"batch": batch},
        "local": {"steps": 100, "lr": 0.05},
    }
    return config | ({} if noise is None else {section: {"noise": noise}}) | keys


def cells() -> Iterator[Cell]:
    for noise, epochs in ((8.0, 51), (4.0, 247), (2.0, 730)):
        yield f"thesis-table4.2/sigma{noise:g}", central(noise, epochs)
    for noise, rounds in ((4.0, 640), (3.0, 288), (2.0, 54)):
        for kind in ("iid", "shards"):
            yield f"thesis-table4.3/sigma{noise:g}/{kind}", thesis("end-to-end", 100, 10, noise, rounds, kind)
    for clients, cohort, noise, rounds in ((100, 10, 4.0, 635), (1000, 50, 4.0, 1740), (10_000, 50, 1.85, 15_000)):
        for kind in ("iid", "shards"):
            yield f"end-to-end/{clients}/{kind}", thesis("end-to-end", clients, cohort, noise, rounds, kind)
        per_round = {"noise": round(noise / 6**0.5, 4)}  # what the paper recovers from the steps' noise
        yield f"naive/{clients}/iid", thesis("naive", clients, cohort, noise, rounds, "iid", per_round=per_round)
    for model in PFL_MODELS:
        for epochs, rounds in ((1, 20), (20, 1)):
            yield f"pfl-table2/{model}/{epochs},{rounds}", pfl(model, epochs, rounds)
    for data in ALPHACDP:
        yield f"alphacdp-table6/{data}/fedavg", alphacdp("fedavg", data, None)
        for name, lower in LOWER_NOISE.items():
            yield f"alphacdp-table6/{data}/{name}/sigma6", alphacdp(name, data, 6.0)
            for noise in lower:
                yield f"alphacdp-table6/{data}/{name}/sigma{noise:g}", alphacdp(name, data, noise)


if __name__ == "__main__":
    main(__doc__, cells(), ("example", "server"))
