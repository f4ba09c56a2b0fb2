"""Key-value servers: what they keep, and their messages. `distopt.launch.rendezvous.key_value` is the client.

Processes of a job give each other values by name. A client waits for keys; if a rank that is to set one of them has
ended, or the client does not wait any longer, the answer says who is missing. A message is a frame: kind, length and
content. A client has one request under way, which sets, deletes and waits at once: so whoever sees its value knows
that the server has its wait, too.

This module needs little of the standard library, so that a server can start at once.
"""

from __future__ import annotations

import selectors
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .gate import FOR_KEYS, Gate, Link

FRAME = struct.Struct("!BI")  # kind and length of the content
ASK, GIVE_UP = 0, 1  # kinds of a client's frames
VALUES, MISSING, FAILED = 0, 1, 2  # kinds of a server's frames
MAX_BYTES = 16 << 20  # of a value

_MOST_BYTES = MAX_BYTES + (1 << 20)  # of a request
_NO_VALUE = 0xFFFFFFFF  # the length of a value that its rank has not set before its end


def frame(kind: int, content: bytes) -> bytes:
    """Local. A message."""
    return FRAME.pack(kind, len(content)) + content


def pack(payloads: Sequence[bytes | None]) -> bytes:
    """Local. Several values as the content of one message."""
    lengths = [_NO_VALUE if each is None else len(each) for each in payloads]
    return struct.pack(f"!{1 + len(lengths)}I", len(lengths), *lengths) + b"".join(filter(None, payloads))


def unpack(content: bytes) -> list[bytes | None]:
    """Local. The inverse of `pack`.

    Raises:
        ValueError: the lengths do not add up.
    """
    at = 4 + 4 * int.from_bytes(content[:4], "big")
    if len(content) < max(at, 4):
        raise ValueError("lengths are missing")
    payloads: list[bytes | None] = []
    for length in struct.unpack_from(f"!{at // 4 - 1}I", content, 4):
        payloads.append(None if length == _NO_VALUE else content[at : at + length])
        at += 0 if length == _NO_VALUE else length
    if at != len(content):
        raise ValueError("the lengths do not add up")
    return payloads


class Wanted(NamedTuple):
    """The keys that a client waits for.

    Attributes:
        prefix: how they begin.
        ranks: a key ends with the number of the rank that sets it, one of these. If there are none, `prefix` is the
            whole key, and any process may set it.
        living: whether to go without the values of ranks that have ended.
    """

    prefix: str
    ranks: Sequence[int] = ()
    living: bool = False

    def to_bytes(self) -> bytes:
        """Local. As part of a request; the same for the same keys."""
        ranks = self.ranks
        is_range = len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
        numbers = f"{ranks[0]}-{ranks[-1]}" if is_range else ",".join(map(str, ranks))
        return f"{'living' if self.living else 'all'} {numbers} {self.prefix}".encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Wanted:
        """Local. The inverse of `to_bytes`; raises a ValueError for anything else."""
        how, numbers, prefix = content.decode().split(" ", 2)
        first, _, last = numbers.partition("-")
        ranks = range(int(first), int(last) + 1) if last else [int(number) for number in filter(None, first.split(","))]
        return cls(prefix, ranks, how == "living")

    def owners(self) -> dict[str, int]:
        """Local. The keys, and the rank that sets each; -1 for any."""
        return {f"{self.prefix}{rank}": rank for rank in self.ranks} or {self.prefix: -1}


class Missing(NamedTuple):
    """A key that has not been set, and the rank that was to set it; -1 if any was."""

    key: str
    rank: int
    has_ended: bool
    host: str = ""  # of the rank, if it has come
    pid: int = 0


Answer = Callable[[int, bytes], None]  # takes kind and content of a server's frame


class _Wait:
    """A wait of one or several clients for the same keys."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.wanted = Wanted.from_bytes(content)
        self.owners = self.wanted.owners()
        self.missing: dict[str, int] = {}
        self.answers: dict[int, Answer] = {}  # by client


class Values:
    """The values of a server and the waits of its clients, each of which is a rank. Without sockets, all is local."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waits: dict[bytes, _Wait] = {}
        self._missed_by: dict[str, list[_Wait]] = {}  # by key
        self._wait_of: dict[int, _Wait] = {}  # by client
        self._processes: dict[int, tuple[str, int]] = {}  # host and process id of each rank that has come
        self._ended: set[int] = set()

    def come(self, rank: int, host: str, pid: int) -> None:
        """A rank has come, or come back."""
        self._processes[rank] = host, pid
        self._ended.discard(rank)

    def end(self, rank: int) -> None:
        """A rank has ended: nobody waits for its values any longer."""
        self._ended.add(rank)
        self.give_up(rank)
        for wait in list(self._waits.values()):
            owed = [key for key, owner in wait.missing.items() if owner == rank]
            if owed and not wait.wanted.living:
                self._finish(wait, MISSING)
            else:
                for key in owed:
                    self._not_missed(wait, key)
                    self._found(wait, key)

    def forget(self) -> None:
        """Forget all values and ranks."""
        self.__init__()  # type: ignore[misc]

    def ask(self, client: int, content: bytes, answer: Answer) -> None:
        """Act on a request of a rank: delete a key, set one, and wait for others; each may be absent.

        Raises:
            ValueError: it is none.
        """
        deleted, key, value, wanted = unpack(content)
        if deleted is None or key is None or value is None or wanted is None:
            raise ValueError("not a request")
        self._values.pop(deleted.decode(), None)
        if key:
            self._set(key.decode(), value)
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
        self._waits.clear()
        self._missed_by.clear()
        self._wait_of.clear()

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for wait in self._missed_by.pop(key, ()):
            self._found(wait, key)

    def _wait(self, client: int, content: bytes, answer: Answer) -> None:
        wait = self._waits.get(content)
        is_new = wait is None
        if wait is None:
            wait = self._waits[content] = _Wait(content)
        wait.answers[client] = answer
        self._wait_of[client] = wait
        if not is_new:
            return
        for key, owner in wait.owners.items():
            if key not in self._values and not (wait.wanted.living and owner in self._ended):
                wait.missing[key] = owner
                self._missed_by.setdefault(key, []).append(wait)
        if self._ended.intersection(wait.missing.values()):
            self._finish(wait, MISSING)
        elif not wait.missing:
            self._finish(wait, VALUES)

    def _found(self, wait: _Wait, key: str) -> None:
        wait.missing.pop(key)
        if not wait.missing:
            self._finish(wait, VALUES)

    def _finish(self, wait: _Wait, kind: int) -> None:
        content = pack([self._values.get(key) for key in wait.owners]) if kind == VALUES else self._report(wait)
        self._remove(wait)
        for client, answer in wait.answers.items():
            self._wait_of.pop(client, None)
            answer(kind, content)

    def _remove(self, wait: _Wait) -> None:
        del self._waits[wait.content]
        for key in wait.missing:
            self._not_missed(wait, key)

    def _not_missed(self, wait: _Wait, key: str) -> None:
        waits = self._missed_by[key]
        waits.remove(wait)
        if not waits:
            del self._missed_by[key]

    def _report(self, wait: _Wait) -> bytes:
        lines = []
        for key, rank in wait.missing.items():
            host, pid = self._processes.get(rank, ("", 0))
            lines.append(f"{rank} {int(rank in self._ended)} {pid} {host or '-'} {key}")
        return "\n".join(lines).encode()


def missing_of(content: bytes) -> list[Missing]:
    """Local. The keys in an answer of kind `MISSING`; raises a ValueError if it cannot be read."""
    found = []
    for line in content.decode().splitlines():
        rank, ended, pid, host, key = line.split(" ", 4)
        found.append(Missing(key, int(rank), ended == "1", "" if host == "-" else host, int(pid)))
    return found


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
        """Local. Give all clients a reason to give up, now or when they next wait, if they are still there."""
        self.values.cancel()
        for link in list(self._clients.values()):
            self._send(link, FAILED, text.encode())

    def _admitted(self, link: Link) -> None:
        self._clients[link.rank] = link
        link.socket.setblocking(False)
        self.values.come(link.rank, link.host, link.pid)

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
            if length > _MOST_BYTES or kind not in (ASK, GIVE_UP):
                self._end_link(link)
            elif len(received) < end:
                break
            else:
                content = bytes(received[FRAME.size : end])
                del received[:end]
                self._act(link, kind, content)

    def _act(self, link: Link, kind: int, content: bytes) -> None:
        if kind == GIVE_UP:
            self.values.give_up(link.rank)
            return
        try:
            self.values.ask(link.rank, content, lambda kind, content: self._send(link, kind, content))
        except ValueError:  # of another version
            self._end_link(link)

    # -- what a client is slow to read -----------------------------------------------------------------------------
    def _send(self, link: Link, kind: int, content: bytes) -> None:
        if link.socket.fileno() < 0:
            return
        parts = self._unsent.setdefault(link, [])
        parts += [memoryview(FRAME.pack(kind, len(content))), memoryview(content)]
        self._flush(link)

    def _flush(self, link: Link) -> None:
        parts = self._unsent.get(link, [])
        link.socket.setblocking(False)
        try:
            while parts:
                sent = link.socket.send(parts[0])
                parts[0] = parts[0][sent:]
                if not parts[0]:
                    del parts[0]
        except BlockingIOError:
            self._watch(link, selectors.EVENT_READ | selectors.EVENT_WRITE)
            return
        except OSError:  # its end is noticed when it is read
            pass
        if self._unsent.pop(link, None) is not None:
            self._watch(link, selectors.EVENT_READ)

    def _watch(self, link: Link, events: int) -> None:
        if (registered := self._selector.get_map().get(link.socket)) and registered.events != events:
            self._selector.modify(link.socket, events, registered.data)

    def _read(self, link: Link) -> None:
        if link in self._unsent:
            self._flush(link)
        super()._read(link)

    def _drop(self, link: Link) -> None:
        self._unsent.pop(link, None)
        super()._drop(link)
