"""The key-value client over each of its servers, and the values beside an oracle."""

import contextlib
import os
import random
import resource
import secrets
import selectors
import signal
import socket
import threading
import time
from functools import partial

import pytest

from distopt.errors import LaunchError
from distopt.launch.agents.node import NO_RANK, Node
from distopt.launch.agents.options import RunOptions
from distopt.launch.agents.owner import Owner
from distopt.launch.agents.variables import secret_of_ranks
from distopt.launch.end_together import siblings
from distopt.launch.end_together.lifeline import reach, start_server
from distopt.launch.end_together.server import Server
from distopt.launch.gate import FOR_KEYS
from distopt.launch.keys import MISSING, VALUES, Missing, Values, Wanted, pack, unpack
from distopt.launch.launchers import LauncherInfo
from distopt.launch.launchers.distopt_run import ENDPOINT
from distopt.launch.rendezvous.host_group import HostGroup
from distopt.launch.rendezvous.key_value import (
    LocalClient,
    RemoteClient,
    _request,
    client_alone,
    client_of_endpoint,
)
from distopt.launch.sockets import handle_events, listen

HOST = socket.gethostname()
ME = rf"\(host {HOST}, pid {os.getpid()}\)"


@pytest.fixture(autouse=True)
def no_siblings(monkeypatch):
    """The other workers of pytest-xdist are siblings of this process, and may end."""
    monkeypatch.setattr(siblings, "_seen", set())
    monkeypatch.setattr(siblings, "_siblings", lambda: (set(), set()))


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
    """The process that rank 0 of a job starts; here a thread."""

    def __init__(self, size):
        self._size, self._key = size, secrets.token_bytes(32)
        listener = listen(0, size)
        self._port = listener.getsockname()[1]
        self.server = Server(listener, self._key, size, 60.0, os.getppid(), end_together=False)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()
        self._clients = []

    def link(self, rank, size, key):
        return reach([("localhost", self._port)], key, FOR_KEYS, rank, size, 0.2, "a test")

    def client(self, rank, seconds=60.0):
        link = self.link(rank, self._size, self._key)
        self._clients.append(client := RemoteClient(link, rank, range(self._size), seconds, "the server"))
        return client

    def close(self):
        self.server._ended = True
        self._thread.join(60.0)
        for client in self._clients:
            client.close()


class AtEndpoint:
    """The owner of the endpoint of `distopt run` on two nodes."""

    def __init__(self, size):
        self._size, self._key = size, secrets.token_bytes(32)
        self._selector = selectors.DefaultSelector()
        options = RunOptions(("python",), ranks=size, nodes=2, spare_nodes=1, heal=True, port=0)
        own = Node(HOST, os.getpid(), NO_RANK, self._take, "127.0.0.1")
        self.owner = Owner(own, options, self._key, self._selector, print)
        listener = listen(0, size)
        self._port = listener.getsockname()[1]
        self.owner.listen(listener)
        self.orders, self._clients = [], []
        self.say("hello", ranks=size, spare=0, attempt=-1)
        self.owner._came_at = -1e9  # the other node does not come
        self.owner.check_times()
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _take(self, order):
        self.orders.append(order)

    def say(self, say, **content):
        self.owner.say({"say": say, "port": 1, "steps": [0] * self._size, "failures": [], "signals": [], **content})

    def _run(self):
        while not self._stops.is_set():
            handle_events(self._selector, 0.05)

    def client(self, rank, seconds=60.0, *, size=None):
        salt = next(order["salt"] for order in self.orders if order["do"] == "start")
        env = {
            ENDPOINT: f"localhost:{self._port}",
            "DISTOPT_JOB_SECRET": secret_of_ranks(self._key, salt).hex(),
        }
        info = LauncherInfo("", rank, size or self._size, None, None, "")
        self._clients.append(client := client_of_endpoint(info, seconds, env))
        return client

    def close(self):
        for client in self._clients:
            client.close()
        self._stops.set()
        self._thread.join(60.0)
        self.owner.close()
        self._selector.close()


SERVERS = [OfHost, OverTcp, AtEndpoint]


@contextlib.contextmanager
def served(kind, size):
    server = kind(size)
    try:
        yield server
    finally:
        server.close()


def in_ranks(server, ranks, body, seconds=60.0):
    """Run `body(client)` in a thread for each rank; its results or LaunchErrors, by rank."""
    results = {}

    def run(rank):
        try:
            results[rank] = body(server.client(rank, seconds))
        except LaunchError as error:
            results[rank] = error
        except BaseException as error:
            results[rank] = error
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    return results


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
    with served(kind, size) as server:
        assert in_ranks(server, range(size), partial(gathers, size=size)) == dict.fromkeys(range(size), "well")


def test_one_rank_needs_no_server():
    client = client_alone(0.3)
    assert client.all_gather(b"x") == [b"x"]
    client.set("key", b"value")
    assert client.get("key") == b"value"
    client.delete("key")
    with pytest.raises(LaunchError, match=r"waits in the set-up of the job for the key 'key', for 0.3 s"):
        client.get("key")


def test_values_that_are_too_long_are_refused():
    with pytest.raises(LaunchError, match="16777217 bytes are too many for the setup of a job"):
        client_alone(1.0).set("key", bytes((16 << 20) + 1))


def test_a_server_that_comes_last_does_not_wait():
    values, waited = Values(), []

    def serve(_, waits):
        waited.append(waits)
        return True

    client = LocalClient(0, range(2), 60.0, values, serve, pytest.fail)
    values.ask(1, _request("", "1/1", b"of 1", None), pytest.fail)
    assert client.all_gather(b"of 0") == [b"of 0", b"of 1"]
    assert waited == [False]


# -- those who do not come, and those who end --------------------------------------------------------------------------
def misses_the_last(client, size, *, sets=True):
    if client.rank == size - 1:
        client.barrier()
        return None
    if sets:
        client.set(f"key/{client.rank}", b"")
    client.barrier()
    return client.gather("key/")


@pytest.mark.parametrize("kind", SERVERS)
def test_a_rank_that_has_come_and_sets_nothing_is_named(kind):
    with served(kind, 3) as server:
        results = in_ranks(server, range(3), partial(misses_the_last, size=3), 1.5)
    for rank in range(2):
        with pytest.raises(LaunchError, match=rf"for rank 2 {ME}, for 1.5 s"):
            raise results[rank]


@pytest.mark.parametrize("kind", [OverTcp, AtEndpoint])
def test_a_rank_that_does_not_come_is_named(kind):
    with served(kind, 4) as server:
        results = in_ranks(server, [0, 2], lambda client: client.all_gather(b"x"), 0.5)
    for rank in (0, 2):
        with pytest.raises(LaunchError, match=rf"rank {rank} \(pid .*\) waits .* for ranks 1, 3 of 4, for 0.5 s"):
            raise results[rank]


def ends_or_waits(client, waited_for):
    if client.rank == 1:
        client.barrier()
        if isinstance(client, RemoteClient):
            time.sleep(0.3)
            client.link.shutdown(socket.SHUT_RDWR)  # as the end of its process
        return None
    client.barrier()
    return waited_for(client)


@pytest.mark.parametrize("kind", [OfHost, OverTcp, AtEndpoint])
@pytest.mark.parametrize("living", [False, True])
def test_a_rank_that_ends_is_noticed(kind, living):
    def wait(client):
        client.set(f"key/{client.rank}", payload(client.rank, 1))
        return client.gather_living("key/") if living else client.gather("key/")

    with served(kind, 3) as server:
        results = in_ranks(server, range(3), partial(ends_or_waits, waited_for=wait))
    for rank in (0, 2):
        if living:
            assert results[rank] == {q: payload(q, 1) for q in (0, 2)}
        else:
            with pytest.raises(LaunchError, match=rf"rank 1 {ME} ended while the ranks were setting up"):
                raise results[rank]


def test_a_forked_child_does_not_hide_the_end_of_its_rank():
    with served(OverTcp, 2) as server:
        first, second = server.client(0), server.client(1)
        child = os.fork()
        if not child:
            time.sleep(100.0)
            os._exit(0)
        try:
            second.close()
            with pytest.raises(LaunchError, match=rf"rank 1 {ME} ended"):
                first.gather("key/", [1])
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.mark.parametrize("kind", [OverTcp, AtEndpoint])
def test_a_rank_may_come_back(kind):
    with served(kind, 2) as server:
        first, second = server.client(0), server.client(1)
        second.set("key/1", b"before")
        assert first.get("key/1") == b"before"
        second.close()
        assert first.gather_living("other/", [1]) == {}
        with pytest.raises(LaunchError, match=r"rank 1 .* ended"):
            first.gather("other/", [1])
        again = server.client(1)
        threading.Timer(0.2, partial(again.set, "other/1", b"after")).start()
        assert first.gather("other/", [1]) == [b"after"]
        again.close()


@pytest.mark.parametrize("kind", [OverTcp, AtEndpoint])
def test_the_end_of_the_server_is_noticed(kind):
    with served(kind, 2) as server:
        client = server.client(0)
        threading.Timer(0.2, server.close).start()
        with pytest.raises(LaunchError, match="ended while the ranks were setting up"):
            client.gather("key/")
        client.close()


def test_others_are_not_let_in():
    with served(OverTcp, 2) as server:
        server.client(0)
        with pytest.raises(LaunchError, match="found no rank 0"):
            server.link(1, 2, bytes(32))
        with pytest.raises(LaunchError, match="expects 3 ranks, rank 0 expects 2"):
            server.link(1, 3, server._key)
        with pytest.raises(LaunchError, match="is not the only one of that rank"):
            server.link(0, 2, server._key)


def test_the_owner_forgets_values_when_all_ranks_start_again():
    with served(AtEndpoint, 2) as server:
        client = server.client(0, 0.2)
        client.set("key", b"value")
        assert client.get("key") == b"value"
        with pytest.raises(LaunchError, match="it is not, or not the only, such rank"):
            server.client(0, size=3)
        with pytest.raises(LaunchError, match="it is not, or not the only, such rank"):
            server.client(0)
        failure = {"rank": 0, "code": 1, "text": "it failed", "is_consequence": False}
        server.say("stepped", step=3)
        server.say("ended", failures=[failure], steps=[3, 3])
        assert [order["do"] for order in server.orders] == ["start", "end", "start"]
        with pytest.raises(LaunchError, match="ended"):
            client.get("key")
        again = server.client(0, 0.2)
        with pytest.raises(LaunchError, match="for the key 'key'"):
            again.get("key")


def test_there_is_no_endpoint_on_one_node():
    with pytest.raises(LaunchError, match="DISTOPT_RUN_ENDPOINT is not set"):
        client_of_endpoint(LauncherInfo("distopt run", 0, 2, 0, 2, ""), 1.0, {})


# -- the values, beside an oracle --------------------------------------------------------------------------------------
class Oracle:
    """As `Values`, by looking at everything after every event."""

    def __init__(self):
        self.values, self.waits, self.ended, self.answers = {}, {}, set(), []

    def look(self):
        for client, wanted in list(self.waits.items()):
            absent = {k: q for k, q in wanted.owners().items() if k not in self.values}
            if wanted.living:
                absent = {k: q for k, q in absent.items() if q not in self.ended}
            if not absent:
                self.answer(client, [self.values.get(key) for key in wanted.owners()])
            elif self.ended & {*absent.values()}:
                self.answer(client, sorted(absent.values()))

    def answer(self, client, what):
        if self.waits.pop(client, None) is not None:
            self.answers.append((client, what))

    def give_up(self, client):
        if (wanted := self.waits.get(client)) is not None:
            absent = {k: q for k, q in wanted.owners().items() if k not in self.values}
            living = {q for q in absent.values() if not (wanted.living and q in self.ended)}
            self.answer(client, sorted(living))


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
            oracle.look()
            oracle.give_up(client)
        elif what == "come":
            values.come(client, client + 100, HOST)
            oracle.ended.discard(client)
        elif what == "give up":
            values.give_up(client)
            oracle.give_up(client)
        else:
            key = f"{draw.choice('ab')}/{client}"
            wanted = None
            if what == "wait" and client not in oracle.waits:
                ranks = draw.choice([range(5), range(2, 4), [4, 0], [client], ()])
                wanted = Wanted(f"{draw.choice('ab')}/" if ranks else key, ranks, bool(ranks) and draw.random() < 0.5)
            deleted = f"{draw.choice('ab')}/{client}" if what == "delete" else ""
            value = b"%d" % number
            values.ask(
                client, _request(deleted, "" if what == "delete" else key, value, wanted), partial(answer, client)
            )
            oracle.values.pop(deleted, None)
            if what != "delete":
                oracle.values[key] = value
            oracle.look()
            if wanted is not None:
                oracle.waits[client] = wanted
        oracle.look()
        assert sorted(answers, key=repr) == sorted(oracle.answers, key=repr), (number, what)


@pytest.mark.parametrize(
    "wanted", [Wanted("a b/", range(7)), Wanted("x/", [5, 2], living=True), Wanted("k"), Wanted("k", [3])]
)
def test_a_wait_is_read_as_it_was_written(wanted):
    read = Wanted.from_bytes(wanted.to_bytes())
    assert (read.prefix, list(read.ranks), read.living) == (wanted.prefix, list(wanted.ranks), wanted.living)


@pytest.mark.parametrize("content", [b"", b"\0\0\0\2abc", pack([b"a"])[:-1], pack([b"a", None]) + b"x"])
def test_what_is_no_message_is_refused(content):
    with pytest.raises(ValueError, match=r"lengths|buffer|unpack"):
        unpack(content)


# -- many --------------------------------------------------------------------------------------------------------------
@pytest.fixture
def files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
@pytest.mark.sweep(rest=0)
@pytest.mark.timeout(600)
def test_four_thousand_clients(files):
    """The server starts with the 1,024 files that a shell gives it, and raises the limit itself."""
    size, (soft, hard) = 4000, files
    if 0 <= hard < size + 200:
        pytest.skip(f"a process may open {hard} files here")
    with listen(0, 2 * size + 16) as listener:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        key, port = secrets.token_bytes(32), listener.getsockname()[1]
        server = start_server(listener, key, size, 600.0, end_together=False)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, size + 200), hard))
    clients = []
    try:
        for rank in range(size):
            link = reach([("localhost", port)], key, FOR_KEYS, rank, size, 60.0, "a test")
            clients.append(RemoteClient(link, rank, range(size), 300.0, "the server"))
        expected = [b"%d" % rank for rank in range(size)]
        for number in range(2):
            wanted = Wanted(f"{number}/", range(size))
            for client in clients[:-1]:
                client._send(0, _request("", f"{number}/{client.rank}", expected[client.rank], wanted))
            last = clients[-1]
            assert last._exchange("", f"{number}/{last.rank}", expected[-1], wanted) == expected
            for client in clients[:-1]:
                kind, content = client._receive(300.0)
                assert kind == VALUES
                assert unpack(content) == expected
        wanted = Wanted("2/", range(size))
        for client in clients[:-1]:
            client._send(0, _request("", f"2/{client.rank}", b"", wanted))
        clients[-1].close()
        for client in clients[:-1]:
            kind, content = client._receive(300.0)
            assert (kind, Missing.all_of(content)) == (MISSING, [Missing(size - 1, True, os.getpid(), HOST)])
    finally:
        for client in clients:
            client.close()
        assert server.wait(60.0) == 0


def test_a_server_without_files_says_so():
    size = 40
    with listen(0, 2 * size) as listener:
        key, port = secrets.token_bytes(32), listener.getsockname()[1]
        server = start_server(listener, key, size, 60.0, end_together=False)
    clients = []
    try:
        for rank in range(size):
            link = reach([("localhost", port)], key, FOR_KEYS, rank, size, 1.0, "a test")
            clients.append(RemoteClient(link, rank, range(size), 60.0, "the server"))
            if rank == 2:
                resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (16, 16))
            if rank == 15:
                break
    except LaunchError:  # it has ended
        pass
    with pytest.raises(LaunchError, match="may open 16 files, too few for 40 ranks; raise ulimit -n"):
        clients[0].all_gather(b"")
    for client in clients:
        client.close()
    server.wait(60.0)
