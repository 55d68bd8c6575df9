"""The ranks of a run: processes that share its work, started by torchrun or by `shoal run --processes`.

Rank 0 leads; the others do what it asks. Messages (by gloo, between CPUs) are tensors by name, with notes;
parameters and sums go from device to device, by NCCL on GPUs. Only this module knows torch.distributed.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event, Thread, Timer
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch import distributed as dist
from torch.distributed import Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from shoal.errors import ConfigError, RunError, ShoalError
from shoal.training.engine_settings import cores

PATIENCE = timedelta(days=30)
"""How long a rank waits for another that is alive; one that dies is noticed at once."""
MEETING = timedelta(minutes=2)
"""How long ranks look for each other, with nothing but imports before: one that died at the start never comes."""
QUIET = 5.0  # seconds after which a rank says that it waits
FAREWELL = 2.0  # seconds in which a rank can hear that the run has ended
LOOPBACK = "127.0.0.1"
GOODBYE = 1  # the tag of what rank 0 sends when it ends by itself: it has arrived before its connections are closed
HEARING = timedelta(minutes=1)
"""How long rank 1 waits to hear how rank 0 ends, once another rank has gone."""
DELIVERY = timedelta(minutes=10)
"""How long rank 0 waits until the last message has come."""
END, FAILED, TAKEN = "end", "failed", "taken"  # notes; the last is how many messages of the other side have come
NOTES = "notes"

Found = TypeVar("Found")
Notes = dict[str, Any]
Message = tuple[dict[str, Tensor], Notes]


class Lost(RunError):
    """A rank that died, or that failed and says why. Of several ranks that lose another one says so."""

    exit_code = 1

    def __init__(self, message: str, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


class Dismissed(RunError):
    """Rank 0 has ended the run, with a `result` where it is finished; this rank has nothing to add."""

    exit_code = 0
    silent = True

    def __init__(self, tensors: dict[str, Tensor], result: Any) -> None:
        super().__init__("rank 0 has ended the run; its message says why")
        self.tensors, self.result = tensors, result


@dataclass
class _Talk:
    """The messages from and to another rank: how many have come, and those that may still be on their way."""

    taken: int = 0
    sent: int = 0
    underway: deque[list[tuple[Tensor, Any]]] = field(default_factory=deque)

    def send(self, to: int, parts: Sequence[Tensor]) -> None:
        """Gloo sends what is kept here."""
        self.sent += 1
        self.underway.append([])
        for part in parts:
            self.underway[-1].append((part, dist.isend(part, to)))

    def received(self, taken: int) -> None:
        """A message has come, from a rank that has so many of ours."""
        self.taken += 1
        while self.underway and self.sent - len(self.underway) < taken:
            self.underway.popleft()

    def wait(self, most: timedelta) -> None:
        """Until all have come, or the other rank has gone."""
        for _, work in [part for message in self.underway for part in message]:
            with suppress(RuntimeError):
                work.wait(most)


_talks: WeakKeyDictionary[Any, dict[int, _Talk]] = WeakKeyDictionary()  # of a process group


def _talk(other: int) -> _Talk:
    return _talks.setdefault(dist.group.WORLD, {}).setdefault(other, _Talk())


@dataclass(frozen=True)
class Ranks:
    """Rank `rank` of `count`; a process on its own is rank 0 of 1."""

    rank: int = 0
    count: int = 1

    @property
    def others(self) -> range:
        """All ranks but rank 0."""
        return range(1, self.count)

    def send(self, to: int, tensors: Mapping[str, Tensor], **notes: Any) -> None:
        """Send a message to a rank, without waiting until it has come.

        Gloo forgets what it is sending where a connection breaks, and a wait for that never ends. What comes next
        finds the connection broken.
        """
        with self._talking(to):
            _talk(to).send(to, _packed(tensors, notes | {TAKEN: _talk(to).taken}))

    def receive(self, source: int) -> Message:
        """The next message of a rank.

        Raises:
            Lost: The rank has died, or failed.
            Dismissed: Rank 0 has ended the run.
        """
        with self._talking(source):
            size = torch.empty(1, dtype=torch.int64)
            dist.recv(size, source)
            content = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(content, source)
            tensors, notes = _unpacked(content)
            _talk(source).received(notes.pop(TAKEN, 0))
        if END in notes:
            _listen_for_goodbye()
            raise Dismissed(tensors, notes[END])
        if FAILED in notes:
            raise Lost(f"rank {source} of {self.count} failed: {notes[FAILED]}")
        return tensors, notes

    def end(self, tensors: Mapping[str, Tensor], result: Any) -> None:
        """Tell all others how the run has ended; one that has gone misses nothing."""
        _say_goodbye(self)
        for rank in self.others:
            with suppress(Lost):
                self.send(rank, tensors, **{END: result})
        for rank in self.others:
            _talk(rank).wait(DELIVERY)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite every rank's tensor with rank 0's."""
        self._meet()
        with self._talking():
            dist.broadcast(tensor, 0)

    def add_up(self, tensor: Tensor) -> None:
        """Overwrite every rank's tensor with the sum over all ranks."""
        self._meet()
        with self._talking():
            dist.all_reduce(tensor)

    def _meet(self) -> None:
        """Rank 0 says that it is there: until then the others hear if another rank is not."""
        if self.rank:
            self.receive(0)
        for rank in self.others if self.rank == 0 else ():
            self.send(rank, {})

    @contextmanager
    def leading(self) -> Iterator[None]:
        """What ends rank 0 inside ends the others too. Nobody waits long for one that is busy, or gone."""
        try:
            yield
        except BaseException:
            self._dismiss()
            raise

    def _dismiss(self) -> None:
        parts, until, sent = _packed({}, {END: None}), time.monotonic() + FAREWELL, []
        _say_goodbye(self)
        for rank in self.others:
            with suppress(RuntimeError):
                sent += [dist.isend(part, rank) for part in parts]
        for each in sent:
            with suppress(RuntimeError):
                each.wait(timedelta(seconds=max(0.01, until - time.monotonic())))  # type: ignore[union-attr]

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """What fails inside, on a rank that follows, is rank 0's to print."""
        try:
            yield
        except (Lost, Dismissed):
            raise
        except Exception as error:
            why = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
            self.send(0, {}, **{FAILED: why})
            with suppress(Dismissed):  # as rank 0 ends the run
                self.receive(0)
            if isinstance(error, ShoalError):
                raise Dismissed({}, None) from error
            raise

    @contextmanager
    def _talking(self, other: int | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if other is None and self.count == 2:
                other = 1 - self.rank
            who, why = "another rank" if other is None else f"rank {other}", _first_line(error)
            if not _BROKEN.search(why):
                raise RunError(f"rank {self.rank} of {self.count} failed beside {who}: {why}") from error
            raise Lost(
                f"{who} of {self.count} has gone: its process was killed, or its machine or network failed",
                silent=self.rank > 1 or (self.rank == 1 and _rank_0_ends_by_itself()),
            ) from error


_BROKEN = re.compile("connection|by peer|broken pipe|timed ?out|timeout|remote process exited", re.I)
"""What gloo, NCCL and the store say where nobody answers; all else that fails in them is no sign of that."""


def _first_line(error: RuntimeError) -> str:
    """What an error says, without the place in C++ where it comes from."""
    return re.sub(r"^\[[^\]]*\] ", "", (str(error).splitlines() or [""])[0]) or type(error).__name__


_goodbyes: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # the one that may come, of a process group


def _listen_for_goodbye() -> None:
    """From the beginning of a run, so that what rank 0 sends arrives even if it ends at once.

    Rank 0 must find a listener: a goodbye that nobody takes runs out of time, which closes all its connections.
    """
    _goodbyes.clear()
    with suppress(RuntimeError):  # it has gone already
        _goodbyes[dist.group.WORLD] = dist.irecv(torch.empty(1), 0, tag=GOODBYE)


def _say_goodbye(ranks: Ranks) -> None:
    """Rank 0 ends a run by itself."""
    for rank in ranks.others if ranks.rank == 0 else ():
        with suppress(RuntimeError):
            dist.isend(torch.zeros(1), rank, tag=GOODBYE).wait(timedelta(seconds=FAREWELL))  # type: ignore[union-attr]


def _rank_0_ends_by_itself() -> bool:
    """Whether rank 0 has not died: then it says who has."""
    begun = time.monotonic()
    try:
        _goodbyes[dist.group.WORLD].wait(HEARING)
    except (RuntimeError, KeyError, TypeError):  # the last where the ranks never met
        return time.monotonic() - begun >= HEARING.total_seconds()  # else the connection is closed
    return True


def _packed(tensors: Mapping[str, Tensor], notes: Notes) -> tuple[Tensor, Tensor]:
    """The length of a message, and its bytes."""
    arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    arrays[NOTES] = _bytes(json.dumps(notes).encode())
    content = _bytes(save(arrays))
    return torch.tensor([len(content)]), content


def _unpacked(content: Tensor) -> Message:
    tensors = load(content.numpy().tobytes())
    return tensors, json.loads(tensors.pop(NOTES).numpy().tobytes())


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def planned() -> Ranks:
    """This process among those that torchrun has started, as the environment says."""
    if dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys() or (count := int(os.environ["WORLD_SIZE"])) == 1:
        return Ranks()
    return Ranks(int(os.environ["RANK"]), count)


def join() -> Ranks:
    """Meet the other ranks, where there are some; each takes a GPU of its machine."""
    ranks = planned()
    if ranks.count > 1 and not dist.is_initialized():
        with ranks._talking(0 if ranks.rank else None):
            backend = _backend()
            store = _met(ranks)
            store.set_timeout(PATIENCE)
            _in_time(ranks, "all other ranks", lambda: _begin(backend, store, ranks))
    if ranks.rank and dist.group.WORLD not in _goodbyes:
        _listen_for_goodbye()
    return ranks


def _met(ranks: Ranks) -> Store:
    """The store in which ranks meet, at MASTER_ADDR and MASTER_PORT.

    Raises:
        Lost: A rank has not come in time.
        ConfigError: The environment does not say where.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(f"{name} must be set for rank {ranks.rank} of {ranks.count}: torchrun does so")
    if not 0 <= ranks.rank < ranks.count:
        raise ConfigError(f"RANK must be from 0 to {ranks.count - 1}, below WORLD_SIZE, got {ranks.rank}")
    last, where = ranks.count - 1, _where()
    who = "rank 0" if ranks.rank else "rank 1" if last == 1 else f"ranks 1 to {last}"
    waits = f"shoal: rank {ranks.rank} of {ranks.count} waits for {who} at {where}, for {_patience()} at most"
    said = Timer(QUIET, print, [waits], {"file": sys.stderr, "flush": True})
    said.daemon = True
    said.start()
    try:
        return _in_time(ranks, who, lambda: _found(ranks, where))
    except RuntimeError as error:
        if not _BROKEN.search(str(error)):
            raise
        raise _not_met(ranks, who) from error
    except ValueError as error:
        raise ConfigError(f"MASTER_ADDR and MASTER_PORT, {where}: {error}") from error
    finally:
        said.cancel()


def _where() -> str:
    return ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))


def _patience() -> str:
    return f"{MEETING.total_seconds():g} seconds"


def _not_met(ranks: Ranks, who: str) -> Lost:
    return Lost(
        f"rank {ranks.rank} of {ranks.count} has not met {who} at {_where()} within {_patience()}: start all ranks, "
        f"with the same MASTER_ADDR and MASTER_PORT"
    )


def _in_time(ranks: Ranks, who: str, step: Callable[[], Found]) -> Found:
    """What a step of the meeting gives. It has a thread of its own, since torch has waits that nothing ends.

    It waits so for what listens at the port, is no store and never answers, and for a rank that died once it was met.
    """
    found: Future[Found] = Future()

    def run() -> None:
        try:
            found.set_result(step())
        except BaseException as error:
            found.set_exception(error)

    Thread(target=run, daemon=True, name="ranks meet").start()
    try:
        return found.result(MEETING.total_seconds())
    except TimeoutError as error:
        raise _not_met(ranks, who) from error


def _found(ranks: Ranks, where: str) -> Store:
    if ranks.rank:
        _wait_for(where)
    store: Store = next(rendezvous("env://", timeout=MEETING))[0]
    return store


def _wait_for(where: str) -> None:
    """Until someone listens there: the store's own wait takes twice as long as it is told, with a stack of C++."""
    address, _, port = where.rpartition(":")
    until = time.monotonic() + MEETING.total_seconds()
    while port.isdecimal() and int(port) < 2**16:  # else torch says what is wrong
        try:
            socket.create_connection((address, int(port)), timeout=max(0.1, until - time.monotonic())).close()
        except OSError as error:
            if time.monotonic() > until:
                raise TimeoutError(where) from error
            time.sleep(0.2)
        else:
            return


def leave() -> None:
    """Part from the other ranks, after a run that has ended well."""
    if dist.is_initialized():
        _say_goodbye(planned())
        dist.destroy_process_group()


def _backend() -> str:
    """What ranks talk by; this thread takes a GPU of its machine, where there are some."""
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % gpus)
    return "cpu:gloo,cuda:nccl" if gpus else "gloo"


def _begin(backend: str, store: Store, ranks: Ranks) -> None:
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.count, timeout=PATIENCE)


@contextmanager
def started(count: int, words: Sequence[str]) -> Iterator[None]:
    """Rank 0 of `count` on this machine, in this process; the others run `shoal WORDS` and end with it."""
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, cores() // count)))
    torch.set_num_threads(threads)
    store = _local_store(count)
    shared = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count)}
    shared["OMP_NUM_THREADS"] = str(threads)
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "shoal", *words],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for rank 0
        )
        for rank in range(1, count)
    ]
    joined = Event()
    Thread(target=_watch, args=(others, joined), daemon=True).start()
    try:
        _begin(_backend(), store, Ranks(0, count))
        joined.set()
        yield
    finally:
        for other in others:
            other.terminate()
        for other in others:
            other.wait()


def _local_store(count: int) -> TCPStore:
    """Where ranks on this machine meet, and from now on talk by gloo: out of reach for other machines."""
    for name in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    listening = socket.create_server((LOOPBACK, 0), backlog=count)
    port, file = listening.getsockname()[1], listening.detach()  # left to itself the store listens to the world
    return TCPStore(
        LOOPBACK, port, count, is_master=True, wait_for_workers=False, timeout=PATIENCE, master_listen_fd=file
    )


def _watch(others: Sequence[subprocess.Popen[bytes]], joined: Event) -> None:
    """End this process where another dies before all have met: rank 0 would wait for it."""
    while not joined.wait(0.1):
        for rank, other in enumerate(others, 1):
            if other.poll() is not None:
                for each in others:
                    each.terminate()
                print(f"shoal: rank {rank} ended before the run (exit code {other.returncode})", file=sys.stderr)
                os._exit(1)
