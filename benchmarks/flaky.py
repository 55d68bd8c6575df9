"""Runs the tests many times, beside busy processes if asked, and counts what failed.

python benchmarks/flaky.py 10                                     the whole suite, ten times, as `make test` runs it
python benchmarks/flaky.py 10 --busy 8                            the same beside eight processes that only compute
python benchmarks/flaky.py 200 --busy 8 -- tests/cli/test_run.py  what pytest is to be given stands after `--`
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

SUITE = ["--ignore=tests/browser", "--numprocesses=auto", "--maxprocesses=4", "--dist=worksteal"]


@contextmanager
def busy(processes: int):
    """So many processes that compute without end, and end with this."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()


def failed(words: list[str]) -> list[str]:
    """The tests that fail in one run; 'pytest itself' where it ends badly and names none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *words]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ)
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        found = [
            f"{case.get('classname')}::{case.get('name')}"
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        ]
    return found or (["pytest itself"] if done.returncode else [])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("runs", type=int, help="how often")
    options.add_argument("--busy", type=int, default=0, metavar="M", help="processes that compute meanwhile")
    ours, _, words = " ".join(sys.argv[1:]).partition(" -- ")
    given = options.parse_args(ours.split())
    counts, bad = Counter[str](), 0
    with busy(given.busy):
        for run in range(1, given.runs + 1):
            found = failed(words.split() or SUITE)
            counts.update(found)
            bad += bool(found)
            print(f"run {run} of {given.runs}: {len(found)} failed; {bad} bad runs so far", flush=True)
    for name, count in counts.most_common():
        print(f"{count:4d} of {given.runs}  {name}")


if __name__ == "__main__":
    main()
