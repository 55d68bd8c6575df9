"""Seconds a round of example-level DP: Shoal's simulator, Opacus 1.6 and plain PyTorch without privacy, in one run.

Opacus wants an environment of its own (torch first and by its exact version, as in the Makefile):

    python3 -m venv OPACUS && OPACUS/bin/pip install torch==2.13.0
    OPACUS/bin/pip install numpy scipy opt_einsum && OPACUS/bin/pip install --no-deps 'opacus==1.6.*'
    python benchmarks/against_opacus --opacus-python OPACUS/bin/python [--task mlp] [--steps 10] [--modes hooks]

(mlp) MLP 784-1000-10, 10 clients x 6 steps of 100;  (cnn) the CNN of 34,720 parameters, 100 clients x 100 steps of 5.
Pictures of MNIST's shape; every step clips each record's gradient to 1 (flat) and adds noise of multiplier 1; SGD.

Timed is a round and nothing else: all clients train from the same model and their models are summed; no imports, no
wrapping, no evaluation, checkpoint or ledger. Opacus and plain PyTorch train one client after the other, each under
every setting that might suit it: one thread, one for each core, or a process of one thread for each core; mkldnn on
and off; channels last; and all of Opacus' ways to per-example gradients (hooks, functorch, ew, ghost, and "fast",
which is ghost with norms from materialised gradients). Plain PyTorch is there twice, as it is written ("plain") and
through torch.compile ("compiled", which needs a C++ compiler). A few steps of each setting show which are worth a
full round; full rounds are in turns with Shoal's, so that a busy machine slows everybody, and the best setting
counts. Shoal runs with its defaults.

First it is checked that without noise, in a fixed order, everyone finds Shoal's update; a mode that does not is left
out and named ("left_out"). Then that the noise of all steps is in the updates. Each task prints one JSON object, in
which a `ratio` is the rival's seconds over Shoal's; how it goes is told on standard error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from against_opacus.compare import parser, run
from against_opacus.processes import versions
from against_opacus.rivals import Loops


def main() -> None:
    option = "--opacus-python"
    chosen = parser(__doc__, option, "Opacus").parse_args()
    found = versions(chosen.python, option, "opacus", "torch") | {"shoal_torch": torch.__version__}
    starts = {
        "opacus": lambda bench: Loops(bench, chosen.python, tuple(chosen.modes), private=True),
        "plain": lambda bench: Loops(bench, sys.executable, ("eager",), private=False),
        "compiled": lambda bench: Loops(bench, sys.executable, ("compiled",), private=False),
    }
    run(chosen, starts, found)


if __name__ == "__main__":
    main()
