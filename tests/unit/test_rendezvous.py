"""How the ranks of one host find each other, and what they say when they do not."""

import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from distopt.errors import LaunchError
from distopt.launch import gate, sockets
from distopt.launch.rendezvous import host_group as rendezvous
from distopt.launch.rendezvous.host_group import HostGroup
from tests.conformance.ranks import LocalJob, run_ranks, run_ranks_ok
from tests.unit import threads
from tests.unit.refusals import refused

pytestmark = pytest.mark.usefixtures("no_siblings")


@pytest.fixture
def ticket() -> bytes:
    return secrets.token_bytes(16)


def in_threads(*bodies: Callable[[], Any] | tuple[Any, ...]) -> list[Any]:
    """The same, and groups are closed; the arguments of a group stand for one that joins."""
    results = threads.in_threads(*(body if callable(body) else partial(HostGroup, *body) for body in bodies))
    for result in results:
        if isinstance(result, HostGroup):
            result.close()
    return results


def connect(link: socket.socket, ticket: bytes) -> None:
    """Connect to rank 0, once it listens."""
    while link.connect_ex(rendezvous._address(ticket)):
        time.sleep(0.01)


def exchange(job: LocalJob) -> tuple[Any, ...]:
    rank, size = job.topology.rank, job.topology.world_size
    group = job.host_group()
    for round_ in range(2):
        payloads = [bytes([q, round_]) * (q * 70_000) for q in range(size)]
        assert group.client.all_gather(payloads[rank]) == payloads
    fd = group.share_fd(lambda: os.memfd_create("test"))
    os.pwrite(fd, bytes([rank + 1]), rank)
    group.client.all_gather(b"")
    seen = group.pids, os.pread(fd, 100, 0), os.get_inheritable(fd)
    os.close(fd)
    return os.getpid(), seen


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_exchange_bytes_and_a_descriptor(size: int) -> None:
    results = run_ranks_ok(exchange, size)
    pids = tuple(pid for pid, _ in results)
    assert [seen for _, seen in results] == [(pids, bytes(range(1, size + 1)), False)] * size


def test_the_ticket_cannot_be_read_off_the_socket_of_which_nothing_is_left(ticket: bytes) -> None:
    address = rendezvous._address(ticket)
    assert address.startswith("\0distopt-")
    assert ticket.hex() not in address
    assert rendezvous._address(secrets.token_bytes(16)) != address
    groups = in_threads((ticket, 0, 2, 60), (ticket, 1, 2, 60))
    assert all(isinstance(group, HostGroup) for group in groups)
    refused(LaunchError, "", HostGroup, ticket, 0, 2, 0.1)
    assert rendezvous._address(ticket)[1:] not in Path("/proc/net/unix").read_text()


def test_absent_ranks_and_those_that_contradict_each_other_are_named(ticket: bytes) -> None:
    for error in in_threads((ticket, 0, 4, 2), (ticket, 2, 4, 2)):
        assert "ranks 1, 3 of 4 did not join rank 0 on this host within 2 s" in str(error)
    refused(LaunchError, r"rank 1 found no rank 0 on this host within 0\.3 s", HostGroup, ticket, 1, 2, 0.3)
    for error in in_threads((ticket, 0, 3, 60), (ticket, 1, 3, 60), (ticket, 1, 3, 60)):
        assert re.search("two processes .*are rank 1", str(error))
    for error in in_threads((ticket, 0, 3, 60), (ticket, 1, 2, 60)):
        assert "expects 2 ranks on this host, rank 0 expects 3" in str(error)


@pytest.mark.slow
def test_two_processes_with_rank_0(ticket: bytes) -> None:
    first, second, joined = in_threads((ticket, 0, 3, 2), (ticket, 0, 3, 2), (ticket, 1, 3, 2))
    assert any("second rank 0" in str(error) for error in (first, second))
    assert isinstance(joined, LaunchError)


def test_a_rank_0_about_to_listen_is_no_other_user(ticket: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(rendezvous._address(ticket))
        monkeypatch.setattr(sockets.time, "sleep", lambda _: other.listen())
        refused(LaunchError, "second rank 0", HostGroup, ticket, 0, 2, 60)


def test_strangers_impostors_and_other_users_are_not_let_in(ticket: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    # It can reach the socket, but its proof is wrong; the ranks of the job are not disturbed.
    wrong = secrets.token_bytes(16)
    address = rendezvous._address(ticket)
    monkeypatch.setattr(rendezvous, "_address", lambda *_: address)
    late = lambda: time.sleep(0.7) or HostGroup(ticket, 1, 2, 60)  # noqa: E731
    stranger, *groups = in_threads((wrong, 1, 2, 0.5), (ticket, 0, 2, 60), late)
    assert isinstance(stranger, LaunchError)
    assert all(isinstance(group, HostGroup) for group in groups), groups
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()

        def impostor() -> None:
            link, _ = listener.accept()
            with link:
                link.sendall(bytes(32))
                link.recv(1000)
                link.sendall(gate.proof(wrong, b"accept"))

        result, _ = in_threads((ticket, 1, 2, 60), impostor)
    assert "does not hold its ticket" in str(result)
    user = os.geteuid()
    listener_sees = {"rank 0": user + 1}
    monkeypatch.setattr(rendezvous.os, "geteuid", lambda: listener_sees.get(threading.current_thread().name, user))

    def rank_0() -> HostGroup:
        threading.current_thread().name = "rank 0"
        return HostGroup(ticket, 0, 2, 0.5)

    errors = in_threads(rank_0, (ticket, 1, 2, 0.5))
    assert "did not join" in str(errors[0])
    assert isinstance(errors[1], LaunchError)


def test_a_silent_client_is_dismissed_in_its_own_time(ticket: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_HANDSHAKE_SECONDS", 0.3)
    dismissed = threading.Event()

    def silent() -> bytes:
        with socket.socket(socket.AF_UNIX) as link:
            connect(link, ticket)
            link.settimeout(60)
            assert len(link.recv(32)) == 32
            try:
                return link.recv(1)  # while rank 0 still waits, the other end closes it
            finally:
                dismissed.set()

    def rank_1() -> HostGroup:
        dismissed.wait()
        monkeypatch.setattr(gate, "_HANDSHAKE_SECONDS", 60.0)
        return HostGroup(ticket, 1, 2, 60)

    got, *groups = in_threads(silent, (ticket, 0, 2, 90), rank_1)
    assert got == b""
    assert all(isinstance(group, HostGroup) for group in groups), groups


def test_a_rank_that_ends_while_joining_is_noticed(ticket: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    admitted, admit = threading.Event(), rendezvous._Server._admitted
    monkeypatch.setattr(rendezvous._Server, "_admitted", lambda *them: admit(*them) or admitted.set())
    code = "from distopt.launch.rendezvous.host_group import HostGroup; "
    code += f"HostGroup(bytes.fromhex('{ticket.hex()}'), 1, 3, 200)"
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", code], dict(os.environ))

    def kill() -> None:
        admitted.wait(200)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    error, _ = in_threads((ticket, 0, 3, 200), kill)
    assert f"rank 1 (pid {child}) ended while the ranks were joining" in str(error)


def rank_0_fails_to_share(job: LocalJob) -> None:
    job.host_group().share_fd(Mock(side_effect=OSError("no memory")))


def test_all_ranks_learn_that_nothing_could_be_shared() -> None:
    first, second = run_ranks(rank_0_fails_to_share, 2)
    assert (first.error, second.error) == ("OSError", "LaunchError")
    assert "no memory" in second.text
