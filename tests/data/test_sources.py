"""Files are found, downloaded and checked, and a download that fails leaves nothing behind."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shoal.data import load, sources
from shoal.data.known import KNOWN
from shoal.data.sources import File, content, folders, locate, obtain, unpacked
from shoal.errors import DataError

CONTENT = bytes(range(256)) * 400


def file_of(path: str, data: bytes = CONTENT, mirrors: tuple[str, ...] = ()) -> File:
    return File(path, len(data), hashlib.sha256(data).hexdigest(), mirrors)


class Mirror:
    """A local HTTP server whose answers are set path by path; what is not set is a 404."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.asked: list[str] = []
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(self.path)
                answer = mirror.answers.get(self.path)
                if answer is None:
                    self.send_error(404)
                else:
                    answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False
        self.base = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def serve(self, path: str, data: bytes, *, promised: int | None = None) -> None:
        def answer(request: BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            request.send_header("Content-Length", str(len(data) if promised is None else promised))
            request.end_headers()
            request.wfile.write(data)

        self.answers[path] = answer

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    server = Mirror()
    yield server
    server.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    monkeypatch.delenv("SHOAL_MIRROR", raising=False)
    monkeypatch.delenv("SHOAL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "shoal"


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_shoal_data_comes_before_the_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folders() == (cache,)
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "own"))
    assert folders() == (tmp_path / "own", cache)
    file = file_of("set/a.bin")
    for folder in (cache, tmp_path / "own"):
        (folder / "set").mkdir(parents=True)
        (folder / "set" / "a.bin").write_bytes(CONTENT)
    assert locate(file) == tmp_path / "own" / "set" / "a.bin"


def test_shoal_cache_comes_before_xdg(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "mine"))
    assert folders() == (tmp_path / "mine",)


def test_without_xdg_the_cache_is_below_home(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert folders() == (tmp_path / "me" / ".cache" / "shoal",)


def test_a_missing_file_is_downloaded_once_and_checked(cache: Path, mirror: Mirror) -> None:
    mirror.serve("/set/a.bin", CONTENT)
    file = file_of("set/a.bin")
    assert obtain([file], mirror=mirror.base) == [cache / "set/a.bin"]
    assert content(file, cache / "set/a.bin") == CONTENT
    obtain([file], mirror=mirror.base)
    assert mirror.asked == ["/set/a.bin"]
    assert files_below(cache) == ["set/a.bin"]


def test_the_mirror_can_be_set_by_environment(cache: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.serve("/below/set/a.bin", CONTENT)
    monkeypatch.setenv("SHOAL_MIRROR", f"{mirror.base}/below/")
    file = file_of("set/a.bin", mirrors=("http://nowhere.invalid/a.bin",))
    assert obtain([file]) == [cache / "set/a.bin"]


def test_mirrors_are_tried_in_turn(cache: Path, mirror: Mirror) -> None:
    mirror.serve("/second/a.bin", b"something else")
    mirror.serve("/third/a.bin", CONTENT)
    urls = tuple(f"{mirror.base}/{place}/a.bin" for place in ("first", "second", "third"))
    assert obtain([file_of("set/a.bin", mirrors=urls)]) == [cache / "set/a.bin"]
    assert mirror.asked == ["/first/a.bin", "/second/a.bin", "/third/a.bin"]
    assert files_below(cache) == ["set/a.bin"]


def reset(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    request.wfile.write(b"ffff\r\n" + CONTENT[:1000])


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda m: None, "HTTP 404"),
        (lambda m: m.serve("/set/a.bin", CONTENT[:5000], promised=len(CONTENT)), "5,000 of 102,400"),
        (lambda m: m.answers.update({"/set/a.bin": reset}), "IncompleteRead"),
        (lambda m: m.serve("/set/a.bin", b"x" + CONTENT[1:]), "wrong checksum"),
        (lambda m: m.serve("/set/a.bin", b""), "wrong checksum"),
        (lambda m: m.serve("/set/a.bin", CONTENT * 40), "more than"),
        (lambda m: m.serve("/set/a.bin", CONTENT, promised=-7), "of -7"),
    ],
    ids=["404", "interrupted", "broken chunk", "wrong checksum", "empty", "too long", "nonsense length"],
)
def test_a_failed_download_says_why_and_leaves_nothing(
    cache: Path, mirror: Mirror, prepare: Callable[[Mirror], None], reason: str
) -> None:
    prepare(mirror)
    with pytest.raises(DataError, match=reason) as caught:
        obtain([file_of("set/a.bin")], mirror=mirror.base)
    message = str(caught.value)
    assert "set/a.bin" in message
    assert f"{mirror.base}/set/a.bin" in message
    assert "SHOAL_DATA" in message
    assert files_below(cache.parent) == []


def test_a_silent_mirror_is_given_up(cache: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "TIMEOUT", 0.2)
    over = threading.Event()
    mirror.answers["/set/a.bin"] = lambda request: (over.wait(20), None)[1]
    try:
        with pytest.raises(DataError, match="timed out"):
            obtain([file_of("set/a.bin")], mirror=mirror.base)
    finally:
        over.set()
    assert files_below(cache.parent) == []


def test_without_a_network_the_error_names_every_mirror(cache: Path, mirror: Mirror) -> None:
    mirror.close()
    urls = (f"{mirror.base}/one", f"{mirror.base}/two", "ftp://somewhere/three")
    with pytest.raises(DataError) as caught:
        obtain([file_of("set/a.bin", mirrors=urls)])
    assert all(url in str(caught.value) for url in urls)
    assert "Connection refused" in str(caught.value)
    assert "not an http" in str(caught.value)
    assert not cache.exists()


def test_ctrl_c_leaves_no_half_file(cache: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(answer: object, stream: io.BufferedRandom, limit: int) -> None:
        stream.write(CONTENT[:1000])
        raise KeyboardInterrupt

    mirror.serve("/set/a.bin", CONTENT)
    monkeypatch.setattr(sources, "_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        obtain([file_of("set/a.bin")], mirror=mirror.base)
    assert files_below(cache.parent) == []


def test_parts_of_killed_downloads_are_swept_but_not_those_under_way(cache: Path, mirror: Mirror) -> None:
    (cache / "set").mkdir(parents=True)
    for name in (".a.bin.old.part", ".a.bin.new.part"):
        (cache / "set" / name).write_bytes(b"half")
    os.utime(cache / "set" / ".a.bin.old.part", (0, 0))
    mirror.serve("/set/a.bin", CONTENT)
    obtain([file_of("set/a.bin")], mirror=mirror.base)
    assert files_below(cache) == ["set/.a.bin.new.part", "set/a.bin"]


def test_a_read_only_shoal_data_sends_downloads_to_the_cache(
    cache: Path, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setenv("SHOAL_DATA", str(own))
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != own and allowed(path, mode))
    mirror.serve("/set/a.bin", CONTENT)
    assert obtain([file_of("set/a.bin")], mirror=mirror.base) == [cache / "set/a.bin"]


def test_packed_and_plain_files_count_as_the_same(cache: Path, mirror: Mirror) -> None:
    file = file_of("set/a.bin.gz")
    mirror.serve("/set/a.bin.gz", gzip.compress(CONTENT, 1))
    (found,) = obtain([file], mirror=mirror.base)
    assert content(file, found) == CONTENT
    found.unlink()
    (cache / "set" / "a.bin").write_bytes(CONTENT)
    assert content(file, locate(file)) == CONTENT


def test_a_damaged_file_of_the_user_is_named_and_kept(cache: Path, mirror: Mirror) -> None:
    (cache / "set").mkdir(parents=True)
    place = cache / "set" / "a.bin"
    place.write_bytes(CONTENT[:-1] + b"!")
    file = file_of("set/a.bin")
    (found,) = obtain([file], mirror=mirror.base)
    with pytest.raises(DataError, match=r"a\.bin.*wrong checksum"):
        content(file, found)
    assert place.exists()
    assert mirror.asked == []


@pytest.mark.parametrize(
    "data",
    [gzip.compress(CONTENT)[:-20], gzip.compress(CONTENT)[:7], b"", b"\x1f\x8b", b"not packed at all"],
    ids=["cut", "cut header", "empty", "magic only", "plain text"],
)
def test_a_broken_gz_is_a_data_error(tmp_path: Path, data: bytes) -> None:
    place = tmp_path / "a.bin.gz"
    place.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.bin"):
        content(file_of("a.bin"), place)


@pytest.mark.slow
def test_a_gz_bomb_stops_at_the_limit(tmp_path: Path) -> None:
    place = tmp_path / "bomb.gz"
    place.write_bytes(gzip.compress(bytes(50_000_000)))
    with pytest.raises(DataError, match="more than 1,000 bytes"):
        unpacked(place, 1000)


def tar_of(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return packed.getvalue()


PAIR = [file_of("batches/one.bin"), file_of("batches/two.bin", CONTENT[::-1])]
ADDRESS = ("http://nowhere.invalid/all.tar.gz",)


def test_an_archive_yields_the_expected_members_and_nothing_else(cache: Path, mirror: Mirror) -> None:
    members = {
        "../evil": b"evil",
        "/evil": b"evil",
        "batches/readme.html": b"hello",
        "batches/one.bin": CONTENT,
        "batches/two.bin": CONTENT[::-1],
    }
    mirror.serve("/all.tar.gz", tar_of(members))
    found = obtain(PAIR, archive=ADDRESS, mirror=mirror.base)
    assert found == [cache / "batches/one.bin", cache / "batches/two.bin"]
    assert files_below(cache.parent) == ["shoal/batches/one.bin", "shoal/batches/two.bin"]


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (tar_of({"batches/one.bin": b"short"}), "wrong checksum"),
        (tar_of({}, {"batches/one.bin": "/etc/hostname"}), "wrong checksum"),
        (tar_of({"other": b""}), "lacks batches/one.bin, batches/two.bin"),
        (tar_of({"batches/one.bin": CONTENT + b"more"}), "more than"),
        (tar_of({"batches/one.bin": CONTENT})[:200], "all.tar.gz: "),
        (b"no archive", "all.tar.gz: "),
    ],
    ids=["wrong member", "link", "lacking", "too long", "cut", "no archive"],
)
def test_a_bad_archive_is_refused(cache: Path, mirror: Mirror, archive: bytes, reason: str) -> None:
    mirror.serve("/all.tar.gz", archive)
    with pytest.raises(DataError, match=reason):
        obtain(PAIR, archive=ADDRESS, mirror=mirror.base)
    assert files_below(cache.parent) == []


@pytest.fixture
def real_mnist() -> dict[str, bytes]:
    """The published files, read before the environment is replaced."""
    found = {file.path: locate(file) for file in KNOWN["mnist"].files}
    if None in found.values() or any(path.suffix != ".gz" for path in found.values()):
        pytest.skip("SHOAL_DATA does not hold mnist/*.gz")
    return {path: place.read_bytes() for path, place in found.items()}


def test_a_real_data_set_is_downloaded_whole(real_mnist: dict[str, bytes], cache: Path, mirror: Mirror) -> None:
    for path, data in real_mnist.items():
        mirror.serve(f"/{path}", data)
    assert load("mnist", mirror=mirror.base).train_x.shape == (60_000, 1, 28, 28)
    assert files_below(cache) == sorted(real_mnist)
