"""Factorisations for correlated noise: errors, seconds and what is kept, beside those of jax_privacy.

    python benchmarks/factorisations.py [--jax-python VENV/bin/python] [--settings 1000,100,10]

jax_privacy (2.0.0; `pip install jax_privacy` in an environment of its own, on a CPU) optimises the same matrices for
the same rounds, separation and participations, and only its coefficients come back: the errors of both sides are
computed by `shoal.mechanisms.factorisations.errors`. Its BLT has no more than 3 buffers, as Shoal's has here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time

Setting = tuple[int, ...]
Found = dict[str, list[float]]
"""Seconds, vectors that are kept, and then the coefficients, by kind."""

SETTINGS = ((100, 100, 1), (100, 10, 10), (1000, 100, 10), (2000, 100, 20), (1000, 1000, 1), (2000, 2000, 1))
BUFFERS, INVERSE_BANDS = 3, 16


def ours(setting: Setting) -> Found:
    """What Shoal makes."""
    from shoal.mechanisms.factorisations import factorise
    from shoal.mechanisms.participation import Participation

    found, plan, separation = Found(), Participation(*setting), setting[1]
    sizes = {"square-root": separation, "banded": separation, "blt": BUFFERS}
    for kind, size in (sizes | dict.fromkeys(("bisr", "band-inverse"), INVERSE_BANDS)).items():
        start = time.perf_counter()
        made = factorise(kind, size, 0.0, plan)  # type: ignore[arg-type]
        found[kind] = [time.perf_counter() - start, made.vectors, *made.coefficients(setting[0])]
    return found


def theirs(setting: Setting) -> Found:
    """What jax_privacy makes, in its own interpreter."""
    import jax

    jax.config.update("jax_enable_x64", True)
    from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz

    found, (rounds, separation, most) = Found(), setting
    start = time.perf_counter()
    bands = toeplitz.optimize_banded_toeplitz(rounds, separation)
    found["banded"] = [time.perf_counter() - start, separation - 1, *map(float, bands / bands[0])]
    start = time.perf_counter()
    limits = {"min_buffers": BUFFERS, "max_buffers": BUFFERS}
    blt = buffered_toeplitz.optimize(n=rounds, min_sep=separation, max_participations=most, error="mean", **limits)
    coefficients = map(float, blt.toeplitz_coefs(rounds))
    found["blt"] = [time.perf_counter() - start, len(blt.buf_decay), *coefficients]
    return found


def main() -> None:
    """Print one line for each setting and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jax-python", help="an interpreter that has jax_privacy")
    parser.add_argument("--settings", nargs="*", help="rounds,separation,participations")
    parser.add_argument("--theirs", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    settings = [tuple(map(int, word.split(","))) for word in asked.settings] if asked.settings else SETTINGS
    if asked.theirs:
        print(json.dumps(theirs(settings[0])))
        return
    print("| rounds, separation, participations | factorisation | kept | RMSE | max | s | jax_privacy | differs |")
    print("|---|---|---|---|---|---|---|---|")
    for setting in settings:
        report(setting, ours(setting), _asked(asked.jax_python, setting) if asked.jax_python else {})


def _asked(python: str, setting: Setting) -> Found:
    command = [python, __file__, "--theirs", "--settings", ",".join(map(str, setting))]
    answer: Found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    return answer


def report(setting: Setting, own: Found, other: Found) -> None:
    """The lines of a setting, in Markdown."""
    import numpy as np

    from shoal.mechanisms.factorisations import Banded, errors
    from shoal.mechanisms.participation import Participation

    def both(line: list[float]) -> tuple[float, float]:
        return errors(Banded(np.array(line[2:])), Participation(*setting))

    for kind, line in own.items():
        rmse, largest = both(line)
        beside = differs = ""
        if kind in other:
            rival = both(other[kind])
            beside = f"{rival[0]:.4f}, {rival[1]:.4f}, {other[kind][0]:.0f} s"
            differs = f"{100 * (rmse / rival[0] - 1):+.2f}%, {100 * (largest / rival[1] - 1):+.2f}%"
        figures = (str(int(line[1])), f"{rmse:.4f}", f"{largest:.4f}", f"{line[0]:.2f}", beside, differs)
        print(f"| {' | '.join([', '.join(map(str, setting)), kind, *figures])} |", flush=True)


if __name__ == "__main__":
    main()
