"""The server of a job: its refusals, and its reports of lost ranks."""

import contextlib
import os
import re
import socket
import threading
from functools import partial

import pytest

from distopt.errors import LaunchError
from distopt.launch.end_together.server import Server
from distopt.launch.launchers import LauncherInfo
from distopt.launch.rendezvous.meeting import Meeting
from distopt.launch.rendezvous.member import Member, ports
from tests.unit.refusals import refused
from tests.unit.threads import in_threads

KEY = os.getpid().to_bytes(32, "big")  # determines the ports: other workers have others


class Rank(Member):
    """A rank whose server another thread runs."""

    def _serve(self, info, place, timeout):
        del info, place, timeout

    def told(self):
        return self._read_line()


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
    thread = threading.Thread(target=Server(listener, key, size, timeout, os.getppid()).run)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        thread.join(60.0)
        listener.close()
        assert not thread.is_alive()


def join(size=2):
    """All ranks; each waits for the others to join."""
    return in_threads(*(partial(member, rank, size) for rank in range(size)))


def test_the_job_goes_on_until_all_have_left():
    with served():
        ranks = join()
        ranks[0].leave()
        ranks[0].close()  # no failure
        ranks[1]._link.settimeout(0.2)
        refused(TimeoutError, "", lambda: ranks[1].told())
        ranks[1].leave()
        ranks[1]._link.settimeout(60.0)
        refused(ConnectionResetError, "", lambda: ranks[1].told())
        ranks[1].close()


def test_a_rank_that_ends_is_named_unless_it_has_told_of_its_failure(capfd):
    with served():
        ranks = join()
        ranks[1].close()
        said = rf"rank 1 on .* \(pid {os.getpid()}\) has ended before the others; see its output"
        assert re.fullmatch(rf"end 1 -1 {said}", ranks[0].told())
        ranks[0].close()
    assert re.fullmatch(rf"{said}\n", capfd.readouterr().err)
    with served():
        ranks = join()
        ranks[1].end_others(7)
        assert ranks[0].told() == "end 7 -1 "
        assert capfd.readouterr().err == ""
        for one in ranks:
            one.close()


def test_strangers_do_no_harm():
    with served() as port:
        strangers = [socket.create_connection(("localhost", port)) for _ in range(80)]
        for i, stranger in enumerate(strangers[40:]):
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * (i * i))
        for one in (*join(), *strangers):
            one.close()


def test_ranks_and_hosts_that_are_absent_are_named():
    with served(3, timeout=2.0), pytest.raises(LaunchError, match=r"ranks 1, 2 of 3 did not join within 2 s"):
        member(0, 3)
    info = LauncherInfo("srun", 1, 2, None, None, "")
    with pytest.raises(LaunchError, match=r"cannot find the host of rank 0 \(NODES=nowhere.invalid\)"):
        Member(info, Meeting(KEY, False, "nowhere.invalid", "NODES=nowhere.invalid"), 5.0)
