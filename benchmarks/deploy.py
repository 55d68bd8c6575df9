"""Seconds and bytes a round of a real federation: coordinator and sites as processes on this machine, over TLS.

    python benchmarks/deploy.py --sites 2,8,32 --rounds 8 [--kill-every 5] [-c federation.aggregation=secure]

The MLP of 795,010 parameters (784-1000-10), pictures of 28 x 28 that are made up: what is measured is the transport.
`--steps` local steps of 10 records. Sites share the cores: the training of one site is measured alone, and what a
round takes beyond the training of all of them, divided by the cores, is transport.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

PRELOADED = [f"shoal.federation.{name}" for name in ("serve", "flower.superlink", "flower.node")]
PRELOADED += ["shoal.report.run_page"]
context = multiprocessing.get_context("forkserver")


def child(folder: str, log: str, words: list[str]) -> None:
    os.chdir(folder)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from shoal.cli.main import main

    sys.argv = ["shoal", *words]
    main()


def start(folder: Path, log: str, *words: str) -> Any:
    made = context.Process(target=child, args=(str(folder), log, list(words)))
    made.start()
    return made


def pictures(path: Path, rows: int, seed: int) -> None:
    """Noise with ten classes: nothing is learnt from it, and nothing needs to be."""
    generator = np.random.Generator(np.random.Philox(seed))
    x = generator.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
    np.savez(path, x=x, y=np.arange(rows) % 10)


def prepared(folder: Path, sites: int, rounds: int, steps: int) -> None:
    from shoal.federation.key_making import make_authority, make_site

    make_authority(folder / "keys", ["127.0.0.1"], 2)
    for number in range(sites):
        _, public = make_site(folder, f"site-{number:02}")
        public.rename(folder / "keys" / "sites" / public.name)
        pictures(folder / f"data-{number}.npz", 40, number)
    pictures(folder / "held-out.npz", 100, 10_000)
    (folder / "federation.toml").write_text(f"""
algorithm = "trusted-curator"
model = "mlp"
rounds = {rounds}
[data]
name = "held-out.npz"
clients = {sites}
[clients]
sampling = "all"
[examples]
batch = 10
[local]
steps = {steps}
[engine]
device = "cpu"
threads = 1
[federation]
deadline = 60.0
""")


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def join(folder: Path, number: int, port: int) -> Any:
    name = f"site-{number:02}"
    options = [
        "--key",
        f"{name}.key",
        "--ca",
        "keys/ca.pem",
        "--peers",
        "keys/sites",
        "--folder",
        f"own-{number}",
        "--no-guarantee",
    ]
    return start(folder, f"{name}.log", "join", f"127.0.0.1:{port}", "--data", f"data-{number}.npz", *options)


def metrics(folder: Path) -> list[dict[str, Any]]:
    files = list(folder.glob("runs/*/metrics.jsonl"))
    return [json.loads(line) for line in files[0].read_text().splitlines()] if files else []


def measured(sites: int, rounds: int, steps: int, kill_every: int, changes: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as where:
        folder, port = Path(where), free_port()
        prepared(folder, sites, rounds, steps)
        words = ["federation.toml", "--keys", "keys", "--port", str(port), *changes]
        coordinator = start(folder, "serve.log", "serve", *words)
        running = {number: join(folder, number, port) for number in range(sites)}
        after = range(kill_every, rounds, kill_every) if kill_every else range(0)
        killed = kill_some(folder, coordinator, running, port, after)
        spent = cpu_a_round(folder, coordinator, running)
        coordinator.join()
        for process in running.values():
            process.join(60)
            process.kill()
        if coordinator.exitcode:
            raise SystemExit((folder / "serve.log").read_text())
        lines = metrics(folder)
        told = {
            "sites": sites,
            "rounds": len(lines),
            "seconds a round, median": round(statistics.median(line["seconds"] for line in lines[1:]), 3),
            "fastest": round(min(line["seconds"] for line in lines[1:]), 3),
            "slowest": round(max(line["seconds"] for line in lines[1:]), 3),
            "bytes sent a round": lines[-1]["bytes_sent"],
            "bytes received a round": lines[-1]["bytes_received"],
            "answers": sum(line["clients"] for line in lines),
            **spent,
        }
        if kill_every:
            told |= {"killed": killed, "gone": sum(r["what"] == "gone" for m in lines for r in m.get("reports", ()))}
            told["bad"] = sum(line["bad_updates"] for line in lines)
        return told


def cpu_a_round(folder: Path, coordinator: Any, running: dict[int, Any]) -> dict[str, float]:
    """Processor seconds a round, between the first that is seen and the last: a busy machine changes them little."""
    seen: list[tuple[int, float, float]] = []
    while coordinator.is_alive():
        rounds = len(metrics(folder))
        if rounds and (not seen or rounds > seen[-1][0]):
            sites = sum(cpu(process.pid) for process in running.values())
            seen.append((rounds, cpu(coordinator.pid), sites))
        time.sleep(0.02)
    if len(seen) < 2:
        return {}
    (first, own, sites), (last, own_after, sites_after) = seen[0], seen[-1]
    counted = last - first
    return {
        "processor seconds a round, coordinator": round((own_after - own) / counted, 3),
        "all sites": round((sites_after - sites) / counted, 3),
    }


def cpu(pid: int) -> float:
    try:
        told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")


def kill_some(folder: Path, coordinator: Any, running: dict[int, Any], port: int, after: range) -> int:
    """SIGKILL to a random site after each of these rounds, and the site again."""
    chance = random.Random(0)
    for rounds in after:
        while coordinator.is_alive() and len(metrics(folder)) < rounds:
            time.sleep(0.05)
        number = chance.choice(list(running))
        os.kill(running[number].pid, signal.SIGKILL)
        running[number].join()
        running[number] = join(folder, number, port)
    return len(after)


def training(steps: int) -> float:
    """Seconds that the local steps of one site take alone, by the simulator."""
    import shoal

    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        prepared(folder, 1, 6, steps)
        given: dict[str, Any] = {"algorithm": "trusted-curator", "model": "mlp", "rounds": 6}
        given |= {"data.name": str(folder / "held-out.npz")}
        given |= {"data.clients": 1, "clients.sampling": "all", "records.batch": 10, "local.steps": steps}
        given |= {"engine.threads": 1, "engine.device": "cpu", "engine.evaluate_every": 6}
        lines = shoal.run(given, runs=folder / "runs").metrics
        return statistics.median(line["seconds"] for line in lines[1:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", default="2,8,32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--kill-every", type=int, default=0)
    parser.add_argument("-c", action="append", default=[], metavar="KEY=VALUE", help="as for `shoal serve`")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    context.set_forkserver_preload(PRELOADED)
    print(json.dumps({"training of one site alone, seconds a round": round(training(given.steps), 4)}), flush=True)
    for sites in map(int, given.sites.split(",")):
        changes = [word for change in given.c for word in ("-c", change)]
        print(json.dumps(measured(sites, given.rounds, given.steps, given.kill_every, changes)), flush=True)


if __name__ == "__main__":
    main()
