"""The certificate of a run: what is claimed, the chain that leads there, what it assumes and what it leaves open.

`certificate.json` is for checkers (accounting/checker, which shares no accounting with this package),
`certificate.html` shows the same to people. Everything in it comes from the ledger, the configuration and hashes of
files: nothing was computed from records.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal import __version__, release
from shoal.accounting.chain import COMPOSED, explained
from shoal.accounting.checker import certificate_file
from shoal.accounting.claims import PUBLIC_K
from shoal.accounting.leaves import leaves, without_sampler
from shoal.accounting.privacy_ledger import FILE, Record, verify
from shoal.accounting.rounding import up
from shoal.algorithms.base import BOUNDARIES, Algorithm
from shoal.bibliography import cited
from shoal.config import configure
from shoal.errors import ConfigError, RunError, ShoalError
from shoal.files import sha256_of
from shoal.html_text import html_table
from shoal.models.bundle import WEIGHTS, read_bundle
from shoal.report.claim_rows import HEAD, meaning, proven_rows, shown_rows
from shoal.report.proof import proof_of
from shoal.report.run_page import write_page
from shoal.report.run_reader import read_config, read_result, read_run, state_of

JSON, PAGE = "certificate.json", "certificate.html"
MOST_NAMES = 12  # of sites, in a line
_SOURCES = (".py", ".c", ".html", ".css", ".js", ".toml")
_ASSUMED = (
    "the ledger lists every round that drew noise: whoever could write to it is trusted",
    "the program did what its source says; `shoal audit` tests that, no certificate proves it",
    "configuration, model architecture and number of rounds were not chosen by looking at these records",
)
_UNBOUND = "the model is the one that the run wrote: this ledger binds checkpoints, of which the model is a part"
_ROUNDING = {
    True: "what rounding costs is counted in the noise of the events (secure mode)",
    False: "float32's rounding of the noise is not counted (research mode)",
}
_OPEN = (
    "the choice of hyper-parameters or of the best of several runs, unless a private selection was charged",
    "other runs and releases on the same data: each has its own cost, and the costs add up",
    "figures on held-out records, logs, metrics and reports: they have no noise, and are not for release",
    "side channels: timing, memory, network traffic, and whoever can read the machines' memory or disks",
    "groups: the figures are for one unit; relatives, or several records of a person, are not one unit",
)


class Certificate(dict[str, Any]):
    """A certificate: the mapping that certificate.json holds, shown in a few words."""

    def __repr__(self) -> str:
        signed = "signed" if self["signature"] else "UNSIGNED"
        proven = [claim["epsilon"] is not None for claim in self["claims"]]
        return f"Certificate({self['run']}, {self['algorithm']}: {sum(proven)} of {len(proven)} proven, {signed})"

    def _repr_html_(self) -> str:
        held = [f"digest {self['digest']}", *(f"assumes: {each}" for each in self["assumptions"])]
        return html_table(repr(self), shown_rows(self["claims"]), HEAD, held)


def certificate(path: Path, sites: Mapping[str, Path] | None = None) -> Certificate:
    """The certificate of the run in this folder, not yet signed.

    Args:
        path: The run's folder.
        sites: The ledgers of a federation's sites, by name, whose heads it binds.

    Raises:
        RunError: There is nothing to certify: the run goes on, its ledger is broken, or its files do not fit.
    """
    record, proven = _proven(path)
    opened, config = record.opened or {}, _sha256(path / "config.toml")
    if opened.get("config") != config:
        raise RunError(f"{path / 'config.toml'} is not the one that the ledger was opened with; put it back")
    algorithm = _algorithm(path)
    boundaries = [] if algorithm is None else _boundaries(algorithm, int(read_config(path).get("rounds", 1)))
    claims = [{**claim, "chain": _chain(record, claim)} for claim in proven]
    bound = _sites(path, sites or {}, str(opened.get("run")))
    held: dict[str, Any] = {
        "format": certificate_file.FORMAT,
        release.KEY: release.CERTIFICATE_OF_SITES if bound else release.CERTIFICATE,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": opened.get("run"),
        "algorithm": opened.get("algorithm"),
        "paper": algorithm.paper if algorithm else "",
        "rounds": len({t for intent in record.charged for t in range(intent.first, intent.round + 1)}),
        "claims": claims,
        "boundaries": boundaries,
        "assumptions": _assumptions(record, claims, boundaries),
        "not_covered": _not_covered(path, claims, sites or {}),
        "hashes": {
            "config": config,
            "ledger": {"head": record.head, "lines": record.lines},
            "model": _model(path, record),
            "code": {"run_by": _run_by(path), "certified_by": f"shoal {__version__}", "sources": sources()},
        },
        "sites": bound,
        "references": [str(each) for each in cited(json.dumps([claims, boundaries], ensure_ascii=False))],
    }
    held = json.loads(json.dumps(held, default=str))
    return Certificate(held | {"digest": certificate_file.digest_of(held), "signature": None})


def signed(held: Mapping[str, Any], key: Ed25519PrivateKey) -> Certificate:
    """The certificate with the operator's signature."""
    public, value = key.public_key().public_bytes_raw(), key.sign(certificate_file.signed_bytes(held["digest"]))
    signature = {"algorithm": "ed25519", "public_key": public.hex(), "value": value.hex()}
    return Certificate({**held, "signature": signature})


def write(folder: Path, held: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write certificate.json and certificate.html; returns their paths."""
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}; make it, or leave out --out")
    return write_page(folder / JSON, certificate_file.written(held).decode()), write_page(folder / PAGE, page(held))


def page(held: Mapping[str, Any]) -> str:
    """The certificate as one HTML page."""
    proving = [claim for claim in held["claims"] if claim["epsilon"] is not None]
    return str(
        _template().render(
            held=held,
            rows=proven_rows(held["claims"]),
            meanings=list(dict.fromkeys(meaning(claim) for claim in proving)),
            chains=_alike(proving),
        )
    )


@lru_cache(maxsize=1)
def sources() -> str:
    """The SHA-256 of this program's sources: of each file's path and hash, in order."""
    root = Path(__file__).parent.parent
    files = sorted(file for file in root.rglob("*") if file.suffix in _SOURCES and file.is_file())
    lines = [f"{file.relative_to(root).as_posix()} {_sha256(file)}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _proven(path: Path) -> tuple[Record, list[dict[str, Any]]]:
    """The run's ledger, and its claims."""
    if not (path / FILE).is_file():
        raise RunError(f"{path} has no {FILE}: there is nothing to certify; name a run's folder")
    if state_of(path) == "running":
        raise RunError(f"the run in {path} is still going on; certify it when it has ended")
    proof = proof_of(path, read_result(path))
    if proof.ledger is None or not proof.ledger.whole:
        because = proof.ledger.because if proof.ledger else "it is missing"
        raise RunError(f"the ledger in {path} is broken, so nothing is proven: {because}")
    if proof.ledger.torn:
        raise RunError(f"the ledger in {path} ends in a torn line; resume the run first")
    if proof.selected:
        raise RunError("a private selection chose this run; certificates do not cover the cost of a selection yet")
    if any("adjacency" not in claim or "sampler_delta" not in claim for claim in proof.proven):
        raise RunError(f"the ledger in {path} is of an earlier version, whose claims name no adjacency")
    return Record.read(path / FILE)[1], proof.proven


def _algorithm(path: Path) -> Algorithm | None:
    """The method as configured; None where it is not installed here, as of a method that was passed in Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return configure(path / "config.toml").algorithm
    except ShoalError:
        return None


def _boundaries(algorithm: Algorithm, rounds: int) -> list[dict[str, Any]]:
    """Each boundary that a value crosses, in order: its mechanism in its own words."""
    found = [(name, getattr(algorithm, name)) for name in BOUNDARIES]
    return [
        {
            "boundary": name,
            "mechanism": type(mechanism).__name__,
            "does": mechanism.does().replace("`", ""),
            "limits": mechanism.limits(rounds),
            "assumes": list(mechanism.assumes()),
            "settings": {each.name: getattr(mechanism, each.name) for each in fields(mechanism)},
        }
        for name, mechanism in found
        if mechanism is not None
    ]


def _chain(record: Record, claim: Mapping[str, Any]) -> dict[str, Any] | None:
    """From the ledger's events to the claim."""
    if claim["epsilon"] is None:
        return None
    unit, observer, adjacency = claim["unit"], claim["observer"], claim["adjacency"]
    times: dict[str, int] = {}
    events = {}
    for charge in (charge for intent in record.charged for charge in intent.charges):
        if (charge.unit, charge.observer) == (unit, observer):
            written = json.dumps(charge.event.to_json(), sort_keys=True)
            times[written] = times.get(written, 0) + 1
            events[written] = charge.event
    _, distance = without_sampler(leaves(record.charged_event(unit, observer)))
    return {
        "events": [
            {
                "event": events[written].to_json(),
                "times": count,
                "lines": [line.to_json() for line in explained(events[written], adjacency)],
            }
            for written, count in times.items()
        ],
        "composition": f"{sum(times.values()):,} charges; {COMPOSED}",
        "distance": distance,
        "sampler": f"{_sampler(distance, claim)}; {_ROUNDING[(record.opened or {}).get('random') == 'secure']}",
        "conversion": f"the least epsilon of the composed losses at delta, by {str(claim['accountant']).upper()}",
    }


def _sampler(distance: float, claim: Mapping[str, Any]) -> str:
    if not distance:
        return "the sampler is taken as perfect"
    return f"a distance of {up(distance, 2)} in all takes {up(claim['sampler_delta'] or 0.0, 2)} of delta"


def _assumptions(record: Record, claims: list[dict[str, Any]], boundaries: list[dict[str, Any]]) -> list[str]:
    proving = [claim for claim in claims if claim["epsilon"] is not None]
    opened = record.opened or {}
    found = [f"K = {opened['clients']:,} is public"] if isinstance(opened.get("clients"), int) else []
    if any(claim["unit"] == "record" for claim in proving):
        found.append("how many records each client holds is public: replace-one keeps it")
    if any(claim["simulated"] for claim in proving):
        found.append("clients are simulated: records were assigned to them, and no real client is protected")
    for claim in proving:
        found += [part for part in str(claim["because"] or "").split("; ") if part and not part.startswith(PUBLIC_K)]
    found += [words for boundary in boundaries for words in boundary["assumes"]]
    if opened.get("random") == "secure":
        found.append("the operating system's random numbers cannot be predicted")
    if "model" not in (record.closed or {}):
        found.append(_UNBOUND)
    return list(dict.fromkeys([*found, *_ASSUMED]))


def _not_covered(path: Path, claims: list[dict[str, Any]], sites: Mapping[str, Path]) -> list[str]:
    found = [
        f"{row['unit']}; observer: {row['observer']}: nothing is proven, because {row['note']}"
        for row in proven_rows(claims)
        if not row["epsilon"]
    ]
    if (members := _members(path)) is not None:
        unbound = sorted(name for name, head in members if not head and name not in sites)
        if unbound:
            found.append(
                f"the ledgers of {len(unbound)} of {len(members)} sites, which did not send their heads when the run "
                f"ended: {', '.join(unbound[:MOST_NAMES])}; each can hand over its ledger (--site NAME=FILE)"
            )
    if not (path / WEIGHTS).is_file():
        found.append("a model: none has been written yet")
    return [*found, *_OPEN]


def _members(path: Path) -> list[tuple[str, str]] | None:
    """The names of sites with a place in the run, and the ledger heads they sent; None of a simulation."""
    try:
        kept = json.loads((path / "sites.json").read_text(encoding="utf-8"))
        members = [member for key, member in kept.items() if key != release.KEY and member["number"] is not None]
        return sorted((str(member["name"]), str(member.get("head", ""))) for member in members)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _sites(path: Path, ledgers: Mapping[str, Path], run: str) -> list[dict[str, Any]]:
    """The heads that sites sent, and those of ledgers that were handed over, which must have the ones sent."""
    heads = [(name, head) for name, head in _members(path) or [] if head]
    found = [{"name": name, "head": head, "sent": True} for name, head in heads]
    for name, file in ledgers.items():
        handed = _site(name, file, run)
        if name not in dict(heads):
            found.append(handed)
        elif not verify(file, dict(heads)[name]).whole:
            raise ConfigError(f"--site {name}={file}: this ledger lacks the head that the site sent; give its own")
    return sorted(found, key=lambda site: site["name"])


def _site(name: str, file: Path, run: str) -> dict[str, Any]:
    """The head of a site's ledger, and how many rounds of this run it charged."""
    if not file.is_file():
        raise ConfigError(f"--site {name}={file}: there is no such file")
    found, record = Record.read(file)
    if not found.whole or found.torn:
        raise ConfigError(f"--site {name}={file}: the ledger is broken: {found.because or 'its last line is torn'}")
    rounds = sum(intent.rounds for intent in record.charged if run.startswith(intent.run or "\0"))
    if not rounds:
        raise ConfigError(f"--site {name}={file}: this ledger charges no round of run {run}; give that site's own")
    return {"name": name, "head": found.head, "lines": found.lines, "rounds": rounds}


def _model(path: Path, record: Record) -> str | None:
    """The SHA-256 of the model, where it has been written; it must be the one that run and ledger described."""
    if not (path / WEIGHTS).is_file():
        return None
    own = _sha256(path / WEIGHTS)
    if {own} != {read_bundle(path).weights, (record.closed or {}).get("model", own)}:
        raise RunError(f"{path / WEIGHTS} is not the model that this run wrote; put it back")
    return own


def _run_by(path: Path) -> str | None:
    """The version that ran the run, as it noted it itself."""
    version = dict(read_run(path, check_ledger=False, every_round=False).environment).get("shoal")
    return f"shoal {version}" if version else None


def _sha256(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from None


def _alike(proving: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claims' chains; observers who get the same share one."""
    found: dict[str, dict[str, Any]] = {}
    for claim in proving:
        key = json.dumps([claim["unit"], claim["adjacency"], claim["epsilon"], claim["chain"]])
        found.setdefault(key, {"claims": [], "chain": claim["chain"]})["claims"].append(claim)
    return list(found.values())


@lru_cache(maxsize=1)
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from shoal.report.plots import OBSERVERS, whose

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"whose": whose, "observer": lambda who: OBSERVERS.get(who, who), "up": up}
    return environment.get_template(PAGE)
