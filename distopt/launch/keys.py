"""Key-value servers: what they keep, and their messages. `distopt.launch.rendezvous.key_value` is the client.

Processes of a job give each other values by name. A message is a frame: kind, length and content. A client has one
request under way, which deletes a key, sets one and waits for others, all at once: a value that the server has shows
that it has the wait of its sender, too. If a rank that is to set a key has ended, or the client does not wait any
longer, the answer says who is missing.

This module needs little of the standard library, so that a server can start at once.
"""

from __future__ import annotations

import selectors
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from .gate import FOR_KEYS, Gate, Link

FRAME = struct.Struct("!BI")  # kind and length of the content
ASK, GIVE_UP = 0, 1  # kinds of a client's frames
VALUES, MISSING, FAILED = 0, 1, 2  # kinds of a server's frames
MAX_BYTES = 16 << 20  # of a value

_MISSING = struct.Struct("!i?I64s")


def pack(payloads: Sequence[bytes]) -> bytes:
    """Several values as the content of one frame."""
    return struct.pack(f"!{1 + len(payloads)}I", len(payloads), *map(len, payloads)) + b"".join(payloads)


def unpack(content: bytes) -> list[bytes]:
    """The inverse of `pack`.

    Raises:
        ValueError: the lengths do not add up.
    """
    at = 4 + 4 * int.from_bytes(content[:4], "big")
    if len(content) < max(at, 4):
        raise ValueError("lengths are missing")
    payloads: list[bytes] = []
    for length in struct.unpack_from(f"!{at // 4 - 1}I", content, 4):
        payloads.append(content[at : at + length])
        at += length
    if at != len(content):
        raise ValueError("the lengths do not add up")
    return payloads


class Wanted(NamedTuple):
    """The keys that a client waits for.

    Attributes:
        prefix: how they begin.
        ranks: a key ends with the number of the rank that sets it, one of these. If there are none, `prefix` is the
            whole key, and any process may set it.
    """

    prefix: str
    ranks: Sequence[int] = ()

    def to_bytes(self) -> bytes:
        """As part of a request; the same for the same keys."""
        ranks = self.ranks
        is_range = len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
        numbers = f"{ranks[0]}-{ranks[-1]}" if is_range else ",".join(map(str, ranks))
        return f"{numbers} {self.prefix}".encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Wanted:
        """The inverse of `to_bytes`; raises a ValueError for anything else."""
        numbers, prefix = content.decode().split(" ", 1)
        first, _, last = numbers.partition("-")
        ranks = range(int(first), int(last) + 1) if last else [int(number) for number in filter(None, first.split(","))]
        return cls(prefix, ranks)

    def owners(self) -> dict[str, int]:
        """The keys, and the rank that sets each; -1 for any."""
        return {f"{self.prefix}{rank}": rank for rank in self.ranks} or {self.prefix: -1}


def request(deleted: str, key: str, value: bytes, wanted: Wanted | None) -> bytes:
    """A request as `Values.ask` reads it: delete a key, set one, and wait for others; each may be absent."""
    return pack([deleted.encode(), key.encode(), value, b"" if wanted is None else wanted.to_bytes()])


class Missing(NamedTuple):
    """A rank that has not set its key; -1 for a key that any may set. Of one that has come, host and process."""

    rank: int
    has_ended: bool = False
    pid: int = 0
    host: str = ""

    @classmethod
    def all_of(cls, content: bytes) -> list[Missing]:
        """The missing ranks in an answer of kind `MISSING`; raises a ValueError if it cannot be read."""
        if len(content) % _MISSING.size:
            raise ValueError("not a list")
        found = _MISSING.iter_unpack(content)
        return [
            cls(rank, ended, pid, host.rstrip(bytes(1)).decode("utf-8", "replace")) for rank, ended, pid, host in found
        ]


Answer = Callable[[int, bytes], None]  # takes kind and content of a server's frame


class _Wait:
    """A wait of one or several clients for the same keys."""

    def __init__(self, content: bytes) -> None:
        self.content, self.wanted = content, Wanted.from_bytes(content)
        self.owners = self.wanted.owners()
        self.missing: dict[str, int] = {}
        self.answers: dict[int, Answer] = {}  # by client


class Values:
    """The values of a server, and the waits of its clients. A client is a rank. All methods are local."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waits: dict[bytes, _Wait] = {}
        self._waits_of: dict[str, set[_Wait]] = {}  # those that miss a key
        self._wait_of: dict[int, _Wait] = {}  # by client
        self._processes: dict[int, tuple[int, str]] = {}  # process id and host of each rank that has come
        self._ended: set[int] = set()

    def come(self, rank: int, pid: int, host: str) -> None:
        """A rank has come, or come back."""
        self._processes[rank] = pid, host
        self._ended.discard(rank)
        for wait in list(self._waits.values()):
            self._look_for(wait, [key for key, owner in wait.owners.items() if owner == rank])

    def end(self, rank: int) -> None:
        """A rank has ended: end the waits for its values."""
        self._ended.add(rank)
        for wait in list(self._waits.values()):
            if rank in wait.missing.values():
                self._finish(wait, MISSING)
        self.give_up(rank)

    def ask(self, client: int, content: bytes, answer: Answer) -> None:
        """Act on a request of a rank: delete a key, set one, and wait for others; each may be absent.

        Raises:
            ValueError: it is none.
        """
        deleted, key, value, wanted = unpack(content)
        name = deleted.decode()
        if self._values.pop(name, None) is not None:
            for wait in list(self._waits.values()):
                if name in wait.owners:
                    self._look_for(wait, [name])
        if key:
            name = key.decode()
            self._values[name] = value
            for wait in list(self._waits_of.get(name, ())):
                self._found(wait, name)
        if wanted:
            self._wait(client, wanted, answer)

    def give_up(self, client: int) -> None:
        """A client does not wait any longer: answer who is missing, unless it has been answered."""
        if (wait := self._wait_of.pop(client, None)) is not None:
            wait.answers.pop(client)(MISSING, self._report(wait))
            if not wait.answers:
                self._remove(wait)

    def cancel(self) -> None:
        """Forget all waits: their clients get another answer."""
        for wait in list(self._waits.values()):
            self._remove(wait)
        self._wait_of.clear()

    def _wait(self, client: int, content: bytes, answer: Answer) -> None:
        if (wait := self._waits.get(content)) is not None:
            wait.answers[client], self._wait_of[client] = answer, wait
            return
        wait = self._waits[content] = _Wait(content)
        wait.answers[client], self._wait_of[client] = answer, wait
        self._look_for(wait, wait.owners)

    def _look_for(self, wait: _Wait, keys: Iterable[str]) -> None:
        """Note which of these keys are missing, and answer if that ends the wait."""
        for key in keys:
            owner = wait.owners[key]
            if key not in self._values:
                wait.missing[key] = owner
                self._waits_of.setdefault(key, set()).add(wait)
        if not wait.missing or self._ended.intersection(wait.missing.values()):
            self._finish(wait, MISSING if wait.missing else VALUES)

    def _found(self, wait: _Wait, key: str) -> None:
        del wait.missing[key]
        self._not_missed(wait, key)
        if not wait.missing:
            self._finish(wait, VALUES)

    def _finish(self, wait: _Wait, kind: int) -> None:
        content = pack([self._values[key] for key in wait.owners]) if kind == VALUES else self._report(wait)
        self._remove(wait)
        for client, answer in wait.answers.items():
            self._wait_of.pop(client, None)
            answer(kind, content)

    def _remove(self, wait: _Wait) -> None:
        del self._waits[wait.content]
        for key in wait.missing:
            self._not_missed(wait, key)

    def _not_missed(self, wait: _Wait, key: str) -> None:
        self._waits_of[key].remove(wait)
        if not self._waits_of[key]:
            del self._waits_of[key]

    def _report(self, wait: _Wait) -> bytes:
        found = ((rank, rank in self._ended, *self._processes.get(rank, (0, ""))) for rank in wait.missing.values())
        return b"".join(_MISSING.pack(rank, ended, pid, host.encode()[:64]) for rank, ended, pid, host in found)


class KeyGate(Gate):
    """A gate that serves values to the clients among its peers, one for each rank.

    Attributes:
        values: what it keeps.
        purpose_of_clients: the purpose of their connections.
    """

    purpose_of_clients = FOR_KEYS

    def __init__(self, key: bytes, selector: selectors.BaseSelector) -> None:
        super().__init__(key, selector)
        self.values = Values()
        self._clients: dict[int, Link] = {}
        self._unsent: dict[Link, list[memoryview]] = {}

    def fail(self, text: str) -> None:
        """Give all clients a reason to give up, now or when they next wait, if they are still there."""
        self.values.cancel()
        for link in list(self._clients.values()):
            self._send(link, FAILED, text.encode())

    def _admitted(self, link: Link) -> None:
        self._clients[link.rank] = link
        link.socket.setblocking(False)
        self.values.come(link.rank, link.pid, link.host)

    def _lost(self, link: Link) -> None:
        del self._clients[link.rank]
        self.values.end(link.rank)

    def _take(self, link: Link) -> None:
        if link.purpose != self.purpose_of_clients:
            super()._take(link)
            return
        received = link.received
        while link.socket.fileno() >= 0 and len(received) >= FRAME.size:
            kind, length = FRAME.unpack_from(received)
            end = FRAME.size + length
            if len(received) < end and length < 2 * MAX_BYTES:
                break
            content = bytes(received[FRAME.size : end])
            del received[:end]
            try:
                if kind == GIVE_UP:
                    self.values.give_up(link.rank)
                else:
                    self.values.ask(link.rank, content, partial(self._send, link))
            except ValueError:  # of another version
                self._end_link(link)

    # -- what a client is slow to read -----------------------------------------------------------------------------
    def _send(self, link: Link, kind: int, content: bytes) -> None:
        parts = [memoryview(FRAME.pack(kind, len(content))), memoryview(content)]
        self._unsent[link] = self._unsent.get(link, []) + parts
        self._flush(link)

    def _flush(self, link: Link) -> None:
        parts, events = self._unsent.pop(link, []), selectors.EVENT_READ
        try:
            link.socket.setblocking(False)
            while parts:
                parts[0] = parts[0][link.socket.send(parts[0]) :]
                if not parts[0]:
                    del parts[0]
        except BlockingIOError:
            self._unsent[link], events = parts, selectors.EVENT_READ | selectors.EVENT_WRITE
        except OSError:  # its end is noticed when it is read
            return
        registered = self._selector.get_map().get(link.socket)
        if registered is not None and registered.events != events:
            self._selector.modify(link.socket, events, registered.data)

    def _read(self, link: Link) -> None:
        if link in self._unsent:
            self._flush(link)
        super()._read(link)

    def _drop(self, link: Link) -> None:
        self._unsent.pop(link, None)
        super()._drop(link)
