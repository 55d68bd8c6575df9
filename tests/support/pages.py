"""Run folders to be shown: what a hostile name looks like, and a run of many rounds."""

from __future__ import annotations

import json

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&"


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def long_run(run, rounds):
    """The same folder with many more rounds in its metrics."""
    lines = metrics(run)
    text = "".join(
        json.dumps(
            lines[n % len(lines)]
            | {
                "round": n + 1,
                "accuracy": 0.1 + 0.8 * n / rounds + 0.05 * (n * 7919 % 101) / 101,
                "v_c": 1.0 / (n + 1),
            }
        )
        + "\n"
        for n in range(rounds)
    )
    (run / "metrics.jsonl").write_text(text)
