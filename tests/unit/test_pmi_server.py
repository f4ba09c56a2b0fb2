"""The key-value server of MPICH's ranks: its answers, its refusals, and its reports of lost ranks."""

import contextlib
import os
import socket
import threading

import pytest

from distopt.errors import LaunchError
from distopt.launch.end_together.server import Server
from distopt.launch.gate import proof
from distopt.launch.launchers import LauncherInfo
from distopt.launch.rendezvous import pmi
from distopt.launch.rendezvous.meeting import Meeting
from distopt.launch.rendezvous.pmi import Member, ports

KEY = os.getpid().to_bytes(32, "big")  # determines the ports: other workers have others


class Rank(Member):
    """A rank whose server another thread runs."""

    def _serve(self, info, place, timeout):
        del info, place, timeout

    def say(self, line):
        self._mpi.sendall(line.encode() + b"\n")

    def ask(self, line):
        self.say(line)
        return self.hear()

    def hear(self):
        heard = b""
        while not heard.endswith(b"\n"):
            part = self._mpi.recv(1)
            if not part:
                return None
            heard += part
        return heard.decode()[:-1]

    def told(self):
        return self._read_line()

    def hang_up(self):
        self._mpi.close()
        self.close()


def member(rank, size=2, key=KEY, timeout=60.0):
    info = LauncherInfo("srun", rank, size, None, None, "")
    return Rank(info, Meeting(key, False, "localhost", "NODES=localhost"), timeout)


def listener_of(key):
    """On the first of the key's ports that is free."""
    for port in ports(key):
        with contextlib.suppress(OSError):
            return socket.create_server(("", port))
    pytest.fail(f"all of {ports(key)} are taken")


@contextlib.contextmanager
def served(size=2, key=KEY, timeout=60.0):
    listener = listener_of(key)
    server = Server(listener, key, size, timeout, os.getppid())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        thread.join(60.0)
        listener.close()
        assert not thread.is_alive()


def join(size=2):
    """All ranks; each waits for the others to join."""
    joined = {}
    threads = [threading.Thread(target=lambda r=rank: joined.update({r: member(r, size)})) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return [joined[rank] for rank in range(size)]


def test_ranks_exchange_values():
    with served():
        ranks = join()
        for rank, one in enumerate(ranks):
            assert one.ask("cmd=init pmi_version=1 pmi_subversion=1").startswith("cmd=response_to_init pmi_version=1")
            assert one.ask("cmd=get_universe_size") == "cmd=universe_size size=2 rc=0"
            # No other key has this name: MPICH's files of two jobs on one host would be the same.
            name = proof(KEY, b"name")[:8].hex()
            assert one.ask("cmd=get_my_kvsname") == f"cmd=my_kvsname kvsname=distopt_{name} rc=0"
            assert one.ask(f"cmd=put kvsname=distopt key=card-{rank} value=a={rank}/b") == "cmd=put_result rc=0"
        ranks[0].say("cmd=barrier_in")
        ranks[0]._mpi.settimeout(0.2)
        with pytest.raises(TimeoutError):
            ranks[0].hear()
        ranks[0]._mpi.settimeout(60.0)
        ranks[1].say("cmd=barrier_in")
        assert [one.hear() for one in ranks] == ["cmd=barrier_out rc=0"] * 2
        assert ranks[0].ask("cmd=get kvsname=distopt key=card-1") == "cmd=get_result rc=0 value=a=1/b"
        assert ranks[0].ask("cmd=get kvsname=distopt key=none") == "cmd=get_result rc=-1"
        assert ranks[0].ask("cmd=frobnicate") == "cmd=frobnicate rc=-1"
        assert ranks[0].ask("cmd=finalize") == "cmd=finalize_ack rc=0"
        ranks[0].hang_up()  # after MPI_Finalize: no failure
        assert ranks[1].ask("cmd=get_appnum") == "cmd=appnum appnum=0 rc=0"
        assert ranks[1].ask("cmd=finalize") == "cmd=finalize_ack rc=0"
        ranks[1].hang_up()


def test_rank_that_has_told_of_its_failure_ends_the_others_with_its_code(capfd):
    with served():
        ranks = join()
        ranks[1].end_others(7)
        assert ranks[0].told() == "end 7 -1 "
        assert capfd.readouterr().err == ""
        for one in ranks:
            one.hang_up()


def test_abort_carries_the_exit_code():
    with served():
        ranks = join()
        ranks[1].say("cmd=abort exitcode=7")
        assert ranks[0].told() == "end 7 -1 "
        for one in ranks:
            one.hang_up()


def test_strangers_do_no_harm():
    with served() as port:
        address = ("localhost", port)
        strangers = [socket.create_connection(address) for _ in range(80)]
        for i, stranger in enumerate(strangers[40:]):
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * (10 * i))
        ranks = join()
        assert ranks[0].ask("cmd=get_universe_size") == "cmd=universe_size size=2 rc=0"
        for one in (*ranks, *strangers):
            one.hang_up() if isinstance(one, Rank) else one.close()


def test_another_job_does_not_get_in(monkeypatch):
    monkeypatch.setattr(pmi, "ports", lambda key: ports(KEY))
    with served():
        with pytest.raises(LaunchError, match=r"rank 1 of 2 on .* found no rank 0 at localhost \(NODES=localhost\)"):
            member(1, key=bytes(32), timeout=0.3)
        for one in join():
            one.hang_up()


def test_wrong_numbers_are_refused_with_the_reason():
    with served():
        ranks = join()
        with pytest.raises(LaunchError, match=r"refused this rank: rank 1 on .* is not the only one of that rank"):
            member(1)
        with pytest.raises(LaunchError, match=r"rank 2 on .* expects 3 ranks, rank 0 expects 2"):
            member(2, 3)
        for one in ranks:
            one.hang_up()


def test_rank_that_never_comes_is_named():
    with served(3, timeout=2.0), pytest.raises(LaunchError, match=r"ranks 1, 2 of 3 did not join within 2 s"):
        member(0, 3)


def test_unknown_host_of_rank_0():
    info = LauncherInfo("srun", 1, 2, None, None, "")
    with pytest.raises(LaunchError, match=r"cannot find the host of rank 0 \(NODES=nowhere.invalid\)"):
        Member(info, Meeting(KEY, False, "nowhere.invalid", "NODES=nowhere.invalid"), 5.0)
