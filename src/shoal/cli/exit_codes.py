"""The exit codes of `shoal`: those that `shoal --help` lists, and no others."""

from __future__ import annotations

NOT_HELD = 1
BAD_INPUT = 2
REFUTED = 3
CELL_FAILED = 4
STOPPED = 130
NO_READER = 141

EXIT_CODES = {
    0: "done",
    NOT_HELD: "a check does not hold (certify --check, policy check, doctor), or a rank of the run was lost",
    BAD_INPUT: "bad input: one line names the key, the value and the fix",
    REFUTED: "a ledger is broken, or an audit refutes a claim",
    CELL_FAILED: "part of a sweep or of a paper's table has failed; the rest was run",
    STOPPED: "stopped by Ctrl-C or SIGTERM; a run can be resumed",
    NO_READER: "whoever read the output closed it",
}

EPILOG = "\n\n".join(["Exit codes:", *(f"{code}: {meaning}" for code, meaning in EXIT_CODES.items())])
