"""The key-value client over each of its servers, and the values beside an oracle."""

import contextlib
import os
import random
import re
import resource
import secrets
import signal
import socket
import threading
import time
from functools import partial

import pytest

from distopt.errors import LaunchError
from distopt.launch.end_together.lifeline import reach, start_server
from distopt.launch.gate import FOR_KEYS
from distopt.launch.keys import MISSING, VALUES, Missing, Values, Wanted, pack, request, unpack
from distopt.launch.rendezvous.host_group import HostGroup
from distopt.launch.rendezvous.key_value import LocalClient, RemoteClient, client_alone
from distopt.launch.sockets import listen
from tests.unit.refusals import refused
from tests.unit.threads import in_threads

HOST = socket.gethostname()
ME = rf"\(host {HOST}, pid {os.getpid()}\)"

pytestmark = pytest.mark.usefixtures("no_siblings")


# -- servers: each gives clients of ranks 0 to size - 1 of one job ----------------------------------------------------
class OfHost:
    """Rank 0 serves."""

    def __init__(self, size):
        self._size, self._ticket = size, secrets.token_bytes(16)
        self._groups = []

    def client(self, rank, seconds=60.0):
        self._groups.append(group := HostGroup(self._ticket, rank, self._size, 60.0))
        group.client.seconds = seconds
        return group.client

    def close(self):
        for group in self._groups:
            group.close()


class OverTcp:
    """The process that rank 0 of a job starts."""

    def __init__(self, size, seconds=60.0, patience=0.2):
        self._size, self._seconds, self._patience, self.key = size, seconds, patience, secrets.token_bytes(32)
        with listen(0, 2 * size + 16) as listener:
            self._port = listener.getsockname()[1]
            self.process = start_server(listener, self.key, size, seconds, end_together=False)
        self.clients = []

    def link(self, rank, size, key):
        return reach([("localhost", self._port)], key, FOR_KEYS, rank, size, self._patience, "a test")

    def client(self, rank, seconds=None):
        link, ranks = self.link(rank, self._size, self.key), range(self._size)
        self.clients.append(client := RemoteClient(link, rank, ranks, seconds or self._seconds, "the server"))
        return client

    def close(self):
        self.process.kill()
        self.process.wait()
        for client in self.clients:
            client.close()


SERVERS = [OfHost, OverTcp]


def in_ranks(server, ranks, body, seconds=60.0):
    """Run `body(client)` in a thread for each rank; its results or LaunchErrors, by rank."""
    bodies = [lambda rank=rank: body(server.client(rank, seconds)) for rank in ranks]
    return dict(zip(ranks, in_threads(*bodies), strict=True))


@pytest.fixture
def server():
    with contextlib.closing(OverTcp(2)) as server:
        yield server


# -- what ranks get ----------------------------------------------------------------------------------------------------
def payload(rank, number):
    return bytes([rank, number, 255, 0]) * (rank * 30_000 + number)


def gathers(client, size):
    """Every rank gets what it expects of the others, in several rounds and by several means."""
    rank, ranks = client.rank, range(size)
    for number in range(4):
        assert client.all_gather(payload(rank, number)) == [payload(q, number) for q in ranks]
    client.set(f"own/{rank}", payload(rank, 7))
    assert client.gather("own/") == [payload(q, 7) for q in ranks]
    some = [size - 1, 0]
    assert client.gather("own/", some) == [payload(q, 7) for q in some]
    client.barrier()
    client.set(f"own/{rank}", b"again")
    client.barrier()
    assert client.gather("own/") == [b"again"] * size
    assert client.get(f"own/{size - 1}") == b"again"
    client.barrier()
    client.delete(f"own/{rank}")
    client.delete("nothing has this name")
    client.barrier()
    client.set(f"own/{rank}", payload(rank, 8))
    assert client.gather("own/") == [payload(q, 8) for q in ranks]
    if rank in some:
        part = client.within("part", some)
        for number in range(3):
            assert part.all_gather(payload(rank, number)) == [payload(q, number) for q in some]
        part.close()
    client.barrier()
    return "well"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", SERVERS)
def test_ranks_get_what_others_have_set(kind, size):
    with contextlib.closing(kind(size)) as server:
        assert in_ranks(server, range(size), partial(gathers, size=size)) == dict.fromkeys(range(size), "well")


def test_one_rank_needs_no_server_and_one_that_comes_last_does_not_wait():
    client = client_alone(0.3)
    assert client.all_gather(b"x") == [b"x"]
    client.set("key", b"value")
    assert client.get("key") == b"value"
    client.delete("key")
    refused(LaunchError, r"waits in the set-up of the job for the key 'key', for 0.3 s", client.get, "key")
    said = "16777217 bytes are too many for the setup of a job"
    refused(LaunchError, said, client_alone(1.0).set, "key", bytes((16 << 20) + 1))
    values, waited = Values(), []
    client = LocalClient(0, range(2), 60.0, values, lambda _, waits: waited.append(waits) or True, pytest.fail)
    values.ask(1, request("", "1/1", b"of 1", None), pytest.fail)
    assert client.all_gather(b"of 0") == [b"of 0", b"of 1"]
    assert waited == [False]
    for number in (2, 3):
        values.ask(1, request("", f"{number}/1", b"", None), pytest.fail)
        client.all_gather(b"")
    answers = []
    values.ask(1, request("", "", b"", Wanted("1/", [0])), lambda kind, _: answers.append(kind))
    values.give_up(1)
    assert answers == [MISSING], "what all have read is gone"


# -- those who do not come, and those who end --------------------------------------------------------------------------
def test_a_rank_that_does_not_come_is_named():
    with contextlib.closing(OverTcp(4)) as server:
        results = in_ranks(server, [0, 2], lambda client: client.all_gather(b"x"), 0.5)
    for rank in (0, 2):
        assert re.search(rf"rank {rank} \(pid .*\) waits .* for ranks 1, 3 of 4, for 0.5 s", str(results[rank]))


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("kind", SERVERS)
def test_a_rank_that_has_come_and_sets_nothing_is_named(kind, ends):
    def wait(client):
        client.barrier()
        if client.rank != 1:
            client.set(f"key/{client.rank}", payload(client.rank, 1))
            return client.gather("key/")
        if ends:
            time.sleep(0.3)
            client.link.shutdown(socket.SHUT_RDWR)  # as the end of its process
        return None

    with contextlib.closing(kind(3)) as server:
        results = in_ranks(server, range(3), wait, 60.0 if ends else 1.5)
    said = f"rank 1 {ME} ended while the ranks were setting up" if ends else f"for rank 1 {ME}, for 1.5 s"
    for rank in (0, 2):
        assert re.search(said, str(results[rank]))


def test_a_forked_child_does_not_hide_the_end_of_its_rank_which_may_come_back(server):
    first, second = server.client(0), server.client(1)
    second.set("key/1", b"before")
    assert first.get("key/1") == b"before"
    child = os.fork()
    if not child:
        time.sleep(100.0)
        os._exit(0)
    try:
        second.close()
        refused(LaunchError, rf"rank 1 {ME} ended", first.gather, "other/", [1])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    again = server.client(1)
    threading.Timer(0.2, partial(again.set, "other/1", b"after")).start()
    assert first.gather("other/", [1]) == [b"after"]
    again.close()


def test_others_are_not_let_in_and_the_end_of_the_server_is_noticed(server):
    client = server.client(0)
    refused(LaunchError, "found no rank 0", server.link, 1, 2, bytes(32))
    refused(LaunchError, "expects 3 ranks, rank 0 expects 2", server.link, 1, 3, server.key)
    refused(LaunchError, "is not the only one of that rank", server.link, 0, 2, server.key)
    threading.Timer(0.2, server.close).start()
    refused(LaunchError, "ended while the ranks were setting up", client.gather, "key/")
    client.close()


# -- the values, beside an oracle --------------------------------------------------------------------------------------
class Oracle:
    """As `Values`, by looking at everything after every event."""

    def __init__(self):
        self.values, self.waits, self.ended, self.answers = {}, {}, set(), []

    def look(self, gives_up=None):
        for client, wanted in list(self.waits.items()):
            absent = [rank for key, rank in wanted.owners().items() if key not in self.values]
            if not absent or client == gives_up or self.ended & {*absent}:
                found = sorted(absent) or [self.values[key] for key in wanted.owners()]
                self.answers.append((client, found))
                del self.waits[client]


@pytest.mark.slow(kept=2)
@pytest.mark.parametrize("seed", range(20))
def test_values_against_an_oracle(seed):
    draw, values, oracle = random.Random(seed), Values(), Oracle()
    answers = []

    def answer(client, kind, content):
        assert kind in (VALUES, MISSING)
        found = unpack(content) if kind == VALUES else sorted(one.rank for one in Missing.all_of(content))
        answers.append((client, found))

    for rank in range(5):
        values.come(rank, rank + 100, HOST)
    for number in range(600):
        client = draw.randrange(5)
        what = draw.choice(["set", "set", "delete", "wait", "wait", "give up", "end", "come"])
        if what == "end":
            values.end(client)
            oracle.ended.add(client)
            oracle.look(gives_up=client)
        elif what == "come":
            values.come(client, client + 100, HOST)
            oracle.ended.discard(client)
        elif what == "give up":
            values.give_up(client)
            oracle.look(gives_up=client)
        else:
            key = f"{draw.choice('ab')}/{client}"
            wanted = None
            if what == "wait" and client not in oracle.waits:
                ranks = draw.choice([range(5), range(2, 4), [4, 0], [client], ()])
                wanted = Wanted(f"{draw.choice('ab')}/" if ranks else key, ranks)
            deleted = f"{draw.choice('ab')}/{client}" if what == "delete" else ""
            value = b"%d" % number
            asked = request(deleted, "" if what == "delete" else key, value, wanted)
            values.ask(client, asked, partial(answer, client))
            oracle.values.pop(deleted, None)
            if what != "delete":
                oracle.values[key] = value
            oracle.look()
            if wanted is not None:
                oracle.waits[client] = wanted
        oracle.look()
        assert sorted(answers, key=repr) == sorted(oracle.answers, key=repr), (number, what)


def test_a_wait_is_read_as_it_was_written_and_what_is_no_message_is_refused():
    for wanted in (Wanted("a b/", range(7)), Wanted("x/", [5, 2]), Wanted("k"), Wanted("k", [3])):
        read = Wanted.from_bytes(wanted.to_bytes())
        assert (read.prefix, list(read.ranks)) == (wanted.prefix, list(wanted.ranks))
    for content in (b"", b"\0\0\0\2abc", pack([b"a"])[:-1], pack([b"a", b""]) + b"x"):
        refused(ValueError, r"lengths|buffer|unpack", unpack, content)


# -- many --------------------------------------------------------------------------------------------------------------
@pytest.mark.slow(rest=0)
@pytest.mark.timeout(600)
def test_four_thousand_clients():
    """The server starts with the 1,024 files that a shell gives it, and raises the limit itself."""
    size, (soft, hard) = 4000, resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < size + 200:
        pytest.skip(f"a process may open {hard} files here")
    expected = [b"%d" % rank for rank in range(size)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        server = OverTcp(size, 300.0, 60.0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, size + 200), hard))
        *others, last = map(server.client, range(size))
        for number in range(3):
            wanted = Wanted(f"{number}/", range(size))
            for one in others:
                one._send(0, request("", f"{number}/{one.rank}", expected[one.rank], wanted))
            if number == 2:
                last.close()
            else:
                assert last._exchange("", f"{number}/{last.rank}", expected[-1], wanted) == expected
            for one in others:
                kind, content = one._receive(300.0)
                if number == 2:
                    assert (kind, Missing.all_of(content)) == (MISSING, [Missing(size - 1, True, os.getpid(), HOST)])
                else:
                    assert (kind, unpack(content)) == (VALUES, expected)
        for one in others:
            one.close()
        assert server.process.wait(60.0) == 0
    finally:
        server.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_without_files_says_so():
    with contextlib.closing(OverTcp(40, patience=1.0)) as server:
        with contextlib.suppress(LaunchError):  # it has ended
            for rank in range(16):
                server.client(rank)
                if rank == 2:
                    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (16, 16))
        error = "may open 16 files, too few for 40 ranks; raise ulimit -n"
        refused(LaunchError, error, server.clients[0].all_gather, b"")
